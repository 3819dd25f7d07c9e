"""Loops over the threads of a block, and code that all threads execute as one."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable
from typing import Any

from tilelang.ir import Var
from tilelang.target.thread_calls import WARP

from .code import Code
from .state import Bound
from .types import literal, memory_type, store


def at_line(cx: Code, span: Any) -> None:
    """Record the user's place, and name it in the text when the line changes."""
    if cx.span is None or (span.line, span.file) != (cx.span.line, cx.span.file):
        text = linecache.getline(span.file, span.line).strip()
        cx.f.comment(f"{os.path.basename(span.file)}:{span.line}  {text}")
    cx.span = span


def over_threads(cx: Code, body: Callable[[], None]) -> None:
    """Print for tid in range(threads): body, over the threads of the warp role, with the thread indices bound."""
    f, block = cx.f, cx.block
    for lo, hi in block.ranges:
        with f.loop(str(lo), str(hi), hint="tid") as t:
            x, y, _ = block.extents
            ids = [t, "0", "0"]
            if block.count != x:
                ids[0] = f.let(f"urem i64 {t}, {x}")
                rest = f.let(f"udiv i64 {t}, {x}")
                ids[1], ids[2] = f.let(f"urem i64 {rest}, {y}"), f.let(f"udiv i64 {rest}, {y}")
            for v, i in zip(block.values.indices, ids):
                cx.vars[v] = Bound(wide=i)
            block.tid = t
            body()
            block.tid = None
    outside_threads(cx)


def outside_threads(cx: Code) -> None:
    """Print code of the whole block, where the thread index is 0."""
    for v in cx.block.values.indices:
        cx.vars[v] = Bound(wide="0")


def end_threads(cx: Code) -> None:
    """End all threads."""
    if cx.block.warp_role is None:
        cx.f.end("ret void")
    else:
        cx.block.warp_role.coroutine.done()


def check_not_null(cx: Code, v: Var) -> None:
    """Print a check that ends the block and fails the call if a used tensor's address is null."""
    faults = cx.block.faults

    def fail() -> None:
        cx.f.do(f"store i64 {faults.nulls[v]}, ptr {cx.value(faults.word)}")
        cx.f.end("ret void")

    cx.f.branch(cx.f.let(f"icmp eq ptr {cx.value(v)}, null"), fail)


def whole_warps(cx: Code) -> int:
    """The number of threads of the block, rounded up to whole warps."""
    return -(-cx.block.count // WARP) * WARP


def lane_array(cx: Code, dt: Any, hint: str) -> str:
    """An array with an entry for each thread, and zeros up to a whole warp."""
    f, mt = cx.f, memory_type(dt)
    array = f.alloca(f"[{whole_warps(cx)} x {mt}]", 64, hint)
    for k in range(cx.block.count, whole_warps(cx)):
        store(f, dt, literal(0, dt), f.at(array, mt, str(k)))
    return array


def active_threads(cx: Code, mask: Any) -> str:
    """An array with a byte for each thread: whether a mask holds for it."""
    array = lane_array(cx, mask.dtype, "active")
    over_threads(cx, lambda: store(cx.f, mask.dtype, cx.value(mask), cx.f.at(array, "i8", this_thread(cx))))
    return array


def this_thread(cx: Code) -> str:
    """The linear index of the thread inside a loop over threads."""
    assert cx.block.tid is not None, "only inside a loop over threads"
    return cx.block.tid
