"""Element stores to packed tensors: a loop over neighbouring elements stores the two values of a byte in one iteration."""

from __future__ import annotations

from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import (Bind, Break, Buffer, Continue, Expr, For, If, Load, Parallel, Ramp, Stmt, Store, Var, binary,
                         cast, const, convert, dtype, fresh, is_const, load, replace, rewrite, seq, stmts_of, substitute,
                         walk, PRIVATE)

from ..analysis.loop_body import renamed
from .small_codes import code_of, lanes_of


class PairedStores:
    """Turns stores of elements into stores of bytes.  divisors: known divisors of variables.

    `store` takes a store of one value at its logical indices and marks it; `loop` resolves the marked stores of a loop.
    buffers: the marks; a store to one of them that is left when all loops are done stores half a byte.
    """

    def __init__(self, divisors: dict[Expr, int]) -> None:
        self.divisors = divisors
        self.buffers: dict[Buffer, Buffer] = {}  # mark -> tensor of bytes
        self._marks: dict[Buffer, Buffer] = {}

    def store(self, x: Store, narrow: dtype) -> Stmt:
        """The store of a value of the narrow type, to be resolved by a loop around it.

        Resolved at once are vectors of whole bytes, and elements of private memory: one thread changes all of its bytes.
        """
        if x.buffer.scope_name in PRIVATE and x.value.dtype.lanes == 1:
            last, eight = x.indices[-1], dtype("uint8")
            at = (*x.indices[:-1], binary("floordiv", last, const(2, last.dtype)))
            shift = cast(binary("mul", binary("floormod", last, const(2, last.dtype)), const(4, last.dtype)), eight)
            kept = binary("bitand", load(x.buffer, at, span=x.span), binary("shr", const(240, eight), shift))
            code = binary("shl", code_of(x.value, narrow), shift)
            return replace(x, indices=at, value=binary("bitor", kept, code))
        mark = self._marks.get(x.buffer)
        if mark is None:
            mark = self._marks[x.buffer] = replace(x.buffer, dtype=narrow, data=Var(x.buffer.name, x.buffer.data.dtype))
            self.buffers[mark] = x.buffer
        last = x.indices[-1]
        if not (isinstance(last, Ramp) and is_const(last.stride, 1) and last.lanes % 2 == 0 and self._even(last.base)):
            return replace(x, buffer=mark)
        value = Var("lanes", x.value.dtype)
        lanes = lanes_of(value)
        lows = [replace(x, buffer=mark, indices=(*x.indices[:-1], convert(last.base + k)), value=lanes[k])
                for k in range(0, len(lanes), 2)]
        stores = [self._byte(low, high) for low, high in zip(lows, lanes[1::2])]
        return seq(Bind(value, x.value, span=x.span), *stores, span=x.span)

    def loop(self, x: For | Parallel) -> Stmt | None:
        """The loop with the marked stores of its body resolved; None where it has none, or they are no pairs of its loop."""
        marked = [s for s in walk(x.body, Store) if s.buffer in self.buffers]
        if not marked or any(isinstance(s, (Break, Continue)) for s in walk(x.body)):
            return None
        if isinstance(x, For):
            if x.kind not in ("serial", "unroll", "vectorized") or not self._even(x.start) or not self._even(x.extent):
                return None
            vars: tuple[Var, ...] = (x.var,)
        else:
            if x.plan.loop_layout is not None:
                return None
            vars = tuple(v for v, e in zip(x.vars, x.extents) if self._even(e))
        var = next((v for v in vars if all(self._pairs(s, v) for s in marked)), None)
        if var is None:
            return None
        half = fresh(var.name, var.dtype)
        first, second = substitute(x.body, {var: half * 2}), renamed(substitute(x.body, {var: half * 2 + 1}))
        body = self._merged(first, second)
        if body is None:
            body = seq(self._by_halves(first, 0), self._by_halves(second, 1), span=x.span)
        if isinstance(x, For):
            return replace(x, var=half, start=_halved(x.start), extent=_halved(x.extent), body=body)
        extents = tuple(_halved(e) if v is var else e for v, e in zip(x.vars, x.extents))
        return replace(x, vars=tuple(half if v is var else v for v in x.vars), extents=extents, body=body,
                       plan=x.plan.having(coalesced_width=None))

    def _even(self, e: Expr) -> bool:
        return known_divisor(e, self.divisors) % 2 == 0

    def _pairs(self, s: Store, v: Var) -> bool:
        """Whether iterations 2k and 2k + 1 of v store the two values of one byte."""
        if any(v in walk(i, Var) for i in s.indices[:-1]):
            return False
        last = s.indices[-1]
        return last.dtype.lanes == 1 and Analyzer().linear(last).terms.get(v) == 1 and self._even(
            Analyzer().simplify(binary("sub", last, v)))

    def _merged(self, first: Stmt, second: Stmt) -> Stmt | None:
        """One statement that stores both values of each byte; None where one may be stored without the other."""
        a, b = stmts_of(first), stmts_of(second)
        if len(a) > 1 and len(a) == len(b):
            last = self._merged(a[-1], b[-1])
            before = (*a[:-1], *b[:-1])
            read = {y.buffer.data for s in before for y in walk(s, Load)}
            if last is None or not all(isinstance(s, Bind) for s in before) or any(
                    s.buffer.data in read for s in walk(last, Store)):
                return None
            return seq(*before, last, span=first.span)
        if isinstance(first, If) and isinstance(second, If) and first.cond.same(second.cond) and not (
                first.orelse or second.orelse):
            inside = self._merged(first.then, second.then)
            return None if inside is None else replace(first, then=inside)
        if isinstance(first, Store) and isinstance(second, Store) and first.buffer in self.buffers:
            return self._byte(first, second.value)
        return None

    def _byte(self, low: Store, high: Expr) -> Stmt:
        """The store of a byte: its first value as a marked store, and its second value."""
        narrow = low.buffer.dtype
        byte = binary("bitor", code_of(low.value, narrow), binary("shl", code_of(high, narrow), const(4, "uint8")))
        return replace(low, buffer=self.buffers[low.buffer], indices=self._place(low), value=byte)

    def _by_halves(self, body: Stmt, which: int) -> Stmt:
        """body with each marked store as a change of the low (0) or high (1) half of its byte; one thread changes both."""
        def fn(s: Store) -> Store | None:
            if s.buffer not in self.buffers:
                return None
            buffer, at = self.buffers[s.buffer], self._place(s)
            kept = binary("bitand", load(buffer, at, span=s.span), const(15 if which else 240, "uint8"))
            code = code_of(s.value, s.buffer.dtype)
            new = binary("shl", code, const(4, "uint8")) if which else code
            return replace(s, buffer=buffer, indices=at, value=binary("bitor", kept, new))

        return rewrite(body, fn, Store)

    def _place(self, s: Store) -> tuple[Expr, ...]:
        last = s.indices[-1]
        return (*s.indices[:-1], Analyzer().simplify(binary("floordiv", last, const(2, last.dtype))))


def _halved(e: Expr) -> Expr:
    return Analyzer().simplify(binary("floordiv", e, const(2, e.dtype)))
