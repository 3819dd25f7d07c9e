"""2-D convolution as a GEMM: rows are output pixels, columns output channels, and the sum runs over the window.

The matrix of windows ("im2col", kh * kw * c columns) is never stored: each step of the loop gathers one tile of it.
implicit uses T.im2col, which does the gathering; by_hand writes the index arithmetic out, with a guard for the border,
and allows a stride, dilation and padding that differ by axis.  Layouts: image NHWC, weights (kh, kw, c, f).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, normal, product_bound, wide

import tilelang.language as T


def out_size(size: int, window: int, stride: int, dilation: int, pad: int) -> int:
    """Positions a dilated window takes along an axis."""
    return (size + 2 * pad - dilation * (window - 1) - 1) // stride + 1


def implicit(n: int, h: int, w: int, c: int, f: int, window: int = 3, stride: int = 1, dilation: int = 1, pad: int = 1,
             bm: int = 64, bn: int = 64, bk: int = 32, dtype: str = "float16"):
    """X: (n, h, w, c); W: (window, window, c, f); Y: (n, oh, ow, f).  c must be a multiple of bk."""
    oh, ow = (out_size(s, window, stride, dilation, pad) for s in (h, w))
    depth = window * window * c

    @T.prim_func
    def program(X: T.Tensor((n, h, w, c), dtype), W: T.Tensor((window, window, c, f), dtype),
                Y: T.Tensor((n, oh, ow, f), dtype)):
        with T.Kernel(T.ceildiv(f, bn), T.ceildiv(n * oh * ow, bm), threads=128) as (bx, by):
            Xs = T.alloc_shared((bm, bk), dtype)
            Ws = T.alloc_shared((bk, bn), dtype)
            Yf = T.alloc_fragment((bm, bn), "float32")
            flat_w = T.reshape(W, (depth, f))
            flat_y = T.reshape(Y, (n * oh * ow, f))
            T.clear(Yf)
            for ko in T.Pipelined(T.ceildiv(depth, bk), num_stages=2):
                T.im2col(X, Xs, by, ko, window, stride, dilation, pad)
                T.copy(flat_w[ko * bk, bx * bn], Ws)
                T.gemm(Xs, Ws, Yf)
            T.copy(Yf, flat_y[by * bm, bx * bn])

    return program


def by_hand(n: int, h: int, w: int, c: int, f: int, window: tuple[int, int] = (3, 3), stride: tuple[int, int] = (1, 1),
            dilation: tuple[int, int] = (1, 1), pad: tuple[int, int] = (1, 1), bm: int = 64, bn: int = 64, bk: int = 32,
            dtype: str = "float16"):
    """The same with one number per axis.  Every access is either provably inside or guarded by the condition."""
    kh, kw = window
    oh, ow = (out_size(s, *rest) for s, *rest in zip((h, w), window, stride, dilation, pad))
    depth = kh * kw * c

    @T.prim_func
    def program(X: T.Tensor((n, h, w, c), dtype), W: T.Tensor((kh, kw, c, f), dtype), Y: T.Tensor((n, oh, ow, f), dtype)):
        with T.Kernel(T.ceildiv(f, bn), T.ceildiv(n * oh * ow, bm), threads=128) as (bx, by):
            Xs = T.alloc_shared((bm, bk), dtype)
            Ws = T.alloc_shared((bk, bn), dtype)
            Yf = T.alloc_fragment((bm, bn), "float32")
            flat_w = T.reshape(W, (depth, f))
            flat_y = T.reshape(Y, (n * oh * ow, f))
            T.clear(Yf)
            for ko in T.Pipelined(T.ceildiv(depth, bk), num_stages=2):
                for i, j in T.Parallel(bm, bk):
                    pixel = by * bm + i
                    at = ko * bk + j
                    y = pixel % (oh * ow) // ow * stride[0] + at // (kw * c) * dilation[0] - pad[0]
                    x = pixel % ow * stride[1] + at // c % kw * dilation[1] - pad[1]
                    inside = y >= 0 and y < h and x >= 0 and x < w and at < depth and pixel < n * oh * ow
                    Xs[i, j] = T.if_then_else(inside, X[pixel // (oh * ow), y, x, at % c], 0)
                T.copy(flat_w[ko * bk, bx * bn], Ws)
                T.gemm(Xs, Ws, Yf)
            T.copy(Yf, flat_y[by * bm, bx * bn])

    return program


def windows(x: np.ndarray, window, stride, dilation, pad) -> np.ndarray:
    """The matrix of windows, (n * oh * ow, kh * kw * c)."""
    n, h, w, c = x.shape
    oh, ow = (out_size(s, *rest) for s, *rest in zip((h, w), window, stride, dilation, pad))
    padded = np.pad(x, ((0, 0), (pad[0],) * 2, (pad[1],) * 2, (0, 0)))
    parts = [padded[:, dy * dilation[0]:, dx * dilation[1]:][:, :(oh - 1) * stride[0] + 1:stride[0],
                                                            :(ow - 1) * stride[1] + 1:stride[1]]
             for dy in range(window[0]) for dx in range(window[1])]
    return np.stack(parts, axis=3).reshape(n * oh * ow, -1)


def _compare(name: str, x: np.ndarray, wt: np.ndarray, got: np.ndarray, *geometry) -> Comparison:
    a, b = windows(wide(x), *geometry), wide(wt).reshape(-1, wt.shape[-1])
    want = (a @ b).reshape(got.shape)
    return compare(name, got, want, product_bound(a, b, "float16", "float16"))


def torch_conv2d(x, weights, stride, pad, dilation):
    """torch's convolution of the same layouts: views, no copies."""
    import torch

    return torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), weights.permute(3, 2, 0, 1), None, stride, pad, dilation)


def check_implicit(n: int = 32, h: int = 56, w: int = 56, c: int = 64, f: int = 128, window: int = 3, stride: int = 1,
                   dilation: int = 1, pad: int = 1, on: Place = HERE) -> Comparison:
    """A GEMM's bound with window * window * c products."""
    x, wt = normal((n, h, w, c), "float16"), normal((window, window, c, f), "float16", 1)
    got = on.compile(implicit(n, h, w, c, f, window, stride, dilation, pad), out_idx=[2])(x, wt)
    on.peer("torch conv2d", torch_conv2d, x, wt, stride, pad, dilation)
    return _compare("conv2d implicit", x, wt, got, *(((v, v)) for v in (window, stride, dilation, pad)))


def check_by_hand(n: int = 8, h: int = 56, w: int = 48, c: int = 24, f: int = 100, on: Place = HERE) -> Comparison:
    """A window of (3, 5), stride (2, 1), dilation (1, 2), padding (1, 4); any number of channels."""
    geometry = ((3, 5), (2, 1), (1, 2), (1, 4))
    x, wt = normal((n, h, w, c), "float16"), normal((3, 5, c, f), "float16", 1)
    got = on.compile(by_hand(n, h, w, c, f, *geometry), out_idx=[2])(x, wt)
    return _compare("conv2d by_hand", x, wt, got, *geometry)


if __name__ == "__main__":
    main(check_implicit, check_by_hand)
