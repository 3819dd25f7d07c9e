"""The reference interpreter: runs a tile program statement by statement, on whole tiles, in NumPy.

Blocks run one after another.  A tile op runs its `reference`.  A Parallel loop runs all its iterations at once (or in
successive groups, see parallel.py).  Per-thread code runs on all threads of the block in lock step; where a program never
distinguishes its threads, one lane represents all of them.  Programs with planned pipelines (phase TILE after
plan_pipelines) are also supported: asynchronous copies complete at once, commits and waits do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Evaluate, Expr, Func, If, Launch, Load, Parallel, Region, Stmt, Store,
                         Var, children, numpy_dtype, walk, BARRIER, DYNAMIC, GLOBAL, VARIABLE, PRIVATE)
from tilelang.ir.evaluate import Closure, Value
from tilelang.ops import Copy
from tilelang.target.cluster import cluster_of
from tilelang.target.intrinsics import INTRINSICS
from tilelang.target.warp_groups import holds_in

from ..faults import fault
from ..grid import TileGrid, has_grid_barrier, tile_grid_barrier
from ..host import Arguments, bind_arguments, clusters
from ..lane_ops import BLOCK_VOTES, LANE_OPS, VOTES_OF_BLOCKS, WARP, Printer, spread, started
from ..lanes import Action, LaneFrame, StmtCompiler, is_address, uniform
from ..memory import Followed, Storage, geometry, granules, linear_index, out_of_bounds, span_of
from .cluster import TileCluster, to_block
from ..boxes import launch_maps
from .env import TileEnv, scalar_elements
from .hopper import TILE_HOPPER_OPS, space_of
from .parallel import ParallelLoop
from .divergence import Parting
from .warp_roles import (NO_EFFECT, ROLE_OPS, SYNC_OPS, WarpRole, TileBlock, around, asks_shared, in_front, make_barriers,
                         meets_around, warp_roles_of, run_warp_roles, signalling, together, whole_warp_role)
from .warp import WARP_OPS
from .watch import changes

_ORDER_ONLY = NO_EFFECT | {"sync_warp", "cp_async_commit", "cp_async_wait", "fence_gpu", "fence_block", "keep_branch",
                            "pdl_trigger", "pdl_sync"}

_EACH_LANE = (*LANE_OPS, *BLOCK_VOTES, *WARP_OPS, "elect_one", "wgmma", "tma_load")


class TileCompiler(StmtCompiler):
    """Compiles a tile program.  Slots of `data` variables hold Storages."""

    def __init__(self, func: Func, check: bool) -> None:
        super().__init__(INTRINSICS)
        self.granules, self.check = granules(func), check
        self.safe: dict[int, Closure] = {}
        self.roles: list[WarpRole] = []  # warp roles of the launch being compiled
        self.members: tuple[int, ...] = ()  # numbers of the warp roles that reach the statement being compiled
        self.gathered = False  # whether they have already synchronised in front of an enclosing statement
        self.maps: dict[str, Any] = {}  # tensor maps of that launch
        self.space: Any = None  # addresses of that launch's shared memory

    # -- memory

    def locate(self, b: Buffer, indices: tuple[Expr, ...], count: int, span: Any,
               write: bool = False) -> Callable[[LaneFrame], Any]:
        """A function that returns (storage, indices, shape, element numbers, out of range).

        count: number of consecutive elements (vectors), 1 for a scalar.
        """
        fns = [self.expr(i) for i in indices]
        geo, at, bl = geometry(self, b), self.slot(b.data), b.dtype.lanes
        wide = [i.dtype.lanes > 1 for i in indices]
        ramp = any(wide)
        tail, last = np.arange(count) if count > 1 and not ramp else None, len(fns) - 1

        def run(f: LaneFrame) -> Any:
            store = f.slots[at]
            if store is None:
                raise fault("sim-unsupported", f"{b.name} has no storage here",
                            expected="a buffer with storage", found=f"{b.name} without", span=span)
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
            if is_address(store):
                vector, need = ramp or bl > 1 or tail is not None, ~bad
                if f.mask is not None:
                    need = need & (f.mask[:, None] if vector else f.mask)
                store, linear = self.followed(store, linear, need, vector, 1, Followed(b, write, span))
            if store.lanes > 1:
                row = np.arange(store.lanes) * (store.nbytes // numpy_dtype(b.dtype).itemsize)
                vector = ramp or bl > 1 or tail is not None
                linear = linear + (row[:, None] if vector else row)
            return store, idx, shape, linear, bad

        return run

    def _skip(self, b: Buffer, f: LaneFrame, linear: np.ndarray, bad: np.ndarray, vector: bool,
              refuse: Callable[[np.ndarray], Exception]) -> np.ndarray | None:
        """Lanes (of the broadcast access) to skip, inactive or out of range; None for none.  Raises outside global memory."""
        m = f.mask
        if m is not None and vector:
            m = m[:, None]
        if bad.any():
            if b.scope() != GLOBAL:
                hit = bad if m is None else bad & m
                if hit.any():
                    raise refuse(hit)
            return bad if m is None else bad | ~m
        return None if m is None else ~m

    def _known(self, store: Storage, linear: np.ndarray, item: int) -> np.ndarray:
        """Granule numbers of elements."""
        k = item // store.granule
        return linear if k == 1 else linear[..., None] * k + np.arange(k)

    def compile_load(self, e: Load) -> Closure:
        b, dt, vector = e.buffer, numpy_dtype(e.buffer.dtype), e.dtype.lanes > 1
        where, shared = self.locate(b, e.indices, 1, e.span), b.scope_name not in PRIVATE
        safe = self.safe.get(id(b))

        def run(f: LaneFrame) -> Value:
            store, idx, shape, linear, bad = where(f)
            skip = self._skip(b, f, linear, bad, vector,
                              lambda hit: out_of_bounds(b, idx, shape, hit, e.span, "load of"))
            at = linear if skip is None else np.where(skip, 0, linear)
            x = store.flat(dt)[at]
            if shared and f.role is not None and f.role.watch is not None:
                seen = at if skip is None else at[np.broadcast_to(~skip, at.shape)]
                f.role.watch.load(f.role.number, store, self._known(store, seen, dt.itemsize), e.span)
            if store.known is not None and self.check:
                known = store.known.reshape(-1)[self._known(store, at, dt.itemsize)]
                known = known if known.ndim == at.ndim else known.all(-1)
                if not (known if skip is None else known | skip).all():
                    raise uninitialized(b, e.span)
            if skip is None:
                return x
            return np.where(skip, np.zeros((), dt) if safe is None else np.asarray(safe(f)).astype(dt), x)

        return run

    def compile_store(self, s: Store) -> Action:
        b, dt, vector = s.buffer, numpy_dtype(s.buffer.dtype), s.value.dtype.lanes > 1
        where, value = self.locate(b, s.indices, 1, s.span, True), self.expr(s.value)
        shared = b.scope_name not in PRIVATE

        def run(f: LaneFrame) -> None:
            x = np.asarray(value(f))
            store, idx, shape, linear, bad = where(f)
            skip = self._skip(b, f, linear, bad, vector,
                              lambda hit: out_of_bounds(b, idx, shape, hit, s.span, "store to"))
            linear, x = np.broadcast_arrays(linear, x)
            if skip is not None:
                linear, x, keep = np.broadcast_arrays(linear, x, ~skip)
                linear, x = linear[keep], x[keep]
            if shared and f.role is not None and f.role.watch is not None:
                f.role.watch.store(f.role.number, store, self._known(store, linear, dt.itemsize),
                                   changes(store.flat(dt)[linear], x), s.span)
            store.flat(dt)[linear] = x
            if store.known is not None:
                store.known.reshape(-1)[self._known(store, linear, dt.itemsize)] = True

        return run

    cells_known = _known

    def unwritten(self, b: Buffer, span: Any) -> Exception:
        """The error for a read of memory that nothing has written."""
        return uninitialized(b, span)

    def elements(self, b: Buffer, indices: tuple[Expr, ...], count: int, span: Any, what: str) -> Callable[[LaneFrame], Any]:
        """Element numbers, in a thread's row, of the first of `count` elements of a private array."""
        fns, geo = [self.expr(i) for i in indices], geometry(self, b)

        def run(f: LaneFrame) -> np.ndarray:
            shape, strides, offset = geo(f)
            idx = [np.asarray(fn(f)).astype(np.int64) for fn in fns]
            linear, bad = linear_index(idx, shape, strides, offset)
            bad = bad | (idx[-1] + count > shape[-1])
            if (bad if f.mask is None else bad & f.mask).any():
                raise out_of_bounds(b, idx, shape, bad if f.mask is None else bad & f.mask, span, what)
            return linear

        return run

    def cells(self, e: AddressOf, count: int, what: str, order: Any = None, atomic: Any = None) -> Callable[[LaneFrame], Any]:
        b, dt, span = e.buffer, numpy_dtype(e.buffer.dtype), e.span or self.place
        where = self.locate(b, e.indices, count, span, True)

        def run(f: LaneFrame) -> Any:
            store, idx, shape, linear, bad = where(f)
            linear = spread(linear, f.lanes, linear.ndim > 0 and count > 1).reshape(f.lanes, -1)
            bad = spread(bad, f.lanes, bad.ndim > 0 and count > 1).reshape(f.lanes, -1)
            ok = f.active()[:, None] & ~bad
            if b.scope() != GLOBAL and (bad & f.active()[:, None]).any():
                raise out_of_bounds(b, idx, shape, bad & f.active()[:, None], span, what)
            if store.known is not None:
                store.known.reshape(-1)[self._known(store, linear[ok], dt.itemsize)] = True
            return store.flat(dt), np.where(ok, linear, 0), ok

        return run

    def compile_alloc(self, s: Alloc) -> Action:
        b = s.buffer
        if b.scope() == BARRIER:
            return self._once(s, lambda f: make_barriers(b, f, s.span))
        if b.scope().startswith("shared.") and b.scope() != DYNAMIC:
            raise fault("sim-unsupported", f"{b.scope()} buffers are not simulated",
                        expected="shared or private memory", found=str(b.scope()), span=s.span)
        at, geo, item = self.slot(b.data), geometry(self, b), numpy_dtype(b.dtype).itemsize * b.dtype.lanes
        init = self.expr(s.init) if s.init is not None else None
        width = b.dtype.lanes if b.dtype.lanes > 1 else None
        private, granule = b.scope_name in PRIVATE, self.granules[id(b.data)]

        def make(f: LaneFrame) -> Storage:
            nbytes = span_of(*geo(f)) * item
            # A variable without an initial value starts at zero.
            store = Storage(b.name, nbytes, granule, f.lanes if private else 1, known=b.scope_name == VARIABLE)
            if init is not None:
                store.view(numpy_dtype(b.dtype))[:, :width] = started(init(f), store.lanes, b.dtype.lanes)
            return store

        def run(f: LaneFrame) -> None:
            f.slots[at] = make(f)

        def shared(f: LaneFrame) -> Storage:
            """The block's buffer; in a cluster another block may have created it first."""
            f.block.makers[id(b.data)] = make
            got = f.block.stores.get(id(b.data)) if f.block.cluster is not None else None
            if got is None:
                got = f.block.stores[id(b.data)] = make(f)
            return got

        launched: list[Storage] = []

        def workspace(f: LaneFrame) -> Storage:
            """The launch's buffer: its first block creates it.  Outside of a kernel it is created each time."""
            where = getattr(f.block, "where", "")
            if not launched or not any(c in "123456789" for c in where):
                launched[:] = [make(f)]
            return launched[0]

        if b.scope() == GLOBAL:
            return self._once(s, workspace)
        return run if private else self._once(s, shared if b.scope().startswith("shared") else make)

    def _once(self, s: Alloc, make: Callable[[LaneFrame], Any]) -> Action:
        """The storage of a buffer, created once for all warp roles that reach its allocation."""
        at, common = self.slot(s.buffer.data), len(self.members) > 1

        def run(f: LaneFrame) -> None:
            f.slots[at] = f.block.once(id(s), f.role, lambda: make(f)) if common else make(f)

        return run

    def compile_if(self, s: If) -> Action:
        """A condition on warp groups determines which warp roles reach each branch."""
        outer = self.members
        then = tuple(r for r in outer if holds_in(s.cond, self.roles[r].groups[0]) is not False)
        orelse = tuple(r for r in outer if holds_in(s.cond, self.roles[r].groups[0]) is not True)
        if then == outer and orelse == outer:
            return super().compile_if(s)
        cond = self.expr(s.cond)
        try:
            self.members = then
            yes = self.stmt(s.then)
            self.members = orelse
            no = self.stmt(s.orelse) if s.orelse is not None else None
        finally:
            self.members = outer

        return self.branch(cond, yes, no)

    def compile_evaluate(self, s: Evaluate) -> Action:
        if self.roles and s.call.op in SYNC_OPS:  # not expr(), which caches: depends on the warp roles
            fn = self.compile_call(s.call)
            return lambda f: fn(f) and None
        return super().compile_evaluate(s)

    # -- statements and calls

    def stmt(self, s: Stmt) -> Action:
        """The action of s.  Warp roles synchronise before and after a per-thread statement on shared memory."""
        if self.gathered or not meets_around(self, s):
            action = super().stmt(s)
            return action if self.gathered or not asks_shared(self, s) else in_front(self, s, action)
        self.gathered = True
        try:
            if isinstance(s, Store) and s.buffer.scope_name not in PRIVATE and not self.part.of(s):
                # All threads do the same, as in S[0] = S[0] + 1: execute it once, not once for each warp role.
                return together(self, s, super().stmt(s))
            return around(self, s, super().stmt(s))
        finally:
            self.gathered = False

    def compile_call(self, e: Call) -> Closure:
        if e.op in _ORDER_ONLY:
            return lambda f: np.int32(0)
        if e.op == "sync_grid":
            return tile_grid_barrier(self, e)
        if e.op in ROLE_OPS:
            return ROLE_OPS[e.op](self, e)
        if e.op in WARP_OPS:
            return WARP_OPS[e.op](self, e)
        if e.op in TILE_HOPPER_OPS:
            return TILE_HOPPER_OPS[e.op](self, e)
        if e.op in LANE_OPS:
            return LANE_OPS[e.op](self, e)
        if e.op in BLOCK_VOTES:
            return _block_vote(self, e)
        return super().compile_call(e)

    def compile_parallel(self, s: Parallel) -> Action:
        outside, self.gathered = self.gathered, True  # iterations belong to no warp role
        action = ParallelLoop(self, s).action()
        self.gathered = outside
        # Each warp role runs a loop that sets its variables; all other effects of a loop happen once.
        once = any(isinstance(n, Evaluate) or isinstance(n, Store) and n.buffer.scope_name not in PRIVATE for n in walk(s))
        return together(self, s, action) if once else action

    def compile_tile_op(self, s: Any) -> Action:
        if not hasattr(s, "reference"):
            raise fault("sim-unsupported", f"T.{s.op_name} has no reference meaning",
                        expected="a tile operation with a meaning", found=f"T.{s.op_name}", span=s.span)
        s = scalar_elements(s)
        env = TileEnv.compile(self, s)
        private = any(isinstance(n, Region) and n.buffer.scope_name in PRIVATE for n in walk(s))

        def run(f: LaneFrame) -> None:
            if not f.any_active():
                return
            if private and f.lanes > 1:
                for lane in np.flatnonzero(f.active()):
                    s.reference(env(f, int(lane)))
            else:
                s.reference(env(f, None))

        if private:
            return run
        action = run if not isinstance(s, Copy) or s.plan.dst_block is None else to_block(self, s, run)
        return together(self, s, signalling(self, s, action) if isinstance(s, Copy) else action)

    def compile_launch(self, s: Launch) -> Action:
        self.threads, self.sources = s.num_threads, s.plan.import_source
        self.safe = {id(b): self.expr(v) for b, v in s.plan.safe_values}  # safe values apply inside the kernel only
        self.maps, self.space = launch_maps(s), space_of(s)
        self.roles = roles = warp_roles_of(s)
        self.members, self.part = tuple(range(len(roles))), Parting(s)
        whole = WarpRole(0, tuple(range(-(-s.num_threads // 128))), s.num_threads)
        grid, body = [self.expr(g) for g in s.grid], self.stmt(s.body)
        block_slots = [(self.slot(v), numpy_dtype(v.dtype).type) for v in s.block_vars]
        thread_slots = [self.slot(v) for v in s.thread_vars]
        lanes = _lanes(s)
        dims, side_by_side = cluster_of(s), has_grid_barrier(s)

        def run(f: LaneFrame) -> None:
            extents = [int(g(f)) for g in grid]
            t = np.arange(lanes)
            mask = None if lanes in (1, s.num_threads) else t < s.num_threads
            x, y, _ = s.threads
            waiting = []
            for mates in clusters(extents, dims, s.span):
                frames = []
                for at in mates:
                    block = TileBlock(f.block, f"({', '.join(map(str, at))})")
                    g = LaneFrame(list(f.slots), lanes, mask, block)
                    g.role = whole
                    for (slot, dt), v in zip(block_slots, at):
                        g.slots[slot] = dt(v)
                    for slot, own in zip(thread_slots, (t % x, t // x % y, t // (x * y))):
                        g.slots[slot] = own.astype(np.int32)
                    frames.append(g)
                if dims is not None:
                    TileCluster([g.block for g in frames], s.num_threads * len(frames))
                if side_by_side:
                    waiting += frames
                elif roles or dims is not None:
                    run_warp_roles(frames, roles or [whole], body)
                else:
                    body(frames[0])
            if waiting and (roles or dims is not None):
                run_warp_roles(waiting, roles or [whole], body)
            elif waiting:
                TileGrid(waiting, body).run()

        return run


def _block_vote(c: TileCompiler, e: Call) -> Closure:
    """syncthreads_count, _and, _or: the threads of all warp roles that reach the call synchronise there."""
    members, value, answer_of = c.members, c.expr(e.args[0]), VOTES_OF_BLOCKS[e.op]
    roles, key = {r: c.roles[r].threads for r in members}, ("votes", id(e))

    def run(f: LaneFrame) -> Value:
        given = spread(value(f), f.lanes)[f.active()] != 0
        if len(members) < 2 or not len(given):
            return np.int32(answer_of(given))
        votes = f.block.once(key, f.role, list)
        votes.append(given)
        whole_warp_role(f, "a vote of the block", e.span)
        f.block.gather((key, f.role.counts[key]), f.role, roles, e.span, "a vote of the block")
        return np.int32(answer_of(np.concatenate(votes)))

    return run


def _lanes(s: Launch) -> int:
    """Lanes a launch needs: 1 when no thread is distinguished, else its threads rounded up to whole warps."""
    distinguished = set(map(id, s.thread_vars))

    def per_thread(n: Any) -> bool:
        if isinstance(n, Parallel):
            return False  # atomics and prints inside are executed by iteration
        if isinstance(n, Var):
            return id(n) in distinguished
        if isinstance(n, Call) and n.op in _EACH_LANE and n.op not in _ORDER_ONLY:
            return True
        return not isinstance(n, Buffer) and any(per_thread(c) for c in children(n))

    uses = any(isinstance(n, Var) and id(n) in distinguished for n in walk(s.body)) or per_thread(s.body)
    return -(-s.num_threads // WARP) * WARP if uses else 1


def uninitialized(b: Buffer, span: Any) -> Exception:
    """The error for a read of memory that nothing has written."""
    return fault("sim-uninitialized", f"{b.name} ({b.scope()}) is read before it is written",
                 found=f"{b.name}, which nothing has written", span=span,
                 hint="initialise it (T.clear, T.fill, T.copy) or check the order of the statements")


def run_tile(func: Any, args: Arguments, *, check: bool = True, aliased: bool = False) -> dict[str, np.ndarray]:
    """Run a tile program on NumPy arrays and scalars.

    func: a Func, or the PrimFunc of the language.  args: by name or in parameter order; outputs (`tilelang_out_idx`)
    may be left out.  Returns every tensor parameter after the run, by name; the given arrays are not changed.
    check: reject reads of memory that was never written.  aliased: arrays that share memory do so in the program too.
    Raises sim-argument, sim-out-of-bounds, sim-uninitialized, sim-thread-dependent, sim-unsupported, sim-assert; with
    warp roles or mbarriers also sim-barrier (a deadlock) and sim-mbarrier.
    """
    program: Func = getattr(func, "func", func)
    compiler = TileCompiler(program, check)
    action = compiler.stmt(program.body)
    binding = bind_arguments(program, args, compiler.granules, aliased)
    compiler.addresses = binding.addresses
    for t in binding.tensors:
        compiler.slot(t.buffer.data)
    slots = compiler.new_slots(binding.values)
    for t in binding.tensors:
        slots[compiler.slot(t.buffer.data)] = t.storage
    with np.errstate(all="ignore"):
        action(LaneFrame(slots, 1, None, Printer()))
    return binding.outputs()


__all__ = ["PRIVATE", "TileCompiler", "run_tile", "uniform", "uninitialized"]
