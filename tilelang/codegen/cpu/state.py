"""The state of a function while it is printed: values and storage of names, faults, and the position among the threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import Call, Var, dtype
from tilelang.target.cpu_launch import NullCheck, ThreadValues, WarpRole
from tilelang.target.tensor_map import TensorMap
from tilelang.target.thread_calls import public_name

from .coroutine import Coroutine
from .shared_addresses import AddressTable


# ---- lanes that exchange values wrongly -------------------------------------------------------------------------------

# Source of the rules: PTX ISA, "vote.sync", "match.sync", "shfl.sync". The texts are those of the simulators
# (sim-warp-divergence).
ABSENT, OUTSIDE, OTHER, SOURCE, PARTIAL = range(5)
FAULT_TEXTS = ("names a lane in its mask that does not execute it",
               "is executed by a lane that is not in the mask that it passes",
               "names a lane in its mask that passes another mask", "reads from a lane that does not execute it",
               "takes all 32 lanes of a warp, and only some execute it")


@dataclass
class LaneFaults:
    """The faults that may occur while a launch runs. A word holds the number of the first one that occurred, 0 while there is
    none.

    word: the Var that stands for the address of the word. texts: number - 1 -> text. nulls: addresses that must not be null.
    """

    word: Var = field(default_factory=lambda: Var("lane_fault", dtype("handle")))
    texts: list[str] = field(default_factory=list)
    nulls: dict[Var, int] = field(default_factory=dict)

    def add_null_checks(self, checks: tuple[NullCheck, ...]) -> None:
        """Number the texts of addresses that must not be null."""
        for c in checks:
            self.texts.append(c.text)
            self.nulls[c.var] = len(self.texts)

    def code(self, e: Call, fault: int, span: Any) -> int:
        """The number of a fault (index of FAULT_TEXTS) of a call."""
        where = f" ({os.path.basename(span.file)}:{span.line})" if span is not None else ""
        return self.add(f"{public_name(e.op)}{where} {FAULT_TEXTS[fault]}")

    def add(self, text: str) -> int:
        """The number of a text."""
        self.texts.append(text)
        return len(self.texts)


# ---- values and storage -----------------------------------------------------------------------------------------------


@dataclass
class Bound:
    """The value of a Var: its register value, or (integers) the i64 that equals it."""

    value: str | None = None
    wide: str | None = None


@dataclass
class Storage:
    """The storage of all buffers with one `data`.

    base: address of element 0. copies: number of threads that have their own copy (1: one for the block); element e of thread t
    is then at e * copies + t, so that a loop over threads accesses adjacent elements. unit: bytes of such an element; a view
    may have smaller elements.
    """

    base: str
    copies: int = 1
    unit: int = 0


# ---- threads ------------------------------------------------------------------------------------------------------------


@dataclass
class WarpRoleState:
    """A warp role as a coroutine.

    cluster: blocks of a cluster, warp roles of a block. maps: tensor maps by name. misuses: texts of misuses of maps and
    descriptors, and their numbers. addresses: of the shared buffers that descriptors name. waits: address of the number of
    waits at the cluster's barrier, created by the first one.
    """

    warp_role: WarpRole
    coroutine: Coroutine
    cluster: tuple[int, int]
    maps: Mapping[str, TensorMap]
    misuses: dict[str, int]
    addresses: AddressTable | None = None
    waits: str | None = None


@dataclass
class BlockState:
    """The current position among the threads of a block.

    values: which values differ between threads. extents, ranges: threads of the block along x, y, z, and those that this code
    is for. tid: linear thread index (i64) inside a loop over threads, else None. slots: values with one entry per thread.
    exchanged, voted: operands and results of the exchanges of the statement, by the identity of the call. active: a byte for
    each thread, whether it executes the statement; live: whether it has not returned; None: all do. only_returned_absent: the
    threads that do not execute the statement have returned. scratch: address of the space of the block for converted operands
    of GEMMs.
    """

    values: ThreadValues
    extents: tuple[int, int, int]
    ranges: tuple[tuple[int, int], ...]
    faults: LaneFaults
    warp_role: WarpRoleState | None = None
    tid: str | None = None
    slots: dict[Var, Storage] = field(default_factory=dict)
    exchanged: dict[int, Storage] = field(default_factory=dict)
    voted: dict[int, str] = field(default_factory=dict)
    active: str | None = None
    live: str | None = None
    only_returned_absent: bool = False
    in_parallel: bool = False
    scratch: str = "null"

    @property
    def count(self) -> int:
        """The number of threads of the block."""
        return self.values.count

    @property
    def first_thread(self) -> str:
        """The thread whose values stand for those of all threads of the warp role where these are equal."""
        return str(self.ranges[0][0])
