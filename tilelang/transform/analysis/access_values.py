"""Evaluate the index expressions and conditions of one access for all threads and all iterations of its loops at once."""

from __future__ import annotations

from functools import cached_property
from dataclasses import field
from typing import Any, Protocol

import numpy as np

from tilelang.arith import simplify
from tilelang.ir import Binary, Call, Cast, Const, Expr, Load, Ramp, Select, Store, Unary, Var, binary, contains, walk
from tilelang.ir.record import state
from tilelang.ir.numbers import INTEGERS, keeps_value, may_wrap, wrapped

from .accesses import Access
from .divergence import Divergence

LIMIT = 1 << 21  # entries of one table
_NUMPY = INTEGERS | {"floordiv": np.floor_divide, "floormod": np.mod}


class Launched(Protocol):
    """What is known of a launch (access_table.Tables): its threads, values of variables, what differs between threads."""

    num_threads: int
    thread: dict[Var, Any]
    binds: dict[Var, Expr]
    divergence: Divergence

    def vars_of(self, e: Expr) -> frozenset[Var]: ...

    def period(self, v: Var, accesses: tuple[Access, ...]) -> int | None: ...


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

    def __init__(self, tables: Launched, access: Access, fixed: dict[Var, int], terms: frozenset[Var]) -> None:
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


def rereads(s: Store) -> bool:
    """Whether a store's value is computed from the element that it replaces."""
    return any(e.buffer is s.buffer and all(map(_equal, e.indices, s.indices)) for e in walk(s.value, Load))


def _equal(a: Expr, b: Expr) -> bool:
    if a is b:
        return True
    d = simplify(binary("sub", a, b)) if a.dtype == b.dtype else None
    return isinstance(d, Const) and d.value == 0
