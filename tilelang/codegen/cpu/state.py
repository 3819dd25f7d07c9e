"""The state that the printers of values, memory and statements share about the function that they print.

    Code            one function: its text, meaning of names, known values, and its printers
      values        expressions as LLVM values            (values.py)
      indices       integers as exact i64                 (block_function.py)
      memory        addresses, loads, stores, guards      (memory.py)
      block         the current position among the threads of a block
        warp_role   the coroutine, in launches whose warp roles wait for each other

The printers use each other through the interfaces here.

The entry function of a program while it is printed: its Code, its workspaces, and the failures of a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilelang.arith import Analyzer
from tilelang.ir import GLOBAL, AddressOf, Alloc, Buffer, Call, Expr, Func, Load, Store, Var, dtype
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import NullCheck, ThreadValues, WarpRole
from tilelang.target.tensor_map import TensorMap
from tilelang.target.thread_calls import public_name

from .coroutine import Coroutine
from .shared_addresses import AddressTable
from .text import Fn
from .types import convert


def count_of(cx: Code, b: Buffer) -> str:
    """The number of elements of a buffer, i64."""
    out = "1"
    for d in b.shape:
        out = cx.f.mul(out, cx.index(d))
    return out


class HostFunction:
    """The function `ptr entry(params…)`, which returns null or the text of the failure. launches: how many were printed so far.
    """

    def __init__(self, code: Code, func: Func) -> None:
        self.code, self.func, self.launches = code, func, 0
        self._workspaces: list[str] = []

    def fail(self, message: str) -> None:
        """End the call with an error text, given by its address."""
        self.release()
        self.code.f.end(f"ret ptr {message}")

    def fail_if(self, wrong: str, message: str) -> None:
        """End the call with an error text where `wrong` (i1) holds."""
        self.code.f.branch(wrong, lambda: self.fail(message))

    def release(self) -> None:
        """Free the workspaces."""
        f = self.code.f
        free = f.module.declare("free", "void", "ptr")
        for p in self._workspaces:
            f.do(f"call void {free}(ptr {f.let(f'load ptr, ptr {p}')})")

    def allocate(self, s: Alloc) -> None:
        """A workspace in global memory that lives until the call ends."""
        f, b = self.code.f, s.buffer
        if b.scope() != GLOBAL:
            raise unsupported(f"an allocation in scope {b.scope()} outside a kernel", span=s.span)
        size = f.smax(f.mul(count_of(self.code, b), str(b.dtype.bytes)), "1")
        slot = f.alloca("ptr", hint="work")
        f.allocas.append(f"  store ptr null, ptr {slot}")
        make = f.module.declare("aligned_alloc", "ptr", "i64, i64")
        padded = f.mul(f.let(f"udiv i64 {f.add(size, '63')}, 64"), "64")
        if f.loops:  # the workspace of the previous iteration is no longer used
            free = f.module.declare("free", "void", "ptr")
            f.do(f"call void {free}(ptr {f.let(f'load ptr, ptr {slot}')})")
        got = f.let(f"call ptr {make}(i64 64, i64 {padded})")
        f.do(f"store ptr {got}, ptr {slot}")
        self._workspaces.append(slot)
        self.code.storage[b.data] = Storage(got)
        memory = f.module.string("out of memory for a global workspace")
        self.fail_if(f.let(f"icmp eq ptr {got}, null"), memory)


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


# ---- interfaces of the printers, and the function -----------------------------------------------------------------------


class Values(Protocol):
    """Expressions as LLVM values."""

    def value(self, e: Expr) -> str:
        """The register value of an expression (LLVM type value_type(e.dtype))."""

    def pack(self, scalars: list[str], dt: dtype) -> str:
        """A vector of dt from its lanes."""


class Indices(Protocol):
    """Integers as exact i64."""

    def index(self, e: Expr | int) -> str:
        """The exact i64 of an integer expression or Python int."""

    def extended(self, v: str, dt: dtype) -> str:
        """A register value of an integer type, extended to i64."""


class Memory(Protocol):
    """Memory accesses."""

    def strides(self, b: Buffer) -> list[str]:
        """The strides of a buffer in elements, i64."""

    def base_of(self, b: Buffer) -> Storage:
        """The storage of a buffer."""

    def address(self, b: Buffer, indices: list[str]) -> str:
        """The address of an element, without a guard."""

    def in_range(self, n: Load | Store | AddressOf, at: list[str]) -> str:
        """i1: whether the element of an access at indices `at` exists ("true" where that is known)."""

    def safe_value(self, b: Buffer, dt: dtype) -> str:
        """The value of a load outside b's shape."""

    def load(self, e: Load) -> str:
        """The value of a load."""


CallPrinter = Callable[["Code", Call], str]


@dataclass
class Code:
    """One function while it is printed.

    f: its text. analyzer: ranges of integers at this place. calls: printers of calls that use memory or threads. vars, storage:
    the values and storage of names. safe_values: the values of loads outside of a buffer. sources: C++ text that the launch
    puts in front of its kernel. span: the user's place.
    """

    f: Fn
    block: BlockState
    calls: Mapping[str, CallPrinter]
    analyzer: Analyzer = field(default_factory=Analyzer)
    vars: dict[Var, Bound] = field(default_factory=dict)
    storage: dict[Var, Storage] = field(default_factory=dict)
    safe_values: dict[Buffer, Expr] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    span: Any = None
    values: Values = field(init=False)
    indices: Indices = field(init=False)
    memory: Memory = field(init=False)

    def value(self, e: Expr) -> str:
        """See Values."""
        return self.values.value(e)

    def index(self, e: Expr | int) -> str:
        """See Indices."""
        return self.indices.index(e)

    def cast_value(self, e: Expr, dt: dtype) -> str:
        """The register value of an expression, converted to another type."""
        return convert(self.f, self.values.value(e), e.dtype, dt)

    def address(self, b: Buffer, indices: list[str]) -> str:
        """See Memory."""
        return self.memory.address(b, indices)

    def address_of(self, a: AddressOf) -> str:
        """The address that an AddressOf denotes."""
        return self.memory.address(a.buffer, [self.index(i) for i in a.indices])
