"""Replace a function of a code of four bits or fewer by a table in registers.

    w = select(bits >= 8, -size(bits), size(bits))   ->   w = reinterpret(code_table(bits, 0x30002e00, ...))

Values of packed weights are often decoded by arithmetic on the code: exponent and significand of a float of four bits, a chain
of comparisons over a codebook. The code has at most 16 values, so the results are constants: 16 of them fill eight registers,
and two byte permutations (PRMT) choose one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.arith import LaunchFacts
from tilelang.errors import TileLangError
from tilelang.ir import (Bind, Binary, Call, Cast, Expr, For, Func, Launch, Load, Select, Stmt, Unary, Var, cast, const, dtype,
                         free_vars, is_large, numpy_dtype, rebuild, rewrite_launches, walk)
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
    """Look up values of 8 and 16 bits that are computed from one variable of the range 0..15 alone.

    Keeps: every value, bit for bit: the entries are those of the reference interpreter's arithmetic.
    """
    return rewrite_launches(func, lambda launch: _Tables(launch).visit(launch))


class _Tables:
    """Visits the statements of a launch in program order."""

    def __init__(self, launch: Launch) -> None:
        self.facts = LaunchFacts(launch, free_vars(launch))

    def visit(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return mapped(self.visit, x)
        if isinstance(x, Expr):
            return self.value(x)
        if not isinstance(x, Stmt):
            return x
        if isinstance(x, For):
            self.facts.enter_loop(x)
        elif isinstance(x, Bind):
            self.facts.enter_bind(x)
        return rebuild(x, self.visit)

    def value(self, e: Expr) -> Expr:
        """e with its largest expressions of one code looked up."""
        if is_large(e) or not isinstance(e, _OPERATIONS) or _operations(e) < _FEWEST:
            return e
        code = self._code(e) if e.dtype.lanes == 1 and e.dtype.bits in (8, 16) and e.dtype != "bool" else None
        table = None if code is None else _table(e, code)
        return rebuild(e, self.visit) if code is None or table is None else _looked_up(code, table, e.dtype)

    def _code(self, e: Expr) -> Var | None:
        """The variable of the range 0..15 that alone decides e."""
        names = free_vars(e)
        if len(names) != 1 or hangs_on_threads(e) or any(True for _ in walk(e, Load)):
            return None
        (code,) = names
        low, high = self.facts.analyzer.interval(code)
        return code if code.dtype.is_int and low is not None and low >= 0 and high is not None and high < _CODES else None


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


def _looked_up(code: Var, table: np.ndarray, result: dtype) -> Expr:
    split = np.concatenate([table & 255, table >> 8]).astype(np.uint8)
    words = [const(int(w), "uint32") for w in split.view(np.uint32)]
    bits: Expr = Call("code_table", (cast(code, "uint32"), *words), dtype("uint16"))
    if result.bits == 8:
        bits = cast(bits, "uint8")
    return bits if bits.dtype == result else Call("reinterpret", (bits,), result)


__all__ = ["code_tables"]
