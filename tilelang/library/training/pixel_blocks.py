"""Images of few channels as images of blocks of pixels, which TMA can load.

A convolution with stride s over images of c channels is one with stride 1 over images whose pixels are the blocks of s x s
pixels: a block has c s^2 channels, and zeros up to a multiple of 16.  Output pixel o begins at pixel s o - p = s (o - q) + r,
with the smallest q for which r >= 0, so that tap t lies in block o - q + (r + t) // s, at place (r + t) % s.  Weights are
images of blocks too, shifted by r.  ResNet's first layer (7 x 7 of 3 channels, stride 2) has 4 x 4 taps of 16 channels, patches
of a vision transformer one tap.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import tilelang.language as T

CHANNELS = 16  # of a block, multiples: 32 bytes, which TMA loads
_TILE, _THREADS = 2048, 128  # elements of a tile of a copy


class Blocks(NamedTuple):
    """Pixels of an image (height, width, channels) in blocks (down x across) of a grid, whose first one begins `shift` pixels
    before the image.  kind: element type."""

    image: tuple[int, int, int]
    block: tuple[int, int]
    shift: tuple[int, int]
    grid: tuple[int, int]
    kind: str

    @property
    def channels(self) -> int:
        """Of a block."""
        return ceil(self.image[2] * self.block[0] * self.block[1] / CHANNELS) * CHANNELS

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of an image of blocks."""
        return *self.grid, self.channels


def blocks_of(image: tuple[int, int, int], kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int],
              kind: str) -> tuple[Blocks, Blocks, tuple[tuple[int, int], ...]]:
    """(blocks of the images, of the weights; the padding before and behind these images) of a convolution."""
    q = [ceil(p / s) for p, s in zip(pad, stride)]
    shift = s0, s1 = stride[0] * q[0] - pad[0], stride[1] * q[1] - pad[1]
    taps = ceil((s0 + kernel[0]) / stride[0]), ceil((s1 + kernel[1]) / stride[1])
    grid = ceil(image[0] / stride[0]), ceil(image[1] / stride[1])
    out = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(image, pad, kernel, stride)]
    pads = tuple((before, o + k - 1 - before - n) for before, o, k, n in zip(q, out, taps, grid))
    c = image[2]
    return Blocks(image, stride, (0, 0), grid, kind), Blocks((*kernel, c), stride, shift, taps, kind), pads


def gather_blocks(b: Blocks) -> Any:
    """The kernel (X, Y): images of blocks from images."""
    (height, width, c), (down, across), n = b.image, b.block, T.dynamic("n")
    columns = b.grid[1] * b.channels
    tiles = ceil(columns / _TILE)

    @T.prim_func
    def pixel_blocks(X: T.Tensor((n, *b.image), b.kind), Y: T.Tensor((n, *b.shape), b.kind)):
        Rows = T.reshape(Y, (n * b.grid[0], columns))
        with T.Kernel(n * b.grid[0] * tiles, threads=_THREADS) as block:  # any number of images along x
            by = block // tiles
            for e in T.Parallel(_TILE):
                at, image, row = block % tiles * _TILE + e, by // b.grid[0], by % b.grid[0]
                place = at % b.channels // c
                h, w = row * down + place // across - b.shift[0], at // b.channels * across + place % across - b.shift[1]
                there = (place < down * across) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
                if at < columns:
                    Rows[by, at] = T.if_then_else(there, X[image, h, w, at % b.channels % c], T.cast(0, b.kind))

    return pixel_blocks


def scatter_blocks(b: Blocks) -> Any:
    """The kernel (Y, X): images from images of blocks."""
    (height, width, c), (down, across), n = b.image, b.block, T.dynamic("n")
    columns = width * c

    @T.prim_func
    def pixels(Y: T.Tensor((n, *b.shape), b.kind), X: T.Tensor((n, *b.image), b.kind)):
        Rows = T.reshape(X, (n * height, columns))
        with T.Kernel(T.ceildiv(columns, _THREADS), n * height, threads=_THREADS) as (bx, by):
            for e in T.Parallel(_THREADS):
                at = bx * _THREADS + e
                h, w = by % height + b.shift[0], at // c + b.shift[1]
                if at < columns:
                    Rows[by, at] = Y[by // height, h // down, w // across, (h % down * across + w % across) * c + at % c]

    return pixels
