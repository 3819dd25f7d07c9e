"""Attention of ragged batches, and what stands around it."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide, zeros
from .common import BF16, F16, F32, HALF, I32, LOG2E, PLAIN


@tilelang.jit
def window_indices(window, block=32):
    """Where each token's sliding window lies in the packed cache of its request; blocks past the batch return at once."""
    batch, tokens = T.dynamic("batch, tokens")

    @T.prim_func
    def main(
        starts: T.Tensor((batch + 1,), I32),
        prefix: T.Tensor((batch,), I32),
        slots: T.int32,
        out: T.Tensor((tokens, window), I32),
    ):
        with T.Kernel(slots, threads=block) as b:
            if b >= batch:
                return
            tx = T.get_thread_binding()
            start = starts[b]
            count = starts[b + 1] - start
            for s in T.serial(T.ceildiv(count, block)):
                t = s * block + tx
                if t < count:
                    last = prefix[b] + t
                    for w in T.serial(window):
                        pos = last - window + 1 + w
                        out[start + t, w] = T.if_then_else(pos >= 0, pos + b * 1000, -1)

    return main


def window_indices_reference(starts, prefix, slots, out):
    out = out.astype(np.int64)
    for b in range(len(prefix)):
        for t in range(starts[b], starts[b + 1]):
            pos = prefix[b] + t - starts[b] - 4 + np.arange(5)
            out[t] = np.where(pos >= 0, pos + b * 1000, -1)
    return out


@tilelang.jit
def clean_logits(threads=128, block=256):
    """Scores outside of [start, end) of each row become -inf: a loop over the block's own threads."""
    rows, n = T.dynamic("rows, n")

    @T.prim_func
    def main(logits: T.Tensor([rows, n], F32), start: T.Tensor([rows], I32), end: T.Tensor([rows], I32)):
        with T.Kernel(rows, threads=threads) as bx:
            tx = T.thread_binding(0, threads, thread="threadIdx.x")
            first = start[bx]
            last = end[bx]
            for b in T.Pipelined(T.ceildiv(n, block)):
                for k in T.serial(block // threads):
                    i = b * block + k * threads + tx
                    if i < n:
                        if i < first or i >= last:
                            logits[bx, i] = -T.infinity(F32)

    return main


def clean_logits_reference(logits, start, end):
    i = np.arange(logits.shape[1])
    return np.where((i >= start[:, None]) & (i < end[:, None]), logits, -np.inf)


@tilelang.jit(pass_configs=PLAIN)
def norm_rope_store(qk, weight, cos_sin, positions, slots, cache, eps: float = 1e-6):
    """RMS norm of each head, NeoX rotation, the result in place and a copy in the paged cache, if the token has a slot."""
    n, cap, P = T.dynamic("n, cap, P")
    H, D = T.const("H, D")
    qk: T.StridedTensor((n, H, D), (H * D, D, 1), BF16)
    weight: T.Tensor((D,), BF16)
    cos_sin: T.Tensor((P, D), F32)
    positions: T.Tensor((n,), "int64")
    slots: T.Tensor((n,), "int64")
    cache: T.Tensor((cap, H, D), BF16)
    with T.Kernel(n, H, threads=32) as (t, h):
        x = T.alloc_shared((D,), F32)
        f = T.alloc_fragment((D,), F32)
        sq = T.alloc_fragment((1,), F32)
        T.copy(qk[t, h, 0], f)
        y = T.alloc_fragment((D,), F32)
        for j in T.Parallel(D):
            y[j] = f[j] * f[j]
        T.reduce_sum(y, sq)
        for j in T.Parallel(D):
            x[j] = f[j] * T.rsqrt(sq[0] / D + eps) * weight[j]
        pos = positions[t]
        for j in T.Parallel(D // 2):
            c = cos_sin[pos, j]
            s = cos_sin[pos, D // 2 + j]
            a, b = x[j], x[j + D // 2]
            x[j], x[j + D // 2] = a * c - b * s, b * c + a * s
        T.copy(x, qk[t, h, 0])
        if slots[t] >= 0:
            T.copy(x, cache[slots[t], h, 0])


def norm_rope_store_reference(qk, weight, cos_sin, positions, slots, cache):
    qk, weight, cos_sin, cache = wide(qk, weight, cos_sin, cache)
    d = qk.shape[2] // 2
    x = qk / np.sqrt((qk * qk).mean(2, keepdims=True) + 1e-6) * weight
    c, s = cos_sin[positions, None, :d], cos_sin[positions, None, d:]
    out = np.concatenate([x[..., :d] * c - x[..., d:] * s, x[..., d:] * c + x[..., :d] * s], 2)
    cache[slots[slots >= 0]] = out[slots >= 0]
    return out, cache


@tilelang.jit
def merge_states(a, lse_a, b, lse_b):
    """Two partial attention results of the same rows; one side may be empty (-inf)."""
    n = T.dynamic("n")
    H, D = T.const("H D")
    a: T.Tensor((n, H, D), BF16)
    lse_a: T.Tensor((n, H), F32)
    b: T.Tensor((n, H, D), BF16)
    lse_b: T.Tensor((n, H), F32)
    out = T.empty((n, H, D), BF16)
    lse = T.empty((n, H), F32)
    with T.Kernel(n, threads=128) as t:
        wa = T.alloc_shared((H,), F32)
        wb = T.alloc_shared((H,), F32)
        for h in T.Parallel(H):
            x = T.if_then_else(T.isinf(lse_a[t, h]), -T.infinity(F32), lse_a[t, h])
            y = T.if_then_else(T.isinf(lse_b[t, h]), -T.infinity(F32), lse_b[t, h])
            m = T.max(x, y)
            ea, eb = T.exp(x - m), T.exp(y - m)
            wa[h] = ea / (ea + eb)
            wb[h] = eb / (ea + eb)
            lse[t, h] = T.log(ea + eb) + m
        for h, d in T.Parallel(H, D):
            out[t, h, d] = wa[h] * a[t, h, d] + wb[h] * b[t, h, d]
    return out, lse


def merge_states_reference(a, la, b, lb):
    a, la, b, lb = wide(a, la, b, lb)
    ea, eb = np.exp(la), np.exp(lb)
    return (ea[..., None] * a + eb[..., None] * b) / (ea + eb)[..., None], np.log(ea + eb)


@tilelang.jit(out_idx=[4])
def varlen_attention(heads, dim, block_m=64, block_n=32):
    """Packed sequences: each block takes its request's offsets into registers and skips what lies past its end."""
    total, batch = T.dynamic("total"), T.dynamic("batch")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor([total, heads, dim], F16),
        K: T.Tensor([total, heads, dim], F16),
        V: T.Tensor([total, heads, dim], F16),
        cu: T.Tensor([batch + 1], I32),
        O: T.Tensor([total, heads, dim], F16),
        longest: T.int32,
    ):
        with T.Kernel(T.ceildiv(longest, block_m), heads, batch, threads=128) as (bx, by, bz):
            q = T.alloc_shared([block_m, dim], F16)
            k_s = T.alloc_shared([block_n, dim], F16)
            v_s = T.alloc_shared([block_n, dim], F16)
            s = T.alloc_fragment([block_m, block_n], F32)
            p = T.alloc_fragment([block_m, block_n], F16)
            o = T.alloc_fragment([block_m, dim], F32)
            m, m_old, corr, row, l = (T.alloc_fragment([block_m], F32) for _ in (0, 1, 2, 3, 4))
            start = cu[bz]
            length = cu[bz + 1] - start
            if bx * block_m < length:
                T.copy(Q[start + bx * block_m : start + (bx + 1) * block_m, by, :], q)
                for i, d in T.Parallel(block_m, dim):
                    if bx * block_m + i >= length:
                        q[i, d] = 0
                T.clear(o)
                T.clear(l)
                T.fill(m, -T.infinity(F32))
                for k in T.Pipelined(T.ceildiv(length, block_n), num_stages=1):
                    T.copy(K[start + k * block_n : start + (k + 1) * block_n, by, :], k_s)
                    for i, j in T.Parallel(block_m, block_n):
                        s[i, j] = T.if_then_else(k * block_n + j < length, 0, -T.infinity(F32))
                    T.gemm(q, k_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    T.copy(m, m_old)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(block_m):
                        corr[i] = T.exp2((m_old[i] - m[i]) * scale)
                    for i, j in T.Parallel(block_m, block_n):
                        s[i, j] = T.exp2((s[i, j] - m[i]) * scale)
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(block_m):
                        l[i] = l[i] * corr[i] + row[i]
                    T.copy(s, p)
                    for i, d in T.Parallel(block_m, dim):
                        o[i, d] *= corr[i]
                    T.copy(V[start + k * block_n : start + (k + 1) * block_n, by, :], v_s)
                    T.gemm(p, v_s, o, policy=T.GemmWarpPolicy.FullRow)
                for i, d in T.Parallel(block_m, dim):
                    if bx * block_m + i < length:
                        O[start + bx * block_m + i, by, d] = o[i, d] / l[i]

    return main


def varlen_reference(q, k, v, cu, longest):
    q, k, v = wide(q, k, v)
    out = np.zeros(q.shape)
    for a, b in zip(cu[:-1], cu[1:]):
        e = np.exp(np.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * q.shape[2] ** -0.5)
        out[a:b] = np.einsum("hqk,khd->qhd", e / e.sum(2, keepdims=True), v[a:b])
    return out


PROGRAMS = [
    Program(
        "window_indices",
        window_indices,
        dict(window=5),
        drawn(np.array([0, 3, 3, 40], np.int32), np.array([0, 9, 2], np.int32), 5, zeros((40, 5), I32)),
        window_indices_reference,
        EXACT,
        changed=(3,),
    ),
    Program(
        "clean_logits",
        clean_logits,
        {},
        drawn(uniform((3, 300)), integers((3,), 0, 100), integers((3,), 100, 300)),
        clean_logits_reference,
        EXACT,
        changed=(0,),
    ),
    Program(
        "norm_rope_store",
        norm_rope_store,
        dict(H=3, D=64),
        drawn(
            uniform((5, 3, 64), BF16),
            uniform((64,), BF16),
            uniform((20, 64)),
            integers((5,), 0, 20, "int64"),
            np.array([3, -1, 0, 7, 5], np.int64),
            zeros((8, 3, 64), BF16),
        ),
        norm_rope_store_reference,
        Bound(BF16, 70, 2.0),
        changed=(0, 5),
    ),
    Program(
        "merge_states",
        merge_states,
        dict(H=3, D=40),
        drawn(
            uniform((4, 3, 40), BF16),
            uniform((4, 3), low=-3, high=3),
            uniform((4, 3, 40), BF16),
            lambda g: np.where(g.uniform(size=(4, 3)) < 0.3, -np.inf, 0.5).astype(np.float32),
        ),
        merge_states_reference,
        (Bound(BF16, 8, 1.0), Bound(F32, 8, 4.0)),
    ),
    Program(
        "varlen_attention",
        varlen_attention,
        dict(heads=2, dim=32),
        drawn(
            uniform((150, 2, 32), F16),
            uniform((150, 2, 32), F16),
            uniform((150, 2, 32), F16),
            np.array([0, 10, 10, 90, 150], np.int32),
            80,
        ),
        varlen_reference,
        HALF,
    ),
]
