"""private_fragments: fragments as memory of an iteration of T.Parallel, or of a thread."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import walk
from tilelang.ir.stmt import Alloc
from tilelang.transform.pipeline import legalized

RUNS = [("cpu", "tile"), ({"kind": "cuda", "arch": "sm_80"}, "simulator"), ({"kind": "cuda", "arch": "sm_90a"}, "simulator"),
        ("cpu", None)]
X = np.arange(64, dtype=np.float32)


def program(body, size=1, threads=32, alloc=None):
    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=threads):
            t = (alloc or T.alloc_fragment)((size,), "float32")
            body(X, Y, t)

    return f


@T.macro
def one_element(X, Y, t):
    for i in T.Parallel(64):
        t[0] = X[i] * 2
        Y[i] = t[0] + t[0]


@T.macro
def accumulated(X, Y, t):
    for i in T.Parallel(64):
        t[0] = 0.0
        for j in T.serial(4):
            t[0] += X[i] * j
        Y[i] = t[0]


@T.macro
def array(X, Y, t):
    for i in T.Parallel(64):
        for j in T.serial(4):
            t[j] = X[i] * j
        Y[i] = t[0] + t[1] + t[2] + t[3]


@T.macro
def stored_again(X, Y, t):
    for k in T.serial(2):
        for i in T.Parallel(64):
            t[0] = 0.0
            if X[i] > 3:
                t[0] = X[i]
            Y[i] = t[0] * k


@T.macro
def of_a_thread(X, Y, t):
    tx = T.get_thread_binding(0)
    for j in T.serial(2):
        t[j] = X[tx * 2 + j] * 2
    for j in T.serial(2):
        Y[tx * 2 + j] = t[j]


@pytest.mark.parametrize("body, size, want", [(one_element, 1, X * 4), (accumulated, 1, X * 6), (array, 4, X * 6),
                                              (stored_again, 1, np.where(X > 3, X, 0)), (of_a_thread, 2, X * 2)])
@pytest.mark.parametrize("target, backend", RUNS)
def test_a_fragment_as_a_variable_of_an_iteration_or_thread(body, size, want, target, backend):
    """All were errors of parallel-order or fragment-store; the interpreter and the CPU gave a thread the last one's values."""
    f = program(body, size)
    if target != "cpu":
        tilelang.compile(f, target=target)
    y = np.full(64, 77, np.float32)
    tilelang.compile(f, target=target, execution_backend=backend)(X.copy(), y)
    np.testing.assert_array_equal(y, want)


def test_its_memory_is_allocated_in_the_loop():
    (made,) = [x.buffer for x in walk(legalized(program(one_element).func, None), Alloc)]
    assert made.scope_name == "local" and made.name == "t"


@T.macro
def read_after_the_loop(X, Y, t):
    for i in T.Parallel(64):
        t[0] = X[i]
        Y[i] = t[0]
    Y[0] = t[0]


@T.macro
def stored_sometimes(X, Y, t):
    for i in T.Parallel(64):
        if X[i] > 3:
            t[0] = X[i]
        Y[i] = t[0]


@pytest.mark.parametrize("body", [read_after_the_loop, stored_sometimes])
def test_what_iterations_share_is_refused_as_before(body):
    with pytest.raises(TileLangError, match="iteration"):
        tilelang.compile(program(body), target="cpu")
