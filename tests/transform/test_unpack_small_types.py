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
@pytest.mark.parametrize("what", ("element", "odd", "reduce", "address", "view", "rows"))
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
                if what == "view":
                    V = T.view(S, (4, 16), "int8")
                    V[0, 0] = 1
                if what == "rows":
                    Y[0, 0] = X[0, 0]

        tilelang.compile(f, target="cpu")
    assert e.value.kind == "small-type"
