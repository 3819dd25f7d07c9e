"""The state that the handlers of the reference interpreter share while a program is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang.ir import (GLOBAL, PRIVATE, AddressOf, Bind, Break, Buffer, Call, Continue, Expr, For, Func, If, Launch, Load,
                         Seq, Stmt, Store, Var, While, numpy_dtype, walk)
from tilelang.ir.evaluate import Closure
from tilelang.target.intrinsics import INTRINSICS, PURE
from tilelang.target.shared_space import SharedSpace
from tilelang.target.thread_calls import BLOCK_VOTES

from ..addresses import Followed
from ..lane_ops import spread
from ..lanes import LaneFrame, is_address
from ..memory import Memory, geometry, linear_index, out_of_bounds, without_storage
from .block import WarpRole
from ..context import Context, Handlers, LaunchScope
from ..ranks import Ranks, Section

# ---- divergence ------------------------------------------------------------------------------------------------------

class Divergence:
    """Branches and loops of a launch that may be divergent; outside of a launch nothing is.

    written: tensors that the launch stores to.  vars: variables and private arrays whose values differ between threads.
    """

    def __init__(self, s: Launch | None = None) -> None:
        self.written: set[Any] = set()
        self.vars: set[Any] = set()
        if s is None:
            return
        self.written |= {n.buffer.data for n in walk(s.body) if isinstance(n, Store) and n.buffer.scope() == GLOBAL}
        self.vars |= set(s.thread_vars)
        size = 0
        while size != len(self.vars):
            size = len(self.vars)
            self._spread(s.body, False)

    def _spread(self, s: Stmt, some: bool) -> None:
        """Mark what differs between threads.  some: threads may execute s a different number of times."""
        if isinstance(s, Bind) and self.of(s.value):
            self.vars.add(s.var)
        elif isinstance(s, Store) and s.buffer.scope_name in PRIVATE and (some or self.of(s.value)):
            self.vars.add(s.buffer.data)
        elif isinstance(s, Seq):
            for x in s.stmts:
                self._spread(x, some)
        elif isinstance(s, If):
            inner = some or self.of(s.cond)
            self._spread(s.then, inner)
            if s.orelse is not None:
                self._spread(s.orelse, inner)
        elif isinstance(s, (For, While)):
            if isinstance(s, For) and self.at(s):
                self.vars.add(s.var)
            self._spread(s.body, some or self.at(s))

    def of(self, e: Any) -> bool:
        """Whether the value of an expression may differ between threads."""
        return any(n in self.vars if isinstance(n, Var) else isinstance(n, Load) and n.buffer.data in self.vars
                   or isinstance(n, Call) and n.op not in BLOCK_VOTES and not _pure(n) for n in walk(e))

    def at(self, s: Stmt) -> bool:
        """Whether threads may diverge at s: by its condition or extent, or because some leave a loop or an iteration early."""
        asked = (s.cond,) if isinstance(s, (If, While)) else (s.start, s.extent) if isinstance(s, For) else ()
        return any(map(self.of, asked)) or isinstance(s, (For, While)) and self._left(s.body, False)

    def _left(self, s: Stmt | None, some: bool) -> bool:
        """Whether some threads, but not all, may reach a break or continue of the loop around s."""
        if isinstance(s, If):
            inner = some or self.of(s.cond)
            return self._left(s.then, inner) or self._left(s.orelse, inner)
        return some if isinstance(s, (Break, Continue)) else isinstance(s, Seq) and any(self._left(x, some) for x in s.stmts)


def _pure(e: Call) -> bool:
    row = INTRINSICS.get(e.op)
    return row is not None and row.effect == PURE and not e.op.startswith("get_")


# ---- memory ----------------------------------------------------------------------------------------------------------

class TileMemory(Memory):
    """Compiles the addresses of accesses."""

    def locate(self, b: Buffer, indices: tuple[Expr, ...], count: int, span: Any,
               write: bool = False) -> Callable[[LaneFrame], Any]:
        """A function that returns (storage, indices, shape, element numbers, out of range).

        count: number of consecutive elements (vectors), 1 for a scalar.
        """
        fns = [self.c.expr(i) for i in indices]
        geo, at, bl = geometry(self.c, b), self.c.slot(b.data), b.dtype.lanes
        wide = [i.dtype.lanes > 1 for i in indices]
        ramp = any(wide)
        tail, last = np.arange(count) if count > 1 and not ramp else None, len(fns) - 1

        def run(f: LaneFrame) -> Any:
            store = f.slots[at]
            if store is None:
                raise without_storage(b, span)
            shape, strides, offset = geo(f)
            idx = [np.asarray(i(f)).astype(np.int64) for i in fns]
            if ramp:
                idx = [i if w else i[..., None] for i, w in zip(idx, wide)]
            elif tail is not None:
                idx = [i[..., None] + tail if d == last else i[..., None] for d, i in enumerate(idx)]
            linear, bad = linear_index(idx, shape, strides, offset)
            if bl > 1:
                idx = [i[..., None] for i in idx]
                linear = linear[..., None] * bl + np.arange(bl)
                bad = np.broadcast_to(bad[..., None], linear.shape)
                if ramp:
                    linear, bad = linear.reshape(*linear.shape[:-2], -1), bad.reshape(*bad.shape[:-2], -1)
            if isinstance(store, Section):
                linear = linear + store.shift(numpy_dtype(b.dtype).itemsize, ramp or bl > 1 or tail is not None)
                bad, store = np.broadcast_to(bad, linear.shape), store.memory
            if is_address(store):
                vector, need = ramp or bl > 1 or tail is not None, ~bad
                if f.mask is not None:
                    need = need & (f.mask[:, None] if vector else f.mask)
                store, linear = self.c.addresses.follow(store, linear, need, vector, 1, Followed(b, write, span))
            if store.lanes > 1:
                row = np.arange(store.lanes) * (store.nbytes // numpy_dtype(b.dtype).itemsize)
                vector = ramp or bl > 1 or tail is not None
                linear = linear + (row[:, None] if vector else row)
            return store, idx, shape, linear, bad

        return run

    def cells(self, e: AddressOf, count: int, what: str, order: Any = None, atomic: Any = None) -> Callable[[LaneFrame], Any]:
        b, dt, span = e.buffer, numpy_dtype(e.buffer.dtype), e.span or self.c.place
        where = self.locate(b, e.indices, count, span, True)

        def run(f: LaneFrame) -> Any:
            store, idx, shape, linear, bad = where(f)
            linear = spread(linear, f.lanes, linear.ndim > 0 and count > 1).reshape(f.lanes, -1)
            bad = spread(bad, f.lanes, bad.ndim > 0 and count > 1).reshape(f.lanes, -1)
            ok = f.active()[:, None] & ~bad
            if b.scope() != GLOBAL and (bad & f.active()[:, None]).any():
                raise out_of_bounds(b, idx, shape, bad & f.active()[:, None], span, what)
            store.wrote(linear[ok], dt.itemsize)
            return store.flat(dt), np.where(ok, linear, 0), ok

        return run


@dataclass
class TileLaunch(LaunchScope):
    """The launch being compiled.

    safe: values of global buffers outside their shape, by id of the buffer.  warp_roles: its warp roles, [] where nothing
    distinguishes its warps.  divergence: where its threads may diverge.  space: addresses of its shared memory.
    """

    safe: dict[int, Closure] = field(default_factory=dict)
    warp_roles: list[WarpRole] = field(default_factory=list)
    divergence: Divergence = field(default_factory=Divergence)
    space: SharedSpace = SharedSpace(())


class TileContext(Context):
    """Compiles a tile program.  Slots of `data` variables hold Storages.

    members: numbers of the warp roles that reach the statement being compiled.  gathered: whether they have already
    synchronised in front of an enclosing statement.
    """

    memory: TileMemory
    launch: TileLaunch

    def __init__(self, func: Func, check: bool, handlers: Handlers, ranks: Ranks | None = None) -> None:
        super().__init__(func, check, handlers, ranks)
        self.memory, self.launch = TileMemory(self), TileLaunch()
        self.members: tuple[int, ...] = ()
        self.gathered = False
