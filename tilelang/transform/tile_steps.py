"""What roles keep track of over the tiles of a block: how far their rings are, and tiles loaded once each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Expr, Launch, Stmt, Store, Var, binary, cast, const,
                         dtype, free_vars, load, with_attrs)
from tilelang.ops.tma import tma_bytes

from .persist import Tiles
from .rings import RoleLoop, barriers, do


class Steps:
    """The number of steps a ring has made before a tile, modulo twice its stages.

    base: that number, None while it is always zero.  begin: before the loop over tiles; bind: at the start of a tile;
    advance: at its end.
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
        count = Buffer("step_count", (1,), dtype("int32"), "local.var")
        zero = (const(0),)
        self.begin = [Alloc(count), Store(count, zero, const(0, "int32"))]
        self.bind.append(Bind(base, load(count, zero)))
        self.advance = [Store(count, zero, (load(count, zero) + made) % period)]


@dataclass
class WholeTile:
    """A copy in front of the loop that TMA does: one buffer, filled once a tile.

    late: the buffer is used after the loop, too.
    """

    copy: Any
    groups: int
    tiles: Tiles | None
    late: bool
    full: Buffer = field(init=False)
    empty: Buffer | None = field(init=False)

    def __post_init__(self) -> None:
        name = self.copy.dst.buffer.name
        self.full = barriers(f"{name}_full", (1,))
        self.empty = barriers(f"{name}_empty", (self.groups * 4,)) if self.tiles is not None else None

    @property
    def parity(self) -> Expr:
        return const(0, "uint32") if self.tiles is None else cast(self.tiles.index % 2, "uint32")

    def produce(self) -> list[Stmt]:
        """The producer's part."""
        first = const(0)
        out: list[Stmt] = []
        if self.empty is not None:
            out.append(do("mbarrier_wait", AddressOf(self.empty, (first,)), binary("bitxor", self.parity, const(1, "uint32"))))
        return [*out, do("mbarrier_arrive_expect_tx", AddressOf(self.full, (first,)), const(tma_bytes(self.copy), "uint32")),
                with_attrs(self.copy, tma=True, barrier=(self.full, first))]

    def filled(self) -> list[Stmt]:
        """In the consumers, in the place of the copy."""
        return [do("mbarrier_wait", AddressOf(self.full, (const(0),)), self.parity)]

    def release(self, r: RoleLoop) -> list[Stmt]:
        """In the consumers, after the last use."""
        return [] if self.empty is None else r.arrive(self.empty, const(0))


__all__ = ["Steps", "WholeTile"]
