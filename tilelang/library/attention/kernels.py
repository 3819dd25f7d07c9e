"""The online softmax, the main loop of attention, and the kernel in which one block computes one tile of queries.

A tile of scores S = Q K^T never leaves the registers. For each row, `top` is the largest score so far, or at most LAG / c below
it (lazy rescaling); `total` is the sum of 2^(c s - c top), and `acc` is the sum of these weights times V. Here c = scale
log2(e), so that a weight takes one multiply-add and one exp2. When `top` rises, both sums are multiplied by 2^(c old - c new).

Keys that a row does not see have the score -inf, and the weight 2^-inf = 0. `top` starts at the lowest power of two whose
product with c is finite; no visible score is lower. A row that sees no key ends with 0 and the logarithm -inf. NaN is
propagated: no comparison hides it.

Without a mask, tiles of keys are processed from the last one to the first. Only the last tile can be ragged, and it is
processed before the steady loop, whose iterations then need no mask. Under a causal mask that order was slower.

Compilers contract a * c - b * c to an FMA, in which only the second product is rounded. So where `top` stays, the sums are
multiplied by 2^((old - new) c), which is 1 for any c and `top`, and the product of c and the first `top` is exact.

Kernels of flash_attention in which blocks divide the keys of a tile (split-KV), used where tiles alone fill no whole waves.

A split of a tile of queries stores its weighted mean and the logarithm of its sum in a workspace; a second launch merges the
splits. There are two work partitions:

- with a mask and few tiles, each tile is divided into the same number of equal splits, and all blocks run at once, so that the
  longest tile's splits decide the time of a call;
- without a mask, tiles have equal length: whole waves compute one tile per block. The tiles of keys that the remaining tiles of
  queries see are laid end to end, and each block takes an equal number of them: a range in one tile of queries, or in two
  neighbours (stream-K).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tilelang.language as T

from tilelang.ir import Const, const

from .dropout import LEVELS, Dropout, alloc_decisions, draw, stays
from .form import LOG2E, AttentionForm
from .problem import Mask

LN2 = 0.6931471805599453
LAG = 8.0  # `top` follows the scores when weights would exceed 2^8: far below the largest float16


class Extras(NamedTuple):
    """What attention may have beside the softmax.

    sink: exponent of 2 that counts in the sum of a row's weights, with no value; None: none. dropout: None where nothing is
    dropped; its corners are by (index, place), as KeyTiles.visible takes them. keep: the fraction of weights that are kept.
    """

    sink: Any = None
    dropout: Dropout | None = None
    keep: float = 1.0


NOTHING = Extras()


class KeyTiles(NamedTuple):
    """The tiles of keys that a block processes, one in each iteration of the main loop. It states how attention divides its
    work.

    begin, end: range of the loop's index. place: maps an index to what the other functions take: the tile's first key, or the
    index itself. keys, values: map a place to the tile's rows of K and V, a region or a list of regions. visible: maps (index,
    place, i, j) to whether row i of the queries sees key j of the tile. partly: maps (index, place) to whether some row does
    not see some key, which each tile tests then; None: each element does.
    """

    begin: Any
    end: Any
    place: Callable[[Any], Any]
    keys: Callable[[Any], Any]
    values: Callable[[Any], Any]
    visible: Callable[[Any, Any, Any, Any], Any]
    partly: Callable[[Any, Any], Any] | None = None


def fetch(rows: Any, tile: Any) -> None:
    """Copy a region, or several of one size one after another, to a tile."""
    regions = rows if isinstance(rows, list) else [rows]
    each = tile.shape[0] // len(regions)
    for n, region in enumerate(regions):
        T.copy(region, tile if len(regions) == 1 else tile[n * each:(n + 1) * each, :])


def lowest(c: Any) -> Any:
    """The first `top`: -2^127 over the power of two in c, or over 1 where c is less than that. c: a float or a float32
    expression."""
    if isinstance(c, (int, float, Const)):
        c = c.value if isinstance(c, Const) else c
        return -2.0**(128 - math.frexp(np.float32(max(c, 1.0)))[1])
    exponent = T.shift_right(T.reinterpret(T.max(c, 1.0), "int32"), 23) - 127
    return -T.reinterpret(T.shift_left(254 - exponent, 23), "float32")


@T.macro
def power_of_two(x):
    """(p, 1 / p): the power of two in a float32 that is not negative, both finite."""
    bits = T.max(T.min(T.shift_right(T.reinterpret(x, "int32"), 23), 253), 1)
    return T.reinterpret(T.shift_left(bits, 23), "float32"), T.reinterpret(T.shift_left(254 - bits, 23), "float32")


def ln2(like: Any) -> Any:
    """The factor of logarithms in base 2, in the type of a tile."""
    return const(LN2, like.dtype)


@T.macro
def reset(acc, top, total, c):
    """Set the state to: no key seen yet."""
    T.clear(acc)
    T.clear(total)
    T.fill(top, lowest(c))


@T.macro
def absorb(S, P, acc, rows, c, kept=None, grows=None):
    """Add a tile of scores S: the weights go to P (16 bits) and `total`, and the rescaling factor of each row is applied to
    `acc`.

    rows: (top, before, factor, total, part), float32 fragments with one element per row. kept: the decisions of dropout: which
    weights go to P too, not to `total` alone; None: all do. grows: (function that scores go through, which grows with them;
    function that clears the weights of hidden keys): the largest changed score is that of the largest score. None: none.
    """
    top, before, factor, total, part = rows
    height, keys = S.shape
    T.copy(top, before)
    if grows is None:
        T.reduce_max(S, top, dim=1)
    else:
        largest = T.alloc_fragment((height,), S.dtype)
        T.reduce_max(S, largest, dim=1, clear=True)
        for i in T.Parallel(height):
            top[i] = grows[0](largest[i])
    for i in T.Parallel(height):
        top[i] = T.if_then_else((top[i] - before[i]) * c > LAG, top[i], before[i])
    for i in T.Parallel(height):
        factor[i] = T.exp2((before[i] - top[i]) * c)
    if grows is None:
        for i, j in T.Parallel(height, keys):
            S[i, j] = T.exp2(S[i, j] * c - top[i] * c)
    else:
        for i, j in T.Parallel(height, keys):
            S[i, j] = T.exp2(grows[0](S[i, j]) - top[i])
        grows[1](S)
    T.reduce_sum(S, part, dim=1)
    for i in T.Parallel(height):
        total[i] = total[i] * factor[i] + part[i]
    for i, j in T.Parallel(height, acc.shape[1]):
        acc[i, j] *= factor[i]
    if kept is not None:
        for i, j in T.Parallel(height, keys):
            S[i, j] = T.if_then_else(stays(kept, i, j), S[i, j], 0.0)
    T.copy(S, P)


@T.macro
def finish(acc, top, total, factor, c, extras=NOTHING):
    """Finish a tile: acc becomes the weighted mean of V, `total` the natural logarithm of the sum of exp(scores)."""
    rows, dim = acc.shape
    if extras.sink is not None:
        for i in T.Parallel(rows):
            top[i] = top[i] * c
        for i in T.Parallel(rows):
            factor[i] = T.max(top[i], extras.sink)
        for i in T.Parallel(rows):
            top[i] = T.exp2(top[i] - factor[i])
        for i in T.Parallel(rows):
            total[i] = total[i] * top[i] + T.exp2(extras.sink - factor[i])
        for i in T.Parallel(rows):
            top[i] *= T.fast_rcp(total[i] * extras.keep)
        for i, j in T.Parallel(rows, dim):
            acc[i, j] *= top[i]
        for i in T.Parallel(rows):
            total[i] = (T.log2(total[i]) + factor[i]) * ln2(total)
    else:
        divide(acc, top, total, factor, c, extras.keep)


@T.macro
def divide(acc, top, total, factor, c, keep=1.0):
    """`finish` without a sink. keep: the fraction of weights that dropout keeps."""
    rows, dim = acc.shape
    for i in T.Parallel(rows):
        # The sum of a row that sees a key is 1 or more.
        factor[i] = T.if_then_else(total[i] == 0, 0.0, T.fast_rcp(total[i] if keep == 1.0 else total[i] * keep))
    for i, j in T.Parallel(rows, dim):
        acc[i, j] *= factor[i]
    for i in T.Parallel(rows):
        total[i] = T.if_then_else(total[i] == 0, -T.infinity(total.dtype), (T.log2(total[i]) + top[i] * c) * ln2(total))


@T.macro
def working_set(f):
    """The tiles and fragments of a block.

    Shared memory holds tiles of Q, K and V, with f.stored columns. Registers hold the scores S (rows, keys) and `acc`
    (rows, dim_v) in f.accum, the weights P like S in f.math, and, with one element per row, `top`, `before`, `factor`, `total`
    and the sum of a tile.
    """
    rows, keys = f.tile.rows, f.tile.keys
    Qs = T.alloc_shared((rows, f.stored[0]), f.math)
    Ks = T.alloc_shared((keys, f.stored[0]), f.math)
    Vs = T.alloc_shared((keys, f.stored[1]), f.math)
    S = T.alloc_fragment((rows, keys), f.accum)
    P = T.alloc_fragment((rows, keys), f.math)
    acc = T.alloc_fragment((rows, f.dim_v), f.accum)
    top, before, factor, total, more = [T.alloc_fragment((rows,), f.accum) for _ in (0, 1, 2, 3, 4)]
    return Qs, Ks, Vs, S, P, acc, (top, before, factor, total, more)


def leading(tile: Any, columns: int) -> Any:
    """The first columns of a tile."""
    return tile if tile.shape[1] == columns else tile[:, 0:columns]


@T.macro
def hide_keys(S, visible, value=-math.inf):
    """Scores of keys that a row does not see become a value."""
    for i, j in T.Parallel(*S.shape):
        S[i, j] = T.if_then_else(visible(i, j), S[i, j], const(value, S.dtype))


@T.macro
def attend(f, work, load, c, tiles, extras=NOTHING):
    """The main loop: softmax(Q K^T) V of a tile of queries over `tiles` of keys (KeyTiles).

    f: AttentionForm or DecodeForm. work: working_set. load: copies the queries to their tile in shared memory. c:
    f.exponent_scale. extras: Extras. Returns (weighted means of V, logarithms of sums), fragments in float32.
    """
    Qs, Ks, Vs, S, P, acc, state = work
    top, before, factor, total, more = state
    Kept = None if extras.dropout is None else alloc_decisions(*S.shape)
    load(Qs)
    reset(acc, top, total, c)
    for k in T.Pipelined(tiles.begin, tiles.end, num_stages=f.tile.stages):
        key = tiles.place(k)
        if Kept is not None:
            draw(Kept, extras.dropout, *extras.dropout.corner(k, key))
        fetch(tiles.keys(key), Ks)
        T.gemm(leading(Qs, f.dim), leading(Ks, f.dim), S, transpose_B=True, clear_accum=True)
        if tiles.partly is None:
            hide_keys(S, lambda i, j, k=k, key=key: tiles.visible(k, key, i, j))
        else:
            if tiles.partly(k, key):
                hide_keys(S, lambda i, j, k=k, key=key: tiles.visible(k, key, i, j))
        fetch(tiles.values(key), Vs)
        absorb(S, P, acc, state, c, Kept)
        T.gemm(P, leading(Vs, f.dim_v), acc)
    finish(acc, top, total, factor, c, extras)
    return acc, total


def dense_attention(f: AttentionForm) -> Any:
    """The kernel in which each block computes a tile of queries, with the parameters (Q, K, V, scale, O, LSE); where the form
    has sinks or dropout (Q, K, V, scale, Sinks, Seed, O, LSE).

    Query i stands at key position i + seq_k - seq_q.
    """
    batch, seq_q, seq_k, heads = f.sizes[:4]
    rows, keys, back = f.tile.rows, f.tile.keys, f.mask == Mask()

    def tiles(K: Any, V: Any, b: Any, h: Any, at: Any, first: Any, last: Any) -> KeyTiles:
        return KeyTiles(
            0 if back else first, last - first if back else last, lambda k: (last - 1 - k) * keys if back else k * keys,
            lambda key: f.rows(K, b, h // f.group, key, keys, True), lambda key: f.rows(V, b, h // f.group, key, keys, True),
            lambda k, key, i, j: seen(f.mask, key + j, seq_k, at + i),
            (lambda k, key: key + keys > seq_k) if back and not isinstance(seq_k, int) else None)

    @T.macro
    def blocks(Q, K, V, scale, O, LSE, Sinks=None, Seed=None):
        with T.Kernel(T.ceildiv(seq_q, rows), heads, batch, threads=f.tile.threads) as (bx, h, b):
            work = working_set(f)
            c = f.exponent_scale(scale)
            row = bx * rows
            at = row + seq_k - seq_q  # key position of the tile's first query
            first, last = key_tiles(f.mask, at, rows, seq_k, keys)
            acc, total = attend(f, work, copying(f.rows(Q, b, h, row, rows, True)), c, tiles(K, V, b, h, at, first, last),
                                extras_of(f, Sinks, Seed, b, h, lambda k, key: (row, key)))
            T.copy(acc, f.rows(O, b, h, row, rows))
            if f.with_lse:
                T.copy(total, LSE[b, h, row:row + rows])

    if not f.extras:
        @T.prim_func
        def flash_attention(Q: f.q, K: f.k, V: f.v, scale: T.float32, O: f.o, LSE: f.lse):
            blocks(Q, K, V, scale, O, LSE)
    else:
        @T.prim_func
        def flash_attention(Q: f.q, K: f.k, V: f.v, scale: T.float32, Sinks: f.sink_tensor, Seed: T.Tensor((1,), "int64"),
                            O: f.o, LSE: f.lse):
            blocks(Q, K, V, scale, O, LSE, Sinks, Seed)

    return flash_attention


def extras_of(f: AttentionForm, Sinks: Any, Seed: Any, b: Any, h: Any, corner: Callable[..., tuple[Any, Any]]) -> Extras:
    """What the attention of a head has beside the softmax. corner: maps (index, place) to a tile's first (query, key)."""
    if not f.extras:
        return NOTHING
    return Extras(Sinks[h] * const(LOG2E, f.accum) if f.sinks else None,
                  Dropout(T.bind(Seed[0]), f.drop, b, h, corner) if f.drop else None, 1.0 - f.drop / LEVELS)


def copying(region: Any) -> Callable[[Any], Any]:
    """The `load` of `attend` that copies a region of queries."""
    return lambda tile: T.copy(region, tile)


def itself(index: Any) -> Any:
    """KeyTiles.place for tiles that are named by the loop's index."""
    return index


def key_tiles(mask: Mask, at: Any, rows: int, seq_k: Any, keys: int) -> tuple[Any, Any]:
    """The first and the last (exclusive) tile of keys that any of `rows` queries from position `at` on sees."""
    end = seq_k if mask.right is None else T.max(0, T.min(seq_k, at + rows + mask.right))
    first = 0 if mask.left is None else T.max(0, at - mask.left) // keys
    last = T.ceildiv(end, keys)
    return first, last if mask.left is None else T.max(first, last)


def seen(mask: Mask, key: Any, seq_k: Any, position: Any) -> Any:
    """Whether a query at key position `position` sees `key`.

    A query with a right limit sees no key beyond the last one, so the test against the last key is left out for it: that saves
    a second test in every tile of keys. (Rows of a tile beyond the last query do see such keys, and are not stored.)
    """
    ends = [] if mask.right is not None and mask.right <= 0 else [key < seq_k]
    if mask.right is not None:
        ends.append(key <= position + mask.right)
    if mask.left is not None:
        ends.append(key >= position - mask.left)
    return functools.reduce(T.And, ends)


# ---- keys of a tile that blocks divide --------------------------------------------------------------------------------

MERGED = 4  # rows that a block of the second launch merges


@T.macro
def merge(Means, Sums, mean, total, r, y, partition):
    """Compute `mean` and `total`, the result and logarithm of a few rows of the r-th divided tile, from row y on.

    They are merged from the means and logarithms of the tile's splits. -inf: no visible key.
    """
    rows, dim_v = mean.shape
    largest, weight = [T.alloc_fragment((rows,), "float32") for _ in (0, 1)]
    steps, per_block = partition.steps, partition.per_block
    first = r * steps // per_block
    last = T.ceildiv((r + 1) * steps, per_block)
    T.fill(largest, -T.infinity("float32"))
    T.clear(total)
    T.clear(mean)
    for j in T.serial(first, last):
        for i in T.Parallel(rows):
            largest[i] = T.max(largest[i], Sums[partition.place(r, j), y + i])
    for i in T.Parallel(rows):
        largest[i] = T.if_then_else(largest[i] == -T.infinity("float32"), 0.0, largest[i])
    for j in T.serial(first, last):
        at = partition.place(r, j)
        for i in T.Parallel(rows):
            weight[i] = T.exp2((Sums[at, y + i] - largest[i]) * LOG2E)
        for i in T.Parallel(rows):
            total[i] += weight[i]
        for i, d in T.Parallel(rows, dim_v):
            mean[i, d] += weight[i] * Means[at, y + i, d]
    for i, d in T.Parallel(rows, dim_v):
        mean[i, d] = T.if_then_else(total[i] == 0, 0.0, mean[i, d] / total[i])
    for i in T.Parallel(rows):
        total[i] = T.if_then_else(total[i] == 0, -T.infinity("float32"), largest[i] + T.log2(total[i]) / LOG2E)


@T.macro
def merge_tiles(f, tiles, Means, Sums, O, LSE):
    """The second launch, which merges the splits of all divided tiles. tiles: number of tiles of queries of a head."""
    heads, whole, rest = f.sizes.heads, f.partition.whole, f.partition.rest
    with T.Kernel(f.tile.rows // MERGED, rest, threads=128) as (y, r):
        mean = T.alloc_fragment((MERGED, f.sizes.dim_v), "float32")
        total = T.alloc_fragment((MERGED,), "float32")
        merge(Means, Sums, mean, total, r, y * MERGED, f.partition)
        row = (whole + r) % tiles * f.tile.rows + y * MERGED
        h = (whole + r) // tiles % heads
        T.copy(mean, f.rows(O, (whole + r) // (tiles * heads), h, row, MERGED))
        if f.with_lse:
            T.copy(total, LSE[(whole + r) // (tiles * heads), h, row:row + MERGED])


def split_kv_attention(f: AttentionForm) -> Any:
    """The kernel in which blocks divide the keys of tiles, as f.partition says: with a mask in equal splits, else evenly.

    Its parameters are (Q, K, V, scale, Means, Sums, O, LSE), as for dense_attention. Means (splits, rows, dim_v) and Sums
    (splits, rows), float32, are workspace. Sizes that are no ints are divided in equal splits too.
    """
    seq_q, seq_k, heads = f.sizes[1:4]
    rows, keys, partition = f.tile.rows, f.tile.keys, f.partition
    whole, rest, steps, per_block, sms = partition
    equal = f.mask != Mask() or not isinstance(rest, int)
    per_head = T.ceildiv(seq_q, rows)  # tiles

    def equal_tiles(K: Any, V: Any, r: Any, h: Any, at: Any, begin: Any, end: Any) -> KeyTiles:
        b = r // (per_head * heads)
        return KeyTiles(begin, end, itself, lambda k: f.rows(K, b, h // f.group, k * keys, keys, True),
                        lambda k: f.rows(V, b, h // f.group, k * keys, keys, True),
                        lambda k, _, i, j: seen(f.mask, k * keys + j, seq_k, at + i))

    def even_tiles(K: Any, V: Any, at: Any, h: Any, first: Any, count: Any) -> KeyTiles:
        b = at // (per_head * heads)
        return KeyTiles(0, count, lambda k: (first + count - 1 - k) * keys,
                        lambda key: f.rows(K, b, h // f.group, key, keys, True),
                        lambda key: f.rows(V, b, h // f.group, key, keys, True),
                        lambda k, key, i, j: T.Or(k > 0, T.Or(first + count < steps, j < seq_k - (steps - 1) * keys)))

    @T.prim_func
    def flash_attention(Q: f.q, K: f.k, V: f.v, scale: T.float32,
                        Means: T.Tensor((partition.splits, rows, f.sizes.dim_v), "float32"),
                        Sums: T.Tensor((partition.splits, rows), "float32"), O: f.o, LSE: f.lse):
        with T.Kernel(whole + partition.splits, threads=f.tile.threads) as n:
            work = working_set(f)
            c = f.exponent_scale(scale)
            if equal:
                r = n // steps
                row = r % per_head * rows
                h = r // per_head % heads
                at = row + seq_k - seq_q  # key position of the tile's first query
                first, last = key_tiles(f.mask, at, rows, seq_k, keys)
                begin = first + n % steps * (last - first) // steps
                end = first + (n % steps + 1) * (last - first) // steps
                queries = copying(f.rows(Q, r // (per_head * heads), h, row, rows, True))
                acc, total = attend(f, work, queries, c, equal_tiles(K, V, r, h, at, begin, end))
                T.copy(acc, Means[n, :, :])
                T.copy(total, Sums[n, :])
            else:
                begin = (n - whole) % sms * per_block  # start of a block's range
                r = begin // steps + (n - whole) // sms
                first = T.if_then_else(n < whole, 0, T.max(0, begin - r * steps))
                # A split without a tile still runs one step: a loop that may be empty would need a second way to load queries.
                own = T.max(1, T.min(steps, T.min(begin + per_block, rest * steps) - r * steps) - first)
                count = T.if_then_else(n < whole, steps, own)
                at = T.if_then_else(n < whole, n, whole + T.min(r, rest - 1))
                row = at % per_head * rows
                h = at // per_head % heads
                acc, total = attend(f, work, copying(f.rows(Q, at // (per_head * heads), h, row, rows, True)), c,
                                    even_tiles(K, V, at, h, first, count))
                if n < whole:
                    T.copy(acc, f.rows(O, at // (per_head * heads), h, row, rows))
                    if f.with_lse:
                        T.copy(total, LSE[at // (per_head * heads), h, row:row + rows])
                else:
                    for i, j in T.Parallel(rows, f.sizes.dim_v):  # by threads: a second TMA store would need more shared memory
                        Means[n - whole, i, j] = acc[i, j]
                    for i in T.Parallel(rows):
                        Sums[n - whole, i] = total[i]
        merge_tiles(f, per_head, Means, Sums, O, LSE)

    return flash_attention
