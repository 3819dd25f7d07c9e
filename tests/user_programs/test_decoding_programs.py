"""Attention and sampling as serving systems write them, against float64."""

import math

import numpy as np
import torch
from bounds import equal, within
from programs import absorb
from spec_harness import EVERY, on

import tilelang
import tilelang.language as T

f16 = "float16"
bf = "bfloat16"
f32 = "float32"
LONG = on("tile", "simulator", "cpu", "gpu", slow=("simulator",))


@T.macro
def rotate(S, cosb, sinb, start, BN, D):
    R = T.alloc_fragment((BN, D), f32)
    for i, j in T.Parallel(BN, D):
        other = T.if_then_else(j < D // 2, -T.cast(S[i, (j + D // 2) % D], f32), T.cast(S[i, (j + D // 2) % D], f32))
        R[i, j] = T.cast(S[i, j], f32) * cosb[start + i, j % (D // 2)] + other * sinb[start + i, j % (D // 2)]
    T.copy(R, S)


@tilelang.jit(out_idx=[-1])
def rope_attn(B, S, HQ, HKV, D, BM=64, BN=32, threads=128, stages=1):
    sc = D**-0.5 * 1.44269504

    @T.prim_func
    def main(
        Q: T.Tensor((B, S, HQ, D), bf),
        K: T.Tensor((B, S, HKV, D), bf),
        V: T.Tensor((B, S, HKV, D), bf),
        cs: T.Tensor((S, D // 2), f32),
        sn: T.Tensor((S, D // 2), f32),
        O: T.Tensor((B, S, HQ, D), f32),
    ):
        with T.Kernel(T.ceildiv(S, BM), HQ, B, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((BM, D), bf)
            Ks = T.alloc_shared((BN, D), bf)
            Vs = T.alloc_shared((BN, D), bf)
            P = T.alloc_fragment((BM, BN), f32)
            Pb = T.alloc_fragment((BM, BN), bf)
            O_ = T.alloc_fragment((BM, D), f32)
            m, mp, r, l, s = [T.alloc_fragment((BM,), f32) for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, bx * BM : (bx + 1) * BM, h, :], Qs)
            rotate(Qs, cs, sn, bx * BM, BM, D)
            T.clear(O_)
            T.clear(l)
            T.fill(m, -T.infinity(f32))
            for k in T.Pipelined(T.ceildiv(T.min((bx + 1) * BM, S), BN), num_stages=stages):
                T.copy(K[b, k * BN : (k + 1) * BN, h // (HQ // HKV), :], Ks)
                T.copy(V[b, k * BN : (k + 1) * BN, h // (HQ // HKV), :], Vs)
                rotate(Ks, cs, sn, k * BN, BN, D)
                for i, j in T.Parallel(BM, BN):
                    P[i, j] = T.if_then_else(bx * BM + i >= k * BN + j, 0, -T.infinity(f32))
                T.gemm(Qs, Ks, P, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                absorb(P, Pb, O_, m, mp, r, l, s, sc)
                T.gemm(Pb, Vs, O_, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(BM, D):
                O_[i, j] = O_[i, j] / l[i]
            T.copy(O_, O[b, bx * BM : (bx + 1) * BM, h, :])

    return main


@LONG
def test_rope_gqa(case):
    B, S, HQ, HKV, D = 1, 75, 2, 1, 32
    Q, K, V = (
        case.randn(B, S, HQ, D, dt=torch.bfloat16),
        case.randn(B, S, HKV, D, dt=torch.bfloat16),
        case.randn(B, S, HKV, D, dt=torch.bfloat16),
    )
    ang = torch.arange(S)[:, None] * (10000 ** (-torch.arange(D // 2) / (D // 2)))[None]
    cs, sn = ang.cos().float(), ang.sin().float()
    (O,), _ = case.call(rope_attn(B, S, HQ, HKV, D), Q, K, V, cs, sn)

    def rot(x):
        x = x.double()
        a, b = x[..., : D // 2], x[..., D // 2 :]
        C_, S_ = cs.double()[None, :, None], sn.double()[None, :, None]
        return torch.cat([a * C_ - b * S_, b * C_ + a * S_], -1).to(torch.bfloat16).double()

    q, k, v = rot(Q), rot(K).repeat_interleave(2, 2), V.double().repeat_interleave(2, 2)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5
    s = s.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    p = s.softmax(-1)
    want = torch.einsum("bhqk,bkhd->bqhd", p, v)
    # rotated values may round either way at bf16: score error ~ few ulp
    bound = torch.einsum("bhqk,bkhd->bqhd", p, v.abs()) * (0.05) + 1e-3
    within(O, want, bound)


@T.macro
def weigh(S, W, A, m, mp, l, s):
    """Scores S of 16 heads become weights W: exp(score - largest so far); what was summed before in A and l is rescaled."""
    T.copy(m, mp)
    T.reduce_max(S, m, dim=1, clear=False)
    for i, j in T.Parallel(16, S.shape[1]):
        S[i, j] = T.exp(S[i, j] - m[i])
    T.reduce_sum(S, s, dim=1)
    for i in T.Parallel(16):
        l[i] = l[i] * T.exp(mp[i] - m[i]) + s[i]
    for i, d in T.Parallel(16, A.shape[1]):
        A[i, d] *= T.exp(mp[i] - m[i])
    T.copy(S, W)


@tilelang.jit
def paged_int8(Q, KC, VC, KS, VS, Tab, Len, G: int = 4, page: int = 16):
    B, HKV, D, NP, MP, HQ = T.const("B HKV D NP MP HQ")
    Q: T.Tensor((B, HQ, D), f16)
    KC: T.Tensor((NP, page, HKV, D), "int8")
    VC: T.Tensor((NP, page, HKV, D), "int8")
    KS: T.Tensor((NP, page, HKV), f32)
    VS: T.Tensor((NP, page, HKV), f32)
    Tab: T.Tensor((B, MP), "int32")
    Len: T.Tensor((B,), "int32")
    O = T.empty((B, HQ, D), f32)
    with T.Kernel(HKV, B, threads=128) as (h, b):
        Qs = T.alloc_shared((16, D), f16)
        Ks = T.alloc_shared((page, D), f16)
        Vs = T.alloc_shared((page, D), f16)
        Ps = T.alloc_shared((16, page), f16)
        S = T.alloc_fragment((16, page), f32)
        A = T.alloc_fragment((16, D), f32)
        m, mp, l, s = [T.alloc_fragment((16,), f32) for _ in (0, 1, 2, 3)]
        for i, d in T.Parallel(16, D):
            Qs[i, d] = T.if_then_else(i < G, Q[b, h * G + i, d], T.float16(0))
        T.clear(A)
        T.clear(l)
        T.fill(m, -1e30)
        n = Len[b]
        for p in T.serial(T.ceildiv(n, page)):
            pg = Tab[b, p]
            for i, d in T.Parallel(page, D):
                Ks[i, d] = T.cast(KC[pg, i, h, d], f32) * KS[pg, i, h]
                Vs[i, d] = T.if_then_else(p * page + i < n, T.cast(VC[pg, i, h, d], f32) * VS[pg, i, h], 0.0)
            T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(16, page):
                S[i, j] = T.if_then_else(p * page + j < n, S[i, j] * (D**-0.5), -1e30)
            weigh(S, Ps, A, m, mp, l, s)
            T.gemm(Ps, Vs, A, policy=T.GemmWarpPolicy.FullCol)
        for i, d in T.Parallel(16, D):
            if i < G:
                O[b, h * G + i, d] = A[i, d] / T.max(l[i], 1e-20)
    return O


@EVERY
def test_paged_decode_int8(case):
    B, HKV, G, D, page, NP, _MP = 3, 2, 4, 32, 16, 9, 4
    lens = torch.tensor([37, 0, 64], dtype=torch.int32)
    tab = torch.tensor([[8, 2, 5, -1], [-1] * 4, [0, 3, 7, 1]], dtype=torch.int32)
    Q = case.randn(B, HKV * G, D, dt=torch.half)
    KC, VC = case.randint(-127, 128, (NP, page, HKV, D), torch.int8), case.randint(-127, 128, (NP, page, HKV, D), torch.int8)
    KS, VS = torch.rand(NP, page, HKV) * 0.02, torch.rand(NP, page, HKV) * 0.02
    (O,), _ = case.call(paged_int8, Q, KC, VC, KS, VS, tab, lens)
    want = torch.zeros(B, HKV * G, D).double()
    for b in range(B):
        n = int(lens[b])
        if not n:
            continue
        pages = tab[b][: (n + page - 1) // page].long()
        k = (KC[pages].float() * KS[pages][..., None]).half().double().reshape(-1, HKV, D)[:n]
        v = (VC[pages].float() * VS[pages][..., None]).half().double().reshape(-1, HKV, D)[:n]
        for h in range(HKV * G):
            p = (Q[b, h].double() @ k[:, h // G].T * D**-0.5).softmax(-1)
            want[b, h] = p @ v[:, h // G]
    within(O, want, 4e-3)


@tilelang.jit(out_idx=[-1, -2])
def top_p(R, V, N, threads=128):
    @T.prim_func
    def main(
        L: T.Tensor((R, V), f32),
        U: T.Tensor((R,), f32),
        P: T.float32,
        Kept: T.Tensor((R,), "int32"),
        Tok: T.Tensor((R,), "int32"),
    ):
        with T.Kernel(R, threads=threads) as b:
            key = T.alloc_shared((N,), f32)
            idx = T.alloc_shared((N,), "int32")
            cum = T.alloc_shared((N,), f32)
            x = T.alloc_fragment((N,), f32)
            mx = T.alloc_fragment((1,), f32)
            sm = T.alloc_fragment((1,), f32)
            for i in T.Parallel(N):
                x[i] = T.if_then_else(i < V, L[b, i], -T.infinity(f32))
            T.reduce_max(x, mx)
            for i in T.Parallel(N):
                x[i] = T.exp(x[i] - mx[0])
            T.reduce_sum(x, sm)
            for i in T.Parallel(N):
                key[i] = x[i] / sm[0]
                idx[i] = i
            k = T.alloc_var("int32", init=2)
            while k <= N:
                j = T.alloc_var("int32", init=0)
                j = k // 2
                while j > 0:
                    for t in T.Parallel(N // 2):
                        lo = (t // j) * 2 * j + t % j
                        hi = lo + j
                        desc = (lo & k) == 0
                        a = key[lo]
                        c_ = key[hi]
                        ia = idx[lo]
                        ic = idx[hi]
                        less = (a < c_) or (a == c_ and ia > ic)
                        if less == desc:
                            key[lo] = c_
                            key[hi] = a
                            idx[lo] = ic
                            idx[hi] = ia
                    j = j // 2
                k = k * 2
            T.copy(key, cum)
            T.cumsum(cum, dim=0)
            n = T.alloc_fragment((N,), "int32")
            nn = T.alloc_fragment((1,), "int32")
            for i in T.Parallel(N):
                n[i] = T.cast(cum[i] - key[i] < P, "int32")
            T.reduce_sum(n, nn)
            last = T.alloc_shared((1,), "int32")
            T.copy(nn, last)
            tgt = U[b] * cum[last[0] - 1]
            for i in T.Parallel(N):
                n[i] = T.if_then_else(i < last[0] and cum[i] <= tgt, 1, 0)
            T.reduce_sum(n, nn)
            if T.get_thread_binding() == 0:
                Kept[b] = last[0]
            for i in T.Parallel(1):
                Tok[b] = idx[T.min(nn[i], last[0] - 1)]

    return main


@EVERY
def test_top_p_sample(case):
    R, V, N = 3, 50, 64
    L = case.randn(R, V, scale=2.0)
    U = torch.tensor([0.1, 0.77, 0.5])
    (tok, kept), _ = case.call(top_p(R, V, N), L, U, 0.8)
    p = L.double().softmax(-1)
    for r in range(R):
        v, i = torch.sort(p[r], descending=True, stable=True)
        cu = v.cumsum(0)
        n = int(((cu - v) < 0.8).sum())
        assert kept[r] == n, (kept, n)
        t = int((cu[:n] <= U[r].item() * cu[n - 1]).sum())
        assert tok[r] == i[min(t, n - 1)], (tok[r], i[t])


@tilelang.jit(out_idx=[-1])
def tree_attn(Nt, S, H, D, BN=32):
    @T.prim_func
    def main(
        Q: T.Tensor((Nt, H, D), f16),
        K: T.Tensor((S + Nt, H, D), f16),
        V: T.Tensor((S + Nt, H, D), f16),
        Mask: T.Tensor((Nt,), "uint64"),
        O: T.Tensor((Nt, H, D), f16),
    ):
        with T.Kernel(H, threads=64) as h:
            Qs = T.alloc_shared((16, D), f16)
            Ks = T.alloc_shared((BN, D), f16)
            Vs = T.alloc_shared((BN, D), f16)
            P = T.alloc_fragment((16, BN), f32)
            Ps = T.alloc_shared((16, BN), f16)
            acc = T.alloc_fragment((16, D), f32)
            m, mp, l, s = [T.alloc_fragment((16,), f32) for _ in (0, 1, 2, 3)]
            T.copy(Q[0:16, h, :], Qs)
            T.clear(acc)
            T.clear(l)
            T.fill(m, -1e30)
            for k in T.Pipelined(T.ceildiv(S + Nt, BN), num_stages=2):
                T.copy(K[k * BN : (k + 1) * BN, h, :], Ks)
                T.copy(V[k * BN : (k + 1) * BN, h, :], Vs)
                T.gemm(Qs, Ks, P, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(16, BN):
                    pos = k * BN + j - S
                    bit = (Mask[i] >> T.cast(T.max(pos, 0), "uint64")) & T.uint64(1)
                    ok = (pos < 0) or (pos < Nt and bit != 0)
                    P[i, j] = T.if_then_else(ok, P[i, j] * D**-0.5, -1e30)
                weigh(P, Ps, acc, m, mp, l, s)
                T.gemm(Ps, Vs, acc, policy=T.GemmWarpPolicy.FullCol)
            for i, d in T.Parallel(16, D):
                acc[i, d] /= l[i]
            T.copy(acc, O[0:16, h, :])

    return main


@EVERY
def test_tree_attention(case):
    Nt, S, H, D = 11, 37, 2, 64
    par = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 8, 9]
    mask = np.zeros((Nt,), np.uint64)
    ok = torch.zeros(Nt, Nt).bool()
    for i in range(Nt):
        j = i
        while j >= 0:
            mask[i] |= np.uint64(1 << j)
            ok[i, j] = True
            j = par[j]
    Q, K, V = (
        case.randn(Nt, H, D, dt=torch.half),
        case.randn(S + Nt, H, D, dt=torch.half),
        case.randn(S + Nt, H, D, dt=torch.half),
    )
    (o,), _ = case.call(tree_attn(Nt, S, H, D), Q, K, V, torch.from_numpy(mask))
    s = torch.einsum("qhd,khd->hqk", Q.double(), K.double()) * D**-0.5
    s[:, :, S:] = s[:, :, S:].masked_fill(~ok, -math.inf)
    p = s.softmax(-1)
    within(o, torch.einsum("hqk,khd->qhd", p, V.double()), 4e-3)


@tilelang.jit
def gate(Lg, Bias, NG: int = 4, TG: int = 2, K: int = 3):
    M, E = T.const("M E")
    Lg: T.Tensor((M, E), f32)
    Bias: T.Tensor((E,), f32)
    Wt = T.empty((M, K), f32)
    Id = T.empty((M, K), "int32")
    PG = E // NG
    with T.Kernel(M, threads=32) as m:
        s = T.alloc_shared((E,), f32)
        sb = T.alloc_shared((NG, PG), f32)
        gs = T.alloc_shared((NG,), f32)
        keep = T.alloc_shared((NG,), "int32")
        ids = T.alloc_shared((K,), "int32")
        for e in T.Parallel(E):
            s[e] = T.sigmoid(Lg[m, e])
        for g, e in T.Parallel(NG, PG):
            sb[g, e] = s[g * PG + e] + Bias[g * PG + e]
        for g in T.Parallel(NG):
            b1 = T.alloc_var(f32, init=-1e30)
            b2 = T.alloc_var(f32, init=-1e30)
            for e in T.serial(PG):
                v = sb[g, e]
                if v > b1:
                    b2 = b1
                    b1 = v
                elif v > b2:
                    b2 = v
            gs[g] = b1 + b2
        for g in T.Parallel(NG):
            r = T.alloc_var("int32", init=0)
            for o in T.serial(NG):
                if gs[o] > gs[g] or (gs[o] == gs[g] and o < g):
                    r += 1
            keep[g] = T.Select(r < TG, T.int32(1), T.int32(0))
        f = T.alloc_fragment((E,), f32)
        mx = T.alloc_fragment((1,), f32)
        c1 = T.alloc_fragment((E,), "int32")
        am = T.alloc_fragment((1,), "int32")
        for e in T.Parallel(E):
            f[e] = T.if_then_else(keep[e // PG] == 1, sb[e // PG, e % PG], -1e30)
        for k in T.serial(K):
            T.reduce_max(f, mx)
            for e in T.Parallel(E):
                c1[e] = T.if_then_else(f[e] == mx[0], e, 2**30)
            T.reduce_min(c1, am)
            for e in T.Parallel(E):
                if e == am[0]:
                    f[e] = -1e30
            for i in T.Parallel(1):
                ids[k] = am[i]
        tot = T.alloc_var(f32, init=0.0)
        for k in T.serial(K):
            tot += s[ids[k]]
        for k in T.Parallel(K):
            Wt[m, k] = s[ids[k]] / tot
            Id[m, k] = ids[k]
    return Wt, Id


@EVERY
def test_moe_gate(case):
    L, b = case.randn(6, 24), case.randn(24, scale=0.1)
    (w, i), _ = case.call(gate, L, b)
    s = L.double().sigmoid()
    sb = (L.sigmoid() + b).double()
    g = sb.view(6, 4, 6).topk(2, -1).values.sum(-1).topk(2, -1).indices
    k = torch.zeros(6, 4).bool().scatter(1, g, True).repeat_interleave(6, 1)
    idx = sb.masked_fill(~k, -1e30).topk(3, -1).indices
    equal(i, idx.int())
    ws = s.gather(1, idx)
    within(w, ws / ws.sum(-1, keepdim=True), 1e-6)


@tilelang.jit(out_idx=[-1])
def swa(S, H, D, W, cap, BM=64, BN=32, threads=128, stages=3):
    @T.prim_func
    def main(
        Q: T.Tensor((H, S, D), f16),
        K: T.Tensor((H, S, D), f16),
        V: T.Tensor((H, S, D), f16),
        sl: T.Tensor((H,), f32),
        O: T.Tensor((H, S, D), f16),
    ):
        with T.Kernel(T.ceildiv(S, BM), H, threads=threads) as (bx, h):
            Qs = T.alloc_shared((BM, D), f16)
            Ks = T.alloc_shared((BN, D), f16)
            Vs = T.alloc_shared((BN, D), f16)
            P = T.alloc_fragment((BM, BN), f32)
            Ph = T.alloc_fragment((BM, BN), f16)
            acc = T.alloc_fragment((BM, D), f32)
            m, mp, l, s = [T.alloc_fragment((BM,), f32) for _ in (0, 1, 2, 3)]
            T.copy(Q[h, bx * BM, 0], Qs)
            T.clear(acc)
            T.clear(l)
            T.fill(m, -1e30)
            lo = T.max(0, (bx * BM - W) // BN)
            hi = T.ceildiv(T.min((bx + 1) * BM, S), BN)
            for k in T.Pipelined(lo, hi, num_stages=stages):
                T.copy(K[h, k * BN, 0], Ks)
                T.copy(V[h, k * BN, 0], Vs)
                T.clear(P)
                T.gemm(Qs, Ks, P, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(BM, BN):
                    q = bx * BM + i
                    kk = k * BN + j
                    z = cap * T.tanh(P[i, j] * (D**-0.5 / cap)) - sl[h] * T.cast(q - kk, f32)
                    P[i, j] = T.if_then_else(q >= kk and q - kk < W, z, -1e30)
                T.copy(m, mp)
                T.reduce_max(P, m, dim=1, clear=False)
                for i, j in T.Parallel(BM, BN):
                    P[i, j] = T.if_then_else(P[i, j] <= -1e29, 0.0, T.exp(P[i, j] - m[i]))
                T.reduce_sum(P, s, dim=1)
                for i in T.Parallel(BM):
                    l[i] = l[i] * T.exp(mp[i] - m[i]) + s[i]
                for i, d in T.Parallel(BM, D):
                    acc[i, d] *= T.exp(mp[i] - m[i])
                T.copy(P, Ph)
                T.gemm(Ph, Vs, acc, policy=T.GemmWarpPolicy.FullRow)
            for i, d in T.Parallel(BM, D):
                acc[i, d] /= l[i]
            T.copy(acc, O[h, bx * BM, 0])

    return main


@EVERY
def test_window_softcap(case):
    H, S, D, W = 2, 150, 32, 40
    Q, K, V = [case.randn(H, S, D, dt=torch.half) for _ in range(3)]
    sl = torch.tensor([0.1, 0.01])
    (o,), _ = case.call(swa(S, H, D, W, 20.0), Q, K, V, sl)
    d = torch.arange(S)[:, None] - torch.arange(S)[None]
    s = 20 * torch.tanh(Q.double() @ K.double().mT * D**-0.5 / 20) - sl.double()[:, None, None] * d
    w = s.masked_fill((d < 0) | (d >= W), -math.inf).softmax(-1) @ V.double()
    within(o, w, 6e-3)
