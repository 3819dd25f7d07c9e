"""warp_role_updates: updates of one element in a branch of threads and in a warp role, on every backend."""

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


def in_a_warp_role(form):
    @T.prim_func
    def f(X: T.Tensor((8,), "float32"), O: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            s, x, tx = T.alloc_shared((64,), "float32"), T.alloc_local((1,), "float32"), T.get_thread_binding()
            T.clear(s)
            x[0] = X[1]
            if form == "one warp group":
                with T.ws(1):
                    s[63] += x[0]
            elif form == "each in turn":
                for i in T.serial(2):
                    with T.ws(0):
                        s[63] += x[0]
                    with T.ws(1):
                        s[63] += X[2] * i
            elif form == "a warp":
                if tx < 32:
                    T.copy(X, s[0:8])
                    s[63] += x[0]
            elif form == "values of threads":
                with T.ws(1):
                    s[63] += tx
            elif form == "some threads of it":
                with T.ws(1):
                    if tx < 140:
                        s[63] += x[0]
            T.copy(s, O)

    return f


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target, backend", BACKENDS, ids=["cpu", "cpu by the reference", "reference", "simulator"])
@pytest.mark.parametrize("form, last", [("one warp group", 3.0), ("each in turn", 10.0), ("a warp", 3.0)])
def test_an_update_in_a_warp_role_was_rejected_as_one_by_128_threads(target, backend, form, last):
    o = np.zeros(64, "float32")
    tilelang.compile(in_a_warp_role(form), target=target, execution_backend=backend)(np.arange(2, 10, dtype="float32"), o)
    assert o[63] == last


@pytest.mark.parametrize("target, backend", BACKENDS, ids=["cpu", "cpu by the reference", "reference", "simulator"])
@pytest.mark.parametrize("form, threads", [("values of threads", "128"), ("some threads of it", "12")])
def test_updates_that_differ_between_threads_of_a_warp_role_are_rejected(target, backend, form, threads):
    with pytest.raises(ValueError) as e:
        tilelang.compile(in_a_warp_role(form), target=target, execution_backend=backend)
    assert e.value.kind == "update-by-every-thread" and f"{threads} threads" in e.value.found
