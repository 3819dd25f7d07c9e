"""Rules for the effect of each synchronising or asynchronous call in the synchronisation model.

A rule gets the state of the stream that executes the call, the call and its span.  The rule of a wait is a generator: it
yields what it waits for until it may continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Expr

from .sync_fault import Fault, Found, Undecided
from .clocks import MBarrier
from .stream_state import StreamState
from .touches import touch

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


# The model has only the blocks of one cluster, so a grid barrier is modelled by its ordering of one block's threads.
WAIT_RULES.update(sync_threads=_sync_threads, sync_grid=_sync_threads, named_barrier=_named_barrier,
                  mbarrier_wait=_mbarrier_wait, set_max_nreg=_set_max_nreg, cluster_wait=_cluster_wait,
                  cluster_sync=_cluster_sync)
