"""Values from memory use their whole type: simplification keeps what the wrapping arithmetic of the machine gives."""

import random

import numpy as np
import pytest

from tilelang.arith import Analyzer
from tilelang.ir import Binary, Buffer, Cast, Select, Var, cast, const, dtype, fresh, load, numpy_dtype
from tilelang.ir.evaluate import evaluate

TYPES = ("int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")
N = 64


def leaves(dt):
    return Buffer("A", (N,), dtype(dt)), Buffer("B", (N,), dtype(dt))


def tree(r, dt, bufs, i, depth):
    """Random arithmetic on loads and on the index i (0..63)."""
    if depth == 0 or r.random() < 0.1:
        leaf = r.randrange(4)
        if leaf < 2:
            return load(bufs[leaf], (i,))
        return cast(i, dt) if leaf == 2 else const(r.choice([0, 1, 2, 3, 4, 8, 16, 63, 64]), dt)
    op = r.choice(["add", "add", "sub", "mul", "floordiv", "floormod", "truncdiv", "truncmod", "min", "max", "bitand",
                   "bitor", "bitxor", "shl", "shr", "select", "cast"])
    a = tree(r, dt, bufs, i, depth - 1)
    if op == "cast":
        return Cast(Cast(a, dtype(r.choice(TYPES))), dtype(dt))
    if op == "select":
        cond = Binary(r.choice(["lt", "le", "eq", "ne", "gt", "ge"]), a, tree(r, dt, bufs, i, depth - 1), dtype("bool"))
        return Select(cond, tree(r, dt, bufs, i, depth - 1), tree(r, dt, bufs, i, depth - 1), dtype(dt), False)
    if op in ("floordiv", "floormod", "truncdiv", "truncmod"):
        b = const(r.choice([1, 2, 3, 4, 8, 16, 64]), dt)
        if r.random() < 0.2:
            b = Binary("bitand", tree(r, dt, bufs, i, depth - 1), const(7, dt), dtype(dt)) + const(1, dt)
        return Binary(op, a, b, dtype(dt))
    if op in ("shl", "shr"):
        b = const(r.randrange(8), dt)
        if r.random() < 0.3:
            b = Binary("bitand", tree(r, dt, bufs, i, depth - 1), const(7, dt), dtype(dt))
        return Binary(op, a, b, dtype(dt))
    return Binary(op, a, tree(r, dt, bufs, i, depth - 1), dtype(dt))


@pytest.mark.parametrize("dt", TYPES)
def test_simplify_keeps_wrapping_values(dt):
    r, bufs, i = random.Random(dt), leaves(dt), Var("i", dtype("int32"))
    for _ in range(150):
        keeps_values(dt, tree(r, dt, bufs, i, 4), bufs, i)


def keeps_values(dt, e, bufs, i):
    """Check that e simplified, on data that use the whole type, gives what e gives, lies in its interval and stays."""
    rng, info = np.random.default_rng(7), np.iinfo(numpy_dtype(dt))
    data = {b: rng.integers(info.min, info.max, N, dtype=numpy_dtype(dt), endpoint=True) for b in bufs}
    for values in data.values():
        values[:6] = [info.min, info.max, 0, 1, info.max // 2, info.max - 1]
    at = np.arange(N, dtype=np.int32)

    def read(b, indices, mask, node):
        return data[b][np.broadcast_to(indices[0], (N,))]

    a = Analyzer({i: (0, N - 1)})
    s = a.simplify(e)
    before = np.broadcast_to(evaluate(e, {i: at}, read), (N,))
    after = np.broadcast_to(evaluate(s, {i: at}, read), (N,))
    assert np.array_equal(before, after), f"{e!r}\n-> {s!r}"
    lo, hi = a.interval(e)
    assert (lo is None or lo <= int(before.min())) and (hi is None or int(before.max()) <= hi), repr(e)
    assert a.simplify(s) is s


def remainders(r, dt, bufs, i, depth):
    """Sums of quotients and remainders of loads by numbers that share divisors, few of them powers of two."""
    if depth == 0:
        return load(r.choice(bufs), (i,)) if r.random() < 0.8 else cast(i, dt)
    a = remainders(r, dt, bufs, i, depth - 1)
    op = r.choice(["add", "sub", "scale", "floordiv", "floormod", "floormod", "truncmod"])
    if op in ("add", "sub"):
        other = remainders(r, dt, bufs, i, depth - 1) if r.random() < 0.7 else const(r.choice([1, 2, 3, 5, 100]), dt)
        return Binary(op, a, other, dtype(dt))
    return Binary("mul" if op == "scale" else op, a, const(r.choice([2, 3, 5, 6, 10, 12, 15, 30, 100]), dt), dtype(dt))


@pytest.mark.parametrize("dt", TYPES)
def test_a_remainder_of_a_sum_of_remainders_does_not_wrap(dt):
    """(a % 6 + b % 6) % 3 became (a + b) % 3, whose sum wraps."""
    r, (A, B), i = random.Random(dt), leaves(dt), Var("i", dtype("int32"))
    x, y = load(A, (i,)), load(B, (i,))
    keeps_values(dt, (x % const(6, dt) + y % const(6, dt)) % const(3, dt), (A, B), i)
    assert Analyzer().simplify(x % const(10, dt) % const(5, dt)).same(x % const(5, dt))  # one whole value does not wrap
    for _ in range(150):
        keeps_values(dt, remainders(r, dt, (A, B), i, r.randrange(2, 5)), (A, B), i)


def test_shift_by_a_variable_ends():
    n = fresh("n")
    e = Binary("shl", const(1), n, n.dtype)
    assert Analyzer().simplify(e) is e
    assert Analyzer().simplify(e * 2 + e).same(e * 3)


def test_sums_of_many_times_a_variable_are_not_taken_for_indices():
    """(n % 97 * 31) % 97 became 31 * n % 97, and a hash of n by 1664525 had its factor taken modulo 1000."""
    n, m = fresh("n"), fresh("m")
    for e in ((n % 97 * 31) % 97, (n % 6 + m % 6) % 3, (n * 1664525 + 1013904223) % 1000, n * 1664525 // 1664525):
        assert Analyzer().simplify(e).same(e), repr(e)
    assert Analyzer().simplify((n % 12 + 2) % 6).same((n + 2) % 6) and Analyzer().simplify((n * 768 + 5) // 768).same(n)
    assert Analyzer({n: (0, 1000)}).simplify(n * 1664525 // 1664525).same(n)
