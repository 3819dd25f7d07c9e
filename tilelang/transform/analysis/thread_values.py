"""Which values differ between the threads of a block, or of a branch by warp group, at each point of a program.

Private arrays and variables are followed element by element and in execution order: the last store counts. Values from memory
and from votes of the block are the same for all threads, as long as all read the same element.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from tilelang.arith import Analyzer
from tilelang.errors import TileLangError
from tilelang.ir import (AddressOf, Binary, Buffer, Call, Const, Expr, Launch, Load, Node, Var, children, free_vars, contains,
                         is_const, substitute, PRIVATE)
from tilelang.ir.evaluate import evaluate
from tilelang.ir.record import state
from tilelang.target.intrinsics import INTRINSICS, WARP
from tilelang.target.thread_calls import BLOCK_VOTES, CLOCKS
from tilelang.target.warp_groups import WARP_LANES, holds_in

STALE, VARIES = 1, 2  # bits of an element: see Memory
_LANES = 32
_COMBINE = ("add", "mul", "min", "max", "bitand", "bitor", "bitxor", "and", "or")

Memory = dict[Var, np.ndarray]
"""A byte for each element of a private array: STALE, what it holds is an iteration's of T.Parallel that is over;
VARIES, it may differ between the threads."""


@state
class Values:
    """The facts that hold at one point of the program.

    launch, groups: the threads that run it (None: host code, one thread). varying: variables that differ between them.
    known: variables whose number is known. plain: variables computed from numbers alone. swapped: variables that are
    T.shfl_xor of a value. iteration: inside an iteration of T.Parallel, where an atomic's result belongs to the iteration.
    """

    launch: Launch | None = None
    warps: tuple[int, ...] = ()
    memory: Memory = field(default_factory=dict)
    varying: set[Var] = field(default_factory=set)
    known: dict[Var, Any] = field(default_factory=dict)
    plain: dict[Var, Expr] = field(default_factory=dict)
    swapped: dict[Var, Expr] = field(default_factory=dict)
    iteration: bool = False
    dtypes: dict[Var, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.threads, ranges = 1, {}
        if self.launch is not None:
            n = self.launch.num_threads
            low, high = min(self.warps) * WARP_LANES, min(n, (max(self.warps) + 1) * WARP_LANES)
            self.threads = min(n, len(self.warps) * WARP_LANES)
            for v, k in zip(self.launch.thread_vars, self.launch.threads):
                ranges[v] = (0, k - 1)
            if self.launch.threads[1:] == (1, 1):
                ranges[self.launch.thread_vars[0]] = (low, high - 1)
            self.varying |= {v for v, (a, b) in ranges.items() if a != b}
        self.analyzer = Analyzer(ranges)

    # ---- values

    def bind(self, v: Var, e: Expr) -> None:
        """v equals e from here on."""
        if self.varies(e):
            self.varying.add(v)
        else:
            self.varying.discard(v)
        value = self.value(e)
        if value is None:
            self.known.pop(v, None)
        else:
            self.known[v] = value
        if not contains(e, Load, Call, AddressOf):
            self.plain[v] = substitute(e, self.plain)
        elif isinstance(e, Call) and e.op == "shfl_xor":
            self.swapped[v] = e

    def value(self, e: Any) -> Any:
        """The number, or the value per lane, of an expression; None where unknown."""
        if not isinstance(e, Expr):
            return e
        if isinstance(e, Const):
            return e.value
        if isinstance(e, Var):
            return self.known.get(e)
        if contains(e, Load, Call, AddressOf) or not free_vars(e) <= self.known.keys():
            return None
        try:
            return np.asarray(evaluate(e, self.known))
        except (TileLangError, TypeError):
            return None

    def answer(self, cond: Expr) -> bool | None:
        """The value of a condition for all threads that are here; None where only the run of the program decides it."""
        got = {holds_in(cond, w) for w in self.warps}
        if len(got) == 1 and None not in got:
            return got.pop()
        value = self.value(cond)
        return None if value is None or np.ndim(value) else bool(value)

    def mixed(self, cond: Expr) -> bool:
        """Whether a condition differs between the warps that are here."""
        return len({holds_in(cond, w) for w in self.warps}) > 1

    def varies(self, e: Any) -> bool:
        """Whether the threads that are here may compute different values."""
        return self.threads > 1 and self._varies(e)

    def _varies(self, e: Any) -> bool:
        if isinstance(e, Const):
            return False
        if isinstance(e, Var):
            return e in self.varying
        if isinstance(e, Buffer):
            return self.elsewhere(e)
        if isinstance(e, Load):
            if any(map(self._varies, e.indices)) or self.elsewhere(e.buffer):
                return True
            return bool(self.bits(e.buffer, e.indices) & VARIES)
        if isinstance(e, Call):
            return self._call(e)
        if isinstance(e, Binary) and self._reduced(e):
            return False
        return any(self._varies(c) for c in children(e)) and not self._one(e)

    def _call(self, e: Call) -> bool:
        row = INTRINSICS.get(e.op)
        if e.op in BLOCK_VOTES:
            return False
        if e.op == "in_warp_groups":
            return self.mixed(e)
        if e.op.startswith("get_") or e.op in ("elect_one", "shuffle_elect", *CLOCKS):
            return True
        if e.op.startswith("atomic_") and e.op != "atomic_load" and not self.iteration:
            return True  # each thread gets the old value of its own update
        if row is not None and row.effect == WARP and self.threads <= _LANES:
            if e.op in ("any_sync", "all_sync", "ballot_sync", "ballot", "match_all_sync"):
                return False
            if e.op == "shfl_idx":
                return self._varies(e.args[1])
        return any(map(self._varies, e.args))

    def _reduced(self, e: Binary) -> bool:
        """Whether e is a step of a reduction over the lanes of the only warp: x + T.shfl_xor(x, n)."""
        if self.threads > _LANES or e.op not in _COMBINE:
            return False
        for a, b in ((e.a, e.b), (e.b, e.a)):
            b = self.swapped.get(b, b) if isinstance(b, Var) else b
            if isinstance(b, Call) and b.op == "shfl_xor" and b.args[0].same(a):
                return True
        return False

    def _one(self, e: Any) -> bool:
        """Whether an expression of thread indices has the same value for all threads that are left."""
        if not isinstance(e, Expr) or not e.dtype.is_int and not e.dtype.is_bool or e.dtype.lanes != 1:
            return False
        if contains(e, Load, Call, AddressOf):
            return False
        full = substitute(e, self.plain)
        if e.dtype.is_bool:
            return isinstance(self.analyzer.simplify(full), Const)
        low, high = self.analyzer.interval(full)
        return low is not None and low == high

    def elsewhere(self, b: Buffer) -> bool:
        """Whether a buffer is at a different place for each thread: made from an address, or with an offset, that differs."""
        return b.data in self.varying or any(map(self._varies, b.exprs))

    def cause(self, e: Any) -> Node | None:
        """The subexpression that makes an expression differ between threads."""
        for c in children(e) if not isinstance(e, (Var, Buffer)) else ():
            if self._varies(c):
                return self.cause(c)
        return e if isinstance(e, Node) else None

    # ---- private memory

    def follows(self, b: Buffer) -> bool:
        """Whether b is private memory that is followed."""
        return b.scope_name in PRIVATE and b.data in self.memory

    def begin(self, b: Buffer, bits: int) -> None:
        """Private memory is allocated."""
        if b.scope_name in PRIVATE and b.is_static:
            self.memory[b.data] = np.full(max(int(b.size), 1), bits, np.uint8)
            self.dtypes[b.data] = b.dtype

    def places(self, b: Buffer, indices: Any) -> Any:
        """The elements of its memory that an access uses: their numbers, or all where unknown."""
        size, flat = len(self.memory[b.data]), self.value(b.offset)
        if flat is None or b.dtype != self.dtypes[b.data]:
            return None
        for i, n in zip(indices, b.strides):
            at, step = self.value(i), self.value(n)
            if at is None or step is None:
                return None
            flat = flat + np.asarray(at, np.int64) * int(step)
        flat = np.atleast_1d(flat).astype(np.int64)
        return flat if flat.size and flat.min() >= 0 and flat.max() < size else None

    def bits(self, b: Buffer, indices: Any) -> int:
        """The bits that any of the elements of an access has."""
        if not self.follows(b):
            return 0
        held, at = self.memory[b.data], self.places(b, indices)
        return int(np.bitwise_or.reduce(held if at is None else held[at]))

    def put(self, b: Buffer, at: Any, bits: int) -> None:
        """Elements are stored: those of `at`, or one unknown element."""
        if at is None:
            self.memory[b.data] = self.memory[b.data] | np.uint8(bits)
        else:
            self.memory[b.data] = self.memory[b.data].copy()
            self.memory[b.data][at] = bits

    def region(self, r: Any) -> Any:
        """The elements of a region, as `places` gives them."""
        mins, extents = [self.value(m) for m in r.mins], [self.value(n) for n in r.extents]
        if any(x is None for x in (*mins, *extents)):
            return None
        axes = np.indices([int(n) for n in extents]).reshape(len(extents), -1)
        if axes.shape[1] == 0 or not is_const(r.buffer.offset, 0) and r.buffer.offset != 0:
            return None
        flat: Any = 0
        for m, a, n in zip(mins, axes, r.buffer.strides):
            step = self.value(n)
            if step is None:
                return None
            flat = flat + (int(m) + a) * int(step)
        ok = r.buffer.dtype == self.dtypes[r.buffer.data] and flat.min() >= 0 and flat.max() < len(self.memory[r.buffer.data])
        return flat if ok else None
