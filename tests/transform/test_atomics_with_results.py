"""Atomics whose old value goes into a fragment that several threads hold."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.simulator import run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

PLACES = {"cpu": {"target": "cpu"}, **{arch: {"target": {"kind": "cuda", "arch": arch}, "execution_backend": "simulator"}
                                       for arch in ("sm_80", "sm_90a")}}


def old_values(op):
    """F is read at any index by all threads, so each holds all of it."""

    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), N: T.Tensor((4,), "int32"), O: T.Tensor((8, 16), "int32"),
                P: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=64) as _:
            F = T.alloc_fragment((4,), "int32")
            G = T.alloc_fragment((8, 16), "int32")
            v = T.alloc_var("int32", init=0)
            for i in T.Parallel(4):
                F[i] = op(N[i], A[i], return_prev=True) * 2
            for i, j in T.Parallel(8, 16):
                G[i, j] = F[(i * 3 + j) % 4] + F[v + 1]
            T.copy(G, O)
            for i in T.Parallel(4):
                P[i] = F[i]

    return program


@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize("op", ["atomic_add", "atomic_max"])
def test_an_atomic_whose_old_value_all_threads_hold_runs_once(on, op):
    """Each of 64 threads ran it: the sum was 64 times too large, and threads had different old values."""
    program = old_values(getattr(T, op))
    a, n = np.array([5, 6, 7, 8], np.int32), np.array([1, 20, 3, 40], np.int32)
    got = [n.copy(), np.zeros((8, 16), np.int32), np.zeros(4, np.int32)]
    tilelang.compile(program, **PLACES[on])(a, *got)
    meaning = run_tile(program.func, [a, n.copy(), np.zeros((8, 16), np.int32), np.zeros(4, np.int32)])
    for name, x in zip("NOP", got):
        assert np.array_equal(x, meaning[name])
    assert np.array_equal(got[0], n + a if op == "atomic_add" else np.maximum(n, a))
    assert got[2].tolist() == (2 * n).tolist()


def test_a_function_of_the_user_whose_value_all_threads_hold_runs_once():
    """It may do anything: add to memory, say."""

    @T.prim_func
    def f(N: T.Tensor((4,), "int32"), O: T.Tensor((8, 16), "int32")):
        with T.Kernel(1, threads=64) as _:
            T.import_source("__device__ int taken(int* n) { return atomicAdd(n, 1); }")
            F = T.alloc_fragment((4,), "int32")
            G = T.alloc_fragment((8, 16), "int32")
            v = T.alloc_var("int32", init=0)
            for i in T.Parallel(4):
                F[i] = T.call_extern("int32", "taken", T.address_of(N[i]))
            for i, j in T.Parallel(8, 16):
                G[i, j] = F[(i * 3 + j) % 4] + F[v + 1]
            T.copy(G, O)

    (kernel,) = lower(f.func, Target({"kind": "cuda", "arch": "sm_80"})).kernels
    text = print_kernel(kernel)
    before, _, after = text.rpartition(" = taken(")
    assert "if (tx < 4) {" in before.splitlines()[-2] + before.splitlines()[-3], before[-300:]
    assert text.count("= taken(") == 1 and "__syncthreads();" in after
