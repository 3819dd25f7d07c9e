"""`break` and `continue` of loops inside T.Parallel and T.vectorized leave them for one element, not for its vector."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T

A64 = np.arange(64, dtype=np.int32) * 3 + 1


def root(x):
    return max(k for k in range(10) if all(q * q <= x for q in range(k + 1)))


def left(form):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=16):
            tx = T.get_thread_binding()
            if form == "break":
                for i in T.Parallel(64):
                    for k in T.serial(10):
                        if k * k > A[i]:
                            break
                        O[i] = k
            elif form == "continue":
                for i in T.Parallel(64):
                    for k in T.unroll(5):
                        if k % 2 == 0:
                            continue
                        O[i] += A[i] * k
            elif form == "nested":
                for i in T.Parallel(64):
                    for k in T.serial(3):
                        for m in T.serial(4):
                            if k * m > A[i] % 5:
                                break
                            O[i] += 1
                        O[i] += 10
            else:
                for v in T.vectorized(4):
                    if form == "vectorized break":
                        if A[tx * 4 + v] % 2 == 0:
                            break
                    else:
                        if A[tx * 4 + v] % 2 == 0:
                            continue
                    O[tx * 4 + v] = A[tx * 4 + v]

    return f


WANT = {
    "break": [root(x) for x in A64],
    "continue": A64 * 4,
    "nested": [30 + sum(all(k * q <= x % 5 for q in range(m + 1)) for k in range(3) for m in range(4)) for x in A64],
    "vectorized break": [x if all(y % 2 for y in A64[i // 4 * 4:i + 1]) else 0 for i, x in enumerate(A64)],
    "vectorized continue": np.where(A64 % 2, A64, 0),
}


@pytest.mark.parametrize("form", WANT)
def test_a_loop_inside_is_left_by_single_elements(form):
    """On GPUs all elements of a vector left it with the first that did, `continue` was lost, and what a vectorized loop had
    left out was stored all the same."""
    assert everywhere(left(form), A64, on=WITH_HOPPER)[1].tolist() == np.asarray(WANT[form]).tolist()
