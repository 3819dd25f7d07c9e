"""The derivative of a score function, made of the language's own expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tilelang.language as T
from tilelang.errors import error
from tilelang.ir import Binary, Call, Cast, Const, Expr, Load, Select, Unary, Var

# Call -> its derivative, of (value of the call, its argument). Steps have derivative 0, as in torch.
_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda y, x: y, "exp2": lambda y, x: y * math.log(2), "exp10": lambda y, x: y * math.log(10),
    "log": lambda y, x: 1.0 / x, "log2": lambda y, x: 1.0 / (x * math.log(2)), "log10": lambda y, x: 1.0 / (x * math.log(10)),
    "log1p": lambda y, x: 1.0 / (1.0 + x), "sqrt": lambda y, x: 0.5 / y, "rsqrt": lambda y, x: -0.5 * y / x,
    "sigmoid": lambda y, x: y * (1.0 - y), "tanh": lambda y, x: 1.0 - y * y,
    "sin": lambda y, x: T.cos(x), "cos": lambda y, x: -T.sin(x), "tan": lambda y, x: 1.0 + y * y,
    "sinh": lambda y, x: T.cosh(x), "cosh": lambda y, x: T.sinh(x), "atan": lambda y, x: 1.0 / (1.0 + x * x),
    "erf": lambda y, x: T.exp(-x * x) * (2.0 / math.sqrt(math.pi)),
    "fabs": lambda y, x: T.if_then_else(x > 0, 1.0, T.if_then_else(x < 0, -1.0, 0.0)),
    **dict.fromkeys(("floor", "ceil", "trunc", "nearbyint", "round"), lambda y, x: 0.0)}


def derivative(e: Any, by: Var, others: tuple[Var, ...] = ()) -> Any:
    """d e / d by: an expression, or 0.0. e: an expression of `by`, a float variable, or a number. others: variables that do not
    depend on it.

    Where a minimum, a maximum or a condition changes sides, it is the derivative of the chosen side. Raises attention-gradient
    for an expression that has no rule here.

    >>> from tilelang.ir import Var, dtype
    >>> s = Var("s", dtype("float32"))
    >>> derivative(3.0 * s, s)
    3.0
    """
    if not isinstance(e, Expr) or isinstance(e, (Const, Load)) or not e.dtype.is_float:
        return 0.0  # tensors and indices do not depend on scores
    if isinstance(e, Var) and any(e is x for x in (by, *others)):
        return 1.0 if e is by else 0.0
    if isinstance(e, Cast) and e.value.dtype.is_float:
        return derivative(e.value, by, others)
    if isinstance(e, Cast):
        return 0.0
    if isinstance(e, Unary) and e.op == "neg":
        return _times(-1.0, derivative(e.a, by, others))
    if isinstance(e, Select):
        return _chosen(e.cond, derivative(e.a, by, others), derivative(e.b, by, others))
    if isinstance(e, Binary):
        return _binary(e, derivative(e.a, by, others), derivative(e.b, by, others))
    if isinstance(e, Call) and e.op in _RULES:
        inner = derivative(e.args[0], by, others)
        return 0.0 if _zero(inner) else _times(_RULES[e.op](e, e.args[0]), inner)
    if isinstance(e, Call) and e.op == "pow" and _zero(derivative(e.args[1], by, others)):
        x, n = e.args
        return _times(n * T.pow(x, n - 1.0), derivative(x, by, others))
    what = f"the variable `{e.name}`" if isinstance(e, Var) else f"`{e.op}`" if hasattr(e, "op") else type(e).__name__
    raise error("attention-gradient", f"the derivative of a score function with ‹{what}› is not known", expected="+, -, *, /, "
                f"T.min, T.max, T.if_then_else, T.pow with a constant exponent, and {', '.join(sorted(_RULES))}",
                hint="call it under torch.no_grad(), or write the score as one such expression")


def _binary(e: Binary, da: Any, db: Any) -> Any:
    if e.op in ("add", "sub"):
        right = _times(-1.0, db) if e.op == "sub" else db
        return right if _zero(da) else da if _zero(right) else da + right
    if e.op == "mul":
        left, right = _times(_number(e.b), da), _times(_number(e.a), db)
        return right if _zero(left) else left if _zero(right) else left + right
    if e.op == "div":
        by = _number(e.b)
        over = _times(da, 1.0 / by) if not isinstance(by, Expr) and by else 0.0 if _zero(da) else da / e.b
        return over if _zero(db) else over - e * db / e.b
    if e.op in ("min", "max"):
        return _chosen(e.a <= e.b if e.op == "min" else e.a >= e.b, da, db)
    if _zero(da) and _zero(db):
        return 0.0
    raise error("attention-gradient", f"the derivative of a score function with ‹`{e.op}`› is not known",
                expected="+, -, *, /, T.min and T.max of scores", hint="call it under torch.no_grad()")


def _number(e: Any) -> Any:
    """The value of a constant; other expressions as they are."""
    return float(e.value) if isinstance(e, Const) else e


def _zero(d: Any) -> bool:
    return not isinstance(d, Expr) and d == 0.0


def _times(a: Any, d: Any) -> Any:
    """a * d, where a or d may be the number 0 or 1."""
    if _zero(d) or _zero(a):
        return 0.0
    if isinstance(a, Expr) and not isinstance(d, Expr):
        a, d = d, a
    if not isinstance(a, Expr) and not isinstance(d, Expr):
        return a * d
    if not isinstance(a, Expr) and isinstance(d, Binary) and d.op == "mul" and isinstance(d.b, Const):
        return _times(a * float(d.b.value), d.a)
    if not isinstance(a, Expr) and a != 1.0:
        return d * a
    return a if not isinstance(d, Expr) and d == 1.0 else d if not isinstance(a, Expr) and a == 1.0 else a * d


def _chosen(cond: Any, a: Any, b: Any) -> Any:
    return 0.0 if _zero(a) and _zero(b) else T.if_then_else(cond, a, b)
