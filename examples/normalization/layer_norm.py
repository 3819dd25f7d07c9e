"""Layer norm: y = (x - mean) / sqrt(var + eps) * w + b by rows; forward and backward.

The variance is the mean square of x - mean, with the tile still in registers: a second pass costs no memory traffic and
does not cancel, as the mean of squares less the square of the mean would.  Backward, with h = (x - mean) * r, g = dy * w:
    dx = r * (g - mean(g) - h * mean(g * h)),  dw = sum over rows of dy * h,  db = sum over rows of dy
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def forward(m: int, n: int, rows: int = 4, eps: float = 1e-5, dtype: str = "float16"):
    """X, Y: (m, n); W, B: (n,) of dtype; mean, R: (m,) float32, R = 1 / sqrt(var + eps)."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), W: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype),
                Y: T.Tensor((m, n), dtype), Mean: T.Tensor((m,), "float32"), R: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            square = T.alloc_fragment((rows, n), "float32")
            mean = T.alloc_fragment((rows,), "float32")
            r = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            T.reduce_sum(x, mean, dim=1)
            for i in T.Parallel(rows):
                mean[i] = mean[i] / n
            for i, j in T.Parallel(rows, n):
                x[i, j] = x[i, j] - mean[i]
                square[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(square, r, dim=1)
            for i in T.Parallel(rows):
                r[i] = T.rsqrt(r[i] / n + eps)
            for i, j in T.Parallel(rows, n):
                x[i, j] = x[i, j] * r[i] * W[j] + B[j]
            T.copy(x, Y[bx * rows, 0])
            T.copy(mean, Mean[bx * rows])
            T.copy(r, R[bx * rows])

    return program


def backward(m: int, n: int, rows: int = 4, tiles: int = 8, dtype: str = "float16"):
    """dW, dB: (n,) float32, zero before the call; every block adds the sums over its rows once."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), W: T.Tensor((n,), dtype), Mean: T.Tensor((m,), "float32"),
                R: T.Tensor((m,), "float32"), dY: T.Tensor((m, n), dtype), dX: T.Tensor((m, n), dtype),
                dW: T.Tensor((n,), "float32"), dB: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(m, rows * tiles), threads=128) as bx:
            h = T.alloc_fragment((rows, n), "float32")
            g = T.alloc_fragment((rows, n), "float32")
            product = T.alloc_fragment((rows, n), "float32")
            mean_g = T.alloc_fragment((rows,), "float32")
            mean_gh = T.alloc_fragment((rows,), "float32")
            dw = T.alloc_fragment((n,), "float32")
            db = T.alloc_fragment((n,), "float32")
            T.clear(dw)
            T.clear(db)
            for t in T.serial(tiles):
                top = (bx * tiles + t) * rows
                T.copy(dY[top, 0], g)
                for i, j in T.Parallel(rows, n):
                    h[i, j] = (X[top + i, j] - Mean[top + i]) * R[top + i]
                    product[i, j] = g[i, j] * h[i, j]
                T.reduce_sum(product, dw, dim=0, clear=False)
                T.reduce_sum(g, db, dim=0, clear=False)
                for i, j in T.Parallel(rows, n):
                    g[i, j] = g[i, j] * W[j]
                    product[i, j] = g[i, j] * h[i, j]
                T.reduce_sum(g, mean_g, dim=1)
                T.reduce_sum(product, mean_gh, dim=1)
                for i, j in T.Parallel(rows, n):
                    dX[top + i, j] = R[top + i] * (g[i, j] - (mean_g[i] + h[i, j] * mean_gh[i]) / n)
            T.atomic_add(dW, dw)
            T.atomic_add(dB, db)

    return program


def _statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = x.mean(1, keepdims=True)
    return mean, 1 / np.sqrt(((x - mean)**2).mean(1, keepdims=True) + 1e-5)


def torch_layer_norm(x, w, b):
    """torch's own forward pass."""
    import torch

    return torch.nn.functional.layer_norm(x, w.shape, w, b)


def check_forward(m: int = 16387, n: int = 1024, dtype: str = "float16", on: Place = HERE) -> list[Comparison]:
    """Values around 3, where a cancelling variance would show."""
    x, w, b = (wide(normal((m, n))) + 3).astype(normal(1, dtype).dtype), normal(n, dtype, 1), normal(n, dtype, 2)
    x_ = wide(x)
    mean, r = _statistics(x_)
    want = (x_ - mean) * r * wide(w) + wide(b)
    y, got_mean, got_r = on.compile(forward(m, n, dtype=dtype), out_idx=[3, 4, 5])(x, w, b)
    on.peer("torch layer_norm", torch_layer_norm, x, w, b)
    small = EPS["float32"] * (8 + 4 * n**0.5)
    size = (abs(x_) + abs(mean)) * r * abs(wide(w)) + abs(wide(b))
    return [compare(f"layer_norm forward {dtype}", y, want, EPS[dtype] * abs(want) + small * size + 2.0**-25),
            compare(f"layer_norm forward {dtype}, mean", got_mean, mean[:, 0], small * abs(x_).mean(1)),
            compare(f"layer_norm forward {dtype}, 1 / deviation", got_r, r[:, 0], 8 * small * r[:, 0])]


def check_backward(m: int = 16387, n: int = 1024, dtype: str = "float16", on: Place = HERE) -> list[Comparison]:
    """Bounds from the sums of absolute values, as all of these sums may cancel."""
    x, w, dy = normal((m, n), dtype), normal(n, dtype, 1), normal((m, n), dtype, 2)
    x_, dy_ = wide(x), wide(dy)
    mean, r = (v.astype(np.float32) for v in _statistics(x_))
    h, g = (x_ - wide(mean)) * wide(r), dy_ * wide(w)
    want = wide(r) * (g - g.mean(1, keepdims=True) - h * (g * h).mean(1, keepdims=True))
    dx, dw, db = np.zeros_like(x), np.zeros(n, np.float32), np.zeros(n, np.float32)
    on.compile(backward(m, n, dtype=dtype))(x, w, mean[:, 0].copy(), r[:, 0].copy(), dy, dx, dw, db)
    size = wide(r) * (abs(g) + abs(g).mean(1, keepdims=True) + abs(h) * abs(g * h).mean(1, keepdims=True))
    by_column, by_row = (EPS["float32"] * (8 + 4 * k**0.5) for k in (m, n))
    return [compare(f"layer_norm backward {dtype}, dx", dx, want, EPS[dtype] * abs(want) + by_row * size + 2.0**-25),
            compare(f"layer_norm backward {dtype}, dw", dw, (dy_ * h).sum(0), by_column * abs(dy_ * h).sum(0)),
            compare(f"layer_norm backward {dtype}, db", db, dy_.sum(0), by_column * abs(dy_).sum(0))]


if __name__ == "__main__":
    main(check_forward, check_backward)
