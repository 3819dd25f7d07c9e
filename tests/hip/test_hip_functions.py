"""Functions and conversions of the prelude, run from the produced machine code by the interpreter of tests/amd."""

import math
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("ziglang", reason="the package ziglang is not installed: pip install ziglang")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "amd"))

import isa_elf
import isa_machine

import tilelang

N = 64
# expression of x -> (NumPy in float64, least and greatest x, units in the last place)
FUNCTIONS = {
    "T.exp(x)": (np.exp, -80, 80, 1), "T.exp2(x)": (np.exp2, -120, 120, 1), "T.log(x)": (np.log, 1e-30, 1e5, 1.5),
    "T.log2(x)": (np.log2, 1e-3, 1e3, 1), "T.log1p(x)": (np.log1p, -0.9, 1e3, 1), "T.sin(x)": (np.sin, -1e5, 1e5, 1),
    "T.cos(x)": (np.cos, -3e38, 3e38, 1), "T.tan(x)": (np.tan, -1e12, 1e12, 1), "T.tanh(x)": (np.tanh, -5, 5, 1),
    "T.sinh(x)": (np.sinh, -5, 5, 1), "T.cosh(x)": (np.cosh, -5, 5, 1), "T.atan(x)": (np.arctan, -50, 50, 1),
    "T.asin(x)": (np.arcsin, -1, 1, 1), "T.acos(x)": (np.arccos, -1, 1, 1), "T.asinh(x)": (np.arcsinh, -50, 50, 1),
    "T.acosh(x)": (np.arccosh, 1, 50, 1), "T.atanh(x)": (np.arctanh, -0.99, 0.99, 1),
    "T.erf(x)": (np.vectorize(math.erf), -5, 5, 3), "T.sqrt(x)": (np.sqrt, 0, 1e30, 0.51),
    "T.rsqrt(x)": (lambda x: 1 / np.sqrt(x), 1e-38, 1e30, 1.5), "T.sigmoid(x)": (lambda x: 1 / (1 + np.exp(-x)), -30, 30, 2.5),
    "T.pow(T.abs(x), T.float32(1.75))": (lambda x: np.abs(x) ** 1.75, -30, 30, 1),
    "T.fmod(x, T.float32(0.375))": (lambda x: np.fmod(x, 0.375), -1e6, 1e6, 0),
    "T.atan2(x, T.float32(-1.5))": (lambda x: np.arctan2(x, -1.5), -30, 30, 1),
    "T.round(x)": (lambda x: np.trunc(x + np.copysign(0.5, x)), -30, 30, 0)}


def run(body, chip, *args, outputs="float32", loop="for i in T.Parallel(64):"):
    """Run a kernel of 64 threads whose body is text of i, A (float32 inputs) and B (results), from its machine code."""
    rows, n = args[0].shape
    program = tilelang.from_source(f"""
import tilelang.language as T

@T.prim_func
def program(A: T.Tensor(({rows}, {n}), "float32"), B: T.Tensor(({rows}, {n}), "{outputs}")):
    with T.Kernel(1, threads=64):
        {loop}
{body}
""", "program")
    binary = tilelang.compile(program, target={"kind": "hip", "mcpu": chip})._built.files["kernel.hsaco"]
    (kernel,) = isa_elf.read(binary).values()
    isa_machine.Program(kernel).run((1,), (64,), args)
    return args[1]


@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx950"])
def test_functions_are_as_exact_as_they_promise(chip):
    rng = np.random.default_rng(0)
    x = np.stack([rng.uniform(low, high, N) for _, low, high, _ in FUNCTIONS.values()]).astype(np.float32)
    near = [k for k, (_, low, _, _) in enumerate(FUNCTIONS.values()) if low < 0]
    x[near, :4] = 0.0, 1e-6, -1e-3, 1e-30
    text = "\n".join(f"            B[{k}, i] = {f.replace('(x', f'(A[{k}, i]')}" for k, f in enumerate(FUNCTIONS))
    found = run(text, chip, x, np.zeros_like(x))
    with np.errstate(all="ignore"):
        for k, (name, (f, _, _, most)) in enumerate(FUNCTIONS.items()):
            exact = f(x[k].astype(np.float64))
            unit = np.spacing(np.maximum(np.abs(exact), 1e-37).astype(np.float32)).astype(np.float64)
            worst = np.max(np.abs(found[k] - exact) / unit)
            assert worst <= most, f"{name}: {worst} units at {x[k][np.argmax(np.abs(found[k] - exact) / unit)]}"


@pytest.mark.parametrize("chip, dtype, of", [
    ("gfx942", "float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("gfx950", "float8_e5m2", ml_dtypes.float8_e5m2),
    ("gfx942", "float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz), ("gfx90a", "bfloat16", ml_dtypes.bfloat16),
    ("gfx950", "float16", np.float16)])
def test_narrow_types_are_rounded_to_nearest_and_widened_exactly(chip, dtype, of):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((1, N)) * np.exp2(rng.integers(-10, 7, N))).astype(np.float32)
    x[0, :4] = 0.0, -0.0, 2.0**-9, 100.0
    found = run(f'            B[0, i] = T.cast(T.cast(A[0, i], "{dtype}"), "float32")', chip, x, np.zeros_like(x))
    np.testing.assert_array_equal(found, x.astype(of).astype(np.float32))


def test_floats_beyond_the_range_of_an_integer_become_its_ends():
    x = np.array([[0.9, -0.9, 300.0, -300.0, 3e9, -3e9, np.inf, -np.inf] * 8], np.float32)
    for dtype in ("int8", "uint8", "int16", "int32", "uint32"):
        found = run(f'            B[0, i] = T.cast(A[0, i], "{dtype}")', "gfx942", x, np.zeros(x.shape, dtype), outputs=dtype)
        ends = np.iinfo(dtype)
        np.testing.assert_array_equal(found, np.clip(np.trunc(x.astype(np.float64)), ends.min, ends.max).astype(dtype))


def test_lanes_exchange_values_in_the_program_warps_of_a_wave():
    x = np.random.default_rng(2).standard_normal((6, N)).astype(np.float32)
    found = run("""
            B[0, i] = T.shfl_xor(A[0, i], 1) + T.shfl_xor(A[0, i], 2)
            B[1, i] = T.shfl_xor(A[1, i], 4) + T.shfl_xor(A[1, i], 8)
            B[2, i] = T.shfl_xor(A[2, i], 16)
            B[3, i] = T.shfl_up(A[3, i], 3)
            B[4, i] = T.shfl_down(A[4, i], 5)
            B[5, i] = T.shfl_sync(A[5, i], 7)
""", "gfx942", x, np.zeros_like(x), loop="for i in T.thread_binding(0, 64, 'threadIdx.x'):")
    lane, half = np.arange(N), np.arange(N) & 32
    up, down = np.where(lane % 32 >= 3, lane - 3, lane), np.where(lane % 32 < 27, lane + 5, lane)
    expected = [x[0, lane ^ 1] + x[0, lane ^ 2], x[1, lane ^ 4] + x[1, lane ^ 8], x[2, lane ^ 16], x[3, up], x[4, down],
                x[5, half + 7]]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
