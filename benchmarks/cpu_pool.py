"""Cost of one parallel region of the CPU thread pool: empty blocks, and blocks of some microseconds of work."""

from __future__ import annotations

import ctypes
import time

from tilelang.runtime.cpu_engine import cpu_engine, thread_count

_BLOCKS = """
declare i32 @tl_parallel_for(ptr, ptr, i64, i64)
define internal void @blocks(ptr %context, i64 %first, i64 %last, ptr %arena) {
entry:
  %n = load i64, ptr %context
  br label %block
block:
  %b = phi i64 [ %first, %entry ], [ %b2, %next ]
  br label %spin
spin:
  %i = phi i64 [ 0, %block ], [ %i2, %spin ]
  call void asm sideeffect "", ""()
  %i2 = add i64 %i, 1
  %more = icmp slt i64 %i2, %n
  br i1 %more, label %spin, label %next
next:
  %b2 = add i64 %b, 1
  %again = icmp slt i64 %b2, %last
  br i1 %again, label %block, label %out
out:
  ret void
}
define void @region(i64 %iterations, i64 %count) {
  %context = alloca i64
  store i64 %iterations, ptr %context
  %r = call i32 @tl_parallel_for(ptr @blocks, ptr %context, i64 %count, i64 0)
  ret void
}
"""


def main() -> None:
    """Print microseconds per region."""
    code = cpu_engine().load(_BLOCKS, "region")
    region = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(code.address)
    n = thread_count()
    for iterations, count, what in ((1, 1, "one empty block (no threads)"), (1, n, "an empty block per thread"),
                                    (60000, n, "a block of about 25 us per thread"), (60000, 1, "one such block")):
        best = 1e9
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                region(iterations, count)
            best = min(best, (time.perf_counter() - start) / 200)
        print(f"{n} threads, {what}: {best * 1e6:.1f} us")


if __name__ == "__main__":
    main()
