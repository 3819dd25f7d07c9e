"""Pairing the dimensions of two regions for an element-wise loop over both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import (Expr, For, If, Parallel, ParallelPlan, Region, Stmt, Store, Var, binary, const, convert, fresh, load,
                         logical, FRAGMENT, GLOBAL, PRIVATE)

Dims = tuple[int | None, ...]


def unit(extent: Any) -> bool:
    """Whether an extent is the constant one."""
    return isinstance(extent, int) and extent == 1


def level(region: Region) -> int:
    """Distance from global memory: 2 for fragment and local, 1 for shared, 0 for global."""
    scope = region.buffer.scope_name
    return 0 if scope == GLOBAL else 1 if scope.startswith("shared") else 2


def base_side(dst: Region, src: Region | None) -> Region:
    """The region whose extents define the loop: the one nearer to the registers, the source where both are at one level."""
    return dst if src is None or level(dst) > level(src) else src


def iteration_space(dst: Region, src: Region | None) -> tuple[tuple[Any, ...], Dims, Dims]:
    """(loop extents, for each dst dimension the index of its loop or None, the same for src).

    Non-unit dimensions pair up in order.  The checks of the ops reject regions that do not pair up.
    """
    base = base_side(dst, src)
    walked = [e for e in base.extents if not unit(e)]
    of_dst, of_src = _moved(dst), _moved(src) if src is not None else ()
    n_dst, n_src = sum(d is not None for d in of_dst), sum(d is not None for d in of_src)
    if src is not None and n_dst != n_src:
        raise InternalError(f"cannot pair {tuple(src.extents)} of `{src.buffer.name}` with {tuple(dst.extents)} of "
                            f"`{dst.buffer.name}`: {n_src} and {n_dst} dimensions are walked")
    return tuple(walked) or (1,), of_dst, of_src


def differ(a: Region, b: Region) -> bool:
    """Whether the extents of two tiles surely differ, leaving out those of 1."""
    x, y = ([e for e in r.extents if not unit(e)] for r in (a, b))
    return len(x) != len(y) or any(isinstance(m, int) and isinstance(n, int) and m != n for m, n in zip(x, y))


def _moved(region: Region) -> Dims:
    out: list[int | None] = []
    at = 0
    for e in region.extents:
        out.append(None if unit(e) else at)
        at += not unit(e)
    return tuple(out)


def matched_indices(region: Region, dims: Dims, at: tuple[Any, ...]) -> tuple[Expr, ...]:
    """Indices into the region's buffer at a point of the iteration space."""
    return tuple(convert(m) if d is None else convert(m) + at[d] for m, d in zip(region.mins, dims))


def lower_elementwise(cx: Any, dst: Region, src: Region | None, value: Callable[[Any], Expr], span: Any,
                      **options: Any) -> Stmt:
    """Lower dst[...] = value(src[...]) to an element loop.

    A sub-tile of a fragment is lowered as a loop over the whole fragment with a predicate, so that each element is
    still handled by the threads that hold it.
    """
    extents, of_dst, of_src = iteration_space(dst, src)
    base = base_side(dst, src)
    of_each = any(r is not None and r.buffer.scope_name in PRIVATE for r in (dst, src))
    whole = base.buffer.scope_name == FRAGMENT and not base.is_full and not of_each
    if base is src and dst.buffer.scope_name == FRAGMENT and dst.is_full and tuple(
            n for n in dst.buffer.shape if not unit(n)) == tuple(e for e in extents if not unit(e)):
        whole = False  # the holders of all written elements execute the loop, so no old value has to be preserved
    if not whole:
        def body(at: tuple[Var, ...]) -> Stmt:
            got = None if src is None else load(src.buffer, matched_indices(src, of_src, at), span=src.span)
            return Store(dst.buffer, matched_indices(dst, of_dst, at), value(got), span=span)

        if of_each:
            return cx.private(extents, body, span=span)
        return cx.parallel(extents, body, span=span, **options)

    dims = of_dst if base is dst else of_src

    def element(at: tuple[Var, ...]) -> Stmt:
        inside: Expr = const(True)
        point: list[Any] = [None] * len(extents)
        for i, m, e, d in zip(at, base.mins, base.extents, dims):
            low = convert(m)
            inside = logical("and", inside, binary("eq", i, low) if unit(e) else logical("and", i >= low, i < low + e))
            if d is not None:
                point[d] = i - low
        where = tuple(at)
        rest = tuple(0 if p is None else p for p in point)
        dst_at = where if base is dst else matched_indices(dst, of_dst, rest)
        got = None
        if src is not None:
            src_at = where if base is src else matched_indices(src, of_src, rest)
            got = load(src.buffer, src_at, span=src.span)
        return If(inside, Store(dst.buffer, dst_at, value(got), span=span), span=span)

    return cx.parallel(tuple(base.buffer.shape), element, span=span)


class TileLoops:
    """The functions of a LowerContext that element-wise ops need, here as loops of the tile program."""

    def parallel(self, extents: tuple[Any, ...], body: Callable[..., Stmt], span: Any = None, loop_layout: Any = None,
                 width: int | None = None, **_: Any) -> Stmt:
        """A parallel loop of the block."""
        at = tuple(fresh(n) for n in "ijklmnpq"[:len(extents)])
        plan = ParallelPlan(coalesced_width=width, loop_layout=loop_layout)
        return Parallel(at, tuple(map(convert, extents)), body(at), plan=plan, span=span)

    def private(self, extents: tuple[Any, ...], body: Callable[..., Stmt], span: Any = None) -> Stmt:
        """A loop of each thread."""
        at = tuple(fresh(n) for n in "ijklmnpq"[:len(extents)])
        out = body(at)
        for v, n in zip(reversed(at), reversed(extents)):
            out = For(v, const(0), convert(n), "serial", out, span=span)
        return out
