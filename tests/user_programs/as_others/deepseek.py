"""In the manner of the inference kernels that are published with DeepSeek's models."""

import numpy as np

import tilelang
import tilelang.language as T

from .catalogue import EXACT, Bound, Program, drawn, dtype, integers, uniform, wide

tilelang.set_log_level("WARNING")

FAST = {
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True,
    tilelang.PassConfigKey.TL_DISABLE_FAST_MATH: True,
}

FP8, BF16, F32, I32, FP4, UE8 = "float8_e4m3fn", "bfloat16", "float32", "int32", "float4_e2m1fn", "float8_e8m0fnu"


def log2_ceil(x):
    bits = T.reinterpret("uint32", x)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & ((1 << 23) - 1)
    return T.Cast("int32", exponent - 127 + T.if_then_else(mantissa != 0, 1, 0))


def pow2(n):
    return T.reinterpret("float32", (n + 127) << 23)


def round_scale(amax, inv_max):
    return pow2(log2_ceil(amax * inv_max))


@tilelang.jit(pass_configs=FAST)
def token_quant(N, in_dtype=BF16, out_dtype=FP8, scale_dtype=F32, pow2_scale=False):
    M = T.symbolic("M")
    fp8_min, fp8_max = -448.0, 448.0
    fp8_max_inv = 1 / fp8_max
    num_stages = 0 if pow2_scale else 2
    blk_m, group = 32, 128

    @T.prim_func
    def token_quant_(
        X: T.Tensor[(M, N), in_dtype],
        Y: T.Tensor[(M, N), out_dtype],
        S: T.Tensor[(M, T.ceildiv(N, group)), scale_dtype],
    ):
        with T.Kernel(T.ceildiv(M, blk_m), T.ceildiv(N, group), threads=128) as (pid_m, pid_n):
            x_shared = T.alloc_shared((blk_m, group), in_dtype)
            x_local = T.alloc_fragment((blk_m, group), in_dtype)
            amax_local = T.alloc_fragment((blk_m,), scale_dtype)
            s_local = T.alloc_fragment((blk_m,), scale_dtype)
            y_local = T.alloc_fragment((blk_m, group), out_dtype)
            y_shared = T.alloc_shared((blk_m, group), out_dtype)
            for _ in T.Pipelined(1, num_stages=num_stages):
                T.copy(X[pid_m * blk_m, pid_n * group], x_shared)
                T.copy(x_shared, x_local)
                T.reduce_absmax(x_local, amax_local, dim=1)
                for i in T.Parallel(blk_m):
                    amax_local[i] = T.max(amax_local[i], 1e-4)
                    if pow2_scale:
                        s_local[i] = round_scale(amax_local[i], fp8_max_inv)
                    else:
                        s_local[i] = amax_local[i] * fp8_max_inv
                for i, j in T.Parallel(blk_m, group):
                    y_local[i, j] = T.clamp(x_local[i, j] / s_local[i], fp8_min, fp8_max)
                for i in T.Parallel(blk_m):
                    S[pid_m * blk_m + i, pid_n] = s_local[i]
                T.copy(y_local, y_shared)
                T.copy(y_shared, Y[pid_m * blk_m, pid_n * group])

    return token_quant_


def token_quant_reference(pow2_scale):
    def reference(x, y, s):
        (x,) = wide(x)
        rows = x.reshape(x.shape[0], -1, 128)
        amax = np.maximum(np.abs(rows).max(2), 1e-4)
        scale = 2.0 ** np.ceil(np.log2((amax * np.float32(1 / 448)).astype(np.float32))) if pow2_scale else amax / 448
        q = np.clip(rows / scale[..., None], -448, 448)
        return q.reshape(x.shape), scale

    return reference


def fresh(shape, name):
    return np.zeros(shape, dtype(name))


@tilelang.jit(pass_configs=FAST)
def scaled_gemm(N, K, out_dtype=BF16, accum_dtype="float32"):
    assert out_dtype in [BF16, "float32"]
    M = T.symbolic("M")
    group = 128
    block_M, block_N, block_K = 32, 128, 128

    @T.prim_func
    def scaled_gemm_(
        A: T.Tensor[(M, K), FP8],
        B: T.Tensor[(N, K), FP8],
        C: T.Tensor[(M, N), out_dtype],
        scales_a: T.Tensor[(M, T.ceildiv(K, group)), F32],
        scales_b: T.Tensor[(T.ceildiv(N, group), T.ceildiv(K, group)), F32],
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), FP8)
            B_shared = T.alloc_shared((block_N, block_K), FP8)
            C_shared = T.alloc_shared((block_M, block_N), out_dtype)
            Scale_C_shared = T.alloc_shared((block_M), F32)
            C_local = T.alloc_fragment((block_M, block_N), accum_dtype)
            C_local_accum = T.alloc_fragment((block_M, block_N), accum_dtype)
            T.use_swizzle(panel_size=10)
            T.clear(C_local)
            T.clear(C_local_accum)
            K_iters = T.ceildiv(K, block_K)
            for k in T.Pipelined(K_iters, num_stages=4):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[bx * block_N, k * block_K], B_shared)
                Scale_B = scales_b[bx * block_N // group, k]
                for i in T.Parallel(block_M):
                    Scale_C_shared[i] = scales_a[by * block_M + i, k] * Scale_B
                T.gemm(A_shared, B_shared, C_local, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    C_local_accum[i, j] += C_local[i, j] * Scale_C_shared[i]
                T.clear(C_local)
            T.copy(C_local_accum, C_shared)
            T.copy(C_shared, C[by * block_M, bx * block_N])

    return scaled_gemm_


def scaled_gemm_reference(a, b, c, sa, sb):
    a, b, sa, sb = wide(a, b, sa, sb)
    a = a * np.repeat(sa, 128, 1)[:, : a.shape[1]]
    b = b * np.repeat(np.repeat(sb, 128, 0), 128, 1)[: b.shape[0], : b.shape[1]]
    return a @ b.T


@tilelang.jit(out_idx=[4], pass_configs=FAST)
def index_logits(h, d):
    b, m, n = T.symbolic("b"), T.symbolic("m"), T.symbolic("n")
    blk_n1, blk_n2 = 128, 64

    @T.prim_func
    def index_logits_(
        q: T.Tensor[(b, m, h, d), FP8],
        q_s: T.Tensor[(b, m, h), F32],
        k: T.Tensor[(b, n, d), FP8],
        k_s: T.Tensor[(b, n), F32],
        o: T.Tensor[(b, m, n), F32],
    ):
        with T.Kernel(b, m, T.ceildiv(n, blk_n1)) as (i_b, i_m, i1_n):
            q_smem = T.alloc_shared((h, d), FP8)
            T.copy(q[i_b, i_m, 0, 0], q_smem)
            q_s_frag = T.alloc_fragment(h, F32)
            T.copy(q_s[i_b, i_m, 0], q_s_frag)
            for i2_n in T.Pipelined(blk_n1 // blk_n2, num_stages=2):
                k_smem = T.alloc_shared((blk_n2, d), FP8)
                T.copy(k[i_b, i1_n * blk_n1 + i2_n * blk_n2, 0], k_smem)
                k_s_frag = T.alloc_fragment(blk_n2, F32)
                T.copy(k_s[i_b, i1_n * blk_n1 + i2_n * blk_n2], k_s_frag)
                logits = T.alloc_fragment((blk_n2, h), F32)
                T.gemm(k_smem, q_smem, logits, transpose_A=False, transpose_B=True, clear_accum=True)
                for i_h, i3_n in T.Parallel(h, blk_n2):
                    logits[i3_n, i_h] = T.max(logits[i3_n, i_h], 0) * q_s_frag[i_h]
                logits_sum = T.alloc_fragment(blk_n2, F32)
                T.reduce_sum(logits, logits_sum, dim=1)
                for i3_n in T.Parallel(blk_n2):
                    logits_sum[i3_n] *= k_s_frag[i3_n]
                T.copy(logits_sum, o[i_b, i_m, i1_n * blk_n1 + i2_n * blk_n2])

    return index_logits_


def index_logits_reference(q, q_s, k, k_s):
    q, q_s, k, k_s = wide(q, q_s, k, k_s)
    return (np.maximum(np.einsum("bmhd,bnd->bmnh", q, k), 0) * q_s[:, :, None]).sum(3) * k_s[:, None]


@tilelang.jit(out_idx=[-1], pass_configs=FAST)
def sparse_mla(heads, dim, tail, topk, block_I=32, num_stages=2, threads=128, sink=False, sm_scale=None):
    batch, seq_len, seq_len_kv = T.symbolic("batch"), T.symbolic("seq_len"), T.symbolic("seq_len_kv")
    scale = ((1.0 / (dim + tail)) ** 0.5 if sm_scale is None else sm_scale) * 1.44269504
    H, D, TD, BI = max(16, tilelang.next_power_of_2(heads)), dim, tail, block_I
    NI = tilelang.cdiv(topk, block_I)

    @T.prim_func
    def sparse_mla_(
        Q: T.Tensor((batch, seq_len, heads, dim + tail), BF16),
        KV: T.Tensor((batch, seq_len_kv, dim + tail), BF16),
        Indices: T.Tensor((batch, seq_len, topk), I32),
        Sink: T.Tensor((heads,), F32),
        Output: T.Tensor((batch, seq_len, heads, dim), BF16),
    ):
        with T.Kernel(seq_len, batch, threads=threads) as (s_i, b_i):
            Q_shared = T.alloc_shared([H, D], BF16)
            Q_tail = T.alloc_shared([H, TD], BF16)
            KV_shared = T.alloc_shared([BI, D], BF16)
            K_tail = T.alloc_shared([BI, TD], BF16)
            O_shared = T.alloc_shared([H, D], BF16)
            mask = T.alloc_fragment([BI], "bool")
            acc_o = T.alloc_fragment([H, D], F32)
            acc_s = T.alloc_fragment([H, BI], F32)
            S_shared = T.alloc_shared([H, BI], BF16)
            sumexp = T.alloc_fragment([H], F32)
            sumexp_i = T.alloc_fragment([H], F32)
            alpha = T.alloc_fragment([H], F32)
            m_i = T.alloc_fragment([H], F32)
            m_i_prev = T.alloc_fragment([H], F32)
            T.fill(acc_o, 0)
            T.fill(sumexp, 0)
            T.fill(m_i, -(2**30))
            T.copy(Q[b_i, s_i, 0:H, :D], Q_shared)
            T.copy(Q[b_i, s_i, 0:H, D:], Q_tail)
            for i_i in T.Pipelined(NI, num_stages=num_stages):
                for bi_i in T.Parallel(BI):
                    mask[bi_i] = Indices[b_i, s_i, i_i * BI + bi_i] >= 0
                for bi_i, d_i in T.Parallel(BI, D):
                    KV_shared[bi_i, d_i] = KV[b_i, Indices[b_i, s_i, i_i * BI + bi_i], d_i]
                for bi_i, d_i in T.Parallel(BI, TD):
                    K_tail[bi_i, d_i] = KV[b_i, Indices[b_i, s_i, i_i * BI + bi_i], D + d_i]
                for h_i, bi_i in T.Parallel(H, BI):
                    acc_s[h_i, bi_i] = T.if_then_else(mask[bi_i], 0, -T.infinity(F32))
                T.gemm(Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(Q_tail, K_tail, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(m_i, m_i_prev)
                T.reduce_max(acc_s, m_i, dim=1, clear=False)
                for h_i in T.Parallel(H):
                    alpha[h_i] = T.exp2((m_i_prev[h_i] - m_i[h_i]) * scale)
                for h_i, bi_i in T.Parallel(H, BI):
                    acc_s[h_i, bi_i] = T.exp2(acc_s[h_i, bi_i] * scale - m_i[h_i] * scale)
                T.reduce_sum(acc_s, sumexp_i, dim=1)
                for h_i in T.Parallel(H):
                    sumexp[h_i] = sumexp[h_i] * alpha[h_i] + sumexp_i[h_i]
                for h_i, d_i in T.Parallel(H, D):
                    acc_o[h_i, d_i] = acc_o[h_i, d_i] * alpha[h_i]
                T.copy(acc_s, S_shared)
                T.gemm(S_shared, KV_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)
            if sink:
                for h_i in T.Parallel(H):
                    if h_i < heads:
                        sumexp[h_i] += T.exp2(Sink[h_i] * 1.44269504 - m_i[h_i] * scale)
            for h_i, d_i in T.Parallel(H, D):
                acc_o[h_i, d_i] /= sumexp[h_i]
            T.copy(acc_o, O_shared)
            T.copy(O_shared, Output[b_i, s_i, 0:H, :])

    return sparse_mla_


def sparse_mla_reference(dim, sink):
    def reference(q, kv, indices, sinks):
        q, kv, sinks = wide(q, kv, sinks)
        out = np.zeros(q.shape[:3] + (dim,))
        for b, s in np.ndindex(q.shape[:2]):
            rows = kv[b, indices[b, s][indices[b, s] >= 0]]
            e = np.exp(q[b, s] @ rows.T * q.shape[3] ** -0.5)
            out[b, s] = e @ rows[:, :dim] / (e.sum(1) + (np.exp(sinks) if sink else 0))[:, None]
        return out

    return reference


def chosen(batch, seq, kv, topk):
    def draw(g):
        table = np.stack([g.permutation(kv)[:topk] for _ in range(batch * seq)]).reshape(batch, seq, topk)
        table[:, :, -3:] = -1
        return table.astype(np.int32)

    return draw


@tilelang.jit(out_idx=[3, 4, 5], pass_configs=FAST)
def split_sinkhorn(hc, iters, eps):
    n = T.symbolic("n")
    mix = (2 + hc) * hc
    threads = 64

    @T.prim_func
    def split_sinkhorn_(
        mixes: T.Tensor[(n, mix), F32],
        hc_scale: T.Tensor[(3,), F32],
        hc_base: T.Tensor[(mix,), F32],
        pre: T.Tensor[(n, hc), F32],
        post: T.Tensor[(n, hc), F32],
        comb: T.Tensor[(n, hc, hc), F32],
    ):
        with T.Kernel(n, threads=threads) as i:
            mixes_shared = T.alloc_shared(mix, F32)
            comb_frag = T.alloc_fragment((hc, hc), F32)
            T.copy(mixes[i, :], mixes_shared)
            for j in T.Parallel(hc):
                pre[i, j] = T.sigmoid(mixes_shared[j] * hc_scale[0] + hc_base[j]) + eps
            for j in T.Parallel(hc):
                post[i, j] = 2 * T.sigmoid(mixes_shared[j + hc] * hc_scale[1] + hc_base[j + hc])
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = mixes_shared[j * hc + k + hc * 2] * hc_scale[2] + hc_base[j * hc + k + hc * 2]
            row_sum = T.alloc_fragment(hc, F32)
            col_sum = T.alloc_fragment(hc, F32)
            row_max = T.alloc_fragment(hc, F32)
            T.reduce_max(comb_frag, row_max, dim=1)
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = T.exp(comb_frag[j, k] - row_max[j])
            T.reduce_sum(comb_frag, row_sum, dim=1)
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = comb_frag[j, k] / row_sum[j] + eps
            T.reduce_sum(comb_frag, col_sum, dim=0)
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = comb_frag[j, k] / (col_sum[k] + eps)
            for _ in T.serial(iters - 1):
                T.reduce_sum(comb_frag, row_sum, dim=1)
                for j, k in T.Parallel(hc, hc):
                    comb_frag[j, k] = comb_frag[j, k] / (row_sum[j] + eps)
                T.reduce_sum(comb_frag, col_sum, dim=0)
                for j, k in T.Parallel(hc, hc):
                    comb_frag[j, k] = comb_frag[j, k] / (col_sum[k] + eps)
            T.copy(comb_frag, comb[i, 0, 0])

    return split_sinkhorn_


def split_sinkhorn_reference(iters, eps, hc=4):
    def reference(mixes, scale, base):
        mixes, scale, base = wide(mixes, scale, base)
        z = mixes * np.repeat(scale, [hc, hc, hc * hc]) + base
        pre, post = 1 / (1 + np.exp(-z[:, :hc])) + eps, 2 / (1 + np.exp(-z[:, hc : 2 * hc]))
        c = np.exp(z[:, 2 * hc :].reshape(-1, hc, hc))
        c = c / c.sum(2, keepdims=True) + eps
        c = c / (c.sum(1, keepdims=True) + eps)
        for _ in range(iters - 1):
            c = c / (c.sum(2, keepdims=True) + eps)
            c = c / (c.sum(1, keepdims=True) + eps)
        return pre, post, c

    return reference


@tilelang.jit(pass_configs=FAST)
def fp4_quant(N, block=32, blk_m=32):
    M = T.symbolic("M")

    @T.prim_func
    def fp4_quant_(X: T.Tensor[(M, N), BF16], Y: T.Tensor[(M, N), FP4], S: T.Tensor[(M, N // block), UE8]):
        with T.Kernel(T.ceildiv(M, blk_m), T.ceildiv(N, block), threads=128) as (pid_m, pid_n):
            x_shared = T.alloc_shared((blk_m, block), BF16)
            x_local = T.alloc_fragment((blk_m, block), BF16)
            amax = T.alloc_fragment((blk_m,), F32)
            scale = T.alloc_fragment((blk_m,), F32)
            y_local = T.alloc_fragment((blk_m, block), FP4)
            T.copy(X[pid_m * blk_m, pid_n * block], x_shared)
            T.copy(x_shared, x_local)
            T.reduce_absmax(x_local, amax, dim=1)
            for i in T.Parallel(blk_m):
                amax[i] = T.max(amax[i], 6 * (2**-126))
                scale[i] = round_scale(amax[i], 1.0 / 6.0)
            for i, j in T.Parallel(blk_m, block):
                y_local[i, j] = T.clamp(x_local[i, j] / scale[i], -6.0, 6.0)
            for i in T.Parallel(blk_m):
                S[pid_m * blk_m + i, pid_n] = T.Cast(UE8, scale[i])
            T.copy(y_local, Y[pid_m * blk_m, pid_n * block])

    return fp4_quant_


def pack4(values):
    """Two e2m1 codes a byte, low nibble first."""
    codes = values.astype(dtype(FP4)).view(np.uint8) & 15
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8).view(np.int8)


def unpack4(packed):
    """The e2m1 values of packed bytes, in float64."""
    packed = packed.view(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[:-1] + (-1,))
    return codes.astype(np.uint8).view(dtype(FP4)).astype(np.float64)


def fp4_quant_reference(x, y, s):
    (x,) = wide(x)
    rows = x.reshape(x.shape[0], -1, 32)
    amax = np.abs(rows).max(2).astype(np.float32)
    scale = 2.0 ** np.ceil(np.log2(amax * np.float32(1 / 6)))
    return pack4((rows / scale[..., None]).reshape(x.shape)), scale


@tilelang.jit(pass_configs=FAST)
def fp4_gemm(N, K):
    M = T.symbolic("M")
    act_group, weight_group = 128, 32
    block_M, block_N, block_K = 32, 64, 32
    n_sub = act_group // block_K

    @T.prim_func
    def fp4_gemm_(
        A: T.Tensor[(M, K), FP8],
        B: T.Tensor[(N, K), FP4],
        C: T.Tensor[(M, N), BF16],
        scales_a: T.Tensor[(M, T.ceildiv(K, act_group)), F32],
        scales_b: T.Tensor[(N, T.ceildiv(K, weight_group)), UE8],
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), FP8)
            B_fp4 = T.alloc_shared((block_N, block_K), FP4)
            B_shared = T.alloc_shared((block_N, block_K), FP8)
            C_shared = T.alloc_shared((block_M, block_N), BF16)
            acc = T.alloc_fragment((block_M, block_N), F32)
            part = T.alloc_fragment((block_M, block_N), F32)
            sa = T.alloc_fragment((block_M,), F32)
            sb = T.alloc_fragment((block_N,), F32)
            T.clear(acc)
            T.clear(part)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[bx * block_N, k * block_K], B_fp4)
                for i, j in T.Parallel(block_N, block_K):
                    B_shared[i, j] = T.Cast(FP8, T.Cast(F32, B_fp4[i, j]))
                for i in T.Parallel(block_N):
                    sb[i] = T.Cast(F32, scales_b[bx * block_N + i, k])
                for i in T.Parallel(block_M):
                    sa[i] = scales_a[by * block_M + i, k // n_sub]
                T.gemm(A_shared, B_shared, part, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    acc[i, j] += part[i, j] * sa[i] * sb[j]
                T.clear(part)
            T.copy(acc, C_shared)
            T.copy(C_shared, C[by * block_M, bx * block_N])

    return fp4_gemm_


def fp4_gemm_reference(a, b, c, sa, sb):
    a, sa, sb = wide(a, sa, sb)
    return (a * np.repeat(sa, 128, 1)[:, : a.shape[1]]) @ (unpack4(b) * np.repeat(sb, 32, 1)).T


@tilelang.jit(out_idx=[-1], pass_configs=FAST)
def weight_dequant(block=128):
    M, N = T.symbolic("M, N")

    @T.prim_func
    def weight_dequant_(
        x: T.Tensor[(M, N), FP8], s: T.Tensor[(T.ceildiv(M, block), T.ceildiv(N, block)), F32], y: T.Tensor[(M, N), BF16]
    ):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=256) as (bx, by):
            tile = T.alloc_fragment((block, block), F32)
            T.copy(x[by * block, bx * block], tile)
            scale = s[by, bx]
            for i, j in T.Parallel(block, block):
                tile[i, j] *= scale
            T.copy(tile, y[by * block, bx * block])

    return weight_dequant_


def weight_dequant_reference(x, s):
    x, s = wide(x, s)
    return x * np.repeat(np.repeat(s, 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]


@tilelang.jit(out_idx=[6], pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})
def mla_decode(batch, h_q, h_kv, seqlen_kv, dim, pe_dim, block_N, block_H, num_split):
    scale = (1.0 / (dim + pe_dim)) ** 0.5 * 1.44269504
    kv_group_num = h_q // h_kv
    VALID_BLOCK_H = min(block_H, kv_group_num)
    assert h_kv == 1, "h_kv must be 1"

    @T.macro
    def attend(Q, Q_pe, KV, K_pe, glse, Output_partial):
        with T.Kernel(batch, h_q // VALID_BLOCK_H, num_split, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared([block_H, dim], "float16")
            S_shared = T.alloc_shared([block_H, block_N], "float16")
            Q_pe_shared = T.alloc_shared([block_H, pe_dim], "float16")
            KV_shared = T.alloc_shared([block_N, dim], "float16")
            K_pe_shared = T.alloc_shared([block_N, pe_dim], "float16")
            acc_s = T.alloc_fragment([block_H, block_N], "float")
            acc_o = T.alloc_fragment([block_H, dim], "float")
            scores_max = T.alloc_fragment([block_H], "float")
            scores_max_prev = T.alloc_fragment([block_H], "float")
            scores_scale = T.alloc_fragment([block_H], "float")
            scores_sum = T.alloc_fragment([block_H], "float")
            logsum = T.alloc_fragment([block_H], "float")
            cur_kv_head = by // (kv_group_num // block_H)
            T.use_swizzle(10)
            T.annotate_layout({S_shared: tilelang.layout.make_swizzled_layout(S_shared)})
            T.copy(Q[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, :], Q_shared)
            T.copy(Q_pe[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, :], Q_pe_shared)
            T.fill(acc_o, 0)
            T.fill(logsum, 0)
            T.fill(scores_max, -T.infinity("float"))
            for k in T.Pipelined(T.ceildiv(seqlen_kv // num_split, block_N), num_stages=2):
                kv_start = (seqlen_kv // num_split) * bz + k * block_N
                kv_end = (seqlen_kv // num_split) * bz + (k + 1) * block_N
                T.copy(KV[bx, kv_start:kv_end, cur_kv_head, :], KV_shared)
                T.copy(K_pe[bx, kv_start:kv_end, cur_kv_head, :], K_pe_shared)
                T.clear(acc_s)
                T.gemm(Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(scores_max, scores_max_prev)
                T.fill(scores_max, -T.infinity("float"))
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(block_H):
                    scores_max[i] = T.max(scores_max[i], scores_max_prev[i])
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
            for i in T.Parallel(block_H):
                logsum[i] = T.log2(logsum[i]) + scores_max[i] * scale
            T.copy(logsum, glse[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, bz])
            T.copy(acc_o, Output_partial[bx, by * VALID_BLOCK_H : (by + 1) * VALID_BLOCK_H, bz, :])

    @T.macro
    def combine(glse, Output_partial, Output):
        with T.Kernel(h_q, batch, threads=128) as (hid, bz):
            po_local = T.alloc_fragment([dim], "float16")
            o_accum_local = T.alloc_fragment([dim], "float")
            lse_local_split = T.alloc_var("float")
            lse_logsum_local = T.alloc_var("float")
            lse_max_local = T.alloc_var("float")
            scale_local = T.alloc_var("float")
            lse_logsum_local = 0.0
            T.clear(o_accum_local)
            lse_max_local = -T.infinity("float")
            for k in T.serial(num_split):
                lse_max_local = T.max(lse_max_local, glse[bz, hid, k])
            for k in T.Pipelined(num_split, num_stages=1):
                lse_local_split = glse[bz, hid, k]
                lse_logsum_local += T.exp2(lse_local_split - lse_max_local)
            lse_logsum_local = T.log2(lse_logsum_local) + lse_max_local
            for k in T.serial(num_split):
                for i in T.Parallel(dim):
                    po_local[i] = Output_partial[bz, hid, k, i]
                lse_local_split = glse[bz, hid, k]
                scale_local = T.exp2(lse_local_split - lse_logsum_local)
                for i in T.Parallel(dim):
                    o_accum_local[i] += po_local[i] * scale_local
            for i in T.Parallel(dim):
                Output[bz, hid, i] = o_accum_local[i]

    @T.prim_func
    def mla_decode_(
        Q: T.Tensor([batch, h_q, dim], "float16"),
        Q_pe: T.Tensor([batch, h_q, pe_dim], "float16"),
        KV: T.Tensor([batch, seqlen_kv, h_kv, dim], "float16"),
        K_pe: T.Tensor([batch, seqlen_kv, h_kv, pe_dim], "float16"),
        glse: T.Tensor([batch, h_q, num_split], "float16"),
        Output_partial: T.Tensor([batch, h_q, num_split, dim], "float16"),
        Output: T.Tensor([batch, h_q, dim], "float16"),
    ):
        attend(Q, Q_pe, KV, K_pe, glse, Output_partial)
        combine(glse, Output_partial, Output)

    return mla_decode_


def mla_decode_reference(q, q_pe, kv, k_pe, glse, partial):
    q, q_pe, kv, k_pe = wide(q, q_pe, kv, k_pe)
    s = np.einsum("bhd,bnd->bhn", q, kv[:, :, 0]) + np.einsum("bhd,bnd->bhn", q_pe, k_pe[:, :, 0])
    e = np.exp(s * (q.shape[2] + q_pe.shape[2]) ** -0.5)
    return np.einsum("bhn,bnd->bhd", e / e.sum(2, keepdims=True), kv[:, :, 0])


@tilelang.jit(out_idx=[-1])
def topk_threshold(n, topk, bins=256, threads=256):
    """The indices of the topk greatest scores: one pass of a histogram over the order-preserving top byte, then the tie bin."""
    rows = T.dynamic("rows")

    @T.prim_func
    def topk_threshold_(scores: T.Tensor((rows, n), F32), index: T.Tensor((rows, topk), I32)):
        with T.Kernel(rows, threads=threads) as row:
            tx = T.get_thread_binding()
            hist = T.alloc_shared((bins + 1,), I32)
            count = T.alloc_shared((2,), I32)
            threshold = T.alloc_shared((1,), I32)
            ties = T.alloc_shared((n,), I32)
            key = T.alloc_var("int32")
            place = T.alloc_var("int32")
            T.fill(hist, 0)
            T.fill(count, 0)
            for s in T.serial(T.ceildiv(n, threads)):
                i = s * threads + tx
                if i < n:
                    bits = T.reinterpret("int32", scores[row, i])
                    key = T.if_then_else(bits >= 0, bits ^ T.int32(-2147483648), ~bits)
                    T.atomic_add(hist[(key >> 24) & 0xFF], 1)
            T.sync_threads()
            T.cumsum(hist[0:bins], reverse=True)
            if tx < bins:
                if hist[tx] >= topk and hist[tx + 1] < topk:
                    threshold[0] = tx
            T.sync_threads()
            for s in T.serial(T.ceildiv(n, threads)):
                i = s * threads + tx
                if i < n:
                    bits = T.reinterpret("int32", scores[row, i])
                    key = (T.if_then_else(bits >= 0, bits ^ T.int32(-2147483648), ~bits) >> 24) & 0xFF
                    if key > threshold[0]:
                        place = T.atomic_add(count[0], 1, return_prev=True)
                        index[row, place] = i
                    elif key == threshold[0]:
                        place = T.atomic_add(count[1], 1, return_prev=True)
                        ties[place] = i
            T.sync_threads()
            for s in T.serial(T.ceildiv(n, threads)):
                t = s * threads + tx
                if t < count[1]:
                    rank = T.alloc_var("int32", init=0)
                    for u in T.serial(count[1]):
                        mine = scores[row, ties[t]]
                        other = scores[row, ties[u]]
                        if other > mine or (other == mine and ties[u] < ties[t]):
                            rank += 1
                    if count[0] + rank < topk:
                        index[row, count[0] + rank] = ties[t]

    return topk_threshold_


@T.macro
def quant_group(x, y, scale: T.Ref, lo, hi):
    scale = T.max(scale, 1e-4) / hi
    for i, j in T.Parallel(x.shape[0], x.shape[1]):
        y[i, j] = T.clamp(x[i, j] / scale, lo, hi)


@tilelang.jit
def fake_quant(X, rows: int = 8, group: int = 64):
    """Quantise and dequantise in place: one scale for each 8 x 64 block."""
    m = T.dynamic("m")
    N = T.const("N")
    X: T.Tensor((m, N), BF16)
    S = T.empty((T.ceildiv(m, rows), N // group), F32)
    with T.Kernel(T.ceildiv(m, rows), N // group, threads=128) as (bm, bn):
        x = T.alloc_fragment((rows, group), F32)
        q = T.alloc_fragment((rows, group), FP8)
        flat = T.alloc_fragment((rows,), F32)
        amax = T.alloc_fragment((1,), F32)
        T.copy(X[bm * rows, bn * group], x)
        T.reduce_absmax(x, flat, dim=1)
        T.reduce_max(flat, amax, dim=0)
        scale = T.alloc_var("float32")
        scale = amax[0]
        quant_group(x, q, scale, -448.0, 448.0)
        S[bm, bn] = scale
        for i, j in T.Parallel(rows, group):
            x[i, j] = T.cast(q[i, j], F32) * scale
        T.copy(x, X[bm * rows, bn * group])
    return S


def fake_quant_reference(x):
    (x,) = wide(x)
    m, n = x.shape
    padded = np.zeros((-(-m // 8) * 8, n))
    padded[:m] = x
    blocks = padded.reshape(-1, 8, n // 64, 64)
    scale = np.maximum(np.abs(blocks).max((1, 3)), 1e-4) / 448
    q = np.clip(blocks / scale[:, None, :, None], -448, 448).astype(dtype(FP8)).astype(np.float64)
    return scale, (q * scale[:, None, :, None]).reshape(padded.shape)[:m]


@tilelang.jit(out_idx=[2, 3], pass_configs=FAST)
def gate(n_experts, n_groups, top_groups, topk, route_scale=2.5):
    tokens = T.symbolic("tokens")
    per_group = n_experts // n_groups

    @T.prim_func
    def gate_(
        logits: T.Tensor[(tokens, n_experts), F32],
        bias: T.Tensor[(n_experts,), F32],
        weights: T.Tensor[(tokens, topk), F32],
        experts: T.Tensor[(tokens, topk), I32],
    ):
        with T.Kernel(tokens, threads=32) as t:
            score = T.alloc_fragment((n_groups, per_group), F32)
            biased = T.alloc_shared((n_groups, per_group), F32)
            best = T.alloc_fragment((n_groups,), F32)
            plain = T.alloc_shared((n_experts,), F32)
            for g, e in T.Parallel(n_groups, per_group):
                score[g, e] = T.sigmoid(logits[t, g * per_group + e])
                plain[g * per_group + e] = score[g, e]
                score[g, e] += bias[g * per_group + e]
                biased[g, e] = score[g, e]
            T.reduce_max(score, best, dim=1)
            group_score = T.alloc_shared((n_groups,), F32)
            T.copy(best, group_score)
            lane = T.get_lane_idx()
            if lane < n_groups:
                better = T.alloc_var("int32", init=0)
                for g in T.serial(n_groups):
                    if group_score[g] > group_score[lane] or (group_score[g] == group_score[lane] and g < lane):
                        better += 1
                if better >= top_groups:
                    for e in T.serial(per_group):
                        biased[lane, e] = -T.infinity(F32)
            T.sync_threads()
            total = T.alloc_var("float32", init=0.0)
            chosen_e = T.alloc_local((topk,), I32)
            for k in T.serial(topk):
                value = T.alloc_var("float32", init=-T.infinity(F32))
                where = T.alloc_var("int32", init=0)
                for e in T.serial(T.ceildiv(n_experts, 32)):
                    c = e * 32 + lane
                    if c < n_experts:
                        if biased[c // per_group, c % per_group] > value:
                            value = biased[c // per_group, c % per_group]
                            where = c
                for s in T.unroll(5):
                    v2 = T.shfl_xor(value, 16 >> s)
                    w2 = T.shfl_xor(where, 16 >> s)
                    if v2 > value or (v2 == value and w2 < where):
                        value = v2
                        where = w2
                chosen_e[k] = where
                total += plain[where]
                T.sync_threads()
                if lane == 0:
                    biased[where // per_group, where % per_group] = -T.infinity(F32)
                T.sync_threads()
            for k in T.serial(topk):
                if lane == k:
                    experts[t, k] = chosen_e[k]
                    weights[t, k] = plain[chosen_e[k]] / total * route_scale

    return gate_


def gate_reference(n_groups, top_groups, topk):
    def reference(logits, bias):
        logits, bias = wide(logits, bias)
        plain = 1 / (1 + np.exp(-logits))
        biased = (plain + bias).reshape(len(logits), n_groups, -1)
        order = np.argsort(-biased.max(2), axis=1)
        for t in range(len(logits)):
            biased[t, order[t, top_groups:]] = -np.inf
        chosen = np.argsort(-biased.reshape(len(logits), -1), axis=1)[:, :topk]
        w = np.take_along_axis(plain, chosen, 1)
        return w / w.sum(1, keepdims=True) * 2.5, chosen

    return reference


@tilelang.jit
def rope_inplace(x, freqs, positions, inverse: bool = False):
    tokens, heads = T.dynamic("tokens, heads")
    D, R, P = T.const("D R P")
    x: T.Tensor((tokens, heads, D), BF16)
    freqs: T.Tensor((P, R), F32)
    positions: T.Tensor((tokens,), "int64")
    with T.Kernel(tokens, T.ceildiv(heads, 4), threads=64) as (t, hb):
        row = T.alloc_shared((R,), F32)
        T.copy(freqs[positions[t], 0], row)
        for h, j in T.Parallel(4, R // 2):
            if hb * 4 + h < heads:
                a = T.cast(x[t, hb * 4 + h, D - R + 2 * j], F32)
                b = T.cast(x[t, hb * 4 + h, D - R + 2 * j + 1], F32)
                c, s = row[2 * j], (-row[2 * j + 1] if inverse else row[2 * j + 1])
                x[t, hb * 4 + h, D - R + 2 * j] = a * c - b * s
                x[t, hb * 4 + h, D - R + 2 * j + 1] = a * s + b * c


def rope_inplace_reference(x, freqs, positions):
    x, freqs = wide(x, freqs)
    r = freqs.shape[1]
    c, s = freqs[positions, 0::2][:, None], freqs[positions, 1::2][:, None]
    a, b = x[..., -r::2], x[..., -r + 1 :: 2]
    out = x.copy()
    out[..., -r::2], out[..., -r + 1 :: 2] = a * c - b * s, a * s + b * c
    return out


def topk_inputs(rows, n):
    return lambda g: [np.stack([g.permutation(n) for _ in range(rows)]).astype(np.float32) / n - 0.5]


FP8_ROUNDED = Bound(FP8, via=((FP8, 0.002),))
PROGRAMS = [
    Program(
        "token_quant",
        token_quant,
        dict(N=256),
        drawn(uniform((37, 256), BF16), fresh((37, 256), FP8), fresh((37, 2), F32)),
        token_quant_reference(False),
        (FP8_ROUNDED, Bound(ulps=4)),
        changed=(1, 2),
    ),
    Program(
        "token_quant_pow2",
        token_quant,
        dict(N=256, pow2_scale=True),
        drawn(uniform((37, 256), BF16), fresh((37, 256), FP8), fresh((37, 2), F32)),
        token_quant_reference(True),
        (FP8_ROUNDED, EXACT),
        changed=(1, 2),
    ),
    Program(
        "scaled_gemm",
        scaled_gemm,
        dict(N=192, K=256),
        drawn(
            uniform((50, 256), FP8),
            uniform((192, 256), FP8),
            fresh((50, 192), BF16),
            uniform((50, 2), F32, 0.1, 1),
            uniform((2, 2), F32, 0.1, 1),
        ),
        scaled_gemm_reference,
        Bound(BF16, 256, 64.0),
        changed=(2,),
    ),
    Program(
        "index_logits",
        index_logits,
        dict(h=32, d=64),
        drawn(
            uniform((2, 3, 32, 64), FP8), uniform((2, 3, 32), F32), uniform((2, 150, 64), FP8), uniform((2, 150), F32, 0.5, 1)
        ),
        index_logits_reference,
        Bound(F32, 96, 16.0 * 32),
    ),
    Program(
        "sparse_mla",
        sparse_mla,
        dict(heads=16, dim=64, tail=32, topk=64),
        drawn(uniform((2, 3, 16, 96), BF16), uniform((2, 80, 96), BF16), chosen(2, 3, 80, 64), uniform((16,))),
        sparse_mla_reference(64, False),
        Bound(BF16, via=((BF16, 1.0),)),
    ),
    Program(
        "sparse_mla_sink",
        sparse_mla,
        dict(heads=12, dim=32, tail=32, topk=64, sink=True),
        drawn(uniform((1, 5, 12, 64), BF16), uniform((1, 80, 64), BF16), chosen(1, 5, 80, 64), uniform((12,))),
        sparse_mla_reference(32, True),
        Bound(BF16, via=((BF16, 1.0),)),
    ),
    Program(
        "split_sinkhorn",
        split_sinkhorn,
        dict(hc=4, iters=6, eps=1e-6),
        drawn(uniform((9, 24)), uniform((3,)), uniform((24,))),
        split_sinkhorn_reference(6, 1e-6),
        Bound(F32, 96, 1.0),
    ),
    Program(
        "fp4_quant",
        fp4_quant,
        dict(N=128),
        drawn(uniform((21, 128), BF16), np.zeros((21, 64), np.int8), fresh((21, 4), UE8)),
        fp4_quant_reference,
        EXACT,
        changed=(1, 2),
    ),
    Program(
        "fp4_gemm",
        fp4_gemm,
        dict(N=96, K=256),
        drawn(
            uniform((20, 256), FP8),
            integers((96, 128), -128, 128, "int8"),
            fresh((20, 96), BF16),
            uniform((20, 2), F32, 0.1, 1),
            lambda g: (2.0 ** g.integers(-3, 2, (96, 8))).astype(dtype(UE8)),
        ),
        fp4_gemm_reference,
        Bound(BF16, 256, 256.0),
        changed=(2,),
    ),
    Program(
        "weight_dequant",
        weight_dequant,
        {},
        drawn(uniform((130, 200), FP8), uniform((2, 2), F32, 0.1, 1)),
        weight_dequant_reference,
        Bound(BF16),
    ),
    Program(
        "mla_decode",
        mla_decode,
        dict(batch=2, h_q=32, h_kv=1, seqlen_kv=128, dim=64, pe_dim=16, block_N=32, block_H=16, num_split=2),
        drawn(
            uniform((2, 32, 64), "float16"),
            uniform((2, 32, 16), "float16"),
            uniform((2, 128, 1, 64), "float16"),
            uniform((2, 128, 1, 16), "float16"),
            fresh((2, 32, 2), "float16"),
            fresh((2, 32, 2, 64), "float16"),
        ),
        mla_decode_reference,
        Bound("float16", via=(("float16", 8.0),)),
    ),
    Program(
        "topk_threshold",
        topk_threshold,
        dict(n=300, topk=40),
        topk_inputs(3, 300),
        lambda s: np.sort(np.argsort(-s, axis=1)[:, :40], axis=1),
        EXACT,
        arrange=lambda results: [np.sort(results[0], axis=1)],
    ),
    Program(
        "fake_quant",
        fake_quant,
        dict(N=128),
        drawn(uniform((21, 128), BF16)),
        fake_quant_reference,
        (Bound(ulps=4), Bound(BF16, via=((FP8, 1.0),))),
        changed=(0,),
    ),
    Program(
        "gate",
        gate,
        dict(n_experts=48, n_groups=4, top_groups=2, topk=6),
        drawn(uniform((7, 48), F32, -3, 3), uniform((48,))),
        gate_reference(4, 2, 6),
        (Bound(F32, 8, 2.5), EXACT),
    ),
    Program(
        "rope_inplace",
        rope_inplace,
        dict(D=48, R=32, P=20),
        drawn(uniform((5, 6, 48), BF16), uniform((20, 32)), integers((5,), 0, 20, "int64")),
        rope_inplace_reference,
        Bound(BF16, 4, 2.0),
        changed=(0,),
    ),
]
