"""Register blocking of T.gemm on the CPU, and which operands are converted."""

import pytest
from planned import planned_body

import tilelang.language as T
from tilelang.ir import walk
from tilelang.target.cpu import describe
from tilelang.target.cpu_launch import BlockedGemm
from tilelang.transform.cpu.plan_gemm import blocking

AVX2 = describe("haswell", frozenset({"avx2", "fma", "f16c"}), "+avx2,+fma,+f16c", True)


def _gemm(dtype, out, transposed):
    shape = (48, 32) if transposed else (32, 48)

    @T.prim_func
    def main(A: T.Tensor((32, 32), dtype), B: T.Tensor(shape, dtype), C: T.Tensor((32, 48), out)):
        with T.Kernel(1, threads=32):
            a, b, c = T.alloc_shared((32, 32), dtype), T.alloc_shared(shape, dtype), T.alloc_fragment((32, 48), out)
            T.clear(c)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_B=transposed)
            T.copy(c, C)

    (code,) = planned_body(main, AVX2).codes
    (plan,) = walk(code.body, BlockedGemm)
    return plan, code.scratch


@pytest.mark.parametrize("dtype, out, transposed, kinds, scratch", [
    ("float32", "float32", False, (None, None), 0),
    ("float32", "float32", True, (None, "transpose"), 48 * 32 * 4),
    ("float16", "float32", False, ("convert", "convert"), 32 * 32 * 4 + 48 * 32 * 4),
    ("int8", "int32", False, ("words_of_columns", "words_of_rows"), 32 * 16 * 4 + 48 * 16 * 4),
    ("int8", "int32", True, ("words_of_columns", "transposed_words"), 32 * 16 * 4 + 2 * 48 * 16 * 4),
])
def test_operands_are_converted_where_they_must_be(dtype, out, transposed, kinds, scratch):
    plan, found = _gemm(dtype, out, transposed)
    assert tuple(None if p is None else p.kind for p in (plan.pack_a, plan.pack_b)) == kinds
    assert found == scratch
    assert plan.shape.k == (16 if "words_of_rows" in kinds or "transposed_words" in kinds else 32)


def test_the_accumulator_block_fits_the_registers():
    plan, _ = _gemm("float32", "float32", False)
    assert plan.rows * plan.vectors + plan.vectors + 1 <= AVX2.registers
    assert (plan.rows, plan.vectors) == blocking(32, 48, 8, 16)


def test_gemms_beside_a_pointer_that_may_be_null_are_planned_once():
    """The launch for a null pointer holds the same GEMM: planning it twice made a kernel of a kernel."""
    import numpy as np

    import tilelang

    @T.prim_func
    def main(A: T.Tensor((16, 16), "float32"), B: T.Tensor((16, 16), "float32"), address: T.ptr, n: T.int32,
             C: T.Tensor((16, 16), "float32")):
        more = T.make_tensor(address, (16, 16), "float32")
        with T.Kernel(1, threads=32):
            a, b, c = T.alloc_shared((16, 16)), T.alloc_shared((16, 16)), T.alloc_fragment((16, 16), "float32")
            T.clear(c)
            T.copy(A, a)
            T.copy(B, b)
            for _ in T.serial(n):
                T.copy(more, a)
            T.gemm(a, b, c)
            T.copy(c, C)

    launch = planned_body(main, AVX2)
    launches = [launch, launch.when_null]
    assert all(len(list(walk(code.body, BlockedGemm))) == 1 for one in launches for code in one.codes)
    kernel = tilelang.compile(main, target="cpu")
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal((16, 16)).astype("float32") for _ in range(3))
    for n, address, left in ((0, 0, x), (1, z.ctypes.data, z)):
        out = np.empty((16, 16), "float32")
        kernel(x, y, address, n, out)
        wanted = left.astype("float64") @ y
        bound = 17 * 2.0**-24 * (np.abs(left).astype("float64") @ np.abs(y))
        assert (np.abs(out - wanted) <= bound).all()
