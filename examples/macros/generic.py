"""Macros and generic kernels: pieces of kernels as functions, and kernels that take such pieces.

A T.macro is inlined at each call.  Buffers, Python values and other macros go in as they are, run-time numbers by value,
and a parameter annotated T.Ref by reference.  Because a kernel is built by running Python, a factory can take the epilogue
of a GEMM or the operation of a reduction as an argument, and the result is as fast as the kernel written out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, product_bound, wide

import tilelang.language as T


@T.macro
def relu(x):
    """max(x, 0)"""
    return T.max(x, 0)


@T.macro
def gelu(x):
    """x / 2 * (1 + erf(x / sqrt(2)))"""
    return 0.5 * x * (1 + T.erf(x * 0.7071067811865476))


@T.macro
def bias_then(activation, tile, bias, bm, bn, column):
    """tile = activation(tile + bias) for a (bm, bn) tile that starts at a column."""
    for i, j in T.Parallel(bm, bn):
        tile[i, j] = activation(tile[i, j] + bias[column + j])


def linear(m: int, n: int, k: int, activation, bm: int = 64, bn: int = 64, bk: int = 64, dtype: str = "float16"):
    """Y = activation(X @ W.T + bias) with any macro of one number as the activation."""
    @T.prim_func
    def program(X: T.Tensor((m, k), dtype), W: T.Tensor((n, k), dtype), bias: T.Tensor((n,), "float32"),
                Y: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            Xs = T.alloc_shared((bm, bk), dtype)
            Ws = T.alloc_shared((bn, bk), dtype)
            tile = T.alloc_fragment((bm, bn), "float32")
            T.clear(tile)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                T.copy(X[by * bm, ko * bk], Xs)
                T.copy(W[bx * bn, ko * bk], Ws)
                T.gemm(Xs, Ws, tile, transpose_B=True)
            bias_then(activation, tile, bias, bm, bn, bx * bn)
            T.copy(tile, Y[by * bm, bx * bn])

    return program


@T.macro
def horner(total: T.Ref, x, coefficients):
    """total = c0 + x (c1 + x (c2 + ...)): a recursion over a Python tuple, gone when the kernel is made."""
    if len(coefficients) == 1:
        total = coefficients[0]
    else:
        horner(total, x, coefficients[1:])
        total = total * x + coefficients[0]


def polynomial(n: int, coefficients: tuple[float, ...], block: int = 256):
    """Y = the polynomial of X, one element per thread."""
    @T.prim_func
    def program(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=block) as bx:
            i = bx * block + T.get_thread_binding()
            total = T.alloc_var("float32")
            horner(total, X[i], coefficients)
            Y[i] = total

    return program


def check_linear(m: int = 1000, n: int = 1000, k: int = 512, on: Place = HERE) -> list[Comparison]:
    """Both activations have slopes below 1.13: errors of the product pass through."""
    from math import erf

    x, b = normal((m, k), "float16"), normal(n, "float32", 2)
    w = (wide(normal((n, k), "float32", 1)) / k**0.5).astype(np.float16)
    inner = wide(x) @ wide(w).T + wide(b)
    error = 1.13 * product_bound(wide(x), wide(w).T, "float16", "float32") + 8 * EPS["float32"] * abs(inner)
    results = []
    for macro, want in ((relu, np.maximum(inner, 0)), (gelu, inner / 2 * (1 + np.vectorize(erf)(inner / 2**0.5)))):
        got = on.compile(linear(m, n, k, macro), out_idx=[3])(x, w, b)
        results.append(compare(f"linear {macro.name}", got, want, error + EPS["float16"] * abs(want) + 2.0**-25))
    return results


def check_polynomial(n: int = 100_003, on: Place = HERE) -> Comparison:
    """Two roundings a step, each of at most the polynomial of absolute values."""
    coefficients = (1.0, -0.5, 0.25, -0.125, 2.0)
    x = normal(n)
    want = np.polynomial.polynomial.polyval(wide(x), coefficients)
    size = np.polynomial.polynomial.polyval(abs(wide(x)), [abs(c) for c in coefficients])
    got = on.compile(polynomial(n, coefficients), out_idx=[1])(x)
    return compare("polynomial", got, want, 2 * len(coefficients) * EPS["float32"] * size)


if __name__ == "__main__":
    main(check_linear, check_polynomial)
