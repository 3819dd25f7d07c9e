"""Clusters in the reference interpreter: blocks of a cluster run alternately and access each other's shared memory.

A multicast copy is done by each block for itself, since all blocks of the mask copy the same tile.  A buffer of a block
that has not reached its allocation yet is created when another block accesses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilelang.ir import Call, numpy_dtype
from tilelang.ir.evaluate import Closure, Value
from tilelang.ir.numbers import to_dtype

from .context import TileContext
from ..faults import fault
from ..lane_ops import effects, spread
from ..lanes import Action, LaneFrame, uniform
from ..memory import shared_operand


class TileCluster:
    """The blocks of one cluster, by rank, and the cluster barrier.  need: number of threads of all blocks."""

    def __init__(self, blocks: list[Any], need: int) -> None:
        self.blocks, self.need = blocks, need
        self.come = self.phase = 0
        for rank, b in enumerate(blocks):
            b.cluster, b.rank = self, rank

    def arrive(self, n: int) -> None:
        """n threads arrive at the cluster barrier."""
        self.come += n
        if self.come >= self.need:
            self.come, self.phase = 0, self.phase + 1

    def block(self, rank: int, span: Any) -> Any:
        """The block with this rank.  Raises sim-cluster if there is none."""
        if not 0 <= rank < len(self.blocks):
            raise fault("sim-cluster", f"no block of this cluster has rank ‹{rank}›: it has {len(self.blocks)}",
                        expected=f"a rank from 0 to {len(self.blocks) - 1}", span=span,
                        hint="ranks run from 0 to the number of blocks less one")
        return self.blocks[rank]


def cluster_of_frame(f: LaneFrame, span: Any) -> TileCluster:
    """The cluster of the running block.  Raises sim-cluster in a launch without clusters."""
    if f.block.cluster is None:
        raise fault("sim-cluster", "an operation of clusters in a launch without", expected="a launch with clusters",
                    found="one without", span=span, hint="launch with T.ClusterKernel")
    return f.block.cluster


def _rank(c: TileContext, e: Call) -> Closure:
    dt = numpy_dtype(e.dtype).type

    def run(f: LaneFrame) -> Value:
        cluster = f.block.cluster
        if e.op == "cluster_size":
            return np.asarray(dt(1 if cluster is None else len(cluster.blocks)))
        return np.asarray(dt(f.block.rank))

    return run


def _barrier(c: TileContext, e: Call) -> Action:
    arrives, waits = e.op != "cluster_wait", e.op != "cluster_arrive"

    def run(f: LaneFrame) -> None:
        cluster = cluster_of_frame(f, e.span)
        n = f.warp_role.threads if f.lanes == 1 else int(f.active().sum())
        if arrives:
            cluster.arrive(n)
        if waits:
            want = f.warp_role.counts["cluster"] = f.warp_role.counts.get("cluster", 0) + 1
            f.block.wait(lambda: cluster.phase >= want, lambda: "at the cluster barrier", e.span)

    return run


def _store(c: TileContext, e: Call) -> Action:
    """cluster_store(address, cta, value)."""
    place = shared_operand(e, e.args[0])
    cells, cta, value = c.memory.cells(place, 1, "remote store to"), c.expr(e.args[1]), c.expr(e.args[2])
    at, b = c.slot(place.buffer.data), place.buffer

    def run(f: LaneFrame) -> None:
        rank = int(uniform(cta(f), f, "the rank of a block", e.span))
        with _elsewhere(f, b, at, rank, e.span):
            flat, where, ok = cells(f)
            flat[where[ok]] = to_dtype(spread(value(f), f.lanes).reshape(where.shape)[ok], b.dtype)

    return run


@contextlib.contextmanager
def _elsewhere(f: LaneFrame, b: Any, at: int, rank: int, span: Any) -> Iterator[None]:
    """Under this context manager the slot of a shared buffer holds the storage of another block."""
    peer, key = cluster_of_frame(f, span).block(rank, span), id(b.data)
    store = peer.stores.get(key)
    if store is None:
        store = peer.stores[key] = f.block.makers[key](f)
    old, f.slots[at] = f.slots[at], store
    try:
        yield
    finally:
        f.slots[at] = old


def to_block(c: TileContext, s: Any, action: Action) -> Action:
    """A Copy with attr dst_block: the action writes the buffer of that block."""
    rank, at = c.expr(s.plan.dst_block), c.slot(s.dst.buffer.data)

    def run(f: LaneFrame) -> None:
        there = int(uniform(rank(f), f, "the rank of a block", s.span))
        with _elsewhere(f, s.dst.buffer, at, there, s.span):
            action(f)

    return run


CLUSTER_OPS: dict[str, Callable[[TileContext, Call], Closure]] = {
    "cluster_rank": _rank, "cluster_size": _rank,
    **effects({"cluster_arrive": _barrier, "cluster_wait": _barrier, "cluster_sync": _barrier, "cluster_store": _store})}
