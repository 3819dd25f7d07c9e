"""The known shapes of silent failure: each computes right on every execution, or is refused by name.

Executions: tile meaning, the CPU, and the simulator of the program for sm_80 and for sm_90a.
"""

import numpy as np
import pytest
from completed import caught
from everywhere import SM80, SM90A, WITH_HOPPER, cuda_text, run
from everywhere import everywhere as on_each

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.pipeline import lower

RNG = np.random.default_rng(16)


def everywhere(program, *args):
    return on_each(program, *args, on=WITH_HOPPER)


def ints(*shape):
    return RNG.integers(-9, 10, shape).astype(np.int32)


@pytest.mark.spec("must:8-pipeline-sequential")
@pytest.mark.spec("M:stages-read-overwrite")
@pytest.mark.parametrize("stages", (2, 3, 4))
def test_a_shared_buffer_is_read_and_then_overwritten_in_a_pipeline(stages):
    @T.prim_func
    def f(X: T.Tensor((6, 32), "int32"), Y: T.Tensor((6, 32), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32,), "int32")
            for k in T.Pipelined(6, num_stages=stages):
                T.copy(X[k, 0:32], S)
                for i in T.Parallel(32):
                    Y[k, i] = S[31 - i]
                for i in T.Parallel(32):
                    S[i] = S[i] * 2 + k
                for i in T.Parallel(32):
                    Y[k, i] = Y[k, i] + S[i]

    x = ints(6, 32)
    assert np.array_equal(everywhere(f, x)[1], x[:, ::-1] + 2 * x + np.arange(6)[:, None])


@pytest.mark.spec("M:atomic-dependence")
@pytest.mark.parametrize("stages", (0, 2, 3))
def test_a_copy_of_what_an_atomic_of_the_iteration_before_changed(stages):
    @T.prim_func
    def f(X: T.Tensor((5, 32), "int32"), Y: T.Tensor((5, 32), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32,), "int32")
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(X[k, 0:32], S)
                for i in T.Parallel(32):
                    T.atomic_add(X[k + 1, i], S[i])
                T.copy(S, Y[k, 0:32])

    x = ints(5, 32)
    want = np.cumsum(x, 0)
    assert np.array_equal(everywhere(f, x)[1][:4], want[:4])


@pytest.mark.spec("must:15-back-edge")
@pytest.mark.spec("M:back-edge-war", "L15:automatic-sync")
@pytest.mark.parametrize("loop", ("for", "while"))
def test_the_next_iteration_does_not_overwrite_what_this_one_still_reads(loop):
    @T.prim_func
    def f(X: T.Tensor((8, 64), "int32"), Y: T.Tensor((8, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            t = T.get_thread_binding()
            k = T.alloc_var("int32")
            if loop == "for":
                for r in T.serial(8):
                    S[t] = X[r, t]
                    Y[r, t] = S[63 - t]
            else:
                while k < 8:
                    S[t] = X[k, t]
                    Y[k, t] = S[63 - t]
                    k += 1

    x = ints(8, 64)
    assert np.array_equal(everywhere(f, x)[1], x[:, ::-1])


@pytest.mark.spec("M:short-pipelines")
@pytest.mark.parametrize("n", (0, 1, 2))
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_pipelines_of_no_and_one_iteration(n, on):
    def program(count):
        @T.prim_func
        def f(m: T.int32, X: T.Tensor((4, 32), "int32"), Y: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((32,), "int32")
                F = T.alloc_fragment((32,), "int32")
                T.clear(F)
                for k in T.Pipelined(count(m), num_stages=3):
                    T.copy(X[k, 0:32], S)
                    for i in T.Parallel(32):
                        F[i] += S[31 - i]
                T.copy(F, Y)

        return f

    x = ints(4, 32)
    for count in (lambda m: m, lambda m: n):
        assert np.array_equal(run(program(count), n, x, on=on)[1], x[:n, ::-1].sum(0))


@pytest.mark.spec("must:12-threads")
@pytest.mark.spec("M:odd-threads", "M:odd-tile-width")
@pytest.mark.parametrize("threads", (1, 7, 33, 48, 100))
@pytest.mark.parametrize("width", (1, 5, 37))
def test_any_number_of_threads_and_any_width(threads, width):
    @T.prim_func
    def f(X: T.Tensor((9, width), "float32"), Y: T.Tensor((9,), "float32"), Z: T.Tensor((9, width), "float32")):
        with T.Kernel(1, threads=threads):
            F = T.alloc_fragment((9, width), "float32")
            R = T.alloc_fragment((9,), "float32")
            S = T.alloc_shared((9, width), "float32")
            T.copy(X, S)
            T.copy(S, F)
            T.reduce_sum(F, R, dim=1)
            for i, j in T.Parallel(9, width):
                F[i, j] = F[i, j] - R[i]
            T.copy(R, Y)
            T.copy(F, Z)

    x = ints(9, width).astype(np.float32)
    _, y, z = everywhere(f, x)
    assert np.array_equal(y, x.sum(1)) and np.array_equal(z, x - x.sum(1)[:, None])


@pytest.mark.spec("must:15-divergent-if")
@pytest.mark.spec("M:barrier-in-branch", "L15:automatic-sync")
def test_a_barrier_under_a_thread_condition_is_split_or_refused():
    @T.prim_func
    def f(X: T.Tensor((32,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32,), "int32")
            t = T.get_thread_binding()
            if t < 16:
                S[t] = X[t]
                Y[t] = S[15 - t]

    x = ints(32)
    for on in WITH_HOPPER:
        try:
            got = run(f, x, on=on)[1][:16]
        except TileLangError as e:
            assert on == "cpu" and e.kind == "cpu-unsupported", (on, e.kind)
            caught(e)
        else:
            assert np.array_equal(got, x[:16][::-1]), on
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def g(X: T.Tensor((32,), "int32")):
            with T.Kernel(1, threads=32):
                if T.get_thread_binding() < 16:
                    T.sync_threads()
                    X[0] = 1

        lower(g.func, Target(SM80), {})
    assert e.value.kind in ("collective-divergent", "sync-divergent")
    with pytest.raises(TileLangError) as e:
        lower(g.func, Target(SM90A), {})
    assert e.value.kind in ("collective-divergent", "sync-divergent")
    with pytest.raises(TileLangError) as e:
        tilelang.compile(g, target="cpu")
    assert e.value.kind == "cpu-unsupported"


@pytest.mark.spec("M:pipeline-in-while")
@pytest.mark.parametrize("stages", (0, 2, 3))
def test_a_pipelined_loop_inside_while(stages):
    @T.prim_func
    def f(X: T.Tensor((12, 32), "int32"), Y: T.Tensor((3, 32), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((32,), "int32")
            F = T.alloc_fragment((32,), "int32")
            r = T.alloc_var("int32")
            while r < 3:
                T.clear(F)
                for k in T.Pipelined(r + 2, num_stages=stages):
                    T.copy(X[r * 4 + k, 0:32], S)
                    for i in T.Parallel(32):
                        F[i] += S[31 - i] * (k + 1)
                T.copy(F, Y[r, 0:32])
                r += 1

    x = ints(12, 32)
    want = [sum(x[r * 4 + k, ::-1] * (k + 1) for k in range(r + 2)) for r in range(3)]
    assert np.array_equal(everywhere(f, x)[1], want)
    cuda_text(f)


@pytest.mark.spec("M:persistent-unequal", "L8:Persistent")
@pytest.mark.parametrize("tiles,workers", [((3, 5), 4), ((1, 1), 4), ((7, 2), 5), ((2, 9), 1)])
@pytest.mark.parametrize("stages", (0, 2))
def test_persistent_loops_whose_workers_have_unequal_shares(tiles, workers, stages):
    m, n = tiles

    @T.prim_func
    def f(X: T.Tensor((m * 8, n * 8), "int32"), Y: T.Tensor((m * 8, n * 8), "int32"), Z: T.Tensor((m, n), "int32")):
        with T.Kernel(workers, threads=32) as w:
            S = T.alloc_shared((4, 8), "int32")
            for i, j in T.Persistent([m, n], workers, w, group_size=2):
                for k in T.Pipelined(2, num_stages=stages):
                    T.copy(X[i * 8 + k * 4, j * 8], S)
                    for r, c in T.Parallel(4, 8):
                        Y[i * 8 + k * 4 + r, j * 8 + c] = S[3 - r, 7 - c]
                if T.get_thread_binding() == 0:
                    T.atomic_add(Z[i, j], 1)

    x = ints(m * 8, n * 8)
    _, y, z = everywhere(f, x)
    assert np.array_equal(y.reshape(m, 2, 4, n, 8), x.reshape(m, 2, 4, n, 8)[:, :, ::-1, :, ::-1]) and (z == 1).all()


@pytest.mark.spec("M:shifted-fragment")
@pytest.mark.parametrize("shift", (1, 17, 32))
def test_a_fragment_is_read_at_a_shifted_index(shift):
    @T.prim_func
    def f(X: T.Tensor((64,), "float16"), Y: T.Tensor((64,), "float16"), Z: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((64,), "float16")
            G = T.alloc_fragment((64,), "float16")
            T.copy(X, F)
            for i in T.Parallel(64):
                G[i] = F[(i + shift) % 64] + F[63 - i]
            T.copy(G, Y)
            for i in T.Parallel(64):
                Z[i] = G[(i + shift) % 64]

    x = ints(64).astype(np.float16)
    want = np.roll(x, -shift) + x[::-1]
    _, y, z = everywhere(f, x)
    assert np.array_equal(y, want) and np.array_equal(z, np.roll(want, -shift))


@pytest.mark.spec("M:loops-of-extents")
def test_loops_of_several_extents_use_one_fragment():
    @T.prim_func
    def f(X: T.Tensor((96,), "int32"), Y: T.Tensor((96,), "int32")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((96,), "int32")
            T.copy(X, F)
            for i in T.Parallel(32):
                F[i] = F[i] * 2
            for i in T.Parallel(40):
                F[i + 50] = F[i + 50] + 1
            for i, j in T.Parallel(12, 8):
                F[i * 8 + j] = F[i * 8 + j] * 3
            for i in T.Parallel(96):
                Y[i] = F[95 - i]

    x = ints(96)
    want = x.copy()
    want[:32] *= 2
    want[50:90] += 1
    assert np.array_equal(everywhere(f, x)[1], (want * 3)[::-1])


@pytest.mark.spec("M:gemm-12-warps")
def test_a_product_of_16_by_104_on_12_warps_is_computed():
    def build():
        @T.prim_func
        def f(A: T.Tensor((16, 32), "float16"), B: T.Tensor((32, 104), "float16"), C: T.Tensor((16, 104), "float32")):
            with T.Kernel(1, threads=384):
                As = T.alloc_shared((16, 32), "float16")
                Bs = T.alloc_shared((32, 104), "float16")
                Cf = T.alloc_fragment((16, 104), "float32")
                T.copy(A, As)
                T.copy(B, Bs)
                T.clear(Cf)
                T.gemm(As, Bs, Cf)
                T.copy(Cf, C)
        return f

    a, b = ints(16, 32).astype(np.float16), ints(32, 104).astype(np.float16)
    want = a.astype(np.float32) @ b.astype(np.float32)
    for on in WITH_HOPPER:
        assert np.array_equal(run(build(), a, b, on=on)[2], want), on


@pytest.mark.spec("M:index-2-31")
def test_an_index_beyond_2_to_31_is_computed_in_64_bits():
    rows, columns = 70000, 70000

    @T.prim_func
    def f(X: T.Tensor((rows, columns), "int8"), Y: T.Tensor((32,), "int32"), r: T.int32):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            Y[t] = T.cast(X[r, t], "int32") + T.cast(X[rows - 1, columns - 1 - t], "int32")

    for arch in ("sm_80", "sm_90a"):
        assert "long long" in cuda_text(f, arch)
    try:
        x = np.zeros((rows, columns), np.int8)  # pages that nothing touches take no memory
    except MemoryError:
        pytest.skip("no 4.9 GB of addresses")
    x[50000, :32], x[rows - 1, columns - 32:] = np.arange(32), 100 - np.arange(32)
    y = np.zeros(32, np.int32)
    tilelang.compile(f, target="cpu")(x, y, 50000)
    assert np.array_equal(y, np.arange(32) + (100 - np.arange(32))[::-1])
    n = T.dynamic("n")

    @T.prim_func
    def g(X: T.Tensor((n, 4), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = X[n - 1, T.get_thread_binding()]

    assert "long long" in cuda_text(g)


@pytest.mark.spec("M:dynamic-vector")
@pytest.mark.parametrize("n", (1, 3, 8, 30, 64))
def test_vector_accesses_under_a_dynamic_length(n):
    m = T.dynamic("m")

    @T.prim_func
    def f(X: T.Tensor((5, m), "float16"), Y: T.Tensor((5, m), "float16")):
        with T.Kernel(5, threads=32) as b:
            F = T.alloc_fragment((64,), "float16")
            T.copy(X[b, 0:64], F)
            for i in T.Parallel(64):
                F[i] = F[i] + 1
            T.copy(F, Y[b, 0:64])

    x = ints(5, n).astype(np.float16)
    for target, backend in WITH_HOPPER.values():
        y = np.full((5, n), -7, np.float16)
        tilelang.compile(f, target=target, execution_backend=backend)(x.copy(), y)
        assert np.array_equal(y, x + 1)


@pytest.mark.spec("M:two-kernels", "L7:several")
def test_two_kernels_of_one_function_run_one_after_the_other():
    @T.prim_func
    def f(X: T.Tensor((4, 32), "int32"), W: T.Tensor((4, 32), "int32"), Y: T.Tensor((4, 32), "int32")):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(32):
                W[b, i] = X[b, i] * 2
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(32):
                Y[b, i] = W[3 - b, 31 - i] + 1
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(32):
                W[b, i] = Y[3 - b, i]

    x = ints(4, 32)
    _, w, y = everywhere(f, x)
    assert np.array_equal(y, 2 * x[::-1, ::-1] + 1) and np.array_equal(w, y[::-1])


@pytest.mark.spec("M:reuse-across-pipelines")
@pytest.mark.parametrize("stages", (2, 3))
def test_shared_memory_is_reused_across_pipelines(stages):
    @T.prim_func
    def f(X: T.Tensor((4, 64), "int32"), Y: T.Tensor((4, 64), "int32"), Z: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=64):
            A = T.alloc_shared((64,), "int32")
            B = T.alloc_shared((64,), "int32")
            C = T.alloc_shared((64,), "int32")
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(X[k, 0:64], A)
                for i in T.Parallel(64):
                    Y[k, i] = A[63 - i]
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(Y[k, 0:64], B)
                for i in T.Parallel(64):
                    Z[k, i] = B[63 - i] * 2
            for k in T.Pipelined(4, num_stages=stages):
                T.copy(Z[k, 0:64], C)
                for i in T.Parallel(64):
                    Y[k, i] = C[(i + 1) % 64]

    x = ints(4, 64)
    _, y, z = everywhere(f, x)
    assert np.array_equal(z, 2 * x) and np.array_equal(y, np.roll(2 * x, -1, 1))
    offsets = dict(lower(f.func, Target(SM80), {}).kernels[0].launch.plan.shared_offsets)
    assert len({*offsets.values()}) < len(offsets), "the buffers of pipelines that are over share their space"
