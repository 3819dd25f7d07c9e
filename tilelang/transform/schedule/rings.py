"""Defines the rings of stages between the producer warp group and the consumers, and the pipelined loop that uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Bind, Break, Buffer, BufferFacts, Const, Expr, For, If, Launch, Load, Node,
                         Region, Stmt, Store, Var, binary, call, cast, const, convert, dtype, free_vars, fresh, is_const, load,
                         logical, replace, rewrite, seq, with_options, BARRIER, GLOBAL, STATIC, VARIABLE)
from tilelang.ir.record import state
from tilelang.ops import Copy, Gemm
from tilelang.ops.tma import tma_bytes
from tilelang.target.machine import REGISTERS_PER_SM, WARP_ROLE_REGISTERS

from ..analysis.loop_items import LoopOrder
from ..analysis.effects import effects
from ..analysis.pipeline_loops import Body, Item
from ..analysis.statements import do, rename
from ..framework.pass_ import PassContext
from .persistent import ClusterMap, Tiles

GROUP = 128  # threads of a warp group


@state
class Ring:
    """A ring of stages and the copies that fill it.

    items: the copies, as indices into the loop's items.  first, last: the consumers' items that use them first and last.
    cluster_map: the cluster whose blocks fill each other's stages; None if each block fills its own.  common: copy whose tile
    several blocks load together -> dimensions of the grid along which the tile is the same.  inside: Tiles.inside.
    """

    items: list[int]
    first: int
    last: int
    buffers: dict[Buffer, Buffer] = field(default_factory=dict)  # user's buffer -> buffer with one version per stage
    full: Buffer | None = None
    empty: Buffer | None = None
    cluster_map: ClusterMap | None = None
    common: dict[int, frozenset[int]] = field(default_factory=dict)
    inside: tuple[tuple[int, Expr], ...] = ()

    def needed(self, item: int) -> list[Expr]:
        """Conditions for a load: a block outside the grid loads its piece of tiles that others need, and none of its own.

        TMA fills what lies outside with zeros, slower than it loads: 128x256 at 872x632x1408 TN took 1,530 cycles a stage.
        """
        return [x for k, x in self.inside if k not in self.common.get(item, ())]

    def cluster_split(self, item: int) -> tuple[Expr, int, Expr] | None:
        """How the blocks of a cluster load a copy's tile together; None if they do not.

        (index of a block among those that load it, their number, mask of their ranks).
        """
        same = self.common.get(item)
        if self.cluster_map is None or same is None:
            return None
        return self.cluster_map.sharer(same), len(self.cluster_map.sharers(same)), cast(self.cluster_map.mask(same), "uint16")

    def bytes(self, items: list[Item]) -> int:
        return sum(tma_bytes(items[i].stmt) for i in self.items)


@state
class WarpRoleLoop:
    """A pipelined loop that is divided between producer and consumers.

    groups: number of consumer warp groups.  thread: index of a thread in the block.  base: steps that the loop's rings have
    made before its first iteration, modulo twice the stages; None for zero.  repeated: the loop runs once for each tile of a
    block and must release all stages before it ends.  made: storage of operands that the threads make -> its versions.
    lasting: a tile that is the same in several iterations from the first one -> their number.  It is loaded once for them.
    overlap: text for the report, set when the consumers' schedule has been made.  order: the chosen order of the consumers'
    statements; None until it is asked for, False where another schedule is taken.  beside: blocks that an SM runs at once.
    """

    launch: Launch
    loop: For
    body: Body
    rings: list[Ring]
    groups: int
    stages: int
    thread: Var
    cx: PassContext
    base: Expr | None = None
    repeated: bool = False
    made: Mapping[Var, int] = field(default_factory=dict)
    lasting: dict[Buffer, int] = field(default_factory=dict)
    overlap: str = ""
    order: LoopOrder | Literal[False] | None = None
    beside: int = 1

    def tiles(self, ring: Ring) -> list[Buffer]:
        """The tiles that a ring's copies fill."""
        return [self.body.items[i].stmt.dst.buffer for i in ring.items]  # type: ignore[attr-defined]

    @property
    def filled(self) -> set[Buffer]:
        """The tiles that the producer fills."""
        return {b for r in self.rings for b in self.tiles(r)}

    def kind_of_rings(self, alike_too: bool) -> Any:
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

    @property
    def loads(self) -> set[int]:
        """Indices of the items that the producer runs."""
        return {i for r in self.rings for i in r.items}

    @property
    def versions(self) -> dict[Buffer, Buffer]:
        return {b: v for r in self.rings for b, v in r.buffers.items()}

    def done(self, k: Expr) -> Expr:
        """The number of iterations before iteration k."""
        return k if is_const(self.loop.start, 0) else k - self.loop.start

    def step(self, k: Expr) -> Expr:
        """How many stages the rings have filled before that of iteration k (modulo twice the stages)."""
        return self.done(k) if self.base is None else self.base + self.done(k)

    def reads(self, b: Buffer, k: Expr, last: bool) -> Expr | None:
        """Whether iteration k is the first, or the last, that reads a version of a lasting tile; None for another tile."""
        if b not in self.lasting:
            return None
        at, extent = self.done(k) % self.lasting[b], Analyzer().simplify(convert(self.loop.extent))
        here = binary("eq", at, const(self.lasting[b] - 1 if last else 0, at.dtype))
        if not last or isinstance(extent, Const) and extent.value % self.lasting[b] == 0:
            return here
        return logical("or", here, binary("eq", k, convert(self.loop.start) + extent - 1))

    def select(self, s: Any, k: Expr) -> Any:
        """What iteration k does, with every access of a tile redirected to its version."""
        for n in {0: 0, **dict.fromkeys(self.lasting.values())}:
            some = {b: v for b, v in self.versions.items() if self.lasting.get(b, 0) == n}
            s = select_version(s, some, self.done(k) // n if n else self.step(k))
        return s

    def slot(self, k: Expr) -> tuple[Expr, Expr]:
        """(stage, parity of its mbarrier phase) of iteration k."""
        step = self.step(k)
        return step % self.stages, cast(step // self.stages % 2, "uint32")

    def release(self, ring: Ring, k: Expr, ordered: bool = False) -> list[Stmt]:
        """Releases the stage of iteration k: a warp arrives once all its threads have read it.  ordered: behind `read_out`."""
        return [*(() if ordered else self.read_out(ring.buffers, k)), do("sync_warp"), self.released(ring, self.slot(k)[0])]

    def release_after_wait(self, ring: Ring, slot: Expr, when: Expr) -> list[Stmt]:
        """Releases a stage behind a wait for wgmma under a condition.  The wait has ordered the warps of the group; only loads
        by threads need more."""
        own = self.read_out(ring.buffers)
        return [*own, *([do("sync_warp")] if own else ()), self.released(ring, slot, when)]

    @cached_property
    def outside(self) -> Counter[Var]:
        """By storage: the accesses of the launch before or after the loop."""
        whole, inside = (Counter(e.storage for e in effects(s)) for s in (self.launch.body, self.loop))
        return whole - inside

    def read_out(self, tiles: Iterable[Buffer], k: Expr | None = None) -> list[Stmt]:
        """What has to precede an arrival that releases tiles, in iteration k: it orders a thread's own loads in front of it.

        An arrival does not wait for loads in flight, and the next copy into the tile goes through another proxy.  Seen on an
        H200: when wgmma used the full bandwidth of shared memory, the copy overtook the loads in a third of the launches.
        """
        read = {e.storage for e in effects(self.launch.body) if not isinstance(e.node, (Copy, Gemm)) or e.storage is (
            e.node.src if isinstance(e.node, Copy) else getattr(e.node, "metadata", e.node.c)).buffer.data}
        ends = [None if k is None else self.reads(b, k, True) for b in tiles if b.data in read]
        return [do("fence_proxy_async")] if None in ends else [If(e, do("fence_proxy_async")) for e in ends if e is not None]

    def released(self, ring: Ring, slot: Expr, when: Expr | None = None) -> Stmt:
        """The arrival of a warp whose threads have all reached this point.  when: a condition for the arrival."""
        assert ring.empty is not None
        bar = AddressOf(ring.empty, (slot,))
        if ring.cluster_map is None:
            cond, arrive = self.leader(), do("mbarrier_arrive", bar)
        else:
            # One thread arrives at each block that fills a piece of the stage, this block included.  A stage is full again
            # only after all these blocks have seen its release, so an arrival never counts for an earlier phase.
            lane, (count, mask) = self.thread % 32, ring.cluster_map.peers(ring.common.values())
            rank = cast(lane, "uint32")
            cond = binary("lt", lane, const(count, lane.dtype)) if mask is None else binary(
                "ne", binary("bitand", binary("shr", mask, rank), const(1, "uint32")), const(0, "uint32"))
            arrive = do("mbarrier_arrive_remote", bar, rank)
        return If(cond if when is None else logical("and", when, cond), arrive)

    def leader(self) -> Expr:
        """Condition that selects one thread of each warp."""
        return binary("eq", self.thread % 32, const(0, self.thread.dtype))


def select_version(s: Any, versions: dict[Buffer, Buffer], iteration: Any) -> Any:
    """s with every access of a versioned buffer redirected to slot `iteration` mod its number of versions."""
    if not versions:
        return s

    def fn(x: Node) -> Node | None:
        b = getattr(x, "buffer", None)
        new = versions.get(b) if isinstance(b, Buffer) else None
        if new is None:
            return None
        slot = iteration % new.shape[0] if isinstance(iteration, Expr) else const(iteration % new.shape[0])
        match x:
            case Load():
                return load(new, (slot, *x.indices), span=x.span)
            case Store() | AddressOf():
                return replace(x, buffer=new, indices=(slot, *x.indices))
        return Region(new, (slot, *x.mins), (1, *x.extents), span=x.span)  # type: ignore[attr-defined]

    return rewrite(s, fn, Load, Store, AddressOf, Region)


def barriers(name: str, counts: tuple[int, ...]) -> Buffer:
    """A buffer of mbarriers with these arrival counts."""
    return Buffer(name, (len(counts),), dtype("uint64"), BARRIER, facts=BufferFacts(arrive=counts))


def pin(b: Buffer, op: str = "wgmma_pin") -> Stmt:
    """Statement wgmma_pin, or wgmma_hold, of a fragment."""
    return do(op, AddressOf(b, (const(0),) * b.ndim))


def registers_by_warp_role(launch: Launch, groups: int) -> tuple[int, int] | None:
    """(producer's, consumers') registers per thread, where they differ: as the program requests, or the default.

    What does not fit the registers of the launch is not taken: a setmaxnreg that raises the count waits for free registers, and
    would then wait for ever.
    """
    default = WARP_ROLE_REGISTERS.get(groups)
    if default is None:
        return None
    producer, consumer = int(launch.plan.producer_registers or default[0]), int(launch.plan.consumer_registers or default[1])
    whole = REGISTERS_PER_SM // (GROUP * (groups + 1)) // 8 * 8
    fits = producer + groups * consumer <= (groups + 1) * whole and producer <= whole <= consumer
    return (producer, consumer) if fits else default


class Counted:
    """Counts the steps that a ring has made before the loop, modulo twice its stages.  Each warp role counts for itself.

    base: that number; None if it is always zero.  begin, bind, advance: statements for the start of a warp role, before the
    loop and after it.  count: where it is kept; other loops on the same ring share it, and the first of them sets it to zero.
    """

    def __init__(self, extent: Expr, stages: int, count: Buffer | None = None) -> None:
        self.begin: list[Stmt] = []
        self.bind: list[Stmt] = []
        self.advance: list[Stmt] = []
        self.base: Var | None = None
        period = 2 * stages
        if count is None and isinstance(extent, Const) and extent.value % period == 0:
            return
        base, zero = Var("steps", dtype("int32")), (const(0),)
        first, count = count is None, step_count() if count is None else count
        made = cast(binary("max", extent, const(0, extent.dtype)) % period, "int32")
        self.base = base
        self.begin = [Alloc(count), Store(count, zero, const(0, "int32"))] if first else []
        self.bind = [Bind(base, load(count, zero))]
        self.advance = [Store(count, zero, (base + made) % period)]


def step_count() -> Buffer:
    """A scalar that counts the steps of a ring."""
    return Buffer("step_count", (1,), dtype("int32"), VARIABLE)


def counted_tiles(tiles: Tiles, extent: Expr, stages: int, own: set[Var]) -> Counted:
    """The same for a loop that each tile of a block runs: begin stands before the loop over tiles, bind and advance in it.

    own: the variables that differ between tiles.  Where the tiles have as many steps each, their number is enough.
    """
    out = Counted(extent, stages)
    if out.base is not None and not free_vars(extent) & own:
        period = 2 * stages
        made = cast(binary("max", extent, const(0, extent.dtype)), "int32") % period
        out.begin, out.bind, out.advance = [], [Bind(out.base, tiles.index % period * made % period)], []
    return out


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


class TakenTiles:
    """Tiles that blocks take from a counter in global memory: the producer, under the tile before, those that have work.

    tiles: the loop over a block's tiles.  total: their number in the grid.  at: the launch's block variables for the number of
    a tile.  some: bindings and a condition, both in terms of these, that holds for tiles with work; None: all have some.
    """

    def __init__(self, r: WarpRoleLoop, tiles: Tiles, total: int, at: Callable[[Expr], list[Stmt]],
                 some: tuple[list[Bind], Expr] | None) -> None:
        self.leader, self.tiles, self.total, self.at, self.some = r.leader(), tiles, total, at, some
        self.counter = Buffer("tiles_taken", (1,), dtype("int32"), GLOBAL, facts=BufferFacts(ordered=True, zeroed=True))
        self.slots = Buffer("taken", (2,), dtype("int32"), STATIC, facts=BufferFacts(ordered=True, numbers=total))
        self.full, self.empty = barriers("taken_full", (1,)), barriers("taken_empty", (r.groups * 4,))

    def begin(self, loads: bool) -> list[Stmt]:
        """The start of a tile in the producer (loads), or in the consumers."""
        slot, parity = self.tiles.index % 2, cast(self.tiles.index % 2, "uint32")
        tile, old, full, empty = Var("tile", dtype("int32")), Var("next_tile", dtype("int32")), *(
            AddressOf(b, (const(0),)) for b in (self.full, self.empty))
        got, end = Bind(tile, load(self.slots, (slot,))), If(binary("ge", tile, const(self.total, "int32")), Break())
        if not loads:
            return [do("mbarrier_wait", full, parity), got, do("sync_warp"), If(self.leader, do("mbarrier_arrive", empty)),
                    end, *self.at(tile)]
        take: list[Stmt] = [Bind(old, call("atomic_add", (AddressOf(self.counter, (const(0),)), const(1, "int32")), "int32")),
                            Store(self.slots, (slot,), old)]
        if self.some is not None:
            take = rename([For(fresh("try", dtype("int32")), const(0), const(self.total + 1), "serial", seq(
                *take, got, end, *self.at(tile), *self.some[0], If(self.some[1], Break())))])
        return [do("mbarrier_wait", empty, binary("bitxor", parity, const(1, "uint32"))), *take, do("mbarrier_arrive", full),
                got, end, *self.at(tile)]


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
        self.parity: Expr = const(0, "uint32") if self.tiles is None else cast(self.tiles.index % 2, "uint32")
        self.empty = None if self.tiles is None else barriers(f"{name}_empty", (self.groups * 4 // parts,) * parts)

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


def counted_loops(loops: Sequence[WarpRoleLoop], make: Callable[[int, Ring], None],
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
            alike.setdefault(x.kind_of_rings(alike_too), []).append(n)
        firsts = [loops[some[0]] for some in alike.values()]
        if sum(b.bits // 8 * x.stages for x in firsts for r in x.rings for b in x.tiles(r)) <= room:
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
            by_tiles = loops[n].kind_of_rings(False) == first.kind_of_rings(False)
            for k, r in enumerate(loops[n].rings):
                tiles = loops[n].tiles(r)
                if n == some[0]:
                    make(n, r)
                    continue
                same = next(x for x in first.rings if set(first.tiles(x)) == set(tiles)) if by_tiles else first.rings[k]
                r.full, r.empty = same.full, same.empty
                r.buffers.update({b: same.buffers[b if by_tiles else like] for b, like in zip(tiles, first.tiles(same))})
    return [counts[n] for n in range(len(loops))], begin
