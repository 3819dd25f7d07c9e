"""Parallel loops that accumulate into fragments or memory, where no single work partition of their points fits.

    for i, j in T.Parallel(64, 32):              for i, j in T.Parallel(64, 32):
        rows[i] += A[i, j]                ->         rows[i] += A[i, j]
        most[j] = T.max(most[j], A[i, j])        for i, j in T.Parallel(64, 32):
                                                     most[j] = T.max(most[j], A[i, j])

All points that update one element of an accumulator must run in one thread.  Accumulators that are indexed by different
loop variables get loops of their own.  In a loop with one accumulator, each thread runs in order the dimensions that do
not select the accumulator's element (both dimensions for `acc[j % 8]`).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tilelang.ir import (EMPTY, Bind, Buffer, Call, Expr, For, If, Load, Seq, Stmt, Store, Var, children, contains, inner,
                         replace, seq, walk, FRAGMENT)
from tilelang.layout.distinct import meets_several
from tilelang.ops.distribute import index_values
from tilelang.target.intrinsics import is_pure

from ..analysis.distributed_loop import accesses

_MOST_POINTS = 1 << 20  # points whose accumulator elements are compared; in larger loops one thread runs all points


def accumulates(s: Any) -> bool:
    """Whether s is an accumulation `X[…] = f(X[…], …)`."""
    return isinstance(s, Store) and any(_own(s, y) for y in walk(s.value))


def _own(s: Store, y: Any) -> bool:
    return isinstance(y, Load) and y.buffer is s.buffer and y.indices == s.indices


def split_accumulations(vars: tuple[Var, ...], body: Stmt) -> list[Stmt]:
    """The bodies of several loops that are equivalent to one loop over body, all non-accumulating statements first.

    Returns just [body] where the loop may not be split.  Iterations must be independent except for the accumulators.
    """
    if not all(isinstance(x, (Seq, If, For, Bind, Store)) for x in walk(body, Stmt)) or \
            not all(is_pure(x.op) for x in walk(body, Call)):
        return [body]
    accumulations = [x for x in walk(body, Store) if accumulates(x)]
    groups: dict[frozenset[Var], set[Buffer]] = {}
    for x in accumulations:
        groups.setdefault(frozenset(v for v in vars for i in x.indices if any(y is v for y in walk(i))), set()).add(x.buffer)
    of_one_group = sum(map(len, groups.values())) == len({b for bs in groups.values() for b in bs})
    rest = _restricted(body, lambda s: not accumulates(s))
    if len(groups) < 2 and not _fills_conditionally(rest) or not of_one_group or not _wait(body, accumulations):
        return [body]
    parts = [_restricted(body, lambda s, bs=bs: accumulates(s) and s.buffer in bs) for bs in groups.values()]
    return [rest, *parts] if contains(rest, Store) else parts


def _fills_conditionally(rest: Stmt) -> bool:
    """Whether statements write elements of fragments under conditions: staged in one loop with the accumulation, the whole
    fragment would be read before."""
    return any(s.buffer.scope_name == FRAGMENT for branch in walk(rest, If) for s in walk(branch, Store))


def reads_under(vars: tuple[Var, ...], body: Stmt, buffer: Buffer) -> tuple[tuple[Var, ...], tuple[Expr, ...]] | None:
    """(a loop variable for each dimension, conditions) where a loop reads buffer[variables] alone, under these conditions."""
    found: dict[tuple[Any, tuple[Expr, ...]], None] = {}

    def visit(s: Stmt, conds: tuple[Expr, ...]) -> None:
        if isinstance(s, Seq):
            for x in s.stmts:
                visit(x, conds)
        elif isinstance(s, If) and s.orelse is None:
            found.update(dict.fromkeys((y.indices, conds) for y in walk(s.cond, Load) if y.buffer is buffer))
            visit(s.then, (*conds, s.cond))
        else:
            found.update(dict.fromkeys((y.indices, conds) for y in walk(s, Load) if y.buffer is buffer))

    visit(body, ())
    if len(found) != 1:
        return None
    (indices, conds), = found
    known = set(vars) - set(indices) | {x.var for x in walk(body, Bind, For)}
    plain = len(set(indices) & set(vars)) == len(indices) and not any(
        y in known or isinstance(y, Load) for c in conds for y in walk(c))
    return (indices, conds) if plain and conds else None


def _wait(body: Stmt, accumulations: list[Store]) -> bool:
    """Whether the accumulations may run after everything else in the body.

    That holds if nothing but an accumulation reads its element, and if whatever else the body writes is read for an
    accumulation (in its value, a binding or a condition) only after the last write.
    """
    totals = {s.buffer.data for s in accumulations}
    own = {id(y) for s in accumulations for y in walk(s.value) if _own(s, y)}
    found = [x for x, _ in accesses(body)]
    if any(x.buffer.data in totals and id(x) not in own and not accumulates(x) for x in found):
        return False
    written = [x.buffer.data for x in found if isinstance(x, Store) and not accumulates(x)]

    def visit(s: Stmt) -> bool:
        if isinstance(s, Store) and not accumulates(s):
            written.remove(s.buffer.data)
            return True
        if isinstance(s, For) and any(x.buffer.data in written for x in walk(s.body, Store)):
            return False  # the second loop reads what the first one has written
        if any(y.buffer.data in written for e in children(s) if isinstance(e, Expr) for y in walk(e, Load)):
            return False
        return all(map(visit, inner(s)))

    return visit(body)


def _restricted(s: Stmt, wanted: Any) -> Stmt:
    """The statement s reduced to the wanted stores and the bindings that they use."""
    match s:
        case Seq():
            left: list[Stmt] = []
            for x in reversed(s.stmts):
                x = _restricted(x, wanted)
                if x is not EMPTY and (not isinstance(x, Bind) or any(y is x.var for z in left for y in walk(z))):
                    left.append(x)
            return seq(*reversed(left), span=s.span) if left else EMPTY
        case If():
            then, orelse = _restricted(s.then, wanted), None if s.orelse is None else _restricted(s.orelse, wanted)
            if then is EMPTY and orelse in (None, EMPTY):
                return EMPTY
            return replace(s, then=then, orelse=None if orelse is EMPTY else orelse)
        case For():
            body = _restricted(s.body, wanted)
            return EMPTY if body is EMPTY else replace(s, body=body)
        case Store():
            return s if wanted(s) else EMPTY
    return s


def serial_dims(vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt) -> list[int]:
    """The dimensions that one thread must run in order so that no two threads accumulate into one element.

    Of all sufficient sets of dimensions it returns the one with the fewest points.
    """
    places: dict[Buffer, list[tuple[Any, list[tuple[Var, int]]]]] = {}
    for x, loops in accesses(body):
        if accumulates(x):
            places.setdefault(x.buffer, []).append((x, loops))
    everything = [d for d, n in enumerate(extents) if n > 1]
    subsets = [list(c) for k in range(len(everything) + 1) for c in itertools.combinations(everything, k)]
    for serial in sorted(subsets, key=lambda ds: math.prod(extents[d] for d in ds)):
        kept = [d for d in everything if d not in serial]
        if all(_distinct(vars, extents, kept, b, found) for b, found in places.items()):
            return serial
    return everything


def _distinct(vars: tuple[Var, ...], extents: tuple[int, ...], kept: list[int], b: Buffer, places: list[Any]) -> bool:
    """Whether points that differ along the kept dimensions accumulate into different elements of b."""
    if not kept:
        return True
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for x, loops in places:
        axes = [*zip(vars, extents), *loops]
        if math.prod(n for _, n in axes) > _MOST_POINTS:
            return False
        env = {v: np.arange(n).reshape([-1 if k == a else 1 for k in range(len(axes))]) for a, (v, n) in enumerate(axes)}
        # surrounding loops and blocks contribute the same to all points: any value will do
        env |= {v: np.zeros((), int) for i in x.indices for v in walk(i, Var) if v not in env}
        values = [index_values(i, env) for i in x.indices]
        if any(v is None for v in values):
            return False
        element: Any = 0
        for v, n in zip(values, b.shape):
            element = element * int(n) + v
        point: Any = 0
        for d in kept:
            point = point * extents[d] + env[vars[d]]
        both = np.broadcast_arrays(element, point, *env.values())[:2]
        pairs.append((both[0].ravel(), both[1].ravel()))
    elements, points = (np.concatenate(x) for x in zip(*pairs))
    return not meets_several(elements, points)
