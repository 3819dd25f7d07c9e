"""Records of a block's accesses to memory that other threads see, and of the loops around them."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilelang.ir import Buffer, Call, Const, Expr, Var, While
from tilelang.ir.record import entity, record


@record
class Update:
    """An atomic operation. used: its result is used."""

    family: str
    used: bool


@record
class Matrix:
    """An operand of wgmma in shared memory: the wgmma and the descriptor."""

    call: Call
    descriptor: Call


@entity
class Loop:
    """A loop around an access. var: None for while. independent: its iterations are those of a parallel loop. while_loop: the
    While statement, for a while loop."""

    var: Var | None
    start: Expr | None
    extent: Expr | None
    independent: bool = False
    while_loop: While | None = None
    defined: set[Any] = field(default_factory=set)  # variables defined inside the loop

    @property
    def count(self) -> int | None:
        return int(self.extent.value) if isinstance(self.extent, Const) else None

    @property
    def first(self) -> int | None:
        return int(self.start.value) if isinstance(self.start, Const) else None


@entity
class Access:
    """One access to memory that other threads can see.

    indices: None when unknown (the whole buffer). width: consecutive elements in the last dimension. loops: enclosing
    loops, outermost first. conds: conditions under which it runs (only conditions on threads and loops are of use).
    """

    buffer: Buffer
    reads: bool
    writes: bool
    update: Update | None
    indices: tuple[Expr, ...] | None
    width: int
    loops: tuple[Loop, ...]
    conds: tuple[Expr, ...]
    is_async: bool
    span: Any
    lanes: int = 32  # lanes of a warp whose address is used
    signals: Buffer | None = None  # mbarrier that signals its completion (TMA loads)
    by_wgmma: bool = False  # an asynchronous access that wgmma makes; the others are those of cp.async
    matrix: Matrix | None = None  # the operand, where wgmma reads it

    @property
    def is_shared(self) -> bool:
        """Whether it is in the block's shared memory (else global)."""
        return self.buffer.scope_name.startswith("shared")


@record
class Relation:
    """The loops that lie between a run of an earlier access and a run of a later one.

    carried: (loop, number of iterations in between; None = unknown), for runs in different iterations of a loop. entered:
    loops that only the later access is in, or that the earlier one was in before, with the number of the iteration, where
    that is known.
    """

    carried: tuple[Loop, int | None] | None = None
    entered: tuple[tuple[Loop, int], ...] = ()
