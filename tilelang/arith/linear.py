"""Linear forms: sum of coefficient * atom + constant, over exact Python integers.

The value of an expression of an n-bit type is congruent to its form modulo 2**n; where the form's interval lies inside
the type's range the two are equal ("exact"), which is what division, remainder and comparison need.  A bound that is
not known (None) counts as inside: index variables are taken not to overflow their type (but see Analyzer.exact), data
read from memory is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang.ir import Binary, Const, Expr, Var, dtype, int_literal, int_range
from tilelang.ir.record import record

Bounds = tuple[int | None, int | None]


class Linear:
    """terms: atom -> nonzero coefficient, in order of first appearance; const: the rest.  Not to be changed."""

    __slots__ = ("terms", "const")

    def __init__(self, terms: dict[Expr, int], const: int) -> None:
        self.terms, self.const = terms, const

    def plus(self, other: Linear, scale: int = 1) -> Linear:
        """self + scale * other."""
        if not other.terms:
            return Linear(self.terms, self.const + scale * other.const) if other.const else self
        terms = dict(self.terms)
        for a, k in other.terms.items():
            new = terms.get(a, 0) + k * scale
            if new:
                terms[a] = new
            else:
                del terms[a]
        return Linear(terms, self.const + scale * other.const)

    def scaled(self, k: int) -> Linear:
        if k == 1:
            return self
        return Linear({a: c * k for a, c in self.terms.items()} if k else {}, self.const * k)

    def equals(self, other: Linear) -> bool:
        return self.const == other.const and self.terms == other.terms

    @property
    def is_const(self) -> bool:
        return not self.terms


@record
class AffineForm:
    """expr = sum(coefficient * atom) + const.  Atoms are Vars, or quotients, remainders and other opaque values."""

    terms: tuple[tuple[Expr, int], ...]
    const: int

    def coef(self, atom: Expr) -> int:
        """Coefficient of an atom; 0 when absent."""
        for a, c in self.terms:
            if a.same(atom):
                return c
        return 0

    def __iter__(self) -> Iterator[tuple[Expr, int]]:
        return iter(self.terms)

    @property
    def is_const(self) -> bool:
        return not self.terms


def emit(form: Linear, dt: dtype) -> Expr:
    """The expression of a form: positive terms in order, then negative ones, then the constant."""
    low, high = int_range(dt)
    span = high - low + 1

    def wrap(v: int) -> int:
        return v if low <= v <= high else (v - low) % span + low

    out: Expr | None = None
    minus: list[Expr] = []
    for a, c in form.terms.items():
        c = wrap(c)
        if c == 0:
            continue
        if c > 0 or (c == low and not dt.is_unsigned):
            t = a if c == 1 else Binary("mul", a, int_literal(c, dt), dt)
            out = t if out is None else Binary("add", out, t, dt)
        else:
            minus.append(a if c == -1 else Binary("mul", a, int_literal(-c, dt), dt))
    k = wrap(form.const)
    if out is None:
        if not minus:
            return int_literal(k, dt)
        out, k = int_literal(k, dt), 0
    for t in minus:
        out = Binary("sub", out, t, dt)
    if k > 0 or k == low and k != 0:
        return Binary("add", out, int_literal(k, dt), dt)
    if k < 0:
        return Binary("sub", out, int_literal(-k, dt), dt)
    return out


def const_of(e: Expr) -> int | None:
    """The value of an integer literal, else None."""
    return e.value if isinstance(e, Const) and e.dtype.is_int else None


def dtype_bounds(dt: dtype) -> Bounds:
    """What is known of a value of this type that comes from data."""
    return int_range(dt) if dt.is_int or dt.is_bool else (None, None)


def var_bounds(v: Var) -> Bounds:
    """What is known of a variable without further information."""
    dt = v.dtype
    return int_range(dt) if dt.is_bool or (dt.is_int and (dt.is_unsigned or dt.bits <= 16)) else (None, None)
