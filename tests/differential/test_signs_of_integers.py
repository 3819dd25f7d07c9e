"""Programs that turn signs of integers by themselves: the least number of a type is its own negative, everywhere."""

import numpy as np
import pytest
from backends import HERE, agree

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.target import Target
from tilelang.transform.pipeline import lower

N = 32


@T.prim_func
def chosen(A: T.Tensor((N,), "int32"), D: T.Tensor((N,), "int32"), L: T.Tensor((N,), "int64"), O: T.Tensor((10, N), "int64")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            O[0, i] = T.truncmod(T.if_then_else(A[i] < 0, -A[i], A[i]), 1000)
            O[1, i] = T.Select(A[i] > -1, A[i], ~A[i] + 1) // D[i]
            O[2, i] = T.max(A[i], 0 - A[i]) >> 3
            u = T.cast(A[i], "uint32")
            O[3, i] = T.cast(T.if_then_else(A[i] < 0, T.uint32(0) - u, u), "int32") % D[i]
            O[4, i] = T.if_then_else(A[i] - D[i] < 0, D[i] - A[i], A[i] - D[i]) % 1000
            s = A[i] >> 31
            O[5, i] = T.truncdiv((A[i] ^ s) - s, D[i])
            O[6, i] = ((A[i] + s) ^ s) % 1000
            O[7, i] = T.cast(T.if_then_else(A[i] < 0, A[i] * -1, A[i]) > -5, "int64")
            O[8, i] = T.if_then_else(L[i] < 0, -L[i], L[i]) % 1000
            O[9, i] = (T.cast(A[i] >> 16, "int16") // T.int16(-1)) >> 3


@T.prim_func
def assigned(A: T.Tensor((N,), "int32"), D: T.Tensor((N,), "int32"), L: T.Tensor((N,), "int64"), O: T.Tensor((10, N), "int64")):
    with T.Kernel(1, threads=32):
        F = T.alloc_fragment((N,), "int64")
        for i in T.Parallel(N):
            x = T.alloc_var("int32")
            x = A[i]
            if x < 0:
                x = -x
            O[0, i] = T.truncmod(x, 1000)
            F[i] = L[i]
        for i in T.Parallel(N):
            if F[i] < 0:
                F[i] = F[i] * T.int64(-1)
        for i in T.Parallel(N):
            O[8, i] = F[i] % 1000


@T.prim_func
def vectors(A: T.Tensor((4 * N,), "int32"), O: T.Tensor((4 * N,), "int32")):
    with T.Kernel(1, threads=32):
        S, R = T.alloc_shared((4 * N,), "int32"), T.alloc_shared((4 * N,), "int32")
        T.copy(A, S)
        for i in T.Parallel(4 * N):
            R[i] = T.if_then_else(S[i] < 0, 0 - S[i], S[i])
        for i in T.Parallel(4 * N):
            O[i] = R[i] // 1000


def numbers():
    i = np.arange(N)
    a = np.where(i % 2, -2**31, 37 * i - 600).astype(np.int32)
    d = np.where(i % 3, 7, -1000 - i).astype(np.int32)
    return a, d, np.where(i % 2, -2**63, 37 * i - 600)


def size(x):
    with np.errstate(over="ignore"):
        return np.abs(x)


def expected(rows):
    """What `chosen` and `assigned` leave in O."""
    a, d, long = numbers()
    o, x = np.zeros((10, N), np.int64), size(a)
    with np.errstate(over="ignore"):
        o[0], o[1], o[2], o[3] = np.fmod(x, 1000), x // d, x >> 3, x % d
        o[4], o[5], o[6], o[7], o[8] = size(a - d) % 1000, np.trunc(x / d), x % 1000, x > -5, size(long) % 1000
        o[9] = -(a >> 16).astype(np.int16) >> 3
    o[[k for k in range(10) if k not in rows]] = 0
    return o


def check(on):
    for f, rows in ((chosen, range(10)), (assigned, (0, 8))):
        agree(f, [*numbers(), np.zeros((10, N), np.int64)], {3: expected(rows)}, on)
    a = np.repeat(numbers()[0], 4)
    agree(vectors, [a, np.zeros(4 * N, np.int32)], {1: size(a) // 1000}, on)


def test_the_least_number_chosen_by_a_sign_stays_negative():
    check(HERE)


@pytest.mark.gpu
def test_gpu_divides_the_least_number_chosen_by_a_sign_as_negative():
    """LLVM made abs.s32 of it, whose result ptxas 13.0 takes to be positive."""
    check(("cuda",))


@pytest.mark.parametrize("f", [chosen, assigned, vectors], ids=["chosen", "assigned", "vectors"])
def test_no_absolute_value_is_put_together_of_a_programs_own_signs(f):
    if not nvrtc.available():
        pytest.skip("no NVRTC")
    text = print_kernel(lower(f.func, Target({"kind": "cuda", "arch": "sm_90a"})).kernels[0])
    ptx = nvrtc.compile_ptx(text, "sm_90a")
    assert not [word for word in ("abs.s16", "abs.s32", "abs.s64", "neg.s16") if word in ptx]
