"""Accesses that certainly lie outside of block memory are refused for every target, others are not."""

import numpy as np
import pytest
from everywhere import everywhere

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.framework.pass_ import run_passes
from tilelang.transform.pipeline import TILE_PASSES, lower


def program(body, kind="shared"):
    """body: macro of (s, X, Y, b): 128 float32 of shared memory, a fragment or each thread, two tensors, the block."""
    @T.prim_func
    def f(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32"), n: T.int32):
        with T.Kernel(2, threads=128) as b:
            s = T.alloc_shared((128,), "float32") if kind == "shared" else T.alloc_fragment(
                (128,), "float32") if kind == "fragment" else T.alloc_local((128,), "float32")
            body(s, X, Y, b, n)

    return f


@T.macro
def one_behind(s, X, Y, b, n):
    for i in T.Parallel(128):
        Y[b * 128 + i] = s[i + 1]


@T.macro
def one_in_front_of_a_name(s, X, Y, b, n):
    for i in T.Parallel(128):
        j = i - 1
        s[j] = X[i]


@T.macro
def at_a_thread(s, X, Y, b, n):
    tx = T.get_thread_binding()
    s[tx + b] = X[tx]


@T.macro
def in_a_serial_loop(s, X, Y, b, n):
    for k in T.serial(2, 5):
        for i in T.Parallel(32):
            s[k * 32 + i] = X[i]


@T.macro
def below_the_first(s, X, Y, b, n):
    for i in T.serial(4):
        s[2 - i] = X[i]


@T.macro
def by_a_copy(s, X, Y, b, n):
    T.copy(X[0:128], s[b])


@T.macro
def unrolled_by_python(s, X, Y, b, n):
    for i in range(129):
        s[i] = X[i]


@pytest.mark.parametrize("target", ["c", "sm_80", "sm_90a"])
@pytest.mark.parametrize("body", [one_behind, one_in_front_of_a_name, at_a_thread, in_a_serial_loop,
                                  below_the_first, by_a_copy, unrolled_by_python], ids=lambda b: b.__name__)
def test_certain_accesses_outside_are_refused_for_every_target(body, target):
    """CUDA targets compiled them: a kernel read what lies behind the tile."""
    with pytest.raises(TileLangError, match="which has 128 elements") as e:
        lower(program(body).func, Target("c" if target == "c" else {"kind": "cuda", "arch": target}))
    assert e.value.kind == "out-of-bounds" and "test_check_bounds.py" in str(e.value)


@T.macro
def under_a_condition(s, X, Y, b, n):
    for i in T.Parallel(128):
        if i < 127:
            Y[i] = s[i + 1]


@T.macro
def chosen(s, X, Y, b, n):
    for i in T.Parallel(128):
        Y[i] = T.if_then_else(i < 127, s[i + 1], 0.0)


@T.macro
def behind_a_break(s, X, Y, b, n):
    for k in T.serial(200):
        if k == 100:
            break
        s[k] = X[k]


@T.macro
def behind_a_return(s, X, Y, b, n):
    tx = T.get_thread_binding()
    if tx > 3:
        T.thread_return()
    s[tx + 64] = X[tx]


@T.macro
def as_often_as_asked(s, X, Y, b, n):
    for k in T.serial(n):
        for i in T.Parallel(128):
            Y[i] = s[i + k]


@T.macro
def outside_of_the_tensor(s, X, Y, b, n):
    for i in T.Parallel(128):
        s[i] = X[i + 200] + X[i - 3]


@pytest.mark.parametrize("body", [under_a_condition, chosen, behind_a_break, behind_a_return, as_often_as_asked,
                                  outside_of_the_tensor], ids=lambda b: b.__name__)
def test_what_may_be_inside_is_left_alone(body):
    run_passes(program(body).func, TILE_PASSES, PassContext(Target({"kind": "cuda", "arch": "sm_80"})))


def test_the_last_element_is_inside():
    @T.macro
    def last(s, X, Y, b, n):
        for i in T.Parallel(128):
            s[i] = X[b * 128 + i]
        for i in T.Parallel(128):
            Y[b * 128 + i] = s[127 - i]

    x = np.arange(256, dtype=np.float32)
    got = everywhere(program(last), x, np.zeros_like(x), 0)[1]
    np.testing.assert_array_equal(got.reshape(2, 128), x.reshape(2, 128)[:, ::-1])
