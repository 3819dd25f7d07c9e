"""Lowers loads, stores and calls to the memory accesses of one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.arith import Analyzer, flat_index, known_divisor, vector_base
from tilelang.ir import (AddressOf, Bind, Buffer, Call, Const, Evaluate, Expr, Func, If, Launch, Load, Ramp, Select, Shuffle,
                         Stmt, Store, Var, binary, cast, const, contains, convert, fresh, is_const, load, ramp, rebuild,
                         replace, seq, substitute, walk, with_options, DYNAMIC, FRAGMENT, GLOBAL, PRIVATE,
                         SHARED, STATIC)
from tilelang.ops.distribute import conjunction, index_values

from ..analysis.distributed_loop import Loop
from ..analysis.guards import bounds_guard, promised, tile_indices, vector_lanes_of
from .lowered_buffers import LoweredBuffers

# ---- known ranges ----------------------------------------------------------------------------------------------------

class KnownRanges:
    """The known facts about variables.  analyzer: their ranges.  divisors: known divisors of bound variables.

    thread: the linear index of a thread in its block.
    """

    def __init__(self, func: Func, launch: Launch, thread: Var) -> None:
        self.analyzer, self.divisors = promised(func)
        for v, n in zip(launch.thread_vars, launch.threads):
            self.bind(v, n)
        self.bind(thread, launch.num_threads)
        for v, g in zip(launch.block_vars, launch.grid):
            hi = self.analyzer.interval(g)[1]
            self.analyzer = self.analyzer.bind(v, 0, None if hi is None else max(hi - 1, 0))

    def bind(self, var: Var, extent: int, first: int = 0) -> None:
        """Record that a variable is one of first .. first+extent-1."""
        self.analyzer = self.analyzer.bind(var, first, first + extent - 1)

    def bind_value(self, var: Var, value: Expr, divisor: int = 1) -> None:
        """Record the range and divisor of a variable that equals value."""
        if var.dtype.is_int and var.dtype.lanes == 1:
            lo, hi = self.analyzer.interval(value)
            self.analyzer = self.analyzer.bind(var, lo, hi)
            known = self.divisor(value)
            self.divisors[var] = known if known == 0 or known % divisor == 0 else divisor

    def divisor(self, e: Expr) -> int:
        """An integer known to divide e; 0 for zero."""
        return known_divisor(e, self.divisors, self.analyzer)

    def over(self, vars: tuple[Var, ...], extents: tuple[Any, ...]) -> Analyzer:
        """The analyzer that also knows the ranges of these loops."""
        out = self.analyzer
        for v, n in zip(vars, extents):
            out = out.bind(v, 0, n - 1 if isinstance(n, int) else None)
        return out

    def under(self, cond: Expr, holds: bool, work: Callable[[], Any]) -> Any:
        """The result of work(), run with the knowledge that cond holds (or does not)."""
        saved = self.analyzer
        if cond.dtype.is_bool and cond.dtype.lanes == 1 and not contains(cond, Load, Call):
            self.analyzer = saved.assuming(cond, holds)
        try:
            return work()
        finally:
            self.analyzer = saved


class LoweredAccesses:
    """Loads, stores and calls of one thread: vectors split into pieces, fragments as registers, guards where needed.

    loop: the distributed loop being lowered.  guarded: whether accesses of global memory are guarded.
    """

    def __init__(self, buffers: LoweredBuffers, known: KnownRanges, guarded: bool) -> None:
        self.buffers, self.known, self.guarded = buffers, known, guarded
        self.loop: Loop | None = None

    # ---- stores -----------------------------------------------------------------------------------------------------

    def _pieces(self, buffer: Buffer, indices: tuple[Expr, ...]) -> list[tuple[Expr, ...]] | None:
        """The accesses, as indices, that a vector access is split into; None: it stays one access.

        A guarded access is split into single lanes, any other into the widest aligned pieces.
        """
        lanes = vector_lanes_of(indices)
        if not lanes:
            return None
        if any(self.guard(buffer, at) is not None for at in (lanes[0], lanes[-1])):
            return lanes  # indices are linear in the lane: a bound that holds at both ends holds in between
        return self.buffers.widths.pieces(buffer, indices, lanes, self.known.analyzer, self.known.divisors)

    def store(self, s: Store) -> Stmt:
        loop = self.loop
        if loop is not None and id(s) in loop.vstores:
            tmp, lane = loop.vstores[id(s)]
            return Store(tmp, (lane,), self.expr(s.value), span=s.span)
        value = self.expr(s.value)
        scope = s.buffer.scope_name
        if scope == FRAGMENT:
            buffer, at = self.fragment(s.buffer, s.indices, True, s.span)
            out: Stmt = Store(buffer, at, value, span=s.span)
            if loop is not None and s.buffer in loop.staged and loop.dist.first is not None:
                out = If(loop.dist.first, out)
            return out
        pieces = self._pieces(s.buffer, s.indices)
        if pieces is not None:
            wide = fresh("lanes", value.dtype)
            n = value.dtype.lanes // len(pieces)
            stores = [self.store(replace(s, indices=at, value=Shuffle((wide,), tuple(range(k * n, k * n + n)),
                                                                       value.dtype.scalar.with_lanes(n))))
                      for k, at in enumerate(pieces)]
            return seq(Bind(wide, value, span=s.span), *stores)
        guard = None if vector_lanes_of(s.indices) else self.guard(s.buffer, s.indices)
        buffer, at = self.physical(s.buffer, self.exprs(s.indices))
        if loop is not None and scope in (GLOBAL, STATIC, DYNAMIC):
            guard = conjunction(loop.dist.first, guard)
        out = Store(buffer, at, value, span=s.span)
        return out if guard is None else If(guard, out, span=s.span)

    def evaluate(self, s: Evaluate) -> Stmt:
        out: Stmt = replace(s, call=self._call(s.call))
        if s.call.op in ("wgmma_pin", "wgmma_hold", "wgmma_used") and isinstance(s.call.args[0], AddressOf) and \
                s.call.args[0].buffer.scope_name == FRAGMENT:
            count = int(self.buffers.local_of(s.call.args[0].buffer).shape[0])
            out = replace(s, call=with_options(self._call(s.call), count=count))
        guard = self._atomic_guard(s.call)
        if self.loop is not None:
            guard = conjunction(self.loop.dist.first, guard)
        return out if guard is None else If(guard, out, span=s.span)

    def _atomic_guard(self, c: Call) -> Expr | None:
        if not c.op.startswith("atomic_"):
            return None
        out: Expr | None = None
        for a in c.args:
            if isinstance(a, AddressOf):
                out = conjunction(out, self.guard(a.buffer, a.indices))
        return out

    # ---- expressions ------------------------------------------------------------------------------------------------

    def exprs(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(self.expr(e) for e in es)

    def expr(self, e: Expr) -> Expr:
        """The expression e with every access in its lowered form."""
        if isinstance(e, (Var, Const)):
            return e
        if isinstance(e, Load):
            return self._load(e)
        if isinstance(e, AddressOf):
            if e.buffer.scope_name == FRAGMENT:  # the registers that hold the fragment (wgmma_pin, wgmma_hold)
                return AddressOf(self.buffers.local_of(e.buffer), (const(0),), e.dtype, span=e.span)
            buffer, at = self.physical(e.buffer, self.exprs(e.indices))
            return AddressOf(buffer, at, e.dtype, span=e.span)
        if isinstance(e, Call):
            guard = self._atomic_guard(e)
            out = self._call(e)
            if guard is None:
                return out
            zero = const(0.0 if e.dtype.is_float else 0, e.dtype)
            return Select(guard, out, zero, e.dtype, True)
        if isinstance(e, Select) and self.loop is not None:
            e = replace(e, cond=self._of_registers(self.loop, e.cond))
        return rebuild(e, self.rebuilt)

    def _of_registers(self, loop: Loop, cond: Expr) -> Expr:
        """A condition on coordinates that all threads decide alike, as a constant's bits, one a register; others as is."""
        if loop.grid is None or not any(loop.grid.thread in walk(loop.values[v], Var) for v in walk(cond, Var)
                                        if v in loop.values):
            return cond
        table = index_values(cond, loop.grid.env)
        if table is None or np.ndim(table) == 0 or np.any(table != table[:1]) or table[:1].size > 32:
            return cond
        sizes, at = table.shape[1:], const(0)
        for (v, _), n in zip(loop.grid.loops, sizes):
            at = at * n + v if n > 1 else at
        bits = sum(1 << k for k, x in enumerate(table[0].ravel()) if x)
        return binary("ne", binary("bitand", binary("shr", const(bits, "uint32"), cast(at, "uint32")), const(1, "uint32")),
                      const(0, "uint32"))

    def _call(self, c: Call) -> Call:
        return rebuild(c, self.rebuilt)

    def _load(self, e: Load) -> Expr:
        loop = self.loop
        if loop is not None and loop.vloads:
            moved = loop.vloads.get(e)
            if moved is not None:
                return load(moved[0], (moved[1],), span=e.span)
        scope = e.buffer.scope_name
        if scope == FRAGMENT:
            buffer, at = self.fragment(e.buffer, e.indices, False, e.span)
            return Load(buffer, at, e.dtype, span=e.span)
        pieces = self._pieces(e.buffer, e.indices)
        if pieces is not None:
            elements = tuple(self._load(load(e.buffer, at, span=e.span)) for at in pieces)
            return Shuffle(elements, tuple(range(e.dtype.lanes)), e.dtype, span=e.span)
        guard = None if vector_lanes_of(e.indices) else self.guard(e.buffer, e.indices)
        buffer, at = self.physical(e.buffer, self.exprs(e.indices))
        out: Expr = e if buffer is e.buffer and all(a is b for a, b in zip(at, e.indices)) else \
            Load(buffer, at, e.dtype, span=e.span)
        if guard is None:
            return out
        return Select(guard, out, cast(self.buffers.safe_value(e.buffer), e.dtype), e.dtype, True)

    def fragment(self, buffer: Buffer, indices: tuple[Expr, ...], is_write: bool,
                 span: Any = None) -> tuple[Buffer, tuple[Expr, ...]]:
        loop = self.loop
        if loop is not None:
            if buffer in loop.staged:
                scratch, first = loop.staged[buffer]
                at = tuple(i if is_const(low, 0) else self.known.analyzer.simplify(i - low) for i, low in zip(indices, first))
                return self.physical(scratch, self.exprs(at))
            touch = loop.touch(self.buffers.layout_of, buffer, indices, is_write)
            if touch.register is not None:
                return self.buffers.local_of(buffer), (touch.register,)
            raise self._not_owned(buffer, touch.why, span)
        frag = self.buffers.layout_of(buffer)
        if frag.replicas == frag.threads and not any(m.to == "thread" for ms in frag.modes for m in ms):
            at = frag.register_of(tile_indices(self.exprs(indices)))
            return self.buffers.local_of(buffer), (at if isinstance(at, Expr) else const(int(at)),)
        raise self._not_owned(buffer, "each element lives in the registers of some threads only", span)

    def _not_owned(self, buffer: Buffer, why: str, span: Any) -> errors.TileLangError:
        return errors.error("fragment-access", f"Cannot lower access to thread-distributed fragment `{buffer.name}`: ‹{why}›",
                            span=span or buffer.span)

    def rebuilt(self, v: Any) -> Any:
        return self.expr(v) if isinstance(v, Expr) else tuple(map(self.rebuilt, v)) if isinstance(v, tuple) else v

    # ---- places ----------------------------------------------------------------------------------------------------

    def physical(self, buffer: Buffer, indices: tuple[Expr, ...]) -> tuple[Buffer, tuple[Expr, ...]]:
        if buffer.scope_name in SHARED:
            if self.loop is not None and self.loop.values:
                # The offset shows its loop-invariant terms only when it is expressed in the thread and the loop variables.
                indices = tuple(substitute(i, self.loop.values) for i in indices)
            indices = tile_indices(indices)
            layout, storage = self.buffers.layout_of(buffer), self.buffers.shared_of(buffer)
            simplify = self.known.analyzer.simplify
            last = indices[-1] if indices else None
            if isinstance(last, Ramp):  # one aligned run (see _pieces): contiguous in storage too
                first = simplify(convert(layout.offset((*indices[:-1], last.base))))
                return storage, (ramp(first, last.lanes),)
            at = layout.offset(indices)
            return storage, (simplify(at) if isinstance(at, Expr) else const(int(at)),)
        if buffer.scope_name == FRAGMENT:
            return self.fragment(buffer, indices, False)
        if buffer.scope_name in PRIVATE and buffer.ndim != 1:
            base = vector_base(buffer, indices) if indices else None
            start = flat_index(replace(buffer, offset=0), base or indices)
            return self.buffers.row_of(buffer), (start if base is None else ramp(start, indices[-1].dtype.lanes),)
        return buffer, indices

    def guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int = 1, inside: bool = False) -> Expr | None:
        """Lowered condition that an access of `width` elements lies inside a global buffer.

        None: that is proven, or the buffer needs no guard.  indices: as in the tile program.  inside: the upper end of the last
        dimension was tested already.
        """
        cond = self._tile_guard(buffer, indices, width, inside)
        # The indices may read buffers; up to here those are fragments and tiles of the tile program.
        return None if cond is None else self.expr(cond)

    def _tile_guard(self, buffer: Buffer, indices: tuple[Expr, ...], width: int, inside: bool) -> Expr | None:
        if buffer.scope_name != GLOBAL or not self.guarded:
            return None
        if width > 1 and (inside or self.known.divisor(buffer.shape[-1]) % width):
            # The vectoriser chose this width because it proved the last dimension's upper end, or because a run-time test
            # checks it.  A vector starts at a multiple of its width, so it lies entirely below 0 or not at all.
            low = None if self.known.analyzer.can_prove(indices[-1] >= 0) else indices[-1] >= 0
            return conjunction(low, bounds_guard(self.known.analyzer, buffer.shape, indices, buffer.ndim - 1))
        return bounds_guard(self.known.analyzer, buffer.shape, indices)
