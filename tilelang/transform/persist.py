"""Which tiles a block of a persistent launch computes, and in which order.

    launch grid (gx, gy), bx, by:  body      ->      launch grid (min(P, gx * gy),), block:
                                                         for i in serial(ceil((gx * gy - block) / P)):
                                                             t = block + i * P;  bx, by = place of tile t;  body

The blocks of a grid do not depend on each other, so any order is right.  It is chosen for L2: tiles that run at the same
time share what they load.  Where the work of a tile grows with a block variable, long tiles come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Bind, Const, Evaluate, Expr, For, Launch, Select, Stmt, Var, While, binary, const, convert, dtype,
                         free_vars,
                         replace, seq, substitute, walk)
from tilelang.ir.expr import Call
from tilelang.ir.record import record

from .config import PassConfigKey
from .deal_tiles import Deal, deal_tiles, panel_rows
from .pairing import Load, pays_for_many, pays_in_one_round
from .pass_ import PassContext

TILE_START = 1.5  # what beginning and ending a tile costs, in iterations
L2_SHARE = 32 << 20  # bytes of L2 that tiles running together may fill with what they share
_SAMPLE = 4096  # stands for extents that are known at run time only, where an order is chosen


@record
class Work:
    """What decides the order: loads = ((bytes of an iteration, their source's index expressions), …), the extent of the
    loop that does them, in terms of the block variables."""

    loads: tuple[tuple[int, tuple[Expr, ...]], ...]
    extent: Expr
    block_vars: tuple[Var, ...]
    cycles: float = 0  # of the matrix unit, an iteration; 0 where unknown
    starts: tuple[int, ...] = ()  # for each load: rows of its source start at multiples of so many bytes


@record
class Tiles:
    """A launch's tiles, dealt out to fewer blocks.

    grid: number of blocks.  block: its index.  index, count: variable and extent of the loop over a block's tiles.
    binds: the launch's block variables, in terms of them.  cluster: 2 when blocks 2 c and 2 c + 1 are a cluster that
    computes neighbours along dimension `paired` of the launch's grid at the same time; `rank` is a block's place in it.
    once: a block has one tile.
    """

    grid: Expr
    block: Var
    index: Var
    count: Expr
    binds: tuple[Bind, ...]
    report: str
    cluster: int = 1
    paired: int | None = None
    rank: Expr | None = None
    once: bool = False

    def loop(self, *body: Stmt) -> For:
        """All tiles of a block."""
        return For(self.index, const(0), self.count, "serial", seq(*self.binds, *body), attrs=(("tiles", True),))


def plan_tiles(launch: Launch, work: Work, cx: PassContext, alone: bool = True) -> Tiles | str:
    """How a launch's tiles are dealt out to blocks, or why each block keeps its own.

    alone: one block fills a multiprocessor; else the grid stays as large as it is, unless tl.persistent says otherwise.
    """
    asked = cx.option(PassConfigKey.TL_PERSISTENT)
    if launch.attr("cluster"):
        return "the launch has clusters of its own"
    if _may_wait(launch.body):
        return "blocks may wait for each other"
    blocks = int(asked) if asked is not None and asked is not True else cx.target.limits.multiprocessors
    why = ""
    if asked is False or asked == 0 and asked is not None:
        why = "tl.persistent is off"
    elif not alone and asked is None or int(launch.attr("min_blocks_per_sm") or 1) > 1:
        why = "blocks share a multiprocessor"
    analyzer = Analyzer()
    whole = analyzer.simplify(_product([convert(g) for g in launch.grid]))
    one_round = not why and isinstance(whole, Const) and whole.value <= blocks
    if one_round:
        why = "there are no more tiles than multiprocessors"
    pays = _in_one_round if one_round and alone else _for_many if not why else _never
    paired = _paired(launch, work, cx, pays) if blocks % 2 == 0 or why else None
    if why and paired is None:
        return why
    cluster = 1 if paired is None else 2
    team = launch if paired is None else _halved(launch, paired)
    total = analyzer.simplify(_product([convert(g) for g in team.grid]))
    teams = total if why else _minimum(total, const(blocks // cluster, total.dtype))
    block, index = Var("block", dtype("int32")), Var("tile_step", dtype("int32"))
    first: Expr = block
    binds: list[Bind] = []
    if paired is not None:
        binds = [_bound("team", block // 2), _bound("rank", block % 2)]
        first = binds[0].var
    dealt = _dealt(launch, work, blocks) if paired is None else None
    if dealt is not None:
        row, column = dealt.place(block, index)
        return Tiles(teams, block, index, dealt.count(block), (*_longest_in(launch, row, column, work),),
                     f"persistent: {blocks} blocks, tiles longest first, dealt out forth and back")
    t = Var("tile", dtype("int32"))
    binds.append(Bind(t, _minimum(first + index * teams, total - 1)))
    order, about = _order(team, work, blocks // cluster, paired, cx)
    binds += order(t)
    count = (total - (block // cluster) + (teams - 1)) // teams
    text = f"one tile a block ({why})" if why else f"persistent: {blocks} blocks, tiles {about}"
    if paired is None:
        return Tiles(teams, block, index, count, tuple(binds), text)
    rank = binds[1].var
    binds.append(Bind(launch.block_vars[paired], team.block_vars[paired] * 2 + rank))
    text += f"; clusters of 2 along dimension {paired} of the grid"
    return Tiles(teams * 2, block, index, const(1, count.dtype) if why else count, tuple(binds), text, 2, paired, rank,
                 bool(why))


def _paired(launch: Launch, work: Work, cx: PassContext, pays: Callable[[Work, tuple[Load, ...]], bool]) -> int | None:
    """The dimension along which neighbours make a cluster: what they both load is loaded once.  None for none.

    pays: whether clusters are worth it with such loads.
    """
    asked = cx.option(PassConfigKey.TL_CLUSTER)
    best: tuple[int, int] | None = None
    for k, (v, g) in enumerate(zip(launch.block_vars, launch.grid)):
        n = convert(g)
        if asked == 1 or not isinstance(n, Const) or n.value % 2 or v in free_vars(work.extent):
            continue
        saved = sum(b for b, at in work.loads if not _names(at, v))
        loads = tuple(Load(b, start, not _names(at, v)) for (b, at), start in zip(work.loads, work.starts))
        if asked is None and not pays(work, loads):
            continue
        if saved and (best is None or saved > best[0]):
            best = saved, k
    return None if best is None else best[1]


def _for_many(work: Work, loads: tuple[Load, ...]) -> bool:
    """Blocks compute several tiles."""
    return pays_for_many(loads, work.cycles)


def _in_one_round(work: Work, loads: tuple[Load, ...]) -> bool:
    """One tile a block, one block a multiprocessor."""
    steps = Analyzer().simplify(work.extent)
    return isinstance(steps, Const) and pays_in_one_round(loads, work.cycles, int(steps.value))


def _never(work: Work, loads: tuple[Load, ...]) -> bool:
    """Blocks that share a multiprocessor hide each other's loads."""
    return False


def _halved(launch: Launch, paired: int) -> Launch:
    """The launch of clusters: half as many along one dimension."""
    v = launch.block_vars[paired]
    team = Var(f"{v.name}_pair", v.dtype)
    grid = tuple(const(int(convert(g).value) // 2) if k == paired else g  # type: ignore[attr-defined]
                 for k, g in enumerate(launch.grid))
    return replace(launch, grid=grid, block_vars=tuple(team if k == paired else x for k, x in enumerate(launch.block_vars)))


def _order(launch: Launch, work: Work, teams: int, paired: int | None, cx: PassContext) -> tuple[Any, str]:
    """(tile number -> bindings of the block variables, one phrase).  teams: blocks, or clusters, at work together."""
    grid = [convert(g) for g in launch.grid]
    swizzle = launch.attr("swizzle")
    if swizzle and len(grid) >= 2:
        panel, how = swizzle
        across, along = (0, 1) if how != "column" else (1, 0)
        wide = max(1, int(panel) // (2 if paired == along else 1))
        return lambda t: _panels(launch, t, across, along, wide), f"in panels of {panel}"
    growing = _growing(launch, work)
    if growing is not None:
        group = _heads(launch, work, growing)
        return lambda t: _longest_first(launch, t, growing, group), "longest first"
    if len(grid) >= 2:
        bx, by = work.block_vars[:2]
        x = sum(n for n, at in work.loads if _names(at, bx) and not _names(at, by))
        y = sum(n for n, at in work.loads if _names(at, by) and not _names(at, bx))
        if x and y:
            panel = panel_rows(teams, y * (2 if paired == 1 else 1), x * (2 if paired == 0 else 1))
            return lambda t: _panels(launch, t, 0, 1, panel), f"in panels of {panel} rows"
    return lambda t: _plain(launch, t), "in order"


def _may_wait(body: Stmt) -> bool:
    """Whether a block may depend on another one's progress: it looks at what atomics give, or spins."""
    unused = {id(x.call) for x in walk(body) if isinstance(x, Evaluate)}
    return any(isinstance(x, While) or isinstance(x, Call) and x.op.startswith("atomic") and id(x) not in unused
               for x in walk(body))


def _names(at: tuple[Expr, ...], v: Var) -> bool:
    return any(v in free_vars(e) for e in at)


def _plain(launch: Launch, t: Expr) -> list[Bind]:
    """x fastest."""
    out: list[Bind] = []
    for v, g in zip(launch.block_vars[:-1], launch.grid):
        out.append(Bind(v, t % g))
        t = t // g
    return [*out, Bind(launch.block_vars[-1], t)]


def _panels(launch: Launch, t: Expr, across: int, along: int, panel: int) -> list[Bind]:
    """Panels of `panel` indices of dimension `along`, each walked along dimension `across`, back and forth."""
    ga, gl = convert(launch.grid[across]), convert(launch.grid[along])
    a, b = launch.block_vars[across], launch.block_vars[along]
    flat, rest = _bound("in_layer", t % (ga * gl)), _bound("layer", t // (ga * gl))
    number = _bound("panel", flat.var // (ga * panel))
    inside = _bound("in_panel", flat.var % (ga * panel))
    rows = _bound("rows", _minimum(const(panel), gl - number.var * panel))
    column = _bound("column", _minimum(inside.var // rows.var, ga - 1))
    turned = binary("sub", ga - 1, column.var)
    out = [flat, rest, number, inside, rows, column,
           Bind(b, _minimum(number.var * panel + inside.var % rows.var, gl - 1)),
           Bind(a, Select(binary("eq", number.var % 2, const(0)), column.var, turned, turned.dtype, lazy=False))]
    over: Expr = rest.var
    others = [k for k in range(len(launch.grid)) if k not in (across, along)]
    for k in others[:-1]:
        out.append(Bind(launch.block_vars[k], over % launch.grid[k]))
        over = over // launch.grid[k]
    if others:
        out.append(Bind(launch.block_vars[others[-1]], over))
    return out


def _longest_first(launch: Launch, t: Expr, growing: int, group: int | None) -> list[Bind]:
    """Dimension `growing` from its end, slowest; within groups of the others whose loads fit L2 together."""
    others = [k for k in range(len(launch.grid)) if k != growing]
    g = convert(launch.grid[growing])
    if not others:
        return [Bind(launch.block_vars[growing], (g - 1) - t)]
    rest = Analyzer().simplify(_product([convert(launch.grid[k]) for k in others]))
    width: Expr = rest if group is None else _minimum(const(group), rest)
    first = _bound("group", t // (width * g))
    inside = _bound("in_group", t % (width * g))
    # The last group may be narrower.
    now = _bound("width", _minimum(width, rest - first.var * width))
    out = [first, inside, now, Bind(launch.block_vars[growing], (g - 1) - _minimum(inside.var // now.var, g - 1))]
    head = _bound("other", _minimum(first.var * width + inside.var % now.var, rest - 1))
    out.append(head)
    over: Expr = head.var
    for k in others[:-1]:
        out.append(Bind(launch.block_vars[k], over % launch.grid[k]))
        over = over // launch.grid[k]
    return [*out, Bind(launch.block_vars[others[-1]], over)]


def _dealt(launch: Launch, work: Work, blocks: int) -> Deal | None:
    """The deal of a launch whose tiles grow with a block variable, when its grid is known."""
    growing = None if launch.attr("swizzle") else _growing(launch, work)
    group = None if growing is None else _heads(launch, work, growing)
    if growing is None or group is None:
        return None
    v, n = work.block_vars[growing], int(convert(launch.grid[growing]).value)  # type: ignore[attr-defined]
    lengths = [_sampled(work.extent, work.block_vars, {v: n - 1 - row}) for row in range(n)]
    columns = 1
    for k, g in enumerate(launch.grid):
        columns *= 1 if k == growing else int(convert(g).value)  # type: ignore[attr-defined]
    known = [x + TILE_START for x in lengths if x is not None]
    return deal_tiles(known, columns, blocks, group) if len(known) == n else None


def _longest_in(launch: Launch, row: Expr, column: Expr, work: Work) -> list[Bind]:
    """The block variables of the tile `row` from the end of the growing dimension, `column` in the others."""
    growing = _growing(launch, work) or 0
    rows = convert(launch.grid[growing])
    first = _bound("row", row)
    out = [first, Bind(launch.block_vars[growing], (rows - 1) - first.var)]
    others = [k for k in range(len(launch.grid)) if k != growing]
    if not others:
        return out
    total = Analyzer().simplify(_product([convert(launch.grid[k]) for k in others]))
    place = _bound("column", _minimum(column, total - 1))
    out.append(place)
    over: Expr = place.var
    for k in others[:-1]:
        out.append(Bind(launch.block_vars[k], over % launch.grid[k]))
        over = over // launch.grid[k]
    return [*out, Bind(launch.block_vars[others[-1]], over)]


def _growing(launch: Launch, work: Work) -> int | None:
    """The dimension along which tiles get longer."""
    low = _sampled(work.extent, work.block_vars, {})
    for k, (v, g) in enumerate(zip(work.block_vars, launch.grid)):
        n = _sampled(g, work.block_vars, {})
        if n is None or n < 2 or low is None or v not in free_vars(work.extent):
            continue
        high = _sampled(work.extent, work.block_vars, {v: n - 1})
        if high is not None and high > low:
            return k
    return None


def _heads(launch: Launch, work: Work, growing: int) -> int | None:
    """How many tiles that differ in the other dimensions share L2."""
    if not all(isinstance(convert(g), Const) for g in launch.grid):
        return None
    v, n = work.block_vars[growing], _sampled(launch.grid[growing], work.block_vars, {})
    longest = _sampled(work.extent, work.block_vars, {v: (n or 1) - 1})
    if longest is None:
        return None
    return max(1, round(L2_SHARE / max(1, longest * sum(b for b, at in work.loads if not _names(at, v)))))


def _sampled(e: Any, block_vars: tuple[Var, ...], values: dict[Var, int]) -> int | None:
    """The value of an expression with block variables 0 (or as given) and a stand-in for everything else unknown."""
    e = convert(e)
    blocks = set(block_vars)
    got = Analyzer().simplify(substitute(e, {v: const(values.get(v, 0 if v in blocks else _SAMPLE), v.dtype)
                                             for v in free_vars(e)}))
    return int(got.value) if isinstance(got, Const) else None


def _bound(name: str, value: Expr) -> Bind:
    return Bind(Var(name, value.dtype), value)


def _minimum(a: Expr, b: Expr) -> Expr:
    return binary("min", a, b)


def _product(xs: list[Expr]) -> Expr:
    out = xs[0]
    for x in xs[1:]:
        out = out * x
    return out


__all__ = ["Tiles", "Work", "plan_tiles"]
