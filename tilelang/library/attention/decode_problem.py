"""DecodeProblem: a checked call of flash_decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilelang.errors import error

from ..arrays import aligned, compact, is_numpy, strides, type_name
from .inputs import UNIT, check_alike, check_heads, device_of, strides_of, unit_of
from .problem import whole


FLOAT8 = "float8_e4m3fn"


class DecodeSizes(NamedTuple):
    """The sizes of one call: ints or symbols; heads, head dimensions, seq_q and page_size are ints.

    pages: number of pages of the cache; without a table, the number of sequences. page_size: keys of a page, a multiple of the
    tile's keys; None without a table. width: pages per sequence in the table; without a table, keys per sequence in the cache.
    """

    batch: Any
    seq_q: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    pages: Any
    page_size: int | None
    width: Any

    @property
    def columns(self) -> tuple[int, int]:
        """The columns of tiles: head dimensions, those that are no multiple of 16 with zeros behind."""
        return whole(self.dim), whole(self.dim_v)


@dataclass(frozen=True)
class DecodeProblem:
    """A call of flash_decode: everything that decides which kernel answers it, without the values.

    strides: of the caches; None where each call gives its own. kv_dtype: their type. window: number of keys that a query sees;
    None: all. splits: number of blocks that divide the keys of a sequence, where the caller gives it. copied: which of q,
    k_cache, v_cache a kernel cannot read as they are stored. single: q has no dimension of queries. unit: what the caches'
    strides are multiples of.
    """

    sizes: DecodeSizes
    strides: tuple[tuple[int | None, ...], ...]
    dtype: str
    kv_dtype: str
    window: int | None
    splits: int | None
    copied: tuple[bool, ...]
    with_lse: bool
    single: bool
    unit: int = UNIT

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        z = self.sizes
        return (z.batch, z.heads, z.dim_v) if self.single else (z.batch, z.seq_q, z.heads, z.dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the logarithms that return_lse asks for."""
        return (self.sizes.batch, self.sizes.heads, *(() if self.single else (self.sizes.seq_q,)))

    @property
    def default_scale(self) -> float:
        """The factor of the scores where the call gives none."""
        return float(self.sizes.dim**-0.5)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.sizes.batch and self.sizes.seq_q)

    @property
    def capacity(self) -> int:
        """The most keys that a sequence can have."""
        return int(self.sizes.width * (self.sizes.page_size or 1))


def decode_problem(tensors: Mapping[str, Any], on_cuda: bool, *, window: Any, splits: Any, with_lse: bool) -> DecodeProblem:
    """The problem of a call.

    tensors: q, k_cache, v_cache, lengths, block_table, out, whose kinds were checked; the last two are None where left out.
    on_cuda: whether the kernel runs on CUDA. Raises attention-option, attention-shape.
    """
    q, k, v, out = (tensors[n] for n in ("q", "k_cache", "v_cache", "out"))
    sizes = _sizes(q, k, v, tensors["lengths"], tensors["block_table"])
    check_heads(sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim_v, UNIT)
    narrow = type_name(k) == type_name(v) == FLOAT8 and type_name(q) in ("float16", "bfloat16") and device_of(k) == device_of(
        v) == device_of(q)
    check_alike(q, {**({} if narrow else {"k_cache": k, "v_cache": v}), "out": out})
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise error("attention-option", f"window must be «a number of keys from 1» on, found {window!r}", hint="window=1024")
    if splits is not None and (isinstance(splits, bool) or not isinstance(splits, int) or splits < 1):
        raise error("attention-option", f"splits must be «an int from 1» on, found {splits!r}", hint="leave it out")
    on_device = on_cuda and not is_numpy(q)
    # Caches of float8 whose rows are no multiples of 16 bytes are read without TMA.
    unit = UNIT if any(x.shape[-1] % 16 for x in (k, v)) else unit_of(type_name(k))
    copied = (strides(q) != compact(q.shape) or on_device and not aligned(q),
              *(strides_of(x, on_device, unit) is None for x in (k, v)))
    # The stride of a dimension of one element is arbitrary, so no symbol can be solved for it.
    free = tuple((*(c if n == 1 else None for n, c in zip(x.shape, compact(x.shape)[:-1])), 1) for x in (k, v))
    problem = DecodeProblem(sizes, free, type_name(q), type_name(k), window, splits, copied, with_lse,
                            q.ndim == 3, unit)
    if out is not None and (tuple(out.shape) != problem.shape or strides(out) != compact(problem.shape)):
        raise error("attention-shape", f"out has shape {tuple(out.shape)} and strides {strides(out)}, expected "
                    f"«{problem.shape} without gaps»", found=f"{tuple(out.shape)} with strides {strides(out)}",
                    hint="leave it out")
    return problem


def _sizes(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> DecodeSizes:
    """The sizes of a call. Raises attention-shape."""
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k.shape)} and v_cache {tuple(v.shape)}"
    if q.ndim not in (3, 4) or k.ndim != 4 or v.ndim != 4:
        raise error("attention-shape", f"‹{shapes}› are not of a decode step", expected="q of 3 or 4 dimensions, caches of 4",
                    hint="q (batch, seq_q, heads, dim) or (batch, heads, dim), caches of 4 dimensions")
    batch, (heads, dim) = int(q.shape[0]), (int(n) for n in q.shape[-2:])
    seq_q = int(q.shape[1]) if q.ndim == 4 else 1
    if tuple(k.shape[:3]) != tuple(v.shape[:3]) or int(k.shape[3]) != dim:
        raise error("attention-shape", f"‹{shapes}› do not go together", expected="caches of one shape, q and k_cache of one "
                    "head dimension", hint="the caches have the same pages and heads; q and k_cache the same head dimension")
    for name, x, rank in (("lengths", lengths, 1), ("block_table", table, 2)):
        if x is None:
            continue
        right = type_name(x) == "int32" and x.ndim == rank and int(x.shape[0]) == batch and device_of(x) == device_of(q)
        if not right or min(x.shape) > 1 and strides(x) != compact(x.shape):
            raise error("attention-shape", f"{name} is {type_name(x)} of shape {tuple(x.shape)} on {device_of(x)}, expected "
                        f"«int32 ({batch}{', pages' * (rank == 2)}) on the device of q», without gaps",
                        found=f"{type_name(x)} {tuple(x.shape)} on {device_of(x)}",
                        hint="x.int().contiguous(), one entry a sequence")
    page = int(k.shape[1]) if table is not None else None
    if page is None and int(k.shape[0]) != batch:
        raise error("attention-shape", f"q has {batch} sequences and k_cache ‹{int(k.shape[0])}›",
                    expected=f"{batch} sequences in k_cache", hint="give block_table where the cache lies in pages")
    if page is not None and (page % 16 or page == 0):
        raise error("attention-shape", f"pages of ‹{page}› keys are no multiples of 16", expected="a multiple of 16 keys",
                    hint="use pages of 16, 64 or 256 keys")
    width = int(table.shape[1]) if table is not None else int(k.shape[1])
    return DecodeSizes(batch, seq_q, heads, int(k.shape[2]), dim, int(v.shape[3]), int(k.shape[0]), page, width)
