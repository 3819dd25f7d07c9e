"""Give T.ballot in divergent code a mask of the lanes that reach it.

    if c:                         c1 = c; m = ballot_sync(c1)          # a vote of all lanes, before they diverge
        x = ballot(p)       ->    if c1:
                                      x = ballot_sync(p, m)

On a device a vote is undefined when its mask names lanes that do not reach it, and `__activemask()` is not guaranteed to
give all lanes of a branch. In a loop whose length differs between lanes the mask is a variable, updated in each iteration
by a vote of its lanes about which of them go on.
"""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (Alloc, Bind, Buffer, Call, Const, Expr, For, If, Launch, Seq, Stmt, Store, Var, While, binary, call,
                         cast, const, dtype, leaves, load, replace, rewrite, seq, unary, walk, with_inner, VARIABLE)

from ..analysis.divergence import Divergence
from ..framework.pass_ import TILE, PassContext, pass_

register("ballot-lanes", NotImplementedError, "T.ballot stands in a loop that lanes leave by break, continue or return",
         "vote with T.ballot_sync and the mask of the lanes that come, or leave the loop by its condition alone",
         expected="a place whose lanes are known")

_U32 = dtype("uint32")
_ZERO = (const(0),)


@pass_(needs=TILE, of=Launch)
def ballot_masks(n: Launch, cx: PassContext) -> Any:
    """Pass T.ballot in divergent code the mask of the lanes that reach it. Raises ballot-lanes."""
    return with_inner(n, lambda s: _Masks(Divergence(n)).stmt(s, None)) if n.num_threads > 1 and _votes(n.body) else None


def _votes(s: Stmt) -> bool:
    return any(n.op == "ballot" for n in walk(s, Call))


class _Masks:
    def __init__(self, d: Divergence) -> None:
        self.d = d

    def stmt(self, s: Stmt, mask: Expr | None) -> Stmt:
        """s with its votes rewritten. mask: the lanes that reach s, None for all."""
        if not _votes(s):
            return s
        match s:
            case Seq():
                return with_inner(s, lambda x: self.stmt(x, mask))  # type: ignore[no-any-return]
            case If():
                return self.branch(s, mask)
            case For() | While():
                return self.loop(s, mask)
        if mask is None:
            return s
        return rewrite(s, lambda n: replace(n, op="ballot_sync", args=(n.args[0], mask)) if n.op == "ballot" else None, Call)

    def branch(self, s: If, mask: Expr | None) -> Stmt:
        orelse = s.orelse
        if not self.d.divergent(s.cond) or isinstance(s.cond, Call) and s.cond.op == "in_warp_groups":  # or whole warps
            return with_inner(s, lambda x: self.stmt(x, mask))  # type: ignore[no-any-return]
        test = Var("taken", s.cond.dtype, span=s.span)
        out: list[Stmt] = [Bind(test, s.cond, span=s.span)]

        def arm(body: Stmt, cond: Expr) -> Stmt:
            if not _votes(body):
                return body
            lanes = Var("lanes", _U32, span=s.span)
            out.append(Bind(lanes, _named(cond, mask, s.span), span=s.span))
            return self.stmt(body, lanes)

        then = arm(s.then, test)
        other = None if orelse is None else arm(orelse, unary("not", test))
        return seq(*out, replace(s, cond=test, then=then, orelse=other), span=s.span)

    def loop(self, s: For | While, mask: Expr | None) -> Stmt:
        if not self.d.uneven(s):
            return with_inner(s, lambda x: self.stmt(x, mask))  # type: ignore[no-any-return]
        if leaves(s.body) or self.d.leaves_early(s.body):
            place = next(n.span for n in walk(s.body, Call) if n.op == "ballot")
            raise error("ballot-lanes", "T.ballot in a loop that some lanes leave by break, continue or return",
                        found="a loop that some lanes leave", span=place, notes=((s.span, "the loop"),))
        lanes = Buffer("lanes", (1,), _U32, VARIABLE, span=s.span)
        bounds: list[Stmt] = []
        if isinstance(s, For):  # the bounds are evaluated once, whatever the body changes
            start, extent = (_settled(e, name, bounds) for e, name in ((s.start, "start"), (s.extent, "count")))
            s = replace(s, start=start, extent=extent)
        first = s.cond if isinstance(s, While) else binary("gt", s.extent, const(0, s.extent.dtype))
        again = s.cond if isinstance(s, While) else binary(
            "lt", binary("add", binary("sub", s.var, s.start), const(1, s.var.dtype)), s.extent)
        now = load(lanes, _ZERO)
        body = seq(self.stmt(s.body, now), Store(lanes, _ZERO, _named(again, now, s.span), span=s.span))
        return seq(*bounds, Alloc(lanes, _named(first, mask, s.span), span=s.span), replace(s, body=body), span=s.span)


def _settled(e: Any, name: str, bounds: list[Stmt]) -> Expr:
    """A loop bound as a value that does not change: a variable bound in `bounds`, unless it is one already."""
    if isinstance(e, (Const, Var)):
        return e
    v = Var(name, e.dtype, span=e.span)
    bounds.append(Bind(v, e, span=e.span))
    return v


def _named(cond: Expr, mask: Expr | None, span: Any) -> Expr:
    """The lanes of a mask for which a condition holds."""
    every = Const(0xFFFFFFFF, _U32)
    return cast(call("ballot_sync", (cast(cond, "int32"), every if mask is None else mask), "uint64", span=span), "uint32")
