"""T.ieee_* and the packed functions against exact fractions, in every direction; halves with all their near-ties."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numbers_of import BLOCK, EVERYWHERE, THREADS, assert_same, every, rounded, run_on

import tilelang.language as T
from tilelang.ir import numpy_dtype
from tilelang.target import rounding

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
N = BLOCK
MODES = ("rn", "rz", "ru", "rd")
IEEE = {"add": T.ieee_add, "sub": T.ieee_sub, "mul": T.ieee_mul, "fdiv": T.ieee_fdiv, "fmaf": T.ieee_fmaf, "frcp": T.ieee_frcp,
        "fsqrt": T.ieee_fsqrt}
ARITY = {"fmaf": 3, "frcp": 1, "fsqrt": 1}


def operands(name, seed=0):
    """Three rows: samples of all magnitudes, and products that are ties or nearly numbers of the type with tiny addends."""
    rng = np.random.default_rng(seed)
    x = np.stack([rng.permutation(every(name))[:N] for _ in range(3)])
    x[:, np.isnan(x.astype(np.float64)).any(0)] = 1
    m = ml_dtypes.finfo(numpy_dtype(name)).nmant
    k = slice(0, N // 2)
    x[0, k] = (1 + rng.integers(0, 2**m, N // 2) * 2.0**-m) * np.exp2(rng.integers(-3, 4, N // 2))
    x[1, k] = (1 + rng.integers(0, 2, N // 2) * 2.0**-rng.integers(1, m + 1, N // 2)) * rng.choice([-1, 1], N // 2)
    x[2, k] = rng.choice([-1, 1], N // 2) * np.exp2(-rng.integers(m, 24 if m == 10 else 60, N // 2).astype(float))
    return x


def exactly(op, args, kind):
    """(nearest, below, above) of the exact result among the numbers of float32 or float64, for finite operands."""
    values = [Fraction(float(a)) for a in args]
    if op == "fsqrt":
        near = np.sqrt(args[0])
        square = Fraction(float(near)) ** 2
        below = near if square <= values[0] else np.nextafter(near, kind(-np.inf))
        above = near if square >= values[0] else np.nextafter(near, kind(np.inf))
        return near, below, above
    exact = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fdiv": lambda a, b: a / b,
             "fmaf": lambda a, b, c: a * b + c, "frcp": lambda a: 1 / a}[op](*values)
    near = kind(float(exact))  # of float32: rounded twice, so look around
    around = [kind(v) for v in (np.nextafter(near, kind(-np.inf)), near, np.nextafter(near, kind(np.inf)))]
    below = max(v for v in around if Fraction(float(v)) <= exact)
    above = min(v for v in around if Fraction(float(v)) >= exact)
    low, high = exact - Fraction(float(below)), Fraction(float(above)) - exact
    even = below if int(np.asarray(below).view(f"u{below.itemsize}")) & 1 == 0 else above
    return (even if low == high else below if low < high else above), below, above


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("op", IEEE)
def test_the_meaning_is_the_rounded_exact_result(op, kind):
    name = np.dtype(kind).name
    x = operands(name)[:, [*range(300), *range(N // 2, N, 8)]]
    size = np.abs(x.astype(np.float64))
    if name == "float64":
        x[(size < 1e-70) & (x != 0) | (size > 1e70) & np.isfinite(x)] = 3
        size = np.abs(x)
    x = x[:, np.all((size > 1e-12) & (size < 1e12), 0)]
    x[0] = np.abs(x[0])
    args = x[:ARITY.get(op, 2)]
    got = {m: np.asarray(rounding.rounded(op, m, *args)).astype(kind) for m in MODES}
    assert len(x[0]) > 100
    for i in range(len(x[0])):
        near, below, above = exactly(op, [a[i] for a in args], kind)
        want = {"rn": near, "rd": below, "ru": above, "rz": below if near > 0 or near == 0 and below == 0 else above}
        for m in MODES:
            assert got[m][i] == want[m], (op, m, [repr(a[i]) for a in args], got[m][i], want[m])


def test_sums_and_products_without_error():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 500)) * np.exp2(rng.integers(-60, 60, (2, 500)))
    for got, exact in ((rounding.two_sum(a, b), lambda x, y: x + y), (rounding.two_product(a, b), lambda x, y: x * y)):
        for s, e, x, y in zip(*got, a, b):
            assert Fraction(s) + Fraction(float(e)) == exact(Fraction(x), Fraction(y))
    odd = rounding.sum_odd(a, b)
    inexact = rounding.two_sum(a, b)[1] != 0
    assert (odd.view(np.int64)[inexact] & 1).all() and np.array_equal(odd[~inexact], (a + b)[~inexact])
    assert np.array_equal(rounding.to_odd(a, np.zeros(500)), a)
    tie = rounding.fused_odd(np.float32(1 + 2.0**-12), np.float32(1), np.float32(2.0**-100))
    assert tie > 1 + 2.0**-12 and np.float32(tie) == np.float32(1 + 2.0**-12)


def test_a_sum_of_zero_is_negative_when_rounded_down():
    zeros = [(1.0, -1.0, True), (0.0, 0.0, False), (0.0, -0.0, True), (-0.0, -0.0, True)]
    for a, b, negative in zeros:
        got = rounding.rounded("add", "rd", np.float32(a), np.float32(b))
        assert got == 0 and bool(np.signbit(got)) == negative
        assert bool(np.signbit(rounding.rounded("add", "ru", np.float32(a), np.float32(b)))) == (a == b == 0 and np.signbit(a))


def ieee_program(name, modes):
    jobs = [(fn, ARITY.get(op, 2), m) for op, fn in IEEE.items() for m in modes]

    def apply(X, Y, i):
        for k, (fn, n, m) in enumerate(jobs):
            T.buffer_store(Y, fn(*(X[j, i] for j in range(n)), rounding_mode=m), (k, i))

    @T.prim_func
    def f(X: T.Tensor((3, N), name), Y: T.Tensor((len(jobs), N), name)):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, Y, b * BLOCK + i)

    return f, [(op, m) for op in IEEE for m in modes]


@pytest.mark.spec("L14:ieee")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_ieee_functions_round_once(name, on):
    modes = MODES if name in ("float32", "float64") else ("rn",)
    f, jobs = ieee_program(name, modes)
    x = operands(name)
    y = run_on(f, x, on=on)[1]
    for got, (op, m) in zip(y, jobs):
        args = x[:ARITY.get(op, 2)]
        if name in ("float32", "float64"):
            want = np.asarray(rounding.rounded(op, m, *args)).astype(x.dtype)
        else:
            want = rounded(np.asarray(rounding.rounded(op, m, *(a.astype(np.float32) for a in args)), np.longdouble), name)
        assert_same(got, want, f"{op} {m} of {name}", *args)


@pytest.mark.spec("L14:ieee")
@pytest.mark.parametrize("on", EVERYWHERE)
def test_a_direction_is_that_of_its_operation_alone(on):
    """Ordinary arithmetic before, between and after it rounds to nearest; constants are rounded as told too."""
    @T.prim_func
    def f(X: T.Tensor((2, N), "float32"), Y: T.Tensor((6, N), "float32")):
        with T.Kernel(1, threads=THREADS):
            for i in T.Parallel(N):
                Y[0, i] = X[0, i] * X[1, i]
                Y[1, i] = T.ieee_mul(X[0, i], X[1, i], "ru")
                Y[2, i] = X[0, i] * X[1, i] + T.ieee_add(X[0, i], X[1, i], "rd") * T.float32(0)
                Y[3, i] = T.ieee_mul(X[0, i] * X[1, i], 1.0, "rz")
                Y[4, i] = T.ieee_fdiv(T.float32(1), T.float32(3), "ru")
                Y[5, i] = T.ieee_fdiv(T.float32(1), T.float32(3), "rd")

    x = np.random.default_rng(2).uniform(1, 2, (2, N)).astype(np.float32)
    y = run_on(f, x, on=on)[1]
    near, up = x[0] * x[1], rounding.rounded("mul", "ru", *x)
    assert np.array_equal(y[0], near) and np.array_equal(y[2], near) and np.array_equal(y[3], near)
    assert np.array_equal(y[1], up) and (near != up).any()
    third = np.float32(1) / np.float32(3)
    assert (y[4] == third).all() and (y[5] == np.nextafter(third, np.float32(0))).all()
    assert np.float32(1) + np.float32(2.0**-24) == 1 and np.float32(1) + np.float32(3 * 2.0**-25) > 1  # nor has it changed ours


def test_the_ends_of_the_range_are_rounded_in_every_direction():
    """Products and quotients whose rests float64 does not hold, and sums beyond the greatest number."""
    least, greatest = 5e-324, np.finfo(np.float64).max
    for op, args, below, above in (
            ("mul", (1e-200, 1e-200), 0.0, least), ("mul", (-1e-200, 1e-200), -least, -0.0),
            ("mul", (3 * least, 0.5), least, 2 * least),
            ("fdiv", (least, 3.0), 0.0, least), ("fdiv", (1e-300, 1e300), 0.0, least), ("frcp", (greatest,), None, None),
            ("add", (greatest, greatest), greatest, np.inf), ("sub", (-greatest, greatest), -np.inf, -greatest),
            ("fmaf", (1e200, 1e200, -np.inf), -np.inf, -np.inf), ("fmaf", (1e-200, 1e-200, 1.0), 1.0, 1 + 2.0**-52),
            ("fmaf", (1e-200, -1e-200, least), 0.0, least)):
        a = [np.array(v) for v in args]
        down, up = (rounding.rounded(op, m, *a) for m in ("rd", "ru"))
        if below is None:
            assert down < up and np.nextafter(down, np.inf) == up
        else:
            assert (down, up) == (below, above) and np.signbit(up) == np.signbit(above), (op, args)
        assert rounding.rounded(op, "rz", *a) == (down if up > 0 else up), (op, args)
    root = [rounding.rounded("fsqrt", m, np.array(3 * least)) for m in ("rd", "rn", "ru")]
    assert root[0] <= root[1] <= root[2] and np.nextafter(root[0], 1) == root[2]


@pytest.mark.spec("L14:packed", "T.fma2", "T.add2", "T.mul2")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_packed_functions_round_once(name, on):
    @T.prim_func
    def f(X: T.Tensor((3, N), name), Y: T.Tensor((3, N), name)):
        with T.Kernel(N // (2 * THREADS), threads=THREADS) as b:
            i = b * 2 * THREADS + T.get_thread_binding() * 2
            Y[0, i:i + 2] = T.add2(X[0, i:i + 2], X[1, i:i + 2])
            Y[1, i:i + 2] = T.mul2(X[0, i:i + 2], X[1, i:i + 2])
            Y[2, i:i + 2] = T.fma2(X[0, i:i + 2], X[1, i:i + 2], X[2, i:i + 2])

    x = operands(name, 1)
    y = run_on(f, x, on=on)[1]
    a, b, c = x.astype(np.float32)
    for got, exact, what in zip(y, (rounding.sum_odd(a, b), a.astype(np.float64) * b, rounding.fused_odd(a, b, c)),
                                ("add2", "mul2", "fma2")):
        assert_same(got, rounded(exact, name), f"{what} of {name}", *x)
