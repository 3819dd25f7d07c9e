"""How one kernel walks over its axes: which are split over blocks, which lie in a tile as a whole, which are looped over.

    grid   one index a block              tile   `size` indices a block
    whole  all indices in one tile        loop   `size` indices an iteration       serial  one index an iteration

Sizes of tiles come from the library's cost models of the machine: of one GEMM, and of two GEMMs in a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from math import gcd, prod

from tilelang import ir
from tilelang.library.attention import tile_cost as chain_cost
from tilelang.library.attention.form import Tile as ChainTile
from tilelang.library.attention.problem import Mask, Sizes
from tilelang.library.gemm.tile import Tile, TileProblem, chip_of
from tilelang.library.gemm.tile_cost import choose_tile
from tilelang.target import Target

from .divide import are_halves, joined, over_rows, shortened
from .expr import Axis, Scalar, Tensor, axis, is_integer, linear
from .graph import Dim
from .nest import REDUCTIONS, Contraction, Nest, Unfit, contraction, output_axes, passes, row_digits

WHOLE_DEPTH = 512  # most indices of a contracted axis that lies in a tile as a whole
WHOLE_COLUMNS = 512  # most columns of an accumulator that are kept so that what stands before is not computed again
SMALL = 128  # an axis of at most so many indices is not looped over where it could be whole
GROUP_COLUMNS = 256  # most columns of float32 accumulators whose 64 rows a warp group keeps
HALVES = 320  # elements of a row, of halves of float32 operands and accumulators, of which 128 threads keep 64 rows
FULL = 512  # rows or columns from which those that a last tile lacks are few
FEW_ROWS = 64  # rows of a tile up to which computing the right operand takes longer than multiplying,
COMPUTED_COLUMNS = 128  # so that its columns go to more blocks
SHORT_LOOP = 64  # a contracted axis of at most so many indices is one tile
ROWS = {True: 32768, False: 65536}  # the longest row that a block keeps, on a GPU and else
MOST = {True: 1 << 15, False: 1 << 16}  # elements of a tile of a reduction
REREAD_ROWS = 4096  # the longest row that is kept although it is read once only
LONG = 1 << 15  # elements of a row of which those that hang over are few
ROW_OF_THREAD = 16  # elements of rows side by side up to which each is walked over by a thread
WINDOW = 64  # most elements of a window that each thread walks over by itself
SQUARE = 64  # rows and columns of a tile that is transposed
LANES = 32  # neighbours in memory that a block reads of each row, where it reduces columns
IN_FLIGHT = 4  # rows that a thread reads an iteration, where each row of a tile has a result of its own
MULTIPLE = 128  # indices of which pieces of a loop are multiples
REUSED = 4  # times BLOCK, where rows that are computed once are used by others
BLOCK = 2048  # elements that a block of an element-wise kernel computes
SORTED_BY_THREAD = 16  # elements that a thread holds in registers while a row is sorted
GUESS = 2048  # what the cost models take an open size for


@dataclass(frozen=True)
class AxisUse:
    """What a kernel does with an axis.  size: indices in a tile."""

    kind: str
    size: int = 1


@dataclass(frozen=True)
class Choice:
    """Where a plan differs from what the cost models say.

    tile: number of the tile of GEMMs in the order of cost.  stages: more than planned.  elements, threads: of blocks without
    GEMMs, in doublings.  pieces: number of the division of a loop in the order of cost.  early: kernels start while the one
    before them on the stream ends.
    """

    tile: int = 0
    stages: int = 0
    elements: int = 0
    threads: int = 0
    pieces: int = 0
    early: bool = False


MODEL = Choice()
CHOICES = (*(Choice(tile=k) for k in range(1, 5)), Choice(stages=1), Choice(stages=-1),
           *(Choice(elements=k) for k in (-1, 1, 2)), Choice(threads=1), Choice(threads=-1), Choice(pieces=1), Choice(pieces=2),
           Choice(early=True))


@dataclass
class Plan:
    """A nest with the use of each axis, threads, and notes that stand as comments in its text.

    swizzle: the arguments of T.use_swizzle, if any.  lanes: axes of rows that have results of their own, the first ones of
    tiles.  choice: what a tuner chose.
    shared_left: whether left operands that are computed lie in shared memory, because several warp groups share the rows.
    """

    nest: Nest
    uses: dict[Axis, AxisUse]
    choice: Choice = MODEL
    threads: int = 256
    stages: int = 2
    swizzle: tuple[int, str] | None = None
    lanes: tuple[Axis, ...] = ()
    shared_left: bool = False
    notes: list[str] = field(default_factory=list)

    def tiled(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Those of the axes that are dimensions of tiles."""
        return tuple(a for a in axes if self.uses[a].kind not in ("grid", "serial"))

    def gemm_of(self, t: Tensor) -> Contraction | None:
        """The factors of a stage that T.gemm computes: with one tiled axis each of rows, columns and depth."""
        c = contraction(t)
        if c is None or any(len(self.tiled(x)) != 1 for x in (t.over, c.m, c.n)) or len(self.tiled(t.axes)) != 2:
            return None
        return c

    def loops(self) -> frozenset[Axis]:
        return frozenset(a for a, r in self.uses.items() if r.kind in ("loop", "serial"))


def bits_of(dtype: str) -> int:
    """Bits of an element."""
    return ir.dtype(dtype).bits


def exactness(dtype: str, target: Target) -> str:
    """How a GEMM of a type is computed where T.gemm would round, or lacks it: "halves" of tf32, "threads"; "": T.gemm."""
    if is_integer(dtype) and bits_of(dtype) > 8:
        return "threads"
    if target.is_cpu or dtype not in ("float32", "float64"):
        return ""
    return "halves" if dtype == "float32" and target.has_tf32 else "threads"


def static(a: Axis) -> int | None:
    """The extent as a number, None where it is open."""
    return None if isinstance(a.extent, Dim) else int(a.extent)


def guess(a: Axis) -> int:
    """The extent, or what the cost models take an open one for."""
    return GUESS if (n := static(a)) is None else n


def plan_of(nest: Nest, target: Target, choice: Choice = MODEL) -> Plan:
    """The uses of a nest's axes and the sizes of its tiles.  Raises Unfit."""
    nest = _joined_axes(nest)
    plan = Plan(nest, {}, choice)
    _whole_axes(plan, target)
    _nested_loops(plan)
    _loops(plan, target)
    main = main_contraction(plan.nest)
    if main is not None:
        _contraction_axes(plan, *main, target)
    else:
        _row_axes(plan, target)
        plan.threads = min(max(64, int(plan.threads * 2.0 ** choice.threads)), 1024)
    plan.stages = max(plan.stages + choice.stages, min(plan.stages, 1))
    plan.notes += ["not the sizes of least estimated cost: these were measured to be faster"] if choice != MODEL else []
    for a in nest.axes:
        plan.uses.setdefault(a, AxisUse("grid"))
    for t in plan.nest.stages:
        elements = prod(plan.uses[a].size for a in (t.body.axes if t.body is not None else ()))
        if elements > MOST[target.is_gpu] and plan.gemm_of(t) is None:
            raise Unfit(f"tiles of {elements} elements")
    for t, e in nest.outputs:
        own = {*e.axes, *output_axes(nest, t)}
        if any(plan.uses[a].kind in ("grid", "tile") and a.extent != 1 for a in nest.axes if a not in own):
            raise Unfit("an output has no axis that is split over blocks")
    stages, loops = plan.nest.stages, plan.loops()
    if any(not loops.isdisjoint(t.over) and not loops.isdisjoint(t.axes) for t in stages if t.kind in REDUCTIONS):
        raise Unfit("a loop inside of a loop")
    if any(not plan.tiled(t.axes) for t in stages) and any(plan.gemm_of(t) is not None for t in stages):
        raise Unfit("a GEMM beside a tile of one element")
    for r in nest.global_reads():
        ends = {i.value for i in (*row_digits(r)[-1:], *r.args[-1:]) if i.op == "axis"}
        if row_digits(r) and set(plan.tiled(tuple(r.axes))) != ends:
            raise Unfit("a tile of windows along other axes")
    if target.is_gpu and _operand_bytes(plan, target) > chain_cost.machine_of(target).shared:
        raise Unfit("more operands of a GEMM than shared memory holds")
    return plan


def _operand_bytes(plan: Plan, target: Target) -> int:
    """At least so many bytes of shared memory for operands of the GEMMs: what is read from memory, and halves of right ones."""
    tiles: dict[Scalar, int] = {}
    for t in plan.nest.stages:
        if (c := plan.gemm_of(t)) is None:
            continue
        copies = plan.stages if any(plan.uses[a].kind == "loop" for a in t.over) else 1
        for f, free in ((c.a, c.m), (c.b, c.n)):
            size = prod(plan.uses[a].size for a in plan.tiled((*t.over, *free))) * bits_of(f.dtype) // 8
            halves = 2 * (f is c.b and exactness(f.dtype, target) == "halves")
            tiles[f] = max(tiles.get(f, 0), size * (copies * (f is c.b or f.op == "read") + halves))
    return sum(tiles.values())


def _joined_axes(nest: Nest) -> Nest:
    """One axis for the contracted axes that a factor has side by side, and for rows and columns that fill tiles badly."""
    if any(map(contraction, nest.stages)):
        nest = shortened(nest)
    for k in range(len(nest.stages)):
        t = nest.stages[k]
        c = contraction(t)
        if c is None:
            continue
        orders = [_side_by_side(f, frozenset(t.over)) for f in (c.a, c.b)]
        over = next((o for o in orders if o is not None), ())
        windows = any(row_digits(r) for f in (c.a, c.b) for r in f.reads)
        tiled = None in orders and all(is_plain(t, a) for a in over) and (
            windows or max(map(guess, over), default=0) >= SHORT_LOOP)
        if len(over) > 1 and not tiled:  # else tiles along one of the axes can be copied
            nest = joined(nest, over)
            c = contraction(nest.stages[k]) or c
        for side in (c.m, c.n):
            free = [a for a in nest.axes if a in side]
            while free and nest.axes.index(free[-1]) - nest.axes.index(free[0]) >= len(free):
                free = free[1:]
            n = static(free[-1]) if len(free) > 1 else None
            if n is not None and n < FULL and (n % SHORT_LOOP or windows):
                nest = joined(nest, tuple(free))
    return nest


def _side_by_side(f: Scalar, over: frozenset[Axis]) -> tuple[Axis, ...] | None:
    """All of the axes, in the order in which a read has them side by side."""
    for r in sorted(f.reads, key=repr):
        found = [i.value if i.op == "axis" else None for i in r.args]
        for k in range(len(found) - len(over) + 1):
            if set(found[k:k + len(over)]) == over:
                return tuple(a for a in found[k:k + len(over)] if a is not None)
    return None


# ---- reduced axes -----------------------------------------------------------------------------------------------------


def _whole_axes(plan: Plan, target: Target) -> None:
    """Axes of scans and sorts, whose elements must lie in one tile."""
    for t in plan.nest.stages:
        if t.kind not in REDUCTIONS:
            for a in (*t.over, *(a for a in t.axes if t.body is not None and a not in t.body.axes)):
                fits = (n := static(a)) is not None and n <= ROWS[target.is_gpu]
                if not fits and not t.kind.startswith("scan"):
                    raise Unfit(f"the axis of {t.kind} is too long for a tile")
                plan.uses[a] = AxisUse("whole", n) if fits else AxisUse("loop", 0)  # type: ignore[arg-type]
                if not fits and any(s.over == t.over and _backwards(s) is (not t.attrs["reverse"]) for s in plan.nest.stages):
                    raise Unfit("a long axis is walked in both directions")


def _backwards(t: Tensor) -> bool | None:
    """Whether a stage needs its axis from the end; None where it takes any order."""
    return t.attrs.get("reverse") if t.kind.startswith("scan") else False if t.kind.startswith("arg") else None


def _reducers(nest: Nest) -> dict[Axis, list[Tensor]]:
    return {a: [t for t in nest.stages if a in t.over] for t in nest.stages for a in t.over}


def _nested_loops(plan: Plan) -> None:
    """Where `a` is reduced for each index of `o`, over which another reduction runs, one of both lies in a tile as a whole."""
    over = _reducers(plan.nest)
    for a, stages in over.items():
        for o in {o for t in stages for o in t.axes if o in over and o != a}:
            if plan.uses.get(o, AxisUse("")).kind == "whole" or plan.uses.get(a, AxisUse("")).kind == "whole":
                continue
            x, y = static(o), static(a)
            if x is not None and x <= SMALL and not (y is not None and y <= SMALL):
                plan.uses[o] = AxisUse("whole", x)
            elif y is not None and y <= WHOLE_DEPTH:
                plan.uses[a] = AxisUse("whole", y)
            elif x is not None and x <= WHOLE_COLUMNS:
                plan.uses[o] = AxisUse("whole", x)
            else:
                raise Unfit("two long loops are nested")


def _loops(plan: Plan, target: Target) -> None:
    """The other reduced axes: rows that outputs have are whole where they fit; others are looped over unless they are short."""
    nest, uses = plan.nest, plan.uses
    fixed = set(uses)
    for a, stages in _reducers(nest).items():
        if a in uses:
            continue
        short = all(contraction(t) is None and prod(map(guess, t.over)) <= WINDOW for t in stages)
        if target.is_gpu and short and is_window(nest, a):
            uses[a] = AxisUse("serial")  # each thread walks over its own window
            continue
        most = SHORT_LOOP
        if not any(map(contraction, stages)):
            if _is_last(nest, a):
                most = ROWS[target.is_gpu] if a in nest.axes else REREAD_ROWS
            elif not target.is_gpu:
                most = 512
        if (n := static(a)) is not None and n <= most:
            uses[a] = AxisUse("whole", n)
    for t in nest.stages:
        reads = t.kind in REDUCTIONS and contraction(t) is None
        most = MOST[True] if len(t.over) == 1 else MOST[target.is_gpu] // 4
        if reads and prod(uses[a].size for a in t.over if a in uses) > most:
            if fixed & set(t.over):
                raise Unfit("two long loops are nested")
            for a in t.over:  # more elements than a tile holds: one of the axes in tiles, the others index by index
                uses.pop(a, None)
        left = [a for a in t.over if a not in uses]
        if contraction(t) is not None and len(t.over) > 1:  # one of several contracted axes lies in tiles
            windows = t.body is not None and any(map(row_digits, t.body.reads))  # tap by tap: channels lie between them
            uses.update({a: AxisUse("serial") for a in t.over if not is_plain(t, a) or windows and a is not t.over[-1]})
            left = [a for a in t.over if uses.get(a, AxisUse("loop")).kind != "serial"]
            deep = max(left, key=lambda a: (_is_last(nest, a), guess(a)), default=None)
            left = [a for a in left if a is not deep or a not in uses]
        else:
            deep = max(left, key=lambda a: (_is_last(nest, a), guess(a)), default=None)
        for a in left:  # the deepest axis is looped over in tiles, others index by index
            uses[a] = AxisUse("loop", 0) if a is deep else AxisUse("serial")
            if a in nest.axes and a is not deep:
                raise Unfit("two looped axes of an output")


def is_plain(t: Tensor, a: Axis) -> bool:
    """Whether the axis stands alone in indices, so that tiles along it can be copied."""
    return t.body is not None and all(i.op == "axis" for r in t.body.reads for i in r.args if a in i.axes)


def _is_last(nest: Nest, a: Axis) -> bool:
    """Whether the axis is the last index of the largest tensors: its elements are neighbours in memory."""
    reads = {r: prod(guess(x) for x in r.value.axes) for r in nest.global_reads() if a in r.axes and r.args}
    return not reads or any(a in r.args[-1].axes for r, n in reads.items() if n == max(reads.values()))


def is_window(nest: Nest, a: Axis) -> bool:
    """Whether an index of memory is the axis plus another one, and the rows along the axis overlap, or are short."""
    sums = [linear(i)[0] for r in nest.global_reads() for i in r.args if a in i.axes and len(i.axes) > 1]
    return any(guess(a) < ROW_OF_THREAD or a.extent not in f.values() or f.get(axis(a)) != 1 for f in sums)


# ---- contractions -----------------------------------------------------------------------------------------------------


def main_contraction(nest: Nest) -> tuple[Tensor, Contraction] | None:
    """The last contraction whose result has rows and columns of the outputs, or rows and looped columns."""
    for t in reversed(nest.stages):
        c = contraction(t)
        if c is not None and any(a in nest.axes for a in c.m) and any(a in nest.axes for a in c.n):
            return t, c
    return None


def _contraction_axes(plan: Plan, t: Tensor, c: Contraction, target: Target) -> None:
    nest, uses = plan.nest, plan.uses
    outer = {a for r in nest.global_reads() for i in row_digits(r)[:-1] for a in i.axes}  # no tiles of windows are along them
    row, column = (max(reversed([a for a in x if a in nest.axes]), key=lambda a: (a not in outer, guess(a)))
                   for x in (c.m, c.n))
    deep = [a for a in t.over if uses[a].kind == "loop"]
    before = [s for s in nest.stages if s is not t and contraction(s) is not None and column not in s.axes and
              any(a in deep for a in s.axes)]
    width = static(column)
    if before and width is not None and width <= WHOLE_COLUMNS and row not in uses:
        uses[column] = AxisUse("whole", width)
        _chain_sizes(plan, before, row, column, deep[0], target, exactness(c.a.dtype, target))
    else:
        _gemm_sizes(plan, t, c, row, column, deep, target)
    step = 16 if bits_of(c.a.dtype) >= 16 else 32
    for a, r in list(uses.items()):
        if r.kind == "loop" and r.size == 0:
            uses[a] = AxisUse("loop", 64)
    for a in nest.axes:
        uses.setdefault(a, AxisUse("grid"))
    contracted = {a for s in nest.stages if plan.gemm_of(s) is not None for a in (*s.over, *s.axes)}
    sorted_axes = {a for s in nest.stages if s.kind not in REDUCTIONS for a in (*s.over, *s.axes)}
    for a in contracted:  # instructions take whole steps of rows, columns and depth
        if uses[a].kind == "whole" and (a not in nest.axes or target.is_gpu):
            if a in sorted_axes and uses[a].size % step:
                raise Unfit("a scan or sort along an axis of a GEMM")
            uses[a] = AxisUse("whole", -(-uses[a].size // step) * step)


def _chain_sizes(plan: Plan, before: list[Tensor], row: Axis, column: Axis, deep: Axis, target: Target,
                 exact: str) -> None:
    """Rows of a block and columns of the first GEMM an iteration, for GEMMs of which one needs the other."""
    depth = max(guess(a) for s in before for a in s.over)
    others = prod(guess(a) for a in plan.nest.axes if a not in (row, column))
    seen = sum(1 for s in plan.nest.stages if column in s.axes and contraction(s) is not None)
    sizes = Sizes(1, guess(row), guess(deep), others, others, depth, guess(column) * seen)
    machine = chain_cost.machine_of(target)
    tiles = chain_cost.near_tiles(machine, sizes, Mask(), plan.choice.tile + 1) if plan.choice.tile else []
    tile = tiles[-1] if tiles else chain_cost.attention_tile(machine, sizes, Mask())
    if exact == "halves":  # each tile of the loop lies in shared memory four times: two stages, and its two halves
        columns = guess(column) * seen
        keys = next((x for x in (64, 32, 16) if 2 * depth + columns + 3 * x <= HALVES and 4 * (
            64 * (depth + x) + 4 * x * (depth + columns)) < machine.shared), 0)
        if not keys:
            raise Unfit("more halves of float32 operands than registers hold")
        tile = replace(tile, rows=64, keys=keys, stages=2, threads=128)
    if target.is_gpu and not exact and (n := static(deep)) is not None and n % tile.keys:
        even = [x for x in chain_cost.candidates(machine, sizes) if n % x.keys == 0 and x.keys >= 32]
        tile = min(even, key=lambda x: chain_cost.estimate(machine, sizes, Mask(), x)[0], default=tile)
    if target.is_gpu and machine.kind == "wgmma" and guess(column) * seen > GROUP_COLUMNS:
        tile = _wide_tile(plan, tile, column, deep, machine)
    half = replace(tile, rows=64, threads=128)
    if target.is_gpu and machine.kind == "wgmma" and tile.rows == 128 and others * -(-guess(row) // 128) < machine.sms and (
            chain_cost.registers(half, guess(column) * seen) < 250):
        tile = half  # as many steps of the same length, on twice as many processors
    plan.uses[row], plan.uses[deep] = AxisUse("tile", tile.rows), AxisUse("loop", tile.keys)
    plan.threads, plan.stages = tile.threads, tile.stages if target.is_gpu else 0
    plan.notes.append(f"{tile.rows} rows a block, {tile.keys} of the {guess(deep)} that they meet an iteration: "
                      f"the least cost of two GEMMs in a chain; {guess(column)} columns stay in registers")


def _wide_tile(plan: Plan, tile: ChainTile, column: Axis, deep: Axis, machine: chain_cost.Machine) -> ChainTile:
    """Two warp groups share the columns of 64 rows; what they multiply lies in shared memory."""
    along = {r for r in plan.nest.global_reads() if deep in r.axes}
    width = sum(prod(guess(a) for a in r.axes if a in plan.uses and a is not deep) * bits_of(r.dtype) // 8 for r in along)
    kept = sum(prod(guess(a) for a in r.axes if a in plan.uses and a is not deep) * bits_of(r.dtype) // 8
               for r in plan.nest.global_reads() - along)
    plan.shared_left = True
    for keys, stages in ((64, 2), (32, 3), (32, 2), (64, 1), (32, 1)):
        if 64 * kept + keys * (width * stages + 128) + 4096 <= machine.shared:
            return replace(tile, rows=64, keys=keys, stages=stages, threads=256)
    raise Unfit("more columns than shared memory holds")


def _gemm_sizes(plan: Plan, t: Tensor, c: Contraction, row: Axis, column: Axis, deep: list[Axis], target: Target) -> None:
    """The tile of a GEMM by the library's cost model; several accumulators of a block share its registers."""
    nest, uses = plan.nest, plan.uses
    k = guess(deep[0]) if deep else max(guess(a) for a in t.over)
    sums = sum(1 for s in nest.stages if contraction(s) is not None and row in s.axes and column in s.axes)
    batch = prod(guess(a) for a in nest.axes if a not in (row, column))
    bits = bits_of(c.a.dtype)
    exact = exactness(c.a.dtype, target)
    if exact:
        wide = exact == "halves" and batch * (guess(row) // 128) * (guess(column) * sums // 64) >= 2 * chip_of(target).sms
        most = 128 if target.has_wgmma else 64
        rows, columns, depth, threads = (128, most // sums, 32, 256) if wide else (64, 64 // sums, 32, 128)
        if exact == "threads":
            rows, columns, depth, threads = 64, 64, 16, 256
        tile = Tile(rows, columns, depth, 2, threads)
        plan.lanes = (column, row) if are_halves(c.a) else ()  # the other operand stands on the left, in registers
    else:
        kind = {8: "int8" if c.a.dtype.startswith(("int", "uint")) else "fp8", 16: "half", 32: "tf32"}.get(bits, "float")
        a_k, b_k = (any(bool(r.args) and a in r.args[-1].axes for r in f.reads for a in t.over) for f in (c.a, c.b))
        problem = TileProblem(guess(row), guess(column) * sums, k, batch, kind, bits, bits_of(nest.outputs[0][0].dtype),
                              a_k=a_k, b_k=b_k, may_split=False)
        tile = choose_tile(chip_of(target), problem)
        if plan.choice.tile:
            from tilelang.library.gemm.tuning_candidates import by_cost, of_all_kinds  # 40 ms, for tuned programs

            size, tiles = (tile.bm, tile.bn, tile.bk), of_all_kinds(by_cost(chip_of(target), problem))
            tile = next(islice((t for t in tiles if (t.bm, t.bn, t.bk) != size), plan.choice.tile - 1, None), tile)
        rows, columns, depth = tile.bm, max(16, tile.bn // sums // 16 * 16), tile.bk
        while target.is_cpu and bits == 8 and depth < min(k, 4 * tile.bk):  # as many bytes an iteration as of float32
            depth *= 2
        for r in nest.global_reads():
            depth = gcd(depth, r.value.attrs.get("channels", depth))  # tiles of windows end where their elements do
        if target.is_gpu and rows <= FEW_ROWS and (c.b.args[0] if c.b.op == "cast" else c.b).op != "read":
            columns = min(columns, COMPUTED_COLUMNS)
    if row not in uses:
        uses[row] = AxisUse("tile", rows)
    if column not in uses:
        uses[column] = AxisUse("tile", columns)
    uses.update({a: AxisUse("loop", depth) for a in deep})
    plan.threads, plan.swizzle = tile.threads, (tile.panel_size, tile.order) if target.is_gpu else None
    plan.stages = (min(tile.stages, 4) if sums == 1 else max(2, min(tile.stages, 3))) if target.is_gpu else 0
    plan.notes.append(f"tiles of {rows} x {columns} results, {depth} of the {k} terms of each an iteration: "
                      f"the least estimated cost for {guess(row)} x {guess(column)}{f', {sums} sums a tile' * (sums > 1)}")


# ---- rows and elements ------------------------------------------------------------------------------------------------


def _row_axes(plan: Plan, target: Target) -> None:
    """Element-wise kernels and reductions of elements: tiles of rows and columns with about BLOCK elements."""
    nest, uses, block = plan.nest, plan.uses, int(BLOCK * 2.0 ** plan.choice.elements)
    near = LANES if target.is_gpu else 2 * LANES
    reduced = set(_reducers(nest)) | {a for a in uses if uses[a].kind == "whole"}
    free = [a for a in nest.axes if a not in uses]
    if not nest.stages and (crossing := _transposed_axis(nest)) is not None:
        uses.update({a: AxisUse("tile", SQUARE) for a in (crossing, nest.axes[-1])})
        plan.notes.append(f"tiles of {SQUARE} x {SQUARE} are transposed in shared memory: reads and writes are of neighbours")
        return
    if target.is_gpu and _lanes(plan, free):
        return
    sorts = [t for t in nest.stages if t.kind == "order"]
    places = {a for t in sorts for a in t.axes if t.body is not None and a not in t.body.axes}
    width = prod(r.size for a, r in uses.items() if r.kind == "whole" and a not in places)
    for a, r in list(uses.items()):
        if r.kind == "loop" and not r.size:
            lanes = 1 if _is_last(nest, a) or not free else min(near, guess(free[-1]))
            size = min(max(8, block // (width * lanes)), 1 << max(3, (guess(a) - 1).bit_length()))
            uses[a] = AxisUse("loop", 1 << (size.bit_length() - 1))
            if len(uses) == 1 or any(a in e.axes and not e.axes.isdisjoint(uses.keys() - {a}) for e in nest.bodies()):
                width *= uses[a].size  # else it is walked by itself
    bodies = [t.body.axes for t in nest.stages if t.body is not None]
    windows = target.is_gpu and any(r.kind == "serial" and is_window(nest, a) for a, r in uses.items())
    rows = [r.axes for r in nest.global_reads() if nest.axes and nest.axes[-1] in r.axes] if windows else []
    for k, a in enumerate(reversed(free)):
        n = static(a)
        stages = [axes for axes in bodies if a in axes]
        width = max(prod(uses[x].size for x in axes if x in uses) for axes in stages or [e.axes for _, e in nest.outputs])
        reused = k and bodies and (not stages or any(a not in x for x in rows))  # computed or read once for rows of a tile
        room = max(1, (REUSED if reused else 1) * block // width)
        if not k and not reduced and width == 1:
            room = min(room, 1024)
        short = width * near <= 2 * BLOCK and any(r.kind == "loop" for r in uses.values())
        columns = not target.is_gpu and width <= WHOLE_DEPTH and reduced and not any(_is_last(nest, x) for x in reduced)
        if not k and width > 1 and (short or columns):
            room = max(room, near)
        size = min(room, 1 << max(0, (guess(a) - 1).bit_length()))
        size = 1 << (size.bit_length() - 1)
        if n is not None and n <= room:
            uses[a] = AxisUse("whole", n) if n > 1 else AxisUse("grid")
        elif size > 1 or not k:
            uses[a] = AxisUse("tile", size)
        following = free[-k - 2:-k - 1]
        if (n is None or n > room) and (not following or not bodies or any(following[0] in axes for axes in bodies)):
            break
    width = max(prod(uses[x].size for x in e.axes if x in uses) for e in nest.bodies())
    plan.threads = 512 if width > 16384 else 256 if width >= 1024 else 128
    if sorts and target.is_gpu:
        plan.threads = min(512, max(128, 1 << (width // SORTED_BY_THREAD - 1).bit_length()))
    plan.stages = 2 if target.is_gpu else 0
    looped = [a for a in uses if uses[a].kind == "loop"]
    kept = [a for a in uses if a in reduced and uses[a].kind == "whole"]
    if kept and not looped:
        plan.notes.append(f"whole rows of {' x '.join(str(uses[a].size) for a in kept)} lie in registers and are read once")
    elif looped:
        plan.notes.append(f"rows of {' x '.join(str(a.extent) for a in looped)} are read in pieces of "
                          f"{' x '.join(str(uses[a].size) for a in looped)}")


def _lanes(plan: Plan, free: list[Axis]) -> bool:
    """Lanes along the one loop of reductions have results of their own until it ends; False where that is not possible or slow.

    Lanes are neighbours in a long row; or, where columns are reduced, rows of a tile, whose neighbours threads read together.
    """
    nest, uses = plan.nest, dict(plan.uses)
    tiled = [a for a, r in uses.items() if r.kind == "loop"]
    if len(tiled) != 1:
        return False
    (a,) = tiled
    if any(x in uses and x is not a for t in nest.stages if a in t.over and t.body is not None for x in t.body.axes):
        return False
    n, threads, columns = guess(a), plan.threads, 0
    if _is_last(nest, a):
        if n < 2 * BLOCK or any(r.kind == "serial" for r in uses.values()):
            return False
        bits = min((bits_of(r.dtype) for r in nest.global_reads() if r.args and a in r.args[-1].axes), default=32)
        vector = max(4, min(16, 128 // bits))  # neighbours that a thread reads at once
        most = 256 * vector
        lanes = next((x for x in (most, most // 2, most // 4) if n % x == 0 and n < LONG), most)  # few hang over the end
        most = min(IN_FLIGHT, 4 * BLOCK // lanes)
        ahead = next((x for x in (most, 5, 3, 2) if n % (lanes * x) == 0 and x * lanes <= 6 * BLOCK), most)
        threads, again = max(64, lanes // vector), 2 * lanes
        note = f"rows of {a.extent} are read in pieces of {lanes * ahead}; each of {lanes} lanes has a result of its own"
    elif free:
        bits = max((bits_of(r.dtype) for r in nest.global_reads() if r.args and free[-1] in r.args[-1].axes), default=32)
        vector = max(1, min(8, 128 // bits))
        columns = min(LANES * vector, 1 << (guess(free[-1]) - 1).bit_length())
        lanes = max(1, min(threads * vector // columns, n))
        ahead, again = min(IN_FLIGHT, -(-n // lanes)), lanes * IN_FLIGHT
        note = f"{columns} columns a block; each of {lanes} rows has results of its own until all are read"
    else:
        return False
    rows: tuple[Axis, ...] = ()
    while True:
        loops = frozenset(x for x, r in uses.items() if r.kind in ("loop", "serial"))
        if (p := next((p for p in passes(nest, loops) if a in p.axes), None)) is None:
            break
        found = over_rows(nest, p, a, lanes)
        if found is None:
            return False
        nest, inner, lane = found
        uses |= {inner: AxisUse("loop", ahead), lane: AxisUse("whole", lanes)}
        rows += (lane,)
    uses[a] = AxisUse("loop", again)  # where the outputs have it
    if a not in nest.axes:
        del uses[a]
    if columns:
        uses[free[-1]] = AxisUse("whole" if static(free[-1]) == columns else "tile", columns)
        plan.lanes = rows
    plan.nest, plan.uses, plan.threads = nest, uses, threads
    plan.notes.append(note)
    return True


def _transposed_axis(nest: Nest) -> Axis | None:
    """The axis that is the last of a tensor that is read, but not of the output."""
    for r in sorted(nest.global_reads(), key=repr):
        last = r.args[-1].value if r.args and r.args[-1].op == "axis" else None
        if last in nest.axes[:-1] and nest.axes[-1] in r.axes and guess(last) >= SQUARE:
            return last
    return None
