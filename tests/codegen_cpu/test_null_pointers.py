"""Addresses that are null, in tables and as arguments: on the CPU the call fails by name where they are surely followed."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


def table(guarded):
    @T.prim_func
    def main(tab: T.Tensor((3,), T.ptr), C: T.Tensor((3, 64), "float32")):
        with T.Kernel(3, threads=32) as b:
            X = T.make_tensor(tab[b], (64,), "float32")
            S = T.alloc_shared((32,), "float32")
            if guarded:
                for i in T.Parallel(64):
                    C[b, i] = -1
                if tab[b] != 0:
                    for i in T.Parallel(64):
                        C[b, i] = X[i]
            else:
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(X[k * 32], S)
                    T.copy(S, C[b, k * 32])

    return main


@T.prim_func
def pointer(p: T.ptr, n: T.int32, C: T.Tensor((8,), "float32")):
    X = T.make_tensor(p, (8,), "float32")
    with T.Kernel(n, threads=32):
        for i in T.Parallel(8):
            C[i] = T.if_then_else(X[i] > 0, X[i], 0.0)


def test_null_addresses_fail_the_call_where_they_are_followed():
    x, out = np.arange(64, dtype=np.float32), np.zeros((3, 64), np.float32)
    with_null, without = (np.array([x.ctypes.data, a, x.ctypes.data], np.int64) for a in (0, x.ctypes.data))
    kernel = tilelang.compile(table(False), target="cpu")
    kernel(without, out)
    assert (out == x).all()
    with pytest.raises(RuntimeError, match=r"kernel main: X \(test_null_pointers.py:\d+\) is made of the null pointer"):
        kernel(with_null, out)
    tilelang.compile(table(True), target="cpu")(with_null, out)
    assert (out[0] == x).all() and (out[1] == -1).all() and (out[2] == x).all()


def test_a_null_argument_fails_the_call_where_a_block_follows_it():
    kernel, out = tilelang.compile(pointer, target="cpu"), np.zeros(8, np.float32)
    kernel(0, 0, out)  # no block, nobody follows it
    with pytest.raises(RuntimeError, match="kernel pointer: X .* is made of the null pointer, and used"):
        kernel(0, 1, out)
    x = np.arange(8, dtype=np.float32)
    kernel(x.ctypes.data, 1, out)
    assert (out == x).all()


@T.prim_func
def by_element(p: T.ptr, n: T.int32, C: T.Tensor((64,), "float32")):
    X = T.make_tensor(p, (64,), "float32")
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(32):
            if i < n:
                C[b * 32 + i] = X[b * 32 + i]
            else:
                C[b * 32 + i] = -1


@T.prim_func
def by_choice(p: T.ptr, n: T.int32, C: T.Tensor((64,), "float32")):
    X = T.make_tensor(p, (64,), "float32")
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(32):
            C[b * 32 + i] = T.if_then_else(i < n, X[b * 32 + i], -1.0)


@T.prim_func
def by_thread(p: T.ptr, n: T.int32, C: T.Tensor((64,), "float32")):
    X = T.make_tensor(p, (64,), "float32")
    with T.Kernel(2, threads=32) as b:
        t = b * 32 + T.get_thread_binding()
        S = T.alloc_shared((32,), "float32")
        S[t % 32] = -1
        if t % 32 < n:
            S[t % 32] = X[t]
        C[t] = S[t % 32]


@T.prim_func
def by_loop(p: T.ptr, n: T.int32, C: T.Tensor((64,), "float32")):
    X = T.make_tensor(p, (64,), "float32")
    with T.Kernel(2, threads=32) as b:
        T.fill(C[b * 32 : b * 32 + 32], -1)
        for i in T.serial(n):
            C[b * 32 + i] = X[b * 32 + i]


@T.prim_func
def by_copy(p: T.ptr, n: T.int32, C: T.Tensor((64,), "float32")):
    X = T.make_tensor(p, (64,), "float32")
    with T.Kernel(2, threads=32) as b:
        S = T.alloc_shared((32,), "float32")
        if n > 0:
            T.copy(X[b * 32 : b * 32 + 32], S)
        else:
            T.fill(S, -1)
        T.copy(S, C[b * 32 : b * 32 + 32])


@T.prim_func
def by_question(p: T.ptr, n: T.int32, C: T.Tensor((64,), "float32")):
    X = T.make_tensor(p, (64,), "float32")
    with T.Kernel(2, threads=32) as b:
        for i in T.Parallel(32):
            if not T.isnullptr(p):
                C[b * 32 + i] = X[b * 32 + i]
            else:
                C[b * 32 + i] = -1


ALL = (by_element, by_choice, by_thread, by_loop, by_copy, by_question)


@pytest.mark.parametrize("program", ALL, ids=lambda f: f.func.name)
def test_a_null_argument_that_a_condition_leads_to_fails_the_call(program):
    """The process ended with a segmentation fault."""
    kernel, out = tilelang.compile(program, target="cpu"), np.zeros(64, np.float32)
    kernel(0, 0, out)
    assert (out == -1).all()
    if program is by_question:
        kernel(0, 32, out)
        assert (out == -1).all()
    else:
        with pytest.raises(RuntimeError, match=f"kernel {program.func.name}: X .* is made of the null pointer, and used"):
            kernel(0, 32, out)
    x = np.arange(64, dtype=np.float32)
    kernel(x.ctypes.data, 32, out)
    assert (out == x).all()
