"""Conversions, operators and functions of the CPU target against NumPy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from cpu_harness import run_cpu
from kernel_text import program

from tilelang.errors import TileLangError
from tilelang.ir import dtype, numpy_dtype

rng = np.random.default_rng(1)
FLOATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


def elementwise(expr, x_type, y_type, n=4096, z_type=None):
    """Y = expr(X[i], Z[i])."""
    tensors = {"X": ((n,), x_type), "Z": ((n,), z_type or x_type), "Y": ((n,), y_type)}
    return program(tensors, f"""
        for i, in T.Parallel(256):
            Y[bx * 256 + i] = {expr}
    """, grid=str(n // 256))


def interesting_floats(n=4096):
    bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32).copy()
    x[::3] = (rng.standard_normal(x[::3].shape) * np.exp2(rng.integers(-30, 20, x[::3].shape))).astype(np.float32)
    x[:12] = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 6e-8, 2.0**-149, 448, 57344]
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # and ties between neighbours
    x[100:1100] = ((halves[:-1] + halves[1:]) / 2)[::31][:1000]
    return x


@pytest.mark.parametrize("dt", FLOATS)
def test_narrowing_float32_rounds_to_nearest_even(dt):
    x = interesting_floats()
    f = elementwise(f'T.cast(X[i + bx * 256], "{dt}")', "float32", dt)
    limit = float(ml_dtypes.finfo(numpy_dtype(dt)).max) if "float8" in dt else np.inf  # types of 8 bits saturate
    with np.errstate(all="ignore"):
        want = np.clip(x, -limit, limit).astype(numpy_dtype(dt))
    got = run_cpu(f, [x, None, None])["Y"]
    nan = np.isnan(want.astype(np.float32))
    assert np.array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = np.uint16 if got.itemsize == 2 else np.uint8
    assert np.array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@pytest.mark.parametrize("dt", FLOATS)
def test_widening_is_exact(dt):
    nt = numpy_dtype(dt)
    codes = np.arange(4096) * 16 if nt.itemsize == 2 else np.arange(4096) % 256
    x = codes.astype(np.uint16 if nt.itemsize == 2 else np.uint8).view(nt)
    got = run_cpu(elementwise('T.cast(X[i + bx * 256], "float32")', dt, "float32"), [x, None, None])["Y"]
    assert np.array_equal(got, x.astype(np.float32), equal_nan=True)


def test_float64_to_half_rounds_once():
    x = rng.standard_normal(4096)
    halves = np.arange(1, 0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float64)
    tie = ((halves[:-1] + halves[1:]) / 2)[::16][:1900]
    x[:1900] = tie * (1 + 2.0**-50)
    x[2000:3900] = -tie * (1 - 2.0**-50)
    got = run_cpu(elementwise('T.cast(X[i + bx * 256], "float16")', "float64", "float16"), [x, None, None])["Y"]
    assert np.array_equal(got.view(np.uint16), x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("src, dst", [("int32", "int8"), ("int8", "int64"), ("uint8", "int32"), ("int64", "float32"),
                                      ("uint64", "float64"), ("int32", "float16"), ("float32", "int32"),
                                      ("float64", "int16"), ("bool", "float32"), ("int32", "bool"),
                                      ("uint32", "int64")])
def test_conversions_with_integers(src, dst):
    nt = numpy_dtype(src)
    if nt.kind == "f":
        x = (rng.standard_normal(4096) * 1000).astype(nt)
    elif nt.kind == "b":
        x = rng.integers(0, 2, 4096).astype(nt)
    else:
        info = np.iinfo(nt)
        x = rng.integers(info.min, info.max, 4096, dtype=nt, endpoint=True)
    f = elementwise(f'T.cast(X[i + bx * 256], "{dst}")', src, dst)
    with np.errstate(all="ignore"):
        want = x.astype(numpy_dtype(dst))
    assert np.array_equal(run_cpu(f, [x, None, None])["Y"], want)


@pytest.mark.parametrize("dt", ["int8", "uint8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("op", ["//", "%", "+", "*", "-", "&", "^", "T.min", "T.truncdiv", "T.truncmod"])
def test_integer_operators(op, dt):
    nt = numpy_dtype(dt)
    info = np.iinfo(nt)
    x = rng.integers(info.min, info.max, 4096, dtype=nt, endpoint=True)
    z = rng.integers(max(info.min, -9), 9, 4096, dtype=nt)
    z[z == 0] = 3
    a, b = "X[i + bx * 256]", "Z[i + bx * 256]"
    f = elementwise(f"{op}({a}, {b})" if op.startswith("T.") else f"{a} {op} {b}", dt, dt)
    with np.errstate(all="ignore"):
        want = {"//": np.floor_divide, "%": np.mod, "+": np.add, "*": np.multiply, "-": np.subtract,
                "&": np.bitwise_and, "^": np.bitwise_xor, "T.min": np.minimum,
                "T.truncdiv": lambda p, q: (p - np.fmod(p, q)) // q, "T.truncmod": np.fmod,
                }[op](x, z)
    assert np.array_equal(run_cpu(f, [x, z, None])["Y"], want)


@pytest.mark.parametrize("dt", ["float32", "float64", "float16", "bfloat16"])
def test_extrema_give_the_other_operand_for_nan(dt):
    nt = numpy_dtype(dt)
    x, z = rng.standard_normal((2, 4096)).astype(nt)
    x[::5], z[::7] = np.nan, np.nan
    f = elementwise("T.max(X[i + bx * 256], Z[i + bx * 256])", dt, dt)
    want = np.fmax(x.astype(np.float64), z.astype(np.float64))
    assert np.array_equal(run_cpu(f, [x, z, None])["Y"].astype(np.float64), want, equal_nan=True)


RANGES = {"exp": (-105, 90), "exp2": (-151, 129), "log": (0, 100), "log2": (0, 1e-38), "tanh": (-10, 10),
          "sin": (-9, 9), "sqrt": (0, 1e9), "rsqrt": (1e-9, 9), "erf": (-3, 3), "sigmoid": (-80, 80), "floor": (-9, 9),
          "log1p": (-0.9, 9),
          "round": (-9, 9), "nearbyint": (-9, 9), "exp10": (-30, 30), "fabs": (-1, 1), "acosh": (1, 9)}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dt", ["float32", "float16"])
def test_functions_are_within_two_units(name, dt):
    from tilelang.target.intrinsics import INTRINSICS

    low, high = RANGES[name]
    nt = numpy_dtype(dt)
    x = np.clip(low + (high - low) * rng.random(4096), -60000, 60000 if dt == "float16" else None).astype(nt)
    x[:3] = [1.0, 1.0 + float(np.finfo(nt).eps) * 4, 2.0]
    f = elementwise(f'T.call("{name}", "{dt}", X[i + bx * 256])', dt, dt)
    with np.errstate(all="ignore"):
        want = np.asarray(INTRINSICS[name].reference(x.astype(np.float64)))
        rounded = want.astype(nt)
    got = run_cpu(f, [x, None, None])["Y"]
    assert np.array_equal(np.isfinite(got), np.isfinite(rounded))
    fine = np.isfinite(rounded)
    unit = np.spacing(np.abs(rounded[fine])).astype(np.float64)
    assert np.max(np.abs(got[fine].astype(np.float64) - want[fine]) / unit) <= 2.0


@pytest.mark.parametrize("name, values", [
    ("exp", {np.inf: np.inf, -np.inf: 0.0, 0.0: 1.0}), ("exp2", {np.inf: np.inf, -np.inf: 0.0, -149.0: 2.0**-149}),
    ("log", {0.0: -np.inf, np.inf: np.inf, -1.0: np.nan, 1.0: 0.0, 2.0**-149: -149 * np.log(2)}),
    ("log2", {0.0: -np.inf, -1.0: np.nan, 2.0**-140: -140.0, 8.0: 3.0}),
    ("tanh", {np.inf: 1.0, -np.inf: -1.0, -0.0: -0.0}), ("erf", {np.inf: 1.0, -np.inf: -1.0, -0.0: -0.0}),
    ("log1p", {np.inf: np.inf, -1.0: -np.inf, -0.0: -0.0, -2.0: np.nan, 1e-30: 1e-30, 2.0**60: 60 * np.log(2)}),
    ("isnan", {np.nan: 1.0, np.inf: 0.0}), ("isinf", {np.nan: 0.0, -np.inf: 1.0}),
    ("isfinite", {np.inf: 0.0, 1.0: 1.0})])
def test_functions_at_the_edges(name, values):
    x = np.zeros(4096, np.float32)
    keys = [*values, np.nan]
    x[:len(keys)] = keys
    out = "bool" if name.startswith("is") else "float32"
    f = elementwise(f'T.cast(T.call("{name}", "{out}", X[i + bx * 256]), "float32")', "float32", "float32")
    got = run_cpu(f, [x, None, None])["Y"][:len(keys)]
    want = np.array([*values.values(), {"isnan": 1.0, "isinf": 0.0, "isfinite": 0.0}.get(name, np.nan)], np.float32)
    np.testing.assert_array_equal(got, want)
    assert np.array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


def test_types_below_a_byte_are_refused_by_name():
    with pytest.raises(TileLangError, match="elements of type int4"):
        run_cpu(elementwise("X[i + bx * 256]", "int4", "int4"), [np.zeros(4096, np.int8)] * 3)


def test_half_values_agree_with_ml_dtypes():
    assert numpy_dtype(dtype("bfloat16")) == np.dtype(ml_dtypes.bfloat16)
