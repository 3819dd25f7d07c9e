"""Direct calls with torch tensors: versions of written tensors, gradients that end at a kernel, results in given memory."""

import warnings

import numpy as np
import pytest
import torch

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError, TileLangWarning


@tilelang.jit(target="cpu")
def scale(X, factor: int = 2):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((N,), "float32")
    with T.Kernel(T.ceildiv(N, 32), threads=32) as b:
        for i in T.Parallel(32):
            Y[b * 32 + i] = X[b * 32 + i] * factor
    return Y


@tilelang.jit(target="cpu")
def double_into(X, Y):
    n = T.dynamic("n")
    X: T.Tensor((n,), "float32")
    Y: T.Tensor((n,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.serial(n):
            Y[i] = X[i] * 2


@tilelang.jit(target="cpu", out_idx=[1, 3])
def both(n):
    @T.prim_func
    def f(A: T.Tensor((n,), "float32"), P: T.Tensor((n,), "float32"), k: T.int32, Q: T.Tensor((n, 2), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                P[i] = A[i] + k
                Q[i, 0] = k
                Q[i, 1] = i

    return f


@tilelang.jit(target="cpu")
def rows(X):
    M, N = T.dynamic("M N")
    X: T.Tensor((M, N), "float32")
    Y = T.empty((M,), "float32")
    with T.Kernel(M, threads=32) as m:
        total = T.alloc_fragment((1,), "float32")
        T.clear(total)
        for j in T.serial(N):
            total[0] += X[m, j]
        Y[m] = total[0]
    return Y


@tilelang.jit(target="cpu")
def index_of_first(X):
    N = T.const("N")
    X: T.Tensor((N,), "float32")
    Y = T.empty((1,), "int32")
    with T.Kernel(1, threads=32):
        Y[0] = T.if_then_else(X[0] > X[1], 0, 1)
    return Y


BACKENDS = ["tvm_ffi", "cython", "tile"]


# ---- versions ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_did_not_notice_that_a_kernel_overwrote_a_saved_tensor(backend):
    kernel = tilelang.compile(double_into.get_tir(torch.ones(4), torch.ones(4)), target="cpu", execution_backend=backend)
    x, w = torch.ones(4), torch.ones(4, requires_grad=True)
    saved = torch.ones(4)
    loss = (w * saved).sum()
    before = x._version, saved._version
    kernel(x, saved)
    assert x._version == before[0] and saved._version > before[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_of_views_parameters_and_inference_tensors():
    base = torch.ones(8)
    double_into(torch.ones(4), base[4:])
    assert base._version == 1
    double_into(np.ones(4, np.float32), base[:4])
    assert base._version == 2
    weight = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        double_into(torch.ones(4), weight)
    assert weight._version == 1
    with torch.inference_mode():
        y = torch.ones(4)
        double_into(torch.ones(4), y)
    assert (y == 2).all()
    z = np.ones(4, np.float32)
    double_into(torch.ones(4), z)
    assert (z == 2).all()


def test_the_version_of_a_tensor_behind_a_pointer():
    @T.prim_func
    def f(p: T.ptr, n: T.int32):
        with T.Kernel(1, threads=32):
            Y = T.make_tensor(p, (n,), "float32")
            for i in T.serial(n):
                Y[i] = 3.0

    y = torch.ones(4)
    tilelang.compile(f, target="cpu")(y, 4)
    assert (y == 3).all() and y._version == 1


# ---- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", [scale, lambda x: double_into(x, torch.empty(4)), lambda x: both(4)(x, 1),
                                  lambda x: scale(x, out=torch.empty(4)), tilelang.torch_op(scale)],
                         ids=["result", "written", "lazy", "out", "torch_op"])
def test_a_gradient_ended_at_a_kernel_without_a_word(call):
    x = torch.ones(4, requires_grad=True)
    with pytest.warns(TileLangWarning, match="gradient-dropped: .*`[XA]` requires one; give it .*tilelang.autograd.*no_grad"):
        call(x)
    with pytest.warns(TileLangWarning, match="gradient-dropped"):
        call(x * 1)


def test_calls_that_ask_for_no_gradient_are_silent():
    x = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            scale(x)
        scale(x.detach())
        index_of_first(x)
        tilelang.autograd(scale, lambda x, y, dy: dy * 2)(x).sum().backward()
    assert (x.grad == 2).all()


def test_a_gradient_that_ends_at_a_kernel_is_an_error_in_strict_mode(monkeypatch):
    monkeypatch.setenv("TILELANG_STRICT", "1")
    with pytest.raises(TileLangError, match="gradient-dropped"):
        scale(torch.ones(4, requires_grad=True))


def test_a_kernel_wrote_a_leaf_that_requires_a_gradient():
    leaf = torch.ones(4, requires_grad=True)
    for call in (lambda: double_into(torch.ones(4), leaf), lambda: scale(torch.ones(4), out=leaf),
                 lambda: tilelang.torch_op(double_into, mutates=("Y",))(torch.ones(4), leaf)):
        with pytest.raises(TileLangError, match="writes `Y`, a leaf that requires a gradient") as e:
            call()
        assert e.value.kind == "kernel-gradient" and "torch.no_grad()" in e.value.hint
    assert (leaf == 1).all()


# ---- out= and names ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [torch.ones, lambda *s: np.ones(s, np.float32)], ids=["torch", "numpy"])
def test_results_had_no_place_of_the_callers(make):
    x, y = make(40), make(40) * 0
    assert scale(x, out=y) is y and (y == 2).all()
    assert scale(x, 3, out=y) is y and (y == 3).all()
    kernel = scale.compile(x)
    assert kernel(x, out=y) is y and (y == 2).all()
    assert kernel(X=x, out=(y,)) is y
    z = make(5) * 0
    assert rows(make(5, 7), out=z) is z and (z == 7).all()


def test_several_results_and_results_between_inputs():
    a, p, q = torch.ones(6), torch.zeros(6), torch.zeros(6, 2, dtype=torch.int32)
    got = both(6)(a, 5, out=(p, q))
    assert got[0] is p and got[1] is q and (p == 6).all() and (q[:, 0] == 5).all() and (q[:, 1] == torch.arange(6)).all()
    p0, q0 = both(6)(k=5, A=a)
    assert torch.equal(p0, p) and torch.equal(q0, q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_in_given_memory_on_each_backend(backend):
    kernel = tilelang.compile(scale.get_tir(torch.ones(8)), target="cpu", execution_backend=backend)
    y = torch.zeros(8)
    assert kernel(torch.ones(8), out=y) is y and (y == 2).all() and y._version == 1


def test_memory_that_does_not_fit_is_rejected():
    x = torch.ones(8)
    for out, text in ((torch.ones(9), r"input Y shape\[0\]"), (torch.ones(8, dtype=torch.float64), "input Y dtype mismatch"),
                      (torch.ones(16)[::2], "input Y.*compact|Y.strides.*compact"), (torch.ones(8, device="meta"), "input Y"),
                      ([torch.ones(8)] * 2, "returns 1 tensors, and out= gives 2"), (3, "input Y expected pointer or tensor")):
        with pytest.raises(TileLangError, match=text):
            scale(x, out=out)
    with pytest.raises(TileLangError, match="returns 0 tensors") as e:
        double_into(x, x.clone(), out=x)
    assert e.value.kind == "kernel-out"
    with pytest.raises(TileLangError, match="expected 2 inputs"):
        both(6)(x, out=(x, x))


def test_an_input_is_memory_for_a_result_too():
    x = torch.arange(8.0)
    scale(x, out=x)
    assert torch.equal(x, 2 * torch.arange(8.0))


def test_a_parameter_named_out_is_a_parameter():
    @tilelang.jit(target="cpu")
    def fill(out, value: T.float32):
        N = T.const("N")
        out: T.Tensor((N,), "float32")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(N):
                out[i] = value

    y = torch.zeros(4)
    assert fill(out=y, value=2.0) is None and (y == 2).all()
    fill.compile(out=y, value=2.0)(value=3.0, out=y)
    assert (y == 3).all()


def test_a_kernel_refused_its_inputs_by_name():
    kernel = both(4)
    x = torch.ones(4)
    assert (kernel(x, k=2)[0] == 3).all() and (kernel(k=2, A=x)[0] == 3).all()
    for given, kind, text in (({"A": x}, "kernel-keyword", "multiple values for input 'A'"),
                              ({"b": 1}, "kernel-keyword", "unexpected keyword argument 'b'"),
                              ({}, "kernel-arity", "2 inputs")):
        with pytest.raises(TileLangError, match=text) as e:
            kernel(x, **given)
        assert e.value.kind == kind
    with pytest.raises(TileLangError, match="`A` is missing"):
        kernel(k=1)


# ---- GPU ---------------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_calls_with_given_results_are_captured_by_a_cuda_graph():
    @tilelang.jit(target="cuda")
    def add_one(X):
        N = T.const("N")
        X: T.Tensor((N,), "float32")
        Y = T.empty((N,), "float32")
        with T.Kernel(T.ceildiv(N, 128), threads=128) as b:
            for i in T.Parallel(128):
                Y[b * 128 + i] = X[b * 128 + i] + 1
        return Y

    x, y, z = (torch.zeros(1000, device="cuda") for _ in range(3))
    add_one(x, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_one(x, out=y)
        add_one(y, out=z)
    x.fill_(4)
    graph.replay()
    assert (z == 6).all() and torch.equal(add_one(x), y)


@pytest.mark.parametrize("target", ["cpu", "simulator"])
def test_results_of_a_kernel_that_reads_none_of_its_tensors_were_torchs(target):
    """Once torch was in use, NumPy arrays in gave tensors out."""
    @T.prim_func
    def ones(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = 1.0

    kernel = tilelang.compile(ones, out_idx=[1], **({"target": "cpu"} if target == "cpu" else
                                                    {"target": "sm_90a", "execution_backend": "simulator"}))
    assert isinstance(kernel(torch.zeros(4)), torch.Tensor)
    assert isinstance(kernel(np.zeros(4, np.float32)), np.ndarray)
