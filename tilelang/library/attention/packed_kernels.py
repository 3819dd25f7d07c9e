"""The kernel of flash_attention for packed sequences, whose lengths the host does not know.

A first launch orders the tiles of queries, longest first. Blocks take tiles in a fixed stride, so neighbours in this order must
take about the same time. In the order of the sequences, the stride may coincide with their lengths: with two sequences of 4096
and two heads, half of the blocks would get short tiles only. Tiles that run at the same time should also share keys in L2:
heads whose keys fit together are processed one group after another; where the keys of one head do not fit, so are ranges of the
sequences.

Sequence s has the slots from cu_q[s] // rows + s on, which suffice for its tiles at any lengths. The place of a tile in the
order is the number of tiles that take more steps, or as many steps and have a lower slot. Within a sequence, later tiles take
no fewer steps than earlier ones, or, where they see all keys from one on, no more, so the tiles that take at least a given
number of steps are its last ones, or its first, and a division counts them.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from .form import FACTS, AttentionForm, Tile
from .kernels import KeyTiles, attend, copying, extras_of, itself, key_tiles, seen, working_set
from .problem import Mask

NEAR = 32 << 20  # bytes of keys and values that tiles running at the same time may keep in L2
_LANES = 128  # sequences that a block of the first launch processes at a time


def _with_steps(mask: Mask, tile: Tile, least: Any, seq_q: Any, seq_k: Any) -> Any:
    """The number of tiles of queries of a sequence that take at least `least` steps, where no tile counts more than `_most`
    steps.

    least: at least 0. Step n is the tile of keys n - 1; where tiles see the keys from one on, n - 1 is counted from the end.
    """
    count = T.ceildiv(seq_q, tile.rows)
    if _shrinks(mask):
        row = (T.ceildiv(seq_k, tile.keys) - least + 1) * tile.keys - 1 - (seq_k - seq_q - mask.left)  # the last that sees it
        last = T.if_then_else(row < 0, 0, T.min(count, T.max(0, row) // tile.rows + 1))
    elif mask.right is None:
        last = count
    else:
        behind = (least - 1) * tile.keys - (mask.right + seq_k - seq_q)  # rows in front of the first row that sees such a key
        last = T.max(0, count - T.max(0, behind) // tile.rows)
    some = T.if_then_else((least - 1) * tile.keys < seq_k, last, 0)
    most = _most(mask, tile)
    return T.if_then_else(least == 0, count, some if most is None else T.if_then_else(least > most, 0, some))


def _shrinks(mask: Mask) -> bool:
    """Whether later tiles of a sequence take fewer steps than earlier ones, and not more."""
    return mask.left is not None and mask.right is None


def _most(mask: Mask, tile: Tile) -> int | None:
    """The number of steps above which tiles count as equal, because a window shows no more keys; None: no limit."""
    return None if mask.left is None or mask.right is None else -(-(mask.left + tile.rows) // tile.keys) + 1


def _steps(mask: Mask, tile: Tile, row: Any, seq_q: Any, seq_k: Any) -> Any:
    """The number of tiles of keys that the tile of queries from `row` on sees, at most `_most`."""
    if _shrinks(mask):
        return T.ceildiv(seq_k, tile.keys) - T.min(seq_k, T.max(0, row + seq_k - seq_q - mask.left)) // tile.keys
    end = seq_k if mask.right is None else T.max(0, T.min(seq_k, row + seq_k - seq_q + tile.rows + mask.right))
    most = _most(mask, tile)
    return T.ceildiv(end, tile.keys) if most is None else T.min(most, T.ceildiv(end, tile.keys))


def starts_within(cu: Any, tokens: Any) -> Any:
    """Where sequences begin: a function of their numbers. Results of one behind the last token would be written there."""
    return lambda s: T.max(0, T.min(cu[s], tokens))


@T.macro
def order_tiles(f, Tiles, starts, slot, wide, near, sms, numbered=False, called=None):
    """Write the facts of a slot's tile, for each head, to its place in Tiles, where the attention launch reads them.

    starts: cu_q, cu_k. wide: heads that are processed together. near: keys of one head of sequences that are processed
    together. sms: blocks that run at the same time. numbered: also the number of the sequence.
    """
    cu_q, cu_k = starts
    each, before, every = [T.alloc_fragment((_LANES,), "int32") for _ in (0, 1, 2)]
    number, place, real = [T.alloc_fragment((1,), "int32") for _ in (0, 1, 2)]
    batch, heads, mask, tile, rows = f.sizes.batch, f.sizes.heads, f.mask, f.tile, f.tile.rows
    start_q, start_k = starts_within(cu_q, f.sizes.seq_q), starts_within(cu_k, f.sizes.seq_k)
    T.clear(each)
    for n in T.serial(T.ceildiv(batch, _LANES)):
        for i in T.Parallel(_LANES):
            s = n * _LANES + i
            if s < batch:
                each[i] += T.if_then_else(start_q(s) // rows + s <= slot, 1, 0)
    T.reduce_sum(each, number)
    own = number[0] - 1  # -1: slots in front of the first sequence
    at = T.max(own, 0)
    first_q, first_k = start_q(at), start_k(at)
    seq_q, seq_k = start_q(at + 1) - first_q, start_k(at + 1) - first_k
    row = (slot - (first_q // rows + at)) * rows
    filled = T.And(own >= 0, row < seq_q)
    least = _steps(mask, tile, row, seq_q, seq_k)
    T.clear(before)
    T.clear(every)
    for n in T.serial(T.ceildiv(batch, _LANES)):
        for i in T.Parallel(_LANES):
            s = n * _LANES + i
            if s < batch:
                length, keys = [start(s + 1) - start(s) for start in (start_q, start_k)]
                tiles = T.ceildiv(length, rows)
                more = _with_steps(mask, tile, least + 1, length, keys)
                alike = _with_steps(mask, tile, least, length, keys) - more
                earlier = row // rows - (more if _shrinks(mask) else tiles - alike - more)  # tiles of the same sequence
                longer = more + T.if_then_else(s < own, alike, T.if_then_else(s == own, earlier, 0))
                part, mine = start_k(s) // near, first_k // near
                earlier_parts = T.if_then_else(part == mine, longer, T.if_then_else(part < mine, tiles, 0))
                # Slots without a tile come after all slots that have one, in their own order.
                before[i] += T.if_then_else(filled, earlier_parts, T.if_then_else(s > own, tiles, 0))
                every[i] += tiles
    T.reduce_sum(before, place)
    T.reduce_sum(every, real)
    some = heads if called is None else called
    for h in T.Parallel(heads):
        if h < some:
            turn = h // wide * wide
            # Every second group is ordered from its shortest tile, so that tiles where groups meet take similar times too.
            inside = T.if_then_else(h // wide % 2 == 0, place[0], real[0] - 1 - place[0])
            among = turn * real[0] + inside * T.min(wide, some - turn) + h - turn
            p = T.if_then_else(filled, among, (slot + place[0]) * some + h)
            # Waves alternate direction: the block with the longest tile of one wave gets the shortest of the next.
            begin = p // sms * sms
            last = T.min(sms, Tiles.shape[0] - begin) - 1
            n = T.if_then_else(p // sms % 2 == 0, p, begin + last - (p - begin))
            Tiles[n, 0] = h
            Tiles[n, 1] = T.if_then_else(filled, row, 0)
            Tiles[n, 2] = first_q
            Tiles[n, 3] = T.if_then_else(filled, seq_q, 0)
            Tiles[n, 4] = first_k
            Tiles[n, 5] = seq_k
            if numbered:
                Tiles[n, 6] = at


def heads_together(groups: int, group: int, fitting: Any, slots: Any, sms: int) -> Any:
    """The heads whose tiles are processed together, of `groups` times `group`. fitting: of the groups, so many have tiles of
    the other side that fit in L2. slots: tiles of a head. Small numbers of tiles run at the same time anyway."""
    near = T.max(1, T.min(groups, fitting)) * group
    return T.if_then_else(slots * near < 2 * sms, groups * group, near)


def packed_attention(f: AttentionForm, sms: int = 1) -> Any:
    """The kernel for packed sequences, with the parameters (Q, K, V, scale, cu_q, cu_k, Tiles, O, LSE).

    Q (tokens_q, heads, dim), K (tokens_k, kv_heads, dim), V (…, dim_v), O like Q. cu_q, cu_k (sequences + 1): the first token
    of each sequence, and the end of the last. LSE (heads, tokens_q) or None. Tiles (tiles, FACTS): workspace for the facts of
    every tile; tiles = (tokens_q // rows + sequences) * heads.

    f.sizes: batch is the number of sequences, seq_q and seq_k the numbers of tokens. sms: blocks that run at the same time.
    Slots that are left over have no queries.
    """
    batch, _, tokens_k, heads, kv_heads, dim, dim_v = f.sizes
    rows, keys = f.tile.rows, f.tile.keys
    near = max(1, NEAR // (2 * (dim + dim_v)))  # keys
    tiles = T.dynamic("tiles")

    def key_range(K: Any, V: Any, head: Any, sequence: Any, at: Any, first: Any, last: Any) -> KeyTiles:
        k0, seq_k = sequence
        return KeyTiles(first, last, itself, lambda k: f.rows(K, None, head, k0 + k * keys, keys, True),
                        lambda k: f.rows(V, None, head, k0 + k * keys, keys, True),
                        lambda k, _, i, j: seen(f.mask, k * keys + j, seq_k, at + i))

    @T.macro
    def blocks(Q, K, V, scale, cu_q, cu_k, Tiles, O, LSE, Sinks=None, Seed=None):
        with T.Kernel(tiles // heads, threads=_LANES) as slot:
            wide = heads_together(kv_heads, f.group, near // T.max(1, tokens_k), tiles // heads, sms)
            order_tiles(f, Tiles, (cu_q, cu_k), slot, wide, near, sms, f.drop > 0)
        with T.Kernel(tiles, threads=f.tile.threads) as n:
            work = working_set(f)
            c = f.exponent_scale(scale)
            h, row, q0, seq_q, k0, seq_k = [Tiles[n, e] for e in range(6)]
            at = row + seq_k - seq_q
            first, last = key_tiles(f.mask, at, rows, T.if_then_else(seq_q > 0, seq_k, 0), keys)
            acc, total = attend(f, work, copying(f.rows(Q, None, h, q0 + row, rows, True)), c,
                                key_range(K, V, h // f.group, (k0, seq_k), at, first, last),
                                extras_of(f, Sinks, Seed, Tiles[n, 6], h, lambda k, key: (row, k * keys)))
            Own = T.make_tensor(T.address_of(O[0, 0, 0]), (q0 + seq_q, *O.shape[1:]), f.dtype, f.strides[3])  # ends with them
            if seq_q > 0:
                T.copy(acc, f.rows(Own, None, h, q0 + row, rows))
            if f.with_lse:
                for i in T.Parallel(rows):
                    if row + i < seq_q:
                        LSE[h, q0 + row + i] = total[i]

    lengths = T.Tensor((batch + 1,), "int32")
    if not f.extras:
        @T.prim_func
        def flash_attention_packed(Q: f.q, K: f.k, V: f.v, scale: T.float32, cu_q: lengths, cu_k: lengths,
                                   Tiles: T.Tensor((tiles, FACTS), "int32"), O: f.o, LSE: f.lse):
            blocks(Q, K, V, scale, cu_q, cu_k, Tiles, O, LSE)
    else:
        @T.prim_func
        def flash_attention_packed(Q: f.q, K: f.k, V: f.v, scale: T.float32, Sinks: f.sink_tensor,
                                   Seed: T.Tensor((1,), "int64"), cu_q: lengths, cu_k: lengths,
                                   Tiles: T.Tensor((tiles, FACTS), "int32"), O: f.o, LSE: f.lse):
            blocks(Q, K, V, scale, cu_q, cu_k, Tiles, O, LSE, Sinks, Seed)

    return flash_attention_packed
