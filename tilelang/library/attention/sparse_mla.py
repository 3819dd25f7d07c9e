"""`sparse_mla`: latent attention in which each query attends to the keys that its row of indices names."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tilelang.errors import error

from ..arrays import SEQUENCES, capturing, contiguous, copied_to, empty, filled, in_chunks, is_numpy, place, settled, type_name
from ..caches import Cache
from ..place import Place
from .inputs import UNIT, check_gradient, check_scale, check_tensors, device_of, fast_kernel, running_on
from .mla_kernels import MlaForm, mla_attention
from .mla_plan import MlaPlan, divide, divide_on_device, plain_kernel, planned, splits_of

_PLANS: Cache[MlaPlan] = Cache(64)
_WHOLE = 4  # queries a block from which on no query is divided


def sparse_mla(q: Any, kv: Any, indices: Any, counts: Any = None, *, dim_v: int = 512, scale: float | None = None,
               return_lse: bool = False, target: Any = None) -> Any:
    """softmax(scale * q k^T) v over the keys that indices names, v the first dim_v elements of k: (queries, heads, dim_v).

    q: (queries, heads, dim); kv: (rows, dim), of all sequences, one latent vector a key: float16 or bfloat16. indices:
    (queries, most) int32, the rows of kv that each query attends to, -1 for none; a row named twice counts twice. counts:
    (queries,) int32: only the first counts[i] indices of query i are read; None: all. A query without keys gives 0 and the
    logarithm -inf. scale: None is dim ** -0.5. return_lse: also the natural logarithms of the sums of exp(scores), (queries,
    heads), float32.

    On sm_90a with dim - dim_v = 64 and dim_v a multiple of 128 up to 512, a warp group gathers rows for two that multiply, and
    the keys of few queries are divided among all blocks. Results are the same bits for the same inputs.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, kv = (rng.standard_normal(shape).astype(np.float16) for shape in ((3, 16, 576), (100, 576)))
    >>> sparse_mla(q, kv, np.array([[0, 5, -1], [7, 8, 9], [-1, -1, -1]], np.int32)).shape
    (3, 16, 512)
    """
    f = _form(q, kv, indices, counts, dim_v)
    at = running_on(q, target)
    check_gradient("sparse_mla", q, kv)
    scale = check_scale(q.shape[-1]**-0.5 if scale is None else scale)
    queries, most = (int(n) for n in indices.shape)
    out, logs = empty(q, (queries, f.heads, dim_v), f.dtype), empty(q, (queries, f.heads), "float32")
    if queries and f.heads:
        outputs = [out, logs]
        if planned(f, at):
            key, splits = (queries, most, f.heads, at, place(q)), splits_of(at, f.heads)
            plan = _PLANS.get(key)
            if plan is None:
                plan = _captured_plan(q, queries, most, splits, at) if capturing(q) else _PLANS.keep(
                    key, _plan(q, queries, most, splits))
            splits = int(plan.begins.shape[0]) - 1
            f, slots = f._replace(splits=splits, divided=plan.divided), queries + splits if plan.divided else 1
            workspace = [empty(q, (slots, f.heads, *last), "float32") for last in ((dim_v,), ())]
            outputs, kernel = [plan.begins, plan.spans, *workspace, *outputs], fast_kernel(at, mla_attention, f)
        else:
            kernel = plain_kernel(at, f)
        counts = _filled(indices, queries, most) if counts is None else counts
        keys = kv.reshape(1, *kv.shape)
        q, keys, indices, counts = (contiguous(x) for x in (
            q, keys, indices if most else _filled(indices, queries, -1).reshape(queries, 1), counts))
        if outputs[0] is out:
            in_chunks(lambda q, indices, counts, *made: kernel(q, keys, indices, counts, scale, 1.0, *made), SEQUENCES,
                      q, indices, counts, *outputs)
        else:
            kernel(q, keys, indices, counts, scale, 1.0, *outputs)
    return (out, logs) if return_lse else out


def _filled(like: Any, count: int, value: int) -> Any:
    return np.full((count,), value, np.int32) if is_numpy(like) else like.new_full((count,), value)


def _plan(q: Any, queries: int, most: int, splits: int) -> MlaPlan:
    """Few queries: the keys of all divided evenly among the blocks. Many: whole queries, so that the loads of one run under the
    end of the one before."""
    if queries < _WHOLE * splits:
        plan = divide([most] * queries, splits)
    else:
        begins = np.zeros((splits + 1, 2), np.int32)
        begins[:, 0] = np.arange(splits + 1) * queries // splits
        plan = MlaPlan(begins, np.zeros((queries, 2), np.int32), False)
    return plan if is_numpy(q) else MlaPlan(*(settled(copied_to(q, np.ascontiguousarray(x))) for x in plan[:2]), plan.divided)


def _captured_plan(q: Any, queries: int, most: int, splits: int, at: Place) -> MlaPlan:
    """The same by the device alone, for a CUDA graph, which computes it each time."""
    if queries < _WHOLE * splits:
        return divide_on_device(filled(q, (queries,), most, "int32"), splits, at)
    torch = sys.modules["torch"]
    first = torch.arange(splits + 1, device=q.device, dtype=torch.int32) * queries // splits
    return MlaPlan(torch.stack((first, torch.zeros_like(first)), 1), filled(q, (queries, 2), 0, "int32"), False)


def _form(q: Any, kv: Any, indices: Any, counts: Any, dim_v: int) -> MlaForm:
    """Check the arguments. Raises attention-argument, attention-shape."""
    given = {"q": q, "kv": kv, "indices": indices, **({} if counts is None else {"counts": counts})}
    check_tensors("sparse_mla", given, ("q",))
    found = ", ".join(f"{n} {type_name(x)} {tuple(x.shape)} on {device_of(x)}" for n, x in given.items())
    if type_name(q) == "float32" or type_name(kv) != type_name(q) or any(
            type_name(x) != "int32" for x in (indices, counts) if x is not None):
        raise error("attention-argument", "sparse_mla takes q and kv of float16 or bfloat16, indices and counts of int32; "
                    f"found ‹{found}›", expected="q and kv of float16 or bfloat16, indices of int32",
                    hint="indices.int(), counts.int(), q.to(kv.dtype)")
    if (q.ndim, kv.ndim, indices.ndim) != (3, 2, 2) or q.shape[0] != indices.shape[0] or q.shape[2] != kv.shape[1] or (
            counts is not None and tuple(counts.shape) != (q.shape[0],)) or len(
            {str(device_of(x)) for x in given.values()}) > 1:
        raise error("attention-shape", f"‹{found}› do not go together",
                    expected="q (queries, heads, dim), kv (rows, dim), indices (queries, most), counts (queries,)",
                    hint="kv holds the rows of all sequences, named by their numbers in it")
    dim = int(q.shape[2])
    if dim % UNIT or dim_v % UNIT or not 0 < dim_v < dim:
        raise error("attention-shape", f"dim {dim} and dim_v {dim_v}", found=f"dim {dim}, dim_v {dim_v}",
                    expected=f"dim and dim_v multiples of {UNIT}, dim_v < dim", hint="pad with zeros")
    return MlaForm(int(q.shape[1]), 1, dim_v, dim - dim_v, None, type_name(q), type_name(q), 0, False, True)
