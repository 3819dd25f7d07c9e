"""Exchanges between lanes that CUDA leaves undefined: found while the program runs, the call then fails.

A launch that may come to one has a word of fault, 0 while there is none.  A number from there is the text of a place:

    T.shfl_xor (kernel.py:12) names a lane in its mask that does not execute it
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import Call, Const, Var, dtype

from .text import Fn, Module
from .types import splat

WARP, FULL = 32, 0xFFFFFFFF
# What is wrong: as the simulators tell it (sim-warp-divergence).  Source: PTX ISA, "vote.sync", "match.sync", "shfl.sync".
ABSENT, OUTSIDE, OTHER = range(3)
TEXTS = ("names a lane in its mask that does not execute it", "is executed by a lane that is not in the mask that it passes",
         "names a lane in its mask that passes another mask", "reads from a lane that does not execute it",
         "takes all 32 lanes of a warp, and only some execute it")
SOURCE, PART = 3, 4


@dataclass
class LaneFaults:
    """The places of a launch that may fail.  word: the value that its functions get the address of the word as."""

    word: Var = field(default_factory=lambda: Var("lane_fault", dtype("handle")))
    texts: list[str] = field(default_factory=list)
    nulls: dict[Var, int] = field(default_factory=dict)  # addresses that must not be null, and the numbers of the faults

    def null_pointers(self, used: dict[Var, str]) -> None:
        """used: address -> what is wrong where it is null."""
        for v, text in used.items():
            self.texts.append(text)
            self.nulls[v] = len(self.texts)

    def code(self, e: Call, what: int, span: Any) -> int:
        """Number of a fault of a call."""
        where = f" ({os.path.basename(span.file)}:{span.line})" if span is not None else ""
        self.texts.append(f"T.{_NAMES.get(e.op, e.op)}{where} {TEXTS[what]}")
        return len(self.texts)


_NAMES = {"shfl_idx": "shfl_sync", "mma": "ptx_mma", "ldmatrix": "ptx_ldmatrix", "stmatrix": "ptx_stmatrix"}


def fail_if(cx: Any, e: Call, what: int, wrong: str) -> None:
    """Note a fault of e where `wrong` (i1) holds."""
    code = cx.faults.code(e, what, e.span or cx.span)
    cx.f.branch(wrong, lambda: cx.f.do(f"store i64 {code}, ptr {cx.value(cx.faults.word)}"))


def lanes_of(cx: Any, array: str | None, first: str) -> str:
    """i32: the lanes of the warp that begins at a thread for which a byte is set; None: that are threads of the block."""
    f, count = cx.f, cx.threads.count
    if array is not None:
        row = f.let(f"load <{WARP} x i8>, ptr {f.at(array, 'i8', first)}, align 1")
        yes = f.let(f"icmp ne <{WARP} x i8> {row}, {splat('0', f'<{WARP} x i8>')}")
        return str(f.let(f"bitcast <{WARP} x i1> {yes} to i32"))
    if count % WARP == 0:
        return "-1"
    full = f.less(first, str(count // WARP * WARP))
    return str(f.let(f"select i1 {full}, i32 -1, i32 {(1 << count % WARP) - 1}"))


def check_mask(cx: Any, e: Call, masks: Callable[[], str] | int) -> None:
    """Lanes that e names in its mask execute it and pass the same, this one among them.

    masks: a mask for all, or what gives the one (i32) of the thread.  cx.active: a byte a thread that executes e, None for
    all; cx.left: a byte a thread that has not returned, None for all.
    """
    if isinstance(masks, int) and masks & FULL == FULL and (cx.active is None or cx.whole):
        return
    f, count = cx.f, -(-cx.threads.count // WARP) * WARP
    given = f.alloca(f"[{count} x i32]", 64, "masks")

    def put() -> None:
        f.do(f"store i32 {masks() if callable(masks) else _signed(masks)}, ptr {f.at(given, 'i32', cx.tid)}")

    cx.over_threads(put)
    check = _checker(f.module)
    codes = [cx.faults.code(e, what, e.span or cx.span) for what in (ABSENT, OUTSIDE, OTHER)]
    for lo, hi in cx.ranges:
        with f.loop(str(lo), str(hi), WARP, hint="warp") as first:
            on = lanes_of(cx, cx.active, first)
            here = on if cx.active is None or cx.whole else lanes_of(cx, cx.left, first)
            found = f.let(f"call i32 @{check}(i32 {on}, i32 {here}, ptr {f.at(given, 'i32', first)})")
            for what, code in enumerate(codes):
                wrong = f.let(f"icmp eq i32 {found}, {what + 1}")
                f.branch(wrong, lambda code=code: f.do(  # type: ignore[misc]
                    f"store i64 {code}, ptr {cx.value(cx.faults.word)}"))


def mask_of(cx: Any, e: Call) -> Callable[[], str] | int | None:
    """The mask that an exchange names, None where it has none."""
    at = 2 if e.op.startswith("shfl_") else 1
    if len(e.args) <= at:
        return FULL if at == 2 else None
    mask = e.args[at]
    return int(mask.value) if isinstance(mask, Const) else lambda: str(cx.cast_value(mask, dtype("uint32")))


def _signed(mask: int) -> int:
    mask &= FULL
    return mask - (1 << 32) if mask >> 31 else mask


def _checker(m: Module) -> str:
    """i32 of (lanes that execute, lanes that have not returned, a mask for each lane): 0, or which of the faults + 1."""
    name = "tl_lane_fault"
    if name in m.parts:
        return name
    f = Fn(m, name, "i32", [("i32", "on", ""), ("i32", "left", ""), ("ptr", "masks", "")], attrs="nounwind")
    named, out = f.alloca("i32", hint="named"), f.alloca("i32", hint="found")
    f.do(f"store i32 0, ptr {named}")
    f.do(f"store i32 0, ptr {out}")

    def bit(mask: str, lane: str) -> str:
        moved = f.let(f"lshr i32 {mask}, {f.let(f'trunc i64 {lane} to i32')}")
        return str(f.let(f"icmp ne i32 {f.let(f'and i32 {moved}, 1')}, 0"))

    def found(what: int) -> Callable[[], None]:
        return lambda: f.do(f"store i32 {what + 1}, ptr {out}")

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


__all__ = ["PART", "SOURCE", "LaneFaults", "check_mask", "fail_if", "lanes_of", "mask_of"]
