"""GEMM on float8 operands with scales: C = (A * sa) @ (B * sb).T, A and B in float8_e4m3fn, C in bfloat16.

float8 holds 3 bits of mantissa in a range of +-448: a tensor is divided by a scale before it is cast, and the product is
multiplied by both scales after the sum.  per_tensor has one scale for each matrix, by_block one for every 128 elements of
a row of A and one for every 128 x 128 block of B: there the sum of each block of k is scaled before it is added to the
total, which is a second accumulator.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, product_bound, wide

import tilelang.language as T

F8 = "float8_e4m3fn"


def per_tensor(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 128, threads: int = 256):
    """A: (m, k), B: (n, k) float8; scales: (2,) float32, of A and of B; C: (m, n) bfloat16."""
    @T.prim_func
    def program(A: T.Tensor((m, k), F8), B: T.Tensor((n, k), F8), scales: T.Tensor((2,), "float32"),
                C: T.Tensor((m, n), "bfloat16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As = T.alloc_shared((bm, bk), F8)
            Bs = T.alloc_shared((bn, bk), F8)
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=3):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                Cf[i, j] = Cf[i, j] * scales[0] * scales[1]
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def by_block(m: int, n: int, k: int, bm: int = 128, bn: int = 128, group: int = 128, threads: int = 256):
    """sa: (m, k / group), one scale for group elements of a row; sb: (n / group, k / group), one for a square block."""
    groups = -(-k // group)

    @T.prim_func
    def program(A: T.Tensor((m, k), F8), B: T.Tensor((n, k), F8), sa: T.Tensor((m, groups), "float32"),
                sb: T.Tensor((-(-n // group), groups), "float32"), C: T.Tensor((m, n), "bfloat16")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As = T.alloc_shared((bm, group), F8)
            Bs = T.alloc_shared((bn, group), F8)
            scale = T.alloc_fragment((bm,), "float32")
            part = T.alloc_fragment((bm, bn), "float32")
            total = T.alloc_fragment((bm, bn), "float32")
            T.clear(total)
            for g in T.Pipelined(groups, num_stages=3):
                T.copy(A[by * bm, g * group], As)
                T.copy(B[bx * bn, g * group], Bs)
                for i in T.Parallel(bm):
                    scale[i] = sa[by * bm + i, g] * sb[bx * bn // group, g]
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    total[i, j] += part[i, j] * scale[i]
            T.copy(total, C[by * bm, bx * bn])

    return program


def scaled_mm(a, b, scales):
    """torch's product of float8 with a scale for each operand."""
    import torch

    return torch._scaled_mm(a, b.T, scales[0], scales[1], out_dtype=torch.bfloat16)


def check_per_tensor(m: int = 4096, n: int = 4096, k: int = 4096, tile: int = 128, on: Place = HERE) -> Comparison:
    """The reference multiplies the float8 values themselves: what the cast lost is not counted.

    The matrix unit adds them with about 13 bits: at most 2^-13 of the sum of sizes for each 32 of k.  Their roundings are
    independent, so they grow with the root of the steps.
    """
    a, b = normal((m, k), F8), normal((n, k), F8, 1)
    scales = np.array([0.5, 1.75], np.float32)
    wa, wb = wide(a), wide(b).T
    want = wa @ wb * 0.875
    steps = (k / 32)**0.5 * 2.0**-13 * (abs(wa) @ abs(wb)) * 0.875
    bound = product_bound(wa, wb, F8, "bfloat16") * 0.875 + 2 * EPS["float32"] * abs(want) + steps
    got = on.compile(per_tensor(m, n, k, tile, tile, threads=2 * tile), out_idx=[3])(a, b, scales)
    on.peer("torch._scaled_mm", scaled_mm, a, b, scales)
    return compare("gemm fp8 per_tensor", got, want, bound)


def check_by_block(m: int = 4096, n: int = 4096, k: int = 4096, tile: int = 128, on: Place = HERE) -> Comparison:
    """Scaling is part of the reference's operands; the roundings of part and total are both of float32 sums."""
    group = 128
    groups = -(-k // group)
    a, b = normal((m, k), F8), normal((n, k), F8, 1)
    rng = np.random.default_rng(2)
    sa = rng.uniform(0.5, 2, (m, groups)).astype(np.float32)
    sb = rng.uniform(0.5, 2, (-(-n // group), groups)).astype(np.float32)
    wa = wide(a) * wide(sa).repeat(group, 1)[:, :k]
    wb = wide(b) * wide(sb).repeat(group, 0)[:n].repeat(group, 1)[:, :k]
    bound = product_bound(wa, wb.T, F8, "bfloat16") + 3 * EPS["float32"] * (abs(wa) @ abs(wb.T))
    got = on.compile(by_block(m, n, k, tile, tile, threads=2 * tile), out_idx=[4])(a, b, sa, sb)
    return compare("gemm fp8 by_block", got, wa @ wb.T, bound)


if __name__ == "__main__":
    main(check_per_tensor, check_by_block)
