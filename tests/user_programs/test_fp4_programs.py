"""Programs that see bytes as pairs of e2m1 values, and e2m1 values as bytes, in every memory."""

import ml_dtypes
import numpy as np
import pytest
from everywhere import EXECUTIONS, WITH_HOPPER, cuda_text, everywhere, run

import tilelang
import tilelang.language as T

F32, F16, FP4, U8 = "float32", "float16", "float4_e2m1fn", "uint8"
VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # of each code


def codes_of(packed):
    b = np.asarray(packed).view(np.uint8)
    return np.stack([b & 15, b >> 4], -1).reshape(*b.shape[:-1], -1)


def packed(values):
    """Values as bytes of two e2m1 codes, low nibble first."""
    codes = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("scope", ("shared", "fragment", "local"))
@pytest.mark.parametrize("back", (False, True))
def test_bytes_and_values_are_views_of_each_other(scope, back):
    """back: the program allocates values and copies bytes into the view."""
    @T.prim_func
    def f(W: T.Tensor((6, 24), U8), Y: T.Tensor((6, 48), F32)):
        with T.Kernel(6, threads=32) as r:
            if scope == "shared":
                S = T.alloc_shared((48,), FP4) if back else T.alloc_shared((24,), U8)
            elif scope == "fragment":
                S = T.alloc_fragment((48,), FP4) if back else T.alloc_fragment((24,), U8)
            else:
                S = T.alloc_local((48,), FP4) if back else T.alloc_local((24,), U8)
            raw = T.view(S, (24,), U8) if back else S
            values = S if back else T.view(S, (48,), FP4)
            if scope == "local":
                for j in T.serial(24):
                    raw[j] = W[r, j]
                if T.get_thread_binding() == 0:
                    for j in T.serial(48):
                        Y[r, j] = T.cast(values[j], F32)
            else:
                T.copy(W[r, 0], raw)
                for j in T.Parallel(48):
                    Y[r, j] = T.cast(values[j], F32)

    w = np.random.default_rng(1).integers(0, 256, (6, 24)).astype(np.uint8)
    assert np.array_equal(everywhere(f, w)[1], VALUES[codes_of(w)])
    cuda_text(f)


@pytest.mark.parametrize("stages", range(5))
@pytest.mark.parametrize("on", WITH_HOPPER)
@pytest.mark.parametrize("N, K", [(64, 128), (50, 176)])
def test_dequantised_gemm_through_a_view(stages, on, N, K):
    M, bn, bk = 32, 32, 64

    @T.prim_func
    def f(A: T.Tensor((M, K), F16), W: T.Tensor((N, K // 2), U8), C: T.Tensor((M, N), F32)):
        with T.Kernel(T.ceildiv(N, bn), threads=128) as bx:
            a = T.alloc_shared((M, bk), F16)
            raw = T.alloc_shared((bn, bk // 2), U8)
            w = T.alloc_shared((bn, bk), F16)
            c = T.alloc_fragment((M, bn), F32)
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(K, bk), num_stages=stages):
                T.copy(A[0, k * bk], a)
                T.copy(W[bx * bn, k * bk // 2], raw)
                T.copy(T.view(raw, (bn, bk), FP4), w)
                T.gemm(a, w, c, transpose_B=True)
            T.copy(c, C[0, bx * bn])

    rng = np.random.default_rng(2)
    a, w = rng.integers(-4, 5, (M, K)).astype(np.float16), rng.integers(0, 256, (N, K // 2)).astype(np.uint8)
    got = run(f, a, w, on=on)[2]
    assert np.array_equal(got, a.astype(np.float64) @ VALUES[codes_of(w)].astype(np.float64).T)
    if on == "tile":
        cuda_text(f, "sm_90a")


@pytest.mark.parametrize("form", ("tensor", "view", "tile of values"))
def test_rows_quantised_with_a_scale(form):
    M, N = 21, 64

    @T.prim_func
    def f(X: T.Tensor((M, N), F32), Y: T.Tensor((M, N // 2), U8), S: T.Tensor((M,), F32)):
        with T.Kernel(T.ceildiv(M, 8), threads=64) as bx:
            x = T.alloc_fragment((8, N), F32)
            top = T.alloc_fragment((8,), F32)
            raw = T.alloc_shared((8, N // 2), U8)
            values = T.view(raw, (8, N), FP4)
            T.copy(X[bx * 8, 0], x)
            T.reduce_absmax(x, top, dim=1)
            for i, j in T.Parallel(8, N):
                x[i, j] = x[i, j] * 6.0 / T.max(top[i], 1e-6)
            if form == "tensor":
                whole = T.view(Y, (M, N), FP4)
                for i, j in T.Parallel(8, N):
                    if bx * 8 + i < M:
                        whole[bx * 8 + i, j] = T.cast(x[i, j], FP4)
            elif form == "view":
                for i, j in T.Parallel(8, N):
                    values[i, j] = T.cast(x[i, j], FP4)
                T.copy(raw, Y[bx * 8, 0])
            else:
                T.copy(x, values)
                T.copy(raw, Y[bx * 8, 0])
            for i in T.Parallel(8):
                if bx * 8 + i < M:
                    S[bx * 8 + i] = top[i]

    x = np.random.default_rng(3).standard_normal((M, N)).astype(np.float32)
    _, y, s = everywhere(f, x)
    top = np.abs(x).max(1)
    assert np.array_equal(s, top) and np.array_equal(y, packed(x * np.float32(6) / top[:, None]))
    cuda_text(f)


@pytest.mark.parametrize("stages", (0, 2, 3))
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_packed_tiles_are_copied_as_bytes(stages, on):
    """A tensor of values is copied into a tile of values that is read as bytes, and another one back."""
    @T.prim_func
    def f(W: T.Tensor((64, 64), FP4), Y: T.Tensor((64, 32), U8), Z: T.Tensor((64, 64), FP4)):
        with T.Kernel(1, threads=64):
            for k in T.Pipelined(8, num_stages=stages):
                S = T.alloc_shared((8, 64), FP4)
                raw = T.view(S, (8, 32), U8)
                T.copy(W[k * 8, 0], S)
                for i, j in T.Parallel(8, 32):
                    Y[k * 8 + i, j] = raw[i, j] ^ T.uint8(0x88)
                T.copy(S, Z[k * 8, 0])

    w = np.random.default_rng(4).integers(0, 256, (64, 32)).astype(np.uint8)
    target, backend = WITH_HOPPER[on]
    y, z = np.zeros((64, 32), np.uint8), np.zeros((64, 32), np.int8)
    tilelang.compile(f, target=target, execution_backend=backend)(w.view(np.int8), y, z)
    assert np.array_equal(y, w ^ 0x88) and np.array_equal(z.view(np.uint8), w)
    if on == "tile":
        cuda_text(f)


@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_view_of_bytes_as_int4(on):
    @T.prim_func
    def f(W: T.Tensor((8, 16), "int8"), Y: T.Tensor((8, 32), "int32")):
        with T.Kernel(1, threads=32):
            raw = T.alloc_shared((8, 16), "int8")
            T.copy(W, raw)
            v = T.view(raw, (8, 32), "int4")
            for i, j in T.Parallel(8, 32):
                Y[i, j] = T.cast(v[i, 31 - j], "int32")

    w = np.random.default_rng(5).integers(-128, 128, (8, 16)).astype(np.int8)
    assert np.array_equal(run(f, w, on=on)[1], ((codes_of(w).astype(np.int32) ^ 8) - 8)[:, ::-1])


@pytest.mark.parametrize("dt", (FP4, "int4"))
def test_each_thread_stores_single_values_of_private_bytes(dt):
    @T.prim_func
    def f(X: T.Tensor((32, 8), "int32"), Y: T.Tensor((32, 4), U8)):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            raw = T.alloc_local((4,), U8)
            v = T.view(raw, (8,), dt)
            for j in T.serial(4):
                raw[j] = T.uint8(0xFF)
            for j in T.serial(8):
                if X[t, j] != 3:
                    v[7 - j] = T.cast(X[t, j], dt)
            for j in T.serial(4):
                Y[t, j] = raw[j]

    x = np.random.default_rng(6).integers(-4, 5, (32, 8)).astype(np.int32)
    codes = x[:, ::-1] & 15 if dt == "int4" else codes_of(packed(x[:, ::-1].astype(np.float32)))
    assert np.array_equal(codes_of(everywhere(f, x)[1]), np.where(x[:, ::-1] == 3, 15, codes))
    cuda_text(f)


@pytest.mark.parametrize("scope", ("shared", "fragment", "tensor"))
def test_packed_values_are_filled(scope):
    @T.prim_func
    def f(Y: T.Tensor((8, 16), U8), Z: T.Tensor((8, 32), FP4)):
        with T.Kernel(1, threads=32):
            raw = T.alloc_shared((8, 16), U8) if scope == "shared" else T.alloc_fragment((8, 16), U8)
            v = T.view(raw, (8, 32), FP4)
            T.clear(v)
            if scope != "fragment":
                T.fill(v[2:6, 8:24], -1.5)
            else:
                T.fill(v, -1.5)
            T.copy(raw, Y)
            if scope == "tensor":
                T.fill(Z, 6)

    y, z = everywhere(f, np.zeros((8, 16), np.uint8), np.zeros((8, 16), np.int8))
    want = np.zeros((8, 32)) if scope != "fragment" else np.full((8, 32), -1.5)
    want[2:6, 8:24] = -1.5
    assert np.array_equal(VALUES[codes_of(y)], want)
    if scope == "tensor":
        assert (codes_of(z) == 7).all()
    cuda_text(f)
