"""Intrinsics between lanes and on shared memory cells: shuffles, votes, atomics, lane numbers, printing, early return.

The warps of a program have 32 lanes everywhere: votes, masks and lane numbers count in halves of a wave of 64 (LaneFrame.warp),
in which a shuffle of width 64 reaches all lanes.

LANE_OPS are handlers of calls (context.py); atomics find their cells by the context's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Load, Shuffle, StringConst, dtype, numpy_dtype
from tilelang.ir.evaluate import Closure, Value
from tilelang.ir.numbers import binary_function, to_dtype
from tilelang.target.atomics import Atomic, family
from tilelang.target.thread_calls import CLOCKS, MATCHES, SHUFFLES, VOTES, WARP

from .context import Context
from .faults import fault
from .lanes import Action, LaneFrame, exit_lanes
from .releases import Releases


FULL_MASK = 0xFFFFFFFF


def spread(x: Value, lanes: int, vector: bool = False) -> np.ndarray:
    """A value with one row for each lane: shape (lanes,), or (lanes, k) for a vector."""
    x = np.asarray(x)
    if vector:
        return np.broadcast_to(x, (lanes, x.shape[-1])) if x.ndim == 1 else x
    return np.broadcast_to(x, (lanes,))


def occurrence(keys: np.ndarray) -> np.ndarray:
    """For each position, how many earlier positions have the same key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    starts = np.flatnonzero(first)
    rank = np.empty(len(keys), np.int64)
    rank[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))
    return rank


def batches(keys: np.ndarray) -> Iterator[np.ndarray]:
    """Positions in groups without equal keys; among equal keys, earlier positions are in earlier groups."""
    if len(keys) == 0:
        return
    rank = occurrence(keys)
    for r in range(int(rank.max()) + 1):
        yield np.flatnonzero(rank == r)


_ATOMIC = {"add": "add", "max": "max", "min": "min", "or": "bitor", "and": "bitand", "xor": "bitxor", "addx2": "add",
           "addx4": "add"}


def _wrapped_step(kind: str, x: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """inc and dec (PTX ISA, "atom"): one more or less, from 0 to the limit and around, as unsigned numbers."""
    old, top, one = (np.asarray(v).view(f"u{x.dtype.itemsize}") for v in (x, limit, np.ones_like(x)))
    if kind == "inc":
        return np.where(old >= top, 0, old + one).astype(old.dtype).view(x.dtype)
    return np.where((old == 0) | (old > top), top, old - one).astype(old.dtype).view(x.dtype)


def apply_atomic(kind: str, flat: np.ndarray, at: np.ndarray, values: np.ndarray, dt: dtype,
                 compare: np.ndarray | None = None) -> np.ndarray:
    """Apply cell = kind(cell, value) in order and return the old values.  at, values: one entry for each operation.

    compare: only cells that hold this value are changed."""
    old = np.empty(len(at), flat.dtype)
    fn: Any = binary_function(_ATOMIC[kind], dt.scalar) if kind in _ATOMIC else (
        partial(_wrapped_step, kind) if kind in ("inc", "dec") else lambda x, y: y)
    for sel in batches(at):
        cell = at[sel]
        old[sel] = flat[cell]
        new = fn(old[sel], values[sel])
        flat[cell] = new if compare is None else np.where(old[sel] == compare[sel], new, old[sel])
    return old


def _atomic(c: Context, e: Call) -> Closure:
    kind = e.op.removeprefix("atomic_")
    target = e.args[0]
    if not isinstance(target, AddressOf):
        raise fault("sim-unsupported", f"{e.op} on a pointer that is not «the address of a buffer element»",
                    found="another pointer", span=e.span, hint="pass an element of a tensor: C[i, j]")
    value: Closure = c.expr(e.args[1]) if len(e.args) > 1 else lambda f: np.int8(0)
    compared = c.expr(e.args[2]) if len(e.args) > 2 else None
    dt = target.buffer.dtype.scalar
    count = e.args[1].dtype.lanes if len(e.args) > 1 else 1
    what = "atomic load of" if kind == "load" else "atomic access to"
    order = Releases(e)
    waits = c.in_while and e.args is not c.discarded
    cells = c.memory.cells(target, count, what, order, Atomic(family(e.op), waits, c.inside))

    def run(f: LaneFrame) -> Value:
        flat, at, ok = cells(f)
        old = np.zeros(at.shape, flat.dtype)
        if kind == "load":
            old[ok] = flat[at[ok]]
        elif ok.any():
            v = spread(value(f), f.lanes, count > 1).reshape(at.shape)
            like = None if compared is None else spread(compared(f), f.lanes).reshape(at.shape)[ok]
            old[ok] = apply_atomic(kind, flat, at[ok], to_dtype(v[ok], dt), dt, like)
        return old if count > 1 else old[:, 0]

    return run


def source_lanes(op: str, lane: np.ndarray, operand: np.ndarray, width: int) -> np.ndarray:
    """The lane (within its warp) that each lane reads.  A lane whose source is beyond its segment reads itself (idx wraps; xor
    reads segments before its own).  Of the operand the bits of a lane number count: 5, or those of a wider segment.

    Source: PTX ISA, shfl.sync; CUDA C++ Programming Guide, "Warp Shuffle Functions".
    """
    start = lane // width * width
    if op == "shfl_idx":
        return start + operand % width
    operand = operand & (max(width, WARP) - 1)
    if op == "shfl_up":
        src = lane - operand
        return np.where(src >= start, src, lane)
    src = lane ^ operand if op == "shfl_xor" else lane + operand
    return np.where(src < start + width, src, lane)


def own_threads(f: LaneFrame) -> np.ndarray:
    """For each lane, the linear index of its thread in its block."""
    cluster = getattr(f.block, "cluster", None)
    return np.arange(f.lanes) % getattr(cluster, "lanes", f.lanes)


def need_whole_warps(f: LaneFrame, e: Call) -> None:
    """Raises sim-warp-divergence unless whole warps are active (the last warp of a block may be partial)."""
    if f.lanes % f.warp:
        raise fault("sim-warp-divergence", f"{e.op} needs «whole warps», found {f.lanes} threads", span=e.span,
                    hint=f"use a multiple of {f.warp} threads")


def participants(f: LaneFrame, e: Call, masks: np.ndarray, threads: int) -> np.ndarray:
    """For each lane, the lanes that participate with it: shape (warps, 32, 32), or (warps, 1, 32) if all pass one mask.

    masks: the mask that each lane passes, shape () or (lanes,).  threads: number in the block.  A mask may name lanes beyond
    `threads` and lanes that have returned; they do not participate.  Raises sim-warp-divergence if a named lane does not
    arrive, passes another mask, or is not in its own mask: PTX ISA, "vote.sync", "match.sync" and "shfl.sync", leaves all
    three undefined.
    """
    lane, active = np.arange(WARP, dtype=np.uint64), f.active().reshape(-1, WARP)
    masks = masks.astype(np.uint64).reshape((-1, WARP) if masks.ndim else (1, 1))
    named = (masks[..., None] >> lane & np.uint64(1)) != 0
    outside = active & ((masks >> lane & np.uint64(1)) == 0)

    def reject(bad: np.ndarray, text: str, expected: str, found: str, hint: str) -> None:
        if bad.any():
            t = int(own_threads(f)[int(bad.reshape(-1).argmax())])
            raise fault("sim-warp-divergence", f"{e.op} {text.format(t)}", expected=expected, found=found.format(t),
                        span=e.span, hint=hint)

    if f.mask is not None:
        left = own_threads(f) < threads
        left = (left if f.exited is None else left & ~f.exited).reshape(-1, WARP)
        # If a lane named in a mask does not arrive, the warp waits forever.
        reject((named & active[:, :, None]).any(1) & left & ~active, "names thread {} in its mask, which does not execute it",
               "a mask of lanes that execute it", "thread {}, which does not", "pass the mask of the lanes that reach it")
    reject(outside, "is executed by thread {}, which is not in the mask that it passes", "a mask with the lane that passes it",
           "thread {}, which is not in its own", "pass the mask of the lanes that act together, with this one")
    if masks.size > 1:
        other = named & active[:, None, :] & active[:, :, None] & (masks[:, :, None] != masks[:, None, :])
        reject(other.any(1), "names thread {} in its mask, which passes another mask", "one mask in all lanes that it names",
               "thread {}, which passes another", "lanes that act together pass the same mask")
    return named & active[:, None, :]


def _shuffle(c: Context, e: Call) -> Closure:
    value, operand = c.expr(e.args[0]), c.expr(e.args[1])
    width, vector = e.options.width, e.dtype.lanes > 1
    named, threads = c.expr(e.args[2]) if len(e.args) > 2 else None, c.launch.threads

    def run(f: LaneFrame) -> Value:
        need_whole_warps(f, e)
        x = spread(value(f), f.lanes, vector)
        lane = np.arange(f.lanes) % f.warp
        src = source_lanes(e.op, lane, spread(operand(f), f.lanes).astype(np.int64), width)
        src = src + (np.arange(f.lanes) - lane)
        if f.mask is not None and (f.mask & ~f.mask[src]).any():
            t = int(np.flatnonzero(f.mask & ~f.mask[src])[0])
            raise fault("sim-warp-divergence", f"{e.op}: thread {t} reads from ‹thread {int(src[t])}, which does not› execute "
                        "it", expected="a lane that executes it", span=e.span,
                        hint="all lanes of the warp must reach a shuffle together")
        if width <= WARP and (f.mask is not None or named is not None):
            participants(f, e, np.asarray(FULL_MASK if named is None else named(f)), threads)
        return x[src]

    return run


def _lanes_transposed(c: Context, e: Call) -> Closure:
    """Of each 16 lanes (target/instructions.py).  A lane that does not execute it would leave registers of others unset."""
    value = c.expr(e.args[0])

    def run(f: LaneFrame) -> Value:
        need_whole_warps(f, e)
        on = f.active().reshape(-1, f.warp)
        if (on.any(1) & ~on.all(1)).any():
            raise fault("sim-warp-divergence", f"{e.op} is not executed by all lanes of a wave", expected="whole waves",
                        found="some of its lanes", span=e.span, hint="this is a compiler bug")
        x = spread(value(f), f.lanes, True)
        return x.reshape(-1, 4, 4, 4).transpose(0, 2, 3, 1).reshape(x.shape)  # (n, q, h) of lane 4n + q to (q, h, n)

    return run


def effects(rows: Mapping[str, Callable[[Any, Call], Callable[[LaneFrame], Any]]],
            before: Callable[[LaneFrame, str], None] = lambda f, op: None) -> dict[str, Callable[[Any, Call], Closure]]:
    """Handlers of calls that are executed for their effect; their value is what the action returns, or 0.

    rows: by intrinsic, what compiles the call to an action, which runs where a lane is active.  before: called first, with the
    name of the call, also where no lane is active.
    """
    def handler(row: Callable[[Any, Call], Callable[[LaneFrame], Any]]) -> Callable[[Any, Call], Closure]:
        def compile_call(c: Any, e: Call) -> Closure:
            action = row(c, e)

            def run(f: LaneFrame) -> Value:
                before(f, e.op)
                found = action(f) if f.any_active() else None
                return np.int32(0) if found is None else found

            return run

        return compile_call

    return {op: handler(row) for op, row in rows.items()}


def elect(c: Context, e: Call) -> Closure:
    """elect_one: true in the first active lane of each warp."""

    def run(f: LaneFrame) -> Value:
        active = f.active().reshape(-1, WARP)
        return (active & (np.arange(WARP) == active.argmax(1)[:, None])).reshape(-1)

    return run


def _lane_number(c: Context, e: Call) -> Closure:
    divide = {"get_lane_idx": (1, WARP), "get_warp_idx": (WARP, 0), "get_warp_idx_sync": (WARP, 0),
              "get_warp_group_idx": (4 * WARP, 0)}[e.op]

    def run(f: LaneFrame) -> Value:
        t = own_threads(f) // divide[0]
        return (t % divide[1] if divide[1] else t).astype(numpy_dtype(e.dtype))

    return run


def _votes(op: str, x: np.ndarray, on: np.ndarray) -> np.ndarray:
    """Result of a vote for each lane of each warp.

    x: shape (warps, 32).  on: the lanes that each lane counts, shape (warps, 32, 32), or (warps, 1, 32) if all count the same.
    Source: CUDA C++ Programming Guide, "Warp Vote Functions" and "Warp Match Functions".
    """
    bit = np.uint64(1) << np.arange(WARP, dtype=np.uint64)
    yes = (x != 0)[:, None, :]
    if op == "any_sync":
        return np.broadcast_to((yes & on).any(2), x.shape)
    if op == "all_sync":
        return np.broadcast_to((yes | ~on).all(2), x.shape)
    if op in ("ballot_sync", "ballot", "activemask"):
        return np.broadcast_to(((on if op == "activemask" else yes & on) * bit).sum(2), x.shape)
    equal = (x[:, :, None] == x[:, None, :]) & on
    if op == "match_any_sync":
        return (equal * bit).sum(2)
    return np.where((equal | ~on).all(2), (on * bit).sum(2), 0)


def _vote(c: Context, e: Call) -> Closure:
    value = c.expr(e.args[0]) if e.args else None
    mask = c.expr(e.args[1]) if len(e.args) > 1 else None
    result, threads = numpy_dtype(e.dtype), c.launch.threads

    def run(f: LaneFrame) -> Value:
        need_whole_warps(f, e)
        active = f.active()
        x = active if value is None else spread(value(f), f.lanes)
        on = active.reshape(-1, 1, WARP) if mask is None else participants(f, e, np.asarray(mask(f)), threads)
        return _votes(e.op, x.reshape(-1, WARP), on).reshape(-1).astype(result)

    return run


VOTES_OF_BLOCKS: dict[str, Callable[[np.ndarray], Any]] = {
    "syncthreads_count": np.count_nonzero, "syncthreads_and": np.all, "syncthreads_or": np.any}


def _ldg(c: Context, e: Call) -> Closure:
    at = e.args[0]
    if not isinstance(at, AddressOf):
        raise fault("sim-unsupported", "ldg of a pointer that is not «the address of a buffer element»",
                    found="another pointer", span=e.span, hint="index a tensor: T.__ldg(A[i])")
    return c.expr(Load(at.buffer, at.indices, e.dtype, span=e.span))


def _load_shifted(c: Context, e: Call) -> Closure:
    """The elements of the vector: the device reads no further byte that it uses."""
    (at,) = e.args
    *lead, first = at.indices  # type: ignore[attr-defined]
    lanes = tuple(Load(at.buffer, (*lead, first + k), e.dtype.scalar, span=e.span)  # type: ignore[attr-defined]
                  for k in range(e.dtype.lanes))
    return c.expr(Shuffle(lanes, tuple(range(e.dtype.lanes)), e.dtype))


_FORMAT = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z)?([diufgexXcsp])")


def format_c(text: str, values: list[Any]) -> str:
    """C printf of Python values, for the conversions that the language prints."""
    values = list(values)

    def one(m: re.Match[str]) -> str:
        v, conv = values.pop(0), m.group(1)
        spec = re.sub(r"(hh|h|ll|l|z)(?=[a-zA-Z]$)", "", m.group(0))
        if conv == "p":
            return hex(int(v))
        if conv in "diucxX":
            return (spec[:-1] + ("d" if conv in "iu" else conv)) % int(v)
        return spec % (v if conv == "s" else float(v))

    return _FORMAT.sub(one, text.replace("%%", "\0")).replace("\0", "%")


def _printf(c: Context, e: Call) -> Action:
    text = e.args[0].value if isinstance(e.args[0], StringConst) else "%s"
    fns = [(a.value if isinstance(a, StringConst) else c.expr(a)) for a in e.args[1:]]

    def run(f: LaneFrame) -> None:
        rows = [v if isinstance(v, str) else spread(v(f), f.lanes) for v in fns]
        for t in np.flatnonzero(f.active()):
            f.block.print(format_c(text, [r if isinstance(r, str) else r[t] for r in rows]))

    return run


class Printer:
    """Receives printed text: writes it to standard output and keeps it."""

    def __init__(self) -> None:
        self.text = ""

    def print(self, text: str) -> None:
        """Write what C's printf would write; no newline is added."""
        self.text += text
        print(text, end="")


def _uniform(c: Context, e: Call) -> Closure:
    value = c.expr(e.args[0])

    def run(f: LaneFrame) -> Value:
        x = spread(value(f), f.lanes)
        active = f.active()
        warps, on = x.reshape(-1, f.warp), active.reshape(-1, f.warp)
        first = warps[np.arange(len(warps)), on.argmax(1)][:, None]
        if ((warps != first) & on).any():
            raise fault("sim-warp-divergence", "the lanes of a warp do not agree on a value they should",
                        expected="one value in all lanes", found="several", span=e.span)
        return x

    return run


def _clock(c: Context, e: Call) -> Closure:
    """A counter of the run: each reading is later than those before it."""
    return lambda f: np.full(f.lanes, next(c.ticks)).astype(numpy_dtype(e.dtype))


def nothing(c: Context, e: Call) -> Closure:
    """An operation without effect here."""
    return lambda f: np.int32(0)


LANE_OPS: dict[str, Callable[[Context, Call], Closure]] = {
    **{f"atomic_{k}": _atomic for k in (*_ATOMIC, "inc", "dec", "cas", "exchange", "load", "store")},
    **dict.fromkeys((*VOTES, *MATCHES, "activemask"), _vote), **dict.fromkeys(SHUFFLES, _shuffle),
    "lanes_transposed": _lanes_transposed,
    **{f"get_{k}": _lane_number for k in ("lane_idx", "warp_idx", "warp_idx_sync", "warp_group_idx")},
    "warp_uniform": _uniform, **dict.fromkeys(CLOCKS, _clock),
    "ldg": _ldg, "load_shifted": _load_shifted, **effects({"thread_return": lambda c, e: exit_lanes, "printf": _printf}),
    **dict.fromkeys(("fence_gpu", "fence_block", "keep_branch", "prefetch_l2", "pdl_trigger", "pdl_sync"), nothing),
}  # fmt: skip
