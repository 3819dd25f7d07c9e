"""C = op(A) @ op(B): the plain tiled GEMM, then persistent, batched and strided forms of it.

A block computes one (bm, bn) tile of C in registers.  T.Pipelined keeps num_stages tiles of A and B in flight: copies
of later steps run while T.gemm works on the present one; the compiler chooses layouts, instructions and barriers.
T.use_swizzle walks the tiles so that neighbouring blocks share operands in the L2 cache.  Ragged sizes need nothing:
what a tile reads outside a matrix is zero, and zero adds nothing.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import HERE, NUMPY, Comparison, Place, compare, main, normal, product, product_bound, wide

import tilelang.language as T


def gemm(m: int, n: int, k: int, trans_a: bool = False, trans_b: bool = False, bm: int = 128, bn: int = 256,
         bk: int = 64, stages: int = 3, threads: int = 256, dtype: str = "float16", acc: str = "float32",
         out: str = "float16"):
    """A: (m, k) or (k, m); B: (k, n) or (n, k) of dtype; C: (m, n) of out; products summed in acc."""
    a_shape, a_tile = ((k, m), (bk, bm)) if trans_a else ((m, k), (bm, bk))
    b_shape, b_tile = ((n, k), (bn, bk)) if trans_b else ((k, n), (bk, bn))

    @T.prim_func
    def program(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As = T.alloc_shared(a_tile, dtype)
            Bs = T.alloc_shared(b_tile, dtype)
            Cf = T.alloc_fragment((bm, bn), acc)
            T.use_swizzle(10)
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                if trans_a:  # a Python condition: decided while the program is traced
                    T.copy(A[ko * bk, by * bm], As)
                else:
                    T.copy(A[by * bm, ko * bk], As)
                if trans_b:
                    T.copy(B[bx * bn, ko * bk], Bs)
                else:
                    T.copy(B[ko * bk, bx * bn], Bs)
                T.gemm(As, Bs, Cf, transpose_A=trans_a, transpose_B=trans_b)
            T.copy(Cf, C[by * bm, bx * bn])

    return program


def persistent(m: int, n: int, k: int, workers: int = 132, bm: int = 128, bn: int = 128, bk: int = 64, stages: int = 3,
               dtype: str = "float16"):
    """As many blocks as processors; each takes every workers-th tile, in groups that share operands."""
    @T.prim_func
    def program(A: T.Tensor((m, k), dtype), B: T.Tensor((k, n), dtype), C: T.Tensor((m, n), dtype)):
        with T.Kernel(workers, threads=256) as worker:
            As = T.alloc_shared((bm, bk), dtype)
            Bs = T.alloc_shared((bk, bn), dtype)
            Cf = T.alloc_fragment((bm, bn), "float32")
            for by, bx in T.Persistent([T.ceildiv(m, bm), T.ceildiv(n, bn)], workers, worker):
                T.clear(Cf)
                for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                    T.copy(A[by * bm, ko * bk], As)
                    T.copy(B[ko * bk, bx * bn], Bs)
                    T.gemm(As, Bs, Cf)
                T.copy(Cf, C[by * bm, bx * bn])

    return program


def batched(batch: int, m: int, n: int, k: int, bm: int = 128, bn: int = 128, bk: int = 64, stages: int = 2,
            dtype: str = "float16"):
    """C[b] = A[b] @ B[b].T for b < batch; the batch is the third dimension of the grid."""
    @T.prim_func
    def program(A: T.Tensor((batch, m, k), dtype), B: T.Tensor((batch, n, k), dtype),
                C: T.Tensor((batch, m, n), dtype)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), batch, threads=128) as (bx, by, b):
            As = T.alloc_shared((bm, bk), dtype)
            Bs = T.alloc_shared((bn, bk), dtype)
            Cf = T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[b, by * bm, ko * bk], As)
                T.copy(B[b, bx * bn, ko * bk], Bs)
                T.gemm(As, Bs, Cf, transpose_B=True)
            T.copy(Cf, C[b, by * bm, bx * bn])

    return program


def strided(A, B, C, bm: int = 64, bn: int = 64, bk: int = 64):
    """C = A @ B where rows lie any distance apart (views of larger matrices): strides are read at the call."""
    M, N, K = T.const("M N K")
    sa, sb, sc = T.dynamic("sa, sb, sc")
    A: T.StridedTensor((M, K), (sa, 1), "float16")
    B: T.StridedTensor((K, N), (sb, 1), "float16")
    C: T.StridedTensor((M, N), (sc, 1), "float32")
    with T.Kernel(T.ceildiv(N, bn), T.ceildiv(M, bm), threads=128) as (bx, by):
        As = T.alloc_shared((bm, bk), "float16")
        Bs = T.alloc_shared((bk, bn), "float16")
        Cf = T.alloc_fragment((bm, bn), "float32")
        T.clear(Cf)
        for ko in T.Pipelined(T.ceildiv(K, bk), num_stages=2):
            T.copy(A[by * bm, ko * bk], As)
            T.copy(B[ko * bk, bx * bn], Bs)
            T.gemm(As, Bs, Cf)
        T.copy(Cf, C[by * bm, bx * bn])


def torch_product(a, b):
    """a @ b by torch: int8 sums in int32, float32 through tf32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    return torch._int_mm(a, b) if a.dtype == torch.int8 else a @ b


def check_gemm(m: int = 4096, n: int = 4096, k: int = 4096, trans_a: bool = False, trans_b: bool = False,
               dtype: str = "float16", on: Place = HERE) -> Comparison:
    """Integer types sum exactly in int32; float32 operands are rounded to tf32 on tensor cores."""
    exact = dtype == "int8"
    acc, out = ("int32", "int32") if exact else ("float32", dtype)
    bk = 128 // np.dtype(NUMPY[dtype]).itemsize  # a row of a tile in shared memory is 128 bytes
    a, b = normal((k, m) if trans_a else (m, k), dtype), normal((n, k) if trans_b else (k, n), dtype, 1)
    kernel = on.compile(gemm(m, n, k, trans_a, trans_b, bk=bk, dtype=dtype, acc=acc, out=out), out_idx=[2])
    got, a, b = kernel(a, b), a.T if trans_a else a, b.T if trans_b else b
    on.peer("a @ b", torch_product, a, b)
    wa, wb = wide(a), wide(b)
    bound = 0.0 if exact else product_bound(wa, wb, dtype, out)
    return compare(f"gemm {'T' if trans_a else 'N'}{'T' if trans_b else 'N'} {dtype}", got, product(wa, wb), bound)


def check_persistent(m: int = 4096, n: int = 4096, k: int = 1024, workers: int = 132, on: Place = HERE) -> Comparison:
    """The same result for any number of workers."""
    a, b = normal((m, k), "float16"), normal((k, n), "float16", 1)
    got = on.compile(persistent(m, n, k, workers), out_idx=[2])(a, b)
    on.peer("a @ b", torch_product, a, b)
    return compare("gemm persistent", got, product(a, b), product_bound(wide(a), wide(b), "float16", "float16"))


def check_batched(batch: int = 64, m: int = 512, n: int = 512, k: int = 128, on: Place = HERE) -> Comparison:
    """Every matrix of the batch within the bound of the worst."""
    a, b = normal((batch, m, k), "float16"), normal((batch, n, k), "float16", 1)
    bt = wide(b).transpose(0, 2, 1)
    bound = product_bound(wide(a), bt, "float16", "float16")
    got = on.compile(batched(batch, m, n, k), out_idx=[2])(a, b)
    on.peer("a @ b", torch_product, a, b.transpose(0, 2, 1))
    return compare("gemm batched", got, product(a, bt), bound)


def check_strided(m: int = 1000, n: int = 1000, k: int = 1000, on: Place = HERE) -> list[Comparison]:
    """Views whose rows are padded; what lies between the rows of C stays as it was."""
    a: Any
    b: Any
    a, b = normal((m, k + 24), "float16")[:, :k], normal((k, n + 40), "float16", 1)[:, :n]
    whole: Any = np.full((m, n + 8), -1, NUMPY["float32"])
    if on.on_gpu:
        import torch

        whole = torch.from_numpy(whole).cuda()
        a, b = (torch.from_numpy(x.base).cuda()[:, :x.shape[1]] for x in (a, b))
    on.jit_raw(strided)(a, b, whole[:, :n])
    if on.on_gpu:
        whole, a, b = whole.cpu().numpy(), a.cpu().numpy(), b.cpu().numpy()
    bound = product_bound(wide(a), wide(b), "float16", "float32")
    return [compare("gemm strided", whole[:, :n], product(a, b), bound),
            compare("gemm strided, padding", whole[:, n:], np.full((m, 8), -1))]


if __name__ == "__main__":
    main(check_gemm, check_persistent, check_batched, check_strided)
