"""`flash_decode`: attention of a few new queries a sequence against its cached keys, in pages or in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import tilelang.language as T
from tilelang.errors import error
from tilelang.jit import JITKernel, compile
from tilelang.target import Target

from ..aliasing import Apart
from ..arrays import aligned, facts, maker, strides, type_name
from ..opt_in import wanted
from .decode_kernels import DecodeSizes, decode_attention
from .inputs import (UNIT, check_alike, check_apart, check_gradient, check_heads, check_scale, compact, configs, device_of,
                     framework, readable, running_on, strides_of)
from .kernels import Tile
from .tile_cost import Machine, machine_of, shared_bytes

_MOST_RUNS = 4096
_MOST_SPLITS = 64
_RATE, _STEP, _START = 19.0, 500.0, 1500.0  # bytes a cycle and processor from memory; cycles of a step; before the first
_COMBINE, _COMBINE_SPLIT = 4000.0, 60.0  # cycles of the second launch, and for each split


def flash_decode(q: Any, k_cache: Any, v_cache: Any, lengths: Any, *, block_table: Any = None, scale: float | None = None,
                 window: int | None = None, splits: int | None = None, return_lse: bool = False, out: Any = None,
                 target: Any = None, tune: bool | None = None) -> Any:
    """softmax(scale * q k^T) v for the newest queries of each sequence, over its cached keys and values.

    q: (batch, seq_q, heads, dim), or (batch, heads, dim) for one query each.  lengths: (batch,) int32, keys of each sequence,
    the queries' own included; their values are not read on the host.  Query i stands at key position lengths - seq_q + i and
    sees the keys up to there, with window=w the last w of them.  A query that sees none gives 0 and the logarithm -inf.
    float16 or bfloat16; dim and dim_v multiples of 16 up to 256; heads is a multiple of kv_heads.

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
    try:
        key = (facts(q), facts(k_cache), facts(v_cache), facts(lengths), None if block_table is None else facts(block_table),
               None if out is None else facts(out), window, splits, return_lse,
               target if target is None else str(target), tune)
        run = _runs.get(key)
    except (AttributeError, TypeError, RuntimeError):  # the last: a tensor of torch.func, without memory
        key = run = None
    if run is None:
        run = prepare(q, k_cache, v_cache, lengths, block_table, scale, window, splits, return_lse, out, target, tune)
        if key is not None and not run.passing:
            if len(_runs) >= _MOST_RUNS:
                _runs.clear()
            _runs[key] = run
    check_gradient(run.torch, "flash_decode", q, k_cache, v_cache)
    scale = run.scale if scale is None else check_scale(scale)
    if out is not None:
        check_apart(run.apart, out, q, {"k_cache": k_cache, "v_cache": v_cache})
    result = run.result() if out is None else out
    lse = run.logs() if return_lse else None
    if run.kernel is not None:
        run(q, k_cache, v_cache, lengths, block_table, scale, result, lse)
    return (result, lse) if return_lse else result


@dataclass
class _Run:
    """How to answer calls with arrays of one form.

    kernel: None where there are no queries.  result, logs: make the outputs.  apart: of `out`, where one is given.  scale:
    the default.  sizes: of the call.  parts: make means and sums of the parts that keys are shared out in.  torch: the
    module, None for NumPy arrays.  usable: whether the kernel can read queries and caches as they lie.  passing: not for the
    next call, which may be tuned.
    """

    kernel: JITKernel | None
    result: Callable[[], Any]
    logs: Callable[[], Any]
    apart: Any
    scale: float
    sizes: DecodeSizes
    parts: tuple[Callable[[], Any], ...]
    torch: Any
    usable: tuple[bool, ...]
    passing: bool = False

    def __call__(self, q: Any, k: Any, v: Any, lengths: Any, table: Any, scale: float, out: Any, lse: Any) -> None:
        assert self.kernel is not None
        if self.usable != (True, True, True):
            q, k, v = (readable(x, ok, self.torch) for x, ok in zip((q, k, v), self.usable))
        means, sums = [make() for make in self.parts] or (None, None)
        if q.ndim == 3:
            z = self.sizes
            q, out = (x.reshape(z.batch, 1, z.heads, -1) for x in (q, out))
            lse = None if lse is None else lse.reshape(z.batch, z.heads, 1)
        self.kernel(q, k, v, table, lengths, scale, means, sums, out, lse)


_runs: dict[Any, _Run] = {}


def prepare(q: Any, k: Any, v: Any, lengths: Any, table: Any, scale: Any, window: Any, splits: Any, with_lse: bool, out: Any,
             target: Any, tune: bool | None) -> _Run:
    """Check the arguments and find or make the kernel for them."""
    given = {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, "block_table": table, "out": out}
    torch = framework("flash_decode", {n: x for n, x in given.items() if x is not None or n not in ("block_table", "out")},
                      ("q", "k_cache", "v_cache"))
    sizes = _sizes(q, k, v, lengths, table)
    check_heads(sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim_v)
    check_alike(q, {"k_cache": k, "v_cache": v, "out": out})
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise error("attention-option", f"window must be a number of keys from 1 on, found {window!r}",
                    expected="a number of keys from 1", found=repr(window), hint="window=1024")
    if splits is not None and (isinstance(splits, bool) or not isinstance(splits, int) or splits < 1):
        raise error("attention-option", f"splits must be an int from 1 on, found {splits!r}",
                    expected="an int from 1", found=repr(splits), hint="leave it out")
    shape = (*q.shape[:-1], sizes.dim_v)
    if out is not None and (tuple(out.shape) != shape or strides(out) != compact(shape)):
        raise error("attention-shape", f"out has shape {tuple(out.shape)} and strides {strides(out)}, expected {shape} without "
                    "gaps",
                    expected=f"{shape} without gaps", found=f"{tuple(out.shape)} with strides {strides(out)}",
                    hint="leave it out")
    where, backend, units = running_on(q, target)
    machine = machine_of(where, units)
    lse_shape = (sizes.batch, sizes.heads) + ((sizes.seq_q,) if q.ndim == 4 else ())
    on_device = torch is not None and where.is_cuda
    usable = (strides(q) == compact(q.shape) and not (on_device and not aligned(q)),
              *(strides_of(x, on_device) is not None for x in (k, v)))
    result, logs = maker(q, shape, type_name(q)), maker(q, lse_shape, "float32")
    apart = None if out is None else Apart(out, (q, k, v))
    left, default, working = None if window is None else window - 1, sizes.dim**-0.5, bool(sizes.batch and sizes.seq_q)

    def with_choice(tile: Tile, parts: int) -> _Run:
        kernel = None
        if working:
            kernel = _kernel(sizes, (k, v), type_name(q), left, tile, parts > 1, with_lse, where, backend)
        room = ((sizes.batch, sizes.seq_q, sizes.heads, sizes.dim_v), (sizes.batch, sizes.heads, sizes.seq_q))
        return _Run(kernel, result, logs, apart, default, sizes,
                    tuple(maker(q, (parts, *s), "float32") for s in room) if parts > 1 else (), torch, usable)

    tile = decode_tile(machine, sizes)
    choice = tile, splits or decode_splits(machine, sizes, tile)
    tuned = working and wanted(tune, q, where, backend)
    if tuned:
        from . import tuning_candidates as choices
        from .. import tuning  # for calls that are tuned alone

        factor = default if scale is None else check_scale(scale)
        count = sizes.width * (sizes.page_size or 1)
        kind = [*sizes[:6], sizes.page_size, type_name(q), left, with_lse, splits, *usable, *choices.rounded((count,))]

        def make(choice: tuple[Tile, int]) -> Any:
            run = with_choice(*choice)
            return lambda out, lse: run(q, k, v, lengths, table, factor, out, lse)

        choice = tuning.tuner.choose(choices.attention_task(
            "flash_decode", kind, (q, k, v), factor, count, (where, backend),
            (shape, compact(shape), lse_shape if with_lse else None),
            near_choices(sizes, choice, splits is None), make)).choice
    return replace(with_choice(*choice), passing=tuned is None)


def _sizes(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> DecodeSizes:
    """Raises attention-shape."""
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k.shape)} and v_cache {tuple(v.shape)}"
    if q.ndim not in (3, 4) or k.ndim != 4 or v.ndim != 4:
        raise error("attention-shape", f"{shapes} are not of a decode step",
                    expected="q of 3 or 4 dimensions, caches of 4", found=shapes,
                    hint="q (batch, seq_q, heads, dim) or (batch, heads, dim), caches of 4 dimensions")
    batch, (heads, dim) = int(q.shape[0]), (int(n) for n in q.shape[-2:])
    seq_q = int(q.shape[1]) if q.ndim == 4 else 1
    if tuple(k.shape[:3]) != tuple(v.shape[:3]) or int(k.shape[3]) != dim:
        raise error("attention-shape", f"{shapes} do not go together",
                    expected="caches of one shape, q and k_cache of one head dimension", found=shapes,
                    hint="the caches have the same pages and heads; q and k_cache the same head dimension")
    for name, x, rank in (("lengths", lengths, 1), ("block_table", table, 2)):
        if x is None:
            continue
        right = type_name(x) == "int32" and x.ndim == rank and int(x.shape[0]) == batch and device_of(x) == device_of(q)
        if not right or min(x.shape) > 1 and strides(x) != compact(x.shape):
            raise error("attention-shape", f"{name} is {type_name(x)} of shape {tuple(x.shape)} on {device_of(x)}, expected "
                        f"int32 ({batch}{', pages' * (rank == 2)}) on the device of q, without gaps",
                        expected=f"int32 ({batch}{', pages' * (rank == 2)}) on the device of q",
                        found=f"{type_name(x)} {tuple(x.shape)} on {device_of(x)}",
                        hint="convert it to int32")
    page = int(k.shape[1]) if table is not None else None
    if page is None and int(k.shape[0]) != batch:
        raise error("attention-shape", f"q has {batch} sequences and k_cache {int(k.shape[0])}",
                    expected=f"{batch} sequences in k_cache", found=str(int(k.shape[0])),
                    hint="give block_table where the cache lies in pages")
    if page is not None and (page % 16 or page == 0):
        raise error("attention-shape", f"pages of {page} keys are no multiples of 16",
                    expected="a multiple of 16 keys", found=str(page), hint="use pages of 16, 64 or 256 keys")
    width = int(table.shape[1]) if table is not None else int(k.shape[1])
    return DecodeSizes(batch, seq_q, heads, int(k.shape[2]), dim, int(v.shape[3]), int(k.shape[0]), page, width)


def decode_tile(m: Machine, sizes: DecodeSizes) -> Tile:
    """Rows for all queries that share a kv head; keys that divide a page; stages that keep enough bytes on their way."""
    dims = sizes.dim + sizes.dim_v
    most = 96 if dims <= 128 else 64 if dims <= 384 or m.kind == "wgmma" else 32
    keys = next(n for n in range(most, 15, -16) if sizes.page_size is None or sizes.page_size % n == 0)
    if m.kind == "cpu":
        return Tile(max(16, min(64, ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / 16) * 16)), keys, 1, 128)
    two = 2 * 2 * keys * dims  # bytes of two stages
    ring = max(64 << 10, min(two, 128 << 10)) if m.kind == "wgmma" else 128 << 10  # two blocks a processor
    for stages in range(6 if m.kind == "wgmma" else 4, 1, -1):
        tile = Tile(64, keys, stages, 128)
        if stages * two // 2 <= ring and shared_bytes(tile, sizes.dim, sizes.dim_v) <= m.shared:
            return tile
    return Tile(64, 16, 2, 128)


def decode_splits(m: Machine, sizes: DecodeSizes, tile: Tile) -> int:
    """Over how many blocks to share the keys of a sequence that fills its table: the cheapest, in cycles."""
    tiles = sizes.batch * sizes.kv_heads * ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / tile.rows)
    steps = max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys))
    step = max(_STEP, 2 * tile.keys * (sizes.dim + sizes.dim_v) / _RATE)

    def cost(n: int) -> float:
        rounds = ceil(tiles * n / m.units)
        return rounds * (_START + ceil(steps / n) * step) + (n > 1) * (_COMBINE + n * _COMBINE_SPLIT)

    return min(range(1, min(_MOST_SPLITS, steps) + 1), key=cost)


def near_choices(sizes: DecodeSizes, model: tuple[Tile, int], any_splits: bool) -> list[tuple[Tile, int]]:
    """(tile, splits) that are worth timing: the model's, others over how many blocks, narrower tiles and shorter rings.

    any_splits: whether how many blocks is left open.
    """
    tile, splits = model
    steps = max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys))
    counts = [n for n in (splits * 2, ceil(splits * 1.5), splits * 3 // 4, splits // 2, 1, splits + 1)
              if 1 <= n <= min(_MOST_SPLITS, steps)]
    tiles = [replace(tile, stages=max(2, tile.stages // 2))]
    if tile.keys % 32 == 0:
        tiles.append(replace(tile, keys=tile.keys // 2, stages=min(8, 2 * tile.stages)))
    return list(dict.fromkeys([model, *((tile, n) for n in counts if any_splits), *((t, splits) for t in tiles)]))


def _kernel(sizes: DecodeSizes, caches: Any, dtype: str, left: int | None, tile: Tile, split: bool, with_lse: bool,
            target: Target, backend: str | None) -> JITKernel:
    """One kernel serves every batch, cache and table; strides of single elements are no symbols to solve for."""
    free = tuple((*(c if n == 1 else None for c, n in zip(compact(x.shape)[:-1], x.shape)), 1) for x in caches)
    fixed = (sizes.seq_q, sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim_v, sizes.page_size)
    return _made(fixed, free, dtype, left, tile, split, with_lse, target, backend)


@lru_cache(maxsize=256)
def _made(fixed: Any, free: Any, dtype: str, left: int | None, tile: Tile, split: bool, with_lse: bool, target: Target,
          backend: str | None) -> JITKernel:
    seq_q, heads, kv_heads, dim, dim_v, page = fixed
    batch, pages, width = T.dynamic("batch, pages, width")
    sizes = DecodeSizes(batch, seq_q, heads, kv_heads, dim, dim_v, batch if page is None else pages, page, width)
    laid = tuple(tuple(T.dynamic(f"{array}_step_{d}") * UNIT if n is None else n for d, n in enumerate(s))
                 for array, s in zip("kv", free))
    program = decode_attention(sizes, laid, dtype, left, tile, split, with_lse)
    # The splits make as many blocks as there are processors: a loop over tiles in each would have one tile.
    options = {**configs(target), "tl.persistent": False}
    return compile(program, target=target, execution_backend=backend, pass_configs=options)


__all__ = ["decode_splits", "decode_tile", "flash_decode", "near_choices"]
