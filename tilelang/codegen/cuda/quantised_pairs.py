"""Pairs of float16 values made of two numbers of a few bits in one byte.

    for v in unroll(2):                                         *(__half2*)&D[0] = __hmul2(
        D[v] = half(int(W[b] >> v*4 & 15) - int(Z[g])) * S[g] ->    tl::coded_pair<0, 4, 15>(W[b], z), __half2half2(S[g]))

One PRMT puts the byte into both halves, one LOP3 leaves each its number as the significand of 1024, and one HFMA2 takes away
what else is there, the zero as well: three instructions a pair, in place of a mask, a shift and an addition for each number.
Everything is exact up to the last product, which rounds as that of single values does.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Bind, Binary, Cast, Const, Expr, For, Load, Store, const, free_vars, is_const, stmts_of, substitute
from tilelang.ir.record import record

_MOST_ZERO = 255  # 1024 + zero is a float16


@record
class _Pair:
    """Two numbers of a byte: what is loaded, their shifts, the mask of a number, what is taken away from both."""

    byte: Load
    shifts: tuple[int, int]
    mask: int
    zero: Expr | None = None


class CodedPairs:
    """Part of CudaPrinter."""

    def coded_pairs(self: Any, s: For) -> list[str] | None:
        """Statements of a loop over the two numbers of a byte; None for other loops."""
        body: tuple[Any, ...] = stmts_of(s.body) or (s.body,)
        store = body[-1]
        if s.kind != "unroll" or not is_const(s.start, 0) or not is_const(s.extent, 2) or not isinstance(store, Store) or \
                not all(isinstance(x, Bind) for x in body[:-1]):
            return None
        b = store.buffer
        if b.dtype.base != "float16" or b.dtype.lanes > 1 or b.scope_name != "local" or len(store.indices) != 1 or \
                self.storage.get(b.data) != b.dtype:
            return None
        inline: dict[Any, Any] = {}
        for x in body[:-1]:
            inline[x.var] = substitute(x.value, inline)
        form = self.facts.linear(self.flat_index(b, store.indices))
        rest = {a: k for a, k in form.terms.items() if a is not s.var}
        if form.terms.get(s.var) != 1 or any(x % 2 for x in (form.const, *rest.values())) or any(
                s.var in free_vars(a) for a in rest):
            return None
        value = self._pair_text(substitute(store.value, inline), s.var)
        if value is None:
            return None
        self.valued.add("float16")
        at = self.facts.simplify(substitute(store.indices[0], {**inline, s.var: const(0, s.var.dtype)}))
        return [f"*reinterpret_cast<__half2*>({self.address(b, (at,))}) = {value};"]

    def _pair_text(self: Any, e: Expr, v: Any) -> str | None:
        """Text of both values of e; None for what is no number of a byte, times values that both have."""
        if isinstance(e, Binary) and e.op == "mul" and e.dtype.base == "float16":
            parts = [self._pair_text(x, v) if v in free_vars(x) else f"__half2half2({self.top(x)})" for x in (e.a, e.b)]
            return None if None in parts or v in free_vars(e.a) and v in free_vars(e.b) else f"__hmul2({parts[0]}, {parts[1]})"
        pair = self._numbers(e.value, v) if isinstance(e, Cast) and e.dtype.base == "float16" and e.dtype.lanes == 1 else None
        if pair is None:
            return None
        low, high = pair.shifts
        zero = "" if pair.zero is None else f", tl::small_half<0>({self.top(pair.zero)})"
        return f"tl::coded_pair<{low}, {high}, {pair.mask}>({self.top(pair.byte)}{zero})"

    def _numbers(self: Any, e: Expr, v: Any) -> _Pair | None:
        if isinstance(e, Cast) and e.dtype.is_int and e.dtype.lanes == 1:
            return self._numbers(e.value, v)
        if not isinstance(e, Binary):
            return None
        if e.op == "sub" and v not in free_vars(e.b):
            pair = self._numbers(e.a, v)
            low, high = self.facts.interval(e.b)
            small = low is not None and low >= 0 and high is not None and high <= _MOST_ZERO and e.dtype.bits >= 16
            return _Pair(pair.byte, pair.shifts, pair.mask, e.b) if small and pair is not None and pair.zero is None else None
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
        shifts = [self.facts.simplify(substitute(inner.b, {v: const(n, v.dtype)})) for n in range(2)]
        found = [int(x.value) for x in shifts if isinstance(x, Const)]
        if len(found) < 2 or any(x < 0 or mask << x > 255 for x in found):
            return None
        return _Pair(byte, (found[0], found[1]), mask)


__all__ = ["CodedPairs"]
