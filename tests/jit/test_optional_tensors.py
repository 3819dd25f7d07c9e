"""Tensors of eager functions that a call may leave out: None, annotated where they are not."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T


@tilelang.jit(execution_backend="tile", target="cpu")
def scaled(A, bias=None, scale=None, factor: T.int32 = 1, block: int = 4):
    N = T.const("N")
    A: T.Tensor((N,), "int32")
    if bias is not None:
        bias: T.Tensor((N,), "int32")
    if scale is not None:
        M = T.const("M")
        scale: T.Tensor((M,), "int32")
    B = T.empty((N,), "int32")
    with T.Kernel(T.ceildiv(N, block), threads=32) as b:
        for i in T.Parallel(block):
            x = A[b * block + i] * factor if scale is None else A[b * block + i] * scale[0] * factor
            B[b * block + i] = x if bias is None else x + bias[b * block + i]
    return B


def given(n=6):
    return np.arange(n, dtype=np.int32)


def test_tensors_may_be_left_out():
    a, three, two = given(), np.full(6, 3, np.int32), np.array([2, 9], np.int32)
    for _ in range(2):  # the second time on the short way
        assert (scaled(a) == a).all() and (scaled(a, None) == a).all() and (scaled(a, factor=5) == a * 5).all()
        assert (scaled(a, three) == a + 3).all() and (scaled(a, None, two) == a * 2).all()
        assert (scaled(a, three, two, 7) == a * 14 + 3).all() and (scaled(a, scale=two, bias=None) == a * 2).all()
        assert (scaled(a, None, None, 2, 3) == a * 2).all()
    assert len(scaled.compile(a).params) == 3 and len(scaled.compile(a, three, two).params) == 5
    assert "bias" not in str(scaled.get_tir(a)) and "bias" in str(scaled.get_tir(a, three))
    with pytest.raises(RuntimeError, match=r"input bias shape\[0\]"):
        scaled(a, three[:5])


def test_tensors_annotated_in_any_case_are_needed():
    @tilelang.jit(execution_backend="tile", target="cpu")
    def added(A, bias=None):
        N = T.const("N")
        A: T.Tensor((N,), "int32")
        bias: T.Tensor((N,), "int32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                A[i] += bias[i]

    for args in (given(),), (given(), None):
        with pytest.raises(RuntimeError, match="added.bias is expected to have non-NULL pointer"):
            added(*args)


def test_tuning_without_an_optional_tensor():
    tuned = tilelang.autotune(configs=[{"block": 2}, {"block": 3}], warmup=1, rep=1)(scaled)
    a = given()
    assert (tuned(a, None, None, 2) == a * 2).all() and tuned.compile(a, None, None, 2).config["block"] in (2, 3)
