"""The plan of a decode step: how blocks divide the keys of sequences of different lengths, found on the device.

Every sequence is divided into pieces of equal size, of which none has more tiles than a bound. The bound is the longest
sequence over one of 32 numbers: the one of least cost, in steps of a block.

    cost = max(all steps / blocks at once, waves of large pieces, then of the small ones that do not fit beside them) + merging

Large pieces, of more than half the bound, come first, so that blocks that start last are short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.errors import error

from ..arrays import empty
from ..place import Place
from .form import Tile

THREADS, BOUNDS = 512, 32
WHOLE, NOTHING = -1, -2
_LANES, _HALVINGS = THREADS // BOUNDS, THREADS.bit_length() - 1
_ALL = 1 << 30  # a window that hides nothing


class DecodePlan(NamedTuple):
    """What each block of a decode step computes, on the device of the lengths, int32.

    items (n, 5): a sequence; its length; the first and the last (exclusive) tile of keys; the piece's place in the workspace,
    WHOLE where the sequence is not divided, NOTHING where a block has no work. divided (m, 3): a sequence that is, the place of
    its first piece, and the number of its pieces; 0 for none. tile: of the kernel.
    """

    items: Any
    divided: Any
    tile: Tile

    @property
    def form(self) -> tuple[Any, ...]:
        """What kernels depend on."""
        return tuple(self.items.shape), tuple(self.divided.shape), self.tile

    @property
    def slots(self) -> int:
        """Places of the workspace."""
        return 2 * int(self.divided.shape[0])


class PlanCosts(NamedTuple):
    """What the plan weighs, in steps of a block. at_once: pieces of all heads that are computed at the same time. start: of a
    piece. piece: of merging one. merge: of the second launch. lone: of a block that has an SM to itself."""

    at_once: float
    start: float
    piece: float
    merge: float
    lone: float


def plan_on_device(lengths: Any, tile: Tile, seq_q: int, window: int | None, costs: PlanCosts, more: int,
                   at: Place) -> DecodePlan:
    """The plan for lengths that only the device knows. more: the number of items beside one for each sequence."""
    batch = int(lengths.shape[0])
    plan = DecodePlan(empty(lengths, (batch + more, 5), "int32"), empty(lengths, (more, 3), "int32"), tile)
    at.kernel(_planner)(lengths, plan.items, plan.divided, tile.keys, seq_q, _ALL if window is None else window - 1, *costs)
    return plan


def _number(k: Any) -> Any:
    """The k-th number that the longest sequence is divided by: 1 to 8, then four for each power of two, up to 512."""
    m = k - 7
    return T.if_then_else(k < 8, k + 1, T.shift_left(4 + m % 4, m // 4 + 1))


def clear_all(tiles: list[Any]) -> None:
    """T.clear for each of them."""
    for x in tiles:
        T.clear(x)


def sum_all(tiles: list[Any], outs: list[Any]) -> None:
    """T.reduce_sum along rows for each of them."""
    for x, y in zip(tiles, outs):
        T.reduce_sum(x, y, dim=1)


def number(n: Any, inverse: Any) -> Any:
    """The number of pieces of n tiles. inverse: of the most that a piece may have. Exact below 2^21 tiles."""
    return T.max(1, T.cast(T.ceil((T.cast(n, "float32") - 0.5) * inverse), "int32"))


@T.macro
def span(Lengths, b, form):
    """(length, first tile, number of tiles) of a sequence; behind the last, none. form: keys of a tile, queries, and keys
    that a query sees before its own."""
    batch, (keys, seq_q, left) = Lengths.shape[0], form
    length = T.if_then_else(b < batch, Lengths[T.min(b, batch - 1)], 0)
    first = T.max(0, length - seq_q - left) // keys
    return length, first, T.max(0, T.ceildiv(length, keys) - first)


@T.macro
def put(Items, at, b, length, piece):
    """Store an item. piece: first and last tile, and place."""
    Items[at, 0], Items[at, 1] = b, length
    Items[at, 2], Items[at, 3], Items[at, 4] = piece


@T.macro
def longest_and_all(Lengths, form):
    """Tiles of the longest sequence, and of all."""
    most, mine = [T.alloc_fragment((THREADS,), "int32") for _ in range(2)]
    longest, all_tiles = [T.alloc_fragment((1,), "int32") for _ in range(2)]
    T.clear(most)
    T.clear(mine)
    for c in T.serial(T.ceildiv(Lengths.shape[0], THREADS)):
        for t in T.Parallel(THREADS):
            n = span(Lengths, c * THREADS + t, form)[2]
            most[t] = T.max(most[t], n)
            mine[t] += n
    T.reduce_max(most, longest, dim=0)
    T.reduce_sum(mine, all_tiles, dim=0)
    return longest, all_tiles


@T.macro
def count_pieces(tiles, bound, inverse, held, count):
    """Add up what `count` sequences need: pieces, large ones, their tiles, and pieces of divided sequences."""
    pieces, large, volume, parted = held
    for g in T.serial(T.ceildiv(count, _LANES)):
        for i, j in T.Parallel(BOUNDS, _LANES):
            n = tiles[g * _LANES + j]
            here = g * _LANES + j < count
            need = number(n, inverse[i])
            big = T.And(here, 2 * n > bound[i])
            pieces[i, j] += T.if_then_else(here, need, 0)
            large[i, j] += T.if_then_else(big, need, 0)
            volume[i, j] += T.if_then_else(big, n, 0)
            parted[i, j] += T.if_then_else(T.And(here, need > 1), need, 0)


@T.macro
def weigh_bounds(cost, found, all_tiles, items, weights):
    """cost: of each bound, in steps of a block; infinite where it needs more items than there are. weights: PlanCosts."""
    (pieces, large, volume, parted), (at_once, start, piece, merge, lone) = found, weights
    for i in T.Parallel(BOUNDS):
        total = T.cast(all_tiles[0], "float32") + T.cast(pieces[i], "float32") * start
        bigs, smalls = T.cast(large[i], "float32"), T.cast(pieces[i] - large[i], "float32")
        size = T.cast(volume[i], "float32") / T.max(bigs, 1.0) + start
        small = T.cast(all_tiles[0] - volume[i], "float32") / T.max(smalls, 1.0) + start
        # Blocks that have an SM to themselves take `lone` of the time.
        waves, over = T.floor(bigs / at_once), bigs / at_once - T.floor(bigs / at_once)
        last = T.if_then_else(over > 0, T.if_then_else(smalls > 0, 1.0, T.max(over, lone)), 0.0) * size
        beside = (1.0 - over) * at_once * T.floor(last / small)  # small pieces, while the last large ones are computed
        rest = T.max(smalls - beside, 0.0) / at_once
        more = T.if_then_else(rest > T.floor(rest), T.max(rest - T.floor(rest), lone), 0.0)
        whole = waves * size + last + (T.floor(rest) + more) * small
        merging = T.if_then_else(parted[i] > 0, merge + piece * T.cast(parted[i], "float32") / at_once, 0.0)
        cost[i] = T.if_then_else(pieces[i] > items, T.infinity("float32"), T.max(total / at_once, whole) + merging)


@T.macro
def best_bound(Lengths, form, longest, all_tiles, items, weights):
    """(which bound costs least, the number of its large pieces)."""
    batch = Lengths.shape[0]
    tiles = T.alloc_shared((THREADS,), "int32")
    bound, inverse = T.alloc_fragment((BOUNDS,), "int32"), T.alloc_fragment((BOUNDS,), "float32")
    held = [T.alloc_fragment((BOUNDS, _LANES), "int32") for _ in range(4)]
    found = [T.alloc_fragment((BOUNDS,), "int32") for _ in range(4)]
    cost, least = T.alloc_fragment((BOUNDS,), "float32"), T.alloc_fragment((1,), "float32")
    which = T.alloc_fragment((BOUNDS,), "int32")
    chosen, ahead = [T.alloc_fragment((1,), "int32") for _ in range(2)]
    for i in T.Parallel(BOUNDS):
        bound[i] = T.max(1, T.ceildiv(longest[0], _number(i)))
        inverse[i] = 1.0 / T.cast(bound[i], "float32")
    clear_all(held)
    for c in T.serial(T.ceildiv(batch, THREADS)):
        for t in T.Parallel(THREADS):
            tiles[t] = span(Lengths, c * THREADS + t, form)[2]
        count_pieces(tiles, bound, inverse, held, T.min(batch - c * THREADS, THREADS))
    sum_all(held, found)
    weigh_bounds(cost, found, all_tiles, items, weights)
    T.reduce_min(cost, least, dim=0)
    for i in T.Parallel(BOUNDS):
        which[i] = T.if_then_else(cost[i] == least[0], i, BOUNDS - 1)
    T.reduce_min(which, chosen, dim=0)
    for i in T.Parallel(BOUNDS):
        which[i] = T.if_then_else(i == chosen[0], found[1][i], 0)
    T.reduce_sum(which, ahead, dim=0)
    return chosen, ahead


@T.macro
def count_sequences(Lengths, form, c, most_tiles, counts):
    """counts: running sums over 512 sequences of large pieces, of those in small ones, of pieces and of divided ones."""
    for t in T.Parallel(THREADS):
        n = span(Lengths, c * THREADS + t, form)[2]
        need = number(n, 1.0 / T.cast(most_tiles, "float32"))
        counts[0, t] = T.if_then_else(2 * n > most_tiles, need, 0)
        counts[1, t] = T.if_then_else(T.Or(2 * n > most_tiles, c * THREADS + t >= Lengths.shape[0]), 0, 1)
        counts[2, t] = T.if_then_else(need > 1, need, 0)
        counts[3, t] = T.if_then_else(need > 1, 1, 0)
    T.cumsum(counts, dim=1)


@T.macro
def put_large(Lengths, form, c, most_tiles, counts, Items, which_one, ahead):
    """Store the large pieces of 512 sequences: a thread finds its piece's. ahead: items and places before them."""
    one, slots = ahead
    for g in T.serial(T.ceildiv(counts[0, THREADS - 1], THREADS)):
        T.clear(which_one)
        for t in T.Parallel(THREADS):
            for e in T.unroll(_HALVINGS):
                which_one[t] += T.if_then_else(
                    counts[0, which_one[t] + (THREADS >> e + 1) - 1] <= g * THREADS + t, THREADS >> e + 1, 0)
        for t in T.Parallel(THREADS):
            if g * THREADS + t < counts[0, THREADS - 1]:
                b = c * THREADS + which_one[t]
                length, first, n = span(Lengths, b, form)
                need = number(n, 1.0 / T.cast(most_tiles, "float32"))
                j = g * THREADS + t - counts[0, which_one[t]] + need
                each, over = n // need, n % need
                slot = slots + counts[2, which_one[t]] - need + j
                put(Items, one + g * THREADS + t, b, length,
                    (first + j * each + T.min(j, over), first + (j + 1) * each + T.min(j + 1, over),
                     T.if_then_else(need > 1, slot, WHOLE)))


def _planner() -> Any:
    batch, items, divided = T.dynamic("batch, items, divided")

    @T.prim_func
    def decode_plan(Lengths: T.Tensor((batch,), "int32"), Items: T.Tensor((items, 5), "int32"),
                    Divided: T.Tensor((divided, 3), "int32"), keys: T.int32, seq_q: T.int32, left: T.int32,
                    at_once: T.float32, start: T.float32, piece: T.float32, merge: T.float32, lone: T.float32):
        with T.Kernel(1, threads=THREADS) as _:
            counts, which_one = T.alloc_shared((4, THREADS), "int32"), T.alloc_fragment((THREADS,), "int32")
            form = keys, seq_q, left
            longest, all_tiles = longest_and_all(Lengths, form)
            chosen, ahead = best_bound(Lengths, form, longest, all_tiles, items, (at_once, start, piece, merge, lone))
            most_tiles = T.bind(T.max(1, T.ceildiv(longest[0], _number(chosen[0]))))
            one, two, slots, rows = [T.alloc_var("int32", init=0) for _ in range(4)]
            for c in T.serial(T.ceildiv(batch, THREADS)):
                count_sequences(Lengths, form, c, most_tiles, counts)
                for t in T.Parallel(THREADS):
                    b = c * THREADS + t
                    length, first, n = span(Lengths, b, form)
                    need = number(n, 1.0 / T.cast(most_tiles, "float32"))
                    if T.And(b < batch, 2 * n <= most_tiles):
                        put(Items, ahead[0] + two + counts[1, t] - 1, b, length, (first, first + n, WHOLE))
                    if need > 1:
                        at = rows + counts[3, t] - 1
                        Divided[at, 0], Divided[at, 1], Divided[at, 2] = b, slots + counts[2, t] - need, need
                put_large(Lengths, form, c, most_tiles, counts, Items, which_one, (one, slots))
                one = one + counts[0, THREADS - 1]
                two = two + counts[1, THREADS - 1]
                slots = slots + counts[2, THREADS - 1]
                rows = rows + counts[3, THREADS - 1]
            for c in T.serial(T.ceildiv(items, THREADS)):
                for t in T.Parallel(THREADS):
                    if T.And(c * THREADS + t < items, c * THREADS + t >= ahead[0] + two):
                        put(Items, c * THREADS + t, 0, 0, (0, 0, NOTHING))  # no tile, and no result
            for c in T.serial(T.ceildiv(divided, THREADS)):
                for t in T.Parallel(THREADS):
                    if T.And(c * THREADS + t < divided, c * THREADS + t >= rows):
                        Divided[c * THREADS + t, 2] = 0

    return decode_plan


def check_plan(plan: DecodePlan, sizes: Any, more: int, tile: Tile, splits: int | None) -> None:
    """Raises attention-option unless a plan is for such sizes and tiles. more: as plan_on_device takes it."""
    right = ((sizes.batch + more, 5), (more, 3), tile)
    if splits is not None or plan.form != right:
        raise error("attention-option", f"the plan is for {plan.items.shape[0] - more} sequences and {plan.tile}, the call has "
                    f"{sizes.batch} and {tile}" if splits is None else "splits and a plan both divide the keys",
                    expected="decode_plan of the arguments of this call, and no splits", found="another plan",
                    hint="make a plan with the tensors of this call")
