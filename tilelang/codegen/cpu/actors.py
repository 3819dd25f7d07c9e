"""Parts of a launch that wait for each other: roles of warp groups, blocks that meet at a grid barrier.

Each role of each block is a coroutine.  One CPU thread resumes those of a group (a block; all blocks, where they meet)
in turn until all are done.  A coroutine leaves where it has to wait and looks again when it is resumed; a round in which
nobody got on is a deadlock, which the call reports.

    group state:  progress, fault (a number of FAILURES or of a misuse), barrier of the grid (come, generation), actors,
                  coroutines that there was no memory for
    block state:  live roles, named barriers (come, generation), barrier of the cluster (in its first block), meetings of
                  the roles (come, generation)
    mbarrier:     count, pending arrivals, expected bytes, phase

Copies and products are complete when they are issued, so a barrier that counts the bytes of a copy has them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import AddressOf, Call, Expr

from .text import Fn, Module
from .types import unsupported

WARP = 32
PROGRESS, FAULT, GRID, ACTORS, MISSING, GROUP_WORDS = 0, 1, 2, 4, 5, 8
LIVE, NAMED, CLUSTER, MEETINGS = 0, 1, 33, 35
BARRIER_WORDS = 4
COUNT, PENDING, BYTES, PHASE = range(4)
DEADLOCK = "the threads of a block wait for each other for ever: check parities and counts of the barriers"
MEMORY = "out of memory for the roles of a block"
OVERRUN = "more threads arrive at a barrier than its count: it is the number of threads that arrive in one phase"

STUCK, MANY, NO_MEMORY = 1, 2, 3
FAILURES = ((STUCK, DEADLOCK), (MANY, OVERRUN), (NO_MEMORY, MEMORY))  # further numbers: what a program misuses (descriptors.py)

_ARRIVE = """define internal void @tl_barrier_arrive(ptr %bar, i64 %n, i64 %bytes, ptr %group) {
entry:
  %pending.p = getelementptr inbounds i64, ptr %bar, i64 1
  %tx.p = getelementptr inbounds i64, ptr %bar, i64 2
  %phase.p = getelementptr inbounds i64, ptr %bar, i64 3
  %pending = load i64, ptr %pending.p
  %left = sub i64 %pending, %n
  store i64 %left, ptr %pending.p
  %tx = load i64, ptr %tx.p
  %open = add i64 %tx, %bytes
  store i64 %open, ptr %tx.p
  %over = icmp slt i64 %left, 0
  br i1 %over, label %bad, label %good
bad:
  %fault.p = getelementptr inbounds i64, ptr %group, i64 1
  store i64 2, ptr %fault.p ; MANY
  br label %good
good:
  %steps = load i64, ptr %group
  %more = add i64 %steps, 1
  store i64 %more, ptr %group
  %missing = or i64 %left, %open
  %over2 = icmp eq i64 %missing, 0
  br i1 %over2, label %next, label %out
next:
  %count = load i64, ptr %bar
  store i64 %count, ptr %pending.p
  %phase = load i64, ptr %phase.p
  %turned = add i64 %phase, 1
  store i64 %turned, ptr %phase.p
  br label %out
out:
  ret void
}"""


# ---- the coroutine ----------------------------------------------------------------------------------------------------


class Coroutine:
    """The frame around the body of a role.  f: a function `ptr f(…)` with attribute presplitcoroutine."""

    def __init__(self, f: Fn) -> None:
        self.f = f
        m = f.module
        for name, ret, params in (
                ("id", "token", "i32, ptr, ptr, ptr"), ("size.i64", "i64", ""), ("begin", "ptr", "token, ptr"),
                ("suspend", "i8", "token, i1"), ("free", "ptr", "token, ptr"), ("end", "void", "ptr, i1, token")):
            m.declare(f"llvm.coro.{name}", ret, params)
        make = m.declare("aligned_alloc", "ptr", "i64, i64")
        f.do("%coro_id = call token @llvm.coro.id(i32 64, ptr null, ptr null, ptr null)")
        size = f.let("call i64 @llvm.coro.size.i64()")
        padded = f.let(f"and i64 {f.let(f'add i64 {size}, 63')}, -64")
        f.do(f"%coro_memory = call ptr {make}(i64 64, i64 {padded})")
        f.end(f"br i1 {f.let('icmp eq ptr %coro_memory, null')}, label %coro_none, label %coro_some")
        f.start("coro_none")
        f.end("ret ptr null")
        f.start("coro_some")
        f.do("%coro_handle = call ptr @llvm.coro.begin(token %coro_id, ptr %coro_memory)")
        self.suspend()

    def suspend(self) -> None:
        """Leave; what follows runs when the coroutine is resumed."""
        f = self.f
        answer, again = f.let("call i8 @llvm.coro.suspend(token none, i1 false)"), f.name_of("resumed")
        f.end(f"switch i8 {answer}, label %coro_out [i8 0, label %{again} i8 1, label %coro_free]")
        f.start(again)

    def leave(self) -> None:
        """The role is done."""
        self.f.br("coro_final")

    def finish(self) -> None:
        """Close the function."""
        f = self.f
        if not f.ended:
            self.leave()
        f.start("coro_final")
        add_word(f, "%state", LIVE, "-1")
        add_word(f, "%group", PROGRESS, "1")
        answer = f.let("call i8 @llvm.coro.suspend(token none, i1 true)")
        f.end(f"switch i8 {answer}, label %coro_out [i8 0, label %coro_never i8 1, label %coro_free]")
        f.start("coro_never")
        f.end("unreachable")
        f.start("coro_free")
        memory = f.let("call ptr @llvm.coro.free(token %coro_id, ptr %coro_handle)")
        f.do(f"call void {f.module.declare('free', 'void', 'ptr')}(ptr {memory})")
        f.br("coro_out")
        f.start("coro_out")
        f.do("call void @llvm.coro.end(ptr %coro_handle, i1 false, token none)")
        f.end("ret ptr %coro_handle")
        f.finish()


def word(f: Fn, base: str, k: int | str) -> str:
    """Address of a word of a state."""
    return f.at(base, "i64", str(k))


def get_word(f: Fn, base: str, k: int | str) -> str:
    """A word of a state."""
    return f.let(f"load i64, ptr {word(f, base, k)}")


def add_word(f: Fn, base: str, k: int | str, n: str) -> str:
    """Add n to a word of a state; its new value."""
    at = word(f, base, k)
    new = f.let(f"add i64 {f.let(f'load i64, ptr {at}')}, {n}")
    f.do(f"store i64 {new}, ptr {at}")
    return new


# ---- waiting ------------------------------------------------------------------------------------------------------------


def wait_until(cx: Any, ready: Callable[[], str]) -> None:
    """Go on once ready() holds."""
    f = cx.f
    again, stay, passed = f.name_of("wait"), f.name_of("stay"), f.name_of("passed")
    f.start(again)
    ok = ready()
    f.end(f"br i1 {ok}, label %{passed}, label %{stay}")
    f.start(stay)
    cx.coroutine.suspend()
    f.br(again)
    f.start(passed)
    add_word(f, "%group", PROGRESS, "1")


def meet(cx: Any, base: str, k: int, come: str, need: Callable[[], str], waits: bool = True,
         action: Callable[[], None] | None = None) -> None:
    """`come` more are at the barrier in words k and k + 1 of a state; once need() are, its generation changes.

    action: done by the one that finds all there.
    """
    f = cx.f
    before = get_word(f, base, k + 1)
    add_word(f, base, k, come)
    add_word(f, "%group", PROGRESS, "1")
    over = f.alloca("i1", hint="over")

    def look() -> str:
        def turn() -> None:
            if action is not None:
                action()
            f.do(f"store i64 0, ptr {word(f, base, k)}")
            add_word(f, base, k + 1, "1")

        f.do(f"store i1 true, ptr {over}")
        same = f.let(f"icmp eq i64 {get_word(f, base, k + 1)}, {before}")

        def still() -> None:
            here = f.let(f"icmp sge i64 {get_word(f, base, k)}, {need()}")
            f.branch(here, turn, lambda: f.do(f"store i1 false, ptr {over}"))

        f.branch(same, still)
        return f.let(f"load i1, ptr {over}")

    if waits:
        wait_until(cx, look)
    else:
        look()


# ---- calls --------------------------------------------------------------------------------------------------------------


def _barrier(cx: Any, where: Expr, span: Any) -> str:
    if not isinstance(where, AddressOf):
        raise unsupported("an mbarrier that is not an element of T.alloc_barrier", span=span)
    return barrier_at(cx, where.buffer, where.indices[0])


def barrier_at(cx: Any, buffer: Any, index: Any) -> str:
    """Address of an mbarrier's words."""
    at = cx.f.mul(cx.index(index), str(BARRIER_WORDS))
    return str(cx.f.at(cx.base_of(buffer).base, "i64", at))


def _need_coroutine(cx: Any, e: Call) -> None:
    if cx.coroutine is None:
        raise unsupported(f"{e.op} outside a kernel", span=e.span or cx.span)


def signal(cx: Any, bar: str, n: str, nbytes: str) -> None:
    """n arrivals at a barrier, nbytes more to come (fewer, where negative)."""
    name = cx.f.module.need("tl_barrier_arrive", _ARRIVE)
    cx.f.do(f"call void @{name}(ptr {bar}, i64 {n}, i64 {nbytes}, ptr %group)")


def _arrive(cx: Any, e: Call) -> str:
    """mbarrier_arrive, mbarrier_arrive_expect_tx, cp_async_mbarrier_arrive, by each thread that executes it."""
    _need_coroutine(cx, e)
    if e.op == "cp_async_mbarrier_arrive" and not e.options.noinc:
        return "0"  # counted and uncounted at once
    bar = _barrier(cx, e.args[0], e.span)
    signal(cx, bar, "1", cx.index(e.args[1]) if e.op == "mbarrier_arrive_expect_tx" else "0")
    return "0"


def _expect(cx: Any, e: Call) -> str:
    _need_coroutine(cx, e)
    add_word(cx.f, _barrier(cx, e.args[0], e.span), BYTES, cx.index(e.args[1]))
    return "0"


def _init(cx: Any, e: Call) -> str:
    _need_coroutine(cx, e)
    init_barrier(cx.f, _barrier(cx, e.args[0], e.span), cx.index(e.args[1]))
    add_word(cx.f, "%group", PROGRESS, "1")
    return "0"


def init_barrier(f: Fn, bar: str, count: str) -> None:
    """An mbarrier in phase 0 that takes `count` arrivals."""
    for k, v in ((COUNT, count), (PENDING, count), (BYTES, "0"), (PHASE, "0")):
        f.do(f"store i64 {v}, ptr {word(f, bar, k)}")


def _wait(cx: Any, e: Call) -> str:
    """Returns when the phase of that parity has completed: a fresh barrier passes parity 1."""
    _need_coroutine(cx, e)
    f, bar, parity = cx.f, _barrier(cx, e.args[0], e.span), cx.index(e.args[1])

    def ready() -> str:
        odd = f.let(f"and i64 {f.let(f'xor i64 {get_word(f, bar, PHASE)}, {parity}')}, 1")
        return str(f.let(f"icmp ne i64 {odd}, 0"))

    wait_until(cx, ready)
    return "0"


def _role_meet(cx: Any, e: Call) -> str:
    together(cx, int(e.options.key), None)
    return "0"


def together(cx: Any, key: int, action: Callable[[], None] | None) -> None:
    """All roles that are left come; the last acts."""
    if cx.tid is not None:
        raise unsupported("a barrier of the block under a condition or loop that depends on the thread", span=cx.span)
    meet(cx, "%state", MEETINGS + 2 * key, "1", lambda: get_word(cx.f, "%state", LIVE), action=action)


def _named(cx: Any, e: Call) -> str:
    named_barrier(cx, e, str(sum(-(-(hi - lo) // WARP) * WARP for lo, hi in cx.role.ranges)))
    return "0"


def named_barrier(cx: Any, e: Call, come: str) -> None:
    """bar.sync and bar.arrive by `come` threads: a warp counts as 32, however many it has (PTX ISA, "bar")."""
    _need_coroutine(cx, e)
    if cx.tid is not None:
        raise unsupported(f"{e.op} under a condition or loop that depends on the thread", span=e.span or cx.span,
                          hint="move the barrier out of the thread-dependent branch")
    f = cx.f
    number = f.let(f"and i64 {cx.index(e.args[0])}, 15")
    base = f.at("%state", "i64", f.add(f.mul(number, "2"), str(NAMED)))
    need = cx.index(e.args[1])
    many = f.let(f"icmp sgt i64 {f.add(get_word(f, base, 0), come)}, {need}")
    f.branch(many, lambda: f.do(f"store i64 {MANY}, ptr {word(f, '%group', FAULT)}"))
    meet(cx, base, 0, come, lambda: need, waits=e.op == "named_barrier")


def _grid(cx: Any, e: Call) -> str:
    """All blocks come."""
    _need_coroutine(cx, e)
    if cx.tid is not None:
        raise unsupported("sync_grid under a condition or loop that depends on the thread", span=e.span or cx.span,
                          hint="move the barrier out of the thread-dependent branch")
    meet(cx, "%group", GRID, "1", lambda: get_word(cx.f, "%group", ACTORS))
    return "0"


# Nothing to do where copies and products are complete when they are issued and stores are seen in order.
_NOTHING = ("fence_mbarrier_init", "fence_proxy_async", "fence_proxy_async_global", "wgmma_fence", "wgmma_commit",
            "wgmma_wait", "wgmma_pin", "wgmma_hold", "set_max_nreg", "bulk_commit", "bulk_wait")

ACTOR_EFFECTS: dict[str, Callable[[Any, Call], str]] = {
    "mbarrier_arrive": _arrive, "mbarrier_arrive_expect_tx": _arrive, "cp_async_mbarrier_arrive": _arrive,
    "mbarrier_expect_tx": _expect, "mbarrier_init": _init, "mbarrier_wait": _wait, "role_meet": _role_meet,
    "named_barrier": _named, "named_barrier_arrive": _named, "sync_grid": _grid,
    **{op: (lambda cx, e: "0") for op in _NOTHING},
}  # fmt: skip


# ---- the group ----------------------------------------------------------------------------------------------------------


def run_group(f: Fn, group: str, blocks: str, handle: Callable[[str, int], str], roles: int, failed: str) -> None:
    """Resume the coroutines of a group until all are done, then free them.

    handle(block, role): address of a coroutine's handle, null where there was no memory for it.  failed: address of an i32,
    made the number of a failure of FAILURES, or that of a misuse.
    """
    m: Module = f.module
    resume = m.declare("llvm.coro.resume", "void", "ptr")
    over = m.declare("llvm.coro.done", "i1", "ptr")
    destroy = m.declare("llvm.coro.destroy", "void", "ptr")
    again, more, out = f.name_of("round"), f.name_of("more"), f.name_of("over")
    open_ = f.alloca("i64", hint="open")

    def each(action: Callable[[str], None]) -> None:
        with f.loop("0", blocks, hint="actor") as b:
            for r in range(roles):
                h = f.let(f"load ptr, ptr {handle(b, r)}")
                f.branch(f.let(f"icmp ne ptr {h}, null"), lambda h=h: action(h))  # type: ignore[misc]

    def go(h: str) -> None:
        def step() -> None:
            f.do(f"call void {resume}(ptr {h})")
            add_word(f, open_, 0, "1")

        f.branch(f.let(f"call i1 {over}(ptr {h})"), lambda: None, step)

    f.start(again)
    before = get_word(f, group, PROGRESS)
    f.do(f"store i64 0, ptr {open_}")
    each(go)
    f.end(f"br i1 {f.let(f'icmp eq i64 {get_word(f, open_, 0)}, 0')}, label %{out}, label %{more}")
    f.start(more)
    stuck = f.let(f"icmp eq i64 {get_word(f, group, PROGRESS)}, {before}")
    faulty = f.let(f"icmp ne i64 {get_word(f, group, FAULT)}, 0")
    bad, end = f.let(f"or i1 {stuck}, {faulty}"), f.name_of("stuck")
    f.end(f"br i1 {bad}, label %{end}, label %{again}")
    f.start(end)
    f.do(f"store i32 {STUCK}, ptr {failed}")
    f.br(out)
    f.start(out)
    fault = get_word(f, group, FAULT)
    f.branch(f.let(f"icmp ne i64 {fault}, 0"), lambda: f.do(f"store i32 {f.let(f'trunc i64 {fault} to i32')}, ptr {failed}"))
    lacking = f.let(f"icmp ne i64 {get_word(f, group, MISSING)}, 0")
    f.branch(lacking, lambda: f.do(f"store i32 {NO_MEMORY}, ptr {failed}"))
    each(lambda h: f.do(f"call void {destroy}(ptr {h})"))


__all__ = ["ACTOR_EFFECTS", "FAILURES", "FAULT", "Coroutine", "add_word", "barrier_at", "get_word", "init_barrier",
           "named_barrier", "run_group", "signal", "together", "wait_until", "word"]
