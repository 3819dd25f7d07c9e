"""AttentionProblem: a checked call of flash_attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tilelang.errors import error

from ..arrays import accumulator, compact, is_numpy, strides, type_name
from ..place import Place
from .inputs import check_alike, check_heads, device_of, strides_of

LAYOUTS = ("bshd", "bhsd")


@dataclass(frozen=True)
class Mask:
    """The keys that a query at key position p sees: p - left .. p + right; None: no limit on that side."""

    left: int | None = None
    right: int | None = None


class Sizes(NamedTuple):
    """The sizes of one call: ints or symbols; heads and head dimensions are ints. For packed sequences, batch is their number
    and seq_q and seq_k are numbers of tokens."""

    batch: Any
    seq_q: Any
    seq_k: Any
    heads: int
    kv_heads: int
    dim: int
    dim_v: int


@dataclass(frozen=True)
class AttentionProblem:
    """A call of flash_attention: everything that decides which kernel answers it, without the values.

    layout: "bshd" (batch, sequence, head, dim), "bhsd", or "packed" (token, head, dim). shapes, strides: of q, k, v and the
    result, in elements, as a kernel reads and writes them. copied: which of q, k, v the kernel cannot read as they are stored,
    so that contiguous copies are made. scale: the factor that is compiled in; None: each call gives its own. dynamic: the
    kernel takes any sizes and strides; opened: any sizes, because calls have come with several. sinks, drop: as in
    AttentionForm. asked: the mask with the limits that have no effect for these sizes too; None: `mask`. columns: the head
    dimensions of the tensors, multiples of 8, where those of tiles (in sizes), multiples of 16, are others; else ().
    """

    sizes: Sizes
    mask: Mask
    layout: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    copied: tuple[bool, ...]
    with_lse: bool
    scale: float | None
    dynamic: bool = False
    sinks: bool = False
    drop: int = 0
    opened: bool = False
    asked: Mask | None = None
    columns: tuple[int, ...] = ()

    @property
    def family(self) -> tuple[Any, ...]:
        """What problems have in common that one kernel may answer."""
        lengths = 1 if self.layout == "bshd" else 2
        steps, mask = tuple(s[lengths:] for s in self.strides), self.mask if self.asked is None else self.asked
        return (self.sizes[3:], self.sizes.batch == 1, mask, self.folded is self, self.layout, self.dtype, steps, self.copied,
                self.with_lse, self.scale, self.sinks, self.drop, self.columns)

    @property
    def extras(self) -> bool:
        """Whether there is more than the softmax."""
        return self.sinks or self.drop > 0

    @property
    def packed(self) -> bool:
        """Whether sequences of any lengths lie one after another."""
        return self.layout == "packed"

    accum = property(lambda self: accumulator(self.dtype))  # the type of scores, sums and logarithms

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the logarithms that return_lse asks for."""
        z = self.sizes
        return (z.heads, z.seq_q) if self.packed else (z.batch, z.heads, z.seq_q)

    @property
    def default_scale(self) -> float:
        """The factor of the scores where the call gives none."""
        return float((self.columns or self.sizes[5:])[0]**-0.5)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return min(self.sizes) == 0

    @property
    def few_queries(self) -> bool:
        """Whether all queries that read a kv head, under a causal mask, fit in one tile, so that its keys are read once for
        them."""
        z, group = self.sizes, self.sizes.heads // self.sizes.kv_heads
        return (self.layout == "bshd" and self.strides[3] == compact(self.shapes[3]) and self.mask == Mask(None, 0)
                and group > 1 and group * z.seq_q <= 64 and not self.empty and not self.extras)

    @property
    def folded(self) -> AttentionProblem:
        """The problem with the heads that read one kv head as its queries, so that its keys are read once for them.

        This applies to one query per head without a mask. Other problems are returned unchanged.
        """
        z = self.sizes
        if self.packed or z.seq_q != 1 or z.heads <= z.kv_heads or self.mask != Mask() or self.empty or self.extras:
            return self
        group = z.heads // z.kv_heads
        (steps_q, shape_q), (steps_o, shape_o) = (fold_place(self.strides[n], self.shapes[n], self.layout, group)
                                                  for n in (0, 3))
        return replace(self, sizes=z._replace(seq_q=group, heads=z.kv_heads), shapes=(shape_q, *self.shapes[1:3], shape_o),
                       strides=(steps_q, *self.strides[1:3], steps_o))


def opened(p: AttentionProblem, at: Place, *kind: Any, most: int | None = None) -> AttentionProblem:
    """The problem, for a kernel of any lengths where another problem of its family has come before, or it has more than `most`
    queries. kind: what else calls have in common that one kernel may answer."""
    many = most is not None and p.sizes.seq_q > most and not p.packed
    if p.dynamic or p.empty or not many and at.comes_first((kind, p.family), tuple(p.sizes[:3])):
        return p
    mask = p.mask if p.asked is None or p.folded is not p else p.asked
    return replace(p, mask=mask, dynamic=True, opened=True)


def attention_problem(tensors: Mapping[str, Any], on_cuda: bool, *, causal: bool, window: Any, layout: str, scale: float | None,
                      with_lse: bool, dynamic: bool = False, drop: int = 0, unit: int = 16) -> AttentionProblem:
    """The problem of a call.

    unit: what head dimensions are multiples of.

    tensors: q, k, v, cu_seqlens_q, cu_seqlens_k, out, whose kinds were checked; the last three are None where left out, and
    sinks where they have one.
    on_cuda: whether the kernel runs on CUDA. Raises attention-option, attention-shape.
    """
    q, out, packed = tensors["q"], tensors["out"], tensors["cu_seqlens_q"] is not None
    if on_cuda and type_name(q) == "float64":
        raise error("attention-argument", "attention in float64 runs on the CPU only", found="float64 on a GPU",
                    expected="float16, bfloat16 or float32 on a GPU", hint="convert them, or move them to the CPU")
    sizes = _sizes(tensors, layout, unit)
    shape = (*(int(n) for n in q.shape[:-1]), sizes.dim_v)
    aligned = on_cuda and not is_numpy(q)
    arrays, sinks = [tensors[n] for n in "qkv"], tensors.get("sinks")
    if sinks is not None and (type_name(sinks), tuple(sinks.shape), device_of(sinks)) != (
            accumulator(type_name(q)), (sizes.heads,), device_of(q)):
        raise error("attention-shape", f"sinks are ‹{type_name(sinks)} {tuple(sinks.shape)}› on {device_of(sinks)}",
                    expected=f"{accumulator(type_name(q))} ({sizes.heads},) on {device_of(q)}",
                    hint="one logit for each query head")
    found = [strides_of(x, aligned) for x in arrays]
    if out is not None and (strides_of(out) is None or not is_numpy(out) and out.data_ptr() & 15):
        raise error("attention-shape", "`out` has rows that are not contiguous or not aligned to 16 bytes",
                    expected="contiguous rows at multiples of 16 bytes", found="others",
                    hint="leave it out, or allocate it with torch.empty")
    steps = tuple(s or compact(x.shape) for s, x in zip(found, arrays))
    fixed = scale if scale is not None else float(sizes.dim**-0.5)
    columns = (sizes.dim, sizes.dim_v) if sizes.dim % 16 or sizes.dim_v % 16 else ()
    sizes = sizes._replace(dim=whole(sizes.dim), dim_v=whole(sizes.dim_v))
    return AttentionProblem(
        sizes, mask_of(causal, window, None if packed else sizes), "packed" if packed else layout, type_name(q),
        (*(tuple(int(n) for n in x.shape) for x in arrays), shape),
        (*steps, (strides_of(out) or ()) if out is not None else compact(shape)), tuple(s is None for s in found), with_lse,
        None if dynamic and scale is not None else fixed, dynamic, sinks is not None, drop,
        asked=mask_of(causal, window, None), columns=columns)


def whole(columns: int) -> int:
    """Columns of a tile: the next multiple of 16."""
    return -(-columns // 16) * 16


def boxes(columns: int) -> int:
    """Columns of whole boxes of TMA, 128 bytes wide: narrower ones would be several for a row, and each row of a box takes the
    same time."""
    return -(-columns // 64) * 64 if columns > 32 and columns % 32 else columns


def fold(x: Any, layout: str, kv_heads: int) -> Any:
    """A view of tensors with one query per head, in which the heads that read one kv head are its queries."""
    rows = x.reshape(x.shape[0], kv_heads, -1, x.shape[3])  # one dimension becomes two: no copy
    return rows.swapaxes(1, 2) if layout == "bshd" else rows


def fold_place(steps: tuple[int, ...], shape: tuple[int, ...], layout: str, group: int) -> tuple[Any, Any]:
    """(strides, shape) of such a view."""
    heads = 2 if layout == "bshd" else 1
    inner, outer = (steps[heads], group), (group * steps[heads], shape[heads] // group)
    (step_1, n_1), (step_2, n_2) = (inner, outer) if layout == "bshd" else (outer, inner)
    return (steps[0], step_1, step_2, 1), (shape[0], n_1, n_2, shape[3])


def _ranks(q: Any, k: Any, v: Any, rank: int, names: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != rank:
            raise error("attention-shape", f"{name} has shape ‹{tuple(x.shape)}›, expected «{rank} dimensions {names}»",
                        hint="packed sequences have 3 dimensions and cu_seqlens_q, others 4")


def _sizes(tensors: Mapping[str, Any], layout: str, unit: int) -> Sizes:
    """The sizes of a call whose tensors and layout are checked. Raises attention-option, attention-shape."""
    q, k, v, cu_q, cu_k, out = (tensors[n] for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out"))
    if layout not in LAYOUTS:
        raise error("attention-option", f"layout must be «one of {', '.join(LAYOUTS)}», found {layout!r}",
                    hint="bshd: (batch, sequence, head, dim)")
    packed = cu_q is not None
    if cu_k is not None and not packed:
        raise error("attention-option", "cu_seqlens_k is given without cu_seqlens_q",
                    expected="cu_seqlens_q too", found="none", hint="give both, or cu_seqlens_q alone")
    sizes = _packed_sizes(q, k, v, cu_q, cu_k) if packed else _dense_sizes(q, k, v, layout)
    shape = (*q.shape[:-1], sizes.dim_v)
    check_heads(sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim_v, unit)
    check_alike(q, {"k": k, "v": v, "out": out})
    if out is not None and tuple(out.shape) != shape:
        raise error("attention-shape", f"out has shape ‹{tuple(out.shape)}›, expected «{shape}»", hint="leave it out")
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
    """The sizes of packed sequences: batch is the number of sequences, seq_q and seq_k are numbers of tokens."""
    _ranks(q, k, v, 3, "(token, head, dim)")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x is None:
            continue
        if type_name(x) != "int32" or len(x.shape) != 1 or x.shape[0] < 1 or x.shape != cu_q.shape or \
                device_of(x) != device_of(q) or strides(x)[0] != 1:
            raise error("attention-shape", f"{name} is {type_name(x)} of shape {tuple(x.shape)} on {device_of(x)}, expected "
                        "«int32 (sequences + 1,) on the device of q, contiguous»", found=f"{type_name(x)} {tuple(x.shape)} on "
                        f"{device_of(x)}", hint="cumulative lengths: [0, len_0, len_0 + len_1, …], by x.int().contiguous()")
    sizes = Sizes(int(cu_q.shape[0]) - 1, int(q.shape[0]), int(k.shape[0]), int(q.shape[1]), int(k.shape[1]), int(q.shape[2]),
                  int(v.shape[2]))
    _agree(q, k, v, v.shape[0] == sizes.seq_k and v.shape[1] == sizes.kv_heads and k.shape[2] == sizes.dim)
    if cu_k is None and sizes.seq_q != sizes.seq_k:
        raise error("attention-shape", f"q has {sizes.seq_q} tokens and k ‹{sizes.seq_k}›, but cu_seqlens_k is not given",
                    expected=f"as many tokens of k as of q: {sizes.seq_q}", hint="give cu_seqlens_k")
    return sizes


def _agree(q: Any, k: Any, v: Any, right: bool) -> None:
    if not right:
        raise error("attention-shape", f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not go together",
                    expected="k and v of one length, q and k of one head dimension",
                    found=f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}",
                    hint="k and v have the same batch, sequence and heads; q and k the same batch and head dimension")


def mask_of(causal: bool, window: Any, sizes: Sizes | None) -> Mask:
    """The mask, without limits that have no effect for these sizes."""
    left: Any = None
    right: Any = None
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool):
        if window < 1:
            raise error("attention-option", f"a window of ‹{window}› keys shows nothing", expected="at least 1 key",
                        hint="give 1 or more, or None")
        left = right = int(window) - 1
    elif isinstance(window, (tuple, list)) and len(window) == 2:
        if not all(n is None or isinstance(n, (int, np.integer)) for n in window):
            found = str(tuple(window))
            raise error("attention-option", f"window {found} has a side that is no integer", expected="integers or None",
                        found=found, hint="window=(1023, 0)")
        left, right = (None if n is None else int(n) for n in window)
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise error("attention-option", f"window ‹{tuple(window)}› has a negative side", expected="sides of at least 0",
                        hint="(left, right): keys before and after the query's own position; None for no limit")
    elif window is not None:
        raise error("attention-option", f"window must be «an int or (left, right)», found {window!r}", hint="window=1024")
    if causal:
        right = 0
    if sizes is not None:
        left = None if left is not None and left >= sizes.seq_k - 1 else left
        right = None if right is not None and right >= sizes.seq_q - 1 else right
    return Mask(left, right)
