"""In the manner of the kernels of serving systems: paged caches, sampling, quantised products, small fused steps."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from .catalogue import EXACT, Bound, Program, drawn, dtype, integers, uniform, wide

F16, BF16, F32, I32, FP8 = "float16", "bfloat16", "float32", "int32", "float8_e4m3fn"
PLAIN = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True, tilelang.PassConfigKey.TL_DISABLE_TMA_LOWER: True}
LOG2E = 1.44269504


def zeros(shape, name=F32):
    return np.zeros(shape, dtype(name))


def make_paged_decode(heads, heads_kv, dim, page, splits, block_h=16):
    """Split keys and values, gathered page by page; a second launch of the same function puts the splits together."""
    groups, scale = heads // heads_kv, dim**-0.5 * LOG2E

    @tilelang.jit(out_idx=[-1], pass_configs=PLAIN)
    def paged_decode(threads, stages):
        batch, pages, most = T.dynamic("batch, pages, most")
        blk = page

        @T.prim_func
        def main(
            Q: T.Tensor((batch, heads, dim), F16),
            K: T.Tensor((pages, page, heads_kv, dim), F16),
            V: T.Tensor((pages, page, heads_kv, dim), F16),
            table: T.Tensor((batch, most), I32),
            lens: T.Tensor((batch,), I32),
            part: T.Tensor((batch, heads, splits, dim), F32),
            lse: T.Tensor((batch, heads, splits), F32),
            O: T.Tensor((batch, heads, dim), F16),
        ):
            with T.Kernel(batch, heads_kv, splits, threads=threads) as (b, h, sp):
                q_s = T.alloc_shared((block_h, dim), F16)
                k_s = T.alloc_shared((blk, dim), F16)
                v_s = T.alloc_shared((blk, dim), F16)
                s = T.alloc_fragment((block_h, blk), F32)
                p = T.alloc_fragment((block_h, blk), F16)
                o = T.alloc_fragment((block_h, dim), F32)
                m, m_old, corr, row, l = (T.alloc_fragment((block_h,), F32) for _ in (0, 1, 2, 3, 4))
                T.annotate_layout({q_s: make_swizzled_layout(q_s), k_s: make_swizzled_layout(k_s)})
                for i, j in T.Parallel(block_h, dim):
                    q_s[i, j] = T.if_then_else(i < groups, Q[b, h * groups + i, j], T.float16(0))
                T.clear(o)
                T.clear(l)
                T.fill(m, -1e30)
                blocks = T.ceildiv(lens[b], blk)
                per = T.ceildiv(blocks, splits)
                for kb in T.Pipelined(T.max(0, T.min(per, blocks - sp * per)), num_stages=stages):
                    n = sp * per + kb
                    T.copy(K[table[b, n], 0:blk, h, :], k_s)
                    T.copy(V[table[b, n], 0:blk, h, :], v_s)
                    T.gemm(q_s, k_s, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                    for i, j in T.Parallel(block_h, blk):
                        s[i, j] = T.if_then_else(n * blk + j < lens[b], s[i, j] * scale, -T.infinity(F32))
                    T.copy(m, m_old)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(block_h):
                        corr[i] = T.exp2(m_old[i] - m[i])
                    for i, j in T.Parallel(block_h, blk):
                        s[i, j] = T.exp2(s[i, j] - m[i])
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(block_h):
                        l[i] = l[i] * corr[i] + row[i]
                    T.copy(s, p)
                    for i, j in T.Parallel(block_h, dim):
                        o[i, j] *= corr[i]
                    T.gemm(p, v_s, o, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(block_h, dim):
                    if i < groups:
                        part[b, h * groups + i, sp, j] = T.if_then_else(l[i] > 0, o[i, j] / l[i], 0.0)
                for i in T.Parallel(block_h):
                    if i < groups:
                        lse[b, h * groups + i, sp] = T.if_then_else(l[i] > 0, T.log2(l[i]) + m[i], -T.infinity(F32))
            with T.Kernel(heads, batch, threads=64) as (h, b):
                total = T.alloc_fragment((dim,), F32)
                high = T.alloc_var(F32, init=-T.infinity(F32))
                weight = T.alloc_var(F32, init=0.0)
                T.clear(total)
                for sp in T.serial(splits):
                    high = T.max(high, lse[b, h, sp])
                for sp in T.serial(splits):
                    w = T.exp2(lse[b, h, sp] - high)
                    weight += w
                    for j in T.Parallel(dim):
                        total[j] += part[b, h, sp, j] * w
                for j in T.Parallel(dim):
                    O[b, h, j] = total[j] / weight

        return main

    return paged_decode


def paged_inputs(batch, heads, heads_kv, dim, page, most, splits):
    def draw(g):
        pages = batch * most
        q, k, v = (
            g.uniform(-1, 1, s).astype(F16)
            for s in ((batch, heads, dim), (pages, page, heads_kv, dim), (pages, page, heads_kv, dim))
        )
        table = g.permutation(pages).reshape(batch, most).astype(np.int32)
        lens = np.array([1, most * page - 5, page * 2][:batch], np.int32)
        return [q, k, v, table, lens, zeros((batch, heads, splits, dim)), zeros((batch, heads, splits))]

    return draw


def paged_reference(q, k, v, table, lens, part, lse):
    q, k, v = wide(q, k, v)
    out = np.zeros(q.shape)
    for b, n in enumerate(lens):
        keys, values = (np.repeat(t[table[b]].reshape(-1, *t.shape[2:])[:n], q.shape[1] // t.shape[2], 1) for t in (k, v))
        e = np.exp(np.einsum("hd,nhd->hn", q[b], keys) * q.shape[2] ** -0.5)
        out[b] = np.einsum("hn,nhd->hd", e / e.sum(1, keepdims=True), values)
    return out


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


@tilelang.jit(out_idx=[-1])
def w4a16(M, N, K, group=64, block_m=32, block_n=64, block_k=64, stages=2, threads=128):
    """Packed weights decoded in registers: vector loads of bytes, shifts, a scale for each group of K."""

    @T.macro
    def decode(packed, out, scales):
        tx = T.get_thread_binding()
        raw = T.alloc_local((8,), "uint8")
        half = T.alloc_local((16,), F16)
        for s in T.serial(block_n * block_k // threads // 16):
            at = s * threads * 16 + tx * 16
            for v in T.vectorized(8):
                raw[v] = packed[at // block_k, at % block_k // 2 + v]
            for v in T.unroll(16):
                nibble = raw[v // 2] >> T.cast(4 * (v % 2), "uint8")
                half[v] = T.cast(T.cast(nibble & T.uint8(15), I32) - 8, F16) * scales[at // block_k]
            for v in T.vectorized(16):
                out[at // block_k, at % block_k + v] = half[v]

    @T.prim_func
    def main(
        A: T.Tensor((M, K), F16), W: T.Tensor((N, K // 2), "uint8"), S: T.Tensor((N, K // group), F16), C: T.Tensor((M, N), F16)
    ):
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            a = T.alloc_shared((block_m, block_k), F16)
            w = T.alloc_shared((block_n, block_k // 2), "uint8")
            wd = T.alloc_shared((block_n, block_k), F16)
            sc = T.alloc_shared((block_n,), F16)
            acc = T.alloc_fragment((block_m, block_n), F32)
            T.annotate_layout({wd: make_swizzled_layout(wd)})
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=stages):
                T.copy(A[by * block_m, k * block_k], a)
                T.copy(W[bx * block_n, k * block_k // 2], w)
                for i in T.Parallel(block_n):
                    sc[i] = S[bx * block_n + i, k * block_k // group]
                decode(w, wd, sc)
                T.gemm(a, wd, acc, transpose_B=True)
            T.copy(acc, C[by * block_m, bx * block_n])

    return main


def w4a16_reference(a, w, s):
    a, s = wide(a, s)
    q = np.stack([w & 15, w >> 4], -1).reshape(len(w), -1).astype(float) - 8
    return a @ (q * np.repeat(s, 64, 1)).T


@tilelang.jit(out_idx=[4])
def int8_scaled_mm(N, K, block_m=64, block_n=64, block_k=64):
    M = T.dynamic("M")

    @T.prim_func
    def main(
        A: T.Tensor((M, K), "int8"),
        B: T.Tensor((N, K), "int8"),
        sa: T.Tensor((M, 1), F32),
        sb: T.Tensor((N, 1), F32),
        C: T.Tensor((M, N), BF16),
    ):
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=128) as (bx, by):
            a = T.alloc_shared((block_m, block_k), "int8")
            b = T.alloc_shared((block_n, block_k), "int8")
            acc = T.alloc_fragment((block_m, block_n), I32)
            row = T.alloc_fragment((block_m, 1), F32)
            col = T.alloc_fragment((block_n, 1), F32)
            T.clear(acc)
            T.copy(sa[by * block_m, 0], row)
            T.copy(sb[bx * block_n, 0], col)
            for k in T.Pipelined(T.ceildiv(K, block_k), num_stages=3):
                T.copy(A[by * block_m, k * block_k], a)
                T.copy(B[bx * block_n, k * block_k], b)
                T.gemm(a, b, acc, transpose_B=True)
            for i, j in T.Parallel(block_m, block_n):
                if by * block_m + i < M and bx * block_n + j < N:
                    C[by * block_m + i, bx * block_n + j] = T.cast(acc[i, j], F32) * row[i, 0] * col[j, 0]

    return main


@tilelang.jit(out_idx=[-1], pass_configs=PLAIN)
def mla_two_groups(heads, dim, topk, block=32):
    """Two warp groups: the first multiplies left halves, the second right ones; a third copies gathered rows with barriers."""
    batch, rows = T.dynamic("batch, rows")
    half, scale = dim // 2, dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), BF16),
        KV: T.Tensor((rows, dim), BF16),
        index: T.Tensor((batch, topk), I32),
        O: T.Tensor((batch, heads, dim), BF16),
    ):
        with T.Kernel(batch, threads=384) as b:
            q_l = T.alloc_shared((heads, half), BF16)
            q_r = T.alloc_shared((heads, half), BF16)
            kv_l = T.alloc_shared((block, half), BF16)
            kv_r = T.alloc_shared((block, half), BF16)
            p_s = T.alloc_shared((heads, block), BF16)
            c_s = T.alloc_shared((heads,), F32)
            l_s = T.alloc_shared((heads,), F32)
            o_l = T.alloc_fragment((heads, half), F32)
            o_r = T.alloc_fragment((heads, half), F32)
            s = T.alloc_fragment((heads, block), F32)
            m, m_old, corr, row, l = (T.alloc_fragment((heads,), F32) for _ in (0, 1, 2, 3, 4))
            full = T.alloc_barrier(128)
            free = T.alloc_barrier(256)
            ready = T.alloc_barrier(128)
            q_in = T.alloc_barrier(384)
            tx = T.get_thread_binding()
            T.copy(Q[b, 0:heads, 0:half], q_l)
            T.copy(Q[b, 0:heads, half:dim], q_r)
            T.barrier_arrive(q_in)
            if tx < 128:
                T.set_max_nreg(240, 1)
                T.clear(o_l)
                T.clear(l)
                T.fill(m, -1e30)
                T.barrier_wait(q_in, 0)
                for k in T.serial(topk // block):
                    T.barrier_wait(full, k & 1)
                    T.gemm(q_l, kv_l, s, transpose_B=True, clear_accum=True, wg_wait=0)
                    T.gemm(q_r, kv_r, s, transpose_B=True, wg_wait=0)
                    T.copy(m, m_old)
                    T.reduce_max(s, m, dim=1, clear=False)
                    for i in T.Parallel(heads):
                        corr[i] = T.exp2((m_old[i] - m[i]) * scale)
                    for i, j in T.Parallel(heads, block):
                        s[i, j] = T.exp2(s[i, j] * scale - m[i] * scale)
                    T.reduce_sum(s, row, dim=1)
                    for i in T.Parallel(heads):
                        l[i] = l[i] * corr[i] + row[i]
                    for i, j in T.Parallel(heads, half):
                        o_l[i, j] *= corr[i]
                    T.copy(corr, c_s)
                    T.copy(s, p_s)
                    T.copy(l, l_s)
                    T.barrier_arrive(ready)
                    T.gemm(p_s, kv_l, o_l)
                    T.barrier_arrive(free)
                for i, j in T.Parallel(heads, half):
                    o_l[i, j] /= l[i]
                T.copy(o_l, O[b, 0:heads, 0:half])
            elif tx < 256:
                T.set_max_nreg(168, 1)
                T.clear(o_r)
                for k in T.serial(topk // block):
                    T.barrier_wait(ready, k & 1)
                    for i, j in T.Parallel(heads, half):
                        o_r[i, j] *= c_s[i]
                    T.gemm(p_s, kv_r, o_r)
                    if k == topk // block - 1:
                        for i, j in T.Parallel(heads, half):
                            o_r[i, j] /= l_s[i]
                    T.barrier_arrive(free)
                T.copy(o_r, O[b, 0:heads, half:dim])
            else:
                T.set_max_nreg(80, 0)
                for k in T.serial(topk // block):
                    T.barrier_wait(free, (k & 1) ^ 1)
                    for r in T.serial(block * half // 8 // 128):
                        e = r * 128 + (tx - 256)
                        i, c = e // (half // 8), e % (half // 8) * 8
                        with T.attr("default", "async_scope", 1):
                            for v in T.vectorized(8):
                                kv_l[i, c + v] = KV[index[b, k * block + i], c + v]
                                kv_r[i, c + v] = KV[index[b, k * block + i], half + c + v]
                    T.cp_async_barrier_noinc(full[0])

    return main


def gathered_reference(q, kv, index):
    q, kv = wide(q, kv)
    keys = kv[index]
    e = np.exp(np.einsum("bhd,bnd->bhn", q, keys) * q.shape[2] ** -0.5)
    return np.einsum("bhn,bnd->bhd", e / e.sum(2, keepdims=True), keys)


@tilelang.jit
def top_p_sample(probs, top_p, uniform_number, block: int = 256):
    """The token at which the sum of the probabilities above a pivot passes a uniform number; the pivot by bisection."""
    rows = T.dynamic("rows")
    V = T.const("V")
    probs: T.Tensor((rows, V), F32)
    top_p: T.Tensor((rows,), F32)
    uniform_number: T.Tensor((rows,), F32)
    token = T.empty((rows,), I32)
    kept = T.empty((rows,), F32)
    with T.Kernel(rows, threads=block) as r:
        p = T.alloc_shared((V,), F32)
        low = T.alloc_var(F32, init=0.0)
        high = T.alloc_var(F32, init=1.0)
        T.copy(probs[r, 0], p)
        f = T.alloc_fragment((V,), F32)
        s = T.alloc_fragment((1,), F32)
        for _ in T.serial(24):
            mid = (low + high) * 0.5
            for i in T.Parallel(V):
                f[i] = T.if_then_else(p[i] >= mid, p[i], 0.0)
            T.reduce_sum(f, s)
            if s[0] >= top_p[r]:
                low = mid
            else:
                high = mid
        for i in T.Parallel(V):
            p[i] = T.if_then_else(p[i] >= low, p[i], 0.0)
        T.cumsum(p, dim=0)
        at = T.alloc_reducer((1,), I32, op="min")
        where = T.alloc_fragment((1,), I32)
        T.reducer_init(at)
        for i in T.Parallel(V):
            if p[i] > uniform_number[r] * p[V - 1]:
                T.reducer_update(at[0], i)
        T.finalize_reducer(at, where)
        if T.get_thread_binding() == 0:
            token[r] = where[0]
            kept[r] = p[V - 1]
    return token, kept


def top_p_sample_reference(probs, top_p, u):
    (probs,) = wide(probs)
    tokens, kept = [], []
    for p, limit, x in zip(probs, top_p, u):
        order = np.sort(p)[::-1]
        pivot = order[np.searchsorted(np.cumsum(order), limit)]
        q = np.cumsum(np.where(p >= pivot, p, 0))
        tokens.append(np.argmax(q > x * q[-1]))
        kept.append(q[-1])
    return np.array(tokens), np.array(kept)


def top_p_inputs(g):
    p = np.stack([g.permutation(np.arange(1, 129)) for _ in range(4)]).astype(np.float64)
    p = (p / p.sum(1, keepdims=True)).astype(np.float32)
    return [p, np.array([0.3, 0.5, 0.71, 0.9], np.float32), np.array([0.1, 0.55, 0.313, 0.97], np.float32)]


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


@tilelang.jit
def masked_silu_quant(x, counts, group: int = 64):
    """silu(a) * b of the first rows of each expert, to fp8 with scales stored column-major for the next product."""
    E, M, H = T.const("E M H")
    x: T.Tensor((E, M, 2 * H), BF16)
    counts: T.Tensor((E,), I32)
    out = T.empty((E, M, H), FP8)
    scales = T.empty((E, H // group, M), F32)
    with T.Kernel(H // group, M, E, threads=32) as (g, m, e):
        a = T.alloc_fragment((group,), F32)
        amax = T.alloc_fragment((1,), F32)
        if m < counts[e]:
            for i in T.Parallel(group):
                u = T.cast(x[e, m, g * group + i], F32)
                a[i] = u * T.sigmoid(u) * T.cast(x[e, m, H + g * group + i], F32)
            T.reduce_absmax(a, amax)
            sc = T.max(amax[0], 1e-10) / 448.0
            for i in T.Parallel(group):
                out[e, m, g * group + i] = T.clamp(a[i] / sc, -448.0, 448.0)
            scales[e, g, m] = sc
        else:
            for i in T.Parallel(group):
                out[e, m, g * group + i] = T.cast(0.0, FP8)
            scales[e, g, m] = 0.0
    return out, scales


def masked_silu_quant_reference(x, counts):
    (x,) = wide(x)
    e, m, h = x.shape[0], x.shape[1], x.shape[2] // 2
    v = x[..., :h] / (1 + np.exp(-x[..., :h])) * x[..., h:]
    v = v.reshape(e, m, -1, 64)
    scale = np.maximum(np.abs(v).max(3), 1e-10) / 448
    live = (np.arange(m) < counts[:, None])[..., None]
    return np.where(live, (v / scale[..., None]).reshape(e, m, h), 0), np.where(live, scale, 0).transpose(0, 2, 1)


@tilelang.jit(out_idx=[-1])
def fp8_kv_decode(heads, dim, block=64):
    """Keys and values in fp8 with one scale a token, widened on the way to shared memory."""
    batch, seq = T.dynamic("batch, seq")
    scale = dim**-0.5 * LOG2E

    @T.prim_func
    def main(
        Q: T.Tensor((batch, heads, dim), BF16),
        K: T.Tensor((batch, seq, dim), FP8),
        ks: T.Tensor((batch, seq), F32),
        lens: T.Tensor((batch,), I32),
        O: T.Tensor((batch, heads, dim), BF16),
    ):
        with T.Kernel(batch, threads=128) as b:
            q = T.alloc_shared((heads, dim), BF16)
            k8 = T.alloc_shared((block, dim), FP8)
            k_s = T.alloc_shared((block, dim), BF16)
            sc = T.alloc_shared((block,), F32)
            s = T.alloc_fragment((heads, block), F32)
            p = T.alloc_shared((heads, block), BF16)
            o = T.alloc_fragment((heads, dim), F32)
            m, m_old, corr, row, l = (T.alloc_fragment((heads,), F32) for _ in (0, 1, 2, 3, 4))
            T.copy(Q[b, :, :], q)
            T.clear(o)
            T.clear(l)
            T.fill(m, T.cast(-1e30, F32))
            for k in T.Pipelined(T.ceildiv(lens[b], block), num_stages=2):
                T.copy(K[b, k * block : (k + 1) * block, :], k8)
                T.copy(ks[b, k * block : (k + 1) * block], sc)
                for i, j in T.Parallel(block, dim):
                    k_s[i, j] = T.cast(k8[i, j], F32) * sc[i]
                T.gemm(q, k_s, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.if_then_else(k * block + j < lens[b], s[i, j], -T.infinity(F32))
                T.copy(m, m_old)
                T.reduce_max(s, m, dim=1, clear=False)
                for i in T.Parallel(heads):
                    corr[i] = T.exp2((m_old[i] - m[i]) * scale)
                for i, j in T.Parallel(heads, block):
                    s[i, j] = T.exp2((s[i, j] - m[i]) * scale)
                T.reduce_sum(s, row, dim=1)
                for i in T.Parallel(heads):
                    l[i] = l[i] * corr[i] + row[i]
                T.copy(s, p)
                for i, j in T.Parallel(heads, dim):
                    o[i, j] *= corr[i]
                T.gemm(p, k_s, o)
            for i, j in T.Parallel(heads, dim):
                o[i, j] /= l[i]
            T.copy(o, O[b, :, :])

    return main


def fp8_kv_decode_reference(q, k, ks, lens):
    q, k, ks = wide(q, k, ks)
    out = np.zeros(q.shape)
    for b, n in enumerate(lens):
        kv = k[b, :n] * ks[b, :n, None]
        e = np.exp(q[b] @ kv.T * q.shape[2] ** -0.5)
        out[b] = e / e.sum(1, keepdims=True) @ kv
    return out


@tilelang.jit
def penalties(logits, tokens, frequency: T.float32, presence: T.float32, repetition: T.float32 = 1.0):
    """Counts of each row's tokens in shared memory, then all three penalties in place."""
    rows, n = T.dynamic("rows, n")
    V = T.const("V")
    logits: T.Tensor((rows, V), F32)
    tokens: T.Tensor((rows, n), I32)
    with T.Kernel(rows, threads=128) as r:
        count = T.alloc_shared((V,), I32)
        T.fill(count, 0)
        for i in T.Parallel(n):
            if tokens[r, i] >= 0:
                T.atomic_add(count[tokens[r, i]], 1)
        for v in T.Parallel(V):
            if count[v] > 0:
                x = logits[r, v] - frequency * T.cast(count[v], F32) - presence
                logits[r, v] = T.if_then_else(x > 0, x / repetition, x * repetition)


def penalties_reference(logits, tokens, frequency, presence, repetition):
    (logits,) = wide(logits)
    for row, seen in zip(logits, tokens):
        count = np.bincount(seen[seen >= 0], minlength=len(row))
        x = row - np.float32(frequency) * count - presence
        row[:] = np.where(count > 0, np.where(x > 0, x / repetition, x * repetition), row)
    return logits


PAGED = dict(batch=3, heads=8, heads_kv=2, dim=64, page=32, most=5, splits=3)
HALF = Bound(F16, via=((F16, 1.0),))
BRAIN = Bound(BF16, via=((BF16, 1.0),))
PROGRAMS = [
    Program(
        "paged_decode",
        make_paged_decode(8, 2, 64, 32, 3),
        dict(threads=128, stages=2),
        paged_inputs(**PAGED),
        paged_reference,
        HALF,
    ),
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
        "w4a16",
        w4a16,
        dict(M=40, N=72, K=128),
        drawn(uniform((40, 128), F16), integers((72, 64), 0, 256, "uint8"), uniform((72, 2), F16, 0.1, 0.2)),
        w4a16_reference,
        Bound(F16, 128, 200.0, via=((F16, 16.0),)),
    ),
    Program(
        "int8_scaled_mm",
        int8_scaled_mm,
        dict(N=72, K=128),
        drawn(
            integers((70, 128), -128, 128, "int8"),
            integers((72, 128), -128, 128, "int8"),
            uniform((70, 1), low=0.001, high=0.01),
            uniform((72, 1), low=0.001, high=0.01),
        ),
        lambda a, b, sa, sb: a.astype(np.int64) @ b.astype(np.int64).T * wide(sa)[0] * wide(sb)[0].T,
        Bound(BF16),
    ),
    Program(
        "mla_two_groups",
        mla_two_groups,
        dict(heads=64, dim=128, topk=96),
        drawn(uniform((2, 64, 128), BF16), uniform((150, 128), BF16), integers((2, 96), 0, 150)),
        gathered_reference,
        BRAIN,
        absent={"cpu": "mbarriers are Hopper's", "sm_80": "mbarriers are Hopper's"},
    ),
    Program("top_p_sample", top_p_sample, dict(V=128), top_p_inputs, top_p_sample_reference, (EXACT, Bound(F32, 128, 1.0))),
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
    Program(
        "masked_silu_quant",
        masked_silu_quant,
        dict(E=3, M=5, H=128),
        drawn(uniform((3, 5, 256), BF16, -3, 3), np.array([5, 0, 2], np.int32)),
        masked_silu_quant_reference,
        (Bound(FP8, via=((FP8, 0.002),)), Bound(F32, ulps=16)),
    ),
    Program(
        "fp8_kv_decode",
        fp8_kv_decode,
        dict(heads=16, dim=64),
        drawn(
            uniform((2, 16, 64), BF16),
            uniform((2, 150, 64), FP8),
            uniform((2, 150), low=0.5, high=1),
            np.array([150, 33], np.int32),
        ),
        fp8_kv_decode_reference,
        BRAIN,
    ),
    Program(
        "penalties",
        penalties,
        dict(V=200),
        drawn(uniform((3, 200), low=-4, high=4), integers((3, 50), -1, 200), 0.3, 0.2, 1.25),
        penalties_reference,
        Bound(F32, 8, 16.0),
        changed=(0,),
    ),
]
