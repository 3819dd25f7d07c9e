"""Accesses of a block's threads to memory that other threads see, and the loops around them."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilelang.ir import Buffer, Const, Expr, Var, While
from tilelang.ir.record import entity, record


@record
class Update:
    """An atomic operation.  used: something is made of its result."""

    family: str
    used: bool


@entity
class Loop:
    """A loop around an access.  var: None for while.  independent: its iterations are those of a parallel loop.  turns: the
    statement of a while loop."""

    var: Var | None
    start: Expr | None
    extent: Expr | None
    independent: bool = False
    turns: While | None = None
    defined: set[Any] = field(default_factory=set)  # Vars defined inside

    @property
    def count(self) -> int | None:
        return int(self.extent.value) if isinstance(self.extent, Const) else None

    @property
    def first(self) -> int | None:
        return int(self.start.value) if isinstance(self.start, Const) else None


@entity
class Access:
    """One access to memory that other threads can see.

    indices: None when unknown (the whole buffer).  width: consecutive elements in the last dimension.  loops: around
    it, outermost first.  conds: conditions under which it runs (those that are values of threads and loops help).
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
    lanes: int = 32  # lanes of a warp whose address counts
    signals: Buffer | None = None  # mbarrier that tells when it has happened (TMA loads)

    @property
    def is_shared(self) -> bool:
        """Whether it is in the block's shared memory (else global)."""
        return self.buffer.scope_name.startswith("shared")


@record
class Relation:
    """How the run of an earlier access relates to that of a later one.

    carried: (loop, iterations in between, None = unknown).  entered: loops that the later one is in and the earlier one
    is not, or was in before, with the number of the iteration, where that is known.
    """

    carried: tuple[Loop, int | None] | None = None
    entered: tuple[tuple[Loop, int], ...] = ()


__all__ = ["Access", "Loop", "Relation", "Update"]
