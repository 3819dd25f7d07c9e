"""Rules for the effect of each synchronising or asynchronous call in the synchronisation model.

A rule gets the state of the stream that executes the call, the call and its span.  The rule of a wait is a generator: it
yields what it waits for until it may continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Evaluate, Expr, Load, Node, Select, children, GLOBAL, SHARED
from tilelang.layout.distinct import distinct
from tilelang.target.atomics import Atomic, family
from tilelang.target.wgmma import K_STEP_BYTES, WGMMA_ROWS, encode_descriptor, operand_addresses

from .sync_fault import Fault, Found, Undecided
from .clocks import MBarrier
from .memory import Site
from .stream_state import StreamState
from .touches import pattern, touch
from .values import Descriptor

WARP = 32
Rule = Callable[[StreamState, Call, Any], None]
EVENT_RULES: dict[str, Rule] = {}
WAIT_RULES: dict[str, Callable[[StreamState, Any, Any], Iterator[Any]]] = {}


def event(fn: Rule) -> Rule:
    """Decorator: the rule of the call with the function's name."""
    EVENT_RULES[fn.__name__.strip("_")] = fn
    return fn


def event_of(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: the rule of several calls."""
    def put(fn: Rule) -> Rule:
        EVENT_RULES.update(dict.fromkeys(names, fn))
        return fn

    return put


def finished(groups: list[Any], n: int) -> list[Any]:
    """Takes from the groups of copies in flight those that a wait for all but the last n waits for."""
    done = groups[:max(0, len(groups) - n)]
    del groups[:len(done)]
    return done


# ---- block and named barriers -------------------------------------------------------------------------------------------


def _arrive(st: StreamState, number: int, count: int, span: Any, named: bool) -> Any:
    """Arrive at a block or named barrier and wait for its phase.

    named: bar.sync with a count, which counts 32 threads for each warp, however many the warp has.  Source: PTX ISA, "bar".
    """
    bar = st.block.named(number)
    st.partial(bar.name if number else "a block barrier", span)
    come = WARP * len(st.active) if named else st.count()
    phase = bar.arrive(st.active, come, count, span)
    st.block.model.progress += 1
    return bar, phase


def _arrive_and_wait(st: StreamState, number: int, count: int, span: Any, named: bool) -> Iterator[Any]:
    active = list(st.active)
    bar, phase = _arrive(st, number, count, span, named)
    while phase not in bar.done:
        yield span, bar, f"at {bar.name}"
    bar.pass_(active, phase)
    st.block.model.progress += 1


def _sync_threads(st: StreamState, c: Any, span: Any) -> Iterator[Any]:
    return _arrive_and_wait(st, 0, st.plan.launch.num_threads, span, False)


def _named_barrier(st: StreamState, c: Any, span: Any) -> Iterator[Any]:
    number = st.uniform(c.args[0], "the number of a barrier")
    return _arrive_and_wait(st, number, st.uniform(c.args[1], "the count of a barrier"), span, True)


@event
def _named_barrier_arrive(st: StreamState, c: Call, span: Any) -> None:
    _arrive(st, st.uniform(c.args[0], "the number of a barrier"), st.uniform(c.args[1], "the count of a barrier"), span, True)


@event
def _sync_warp(st: StreamState, c: Call, span: Any) -> None:
    for w, lanes in st.active if st.unknowns is None else ():
        w.converge(lanes)


# ---- mbarriers ----------------------------------------------------------------------------------------------------------


@event
def _mbarrier_init(st: StreamState, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf) or st.count() != 1:
        raise Undecided("an mbarrier is not initialised by one thread")
    (w, lanes), = st.active
    mine = w.component(lanes)
    at = int(st.values.address(a.buffer, a.indices, st))
    name = st.block.element(a.buffer, at)
    count = st.uniform(c.args[1], f"the count of {name}")
    if not 1 <= count < 1 << 20:  # PTX ISA, "mbarrier.init"
        raise Found(Fault(f"{name} is initialised for {count} arrivals: it counts 1 to 1048575", span, kind="mbarrier"))
    st.block.barriers[at] = MBarrier(name, count, st.block.clocks, (mine, st.block.clocks.now[mine]), span)


@event
def _fence_mbarrier_init(st: StreamState, c: Call, span: Any) -> None:
    for b in initialised(st):
        b.fenced = b.released = True


def initialised(st: StreamState) -> list[MBarrier]:
    """The mbarriers of the block that the executing threads have initialised."""
    mine = set().union(*(w.own_components(lanes) for w, lanes in st.active))
    return [b for b in st.block.barriers.values() if b.made[0] in mine]


@event_of("mbarrier_arrive", "mbarrier_expect_tx", "mbarrier_arrive_expect_tx")
def _arrivals(st: StreamState, c: Call, span: Any) -> None:
    nbytes = st.uniform(c.args[1], "the bytes announced") if c.op.endswith("expect_tx") else 0
    for bar, active in st.each_barrier(c.args[0], span):
        for w, lanes in active:
            n = lanes.bit_count()
            bar.arrive(w, lanes, n if "arrive" in c.op else 0, nbytes * n, span)


def _mbarrier_wait(st: StreamState, c: Any, span: Any) -> Iterator[Any]:
    parity = st.uniform(c.args[1], "the parity of a wait")
    for bar, active in list(st.each_barrier(c.args[0], span)):
        waiting = []
        for w, lanes in active:
            seen, _ = w.known(lanes)
            bar.check_made(w.mine(lanes)[0], False, span)
            waiting.append((w, lanes, bar.target(seen, parity)))
        last = max(t for _, _, t in waiting)
        while len(bar.done) < last:
            yield span, bar, f"for parity {parity} of {bar.name}"
        for w, lanes, target in waiting:
            bar.wait(w, lanes, target, span)
        st.block.model.progress += 1


class _Registers:
    def __init__(self, block: Any, short: int) -> None:
        self.block, self.short = block, short

    def state(self) -> str:
        return f"{self.block.spare} registers given back, {self.short} needed"


def _set_max_nreg(st: StreamState, c: Any, span: Any) -> Iterator[Any]:
    n, threads = c.options.n, st.count()
    more = (n - st.nreg) * threads
    while more > max(0, st.block.spare):
        yield span, _Registers(st.block, more), f"for {n} registers a thread"
    st.block.spare -= more
    st.nreg = n
    st.block.model.progress += 1


# ---- clusters -----------------------------------------------------------------------------------------------------------


def enter(block: Any, st: Any, w: Any, lanes: int, span: Any, copies: bool = False) -> None:
    """An access of another block's shared memory.  Raises Found when that block may not have started."""
    if block is st.block:
        return
    seen, _ = w.mine(lanes)
    if not seen[st.block.model.cluster.component]:
        raise Found(Fault(f"shared memory of block {block.rank} of the cluster is accessed, which may not have started",
                          span, kind="cluster"))
    if not copies:  # an mbarrier reports the completion of a copy
        c = w.component(lanes)
        block.remote.append((c, st.block.clocks.now[c], span))


def peers(st: StreamState, e: Expr, span: Any) -> Iterator[Any]:
    """The blocks of the cluster that the active threads name by rank, each with the threads that name it active."""
    ranks = st.values(e, st)
    if not isinstance(ranks, np.ndarray):
        yield peer(st, st.uniform(e, "the rank of a block"), span)
        return
    for rank in st.grouped(np.broadcast_to(ranks, st.n)):
        yield peer(st, rank, span)


def peer(st: StreamState, rank: int, span: Any) -> Any:
    """The block of the cluster with the given rank."""
    if not 0 <= rank < len(st.block.model.blocks):
        raise Found(Fault(f"no block of this cluster has rank {rank}: it has {len(st.block.model.blocks)}", span,
                          kind="cluster"))
    return st.block.model.blocks[rank]


def _arrive_at_cluster(st: StreamState, relaxed: bool, span: Any) -> int:
    st.partial("the cluster barrier", span)
    model = st.block.model
    made = None
    if relaxed:  # fence.mbarrier_init released the initialisations to the cluster
        made = model.clocks.row()
        for b in st.block.barriers.values():
            made[b.made[0]] = max(made[b.made[0]], b.made[1] if b.released else 0)
    phase = model.cluster.arrive(st.active, st.count(), len(model.blocks) * st.plan.launch.num_threads, span, made)
    model.progress += 1
    return int(phase)


@event
def _cluster_arrive(st: StreamState, c: Call, span: Any) -> None:
    if st.cluster_phase is not None:
        raise Found(Fault("threads arrive again at the cluster barrier before they wait for it", span, kind="cluster"))
    st.cluster_phase = _arrive_at_cluster(st, c.options.relaxed, span)


def _cluster_wait(st: StreamState, c: Any, span: Any) -> Iterator[Any]:
    if st.cluster_phase is None:
        raise Found(Fault("threads wait for the cluster barrier without having arrived at it", span, kind="cluster"))
    bar, active = st.block.model.cluster, list(st.active)
    while st.cluster_phase not in bar.done:
        yield span, bar, f"at {bar.name}"
    bar.pass_(active, st.cluster_phase)
    st.cluster_phase = None
    st.block.model.progress += 1


def _cluster_sync(st: StreamState, c: Any, span: Any) -> Iterator[Any]:
    st.cluster_phase = _arrive_at_cluster(st, False, span)
    return _cluster_wait(st, c, span)


@event_of("mbarrier_arrive_remote", "mbarrier_complete_remote")
def _remote_arrivals(st: StreamState, c: Call, span: Any) -> None:
    arrive = c.op == "mbarrier_arrive_remote"
    nbytes = 0 if arrive else st.uniform(c.args[2], "the bytes counted")
    for block in peers(st, c.args[1], span):
        for bar, active in st.each_barrier(c.args[0], span, block):
            for w, lanes in active:
                enter(block, st, w, lanes, span)
                n = lanes.bit_count()
                bar.arrive(w, lanes, n if arrive else 0, -nbytes * n, span)


@event_of("cluster_load", "cluster_store")
def _cluster_access(st: StreamState, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf):
        raise Undecided("shared memory of another block is not given as an element of a buffer")
    for block in peers(st, c.args[1], span):
        for w, lanes in st.active:
            enter(block, st, w, lanes, span)
        touch(st, "w" if c.op == "cluster_store" else "r", a.buffer, a.indices, 1, c, block.memory)


@event
def _thread_return(st: StreamState, c: Call, span: Any) -> None:
    if st.unknowns is None:
        raise Undecided("threads leave the kernel early")
    if not st.guess:
        st.leave()


# The model has only the blocks of one cluster, so a barrier of the grid or of ranks is modelled by its ordering of one block's
# threads.
WAIT_RULES.update(sync_threads=_sync_threads, sync_grid=_sync_threads, rank_barrier=_sync_threads, named_barrier=_named_barrier,
                  mbarrier_wait=_mbarrier_wait, set_max_nreg=_set_max_nreg, cluster_wait=_cluster_wait,
                  cluster_sync=_cluster_sync)


# ---- the async proxy ----------------------------------------------------------------------------------------------------


@event
def _fence_proxy_async(st: StreamState, c: Call, span: Any) -> None:
    for b in initialised(st):
        b.fenced = True
    for w, lanes in st.active:
        w.fence(lanes)


def _box(st: StreamState, c: Call) -> tuple[int, int]:
    """(bytes of shared memory that a TMA box takes, bytes that it counts at the mbarrier)."""
    m = st.plan.maps.get(c.options.map)
    if m is None:
        raise Undecided(f"there is no tensor map `{c.options.map}`")
    size = m.buffer.dtype.bits // 8
    rows = m.box_bytes // (m.box[0] * size)
    return rows * max(m.box[0] * size, m.swizzle), m.box_bytes


def _starts(st: StreamState, a: Expr) -> Iterator[int]:
    """The places of a copy's shared tile, each while the threads that have it are the active ones."""
    if not isinstance(a, AddressOf):
        raise Undecided("a copy's shared tile is not given as an element of a buffer")
    at = st.values.address(a.buffer, a.indices, st)
    if at is None or (several := isinstance(at, np.ndarray) and (at != at.flat[0]).any()) and at.ndim > 1:
        raise Undecided(f"where a copy lies in `{a.buffer.name}` is known only at run time")
    return st.grouped(np.broadcast_to(at, st.n)) if several else iter((int(np.asarray(at).flat[0]),))


def _start(st: StreamState, a: Expr) -> int:
    first, *others = _starts(st, a)
    if others:
        raise Undecided("where a copy lies differs by thread")
    return first


def _arrives(st: StreamState, lo: int, taken: int, counted: int, bar_at: Expr, span: Any, block: Any = None,
             source: int | None = None) -> None:
    """A copy by each active thread to shared bytes lo .. lo+taken-1 of a block, which signals an mbarrier there.

    source: bytes of the block's own shared memory that it reads.
    """
    block = block or st.block
    for bar, active in st.each_barrier(bar_at, span, block):
        for w, lanes in active:
            for _ in range(lanes.bit_count()):
                enter(block, st, w, lanes, span, True)
                seen, fenced = w.mine(lanes)
                t = bar.copy(seen, counted, span)
                block.memory.tile("w", lo, lo + taken, (seen, fenced), (bar.copies, t), span, (w, lanes))
                if source is not None:
                    st.block.memory.tile("r", source, source + taken, (seen, fenced), (bar.copies, t), span, (w, lanes))
                    st.block.remote.append((bar.copies, t, span))
        bar.settle(span)


@event
def _tma_load(st: StreamState, c: Call, span: Any) -> None:
    taken, counted = _box(st, c)
    blocks = [st.block]
    if c.options.multicast:
        mask = st.uniform(c.args[-1], "the mask of a multicast")
        if not 0 < mask < 1 << len(st.block.model.blocks):
            raise Found(Fault(f"a multicast to the blocks of mask {mask:#x} in a cluster of {len(st.block.model.blocks)}",
                              span, None))
        blocks = [b for b in st.block.model.blocks if mask >> b.rank & 1]
    for b in blocks:
        _arrives(st, _start(st, c.args[0]), taken, counted, c.args[1], span, b)


@event
def _bulk_load(st: StreamState, c: Call, span: Any) -> None:
    n = st.uniform(c.args[2], "the size of a copy")
    _arrives(st, _start(st, c.args[0]), n, n, c.args[3], span)


class _Stores:
    """Bulk stores of one thread: component, time of the last one, of the committed groups, and of those waited for."""

    def __init__(self, component: int) -> None:
        self.component, self.time, self.finished, self.span = component, 1, 1, None
        self.groups: list[int] = []


def _leaves(st: StreamState, lo: int, taken: int, span: Any) -> None:
    """A copy from shared memory by each active thread."""
    for w, lanes in st.active:
        own = st.bulk.get((w, lanes))
        if own is None:
            own = st.bulk[w, lanes] = _Stores(st.block.clocks.new())
        known = w.mine(lanes)
        own.time += 1
        own.span = span
        st.block.memory.tile("r", lo, lo + taken, known, (own.component, own.time), span, (w, lanes))


@event_of("tma_store", "tma_reduce_add")
def _tma_out(st: StreamState, c: Call, span: Any) -> None:
    for start in _starts(st, c.args[0]):
        _leaves(st, start, _box(st, c)[0], span)


@event
def _bulk_store(st: StreamState, c: Call, span: Any) -> None:
    shared = next(a for a in c.args if isinstance(a, AddressOf) and a.buffer.scope_name != GLOBAL)
    _leaves(st, _start(st, shared), st.uniform(c.args[2], "the size of a copy"), span)


@event
def _bulk_commit(st: StreamState, c: Call, span: Any) -> None:
    for _, own in _issuers(st):
        own.groups.append(own.time)


def _issuers(st: StreamState) -> list[tuple[tuple[Any, int], _Stores]]:
    """The active threads that have issued bulk stores."""
    return [(key, own) for key, own in st.bulk.items() for w, lanes in st.active if key[0] is w and not key[1] & ~lanes]


@event
def _bulk_wait(st: StreamState, c: Call, span: Any) -> None:
    for (w, lanes), own in _issuers(st):
        done = finished(own.groups, c.options.n)
        if done:
            own.finished = done[-1]
            w.learn_times(lanes, {own.component: own.finished})


# ---- MMA instructions ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _lines(start: int, lbo: int, sbo: int, swizzle: int, major: str, extent: int, size: int,
           k_bytes: int) -> tuple[tuple[int, int], ...]:
    """Intervals of 128-byte lines that an operand touches, relative to the line that its descriptor points to."""
    lines = distinct(operand_addresses(encode_descriptor(start, lbo, sbo, swizzle), major, extent, size, k_bytes) >> 7)
    cuts = np.flatnonzero(np.diff(lines) > 1)
    first, last = lines[np.r_[0, cuts + 1]], lines[np.r_[cuts, len(lines) - 1]]
    return tuple((int(a) << 7, int(b) + 1 << 7) for a, b in zip(first, last))


def _operand(st: StreamState, c: Call, k: int, d: Descriptor) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(first byte, intervals relative to it) of operand A (k = 1) or B, computed once for each place."""
    row = WGMMA_ROWS[c.options.row]
    extent, dt, major = (64, row.a_dtype, c.options.a_major) if k == 1 else (row.shape[1], row.b_dtype, c.options.b_major)
    base = d.address // 128 * 128
    lines = _lines(d.address - base, d.lbo, d.sbo, d.swizzle, major, extent, -(-dt.bits // 8),
                   K_STEP_BYTES if k == 1 else row.b_bytes)
    return st.plan.operands.setdefault((id(c.args[k]), d), (base, lines))


@event
def _wgmma(st: StreamState, c: Call, span: Any) -> None:
    row = WGMMA_ROWS[c.options.row]
    st.partial("a wgmma", span)
    if st.block.streams_are_groups and len(st.active) != 4:
        raise Found(Fault(f"a wgmma is reached by {len(st.active)} warps, not by whole warp groups", span, kind="barrier"))
    uses = []
    st.registers.time += 1
    for k, a in enumerate(c.args[:3]):
        if isinstance(a, AddressOf):
            first = st.uniform(a.indices[0], "a register") if k < 2 else 0
            n = (row.c if k == 0 else row.a).registers
            uses.append((a.buffer.data, first, first + n, k == 0))
            continue
        d = st.values(a, st)
        if not isinstance(d, Descriptor):
            raise Undecided("a matrix descriptor is known only at run time")
        base, lines = st.plan.operands.get((id(a), d)) or _operand(st, c, k, d)
        for lo, hi in lines:
            st.block.memory.group_reads(base + lo, base + hi, st.active, st.wgmmas, st.registers.time, span)
    st.registers.issue(uses, span)


@event
def _wgmma_fence(st: StreamState, c: Call, span: Any) -> None:
    st.registers.fence()
    for w, lanes in st.active:
        w.aligned(lanes)


@event
def _wgmma_commit(st: StreamState, c: Call, span: Any) -> None:
    st.registers.commit({w.control: st.block.clocks.now[w.control] for w, _ in st.active})
    for w, lanes in st.active:
        w.aligned(lanes)


@event
def _wgmma_wait(st: StreamState, c: Call, span: Any) -> None:
    st.registers.wait(c.options.n)
    for w, lanes in st.active:
        w.learn_times(lanes, {st.wgmmas: st.registers.finished, **st.registers.waits})
        w.aligned(lanes)


# ---- cp.async -----------------------------------------------------------------------------------------------------------


@event
def _cp_async(st: StreamState, c: Call, span: Any) -> None:
    a = c.args[0]
    if not isinstance(a, AddressOf):
        raise Undecided("a copy's shared place is not given as an element of a buffer")
    p, exact = pattern(st, a.buffer, a.indices, max(1, c.options.bytes // a.buffer.dtype.bytes))
    if p is not None:
        site = Site(span, exact, None, st.independent)
        st.open_copies.append((p, list(st.active), site))
        st.block.memory.fly(p, st.active, site)


@event
def _cp_async_commit(st: StreamState, c: Call, span: Any) -> None:
    st.copy_groups.append(st.open_copies)
    st.open_copies = []


@event
def _cp_async_wait(st: StreamState, c: Call, span: Any) -> None:
    _land(st, [x for group in finished(st.copy_groups, c.options.n) for x in group])


def _land(st: StreamState, copies: list[Any]) -> None:
    for p, active, site in copies:
        st.block.memory.land(p)
        st.block.memory.threads("w", p, active, site)


@event
def _wait_loads(st: StreamState, c: Call, span: Any) -> None:
    """A copy has landed behind n later ones of each of its warps."""
    issued = [x for group in (*st.copy_groups, st.open_copies) for x in group]
    warps = [{w for w, _ in x[1]} for x in issued]
    landed = {id(x) for k, x in enumerate(issued) if sum(w >= warps[k] for w in warps[k + 1:]) >= c.options.n}
    _land(st, [x for x in issued if id(x) in landed])
    st.open_copies = [x for x in issued if id(x) not in landed]
    st.copy_groups.clear()


@event
def _cp_async_mbarrier_arrive(st: StreamState, c: Call, span: Any) -> None:
    """The threads' copies so far land before the phase is over: whoever waits for it sees them, and may fence them."""
    if st.plan.waits_for_copies:
        raise Undecided("copies of cp.async signal an mbarrier, and are waited for as well")
    copies = [x for group in (*st.copy_groups, st.open_copies) for x in group]
    st.copy_groups, st.open_copies = [], []
    for bar, active in st.each_barrier(c.args[0], span):
        warps = {w.number: lanes for w, lanes in active}
        if any(lanes & ~warps.get(w.number, 0) for _, those, _ in copies for w, lanes in those):
            raise Undecided("copies of cp.async signal an mbarrier for other threads than those that made them")
        stamp = bar.land(active, c.options.noinc, span)
        if copies:
            st.block.memory.signalled([(p, site) for p, _, site in copies], stamp)
        bar.settle(span)


@event
def _bulk_copy_cluster(st: StreamState, c: Call, span: Any) -> None:
    n = st.uniform(c.args[2], "the size of a copy")
    for block in peers(st, c.args[4], span):
        _arrives(st, _start(st, c.args[0]), n, n, c.args[3], span, block, _start(st, c.args[1]))


# ---- accesses made while an expression is computed --------------------------------------------------------------------------


def reads(st: StreamState, e: Node, s: Any) -> None:
    """Record every access made while e is computed."""
    if not st.plan.facts(e)[0]:
        return
    if isinstance(e, Load):
        for i in e.indices:
            reads(st, i, s)
        if e.buffer.scope_name in SHARED:
            touch(st, "r", e.buffer, e.indices, 1, s)
    elif isinstance(e, Select) and e.lazy:
        reads(st, e.cond, s)
        for side in st.ways(e, e.cond, e.a, e.b):
            reads(st, side, s)
    elif isinstance(e, Call) and e.op in EVENT_RULES:
        EVENT_RULES[e.op](st, e, s.span)
    elif isinstance(e, Call):
        for k, a in enumerate(e.args):
            if isinstance(a, AddressOf):
                for i in a.indices:
                    reads(st, i, s)
                if a.buffer.scope_name in SHARED:
                    _through(st, e, k, a, s)
            else:
                reads(st, a, s)
    else:
        for c in children(e):
            if isinstance(c, Expr):
                reads(st, c, s)


def _through(st: StreamState, c: Call, k: int, a: AddressOf, s: Any) -> None:
    """Record an access through an address that is passed to an intrinsic."""
    size = a.buffer.dtype.bytes
    if c.op.startswith("atomic_"):
        used = not (isinstance(s, Evaluate) and s.call is c)
        touch(st, "a", a.buffer, a.indices, {"atomic_addx2": 2, "atomic_addx4": 4}.get(c.op, 1), s,
              atomic=Atomic(family(c.op), used and st.turning, st.inside))
    elif c.op in ("ldmatrix", "stmatrix"):
        mask, active = st.mask, st.active
        if c.options.num < 4:  # eight lanes give the addresses of each matrix
            st.only(st.threads % WARP < 8 * c.options.num)
        touch(st, "w" if c.op == "stmatrix" else "r", a.buffer, a.indices, max(1, 16 // size), s)
        st.mask, st.active = mask, active
    elif c.op != "wgmma_descriptor":
        touch(st, "w", a.buffer, None, 1, s)
