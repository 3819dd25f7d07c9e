"""Memory of the device simulator: per-thread arrays, shared memory, global tensors, and all checks of accesses.

Lanes are the threads of one block, padded to whole warps.  Shared memory is one arena of bytes for each block, so that
buffers to which the memory planner assigned the same bytes really alias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Binary, Broadcast, Buffer, Call, Expr, Func, Load, Ramp, Store, Var, numpy_dtype,
                         walk, BARRIER, GLOBAL, SHARED, VARIABLE)
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.atomics import Atomic
from tilelang.target.intrinsics import INTRINSICS

from .access_facts import access_granules, vector_base, written
from .block import Global, Shared
from .counters import Counters, Site
from ..faults import fault
from ..lane_ops import WARP, spread, started
from ..lanes import Action, LaneFrame, StmtCompiler, is_address
from ..memory import Access, Followed, Storage, geometry, granules, linear_index, out_of_bounds, span_of
from .registers import Guard
from ..releases import Releases


ALIGN = 128  # alignment of shared buffers that no pass has placed


class MachineCompiler(StmtCompiler):
    """Compiles memory accesses of lowered programs.

    The slot of a `data` variable holds a Storage (local), an int (byte offset in shared memory) or a Global.
    """

    def __init__(self, func: Func, check: bool) -> None:
        super().__init__(INTRINSICS)
        self.check = check
        self.sites: list[Site] = []
        self.windows: dict[int, Global] = {}  # by slot: the memory behind an address, for the access in progress
        self.shared_sizes: dict[int, int] = {}  # size of a shared buffer in bytes, by id of its data
        self.counters = Counters(self.sites)
        self.granules = granules(func)
        self.shared_granule, widths = access_granules(func)
        self.granules.update(widths)
        self.written = written(func)
        self.guards_registers = any(isinstance(n, Call) and n.op == "wgmma" for n in walk(func))

    def site(self, b: Buffer, span: Any, text: str, atomic: Atomic | None = None) -> int:
        """Number of an access site."""
        self.sites.append(Site(span, b.name, text, atomic))
        return len(self.sites) - 1

    # -- addresses

    def elements(self, b: Buffer, indices: tuple[Expr, ...], count: int, span: Any, what: str,
                 write: bool = False) -> Callable[..., Any]:
        """f(frame) -> element numbers in b's storage, of shape () or (lanes,) (with `count` 0: one more axis, for vectors).

        Raises sim-out-of-bounds unless all `count` elements of every active lane are inside b's shape.
        """
        fns = [self.expr(i) for i in indices]
        geo, last = geometry(self, b), len(fns) - 1
        more, is_global, at = max(count, 1) - 1, b.scope() == GLOBAL, self.slot(b.data)

        def run(f: LaneFrame) -> np.ndarray:
            shape, strides, offset = geo(f)
            idx = [np.asarray(fn(f)).astype(np.int64, copy=False) for fn in fns]
            if count == 0:
                idx = [i if d == last else i[..., None] for d, i in enumerate(idx)]
            linear, bad = linear_index(idx, shape, strides, offset)
            if more:
                bad = bad | (idx[last] + more >= shape[last])
            if bad.any():
                m = f.mask if count or f.mask is None else f.mask[:, None]
                hit = bad if m is None else bad & m
                if hit.any():
                    raise out_of_bounds(b, idx, shape, hit, span, what, f" in block {f.block.where}")
                linear = np.where(bad, 0, linear)
            if not is_global or not is_address(f.slots[at]):
                return linear
            need = np.True_ if f.mask is None else f.mask if count else f.mask[:, None]
            bl = b.dtype.lanes
            window, linear = self.followed(f.slots[at], linear * bl, need, count == 0, max(count, 1) * bl,
                                           Followed(b, write, span))
            self.windows[at] = Global(window)
            return linear // bl

        return run

    def memory(self, f: LaneFrame, at: int) -> Any:
        """What the slot of a buffer's data holds.  For a tensor made of an address: the memory of the access in progress, whose
        element numbers have just been computed."""
        held = f.slots[at]
        return self.windows[at] if is_address(held) else held

    def start_of(self, f: LaneFrame, v: Var, held: Any) -> Value:
        if isinstance(held, Global):
            held = held.store
        elif isinstance(held, int):  # an offset in shared memory
            shared = f.block.shared
            end = held + self.shared_sizes.get(id(v), 0)
            shared.owner[held // shared.granule:-(-end // shared.granule)] = self.slot(v)
            shared.table.changed()
            return self.addresses.of(shared.store) + held
        return super().start_of(f, v, held)

    # -- statements and expressions

    def compile_load(self, e: Load) -> Closure:
        scope = e.buffer.scope()
        if scope.startswith("local"):
            return self._local_load(e)
        return self._memory_load(e, scope)

    def compile_store(self, s: Store) -> Action:
        scope = s.buffer.scope()
        if scope.startswith("local"):
            return self._local_store(s)
        return self._memory_store(s, scope)

    def compile_alloc(self, s: Alloc) -> Action:
        b, scope = s.buffer, s.buffer.scope()
        at, geo = self.slot(b.data), geometry(self, b)
        dt, item = numpy_dtype(b.dtype), numpy_dtype(b.dtype).itemsize * b.dtype.lanes
        if scope.startswith("local"):
            init, granule = self.expr(s.init) if s.init is not None else None, self.granules[id(b.data)]
            guards, width = self.guards_registers and self.check, b.dtype.lanes if b.dtype.lanes > 1 else None

            def local(f: LaneFrame) -> None:
                # A variable without an initial value starts at zero.
                store = Storage(b.name, span_of(*geo(f)) * item, granule, f.lanes, known=b.scope_name == VARIABLE)
                if guards:
                    store.guard = Guard(b.name, store.nbytes // granule)
                f.slots[at] = store
                if init is not None:
                    store.view(dt)[:, :width] = started(init(f), f.lanes, b.dtype.lanes)

            return local
        if scope == BARRIER:
            return lambda f: None
        if scope not in SHARED:
            raise fault("sim-unsupported", f"{scope} buffers are not simulated",
                        expected="shared or private memory", found=str(scope), span=s.span)

        def shared(f: LaneFrame) -> None:
            memory, start = f.block.shared, f.slots[at]
            if f.block.roles is not None:
                return  # warps reach this place at different times
            g = memory.granule
            # Only this buffer: it may be declared before the last use of another one in the same bytes.
            owner = memory.owner[start // g:-(-(start + span_of(*geo(f)) * item) // g)]
            owner[owner == at] = -1
            memory.table.changed()

        return shared

    def _local_load(self, e: Load) -> Closure:
        b, dt, check = e.buffer, numpy_dtype(e.buffer.dtype), self.check
        base, n = vector_base(e.indices)
        n = n * b.dtype.lanes
        if n == 0 or (b.dtype.lanes > 1 and n != b.dtype.lanes):
            raise fault("sim-unsupported", f"strided vector access to {b.name}",
                        expected="contiguous lanes", found=f"a stride in an access to {b.name}", span=e.span)
        where, at = self.elements(b, base, n // b.dtype.lanes, e.span, "load of"), self.slot(b.data)
        bl, ratio = b.dtype.lanes, dt.itemsize // self.granules[id(b.data)]
        steps = np.arange(n)

        def run(f: LaneFrame) -> Value:
            k, store = where(f), f.slots[at]
            if store is None:
                raise fault("sim-unsupported", f"{b.name} has no storage here",
                            expected="a buffer with storage", found=f"{b.name} without", span=e.span)
            x = store.view(dt)
            if store.guard is not None:
                store.guard.touch(f, _cells(k, bl, n, ratio), False, e.span)
            if k.ndim == 0:
                i = int(k) * bl
                if check and store.known is not None:
                    _require(store.known[:, i * ratio:(i + n) * ratio], f, b, e.span)
                return x[:, i].copy() if n == 1 else x[:, i:i + n].copy()
            cols = k[:, None] * bl + steps
            rows = np.arange(f.lanes)[:, None]
            if check and store.known is not None:
                fine = cols if ratio == 1 else (cols[..., None] * ratio + np.arange(ratio)).reshape(f.lanes, -1)
                _require(store.known[rows, fine], f, b, e.span)
            return x[rows, cols][:, 0] if n == 1 else x[rows, cols]

        return run

    def _local_store(self, s: Store) -> Action:
        b, dt = s.buffer, numpy_dtype(s.buffer.dtype)
        base, n = vector_base(s.indices)
        n = n * b.dtype.lanes
        if n == 0 or (b.dtype.lanes > 1 and n != b.dtype.lanes):
            raise fault("sim-unsupported", f"strided vector access to {b.name}",
                        expected="contiguous lanes", found=f"a stride in an access to {b.name}", span=s.span)
        where, at, value = self.elements(b, base, n // b.dtype.lanes, s.span, "store to"), self.slot(b.data), \
            self.expr(s.value)
        bl, ratio = b.dtype.lanes, dt.itemsize // self.granules[id(b.data)]
        steps = np.arange(n)

        def run(f: LaneFrame) -> None:
            v, k, store, m = np.asarray(value(f)), where(f), f.slots[at], f.mask
            if store is None:
                raise fault("sim-unsupported", f"{b.name} has no storage here",
                            expected="a buffer with storage", found=f"{b.name} without", span=s.span)
            x = store.view(dt)
            if store.guard is not None and (m is None or m.any()):
                store.guard.touch(f, _cells(k, bl, n, ratio), True, s.span)
            if k.ndim == 0:
                i = int(k) * bl
                cols = x[:, i] if n == 1 else x[:, i:i + n]
                if m is None:
                    cols[...] = v
                else:
                    np.copyto(cols, v, where=m if n == 1 else m[:, None])
                if store.known is not None:
                    known = store.known[:, i * ratio:(i + n) * ratio]
                    if m is None:
                        known[...] = True
                    else:
                        known[m] = True
                return
            rows = np.arange(f.lanes)
            if n == 1:
                v = spread(v, f.lanes)[:, None]
            else:
                v = spread(v, f.lanes, vector=True)
            cols = k[:, None] * bl + steps
            if m is not None:
                rows, cols, v = rows[m], cols[m], v[m]
            x[rows[:, None], cols] = v
            if store.known is not None:
                for r in range(ratio):
                    store.known[rows[:, None], cols * ratio + r] = True

        return run

    # -- shared and global memory

    def reach(self, b: Buffer, indices: tuple[Expr, ...], width: int, span: Any, what: str,
              write: bool = False) -> Callable[..., Any]:
        """f(frame) -> byte addresses (lanes,) of accesses of `width` bytes, inside b and aligned.  Inactive lanes: any."""
        item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes
        where = self.elements(b, indices, width // item if width >= item else 1, span, what, write)
        shared, at = b.scope() != GLOBAL, self.slot(b.data)
        align = min(width & -width, 16)

        def run(f: LaneFrame) -> np.ndarray:
            address = where(f) * item
            if shared:
                address = address + f.slots[at]
            address = spread(address, f.lanes)
            if align > item or width > item:
                off = address % align
                if off.any() and (off if f.mask is None else off[f.mask]).any():
                    t = int(np.flatnonzero(off if f.mask is None else off * f.mask)[0])
                    raise fault("sim-misaligned", f"{what} {b.name}: {width} bytes at byte {int(address[t])}, not a "
                                f"multiple of {align} (thread {t})",
                                expected=f"a multiple of {align} bytes", found=f"byte {int(address[t])}", span=span,
                                hint="the vector width must divide the row length and the start of the region")
            return address

        return run

    def _memory_load(self, e: Load, scope: str) -> Closure:
        b, dt = e.buffer, numpy_dtype(e.buffer.dtype)
        base, n = vector_base(e.indices)
        if n == 0:
            return self._gathered_load(e)
        n *= b.dtype.lanes
        width = n * dt.itemsize
        address = self.reach(b, base, width, e.span, "load of")
        at, steps = self.slot(b.data), np.arange(n)
        access = Access(b, width, self.site(b, e.span, "read"), "read", f"ld.{scope.split('.')[0]}")

        def run(f: LaneFrame) -> Value:
            a = address(f)
            store = self.touch(f, self.memory(f, at), a, access)
            first = a // dt.itemsize
            x = store.flat(dt)
            if f.mask is not None:
                first = np.where(f.mask, first, 0)
            return x[first] if n == 1 else x[first[:, None] + steps]

        return run

    def _gathered_load(self, e: Load) -> Closure:
        """Load a vector of elements that are not contiguous: one access for each element."""
        ramp, b = e.indices[-1], e.buffer
        picks = [_lane_of(ramp, k) for k in range(ramp.dtype.lanes)]
        parts = [self.expr(Load(b, (*e.indices[:-1], p), b.dtype, span=e.span)) for p in picks]
        return lambda f: np.stack([spread(p(f), f.lanes) for p in parts], axis=-1)

    def _memory_store(self, s: Store, scope: str) -> Action:
        b, dt = s.buffer, numpy_dtype(s.buffer.dtype)
        base, n = vector_base(s.indices)
        if n == 0:
            raise fault("sim-unsupported", f"strided vector store to {b.name}",
                        expected="contiguous lanes", found=f"a stride in a store to {b.name}", span=s.span)
        n *= b.dtype.lanes
        width = n * dt.itemsize
        address, value = self.reach(b, base, width, s.span, "store to", True), self.expr(s.value)
        at, steps = self.slot(b.data), np.arange(n)
        access = Access(b, width, self.site(b, s.span, "write"), "write", f"st.{scope.split('.')[0]}")

        def run(f: LaneFrame) -> None:
            v, a = spread(value(f), f.lanes, n > 1), address(f)
            memory = self.memory(f, at)
            store = memory.store if isinstance(memory, Global) else f.block.shared.store
            cells = (a // dt.itemsize)[:, None] + steps
            v = v[:, None] if n == 1 else v
            on = slice(None) if f.mask is None else f.mask
            flat = store.flat(dt)
            flat[cells[on]] = v[on]
            held = flat[cells[on]]
            same = ((held == v[on]) | (held != held)).all(1)
            self.touch(f, memory, a, access, same)

        return run

    def touch(self, f: LaneFrame, memory: Any, address: np.ndarray, access: Access, same: np.ndarray | None = None) -> Storage:
        """Record an access of the active lanes and check it; returns the storage.

        Counts it, and checks for races, uninitialised reads and copies in flight.  same: lanes that wrote the same value as all
        other lanes that wrote there.
        """
        b, width, site, mode, op = access
        if memory is None:
            raise fault("sim-unsupported", f"{b.name} has no storage here",
                        expected="a buffer with storage", found=f"{b.name} without", span=self.sites[site].span)
        m, block = f.mask, f.block
        shared = not isinstance(memory, Global)
        store, table = (block.shared.store, block.shared.table) if shared else (memory.store, memory.table)
        repeated = table.repeated(block.clocks) if mode == "read" and self.check and table is not None else None
        key = None if repeated is None else (site, width, address.tobytes(), m if m is None else m.tobytes())
        if repeated is not None and (known := repeated.get(key)) is not None:
            warps, nbytes, banks = known
            self.counters.count(op, warps)
            self.counters.bytes[op] += nbytes
            if banks is not None:
                self.counters.add_shared(site, *banks)
            return store
        warps = f.lanes // WARP if m is None else int(m.reshape(-1, WARP).any(1).sum())
        nbytes = width * (f.lanes if m is None else int(m.sum()))
        self.counters.count(op, warps)
        self.counters.bytes[op] += nbytes
        banks = self.counters.shared(site, address, width, m) if shared else None
        if not self.check:
            return store
        t = np.arange(f.lanes) if m is None else np.flatnonzero(m)
        first = (address if m is None else address[m]) // store.granule
        g = first[:, None] + np.arange(max(1, width // store.granule))
        if shared and block.shared.pending.any():
            self.reject_pending(block.shared, g, b, site)
        proxy = block.shared.proxy if shared else memory.proxy
        atomic = self.sites[site].atomic
        if mode == "write" or atomic is not None and atomic.family == "store":  # an atomic store does not read the old value
            if shared:
                block.shared.owner[g] = self.slot(b.data)
            elif store.known is not None:
                store.known[0, g] = True
        elif not ((block.shared.owner[g] == self.slot(b.data)).all() if shared else
                  store.known is None or store.known[0, g].all()):
            raise uninitialized(b, self.sites[site].span, f)
        if table is not None:
            if mode == "read":
                table.read(block.clocks, g, t, site)
                if repeated is not None:
                    repeated[key] = warps, nbytes, banks
            elif mode == "atomic":
                table.atomic(block.clocks, g, t, site)
            else:
                table.write(block.clocks, g, t, site, same)
        if proxy is not None and mode == "write":
            proxy.write(g)
        elif proxy is not None and mode == "atomic":
            proxy.update(g, t)
        return store

    def reject_pending(self, shared: Shared, g: np.ndarray, b: Buffer, site: int) -> None:
        busy = shared.pending[g]
        if busy.any():
            other = self.sites[int(shared.pending_site[g[busy][0]])]
            raise fault("sim-async", f"{self.sites[site].text} of {b.name} while an asynchronous copy into it is under "
                        "way",
                        found=f"{b.name} touched before it has",
                        span=self.sites[site].span, notes=((other.span, "the copy was issued here"),),
                        hint="wait for the group of that copy (cp_async_wait) and put a barrier after it")

    def cells(self, e: AddressOf, count: int, what: str, order: Releases | None = None,
              atomic: Atomic | None = None) -> Callable[[LaneFrame], Any]:
        """Element numbers for an atomic access of `count` consecutive elements (see lane_ops).

        order: its release and acquire semantics.  atomic: what it does.
        """
        b, dt, span = e.buffer, numpy_dtype(e.buffer.dtype), e.span or self.place
        width = count * dt.itemsize
        address = self.reach(b, e.indices, width, span, what, True)
        at, steps = self.slot(b.data), np.arange(count)
        access = Access(b, width, self.site(b, span, "atomic access", atomic), "atomic", f"atom.{b.scope().split('.')[0]}")

        def run(f: LaneFrame) -> Any:
            a = address(f)
            memory = self.memory(f, at)
            table = memory.table if isinstance(memory, Global) and order is not None and order.concerns else None
            if table is not None and order is not None:
                flags = a // memory.store.granule
                order.before(f, table, flags)
            store = self.touch(f, memory, a, access)
            if table is not None and order is not None:
                order.after(f, table, flags)
            at_ = (a // dt.itemsize)[:, None] + steps
            ok = np.broadcast_to(f.active()[:, None], at_.shape)
            return store.flat(dt), np.where(ok, at_, 0), ok

        return run


def _lane_of(e: Expr, k: int) -> Expr:
    """Lane k of a vector index expression."""
    if isinstance(e, Ramp):
        return e.base + e.stride * k
    if isinstance(e, Broadcast):
        return e.value
    if isinstance(e, Binary):
        return Binary(e.op, _lane_of(e.a, k), _lane_of(e.b, k), e.dtype.scalar, span=e.span)
    raise fault("sim-unsupported", f"a vector index made by {type(e).__name__}",
                expected="a vector index of ramps", found=f"a {type(e).__name__}", span=e.span)


def _cells(k: np.ndarray, vector: int, n: int, ratio: int) -> Any:
    """Granules of n elements from vector number k on, in any lane."""
    if k.ndim == 0:
        i = int(k) * vector
        return slice(i * ratio, (i + n) * ratio)
    return (np.unique(k)[:, None] * (vector * ratio) + np.arange(n * ratio)).ravel()


def _require(known: np.ndarray, f: LaneFrame, b: Buffer, span: Any) -> None:
    if not known.all() and not (f.mask is not None and known[f.mask].all()):
        raise uninitialized(b, span, f)


def uninitialized(b: Buffer, span: Any, f: LaneFrame) -> Exception:
    """The error for a read of memory that nothing has written."""
    return fault("sim-uninitialized", f"{b.name} ({b.scope()}) is read before it is written, in block {f.block.where}",
                 found=f"{b.name}, which nothing has written",
                 span=span, hint="initialise it (T.clear, T.fill, T.copy) or check the order of the statements")


__all__ = ["ALIGN", "MachineCompiler", "uninitialized"]
