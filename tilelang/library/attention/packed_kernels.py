"""The program behind `flash_attention` for packed sequences, whose lengths no host knows.

A first launch puts the tiles of queries in order, longest first: blocks take tiles in a fixed stride, so that neighbours in
this order must be alike.  In the order of the sequences a stride may fall in step with them: two sequences of 4096, two
heads, and half of the blocks have short tiles only.  Tiles that run at the same time should also share keys in L2: heads
whose keys fit together go one group after another, and where one head's do not fit, so do parts of the sequences.

Sequence s has the slots from cu_q[s] // rows + s on, which are enough for its tiles whatever the lengths are.  The place of a
tile is how many tiles take more steps, or as many and stand before it.  Steps do not become fewer from tile to tile of a
sequence, so those of a sequence that take at least so many are its last ones, and how many they are is a division.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from .kernels import LOG2E, Mask, Sizes, Tile, absorb, finish, key_tiles, reset, seen, working_set

NEAR = 32 << 20  # bytes of keys and values that tiles running at the same time may keep in L2
FACTS = 8  # integers of a tile: head, first row, the sequence's first query and length, first key and number of keys; 2 unused
_LANES = 128  # sequences that a block of the first launch looks at together


def _with_steps(mask: Mask, tile: Tile, least: Any, seq_q: Any, seq_k: Any) -> Any:
    """How many tiles of queries of a sequence take at least so many steps, none of them more than `_most` counts.

    least: at least 0.  Step n is the tile of keys n - 1.
    """
    count = T.ceildiv(seq_q, tile.rows)
    if mask.right is None:
        last = count
    else:
        behind = (least - 1) * tile.keys - (mask.right + seq_k - seq_q)  # rows in front of the first that sees such a key
        last = T.max(0, count - T.max(0, behind) // tile.rows)
    some = T.if_then_else((least - 1) * tile.keys < seq_k, last, 0)
    most = _most(mask, tile)
    return T.if_then_else(least == 0, count, some if most is None else T.if_then_else(least > most, 0, some))


def _most(mask: Mask, tile: Tile) -> int | None:
    """Steps beyond which tiles are not told apart: a window shows no more.  None: no limit."""
    return None if mask.left is None else -(-(mask.left + tile.rows) // tile.keys) + 1


def _steps(mask: Mask, tile: Tile, row: Any, seq_q: Any, seq_k: Any) -> Any:
    """Tiles of keys up to the last one that the tile of queries from `row` on sees, `_most` at most."""
    end = seq_k if mask.right is None else T.max(0, T.min(seq_k, row + seq_k - seq_q + tile.rows + mask.right))
    most = _most(mask, tile)
    return T.ceildiv(end, tile.keys) if most is None else T.min(most, T.ceildiv(end, tile.keys))


@T.macro
def rank(Tiles, cu_q, cu_k, slot, batch, heads, wide, near, mask, tile, units):
    """Writes what the kernel needs to know of a slot's tile, for each head, to its place in Tiles.

    wide: heads that go together.  near: keys of one head of sequences that go together.  units: blocks at work together."""
    each, before, every = [T.alloc_fragment((_LANES,), "int32") for _ in (0, 1, 2)]
    number, place, real = [T.alloc_fragment((1,), "int32") for _ in (0, 1, 2)]
    rows = tile.rows
    T.clear(each)
    for n in T.serial(T.ceildiv(batch, _LANES)):
        for i in T.Parallel(_LANES):
            s = n * _LANES + i
            if s < batch:
                each[i] += T.if_then_else(cu_q[s] // rows + s <= slot, 1, 0)
    T.reduce_sum(each, number)
    own = number[0] - 1  # -1: slots in front of the first sequence
    at = T.max(own, 0)
    first_q, first_k = cu_q[at], cu_k[at]
    seq_q, seq_k = cu_q[at + 1] - first_q, cu_k[at + 1] - first_k
    row = (slot - (first_q // rows + at)) * rows
    filled = T.And(own >= 0, row < seq_q)
    least = _steps(mask, tile, row, seq_q, seq_k)
    T.clear(before)
    T.clear(every)
    for n in T.serial(T.ceildiv(batch, _LANES)):
        for i in T.Parallel(_LANES):
            s = n * _LANES + i
            if s < batch:
                length, keys = cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s]
                tiles = T.ceildiv(length, rows)
                more = _with_steps(mask, tile, least + 1, length, keys)
                alike = _with_steps(mask, tile, least, length, keys) - more
                earlier = row // rows - (tiles - alike - more)  # of its own sequence
                longer = more + T.if_then_else(s < own, alike, T.if_then_else(s == own, earlier, 0))
                part, mine = cu_k[s] // near, first_k // near
                earlier_parts = T.if_then_else(part == mine, longer, T.if_then_else(part < mine, tiles, 0))
                # Slots without a tile stand behind all that have one, in their own order.
                before[i] += T.if_then_else(filled, earlier_parts, T.if_then_else(s > own, tiles, 0))
                every[i] += tiles
    T.reduce_sum(before, place)
    T.reduce_sum(every, real)
    for h in T.Parallel(heads):
        turn = h // wide * wide
        # Every second turn goes from its shortest tile on: where turns meet, neighbours are alike too.
        inside = T.if_then_else(h // wide % 2 == 0, place[0], real[0] - 1 - place[0])
        among = turn * real[0] + inside * T.min(wide, heads - turn) + h - turn
        p = T.if_then_else(filled, among, (slot + place[0]) * heads + h)
        # Rounds go forth and back: who had the longest tile of one has the shortest of the next.
        begin = p // units * units
        last = T.min(units, Tiles.shape[0] - begin) - 1
        n = T.if_then_else(p // units % 2 == 0, p, begin + last - (p - begin))
        Tiles[n, 0] = h
        Tiles[n, 1] = T.if_then_else(filled, row, 0)
        Tiles[n, 2] = first_q
        Tiles[n, 3] = T.if_then_else(filled, seq_q, 0)
        Tiles[n, 4] = first_k
        Tiles[n, 5] = seq_k


def packed_attention(sizes: Sizes, strides: Any, dtype: str, mask: Mask, tile: Tile, with_lse: bool,
                     fixed: float | None = None, units: int = 1) -> Any:
    """Sequences one after another: Q (tokens_q, heads, dim), K (tokens_k, kv_heads, dim), V (…, dim_v), O like Q; strides as in
    dense_attention.  cu_q, cu_k (sequences + 1): the first token of each and the last end.  LSE (heads, tokens_q) or None.
    Tiles (tiles, FACTS): room for what is known of every tile; tiles = (tokens_q // rows + sequences) * heads.

    sizes: batch is the number of sequences, seq_q and seq_k the numbers of tokens.  units: blocks that run at the same time.
    Slots that are left over are of no queries.
    """
    batch, tokens_q, tokens_k, heads, kv_heads, dim, dim_v = sizes
    rows, keys, group = tile.rows, tile.keys, heads // kv_heads
    near = max(1, NEAR // (2 * (dim + dim_v)))  # keys
    tiles = T.dynamic("tiles")

    @T.prim_func
    def flash_attention_packed(Q: T.StridedTensor((tokens_q, heads, dim), strides[0], dtype),
                               K: T.StridedTensor((tokens_k, kv_heads, dim), strides[1], dtype),
                               V: T.StridedTensor((tokens_k, kv_heads, dim_v), strides[2], dtype),
                               scale: T.float32, cu_q: T.Tensor((batch + 1,), "int32"), cu_k: T.Tensor((batch + 1,), "int32"),
                               Tiles: T.Tensor((tiles, FACTS), "int32"),
                               O: T.StridedTensor((tokens_q, heads, dim_v), strides[3], dtype),
                               LSE: T.Tensor((heads, tokens_q) if with_lse else (1,), "float32")):
        with T.Kernel(tiles // heads, threads=_LANES) as slot:
            fitting = T.max(1, T.min(kv_heads, near // T.max(1, tokens_k))) * group
            wide = T.if_then_else(tiles // heads * fitting < 2 * units, heads, fitting)  # turns of few tiles would run together
            rank(Tiles, cu_q, cu_k, slot, batch, heads, wide, near, mask, tile, units)
        with T.Kernel(tiles, threads=tile.threads) as n:
            Qs, Ks, Vs, S, P, acc, top, before, factor, total, more = working_set(tile, dim, dim_v, dtype)
            c = (scale if fixed is None else fixed) * LOG2E
            h, row, q0, seq_q, k0, seq_k = [Tiles[n, e] for e in range(6)]
            at = row + seq_k - seq_q
            first, last = key_tiles(mask, at, rows, T.if_then_else(seq_q > 0, seq_k, 0), keys)
            T.copy(Q[q0 + row:q0 + row + rows, h, :], Qs)
            reset(acc, top, total, c)
            for k in T.Pipelined(first, last, num_stages=tile.stages):
                T.copy(K[k0 + k * keys:k0 + (k + 1) * keys, h // group, :], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, keys):
                    S[i, j] = T.if_then_else(seen(mask, k * keys + j, seq_k, at + i), S[i, j], -T.infinity("float32"))
                T.copy(V[k0 + k * keys:k0 + (k + 1) * keys, h // group, :], Vs)
                absorb(S, P, acc, top, before, factor, total, more, c)
                T.gemm(P, Vs, acc)
            finish(acc, top, total, factor, c)
            Own = T.make_tensor(T.address_of(O[0, 0, 0]), (q0 + seq_q, heads, dim_v), dtype, strides[3])  # ends with them
            if seq_q > 0:
                T.copy(acc, Own[q0 + row:q0 + row + rows, h, :])
            if with_lse:
                for i in T.Parallel(rows):
                    if row + i < seq_q:
                        LSE[h, q0 + row + i] = total[i]

    return flash_attention_packed


__all__ = ["FACTS", "packed_attention", "rank"]
