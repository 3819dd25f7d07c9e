"""Operations between the lanes of a warp: shuffles, votes, lane numbers.

One CPU thread runs all threads of a block, one statement at a time. A statement that holds such a call first evaluates the
call's operand for every thread into an array. The call itself then reads the other lane's entry (votes: all entries). Where
only the threads of a mask execute the statement (Masked), the others do not participate: votes and matches are over the lanes
that execute it and that the call's own lane mask names. Arrays are filled up to whole warps. Exchanges that CUDA leaves
undefined fail the call (lane_faults.py).
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Call, Const, dtype, walk
from tilelang.target.cpu import unsupported
from tilelang.target.llvm_values import splat
from tilelang.target.thread_calls import BLOCK_VOTES, EXCHANGES, LANE_NUMBERS, MATCHES, SHUFFLES, VOTES, WARP

from .barriers import warp_role_barrier
from .coroutine import WARP_ROLE_BARRIERS, add_word, get_word, word
from .lane_faults import check_mask, fail_if, lanes_of, mask_of
from .code import CallPrinter, Code
from .state import SOURCE, Storage
from .text import Fn
from .threads import lane_array, over_threads, this_thread
from .types import literal, load, memory_type, store, value_type


def exchanges_in(s: Any) -> list[Call]:
    """The calls in a statement that read other lanes, inner ones first."""
    return [n for n in reversed(list(walk(s, Call))) if n.op in (*EXCHANGES, *BLOCK_VOTES)]


def _is_active(cx: Code, thread: str) -> str:
    """i1: whether a thread (or a missing one of an incomplete last warp) executes the statement."""
    if cx.block.active is not None:
        return load(cx.f, dtype("bool"), cx.f.at(cx.block.active, "i8", thread))
    return "true" if cx.block.count % WARP == 0 else cx.f.less(thread, str(cx.block.count))


def threads_in_warps(cx: Code) -> str:
    """i64: 32 for each warp of which at least one lane executes the statement."""
    f, total = cx.f, cx.f.alloca("i64", hint="come")
    f.do(f"store i64 0, ptr {total}")
    for lo, hi in cx.block.ranges:
        with f.loop(str(lo), str(hi), WARP, hint="warp") as first:
            some = f.let(f"icmp ne i32 {lanes_of(cx, cx.block.active, first)}, 0")
            add_word(f, total, 0, f.let(f"select i1 {some}, i64 {WARP}, i64 0"))
    return f.let(f"load i64, ptr {total}")


def publish(cx: Code, e: Call) -> None:
    """Evaluate the operand of an exchange for all threads that execute it; for a vote of the block also the result."""
    _publish(cx, e)
    mask = mask_of(cx, e) if e.op in (*SHUFFLES, *VOTES, *MATCHES) else None
    if mask is not None:
        check_mask(cx, e, mask)
    if e.op in BLOCK_VOTES:
        cx.block.voted[id(e)] = _count_votes(cx, e)


def _publish(cx: Code, e: Call) -> None:
    if not e.args:
        cx.block.exchanged[id(e)] = Storage("null", cx.block.count)
        return
    dt = e.args[0].dtype
    f, mt = cx.f, memory_type(dt)
    array = lane_array(cx, dt, "lanes")

    def one() -> None:
        thread = this_thread(cx)
        v = f.choose(_is_active(cx, thread), value_type(dt), lambda: cx.value(e.args[0]), lambda: literal(0, dt))
        store(f, dt, v, f.at(array, mt, thread))

    over_threads(cx, one)
    cx.block.exchanged[id(e)] = Storage(array, cx.block.count)


def _published(cx: Code, e: Call) -> tuple[str, str, str]:
    """(array of the operands, this thread, first thread of its warp)."""
    where = cx.block.exchanged.get(id(e))
    if where is None or cx.block.tid is None:
        raise unsupported(f"{e.op} under a condition or loop that depends on the thread", span=e.span or cx.span,
                          hint="all lanes of a warp must reach it: move it out of the branch")
    return where.base, cx.block.tid, cx.f.let(f"and i64 {cx.block.tid}, -{WARP}")


def _shuffle(cx: Code, e: Call) -> str:
    """The value of another lane. Beyond its segment of `width` lanes a lane reads its own value (shfl_idx wraps; shfl_xor reads
    segments before its own).

    Source: PTX ISA, "shfl.sync".
    """
    array, t, _ = _published(cx, e)
    f, dt, width = cx.f, e.args[0].dtype, e.options.width
    other = cx.index(e.args[1])
    start = f.let(f"and i64 {t}, {-width}")
    if e.op == "shfl_idx":
        src = f.add(start, f.hidden(f.let(f"and i64 {other}, {width - 1}")))
    else:
        op = {"shfl_xor": "xor", "shfl_up": "sub", "shfl_down": "add"}[e.op]
        src = f.let(f"{op} i64 {t}, {f.let(f'and i64 {other}, {WARP - 1}')}")
        inside = f.let(f"icmp sge i64 {src}, {start}") if op == "sub" else f.less(src, f.add(start, str(width)))
        src = f.let(f"select i1 {inside}, i64 {src}, i64 {t}")
    executes = _is_active(cx, src)
    if executes != "true":
        fail_if(cx, e, SOURCE, f.let(f"xor i1 {executes}, true"))
        src = f.let(f"select i1 {executes}, i64 {src}, i64 {t}")
    return load(f, dt, f.at(array, memory_type(dt), src))


def _participants(cx: Code, e: Call, first: str) -> str:
    """i32: the lanes that execute a vote and are in its mask."""
    on = lanes_of(cx, cx.block.active, first)
    if len(e.args) < 2 or isinstance(e.args[1], Const) and int(e.args[1].value) & 0xFFFFFFFF == 0xFFFFFFFF:
        return on
    named = cx.cast_value(e.args[1], dtype("uint32"))
    return cx.f.let(f"and i32 {on}, {named}")


def _vote(cx: Code, e: Call) -> str:
    """The bits of the lanes whose predicate holds, then any, all, or the bits themselves."""
    array, _, first = _published(cx, e)
    f, dt = cx.f, e.args[0].dtype.with_lanes(WARP)
    v = load(f, dt, f.at(array, memory_type(dt.scalar), first))
    if not dt.is_bool:
        v = f.let(f"icmp ne {value_type(dt)} {v}, {splat('0', value_type(dt))}")
    on = _participants(cx, e, first)
    bits = f.let(f"and i32 {f.let(f'bitcast <{WARP} x i1> {v} to i32')}, {on}")
    ty = value_type(e.dtype)
    if e.op.startswith("ballot"):
        return bits if ty == "i32" else f.let(f"zext i32 {bits} to {ty}")
    hit = f.let(f"icmp ne i32 {bits}, 0") if e.op == "any_sync" else f.let(f"icmp eq i32 {bits}, {on}")
    return hit if ty == "i1" else f.let(f"zext i1 {hit} to {ty}")


def _match(cx: Code, e: Call) -> str:
    """The lanes that hold the same bits as this one; or all lanes if all hold the same bits, else none."""
    array, t, first = _published(cx, e)
    f, mt = cx.f, memory_type(e.args[0].dtype)
    size = max(8, e.args[0].dtype.bits)
    element, row = f"i{size}", f"<{WARP} x i{size}>"
    own = f.let(f"load {element}, ptr {f.at(array, mt, t)}, align {size // 8}")
    every = f.let(f"load {row}, ptr {f.at(array, mt, first)}, align {size // 8}")
    one = f.let(f"insertelement {row} poison, {element} {own}, i64 0")
    same = f.let(f"icmp eq {row} {every}, {f.let(f'shufflevector {row} {one}, {row} poison, <{WARP} x i32> zeroinitializer')}")
    on = _participants(cx, e, first)
    bits = f.let(f"and i32 {f.let(f'bitcast <{WARP} x i1> {same} to i32')}, {on}")
    if e.op == "match_any_sync":
        return bits
    return f.let(f"select i1 {f.let(f'icmp eq i32 {bits}, {on}')}, i32 {on}, i32 0")


def _active(cx: Code, e: Call) -> str:
    """The lanes that execute the statement together."""
    _, _, first = _published(cx, e)
    on, ty = lanes_of(cx, cx.block.active, first), value_type(e.dtype)
    return on if ty == "i32" else str(2**WARP - 1) if on == "-1" else cx.f.let(f"zext i32 {on} to {ty}")


def _block_vote(cx: Code, e: Call) -> str:
    """The result of a vote of the block, which was counted before the statement that uses it."""
    got = cx.block.voted.get(id(e))
    if got is None:
        raise unsupported(f"{e.op} inside another statement", span=e.span or cx.span, hint="give its result a name first")
    return got


def _count_votes(cx: Code, e: Call) -> str:
    """Count how many threads of the block (that have not returned) vote yes; whether all or any do: one value for the block."""
    array, dt, f = cx.block.exchanged[id(e)].base, e.args[0].dtype, cx.f
    total, present = f.alloca("i64", hint="votes"), f.alloca("i64", hint="voters")
    f.do(f"store i64 0, ptr {total}")
    f.do(f"store i64 0, ptr {present}")
    for lo, hi in cx.block.ranges:
        with f.loop(str(lo), str(hi), hint="voter") as i:
            v = load(f, dt, f.at(array, memory_type(dt), i))  # zero for threads that do not vote
            yes = v if dt.is_bool else f.let(f"icmp ne {value_type(dt)} {v}, 0")
            add_word(f, total, 0, f.let(f"zext i1 {yes} to i64"))
            votes_too = _is_active(cx, i) if cx.block.active is not None else "true"
            add_word(f, present, 0, f.let(f"zext i1 {votes_too} to i64"))
    votes, voters = (f.let(f"load i64, ptr {p}") for p in (total, present))
    if e.options.key is not None:
        return _vote_of_warp_roles(cx, e, e.options.key, votes, voters)
    return _answer(f, e.op, votes, voters)


def _answer(f: Fn, op: str, votes: str, voters: str) -> str:
    if op == "syncthreads_count":
        return f.let(f"trunc i64 {votes} to i32")
    least = "1" if op == "syncthreads_or" else voters
    return f.let(f"zext i1 {f.let(f'icmp sge i64 {votes}, {least}')} to i32")


def _vote_of_warp_roles(cx: Code, e: Call, number: int, votes: str, voters: str) -> str:
    """The result over all warp roles that have not ended, computed at their barrier."""
    f = cx.f
    counts, result = WARP_ROLE_BARRIERS + 2 * (number + 1), WARP_ROLE_BARRIERS + 2 * (number + 2)
    add_word(f, "%state", counts, votes)
    add_word(f, "%state", counts + 1, voters)

    def count() -> None:
        both = [get_word(f, "%state", counts + k) for k in (0, 1)]
        f.do(f"store i64 {f.let(f'zext i32 {_answer(f, e.op, *both)} to i64')}, ptr {word(f, '%state', result)}")
        for k in (0, 1):
            f.do(f"store i64 0, ptr {word(f, '%state', counts + k)}")

    warp_role_barrier(cx, number, e.options.arriving, count)
    return f.let(f"trunc i64 {get_word(f, '%state', result)} to i32")


def _number(cx: Code, e: Call) -> str:
    """The lane, warp or warp group of the thread, or whether it is the elected thread."""
    f = cx.f
    given = [int(a.value) for a in e.args if isinstance(a, Const)]
    if len(given) != len(e.args):
        raise unsupported(f"{e.op} with run-time sizes", span=e.span or cx.span)
    t = cx.block.tid or "0"
    warp = given[0] if given and given[0] else WARP
    if e.op == "shuffle_elect":
        size = given[0] if given and given[0] else cx.block.count
        return f.let(f"icmp eq i64 {f.let(f'urem i64 {t}, {size}')}, 0")
    if e.op == "get_lane_idx":
        v = f.let(f"urem i64 {t}, {warp}")
    else:
        group = (given[1] if len(given) > 1 else 4) if e.op == "get_warp_group_idx" else 1
        v = f.let(f"udiv i64 {t}, {warp * group}")
    ty = value_type(e.dtype)
    return v if ty == "i64" else f.let(f"trunc i64 {v} to {ty}")


LANE_CALL_PRINTERS: dict[str, CallPrinter] = {
    **{op: _shuffle for op in SHUFFLES}, **{op: _vote for op in VOTES}, **{op: _match for op in MATCHES}, "activemask": _active,
    **{op: _number for op in LANE_NUMBERS}, **{op: _block_vote for op in BLOCK_VOTES},
}
