"""A launch as the CPU target runs it: what transform/cpu decides and codegen/cpu prints.

A block runs in one CPU thread.  Its statements run one after another; a statement that depends on the thread index is a
loop over the block's threads (ThreadLoop), as if a barrier stood between any two statements.  Where warp groups or blocks
wait for each other, each warp role of a block is a coroutine, and a CPU thread resumes those of a group in rotation.

    CpuLaunch
      codes: for each warp role, its statements and which values differ between threads
      slots: buffers that lie in the arena of the worker
      null_checks, when_null: pointers that are tested before or inside the launch
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from tilelang.ir import (AddressOf, Buffer, Call, Expr, Launch, Load, Node, Parallel, Stmt, Store, TileOp, Var, dtype, walk,
                         BARRIER, CLUSTER_BARRIER, PRIVATE)
from tilelang.ir.nodes import node
from tilelang.ir.record import record

from .cpu import HostCpu
from .shared_space import SharedSpace
from .thread_calls import BLOCK_VOTES, LANE_CALLS, MATRIX_CALLS, PER_THREAD

BARRIER_WORDS = 4  # i64 words of an mbarrier in its storage: count, pending arrivals, expected bytes, phase
_PER_LANE = frozenset((*LANE_CALLS, *MATRIX_CALLS, "in_warp_groups"))


# ---- statements that only the CPU target has ------------------------------------------------------------------------------


@node
class ThreadLoop(Stmt):
    """body for each thread of the warp role, one thread after another."""

    body: Stmt
    span: Any = None


@node
class Collective(Stmt):
    """body, executed by its threads as one: a matrix instruction, an exchange between lanes, a named barrier, a copy that one
    thread starts.  body is an Evaluate of all threads, or a Masked for the threads of a mask."""

    body: Stmt
    span: Any = None


@node
class Masked(Stmt):
    """body, one simple statement or a run of them, for the threads in which mask holds.

    only_returned_absent: all threads outside the mask have returned, so that barriers and votes of the block are those of
    the threads inside.  live: else, which threads have not returned; None where none may have.
    """

    mask: Expr
    body: Stmt
    only_returned_absent: bool = False
    live: Expr | None = None
    span: Any = None


@node
class OncePerBlock(Stmt):
    """body runs once, by the last warp role that arrives; then all go on.  barrier: number of the barrier of the warp roles."""

    body: Stmt
    barrier: int
    span: Any = None


# ---- accesses of global memory ----------------------------------------------------------------------------------------------
#
# An access of a tensor that lies outside of its shape reads the tensor's safe value, or stores nothing.  guards: the dimensions
# whose index is not proven to be inside.  An access that no pass has looked at is guarded in all dimensions.


@node
class CheckedLoad(Load):
    """A load with the dimensions that need a guard."""

    guards: tuple[int, ...] = ()

    def __init__(self, buffer: Buffer, indices: tuple[Expr, ...], dtype: dtype, guards: tuple[int, ...] = (),
                 span: Any = None) -> None:  # span stands last in every node
        super().__init__(buffer, indices, dtype, span)
        object.__setattr__(self, "guards", guards)


@node
class CheckedStore(Store):
    """A store with the dimensions that need a guard."""

    guards: tuple[int, ...] = ()

    def __init__(self, buffer: Buffer, indices: tuple[Expr, ...], value: Expr, guards: tuple[int, ...] = (),
                 span: Any = None) -> None:
        super().__init__(buffer, indices, value, span)
        object.__setattr__(self, "guards", guards)


@node
class CheckedAddress(AddressOf):
    """The address of an atomic update, with the dimensions that need a guard."""

    guards: tuple[int, ...] = ()

    def __init__(self, buffer: Buffer, indices: tuple[Expr, ...], dtype: dtype, guards: tuple[int, ...] = (),
                 span: Any = None) -> None:
        super().__init__(buffer, indices, dtype, span)
        object.__setattr__(self, "guards", guards)


@record
class RangeTest:
    """high < size, and 0 <= low where that is not proven; values known before a nest."""

    low: Expr
    high: Expr
    size: Any
    test_low: bool


@node
class NestVersions(Stmt):
    """A Parallel in two versions: one for nests whose accesses all lie inside their tensors, and one with more guards."""

    tests: tuple[RangeTest, ...]
    inside: Parallel
    edge: Parallel
    span: Any = None


@record
class TileSide:
    """An operand of a tile operation as a loop nest.

    loop_of: for each dimension the loop that walks it, -1 for one that no loop does.  clipped: (loop, dimension) of loops that
    may run outside of the tensor.  guarded: dimensions without a loop whose index may lie outside.
    """

    loop_of: tuple[int, ...]
    clipped: tuple[tuple[int, int], ...] = ()
    guarded: tuple[int, ...] = ()


@node
class TileLoops(Stmt):
    """A copy, transpose, fill or atomic update as a loop nest.  extents: of the loops.  dst, src: its operands."""

    op: TileOp
    extents: tuple[Any, ...]
    dst: TileSide
    src: TileSide | None = None
    span: Any = None


# ---- matrix multiplication -----------------------------------------------------------------------------------------------


@record
class GemmShape:
    """A GEMM on tiles with static strides (elements): a[i*ai + k*ak], b[k*ldb + j], c[i*ldc + j].

    compute: type that is multiplied and accumulated in.  pairs: elements of a and b are pairs of 16-bit integers, and k counts
    pairs.
    """

    m: int
    n: int
    k: int
    ai: int
    ak: int
    ldb: int
    ldc: int
    compute: dtype
    c: dtype
    pairs: bool = False

    @property
    def name(self) -> str:
        """The name of the function that computes it."""
        kind = "pairs" if self.pairs else str(self.compute)
        return f"gemm_{self.m}x{self.n}x{self.k}_{kind}_{self.c}_{self.ai}_{self.ak}_{self.ldb}_{self.ldc}"


@record
class Packing:
    """How an operand is converted into scratch space.

    kind: convert, transpose, pairs_of_rows, pairs_of_columns, transposed_pairs (codegen/cpu/gemm_pack.py).  rows, cols: of the
    operand as it lies.  row, col: its strides in elements.  at, scratch: first byte in the scratch space, and bytes used.
    """

    kind: str
    rows: int
    cols: int
    row: int
    col: int
    at: int
    scratch: int


@node
class BlockedGemm(Stmt):
    """A Gemm as a register-blocked kernel.  rows, vectors: of the accumulator block.  pack_a, pack_b: operands to convert."""

    op: TileOp
    shape: GemmShape
    rows: int
    vectors: int
    pack_a: Packing | None = None
    pack_b: Packing | None = None
    span: Any = None


# ---- records --------------------------------------------------------------------------------------------------------------


def is_private(b: Buffer) -> bool:
    """Whether each thread has its own b."""
    return b.scope_name in PRIVATE


def is_barrier_array(b: Buffer) -> bool:
    """Whether a buffer is an array of mbarriers."""
    return bool(b.scope() in (BARRIER, CLUSTER_BARRIER))


@record
class ThreadValues:
    """What differs between the threads of a launch.

    count: threads of a block.  indices: the thread indices.  varying: Vars that differ between threads.  private: storage
    (data Vars) with one copy for each thread.
    """

    count: int
    indices: tuple[Var, ...]
    varying: Set[Var]
    private: Set[Var]

    def varies(self, e: Any) -> bool:
        """Whether an expression (or a tuple of them) may differ between threads."""
        if isinstance(e, tuple):
            return any(self.varies(x) for x in e)
        if not isinstance(e, Node):
            return False
        agreed = {id(x) for n in walk(e) if isinstance(n, Call) and n.op in BLOCK_VOTES for x in walk(n)}
        for n in walk(e):
            if id(n) in agreed:
                continue  # one answer for the block, whatever each thread votes
            if isinstance(n, Var) and n in self.varying or isinstance(n, Buffer) and self.varies_place(n):
                return True
            if isinstance(n, Load) and n.buffer.data in self.private:
                return True
            if isinstance(n, Call) and (n.op in PER_THREAD or n.op in _PER_LANE):
                return True
        return False

    def varies_place(self, b: Buffer) -> bool:
        """Whether a buffer lies at another address for each thread: made of an address, or of an offset, that differs."""
        return b.data in self.varying or any(isinstance(d, Expr) and self.varies(d)
                                             for d in (b.offset, *b.shape, *(b.strides_ or ())))


@record
class WarpRole:
    """Warp groups that run the same code.  ranges: their threads, from and up to."""

    number: int
    groups: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


@record
class StorageSlot:
    """Storage of a buffer in the arena of the worker.  copies: elements for each element of the buffer (one a thread)."""

    buffer: Buffer
    copies: int


@record
class WarpRoleCode:
    """What one warp role runs.  body: with the statements above in it.  scratch: bytes of space for converted GEMM operands."""

    warp_role: WarpRole
    body: Stmt
    values: ThreadValues
    scratch: int = 0


@record
class NullCheck:
    """An address that must not be null.  text: what the call reports where it is."""

    var: Var
    text: str


@node
class CpuLaunch(Stmt):
    """A launch as the CPU target runs it.

    launch: grid, block and thread indices, settings; its body is that of the program.
    codes: for each warp role what it runs; one where no warp roles wait for each other.
    waits: warp roles or blocks wait for each other, or name shared memory by address: warp roles are coroutines.
    slots: buffers of a block that lie in the arena.  space: addresses of shared buffers that descriptors name.
    warp_role_barriers: barriers between the warp roles of a block.  grid_barrier: all blocks of the launch meet.
    lane_faults: exchanges between lanes may fail while the program runs.
    null_checks: addresses that are tested where they are bound.  pointers, when_null: untyped pointer parameters, and the form
    of the launch that runs where one of them is null; None: this one runs always.
    """

    launch: Launch
    codes: tuple[WarpRoleCode, ...]
    waits: bool
    slots: tuple[StorageSlot, ...]
    space: SharedSpace
    warp_role_barriers: int = 0
    grid_barrier: bool = False
    lane_faults: bool = False
    null_checks: tuple[NullCheck, ...] = ()
    pointers: tuple[Var, ...] = ()
    when_null: CpuLaunch | None = None
    span: Any = None


@record
class CpuPlan:
    """A program planned for a processor.  func: its launches, and statements outside of T.Kernel, are CpuLaunch."""

    func: Any
    host: HostCpu


__all__ = ["BARRIER_WORDS", "BlockedGemm", "CheckedAddress", "CheckedLoad", "CheckedStore", "Collective", "CpuLaunch",
           "CpuPlan", "GemmShape", "Masked", "NestVersions", "NullCheck", "OncePerBlock", "Packing", "RangeTest",
           "StorageSlot", "ThreadLoop", "ThreadValues", "TileLoops",
           "TileSide", "WarpRole", "WarpRoleCode", "is_barrier_array", "is_private"]
