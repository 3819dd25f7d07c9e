"""Losses, gradients and optimizers, against float64."""

import torch
from bounds import E32, EBF, equal, within
from spec_harness import EVERY, on

import tilelang
import tilelang.language as T

f16 = "float16"
bf = "bfloat16"
f32 = "float32"
LONG = on("tile", "simulator", "cpu", "gpu", slow=("simulator",))


@tilelang.jit(out_idx=[-2, -1])
def cconv(B, L, D, Wd, BL=32, BD=16):
    @T.prim_func
    def main(
        x: T.Tensor((B, L, D), bf),
        w: T.Tensor((D, Wd), f32),
        g: T.Tensor((B, L, D), bf),
        y: T.Tensor((B, L, D), bf),
        dw: T.Tensor((D, Wd), f32),
    ):
        with T.Kernel(T.ceildiv(D, BD), T.ceildiv(L, BL), B, threads=128) as (bd, bl, b):
            xs = T.alloc_shared((BL + Wd - 1, BD), bf)
            acc = T.alloc_fragment((BL, BD), f32)
            for i, j in T.Parallel(BL + Wd - 1, BD):
                xs[i, j] = T.if_then_else(bl * BL + i - (Wd - 1) >= 0, x[b, bl * BL + i - (Wd - 1), bd * BD + j], T.bfloat16(0))
            for i, j in T.Parallel(BL, BD):
                acc[i, j] = 0.0
                for k in T.unroll(Wd):
                    acc[i, j] += T.cast(xs[i + k, j], f32) * w[bd * BD + j, k]
            for i, j in T.Parallel(BL, BD):
                acc[i, j] = acc[i, j] / (1.0 + T.exp(-acc[i, j]))
            T.copy(acc, y[b, bl * BL, bd * BD])
        with T.Kernel(T.ceildiv(D, BD), threads=128) as bd:
            r = T.alloc_reducer((BD, Wd), f32, op="sum")
            out = T.alloc_fragment((BD, Wd), f32)
            T.reducer_init(r)
            for b in T.serial(B):
                for i, j, k in T.Parallel(L, BD, Wd):
                    if i - (Wd - 1) + k >= 0:
                        T.reducer_update(
                            r[j, k], T.cast(x[b, i - (Wd - 1) + k, bd * BD + j], f32) * T.cast(g[b, i, bd * BD + j], f32)
                        )
            T.finalize_reducer(r, out)
            T.copy(out, dw[bd * BD, 0])

    return main


@LONG
def test_causal_conv1d(case):
    B, L, D, Wd = 2, 45, 20, 4
    x, w, g = case.randn(B, L, D, dt=torch.bfloat16), case.randn(D, Wd), case.randn(B, L, D, dt=torch.bfloat16)
    (y, dw), _ = case.call(cconv(B, L, D, Wd), x, w, g)
    F = torch.nn.functional
    v = F.conv1d(x.double().permute(0, 2, 1), w.double()[:, None], padding=Wd - 1, groups=D)[..., :L].permute(0, 2, 1)
    within(y, F.silu(v), F.silu(v).abs() * EBF * 1.01 + 1e-5)
    xp = F.pad(x.double(), (0, 0, Wd - 1, 0))
    wd = torch.stack([(xp[:, k : k + L] * g.double()).sum((0, 1)) for k in range(Wd)], -1)
    ab = torch.stack([(xp[:, k : k + L] * g.double()).abs().sum((0, 1)) for k in range(Wd)], -1)
    within(dw, wd, ab * 100 * E32 + 1e-6)


@tilelang.jit
def lce_fwd(X, W, lab, eps: T.float32 = 0.1, BM: int = 64, BV: int = 64, BK: int = 32):
    M, D, V = T.const("M D V")
    X: T.Tensor((M, D), f16)
    W: T.Tensor((V, D), f16)
    lab: T.Tensor((M,), "int64")
    loss = T.empty((M,), f32)
    lse = T.empty((M,), f32)
    with T.Kernel(T.ceildiv(M, BM), threads=128) as b:
        Xs = T.alloc_shared((BM, BK), f16)
        Ws = T.alloc_shared((BV, BK), f16)
        S = T.alloc_fragment((BM, BV), f32)
        m, mp, l, tl, sl, tmp = [T.alloc_fragment((BM,), f32) for _ in (0, 1, 2, 3, 4, 5)]
        pick = T.alloc_fragment((BM, BV), f32)
        T.fill(m, -T.infinity(f32))
        T.clear(l)
        T.clear(tl)
        T.clear(sl)
        for v in T.serial(T.ceildiv(V, BV)):
            T.clear(S)
            for k in T.Pipelined(T.ceildiv(D, BK), num_stages=2):
                T.copy(X[b * BM, k * BK], Xs)
                T.copy(W[v * BV, k * BK], Ws)
                T.gemm(Xs, Ws, S, transpose_B=True)
            for i, j in T.Parallel(BM, BV):
                pick[i, j] = T.if_then_else(T.cast(v * BV + j, "int64") == lab[b * BM + i], S[i, j], 0.0)
            T.reduce_sum(pick, tl, dim=1, clear=False)
            T.reduce_sum(S, sl, dim=1, clear=False)
            for i, j in T.Parallel(BM, BV):
                if v * BV + j >= V:
                    S[i, j] = -T.infinity(f32)
            T.copy(m, mp)
            T.reduce_max(S, m, dim=1, clear=False)
            for i, j in T.Parallel(BM, BV):
                S[i, j] = T.exp(S[i, j] - m[i])
            T.reduce_sum(S, tmp, dim=1)
            for i in T.Parallel(BM):
                l[i] = l[i] * T.exp(mp[i] - m[i]) + tmp[i]
        for i in T.Parallel(BM):
            z = m[i] + T.log(l[i])
            lse[b * BM + i] = z
            loss[b * BM + i] = T.if_then_else(lab[b * BM + i] < 0, 0.0, z - (1.0 - eps) * tl[i] - eps * sl[i] / V)
    return loss, lse


@tilelang.jit
def lce_bwd(X, W, lab, lse, g, eps: T.float32 = 0.1, BM: int = 64, BV: int = 64):
    M, D, V = T.const("M D V")
    X: T.Tensor((M, D), f16)
    W: T.Tensor((V, D), f16)
    lab: T.Tensor((M,), "int64")
    lse: T.Tensor((M,), f32)
    g: T.Tensor((M,), f32)
    dX = T.empty((M, D), f32)
    dW = T.empty((V, D), f32)
    with T.Kernel(T.ceildiv(V, BV), threads=128) as b:
        Ws = T.alloc_shared((BV, D), f16)
        Xs = T.alloc_shared((BM, D), f16)
        P = T.alloc_fragment((BM, BV), f32)
        Ps = T.alloc_shared((BM, BV), f16)
        acc = T.alloc_fragment((BV, D), f32)
        T.copy(W[b * BV, 0], Ws)
        T.clear(acc)
        for t in T.Pipelined(T.ceildiv(M, BM), num_stages=1):
            T.copy(X[t * BM, 0], Xs)
            T.clear(P)
            T.gemm(Xs, Ws, P, transpose_B=True)
            for i, j in T.Parallel(BM, BV):
                y = T.if_then_else(T.cast(b * BV + j, "int64") == lab[t * BM + i], 1.0 - eps, 0.0) + eps / V
                P[i, j] = T.if_then_else(
                    lab[t * BM + i] >= 0 and b * BV + j < V, (T.exp(P[i, j] - lse[t * BM + i]) - y) * g[t * BM + i], 0.0
                )
            T.copy(P, Ps)
            T.gemm(Ps, Xs, acc, transpose_A=True)
        T.copy(acc, dW[b * BV, 0])
    with T.Kernel(T.ceildiv(M, BM), threads=128) as b:
        Ws = T.alloc_shared((BV, D), f16)
        Xs = T.alloc_shared((BM, D), f16)
        P = T.alloc_fragment((BM, BV), f32)
        Ph = T.alloc_fragment((BM, BV), f16)
        acc = T.alloc_fragment((BM, D), f32)
        T.copy(X[b * BM, 0], Xs)
        T.clear(acc)
        for t in T.Pipelined(T.ceildiv(V, BV), num_stages=2):
            T.copy(W[t * BV, 0], Ws)
            T.clear(P)
            T.gemm(Xs, Ws, P, transpose_B=True)
            for i, j in T.Parallel(BM, BV):
                y = T.if_then_else(T.cast(t * BV + j, "int64") == lab[b * BM + i], 1.0 - eps, 0.0) + eps / V
                P[i, j] = T.if_then_else(
                    lab[b * BM + i] >= 0 and t * BV + j < V, (T.exp(P[i, j] - lse[b * BM + i]) - y) * g[b * BM + i], 0.0
                )
            T.copy(P, Ph)
            T.gemm(Ph, Ws, acc)
        T.copy(acc, dX[b * BM, 0])
    return dX, dW


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, lab):
        loss, lse = lce_fwd(x.half(), w.half(), lab)
        ctx.save_for_backward(x.half(), w.half(), lab, lse)
        return loss

    @staticmethod
    def backward(ctx, g):
        dx, dw = lce_bwd(*ctx.saved_tensors, g.contiguous())
        return dx, dw, None


@LONG
def test_linear_xent(case):
    M, D, V = 40, 64, 100
    x, w = (torch.randn(M, D) * 0.5).half().float().requires_grad_(), (torch.randn(V, D) * 0.5).half().float().requires_grad_()
    lab = torch.randint(0, V, (M,))
    lab[3] = -100
    loss = LinearCrossEntropy.apply(x.to(case.device), w.to(case.device), lab.to(case.device)).cpu()
    wt = torch.rand(M)
    (loss * wt).sum().backward()
    X, W = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    L = torch.nn.functional.cross_entropy(X @ W.T, lab, ignore_index=-100, label_smoothing=0.1, reduction="none")
    (L * wt.double()).sum().backward()
    within(loss.detach(), L.detach(), 1e-3)
    within(x.grad, X.grad, 2e-3)
    within(w.grad, W.grad, 5e-3)


@tilelang.jit
def emb_bwd(ids, G, dW, pad: int = 0):
    n = T.dynamic("n")
    V, D = T.const("V D")
    ids: T.Tensor((n,), "int64")
    G: T.Tensor((n, D), f32)
    dW: T.Tensor((V, D), f32)
    with T.Kernel(T.ceildiv(n, 4), threads=64) as b:
        for r in T.serial(4):
            t = b * 4 + r
            if t < n:
                id = ids[t]
                if id != pad:
                    for j in T.Parallel(D // 2):
                        T.atomic_addx2(dW[id, j * 2], G[t, j * 2])


@EVERY
def test_embedding_backward(case):
    ids = torch.tensor([3, 0, 5, 3, 3, 1, 0], dtype=torch.int64)
    G = case.randint(-8, 8, (7, 40), torch.float32)
    _, own = case.call(emb_bwd, ids, G, torch.zeros(6, 40))
    w = torch.zeros(6, 40).index_add(0, ids, G)
    w[0] = 0
    equal(own[2], w)


@tilelang.jit
def pool_unpool(X, G, k: int = 3, s: int = 2, p: int = 1):
    B, C_, H, W, OH, OW = T.const("B C H W OH OW")
    X: T.Tensor((B, C_, H, W), f32)
    G: T.Tensor((B, C_, OH, OW), f32)
    Y = T.empty((B, C_, OH, OW), f32)
    I = T.empty((B, C_, OH, OW), "int32")
    dX = T.empty((B, C_, H, W), f32)
    with T.Kernel(C_, B, threads=128) as (ch, b):
        for h, w in T.Parallel(H, W):
            dX[b, ch, h, w] = 0.0
    with T.Kernel(C_, B, threads=128) as (ch, b):
        for h, w in T.Parallel(OH, OW):
            best = T.alloc_var(f32, init=-T.infinity(f32))
            at = T.alloc_var("int32", init=-1)
            for a in T.serial(k):
                for e in T.serial(k):
                    hh = h * s - p + a
                    ww = w * s - p + e
                    if hh >= 0 and hh < H and ww >= 0 and ww < W:
                        if X[b, ch, hh, ww] > best:
                            best = X[b, ch, hh, ww]
                            at = hh * W + ww
            Y[b, ch, h, w] = best
            I[b, ch, h, w] = at
    with T.Kernel(C_, B, threads=128) as (ch, b):
        for h, w in T.Parallel(OH, OW):
            at = I[b, ch, h, w]
            T.atomic_add(dX[b, ch, at // W, at % W], G[b, ch, h, w])
    return Y, I, dX


@EVERY
def test_maxpool_indices(case):
    X = case.randn(2, 3, 9, 10)
    X.requires_grad_()
    F = torch.nn.functional
    y, i = F.max_pool2d(X, 3, 2, 1, return_indices=True)
    G = case.randint(-5, 6, y.shape, torch.float32)
    y.backward(G)
    (a, b_, d), _ = case.call(pool_unpool, X.detach(), G)
    equal(a, y.detach())
    equal(b_, i.int())
    within(d, X.grad, 1e-6)


@tilelang.jit
def adamw(p, g, m, v, lr: T.float32, step: T.int32, wd: T.float32 = 0.01, blk: int = 256):
    n = T.dynamic("n")
    p: T.Tensor((n,), bf)
    g: T.Tensor((n,), bf)
    m: T.Tensor((n,), f32)
    v: T.Tensor((n,), f32)
    gn = T.alloc_global((1,), f32)
    with T.Kernel(1, threads=32) as _:
        gn[0] = 0.0
    with T.Kernel(T.ceildiv(n, blk), threads=64) as b:
        x = T.alloc_fragment((blk,), f32)
        s = T.alloc_fragment((1,), f32)
        T.copy(g[b * blk], x)
        for i in T.Parallel(blk):
            x[i] *= x[i]
        T.reduce_sum(x, s)
        for i in T.Parallel(1):
            T.atomic_add(gn[0], s[i])
    with T.Kernel(T.ceildiv(n, blk), threads=64) as b:
        sc = T.min(1.0, 1.0 / (T.sqrt(gn[0]) + 1e-6))
        c1 = 1.0 - T.pow(T.float32(0.9), T.cast(step, f32))
        c2 = 1.0 - T.pow(T.float32(0.999), T.cast(step, f32))
        for i in T.Parallel(blk):
            k = b * blk + i
            if k < n:
                gr = T.cast(g[k], f32) * sc
                m[k] = 0.9 * m[k] + 0.1 * gr
                v[k] = 0.999 * v[k] + 0.001 * gr * gr
                p[k] = T.cast(p[k], f32) * (1.0 - lr * wd) - lr * (m[k] / c1) / (T.sqrt(v[k] / c2) + 1e-8)


@EVERY
def test_adamw_inplace(case):
    for n in (700, 3):
        p, g, m, v = case.randn(n, dt=torch.bfloat16), case.randn(n, dt=torch.bfloat16), case.randn(n), torch.rand(n)
        _, o = case.call(adamw, *[x.clone() for x in (p, g, m, v)], 0.1, 7)
        gr = g.double()
        gr = gr * min(1.0, 1 / (gr.norm().item() + 1e-6))
        M = 0.9 * m.double() + 0.1 * gr
        V = 0.999 * v.double() + 0.001 * gr * gr
        P = p.double() * (1 - 0.1 * 0.01) - 0.1 * (M / (1 - 0.9**7)) / ((V / (1 - 0.999**7)).sqrt() + 1e-8)
        within(o[2], M, 1e-6)
        within(o[3], V, 1e-6)
        within(o[0], P, P.abs() * EBF * 1.02 + 1e-4)


@T.macro
def lse2(a, b):
    m = T.max(a, b)
    return T.if_then_else(m <= -1e29, -1e30, m + T.log(T.exp(a - m) + T.exp(b - m)))


@tilelang.jit
def ctc(lp, tgt, il, tl):
    Tm, B, C_, S = T.const("Tm B C S")
    lp: T.Tensor((Tm, B, C_), f32)
    tgt: T.Tensor((B, S), "int32")
    il: T.Tensor((B,), "int32")
    tl: T.Tensor((B,), "int32")
    L = T.empty((B,), f32)
    with T.Kernel(B, threads=32) as b:
        W = 2 * S + 1
        a = T.alloc_shared((W + 2,), f32)
        n = T.alloc_fragment((W,), f32)
        T.fill(a, -1e30)
        for i in T.Parallel(2):
            a[2 + i] = T.if_then_else(i == 0, lp[0, b, 0], T.if_then_else(tl[b] > 0, lp[0, b, tgt[b, 0]], -1e30))
        for t in T.serial(1, il[b]):
            for s in T.Parallel(W):
                lab = T.if_then_else(s % 2 == 0, 0, tgt[b, s // 2])
                skip = s % 2 == 1 and s >= 2 and tgt[b, s // 2] != tgt[b, T.max(s // 2 - 1, 0)]
                u = lse2(a[s + 2], a[s + 1])
                n[s] = lse2(u, T.if_then_else(skip, a[s], -1e30)) + lp[t, b, lab]
            for s in T.Parallel(W):
                a[s + 2] = n[s]
        for _i in T.Parallel(1):
            L[b] = -lse2(a[2 + 2 * tl[b]], T.if_then_else(tl[b] > 0, a[1 + 2 * tl[b]], -1e30))
    return L


@EVERY
def test_ctc_loss(case):
    Tm, B, C_, _S = 12, 3, 7, 4
    lp = case.randn(Tm, B, C_).log_softmax(-1)
    tgt = torch.tensor([[1, 1, 2, 3], [4, 5, 0, 0], [6, 0, 0, 0]], dtype=torch.int32)
    il = torch.tensor([12, 7, 5], dtype=torch.int32)
    tl = torch.tensor([4, 2, 0], dtype=torch.int32)
    (L,), _ = case.call(ctc, lp, tgt, il, tl)
    w = torch.nn.functional.ctc_loss(lp.double(), tgt, il, tl, reduction="none")
    within(L, w, 1e-4)


@tilelang.jit
def gn_bwd(X, dY, gamma, G: int = 4, eps: float = 1e-5):
    B, L, C_ = T.const("B L C")
    X: T.Tensor((B, L, C_), f32)
    dY: T.Tensor((B, L, C_), f32)
    gamma: T.Tensor((C_,), f32)
    dX = T.empty((B, L, C_), f32)
    dG = T.empty((B, C_), f32)
    dB = T.empty((B, C_), f32)
    PG = C_ // G
    with T.Kernel(G, B, threads=128) as (g, b):
        x = T.alloc_shared((L, PG), f32)
        dy = T.alloc_shared((L, PG), f32)
        rs = T.alloc_reducer((1,), f32, op="sum")
        s = T.alloc_fragment((1,), f32)
        T.copy(X[b, 0:L, g * PG : (g + 1) * PG], x)
        T.copy(dY[b, 0:L, g * PG : (g + 1) * PG], dy)
        T.reducer_init(rs)
        for i, j in T.Parallel(L, PG):
            T.reducer_update(rs[0], x[i, j])
        T.finalize_reducer(rs, s)
        mean = s[0] / (L * PG)
        rv = T.alloc_reducer((1,), f32, op="sum")
        v = T.alloc_fragment((1,), f32)
        T.reducer_init(rv)
        for i, j in T.Parallel(L, PG):
            T.reducer_update(rv[0], (x[i, j] - mean) * (x[i, j] - mean))
        T.finalize_reducer(rv, v)
        inv = T.rsqrt(v[0] / (L * PG) + eps)
        r1 = T.alloc_reducer((1,), f32, op="sum")
        r2 = T.alloc_reducer((1,), f32, op="sum")
        rg = T.alloc_reducer((PG,), f32, op="sum")
        rb = T.alloc_reducer((PG,), f32, op="sum")
        a1 = T.alloc_fragment((1,), f32)
        a2 = T.alloc_fragment((1,), f32)
        ag = T.alloc_fragment((PG,), f32)
        ab = T.alloc_fragment((PG,), f32)
        T.reducer_init(r1)
        T.reducer_init(r2)
        T.reducer_init(rg)
        T.reducer_init(rb)
        for i, j in T.Parallel(L, PG):
            xh = (x[i, j] - mean) * inv
            d = dy[i, j] * gamma[g * PG + j]
            T.reducer_update(r1[0], d)
            T.reducer_update(r2[0], d * xh)
            T.reducer_update(rg[j], dy[i, j] * xh)
            T.reducer_update(rb[j], dy[i, j])
        T.finalize_reducer(r1, a1)
        T.finalize_reducer(r2, a2)
        T.finalize_reducer(rg, ag)
        T.finalize_reducer(rb, ab)
        for i, j in T.Parallel(L, PG):
            xh = (x[i, j] - mean) * inv
            dX[b, i, g * PG + j] = inv * (dy[i, j] * gamma[g * PG + j] - a1[0] / (L * PG) - xh * a2[0] / (L * PG))
        T.copy(ag, dG[b, g * PG])
        T.copy(ab, dB[b, g * PG])
    return dX, dG, dB


@LONG
def test_groupnorm_backward(case):
    X, dY, ga = case.randn(2, 9, 24).double().requires_grad_(), case.randn(2, 9, 24), case.randn(24).double().requires_grad_()
    be = torch.zeros(24).double().requires_grad_()
    torch.nn.functional.group_norm(X.permute(0, 2, 1), 4, ga, be).permute(0, 2, 1).backward(dY.double())
    (dx, dg, db), _ = case.call(gn_bwd, X.detach().float(), dY, ga.detach().float())
    within(dx, X.grad, 2e-5)
    within(dg.sum(0), ga.grad, 2e-5)
    within(db.sum(0), be.grad, 2e-5)
