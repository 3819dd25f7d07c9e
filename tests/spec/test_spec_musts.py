"""Every place where the specification says "must": computed as it says on every execution, or refused by name.

The number in a test's name is the section of the language.  Executions: tile meaning, the CPU, and the simulator of the
program for sm_80 and for sm_90a.
"""

import ml_dtypes
import numpy as np
import pytest
from completed import caught
from everywhere import SM80, SM90A, WITH_HOPPER, call, cuda_text, everywhere, placed, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype
from tilelang.target import Target
from tilelang.transform.pipeline import lower

RNG = np.random.default_rng(33)


def ints(*shape):
    return RNG.integers(-9, 10, shape).astype(np.int32)


def everywhere_(program, *args):
    return everywhere(program, *args, on=WITH_HOPPER)


def refused(build, *kinds):
    """Every target refuses what `build()` makes by one of these kinds, at the latest when it is compiled."""
    for target in ("cpu", SM80, SM90A):
        with pytest.raises(TileLangError) as e:
            program = build()
            if target == "cpu":
                tilelang.compile(program, target="cpu")
            else:
                lower(program.func, Target(target), {})
        assert e.value.kind in kinds, (target, e.value.kind, str(e.value))


def right_or_refused(program, want, *args, kinds=(), on=WITH_HOPPER):
    """Each execution computes `want` as the last tensor, or refuses with one of the kinds.  Which of them computed."""
    computed = []
    for name in on:
        try:
            got = run(program() if not hasattr(program, "func") else program, *args, on=name)[-1]
        except TileLangError as e:
            assert e.kind in kinds, (name, e.kind, str(e))
            caught(e)
        else:
            np.testing.assert_array_equal(got, want, name)
            computed.append(name)
    return computed


# ---- 2 statements ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("must:2.3-rebound-constant")
@pytest.mark.spec("L2.3:rebind-constant")
@pytest.mark.parametrize("form", ["loop", "branch"])
def test_2_a_rebound_python_constant_that_is_read_later_is_refused(form):
    def build():
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32"), n: T.int32):
            with T.Kernel(1, threads=1):
                x = 0
                if form == "loop":
                    for _ in T.serial(4):
                        x = x + 1
                else:
                    if n > 2:
                        x = 1
                Y[0] = x

        return f

    refused(build, "loop-carried-value")


@pytest.mark.spec("must:2.3-range-once")
@pytest.mark.spec("L2.3:range")
def test_2_bounds_of_a_range_are_read_once():
    @T.prim_func
    def f(Y: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32", init=3)
            c = T.alloc_var("int32")
            for _ in range(n):
                n = n + 1
                c = c + 1
            Y[0] = c

    assert everywhere_(f)[0].tolist() == [3]


@pytest.mark.spec("must:2.3-range-step")
@pytest.mark.spec("L2.3:range")
@pytest.mark.parametrize("start,stop,step", [(10, 0, -3), (10, 1, -3), (0, 10, 4), (3, 3, -1), (0, -7, -2), (5, 9, 7)])
def test_2_a_run_time_step_is_pythons_or_refused(start, stop, step):
    @T.prim_func
    def f(a: T.int32, b: T.int32, s: T.int32, Y: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=1):
            k = T.alloc_var("int32")
            for i in range(a, b, s):
                Y[k] = i + 100
                k = k + 1

    want = np.zeros(16, np.int32)
    steps = list(range(start, stop, step))
    want[:len(steps)] = np.array(steps, np.int32) + 100
    assert right_or_refused(f, want, start, stop, step)


@pytest.mark.spec("must:2.3-return")
@pytest.mark.spec("L2.3:return")
def test_2_a_bare_return_under_a_condition_ends_the_thread_or_is_refused():
    @T.prim_func
    def f(Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            if t > 20:
                return
            Y[t] = t + 1

    want = np.arange(1, 33, dtype=np.int32)
    want[21:] = 0
    assert right_or_refused(f, want)


@pytest.mark.spec("must:2.3-host-assert")
@pytest.mark.spec("L2.3:assert")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_2_an_assert_before_the_kernel_is_checked_at_each_call(on):
    @T.prim_func
    def f(n: T.int32, Y: T.Tensor((4,), "int32")):
        assert n > 3, "n is too small"
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = n

    assert run(f, 5, on=on)[0].tolist() == [5] * 4
    y = np.full(4, -1, np.int32)
    target, backend = WITH_HOPPER[on]
    with pytest.raises(RuntimeError, match="n is too small"):
        tilelang.compile(f, target=target, execution_backend=backend)(3, y)
    assert (y == -1).all(), "nothing was launched"


@pytest.mark.spec("must:2.3-device-assert")
@pytest.mark.spec("L2.3:assert")
def test_2_an_assert_in_a_kernel_is_a_device_assertion():
    @T.prim_func
    def f(X: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            assert X[t] > 0, "not positive"
            X[t] = X[t] + 1

    assert "Device assert failed: not positive" in cuda_text(f)
    assert everywhere_(f, np.ones(4, np.int32))[0].tolist() == [2] * 4
    for on in ("tile", "simulator", "sm_90a"):
        with pytest.raises(TileLangError, match="not positive"):
            run(f, np.zeros(4, np.int32), on=on, simulated=True)
    with pytest.raises(RuntimeError, match=r"assertion failed \(test_spec_musts.py:\d+\): not positive"):
        run(f, np.array([1, 1, 0, 1], np.int32), on="cpu")


@pytest.mark.spec("must:2.3-negative-slice")
@pytest.mark.spec("L2.3:negative-index")
def test_2_a_negative_slice_bound_is_pythons_or_refused():
    def build():
        @T.prim_func
        def f(X: T.Tensor((64, 8), "int32"), Y: T.Tensor((32, 8), "int32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((32, 8), "int32")
                T.copy(X[-32:, :], S)
                T.copy(S, Y)

        return f

    x = ints(64, 8)
    right_or_refused(build, x[-32:], x)


def helper(A, S):
    T.copy(A, S)


@pytest.mark.spec("must:2.3-helper")
@pytest.mark.spec("L2.3:helper")
def test_2_a_tile_operation_in_a_plain_helper_happens_once():
    @T.prim_func
    def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32,), "int32")
            helper(X, S)
            T.atomic_add(Y, S)

    x = ints(32)
    assert np.array_equal(everywhere_(f, x)[1], x)


# ---- 3, 4 types and expressions -------------------------------------------------------------------------------------


@pytest.mark.spec("must:3.1-vector-elements")
@pytest.mark.spec("L3.1:dtype")
def test_3_elements_of_a_packed_vector_are_cast_to_its_type():
    @T.prim_func
    def f(X: T.Tensor((4,), "float32"), Y: T.Tensor((8,), "float16")):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            Y[t * 2:t * 2 + 2] = T.float16x2(X[t], 3)

    x = np.array([1.0004, -2, 65519, 1e-8], np.float32)
    assert np.array_equal(everywhere_(f, x)[1], np.stack([x.astype(np.float16), np.full(4, 3, np.float16)], 1).ravel())


@pytest.mark.spec("must:4.3-ceildiv")
@pytest.mark.spec("L4.3:casts")
def test_4_ceildiv_of_python_integers_is_a_python_integer():
    n = T.ceildiv(10, 4)
    assert type(n) is int and list(range(n)) == [0, 1, 2] and [0] * n == [0, 0, 0] and T.cdiv(-7, 2) == -3


# ---- 6, 7 allocation and launch -------------------------------------------------------------------------------------


@pytest.mark.spec("must:6-variable-zero")
@pytest.mark.spec("L6:alloc_var")
def test_6_a_variable_without_a_value_starts_at_zero():
    @T.prim_func
    def f(Y: T.Tensor((3, 64), "float32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            for r in T.serial(3):
                v = T.alloc_var("float32")
                Y[r, t] = v
                v = 7.0

    assert not everywhere_(f)[0].any()


@pytest.mark.spec("must:6-barrier-whole")
@pytest.mark.spec("L6:alloc_barrier")
def test_6_a_buffer_of_several_barriers_is_no_barrier():
    def build():
        @T.prim_func
        def f():
            with T.Kernel(1, threads=128):
                bars = T.alloc_barrier([128, 128])
                T.mbarrier_arrive(bars)

        return f

    refused(build, "barrier-operand")


@pytest.mark.spec("must:7-empty-grid")
@pytest.mark.spec("L7:Kernel")
@pytest.mark.parametrize("on", WITH_HOPPER)
@pytest.mark.parametrize("static", [True, False])
def test_7_an_empty_grid_does_nothing(static, on):
    @T.prim_func
    def f(n: T.int32, Y: T.Tensor((4,), "int32")):
        with T.Kernel(0 if static else n, threads=4) as b:
            Y[T.get_thread_binding()] = b + 1

    assert run(f, 0, on=on)[0].tolist() == [0] * 4


@pytest.mark.spec("must:7-threads", "must:7-negative-grid")
@pytest.mark.spec("L7:Kernel")
@pytest.mark.parametrize("grid,threads", [(-1, 32), (1, 1025), (1, (64, 32)), (1, 0), (1, -32)])
def test_7_impossible_launches_are_refused(grid, threads):
    def build():
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(grid, threads=threads):
                Y[0] = 1

        return f

    refused(build, "kernel-grid" if grid == -1 else "kernel-threads")


@pytest.mark.spec("must:7-launch-dim")
@pytest.mark.spec("L7:bindings")
@pytest.mark.parametrize("ask", [lambda: T.get_block_binding(1), lambda: T.get_block_extent(2)])
def test_7_a_dimension_outside_the_grid_is_refused(ask):
    def build():
        @T.prim_func
        def f(Y: T.Tensor((4,), "int32")):
            with T.Kernel(2, threads=32):
                Y[0] = ask()

        return f

    refused(build, "launch-dim")


# ---- 8 loops --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("must:8-fragment-sum", "must:8-shared-sum")
@pytest.mark.spec("L8:Parallel")
@pytest.mark.parametrize("scope", ["fragment", "shared", "global"])
def test_8_a_sum_over_a_parallel_dimension_adds_every_element(scope):
    def build():
        @T.prim_func
        def f(X: T.Tensor((16, 40), "int32"), Y: T.Tensor((16,), "int32")):
            with T.Kernel(1, threads=64):
                if scope == "global":
                    for i, j in T.Parallel(16, 40):
                        Y[i] += X[i, j]
                else:
                    F = T.alloc_fragment((16,), "int32") if scope == "fragment" else T.alloc_shared((16,), "int32")
                    T.clear(F)
                    for i, j in T.Parallel(16, 40):
                        F[i] += X[i, j]
                    T.copy(F, Y)

        return f

    x = ints(16, 40)
    right_or_refused(build, x.sum(1), x)


@pytest.mark.spec("must:8-parallel-carried")
@pytest.mark.spec("L8:Parallel")
def test_8_a_variable_carried_over_parallel_iterations_is_refused_and_a_temporary_is_not():
    def build():
        @T.prim_func
        def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                v = T.alloc_var("int32")
                for i in T.Parallel(32):
                    v = v + X[i]
                Y[T.get_thread_binding()] = v

        return f

    refused(build, "parallel-carried")

    @T.prim_func
    def g(X: T.Tensor((100,), "int32"), Y: T.Tensor((100,), "int32")):
        with T.Kernel(1, threads=32):
            v = T.alloc_var("int32")
            for i in T.Parallel(100):
                v = X[i] * 2
                Y[i] = v + 1

    x = ints(100)
    right_or_refused(g, 2 * x + 1, x)


@pytest.mark.spec("must:8-parallel-break", "must:8-parallel-continue")
@pytest.mark.spec("L8:Parallel", "L2.3:break-continue")
def test_8_break_of_a_parallel_loop_is_refused_and_continue_skips_the_iteration():
    def build():
        @T.prim_func
        def f(Y: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(32):
                    if i > 3:
                        break
                    Y[i] = 1

        return f

    refused(build, "break-in-parallel")

    @T.prim_func
    def g(Y: T.Tensor((100,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(100):
                if i % 3 == 0:
                    continue
                Y[i] = i

    k = np.arange(100)
    right_or_refused(g, np.where(k % 3 == 0, 0, k))


@pytest.mark.spec("must:8-negative-stages")
@pytest.mark.spec("L8:Pipelined")
def test_8_a_negative_number_of_stages_is_refused():
    def build():
        @T.prim_func
        def f(X: T.Tensor((4, 32), "int32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((32,), "int32")
                for k in T.Pipelined(4, num_stages=-1):
                    T.copy(X[k, 0:32], S)

        return f

    refused(build, "pipeline-arguments")


# ---- 9 regions ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("must:9-base-extents")
@pytest.mark.spec("L9:pairing")
@pytest.mark.parametrize("n", [5, 16, 32, 40])
def test_9_extents_that_differ_take_the_base_never_the_minimum(n):
    """Shared memory is nearer the registers: its 32 rows are the space, whatever the tensor's own bound says."""
    @T.prim_func
    def f(X: T.Tensor((64, 8), "int32"), Y: T.Tensor((64, 8), "int32"), m: T.int32):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32, 8), "int32")
            T.copy(X[0:m, 0:8], S)
            T.copy(S, Y[0:m, 0:8])

    x = ints(64, 8)
    for on in WITH_HOPPER:
        y = run(f, x, np.zeros((64, 8), np.int32), n, on=on)[1]
        assert np.array_equal(y[:32], x[:32]) and not y[32:].any(), on


@pytest.mark.spec("must:9-guard-zero")
@pytest.mark.spec("L9:guards")
@pytest.mark.parametrize("m,n", [(0, 4), (4, 0), (0, 0), (3, 5)])
def test_9_guards_hold_for_dimensions_of_no_elements(m, n):
    p, q = T.dynamic("p, q")

    @T.prim_func
    def f(X: T.Tensor((p, q), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((8, 8), "float32")
            T.copy(X[0:8, 0:8], S)
            for i, j in T.Parallel(8, 8):
                Y[i, j] = S[i, j] + 1

    x = ints(m, n).astype(np.float32)
    want = np.ones((8, 8), np.float32)
    want[:m, :n] += x
    for target, backend in WITH_HOPPER.values():
        y = np.zeros((8, 8), np.float32)
        tilelang.compile(f, target=target, execution_backend=backend)(x, y)
        assert np.array_equal(y, want)


@pytest.mark.spec("must:9-guard-dimension")
@pytest.mark.spec("L9:guards")
def test_9_an_index_past_a_row_does_not_reach_into_the_next():
    @T.prim_func
    def f(X: T.Tensor((4, 10), "int32"), Y: T.Tensor((4, 16), "int32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((4, 16), "int32")
            T.copy(X[0:4, 0:16], F)
            T.copy(F, Y)

    x = ints(4, 10)
    assert np.array_equal(everywhere_(f, x)[1], np.pad(x, ((0, 0), (0, 6))))


# ---- 11 products ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("must:11-types")
@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("a,c", [("int8", "float32"), ("float16", "int32"), ("bfloat16", "bfloat16"), ("int32", "int32"),
                                 ("float16", "float64"), ("float64", "float32"), ("uint16", "int32")])
def test_11_types_that_no_instruction_multiplies_are_refused_or_computed(a, c):
    def build():
        @T.prim_func
        def f(A: T.Tensor((32, 32), a), B: T.Tensor((32, 32), a), C: T.Tensor((32, 32), c)):
            with T.Kernel(1, threads=32):
                As, Bs = T.alloc_shared((32, 32), a), T.alloc_shared((32, 32), a)
                F = T.alloc_fragment((32, 32), c)
                T.copy(A, As)
                T.copy(B, Bs)
                T.clear(F)
                T.gemm(As, Bs, F)
                T.copy(F, C)

        return f

    low = 0 if a.startswith("u") else -3
    x, y = (RNG.integers(low, 4, (32, 32)) for _ in range(2))
    want = (x @ y).astype(numpy_dtype(c))
    right_or_refused(build, want, x.astype(numpy_dtype(a)), y.astype(numpy_dtype(a)), kinds=("gemm-types",))


@pytest.mark.spec("must:11-shapes")
@pytest.mark.spec("L11:gemm")
@pytest.mark.parametrize("m,n,k", [(16, 16, 8), (16, 16, 24), (24, 16, 16), (1, 1, 1), (17, 9, 33)])
def test_11_shapes_that_the_instruction_does_not_cover_are_computed(m, n, k):
    def build():
        @T.prim_func
        def f(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), "float32")):
            with T.Kernel(1, threads=32):
                As, Bs = T.alloc_shared((m, k), "float16"), T.alloc_shared((k, n), "float16")
                F = T.alloc_fragment((m, n), "float32")
                T.copy(A, As)
                T.copy(B, Bs)
                T.clear(F)
                T.gemm(As, Bs, F)
                T.copy(F, C)

        return f

    x, y = ints(m, k).astype(np.float16), ints(k, n).astype(np.float16)
    computed = right_or_refused(build, x.astype(np.float32) @ y.astype(np.float32), x, y, kinds=())
    assert {"tile", "cpu", "simulator"} <= set(computed)


# ---- 12, 13, 14, 15 -------------------------------------------------------------------------------------------------


@pytest.mark.spec("must:12-kept-dimension")
@pytest.mark.spec("L12.2:reduce")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scope", ["fragment", "shared"])
def test_12_a_kept_dimension_is_reduced(dim, scope):
    out = (1, 40) if dim == 0 else (24, 1)

    @T.prim_func
    def f(X: T.Tensor((24, 40), "int32"), Y: T.Tensor(out, "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((24, 40), "int32") if scope == "shared" else T.alloc_fragment((24, 40), "int32")
            R = T.alloc_fragment(out, "int32")
            T.copy(X, S)
            T.reduce_sum(S, R, dim=dim)
            T.copy(R, Y)

    x = ints(24, 40)
    assert np.array_equal(everywhere_(f, x)[1], x.sum(dim, keepdims=True))


@pytest.mark.spec("must:13-types")
@pytest.mark.spec("L13:scalar")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("op", [T.atomic_add, T.atomic_max, T.atomic_min])
def test_13_atomics_of_types_that_have_none_are_refused(op, dtype):
    def build():
        @T.prim_func
        def f(X: T.Tensor((4,), dtype)):
            with T.Kernel(1, threads=4):
                op(X[0], 1)

        return f

    refused(build, "atomic-dtype")


@pytest.mark.spec("must:14-integers", "must:14-bfloat16-predicates")
@pytest.mark.spec("L14:unary", "L14:predicates")
def test_14_integers_become_float32_and_bfloat16_has_predicates():
    @T.prim_func
    def f(X: T.Tensor((8,), "int32"), B: T.Tensor((8,), "bfloat16"), Y: T.Tensor((4, 8), "float32"),
          Z: T.Tensor((3, 8), "bool")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            Y[0, t] = T.exp2(X[t])
            Y[1, t] = T.sqrt(X[t])
            Y[2, t] = T.log(X[t])
            Y[3, t] = T.sigmoid(X[t])
            Z[0, t] = T.isnan(B[t])
            Z[1, t] = T.isinf(B[t])
            Z[2, t] = T.isfinite(B[t])

    x = np.arange(8, dtype=np.int32)
    b = np.array([0, np.nan, np.inf, -np.inf, 1, -2, 3e38, 1e-39]).astype(ml_dtypes.bfloat16)
    w = b.astype(np.float32)
    for on in WITH_HOPPER:
        _, _, y, z = run(f, x, b, on=on)
        with np.errstate(divide="ignore"):
            want = [np.exp2(x), np.sqrt(x), np.log(x), 1 / (1 + np.exp(-x))]
        np.testing.assert_allclose(y, np.stack(want), rtol=1e-6)
        assert np.array_equal(z, [np.isnan(w), np.isinf(w), np.isfinite(w)])


@pytest.mark.spec("must:15-divergent-loop")
@pytest.mark.spec("L15:automatic-sync")
@pytest.mark.parametrize("kind", ["loop", "while"])
def test_15_a_barrier_needed_where_threads_part_is_refused(kind):
    def build():
        @T.prim_func
        def f(X: T.Tensor((64,), "int32"), Y: T.Tensor((64,), "int32")):
            with T.Kernel(1, threads=64):
                S = T.alloc_shared((64,), "int32")
                t = T.get_thread_binding()
                k = T.alloc_var("int32")
                if kind == "loop":
                    for r in T.serial(t % 3 + 1):
                        S[t] = X[t] + r
                        Y[t] = S[63 - t]
                else:
                    while k < t % 3 + 1:
                        S[t] = X[t] + k
                        Y[t] = S[63 - t]
                        k = k + 1

        return f

    refused(build, "sync-divergent", "cpu-unsupported")


# ---- the runtime ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("must:R2-outputs-twice", "must:R2-output-scalar")
@pytest.mark.spec("R2.1:compile")
@pytest.mark.parametrize("out", [[1, 1], [1, -2], [0, -3], [2], [-1]])
def test_outputs_named_twice_and_scalars_as_outputs_are_refused(out):
    @T.prim_func
    def f(X: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = X[T.get_thread_binding()] + n

    for target, backend in WITH_HOPPER.values():
        with pytest.raises((ValueError, TypeError)):
            tilelang.compile(f, out_idx=out, target=target, execution_backend=backend)


@pytest.mark.spec("must:R4-scalar-range")
@pytest.mark.spec("R4:scalar")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_numbers_that_a_parameter_cannot_hold_are_refused(on):
    @T.prim_func
    def f(a: T.int32, b: T.uint8, c: T.float32, Y: T.Tensor((3,), "float64")):
        with T.Kernel(1, threads=1):
            Y[0] = a
            Y[1] = b
            Y[2] = c

    target, backend = WITH_HOPPER[on]
    kernel = tilelang.compile(f, target=target, execution_backend=backend)
    y = np.zeros(3)
    for args in ((2**31, 0, 0.0), (-(2**31) - 1, 0, 0.0), (0, 256, 0.0), (0, -1, 0.0), (1.5, 0, 0.0), ("1", 0, 0.0)):
        with pytest.raises((TypeError, ValueError, OverflowError, RuntimeError)):
            kernel(*args, y)
    assert not y.any(), "nothing was launched"
    for one in (np.int32(7), np.int64(7), True):
        try:
            kernel(one, 255, 2, y)
        except (TypeError, ValueError, RuntimeError):
            continue
        assert y.tolist() == [int(one), 255, 2]


@pytest.mark.spec("must:R4-whole-solution")
@pytest.mark.spec("R4:calls")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_a_shape_whose_equation_has_no_whole_solution_is_refused(on):
    m = T.dynamic("m")

    @T.prim_func
    def f(X: T.Tensor((2 * m,), "float32"), Y: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                if i < m:
                    Y[i] = X[2 * i]

    where = placed(on)
    kernel = tilelang.compile(f, **where)
    x, y = np.arange(10, dtype=np.float32), np.zeros(5, np.float32)
    call(where, kernel, x, y)
    assert np.array_equal(y, x[::2])
    with pytest.raises((TileLangError, RuntimeError, ValueError)):
        call(where, kernel, np.zeros(9, np.float32), np.zeros(4, np.float32))
