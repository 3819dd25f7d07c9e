"""Attention of one query over pages of a cache, and latent attention: written from the specification alone."""

import torch
from spec_harness import EVERY, HEAVY, close

import tilelang
import tilelang.language as T

LOG2E = 1.4426950408889634


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
