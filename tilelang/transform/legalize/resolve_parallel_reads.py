"""Handle parallel loops in which an iteration reads what another one stores: keep the old values, or reject the loop.

    for i in T.Parallel(63):                 O = alloc_fragment((64,))
        F[i + 1] = F[i]              ->      O[k] = F[k] for all k
                                             for i in T.Parallel(63): F[i + 1] = O[i]

Iterations run in no order. If every iteration reads before it stores, the reads are defined to give the values from before
the loop; for a fragment they are kept in a copy. A read after the store, or a read of shared memory, has no defined value
and is rejected. Views of one memory (T.reshape, T.view) count as one buffer. Elements that other iterations update
atomically must not be read or stored by plain accesses, in global memory too.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import numpy as np

from tilelang.arith import simplify
from tilelang.errors import TileLangError, error, register
from tilelang.ir import (AddressOf, Alloc, Bind, Break, Buffer, BufferFacts, Call, Const, Continue, Expr, For, Func, If, Load,
                         Parallel, Select, Seq, Stmt, Store, Var, While, binary, children, const, convert, free_vars, fresh,
                         contains, inner, is_const, load, rebuild, replace, substitute, unary, walk, DYNAMIC, FRAGMENT,
                         GLOBAL, STATIC)
from tilelang.ir.evaluate import evaluate
from tilelang.ir.record import state

from ..analysis.loop_body import drop_continue
from ..analysis.effects import updated_element
from ..framework.pass_ import TILE, PassContext, pass_

register("parallel-order", ValueError, "a T.Parallel iteration reads what another one stores",
         "iterations run in no order: read before the loop (a copy of the tile), or store in a second loop",
         expected="reads of elements that the iteration itself stores, or that none does")

POINTS = 1 << 16  # loops of more iterations are skipped
_SCOPES = (FRAGMENT, STATIC, DYNAMIC, GLOBAL)


@pass_(needs=TILE)
def resolve_parallel_reads(func: Func, cx: PassContext) -> Func:
    """Copy fragments for loops that read old values of elements which other iterations store; raise "parallel-order" where the
    value is undefined.

    Covers loops of constant extents. Accesses whose index or condition depends on memory or on an argument are skipped.
    """
    return replace(func, body=_settled(func.body)) if contains(func.body, Parallel) else func


def _settled(s: Any) -> Any:
    if isinstance(s, Parallel):
        return _of_loop(s)
    if not inner(s):
        return s
    return rebuild(s, lambda v: _settled(v) if isinstance(v, Stmt) else tuple(_settled(x) for x in v) if isinstance(
        v, tuple) and v and isinstance(v[0], Stmt) else v)


def _of_loop(loop: Parallel) -> Stmt:
    extents = [int(e.value) for e in loop.extents if is_const(e)]  # type: ignore[attr-defined]
    if len(extents) != len(loop.extents) or not 1 < math.prod(extents) <= POINTS:
        return loop
    stored = {x.buffer.data for x in walk(loop.body, Store) if x.buffer.scope_name in _SCOPES}
    updated = {a.buffer.data for x in walk(loop.body) if (a := updated_element(x)) is not None}
    if not any(isinstance(x, Load) and x.buffer.data in stored or isinstance(x, (Load, Store)) and x.buffer.data in updated
               for x in walk(loop.body)):
        return loop
    loop = replace(loop, body=drop_continue(loop.body))
    body = _Body(loop, extents, stored | updated)
    body.follow(loop.body, (), {}, False)
    if updated:
        body.reject_beside_updates()
    old: dict[Buffer, Buffer] = {}
    for read in [x for x in body.accesses if x.buffer.data in stored and x.reads and not body.adds_up(x)]:
        found = [(w, pair) for w in body.accesses if w.stores and w.buffer.data is read.buffer.data
                 and (pair := body.crossing(w, read)) is not None]
        if not found:
            continue
        (w, (one, two)) = found[0]
        late = [x for x in body.accesses if x.stores and x.buffer.data is read.buffer.data and (x.step < read.step or x.again)]
        if read.buffer.scope_name != FRAGMENT or late or read.again or not read.buffer.is_static:
            name = f"`{read.buffer.name}`" if read.buffer is w.buffer else f"`{read.buffer.name}` and `{w.buffer.name}`"
            raise error("parallel-order", f"iteration ({body.text(two)}) of the parallel loop reads the element of {name} that "
                        f"iteration ({body.text(one)}) stores", found=f"one that iteration ({body.text(one)}) stores",
                        span=read.node.span or w.node.span or loop.span)
        old.setdefault(read.buffer, replace(read.buffer, name=f"{read.buffer.name}_old", data=None, facts=BufferFacts()))
        body.early.add(id(read.node))
    if not old:
        return loop
    before: list[Stmt] = []
    for b, o in old.items():
        o = old[b] = replace(o, strides_=None, offset=0)
        points = tuple(fresh("k") for _ in b.shape)
        before += [Alloc(o, span=loop.span),
                   Parallel(points, tuple(const(int(n)) for n in b.shape), Store(o, points, load(b, points)), span=loop.span)]

    def renamed(x: Any) -> Any:
        if isinstance(x, Load) and id(x) in body.early:
            return replace(x, buffer=old[x.buffer], indices=tuple(map(visit, x.indices)))
        return rebuild(x, visit)

    def visit(v: Any) -> Any:
        return renamed(v) if isinstance(v, (Stmt, Expr)) else tuple(visit(x) for x in v) if isinstance(v, tuple) else v

    return Seq((*before, replace(loop, body=visit(loop.body))))


@state
class _Access:
    """A load or store of the loop, or the address that an atomic operation updates. step: number of its statement. again: it is
    in a loop of the body. place: see _Body.at."""

    node: Any
    buffer: Buffer
    step: int
    conds: tuple[Expr | None, ...]
    again: bool
    flat: Expr
    stores: bool = False
    sums: bool = False  # the store's value reads the stored element

    @property
    def reads(self) -> bool:
        """Whether it is a load."""
        return isinstance(self.node, Load)


@state
class _Body:
    """Accesses of one loop to the memory that it stores in, with their elements in each iteration."""

    loop: Parallel
    extents: list[int]
    stored: set[Var]
    accesses: list[_Access] = field(default_factory=list)
    early: set[int] = field(default_factory=set)
    step: int = 0

    def __post_init__(self) -> None:
        axes = np.indices(tuple(self.extents)).reshape(len(self.extents), -1)
        self.points: dict[Var, np.ndarray] = dict(zip(self.loop.vars, axes))

    def follow(self, s: Any, conds: tuple[Expr | None, ...], bound: dict[Var, Expr], again: bool) -> None:
        """Record the accesses below s in order. conds: enclosing conditions; None for one that is unknown."""
        self.step += 1
        match s:
            case Bind():
                self.reads(s.value, conds, bound, again)
                bound[s.var] = substitute(s.value, bound)
            case Store():
                for e in (*s.indices, s.value):
                    self.reads(e, conds, bound, again)
                self.add(s, conds, bound, again, True)
            case If():
                self.reads(s.cond, conds, bound, again)
                cond = substitute(s.cond, bound)
                self.follow(s.then, (*conds, cond), dict(bound), again)
                if s.orelse is not None:
                    self.follow(s.orelse, (*conds, unary("not", cond)), dict(bound), again)
            case For():
                runs = isinstance(s.extent, Const) and s.extent.value > 0 and not contains(s.body, Break, Continue)
                self.follow(s.body, conds if runs else (*conds, None), bound, True)
            case While():
                self.follow(s.body, (*conds, None), bound, True)
            case _:
                below = inner(s)
                for x in below:
                    self.follow(x, conds, bound, again)
                if not below:
                    self.reads(s, conds, bound, again)

    def reads(self, e: Any, conds: tuple[Expr | None, ...], bound: dict[Var, Expr], again: bool) -> None:
        """Record the loads of an expression. Loads that a condition may skip are recorded under that condition."""
        if isinstance(e, Select):
            self.reads(e.cond, conds, bound, again)
            cond = substitute(e.cond, bound)
            self.reads(e.a, (*conds, cond), bound, again)
            self.reads(e.b, (*conds, unary("not", cond)), bound, again)
            return
        if isinstance(e, Load):
            self.add(e, conds, bound, again, False)
        address = updated_element(e)
        if address is not None:
            self.add(address, conds, bound, again, False)
        for x in children(e):
            if isinstance(x, Expr):
                self.reads(x, conds, bound, again)

    def add(self, x: Any, conds: tuple[Expr | None, ...], bound: dict[Var, Expr], again: bool, stores: bool) -> None:
        b = x.buffer
        if b.data not in self.stored or not isinstance(b.offset, (int, Expr)):
            return
        flat: Any = convert(b.offset)
        for i, n, size in zip(x.indices, b.strides, b.shape):
            flat = flat + substitute(i, bound) * n
            if b.scope_name == GLOBAL:
                conds = (*conds, *self.inside(convert(substitute(i, bound)), size))
        self.accesses.append(_Access(x, b, self.step, conds, again, convert(flat), stores))

    def inside(self, i: Expr, size: Any) -> tuple[Expr, ...]:
        """Bounds conditions for an index of a tensor: an access outside is skipped, or reads the safe value.

        A size known only at run time is assumed to be large enough, and other variables to be 0: the first block exists.
        """
        i = convert(substitute(i, {v: const(0, v.dtype) for v in free_vars(i) - set(self.points)}))
        above = binary("ge", i, convert(0))
        return (above, binary("lt", i, convert(size))) if isinstance(size, int) or is_const(size) else (above,)

    def reject_beside_updates(self) -> None:
        """Raise parallel-order where a load or store certainly meets an atomic update by another iteration."""
        for w in [x for x in self.accesses if isinstance(x.node, AddressOf)]:
            for x in self.accesses:
                if isinstance(x.node, AddressOf) or x.buffer.data is not w.buffer.data:
                    continue
                pair = self.crossing(w, x)
                if pair is not None:
                    one, two = map(self.text, pair)
                    does = "stores in" if x.stores else "reads"
                    raise error("parallel-order", f"iteration ({two}) of the parallel loop {does} the element of "
                                f"`{x.buffer.name}` that iteration ({one}) updates atomically",
                                expected="plain accesses to elements that no other iteration updates",
                                found=f"one that iteration ({one}) updates", span=x.node.span or w.node.span or self.loop.span,
                                hint="use a second loop, or T.atomic_load and T.atomic_store where any order will do")

    def adds_up(self, r: _Access) -> bool:
        """Whether a store updates the element that is read: F[i] = F[i] + x, which other passes reduce over iterations."""
        same = [w for w in self.accesses if w.stores and w.step == r.step and w.buffer.data is r.buffer.data
                and is_const(simplify(w.flat - r.flat), 0)]
        for w in same:
            w.sums = True
        return bool(same)

    def crossing(self, w: _Access, r: _Access) -> tuple[int, int] | None:
        """(storing, reading) iterations that certainly use one element; None where that cannot be decided."""
        if w.buffer.dtype != r.buffer.dtype:
            return None
        one, two, live_w, live_r = self.at(w.flat), self.at(r.flat), self.live(w.conds), self.live(r.conds)
        if one is None or two is None or live_w is None or live_r is None:
            return None
        writers = np.flatnonzero(live_w)
        order = np.argsort(one[writers], kind="stable")
        places = one[writers][order]
        if w.sums and (places[1:] == places[:-1]).any():
            return None  # a reduction over several iterations, which one thread forms in order: what they read of it is defined
        readers = np.flatnonzero(live_r)
        for side, step in (("left", 0), ("right", -1)):  # the first and the last iteration that stores to the element
            k = np.searchsorted(places, two[readers], side) + step  # type: ignore[call-overload]
            ok = (k >= 0) & (k < len(places))
            ok[ok] &= places[k[ok]] == two[readers[ok]]
            ok[ok] &= writers[order][k[ok]] != readers[ok]
            for n in np.flatnonzero(ok)[:4].tolist():
                pair = int(writers[order][k[n]]), int(readers[n])
                if is_const(simplify(self.point(w.flat, pair[0]) - self.point(r.flat, pair[1])), 0):
                    return pair
        return None

    def at(self, e: Expr, others: bool = True) -> np.ndarray | None:
        """The value of e in each iteration; None if it cannot be computed. others: variables from outside the loop are 0."""
        if contains(e, Load, Call) or e.dtype.lanes > 1:
            return None
        more = free_vars(e) - set(self.points)
        if more and not others:
            return None
        try:
            got = evaluate(e, {**{v: 0 for v in more}, **self.points})
            return np.broadcast_to(np.asarray(got), (math.prod(self.extents),))
        except (TileLangError, TypeError):
            return None

    def live(self, conds: tuple[Expr | None, ...]) -> np.ndarray | None:
        """The iterations that certainly satisfy conditions; None when that cannot be decided."""
        out = np.ones(math.prod(self.extents), bool)
        for cond in conds:
            holds = None if cond is None else self.at(cond, False)
            if holds is None:
                return None
            out &= holds.astype(bool)
        return out

    def point(self, e: Expr, n: int) -> Expr:
        return convert(substitute(e, {v: const(int(p[n]), v.dtype) for v, p in self.points.items()}))

    def text(self, n: int) -> str:
        return ", ".join(f"{v.name}={int(p[n])}" for v, p in self.points.items())


__all__ = ["resolve_parallel_reads"]
