"""Attention, its backward, decoding, linear attention, recurrences: written from the specification alone."""

import math

import numpy as np
import torch
from spec_harness import EVERY, HEAVY, close

import tilelang
import tilelang.language as T

F = torch.nn.functional
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
def paged_decode(Q, KC, VC, table, lens, splits: int, BN: int = 16):
    B, H, HK, D, NP, P, MAXP = T.const("B H HK D NP P MAXP")
    Q: T.Tensor((B, H, D), "float16")
    KC: T.Tensor((NP, P, HK, D), "float16")
    VC: T.Tensor((NP, P, HK, D), "float16")
    table: T.Tensor((B, MAXP), "int32")
    lens: T.Tensor((B,), "int32")
    G = H // HK
    BH = T.max(16, G) if False else 16
    part = T.empty((B, H, splits, D), "float32")
    plse = T.empty((B, H, splits), "float32")
    O = T.empty((B, H, D), "float16")
    with T.Kernel(splits, HK, B, threads=64) as (sp, hk, b):
        Qs = T.alloc_shared((BH, D), "float16")
        Ks = T.alloc_shared((BN, D), "float16")
        Vs = T.alloc_shared((BN, D), "float16")
        Ps = T.alloc_shared((BH, BN), "float16")
        S = T.alloc_fragment((BH, BN), "float32")
        acc = T.alloc_fragment((BH, D), "float32")
        m = T.alloc_fragment((BH,), "float32")
        mp = T.alloc_fragment((BH,), "float32")
        l = T.alloc_fragment((BH,), "float32")
        rs = T.alloc_fragment((BH,), "float32")
        n = lens[b]
        per = T.ceildiv(T.ceildiv(n, splits), P) * P
        s0 = sp * per
        s1 = T.min(n, s0 + per)
        for i, j in T.Parallel(BH, D):
            if i < G:
                Qs[i, j] = Q[b, hk * G + i, j]
            else:
                Qs[i, j] = 0
        T.clear(acc)
        T.clear(l)
        T.fill(m, -1e30)
        for k in T.Pipelined(T.ceildiv(T.max(s1 - s0, 0), BN), num_stages=2):
            tok = s0 + k * BN
            page = table[b, tok // P]
            T.copy(KC[page, tok % P : tok % P + BN, hk, :], Ks)
            T.copy(VC[page, tok % P : tok % P + BN, hk, :], Vs)
            T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(BH, BN):
                S[i, j] = T.if_then_else(tok + j < s1, S[i, j] * D**-0.5, -1e30)
            T.copy(m, mp)
            T.reduce_max(S, m, dim=1, clear=False)
            for i, j in T.Parallel(BH, BN):
                S[i, j] = T.exp(S[i, j] - m[i])
            T.reduce_sum(S, rs, dim=1)
            T.copy(S, Ps)
            for i in T.Parallel(BH):
                l[i] = l[i] * T.exp(mp[i] - m[i]) + rs[i]
            for i, j in T.Parallel(BH, D):
                acc[i, j] *= T.exp(mp[i] - m[i])
            T.gemm(Ps, Vs, acc, policy=T.GemmWarpPolicy.FullCol)
        for i, j in T.Parallel(BH, D):
            if i < G:
                part[b, hk * G + i, sp, j] = T.if_then_else(l[i] > 0, acc[i, j] / l[i], 0)
        for i in T.Parallel(BH):
            if i < G:
                plse[b, hk * G + i, sp] = T.if_then_else(l[i] > 0, m[i] + T.log(l[i]), -T.infinity("float32"))
    with T.Kernel(H, B, threads=64) as (h, b):
        o = T.alloc_fragment((D,), "float32")
        mx = T.alloc_var("float32", init=-T.infinity("float32"))
        den = T.alloc_var("float32")
        T.clear(o)
        for s in T.serial(splits):
            mx = T.max(mx, plse[b, h, s])
        for s in T.serial(splits):
            w = T.exp(plse[b, h, s] - mx)
            den += w
            for j in T.Parallel(D):
                o[j] += part[b, h, s, j] * w
        for j in T.Parallel(D):
            O[b, h, j] = o[j] / den
    return O, part, plse


@HEAVY
def test_paged_split_decode(case):
    B, H, HK, D, P, NP = 2, 8, 2, 32, 32, 9
    lens = torch.tensor([70, 129], dtype=torch.int32)
    perm = torch.randperm(NP).int()
    table = torch.zeros(2, 5, dtype=torch.int32)
    table[0, :3] = perm[:3]
    table[1, :5] = perm[3:8]
    q, kc, vc = case.randn(B, H, D).half(), case.randn(NP, P, HK, D).half(), case.randn(NP, P, HK, D).half()
    ref = torch.zeros(B, H, D)
    for b in range(B):
        n = int(lens[b])
        k = kc[table[b].long()].reshape(-1, HK, D)[:n].float().repeat_interleave(4, 1)
        v = vc[table[b].long()].reshape(-1, HK, D)[:n].float().repeat_interleave(4, 1)
        p = (torch.einsum("hd,nhd->hn", q[b].float(), k) * D**-0.5).softmax(-1)
        ref[b] = torch.einsum("hn,nhd->hd", p, v)

    out, _ = case.call(paged_decode.compile(q, kc, vc, table, lens, 3), q, kc, vc, table, lens)
    close(out[0], ref.half(), 2e-2, 2e-2)


@tilelang.jit(out_idx=[-1])
def mla(B, H, S, D, R, BH=16, BN=32):
    sc = (D + R) ** -0.5

    @T.prim_func
    def main(
        Q: T.Tensor((B, H, D), "bfloat16"),
        Qr: T.Tensor((B, H, R), "bfloat16"),
        KV: T.Tensor((B, S, D), "bfloat16"),
        Kr: T.Tensor((B, S, R), "bfloat16"),
        O: T.Tensor((B, H, D), "bfloat16"),
    ):
        with T.Kernel(B, H // BH, threads=128) as (b, hb):
            q = T.alloc_shared((BH, D), "bfloat16")
            qr = T.alloc_shared((BH, R), "bfloat16")
            kv = T.alloc_shared((BN, D), "bfloat16")
            kr = T.alloc_shared((BN, R), "bfloat16")
            ps = T.alloc_shared((BH, BN), "bfloat16")
            s = T.alloc_fragment((BH, BN), "float32")
            acc = T.alloc_fragment((BH, D), "float32")
            m, mp, l, rs, a = [T.alloc_fragment((BH,), "float32") for _ in (1, 2, 3, 4, 5)]
            T.copy(Q[b, hb * BH : (hb + 1) * BH, :], q)
            T.copy(Qr[b, hb * BH : (hb + 1) * BH, :], qr)
            T.fill(acc, 0)
            T.fill(l, 0)
            T.fill(m, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(S, BN), num_stages=2):
                T.copy(KV[b, k * BN : (k + 1) * BN, :], kv)
                T.copy(Kr[b, k * BN : (k + 1) * BN, :], kr)
                T.clear(s)
                T.gemm(q, kv, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(qr, kr, s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(BH, BN):
                    s[i, j] = T.Select(k * BN + j < S, s[i, j], -T.infinity("float32"))
                T.copy(m, mp)
                T.fill(m, -T.infinity("float32"))
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(BH):
                    m[i] = T.max(m[i], mp[i])
                for i in T.Parallel(BH):
                    a[i] = T.exp2((mp[i] - m[i]) * sc * LOG2E)
                for i, j in T.Parallel(BH, BN):
                    s[i, j] = T.exp2(s[i, j] * (sc * LOG2E) - m[i] * (sc * LOG2E))
                T.reduce_sum(s, rs, dim=1)
                T.copy(s, ps)
                for i in T.Parallel(BH):
                    l[i] = l[i] * a[i] + rs[i]
                for i, j in T.Parallel(BH, D):
                    acc[i, j] *= a[i]
                T.gemm(ps, kv, acc, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(BH, D):
                acc[i, j] /= l[i]
            T.copy(acc, q)
            T.copy(q, O[b, hb * BH : (hb + 1) * BH, :])

    return main


@EVERY
def test_mla_decode(case):
    B, H, S, D, R = 1, 16, 50, 64, 32
    q, qr, kv, kr = (
        case.randn(B, H, D).bfloat16(),
        case.randn(B, H, R).bfloat16(),
        case.randn(B, S, D).bfloat16(),
        case.randn(B, S, R).bfloat16(),
    )
    s = (torch.einsum("bhd,bsd->bhs", q.float(), kv.float()) + torch.einsum("bhd,bsd->bhs", qr.float(), kr.float())) * (
        D + R
    ) ** -0.5
    case.run(
        mla(B, H, S, D, R), [q, qr, kv, kr], torch.einsum("bhs,bsd->bhd", s.softmax(-1), kv.float()).bfloat16(), 2e-2, 3e-2
    )


@tilelang.jit(out_idx=[3, 4])
def retention(B, H, S, D, C=32):
    @T.prim_func
    def main(
        Q: T.Tensor((B, S, H, D), "float16"),
        K: T.Tensor((B, S, H, D), "float16"),
        V: T.Tensor((B, S, H, D), "float16"),
        O: T.Tensor((B, S, H, D), "float16"),
        St: T.Tensor((B, H, D, D), "float32"),
    ):
        with T.Kernel(H, B, threads=128) as (h, b):
            q = T.alloc_shared((C, D), "float16")
            k = T.alloc_shared((C, D), "float16")
            v = T.alloc_shared((C, D), "float16")
            ss = T.alloc_shared((D, D), "float16")
            ps = T.alloc_shared((C, C), "float16")
            st = T.alloc_fragment((D, D), "float32")
            p = T.alloc_fragment((C, C), "float32")
            o = T.alloc_fragment((C, D), "float32")
            kd = T.alloc_shared((C, D), "float16")
            lg = T.log2(1.0 - T.exp2(-5.0 - T.cast(h, "float32")))
            T.clear(st)
            for t in T.serial(S // C):
                T.copy(Q[b, t * C : (t + 1) * C, h, :], q)
                T.copy(K[b, t * C : (t + 1) * C, h, :], k)
                T.copy(V[b, t * C : (t + 1) * C, h, :], v)
                T.gemm(q, k, p, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(C, C):
                    p[i, j] = T.if_then_else(i >= j, p[i, j] * T.exp2(T.cast(i - j, "float32") * lg), 0)
                T.copy(p, ps)
                T.copy(st, ss)
                T.gemm(q, ss, o, clear_accum=True)
                for i, j in T.Parallel(C, D):
                    o[i, j] = o[i, j] * T.exp2(T.cast(i + 1, "float32") * lg)
                T.gemm(ps, v, o)
                T.copy(o, O[b, t * C : (t + 1) * C, h, :])
                for i, j in T.Parallel(C, D):
                    kd[i, j] = k[i, j] * T.exp2(T.cast(C - 1 - i, "float32") * lg)
                for i, j in T.Parallel(D, D):
                    st[i, j] *= T.exp2(T.cast(C, "float32") * lg)
                T.gemm(kd, v, st, transpose_A=True)
            T.copy(st, St[b, h, :, :])

    return main


@HEAVY
def test_retention_chunks(case):
    B, H, S, D = 1, 1, 64, 32
    q, k, v = [case.randn(B, S, H, D, scale=0.5).half() for _ in range(3)]
    g = 1 - 2.0 ** (-5 - torch.arange(H).float())
    st = torch.zeros(B, H, D, D)
    ref = []
    for t in range(S):
        st = st * g[None, :, None, None] + k[:, t].float()[..., None] * v[:, t].float()[..., None, :]
        ref.append(torch.einsum("bhd,bhde->bhe", q[:, t].float(), st))
    case.run(retention(B, H, S, D), [q, k, v], [torch.stack(ref, 1).half(), st], 2e-2, 3e-2)


@tilelang.jit
def selective_scan(U, dt, A, Bm, Cm, Dp):
    B, L, Dm, N = T.const("B L Dm N")
    U: T.Tensor((B, L, Dm), "float32")
    dt: T.Tensor((B, L, Dm), "float32")
    A: T.Tensor((Dm, N), "float32")
    Bm: T.Tensor((B, L, N), "float32")
    Cm: T.Tensor((B, L, N), "float32")
    Dp: T.Tensor((Dm,), "float32")
    Y = T.empty((B, L, Dm), "float32")
    with T.Kernel(T.ceildiv(Dm, 32), B, threads=32) as (bx, b):
        tx = T.get_thread_binding()
        h = T.alloc_local((N,), "float32")
        d = bx * 32 + tx
        T.clear(h)
        for t in T.serial(L):
            y = T.alloc_var("float32", init=0.0)
            dl = T.alloc_var("float32")
            dl = dt[b, t, d]
            dl = T.if_then_else(dl > 20.0, dl, T.log1p(T.exp(dl)))
            for n in T.unroll(N):
                h[n] = h[n] * T.exp(dl * A[d, n]) + dl * Bm[b, t, n] * U[b, t, d]
                y += h[n] * Cm[b, t, n]
            Y[b, t, d] = y + Dp[d] * U[b, t, d]
    return Y


@EVERY
def test_mamba_selective_scan(case):
    B, L, Dm, N = 2, 12, 40, 8
    u, dt, a, bm, cm, dp = (
        case.randn(B, L, Dm),
        case.randn(B, L, Dm),
        -torch.rand(Dm, N),
        case.randn(B, L, N),
        case.randn(B, L, N),
        case.randn(Dm),
    )
    h = torch.zeros(B, Dm, N)
    ref = []
    sp = F.softplus(dt)
    for t in range(L):
        h = h * torch.exp(sp[:, t, :, None] * a) + sp[:, t, :, None] * bm[:, t, None] * u[:, t, :, None]
        ref.append((h * cm[:, t, None]).sum(-1) + dp * u[:, t])
    case.run(selective_scan.compile(u, dt, a, bm, cm, dp), [u, dt, a, bm, cm, dp], torch.stack(ref, 1), 1e-4, 1e-4)


@tilelang.jit
def delta_rule(Q, K, V, beta, G):
    B, S, H, DK, DV = T.const("B S H DK DV")
    Q: T.Tensor((B, S, H, DK), "float32")
    K: T.Tensor((B, S, H, DK), "float32")
    V: T.Tensor((B, S, H, DV), "float32")
    beta: T.Tensor((B, S, H), "float32")
    G: T.Tensor((B, S, H), "float32")
    O = T.empty((B, S, H, DV), "float32")
    with T.Kernel(H, B, threads=64) as (h, b):
        st = T.alloc_fragment((DK, DV), "float32")
        tmp = T.alloc_fragment((DK, DV), "float32")
        r = T.alloc_fragment((DV,), "float32")
        k = T.alloc_shared((DK,), "float32")
        q = T.alloc_shared((DK,), "float32")
        T.clear(st)
        for t in range(S):
            T.copy(K[b, t, h, :], k)
            T.copy(Q[b, t, h, :], q)
            g = T.exp(G[b, t, h])
            for i, j in T.Parallel(DK, DV):
                st[i, j] *= g
                tmp[i, j] = st[i, j] * k[i]
            T.reduce_sum(tmp, r, dim=0)
            for j in T.Parallel(DV):
                r[j] = (V[b, t, h, j] - r[j]) * beta[b, t, h]
            for i, j in T.Parallel(DK, DV):
                st[i, j] += k[i] * r[j]
                tmp[i, j] = st[i, j] * q[i]
            T.reduce_sum(tmp, r, dim=0)
            T.copy(r, O[b, t, h, :])
    return O


@EVERY
def test_gated_delta(case):
    B, S, H, DK, DV = 1, 10, 2, 16, 32
    q, k, v, be, g = (
        case.randn(B, S, H, DK),
        F.normalize(case.randn(B, S, H, DK), dim=-1),
        case.randn(B, S, H, DV),
        torch.rand(B, S, H),
        -torch.rand(B, S, H),
    )
    st = torch.zeros(B, H, DK, DV)
    ref = []
    for t in range(S):
        st = st * g[:, t].exp()[..., None, None]
        r = (v[:, t] - torch.einsum("bhkv,bhk->bhv", st, k[:, t])) * be[:, t][..., None]
        st = st + k[:, t][..., None] * r[..., None, :]
        ref.append(torch.einsum("bhkv,bhk->bhv", st, q[:, t]))
    case.run(delta_rule.compile(q, k, v, be, g), [q, k, v, be, g], torch.stack(ref, 1), 1e-4, 1e-4)


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


@tilelang.jit(out_idx=-1)
def hadamard(B, N, threads=32):
    per = N // threads
    L = per.bit_length() - 1

    @T.prim_func
    def main(A: T.Tensor((B, N), "float32"), O: T.Tensor((B, N), "float32")):
        with T.Kernel(B, threads=threads) as b:
            tx = T.get_thread_binding(0)
            x = T.alloc_local((per,), "float32")
            for i in T.vectorized(per):
                x[i] = A[b, tx * per + i]
            for s in T.unroll(L):
                h = 1 << s
                for i in T.unroll(per // 2):
                    lo = (i // h) * 2 * h + i % h
                    u = x[lo]
                    w = x[lo + h]
                    x[lo] = u + w
                    x[lo + h] = u - w
            for s in T.unroll(5):
                for i in T.unroll(per):
                    o = T.shfl_xor(x[i], 1 << s)
                    x[i] = T.if_then_else((tx >> s) & 1 == 1, o - x[i], x[i] + o)
            for i in T.vectorized(per):
                O[b, tx * per + i] = x[i] * (N**-0.5)

    return main


@EVERY
def test_hadamard_warp(case):
    N = 128
    H = torch.ones(1, 1)
    while H.shape[0] < N:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    a = case.randn(3, N)
    case.run(hadamard(3, N), [a], a @ H * N**-0.5, 1e-4, 1e-4)


@tilelang.jit
def compact(X, Y, cnt, thr: T.float32, threads: int = 128):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y: T.Tensor((N,), "float32")
    cnt: T.Tensor((1,), "int32")
    with T.Kernel(T.ceildiv(N, threads), threads=threads) as bx:
        tx = T.get_thread_binding()
        base = T.alloc_shared((threads // 32,), "int32")
        i = bx * threads + tx
        v = X[i]
        keep = (i < N) and (v > thr)
        bal = T.cast(T.ballot(keep), "uint32")
        lane = T.get_lane_idx()
        before = T.popcount(bal & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
        if lane == 0:
            base[T.get_warp_idx()] = T.atomic_add(cnt[0], T.popcount(bal), return_prev=True)
        T.sync_warp()
        if keep:
            Y[base[T.get_warp_idx()] + T.cast(before, "int32")] = v


@EVERY
def test_stream_compaction(case):
    x = case.randn(300)
    y = torch.zeros(300)
    n = torch.zeros(1, dtype=torch.int32)
    k = compact.compile(x, y, n, 0.3)
    _, (_, y, n, _) = case.call(k, x, y, n, 0.3)
    m = int(n)
    r = x[x > 0.3]
    assert m == len(r), (m, len(r))
    close(y[:m].sort().values, r.sort().values, 0, 0)
    assert not y[m:].any()
