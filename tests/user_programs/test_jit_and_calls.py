"""Eager and lazy jit, outputs, arguments (language.md 2.1, 2.2, 2.5; runtime.md 2-4)."""

import numpy as np
import pytest
from everywhere import call, placed

import tilelang
import tilelang.language as T
from user_harness import SIM, mark

I32, F32, F16 = np.int32, np.float32, np.float16
BACKENDS = [dict(target="cpu", execution_backend="tile"), dict(target=SIM, execution_backend="simulator"), dict(target="cpu")]
EVERY = pytest.mark.parametrize("where", BACKENDS, ids=["tile", "simulator", "cpu"])


def pair(m, n, swap):
    a, b = (3, 2) if swap else (2, 3)

    @T.prim_func
    def f(A: T.Tensor((m, n), "float32"), k: T.int32, S: T.Tensor((m,), "float32"), D: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=32) as b_:
            F = T.alloc_fragment((1, n), "float32")
            s = T.alloc_fragment((1,), "float32")
            T.copy(A[b_, 0], F)
            T.reduce_sum(F, s, dim=1)
            T.copy(s, S[b_:b_ + 1])
            for j in T.Parallel(n):
                D[b_, j] = A[b_, j] * k

    return f, [a, b]


@EVERY
@pytest.mark.parametrize("swap", [False, True])
def test_out_idx_order_is_that_of_the_list(where, swap):
    f, out = pair(3, 5, swap)
    a = np.arange(15, dtype=F32).reshape(3, 5)
    got = tilelang.compile(f, out_idx=out, **where)(a, 4)
    want = {2: a.sum(1), 3: a * 4}
    assert isinstance(got, list) and len(got) == 2
    for g, i in zip(got, out):
        np.testing.assert_allclose(np.asarray(g), want[i])


@pytest.mark.spec("R2.1:compile")
@EVERY
@pytest.mark.parametrize("out, error", [((2,), (ValueError, TypeError)), ("3", (ValueError, TypeError)),
                                        (1.0, (ValueError, TypeError)),
                                        (9, ValueError), ([-1, 3], ValueError), ([1], Exception), ([-5], ValueError)])
def test_bad_out_idx(where, out, error):
    f, _ = pair(3, 5, False)
    with pytest.raises(error):
        tilelang.compile(f, out_idx=out, **where)


@pytest.mark.spec("R4:inputs")
@EVERY
def test_wrong_arguments_at_the_call(where):
    where = placed(where)
    f, _ = pair(3, 5, False)
    k = tilelang.compile(f, **where)
    a, s, d = np.zeros((3, 5), F32), np.zeros(3, F32), np.zeros((3, 5), F32)
    call(where, k, a, 1, s, d)
    call(where, k, a, True, s, d)
    for bad, text in (((a, 1, s), "num_args|inputs|arguments"), ((a.astype(F16), 1, s, d), "input A dtype"),
                      ((a[:2], 1, s, d), r"input A shape\[0\]"),
                      ((a[0], 1, s, d), "input A ndim"), ((a, 1.5, s, d), "integer"), ((a, 2**31, s, d), ""),
                      ((a, -2**31 - 1, s, d), ""),
                      ((np.zeros((5, 3), F32).T, 1, s, d), "strides"), ((None, 1, s, d), "A is expected to have non-NULL"),
                      ((3, 1, s, d), "input A expected pointer or tensor"), ((a, "x", s, d), ""), ((a, a, s, d), ""),
                      (([1, 2], 1, s, d), "")):
        with pytest.raises((RuntimeError, ValueError, TypeError, OverflowError), match=text or None):
            call(where, k, *bad)
    with pytest.raises(TypeError):
        call(where, k, a, 1, S=s, E=d)


def eager(where):
    @tilelang.jit(**where)
    def f(X, Y, block: int = 8, op=None, bias: T.float32 = 0.5):
        M, N = T.const("M N")
        X: T.Tensor((M, N), "float32")
        Y: T.Tensor((N,), "float32")
        O = T.empty((M, N), "float32")
        P = T.empty([M * 2 + 1], "int32")
        with T.Kernel(T.ceildiv(M, block), threads=32) as b:
            for i, j in T.Parallel(block, N):
                v = X[b * block + i, j] + Y[j]
                O[b * block + i, j] = (op(v) if op is not None else v) + bias
        with T.Kernel(1, threads=32):
            for i in T.Parallel(2 * M + 1):
                P[i] = i * M
        return P, O

    return f


@pytest.mark.spec("T.const")
@EVERY
def test_eager_results_and_specialisation(where):
    where = placed(where)
    f = eager(where)
    for m, n in ((3, 4), (17, 5)):
        x, y = np.ones((m, n), F32), np.arange(n, dtype=F32)
        p, o = call(where, f, x, y)
        np.testing.assert_array_equal(np.asarray(p), np.arange(2 * m + 1) * m)
        np.testing.assert_array_equal(np.asarray(o), x + y + 0.5)
        _, o = call(where, f, x, y, block=3, op=lambda v: v * v, bias=1)
        np.testing.assert_array_equal(np.asarray(o), (x + y) ** 2 + 1)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        call(where, f, x)
    with pytest.raises((ValueError, RuntimeError)):
        call(where, f, x, np.zeros(n + 1, F32))
    with pytest.raises((ValueError, RuntimeError)):
        call(where, f, x.astype(F16), y)
    with pytest.raises((ValueError, RuntimeError)):
        call(where, f, x, y, M=m + 1)


@pytest.mark.spec("L6:empty")
@EVERY
def test_eager_zero_rows_and_dynamic_output(where):
    where = placed(where)

    @tilelang.jit(**where)
    def f(X):
        m = T.dynamic("m")
        N = T.const("N")
        X: T.Tensor((m, N), "int32")
        O = T.empty((m + 2,), "int32")
        with T.Kernel(T.ceildiv(m + 2, 4), threads=32) as b:
            for i in T.Parallel(4):
                O[b * 4 + i] = X[b * 4 + i, N - 1] + m
        return O

    for m in (0, 1, 9):
        x = np.arange(m * 3, dtype=I32).reshape(m, 3)
        np.testing.assert_array_equal(np.asarray(call(where, f, x)), np.concatenate([x[:, 2], [0, 0]]) + m)


@EVERY
def test_lazy_same_arguments_same_kernel(where):
    @tilelang.jit(out_idx=-1, **where)
    def make(n, dt="float32"):
        @T.prim_func
        def main(A: T.Tensor((n,), dt), B: T.Tensor((n,), dt)):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(n):
                    B[i] = A[n - 1 - i]
        return main

    assert make(7) is make(n=7) is make(7, "float32") is make(7, T.float32)
    assert make(7) is not make(8)
    np.testing.assert_array_equal(np.asarray(make(7)(np.arange(7, dtype=F32))), np.arange(7)[::-1])
    with pytest.raises(TypeError):
        make(7, size=3)
    with pytest.raises(TypeError):
        make()


@pytest.mark.spec("T.StridedTensor")
@pytest.mark.spec("L5:StridedTensor")
@EVERY
def test_strided_symbolic_linear_and_scalar_symbols(where):
    where = placed(where)
    m, n, s = T.dynamic("m"), T.dynamic("n"), T.dynamic("s")

    @T.prim_func
    def f(A: T.StridedTensor((m, n), (s, 1), "int32"), B: T.Tensor((m + n,), "int32"), C: T.Tensor((2 * m, n), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(m):
                for j in T.Parallel(n):
                    C[2 * i, j] = A[i, j]
                    C[2 * i + 1, j] = B[i + j]

    k = tilelang.compile(f, **where)
    base = np.arange(60, dtype=I32).reshape(5, 12)
    a, b, c = base[:, 2:9], np.arange(12, dtype=I32) * 100, mark((10, 7), I32)
    call(where, k, a, b, c)
    np.testing.assert_array_equal(c[::2], a)
    np.testing.assert_array_equal(c[1::2], b[np.arange(5)[:, None] + np.arange(7)])
    with pytest.raises(RuntimeError, match="shape"):
        call(where, k, a, b[:-1].copy(), c)
    with pytest.raises(RuntimeError, match="shape"):
        call(where, k, a, b, c[:9])


@pytest.mark.spec("T.assume")
@pytest.mark.spec("L2.3:assert")
@EVERY
def test_host_assert_and_assume(where):
    where = placed(where)
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "int32"), k: T.int32):
        assert k < 10, "k is too large"
        T.assume(n % 4 == 0)
        with T.Kernel(T.ceildiv(n, 4), threads=32) as b:
            for i in T.Parallel(4):
                A[b * 4 + i] = k

    g = tilelang.compile(f, **where)
    a = np.zeros(8, I32)
    call(where, g, a, 3)
    assert (a == 3).all()
    with pytest.raises(RuntimeError, match="k is too large"):
        call(where, g, a, 11)
    assert (a == 3).all()
    with pytest.raises(RuntimeError, match="Assume"):
        call(where, g, np.zeros(7, I32), 3)


@EVERY
def test_overlapping_and_same_tensor_arguments(where):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[i] * 2 + 1

    a = np.arange(8, dtype=F32)
    want = a * 2 + 1
    tilelang.compile(f, **where)(a, a)
    np.testing.assert_array_equal(a, want)


@pytest.mark.spec("T.empty")
@pytest.mark.spec("L6:empty")
@EVERY
def test_prim_func_with_returned_outputs(where):
    where = placed(where)

    @T.prim_func
    def f(A: T.Tensor((6,), "float16"), x: T.float32):
        C = T.empty((6,), "float32")
        D = T.empty((3, 2), "float16")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(6):
                C[i] = A[i] * x
                D[i // 2, i % 2] = A[i] + 1
        return D, C

    assert list(f.attrs["tilelang_out_idx"]) == [-1, -2]
    d, c = call(where, tilelang.compile(f, **where), np.arange(6, dtype=F16), 0.25)
    np.testing.assert_array_equal(np.asarray(c), np.arange(6) * 0.25)
    np.testing.assert_array_equal(np.asarray(d), (np.arange(6) + 1).reshape(3, 2))
    with pytest.raises(ValueError, match="conflict"):
        tilelang.compile(f, out_idx=[0], **where)


@pytest.mark.spec("must:6-empty-returned")
@pytest.mark.spec("L2.1:prim_func")
def test_definition_errors_name_what_is_wrong():
    with pytest.raises(Exception, match="T.empty"):
        @T.prim_func
        def f1(A: T.Tensor((4,), "int32")):
            with T.Kernel(1):
                A[0] = 1
            return A
    with pytest.raises(RuntimeError, match="Not all tensor"):
        @T.prim_func
        def f2(A: T.Tensor((4,), "int32")):
            B = T.empty((4,), "int32")
            with T.Kernel(1):
                B[0] = A[0]
    with pytest.raises(Exception, match="not annotated|x"):
        @T.prim_func
        def f3(A: T.Tensor((4,), "int32"), x):
            with T.Kernel(1):
                A[0] = x
    with pytest.raises(IndexError, match="2-dimensional"):
        @T.prim_func
        def f4(A: T.Tensor((4, 4), "int32")):
            with T.Kernel(1):
                A[0, 0] = A[1]
    with pytest.raises(Exception, match="threads"):
        @T.prim_func
        def f5(A: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=2048):
                A[0] = 1
        tilelang.compile(f5, target=SIM, execution_backend="simulator")
    with pytest.raises(RuntimeError, match="integer division"):
        @T.prim_func
        def f6(A: T.Tensor((4,), "int32")):
            with T.Kernel(1, threads=1):
                A[0] = A[1] / A[2]


@pytest.mark.spec("T.cast")
@pytest.mark.spec("L4.1:promotion")
@EVERY
def test_promotion_of_literals(where):
    where = placed(where)

    @T.prim_func
    def f(H: T.Tensor((1,), "float16"), B: T.Tensor((1,), "uint8"), L: T.Tensor((1,), "int64"), O: T.Tensor((8,), "float64")):
        with T.Kernel(1, threads=1):
            O[0] = H[0] + 1          # half: 2048 + 1 is 2048
            O[1] = H[0] + 1.0        # float32: 2049
            O[2] = B[0] + 1          # int32: 256
            O[3] = B[0] + B[0]       # uint8: 254
            O[4] = L[0] + 2**31
            O[5] = T.cast(H[0] * 40, "float16")  # overflows to infinity
            O[6] = T.cast(-7.9, "int32")
            O[7] = T.cast(B[0], "int8")

    o = mark(8, np.float64)
    call(where, tilelang.compile(f, **where), np.array([2048], F16), np.array([255], np.uint8), np.array([5], np.int64), o)
    np.testing.assert_array_equal(o, [2048, 2049, 256, 254, 5 + 2**31, np.inf, -7, -1])
