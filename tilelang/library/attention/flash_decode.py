"""`flash_decode`: attention of a few new queries a sequence against its cached keys, in pages or in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from ..agreement import Disjoint
from ..arrays import SEQUENCES, compact, compact_copy, in_chunks, maker
from ..caches import Cache, Prepared, enter, known
from ..place import Place
from .build import decode_kernel
from .decode_problem import DecodeProblem, DecodeSizes, decode_problem
from .decode_kernels import narrow_blocks
from .decode_plan import DecodePlan, PlanCosts, check_plan, plan_on_device
from .form import DecodeForm, Tile
from .inputs import check_disjoint, check_gradient, check_scale, check_tensors, running_on
from .tile_cost import Machine, machine_of, shared_bytes

_MOST_SPLITS = 64
_LONGEST = 8192  # keys of a split of a sequence that fills its table: others may be shorter, and wait for it
_RATE, _STEP, _START = 19.0, 500.0, 1500.0  # bytes per cycle and SM from memory; cycles of a step; cycles before the first step
# Narrow caches: cycles of a step of a block that is alone on its SM, fixed ones, those of an element, and of one and a row;
# cycles of an SM for an element, and for one and a row; of a row of a split that is merged; the exponent for latencies beside
# throughput.
_ALONE, _ALONE_ELEMENT, _ALONE_ROW = 930.0, 0.0375, 0.0006
_CONVERT, _CONVERT_ROW, _MERGE_ROW, _NORM = 0.0274, 0.0006, 1.0, 4
_ALONE_WIDE = 0.06  # of an element of 16 bits
_MERGE, _MERGE_SPLIT = 4000.0, 60.0  # cycles of the second launch, and for each split
_WAVES = 2  # of pieces that a plan may add
_LONG = 600e3  # cycles of full tables from which on a call makes its own plan


def decode_choice(p: DecodeProblem, machine: Machine) -> tuple[Tile, int]:
    """The cost model's choice: (tile, splits)."""
    tile, caches = tile_and_caches(p, machine)
    return tile, p.splits or decode_splits(machine, p.sizes, tile, caches)


class Caches(NamedTuple):
    """What the cost model takes of caches. blocks: of an SM at once; 0: a block alone loads as fast as an SM can. narrow:
    whether they are. latent: whether V is loaded with K."""

    blocks: int = 0
    narrow: bool = False
    latent: bool = False


ALONE = Caches()


def tile_and_caches(p: DecodeProblem, machine: Machine) -> tuple[Tile, Caches]:
    """The tile, and what the cost model takes."""
    if p.kv_dtype == p.dtype:
        tile = decode_tile(machine, p.sizes)
        return tile, Caches(2 if several_blocks(machine, p.sizes, tile, p.dtype) else 0)
    tile = narrow_tile(machine, p.sizes, exact=p.dtype == "float16")
    if machine.kind != "wgmma":
        return tile, Caches()
    return tile, Caches(narrow_blocks(p.sizes, tile, wide=is_wide(machine, p.sizes)), True)


def several_blocks(m: Machine, sizes: DecodeSizes, tile: Tile, dtype: str) -> bool:
    """Whether an SM of sm_90 has room for two blocks of caches of 16 bits. dtype: of the caches."""
    shared = shared_bytes(tile, *sizes.columns) + 1024
    return m.kind == "wgmma" and dtype in ("float16", "bfloat16") and 2 * shared <= m.shared_sm


def decode_tile(m: Machine, sizes: DecodeSizes) -> Tile:
    """The tile: rows for all queries that share a kv head, where two warp groups have room for them, keys that divide a page,
    stages that keep enough bytes in flight."""
    dims = sum(sizes.columns)
    keys = _keys(sizes, 32, 96 if dims <= 128 else 64 if dims <= 384 or m.kind == "wgmma" else 32)
    if m.kind == "cpu":
        return Tile(max(16, min(64, ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / 16) * 16)), keys, 1, 128)
    two = 2 * 2 * keys * dims  # bytes of two stages
    rows = 128 if m.kind == "wgmma" and sizes.seq_q * sizes.heads > 64 * sizes.kv_heads else 64
    ring = max(64 << 10, min(two, 128 << 10)) if m.kind == "wgmma" and rows == 64 else 128 << 10  # two blocks per SM
    for stages in range(6 if m.kind == "wgmma" else 4, 1, -1):
        tile = Tile(rows, keys, stages, 2 * rows)
        if stages * two // 2 <= ring and shared_bytes(tile, *sizes.columns) <= m.shared:
            return tile
    return Tile(64, 16, 2, 128)


def is_wide(m: Machine, sizes: DecodeSizes, latent: bool = False) -> bool:
    """Whether the rows of a tile are rows of GEMMs, of which one takes float8, where caches are narrow (DecodeForm.wide)."""
    rows = sizes.seq_q * sizes.heads // max(1, sizes.kv_heads)
    fits = sizes.dim % 32 == sizes.dim_v % 16 == 0 and sizes.dim + sizes.dim_v <= 256
    return m.kind == "wgmma" and rows > 32 and fits and not latent


def narrow_tile(m: Machine, sizes: DecodeSizes, latent: bool = False, exact: bool = False) -> Tile:
    """The tile for caches of float8: rows are columns of instructions, in steps of 8, as many as leave registers for their
    accumulators, the same in all blocks of a kv head. exact: whether queries are sums of three float8."""
    used = sizes.seq_q * sizes.heads // max(1, sizes.kv_heads)
    if is_wide(m, sizes, latent):
        rows = 64 * min(2, ceil(used / 64))
        most = 64 if exact and rows == 64 and sizes.dim + sizes.dim_v > 192 else 128  # an SM has room for two blocks
        return Tile(rows, _keys(sizes, most, most), 2 if rows == 64 and most == 128 else 3, 2 * rows + 128)
    blocks = ceil(used / max(8, min(64, 16384 // sizes.dim_v // 8 * 8)))
    most = 64 if m.kind == "wgmma" or sizes.dim + sizes.dim_v <= 384 else 32
    keys = _keys(sizes, most, most)
    return Tile(max(8, ceil(used / max(1, blocks) / 8) * 8), keys, 1 if m.kind == "cpu" else 2, 128)


def _keys(sizes: DecodeSizes, least: int, most: int) -> int:
    """Keys of a tile, which lies in one page, or has whole pages where one with `least` keys or more lies in none."""
    page, tiles = sizes.page_size, range(most, 15, -16)
    if page is None:
        return most
    in_one, whole = ([n for n in tiles if page % n == 0], [n for n in tiles if n % page == 0])
    return max([n for n in in_one if n >= least] or whole or in_one)


class Steps(NamedTuple):
    """The cost model of a decode step. tiles: of queries. steps: of a tile whose sequence fills its table. at_once: blocks of
    an SM at once. loop: cycles of a step, of so many blocks of an SM at once. merged: cycles in which a split is merged."""

    tiles: int
    steps: int
    at_once: int
    loop: Callable[[int], float]
    merged: float


def decode_steps(sizes: DecodeSizes, tile: Tile, caches: Caches) -> Steps:
    """The cost model of these sizes."""
    blocks, narrow, latent = caches
    elements = tile.keys * (sizes.dim + sizes.dim_v)
    loaded = tile.keys * sizes.dim if latent else elements
    step = max(loaded / _RATE, elements * (_CONVERT + _CONVERT_ROW * tile.rows)) if narrow else max(_STEP, 2 * elements / _RATE)
    alone = _ALONE + elements * (_ALONE_ELEMENT + _ALONE_ROW * tile.rows if narrow else _ALONE_WIDE)

    def loop(at_once: int) -> float:
        return ((alone**_NORM + (at_once * step)**_NORM)**(1 / _NORM) if blocks else step) * (at_once > 0)

    return Steps(sizes.batch * sizes.kv_heads * _row_blocks(sizes, tile),
                 max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys)), blocks or 1, loop,
                 sizes.batch * sizes.seq_q * sizes.heads * _MERGE_ROW if blocks else 0.0)


def _row_blocks(sizes: DecodeSizes, tile: Tile) -> int:
    """Tiles of queries of a sequence and a kv head."""
    return ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / tile.rows)


def decode_splits(m: Machine, sizes: DecodeSizes, tile: Tile, caches: Caches = ALONE) -> int:
    """The number of splits of the keys of a sequence that fills its table, with the least cost in cycles."""
    tiles, steps, at_once, loop, merged = decode_steps(sizes, tile, caches)

    def cost(n: int) -> float:
        each = ceil(tiles * n / m.sms)  # blocks that an SM computes
        waves, rest = divmod(each, at_once)
        starts = (waves + (rest > 0)) * _START
        merge = (n > 1) * (_MERGE + n * (_MERGE_SPLIT + merged))
        return starts + ceil(steps / n) * (waves * loop(at_once) + loop(rest)) + merge

    most = min(_MOST_SPLITS, steps)
    return min(range(min(most, ceil(steps * tile.keys / _LONGEST)), most + 1), key=cost)


def plan_costs(m: Machine, sizes: DecodeSizes, tile: Tile, caches: Caches) -> PlanCosts:
    """What a plan for these sizes weighs."""
    _, _, at_once, loop, _ = decode_steps(sizes, tile, caches)
    step, pieces = loop(at_once), m.sms * at_once / max(1, sizes.kv_heads * _row_blocks(sizes, tile))
    return PlanCosts(pieces, _START / step, sizes.seq_q * sizes.heads * _MERGE_ROW * pieces / step, _MERGE / step,
                     loop(1) / step)


def more_items(costs: PlanCosts) -> int:
    """Items of a plan beside one for each sequence."""
    return _WAVES * ceil(costs.at_once)


def plans_itself(m: Machine, sizes: DecodeSizes, tile: Tile, caches: Caches) -> bool:
    """Whether calls make a plan of their own: without one every sequence would be divided, as if it filled its table, and full
    tables take so long that the plan's launch does not count."""
    tiles, steps, at_once, loop, _ = decode_steps(sizes, tile, caches)
    return (m.kind == "wgmma" and sizes.batch > 1 and tiles * steps * loop(at_once) / (at_once * m.sms) > _LONG
            and decode_splits(m, sizes, tile, caches) > 1)


class Division(NamedTuple):
    """How blocks divide the keys. splits: of each sequence; 1 with a plan. workspace: shapes of means and logarithms.
    make_plan: makes a plan of lengths; where splits are equal there is none."""

    splits: int
    workspace: tuple[tuple[int, ...], ...]
    planned: bool
    make_plan: Callable[[Any], DecodePlan]


def planned_division(m: Machine, z: DecodeSizes, tile: Tile, caches: Caches, window: int | None, at: Place) -> Division:
    """The division by a plan. window: keys that a query sees; None: all."""
    costs = plan_costs(m, z, tile, caches)
    more = more_items(costs)
    return Division(1, ((2 * more, z.seq_q, z.heads, z.dim_v), (2 * more, z.heads, z.seq_q)), True,
                    lambda lengths: plan_on_device(lengths, tile, z.seq_q, window, costs, more, at))


def equal_division(z: DecodeSizes, splits: int) -> Division:
    """The division of every sequence into so many splits."""
    shapes = ((splits, z.batch, z.seq_q, z.heads, z.dim_v), (splits, z.batch, z.heads, z.seq_q)) if splits > 1 else ()
    return Division(splits, shapes, False, _no_plan)


def _no_plan(lengths: Any) -> DecodePlan:
    raise AssertionError("equal splits need no plan")


def near_choices(sizes: DecodeSizes, model: tuple[Tile, int], any_splits: bool) -> list[tuple[Tile, int]]:
    """The pairs (tile, splits) that are worth timing: the model's, other numbers of splits, narrower tiles, fewer stages.

    any_splits: whether the number of splits may vary.
    """
    tile, splits = model
    steps = max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys))
    counts = [n for n in (splits * 2, ceil(splits * 1.5), splits * 3 // 4, splits // 2, 1, splits + 1)
              if 1 <= n <= min(_MOST_SPLITS, steps)]
    tiles = [replace(tile, stages=max(2, tile.stages // 2))]
    if tile.keys % 32 == 0:
        tiles.append(replace(tile, keys=tile.keys // 2, stages=min(8, 2 * tile.stages)))
    return list(dict.fromkeys([model, *((tile, n) for n in counts if any_splits), *((t, splits) for t in tiles)]))


def flash_decode(q: Any, k_cache: Any, v_cache: Any, lengths: Any, *, block_table: Any = None, scale: float | None = None,
                 k_scale: float = 1.0, v_scale: float = 1.0, window: int | None = None, splits: int | None = None,
                 plan: DecodePlan | None = None, return_lse: bool = False, out: Any = None, target: Any = None,
                 tune: bool | None = None) -> Any:
    """softmax(scale * q k^T) v for the newest queries of each sequence, over its cached keys and values.

    q: (batch, seq_q, heads, dim), or (batch, heads, dim) for one query each.  lengths: (batch,) int32, keys of each sequence,
    the queries' own included; their values are not read on the host.  Query i stands at key position lengths - seq_q + i and
    sees the keys up to there, with window=w the last w of them.  A query that sees none gives 0 and the logarithm -inf.
    float16, bfloat16 or float32 (GEMMs in tf32 on a GPU); caches alike, or for queries of 16 bits both float8_e4m3fn, whose
    elements count k_scale and v_scale each; dim and dim_v multiples of 8 up to 256; heads is a multiple of kv_heads.

    With block_table (batch, pages a sequence may have), int32: k_cache (pages, page_size, kv_heads, dim), v_cache (…, dim_v);
    key p of sequence b is row p % page_size of page block_table[b, p // page_size].  page_size is a multiple of 16.  Entries
    beyond a sequence's length are not read.  Without: k_cache (batch, capacity, kv_heads, dim).
    lengths must not exceed what table or cache hold.  Rows of a sequence's last page behind its end, and of a cache in one
    piece, get weight 0, so they must be finite.

    splits: blocks that share the keys of a sequence; None: from a cost model of the capacity.  plan: decode_plan of the same
    arguments, made once for all layers of a step; None: made here where full tables take long.  Other arguments and the error
    bound: as flash_attention; with float8 caches scores may be off by 2^-13 scale |q||k| besides, since the MMAs of
    sm_90 accumulate float8 values with about 13 bits.  return_lse: (batch, heads, seq_q), or (batch, heads).
    Results are the same bits for the same inputs, splits and plan.
    tune: as for flash_attention; tiles and splits are timed with the lengths of the first call.

    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> k, v = (rng.standard_normal((6, 16, 2, 64)).astype(np.float16) for _ in range(2))
    >>> table, lengths = np.array([[4, 1, 0], [3, 5, 2]], np.int32), np.array([40, 20], np.int32)
    >>> flash_decode(rng.standard_normal((2, 8, 64)).astype(np.float16), k, v, lengths, block_table=table).shape
    (2, 8, 64)
    """
    arrays = q, k_cache, v_cache, lengths, block_table
    options = window, splits, return_lse, str(target), tune, None if plan is None else plan.form
    answer = known(_RUNS, (*arrays, out), options)
    if answer is None:
        answer = enter(_RUNS, (*arrays, out), options, prepare(
            dict(zip(NAMES, (*arrays, out))), target, tune, scale, plan, window=window, splits=splits, with_lse=return_lse))
    check_gradient("flash_decode", q, k_cache, v_cache)
    scale = answer.scale if scale is None else check_scale(scale)
    k_scale, v_scale = check_scale(k_scale), check_scale(v_scale)
    if out is not None:
        check_disjoint(answer.disjoint, out, q, {"k_cache": k_cache, "v_cache": v_cache})
    result, lse = answer.result() if out is None else out, answer.logs() if return_lse else None
    answer.run(arrays, (scale * k_scale, v_scale), result, lse, plan)
    return (result, lse) if return_lse else result


NAMES = "q", "k_cache", "v_cache", "lengths", "block_table", "out"
_RUNS: Cache[Prepared] = Cache(4096)


def decode_plan(q: Any, k_cache: Any, v_cache: Any, lengths: Any, *, block_table: Any = None, window: int | None = None,
                target: Any = None) -> DecodePlan | None:
    """Divide the keys of all sequences among the blocks of flash_decode, once for all layers of a decode step.

    Arguments: those of the calls that use the plan, as for flash_decode.  Of the tensors only `lengths` are read, by a kernel:
    nothing waits for the host, and the call can be captured in a CUDA graph.  Layers whose shapes, types or windows differ need
    plans of their own.  Sequences that are longer than others are divided, so that all blocks end at about the same time.
    Returns None where there is nothing to compute, and for more than 32,767 sequences, which take several launches.

    Raises attention-argument, attention-shape, attention-option.

    >>> k = np.zeros((2, 640, 2, 64), np.float16)
    >>> plan = decode_plan(np.zeros((2, 8, 64), np.float16), k, k, np.array([640, 20], np.int32))
    >>> sorted(plan.items[plan.items[:, 0] == 1].tolist())
    [[1, 20, 0, 1, -1]]
    """
    tensors = dict(zip(NAMES, (q, k_cache, v_cache, lengths, block_table, None)))
    p, machine, at = _checked(tensors, target, window=window, splits=None, with_lse=False)
    if p.empty or p.sizes.batch > SEQUENCES:  # several launches, each with a plan that it needs
        return None
    return planned_division(machine, p.sizes, *tile_and_caches(p, machine), p.window, at).make_plan(lengths)


def _checked(tensors: dict[str, Any], target: Any, **options: Any) -> tuple[DecodeProblem, Machine, Place]:
    """Check the arguments: the problem, and where it is computed. tensors, options: as decode_problem takes them."""
    check_tensors("flash_decode", tensors, NAMES[:1], NAMES[4:])
    at = running_on(tensors["q"], target)
    problem = decode_problem(tensors, at.target.is_gpu, **options)
    return problem, machine_of(at.target, at.sms, problem.dtype), at


def prepare(tensors: dict[str, Any], target: Any, tune: bool | None, scale: Any, plan: DecodePlan | None = None,
            **options: Any) -> Prepared:
    """Check the arguments, and find or compile their kernel. tensors, options: as decode_problem takes them."""
    problem, machine, at = _checked(tensors, target, **options)
    q, k, v, *_, out = tensors.values()
    if problem.sizes.batch > SEQUENCES:
        return Prepared(_by_sequences(target, tune, options["window"], options["splits"]),
                        maker(q, problem.shape, problem.dtype), maker(q, problem.lse_shape, "float32"), problem.default_scale,
                        None if out is None else Disjoint(out, (q, k, v)))
    tuned = not problem.empty and problem.kv_dtype == problem.dtype and plan is None and at.tuned(tune, q)
    choice = _tuned(problem, machine, tensors, scale, at) if tuned else None
    return Prepared(_run(problem, machine, at, q, choice, plan), maker(q, problem.shape, problem.dtype),
                    maker(q, problem.lse_shape, "float32"), problem.default_scale,
                    None if out is None else Disjoint(out, (q, k, v)), tuned is None)


def _by_sequences(target: Any, tune: bool | None, window: int | None, splits: int | None) -> Callable[..., None]:
    """A function as _run gives it, for more sequences than a launch takes."""
    def run(arrays: tuple[Any, ...], scales: tuple[float, float], out: Any, lse: Any, plan: None = None) -> None:
        _, k, v, _, table = arrays

        def some(q: Any, lengths: Any, out: Any, lse: Any, table: Any, k: Any = k, v: Any = v) -> None:
            found = flash_decode(q, k, v, lengths, block_table=table, scale=scales[0], v_scale=scales[1], window=window,
                                 splits=splits, return_lse=lse is not None, out=out, target=target, tune=tune)
            if lse is not None:
                lse[...] = found[1]

        in_chunks(some, SEQUENCES, arrays[0], arrays[3], out, lse, table, *(() if table is not None else (k, v)))

    return run


def _run(problem: DecodeProblem, machine: Machine, at: Place, like: Any, choice: tuple[Tile, int] | None,
         plan: DecodePlan | None = None) -> Callable[..., None]:
    """A function f(arrays, scales, out, lse, plan) that computes a problem. choice: (tile, splits) instead of the cost model's.
    plan: like those of the calls; None: they have none."""
    p, z = problem, problem.sizes
    if p.empty:
        return lambda *_: None
    tile, caches = tile_and_caches(p, machine)
    if plan is not None:
        check_plan(plan, z, more_items(plan_costs(machine, z, tile, caches)), tile, p.splits)
    itself = plan is None and choice is None and p.splits is None and plans_itself(machine, z, tile, caches)
    if itself or plan is not None:
        division = planned_division(machine, z, tile, caches, p.window, at)
    else:
        tile, splits = choice or (tile, p.splits or decode_splits(machine, z, tile, caches))
        division = equal_division(z, splits)
    # Sizes and strides that are None are given by each call.
    kernel = decode_kernel(DecodeForm(
        z._replace(batch=None, pages=None, width=None), p.strides, p.dtype, None if p.window is None else p.window - 1, tile,
        division.splits > 1, p.with_lse, p.kv_dtype, wide=p.kv_dtype != p.dtype and is_wide(machine, z),
        planned=division.planned, several=several_blocks(machine, z, tile, p.kv_dtype), unit=p.unit), at)
    workspace = [maker(like, shape, "float32") for shape in division.workspace]

    def run(arrays: tuple[Any, ...], scales: tuple[float, float], out: Any, lse: Any, plan: DecodePlan | None = None) -> None:
        q, k, v, lengths, table = arrays
        if any(p.copied):
            q, k, v = (compact_copy(x) if c else x for x, c in zip((q, k, v), p.copied))
        if itself:
            plan = division.make_plan(lengths)
        means, sums = [make() for make in workspace] or (None, None)
        if p.single:
            q, out = (x.reshape(z.batch, 1, z.heads, -1) for x in (q, out))
            lse = None if lse is None else lse.reshape(z.batch, z.heads, 1)
        kernel(q, k, v, table, *(plan[:2] if plan else (lengths,)), *scales, means, sums, out, lse)

    return run


def _unscaled(run: Callable[..., None]) -> Callable[..., None]:
    """The same function of a scale alone."""
    return lambda arrays, scale, out, lse: run(arrays, (scale, 1.0), out, lse)


def _tuned(problem: DecodeProblem, machine: Machine, tensors: dict[str, Any], scale: Any, at: Place) -> tuple[Tile, int]:
    """The fastest (tile, splits) for a call on the device at hand."""
    from . import tuning_candidates as candidates  # 20 ms, and few calls are tuned

    *arrays, _ = tensors.values()
    key = [*problem.sizes[:6], problem.sizes.page_size, problem.dtype, problem.window, problem.with_lse, problem.splits,
           *problem.copied, *candidates.rounded((problem.capacity,))]
    results = problem.shape, compact(problem.shape), problem.lse_shape if problem.with_lse else None
    found: tuple[Tile, int] = candidates.tuned_choice(
        "flash_decode", key, (arrays, problem.default_scale if scale is None else check_scale(scale)), problem.capacity, at,
        results, near_choices(problem.sizes, decode_choice(problem, machine), problem.splits is None),
        lambda c: _unscaled(_run(problem, machine, at, arrays[0], c)))
    return found
