"""Bounds guards of global accesses: the conditions under which an access is inside its buffer, without the proven ones.

Values that T.assume names are checked by the host at every call, so proofs may use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from tilelang.arith import Analyzer, LaunchFacts, bound_to, extent_bounds, lane_of
from tilelang.arith.flat_index import widened
from tilelang.ir import (Assert, Binary, Bind, Call, Const, Evaluate, Expr, For, Func, If, Launch, Load, Node,
                         Parallel, Ramp, Seq, Stmt, Unary, Var, binary, cast, const, contains, free_vars, inner,
                         logical, remember, replace, substitute, unary, walk, ways, with_inner)


def conjuncts(cond: Expr, holds: bool = True) -> list[tuple[Expr, bool]]:
    """Conditions, and whether they hold, that together say that cond does (or does not)."""
    if isinstance(cond, Unary) and cond.op == "not":
        return conjuncts(cond.a, not holds)
    if isinstance(cond, Binary) and cond.op == ("and" if holds else "or"):
        return [*conjuncts(cond.a, holds), *conjuncts(cond.b, holds)]
    return [(cond, holds)]


def operands(e: Expr, op: str) -> list[Expr]:
    """The operands of nested `op`."""
    return [*operands(e.a, op), *operands(e.b, op)] if isinstance(e, Binary) and e.op == op else [e]


def summands(e: Any, added: bool = True) -> Iterator[tuple[Any, bool]]:
    """The terms of nested sums and differences, and whether each is added."""
    if isinstance(e, Binary) and e.op in ("add", "sub"):
        yield from summands(e.a, added)
        yield from summands(e.b, added == (e.op == "add"))
    else:
        yield e, added


def bounds_guard(analyzer: Analyzer, shape: tuple[Any, ...], indices: tuple[Expr, ...], skip: int | None = None) -> Expr | None:
    """0 <= index < extent in every dimension (except `skip`), without what analyzer proves; None: all proven.

    Each dimension is tested separately: an index past the end of a row does not reach into the next row.
    """
    out: Expr | None = None
    for d, (index, extent) in enumerate(zip(indices, shape)):
        if d == skip:
            continue
        if index.dtype.bits > 32 and isinstance(extent, Expr):
            extent = widened(extent)
        for cond in (binary("ge", index, const(0)), binary("lt", index, extent)):
            if isinstance(cond, Const) and cond.value or analyzer.can_prove(cond):
                continue
            out = cond if out is None else logical("and", out, cond)
    return out


def vector_lanes_of(indices: tuple[Expr, ...]) -> list[tuple[Expr, ...]]:
    """The scalar indices of each lane of a vector access; empty when no index is a vector."""
    lanes = max((i.dtype.lanes for i in indices), default=1)
    return [tuple(lane_of(i, k) for i in indices) for k in range(lanes)] if lanes > 1 else []


def tile_indices(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Indices of a tile, narrowed to int32: a tile never needs more, and layout formulas combine indices of one type."""
    def narrow(i: Expr) -> Expr:
        if isinstance(i, Ramp):
            base, stride = narrow(i.base), narrow(i.stride)
            return Ramp(base, stride, i.lanes, base.dtype.with_lanes(i.lanes))
        return i if i.dtype == "int32" or i.dtype.lanes > 1 else cast(i, "int32")

    return tuple(map(narrow, indices))


# ---- what T.assume states about values that the host knows -----------------------------------------------------------

def promises(func: Func) -> tuple[Expr, ...]:
    """Conditions of T.assume outside of control flow that mention only scalar parameters and shape symbols."""
    handles = {p for p, _ in func.buffers}
    known = {p for p in func.params if p not in handles and p.dtype.is_int}
    for _, b in func.buffers:
        known |= {v for d in (*b.shape, *(b.strides_ or ())) if isinstance(d, Expr) for v in free_vars(d)}
    out: list[Expr] = []

    def visit(s: Stmt) -> None:
        if isinstance(s, (Seq, Launch)):
            for x in inner(s):
                visit(x)
        elif isinstance(s, Evaluate) and s.call.op == "assume":
            out.extend(c if holds else unary("not", c) for c, holds in conjuncts(s.call.args[0]))

    visit(func.body)
    return tuple(e for e in out if free_vars(e) <= known and not contains(e, Load, Call))


def promised(func: Func) -> tuple[Analyzer, dict[Expr, int]]:
    """(an analyzer that knows the conditions, known divisors of variables for which `x % n == 0` is assumed)."""
    analyzer, divisors = Analyzer(), dict[Expr, int]()
    for e in promises(func):
        analyzer = analyzer.assuming(e)
        if isinstance(e, Binary) and e.op == "eq" and isinstance(e.b, Const) and e.b.value == 0:
            x = e.a
            if isinstance(x, Binary) and x.op in ("floormod", "truncmod") and isinstance(x.a, Var) and isinstance(x.b, Const):
                divisors[x.a] = max(divisors.get(x.a, 1), abs(int(x.b.value)))
    return analyzer, divisors


def with_ranges(known: Analyzer, n: Node, *kinds: type, but: Set[Var] = frozenset()) -> Analyzer:
    """The analyzer with the ranges of all variables that are defined in n, which have unique names.

    kinds: of the statements that define them, all if none are given: the range of a value takes time.  but: names left out.
    """
    for x in walk(n, *kinds or (Launch, For, Parallel, Bind)):
        match x:
            case Launch():
                known = bound_to(known, (*x.block_vars, *x.thread_vars), (*x.grid, *x.threads))
            case Parallel():
                known = bound_to(known, x.vars, x.extents)
            case For():
                known = known.bind(x.var, *extent_bounds(known, x.start, x.extent))
            case Bind() if x.var.dtype.is_int and x.var.dtype.lanes == 1 and x.var not in but:
                known = known.bind(x.var, *known.interval(x.value))
    return known


# ---- facts that hold at a statement ----------------------------------------------------------------------------------

class Around:
    """One walk over a program in phase TILE, with the ranges of variables and the conditions around each statement.

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
