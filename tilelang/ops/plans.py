"""Plans of tile operations: what the program asks for and what passes decide.  They end when the operations are lowered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilelang.ir.options import Options, options

if TYPE_CHECKING:
    from tilelang.ir import Buffer, Expr


@options
class TransferPlan(Options):
    """What TMA can do: copies, and sums of tiles.

    Asked for: disable_tma; use_tma: by TMA or not at all; prefer_instruction: "tma", "cp_async" or "sync"; eviction_policy
    of L2.
    Decided: tma: TMA moves boxes of it, started by one thread; bulk: it is one contiguous run (ops/bulk.py), boxes: of rows
    that a tensor map describes.  awaited: whoever starts a store waits for it.  unaligned_columns: no whole 16 bytes.
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
    """Asked for
        coalesced_width: elements that a thread takes at once.  loop_layout: the Fragment of the copy's elements.
        by_hand: T.tma_copy, which one thread starts and nobody waits for; cluster_mask: the CTAs that get the tile;
        leader_scope: threads of which one starts it.  dst_block: rank of the CTA whose shared memory it writes.
    Decided, or asked for by T.tma_copy and T.copy_cluster
        barrier = (buffer, index): the mbarrier that the bytes arrive on; expect: which is told their number first.
        async_group: by cp.async, completed by a later wait.  share = (rank, CTAs, mask): each CTA of a cluster loads a part and
        sends it to all.  turn: iterations whose tiles come at once.  tf32: elements are rounded to tf32 on the way.
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
    share: tuple[Any, ...] | None = None
    turn: int = 1
    tf32: bool = False


@options
class AtomicPlan(TransferPlan):
    """memory_order: by its C++ name, None for relaxed."""

    memory_order: str | None = None


@options
class GemmSchedule(Options):
    """Asked for: k_pack (other vendors' matrix units); wait = -1: T.wgmma_gemm, which nobody waits for.
    Decided: instruction: name of an MMA_ROWS or WGMMA_ROWS row, or "simt"; warps along M and N; wait: how many later groups of
    wgmma may still run when the next statement begins, -1 for no wait.  in_flight: others run when it starts.  behind: values
    that it reads are waited for here.
    """

    k_pack: int = 1
    instruction: str = ""
    warps: tuple[int, int] | None = None
    wait: int | None = None
    in_flight: bool = False
    behind: bool = False


@options
class ReducePlan(Options):
    """batch: asked for, results that are combined at once.  spread: each copy of a result gets the part of its own thread
    (transform/lower/defer_reductions.py)."""

    batch: int = 1
    spread: bool = False
