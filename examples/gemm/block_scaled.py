"""GEMM on block-scaled float8 ("mx" formats): every 32 neighbours along k share a scale that is a power of two.

A scale is one byte that holds only an exponent (float8_e8m0fnu): its value is 2 ** (byte - 127).  A float8 number times a
power of two is a bfloat16 number exactly, as 3 bits of mantissa fit into 7 and the exponents have the same range.
So a tile is decoded to bfloat16 in shared memory without any rounding, and the tensor cores multiply that.  (fp8.py has
scales by 128 that are any float32: those are applied to the sums instead.)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, NUMPY, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T

F8, GROUP = "float8_e4m3fn", 32


def block_scaled(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, stages: int = 2):
    """A: (m, k), B: (n, k) float8; sa: (m, k / 32), sb: (n, k / 32) exponents, uint8; C: (m, n) bfloat16.  k % 32 == 0."""
    @T.macro
    def decode(source, scales, target, row, column):
        rows, columns = target.shape
        for i, j in T.Parallel(rows, columns):
            exponent = T.cast(scales[row + i, (column + j) // GROUP], "float32") - 127
            target[i, j] = T.cast(source[i, j], "float32") * T.exp2(exponent)

    @T.prim_func
    def program(A: T.Tensor((m, k), F8), B: T.Tensor((n, k), F8), sa: T.Tensor((m, k // GROUP), "uint8"),
                sb: T.Tensor((n, k // GROUP), "uint8"), C: T.Tensor((m, n), "bfloat16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            As = T.alloc_shared((bm, bk), F8)
            Bs = T.alloc_shared((bn, bk), F8)
            Ad = T.alloc_shared((bm, bk), "bfloat16")
            Bd = T.alloc_shared((bn, bk), "bfloat16")
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                decode(As, sa, Ad, by * bm, ko * bk)
                decode(Bs, sb, Bd, bx * bn, ko * bk)
                T.gemm(Ad, Bd, Cf, transpose_B=True)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(float8 values, exponent bytes, the matrix they stand for): the largest of a group lands in [256, 448]."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    largest = np.maximum(abs(groups).max(2), 2.0**-100)
    exponent = np.floor(np.log2(largest)) - 8
    exponent += largest / 2**exponent > 448
    values = (groups / 2**exponent[:, :, None]).astype(NUMPY[F8])
    exact = values.astype(np.float32) * 2**exponent[:, :, None]
    return values.reshape(x.shape), (exponent + 127).astype(np.uint8), exact.reshape(x.shape)


def check(m: int = 4096, n: int = 4096, k: int = 4096, on: Place = HERE) -> Comparison:
    """Rows and columns of widely different size; decoding is exact, so the bound is that of a bfloat16 product."""
    a, sa, wa = quantize(normal((m, k)) * np.exp2(normal((m, 1), "int32", 2)).astype(np.float32))
    b, sb, wb = quantize(normal((n, k), "float32", 1))
    got = on.compile(block_scaled(m, n, k), out_idx=[4])(a, b, sa, sb)
    return compare("gemm block_scaled", got, product(wa, wb.T), product_bound(wide(wa), wide(wb).T, F8, "bfloat16"))


if __name__ == "__main__":
    main(check)
