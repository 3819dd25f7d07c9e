"""`mla_decode`: multi-head latent attention of a few new queries a sequence against its cached latent vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang.errors import error
from tilelang.jit import JITKernel, compile
from tilelang.target import Target

from ..agreement import Disjoint
from ..arrays import aligned, copied_to, facts, is_numpy, maker, strides, type_name
from ..caches import Cache
from .inputs import (check_alike, check_disjoint, check_gradient, check_scale, check_tensors, compact, compact_copy, configs,
                     device_of, running_on, strides_of)
from .mla_kernels import KEYS, ROWS, MlaForm, mla_attention, plain_attention
from .mla_plan import MlaPlan, divide, divide_on_device

_KERNELS: Cache[JITKernel] = Cache(64)
_FLOAT8 = "float8_e4m3fn"


def mla_plan(lengths: Any, heads: int, *, known: Sequence[int] | None = None, target: Any = None) -> MlaPlan | None:
    """Divide the keys of all sequences among the blocks of mla_decode, once for all layers of a decode step.

    lengths: (batch,) int32; the host reads NumPy arrays, a kernel reads tensors. heads: query heads times queries of a
    sequence. known: the lengths, where the host has them; it then makes the plan, and sequences that all stay whole need no
    second launch. Returns None where the machine needs no plan.

    >>> plan = mla_plan(np.array([4096, 100], np.int32), 128, target={"kind": "cuda", "arch": "sm_90a"})
    >>> plan.spans.tolist()
    [[0, 31], [32, 32]]
    """
    where, backend, sms = running_on(lengths, target)
    if not where.has_wgmma:
        return None
    splits = _splits(where, sms, heads)
    if not is_numpy(lengths) and known is None:
        return divide_on_device(lengths, splits, where, backend)
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

    On sm_90a with dim - dim_v = 64 and dim_v a multiple of 128 up to 512, two warp groups share the result of 64 heads.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, cache = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 16, 576), (2, 100, 576)))
    >>> mla_decode(q, cache, np.array([100, 7], np.int32)).shape
    (2, 16, 512)
    """
    try:
        key = (facts(q), facts(kv_cache), facts(lengths), None if block_table is None else facts(block_table),
               None if out is None else facts(out), dim_v, None if plan is None else (tuple(plan.begins.shape), plan.divided),
               target if target is None else str(target))
        run = _RUNS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # the last one: a tensor of torch.func, which has no memory
        key = run = None
    if run is None:
        tensors = {"q": q, "kv_cache": kv_cache, "lengths": lengths, "block_table": block_table, "out": out}
        run = _prepare(tensors, dim_v, plan, target)
        if key is not None:
            _RUNS.keep(key, run)
    if not is_numpy(q):
        check_gradient("mla_decode", q, kv_cache)
    scale, kv_scale = check_scale(q.shape[-1]**-0.5 if scale is None else scale), check_scale(kv_scale)
    if out is not None:
        check_disjoint(Disjoint(out, (q, kv_cache)), out, q, {"kv_cache": kv_cache})
    result, logs = run.result() if out is None else out, run.logs()
    if run.kernel is not None:
        batch, rows = run.logs_shape
        q, kv_cache = (compact_copy(x) if copied else x for x, copied in zip((q, kv_cache), run.copied))
        table = lengths.reshape(batch, 1) if block_table is None else block_table
        outputs = [result.reshape(batch, rows, dim_v), logs]
        if run.planned:
            plan = mla_plan(lengths, rows, target=target) if plan is None else plan
            assert plan is not None
            outputs = [plan.begins, plan.spans, *(make() for make in run.workspace), *outputs]
        run.kernel(q.reshape(batch, rows, -1), kv_cache, table, lengths, scale * kv_scale, kv_scale, *outputs)
    if not return_lse:
        return result
    return result, logs if result.ndim == 3 else logs.reshape(*result.shape[:3]).swapaxes(1, 2)


@dataclass
class MlaRun:
    """The prepared answer to calls with arrays of one form. kernel: None where there are no queries. result, logs, workspace:
    allocate outputs and workspace. copied: whether the kernel cannot read q, kv_cache as they are stored. planned: whether it
    takes a plan."""

    kernel: JITKernel | None
    result: Callable[[], Any]
    logs: Callable[[], Any]
    workspace: tuple[Callable[[], Any], ...]
    logs_shape: tuple[int, int]
    copied: tuple[bool, ...]
    planned: bool


_RUNS: Cache[MlaRun] = Cache(4096)


def _prepare(tensors: dict[str, Any], dim_v: int, plan: MlaPlan | None, target: Any) -> MlaRun:
    """Check the arguments, and find or compile their kernel."""
    f = _form(tensors, dim_v)
    q, cache, lengths = (tensors[n] for n in ("q", "kv_cache", "lengths"))
    where, backend, sms = running_on(q, target)
    batch = int(q.shape[0])
    planned = where.has_wgmma and f.rope == KEYS and dim_v % 128 == 0 and dim_v <= 512
    workspace: tuple[Callable[[], Any], ...] = ()
    if planned:
        splits = _splits(where, sms, f.heads) if plan is None else int(plan.begins.shape[0]) - 1
        divided = plan is None or plan.divided
        f = f._replace(splits=splits, divided=divided)
        slots = batch + splits if divided else 1
        workspace = maker(q, (slots, f.heads, dim_v), "float32"), maker(q, (slots, f.heads), "float32")
    program = mla_attention if planned else plain_attention
    kernel = _KERNELS.made((f, where, backend), lambda: compile(
        program(f), target=where, execution_backend=backend, pass_configs=configs(where))) if batch and f.heads else None
    copied = tuple(strides(x) != compact(x.shape) or where.is_cuda and not aligned(x) for x in (q, cache))
    return MlaRun(kernel, maker(q, (*q.shape[:-1], dim_v), f.dtype), maker(q, (batch, f.heads), "float32"), workspace,
                  (batch, f.heads), copied, planned)


def _splits(where: Target, sms: int | None, heads: int) -> int:
    """The number of splits of the work: with the blocks of 64 heads each, one block per SM."""
    return max(1, (sms or where.limits.sm_count) // -(-heads // ROWS))


def _form(tensors: dict[str, Any], dim_v: int) -> MlaForm:
    """Check the arguments. Raises attention-argument, attention-shape."""
    q, cache, lengths, table, out = tensors.values()
    check_tensors("mla_decode", {n: x for n, x in tensors.items() if x is not None}, ("q",))
    if q.ndim not in (3, 4) or cache.ndim != 3 or q.shape[-1] != cache.shape[-1]:
        _rejected("q (batch, seq_q, heads, dim) or (batch, heads, dim), kv_cache (sequences or pages, keys, dim)",
                  f"q {tuple(q.shape)}, kv_cache {tuple(cache.shape)}")
    batch, dim, page = int(q.shape[0]), int(q.shape[-1]), None if table is None else int(cache.shape[1])
    if dim % 16 or dim_v % 16 or not 0 < dim_v < dim:
        _rejected("dim and dim_v multiples of 16, dim_v < dim", f"dim {dim}, dim_v {dim_v}")
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
    raise error(kind, f"mla_decode takes {expected}; found {found}", expected=expected, found=found,
                hint="convert the arguments")
