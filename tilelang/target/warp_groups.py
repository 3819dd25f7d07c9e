"""Evaluates conditions that distinguish warp groups, for one warp group."""

from __future__ import annotations

from tilelang.ir import Binary, Call, Expr, Launch, Unary, walk

GROUP = 128  # threads of a warp group


def holds_in(e: Expr, group: int) -> bool | None:
    """The value of a condition for the threads of a warp group, None when it is known only at run time."""
    if isinstance(e, Call) and e.op == "in_warp_groups":
        return bool(e.options.first <= group < e.options.first + e.options.count)
    if isinstance(e, Unary) and e.op == "not":
        x = holds_in(e.a, group)
        return None if x is None else not x
    if isinstance(e, Binary) and e.op in ("and", "or"):
        x, y = holds_in(e.a, group), holds_in(e.b, group)
        short = e.op == "or"
        if short in (x, y):
            return short
        return None if None in (x, y) else not short
    return None


def alike(launch: Launch) -> list[tuple[int, ...]]:
    """Partition of a launch's warp groups: an entry contains those that no `in_warp_groups` condition distinguishes."""
    tests = sorted({(n.options.first, n.options.count) for n in walk(launch.body, Call) if n.op == "in_warp_groups"})
    by_answers: dict[tuple[bool, ...], list[int]] = {}
    for g in range(-(-launch.num_threads // GROUP)):
        by_answers.setdefault(tuple(a <= g < a + n for a, n in tests), []).append(g)
    return [tuple(groups) for groups in by_answers.values()]


__all__ = ["GROUP", "alike", "holds_in"]
