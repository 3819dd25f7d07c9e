"""Types narrower than a byte (language 3.2): packed in global memory, values of their own elsewhere; unpack_small_types."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, SM80, cuda_text

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

RNG = np.random.default_rng(4)
FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # value of each code


def pack(codes):
    """Codes 0..15 of an even last dimension as bytes, low nibble first."""
    codes = np.asarray(codes).astype(np.uint8)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(np.int8)


def codes_of(packed):
    b = np.asarray(packed).view(np.uint8)
    return np.stack([b & 15, b >> 4], -1).reshape(*b.shape[:-1], -1)


def signed(codes):
    return (codes.astype(np.int32) ^ 8) - 8


def call(f, *args, on):
    target, backend = {"tile": ("cpu", "tile"), "simulator": (SM80, "simulator"), "cpu": ("cpu", None)}[on]
    args = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    tilelang.compile(f, target=target, execution_backend=backend)(*args)
    return args


@pytest.mark.spec("T.int4", "L3.2:int4")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_int4_elements_and_tiles(on):
    @T.prim_func
    def f(X: T.Tensor((9, 32), T.int4), Y: T.Tensor((9, 32), "int32"), Z: T.Tensor((9, 32), "float16")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((9, 32), "int4")
            F = T.alloc_fragment((9, 32), "int8")
            T.copy(X, S)
            T.copy(S, F)
            for i, j in T.Parallel(9, 32):
                Y[i, j] = T.cast(F[i, j], "int32") * 10 + T.cast(X[8 - i, 31 - j], "int32")
            for i, j in T.Parallel(9, 32):
                Z[i, j] = T.cast(S[i, j] + S[i, (j + 1) % 32], "float16")  # int4 + int4 wraps

    codes = RNG.integers(0, 16, (9, 32))
    _, y, z = call(f, pack(codes), np.zeros((9, 32), np.int32), np.zeros((9, 32), np.float16), on=on)
    x = signed(codes)
    assert np.array_equal(y, x * 10 + x[::-1, ::-1])
    assert np.array_equal(z, signed((x + np.roll(x, -1, 1)) & 15))
    cuda_text(f)


@pytest.mark.spec("L3.2:int4", "T.gemm")
@pytest.mark.parametrize("dt,value", [("int4", signed), ("uint4", np.asarray)])
@pytest.mark.parametrize("on", EXECUTIONS)
def test_products_of_packed_integers(on, dt, value):
    M, N, K = 32, 32, 64

    @T.prim_func
    def f(A: T.Tensor((M, K), dt), B: T.Tensor((N, K), dt), C: T.Tensor((M, N), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((M, 32), dt)
            R = T.alloc_shared((N, 32), dt)
            F = T.alloc_fragment((M, N), "int32")
            T.clear(F)
            for k in T.Pipelined(K // 32, num_stages=2):
                T.copy(A[0, k * 32], S)
                T.copy(B[0, k * 32], R)
                T.gemm(S, R, F, transpose_B=True)
            T.copy(F, C)

    a, b = RNG.integers(0, 16, (M, K)), RNG.integers(0, 16, (N, K))
    assert np.array_equal(call(f, pack(a), pack(b), np.zeros((M, N), np.int32), on=on)[2], value(a) @ value(b).T)
    for arch in ("sm_80", "sm_90a") if on == "tile" else ():
        cuda_text(f, arch)


@pytest.mark.spec("L3.2:int4")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_int4_results_are_packed_and_wrapped(on):
    m = T.dynamic("m")

    @T.prim_func
    def f(X: T.Tensor((m, 24), "int32"), Y: T.Tensor((m, 24), "int4")):
        with T.Kernel(T.ceildiv(m, 8), threads=32) as b:
            F = T.alloc_fragment((8, 24), "int32")
            G = T.alloc_fragment((8, 24), "int4")
            T.copy(X[b * 8, 0], F)
            T.copy(F, G)
            T.copy(G[0:8, 0:24], Y[b * 8, 0])

    x = RNG.integers(-100, 100, (11, 24)).astype(np.int32)
    y = call(f, x, np.zeros((11, 12), np.int8), on=on)[1]
    assert np.array_equal(codes_of(y), x & 15)
    cuda_text(f)


@pytest.mark.spec("T.float4_e2m1fn", "L3.2:float4_e2m1fn")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_fp4_values(on):
    @T.prim_func
    def f(X: T.Tensor((4, 16), "float4_e2m1fn"), Y: T.Tensor((4, 16), "float32"), Z: T.Tensor((4, 16), "bfloat16")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((4, 16), "float4_e2m1fn")
            T.copy(X, S)
            for i, j in T.Parallel(4, 16):
                Y[i, j] = T.cast(X[i, j], "float32")
            for i, j in T.Parallel(4, 16):
                Z[i, j] = S[i, j] * T.cast(2, "bfloat16")

    codes = np.stack([np.roll(np.arange(16), k) for k in range(4)])
    _, y, z = call(f, pack(codes), np.zeros((4, 16), np.float32), np.zeros((4, 16), ml_dtypes.bfloat16), on=on)
    assert y.tobytes() == FP4[codes].tobytes() and np.array_equal(z.astype(np.float32), 2 * FP4[codes])
    cuda_text(f)


@pytest.mark.spec("L3.2:float4_e2m1fn")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_fp4_results_round_to_nearest_even_and_saturate(on):
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 1e9, -np.inf, -0.0, 0.2499, 5.01, -5, -3.5, 6]
    x = np.concatenate([np.linspace(-7, 7, 113), ties])
    x = x.astype(np.float32).reshape(1, 128)

    @T.prim_func
    def f(X: T.Tensor((1, 128), "float32"), Y: T.Tensor((1, 128), "float4_e2m1fn")):
        with T.Kernel(1, threads=32):
            F = T.alloc_fragment((1, 128), "float32")
            T.copy(X, F)
            T.copy(F, Y)

    y = call(f, x, np.zeros((1, 64), np.int8), on=on)[1]
    want = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(codes_of(y), want & 15)
    cuda_text(f)


@pytest.mark.spec("T.call_extern")
@pytest.mark.parametrize("what", ("element", "odd", "reduce", "address", "half of a view", "rows"))
def test_what_needs_half_a_byte_is_refused(what):
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(X: T.Tensor((4, 32 if what != "rows" else 31), "int4"), Y: T.Tensor((4, 32), "int32")):
            with T.Kernel(1, threads=32):
                F = T.alloc_fragment((4, 32), "int4")
                S = T.alloc_shared((4, 32), "int4")
                R = T.alloc_fragment((4,), "int4")
                if what == "element":
                    X[0, 0] = 1
                if what == "odd":
                    T.copy(F[0:4, 0:31], X[0:4, 1:32])
                if what == "reduce":
                    T.reduce_max(F, R, dim=1)
                if what == "address":
                    T.call_extern("handle", "f", T.address_of(S[0, 0]))
                if what == "half of a view":
                    V = T.view(S, (4, 16), "int8")
                    V[0, 0] = 1
                    S[0, T.get_thread_binding()] = 1
                if what == "rows":
                    Y[0, 0] = X[0, 0]

        tilelang.compile(f, target="cpu")
    assert e.value.kind == "small-type"


X = RNG.standard_normal((64, 64)).astype(np.float32) * 3


def fp4_codes(x):
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("form", ("tile", "serial", "vectorized", "slice", "if", "guard", "both arms", "each thread"))
@pytest.mark.parametrize("dt", ("float4_e2m1fn", "int4"))
def test_neighbouring_elements_stored_one_by_one_make_whole_bytes(form, dt, on):
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), dt)):
        with T.Kernel(8, threads=64) as b:
            t = T.get_thread_binding()
            F = T.alloc_fragment((8, 64), "float32")
            T.copy(A[b * 8, 0], F)
            if form == "tile":
                for i, j in T.Parallel(8, 64):
                    Y[b * 8 + i, j] = F[i, j]
            if form == "serial":
                for i in T.Parallel(8):
                    for j in T.serial(64):
                        Y[b * 8 + i, j] = A[b * 8 + i, j]
            if form == "vectorized":
                for j in T.vectorized(8):
                    Y[b * 8 + t // 8, t % 8 * 8 + j] = A[b * 8 + t // 8, t % 8 * 8 + j]
            if form == "slice":
                Y[b * 8 + t // 8, t % 8 * 8:t % 8 * 8 + 8] = A[b * 8 + t // 8, t % 8 * 8:t % 8 * 8 + 8]
            if form == "if":
                for i, j in T.Parallel(8, 64):
                    if i < 5:
                        Y[b * 8 + i, j] = F[i, j]
            if form == "guard":
                for i, j in T.Parallel(8, 64):
                    if j % 3 != 0:
                        Y[b * 8 + i, j] = F[i, j]
            if form == "both arms":
                for i, j in T.Parallel(8, 64):
                    v = F[i, j] * 2
                    if v > 0:
                        Y[b * 8 + i, j] = v * 0.5
                    else:
                        Y[b * 8 + i, j] = F[i, j]
            if form == "each thread":
                for i, j in T.Parallel(8, 64):
                    Y[b * 8 + i, j] = T.cast(Y[b * 8 + i, j], "float32") * 0 + F[i, j]

    before = RNG.integers(0, 16, (64, 64))
    if form in ("if", "guard"):
        keep = (np.arange(64) % 8 >= 5)[:, None] if form == "if" else (np.arange(64) % 3 == 0)[None]
    else:
        keep = np.zeros((1, 1), bool)
    want = fp4_codes(X) if dt != "int4" else np.trunc(X).astype(np.int64) & 15
    got = codes_of(call(f, X, pack(before), on=on)[1])
    assert np.array_equal(got, np.where(keep, before, want))
    if on == "tile":
        cuda_text(f)


def padded(codes, width):
    """Packed rows in an array of `width` bytes a row, and that array."""
    whole = np.full((len(codes), width), 77, np.int8)
    rows = whole[:, :codes.shape[1] // 2]
    rows[:] = pack(codes)
    return rows, whole


@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("form", ("compact", "apart", "run time"))
def test_packed_tensors_have_strides_in_values(form, on):
    stride = {"compact": 64, "apart": 96, "run time": T.dynamic("s")}[form]
    m = T.dynamic("m")

    @T.prim_func
    def f(A: T.StridedTensor((m, 64), (stride, 1), "int4"), Y: T.StridedTensor((m, 64), (stride, 1), "int4")):
        with T.Kernel(T.ceildiv(m, 8), threads=32) as b:
            for i, j in T.Parallel(8, 64):
                if b * 8 + i < m:
                    Y[b * 8 + i, j] = A[b * 8 + i, 63 - j]

    codes = RNG.integers(0, 16, (11, 64))
    width = 32 if form == "compact" else 48
    (a, _), (y, whole) = padded(codes, width), padded(codes, width)
    target, backend = {"tile": ("cpu", "tile"), "simulator": (SM80, "simulator"), "cpu": ("cpu", None)}[on]
    tilelang.compile(f, target=target, execution_backend=backend)(a, y)
    assert np.array_equal(codes_of(y), codes[:, ::-1]) and np.all(whole[:, 32:] == 77)
    cuda_text(f)


@pytest.mark.parametrize("on", EXECUTIONS)
def test_rows_of_packed_values_have_a_length_known_at_run_time(on):
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "float4_e2m1fn"), Y: T.Tensor((n,), "float4_e2m1fn"), Z: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as b:
            for i in T.Parallel(64):
                Y[b * 64 + i] = A[b * 64 + i] * T.cast(2, "float16")
                Z[b * 64 + i] = A[b * 64 + i]

    codes = RNG.integers(0, 16, 150)
    _, y, z = call(f, pack(codes), np.zeros(75, np.int8), np.zeros(150, np.float32), on=on)
    assert np.array_equal(codes_of(y), fp4_codes(2 * FP4[codes])) and np.array_equal(z, FP4[codes])
    with pytest.raises((TileLangError, RuntimeError)):  # half a byte
        call(f, pack(codes), np.zeros(75, np.int8), np.zeros(149, np.float32), on=on)
    cuda_text(f)


@pytest.mark.parametrize("on", EXECUTIONS)
def test_packed_tensors_and_their_bytes_are_views_of_each_other(on):
    @T.prim_func
    def f(Y: T.Tensor((4, 64), "int4"), Z: T.Tensor((4, 32), "uint8")):
        with T.Kernel(1, threads=32):
            V = T.view(Y, (4, 32), "uint8")
            W = T.view(Z, (4, 64), "int4")
            for i, j in T.Parallel(4, 64):
                W[i, j] = Y[i, 63 - j]
            for i, j in T.Parallel(4, 32):
                V[i, j] = V[i, j] ^ T.uint8(255)

    codes = RNG.integers(0, 16, (4, 64))
    y, z = call(f, pack(codes), np.zeros((4, 32), np.uint8), on=on)
    assert np.array_equal(codes_of(z), codes[:, ::-1]) and np.array_equal(codes_of(y), codes ^ 15)


@pytest.mark.parametrize("form", ("odd extent", "odd start", "every second", "by threads", "one column", "break", "rows"))
def test_stores_of_half_bytes_by_different_threads_are_refused(form):
    @T.prim_func
    def f(Y: T.Tensor((8, 64), "int4"), A: T.Tensor((8, 64), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            if form == "odd extent":
                for i in T.Parallel(31):
                    Y[0, i] = A[0, i]
            if form == "odd start":
                for i in T.Parallel(32):
                    Y[0, i + 1] = A[0, i]
            if form == "every second":
                for i in T.Parallel(32):
                    Y[0, i * 2] = A[0, i]
            if form == "by threads":
                Y[0, t] = A[0, t]
            if form == "one column":
                for i in T.Parallel(8):
                    Y[i, 3] = A[i, 3]
            if form == "rows":
                for i in T.Parallel(8):
                    Y[i, i] = A[i, i]
            if form == "break":
                for i in T.serial(64):
                    if A[0, i] == 0:
                        break
                    Y[0, i] = A[0, i]

    with pytest.raises(TileLangError) as e:
        tilelang.compile(f, target="cpu")
    assert e.value.kind == "small-type"


@pytest.mark.parametrize("shape, strides", [((8, 31), (32, 1)), ((8, 32), (33, 1)), ((8, 32), (1, 8)), ((8, 32), (64, 2))])
def test_rows_that_are_no_whole_bytes_are_refused(shape, strides):
    @T.prim_func
    def f(Y: T.StridedTensor(shape, strides, "int4"), A: T.Tensor(shape, "int32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(*shape):
                A[i, j] = Y[i, j]

    with pytest.raises(TileLangError) as e:
        tilelang.compile(f, target="cpu")
    assert e.value.kind == "small-type"
