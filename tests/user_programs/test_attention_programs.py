"""Attention with sinks, lengths, masks of blocks, and its backward: written from the specification alone."""

import math

import numpy as np
import torch
from spec_harness import HEAVY

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634


@tilelang.jit
def fa_sink(Q, K, V, sink, window: int, BM: int = 32, BN: int = 32):
    B, Hq, Hk, Sq, Sk, D = T.const("B Hq Hk Sq Sk D")
    Q: T.Tensor((B, Hq, Sq, D), "bfloat16")
    K: T.Tensor((B, Hk, Sk, D), "bfloat16")
    V: T.Tensor((B, Hk, Sk, D), "bfloat16")
    sink: T.Tensor((Hq,), "float32")
    O = T.empty((B, Hq, Sq, D), "bfloat16")
    LSE = T.empty((B, Hq, Sq), "float32")
    g = Hq // Hk
    off = Sk - Sq
    with T.Kernel(T.ceildiv(Sq, BM), Hq, B, threads=128) as (bx, h, b):
        Qs = T.alloc_shared((BM, D), "bfloat16")
        Ks = T.alloc_shared((BN, D), "bfloat16")
        Vs = T.alloc_shared((BN, D), "bfloat16")
        S = T.alloc_fragment((BM, BN), "float32")
        P = T.alloc_fragment((BM, BN), "bfloat16")
        acc = T.alloc_fragment((BM, D), "float32")
        m = T.alloc_fragment((BM,), "float32")
        mp = T.alloc_fragment((BM,), "float32")
        l = T.alloc_fragment((BM,), "float32")
        a = T.alloc_fragment((BM,), "float32")
        rs = T.alloc_fragment((BM,), "float32")
        sc = D**-0.5
        T.copy(Q[b, h, bx * BM : (bx + 1) * BM, :], Qs)
        T.clear(acc)
        T.fill(l, 1.0)
        for i in T.Parallel(BM):
            m[i] = sink[h]
        hi = T.min(T.ceildiv((bx + 1) * BM + off, BN), T.ceildiv(Sk, BN))
        lo = T.max(0, (bx * BM + off - window + 1) // BN)
        for k in T.Pipelined(lo, hi, num_stages=2):
            T.copy(K[b, h // g, k * BN : (k + 1) * BN, :], Ks)
            T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(BM, BN):
                qi = bx * BM + i + off
                kj = k * BN + j
                S[i, j] = T.if_then_else(
                    T.bitwise_and(kj <= qi, kj > qi - window) if False else (kj <= qi and kj > qi - window and kj < Sk),
                    S[i, j] * sc,
                    -T.infinity("float32"),
                )
            T.copy(m, mp)
            T.reduce_max(S, m, dim=1, clear=False)
            for i in T.Parallel(BM):
                a[i] = T.exp(mp[i] - m[i])
            for i, j in T.Parallel(BM, BN):
                S[i, j] = T.exp(S[i, j] - m[i])
            T.reduce_sum(S, rs, dim=1)
            for i in T.Parallel(BM):
                l[i] = l[i] * a[i] + rs[i]
            T.copy(S, P)
            for i, j in T.Parallel(BM, D):
                acc[i, j] *= a[i]
            T.copy(V[b, h // g, k * BN : (k + 1) * BN, :], Vs)
            T.gemm(P, Vs, acc, policy=T.GemmWarpPolicy.FullRow)
        for i, j in T.Parallel(BM, D):
            acc[i, j] /= l[i]
        T.copy(acc, O[b, h, bx * BM : (bx + 1) * BM, :])
        for i in T.Parallel(BM):
            if bx * BM + i < Sq:
                LSE[b, h, bx * BM + i] = m[i] + T.log(l[i])
    return O, LSE


@HEAVY
def test_attention_sink_window(case):
    B, Hq, Hk, Sq, Sk, D, w = 1, 2, 1, 40, 70, 32, 25
    q, k, v = case.randn(B, Hq, Sq, D).bfloat16(), case.randn(B, Hk, Sk, D).bfloat16(), case.randn(B, Hk, Sk, D).bfloat16()
    sink = case.randn(Hq)
    kk, vv = k.float().repeat_interleave(2, 1), v.float().repeat_interleave(2, 1)
    s = q.float() @ kk.transpose(-1, -2) * D**-0.5
    qi = torch.arange(Sq)[:, None] + Sk - Sq
    kj = torch.arange(Sk)[None]
    s = s.masked_fill(~((kj <= qi) & (kj > qi - w)), -math.inf)
    s2 = torch.cat([s, sink[None, :, None, None].expand(B, Hq, Sq, 1)], -1)
    p = s2.softmax(-1)[..., :-1]
    case.run(fa_sink.compile(q, k, v, sink, w), [q, k, v, sink], [(p @ vv).bfloat16(), s2.logsumexp(-1)], 2e-2, 2e-2)


@tilelang.jit
def fa_varlen(Q, K, V, cu, slopes, max_len: int, BM: int = 32, BN: int = 32):
    tot, nb = T.dynamic("tot, nb")
    H, D = T.const("H D")
    Q: T.Tensor((tot, H, D), "float16")
    K: T.Tensor((tot, H, D), "float16")
    V: T.Tensor((tot, H, D), "float16")
    cu: T.Tensor((nb + 1,), "int32")
    slopes: T.Tensor((H,), "float32")
    O = T.empty((tot, H, D), "float16")
    with T.Kernel(T.ceildiv(max_len, BM), H, nb, threads=64) as (bx, h, b):
        Qs = T.alloc_shared((BM, D), "float16")
        Ks = T.alloc_shared((BN, D), "float16")
        Vs = T.alloc_shared((BN, D), "float16")
        Ps = T.alloc_shared((BM, BN), "float16")
        S = T.alloc_fragment((BM, BN), "float32")
        acc = T.alloc_fragment((BM, D), "float32")
        m = T.alloc_fragment((BM,), "float32")
        mp = T.alloc_fragment((BM,), "float32")
        l = T.alloc_fragment((BM,), "float32")
        rs = T.alloc_fragment((BM,), "float32")
        st = cu[b]
        n = cu[b + 1] - st
        if bx * BM < n:
            T.copy(Q[st + bx * BM : st + (bx + 1) * BM, h, :], Qs)
            T.clear(acc)
            T.clear(l)
            T.fill(m, -1e30)
            for k in T.Pipelined(T.ceildiv(T.min((bx + 1) * BM, n), BN), num_stages=1):
                T.copy(K[st + k * BN : st + (k + 1) * BN, h, :], Ks)
                T.copy(V[st + k * BN : st + (k + 1) * BN, h, :], Vs)
                T.clear(S)
                T.gemm(Qs, Ks, S, transpose_B=True)
                for i, j in T.Parallel(BM, BN):
                    d = (bx * BM + i) - (k * BN + j)
                    S[i, j] = T.if_then_else(d >= 0, S[i, j] * (D**-0.5) - slopes[h] * T.cast(d, "float32"), -1e30)
                T.copy(m, mp)
                T.reduce_max(S, m, dim=-1, clear=False)
                for i, j in T.Parallel(BM, BN):
                    S[i, j] = T.exp2((S[i, j] - m[i]) * LOG2E)
                T.reduce_sum(S, rs, dim=1)
                for i in T.Parallel(BM):
                    mp[i] = T.exp2((mp[i] - m[i]) * LOG2E)
                    l[i] = l[i] * mp[i] + rs[i]
                for i, j in T.Parallel(BM, D):
                    acc[i, j] = acc[i, j] * mp[i]
                T.copy(S, Ps)
                T.gemm(Ps, Vs, acc)
            for i, j in T.Parallel(BM, D):
                if bx * BM + i < n:
                    O[st + bx * BM + i, h, j] = acc[i, j] / l[i]
    return O


@HEAVY
def test_attention_varlen_alibi(case):
    lens = [5, 37, 0, 13]
    cu = torch.tensor([0] + list(np.cumsum(lens)), dtype=torch.int32)
    tot, H, D = sum(lens), 2, 32
    q, k, v = [case.randn(tot, H, D).half() for _ in range(3)]
    sl = torch.tensor([0.25, 0.0625])
    ref = torch.zeros(tot, H, D)
    for b in range(4):
        s, e = int(cu[b]), int(cu[b + 1])
        if s == e:
            continue
        sc = torch.einsum("ihd,jhd->hij", q[s:e].float(), k[s:e].float()) * D**-0.5
        d = torch.arange(e - s)[:, None] - torch.arange(e - s)[None]
        sc = (sc - sl[:, None, None] * d).masked_fill(d < 0, -math.inf)
        ref[s:e] = torch.einsum("hij,jhd->ihd", sc.softmax(-1), v[s:e].float())
    case.run(fa_varlen.compile(q, k, v, cu, sl, 37), [q, k, v, cu, sl], ref.half(), 2e-2, 2e-2)


@tilelang.jit
def fa_bwd(Q, K, V, dO, LSE, Delta, dQ, dK, dV, causal: bool, BM: int = 32, BN: int = 32):
    B, H, S, D = T.const("B H S D")
    Q: T.Tensor((B, H, S, D), "float16")
    K: T.Tensor((B, H, S, D), "float16")
    V: T.Tensor((B, H, S, D), "float16")
    dO: T.Tensor((B, H, S, D), "float16")
    LSE: T.Tensor((B, H, S), "float32")
    Delta: T.Tensor((B, H, S), "float32")
    dQ: T.Tensor((B, H, S, D), "float32")
    dK: T.Tensor((B, H, S, D), "float16")
    dV: T.Tensor((B, H, S, D), "float16")
    with T.Kernel(T.ceildiv(S, BN), H, B, threads=128) as (bx, h, b):
        Ks = T.alloc_shared((BN, D), "float16")
        Vs = T.alloc_shared((BN, D), "float16")
        q = T.alloc_shared((BM, D), "float16")
        do = T.alloc_shared((BM, D), "float16")
        lse = T.alloc_shared((BM,), "float32")
        delta = T.alloc_shared((BM,), "float32")
        ds = T.alloc_shared((BN, BM), "float16")
        qkT = T.alloc_fragment((BN, BM), "float32")
        dpT = T.alloc_fragment((BN, BM), "float32")
        pT = T.alloc_fragment((BN, BM), "float16")
        dsT = T.alloc_fragment((BN, BM), "float16")
        dv = T.alloc_fragment((BN, D), "float32")
        dk = T.alloc_fragment((BN, D), "float32")
        dq = T.alloc_fragment((BM, D), "float32")
        T.copy(K[b, h, bx * BN : (bx + 1) * BN, :], Ks)
        T.copy(V[b, h, bx * BN : (bx + 1) * BN, :], Vs)
        T.clear(dv)
        T.clear(dk)
        st = (bx * BN // BM) if causal else 0
        for k in T.Pipelined(st, T.ceildiv(S, BM), num_stages=2):
            T.copy(Q[b, h, k * BM : (k + 1) * BM, :], q)
            T.clear(qkT)
            T.gemm(Ks, q, qkT, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(LSE[b, h, k * BM : (k + 1) * BM], lse)
            for i, j in T.Parallel(BN, BM):
                qkT[i, j] = T.exp(qkT[i, j] * D**-0.5 - lse[j])
            if causal:
                for i, j in T.Parallel(BN, BM):
                    qkT[i, j] = T.if_then_else(bx * BN + i <= k * BM + j, qkT[i, j], 0)
            for i, j in T.Parallel(BN, BM):
                qkT[i, j] = T.if_then_else(k * BM + j < S, qkT[i, j], 0)
            T.copy(dO[b, h, k * BM : (k + 1) * BM, :], do)
            T.clear(dpT)
            T.gemm(Vs, do, dpT, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(qkT, pT)
            T.gemm(pT, do, dv, policy=T.GemmWarpPolicy.FullRow)
            T.copy(Delta[b, h, k * BM : (k + 1) * BM], delta)
            for i, j in T.Parallel(BN, BM):
                dsT[i, j] = qkT[i, j] * (dpT[i, j] - delta[j]) * D**-0.5
            T.gemm(dsT, q, dk, policy=T.GemmWarpPolicy.FullRow)
            T.copy(dsT, ds)
            T.clear(dq)
            T.gemm(ds, Ks, dq, transpose_A=True)
            T.atomic_add(dQ[b, h, k * BM : (k + 1) * BM, :], dq)
        T.copy(dv, dV[b, h, bx * BN : (bx + 1) * BN, :])
        T.copy(dk, dK[b, h, bx * BN : (bx + 1) * BN, :])


@HEAVY
def test_attention_backward(case):
    for S, causal in ((64, True), (50, False)):
        B, H, D = 1, 1, 32
        q, k, v = [case.randn(B, H, S, D).half() for _ in range(3)]
        do = case.randn(B, H, S, D).half()
        qf, kf, vf = [t.float().requires_grad_() for t in (q, k, v)]
        s = qf @ kf.transpose(-1, -2) * D**-0.5
        if causal:
            s = s.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
        o = s.softmax(-1) @ vf
        o.backward(do.float())
        lse = s.logsumexp(-1).detach()
        delta = (o.detach() * do.float()).sum(-1)
        dq, dk, dv = torch.zeros(B, H, S, D), torch.zeros(B, H, S, D).half(), torch.zeros(B, H, S, D).half()
        case.run(
            fa_bwd.compile(q, k, v, do, lse, delta, dq, dk, dv, causal),
            [q, k, v, do, lse, delta, dq, dk, dv],
            None,
            2e-2,
            2e-2,
            inplace={6: qf.grad, 7: kf.grad.half(), 8: vf.grad.half()},
        )


@tilelang.jit
def block_sparse_attn(Q, K, V, Mask, BM: int = 32, BN: int = 32):
    B, H, S, D, NM, NN = T.const("B H S D NM NN")
    Q: T.Tensor((B, H, S, D), "float16")
    K: T.Tensor((B, H, S, D), "float16")
    V: T.Tensor((B, H, S, D), "float16")
    Mask: T.Tensor((B, H, NM, NN), "bool")
    O = T.empty((B, H, S, D), "float16")
    with T.Kernel(T.ceildiv(S, BM), H, B, threads=128) as (bx, h, b):
        Qs = T.alloc_shared((BM, D), "float16")
        Ks = T.alloc_shared((BN, D), "float16")
        Vs = T.alloc_shared((BN, D), "float16")
        S_ = T.alloc_fragment((BM, BN), "float32")
        P = T.alloc_fragment((BM, BN), "float16")
        acc = T.alloc_fragment((BM, D), "float32")
        m, mp, l, rs = (
            [T.alloc_fragment((BM,), "float32") for _ in range(4)]
            if False
            else [T.alloc_fragment((BM,), "float32") for _ in (0, 1, 2, 3)]
        )
        msk = T.alloc_local((NN,), "bool")
        for i in T.serial(NN):
            msk[i] = Mask[b, h, bx, i]
        T.copy(Q[b, h, bx * BM : (bx + 1) * BM, :], Qs)
        T.clear(acc)
        T.clear(l)
        T.fill(m, -T.infinity("float32"))
        for k in T.Pipelined(T.ceildiv(S, BN), num_stages=2):
            if msk[k]:
                T.copy(K[b, h, k * BN : (k + 1) * BN, :], Ks)
                T.gemm(Qs, Ks, S_, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BM, BN):
                    S_[i, j] = T.if_then_else(bx * BM + i >= k * BN + j, S_[i, j] * D**-0.5, -T.infinity("float32"))
                T.copy(m, mp)
                T.reduce_max(S_, m, dim=1, clear=False)
                for i, j in T.Parallel(BM, BN):
                    S_[i, j] = T.exp(S_[i, j] - m[i])
                T.reduce_sum(S_, rs, dim=1)
                for i in T.Parallel(BM):
                    l[i] = l[i] * T.exp(mp[i] - m[i]) + rs[i]
                for i, j in T.Parallel(BM, D):
                    acc[i, j] *= T.exp(mp[i] - m[i])
                T.copy(S_, P)
                T.copy(V[b, h, k * BN : (k + 1) * BN, :], Vs)
                T.gemm(P, Vs, acc)
        for i, j in T.Parallel(BM, D):
            acc[i, j] /= l[i]
        T.copy(acc, O[b, h, bx * BM : (bx + 1) * BM, :])
    return O


@HEAVY
def test_block_sparse_attention(case):
    B, H, S, D = 1, 2, 96, 32
    q, k, v = [case.randn(B, H, S, D).half() for _ in range(3)]
    mask = (torch.rand(B, H, 3, 3) < 0.5) | torch.eye(3).bool()
    full = mask.repeat_interleave(32, 2).repeat_interleave(32, 3) & torch.ones(S, S).tril().bool()
    ref = (q.float() @ k.float().transpose(-1, -2) * D**-0.5).masked_fill(~full, -math.inf).softmax(-1) @ v.float()
    case.run(block_sparse_attn.compile(q, k, v, mask), [q, k, v, mask], ref.half(), 2e-2, 2e-2)
