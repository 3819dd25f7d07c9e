"""The operands of the functions of a reduction or scan by a function (combine.py), and values in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang.ir import Bind, Call, Const, Expr, Stmt, Var, call, const, dtype, fresh, rewrite, seq

Values = Sequence[Expr]
LEFT, RIGHT, ELEMENT, POSITION = range(4)


def operand(kind: int, k: int, dt: Any) -> Expr:
    """Operand k of the functions of a Combine: value k of the left or right state, the element of source k, or the index of an
    element along the dimension (int32)."""
    return call("combine_operand", (const(kind), const(k)), dtype(dt))


def given(e: Any, values: dict[int, Values]) -> Any:
    """The expression with values for its operands: by kind, one for each number."""
    def fn(x: Call) -> Expr | None:
        if x.op != "combine_operand":
            return None
        kind, k = (int(a.value) for a in x.args)  # type: ignore[attr-defined]
        return values[kind][k]

    return rewrite(e, fn, Call)


def bound(values: Values) -> tuple[Stmt, list[Any]]:
    """(statements that bind values to variables, the variables): each is computed once, before anything is stored."""
    names = [e if isinstance(e, (Const, Var)) else fresh("v", e.dtype) for e in values]
    return seq(*[Bind(v, e) for v, e in zip(names, values) if v is not e]), names  # type: ignore[arg-type]
