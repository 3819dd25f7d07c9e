"""The worked programs of the language, as they stand: a user's file.  test_worked_listings.py says what must come out."""
# ruff: noqa
import tilelang, tilelang.language as T; f16, f32 = "float16", "float32"
@tilelang.jit  # 1 eager, elementwise with tail. Out: C = A + B summed in float16, then widened (2048 + 1 → 2048.0); any N
def add(A, B, blk: int = 256):
    N = T.const("N")
    A: T.Tensor((N,), f16); B: T.Tensor((N,), f16); C = T.empty((N,), f32)
    with T.Kernel(T.ceildiv(N, blk), threads=128) as bx:
        for i in T.Parallel(blk): C[bx * blk + i] = A[bx * blk + i] + B[bx * blk + i]
    return C
@tilelang.jit(out_idx=[-1])  # 2 lazy. Out: B equals A.T bit for bit, M and N not multiples of b
def transpose(M, N, dt=f32, b=32):
    @T.prim_func
    def main(A: T.Tensor((M, N), dt), B: T.Tensor((N, M), dt)):
        with T.Kernel(T.ceildiv(N, b), T.ceildiv(M, b), threads=128) as (bx, by):
            S = T.alloc_shared((b, b), dt); T.copy(A[by * b, bx * b], S)
            for i, j in T.Parallel(b, b): B[bx * b + i, by * b + j] = S[j, i]
    return main
@tilelang.jit  # 3 eager. Out: rows sum to 1 within fp16; equals softmax in fp32 rounded to fp16; rows past M not stored
def softmax(X, R: int = 4):
    M, N = T.const("M, N")
    X: T.Tensor((M, N), f16); Y = T.empty((M, N), f16)
    with T.Kernel(T.ceildiv(M, R), threads=128) as bx:
        x = T.alloc_fragment((R, N), f32); m = T.alloc_fragment((R,), f32); s = T.alloc_fragment((R,), f32)
        T.copy(X[bx * R, 0], x); T.reduce_max(x, m, dim=1)
        for i, j in T.Parallel(R, N): x[i, j] = T.exp(x[i, j] - m[i])
        T.reduce_sum(x, s, dim=1)
        for i, j in T.Parallel(R, N): x[i, j] = x[i, j] / s[i]
        T.copy(x, Y[bx * R, 0])
    return Y
@tilelang.jit(out_idx=[-1])  # 4 lazy, NN or NT with epilogue. Out: relu(A @ op(B) + bias) in fp32, rounded once to fp16; ragged M, N, K fine
def gemm(M, N, K, tb=False, BM=128, BN=128, BK=32, stages=3):
    bshape, btile = ((N, K), (BN, BK)) if tb else ((K, N), (BK, BN))
    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor(bshape, f16), bias: T.Tensor((N,), f32), C: T.Tensor((M, N), f16)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            As = T.alloc_shared((BM, BK), f16); Bs = T.alloc_shared(btile, f16); Cf = T.alloc_fragment((BM, BN), f32)
            T.use_swizzle(4); T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                T.copy(A[by * BM, k * BK], As)
                if tb: T.copy(B[bx * BN, k * BK], Bs)
                else: T.copy(B[k * BK, bx * BN], Bs)
                T.gemm(As, Bs, Cf, transpose_B=tb)
            for i, j in T.Parallel(BM, BN): Cf[i, j] = T.max(Cf[i, j] + bias[bx * BN + j], 0)
            T.copy(Cf, C[by * BM, bx * BN])
    return main
@tilelang.jit  # 5 eager. Out: returns None; C (zeroed by the caller) holds A @ B within fp32 rounding, addition order free
def splitk(A, B, C, split: int = 4, BM: int = 64, BN: int = 64, BK: int = 32):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), f16); B: T.Tensor((K, N), f16); C: T.Tensor((M, N), f32)
    KS = T.ceildiv(T.ceildiv(K, split), BK) * BK
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), split, threads=128) as (bx, by, bz):
        As = T.alloc_shared((BM, BK), f16); Bs = T.alloc_shared((BK, BN), f16); Cf = T.alloc_fragment((BM, BN), f32); T.clear(Cf)
        for k in T.Pipelined(KS // BK, num_stages=2):
            T.copy(A[by * BM, bz * KS + k * BK], As); T.copy(B[bz * KS + k * BK, bx * BN], Bs); T.gemm(As, Bs, Cf)
        T.atomic_add(C[by * BM, bx * BN], Cf)
@tilelang.jit  # 6 eager. Out: A @ B.T in fp32 for every m, m = 0 included; one compiled kernel per (N, K)
def gemm_dyn(A, B, BM: int = 64, BN: int = 64, BK: int = 32):
    m = T.dynamic("m"); N, K = T.const("N K")
    A: T.Tensor((m, K), "bfloat16"); B: T.Tensor((N, K), "bfloat16"); C = T.empty((m, N), f32)
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(m, BM), threads=128) as (bx, by):
        As = T.alloc_shared((BM, BK), "bfloat16"); Bs = T.alloc_shared((BN, BK), "bfloat16"); Cf = T.alloc_fragment((BM, BN), f32)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
            T.copy(A[by * BM, k * BK], As); T.copy(B[bx * BN, k * BK], Bs); T.gemm(As, Bs, Cf, transpose_B=True, clear_accum=(k == 0))
        T.copy(Cf, C[by * BM, bx * BN])
    return C
@T.macro  # 7 macro: default, by-reference, two results. Out: O[b] = (5*A[b] + 7, A[b] - 2)
def step(acc: T.Ref, x, w=2):
    acc = acc + x * w
    return acc, x - 1
@tilelang.jit(out_idx=[-1])
def macro_demo(n):
    @T.prim_func
    def main(A: T.Tensor((n,), "int32"), O: T.Tensor((n, 2), "int32")):
        with T.Kernel(n, threads=1) as b:
            a = T.alloc_var("int32", init=10)
            s, t = step(a, A[b]); u, v = step(a, t, w=3); O[b, 0] = a; O[b, 1] = v
    return main
@tilelang.jit(out_idx=[-1])  # 8 lazy, persistent. Out: A @ B, identical for every sms >= 1
def gemm_persistent(M, N, K, BM=128, BN=128, BK=32, sms=132):
    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((K, N), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(sms, threads=128) as bid:
            As = T.alloc_shared((BM, BK), f16); Bs = T.alloc_shared((BK, BN), f16); Cf = T.alloc_fragment((BM, BN), f32)
            for by, bx in T.Persistent([T.ceildiv(M, BM), T.ceildiv(N, BN)], sms, bid):
                T.clear(Cf)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
                    T.copy(A[by * BM, k * BK], As); T.copy(B[k * BK, bx * BN], Bs); T.gemm(As, Bs, Cf)
                T.copy(Cf, C[by * BM, bx * BN])
    return main
@tilelang.jit(out_idx=[3])  # 9 lazy, (B, S, H, D). Out: softmax(Q K^T / sqrt(D), causal) V within fp16 tolerance; S need not divide by the tiles
def attention(Bt, H, S, D, causal=True, BM=64, BN=64):
    sc, shp = D ** -0.5 * 1.44269504, (Bt, S, H, D)
    @T.prim_func
    def main(Q: T.Tensor(shp, f16), K: T.Tensor(shp, f16), V: T.Tensor(shp, f16), O: T.Tensor(shp, f16)):
        with T.Kernel(T.ceildiv(S, BM), H, Bt, threads=128) as (bx, h, b):
            Qs = T.alloc_shared((BM, D), f16); Ks = T.alloc_shared((BN, D), f16); Vs = T.alloc_shared((BN, D), f16)
            P = T.alloc_fragment((BM, BN), f32); Ph = T.alloc_fragment((BM, BN), f16); Of = T.alloc_fragment((BM, D), f32)
            m, m0, r, l, row = [T.alloc_fragment((BM,), f32) for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, bx * BM:(bx + 1) * BM, h, :], Qs)
            T.clear(Of); T.clear(l); T.fill(m, -T.infinity(f32))
            for k in T.Pipelined(T.ceildiv((bx + 1) * BM, BN) if causal else T.ceildiv(S, BN), num_stages=2):
                T.copy(K[b, k * BN:(k + 1) * BN, h, :], Ks)
                for i, j in T.Parallel(BM, BN):
                    ok = (k * BN + j < S) and ((not causal) or bx * BM + i >= k * BN + j)
                    P[i, j] = T.if_then_else(ok, 0, -T.infinity(f32))
                T.gemm(Qs, Ks, P, transpose_B=True); T.copy(V[b, k * BN:(k + 1) * BN, h, :], Vs)
                T.copy(m, m0); T.reduce_max(P, m, dim=1, clear=False)
                for i in T.Parallel(BM): r[i] = T.exp2((m0[i] - m[i]) * sc)
                for i, j in T.Parallel(BM, BN): P[i, j] = T.exp2((P[i, j] - m[i]) * sc)
                T.reduce_sum(P, row, dim=1)
                for i in T.Parallel(BM): l[i] = l[i] * r[i] + row[i]
                for i, j in T.Parallel(BM, D): Of[i, j] *= r[i]
                T.copy(P, Ph); T.gemm(Ph, Vs, Of)
            for i, j in T.Parallel(BM, D): Of[i, j] /= l[i]
            T.copy(Of, O[b, bx * BM:(bx + 1) * BM, h, :])
    return main
@tilelang.jit(out_idx=[2])  # 10 lazy, sm_90 hand-written producer/consumer. Out: A @ B (sizes multiples of the tiles, K // BK of any length); no deadlock
def gemm_ws(M, N, K, BM=128, BN=128, BK=64, S=3):
    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((K, N), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(N // BN, M // BM, threads=256) as (bx, by):
            As = T.alloc_shared((S, BM, BK), f16); Bs = T.alloc_shared((S, BK, BN), f16); Cf = T.alloc_fragment((BM, BN), f32)
            full = T.alloc_barrier([128] * S); empty = T.alloc_barrier([128] * S)
            with T.ws(1):
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(empty[k % S], (k // S + 1) % 2)
                    T.tma_copy(A[by * BM:(by + 1) * BM, k * BK:(k + 1) * BK], As[k % S, :, :], barrier=full[k % S])
                    T.tma_copy(B[k * BK:(k + 1) * BK, bx * BN:(bx + 1) * BN], Bs[k % S, :, :], barrier=full[k % S])
                    T.mbarrier_arrive(full[k % S])
            with T.ws(0):
                T.clear(Cf)
                for k in T.serial(K // BK):
                    T.mbarrier_wait_parity(full[k % S], (k // S) % 2)
                    T.wgmma_gemm(As[k % S, :, :], Bs[k % S, :, :], Cf); T.wait_wgmma(0); T.mbarrier_arrive(empty[k % S])
                T.copy(Cf, C[by * BM, bx * BN])
    return main
@tilelang.jit  # 11 eager, int4 packed low nibble first. Out: A @ ((nibble - 8) * scale[n]).T
def dequant(A, W, scale, BM: int = 64, BN: int = 64, BK: int = 64):
    M, N, K, K2 = T.const("M N K K2")                      # caller: K2 == K // 2
    A: T.Tensor((M, K), f16); W: T.Tensor((N, K2), "uint8"); scale: T.Tensor((N,), f16); C = T.empty((M, N), f16)
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
        As = T.alloc_shared((BM, BK), f16); Ws = T.alloc_shared((BN, BK // 2), "uint8"); Wf = T.alloc_shared((BN, BK), f16)
        Cf = T.alloc_fragment((BM, BN), f32); T.clear(Cf)
        for k in T.serial(T.ceildiv(K, BK)):
            T.copy(A[by * BM, k * BK], As); T.copy(W[bx * BN, k * (BK // 2)], Ws)
            for i, j in T.Parallel(BN, BK):
                q = T.cast((Ws[i, j // 2] >> T.cast((j % 2) * 4, "uint8")) & T.uint8(15), "int32") - 8
                Wf[i, j] = T.cast(q, f16) * scale[bx * BN + i]
            T.gemm(As, Wf, Cf, transpose_B=True)
        T.copy(Cf, C[by * BM, bx * BN])
    return C
@tilelang.jit  # 12 eager, run-time shape and strides. Out: Y = f * X.T for row-padded X and Y; f omitted → 2.0; one compiled kernel
def scale_t(X, Y, f: T.float32 = 2.0):
    m, sx, sy = T.dynamic("m, sx, sy"); N = T.const("N")
    X: T.StridedTensor((m, N), (sx, 1), f32); Y: T.StridedTensor((N, m), (sy, 1), f32)
    with T.Kernel(T.ceildiv(m, 8), threads=128) as bx:
        for i, j in T.Parallel(8, N): Y[j, bx * 8 + i] = X[bx * 8 + i, j] * f
