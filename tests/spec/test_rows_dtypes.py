"""Element types by name (language 3): storage, conversion and arithmetic of each."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, cuda_text, run

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import numpy_dtype

INTEGERS = (T.int8, T.int16, T.short, T.int, T.int32, T.long, T.int64, T.uint8, T.uint16, T.uint, T.uint32, T.uint64)
FLOATS = (T.half, T.float16, T.bfloat16, T.float, T.float32, T.double, T.float64, T.tfloat32)
SMALL = (T.float8_e4m3, T.float8_e4m3fn, T.float8_e5m2)  # CUDA has a type for
ODD = (T.float8_e4m3fnuz, T.float8_e5m2fnuz, T.float8_e8m0fnu)  # made by the device header


def doubled(dtype):
    """Y = X + X in the type, through shared memory and a fragment; Z = X as float32."""
    @T.prim_func
    def f(X: T.Tensor((40,), dtype), Y: T.Tensor((40,), dtype), Z: T.Tensor((40,), T.float32)):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((40,), dtype)
            F = T.alloc_fragment((40,), dtype)
            T.copy(X, S)
            T.copy(S, F)
            for i in T.Parallel(40):
                F[i] = F[i] + S[i]
            T.copy(F, Y)
            T.copy(X, Z)

    return f


@pytest.mark.spec("T.int8", "T.int16", "T.short", "T.int", "T.int32", "T.long", "T.int64", "T.uint8", "T.uint16", "T.uint",
                  "T.uint32", "T.uint64", "L3.1:dtype")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap_in_their_width(dtype):
    kind = numpy_dtype(dtype)
    info = np.iinfo(kind)
    x = np.resize(np.array([0, 1, 5, info.max, info.min, info.max // 2 + 1], kind), 40)
    with np.errstate(over="ignore"):
        want = x + x
    for on in EXECUTIONS:
        _, y, z = run(doubled(dtype), x, on=on)
        assert y.dtype == kind and np.array_equal(y, want) and np.array_equal(z, x.astype(np.float32))
    cuda_text(doubled(dtype))


@pytest.mark.spec("T.half", "T.float16", "T.bfloat16", "T.float", "T.float32", "T.double", "T.float64", "T.tfloat32",
                  "T.float8_e4m3",
                  "T.float8_e4m3fn", "T.float8_e5m2", "L3.2:float8")
@pytest.mark.parametrize("dtype", FLOATS + SMALL, ids=str)
def test_floats_round_in_their_type(dtype):
    kind = numpy_dtype(dtype)
    x = np.resize(np.array([0, 0.5, -1.75, 3.25, 24, -100, 200, 7.0]), 40).astype(kind)
    want = (x.astype(np.float64) * 2).astype(kind)
    for on in EXECUTIONS:
        _, y, z = run(doubled(dtype), x, on=on)
        assert np.array_equal(y.astype(np.float64), want.astype(np.float64)), on
        assert np.array_equal(z, x.astype(np.float32)), on
    cuda_text(doubled(dtype))


@pytest.mark.spec("T.float8_e4m3fnuz", "T.float8_e5m2fnuz", "T.float8_e8m0fnu", "L3.2:float8")
@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_types_of_other_hardware_have_their_values(dtype):
    kind = numpy_dtype(dtype)
    x = np.resize(np.array([1, 2, 4, 8]), 40).astype(kind)
    for on in EXECUTIONS:
        _, y, z = run(doubled(dtype), x, on=on)
        assert np.array_equal(z, x.astype(np.float32)) and np.array_equal(y.astype(np.float32), 2 * z), on
    cuda_text(doubled(dtype))


@pytest.mark.spec("T.bool", "L3.1:dtype", "L4.2:operators")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_bools(on):
    @T.prim_func
    def f(X: T.Tensor((40,), T.bool), Y: T.Tensor((6, 40), "bool"), Z: T.Tensor((3, 40), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((40,), T.bool)
            T.copy(X, S)
            for i in T.Parallel(40):
                Y[0, i] = not S[i]
                Y[1, i] = S[i] + S[39 - i]  # whether the sum is not zero
                Y[2, i] = S[i] * S[39 - i]
                Y[3, i] = S[i] - S[39 - i]
                Y[4, i] = T.max(S[i], S[39 - i])
                Y[5, i] = T.min(S[i], S[39 - i])
                Z[0, i] = S[i] + S[39 - i]
                Z[1, i] = S[i] << S[39 - i]
                Z[2, i] = S[i] + 1

    x = np.random.default_rng(0).integers(0, 2, 40).astype(bool)
    r = x[::-1]
    _, y, z = run(f, x, on=on)
    assert np.array_equal(y, [~x, x | r, x & r, x ^ r, x | r, x & r])
    assert np.array_equal(z, [x | r, x.astype(int) << r, x.astype(int) + 1])
    cuda_text(f)


VECTORS = {"float16x2": "add2", "bfloat16x2": "mul2", "float32x2": "max2"}


@pytest.mark.spec("T.bfloat16x2", "T.float32x2", "T.float16x2", "L14:packed")
@pytest.mark.parametrize("name", VECTORS)
def test_pairs(name):
    dtype, op = getattr(T, name), getattr(T, VECTORS[name])
    kind = numpy_dtype(dtype.scalar)
    assert dtype.lanes == 2 and dtype.bytes == 2 * kind.itemsize and dtype.scalar.with_lanes(2) is dtype

    @T.prim_func
    def f(X: T.Tensor((16,), dtype.scalar), Y: T.Tensor((16,), dtype.scalar)):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            v = dtype(X[t * 4], X[t * 4 + 1])
            Y[t * 4:t * 4 + 2] = op(v, X[t * 4 + 2:t * 4 + 4])

    x = np.arange(-8, 8).astype(kind)
    a, b = x.reshape(4, 4)[:, :2].astype(np.float32), x.reshape(4, 4)[:, 2:].astype(np.float32)
    want = {"add2": a + b, "mul2": a * b, "max2": np.maximum(a, b)}[VECTORS[name]]
    for on in EXECUTIONS:
        assert np.array_equal(run(f, x, on=on)[1].reshape(4, 4)[:, :2].astype(np.float32), want), on
    cuda_text(f)


@pytest.mark.spec("T.float32x4", "T.float32x8", "T.float8_e4m3fnx8", "L5:slice-value")
@pytest.mark.parametrize("name", ("float32x4", "float32x8", "float8_e4m3fnx8"))
def test_wider_vectors_are_variables_of_a_thread(name):
    dtype = getattr(T, name)
    kind, n = numpy_dtype(dtype.scalar), dtype.lanes

    @T.prim_func
    def f(X: T.Tensor((4 * n,), dtype.scalar), Y: T.Tensor((4 * n,), dtype.scalar)):
        with T.Kernel(1, threads=4):
            t = T.get_thread_binding()
            v = X[t * n:t * n + n]
            w = T.Shuffle([v], list(range(n))[::-1])
            assert w.dtype == dtype
            Y[t * n:t * n + n] = w

    x = np.arange(4 * n).astype(kind)
    for on in EXECUTIONS:
        got = run(f, x, on=on)[1].reshape(4, n).astype(np.float32)
        assert np.array_equal(got, x.reshape(4, n)[:, ::-1].astype(np.float32)), on
    cuda_text(f)


@pytest.mark.spec("T.int32", "L4.2:operators")
def test_hashes_of_scalars_and_of_indices_wrap():
    """Their products were taken for those of indices, which never wrap: remainders were those of the whole product."""
    @T.prim_func
    def f(seed: T.int32, blocks: T.int32, O: T.Tensor((70, 8, 5), "int32")):
        with T.Kernel(blocks, threads=8) as b:
            t = T.get_thread_binding()
            h = (b * 8 + t) * 1103515245 + seed
            O[b, t, 0] = h % 1000
            O[b, t, 1] = h // 65536
            O[b, t, 2] = (b * 16777259 + 1013904223) % 1000
            O[b, t, 3] = (seed % 97) * 31 % 97 + t
            O[b, t, 4] = (seed * 1664525) // 1664525

    def wrapped(v):
        return (v + 2**31) % 2**32 - 2**31

    seed = 2000000011
    index = [(b, t) for b in range(70) for t in range(8)]
    want = [[wrapped((b * 8 + t) * 1103515245 + seed) % 1000, wrapped((b * 8 + t) * 1103515245 + seed) // 65536,
             wrapped(b * 16777259 + 1013904223) % 1000, seed % 97 * 31 % 97 + t, wrapped(seed * 1664525) // 1664525]
            for b, t in index]
    for on in EXECUTIONS:
        assert run(f, seed, 70, on=on)[0].reshape(-1, 5).tolist() == want, on
    text = cuda_text(f)
    assert "(unsigned)seed * (unsigned)1664525" in text  # C++ leaves what signed arithmetic gives beyond its range open


@pytest.mark.spec("T.float4_e2m1fnx2", "T.extract_lane", "L3.2:float4_e2m1fn", "L3.1:dtype")
def test_packed_pairs_of_fp4_are_one_byte():
    dtype = T.float4_e2m1fnx2
    assert (dtype.bits, dtype.lanes, dtype.bytes) == (4, 2, 1) and dtype.is_float4() and T.is_float4_e2m1fn(dtype)

    @T.prim_func
    def f(X: T.Tensor((8, 32), dtype), Y: T.Tensor((2, 8, 32), "float32"), Z: T.Tensor((8, 32), dtype),
          W: T.Tensor((8, 32), dtype)):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((8, 32), dtype)
            F = T.alloc_fragment((8, 32), dtype)
            T.copy(X, S)
            T.copy(S, F)
            T.copy(F, Z)
            for i, j in T.Parallel(8, 32):
                pair = S[i, 31 - j]
                Y[0, i, j] = T.cast(T.extract_lane(pair, 0), "float32")
                Y[1, i, j] = T.cast(T.extract_lane(T.cast(X[i, 31 - j], "float32x2"), 1), "float32")
            for i, j in T.Parallel(8, 32):  # the nearest fp4 of each half, and the two exchanged
                W[i, j] = T.cast(T.float32x2(Y[1, i, j] * 0.7, Y[0, i, j]), dtype)

    x = np.arange(256, dtype=np.uint8).reshape(8, 32)
    halves = np.stack([x & 15, x >> 4]).view(ml_dtypes.float4_e2m1fn).astype(np.float32)[:, :, ::-1]
    low = (halves[1] * np.float32(0.7)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    high = halves[0].astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    for on in EXECUTIONS:
        _, y, z, w = run(f, x, np.zeros((2, 8, 32), np.float32), np.zeros_like(x), np.zeros_like(x), on=on)
        assert np.array_equal(y, halves) and np.array_equal(z, x) and np.array_equal(w, low | high << 4), on
    cuda_text(f)


@pytest.mark.spec("T.float4_e2m1fnx2", "L3.2:float4_e2m1fn")
def test_a_tile_of_pairs_is_only_copied():
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(X: T.Tensor((8, 32), T.float4_e2m1fnx2), Y: T.Tensor((8, 32), "float32")):
            with T.Kernel(1, threads=64):
                T.copy(X, Y)

        cuda_text(f)
    assert e.value.kind in ("small-type", "copy-tile")


@pytest.mark.spec("L3.1:dtype", "T.dtype")
def test_calling_a_type_makes_constants_casts_and_vectors():
    assert T.float32(1.5).dtype == "float32" and T.int32(1.7).value == 1 and T.int32().dtype == "int32"
    assert T.float16x2(1, 2).dtype == "float16x2" and T.float16x2(3).dtype == "float16x2"
    for bad in (lambda: T.int8(200), lambda: T.uint8(-1), lambda: T.float16(1e6)):
        with pytest.raises((ValueError, OverflowError, TileLangError)):
            bad()
    with pytest.raises(ValueError, match="unknown dtype"):
        T.dtype("half_precision")
    with pytest.raises(TypeError, match="Invalid DataType"):
        T.dtype(3.5)
    assert T.dtype(np.int16) == T.dtype("short") == "int16" and T.dtype(ml_dtypes.bfloat16) == "bfloat16"


@pytest.mark.spec("L3.1:dtype", "T.tfloat32")
def test_types_that_no_other_framework_has_are_spelled_so():
    assert str(T.tfloat32) == "custom[tfloat32]" and str(T.float4_e2m1_unpacked) == "custom[float4_e2m1_unpacked]8"
    assert T.dtype("custom[tfloat32]") is T.tfloat32 == "tfloat32" and f"{T.tfloat32}" == "tfloat32"
    assert repr(T.tfloat32) == "dtype('tfloat32')" and str(T.float16) == f"{T.float16}" == "float16"
    assert pickle.loads(pickle.dumps(T.tfloat32)) is T.tfloat32
