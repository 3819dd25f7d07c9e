"""The k largest elements of every row, with their columns: k rounds of a maximum.

Each round finds the largest value, then the smallest column that holds it, stores the pair and removes the element.  For
the small k of routing and sampling this beats a sort; ties come out in the order of columns, as in a stable sort.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, normal

import tilelang.language as T


def topk(m: int, n: int, k: int, rows: int = 16):
    """X: (m, n) float32; values: (m, k) float32, falling; columns: (m, k) int32."""
    @T.prim_func
    def program(X: T.Tensor((m, n), "float32"), values: T.Tensor((m, k), "float32"), columns: T.Tensor((m, k), "int32")):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, n), "float32")
            where = T.alloc_fragment((rows, n), "int32")
            top = T.alloc_fragment((rows,), "float32")
            at = T.alloc_fragment((rows,), "int32")
            T.copy(X[bx * rows, 0], x)
            for r in T.serial(k):
                T.reduce_max(x, top, dim=1)
                for i, j in T.Parallel(rows, n):
                    where[i, j] = T.if_then_else(x[i, j] == top[i], j, n)
                T.reduce_min(where, at, dim=1)
                for i, j in T.Parallel(rows, n):
                    x[i, j] = T.if_then_else(j == at[i], -T.infinity("float32"), x[i, j])
                for i in T.Parallel(rows):
                    values[bx * rows + i, r] = top[i]
                    columns[bx * rows + i, r] = at[i]

    return program


def check(m: int = 4099, n: int = 256, k: int = 8, on: Place = HERE) -> list[Comparison]:
    """Values are copied: exact.  Rounded inputs, so that there are ties."""
    x = np.round(normal((m, n)) * 8) / 8
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    values, columns = on.compile(topk(m, n, k), out_idx=[1, 2])(x)
    on.peer("torch topk", lambda x: x.topk(k), x)
    return [compare("topk values", values, np.take_along_axis(x, order, 1)), compare("topk columns", columns, order)]


if __name__ == "__main__":
    main(check)
