"""Plans of statements: what the program asks for and what passes decide, one record for each kind of statement.

The plans of tile operations stand beside the operations (tilelang.ops).  A field exists in the phases that `phases` names,
the others in all phases (ir/verify.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import Options, options

if TYPE_CHECKING:
    from .buffer import Buffer
    from .expr import Expr


@options
class LoopPlan(Options, LOWERED=("independent", "any_order", "kept"), DEVICE=("registers", "reduction", "maxima_first")):
    """Asked for by the program
        num_stages, or order and stage of each statement of the body, group (also by TVM's names): a pipeline.  factor: how
        often an unrolled loop is written out, explicit: all of it while tracing.
    Decided by passes
        independent: iterations touch different elements.  any_order: the sum of its iterations may be formed in any order.
        kept: not unrolled when it is one iteration.  tiles: iterations are blocks of the grid, they write different tiles.
        tight: descriptors of its products are carried from one iteration to the next.  ring_steps = (an iteration's, the
        whole loop's).  registers: printed on named PTX registers ("source": those of what it reads as well).  reduction,
        maxima_first: how such a loop reduces (transform/registers/order_register_reductions.py).
        pipeline_report: what was decided, in a sentence.
    """

    num_stages: int = 0
    order: tuple[int, ...] | None = None
    stage: tuple[int, ...] | None = None
    group: tuple[Any, ...] | None = None
    software_pipeline_order: tuple[int, ...] | None = None
    software_pipeline_stage: tuple[int, ...] | None = None
    factor: int | None = None
    explicit: bool = False
    independent: bool = False
    any_order: bool = False
    kept: bool = False
    tiles: bool = False
    tight: bool = False
    ring_steps: tuple[int, int] | None = None
    registers: bool | str = False
    reduction: str | None = None
    maxima_first: int = 0
    pipeline_report: str | None = None

    @property
    def counted(self) -> bool:
        """Whether statements of the body are named by their number."""
        lists = self.order, self.stage, self.group, self.software_pipeline_order, self.software_pipeline_stage
        return any(x is not None for x in lists)


@options
class ParallelPlan(Options):
    """coalesced_width: elements that a thread takes at once.  loop_layout: the Fragment that says whose an iteration is, the
    user's or chosen by infer_layouts."""

    coalesced_width: int | None = None
    loop_layout: Any = None


@options
class LaunchPlan(Options, TILE=("layouts", "compute_threads", "tiles_overlap"),
                 DEVICE=("shared_bytes", "shared_offsets", "sync_report", "own_values", "name")):
    """Asked for by the program
        swizzle = (panel, order): blocks in panels.  cluster = (x, y, z).  min_blocks_per_sm.  producer_registers,
        consumer_registers: per thread of a warp role; keep_registers: roles keep the launch's.  layouts = ((buffer,
        layout), …), completed by infer_layouts.  safe_values = ((buffer, value of an element outside), …).  import_source:
        texts in front of the kernel.  cuda_source, cuda_entry: the kernel itself, written by the user.  cooperative: blocks
        wait for each other.  pdl: the launch may begin before the one in front of it has ended.  l2_hit_ratio =
        ((buffer, part), …).  tensor_maps: entries of TensorMap (passes add their own).
    Found out by passes
        by_hand: the program writes its own warp roles or asynchronous copies; barrier_numbers: named barriers it uses, -1 for
        computed ones.  overlapping: tensors that may share memory.  may_alias: names of parameters that may.
        tiles_overlap: blocks may write the same elements.  compute_threads: those of the consumers, where others load.
        own_values: arrays are named PTX registers.  shared_bytes, shared_offsets = ((buffer, byte), …): the plan of shared
        memory.  name: of the kernel.  stages = ((buffer, how many), …).
    For reports
        report: lines.  pipeline_report, overlap, sync_report: what was decided, in a sentence.
    """

    swizzle: tuple[int | str, ...] | None = None
    cluster: tuple[int, int, int] | None = None
    min_blocks_per_sm: int = 1
    producer_registers: int | None = None
    consumer_registers: int | None = None
    keep_registers: bool = False
    layouts: tuple[tuple[Buffer, Any], ...] = ()
    safe_values: tuple[tuple[Buffer, Expr], ...] = ()
    import_source: tuple[str, ...] = ()
    cuda_source: str | None = None
    cuda_entry: str | None = None
    cooperative: bool = False
    pdl: bool = False
    l2_hit_ratio: tuple[tuple[Any, Any], ...] = ()
    tensor_maps: tuple[tuple[Any, ...], ...] = ()
    by_hand: bool = False
    barrier_numbers: tuple[int, ...] = ()
    overlapping: tuple[Buffer, ...] = ()
    may_alias: tuple[str, ...] = ()
    tiles_overlap: bool = False
    compute_threads: int | None = None
    own_values: bool = False
    shared_bytes: int | Expr = 0
    shared_offsets: tuple[tuple[Buffer, Any], ...] = ()
    name: str | None = None
    stages: tuple[tuple[str, int], ...] = ()
    report: tuple[str, ...] = ()
    pipeline_report: str | None = None
    overlap: str | None = None
    sync_report: str | None = None
