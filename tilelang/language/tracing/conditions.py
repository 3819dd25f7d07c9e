"""Truth values, comparisons and the operators of Python that do not evaluate all operands, while a function is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import Buffer, Const, Expr, as_bool, const, logical, select, unary

from .builder import OPS, SCALARS, Builder, log
from .regions import BufferSlice
from .state import describe, error
from .python_questions import differs


_NO_VALUES = (str, tuple, list, dict, set, frozenset, np.ndarray, Number)


class Conditions:
    """Conditions that are known while tracing are Python bools; others become bool expressions."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def truth(self, value: Any) -> Any:
        """A Python bool, or the run-time condition as a bool expression."""
        if isinstance(value, BufferSlice):
            value = value.vector()
        if isinstance(value, Expr):
            if value.dtype.lanes > 1:
                raise errors.error("condition", f"a vector of {value.dtype.lanes} values has no one truth value",
                                   expected="a scalar", found=f"a {value.dtype} vector", span=self.b.span(),
                                   hint="compare an element of it, or T.any_of and T.all_of of a region; "
                                   "T.if_then_else chooses between scalars in a loop")
            return bool(value.value) if isinstance(value, Const) else as_bool(value)
        if isinstance(value, Buffer):
            raise error("condition", f"Buffer `{value.name}` has no truth value", expected="a scalar",
                        found=f"the buffer `{value.name}`")
        if isinstance(value, (bool, int, type(None), np.bool_)):
            return bool(value)
        if hasattr(value, "__tilelang_expr__"):
            return self.truth(value.__tilelang_expr__())
        errors.warn("python-condition", f"a Python object of type {type(value).__name__} is used as a condition; its truth "
                    "value is taken while tracing", "compare it: `is not None`, `len(x) > 0`", self.b.span(), log)
        return bool(value)

    def lazily(self, thunk: Callable[[], Any]) -> Any:
        self.b.lazy += 1
        try:
            return thunk()
        finally:
            self.b.lazy -= 1

    def _static(self, v: Any) -> bool:
        return not isinstance(v, (Expr, BufferSlice)) and not hasattr(v, "__tilelang_expr__") or isinstance(v, Const)

    def and_(self, first: Any, *rest: Callable[[], Any]) -> Any:
        return self._logical("and", first, rest)

    def or_(self, first: Any, *rest: Callable[[], Any]) -> Any:
        return self._logical("or", first, rest)

    def _logical(self, op: str, acc: Any, rest: tuple[Callable[[], Any], ...]) -> Any:
        for thunk in rest:
            if self._static(acc):
                if self.truth(acc) != (op == "and"):
                    return acc  # the result is known: the other operands are not evaluated, as in Python
                acc = thunk()
                continue
            value = self.lazily(thunk)
            if self._static(value):
                value = const(self.truth(value))
            acc = logical(op, self.truth(acc), self.truth(value))
        return acc

    def not_(self, value: Any) -> Any:
        return not self.truth(value) if self._static(value) else unary("not", self.truth(value))

    def ternary(self, cond: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        c = self.truth(cond)
        if isinstance(c, bool):
            return a() if c else b()
        x, y = self.lazily(a), self.lazily(b)
        for v in (x, y):
            if not isinstance(v, (Expr, BufferSlice, *SCALARS)):
                raise error("condition", "`a if cond else b` with a run-time condition chooses between «scalars», found "
                            f"{describe(v)}", hint="use an if statement")
        x, y = (v.vector() if isinstance(v, BufferSlice) else v for v in (x, y))
        return select(c, x, y)

    def compare(self, left: Any, *rest: tuple[str, Callable[[], Any]]) -> Any:
        """a < b < c: evaluates every operand once and joins the comparisons by `and`."""
        result: Any = True
        for k, (op, thunk) in enumerate(rest):
            right = thunk() if self._static(result) else self.lazily(thunk)
            part = (self.contains(left, right, op == "not in") if op.endswith("in") else
                    self.equality(op, left, right) if op in ("==", "!=") else OPS[op](left, right))
            result = part if k == 0 else self._conjunction(result, part)
            if self._static(result) and not self.truth(result):
                return result
            left = right
        return result

    def equality(self, op: str, a: Any, b: Any) -> Any:
        """a == b or a != b.  Raises condition for whole buffers, and for a run-time value with no number of the language.

        Python would treat those as unequal, so that a branch would silently be taken never or always."""
        for x, other in ((a, b), (b, a)):
            if isinstance(x, Buffer) and isinstance(other, (Buffer, Expr, BufferSlice, *SCALARS)) or (
                    isinstance(x, _NO_VALUES) and not isinstance(x, SCALARS) and isinstance(other, (Expr, BufferSlice))
                    and not isinstance(x, Expr) and not self._static(other)):
                found = f"{describe(a)} and {describe(b)}"
                raise errors.error("condition", f"`{op}` of {found}: Python calls them unequal whatever they hold",
                                   expected="two values", found=found, span=self.b.span(),
                                   hint="compare an element of the buffer: A[i] == x" if isinstance(x, Buffer) else
                                   "compare with a number")
        if isinstance(a, (tuple, list, dict)) and type(a) is type(b) and (differs(a) or differs(b)):
            same = self._elementwise(a, b)
            return self.not_(same) if op == "!=" else same
        return OPS[op](a, b)

    def _elementwise(self, a: Any, b: Any) -> Any:
        """a == b of containers with run-time elements: the comparisons joined by `and`."""
        if len(a) != len(b) or isinstance(a, dict) and a.keys() != b.keys():
            return False
        if isinstance(a, dict):
            a, b = list(a.values()), [b[k] for k in a]
        same: Any = True
        for x, y in zip(a, b):
            same = self._logical("and", same, (partial(self.equality, "==", x, y),))
        return same

    def contains(self, item: Any, items: Any, absent: bool = False) -> Any:
        """`item in items`, or `not in`.  With run-time values: the comparisons joined by `or`."""
        found: Any
        if isinstance(items, dict):
            items = list(items)
        if isinstance(items, range) and not self._static(item):
            low, high = (min(items), max(items)) if items else (1, 0)
            found = logical("and", item >= low, item <= high)
            if abs(items.step) != 1:
                found = logical("and", found, OPS["=="]((item - low) % abs(items.step), 0))
        elif isinstance(items, (tuple, list, set, frozenset)) and not all(
                self._static(x) and not differs(x) for x in (item, *items)):
            found = False
            for x in items:
                part = self.equality("==", item, x)
                found = logical("or", found, const(self.truth(part)) if self._static(part) else self.truth(part))
        elif self._static(item) or isinstance(items, (Buffer, BufferSlice)):
            found = item in items
        else:
            raise error("condition", f"`in` of a run-time value and ‹a {type(items).__name__}›: its value is known only when "
                        "the kernel runs", expected="a tuple or list of values", hint="use a tuple or list of the values")
        return self.not_(found) if absent else found

    def _conjunction(self, a: Any, b: Any) -> Any:
        if self._static(b):
            b = const(self.truth(b))
        return logical("and", self.truth(a), self.truth(b))
