"""Tell TMA and wgmma which swizzled boxes a program's layouts and T.tma_copy ask for."""

from __future__ import annotations

from tilelang.arith import divisible
from tilelang.ir import (Buffer, Func, Launch, Region, convert, replace, rewrite_launches, substitute, walk, with_options,
                         SHARED)
from tilelang.layout import Layout, box_width, swizzled_box_layout
from tilelang.layout.swizzled_boxes import WIDTHS
from tilelang.ops import Copy
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_store import copied_tile

from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def given_boxes(func: Func, cx: PassContext) -> Func:
    """Give shared tiles with a layout of the user the fact `box_width`: the bytes of a row of its swizzled boxes, or 0.

    Before: Launch(layouts=((S, lambda i, j: …),)): copy(A[...], S)           # S: (64, 64) float16, 64-byte swizzle
    After:  Launch(layouts=((S, 64-byte swizzled boxes),)): copy(A[...], S)   # S: BufferFacts(box_width=64)
    TMA and wgmma use these boxes. They leave tiles of width 0 to other instructions. A tile whose layout is the one that they
    would choose themselves needs no fact.  Tiles of which T.tma_copy moves some columns have the widest boxes of which each
    slice is a number: copy(A[...], S[:, 0:32]) those of 64 bytes.
    """
    return rewrite_launches(func, _marked)


def _marked(launch: Launch) -> Launch:
    marks = {b: replace(b, facts=b.facts.having(box_width=w)) for b, w in _sliced(launch).items()}
    layouts = []
    for b, layout in launch.plan.layouts:
        if b.scope_name in SHARED and b.is_static and len(b.shape) > 1 and isinstance(layout, Layout):
            bits = b.dtype.bits * b.dtype.lanes
            layout, width = next(((boxes, w) for w in WIDTHS if b.shape[-1] * bits % (w * 8) == 0 and
                                  (boxes := swizzled_box_layout(tuple(b.shape), bits, w)) == layout), (layout, 0))
            if width != box_width(b.shape[-1], bits):
                marks[b] = replace(b, facts=b.facts.having(box_width=width))
        layouts.append((b, layout))
    if not marks:
        return launch
    return substitute(with_options(launch, layouts=tuple(layouts)), marks)  # type: ignore[no-any-return]


def _sliced(launch: Launch) -> dict[Buffer, int]:
    """The bytes of a row of the boxes of tiles that T.tma_copy moves in slices, where these are not the widest boxes."""
    slices: dict[Buffer, list[Region]] = {}
    for n in walk(launch.body, Copy):
        if n.plan.by_hand and not is_row(n):
            slices.setdefault(copied_tile(n).buffer, []).append(copied_tile(n))
    out = {}
    for b, tiles in slices.items():
        bits = b.dtype.bits * b.dtype.lanes
        fits = (w for w in WIDTHS if all(divisible(convert(n), w * 8 // bits) for n in (
            b.shape[-1], *(x for t in tiles for x in (t.mins[-1], t.extents[-1])))))
        width = next(fits, 0)
        if width and width != box_width(int(b.shape[-1]), bits) and not any(x.data is b.data for x, _ in launch.plan.layouts):
            out[b] = width
    return out


__all__ = ["given_boxes"]
