"""What the specification says must be computed where no other test says so.  Executions as in test_spec_musts.py."""

import re
from importlib import import_module

import numpy as np
import pytest
from everywhere import SM80, WITH_HOPPER, call, cuda_text, everywhere, placed, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.runtime import nvrtc


def everywhere_(program, *args):
    return everywhere(program, *args, on=WITH_HOPPER)


CUDA_ONLY = """mma_fill mma_store ptx_cp_async_bulk ptx_fence_barrier_init ptx_ldmatrix ptx_mma ptx_mma_block_scale ptx_mma_sp
    ptx_tcgen05_mma_ss ptx_tcgen05_mma_ts ptx_tcgen05_mma_blockscaled_ss ptx_wait_barrier ptx_wgmma_ss ptx_wgmma_rs
    ptx_wgmma_sp_ss ptx_wgmma_sp_rs""".split()
OTHER_MAKERS = """tvm_mfma tvm_mfma_store tvm_rdna_wmma tvm_rdna_wmma_store MatrixCoreIntrinEmitter
    MatrixCorePreshuffleIntrinEmitter WMMAIntrinEmitter ds_read_tr16_b64 ds_read_tr8_b64 mfma mfma_store rdna_wmma
    rdna_wmma_store make_mfma_swizzle_layout mfma_store_index_map mfma_store_index_map_32x32
    make_filled_simdgroup_matrix simdgroup_load simdgroup_multiply_accumulate simdgroup_store cooperative_tensor_fill
    cooperative_tensor_load cooperative_tensor_store cooperative_tensor_multiply_accumulate""".split()
COMMON = """ptx_arrive_barrier ptx_arrive_barrier_expect_tx ptx_commit_group ptx_cp_async ptx_cp_async_barrier
    ptx_init_barrier_thread_count ptx_wait_group""".split()


@pytest.mark.spec("must:1-dialect", "L1:submodules")
def test_names_of_the_common_dialect_and_of_cuda():
    common, cuda = (import_module(f"tilelang.{m}") for m in ("language.common", "cuda.language"))
    assert T.__tilelang_dialect__ == cuda.__tilelang_dialect__ == "cuda" and set(cuda.__all__) == set(T.__all__)
    assert all(getattr(cuda, n) is getattr(T, n) for n in T.__all__)
    for name in CUDA_ONLY:
        assert hasattr(T, name) and name not in common.__all__ and not hasattr(common, name), name
    for name in OTHER_MAKERS:
        assert name not in T.__all__ and name not in common.__all__ and not hasattr(common, name), name
    assert all(getattr(common, name) is getattr(T, name) for name in COMMON)


@pytest.mark.spec("must:2.3-integer-condition", "L2.3:logical", "L2.3:ternary", "L2.3:if")
def test_an_integer_in_a_condition_is_compared_with_zero():
    @T.prim_func
    def f(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int64"), Z: T.Tensor((5, 8), "int32")):
        with T.Kernel(1, threads=8):
            t = T.get_thread_binding()
            Z[0, t] = 1 if X[t] else 2
            if X[t] and Y[t]:
                Z[1, t] = 1
            if X[t] or Y[t]:
                Z[2, t] = 1
            if not X[t]:
                Z[3, t] = 1
            k = T.alloc_var("int32", init=X[t] % 5)
            while k:
                Z[4, t] += 1
                k = k - 1

    x, y = np.array([0, 1, 2, -1, 0, 4, 0, 256], np.int32), np.array([0, 0, 4, 2, 2**40, 8, 0, -1])
    p, q = x != 0, y != 0
    want = [np.where(p, 1, 2), p & q, p | q, ~p, x % 5]
    assert np.array_equal(everywhere_(f, x, y)[2], np.stack(want).astype(np.int32))


@pytest.mark.spec("must:2.5-const-direct", "T.const")
def test_a_const_must_be_a_dimension_or_stride_by_itself():
    @tilelang.jit(target="cpu")
    def f(X):
        N = T.const("N")
        X: T.Tensor((N + 1,), "float32")
        with T.Kernel(1, threads=1):
            X[0] = 1

    with pytest.raises(RuntimeError, match="Constexpr variable `N` is not used in any buffer shape or stride") as e:
        f(np.zeros(4, np.float32))
    assert e.value.kind == "const-unused"


@pytest.mark.spec("must:2.5-const-python", "T.const")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_statements_before_the_kernel_take_a_const_as_symbol_and_as_number(on):
    where = placed(on)

    @tilelang.jit(**where)
    def f(X):
        M, N = T.const("M N")
        X: T.Tensor((M, N), "int32")
        assert M % 2 == 0, "M is even"
        blocks = T.ceildiv(M, 4)
        half = M // 2
        with T.Kernel(blocks, threads=32) as b:
            for i, j in T.Parallel(4, N):
                if b * 4 + i < half:
                    X[b * 4 + i, j] = len([0] * M) + blocks

    for m, n in ((6, 3), (8, 2)):
        x = np.zeros((m, n), np.int32)
        call(where, f, x)
        assert (x[:m // 2] == m + -(-m // 4)).all() and not x[m // 2:].any()


INTEGERS = {f"{s}int{b}": b for s in ("", "u") for b in (8, 16, 32, 64)}
EIGHTS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu")
FLOATS = {**{e: 8 for e in EIGHTS}, "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def promoted(a, b):
    """The type of a + b as section 4.1 says it; None: no such sum."""
    if a == b:
        return a
    if a == "bool" or b == "bool":
        return b if a == "bool" else a
    if a in FLOATS and b in FLOATS:
        if FLOATS[a] != FLOATS[b]:
            return a if FLOATS[a] > FLOATS[b] else b
        return "float16" if FLOATS[a] == 16 else None
    if a in FLOATS or b in FLOATS:
        return a if a in FLOATS else b
    if INTEGERS[a] != INTEGERS[b]:
        return a if INTEGERS[a] > INTEGERS[b] else b
    return f"uint{INTEGERS[a]}"


@pytest.mark.spec("must:4.1-promotion", "L4.1:promotion")
@pytest.mark.parametrize("a", ["bool", *INTEGERS, *FLOATS])
def test_the_type_of_every_sum(a):
    for b in ("bool", *INTEGERS, *FLOATS):
        if a == b == "bool":
            continue
        x, y, want = T.dtype(a)(), T.dtype(b)(), promoted(a, b)
        for combine in (lambda p, q: p + q, lambda p, q: p * q, T.max):
            if want is None:
                with pytest.raises(TypeError, match="Cannot match type"):
                    combine(x, y)
            else:
                assert combine(x, y).dtype == want, (a, b)
    x = T.dtype(a)()
    if a in INTEGERS:
        assert (x + 1).dtype == promoted(a, "int32") and (x + 1.0).dtype == "float32"
        assert (x & x).dtype == a and ((x + 2**40).dtype == promoted(a, "int64"))
    elif a in FLOATS:
        assert (x + 1).dtype == a and (x + 1.0).dtype == promoted(a, "float32") and (x + True).dtype == a


@pytest.mark.spec("must:8-coalesced-width", "L8:Parallel")
@pytest.mark.parametrize("width", (1, 2, 3, 64))
def test_a_coalesced_width_changes_no_result(width):
    @T.prim_func
    def f(X: T.Tensor((96,), "float32"), Y: T.Tensor((96,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(96, coalesced_width=width):
                Y[i] = X[i] + 1

    x = np.arange(96, dtype=np.float32)
    assert np.array_equal(everywhere_(f, x)[1], x + 1)


def drawn_order(text, gx, gy):
    """(bx, by) of each block of the hardware, from the lines of CUDA that compute them."""
    lines = [x.strip() for x in text.splitlines() if re.match(r"\s+const (unsigned|int) ", x) and "threadIdx" not in x]
    seen = {}
    for y in range(gy):
        for x in range(gx):
            env = {"min": min, "blockIdx": type("B", (), {"x": x, "y": y}), "gridDim": type("G", (), {"x": gx, "y": gy})}
            for line in lines:
                line = re.sub(r"(\d)u\b", r"\1", re.sub(r"^const (unsigned|int) ", "", line).rstrip(";")).replace("/", "//")
                line = re.sub(r"= (.*?) \? (.*?) : (.*)$", r"= (\2) if (\1) else (\3)", line)
                for part in re.split(r", (?=\w+_ = )", line):
                    exec(part, env)
            seen[x, y] = env["bx"], env["by"]
    return seen


@pytest.mark.spec("L18:use_swizzle", "T.use_swizzle")
@pytest.mark.parametrize("gx,gy", [(5, 7), (4, 4), (1, 6), (6, 1)])
@pytest.mark.parametrize("panel,order", [(3, "row"), (2, "column"), (10, "row"), (1, "column"), (4, "mlx")])
@pytest.mark.parametrize("first", [True, False], ids=["first", "after work"])
def test_the_order_of_blocks_is_the_one_of_the_formula(panel, order, gx, gy, first):
    """After work it was refused; it holds for the whole kernel wherever it stands."""
    @T.prim_func
    def f(Y: T.Tensor((gy, gx), "int32")):
        with T.Kernel(gx, gy, threads=32) as (bx, by):
            if not first:
                Y[by, bx] = 1
            T.use_swizzle(panel, order=order)
            if first:
                Y[by, bx] = 1

    def place(block):
        """(bx, by) of the block with this linear number; columns: the same with x and y exchanged."""
        columns, rows = (gy, gx) if order == "column" else (gx, gy)
        p, o = divmod(block, panel * columns)
        height = min(panel, rows - p * panel)
        column, row = o // height, p * panel + o % height
        column = columns - 1 - column if p % 2 else column
        return (row, column) if order == "column" else (column, row)

    got = drawn_order(cuda_text(f, assemble=False), gx, gy)
    assert got == {(x, y): place(x + y * gx) for x in range(gx) for y in range(gy)}


@pytest.mark.spec("must:19-extern", "L19:extern")
@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_a_function_that_no_source_provides_is_named():
    @T.prim_func
    def f(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            X[T.get_thread_binding()] = T.call_extern("float32", "nobody_has_it", X[0])

    with pytest.raises(RuntimeError, match='identifier "nobody_has_it" is undefined') as e:
        tilelang.compile(f, target=SM80)
    assert e.value.kind == "nvrtc-compile" and 'nobody_has_it(X[0])' in str(e.value)


@pytest.mark.spec("must:20-print-uniform", "L20:print")
def test_a_fragment_is_printed_where_all_threads_come(capfd):
    @T.prim_func
    def f(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((64,), "float32")
            T.copy(X, F)
            if T.get_thread_binding() < 7:
                T.print(F)

    for on, kinds in (("cpu", ("cpu-unsupported", "collective-divergent")), ("simulator", ("collective-divergent",)),
                      ("sm_90a", ("collective-divergent",))):
        with pytest.raises(TileLangError) as e:
            run(f, np.zeros(64, np.float32), on=on, simulated=True)
        assert e.value.kind in kinds and "T.print(F)" in str(e.value), (on, str(e.value))


@pytest.mark.spec("must:R4-cython", "R4:host-assert", "R4:assume", "R11:backends")
@pytest.mark.parametrize("backend", ("tvm_ffi", "cython", "tile"))
def test_every_backend_checks_the_host_and_takes_run_time_strides(backend):
    n, s = T.dynamic("n, s")

    @T.prim_func
    def f(X: T.StridedTensor((n, 4), (s, 1), "float32"), k: T.int32, Y: T.Tensor((n, 4), "float32")):
        assert k < 10, "k must be small"
        T.assume(n % 2 == 0)
        with T.Kernel(n, threads=4) as b:
            Y[b, T.get_thread_binding()] = X[b, T.get_thread_binding()] + k

    kernel = tilelang.compile(f, target="cpu", execution_backend=backend)
    x, y = np.arange(48, dtype=np.float32).reshape(4, 12), np.zeros((4, 4), np.float32)
    kernel(x[:, :4], 3, y)
    assert np.array_equal(y, x[:, :4] + 3)
    kernel(np.ascontiguousarray(x[:, 4:8]), 4, y)
    assert np.array_equal(y, x[:, 4:8] + 4)
    with pytest.raises(RuntimeError, match="k must be small"):
        kernel(x[:, :4], 10, y)
    with pytest.raises(RuntimeError, match="Assume: "):
        kernel(x[:3, :4], 1, y[:3])
    assert np.array_equal(y, x[:, 4:8] + 4), "nothing ran"


@pytest.mark.spec("must:R11-backends", "R11:backends")
def test_backends_of_a_target_give_the_same():
    @T.prim_func
    def f(X: T.Tensor((100,), "float32"), Y: T.Tensor((100,), "float32")):
        with T.Kernel(4, threads=32) as b:
            for i in T.Parallel(25):
                Y[b * 25 + i] = T.exp(X[b * 25 + i]) / 3

    x, got = np.linspace(-9, 9, 100, dtype=np.float32), []
    for backend in ("auto", "tvm_ffi", "cython"):
        y = np.zeros_like(x)
        tilelang.compile(f, target="cpu", execution_backend=backend)(x, y)
        got.append(y.tobytes())
    assert len(set(got)) == 1
    if nvrtc.available():
        kernels = [tilelang.compile(f, target=SM80, execution_backend=b) for b in ("auto", "tvm_ffi", "nvrtc", "cython")]
        assert len({k.get_kernel_source() for k in kernels}) == len({k.cubin for k in kernels}) == 1


@pytest.mark.spec("must:R7-star", "R7:tuning")
def test_the_names_that_the_tuner_exports():
    names = {}
    exec("from tilelang.autotuner import *", names)
    for name in ("autotune", "AutoTuner", "set_autotune_inputs", "get_autotune_inputs"):
        assert names[name] is getattr(tilelang.autotuner, name)


@pytest.mark.spec("must:R7-closure", "R7:tuning")
def test_a_closure_of_the_tuned_function_must_be_kept():
    choices = [1, 2]

    def make(B=8):
        @T.prim_func
        def main(X: T.Tensor((64,), "float32")):
            with T.Kernel(64 // B, threads=32) as b:
                X[b] = choices[0]

        return main

    with pytest.raises(AssertionError, match="`choices` of type list .* is not serializable"):
        tilelang.autotuner.AutoTuner(make, [{"B": 8}]).set_compile_args(target="cpu").run()


@pytest.mark.spec("L21:tile-scheduler", "T.PersistentTileScheduler")
@pytest.mark.parametrize("m,n,swizzle,column_major,cluster", [(5, 4, 1, True, 1), (5, 4, 3, True, 1), (4, 7, 2, False, 1),
                                                              (6, 5, 2, True, 2), (5, 3, 4, False, 2)])
def test_places_of_tiles_are_those_of_the_formula(m, n, swizzle, column_major, cluster):
    rows = -(-m // cluster)
    primary, secondary = (rows, n) if column_major else (n, rows)

    def place(tile):
        group = tile // (primary * swizzle)
        base = group * swizzle
        width = max(1, min(swizzle, secondary - base))
        r = tile - group * primary * swizzle
        fast, slow = r // width, base + r % width
        return [fast, slow] if column_major else [slow, fast]

    @T.prim_func
    def f(Y: T.Tensor((rows * n, 4), "int32"), Z: T.Tensor((rows * n, 2), "int32")):
        with T.Kernel(3, threads=1) as b:
            s = T.PersistentTileScheduler(m, n, num_workers=3, swizzle_size=swizzle, column_major=column_major,
                                          cluster_size=cluster)
            plain = T.PersistentTileScheduler(m, n, swizzle_size=swizzle, column_major=column_major, cluster_size=cluster,
                                              stateful=False)
            s.init(b)
            while s.valid():
                k = s.linear_idx
                Y[k, 0] = s.m_idx
                Y[k, 1] = s.n_idx
                Y[k, 2] = s.current_iter
                Y[k, 3] = k
                at = plain.coord(k)
                Z[k, 0] = at[0]
                Z[k, 1] = at[1]
                s.next_tile()

    y, z = everywhere_(f)
    want = [place(t) for t in range(rows * n)]
    assert y.tolist() == [[*w, t // 3, t] for t, w in enumerate(want)] and z.tolist() == want
