"""Plans of tile ops: options the program sets and decisions of passes.  A plan is consumed when its op is lowered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilelang.ir.options import Options, options

if TYPE_CHECKING:
    from tilelang.ir import Buffer, Expr


@options
class TransferPlan(Options):
    """Plan of an op that TMA can do: copies, and atomic addition of tiles.

    Set by the program: disable_tma; use_tma: require TMA; prefer_instruction: "tma", "cp_async" or "sync"; eviction_policy
    of L2.
    Decided by passes: tma: one thread issues TMA boxes; bulk: the tile is one contiguous run (ops/bulk.py), with boxes: copied
    as boxes of one row with a tensor map.  awaited: the issuer of a store waits for it.  unaligned_columns: the columns are
    not known to be multiples of 16 bytes.
    """

    disable_tma: bool = False
    use_tma: bool = False
    prefer_instruction: str | None = None
    eviction_policy: str | None = None
    tma: bool = False
    bulk: bool = False
    boxes: bool = False
    awaited: bool = False
    unaligned_columns: bool = False


@options
class CopyPlan(TransferPlan):
    """Set by the program
        coalesced_width: elements that a thread copies at once.  loop_layout: the Fragment that distributes the elements.
        by_hand: T.tma_copy, which one thread issues and which does not wait; cluster_mask: the CTAs that receive the tile;
        leader_scope: threads of which one issues the copy.  dst_block: rank of the CTA whose shared memory is written.
    Decided by passes, or set by T.tma_copy and T.copy_cluster
        barrier = (buffer, index): the mbarrier that the bytes arrive on; expect: the copy announces their number to it first.
        async_group: by cp.async, completed by a later wait.  cluster_split = (rank, CTAs, mask): each CTA of a cluster loads a
        piece and multicasts it to all.  iterations: of a loop that read one tile, the first of which loads it.
        tf32: elements are rounded to tf32 on the way.  second: stores to shared memory what a copy before has loaded.
        lanes: bytes that a lane copies to its place in the run of shared memory that its wave fills; completed by a later wait.
    """

    coalesced_width: int | None = None
    loop_layout: Any = None
    by_hand: bool = False
    cluster_mask: int | None = None
    leader_scope: int | None = None
    dst_block: Expr | None = None
    barrier: tuple[Buffer, Expr] | None = None
    expect: bool = False
    async_group: bool = False
    cluster_split: tuple[Any, ...] | None = None
    iterations: int = 1
    tf32: bool = False
    second: bool = False
    lanes: int = 0


@options
class AtomicPlan(TransferPlan):
    """memory_order: its C++ name, None for relaxed."""

    memory_order: str | None = None


@options
class GemmSchedule(Options):
    """Set by the program: k_pack (matrix cores of other vendors); wait = -1: T.wgmma_gemm, which does not wait.
    Decided by passes: instruction: name of an MMA_ROWS or WGMMA_ROWS row, or "simt"; warps along M and N; wait: how many later
    wgmma groups may still be in flight when the next statement begins, -1 for no wait.  in_flight: other wgmma are in flight
    when it starts.  joined: it starts with the GEMM before it, whose fence orders its registers too.  behind: values that it
    reads are waited for here.  exchanged: c holds the transpose of a @ b, so that M of the operands is the number of columns of
    c.  columns: neighbours of M that a lane loads at once of an operand a with K outermost.  kept: an operand in registers is a
    copy of a shared tile, in the order of its wide loads.  urgent: its warps issue before those of other blocks.  transposed:
    loads of shared memory transpose operands with K outermost.
    """

    k_pack: int = 1
    instruction: str = ""
    warps: tuple[int, int] | None = None
    wait: int | None = None
    in_flight: bool = False
    joined: bool = False
    behind: bool = False
    exchanged: bool = False
    columns: int = 1
    kept: bool = False
    urgent: bool = False
    transposed: bool = False


@options
class ReducePlan(Options):
    """batch: set by the program: results that are combined at once.  spread: each copy of a result gets the partial result of
    its own thread (transform/lower/defer_reductions.py)."""

    batch: int = 1
    spread: bool = False
