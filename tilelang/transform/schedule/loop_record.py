"""Makes the record of a pipelined loop (analysis/loop_schedule.py) from what the compiler has chosen: places, bound, cycles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from tilelang.errors import TileLangError
from tilelang.ir import (Bind, Const, Expr, For, Launch, Load, Var, contains, convert, free_vars, statements, substitute, walk,
                         FRAGMENT, GLOBAL, SHARED)
from tilelang.ir.evaluate import evaluate
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import choose_wgmma, wgmma_cycles
from tilelang.ops.gemm.select import GemmWarpPolicy
from tilelang.target.machine import UNIT_RATES, UnitRates, chip_of, kernel_rates, unit_rates

from ..analysis import loop_schedule
from ..analysis.item_cost import Cycles
from ..analysis.loop_items import LoopItems
from ..analysis.loop_schedule import Bound, Place, Schedule
from ..analysis.pipeline_loops import Item
from .consumer_schedule import items_of, steady
from .rings import GROUP, WarpRoleLoop
from ..analysis.simulate_loop import Blocks, Event, RingUse, Simulation, Usage, Wait


def record_of(r: WarpRoleLoop, registers: Sequence[int]) -> Schedule:
    """The record of a loop with warp roles, whose consumers' code has been made."""
    loop, threads = items_of(r), r.groups * GROUP
    loop.cost |= {i: Cycles(wgmma_cycles(loop.gemm(i), r.groups)) for i in loop.gemms}
    events, waits = steady(r, loop)
    filled = {i: use for x, use in zip(r.rings, loop.rings) for i in x.items}
    shared = {e.storage for x in loop.items for e in x.effects}  # tf32 operands are rounded there
    split = {i: "N" if plan.warps[1] > 1 else "M" for i in loop.gemms if not isinstance(
        plan := choose_wgmma(loop.gemm(i), threads, shared), str)}
    versions = {b.name: v.shape[0] for x in r.rings for b, v in x.buffers.items()}
    versions |= {e.buffer.name: r.made[e.storage] for x in loop.items for e in x.effects if e.storage in r.made}
    _pass_tiles(loop, {loop.gemm(i).c.buffer.data for i, how in split.items() if how == "N"})
    made = _record(r.launch, r.loop, loop, (events, waits), filled, dict.fromkeys(sorted(r.loads), "tma"), 90)
    named = dict.fromkeys((loop.gemm(i).c.buffer.name, how) for i, how in split.items())
    return replace(made, split=tuple(named), registers=tuple(registers), versions=tuple(sorted(versions.items())))


def _pass_tiles(own: LoopItems, columns: set[Var]) -> None:
    """Counts what goes through shared memory unseen in the program: results on their way to memory, and accumulators of which
    each warp group has some columns (`columns`) where an A operand in registers is made of them, whole in each group."""
    wanted = {op.a.buffer.data for op in map(own.gemm, own.gemms) if op.a.buffer.scope_name == FRAGMENT}
    for i in own.own:
        op: Any = own.items[i].stmt
        if isinstance(op, Copy) and (op.src.buffer.scope_name, op.dst.buffer.scope_name) == (FRAGMENT, GLOBAL):
            own.passed[i] = UNIT_RATES.staging
        used = {e.storage: e.buffer for e in own.items[i].effects if e.reads and e.storage in columns}
        if i not in own.gemms and used and any(e.writes and e.storage in wanted for e in own.items[i].effects):
            moved = sum(b.bits // 8 for b in used.values()) / UNIT_RATES.port
            own.cost[i] = Cycles().plus(own.cost[i], own.groups)
            own.passed[i] = moved + max(0.0, moved * own.groups - own.cost[i].ordinary)  # written, then read by all at work
            own.exchanged.add(i)


def record_of_threads(launch: Launch, loop: For, items: list[Item], stage: Sequence[int], order: Sequence[int],
                      ahead: Mapping[int, int], boxed: Collection[int], capability: int | str) -> Schedule:
    """The record of a loop without warp roles.  ahead: copies that run asynchronously, boxed ones by TMA -> versions."""
    ranked = sorted((i for i in range(len(items)) if i not in ahead), key=lambda i: order[i])
    low = min((stage[i] for i in ranked), default=0)
    rings = {i: RingUse(frozenset(j for j in ranked if any(e.writes and items[j].touches(e.storage) for e in items[i].effects)),
                        _moved(items[i]), n) for i, n in ahead.items()}
    rings = {i: use for i, use in rings.items() if use.users}
    own = LoopItems(items, ranked, 1, (), tuple(rings.values()))
    own.gemms = ()  # the threads wait for each of them
    for i in ranked:
        op: Any = items[i].stmt
        if isinstance(op, Gemm):
            rate = kernel_rates("mma", capability).mma * 16 / op.a.dtype.bits
            fits = capability == 90 and not isinstance(choose_wgmma(op, launch.num_threads), str)
            own.cost[i] = Cycles(wgmma_cycles(op) if fits else 2.0 * op.m * op.n * op.k / rate)
    loads = {i: "tma" if i in boxed else "cp.async" if i in ahead else "threads" for i, x in enumerate(items) if _is_load(x)}
    return _record(launch, loop, own, (tuple(Event(i, stage[i] - low) for i in ranked), {}), rings, loads, capability)


def record_of_blocks(launch: Launch, loop: For, items: list[Item], stage: Sequence[int], order: Sequence[int],
                     ahead: Mapping[int, int], capability: int | str, resident: int) -> Schedule:
    """The record of a loop whose blocks use each unit while the warps of the others wait.  ahead: stores of tiles whose loads
    are in flight in registers -> versions of the tile."""
    rates = unit_rates(capability)
    ranked = sorted(range(len(items)), key=lambda i: order[i])
    low = min((stage[i] for i in ranked), default=0)
    own = LoopItems(items, ranked, 1, (), ())
    few = max(1.0, rates.simds / -(-launch.num_threads // 64))  # a block of fewer warps leaves SIMDs to others
    usage = [replace(x, units=tuple((u, c * few) for u, c in x.units)) for x in (
        _usage(own, i, ahead, launch.num_threads, rates, capability) for i in ranked)]
    stores, alone = {n for n, i in enumerate(ranked) if i in ahead}, max(ahead.values(), default=0) == 1
    meets = [n for n in stores if n + 1 not in stores] + [max(0, n - 1) for n in stores if alone and n - 1 not in stores]
    for n in meets:
        usage[n] = replace(usage[n], latency=usage[n].latency + rates.meet)
    events, groups = tuple(Event(i, stage[i] - low) for i in ranked), max(1, int(resident / few))
    own.gemms, own.groups = (), groups
    run = Blocks(events, usage, groups) if events else None
    iterations, blocks = _iterations(launch, loop), prod(_numbers(launch) or [0])
    memory, (_, most) = _from_memory(own, iterations * blocks), _memory_rates(blocks, capability)
    sums = {u: sum(dict(p.units).get(u, 0.0) for p in usage) / few for u in _UNITS}
    bound = Bound(tuple((u, round(c, 1)) for u, c in {**sums, "memory": memory / most if most else 0.0}.items()))
    made = tuple(replace(_item(own, i, i in ahead, max(1, launch.num_threads), rates.by_threads), unit=u, cycles=round(c, 1))
                 for i, p in sorted(zip(ranked, usage)) for u, c in [max(p.units or (("FMA", 0.0),), key=lambda x: x[1])])
    cycles = max(run.cycles / groups / few if run else 0.0, bound.cycles)
    named = {i: tuple(dict.fromkeys(e.buffer.name for e in items[i].effects if e.writes)) for i in ahead}
    places = () if run is None else _places(own, run, events, {}, run.cycles)
    versions = tuple(sorted((b, n) for i, n in ahead.items() if n > 1 for b in named[i]))
    return Schedule(loop.var.name, iterations, blocks, 0, made, places, versions, (), tuple(
        (b, "registers") for i in ahead for b in named[i]), (), bound, round(cycles, 1), round(cycles, 1), resident)


_UNITS = "tensor cores", "loads", "shared memory", "FMA"


def _usage(own: LoopItems, i: int, ahead: Mapping[int, int], threads: int, rates: UnitRates, capability: int | str) -> Usage:
    """What an item takes.  A special function keeps the same units busy as other arithmetic, for longer."""
    x, cost = own.items[i], own.cost[i]
    op: Any = x.stmt
    busy = cost.arithmetic * UNIT_RATES.arithmetic / rates.arithmetic + cost.special * (1 - rates.special / rates.arithmetic)
    if isinstance(op, Gemm):
        read, moved = _operands_of(op, threads)
        chip, bits = chip_of(capability), op.a.dtype.bits
        slower = (chip and chip.peak(16, True) or 1.0) / (chip and chip.peak(bits, True) or 1.0)
        tensor = 2.0 * op.m * op.n * op.k * slower / kernel_rates("mma", capability).mma
        return Usage((("tensor cores", tensor), ("shared memory", read / rates.port),
                     ("FMA", moved / 4 / rates.arithmetic + tensor / _SLOTS)),
                    rates.fetch + rates.drain + read / rates.port / max(1, op.k * bits // _STEP))
    if _is_load(x) or isinstance(op, Copy) and any(e.reads and e.buffer.scope_name == GLOBAL for e in x.effects):
        filled = sum(prod(n for n in op.dst.extents if isinstance(n, int)) for op in [op] if isinstance(op, Copy))
        moved = (filled * op.dst.dtype.bits // 8 if isinstance(op, Copy) else _moved(x)) / rates.by_threads
        return Usage((("loads", moved), ("FMA", _ADDRESS * moved / 16)), rates.latency if _is_load(x) else 0.0,
                    None, not _is_load(x))
    if i in ahead:
        first = next((n for n, j in enumerate(own.own) if any(
            a.writes and b.reads and a.storage is b.storage for a in own.items[j].effects for b in x.effects)), None)
        return Usage((("shared memory", _moved(x) / rates.port),), 0.0, None if first is None else (first, rates.latency))
    if isinstance(op, Copy) and any(e.buffer.scope_name in SHARED for e in x.effects):
        return Usage((("shared memory", _moved(x) / rates.port),), rates.fetch)
    lanes = 2 * (rates.fetch + 8) if type(op).__name__ == "Reduce" else 0.0  # values that two exchanges pass between lanes
    return Usage((("FMA", busy),), lanes)


_SLOTS = 4  # in which one matrix instruction of 4 passes runs: it is issued in one of them, like arithmetic
_STEP = 512  # bits of a row that the warps load before they multiply, two instructions' of 16 bits
_ADDRESS = 3.0  # instructions for the addresses of a load of 16 bytes


def _operands_of(op: Any, threads: int) -> tuple[float, float]:
    """(bytes of shared memory that the warps of a GEMM load, those of them whose elements they rearrange)."""
    even = GemmWarpPolicy.FullRow.even_partition(op.m, op.n, max(1, threads // 64), (16, 16))
    rows, columns = op.plan.warps or even or (1, 1)
    tiles = ((op.a, op.m * op.k * columns, op.transpose_a), (op.b, op.n * op.k * rows, not op.transpose_b))
    read = [(n * r.dtype.bits / 8, across) for r, n, across in tiles if r.buffer.scope_name in SHARED]
    return sum(n for n, _ in read), sum(n for n, across in read if across)


def _record(launch: Launch, loop: For, own: LoopItems, steady: tuple[tuple[Event, ...], dict[int, Wait]],
            filled: dict[int, RingUse], loads: dict[int, str], capability: int | str) -> Schedule:
    """filled: the copies that run ahead, and their rings.  loads: how each tile is loaded."""
    events, waits = steady
    groups = own.groups if own.gemms else 0
    iterations, blocks = _iterations(launch, loop), prod(_numbers(launch) or [0])
    memory, (at, most) = _from_memory(own, iterations * blocks), _memory_rates(blocks, capability)
    fed = UNIT_RATES.by_threads if "cp.async" in loads.values() else UNIT_RATES.loads
    rate = min(fed, at * sum(_moved(own.items[i]) for i in loads) / memory if memory and at else fed)
    close, seen = ({use: replace(use, rate=x, latency=UNIT_RATES.latency if x == fed else UNIT_RATES.far, wait=UNIT_RATES.wait)
                    for use in (*filled.values(), *own.rings)} for x in (fed, rate))
    near, run = (own.simulated(events, waits, own.groups, [x[use] for use in own.rings], True) if events and k < 1 + (
        rate != fed) else None for k, x in enumerate((close, seen)))
    run = run or near
    filled, own.rings = {i: seen[use] for i, use in filled.items()}, tuple(map(seen.__getitem__, own.rings))
    items = tuple(_item(own, i, i in filled or i in own.gemms, max(1, launch.num_threads), fed) for i in range(len(own.items)))
    bound = _bound(own, loads, memory / most if most else 0.0)
    cycles = max(run.cycles if run else 0.0, bound.cycles)
    named = {i: tuple(dict.fromkeys(e.buffer.name for e in own.items[i].effects if e.writes)) for i in loads}
    versions = {b: use.stages for i, use in filled.items() for b in named[i] if use.stages > 1}
    return Schedule(loop.var.name, iterations, blocks, groups, items,
                    () if run is None else _places(own, run, events, filled, cycles), tuple(sorted(versions.items())), (),
                    tuple((b, how) for i, how in loads.items() for b in named[i]), (), bound, round(cycles, 1),
                    round(near.cycles if near else cycles, 1))


def _places(own: LoopItems, run: Simulation, events: Sequence[Event], filled: dict[int, RingUse],
            cycles: float) -> tuple[Place, ...]:
    """The places of one steady iteration: loads, and the last iteration of each group."""
    low = min(run.ran[0, n][0] for n in range(len(events)))

    def place(i: int, group: int, stage: int, begin: float, end: float) -> Place:
        at = (begin - low) % cycles
        return Place(i, group, stage, round(at, 1), round(at + end - begin, 1))

    rings = [use for use, _ in run.rings]
    out = [place(i, -1, 1 - use.stages, *run.loaded[k]) for i, use in filled.items() for k in [rings.index(use)]]
    return tuple(out + [place(e.item, g, e.stage, *run.ran[g, n]) for g in range(own.groups) for n, e in enumerate(events)])


def _item(own: LoopItems, i: int, is_async: bool, threads: int, rate: float) -> loop_schedule.Item:
    x = own.items[i]
    cost = own.cost.get(i)
    reads, writes = (tuple(dict.fromkeys(e.buffer.name for e in x.effects if wanted(e)))
                     for wanted in (lambda e: e.reads, lambda e: e.writes))
    made = {e.storage: e.buffer for e in x.effects if e.writes and e.buffer.scope_name == FRAGMENT and e.buffer.is_static}
    held = sum(b.bits // 32 for b in made.values()) // threads
    if cost is None:
        unit, cycles = "loads", _moved(x) / rate
    else:
        unit, cycles = max(("tensor cores", cost.tensor), ("MUFU", cost.special), ("FMA", cost.arithmetic), key=lambda c: c[1])
    return loop_schedule.Item(type(x.stmt).__name__.lower(), reads, writes, unit, round(cycles, 1), is_async, held)


def _from_memory(own: LoopItems, runs: float) -> float:
    """Bytes of an iteration that memory reads or writes: each tensor once in all `runs` of it, or as often as it is moved."""
    regions = [r for x in own.items if isinstance(op := x.stmt, Copy) for r in (op.src, op.dst)
               if r.buffer.scope_name == GLOBAL and r.buffer.is_static]
    return sum(min(prod(n for n in r.extents if isinstance(n, int)), int(r.buffer.size) / runs) * r.dtype.bits / 8
               for r in regions) if runs else 0.0


def _memory_rates(blocks: int, capability: int | str) -> tuple[float, float]:
    """Bytes that memory gives an SM in a cycle: what kernels reach, and the most; 0 where they are not known."""
    chip, rates = chip_of(capability), kernel_rates("wgmma" if capability == 90 else "mma", capability)
    if chip is None or not blocks:
        return 0.0, 0.0
    cycles = min(chip.sm_count, blocks) * rates.clock
    return (rates.copy or rates.bandwidth) / cycles, chip.bandwidth / cycles


def _bound(own: LoopItems, loads: Mapping[int, str], memory: float) -> Bound:
    """What an iteration of a block takes at least.  memory: cycles of it."""
    cost = [own.cost[i] for i in own.own if i not in loads]
    plain = [own.cost[i].arithmetic for i in own.own if not any(
        e.buffer.scope_name in (*SHARED, GLOBAL) for e in own.items[i].effects)]  # other accesses may be wide
    terms = {"tensor cores": sum(c.tensor for c in cost), "loads": sum(_moved(own.items[i]) for i in loads) / UNIT_RATES.most,
             "memory": memory, "shared memory": sum(_port(own, i) for i in range(len(own.items))),
             "MUFU": sum(c.special for c in cost), "FMA": sum(plain), "recurrence": _recurrence(own)}
    return Bound(tuple((name, round(c, 1)) for name, c in terms.items()))


def _port(own: LoopItems, i: int) -> float:
    """Cycles of the shared memory's port for an item: what threads copy, or the operands of its GEMM.  What TMA writes waits
    for them in part only: 128 x 128 tiles that load 64 bytes a cycle beside 96 of operands take 585 cycles, not 640."""
    x: Any = own.items[i].stmt
    if not isinstance(x, Gemm):
        return _moved(own.items[i]) / UNIT_RATES.port if isinstance(x, Copy) and not _is_load(own.items[i]) else 0.0
    times = x.m / 64 if i in own.gemms else 1.0  # wgmma reads B for each 64 rows; what ldmatrix shares is not known
    tiles = [(x.a, x.m * x.k // x.sparsity, 1.0), (x.b, x.n * x.k, times)]
    return sum(n * r.dtype.bits / 8 * t for r, n, t in tiles if r.buffer.scope_name in SHARED) / UNIT_RATES.port


def _recurrence(own: LoopItems) -> float:
    """The longest chain of items of one warp group from one that reads a value of the iteration before to one that makes it."""
    items, order = own.items, own.own
    takes = {i: max(own.cost[i].tensor, own.cost[i].ordinary) / own.groups for i in order}
    most: list[float] = []
    storages = {e.storage: None for i in order for e in items[i].effects if e.writes and e.buffer.scope_name == FRAGMENT}
    for storage in storages:
        users = [i for i in order if items[i].touches(storage)]
        if own.overwrites(users[0], storage):
            continue
        longest = {users[0]: takes[users[0]]}
        for n, j in enumerate(order):
            before = [longest[i] for i in order[:n] if i in longest and any(
                a.writes and b.reads and a.storage is b.storage for a in items[i].effects for b in items[j].effects)]
            if before and j not in longest:
                longest[j] = max(before) + takes[j]
        most = [*most, *(t for i, t in longest.items() if any(e.writes and e.storage is storage for e in items[i].effects))]
    return max(most, default=0.0)


def _is_load(x: Item) -> bool:
    return any(e.reads and e.buffer.scope_name == GLOBAL for e in x.effects) and any(
        e.writes and e.buffer.scope_name in SHARED for e in x.effects)


def _moved(x: Item) -> int:
    """Bytes of the shared tiles that an item fills, or of the one it copies from."""
    op: Any = x.stmt
    if isinstance(op, Copy):
        tiles: list[Any] = [r for r in (op.dst, op.src) if r.buffer.scope_name in SHARED]
        return sum(prod(r.extents) * r.dtype.bits // 8 for r in tiles[:1] if all(isinstance(n, int) for n in r.extents))
    made = {e.storage: e.buffer for e in x.effects if e.writes and e.buffer.scope_name in SHARED and e.buffer.is_static}
    return sum(b.bits // 8 for b in made.values())


def _numbers(launch: Launch) -> list[int]:
    """The sizes of the grid; none where calls decide them."""
    numbers = [int(g.value) for g in map(convert, launch.grid) if isinstance(g, Const)]
    return numbers if len(numbers) == len(launch.grid) else []


def _iterations(launch: Launch, loop: For) -> float:
    """Iterations of a block, the mean of all blocks; 0 where they are not known before a call."""
    numbers = [max(1, n) for n in _numbers(launch)]  # of an empty grid too
    loops = [s for s in statements(launch.body) if isinstance(s, For) and any(x is loop for x in statements(s))]
    env: dict[Var, Any] = {}
    blocks = prod(numbers)
    index = np.linspace(0, blocks - 1, min(blocks, 1 << 12)).astype(int)
    for v, n in zip(launch.block_vars, numbers):
        env[v], index = index % n, index // n
    values = {s.var: s.value for s in walk(launch.body, Bind)}
    out: Any = 1.0
    for x in loops:
        e: Expr = convert(x.extent)
        for _ in range(8):
            e = e if free_vars(e).isdisjoint(values) else substitute(e, values)
        if free_vars(e) - env.keys() or contains(e, Load):
            return 0.0
        try:
            out = out * np.maximum(np.asarray(evaluate(e, env), "f8"), 0)
        except TileLangError:
            return 0.0
    return round(float(np.mean(out)), 2)
