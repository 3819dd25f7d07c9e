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

SPIN = 2000  # polls (about 20-60 us) before a worker sleeps

# Mutexes and condition variables are 64-byte cells, larger than the types of glibc and macOS, whose functions initialise them.
_TEMPLATE = """
%slot = type {{ ptr, i64 }}
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
{pause_declaration}

; Make a slot's arena hold `bytes`; false when there is no memory.
define internal i1 @reserve(ptr %slot, i64 %bytes) {{
entry:
  %size.p = getelementptr inbounds %slot, ptr %slot, i32 0, i32 1
  %size = load i64, ptr %size.p
  %enough = icmp uge i64 %size, %bytes
  br i1 %enough, label %good, label %grow
grow:
  %old = load ptr, ptr %slot
  call void @free(ptr %old)
  %up = add i64 %bytes, 4095
  %round = and i64 %up, -4096
  %new = call ptr @aligned_alloc(i64 4096, i64 %round)
  store ptr %new, ptr %slot
  %none = icmp eq ptr %new, null
  %got = select i1 %none, i64 0, i64 %round
  store i64 %got, ptr %size.p
  br i1 %none, label %bad, label %good
good:
  ret i1 true
bad:
  ret i1 false
}}

; Take chunks of the open job until none is left.
define internal void @work(ptr %fn, ptr %context, i64 %count, i64 %chunk, ptr %arena) {{
entry:
  br label %take
take:
  %first = atomicrmw add ptr @next, i64 %chunk monotonic
  %some = icmp slt i64 %first, %count
  br i1 %some, label %run, label %out
run:
  %end = add i64 %first, %chunk
  %over = icmp sgt i64 %end, %count
  %last = select i1 %over, i64 %count, i64 %end
  call void %fn(ptr %context, i64 %first, i64 %last, ptr %arena)
  br label %take
out:
  ret void
}}

define internal ptr @worker(ptr %unused) {{
entry:
  %slot = alloca %slot, align 16
  store %slot zeroinitializer, ptr %slot
  br label %again
again:
  %seen = phi i32 [ 0, %entry ], [ %now, %missed ], [ %now, %leave ]
  br label %spin
spin:
  %k = phi i32 [ 0, %again ], [ %k2, %pausing ]
  %g = load atomic i32, ptr @generation acquire, align 64
  %fresh = icmp ne i32 %g, %seen
  br i1 %fresh, label %enter, label %still
still:
  %k2 = add i32 %k, 1
  %tired = icmp sgt i32 %k2, {spin}
  br i1 %tired, label %enter, label %pausing
pausing:
  {pause}
  br label %spin
enter:
  call i32 @pthread_mutex_lock(ptr @lock)
  br label %check
check:
  %now = load i32, ptr @generation
  %same = icmp eq i32 %now, %seen
  br i1 %same, label %sleep, label %awake
sleep:
  %s0 = load i32, ptr @sleepers
  %s1 = add i32 %s0, 1
  store i32 %s1, ptr @sleepers
  call i32 @pthread_cond_wait(ptr @wake, ptr @lock)
  %s2 = load i32, ptr @sleepers
  %s3 = sub i32 %s2, 1
  store i32 %s3, ptr @sleepers
  br label %check
awake:
  %isopen = load i32, ptr @open
  %live = icmp ne i32 %isopen, 0
  br i1 %live, label %join, label %missed
missed:
  call i32 @pthread_mutex_unlock(ptr @lock)
  br label %again
join:
  %j0 = load i32, ptr @joined
  %j1 = add i32 %j0, 1
  store atomic i32 %j1, ptr @joined monotonic, align 64
  %fn = load ptr, ptr @job_fn
  %context = load ptr, ptr @job_context
  %count = load i64, ptr @job_count
  %chunk = load i64, ptr @job_chunk
  %bytes = load i64, ptr @job_bytes
  call i32 @pthread_mutex_unlock(ptr @lock)
  %have = call i1 @reserve(ptr %slot, i64 %bytes)
  br i1 %have, label %do, label %leave
do:
  %arena = load ptr, ptr %slot
  call void @work(ptr %fn, ptr %context, i64 %count, i64 %chunk, ptr %arena)
  br label %leave
leave:
  call i32 @pthread_mutex_lock(ptr @lock)
  %l0 = load i32, ptr @joined
  %l1 = sub i32 %l0, 1
  store atomic i32 %l1, ptr @joined release, align 64
  call i32 @pthread_cond_signal(ptr @done)
  call i32 @pthread_mutex_unlock(ptr @lock)
  br label %again
}}

; Start the workers that are wanted and not there.  Called with @busy held.
define internal void @start() {{
entry:
  %thread = alloca i64
  %r = load i32, ptr @ready
  %is = icmp ne i32 %r, 0
  br i1 %is, label %loop, label %init
init:
  call i32 @pthread_mutex_init(ptr @lock, ptr null)
  call i32 @pthread_cond_init(ptr @wake, ptr null)
  call i32 @pthread_cond_init(ptr @done, ptr null)
  store i32 1, ptr @ready
  br label %loop
loop:
  %w = load i32, ptr @workers
  %n = load i32, ptr @wanted
  %more = icmp slt i32 %w, %n
  br i1 %more, label %make, label %out
make:
  %e = call i32 @pthread_create(ptr %thread, ptr null, ptr @worker, ptr null)
  %ok = icmp eq i32 %e, 0
  br i1 %ok, label %made, label %few
made:
  %t = load i64, ptr %thread
  call i32 @pthread_detach(i64 %t)
  %w1 = add i32 %w, 1
  store i32 %w1, ptr @workers
  br label %loop
few:
  store i32 %w, ptr @wanted
  br label %out
out:
  ret void
}}

define void @tl_pool_want(i32 %workers) {{
  store atomic i32 %workers, ptr @wanted monotonic, align 4
  ret void
}}

; In the child of a fork: no worker survived, and locks may be held by threads that are gone.
define void @tl_pool_reset() {{
  store i32 0, ptr @ready
  store i32 0, ptr @workers
  store i32 0, ptr @open
  store i32 0, ptr @joined
  store i32 0, ptr @sleepers
  store i32 0, ptr @generation
  store atomic i32 0, ptr @busy release, align 64
  ret void
}}

define internal i32 @alone(ptr %fn, ptr %context, i64 %count, i64 %bytes) {{
entry:
  %slot = alloca %slot, align 16
  store %slot zeroinitializer, ptr %slot
  %have = call i1 @reserve(ptr %slot, i64 %bytes)
  br i1 %have, label %do, label %bad
do:
  %arena = load ptr, ptr %slot
  call void %fn(ptr %context, i64 0, i64 %count, ptr %arena)
  call void @free(ptr %arena)
  ret i32 0
bad:
  ret i32 1
}}

define i32 @tl_parallel_for(ptr %fn, ptr %context, i64 %count, i64 %bytes0) {{
entry:
  %some = icmp sgt i64 %count, 0
  br i1 %some, label %try, label %nothing
nothing:
  ret i32 0
try:
  %bytes = add i64 %bytes0, 64
  %pair = cmpxchg ptr @busy, i32 0, i32 1 acquire monotonic
  %mine = extractvalue {{ i32, i1 }} %pair, 1
  br i1 %mine, label %have_pool, label %elsewhere
elsewhere:
  %r1 = call i32 @alone(ptr %fn, ptr %context, i64 %count, i64 %bytes)
  ret i32 %r1
have_pool:
  %fits = call i1 @reserve(ptr @own, i64 %bytes)
  br i1 %fits, label %ready, label %bad
bad:
  store atomic i32 0, ptr @busy release, align 64
  ret i32 1
ready:
  %arena = load ptr, ptr @own
  %one = icmp eq i64 %count, 1
  br i1 %one, label %serial, label %parallel
parallel:
  call void @start()
  %w = load i32, ptr @workers
  %none = icmp eq i32 %w, 0
  br i1 %none, label %serial, label %share
serial:
  call void %fn(ptr %context, i64 0, i64 %count, ptr %arena)
  store atomic i32 0, ptr @busy release, align 64
  ret i32 0
share:
  %all = add i32 %w, 1
  %pieces32 = mul i32 %all, 32
  %pieces = zext i32 %pieces32 to i64
  %chunk0 = udiv i64 %count, %pieces
  %small = icmp eq i64 %chunk0, 0
  %chunk = select i1 %small, i64 1, i64 %chunk0
  call i32 @pthread_mutex_lock(ptr @lock)
  store ptr %fn, ptr @job_fn
  store ptr %context, ptr @job_context
  store i64 %count, ptr @job_count
  store i64 %chunk, ptr @job_chunk
  store i64 %bytes, ptr @job_bytes
  store atomic i64 0, ptr @next monotonic, align 64
  store i32 1, ptr @open
  %g0 = load i32, ptr @generation
  %g1 = add i32 %g0, 1
  store atomic i32 %g1, ptr @generation release, align 64
  %sl = load i32, ptr @sleepers
  %asleep = icmp ne i32 %sl, 0
  br i1 %asleep, label %call, label %go
call:
  call i32 @pthread_cond_broadcast(ptr @wake)
  br label %go
go:
  call i32 @pthread_mutex_unlock(ptr @lock)
  call void @work(ptr %fn, ptr %context, i64 %count, i64 %chunk, ptr %arena)
  call i32 @pthread_mutex_lock(ptr @lock)
  store i32 0, ptr @open
  call i32 @pthread_mutex_unlock(ptr @lock)
  br label %wait
wait:
  %k = phi i32 [ 0, %go ], [ %k2, %pausing ]
  %j = load atomic i32, ptr @joined acquire, align 64
  %over = icmp eq i32 %j, 0
  br i1 %over, label %finish, label %busy_yet
busy_yet:
  %k2 = add i32 %k, 1
  %tired = icmp sgt i32 %k2, {spin}
  br i1 %tired, label %block, label %pausing
pausing:
  {pause}
  br label %wait
block:
  call i32 @pthread_mutex_lock(ptr @lock)
  br label %blocked
blocked:
  %jb = load atomic i32, ptr @joined acquire, align 64
  %clear = icmp eq i32 %jb, 0
  br i1 %clear, label %unblock, label %stay
stay:
  call i32 @pthread_cond_wait(ptr @done, ptr @lock)
  br label %blocked
unblock:
  call i32 @pthread_mutex_unlock(ptr @lock)
  br label %finish
finish:
  store atomic i32 0, ptr @busy release, align 64
  ret i32 0
}}
"""


def pool_ir(is_x86: bool) -> str:
    """The LLVM IR module of the pool, as text."""
    return _TEMPLATE.format(spin=SPIN,
                            pause_declaration="declare void @llvm.x86.sse2.pause()" if is_x86 else "",
                            pause="call void @llvm.x86.sse2.pause()" if is_x86 else "fence seq_cst")
