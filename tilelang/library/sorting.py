"""Sorts of rows inside of kernels: tile programs that other tile programs call, and the texts of whole-tensor programs.

Each element is one integer, an *item*: its key, the greatest first, above its index counted from the end.  So no two items are
equal, and of equal keys the first stands first.  A row of items lies in shared memory, at places that keep threads out of each
other's banks.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

RUN = 1024  # items that a block sorts by itself, where rows lie in memory


@T.macro
def _carry(items: Any, kept: Any, low: Any, back: bool) -> None:
    """Items to registers, or back: number i of thread t holds the place whose bits from `low` on are i, the others t."""
    rows, threads, each = kept.shape
    for i in T.unroll(each):
        for r, t in T.Parallel(rows, threads):
            place = (t >> low << low) * each + (t & (1 << low) - 1) + (i << low)
            if back:
                items[r, place + place // 16] = kept[r, t, i]
            else:
                kept[r, t, i] = items[r, place + place // 16]


@T.macro
def _steps(kept: Any, size: Any, low: Any, least: Any, width: int) -> None:
    """Items in registers change places where they are not in the order of blocks of 2 ** (size + 1): at all distances of a
    thread's own bits, from `least` on."""
    rows, threads, each = kept.shape
    for k in T.unroll(width):
        near = 1 << width - 1 - k
        if least <= low + width - 1 - k and low + width - 1 - k <= size:
            for i in T.unroll(each // 2):
                for r, t in T.Parallel(rows, threads):
                    first = i // near * 2 * near + i % near
                    place = (t >> low << low) * each + (t & (1 << low) - 1) + (first << low)
                    a, b = kept[r, t, first], kept[r, t, first + near]
                    wrong = (a < b) != (place >> size + 1 & 1 == 1)
                    kept[r, t, first] = T.if_then_else(wrong, b, a)
                    kept[r, t, first + near] = T.if_then_else(wrong, a, b)


@T.macro
def sort_items(items: Any, n: int, each: int) -> None:
    """Sorts the first n items of each row by a bitonic network, the greatest first.  Item p stands at p + p // 16.

    items: (rows, n + n // 16) in shared memory.  n, each: powers of two; a thread holds `each` items in registers, whose
    numbers are some bits of a place: steps of these distances need no other thread.  Then the items change threads.
    """
    rows, bits, width = items.shape[0], n.bit_length() - 1, each.bit_length() - 1
    kept = T.alloc_fragment((rows, n // each, each), items.dtype)
    _carry(items, kept, 0, False)
    for size in T.serial(width):
        _steps(kept, size, 0, 0, width)
    _carry(items, kept, 0, True)
    for more in T.serial(bits - width):
        merged = width + more
        for g in T.unroll(-(-bits // width)):
            least = (bits - 1) // width * width - g * width
            low = T.min(least, bits - width)
            if least <= merged:
                _carry(items, kept, low, False)
                _steps(kept, merged, low, least, width)
                _carry(items, kept, low, True)


@T.macro
def sorted_order(items: Any, order: Any, n: int, each: int) -> None:
    """order[r, p]: the index of the p-th greatest of the n items of a row, which are sorted (see sort_items)."""
    sort_items(items, n, each)
    for r, p in T.Parallel(*order.shape):
        order[r, p] = n - 1 - T.cast(items[r, p + p // 16] & n - 1, "int32")


@T.macro
def order_of_keys(keys: Any, order: Any) -> None:
    """order[r, p]: the index of the p-th greatest key of row r, of equal ones the first.  Rows of any length.

    keys: (rows, n) int32.  order: (rows, up to n) int32.  Tiles of items are sorted, then pairs of sorted runs are merged until
    one is left: the place of an item is that in its own run and the number of greater ones in the other.
    """
    rows, n = keys.shape
    items = T.alloc_global((2, rows, n), "int64")
    with T.Kernel(T.ceildiv(n, RUN), rows, threads=128) as (b, r):
        tile = T.alloc_shared((1, RUN + RUN // 16), "int64")
        for p in T.Parallel(RUN):
            item = T.cast(keys[r, b * RUN + p], "int64") << T.int64(32) | T.cast(n - 1 - b * RUN - p, "int64")
            tile[0, p + p // 16] = T.if_then_else(b * RUN + p < n, item, T.int64(-(1 << 63)))
        sort_items(tile, RUN, 16)
        for p in T.Parallel(RUN):
            if b * RUN + p < n:
                items[0, r, b * RUN + p] = tile[0, p + p // 16]
                if b == 0 and n <= RUN and p < order.shape[1]:
                    order[r, p] = n - 1 - T.cast(tile[0, p + p // 16], "int32")
    for k in T.serial(31 - RUN.bit_length() + 1):
        if RUN << k < n:
            with T.Kernel(T.ceildiv(n, 256), rows, threads=256) as (b, r):
                low, high = T.alloc_fragment((256,), "int32"), T.alloc_fragment((256,), "int32")
                mine = T.alloc_fragment((256,), "int64")
                for t in T.Parallel(256):
                    other = ((b * 256 + t) // (RUN << k) ^ 1) * (RUN << k)
                    mine[t] = items[k % 2, r, T.min(b * 256 + t, n - 1)]
                    low[t] = 0
                    high[t] = T.max(T.min(n - other, RUN << k), 0)
                for _ in T.serial(k + RUN.bit_length()):
                    for t in T.Parallel(256):
                        other = ((b * 256 + t) // (RUN << k) ^ 1) * (RUN << k)
                        middle = (low[t] + high[t]) // 2
                        if low[t] < high[t]:
                            greater = items[k % 2, r, T.min(other + middle, n - 1)] > mine[t]
                            low[t] = T.if_then_else(greater, middle + 1, low[t])
                            high[t] = T.if_then_else(greater, high[t], middle)
                for t in T.Parallel(256):
                    place = (b * 256 + t) // (RUN << k + 1) * (RUN << k + 1) + (b * 256 + t) % (RUN << k) + low[t]
                    if b * 256 + t < n:
                        items[(k + 1) % 2, r, place] = mine[t]
                        if RUN << k + 1 >= n and place < order.shape[1]:
                            order[r, place] = n - 1 - T.cast(mine[t], "int32")


@T.macro
def selected_order(items: Any, order: Any) -> None:
    """As sorted_order, for few places: each step finds the greatest item below the one before.  items: (rows, 2 ** k)."""
    rows, n = items.shape
    left, best = T.alloc_fragment(items.shape, items.dtype), T.alloc_fragment((rows,), items.dtype)
    T.fill(best, (1 << items.dtype.bits - 1) - 1)
    for p in T.serial(order.shape[1]):
        for r, j in T.Parallel(rows, n):
            left[r, j] = T.if_then_else(items[r, j] < best[r], items[r, j], T.cast(-(1 << items.dtype.bits - 1), items.dtype))
        T.reduce_max(left, best, dim=1)
        for r in T.Parallel(rows):
            order[r, p] = n - 1 - T.cast(best[r] & n - 1, "int32")
