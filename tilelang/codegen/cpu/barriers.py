"""Barriers of coroutines: mbarriers, named barriers, the barriers of warp roles and of the grid (coroutine.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import AddressOf, Buffer, Call, Expr
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import BARRIER_WORDS
from tilelang.target.thread_calls import WARP

from .coroutine import (BYTES, COROUTINES, FAULT, GRID, LIVE, MANY, NAMED, PHASE, PROGRESS, WARP_ROLE_BARRIERS, Coroutine,
                        add_word, get_word, init_barrier, signal, word)
from .code import CallPrinter, Code
from .state import WarpRoleState
from .text import Fn

# ---- waiting ------------------------------------------------------------------------------------------------------------


def warp_role_of(cx: Code, what: str, span: Any) -> WarpRoleState:
    """The coroutine that runs the code. Raises cpu-unsupported outside of a coroutine."""
    if cx.block.warp_role is None:
        raise unsupported(what, span=span or cx.span)
    return cx.block.warp_role


def need_all_threads(cx: Code, what: str, span: Any) -> None:
    """Raises cpu-unsupported inside a loop over threads."""
    if cx.block.tid is not None:
        raise unsupported(f"{what} under a condition or loop that depends on the thread", span=span or cx.span,
                          hint="move the barrier out of the thread-dependent branch")


def wait_until(f: Fn, coroutine: Coroutine, ready: Callable[[], str]) -> None:
    """Emit a wait that ends once ready() holds."""
    again, stay, passed = f.name_of("wait"), f.name_of("stay"), f.name_of("passed")
    f.start(again)
    ok = ready()
    f.end(f"br i1 {ok}, label %{passed}, label %{stay}")
    f.start(stay)
    coroutine.suspend()
    f.br(again)
    f.start(passed)
    add_word(f, "%group", PROGRESS, "1")


def arrive_and_wait(f: Fn, warp_role: WarpRoleState, base: str, k: int, arrivals: str, need: Callable[[], str],
                    waits: bool = True, action: Callable[[], None] | None = None) -> None:
    """Add `arrivals` to the barrier in words k and k + 1 of a state, and wait. When need() have arrived, its generation
    changes.

    action: run by the last one to arrive.
    """
    before = get_word(f, base, k + 1)
    add_word(f, base, k, arrivals)
    add_word(f, "%group", PROGRESS, "1")
    over = f.alloca("i1", hint="over")

    def look() -> str:
        def complete() -> None:
            if action is not None:
                action()
            f.do(f"store i64 0, ptr {word(f, base, k)}")
            add_word(f, base, k + 1, "1")

        f.do(f"store i1 true, ptr {over}")
        same = f.let(f"icmp eq i64 {get_word(f, base, k + 1)}, {before}")

        def still() -> None:
            here = f.let(f"icmp sge i64 {get_word(f, base, k)}, {need()}")
            f.branch(here, complete, lambda: f.do(f"store i1 false, ptr {over}"))

        f.branch(same, still)
        return f.let(f"load i1, ptr {over}")

    if waits:
        wait_until(f, warp_role.coroutine, look)
    else:
        look()


# ---- mbarriers ----------------------------------------------------------------------------------------------------------


def barrier_operand(cx: Code, where: Expr, span: Any, kind: str = "T.alloc_barrier") -> str:
    """The address of the words of the mbarrier that a call names. Raises cpu-unsupported for a computed pointer."""
    if not isinstance(where, AddressOf):
        raise unsupported(f"an mbarrier that is not an element of {kind}", span=span)
    return barrier_at(cx, where.buffer, where.indices[0])


def barrier_at(cx: Code, buffer: Buffer, index: Expr | int) -> str:
    """The address of the words of an mbarrier."""
    at = cx.f.mul(cx.index(index), str(BARRIER_WORDS))
    return cx.f.at(cx.base_of(buffer).base, "i64", at)


def _arrive(cx: Code, e: Call) -> str:
    """mbarrier_arrive, mbarrier_arrive_expect_tx and cp_async_mbarrier_arrive, by each thread that executes them."""
    warp_role_of(cx, f"{e.op} outside a kernel", e.span)
    if e.op == "cp_async_mbarrier_arrive" and not e.options.noinc:
        return "0"  # this arrival is added and counted at once
    bar = barrier_operand(cx, e.args[0], e.span)
    signal(cx.f, bar, "1", cx.index(e.args[1]) if e.op == "mbarrier_arrive_expect_tx" else "0")
    return "0"


def _expect(cx: Code, e: Call) -> str:
    warp_role_of(cx, f"{e.op} outside a kernel", e.span)
    add_word(cx.f, barrier_operand(cx, e.args[0], e.span), BYTES, cx.index(e.args[1]))
    return "0"


def _init(cx: Code, e: Call) -> str:
    warp_role_of(cx, f"{e.op} outside a kernel", e.span)
    init_barrier(cx.f, barrier_operand(cx, e.args[0], e.span), cx.index(e.args[1]))
    add_word(cx.f, "%group", PROGRESS, "1")
    return "0"


def _wait(cx: Code, e: Call) -> str:
    """Emit a wait for the end of the phase of that parity: a fresh barrier passes parity 1."""
    warp_role = warp_role_of(cx, f"{e.op} outside a kernel", e.span)
    f, bar, parity = cx.f, barrier_operand(cx, e.args[0], e.span), cx.index(e.args[1])

    def ready() -> str:
        odd = f.let(f"and i64 {f.let(f'xor i64 {get_word(f, bar, PHASE)}, {parity}')}, 1")
        return f.let(f"icmp ne i64 {odd}, 0")

    wait_until(f, warp_role.coroutine, ready)
    return "0"


# ---- barriers of threads, warp roles and blocks ---------------------------------------------------------------------------


def _warp_role_barrier(cx: Code, e: Call) -> str:
    assert e.options.key is not None, "split_warp_roles numbers the barriers"
    warp_role_barrier(cx, e.options.key, e.options.arriving, None)
    return "0"


def warp_role_barrier(cx: Code, number: int, arriving: int, action: Callable[[], None] | None) -> None:
    """`arriving` warp roles arrive, or (0) all of the block that have not ended; the last one runs the action."""
    warp_role = warp_role_of(cx, "a barrier of warp roles outside a kernel", None)
    if cx.block.tid is not None:
        raise unsupported("a barrier of the block under a condition or loop that depends on the thread", span=cx.span)
    f = cx.f
    arrive_and_wait(f, warp_role, "%state", WARP_ROLE_BARRIERS + 2 * number, "1",
                    lambda: str(arriving) if arriving else get_word(f, "%state", LIVE), action=action)


def _named(cx: Code, e: Call) -> str:
    named_barrier(cx, e, str(sum(-(-(hi - lo) // WARP) * WARP for lo, hi in cx.block.ranges)))
    return "0"


def named_barrier(cx: Code, e: Call, arrivals: str) -> None:
    """bar.sync and bar.arrive by `arrivals` threads: a warp counts as 32, however many it has (PTX ISA, "bar")."""
    warp_role = warp_role_of(cx, f"{e.op} outside a kernel", e.span)
    need_all_threads(cx, e.op, e.span)
    f = cx.f
    number = f.let(f"and i64 {cx.index(e.args[0])}, 15")
    base = f.at("%state", "i64", f.add(f.mul(number, "2"), str(NAMED)))
    need = cx.index(e.args[1])
    many = f.let(f"icmp sgt i64 {f.add(get_word(f, base, 0), arrivals)}, {need}")
    f.branch(many, lambda: f.do(f"store i64 {MANY}, ptr {word(f, '%group', FAULT)}"))
    arrive_and_wait(f, warp_role, base, 0, arrivals, lambda: need, waits=e.op == "named_barrier")


def _grid(cx: Code, e: Call) -> str:
    """The grid barrier: waits until all blocks have arrived."""
    warp_role = warp_role_of(cx, f"{e.op} outside a kernel", e.span)
    need_all_threads(cx, "sync_grid", e.span)
    arrive_and_wait(cx.f, warp_role, "%group", GRID, "1", lambda: get_word(cx.f, "%group", COROUTINES))
    return "0"


# Nothing is emitted where copies and MMAs complete when they are issued, and stores are visible in order.
_NO_WORK = ("fence_mbarrier_init", "fence_proxy_async", "fence_proxy_async_global", "wgmma_fence", "wgmma_commit",
            "wgmma_wait", "wgmma_pin", "wgmma_hold", "set_max_nreg", "bulk_commit", "bulk_wait", "prefetch_l2")

BARRIER_CALLS: dict[str, CallPrinter] = {
    "mbarrier_arrive": _arrive, "mbarrier_arrive_expect_tx": _arrive, "cp_async_mbarrier_arrive": _arrive,
    "mbarrier_expect_tx": _expect, "mbarrier_init": _init, "mbarrier_wait": _wait, "warp_role_barrier": _warp_role_barrier,
    "named_barrier": _named, "named_barrier_arrive": _named, "sync_grid": _grid,
    **{op: (lambda cx, e: "0") for op in _NO_WORK},
}  # fmt: skip
