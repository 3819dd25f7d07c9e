"""`flash_attention`: softmax(scale Q K^T) V for torch tensors and NumPy arrays.

The programs stand in flash_attention_kernels.py and flash_attention_shares.py, the choice of tiles in attention_tiles.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

import tilelang.language as T
from tilelang.errors import error
from tilelang.jit import JITKernel, compile
from tilelang.target import Target

from ..aliasing import Apart
from ..arrays import facts, maker, strides, type_name
from ..opt_in import wanted
from .inputs import (UNIT, check_alike, check_apart, check_gradient, check_heads, check_scale, compact, configs, device_of,
                     framework, readable, running_on, strides_of)
from .kernels import Mask, Sizes, Tile, dense_attention
from .packed_kernels import FACTS, packed_attention
from .split_kv_kernels import parted_attention
from .tile_cost import Machine, attention_tile, machine_of, near_tiles, shares
from .work_partition import Shares, shared_attention

LAYOUTS = ("bshd", "bhsd")
_MOST_RUNS = 4096  # forms of calls that are remembered
_MOST_SCALES = 8  # that kernels are compiled for: multiplying by a constant saves a register an element
_MOST_SHAPES = 16  # kernels made for one shape; beyond, one for all shapes


def flash_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                    window: int | tuple[int | None, int | None] | None = None, cu_seqlens_q: Any = None,
                    cu_seqlens_k: Any = None, return_lse: bool = False, layout: str = "bshd", out: Any = None,
                    target: Any = None, tune: bool | None = None) -> Any:
    """softmax(scale * q k^T) v, forward, without a matrix of scores in memory.

    q: (batch, seq_q, heads, dim), k: (batch, seq_k, kv_heads, dim), v: (batch, seq_k, kv_heads, dim_v) with layout="bshd";
    heads before sequences with "bhsd".  heads is a multiple of kv_heads: query head h reads kv head h // (heads / kv_heads).
    float16 or bfloat16; dim and dim_v multiples of 16 up to 256.  torch tensors on one CUDA device or the CPU, or NumPy arrays;
    any strides (tensors whose rows are not contiguous, or not aligned to 16 bytes, are copied).

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
    + 2^-25 seq_k in float16): weights and result are rounded to 16 bits, a score is a float32 sum of d products.
    Results are the same bits for the same inputs.

    The first call with new shapes compiles a kernel; after 16 shapes of one configuration a kernel for any is used.  So
    do the first calls with a scale of their own, up to 8 scales.
    Raises attention-argument, attention-shape, attention-option, attention-gradient.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 100, 4, 64)).astype(np.float16) for _ in range(3))
    >>> flash_attention(q, k, v, causal=True).shape
    (1, 100, 4, 64)
    """
    scale = None if scale is None else check_scale(scale)
    fixed = _fixed(scale)
    try:
        key = (facts(q), facts(k), facts(v), causal, window, layout, return_lse,
               target if target is None else str(target), fixed, tune,
               None if cu_seqlens_q is None else facts(cu_seqlens_q), None if cu_seqlens_k is None else facts(cu_seqlens_k),
               None if out is None else facts(out))
        run = _runs.get(key)
    except (AttributeError, TypeError, RuntimeError):  # the last: a tensor of torch.func, without memory
        key = run = None
    if run is None:
        run = _prepare(q, k, v, causal, window, cu_seqlens_q, cu_seqlens_k, return_lse, layout, out, target, fixed, scale, tune)
        if key is not None and not run.passing:
            if len(_runs) >= _MOST_RUNS:
                _runs.clear()
            _runs[key] = run
    check_gradient(run.torch, "flash_attention", q, k, v)
    scale = run.scale if scale is None else scale
    if out is not None:
        check_apart(run.apart, out, q, {"k": k, "v": v})
    result = run.result() if out is None else out
    lse = run.logs() if return_lse else None
    run(q, k, v, scale, cu_seqlens_q, cu_seqlens_k, result, lse)
    return (result, lse) if return_lse else result


@dataclass
class _Run:
    """How to answer calls with arrays of one form.

    kernel: None where nothing is to be computed.  result, logs: make the outputs.  apart: of `out`, where one is given.
    scale: the default.  room: make the arrays that a kernel works in.  torch: the module, None for NumPy arrays.  usable:
    whether the kernel can read q, k, v as they lie.  folded: layout and kv heads where heads that read one kv head are the
    kernel's queries.  passing: not for the next call, which may be tuned.
    """

    kernel: JITKernel | None
    result: Callable[[], Any]
    logs: Callable[[], Any]
    apart: Any
    scale: float
    room: tuple[Callable[[], Any], ...]
    torch: Any
    usable: tuple[bool, ...]
    folded: tuple[str, int] | None = None
    passing: bool = False

    def __call__(self, q: Any, k: Any, v: Any, scale: float, cu_q: Any, cu_k: Any, out: Any, lse: Any) -> None:
        if self.kernel is None:
            out[...] = 0
            if lse is not None:
                lse[...] = -math.inf
            return
        if self.usable != (True, True, True):
            q, k, v = (readable(x, ok, self.torch) for x, ok in zip((q, k, v), self.usable))
        if self.folded is not None:
            lse = None if lse is None else lse.reshape(lse.shape[0], self.folded[1], -1)
            q, out = (_folded(x, *self.folded) for x in (q, out))
        if cu_q is None and not self.room:
            self.kernel(q, k, v, scale, out, lse)
            return
        lengths = () if cu_q is None else (cu_q, cu_q if cu_k is None else cu_k)
        self.kernel(q, k, v, scale, *lengths, *[make() for make in self.room], out, lse)


@dataclass
class _FewQueries(_Run):
    """Calls that flash_decode answers.  decode: its way to answer them.  lengths: keys of each sequence."""

    decode: Any = None
    lengths: Any = None

    def __call__(self, q: Any, k: Any, v: Any, scale: float, cu_q: Any, cu_k: Any, out: Any, lse: Any) -> None:
        self.decode(q, k, v, self.lengths, None, scale, out, lse)


_runs: dict[Any, _Run] = {}


# ---- what a call asks for --------------------------------------------------------------------------------------------------


def _prepare(q: Any, k: Any, v: Any, causal: bool, window: Any, cu_q: Any, cu_k: Any, with_lse: bool, layout: str, out: Any,
             target: Any, fixed: float | None, scale: float | None, tune: bool | None) -> _Run:
    """Check the arguments and find or make the kernel for them."""
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "out": out}
    torch = framework("flash_attention", {n: x for n, x in given.items() if x is not None or n in "qkv"}, ("q", "k", "v"))
    packed = cu_q is not None
    sizes = _sizes(q, k, v, cu_q, cu_k, layout, out)
    shape = (*q.shape[:-1], sizes.dim_v)
    mask = _mask(causal, window, None if packed else sizes)
    lse_shape = (sizes.heads, sizes.seq_q) if packed else (sizes.batch, sizes.heads, sizes.seq_q)
    where, backend, units = running_on(q, target)
    machine = machine_of(where, units)
    arrays, on_device = (q, k, v), torch is not None and where.is_cuda
    found = [strides_of(x, on_device) for x in arrays]
    usable = tuple(x is not None for x in found)
    laid = tuple(s or compact(x.shape) for s, x in zip(found, arrays))
    laid += (strides_of(out) or () if out is not None else compact(shape),)
    if out is not None and (strides_of(out) is None or torch is not None and out.data_ptr() & 15):
        raise error("attention-shape", "`out` has rows that are not contiguous or not aligned to 16 bytes",
                    expected="contiguous rows at multiples of 16 bytes", found="others",
                    hint="leave it out, or allocate it with torch.empty")
    if not packed and layout == "bshd" and where.is_cuda and laid[3] == compact(shape) and _are_few(sizes, mask):
        return _few_queries(q, k, v, scale, with_lse, out, target, tune, sizes, torch)
    result, logs = maker(q, shape, type_name(q)), maker(q, lse_shape, "float32")
    apart = None if out is None else Apart(out, arrays)
    shapes, steps = tuple(tuple(x.shape) for x in arrays) + (shape,), laid[3]
    folded = None
    if not packed and sizes.seq_q == 1 and sizes.heads > sizes.kv_heads and mask == Mask() and min(sizes) > 0:
        folded = layout, sizes.kv_heads
        sizes = sizes._replace(seq_q=sizes.heads // sizes.kv_heads, heads=sizes.kv_heads)
        (laid_q, shape_q), (laid_o, shape_o) = (_folded_place(laid[n], shapes[n], layout, sizes.seq_q) for n in (0, 3))
        laid, shapes = (laid_q, *laid[1:3], laid_o), (shape_q, *shapes[1:3], shape_o)
    form, element, default = "packed" if packed else layout, type_name(q), sizes.dim**-0.5
    fixed = default if fixed == 0 else fixed

    def with_tile(tile: Tile) -> _Run:
        kernel, room = None, ()
        if min(sizes) > 0:
            deal = None if packed else shares(machine, sizes, mask, tile)
            kernel, room = _kernel(sizes, deal, shapes, laid, form, element, mask, tile, with_lse, where, backend, fixed)
        return _Run(kernel, result, logs, apart, default, tuple(maker(q, *x) for x in room), torch, usable, folded)

    tile = _tile(machine, sizes, mask, packed)
    tuned = min(sizes) > 0 and wanted(tune, q, where, backend)
    if tuned:
        from . import tuning_candidates as choices
        from .. import tuning  # for calls that are tuned alone

        factor = default if scale is None else scale
        kind = [form, element, *sizes[3:], mask.left, mask.right, with_lse, fixed is None, *usable]
        counts = choices.rounded(sizes[:3]) if packed else choices.told_apart(kind, sizes[:3])
        near = near_tiles(machine, _mean(sizes) if packed else sizes, mask, choices.MOST)

        def make(choice: tuple[Tile]) -> Any:
            run = with_tile(*choice)
            return lambda out, lse: run(q, k, v, factor, cu_q, cu_k, out, lse)

        (tile,) = tuning.tuner.choose(choices.attention_task(
            "flash_attention", [kind, counts], arrays, factor, sizes.seq_k, (where, backend),
            (shape, steps, lse_shape if with_lse else None), [(t,) for t in near], make)).choice
    return replace(with_tile(tile), passing=tuned is None)


def _are_few(sizes: Sizes, mask: Mask) -> bool:
    """Whether all queries that read a kv head, under a causal mask, are rows of one tile: its keys are read once for them."""
    group = sizes.heads // sizes.kv_heads
    return mask == Mask(None, 0) and group > 1 and group * sizes.seq_q <= 64 and min(sizes) > 0


def _few_queries(q: Any, k: Any, v: Any, scale: float | None, with_lse: bool, out: Any, target: Any, tune: bool | None,
                 sizes: Sizes, torch: Any) -> _Run:
    from .flash_decode import prepare

    if torch is None:
        lengths = np.full(sizes.batch, sizes.seq_k, np.int32)
    else:
        lengths = torch.full((sizes.batch,), sizes.seq_k, dtype=torch.int32, device=q.device)
    run = prepare(q, k, v, lengths, None, scale, None, None, with_lse, out, target, tune)
    # What is made while a graph is captured is filled when the graph runs: not for other calls.
    captured = torch is not None and q.is_cuda and torch.cuda.is_current_stream_capturing()
    return _FewQueries(run.kernel, run.result, run.logs, run.apart, run.scale, (), torch, (True,) * 3, None,
                       run.passing or captured, run, lengths)


def _folded(x: Any, layout: str, kv_heads: int) -> Any:
    """One query a head as so many queries of kv_heads heads, those that read one kv head: its keys are read once for them."""
    rows = x.reshape(x.shape[0], kv_heads, -1, x.shape[3])  # one dimension taken apart: no copy
    return rows.swapaxes(1, 2) if layout == "bshd" else rows


def _folded_place(steps: tuple[int, ...], shape: tuple[int, ...], layout: str, group: int) -> tuple[Any, Any]:
    """(strides, shape) of such a view."""
    heads = 2 if layout == "bshd" else 1
    inner, outer = (steps[heads], group), (group * steps[heads], shape[heads] // group)
    (step_1, n_1), (step_2, n_2) = (inner, outer) if layout == "bshd" else (outer, inner)
    return (steps[0], step_1, step_2, 1), (shape[0], n_1, n_2, shape[3])


def _ranks(q: Any, k: Any, v: Any, rank: int, names: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != rank:
            raise error("attention-shape", f"{name} has shape {tuple(x.shape)}, expected {rank} dimensions {names}",
                        expected=f"{rank} dimensions {names}", found=str(tuple(x.shape)),
                        hint="packed sequences have 3 dimensions and cu_seqlens_q, others 4")


def _sizes(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, layout: str, out: Any) -> Sizes:
    """Of a call, whose arrays and layout are checked.  Raises attention-option, attention-shape."""
    if layout not in LAYOUTS:
        raise error("attention-option", f"layout must be one of {', '.join(LAYOUTS)}, found {layout!r}",
                    expected=f"one of {', '.join(LAYOUTS)}", found=repr(layout),
                    hint="bshd: (batch, sequence, head, dim)")
    packed = cu_q is not None
    if cu_k is not None and not packed:
        raise error("attention-option", "cu_seqlens_k is given without cu_seqlens_q",
                    expected="cu_seqlens_q too", found="none", hint="give both, or cu_seqlens_q alone")
    sizes = _packed_sizes(q, k, v, cu_q, cu_k) if packed else _dense_sizes(q, k, v, layout)
    shape = (*q.shape[:-1], sizes.dim_v)
    check_heads(sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim_v)
    check_alike(q, {"k": k, "v": v, "out": out})
    if out is not None and tuple(out.shape) != shape:
        raise error("attention-shape", f"out has shape {tuple(out.shape)}, expected {shape}",
                    expected=str(shape), found=str(tuple(out.shape)), hint="leave it out")
    return sizes


def _dense_sizes(q: Any, k: Any, v: Any, layout: str) -> Sizes:
    _ranks(q, k, v, 4, "(batch, sequence, head, dim)" if layout == "bshd" else "(batch, head, sequence, dim)")
    s, h = (1, 2) if layout == "bshd" else (2, 1)
    sizes = Sizes(int(q.shape[0]), int(q.shape[s]), int(k.shape[s]), int(q.shape[h]), int(k.shape[h]), int(q.shape[3]),
                  int(v.shape[3]))
    _agree(q, k, v, k.shape[0] == v.shape[0] == sizes.batch and v.shape[s] == sizes.seq_k and v.shape[h] == sizes.kv_heads
           and k.shape[3] == sizes.dim)
    return sizes


def _packed_sizes(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Sizes:
    """batch: the number of sequences; seq_q, seq_k: tokens."""
    _ranks(q, k, v, 3, "(token, head, dim)")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x is None:
            continue
        if type_name(x) != "int32" or len(x.shape) != 1 or x.shape[0] < 1 or x.shape != cu_q.shape or \
                device_of(x) != device_of(q) or strides(x)[0] != 1:
            raise error("attention-shape", f"{name} is {type_name(x)} of shape {tuple(x.shape)} on "
                        f"{device_of(x)}, expected int32 (sequences + 1,) on the device of q, contiguous",
                        expected="int32 (sequences + 1,) on the device of q, contiguous",
                        found=f"{type_name(x)} {tuple(x.shape)} on {device_of(x)}",
                        hint="cumulative lengths: [0, len_0, len_0 + len_1, …]")
    sizes = Sizes(int(cu_q.shape[0]) - 1, int(q.shape[0]), int(k.shape[0]), int(q.shape[1]), int(k.shape[1]), int(q.shape[2]),
                  int(v.shape[2]))
    _agree(q, k, v, v.shape[0] == sizes.seq_k and v.shape[1] == sizes.kv_heads and k.shape[2] == sizes.dim)
    if cu_k is None and sizes.seq_q != sizes.seq_k:
        raise error("attention-shape", f"q has {sizes.seq_q} tokens and k {sizes.seq_k}, but cu_seqlens_k is not given",
                    expected=f"as many tokens of k as of q: {sizes.seq_q}", found=str(sizes.seq_k),
                    hint="give cu_seqlens_k")
    return sizes


def _agree(q: Any, k: Any, v: Any, right: bool) -> None:
    if not right:
        raise error("attention-shape", f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not go together",
                    expected="k and v of one length, q and k of one head dimension",
                    found=f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}",
                    hint="k and v have the same batch, sequence and heads; q and k the same batch and head dimension")


def _mask(causal: bool, window: Any, sizes: Sizes | None) -> Mask:
    """The mask, less what limits nothing in calls of these sizes."""
    left: Any = None
    right: Any = None
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool):
        if window < 1:
            raise error("attention-option", f"a window of {window} keys shows nothing",
                        expected="at least 1 key", found=str(window), hint="give 1 or more, or None")
        left = right = int(window) - 1
    elif isinstance(window, (tuple, list)) and len(window) == 2:
        left, right = (None if n is None else int(n) for n in window)
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise error("attention-option", f"window {tuple(window)} has a negative side",
                        expected="sides of at least 0", found=str(tuple(window)),
                        hint="(left, right): keys before and after the query's own position; None for no limit")
    elif window is not None:
        raise error("attention-option", f"window must be an int or (left, right), found {window!r}",
                    expected="an int or (left, right)", found=repr(window), hint="window=1024")
    if causal:
        right = 0
    if sizes is not None:
        left = None if left is not None and left >= sizes.seq_k - 1 else left
        right = None if right is not None and right >= sizes.seq_q - 1 else right
    return Mask(left, right)


# ---- kernels -----------------------------------------------------------------------------------------------------------------


def _tile(machine: Machine, sizes: Sizes, mask: Mask, packed: bool) -> Tile:
    sizes = _mean(sizes) if packed else sizes
    return attention_tile(machine, sizes, mask) if min(sizes) > 0 else Tile()


def _mean(sizes: Sizes) -> Sizes:
    """Packed sequences are priced as so many of the mean length."""
    n = max(1, sizes.batch)
    return sizes._replace(seq_q=-(-sizes.seq_q // n), seq_k=-(-sizes.seq_k // n))


_shapes: dict[Any, set[Any]] = {}
_scales: set[float] = set()


def _fixed(scale: float | None) -> float | None:
    """The scale to compile in (0: the default one), None to read it in each call: there were too many."""
    if scale is None:
        return 0.0
    if scale not in _scales:
        if len(_scales) >= _MOST_SCALES:
            return None
        _scales.add(scale)
    return scale


def _kernel(sizes: Sizes, deal: Shares | None, shapes: Any, strides: Any, *options: Any) -> tuple[JITKernel, Any]:
    """The kernel of a call and the room it works in: for these sizes and strides, or for any once there were many; packed
    calls share one."""
    fixed = (sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim_v)
    known = _shapes.setdefault((fixed, *options), set())
    packed, tile = options[0] == "packed", options[3]
    if not packed and ((sizes, strides) in known or len(known) < _MOST_SHAPES):
        known.add((sizes, strides))
        shapes = () if deal is None else ((deal.parts, tile.rows, sizes.dim_v), (deal.parts, tile.rows))
        return _made(sizes, deal, strides, *options), tuple((s, "float32") for s in shapes)
    # What stands at a single element is no stride: frameworks put any number there, so it is no symbol to solve for.
    free = tuple((*(n if e == 1 else None for n, e in zip(s[:-1], shape)), 1) for s, shape in zip(strides, shapes))
    counts = (n if n == 1 and not packed else None for n in sizes[:3])
    tiles = ((((sizes.seq_q // tile.rows + sizes.batch) * sizes.heads, FACTS), "int32"),) if packed else ()
    return _made(Sizes(*counts, *fixed), None, free, *options), tiles  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _made(sizes: Sizes, deal: Shares | None, strides: Any, layout: str, dtype: str, mask: Mask, tile: Tile, with_lse: bool,
          target: Target, backend: str | None, fixed: float | None) -> JITKernel:
    """Compile; None among sizes and strides is a value known at calls."""
    sizes = Sizes(*(T.dynamic(name) if n is None else n for name, n in zip(Sizes._fields, sizes)))
    # Strides are multiples of 16 bytes, which TMA and vectors need: the program says so.
    strides = tuple(tuple(T.dynamic(f"{array}_step_{d}") * UNIT if n is None else n for d, n in enumerate(s))
                    for array, s in zip("qkvo", strides))
    if layout == "packed":
        units = target.limits.sm_count if target.has_wgmma else 1  # elsewhere blocks start as others end
        program = packed_attention(sizes, strides, dtype, mask, tile, with_lse, fixed, units)
    elif deal is not None and mask != Mask():
        program = parted_attention(sizes, strides, layout, dtype, mask, tile, deal, with_lse, fixed)
    elif deal is not None:
        program = shared_attention(sizes, strides, layout, dtype, tile, deal, with_lse, fixed)
    else:
        program = dense_attention(sizes, strides, layout, dtype, mask, tile, with_lse, fixed)
    return compile(program, target=target, execution_backend=backend, pass_configs=configs(target))


__all__ = ["flash_attention"]
