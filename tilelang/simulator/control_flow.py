"""Control flow of both simulators: sequences, bindings, branches and loops on many lanes, each of which may take its own path.

A branch that only some lanes take runs under their mask.  A loop runs until no lane is left in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Assert, Bind, Break, Continue, Evaluate, For, If, Seq, While
from tilelang.ir.evaluate import Closure
from tilelang.target.atomics import Branch, Iterations, WarpRole
from tilelang.target.warp_groups import warps_of

from .context import Context
from .faults import fault
from .lanes import Action, LaneFrame, contains


def _seq(c: Context, s: Seq) -> Action:
    actions = [c.stmt(x) for x in s.stmts]
    if len(actions) == 1:
        return actions[0]
    if not contains(s, (Break, Continue), ("thread_return",)):

        def run(f: LaneFrame) -> None:
            for a in actions:
                a(f)

        return run

    def run_checked(f: LaneFrame) -> None:
        for a in actions:
            a(f)
            if not f.any_active():
                return

    return run_checked


def _bind(c: Context, s: Bind) -> Action:
    at, value = c.slot(s.var), c.expr(s.value)

    def run(f: LaneFrame) -> None:
        f.slots[at] = value(f)

    return run


def compile_if(c: Context, s: If) -> Action:
    """Lanes take one branch or the other; a branch that no lane takes is not executed."""
    cond = c.expr(s.cond)
    warp_role: tuple[WarpRole, ...] = ()
    if (warps := warps_of(s.cond)) is not None:
        warp_role = (WarpRole(*warps),)
    with c.having(inside=(*c.inside, Branch(id(s), True), *warp_role)):
        then = c.stmt(s.then)
    with c.having(inside=(*c.inside, Branch(id(s), False))):
        orelse = c.stmt(s.orelse) if s.orelse is not None else None
    return branch(cond, then, orelse)


def branch(cond: Closure, then: Action, orelse: Action | None) -> Action:
    """The action of an If whose condition and branches are already compiled."""

    def run(f: LaneFrame) -> None:
        c = cond(f)
        if c.ndim == 0:
            if c:
                then(f)
            elif orelse is not None:
                orelse(f)
            return
        old = f.mask
        yes = c if old is None else c & old
        no = ~c if old is None else ~c & old
        if not no.any():
            then(f)
            return
        if not yes.any():
            if orelse is not None:
                orelse(f)
            return
        f.mask = yes
        then(f)
        left = f.mask
        f.mask = no
        if orelse is not None:
            orelse(f)
        # A branch without break or return leaves its mask object unchanged.
        f.mask = old if left is yes and f.mask is no else left | f.mask

    return run


def _body(c: Context, s: For | While) -> Action:
    unordered = (Iterations(id(s)),) if isinstance(s, For) and s.plan.independent else ()
    with c.having(in_while=isinstance(s, While), inside=(*c.inside, *unordered)):
        return c.stmt(s.body)


def _for(c: Context, s: For) -> Action:
    at, start, extent = c.slot(s.var), c.expr(s.start), c.expr(s.extent)
    body = _body(c, s)
    leaves = contains(s.body, (Break, Continue), ("thread_return",))

    def run(f: LaneFrame) -> None:
        first, count = np.asarray(start(f)), np.asarray(extent(f))
        dt = first.dtype.type
        if count.ndim == 0 and not leaves:
            for k in range(int(count)):
                f.slots[at] = first + dt(k)
                body(f)
            return

        def entering(k: int, alive: np.ndarray) -> np.ndarray:
            f.slots[at] = first + dt(k)
            return alive & (count > k)

        _iterate(f, entering, body)

    return run


def _while(c: Context, s: While) -> Action:
    cond, body = c.expr(s.cond), _body(c, s)

    def run(f: LaneFrame) -> None:
        def entering(k: int, alive: np.ndarray) -> np.ndarray:
            f.mask = alive
            return alive & cond(f)

        _iterate(f, entering, body)

    return run


def _iterate(f: LaneFrame, entering: Callable[[int, np.ndarray], np.ndarray], body: Action) -> None:
    """Run a body until no lane is left.  entering: the lanes, of those that are left, that execute iteration k."""
    old, outer = f.mask, f.leaving
    alive, k = f.active(), 0
    f.leaving = np.zeros(f.lanes, bool)
    while alive.any() and (alive := entering(k, alive)).any():
        f.mask, k = alive, k + 1
        body(f)
        alive = alive & ~f.leaving
        if f.exited is not None:
            alive = alive & ~f.exited
    # After the loop: every lane that entered it and has not returned.
    f.leaving, f.mask = outer, old if f.exited is None else ~f.exited if old is None else old & ~f.exited


def _break(c: Context, s: Break) -> Action:
    def run(f: LaneFrame) -> None:
        if f.leaving is None:
            raise fault("sim-unsupported", "break outside a serial loop",
                        expected="a serial loop around break", found="none", span=s.span)
        f.leaving = f.leaving | f.active()
        f.mask = np.zeros(f.lanes, bool)

    return run


def _continue(c: Context, s: Continue) -> Action:
    def run(f: LaneFrame) -> None:
        f.mask = np.zeros(f.lanes, bool)

    return run


def _assert(c: Context, s: Assert) -> Action:
    cond = c.expr(s.cond)

    def run(f: LaneFrame) -> None:
        holds = cond(f)
        ok = bool(holds) if holds.ndim == 0 else bool((holds if f.mask is None else holds[f.mask]).all())
        if not ok:
            raise fault("sim-assert", s.message, span=s.span)

    return run


def evaluate(c: Context, s: Evaluate) -> Action:
    """A call whose result is not used."""
    c.discarded = s.call.args
    fn = c.expr(s.call)

    def run(f: LaneFrame) -> None:
        fn(f)

    return run


CONTROL_FLOW: dict[type, Callable[[Any, Any], Action]] = {
    Seq: _seq, Bind: _bind, If: compile_if, For: _for, While: _while, Break: _break, Continue: _continue, Assert: _assert,
    Evaluate: evaluate,
}  # fmt: skip
