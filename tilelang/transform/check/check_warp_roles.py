"""Reject barriers of the grid and votes of the block inside a branch by warp group (T.ws)."""

from __future__ import annotations

from tilelang.errors import error
from tilelang.ir import Func, If, Launch, Stmt, inner, walk
from tilelang.ir.expr import Call
from tilelang.target.warp_groups import holds_in, warps_in

from ..analysis.statements import BARRIERS
from ..framework.pass_ import TILE, PassContext, pass_

_WHOLE = BARRIERS - {"sync_threads"}  # sync_threads in a warp role counts only its threads


@pass_(needs=TILE)
def check_warp_roles(func: Func, cx: PassContext) -> Func:
    """Reject votes of the block and barriers of the grid that only some warps reach, for every target.

    Raises collective-divergent. On a device the groups that get there would wait for the others, or would be counted with
    groups that vote about something else.
    """
    for n in walk(func, Launch):
        _stmt(n.body, warps_in(n), None)
    return func


def _stmt(s: Stmt, warps: tuple[int, ...], branch: If | None) -> None:
    """Check a statement. warps: those that reach it. branch: the enclosing branch that the others do not take."""
    if isinstance(s, If):
        for part, wanted in ((s.then, True), (s.orelse, False)):
            if part is not None:
                come = tuple(w for w in warps if holds_in(s.cond, w) in (wanted, None))
                _stmt(part, come, s if come != warps else branch)
        return
    for x in inner(s):
        _stmt(x, warps, branch)
    if branch is None or inner(s):
        return
    for c in walk(s):
        if isinstance(c, Call) and c.op in _WHOLE:
            what = "grid" if c.op == "sync_grid" else "block"
            raise error("collective-divergent", f"T.{c.op} takes all threads of the {what}, and only some warps get here",
                        span=c.span or s.span, notes=((branch.span, "entered by some warps only"),),
                        hint="move it out of T.ws, or let the groups tell each other through shared memory and a barrier")
