"""AttentionPlan: the kernel for an AttentionProblem on a machine. A pure function of both."""

from __future__ import annotations

from dataclasses import dataclass

from .form import FACTS, AttentionForm, Tile
from .problem import AttentionProblem, Sizes
from .tile_cost import Machine, attention_tile, near_tiles, partition_work

Workspace = tuple[tuple[tuple[int, ...], str], ...]  # (shape, element type) of each workspace tensor


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel for a call of flash_attention.

    form: what the kernel is compiled for, None where there is nothing to compute. Sizes and strides that are None in it are
    given by each call. workspace: tensors that the kernel takes, of any contents. folded: the kernel reads queries as
    AttentionProblem.folded.
    """

    form: AttentionForm | None
    workspace: Workspace = ()
    folded: bool = False


def plan_attention(problem: AttentionProblem, machine: Machine, tile: Tile | None = None) -> AttentionPlan:
    """The plan of a problem that has no few_queries. tile: the tile to use instead of the cost model's choice."""
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
    """The tiles that are worth timing, at most `most`, the cost model's choice first."""
    p = problem.folded
    return near_tiles(machine, model_sizes(p), p.mask, most)


def model_sizes(p: AttentionProblem) -> Sizes:
    """The sizes given to the cost model. Packed sequences count as sequences of the mean length."""
    if not p.packed:
        return p.sizes
    n = max(1, p.sizes.batch)
    return p.sizes._replace(seq_q=-(-p.sizes.seq_q // n), seq_k=-(-p.sizes.seq_k // n))


def _any_sizes(p: AttentionProblem, tile: Tile) -> AttentionForm:
    """The form of one kernel for any numbers of sequences, any lengths and any strides.

    A dimension of one element stays constant: frameworks give it any stride, so no symbol can be solved for it.
    """
    strides = tuple((*(n if extent == 1 else None for n, extent in zip(s[:-1], shape)), 1)
                    for s, shape in zip(p.strides, p.shapes))
    counts = (n if n == 1 and not p.packed else None for n in p.sizes[:3])
    return AttentionForm(Sizes(*counts, *p.sizes[3:]), strides, p.layout, p.dtype, p.mask, tile, p.with_lse, p.scale)
