"""Warp and thread primitives, extern calls, raw If and While."""

from __future__ import annotations

import sys
from collections.abc import Callable
from textwrap import indent
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (I32, AddressOf, Buffer, Call, Const, Evaluate, Expr, If, Load, Var, as_bool,
                         binary, call, cast, const, convert, is_const, GLOBAL)

from .tracing.builder import Emitted, need_builder
from .tracing.names import Names
from .kernel import need_kernel, thread_index
from .tracing.scope import Frame, IfFrame, WhileFrame
from .tracing.state import describe, error, example, named
from .tile import EMITTED

FULL_MASK = 0xFFFFFFFF


def emit_call(op: str, args: Any = (), dt: Any = "void", **attrs: Any) -> Emitted:
    """Emit a call for its effect."""
    b = need_builder(f"T.{op}")
    b.emit(Evaluate(call(op, args, dt, span=b.here(), **attrs), span=b.here()))
    return EMITTED


def event(name: str, about: str, example: str = "", op: str = "", **options: Any) -> Callable[[], Emitted]:
    """The function of the language that emits one intrinsic without operands.  about, example: its documentation."""
    def fn() -> Emitted:
        return emit_call(op or name, **options)

    fn.__module__ = sys._getframe(1).f_globals["__name__"]  # the reference shows it with the functions of that module
    return named(fn, name, f"{about}\n\nExample:\n" + indent(example or f"T.{name}()", "    "))


def value_call(op: str, args: Any, dt: Any, **attrs: Any) -> Var:
    """The value of a call that affects other threads; it is computed at this place."""
    b = need_builder(f"T.{op}")
    return b.nameless(b.let(op, call(op, args, dt, span=b.here(), **attrs)))


@example("x_s[tx] = X[i]", "T.sync_threads()", "Y[i] = x_s[127 - tx]")
def sync_threads(barrier_id: Any = None, arrive_count: Any = None) -> Emitted:
    """Barrier of the block; with an id, the named barrier of that id for `arrive_count` threads (default: all of the block)."""
    if barrier_id is None and arrive_count is None:
        return emit_call("sync_threads")
    whole = -(-need_kernel("T.sync_threads").num_threads // 32) * 32  # a warp counts as 32 threads
    count = whole if arrive_count is None else arrive_count
    number, _ = _named("sync_threads", 0 if barrier_id is None else barrier_id, 32 if arrive_count is None else arrive_count)
    return emit_call("named_barrier", (number, convert(count)))


@example("T.named_barrier_arrive(1, 256)")
def named_barrier_arrive(id: Any, count: Any) -> Emitted:
    """Arrive at a named barrier without waiting."""
    return emit_call("named_barrier_arrive", _named("named_barrier_arrive", id, count))


def _named(name: str, number: Any, count: Any) -> tuple[Expr, Expr]:
    """Number and count of a named barrier.  Raises named-barrier."""
    i, n = convert(number), convert(count)
    for e, what in ((i, "number"), (n, "count of threads")):
        if not e.dtype.is_int or e.dtype.lanes != 1:
            raise error("named-barrier", f"T.{name}: the {what} of a named barrier is «an integer», found {describe(e)}")
    if isinstance(i, Const) and not 0 <= i.value <= 15:
        raise error("named-barrier", f"T.{name}: named barriers have the numbers 0 to 15, found {i.value}",
                    expected="a number from 0 to 15")
    if isinstance(n, Const) and not (0 < n.value <= 1024 and n.value % 32 == 0):
        raise error("named-barrier", f"T.{name}: whole warps meet at a named barrier, found a count of ‹{n.value}› threads",
                    expected="a multiple of 32 threads up to 1024")
    return i, n


@example("T.sync_warp()")
def sync_warp(mask: Any = None) -> Emitted:
    """Barrier of the warp (or of its lanes in mask)."""
    return emit_call("sync_warp", () if mask is None else (_mask(mask),))


@example("T.sync_grid()")
def sync_grid() -> Emitted:
    """Barrier of all threads of all blocks.  After it, earlier writes to global memory are visible to all of them.

    The launch becomes cooperative: its blocks must all fit on the device at once, which the driver checks.
    """
    need_kernel("T.sync_grid").set(cooperative=True)
    return emit_call("sync_grid")


def _predicate(name: str, pred: Any) -> Expr:
    e = convert(pred)
    if not (e.dtype.is_int or e.dtype.is_bool):
        raise error("predicate-type", f"T.{name} requires an integer or boolean predicate, found {e.dtype}")
    return cast(e, I32)


def _block_vote(name: str) -> Callable[[Any], Var]:
    def fn(pred: Any) -> Var:
        return value_call(name, (_predicate(name, pred),), I32)

    return named(fn, name, f"{name} over the block: int32.\n\nExample:\n    found = T.{name}(X[i] > 0)")


syncthreads_count, syncthreads_and, syncthreads_or = (
    _block_vote(n) for n in ("syncthreads_count", "syncthreads_and", "syncthreads_or"))


def _shuffle(name: str, row: str) -> Callable[..., Var]:
    def fn(value: Any, lane: Any, width: int = 32, mask: Any = FULL_MASK) -> Var:
        v, m = convert(value), _mask(mask)
        named = () if is_const(m, FULL_MASK) else (m,)
        where = convert(lane)
        if not where.dtype.is_int or where.dtype.lanes != 1:
            raise error("lane-argument-type", f"the lane of T.{name} must be an integer, found {describe(lane)}")
        return value_call(row, (v, cast(where, I32), *named), v.dtype, width=_lanes(name, width))

    other = {"shfl_xor": "16", "shfl_sync": "0"}.get(name, "1")
    return named(fn, name, f"{name}: the value of another lane of the warp.\n\nExample:\n    x = T.{name}(X[i], {other})")


shfl_sync, shfl_xor = _shuffle("shfl_sync", "shfl_idx"), _shuffle("shfl_xor", "shfl_xor")
shfl_up, shfl_down = _shuffle("shfl_up", "shfl_up"), _shuffle("shfl_down", "shfl_down")


def _lanes(name: str, width: Any) -> int:
    """The width of a group of lanes.  The hardware supports only powers of two."""
    n = convert(width) if not isinstance(width, (float, bool, np.floating)) else None
    if not isinstance(n, Const) or n.value not in (1, 2, 4, 8, 16, 32):
        raise error("lane-arguments", f"the width of T.{name} is 1, 2, 4, 8, 16 or 32 lanes, found {width}",
                    expected="a power of two up to 32", hint="leave it out for whole warps")
    return int(n.value)


def _mask(mask: Any) -> Expr:
    """A mask of lanes; -1 names all."""
    e = convert(mask)
    if not e.dtype.is_int or e.dtype.lanes != 1:
        raise error("lane-argument-type", f"a mask of lanes is an integer with a bit for each lane, found {describe(mask)}",
                    hint="leave it out for all lanes of the warp")
    if isinstance(mask, int) and -1 << 31 <= mask < 0:
        mask &= FULL_MASK
    return const(mask, "uint32") if isinstance(mask, int) else cast(e, "uint32")


def _vote(name: str, about: str, found: str, dt: Any = I32) -> Callable[..., Var]:
    def fn(pred: Any, mask: Any = FULL_MASK) -> Var:
        return value_call(name, (_predicate(name, pred), _mask(mask)), dt)

    return named(fn, name, f"{about}\n\nExample:\n    {found} = T.{name}(X[i] > 0)")


any_sync = _vote("any_sync", "Whether the predicate holds on any lane: int32.", "any_positive")
all_sync = _vote("all_sync", "Whether the predicate holds on all lanes: int32.", "all_positive")
ballot_sync = _vote("ballot_sync", "Bit mask of the lanes where the predicate holds: uint64.", "mask", "uint64")


@example("mask = T.ballot(X[i] > 0)")
def ballot(pred: Any) -> Var:
    """Bit mask of the lanes where the predicate holds: uint64."""
    return value_call("ballot", (_predicate("ballot", pred),), "uint64")


@example("mask = T.activemask()")
def activemask() -> Var:
    """Bit mask of the active lanes: uint64."""
    return value_call("activemask", (), "uint64")


def _clock(name: str, dt: str, what: str) -> Callable[[], Var]:
    def fn() -> Var:
        return value_call(name, (), dt)

    return named(fn, name,
                 f"{what}, seen by each thread: {dt}.\n\nStatements stay on their side of a reading.  A T.Pipelined loop that "
                 f"reads a clock in its body is not pipelined.\n\nExample:\n    start = T.{name}()\n    Y[i] = T.exp(X[i])\n"
                 f"    passed = T.{name}() - start")


clock = _clock("clock", "uint32", "Clock cycles of the SM (CPU: of the core), which wrap around")
clock64 = _clock("clock64", "int64", "Clock cycles of the SM (CPU: of the core)")
globaltimer = _clock("globaltimer", "uint64", "Nanoseconds of a clock of the device, whose resolution may be 1 us")


def _match(name: str, about: str, found: str) -> Callable[..., Var]:
    def fn(value: Any, mask: Any = FULL_MASK) -> Var:
        return value_call(name, (convert(value), _mask(mask)), "uint32")

    return named(fn, name, f"{about}\n\nExample:\n    {found} = T.{name}(I[i])")


match_any_sync = _match("match_any_sync", "Lanes that hold the same value: uint32.", "peers")
match_all_sync = _match("match_all_sync", "The mask when all lanes hold the same value, else 0: uint32.", "same")


def _width(v: Any, name: str) -> Any:
    if isinstance(v, bool) or not isinstance(v, (int, Expr)) or isinstance(v, Expr) and not v.dtype.is_int:
        raise error("lane-argument-type", f"{name} must be an integer, found {v!r}")
    if isinstance(v, int) and not 0 < v < 1 << 31:
        raise error("lane-argument-type", f"{name} is a positive number of threads or warps, found {v}",
                    expected="a positive integer")
    return v


@example("lane = T.get_lane_idx()   # tx % 32")
def get_lane_idx(warp_size: Any = None) -> Expr:
    """Lane of this thread in its warp, from the linear thread index."""
    return thread_index() % _width(32 if warp_size is None else warp_size, "warp_size")


@example("warp = T.get_warp_idx()   # tx // 32")
def get_warp_idx(ws: Any = None) -> Expr:
    """Warp of this thread in the block."""
    return thread_index() // _width(32 if ws is None else ws, "warp_size")


get_warp_idx_sync = get_warp_idx


@example("group = T.get_warp_group_idx()   # tx // 128")
def get_warp_group_idx(ws: Any = None, warps_per_group: Any = None) -> Expr:
    """Warp group (default: 4 warps) of this thread in the block."""
    if ws is None and warps_per_group is not None:
        raise error("lane-arguments", "warps_per_group needs warp_size",
                    expected="warp_size with warps_per_group", found="none")
    size = _width(32 if ws is None else ws, "warp_size")
    return thread_index() // (size * _width(4 if warps_per_group is None else warps_per_group, "warps_per_group"))


@example("if T.shuffle_elect(128):", "    T.mbarrier_expect_tx(bar[0], 1024)")
def shuffle_elect(thread_extent: Any = 0) -> Expr:
    """True in one thread of each group of thread_extent threads (0: of the block): the group's first."""
    if isinstance(thread_extent, bool) or not isinstance(thread_extent, int) or thread_extent < 0:
        raise error("lane-argument-type", f"thread_extent must be «an integer from 0», found {thread_extent!r}",
                    hint="0 means all threads of the block")
    t = thread_index()
    return binary("eq", t % thread_extent if thread_extent else t, convert(0))


thread_return = event("thread_return", "End this thread.", "if i >= n:\n    T.thread_return()")
ptx_commit_group = event("ptx_commit_group", "Close the group of this thread's asynchronous copies (sm_80+).",
                         'T.ptx_cp_async(T.access_ptr(A_s[tx, 0], "w"), T.access_ptr(A[tx, 0], "r"), 8)\nT.ptx_commit_group()',
                         op="cp_async_commit")


@example("T.async_copy(A[by * 128, 0], A_s)", "T.ptx_wait_group(0)", "T.sync_threads()")
def ptx_wait_group(n: int) -> Emitted:
    """Wait until at most n groups of this thread's asynchronous copies are pending (sm_80+)."""
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 1 << 31:
        raise error("lane-arguments", f"T.ptx_wait_group takes a non-negative integer, got {n!r}", expected="an integer from 0")
    return emit_call("cp_async_wait", n=n)


# ---- statements --------------------------------------------------------------------------------------------------------

@example('T.evaluate(T.call_extern("handle", "my_load", X.data, tx))')
def evaluate(expr: Any) -> Emitted | None:
    """Execute an expression for its effect."""
    if isinstance(expr, Emitted):
        return expr
    b = need_builder("T.evaluate")
    e = convert(expr)
    if isinstance(e, Call):
        b.emit(Evaluate(e, span=b.here()))
    return EMITTED


@example("T.buffer_store(Y, X[i], [i], predicate=i < n)")
def buffer_store(buf: Buffer, value: Any, indices: Any, predicate: Any = None) -> Emitted:
    """buf[indices] = value; with a predicate where it holds.  Raises predicate-type for a predicate of several lanes.

    buf: of any shape, dtype and scope.  indices: one per dimension, in elements.  value: a scalar or vector.
    """
    b = need_builder("T.buffer_store")
    idx = indices if isinstance(indices, (tuple, list)) else (indices,)
    if predicate is None:
        Names(b).setitem(buf, tuple(idx), value)
        return EMITTED
    cond = convert(predicate)
    if cond.dtype.lanes != 1 or not (cond.dtype.is_bool or cond.dtype.is_int):
        raise error("predicate-type", f"the predicate of T.buffer_store is one condition, found {cond.dtype}",
                    expected="a bool or an integer", hint="store the lanes one by one")
    with IfFrame(as_bool(cond)):
        Names(b).setitem(buf, tuple(idx), value)
    return EMITTED


# ---- raw If / While ------------------------------------------------------------------------------------------------

class _RawIf(IfFrame):
    """`with T.If(c): with T.Then(): … with T.Else(): …`."""

    def __init__(self, cond: Expr) -> None:
        super().__init__(cond)
        self.branches: dict[str, Any] = {}

    def close(self, builder: Any) -> Any:
        then = self.branches.get("then")
        if then is None:
            raise errors.error("raw-statement", "T.If without T.Then", expected="T.Then in T.If", found="none", span=self.span)
        return If(self.cond, then, self.branches.get("else"), span=self.span)


class _Branch(Frame):
    once = False

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def close(self, builder: Any) -> None:
        owner = builder.frames[-1]
        if not isinstance(owner, _RawIf):
            raise errors.error("raw-statement", f"T.{self.which.title()} outside T.If",
                               expected=f"T.If around T.{self.which.title()}",
                               found=f"{type(owner).__name__.removesuffix('Frame')}", span=self.span)
        owner.branches[self.which] = self.body()


@example("with T.If(i < n):", "    with T.Then():", "        Y[i] = X[i]")
def If_(c: Any) -> _RawIf:
    """Raw branch: holds T.Then() and T.Else() blocks."""
    return _RawIf(cast(convert(c), "bool"))


@example("with T.If(i < n):", "    with T.Then():", "        Y[i] = X[i]")
def Then() -> _Branch:
    """Taken branch of T.If."""
    return _Branch("then")


def Else() -> _Branch:
    """Other branch of T.If.

    Example:
        with T.If(i < n):
            with T.Then():
                Y[i] = X[i]
            with T.Else():
                Y[i] = 0
    """
    return _Branch("else")


@example('count = T.alloc_var("int32")', "with T.While(count < 4):", "    count = count + 1")
def While_(c: Any) -> WhileFrame:
    """Raw while loop."""
    return WhileFrame(cast(convert(c), "bool"))


@example("Y[i] = T.__ldg(X[i])")
def ldg(A: Any, idx: Any = None) -> Expr:
    """Load by the read-only cache: T.__ldg(A[i]) or T.__ldg(A, i).

    A: an element or a buffer in global memory.  idx: of the element, where A is a buffer.
    """
    if isinstance(A, Buffer):
        if idx is None:
            raise error("lane-arguments", "T.__ldg of a buffer needs an index",
                        expected="an index with the buffer", found="none")
        A = A[idx]
    if not isinstance(A, Load):
        raise error("extern-argument", f"T.__ldg needs «an element», found {describe(A)}")
    return call("ldg", (AddressOf(A.buffer, A.indices),), A.dtype)


@example("T.prefetch_l2(X[tx * 32], 128)")
def prefetch_l2(A: Any, nbytes: Any) -> Emitted:
    """Bring `nbytes` bytes from an element in global memory on to the L2 cache; nothing waits for them.

    A: an element of a global tensor, at an address that is a multiple of 16 bytes.  nbytes: a multiple of 16, inside the
    tensor.  Each thread that executes it asks for its own bytes.  Without effect on the CPU and on the simulators.  Raises
    extern-argument.
    """
    if not isinstance(A, Load) or A.buffer.scope_name != GLOBAL:
        raise error("extern-argument", f"T.prefetch_l2 needs an element in global memory, found {describe(A)}",
                    expected="an element of a tensor")
    return emit_call("prefetch_l2", (AddressOf(A.buffer, A.indices), convert(nbytes)))

__all__ = ["Else", "Then", "activemask", "all_sync", "any_sync", "ballot", "ballot_sync", "buffer_store", "clock", "clock64",
           "evaluate", "get_lane_idx", "get_warp_group_idx", "get_warp_idx", "get_warp_idx_sync", "globaltimer",
           "match_all_sync", "match_any_sync", "named_barrier_arrive", "prefetch_l2", "ptx_commit_group", "ptx_wait_group",
           "shuffle_elect", "sync_grid", "sync_threads", "sync_warp", "thread_return"]
