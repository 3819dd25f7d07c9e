"""Faults found while the program runs, which fail the call: assertions, and lane exchanges that CUDA leaves undefined.

A launch in which one may occur has a fault word (state.py, LaneFaults), which is 0 while there is none. Its value is the number
of a text:

    T.shfl_xor (kernel.py:12) names a lane in its mask that does not execute it
"""

from __future__ import annotations

from collections.abc import Callable

from tilelang.ir import Call, Const, StringConst, dtype
from tilelang.target.llvm_values import splat
from tilelang.target.thread_calls import WARP

from .code import Code
from .state import ABSENT, OTHER, OUTSIDE
from .text import Fn, Module
from .threads import over_threads, this_thread, whole_warps

FULL = 0xFFFFFFFF


def fail_if(cx: Code, e: Call, fault: int, wrong: str) -> None:
    """Record a fault of e where `wrong` (i1) holds."""
    code = cx.block.faults.code(e, fault, e.span or cx.span)
    cx.f.branch(wrong, lambda: cx.f.do(f"store i64 {code}, ptr {cx.value(cx.block.faults.word)}"))


def assertion(cx: Code, e: Call) -> str:
    """Record that an assertion of the program is false, with its place."""
    cond, text = e.args
    assert isinstance(text, StringConst), "the text of an assertion is written by the compiler"
    code = cx.block.faults.add(str(text.value))
    cx.f.branch(cx.value(cond), lambda: None, lambda: cx.f.do(f"store i64 {code}, ptr {cx.value(cx.block.faults.word)}"))
    return "0"


def lanes_of(cx: Code, array: str | None, first: str) -> str:
    """An i32 mask of the lanes of the warp that begins at thread `first` whose byte in the array is set.

    Without an array, it holds the lanes that are threads of the block.
    """
    f, count = cx.f, cx.block.count
    if array is not None:
        row = f.let(f"load <{WARP} x i8>, ptr {f.at(array, 'i8', first)}, align 1")
        yes = f.let(f"icmp ne <{WARP} x i8> {row}, {splat('0', f'<{WARP} x i8>')}")
        return f.let(f"bitcast <{WARP} x i1> {yes} to i32")
    if count % WARP == 0:
        return "-1"
    full = f.less(first, str(count // WARP * WARP))
    return f.let(f"select i1 {full}, i32 -1, i32 {(1 << count % WARP) - 1}")


def check_mask(cx: Code, e: Call, masks: Callable[[], str] | int) -> None:
    """Check that the lanes in e's mask execute it and pass the same mask, this lane among them.

    masks: one mask for all threads, or a function that gives the mask (i32) of the current thread.
    """
    if isinstance(masks, int) and masks & FULL == FULL and (cx.block.active is None or cx.block.only_returned_absent):
        return
    f = cx.f
    given = f.alloca(f"[{whole_warps(cx)} x i32]", 64, "masks")

    def put() -> None:
        f.do(f"store i32 {masks() if callable(masks) else _signed(masks)}, ptr {f.at(given, 'i32', this_thread(cx))}")

    over_threads(cx, put)
    check = _checker(f.module)
    codes = [cx.block.faults.code(e, fault, e.span or cx.span) for fault in (ABSENT, OUTSIDE, OTHER)]
    for lo, hi in cx.block.ranges:
        with f.loop(str(lo), str(hi), WARP, hint="warp") as first:
            on = lanes_of(cx, cx.block.active, first)
            here = on if cx.block.active is None or cx.block.only_returned_absent else lanes_of(cx, cx.block.live, first)
            found = f.let(f"call i32 @{check}(i32 {on}, i32 {here}, ptr {f.at(given, 'i32', first)})")
            for fault, code in enumerate(codes):
                wrong = f.let(f"icmp eq i32 {found}, {fault + 1}")
                f.branch(wrong, lambda code=code: f.do(  # type: ignore[misc]
                    f"store i64 {code}, ptr {cx.value(cx.block.faults.word)}"))


def mask_of(cx: Code, e: Call) -> Callable[[], str] | int | None:
    """The mask that an exchange names, None where it has none."""
    at = 2 if e.op.startswith("shfl_") else 1
    if len(e.args) <= at:
        return FULL if at == 2 else None
    mask = e.args[at]
    return int(mask.value) if isinstance(mask, Const) else lambda: cx.cast_value(mask, dtype("uint32"))


def _signed(mask: int) -> int:
    mask &= FULL
    return mask - (1 << 32) if mask >> 31 else mask


def _checker(m: Module) -> str:
    """A function of (lanes that execute, lanes that have not returned, a mask for each lane): i32 0, or the number of the fault
    + 1."""
    name = "tl_lane_fault"
    if name in m.entries:
        return name
    f = Fn(m, name, "i32", [("i32", "on", ""), ("i32", "left", ""), ("ptr", "masks", "")], attrs="nounwind")
    named, out = f.alloca("i32", hint="named"), f.alloca("i32", hint="found")
    f.do(f"store i32 0, ptr {named}")
    f.do(f"store i32 0, ptr {out}")

    def bit(mask: str, lane: str) -> str:
        shifted = f.let(f"lshr i32 {mask}, {f.let(f'trunc i64 {lane} to i32')}")
        return f.let(f"icmp ne i32 {f.let(f'and i32 {shifted}, 1')}, 0")

    def found(fault: int) -> Callable[[], None]:
        return lambda: f.do(f"store i32 {fault + 1}, ptr {out}")

    with f.loop("0", str(WARP), hint="lane") as t:

        def acts() -> None:
            mine = f.let(f"load i32, ptr {f.at('%masks', 'i32', t)}")
            so_far = f.let(f"load i32, ptr {named}")
            f.do(f"store i32 {f.let(f'or i32 {so_far}, {mine}')}, ptr {named}")
            f.branch(bit(mine, t), lambda: None, found(OUTSIDE))
            both = f.let(f"and i32 {mine}, %on")
            with f.loop("0", str(WARP), hint="other") as u:
                theirs = f.let(f"load i32, ptr {f.at('%masks', 'i32', u)}")
                other = f.let(f"icmp ne i32 {theirs}, {mine}")
                f.branch(f.both(bit(both, u), other), found(OTHER))

        f.branch(bit("%on", t), acts)
    away = f.let(f"and i32 {f.let('xor i32 %on, -1')}, %left")
    absent = f.let(f"and i32 {f.let(f'load i32, ptr {named}')}, {away}")
    f.branch(f.let(f"icmp ne i32 {absent}, 0"), found(ABSENT))
    f.end(f"ret i32 {f.let(f'load i32, ptr {out}')}")
    f.finish()
    return name
