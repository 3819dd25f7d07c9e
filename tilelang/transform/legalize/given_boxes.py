"""Tell TMA and wgmma which swizzled boxes the layouts given for shared tiles consist of."""

from __future__ import annotations

from tilelang.ir import Buffer, Func, Launch, replace, rewrite_launches, substitute, with_options, SHARED
from tilelang.layout import Layout, box_width, swizzled_box_layout
from tilelang.layout.swizzled_boxes import WIDTHS

from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def given_boxes(func: Func, cx: PassContext) -> Func:
    """Give shared tiles with a layout of the user the fact `box_width`: the bytes of a row of its swizzled boxes, or 0.

    Before: Launch(layouts=((S, lambda i, j: …),)): copy(A[...], S)           # S: (64, 64) float16, 64-byte swizzle
    After:  Launch(layouts=((S, 64-byte swizzled boxes),)): copy(A[...], S)   # S: BufferFacts(box_width=64)
    TMA and wgmma use these boxes. They leave tiles of width 0 to other instructions. A tile whose layout is the one that they
    would choose themselves needs no fact.
    """
    return rewrite_launches(func, _marked)


def _marked(launch: Launch) -> Launch:
    marks: dict[Buffer, Buffer] = {}
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


__all__ = ["given_boxes"]
