"""The kernels of mla_decode: all heads attend to one latent vector per key, which is key and value at once.

mla_attention: a block computes 64 heads of one part of the work (mla_plan.py). Its output of 64 x dim_v floats does not fit one warp
group, so two warp groups hold half of the columns each. The scores of a tile of 64 keys are computed by one group, which passes the
weights to the other through shared memory: group 0 takes the even tiles, group 1 the odd ones. While one computes its softmax, the
tensor cores multiply for the other. The maximum of the scores passes from tile to tile, and so between the groups.

The third group loads. A latent vector lies in shared memory as two halves of dim_v and its rotary part. Each of them is loaded again
as soon as the group that reads it last is done. Weights take the place of the rotary part, which only the scores need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from .form import LOG2E
from .kernels import LN2

ROWS = KEYS = 64  # heads and keys of a tile
PAIR = 2 * KEYS  # keys of an even and an odd tile: the unit in which work is divided
LOWEST = -1e30  # the first maximum; finite, so that rows without keys do not compute inf - inf


class MlaForm(NamedTuple):
    """What a kernel is compiled for. heads: rows, of all queries of a sequence. page: keys of a page, None without a table.
    parts: of the work. kv_dtype: of the cache. queries: of a sequence. split: whether sequences may be divided."""

    heads: int
    queries: int
    dim_v: int
    rope: int
    page: int | None
    dtype: str
    kv_dtype: str
    parts: int
    split: bool


@T.macro
def span(Parts, Lengths, p, s):
    """The keys of sequence s, its pairs of tiles, and the range of them that belongs to part p."""
    length = Lengths[s]
    pairs = T.max(1, T.ceildiv(length, PAIR))
    first = T.if_then_else(s == Parts[p, 0], Parts[p, 1], 0)
    last = T.if_then_else(s == Parts[p + 1, 0], Parts[p + 1, 1], pairs)
    return length, pairs, first, last


@T.macro
def load(source, tile, g, shared, part, phase):
    """Load a part of the keys of stage g as soon as it is free. Threads convert float8."""
    full, free = shared[7:9]
    T.mbarrier_wait_parity(free[3 * g + part], phase)
    if source.buffer.dtype == tile.dtype:
        T.tma_copy(source, tile[g, :, :], barrier=full[3 * g + part])
    else:
        T.copy(source, tile[g, :, :])
        T.fence_proxy_async()
    T.mbarrier_arrive(full[3 * g + part])


@T.macro
def mask(f, S, key, length, h):
    """Set the scores of keys that a row does not see to -inf. Query i of a sequence stands at position length - queries + i."""
    for i, j in T.Parallel(ROWS, KEYS):
        sees = key + j < (length if f.queries == 1 else length - f.queries + 1 + (h + i) // (f.heads // f.queries))
        S[i, j] = T.if_then_else(sees, S[i, j], -T.infinity("float32"))


@T.macro
def raise_top(S, state, c):
    """Raise `top` to the maximum of the scores. factor: what sums so far are multiplied by."""
    top, before, factor, _, _ = state
    T.copy(top, before)
    T.reduce_max(S, top, dim=1, clear=False)
    for i in T.Parallel(ROWS):
        factor[i] = T.exp2((before[i] - top[i]) * c)


@T.macro
def weigh(S, P, state, c):
    """P = exp2(c (S - top)); its sums are added to `total`."""
    top, _, factor, total, part = state
    for i, j in T.Parallel(ROWS, KEYS):
        S[i, j] = T.exp2(S[i, j] * c - top[i] * c)
    T.reduce_sum(S, part, dim=1)
    for i in T.Parallel(ROWS):
        total[i] = total[i] * factor[i] + part[i]
    T.copy(S, P)


@T.macro
def follow(Tops, g, state, c):
    """Take over the maximum of the other group's tile."""
    top, before, factor, total, _ = state
    T.copy(top, before)
    T.copy(Tops[g, :], top)
    for i in T.Parallel(ROWS):
        factor[i] = T.exp2((before[i] - top[i]) * c)
        total[i] *= factor[i]


@T.macro
def rescale(acc, factor):
    for i, j in T.Parallel(*acc.shape):
        acc[i, j] *= factor[i]


@T.macro
def store(f, acc, state, scales, whole, results, s, p, h, column):
    """Divide by the sums (times the unit of the cache), and store to (O, LSE) where the part holds the whole sequence, else to (Means, Sums)."""
    top, _, factor, total, _ = state
    O, LSE, Means, Sums = results
    c, unit = scales
    for i in T.Parallel(ROWS):
        factor[i] = T.if_then_else(total[i] > 0, unit / total[i], 0.0)
    rescale(acc, factor)
    for i in T.Parallel(ROWS):
        total[i] = T.if_then_else(total[i] > 0, (T.log2(total[i]) + top[i] * c) * LN2, -T.infinity("float32"))
    if whole:
        for i, j in T.Parallel(*acc.shape):
            if h + i < f.heads:
                O[s, h + i, column + j] = acc[i, j]
        if column == 0:
            for i in T.Parallel(ROWS):
                if h + i < f.heads:
                    LSE[s, h + i] = total[i]
    elif f.split:
        for i, j in T.Parallel(*acc.shape):
            if h + i < f.heads:
                Means[s + p, h + i, column + j] = acc[i, j]
        if column == 0:
            for i in T.Parallel(ROWS):
                if h + i < f.heads:
                    Sums[s + p, h + i] = total[i]


@T.macro
def consume(f, g, shared, Parts, Lengths, scales, h, p, results):
    """Warp group g: the scores of its tiles, and its half of the columns of the result."""
    Qs, Qp, Left, Right, Rope, Tops, Totals, full, free, ready, q_full, q_free = shared
    half, c = f.dim_v // 2, scales[0]
    with T.ws(g):
        T.inc_max_nreg(240 if f.kv_dtype == f.dtype else 208)
        S = T.alloc_fragment((ROWS, KEYS), "float32")
        P = T.alloc_fragment((ROWS, KEYS), f.dtype)
        acc = T.alloc_fragment((ROWS, half), "float32")
        state = [T.alloc_fragment((ROWS,), "float32") for _ in (0, 1, 2, 3, 4)]  # top, before, factor, total, part
        V = (Left, Right)[g]
        n, m = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)  # pairs and sequences so far
        for s in T.serial(Parts[p, 0], Parts[p + 1, 0] + T.cast(Parts[p + 1, 1] > 0, "int32")):
            length, pairs, first, last = span(Parts, Lengths, p, s)
            T.clear(acc)
            T.fill(state[0], LOWEST)
            T.clear(state[3])
            T.mbarrier_wait_parity(q_full[0], m % 2)
            for i in T.serial(first, last):
                T.mbarrier_wait_parity(full[3 * g], n % 2)
                T.wgmma_gemm(Qs[:, 0:half], Left[g, :, :], S, transpose_B=True, clear_accum=True)
                T.mbarrier_wait_parity(full[3 * g + 1], n % 2)
                T.wgmma_gemm(Qs[:, half:f.dim_v], Right[g, :, :], S, transpose_B=True)
                T.mbarrier_wait_parity(full[3 * g + 2], n % 2)
                T.wgmma_gemm(Qp, Rope[g, :, :], S, transpose_B=True)
                T.wait_wgmma(0)
                mask(f, S, (2 * i + g) * KEYS, length, h)
                if g == 1:  # the even tile's weights, multiplied during the softmax of the odd one
                    T.mbarrier_wait_parity(ready[0], n % 2)
                    follow(Tops, 0, state, c)
                    rescale(acc, state[2])
                    T.wgmma_gemm(Rope[0, :, :], V[0, :, :], acc)
                raise_top(S, state, c)
                weigh(S, P, state, c)
                T.copy(state[0], Tops[g, :])
                T.copy(P, Rope[g, :, :])
                T.fence_proxy_async()
                T.mbarrier_arrive(ready[g])
                if g == 1:
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[1])
                    T.mbarrier_arrive(free[2])
                rescale(acc, state[2])
                T.wgmma_gemm(P, V[g, :, :], acc)
                if g == 0:
                    T.mbarrier_wait_parity(ready[1], n % 2)
                    T.wait_wgmma(0)
                    T.mbarrier_arrive(free[0])
                    follow(Tops, 1, state, c)
                    rescale(acc, state[2])
                    T.wgmma_gemm(Rope[1, :, :], V[1, :, :], acc)
                T.wait_wgmma(0)
                T.mbarrier_arrive(free[3 + g])
                if g == 0:
                    T.mbarrier_arrive(free[5])
                n = n + 1
            T.mbarrier_arrive(q_free[0])
            m = m + 1
            T.copy(state[3], Totals[g, :])
            T.sync_threads(1, 256)
            for i in T.Parallel(ROWS):
                state[3][i] = Totals[0, i] + Totals[1, i]
            T.sync_threads(1, 256)
            store(f, acc, state, scales, last - first == pairs, results, s, p, h, g * half)


@T.macro
def load_tile(f, g, shared, KV, Table, s, tile, length, phase):
    """Load a tile of keys to stage g, for a tile behind the last key the last tile."""
    half, dim = f.dim_v // 2, f.dim_v + f.rope
    k = T.max(T.min(tile * KEYS, length - 1), 0) // KEYS * KEYS
    at = s if f.page is None else T.if_then_else(length > 0, Table[s, k // f.page], 0)
    r = k if f.page is None else k % f.page
    load(KV[at, r:r + KEYS, 0:half], shared[2], g, shared, 0, phase)
    load(KV[at, r:r + KEYS, half:f.dim_v], shared[3], g, shared, 1, phase)
    load(KV[at, r:r + KEYS, f.dim_v:dim], shared[4], g, shared, 2, phase)


@T.macro
def produce(f, shared, Q, KV, Table, Parts, Lengths, h, p):
    """Load queries and keys of all sequences of a part."""
    Qs, Qp, q_full, q_free = shared[0], shared[1], shared[-2], shared[-1]
    n, m = T.alloc_var("int32", init=0), T.alloc_var("int32", init=0)
    for s in T.serial(Parts[p, 0], Parts[p + 1, 0] + T.cast(Parts[p + 1, 1] > 0, "int32")):
        length, _, first, last = span(Parts, Lengths, p, s)
        T.mbarrier_wait_parity(q_free[0], (m + 1) % 2)
        T.tma_copy(Q[s, h:h + ROWS, 0:f.dim_v], Qs, barrier=q_full[0])
        T.tma_copy(Q[s, h:h + ROWS, f.dim_v:f.dim_v + f.rope], Qp, barrier=q_full[0])
        T.mbarrier_arrive(q_full[0])
        m = m + 1
        for i in T.serial(first, last):
            load_tile(f, 0, shared, KV, Table, s, 2 * i, length, (n + 1) % 2)
            load_tile(f, 1, shared, KV, Table, s, 2 * i + 1, length, (n + 1) % 2)
            n = n + 1


@T.macro
def merge(f, Means, Sums, Spans, O, LSE, h, s):
    """O[s, h, :] from the means of all parts that sequence s is divided into, weighted by their sums."""
    first, count = Spans[s, 0], Spans[s, 1] - Spans[s, 0] + 1
    if count > 1:
        logs = T.alloc_fragment((f.parts,), "float32")
        share = T.alloc_shared((f.parts,), "float32")
        top, total = T.alloc_fragment((1,), "float32"), T.alloc_fragment((1,), "float32")
        mean = T.alloc_fragment((f.dim_v,), "float32")
        for k in T.Parallel(f.parts):
            logs[k] = T.if_then_else(k < count, Sums[s + first + T.min(k, count - 1), h], -T.infinity("float32"))
        T.reduce_max(logs, top, dim=0)
        for k in T.Parallel(f.parts):
            logs[k] = T.if_then_else(top[0] > LOWEST, T.exp2((logs[k] - top[0]) / LN2), 0.0)
        T.reduce_sum(logs, total, dim=0)
        T.copy(logs, share)
        T.clear(mean)
        for k in T.serial(count):
            for j in T.Parallel(f.dim_v):
                mean[j] += share[k] * Means[s + first + k, h, j]
        for j in T.Parallel(f.dim_v):
            O[s, h, j] = T.if_then_else(total[0] > 0, mean[j] / total[0], 0.0)
        for j in T.Parallel(1):
            LSE[s, h] = top[j] + T.log2(total[j]) * LN2


def mla_attention(f: MlaForm) -> Any:
    """The kernel for wgmma and TMA, with the parameters (Q, KV, Table, Lengths, Parts, Spans, scale, unit, Means, Sums, O, LSE).

    Q (batch, heads, dim); KV (pages, rows, dim) with Table (batch, width), or without a table KV (batch, rows, dim); Lengths (batch,);
    Parts, Spans: of the plan. Means (batch + parts, heads, dim_v) and Sums (batch + parts, heads), float32, are workspace.
    """
    half, dim = f.dim_v // 2, f.dim_v + f.rope
    batch, pages, width, rows, slots = T.dynamic("batch, pages, width, rows, slots")

    @T.prim_func
    def mla_decode(Q: T.Tensor((batch, f.heads, dim), f.dtype), KV: T.Tensor((pages, f.page or rows, dim), f.kv_dtype),
                   Table: T.Tensor((batch, width), "int32"), Lengths: T.Tensor((batch,), "int32"),
                   scale: T.float32, unit: T.float32,
                   Parts: T.Tensor((f.parts + 1, 2), "int32"), Spans: T.Tensor((batch, 2), "int32"),
                   Means: T.Tensor((slots, f.heads, f.dim_v), "float32"), Sums: T.Tensor((slots, f.heads), "float32"),
                   O: T.Tensor((batch, f.heads, f.dim_v), f.dtype), LSE: T.Tensor((batch, f.heads), "float32")):
        with T.Kernel(T.ceildiv(f.heads, ROWS), f.parts, threads=384) as (hb, p):
            Qs = T.alloc_shared((ROWS, f.dim_v), f.dtype)
            Qp = T.alloc_shared((ROWS, f.rope), f.dtype)
            Left = T.alloc_shared((2, KEYS, half), f.dtype)
            Right = T.alloc_shared((2, KEYS, half), f.dtype)
            Rope = T.alloc_shared((2, KEYS, f.rope), f.dtype)
            Tops, Totals = T.alloc_shared((2, ROWS), "float32"), T.alloc_shared((2, ROWS), "float32")
            full, free, ready = T.alloc_barrier([128] * 6), T.alloc_barrier([128] * 6), T.alloc_barrier([128] * 2)
            q_full, q_free = T.alloc_barrier([128]), T.alloc_barrier([256])
            shared = (Qs, Qp, Left, Right, Rope, Tops, Totals, full, free, ready, q_full, q_free)
            with T.ws(2):
                T.dec_max_nreg(24 if f.kv_dtype == f.dtype else 88)
                produce(f, shared, Q, KV, Table, Parts, Lengths, hb * ROWS, p)
            consume(f, 0, shared, Parts, Lengths, (scale * LOG2E, unit), hb * ROWS, p, (O, LSE, Means, Sums))
            consume(f, 1, shared, Parts, Lengths, (scale * LOG2E, unit), hb * ROWS, p, (O, LSE, Means, Sums))
        if f.split:
            with T.Kernel(f.heads, batch, threads=128) as (h, s):
                merge(f, Means, Sums, Spans, O, LSE, h, s)

    return mla_decode


def plain_attention(f: MlaForm) -> Any:
    """The kernel for all other machines and sizes: one block computes 64 heads over all keys. Parameters as mla_attention."""
    dim = f.dim_v + f.rope
    batch, pages, width, rows = T.dynamic("batch, pages, width, rows")

    @T.prim_func
    def mla_decode(Q: T.Tensor((batch, f.heads, dim), f.dtype), KV: T.Tensor((pages, f.page or rows, dim), f.kv_dtype),
                   Table: T.Tensor((batch, width), "int32"), Lengths: T.Tensor((batch,), "int32"),
                   scale: T.float32, unit: T.float32,
                   O: T.Tensor((batch, f.heads, f.dim_v), f.dtype), LSE: T.Tensor((batch, f.heads), "float32")):
        with T.Kernel(T.ceildiv(f.heads, ROWS), batch, threads=256) as (hb, s):
            Qs, KVs = T.alloc_shared((ROWS, dim), f.dtype), T.alloc_shared((KEYS, dim), f.dtype)
            S, P = T.alloc_fragment((ROWS, KEYS), "float32"), T.alloc_shared((ROWS, KEYS), f.dtype)
            acc = T.alloc_fragment((ROWS, f.dim_v), "float32")
            state = [T.alloc_fragment((ROWS,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[s, hb * ROWS:(hb + 1) * ROWS, :], Qs)
            T.clear(acc)
            T.fill(state[0], LOWEST)
            T.clear(state[3])
            for i in T.Pipelined(T.ceildiv(Lengths[s], KEYS), num_stages=1):
                k = i * KEYS
                T.copy(KV[s if f.page is None else Table[s, k // f.page], k if f.page is None else k % f.page, 0], KVs)
                T.gemm(Qs, KVs, S, transpose_B=True, clear_accum=True)
                mask(f, S, k, Lengths[s], hb * ROWS)
                raise_top(S, state, scale * LOG2E)
                weigh(S, P, state, scale * LOG2E)
                rescale(acc, state[2])
                T.gemm(P, KVs[:, 0:f.dim_v], acc)
            store(f._replace(split=False), acc, state, (scale * LOG2E, unit), True, (O, LSE, None, None), s, 0, hb * ROWS, 0)

    return mla_decode


__all__ = ["KEYS", "PAIR", "ROWS", "MlaForm", "mla_attention", "plain_attention"]
