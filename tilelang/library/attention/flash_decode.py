"""`flash_decode`: attention of a few new queries a sequence against its cached keys, in pages or in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

from ..agreement import Disjoint
from ..arrays import compact, compact_copy, maker
from ..caches import Cache, Prepared, enter, known
from ..place import Place
from .build import decode_kernel
from .decode_problem import DecodeProblem, DecodeSizes, decode_problem
from .decode_kernels import narrow_blocks
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
_MERGE, _MERGE_SPLIT = 4000.0, 60.0  # cycles of the second launch, and for each split


def decode_choice(p: DecodeProblem, machine: Machine) -> tuple[Tile, int]:
    """The cost model's choice: (tile, splits)."""
    narrow = p.kv_dtype != p.dtype
    tile = narrow_tile(machine, p.sizes) if narrow else decode_tile(machine, p.sizes)
    blocks = narrow_blocks(p.sizes, tile, wide=is_wide(machine, p.sizes)) if narrow and machine.kind == "wgmma" else 0
    return tile, p.splits or decode_splits(machine, p.sizes, tile, blocks)


def decode_tile(m: Machine, sizes: DecodeSizes) -> Tile:
    """The tile: rows for all queries that share a kv head, keys that divide a page, stages that keep enough bytes in flight."""
    dims = sizes.dim + sizes.dim_v
    keys = _keys(sizes, 32, 96 if dims <= 128 else 64 if dims <= 384 or m.kind == "wgmma" else 32)
    if m.kind == "cpu":
        return Tile(max(16, min(64, ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / 16) * 16)), keys, 1, 128)
    two = 2 * 2 * keys * dims  # bytes of two stages
    ring = max(64 << 10, min(two, 128 << 10)) if m.kind == "wgmma" else 128 << 10  # two blocks per SM
    for stages in range(6 if m.kind == "wgmma" else 4, 1, -1):
        tile = Tile(64, keys, stages, 128)
        if stages * two // 2 <= ring and shared_bytes(tile, sizes.dim, sizes.dim_v) <= m.shared:
            return tile
    return Tile(64, 16, 2, 128)


def is_wide(m: Machine, sizes: DecodeSizes, latent: bool = False) -> bool:
    """Whether the rows of a tile are rows of GEMMs, of which one takes float8, where caches are narrow (DecodeForm.wide)."""
    rows = sizes.seq_q * sizes.heads // max(1, sizes.kv_heads)
    return m.kind == "wgmma" and rows > 32 and sizes.dim % 32 == 0 and sizes.dim + sizes.dim_v <= 256 and not latent


def narrow_tile(m: Machine, sizes: DecodeSizes, latent: bool = False) -> Tile:
    """The tile for caches of float8: rows are columns of instructions, in steps of 8, as many as leave registers for their
    accumulators, the same in all blocks of a kv head."""
    used = sizes.seq_q * sizes.heads // max(1, sizes.kv_heads)
    if is_wide(m, sizes, latent):
        rows = 64 * min(2, ceil(used / 64))
        most = 128 if rows == 64 and sizes.dim + sizes.dim_v > 128 else 64
        return Tile(rows, _keys(sizes, most, most), 2, 2 * rows)
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


def decode_splits(m: Machine, sizes: DecodeSizes, tile: Tile, narrow: int = 0, latent: bool = False) -> int:
    """The number of splits of the keys of a sequence that fills its table, with the least cost in cycles.

    narrow: blocks of an SM at once, where caches are narrow; 0 where they are not: a block alone loads as fast as an SM can.
    latent: whether V is loaded with K.
    """
    tiles = sizes.batch * sizes.kv_heads * ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / tile.rows)
    steps = max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys))
    elements = tile.keys * (sizes.dim + sizes.dim_v)
    loaded = tile.keys * sizes.dim if latent else elements
    step = max(loaded / _RATE, elements * (_CONVERT + _CONVERT_ROW * tile.rows)) if narrow else max(_STEP, 2 * elements / _RATE)
    alone = _ALONE + elements * (_ALONE_ELEMENT + _ALONE_ROW * tile.rows)
    merged = sizes.batch * sizes.seq_q * sizes.heads * _MERGE_ROW if narrow else 0.0

    def loop(at_once: int) -> float:
        return ((alone**_NORM + (at_once * step)**_NORM)**(1 / _NORM) if narrow else step) * (at_once > 0)

    def cost(n: int) -> float:
        each = ceil(tiles * n / m.sms)  # blocks that an SM computes
        waves, rest = divmod(each, narrow or 1)
        starts = (waves + (rest > 0)) * _START
        merge = (n > 1) * (_MERGE + n * (_MERGE_SPLIT + merged))
        return starts + ceil(steps / n) * (waves * loop(narrow or 1) + loop(rest)) + merge

    most = min(_MOST_SPLITS, steps)
    return min(range(min(most, ceil(steps * tile.keys / _LONGEST)), most + 1), key=cost)


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
                 return_lse: bool = False, out: Any = None, target: Any = None, tune: bool | None = None) -> Any:
    """softmax(scale * q k^T) v for the newest queries of each sequence, over its cached keys and values.

    q: (batch, seq_q, heads, dim), or (batch, heads, dim) for one query each.  lengths: (batch,) int32, keys of each sequence,
    the queries' own included; their values are not read on the host.  Query i stands at key position lengths - seq_q + i and
    sees the keys up to there, with window=w the last w of them.  A query that sees none gives 0 and the logarithm -inf.
    float16, bfloat16 or float32 (GEMMs in tf32 on a GPU); caches alike, or for queries of 16 bits both float8_e4m3fn, whose
    elements count k_scale and v_scale each; dim and dim_v multiples of 16 up to 256; heads is a multiple of kv_heads.

    With block_table (batch, pages a sequence may have), int32: k_cache (pages, page_size, kv_heads, dim), v_cache (…, dim_v);
    key p of sequence b is row p % page_size of page block_table[b, p // page_size].  page_size is a multiple of 16.  Entries
    beyond a sequence's length are not read.  Without: k_cache (batch, capacity, kv_heads, dim).
    lengths must not exceed what table or cache hold.  Rows of a sequence's last page behind its end, and of a cache in one
    piece, get weight 0, so they must be finite.

    splits: blocks that share the keys of a sequence; None: from a cost model of the capacity.  Other arguments and the error
    bound: as flash_attention.  return_lse: (batch, heads, seq_q), or (batch, heads).
    Results are the same bits for the same inputs and splits.
    tune: as for flash_attention; tiles and splits are timed with the lengths of the first call.

    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> k, v = (rng.standard_normal((6, 16, 2, 64)).astype(np.float16) for _ in range(2))
    >>> table, lengths = np.array([[4, 1, 0], [3, 5, 2]], np.int32), np.array([40, 20], np.int32)
    >>> flash_decode(rng.standard_normal((2, 8, 64)).astype(np.float16), k, v, lengths, block_table=table).shape
    (2, 8, 64)
    """
    arrays, options = (q, k_cache, v_cache, lengths, block_table), (window, splits, return_lse, str(target), tune)
    answer = known(_RUNS, (*arrays, out), options)
    if answer is None:
        answer = enter(_RUNS, (*arrays, out), options, prepare(
            dict(zip(NAMES, (*arrays, out))), target, tune, scale, window=window, splits=splits, with_lse=return_lse))
    check_gradient("flash_decode", q, k_cache, v_cache)
    scale = answer.scale if scale is None else check_scale(scale)
    k_scale, v_scale = check_scale(k_scale), check_scale(v_scale)
    if out is not None:
        check_disjoint(answer.disjoint, out, q, {"k_cache": k_cache, "v_cache": v_cache})
    result, lse = answer.result() if out is None else out, answer.logs() if return_lse else None
    answer.run(arrays, (scale * k_scale, v_scale), result, lse)
    return (result, lse) if return_lse else result


NAMES = "q", "k_cache", "v_cache", "lengths", "block_table", "out"
_RUNS: Cache[Prepared] = Cache(4096)


def prepare(tensors: dict[str, Any], target: Any, tune: bool | None, scale: Any, **options: Any) -> Prepared:
    """Check the arguments, and find or compile their kernel. tensors, options: as decode_problem takes them."""
    check_tensors("flash_decode", tensors, NAMES[:1], NAMES[4:])
    q, k, v, *_, out = tensors.values()
    at = running_on(q, target)
    problem = decode_problem(tensors, at.target.is_gpu, **options)
    machine = machine_of(at.target, at.sms, problem.dtype)
    tuned = not problem.empty and problem.kv_dtype == problem.dtype and at.tuned(tune, q)
    choice = _tuned(problem, machine, tensors, scale, at) if tuned else None
    return Prepared(_run(problem, machine, at, q, choice), maker(q, problem.shape, problem.dtype),
                    maker(q, problem.lse_shape, "float32"), problem.default_scale,
                    None if out is None else Disjoint(out, (q, k, v)), tuned is None)


def _run(problem: DecodeProblem, machine: Machine, at: Place, like: Any,
         choice: tuple[Tile, int] | None) -> Callable[..., None]:
    """A function f(arrays, scales, out, lse) that computes a problem. choice: (tile, splits) instead of the cost model's."""
    p, z = problem, problem.sizes
    if p.empty:
        return lambda *_: None
    tile, splits = choice or decode_choice(p, machine)
    # Sizes and strides that are None are given by each call.
    kernel = decode_kernel(DecodeForm(z._replace(batch=None, pages=None, width=None), p.strides, p.dtype,
                                      None if p.window is None else p.window - 1, tile, splits > 1, p.with_lse, p.kv_dtype,
                                      wide=p.kv_dtype != p.dtype and is_wide(machine, z)), at)
    # Workspace of the splits.
    shapes = (splits, z.batch, z.seq_q, z.heads, z.dim_v), (splits, z.batch, z.heads, z.seq_q)
    workspace = [maker(like, shape, "float32") for shape in shapes if splits > 1]

    def run(arrays: tuple[Any, ...], scales: tuple[float, float], out: Any, lse: Any) -> None:
        q, k, v, lengths, table = arrays
        if any(p.copied):
            q, k, v = (compact_copy(x) if c else x for x, c in zip((q, k, v), p.copied))
        means, sums = [make() for make in workspace] or (None, None)
        if p.single:
            q, out = (x.reshape(z.batch, 1, z.heads, -1) for x in (q, out))
            lse = None if lse is None else lse.reshape(z.batch, z.heads, 1)
        kernel(q, k, v, table, lengths, *scales, means, sums, out, lse)

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
