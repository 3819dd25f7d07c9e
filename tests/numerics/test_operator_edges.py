"""Operators of integers and floats: all pairs of 8 bits, samples and edges of wider types."""

import functools

import numpy as np
import pytest
from everywhere import cuda_text
from numbers_of import BLOCK, EVERYWHERE, FLOATS, INTEGERS, THREADS, assert_same, count, every, rounded, run_on
from test_function_bounds import pairs

import tilelang.language as T
from tilelang.ir import dtype, numpy_dtype

pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
COMPARISONS = {
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b, "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}
# Meaning on Python's whole numbers; the result is wrapped to the type.  A divisor of 0 counts as 1.
WHOLE = {
    "+": (lambda a, b: a + b,) * 2, "-": (lambda a, b: a - b,) * 2, "*": (lambda a, b: a * b,) * 2,
    "//": (lambda a, b: a // b,) * 2, "%": (lambda a, b: a % b,) * 2,
    "truncdiv": (T.truncdiv, lambda a, b: np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b))),
    "truncmod": (T.truncmod, lambda a, b: np.where(a < 0, -(abs(a) % abs(b)), abs(a) % abs(b))),
    "floordiv": (T.floordiv, lambda a, b: a // b), "floormod": (T.floormod, lambda a, b: a % b),
    "&": (lambda a, b: a & b,) * 2, "|": (lambda a, b: a | b,) * 2, "^": (lambda a, b: a ^ b,) * 2,
    "min": (T.min, np.minimum), "max": (T.max, np.maximum),
    "clamp": (lambda a, b: T.clamp(a, T.min(b, 5), T.max(b, 5)), lambda a, b: np.clip(a, np.minimum(b, 5), np.maximum(b, 5))),
}
SHIFTS = {"<<": lambda a, s: a << s, ">>": lambda a, s: a >> s}  # amounts count as unsigned, at most the bits of the type
ONE = {"~": (lambda a: ~a, lambda a: ~a), "neg": (lambda a: -a, lambda a: -a), "abs": (T.abs, abs)}
BITS = {"popcount": T.popcount, "clz": T.clz, "ffs": getattr(T, "__ffs")}


def whole_program(name):
    N = count(name, 2)
    ones = [k for k in ONE if k != "neg" or dtype(name).is_signed]

    def apply(X, Z, S, Y, B, C, i):
        results = [fn(X[i], Z[i]) for fn, _ in WHOLE.values()] + [fn(X[i], S[i]) for fn in SHIFTS.values()]
        for k, v in enumerate(results + [ONE[k][0](X[i]) for k in ones]):
            T.buffer_store(Y, v, (k, i))
        for k, fn in enumerate(COMPARISONS.values()):
            T.buffer_store(B, fn(X[i], Z[i]), (k, i))
        for k, fn in enumerate(BITS.values()):
            T.buffer_store(C, fn(X[i]), (k, i))

    @T.prim_func
    def f(X: T.Tensor((N,), name), Z: T.Tensor((N,), name), S: T.Tensor((N,), name),
          Y: T.Tensor((len(WHOLE) + len(SHIFTS) + len(ones), N), name), B: T.Tensor((len(COMPARISONS), N), "bool"),
          C: T.Tensor((len(BITS), N), "int32")):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, Z, S, Y, B, C, b * BLOCK + i)

    return f, [*WHOLE, *SHIFTS, *ones]


def divides(op):
    return op in ("//", "%") or "div" in op or "mod" in op


def wrapped(v, name):
    """Whole numbers as the type keeps them: their low bits."""
    info = np.iinfo(numpy_dtype(name))
    return ((v - info.min) % (1 << info.bits) + info.min).astype(numpy_dtype(name))


@functools.cache
def whole_numbers(name):
    """Operands, and the exact results by operator."""
    N = count(name, 2)
    if numpy_dtype(name).itemsize == 1:
        x, z = (a.copy() for a in np.meshgrid(every(name, 256), every(name, 256), indexing="ij"))
        x, z = x.ravel(), z.ravel()
    else:
        x, z = (np.random.default_rng(k).permutation(every(name))[:N] for k in (3, 4))
        info = np.iinfo(x.dtype)
        edges = np.array([info.min, info.min + 1, info.max, 0, 1, 2, 3] + ([-1, -2, -3] if info.min else []), x.dtype)
        x[:len(edges)**2], z[:len(edges)**2] = np.repeat(edges, len(edges)), np.tile(edges, len(edges))
    s = np.where(np.arange(N) % 2, np.arange(N) % (dtype(name).bits + 3), z).astype(x.dtype)
    amounts = np.where((s < 0) | (s > dtype(name).bits), dtype(name).bits, s)
    a, b, c = (v.astype(object) for v in (x, np.where(z == 0, 1, z), amounts))
    bits = dtype(name).bits
    want = {k: wrapped(fn(a, b if divides(k) else z.astype(object)), name) for k, (_, fn) in WHOLE.items()}
    want |= {k: wrapped(fn(a, c), name) for k, fn in SHIFTS.items()}
    want |= {k: wrapped(fn(a), name) for k, (_, fn) in ONE.items()}
    codes = [int(v) & (2**bits - 1) for v in a]
    counts = {"popcount": [v.bit_count() for v in codes], "clz": [bits - v.bit_length() for v in codes],
              "ffs": [(v & -v).bit_length() for v in codes]}
    truth = {k: fn(x, z) for k, fn in COMPARISONS.items()}
    return x, z, s, want, counts, truth


@pytest.mark.spec("L4.2:operators", "L14:bits")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", INTEGERS)
def test_operators_of_whole_numbers(name, on):
    x, z, s, want, counts, truth = whole_numbers(name)
    f, rows = whole_program(name)
    *_, y, b, c = run_on(f, x, z, s, on=on)
    for k, op in enumerate(rows):
        assert_same(y[k], want[op], f"{op} of {name}", x, z, s)
    for k, op in enumerate(COMPARISONS):
        assert_same(b[k], truth[op], f"{op} of {name}", x, z)
    for k, op in enumerate(BITS):
        assert_same(c[k], np.array(counts[op], np.int32), f"{op} of {name}", x)


ARITHMETIC = {"+": (lambda a, b: a + b, np.add), "-": (lambda a, b: a - b, np.subtract), "*": (lambda a, b: a * b, np.multiply),
              "/": (lambda a, b: a / b, np.divide), "min": (T.min, np.fmin), "max": (T.max, np.fmax)}


def float_program(name):
    N = count(name, 2)
    def apply(X, Z, Y, B, i):
        for k, (fn, _) in enumerate(ARITHMETIC.values()):
            T.buffer_store(Y, fn(X[i], Z[i]), (k, i))
        for k, fn in enumerate(COMPARISONS.values()):
            T.buffer_store(B, fn(X[i], Z[i]), (k, i))

    @T.prim_func
    def f(X: T.Tensor((N,), name), Z: T.Tensor((N,), name), Y: T.Tensor((len(ARITHMETIC), N), name),
          B: T.Tensor((len(COMPARISONS), N), "bool")):
        with T.Kernel(N // BLOCK, threads=THREADS) as b:
            for i in T.Parallel(BLOCK):
                apply(X, Z, Y, B, b * BLOCK + i)

    return f


@pytest.mark.spec("L4.2:operators", "T.max", "T.min")
@pytest.mark.parametrize("on", EVERYWHERE)
@pytest.mark.parametrize("name", FLOATS)
def test_operators_of_floats_round_once(name, on):
    x, z = pairs(name)
    *_, y, b = run_on(float_program(name), x, z, on=on)
    wide = (lambda v: v) if dtype(name).bits >= 32 else (lambda v: v.astype(np.longdouble))
    for k, (op, (_, fn)) in enumerate(ARITHMETIC.items()):
        want = fn(wide(x), wide(z))
        if dtype(name).bits < 32:
            want = rounded(want, name)
        got = y[k]
        if op in ("min", "max"):  # of zeros of both signs either
            same_zero = (got.astype(np.float64) == 0) & (want.astype(np.float64) == 0)
            got, want = (np.where(same_zero, np.zeros((), v.dtype), v) for v in (got, want))
        assert_same(got, want, f"{op} of {name}", x, z)
    for k, (op, fn) in enumerate(COMPARISONS.items()):
        assert_same(b[k], fn(x.astype(np.float64), z.astype(np.float64)), f"{op} of {name}", x, z)


@pytest.mark.parametrize("name", ["int8", "int64", "bfloat16"])
def test_operators_assemble_for_a_gpu(name):
    cuda_text(float_program(name) if dtype(name).is_float else whole_program(name)[0])
