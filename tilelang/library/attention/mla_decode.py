"""`mla_decode`: multi-head latent attention of a few new queries a sequence against its cached latent vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tilelang.errors import error

from ..agreement import Disjoint
from ..arrays import SEQUENCES, aligned, compact, compact_copy, copied_to, in_chunks, is_numpy, maker, strides, type_name
from ..caches import Cache, Prepared, enter, known
from ..place import Place
from .build import decode_kernel
from .decode_kernels import narrow_blocks
from .decode_problem import DecodeSizes
from .flash_decode import Caches, decode_splits, equal_division, narrow_tile, planned_division, plans_itself
from .form import DecodeForm
from .inputs import (UNIT, check_alike, check_disjoint, check_gradient, check_like, check_scale, check_tensors, device_of,
                     fast_kernel, running_on, strides_of)
from .mla_kernels import KEYS, MlaForm, mla_attention
from .mla_plan import MlaPlan, divide, divide_on_device, plain_kernel, planned, splits_of
from .tile_cost import machine_of

_FLOAT8 = "float8_e4m3fn"
_FEW = 32  # rows of a sequence up to which a cache of float8 is decoded as a narrow one: one tile


def mla_plan(lengths: Any, heads: int, *, known: Sequence[int] | None = None, target: Any = None) -> MlaPlan | None:
    """Divide the keys of all sequences among the blocks of mla_decode, once for all layers of a decode step.

    lengths: (batch,) int32; the host reads NumPy arrays, a kernel reads tensors. heads: query heads times queries of a
    sequence. known: the lengths, where the host has them; it then makes the plan, and sequences that all stay whole need no
    second launch. Returns None where the machine needs no plan.

    >>> plan = mla_plan(np.array([4096, 100], np.int32), 128, target={"kind": "cuda", "arch": "sm_90a"})
    >>> plan.spans.tolist()
    [[0, 31], [32, 32]]
    """
    at = running_on(lengths, target)
    check_like("attention-shape", "mla_plan", lengths, {"lengths": (lengths, (math.prod(lengths.shape),), "int32")})
    if not at.target.has_wgmma:
        return None
    splits = splits_of(at, heads)
    if not is_numpy(lengths) and known is None:
        return divide_on_device(lengths, splits, at)
    plan = divide(lengths if known is None else known, splits)
    return plan if is_numpy(lengths) else MlaPlan(*(copied_to(lengths, x) for x in plan[:2]), plan.divided)


def mla_decode(q: Any, kv_cache: Any, lengths: Any, *, dim_v: int = 512, block_table: Any = None,
               scale: float | None = None, kv_scale: float = 1.0, plan: MlaPlan | None = None, return_lse: bool = False,
               out: Any = None, target: Any = None) -> Any:
    """softmax(scale * q k^T) v, where v is the first dim_v elements of k: latent attention with absorbed projections.

    q: (batch, seq_q, heads, dim), or (batch, heads, dim) for one query each; float16 or bfloat16. lengths: (batch,) int32,
    keys of each sequence, the queries' own included. Query i stands at key position lengths - seq_q + i and sees the keys up
    to there. A query that sees none gives 0 and the logarithm -inf.

    kv_cache: (batch, capacity, dim), or with block_table (batch, pages a sequence may have), int32, (pages, page_size, dim):
    key p of sequence b is row p % page_size of page block_table[b, p // page_size]; page_size is a multiple of 64. Entries
    behind a sequence's length are not read. Elements as in q, or float8_e4m3fn, which count kv_scale each. Keys behind the
    end of a sequence, in the last tile of 64, get weight 0, so they must be finite.

    plan: mla_plan(lengths, heads * seq_q), made once for all layers; None: made here. return_lse: also the natural logarithms
    of the sums of exp(scores), (batch, heads, seq_q) or (batch, heads), float32. scale: None is dim ** -0.5. out: where the
    result goes. Results are the same bits for the same inputs and plan.

    On sm_90a with dim - dim_v = 64 and dim_v a multiple of 128 up to 512, two warp groups share the result of 64 heads. There a
    cache of float8_e4m3fn is multiplied in float16, queries over the power of two in the largest of 64 heads; one with at most
    32 heads times queries takes the kernel of flash_decode, which needs no plan.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, cache = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 16, 576), (2, 100, 576)))
    >>> mla_decode(q, cache, np.array([100, 7], np.int32)).shape
    (2, 16, 512)
    """
    arrays = q, kv_cache, lengths, block_table
    options = dim_v, None if plan is None else (tuple(plan.begins.shape), plan.divided), str(target)
    answer = known(_RUNS, (*arrays, out), options)
    if answer is None:
        answer = enter(_RUNS, (*arrays, out), options, _prepare(dict(zip(_NAMES, (*arrays, out))), dim_v, plan, target))
    check_gradient("mla_decode", q, kv_cache)
    scale, kv_scale = check_scale(answer.scale if scale is None else scale), check_scale(kv_scale)
    if out is not None:
        check_disjoint(Disjoint(out, (q, kv_cache)), out, q, {"kv_cache": kv_cache})
    result, logs = answer.result() if out is None else out, answer.logs()
    answer.run(arrays, (scale * kv_scale, kv_scale), plan, result, logs)
    if not return_lse:
        return result
    if result.ndim == 3:
        return result, logs.reshape(*result.shape[:2])
    return result, logs if logs.ndim == 3 else logs.reshape(*result.shape[:3]).swapaxes(1, 2)


_NAMES = "q", "kv_cache", "lengths", "block_table", "out"
_RUNS: Cache[Prepared] = Cache(4096)


def _prepare(tensors: dict[str, Any], dim_v: int, plan: MlaPlan | None, target: Any) -> Prepared:
    """Check the arguments, and find or compile their kernel."""
    f = _form(tensors, dim_v)
    q, cache = tensors["q"], tensors["kv_cache"]
    at, batch, rows = running_on(q, target), int(q.shape[0]), f.heads
    divides, workspace = planned(f, at), list[Callable[[], Any]]()
    if batch > SEQUENCES and (not divides or f.kv_dtype != f.dtype and rows <= _FEW):
        return Prepared(_by_sequences(dim_v, target), maker(q, (*q.shape[:-1], dim_v), f.dtype), maker(
            q, tuple(q.shape[:-1]) if q.ndim == 3 else (batch, q.shape[2], q.shape[1]), "float32"), q.shape[-1]**-0.5)
    if divides and f.kv_dtype != f.dtype and batch and 0 < rows <= _FEW:
        return _narrow(f, at, *tensors.values())
    if divides:
        splits = splits_of(at, rows) if plan is None else int(plan.begins.shape[0]) - 1
        f = f._replace(splits=splits, divided=plan is None or plan.divided)
        slots = batch + splits if f.divided else 1
        workspace = [maker(q, (slots, rows, *last), "float32") for last in ((dim_v,), ())]
    kernel = None if not (batch and rows) else fast_kernel(at, mla_attention, f) if divides else plain_kernel(at, f)
    copied = [strides(x) != compact(x.shape) or at.target.is_gpu and not aligned(x) for x in (q, cache)]

    def run(arrays: tuple[Any, ...], scales: tuple[float, float], plan: MlaPlan | None, result: Any, logs: Any) -> None:
        if kernel is None:
            return
        q, cache = (compact_copy(x) if c else x for x, c in zip(arrays, copied))
        lengths, table = arrays[2:]
        if divides and plan is None:
            plan = mla_plan(lengths, rows, target=target)
        given = () if plan is None or not divides else (plan.begins, plan.spans, *(make() for make in workspace))
        table = lengths.reshape(batch, 1) if table is None else table
        kernel(q.reshape(batch, rows, -1), cache, table, lengths, *scales, *given, result.reshape(batch, rows, dim_v), logs)

    return Prepared(run, maker(q, (*q.shape[:-1], dim_v), f.dtype), maker(q, (batch, rows), "float32"), q.shape[-1]**-0.5)


def _by_sequences(dim_v: int, target: Any) -> Callable[..., None]:
    """A function as _prepare gives it, for more sequences than a launch takes."""
    def run(arrays: tuple[Any, ...], scales: tuple[float, float], plan: MlaPlan | None, result: Any, logs: Any) -> None:
        def some(q: Any, lengths: Any, result: Any, logs: Any, table: Any, cache: Any = arrays[1]) -> None:
            _, logs[...] = mla_decode(q, cache, lengths, dim_v=dim_v, block_table=table, scale=scales[0] / scales[1],
                                      kv_scale=scales[1], return_lse=True, out=result, target=target)

        q, cache, lengths, table = arrays
        in_chunks(some, SEQUENCES, q, lengths, result, logs, table, *(() if table is not None else (cache,)))

    return run


def _narrow(f: MlaForm, at: Place, q: Any, cache: Any, lengths: Any, table: Any, out: Any) -> Prepared:
    """The call with a cache of float8 on sm_90a: the kernel of flash_decode, for one kv head of whose keys V is a piece."""
    batch, dim, heads = int(q.shape[0]), f.dim_v + f.rope, f.heads // f.queries
    page, width = (f.page, int(table.shape[1])) if f.page else (None, int(cache.shape[1]))
    sizes = DecodeSizes(batch, f.queries, heads, 1, dim, f.dim_v, int(cache.shape[0]), page, width)
    machine = machine_of(at.target, at.sms, f.dtype)
    tile = narrow_tile(machine, sizes, True)
    caches = Caches(narrow_blocks(sizes, tile, True), True, True)
    itself = plans_itself(machine, sizes, tile, caches)
    division = (planned_division(machine, sizes, tile, caches, None, at) if itself else
                equal_division(sizes, decode_splits(machine, sizes, tile, caches)))
    steps = (page * dim if page else None, dim, dim, 1), (1,) * 4
    free = sizes._replace(batch=None, pages=None, width=None)
    kernel = decode_kernel(DecodeForm(free, steps, f.dtype, None, tile, division.splits > 1, True, f.kv_dtype, True,
                                      planned=itself, unit=16), at)
    workspace = [maker(q, shape, "float32") for shape in division.workspace]
    copied = [strides(x) != compact(x.shape) or not aligned(x) for x in (q, cache)]

    def run(arrays: tuple[Any, ...], scales: tuple[float, float], plan: MlaPlan | None, result: Any, logs: Any) -> None:
        q, cache = (compact_copy(x) if c else x for x, c in zip(arrays, copied))
        means, sums = [make() for make in workspace] or (None, None)
        q, cache = q.reshape(batch, f.queries, heads, dim), cache.reshape(*cache.shape[:2], 1, dim)
        result = result.reshape(batch, f.queries, heads, f.dim_v)
        given = division.make_plan(arrays[2])[:2] if itself else (arrays[2],)
        kernel(q, cache, None, arrays[3], *given, *scales, means, sums, result, logs)

    return Prepared(run, maker(q, (*q.shape[:-1], f.dim_v), f.dtype), maker(q, (batch, heads, f.queries), "float32"), dim**-0.5)


def _form(tensors: dict[str, Any], dim_v: int) -> MlaForm:
    """Check the arguments. Raises attention-argument, attention-shape."""
    q, cache, lengths, table, out = tensors.values()
    check_tensors("mla_decode", tensors, ("q",), _NAMES[3:])
    if q.ndim not in (3, 4) or cache.ndim != 3 or q.shape[-1] != cache.shape[-1]:
        _rejected("q (batch, seq_q, heads, dim) or (batch, heads, dim), kv_cache (sequences or pages, keys, dim)",
                  f"q {tuple(q.shape)}, kv_cache {tuple(cache.shape)}")
    batch, dim, page = int(q.shape[0]), int(q.shape[-1]), None if table is None else int(cache.shape[1])
    if dim % UNIT or dim_v % UNIT or not 0 < dim_v < dim:
        _rejected(f"dim and dim_v multiples of {UNIT}, dim_v < dim", f"dim {dim}, dim_v {dim_v}")
    for name, x, rank in (("lengths", lengths, 1), ("block_table", table, 2)):
        if x is not None and (type_name(x) != "int32" or x.ndim != rank or int(x.shape[0]) != batch or device_of(
                x) != device_of(q) or min(x.shape, default=1) > 1 and strides(x) != compact(x.shape)):
            _rejected(f"{name}: int32 for {batch} sequences, without gaps, on the device of q",
                      f"{type_name(x)} {tuple(x.shape)} on {device_of(x)}")
    if page is None and int(cache.shape[0]) != batch:
        _rejected(f"a cache of {batch} sequences, or a block_table", f"{int(cache.shape[0])} sequences")
    if page is not None and (page % KEYS or page == 0):
        _rejected(f"pages of a multiple of {KEYS} keys", f"pages of {page} keys")
    if type_name(q) == "float32" or type_name(cache) not in (type_name(q), _FLOAT8):
        _rejected(f"q of float16 or bfloat16, kv_cache alike or {_FLOAT8}",
                  f"q {type_name(q)}, kv_cache {type_name(cache)}",
                  "attention-argument")
    check_alike(q, {"out": out})
    shape = (*q.shape[:-1], dim_v)
    if out is not None and (tuple(out.shape) != shape or strides_of(out) != compact(shape)):
        _rejected(f"out of shape {shape} without gaps", f"{tuple(out.shape)}")
    queries = int(q.shape[1]) if q.ndim == 4 else 1
    return MlaForm(int(q.shape[-2]) * queries, queries, dim_v, dim - dim_v, page, type_name(q), type_name(cache), 0, False)


def _rejected(expected: str, found: str, kind: str = "attention-shape") -> None:
    raise error(kind, f"mla_decode takes «{expected}»; found ‹{found}›", hint="convert the arguments")
