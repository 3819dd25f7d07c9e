"""Programs the jit tests share."""

import tilelang
import tilelang.language as T

f16, f32 = "float16", "float32"


def scale_program(m=4, n=8, dtype=f32, factor=2.0):
    """B = A * factor, both (m, n)."""
    @T.prim_func
    def main(A: T.Tensor((m, n), dtype), B: T.Tensor((m, n), dtype)):
        with T.Kernel(m, threads=32) as bx:
            for j in T.Parallel(n):
                B[bx, j] = A[bx, j] * T.cast(factor, dtype)

    return main


@tilelang.jit(target="cpu")
def add(A, B, blk: int = 64):
    """Eager: C = A + B in float16, widened."""
    N = T.const("N")
    A: T.Tensor((N,), f16)
    B: T.Tensor((N,), f16)
    C = T.empty((N,), f32)
    with T.Kernel(T.ceildiv(N, blk), threads=128) as bx:
        for i in T.Parallel(blk):
            C[bx * blk + i] = A[bx * blk + i] + B[bx * blk + i]
    return C


@tilelang.jit(target="cpu")
def split(X):
    """Eager, two results in another order than declared: (-X, 2X) with D declared first."""
    M, N = T.const("M, N")
    X: T.Tensor((M, N), f32)
    D = T.empty((M, N), f32)
    E = T.empty((N, M), f32)
    with T.Kernel(M, threads=32) as bx:
        for j in T.Parallel(N):
            D[bx, j] = X[bx, j] * 2.0
            E[j, bx] = -X[bx, j]
    return E, D


@tilelang.jit(target="cpu")
def scale_t(X, Y, f: T.float32 = 2.0):
    """Eager, dynamic shape and strides: Y = f * X.T; no outputs."""
    m, sx, sy = T.dynamic("m, sx, sy")
    N = T.const("N")
    X: T.StridedTensor((m, N), (sx, 1), f32)
    Y: T.StridedTensor((N, m), (sy, 1), f32)
    with T.Kernel(T.ceildiv(m, 8), threads=128) as bx:
        for i, j in T.Parallel(8, N):
            Y[j, bx * 8 + i] = X[bx * 8 + i, j] * f


@tilelang.jit(out_idx=[-1], target="cpu")
def lazy_scale(m, n=8, dtype=f32, factor=2.0):
    """Lazy factory."""
    return scale_program(m, n, dtype, factor)


@tilelang.jit(target="cpu")
def relu_or_not(X, act, n: T.int32 = 3):
    """Eager with a compile-time callable and a run-time scalar: Y = act(X) + n."""
    N = T.const("N")
    X: T.Tensor((N,), f32)
    Y = T.empty((N,), f32)
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            Y[i] = act(X[i]) + n
    return Y


def dynamic_program():
    """B (2m+1, 4) from A (m, 4): first m rows copied, the rest 7."""
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m, 4), f32), B: T.Tensor((2 * m + 1, 4), f32)):
        with T.Kernel(2 * m + 1, threads=32) as bx:
            for j in T.Parallel(4):
                B[bx, j] = T.if_then_else(bx < m, A[T.min(bx, m - 1), j], 7.0)

    return main
