"""Broadcasting: y[i, j] = silu(x[i, j] * scale[j] + shift[j]) * gate[i], a fused elementwise chain over a matrix.

NumPy writes this with shapes (M, N), (N,) and (M, 1); here the indices say it.  Vectors along a tile's rows or columns
are copied once per block into fragments, so that each element of `scale` is read once per tile and not once per row;
the arithmetic runs in float32, with one rounding at the store.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def scale_shift_gate(m: int, n: int, bm: int = 32, bn: int = 128, dtype: str = "float16", threads: int = 128):
    """X, Y: (m, n); scale, shift: (n,); gate: (m,).  Sizes need not be multiples of the tile."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), scale: T.Tensor((n,), dtype), shift: T.Tensor((n,), dtype),
                gate: T.Tensor((m,), dtype), Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            x = T.alloc_fragment((bm, bn), "float32")
            a = T.alloc_fragment((bn,), "float32")
            b = T.alloc_fragment((bn,), "float32")
            g = T.alloc_fragment((bm,), "float32")
            T.copy(X[by * bm, bx * bn], x)
            T.copy(scale[bx * bn], a)
            T.copy(shift[bx * bn], b)
            T.copy(gate[by * bm], g)
            for i, j in T.Parallel(bm, bn):
                x[i, j] = x[i, j] * a[j] + b[j]
            for i, j in T.Parallel(bm, bn):
                x[i, j] = x[i, j] * T.sigmoid(x[i, j]) * g[i]
            T.copy(x, Y[by * bm, bx * bn])

    return program


def outer_compare(m: int, n: int, block: int = 64):
    """B[i, j] = 1 where a[i] >= b[j], else -1: an outer operation with a condition on two vectors, in integers."""
    @T.prim_func
    def program(A: T.Tensor((m,), "int32"), B: T.Tensor((n,), "int32"), C: T.Tensor((m, n), "int32")):
        with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), threads=128) as (bx, by):
            for i, j in T.Parallel(block, block):
                C[by * block + i, bx * block + j] = T.if_then_else(A[by * block + i] >= B[bx * block + j], 1, -1)

    return program


def check_scale_shift_gate(m: int = 4099, n: int = 2050, dtype: str = "float16", on: Place = HERE) -> Comparison:
    """One rounding to dtype; the float32 chain adds a few units of float32, exp up to about 8 of them."""
    x, a, b, g = normal((m, n), dtype), normal(n, dtype, 1), normal(n, dtype, 2), normal(m, dtype, 3)
    z = wide(x) * wide(a) + wide(b)
    want = z / (1 + np.exp(-z)) * wide(g)[:, None]
    got = on.compile(scale_shift_gate(m, n, dtype=dtype), out_idx=[4])(x, a, b, g)
    inner = (abs(wide(x) * wide(a)) + abs(wide(b))) * abs(wide(g))[:, None]  # |d silu| <= 1.1: errors inside pass on
    return compare(f"scale_shift_gate {dtype}", got, want, EPS[dtype] * abs(want) + 16 * EPS["float32"] * inner + 2.0**-25)


def check_outer_compare(m: int = 1000, n: int = 777, on: Place = HERE) -> Comparison:
    """Integers: exact."""
    a, b = normal(m, "int32"), normal(n, "int32", 1)
    return compare("outer_compare", on.compile(outer_compare(m, n), out_idx=[2])(a, b), np.where(a[:, None] >= b, 1, -1))


if __name__ == "__main__":
    main(check_scale_shift_gate, check_outer_compare)
