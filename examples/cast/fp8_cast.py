"""Casting to float8 with scales: each group of values is divided by its largest magnitude, so that it uses the range.

float8_e4m3fn ends at 448.  scale = amax / 448 and q = x / scale; the product of later GEMMs is multiplied by the scales
again (gemm/fp8.py).  A group is a run of 128 columns of one row (per_token: activations) or a square block of
128 x 128 (per_block: weights).  A group of zeros gets a scale from a small floor, so nothing is divided by zero.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, NUMPY, Comparison, Place, compare, main, normal, wide

import tilelang.language as T

F8, LARGEST, FLOOR = "float8_e4m3fn", 448.0, 1e-4


def per_token(m: int, n: int, group: int = 128, rows: int = 8, dtype: str = "bfloat16"):
    """X: (m, n); Q: (m, n) float8; S: (m, ceildiv(n, group)) float32."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), Q: T.Tensor((m, n), F8), S: T.Tensor((m, -(-n // group)), "float32")):
        with T.Kernel(T.ceildiv(n, group), T.ceildiv(m, rows), threads=128) as (bx, by):
            x = T.alloc_fragment((rows, group), "float32")
            amax = T.alloc_fragment((rows,), "float32")
            q = T.alloc_fragment((rows, group), F8)
            T.copy(X[by * rows, bx * group], x)
            T.reduce_absmax(x, amax, dim=1)
            for i in T.Parallel(rows):
                amax[i] = T.max(amax[i], FLOOR) / LARGEST
            for i, j in T.Parallel(rows, group):
                q[i, j] = T.clamp(x[i, j] / amax[i], -LARGEST, LARGEST)
            T.copy(q, Q[by * rows, bx * group])
            for i in T.Parallel(rows):
                S[by * rows + i, bx] = amax[i]

    return program


def per_block(m: int, n: int, group: int = 128, dtype: str = "bfloat16"):
    """S: (ceildiv(m, group), ceildiv(n, group)) float32.  The tile is reduced along rows, then along what is left."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), Q: T.Tensor((m, n), F8),
                S: T.Tensor((-(-m // group), -(-n // group)), "float32")):
        with T.Kernel(T.ceildiv(n, group), T.ceildiv(m, group), threads=256) as (bx, by):
            x = T.alloc_fragment((group, group), "float32")
            by_row = T.alloc_fragment((group,), "float32")
            amax = T.alloc_fragment((1,), "float32")
            T.copy(X[by * group, bx * group], x)
            T.reduce_absmax(x, by_row, dim=1)
            T.reduce_max(by_row, amax)
            amax[0] = T.max(amax[0], FLOOR) / LARGEST
            for i, j in T.Parallel(group, group):
                x[i, j] = T.clamp(x[i, j] / amax[0], -LARGEST, LARGEST)
            T.copy(x, Q[by * group, bx * group])
            S[by, bx] = amax[0]

    return program


def _compare(name: str, x: np.ndarray, q: np.ndarray, s: np.ndarray, want_s: np.ndarray, each: np.ndarray) -> list[Comparison]:
    """Scales: one division in float32.  Values: the nearest float8 of x / scale, where a quotient a rounding away from
    the middle between two of them may go either way; below 2**-6 float8 is spaced evenly, 2**-9 apart."""
    quotient = wide(x) / each
    bound = EPS[F8] * (1 + 2.0**-20) * abs(quotient) + 2.0**-10 * (1 + 2.0**-12)
    return [compare(f"{name}, scales", s, want_s, 2 * EPS["float32"] * want_s), compare(name, q, quotient, bound)]


def check_per_token(m: int = 4099, n: int = 1000, group: int = 128, on: Place = HERE) -> list[Comparison]:
    """Rows of widely different size."""
    x = (wide(normal((m, n))) * np.exp(wide(normal((m, 1), "float32", 1)) * 3)).astype(NUMPY["bfloat16"])
    padded = np.pad(wide(x), ((0, 0), (0, -n % group)))
    scale = np.maximum(abs(padded).reshape(m, -1, group).max(2), FLOOR) / LARGEST
    q, s = on.compile(per_token(m, n, group), out_idx=[1, 2])(x)
    return _compare("fp8 per_token", x, q, s, scale, scale.repeat(group, 1)[:, :n])


def check_per_block(m: int = 2000, n: int = 1000, group: int = 128, on: Place = HERE) -> list[Comparison]:
    """One block is all zeros."""
    x = normal((m, n), "bfloat16")
    x[:group, :group] = 0
    padded = np.pad(wide(x), ((0, -m % group), (0, -n % group)))
    blocks = abs(padded).reshape(padded.shape[0] // group, group, -1, group)
    scale = np.maximum(blocks.max((1, 3)), FLOOR) / LARGEST
    q, s = on.compile(per_block(m, n, group), out_idx=[1, 2])(x)
    return _compare("fp8 per_block", x, q, s, scale, scale.repeat(group, 0)[:m].repeat(group, 1)[:, :n])


if __name__ == "__main__":
    main(check_per_token, check_per_block)
