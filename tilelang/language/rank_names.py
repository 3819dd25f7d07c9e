"""Names of other systems for programs of several blocks and ranks: barriers of a grid in global memory, fences."""

from __future__ import annotations

from typing import Any

from tilelang.ir import GLOBAL, I32, Buffer, BufferFacts, Const, Var, as_bool, binary

from .alloc import alloc_var
from .distributed import atom_add, barrier_all, get_num_ranks, get_rank, wait_ge
from .kernel import need_kernel, thread_index
from .thread import emit_call, sync_threads
from .tracing.builder import Emitted, need_builder
from .tracing.scope import IfFrame
from .tracing.state import describe, error, example
from .tile import EMITTED

get_pe, get_pe_num = get_rank, get_num_ranks
barrier_blocks = sync_blocks = barrier_all


@example("Y[i] = X[i]", "T.fence_gpu()")
def fence_gpu() -> Emitted:
    """Accesses of this thread before the fence are ordered before those after it, for the threads of the device."""
    return emit_call("fence_gpu")


@example("Y[i] = X[i]", "T.fence_cta()")
def fence_cta() -> Emitted:
    """Accesses of this thread before the fence are ordered before those after it, for the threads of the block."""
    return emit_call("fence_block")


# ---- barriers of a grid ---------------------------------------------------------------------------------------------------


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.sync_barrier_gpu(bar)")
def alloc_barrier_gpu() -> Buffer:
    """A barrier in global memory that all blocks of the launch see, for T.init_barrier_gpu.  It is new in every launch."""
    b = need_builder("T.alloc_barrier_gpu")
    return b.allocate(Buffer(b.fresh_name("barrier"), (1,), I32, GLOBAL, facts=BufferFacts(zeroed=True), span=b.here()))


def _phases(barrier: Any, what: str) -> tuple[int, Var]:
    known: dict[Any, tuple[int, Any]] = need_kernel(what).__dict__.setdefault("gpu_barriers", {})
    if not isinstance(barrier, Buffer) or barrier.data not in known:
        raise error("signal-operand", f"{what} of ‹{describe(barrier)}›, which T.init_barrier_gpu has not set up",
                    expected="a barrier of T.alloc_barrier_gpu that is set up before")
    return known[barrier.data]


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)")
def init_barrier_gpu(barrier: Any, expected: Any) -> Emitted:
    """Say how many blocks arrive at a barrier in each phase.  Every block reaches it, before it uses the barrier.

    barrier: of T.alloc_barrier_gpu.  expected: an integer.
    """
    frame = need_kernel("T.init_barrier_gpu")
    if not isinstance(barrier, Buffer) or barrier.scope_name != GLOBAL or barrier.dtype != I32:
        raise error("signal-operand", f"T.init_barrier_gpu of ‹{describe(barrier)}›",
                    expected="a barrier of T.alloc_barrier_gpu")
    frame.__dict__.setdefault("gpu_barriers", {})[barrier.data] = (expected, alloc_var("int32", init=0))
    return EMITTED


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.arrive_barrier_gpu(bar)", "T.wait_barrier_gpu(bar)")
def arrive_barrier_gpu(barrier: Any) -> Emitted:
    """The block arrives: what it did before is seen by the blocks that wait.  The whole block reaches it."""
    _phases(barrier, "T.arrive_barrier_gpu")
    sync_threads()
    with IfFrame(as_bool(binary("eq", thread_index(), Const(0, I32)))):
        atom_add(barrier[0], 1, scope="gpu", sem="release")
    return EMITTED


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.arrive_barrier_gpu(bar)", "T.wait_barrier_gpu(bar)")
def wait_barrier_gpu(barrier: Any) -> Emitted:
    """Wait until all blocks of a phase have arrived: the first wait of a block for the first phase, and so on.

    The whole block reaches it.  The launch becomes cooperative.
    """
    expected, count = _phases(barrier, "T.wait_barrier_gpu")
    b = need_builder("T.wait_barrier_gpu")
    b.store(count.buffer, count.indices, count + 1)  # type: ignore[attr-defined]
    wait_ge(barrier[0], count * expected)
    return EMITTED


@example("bar = T.alloc_barrier_gpu()", "T.init_barrier_gpu(bar, 8)", "T.sync_barrier_gpu(bar)")
def sync_barrier_gpu(barrier: Any) -> Emitted:
    """T.arrive_barrier_gpu, then T.wait_barrier_gpu."""
    arrive_barrier_gpu(barrier)
    return wait_barrier_gpu(barrier)


__all__ = ["alloc_barrier_gpu", "arrive_barrier_gpu", "barrier_blocks", "fence_cta", "fence_gpu", "get_pe", "get_pe_num",
           "init_barrier_gpu", "sync_barrier_gpu", "sync_blocks", "wait_barrier_gpu"]
