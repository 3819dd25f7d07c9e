"""Kernels and decorated functions called inside torch.compile(fullgraph=True), torch.export and make_fx, without torch_op."""

import shutil

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangWarning


@tilelang.jit(target="cpu")
def scale(X, factor: T.float32 = 2.0, block: int = 32, f=None):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, block), threads=block) as b:
        for i in T.Parallel(block):
            v = X[b * block + i] * factor
            Y[b * block + i] = v if f is None else f(v)
    return Y


@tilelang.jit(target="cpu")
def axpy(X, Y, a: T.int32):
    n = T.dynamic("n")
    X: T.Tensor((n,), "float32")
    Y: T.Tensor((n,), "float32")
    Z = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, 64), threads=64) as bx:
        for i in T.Parallel(64):
            Z[bx * 64 + i] = T.cast(a, "float32") * X[bx * 64 + i] + Y[bx * 64 + i]
    return Z


@tilelang.jit(target="cpu")
def add_into(X, Y):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y: T.Tensor((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            Y[i] += X[i]


@tilelang.jit(target="cpu")
def both(X):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    A = T.empty((N,), "float32")
    B = T.empty((N,), "float16")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            A[i] = X[i] + 1
            B[i] = X[i]
    return A, B


@tilelang.jit(target="cpu", out_idx=[-1])
def make_square(n, block=32):
    @T.prim_func
    def square(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=block) as b:
            for i in T.Parallel(block):
                Y[b * block + i] = X[b * block + i] * X[b * block + i]

    return square


class Layer:
    def __init__(self, bias):
        self.bias = bias

    @tilelang.jit(target="cpu")
    def run(self, X):
        N = T.const("N")
        X: T.Tensor((N,), "float32")
        Y = T.empty((N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                Y[i] = X[i] + self.bias
        return Y


@T.macro
def negated(v):
    return -v


square = make_square(100)
layer = Layer(3.0)
kernel_of_axpy = axpy.compile()


def into_copy(x):
    y = x * 1
    add_into(x, y)
    return y


def with_out(x):
    y = torch.empty_like(x)
    return scale(x, out=y) + y


PROGRAMS = {
    "eager": (lambda x: scale(x + 1).exp(), lambda x: (2 * (x + 1)).exp()),
    "eager with values": (lambda x: scale(x, 3.0, block=64), lambda x: 3 * x),
    "eager with a macro": (lambda x: scale(x, f=negated), lambda x: -2 * x),
    "eager, a size as a number": (lambda x: axpy(x, x, x.shape[0]), lambda x: x * (x.shape[0] + 1)),
    "two results": (lambda x: both(x)[0] + both(x)[1], lambda x: x + 1 + x.half()),
    "kernel": (lambda x: square(x + 1) * 2, lambda x: (x + 1) ** 2 * 2),
    "kernel by name": (lambda x: kernel_of_axpy(X=x, a=2, Y=x), lambda x: 3 * x),
    "factory": (lambda x: make_square(100, block=64)(x) + 1, lambda x: x * x + 1),
    "method": (lambda x: layer.run(x) + 1, lambda x: x + 4),
    "in place": (into_copy, lambda x: 2 * x),
    "out=": (with_out, lambda x: 4 * x),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_broke_the_graph_of_torch_compile(name, backend):
    ours, plain = PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    for _ in range(2):
        x = torch.randn(100)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-3)


def test_an_argument_that_a_kernel_writes_changes_in_the_caller():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: add_into(x, y), fullgraph=True, backend="aot_eager")
    x, y = torch.ones(8), torch.ones(8)
    compiled(x, y)
    compiled(x, y)
    assert (y == 3).all()


def test_shapes_that_change_need_one_graph_where_the_kernel_has_dynamic_sizes():
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: axpy(x, x, 2) + x.shape[0], fullgraph=True, dynamic=True, backend=count)
    for n in (10, 77, 130):
        assert (compiled(torch.ones(n)) == 3 + n).all()
    assert len(graphs) == 1
    compiled = torch.compile(lambda x: scale(x), fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (10, 77, 130):
        assert (compiled(torch.ones(n)) == 2).all()


FACTOR = 2.0


@tilelang.jit(target="cpu")
def by_global(X):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(N):
            Y[i] = X[i] * FACTOR
    return Y


def test_a_value_that_the_function_reads_may_change_after_the_graph_was_made():
    global FACTOR
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: by_global(x), fullgraph=True, backend="aot_eager")
    assert (compiled(torch.ones(4)) == 2).all()
    FACTOR = 5.0
    assert (compiled(torch.ones(4)) == 5).all()
    FACTOR = 2.0


class Model(torch.nn.Module):
    def forward(self, x):
        y = torch.relu(x) * 1
        add_into(x, y)
        return scale(y) + square(x)


def wanted(x):
    return 2 * (x.relu() + x) + x * x


@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_calls(strict):
    torch._dynamo.reset()
    x = torch.randn(100)
    program = torch.export.export(Model(), (x,), strict=strict)
    assert "tilelang" in str(program.graph)
    for y in (x, torch.randn(100)):
        torch.testing.assert_close(program.module()(y), wanted(y))


def test_make_fx_records_calls():
    graph = make_fx(lambda x: scale(x) + square(x))(torch.ones(100))
    assert str(graph.code).count("torch.ops.tilelang.") == 2
    x = torch.randn(100)
    torch.testing.assert_close(graph(x), 2 * x + x * x)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_inductor_takes_calls():
    torch._dynamo.reset()
    x = torch.randn(100)
    torch.testing.assert_close(torch.compile(Model(), fullgraph=True)(x), wanted(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_package_of_aotinductor_calls_kernels_of_its_process(tmp_path):
    torch._dynamo.reset()
    x = torch.randn(100)
    program = torch.export.export(Model(), (x,))
    file = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    run = torch._inductor.aoti_load_package(file)
    torch.testing.assert_close(run(x), wanted(x))


def test_a_kernel_with_a_pointer_in_a_graph_is_rejected_by_name():
    @T.prim_func
    def f(X: T.Tensor((4,), "float32"), p: T.ptr):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                X[i] = T.make_tensor(p, (4,), "float32")[i]

    kernel = tilelang.compile(f, target="cpu")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="`p` of `f` is a pointer"):
        torch.compile(lambda x: kernel(x, x), fullgraph=True, backend="aot_eager")(torch.ones(4))


def test_a_gradient_that_ends_at_a_call_in_a_graph_is_named():
    torch._dynamo.reset()
    x = torch.randn(100, requires_grad=True)
    with pytest.warns(TileLangWarning, match="gradient-dropped"):
        out = torch.compile(lambda x: square(x) + x, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, x * x + x)


def test_the_size_of_a_result_follows_from_sums_and_products_of_sizes():
    @tilelang.jit(target="cpu")
    def pairs(X):
        m = T.dynamic("m")
        X: T.Tensor((2 * m + 1, 3), "float32")
        Y = T.empty((m, 2), "float32")
        with T.Kernel(m, threads=32) as i:
            Y[i, 0] = X[2 * i, 0]
            Y[i, 1] = X[2 * i + 1, 0]
        return Y

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: pairs(x) * 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        x = torch.randn(n, 3)
        assert torch.equal(compiled(x), x[:n - 1, 0].reshape(-1, 2))


def test_results_of_narrow_types_are_packed_in_a_graph():
    @tilelang.jit(target="cpu")
    def fill(X):
        X: T.Tensor((4, 16), "int4")
        Y = T.empty((4, 16), "int4")
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((4, 16), "int4")
            T.copy(X, tile)
            T.copy(tile, Y)
        return Y

    torch._dynamo.reset()
    x = torch.arange(32, dtype=torch.int8).reshape(4, 8)
    got = torch.compile(lambda x: fill(x) + 0, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, x) and torch.equal(fill(x), x)
