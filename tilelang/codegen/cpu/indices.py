"""Index arithmetic in 64 bits, from the linear form of an index.

Where the 32-bit arithmetic of the program would wrap, the index stays exact (and a guarded access is then out of range).
"""

from __future__ import annotations

from tilelang.ir import Binary, Cast, Const, Expr, Var, dtype

from .state import Code
from .text import is_literal
from .types import value_type


class IndexPrinter:
    """Prints integers as i64 into the function of a Code."""

    def __init__(self, cx: Code) -> None:
        self.cx = cx

    def index(self, e: Expr | int) -> str:
        """The exact i64 value of an integer expression or Python int."""
        if isinstance(e, int):
            return str(e)
        if isinstance(e, Const):
            return str(int(e.value))
        if isinstance(e, Var):
            return self._atom(e)
        if e.dtype.is_unsigned or e.dtype.is_bool:
            return self._sized(e)
        form = self.cx.analyzer.linear(e)
        out = str(form.const)
        for atom, c in form.terms.items():
            out = self.cx.f.add(self.cx.f.mul(self._atom(atom), str(c)), out)
        return out

    def _atom(self, e: Expr) -> str:
        if isinstance(e, Var):
            bound = self.cx.vars.get(e)
            if bound is not None and bound.wide is not None:
                return bound.wide
        elif isinstance(e, Binary) and e.dtype.is_signed:
            if e.op == "mul":
                return self.cx.f.mul(self.index(e.a), self.index(e.b))
            if e.op in ("min", "max") and self._exact(e.a) and self._exact(e.b):
                pick = self.cx.f.smin if e.op == "min" else self.cx.f.smax
                return pick(self.index(e.a), self.index(e.b))
            if e.op in ("floordiv", "floormod") and isinstance(e.b, Const) and e.b.value > 0 and self._exact(e.a):
                low = self.cx.analyzer.bounds_of(self.cx.analyzer.linear(e.a))[0]
                if low is not None and low >= 0:
                    if e.op == "floordiv":
                        return self.cx.f.let(f"udiv i64 {self.index(e.a)}, {e.b.value}")
                    return self.cx.f.hidden(self.cx.f.let(f"urem i64 {self.index(e.a)}, {e.b.value}"))
        elif isinstance(e, Cast) and e.value.dtype.is_signed and e.dtype.is_signed:
            if e.dtype.bits >= e.value.dtype.bits:
                return self.index(e.value)
        return self._sized(e)

    def _exact(self, e: Expr) -> bool:
        """Whether e's 32-bit arithmetic certainly does not wrap. (The remainder of a wrapped value differs from that of the
        exact one.)"""
        return e.dtype.is_signed and self.cx.analyzer.exact(self.cx.analyzer.linear(e), e.dtype)

    def _sized(self, e: Expr) -> str:
        """The value computed in its own type, then extended."""
        return self.extended(self.cx.value(e), e.dtype)

    def extended(self, v: str, dt: dtype) -> str:
        """A register value of an integer type, extended to i64."""
        wide = v
        if dt.bits != 64 or dt.is_bool:
            wide = self.cx.f.let(f"{'sext' if dt.is_signed else 'zext'} {value_type(dt)} {v} to i64")
        return wide if is_literal(v) else self.cx.f.hidden(wide)
