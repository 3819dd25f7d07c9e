"""GEMM with weights of 2 bits (beside int8) and of 4-bit floats (beside float16), decoded tile by tile.

ternary  int8 activations and weights -1, 0, 1 of one scale: four weights in a byte, low bits first, each stored plus one.
         The product is exact in int32; the scales of the row and of the matrix multiply the sum once.
fp4      float4_e2m1fn weights (0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives) with a scale and a zero for each group of a row.
         The language packs such tensors two to a byte and hands out float16 values.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T

FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # the value of each code


def ternary(m: int, n: int, k: int, bm: int = 64, bn: int = 128, bk: int = 128, stages: int = 2):
    """A: (m, k) int8; W: (n, k / 4) uint8; row_scale: (m,), scale: (1,) float32; C: (m, n) float16."""
    @T.prim_func
    def program(A: T.Tensor((m, k), "int8"), W: T.Tensor((n, k // 4), "uint8"), row_scale: T.Tensor((m,), "float32"),
                scale: T.Tensor((1,), "float32"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            As = T.alloc_shared((bm, bk), "int8")
            Ws = T.alloc_shared((bn, bk // 4), "uint8")
            decoded = T.alloc_shared((bn, bk), "int8")
            total = T.alloc_fragment((bm, bn), "int32")
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(total)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(W[bx * bn, ko * (bk // 4)], Ws)
                for i, j in T.Parallel(bn, bk):
                    code = (Ws[i, j // 4] >> T.cast(j % 4 * 2, "uint8")) & T.uint8(3)
                    decoded[i, j] = T.cast(code, "int8") - T.int8(1)
                T.gemm(As, decoded, total, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                Cf[i, j] = T.cast(total[i, j], "float32") * (row_scale[by * bm + i] * scale[0])
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def fp4(m: int, n: int, k: int, group: int = 32, bm: int = 64, bn: int = 128, bk: int = 64, stages: int = 2):
    """A: (m, k) float16; W: (n, k) float4_e2m1fn; scales, zeros: (n, k / group) float16; w = (q - zero) * scale."""
    @T.prim_func
    def program(A: T.Tensor((m, k), "float16"), W: T.Tensor((n, k), "float4_e2m1fn"),
                scales: T.Tensor((n, k // group), "float16"), zeros: T.Tensor((n, k // group), "float16"),
                C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            As = T.alloc_shared((bm, bk), "float16")
            Ws = T.alloc_shared((bn, bk), "float4_e2m1fn")
            decoded = T.alloc_shared((bn, bk), "float16")
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(W[bx * bn, ko * bk], Ws)
                for i, j in T.Parallel(bn, bk):
                    row = bx * bn + i
                    g = (ko * bk + j) // group
                    decoded[i, j] = (T.cast(Ws[i, j], "float16") - zeros[row, g]) * scales[row, g]
                T.gemm(As, decoded, Cf, transpose_B=True)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def check_ternary(m: int = 1024, n: int = 4096, k: int = 4096, on: Place = HERE) -> Comparison:
    """The sum is exact: two roundings of scales and product, one to float16."""
    rng = np.random.default_rng(0)
    a, w = rng.integers(-127, 128, (m, k)).astype(np.int8), rng.integers(-1, 2, (n, k)).astype(np.int8)
    row_scale, scale = rng.uniform(0.5, 2, m).astype(np.float32) / 127, np.array([k**-0.5], np.float32)
    codes = (w + 1).astype(np.uint8).reshape(n, -1, 4)
    packed = codes[:, :, 0] | codes[:, :, 1] << 2 | codes[:, :, 2] << 4 | codes[:, :, 3] << 6
    want = product(a, w.T) * (wide(row_scale) * wide(scale))[:, None]
    got = on.compile(ternary(m, n, k), out_idx=[4])(a, packed, row_scale, scale)
    return compare("dequantize ternary", got, want, (EPS["float16"] + 3 * EPS["float32"]) * abs(want) + 2.0**-25)


def check_fp4(m: int = 1024, n: int = 4096, k: int = 4096, group: int = 32, on: Place = HERE) -> Comparison:
    """q - zero is exact (both are multiples of 1/2 below 8); the scaled weight is rounded to float16 once."""
    rng = np.random.default_rng(0)
    a, q = normal((m, k), "float16"), rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.05, 0.2, (n, k // group)).astype(np.float16)
    zeros = (rng.integers(-2, 3, (n, k // group)) / 2).astype(np.float16)
    w = ((FP4[q] - wide(zeros).repeat(group, 1)) * wide(scales).repeat(group, 1)).T
    packed = (q[:, 0::2] | q[:, 1::2] << 4).view(np.int8)
    got = on.compile(fp4(m, n, k, group), out_idx=[4])(a, packed, scales, zeros)
    bound = product_bound(wide(a), w, "float16", "float16") + EPS["float16"] * (abs(wide(a)) @ abs(w))
    return compare("dequantize fp4", got, wide(a) @ w, bound)


if __name__ == "__main__":
    main(check_ternary, check_fp4)
