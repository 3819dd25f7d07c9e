"""Conditions of warp groups: known for one of them, or not before the program runs."""

import pytest

from tilelang.ir import I32, Const, Evaluate, If, Launch, Var, binary, call, unary
from tilelang.target.warp_groups import alike, holds_in


def groups(first, count):
    return call("in_warp_groups", (), "bool", first=first, count=count)


X = binary("lt", Var("x", I32), 3)


@pytest.mark.parametrize("cond, want", [
    (groups(1, 2), [False, True, True, False]), (unary("not", groups(1, 2)), [True, False, False, True]),
    (binary("and", groups(0, 2), groups(1, 2)), [False, True, False, False]),
    (binary("or", groups(0, 1), groups(3, 1)), [True, False, False, True]),
    (X, [None] * 4), (unary("not", X), [None] * 4),
    (binary("and", groups(0, 1), X), [None, False, False, False]), (binary("or", X, groups(0, 1)), [True, None, None, None])])
def test_a_condition_is_known_for_a_group_or_not(cond, want):
    assert [holds_in(cond, w) for w in range(3, 16, 4)] == want


def test_groups_that_no_condition_tells_apart_are_together():
    def launch(cond, threads):
        names = [Var(n, I32) for n in ("bx", "tx", "ty", "tz")]
        body = If(cond, Evaluate(call("x", (), "void")), None)
        return Launch((Const(1, I32),), (names[0],), (threads, 1, 1), tuple(names[1:]), body)

    assert alike(launch(X, 300)) == [tuple(range(10))]
    assert alike(launch(groups(1, 2), 600)) == [(0, 1, 2, 3, *range(12, 19)), tuple(range(4, 12))]
    assert alike(launch(binary("or", groups(0, 1), groups(3, 1)), 512)) == [
        tuple(range(4)), tuple(range(4, 12)), tuple(range(12, 16))]
