"""State that warp roles keep over the tiles of a block: the position of their rings, and tiles that are loaded once each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Expr, If, Launch, Stmt, Store, Var, binary, cast, const,
                         convert, dtype, free_vars, load, seq, with_options, VARIABLE)
from tilelang.ops.tma import tma_bytes

from .persistent import Tiles
from ..analysis.statements import do
from .outer_loops import Counted
from .rings import GROUP, WarpRoleLoop, barriers


class Steps:
    """Counts the steps that a ring has made before a tile, modulo twice its stages.

    base: that number; None if it is always zero.  begin, bind, advance: statements before the loop over tiles, at the start
    of a tile and at its end.
    """

    def __init__(self, tiles: Tiles, extent: Expr, stages: int, launch: Launch, inside: set[Var]) -> None:
        self.begin: list[Stmt] = []
        self.bind: list[Stmt] = []
        self.advance: list[Stmt] = []
        self.base: Expr | None = None
        period = 2 * stages
        own = free_vars(extent) & (set(launch.block_vars) | inside)
        if isinstance(extent, Const) and extent.value % period == 0:
            return
        base = Var("steps", dtype("int32"))
        self.base = base
        made = cast(binary("max", extent, const(0, extent.dtype)), "int32") % period
        if not own:
            self.bind.append(Bind(base, tiles.index % period * made % period))
            return
        count = Buffer("step_count", (1,), dtype("int32"), VARIABLE)
        zero = (const(0),)
        self.begin = [Alloc(count), Store(count, zero, const(0, "int32"))]
        self.bind.append(Bind(base, load(count, zero)))
        self.advance = [Store(count, zero, (load(count, zero) + made) % period)]


class Handover:
    """Orders the loads of a pipelined loop behind what the consumers did before it, where tiles that are used around the loop
    share bytes with its rings.

    Each warp of the consumers arrives at `drained` in front of the loop, and the producer waits for that before it loads:
    it does not prefetch beyond the loop.  Runs of the loop without iterations do not count.

    count: of the loop's runs, by the producer.  awaited, ready: the statements of the producer and of the consumers.
    """

    about = "; the loads wait for the consumers to reach the loop: other tiles use the bytes of the stages"

    def __init__(self, r: WarpRoleLoop) -> None:
        extent = convert(r.loop.extent)
        self.drained = barriers("drained", (r.groups * 4,))
        self.count = Counted(binary("min", extent, const(1, extent.dtype)), 1)
        at, number = AddressOf(self.drained, (const(0),)), self.count.base
        assert number is not None
        self.awaited: list[Stmt] = [do("mbarrier_wait", at, cast(number, "uint32"))]
        self.ready: list[Stmt] = [do("fence_proxy_async"), do("sync_warp"), If(r.leader(), do("mbarrier_arrive", at))]
        if not isinstance(extent, Const) or extent.value <= 0:
            some = binary("gt", extent, const(0, extent.dtype))
            self.awaited, self.ready = [If(some, seq(*self.awaited))], [If(some, seq(*self.ready))]


@dataclass
class WholeTile:
    """A copy in front of the main loop that TMA does: one buffer, filled once per tile.

    copies: the copy, or one copy for each consumer warp group if a group uses only its own rows: a group that is ahead can
    then start its next tile while the others finish theirs.  late: the buffer is also used after the loop.
    """

    copies: list[Any]
    groups: int
    thread: Var
    tiles: Tiles | None
    late: bool
    full: Buffer = field(init=False)
    empty: Buffer | None = field(init=False)

    def __post_init__(self) -> None:
        name, parts = self.copies[0].dst.buffer.name, len(self.copies)
        self.full = barriers(f"{name}_full", (1,) * parts)
        self.empty = None if self.tiles is None else barriers(f"{name}_empty", (self.groups * 4 // parts,) * parts)

    @property
    def parity(self) -> Expr:
        return const(0, "uint32") if self.tiles is None else cast(self.tiles.index % 2, "uint32")

    def produce(self) -> list[Stmt]:
        """The producer's code."""
        out: list[Stmt] = []
        for g, op in enumerate(self.copies):
            full = AddressOf(self.full, (const(g),))
            if self.empty is not None:
                out.append(do("mbarrier_wait", AddressOf(self.empty, (const(g),)),
                              binary("bitxor", self.parity, const(1, "uint32"))))
            out.append(do("mbarrier_arrive_expect_tx", full, const(tma_bytes(op) // len(self.copies), "uint32")))
            out.append(with_options(op, tma=True, barrier=(self.full, const(g))))
        return out

    def filled(self) -> list[Stmt]:
        """The consumers' code in place of the copy: the wait for it."""
        return self._each(lambda g: do("mbarrier_wait", AddressOf(self.full, (const(g),)), self.parity))

    def release(self, r: WarpRoleLoop) -> list[Stmt]:
        """The consumers' code after the last use of the buffer."""
        empty = self.empty
        if empty is None:
            return []
        return [*r.read_out({self.copies[0].dst.buffer}), do("sync_warp"), If(r.leader(), seq(*self._each(
            lambda g: do("mbarrier_arrive", AddressOf(empty, (const(g),))))))]

    def _each(self, work: Callable[[int], Stmt]) -> list[Stmt]:
        """`work(g)`, run by warp group g if each group has its own copy; else `work(0)` for all groups."""
        if len(self.copies) == 1:
            return [work(0)]
        group = self.thread // GROUP
        return [If(binary("eq", group, const(g, group.dtype)), work(g)) for g in range(len(self.copies))]


__all__ = ["Steps", "WholeTile"]
