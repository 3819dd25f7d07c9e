"""Linear forms: sums of coefficient * atom, plus a constant, over exact Python integers.

The value of an expression of an n-bit type is congruent to its form modulo 2**n.  Where the interval of the form lies inside
the range of the type, the two are equal ("exact").  Division, remainder and comparison need an exact form.  An unknown bound
(None) counts as inside the range, because index variables are assumed not to overflow their type (but see Analyzer.exact).
Data read from memory has the bounds of its type instead.
"""

from __future__ import annotations

from tilelang.ir import Binary, Const, Expr, Var, dtype, int_literal, int_range

Bounds = tuple[int | None, int | None]


class Linear:
    """A linear form: sum(coefficient * atom) + const.  Immutable.

    terms: atom -> nonzero coefficient, in order of first appearance.  An atom is a Var, a quotient, a remainder or another
    opaque value.
    """

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
    """Bounds of a value of this type that is read from memory."""
    return int_range(dt) if dt.is_int or dt.is_bool else (None, None)


def var_bounds(v: Var) -> Bounds:
    """Bounds of a variable about which nothing but its type is known."""
    dt = v.dtype
    return int_range(dt) if dt.is_bool or (dt.is_int and (dt.is_unsigned or dt.bits <= 16)) else (None, None)
