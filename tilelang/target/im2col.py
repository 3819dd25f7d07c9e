"""The matrix that an image becomes by im2col, as TMA describes it.  Source: CUDA Driver API, cuTensorMapEncodeIm2col."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Buffer, select
from tilelang.ir.record import record

_CORNERS, _OFFSETS, _STRIDES = range(-128, 128), range(256), range(1, 9)  # of an image of two dimensions and channels
Pair = tuple[Any, Any]


@record
class Im2col:
    """Rows (n, oh, ow) and columns (kh, kw, c): element n, oh * stride + kh * dilation + low, ow …, c of an image.

    image: height, width, channels.  Of height and width: out: pixels that are computed; kernel: taps; low: place of the first
    pixel's first tap, at most 0 where the image is padded.
    """

    image: tuple[Any, Any, Any]
    out: Pair
    kernel: Pair
    stride: Pair
    dilation: Pair
    low: Pair

    @staticmethod
    def of(b: Buffer) -> Im2col | None:
        """What a buffer with the fact `im2col` is the matrix of."""
        return None if b.facts.im2col is None else Im2col(*b.facts.im2col)  # type: ignore[arg-type]

    @property
    def entry(self) -> tuple[Any, ...]:
        """The value of the fact."""
        return self.image, self.out, self.kernel, self.stride, self.dilation, self.low

    @property
    def high(self) -> tuple[int, int]:
        """Distance of the last first tap from the last element of the image: the upper corner of the bounding box."""
        h, w = (self.low[d] + (self.out[d] - 1) * self.stride[d] - (self.image[d] - 1) for d in (0, 1))
        return h, w

    def unsupported(self, channels: int) -> str | None:
        """Why TMA cannot load boxes of so many channels of the matrix; None when it can."""
        if self.image[2] % channels:
            return f"boxes of {channels} channels of {self.image[2]} cross from tap to tap"
        fits = all(x in _CORNERS for x in (*self.low, *self.high)) and all(x in _STRIDES for x in self.stride) and all(
            (k - 1) * d in _OFFSETS for k, d in zip(self.kernel, self.dilation))
        return None if fits else "padding, stride or dilation are too large for a tensor map"

    def coordinates(self, row: Any, column: Any, rows: Any) -> tuple[Any, ...]:
        """Of a box at an element of the matrix: c, w, h, n of its first tap, then the offsets of its tap along w and h.

        row, column, rows (of the matrix): expressions.  Columns behind the last are behind the last image.
        """
        pixels, (_, _, channels), (kh, kw) = self.out[0] * self.out[1], self.image, self.kernel
        tap, place = column // channels, row % pixels
        n = select(column < kh * kw * channels, row // pixels, rows // pixels)
        w, h = (at * self.stride[d] + self.low[d] for d, at in ((1, place % self.out[1]), (0, place // self.out[1])))
        return column % channels, w, h, n, tap % kw * self.dilation[1], tap // kw * self.dilation[0]
