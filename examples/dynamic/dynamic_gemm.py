"""Shapes known only at the call: one compiled kernel for every size.

gemm      A: (m, k) and C: (m, n) with run-time m, n and k; weights and activations of any size, zero included.
padded    the number of tokens is less than the buffer holds: a scalar argument bounds the work, and blocks past it run a
          loop of no iterations (a condition around a pipelined loop would keep the compiler from giving warps roles).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T


def gemm(bm: int = 128, bn: int = 128, bk: int = 64, dtype: str = "float16"):
    """The same symbol in two shapes is a condition that every call checks: A's columns are B's rows."""
    m, n, k = T.dynamic("m, n, k")

    @T.prim_func
    def program(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            As = T.alloc_shared((bm, bk), dtype)
            Bs = T.alloc_shared((bk, bn), dtype)
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[ko * bk, bx * bn], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def padded(n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, dtype: str = "float16"):
    """C[:tokens] = A[:tokens] @ B.T; the other rows of C keep their values."""
    rows = T.dynamic("rows")

    @T.prim_func
    def program(A: T.Tensor((rows, k), dtype), B: T.Tensor((n, k), dtype), tokens: T.int32, C: T.Tensor((rows, n), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(rows, bm), threads=256) as (bx, by):
            As = T.alloc_shared((bm, bk), dtype)
            Bs = T.alloc_shared((bn, bk), dtype)
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.if_then_else(by * bm < tokens, T.ceildiv(k, bk), 0), num_stages=2):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                if by * bm + i < tokens:
                    C[by * bm + i, bx * bn + j] = Cf[i, j]

    return program


def check_gemm(m: int = 4000, n: int = 4100, k: int = 1000, on: Place = HERE) -> list[Comparison]:
    """One kernel, called with four sizes."""
    kernel = on.compile(gemm(), out_idx=[2])
    results = []
    for m_, n_, k_ in ((m, n, k), (1, n, k), (m, 8, 1), (0, n, k)):
        a, b = normal((m_, k_), "float16"), normal((k_, n_), "float16", 1)
        results.append(compare(f"dynamic gemm {m_} x {n_} x {k_}", kernel(a, b), product(a, b),
                               product_bound(wide(a), wide(b), "float16", "float16")))
    return results


def check_padded(rows: int = 4000, tokens: int = 1300, n: int = 2048, k: int = 2048, on: Place = HERE) -> list[Comparison]:
    """Rows past the tokens are not written."""
    a, b = normal((rows, k), "float16"), normal((n, k), "float16", 1)
    c = np.full((rows, n), 7, np.float32)
    on.compile(padded(n, k))(a, b, tokens, c)
    bound = product_bound(wide(a), wide(b).T, "float16", "float32")
    return [compare("dynamic padded", c[:tokens], product(a[:tokens], wide(b).T), bound),
            compare("dynamic padded, the rest", c[tokens:], np.full((rows - tokens, n), 7))]


if __name__ == "__main__":
    main(check_gemm, check_padded)
