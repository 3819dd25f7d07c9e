"""The worked programs of the language, and the listings of the paper and the blog post, traced and run by their meaning."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import numpy_dtype
from tilelang.language.eager import EagerFunction
from tilelang.simulator.reference.run import run_tile

f16, f32 = "float16", "float32"
RNG = np.random.default_rng(0)


def run(f, *args):
    """Outputs of a PrimFunc by name; missing trailing tensors are zeros."""
    params = list(f.func.params)
    full = list(args)
    for p in params[len(full):]:
        b = f.func.buffer_of(p)
        full.append(np.zeros(tuple(int(d) for d in b.shape), numpy_dtype(b.dtype)))
    return run_tile(f.func, full)


def eager(fn, args, **consts):
    """Trace in two phases, as the jit does."""
    e = EagerFunction(fn)
    first = e.trace(args)
    values = dict(consts)
    for name, (param, what, d) in first.consts.items():
        values.setdefault(name, getattr(args[param], what)[d])
    return first.func if first.func is not None else e.trace(args, values).func


def half(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


@pytest.mark.spec("L5:Tensor")
def test_eager_elementwise():
    def add(A, B, blk: int = 256):
        N = T.const("N")
        A: T.Tensor((N,), f16); B: T.Tensor((N,), f16); C = T.empty((N,), f32)  # noqa: E702
        with T.Kernel(T.ceildiv(N, blk), threads=128) as bx:
            for i in T.Parallel(blk): C[bx * blk + i] = A[bx * blk + i] + B[bx * blk + i]
        return C

    a, b = half(300), half(300)
    f = eager(add, {"A": a, "B": b})
    assert f.attrs["tilelang_out_idx"] == [-1]
    assert [p.name for p in f.params] == ["A_handle", "B_handle", "C_handle"]
    np.testing.assert_array_equal(run(f, a, b)["C"], (a + b).astype(np.float32))


def test_softmax():
    def softmax(X, R: int = 4):
        M, N = T.const("M, N")
        X: T.Tensor((M, N), f16); Y = T.empty((M, N), f16)  # noqa: E702
        with T.Kernel(T.ceildiv(M, R), threads=128) as bx:
            x = T.alloc_fragment((R, N), f32); m = T.alloc_fragment((R,), f32); s = T.alloc_fragment((R,), f32)  # noqa: E702
            T.copy(X[bx * R, 0], x); T.reduce_max(x, m, dim=1)  # noqa: E702
            for i, j in T.Parallel(R, N): x[i, j] = T.exp(x[i, j] - m[i])
            T.reduce_sum(x, s, dim=1)
            for i, j in T.Parallel(R, N): x[i, j] = x[i, j] / s[i]
            T.copy(x, Y[bx * R, 0])
        return Y

    x = half(6, 40)
    y = run(eager(softmax, {"X": x}), x)["Y"]
    e = np.exp(x.astype(np.float64) - x.astype(np.float64).max(1, keepdims=True))
    np.testing.assert_allclose(y.astype(np.float64), e / e.sum(1, keepdims=True), atol=2e-3)


def test_split_k_atomic_tile():
    def splitk(A, B, C, split: int = 4, BM: int = 64, BN: int = 64, BK: int = 32):
        M, N, K = T.const("M N K")
        A: T.Tensor((M, K), f16); B: T.Tensor((K, N), f16); C: T.Tensor((M, N), f32)  # noqa: E702
        KS = T.ceildiv(T.ceildiv(K, split), BK) * BK
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), split, threads=128) as (bx, by, bz):
            As = T.alloc_shared((BM, BK), f16); Bs = T.alloc_shared((BK, BN), f16)  # noqa: E702
            Cf = T.alloc_fragment((BM, BN), f32); T.clear(Cf)  # noqa: E702
            for k in T.Pipelined(KS // BK, num_stages=2):
                T.copy(A[by * BM, bz * KS + k * BK], As); T.copy(B[bz * KS + k * BK, bx * BN], Bs); T.gemm(As, Bs, Cf)  # noqa
            T.atomic_add(C[by * BM, bx * BN], Cf)

    a, b = half(70, 130), half(130, 66)
    f = eager(splitk, {"A": a, "B": b, "C": np.zeros((70, 66), np.float32)})
    np.testing.assert_allclose(run(f, a, b)["C"], a.astype(np.float64) @ b.astype(np.float64), atol=1e-3)


def test_dynamic_dim_and_clear_accum():
    def gemm_dyn(A, B, BM: int = 64, BN: int = 64, BK: int = 32):
        m = T.dynamic("m"); N, K = T.const("N K")  # noqa: E702
        A: T.Tensor((m, K), "bfloat16"); B: T.Tensor((N, K), "bfloat16"); C = T.empty((m, N), f32)  # noqa: E702
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(m, BM), threads=128) as (bx, by):
            As = T.alloc_shared((BM, BK), "bfloat16"); Bs = T.alloc_shared((BN, BK), "bfloat16")  # noqa: E702
            Cf = T.alloc_fragment((BM, BN), f32)
            for k in T.Pipelined(T.ceildiv(K, BK), num_stages=2):
                T.copy(A[by * BM, k * BK], As); T.copy(B[bx * BN, k * BK], Bs)  # noqa: E702
                T.gemm(As, Bs, Cf, transpose_B=True, clear_accum=(k == 0))
            T.copy(Cf, C[by * BM, bx * BN])
        return C

    bf = numpy_dtype("bfloat16")
    a, b = half(50, 64).astype(bf), half(70, 64).astype(bf)
    e = EagerFunction(gemm_dyn)
    first = e.trace({"A": a, "B": b})
    assert first.func is None and first.consts == {"N": ("B", "shape", 0), "K": ("A", "shape", 1)}
    f = e.trace({"A": a, "B": b}, {"N": 70, "K": 64}).func
    out = run_tile(f.func, [a, b, np.zeros((50, 70), np.float32)])["C"]
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-3)


@T.macro
def step(acc: T.Ref, x, w=2):
    acc = acc + x * w
    return acc, x - 1


def test_macro_by_reference_and_results():
    n = 7

    @T.prim_func
    def main(A: T.Tensor((n,), "int32"), O: T.Tensor((n, 2), "int32")):
        with T.Kernel(n, threads=1) as b:
            a = T.alloc_var("int32", init=10)
            s, t = step(a, A[b]); u, v = step(a, t, w=3); O[b, 0] = a; O[b, 1] = v  # noqa: E702

    a = np.arange(n, dtype=np.int32)
    np.testing.assert_array_equal(run(main, a)["O"], np.stack([5 * a + 7, a - 2], 1))


@pytest.mark.spec("L8:Persistent")
@pytest.mark.parametrize("sms", [1, 3, 132])
def test_persistent(sms):
    M, N, K, BM, BN, BK = 100, 200, 64, 32, 32, 32

    @T.prim_func
    def main(A: T.Tensor((M, K), f16), B: T.Tensor((K, N), f16), C: T.Tensor((M, N), f16)):
        with T.Kernel(sms, threads=128) as bid:
            As = T.alloc_shared((BM, BK), f16)
            Bs = T.alloc_shared((BK, BN), f16)
            Cf = T.alloc_fragment((BM, BN), f32)
            for by, bx in T.Persistent([T.ceildiv(M, BM), T.ceildiv(N, BN)], sms, bid, group_size=3):
                T.clear(Cf)
                for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
                    T.copy(A[by * BM, k * BK], As)
                    T.copy(B[k * BK, bx * BN], Bs)
                    T.gemm(As, Bs, Cf)
                T.copy(Cf, C[by * BM, bx * BN])

    a, b = half(M, K), half(K, N)
    np.testing.assert_allclose(run(main, a, b)["C"].astype(np.float64), a.astype(np.float64) @ b, atol=0.1)


def attention(Bt, H, S, D, causal=True, BM=64, BN=64):
    sc, shp = D ** -0.5 * 1.44269504, (Bt, S, H, D)

    @T.prim_func
    def main(Q: T.Tensor(shp, f16), K: T.Tensor(shp, f16), V: T.Tensor(shp, f16), O: T.Tensor(shp, f16)):
        with T.Kernel(T.ceildiv(S, BM), H, Bt, threads=128) as (bx, h, b):
            Qs = T.alloc_shared((BM, D), f16); Ks = T.alloc_shared((BN, D), f16); Vs = T.alloc_shared((BN, D), f16)  # noqa
            P = T.alloc_fragment((BM, BN), f32); Ph = T.alloc_fragment((BM, BN), f16); Of = T.alloc_fragment((BM, D), f32)  # noqa
            m, m0, r, l, row = [T.alloc_fragment((BM,), f32) for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, bx * BM:(bx + 1) * BM, h, :], Qs)
            T.clear(Of); T.clear(l); T.fill(m, -T.infinity(f32))  # noqa: E702
            for k in T.Pipelined(T.ceildiv((bx + 1) * BM, BN) if causal else T.ceildiv(S, BN), num_stages=2):
                T.copy(K[b, k * BN:(k + 1) * BN, h, :], Ks)
                for i, j in T.Parallel(BM, BN):
                    ok = (k * BN + j < S) and ((not causal) or bx * BM + i >= k * BN + j)
                    P[i, j] = T.if_then_else(ok, 0, -T.infinity(f32))
                T.gemm(Qs, Ks, P, transpose_B=True); T.copy(V[b, k * BN:(k + 1) * BN, h, :], Vs)  # noqa: E702
                T.copy(m, m0); T.reduce_max(P, m, dim=1, clear=False)  # noqa: E702
                for i in T.Parallel(BM): r[i] = T.exp2((m0[i] - m[i]) * sc)
                for i, j in T.Parallel(BM, BN): P[i, j] = T.exp2((P[i, j] - m[i]) * sc)
                T.reduce_sum(P, row, dim=1)
                for i in T.Parallel(BM): l[i] = l[i] * r[i] + row[i]
                for i, j in T.Parallel(BM, D): Of[i, j] *= r[i]
                T.copy(P, Ph); T.gemm(Ph, Vs, Of)  # noqa: E702
            for i, j in T.Parallel(BM, D): Of[i, j] /= l[i]
            T.copy(Of, O[b, bx * BM:(bx + 1) * BM, h, :])
    return main


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal):
    q, k, v = half(1, 90, 2, 32), half(1, 90, 2, 32), half(1, 90, 2, 32)
    out = run(attention(1, 2, 90, 32, causal), q, k, v)["O"].astype(np.float64)
    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(32)
    if causal:
        s = np.where(np.tril(np.ones((90, 90), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v.astype(np.float64))
    np.testing.assert_allclose(out, want, atol=5e-3)


def test_dequantised_operand():
    def dequant(A, W, scale, BM: int = 64, BN: int = 64, BK: int = 64):
        M, N, K, K2 = T.const("M N K K2")
        A: T.Tensor((M, K), f16); W: T.Tensor((N, K2), "uint8"); scale: T.Tensor((N,), f16)  # noqa: E702
        C = T.empty((M, N), f16)
        with T.Kernel(T.ceildiv(N, BN), T.ceildiv(M, BM), threads=128) as (bx, by):
            As = T.alloc_shared((BM, BK), f16); Ws = T.alloc_shared((BN, BK // 2), "uint8")  # noqa: E702
            Wf = T.alloc_shared((BN, BK), f16); Cf = T.alloc_fragment((BM, BN), f32); T.clear(Cf)  # noqa: E702
            for k in T.serial(T.ceildiv(K, BK)):
                T.copy(A[by * BM, k * BK], As); T.copy(W[bx * BN, k * (BK // 2)], Ws)  # noqa: E702
                for i, j in T.Parallel(BN, BK):
                    q = T.cast((Ws[i, j // 2] >> T.cast((j % 2) * 4, "uint8")) & T.uint8(15), "int32") - 8
                    Wf[i, j] = T.cast(q, f16) * scale[bx * BN + i]
                T.gemm(As, Wf, Cf, transpose_B=True)
            T.copy(Cf, C[by * BM, bx * BN])
        return C

    a, w, s = half(20, 128), RNG.integers(0, 256, (70, 64), dtype=np.uint8), half(70)
    nib = np.stack([w & 15, w >> 4], -1).reshape(70, 128).astype(np.int32) - 8
    want = a.astype(np.float64) @ (nib * s[:, None].astype(np.float64)).T
    out = run(eager(dequant, {"A": a, "W": w, "scale": s}), a, w, s)["C"]
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=5e-3, atol=0.5)


@pytest.mark.spec("L5:StridedTensor")
def test_runtime_scalar_with_default_and_strides():
    def scale_t(X, Y, f: T.float32 = 2.0):
        m, sx, sy = T.dynamic("m, sx, sy"); N = T.const("N")  # noqa: E702
        X: T.StridedTensor((m, N), (sx, 1), f32); Y: T.StridedTensor((N, m), (sy, 1), f32)  # noqa: E702
        with T.Kernel(T.ceildiv(m, 8), threads=128) as bx:
            for i, j in T.Parallel(8, N): Y[j, bx * 8 + i] = X[bx * 8 + i, j] * f

    e = EagerFunction(scale_t)
    assert {n: p.kind for n, p in e.parameters.items()} == {"X": "tensor", "Y": "tensor", "f": "scalar"}
    assert e.parameters["f"].default == 2.0
    first = e.trace({})
    assert first.consts == {"N": ("X", "shape", 1)} and first.uses["N"] == (("X", "shape", 1), ("Y", "shape", 0))
    f = e.trace({}, {"N": 12}).func
    assert [p.name for p in f.params] == ["X_handle", "Y_handle", "f"] and f.params[2].dtype == "float32"
    assert f.defaults == {"f": 2.0}


# ---- the listings, as they stand with the missing constants supplied -------------------------------------------------------

M = N = K = 64
block_M = block_N = block_K = 32
threads = 128


def Matmul(A: T.Tensor, B: T.Tensor, C: T.Tensor):
    with T.Kernel(N // block_N, M // block_M,
                  threads=threads) as (bx, by):
        A_shared = T.alloc_shared(block_M, block_K)
        B_shared = T.alloc_shared(block_K, block_N)
        C_local = T.alloc_fragment(block_M, block_N)

        T.clear(C_local)
        for k in T.Pipelined(K // block_K, num_stages=2):
            T.copy(A[by * block_M, k * block_K], A_shared)
            T.copy(B[k * block_K, bx * block_N], B_shared)
            T.gemm(A_shared, B_shared, C_local)

        T.copy(C_local, C[by * block_M, bx * block_N])


def test_paper_matmul_takes_shapes_from_the_arguments():
    a, b, c = (RNG.standard_normal((64, 64)).astype(np.float32) for _ in range(3))
    e = EagerFunction(Matmul)
    assert all(p.kind == "tensor" and p.open_shape for p in e.parameters.values())
    first = e.trace({"A": a, "B": b, "C": c})
    assert first.consts["A.shape[0]"] == ("A", "shape", 0)
    f = eager(Matmul, {"A": a, "B": b, "C": c})
    np.testing.assert_allclose(run(f, a, b, c)["C"], a.astype(np.float64) @ b, atol=1e-4)


batch, heads, dim, pe_dim, seqlen_kv, kv_head_num = 1, 32, 64, 16, 96, 1
kv_group_num, block_H, VALID_BLOCK_H, BLOCK_N = 32, 16, 16, 32
dtype, accum_dtype = "float16", "float32"
scale = (dim + pe_dim) ** -0.5 * 1.44269504


def flash_attn(
        Q: T.Tensor([batch, heads, dim], dtype),
        Q_pe: T.Tensor([batch, heads, pe_dim], dtype),
        KV: T.Tensor([batch, seqlen_kv, kv_head_num, dim], dtype),
        K_pe: T.Tensor([batch, seqlen_kv, kv_head_num, pe_dim], dtype),
        Output: T.Tensor([batch, heads, dim], dtype),
):
    block_N = BLOCK_N
    with T.Kernel(batch, heads // min(block_H, kv_group_num), threads=256) as (bx, by):
        Q_shared = T.alloc_shared([block_H, dim], dtype)
        S_shared = T.alloc_shared([block_H, block_N], dtype)
        Q_pe_shared = T.alloc_shared([block_H, pe_dim], dtype)
        KV_shared = T.alloc_shared([block_N, dim], dtype)
        K_pe_shared = T.alloc_shared([block_N, pe_dim], dtype)
        O_shared = T.alloc_shared([block_H, dim], dtype)
        acc_s = T.alloc_fragment([block_H, block_N], accum_dtype)
        acc_o = T.alloc_fragment([block_H, dim], accum_dtype)
        scores_max = T.alloc_fragment([block_H], accum_dtype)
        scores_max_prev = T.alloc_fragment([block_H], accum_dtype)
        scores_scale = T.alloc_fragment([block_H], accum_dtype)
        scores_sum = T.alloc_fragment([block_H], accum_dtype)
        logsum = T.alloc_fragment([block_H], accum_dtype)

        cur_kv_head = by // (kv_group_num // block_H)
        T.use_swizzle(10)

        T.copy(Q[bx, by * VALID_BLOCK_H:(by + 1) * VALID_BLOCK_H, :], Q_shared)
        T.copy(Q_pe[bx, by * VALID_BLOCK_H: (by + 1) * VALID_BLOCK_H, :], Q_pe_shared)
        T.fill(acc_o, 0)
        T.fill(logsum, 0)
        T.fill(scores_max, -T.infinity(accum_dtype))

        loop_range = T.ceildiv(seqlen_kv, block_N)

        for k in T.Pipelined(loop_range, num_stages=2):
            T.copy(KV[bx, k * block_N:(k + 1) * block_N, cur_kv_head, :], KV_shared)
            T.copy(K_pe[bx, k * block_N:(k + 1) * block_N, cur_kv_head, :], K_pe_shared)
            T.clear(acc_s)
            T.gemm(
                Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
            T.gemm(
                Q_pe_shared,
                K_pe_shared,
                acc_s,
                transpose_B=True,
                policy=T.GemmWarpPolicy.FullCol)
            T.copy(scores_max, scores_max_prev)
            T.fill(scores_max, -T.infinity(accum_dtype))
            T.reduce_max(acc_s, scores_max, dim=1, clear=False)
            for i in T.Parallel(block_H):
                scores_scale[i] = T.exp2(scores_max_prev[i] * scale - scores_max[i] * scale)
            for i, j in T.Parallel(block_H, block_N):
                acc_s[i, j] = T.exp2(acc_s[i, j] * scale - scores_max[i] * scale)
            T.reduce_sum(acc_s, scores_sum, dim=1)
            T.copy(acc_s, S_shared)
            for i in T.Parallel(block_H):
                logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]
            for i, j in T.Parallel(block_H, dim):
                acc_o[i, j] *= scores_scale[i]
            T.gemm(S_shared, KV_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)
        for i, j in T.Parallel(block_H, dim):
            acc_o[i, j] /= logsum[i]
        T.copy(acc_o, O_shared)
        T.copy(O_shared, Output[bx, by * VALID_BLOCK_H:(by + 1) * VALID_BLOCK_H, :])


def test_paper_mla_listing():
    f = EagerFunction(flash_attn).trace({}).func
    q, qp, kv, kp = half(1, 32, 64), half(1, 32, 16), half(1, 96, 1, 64), half(1, 96, 1, 16)
    out = run(f, q, qp, kv, kp)["Output"].astype(np.float64)
    full_q = np.concatenate([q, qp], -1).astype(np.float64)[0]
    full_k = np.concatenate([kv, kp], -1).astype(np.float64)[0, :, 0]
    s = full_q @ full_k.T * (80 ** -0.5)
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(out[0], p / p.sum(-1, keepdims=True) @ kv[0, :, 0].astype(np.float64), atol=5e-3)
