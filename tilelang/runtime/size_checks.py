"""Finds the conditions under which the sizes, indices and comparisons of a program do not overflow; each call checks them.

    m = T.dynamic("m")                                  checked at a call:
    with T.Kernel(T.ceildiv(m, 64), threads=64) as bx:      m + 63 <= 2**31 - 1
        A[bx * 64 + tx]                                     ((m + 63) // 64 - 1) * 64 + 63 <= 2**31 - 1

The analyzer takes index arithmetic on sizes not to wrap (arith/value_scalars.py says of which scalars).  These checks are what
makes that true: a call whose sizes are too large is rejected on every backend, instead of computing something else.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tilelang.arith import is_large, value_scalars
from tilelang.ir import (Binary, Bind, Cast, Const, Expr, For, Func, If, Launch, Load, Parallel, Region, Select, Seq, Stmt,
                         Unary, Var, binary, cast, children, const, free_vars, int_range, walk)
from tilelang.ir.record import record
from tilelang.target.machine import MAX_GRID

from .llvm_text import text_of
from .signature import ScalarArg, Signature

Bound = int | Expr
Range = tuple[Bound, Bound]
_ARITHMETIC = ("add", "sub", "mul", "shl")
_NEVER_TRAPS = frozenset({"add", "sub", "mul", "min", "max", "eq", "ne", "lt", "le", "gt", "ge", "and", "or"})


@record
class SizeCheck:
    """One condition: low <= value <= high, where value is computed in 64 bits.  unless: conditions; the check is left out where
    one of them is false.  text: the program's expression."""

    value: Expr
    low: int
    high: int
    text: str
    unless: tuple[Expr, ...] = ()


def size_checks(func: Func, sig: Signature) -> tuple[SizeCheck, ...]:
    """The checks of a program, each once, without those that hold for all arguments."""
    return tuple(_Finder(func, sig).found.values())


class Ranges:
    """Ranges of integer expressions, as numbers or as 64-bit expressions of what the host knows.

    known: variables whose value the host knows, and the range that stands for it.  None: nothing is known (data)."""

    def __init__(self, known: Mapping[Var, Range]) -> None:
        self.vars: dict[Var, Range | None] = {**known}

    def of(self, e: Any) -> Range | None:
        if isinstance(e, int):
            return e, e
        if isinstance(e, Const):
            return (int(e.value), int(e.value)) if e.dtype.is_int else None
        if isinstance(e, Var):
            return self.vars.get(e)
        if not e.dtype.is_int or e.dtype.lanes != 1:
            return None
        if isinstance(e, Load):
            return int_range(e.dtype) if e.dtype.bits <= 16 else None
        if isinstance(e, Unary) and e.op == "neg":
            x = self.of(e.a)
            return None if x is None else (_sub(0, x[1]), _sub(0, x[0]))
        if isinstance(e, Cast):
            low, high = int_range(e.value.dtype) if e.value.dtype.is_int else (1, 0)
            to_low, to_high = int_range(e.dtype)
            return self.of(e.value) if e.value.dtype.is_int and to_low <= low and high <= to_high else None
        if isinstance(e, Select):
            return _union(self.of(e.a), self.of(e.b))
        return self._binary(e) if isinstance(e, Binary) and e.dtype.is_signed else None

    def _binary(self, e: Binary) -> Range | None:
        if e.op == "bitand":
            masks = [int(x.value) for x in (e.a, e.b) if isinstance(x, Const) and x.value >= 0]
            return (0, masks[0]) if masks else None
        x, y = self.of(e.a), self.of(e.b)
        if e.op in ("floormod", "truncmod") and y is not None and (e.op == "floormod" or x is not None and _at_least_0(x[0])):
            return (0, _sub(y[1], 1)) if _at_least_0(y[0]) else None
        if x is None or y is None:
            return None
        if e.op in ("add", "sub", "mul") and x[0] is x[1] and y[0] is y[1]:
            value = {"add": _add, "sub": _sub}.get(e.op, partial(_apply, "mul"))(x[0], y[0])
            return value, value
        match e.op:
            case "add": return _add(x[0], y[0]), _add(x[1], y[1])
            case "sub": return _sub(x[0], y[1]), _sub(x[1], y[0])
            case "mul": return _multiplied(x, y)
            case "shl":
                k = y[0]
                return _multiplied(x, (1 << k, 1 << k)) if k is y[1] and isinstance(k, int) and 0 <= k < 31 else None
            case "min" | "max": return _apply(e.op, x[0], y[0]), _apply(e.op, x[1], y[1])
            case "floordiv" | "truncdiv":
                if isinstance(y[0], int) and y[0] is y[1] and y[0] > 0 and (e.op == "floordiv" or _at_least_0(x[0])):
                    low = _apply("floordiv", x[0], y[0])
                    return low, low if x[0] is x[1] else _apply("floordiv", x[1], y[0])
                if _at_least_0(y[0]):  # the quotient is not farther from 0
                    return _apply("min", x[0], 0), _apply("max", x[1], 0)
        return None


class _Finder:
    """One walk over a program."""

    def __init__(self, func: Func, sig: Signature) -> None:
        scalars = [a.var for a in sig.args if isinstance(a, ScalarArg) and a.var.dtype.is_int]
        self.exact = {*scalars, *sig.symbols}  # variables that the host knows
        # Variables that depend on sizes: the analyzer takes arithmetic on them not to wrap.
        self.sized = self.exact - set(value_scalars(func.body, scalars))
        self.host = Ranges({v: (v, v) for v in self.exact})
        self.always = Ranges({v: int_range(v.dtype) for v in scalars} | {v: (0, int_range(v.dtype)[1]) for v in sig.symbols})
        self.found: dict[str, SizeCheck] = {}
        self.done = set[tuple[int, bool]]()
        self.alive: list[Any] = []
        self.met = Counter(walk(func.body, Var))  # once where a variable is bound, and at each use
        if self.sized:
            self.stmt(func.body, ())

    # ---- statements -----------------------------------------------------------------------------------------------------
    def stmt(self, s: Any, unless: tuple[Expr, ...]) -> None:
        match s:
            case Seq():
                for x in s.stmts:
                    self.stmt(x, unless)
            case Launch():
                for v, g, most in zip(s.block_vars, s.grid, MAX_GRID):
                    self.size(g, unless, 0, most)
                    self.bind(v, g)
                for v, n in zip(s.thread_vars, s.threads):
                    self.bind(v, n)
                self.stmt(s.body, unless)
            case For():
                self.size(s.extent, unless)
                self.size(s.start, unless)
                self.bind(s.var, s.extent, s.start)
                self.stmt(s.body, unless)
            case Parallel():
                for v, extent in zip(s.vars, s.extents):
                    self.size(extent, unless)
                    self.bind(v, extent)
                self.stmt(s.body, unless)
            case Bind():
                if self.met[s.var] > 1:  # else only a twin of 64 bits is read (transform/analysis/index_width.py)
                    self.expr(s.value, unless)
                self.depend(s.var, s.value)
                for r in (self.host, self.always):
                    r.vars[s.var] = r.of(s.value)
            case If():
                self.expr(s.cond, unless)
                known = self.is_known(s.cond)
                self.stmt(s.then, (*unless, s.cond) if known else unless)
                if s.orelse is not None:
                    self.stmt(s.orelse, (*unless, Unary("not", s.cond, s.cond.dtype)) if known else unless)
            case _:
                for part in children(s):
                    self.inner(part, unless)

    def inner(self, x: Any, unless: tuple[Expr, ...]) -> None:
        if isinstance(x, Stmt):
            self.stmt(x, unless)
        elif isinstance(x, Expr):
            self.expr(x, unless)
        elif isinstance(x, Region):
            self.region(x, unless)
        elif isinstance(x, tuple):
            for y in x:
                self.inner(y, unless)

    def region(self, r: Region, unless: tuple[Expr, ...]) -> None:
        for low, n in zip(r.mins, r.extents):
            self.size(n, unless)
            self.expr(low, unless)
            if not isinstance(low, Const):
                self.check(f"{text_of(low)} + {n if isinstance(n, int) else text_of(n)}",
                           _last(self.host.of(low), self.host.of(n)), _last(self.always.of(low), self.always.of(n)),
                           *int_range(low.dtype), unless)

    def is_known(self, cond: Expr) -> bool:
        """Whether the host can tell if a condition holds, without dividing."""
        return free_vars(cond) <= self.exact and all(
            isinstance(x, (Var, Const, Unary)) or isinstance(x, Binary) and x.op in _NEVER_TRAPS for x in walk(cond))

    def bind(self, v: Var, extent: Any, start: Any = 0) -> None:
        """Record that a variable runs over [start, start + extent)."""
        self.depend(v, extent, start)
        for r in (self.host, self.always):
            first, n = r.of(start), r.of(extent)
            r.vars[v] = None if first is None or n is None else (first[0], _sub(_add(first[1], n[1]), 1))

    def depend(self, v: Var, *on: Any) -> None:
        """Record that the values of a variable follow from expressions."""
        if any(isinstance(e, Expr) and not self.sized.isdisjoint(free_vars(e)) for e in on):
            self.sized.add(v)

    # ---- expressions ------------------------------------------------------------------------------------------------
    def size(self, e: Any, unless: tuple[Expr, ...], least: int | None = None, most: int = 2**31 - 1) -> None:
        """Check an extent, also where its arithmetic looks like a hash.  least, most: outside of them a call is rejected."""
        if isinstance(e, Expr):
            self.expr(e, unless, True)
            for x in walk(e, Binary):
                if x.op == "shl" and not isinstance(x.b, Const):
                    host, always = (_shifted(r.of(x.a), r.of(x.b)) for r in (self.host, self.always))
                    self.check(text_of(x), host, always, *int_range(x.dtype), unless)
            if least is not None:
                self.check(text_of(e), self.host.of(e), self.always.of(e), least, min(most, int_range(e.dtype)[1]), unless)

    def expr(self, e: Expr, unless: tuple[Expr, ...], is_size: bool = False, within: bool = False) -> None:
        """Check all arithmetic in e that depends on a size and is not itself a term of a sum.

        is_size: e is an extent.  within: e is a part of such a sum, which is taken not to wrap either."""
        if (id(e), within) in self.done:
            return
        self.done.add((id(e), within))
        self.alive.append(e)
        if _may_wrap(e):
            within = within or not self.sized.isdisjoint(free_vars(e))
            within = within and (is_size or not any(_is_hash(x) for x in _nested(e)))
            if within:
                for x in _nested(e):  # e itself, or those of its terms that hold no data
                    self.check(text_of(x), self.host.of(x), self.always.of(x), *int_range(x.dtype), unless)
                    if self.host.of(e) is not None:
                        break
            for x in _leaves(e):
                self.expr(x, unless, is_size, within)
            return
        for x in children(e):
            if isinstance(x, Expr):
                self.expr(x, unless, is_size, within)
            else:
                self.inner(x, unless)

    def check(self, text: str, host: Range | None, always: Range | None, low: int, high: int, unless: tuple[Expr, ...]) -> None:
        if host is None or always is None:
            return
        (least, most), (first, last) = host, always
        assert isinstance(first, int) and isinstance(last, int)
        if last > high:
            self._add(most, low, high, text, unless)
        if first < low and not (last > high and least is most):
            self._add(least, low, high, text, unless)

    def _add(self, value: Bound, low: int, high: int, text: str, unless: tuple[Expr, ...]) -> None:
        if isinstance(value, int):  # the same for all calls: the compiler's other checks tell of it
            return
        key = f"{value!r} {low}"
        old = self.found.get(key)
        if old is None or old.unless and not unless:
            self.found[key] = SizeCheck(value, low, high, text, unless)


def _may_wrap(e: Any) -> bool:
    """Whether e is arithmetic of at most 32 bits that may wrap."""
    return (isinstance(e, (Binary, Unary)) and e.op in (*_ARITHMETIC, "neg") and e.dtype.is_int and e.dtype.is_signed and
            e.dtype.lanes == 1 and e.dtype.bits <= 32)


def _terms(e: Any) -> tuple[Any, ...]:
    """The operands of a sum that may be sums themselves: their wrapped values give the same wrapped value of e."""
    if isinstance(e, Unary):
        return (e.a,)
    if e.op == "mul" and not (isinstance(e.a, Const) or isinstance(e.b, Const)):
        return ()
    return (e.a,) if e.op == "shl" else (e.a, e.b)


def _nested(e: Any) -> Iterator[Any]:
    """e and the sums that are its terms."""
    yield e
    for x in _terms(e):
        if _may_wrap(x):
            yield from _nested(x)


def _leaves(e: Any) -> Iterator[Expr]:
    for part in _nested(e):
        for x in (part.a, getattr(part, "b", None)):
            if isinstance(x, Expr) and not (_may_wrap(x) and any(x is t for t in _terms(part))):
                yield x


def _is_hash(e: Any) -> bool:
    """Whether a sum has a factor or summand that makes the analyzer take it for a hash, which may wrap."""
    return isinstance(e, Binary) and e.op in ("add", "sub", "mul") and any(
        isinstance(x, Const) and is_large(int(x.value), e.op, e.dtype) for x in (e.a, e.b))


# ---- bounds -----------------------------------------------------------------------------------------------------------

_OF_NUMBERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "min": min, "max": max}


def _wide(x: Bound) -> Expr:
    return const(x, "int64") if isinstance(x, int) else cast(x, "int64")


def _apply(op: str, a: Bound, b: Bound) -> Bound:
    if isinstance(a, int) and isinstance(b, int):
        return _OF_NUMBERS[op](a, b)
    return binary(op, _wide(a), _wide(b))


def _add(a: Bound, b: Bound) -> Bound:
    return b if a == 0 and isinstance(a, int) else a if isinstance(b, int) and b == 0 else _apply("add", a, b)


def _sub(a: Bound, b: Bound) -> Bound:
    return a if isinstance(b, int) and b == 0 else _apply("sub", a, b)


def _multiplied(x: Range, y: Range) -> Range:
    if _at_least_0(x[0]) and _at_least_0(y[0]):
        return _apply("mul", x[0], y[0]), _apply("mul", x[1], y[1])
    for a, b in ((x, y), (y, x)):
        if isinstance(b[0], int) and b[0] is b[1]:
            low, high = _apply("mul", a[0], b[0]), _apply("mul", a[1], b[0])
            return (low, high) if b[0] >= 0 else (high, low)
    corners = [_apply("mul", a, b) for a in x for b in y]
    low = high = corners[0]
    for c in corners[1:]:
        low, high = _apply("min", low, c), _apply("max", high, c)
    return low, high


def _shifted(x: Range | None, y: Range | None) -> Range | None:
    """The range of a shift left whose amount is no constant."""
    if x is None or y is None:
        return None
    low, high = (_power(n) for n in y)
    return _multiplied(x, (low, low) if y[0] is y[1] else (1, high if _at_least_0(y[0]) else 1 << 32))


def _power(n: Bound) -> Bound:
    """2**n; 2**32 for n outside 0..31, as bits are lost."""
    if isinstance(n, int):
        return 1 << (n if 0 <= n < 32 else 32)
    return binary("shl", const(1, "int64"), cast(binary("min", cast(n, "uint64"), const(32, "uint64")), "int64"))


def _at_least_0(x: Bound) -> bool:
    return isinstance(x, int) and x >= 0


def _union(x: Range | None, y: Range | None) -> Range | None:
    return None if x is None or y is None else (_apply("min", x[0], y[0]), _apply("max", x[1], y[1]))


def _last(low: Range | None, extent: Range | None) -> Range | None:
    """The range of the indices of a region."""
    return None if low is None or extent is None else (low[0], _sub(_add(low[1], extent[1]), 1))
