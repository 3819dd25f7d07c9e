"""GEMMs of bytes and of tf32 with operands whose K is not contiguous: by wgmma, with the values of any other form."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, run

import tilelang.language as T
from tilelang.ir import numpy_dtype
from tilelang.simulator.device.run import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")


def gemm(m, n, k, dtype="int8", ta=False, tb=False, tile=(128, 128, 64), stages=3, threads=256, out=None, **how):
    """C = A B by tiles."""
    bm, bn, bk = tile
    acc = "int32" if "int8" in dtype else "float32"

    @T.prim_func
    def main(A: T.Tensor((k, m) if ta else (m, k), dtype), B: T.Tensor((n, k) if tb else (k, n), dtype),
             C: T.Tensor((m, n), out or acc)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            a = T.alloc_shared((bk, bm) if ta else (bm, bk), dtype)
            b = T.alloc_shared((bn, bk) if tb else (bk, bn), dtype)
            c = T.alloc_fragment((bm, bn), acc)
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[step * bk, by * bm] if ta else A[by * bm, step * bk], a)
                T.copy(B[bx * bn, step * bk] if tb else B[step * bk, bx * bn], b)
                T.gemm(a, b, c, transpose_A=ta, transpose_B=tb, **how)
            T.copy(c, C[by * bm, bx * bn])

    return main


def values(dtype, shape, seed=0):
    """Small whole numbers, whose sums of products are exact in all accumulators."""
    low = 0 if dtype == "uint8" else -4
    return np.random.default_rng(seed).integers(low, 5, shape).astype(numpy_dtype(dtype))


def check(program, m, n, k, dtype, ta=False, tb=False, on=WITH_HOPPER):
    a, b = values(dtype, (k, m) if ta else (m, k)), values(dtype, (n, k) if tb else (k, n), 1)
    want = (a.T if ta else a).astype(np.float64) @ (b.T if tb else b).astype(np.float64)
    for x in on:
        np.testing.assert_array_equal(run(program, a, b, on=x)[2].astype(np.float64), want, x)


ORDERS = [(False, False), (True, True), (True, False)]
HOPPER = ("sm_90a",)
REGISTERS, SHARED = "ldmatrix_x4_bytes(&", "stmatrix_x4_bytes(&"


def text_of(program):
    return cuda_text(program, "sm_90a").split("__global__")[1]


@pytest.mark.parametrize("ta,tb", ORDERS)
@pytest.mark.parametrize("dtype", (*BYTES, "float32"))
def test_transposed_operands_of_all_types(dtype, ta, tb):
    tile = (64, 64, 32) if dtype == "float32" else (64, 64, 64)
    on = [x for x in WITH_HOPPER if x != "simulator" or "float8" not in dtype]  # sm_80 has no instruction of float8
    check(gemm(80, 80, 96, dtype, ta, tb, tile=tile, threads=128), 80, 80, 96, dtype, ta, tb, on)


@pytest.mark.parametrize("stages", range(5))
@pytest.mark.parametrize("ta,tb", ORDERS)
def test_transposed_operands_of_any_number_of_stages(stages, ta, tb):
    p = gemm(80, 80, 288, "int8", ta, tb, tile=(64, 64, 64), threads=128, stages=stages)
    check(p, 80, 80, 288, "int8", ta, tb, HOPPER)
    assert ("_rs_k" in text_of(p), SHARED in text_of(p)) == (True, ta > tb)


@pytest.mark.parametrize("ta,tb", ORDERS)
@pytest.mark.parametrize("tile", [(64, 64, 32), (128, 128, 32)])
def test_accumulators_of_transposed_operands_are_stored_by_tma(tile, ta, tb):
    p = gemm(144, 80, 96, "float8_e4m3fn", ta, tb, tile=tile, threads=tile[0] * 2, out="float16")
    check(p, 144, 80, 96, "float8_e4m3fn", ta, tb, HOPPER)
    assert "tl::tma_store" in text_of(p)


FORMS = {"columns for each warp group": dict(tile=(64, 256, 32), policy=T.GemmWarpPolicy.FullCol),
         "wide": dict(tile=(64, 256, 64)), "tall": dict(tile=(256, 64, 128), stages=2), "warps idle": dict(threads=384),
         "32 columns": dict(tile=(64, 32, 32), threads=128)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ta,tb", ORDERS[::2])
def test_transposed_operands_of_any_tile(form, ta, tb):
    p = gemm(160, 272, 160, "int8", ta, tb, **{"tile": (128, 64, 64), **FORMS[form]})
    check(p, 160, 272, 160, "int8", ta, tb, HOPPER)
    assert REGISTERS in text_of(p) and "tl::mma_" not in text_of(p)


@pytest.mark.parametrize("dtype", ("int8", "float8_e4m3fn"))
def test_transposed_bytes_were_read_one_by_one(dtype):
    """fp8 and int8 NN ran at 0.11 and 0.25 of NT on an H200: by mma.sync from registers filled by byte loads."""
    for ta, tb in ORDERS[:2]:
        text = text_of(gemm(256, 256, 256, dtype, ta, tb))
        assert REGISTERS in text and SHARED not in text and "_rs_k" in text and "mma_m16" not in text


def test_the_report_says_what_is_transposed():
    program = lower(gemm(128, 128, 128, "int8", True, tile=(128, 64, 64)).func, Target({"kind": "cuda", "arch": "sm_90a"}), {})
    said = program.kernels[0].launch.plan.report
    assert "`a` is transposed in registers: wgmma needs K contiguous" in said
    assert "`b` is transposed in shared memory: wgmma needs K contiguous" in said


def test_rows_of_transposed_tiles_lie_in_different_banks():
    for dtype, (ta, tb) in (*(("int8", order) for order in ORDERS), ("float32", ORDERS[0]), ("float32", ORDERS[1])):
        p = gemm(128, 128, 128, dtype, ta, tb, tile=(128, 128, 128 // numpy_dtype(dtype).itemsize), stages=2)
        a, b = values(dtype, (128, 128)), values(dtype, (128, 128), 1)
        program = lower(p.func, Target({"kind": "cuda", "arch": "sm_90a"}), {})
        report = run_device(program, [a, b, np.zeros((128, 128), np.float32 if dtype == "float32" else np.int32)])
        assert report.conflicts == 0, report


def transposed(k, n, threads, dtype="uint8"):
    @T.prim_func
    def main(A: T.Tensor((k, n), dtype), B: T.Tensor((n, k), dtype)):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((k, n), dtype), T.alloc_shared((n, k), dtype)
            T.copy(A, a)
            T.transpose(a, b)
            T.copy(b, B)

    return main


@pytest.mark.parametrize("k,n,threads", [(128, 128, 256), (64, 48, 128), (32, 32, 96), (40, 24, 64), (96, 80, 100)])
def test_tiles_of_bytes_are_transposed(k, n, threads):
    a = np.random.default_rng(0).integers(0, 256, (k, n)).astype(np.uint8)
    for x in WITH_HOPPER:
        np.testing.assert_array_equal(run(transposed(k, n, threads), a, on=x)[1], a.T, x)


def test_an_operand_loaded_once_is_transposed_once():
    @T.prim_func
    def main(A: T.Tensor((256, 64), "int8"), B: T.Tensor((64, 32), "int8"), C: T.Tensor((256, 32), "int32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "int8"), T.alloc_shared((64, 32), "int8")
            c = T.alloc_fragment((64, 32), "int32")
            T.copy(B, b)
            for step in T.Pipelined(4, num_stages=2):
                T.copy(A[step * 64, 0], a)
                T.gemm(a, b, c, clear_accum=True)
                T.copy(c, C[step * 64, 0])

    check(main, 256, 32, 64, "int8")
    text = text_of(main)
    assert 0 < text.index(SHARED) < text.index("wgmma_m64n32k32")
    assert text.rindex("for (int step", 0, text.index("wgmma_m64n32k32")) > text.index(SHARED)


def test_several_gemms_and_loops_of_tiles_read_transposed_bytes():
    @T.prim_func
    def main(A: T.Tensor((256, 128), "int8"), B: T.Tensor((128, 160), "int8"), C: T.Tensor((256, 160), "int32"),
             D: T.Tensor((256, 160), "int32")):
        with T.Kernel(3, threads=128) as block:
            a, b = T.alloc_shared((64, 64), "int8"), T.alloc_shared((64, 64), "int8")
            c, d = T.alloc_fragment((64, 64), "int32"), T.alloc_fragment((64, 64), "int32")
            for by, bx in T.Persistent([4, 3], 3, block):
                T.clear(c)
                T.clear(d)
                for step in T.Pipelined(2, num_stages=3):
                    T.copy(A[by * 64, step * 64], a)
                    T.copy(B[step * 64, bx * 64], b)
                    T.gemm(a, b, c)
                    T.gemm(a, b, d)
                for i, j in T.Parallel(64, 64):
                    d[i, j] = d[i, j] * 2 + c[i, j] * j
                T.copy(c, C[by * 64, bx * 64])
                T.copy(d, D[by * 64, bx * 64])

    a, b = values("int8", (256, 128)), values("int8", (128, 160), 1)
    want = a.astype(np.int32) @ b.astype(np.int32)
    for x in WITH_HOPPER:
        _, _, c, d = run(main, a, b, on=x)
        assert np.array_equal(c, want) and np.array_equal(d, want * 2 + want * (np.arange(160) % 64)), x
    assert REGISTERS in text_of(main)


def test_a_fragment_times_transposed_bytes():
    """As P V of attention: A is in registers, so B alone can change its order."""
    @T.prim_func
    def main(A: T.Tensor((64, 128), "int8"), B: T.Tensor((128, 64), "int8"), C: T.Tensor((64, 64), "int32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_fragment((64, 64), "int8"), T.alloc_shared((64, 64), "int8")
            c, s = T.alloc_fragment((64, 64), "int32"), T.alloc_shared((64, 64), "int8")
            T.clear(c)
            for step in T.Pipelined(2, num_stages=2):
                T.copy(A[0, step * 64], s)
                T.copy(B[step * 64, 0], b)
                for i, j in T.Parallel(64, 64):
                    a[i, j] = s[i, j] + T.int8(1)
                T.gemm(a, b, c)
            T.copy(c, C)

    a, b = values("int8", (64, 128)), values("int8", (128, 64), 1)
    for x in WITH_HOPPER:
        assert np.array_equal(run(main, a, b, on=x)[2], (a + 1).astype(np.int32) @ b.astype(np.int32)), x
    assert SHARED in text_of(main)


def test_gemms_into_one_accumulator_have_one_layout():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "int8"), B: T.Tensor((64, 64), "int8"), C: T.Tensor((64, 64), "int32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "int8"), T.alloc_shared((64, 64), "int8")
            c = T.alloc_fragment((64, 64), "int32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(a, b, c)
            T.gemm(a, b, c, transpose_B=True)
            T.gemm(a, b, c, transpose_A=True)
            T.copy(c, C)

    a, b = values("int8", (64, 64)), values("int8", (64, 64), 1)
    x, y = a.astype(np.int32), b.astype(np.int32)
    for on in WITH_HOPPER:
        assert np.array_equal(run(main, a, b, on=on)[2], x @ y + x @ y.T + x.T @ y), on


def test_tiles_that_another_loop_allocates_are_transposed_inside_of_it():
    @T.prim_func
    def main(A: T.Tensor((128, 64), "int8"), B: T.Tensor((64, 32), "int8"), C: T.Tensor((128, 32), "int32")):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "int8"), T.alloc_shared((64, 32), "int8")
            T.copy(B, b)
            for by in T.serial(2):
                c = T.alloc_fragment((64, 32), "int32")
                T.copy(A[by * 64, 0], a)
                T.gemm(a, b, c, clear_accum=True)
                for i, j in T.Parallel(64, 32):
                    T.atomic_add(C[by * 64 + i, j], c[i, j])

    check(main, 128, 32, 64, "int8")
    assert SHARED in text_of(main)


def test_gemms_of_some_threads_stay():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "int8"), B: T.Tensor((64, 64), "int8"), C: T.Tensor((64, 64), "int32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 64), "int8"), T.alloc_shared((64, 64), "int8")
            c = T.alloc_fragment((64, 64), "int32")
            T.copy(A, a)
            T.copy(B, b)
            if T.get_thread_binding() < 128:
                T.gemm(a, b, c, clear_accum=True)
                T.copy(c, C)

    check(main, 64, 64, 64, "int8", on=HOPPER)


def test_accumulators_in_the_transposed_layout_are_not_split_by_columns():
    """As accumulator promotion of float8: a sum of K steps by threads beside the accumulator of one step."""
    @T.prim_func
    def main(A: T.Tensor((128, 128), "int8"), B: T.Tensor((128, 256), "int8"), C: T.Tensor((128, 256), "int32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((128, 64), "int8"), T.alloc_shared((64, 256), "int8")
            c, total = T.alloc_fragment((128, 256), "int32"), T.alloc_fragment((128, 256), "int32")
            T.clear(total)
            for step in T.Pipelined(2, num_stages=2):
                T.copy(A[0, step * 64], a)
                T.copy(B[step * 64, 0], b)
                T.gemm(a, b, c, clear_accum=True)
                for i, j in T.Parallel(128, 256):
                    total[i, j] += c[i, j] * (step + 1)
            T.copy(total, C)

    a, b = values("int8", (128, 128)), values("int8", (128, 256), 1)
    x, y = a.astype(np.int32), b.astype(np.int32)
    want = x[:, :64] @ y[:64] + 2 * (x[:, 64:] @ y[64:])
    assert np.array_equal(run(main, a, b, on="sm_90a")[2], want)
    assert REGISTERS in text_of(main)
