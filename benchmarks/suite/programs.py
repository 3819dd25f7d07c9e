"""Plain tile programs with their tiles open: what is measured where a library kernel does not choose them."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

LOG2E = 1.4426950408889634


def gemm(m: int, n: int, k: int, trans_b: bool, dtype: str, out: str, bm: int = 128, bn: int = 256, bk: int = 64,
         threads: int = 256, stages: int = 4, panel: int = 8) -> Any:
    """C (m, n) = A (m, k) @ B, B (n, k) when trans_b, else (k, n); float32 sums."""
    b_shape, b_tile = ((n, k), (bn, bk)) if trans_b else ((k, n), (bk, bn))

    @T.prim_func
    def matmul(A: T.Tensor((m, k), dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As = T.alloc_shared((bm, bk), dtype)
            Bs = T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((bm, bn), "float32")
            T.use_swizzle(panel)
            T.clear(acc)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, i * bk], As)
                if trans_b:
                    T.copy(B[bx * bn, i * bk], Bs)
                else:
                    T.copy(B[i * bk, bx * bn], Bs)
                T.gemm(As, Bs, acc, transpose_B=trans_b)
            T.copy(acc, C[by * bm, bx * bn])

    return matmul


def attention(batch: int, heads: int, kv_heads: int, seq: int, dim: int, causal: bool, dtype: str, bm: int = 128,
              bn: int = 128, threads: int = 256, stages: int = 2) -> Any:
    """O = softmax(Q K^T / sqrt(dim)) V, all (batch, heads, seq, dim)."""
    c, group = dim**-0.5 * LOG2E, heads // kv_heads  # exp2 is cheaper than exp: log2(e) goes into the scale
    shape, kv_shape = (batch, heads, seq, dim), (batch, kv_heads, seq, dim)

    @T.prim_func
    def attend(Q: T.Tensor(shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
               O: T.Tensor(shape, dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, z):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top = T.alloc_fragment((bm,), "float32")
            old = T.alloc_fragment((bm,), "float32")
            factor = T.alloc_fragment((bm,), "float32")
            part = T.alloc_fragment((bm,), "float32")
            total = T.alloc_fragment((bm,), "float32")
            T.copy(Q[z, h, bx * bm:(bx + 1) * bm, :], Qs)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            blocks = T.ceildiv(T.min((bx + 1) * bm, seq), bn) if causal else T.ceildiv(seq, bn)
            for j in T.Pipelined(blocks, num_stages=stages):
                T.copy(K[z, h // group, j * bn:(j + 1) * bn, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
                if causal:
                    for r, s in T.Parallel(bm, bn):
                        S[r, s] = T.if_then_else(bx * bm + r >= j * bn + s, S[r, s], -T.infinity("float32"))
                elif seq % bn:
                    for r, s in T.Parallel(bm, bn):
                        S[r, s] = T.if_then_else(j * bn + s < seq, S[r, s], -T.infinity("float32"))
                T.copy(top, old)
                T.reduce_max(S, top, dim=1, clear=False)
                for r in T.Parallel(bm):
                    factor[r] = T.exp2(old[r] * c - top[r] * c)
                for r, s in T.Parallel(bm, bn):
                    S[r, s] = T.exp2(S[r, s] * c - top[r] * c)
                T.reduce_sum(S, part, dim=1)
                for r in T.Parallel(bm):
                    total[r] = total[r] * factor[r] + part[r]
                for r, s in T.Parallel(bm, dim):
                    acc[r, s] *= factor[r]
                T.copy(S, P)
                T.copy(V[z, h // group, j * bn:(j + 1) * bn, :], Vs)
                T.gemm(P, Vs, acc, policy=T.GemmWarpPolicy.FullRow)
            for r, s in T.Parallel(bm, dim):
                acc[r, s] /= total[r]
            T.copy(acc, O[z, h, bx * bm:(bx + 1) * bm, :])

    return attend
