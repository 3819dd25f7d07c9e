"""The IR of a launch on the CPU target, which transform/cpu builds and codegen/cpu prints.

A block runs in one CPU thread.  Its statements run one after another.  A statement that depends on the thread index becomes a
loop over the threads of the block (ThreadLoop), as if there were a barrier between any two statements.  Where warp groups or
blocks wait for each other, each warp role of a block is a coroutine, and a CPU thread resumes the coroutines of a group in
rotation.

    CpuLaunch
      codes: for each warp role, its statements and which values differ between threads
      slots: buffers in the arena of the worker thread
      null_checks, when_null: pointers that are tested before or inside the launch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import field
from typing import Any, ClassVar

from tilelang.ir import (AddressOf, Buffer, Call, Expr, Func, Launch, Load, Node, Parallel, Stmt, Store, TileOp, Var, dtype,
                         node, replace, rewrite, walk, BARRIER, CLUSTER_BARRIER, PRIVATE)
from tilelang.ir.phases import CPU
from tilelang.ir.stmt import BackendStmt
from tilelang.ir.record import record

from .shared_space import SharedSpace
from .thread_calls import BLOCK_VOTES, LANE_CALLS, MATRIX_CALLS, PER_THREAD

BARRIER_WORDS = 4  # i64 words of an mbarrier in its storage: count, pending arrivals, expected bytes, phase
_PER_LANE = frozenset((*LANE_CALLS, *MATRIX_CALLS, "in_warp_groups"))


# ---- statements that only the CPU target has ------------------------------------------------------------------------------


class CpuStmt(BackendStmt):
    """Base class of the statements of the CPU target."""

    phase: ClassVar[str] = CPU


@node
class ThreadLoop(CpuStmt):
    """body for each thread of the warp role, one thread after another."""

    body: Stmt
    span: Any = None


@node
class Collective(CpuStmt):
    """body, executed once for all of its threads together: a matrix instruction, an exchange between lanes, a named barrier, or
    a copy that one thread starts.  body is an Evaluate of all threads, or a Masked for the threads of a mask."""

    body: Stmt
    span: Any = None


@node
class Masked(CpuStmt):
    """body, one simple statement or a run of them, for the threads in which mask holds.

    only_returned_absent: all threads outside the mask have returned, so that barriers and votes of the block count only the
    threads inside.  live: otherwise the mask of the threads that have not returned; None if no thread can have returned.
    """

    mask: Expr
    body: Stmt
    only_returned_absent: bool = False
    live: Expr | None = None
    span: Any = None


@node
class OncePerBlock(CpuStmt):
    """body runs once, in the last warp role that arrives; then all continue.  barrier: number of the warp roles' barrier.

    arriving: how many of them come; 0: all of the block that have not ended.
    """

    body: Stmt
    barrier: int
    arriving: int = 0
    span: Any = None


# ---- accesses of global memory ----------------------------------------------------------------------------------------------
#
# An access outside the shape of a tensor reads the tensor's safe value, or stores nothing.  guards: the dimensions whose index
# is not proven to be inside.  An access that no pass has analysed is guarded in all dimensions.


@node
class CheckedLoad(Load):
    """A load with the dimensions that need a guard."""

    guards: tuple[int, ...] = ()

    def __init__(self, buffer: Buffer, indices: tuple[Expr, ...], dtype: dtype, guards: tuple[int, ...] = (),
                 span: Any = None) -> None:  # span is the last parameter of every node
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
    """The test high < size, and 0 <= low where that is not proven, of values known before a loop nest."""

    low: Expr
    high: Expr
    size: Any
    test_low: bool


@node
class NestVersions(CpuStmt):
    """A Parallel in two versions: one for the case that all accesses lie inside their tensors, and one with more guards."""

    tests: tuple[RangeTest, ...]
    inside: Parallel
    edge: Parallel
    span: Any = None

    def scopes(self) -> tuple[tuple[tuple[Node, ...], Stmt], ...]:
        return ((), self.inside), ((), self.edge)


@record
class TileSide:
    """An operand of a tile operation as a loop nest.

    loop_of: for each dimension the loop that iterates over it, -1 if there is none.  clipped: (loop, dimension) of loops whose
    index may leave the tensor.  guarded: dimensions without a loop whose index may lie outside.
    """

    loop_of: tuple[int, ...]
    clipped: tuple[tuple[int, int], ...] = ()
    guarded: tuple[int, ...] = ()


@node
class TileLoops(CpuStmt):
    """A copy, transpose, fill or atomic update as a loop nest.  extents: of the loops.  dst, src: its operands."""

    op: TileOp
    extents: tuple[Any, ...]
    dst: TileSide
    src: TileSide | None = None
    span: Any = None


@node
class ReduceLoops(CpuStmt):
    """A Reduce as loops.  lanes: elements that are accumulated side by side in a vector, 1 for one after another."""

    op: TileOp
    lanes: int
    span: Any = None


# ---- matrix multiplication -----------------------------------------------------------------------------------------------


@record
class GemmShape:
    """A GEMM on tiles with static strides (elements): a[i*ai + k*ak], b[k*ldb + j], c[i*ldc + j].

    compute: type that is multiplied and accumulated in.  group: elements of a and b are words of so many integers along k (two
    of 16 bits; four bytes, those of a unsigned), and k counts words.  above: bytes of a are 128 above the elements.
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
    group: int = 1
    above: bool = False

    @property
    def name(self) -> str:
        """The name of the function that computes it."""
        kind = f"words_of_{self.group}{'_above' * self.above}" if self.group > 1 else str(self.compute)
        return f"gemm_{self.m}x{self.n}x{self.k}_{kind}_{self.c}_{self.ai}_{self.ak}_{self.ldb}_{self.ldc}"


@record
class Packing:
    """How an operand is converted into scratch space.

    kind: convert, transpose, words_of_rows, words_of_columns, transposed_words (codegen/cpu/gemm.py).  rows, cols: of the
    operand as it lies.  row, col: its strides in elements.  at, scratch: first byte in the scratch space, and bytes used.
    lanes: elements that are converted at a time.  group, above: of words, as GemmShape says.
    """

    kind: str
    rows: int
    cols: int
    row: int
    col: int
    at: int
    scratch: int
    lanes: int
    group: int = 1
    above: bool = False

    @property
    def of_words(self) -> Packing:
        """The transposition of rows of words, the second step of transposed_words."""
        words = -(-self.cols // self.group)
        return Packing("transpose", self.rows, words, words, 1, self.at, self.scratch // 2, min(8, self.lanes // self.group))


@node
class BlockedGemm(CpuStmt):
    """A Gemm as a register-blocked kernel.

    rows, vectors: of the accumulator block.  lanes: elements of a vector.  fma: one rounding for each multiply-add.
    pack_a, pack_b: operands to convert.
    """

    op: TileOp
    shape: GemmShape
    rows: int
    vectors: int
    lanes: int
    fma: bool
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
    """Which values differ between the threads of a launch.

    count: threads of a block.  indices: the thread indices.  varying: Vars that differ between threads.  private: storage
    (data Vars) with one copy for each thread.  units: bytes of the units of private storage that has views of other element
    sizes: the elements of every view lie inside of units.
    """

    count: int
    indices: tuple[Var, ...]
    varying: Set[Var]
    private: Set[Var]
    units: Mapping[Var, int] = field(default_factory=dict)

    def unit_of(self, b: Buffer) -> int:
        """Bytes that lie side by side in private storage, before the same bytes of the next thread."""
        return self.units.get(b.data, b.dtype.bytes)

    def varies(self, e: Any) -> bool:
        """Whether an expression (or a tuple of them) may differ between threads."""
        if isinstance(e, tuple):
            return any(self.varies(x) for x in e)
        if not isinstance(e, Node):
            return False
        agreed = {id(x) for n in walk(e) if isinstance(n, Call) and n.op in BLOCK_VOTES for x in walk(n)}
        for n in walk(e):
            if id(n) in agreed:
                continue  # a vote has one result for the whole block
            if isinstance(n, Var) and n in self.varying or isinstance(n, Buffer) and self.varies_place(n):
                return True
            if isinstance(n, Load) and n.buffer.data in self.private:
                return True
            if isinstance(n, Call) and (n.op in PER_THREAD or n.op in _PER_LANE):
                return True
        return False

    def varies_place(self, b: Buffer) -> bool:
        """Whether the address of a buffer differs between threads, because its base address or its offset does."""
        return b.data in self.varying or any(map(self.varies, b.exprs))


@record
class WarpRole:
    """Warps that run the same code.  ranges: their threads, as (first, end)."""

    number: int
    warps: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


@record
class StorageSlot:
    """Storage of a buffer in the arena of the worker.  copies: number of copies of each unit (one for each thread).

    unit: bytes of a unit, see ThreadValues; 0: an element.
    """

    buffer: Buffer
    copies: int
    unit: int = 0


@record
class WarpRoleCode:
    """The code of one warp role.  body: may contain the CPU statements above.  scratch: bytes for converted GEMM operands."""

    warp_role: WarpRole
    body: Stmt
    values: ThreadValues
    scratch: int = 0

    def having(self, body: Stmt) -> WarpRoleCode:
        """The code with another body."""
        return self if body is self.body else WarpRoleCode(self.warp_role, body, self.values, self.scratch)


@record
class NullCheck:
    """An address that must not be null.  text: the error message if it is null."""

    var: Var
    text: str


@node
class CpuLaunch(CpuStmt):
    """A launch as the CPU target runs it.

    launch: grid, block and thread indices, settings; its body is that of the program.
    codes: the code of each warp role; a single one where no warp roles wait for each other.
    waits: warp roles or blocks wait for each other, or use addresses of shared memory, so that warp roles are coroutines.
    slots: buffers of a block in the arena.  space: addresses of the shared buffers that descriptors refer to.
    warp_role_barriers: number of barriers between the warp roles of a block.  grid_barrier: there is a barrier of all blocks.
    lane_faults: exchanges between lanes may fail at run time.
    may_alias: data of the tensors that may overlap other tensors.
    null_checks: addresses that are tested where they are bound.  pointers, when_null: untyped pointer parameters, and the
    version of the launch for calls in which one of them is null; None: this version is used for all calls.
    """

    launch: Launch
    codes: tuple[WarpRoleCode, ...]
    waits: bool
    slots: tuple[StorageSlot, ...]
    space: SharedSpace
    warp_role_barriers: int = 0
    grid_barrier: bool = False
    lane_faults: bool = False
    may_alias: tuple[Var, ...] = ()
    null_checks: tuple[NullCheck, ...] = ()
    pointers: tuple[Var, ...] = ()
    when_null: CpuLaunch | None = None
    span: Any = None

    def scopes(self) -> tuple[tuple[tuple[Node, ...], Stmt], ...]:
        names = (*self.launch.block_vars, *self.launch.thread_vars)
        return (*((names, c.body) for c in self.codes), *(() if self.when_null is None else (((), self.when_null),)))


def rewrite_codes(func: Func, fn: Callable[[WarpRoleCode], WarpRoleCode]) -> Func:
    """A planned program with the code of each warp role of each launch replaced by fn of it."""
    def launch(s: CpuLaunch) -> CpuLaunch:  # `rewrite` comes to s.when_null before s
        codes = tuple(map(fn, s.codes))
        return s if all(a is b for a, b in zip(codes, s.codes)) else replace(s, codes=codes)

    out: Func = rewrite(func, launch, CpuLaunch)
    return out
