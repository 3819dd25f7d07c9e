"""Kernels as operators of torch: whole graphs, shapes without a run, tensors that are written, gradients."""

import pytest
import torch

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError


@tilelang.jit(target="cpu")
def axpy(X, Y, a: T.float32):
    n = T.dynamic("n")
    X: T.Tensor((n,), "float32")
    Y: T.Tensor((n,), "float32")
    Z = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, 64), threads=64) as bx:
        for i in T.Parallel(64):
            Z[bx * 64 + i] = a * X[bx * 64 + i] + Y[bx * 64 + i]
    return Z


@tilelang.jit(target="cpu")
def halves(X, block: int = 32):
    M, N = T.const("M N")
    X: T.Tensor((M, N), "float32")
    sums = T.empty((M,), "float32")
    Y = T.empty((M * 2, N // 2), "float16")
    with T.Kernel(M, threads=block) as m:
        row = T.alloc_fragment((N,), "float32")
        total = T.alloc_fragment((1,), "float32")
        T.copy(X[m, 0:N], row)
        T.reduce_sum(row, total, dim=0)
        sums[m] = total[0]
        for i in T.Parallel(N):
            Y[m * 2 + i // (N // 2), i % (N // 2)] = row[i]
    return sums, Y


@tilelang.jit(target="cpu")
def add_into(X, Y):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y: T.Tensor((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            Y[i] += X[i]


@tilelang.jit(target="cpu")
def scaled(X, a: T.float32 = 3.0, block: int = 32):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(1, threads=block):
        for i in T.Parallel(N):
            Y[i] = a * X[i]
    return Y


def compiled(fn, *args, **options):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)(*args)


@pytest.mark.parametrize("kernel", [axpy, axpy.compile(torch.empty(8), torch.empty(8), 1.0)], ids=["function", "kernel"])
def test_a_kernel_broke_the_graph_of_torch_compile(kernel):
    op = tilelang.torch_op(kernel)
    x, y = torch.randn(100), torch.randn(100)
    wanted = (2 * x.relu() + y).exp()
    for dynamic in (False, True):
        got = compiled(lambda x, y: op(x.relu(), y, 2.0).exp(), x, y, dynamic=dynamic)
        torch.testing.assert_close(got, wanted)


def test_results_have_their_shapes_and_types_without_a_run():
    op = tilelang.torch_op(halves)
    x = torch.randn(3, 8)
    for run in (op, lambda x: compiled(lambda x: op(x + 0), x)):
        sums, y = run(x)
        torch.testing.assert_close(sums, x.sum(1))
        torch.testing.assert_close(y, x.half().reshape(6, 4))
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        sums, y = op(mode.from_tensor(x))
    assert (sums.shape, y.shape, y.dtype) == ((3,), (6, 4), torch.float16)


def test_a_tensor_that_a_kernel_writes_is_declared():
    with pytest.raises(TileLangError, match="`add_into` writes its parameter `Y`") as e:
        tilelang.torch_op(add_into)(torch.ones(4), torch.ones(4))
    assert e.value.kind == "torch-op" and "mutates=['Y']" in e.value.hint
    for op in (tilelang.torch_op(add_into, mutates=("Y",)), tilelang.torch_op(add_into.compile(N=4))):
        x, y = torch.ones(4), torch.ones(4)
        before = y._version
        assert op(x, y) is None and (y == 2).all() and y._version > before

        def model(x, y, op=op):
            z = y * 1
            op(x, z)
            return z + y

        assert (compiled(model, x, torch.ones(4)) == 3).all()


def test_export_takes_an_operator():
    op = tilelang.torch_op(axpy, "tests::axpy")

    class Model(torch.nn.Module):
        def forward(self, x, y):
            return op(x, y, 3.0)

    x, y = torch.randn(16), torch.randn(16)
    program = torch.export.export(Model(), (x, y))
    assert "tests.axpy" in str(program.graph)
    torch.testing.assert_close(program.module()(x, y), 3 * x + y)


@tilelang.jit(target="cpu")
def square(X):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            Y[i] = X[i] * X[i]
    return Y


@tilelang.jit(target="cpu")
def square_gradient(X, Y, dY):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y: T.Tensor((N,), "float32")
    dY: T.Tensor((N,), "float32")
    dX = T.empty((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            dX[i] = 2 * X[i] * dY[i] + 0 * Y[i]
    return dX


def test_a_gradient_of_kernels():
    fn = tilelang.autograd(square, square_gradient)
    for run in (fn, lambda x: compiled(lambda x: fn(x.sin()), x)):
        x = torch.randn(50, requires_grad=True)
        run(x).sum().backward()
        wanted = 2 * x if run is fn else 2 * x.sin() * x.cos()
        torch.testing.assert_close(x.grad, wanted.detach())


def test_a_gradient_beside_numbers_and_inputs_without_one():
    op = tilelang.torch_op(axpy)
    fn = tilelang.autograd(op, lambda x, y, a, z, dz: (a * dz, None))
    x, y = torch.randn(9, requires_grad=True), torch.randn(9)
    fn(x, y, 3.0).sum().backward()
    assert (x.grad == 3).all()
    with pytest.raises(TileLangError, match="backward returned 1 gradients for 2 tensor inputs"):
        tilelang.autograd(op, lambda x, y, a, z, dz: dz)(x, y, 3.0).sum().backward()


@pytest.mark.parametrize("wrong, text", [(3, "a int is no kernel"), (lambda x: x, "a function is no kernel")])
def test_what_is_no_kernel(wrong, text):
    with pytest.raises(TileLangError, match=text):
        tilelang.torch_op(wrong)


def test_a_parameter_that_torch_has_no_type_for():
    @tilelang.jit(target="cpu")
    def f(X, dtype):
        X: T.Tensor((4,), dtype)
        with T.Kernel(1, threads=32):
            X[0] = 1

    with pytest.raises(TileLangError, match="`dtype` of `f` is a compile-time value without a default"):
        tilelang.torch_op(f)


def test_a_number_that_is_its_default_was_not_passed_to_the_kernel():
    op, x = tilelang.torch_op(scaled), torch.randn(40)
    for args, factor in (((), 3), ((3.0,), 3), ((3.0, 32), 3), ((2.0,), 2), ((2.0, 64), 2)):
        assert torch.equal(op(x, *args), x * factor), args
        assert torch.equal(compiled(lambda x, args=args: op(x, *args), x), x * factor), args
