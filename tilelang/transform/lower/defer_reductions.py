"""Moves reductions over the lanes of a warp, or over all threads, out of a loop that needs their results only at its end.

    fill(total, 0)                                         fill(total, 0)
    for k in …:                                            for k in …:
        reduce_sum(S, part, dim=1)                 ->          reduce_sum(S, part, dim=1), each thread over its own elements
        for i in T.Parallel(n):                                for i in T.Parallel(n):
            total[i] = total[i] * f[i] + part[i]                   total[i] = total[i] * f[i] + part[i]
                                                           sum_copies(total)

A row of S lies in several lanes, and each of these lanes holds a copy of total[i] and part[i].  If every operation on
them is linear, with factors that are equal in all copies, then each copy may hold a partial sum instead, and the
shuffles and barriers that combine the copies move out of the loop.  This changes only the order of additions, which a reduction
leaves unspecified.

    reduce_max(S, most, dim=1)                             ->      reduce_max(S, most, dim=1), each thread over its own elements
    if syncthreads_or(most[0] > x): …                              if syncthreads_or(most[0] > x): …

The vote combines all threads anyway: any of the partial maxima is above x where the maximum is. A loop that subtracts something
from each element may stand between two maxima.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from tilelang.ir import (Binary, Bind, Break, Buffer, Call, Cast, Continue, Evaluate, Expr, Func, If, Launch, Load,
                         Parallel, Region, Seq, Stmt, Store, Var, const, inner, is_const, is_large, replace, rewrite,
                         rewrite_launches, seq, statements, stmts_of, substitute, walk, with_options, FRAGMENT)
from tilelang.ir.record import state
from tilelang.layout import THREAD, Fragment
from tilelang.ops import Fill, Reduce, SumCopies
from tilelang.ops.layouts import carried
from tilelang.ops.lower_reduce import split_at_warp
from tilelang.target import is_pure

from ..analysis.divergence import Divergence
from ..analysis.effects import Effect, effects, own_effects
from ..analysis.guards import summands
from ..framework.pass_ import TILE, PassContext, pass_

WARP = 32
_ADDITIVE = ("sum", "abssum")
_Path = tuple[tuple[Stmt, int], ...]  # (enclosing statement, index among its direct children), outermost first


@pass_(needs=TILE)
def defer_reductions(func: Func, cx: PassContext) -> Func:
    """Defer the lane reductions of each launch.  The module docstring describes the rewrite.

    Needs the layouts of fragments and of parallel loops.  Keeps every value except for the rounding of the sums.
    """
    return replace(func, body=rewrite_launches(func.body, lambda x: _left_to_votes(x) or _Accumulations(x).run()))


@state
class _Sum:
    """All statements that touch one accumulating fragment, as paths in program order.

    zeros: statements that clear it.  updates: statements after which it is linear in its old value.  uses: all others.
    reductions: the reductions that add to the fragment, or to a partial sum of it.
    """

    zeros: list[_Path] = field(default_factory=list)
    updates: list[_Path] = field(default_factory=list)
    uses: list[_Path] = field(default_factory=list)
    reductions: list[Reduce] = field(default_factory=list)


class _Accumulations:
    """The deferrable accumulations of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.divergence = launch, Divergence(launch)
        self.layouts: dict[Buffer, Any] = dict(launch.plan.layouts)
        self.leaves = list(_leaves(launch.body))

    def run(self) -> Launch | None:
        """The launch with its lane reductions deferred; None when there are none."""
        changed = {e.buffer for _, s, found in self.leaves for e in found if e.writes and not isinstance(s, Fill)}
        for total in sorted((b for b in changed if b.scope_name == FRAGMENT), key=lambda b: b.name):
            found = self._sum(total)
            place = None if found is None else _end(found)
            if found is not None and place is not None:
                out = self._deferred(total, found.reductions, *place)
                return _Accumulations(out).run() or out
        return None

    def _deferred(self, total: Buffer, reductions: list[Reduce], parent: Seq, at: int) -> Launch:
        """The launch with the copies of `total` summed after statement `at` of the sequence `parent`."""
        chosen = {id(r) for r in reductions}
        end = SumCopies(Region(total, tuple(const(0) for _ in total.shape), total.shape), span=reductions[0].span)

        def spread(x: Any) -> Any:
            return with_options(x, spread=True) if isinstance(x, Reduce) and id(x) in chosen else None

        done = [rewrite(s, spread, Reduce) for s in parent.stmts]
        changed = seq(*done[:at + 1], end, *done[at + 1:], span=parent.span)
        return replace(self.launch, body=rewrite(self.launch.body, lambda x: changed if x is parent else None, Seq))

    def _sum(self, total: Buffer) -> _Sum | None:
        """The use of a fragment as an accumulator; None where it is not an accumulation that may be deferred."""
        layout = self.layouts.get(total)
        if not isinstance(layout, Fragment) or not _in_lanes(layout) or total.dtype.bits < 32:
            return None
        out, parts, whole = _Sum(), set[Buffer](), set[Var]()
        for path, s, found in self.leaves:
            if not _touches(found, total):
                continue
            if isinstance(s, Fill) and s.dst.buffer is total and s.dst.is_full and _zero(s.value):
                out.zeros.append(path)
            elif isinstance(s, Reduce) and s.dst.buffer is total and not s.clear and self._over_row_lanes(s):
                out.updates.append(path)
                out.reductions.append(s)
            else:
                added = self._linear(s, total, layout) if isinstance(s, Parallel) else None
                (out.uses if added is None else out.updates).append(path)
                if added is not None:
                    parts |= added[0]
                    whole |= added[1]
        if any(part.data in whole for part in parts):
            return None
        for path, s, found in self.leaves:
            for part in parts:
                if isinstance(s, Reduce) and s.dst.buffer is part:
                    out.reductions.append(s)
                elif _touches(found, part) and path not in out.updates:
                    return None
        return out if out.reductions and len(out.zeros) == 1 else None

    def _over_row_lanes(self, op: Reduce) -> bool:
        """Whether the copies of the result are exactly the lanes that hold one row of the reduced fragment."""
        src, dst = self.layouts.get(op.src.buffer), self.layouts.get(op.dst.buffer)
        if op.kind not in _ADDITIVE or op.plan.spread or not isinstance(src, Fragment) or not isinstance(dst, Fragment):
            return False
        if src.copies or not op.dst.is_full or not op.src.is_full or op.src.buffer.data is op.dst.buffer.data:
            return False
        return carried(src.reduce(op.dim), tuple(int(n) for n in op.dst.buffer.shape)) == dst

    def _linear(self, loop: Parallel, total: Buffer, layout: Fragment) -> tuple[set[Buffer], set[Var]] | None:
        """(partial sums that a loop adds to `total`, storage of everything else it reads, which must not be partial sums).

        None where the new value of `total` is not linear in the old one.
        """
        if loop.plan.loop_layout != layout or not all(is_const(e, n) for e, n in zip(loop.extents, total.shape)):
            return None
        names: dict[Var, Expr] = {}
        stores: list[Store] = []
        for s in stmts_of(loop.body) or (loop.body,):
            if isinstance(s, Bind):
                names[s.var] = substitute(s.value, dict(names))
                if is_large(names[s.var]):
                    return None
            elif isinstance(s, Store):
                stores.append(substitute(s, dict(names)))
            else:
                return None
        mine = [s for s in stores if s.buffer.data is total.data]
        if len(mine) != 1 or mine[0].buffer is not total or mine[0].indices != loop.vars:
            return None
        whole = {b for s in stores if s is not mine[0] for e in (s.value, *s.indices) for b in _read(e)}
        changed = {s.buffer.data for s in stores}
        parts: set[Buffer] = set()
        for term, _ in summands(mine[0].value):
            factors, divisors = _factors(term)
            held = [x for x in factors if isinstance(x, Load) and x.indices == loop.vars and (
                x.buffer is total or x.buffer.data not in changed and self._is_lane_reduction(x.buffer, layout))]
            others = [x for x in (*factors, *divisors) if not held or x is not held[0]]
            if len(held) != 1 or not all(self._alike(x, loop, layout, changed) for x in others):
                return None
            parts.add(held[0].buffer)
            whole |= {b for e in others for b in _read(e)}
        return (parts - {total}, whole) if total in parts and total.data not in whole else None

    def _is_lane_reduction(self, b: Buffer, layout: Fragment) -> bool:
        """Whether a fragment holds only reductions over the lanes of the layout."""
        written = [s for _, s, found in self.leaves if any(e.writes and e.storage is b.data for e in found)]
        return self.layouts.get(b) == layout and bool(written) and all(
            isinstance(s, Reduce) and s.clear and s.dst.buffer is b and self._over_row_lanes(s) for s in written)

    def _alike(self, e: Expr, loop: Parallel, layout: Fragment, changed: set[Var]) -> bool:
        """Whether a factor is equal in all copies of an element."""
        for x in walk(e, Load, Call, Var):
            if isinstance(x, Load):
                same = x.buffer.scope_name == FRAGMENT and self.layouts.get(x.buffer) == layout
                alike = same and x.buffer.data not in changed and x.indices == loop.vars
            elif isinstance(x, Call):
                alike = is_pure(x.op) and not x.op.startswith("get_")
            else:
                alike = x in loop.vars or not self.divergence.divergent(x)
            if not alike:
                return False
        return True


def _left_to_votes(launch: Launch) -> Launch | None:
    """The launch without the lane reductions whose results only votes of the block compare; None where there are none."""
    layouts, found = dict(launch.plan.layouts), list(_leaves(launch.body))
    chosen = set[int]()
    for c in walk(launch.body, Call):
        asked = c.args[0] if c.op == "syncthreads_or" else None
        while isinstance(asked, Cast):
            asked = asked.value
        if not isinstance(asked, Binary) or asked.op not in ("gt", "ge") or not isinstance(asked.a, Load) or any(
                x.buffer.scope_name == FRAGMENT for x in walk(asked.b, Load)):
            continue
        b, reads = asked.a.buffer, 1
        while True:  # from the last reduction to the first
            touching = [s for _, s, own in found if _touches(own, b)]
            made = [s for s in touching if isinstance(s, Reduce) and s.dst.buffer is b and _is_maximum(s, layouts)]
            if len(made) != 1 or len(touching) != 1 + reads:
                break
            chosen.add(id(made[0]))
            b = made[0].src.buffer
            makers = [s for _, s, own in found if any(e.writes and e.storage is b.data for e in own)]
            less = _reduced_by(makers[0], b, layouts) if len(makers) == 1 else None
            if less is not None and sum(_touches(own, b) for _, _, own in found) == 2:
                b = less
    if not chosen:
        return None
    out = rewrite(launch.body, lambda x: with_options(x, spread=True) if id(x) in chosen else None, Reduce)
    done = replace(launch, body=out)
    return _Accumulations(done).run() or done


def _is_maximum(op: Reduce, layouts: dict[Buffer, Any]) -> bool:
    """Whether a reduction is a maximum of a whole fragment in each holder of an element."""
    src, dst = layouts.get(op.src.buffer), layouts.get(op.dst.buffer)
    return op.kind == "max" and op.clear and not op.nan_propagate and op.src.is_full and op.dst.is_full and isinstance(
        src, Fragment) and isinstance(dst, Fragment) and carried(
            src.reduce(op.dim), tuple(int(n) for n in op.dst.buffer.shape)) == dst


def _reduced_by(s: Stmt, b: Buffer, layouts: dict[Buffer, Any]) -> Buffer | None:
    """The fragment x of b's layout, where s is the loop b[i] = x[i] - y with y the same in all copies of an element."""
    if not isinstance(s, Parallel) or s.plan.loop_layout != layouts.get(b) or not isinstance(s.body, Store):
        return None
    value = s.body.value
    if s.body.buffer is not b or s.body.indices != s.vars or not isinstance(value, Binary) or value.op != "sub":
        return None
    x, y = value.a, value.b
    if not isinstance(x, Load) or not isinstance(y, Load) or x.buffer is y.buffer or any(
            n.indices != s.vars or layouts.get(n.buffer) != layouts[b] for n in (x, y)):
        return None
    return x.buffer


def _zero(e: Expr) -> bool:
    return _zero(e.value) if isinstance(e, Cast) else is_const(e, 0)


def _in_lanes(layout: Fragment) -> bool:
    """Whether elements have copies in lanes, all of them in warps with all 32 lanes present."""
    own = [m for ms in layout.modes for m in ms if m.to == THREAD]
    threads = 1 + sum((m.size - 1) * m.stride for m in (*own, *layout.copies))
    return bool(split_at_warp(list(layout.copies), WARP)[0]) and threads <= layout.threads // WARP * WARP


def _factors(e: Expr) -> tuple[list[Expr], list[Expr]]:
    """(factors, divisors) of nested multiplications and divisions."""
    if isinstance(e, Binary) and e.op == "mul":
        a, b = _factors(e.a), _factors(e.b)
        return [*a[0], *b[0]], [*a[1], *b[1]]
    if isinstance(e, Binary) and e.op == "div":
        factors, divisors = _factors(e.a)
        return factors, [*divisors, e.b]
    return [e], []


def _read(e: Expr) -> Iterator[Var]:
    """The storage of the buffers that an expression loads from."""
    return (x.buffer.data for x in walk(e, Load))


def _leaves(s: Stmt, path: _Path = ()) -> Iterator[tuple[_Path, Stmt, list[Effect]]]:
    """(path, statement, effects) of all statements below s.

    Parallel loops and tile ops are visited as a whole; of other loops and of branches only the head is visited.
    """
    below = () if isinstance(s, Parallel) else inner(s)
    yield path, s, list(own_effects(s) if below else effects(s))
    for n, x in enumerate(below):
        yield from _leaves(x, (*path, (s, n)))


def _touches(found: list[Effect], b: Buffer) -> bool:
    return any(e.storage is b.data for e in found)


def _end(found: _Sum) -> tuple[Seq, int] | None:
    """(sequence, index) of the statement after which the copies are summed; None where there is no such place.

    The statement holds all updates, the zeros precede it without a loop in between, and nothing uses the sum earlier.
    """
    zero, updates = found.zeros[0], found.updates
    level = len(zero) - 1  # depth of the sequence that holds the zeros
    if level < 0 or any(len(p) <= level or p[level][0] is not zero[level][0] or p[level][1] <= zero[level][1] for p in updates):
        return None
    deepest = None
    while True:
        at = {p[level][1] for p in updates}
        around = updates[0][level][0]
        if isinstance(around, Seq):
            deepest = level, max(at)
        if len(at) > 1 or any(len(p) <= level + 1 for p in updates) or not isinstance(updates[0][level + 1][0], (Seq, If)):
            break
        level += 1
    if deepest is None:
        return None
    level, last = deepest
    parent: Any = updates[0][level][0]
    order = (*(n for _, n in updates[0][:level]), last)
    if any(tuple(n for _, n in p)[:level + 1] <= order for p in found.uses):
        return None
    left = (Break, Continue)
    if any(isinstance(x, left) or isinstance(x, Evaluate) and x.call.op == "thread_return"
           for s in parent.stmts[:last + 1] for x in statements(s)):
        return None
    return parent, last
