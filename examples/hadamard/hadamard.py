"""Hadamard transform of rows: y = x @ H(n) / sqrt(n), n a power of two, in log2(n) steps of sums and differences.

Step s pairs the elements whose positions differ in bit s: (a, b) -> (a + b, a - b).  Two buffers in shared memory take
turns, so that one statement reads what the last one wrote; the loop over steps is unrolled while tracing by a macro that
calls itself.  float16 inputs are transformed in float32 and rounded once.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


@T.macro
def steps(source, target, rows, n, stride):
    """All steps from this stride on; the result lies in source or target, by the parity of their number."""
    if stride < n:  # Python numbers: decided while tracing
        for i, j in T.Parallel(rows, n):
            target[i, j] = T.if_then_else((j // stride) % 2 == 0, source[i, j] + source[i, j ^ stride],
                                          source[i, j ^ stride] - source[i, j])
        steps(target, source, rows, n, stride * 2)


def hadamard(m: int, n: int, rows: int = 4, dtype: str = "float16"):
    """X, Y: (m, n)."""
    scale = float(n) ** -0.5

    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            a = T.alloc_shared((rows, n), "float32")
            b = T.alloc_shared((rows, n), "float32")
            result = a if (n.bit_length() - 1) % 2 == 0 else b
            T.copy(X[bx * rows, 0], a)
            steps(a, b, rows, n, 1)
            for i, j in T.Parallel(rows, n):
                Y[bx * rows + i, j] = result[i, j] * scale

    return program


def check(m: int = 4099, n: int = 1024, dtype: str = "float16", on: Place = HERE) -> Comparison:
    """log2(n) float32 additions on the way to each element, of partial sums no larger than sum |x|."""
    x = normal((m, n), dtype)
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    want = wide(x) @ h / np.sqrt(n)
    size = abs(wide(x)).sum(1, keepdims=True) / np.sqrt(n)
    got = on.compile(hadamard(m, n, dtype=dtype), out_idx=[1])(x)
    bound = EPS[dtype] * abs(want) + EPS["float32"] * (2 + np.log2(n)) * size + 2.0**-25
    return compare(f"hadamard {dtype}", got, want, bound)


if __name__ == "__main__":
    main(check)
