"""Vector addition: the smallest kernel, with a ragged end and a size known only at the call.

A block owns `block` neighbouring elements.  T.Parallel says that its iterations are independent: the compiler deals
them out to the threads and widens the loads and stores.  Nothing is written about the end of the vector: accesses of
global memory outside a tensor read zero and store nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def add(A, B, block: int = 1024):
    """A + B of two vectors of one type.  N is read from the arguments: one kernel is compiled for each N."""
    N = T.const("N")
    A: T.Tensor((N,), "float16")
    B: T.Tensor((N,), "float16")
    C = T.empty((N,), "float16")
    with T.Kernel(T.ceildiv(N, block), threads=128) as bx:
        for i in T.Parallel(block):
            C[bx * block + i] = A[bx * block + i] + B[bx * block + i]
    return C


def add_any(dtype: str = "float32", block: int = 1024):
    """The same with a run-time size: one kernel for all lengths, the empty vector included."""
    n = T.dynamic("n")

    @T.prim_func
    def program(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype), C: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
            for i in T.Parallel(block):
                C[bx * block + i] = A[bx * block + i] + B[bx * block + i]

    return program


def check_add(n: int = 2**24 + 3, on: Place = HERE) -> Comparison:
    """One rounding of the exact sum."""
    a, b = normal(n, "float16"), normal(n, "float16", seed=1)
    want = wide(a) + wide(b)
    got = on.jit(add)(a, b)
    on.work(nbytes=3 * a.nbytes)
    on.peer("a + b", lambda a, b: a + b, a, b)
    return compare("add", got, want, EPS["float16"] * abs(want))


def check_add_any(n: int = 2**24 + 3, dtype: str = "float32", on: Place = HERE) -> Comparison:
    """Lengths n, 1 and 0 with one kernel."""
    kernel = on.compile(add_any(dtype), out_idx=[2])
    result = None
    for length in (0, 1, n):
        a, b = normal(length, dtype), normal(length, dtype, seed=1)
        want = wide(a) + wide(b)
        result = compare(f"add_any {dtype}", kernel(a, b), want, EPS[dtype] * abs(want))
        if not result.ok:
            break
    on.work(nbytes=3 * a.nbytes)
    on.peer("a + b", lambda a, b: a + b, a, b)
    return result


if __name__ == "__main__":
    main(check_add, check_add_any)
