"""Coroutines of warp roles, and the state that the coroutines of a group share.

Each warp role of each block is a coroutine. One CPU thread resumes those of a group (a block; the blocks of a cluster; all
blocks, where they meet at a grid barrier) in rotation until all have ended. A coroutine suspends where it has to wait, and
tests the condition again when it is resumed. A rotation in which no coroutine makes progress is a deadlock, which the call
reports.

    group state:  progress, fault (a number of FAILURES or of a misuse), barrier of the grid (arrived, generation), coroutines,
                  coroutines that there was no memory for
    block state:  live warp roles, named barriers (arrived, generation), barrier of the cluster (in its first block), barriers
                  of the warp roles (arrived, generation)
    mbarrier:     count, pending arrivals, expected bytes, phase

Copies and MMAs are complete when they are issued, so a barrier that counts the bytes of a copy counts them at once.
"""

from __future__ import annotations

from collections.abc import Callable

from .text import Fn, Module

PROGRESS, FAULT, GRID, COROUTINES, MISSING, GROUP_WORDS = 0, 1, 2, 4, 5, 8
LIVE, NAMED, CLUSTER, WARP_ROLE_BARRIERS = 0, 1, 33, 35
COUNT, PENDING, BYTES, PHASE = range(4)
DEADLOCK = "the threads of a block wait for each other for ever: check parities and counts of the barriers"
MEMORY = "out of memory for the warp roles of a block"
OVERRUN = "more threads arrive at a barrier than its count: it is the number of threads that arrive in one phase"

STUCK, MANY, NO_MEMORY = 1, 2, 3
FAILURES = ((STUCK, DEADLOCK), (MANY, OVERRUN), (NO_MEMORY, MEMORY))
FIRST_MISUSE = 16  # failure numbers from here on are a program's misuses of descriptors (descriptors.py)


# ---- the coroutine ----------------------------------------------------------------------------------------------------


class Coroutine:
    """The frame around the body of a warp role.  f: a function `ptr f(…)` with attribute presplitcoroutine."""

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
        """Suspend the coroutine; the code behind runs when it is resumed."""
        f = self.f
        answer, again = f.let("call i8 @llvm.coro.suspend(token none, i1 false)"), f.name_of("resumed")
        f.end(f"switch i8 {answer}, label %coro_out [i8 0, label %{again} i8 1, label %coro_free]")
        f.start(again)

    def done(self) -> None:
        """End the warp role."""
        self.f.br("coro_final")

    def finish(self) -> None:
        """Close the function."""
        f = self.f
        if not f.ended:
            self.done()
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
    """The address of a word of a state."""
    return f.at(base, "i64", str(k))


def get_word(f: Fn, base: str, k: int | str) -> str:
    """The value of a word of a state."""
    return f.let(f"load i64, ptr {word(f, base, k)}")


def add_word(f: Fn, base: str, k: int | str, n: str) -> str:
    """Add n to a word of a state; returns its new value."""
    at = word(f, base, k)
    new = f.let(f"add i64 {f.let(f'load i64, ptr {at}')}, {n}")
    f.do(f"store i64 {new}, ptr {at}")
    return new


# ---- mbarriers ----------------------------------------------------------------------------------------------------------


def init_barrier(f: Fn, bar: str, count: str) -> None:
    """Set up an mbarrier in phase 0 with `count` arrivals."""
    for k, v in ((COUNT, count), (PENDING, count), (BYTES, "0"), (PHASE, "0")):
        f.do(f"store i64 {v}, ptr {word(f, bar, k)}")


def signal(f: Fn, bar: str, n: str, nbytes: str) -> None:
    """Add n arrivals to an mbarrier, and nbytes to its expected bytes (fewer, where negative)."""
    name = f.module.need("tl_barrier_arrive", lambda: _arrive(f.module))
    f.do(f"call void @{name}(ptr {bar}, i64 {n}, i64 {nbytes}, ptr %group)")


def _arrive(m: Module) -> str:
    """The function that does so: the phase ends with the last arrival and the last byte."""
    f = Fn(m, "tl_barrier_arrive", "void", [("ptr", "bar", ""), ("i64", "n", ""), ("i64", "bytes", ""), ("ptr", "group", "")])
    left, missing = add_word(f, "%bar", PENDING, f.sub("0", "%n")), add_word(f, "%bar", BYTES, "%bytes")
    f.branch(f.less(left, "0"), lambda: f.do(f"store i64 {MANY}, ptr {word(f, '%group', FAULT)}"))
    add_word(f, "%group", PROGRESS, "1")

    def end_phase() -> None:
        f.do(f"store i64 {get_word(f, '%bar', COUNT)}, ptr {word(f, '%bar', PENDING)}")
        add_word(f, "%bar", PHASE, "1")

    f.branch(f.let(f"icmp eq i64 {f.let(f'or i64 {left}, {missing}')}, 0"), end_phase)
    f.end("ret void")
    f.finish()
    return m.entries[f.name]


# ---- the group ----------------------------------------------------------------------------------------------------------


def run_group(f: Fn, group: str, blocks: str, handle: Callable[[str, int], str], warp_roles: int, failed: str) -> None:
    """Resume the coroutines of a group until all have ended, then free them.

    handle(block, warp role): address of a coroutine's handle, null where memory was missing. failed: address of an i32, which
    is set to the number of a failure of FAILURES or of a misuse.
    """
    m: Module = f.module
    resume = m.declare("llvm.coro.resume", "void", "ptr")
    over = m.declare("llvm.coro.done", "i1", "ptr")
    destroy = m.declare("llvm.coro.destroy", "void", "ptr")
    again, more, out = f.name_of("round"), f.name_of("more"), f.name_of("over")
    open_ = f.alloca("i64", hint="open")

    def each(action: Callable[[str], None]) -> None:
        with f.loop("0", blocks, hint="actor") as b:
            for r in range(warp_roles):
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
