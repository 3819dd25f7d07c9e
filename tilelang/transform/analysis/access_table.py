"""Exact tables of the elements that each thread accesses, and the test whether two accesses can collide.

An address is  table[thread, point] + sum of coefficient * term. Points enumerate the loops of the access. Terms are values
that are the same for all threads and unknown here (block indices, sizes). Two accesses with equal terms are compared
exactly, by their tables; any other pair counts as a collision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Binary, Buffer, Call, Cast, Const, Expr, For, Launch, Load, Ramp, Select, Store, Unary, Var,
                         children, const, contains, walk)
from tilelang.ir.numbers import INTEGERS, keeps_value, may_wrap, wrapped
from tilelang.ir.record import state
from tilelang.target.warp_groups import GROUP
from tilelang.target.wgmma import K_STEP_BYTES, WGMMA_ROWS, encode_descriptor, operand_addresses

from .accesses import Access, Loop, Matrix, Relation, in_order
from .divergence import Divergence


Reach = list[tuple[int, int]]  # per dimension (first, end)
LIMIT = 1 << 21  # entries of one table
_NUMPY = INTEGERS | {"floordiv": np.floor_divide, "floormod": np.mod}
_LINE = 128  # bytes: swizzling stays within a line, and wgmma reads whole rows of a line's width


def separate(a: Reach | None, b: Reach | None) -> bool:
    """Whether two ranges of elements of one buffer are known to have none in common."""
    return a is not None and b is not None and any(x[1] <= y[0] or y[1] <= x[0] for x, y in zip(a, b))


class Tables:
    """Tables of the accesses of one launch."""

    def __init__(self, launch: Launch, binds: dict[Var, Expr], divergence: Divergence) -> None:
        self.binds, self.divergence = binds, divergence
        self.claims = Claims(launch, binds)
        self.sharing: dict[Var, set[Var]] = {}  # the other storage in whose bytes a buffer is
        for one, other in launch.plan.reuse:
            self.sharing.setdefault(one.data, set()).add(other.data)
            self.sharing.setdefault(other.data, set()).add(one.data)
        x, y, z = launch.threads
        self.num_threads = x * y * z
        t = np.arange(self.num_threads)
        self.thread = dict(zip(launch.thread_vars, (t % x, t // x % y, t // (x * y))))
        self.roots: dict[int, tuple[Expr, frozenset[Var]]] = {}
        self.prints: dict[Any, Footprint | None] = {}
        self.decided: dict[Any, bool] = {}
        self.common_keys: dict[Any, bool] = {}  # by two footprints (each once for equal ones) and their widths
        self.equal: dict[Any, Footprint] = {}
        self.actors: dict[Access, int | None] = {}
        self.reached: dict[Access, Reach | None] = {}

    # ---- questions ----------------------------------------------------------------------------------------------

    def collide(self, a: Access, b: Access, how: Relation) -> bool:
        """Whether two different threads may access one element, at least one writing. a runs before b, as `how` says."""
        if not (a.writes or b.writes):
            return False
        if a.buffer.data is not b.buffer.data:
            return b.buffer.data in self.sharing.get(a.buffer.data, ())
        if a.buffer is b.buffer and separate(self.reach(a), self.reach(b)):
            return False
        if a.update and b.update and not in_order(a, b, self.divergence):
            return False
        shared = self.common(a, b, how)
        last = how.carried[0] if how.carried else None
        if any(loop.independent for loop in shared) or last is not None and last.independent:
            return False
        key = (id(a), id(b), how)
        hit = self.decided.get(key)
        if hit is None:
            hit = self.decided[key] = self._collide(a, b, how, shared)
        return hit

    def reach(self, a: Access) -> Reach | None:
        """The elements that all threads access in all iterations; None if they are not known."""
        if a not in self.reached:
            small = a.indices is None or a.buffer.dtype.bits * a.buffer.dtype.lanes < 8 or not _one_place(a.buffer, a.buffer)
            f = None if small else self.footprint(a, (), frozenset())
            ends = None if f is None or any(f.terms) else f.ranges
            widths = [1] * (a.buffer.ndim - 1) + [a.width]
            self.reached[a] = None if ends is None else [(low, high + n) for (low, high), n in zip(ends, widths)]
        return self.reached[a]

    def common(self, a: Access, b: Access, how: Relation) -> list[Loop]:
        """Loops for which both accesses are in the same iteration."""
        out: list[Loop] = []
        for x, y in zip(a.loops, b.loops):
            if x is not y or (how.carried and x is how.carried[0]):
                break
            out.append(x)
        return out

    def rotates(self, loop: Loop, accesses: Iterable[Access]) -> bool:
        """Whether the loop's variable selects slots of a ring: some index depends on it modulo a small number."""
        if loop.var is None:
            return False
        periods = [self.period(loop.var, (a,)) for a in accesses]
        return any(p is not None and 1 < p <= 24 for p in periods)

    # ---- collision test ---------------------------------------------------------------------------------------------

    def _collide(self, a: Access, b: Access, how: Relation, shared: list[Loop]) -> bool:
        if a.update and b.update and self.actor(a) == self.actor(b) is not None:
            return False
        if a.indices is None or b.indices is None or not _one_place(a.buffer, b.buffer):
            return True
        if a.buffer.dtype.bits * a.buffer.dtype.lanes < 8:
            return True
        if self.claims.disjoint(a, b, how) or self.moves_on(a, b, how, shared):
            return False
        try:
            cases = self.cases(a, b, how, shared)
        except Unknown:
            return True
        for fix_a, fix_b, fixed_terms in cases:
            fa = self.footprint(a, fix_a, fixed_terms)
            fb = self.footprint(b, fix_b, fixed_terms)
            if fa is None or fb is None or self.meet(fa, fb, a.width, b.width, how):
                return True
        return False

    def moves_on(self, a: Access, b: Access, how: Relation, shared: list[Loop]) -> bool:
        """Whether each iteration of the loop between two accesses moves them further than they extend, in some dimension."""
        v = how.carried[0].var if how.carried else None
        if how.carried is None or v is None or not self.uses(a, v):
            return False
        terms = frozenset((v, *(x.var for x in shared if x.var is not None)))
        fa, fb = self.footprint(a, (), terms), self.footprint(b, (), terms)
        if fa is None or fb is None or fa.ranges is None or fb.ranges is None or len(fa.terms) != len(fb.terms):
            return False
        last = len(fa.terms) - 1
        for k, (ta, tb, (low, high), (lo, hi)) in enumerate(zip(fa.terms, fb.terms, fa.ranges, fb.ranges)):
            furthest = max(high + (a.width if k == last else 1) - lo, hi + (b.width if k == last else 1) - low)
            if ta == tb and abs(ta.get(v, 0)) >= furthest and not any(
                    x is not v and self.vars_of(x) & how.carried[0].defined for x in ta):
                return True
        return False

    def cases(self, a: Access, b: Access, how: Relation, shared: list[Loop]) -> list[tuple[Any, Any, frozenset[Var]]]:
        """Assignments of the loop variables that both depend on: [(values for a, values for b, vars kept as terms)]."""
        cases: list[tuple[dict[Var, int], dict[Var, int]]] = [({}, {})]
        terms: set[Var] = set()
        for loop in shared:
            v = loop.var
            if v is None or not (self.uses(a, v) or self.uses(b, v)):
                continue
            values, _ = self.values(loop, (a, b))
            if values is None:
                terms.add(v)
            else:
                cases = [({**fa, v: n}, {**fb, v: n}) for fa, fb in cases for n in values]
        if how.carried and how.carried[1] is not None:
            loop, d = how.carried[0], how.carried[1]
            v = loop.var
            if v is not None and (self.uses(a, v) or self.uses(b, v)):
                values, whole = self.values(loop, (a, b))
                if values is None:
                    raise Unknown
                cases = [({**fa, v: m}, {**fb, v: m + d}) for fa, fb in cases for m in values if not whole or m + d in values]
        for loop, e in how.entered:
            v = loop.var
            if v is None or not self.uses(b, v):
                continue
            if loop.count is not None and e >= loop.count:
                return []  # the loop has fewer iterations
            if loop.first is not None:  # otherwise every value in b's table counts
                cases = [(fa, {**fb, v: loop.first + e}) for fa, fb in cases]
        if len(cases) > 512:
            raise Unknown
        return [(tuple(fa.items()), tuple(fb.items()), frozenset(terms)) for fa, fb in cases]

    def values(self, loop: Loop, accesses: tuple[Access, ...]) -> tuple[range | None, bool]:
        """(values of a loop variable that represent all its values, whether these are all); None when it can only be kept as a
        term."""
        assert loop.var is not None
        period = self.period(loop.var, accesses)
        count, first = loop.count, loop.first
        if count is not None and first is not None and count <= 24 and (period is None or period > count):
            return range(first, first + count), True
        return range(period) if period is not None and period <= 24 else None, False

    def uses(self, a: Access, v: Var) -> bool:
        return any(v in self.vars_of(e) for e in (*(a.indices or ()), *a.conds))

    def period(self, v: Var, accesses: Iterable[Access]) -> int | None:
        """p such that the indices depend on v only through v mod p; None when there is none."""
        return self._common_period((e for a in accesses for e in a.indices or ()), v)

    def _period(self, e: Expr, v: Var) -> int | None:
        if v not in self.vars_of(e):
            return 1
        if isinstance(e, Var):
            return None if e is v else self._period(self.binds[e], v)
        if isinstance(e, Binary):
            if e.op == "floormod" and isinstance(e.b, Const) and e.b.value > 0:
                inner = self._period(e.a, v)
                if inner is not None:
                    return inner
                return int(e.b.value) if self._linear(e.a, v) else None
            if e.op == "bitand" and isinstance(e.b, Const) and (e.b.value + 1) & e.b.value == 0 and e.b.value >= 0:
                return int(e.b.value) + 1 if self._linear(e.a, v) else None
        return self._common_period((x for x in children(e) if isinstance(x, Expr)), v)

    def _common_period(self, exprs: Iterable[Expr], v: Var) -> int | None:
        p = 1
        for e in exprs:
            q = self._period(e, v)
            if q is None:
                return None
            p = math.lcm(p, q)
        return p

    def _linear(self, e: Expr, v: Var) -> bool:
        """Whether e is an integer linear combination in which v appears only linearly."""
        if v not in self.vars_of(e):
            return True
        if isinstance(e, Var):
            return e is v or self._linear(self.binds[e], v)
        if isinstance(e, Binary) and e.op in ("add", "sub"):
            return self._linear(e.a, v) and self._linear(e.b, v)
        if isinstance(e, Binary) and e.op == "mul":
            return isinstance(e.b, Const) and self._linear(e.a, v) or isinstance(e.a, Const) and self._linear(e.b, v)
        return False

    def vars_of(self, e: Expr) -> frozenset[Var]:
        """Variables an expression depends on, through bindings."""
        hit = self.roots.get(id(e))
        if hit is None:
            out: set[Var] = set()
            for x in walk(e):
                if isinstance(x, Var):
                    out.add(x)
                    if x in self.binds and not contains(self.binds[x], Load, Call):  # what is read has a value of its own
                        out |= self.vars_of(self.binds[x])
            hit = self.roots[id(e)] = (e, frozenset(out))
        return hit[1]

    def actor(self, a: Access) -> int | None:
        """The thread that makes an access, where its conditions admit only one."""
        if a not in self.actors:
            try:
                mask = Evaluation(self, replace(a, indices=(), width=1), {}, frozenset()).mask()
            except Unknown:
                mask = None
            who = np.arange(self.num_threads) if mask is None else np.flatnonzero(mask.any(1))
            self.actors[a] = int(who[0]) if len(who) == 1 else None
        return self.actors[a]

    # ---- tables -------------------------------------------------------------------------------------------------

    def footprint(self, a: Access, fixed: tuple[tuple[Var, int], ...], terms: frozenset[Var]) -> Footprint | None:
        key = (id(a), tuple((v, n) for v, n in fixed if self.uses(a, v)), terms)
        if key not in self.prints:
            try:
                made = Evaluation(self, a, dict(key[1]), terms).footprint()
                self.prints[key] = self.equal.setdefault(made.content, made)
            except Unknown:
                self.prints[key] = None
        return self.prints[key]

    def meet(self, fa: Footprint, fb: Footprint, wa: int, wb: int, how: Relation) -> bool:
        """Whether an element of fb is also in fa, accessed by another thread."""
        if fa.ranges is None or fb.ranges is None:
            return False  # a loop without iterations makes no access
        for ta, tb in zip(fa.terms, fb.terms):
            if ta.keys() != tb.keys() or any(ta[k] != tb[k] for k in ta):
                return True
            if how.carried and any(self.vars_of(k) & how.carried[0].defined for k in ta):
                return True  # the term is defined inside the loop: its values in the two iterations may differ
        both = id(fa), id(fb), wa, wb
        if both not in self.common_keys:
            self.common_keys[both] = self._meet(fa, fb, wa, wb)
        return self.common_keys[both]

    def _meet(self, fa: Footprint, fb: Footprint, wa: int, wb: int) -> bool:
        assert fa.ranges is not None and fb.ranges is not None
        widths = [(1, 1)] * (len(fa.keys) - 1) + [(wa, wb)]
        if any(hi + n <= low or high + m <= lo for (lo, hi), (low, high), (n, m) in zip(fa.ranges, fb.ranges, widths)):
            return False
        ka, ta_, kb, tb_ = self.flat(fa, fb, wa, wb)
        if ka.size == 0 or kb.size == 0:
            return False
        low, high = int(ka.min()), int(ka.max())
        inside = (kb >= low) & (kb <= high)
        if not inside.any():
            return False
        kb, tb_ = kb[inside] - low, tb_[inside]
        ka = ka - low
        if high - low >= 1 << 23:
            return True
        owner = np.full(high - low + 1, -1, dtype=np.int32)
        owner[ka] = ta_
        several = np.zeros(high - low + 1, dtype=bool)
        several[ka[owner[ka] != ta_]] = True
        o = owner[kb]
        return bool(np.any((o >= 0) & ((o != tb_) | several[kb])))

    def flat(self, fa: Footprint, fb: Footprint, wa: int, wb: int) -> tuple[Any, Any, Any, Any]:
        """(keys of a, threads of a, keys of b, threads of b) as one-dimensional arrays; equal keys mean equal elements."""
        spans = []
        for x, y in zip(fa.keys[:-1], fb.keys[:-1]):
            low = min(int(x.min()), int(y.min()))
            spans.append((low, max(int(x.max()), int(y.max())) - low + 1))
        x, y = fa.keys[-1], fb.keys[-1]
        low = min(int(x.min()), int(y.min()))
        spans.append((low, max(int(x.max()) + wa, int(y.max()) + wb) - low))
        if math.prod(n for _, n in spans) >= 1 << 62:
            raise OverflowError
        return (*self._flat(fa, spans, wa), *self._flat(fb, spans, wb))

    def _flat(self, f: Footprint, spans: list[tuple[int, int]], width: int) -> tuple[Any, Any]:
        key: Any = 0
        for k, (low, n) in zip(f.keys, spans):
            key = key * n + (k - low)
        threads = np.broadcast_to(np.arange(self.num_threads)[:, None], key.shape)
        if f.mask is not None:
            key, threads = key[f.mask], threads[f.mask]
        if width > 1:
            key = key[..., None] + np.arange(width)
            threads = np.broadcast_to(threads[..., None], key.shape)
        return key.ravel(), threads.ravel()


def _one_place(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers of one storage map equal indices to the same element, and different indices to different ones."""
    if a is not b and (a.shape, a.strides, a.offset, a.dtype.bits * a.dtype.lanes) != (
            b.shape, b.strides, b.offset, b.dtype.bits * b.dtype.lanes):
        return False
    reach = 1  # elements spanned by the dimensions of smaller strides
    dims = [(s, n) for s, n in zip(a.strides, a.shape) if isinstance(s, int) and isinstance(n, int) and n > 1]
    for stride, n in sorted((abs(s), n) for s, n in dims):
        if stride < reach:
            return False
        reach += stride * (n - 1)
    return True


# ---- claimed slots ----------------------------------------------------------------------------------------------------------
# Slots that threads claim with a counter: the old value of an atomic addition is unique to a thread.
#
#     at = atomic_add(n, 1)        # no two threads, and no two iterations of a loop, get the same number
#     q[at] = x                    # so these stores never collide
#
# This holds while the counter only grows. Where a plain store resets it, place_sync puts a block barrier between the store and
# the additions of other threads. Therefore only loops that contain such a store are excluded.


class Claims:
    """The claimed slots of one launch. binds: the values of its variables."""

    def __init__(self, launch: Launch, binds: dict[Var, Expr]) -> None:
        self.launch, self.binds = launch, binds

    def disjoint(self, a: Access, b: Access, how: Relation) -> bool:
        """Whether two accesses by different threads, a before b as `how` says, always go to different slots."""
        slots = self.slots(a)
        if not slots or a.width != 1 or b.width != 1:
            return False
        there = self.slots(b)
        counter = next((c for k, (v, c) in slots.items() if k in there and there[k][0] is v), None)
        if counter is None or not self.only_grows(counter):
            return False
        return how.carried is None or self.kept(how.carried[0].var, counter)

    def slots(self, a: Access) -> dict[int, tuple[Var, Var]]:
        """Dimensions in which an access is indexed by a claimed number: (that variable, the storage of its counter)."""
        out: dict[int, tuple[Var, Var]] = {}
        for k, i in enumerate(a.indices or ()):
            e = self.binds.get(i) if isinstance(i, Var) else None
            if isinstance(e, Call) and _adds(e) and isinstance(e.args[0], AddressOf) and all(
                    isinstance(x, Const) for x in e.args[0].indices):
                out[k] = i, e.args[0].buffer.data  # type: ignore[assignment]
        return out

    def only_grows(self, counter: Var) -> bool:
        """Whether all uses of the counter's address are additions and reads."""
        return all(_adds(x) or x.op == "atomic_load" for x in walk(self.launch.body, Call) if any(
            isinstance(y, AddressOf) and y.buffer.data is counter for y in x.args))

    def kept(self, var: Var | None, counter: Var) -> bool:
        """Whether no plain store resets the counter inside the loop of a variable."""
        loop = next((x for x in walk(self.launch.body, For) if x.var is var), None)
        return loop is not None and not any(x.buffer.data is counter for x in walk(loop, Store))


def _adds(e: Call) -> bool:
    return e.op == "atomic_add" and len(e.args) > 1 and isinstance(e.args[1], Const) and e.args[1].dtype.lanes == 1 and \
        not e.args[1].dtype.is_float and e.args[1].value >= 1


# ---- values of one access ---------------------------------------------------------------------------------------------------
# Index expressions and conditions for all threads and all iterations of an access's loops at once.


class Unknown(Exception):
    """The value cannot be tabulated."""


@state
class Value:
    """table + sum of coefficient * term: integers or booleans per thread and iteration, plus uniform unknowns."""

    table: Any  # ndarray or int
    terms: dict[Expr, int] = field(default_factory=dict)


@state
class Footprint:
    """Elements of an access: a key in each dimension, and which threads and iterations access it."""

    keys: tuple[Any, ...]  # per dimension ndarray (threads, points)
    terms: tuple[dict[Expr, int], ...]
    mask: Any  # ndarray (threads, points) or None

    @property
    def content(self) -> tuple[Any, ...]:
        """The fields as values that compare."""
        arrays = [np.asarray(x) for x in (*self.keys, *([] if self.mask is None else [self.mask]))]
        return *((x.shape, x.dtype.str, x.tobytes()) for x in arrays), *(frozenset(t.items()) for t in self.terms)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...] | None:
        """The least and the largest key of each dimension; None for an access in a loop without iterations."""
        return None if any(np.size(k) == 0 for k in self.keys) else tuple((int(k.min()), int(k.max())) for k in self.keys)


class Evaluation:
    """Index expressions of one access as tables; each loop variable has an axis of its own."""

    def __init__(self, tables: Tables | GroupTables, access: Access, fixed: dict[Var, int], terms: frozenset[Var]) -> None:
        self.t, self.a = tables, access
        self.env: dict[Var, Value] = {v: Value(n) for v, n in fixed.items()}
        self.kept = terms
        self.points = 1
        wanted = frozenset().union(*(tables.vars_of(e) for e in (*(access.indices or ()), *access.conds)))
        residues: set[Var] = set(fixed)
        axes: list[tuple[Var, Any]] = []
        for loop in access.loops:
            v = loop.var
            if v is None or v in self.env or v in terms or v not in wanted:
                continue
            if loop.count is not None and loop.first is not None and loop.count <= 4096:
                axes.append((v, loop.first + np.arange(loop.count)))
            elif any(v in tables.vars_of(e) for e in access.indices or ()):
                p = tables.period(v, (access,))
                if p is None or p > 64:
                    raise Unknown
                residues.add(v)
                axes.append((v, np.arange(p)))
        self.residues = residues
        self.rank = 1 + len(axes)
        for k, (v, values) in enumerate(axes):
            self.env[v] = Value(values.reshape((1,) * (k + 1) + (-1,) + (1,) * (len(axes) - k - 1)))
            self.points *= len(values)
        if self.points * tables.num_threads * max(1, access.width) > LIMIT:
            raise Unknown
        for v, values in tables.thread.items():
            self.env[v] = Value(values.reshape((-1,) + (1,) * len(axes)))
        self.shape = (tables.num_threads,) + tuple(len(values) for _, values in axes)

    def footprint(self) -> Footprint:
        keys, terms = [], []
        for e in self.a.indices or ():
            v = self.value(e.base if isinstance(e, Ramp) else e)
            keys.append(self.full(v.table))
            terms.append(v.terms)
        return Footprint(tuple(keys), tuple(terms), self.mask())

    def full(self, table: Any) -> Any:
        return np.broadcast_to(np.asarray(table), self.shape).reshape(self.t.num_threads, -1)

    def mask(self) -> Any:
        mask = None
        if self.a.lanes < 32:
            lane = (np.arange(self.t.num_threads) % 32 < self.a.lanes).reshape((-1,) + (1,) * (self.rank - 1))
            mask = self.full(lane)
        for c in self.a.conds:
            # A variable in `residues` stands for all values of its residue, so a condition on it proves nothing.
            if self.t.vars_of(c) & self.residues:
                continue
            try:
                v = self.value(c)
            except Unknown:
                continue
            if not v.terms:
                m = self.full(np.asarray(v.table, dtype=bool))
                mask = m if mask is None else mask & m
        return mask

    def value(self, e: Expr) -> Value:
        if e.dtype.is_float:
            raise Unknown
        if isinstance(e, Const):
            return Value(int(e.value))
        if isinstance(e, Var):
            got = self.env.get(e)
            if got is None:
                got = self.env[e] = self.variable(e)
            return got
        if isinstance(e, Cast) and (e.dtype.is_int or e.dtype.is_bool) and not e.value.dtype.is_float:
            return self.cast(e)
        if isinstance(e, Binary):
            return self.fitted(e, self.combined(e))
        if isinstance(e, Unary):
            v = self.value(e.a)
            if e.op == "neg":
                return self.fitted(e, Value(-np.asarray(v.table), {k: -c for k, c in v.terms.items()}))
            if not v.terms:
                return self.fitted(e, Value(np.logical_not(v.table) if e.op == "not" else np.invert(np.asarray(v.table))))
        if isinstance(e, Select):
            c, x, y = self.value(e.cond), self.value(e.a), self.value(e.b)
            if not (c.terms or x.terms or y.terms):
                return Value(np.where(c.table, x.table, y.table))
        return self.term(e)

    def variable(self, v: Var) -> Value:
        bound = self.t.binds.get(v)
        if bound is not None and not contains(bound, Load, Call):
            return self.value(bound)
        if self.t.divergence.divergent(v):
            raise Unknown
        return Value(0, {v: 1})

    def term(self, e: Expr) -> Value:
        """e as an unknown that is the same for all threads."""
        if contains(e, Load, Call):
            raise Unknown
        roots = self.t.vars_of(e)
        if any(v in self.env and not self.env[v].terms for v in roots) or self.t.divergence.divergent(e):
            raise Unknown
        return Value(0, {e: 1})

    def cast(self, e: Cast) -> Value:
        """A value in another type. Unknowns of 32 bits and more are assumed to fit."""
        v = self.value(e.value)
        if keeps_value(e.value.dtype, e.dtype) or v.terms and e.dtype.is_int and e.dtype.bits >= 32:
            return v
        return self.term(e) if v.terms else Value(wrapped(v.table, e.dtype))

    def fitted(self, e: Expr, v: Value) -> Value:
        """The value of e, computed without overflow, wrapped to e's type."""
        if not may_wrap(e.dtype, getattr(e, "op", "")) or v.terms and e.dtype.bits >= 32:
            return v
        return self.term(e) if v.terms else Value(wrapped(v.table, e.dtype))

    def combined(self, e: Binary) -> Value:
        a, b = self.value(e.a), self.value(e.b)
        if e.op in ("add", "sub"):
            terms = dict(a.terms)
            for k, c in b.terms.items():
                terms[k] = terms.get(k, 0) + (c if e.op == "add" else -c)
            return Value(_NUMPY[e.op](a.table, b.table), {k: c for k, c in terms.items() if c})
        if not a.terms and not b.terms:
            fn = _NUMPY.get(e.op)
            if fn is None:
                if e.op not in ("truncdiv", "truncmod"):
                    raise Unknown
                q = np.sign(a.table) * np.sign(b.table) * (np.abs(a.table) // np.maximum(np.abs(b.table), 1))
                return Value(q if e.op == "truncdiv" else a.table - q * b.table)
            if e.op in ("floordiv", "floormod") and not np.all(b.table):
                raise Unknown
            return Value(fn(a.table, b.table))
        if e.op == "mul":
            for x, y in ((a, b), (b, a)):
                if not y.terms and np.ndim(y.table) == 0:
                    c = int(y.table)
                    return Value(np.multiply(x.table, c), {k: n * c for k, n in x.terms.items() if n * c})
        return self.term(e)


# ---- accesses of warp groups ------------------------------------------------------------------------------------------------


class GroupTables:
    """Answers like Tables, for conflicts between threads of different warp groups only.

    The lines of an access, of 128 bytes, are those of all iterations of its loops.  Where they are not known, the groups count
    as meeting.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.binds: dict[Var, Expr] = {v: e.args[0] if isinstance(e, Call) and e.op == "warp_uniform" else e
                                       for v, e in tables.binds.items()}
        self.known: dict[Access, list[int] | None] = {}

    def collide(self, a: Access, b: Access, how: Relation) -> bool:
        """Whether threads of different warp groups may access one element, at least one writing."""
        return self.tables.collide(a, b, how) and self.meet(a, b)

    def meet(self, a: Access, b: Access) -> bool:
        """Whether a line of one group is also one of another group."""
        if a.buffer.data is not b.buffer.data:
            return True
        one, two = self.lines(a), self.lines(b)
        return one is None or two is None or any(x & y for g, x in enumerate(one) for h, y in enumerate(two) if g != h)

    def __getattr__(self, name: str) -> Any:
        """What does not differ between threads of a group and others."""
        return getattr(self.tables, name)

    def lines(self, a: Access) -> list[int] | None:
        """Per warp group the lines from the start of the storage, as bits; None if they are not known."""
        if a not in self.known:
            try:
                self.known[a] = self._lines(a)
            except Unknown:
                self.known[a] = None
        return self.known[a]

    def _lines(self, a: Access) -> list[int]:
        b, size = a.buffer, a.buffer.dtype.bits * a.buffer.dtype.lanes // 8
        if not a.is_shared or b.ndim != 1 or b.offset != 0 or not size:
            raise Unknown
        indices = a.indices if a.matrix is None else (_start(a.matrix, size),)
        if indices is None:
            raise Unknown
        got = Evaluation(self, replace(a, indices=indices), {}, frozenset()).footprint()
        if got.terms[0]:
            raise Unknown
        keys: Any = np.asarray(got.keys[0]).astype(np.int64)
        on = np.ones(keys.shape, bool) if got.mask is None else got.mask
        out = []
        for g in range(0, self.num_threads, GROUP):
            starts = np.unique(keys[g:g + GROUP][on[g:g + GROUP]])
            if a.matrix is None:
                first, last = starts * size // _LINE, (starts * size + a.width * size - 1) // _LINE
                lines = [n for x, y in set(zip(first.tolist(), last.tolist())) for n in range(x, y + 1)]
            else:
                lines = [n for x in starts for n in _operand(a.matrix, int(x))]
            if any(n < 0 for n in lines):
                raise Unknown
            out.append(sum(1 << n for n in set(lines)))
        return out


def _start(m: Matrix, size: int) -> Expr:
    """The byte where an operand of wgmma starts in its storage."""
    at: Any = m.descriptor.args[0]
    if not isinstance(at, AddressOf) or len(at.indices) != 1:
        raise Unknown
    more = m.descriptor.args[1] if len(m.descriptor.args) > 1 else const(0)
    start: Expr = at.indices[0] * size + more + m.descriptor.options.offset
    return start


def _operand(m: Matrix, start: int) -> list[int]:
    """The lines that an operand touches."""
    row, o, left = WGMMA_ROWS[m.call.options.row], m.descriptor.options, m.call.args[1] is m.descriptor
    major = m.call.options.a_major if left else m.call.options.b_major
    extent, dt = (64, row.a_dtype) if left else (row.shape[1], row.b_dtype)
    base = start // 1024 * 1024  # a descriptor holds 18 bits of an address
    at = operand_addresses(encode_descriptor(start - base, o.lbo, o.sbo, o.swizzle), major, extent, -(-dt.bits // 8),
                           K_STEP_BYTES if left else row.b_bytes)
    return [int(n) for n in np.unique((at + base) // _LINE)]
