"""The main loop of flash_decode for caches of float8 and many rows: warp groups of 64 rows each, and one that converts.

S = Q K^T is multiplied in float8: queries are sums of float8, each of which K is multiplied by as it lies. P V is multiplied in
float16: the last warp group converts V, once for all rows of a block. It also starts the copies, so that the others wait for
nothing but tiles. P V of a tile is multiplied under the softmax of the next one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from .kernels import LAG, hide_keys, ln2, reset

HIGH = 128.0  # the least that the largest query of a tile is in sums of float8: its other bits are then no subnormal numbers


def padded(dim: int) -> int:
    """Columns of a tile of float8, of which those behind a head's are zeros: rows of whole 64 or 128 bytes, so that a request
    of TMA is no shorter."""
    return -(-dim // 128) * 128 if dim % 128 > 64 else -(-dim // 64) * 64


@T.macro
def finish(acc, total, state, c, unit, keys):
    """acc becomes the mean of V, of which an element counts `unit`; `total` the natural logarithm of the sum. state: (top, a
    fragment like it). keys: as for `weigh`."""
    top, factor = state
    for i in T.Parallel(*top.shape):
        factor[i] = T.if_then_else(total[i] == 0, 0.0, unit * T.fast_rcp(total[i]))
    for i, j in T.Parallel(*acc.shape):
        acc[i, j] *= factor[i if keys else j]
    for i in T.Parallel(*top.shape):
        total[i] = T.if_then_else(total[i] == 0, -T.infinity(total.dtype), (T.log2(total[i]) + top[i] * c) * ln2(total))


@T.macro
def put_term(x, tile, i, j):
    """Store a float32 to tile[i, j]; what its rounding leaves."""
    term = T.cast(x, tile.dtype)
    tile[i, j] = term
    return x - T.cast(term, "float32")


def put_terms(x: Any, tiles: list[Any], i: Any, j: Any) -> None:
    """Store a float32 as the sum of element (i, j) of tiles."""
    for tile in tiles:
        x = put_term(x, tile, i, j)


@T.macro
def load_terms(f, Qs, Q, b, h, row, factor):
    """Load queries as sums of float8, as load_queries does it: each is what is left of those before it."""
    for i, j in T.Parallel(*Qs[0].shape):
        r = row + i
        q = T.if_then_else(r < f.used, Q[b, r // f.group, h * f.group + r % f.group, j], T.cast(0, f.dtype))
        put_terms(T.cast(q, "float32") * (factor * HIGH), Qs, i, j)


def score_terms(Qs: list[Any], Ks: Any, S: Any) -> None:
    """Issue S = Q Ks^T for the sum Q of tiles."""
    for n, Q in enumerate(Qs):
        T.wgmma_gemm(Q, Ks, S, transpose_B=True, clear_accum=n == 0)


# Of blocks with one group that multiplies, and with two: registers of its threads, of those that convert, and tiles of V.
MULTIPLY, SUPPLY, BUFFERS = (200, 216), (56, 72), (1, 2)


class Ring(NamedTuple):
    """Shared memory of a block: queries, stages of K and of V as they lie, V in float16; barriers: full and free of each."""

    Q: list[list[Any]]
    K: Any
    raw: Any
    V: Any
    k_full: Any
    k_free: Any
    raw_full: Any
    v_full: Any
    v_free: Any


@T.macro
def arrive(f, bars, n):
    """One lane of each warp arrives."""
    if T.get_thread_binding() % 32 == 0:
        T.mbarrier_arrive(bars[n])


def copy_ahead(rows: Any, tiles: Any, s: Any, barriers: Any) -> None:
    """`fetch` by TMA to stage s, whose barrier counts the bytes."""
    regions = rows if isinstance(rows, list) else [rows]
    each = tiles.shape[1] // len(regions)
    for n, region in enumerate(regions):
        T.tma_copy(region, tiles[s, n * each:(n + 1) * each, :], barrier=barriers[s])


@T.macro
def load_values(f, tiles, ring, k, key):
    """Start the copies of V of tile k."""
    s = (k - tiles.begin) % f.tile.stages
    copy_ahead(tiles.values(key), ring.raw, s, ring.raw_full)
    T.mbarrier_arrive(ring.raw_full[s])


@T.macro
def load_keys(f, tiles, ring, k, key):
    """Start the copies of K of tile k as soon as its stage is free."""
    s = (k - tiles.begin) % f.tile.stages
    T.mbarrier_wait_parity(ring.k_free[s], ((k - tiles.begin) // f.tile.stages + 1) % 2)
    copy_ahead(tiles.keys(key), ring.K, s, ring.k_full)
    T.mbarrier_arrive(ring.k_full[s])


def chunks_of_eight(shape: tuple[int, int]) -> Any:
    """The layout in which 128 threads hold eight columns each: of one row as many as there are, so that neither loads of float8
    nor stores of float16 meet in a bank."""
    each = shape[1] // 8
    return T.Fragment(shape, forward_fn=lambda i, j: ((i * each + j // 8) % 128, (i * each + j // 8) // 128 * 8 + j % 8))


@T.macro
def supply(f, tiles, ring, groups):
    """The last warp group: start the copies of all tiles, and convert V. It waits in the order in which the others arrive: they
    free the keys of a step early, and the tile of V, which is of the step before, at its end. Where heads have lines of L2 in
    common, copies of keys wait for that too: blocks that run ahead of their neighbours would fetch these lines again."""
    with T.ws(groups):
        T.dec_max_nreg(SUPPLY[groups - 1])
        stages, buffers, whole_lines = f.tile.stages, ring.V.shape[0], f.sizes.dim % 64 == f.sizes.dim_v % 64 == 0
        for k in T.serial(tiles.begin, T.min(tiles.end, tiles.begin + stages)):
            key = tiles.place(k)
            load_values(f, tiles, ring, k, key)
            load_keys(f, tiles, ring, k, key)
        held = T.alloc_fragment(ring.raw.shape[1:], f.kv_dtype)
        T.annotate_layout({held: chunks_of_eight(held.shape)})
        for k in T.serial(tiles.begin, tiles.end):
            n = k - tiles.begin
            key = tiles.place(k + stages)
            T.mbarrier_wait_parity(ring.raw_full[n % stages], n // stages % 2)
            T.copy(ring.raw[n % stages, :, :], held)
            T.sync_threads(1, 128)
            if k + stages < tiles.end:
                load_values(f, tiles, ring, k + stages, key)
                if whole_lines:
                    load_keys(f, tiles, ring, k + stages, key)
            T.mbarrier_wait_parity(ring.v_free[n % buffers], ((n + 1) // buffers + 1) % 2)
            T.copy(held, ring.V[n % buffers, :, :])
            T.fence_proxy_async()
            T.mbarrier_arrive(ring.v_full[n % buffers])
            if not whole_lines:
                if k + stages < tiles.end:
                    load_keys(f, tiles, ring, k + stages, key)


@T.macro
def score_tile(f, ring, Qs, n, S):
    """Issue the scores of the n-th tile, when it has come."""
    T.mbarrier_wait_parity(ring.k_full[n % f.tile.stages], n // f.tile.stages % 2)
    score_terms(Qs, ring.K[n % f.tile.stages, :, 0:f.dim], S)


@T.macro
def add_tile(f, ring, n, P, acc):
    """Issue acc += P V of the n-th tile, when it has come."""
    T.mbarrier_wait_parity(ring.v_full[n % ring.V.shape[0]], n // ring.V.shape[0] % 2)
    T.wgmma_gemm(P, ring.V[n % ring.V.shape[0], :, 0:f.dim_v], acc)


@T.macro
def attend_wide(f, ring, Qs, scales, tiles, hides):
    """(weighted means, logarithms of sums) of the 64 rows of a warp group. scales: the factor of scores, and what an element of
    V counts."""
    (scaled, unit), buffers = scales, ring.V.shape[0]
    S, P = T.alloc_fragment((64, f.tile.keys), f.accum), T.alloc_fragment((64, f.tile.keys), f.math)
    acc = T.alloc_fragment((64, f.dim_v), f.accum)
    top, before, factor, total, more = [T.alloc_fragment((64,), f.accum) for _ in range(5)]
    c = scaled * (1.0 / HIGH)
    reset(acc, top, total, c)
    for k in T.serial(tiles.begin, tiles.end):
        n = k - tiles.begin
        before_last = (n + buffers - 1) % buffers  # in the first step, a tile that nothing has used
        score_tile(f, ring, Qs, n, S)
        if n > 0:
            add_tile(f, ring, n - 1, P, acc)
            T.wait_wgmma(1)
        else:
            T.wait_wgmma(0)
        arrive(f, ring.k_free, n % f.tile.stages)
        if hides(k):
            hide_keys(S, lambda i, j, k=k: tiles.visible(k, k, i, j))
        T.copy(top, before)
        T.reduce_max(S, top, dim=1)
        for i in T.Parallel(64):
            top[i] = T.if_then_else((top[i] - before[i]) * c > LAG, top[i], before[i])
        for i in T.Parallel(64):
            factor[i] = T.exp2((before[i] - top[i]) * c)
        for i, j in T.Parallel(*S.shape):
            S[i, j] = T.exp2(S[i, j] * c - top[i] * c)
        T.reduce_sum(S, more, dim=1)
        for i in T.Parallel(64):
            total[i] = total[i] * factor[i] + more[i]
        T.wait_wgmma(0)
        arrive(f, ring.v_free, before_last)
        for i, j in T.Parallel(*acc.shape):
            acc[i, j] *= factor[i]
        T.copy(S, P)
    if tiles.end > tiles.begin:
        add_tile(f, ring, tiles.end - tiles.begin - 1, P, acc)
        T.wait_wgmma(0)
    finish(acc, total, (top, factor), c, unit, 1)
    return acc, total


@T.macro
def multiply(f, ring, g, load, scales, tiles, hides, put):
    """Warp group g: the results of its 64 rows."""
    with T.ws(g):
        T.inc_max_nreg(MULTIPLY[f.tile.rows // 64 - 1])
        size = load(ring.Q[g], g * 64)
        T.fence_proxy_async()
        T.sync_threads()
        acc, total = attend_wide(f, ring, ring.Q[g], (scales[0] * size, scales[1]), tiles, hides)
        put(acc, total, g * 64)


@T.macro
def attend_groups(f, load, scales, tiles, hides, put):
    """The block of a tile of queries. load: loads 64 of them as sums, and gives what these are divided by. tiles, hides: give
    for the first row of a group its tiles of keys, and whether one has a key that a row does not see. put: stores results.
    scales: as attend_wide takes them."""
    groups, stages, buffers = f.tile.rows // 64, f.tile.stages, BUFFERS[f.tile.rows // 64 - 1]
    K, raw = [T.alloc_shared((stages, f.tile.keys, padded(n)), f.kv_dtype) for n in (f.dim, f.dim_v)]
    V = T.alloc_shared((buffers, f.tile.keys, padded(f.dim_v)), f.math)
    Qs = [[T.alloc_shared((64, f.dim), f.kv_dtype) for _ in range(f.terms)] for _ in range(groups)]
    k_full, raw_full, v_full = [T.alloc_barrier([128] * n) for n in (stages, stages, buffers)]
    k_free, v_free = [T.alloc_barrier([4 * groups] * n) for n in (stages, buffers)]
    ring = Ring(Qs, K, raw, V, k_full, k_free, raw_full, v_full, v_free)
    supply(f, tiles(0), ring, groups)
    _ = [multiply(f, ring, g, load, scales, tiles(g * 64), hides(g * 64), put) for g in range(groups)]
