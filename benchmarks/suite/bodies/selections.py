"""Selections and recurrences of a serving library: reductions and scans by functions of its own, and exchanges of elements."""

import tilelang.language as T

from . import program

F32, I32 = "float32", "int32"


@program("greedy_token")
def greedy_token(rows=8, n=1024):
    """The index of the greatest logit of a row."""
    @T.prim_func
    def main(X: T.Tensor((rows, n), F32), Y: T.Tensor((rows,), I32)):
        with T.Kernel(rows, threads=128) as b:
            x, best = T.alloc_fragment((1, n), F32), T.alloc_fragment((1,), I32)
            T.copy(X[b, 0], x)
            T.reduce_argmax(x, best, dim=1)
            T.copy(best, Y[b])
    return main


@program("mean_and_variance")
def mean_and_variance(rows=8, n=1024):
    """Counts, means and squared distances of two parts are combined."""
    def combine(a, b):
        both, d = a[0] + b[0], b[1] - a[1]
        part = b[0] / T.max(both, 1.0)
        return both, a[1] + d * part, a[2] + b[2] + d * d * a[0] * part

    @T.prim_func
    def main(X: T.Tensor((rows, n), F32), Y: T.Tensor((rows, 2), F32)):
        with T.Kernel(rows, threads=128) as b:
            x = T.alloc_fragment((1, n), F32)
            count, mean, square = [T.alloc_fragment((1,), F32) for _ in range(3)]
            T.copy(X[b, 0], x)
            T.reduce_with(x, (count, mean, square), combine, (0.0, 0.0, 0.0), dim=1, start=lambda v: (1.0, v, 0.0))
            for i in T.Parallel(1):
                Y[b, i] = mean[i]
                Y[b, i + 1] = square[i] / count[i]
    return main


@program("gated_recurrence")
def gated_recurrence(n=1024):
    """y[i] = a[i] * y[i - 1] + x[i], by a scan over pairs."""
    @T.prim_func
    def main(A: T.Tensor((n,), F32), X: T.Tensor((n,), F32), Y: T.Tensor((n,), F32)):
        with T.Kernel(1, threads=128):
            a, x = T.alloc_shared((n,), F32), T.alloc_shared((n,), F32)
            T.copy(A, a)
            T.copy(X, x)
            T.scan_with((a, x), (a, x), lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (1.0, 0.0))
            T.copy(x, Y)
    return main


@program("norm_of_a_part")
def norm_of_a_part(rows=64, n=128):
    """A reduction reads half of the columns of a tile."""
    @T.prim_func
    def main(X: T.Tensor((rows, n), F32), Y: T.Tensor((rows,), F32)):
        with T.Kernel(1, threads=128):
            s, total = T.alloc_shared((rows, n), F32), T.alloc_fragment((rows,), F32)
            T.copy(X, s)
            T.reduce_abssum(s[:, 0:n // 2], total, dim=1)
            T.copy(total, Y)
    return main


@program("product_of_scales")
def product_of_scales(rows=64, n=32):
    """Products along rows, and their prefixes."""
    @T.prim_func
    def main(X: T.Tensor((rows, n), F32), Y: T.Tensor((rows,), F32), Z: T.Tensor((rows, n), F32)):
        with T.Kernel(1, threads=128):
            s, f, product = T.alloc_shared((rows, n), F32), T.alloc_fragment((rows, n), F32), T.alloc_fragment((rows,), F32)
            T.copy(X, s)
            T.copy(X, f)
            T.reduce_prod(f, product, dim=1)
            T.cumprod(s, dim=1)
            T.copy(product, Y)
            T.copy(s, Z)
    return main
