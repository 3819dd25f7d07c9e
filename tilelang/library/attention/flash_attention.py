"""`flash_attention`: softmax(scale Q K^T) V for torch tensors and NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from tilelang.errors import error
from tilelang.target.machine import MAX_GRID

from ..agreement import Disjoint
from ..arrays import (accumulator, capturing, compact_copy, contiguous, empty, filled, in_chunks, maker, settled, type_name,
                      zeros)
from ..autograd import Function, Results, Step, direct
from ..caches import Cache, Prepared, enter, known
from ..place import Place, dynamic_shapes, target_text
from .backward import gradients
from .build import attention_kernel, plan_attention, tiles_to_time
from .dropout import check_dropout, seed_of_piece
from .flash_decode import NAMES as decode_names, prepare as prepare_decode
from .form import Tile
from .inputs import UNIT, check_disjoint, check_scale, check_tensors, running_on, with_whole_heads
from .problem import AttentionProblem, attention_problem, fold, mask_of, opened
from .tile_cost import Machine, machine_of


def flash_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                    window: int | tuple[int | None, int | None] | None = None, cu_seqlens_q: Any = None,
                    cu_seqlens_k: Any = None, return_lse: bool = False, layout: str = "bshd", out: Any = None,
                    target: Any = None, tune: bool | None = None, deterministic: bool | None = None, sinks: Any = None,
                    dropout: float = 0.0, seed: Any = None) -> Any:
    """softmax(scale * q k^T) v, without a matrix of scores in memory, with gradients of q, k and v.

    q: (batch, seq_q, heads, dim), k: (batch, seq_k, kv_heads, dim), v: (batch, seq_k, kv_heads, dim_v) with layout="bshd";
    heads before sequences with "bhsd".  heads is a multiple of kv_heads: query head h reads kv head h // (heads / kv_heads).
    float16, bfloat16, float32 (GEMMs in tf32 on a GPU) or float64 (CPU only); dim and dim_v up to 256: others than
    multiples of 8 are copied with zeros behind. torch tensors on one CUDA device or the CPU, or NumPy arrays; any strides
    (tensors whose rows are not contiguous, or not aligned to 16 bytes, are copied).

    Query i stands at key position p = i + seq_k - seq_q: the last query sees the last key (bottom-right alignment).
    causal: it sees keys up to p.  window: an int w, keys p - w + 1 .. p + w - 1; or (left, right), keys p - left .. p + right,
    where None is no limit.  A query that sees no key gives 0 and the logarithm -inf.

    cu_seqlens_q, cu_seqlens_k: packed sequences.  q is (tokens_q, heads, dim), k and v (tokens_k, kv_heads, …); sequence s has
    queries cu_seqlens_q[s] up to cu_seqlens_q[s + 1] and keys alike: int32, (sequences + 1,), not decreasing, on the device
    of q.  cu_seqlens_k may be left out where it is the same.  Their values are not read on the host.  Keys and values behind
    a sequence (of the next one, or of none) get weight 0, so they must be finite; queries of no sequence get no result.

    sinks: (heads,), float32 (float64 of float64), finite: a logit of each query head, which counts in the sum of exp(scores)
    and in its logarithm, and has no value. A query that sees no key gives 0 then, and the logarithm sinks[h].
    dropout: the fraction of weights that are set to 0, in steps of 1/256; the others are divided by 1 - dropout. The logarithms
    are those without dropout. seed: an int, or int64 (1,) on the device of q, which a CUDA graph reads anew each time; None: a
    new one by torch.randint on the device (NumPy: by a new generator). Which weights are kept depends on the seed and the
    numbers of sequence, query head, query and key alone, by Philox; backward draws them again and saves the seed alone.

    scale: positive; dim**-0.5 when None.  out: tensor for the result, which may be q, but no part of k or v.
    return_lse: also the natural logarithm of the sum of exp(scale * scores), float32, (batch, heads, seq_q) or
    (heads, tokens_q).
    target: what to run on; None: the device of the tensors.  NumPy arrays run on the CPU, by the interpreter of tile programs
    for target="tile", on the device simulator for a CUDA target.
    tune: True: the first call of a form times the tiles that the cost model holds for good on the tensors' GPU and keeps the
    fastest, as matmul does (reference, "Tuning the library").

    Gradients: where q, k, v or sinks require one, they, the result and the logarithms (float32, of float64 float64) are kept,
    and gradients have their types; that of the logarithms counts too. It is one operator for torch.compile and
    torch.export. deterministic: of flash_attention_backward, which computes them. There is no second derivative.

    Error: with eps = 2^-11 (float16) or 2^-8 (bfloat16), |result - exact| <= max|v| (2 eps + 2 d 2^-24 scale |q||k| + 2^-18
    + 2^-25 seq_k in float16): weights and result are rounded to 16 bits, a score is a float32 sum of d element products.
    float32: eps = 2^-24; on a GPU |result - exact| <= max|v| 2^-8 (1 + scale |q||k|), since tf32 has 11 bits.
    Results are the same bits for the same inputs and kernel.

    The first call of heads, dimensions, strides and options compiles a kernel for its lengths; the second length compiles one
    that all other lengths share. Few queries and many keys, whose blocks divide the keys, share another one (wgmma); so do
    single queries, lengths of 1, and on the CPU up to 16 queries. Packed sequences take any lengths; the first call chooses
    their tiles for its mean length, others share a kernel. Which lengths come first in a process decides which kernel answers
    a length, and nothing else that came before does; both kernels are within the error above, but their bits can differ.
    With TILELANG_LIBRARY_DYNAMIC_SHAPES=1 all lengths share the kernel, with any strides; it is read when a form comes first.
    flash_decode has one kernel for any lengths.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 4, 64)).astype(np.float16) for _ in range(3))
    >>> flash_attention(q, k, v, causal=True).shape
    (1, 100, 4, 64)
    """
    scale = None if scale is None else check_scale(scale)
    whole = with_whole_heads(
        lambda q, k, v, scale: flash_attention(
            q, k, v, causal=causal, scale=scale, window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            return_lse=return_lse, layout=layout, target=target, tune=tune, deterministic=deterministic, sinks=sinks,
            dropout=dropout, seed=seed), q, k, v, scale, out, UNIT)
    if whole is not None:
        return whole
    drop, seed = check_dropout(dropout, seed, q) if dropout else (0, None)
    if not direct((q, k, v, sinks)):
        if out is not None:
            raise error("attention-gradient", "flash_attention computes no gradient where ‹`out`› is given, and is not traced",
                        expected="no `out`", hint="leave it out")
        mask = mask_of(causal, window, None)
        found = _FUNCTION.recorded(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seed, mask.left, mask.right, scale, layout,
                                   deterministic, drop, target_text(target))
        return found if return_lse else found[0]
    return attend((q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seed), out=out, causal=causal, window=window, layout=layout,
                  drop=drop, with_lse=return_lse, scale=scale, target=target, tune=tune)


def attend(arrays: tuple[Any, ...], results: tuple[Any, Any] | None = None, *, scale: float | None, target: Any,
           tune: bool | None = None, out: Any = None, with_lse: bool = True, **masks: Any) -> Any:
    """flash_attention without a gradient. arrays: q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seed. results: the result and the
    logarithms, contiguous, which are written; None: new ones, or `out`. masks: causal, window, layout, drop."""
    options = (*masks.values(), with_lse, scale, tune, str(target))
    answer = known(_RUNS, (*arrays, out), options)
    if answer is None:
        answer = enter(_RUNS, (*arrays, out), options, _prepare(dict(zip(_NAMES, (*arrays, out))), target, tune, scale=scale,
                                                                with_lse=with_lse, **masks))
    if out is not None:
        check_disjoint(answer.disjoint, out, arrays[0], {"k": arrays[1], "v": arrays[2]})
    result, lse = results or (answer.result() if out is None else out, answer.logs() if with_lse else None)
    answer.run(arrays, answer.scale if scale is None else scale, result, lse)
    return (result, lse) if with_lse else result


_NAMES = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks", "seed", "out"
_RUNS: Cache[Prepared] = Cache(4096)


def _nothing(arrays: Any, scale: float, out: Any, lse: Any) -> None:
    """The answer where no query sees a key."""
    out[...] = 0
    if lse is not None:
        lse[...] = -math.inf if arrays[5] is None else arrays[5][:, None]


def _prepare(tensors: dict[str, Any], target: Any, tune: bool | None, **options: Any) -> Prepared:
    """Check the arguments, and find or compile their kernel. tensors, options: as attention_problem takes them."""
    check_tensors("flash_attention", tensors, _NAMES[:3], _NAMES[3:], double=True)
    q, out = tensors["q"], tensors["out"]
    at = running_on(q, target)
    problem = attention_problem(tensors, at.target.is_gpu, **options, dynamic=dynamic_shapes(), unit=UNIT)
    if not problem.packed and problem.sizes.batch > MAX_GRID[2]:
        return Prepared(_by_chunks(target, tune, options), maker(q, problem.shapes[3], problem.dtype),
                        maker(q, problem.lse_shape, problem.accum), problem.default_scale,
                        None if out is None else Disjoint(out, [tensors[n] for n in "qkv"]))
    if at.target.is_gpu and problem.few_queries:
        return _few_queries(tensors, target, tune, options["scale"], problem)
    problem = opened(problem, at, "forward")
    machine = machine_of(at.target, at.sms, problem.dtype)
    tuned = not (problem.empty or problem.extras) and at.tuned(tune, q)
    tile = _tuned(problem, machine, tensors, options["scale"], at) if tuned else None
    return Prepared(_run(problem, machine, at, q, tile), maker(q, problem.shapes[3], problem.dtype),
                    maker(q, problem.lse_shape, problem.accum), problem.default_scale,
                    None if out is None else Disjoint(out, [tensors[n] for n in "qkv"]), tuned is None)


def _by_chunks(target: Any, tune: bool | None, options: dict[str, Any]) -> Callable[..., None]:
    """A function as _run gives it, for more sequences than a grid has blocks along z."""
    def run(arrays: tuple[Any, ...], scale: float, out: Any, lse: Any) -> None:
        number = count()
        in_chunks(lambda q, k, v, out, lse: attend(
            (q, k, v, *arrays[3:6], seed_of_piece(arrays[6], next(number))), (out, lse), target=target, tune=tune,
            **{**options, "scale": scale}), MAX_GRID[2], *arrays[:3], out, lse)

    return run


def _run(problem: AttentionProblem, machine: Machine, at: Place, like: Any, tile: Tile | None) -> Callable[..., None]:
    """A function f(arrays, scale, out, lse) that computes a problem. tile: instead of the cost model's choice."""
    folded = problem.folded
    form, shapes = plan_attention(folded, machine, tile)
    if form is None:
        return _nothing
    kernel, workspace = attention_kernel(form, at), [maker(like, *x) for x in shapes]
    copied, layout, kv_heads = problem.copied, problem.layout, problem.sizes.kv_heads
    none = [empty(like, (1,), problem.accum), empty(like, (1,), "int64")] if problem.extras else []

    def run(arrays: tuple[Any, ...], scale: float, out: Any, lse: Any) -> None:
        q, k, v, cu_q, cu_k, *extras = arrays
        if any(copied):
            q, k, v = (compact_copy(x) if c else x for x, c in zip((q, k, v), copied))
        if folded is not problem:
            lse = None if lse is None else lse.reshape(lse.shape[0], kv_heads, -1)
            q, out = (fold(x, layout, kv_heads) for x in (q, out))
        lengths = () if cu_q is None else (cu_q, cu_q if cu_k is None else cu_k)
        more = [unused if x is None else contiguous(x) for x, unused in zip(extras, none)]
        kernel(q, k, v, scale, *more, *lengths, *[make() for make in workspace], out, lse)

    return run


def _tuned(problem: AttentionProblem, machine: Machine, tensors: dict[str, Any], scale: float | None, at: Place) -> Tile:
    """The fastest tile for a call on the device at hand."""
    from . import tuning_candidates as candidates  # 20 ms, and few calls are tuned

    p, arrays = problem.folded, tuple(tensors[n] for n in _NAMES[:-1])
    counts = candidates.rounded(p.sizes[:3]) if p.packed or p.dynamic else list(p.sizes[:3])
    key = [p.layout, p.dtype, *p.sizes[3:], *p.columns, p.mask.left, p.mask.right, p.with_lse, p.scale is None, *p.copied]
    results = problem.shapes[3], problem.strides[3], problem.lse_shape if problem.with_lse else None
    (tile,) = candidates.tuned_choice(
        "flash_attention", [key, counts], (arrays, problem.default_scale if scale is None else scale), p.sizes.seq_k, at,
        results, [(t,) for t in tiles_to_time(problem, machine, candidates.MOST)],
        lambda c: _run(problem, machine, at, arrays[0], *c))
    return tile


def _few_queries(tensors: dict[str, Any], target: Any, tune: bool | None, scale: float | None,
                 p: AttentionProblem) -> Prepared:
    """flash_decode for caches in one piece, all of whose keys are valid."""
    q = tensors["q"]
    lengths = settled(filled(q, (p.sizes.batch,), p.sizes.seq_k, "int32"))
    given = dict(zip(decode_names, (q, tensors["k"], tensors["v"], lengths, None, tensors["out"])))
    found = prepare_decode(given, target, tune, scale, window=None, splits=None, with_lse=p.with_lse)
    # Tensors made during the capture of a CUDA graph are filled when the graph runs, so they are not kept for other calls.
    return replace(found, run=lambda arrays, scale, out, lse: found.run((*arrays[:3], lengths, None), (scale, 1.0), out, lse),
                   passing=found.passing or capturing(q))


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? sinks, Tensor? seed"
_OPTIONS = "int? left, int? right, float? scale, str layout, bool? deterministic, int drop, str? target"


def _shapes(q: Any, k: Any, v: Any, cu_q: Any, *options: Any) -> Results:
    packed, layout = cu_q is not None, options[-4]
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else q.shape[:3]
    return [((*q.shape[:-1], v.shape[-1]), type_name(q)), (tuple(shape), accumulator(type_name(q)))]


def _forward(*args: Any) -> tuple[Any, Any]:
    *arrays, left, right, scale, layout, _, drop, target = args
    found: tuple[Any, Any] = attend(tuple(arrays), causal=False, window=(left, right), layout=layout, drop=drop, scale=scale,
                                    target=target)
    return found


def _backward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, sinks: Any, seed: Any, out: Any, lse: Any, left: Any, right: Any,
              *rest: Any) -> tuple[Any, ...]:
    scale, layout, deterministic, drop, target, grad, grad_lse = rest
    grad = zeros(out, tuple(out.shape), type_name(out)) if grad is None else grad
    found = gradients((q, k, v, out, lse, grad, grad_lse, cu_q, cu_k, sinks, seed), causal=False, window=(left, right),
                      layout=layout, drop=drop, scale=scale, deterministic=deterministic, target=target)
    return found if sinks is not None else (*found, empty(q, (0,), accumulator(type_name(q))))


_FUNCTION = Function(
    "flash_attention", Step(f"{_INPUTS}, {_OPTIONS}", _shapes, _forward, 2, owns=True),
    Step(f"{_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}, Tensor? grad_out, Tensor? grad_lse",
         lambda *args: [*((tuple(x.shape), type_name(x)) for x in args[:3]),
                        ((0,) if args[5] is None else tuple(args[5].shape), accumulator(type_name(args[0])))], _backward,
         4, owns=True),
    lambda needs, args, made: (*args[:7], *made, *args[7:]), (0, 1, 2, 5), visible=2)
