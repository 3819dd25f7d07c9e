"""Products of small, sparse, narrow, strided and complex operands."""

import numpy as np
import torch
from bounds import E16, EBF, mm_bound, wide, within
from spec_harness import EVERY, on

import tilelang
import tilelang.language as T

f16 = "float16"
bf = "bfloat16"
f32 = "float32"
LONG = on("tile", "simulator", "cpu", "gpu", slow=("simulator",))


@tilelang.jit
def small_bgemm(A, B, grid: int = 3):
    b = T.dynamic("batch")
    M, N, K = T.const("M N K")
    A: T.Tensor((b, M, K), f16)
    B: T.Tensor((b, K, N), f16)
    C = T.empty((b, M, N), f16)
    PM, PN, PK = T.ceildiv(M, 16) * 16, T.ceildiv(N, 8) * 8, T.ceildiv(K, 16) * 16
    with T.Kernel(grid, threads=64) as g:
        As = T.alloc_shared((2, PM, PK), f16)
        Bs = T.alloc_shared((2, PK, PN), f16)
        Cf = T.alloc_fragment((PM, PN), f32)
        for w in T.serial(T.ceildiv(b, grid * 2)):
            for t in T.unroll(2):
                i = (w * grid + g) * 2 + t
                T.copy(A[i, 0:PM, 0:PK], As[t, :, :])
                T.copy(B[i, 0:PK, 0:PN], Bs[t, :, :])
                T.gemm(As[t, :, :], Bs[t, :, :], Cf, clear_accum=True)
                T.copy(Cf, C[i, 0:PM, 0:PN])
    return C


@EVERY
def test_batched_small(case):
    for b in (7, 0):
        A, B = case.randn(b, 19, 21, dt=torch.half), case.randn(b, 21, 13, dt=torch.half)
        (C_,), _ = case.call(small_bgemm, A, B)
        w = wide(A) @ wide(B)
        within(C_, w, mm_bound(A, B, E16, w, 21))


@tilelang.jit(out_idx=[-1])
def qlinear(M, N, K, BM=64, BN=64, BK=64, threads=128, stages=3):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), "int8"),
        W: T.Tensor((N, K), "int8"),
        sa: T.Tensor((M,), f32),
        za: T.Tensor((M,), "int32"),
        sw: T.Tensor((N,), f32),
        bias: T.Tensor((N,), bf),
        Y: T.Tensor((M, N), bf),
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads) as (bx, by):
            As = T.alloc_shared((BM, BK), "int8")
            Ws = T.alloc_shared((BN, BK), "int8")
            acc = T.alloc_fragment((BM, BN), "int32")
            wsum = T.alloc_fragment((BN,), "int32")
            part = T.alloc_fragment((BN, BK), "int32")
            wz = T.alloc_shared((BN,), "int32")
            T.clear(acc)
            T.clear(wsum)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                T.copy(A[by * BM, k * BK], As)
                T.copy(W[bx * BN, k * BK], Ws)
                T.gemm(As, Ws, acc, transpose_B=True)
                T.copy(Ws, part)
                T.reduce_sum(part, wsum, dim=1, clear=False)
            T.copy(wsum, wz)
            Yf = T.alloc_fragment((BM, BN), f32)
            for i, j in T.Parallel(BM, BN):
                v = T.cast(acc[i, j] - za[by * BM + i] * wz[j], f32) * sa[by * BM + i] * sw[bx * BN + j] + bias[bx * BN + j]
                Yf[i, j] = 0.5 * v * (1.0 + T.tanh(0.7978845608 * (v + 0.044715 * v * v * v)))
            T.copy(Yf, Y[by * BM, bx * BN])

    return main


@EVERY
def test_int8_zero_point(case):
    M, N, K = 70, 50, 130
    A, W = case.randint(-128, 128, (M, K), torch.int8), case.randint(-128, 128, (N, K), torch.int8)
    sa, sw, za, bias = torch.rand(M) * 0.01, torch.rand(N) * 0.01, case.randint(-9, 9, (M,)), case.randn(N, dt=torch.bfloat16)
    (Y,), _ = case.call(qlinear(M, N, K), A, W, sa, za, sw, bias)
    v = (A.double() - za.double()[:, None]) @ W.double().T * sa.double()[:, None] * sw.double() + bias.double()
    w = 0.5 * v * (1 + torch.tanh(0.7978845608 * (v + 0.044715 * v**3)))
    within(Y, w, w.abs() * EBF * 1.02 + 1e-4 * (1 + v.abs()))


@tilelang.jit(out_idx=[-1])
def pers(M, N, K, BM=64, BN=64, BK=32, sms=3, group=2, threads=128):
    @T.prim_func
    def main(A: T.Tensor((K, M), bf), B: T.Tensor((N, K), bf), C_: T.Tensor((M, N), bf)):
        with T.Kernel(sms, threads=threads) as bid:
            As = T.alloc_shared((BK, BM), bf)
            Bs = T.alloc_shared((BN, BK), bf)
            Cf = T.alloc_fragment((BM, BN), f32)
            Cs = T.alloc_shared((BM, BN), bf)
            T.annotate_layout({Cs: tilelang.layout.make_swizzled_layout(Cs)})
            for m, n in T.Persistent([T.ceildiv(M, BM), T.ceildiv(N, BN)], sms, bid, group_size=group):
                T.clear(Cf)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
                    T.copy(A[k * BK, m * BM], As)
                    T.copy(B[n * BN, k * BK], Bs)
                    T.gemm(As, Bs, Cf, transpose_A=True, transpose_B=True)
                T.copy(Cf, Cs)
                T.copy(Cs, C_[m * BM, n * BN])

    return main


@LONG
def test_persistent_tt(case):
    M, N, K = 72, 136, 40
    A, B = case.randn(K, M, dt=torch.bfloat16), case.randn(N, K, dt=torch.bfloat16)
    (o,), _ = case.call(pers(M, N, K), A, B)
    w = wide(A).T @ wide(B).T
    within(o, w, mm_bound(A.T, B.T, EBF, w, K))


@tilelang.jit(out_idx=[3])
def staged(M, N, K, BM=64, BN=64):
    @T.prim_func
    def main(A: T.Tensor((M, N), f16), B: T.Tensor((K, N), f16), D: T.Tensor((K, N), f16), O: T.Tensor((M, N), f32)):
        with T.Kernel(T.ceildiv(M, BM), threads=128) as bx:
            As = T.alloc_shared((BM, N), f16)
            Bs = T.alloc_shared((BN, N), f16)
            Ds = T.alloc_shared((BN, N), f16)
            S = T.alloc_fragment((BM, BN), f32)
            Sh = T.alloc_fragment((BM, BN), f16)
            acc = T.alloc_fragment((BM, N), f32)
            T.copy(A[bx * BM, 0], As)
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, BN), order=[0, 2, 3, 4, 1, 5], stage=[0, 1, 1, 1, 0, 1]):
                T.copy(B[k * BN, 0], Bs)
                T.gemm(As, Bs, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(BM, BN):
                    S[i, j] = T.log(1.0 + T.exp(S[i, j] * 0.1))
                T.copy(S, Sh)
                T.copy(D[k * BN, 0], Ds)
                T.gemm(Sh, Ds, acc)
            T.copy(acc, O[bx * BM, 0])

    return main


@EVERY
def test_order_stage(case):
    M, N, K = 100, 64, 160
    A, B, D = case.randn(M, N, dt=torch.half), case.randn(K, N, dt=torch.half), case.randn(K, N, dt=torch.half)
    (o,), _ = case.call(staged(M, N, K), A, B, D)
    s = torch.log(1 + torch.exp(wide(A) @ wide(B).T * 0.1))
    w = s @ wide(D)
    within(o, w, (s * E16 * 1.1 + 1e-4) @ wide(D).abs() + 1e-5)


@tilelang.jit
def bmm_strided(A, B, C_, BM: int = 32, BN: int = 32, BK: int = 32):
    b, m, sb, sm = T.dynamic("b, m, sb, sm")
    N, K, tn, tk = T.const("N K tn tk")
    A: T.StridedTensor((b, m, K), (sb, sm, 1), f16)
    B: T.StridedTensor((N, K), (tn, tk), f16)
    C_: T.Tensor((b, m, N), f32)
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(m, BM), b, threads=64) as (bx, by, bz):
        As = T.alloc_shared((BM, BK), f16)
        Bs = T.alloc_shared((BN, BK), f16)
        acc = T.alloc_fragment((BM, BN), f32)
        T.clear(acc)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
            T.copy(A[bz, by * BM : (by + 1) * BM, k * BK : (k + 1) * BK], As)
            T.copy(B[bx * BN, k * BK], Bs)
            T.gemm(As, Bs, acc, transpose_B=True)
        T.copy(acc, C_[bz, by * BM : (by + 1) * BM, bx * BN : (bx + 1) * BN])


@EVERY
def test_strided_bmm(case):
    base = case.randn(40, 3, 80, dt=torch.half)
    A = base[:, :, 5:69].permute(1, 0, 2)
    Bb = case.randn(64, 50, dt=torch.half)
    B = Bb.t()
    _, own = case.call(bmm_strided, A, B, torch.zeros(3, 40, 50))
    w = wide(A) @ wide(B).T
    within(own[2], w, mm_bound(A, B.T, 0, w, 64))


@tilelang.jit(out_idx=[-2, -1])
def cgemm(M, N, K, BM=32, BN=32, BK=16, dt="float64", threads=128):
    @T.prim_func
    def main(
        Ar: T.Tensor((M, K), dt),
        Ai: T.Tensor((M, K), dt),
        Br: T.Tensor((K, N), dt),
        Bi: T.Tensor((K, N), dt),
        Cr: T.Tensor((M, N), dt),
        Ci: T.Tensor((M, N), dt),
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads) as (bx, by):
            a, ai, asum = [T.alloc_shared((BM, BK), dt) for _ in (0, 1, 2)]
            b, bi, bs = [T.alloc_shared((BK, BN), dt) for _ in (0, 1, 2)]
            x, y, z = [T.alloc_fragment((BM, BN), dt) for _ in (0, 1, 2)]
            T.clear(x)
            T.clear(y)
            T.clear(z)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                T.copy(Ar[by * BM, k * BK], a)
                T.copy(Ai[by * BM, k * BK], ai)
                T.copy(Br[k * BK, bx * BN], b)
                T.copy(Bi[k * BK, bx * BN], bi)
                for i, j in T.Parallel(BM, BK):
                    asum[i, j] = a[i, j] + ai[i, j]
                for i, j in T.Parallel(BK, BN):
                    bs[i, j] = b[i, j] + bi[i, j]
                T.gemm(a, b, x)
                T.gemm(ai, bi, y)
                T.gemm(asum, bs, z)
            for i, j in T.Parallel(BM, BN):
                z[i, j] = z[i, j] - x[i, j] - y[i, j]
                x[i, j] = x[i, j] - y[i, j]
            T.copy(x, Cr[by * BM, bx * BN])
            T.copy(z, Ci[by * BM, bx * BN])

    return main


@LONG
def test_complex_gemm(case):
    M, N, K = 20, 37, 20
    A, B = torch.randn(M, K, dtype=torch.complex128), torch.randn(K, N, dtype=torch.complex128)
    (r, i), _ = case.call(cgemm(M, N, K), *[x.contiguous() for x in (A.real, A.imag, B.real, B.imag)])
    w = A @ B
    within(r, w.real, 1e-12)
    within(i, w.imag, 1e-12)


@tilelang.jit
def bsr(ptr, idx, vals, X, BS: int = 32, stages: int = 3):
    NB1, K, N = T.const("NB1 K N")
    nnz = T.dynamic("nnz")
    ptr: T.Tensor((NB1,), "int32")
    idx: T.Tensor((nnz,), "int32")
    vals: T.Tensor((nnz, BS, BS), f16)
    X: T.Tensor((K, N), f16)
    Y = T.empty(((NB1 - 1) * BS, N), f32)
    with T.Kernel(NB1 - 1, T.ceildiv(N, 64), threads=128) as (r, n):
        a = T.alloc_shared((BS, BS), f16)
        x = T.alloc_shared((BS, 64), f16)
        acc = T.alloc_fragment((BS, 64), f32)
        T.clear(acc)
        beg = ptr[r]
        for t in T.Pipelined(ptr[r + 1] - beg, num_stages=stages):
            T.copy(vals[beg + t, :, :], a)
            T.copy(X[idx[beg + t] * BS, n * 64], x)
            T.gemm(a, x, acc)
        T.copy(acc, Y[r * BS, n * 64])
    return Y


@EVERY
def test_bsr_spmm(case):
    ptr = torch.tensor([0, 2, 2, 6, 7], dtype=torch.int32)
    idx = torch.tensor([0, 3, 0, 1, 2, 3, 1], dtype=torch.int32)
    v = case.randn(7, 32, 32, dt=torch.half)
    X = case.randn(128, 100, dt=torch.half)
    (y,), _ = case.call(bsr, ptr, idx, v, X)
    D = torch.zeros(128, 128, dtype=torch.half)
    for r in range(4):
        for t in range(ptr[r], ptr[r + 1]):
            D[r * 32 : r * 32 + 32, idx[t] * 32 : idx[t] * 32 + 32] = v[t]
    w = wide(D) @ wide(X)
    within(y, w, mm_bound(D, X, 0, w, 128))


@tilelang.jit(out_idx=[-1])
def mxfp4(M, N, K, BM=64, BN=64, BK=64, threads=256, stages=2):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), bf), B: T.Tensor((N, K // 2), "uint8"), S: T.Tensor((N, K // 32), "uint8"), O: T.Tensor((M, N), bf)
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads) as (bx, by):
            As = T.alloc_shared((BM, BK), bf)
            Bq = T.alloc_shared((BN, BK // 2), "uint8")
            Bd = T.alloc_fragment((BN, BK), bf)
            Bs = T.alloc_shared((BN, BK), bf)
            acc = T.alloc_fragment((BM, BN), f32)
            Ss = T.alloc_shared((BN, K // 32), "uint8")
            T.clear(acc)
            T.copy(S[bx * BN, 0], Ss)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                T.copy(A[by * BM, k * BK], As)
                T.copy(B[bx * BN, k * BK // 2], Bq)
                for i, j in T.Parallel(BN, BK):
                    n = (Bq[i, j // 2] >> T.cast(4 * (j % 2), "uint8")) & T.uint8(0xF)
                    e = T.cast((n >> T.uint8(1)) & T.uint8(3), "int32")
                    mnt = T.cast(n & T.uint8(1), f32)
                    mag = T.if_then_else(e == 0, 0.5 * mnt, (1.0 + 0.5 * mnt) * T.exp2(T.cast(e - 1, f32)))
                    sc = T.reinterpret(T.cast(Ss[i, k * (BK // 32) + j // 32], "uint32") << T.uint32(23), f32)
                    Bd[i, j] = T.cast(T.if_then_else((n & T.uint8(8)) != T.uint8(0), -mag, mag) * sc, bf)
                T.copy(Bd, Bs)
                T.gemm(As, Bs, acc, transpose_B=True)
            T.copy(acc, O[by * BM, bx * BN])

    return main


@LONG
def test_mxfp4_gemm(case):
    M, N, K = 66, 70, 192
    A = case.randn(M, K, dt=torch.bfloat16)
    B = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (N, K // 2)).astype(np.uint8))
    S = torch.from_numpy(np.random.default_rng(5).integers(120, 130, (N, K // 32)).astype(np.uint8))
    (o,), _ = case.call(mxfp4(M, N, K), A, B, S)
    tab = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    d = torch.stack([tab[(B & 15).long()], tab[(B >> 4).long()]], -1).reshape(N, K) * (
        2.0 ** (S.double() - 127)
    ).repeat_interleave(32, 1)
    w = wide(A) @ d.T
    within(o, w, mm_bound(A, d.T, EBF, w, K))


f32 = "float32"


f16 = "float16"


@tilelang.jit
def splitk_last(A, B, P, Tk, split: int = 3, BM: int = 32, BN: int = 32, BK: int = 32, order: str = "acq_rel"):
    M, N, K = T.const("M N K")
    TM, TN = T.ceildiv(M, BM), T.ceildiv(N, BN)
    A: T.Tensor((M, K), f16)
    B: T.Tensor((K, N), f16)
    P: T.Tensor((split, M, N), f32)
    Tk: T.Tensor((TM, TN), "int32")
    C_ = T.empty((M, N), f32)
    KS = T.ceildiv(T.ceildiv(K, split), BK) * BK
    with T.Kernel(TN, TM, split, threads=64) as (bx, by, bz):
        a = T.alloc_shared((BM, BK), f16)
        b = T.alloc_shared((BK, BN), f16)
        acc = T.alloc_fragment((BM, BN), f32)
        last = T.alloc_shared((1,), "int32")
        tx = T.get_thread_binding()
        T.clear(acc)
        for k in T.Pipelined(KS // BK, num_stages=2):
            T.copy(A[by * BM, bz * KS + k * BK], a)
            for i, j in T.Parallel(BK, BN):
                b[i, j] = T.if_then_else(bz * KS + k * BK + i < K, B[bz * KS + k * BK + i, bx * BN + j], T.float16(0))
            T.gemm(a, b, acc)
        T.copy(acc, P[bz, by * BM : (by + 1) * BM, bx * BN : (bx + 1) * BN])
        T.sync_threads()
        if tx == 0:
            last[0] = T.atomic_add(Tk[by, bx], 1, memory_order=order, return_prev=True)
        T.sync_threads()
        if last[0] == split - 1:
            for s in T.serial(split):
                for i, j in T.Parallel(BM, BN):
                    if s == 0:
                        acc[i, j] = 0.0
                    if by * BM + i < M and bx * BN + j < N:
                        acc[i, j] += P[s, by * BM + i, bx * BN + j]
            T.copy(acc, C_[by * BM, bx * BN])
            if tx == 0:
                Tk[by, bx] = 0
    return C_


@EVERY
def test_split_k_last_block(case):
    M, N, K = 40, 50, 200
    A, B = case.randn(M, K, dt=torch.half), case.randn(K, N, dt=torch.half)
    (o,), own = case.call(splitk_last, A, B, torch.zeros(3, M, N), torch.zeros(2, 2, dtype=torch.int32))
    w = wide(A) @ wide(B)
    within(o, w, mm_bound(A, B, 0, w, K))
    assert (own[3] == 0).all()


@EVERY
def test_stream_k(case):
    M, N, K, BM, BN, BK, P = 64, 96, 160, 32, 32, 32, 4
    TN = N // BN
    KT = K // BK
    TOT = (M // BM) * TN * KT
    PER = -(-TOT // P)

    @T.prim_func
    def main(
        A: T.Tensor((M, K), f16),
        B: T.Tensor((K, N), f16),
        W: T.Tensor((P, BM, BN), f32),
        Fl: T.Tensor((P,), "int32"),
        C_: T.Tensor((M, N), f32),
    ):
        with T.Kernel(P, threads=64) as p_:
            p = P - 1 - p_
            a = T.alloc_shared((BM, BK), f16)
            b = T.alloc_shared((BK, BN), f16)
            acc = T.alloc_fragment((BM, BN), f32)
            tx = T.get_thread_binding()
            it = T.alloc_var("int32", init=0)
            end = T.alloc_var("int32", init=0)
            it = p * PER
            end = T.min((p + 1) * PER, TOT)
            while it < end:
                tile = it // KT
                k0 = it % KT
                k1 = T.min(KT, k0 + end - it)
                T.clear(acc)
                for k in T.serial(k0, k1):
                    T.copy(A[tile // TN * BM, k * BK], a)
                    T.copy(B[k * BK, tile % TN * BN], b)
                    T.gemm(a, b, acc)
                if k0 != 0:
                    T.copy(acc, W[p, :, :])
                    T.sync_threads()
                    if tx == 0:
                        T.atomic_store(Fl[p], 1, memory_order="release")
                else:
                    last = (tile + 1) * KT
                    q = T.alloc_var("int32", init=0)
                    q = p + 1
                    if k1 < KT:
                        cover = T.alloc_var("int32", init=0)
                        cover = end
                        while cover < last:
                            if tx == 0:
                                f = T.alloc_var("int32", init=0)
                                while f == 0:
                                    f = T.atomic_load(Fl[q], memory_order="acquire")
                            T.sync_threads()
                            for i, j in T.Parallel(BM, BN):
                                acc[i, j] += W[q, i, j]
                            cover += PER
                            q += 1
                    T.copy(acc, C_[tile // TN * BM, tile % TN * BN])
                it += k1 - k0

    A, B = case.randn(M, K, dt=torch.half), case.randn(K, N, dt=torch.half)
    (o,), _ = case.call(tilelang.compile(main, out_idx=[4]), A, B, torch.zeros(P, BM, BN), torch.zeros(P, dtype=torch.int32))
    w = wide(A) @ wide(B)
    within(o, w, mm_bound(A, B, 0, w, K))
