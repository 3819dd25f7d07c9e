"""The race detector against the definition: every earlier access is compared with every later one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilelang.errors import TileLangError
from tilelang.simulator.device.counters import Site
from tilelang.simulator.device.races import AccessTable, Clocks

LANES, GRANULES = 8, 3
SITES = [Site(None, "S", "access")]


def steps(group: int):
    thread = st.integers(0, LANES - 1)
    lanes = st.lists(thread, min_size=1, max_size=3, unique=True)
    access = st.tuples(st.sampled_from(["read", "write", "atomic"]), lanes, st.integers(0, GRANULES - 1))
    barrier = st.tuples(st.just("barrier"), st.one_of(st.none(), st.integers(0, LANES // group - 1)))
    return st.lists(st.one_of(access, access, access, barrier), max_size=14)


def first_race(program, group: int) -> int | None:
    """Number of the first step that races, by comparing all pairs with vector clocks of sets of events."""
    events: list[tuple[int, int, str]] = []  # (thread, granule, kind)
    seen = [set() for _ in range(LANES)]  # events that happen before what a thread does next
    for number, (kind, who, *rest) in enumerate(program):
        if kind == "barrier":
            members = range(LANES) if who is None else range(who * group, (who + 1) * group)
            known = set().union(*(seen[t] for t in members))
            for t in members:
                seen[t] = set(known)
            continue
        g = rest[0]
        mine = []
        for t in who:
            for e, (u, h, k) in enumerate(events):
                conflict = h == g and u != t and "read" not in (k, kind) or h == g and u != t and {k, kind} != {"read"}
                if conflict and not (k == kind == "atomic") and e not in seen[t]:
                    return number
            mine.append((t, len(events) + len(mine)))
        if kind == "write" and len(who) > 1:
            return number  # several threads store different values in one instruction
        for t, e in mine:
            events.append((t, g, kind))
            seen[t].add(e)
    return None


def detected(program, group: int) -> int | None:
    """Number of the step at which the table raises."""
    clocks, table = Clocks(LANES), AccessTable(GRANULES, LANES, group, SITES, "memory")
    for number, (kind, who, *rest) in enumerate(program):
        if kind == "barrier":
            clocks.barrier(None if who is None else np.arange(LANES) // group == who)
            continue
        g, t = np.full((len(who), 1), rest[0]), np.array(who)
        try:
            if kind == "read":
                table.read(clocks, g, t, 0)
            elif kind == "atomic":
                table.atomic(clocks, g, t, 0)
            else:
                table.write(clocks, g, t, 0, np.zeros(len(who), bool))
        except TileLangError as e:
            assert e.kind == "sim-race"
            return number
    return None


@pytest.mark.parametrize("group", [2, 4, 8])
def test_finds_the_first_race_and_nothing_else(group):
    @settings(max_examples=300, deadline=None)
    @given(steps(group))
    def go(program):
        assert detected(program, group) == first_race(program, group)

    go()


def test_a_block_barrier_orders_reads_of_threads_whose_warps_had_different_clocks():
    """A release by one warp puts its clock ahead of the other's; reads of both share one slot."""
    clocks, table = Clocks(64), AccessTable(1, 64, 64, SITES, "memory")
    clocks.advance(np.array([3]))
    clocks.acquire(np.arange(64) == 3, clocks.seen[3].copy())
    g, t = np.zeros((7, 1), int), np.arange(7)
    table.read(clocks, g, t, 0)
    with pytest.raises(TileLangError, match="writes"):
        table.write(clocks, g[:1], np.array([40]), 0)
    clocks.barrier()
    table.write(clocks, g[:1], np.array([40]), 0)
