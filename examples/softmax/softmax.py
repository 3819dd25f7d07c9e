"""Softmax over rows, in two ways.

whole    a row fits in the registers of a block: read once, largest element, exponentials, sum, divide, write once.
online   rows of any length, in pieces.  The largest element so far and the sum of exponentials relative to it are
         carried along; when a piece raises the maximum, the sum so far shrinks by exp(old - new).  A second walk
         writes the results.  FlashAttention rests on the same step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T

LOG2E = 1.4426950408889634


def whole(m: int, n: int, rows: int = 4, dtype: str = "float16"):
    """X, Y: (m, n); a block holds `rows` full rows."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            top = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(X[bx * rows, 0], x)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(rows, n):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(rows, n):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[bx * rows, 0])

    return program


def online(m: int, n: int, rows: int = 4, bn: int = 1024, dtype: str = "float16"):
    """The same in pieces of bn columns.  exp2 of x * log2(e) takes one multiplication less than exp."""
    @T.prim_func
    def program(X: T.Tensor((m, n), dtype), Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, bn), "float32")
            top = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            part = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.fill(top, -T.infinity("float32"))
            T.clear(total)
            for k in T.serial(T.ceildiv(n, bn)):
                for i, j in T.Parallel(rows, bn):  # what lies past the row must not count: exp(-inf) = 0
                    x[i, j] = T.if_then_else(k * bn + j < n, T.cast(X[bx * rows + i, k * bn + j], "float32") * LOG2E,
                                             -T.infinity("float32"))
                T.copy(top, before)
                T.reduce_max(x, top, dim=1, clear=False)
                for i, j in T.Parallel(rows, bn):
                    x[i, j] = T.exp2(x[i, j] - top[i])
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * T.exp2(before[i] - top[i]) + part[i]
            for k in T.serial(T.ceildiv(n, bn)):
                T.copy(X[bx * rows, k * bn], x)
                for i, j in T.Parallel(rows, bn):
                    x[i, j] = T.exp2(x[i, j] * LOG2E - top[i]) / total[i]
                T.copy(x, Y[bx * rows, k * bn])

    return program


def _check(form, m: int, n: int, dtype: str, on: Place) -> Comparison:
    x = (wide(normal((m, n), "float32")) * 4).astype(normal(1, dtype).dtype)
    e = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    # The exponent x - max is rounded to float32, so exp's relative error grows with the largest |x|; positive terms
    # sum without cancellation; float16 is denormal below 2**-14, where its rounding is 2**-25 at most.
    relative = EPS[dtype] + EPS["float32"] * (8 * abs(wide(x)).max() + 4 * n**0.5)
    got = on.compile(form(m, n, dtype=dtype), out_idx=[1])(x)
    on.peer("torch softmax", lambda x: x.softmax(1), x)
    return compare(f"softmax {form.__name__} {dtype}", got, want, relative * want + 2.0**-25)


def check_whole(m: int = 4099, n: int = 2048, dtype: str = "float16", on: Place = HERE) -> Comparison:
    """Each row within a relative error of one rounding and the float32 arithmetic."""
    return _check(whole, m, n, dtype, on)


def check_online(m: int = 301, n: int = 100_003, dtype: str = "float16", on: Place = HERE) -> Comparison:
    """The same bound for long rows."""
    return _check(online, m, n, dtype, on)


if __name__ == "__main__":
    main(check_whole, check_online)
