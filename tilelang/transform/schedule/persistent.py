"""Chooses which tiles a block of a persistent launch computes, in which order, and in which clusters.

    launch grid (gx, gy), bx, by:  body      ->      launch grid (min(P, gx * gy),), block:
                                                         for i in serial(ceil((gx * gy - block) / P)):
                                                             t = block + i * P;  bx, by = position of tile t;  body

The blocks of a grid do not depend on each other, so any order is correct.  The order is chosen for reuse in L2: tiles that
run at the same time have loads in common.  If the work of a tile grows or falls with a block variable, the longest come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from math import inf, prod
from operator import add, mul
from typing import Any

import numpy as np

from tilelang.arith import Analyzer
from tilelang.ir import (Bind, Const, Expr, For, Launch, LoopPlan, Select, Stmt, Var, binary, cast, const,
                         convert, dtype, free_vars, replace, seq, substitute)
from tilelang.ir.record import record
from tilelang.target.machine import MAX_GRID, kernel_rates
from tilelang.target.tile_order import tile_order

from ..analysis.cluster_pairs import (Load, at_once, gain_for_many, larger_in_one_wave, pays_for_many, pays_in_one_wave,
                                      saved_in_one_wave)
from ..analysis.effects import may_wait
from ..framework.config import PassConfigKey
from ..framework.pass_ import PassContext

TILE_START = 1.5  # cost of starting and ending a tile, in iterations
L2_FRACTION = 32 << 20  # bytes of L2 for the data that tiles running at the same time have in common
_SAMPLE = 4096  # replaces extents known only at run time when an order is chosen
SLACK = 1.005  # a partition that is less even by at most this factor is taken if its groups are wider (more reuse in L2)


@record
class ClusterMap:
    """Blocks that compute neighbouring tiles and load each tile they have in common once.

        spans (4, 2): a cluster of 8 blocks, rank = x + 4 * y        tile of A (by)        tile of B (bx)
            y = 1    4  5  6  7                                      by 4 .. 7 for all     by 1 and 5 for both
            y = 0    0  1  2  3                                      by 0 .. 3             …

    A load that does not depend on some dimensions of the grid is the same for all blocks of the cluster that differ only in
    these dimensions.  Each of them loads a piece of the tile and multicasts it to all (by a mask of ranks).  So several blocks
    fill a stage of a block, and its consumers release the stage to each of these blocks.

    spans: number of blocks of a cluster along each dimension of the grid.  ranks: index of a block along each of them.
    """

    spans: tuple[int, ...]
    ranks: tuple[Expr, ...]

    @property
    def size(self) -> int:
        """Number of blocks in a cluster."""
        return prod(self.spans)

    @property
    def wide(self) -> frozenset[int]:
        """Dimensions along which a cluster has several blocks."""
        return frozenset(k for k, n in enumerate(self.spans) if n > 1)

    def stride(self, dim: int) -> int:
        """The difference between the ranks of neighbours along a dimension."""
        return prod(self.spans[:dim])

    def sharers(self, dims: frozenset[int]) -> frozenset[int]:
        """Ranks of the blocks that differ from block 0 along these dimensions alone (block 0 included)."""
        steps = [range(n) if k in dims else (0,) for k, n in enumerate(self.spans)]
        return frozenset(sum(i * self.stride(k) for k, i in enumerate(at)) for at in product(*steps))

    def sharer(self, dims: frozenset[int]) -> Expr:
        """The index of a block among the blocks that share its load along these dimensions."""
        wide = sorted(dims & self.wide)
        return self._weighted({k: prod(self.spans[d] for d in wide if d < k) for k in wide})

    def _weighted(self, times: Mapping[int, int]) -> Expr:
        """The sum of a block's indices along some dimensions, each so many times."""
        terms = [self.ranks[k] if n == 1 else self.ranks[k] * n for k, n in times.items()]
        return reduce(add, terms) if terms else const(0)

    def mask(self, dims: frozenset[int]) -> Expr:
        """uint32 mask of the blocks that share a block's load along these dimensions, the block itself included."""
        pattern = const(sum(1 << r for r in self.sharers(dims)), "uint32")
        rest = {k: self.stride(k) for k in sorted(self.wide - dims)}
        return binary("shl", pattern, cast(self._weighted(rest), "uint32")) if rest else pattern

    def peers(self, shared: Iterable[frozenset[int]]) -> tuple[int, Expr | None]:
        """(number of blocks that share at least one of these loads with a block, itself included; their mask).

        shared: for each load, the dimensions along which it is the same.  The mask is None if it holds the whole cluster.
        """
        kinds = sorted({dims & self.wide for dims in shared}, key=sorted)
        kinds = [d for d in kinds if not any(d < other for other in kinds)]
        some = frozenset[int]().union({0}, *map(self.sharers, kinds))
        if len(some) == self.size:
            return self.size, None
        return len(some), reduce(partial(binary, "bitor"), map(self.mask, kinds or [frozenset[int]()]))


def make_cluster(spans: tuple[int, ...], rank: Expr) -> tuple[ClusterMap, list[Bind]]:
    """The cluster with these spans, and the bindings that compute a block's index along each dimension from its rank."""
    wide, rest = [k for k, n in enumerate(spans) if n > 1], rank
    binds: list[Bind] = []
    ranks: list[Expr] = [const(0)] * len(spans)
    for k in wide:
        ranks[k], rest = rest if k == wide[-1] else rest % spans[k], rest // spans[k]
        if len(wide) > 1:
            binds.append(_bound(f"rank_{'xyz'[k]}", ranks[k]))
            ranks[k] = binds[-1].var
    return ClusterMap(spans, tuple(ranks)), binds


@record
class TilePartition:
    """A static work partition: rows x columns tiles in groups of `width` columns, for `blocks` blocks.

    Tiles are named (row, column); those of row 0 are the longest.  The tiles of a group fit L2 together.  They are given to the
    blocks in passes of alternating direction, so that a block that gets the longest tile of one pass gets the shortest of the
    next:

        pass 0:  block 0 1 2 3       the tiles of a group, in order
        pass 1:  block 3 2 1 0
        pass 2:  block 0 1           the last pass of a group may be incomplete
    """

    rows: int
    columns: int
    width: int
    blocks: int

    @property
    def widths(self) -> tuple[int, int]:
        """(number of groups of full width, columns of the narrower last group; 0 if there is none)."""
        return divmod(self.columns, self.width)

    def count(self, block: Expr) -> Expr:
        """How many tiles a block computes."""
        groups, rest = self.widths
        out = self._tiles_in_group(block, self.width) * groups
        return out + self._tiles_in_group(block, rest) if rest else out

    def place(self, block: Expr, index: Expr) -> tuple[Expr, Expr]:
        """(row, column) of tile number `index` of a block."""
        each, (groups, rest) = self._tiles_in_group(block, self.width), self.widths
        last = const(groups - (0 if rest else 1), "int32")
        group = binary("min", index // each, last)
        wave = index - group * each
        back = binary("eq", wave % 2, const(1, "int32"))
        inside = wave * self.blocks + Select(back, (self.blocks - 1) - block, block, block.dtype, False)
        width: Expr = const(self.width, "int32")
        if rest:
            width = Select(binary("eq", group, last), const(rest, "int32"), width, width.dtype, False)
        row = binary("min", inside // width, const(self.rows - 1, "int32"))
        return row, group * self.width + inside % width

    def _tiles_in_group(self, block: Expr, width: int) -> Expr:
        """How many tiles a block gets in a group of this width (one per pass that reaches it)."""
        full, more = divmod(self.rows * width, self.blocks)
        if not more:
            return const(full, "int32")
        place = (self.blocks - 1) - block if full % 2 else block
        return cast(binary("lt", place, const(more, "int32")), "int32") + full

    def unevenness(self, lengths: Sequence[float]) -> float:
        """The work of the busiest block divided by the average.  lengths: length of a tile of each row."""
        work = np.zeros(self.blocks)
        for times, width in ((self.widths[0], self.width), (1, self.widths[1])):
            wave, p = np.divmod(np.arange(self.rows * width), self.blocks)
            block = np.where(wave % 2 == 1, self.blocks - 1 - p, p)
            work += times * np.bincount(block, np.repeat(np.asarray(lengths, float), width), self.blocks)
        return float(work.max() * self.blocks / max(work.sum(), 1e-9))


def schedule_tiles(lengths: Sequence[float], columns: int, blocks: int, width: int) -> TilePartition | None:
    """The most even partition with groups of about `width` columns; None if no block gets more than one tile.

    lengths: length of a tile of each row, the longest first.
    """
    rows = len(lengths)
    if rows * columns <= blocks:
        return None
    most = min(width, columns)
    found = [(d.unevenness(lengths), d) for d in (TilePartition(rows, columns, w, blocks)
                                                  for w in range(max(1, most // 2), most + 1))
             if rows * d.width >= blocks]
    if not found:
        return None
    best = min(x for x, _ in found)
    return max((d for x, d in found if x <= best * SLACK), key=lambda d: d.width)


@record
class OpenPartition:
    """A partition like TilePartition, of a grid whose size each call gives.

    Blocks of every second group come in the opposite order, so that what one group gives a block too much, the next one takes
    off.  Groups have a whole pass at least.  All numbers are int32, not negative; quotients are unsigned, and few, because a
    block starts with them: a grid of one wave has one division by a number that is not known here.
    """

    rows: Var
    columns: Var
    width: Var
    full: Var  # groups of full width
    blocks: int
    block: Expr
    each: tuple[Var, Var]  # tiles of the block in a group, and in the next one

    @staticmethod
    def of(grid: tuple[Expr, Expr], groups: Callable[[Expr], Expr], blocks: int,
           block: Expr) -> tuple[OpenPartition, list[Bind]]:
        """The partition of (rows, columns) in groups(columns) groups, or as many as blocks need; bindings of what is the same
        for all tiles of a block."""
        rows, columns = (_bound(name, n) for name, n in zip(("rows", "columns"), grid))
        r, c, one = rows.var, columns.var, const(1, "int32")
        number = _bound("groups", binary("max", one, binary("min", groups(c), _quotient(r * c, const(blocks)))))
        alone = binary("eq", number.var, one)
        width = _bound("width", Select(alone, c, _quotient(c + (number.var - 1), number.var), c.dtype, True))
        full = _bound("full", Select(alone, one, _quotient(c, width.var), c.dtype, True))
        whole = _bound("tiles", r * width.var)
        passes = _bound("passes", _quotient(whole.var, const(blocks)))
        each = [_bound(name, _in_passes(place, whole.var, passes.var, blocks))
                for name, place in (("each", block), ("each_next", (blocks - 1) - block))]
        made = OpenPartition(r, c, width.var, full.var, blocks, block, (each[0].var, each[1].var))
        return made, [rows, columns, number, width, full, whole, passes, *each]

    @property
    def count(self) -> Expr:
        """How many tiles the block computes."""
        rest = self.rows * (self.columns - self.full * self.width)
        last = _in_passes(_mirrored(self.full, self.block, self.blocks), rest, _quotient(rest, const(self.blocks)), self.blocks)
        return self.each[0] * ((self.full + 1) >> 1) + self.each[1] * (self.full >> 1) + last

    def place(self, index: Expr) -> tuple[list[Bind], Expr, Expr]:
        """(bindings, row, column) of tile number `index` of the block."""
        both = self.each[0] + self.each[1]
        pair = _bound("pair", Select(binary("lt", index, self.each[0]), const(0, "int32"), _quotient(index, both), index.dtype,
                                     True))
        inside = _bound("in_pair", index - pair.var * both)
        late = _bound("late", cast(binary("ge", inside.var, self.each[0]), "int32"))
        first = _bound("first_column", (pair.var * 2 + late.var) * self.width)
        wave = _bound("wave", inside.var - late.var * self.each[0])
        tile = _bound("in_group", wave.var * self.blocks + _mirrored(wave.var + late.var, self.block, self.blocks))
        width = _bound("group_width", binary("max", const(1), binary("min", self.width, self.columns - first.var)))
        row = _bound("row_of_tiles", binary("min", _quotient(tile.var, width.var), self.rows - 1))
        beside = binary("min", first.var + (tile.var - row.var * width.var), self.columns - 1)
        return [pair, inside, late, first, wave, tile, width, row], row.var, beside


def _in_passes(place: Expr, tiles: Expr, full: Expr, blocks: int) -> Expr:
    """How many of these tiles the block at a place gets, in so many full passes of alternating direction and one more."""
    return full + cast(binary("lt", _mirrored(full, place, blocks), tiles - full * blocks), "int32")


def _mirrored(number: Expr, place: Expr, blocks: int) -> Expr:
    """A place, counted from the other end where a number is odd."""
    return Select(binary("eq", number % 2, const(1, "int32")), (blocks - 1) - place, place, place.dtype, False)


def _quotient(a: Expr, b: Expr) -> Expr:
    """The quotient of two int32 that are not negative."""
    return cast(cast(a, "uint32") // cast(b, "uint32"), "int32")


@record
class Work:
    """The properties that decide the tile order and the clusters of a launch.

    loads: ((bytes of an iteration, index expressions of the source), …).  extent: of the main loop, in terms of the block
    variables.  padded: blocks outside the grid may run, because everything but their loads of tiles can be left out.
    """

    loads: tuple[tuple[int, tuple[Expr, ...]], ...]
    extent: Expr
    block_vars: tuple[Var, ...]
    cycles: float = 0  # MMA cycles of an iteration; 0 if unknown
    rows: tuple[tuple[int, bool], ...] = ()  # of each load's source: see cluster_pairs.rows_of
    padded: bool = False


@record
class Tiles:
    """The tile scheduler of a launch: how its tiles are distributed over fewer blocks.

    grid: number of blocks.  block: index of a block.  index, count: variable and extent of the loop over a block's tiles.
    before: bindings in front of that loop.  binds: the launch's block variables, in terms of them.  cluster_map: set if blocks
    n c .. n c + n - 1 are a cluster of n blocks that computes neighbouring tiles at the same time.  inside: dimensions along
    which the launch's grid is no multiple of the cluster -> whether a block's tile lies in it.  once: a block has one tile.
    """

    grid: Expr
    block: Var
    index: Var
    count: Expr
    binds: tuple[Bind, ...]
    report: str
    cluster_map: ClusterMap | None = None
    inside: tuple[tuple[int, Expr], ...] = ()
    once: bool = False
    before: tuple[Bind, ...] = ()

    def loop(self, *body: Stmt) -> For:
        """The loop over all tiles of a block."""
        return For(self.index, const(0), self.count, "serial", seq(*self.binds, *body), plan=LoopPlan(tiles=True))


def plan_tiles(launch: Launch, work: Work, cx: PassContext, alone: bool = True, tight: bool = False) -> Tiles | str:
    """How the tiles of a launch are distributed over blocks, or the reason why each block keeps its own tile.

    alone: one block fills an SM.  Otherwise the grid keeps its size, unless tl.persistent is set.  tight: the shared buffers
    fit only if some reuse the bytes of others, which the loads of a next tile would overwrite.
    """
    asked = cx.option(PassConfigKey.TL_PERSISTENT)
    if launch.plan.cluster:
        return "the program chooses its clusters itself"
    if may_wait(launch.body):
        return "blocks may wait for each other"
    blocks = int(asked) if asked is not None and asked is not True else cx.target.limits.sm_count
    shared = not alone and asked is None or launch.plan.min_blocks_per_sm > 1
    why = "its epilogue reuses shared memory" if tight else "tl.persistent is off" if asked is not None and not asked else \
        "several blocks run on one SM" if shared else ""
    whole = Analyzer().simplify(_multiplied(launch.grid))
    one_wave = not why and isinstance(whole, Const) and whole.value <= blocks
    if one_wave:
        why = "there are no more tiles than sm_count"
    # Blocks that share an SM hide each other's loads: no pairs.
    found = _spans(launch, work, cx, one_wave if one_wave and alone or not why else None, 0 if why else blocks)
    if one_wave and alone and cx.option(PassConfigKey.TL_CLUSTER) is None:
        found = _larger(launch, work, blocks, found)
    refused = f"; {found}" if isinstance(found, str) else ""
    spans = None if isinstance(found, str) or prod(found) == 1 else found
    if why and spans is None:
        return why + refused
    cluster = 1 if spans is None else prod(spans)
    running = min(blocks, at_once(cx.target.limits.sm_count, cluster))
    few = launch if spans is None else _grouped(launch, spans)
    total = Analyzer().simplify(_multiplied(few.grid))
    clusters = total if why else binary("min", total, const(running // cluster, total.dtype))
    block, index = Var("block", dtype("int32")), Var("tile_step", dtype("int32"))
    first: Expr = block
    binds: list[Bind] = []
    if spans is not None:
        binds = [_bound("team", block // cluster), _bound("rank", block % cluster)]
        first = binds[0].var
    if spans is None and (divided := _partitioned(launch, work, blocks, block, index)) is not None:
        before, count, own = divided
        return Tiles(clusters, block, index, count, tuple(own),
                     f"persistent: {blocks} blocks, tiles longest first, in serpentine order{refused}", before=tuple(before))
    t = Var("tile", dtype("int32"))
    # With one tile a block, the tile number must not use the loop variable: place_sync would count iterations by it.
    binds.append(Bind(t, first if why else binary("min", first + index * clusters, total - 1)))
    order, about = order_of_tiles(few, work, running // cluster, spans or (1,) * len(launch.grid), cx)
    binds += order(t)
    count = (total - (block // cluster) + (clusters - 1)) // clusters
    text = f"one tile a block ({why})" if why else f"persistent: {running // cluster * cluster} blocks, tiles {about}"
    if spans is None:
        return Tiles(clusters, block, index, count, tuple(binds), text + refused)
    cluster_map, places = make_cluster(spans, binds[1].var)
    own, inside, about = _in_cluster(launch, few, spans, cluster_map)
    return Tiles(clusters * cluster, block, index, const(1, count.dtype) if why else count, (*binds, *places, *own),
                 text + about, cluster_map, inside, bool(why))


def _in_cluster(launch: Launch, few: Launch, spans: tuple[int, ...],
                cluster_map: ClusterMap) -> tuple[list[Bind], tuple[tuple[int, Expr], ...], str]:
    """(bindings of the launch's block variables, Tiles.inside, text for the report).

    They are computed from the position of the cluster in the grid of `few` and the block's ranks in the cluster.
    """
    wide, sizes = sorted(cluster_map.wide), [convert(g) for g in launch.grid]
    binds = [Bind(launch.block_vars[k], few.block_vars[k] * spans[k] + cluster_map.ranks[k]) for k in wide]
    inside = tuple((k, binary("lt", launch.block_vars[k], n)) for k in wide for n in [sizes[k]]
                   if not isinstance(n, Const) or n.value % spans[k])
    return binds, inside, (f"; clusters of {' x '.join(str(spans[k]) for k in wide)} along "
                           f"{'dimension' if len(wide) == 1 else 'dimensions'} {' and '.join(map(str, wide))} of the grid")


def _spans(launch: Launch, work: Work, cx: PassContext, one_wave: bool | None, blocks: int) -> tuple[int, ...] | str:
    """Blocks of a cluster along each dimension of the grid (all 1: no clusters), or why requested clusters are not possible.

    one_wave: see `_paired`.  blocks: how many run at a time, 0 if the grid keeps its size.
    """
    asked, dims = cx.option(PassConfigKey.TL_CLUSTER), len(launch.grid)
    if not isinstance(asked, tuple):
        paired = None if blocks % 2 else _paired(launch, work, cx, one_wave, blocks)
        return tuple(2 if k == paired else 1 for k in range(dims))
    spans = (*asked, *[1] * dims)[:max(dims, len(asked))]
    none = f"no clusters of {' x '.join(map(str, asked))}: "
    for k, n in enumerate(spans):
        if n == 1:
            continue
        if k >= dims:
            return f"{none}the grid has no dimension {k}"
        v, extent = launch.block_vars[k], convert(launch.grid[k])
        if v in free_vars(work.extent):
            return f"{none}the length of a tile depends on its place along dimension {k}"
        if all(_names(at, v) for _, at in work.loads):
            return f"{none}no load is the same along dimension {k}"
        if not work.padded and not (isinstance(extent, Const) and extent.value % n == 0):
            return f"{none}dimension {k} of the grid is no multiple of {n}, and blocks have effects before or in their loop"
    if 0 < blocks < prod(spans):
        return f"{none}there are {blocks} blocks"
    return spans[:dims]


def _larger(launch: Launch, work: Work, blocks: int, found: tuple[int, ...] | str) -> tuple[int, ...] | str:
    """Clusters of more than two blocks for a launch of one wave, if they save more cycles than `found`; else `found`.

    blocks: how many run at a time without clusters.
    """
    steps, grid = Analyzer().simplify(work.extent), [convert(g) for g in launch.grid]
    sizes = [g.value for g in grid if isinstance(g, Const)]
    if isinstance(found, str) or not isinstance(steps, Const) or len(sizes) != len(grid) or not work.padded:
        return found

    def saved(spans: tuple[int, ...]) -> float:
        loads = tuple(Load(b, start, prod(n for v, n in zip(launch.block_vars, spans) if not _names(at, v)), inner)
                      for (b, at), (start, inner) in zip(work.loads, work.rows))
        return saved_in_one_wave(loads, work.cycles, int(steps.value), prod(spans))

    shared = tuple(v not in free_vars(work.extent) and not all(_names(at, v) for _, at in work.loads)
                   for v in launch.block_vars)
    return larger_in_one_wave(tuple(sizes), shared, saved, blocks, found)


def _paired(launch: Launch, work: Work, cx: PassContext, one_wave: bool | None, blocks: int) -> int | None:
    """The dimension along which neighbours form clusters of two, which load their common tile once; None for no clusters.

    one_wave: whether the launch runs in one; None for no clusters unless they are asked for.  blocks: how many run at a time, 0
    if the grid keeps its size.
    """
    sizes = [convert(g) for g in launch.grid]
    total = prod(g.value if isinstance(g, Const) else 0 for g in sizes)
    asked = cx.option(PassConfigKey.TL_CLUSTER)
    steps = Analyzer().simplify(work.extent)
    times = steps.value if isinstance(steps, Const) else inf
    best: tuple[float, int] | None = None
    for k, (v, g) in enumerate(zip(launch.block_vars, launch.grid)):
        n = convert(g)
        if asked == 1 or not isinstance(n, Const) or v in free_vars(work.extent) or n.value % 2 and not (
                total and blocks and work.padded and one_wave is False):
            continue
        loads = tuple(Load(b, start, not _names(at, v), inner) for (b, at), (start, inner) in zip(work.loads, work.rows))
        gain = sum(x.cost for x in loads if x.saved)
        pays = one_wave is not None and (pays_for_many(loads, work.cycles) if not one_wave else isinstance(
            steps, Const) and pays_in_one_wave(loads, work.cycles, int(steps.value)))
        if not gain or asked is None and not pays:
            continue
        if one_wave is False and blocks:
            gain = gain_for_many(loads, n.value, max(1, total // n.value), blocks, times)
        if (asked is not None or gain > 0) and (best is None or gain > best[0]):
            best = gain, k
    return None if best is None else best[1]


def _grouped(launch: Launch, spans: tuple[int, ...]) -> Launch:
    """The launch with clusters in place of blocks: fewer along some dimensions, where the last may reach beyond the grid."""
    block_vars = tuple(v if n == 1 else Var(f"{v.name}_{'pair' if n == 2 else 'team'}", v.dtype)
                       for v, n in zip(launch.block_vars, spans))
    grid = tuple(g if n == 1 else Analyzer().simplify((convert(g) + (n - 1)) // n) for g, n in zip(launch.grid, spans))
    return replace(launch, grid=grid, block_vars=block_vars)


def order_of_tiles(launch: Launch, work: Work, clusters: int, spans: tuple[int, ...], cx: PassContext) -> tuple[Any, str]:
    """(function from a tile number to bindings of the block variables, text for the report).

    clusters: how many of them, or of blocks, run at the same time.  spans: blocks of a cluster along each dimension.
    """
    grid = [convert(g) for g in launch.grid]
    if slope := None if launch.plan.swizzle and len(grid) > 1 else _slope(launch, work):
        others = [k for k in range(len(grid)) if k != slope.dim]
        rest = Analyzer().simplify(_multiplied([grid[k] for k in others]))
        return lambda t: [Bind(launch.block_vars[slope.dim], slope.index(launch, t // rest)),
                          *split_index(launch, t % rest, others)], "longest first"
    if found := rasterisation(launch, work, max(1, clusters), spans, cx):
        return lambda t: _rasterisation_panels(launch, t, *found), f"in rasterisation panels of {found[0]} {found[1]}s"
    return lambda t: split_index(launch, t, range(len(grid))), "in order"


def rasterisation(launch: Launch, work: Work, blocks: int, spans: tuple[int, ...], cx: PassContext) -> tuple[int, str] | None:
    """The size of the rasterisation panels of a launch of tiles, or of clusters, and what they consist of, "row" or "column".

    None where tiles have no loads in common along two dimensions.  blocks: how many run at a time.  spans: of a cluster.
    """
    if len(launch.grid) < 2:
        return None
    if launch.plan.swizzle:
        asked, how = launch.plan.swizzle
        return max(1, int(asked) // spans[how != "column"]), "column" if how == "column" else "row"
    bx, by = work.block_vars[:2]
    x, y = (sum(n for n, at in work.loads if _names(at, v) and not _names(at, other)) for v, other in ((bx, by), (by, bx)))
    if not (x and y):
        return None
    across, down, *others = [n.value if isinstance(n, Const) else 0 for n in map(convert, launch.grid)]
    times = steps.value if prod(spans) == 1 and isinstance(steps := Analyzer().simplify(work.extent), Const) else 0  # not known
    return tile_order((down, across, prod(others) * bool(times)), (y * spans[1] * max(1, times), x * spans[0] * max(1, times)),
                      blocks, kernel_rates("wgmma", cx.target.machine).l2_bytes)


def _names(at: tuple[Expr, ...], v: Var) -> bool:
    return any(v in free_vars(e) for e in at)


def split_index(launch: Launch, index: Expr, dims: Sequence[int]) -> list[Bind]:
    """The block variables of these dimensions, from the index of a tile among them; the first dimension is the fastest."""
    out: list[Bind] = []
    for k in dims[:-1]:
        out.append(Bind(launch.block_vars[k], index % launch.grid[k]))
        index = index // launch.grid[k]
    return [*out, *(Bind(launch.block_vars[k], index) for k in dims[-1:])]


def _rasterisation_panels(launch: Launch, t: Expr, panel_size: int, how: str) -> list[Bind]:
    """Rasterisation panels of `panel_size` rows or columns, each traversed in serpentine order along the other dimension."""
    across, along = (0, 1) if how == "row" else (1, 0)
    ga, gl = convert(launch.grid[across]), convert(launch.grid[along])
    a, b = launch.block_vars[across], launch.block_vars[along]
    flat, rest = _bound("in_layer", t % (ga * gl)), _bound("layer", t // (ga * gl))
    number = _bound("panel", flat.var // (ga * panel_size))
    inside = _bound("in_panel", flat.var % (ga * panel_size))
    rows = _bound("rows", binary("min", const(panel_size), gl - number.var * panel_size))
    column = _bound("column", binary("min", inside.var // rows.var, ga - 1))
    turned = binary("sub", ga - 1, column.var)
    out = [flat, rest, number, inside, rows, column,
           Bind(b, binary("min", number.var * panel_size + inside.var % rows.var, gl - 1)),
           Bind(a, Select(binary("eq", number.var % 2, const(0)), column.var, turned, turned.dtype, lazy=False))]
    return out + split_index(launch, rest.var, [k for k in range(len(launch.grid)) if k not in (across, along)])


def _partitioned(launch: Launch, work: Work, blocks: int, block: Var,
                 index: Var) -> tuple[list[Bind], Expr, list[Bind]] | None:
    """(bindings in front of the loop, number of tiles of a block, the block variables of its tile number `index`) by a
    partition of tiles of unequal length; None if that does not suit."""
    slope = None if launch.plan.swizzle else _slope(launch, work)
    if slope is None:
        return None
    group, others = _heads(launch, work, slope), [k for k in range(len(launch.grid)) if k != slope.dim]
    v, grid = work.block_vars[slope.dim], [convert(g) for g in launch.grid]
    before: list[Bind] = []
    own: list[Bind] = []
    if isinstance(group, int):
        sizes = [int(g.value) for g in grid]  # type: ignore[attr-defined]
        lengths = [_sampled(work.extent, work.block_vars, {v: row}) for row in range(sizes[slope.dim])]
        known = [x + TILE_START for x in (reversed(lengths) if slope.up else lengths) if x is not None]
        columns = prod(sizes[k] for k in others)
        found = schedule_tiles(known, columns, blocks, group) if len(known) == len(lengths) else None
        if found is None:
            return None
        (row, column), count = found.place(block, index), found.count(block)
        column = binary("min", column, const(columns) - 1)
    else:
        parts, before = OpenPartition.of((grid[slope.dim], _multiplied([grid[k] for k in others])), group, blocks, block)
        own, row, column = parts.place(index)
        count = parts.count
    first = _bound("row", row)
    own += [first, Bind(launch.block_vars[slope.dim], slope.index(launch, first.var))]
    if others:
        place = _bound("column", column)
        own += [place, *split_index(launch, place.var, others)]
    return before, count, own


@record
class _Slope:
    """The dimension of the grid along which tiles get longer (`up`) or shorter.  longest: the length of the longest."""

    dim: int
    up: bool
    longest: int

    def index(self, launch: Launch, row: Expr) -> Expr:
        """The index along the dimension of tile number `row`, counted from the longest one."""
        return (convert(launch.grid[self.dim]) - 1) - row if self.up else row


def _slope(launch: Launch, work: Work) -> _Slope | None:
    """How tiles differ in length; None if they do not, or if that is not known."""
    for k, v in enumerate(work.block_vars):
        n = _sampled(launch.grid[k], work.block_vars, {}) if v in free_vars(work.extent) else None
        low, high = (None if n is None else _sampled(work.extent, work.block_vars, {v: i}) for i in (0, (n or 1) - 1))
        if low is not None and high is not None and low != high:
            return _Slope(k, high > low, max(low, high))
    return None


def longest_first(launch: Launch, work: Work) -> Launch:
    """The launch with its longest blocks first, where they get longer along a dimension: the last ones to start are short.

    Dimensions of the grid whose blocks load tiles that fit L2 together go in front of that one: then the longest of all of
    them start before the others.
    """
    slope = _slope(launch, work)
    if slope is None or not slope.up or launch.plan.swizzle or may_wait(launch.body):
        return launch
    v, order = launch.block_vars[slope.dim], [*range(len(launch.grid))]
    heads, sizes = _heads(launch, work, slope), [g.value for g in map(convert, launch.grid) if isinstance(g, Const)]
    if isinstance(heads, int) and sizes[slope.dim] <= MAX_GRID[1]:
        at = max(k for k in range(slope.dim, len(order)) if k == slope.dim or prod(sizes[:k + 1]) <= heads * sizes[slope.dim])
        order.insert(at, order.pop(slope.dim))
    return replace(launch, grid=tuple(launch.grid[k] for k in order), block_vars=tuple(  # type: ignore[no-any-return]
        launch.block_vars[k] for k in order), body=substitute(launch.body, {v: slope.index(launch, v)}))


def _heads(launch: Launch, work: Work, slope: _Slope) -> int | Callable[[Expr], Expr]:
    """How many tiles that differ in the other dimensions fit L2 with what they load; of a grid that each call gives, a function
    from their number to that of groups that do."""
    v = work.block_vars[slope.dim]
    each = sum(b for b, at in work.loads if not _names(at, v))
    if all(isinstance(convert(g), Const) for g in launch.grid):
        return max(1, round(L2_FRACTION / max(1, slope.longest * each)))
    last = convert(launch.grid[slope.dim]) - 1 if slope.up else const(0)
    longest = binary("max", const(1), substitute(work.extent, {x: last if x is v else const(0) for x in work.block_vars}))
    fits = max(1, L2_FRACTION // max(1, each))  # iterations
    more = fits - fits // 10  # a tenth above the fraction makes no group more
    return lambda columns: cast((cast(columns, "uint32") * cast(longest, "uint32") + more) // fits, "int32")


def _sampled(e: Any, block_vars: tuple[Var, ...], values: dict[Var, int]) -> int | None:
    """The value of an expression with block variables 0 (or as in `values`) and _SAMPLE for all other variables."""
    e = convert(e)
    blocks = set(block_vars)
    got = Analyzer().simplify(substitute(e, {v: const(values.get(v, 0 if v in blocks else _SAMPLE), v.dtype)
                                             for v in free_vars(e)}))
    return int(got.value) if isinstance(got, Const) else None


def _bound(name: str, value: Expr) -> Bind:
    return Bind(Var(name, value.dtype), value)


def _multiplied(xs: Iterable[Any]) -> Expr:
    return reduce(mul, map(convert, xs), const(1))
