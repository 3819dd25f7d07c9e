"""Matrix times vector, y = A @ x, where the speed of memory decides: three ways to share a row among threads.

by_tile     one block per tile of rows; products in a fragment, T.reduce_sum over the columns.  The plain form.
by_threads  a block of (rows, lanes) threads written by hand: each thread walks its share of the row with vector loads
            into private memory, then T.warp_reduce_sum adds up the lanes of a row.  The form to start from
            when the reduction needs unusual code.
split_k     long rows and few of them: several blocks share a row and add their parts with atomics.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def by_tile(m: int, k: int, bm: int = 16, bk: int = 256, dtype: str = "float16"):
    """A: (m, k), X: (k,) of dtype; Y: (m,) float32."""
    @T.prim_func
    def program(A: T.Tensor((m, k), dtype), X: T.Tensor((k,), dtype), Y: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, bm), threads=128) as bx:
            a = T.alloc_fragment((bm, bk), dtype)
            x = T.alloc_fragment((bk,), dtype)
            part = T.alloc_fragment((bm, bk), "float32")
            y = T.alloc_fragment((bm,), "float32")
            T.clear(part)
            for ko in T.serial(T.ceildiv(k, bk)):
                T.copy(A[bx * bm, ko * bk], a)
                T.copy(X[ko * bk], x)
                for i, j in T.Parallel(bm, bk):
                    part[i, j] += T.cast(a[i, j], "float32") * T.cast(x[j], "float32")
            T.reduce_sum(part, y, dim=1)
            T.copy(y, Y[bx * bm])

    return program


def by_threads(m: int, k: int, rows: int = 4, lanes: int = 32, width: int = 8, dtype: str = "float16"):
    """Each row belongs to one warp: `lanes` threads that read `width` neighbouring elements at a time."""
    step = lanes * width

    @T.prim_func
    def program(A: T.Tensor((m, k), dtype), X: T.Tensor((k,), dtype), Y: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=(lanes, rows)) as bx:
            lane = T.get_thread_binding(0)
            row = bx * rows + T.get_thread_binding(1)
            a = T.alloc_local((width,), dtype)
            x = T.alloc_local((width,), dtype)
            total = T.alloc_var("float32", init=0.0)
            for ko in T.serial(T.ceildiv(k, step)):
                for v in T.vectorized(width):
                    a[v] = A[row, ko * step + lane * width + v]
                for v in T.vectorized(width):
                    x[v] = X[ko * step + lane * width + v]
                for v in T.serial(width):
                    total = total + T.cast(a[v], "float32") * T.cast(x[v], "float32")
            whole = T.warp_reduce_sum(total)
            if lane == 0:
                Y[row] = whole

    return program


def split_k(m: int, k: int, parts: int = 4, bm: int = 16, bk: int = 256, dtype: str = "float16"):
    """Y must be zero before the call: every part adds to it, in an order that is not fixed."""
    share = -(-k // (parts * bk)) * bk

    @T.prim_func
    def program(A: T.Tensor((m, k), dtype), X: T.Tensor((k,), dtype), Y: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, bm), parts, threads=128) as (bx, by):
            part = T.alloc_fragment((bm, bk), "float32")
            y = T.alloc_fragment((bm,), "float32")
            T.clear(part)
            for ko in T.serial(share // bk):
                for i, j in T.Parallel(bm, bk):
                    part[i, j] += T.cast(A[bx * bm + i, by * share + ko * bk + j], "float32") * \
                        T.cast(X[by * share + ko * bk + j], "float32")
            T.reduce_sum(part, y, dim=1)
            T.atomic_add(Y[bx * bm], y)

    return program


def check(m: int = 4096, k: int = 8192, dtype: str = "float16", on: Place = HERE) -> list[Comparison]:
    """k products (exact in float32 from 16 bits) summed in float32: a random walk of roundings, four deviations."""
    a, x = normal((m, k), dtype), normal(k, dtype, 1)
    want = wide(a) @ wide(x)
    bound = 4 * EPS["float32"] * k**0.5 * (abs(wide(a)) @ abs(wide(x))).max()
    results = []
    for form in (by_tile, by_threads):
        got = on.compile(form(m, k, dtype=dtype), out_idx=[2])(a, x)
        on.peer("a @ x", lambda a, x: a @ x, a, x)
        results.append(compare(f"gemv {form.__name__} {dtype}", got, want, bound))
    y = np.zeros(m, np.float32)
    on.compile(split_k(m, k, dtype=dtype))(a, x, y)
    return [*results, compare(f"gemv split_k {dtype}", y, want, bound)]


if __name__ == "__main__":
    main(check)
