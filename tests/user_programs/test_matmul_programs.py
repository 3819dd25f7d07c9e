"""Matrix products of every kind: written from the specification alone."""


import torch
from spec_harness import EVERY, HEAVY

import tilelang
import tilelang.language as T

F = torch.nn.functional


# ---- gemm family -----------------------------------------------------------
@tilelang.jit(out_idx=-1)
def gemm_all(
    M,
    N,
    K,
    ta,
    tb,
    dt="float16",
    acc="float32",
    BM=64,
    BN=48,
    BK=32,
    threads=128,
    stages=2,
    policy=T.GemmWarpPolicy.Square,
    od=None,
):
    od = od or dt
    sa = (K, M) if ta else (M, K)
    sb = (N, K) if tb else (K, N)
    ta_tile = (BK, BM) if ta else (BM, BK)
    tb_tile = (BN, BK) if tb else (BK, BN)

    @T.prim_func
    def main(A: T.Tensor(sa, dt), B: T.Tensor(sb, dt), C: T.Tensor((M, N), od)):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=threads) as (bx, by):
            As = T.alloc_shared(ta_tile, dt)
            Bs = T.alloc_shared(tb_tile, dt)
            Cf = T.alloc_fragment((BM, BN), acc)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=stages):
                if ta:
                    T.copy(A[k * BK, by * BM], As)
                else:
                    T.copy(A[by * BM, k * BK], As)
                if tb:
                    T.copy(B[bx * BN, k * BK], Bs)
                else:
                    T.copy(B[k * BK, bx * BN], Bs)
                T.gemm(As, Bs, Cf, transpose_A=ta, transpose_B=tb, policy=policy, clear_accum=k == 0)
            T.copy(Cf, C[by * BM, bx * BN])

    return main


@HEAVY
def test_gemm_transposes(case):
    M, N, K = 66, 50, 40
    for ta in (False, True):
        for tb in (False, True):
            a, b = case.randn(M, K).half(), case.randn(K, N).half()
            case.run(
                gemm_all(M, N, K, ta, tb),
                [a.t().contiguous() if ta else a, b.t().contiguous() if tb else b],
                (a.float() @ b.float()).half(),
                1e-2,
                1e-2,
            )


@HEAVY
def test_gemm_dtypes(case):
    M, N, K = 32, 32, 40
    for dt, acc, od in (
        ("bfloat16", "float32", "float32"),
        ("float32", "float32", "float32"),
        ("int8", "int32", "int32"),
        ("float64", "float64", "float64"),
        ("float8_e4m3fn", "float32", "float32"),
    ):
        td = getattr(torch, dt)
        if td.is_floating_point:
            a, b = case.randn(M, K).to(td), case.randn(N, K).to(td)
        else:
            a, b = (
                case.randint(0 if dt[0] == "u" else -9, 9, (M, K), td),
                case.randint(0 if dt[0] == "u" else -9, 9, (N, K), td),
            )
        ref = (a.double() @ b.double().t()).to(getattr(torch, od))
        tol = 0.1 if acc == "float16" else 2e-2
        case.run(gemm_all(M, N, K, False, True, dt, acc, 32, 32, 32, 64, od=od), [a, b], ref, tol, tol)


@HEAVY
def test_gemm_odd_warps(case):
    for th, pol, BM, BN in (
        (192, T.GemmWarpPolicy.FullRow, 96, 32),
        (256, T.GemmWarpPolicy.FullCol, 32, 128),
        (32, T.GemmWarpPolicy.Square, 16, 8),
        (384, T.GemmWarpPolicy.Square, 16, 96),
        (96, T.GemmWarpPolicy.Square, 48, 24),
    ):
        a, b = case.randn(40, 40).half(), case.randn(40, 60).half()
        case.run(
            gemm_all(40, 60, 40, False, False, BM=BM, BN=BN, BK=16, threads=th, policy=pol, stages=3, od="float32"),
            [a, b],
            a.float() @ b.float(),
            1e-2,
            1e-2,
        )


@tilelang.jit(out_idx=[3])
def splitk_ws(M, N, K, split, BM=32, BN=32, BK=16):
    KS = T.ceildiv(T.ceildiv(K, split), BK) * BK

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        W: T.Tensor((split, M, N), "float32"),
        C: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), split, threads=64) as (bx, by, bz):
            As = T.alloc_shared((BM, BK), "float16")
            Bs = T.alloc_shared((BK, BN), "float16")
            Cf = T.alloc_fragment((BM, BN), "float32")
            T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(T.min(KS, K - bz * KS), BK), num_stages=2):
                T.copy(A[by * BM, bz * KS + k * BK], As)
                T.copy(B[bz * KS + k * BK, bx * BN], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, W[bz, by * BM : (by + 1) * BM, bx * BN : (bx + 1) * BN])
        with T.Kernel(T.ceildiv(M * N, 256), threads=128) as bx:
            for i in T.Parallel(256):
                acc = T.alloc_var("float32", init=0)
                idx = bx * 256 + i
                if idx < M * N:
                    for s in T.serial(split):
                        acc = acc + W[s, idx // N, idx % N]
                    C[idx // N, idx % N] = acc

    return main


@HEAVY
def test_splitk_workspace(case):
    a, b = case.randn(20, 100).half(), case.randn(100, 40).half()
    w = torch.zeros(3, 20, 40)
    case.run(splitk_ws(20, 40, 100, 3), [a, b, w], (a.float() @ b.float()).half(), 1e-2, 1e-2)
    w = torch.zeros(7, 20, 40)  # the last slices are empty: zero-iteration pipelines
    case.run(splitk_ws(20, 40, 100, 7, BK=32), [a, b, w], (a.float() @ b.float()).half(), 1e-2, 1e-2)


@tilelang.jit
def bgemm(A, B, BM: int = 32, BN: int = 32, BK: int = 32):
    b, sa0, sa1, sb0 = T.dynamic("b, sa0, sa1, sb0")
    M, N, K = T.const("M N K")
    A: T.StridedTensor((b, M, K), (sa0, sa1, 1), "bfloat16")
    B: T.StridedTensor((b, K, N), (sb0, N, 1), "bfloat16")
    C = T.empty((b, M, N), "float32")
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), b, threads=64) as (bx, by, bz):
        As = T.alloc_shared((BM, BK), "bfloat16")
        Bs = T.alloc_shared((BK, BN), "bfloat16")
        Cf = T.alloc_fragment((BM, BN), "float32")
        T.clear(Cf)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
            T.copy(A[bz, by * BM : (by + 1) * BM, k * BK : (k + 1) * BK], As)
            T.copy(B[bz, k * BK : (k + 1) * BK, bx * BN : (bx + 1) * BN], Bs)
            T.gemm(As, Bs, Cf)
        T.copy(Cf, C[bz, by * BM, bx * BN])
    return C


@EVERY
def test_batched_strided(case):
    big = case.randn(3, 50, 60).bfloat16()
    a = big[:, 3:43, 5:50]
    b = case.randn(6, 45, 36).bfloat16()[::2]
    case.run(bgemm.compile(a, b), [a, b], a.float() @ b.float(), 1e-2, 1e-2)


@tilelang.jit
def moe_gemm(X, W, tile_expert, tile_row, sizes, offs, BM: int = 32, BN: int = 32, BK: int = 32):
    total, nt = T.dynamic("total, nt")
    E, N, K = T.const("E N K")
    X: T.Tensor((total, K), "float16")
    W: T.Tensor((E, N, K), "float16")
    tile_expert: T.Tensor((nt,), "int32")
    tile_row: T.Tensor((nt,), "int32")
    sizes: T.Tensor((E,), "int32")
    offs: T.Tensor((E,), "int32")
    Y = T.empty((total, N), "float16")
    with T.Kernel(T.ceildiv(N, BN), nt, threads=128) as (bx, by):
        Xs = T.alloc_shared((BM, BK), "float16")
        Ws = T.alloc_shared((BN, BK), "float16")
        acc = T.alloc_fragment((BM, BN), "float32")
        e = tile_expert[by]
        row0 = offs[e] + tile_row[by]
        rows = T.min(BM, sizes[e] - tile_row[by])
        T.clear(acc)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
            T.copy(X[row0 : row0 + BM, k * BK : (k + 1) * BK], Xs)
            T.copy(W[e, bx * BN : (bx + 1) * BN, k * BK : (k + 1) * BK], Ws)
            T.gemm(Xs, Ws, acc, transpose_B=True)
        for i, j in T.Parallel(BM, BN):
            if i < rows and bx * BN + j < N:
                Y[row0 + i, bx * BN + j] = acc[i, j]
    return Y


@EVERY
def test_moe_grouped(case):
    sizes = torch.tensor([0, 40, 5, 33], dtype=torch.int32)
    offs = (sizes.cumsum(0) - sizes).int()
    tot = int(sizes.sum())
    te, tr = zip(*[(e, r) for e in range(4) for r in range(0, int(sizes[e]), 32)])
    te, tr = torch.tensor(te, dtype=torch.int32), torch.tensor(tr, dtype=torch.int32)
    x, w = case.randn(tot, 72).half(), case.randn(4, 40, 72).half()
    ref = torch.cat([x[offs[e] : offs[e] + sizes[e]].float() @ w[e].float().t() for e in range(4)]).half()
    case.run(moe_gemm.compile(x, w, te, tr, sizes, offs), [x, w, te, tr, sizes, offs], ref, 1e-2, 2e-2)


@tilelang.jit(out_idx=-1)
def int8_scaled(M, N, K, BM=32, BN=32, BK=64):
    @T.prim_func
    def main(
        A: T.Tensor((M, K), "int8"),
        B: T.Tensor((N, K), "int8"),
        sa: T.Tensor((M,), "float32"),
        sb: T.Tensor((N,), "float32"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=64) as (bx, by):
            As = T.alloc_shared((BM, BK), "int8")
            Bs = T.alloc_shared((BN, BK), "int8")
            acc = T.alloc_fragment((BM, BN), "int32")
            out = T.alloc_fragment((BM, BN), "bfloat16")
            S = T.alloc_shared((BM, BN), "bfloat16")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                T.copy(A[by * BM, k * BK], As)
                T.copy(B[bx * BN, k * BK], Bs)
                T.gemm(As, Bs, acc, transpose_B=True)
            for i, j in T.Parallel(BM, BN):
                out[i, j] = T.cast(acc[i, j], "float32") * sa[by * BM + i] * sb[bx * BN + j]
            T.copy(out, S)
            T.copy(S, C[by * BM, bx * BN])

    return main


@EVERY
def test_int8_gemm_scales(case):
    a, b = case.randint(-127, 128, (45, 100), torch.int8), case.randint(-127, 128, (70, 100), torch.int8)
    sa, sb = torch.rand(45), torch.rand(70)
    case.run(
        int8_scaled(45, 70, 100), [a, b, sa, sb], ((a.double() @ b.double().t()) * sa[:, None] * sb).bfloat16(), 1e-2, 1e-2
    )


@tilelang.jit
def w4a16(A, Q, S, Z, G: int = 32, BM: int = 16, BN: int = 32, BK: int = 64):
    M, N, K, KP, KG = T.const("M N K KP KG")
    A: T.Tensor((M, K), "float16")
    Q: T.Tensor((N, KP), "int32")
    S: T.Tensor((KG, N), "float16")
    Z: T.Tensor((KG, N), "uint8")
    C = T.empty((M, N), "float16")
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
        As = T.alloc_shared((BM, BK), "float16")
        Qs = T.alloc_shared((BN, BK // 8), "int32")
        W = T.alloc_shared((BN, BK), "float16")
        acc = T.alloc_fragment((BM, BN), "float32")
        T.clear(acc)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
            T.copy(A[by * BM, k * BK], As)
            T.copy(Q[bx * BN, k * BK // 8], Qs)
            for i, j in T.Parallel(BN, BK):
                g = (k * BK + j) // G
                n = bx * BN + i
                q = (Qs[i, j // 8] >> (4 * (j % 8))) & 15
                W[i, j] = (T.cast(q, "float16") - T.cast(Z[g, n], "float16")) * S[g, n]
            T.gemm(As, W, acc, transpose_B=True)
        T.copy(acc, C[by * BM, bx * BN])
    return C


@EVERY
def test_w4a16_groups(case):
    M, N, K, G = 20, 40, 128, 32
    q = case.randint(0, 16, (N, K), torch.int64)
    s = (torch.rand(K // G, N) * 0.2).half()
    z = case.randint(0, 16, (K // G, N), torch.uint8)
    a = case.randn(M, K).half()
    p = torch.zeros(N, K // 8, dtype=torch.int64)
    for i in range(8):
        p |= q[:, i::8] << (4 * i)
    p = torch.where(p >= 2**31, p - 2**32, p).int()
    w = (q.float() - z.t().float().repeat_interleave(G, 1)) * s.t().float().repeat_interleave(G, 1)
    case.run(w4a16.compile(a, p, s, z), [a, p, s, z], (a.float() @ w.half().float().t()).half(), 2e-2, 5e-2)


@tilelang.jit
def fp8_block(A, B, SA, SB, BM: int = 32, BN: int = 32, BK: int = 64):
    M, N, K, KB, NB = T.const("M N K KB NB")
    A: T.Tensor((M, K), "float8_e4m3fn")
    B: T.Tensor((N, K), "float8_e4m3fn")
    SA: T.Tensor((M, KB), "float32")
    SB: T.Tensor((NB, KB), "float32")
    C = T.empty((M, N), "bfloat16")
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
        As = T.alloc_shared((BM, BK), "float8_e4m3fn")
        Bs = T.alloc_shared((BN, BK), "float8_e4m3fn")
        sc = T.alloc_shared((BM,), "float32")
        part = T.alloc_fragment((BM, BN), "float32")
        acc = T.alloc_fragment((BM, BN), "float32")
        T.clear(acc)
        T.clear(part)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
            T.copy(A[by * BM, k * BK], As)
            T.copy(B[bx * BN, k * BK], Bs)
            sb = SB[bx * BN // 64, k]
            for i in T.Parallel(BM):
                sc[i] = SA[by * BM + i, k] * sb
            T.gemm(As, Bs, part, transpose_B=True)
            for i, j in T.Parallel(BM, BN):
                acc[i, j] += part[i, j] * sc[i]
            T.clear(part)
        T.copy(acc, C[by * BM, bx * BN])
    return C


@HEAVY
def test_fp8_blockscale(case):
    M, N, K = 33, 40, 128
    a, b = case.randn(M, K).to(torch.float8_e4m3fn), case.randn(N, K).to(torch.float8_e4m3fn)
    sa, sb = torch.rand(M, 2), torch.rand(1, 2)
    ref = sum(
        (
            (a[:, i * 64 : (i + 1) * 64].double() @ b[:, i * 64 : (i + 1) * 64].double().t())
            * sa[:, i : i + 1]
            * sb[:, i].repeat_interleave(64)[:N]
        )
        for i in range(2)
    )
    case.run(fp8_block.compile(a, b, sa, sb), [a, b, sa, sb], ref.bfloat16(), 2e-2, 2e-2)


@tilelang.jit
def nf4(A, Q, LUT, absmax, BN: int = 32, BK: int = 64):
    M, N, K, K2, KB = T.const("M N K K2 KB")
    A: T.Tensor((M, K), "bfloat16")
    Q: T.Tensor((N, K2), "uint8")
    LUT: T.Tensor((16,), "float32")
    absmax: T.Tensor((N, KB), "float32")
    C = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, 16), threads=64) as (bx, by):
        lut = T.alloc_shared((16,), "float32")
        As = T.alloc_shared((16, BK), "bfloat16")
        W = T.alloc_shared((BN, BK), "bfloat16")
        acc = T.alloc_fragment((16, BN), "float32")
        T.copy(LUT, lut)
        T.clear(acc)
        for k in T.serial(T.ceildiv(K, BK)):
            T.copy(A[by * 16, k * BK], As)
            for i, j in T.Parallel(BN, BK // 2):
                byte = T.cast(Q[bx * BN + i, k * (BK // 2) + j], "int32")
                s = absmax[bx * BN + i, k]
                W[i, 2 * j] = lut[byte >> 4] * s
                W[i, 2 * j + 1] = lut[byte & 15] * s
            T.gemm(As, W, acc, transpose_B=True)
        T.copy(acc, C[by * 16, bx * BN])
    return C


@EVERY
def test_nf4_lut(case):
    M, N, K = 10, 40, 128
    lut = torch.linspace(-1, 1, 16) ** 3
    q = case.randint(0, 256, (N, K // 2), torch.uint8)
    am = torch.rand(N, K // 64)
    a = case.randn(M, K).bfloat16()
    w = torch.stack([lut[(q >> 4).long()], lut[(q & 15).long()]], -1).reshape(N, K) * am.repeat_interleave(64, 1)
    case.run(nf4.compile(a, q, lut, am), [a, q, lut, am], a.float() @ w.bfloat16().float().t(), 1e-2, 1e-2)


@tilelang.jit(out_idx=-1)
def gemv_reduce(N, K, dt="float16", rows=4, lanes=32, vec=8):
    step = lanes * vec

    @T.prim_func
    def main(A: T.Tensor((K,), dt), B: T.Tensor((N, K), dt), C: T.Tensor((N,), "float32")):
        with T.Kernel(T.ceildiv(N, rows), threads=(lanes, rows)) as bx:
            tx = T.get_thread_binding(0)
            ty = T.get_thread_binding(1)
            a = T.alloc_local((vec,), dt)
            b = T.alloc_local((vec,), dt)
            acc = T.alloc_local((1,), "float32")
            red = T.alloc_local((1,), "float32")
            T.clear(acc)
            for k in T.serial(T.ceildiv(K, step)):
                for v in T.vectorized(vec):
                    a[v] = A[k * step + tx * vec + v]
                    b[v] = B[bx * rows + ty, k * step + tx * vec + v]
                for v in T.serial(vec):
                    acc[0] += T.cast(a[v], "float32") * T.cast(b[v], "float32")
            with T.attr(
                T.comm_reducer(lambda x, y: x + y, [T.Cast("float32", 0)]),
                "reduce_scope",
                T.reinterpret(T.uint64(0), dtype="handle"),
            ):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), acc[0], True, red[0], tx, dtype="handle"))
            if tx == 0 and bx * rows + ty < N:
                C[bx * rows + ty] = red[0]

    return main


@EVERY
def test_gemv_allreduce(case):
    a, b = case.randn(600).half(), case.randn(13, 600).half()
    case.run(gemv_reduce(13, 600), [a, b], b.float() @ a.float(), 1e-2, 1e-2)


@tilelang.jit(out_idx=-1)
def gemv_dp4a(N, K):
    @T.prim_func
    def main(A: T.Tensor((K,), "int8"), B: T.Tensor((N, K), "int8"), C: T.Tensor((N,), "int32")):
        with T.Kernel(N, threads=32) as bx:
            tx = T.get_thread_binding()
            a = T.alloc_local((16,), "int8")
            b = T.alloc_local((16,), "int8")
            acc = T.alloc_local((1,), "int32")
            acc[0] = 0
            for k in range(T.ceildiv(K, 512)):
                base = k * 512 + tx * 16
                for v in T.vectorized(16):
                    a[v] = A[base + v]
                    b[v] = B[bx, base + v]
                for q in T.unroll(4):
                    T.dp4a(a[q * 4], b[q * 4], acc[0])
            s = T.warp_reduce_sum(acc[0])
            if tx == 0:
                C[bx] = s

    return main


@EVERY
def test_dp4a_gemv(case):
    a, b = case.randint(-128, 128, (1000,), torch.int8), case.randint(-128, 128, (5, 1000), torch.int8)
    case.run(gemv_dp4a(5, 1000), [a, b], (b.int() @ a.int()))


@tilelang.jit
def persistent(A, B, sms: int = 3, order: str = "column"):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((K, N), "float16")
    C = T.empty((M, N), "float32")
    with T.Kernel(sms, threads=128) as b:
        As = T.alloc_shared((32, 32), "float16")
        Bs = T.alloc_shared((32, 32), "float16")
        Cf = T.alloc_fragment((32, 32), "float32")
        for by, bx in T.Persistent([T.ceildiv(M, 32), T.ceildiv(N, 32)], sms, b, group_size=2):
            T.clear(Cf)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=3):
                T.copy(A[by * 32, k * 32], As)
                T.copy(B[k * 32, bx * 32], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * 32, bx * 32])
    return C


@HEAVY
def test_persistent_gemm(case):
    a, b = case.randn(70, 40).half(), case.randn(40, 90).half()
    for s in (1, 5):
        case.run(persistent.compile(a, b, sms=s), [a, b], a.float() @ b.float(), 1e-2, 1e-2)


@tilelang.jit
def swz(A, B, order: str, panel: int):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((K, N), "float16")
    C = T.empty((M, N), "float32")
    Id = T.empty((7, 5), "int32")
    with T.Kernel(5, 7, threads=64) as (bx, by):
        T.use_swizzle(panel, order=order)
        As = T.alloc_shared((16, 16), "float16")
        Bs = T.alloc_shared((16, 16), "float16")
        Cf = T.alloc_fragment((16, 16), "float32")
        T.clear(Cf)
        for k in T.Pipelined(T.ceildiv(K, 16), order=[0, 1, 2], stage=[0, 0, 1]):
            T.copy(A[by * 16, k * 16], As)
            T.copy(B[k * 16, bx * 16], Bs)
            T.gemm(As, Bs, Cf)
        T.copy(Cf, C[by * 16, bx * 16])
        for _ in T.Parallel(1):
            Id[by, bx] = bx * 100 + by
    return Id, C


@EVERY
def test_swizzle_manual_pipeline(case):
    a, b = case.randn(112, 20).half(), case.randn(20, 80).half()
    for o, p in (("row", 2), ("column", 3)):
        ids = (torch.arange(5)[None] * 100 + torch.arange(7)[:, None]).int()
        case.run(swz.compile(a, b, o, p), [a, b], [ids, a.float() @ b.float()], 1e-2, 1e-2)


@tilelang.jit(out_idx=[-1])
def conv(N, C, H, W, F, K, S, D, P, BM=32, BN=32, BK=32, dt="float16"):
    OH = (H + 2 * P - D * (K - 1) - 1) // S + 1
    OW = (W + 2 * P - D * (K - 1) - 1) // S + 1

    @T.prim_func
    def main(X: T.Tensor((N, H, W, C), dt), Wt: T.Tensor((K, K, C, F), dt), O: T.Tensor((N, OH, OW, F), dt)):
        with T.Kernel(T.ceildiv(F, BN), T.ceildiv(N * OH * OW, BM), threads=128) as (bx, by):
            Xs = T.alloc_shared((BM, BK), dt)
            Ws = T.alloc_shared((BK, BN), dt)
            acc = T.alloc_fragment((BM, BN), "float32")
            Os = T.alloc_shared((BM, BN), dt)
            Wf = T.reshape(Wt, (K * K * C, F))
            Of = T.reshape(O, (N * OH * OW, F))
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K * K * C, BK), num_stages=2):
                T.im2col(X, Xs, by, k, K, S, D, P)
                T.copy(Wf[k * BK, bx * BN], Ws)
                T.gemm(Xs, Ws, acc)
            T.copy(acc, Os)
            T.copy(Os, Of[by * BM, bx * BN])

    return main


@HEAVY
def test_conv_im2col(case):
    for N, C, H, W, F, K, S, D, P in (
        (1, 8, 9, 7, 16, 3, 1, 1, 1),
        (2, 16, 10, 10, 24, 3, 2, 2, 2),
        (1, 12, 6, 6, 10, 1, 1, 1, 0),
    ):
        x, w = case.randn(N, H, W, C).half(), case.randn(K, K, C, F).half()
        ref = (
            torch.nn.functional.conv2d(
                x.float().permute(0, 3, 1, 2), w.float().permute(3, 2, 0, 1), stride=S, padding=P, dilation=D
            )
            .permute(0, 2, 3, 1)
            .half()
        )
        case.run(conv(N, C, H, W, F, K, S, D, P), [x, w], ref, 1e-2, 2e-2)
