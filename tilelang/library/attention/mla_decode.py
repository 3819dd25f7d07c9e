"""`mla_decode`: multi-head latent attention of a few new queries a sequence against its cached latent vectors."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error
from tilelang.jit import JITKernel, compile
from tilelang.target import Target

from ..aliasing import Disjoint
from ..arrays import empty, is_numpy, strides, type_name, zeros
from ..caches import Cache
from .inputs import (check_alike, check_disjoint, check_gradient, check_scale, check_tensors, compact, compact_copy, configs,
                     device_of, running_on, strides_of)
from .mla_kernels import KEYS, ROWS, MlaForm, mla_attention, plain_attention
from .mla_plan import MlaPlan, divide, divide_on_device

_KERNELS: Cache[JITKernel] = Cache(64)
_FLOAT8 = "float8_e4m3fn"


def mla_plan(lengths: Any, heads: int, *, target: Any = None) -> MlaPlan | None:
    """Divide the keys of all sequences among the blocks of mla_decode, once for all layers of a decode step.

    lengths: (batch,) int32. The host reads NumPy arrays and tensors on the CPU; a tensor on a GPU is read by a kernel.
    heads: query heads times queries of a sequence. Returns None where the machine needs no plan.

    >>> plan = mla_plan(np.array([4096, 100], np.int32), 128, target={"kind": "cuda", "arch": "sm_90a"})
    >>> plan.spans.tolist()
    [[0, 59], [60, 60]]
    """
    where, backend, sms = running_on(lengths, target)
    if not where.has_wgmma:
        return None
    splits = max(1, (sms or where.limits.sm_count) // -(-heads // ROWS))
    return divide(lengths, splits) if is_numpy(lengths) else divide_on_device(lengths, splits, where, backend)


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
    f = _form({"q": q, "kv_cache": kv_cache, "lengths": lengths, "block_table": block_table, "out": out}, dim_v)
    where, backend, _ = running_on(q, target)
    if not is_numpy(q):
        check_gradient("mla_decode", q, kv_cache)
    scale, kv_scale = check_scale(q.shape[-1]**-0.5 if scale is None else scale), check_scale(kv_scale)
    batch, heads = int(q.shape[0]), int(q.shape[-2])
    if out is not None:
        check_disjoint(Disjoint(out, (q, kv_cache)), out, q, {"kv_cache": kv_cache})
    q, kv_cache = (x if strides_of(x, where.is_cuda) == compact(x.shape) else compact_copy(x) for x in (q, kv_cache))
    result = empty(q, (*q.shape[:-1], dim_v), f.dtype) if out is None else out
    logs = empty(q, (batch, f.heads), "float32")
    if batch and f.heads:
        table = zeros(q, (batch, 1), "int32") if block_table is None else block_table
        inputs = q.reshape(batch, f.heads, -1), kv_cache, table, lengths
        outputs = result.reshape(batch, f.heads, dim_v), logs
        if where.has_wgmma and f.rope == KEYS and dim_v % 128 == 0 and dim_v <= 512:
            plan = mla_plan(lengths, f.heads, target=target) if plan is None else plan
            assert plan is not None
            splits = int(plan.begins.shape[0]) - 1
            f = f._replace(splits=splits, divided=plan.divided)
            slots = batch + splits if plan.divided else 1
            spare = empty(q, (slots, f.heads, dim_v), "float32"), empty(q, (slots, f.heads), "float32")
            outputs = plan.begins, plan.spans, *spare, *outputs
        _kernel(f, where, backend)(*inputs, scale * kv_scale, kv_scale, *outputs)
    logs = logs if q.ndim == 3 else logs.reshape(batch, -1, heads).swapaxes(1, 2)
    return (result, logs) if return_lse else result


def _kernel(f: MlaForm, where: Target, backend: str | None) -> JITKernel:
    """The compiled kernel of a form; with splits, the one for wgmma."""
    program = mla_attention if f.splits else plain_attention
    return _KERNELS.made((f, where, backend), lambda: compile(
        program(f), target=where, execution_backend=backend, pass_configs=configs(where)))


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


__all__ = ["mla_decode", "mla_plan"]
