"""Divides linear forms by constants: quotients and remainders.

The identities used (c, g, a, b > 0; floor division):
    (c*Q + R) // c                    = Q + R // c
    (g*H + S) // (g*d), 0 <= S < g    = H // d              (g*H + S) % (g*d) = g*(H % d) + S
    (x // a + k) // c                 = (x + k*a) // (a*c)
    (x % (a*b)) // a                  = (x // a) % b         (x % (a*b)) % a   = x % a
    c*(y // c) + y % c                = y                    a*((y // a) % b) + y % a = y % (a*b)
"""

from __future__ import annotations

from math import gcd
from typing import Any, Protocol

from tilelang.ir import Binary, Const, Expr, dtype, int_literal, int_range, rebuild

from . import bounds as ba
from .linear import Bounds, Linear, const_of, emit


class Forms(Protocol):
    """The analyzer's methods that the division uses."""

    def linear(self, e: Expr) -> Linear: ...

    def bounds_of(self, form: Linear) -> Bounds: ...

    def atom_bounds(self, a: Expr) -> Bounds: ...

    def exact(self, form: Linear, dt: Any) -> bool: ...

    def simplified(self, v: Any) -> Any: ...


Known = dict[tuple[int, int, dtype], tuple[Linear, Linear]]  # (id of a form, divisor, type) -> (that form, its quotient)


class Quotients:
    """Division of linear forms.  of: the analyzer that knows the bounds of their atoms.  known: its quotients.

    Made for each use: two objects that name each other would live until the garbage collector runs.
    """

    def __init__(self, of: Forms, known: Known) -> None:
        self.of, self.known = of, known

    def quotient(self, e: Binary) -> Linear:
        """The linear form of a // or % node."""
        a, b, dt = self.of.linear(e.a), self.of.linear(e.b), e.dtype
        op = e.op
        if op in ("truncdiv", "truncmod"):  # the same as floor division where both operands are not negative
            lo_a, lo_b = self.of.bounds_of(a)[0], self.of.bounds_of(b)[0]
            if lo_a is None or lo_a < 0 or lo_b is None or lo_b <= 0 or not (self.of.exact(a, dt) and self.of.exact(b, dt)):
                if a.is_const and b.is_const and b.const and self.of.exact(a, dt) and self.of.exact(b, dt):
                    q = abs(a.const) // abs(b.const) * (1 if (a.const < 0) == (b.const < 0) else -1)
                    return Linear({}, q if op == "truncdiv" else a.const - q * b.const)
                return Linear({rebuild(e, self.of.simplified): 1}, 0)
            op = "floordiv" if op == "truncdiv" else "floormod"
        if b.is_const and b.const > 0:
            if op == "floordiv":
                return self.divided(a, b.const, dt) if self.of.exact(a, dt) else self._opaque(e, op)
            if self.of.exact(a, dt) or b.const & (b.const - 1) == 0:
                return self.remainder(a, b.const, dt)
            return self._opaque(e, op)
        lo, hi = self.of.bounds_of(a)
        low_b = self.of.bounds_of(b)[0]
        if self.of.exact(a, dt) and self.of.exact(b, dt) and low_b is not None and lo is not None and lo >= 0:
            if hi is not None and hi < low_b:
                return Linear({}, 0) if op == "floordiv" else a
            if low_b > 0 and a.equals(b):
                return Linear({}, 1 if op == "floordiv" else 0)
        return self._opaque(e, op)

    def _opaque(self, e: Binary, op: str) -> Linear:
        e = rebuild(e, self.of.simplified)
        if op != e.op:
            e = Binary(op, e.a, e.b, e.dtype, span=e.span)
        return Linear({e: 1}, 0)

    def divided(self, a: Linear, c: int, dt: dtype) -> Linear:
        """floor(a / c) for an exact form a and c > 0."""
        key = id(a), c, dt
        if key not in self.known:
            self.known[key] = a, self._make_divided(a, c, dt)
        return self.known[key][1]

    def _make_divided(self, a: Linear, c: int, dt: dtype) -> Linear:
        if c == 1:
            return a
        whole: dict[Expr, int] = {}
        rest: dict[Expr, int] = {}
        for atom, k in a.terms.items():
            if k % c == 0:
                whole[atom] = k // c
            else:
                rest[atom] = k
        out, r = Linear(whole, a.const // c), Linear(rest, a.const % c)
        if not rest:
            return out
        lo, hi = self.of.bounds_of(r)
        if lo is not None and hi is not None and lo // c == hi // c:
            return Linear(whole, a.const // c + lo // c)
        if not self.of.exact(r, dt):  # after removal of the multiples of c the rest no longer fits the type
            return Linear({Binary("floordiv", emit(a, dt), int_literal(c, dt), dt): 1}, 0)
        h, _, g = self._split(r, c)
        if g > 1:
            tail = self.divided(h, c // g, dt)
        else:
            tail = self._divided_atom(r, c, dt)
        return self.merge(out.plus(tail), dt)

    def _split(self, r: Linear, c: int) -> tuple[Linear, Linear, int]:
        """(H, S, g) with r = g*H + S, where g divides c, is as large as possible, and S is proven to lie in [0, g)."""
        steps = sorted({gcd(k, c) for k in r.terms.values()} | ({c} if r.const else set()), reverse=True)
        for g in steps:
            if g <= 1:
                break
            high = Linear({x: k // g for x, k in r.terms.items() if k % g == 0}, r.const // g)
            low = Linear({x: k for x, k in r.terms.items() if k % g}, r.const % g)
            if ba.inside(self.of.bounds_of(low), 0, g - 1):
                return high, low, g
        return r, Linear({}, 0), 1

    def _divided_atom(self, r: Linear, c: int, dt: dtype) -> Linear:
        """r // c where no term can be split off: combines it with a nested quotient or remainder, else emits the division."""
        if len(r.terms) == 1:
            (atom, k), = r.terms.items()
            if k == 1 and isinstance(atom, Binary):
                d = const_of(atom.b)
                if atom.op == "floordiv" and d is not None and d > 0:
                    inner = self.of.linear(atom.a).plus(Linear({}, r.const * d))
                    if self.of.exact(inner, dt) and c * d <= int_range(dt)[1]:
                        return self.divided(inner, c * d, dt)
                if atom.op == "floormod" and d is not None and d > 0 and d % c == 0 and r.const == 0:
                    inner = self.of.linear(atom.a)
                    if self.of.exact(inner, dt):
                        return self.remainder(self.divided(inner, c, dt), d // c, dt)
        return Linear({Binary("floordiv", emit(r, dt), int_literal(c, dt), dt): 1}, 0)

    def remainder(self, a: Linear, c: int, dt: dtype) -> Linear:
        """a mod c, in [0, c), for c > 0.  The form must be exact unless c is a power of two, where wrapping changes nothing."""
        if c == 1:
            return Linear({}, 0)
        rest: dict[Expr, int] = {}
        inner = Linear({}, 0)
        outer: dict[Expr, int] = {}
        for atom, k in a.terms.items():
            if k % c == 0:
                continue
            k = k if -c < k < c else k % c if k > 0 else -(-k % c)
            rest[atom] = k
            form = self._up_to_multiples(atom, k, c, dt)
            if form is None:
                outer[atom] = k
            else:
                inner = inner.plus(form, k)
        if len(outer) < len(rest):
            whole = Linear(outer, a.const % c).plus(inner)
            if c & (c - 1) == 0 or self.of.exact(whole, dt) and self._grows_little(whole):
                return self.remainder(whole, c, dt)
        r = Linear(rest, a.const % c)
        if not rest:
            return r
        lo, hi = self.of.bounds_of(r)
        if lo is not None and hi is not None and lo // c == hi // c:
            return Linear(rest, r.const - lo // c * c)
        h, s, g = self._split(r, c)
        if g > 1:
            return self.merge(self.remainder(h, c // g, dt).scaled(g).plus(s), dt)
        if not self.of.exact(r, dt) and self.of.exact(a, dt):
            r = a
        return Linear({Binary("floormod", emit(r, dt), int_literal(c, dt), dt): 1}, 0)

    def _grows_little(self, whole: Linear) -> bool:
        """Whether a form whose remainders were replaced by their dividends still cannot wrap.

        One unbounded atom with coefficient 1 or -1 is safe.  A larger multiple of it, or a sum of two unbounded atoms, may wrap
        although the remainders did not.
        """
        unknown = [k for atom, k in whole.terms.items() if None in self.of.atom_bounds(atom)]
        return not unknown or unknown in ([1], [-1])

    def _up_to_multiples(self, atom: Expr, k: int, c: int, dt: dtype) -> Linear | None:
        """The form of x for an atom x % d where k*d is a multiple of c: then k*x and k*(x % d) have the same remainder by c."""
        if isinstance(atom, Binary) and atom.op == "floormod":
            d, inner = const_of(atom.b), self.of.linear(atom.a)
            if d is not None and d > 0 and (d * k) % c == 0 and self.of.exact(inner, dt):
                return inner
        return None

    def merge(self, form: Linear, dt: dtype) -> Linear:
        """Join quotient and remainder terms of one value (the last line of the module's identities)."""
        mods = [a for a in form.terms if isinstance(a, Binary) and a.op == "floormod" and isinstance(a.b, Const)]
        if not mods or len(form.terms) < 2:
            return form
        for m in mods:
            assert isinstance(m, Binary) and isinstance(m.b, Const)
            c, k = m.b.value, form.terms[m]
            y = self.of.linear(m.a)
            if c <= 0 or not self.of.exact(y, dt):
                continue
            q = self.divided(y, c, dt)
            if len(q.terms) == 1 and (f := next(iter(q.terms))) is not None and q.terms[f] == 1 and \
                    form.terms.get(f) == k * c:
                new = form.plus(Linear({f: k * c, m: k}, 0), -1).plus(y, k).plus(Linear({}, q.const), -k * c)
                return self.merge(new, dt)
            for n in mods:
                assert isinstance(n, Binary) and isinstance(n.b, Const)
                if n is not m and form.terms[n] == k * c and self.of.linear(n.a).equals(q) and \
                        c * n.b.value <= int_range(dt)[1]:
                    new = form.plus(Linear({n: k * c, m: k}, 0), -1)
                    return self.merge(new.plus(self.remainder(y, c * n.b.value, dt), k), dt)
        return form
