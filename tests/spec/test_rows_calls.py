"""Rows of runtime 4: what each check of a call says; and reductions by their own names."""

import re

import numpy as np
import pytest
from everywhere import EXECUTIONS, SM80, call, cuda_text, placed, run

import tilelang
import tilelang.language as T
from tilelang.ir import numpy_dtype


def program():
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m, 16), "float16"), B: T.StridedTensor((m, 8), (16, 1), "float32"), n: T.int32, x: T.float32,
             c: T.bool):
        with T.Kernel(1, threads=32):
            if c:
                for i, j in T.Parallel(m, 8):
                    B[i, j] = A[i, j] * x + n

    return main


def arguments(**other):
    a, b = np.ones((4, 16), np.float16), np.zeros((4, 16), np.float32)[:, :8]
    return list({"a": a, "b": b, "n": 3, "x": 2.0, "c": True, **other}.values())


ABI = "violates packed ABI constraint"
ROWS = [
    ("R4:inputs", lambda: arguments()[:3], r"num_args should be 5|expected 5 inputs"),
    ("R4:non-tensor", lambda: arguments(a=3), "kernel main input A expected pointer or tensor handle"),
    ("R4:none", lambda: arguments(a=None), r"main\.A is expected to have non-NULL pointer"),
    ("R4:rank", lambda: arguments(a=np.ones(16, np.float16)), "kernel main input A ndim mismatch, expected 2"),
    ("R4:dtype", lambda: arguments(a=np.ones((4, 16), np.float32)), "kernel main input A dtype mismatch, expected float16"),
    ("R4:shape", lambda: arguments(a=np.ones((4, 15), np.float16)), rf"kernel main input A shape\[1\] {ABI}"),
    ("R4:shape", lambda: arguments(a=np.ones((5, 16), np.float16)), rf"shape\[0\] {ABI}"),
    ("R4:strides", lambda: arguments(b=np.zeros((4, 8), np.float32)), rf"kernel main input B strides\[0\] {ABI}"),
    ("R4:strides", lambda: arguments(a=np.ones((4, 32), np.float16)[:, ::2]),
     r"main\.A\.strides: expected to be compact array"),
    ("R4:scalar", lambda: arguments(n=1.5), "kernel main scalar n expected integer"),
    ("R4:scalar", lambda: arguments(x="2"), "kernel main scalar x expected float"),
    ("R4:scalar", lambda: arguments(c="yes"), "kernel main scalar c expected boolean"),
]


@pytest.mark.spec("R4:inputs", "R4:non-tensor", "R4:none", "R4:rank", "R4:dtype", "R4:shape", "R4:strides", "R4:scalar")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("row,build,words", ROWS, ids=[f"{r[0][3:]}{k}" for k, r in enumerate(ROWS)])
def test_calls_that_do_not_fit_say_so(row, build, words, on):
    where = placed(on)
    kernel = tilelang.compile(program(), **where)
    good = arguments()
    call(where, kernel, *good)
    assert (good[1] == 5).all()
    with pytest.raises((RuntimeError, ValueError, TypeError)) as e:
        call(where, kernel, *build())
    assert re.search(words, str(e.value)), str(e.value)


@pytest.mark.spec("R4:symbol-in-none")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_symbol_that_only_missing_tensors_have_is_asked_for(on):
    m = T.dynamic("m")

    @T.prim_func
    def main(A: T.Tensor((m,), "float32"), B: T.Tensor((m,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = T.cast(m, "float32")

    where = placed(on)
    kernel, y = tilelang.compile(main, **where), np.zeros(4, np.float32)
    call(where, kernel, None, np.zeros(7, np.float32), y)
    assert (y == 7).all()
    with pytest.raises(RuntimeError, match="Symbolic shape variable m requires at least one non-null buffer among: .*A.*B"):
        call(where, kernel, None, None, y)


@pytest.mark.spec("R4:assume", "R4:host-assert")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_conditions_of_the_host_are_checked_before_anything_runs(on):
    n = T.dynamic("n")

    @T.prim_func
    def main(Y: T.Tensor((n,), "int32"), k: T.int32):
        assert k < 10, "k must be small"
        T.assume(n % 4 == 0)
        with T.Kernel(1, threads=4):
            Y[T.get_thread_binding()] = k

    where = placed(on)
    kernel, y = tilelang.compile(main, **where), np.zeros(4, np.int32)
    call(where, kernel, y, 3)
    assert (y == 3).all()
    with pytest.raises(RuntimeError, match="k must be small"):
        call(where, kernel, y, 10)
    with pytest.raises(RuntimeError, match="Assume: "):
        call(where, kernel, np.zeros(6, np.int32), 5)
    assert (y == 3).all()


SMALL_FLOATS = {"float16": 1.2998046875, "bfloat16": 1.296875, "float8_e4m3fn": 1.25, "float8_e5m2": 1.25}  # nearest to 1.3


def scaled(dt):
    """y = x * s, and s as it arrived, for a scalar of a small type."""
    @T.prim_func
    def f(s: T.dtype(dt), X: T.Tensor((8,), dt), Y: T.Tensor((8,), "float32"), Z: T.Tensor((8,), dt)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[i] = T.cast(s, "float32") * T.cast(X[i], "float32")
                Z[i] = s

    return f


@pytest.mark.spec("R4:scalar")
@pytest.mark.parametrize("dt", SMALL_FLOATS)
def test_scalars_of_small_types_are_rounded_once(dt):
    x = np.arange(8).astype(np.float32).astype(numpy_dtype(dt))
    for on in EXECUTIONS:
        y, z = run(scaled(dt), 1.3, x, on=on)[1:]
        assert np.array_equal(y, SMALL_FLOATS[dt] * np.arange(8)) and (z.astype(np.float32) == SMALL_FLOATS[dt]).all(), on
    cuda_text(scaled(dt), "sm_90a")


REDUCTIONS = {
    "abssum": (T.reduce_abssum, lambda x: np.abs(x).sum(1)), "absmax": (T.reduce_absmax, lambda x: np.abs(x).max(1)),
    "sum": (T.reduce_sum, lambda x: x.sum(1)), "max": (T.reduce_max, lambda x: x.max(1)),
    "min": (T.reduce_min, lambda x: x.min(1)),
    "bitand": (T.reduce_bitand, lambda x: np.bitwise_and.reduce(x, 1)),
    "bitor": (T.reduce_bitor, lambda x: np.bitwise_or.reduce(x, 1)),
    "bitxor": (T.reduce_bitxor, lambda x: np.bitwise_xor.reduce(x, 1))}


@pytest.mark.spec("T.reduce_abssum", "T.reduce_absmax", "T.reduce_sum", "T.reduce_max", "T.reduce_min", "T.reduce_bitand",
                  "T.reduce_bitor", "T.reduce_bitxor", "L12.2:reduce")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_by_their_names(name):
    reduce, meaning = REDUCTIONS[name]

    @T.prim_func
    def f(X: T.Tensor((12, 37), "int32"), Y: T.Tensor((12,), "int32"), Z: T.Tensor((12, 1), "int32")):
        with T.Kernel(1, threads=64):
            F = T.alloc_fragment((12, 37), "int32")
            R = T.alloc_fragment((12,), "int32")
            K = T.alloc_fragment((12, 1), "int32")
            T.copy(X, F)
            reduce(F, R, dim=1)
            reduce(F, K, -1)
            T.copy(R, Y)
            T.copy(K, Z)

    x = np.random.default_rng(12).integers(-99, 99, (12, 37)).astype(np.int32)
    for on in EXECUTIONS:
        _, y, z = run(f, x, on=on)
        assert np.array_equal(y, meaning(x)) and np.array_equal(z[:, 0], y), on
    cuda_text(f)
    assert SM80["kind"] == "cuda"
