"""Which elements each thread touches: exact tables of index expressions, and whether two accesses can collide.

An address is  table[thread, point] + sum of coefficient * term : points run over the loops of the access, terms are
values that are the same for all threads and unknown here (block indices, sizes).  Two accesses whose terms are equal
are compared by their tables, exactly; everything else counts as a collision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any

import numpy as np

from tilelang.ir import Binary, Buffer, Cast, Const, Expr, Launch, Load, Ramp, Select, Unary, Var, While, walk
from tilelang.ir.expr import Call
from tilelang.ir.record import entity, record, state
from tilelang.ir.visitor import children

from .atomic_order import Update, in_order
from .claimed_slots import Claims
from .divergence import Divergence

LIMIT = 1 << 21  # entries of one table
_NUMPY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "floormod": np.mod,
    "min": np.minimum, "max": np.maximum, "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
}


@entity
class Loop:
    """A loop around an access.  var: None for while.  independent: its iterations are those of a parallel loop.  turns: the
    statement of a while loop."""

    var: Var | None
    start: Expr | None
    extent: Expr | None
    independent: bool = False
    turns: While | None = None
    defined: set[Any] = field(default_factory=set)  # Vars defined inside

    @property
    def count(self) -> int | None:
        return int(self.extent.value) if isinstance(self.extent, Const) else None

    @property
    def first(self) -> int | None:
        return int(self.start.value) if isinstance(self.start, Const) else None


@entity
class Access:
    """One access to memory that other threads can see.

    indices: None when unknown (the whole buffer).  width: consecutive elements in the last dimension.  loops: around
    it, outermost first.  conds: conditions under which it runs (those that are values of threads and loops help).
    """

    buffer: Buffer
    reads: bool
    writes: bool
    update: Update | None
    indices: tuple[Expr, ...] | None
    width: int
    loops: tuple[Loop, ...]
    conds: tuple[Expr, ...]
    is_async: bool
    span: Any
    lanes: int = 32  # lanes of a warp whose address counts
    signals: Buffer | None = None  # mbarrier that tells when it has happened (TMA loads)

    @property
    def is_shared(self) -> bool:
        """Whether it is in the block's shared memory (else global)."""
        return self.buffer.scope_name.startswith("shared")


@record
class Relation:
    """How the run of an earlier access relates to that of a later one.

    carried: (loop, iterations in between, None = unknown).  entered: loops that the later one is in and the earlier one
    is not, or was in before, with the number of the iteration, where that is known.
    """

    carried: tuple[Loop, int | None] | None = None
    entered: tuple[tuple[Loop, int], ...] = ()


class _Unknown(Exception):
    """The value cannot be tabulated."""


@state
class _Value:
    table: Any  # ndarray or int
    terms: dict[Expr, int] = field(default_factory=dict)


@state
class _Footprint:
    keys: tuple[Any, ...]  # per dimension ndarray (threads, points)
    terms: tuple[dict[Expr, int], ...]
    mask: Any  # ndarray (threads, points) or None


class Tables:
    """Tables of the accesses of one launch."""

    def __init__(self, launch: Launch, binds: dict[Var, Expr], divergence: Divergence) -> None:
        self.binds, self.divergence = binds, divergence
        self.claims = Claims(launch, binds)
        x, y, z = launch.threads
        self.num_threads = x * y * z
        t = np.arange(self.num_threads)
        self.thread = dict(zip(launch.thread_vars, (t % x, t // x % y, t // (x * y))))
        self.roots: dict[int, tuple[Expr, frozenset[Var]]] = {}
        self.prints: dict[Any, _Footprint | None] = {}
        self.decided: dict[Any, bool] = {}
        self.actors: dict[Access, int | None] = {}

    # ---- questions ----------------------------------------------------------------------------------------------

    def collide(self, a: Access, b: Access, how: Relation) -> bool:
        """Whether two different threads may touch one element, one of them writing, a before b as `how` says."""
        if a.buffer.data is not b.buffer.data or not (a.writes or b.writes):
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

    def common(self, a: Access, b: Access, how: Relation) -> list[Loop]:
        """Loops of which both are in the same iteration."""
        out: list[Loop] = []
        for x, y in zip(a.loops, b.loops):
            if x is not y or (how.carried and x is how.carried[0]):
                break
            out.append(x)
        return out

    def rotates(self, loop: Loop, accesses: Iterable[Access]) -> bool:
        """Whether the loop's variable picks slots: some index depends on it modulo a small number."""
        if loop.var is None:
            return False
        periods = [self.period(loop.var, (a,)) for a in accesses]
        return any(p is not None and 1 < p <= 24 for p in periods)

    # ---- deciding -----------------------------------------------------------------------------------------------

    def _collide(self, a: Access, b: Access, how: Relation, shared: list[Loop]) -> bool:
        if a.update and b.update and self.actor(a) == self.actor(b) is not None:
            return False
        if a.indices is None or b.indices is None or a.buffer is not b.buffer and a.buffer.shape != b.buffer.shape:
            return True
        if a.buffer.dtype.bits * a.buffer.dtype.lanes < 8:
            return True
        if self.claims.apart(a, b, how):
            return False
        try:
            cases = self.cases(a, b, how, shared)
        except _Unknown:
            return True
        for fix_a, fix_b, fixed_terms in cases:
            fa = self.footprint(a, fix_a, fixed_terms)
            fb = self.footprint(b, fix_b, fixed_terms)
            if fa is None or fb is None or self.meet(fa, fb, a.width, b.width, how, a):
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
            values = self.values(loop, (a, b))
            if values is None:
                terms.add(v)
            else:
                cases = [({**fa, v: n}, {**fb, v: n}) for fa, fb in cases for n in values]
        if how.carried and how.carried[1] is not None:
            loop, d = how.carried[0], how.carried[1]
            v = loop.var
            if v is not None and (self.uses(a, v) or self.uses(b, v)):
                pairs = self.lap_pairs(loop, d, (a, b))
                cases = [({**fa, v: m}, {**fb, v: n}) for fa, fb in cases for m, n in pairs]
        for loop, e in how.entered:
            v = loop.var
            if v is None or not self.uses(b, v):
                continue
            if loop.count is not None and e >= loop.count:
                return []  # the loop does not run that often
            if loop.first is not None:  # else every value of b's table counts
                cases = [(fa, {**fb, v: loop.first + e}) for fa, fb in cases]
        if len(cases) > 512:
            raise _Unknown
        return [(tuple(fa.items()), tuple(fb.items()), frozenset(terms)) for fa, fb in cases]

    def lap_pairs(self, loop: Loop, d: int, accesses: tuple[Access, ...]) -> list[tuple[int, int]]:
        assert loop.var is not None
        period = self.period(loop.var, accesses)
        count, first = loop.count, loop.first
        if count is not None and first is not None and count <= 24 and (period is None or period > count):
            vs = range(first, first + count)
            return [(m, m + d) for m in vs if m + d in vs]
        if period is not None and period <= 24:
            return [(m, m + d) for m in range(period)]
        raise _Unknown

    def values(self, loop: Loop, accesses: tuple[Access, ...]) -> list[int] | None:
        """Values of a loop variable that stand for all, None when it can only be kept as a term."""
        assert loop.var is not None
        period = self.period(loop.var, accesses)
        count, first = loop.count, loop.first
        if count is not None and first is not None and count <= 24 and (period is None or period > count):
            return list(range(first, first + count))
        return list(range(period)) if period is not None and period <= 24 else None

    def uses(self, a: Access, v: Var) -> bool:
        return any(v in self.vars_of(e) for e in (*(a.indices or ()), *a.conds))

    def period(self, v: Var, accesses: Iterable[Access]) -> int | None:
        """p such that the indices depend on v only through v mod p; None when there is none."""
        p = 1
        for a in accesses:
            for e in a.indices or ():
                q = self._period(e, v)
                if q is None:
                    return None
                p = math.lcm(p, q)
        return p

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
        p = 1
        for c in _operands(e):
            q = self._period(c, v)
            if q is None:
                return None
            p = math.lcm(p, q)
        return p

    def _linear(self, e: Expr, v: Var) -> bool:
        """Whether e is an integer combination with v only in linear place."""
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
        """Variables an expression depends on, bindings followed."""
        hit = self.roots.get(id(e))
        if hit is None:
            out: set[Var] = set()
            for x in walk(e):
                if isinstance(x, Var):
                    out.add(x)
                    if x in self.binds:
                        out |= self.vars_of(self.binds[x])
            hit = self.roots[id(e)] = (e, frozenset(out))
        return hit[1]

    def actor(self, a: Access) -> int | None:
        """The thread that makes an access, where its conditions let only one through."""
        if a not in self.actors:
            try:
                mask = _Evaluation(self, replace(a, indices=(), width=1), {}, frozenset()).mask()
            except _Unknown:
                mask = None
            who = np.arange(self.num_threads) if mask is None else np.flatnonzero(mask.any(1))
            self.actors[a] = int(who[0]) if len(who) == 1 else None
        return self.actors[a]

    # ---- tables -------------------------------------------------------------------------------------------------

    def footprint(self, a: Access, fixed: tuple[tuple[Var, int], ...], terms: frozenset[Var]) -> _Footprint | None:
        key = (id(a), tuple((v, n) for v, n in fixed if self.uses(a, v)), terms)
        if key not in self.prints:
            try:
                self.prints[key] = _Evaluation(self, a, dict(key[1]), terms).footprint()
            except _Unknown:
                self.prints[key] = None
        return self.prints[key]

    def meet(self, fa: _Footprint, fb: _Footprint, wa: int, wb: int, how: Relation, a: Access) -> bool:
        """Whether an element of fb is in fa, of another thread."""
        if any(np.size(k) == 0 for k in (*fa.keys, *fb.keys)):
            return False  # in a loop without iterations
        for ta, tb in zip(fa.terms, fb.terms):
            if ta.keys() != tb.keys() or any(ta[k] != tb[k] for k in ta):
                return True
            if how.carried and any(self.vars_of(k) & how.carried[0].defined for k in ta):
                return True  # a value of another iteration
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

    def flat(self, fa: _Footprint, fb: _Footprint, wa: int, wb: int) -> tuple[Any, Any, Any, Any]:
        """(keys of a, threads of a, keys of b, threads of b) as one-dimensional arrays; equal key = equal element."""
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

    def _flat(self, f: _Footprint, spans: list[tuple[int, int]], width: int) -> tuple[Any, Any]:
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


class _Evaluation:
    """Index expressions of one access as tables, loop variables enumerated on axes of their own."""

    def __init__(self, tables: Tables, access: Access, fixed: dict[Var, int], terms: frozenset[Var]) -> None:
        self.t, self.a = tables, access
        self.env: dict[Var, _Value] = {v: _Value(n) for v, n in fixed.items()}
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
                    raise _Unknown
                residues.add(v)
                axes.append((v, np.arange(p)))
        self.residues = residues
        self.rank = 1 + len(axes)
        for k, (v, values) in enumerate(axes):
            self.env[v] = _Value(values.reshape((1,) * (k + 1) + (-1,) + (1,) * (len(axes) - k - 1)))
            self.points *= len(values)
        if self.points * tables.num_threads * max(1, access.width) > LIMIT:
            raise _Unknown
        for v, values in tables.thread.items():
            self.env[v] = _Value(values.reshape((-1,) + (1,) * len(axes)))
        self.shape = (tables.num_threads,) + tuple(len(values) for _, values in axes)

    def footprint(self) -> _Footprint:
        keys, terms = [], []
        for e in self.a.indices or ():
            v = self.value(e.base if isinstance(e, Ramp) else e)
            keys.append(self.full(v.table))
            terms.append(v.terms)
        return _Footprint(tuple(keys), tuple(terms), self.mask())

    def full(self, table: Any) -> Any:
        return np.broadcast_to(np.asarray(table), self.shape).reshape(self.t.num_threads, -1)

    def mask(self) -> Any:
        mask = None
        if self.a.lanes < 32:
            lane = (np.arange(self.t.num_threads) % 32 < self.a.lanes).reshape((-1,) + (1,) * (self.rank - 1))
            mask = self.full(lane)
        for c in self.a.conds:
            # A condition on a variable that only stands for its residue says nothing.
            if self.t.vars_of(c) & self.residues:
                continue
            try:
                v = self.value(c)
            except _Unknown:
                continue
            if not v.terms:
                m = self.full(np.asarray(v.table, dtype=bool))
                mask = m if mask is None else mask & m
        return mask

    def value(self, e: Expr) -> _Value:
        if e.dtype.is_float:
            raise _Unknown
        if isinstance(e, Const):
            return _Value(int(e.value))
        if isinstance(e, Var):
            got = self.env.get(e)
            if got is None:
                got = self.env[e] = self.variable(e)
            return got
        if isinstance(e, Cast) and (e.dtype.is_int or e.dtype.is_bool) and not e.value.dtype.is_float:
            return self.value(e.value)
        if isinstance(e, Binary):
            return self.binary(e)
        if isinstance(e, Unary):
            v = self.value(e.a)
            if e.op == "neg":
                return _Value(-np.asarray(v.table), {k: -c for k, c in v.terms.items()})
            if not v.terms:
                return _Value(np.logical_not(v.table) if e.op == "not" else np.invert(np.asarray(v.table)))
        if isinstance(e, Select):
            c, x, y = self.value(e.cond), self.value(e.a), self.value(e.b)
            if not (c.terms or x.terms or y.terms):
                return _Value(np.where(c.table, x.table, y.table))
        return self.term(e)

    def variable(self, v: Var) -> _Value:
        bound = self.t.binds.get(v)
        if bound is not None and not any(isinstance(x, (Load, Call)) for x in walk(bound)):
            return self.value(bound)
        if self.t.divergence.divergent(v):
            raise _Unknown
        return _Value(0, {v: 1})

    def term(self, e: Expr) -> _Value:
        """e as an unknown that is the same for all threads."""
        if any(isinstance(x, (Load, Call)) for x in walk(e)):
            raise _Unknown
        roots = self.t.vars_of(e)
        if any(v in self.env and not self.env[v].terms for v in roots) or self.t.divergence.divergent(e):
            raise _Unknown
        return _Value(0, {e: 1})

    def binary(self, e: Binary) -> _Value:
        a, b = self.value(e.a), self.value(e.b)
        if e.op in ("add", "sub"):
            terms = dict(a.terms)
            for k, c in b.terms.items():
                terms[k] = terms.get(k, 0) + (c if e.op == "add" else -c)
            return _Value(_NUMPY[e.op](a.table, b.table), {k: c for k, c in terms.items() if c})
        if not a.terms and not b.terms:
            fn = _NUMPY.get(e.op)
            if fn is None:
                if e.op not in ("truncdiv", "truncmod"):
                    raise _Unknown
                q = np.sign(a.table) * np.sign(b.table) * (np.abs(a.table) // np.maximum(np.abs(b.table), 1))
                return _Value(q if e.op == "truncdiv" else a.table - q * b.table)
            if e.op in ("floordiv", "floormod") and not np.all(b.table):
                raise _Unknown
            return _Value(fn(a.table, b.table))
        if e.op == "mul":
            for x, y in ((a, b), (b, a)):
                if not y.terms and np.ndim(y.table) == 0:
                    c = int(y.table)
                    return _Value(np.multiply(x.table, c), {k: n * c for k, n in x.terms.items() if n * c})
        return self.term(e)


def _operands(e: Expr) -> list[Expr]:
    return [c for c in children(e) if isinstance(c, Expr)]


__all__ = ["Access", "Loop", "Relation", "Tables"]
