"""Sizes near 2**31: their arithmetic is exact, or the call is refused, alike in every execution."""

import random

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.jit.building import sizes_of
from tilelang.jit.requests import make_request
from tilelang.runtime.signature import signature_of

TARGETS = {"tile": ("cpu", "tile"), "cpu": ("cpu", "tvm_ffi"), "sm_80": ({"kind": "cuda", "arch": "sm_80"}, "simulator"),
           "sm_90a": ({"kind": "cuda", "arch": "sm_90a"}, "simulator")}
EVERYWHERE = pytest.mark.parametrize("on", TARGETS)


def build(f, on):
    target, backend = TARGETS[on]
    return tilelang.compile(f, target=target, execution_backend=backend)


def claimed(n):
    """An int8 tensor that says that it has n elements.  Only calls that are refused may take it."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (n,), (1,))


def checks(f):
    request = make_request(f, target="cpu")
    return [c.text for c in sizes_of(request, signature_of(request.func, None))]


m, n = T.dynamic("m, n")


@T.prim_func
def blocks_of_a_size(A: T.Tensor((m,), "int8"), B: T.Tensor((4,), "int32")):
    with T.Kernel(T.ceildiv(m, 1 << 20), threads=32):
        if T.get_thread_binding() == 0:
            T.atomic_add(B[0], 1)


@T.prim_func
def steps_of_a_size(A: T.Tensor((m,), "int8"), B: T.Tensor((4,), "int32")):
    with T.Kernel(1, threads=32):
        if T.get_thread_binding() == 0:
            for _ in T.serial(T.ceildiv(m, 100)):
                B[0] += 1


@T.prim_func
def blocks_of_a_number(k: T.int32, B: T.Tensor((4,), "int32")):
    with T.Kernel(k - 2, threads=32):
        if T.get_thread_binding() == 0:
            T.atomic_add(B[0], 1)


@T.prim_func
def simplified(k: T.int32, O: T.Tensor((8, 32), "int32")):
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding()
        for i in T.serial(T.min(k, 4)):
            O[i, tx] = 1
        O[4, tx] = (k * 4) // 4
        O[5, tx] = (k * 8 + tx) // 8
        O[6, tx] = T.if_then_else((k + 1) > k, 1, 0)


@T.prim_func
def simplified_symbol(A: T.Tensor((m,), "int8"), O: T.Tensor((4, 32), "int32")):
    with T.Kernel(1, threads=32):
        tx = T.get_thread_binding()
        O[0, tx] = (m * 4) // 4
        O[1, tx] = (m * 8 + tx) // 8


@T.prim_func
def indexed(k: T.int32, A: T.Tensor((m,), "int32"), B: T.Tensor((8,), "int32")):
    with T.Kernel(8, threads=32) as bx:
        B[bx] = A[bx * k]


@T.prim_func
def guarded(k: T.int32, B: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        for i in T.serial(T.min(k, 32)):
            if k < 1000:
                B[i] = k * 1000 // 1000


@EVERYWHERE
def test_the_launch_of_a_size_near_the_greatest_number_did_nothing(on):
    b = np.zeros(4, np.int32)
    for f, wanted in (blocks_of_a_size, 1), (steps_of_a_size, 10):
        kernel = build(f, on)
        b[:] = 0
        kernel(np.zeros(1000, np.int8), b)
        assert b[0] == wanted
        for size in 2**31 - 1, 2**31 - 50:
            with pytest.raises(RuntimeError, match=r"kernel-size.*size `m \+ ") as e:
                kernel(claimed(size), b)
            assert e.value.kind == "kernel-size" and b[0] == wanted


@EVERYWHERE
def test_a_negative_number_of_blocks_was_an_empty_launch(on):
    kernel, b = build(blocks_of_a_number, on), np.zeros(4, np.int32)
    kernel(5, b)
    kernel(2, b)  # no blocks
    assert b[0] == 3
    for k in 1, -7, -2**31:
        with pytest.raises(RuntimeError, match="kernel-size"):
            kernel(k, b)
    assert b[0] == 3


@EVERYWHERE
def test_arithmetic_of_a_scalar_that_is_also_a_size_was_taken_not_to_wrap(on):
    kernel, o = build(simplified, on), np.zeros((8, 32), np.int32)
    for k in 3, 2**28 - 4, -2**28:
        kernel(k, o)
        assert (o[4] == k).all() and (o[5] == k + np.arange(32) // 8).all() and (o[6] == 1).all()
    for k in 2**30, 2**28, 2**31 - 1, -2**30 - 1:
        with pytest.raises(RuntimeError, match="kernel-size"):
            kernel(k, o)
    kernel = build(simplified_symbol, on)
    kernel(np.zeros(5, np.int8), o[:4])
    assert (o[0] == 5).all()
    with pytest.raises(RuntimeError, match="kernel-size"):
        kernel(claimed(2**30), o[:4])


@EVERYWHERE
def test_an_index_wrapped_into_the_tensor(on):
    kernel, a, b = build(indexed, on), np.arange(1, 9, dtype=np.int32), np.zeros(8, np.int32)
    kernel(2, a, b)
    assert list(b) == [1, 3, 5, 7, 0, 0, 0, 0]
    with pytest.raises(RuntimeError, match="kernel-size"):
        kernel(2**30, a, b)


@EVERYWHERE
def test_arithmetic_behind_a_condition_on_sizes_is_checked_where_it_is_executed(on):
    kernel, b = build(guarded, on), np.zeros(32, np.int32)
    kernel(2**31 - 1, b)
    assert not b.any()
    kernel(3, b)
    assert list(b[:4]) == [3, 3, 3, 0]


def test_ordinary_sizes_need_few_checks_and_large_tensors_none():
    @T.prim_func
    def copied(A: T.Tensor((m, n), "float16"), B: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (bx, by):
            S = T.alloc_shared((64, 64), "float16")
            T.copy(A[by * 64, bx * 64], S)
            T.copy(S, B[by * 64, bx * 64])

    @T.prim_func
    def flat(A: T.Tensor((m * n,), "int8"), B: T.Tensor((m, n), "int8")):
        with T.Kernel(m, threads=64) as bx:
            for j in T.serial(n):
                B[bx, j] = A[bx * n + j]

    @T.prim_func
    def hashed(seed: T.int32, B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            B[tx] = (seed * 31 + tx) % 7

    w = T.dynamic("w", dtype="int64")

    @T.prim_func
    def wide(A: T.Tensor((w,), "int8"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32):
            for _ in T.serial(T.ceildiv(w, 64)):
                B[0] = 1

    assert checks(copied) == ["n + 63", "m + 63", "(m + 63) // 64"]  # the last one: blocks along y
    assert checks(flat) == checks(hashed) == checks(wide) == []


# ---- random arithmetic on scalars near the ends of int32 ------------------------------------------------------------

def expression(rng, names, depth):
    """The text of an integer expression."""
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(names) if rng.random() < 0.75 else str(rng.choice([1, 2, 3, 7, 64, 1000]))
    a, b = expression(rng, names, depth - 1), expression(rng, names, depth - 1)
    k = rng.choice([2, 3, 4, 8, 64, 100])
    return rng.choice([f"({a} + {b})", f"({a} - {b})", f"({a} * {k})", f"({a} // {k})", f"({a} % {k})", f"({a} * {b})",
                       f"T.min({a}, {b})", f"T.max({a}, {b})", f"({a} * {k} // {k})", f"(({a} * {k} + {b}) // {k})",
                       f"T.if_then_else({a} < {b}, {a}, {b})", f"T.if_then_else({a} + 1 > {a}, {b}, 0)"])


def program(seed):
    """A program with two scalars; the first is a loop bound, or both are."""
    rng = random.Random(seed)
    lines = [f"O[{k}, tx] = {expression(rng, ['p', 'q', 'tx', 'p', 'q'], 3)}" for k in range(4)]
    bounds = [f"T.min({expression(rng, ['p', 'q'], 1)}, 5)", "T.min(p, 3)", "T.min(q % 4, 3)"]
    loop = f"for i in T.serial({rng.choice(bounds)}):\n            O[4, tx] += i + 1"
    body = "\n        ".join([*lines[:2], loop, *lines[2:]])
    return ("@T.prim_func\ndef f(p: T.int32, q: T.int32, O: T.Tensor((5, 32), 'int32')):\n    with T.Kernel(1, threads=32):\n"
            f"        tx = T.get_thread_binding()\n        {body}\n"), rng


@pytest.mark.parametrize("seed", range(6))
def test_random_arithmetic_near_the_ends_of_int32_is_alike_everywhere(seed, tmp_path, monkeypatch):
    assert agreement(seed, tmp_path)


def agreement(seed, folder):
    """Whether all executions of a random program refuse a call or give equal results."""
    text, rng = program(seed)
    path = folder / f"p{seed}.py"
    path.write_text(text)
    names = {"T": T}
    exec(compile(text, str(path), "exec"), names)
    kernels = [build(names["f"], on) for on in TARGETS if on != "sm_90a"]
    near = [0, 1, 5, 77, 2**20, 2**29, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 64, 2**31 - 1, -1, -9, -2**30, -2**31]
    for _ in range(12):
        p, q = rng.choice(near), rng.choice(near)
        results = []
        for kernel in kernels:
            o = np.zeros((5, 32), np.int32)
            try:
                kernel(p, q, o)
                results.append(o.tolist())
            except RuntimeError as e:
                results.append(e.kind)
        if any(r != results[0] for r in results):
            shown = [r if isinstance(r, str) else [x[:3] for x in r] for r in results]
            raise AssertionError(f"{text}\np = {p}, q = {q}: {shown}")
    return True
