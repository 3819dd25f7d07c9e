"""A factory of a module with postponed annotations, for test_postponed_names.py."""

from __future__ import annotations

import tilelang.language as T

SIZE = 4


def make(n, dtype):
    def first(X):
        return X[0]

    @T.prim_func
    def doubled(A: T.Tensor((n,), dtype), B: T.Tensor((SIZE,), dtype)):
        with T.Kernel(1, threads=32):
            B[0] = first(A) * 2

    return doubled
