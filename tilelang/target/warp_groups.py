"""Evaluates conditions that distinguish warps, for one warp; writes such conditions.

A call `in_warp_groups(first, count, size)` holds in the threads of `count` groups of `size` threads: 128 for warp groups, 32
for warps.  Here, and wherever a set of warps is a pair (first, count) or a tuple of numbers, its unit is the warp.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilelang.ir import Binary, Call, Expr, If, Launch, Node, Stmt, Unary, call, logical, rewrite, walk

GROUP, WARP_LANES = 128, 32  # threads of a warp group, of a warp
PER_GROUP = GROUP // WARP_LANES


def warps_of(e: object) -> tuple[int, int] | None:
    """(first, count) of the warps of a condition that is a single `in_warp_groups`; None for everything else."""
    if not isinstance(e, Call) or e.op != "in_warp_groups":
        return None
    scale = e.options.size // WARP_LANES
    return scale * e.options.first, scale * e.options.count


def in_warps(first: int, count: int) -> Call:
    """The condition that holds in these warps, in warp groups where they are whole ones."""
    if first % PER_GROUP or count % PER_GROUP:
        return call("in_warp_groups", (), "bool", first=first, count=count, size=WARP_LANES)
    return call("in_warp_groups", (), "bool", first=first // PER_GROUP, count=count // PER_GROUP)


def in_some_warps(warps: Iterable[int]) -> Expr:
    """A condition that holds exactly in these warps."""
    out: Expr | None = None
    for first, count in runs(warps):
        test = in_warps(first, count)
        out = test if out is None else logical("or", out, test)
    assert out is not None, "a branch that no warp takes is left out"
    return out


def runs(warps: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of the runs of successive warps."""
    out: list[tuple[int, int]] = []
    for w in sorted(warps):
        if out and sum(out[-1]) == w:
            out[-1] = out[-1][0], out[-1][1] + 1
        else:
            out.append((w, 1))
    return out


def moved(s: Stmt, by: int) -> Stmt:
    """A statement with its conditions on warps moved by a number of warps: as seen from another first warp."""
    def visit(e: Call) -> Call | None:
        got = warps_of(e)
        return None if got is None else in_warps(got[0] + by, got[1])

    out: Stmt = rewrite(s, visit, Call) if by else s
    return out


def cuts_groups(nodes: Iterable[object]) -> bool:
    """Whether conditions among these nodes distinguish the warps of a warp group."""
    return any(isinstance(n, Call) and n.op == "in_warp_groups" and n.options.size == WARP_LANES for n in nodes)


def warps_in(launch: Launch) -> tuple[int, ...]:
    """The warps of a launch."""
    return tuple(range(-(-launch.num_threads // WARP_LANES)))


def named(warps: Iterable[int]) -> str:
    """Name of a set of warps in messages: warp groups where they are whole."""
    some = sorted(warps)
    whole = runs(w // PER_GROUP for w in some if w % PER_GROUP == 0)
    what = "warp group"
    if [w for first, n in whole for w in range(PER_GROUP * first, PER_GROUP * (first + n))] != some:
        whole, what = runs(some), "warp"
    text = ", ".join(f"{a}" if n == 1 else f"{a} to {a + n - 1}" for a, n in whole)
    return f"{what}{'' if text.isdigit() else 's'} {text}"


def holds_in(e: Expr, warp: int) -> bool | None:
    """The value of a condition for the threads of a warp, None when it is known only at run time."""
    got = warps_of(e)
    if got is not None:
        return got[0] <= warp < sum(got)
    if isinstance(e, Unary) and e.op == "not":
        x = holds_in(e.a, warp)
        return None if x is None else not x
    if isinstance(e, Binary) and e.op in ("and", "or"):
        x, y = holds_in(e.a, warp), holds_in(e.b, warp)
        short = e.op == "or"
        if short in (x, y):
            return short
        return None if None in (x, y) else not short
    return None


def names_warps(n: Node) -> bool:
    """Whether a condition on warps is in a statement or expression."""
    return any(warps_of(c) for c in walk(n, Call))


def ways_of_warps(s: If, warps: Iterable[int]) -> list[tuple[tuple[int, ...], Stmt]] | None:
    """(those of the warps that take it, the statement) for each way of a branch; None where its condition tests more than
    the warp."""
    holds = {w: holds_in(s.cond, w) for w in warps}
    if None in holds.values():
        return None
    return [(tuple(w for w, x in holds.items() if x is want), part) for want, part in ((True, s.then), (False, s.orelse))
            if part is not None]


def alike(launch: Launch) -> list[tuple[int, ...]]:
    """Partition of a launch's warps: an entry contains those that no `in_warp_groups` condition distinguishes."""
    tests = sorted({got for n in walk(launch.body, Call) if (got := warps_of(n)) is not None})
    by_answers: dict[tuple[bool, ...], list[int]] = {}
    for w in warps_in(launch):
        by_answers.setdefault(tuple(a <= w < a + n for a, n in tests), []).append(w)
    return [tuple(warps) for warps in by_answers.values()]
