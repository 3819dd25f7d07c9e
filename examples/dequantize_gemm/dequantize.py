"""GEMM with 4-bit weights: C = A @ W.T, where W is stored as nibbles and decoded tile by tile, just before its use.

The weights travel from memory in a quarter of the bytes; the decoded tile goes to shared memory, where T.gemm reads it
like any other.  Two nibbles share a byte, the even column in the low one.  `tilelang.library.dequant_matmul` computes the same
several times as fast: it decodes into registers, with tiles for few rows and for many.

int4    w = (q - zero) * scale, with one scale and zero for each group of columns of a row.
table   w = table[q] * scale: any 16 values, here those of the "normal float" format, which puts more of them near zero.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, product_bound, wide

import tilelang.language as T

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (8 values on either side of it).
NORMAL_FLOAT = np.array([-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
                         0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32)


def int4(m: int, n: int, k: int, group: int = 32, bm: int = 64, bn: int = 128, bk: int = 64, stages: int = 2):
    """A: (m, k) float16; W: (n, k / 2) uint8; scales: (n, k / group) float16; zeros: the same, uint8; C: (m, n)."""
    @T.prim_func
    def program(A: T.Tensor((m, k), "float16"), W: T.Tensor((n, k // 2), "uint8"),
                scales: T.Tensor((n, k // group), "float16"), zeros: T.Tensor((n, k // group), "uint8"),
                C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            As = T.alloc_shared((bm, bk), "float16")
            Ws = T.alloc_shared((bn, bk // 2), "uint8")
            decoded = T.alloc_shared((bn, bk), "float16")
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(W[bx * bn, ko * (bk // 2)], Ws)
                for i, j in T.Parallel(bn, bk):
                    row = bx * bn + i
                    g = (ko * bk + j) // group
                    q = T.cast((Ws[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15), "int32")
                    decoded[i, j] = T.cast(q - T.cast(zeros[row, g], "int32"), "float16") * scales[row, g]
                T.gemm(As, decoded, Cf, transpose_B=True)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def table(m: int, n: int, k: int, group: int = 64, bm: int = 64, bn: int = 128, bk: int = 64, stages: int = 2):
    """values: (16,) float16, copied to shared memory once per block; scales: (n, k / group) float16."""
    @T.prim_func
    def program(A: T.Tensor((m, k), "float16"), W: T.Tensor((n, k // 2), "uint8"), values: T.Tensor((16,), "float16"),
                scales: T.Tensor((n, k // group), "float16"), C: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            As = T.alloc_shared((bm, bk), "float16")
            Ws = T.alloc_shared((bn, bk // 2), "uint8")
            decoded = T.alloc_shared((bn, bk), "float16")
            lut = T.alloc_shared((16,), "float16")
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.copy(values, lut)
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(W[bx * bn, ko * (bk // 2)], Ws)
                for i, j in T.Parallel(bn, bk):
                    q = T.cast((Ws[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15), "int32")
                    decoded[i, j] = lut[q] * scales[bx * bn + i, (ko * bk + j) // group]
                T.gemm(As, decoded, Cf, transpose_B=True)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def pack(q: np.ndarray) -> np.ndarray:
    """(n, k) nibbles to (n, k / 2) bytes."""
    return (q[:, 0::2] | q[:, 1::2] << 4).astype(np.uint8)


def _finish(name: str, a: np.ndarray, w: np.ndarray, got: np.ndarray) -> Comparison:
    """Decoding rounds each weight to float16 once: up to EPS of |a| @ |w| if all roundings agreed."""
    a, w = wide(a), w.T
    bound = product_bound(a, w, "float16", "float16") + EPS["float16"] * (abs(a) @ abs(w))
    return compare(name, got, a @ w, bound)


def check_int4(m: int = 1024, n: int = 4096, k: int = 4096, group: int = 32, on: Place = HERE) -> Comparison:
    """Random nibbles, scales and zeros."""
    rng = np.random.default_rng(0)
    a, q = normal((m, k), "float16"), rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.05, 0.2, (n, k // group)).astype(np.float16)
    zeros = rng.integers(5, 11, (n, k // group)).astype(np.uint8)
    w = (wide(q) - wide(zeros).repeat(group, 1)) * wide(scales).repeat(group, 1)
    got = on.compile(int4(m, n, k, group), out_idx=[4])(a, pack(q), scales, zeros)
    return _finish("dequantize int4", a, w, got)


def check_table(m: int = 1024, n: int = 4096, k: int = 4096, group: int = 64, on: Place = HERE) -> Comparison:
    """The quantised form of a normal weight matrix, by the nearest entry of the table."""
    a, original = normal((m, k), "float16"), wide(normal((n, k), "float32", 1))
    scales = abs(original).reshape(n, -1, group).max(2).astype(np.float16)
    values = NORMAL_FLOAT.astype(np.float16)
    middles = (wide(values)[1:] + wide(values)[:-1]) / 2
    q = np.searchsorted(middles, original / wide(scales).repeat(group, 1)).astype(np.uint8)
    w = wide(values)[q] * wide(scales).repeat(group, 1)
    got = on.compile(table(m, n, k, group), out_idx=[4])(a, pack(q), values, scales)
    return _finish("dequantize table", a, w, got)


if __name__ == "__main__":
    main(check_int4, check_table)
