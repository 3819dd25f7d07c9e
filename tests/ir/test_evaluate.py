"""The NumPy meaning of scalar nodes against plain Python numbers."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilelang.ir import (TRUE, Binary, Broadcast, Buffer, Call, Cast, Const, Ramp, Select, Shuffle, Unary, Var, const,
                         dtype, int_range, load, logical, numpy_dtype)
from tilelang.ir.evaluate import ExprCompiler, Frame, evaluate
from tilelang.ir.numbers import binary_function, round_tf32, to_dtype
from tilelang.target.intrinsics import INTRINSICS

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "int4", "uint4"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
quick = settings(max_examples=60, deadline=None)


def wrapped(x: int, dt: str) -> int:
    low, high = int_range(dtype(dt))
    return (x - low) % (high - low + 1) + low


def trunc_div(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INT_OPS = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "min": min, "max": max,
    "floordiv": lambda x, y: x // y, "floormod": lambda x, y: x % y, "truncdiv": trunc_div,
    "truncmod": lambda x, y: x - trunc_div(x, y) * y, "bitand": lambda x, y: x & y, "bitor": lambda x, y: x | y,
    "bitxor": lambda x, y: x ^ y,
}  # fmt: skip


@quick
@given(st.sampled_from(INTS), st.sampled_from(sorted(INT_OPS)), st.data())
def test_integer_operations_wrap_at_their_width(dt, op, data):
    low, high = int_range(dtype(dt))
    x, y = data.draw(st.integers(low, high)), data.draw(st.integers(low, high))
    if "div" in op or "mod" in op:
        y = y or 1
        if y == -1 and x == low:
            return  # overflow of the quotient: undefined
    got = evaluate(Binary(op, Const(x, dtype(dt)), Const(y, dtype(dt)), dtype(dt)))
    assert int(got) == wrapped(INT_OPS[op](x, y), dt) and got.dtype == numpy_dtype(dt)


@quick
@given(st.sampled_from(INTS), st.data())
def test_shifts(dt, data):
    low, high = int_range(dtype(dt))
    x, n = data.draw(st.integers(low, high)), data.draw(st.integers(low, high) | st.integers(0, min(70, high)))
    by = n if 0 <= n < dtype(dt).bits else dtype(dt).bits
    assert int(binary_function("shr", dtype(dt))(*np.array([x, n], numpy_dtype(dt)))) == x >> by
    assert int(binary_function("shl", dtype(dt))(*np.array([x, n], numpy_dtype(dt)))) == wrapped(x << by, dt)


@quick
@given(st.sampled_from(FLOATS), st.sampled_from(["add", "sub", "mul", "div"]), st.data())
def test_float_operations_round_once(dt, op, data):
    t = numpy_dtype(dt)
    x, y = (np.asarray(data.draw(st.floats(width=64, allow_nan=False))).astype(t) for _ in range(2))
    if op == "div" and float(y) == 0:
        return
    got = binary_function(op, dtype(dt))(x, y)
    assert got.dtype == t
    if dt == "float64":
        return
    # Exact in longdouble for 16-bit operands and nearly so for float32; round once to the type.
    wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op](
        x.astype(np.float32).astype(np.float64), y.astype(np.float32).astype(np.float64))
    with np.errstate(over="ignore"):
        want = wide.astype(np.float32).astype(t)
    assert float(got) == float(want) or (np.isnan(float(got)) and np.isnan(float(want)))


@pytest.mark.parametrize("dt", FLOATS)
def test_min_and_max_return_the_other_operand_of_nan(dt):
    t = numpy_dtype(dt)
    x, y = np.array([np.nan, 1, np.nan, 2], t), np.array([1, np.nan, np.nan, 3], t)
    assert np.array_equal(binary_function("max", dtype(dt))(x, y).astype(float), [1, 1, np.nan, 3], equal_nan=True)
    assert np.array_equal(binary_function("min", dtype(dt))(x, y).astype(float), [1, 1, np.nan, 2], equal_nan=True)


@pytest.mark.parametrize("size", [1, 13, 64])
@pytest.mark.parametrize("dt, bits", [("float32", 0x7f800001), ("float64", 0xfff0000000000001), ("float16", 0x7c01)])
def test_min_and_max_return_the_other_operand_of_a_signalling_nan(dt, bits, size):
    """The last elements of an array, which NumPy computes one by one, were NaN."""
    x, y = np.full(size, bits, f"u{numpy_dtype(dt).itemsize}").view(dt), np.arange(size).astype(dt)
    with np.errstate(invalid="ignore"):
        for op in ("min", "max"):
            for got in (binary_function(op, dtype(dt))(x, y), binary_function(op, dtype(dt))(y, x)):
                assert got.dtype == y.dtype and np.array_equal(got, y)


@quick
@given(st.sampled_from(FLOATS), st.sampled_from([d for d in INTS if "4" not in d or "64" in d]), st.floats(-2e19, 2e19))
def test_float_to_int_truncates(src, dst, v):
    x = np.asarray(v).astype(numpy_dtype(src))
    whole = math.trunc(float(x)) if math.isfinite(float(x)) else None
    low, high = int_range(dtype(dst))
    if whole is not None and low <= whole <= high and (dst != "uint64" or whole >= 0):
        assert int(to_dtype(x, dtype(dst))) == whole


@quick
@given(st.sampled_from(INTS), st.sampled_from(INTS), st.data())
def test_int_to_int_keeps_the_low_bits(src, dst, data):
    low, high = int_range(dtype(src))
    v = data.draw(st.integers(low, high))
    assert int(evaluate(Cast(Const(v, dtype(src)), dtype(dst)))) == wrapped(v, dst)


def test_casts_of_narrow_floats():
    x = np.array([1e6, -1e6, 0.3, np.nan], np.float32)
    narrow = to_dtype(x, dtype("float8_e4m3fn")).astype(float)
    assert np.array_equal(narrow, [448, -448, 0.3125, np.nan], equal_nan=True)
    assert float(to_dtype(np.float32(1e9), dtype("float8_e5m2"))) == 57344
    assert to_dtype(np.float64(1 + 2**-9), dtype("bfloat16")) == ml_dtypes.bfloat16(1.0)  # tie to even
    assert bool(to_dtype(np.float32(0.5), dtype("bool"))) and not bool(to_dtype(np.float32(0), dtype("bool")))


@quick
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_has_ten_mantissa_bits_and_is_nearest(v):
    r = round_tf32(np.float32(v))
    assert int(np.asarray(r).view(np.uint32)) & 0x1FFF == 0
    if abs(v) > 1e-30 and np.isfinite(r):
        assert abs(float(r) - v) <= abs(v) * 2.0**-11


def test_vectors_ramp_broadcast_shuffle_select():
    i = Var("i", dtype("int32"))
    ramp = Ramp(i, const(2), 4, dtype("int32x4"))
    assert np.array_equal(evaluate(ramp, {i: np.array([0, 10])}), [[0, 2, 4, 6], [10, 12, 14, 16]])
    b = Broadcast(i, 4, dtype("int32x4"))
    assert np.array_equal(evaluate(Binary("add", ramp, b, dtype("int32x4")), {i: 3}), [6, 8, 10, 12])
    assert int(evaluate(Shuffle((ramp,), (2,), dtype("int32")), {i: 1})) == 5
    pair = Shuffle((i, const(9), ramp), (1, 5), dtype("int32x2"))
    assert np.array_equal(evaluate(pair, {i: np.array([0, 1])}), [[9, 6], [9, 7]])
    sel = Select(i > 0, ramp, b, dtype("int32x4"))
    assert np.array_equal(evaluate(sel, {i: np.array([-1, 1])}), [[-1] * 4, [1, 3, 5, 7]])


def test_lazy_select_and_short_circuit_load_only_where_needed():
    a, i = Buffer("A", (4,), dtype("int32")), Var("i", dtype("int32"))
    asked = []

    def fetch(buffer, indices, mask, node):
        asked.append(None if mask is None else np.flatnonzero(mask).tolist())
        return np.asarray(indices[0]) * 10

    at = {i: np.arange(6, dtype=np.int32)}
    sel = Select(i < 4, load(a, (i,)), const(-1), dtype("int32"))
    assert np.array_equal(evaluate(sel, at, fetch), [0, 10, 20, 30, -1, -1]) and asked == [[0, 1, 2, 3]]
    both = logical("and", i >= 5, load(a, (i,)) > 0)
    assert np.array_equal(evaluate(both, at, fetch), [False] * 5 + [True]) and asked[1:] == [[5]]
    either = logical("or", i < 5, load(a, (i,)) > 90)
    assert np.array_equal(evaluate(either, at, fetch), [True] * 5 + [False]) and asked[2:] == [[5]]
    assert evaluate(Select(TRUE, const(1), load(a, (i,)), dtype("int32")), {}, fetch) == 1 and len(asked) == 3


def test_unary_reinterpret_and_intrinsics_of_narrow_floats():
    x = Var("x", dtype("float16"))
    assert evaluate(Unary("neg", x, x.dtype), {x: 2.0}).dtype == np.float16
    bits = Call("reinterpret", (const(1.0, "float32"),), dtype("uint32"))
    assert int(evaluate(bits)) == 0x3F800000
    halves = Call("reinterpret", (Const(0x3C004000, dtype("uint32")),), dtype("float16x2"))
    assert np.array_equal(evaluate(halves), [2.0, 1.0])
    e = evaluate(Call("exp", (x,), x.dtype), {x: 1.5}, rows=INTRINSICS)
    assert e.dtype == np.float16 and e == np.float16(np.exp(np.float32(1.5)))


def test_compiled_expression_runs_again_with_other_values():
    i = Var("i", dtype("int32"))
    c = ExprCompiler()
    fn = c.expr(i * 2 + 1)
    assert [int(fn(Frame(c.new_slots({i: v})))) for v in (1, 5)] == [3, 11]


def test_unbound_variable_is_named():
    with pytest.raises(RuntimeError, match="variable lost is used before"):
        evaluate(Var("lost", dtype("int32")) + 1)
