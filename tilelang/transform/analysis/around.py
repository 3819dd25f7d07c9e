"""The facts that hold at a statement of a launch: ranges of variables, and the conditions around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.arith import Analyzer, LaunchFacts
from tilelang.ir import (Assert, Bind, Call, Evaluate, Expr, For, Func, If, Launch, Load, Stmt, Var, binary, contains, remember,
                         replace, substitute, ways, with_inner)

from .guards import promises


class Around:
    """One walk over a program in phase TILE.

    conds: conditions that hold at the statement, none of which reads memory. values: of bound integers that read no memory.
    """

    def __init__(self, func: Func, kind: type, at: Callable[[Any, Around], Stmt]) -> None:
        self.params, self.kind, self.at = func.params, kind, at
        self.facts: LaunchFacts | None = None
        self.conds: tuple[Expr, ...] = promises(func)
        self.values: dict[Var, Expr] = {}

    def analyzer(self) -> Analyzer:
        """An analyzer that knows the ranges and the conditions."""
        assert self.facts is not None, "only statements of a launch are visited"
        out = self.facts.analyzer
        for c in self.conds:
            out = out.assuming(c)
        return out

    def stmt(self, s: Any) -> Any:
        """The statement with those of the kind that is looked for replaced."""
        if not contains(s, self.kind, Assert, Evaluate, Bind):
            return s
        conds = self.conds
        out = self._visited(s)
        if not isinstance(s, (Assert, Evaluate, Bind)):
            self.conds = conds
        return out

    def _visited(self, s: Any) -> Any:
        if isinstance(s, self.kind) and self.facts is not None:
            return self.at(s, self)
        match s:
            case Launch():
                self.facts = LaunchFacts(s, self.params)
            case For() if self.facts is not None:
                self.facts.enter_loop(s)
                self._know(binary("lt", s.var, binary("add", s.start, s.extent)))
            case Bind() if self.facts is not None:
                self.facts.enter_bind(s)
                if s.value.dtype.is_int and s.value.dtype.lanes == 1 and not contains(s.value, Load, Call):
                    remember(self.values, s)
            case Assert():
                self._know(s.cond)
            case Evaluate() if s.call.op == "assume":
                self._know(s.call.args[0])
            case If():
                return self._branches(s)
        return with_inner(s, self.stmt)

    def _branches(self, s: If) -> Stmt:
        conds, out = self.conds, []
        for cond, way in ways(s):
            self.conds = conds
            self._know(cond)
            out.append(self.stmt(way))
        self.conds = conds
        return replace(s, then=out[0], orelse=out[1] if s.orelse is not None else None)

    def _know(self, cond: Expr) -> None:
        """Add a condition. Memory may change before the statement: a condition that reads it is not kept."""
        if not contains(cond, Load, Call):
            self.conds = (*self.conds, substitute(cond, self.values))


def visit_with_facts(func: Func, kind: type, at: Callable[[Any, Around], Stmt]) -> Func:
    """func with each statement of a kind replaced by at(statement, what is known there), outermost ones only."""
    return with_inner(func, Around(func, kind, at).stmt)  # type: ignore[no-any-return]
