"""Mistakes of a first hour: each names its place and what to do, not what would not help."""

import array
import functools
import linecache
import sys

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning
from tilelang.jit.kernel import clear_memory

N = 128


def of_host(weights):
    @T.prim_func
    def f(X: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=N):
            for i in T.Parallel(N):
                X[i] = X[i] * weights[i]

    return f


@pytest.mark.parametrize("weights", [np.ones(N, np.float32), [1.0] * N, (1.0,) * N], ids=["array", "list", "tuple"])
def test_an_array_of_the_host_ended_in_an_index_error(weights):
    with pytest.raises(TypeError) as e:
        of_host(weights)
    assert e.value.kind == "host-index" and "`weights: T.Tensor(shape, dtype)`" in e.value.hint
    assert "weights[i]" in str(e.value) and "^^^^^^^^^^" in str(e.value)


def test_a_torch_tensor_of_the_host_is_named():
    import torch

    with pytest.raises(TypeError) as e:
        of_host(torch.ones(N))
    assert e.value.kind == "host-index"


def block_times():
    @T.prim_func
    def f(Y: T.Tensor((8,), "float32")):
        with T.Kernel(2, 2, threads=32) as b:
            Y[b * 2 + 1] = 1.0


def block_in_slice():
    @T.prim_func
    def f(Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(2, 2, threads=32) as b:
            s = T.alloc_shared((4,), "float32")
            T.copy(Y[b, 0:4], s)


def scaled_buffer():
    @T.prim_func
    def f(Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_fragment((8,), "float32")
            s = s * 2


def sum_of_buffers():
    @T.prim_func
    def f(Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            s = T.alloc_fragment((8,), "float32")
            d = s + s  # noqa: F841


def relu(x):
    return x if x > 0 else 0.0


def branches_in_a_helper():
    @T.prim_func
    def f(Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[i] = relu(Y[i])


def negative_extent():
    @T.prim_func
    def f(Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(-128):
                Y[i] = 1.0


@tilelang.jit(target="cpu")
def ones(X):
    M = T.const("M")
    X: T.Tensor((M,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(M):
            X[i] = 1.0


def logged(fn):
    @functools.wraps(fn)
    def around(*args):
        return fn(*args)

    return around


@tilelang.jit(target="cpu")
@logged
def wrapped(X):
    M = T.const("M")
    X: T.Tensor((M,), "float32")
    with T.Kernel(1, threads=32):
        X[0] = 1.0


@tilelang.jit(target="cpu")
def shape_of(X):
    M, N = X.shape
    with T.Kernel(1, threads=32):
        X[0, 0] = 1.0


MISTAKES = {  # what is done -> (text of the line, hint)
    block_times: ("Y[b * 2 + 1]", "as (bx, by)"),
    block_in_slice: ("T.copy(Y[b, 0:4], s)", "as (bx, by)"),
    scaled_buffer: ("s = s * 2", "for i in T.Parallel(n): s[i] = s[i] * 2"),
    sum_of_buffers: ("d = s + s", "a buffer has no arithmetic"),
    branches_in_a_helper: ("return x if x > 0 else 0.0", "decorate `relu` with @T.macro"),
    negative_extent: ("T.Parallel(-128)", "a number of iterations"),
    lambda: ones([1.0, 2.0]): ("ones([1.0, 2.0])", "np.asarray(...) for `X`"),
    lambda: ones(3): ("ones(3)", "np.asarray(...) for `X`"),
    lambda: ones(None): ("ones(None)", "np.asarray(...) for `X`"),
    lambda: ones(array.array("f", [1, 2])): ("ones(array", "np.asarray(...) for `X`"),
    lambda: wrapped(np.ones(4, np.float32)): ("wrapped(np", "put @tilelang.jit innermost"),
    lambda: shape_of(np.ones((4, 4), np.float32)): ("shape_of(np", 'M, N = T.const("M N")'),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=[v[0] for v in MISTAKES.values()])
def test_a_hint_sent_the_user_the_wrong_way(mistake):
    with pytest.raises(tilelang.errors.TileLangError) as e:
        mistake()
    line, hint = MISTAKES[mistake]
    assert line in str(e.value) and hint in e.value.hint and "T.cast" not in e.value.hint, str(e.value)


def test_a_helper_is_shown_with_the_place_that_calls_it():
    with pytest.raises(ValueError) as e:
        branches_in_a_helper()
    assert "Y[i] = relu(Y[i])" in str(e.value) and "called here" in str(e.value)


def test_empty_took_no_bare_dimension_before_its_type():
    @tilelang.jit(target="cpu")
    def f(X):
        M = T.const("M")
        X: T.Tensor((M), "float32")
        Y = T.empty((M), "float32")
        Z = T.empty(M, 2, T.int32)
        with T.Kernel(1, threads=32):
            for i in T.Parallel(M):
                Y[i] = X[i]
                Z[i, 0] = i
                Z[i, 1] = -i
        return Y, Z

    y, z = f(np.ones(5, np.float32))
    assert (np.from_dlpack(y) == 1).all() and np.from_dlpack(z).tolist() == [[i, -i] for i in range(5)]


def test_print_of_a_value_says_when_it_prints(capsys):
    with pytest.warns(TileLangWarning, match="host-print: .*T.print"):
        @T.prim_func
        def f(Y: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=32):
                for i in T.Parallel(8):
                    print(Y[i])
                    Y[i] = 1.0
    assert "Y[i]" in capsys.readouterr().out


def test_a_copy_of_one_element_where_a_tile_was_meant_was_silent():
    with pytest.warns(TileLangWarning, match="element-copy: T.copy of one element: `X") as seen:
        @T.prim_func
        def f(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32"), one: T.Tensor((1,), "float32")):
            with T.Kernel(2, threads=128) as bx:
                T.copy(X[bx * 128], Y[bx * 128])
                T.copy(X[bx], one[0])
                for k in T.serial(4):
                    T.copy(X[bx * 128 + k], Y[bx * 128 + k])
                for k in T.Parallel(4):
                    T.copy(X[k], Y[k])
                T.copy(X[T.get_thread_binding()], Y[T.get_thread_binding()])
                v = T.alloc_var("int32", 3)
                T.copy(X[v], Y[v])
                T.copy(X[bx * 128], Y[bx * 128:bx * 128 + 128])
    assert len(seen) == 1 and "T.copy(X[bx * 128], Y[bx * 128])" in linecache.getline(__file__, seen[0].lineno)


@tilelang.jit(target="cpu")
def first_half(X):
    M = T.const("M")
    X: T.Tensor((M,), "float32")
    Y = T.empty((M,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(M // 2):
            Y[i] = X[i]
    return Y


@pytest.mark.parametrize("backend", ["tile", "simulator"])
def test_elements_that_nothing_wrote_were_zeros_in_interpreters(backend):
    kernel = tilelang.jit(first_half.func, target={"kind": "cuda", "arch": "sm_80"} if backend == "simulator" else "cpu",
                          execution_backend=backend)
    with pytest.warns(TileLangWarning, match="unwritten-output: 4 of 8 elements of `Y` were not written"):
        y = kernel(np.ones(8, np.float32))
    assert (y[:4] == 1).all() and np.isnan(y[4:]).all()


def test_strict_mode_fills_results_that_a_kernel_leaves_unwritten(monkeypatch):
    monkeypatch.setenv("TILELANG_STRICT", "1")
    y = tilelang.jit(first_half.func, target="cpu")(np.ones(8, np.float32))
    assert (y[:4] == 1).all() and np.isnan(y[4:]).all()


@pytest.mark.parametrize("by", ["environment", "pass config"])
def test_an_accumulator_that_nothing_cleared_was_a_line_of_the_log(by, monkeypatch):
    @T.prim_func
    def sums(Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            acc = T.alloc_fragment((64,), "float32")
            for _ in T.serial(4):
                for i in T.Parallel(64):
                    acc[i] += 1.0
            T.copy(acc, Y)

    clear_memory()
    with pytest.warns(TileLangWarning, match=r"uninitialized: buffer `acc` is read before it is written; put T.clear\(acc\)"):
        tilelang.compile(sums, target="cpu")
    if by == "environment":
        monkeypatch.setenv("TILELANG_STRICT", "1")
    with pytest.raises(RuntimeError) as e:
        tilelang.compile(sums, target="cpu", pass_configs={} if by == "environment" else {"tl.strict": True})
    assert e.value.kind == "strict-warning" and "acc[i] += 1.0" in str(e.value)


def test_strict_mode_rejects_what_tracing_warns_of():
    @tilelang.jit(target="cpu", pass_configs={tilelang.PassConfigKey.TL_STRICT: True})
    def twice_bound(X):
        X: T.Tensor((8,), "float32")
        with T.Kernel(1, threads=32):
            x = X[0]
            x = x + X[1]
            X[2] = x

    with pytest.raises(RuntimeError, match="rebound: Immutable value `x` is re-bound"):
        twice_bound(np.ones(8, np.float32))


def test_an_uncaught_error_has_colours_on_a_terminal(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    try:
        ones(3)
    except tilelang.errors.TileLangError as e:
        sys.excepthook(type(e), e, e.__traceback__)
    assert "\033[1;31merror[eager-const]:\033[0m" in capsys.readouterr().err


def test_a_program_that_was_warned_of_was_found_on_disk_and_silent():
    @T.prim_func
    def sums(Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            v = T.alloc_local((1,), "float32")
            v[0] += 1.0
            Y[0] = v[0]

    for _ in range(2):
        clear_memory()
        with pytest.warns(TileLangWarning, match="uninitialized: buffer `v`"):
            tilelang.compile(sums, target="cpu")
