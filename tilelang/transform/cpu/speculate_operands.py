"""Which operands of `and`, `or` and if_then_else are evaluated always, so that no branch is needed."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Binary, Call, Expr, Func, Load, Node, Select, replace, rewrite, walk
from tilelang.target.cpu_launch import NestVersions, RangeTest, rewrite_codes

from ..framework.pass_ import CPU, PassContext, pass_

MOST_NODES = 16  # of an operand that is evaluated where its value is not needed
_DIVISIONS = ("floordiv", "floormod", "truncdiv", "truncmod")
_ALWAYS = {"and": "bitand", "or": "bitor"}


@pass_(needs=CPU)
def speculate_operands(func: Func, cx: PassContext) -> Func:
    """Harmless operands are evaluated always: without loads, calls and divisions, and of at most MOST_NODES nodes.

        i < n and j < m                        ->   (i < n) & (j < m)
        T.if_then_else(i < n, x + 1.0, 0.0)    ->   T.Select(i < n, x + 1.0, 0.0)
        T.if_then_else(i < n, A[i], 0.0)            keeps its branch

    Vectors have no branches: all their operands are evaluated.
    """
    return rewrite_codes(_speculated(func), lambda code: code.having(_speculated(code.body)))


def _speculated(n: Any) -> Any:
    def visit(x: Binary | Select | NestVersions) -> Node | None:
        match x:
            case Select() if x.lazy and (x.cond.dtype.lanes > 1 or is_harmless(x.a) and is_harmless(x.b)):
                return replace(x, lazy=False)
            case Binary() if x.op in _ALWAYS and (x.dtype.lanes > 1 or is_harmless(x.b)):
                return replace(x, op=_ALWAYS[x.op])
            case NestVersions():  # records hide their expressions from a rewriter
                tests = tuple(RangeTest(_speculated(t.low), _speculated(t.high), t.size, t.test_low) for t in x.tests)
                return replace(x, tests=tests)
        return None

    return rewrite(n, visit, Binary, Select, NestVersions)


def is_harmless(e: Expr) -> bool:
    """Whether evaluating e where it is not needed is harmless."""
    for k, n in enumerate(walk(e)):
        if k >= MOST_NODES or isinstance(n, (Load, Call)) or isinstance(n, Binary) and n.op in _DIVISIONS:
            return False
    return True
