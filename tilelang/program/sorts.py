"""The text of a sort along an axis of a tile: items (library/sorting.py) from the elements, and the call that sorts them."""

from __future__ import annotations

from math import prod

from .expr import Axis, Scalar, Tensor, const
from .nest import Unfit
from .plan import ROWS as LONGEST
from .plan import SORTED_BY_THREAD
from .rescale import is_float
from .writer import Tile, Writer

FEW = 32  # the best elements up to this number are selected one after another
WIDE = ("float64", "int64", "uint64", "uint32")
NARROW = ("int8", "uint8", "bool", "int16")


def order_of(w: Writer, t: Tensor, kept: tuple[Axis, ...], along: Axis, place: Axis) -> Tile:
    """The text of a sort: items from the elements, then a call of a program of the library.  Returns the tile of indices."""
    key, free = key_of(t)
    inside = w.within(t.over)
    key = key if inside is None else Scalar("where", (inside, key, const(-2**31)))
    w.ready(key)
    n, sizes = w.size(along), [w.size(a) for a in kept]
    full = 1 << max(1, (n - 1).bit_length())
    dtype = "int32" if full <= 1 << free else "int64"
    few = place.extent != along.extent and w.size(place) <= FEW
    items = w.new_buffer("items", (*sizes, full if few else full + full // 16), (*kept, along), dtype, "shared")
    order = w.new_buffer("order", (*sizes, w.size(place)), (*kept, place), "int32", "shared")
    j = along.name

    def fill(count: int, index: str, key: str) -> None:
        low = f"{full - 1} - {index}"
        item = (f"{key} & {-1 << free} | {low}" if dtype == "int32" else
                f'T.cast({key}, "int64") << T.int64(32) | T.cast({low}, "int64")')
        places = [*(a.name for a in kept), index if few else f"{index} + {index} // 16"]
        w.parallel((*kept, along), f"{items.name}[{', '.join(places)}] = {item}", sizes={along: count})

    if full > n:
        fill(full - n, f"({n} + {j})", str(-2**31))
    fill(n, j, w.printer().text(key, 9))
    flat = [b.name if len(sizes) == 1 else f"T.reshape({b.name}, ({prod(sizes)}, {b.shape[-1]}))" for b in (items, order)]
    each = max(SORTED_BY_THREAD, 1 << max(1, prod(sizes) * full // w.plan.threads).bit_length() - 1)
    w.say(f"selected_order({', '.join(flat)})" if few else f"sorted_order({', '.join(flat)}, {full}, {min(each, full)})")
    w.last[order.key] = w.count
    return order


def fits(t: Tensor, n: int) -> bool:
    """Whether a block holds the items of a row of n elements."""
    assert t.body is not None
    items = 1 << max(0, n - 1).bit_length()
    return t.body.dtype in WIDE or items <= (LONGEST[True] if items <= 1 << key_of(t)[1] else LONGEST[True] // 2)


def key_of(t: Tensor) -> tuple[Scalar, int]:
    """(an integer that orders the elements, the greatest first, NaN the least; how many of its low bits say nothing)."""
    assert t.body is not None
    x = t.body
    if x.dtype in WIDE:
        raise Unfit(f"sorting {x.dtype}")
    if not is_float(x.dtype):
        key = x if x.dtype == "int32" else Scalar("cast", (x,), "int32")
        key = key if t.attrs["largest"] else Scalar("not", (key,))
        return (Scalar("shl", (key, const(16))), 16) if x.dtype in NARROW else (key, 0)
    bits = Scalar("bits", (Scalar("add", (x, const(0.0, "float32")), "float32"),))  # -0.0 + 0.0 is 0.0
    low = Scalar("and", (Scalar("shr", (bits, const(31))), const(2**31 - 1)))
    key = Scalar("xor", (bits, low))
    key = key if t.attrs["largest"] else Scalar("not", (key,))
    nan = Scalar("isnan", (x,), "bool")
    return Scalar("where", (nan, const(-2**31), key)), {"float16": 13, "bfloat16": 16}.get(x.dtype, 0)
