"""Split-K: few output tiles and a long k.  Blocks share the sum of one tile and add their parts to C with atomics.

With m = n = 256 a GEMM has four tiles of 128 x 128 and leaves most processors idle.  Splitting k into parts makes
parts times as many blocks.  C must be zero before the call, and the order of the additions is not fixed: two calls may
differ in the last bits.  stream_k shares out steps instead of parts: every worker gets the same number of (tile, step)
pairs, so no worker waits while another still has a whole tile to do.  Parts of tiles that several workers share go to a
workspace and are added in the order of k by a second launch: identical inputs give identical bits.  (So do the split sums
of tilelang.library.matmul.)
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T


def split_k(A, B, C, parts: int = 8, bm: int = 64, bn: int = 64, bk: int = 64):
    """C: (M, N) float32, zero before the call; A: (M, K), B: (K, N) float16."""
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((K, N), "float16")
    C: T.Tensor((M, N), "float32")
    share = T.ceildiv(T.ceildiv(K, parts), bk) * bk
    with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), parts, threads=128) as (bx, by, bz):
        As = T.alloc_shared((bm, bk), "float16")
        Bs = T.alloc_shared((bk, bn), "float16")
        Cf = T.alloc_fragment((bm, bn), "float32")
        T.clear(Cf)
        for ko in T.Pipelined(share // bk, num_stages=2):
            T.copy(A[by * bm, bz * share + ko * bk], As)
            T.copy(B[bz * share + ko * bk, bx * bn], Bs)
            T.gemm(As, Bs, Cf)
        T.atomic_add(C[by * bm, bx * bn], Cf)


def stream_k(m: int, n: int, k: int, workers: int = 132, bm: int = 128, bn: int = 128, bk: int = 64):
    """Worker w does the steps [w * share, (w + 1) * share) of the list of all (tile, step) pairs.

    W: (2 * workers * bm, bn) float32, any contents: the part of the tile that a worker enters in its middle, then the part of
    one that it begins and leaves to the next.
    """
    columns, steps = -(-n // bn), -(-k // bk)
    total = columns * -(-m // bm) * steps
    share = -(-total // workers)
    rows = 16

    @T.prim_func
    def program(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), W: T.Tensor((2 * workers * bm, bn), "float32"),
                C: T.Tensor((m, n), "float32")):
        with T.Kernel(workers, threads=128) as worker:
            As = T.alloc_shared((bm, bk), "float16")
            Bs = T.alloc_shared((bk, bn), "float16")
            Cf = T.alloc_fragment((bm, bn), "float32")
            at = T.alloc_var("int32", init=worker * share)
            end = T.min((worker + 1) * share, total)
            while at < end:
                tile = at // steps
                first = at % steps
                count = T.min(steps - first, end - at)
                by = tile // columns
                bx = tile % columns
                T.clear(Cf)
                for ko in T.Pipelined(count, num_stages=2):
                    T.copy(A[by * bm, (first + ko) * bk], As)
                    T.copy(B[(first + ko) * bk, bx * bn], Bs)
                    T.gemm(As, Bs, Cf)
                if count == steps:
                    T.copy(Cf, C[by * bm, bx * bn])
                else:
                    T.copy(Cf, W[(2 * worker + T.if_then_else(first > 0, 0, 1)) * bm, 0])
                at = at + count
        with T.Kernel(columns, T.ceildiv(m, bm), bm // rows, threads=128) as (bx, by, bz):
            total_rows = T.alloc_fragment((rows, bn), "float32")
            begin = (by * columns + bx) * steps
            first = begin // share
            last = (begin + steps - 1) // share
            if last > first:
                T.clear(total_rows)
                for worker in T.serial(first, last + 1):
                    part = (2 * worker + T.if_then_else(worker * share > begin, 0, 1)) * bm + bz * rows
                    for i, j in T.Parallel(rows, bn):
                        total_rows[i, j] += W[part + i, j]
                T.copy(total_rows, C[by * bm + bz * rows, bx * bn])

    return program


def _check(name: str, m: int, n: int, k: int, on: Place, run) -> Comparison:
    a, b, c = normal((m, k), "float16"), normal((k, n), "float16", 1), np.zeros((m, n), np.float32)
    run(a, b, c)
    on.work(2.0 * m * n * k)
    on.peer("a @ b", lambda a, b: a @ b, a, b)
    return compare(name, c, product(a, b), product_bound(wide(a), wide(b), "float16", "float32"))


def check_split_k(m: int = 256, n: int = 256, k: int = 16384, parts: int = 8, on: Place = HERE) -> Comparison:
    """The sum in float32 in any order."""
    kernel = on.jit(split_k)
    return _check("gemm split_k", m, n, k, on, lambda a, b, c: kernel(a, b, c, parts=parts))


def check_stream_k(m: int = 1000, n: int = 1000, k: int = 4096, workers: int = 132, on: Place = HERE) -> Comparison:
    """The sum in float32 in any order, which is always the same one here: the workspace holds NaN before the call."""
    kernel = on.compile(stream_k(m, n, k, workers))
    w = np.full((2 * workers * 128, 128), np.nan, np.float32)
    return _check("gemm stream_k", m, n, k, on, lambda a, b, c: kernel(a, b, w, c))


if __name__ == "__main__":
    main(check_split_k, check_stream_k)
