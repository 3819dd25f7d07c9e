"""Reject stores by which several blocks put different values into the same elements of a tensor.

    with T.Kernel(4, threads=32) as bx:
        for i in T.Parallel(32):
            Y[i] = X[bx * 32 + i]           # rejected: bx is in the value, and not in the place
            Y[bx // 2 * 32 + i] = X[bx * 32 + i]    # rejected: blocks 0 and 1 have one place
"""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Buffer, Call, Const, Evaluate, Expr, For, Func, If, Launch, Load,
                         Parallel, Stmt, Store, TileOp, Var, While, alpha_equal, binary, const, contains, free_vars, inner,
                         is_const, rewrite, substitute, walk, GLOBAL, PRIVATE)
from tilelang.target.intrinsics import INTRINSICS, SYNC, WRITES
from tilelang.target.machine import MAX_GRID

from ..analysis.effects import effects
from ..analysis.guards import conjuncts
from .check_bounds import is_bound
from ..framework.pass_ import TILE, PassContext, pass_

register("block-overwrite", ValueError, "blocks of a launch store different values in one element",
         "put the block's index into the index of the store, store in one block (`if bx == 0:`), or T.atomic_add, of a scalar "
         "in one thread: `if T.get_thread_binding() == 0:`",
         expected="one block that stores in an element")
register_warning("block-overwrite", "blocks of a launch, if there are several, store different values in one element")


@pass_(needs=TILE)
def check_blocks(func: Func, cx: PassContext) -> Func:
    """Raise "block-overwrite" for a store to a tensor whose value depends on a block's index and whose place does not.

    Changes nothing. Only stores that blocks reach whatever this index is, or for several values of it. A warning where the
    number of blocks is known only at run time. Blocks that all store one value are left alone, and so are atomics and launches
    whose blocks wait for each other: they may store one after another.
    """
    for launch in walk(func, Launch):
        moving = {v: n for v, n in zip(launch.block_vars, launch.grid) if not is_const(n, 1)}
        if moving and not any(c.op in ("thread_return", "call_extern") for c in walk(launch.body, Call)) and not any(
                map(_waits, walk(launch.body, While))):
            _Blocks(launch, moving)
            for v, n in moving.items():
                for pair in _pairs(launch.body, v, int(n.value) if isinstance(n, Const) else MAX_GRID[0]):
                    _Blocks(launch, {v: n}, pair)
    return func


def _pairs(body: Stmt, v: Var, blocks: int) -> list[tuple[int, int]]:
    """Numbers of two blocks that quotients, remainders, shifts and bounds of a block index may not tell from each other."""
    on, divisors, rests, bounds = {v}, {1}, {1}, set()
    for s in walk(body, Bind, Binary):
        if isinstance(s, Bind):
            on |= {s.var} if not on.isdisjoint(free_vars(s.value)) else set()
        elif isinstance(s.b, Const) and not s.b.dtype.is_float and s.b.value > 0 and not on.isdisjoint(free_vars(s.a)):
            k = int(s.b.value)
            match s.op:
                case "floordiv" | "truncdiv":
                    divisors.add(k)
                case "shr":
                    divisors.add(1 << min(k, 31))
                case "floormod" | "truncmod":
                    rests.add(k)
                case "bitand":
                    rests.add(k + 1)
                case "min":
                    bounds.add((k, k + 1))
                case "max":
                    bounds.add((0, 1))
    found = [(0, 1)] * (len(divisors) > 1) + [(0, d * m) for m in sorted(rests) for d in sorted(divisors) if m > 1]
    return [p for p in dict.fromkeys((*found, *sorted(bounds))) if p[1] < blocks][:_MOST_PAIRS]


_MOST_PAIRS = 6
_ASKS = ("atomic_load", "atomic_cas", "atomic_exchange")


def _waits(s: While) -> bool:
    """Whether a loop does nothing but read global memory or ask for a lock, until another block has stored there."""
    return all(x.buffer.scope() in PRIVATE for x in walk(s, Store)) and not contains(s, TileOp) and any(
        x.op in _ASKS if isinstance(x, Call) else x.buffer.scope_name == GLOBAL for x in walk(s, Call, Load))


def _folded(e: Binary) -> Expr | None:
    return binary(e.op, e.a, e.b) if isinstance(e.a, Const) and isinstance(e.b, Const) else None


class _Blocks:
    """Which block indices each variable and storage of a launch depends on, by fixpoint from "none".

    found: (store, storage, the indices that its place and the conditions around it depend on, value).
    pair: an expression depends on the one index only if it is not the same for these two values of it.
    """

    def __init__(self, launch: Launch, moving: dict[Var, Expr], pair: tuple[int, int] | None = None) -> None:
        self.every, self.pair = frozenset(moving), pair
        self.at: dict[Var, frozenset[Var]] = {}  # where tensors made of addresses begin
        self.on: dict[Var, frozenset[Var]] = {v: frozenset((v,)) for v in moving}
        self.found: dict[int, tuple[Stmt, Buffer, frozenset[Var], frozenset[Var]]] = {}
        while True:
            before = sum(map(len, self.on.values()))
            self.stmt(launch.body, frozenset(), Analyzer({v: (0, int(n.value) - 1 if isinstance(n, Const) else None)
                                                          for v, n in moving.items()}))
            if before == sum(map(len, self.on.values())) or all(where >= self.every for _, _, where, _ in self.found.values()):
                break
        for s, b, where, value in self.found.values():
            for v in (v for v in launch.block_vars if v in value - where):
                which = f"every `{v.name}`" if pair is None else f"`{v.name}` = {pair[0]} and {pair[1]}"
                text = f"blocks of {which} store in the same elements of `{b.name}`, and what they store depends on it"
                if not isinstance(moving[v], Const):
                    warn("block-overwrite", text, "put the block's index into the index of the store", s.span)
                else:
                    raise error("block-overwrite", text, found=f"{moving[v]} blocks along `{v.name}`", span=s.span)

    def of(self, *values: Any) -> frozenset[Var]:
        """The block indices that expressions depend on."""
        out: frozenset[Var] = frozenset()
        for e in values:
            for x in walk(self.common(e)) if isinstance(e, Expr) else ():
                if isinstance(x, Var):
                    out |= self.on.get(x, frozenset())
                elif isinstance(x, (Load, AddressOf)):
                    out |= self.held(x.buffer)
                elif isinstance(x, Call) and (x.op not in INTRINSICS or INTRINSICS[x.op].effect in (WRITES, SYNC)):
                    return self.every
        return out

    def common(self, e: Expr) -> Expr:
        """An expression, without the index of the pair where both blocks have the same."""
        one, other = self.of_both(e)
        return one if one is not None and alpha_equal(one, other) else e

    def of_both(self, e: Expr) -> tuple[Expr | None, Expr | None]:
        """An expression in the two blocks of the pair; None where it does not name their index."""
        if self.pair is None or self.every.isdisjoint(free_vars(e)):
            return None, None
        one, other = (Analyzer({}).simplify(rewrite(substitute(e, {v: const(n, v.dtype) for v in self.every}), _folded, Binary))
                      for n in self.pair)
        return one, other

    def held(self, b: Buffer) -> frozenset[Var]:
        return self.on.get(b.data, frozenset()) | self.of(*b.shape, *b.strides, b.offset)

    def put(self, v: Var, on: frozenset[Var]) -> None:
        if on:
            self.on[v] = self.on.get(v, frozenset()) | on

    def stmt(self, s: Stmt, around: frozenset[Var], a: Analyzer) -> None:
        """Follow a statement. around: what decides whether it runs. a: bounds of the block indices there."""
        match s:
            case Bind():
                if s.var.dtype.is_handle:
                    self.at[s.var] = self.of(s.value)
                return self.put(s.var, self.of(s.value))
            case Store():
                again = s.buffer.scope_name == GLOBAL and any(
                    x.buffer.data is s.buffer.data and not _disjoint(x.indices, s.indices) for x in walk(s.value, Load))
                return self.store(s, s.buffer, self.of(*s.indices), self.every if again else self.of(s.value), around, a)
            case TileOp():
                own = s.accesses()  # type: ignore[attr-defined]
                value = self.of(*(e for e in walk(s) if isinstance(e, Expr))).union(
                    *(self.held(x.region.buffer) for x in own if x.reads))
                for x in own:
                    if x.writes:
                        self.store(s, x.region.buffer, self.of(*x.region.mins, *x.region.extents), value, around, a, x.mode)
                return None
            case If():
                for part, holds in zip(inner(s), (True, False)):
                    self.branch(part, conjuncts(s.cond, holds), around, a)
                return None
            case For():
                self.put(s.var, self.of(s.start, s.extent))
                around |= self.of(s.start, s.extent)
            case While():
                around |= self.of(s.cond)
            case Parallel():
                around |= self.of(*s.extents)
            case Alloc() if s.init is not None:
                self.put(s.buffer.data, self.of(s.init))
            case Evaluate():
                for e in effects(s):
                    if e.writes:
                        self.put(e.storage, self.every)
        for x in inner(s):
            self.stmt(x, around, a)
        return None

    def branch(self, s: Stmt, conds: list[tuple[Expr, bool]], around: frozenset[Var], a: Analyzer) -> None:
        """Statements under conditions. Bounds of an index, as `bx < 2`, leave several blocks; others may leave one."""
        for c, holds in conds:
            if any(isinstance(x, Const) and bool(x.value) is not holds for x in self.of_both(c)):
                return  # one of the two blocks at most
            if self.pair is None and is_bound(c, holds) and free_vars(c) <= self.every:
                a = a.assuming(c, holds)
            else:
                around |= self.of(c)
        self.stmt(s, around, a)

    def store(self, s: Stmt, b: Buffer, place: frozenset[Var], value: frozenset[Var], around: frozenset[Var], a: Analyzer,
              mode: str = "write") -> None:
        self.put(b.data, place | value | around)
        one = {v for v in self.every if (ends := a.interval(v))[1] is not None and ends[1] <= (ends[0] or 0)}
        if b.scope_name == GLOBAL and mode != "atomic":
            where = self.at.get(b.data, frozenset()) | self.of(b.offset, *b.strides)
            self.found[id(s)] = s, b, place | where | around | one, value


def _disjoint(one: Any, other: Any) -> bool:
    """Whether two elements have different numbers in a dimension."""
    return any(isinstance(a, Const) and isinstance(b, Const) and a.value != b.value for a, b in zip(one, other))
