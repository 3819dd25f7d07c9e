"""GEMM of 4-bit integers: C = A @ B.T, A and B packed two to a byte in memory, summed exactly in int32.

T.int4 is packed in global memory only: a tile in shared memory holds a byte per value, and T.gemm multiplies it as int8.
The tensors travel in half the bytes of int8; along their last dimension the even column lies in the low half of a byte.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, Comparison, Place, compare, main, product

import tilelang.language as T


def int4(m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 128, stages: int = 2):
    """A: (m, k), B: (n, k) int4, k even; C: (m, n) int32."""
    @T.prim_func
    def program(A: T.Tensor((m, k), "int4"), B: T.Tensor((n, k), "int4"), C: T.Tensor((m, n), "int32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=256) as (bx, by):
            As = T.alloc_shared((bm, bk), "int4")
            Bs = T.alloc_shared((bn, bk), "int4")
            Cf = T.alloc_fragment((bm, bn), "int32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[by * bm, ko * bk], As)
                T.copy(B[bx * bn, ko * bk], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def pack(x: np.ndarray) -> np.ndarray:
    """(rows, k) values in [-8, 8) to (rows, k / 2) bytes."""
    q = x.astype(np.uint8) & 15
    return (q[:, 0::2] | q[:, 1::2] << 4).view(np.int8)


def check(m: int = 4096, n: int = 4096, k: int = 4096, on: Place = HERE) -> Comparison:
    """Integers: exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (rows, k)) for rows in (m, n))
    return compare("gemm int4", on.compile(int4(m, n, k), out_idx=[2])(pack(a), pack(b)), product(a, b.T))


if __name__ == "__main__":
    main(check)
