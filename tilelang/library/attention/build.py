"""Plans of attention, which are pure functions of a problem and a machine, and their kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tilelang.language as T
from tilelang.jit import JITKernel

from ..place import Place
from .decode_kernels import decode_attention
from .form import FACTS, AttentionForm, DecodeForm, ScoreFunctions, Tile, WorkPartition
from .inputs import UNIT, fast_kernel
from .kernels import dense_attention
from .packed_kernels import packed_attention
from .problem import AttentionProblem, Sizes, boxes
from .kernels import split_kv_attention
from .tile_cost import Machine, attention_tile, estimate, near_tiles, open_splits, open_tile

Workspace = tuple[tuple[tuple[int, ...], str], ...]  # (shape, element type) of each workspace tensor

def plan_attention(p: AttentionProblem, machine: Machine, tile: Tile | None = None) -> tuple[AttentionForm | None, Workspace]:
    """The kernel for a problem that has no few_queries and is folded, and its workspace tensors, of any contents.

    The form is None where there is nothing to compute. Sizes and strides that are None in it are given by each call. tile: the
    tile to use instead of the cost model's choice.
    """
    if p.empty:
        return None, ()
    if p.packed or p.dynamic:
        return _open_plan(p, machine, tile)
    tile = tile or attention_tile(machine, p.sizes, p.mask, plain=not p.extras)
    partition = None if p.extras else estimate(machine, p.sizes, p.mask, tile)[1]
    form = AttentionForm(p.sizes, p.strides, p.layout, p.dtype, p.mask, tile, p.with_lse, p.scale, partition, p.sinks, p.drop,
                         p.columns, boxed(p, machine))
    shapes = () if partition is None else ((partition.splits, tile.rows, p.sizes.dim_v), (partition.splits, tile.rows))
    return form, tuple((s, "float32") for s in shapes)


def _open_plan(p: AttentionProblem, machine: Machine, tile: Tile | None) -> tuple[AttentionForm, Workspace]:
    """The plan of a kernel for any lengths. Its tiles are the same for all of them; packed sequences that come first have those
    of their mean length."""
    z = model_sizes(p)
    divided = None if p.packed or p.extras or tile else open_splits(machine, z, p.mask)
    if divided is not None:
        tile, splits = divided
        count = -(-z.seq_q // tile.rows) * z.heads * z.batch
        partition = WorkPartition(0, None, None, 1, machine.sms)
        return (replace(any_sizes(p, tile), partition=partition, boxed=boxed(p, machine)),
                tuple((s, "float32") for s in ((count * splits, tile.rows, z.dim_v), (count * splits, tile.rows))))
    if tile is None:
        first = p.packed and not p.dynamic or machine.kind == "cpu" and z.seq_q <= 16
        tile = attention_tile(machine, z, p.mask) if first else open_tile(machine, (z.dim, z.dim_v), p.mask)
    tiles = (p.sizes.seq_q // tile.rows + p.sizes.batch) * p.sizes.heads
    return replace(any_sizes(p, tile), boxed=boxed(p, machine)), (((tiles, FACTS), "int32"),) if p.packed else ()


def boxed(p: AttentionProblem, machine: Machine) -> bool:
    """Whether tiles of operands take more columns than they have, so that TMA loads them by fewer boxes."""
    return machine.kind == "wgmma" and any(boxes(n) != n for n in p.sizes[5:])


def tiles_to_time(problem: AttentionProblem, machine: Machine, most: int) -> list[Tile]:
    """The tiles that are worth timing, at most `most`, the cost model's choice first."""
    p = problem.folded
    return near_tiles(machine, model_sizes(p), p.mask, most)


def model_sizes(p: AttentionProblem) -> Sizes:
    """The sizes given to the cost model. Packed sequences count as sequences of the mean length."""
    if not p.packed:
        return p.sizes
    n = max(1, p.sizes.batch)
    return p.sizes._replace(seq_q=-(-p.sizes.seq_q // n), seq_k=-(-p.sizes.seq_k // n))


def any_sizes(p: AttentionProblem, tile: Tile) -> AttentionForm:
    """The form of one kernel for any numbers of sequences, any lengths and any strides.

    A dimension of one element has a constant stride, which is not read: frameworks give it any, so no symbol can be solved for
    it.  An opened problem keeps the strides that no length decides.
    """
    first = 4 if not p.opened else 1 if p.layout == "bshd" else 2  # dimension from which on no length decides a stride
    strides = tuple((*(UNIT if shape[d] == 1 else n if d >= first else None for d, n in enumerate(s[:-1])), 1)
                    for s, shape in zip(p.strides, p.shapes))
    counts = (n if n == 1 and not p.packed else None for n in p.sizes[:3])
    return AttentionForm(Sizes(*counts, *p.sizes[3:]), strides, p.layout, p.dtype, p.mask, tile, p.with_lse, p.scale,
                         sinks=p.sinks, drop=p.drop, columns=p.columns)


def attention_kernel(f: AttentionForm, at: Place) -> JITKernel:
    """The compiled kernel of a form. Sizes and strides that are None in it are given by each call."""
    # Splits for any lengths run at once: a persistent loop would have one tile.
    several = None if f.partition is None or isinstance(f.partition.rest, int) else False
    return fast_kernel(at, _attention, f, at.target.limits.sm_count if at.target.has_wgmma else 1, persistent=several)


def decode_kernel(f: DecodeForm, at: Place) -> JITKernel:
    """The compiled kernel of a form of decode steps."""
    # The splits make as many blocks as there are SMs, so a persistent loop would have one tile. Without a warp group that
    # loads, an SM has registers for several blocks, which hide each other's starts and ends.
    return fast_kernel(at, _decode, f, persistent=False, disable_warp_specialized=f.narrow or f.several or None)


def _attention(f: AttentionForm, sms: int) -> Any:
    """The program of a form. sms: blocks of packed sequences that run at the same time. Without wgmma, blocks are not
    persistent: a block starts when another ends, in any order."""
    f = symbolic(f)
    if f.layout == "packed":
        return packed_attention(f, sms)
    if f.partition is None:
        return dense_attention(f)
    return split_kv_attention(f)


def symbolic(f: AttentionForm) -> AttentionForm:
    """The form with symbols in place of the sizes and strides that are None."""
    sizes, partition = Sizes(*(T.dynamic(name) if n is None else n for name, n in zip(Sizes._fields, f.sizes))), f.partition
    if partition is not None and partition.rest is None:
        rest = T.ceildiv(sizes.seq_q, f.tile.rows) * sizes.heads * sizes.batch
        partition = partition._replace(rest=rest, steps=T.dynamic("splits"))
    return replace(f, sizes=sizes, partition=partition,
                   strides=tuple(symbolic_strides(name, s) for name, s in zip("qkvo", f.strides)))


def symbolic_functions(f: ScoreFunctions) -> ScoreFunctions:
    """The functions with symbols in place of the sizes that are None, of lists and of tensors."""
    return replace(f, rows=_symbols("rows", f.rows), columns=_symbols("columns", f.columns),
                   tensors=tuple((_symbols(f"x{n}", shape), kind) for n, (shape, kind) in enumerate(f.tensors)))


def _symbols(name: str, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(T.dynamic(f"{name}_{d}") if n is None else n for d, n in enumerate(shape))


def _decode(f: DecodeForm) -> Any:
    """The program of a form, for every batch size, cache and table."""
    batch, pages, width = T.dynamic("batch, pages, width")
    pages = batch if f.sizes.page_size is None else pages
    return decode_attention(replace(f, sizes=f.sizes._replace(batch=batch, pages=pages, width=width),
                                    strides=tuple(symbolic_strides(name, s, f.unit) for name, s in zip(
                                        "kv", f.strides))))


def symbolic_strides(name: str, strides: tuple[Any, ...], unit: int = UNIT) -> tuple[Any, ...]:
    """The strides of a tensor. Symbolic strides are declared as multiples of 16 bytes, which TMA and vector loads need."""
    return tuple(T.dynamic(f"{name}_step_{d}") * unit if n is None else n for d, n in enumerate(strides))
