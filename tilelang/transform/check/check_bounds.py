"""Reject accesses of block and thread memory that certainly lie outside of it: nothing guards them on any target.

    s = T.alloc_shared((128,), "float32")
    for i in T.Parallel(128):
        Y[i] = s[i + 1]                     # rejected: s[128] is read
"""

from __future__ import annotations

from typing import Any

from tilelang import errors
from tilelang.arith import LaunchFacts
from tilelang.ir import (AddressOf, Binary, Bind, Break, Buffer, Call, Const, Continue, Expr, For, Func, If, Launch, Load, Node,
                         Parallel, Select, Seq, Stmt, Store, TileOp, Var, While, children, contains, convert, inner, remember,
                         substitute, walk, GLOBAL)

from ..framework.pass_ import TILE, PassContext, pass_

errors.register("out-of-bounds", IndexError, "a program certainly accesses block memory outside its shape",
                expected="an index inside the buffer")

_BY_ADDRESS = ("wgmma_descriptor", "tma_load")  # calls whose first operand is an address in shared memory


@pass_(needs=TILE)
def check_bounds(func: Func, cx: PassContext) -> Func:
    """Raise "out-of-bounds" for an access that certainly runs and certainly lies outside of its buffer. Changes nothing.

    Only indices that are linear in variables which take every value of their range are certain, at places that no condition,
    early exit or loop of unknown length may skip.
    """
    for launch in walk(func, Launch):
        if not any(c.op == "thread_return" for c in walk(launch, Call)):
            _Places(launch, func.params).stmt(launch.body)
    return func


class _Places:
    """Visits the statements of a launch in order.

    swept: variables that take every value of their range. values: of bound names. certain: the place runs for every value of
    these.
    """

    def __init__(self, launch: Launch, params: Any) -> None:
        self.facts = LaunchFacts(launch, params)
        self.swept = {*launch.thread_vars, *(v for v, n in zip(launch.block_vars, launch.grid) if _positive(n))}
        self.values: dict[Var, Expr] = {}
        self.certain = True

    def stmt(self, s: Stmt) -> None:
        match s:
            case Seq():
                for x in s.stmts:
                    self.stmt(x)
            case For() | Parallel():
                self.loop(s)
            case Store():
                self.check(s.buffer, s.indices, s.span)
                for e in (*s.indices, s.value):
                    self.expr(e)
            case Bind():
                self.expr(s.value)
                self.facts.enter_bind(s)
                if s.value.dtype.is_int and s.value.dtype.lanes == 1 and not contains(s.value, Load, Call):
                    remember(self.values, s)
            case If() | While():
                self.expr(s.cond)
                self.below(s, False)
            case TileOp():
                for a in s.accesses():  # type: ignore[attr-defined]
                    self.check(a.region.buffer, a.region.mins, a.region.span or s.span, a.region.extents)
                self.fields(s)
            case _ if inner(s):
                self.below(s, False)
            case _:
                self.fields(s)

    def loop(self, s: For | Parallel) -> None:
        """A loop that runs for every value of its variables, or may not."""
        names, extents = ((s.var,), (s.extent,)) if isinstance(s, For) else (s.vars, s.extents)
        whole = all(map(_positive, extents)) and not contains(s.body, Break, Continue)
        if isinstance(s, For):
            self.facts.enter_loop(s)
            whole = whole and isinstance(s.start, Const) and not s.kind.startswith(("threadIdx", "blockIdx", "vthread"))
        else:
            for v, n in zip(names, extents):
                high = self.facts.analyzer.interval(convert(n))[1]
                self.facts.analyzer = self.facts.analyzer.bind(v, 0, None if high is None else max(high - 1, 0))
        if whole:
            self.swept.update(names)
        self.below(s, whole)

    def below(self, s: Stmt, runs: bool) -> None:
        """The statements inside of s. runs: whether s certainly runs them."""
        outer, self.certain = self.certain, self.certain and runs
        for x in inner(s):
            self.stmt(x)
        self.certain = outer

    def expr(self, e: Expr) -> None:
        """Check the loads that certainly run."""
        if not self.certain or not contains(e, Load, Call):
            return
        if isinstance(e, Binary) and e.op in ("and", "or") and e.dtype.lanes == 1:
            self.expr(e.a)
        elif isinstance(e, Select) and e.cond.dtype.lanes == 1:
            self.expr(e.cond)
        else:
            if isinstance(e, Load):
                self.check(e.buffer, e.indices, e.span)
            elif isinstance(e, Call) and e.op in _BY_ADDRESS and isinstance(e.args[0], AddressOf):
                self.check(e.args[0].buffer, e.args[0].indices, e.span)
            self.fields(e)

    def fields(self, n: Node) -> None:
        for x in children(n):
            if isinstance(x, Expr):
                self.expr(x)

    def check(self, b: Buffer, indices: tuple[Expr, ...], span: Any, extents: tuple[Any, ...] = ()) -> None:
        """Raise out-of-bounds for an access outside of b. extents: elements accessed per dimension, 1 if not given."""
        if not self.certain or b.scope() == GLOBAL or len(indices) != len(b.shape):
            return
        a = self.facts.analyzer
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            more = extents[d] - 1 if extents and isinstance(extents[d], int) else 0
            if not isinstance(size, int) or not e.dtype.is_signed or e.dtype.lanes > 1:
                continue
            form = a.linear(substitute(e, self.values))
            if not all(isinstance(t, Var) and t in self.swept for t in form.terms):
                continue
            low, high = a.bounds_of(form)
            if low is None or high is None or low >= 0 and high + more < size:
                continue
            index = low if low < 0 else high + more
            raise errors.error(
                "out-of-bounds", f"{b.name} is accessed at index {index} of dimension {d}, which has {size} elements",
                expected=f"an index from 0 to {size - 1}", found=f"{index}", span=span,
                hint="memory of a block is not guarded: make it larger, or guard the access with a condition")


def _positive(n: Any) -> bool:
    return isinstance(n, Const) and int(n.value) > 0


__all__ = ["check_bounds"]
