"""Tell TMA and wgmma which swizzled boxes a program's layouts and T.tma_copy ask for, and which tiles TMA cannot move."""

from __future__ import annotations

import math
from typing import Any

from tilelang.arith import divisible
from tilelang.ir import (Alloc, Buffer, Expr, Func, Launch, Region, Stmt, convert, do, region_of, replace, rewrite,
                         rewrite_launches, seq, stmts_of, substitute, walk, with_options, GLOBAL, SHARED)
from tilelang.layout import Layout, box_width, linear_layout, swizzled_box_layout
from tilelang.layout.swizzled_boxes import WIDTHS
from tilelang.ops import AtomicTile, Copy, CopyPlan, Gemm
from tilelang.ops.tma_copy import is_row
from tilelang.ops.tma_boxes import copied_tile
from tilelang.target.tensor_map import STRIDE_ALIGN

from ..analysis.vectorize import bound_divisors
from ..framework.pass_ import TILE, PassContext, pass_


@pass_(needs=TILE)
def given_boxes(func: Func, cx: PassContext) -> Func:
    """Give shared tiles with a layout of the user the fact `box_width`: the bytes of a row of its swizzled boxes, or 0.

    Before: Launch(layouts=((S, lambda i, j: …),)): copy(A[...], S)           # S: (64, 64) float16, 64-byte swizzle
    After:  Launch(layouts=((S, 64-byte swizzled boxes),)): copy(A[...], S)   # S: BufferFacts(box_width=64)
    TMA and wgmma use these boxes. They leave tiles of width 0 to other instructions. A tile whose layout is the one that they
    would choose themselves needs no fact.  Tiles of which T.tma_copy moves some columns have the widest boxes of which each
    slice is a number: copy(A[...], S[:, 0:32]) those of 64 bytes.

    Where the layout of a tile is not made of boxes, the threads that execute a T.tma_copy copy it before they go on, and a
    T.wgmma_gemm multiplies a copy of the tile:
    Before: tma_copy(A[...], S, bar); arrive(bar)             Before: wgmma_gemm(S, B, c)
    After:  copy(A[...], S); sync; arrive(bar)                After:  wgmma_wait(0); copy(S, S_boxes); wgmma_gemm(S_boxes, B, c)
    The barrier expects no bytes then: the arrival that the program makes after the copy publishes the tile.

    The innermost coordinate of a TMA box must be a multiple of 16 bytes. With any other coordinate loads and stores fault on an
    H200 ("illegal instruction"), whatever the swizzle. Other coordinates are free. Copies and tile atomics whose first column
    may be no such multiple get the attr `unaligned_columns`. All code that chooses TMA tests it (ops/tma.py, ops/tma_store.py,
    ops/tma_copy.py).
    """
    func = rewrite_launches(func, lambda launch: _by_threads(_marked(launch)))
    facts = bound_divisors(func.body)

    def unaligned(x: Any) -> Any:
        columns = any(unaligned_columns(r, facts) for r in (x.dst, getattr(x, "src", None)))
        return with_options(x, unaligned_columns=True) if columns else None

    return replace(func, body=rewrite(func.body, unaligned, Copy, AtomicTile))


def unaligned_columns(r: Any, facts: dict[Expr, int]) -> bool:
    """Whether a region of a global tensor may start at a column that is not a multiple of 16 bytes. facts: known divisors of
    variables."""
    if not isinstance(r, Region) or r.buffer.scope_name != GLOBAL:
        return False
    unit = STRIDE_ALIGN * 8 // math.gcd(r.dtype.bits, STRIDE_ALIGN * 8)
    return not divisible(r.mins[-1], unit, facts)


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
    if not marks and all(new is old for (_, new), (_, old) in zip(layouts, launch.plan.layouts)):
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


def _by_threads(launch: Launch) -> Launch:
    """The launch with what names TMA or wgmma done through threads for tiles whose layouts have no boxes."""
    given = {b: layout for b, layout in launch.plan.layouts if b.scope_name in SHARED}
    staged: list[Stmt] = []
    notes: dict[str, None] = {}
    why = "its layout is not made of swizzle atoms"

    def boxes(region: Region) -> tuple[Region, tuple[Stmt, ...]]:
        """(an operand of wgmma in boxes, the statements that copy it there)."""
        b = region.buffer
        if given.get(b) is None or b.facts.box_width != 0:
            return region, ()
        shape = tuple(region.extents[-2:])
        tile = Buffer(f"{b.name}_boxes", shape, b.dtype, b.scope_name, span=b.span)
        whole = region_of(tile, region.span)
        staged.append(Alloc(tile, span=b.span))
        notes[f"T.wgmma_gemm multiplies a copy of `{b.name}`: {why}"] = None
        return whole, (Copy(region, whole, plan=CopyPlan(disable_tma=True, prefer_instruction="sync"), span=region.span),)

    def changed(x: Copy | Gemm | AtomicTile) -> Stmt | None:
        if isinstance(x, AtomicTile):
            if not isinstance(x.value, Region) or not x.plan.use_tma or x.value.buffer not in given or \
                    x.value.buffer.facts.box_width != 0:
                return None
            notes[f"T.atomic_{x.kind} of `{x.value.buffer.name}` is done by threads: {why}"] = None
            return with_options(x, use_tma=False)  # type: ignore[no-any-return]
        if isinstance(x, Gemm):
            if x.plan.wait != -1:
                return None
            (left, copy_left), (right, copy_right) = boxes(x.a), boxes(x.b)
            copies = (*copy_left, *copy_right)  # an earlier wgmma may still read the copies
            return seq(do("wgmma_wait", n=0), *copies, replace(x, a=left, b=right), span=x.span) if copies else None
        if not x.plan.by_hand or x.plan.cluster_mask is not None or x.plan.leader_scope is not None:
            return None
        b = copied_tile(x).buffer
        layout = given.get(b)
        if layout is None or (layout == linear_layout(tuple(b.shape)) if is_row(x) else b.facts.box_width != 0):
            return None
        notes[f"T.tma_copy of `{b.name}` is done by threads: {why}"] = None
        plan = CopyPlan(disable_tma=True, prefer_instruction="sync", eviction_policy=x.plan.eviction_policy)
        return seq(do("sync_threads"), replace(x, plan=plan), do("sync_threads"), span=x.span)

    body = rewrite(launch.body, changed, Copy, Gemm, AtomicTile)
    if body is launch.body:
        return launch
    launch = replace(launch, body=seq(*staged, *stmts_of(body), span=launch.body.span))
    return with_options(launch, report=(*launch.plan.report, *notes))  # type: ignore[no-any-return]
