"""GEMM with a 2:4 sparse operand: of every four neighbours in a row of A two are zero, and only the others are stored.

`compress` prunes: it keeps the two largest of each four, with 4 bits of metadata that name their columns (2 bits each, the
first one low).  A row of k values takes k / 2 values and k / 8 bytes of metadata: 9/16 of the bytes in float16.
On sm_90a T.gemm_sp multiplies kept values as they lie (wgmma.mma_async.sp); elsewhere it expands a tile in shared memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T

META = "int16"  # each holds the metadata of 16 columns


def sparse(m: int, n: int, k: int, bm: int = 64, bn: int = 128, bk: int = 128, stages: int = 2, dtype: str = "float16"):
    """A: (m, k / 2) kept values; E: (m, k / 16) metadata; B: (k, n); C: (m, n).  k a multiple of bk."""
    @T.prim_func
    def program(A: T.Tensor((m, k // 2), dtype), E: T.Tensor((m, k // 16), META), B: T.Tensor((k, n), dtype),
                C: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            As = T.alloc_shared((bm, bk // 2), dtype)
            Es = T.alloc_shared((bm, bk // 16), META)
            Bs = T.alloc_shared((bk, bn), dtype)
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(k // bk, num_stages=stages):
                T.copy(A[by * bm, ko * bk // 2], As)
                T.copy(E[by * bm, ko * bk // 16], Es)
                T.copy(B[ko * bk, bx * bn], Bs)
                T.gemm_sp(As, Es, Bs, Cf)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def compress(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pruned matrix, kept values, metadata) of a matrix whose columns are a multiple of 16."""
    groups = a.reshape(a.shape[0], -1, 4)
    kept = np.sort(np.argsort(-abs(groups.astype(np.float32)), axis=2, kind="stable")[:, :, :2], axis=2)
    values = np.take_along_axis(groups, kept, 2)
    pruned = np.zeros_like(groups)
    np.put_along_axis(pruned, kept, values, 2)
    code = (kept[:, :, 0] | kept[:, :, 1] << 2).astype(np.uint16).reshape(a.shape[0], -1, 4)
    meta = (code << (4 * np.arange(4, dtype=np.uint16))).sum(2).astype(np.uint16).view(np.int16)
    return pruned.reshape(a.shape), values.reshape(a.shape[0], -1), meta


def check(m: int = 4096, n: int = 4096, k: int = 4096, on: Place = HERE) -> Comparison:
    """The reference multiplies the pruned matrix: what pruning lost is not counted."""
    a, b = normal((m, k), "float16"), normal((k, n), "float16", 1)
    pruned, values, meta = compress(a)
    got = on.compile(sparse(m, n, k), out_idx=[3])(values, meta, b)
    on.peer("dense a @ b", lambda a, b: a @ b, pruned, b)
    return compare("gemm 2:4 sparse", got, product(pruned, b), product_bound(wide(pruned), wide(b), "float16", "float16"))


if __name__ == "__main__":
    main(check)
