"""Find T.Parallel loops in which two iterations store different values to one element.

    for i, j in T.Parallel(32, 8):
        B[i] = j                        # rejected: it is not defined which of the eight values is kept

Iterations run in no order on a GPU but in order on the CPU, where the loop would seem to work. Values read from memory may
be equal: a warning tells of them where TILELANG_ENABLE_DATA_RACE_CHECK=1 or tl.disable_data_race_check=False asks for it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from tilelang.arith import simplify
from tilelang.env import env, is_truthy
from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import (Bind, Break, Call, Const, Continue, Expr, For, Func, If, Load, Parallel, Store, Var, While, contains,
                         free_vars, inner, is_const, remember, statements, substitute, DYNAMIC, GLOBAL, STATIC)

from ..analysis.disjoint import Iterations, alone
from ..analysis.statements import drop_continue
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

log = logging.getLogger("tilelang.transform")
register("parallel-overwrite", ValueError, "two T.Parallel iterations store different values in one element",
         "iterations run in no order: store in one of them under a condition, or use a serial loop",
         expected="one iteration that stores in an element")
register_warning("data-race", "iterations of T.Parallel store different values to one element")
POINTS = 1 << 18  # loops of more iterations are skipped
_HINT = "give each iteration separate elements, or use T.atomic_add"
_OF_ALL = (GLOBAL, STATIC, DYNAMIC)


@pass_(needs=TILE)
def check_races(func: Func, cx: PassContext) -> Func:
    """Raise "parallel-overwrite" for a store to global or shared memory that two iterations reach with different values.

    Changes nothing. Covers loops of constant extents. Stores whose index, condition or value depends on memory or on an
    argument are skipped. Before, where the user asks for it, a warning for each store by which two iterations may store
    different values in one element: conditions that read memory count as true, so it may concern iterations that never run;
    values read from memory count as different where they are read from different places.
    """
    asked = cx.config.get(PassConfigKey.TL_DISABLE_DATA_RACE_CHECK.value)
    loops = [(s, _Loop(s, False), _Loop(s, True)) for s in statements(func.body) if isinstance(s, Parallel)]
    if is_truthy(env.TILELANG_ENABLE_DATA_RACE_CHECK) if asked is None else not asked:
        for s, doubtful, _ in loops:
            doubtful.follow(s.body, (), {})
    for s, _, certain in loops:
        certain.follow(drop_continue(s.body), (), {})
    return func


class _Loop:
    """One parallel loop. Its iterations are enumerated only when a store is found that several of them may reach.

    certain: an error where two iterations certainly store different values; else a warning where they may.
    """

    def __init__(self, loop: Parallel, certain: bool) -> None:
        self.loop, self.certain, self.each = loop, certain, Iterations(loop, POINTS)
        self.moving = {v for v, n in zip(loop.vars, self.each.extents) if n != 1}

    def follow(self, s: Any, conds: tuple[tuple[Expr, bool], ...], bound: dict[Var, Expr]) -> None:
        """Check the stores below s. conds: enclosing conditions with their values. bound: names and their values."""
        if not self.each.few or self.each.count < 2:
            return
        match s:
            case Bind():
                remember(bound, s)
            case Store():
                if s.buffer.scope_name in _OF_ALL:
                    value, indices = substitute(s.value, bound), tuple(substitute(i, bound) for i in s.indices)
                    (self.reject if self.certain else self.warn)(s, value, indices, conds)
            case If():
                cond = substitute(s.cond, bound)
                self.follow(s.then, (*conds, (cond, True)), dict(bound))
                if s.orelse is not None:
                    self.follow(s.orelse, (*conds, (cond, False)), dict(bound))
            case For() if self.certain and (not (isinstance(s.extent, Const) and s.extent.value > 0) or
                                            contains(s.body, Break, Continue)):
                return  # the rest may not run, or only in part
            case While() if self.certain:
                return
            case _:
                for x in inner(s):
                    self.follow(x, conds, bound)

    def reject(self, s: Store, value: Expr, indices: tuple[Expr, ...], conds: tuple[tuple[Expr, bool], ...]) -> None:
        """Raise parallel-overwrite where two iterations reach s with different values."""
        if not self.plain(value) or alone(indices, self.moving) == self.moving:
            return  # no two iterations reach one element
        got, met = self.each.values(value), self.met(indices, conds)
        if got is None or met is None:
            return
        which, first = met
        for k in np.flatnonzero(_unequal(got[which], got[first]))[:4].tolist():
            pair = int(first[k]), int(which[k])
            if all(is_const(simplify(self.each.within(i, pair[0]) - self.each.within(i, pair[1])), 0) for i in indices):
                one, two = map(self.each.text, pair)
                raise error("parallel-overwrite", f"iterations ‹({one}) and ({two})› of the parallel loop store different "
                            f"values in one element of `{s.buffer.name}`", span=s.span or self.loop.span)

    def warn(self, s: Store, value: Expr, indices: tuple[Expr, ...], conds: tuple[tuple[Expr, bool], ...]) -> None:
        """Warn where two iterations may reach s with different values."""
        met = self.met(indices, conds)
        if met is None or (met[0] == met[1]).all():
            return
        which, first = met  # below: the value depends on itself, or on the indices of what it reads where it reads memory
        for part in [i for i in value.indices if not isinstance(i, Const)] if isinstance(value, Load) else [value]:
            got = self.each.values(part, calls=True)
            used = [self.each.points[v] for v in free_vars(part) & {*self.loop.vars}] if got is None else [got]
            differs = np.logical_or.reduce([_unequal(u[which], u[first]) for u in used]) if used else np.zeros(len(which), bool)
            if np.any(differs):
                k = int(np.flatnonzero(differs)[0])
                one, two = self.each.text(int(first[k])), self.each.text(int(which[k]))
                warn("data-race", f"Data race detected: iterations ({one}) and ({two}) of T.Parallel store different values "
                     f"in `{s.buffer.name}`", _HINT, s.span or self.loop.span, log)
                return

    def plain(self, value: Expr) -> bool:
        """Whether a value consists of the loop's variables and constants alone."""
        return free_vars(value) <= {*self.loop.vars} and not contains(value, Load, Call)

    def met(self, indices: tuple[Expr, ...], conds: tuple[tuple[Expr, bool], ...]) -> tuple[np.ndarray, np.ndarray] | None:
        """(iterations that reach a store, for each of them the first that reaches the same element); None if not known."""
        live = self.each.live(conds, self.certain)
        at = [self.each.values(i, calls=not self.certain) for i in indices]
        if live is None or not live.any() or any(a is None for a in at):
            return None
        which = np.flatnonzero(live)
        _, place = np.unique(np.stack([a[live] for a in at if a is not None]), axis=1, return_inverse=True)
        place = place.reshape(-1)
        first = np.zeros(place.max() + 1, np.int64)
        first[place[::-1]] = which[::-1]
        return which, first[place]


def _unequal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays differ; NaN is like NaN."""
    out: np.ndarray = (a != b) & ~((a != a) & (b != b))
    return out
