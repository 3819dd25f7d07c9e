"""The state of a parallel loop while it is distributed over threads, and walks over the memory accesses of its body."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from tilelang.ir import (AddressOf, Buffer, Const, Expr, For, If, Load, Node, Select, Store, Var, While, contains, fields_of,
                         walk, DYNAMIC, GLOBAL, STATIC)
from tilelang.ir.record import state
from tilelang.ops.distribute import Distribution

from .fragment_access import Grid, Touch, resolve


@state
class Loop:
    """A distributed loop while it is lowered.

    vars: user's loop variables, bound to a point's coordinates. base: variable of the first lane along the lane
    dimension. staged: the shared buffer that stands for a fragment, from which element on. touches: how each fragment access
    resolves. vloads / vstores: accesses moved to vectors around the lane loop, to the element of a staging array that
    replaces them. values: what the bound coordinates equal.
    loose: vectors may pass the end of a row; a run-time test selects vectors or scalars. scalar: the branch with scalars.
    """

    vars: tuple[Var, ...]
    dist: Distribution
    grid: Grid | None
    is_async: bool = False
    base: Var | None = None
    staged: dict[Buffer, tuple[Buffer, tuple[Expr, ...]]] = field(default_factory=dict)
    touches: dict[tuple[Buffer, tuple[Expr, ...], bool], Touch] = field(default_factory=dict)
    vloads: dict[Load, tuple[Buffer, Expr]] = field(default_factory=dict)
    vstores: dict[int, tuple[Buffer, Expr]] = field(default_factory=dict)
    inner: list[tuple[Var, int]] = field(default_factory=list)
    values: dict[Any, Any] = field(default_factory=dict)
    loose: bool = False
    scalar: bool = False

    @property
    def lane_var(self) -> Var | None:
        return self.vars[self.dist.lane_dim] if self.dist.lanes and self.vars else None

    def touch(self, layout_of: Callable[[Buffer], Any], buffer: Buffer, indices: tuple[Expr, ...], is_write: bool) -> Touch:
        """How a fragment access resolves; computed once."""
        key = (buffer, indices, is_write)
        got = self.touches.get(key)
        if got is None:
            if self.grid is None:
                got = Touch(None, f"`{buffer.name}` is indexed in a loop of run-time extent")
            else:
                used = {x for i in indices for x in walk(i, Var)}
                grid = self.grid.with_inner([(v, n) for v, n in self.inner if v in used])
                got = resolve(layout_of(buffer), buffer, indices, grid, is_write)
            self.touches[key] = got
        return got


def accesses(body: Any) -> list[tuple[Any, list[tuple[Var, int]]]]:
    """Loads, stores and addresses below body, each with the static serial loops around it."""
    out: list[tuple[Any, list[tuple[Var, int]]]] = []

    def visit(n: Any, inner: list[tuple[Var, int]]) -> None:
        if isinstance(n, tuple):
            for x in n:
                visit(x, inner)
        elif isinstance(n, Node):
            if not contains(n, Load, Store, AddressOf):
                return
            if isinstance(n, (Load, Store, AddressOf)):
                out.append((n, inner))
            if isinstance(n, For):
                visit(n.start, inner)
                visit(n.extent, inner)
                if isinstance(n.extent, Const) and isinstance(n.start, Const) and n.start.value == 0:
                    inner = [*inner, (n.var, int(n.extent.value))]
                visit(n.body, inner)
                return
            for f in fields_of(type(n)):
                if f not in ("buffer", "attrs"):
                    visit(getattr(n, f), inner)

    visit(body, [])
    return out


def in_order(n: Any, conditional: bool = False) -> Iterator[tuple[Node, bool]]:
    """Memory accesses below n in order of evaluation, each with whether it may be skipped or repeated."""
    match n:
        case Store():
            yield from in_order((*n.indices, n.value), conditional)
            yield n, conditional
        case Load() | AddressOf():
            yield from in_order(n.indices, conditional)
            yield n, conditional
        case If():
            yield from in_order(n.cond, conditional)
            yield from in_order((n.then, n.orelse), True)
        case Select():
            yield from in_order(n.cond, conditional)
            arms = [list(in_order(e)) for e in (n.a, n.b)]
            both = set.intersection(*({x for x, maybe in arm if not maybe} for arm in arms))
            yield from ((x, conditional or x not in both) for arm in arms for x, _ in arm)
        case For() | While():
            head = (n.start, n.extent) if isinstance(n, For) else (n.cond,)
            once = [*in_order(head, conditional), *in_order(n.body, True)]
            yield from once * 2  # the body's beginning follows its end
        case Node():
            short = getattr(n, "op", "") in ("and", "or")
            for f in fields_of(type(n)):
                if f not in ("buffer", "attrs"):
                    yield from in_order(getattr(n, f), conditional or (short and f == "b"))
        case tuple():
            for x in n:
                yield from in_order(x, conditional)


def is_memory(buffer: Buffer) -> bool:
    """Whether a buffer is in memory that several threads see."""
    return buffer.scope_name in (GLOBAL, STATIC, DYNAMIC)


def depends(e: Node, var: Var) -> bool:
    """Whether var occurs below e."""
    return any(x is var for x in walk(e))
