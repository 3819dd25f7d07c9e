"""Warn about T.Parallel iterations that store different values to one element.

Enabled by TILELANG_ENABLE_DATA_RACE_CHECK=1 or tl.disable_data_race_check=False.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from tilelang.arith import simplify
from tilelang.env import env, is_truthy
from tilelang.errors import TileLangError, register_warning, warn
from tilelang.ir import (Bind, Const, Expr, Func, If, Load, Parallel, Store, Var, free_vars, contains, inner, is_const,
                         remember, statements, substitute, walk, DYNAMIC, GLOBAL, STATIC)
from tilelang.ir.evaluate import evaluate

from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.effects import updated_element

log = logging.getLogger("tilelang.transform")
POINTS = 1 << 18  # loops of more iterations are skipped
register_warning("data-race", "iterations of T.Parallel store different values to one element")
_HINT = "give each iteration separate elements, or use T.atomic_add"
_OF_ALL = (GLOBAL, STATIC, DYNAMIC)


@pass_(needs=TILE)
def check_races(func: Func, cx: PassContext) -> Func:
    """Log a warning for each store of a T.Parallel loop in which two iterations store different values to one element.

    Changes nothing. Covers loops of constant extents whose indices read no memory. Conditions that read memory count as
    true, so a warning may concern iterations that never run. Values read from memory count as different where they are
    read from different places. Plain accesses beside atomic updates get a warning where memory decides which elements.
    """
    asked = cx.config.get(PassConfigKey.TL_DISABLE_DATA_RACE_CHECK.value)
    if not (is_truthy(env.TILELANG_ENABLE_DATA_RACE_CHECK) if asked is None else not asked):
        return func
    for s in statements(func.body):
        if isinstance(s, Parallel):
            _beside_updates(s)
            extents = [int(e.value) for e in s.extents if is_const(e)]  # type: ignore[attr-defined]
            if len(extents) == len(s.extents) and 1 < math.prod(extents) <= POINTS:
                axes = np.indices(extents).reshape(len(extents), -1)
                _follow(s.body, dict(zip(s.vars, axes)), np.ones(axes.shape[1], bool), {}, s)
    return func


def _beside_updates(loop: Parallel) -> None:
    """Warn where iterations read or store elements that others may update atomically, with indices read from memory.

    Equal index expressions are the usual guard of an update (`if x > M[k]: T.atomic_max(M[k], x)`) and get no warning.
    """
    bound: dict[Var, Expr] = {}
    for s in walk(loop.body, Bind):
        remember(bound, s)

    def place(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(simplify(substitute(i, bound)) for i in indices)

    updates = {e.buffer: place(e.indices) for c in walk(loop.body) if (e := updated_element(c)) is not None}
    for x in walk(loop.body):
        if not isinstance(x, (Load, Store)) or x.buffer not in updates:
            continue
        mine, theirs = place(x.indices), updates[x.buffer]
        if mine != theirs and any(isinstance(n, Load) for i in (*mine, *theirs) for n in walk(i)):
            warn("data-race", f"Data race detected: iterations of T.Parallel may {'read' if isinstance(x, Load) else 'store'} "
                 f"elements of `{x.buffer.name}` that others update atomically", _HINT, x.span or loop.span, log)
            return


def _follow(s: Any, points: dict[Var, np.ndarray], live: np.ndarray, bound: dict[Var, Expr], loop: Parallel) -> None:
    if isinstance(s, Bind):
        remember(bound, s)
    elif isinstance(s, Store):
        if s.buffer.scope_name in _OF_ALL:
            _check(s, points, live, bound, loop)
    elif isinstance(s, If):
        cond = _values(substitute(s.cond, bound), points)
        for part, holds in ((s.then, cond), (s.orelse, None if cond is None else ~cond.astype(bool))):
            if part is not None:
                _follow(part, points, live if holds is None else live & holds.astype(bool), dict(bound), loop)
    else:
        for x in inner(s):
            _follow(x, points, live, bound, loop)


def _values(e: Expr, points: dict[Var, np.ndarray]) -> np.ndarray | None:
    """The value in each iteration, with other variables at 0; None where it reads memory or cannot be computed."""
    if contains(e, Load):
        return None
    others = {v: 0 for v in free_vars(e) - set(points)}
    try:
        count = next(iter(points.values())).shape
        return np.broadcast_to(np.asarray(evaluate(e, {**others, **points})), count)
    except (TileLangError, TypeError):
        return None


def _check(s: Store, points: dict[Var, np.ndarray], live: np.ndarray, bound: dict[Var, Expr], loop: Parallel) -> None:
    at = [_values(substitute(i, bound), points) for i in s.indices if i.dtype.lanes == 1]
    if len(at) != len(s.indices) or any(a is None for a in at) or not live.any():
        return
    _, place = np.unique(np.stack([a[live] for a in at if a is not None]), axis=1, return_inverse=True)
    place = place.reshape(-1)
    first = np.zeros(place.max() + 1, np.int64)
    first[place[::-1]] = np.arange(len(place))[::-1]  # the first iteration that reaches each element
    again = first[place]
    if (again == np.arange(len(place))).all():
        return
    for part in _dependencies(substitute(s.value, bound)):
        got = _values(part, points)
        if got is not None:
            a = got[live]
            differs = (a != a[again]) & ~((a != a) & (a[again] != a[again]))
        else:
            used = [points[v][live] for v in free_vars(part) & set(points)]
            differs = np.logical_or.reduce([u != u[again] for u in used]) if used else np.zeros(len(place), bool)
        if np.any(differs):
            k = int(np.flatnonzero(differs)[0])
            who = [", ".join(f"{v.name}={int(p[live][i])}" for v, p in points.items()) for i in (int(again[k]), k)]
            warn("data-race", f"Data race detected: iterations ({who[0]}) and ({who[1]}) of T.Parallel store different values "
                 f"in `{s.buffer.name}`", _HINT, s.span or loop.span, log)
            return


def _dependencies(value: Expr) -> list[Expr]:
    """The expressions that a value depends on: itself, or the indices of what it reads where it reads memory."""
    loads = list(walk(value, Load))
    if not loads:
        return [value]
    if isinstance(value, Load):
        return [i for i in value.indices if not isinstance(i, Const)]
    return [value]
