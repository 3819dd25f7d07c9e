"""Convolution as implicit GEMMs: forward, gradient of the image, gradient of the weights.

    Y[pixel, f]     = sum over (tap, c)   of  im2col(X)[pixel, (tap, c)]   W[f, (tap, c)]
    dX[pixel, c]    = sum over (tap, f)   of  im2col(dY)[pixel, (tap, f)]  W[f, (tap, c)]
    dW[f, (tap, c)] = sum over pixels     of  dY[pixel, f]                 im2col(X)[pixel, (tap, c)]

A stride of s divides the pixels of an image's gradient into s x s classes: each has taps of its own, which all read one im2col
matrix of dY with stride 1.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.ir import dtype

from ..gemm.kernels import chosen
from ..gemm.tile import Tile

_SUMMED = 16, 64  # elements of a block that adds up partial sums


class ConvForm(NamedTuple):
    """What a kernel is compiled for, for any number of images.

    image: height, width and channels.  features: of the result.  kernel, stride, dilation, pad: for height and width.
    kind, acc: element types.  splits: of the pixels, for the gradient of weights.  mixed: tiles of all classes of the gradient
    of images that run at a time; 0 for one class after another.
    """

    image: tuple[int, int, int]
    features: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pad: tuple[int, int]
    kind: str
    acc: str
    tile: Tile
    splits: int = 1
    mixed: int = 0

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        h, w = ((self.image[d] + 2 * self.pad[d] - self.dilation[d] * (self.kernel[d] - 1) - 1) // self.stride[d] + 1
                for d in (0, 1))
        return h, w

    @property
    def columns(self) -> int:
        """Of the weights as a matrix."""
        return self.kernel[0] * self.kernel[1] * self.image[2]

    def x(self, n: Any) -> Any:
        return T.Tensor((n, *self.image), self.kind)

    @property
    def w(self) -> Any:
        return T.Tensor((self.features, self.columns), self.kind)

    def y(self, n: Any) -> Any:
        return T.Tensor((n, *self.out, self.features), self.kind)


def convolution(f: ConvForm) -> Any:
    """The kernel (X, W, Y)."""
    t, n = f.tile, T.dynamic("n")
    pixels = f.out[0] * f.out[1]

    @T.prim_func
    def convolution(X: f.x(n), W: f.w, Y: f.y(n)):
        Rows = T.reshape(Y, (n * pixels, f.features))
        with T.Kernel(T.ceildiv(f.features, t.bn), T.ceildiv(n * pixels, t.bm), threads=t.threads) as (bx, by):
            Xs, Ws = T.alloc_shared((t.bm, t.bk), f.kind), T.alloc_shared((t.bn, t.bk), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.use_swizzle(t.panel_size, order=t.order)
            T.clear(acc)
            for k in T.Pipelined(ceil(f.columns / t.bk), num_stages=t.stages):
                T.im2col(X, Xs, by, k, f.kernel, f.stride, f.dilation, f.pad)
                T.copy(W[bx * t.bn, k * t.bk], Ws)
                T.gemm(Xs, Ws, acc, transpose_B=True)
            T.copy(acc, Rows[by * t.bm, bx * t.bn])

    return convolution


class Classes(NamedTuple):
    """The classes of an image's pixels along one dimension.

    Class a has the pixels a, a + s, …, and taps[a] pairs: the tap of the weights, and its place in a window of `size` elements
    of dY, whose first one for the class's first pixel is `low`.  rows: pixels of a class at most.
    """

    taps: tuple[tuple[tuple[int, int], ...], ...]
    low: int
    size: int
    rows: int

    @staticmethod
    def of(f: ConvForm, d: int) -> Classes:
        s, each = f.stride[d], f.dilation[d]
        taps = [[(tap, (a + f.pad[d] - tap * each) // s) for tap in range(f.kernel[d]) if (a + f.pad[d] - tap * each) % s == 0]
                for a in range(min(s, f.image[d]))]
        places = [at for pairs in taps for _, at in pairs]
        low = min(places)
        return Classes(tuple(tuple((tap, at - low) for tap, at in pairs) for pairs in taps), low, max(places) - low + 1,
                       ceil(f.image[d] / s))

    def pad(self, out: int) -> tuple[int, int]:
        """Around dY, so that it has a window for each pixel."""
        return -self.low, self.rows - out + self.low + self.size - 1

    def count(self, a: Any) -> Any:
        return chosen([len(pairs) for pairs in self.taps], a)

    def at(self, a: Any, nth: Any, place: bool) -> Any:
        """The nth tap of class a, or its place in the window."""
        most = max(map(len, self.taps))
        return chosen([chosen([pairs[min(k, len(pairs) - 1)][place] if pairs else 0 for k in range(most)], nth)
                       for pairs in self.taps], a)


def _rows_of_groups(t: Tile, vector: int) -> Any:
    """Iterations over a tile in which each warp group has the rows of its accumulator, so that groups do not wait for each
    other; None where a group has no whole ones.  vector: elements of an access."""
    groups, words = t.threads // 128, t.bn // vector
    if t.threads % 128 or t.bn % vector or t.bm % (64 * groups) or 64 * words % 128:
        return None
    each = t.bm // groups

    def place(i: Any, j: Any) -> tuple[Any, Any]:
        at = i % each * words + j // vector
        return i // each * 128 + at % 128, at // 128 * vector + j % vector

    return T.Fragment((t.bm, t.bn), forward_fn=place)


def mixed_place(x: Any, classes: int, each: int, columns: int) -> tuple[Any, Any, Any]:
    """Column, row and class of tile x, of `each` tiles of every class in a wave."""
    wave, place = x // (each * classes), x % (each * classes)
    nth = wave * each + place // classes
    return nth % columns, nth // columns, (place + wave) % classes


def image_gradient(f: ConvForm) -> Any:
    """The kernel (dY, W, dX).

    With f.mixed, tiles of all classes run at the same time: those of few taps store while those of many multiply, and the
    pixels of neighbouring classes lie side by side.  From wave to wave, a block gets a tile of another class.
    """
    t, n, (height, width, channels) = f.tile, T.dynamic("n"), f.image
    down, across = Classes.of(f, 0), Classes.of(f, 1)
    pixels, whole = down.rows * across.rows, f.features % t.bk == 0
    steps, kinds = f.features // t.bk, len(across.taps)
    classes = len(down.taps) * kinds
    pads = down.pad(f.out[0]), across.pad(f.out[1])
    layout = _rows_of_groups(t, 16 // dtype(f.kind).bytes)
    columns, rows, each = ceil(channels / t.bn), T.ceildiv(n * pixels, t.bm), f.mixed // classes  # tiles; of a class in a wave

    @T.prim_func
    def convolution_image_gradient(dY: f.y(n), W: f.w, dX: f.x(n)):
        Rows = T.reshape(dX, (n * height * width, channels))
        grid = (T.ceildiv(rows * columns, each) * each * classes, 1, 1) if each else (columns, rows, classes)
        with T.Kernel(*grid, threads=t.threads) as (x, y, z):
            bx, by, bz = mixed_place(x, classes, each, columns) if each else (x, y, z)
            Ys, Ws = T.alloc_shared((t.bm, t.bk), f.kind), T.alloc_shared((t.bk, t.bn), f.kind)
            acc, Xs = T.alloc_fragment((t.bm, t.bn), f.acc), T.alloc_shared((t.bm, t.bn), f.kind)
            a, b = (classes - 1 - bz) // kinds, (classes - 1 - bz) % kinds  # the last ones have the most taps
            wide = across.count(b)
            T.clear(acc)
            if whole:
                taps = down.count(a) * wide
                for k in T.Pipelined((T.if_then_else(by < rows, taps, 0) if each else taps) * steps, num_stages=t.stages):
                    i, j, at = k // steps // wide, k // steps % wide, k % steps
                    T.im2col(dY, Ys, by, (down.at(a, i, True) * across.size + across.at(b, j, True)) * steps + at,
                             (down.size, across.size), 1, 1, pads)
                    T.copy(W[at * t.bk, (down.at(a, i, False) * f.kernel[1] + across.at(b, j, False)) * channels + bx * t.bn],
                           Ws)
                    T.gemm(Ys, Ws, acc)
            else:
                for k in T.Pipelined(T.ceildiv(down.count(a) * wide * f.features, t.bk), num_stages=t.stages):
                    for i, j in T.Parallel(t.bm, t.bk):
                        pixel, e = by * t.bm + i, k * t.bk + j
                        nth = e // f.features
                        h = pixel % pixels // across.rows + down.low + down.at(a, nth // wide, True)
                        w = pixel % across.rows + across.low + across.at(b, nth % wide, True)
                        there = (e < down.count(a) * wide * f.features) & (pixel < n * pixels) & (h >= 0) & (h < f.out[0]) & (
                            w >= 0) & (w < f.out[1])
                        Ys[i, j] = T.if_then_else(there, dY[pixel // pixels, h, w, e % f.features], T.cast(0, f.kind))
                    for i, j in T.Parallel(t.bk, t.bn):
                        e = k * t.bk + i
                        nth, column = e // f.features, bx * t.bn + j
                        tap = down.at(a, nth // wide, False) * f.kernel[1] + across.at(b, nth % wide, False)
                        Ws[i, j] = T.if_then_else((e < down.count(a) * wide * f.features) & (column < channels),
                                                  W[e % f.features, tap * channels + column], T.cast(0, f.kind))
                    T.gemm(Ys, Ws, acc)
            if classes == 1:
                T.copy(acc, Rows[by * t.bm, bx * t.bn])
            else:
                T.copy(acc, Xs)
                for i, j in T.Parallel(t.bm, t.bn, loop_layout=layout):
                    pixel = by * t.bm + i
                    h, w = pixel % pixels // across.rows * f.stride[0] + a, pixel % across.rows * f.stride[1] + b
                    if pixel < n * pixels and h < height and w < width and bx * t.bn + j < channels:
                        dX[pixel // pixels, h, w, bx * t.bn + j] = Xs[i, j]

    return convolution_image_gradient


def weight_gradient(f: ConvForm) -> Any:
    """The kernel (X, dY, steps, P, dW).

    steps: of t.bk pixels in a split.  P: (splits, features, columns), workspace of partial sums, added up in order.
    """
    t, n, pixels = f.tile, T.dynamic("n"), f.out[0] * f.out[1]
    down, across = _SUMMED

    @T.prim_func
    def convolution_weight_gradient(X: f.x(n), dY: f.y(n), steps: T.int32,
                                    P: T.Tensor((f.splits, f.features, f.columns), f.acc), dW: f.w):
        Rows = T.reshape(dY, (n * pixels, f.features))
        with T.Kernel(T.ceildiv(f.columns, t.bn), T.ceildiv(f.features, t.bm), f.splits, threads=t.threads) as (bx, by, bz):
            Ys, Xs = T.alloc_shared((t.bk, t.bm), f.kind), T.alloc_shared((t.bk, t.bn), f.kind)
            acc = T.alloc_fragment((t.bm, t.bn), f.acc)
            T.clear(acc)
            for k in T.Pipelined(steps, num_stages=t.stages):
                T.copy(Rows[(bz * steps + k) * t.bk, by * t.bm], Ys)
                T.im2col(X, Xs, bz * steps + k, bx, f.kernel, f.stride, f.dilation, f.pad)
                T.gemm(Ys, Xs, acc, transpose_A=True)
            T.copy(acc, P[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.columns, across), T.ceildiv(f.features, down), threads=256) as (bx, by):
            T.pdl_sync()
            total = T.alloc_fragment(_SUMMED, f.acc)
            T.clear(total)
            for s in T.serial(f.splits):
                for i, j in T.Parallel(down, across):
                    total[i, j] += P[s, by * down + i, bx * across + j]
            T.copy(total, dW[by * down, bx * across])

    return convolution_weight_gradient
