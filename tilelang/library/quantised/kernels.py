"""The kernel of dequant_matmul: GEMM with quantised weights of four bits.

The weights are dequantised into registers, as the left operand of the MMA (swap-AB): C.T = D A.T. So the dequantised weights
need no bandwidth of shared memory, and a tile can be as narrow as the few rows of A. Where this gives too few blocks, the
blocks split k, and a second launch adds the partial sums in a fixed order.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import tilelang.language as T

from .form import DequantForm


@T.macro
def _accumulate_split(f, A, W, scales, zeros, at, Cf):
    """Compute a block's partial sums of C.T, over its split of k."""
    t, (bx, by, bz) = f.tile, at
    own, column = f.steps * t.bk, bx * t.bn
    As = T.alloc_shared((t.bm, t.bk), f.element)
    Ws = T.alloc_shared((t.bn, t.bk // 2), "uint8")
    Ss = T.alloc_shared((t.bn, f.groups), f.element)
    D = T.alloc_fragment((t.bn, t.bk), f.element)
    T.copy(scales[column, bz * own // f.group], Ss)
    if f.lut:
        values = T.alloc_shared((16,), f.element)
        T.copy(zeros, values)
    elif f.zero_points:
        Zs = T.alloc_shared((t.bn, f.groups), "uint8")
        T.copy(zeros[column, bz * own // f.group], Zs)
    T.clear(Cf)
    for ko in T.Pipelined(f.steps, num_stages=t.stages):
        T.copy(W[column, (bz * own + ko * t.bk) // 2], Ws)
        T.copy(A[by * t.bm, bz * own + ko * t.bk], As)
        for i, j in T.Parallel(t.bn, t.bk):
            g = (ko * t.bk + j) // f.group
            q = T.cast((Ws[i, j // 2] >> T.cast(j % 2 * 4, "uint8")) & T.uint8(15), "int32")
            if f.lut:
                D[i, j] = values[q] * Ss[i, g]
            elif f.zero_points:
                D[i, j] = T.cast(q - T.cast(Zs[i, g], "int32"), f.element) * Ss[i, g]
            else:
                D[i, j] = T.cast(q, f.element) * Ss[i, g]
        T.gemm(D, As, Cf, transpose_B=True)


def dequant_gemm(f: DequantForm) -> Any:
    """The kernel with the parameters (A, W, scales, zero points or look-up table, P, C).

    P: (splits, m, n) float32 workspace of any contents, used for more than one split.
    """
    m, n, k, t = f.m, f.n, f.k, f.tile
    second = (16,) if f.lut else (n, ceil(k / f.group)) if f.zero_points else (1,)
    blocks = (ceil(n / t.bn), ceil(m / t.bm))

    @T.prim_func
    def dequant_matmul(A: T.Tensor((m, k), f.element), W: T.Tensor((n, k // 2), "uint8"),
                     scales: T.Tensor((n, k // f.group), f.element),
                     zeros: T.Tensor(second, f.element if f.lut else "uint8"),
                     P: T.Tensor((t.splits, m, n) if t.splits > 1 else (1,), "float32"), C: T.Tensor((m, n), f.element)):
        if t.splits == 1:
            with T.Kernel(*blocks, threads=t.threads) as (bx, by):
                Cf = T.alloc_fragment((t.bn, t.bm), "float32")
                _accumulate_split(f, A, W, scales, zeros, (bx, by, 0), Cf)
                turned = T.alloc_fragment((t.bm, t.bn), "float32")
                T.transpose(Cf, turned)
                T.copy(turned, C[by * t.bm, bx * t.bn])
        else:
            with T.Kernel(*blocks, t.splits, threads=t.threads) as (bx, by, bz):
                Cf = T.alloc_fragment((t.bn, t.bm), "float32")
                _accumulate_split(f, A, W, scales, zeros, (bx, by, bz), Cf)
                for i, j in T.Parallel(t.bn, t.bm):
                    if T.And(by * t.bm + j < m, bx * t.bn + i < n):
                        P[bz, by * t.bm + j, bx * t.bn + i] = Cf[i, j]
            with T.Kernel(ceil(n / 256), m, threads=256) as (bx, row):
                T.pdl_sync()
                total = T.alloc_fragment((256,), "float32")
                T.clear(total)
                for p in T.unroll(t.splits):
                    for j in T.Parallel(256):
                        total[j] += P[p, row, bx * 256 + j]
                for j in T.Parallel(256):
                    C[row, bx * 256 + j] = T.cast(total[j], f.element)

    return dequant_matmul
