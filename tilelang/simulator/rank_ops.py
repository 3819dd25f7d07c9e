"""Intrinsics of programs of several ranks, in both simulators: ranks, addresses on other ranks, barriers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import (GLOBAL, I32, AddressOf, Bind, Buffer, Call, Const, Evaluate, If, Load, Stmt, Store, Var, as_bool,
                         binary, call, fresh, seq)
from tilelang.ir.evaluate import Closure

from .faults import fault
from .lane_ops import effects, own_threads
from .lanes import Action, LaneFrame
from .ranks import Section, joined, member

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "le": np.less_equal, "gt": np.greater, "lt": np.less}
_SIGNS = {"eq": "==", "ne": "!=", "ge": ">=", "le": "<=", "gt": ">", "lt": "<"}


def _rank(c: Any, e: Call) -> Closure:
    return lambda f: np.int32(f.block.device)


def _size(c: Any, e: Call) -> Closure:
    return lambda f: np.int32(c.ranks.size)


def _remote(c: Any, e: Call) -> Closure:
    """remote_address(start of a symmetric tensor, rank): a Section, which only a Bind holds."""
    start: Any = e.args[0]
    at, rank = c.slot(start.buffer.data), c.expr(e.args[1])

    def run(f: LaneFrame) -> Any:
        held, r = f.slots[at], np.asarray(rank(f))
        bad = (r < 0) | (r >= c.ranks.size)
        if (bad if r.ndim == 0 or f.mask is None else bad & f.mask).any() and f.any_active():
            found = int(r) if r.ndim == 0 else int(r[bad if f.mask is None else bad & f.mask][0])
            raise fault("sim-rank", f"there is no rank ‹{found}› among {c.ranks.size}",
                        expected=f"a rank from 0 to {c.ranks.size - 1}", span=e.span or c.place)
        return Section(held.memory, held.of, np.where(bad, 0, r))

    return run


def barrier_as_statements(e: Call, peer: Var) -> Stmt:
    """What each thread does between the two block barriers of rank_barrier; peer: its number in the block."""
    start: Any = e.args[0]
    pad, (*row, first), half = start.buffer, start.indices, e.options.words // 2
    turn, ptr = fresh("turn", pad.dtype), fresh("ptr", "handle")
    there = Buffer("pad", pad.shape, pad.dtype, GLOBAL, pad.strides_, pad.offset, ptr, pad.facts)
    here, one = AddressOf(Buffer("storage", (1,), pad.dtype, GLOBAL, data=pad.data), (Const(0, I32),)), Const(1, pad.dtype)
    count = (*row, first + half + peer)
    mine = AddressOf(there, (*row, first + call("world_rank", (), I32)))
    return If(as_bool(binary("lt", peer, call("world_size", (), I32))), seq(
        Bind(turn, Load(pad, count, pad.dtype) + one), Store(pad, count, turn),
        Bind(ptr, call("remote_address", (here, peer), "handle")),
        Evaluate(call("atomic_add", (mine, one), pad.dtype, span=e.span, order="release", scope="sys"), span=e.span),
        Evaluate(call("wait_signal", (AddressOf(pad, (*row, first + peer)), turn), "void", span=e.span, compare="ge",
                      line=e.options.line), span=e.span)), None, span=e.span)


def _rank_barrier(c: Any, e: Call) -> Action:
    peer = fresh("peer", "int32")
    meet = c.stmt(Evaluate(call("sync_threads", (), "void", span=e.span), span=e.span))
    each, at = c.stmt(barrier_as_statements(e, peer)), c.slot(peer)
    room = e.options.words // 2

    def run(f: LaneFrame) -> None:
        if c.ranks.size > room and f.any_active():
            raise fault("sim-rank", f"the row of T.barrier_all has room for {room} ranks, found {c.ranks.size}",
                        expected=f"a row of {2 * c.ranks.size} elements", found=str(e.options.words), span=e.span)
        meet(f)
        f.slots[at] = own_threads(f).astype(np.int32)
        each(f)
        meet(f)

    return run


def _pe_barrier(c: Any, e: Call) -> Action:
    """One thread of each rank: all of them come before one goes on, and each has seen what the others had seen."""
    def run(f: LaneFrame) -> None:
        ranks, block, (t, *more) = c.ranks, f.block, np.flatnonzero(f.active())
        if more:
            raise fault("sim-barrier", f"‹{1 + len(more)} threads› come to the barrier of all PEs at once",
                        expected="one thread", span=e.span)
        clocks, wait = getattr(block, "clocks", None), getattr(block, "wait", None) or block.warp_roles.wait
        ranks.came[block.device] += 1
        turn = ranks.came[block.device]
        if clocks is not None:
            ranks.met[turn] = joined(ranks.met.get(turn), clocks.arrive(member(clocks, int(t))))
        wait(lambda: min(ranks.came) >= turn, lambda: f"for all PEs on rank {block.device}", e.span)
        if clocks is not None:
            clocks.acquire(member(clocks, int(t)), ranks.met[turn])

    return run


def why_waits(e: Call, device: int, found: Any, want: Any) -> str:
    """What a wait says of itself."""
    name = e.args[0].buffer.name  # type: ignore[attr-defined]
    return f"on rank {device} until {name} {_SIGNS[e.options.compare]} {want}, which is {found}"


RANK_OPS: dict[str, Callable[[Any, Call], Closure]] = {"world_rank": _rank, "world_size": _size, "remote_address": _remote,
                                                       "by_nvshmem": lambda c, e: lambda f: np.bool_(False),
                                                       **effects({"rank_barrier": _rank_barrier, "pe_barrier": _pe_barrier,
                                                                  "nvshmem": lambda c, e: lambda f: None})}
