"""Put a wgmma.fence before each raw wgmma that may repeat one since the last fence or commit.

    ptx_wgmma_ss(..., d, 0, e, 0, c.data, 0, 1)         wgmma(c, d, e)
    ptx_wgmma_ss(..., d, 0, e, 0, c.data, 0, 1)   ->    wgmma_fence(); wgmma(c, d, e)

ptxas drops a wgmma whose accumulators and operands equal those of an earlier one, adjacent or not, although the
accumulators have changed in between. Operands are equal when their values are. A fence or a commit between the two
keeps both, at the cost of one WARPGROUP.ARRIVE and no wait. T.gemm does not need this: each has its own fence and
commit, and its instructions differ in their offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Bind, Binary, Break, Call, Const, Continue, Evaluate, Expr, For, If, Launch, Load, Seq,
                         Stmt, Var, While, seq, substitute, walk, rewrite_stmts)
from tilelang.ir.record import record

from ..analysis.effects import effects
from ..analysis.statements import do

ITERATIONS = 64  # iterations of nested loops that are compared one by one; in longer loops any two are assumed equal
_SEPARATORS = ("wgmma_fence", "wgmma_commit")


@record
class _Wgmma:
    """A raw wgmma. call: with its values at that point. stale: variables it names may have changed since."""

    call: Call
    stale: bool = False


Open = dict[int, _Wgmma]  # wgmmas since the last fence or commit on some path, by the identity of their calls


def fence_repeated_wgmmas(launch: Launch) -> Launch:
    """The launch with a fence before each raw wgmma that is not known to differ from those before it."""
    if not any(c.op == "wgmma" for c in walk(launch.body, Call)):
        return launch
    flow = _Flow()
    flow.visit(launch.body, {}, {}, 1)

    def fenced(x: Stmt) -> Stmt | None:
        return seq(do("wgmma_fence"), x) if id(x) in flow.marked else None

    return rewrite_stmts(launch, fenced) if flow.marked else launch  # type: ignore[no-any-return]


class _Flow:
    """Follows a program. marked: the ids of statements that need a fence."""

    def __init__(self) -> None:
        self.marked: set[int] = set()
        self.left: list[Open] = []  # per enclosing loop: the open wgmmas where a Break or Continue leaves its body
        self.arith = Analyzer()

    def visit(self, s: Stmt, now: Open, values: dict[Var, Expr], iterations: int) -> Open:
        """The open wgmmas after s. values: known variables, extended by Bind; iterations: of the enclosing loops, in all."""
        if isinstance(s, Seq):
            for x in s.stmts:
                now = self.visit(x, now, values, iterations)
            return now
        if isinstance(s, Evaluate) and s.call.op == "wgmma":
            return self.wgmma(s, now, values)
        if isinstance(s, Evaluate) and s.call.op in _SEPARATORS:
            return {}
        if isinstance(s, Bind):
            values[s.var] = self.value(s.value, values)
            return now
        if isinstance(s, If):
            then = self.visit(s.then, now, dict(values), iterations)
            return _joined(then, now if s.orelse is None else self.visit(s.orelse, now, dict(values), iterations))
        if isinstance(s, (For, While)) and _concerned(s):
            return self.loop(s, now, values, iterations)
        if isinstance(s, (Break, Continue)):
            if self.left:
                self.left[-1] = _joined(self.left[-1], now)
            return now
        written = {e.storage for e in effects(s) if e.writes}
        return {k: replace(p, stale=True) if not p.stale and _reads(p.call, written) else p for k, p in now.items()}

    def value(self, e: Any, values: Mapping[Var, Expr]) -> Any:
        return self.arith.simplify(substitute(e, dict(values)))

    def wgmma(self, s: Evaluate, now: Open, values: Mapping[Var, Expr]) -> Open:
        c, a, b, *_ = s.call.args
        args = (c, *(x if isinstance(x, AddressOf) else self.value(x, values) for x in (a, b)))
        made = _Wgmma(Call(s.call.op, args, s.call.dtype, s.call.options))
        if any(not _differ(made, p) for p in now.values()):
            self.marked.add(id(s))
            now = {}
        return {**now, id(made.call): made}

    def loop(self, s: For | While, now: Open, values: dict[Var, Expr], iterations: int) -> Open:
        self.left.append({})
        extent = self.value(s.extent, values) if isinstance(s, For) else None
        if isinstance(s, For) and isinstance(extent, Const) and int(extent.value) * iterations <= ITERATIONS:
            for i in range(int(extent.value)):
                inside = {**values, s.var: self.value(s.start + i, values)}
                now = _joined(self.visit(s.body, now, inside, iterations * int(extent.value)), self.left[-1])
        else:
            for _ in range(2):  # two passes compare every statement with those of an earlier iteration
                after = _joined(self.visit(s.body, now, dict(values), ITERATIONS), self.left[-1])
                now = _joined(now, {k: replace(p, stale=True) for k, p in after.items()})
        return _joined(now, self.left.pop())


def _joined(a: Open, b: Open) -> Open:
    out = {**a, **b}
    return {k: p if not (k in a and a[k].stale) else a[k] for k, p in out.items()}


def _concerned(s: Stmt) -> bool:
    return any(c.op in ("wgmma", *_SEPARATORS) for c in walk(s, Call))


def _reads(call: Call, written: set[Var]) -> bool:
    return any(isinstance(x, Load) and x.buffer.data in written for a in call.args[1:3] for x in walk(a))


def _differ(p: _Wgmma, q: _Wgmma) -> bool:
    """Whether two wgmmas certainly differ in their instruction or their values."""
    c, d = p.call.args[0], q.call.args[0]
    if not isinstance(c, AddressOf) or not isinstance(d, AddressOf):
        return False
    if p.call.options != q.call.options or c.buffer.data is not d.buffer.data:
        return True
    at, other = c.indices[0], d.indices[0]
    if isinstance(at, Const) and isinstance(other, Const) and at.value != other.value:
        return True
    return not (p.stale or q.stale) and any(map(_differ_by_constant, p.call.args[1:3], q.call.args[1:3]))


def _differ_by_constant(x: Any, y: Any) -> bool:
    """Whether two descriptors are one value plus different constants. (Registers may hold equal values.)"""
    if isinstance(x, AddressOf) or isinstance(y, AddressOf):
        return False
    (base, m), (other, n) = _split(x), _split(y)
    return (m - n) % (1 << 64) != 0 and (base is other or base is not None and other is not None and base.same(other))


def _split(e: Any) -> tuple[Any, int]:
    """e as a base (None for 0) plus a constant."""
    if isinstance(e, Const):
        return None, int(e.value)
    if isinstance(e, Binary) and e.op == "add":
        for rest, n in ((e.a, e.b), (e.b, e.a)):
            if isinstance(n, Const):
                base, more = _split(rest)
                return base, more + int(n.value)
    return e, 0
