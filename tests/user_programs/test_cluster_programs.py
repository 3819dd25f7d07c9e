"""Hopper programs with roles, clusters and mbarriers written out."""

import torch
from bounds import E16, E32, EBF, equal, mm_bound, wide, within
from programs import absorb
from spec_harness import on

import tilelang
import tilelang.language as T

f16 = "float16"
bf = "bfloat16"
f32 = "float32"
ROLES = on("tile", "hopper", "gpu")


@tilelang.jit(out_idx=[2])
def gemm_pingpong(M, N, K, BM=128, BN=64, BK=64, S=3):
    @T.prim_func
    def main(A: T.Tensor((M, K), bf), B: T.Tensor((N, K), bf), C_: T.Tensor((M, N), f32)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=384) as (bx, by):
            As = T.alloc_shared((S, BM, BK), bf)
            Bs = T.alloc_shared((S, BN, BK), bf)
            C0 = T.alloc_fragment((BM // 2, BN), f32)
            C1 = T.alloc_fragment((BM // 2, BN), f32)
            full = T.alloc_barrier([128] * S)
            empty = T.alloc_barrier([256] * S)
            nk = T.ceildiv(K, BK)
            with T.ws(2):
                T.dec_max_nreg(40)
                for k in T.serial(nk):
                    T.mbarrier_wait_parity(empty[k % S], ((k // S) & 1) ^ 1)
                    T.tma_copy(A[by * BM : (by + 1) * BM, k * BK : (k + 1) * BK], As[k % S, :, :], barrier=full[k % S])
                    T.tma_copy(B[bx * BN : (bx + 1) * BN, k * BK : (k + 1) * BK], Bs[k % S, :, :], barrier=full[k % S])
                    T.mbarrier_arrive(full[k % S])
            with T.ws(0):
                T.inc_max_nreg(232)
                T.clear(C0)
                for k in T.serial(nk):
                    T.mbarrier_wait_parity(full[k % S], (k // S) & 1)
                    T.wgmma_gemm(As[k % S, 0 : BM // 2, :], Bs[k % S, :, :], C0, transpose_B=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % S])
                T.copy(C0, C_[by * BM, bx * BN])
            with T.ws(1):
                T.inc_max_nreg(232)
                T.clear(C1)
                for k in T.serial(nk):
                    T.mbarrier_wait_parity(full[k % S], (k // S) & 1)
                    T.wgmma_gemm(As[k % S, BM // 2 : BM, :], Bs[k % S, :, :], C1, transpose_B=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[k % S])
                T.copy(C1, C_[by * BM + BM // 2, bx * BN])

    return main


@ROLES
def test_ws_two_consumers(case):
    M, N, K = 200, 72, 320
    A, B = case.randn(M, K, dt=torch.bfloat16), case.randn(N, K, dt=torch.bfloat16)
    (o,), _ = case.call(gemm_pingpong(M, N, K), A, B)
    w = wide(A) @ wide(B).T
    within(o, w, mm_bound(A, B.T, 0, w, K))


@tilelang.jit(out_idx=[2])
def gemm_mcast(M, N, K, BM=64, BN=64, BK=64):
    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((K, N), f16), C_: T.Tensor((M, N), f16)):
        with T.ClusterKernel(T.ceildiv(M, BM), T.ceildiv(N, BN), cluster_dims=2, threads=128) as (bm, bn):
            As = T.alloc_shared((BM, BK), f16)
            Bs = T.alloc_shared((BK, BN), f16)
            acc = T.alloc_fragment((BM, BN), f32)
            T.clear(acc)
            for k in T.serial(T.ceildiv(K, BK)):
                T.copy(A[bm * BM, k * BK], As)
                T.copy_cluster(B[k * BK : (k + 1) * BK, bn * BN : (bn + 1) * BN], Bs, cluster_mask=3)
                T.gemm(As, Bs, acc)
                T.cluster_sync()
            T.copy(acc, C_[bm * BM, bn * BN])

    return main


@ROLES
def test_cluster_multicast(case):
    M, N, K = 250, 64, 192
    A, B = case.randn(M, K, dt=torch.half), case.randn(K, N, dt=torch.half)
    (o,), _ = case.call(gemm_mcast(M, N, K), A, B)
    w = wide(A) @ wide(B)
    within(o, w, mm_bound(A, B, E16, w, K))


@tilelang.jit(out_idx=[1])
def cluster_softmax(M, N, CL=2, BN=128):
    @T.prim_func
    def main(X: T.Tensor((M, N), f32), Y: T.Tensor((M, N), f32)):
        with T.ClusterKernel(CL, M, cluster_dims=(CL, 1), threads=64) as (bx, by):
            x = T.alloc_fragment((BN,), f32)
            m = T.alloc_fragment((1,), f32)
            s = T.alloc_fragment((1,), f32)
            mine = T.alloc_shared((2,), f32)
            other = T.alloc_shared((CL, 2), f32)
            T.fill(x, -T.infinity(f32))
            for i in T.Parallel(BN):
                if bx * BN + i < N:
                    x[i] = X[by, bx * BN + i]
            T.reduce_max(x, m)
            for i in T.Parallel(BN):
                x[i] = T.exp(x[i] - m[0])
            T.reduce_sum(x, s)
            for i in T.Parallel(1):
                mine[0] = m[i]
                mine[1] = s[i]
            rank = T.block_rank_in_cluster()
            for r in T.serial(CL):
                T.copy_cluster(mine[0:2], other[rank, 0:2], dst_block=r)
            T.cluster_sync()
            g = T.alloc_var(f32, init=-1e30)
            t = T.alloc_var(f32, init=0.0)
            for r in T.serial(CL):
                g = T.max(g, other[r, 0])
            for r in T.serial(CL):
                t += other[r, 1] * T.exp(other[r, 0] - g)
            for i in T.Parallel(BN):
                if bx * BN + i < N:
                    Y[by, bx * BN + i] = x[i] * T.exp(m[0] - g) / t
            T.cluster_sync()

    return main


@ROLES
def test_dsmem_softmax(case):
    X = case.randn(3, 200, scale=3.0)
    (Y,), _ = case.call(cluster_softmax(3, 200), X)
    w = X.double().softmax(-1)
    within(Y, w, w * 60 * E32 + 1e-9)


@T.macro
def fa_consumer(Qs, Ks, Vs, q_full, k_full, v_full, k_empty, v_empty, out, nk, S, D, BM, BN, row0, b, h, Sk, sc):
    P = T.alloc_fragment((BM, BN), f32)
    Ph = T.alloc_fragment((BM, BN), bf)
    acc = T.alloc_fragment((BM, D), f32)
    m = T.alloc_fragment((BM,), f32)
    mp = T.alloc_fragment((BM,), f32)
    l = T.alloc_fragment((BM,), f32)
    s = T.alloc_fragment((BM,), f32)
    r = T.alloc_fragment((BM,), f32)
    T.clear(acc)
    T.clear(l)
    T.fill(m, -1e30)
    T.mbarrier_wait_parity(q_full, 0)
    for k in T.serial(nk):
        T.mbarrier_wait_parity(k_full[k % S], (k // S) % 2)
        T.clear(P)
        T.wgmma_gemm(Qs, Ks[k % S, :, :], P, transpose_B=True)
        T.wait_wgmma(0)
        T.mbarrier_arrive(k_empty[k % S])
        for i, j in T.Parallel(BM, BN):
            P[i, j] = T.if_then_else(k * BN + j < Sk, P[i, j] * sc, -1e30)
        absorb(P, Ph, acc, m, mp, r, l, s, 1)
        T.mbarrier_wait_parity(v_full[k % S], (k // S) % 2)
        T.wgmma_gemm(Ph, Vs[k % S, :, :], acc)
        T.wait_wgmma(0)
        T.mbarrier_arrive(v_empty[k % S])
    for i, d in T.Parallel(BM, D):
        acc[i, d] /= l[i]
    T.copy(acc, out[b, row0 : row0 + BM, h, :])


@tilelang.jit(out_idx=[3])
def fa3(B, Sq, Sk, H, D, BM=128, BN=64, S=2):
    HM = BM // 2

    @T.prim_func
    def main(
        Q: T.Tensor((B, Sq, H, D), bf),
        K: T.Tensor((B, Sk, H, D), bf),
        V: T.Tensor((B, Sk, H, D), bf),
        O: T.Tensor((B, Sq, H, D), bf),
    ):
        with T.Kernel(T.ceildiv(Sq, BM), H, B, threads=384) as (bx, h, b):
            Q0 = T.alloc_shared((HM, D), bf)
            Q1 = T.alloc_shared((HM, D), bf)
            Ks = T.alloc_shared((S, BN, D), bf)
            Vs = T.alloc_shared((S, BN, D), bf)
            qf = T.alloc_barrier(128)
            kf = T.alloc_barrier([128] * S)
            vf = T.alloc_barrier([128] * S)
            ke = T.alloc_barrier([256] * S)
            ve = T.alloc_barrier([256] * S)
            nk = T.ceildiv(Sk, BN)
            with T.ws(2):
                T.dec_max_nreg(24)
                T.tma_copy(Q[b, bx * BM : bx * BM + HM, h, :], Q0, barrier=qf)
                T.tma_copy(Q[b, bx * BM + HM : bx * BM + BM, h, :], Q1, barrier=qf)
                T.mbarrier_arrive(qf)
                for k in T.serial(nk):
                    T.mbarrier_wait_parity(ke[k % S], (k // S + 1) % 2)
                    T.tma_copy(K[b, k * BN : (k + 1) * BN, h, :], Ks[k % S, :, :], barrier=kf[k % S])
                    T.mbarrier_arrive(kf[k % S])
                    T.mbarrier_wait_parity(ve[k % S], (k // S + 1) % 2)
                    T.tma_copy(V[b, k * BN : (k + 1) * BN, h, :], Vs[k % S, :, :], barrier=vf[k % S])
                    T.mbarrier_arrive(vf[k % S])
            with T.ws(0):
                T.inc_max_nreg(240)
                fa_consumer(Q0, Ks, Vs, qf, kf, vf, ke, ve, O, nk, S, D, HM, BN, bx * BM, b, h, Sk, D**-0.5 * 1.44269504)
            with T.ws(1):
                T.inc_max_nreg(240)
                fa_consumer(Q1, Ks, Vs, qf, kf, vf, ke, ve, O, nk, S, D, HM, BN, bx * BM + HM, b, h, Sk, D**-0.5 * 1.44269504)

    return main


@ROLES
def test_ws_attention(case):
    B, Sq, Sk, H, D = 1, 150, 200, 1, 64
    Q, K, V = (
        case.randn(B, Sq, H, D, dt=torch.bfloat16),
        case.randn(B, Sk, H, D, dt=torch.bfloat16),
        case.randn(B, Sk, H, D, dt=torch.bfloat16),
    )
    (o,), _ = case.call(fa3(B, Sq, Sk, H, D), Q, K, V)
    p = (torch.einsum("bqhd,bkhd->bhqk", Q.double(), K.double()) * D**-0.5).softmax(-1)
    w = torch.einsum("bhqk,bkhd->bqhd", p, V.double())
    within(o, w, torch.einsum("bhqk,bkhd->bqhd", p, V.double().abs()) * 0.02 + w.abs() * EBF + 1e-4)


@tilelang.jit(out_idx=[-1])
def ws_dequant(M, N, K, BM=64, BN=64, BK=64, S=2):
    @T.prim_func
    def main(A: T.Tensor((M, K), f16), W: T.Tensor((N, K), "int8"), sc: T.Tensor((N,), f16), O: T.Tensor((M, N), f16)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=384) as (bx, by):
            As = T.alloc_shared((S, BM, BK), f16)
            Wq = T.alloc_shared((S, BN, BK), "int8")
            Ws = T.alloc_shared((S, BN, BK), f16)
            acc = T.alloc_fragment((BM, BN), f32)
            full = T.alloc_barrier([128] * S)
            ready = T.alloc_barrier([128] * S)
            free = T.alloc_barrier([128] * S)
            qfree = T.alloc_barrier([128] * S)
            with T.ws(0):
                for k in T.serial(T.ceildiv(K, BK)):
                    T.barrier_wait(free[k % S], (k // S + 1) % 2)
                    T.barrier_wait(qfree[k % S], (k // S + 1) % 2)
                    T.tma_copy(A[by * BM, k * BK], As[k % S, :, :], barrier=full[k % S])
                    T.tma_copy(W[bx * BN, k * BK], Wq[k % S, :, :], barrier=full[k % S])
                    T.barrier_arrive(full[k % S])
            with T.ws(1):
                for k in T.serial(T.ceildiv(K, BK)):
                    T.barrier_wait(full[k % S], k // S % 2)
                    for i, j in T.Parallel(BN, BK):
                        Ws[k % S, i, j] = T.cast(Wq[k % S, i, j], f16) * sc[bx * BN + i]
                    T.fence_proxy_async()
                    T.barrier_arrive(qfree[k % S])
                    T.barrier_arrive(ready[k % S])
            with T.ws(2):
                T.clear(acc)
                for k in T.serial(T.ceildiv(K, BK)):
                    T.barrier_wait(ready[k % S], k // S % 2)
                    T.wgmma_gemm(As[k % S, :, :], Ws[k % S, :, :], acc, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[k % S])
                T.copy(acc, O[by * BM, bx * BN])

    return main


@ROLES
def test_ws_three_roles(case):
    M, N, K = 66, 70, 192
    A, W, s = case.randn(M, K, dt=torch.half), case.randint(-127, 128, (N, K), torch.int8), (torch.rand(N) * 0.01).half()
    (o,), _ = case.call(ws_dequant(M, N, K), A, W, s)
    w_ = W.half() * s[:, None]
    w = wide(A) @ wide(w_).T
    within(o, w, mm_bound(A, w_.T, E16, w, K))


@ROLES
def test_ws_four_roles(case):
    @T.prim_func
    def main(X: T.Tensor((4, 64, 64), f16), Y: T.Tensor((4, 64, 64), f32), Z: T.Tensor((4, 64), f32)):
        with T.Kernel(1, threads=512):
            s0 = T.alloc_shared((64, 64), f16)
            s1 = T.alloc_shared((64, 64), f16)
            s2 = T.alloc_shared((64, 64), f16)
            a0 = T.alloc_fragment((64, 64), f32)
            a1 = T.alloc_fragment((64, 64), f32)
            a2 = T.alloc_fragment((64, 64), f32)
            m = T.alloc_fragment((64,), f32)
            with T.ws(0):
                T.copy(X[0, :, :], s0)
                T.gemm(s0, s0, a0, transpose_B=True, clear_accum=True)
                T.copy(a0, Y[0, :, :])
                T.reduce_max(a0, m, dim=0)
                T.copy(m, Z[0, :])
            with T.ws(1):
                T.copy(X[1, :, :], s1)
                T.gemm(s1, s1, a1, clear_accum=True)
                T.copy(a1, Y[1, :, :])
                mm = T.alloc_fragment((64,), f32)
                T.reduce_max(a1, mm, dim=0)
                T.copy(mm, Z[1, :])
            with T.ws(2, 3):
                T.copy(X[2, :, :], s2)
                T.gemm(s2, s2, a2, transpose_A=True, clear_accum=True)
                T.copy(a2, Y[2, :, :])
                mq = T.alloc_fragment((64,), f32)
                T.reduce_max(a2, mq, dim=1)
                T.copy(mq, Z[2, :])
                for i, j in T.Parallel(64, 64):
                    Y[3, i, j] = T.cast(s2[j, i], f32)
                for i in T.Parallel(64):
                    Z[3, i] = 1.0

    X = case.randint(-3, 4, (4, 64, 64), torch.half)
    x = X.float()
    (y, z), _ = case.call(tilelang.compile(main, out_idx=[1, 2]), X)
    w = [x[0] @ x[0].T, x[1] @ x[1], x[2].T @ x[2], x[2].T]
    equal(y, torch.stack(w))
    equal(z, torch.stack([w[0].amax(0), w[1].amax(0), w[2].amax(1), torch.ones(64)]))


@ROLES
def test_ws_epilogue_wide(case):
    # two consumers, 64x256 halves in fp16 by TMA store panels, in a loop over tiles inside the roles
    M, N, K, BK = 256, 256, 64, 64

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((N, K), f16), C_: T.Tensor((M, N), f16)):
        with T.Kernel(1, threads=384):
            a = T.alloc_shared((2, 128, BK), f16)
            b = T.alloc_shared((N, BK), f16)
            x = T.alloc_fragment((64, N), f32)
            y = T.alloc_fragment((64, N), f32)
            full = T.alloc_barrier([128] * 2)
            empty = T.alloc_barrier([256] * 2)
            bf_ = T.alloc_barrier(128)
            with T.ws(2):
                T.tma_copy(B[0, 0], b, barrier=bf_)
                T.mbarrier_arrive(bf_)
                for t in T.serial(M // 128):
                    T.mbarrier_wait_parity(empty[t % 2], (t // 2 + 1) % 2)
                    T.tma_copy(A[t * 128, 0], a[t % 2, :, :], barrier=full[t % 2])
                    T.mbarrier_arrive(full[t % 2])
            with T.ws(0):
                T.mbarrier_wait_parity(bf_, 0)
                for t in T.serial(M // 128):
                    T.mbarrier_wait_parity(full[t % 2], t // 2 % 2)
                    T.wgmma_gemm(a[t % 2, 0:64, :], b, x, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[t % 2])
                    T.copy(x, C_[t * 128, 0])
            with T.ws(1):
                T.mbarrier_wait_parity(bf_, 0)
                for t in T.serial(M // 128):
                    T.mbarrier_wait_parity(full[t % 2], t // 2 % 2)
                    T.wgmma_gemm(a[t % 2, 64:128, :], b, y, transpose_B=True, clear_accum=True)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(empty[t % 2])
                    T.copy(y, C_[t * 128 + 64, 0])

    A, B = case.randn(M, K, dt=torch.half), case.randn(N, K, dt=torch.half)
    (o,), _ = case.call(tilelang.compile(main, out_idx=[2]), A, B)
    w = wide(A) @ wide(B).T
    within(o, w, mm_bound(A, B.T, E16, w, K))
