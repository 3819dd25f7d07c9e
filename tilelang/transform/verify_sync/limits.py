"""Bounds for conditions and numbers of all threads whose values are unknown.

They tell which way a branch may go and between which numbers a value lies (`tx < min(n, 5)` holds for no thread from 5 on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Binary, Cast, Const, Expr, Select, Unary, Var

Limits = tuple[Any, Any]  # least and greatest value, a number or one per thread; None: unknown
_ORDERED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}  # operator -> its negation


def possible(e: Expr, want: bool, value: Callable[[Expr], Any], bound: dict[Var, tuple[Any, Any]]) -> Any:
    """The threads (a bool each, or one for all) for which a condition may have the truth value `want`.

    value: a condition's value where it is known, else None.  bound: this function's results for False and True, by name.
    """
    known = value(e)
    if known is not None:
        return np.asarray(known, dtype=bool) == want
    if isinstance(e, Var) and e in bound:
        return bound[e][want]
    if isinstance(e, Unary) and e.op == "not":
        return possible(e.a, not want, value, bound)
    if isinstance(e, Binary) and e.op in ("and", "or"):
        a, b = (possible(x, want, value, bound) for x in (e.a, e.b))
        return a & b if (e.op == "and") == want else a | b
    if isinstance(e, Binary) and e.op in _ORDERED and not e.a.dtype.is_float:
        return _may(e.op if want else _ORDERED[e.op], limits(e.a, value), limits(e.b, value))
    return np.True_


def _may(op: str, a: Limits, b: Limits) -> Any:
    """Whether a op b may hold."""
    if op in ("gt", "ge"):
        return _may({"gt": "lt", "ge": "le"}[op], b, a)
    if op == "eq":
        return _may("le", a, b) & _may("le", b, a)
    if op == "ne" or a[0] is None or b[1] is None:
        return np.True_
    return np.asarray(a[0] < b[1] if op == "lt" else a[0] <= b[1])


def limits(e: Expr, value: Callable[[Expr], Any]) -> Limits:
    """Between which numbers an integer lies.  value: as in `possible`."""
    known = value(e)
    if known is not None:
        return known, known
    if isinstance(e, Cast) and not e.value.dtype.is_float and e.dtype.bits >= e.value.dtype.bits:
        return limits(e.value, value)
    if isinstance(e, Select):
        (low, high), (low2, high2) = limits(e.a, value), limits(e.b, value)
        return _both(np.minimum, low, low2), _both(np.maximum, high, high2)
    if not isinstance(e, Binary):
        return None, None
    if e.op in ("min", "max"):
        (low, high), (low2, high2) = limits(e.a, value), limits(e.b, value)
        pick = np.minimum if e.op == "min" else np.maximum
        if e.op == "min":
            return _both(pick, low, low2), _either(pick, high, high2)
        return _either(pick, low, low2), _both(pick, high, high2)
    if not isinstance(e.b, Const):
        return None, None
    c = int(e.b.value)
    if e.op == "floormod" and c > 0:
        return 0, c - 1
    if e.op == "bitand" and c >= 0:
        return 0, c
    low, high = limits(e.a, value)
    if e.op == "floordiv" and c > 0:
        return _both(np.floor_divide, low, c), _both(np.floor_divide, high, c)
    if low is None or high is None or not (e.op in ("add", "sub") or e.op == "mul" and c > 0):
        return None, None  # if one bound is unknown, the other may wrap
    act = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[e.op]
    return act(low, c), act(high, c)


def _both(pick: Any, a: Any, b: Any) -> Any:
    return None if a is None or b is None else pick(a, b)


def _either(pick: Any, a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else pick(a, b)
