"""Latent attention, its index, and rotary embedding."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import Bound, Program, drawn, integers, uniform, wide, zeros
from .common import BF16, F32, FAST, FP8, I32, chosen


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


PROGRAMS = [
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
        "mla_decode",
        mla_decode,
        dict(batch=2, h_q=32, h_kv=1, seqlen_kv=128, dim=64, pe_dim=16, block_N=32, block_H=16, num_split=2),
        drawn(
            uniform((2, 32, 64), "float16"),
            uniform((2, 32, 16), "float16"),
            uniform((2, 128, 1, 64), "float16"),
            uniform((2, 128, 1, 16), "float16"),
            zeros((2, 32, 2), "float16"),
            zeros((2, 32, 2, 64), "float16"),
        ),
        mla_decode_reference,
        Bound("float16", via=(("float16", 8.0),)),
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
