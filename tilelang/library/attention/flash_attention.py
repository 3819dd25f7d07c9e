"""`flash_attention`: softmax(scale Q K^T) V for torch tensors and NumPy arrays."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilelang.jit import JITKernel

from ..agreement import Disjoint
from ..arrays import facts, is_numpy, maker
from ..caches import Cache
from ..opt_in import dynamic_shapes, wanted
from .build import attention_kernel
from .flash_decode import DecodeRun, prepare as prepare_decode
from .form import Tile
from .inputs import check_disjoint, check_gradient, check_scale, check_tensors, compact_copy, running_on
from .plan import plan_attention, tiles_to_time
from .problem import AttentionProblem, attention_problem, fold
from .tile_cost import Machine, machine_of


def flash_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                    window: int | tuple[int | None, int | None] | None = None, cu_seqlens_q: Any = None,
                    cu_seqlens_k: Any = None, return_lse: bool = False, layout: str = "bshd", out: Any = None,
                    target: Any = None, tune: bool | None = None) -> Any:
    """softmax(scale * q k^T) v, forward, without a matrix of scores in memory.

    q: (batch, seq_q, heads, dim), k: (batch, seq_k, kv_heads, dim), v: (batch, seq_k, kv_heads, dim_v) with layout="bshd";
    heads before sequences with "bhsd".  heads is a multiple of kv_heads: query head h reads kv head h // (heads / kv_heads).
    float16, bfloat16 or float32 (GEMMs in tf32 on a GPU); dim and dim_v multiples of 16 up to 256.  torch tensors on one
    CUDA device or the CPU, or NumPy arrays; any strides (tensors whose rows are not contiguous, or not aligned to 16 bytes,
    are copied).

    Query i stands at key position p = i + seq_k - seq_q: the last query sees the last key (bottom-right alignment).
    causal: it sees keys up to p.  window: an int w, keys p - w + 1 .. p + w - 1; or (left, right), keys p - left .. p + right,
    where None is no limit.  A query that sees no key gives 0 and the logarithm -inf.

    cu_seqlens_q, cu_seqlens_k: packed sequences.  q is (tokens_q, heads, dim), k and v (tokens_k, kv_heads, …); sequence s has
    queries cu_seqlens_q[s] up to cu_seqlens_q[s + 1] and keys alike: int32, (sequences + 1,), not decreasing, on the device
    of q.  cu_seqlens_k may be left out where it is the same.  Their values are not read on the host.  Keys and values behind
    a sequence (of the next one, or of none) get weight 0, so they must be finite; queries of no sequence get no result.

    scale: positive; dim**-0.5 when None.  out: tensor for the result, which may be q, but no part of k or v.
    return_lse: also the natural logarithm of the sum of exp(scale * scores), float32, (batch, heads, seq_q) or
    (heads, tokens_q).
    target: what to run on; None: the device of the tensors.  NumPy arrays run on the CPU, by the interpreter of tile programs
    for target="tile", on the device simulator for a CUDA target.
    tune: True: the first call of a form times the tiles that the cost model holds for good on the tensors' GPU and keeps the
    fastest, as matmul does (reference, "Tuning the library").

    Error: with eps = 2^-11 (float16) or 2^-8 (bfloat16), |result - exact| <= max|v| (2 eps + 2 d 2^-24 scale |q||k| + 2^-18
    + 2^-25 seq_k in float16): weights and result are rounded to 16 bits, a score is a float32 sum of d element products.
    float32: eps = 2^-24; on a GPU |result - exact| <= max|v| 2^-8 (1 + scale |q||k|), since tf32 has 11 bits.
    Results are the same bits for the same inputs.

    The first call with new shapes, strides or a new scale compiles a kernel for them.  With TILELANG_LIBRARY_DYNAMIC_SHAPES=1
    one kernel takes any, which is slower where tiles of queries fill no whole waves; it is read when a form comes first.
    Packed sequences and flash_decode always have one kernel for any lengths.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 4, 64)).astype(np.float16) for _ in range(3))
    >>> flash_attention(q, k, v, causal=True).shape
    (1, 100, 4, 64)
    """
    scale = None if scale is None else check_scale(scale)
    try:
        key = (facts(q), facts(k), facts(v), causal, window, layout, return_lse,
               target if target is None else str(target), scale, tune,
               None if cu_seqlens_q is None else facts(cu_seqlens_q), None if cu_seqlens_k is None else facts(cu_seqlens_k),
               None if out is None else facts(out))
        run = _RUNS.get(key)
    except (AttributeError, TypeError, RuntimeError):  # the last one: a tensor of torch.func, which has no memory
        key = run = None
    if run is None:
        tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "out": out}
        run = _prepare(tensors, target, tune, causal=causal, window=window, layout=layout, scale=scale, with_lse=return_lse)
        if key is not None and not run.passing:
            _RUNS.keep(key, run)
    if run.torch:
        check_gradient("flash_attention", q, k, v)
    scale = run.scale if scale is None else scale
    if out is not None:
        check_disjoint(run.disjoint, out, q, {"k": k, "v": v})
    result = run.result() if out is None else out
    lse = run.logs() if return_lse else None
    run((q, k, v), scale, cu_seqlens_q, cu_seqlens_k, result, lse)
    return (result, lse) if return_lse else result


@dataclass
class _Run:
    """The prepared answer to calls with arrays of one form.

    kernel: None where there is nothing to compute. result, logs: allocate the outputs. workspace: allocates the kernel's
    workspace. disjoint: the test of `out` against the other tensors, where `out` is given. torch: whether arrays are torch
    tensors. folded: whether the kernel reads queries as AttentionProblem.folded. passing: not kept for the next call, which may
    be tuned.
    """

    problem: AttentionProblem
    kernel: JITKernel | None
    result: Callable[[], Any]
    logs: Callable[[], Any]
    workspace: tuple[Callable[[], Any], ...]
    disjoint: Any
    torch: bool
    folded: bool = False
    passing: bool = False

    def __post_init__(self) -> None:
        self.scale, self.copies = self.problem.default_scale, any(self.problem.copied)

    def __call__(self, arrays: tuple[Any, Any, Any], scale: float, cu_q: Any, cu_k: Any, out: Any, lse: Any) -> None:
        if self.kernel is None:
            out[...] = 0
            if lse is not None:
                lse[...] = -math.inf
            return
        if self.copies:
            arrays = tuple(compact_copy(x) if c else x for x, c in zip(arrays, self.problem.copied))  # type: ignore[assignment]
        q, k, v = arrays
        if self.folded:
            layout, kv_heads = self.problem.layout, self.problem.sizes.kv_heads
            lse = None if lse is None else lse.reshape(lse.shape[0], kv_heads, -1)
            q, out = (fold(x, layout, kv_heads) for x in (q, out))
        if cu_q is None and not self.workspace:
            self.kernel(q, k, v, scale, out, lse)
            return
        lengths = () if cu_q is None else (cu_q, cu_q if cu_k is None else cu_k)
        self.kernel(q, k, v, scale, *lengths, *[make() for make in self.workspace], out, lse)


@dataclass
class _FewQueries(_Run):
    """Calls that flash_decode answers. decode: the prepared answer. lengths: number of keys of each sequence."""

    decode: DecodeRun | None = None
    lengths: Any = None

    def __call__(self, arrays: tuple[Any, Any, Any], scale: float, cu_q: Any, cu_k: Any, out: Any, lse: Any) -> None:
        assert self.decode is not None
        self.decode(arrays, self.lengths, None, scale, out, lse)


_RUNS: Cache[_Run] = Cache(4096)


def _prepare(tensors: dict[str, Any], target: Any, tune: bool | None, **options: Any) -> _Run:
    """Check the arguments, and find or compile their kernel. tensors, options: as attention_problem takes them."""
    given = {n: x for n, x in tensors.items() if x is not None or n in "qkv"}
    check_tensors("flash_attention", given, ("q", "k", "v"))
    q = tensors["q"]
    where, backend, sms = running_on(q, target)
    problem = attention_problem(tensors, where.is_cuda, **options, dynamic=dynamic_shapes())
    machine = machine_of(where, sms, problem.dtype)
    if where.is_cuda and problem.few_queries:
        return _few_queries(tensors, target, tune, options["scale"], problem)
    arrays = tuple(tensors[n] for n in "qkv")
    result, logs = maker(q, problem.shapes[3], problem.dtype), maker(q, problem.lse_shape, "float32")
    disjoint = None if tensors["out"] is None else Disjoint(tensors["out"], arrays)

    def planned(tile: Tile | None) -> _Run:
        plan = plan_attention(problem, machine, tile)
        kernel = None if plan.form is None else attention_kernel(plan.form, where, backend)
        workspace = tuple(maker(q, *x) for x in plan.workspace)
        return _Run(problem, kernel, result, logs, workspace, disjoint, not is_numpy(q), plan.folded)

    tuned = not problem.empty and wanted(tune, q, where, backend)
    tile = None
    if tuned:
        tile = _tuned(problem, machine, tensors, options["scale"], (where, backend), planned)
    return replace(planned(tile), passing=tuned is None)


def _tuned(problem: AttentionProblem, machine: Machine, tensors: dict[str, Any], scale: float | None, where: Any,
           planned: Callable[[Tile | None], _Run]) -> Tile:
    """The fastest tile for a call on the device at hand."""
    # Few calls are tuned.
    from .. import tuning  # 20 ms: the tuner
    from ..agreement import attention_agrees  # 2 ms
    from . import tuning_candidates as candidates  # 1 ms

    p, arrays = problem.folded, tuple(tensors[n] for n in "qkv")
    factor = problem.default_scale if scale is None else scale
    counts = candidates.rounded(p.sizes[:3]) if p.packed or p.dynamic else list(p.sizes[:3])
    key = [p.layout, p.dtype, *p.sizes[3:], p.mask.left, p.mask.right, p.with_lse, p.scale is None, *p.copied]

    def make(choice: tuple[Tile]) -> Any:
        run = planned(*choice)
        return lambda out, lse: run(arrays, factor, tensors["cu_seqlens_q"], tensors["cu_seqlens_k"], out, lse)

    results = problem.shapes[3], problem.strides[3], problem.lse_shape if problem.with_lse else None
    near = [(t,) for t in tiles_to_time(problem, machine, candidates.MOST)]
    (tile,) = tuning.tuner.choose(candidates.attention_task(
        "flash_attention", [key, counts], arrays, attention_agrees(*arrays, factor, p.sizes.seq_k), where, results, near,
        make)).choice
    return tile


def _few_queries(tensors: dict[str, Any], target: Any, tune: bool | None, scale: float | None, p: AttentionProblem) -> _Run:
    """flash_decode for caches in one piece, all of whose keys are valid."""
    q = tensors["q"]
    if is_numpy(q):
        lengths = np.full(p.sizes.batch, p.sizes.seq_k, np.int32)
    else:
        torch = sys.modules["torch"]
        lengths = torch.full((p.sizes.batch,), p.sizes.seq_k, dtype=torch.int32, device=q.device)
    run = prepare_decode({"q": q, "k_cache": tensors["k"], "v_cache": tensors["v"], "lengths": lengths, "block_table": None,
                          "out": tensors["out"]}, target, tune, scale, window=None, splits=None, with_lse=p.with_lse)
    # Tensors made during the capture of a CUDA graph are filled when the graph runs, so they are not kept for other calls.
    captured = not is_numpy(q) and q.is_cuda and torch.cuda.is_current_stream_capturing()
    return _FewQueries(p, run.kernel, run.result, run.logs, (), run.disjoint, run.torch, False, run.passing or captured, run,
                       lengths)
