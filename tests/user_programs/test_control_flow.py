"""Control flow of kernels, macros, variables (language.md 2.3, 2.4, 6, 8)."""

import numpy as np
import pytest
from user_harness import agree, mark, refused

import tilelang.language as T

RNG = np.random.default_rng(7)
I32 = np.int32


def ints(*shape, low=-9, high=9, dtype=I32):
    return RNG.integers(low, high, shape).astype(dtype)


@pytest.mark.spec("T.serial")
@pytest.mark.spec("L2.3:break-continue", "L8:python-control")
def test_loops_break_continue_while():
    n = 6

    @T.prim_func
    def f(A: T.Tensor((n, 10), "int32"), O: T.Tensor((n, 4), "int32")):
        with T.Kernel(n, threads=1) as b:
            s = T.alloc_var("int32")
            c = T.alloc_var("int32", init=0)
            w = T.alloc_var("int32", init=1)
            d = T.alloc_var("int32", 5)
            for i in range(10):
                if A[b, i] < -5:
                    break
                if A[b, i] % 2 == 0:
                    continue
                s = s + A[b, i]
                c += 1
            while w < 100 and c < 20:
                w = w * 3
                if w > 50:
                    break
                c += 1
            for i in range(9, -1, -3):
                for j in T.serial(i):
                    if j == 2:
                        continue
                    if j > 4:
                        break
                    d = d * 2 - j + i
            O[b, 0] = s
            O[b, 1] = c
            O[b, 2] = w
            O[b, 3] = d

    a = ints(n, 10)
    want = np.zeros((n, 4), I32)
    for b in range(n):
        s, c, w, d = 0, 0, 1, 5
        for i in range(10):
            if a[b, i] < -5:
                break
            if a[b, i] % 2 == 0:
                continue
            s += a[b, i]
            c += 1
        while w < 100 and c < 20:
            w *= 3
            if w > 50:
                break
            c += 1
        for i in range(9, -1, -3):
            for j in range(i):
                if j == 2:
                    continue
                if j > 4:
                    break
                d = d * 2 - j + i
        want[b] = s, c, w, d
    agree(f, [a, mark((n, 4), I32)], {1: want})


@pytest.mark.spec("T.alloc_var")
@pytest.mark.spec("L2.3:range")
def test_range_bounds_are_read_once():
    @T.prim_func
    def f(O: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=1):
            n = T.alloc_var("int32", init=4)
            c = T.alloc_var("int32", init=0)
            for i in range(n):
                n = 2
                c += i
            O[0] = c
            O[1] = n
            for i in range(1, n + 3, n):
                n = n + 1
                c += 10 * i
            O[2] = c

    agree(f, [mark(3, I32)], {0: [6, 2, 6 + 10 + 30]})


@pytest.mark.spec("L2.3:range")
@pytest.mark.parametrize("step", [3, -2])
def test_run_time_step_equals_python_or_is_refused(step):
    @T.prim_func
    def f(s: T.int32, a: T.int32, b: T.int32, O: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=1):
            c = T.alloc_var("int32", init=0)
            for i in range(a, b, s):
                c = c * 7 + i
            O[0] = c

    a, b = (1, 9) if step > 0 else (9, 1)
    c = 0
    for i in range(a, b, step):
        c = c * 7 + i
    agree(f, [step, a, b, mark(1, I32)], {3: [c]})


@pytest.mark.spec("L4.2:operators")
def test_floor_division_and_modulo_of_negative():
    n = 40

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "int32"), O: T.Tensor((4, n), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[0, i] = A[i] // B[i]
                O[1, i] = A[i] % B[i]
                O[2, i] = T.truncdiv(A[i], B[i])
                O[3, i] = T.truncmod(A[i], B[i]) + (A[i] // 4) * 0 + (A[i] % 8) * 0

    a = ints(n, low=-50, high=50)
    b = ints(n, low=1, high=9) * np.where(RNG.random(n) < 0.5, 1, -1).astype(I32)
    q = np.trunc(a / b).astype(I32)
    agree(f, [a, b, mark((4, n), I32)], {2: np.stack([a // b, a % b, q, a - q * b])})


def test_shifts_and_bits():
    n = 33

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "uint8"), O: T.Tensor((4, n), "int32"), P: T.Tensor((3, n), "uint8")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[0, i] = A[i] >> 2
                O[1, i] = (A[i] << 3) ^ A[i]
                O[2, i] = ~A[i] & 255 | 1
                O[3, i] = T.popcount(A[i] & 0xFFFF)
                P[0, i] = B[i] >> T.uint8(1)
                P[1, i] = B[i] + B[i]
                P[2, i] = B[i] + 250

    a, b = ints(n, low=-1000, high=1000), ints(n, low=0, high=255, dtype=np.uint8)
    pop = np.array([bin(x & 0xFFFF).count("1") for x in a])
    agree(f, [a, b, mark((4, n), I32), mark((3, n), np.uint8)],
          {2: np.stack([a >> 2, (a << 3) ^ a, ~a & 255 | 1, pop]), 3: np.stack([b >> 1, b + b, b + np.uint8(250)])})


@T.macro
def fib(acc: T.Ref, n):
    if n > 0:
        acc = acc * 2 + n
        fib(acc, n - 1)


@T.macro
def swap_at(x: T.Ref, y: T.Ref):
    x, y = y, x


@T.macro
def tail(A, b, *rest, scale=2, **more):
    return A[b] * scale + rest[0] - more["off"]


@pytest.mark.spec("L2.4:macro")
def test_macros_recursion_ref_varargs():
    n = 5

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n, 4), "int32")):
        with T.Kernel(n, threads=1) as b:
            v = T.alloc_var("int32", init=1)
            fib(v, 3)
            O[b, 0] = v
            O[b, 1] = A[b]
            O[b, 2] = b
            swap_at(O[b, 1], O[b, 2])
            O[b, 3] = tail(A, b, 7, off=b, scale=3)

    a = ints(n)
    want = np.stack([np.full(n, ((1 * 2 + 3) * 2 + 2) * 2 + 1), np.arange(n), a, a * 3 + 7 - np.arange(n)], 1)
    agree(f, [a, mark((n, 4), I32)], {1: want})


@pytest.mark.spec("T.Ref", "T.macro")
@pytest.mark.spec("L2.4:macro")
def test_macro_argument_by_value_and_ref_index_once():
    @T.macro
    def bump(x: T.Ref, i: T.Ref):
        i = i + 1
        x = x + 100

    @T.macro
    def by_value(v, result: T.Ref):
        result = v * 2  # noqa: F841 - stores through

    @T.prim_func
    def f(O: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=1):
            i = T.alloc_var("int32", init=1)
            v = T.alloc_var("int32", init=5)
            for k in range(4):
                O[k] = k
            bump(O[i], i)
            by_value(v + i, v)
            O[0] = v

    agree(f, [mark(4, I32)], {0: [14, 101, 2, 3]})


@pytest.mark.spec("T.Select", "T.if_then_else")
@pytest.mark.spec("L2.3:if")
def test_conditions_of_integers_and_selects():
    n = 37

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), B: T.Tensor((n,), "float32"), O: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 16), threads=32) as b:
            for i in T.Parallel(16):
                k = b * 16 + i
                if A[k]:
                    O[k] = T.if_then_else(A[k] > 0 and B[k] > 0, B[k], -B[k]) if not (A[k] == 3 or B[k] < -1) else 9.0
                else:
                    O[k] = T.Select(B[k] > 0, B[k] * 2, B[k])

    a, b = ints(n, low=-2, high=5), RNG.standard_normal(n).astype(np.float32)
    inner = np.where((a == 3) | (b < -1), 9, np.where((a > 0) & (b > 0), b, -b))
    agree(f, [a, b, mark(n, np.float32)], {2: np.where(a != 0, inner, np.where(b > 0, b * 2, b)).astype(np.float32)})


@pytest.mark.spec("L2.3:negative-index")
def test_negative_constant_indices_and_provably_negative():
    @T.prim_func
    def f(A: T.Tensor((7, 9), "int32"), O: T.Tensor((7, 9), "int32")):
        with T.Kernel(1, threads=16):
            for i in T.Parallel(3):
                O[-1, i - 3] = A[-2, i - 4]
                O[0, i] = A[i - 3, -1]
            T.copy(A[-1, 0:9], O[-3, 0:9])

    a = ints(7, 9)
    want = mark((7, 9), I32)
    want[-1, 6:9] = a[-2, 5:8]
    want[0, 0:3] = a[4:7, -1]
    want[4] = a[-1]
    agree(f, [a, mark((7, 9), I32)], {1: want})


@pytest.mark.spec("T.Parallel")
@pytest.mark.spec("L2.3:negative-index")
def test_mixed_sign_index_is_guarded_not_wrapped():
    n = 20

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32"), P: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                O[i] = A[i - 5]
                P[i - 5] = A[i]

    a = ints(n)
    o, p = np.zeros(n, I32), mark(n, I32)
    o[5:] = a[:-5]
    p[: n - 5] = a[5:]
    agree(f, [a, mark(n, I32), mark(n, I32)], {1: o, 2: p})


def test_negative_whatever_the_loops_counts_from_the_end():
    """Also through a binding, a block index, and in shared memory and fragments."""
    @T.prim_func
    def f(A: T.Tensor((10,), "int32"), O: T.Tensor((3, 10), "int32")):
        with T.Kernel(3, threads=16) as b:
            S = T.alloc_shared((10,), "int32")
            T.copy(A, S)
            back = b - 3
            for i in T.Parallel(4):
                O[back, -1 - i] = S[i - 4] + S[back]

    a = ints(10)
    want = mark((3, 10), I32)
    for b in range(3):
        for i in range(4):
            want[b, 9 - i] = a[6 + i] + a[7 + b]
    agree(f, [a, mark((3, 10), I32)], {1: want})


@pytest.mark.spec("L2.3:swap")
def test_swap_of_elements_is_two_phase():
    n = 18

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=8):
            S = T.alloc_shared((n,), "int32")
            T.copy(A, S)
            for i in T.Parallel(n // 2):
                S[2 * i], S[2 * i + 1] = S[2 * i + 1], S[2 * i]
            T.copy(S, O)

    a = ints(n)
    agree(f, [a, mark(n, I32)], {1: a.reshape(-1, 2)[:, ::-1].reshape(-1)})


@pytest.mark.spec("L8:Parallel")
def test_parallel_with_inner_loops_if_and_continue():
    n, m = 21, 6

    @T.prim_func
    def f(A: T.Tensor((n, m), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                s = T.alloc_var("int32", init=0)
                for j in T.serial(m):
                    if A[i, j] < 0:
                        continue
                    if A[i, j] == 5:
                        break
                    s = s + A[i, j]
                O[i] = s

    a = ints(n, m)
    want = np.zeros(n, I32)
    for i in range(n):
        for x in a[i]:
            if x < 0:
                continue
            if x == 5:
                break
            want[i] += x
    agree(f, [a, mark(n, I32)], {1: want})


@pytest.mark.spec("L8:Parallel")
def test_outer_variable_accumulated_over_parallel_is_refused():
    def build():
        @T.prim_func
        def f(A: T.Tensor((64,), "int32"), O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=32):
                v = T.alloc_var("int32", init=0)
                for i in T.Parallel(64):
                    v = v + A[i]
                O[0] = v
        return f

    refused(build, "(?i)parallel")


@pytest.mark.spec("L8:Parallel")
def test_break_of_parallel_is_refused():
    def build():
        @T.prim_func
        def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(64):
                    if A[i] > 3:
                        break
                    O[i] = A[i]
        return f

    refused(build, "(?i)break")


@pytest.mark.spec("L2.3:rebind-constant")
def test_rebound_constant_read_after_loop_is_refused():
    def build():
        @T.prim_func
        def f(A: T.Tensor((4,), "int32"), O: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=1):
                x = 0
                for _i in T.serial(4):
                    x = x + 1
                O[0] = x
        return f

    refused(build, "alloc_var")


@pytest.mark.spec("L2.3:return")
def test_thread_return_and_guarded_threads():
    @T.prim_func
    def f(O: T.Tensor((2, 40), "int32")):
        with T.Kernel(2, threads=40) as b:
            tx = T.get_thread_binding()
            O[b, tx] = tx
            if tx % 3 == b:
                T.thread_return()
            O[b, tx] = tx * 100 + b

    t = np.arange(40)
    want = np.stack([np.where(t % 3 == b, t, t * 100 + b) for b in (0, 1)])
    agree(f, [mark((2, 40), I32)], {0: want})


@pytest.mark.spec("L15:automatic-sync")
def test_divergent_shared_exchange():
    @T.prim_func
    def f(A: T.Tensor((32,), "int32"), O: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            S = T.alloc_shared((32,), "int32")
            if tx < 32:
                S[tx] = A[tx]
                y = S[31 - tx]
                O[tx] = y * 2

    a = ints(32)
    agree(f, [a, mark(32, I32)], {1: a[::-1] * 2})


def test_serial_ping_pong_through_shared():
    n, steps = 50, 5

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=32):
            S = T.alloc_shared((n,), "int32")
            R = T.alloc_fragment((n,), "int32")
            k = T.alloc_var("int32", init=0)
            T.copy(A, S)
            while k < steps:
                for i in T.Parallel(n):
                    R[i] = S[(i + 1) % n] + S[(i + n - 1) % n]
                T.copy(R, S)
                k += 1
            T.copy(S, O)

    a = ints(n)
    want = a.copy()
    for _ in range(steps):
        want = np.roll(want, -1) + np.roll(want, 1)
    agree(f, [a, mark(n, I32)], {1: want})


@pytest.mark.spec("L7:Kernel")
def test_three_dimensional_threads():
    @T.prim_func
    def f(O: T.Tensor((2, 3, 4, 5), "int32")):
        with T.Kernel(2, threads=(5, 4, 3)) as b:
            tx, ty, tz = T.get_thread_bindings()
            O[b, tz, ty, tx] = tx + 10 * ty + 100 * tz + 1000 * b

    z, y, x = np.meshgrid(range(3), range(4), range(5), indexing="ij")
    agree(f, [mark((2, 3, 4, 5), I32)], {0: np.stack([x + 10 * y + 100 * z + 1000 * b for b in (0, 1)])},
          on=("tile", "simulator"))


@pytest.mark.spec("T.Persistent")
@pytest.mark.spec("L8:Persistent")
def test_persistent_visits_every_tile_once():
    @T.prim_func
    def f(O: T.Tensor((5, 7), "int32")):
        with T.Kernel(4, threads=1) as w:
            for i, j in T.Persistent([5, 7], 4, w, group_size=3):
                O[i, j] = O[i, j] + 1

    agree(f, [np.zeros((5, 7), I32)], {0: np.ones((5, 7))})


@pytest.mark.spec("L7:several", "M:two-kernels")
def test_several_kernels_in_one_function_and_host_loop():
    n = 30

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), O: T.Tensor((n,), "int32")):
        with T.Kernel(2, threads=32) as b:
            for i in T.Parallel(16):
                O[b * 16 + i] = A[b * 16 + i] * 2
        for r in range(3):
            with T.Kernel(1, threads=32):
                S = T.alloc_shared((n,), "int32")
                T.copy(O, S)
                for i in T.Parallel(n):
                    O[i] = S[n - 1 - i] + r

    a = ints(n)
    want = a * 2
    for r in range(3):
        want = want[::-1] + r
    agree(f, [a, mark(n, I32)], {1: want})


def test_host_branch_on_scalar():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), k: T.int32, O: T.Tensor((n,), "int32")):
        if k > 2:
            with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
                for i in T.Parallel(32):
                    O[b * 32 + i] = A[b * 32 + i] + k
        else:
            with T.Kernel(T.ceildiv(n, 16), threads=32) as b:
                for i in T.Parallel(16):
                    O[b * 16 + i] = A[b * 16 + i] - k

    for size in (0, 1, 37):
        a = ints(size)
        agree(f, [a, 5, mark(size, I32)], {2: a + 5})
        agree(f, [a, 1, mark(size, I32)], {2: a - 1})
