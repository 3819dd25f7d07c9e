"""Converts two quantised weights of one byte to a pair of float16 with three instructions.

    for v in unroll(2):                                         D[0:2] = dequantise_pair(W[b], z, low=0, high=4, mask=15)
        D[v] = half(int(W[b] >> v*4 & 15) - int(Z[g])) * S[g] ->         * broadcast(S[g])

One PRMT copies the byte into both halves, one LOP3 keeps in each half its weight as the significand of 1024, and one HFMA2
subtracts 1024 (and other leftover bits) and the zero point.  Otherwise each weight takes a mask, a shift, a conversion and a
subtraction.  Every step is exact except the last multiplication, which rounds as the scalar one does.
"""

from __future__ import annotations

from typing import Any

from tilelang.arith import LaunchFacts, flat_index
from tilelang.ir import (Alloc, Bind, Binary, Broadcast, Call, Cast, Const, Expr, For, Func, Launch, Load, Ramp, Store, Var,
                         call, const, dtype, free_vars, is_const, is_large, replace, rewrite_launches, stmts_of, substitute,
                         walk, with_inner, LOCAL)
from tilelang.ir.record import record

from ..framework.pass_ import DEVICE, PassContext, pass_

_MAX_ZERO_POINT = 255  # 1024 + zero point is exact in float16
_PAIR = dtype("float16x2")


@pass_(needs=DEVICE)
def dequantise_pairs(func: Func, cx: PassContext) -> Func:
    """Replace loops over the two weights of a byte by one store of a pair.

    Keeps: every value, bit for bit.
    """
    return rewrite_launches(func, _dequantised)


def _dequantised(launch: Launch) -> Launch | None:
    if not any(x.dtype.base == "uint8" for x in walk(launch.body, Load)):
        return None
    return _Pairs(launch).visit(launch)  # type: ignore[no-any-return]


@record
class _Pair:
    """Two weights of a byte: the byte, the first bit of each weight, the mask of one, and what is subtracted from both."""

    byte: Load
    shifts: tuple[int, int]
    mask: int
    zero_point: Expr | None = None

    def value(self) -> Call:
        """The pair as an intrinsic."""
        args = (self.byte,) if self.zero_point is None else (self.byte, self.zero_point)
        return call("dequantise_pair", args, _PAIR, low=self.shifts[0], high=self.shifts[1], mask=self.mask)


class _Pairs:
    """Visits the statements of a launch in program order."""

    def __init__(self, launch: Launch) -> None:
        self.facts = LaunchFacts(launch, free_vars(launch))
        self.types = {x.buffer.data: x.buffer.dtype for x in walk(launch.body, Alloc)}

    def visit(self, x: Any) -> Any:
        if isinstance(x, For):
            pair = self._store(x)
            if pair is not None:
                return pair
            self.facts.enter_loop(x)
        elif isinstance(x, Bind):
            self.facts.enter_bind(x)
        return with_inner(x, self.visit)

    def _store(self, s: For) -> Store | None:
        """The store of a pair that replaces a loop over the two weights of a byte; None for other loops."""
        *bound, store = stmts_of(s.body) or (s.body,)
        if s.kind != "unroll" or not is_const(s.start, 0) or not is_const(s.extent, 2) or not isinstance(store, Store) or \
                not all(isinstance(x, Bind) for x in bound):
            return None
        b, facts = store.buffer, self.facts.analyzer
        if b.dtype.base != "float16" or b.dtype.lanes > 1 or b.scope_name != LOCAL or len(store.indices) != 1 or \
                self.types.get(b.data) != b.dtype:
            return None
        inline: dict[Any, Any] = {}
        for x in bound:
            inline[x.var] = substitute(x.value, inline)  # type: ignore[attr-defined]
            if is_large(inline[x.var]):  # type: ignore[attr-defined]
                return None
        form = facts.linear(flat_index(b, store.indices))
        rest = {a: k for a, k in form.terms.items() if a is not s.var}
        if form.terms.get(s.var) != 1 or any(x % 2 for x in (form.const, *rest.values())) or any(
                s.var in free_vars(a) for a in rest):
            return None  # pairs start at even elements
        value = self._value(substitute(store.value, inline), s.var)
        if value is None:
            return None
        at = facts.simplify(substitute(store.indices[0], {**inline, s.var: const(0, s.var.dtype)}))
        place = Ramp(at, const(1, at.dtype), 2, at.dtype.with_lanes(2))
        return replace(store, indices=(place,), value=value, span=stmts_of(s.body)[0].span)

    def _value(self, e: Expr, v: Var) -> Expr | None:
        """Both values of e as a pair; None unless e is a weight of a byte, with terms and factors common to both."""
        if isinstance(e, Binary) and e.op in ("mul", "add", "sub") and e.dtype.base == "float16":
            if v in free_vars(e.a) and v in free_vars(e.b):
                return None
            a, b = (self._value(x, v) if v in free_vars(x) else Broadcast(x, 2, _PAIR) for x in (e.a, e.b))
            return None if a is None or b is None else Binary(e.op, a, b, _PAIR)
        pair = self._weights(e.value, v) if isinstance(e, Cast) and e.dtype == "float16" else None
        return None if pair is None else pair.value()

    def _weights(self, e: Expr, v: Var) -> _Pair | None:
        if isinstance(e, Cast) and e.dtype.is_int and e.dtype.lanes == 1:
            return self._weights(e.value, v)
        if not isinstance(e, Binary):
            return None
        if e.op == "sub" and v not in free_vars(e.b):
            pair = self._weights(e.a, v)
            low, high = self.facts.analyzer.interval(e.b)
            small = low is not None and low >= 0 and high is not None and high <= _MAX_ZERO_POINT and e.dtype.bits >= 16
            if not small or pair is None or pair.zero_point is not None:
                return None
            return _Pair(pair.byte, pair.shifts, pair.mask, e.b)
        if e.op != "bitand" or not isinstance(e.b, Const):
            return None
        inner: Any = e.a
        while isinstance(inner, Cast) and inner.dtype.is_int and inner.dtype.bits >= 8:
            inner = inner.value
        if not isinstance(inner, Binary) or inner.op != "shr" or not isinstance(inner.a, Load) or inner.a.dtype.base != "uint8":
            return None
        byte, mask = inner.a, int(e.b.value)
        if v in free_vars(byte) or byte.dtype.lanes > 1 or mask <= 0 or mask & mask + 1:
            return None
        shifts = [self.facts.analyzer.simplify(substitute(inner.b, {v: const(n, v.dtype)})) for n in range(2)]
        found = [int(x.value) for x in shifts if isinstance(x, Const)]
        if len(found) < 2 or any(x < 0 or mask << x > 255 for x in found):
            return None
        return _Pair(byte, (found[0], found[1]), mask)
