"""float8_e4m3fnuz, float8_e5m2fnuz and float8_e8m0fnu: every code, every half, all pairs; and the device's own text, run here.

The fnuz types have one zero and one NaN (0x80).  float8_e8m0fnu holds powers of two from 2**-127 to 2**127 and NaN (0xFF), no
sign and no zero: a number becomes the next power of two that its size does not exceed (cvt.rp.satfinite.ue8m0x2).
"""

import ctypes
import functools
import re
import shutil
import subprocess

import numpy as np
import pytest
from everywhere import EXECUTIONS, call, cuda_text, placed, run
from numbers_of import every

import tilelang
import tilelang.language as T
from tilelang.codegen.device.prelude import FLOATS, sections_of
from tilelang.errors import TileLangError
from tilelang.ir import const, numpy_dtype
from tilelang.ir.dtype import float_min, scale_value

FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")
SCALE = "float8_e8m0fnu"
TYPES = (*FNUZ, SCALE)
SOURCES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint64", "bool")
N = 4096  # samples of wider types
pytestmark = [pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero"),
              pytest.mark.spec("T.float8_e4m3fnuz", "T.float8_e5m2fnuz", "T.float8_e8m0fnu")]


def all_of(name):
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(name))


@functools.cache
def numbers(name):
    """The numbers of a type from the least to the greatest, exactly, and their codes."""
    v = all_of(name).astype(np.longdouble)
    order = np.argsort(v[np.isfinite(v)], kind="stable")
    return v[np.isfinite(v)][order], np.flatnonzero(np.isfinite(v))[order]


def code(x, name):
    """Codes of exact numbers, by searching the type's own: independent of all arithmetic on bits."""
    x = np.asarray(x, np.longdouble)
    v, codes = numbers(name)
    if name == SCALE:
        at = np.minimum(np.searchsorted(v, np.abs(x)), len(v) - 1)
        return np.where(np.isnan(x), 0xFF, codes[at]).astype(np.uint8)
    at = np.searchsorted((v[1:] + v[:-1]) / 2, x)
    at = np.where((at < len(v) - 1) & (x == np.append((v[1:] + v[:-1]) / 2, np.inf)[at]) & (codes[at] % 2 == 1), at + 1, at)
    return np.where(np.isnan(x), 0x80, codes[at]).astype(np.uint8)


def samples(source, name):
    """Numbers of another type: all of 16 bits; else samples, numbers of the type, midpoints, and their neighbours."""
    if source in ("float16", "bfloat16"):
        return every(source, 65536)
    x = every(source, N)
    if source.startswith("float"):
        v = numbers(name)[0].astype(source)
        near = np.concatenate([v, ((v[1:].astype(np.float64) + v[:-1]) / 2).astype(source)])
        near = np.concatenate([near, np.nextafter(near, x.dtype.type(np.inf)), np.nextafter(near, x.dtype.type(-np.inf))])
        x[-len(near):] = near
    return x


def converted(name, few=0):
    """Y[k] = X[k] for every source; few: so many elements instead of the samples."""
    X = [T.Tensor((few or (65536 if s in ("float16", "bfloat16") else N),), s) for s in SOURCES]
    Y = [T.Tensor(x.shape, name) for x in X]

    @T.macro
    def apply(A, B, n):
        for i in T.Parallel(n):
            B[i] = T.cast(A[i], name)

    @T.prim_func
    def f(X0: X[0], X1: X[1], X2: X[2], X3: X[3], X4: X[4], X5: X[5], X6: X[6], X7: X[7],
          Y0: Y[0], Y1: Y[1], Y2: Y[2], Y3: Y[3], Y4: Y[4], Y5: Y[5], Y6: Y[6], Y7: Y[7]):
        with T.Kernel(1, threads=512):
            [apply(A, B, A.shape[0]) for A, B in
             ((X0, Y0), (X1, Y1), (X2, Y2), (X3, Y3), (X4, Y4), (X5, Y5), (X6, Y6), (X7, Y7))]

    return f


@pytest.mark.spec("T.cast", "L4.3:casts", "L3.2:float8")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("name", TYPES)
def test_numbers_of_every_type_are_rounded_once(name, on):
    xs = [samples(s, name) for s in SOURCES]
    ys = run(converted(name), *xs, on=on)[len(xs):]
    for s, x, y in zip(SOURCES, xs, ys):
        want, got = code(x.astype(np.longdouble), name), y.view(np.uint8)
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), f"{s} {x[wrong[0]]!r} to {name}: {got[wrong[0]]:#x}, expected {want[wrong[0]]:#x}"


OPERATORS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}


def paired(name, n=256):
    """All pairs: sums, …, extrema, comparisons; every code in other types, negated, and through shared memory."""
    @T.prim_func
    def f(X: T.Tensor((n,), name), Y: T.Tensor((6, n, n), name), C: T.Tensor((3, n, n), "bool"),
          F: T.Tensor((n,), "float32"), H: T.Tensor((n,), "bfloat16"), D: T.Tensor((n,), "float64"),
          I: T.Tensor((n,), "int32"), B: T.Tensor((n,), "bool"), M: T.Tensor((n,), name), P: T.Tensor((n,), name)):
        with T.Kernel(1, threads=512):
            S = T.alloc_shared((n,), name)
            R = T.alloc_fragment((n,), name)
            T.copy(X, S)
            T.copy(S, R)
            T.copy(R, P)
            T.copy(S, F)
            T.copy(S, H)
            T.copy(S, D)
            for i in T.Parallel(n):
                I[i] = T.cast(S[i], "int32")
                B[i] = T.cast(S[i], "bool")
                M[i] = -S[i]
            for i, j in T.Parallel(n, n):
                Y[0, i, j] = S[i] + S[j]
                Y[1, i, j] = S[i] - S[j]
                Y[2, i, j] = S[i] * S[j]
                Y[3, i, j] = S[i] / S[j]
                Y[4, i, j] = T.max(S[i], S[j])
                Y[5, i, j] = T.min(S[i], S[j])
                C[0, i, j] = S[i] < S[j]
                C[1, i, j] = S[i] == S[j]
                C[2, i, j] = S[i] != S[j]

    return f


@pytest.mark.spec("L4.2:operators", "L3.2:float8")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("name", TYPES)
def test_all_codes_and_all_pairs(name, on):
    _, y, c, f, h, d, i, b, m, p = run(paired(name), all_of(name), on=on)
    x = all_of(name).astype(np.float32)
    left, right = x[:, None], x[None, :]
    wide = [fn(left, right) for fn in OPERATORS.values()] + [np.fmax(left, right), np.fmin(left, right)]
    for what, got, want in zip((*OPERATORS, "max", "min"), y, wide):
        assert np.array_equal(got.view(np.uint8), code(want, name)), what
    for got, want in zip(c, (left < right, left == right, left != right)):
        assert np.array_equal(got, want)
    for got in (f, h, d):
        assert np.array_equal(got.astype(np.float64), x.astype(np.float64), equal_nan=True)
    whole = np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0), -2.0**31, 2.0**31 - 1)
    assert np.array_equal(i, whole.astype(np.int32)) and np.array_equal(b, x != 0)
    assert np.array_equal(m.view(np.uint8), code(-x, name)) and np.array_equal(p.view(np.uint8), all_of(name).view(np.uint8))


@pytest.mark.parametrize("name", TYPES)
def test_the_text_for_a_gpu_is_assembled(name):
    text = cuda_text(converted(name, 512), "sm_90a")
    kind = {"float8_e4m3fnuz": "fp8_e4_fnuz", "float8_e5m2fnuz": "fp8_e5_fnuz", SCALE: "fp8_e8m0"}[name]
    assert f"tl::{kind}((float)X" in text and "odd_float" in text and "cuda_fp8" not in text
    cuda_text(paired(name, 32), "sm_80")


SHIMS = """
#include <cfenv>
#include <cstring>
#define TL_DEVICE inline
inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
inline float __fadd_rn(float a, float b) { volatile float c = a + b; return c; }
template <typename T> float cut(T x) {
  fesetround(FE_TOWARDZERO);
  volatile T v = x;
  volatile float y = (float)v;
  fesetround(FE_TONEAREST);
  return y;
}
inline float __ll2float_rz(long long x) { return cut(x); }
inline float __ull2float_rz(unsigned long long x) { return cut(x); }
inline long long __float2ll_rz(float x) { return (long long)x; }
inline unsigned long long __float2ull_rz(float x) { return (unsigned long long)x; }
"""
ENTRIES = {"float16": None, "float32": "float", "float64": "double", "int32": "int", "int64": "long long",
           "uint64": "unsigned long long"}
DEVICE = {"float8_e4m3fnuz": "fp8_e4_fnuz", "float8_e5m2fnuz": "fp8_e5_fnuz", SCALE: "fp8_e8m0"}


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """The device header's types, made by the system's C++ compiler."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    header = "".join(sections_of((FLOATS,)).values())
    for pattern, plain in ((r'asm\("cvt.rz.f32.f64 [^;]*;"[^;]*;', "y = cut(x);"),
                           (r'asm\("cvt.f64.f32 [^;]*;"[^;]*;', "back = y;")):
        header, n = re.subn(pattern, plain, header)
        assert n == 1
    entries = "".join(
        f'extern "C" void {t}_{s}(const {c}* x, unsigned char* y, long n) {{ for (long i = 0; i < n; ++i) y[i] = '
        f"tl::{t}(x[i]).code; }}\n" for t in DEVICE.values() for s, c in ENTRIES.items() if c) + "".join(
        f'extern "C" void {t}_values(float* y) {{ tl::{t} x; for (int i = 0; i < 256; ++i) {{ x.code = i; y[i] = float(x); '
        "}}\n" for t in DEVICE.values())
    folder = tmp_path_factory.mktemp("device_text")
    (folder / "floats.cpp").write_text(f"{SHIMS}namespace tl {{\n{header}}}\n{entries}", encoding="utf-8")
    subprocess.run([compiler, "-std=c++17", "-O1", "-frounding-math", "-w", "-shared", "-fPIC", "-o", str(folder / "floats.so"),
                    str(folder / "floats.cpp")], check=True)
    return ctypes.CDLL(str(folder / "floats.so"))


@pytest.mark.parametrize("name", TYPES)
def test_the_device_text_itself_converts_as_the_meaning_does(name, on_host):
    values = np.zeros(256, np.float32)
    getattr(on_host, f"{DEVICE[name]}_values")(values.ctypes.data_as(ctypes.c_void_p))
    want = all_of(name).astype(np.float32)
    assert np.array_equal(values.view(np.uint32), want.view(np.uint32))  # NaN by its bits too: its sign may be copied
    for source in ENTRIES:
        x = samples(source, name)
        x = np.ascontiguousarray(x.astype(np.float32) if source == "float16" else x)
        got = np.zeros(len(x), np.uint8)
        function = getattr(on_host, f"{DEVICE[name]}_{'float32' if source == 'float16' else source}")
        function(x.ctypes.data_as(ctypes.c_void_p), got.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(len(x)))
        assert np.array_equal(got, code(x.astype(np.longdouble), name)), source


def tiles(name, m=9, n=70):
    """Reductions, scans, shuffles, a guarded tile, constants, and a scalar of the type."""
    @T.prim_func
    def f(s: T.dtype(name), X: T.Tensor((m, n), name), Y: T.Tensor((6, m), name), Z: T.Tensor((m, n), name),
          W: T.Tensor((m, n), "float32"), P: T.Tensor((16, 80), name), Q: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((m, n), name)
            R = T.alloc_fragment((m,), name)
            G = T.alloc_fragment((m,), "float32")
            S = T.alloc_shared((16, 80), name)
            T.copy(X, F)
            T.reduce_max(F, R, dim=1)
            T.copy(R, Y[0, 0:m])
            T.reduce_min(F, R, dim=1)
            T.copy(R, Y[1, 0:m])
            T.reduce_absmax(F, R, dim=1)
            T.copy(R, Y[2, 0:m])
            T.reduce_max(F, R, dim=1, nan_propagate=True)
            T.copy(R, Y[3, 0:m])
            T.fill(R, s)
            T.copy(R, Y[4, 0:m])
            T.clear(R)
            T.copy(R, Y[5, 0:m])
            T.reduce_sum(F, G, dim=1)
            T.copy(G, Q)
            T.cummax(F, F, dim=1)
            T.copy(F, Z)
            T.copy(X[0:16, 0:80], S)
            T.copy(S, P)
            for i, j in T.Parallel(m, n):
                W[i, j] = T.if_then_else(X[i, j] > s, T.cast(X[i, j], "float32"), T.cast(T.cast(i * 3 - j, name), "float32"))

    return f


@pytest.mark.spec("L3.2:float8", "L12.2:reduce", "R4:scalar")
@pytest.mark.parametrize("name", TYPES)
def test_tiles_of_these_types(name):
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 120, (9, 70)).astype(np.uint8)
    codes[2, ::7], codes[3] = code(np.nan, name), code(np.nan, name)
    x = codes.view(numpy_dtype(name))
    results = {on: run(tiles(name), 1.3, x, on=on) for on in EXECUTIONS}
    wide, s = x.astype(np.float32), np.asarray(1.3).astype(np.float64)
    least = np.float32(float_min(name))
    greatest, held = -least if name != SCALE else np.float32(2.0**127), code(s, name)
    for on, (_, y, z, w, p, q) in results.items():
        low, high = np.where(np.isnan(wide), greatest, wide), np.where(np.isnan(wide), least, wide)
        bytes_of = y.view(np.uint8)
        assert np.array_equal(bytes_of[0], code(high.max(1), name)) and np.array_equal(bytes_of[1], code(low.min(1), name)), on
        assert np.array_equal(bytes_of[2], code(np.where(np.isnan(wide), 0, np.abs(wide)).max(1), name)), on
        assert np.array_equal(bytes_of[3], code(np.where(np.isnan(wide).any(1), np.nan, high.max(1)), name)), on
        assert (bytes_of[4] == held).all() and (bytes_of[5] == 0).all(), on
        assert np.array_equal(z.view(np.uint8), code(np.fmax.accumulate(np.maximum(high, least), 1), name)), on
        assert np.array_equal(p.view(np.uint8)[:9, :70], codes) and not p.view(np.uint8)[9:].any(), on  # nothing there: zeros
        ij = np.subtract.outer(np.arange(9) * 3, np.arange(70))
        other = code(ij, name).view(numpy_dtype(name)).astype(np.float32)
        limit = held.view(numpy_dtype(name)).astype(np.float32)
        assert np.array_equal(w, np.where(wide > limit, wide, other), equal_nan=True), on
        np.testing.assert_allclose(q, wide.sum(1), rtol=1e-5)
    cuda_text(tiles(name, 4, 32), "sm_90a")


@pytest.mark.spec("L3.2:float8", "L11:gemm")
@pytest.mark.parametrize("name", FNUZ)
def test_products_without_a_matrix_instruction(name):
    @T.prim_func
    def f(A: T.Tensor((32, 48), name), B: T.Tensor((48, 40), name), C: T.Tensor((32, 40), "float32")):
        with T.Kernel(1, threads=64):
            As, Bs = T.alloc_shared((32, 48), name), T.alloc_shared((48, 40), name)
            F = T.alloc_fragment((32, 40), "float32")
            T.copy(A, As)
            T.copy(B, Bs)
            T.clear(F)
            T.gemm(As, Bs, F)
            T.copy(F, C)

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, s).astype(numpy_dtype(name)) for s in ((32, 48), (48, 40)))
    for on in EXECUTIONS:
        assert np.array_equal(run(f, a, b, on=on)[2], a.astype(np.float32) @ b.astype(np.float32)), on
    cuda_text(f, "sm_90a")


@pytest.mark.spec("L3.2:float8")
@pytest.mark.parametrize("name", FNUZ)
def test_neighbours_pass_the_one_zero(name):
    @T.prim_func
    def f(X: T.Tensor((256,), name), Y: T.Tensor((2, 256), name)):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(256):
                Y[0, i] = T.nextafter(X[i], T.max_value(name))
                Y[1, i] = T.nextafter(X[i], T.min_value(name))

    v, codes = numbers(name)
    for on in EXECUTIONS:
        y = run(f, all_of(name), on=on)[1].view(np.uint8)
        assert np.array_equal(y[0][codes], np.append(codes[1:], codes[-1])) and y[0][0x80] == 0x80, on
        assert np.array_equal(y[1][codes], np.append(codes[0], codes[:-1])), on
    assert len(v) == 255


@pytest.mark.parametrize("build", [
    lambda: T.reduce_sum(T.alloc_fragment((4, 8), SCALE), T.alloc_fragment((4,), SCALE), dim=1),
    lambda: T.cumsum(T.alloc_shared((4, 8), SCALE), T.alloc_shared((4, 8), SCALE), dim=1),
    lambda: T.alloc_reducer((4,), SCALE, op="sum")], ids=("reduce", "scan", "reducer"))
def test_sums_of_scales_are_refused(build):
    with pytest.raises(TileLangError, match="a sum needs a type with a zero") as e:
        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                build()

    assert e.value.kind in ("reduce-dtype", "reducer-type")


def test_constants_of_scales_are_powers_of_two():
    assert [const(v, SCALE).value for v in (0, 1, -3, 2.0**-140, 5.0)] == [2.0**-127, 1, 4, 2.0**-127, 8]
    assert T.max_value(SCALE).value == 2.0**127 and T.min_value(SCALE).value == 2.0**-127 == float_min(SCALE)
    assert np.isnan(const(np.nan, SCALE).value) and T.infinity(SCALE).value == 2.0**127 == scale_value(-np.inf)
    with pytest.raises(ValueError, match="exceeds maximum"):
        const(2.0**128, SCALE)


@pytest.mark.spec("R4:scalar", "R4:dtype")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_scalars_and_tensors_of_scales(on):
    @T.prim_func
    def f(s: T.dtype(SCALE), X: T.Tensor((4,), SCALE), Y: T.Tensor((4,), SCALE)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = X[i] * s

    where = placed(on)
    kernel = tilelang.compile(f, **where)
    x, y = np.array([100, 127, 254, 255], np.uint8).view(numpy_dtype(SCALE)), np.zeros(4, np.uint8).view(numpy_dtype(SCALE))
    for s, want in ((1.0, [100, 127, 254, 255]), (1.3, [101, 128, 254, 255]), (-4, [102, 129, 254, 255]), (0, [0, 0, 127, 255]),
                    (2.0**-130, [0, 0, 127, 255]), (2.0**127, [227, 254, 254, 255]), (float("nan"), [255] * 4)):
        call(where, kernel, s, x, y)
        assert y.view(np.uint8).tolist() == want, s
    for s in (2.0**127 * 1.01, float("inf"), float("-inf")):
        with pytest.raises((OverflowError, ValueError), match="scalar s expected float"):
            call(where, kernel, s, x, y)
    torch = pytest.importorskip("torch")
    if hasattr(torch, SCALE) and where != {"target": "cuda"}:
        tx, ty = torch.from_numpy(x.view(np.uint8).copy()).view(torch.float8_e8m0fnu), torch.zeros(4, dtype=torch.uint8)
        kernel(2.0, tx, ty.view(torch.float8_e8m0fnu))
        assert ty.tolist() == [101, 128, 254, 255]
