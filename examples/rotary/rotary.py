"""Rotary position embedding: pairs of elements of a head are rotated by an angle that grows with the position.

    angle = (start + s) * base ** (-2 i / dim);   (a, b) -> (a cos - b sin, a sin + b cos)

half         pairs are (x[i], x[i + dim / 2]); cosines and sines come from a table, (positions, dim / 2).
interleaved  pairs are neighbours (x[2 i], x[2 i + 1]); the angle is computed, and rotates in float32.  start is a
             run-time number: one kernel serves every step of decoding.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def half(batch: int, seq: int, heads: int, dim: int, rows: int = 16, dtype: str = "float16"):
    """X, Y: (batch, seq, heads, dim); cos, sin: (seq, dim / 2) float32."""
    @T.prim_func
    def program(X: T.Tensor((batch, seq, heads, dim), dtype), cos: T.Tensor((seq, dim // 2), "float32"),
                sin: T.Tensor((seq, dim // 2), "float32"), Y: T.Tensor((batch, seq, heads, dim), dtype)):
        with T.Kernel(T.ceildiv(seq, rows), heads, batch, threads=128) as (bx, h, b):
            for i, j in T.Parallel(rows, dim // 2):
                s = bx * rows + i
                left = T.cast(X[b, s, h, j], "float32")
                right = T.cast(X[b, s, h, j + dim // 2], "float32")
                Y[b, s, h, j] = left * cos[s, j] - right * sin[s, j]
                Y[b, s, h, j + dim // 2] = left * sin[s, j] + right * cos[s, j]

    return program


def interleaved(batch: int, seq: int, heads: int, dim: int, base: float = 10000.0, rows: int = 16,
                dtype: str = "float16"):
    """The same layout of X and Y, in which position s stands for start + s."""
    step = -2 / dim * float(np.log2(base))

    @T.prim_func
    def program(X: T.Tensor((batch, seq, heads, dim), dtype), start: T.int32,
                Y: T.Tensor((batch, seq, heads, dim), dtype)):
        with T.Kernel(T.ceildiv(seq, rows), heads, batch, threads=128) as (bx, h, b):
            for i, j in T.Parallel(rows, dim // 2):
                s = bx * rows + i
                angle = T.cast(start + s, "float32") * T.exp2(j * T.float32(step))
                left = T.cast(X[b, s, h, 2 * j], "float32")
                right = T.cast(X[b, s, h, 2 * j + 1], "float32")
                Y[b, s, h, 2 * j] = left * T.cos(angle) - right * T.sin(angle)
                Y[b, s, h, 2 * j + 1] = left * T.sin(angle) + right * T.cos(angle)

    return program


def _rotate(a: np.ndarray, b: np.ndarray, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]  # (seq, 1, dim / 2): all heads alike
    return a * cos - b * sin, a * sin + b * cos


def check_half(batch: int = 2, seq: int = 2000, heads: int = 16, dim: int = 128, on: Place = HERE) -> Comparison:
    """Three float32 roundings (the table's, the product's, the sum's) and one to the output."""
    x = normal((batch, seq, heads, dim), "float16")
    angle = np.arange(seq)[:, None] * 10000.0 ** (-2 * np.arange(dim // 2) / dim)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = wide(x[..., :dim // 2]), wide(x[..., dim // 2:])
    want = np.concatenate(_rotate(a, b, angle), -1)
    size = np.tile(abs(a) + abs(b), 2)
    got = on.compile(half(batch, seq, heads, dim), out_idx=[3])(x, cos, sin)
    return compare("rotary half", got, want, EPS["float16"] * abs(want) + 4 * EPS["float32"] * size + 2.0**-25)


def check_interleaved(batch: int = 2, seq: int = 500, heads: int = 16, dim: int = 128, start: int = 100,
                      on: Place = HERE) -> Comparison:
    """The angle's relative error (exp2's exponent is rounded too) is absolute in the rotation: it grows with the position."""
    x = normal((batch, seq, heads, dim), "float16")
    angle = (start + np.arange(seq))[:, None] * 10000.0 ** (-2 * np.arange(dim // 2) / dim)
    a, b = wide(x[..., 0::2]), wide(x[..., 1::2])
    want = np.stack(_rotate(a, b, angle), -1).reshape(x.shape)
    size = (abs(a) + abs(b)).repeat(2, -1)
    turned = (16 * EPS["float32"] * (1 + angle)).repeat(2, -1)[:, None]
    got = on.compile(interleaved(batch, seq, heads, dim), out_idx=[2])(x, start)
    bound = EPS["float16"] * abs(want) + (turned + 4 * EPS["float32"]) * size + 2.0**-25
    return compare("rotary interleaved", got, want, bound)


if __name__ == "__main__":
    main(check_half, check_interleaved)
