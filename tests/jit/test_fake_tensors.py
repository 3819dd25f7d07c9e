"""Calls under torch's FakeTensorMode, where the framework allocates tensors without memory."""

import torch

import pytest

import tilelang
import tilelang.language as T


@tilelang.jit(target="cpu", out_idx=[-1])
def lazy(n):
    @T.prim_func
    def f(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                Y[i] = X[i]

    return f


@tilelang.jit(target="cpu")
def eager(X):
    N = T.dynamic("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.serial(N):
            Y[i] = X[i]
    return Y


@pytest.mark.parametrize("kernel", [lazy(100), eager], ids=["lazy", "eager"])
def test_a_kernel_wrote_to_a_fake_output_and_the_process_died(kernel):
    x = torch.randn(100)
    assert torch.equal(kernel(x), x)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in (x, mode.from_tensor(x)):
            out = kernel(given)
            assert isinstance(out, torch._subclasses.FakeTensor) and (out.shape, out.dtype) == (x.shape, x.dtype)
    assert torch.equal(kernel(x), x)


def test_an_output_without_memory_is_rejected():
    kernel = lazy(100)
    x = torch.randn(100)
    kernel(x)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), \
            pytest.raises(RuntimeError, match="output Y data pointer is NULL: the framework allocated a tensor without memory"):
        kernel._entry.call(x)


def test_an_empty_output_needs_no_memory():
    assert eager(torch.empty(0)).shape == (0,)
