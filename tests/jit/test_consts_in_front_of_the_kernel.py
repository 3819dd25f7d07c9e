"""T.const is a plain number in front of T.Kernel: ordinary Python takes it."""

import importlib.util
import math

import numpy as np
import pytest

import tilelang
import tilelang.language as T

LINES = ["D ** -0.5", "1 / math.sqrt(D)", "1 / D", "D / 2", "min(64, D)", "max(64, D)", "int(D)", "[0] * N", "D.bit_length()",
         "1 << (D - 1).bit_length()", "[i for i in range(D)]", "tilelang.next_power_of_2(D)", "{64: 1}[D]", "round(D * 0.5)",
         "divmod(D, 3)", "float(D)", "f'{D:4d}'", "sum(range(D))", "D if D > 3 else 2", "sorted([D, N])[0]", "D & (D - 1) == 0",
         "D // 8", "T.min(D, 4)"]
PROGRAM = """
import math
import tilelang
import tilelang.language as T

@tilelang.jit(target="cpu")
def scale(X):
    N, D = T.const("N D")
    {before}
    X: T.Tensor((N, D), "float32")
    {after}
    number = value if isinstance(value, (int, float)) else 3
    Y = T.empty((N, D), "float32")
    with T.Kernel(N, threads=32) as row:
        for i in T.Parallel(D):
            Y[row, i] = X[row, i] * number
    return Y
"""


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("line", LINES)
def test_a_const_was_a_run_time_value_in_front_of_the_kernel(line, place, tmp_path):
    source = PROGRAM.format(**{"before": "pass", "after": "pass", place: f"value = {line}"})
    path = tmp_path / "program.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    value = eval(line, {"N": 5, "D": 64, "math": math, "tilelang": tilelang, "T": T})
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    number = np.float32(value if isinstance(value, (int, float)) else 3)
    np.testing.assert_allclose(np.from_dlpack(module.scale(x)), x * number, rtol=1e-6)
    kernels = [module.scale.compile(N=5, D=64), module.scale.compile(N=5, D=64)]
    assert kernels[0] is kernels[1]


def test_a_statement_that_fails_with_its_numbers_says_so():
    @tilelang.jit(target="cpu")
    def f(X):
        N = T.const("N")
        width = {64: 1}[N]
        X: T.Tensor((N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                X[i] = width

    with pytest.raises(KeyError, match="65"):
        f(np.ones(65, np.float32))
    f(np.ones(64, np.float32))


def test_an_annotation_that_fails_is_named_and_not_its_const():
    @tilelang.jit(target="cpu")
    def f(X):
        N = T.const("N")
        X: T.Tensor((N,), no_such_type)  # noqa: F821
        with T.Kernel(1, threads=32):
            X[0] = 1.0

    with pytest.raises(NameError, match="no_such_type"):
        f(np.ones(64, np.float32))


def half():
    @tilelang.jit(target="cpu")
    def f(A, B):
        N = T.const("N")
        A: T.Tensor((64,), "float16")
        B: T.Tensor((N // 2,), "uint8")
        C = T.empty((N,), "float16")
        with T.Kernel(1, threads=128):
            for i in T.Parallel(N):
                C[i] = T.cast(B[i // 2], "float16")
        return C

    return f


def test_a_const_that_the_caller_gives_was_refused_as_unused():
    f = half()
    b = np.arange(32, dtype=np.uint8)
    kernel = f.compile(N=64)
    assert (np.from_dlpack(kernel(np.zeros(64, np.float16), b)) == np.repeat(b, 2)).all()
    with pytest.raises(RuntimeError, match="`N` is not used in any buffer shape"):
        f(np.zeros(64, np.float16), b)


def test_autotuned_functions_took_no_const_by_keyword(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    @tilelang.autotune(configs=[{"b": 32}, {"b": 64}], warmup=1, rep=1)
    @tilelang.jit(target="cpu")
    def f(X, b: int = 64):
        N = T.const("N")
        X: T.Tensor((N,), "float32")
        Y = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, b), threads=b) as bx:
            for i in T.Parallel(b):
                Y[bx * b + i] = X[bx * b + i] * 2
        return Y

    x = np.arange(100, dtype=np.float32)
    for kernel in (f.compile(N=100), f.compile(N=100, b=32)):
        assert (np.from_dlpack(kernel(x)) == 2 * x).all()
