"""Causal attention as a client writes it: plain programs, forward, and backward in three kernels, one each for the deltas, for
blocks of keys and for blocks of queries.  With gates, a score gets the sum of their logarithms from its key to its query."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634


def forward(batch: int, seq: int, heads: int, dim: int, gated: bool, bm: int = 128, bn: int = 128) -> Any:
    """The kernel (Q, K, V, G, O, LSE); G (batch, heads, seq): sums of logarithms of gates; LSE in base 2."""
    x, row = T.Tensor((batch, seq, heads, dim), "bfloat16"), T.Tensor((batch, heads, seq), "float32")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def client_attention(Q: x, K: x, V: x, G: row, O: x, LSE: row):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=256) as (bx, h, b):
            Qs, Ks, Vs = (T.alloc_shared((n, dim), "bfloat16") for n in (bm, bn, bn))
            gk, gq = T.alloc_shared((bn,), "float32"), T.alloc_fragment((bm,), "float32")
            S, P = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "bfloat16")
            acc, top, new, total, part = T.alloc_fragment((bm, dim), "float32"), *(
                T.alloc_fragment((bm,), "float32") for _ in range(4))
            T.copy(Q[b, bx * bm:(bx + 1) * bm, h, :], Qs)
            if gated:
                T.copy(G[b, h, bx * bm:(bx + 1) * bm], gq)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(T.ceildiv((bx + 1) * bm, bn), num_stages=2):
                T.copy(K[b, k * bn:(k + 1) * bn, h, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                if gated:
                    T.copy(G[b, h, k * bn:(k + 1) * bn], gk)
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = S[i, j] * scale + ((gq[i] - gk[j]) * LOG2E if gated else 0.0)
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.if_then_else(k * bn + j <= bx * bm + i, S[i, j], -T.infinity("float32"))
                T.reduce_max(S, new, dim=1)
                for i in T.Parallel(bm):
                    new[i] = T.max(new[i], top[i])
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.exp2(S[i, j] - new[i])
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(bm):
                    total[i] = total[i] * T.exp2(top[i] - new[i]) + part[i]
                for i, j in T.Parallel(bm, dim):
                    acc[i, j] *= T.exp2(top[i] - new[i])
                T.copy(new, top)
                T.copy(S, P)
                T.copy(V[b, k * bn:(k + 1) * bn, h, :], Vs)
                T.gemm(P, Vs, acc)
            for i, j in T.Parallel(bm, dim):
                acc[i, j] /= total[i]
            for i in T.Parallel(bm):
                total[i] = top[i] + T.log2(total[i])
            T.copy(acc, O[b, bx * bm:(bx + 1) * bm, h, :])
            T.copy(total, LSE[b, h, bx * bm:(bx + 1) * bm])

    return client_attention


def backward(batch: int, seq: int, heads: int, dim: int, gated: bool, bm: int = 64, bn: int = 128) -> Any:
    """The kernel (Q, K, V, G, O, LSE, dO, D, dQ, dK, dV, dGq, dGk): the gradient of G is dGq - dGk."""
    x, row = T.Tensor((batch, seq, heads, dim), "bfloat16"), T.Tensor((batch, heads, seq), "float32")
    scale = dim**-0.5

    @T.macro
    def weigh(S, g_q, g_k, lse, place):
        for i, j in T.Parallel(*S.shape):
            q, k = place(i, j)
            S[i, j] = S[i, j] * (scale * LOG2E) + ((g_q(i, j) - g_k(i, j)) * LOG2E if gated else 0.0)
        for i, j in T.Parallel(*S.shape):
            q, k = place(i, j)
            S[i, j] = T.if_then_else(k <= q, T.exp2(S[i, j] - lse(i, j)), 0.0)

    @T.prim_func
    def client_gradients(Q: x, K: x, V: x, G: row, O: x, LSE: row, dO: x, D: row, dQ: x, dK: x, dV: x, dGq: row, dGk: row):
        with T.Kernel(T.ceildiv(seq, 64), heads, batch, threads=128) as (bx, h, b):
            o, do = T.alloc_fragment((64, dim), "float32"), T.alloc_fragment((64, dim), "float32")
            d = T.alloc_fragment((64,), "float32")
            T.copy(O[b, bx * 64:(bx + 1) * 64, h, :], o)
            T.copy(dO[b, bx * 64:(bx + 1) * 64, h, :], do)
            for i, j in T.Parallel(64, dim):
                o[i, j] *= do[i, j]
            T.reduce_sum(o, d, dim=1)
            T.copy(d, D[b, h, bx * 64:(bx + 1) * 64])
        with T.Kernel(T.ceildiv(seq, bn), heads, batch, threads=256) as (bx, h, b):
            Ks, Vs, Qs, dOs = (T.alloc_shared((n, dim), "bfloat16") for n in (bn, bn, bm, bm))
            lse, d, gq, gk = (T.alloc_shared((n,), "float32") for n in (bm, bm, bm, bn))
            S, E = T.alloc_fragment((bn, bm), "float32"), T.alloc_fragment((bn, bm), "float32")
            P, dS = T.alloc_fragment((bn, bm), "bfloat16"), T.alloc_fragment((bn, bm), "bfloat16")
            dk, dv, sums = T.alloc_fragment((bn, dim), "float32"), T.alloc_fragment((bn, dim), "float32"), T.alloc_fragment(
                (bn,), "float32")
            T.copy(K[b, bx * bn:(bx + 1) * bn, h, :], Ks)
            T.copy(V[b, bx * bn:(bx + 1) * bn, h, :], Vs)
            if gated:
                T.copy(G[b, h, bx * bn:(bx + 1) * bn], gk)
                T.clear(sums)
            T.clear(dk)
            T.clear(dv)
            for n in T.Pipelined(T.ceildiv(seq, bm) - bx * bn // bm, num_stages=2):
                t = bx * bn // bm + n
                T.copy(Q[b, t * bm:(t + 1) * bm, h, :], Qs)
                T.copy(LSE[b, h, t * bm:(t + 1) * bm], lse)
                if gated:
                    T.copy(G[b, h, t * bm:(t + 1) * bm], gq)
                T.gemm(Ks, Qs, S, transpose_B=True, clear_accum=True)
                weigh(S, lambda i, j: gq[j], lambda i, j: gk[i], lambda i, j: lse[j],
                      lambda i, j, t=t: (t * bm + j, bx * bn + i))
                T.copy(dO[b, t * bm:(t + 1) * bm, h, :], dOs)
                T.copy(D[b, h, t * bm:(t + 1) * bm], d)
                T.gemm(Vs, dOs, E, transpose_B=True, clear_accum=True)
                T.copy(S, P)
                T.gemm(P, dOs, dv)
                for i, j in T.Parallel(bn, bm):
                    S[i, j] *= E[i, j] - d[j]
                if gated:
                    T.reduce_sum(S, sums, dim=1, clear=False)
                T.copy(S, dS)
                T.gemm(dS, Qs, dk)
            for i, j in T.Parallel(bn, dim):
                dk[i, j] *= scale
            T.copy(dk, dK[b, bx * bn:(bx + 1) * bn, h, :])
            T.copy(dv, dV[b, bx * bn:(bx + 1) * bn, h, :])
            if gated:
                T.copy(sums, dGk[b, h, bx * bn:(bx + 1) * bn])
        with T.Kernel(T.ceildiv(seq, bn), heads, batch, threads=256) as (bx, h, b):
            Qs, dOs, Ks, Vs = (T.alloc_shared((n, dim), "bfloat16") for n in (bn, bn, bm, bm))
            gk = T.alloc_shared((bm,), "float32")
            lse, d, gq, sums = (T.alloc_fragment((bn,), "float32") for _ in range(4))
            S, E = T.alloc_fragment((bn, bm), "float32"), T.alloc_fragment((bn, bm), "float32")
            dS, dq = T.alloc_fragment((bn, bm), "bfloat16"), T.alloc_fragment((bn, dim), "float32")
            T.copy(Q[b, bx * bn:(bx + 1) * bn, h, :], Qs)
            T.copy(dO[b, bx * bn:(bx + 1) * bn, h, :], dOs)
            T.copy(LSE[b, h, bx * bn:(bx + 1) * bn], lse)
            T.copy(D[b, h, bx * bn:(bx + 1) * bn], d)
            if gated:
                T.copy(G[b, h, bx * bn:(bx + 1) * bn], gq)
                T.clear(sums)
            T.clear(dq)
            for k in T.Pipelined(T.ceildiv((bx + 1) * bn, bm), num_stages=2):
                T.copy(K[b, k * bm:(k + 1) * bm, h, :], Ks)
                if gated:
                    T.copy(G[b, h, k * bm:(k + 1) * bm], gk)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                weigh(S, lambda i, j: gq[i], lambda i, j: gk[j], lambda i, j: lse[i],
                      lambda i, j, k=k: (bx * bn + i, k * bm + j))
                T.copy(V[b, k * bm:(k + 1) * bm, h, :], Vs)
                T.gemm(dOs, Vs, E, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bn, bm):
                    S[i, j] *= E[i, j] - d[i]
                if gated:
                    T.reduce_sum(S, sums, dim=1, clear=False)
                T.copy(S, dS)
                T.gemm(dS, Ks, dq)
            for i, j in T.Parallel(bn, dim):
                dq[i, j] *= scale
            T.copy(dq, dQ[b, bx * bn:(bx + 1) * bn, h, :])
            if gated:
                T.copy(sums, dGq[b, h, bx * bn:(bx + 1) * bn])

    return client_gradients


@cache
def kernels(batch: int, seq: int, heads: int, dim: int, gated: bool) -> tuple[Any, Any]:
    return tuple(tilelang.compile(f(batch, seq, heads, dim, gated)) for f in (forward, backward))  # type: ignore[return-value]


class ClientAttention(torch.autograd.Function):
    """Attention of (batch, seq, heads, dim) tensors by the client's kernels; log_gates (batch, seq, heads), float32 or None."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gates: torch.Tensor | None) -> torch.Tensor:
        batch, seq, heads, dim = q.shape
        out, lse = torch.empty_like(q), torch.empty(batch, heads, seq, device=q.device)
        g = lse if log_gates is None else log_gates.transpose(1, 2).cumsum(-1)
        kernels(batch, seq, heads, dim, log_gates is not None)[0](q, k, v, g, out, lse)
        ctx.save_for_backward(q, k, v, g, out, lse)
        ctx.gated = log_gates is not None
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, g, out, lse = ctx.saved_tensors
        delta, of_q, of_k = (torch.empty_like(lse) for _ in range(3))
        found = [torch.empty_like(x) for x in (q, k, v)]
        kernels(*q.shape, ctx.gated)[1](q, k, v, g, out, lse, grad, delta, *found, of_q, of_k)
        later = (of_q - of_k).flip(-1).cumsum(-1).flip(-1).transpose(1, 2) if ctx.gated else None
        return *found, later
