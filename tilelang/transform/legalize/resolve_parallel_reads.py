"""Handle parallel loops in which an iteration may read what another one stores: keep the old values, or reject the loop.

    for i in T.Parallel(63):                 O = alloc_fragment((64,))
        F[i + 1] = F[i]              ->      O[k] = F[k] for all k
                                             for i in T.Parallel(63): F[i + 1] = O[i]

Iterations run in no order. If every iteration reads before it stores, the reads are defined to give the values from before
the loop; for a fragment they are kept in a copy. A read after the store, or a read of shared or global memory, has no defined
value and is rejected. Where it is not proved that the accesses are disjoint, the same is done: an index may depend on a scalar,
a serial variable or memory. Views of one memory (T.reshape, T.view) count as one buffer. Elements that other iterations
update atomically must not be read or stored by plain accesses.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import numpy as np

from tilelang.arith import extent_bounds, simplify
from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Buffer, BufferFacts, Call, Continue, Expr, For, Func, If, Load,
                         Parallel, Select, Seq, Stmt, Store, Var, While, binary, children, const, contains, convert, free_vars,
                         fresh, inner, is_const, load, rebuild, remember, replace, rewrite, substitute, to_text, unary, walk,
                         ways, DYNAMIC, FRAGMENT, GLOBAL, STATIC, VARIABLE)
from tilelang.ir.record import state
from tilelang.target import is_pure

from ..analysis.guards import Around, visit_with_facts
from ..analysis.disjoint import Disjoint, Iterations, Place
from ..analysis.statements import drop_continue
from ..analysis.effects import updated_element
from ..framework.pass_ import TILE, PassContext, pass_

register("parallel-order", ValueError, "a T.Parallel iteration reads what another one stores",
         "iterations run in no order: read before the loop (a copy of the tile), or store in a second loop",
         expected="reads of elements that the iteration itself stores, or that none does")

POINTS = 1 << 16  # loops of more iterations are not searched for an example
_SCOPES = (FRAGMENT, STATIC, DYNAMIC, GLOBAL)


@pass_(needs=TILE)
def resolve_parallel_reads(func: Func, cx: PassContext) -> Func:
    """Copy fragments for loops that read old values of elements which other iterations may store; raise "parallel-order"
    where the value is undefined.
    """
    return visit_with_facts(func, Parallel, _of_loop) if contains(func.body, Parallel) else func


def _of_loop(loop: Parallel, around: Around) -> Stmt:
    stored = {x.buffer.data for x in walk(loop.body, Store) if x.buffer.scope_name in _SCOPES}
    updated = {a.buffer.data for x in walk(loop.body) if (a := updated_element(x)) is not None}
    read = {x.buffer.data for x in walk(loop.body, Load)}
    read |= {a.buffer.data for x in walk(loop.body, Call) if (a := _fetched(x)) is not None}
    if all(is_const(e, 1) for e in loop.extents) or not (read & stored or updated & (stored | read)):
        return loop
    loop = replace(loop, body=drop_continue(loop.body))
    body = _Body(loop, stored | updated, around)
    body.follow(loop.body, (), dict(around.values), False)
    if updated:
        body.reject_beside_updates()
    old: dict[Buffer, Buffer] = {}
    reads = [(x, body.own_store(x)) for x in body.accesses if x.buffer.data in stored and x.kind == "read"]
    writes, soonest = body.writes()
    met: dict[Any, tuple[int, ...] | None] = {}  # what `meeting` gives depends on the keys of the accesses alone
    for access, own in reads:
        for key, w in writes.get(access.buffer.data, {}).items():
            both = key, access.key
            if both not in met:
                met[both] = body.meeting(w, access)
            if (pair := met[both]) is None:
                continue
            late = soonest[access.buffer.data] < access.step
            if access.buffer.scope_name != FRAGMENT or late or access.again or own or not access.buffer.is_static:
                body.reject(w, access, pair)
            of = access.buffer
            old.setdefault(of, replace(of, name=f"{of.name}_old", data=None, facts=BufferFacts()))
            body.early.add(id(access.node))
            break
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


def _fetched(x: Any) -> AddressOf | None:
    """The element that a call reads."""
    return x.args[0] if isinstance(x, Call) and x.op == "ldg" and isinstance(x.args[0], AddressOf) else None


@state
class _Access:
    """A load or store of the loop, or the address that an atomic operation updates. step: number of its statement. again: it is
    in a loop of the body. place: its element, where what the loop changes in memory is an unknown value."""

    node: Any
    buffer: Buffer
    step: int
    conds: tuple[Expr | None, ...]
    again: bool
    flat: Expr
    place: Place
    kind: str  # "read", "store" or "update", an atomic one
    accumulates: bool = False  # the store's value reads the stored element

    @property
    def stores(self) -> bool:
        return self.kind == "store"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for accesses of equal elements under equal conditions."""
        return self.buffer, self.flat, self.conds, self.place.indices, self.place.conds, self.accumulates

    @property
    def text(self) -> str:
        return to_text(load(self.buffer, self.node.indices))


@state
class _Body:
    """Accesses of one loop to the memory that it stores in, with their elements in each iteration."""

    loop: Parallel
    stored: set[Var]
    around: Around
    accesses: list[_Access] = field(default_factory=list)
    early: set[int] = field(default_factory=set)
    stores_of: dict[int, list[_Access]] = field(default_factory=dict)  # by the number of their statement
    step: int = 0
    values: dict[Expr, Var] = field(default_factory=dict)  # read from memory, the same in all iterations

    def __post_init__(self) -> None:
        loop = self.loop
        self.each = Iterations(loop, POINTS)
        self.changed = self.stored | {x.buffer.data for x in walk(loop.body, Store, Alloc)}
        self.disjoint = Disjoint(self.around.analyzer(), dict(zip(loop.vars, loop.extents)), {})

    def follow(self, s: Any, conds: tuple[Expr | None, ...], bound: dict[Var, Expr], again: bool) -> None:
        """Record the accesses below s in order. conds: enclosing conditions; None for one that is unknown.

        bound: values of names and, by their storage, of scalar variables.
        """
        self.step += 1
        match s:
            case Bind():
                self.reads(s.value, conds, bound, again)
                remember(bound, s)
            case Store():
                for e in (*s.indices, s.value):
                    self.reads(e, conds, bound, again)
                self.add(s, conds, bound, again, "store")
                if s.buffer.scope_name == VARIABLE:
                    bound[s.buffer.data] = self.stable(s.value, bound)
            case Alloc() if s.init is not None:
                self.reads(s.init, conds, bound, again)
                if s.buffer.scope_name == VARIABLE:
                    bound[s.buffer.data] = self.stable(s.init, bound)
            case If():
                self.reads(s.cond, conds, bound, again)
                for cond, x in ways(replace(s, cond=substitute(s.cond, bound))):
                    self.follow(x, (*conds, cond), dict(bound), again)
                self.forget(s, bound)
            case For():
                for e in (s.start, s.extent):
                    self.reads(e, conds, bound, again)
                self.forget(s, bound)
                last = self.stable(binary("add", s.start, s.extent), bound)
                self.disjoint.add_inner(s.var, *extent_bounds(self.disjoint.analyzer, s.start, s.extent))
                runs = is_const(s.extent) and s.extent.value > 0 and not contains(s.body, Break, Continue)  # type: ignore
                self.follow(s.body, conds if runs else (*conds, binary("lt", s.var, last)), bound, True)
                self.forget(s, bound)
            case While():
                self.forget(s, bound)
                self.reads(s.cond, (*conds, None), bound, True)
                self.follow(s.body, (*conds, None), bound, True)
                self.forget(s, bound)
            case _:
                below = inner(s)
                for x in below:
                    self.follow(x, conds, bound, again)
                if not below:
                    self.reads(s, conds, bound, again)

    def forget(self, s: Stmt, bound: dict[Var, Expr]) -> None:
        """Drop the values of scalar variables that s may change."""
        for x in walk(s, Store, Alloc):
            bound.pop(x.buffer.data, None)

    def stable(self, e: Expr, bound: dict[Var, Expr]) -> Expr:
        """e, with a name for each value that it reads from memory, one for all iterations if the loop does not change it."""
        def read(x: Any) -> Expr | None:
            if isinstance(x, Load) and x.buffer.data in bound:
                return bound[x.buffer.data]
            if isinstance(x, Call) and not is_pure(x.op) or isinstance(x, Load) and x.buffer.data in self.changed:
                v = fresh("value", x.dtype)
                self.disjoint.add_inner(v, None, None)
                return v
            if isinstance(x, Load) and x.dtype.lanes == 1 and not free_vars(x) & self.disjoint.ranges.keys():
                return self.values.setdefault(x, fresh("value", x.dtype))
            return None

        e = substitute(e, bound)
        return rewrite(e, read, Load, Call) if contains(e, Load, Call) else e

    def reads(self, e: Any, conds: tuple[Expr | None, ...], bound: dict[Var, Expr], again: bool) -> None:
        """Record the loads of an expression. Loads that a condition may skip are recorded under that condition."""
        if isinstance(e, Select) or isinstance(e, Binary) and e.op in ("and", "or"):
            first, *rest = (e.cond, e.a, e.b) if isinstance(e, Select) else (e.a, e.b)
            self.reads(first, conds, bound, again)
            cond = substitute(first, bound)
            other = unary("not", cond)
            for x, under in zip(rest, (cond, other) if isinstance(e, Select) or e.op == "and" else (other,)):
                self.reads(x, (*conds, under), bound, again)
            return
        if isinstance(e, Load):
            self.add(e, conds, bound, again, "read")
        address: Any = updated_element(e)
        if address is not None:
            self.add(address, conds, bound, again, "update")
        elif (address := _fetched(e)) is not None:
            self.add(address, conds, bound, again, "read")
        for c in children(e):
            if isinstance(c, Expr):
                self.reads(c, conds, bound, again)

    def add(self, x: Any, conds: tuple[Expr | None, ...], bound: dict[Var, Expr], again: bool, kind: str) -> None:
        b = x.buffer
        if b.data not in self.stored or not isinstance(b.offset, (int, Expr)):
            return
        flat: Any = convert(b.offset)
        place = Place(b, tuple(self.stable(i, bound) for i in x.indices),
                      tuple(self.stable(c, bound) for c in (*self.around.conds, *conds) if c is not None))
        for i, n, size in zip(x.indices, b.strides, b.shape):
            flat = flat + substitute(i, bound) * n
            if b.scope_name == GLOBAL:
                conds = (*conds, *self.inside(convert(substitute(i, bound)), size))
        self.accesses.append(_Access(x, b, self.step, conds, again, convert(flat), place, kind))
        if kind == "store":
            self.stores_of.setdefault(self.step, []).append(self.accesses[-1])

    def inside(self, i: Expr, size: Any) -> tuple[Expr, ...]:
        """Bounds conditions for an index of a tensor: an access outside is skipped, or reads the safe value.

        A size known only at run time is assumed to be large enough, and other variables to be 0: the first block exists.
        """
        i = convert(substitute(i, {v: const(0, v.dtype) for v in free_vars(i) - (
            {*self.loop.vars} if self.each.few else set())}))
        above = binary("ge", i, convert(0))
        return (above, binary("lt", i, convert(size))) if isinstance(size, int) or is_const(size) else (above,)

    def reject_beside_updates(self) -> None:
        """Raise parallel-order where a load or store may meet an atomic update by another iteration.

        A read at the index of the update is left alone where it is not sure that they meet: it is the usual guard of a maximum.
        """
        for w in [x for x in self.accesses if x.kind == "update"]:
            for x in self.accesses:
                if x.kind == "update" or x.buffer.data is not w.buffer.data:
                    continue
                pair = self.crossing(w, x)
                if pair is None and (self.same_place(w, x) or self.disjoint.proves(w.place, x.place)):
                    continue
                one, two = map(self.each.text, pair) if pair else ("another one", "one")
                does = "stores in" if x.stores else "reads"
                may = "" if pair else "may be one "
                raise error("parallel-order", f"iteration ({two}) of the parallel loop {does} the element of "
                            f"`{x.buffer.name}` that iteration ({one}) updates atomically" if pair else
                            f"iterations of the parallel loop may {does[:-1] if not x.stores else 'store in'} elements of "
                            f"`{x.buffer.name}` that others update atomically: `{x.text}` is not proved to be disjoint from "
                            f"`{w.text}`",
                            expected="plain accesses to elements that no other iteration updates",
                            found=f"one that {may}iteration ({one}) updates" if pair else f"`{x.text}` and `{w.text}`",
                            span=x.node.span or w.node.span or self.loop.span,
                            hint="use a second loop, or T.atomic_load and T.atomic_store where any order will do")

    def own_store(self, r: _Access) -> _Access | None:
        """The store that updates the element that is read: F[i] = F[i] + x, which other passes reduce over iterations."""
        same = [w for w in self.stores_of.get(r.step, ()) if self.same_place(w, r)]
        for w in same:
            w.accumulates = True
        return same[0] if same else None

    def writes(self) -> tuple[dict[Var, dict[Any, _Access]], dict[Var, float]]:
        """By storage: the first store of each key, and the step of the first store, -1 where one is in a loop of the body."""
        first: dict[Var, dict[Any, _Access]] = {}
        soonest: dict[Var, float] = {}
        for w in self.accesses:
            if w.stores:
                b = w.buffer.data
                first.setdefault(b, {}).setdefault(w.key, w)
                soonest[b] = min(soonest.get(b, math.inf), -1 if w.again else w.step)
        return first, soonest

    def same_place(self, w: _Access, r: _Access) -> bool:
        """Whether both use one element in each iteration."""
        return w.buffer.data is r.buffer.data and w.buffer.dtype == r.buffer.dtype and is_const(simplify(w.flat - r.flat), 0)

    def meeting(self, w: _Access, r: _Access) -> tuple[int, ...] | None:
        """(storing, reading) iterations that use one element, () where it is not proved that none do, else None."""
        same = self.same_place(w, r)
        if same and w.accumulates and w.buffer.scope_name == FRAGMENT:
            return None  # a reduction over several iterations, which one thread forms in order: what they read of it is defined
        pair = None if same and w.accumulates else self.crossing(w, r)
        if pair is not None or self.disjoint.proves(w.place, r.place):
            return pair
        if same and not contains(w.flat, Load, Call):  # two iterations that store there would be at fault by themselves
            # Of a loop of known length, one thread runs all updates of an element.
            asked = not self.each.counted if w.accumulates else self.each.few
            return () if asked and self.repeats(w) else None
        return ()

    def repeats(self, w: _Access) -> bool:
        """Whether two iterations store to one element for some values of the variables from outside. Sizes count as large."""
        sizes = {v for d in (*w.buffer.shape, *w.buffer.strides) if isinstance(d, Expr) for v in free_vars(d)}
        rng = np.random.default_rng(0)
        others = sorted(free_vars(w.flat) - set(self.loop.vars), key=lambda v: v.name)
        points = self.each.points if self.each.few else self.each.first(8)
        for _ in range(3):
            values = {v: int(rng.integers(4001, 5000)) if v in sizes else int(rng.integers(1, 97)) for v in others}
            places = self.each.values(substitute(w.flat, {v: const(k, v.dtype) for v, k in values.items()}), points=points)
            if places is not None and len(np.unique(places)) < len(places):
                return True
        return False

    def reject(self, w: _Access, r: _Access, pair: tuple[int, ...]) -> None:
        """Raise parallel-order for a read of what another iteration stores, or may store."""
        name = f"`{r.buffer.name}`" if r.buffer is w.buffer else f"`{r.buffer.name}` and `{w.buffer.name}`"
        span = r.node.span or w.node.span or self.loop.span
        if pair:
            one, two = map(self.each.text, pair)
            raise error("parallel-order", f"iteration ({two}) of the parallel loop reads the element of {name} that "
                        f"iteration ({one}) stores", found=f"one that iteration ({one}) stores", span=span)
        if self.same_place(w, r):
            raise error("parallel-order", f"iterations of the parallel loop may update one element of {name}: no two of "
                        f"`{r.text}` are proved to be different", found=f"`{r.text}`, which another iteration may store",
                        span=span, hint="use T.atomic_add or another atomic update, or a serial loop")
        hint = {FRAGMENT: "read in front of the store, outside of loops in the iteration",
                GLOBAL: "copy what is read to a fragment or to shared memory before the loop"}.get(
                    r.buffer.scope_name, "copy it to a fragment before the loop, and read that")
        raise error("parallel-order", f"iterations of the parallel loop may read elements of {name} that others store: "
                    f"`{r.text}` is not proved to be disjoint from `{w.text}`",
                    found=f"`{r.text}`, which another iteration may store", span=span,
                    hint=f"{hint}; or store in a second loop; or tell by a condition or T.assume that the indices differ")

    def crossing(self, w: _Access, r: _Access) -> tuple[int, int] | None:
        """(storing, reading) iterations that certainly use one element; None where that cannot be decided."""
        if w.buffer.dtype != r.buffer.dtype or not self.each.few:
            return None
        one, two = self.each.values(w.flat), self.each.values(r.flat)
        live_w, live_r = (self.each.live((c, True) for c in x.conds) for x in (w, r))
        if one is None or two is None or live_w is None or live_r is None:
            return None
        writers = np.flatnonzero(live_w)
        order = np.argsort(one[writers], kind="stable")
        places = one[writers][order]
        readers = np.flatnonzero(live_r)
        for side, step in (("left", 0), ("right", -1)):  # the first and the last iteration that stores to the element
            k = np.searchsorted(places, two[readers], side) + step  # type: ignore[call-overload]
            ok = (k >= 0) & (k < len(places))
            ok[ok] &= places[k[ok]] == two[readers[ok]]
            ok[ok] &= writers[order][k[ok]] != readers[ok]
            for n in np.flatnonzero(ok)[:4].tolist():
                pair = int(writers[order][k[n]]), int(readers[n])
                if is_const(simplify(self.each.within(w.flat, pair[0]) - self.each.within(r.flat, pair[1])), 0):
                    return pair
        return None
