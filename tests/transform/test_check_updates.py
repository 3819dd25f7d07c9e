"""check_updates: updates of one element by the threads of a branch are rejected alike on every backend."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

CUDA = {"kind": "cuda", "arch": "sm_80"}
BACKENDS = [("cpu", "cython"), ("cpu", "tile"), (CUDA, "tile"), (CUDA, "simulator")]


def program(first, scope="shared", by_thread=False):
    @T.prim_func
    def f(O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_shared((64,), "int32")
            T.clear(s)
            tx = T.get_thread_binding()
            if tx < first:
                if scope == "global":
                    O[0] = O[0] + 1
                elif by_thread:
                    s[tx] = s[tx] + 1
                else:
                    s[0] = s[0] + 1
            if scope == "shared":
                T.copy(s, O)

    return f


@pytest.mark.parametrize("target, backend", BACKENDS, ids=["cpu", "cpu by the reference", "reference", "simulator"])
@pytest.mark.parametrize("scope", ["shared", "global"])
def test_an_update_by_32_threads_was_1_or_32(target, backend, scope):
    with pytest.raises(ValueError) as e:
        tilelang.compile(program(32, scope), target=target, execution_backend=backend)
    assert e.value.kind == "update-by-every-thread" and "32 threads" in str(e.value)


@pytest.mark.parametrize("target, backend", BACKENDS, ids=["cpu", "cpu by the reference", "reference", "simulator"])
@pytest.mark.parametrize("first, by_thread", [(1, False), (32, True)])
def test_an_element_of_its_own_and_one_thread_are_taken(target, backend, first, by_thread):
    o = np.zeros(64, "int32")
    tilelang.compile(program(first, by_thread=by_thread), target=target, execution_backend=backend)(o)
    assert o.tolist() == [1] * first + [0] * (64 - first)
