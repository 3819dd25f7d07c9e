"""Reject tile operations that write elements which they also read, unless each element is read and written in one step.

    V = T.reshape(S, (16, 64))
    T.copy(S[0:16, :], V[:, 32:64])         # rejected: rows of S are written before they are read
    T.copy(S[0:16, :], S[n:n + 16, :])      # rejected where n is not known to be 0, or 16 and more

The frontend rejects regions of one buffer that certainly overlap. Here are views, and places known only at run time.
"""

from __future__ import annotations

from typing import Any

from tilelang.arith import simplify
from tilelang.errors import error, register
from tilelang.ir import (Call, Expr, Func, Load, Region, Stmt, TileOp, Var, contains, convert, fresh, is_const, load, rewrite,
                         substitute, to_text, walk)
from tilelang.ops import Copy, Gemm, Transpose
from tilelang.ops.pairing import iteration_space, matched_indices

from ..analysis.guards import Around, visit_with_facts
from ..analysis.disjoint import Disjoint, Place
from ..framework.pass_ import TILE, PassContext, pass_

register("tile-overlap", ValueError, "a tile operation that writes memory which it reads", "write to another buffer",
         expected="operands that share no element with the result")


@pass_(needs=TILE)
def check_overlaps(func: Func, cx: PassContext) -> Func:
    """Raise "copy-overlap" or "tile-overlap" where the written tile of an operation is not proved to be disjoint from what it
    reads. Changes nothing.

    Copies and transposes may read an element in the step that writes it. GEMMs read all of their operands before they write.
    """
    return visit_with_facts(func, TileOp, _checked)


def _checked(op: TileOp, around: Around) -> Stmt:
    accesses = op.accesses()  # type: ignore[attr-defined]
    for w in accesses:
        if not w.writes:
            continue
        data = w.region.buffer.data
        for r in accesses:
            if r is w or r.region.buffer.data is not data or isinstance(op, Gemm):
                continue
            fine = _by_steps(op, around) if isinstance(op, (Copy, Transpose)) else _disjoint(w.region, r.region, around)
            if not fine:
                _reject(op, w.region, r.region)
        for x in walk(op, Load):
            if x.buffer.data is data and not _disjoint(x, w.region, around):
                _reject(op, w.region, x)
    return op


def _by_steps(op: Copy | Transpose, around: Around) -> bool:
    """Whether no two steps of a copy use one element. A step reads an element and writes another one, or the same."""
    extents, *dims = (op.space,) if isinstance(op, Transpose) else iteration_space(op.dst, op.src)
    at = tuple(fresh("e", "int32") for _ in extents)
    places = op.places(at) if isinstance(op, Transpose) else [matched_indices(r, d, at) for r, d in zip((op.dst, op.src), dims)]
    disjoint = Disjoint(around.analyzer(), dict(zip(at, map(convert, extents))), {})
    names = _Names(around)
    dst, src = (Place(r.buffer, tuple(map(names.of, i)), tuple(map(names.of, around.conds)))
                for r, i in zip((op.dst, op.src), places))
    return disjoint.proves(dst, src)


def _disjoint(a: Region | Load, b: Region, around: Around) -> bool:
    """Whether two regions, or an element and a region, share no element."""
    disjoint, names = Disjoint(around.analyzer(), None, {}), _Names(around)
    return disjoint.proves(_any_element(a, disjoint, names, around), _any_element(b, disjoint, names, around))


def _any_element(r: Region | Load, disjoint: Disjoint, names: _Names, around: Around) -> Place:
    if isinstance(r, Load):
        return Place(r.buffer, tuple(map(names.of, r.indices)), around.conds)
    return disjoint.element(r.buffer, (names.of(convert(m)) for m in r.mins), r.extents, around.conds)


class _Names:
    """One name for each value that is read from memory, and the values of bound names."""

    def __init__(self, around: Around) -> None:
        self.around = around
        self.values: dict[Expr, Var] = {}

    def of(self, e: Expr) -> Expr:
        def read(x: Any) -> Expr | None:
            return self.values.setdefault(x, fresh("value", x.dtype)) if x.dtype.lanes == 1 else None

        e = substitute(e, self.around.values)
        return rewrite(e, read, Load, Call) if contains(e, Load, Call) else e


def _reject(op: TileOp, w: Region, r: Region | Load) -> None:
    names = f"`{w.buffer.name}`" if r.buffer is w.buffer else f"`{r.buffer.name}` and `{w.buffer.name}`"
    if isinstance(op, (Copy, Transpose)) and isinstance(r, Region):
        what = "transpose" if isinstance(op, Transpose) else "copy"
        raise error("copy-overlap", f"T.{what}: source and destination are not proved to be disjoint in the memory of {names}",
                    found=f"{_text(r)} and {_text(w)}, which may share elements", span=op.span,
                    hint="copy through another buffer, or tell by a condition or T.assume that they are disjoint")
    read = f"`{to_text(load(r.buffer, r.indices))}`" if isinstance(r, Load) else _text(r)
    raise error("tile-overlap", f"T.{op.op_name} writes {_text(w)} and reads {read} of one memory, and they are not proved to "
                "be disjoint", found=f"{read} and {_text(w)}, which may share elements", span=op.span,
                hint="write to another buffer, or tell by a condition or T.assume that they are disjoint")


def _text(r: Region) -> str:
    at = ", ".join(to_text(m) if is_const(e, 1) else f"{to_text(m)}:{to_text(simplify(m + e))}"
                   for m, e in zip(map(convert, r.mins), map(convert, r.extents)))
    return f"`{r.buffer.name}[{at}]`"
