"""Proofs that two accesses never use one element of memory.

    S[i, j]  and  S[i, k]      under `j != k`                 never one element
    S[i, j]  and  S[i + n, j]  in iterations of a loop        may be one element: n is known only at run time

Accesses of a parallel loop may meet in one iteration; they are disjoint if no two iterations bring them to one element. Other
accesses, such as the tiles of a copy, may not meet at all. A proof is tried in three ways: by linear equations of the
indices, by counting through the iterations, and by counting through the values of variables from outside the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from tilelang.arith import Analyzer, Bounds, Linear
from tilelang.arith.linear import emit
from tilelang.errors import TileLangError
from tilelang.ir import (AddressOf, Binary, Broadcast, Buffer, Call, Const, Expr, Load, Parallel, Ramp, Var, binary, const,
                         contains, convert, free_vars, fresh, is_const, substitute, walk, COMPARISONS)
from tilelang.ir.evaluate import evaluate
from tilelang.ir.record import record

from .guards import conjuncts
from .vectorize import stride_along

POINTS = 1 << 18  # iterations that are counted through at most
_VALUES = 512  # values of outer variables that are counted through at most
_RESIDUES = 8
_STEPS = 24  # equations that are solved one after another
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


@record
class Place:
    """The element that an access uses. conds: what holds where the access runs."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    conds: tuple[Expr, ...] = ()


class Disjoint:
    """Answers whether accesses are disjoint.

    analyzer: knows the ranges of variables from outside. own: the variables of a parallel loop, with their extents; None: the
    accesses belong to no loop. inner: further variables that each access has for itself, with inclusive bounds.
    """

    def __init__(self, analyzer: Analyzer, own: Mapping[Var, Any] | None, inner: Mapping[Var, Bounds]) -> None:
        self.own = own
        self.inner = dict(inner)
        self.ranges: dict[Var, Bounds] = dict(inner)
        for v, n in (own or {}).items():
            high = analyzer.interval(convert(n))[1]
            self.ranges[v] = (0, None if high is None else high - 1)
        self.analyzer = analyzer
        for v, (low, high) in self.ranges.items():
            self.analyzer = self.analyzer.bind(v, low, high)
        self.moving = {v for v, n in (own or {}).items() if not is_const(n, 1) and n != 1}

    def proves(self, one: Place, two: Place) -> bool:
        """Whether it is proved that the accesses use one element in one iteration only, or never."""
        if self.own is not None and one.buffer is two.buffer and self.each_its_own(one, two):
            return True
        one, two = self.scalar(one), self.scalar(two)
        return self.solved(one, two) or self.counted(one, two) or self.by_values(one, two)

    def each_its_own(self, one: Place, two: Place) -> bool:
        """Whether the indices are the same and each variable of the loop stands alone in one of them, with any offset."""
        if not all(a.same(b) for a, b in zip(one.indices, two.indices)):
            return False
        return self.moving <= alone(one.indices, self.moving | self.inner.keys())

    def scalar(self, p: Place) -> Place:
        """The place with each vector index as a scalar one: any of its lanes."""
        out = []
        for i in p.indices:
            if isinstance(i, Ramp):
                lane = self._more("lane", i.lanes, i.base.dtype)
                i = i.base + i.stride * lane
            elif isinstance(i, Broadcast):
                i = i.value
            out.append(i if i.dtype.lanes == 1 else self._more("lane", None, i.dtype.scalar))
        inside = [binary(op, i, convert(n)) for i, size in zip(out, p.buffer.shape) for op, n in (("ge", 0), ("lt", size))]
        return replace(p, indices=tuple(out), conds=(*p.conds, *inside))

    def add_inner(self, v: Var, low: int | None, high: int | None) -> None:
        """Tell of a variable that each access has for itself."""
        self.inner[v] = self.ranges[v] = (low, high)
        self.analyzer = self.analyzer.bind(v, low, high)

    def element(self, b: Buffer, mins: Iterable[Expr], extents: Iterable[Any], conds: tuple[Expr, ...] = ()) -> Place:
        """Any element of a tile, which each access has for itself. conds: what holds where the access runs."""
        at, inside = list[Expr](), list(conds)
        for first, n in zip(mins, extents):
            high = self.analyzer.interval(convert(n))[1]
            if high != 1:
                v = fresh("e", first.dtype)
                self.add_inner(v, 0, None if high is None else high - 1)
                inside += [] if isinstance(n, int) else [binary("lt", v, convert(n))]
                first = first + v
            at.append(first)
        return Place(b, tuple(at), tuple(inside))

    def _more(self, name: str, count: int | None, dtype: Any) -> Var:
        v = fresh(name, dtype)
        self.add_inner(v, *((None, None) if count is None else (0, count - 1)))
        return v

    def pairs(self, one: Place, two: Place) -> list[tuple[Expr, Expr]]:
        """Pairs of expressions that are equal where the accesses use one element."""
        a, b = one.buffer, two.buffer
        if a is b:
            return list(zip(one.indices, two.indices))
        x, y = _flat(one), _flat(two)
        bits = a.dtype.bits * a.dtype.lanes, b.dtype.bits * b.dtype.lanes
        if bits[0] > bits[1]:
            x = x * (bits[0] // bits[1]) + self._more("part", bits[0] // bits[1], x.dtype)
        elif bits[1] > bits[0]:
            y = y * (bits[1] // bits[0]) + self._more("part", bits[1] // bits[0], y.dtype)
        return [(x, y)]

    # ---- linear equations -----------------------------------------------------------------------------------------

    def solved(self, one: Place, two: Place) -> bool:
        """Whether the equations of the indices have no solution, or only such in one iteration."""
        pairs = self.pairs(one, two)
        twins = {v: fresh(v.name + "_", v.dtype) for v in self.ranges}
        a = Analyzer(self.analyzer.env)
        for v, w in twins.items():
            a.bind(w, *self.ranges[v])
        both = [(x, substitute(y, twins)) for x, y in pairs]
        equations = [binary("sub", x, y) for x, y in both if a.exact(a.linear(x), x.dtype) and a.exact(a.linear(y), y.dtype)]
        conds = [*one.conds, *(substitute(c, twins) for c in two.conds)]
        for v, (low, high) in self.ranges.items():
            for w in (v, twins[v]):
                conds += [binary("ge", w, const(low, w.dtype))] if low is not None else []
                conds += [binary("le", w, const(high, w.dtype))] if high is not None else []
        for v, n in (self.own or {}).items():
            if not isinstance(n, int):
                conds += [binary("lt", v, convert(n)), binary("lt", twins[v], convert(n))]
        return _Equations(a, equations, conds, twins, None if self.own is None else self.moving).impossible()

    # ---- counting -------------------------------------------------------------------------------------------------

    def counted(self, one: Place, two: Place) -> bool:
        """Whether going through all iterations shows that no two of them meet. What depends on other values is left open."""
        pairs = self.pairs(one, two)
        used = {v for e in (*(e for p in pairs for e in p),) for v in free_vars(e)}
        axes: dict[Var, int] = {}
        for v, (low, high) in self.ranges.items():
            if v in self.moving or v in used:
                if low != 0 or high is None:
                    if v in self.moving:
                        return False
                    continue
                axes[v] = high + 1
        count = math.prod(axes.values())
        if not 0 < count <= POINTS:
            return False
        points = dict(zip(axes, np.indices(tuple(axes.values())).reshape(len(axes), count)))
        keys = []
        for x, y in pairs:
            a, b = self._by_axes(x, points), self._by_axes(y, points)
            if a is None or b is None:
                continue
            gap = a[1].plus(b[1], -1)
            if gap.is_const:
                keys.append((np.broadcast_to(a[0] + gap.const, count), np.broadcast_to(b[0], count)))
        if not keys:
            return False
        who = np.zeros(count, np.int64)
        for v in axes:
            if v in self.moving:
                who = who * axes[v] + points[v]
        return not _meet([k[0] for k in keys], [k[1] for k in keys], _live(one.conds, points, count),
                         _live(two.conds, points, count), who, self.own is not None)

    def _by_axes(self, e: Expr, points: dict[Var, np.ndarray]) -> tuple[np.ndarray, Linear] | None:
        """(values of the part that depends on the axes, the other part); None where one atom depends on both."""
        form = self.analyzer.linear(e)
        if not self.analyzer.exact(form, e.dtype):
            return None
        mine: np.ndarray = np.zeros(1, np.int64)
        other = Linear({}, form.const)
        for atom, c in form.terms.items():
            names = free_vars(atom)
            if not names & self.ranges.keys():
                other = other.plus(Linear({atom: c}, 0))
            elif not names <= points.keys() or (got := computed(atom, points)) is None:
                return None
            else:
                mine = mine + c * got.astype(np.int64)
        return mine, other

    def by_values(self, one: Place, two: Place) -> bool:
        """Whether the accesses are disjoint for every value, or every remainder, of the variables from outside."""
        indices = (*one.indices, *two.indices)
        return any(self._by_values_of(exprs, one, two) for exprs in (indices, (*indices, *one.conds, *two.conds)))

    def _by_values_of(self, exprs: tuple[Expr, ...], one: Place, two: Place) -> bool:
        outer = [v for v in dict.fromkeys(v for e in exprs for v in sorted(free_vars(e), key=lambda v: v.name))
                 if v not in self.ranges and v.dtype.is_int]
        choices: dict[Var, list[Expr]] = {}
        for v in outer:
            low, high = self.analyzer.interval(v)
            if low is not None and high is not None and high - low < _VALUES:
                choices[v] = [const(k, v.dtype) for k in range(low, high + 1)]
            elif 1 < (m := _modulus(v, (*one.indices, *two.indices))) <= _RESIDUES:
                choices[v] = [self._multiple(v, low, high, m) + k for k in range(m)]
        number = math.prod(len(c) for c in choices.values())
        points = math.prod((high or 0) + 1 for v, (_, high) in self.ranges.items() if v in self.moving)
        if not 1 < number <= _VALUES or number * points > 16 * POINTS:
            return False

        def at(p: Place, values: dict[Var, Expr]) -> Place:
            return replace(p, indices=tuple(self.analyzer.simplify(substitute(i, values)) for i in p.indices),
                           conds=tuple(self.analyzer.simplify(substitute(c, values)) for c in p.conds))

        for values in product(*choices.values()):
            x, y = (at(p, dict(zip(choices, values))) for p in (one, two))
            if any(is_const(c, 0) for c in (*x.conds, *y.conds)):
                continue
            if not (self.counted(x, y) or self.solved(x, y)):
                return False
        return True

    def _multiple(self, v: Var, low: int | None, high: int | None, m: int) -> Expr:
        """A multiple of m. A bound near that of the type counts as unknown: indices do not wrap."""
        step = fresh(v.name, v.dtype)
        low, high = (None if b is None or abs(b) >= 1 << 30 else b // m for b in (low, high))
        self.analyzer = self.analyzer.bind(step, low, high)
        return step * m


class _Equations:
    """A system of equations `e == 0` with conditions, over the variables of one access and their twins of the other one.

    moving: the variables whose equality with their twins means one iteration; None: that is no excuse.
    """

    def __init__(self, a: Analyzer, equations: list[Expr], conds: list[Expr], twins: dict[Var, Var],
                 moving: set[Var] | None) -> None:
        self.a = a
        self.equations = equations
        self.conds = conds
        self.twins, self.moving = twins, moving
        self.free = {*twins, *twins.values()}
        self.known: dict[Var, Expr] = {}
        self.equal: list[tuple[Expr, Expr]] = []

    def impossible(self) -> bool:
        """Whether no two iterations fulfil the system."""
        for _ in range(_STEPS):
            forms = [self.a.linear(e) for e in self.equations]
            if any(self.never_zero(f) for f in forms):
                return True
            if not any(self.step(n, f) for n, f in enumerate(forms)):
                break
        return self.one_iteration() or self.contradiction()

    def never_zero(self, f: Linear) -> bool:
        low, high = self.a.bounds_of(f)
        if low is not None and low > 0 or high is not None and high < 0:
            return True
        return bool(f.terms) and f.const % math.gcd(*f.terms.values()) != 0

    def one_iteration(self) -> bool:
        """Whether each variable of the loop is the same in both."""
        def same(v: Var) -> bool:
            form = self.a.linear(binary("sub", self.known.get(v, v), self.known.get(w := self.twins[v], w)))
            return form.is_const and form.const == 0

        return self.moving is not None and all(map(same, self.moving))

    def step(self, n: int, f: Linear) -> bool:
        """Derive an equality from the n-th equation and use it. Returns whether there was one."""
        if not f.terms:
            return False
        for t, w, c in self.forced(f):
            rest = f.plus(Linear({t: c, w: -c}, 0), -1)
            self.equations[n] = emit(rest, self.equations[n].dtype)
            if isinstance(t, Var) and isinstance(w, Var):
                self.put(w, t)
            else:
                self.equate(t, w)
            return True
        parts = self.by_divisor(f)
        if parts is not None:
            self.equations[n:n + 1] = [emit(p, self.equations[n].dtype) for p in parts]
            return True
        for t, c in f.terms.items():
            if isinstance(t, Var) and t in self.free and abs(c) == 1:
                rest = f.plus(Linear({t: c}, 0), -1)
                if not any(t in free_vars(x) for x in rest.terms):
                    self.put(t, emit(rest.scaled(-c), t.dtype))
                    return True
        return False

    def forced(self, f: Linear) -> Iterator[tuple[Expr, Expr, int]]:
        """(atom, its twin, factor) that must be equal: all other terms together are less than one factor."""
        pairs = []
        rest = f
        for t, c in f.terms.items():
            w = self.twins.get(t) if isinstance(t, Var) else substitute(t, self.twins)
            w = next((x for x, k in f.terms.items() if k == -c and w is not None and x is not t and x.same(w)), None)
            if w is not None:
                low, high = self.a.atom_bounds(t)
                pairs.append((t, w, c, None if low is None or high is None else high - low))
                rest = rest.plus(Linear({t: c, w: -c}, 0), -1)
        low, high = self.a.bounds_of(rest)
        for t, w, c, _ in sorted(pairs, key=lambda p: -abs(p[2])):
            slack = 0 if low == high == 0 else None if low is None or high is None else max(-low, high)
            for other in pairs:
                if other[0] is not t:
                    slack = None if slack is None or other[3] is None else slack + abs(other[2]) * other[3]
            if slack is not None and slack < abs(c):
                yield t, w, c

    def by_divisor(self, f: Linear) -> tuple[Linear, Linear] | None:
        """f as `d * a + r` with a difference of remainders by d, which is less than d: both a and r are then 0."""
        inner = {x for t in f.terms for x in walk(t, Binary) if x.op in ("floordiv", "floormod")}
        for d in {x.b for x in inner if not isinstance(x.b, Const)}:
            quotients = [x for x in inner if x.op == "floordiv" and x.b.same(d)]
            a, r = Linear({}, 0), Linear({}, f.const)
            for t, c in f.terms.items():
                if t.same(d):
                    a = a.plus(Linear({}, c))
                elif isinstance(t, Binary) and t.op == "mul" and (t.a.same(d) or t.b.same(d)):
                    a = a.plus(self.a.linear(t.a if t.b.same(d) else t.b), c)
                elif q := next((q for q in quotients if q.a.same(t)), None):
                    a = a.plus(Linear({q: c}, 0))
                    r = r.plus(Linear({binary("floormod", t, d): c}, 0))
                else:
                    r = r.plus(Linear({t: c}, 0))
            if not r.const and (a.terms or a.const) and sorted(r.terms.values()) in ([], [1], [-1], [-1, 1]) and all(
                    isinstance(t, Binary) and t.op == "floormod" and t.b.same(d) for t in r.terms):
                return a, r
        return None

    def put(self, v: Var, value: Expr) -> None:
        """Replace a variable by its value everywhere."""
        def new(e: Expr) -> Expr:
            return self.a.simplify(substitute(e, {v: value})) if v in free_vars(e) else e

        self.equations = [new(e) for e in self.equations]
        self.conds = [new(c) for c in self.conds]
        self.known = {k: new(e) for k, e in self.known.items()} | {v: value}
        self.equal = [(new(x), new(y)) for x, y in self.equal]

    def equate(self, t: Expr, w: Expr) -> None:
        """Note that an atom equals its twin: x // n and x % n together tell x, x ^ d tells x, and so does x % n where the two x
        differ by less than n."""
        if isinstance(t, Binary) and isinstance(w, Binary) and t.op == "bitxor":
            for x, d, y, e in ((t.a, t.b, w.a, w.b), (t.b, t.a, w.b, w.a)):
                if d.same(e):
                    self.equations.append(binary("sub", x, y))
                    return
        if isinstance(t, Binary) and isinstance(w, Binary) and self.near(t, w):
            return
        if not (isinstance(t, Binary) and isinstance(w, Binary) and t.op in ("floordiv", "floormod")):
            return
        for x, y in self.equal:
            if isinstance(x, Binary) and isinstance(y, Binary) and {x.op, t.op} == {"floordiv", "floormod"} and x.b.same(
                    t.b) and y.b.same(w.b) and x.a.same(t.a) and y.a.same(w.a):
                self.equations.append(binary("sub", t.a, w.a))
                return
        self.equal.append((t, w))

    def near(self, t: Binary, w: Binary) -> bool:
        """Whether equal remainders of x and y by a constant tell that x - y, or what a constant of it multiplies, is zero."""
        if not isinstance(t.b, Const) or not t.b.same(w.b) or t.op not in ("floormod", "bitand"):
            return False
        n = int(t.b.value) + (t.op == "bitand")
        x, y = self.a.linear(t.a), self.a.linear(w.a)
        gap = x.plus(y, -1)
        if n < 1 or t.op == "bitand" and n & (n - 1) or gap.const or not gap.terms or not (
                self.a.exact(x, t.a.dtype) and self.a.exact(y, w.a.dtype)):
            return False
        factor = math.gcd(*gap.terms.values())
        step = Linear({e: c // factor for e, c in gap.terms.items()}, 0)
        low, high = self.a.bounds_of(step)
        if low is None or high is None or max(-low, high) >= n // math.gcd(factor, n):
            return False
        self.equations.append(emit(step, t.a.dtype))
        return True

    def contradiction(self) -> bool:
        """Whether two of the conditions exclude each other, or one is false."""
        least: list[Linear] = []  # forms that are not negative
        for c in self.conds:
            c = self.a.simplify(c)
            if is_const(c, 0):
                return True
            for part, holds in conjuncts(c):
                part = self.a.simplify(part)
                if is_const(part, 0 if holds else 1):
                    return True
                least += self.not_negative(part, holds)
        for n, f in enumerate(least):
            high = self.a.bounds_of(f)[1]
            if high is not None and high < 0:
                return True
            for g in least[n + 1:]:
                shared = f.terms.keys() & g.terms.keys()
                for x, y in {(1, 1), *((abs(g.terms[t]), abs(f.terms[t])) for t in shared)} if shared else ():
                    if (high := self.a.bounds_of(f.scaled(x).plus(g, y))[1]) is not None and high < 0:
                        return True
        return False

    def not_negative(self, c: Expr, holds: bool) -> list[Linear]:
        """The forms that a comparison says are not negative."""
        if not isinstance(c, Binary) or c.op not in COMPARISONS or not c.a.dtype.is_int or c.a.dtype.lanes > 1:
            return []
        a, b = self.a.linear(c.a), self.a.linear(c.b)
        if not (self.a.exact(a, c.a.dtype) and self.a.exact(b, c.b.dtype)):
            return []
        up, down, one = a.plus(b, -1), b.plus(a, -1), Linear({}, -1)
        op = c.op if holds else _NEGATED[c.op]
        return {"lt": [down.plus(one)], "le": [down], "gt": [up.plus(one)], "ge": [up], "eq": [up, down], "ne": []}[op]


def alone(indices: Iterable[Expr], among: Set[Var]) -> set[Var]:
    """The variables of `among` that stand alone in one of the indices, with any offset."""
    a, mine = Analyzer(), ((i, free_vars(i) & among) for i in indices)
    return {v for i, found in mine if len(found) == 1 for v in found if stride_along(i, v, a) == 1}


def _flat(p: Place) -> Expr:
    """Elements from the start of the storage to the place."""
    flat: Any = convert(p.buffer.offset)
    for i, n in zip(p.indices, p.buffer.strides):
        flat = flat + i * n
    return convert(flat)


def computed(e: Expr, env: Mapping[Var, Any], calls: bool = False) -> np.ndarray | None:
    """The value of e where variables have the values of env; None if it cannot be computed.  calls: functions are computed."""
    if contains(e, Load, AddressOf) or not calls and contains(e, Call) or not free_vars(e) <= env.keys():
        return None
    try:
        return np.asarray(evaluate(e, env))
    except (TileLangError, TypeError):
        return None


def _live(conds: tuple[Expr, ...], points: Mapping[Var, np.ndarray], count: int) -> np.ndarray:
    """The iterations that may fulfil the conditions: those that depend on other values count as true."""
    out = np.ones(count, bool)
    for cond in conds:
        for c, holds in conjuncts(cond):
            if (got := computed(c, points)) is not None:
                out &= got.astype(bool) == holds
    return out


def _meet(one: list[np.ndarray], two: list[np.ndarray], live_one: np.ndarray, live_two: np.ndarray, who: np.ndarray,
          loop: bool) -> bool:
    """Whether two iterations have equal keys; without a loop, whether any have."""
    a, b = np.flatnonzero(live_one), np.flatnonzero(live_two)
    if not len(a) or not len(b):
        return False
    _, place = np.unique(np.concatenate([np.stack([k[a] for k in one]), np.stack([k[b] for k in two])], 1), axis=1,
                         return_inverse=True)
    place = place.reshape(-1)
    n = int(place.max()) + 1
    low, high = np.full((2, n), len(who), np.int64), np.full((2, n), -1, np.int64)
    for side, (at, ids) in enumerate(((place[:len(a)], who[a]), (place[len(a):], who[b]))):
        np.minimum.at(low[side], at, ids)
        np.maximum.at(high[side], at, ids)
    both = (high[0] >= 0) & (high[1] >= 0)
    return bool((both & (low.min(0) != high.max(0))).any() if loop else both.any())


def _modulus(v: Var, exprs: Iterable[Expr]) -> int:
    """The least common multiple of the constants by which expressions of v are divided."""
    out = 1
    for e in exprs:
        for x in walk(e, Binary):
            if x.op in ("floormod", "floordiv", "truncmod", "truncdiv") and v in free_vars(x.a) and isinstance(
                    x.b, Const) and x.b.value > 0:
                out = math.lcm(out, int(x.b.value))
            elif x.op == "bitand" and v in free_vars(x.a) and isinstance(x.b, Const) and x.b.value > 0:
                out = math.lcm(out, int(x.b.value) + 1)
    return out


# ---- iterations one by one --------------------------------------------------------------------------------------------------


class Iterations:
    """The iterations of a loop, if it has at most `most` (few).  extents: None for one that is known at run time only."""

    def __init__(self, loop: Parallel, most: int) -> None:
        self.vars, self.extents = loop.vars, [int(e.value) if is_const(e) else None for e in loop.extents]  # type: ignore
        self.counted = None not in self.extents
        self.count = math.prod(n or 0 for n in self.extents)
        self.few = self.counted and self.count <= most

    @cached_property
    def points(self) -> dict[Var, np.ndarray]:
        """The value of each variable in each iteration."""
        return self.first(max(n or 0 for n in self.extents))

    def first(self, most: int) -> dict[Var, np.ndarray]:
        """The same for `most` values of each variable at most."""
        shape = tuple(most if n is None else min(n, most) for n in self.extents)
        return dict(zip(self.vars, np.indices(shape).reshape(len(shape), -1)))

    def values(self, e: Expr, others: bool = True, calls: bool = False,
               points: dict[Var, np.ndarray] | None = None) -> np.ndarray | None:
        """The value of e in each iteration; None if it cannot be computed.

        others: variables from outside the loop are 0.  calls: functions are computed.
        """
        points = self.points if points is None else points
        env = {**dict.fromkeys(free_vars(e) if others else (), 0), **points}
        got = None if e.dtype.lanes > 1 else computed(e, env, calls)
        return None if got is None else np.broadcast_to(got, (len(next(iter(points.values()))),))

    def live(self, conds: Iterable[tuple[Expr | None, bool]], certain: bool = True) -> np.ndarray | None:
        """The iterations in which conditions have given values.  One that cannot be decided gives None, or may have it."""
        out = np.ones(self.count, bool)
        for cond, wanted in conds:
            holds = None if cond is None else self.values(cond, not certain, not certain)
            if holds is not None:
                out &= holds.astype(bool) == wanted
            elif certain:
                return None
        return out

    def within(self, e: Expr, n: int) -> Expr:
        """e in one iteration."""
        return convert(substitute(e, {v: const(int(p[n]), v.dtype) for v, p in self.points.items()}))

    def text(self, n: int) -> str:
        """An iteration in words."""
        return ", ".join(f"{v.name}={int(p[n])}" for v, p in self.points.items())
