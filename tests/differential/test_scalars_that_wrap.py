"""Scalars of a call that are numbers and not sizes: their arithmetic wraps at 32 bits on every execution."""

import numpy as np
import pytest
from backends import HERE, _execute

import tilelang.language as T
from tilelang.arith import value_scalars
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.target import Target
from tilelang.transform.pipeline import lower

N, ROWS = 32, 8
TOP = 2**31 - 1


@T.prim_func
def numbers(s: T.int32, A: T.Tensor((128,), "int32"), O: T.Tensor((ROWS, N), "int32")):
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            O[0, i] = (s * 31 + i) % 7
            O[1, i] = (s + 4) // 2
            x = (s * 2) // 12
            O[2, i] = x
            if (s + i) % 5 < 2:
                O[3, i] = T.if_then_else(s + 5 > s, i, -s)
            O[4, i] = A[(s * 5 + i) % 100]
            O[5, i] = (s - 64 + i) * 7 % 7
            O[6, i] = T.max(-s, s) // 10
            T.atomic_add(O[7, i], (s * 3 + i) % 9)


def expected(s, a):
    i, o = np.arange(N, dtype=np.int32), np.zeros((ROWS, N), np.int32)
    with np.errstate(over="ignore"):
        s = np.int32(s)
        o[0], o[1], o[2], o[4] = (s * 31 + i) % 7, (s + np.int32(4)) // 2, (s * 2) // 12, a[(s * 5 + i) % 100]
        o[3] = np.where((s + i) % 5 < 2, i if s + np.int32(5) > s else -s, 0)
        o[5], o[6], o[7] = (s - np.int32(64) + i) * np.int32(7) % 7, max(-s, s) // 10, (s * 3 + i) % 9
    return o


def check(on):
    a = np.arange(128, dtype=np.int32) * 3
    tensors = [("s", (), "int32", 0, 0, {"scalar": True}), ("A", (128,), "int32"), ("O", (ROWS, N), "int32")]
    for s in (TOP, TOP - 3, -TOP - 1, -TOP + 5, 2**30 + 7, 5):
        for name in on:
            args = [np.array(s), a, np.zeros((ROWS, N), np.int32)]
            got = _execute(name, numbers.func, numbers, args, tensors, {}, [False])[2]
            np.testing.assert_array_equal(got, expected(s, a), f"{name}, s = {s}")


def test_arithmetic_of_scalars_wraps_everywhere():
    """The device took seed * 31 + i as a sum that fits: its remainder by 7 was that of 3 * seed + i."""
    check(HERE)


@pytest.mark.gpu
def test_gpu_wraps_arithmetic_of_scalars():
    check(("cuda",))


def test_text_leaves_no_overflow_of_scalars_to_c():
    text = print_kernel(lower(numbers.func, Target({"kind": "cuda", "arch": "sm_90a"})).kernels[0])
    for part in ("(unsigned)s * (unsigned)31", "(unsigned)s + (unsigned)4", "(unsigned)s * (unsigned)5"):
        assert part in text, text


def test_sizes_and_places_are_taken_not_to_wrap():
    """Else no address could be made of run-time sizes without a remainder of its own."""
    @T.prim_func
    def f(n: T.int32, start: T.int32, steps: T.int32, seed: T.int32, A: T.Tensor((4096,), "int32")):
        with T.Kernel(T.ceildiv(n, 64), threads=64) as b:
            first = start * 2
            for k in range(steps):
                for i in T.Parallel(64):
                    A[b * 64 + i + first + k] = (seed + n + start + steps) % 7

    assert [v.name for v in value_scalars(f.func.body, f.func.params)] == ["seed"]
