"""Chooses and emits the schedule of the consumer warp groups for a pipelined loop whose tiles a producer loads.

The schedules are: the loop as it stands, with waits and releases; one GEMM in flight while the next stage is waited for;
the second of two GEMMs under the next iteration (overlap_gemms.py); a cleared accumulator in two buffers, so that a GEMM
runs during the promotion of the one before (double_buffered_accumulator.py); or several GEMMs that use one accumulator in
turn (chained_accumulators.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilelang.ir import (Buffer, Expr, If, Stmt, binary, const, convert, is_const, replace, seq, stmts_of, substitute, walk,
                         with_options, FRAGMENT)
from tilelang.ops import Gemm, Reduce

from ..legalize.hopper_features import hopper
from .overlap_gemms import Pair, two_gemms
from .chained_accumulators import Chain, chained, accumulator_chain
from ..analysis.statements import rename
from ..analysis.statements import do
from .rings import GROUP, Ring, WarpRoleLoop, hold, pin
from .pingpong_barriers import signal_next_group, has_iterations, uses_ping_pong, wait_for_own_group
from .double_buffered_accumulator import alternate, double_buffered_accumulator

_SERIAL = {"num_stages": None, "order": None, "stage": None, "group": None}


def consumer(r: WarpRoleLoop, finished: Sequence[Stmt] = (), tiles: Iterable[Buffer] = ()) -> list[Stmt]:
    """The consumers' code: the loop without its copies, and what follows it.  Sets `r.overlap` to a text for the report.

    finished: statements to run after the last use of `tiles`, which the loop only reads.
    """
    pair = _pair(r)
    if isinstance(pair, Pair):
        r.overlap = "the second GEMM of an iteration runs under the next iteration's first GEMM and its softmax"
        late = any(r.body.items[pair.second].touches(b.data) for b in tiles)
        return [*_rotated(r, pair, [] if late else list(finished)), *(finished if late else ())]
    if _overlapped(r):
        r.overlap = "wgmma in flight: the GEMM of a step runs while the next stage is waited for"
        return [*_one_running(r), *finished]
    chain = accumulator_chain(r)
    if chain is not None:
        r.overlap = "chunks of a GEMM alternate in the same registers, each under the promotion of the one before"
        return [*chained(r, chain), *finished]
    parts = double_buffered_accumulator(r)
    ping_pong = "; ping-pong: warp groups start one GEMM after another" if uses_ping_pong(r) else ""
    if parts is not None:
        r.overlap = f"double-buffered accumulator: each GEMM runs under the promotion of the one before{ping_pong}"
        return [*alternate(r, parts), *finished]
    r.overlap = f"wgmma synchronous: {_why_synchronous(r, pair)}{ping_pong}"
    return [*_plain(r), *finished]


def _why_synchronous(r: WarpRoleLoop, pair: str) -> str:
    """Why each wgmma of the loop is waited for where it is issued.  pair: why a second GEMM is not moved ("" if none)."""
    if pair:
        return f"the second GEMM is not moved: {pair}"
    work = [x.stmt for i, x in enumerate(r.body.items) if i not in r.loads]
    gemms: list[Gemm] = [s for s in work if isinstance(s, Gemm)]
    if len(gemms) > 2:
        return f"the loop has {len(gemms)} GEMMs, schedules that keep one in flight take two"
    others = sorted({type(s).__name__ for s in work if not isinstance(s, Gemm)})
    if others:
        return f"the loop also holds {', '.join(others)}"
    if not is_const(gemms[0].clear_accum, False):
        return "the accumulator is cleared in each iteration and there is no room for a second one"
    if not all(any(x.buffer in ring.buffers for ring in r.rings) for x in (gemms[0].a, gemms[0].b)):
        return "an operand is not in a ring of stages"
    return "the launch has GEMMs outside the loop"


def chain_of(r: WarpRoleLoop) -> Chain | None:
    """The chain of GEMMs in one accumulator, if that is the schedule of the loop; else None."""
    return None if isinstance(_pair(r), Pair) or _overlapped(r) else accumulator_chain(r)


def late_rings(r: WarpRoleLoop) -> list[Ring]:
    """The rings whose stages the consumers read one iteration later than the others."""
    pair = _pair(r)
    return [x for x in r.rings if x.first == pair.second] if isinstance(pair, Pair) else []


def takes_slow_rings(r: WarpRoleLoop) -> bool:
    """Whether the schedule supports stages that last several iterations: it must keep their uses in program order."""
    return not isinstance(_pair(r), Pair) and not _overlapped(r)


def _pair(r: WarpRoleLoop) -> Pair | str:
    return two_gemms(r.body, r.loads, set(r.versions), r.consumer_registers, r.groups * GROUP)


def _kept(r: WarpRoleLoop) -> tuple[list[Stmt], dict[int, int]]:
    """(the body without its copies, id of a statement -> index of its item)."""
    copies = {id(r.body.items[i].stmt) for i in r.loads}
    return ([s for s in stmts_of(r.loop.body) if id(s) not in copies],
            {id(x.stmt): i for i, x in enumerate(r.body.items)})


def _plain(r: WarpRoleLoop) -> list[Stmt]:
    k, ping_pong = r.loop.var, uses_ping_pong(r)
    slot, _ = r.slot(k)
    kept, index = _kept(r)
    out: list[Stmt] = []
    for s in kept:
        i = index.get(id(s), -1)
        out += r.filled(i, k)
        out += r.using([r.select(s, k)], [i], k)
        for ring in r.rings:
            if ring.last == i and ring.iterations == 1:
                out += r.release(ring, slot)
        if ping_pong and isinstance(s, Gemm):
            out.append(signal_next_group(r, binary("eq", k, convert(r.loop.start))))
    loop = with_options(replace(r.loop, kind="serial", body=seq(*out)), **_SERIAL)
    return [If(has_iterations(r), wait_for_own_group(r)), loop] if ping_pong else [loop]


def _one_running(r: WarpRoleLoop) -> list[Stmt]:
    """One GEMM that stays in flight while the next stage is waited for: a stage is released one iteration later."""
    k = r.loop.var
    before = (r.step(k) + (r.stages - 1)) % r.stages if r.base is not None else (r.step(k) - 1) % r.stages
    kept, index = _kept(r)
    out: list[Stmt] = []
    for s in kept:
        i = index.get(id(s), -1)
        out += r.filled(i, k)
        done: Any = r.select(s, k)
        out.append(with_options(done, wait=1) if isinstance(s, Gemm) else done)
        started = binary("gt", k, convert(r.loop.start))
        # No sync_warp is needed: the wait for the wgmma has already ordered the warps of the group.
        out += [r.released(ring, before, started) for ring in r.rings if ring.last == i]
    loop = with_options(replace(r.loop, kind="serial", body=seq(*out)), **_SERIAL)
    product: Any = next(s for s in kept if isinstance(s, Gemm))
    held = pin(product.c.buffer)
    extent = convert(r.loop.extent)
    last = convert(r.loop.start) + extent - 1
    final, _ = r.slot(last)
    some = binary("gt", extent, const(0, extent.dtype))
    releases = [r.released(x, final, some) for x in r.rings] if r.repeated else []
    return [held, loop, do("wgmma_wait", n=0), held, *releases]


def _rotated(r: WarpRoleLoop, pair: Pair, finished: list[Stmt]) -> list[Stmt]:
    """The loop with the second GEMM of an iteration under the next iteration (overlap_gemms.py).

    finished: statements to run after the last run of the first GEMM.
    """
    items, k, start = r.body.items, r.loop.var, convert(r.loop.start)
    kept, index = _kept(r)
    at = {i: next(n for n, s in enumerate(kept) if index.get(id(s)) == i) for i in (pair.first, pair.second, pair.waits)}
    before, product, second = kept[:at[pair.first]], kept[at[pair.first]], kept[at[pair.second]]
    free = kept[at[pair.first] + 1:at[pair.waits]]
    bound = kept[at[pair.waits]:at[pair.second]]
    a: Any = items[pair.first].stmt
    b: Any = items[pair.second].stmt

    def of(stmts: list[Stmt], it: Expr) -> list[Stmt]:
        return [r.select(s if it is k else substitute(s, {k: it}), it) for s in stmts]

    def started(s: Stmt, item: int, it: Expr, running: bool) -> list[Stmt]:
        return [*r.filled(item, it), *(with_options(x, wait=-1) if running else x for x in of([s], it))]

    def released(item: int, it: Expr) -> list[Stmt]:
        slot, _ = r.slot(it)
        return [x for ring in r.rings if ring.last == item for x in r.release(ring, slot)]

    opening = [*of(before, start), *started(product, pair.first, start, False), *released(pair.first, start),
               *of(free, start), *of(bound, start)]
    iteration = [*of(before, k), *started(product, pair.first, k, True), *started(second, pair.second, k - 1, True),
            do("wgmma_wait", n=1), pin(a.c.buffer), *released(pair.first, k), *_held(of(free, k)),
            do("wgmma_wait", n=0), pin(b.c.buffer), pin(b.a.buffer), *released(pair.second, k - 1), *of(bound, k)]
    extent = convert(r.loop.extent)
    loop = with_options(replace(r.loop, kind="serial", start=start + 1, extent=extent - 1, body=seq(*iteration)), **_SERIAL)
    last = start + extent - 1
    closing = [*started(second, pair.second, last, False), *released(pair.second, last)]
    return [If(binary("gt", extent, const(0, extent.dtype)), seq(*rename(opening), loop, *finished, *closing),
               seq(*finished) if finished else None, span=r.loop.span)]


def _held(stmts: list[Stmt]) -> list[Stmt]:
    """Statements that run during a GEMM, with the wait for the GEMM held behind a row reduction.

    ptxas would otherwise move the wait to the front: that frees the registers of the GEMM sooner, and ptxas does not count
    the cycles spent waiting.  A maximum over the lanes of a row has the longest latency, so the wait is held behind it.
    """
    at = next((n for n, s in enumerate(stmts) if isinstance(s, Reduce) and s.dst.buffer.scope_name == FRAGMENT and
               s.dst.dtype == "float32"), None)
    if at is None:
        return stmts
    made: Any = stmts[at]
    return [*stmts[:at + 1], hold(made.dst.buffer), *stmts[at + 1:]]


def _overlapped(r: WarpRoleLoop) -> bool:
    """Whether the loop consists of one wgmma GEMM, which may stay in flight while the next stage is waited for."""
    rest = [x.stmt for i, x in enumerate(r.body.items) if i not in r.loads]
    gemms: list[Gemm] = list(walk(r.launch.body, Gemm))
    if len(rest) != 1 or len(gemms) != 1 or rest[0] is not gemms[0] or not hopper(r.cx).wgmma:
        return False
    op = gemms[0]
    return all(any(x.buffer in ring.buffers for ring in r.rings) for x in (op.a, op.b)) and is_const(
        op.clear_accum, False)


__all__ = ["chain_of", "consumer", "late_rings", "takes_slow_rings"]
