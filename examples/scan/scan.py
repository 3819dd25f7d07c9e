"""Running sums and maxima along rows, of any length.

tile        rows that fit in one tile: T.cumsum and T.cummax.
carried     rows in pieces: the last value of a piece, kept per row, is added to the next.
two_passes  one long vector over many blocks: first every block scans its piece and stores its total, then a second
            launch scans the totals and adds to each piece what came before it.  Two T.Kernel in one program run in order.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def tile(m: int, n: int, rows: int = 8, kind: str = "sum", reverse: bool = False):
    """X, Y: (m, n) float32.  kind: sum or max."""
    scan = {"sum": T.cumsum, "max": T.cummax}[kind]

    @T.prim_func
    def program(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_shared((rows, n), "float32")
            T.copy(X[bx * rows, 0], x)
            scan(x, dim=1, reverse=reverse)
            T.copy(x, Y[bx * rows, 0])

    return program


def carried(m: int, n: int, rows: int = 8, bn: int = 256):
    """Running sums in pieces of bn columns."""
    @T.prim_func
    def program(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as bx:
            x = T.alloc_shared((rows, bn), "float32")
            so_far = T.alloc_shared((rows,), "float32")
            T.clear(so_far)
            for k in T.serial(T.ceildiv(n, bn)):
                T.copy(X[bx * rows, k * bn], x)
                T.cumsum(x, dim=1)
                for i, j in T.Parallel(rows, bn):
                    x[i, j] = x[i, j] + so_far[i]
                T.copy(x, Y[bx * rows, k * bn])
                for i in T.Parallel(rows):
                    so_far[i] = x[i, bn - 1]

    return program


def two_passes(n: int, block: int = 1024):
    """X, Y: (n,) float32; totals: (ceildiv(n, block),), scratch.  At most 1024 * block elements."""
    blocks = -(-n // block)
    wide_enough = 1 << (blocks - 1).bit_length()

    @T.prim_func
    def program(X: T.Tensor((n,), "float32"), totals: T.Tensor((blocks,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(blocks, threads=128) as bx:
            x = T.alloc_shared((block,), "float32")
            T.copy(X[bx * block], x)
            T.cumsum(x)
            T.copy(x, Y[bx * block])
            totals[bx] = x[block - 1]
        with T.Kernel(blocks, threads=128) as bx:
            before = T.alloc_fragment((wide_enough,), "float32")
            offset = T.alloc_fragment((1,), "float32")
            for i in T.Parallel(wide_enough):
                before[i] = T.if_then_else(i < bx, totals[i], 0)
            T.reduce_sum(before, offset)
            for i in T.Parallel(block):
                Y[bx * block + i] += offset[0]

    return program


def _compare(name: str, x: np.ndarray, got: np.ndarray, reverse: bool = False) -> Comparison:
    """A prefix of k elements has rounded at most k times, like a random walk: 4 sqrt(k) units of the absolute sums."""
    x = wide(x)[..., ::-1] if reverse else wide(x)
    want, size = np.cumsum(x, -1), np.cumsum(abs(x), -1)
    bound = 4 * EPS["float32"] * np.sqrt(1 + np.arange(x.shape[-1])) * size
    return compare(name, got, *(v[..., ::-1] if reverse else v for v in (want, bound)))


def check_tile(m: int = 1001, n: int = 512, on: Place = HERE) -> list[Comparison]:
    """Maxima are exact."""
    x = normal((m, n))
    sums = [_compare(f"cumsum{', reversed' * back}", x, on.compile(tile(m, n, reverse=back), out_idx=[1])(x), back)
            for back in (False, True)]
    got = on.compile(tile(m, n, kind="max"), out_idx=[1])(x)
    return [*sums, compare("cummax", got, np.maximum.accumulate(x, 1))]


def check_carried(m: int = 301, n: int = 10_000, on: Place = HERE) -> Comparison:
    """The bound of a plain running sum."""
    x = normal((m, n))
    got = on.compile(carried(m, n), out_idx=[1])(x)
    on.peer("torch cumsum", lambda x: x.cumsum(1), x)
    return _compare("cumsum carried", x, got)


def check_two_passes(n: int = 1_000_003, on: Place = HERE) -> Comparison:
    """The bound of a plain running sum."""
    x = normal(n)
    totals = np.zeros(-(-n // 1024), np.float32)
    got = on.compile(two_passes(n), out_idx=[2])(x, totals)
    on.peer("torch cumsum", lambda x: x.cumsum(0), x)
    return _compare("cumsum two_passes", x, got)


if __name__ == "__main__":
    main(check_tile, check_carried, check_two_passes)
