"""The thread pool of the CPU target, written in LLVM IR, so that native code can call it.

    i32 tl_parallel_for(fn, context, count, arena_bytes)     0, or 1 when memory for an arena is missing
        fn(context, first, last, arena) over [0, count) in chunks, on the caller and the workers

Native code calls it without the interpreter, which is why it replaces Python threads (26-51 us per region) and a
pthread_create per region (34 us).  Workers spin for some tens of microseconds after a region, then sleep on a condition
variable.  The caller also takes chunks from the same atomic counter and waits only for workers that have joined, so that a
sleeping worker never delays a short region.  Measured on 2 cores: benchmarks/cpu_pool.py.

While one call runs, a call from another Python thread runs all of its blocks in its own thread, with its own arena.
After fork the child process starts its own workers (tl_pool_reset).
"""

from __future__ import annotations

from collections.abc import Callable

from .llvm_text import Writer

SPIN = 2000  # polls (about 20-60 us) before a worker sleeps

# Mutexes and condition variables are 64-byte cells, larger than the types of glibc and macOS, whose functions initialise them.
_CELLS = """
%slot = type { ptr, i64 }
@lock = internal global [8 x i64] zeroinitializer, align 64
@wake = internal global [8 x i64] zeroinitializer, align 64
@done = internal global [8 x i64] zeroinitializer, align 64
@busy = internal global i32 0, align 64
@next = internal global i64 0, align 64
@generation = internal global i32 0, align 64
@joined = internal global i32 0, align 64
@open = internal global i32 0, align 4
@sleepers = internal global i32 0, align 4
@ready = internal global i32 0, align 4
@wanted = internal global i32 0, align 4
@workers = internal global i32 0, align 4
@job_fn = internal global ptr null, align 8
@job_context = internal global ptr null, align 8
@job_count = internal global i64 0, align 8
@job_chunk = internal global i64 0, align 8
@job_bytes = internal global i64 0, align 8
@own = internal global %slot zeroinitializer, align 16
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_broadcast(ptr)
declare i32 @pthread_cond_signal(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
"""
_LOCK, _UNLOCK = "call i32 @pthread_mutex_lock(ptr @lock)", "call i32 @pthread_mutex_unlock(ptr @lock)"
_JOB = {"job_fn": "ptr", "job_context": "ptr", "job_count": "i64", "job_chunk": "i64", "job_bytes": "i64"}


def _add(w: Writer, cell: str, change: int, access: str = "") -> None:
    """Add to an i32 that the lock protects.  access: of a store that others see without it."""
    value = w.ins(f"add i32 {w.ins(f'load i32, ptr @{cell}')}, {change}")
    w.do(f"store atomic i32 {value}, ptr @{cell} {access}, align 64" if access else f"store i32 {value}, ptr @{cell}")


def _polled(w: Writer, pause: str, seen: Callable[[], str]) -> None:
    """Poll until `seen` writes a condition that holds, at most SPIN times."""
    polls = w.slot("i32")
    w.do(f"store i32 0, ptr {polls}")
    with w.loop() as leave:
        leave(seen())
        count = w.ins(f"add i32 {w.ins(f'load i32, ptr {polls}')}, 1")
        leave(w.ins(f"icmp sgt i32 {count}, {SPIN}"))
        w.do(f"store i32 {count}, ptr {polls}")
        w.do(pause)


def _reserve() -> str:
    """Makes a slot's arena hold `bytes`; false when there is no memory."""
    w = Writer()
    size = w.ins("getelementptr inbounds %slot, ptr %slot, i32 0, i32 1")
    with w.when(w.ins(f"icmp uge i64 {w.ins(f'load i64, ptr {size}')}, %bytes")):
        w.do("ret i1 true")
    w.do(f"call void @free(ptr {w.ins('load ptr, ptr %slot')})")
    whole = w.ins(f"and i64 {w.ins('add i64 %bytes, 4095')}, -4096")
    new = w.ins(f"call ptr @aligned_alloc(i64 4096, i64 {whole})")
    w.do(f"store ptr {new}, ptr %slot")
    there = w.ins(f"icmp ne ptr {new}, null")
    w.do(f"store i64 {w.ins(f'select i1 {there}, i64 {whole}, i64 0')}, ptr {size}")
    w.do(f"ret i1 {there}")
    return w.function("reserve", "ptr %slot, i64 %bytes", "internal ", "i1")


def _work() -> str:
    """Takes chunks of the open job until none is left."""
    w = Writer()
    with w.loop() as leave:
        first = w.ins("atomicrmw add ptr @next, i64 %chunk monotonic")
        leave(w.ins(f"icmp sge i64 {first}, %count"))
        end = w.ins(f"add i64 {first}, %chunk")
        last = w.ins(f"select i1 {w.ins(f'icmp sgt i64 {end}, %count')}, i64 %count, i64 {end}")
        w.do(f"call void %fn(ptr %context, i64 {first}, i64 {last}, ptr %arena)")
    w.do("ret void")
    return w.function("work", "ptr %fn, ptr %context, i64 %count, i64 %chunk, ptr %arena", "internal ", "void")


def _worker(pause: str) -> str:
    w = Writer()
    slot, seen = w.slot("%slot"), w.slot("i32")
    w.do(f"store %slot zeroinitializer, ptr {slot}")
    w.do(f"store i32 0, ptr {seen}")
    with w.loop():
        old = w.ins(f"load i32, ptr {seen}")
        _polled(w, pause, lambda: w.ins(f"icmp ne i32 {w.ins('load atomic i32, ptr @generation acquire, align 64')}, {old}"))
        w.do(_LOCK)
        with w.loop() as leave:
            now = w.ins("load i32, ptr @generation")
            w.do(f"store i32 {now}, ptr {seen}")
            leave(w.ins(f"icmp ne i32 {now}, {old}"))
            _add(w, "sleepers", 1)
            w.do("call i32 @pthread_cond_wait(ptr @wake, ptr @lock)")
            _add(w, "sleepers", -1)
        with w.when(w.ins(f"icmp ne i32 {w.ins('load i32, ptr @open')}, 0")):
            _add(w, "joined", 1, "monotonic")
            fn, context, count, chunk, size = (w.ins(f"load {ty}, ptr @{cell}") for cell, ty in _JOB.items())
            w.do(_UNLOCK)
            with w.when(w.ins(f"call i1 @reserve(ptr {slot}, i64 {size})")):
                arena = w.ins(f"load ptr, ptr {slot}")
                w.do(f"call void @work(ptr {fn}, ptr {context}, i64 {count}, i64 {chunk}, ptr {arena})")
            w.do(_LOCK)
            _add(w, "joined", -1, "release")
            w.do("call i32 @pthread_cond_signal(ptr @done)")
        w.do(_UNLOCK)
    w.do("unreachable")
    return w.function("worker", "ptr %unused", "internal ", "ptr")


def _start() -> str:
    """Starts the workers that are wanted and not there.  Called with @busy held."""
    w = Writer()
    thread = w.slot("i64")
    with w.when(w.ins(f"icmp eq i32 {w.ins('load i32, ptr @ready')}, 0")):
        for name, cell in (("mutex", "lock"), ("cond", "wake"), ("cond", "done")):
            w.do(f"call i32 @pthread_{name}_init(ptr @{cell}, ptr null)")
        w.do("store i32 1, ptr @ready")
    with w.loop() as leave:
        there = w.ins("load i32, ptr @workers")
        leave(w.ins(f"icmp sge i32 {there}, {w.ins('load i32, ptr @wanted')}"))
        rc = w.ins(f"call i32 @pthread_create(ptr {thread}, ptr null, ptr @worker, ptr null)")
        with w.when(w.ins(f"icmp ne i32 {rc}, 0")):
            w.do(f"store i32 {there}, ptr @wanted")
            w.do("ret void")
        w.do(f"call i32 @pthread_detach(i64 {w.ins(f'load i64, ptr {thread}')})")
        _add(w, "workers", 1)
    w.do("ret void")
    return w.function("start", "", "internal ", "void")


def _want() -> str:
    w = Writer()
    w.do("store atomic i32 %workers, ptr @wanted monotonic, align 4")
    w.do("ret void")
    return w.function("tl_pool_want", "i32 %workers", result="void")


def _reset() -> str:
    """In the child of a fork: no worker survived, and locks may be held by threads that are gone."""
    w = Writer()
    for cell in ("ready", "workers", "open", "joined", "sleepers", "generation"):
        w.do(f"store i32 0, ptr @{cell}")
    w.do("store atomic i32 0, ptr @busy release, align 64")
    w.do("ret void")
    return w.function("tl_pool_reset", "", result="void")


def _alone() -> str:
    """Runs a job without the pool."""
    w = Writer()
    slot = w.slot("%slot")
    w.do(f"store %slot zeroinitializer, ptr {slot}")
    with w.when(w.ins(f"call i1 @reserve(ptr {slot}, i64 %bytes)"), unless=True):
        w.do("ret i32 1")
    arena = w.ins(f"load ptr, ptr {slot}")
    w.do(f"call void %fn(ptr %context, i64 0, i64 %count, ptr {arena})")
    w.do(f"call void @free(ptr {arena})")
    w.do("ret i32 0")
    return w.function("alone", "ptr %fn, ptr %context, i64 %count, i64 %bytes", "internal ")


def _parallel_for(pause: str) -> str:
    w = Writer()

    def finish(rc: int) -> None:
        w.do("store atomic i32 0, ptr @busy release, align 64")
        w.do(f"ret i32 {rc}")

    with w.when(w.ins("icmp sgt i64 %count, 0"), unless=True):
        w.do("ret i32 0")
    size = w.ins("add i64 %bytes, 64")
    taken = w.ins("cmpxchg ptr @busy, i32 0, i32 1 acquire monotonic")
    with w.when(w.ins(f"extractvalue {{ i32, i1 }} {taken}, 1"), unless=True):
        w.do(f"ret i32 {w.ins(f'call i32 @alone(ptr %fn, ptr %context, i64 %count, i64 {size})')}")
    with w.when(w.ins(f"call i1 @reserve(ptr @own, i64 {size})"), unless=True):
        finish(1)
    arena, workers = w.ins("load ptr, ptr @own"), w.slot("i32")
    w.do(f"store i32 0, ptr {workers}")
    with w.when(w.ins("icmp eq i64 %count, 1"), unless=True):
        w.do("call void @start()")
        w.do(f"store i32 {w.ins('load i32, ptr @workers')}, ptr {workers}")
    helpers = w.ins(f"load i32, ptr {workers}")
    with w.when(w.ins(f"icmp eq i32 {helpers}, 0")):
        w.do(f"call void %fn(ptr %context, i64 0, i64 %count, ptr {arena})")
        finish(0)
    threads = w.ins(f"add i32 {helpers}, 1")
    pieces = w.ins(f"mul i32 {threads}, 32")
    each = w.ins(f"udiv i64 %count, {w.ins(f'zext i32 {pieces} to i64')}")
    chunk = w.ins(f"select i1 {w.ins(f'icmp eq i64 {each}, 0')}, i64 1, i64 {each}")
    w.do(_LOCK)
    for (cell, ty), value in zip(_JOB.items(), ("%fn", "%context", "%count", chunk, size)):
        w.do(f"store {ty} {value}, ptr @{cell}")
    w.do("store atomic i64 0, ptr @next monotonic, align 64")
    w.do("store i32 1, ptr @open")
    _add(w, "generation", 1, "release")
    with w.when(w.ins(f"icmp ne i32 {w.ins('load i32, ptr @sleepers')}, 0")):
        w.do("call i32 @pthread_cond_broadcast(ptr @wake)")
    w.do(_UNLOCK)
    w.do(f"call void @work(ptr %fn, ptr %context, i64 %count, i64 {chunk}, ptr {arena})")
    w.do(_LOCK)
    w.do("store i32 0, ptr @open")
    w.do(_UNLOCK)

    def all_left() -> str:
        return w.ins(f"icmp eq i32 {w.ins('load atomic i32, ptr @joined acquire, align 64')}, 0")

    _polled(w, pause, all_left)
    with w.when(all_left(), unless=True):
        w.do(_LOCK)
        with w.loop() as leave:
            leave(all_left())
            w.do("call i32 @pthread_cond_wait(ptr @done, ptr @lock)")
        w.do(_UNLOCK)
    finish(0)
    return w.function("tl_parallel_for", "ptr %fn, ptr %context, i64 %count, i64 %bytes")


def pool_ir(is_x86: bool) -> str:
    """The LLVM IR module of the pool, as text."""
    pause = "call void @llvm.x86.sse2.pause()" if is_x86 else "fence seq_cst"
    declared = "declare void @llvm.x86.sse2.pause()\n" if is_x86 else ""
    return "\n".join([_CELLS + declared, _reserve(), _work(), _worker(pause), _start(), _want(), _reset(), _alone(),
                      _parallel_for(pause)])
