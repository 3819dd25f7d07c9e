"""State that warp roles keep over the tiles and loops of a block: positions of their rings, and tiles that are loaded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Expr, For, If, Launch, Stmt, Store, Var, binary, cast, const,
                         convert, dtype, free_vars, load, seq, with_options, VARIABLE)
from tilelang.ir.record import record
from tilelang.ops import Gemm
from tilelang.ops.tma import tma_bytes

from .persistent import Tiles
from ..analysis.effects import effects
from ..analysis.statements import do
from .outer_loops import Counted, step_count
from .rings import GROUP, Ring, WarpRoleLoop, barriers


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


@record
class RingsOf:
    """The rings of a loop.  filled: the tile that an item of the loop fills."""

    loop: For
    stages: int
    rings: list[Ring]
    filled: Callable[[int], Buffer]

    def tiles(self, r: Ring) -> list[Buffer]:
        return [self.filled(i) for i in r.items]

    def bytes(self) -> int:
        return self.stages * sum(b.size * b.dtype.bits // 8 for r in self.rings for b in self.tiles(r))

    def kind(self, alike_too: bool) -> Any:
        """What is equal for loops that use one set of rings.  alike_too: also if they only use tiles of other names alike."""
        if not alike_too:
            return self.stages, frozenset(frozenset(self.tiles(r)) for r in self.rings)
        return self.stages, tuple(tuple(map(self._use, self.tiles(r))) for r in self.rings)

    def _use(self, b: Buffer) -> Any:
        """The shape of a tile and how GEMMs use it, from which its layout follows; the tile where others use it too."""
        nodes = [e.node for e in effects(self.loop.body) if e.storage is b.data and e.writes is False]
        gemms = [x for x in nodes if isinstance(x, Gemm)]
        if len(gemms) < len(nodes):
            return b
        return tuple(b.shape), str(b.dtype), frozenset((x.a.buffer is b, x.transpose_a, x.transpose_b, x.m, x.n, x.k)
                                                       for x in gemms)


def counted_loops(loops: Sequence[RingsOf], make: Callable[[int, Ring], None],
                  room: int) -> tuple[list[Counted], list[Stmt]]:
    """Makes the rings of all loops: (what counts the steps of each loop's rings, statements for the start of a warp role).

    Loops that fill the same tiles use one set of rings, one loop after another; each other loop has rings of its own, or,
    where these do not fit in `room` bytes, those of a loop with tiles alike.  make: allocates a ring of the loop of this
    number.
    """
    alike: dict[Any, list[int]] = {}
    for alike_too in (False, True):
        alike.clear()
        for n, x in enumerate(loops):
            alike.setdefault(x.kind(alike_too), []).append(n)
        if sum(loops[some[0]].bytes() for some in alike.values()) <= room:
            break
    counts: dict[int, Counted] = {}
    begin: list[Stmt] = []
    for some in alike.values():
        extents = {n: Analyzer().simplify(convert(loops[n].loop.extent)) for n in some}
        whole = all(isinstance(x, Const) and x.value % (2 * loops[n].stages) == 0 for n, x in extents.items())
        count = None if len(some) == 1 or whole else step_count()
        begin += [] if count is None else [Alloc(count), Store(count, (const(0),), const(0, "int32"))]
        first = loops[some[0]]
        for n in some:
            counts[n] = Counted(extents[n], first.stages, count)
            by_tiles = loops[n].kind(False) == first.kind(False)
            for k, r in enumerate(loops[n].rings):
                tiles = loops[n].tiles(r)
                if n == some[0]:
                    make(n, r)
                    continue
                same = next(x for x in first.rings if set(first.tiles(x)) == set(tiles)) if by_tiles else first.rings[k]
                r.full, r.empty = same.full, same.empty
                r.buffers.update({b: same.buffers[b if by_tiles else like] for b, like in zip(tiles, first.tiles(same))})
    return [counts[n] for n in range(len(loops))], begin


__all__ = ["Handover", "RingsOf", "Steps", "WholeTile", "counted_loops"]
