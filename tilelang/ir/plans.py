"""Plans: records of the options of loops and launches, given by the program or decided by passes.

The plans of tile operations are in tilelang.ops.  A field named in a keyword of the class exists only in those phases; other
fields exist in all phases (ir/verify.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .options import Options, options

if TYPE_CHECKING:
    from .buffer import Buffer
    from .expr import Expr


@options
class LoopPlan(Options, LOWERED=("independent", "any_order", "kept"),
               DEVICE=("registers",)):
    """Options of a loop.

    Given by the program
        num_stages, or order, stage (of each statement of the body) and group, also by TVM's names: a software pipeline.
        factor: unroll factor.  explicit: the loop is unrolled while tracing.
    Decided by passes
        independent: iterations access different elements.  any_order: its reduction may be computed in any order.
        kept: the loop stays a loop even if it has one iteration.  tiles: iterations are blocks of the grid and write different
        tiles.  ring_steps = (ring steps of an iteration,
        of the whole loop).  registers: printed on named PTX registers ("source": so are the registers that it
        reads; "read": only those; "sum": only what is added).
        pipeline_report: the decision about the pipeline, in a sentence.
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
    ring_steps: tuple[int, int] | None = None
    registers: bool | str = False
    pipeline_report: str | None = None

    @property
    def counted(self) -> bool:
        """Whether the plan refers to statements of the body by their number."""
        lists = self.order, self.stage, self.group, self.software_pipeline_order, self.software_pipeline_stage
        return any(x is not None for x in lists)


@options
class ParallelPlan(Options):
    """Options of a parallel loop.

    coalesced_width: consecutive elements that a thread processes at once.  loop_layout: the Fragment that maps iterations to
    threads, given by the user or chosen by infer_layouts.
    Decided by passes
        async_group: its loads from global to shared memory belong to a group of asynchronous copies.
    """

    coalesced_width: int | None = None
    loop_layout: Any = None
    async_group: bool = False


@options
class LaunchPlan(Options, TILE=("layouts", "compute_threads"),
                 LOWERED=("reuse",), DEVICE=("shared_bytes", "shared_offsets", "sync_report", "own_values", "name")):
    """Options of a launch.

    Given by the program
        swizzle = (size, order) of the rasterisation panel.  cluster = (x, y, z).  min_blocks_per_sm.  producer_registers,
        consumer_registers: registers per thread of a warp role; keep_registers: no register reallocation.  layouts = ((buffer,
        layout), …), completed by infer_layouts.  safe_values = ((buffer, value of elements outside its shape), …).
        import_source: texts printed before the kernel.  cuda_source, cuda_entry: a kernel written by the user in CUDA.
        cooperative: blocks wait for each other.  pdl: the launch may start before the previous one on the stream has ended.
        l2_hit_ratio = ((buffer, fraction), …).  tensor_maps: entries of TensorMap (passes add more).  any_threads: the number
        of threads was not given, and nothing in the body depends on it except how often it runs.
    Determined by passes
        by_hand: the program itself contains warp roles or asynchronous copies.  barrier_numbers: named barriers that it uses,
        -1 for computed numbers.  overlapping: tensors whose memory may overlap.  may_alias: names of parameters that may do so.
        compute_threads: number of consumer threads, where producers load.
        own_values: array elements are PTX registers.  shared_bytes, shared_offsets = ((buffer, byte), …): the layout of shared
        memory.  reuse = ((buffer, later buffer), …): pairs at the same address, because the launch does not fit otherwise.
        disjoint = ((buffer, buffer), …): shared tiles that never hold a value at the same time, where that may be needed; a
        pair of one buffer: no iteration of a loop reads what an earlier one left in it.
        name: name of the kernel.  stages = ((buffer, number of stages), …).
    For reports
        report: lines.  schedules: of its pipelined loops (transform/analysis/loop_schedule.py).
        pipeline_report, overlap, sync_report: a decision, in a sentence.
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
    any_threads: bool = False
    by_hand: bool = False
    barrier_numbers: tuple[int, ...] = ()
    overlapping: tuple[Buffer, ...] = ()
    may_alias: tuple[str, ...] = ()
    compute_threads: int | None = None
    own_values: bool = False
    shared_bytes: int | Expr = 0
    shared_offsets: tuple[tuple[Buffer, Any], ...] = ()
    reuse: tuple[tuple[Buffer, Buffer], ...] = ()
    disjoint: tuple[tuple[Buffer, Buffer], ...] = ()
    name: str | None = None
    stages: tuple[tuple[str, int], ...] = ()
    report: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    pipeline_report: str | None = None
    overlap: str | None = None
    sync_report: str | None = None
