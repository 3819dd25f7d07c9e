"""Replace a function of a code of four bits or fewer by a table in registers.

    for v in unroll(8):                                   W[0:8] = codes_taken(Q[0:4], T[0:16])
        w[v] = table[Q[v // 2] >> v % 2 * 4 & 15]    ->   for v in unroll(8): w[v] = W[v]

Values of packed weights are often decoded by arithmetic on the code: exponent and significand of a float of four bits, a chain
of comparisons over a codebook. The code has at most 16 values, so the results are constants: 16 of them fill eight registers,
and byte permutations (PRMT) choose one, or four at a time for codes that lie side by side. Tables in memory are used alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang.arith import launch_analyzer
from tilelang.errors import TileLangError
from tilelang.ir import (AddressOf, Alloc, Bind, Binary, Buffer, Call, Cast, Const, Expr, For, Func, Launch, Load, Select, Stmt,
                         Store, Unary, Var, call, const, contains, dtype, free_vars, fresh, is_const, is_large, load,
                         numpy_dtype, ramp, rebuild, rewrite, rewrite_launches, seq, substitute, walk, GLOBAL, LOCAL, SHARED)
from tilelang.ir.evaluate import evaluate
from tilelang.ir.numbers import to_dtype
from tilelang.ir.visitor import mapped
from tilelang.target.intrinsics import INTRINSICS

from ..analysis.effects import hangs_on_threads
from ..framework.pass_ import DEVICE, PassContext, pass_

_CODES = 16
_FEWEST = 6  # operations that one look-up replaces: it takes four to seven
_OPERATIONS = (Binary, Call, Cast, Select, Unary)


@pass_(needs=DEVICE)
def code_tables(func: Func, cx: PassContext) -> Func:
    """Look up values of 16 bits that are computed from codes of the range 0..15 alone, for codes that lie side by side.

    Keeps: every value, bit for bit: the entries are those of the reference interpreter's arithmetic.
    """
    return rewrite_launches(func, lambda launch: _Tables(launch).visit(launch))


class _Tables:
    """Visits the statements of a launch in program order.

    values: variable -> what is bound to it.  lanes: (variable, number) of the unrolled loop around, None without one.  ahead:
    statements in front of that loop.  tables: table of the unrolled loops around -> the registers that hold it.
    """

    def __init__(self, launch: Launch) -> None:
        self.analyzer = launch_analyzer(launch, free_vars(launch))
        self.types = {x.buffer.data: x.buffer.dtype for x in walk(launch.body, Alloc)}
        self.values = {x.var: x.value for x in walk(launch.body, Bind)}
        self.lanes: tuple[Var, int] | None = None
        self.ahead: dict[Any, tuple[Buffer, Sequence[Stmt]]] = {}
        self.tables: dict[Any, tuple[Buffer, Sequence[Stmt]]] | None = None
        self.written, self.changed = set[Var](), set[Var]()

    def visit(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return mapped(self.visit, x)
        if isinstance(x, Expr):
            return self.value(x)
        if not isinstance(x, Stmt):
            return x
        if isinstance(x, For) and x.kind == "unroll":
            return self.unrolled(x)
        return rebuild(x, self.visit)

    def unrolled(self, s: For) -> Stmt:
        """An unrolled loop behind the codes that it takes together, the outermost one behind the tables for them."""
        saved = self.lanes, self.ahead, self.tables, self.changed
        self.changed = {x.var if isinstance(x, Bind) else x.buffer.data for x in walk(s, Bind, Store, AddressOf)}
        n = int(s.extent.value) if isinstance(s.extent, Const) and is_const(s.start, 0) else 0
        self.lanes, self.ahead = (s.var, n) if n and (n == 2 or n % 8 == 0) and not contains(s.body, For) else None, {}
        if saved[2] is None:
            self.tables, self.written = {}, self.changed
        out, made = rebuild(s, self.visit), [*self.ahead.values()]
        if saved[2] is None:
            made = [*(self.tables or {}).values(), *made]
        self.lanes, self.ahead, self.tables, self.changed = saved
        return seq(*(x for b, fill in made for x in (Alloc(b), *fill)), out)

    def value(self, e: Expr) -> Expr:
        """e with its largest expressions of one code looked up."""
        if not self.lanes or is_large(e):
            return e
        few = 2 if self.lanes[1] > 2 else _FEWEST
        taken = self._from_memory(e) if isinstance(e, Load) else None
        if isinstance(e, _OPERATIONS) and e.dtype.lanes == 1 and e.dtype.bits == 16 and _operations(e) >= few:
            found = self._code(e)
            table = None if found is None or _operations(found[1]) < few else _table(found[1], found[2])
            if found is not None and table is not None:
                b = Buffer("table", (_CODES,), dtype("uint16"), LOCAL)
                fill = [Store(b, (const(k),), const(int(w), "uint16")) for k, w in enumerate(table)]
                taken = self._taken(found[0], tuple(table), b, fill)
        if taken is None:
            return rebuild(e, self.visit)
        return taken if taken.dtype == e.dtype else Call("reinterpret", (taken,), e.dtype)

    def _code(self, e: Expr) -> tuple[Expr, Expr, Var] | None:
        """(the code of the range 0..15 that alone decides e, e in terms of a variable, that variable)."""
        for code in (*free_vars(e), *(x for x in walk(e, Binary) if x.op == "bitand" and x is not e)):
            low, high = self.analyzer.interval(code) if code.dtype.is_int and code.dtype.lanes == 1 else (None, None)
            if low is None or low < 0 or high is None or high >= _CODES:
                continue
            var = code if isinstance(code, Var) else fresh("code", code.dtype)
            rest = e if code is var else rewrite(e, {code: var}.get, Binary)
            if free_vars(rest) == {var} and not hangs_on_threads(rest) and not contains(rest, Load):
                return code, rest, var
        return None

    # ---- codes that lie side by side ------------------------------------------------------------------------------

    def _from_memory(self, e: Load) -> Expr | None:
        """An entry of a table of 16 entries of 16 bits in memory; None for other loads.

        Of two codes, each is loaded: a load takes less than five permutations (nf4 weights, an H200: 473 and 380 TFLOP/s).
        """
        b = e.buffer
        if self.lanes is None or self.lanes[1] == 2 or not b.is_static or b.size != _CODES or b.dtype.bits != 16 or \
                b.dtype.lanes != 1 or len(e.indices) != 1 or b.scope_name not in (*SHARED, GLOBAL) or b.data in self.written:
            return None
        code = uncast(e.indices[0])
        low, high = self.analyzer.interval(code)
        if low is None or low < 0 or high is None or high >= _CODES:
            return None
        at = Buffer(f"{b.name}_r", (_CODES,), b.dtype, LOCAL)
        halves = [Store(at, (ramp(const(k), 8),), load(b, (ramp(const(k), 8),))) for k in (0, 8)]
        return self._taken(code, b, at, halves)

    def _taken(self, code: Expr, key: Any, at: Buffer, fill: Sequence[Stmt]) -> Load | None:
        """The entry for this lane, taken together with those of the others; None where their codes do not lie side by side.

        key: names the table.  at, fill: the registers for it, and the statements that fill them.
        """
        packed = self._packed(self.values.get(code, code) if isinstance(code, Var) else code)
        if packed is None or self.lanes is None or self.tables is None:
            return None
        table, _ = self.tables.setdefault(key, (at, fill))
        b = Buffer(f"{table.name}_v", (self.lanes[1],), table.dtype, LOCAL)
        n, whole = self.lanes[1], ramp(const(0), _CODES)
        high = isinstance(key, tuple) and not any(x & 255 for x in key)
        values = call("codes_taken", (packed, load(table, (whole,))), table.dtype.with_lanes(n), high=high)
        b, _ = self.ahead.setdefault((key, packed), (b, [Store(b, (ramp(const(0), n),), values)]))
        return load(b, (self.lanes[0],))

    def _packed(self, code: Expr) -> Load | None:
        """The bytes in registers whose codes, the low ones first, are those of the lanes; None for other codes."""
        code = uncast(code)
        if self.lanes is None or not isinstance(code, Binary) or code.op != "bitand" or not is_const(code.b, _CODES - 1):
            return None
        moved = uncast(code.a)
        byte, shift = (uncast(moved.a), moved.b) if isinstance(moved, Binary) and moved.op == "shr" else (moved, const(0))
        v, n = self.lanes
        of = [{v: const(k, v.dtype)} for k in range(n)]
        if not isinstance(byte, Load) or byte.dtype.base not in ("int8", "uint8") or byte.dtype.lanes > 1 or any(
                not is_const(self.analyzer.simplify(substitute(shift, x)), k % 2 * 4) for k, x in enumerate(of)):
            return None
        if not self.changed.isdisjoint({*free_vars(byte), *(x.buffer.data for x in walk(byte, Load))}):
            return None
        if n == 2:
            return byte if v not in free_vars(byte) and byte.dtype.base == "uint8" else None
        if byte.buffer.scope_name != LOCAL or self.types.get(byte.buffer.data) != byte.buffer.dtype or len(byte.indices) != 1:
            return None
        forms = [self.analyzer.linear(substitute(byte.indices[0], x)) for x in of]
        first = self.analyzer.simplify(substitute(byte.indices[0], of[0]))
        if any(f.terms != forms[0].terms or f.const != forms[0].const + k // 2 for k, f in enumerate(forms)) or any(
                c % 4 for c in (forms[0].const, *forms[0].terms.values())):
            return None
        return load(byte.buffer, (ramp(first, n // 2),))


def uncast(e: Expr) -> Expr:
    """An integer without its conversions to integers of at least 8 bits."""
    while isinstance(e, Cast) and e.dtype.is_int and e.dtype.bits >= 8 and e.value.dtype.is_int:
        e = e.value
    return e


def _operations(e: Expr) -> int:
    return sum(isinstance(x, _OPERATIONS) for x in walk(e))


def _table(e: Expr, code: Var) -> np.ndarray | None:
    """uint16[16]: the bits of e for each code; None where the reference arithmetic does not compute it."""
    codes = np.arange(_CODES).astype(numpy_dtype(code.dtype))
    try:
        values = np.broadcast_to(evaluate(e, {code: codes}, rows=INTRINSICS), (_CODES,))
    except TileLangError:
        return None
    held = np.ascontiguousarray(to_dtype(values, e.dtype))
    return held.view(f"uint{e.dtype.bits}").astype(np.uint16)
