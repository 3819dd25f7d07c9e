"""RMS norm: y = x * w / rms(x), rms(x) = sqrt(mean(x**2) + eps) by rows; forward and backward.

Backward, with r = 1 / rms(x) saved by the forward pass and g = dy * w:
    dx[j] = r * (g[j] - x[j] * r**2 * mean(g * x))
    dw[j] = sum over rows of dy * x * r
dw sums over rows that lie in different blocks: each block adds up its rows in registers, then once into dw with atomics.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def forward(m: int, n: int, rows: int = 4, eps: float = 1e-5, dtype: str = "float16"):
    """X: (m, n); W: (n,); Y: (m, n) of dtype; R: (m,) float32, 1 / rms."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), W: T.Tensor((n,), dtype), Y: T.Tensor((m, n), dtype),
                R: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            square = T.alloc_fragment((rows, n), "float32")
            r = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            for i, j in T.Parallel(rows, n):
                square[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(square, r, dim=1)
            for i in T.Parallel(rows):
                r[i] = T.rsqrt(r[i] / n + eps)
            for i, j in T.Parallel(rows, n):
                x[i, j] = x[i, j] * r[i] * W[j]
            T.copy(x, Y[bx * rows, 0])
            T.copy(r, R[bx * rows])

    return program


def backward(m: int, n: int, rows: int = 4, tiles: int = 8, dtype: str = "float16"):
    """A block does `tiles` tiles of rows.  dW: (n,) float32, zero before the call."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), W: T.Tensor((n,), dtype), R: T.Tensor((m,), "float32"),
                dY: T.Tensor((m, n), dtype), dX: T.Tensor((m, n), dtype), dW: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(m, rows * tiles), threads=128) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            g = T.alloc_fragment((rows, n), "float32")
            product = T.alloc_fragment((rows, n), "float32")
            r = T.alloc_fragment((rows,), "float32")
            mean = T.alloc_fragment((rows,), "float32")
            dw = T.alloc_fragment((n,), "float32")
            T.clear(dw)
            for t in T.serial(tiles):
                top = (bx * tiles + t) * rows
                T.copy(X[top, 0], x)
                T.copy(dY[top, 0], g)
                T.copy(R[top], r)
                for i, j in T.Parallel(rows, n):
                    product[i, j] = g[i, j] * x[i, j] * r[i]
                T.reduce_sum(product, dw, dim=0, clear=False)
                for i, j in T.Parallel(rows, n):
                    g[i, j] = g[i, j] * W[j]
                    product[i, j] = g[i, j] * x[i, j]
                T.reduce_sum(product, mean, dim=1)
                for i, j in T.Parallel(rows, n):
                    x[i, j] = r[i] * (g[i, j] - x[i, j] * r[i] * r[i] * mean[i] / n)
                T.copy(x, dX[top, 0])
            T.atomic_add(dW, dw)

    return program


def torch_rms_norm(x, w):
    """torch's own forward pass."""
    import torch

    return torch.nn.functional.rms_norm(x, w.shape, w, 1e-5)


def check_forward(m: int = 16387, n: int = 1024, dtype: str = "float16", on: Place = HERE) -> list[Comparison]:
    """A sum of n squares: relative error 2 sqrt(n) units of float32; one rounding to dtype."""
    x, w = normal((m, n), dtype), normal(n, dtype, 1)
    r = 1 / np.sqrt((wide(x)**2).mean(1) + 1e-5)
    want = wide(x) * wide(w) * r[:, None]
    y, got_r = on.compile(forward(m, n, dtype=dtype), out_idx=[2, 3])(x, w)
    on.peer("torch rms_norm", torch_rms_norm, x, w)
    small = EPS["float32"] * (8 + 2 * n**0.5)
    return [compare(f"rms_norm forward {dtype}", y, want, (EPS[dtype] + small) * abs(want) + 2.0**-25),
            compare(f"rms_norm forward {dtype}, 1 / rms", got_r, r, small * r)]


def check_backward(m: int = 16387, n: int = 1024, dtype: str = "float16", on: Place = HERE) -> list[Comparison]:
    """Sums over rows and columns may cancel: their bounds grow with the sums of absolute values."""
    x, w, dy = normal((m, n), dtype), normal(n, dtype, 1), normal((m, n), dtype, 2)
    r = (1 / np.sqrt((wide(x)**2).mean(1) + 1e-5)).astype(np.float32)
    x_, r_, g = wide(x), wide(r)[:, None], wide(dy) * wide(w)
    want_x = r_ * (g - x_ * r_**2 * (g * x_).mean(1, keepdims=True))
    want_w = (wide(dy) * x_ * r_).sum(0)
    dx, dw = np.zeros_like(x), np.zeros(n, np.float32)
    on.compile(backward(m, n, dtype=dtype))(x, w, r, dy, dx, dw)
    size = r_ * (abs(g) + abs(x_) * r_**2 * abs(g * x_).mean(1, keepdims=True))
    return [compare(f"rms_norm backward {dtype}, dx", dx, want_x,
                    EPS[dtype] * abs(want_x) + EPS["float32"] * (8 + 4 * n**0.5) * size + 2.0**-25),
            compare(f"rms_norm backward {dtype}, dw", dw, want_w,
                    EPS["float32"] * (4 + 4 * m**0.5) * abs(wide(dy) * x_ * r_).sum(0))]


if __name__ == "__main__":
    main(check_forward, check_backward)
