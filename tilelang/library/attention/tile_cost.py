"""Chooses attention tiles by a cost model: cycles of the tensor cores, of exp2 and of the start of a tile.

    time of a tile of queries = start + (tiles of keys it sees) * step + (tiles it sees in part) * mask + store
    step  = max(MMAs of all its warp groups, one group's chain of GEMMs and softmax) + a fixed cost
    call  = waves of tiles over the SMs where tiles are equal; else their mean load and half the longest tile
    Where equal tiles fill no whole wave, blocks may divide the rest by keys: see partition_work.

The cost of every candidate that fits registers and shared memory is estimated, and the one of least cost is chosen; no shape is
looked up. Rates are cycles of one SM, measured on an H200; those of mma.sync are from the data sheet of sm_80.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log

from tilelang.target import Target
from tilelang.target.machine import MOST_REGISTERS, REGISTERS, REGISTERS_PER_SM, consumer_registers, kernel_rates

from ..gemm.tile import kind_of
from .form import Tile, WorkPartition
from .problem import Mask, Sizes, boxes

GROUP = 128  # threads of a warp group, which computes 64 rows
TMA_BOX = 8192  # bytes through which a warp group stores results: 64 rows of 128 bytes
_BESIDE = REGISTERS.overlapped_gemms  # registers beside scores, weights and accumulators: row statistics, addresses, loop state
_BESIDE_PIECES = 28  # the same where weights are computed between the steps of the GEMM that they are an operand of
_MMA = kernel_rates("mma")
_BESIDE_MMA = 28  # the same for mma.sync, beside its fragments of Q, K and V
_SPILLED = 16  # registers above those of a thread that may be spilled: 128 x 64 of 128 threads 365 TFLOP/s, 128 x 32 333
_PORT, _PORT_NORM = 128.0, 4  # bytes of shared memory per cycle; exponent for its time beside that of the MMAs
_STEP = 190.0  # fixed cycles of a step: barriers, the ends of GEMMs, reductions over quads
_HIDDEN = 130.0  # of these, what a third group hides
_LOADED = 52.0  # bytes of K and V that an SM loads in a cycle while all of them load: 64 rows of 256 columns wait for these
_MASK = 5.0  # cycles per key of a tile that queries see in part: index, comparison and selection for each score
_NEAR = 1.02  # of the least mean ratio of a tile for any lengths: taller tiles, then those with fewer keys, are as good
_ALIKE = 1.006  # costs that count as equal: 144 and 160 keys ran up to 0.7 % faster than 176 on an H200
_FAR = 1.4  # times the least cost: a tile above it is not worth timing
_LATENCY = 1400.0  # cycles from the request of a tile of keys to its arrival
_START, _STORE = 1300.0, 19.0  # cycles until the first scores; bytes stored per cycle
_MERGE, _MERGE_SPLIT, _MERGE_BYTES = 5000.0, 400.0, 2000.0  # cycles of a second launch, and per merged split; bytes per cycle
_CANDIDATES = 8  # work partitions that are compared, by the number of steps above the least one
_WORTH = 0.99  # of the time of whole tiles: a work partition takes memory and longer compilation
_MOST_TILES = 512  # tiles of one head whose costs are estimated one by one; more are sampled


@dataclass(frozen=True)
class Machine:
    """The machine that the cost of tiles is estimated for.

    kind: "wgmma", "mma" or "cpu". sms: SMs, or CPU cores. shared, shared_sm: bytes of shared memory of a block and of an SM.
    flops: of mma.sync, per cycle and SM. spilled: registers of a thread that may be spilled with mma.sync.
    """

    kind: str
    sms: int
    shared: int = 1 << 20
    shared_sm: int = 1 << 20
    flops: float = float(_MMA.mma)
    spilled: int = 0


def machine_of(target: Target, sms: int | None = None, dtype: str = "float16") -> Machine:
    """The numbers of a target.  sms: of the present device; None: of a common one.

    dtype "float32": tiles take twice the memory, and mma.sync multiplies them, in tf32: wgmma would need values with keys
    contiguous."""
    if dtype == "float32" and target.is_gpu:
        m = machine_of(target, sms)
        return Machine("mma", m.sms, m.shared // 2, m.shared_sm // 2, m.flops / 2)
    kind = kind_of(target)
    sms = sms or kernel_rates(kind, target.machine or 80).sm_count
    if kind == "cpu":
        return Machine(kind, sms)
    limits = target.limits
    rate = float(kernel_rates("mma", target.machine).mma)
    return Machine(kind, sms, limits.shared_per_block, limits.shared_per_sm, rate, _SPILLED)


def registers(tile: Tile, dim_v: int, beside: int = _BESIDE) -> int:
    """Registers of a thread: float32 scores and accumulators of its elements, 16-bit weights, and the rest."""
    rows = tile.rows / tile.threads
    return ceil(rows * (tile.keys + dim_v) + rows * tile.keys / 2) + beside


def registers_mma(tile: Tile, dim_v: int) -> int:
    """The same for mma.sync: fragments of K with the scores, or of V with the weights."""
    rows = tile.rows / tile.threads
    k, v = rows * (tile.keys + 16) + min(tile.keys, 128) / 2, rows * tile.keys / 2 + min(dim_v, 128) / 2
    return ceil(rows * dim_v + max(k, v)) + _BESIDE_MMA


def shared_bytes(tile: Tile, dim: int, dim_v: int) -> int:
    """Shared memory of a block in bytes: its queries and the stages of K and V, 16 bits an element, and barriers."""
    return 2 * (tile.rows * dim + tile.stages * tile.keys * (dim + dim_v)) + 1024


def steps(sizes: Sizes, mask: Mask, tile: Tile) -> list[tuple[int, int]]:
    """For each tile of queries of one head: the tiles of keys it sees, and how many of these only some of its queries see.

    The pairs are in order. Where there are many tiles, evenly spaced ones are sampled.
    """
    count = ceil(sizes.seq_q / tile.rows)
    out = []
    for i in range(0, count, ceil(count / _MOST_TILES)):
        at = i * tile.rows + sizes.seq_k - sizes.seq_q
        end = sizes.seq_k if mask.right is None else max(0, min(sizes.seq_k, at + tile.rows + mask.right))
        first = 0 if mask.left is None else max(0, at - mask.left) // tile.keys
        last = max(first, ceil(end / tile.keys))
        # Keys from `whole` to `limit` are seen by all queries: the first query sees the fewest keys to the right, the last to
        # the left.
        whole = 0 if mask.left is None else max(0, at + tile.rows - 1 - mask.left)
        limit = sizes.seq_k if mask.right is None else max(0, min(sizes.seq_k, at + 1 + mask.right))
        inner = max(0, limit // tile.keys - max(first, ceil(whole / tile.keys)))
        out.append((last - first, last - first - min(inner, last - first)))
    return out


def step_cycles(m: Machine, tile: Tile, dim: int, dim_v: int, window: bool = False) -> float:
    """Cycles of an SM for one tile of keys. window: whether queries have a first key, for which each step tests.

    wgmma: 64 rows by N columns take max(N/2, 16 + N/4) cycles for 16 of k from shared memory, max(N/2, 13) from registers.
    exp2: 16 per cycle; the maximum, the sum and the conversion of a score take half as long again.
    """
    keys, blocks = tile.keys, tile.rows / 64
    softmax = 5.5 * keys + 180
    if m.kind == "wgmma":
        scores = ceil(dim / 16) * max(keys / 2, 16 + keys / 4)
        values = ceil(keys / 16) * max(dim_v / 2, 13)
        # Reads of operands bound scores of up to 64 keys: no third group's run under the fixed costs of the others.
        fixed = _STEP - (_HIDDEN if blocks > 2 and keys > 64 and not window else 0.0)
        return max(max(blocks * (scores + values), scores + max(values, softmax)) + fixed, 2 * keys * (dim + dim_v) / _LOADED)
    products = 2 * tile.rows * keys * (dim + dim_v) / (0.75 * m.flops)
    loads = 2 * keys * (dim + dim_v) / _MMA.l2
    read = 2 * (tile.threads / 32 * keys * (dim + dim_v) + tile.rows * dim) / _PORT  # each warp reads K and V, for its rows
    products = (products**_PORT_NORM + read**_PORT_NORM)**(1 / _PORT_NORM)
    most = min(MOST_REGISTERS, registers_mma(tile, dim_v))
    resident = min(m.shared_sm // shared_bytes(tile, dim, dim_v), REGISTERS_PER_SM // (tile.threads * most))
    hidden = min(1.0, max(1, resident) * tile.rows / 128)  # 16 rows each at different points of the loop keep both units busy
    softmax *= blocks
    late = _LATENCY if tile.stages == 1 else 0.0  # nothing is loaded ahead
    return max(products, softmax, loads) + (1 - hidden) * min(products, softmax) + (_STEP + late) / max(1, resident)


def estimate(m: Machine, sizes: Sizes, mask: Mask, tile: Tile) -> tuple[float, WorkPartition | None]:
    """(estimated cycles of a call, its work partition by keys; None where each tile is computed by one block).

    A partition covers the tiles that fill no whole wave or, with a mask and few tiles, all tiles.
    """
    seen = steps(sizes, mask, tile)
    whole, longest = _whole(m, sizes, mask, tile, seen)
    if m.kind != "wgmma":
        return whole, None
    divided = _last_wave(m, sizes, tile, longest) if mask == Mask() else _equal_splits(m, sizes, tile, seen)
    return (whole, None) if divided is None or divided[0] > _WORTH * whole else divided


def _whole(m: Machine, sizes: Sizes, mask: Mask, tile: Tile, seen: list[tuple[int, int]]) -> tuple[float, float]:
    """Cycles of a call in which each tile is computed by one block, and of its longest tile. seen: as returned by `steps`."""
    step, beside = step_cycles(m, tile, sizes.dim, sizes.dim_v, mask.left is not None), _beside(sizes, tile)
    cut = 0.0 if mask == Mask() else _MASK * tile.keys  # only a ragged end is masked, in front of the loop
    times = [beside + n * step + masked * cut for n, masked in seen]
    tiles, longest = _tiles(sizes, tile), max(times)
    if min(times) < longest:
        return max(longest, tiles * sum(times) / len(times) / m.sms + longest / 2), longest
    return ceil(tiles / m.sms) * longest, longest


def whole_cost(m: Machine, sizes: Sizes, mask: Mask, tile: Tile) -> float:
    """Estimated cycles of a call in which each tile is computed by one block."""
    return _whole(m, sizes, mask, tile, steps(sizes, mask, tile))[0]


def divided_cost(m: Machine, sizes: Sizes, mask: Mask, tile: Tile) -> float:
    """Estimated cycles of a call with the best number of equal splits of each tile, which may be one."""
    seen = steps(sizes, mask, tile)
    divided = _equal_splits(m, sizes, tile, seen)
    whole = _whole(m, sizes, mask, tile, seen)[0]
    return whole if divided is None else min(whole, divided[0])


def open_splits(m: Machine, sizes: Sizes, mask: Mask) -> tuple[Tile, int] | None:
    """The tile of a kernel for any lengths whose blocks divide keys, and into how many splits; None where whole tiles take no
    longer."""
    if m.kind != "wgmma":
        return None
    dims = sizes.dim, sizes.dim_v
    tile = open_tile(m, dims, mask, True)
    divided = _equal_splits(m, sizes, tile, steps(sizes, mask, tile))
    whole = whole_cost(m, sizes, mask, open_tile(m, dims, mask))
    return None if divided is None or divided[0] > _WORTH * whole else (tile, divided[1].steps)


def _tiles(sizes: Sizes, tile: Tile) -> int:
    return ceil(sizes.seq_q / tile.rows) * sizes.heads * sizes.batch


def _beside(sizes: Sizes, tile: Tile) -> float:
    """Cycles of a tile besides its steps."""
    return _START + 2 * tile.rows * sizes.dim_v / _STORE


def _last_wave(m: Machine, sizes: Sizes, tile: Tile, longest: float) -> tuple[float, WorkPartition] | None:
    """(cycles of a call, the best partition of the tiles of its last wave); None where the last wave is full.

    longest: cycles of a tile. A split starts and ends like a tile, and stores twice the bytes.
    """
    tiles, n = _tiles(sizes, tile), ceil(sizes.seq_k / tile.keys)
    rest = tiles % m.sms
    if not rest:
        return None
    step = step_cycles(m, tile, sizes.dim, sizes.dim_v)
    split = _beside(sizes, tile) + 2 * tile.rows * sizes.dim_v / _STORE
    even = ceil(rest * n / m.sms)

    def cycles(p: WorkPartition) -> float:
        moved = 8 * p.splits * tile.rows * sizes.dim_v  # float32, written and read
        merged = _MERGE + _MERGE_SPLIT * (1 + ceil(n / p.per_block)) + moved / _MERGE_BYTES
        return tiles // m.sms * longest + p.per_block * step + (2 if p.cross else 1) * split + merged

    found = [WorkPartition(tiles - rest, rest, n, per_block, m.sms) for per_block in range(even, min(n, even + _CANDIDATES))]
    return min(((cycles(p), p) for p in found), default=None)


def _equal_splits(m: Machine, sizes: Sizes, tile: Tile, seen: list[tuple[int, int]]) -> tuple[float, WorkPartition] | None:
    """(cycles of a call, the best number of splits) of tiles that all run at once, each in the same number of splits.

    None where there are too few SMs for two splits. seen: as returned by `steps`.
    """
    tiles, longest = _tiles(sizes, tile), max(n for n, _ in seen)
    step, split = step_cycles(m, tile, sizes.dim, sizes.dim_v), _beside(sizes, tile) + 2 * tile.rows * sizes.dim_v / _STORE
    masked, each = max(masked for _, masked in seen), 8 * tiles * tile.rows * sizes.dim_v  # bytes of a split of every tile

    def cycles(splits: int) -> float:
        taken = ceil(longest / splits)
        merged = _MERGE + _MERGE_SPLIT * (1 + splits) + splits * each / _MERGE_BYTES
        return split + taken * step + min(taken, masked) * _MASK * tile.keys + merged

    most = min(longest, m.sms // max(1, tiles))
    return min(((cycles(n), WorkPartition(0, tiles, n, 1, m.sms)) for n in range(2, most + 1)), default=None)


def candidates(m: Machine, sizes: Sizes, plain: bool = False) -> Iterator[Tile]:
    """The tiles that fit the machine. plain: where no late GEMM fits the registers of three warp groups, the steps of V follow
    their weights, if the loop has no mask but a causal one; below 64 columns there is little to run under them."""
    if m.kind == "wgmma":
        for groups in (2, 3, 1):
            for keys in range(176, 15, -16):
                tile = Tile(groups * 64, keys, 2, groups * GROUP)
                room = m.shared - groups * TMA_BOX
                most = consumer_registers(groups)
                pieces = plain and groups == 3 and sizes.dim_v >= 64 and sizes.seq_k % keys == 0
                used = registers(tile, sizes.dim_v, _BESIDE_PIECES if pieces else _BESIDE)
                stored = boxes(sizes.dim), boxes(sizes.dim_v)
                if used > most or shared_bytes(tile, *stored) > room:
                    continue
                wanted = min(4, 1 + ceil(_LATENCY / step_cycles(m, tile, sizes.dim, sizes.dim_v)))
                while wanted > 2 and shared_bytes(replace(tile, stages=wanted), *stored) > room:
                    wanted -= 1
                yield replace(tile, stages=max(2, wanted))
        return
    for rows, threads in ((128, 256), (128, 128), (64, 128)):
        for keys in (128, 64, 32, 16):
            for stages in (2, 1):
                tile = Tile(rows, keys, stages, threads)
                if registers_mma(tile, sizes.dim_v) <= MOST_REGISTERS + m.spilled and (
                        shared_bytes(tile, sizes.dim, sizes.dim_v) <= m.shared):
                    yield tile
                    break


@lru_cache(maxsize=4096)
def attention_tile(m: Machine, sizes: Sizes, mask: Mask, plain: bool = False) -> Tile:
    """The tile of the least estimated cost. sizes: ints; for packed sequences those of a mean one. plain: see `candidates`.

    Among tiles of the same rows and about the same cost, the one with fewest keys is chosen: it needs fewest registers and
    compiles fastest.
    """
    if m.kind == "cpu":
        # Measured from 16x64 to 128x256 on two cores: taller tiles read K and V less often; wider ones change nothing.
        return Tile(16 if sizes.seq_q <= 16 else 64 if sizes.seq_q <= 64 else 128, 64, 1, 128)
    found = ((tile, *estimate(m, sizes, mask, tile)) for tile in candidates(m, sizes, plain and mask.left is None))
    costs = {tile: cost for tile, cost, divided in found if divided is None or tile.threads < 3 * GROUP or
             registers(tile, sizes.dim_v) <= consumer_registers(3)}
    if not costs:
        return Tile(64, 16, 1, 128)
    best = min(costs, key=lambda t: costs[t])
    return min((t for t in costs if t.rows == best.rows and costs[t] <= _ALIKE * costs[best]), key=lambda t: t.keys)


_LENGTHS = tuple(Sizes(1, n, n, heads, heads, 0, 0) for heads in (32, 128) for n in (1024, 2048, 4096, 8192, 16384))
_MANY_KEYS = tuple(Sizes(1, n, keys, 8, 8, 0, 0) for n in (16, 64, 256) for keys in (2048, 8192, 32768))


@lru_cache(maxsize=4096)
def open_tile(m: Machine, dims: tuple[int, int], mask: Mask, divided: bool = False) -> Tile:
    """The tile of a kernel for any lengths: that of the least mean ratio to the cost of the best tile, over many lengths.

    dims: of q and k, and of v. divided: for blocks that divide keys.
    """
    if m.kind == "cpu":
        return attention_tile(m, Sizes(1, 128, 128, 1, 1, *dims), mask)
    ratios: dict[Tile, float] = {}
    for z in _MANY_KEYS if divided else _LENGTHS:
        z = z._replace(dim=dims[0], dim_v=dims[1])
        costs = {t: (divided_cost if divided else whole_cost)(m, z, mask, t) for t in candidates(m, z)}
        for t, cost in costs.items():
            ratios[t] = ratios.get(t, 0.0) + log((cost + _MERGE) / (min(costs.values()) + _MERGE))
    near = min(ratios.values(), default=0.0) + len(_MANY_KEYS if divided else _LENGTHS) * log(_NEAR)
    return min((t for t in ratios if ratios[t] <= near), key=lambda t: (-t.rows, t.keys), default=Tile(64, 16, 1, 128))


def near_tiles(m: Machine, sizes: Sizes, mask: Mask, most: int) -> list[Tile]:
    """The tiles that are worth timing, at most `most`: the model's, those of least cost, then the best ones with other rows."""
    model = attention_tile(m, sizes, mask)
    found = ((estimate(m, sizes, mask, t)[0], k, t) for k, t in enumerate(candidates(m, sizes)))
    ordered = sorted(found, key=lambda x: x[:2])
    near = [t for cycles, _, t in ordered if cycles <= _FAR * ordered[0][0]]
    others = list({t.rows: t for t in reversed(near)}.values())
    return list(dict.fromkeys([model, *near[:most // 2], *others, *near]))[:most]
