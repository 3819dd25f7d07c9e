"""The analyzer: simplifies expressions, bounds them and proves conditions, given bounds of the variables.

All results are memoised by node identity, so that a pass that keeps one Analyzer analyses each node once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from tilelang.ir import (COMPARISONS, FALSE, TRUE, Binary, Broadcast, Cast, Const, Expr, Ramp, Select, Unary, Var, called, cast,
                         int_range, rebuild)

from . import bounds as ba
from .flat_index import lane_of
from .linear import Bounds, Linear, const_of, dtype_bounds, emit, var_bounds
from .quotient import Known, Quotients
from .rules import ALL_RULES

Env = Mapping[Var, Bounds]
LARGE = 14  # a factor is large when it exceeds the greatest value of the type shifted right by LARGE bits: 2**17 for int32


def is_large(k: int, op: str, dt: Any) -> bool:
    """Whether k is too large for the stride of an index (op "mul": a factor) or for its offset (else: a summand)."""
    high = int_range(dt)[1]
    return abs(k) > (high >> LARGE if op == "mul" else high // 2)


class Analyzer:
    """Answers queries about expressions, given inclusive bounds of variables (None: this end is unknown).

    `bind` may add variables to env while the analyzer is in use.  The bounds of a variable never change once they are set.
    """

    def __init__(self, env: Env | None = None) -> None:
        self.env: dict[Var, Bounds] = dict(env or {})
        self._simple: dict[int, tuple[Expr, Expr]] = {}
        self._linear: dict[int, tuple[Expr, Linear]] = {}
        self._range: dict[int, tuple[Expr, Bounds]] = {}
        self._divided: Known = {}
        self._known: dict[Expr, bool] = {}  # conditions known to be true or false

    def bind(self, var: Var, low: int | None, high: int | None) -> Analyzer:
        """Set the bounds of a variable.  Returns self, or a new analyzer when the variable had other bounds before."""
        old = self.env.get(var)
        if old == (low, high):
            return self
        if old is None:
            self.env[var] = (low, high)
            return self
        return self._derived({**self.env, var: (low, high)}, dict(self._known))

    def _derived(self, env: Env, known: dict[Expr, bool]) -> Analyzer:
        out = Analyzer(env)
        out._known = known
        return out

    def assuming(self, cond: Expr, holds: bool = True) -> Analyzer:
        """An analyzer that also knows that cond is true (or false)."""
        env = dict(self.env)
        known = dict(self._known)
        _learn(self, cond, holds, env, known)
        return self._derived(env, known)

    # ---- simplify -------------------------------------------------------------------------------------------------

    def simplify(self, e: Expr) -> Expr:
        """Simplify an expression.  Idempotent; returns the same object when nothing changes."""
        hit = self._simple.get(id(e))
        if hit is not None:
            return hit[1]
        if isinstance(e, (Var, Const)):
            out = self._simplify_leaf(e)
        elif e.dtype.is_int and e.dtype.lanes == 1:
            out = emit(self.linear(e), e.dtype)
        else:
            out = self._simplify_other(e)
        if out is not e and (not called(e) <= called(out) or out.same(e)):
            out = e
        self._simple[id(e)] = (e, out)
        if out is not e:
            self._simple[id(out)] = (out, out)
        return out

    def _simplify_leaf(self, e: Expr) -> Expr:
        if isinstance(e, Var) and e.dtype.is_int:
            lo, hi = self.env.get(e, ba.UNKNOWN)
            if lo is not None and lo == hi:
                return Const(lo, e.dtype)
        return e

    def _simplify_other(self, e: Expr) -> Expr:
        """Simplify a node that is not a scalar integer: first its operands, then comparisons, then the rewrite rules."""
        e = rebuild(e, self.simplified)
        if isinstance(e, Binary) and e.op in COMPARISONS and e.a.dtype.is_int and e.dtype.lanes == 1:
            known = self._compare(e)
            if known is not None:
                return TRUE if known else FALSE
        if e.dtype.is_bool and self._known:
            known = self._known.get(e)
            if known is not None:
                return TRUE if known else FALSE
        if isinstance(e, Cast):
            return cast(e.value, e.dtype)
        if isinstance(e, Ramp) and isinstance(e.stride, Const) and e.stride.value == 0:
            return Broadcast(e.base, e.lanes, e.dtype, span=e.span)
        out = ALL_RULES.apply(e)
        return e if out is None else self.simplify(out)

    def simplified(self, v: Any) -> Any:
        if isinstance(v, Expr):
            return self.simplify(v)
        if isinstance(v, tuple):
            out = tuple(self.simplified(x) for x in v)
            return v if all(a is b for a, b in zip(out, v)) else out
        return v

    def _compare(self, e: Binary) -> bool | None:
        """True or False for an integer comparison that always or never holds; None when this is not known."""
        la, lb = self.linear(e.a), self.linear(e.b)
        dt = e.a.dtype
        if not (self.exact(la, dt) and self.exact(lb, dt)):
            return _decide(e.op, ba.add(self.interval(e.a), ba.scale(self.interval(e.b), -1)))
        diff = la.plus(lb, -1)
        known = _decide(e.op, self.bounds_of(diff))
        if known is None and e.op in ("eq", "ne") and diff.terms:
            g = 0
            for c in diff.terms.values():
                g = gcd(g, c)
            if diff.const % g:
                return e.op == "ne"
        if known is None:
            known = self._by_symmetry(e)
        return known

    def _by_symmetry(self, e: Binary) -> bool | None:
        """Decide a comparison with a min or max: a < min(b, c) iff a < b and a < c, and the three symmetric cases."""
        for op, a, b in ((e.op, e.a, e.b), (_MIRROR.get(e.op, ""), e.b, e.a)):
            if op in ("lt", "le", "gt", "ge") and isinstance(b, Binary) and b.op in ("min", "max"):
                sides = [self._compare(Binary(op, a, s, e.dtype)) for s in (b.a, b.b)]
                every = (b.op == "min") == (op in ("lt", "le"))
                if every and all(s is True for s in sides) or not every and any(s is True for s in sides):
                    return True
                if every and any(s is False for s in sides) or not every and all(s is False for s in sides):
                    return False
        return None

    # ---- linear forms ---------------------------------------------------------------------------------------------

    def linear(self, e: Expr) -> Linear:
        """The linear form of a scalar integer expression, over simplified atoms."""
        hit = self._linear.get(id(e))
        if hit is None:
            hit = self._linear[id(e)] = (e, self._make_linear(e))
        return hit[1]

    def _make_linear(self, e: Expr) -> Linear:
        if isinstance(e, Const):
            return Linear({}, e.value)
        if isinstance(e, Binary):
            op = e.op
            if op == "add" or op == "sub":
                total = self.linear(e.a).plus(self.linear(e.b), 1 if op == "add" else -1)
                return Quotients(self, self._divided).merge(total, e.dtype)
            if op == "mul":
                return self._multiplied(e)
            if op == "shl" and (k := const_of(self.simplify(e.b))) is not None and 0 <= k < e.dtype.bits:
                return self.linear(e.a).scaled(1 << k)
            if op in ("floordiv", "floormod", "truncdiv", "truncmod"):
                return Quotients(self, self._divided).quotient(e)
            if op in ("min", "max"):
                return self._extremum(e)
        elif isinstance(e, Unary) and e.op == "neg":
            return self.linear(e.a).scaled(-1)
        elif isinstance(e, Var):
            out = self._simplify_leaf(e)
            return Linear({}, out.value) if isinstance(out, Const) else Linear({e: 1}, 0)
        return self._atom(self._simplify_other(e))

    def _atom(self, a: Expr) -> Linear:
        if isinstance(a, Const):
            return Linear({}, a.value)
        return Linear({a: 1}, 0) if _is_atom(a) else self.linear(a)

    def _multiplied(self, e: Binary) -> Linear:
        a, b = self.linear(e.a), self.linear(e.b)
        if a.is_const:
            return b.scaled(a.const)
        if b.is_const:
            return a.scaled(b.const)
        k = 1
        if not a.const and len(a.terms) == 1:  # (4 * x) * y is 4 * (x * y)
            (atom, c), = a.terms.items()
            a, k = Linear({atom: 1}, 0), k * c
        if not b.const and len(b.terms) == 1:
            (atom, c), = b.terms.items()
            b, k = Linear({atom: 1}, 0), k * c
        return Linear({Binary("mul", emit(a, e.dtype), emit(b, e.dtype), e.dtype, span=e.span): k}, 0)

    def _extremum(self, e: Binary) -> Linear:
        a, b = self.linear(e.a), self.linear(e.b)
        if self.exact(a, e.dtype) and self.exact(b, e.dtype):
            lo, hi = self.bounds_of(a.plus(b, -1))
            if hi is not None and hi <= 0:
                return a if e.op == "min" else b
            if lo is not None and lo >= 0:
                return b if e.op == "min" else a
        return self._atom(self._simplify_other(e))

    # ---- intervals ------------------------------------------------------------------------------------------------

    def interval(self, e: Expr) -> Bounds:
        """Inclusive bounds of a scalar integer (or bool) expression, None where unknown."""
        if e.dtype.is_int and e.dtype.lanes == 1:
            form = self.linear(e)
            return self.bounds_of(form) if self.exact(form, e.dtype) else int_range(e.dtype)
        return dtype_bounds(e.dtype)

    def shifts_within(self, e: Binary) -> bool:
        """Whether the amount of a shift is certainly less than the bits of its type, and not negative, in every lane."""
        lanes = 1 if isinstance(e.b, Broadcast) else e.dtype.lanes
        return all(ba.inside(self.interval(lane_of(e.b, k)), 0, e.dtype.bits - 1) for k in range(lanes))

    def bounds_of(self, form: Linear) -> Bounds:
        """Bounds of a linear form as exact integers."""
        lo: int | None = form.const
        hi: int | None = form.const
        for a, c in form.terms.items():
            alo, ahi = self.atom_bounds(a)
            if c < 0:
                alo, ahi = ahi, alo
            lo = None if lo is None or alo is None else lo + alo * c
            hi = None if hi is None or ahi is None else hi + ahi * c
        return lo, hi

    def exact(self, form: Linear, dt: Any) -> bool:
        """Whether the value of the form fits dt, so that the form equals the expression without wrapping.

        A variable without known bounds is assumed to be an index, whose multiples fit: runtime/size_checks.py has each call
        check it, but for numbers from memory.  A factor or summand larger than
        that of any index (see is_large) indicates a hash or a random number; such a form is assumed to wrap.
        """
        lo, hi = self.bounds_of(form)
        low, high = int_range(dt)
        if lo is None or hi is None:
            if is_large(form.const, "add", dt) or any(is_large(k, "mul", dt) and None in self.atom_bounds(atom)
                                                      for atom, k in form.terms.items()):
                return False
        return (lo is None or lo >= low) and (hi is None or hi <= high)

    def atom_bounds(self, a: Expr) -> Bounds:
        hit = self._range.get(id(a))
        if hit is None:
            hit = self._range[id(a)] = (a, self._make_bounds(a))
        return hit[1]

    def _make_bounds(self, a: Expr) -> Bounds:
        if isinstance(a, Var):
            return ba.meet(self.env.get(a, ba.UNKNOWN), var_bounds(a))
        if isinstance(a, Binary):
            got = self._binary_bounds(a)
            low, high = int_range(a.dtype)
            fits = (got[0] is None or got[0] >= low) and (got[1] is None or got[1] <= high)
            return got if fits else (low, high)
        if isinstance(a, Cast):
            if a.value.dtype.is_bool:
                return 0, 1
            if a.value.dtype.is_int and a.value.dtype.lanes == 1:
                inner = self.interval(a.value)
                low, high = int_range(a.dtype)
                if ba.inside(inner, low, high):
                    return inner
                src = a.value.dtype
                if (src.bits < a.dtype.bits and (src.is_unsigned or not a.dtype.is_unsigned)) or src == a.dtype:
                    return inner
            return dtype_bounds(a.dtype)
        if isinstance(a, Select):
            return ba.union(self.interval(a.a), self.interval(a.b))
        return dtype_bounds(a.dtype)

    def _binary_bounds(self, a: Binary) -> Bounds:
        x, y = self.interval(a.a), self.interval(a.b)
        match a.op:
            case "mul": return ba.mul(x, y)
            case "floordiv": return ba.floordiv(x, y)
            case "floormod": return ba.floormod(x, y)
            case "truncdiv" | "truncmod":
                if x[0] is not None and x[0] >= 0:
                    return ba.floordiv(x, y) if a.op == "truncdiv" else ba.floormod(x, y)
            case "min": return ba.minimum(x, y)
            case "max": return ba.maximum(x, y)
            # The operands may be arbitrary bit patterns: an unknown bound is the bound of the type, and is not assumed to fit.
            case "bitand" | "bitor" | "bitxor": return ba.meet(ba.bits(a.op, x, y), int_range(a.dtype))
            case "shr":
                if y[0] is not None and y[1] is not None and 0 <= y[0] == y[1] < 64:
                    return ba.floordiv(x, (1 << y[0], 1 << y[0]))
                if x[0] is not None and x[0] >= 0:
                    return 0, x[1]
        return dtype_bounds(a.dtype)

    # ---- proofs ---------------------------------------------------------------------------------------------------

    def can_prove(self, cond: Any) -> bool:
        """Whether cond is proven to hold.  False means "not proven"."""
        if isinstance(cond, bool):
            return cond
        out = self.simplify(cond)
        if isinstance(out, Binary) and out.op == "and":
            return self.can_prove(out.a) and self.can_prove(out.b)
        return isinstance(out, Const) and bool(out.value)


_MIRROR = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _is_atom(a: Expr) -> bool:
    """Whether a is an atom of linear forms: linear(a) is a itself, with coefficient 1."""
    if isinstance(a, Binary) and a.op == "shl":
        k = const_of(a.b)
        return k is None or not 0 <= k < a.dtype.bits
    return not (isinstance(a, Binary) and a.op in ("add", "sub", "mul", "floordiv", "floormod", "truncdiv", "truncmod")
                or isinstance(a, Unary) and a.op == "neg" or isinstance(a, Var))


def _decide(op: str, d: Bounds) -> bool | None:
    """The truth of `x op y`, derived from bounds d of x - y; None when they do not decide it."""
    lo, hi = d
    if op in ("gt", "ge"):
        lo, hi = (None if hi is None else -hi), (None if lo is None else -lo)
        op = _MIRROR[op]
    if op == "lt":
        return True if hi is not None and hi < 0 else False if lo is not None and lo >= 0 else None
    if op == "le":
        return True if hi is not None and hi <= 0 else False if lo is not None and lo > 0 else None
    if lo is not None and lo == hi == 0:
        return op == "eq"
    if (lo is not None and lo > 0) or (hi is not None and hi < 0):
        return op == "ne"
    return None


def _learn(at: Analyzer, cond: Expr, holds: bool, env: dict[Var, Bounds], known: dict[Expr, bool]) -> None:
    """Record what follows from a condition: the condition itself, its operands, and bounds of variables in comparisons."""
    cond = at.simplify(cond)
    known[cond] = holds
    if isinstance(cond, Unary) and cond.op == "not":
        _learn(at, cond.a, not holds, env, known)
    if not isinstance(cond, Binary):
        return
    if cond.op == ("and" if holds else "or"):
        _learn(at, cond.a, holds, env, known)
        _learn(at, cond.b, holds, env, known)
    elif cond.op in COMPARISONS and cond.a.dtype.is_int and cond.a.dtype.lanes == 1:
        op = cond.op if holds else _NEGATED[cond.op]
        la, lb = at.linear(cond.a), at.linear(cond.b)
        if not (at.exact(la, cond.a.dtype) and at.exact(lb, cond.a.dtype)):
            return
        diff = la.plus(lb, -1)  # diff op 0
        for v, c in diff.terms.items():
            if not isinstance(v, Var):
                continue
            rest = Linear({a: k for a, k in diff.terms.items() if a is not v}, diff.const)
            lo, hi = at.bounds_of(rest)
            new = _bound_of_var(op, c, lo, hi)
            env[v] = ba.meet(env.get(v, ba.UNKNOWN), new)


def _bound_of_var(op: str, c: int, lo: int | None, hi: int | None) -> Bounds:
    """Bounds of v from c * v + rest op 0, rest in [lo, hi]."""
    if op == "eq":
        return ba.meet(_bound_of_var("le", c, lo, hi), _bound_of_var("ge", c, lo, hi))
    if op in ("gt", "ge"):
        c, lo, hi, op = -c, None if hi is None else -hi, None if lo is None else -lo, _MIRROR[op]
    if op not in ("lt", "le") or lo is None:
        return ba.UNKNOWN
    top = -lo - (1 if op == "lt" else 0)  # c * v <= top
    return (None, top // c) if c > 0 else (-(top // -c), None)
