"""AttentionPlan: which kernel answers an AttentionProblem on a machine.  A pure function of both."""

from __future__ import annotations

from dataclasses import dataclass

from .form import FACTS, AttentionForm, Tile
from .problem import AttentionProblem, Sizes
from .tile_cost import Machine, attention_tile, near_tiles, partition_work

Workspace = tuple[tuple[tuple[int, ...], str], ...]  # (shape, element type) of each tensor that a kernel works in


@dataclass(frozen=True)
class AttentionPlan:
    """form: what the kernel is compiled for, None among sizes and strides for what each call gives; None where there is nothing
    to compute.  workspace: tensors that the kernel takes, of any contents.  folded: it reads queries as
    AttentionProblem.folded.
    """

    form: AttentionForm | None
    workspace: Workspace = ()
    folded: bool = False


def plan_attention(problem: AttentionProblem, machine: Machine, tile: Tile | None = None) -> AttentionPlan:
    """The plan of a problem that has no few_queries.  tile: instead of the one that the cost model chooses."""
    p = problem.folded
    folded = p is not problem
    if p.empty:
        return AttentionPlan(None, (), folded)
    tile = tile or attention_tile(machine, model_sizes(p), p.mask)
    if p.packed:
        z = p.sizes
        tiles = (z.seq_q // tile.rows + z.batch) * z.heads
        return AttentionPlan(_any_sizes(p, tile), (((tiles, FACTS), "int32"),), folded)
    if p.dynamic:
        return AttentionPlan(_any_sizes(p, tile), (), folded)
    partition = partition_work(machine, p.sizes, p.mask, tile)
    form = AttentionForm(p.sizes, p.strides, p.layout, p.dtype, p.mask, tile, p.with_lse, p.scale, partition)
    shapes = () if partition is None else ((partition.splits, tile.rows, p.sizes.dim_v), (partition.splits, tile.rows))
    return AttentionPlan(form, tuple((s, "float32") for s in shapes), folded)


def tiles_to_time(problem: AttentionProblem, machine: Machine, most: int) -> list[Tile]:
    """At most so many tiles that are worth timing, the cost model's choice first."""
    p = problem.folded
    return near_tiles(machine, model_sizes(p), p.mask, most)


def model_sizes(p: AttentionProblem) -> Sizes:
    """What the cost model is asked for.  Packed sequences count as so many of the mean length."""
    if not p.packed:
        return p.sizes
    n = max(1, p.sizes.batch)
    return p.sizes._replace(seq_q=-(-p.sizes.seq_q // n), seq_k=-(-p.sizes.seq_k // n))


def _any_sizes(p: AttentionProblem, tile: Tile) -> AttentionForm:
    """The form of one kernel for any numbers of sequences and lengths, and any strides.

    A dimension of one element stays what it is: frameworks give it any stride, so none can be solved for.
    """
    strides = tuple((*(n if extent == 1 else None for n, extent in zip(s[:-1], shape)), 1)
                    for s, shape in zip(p.strides, p.shapes))
    counts = (n if n == 1 and not p.packed else None for n in p.sizes[:3])
    return AttentionForm(Sizes(*counts, *p.sizes[3:]), strides, p.layout, p.dtype, p.mask, tile, p.with_lse, p.scale)


__all__ = ["AttentionPlan", "plan_attention", "tiles_to_time"]
