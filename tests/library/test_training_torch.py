"""Functions for training with torch: gradcheck in float64, opcheck, whole graphs for every number of rows, what is saved."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tilelang.library import cross_entropy, layer_norm, rms_norm, softmax, swiglu

N = 24


def tensor(*shape, kind=torch.float64, seed=0):
    return torch.randn(shape, dtype=kind, generator=torch.Generator().manual_seed(seed + len(shape))).requires_grad_()


def labels(rows):
    return (torch.arange(2 * rows) * 7 % N).index_fill(0, torch.tensor([2]), -100)[::2]


# name -> (operator, ours, torch's, the shapes of the tensors with gradients for `rows` rows)
ENTROPY = {"label_smoothing": 0.1, "reduction": "mean"}
CASES = {
    "rms_norm": ("rms_norm", lambda x, w: rms_norm(x, w, eps=1e-5), lambda x, w: F.rms_norm(x, (N,), w, 1e-5),
                 lambda rows: ((rows, N), (N,))),
    "layer_norm": ("layer_norm", lambda x, w, b: layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (N,), w, b),
                   lambda rows: ((rows, N), (N,), (N,))),
    "plain norm": ("layer_norm", lambda x: layer_norm(x), lambda x: F.layer_norm(x, (N,)), lambda rows: ((2, rows, N),)),
    "softmax": ("softmax", lambda x: softmax(x), lambda x: x.softmax(-1), lambda rows: ((2, rows, N),)),
    "cross_entropy": ("cross_entropy", lambda x: cross_entropy(x, labels(x.shape[0]), **ENTROPY),
                      lambda x: F.cross_entropy(x, labels(x.shape[0]), **ENTROPY), lambda rows: ((rows, N),)),
    "swiglu": ("swiglu", lambda x, y: swiglu(x, y), lambda x, y: F.silu(x) * y, lambda rows: ((rows, N), (rows, N))),
    "packed swiglu": ("swiglu", lambda x: swiglu(x), lambda x: F.silu(x[..., :N]) * x[..., N:], lambda rows: ((rows, 2 * N),))}
each = pytest.mark.parametrize("name", CASES)


def inputs(name, rows, kind=torch.float64):
    return [tensor(*shape, kind=kind, seed=k) for k, shape in enumerate(CASES[name][3](rows))]


def mixed(out):
    """A number to which elements contribute differently."""
    return (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()).sum()


@each
def test_gradients_are_those_of_differences_and_of_torch(name):
    given = inputs(name, 4)
    assert torch.autograd.gradcheck(CASES[name][1], given, fast_mode=True)
    for ours, theirs in zip(*(torch.autograd.grad(mixed(f(*given)), given) for f in CASES[name][1:3])):
        torch.testing.assert_close(ours, theirs)


@each
def test_operators_pass_opcheck(name):
    operator, ours, *_ = CASES[name]
    calls = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "tilelang_library":
                calls.append((op, args))
            return op(*args, **(kwargs or {}))

    given = inputs(name, 3)
    with Seen():
        mixed(ours(*given)).backward()
    assert [op._opname for op, _ in calls] == [operator, f"{operator}_backward"]
    for op, args in calls:
        args = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op, args, test_utils=checks if op is calls[0][0] else checks[:2])


@each
def test_a_compiled_graph_takes_every_number_of_rows(name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, ours, theirs, _ = CASES[name]
    model = torch.compile(lambda *given: mixed(ours(*given) * 2), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 4, 9):
        given = inputs(name, rows, torch.float32)
        found = torch.autograd.grad(model(*given), given)
        wanted = torch.autograd.grad(mixed(theirs(*given) * 2), given)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name, bytes_", [("rms_norm", 5 * N * 2 + N * 2 + 5 * 4),
                                          ("layer_norm", 5 * N * 2 + 2 * N * 2 + 5 * 8), ("softmax", 2 * 5 * N * 2),
                                          ("cross_entropy", 5 * N * 2 + 5 * 8 + 5 * 4 + 4), ("swiglu", 2 * 5 * N * 2)])
def test_what_is_saved(name, bytes_):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        CASES[name][1](*inputs(name, 5, torch.bfloat16))
    assert sum(sizes) == bytes_


def test_types_of_gradients_and_views():
    """Gradients have the types of their tensors; x and its gradient may be views of other tensors."""
    x, w = tensor(8, N, kind=torch.bfloat16), tensor(N, kind=torch.float32)
    out = rms_norm(x.t().contiguous().t()[::2, :], w)
    dx, dw = torch.autograd.grad(out, (x, w), torch.ones(N, 4).t())
    assert (out.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    want = torch.autograd.grad((F.rms_norm(x[::2].double(), (N,), None, 1e-6) * w).sum(), (x, w))
    torch.testing.assert_close(dw, want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.float(), want[0].float(), rtol=2**-7, atol=2**-7)


@pytest.mark.slow
def test_a_block_of_a_model_compiles_with_inductor():
    """A norm, a gated layer and the loss in one graph, forward and backward."""
    torch._dynamo.reset()
    x, w, up, down = tensor(6, N, kind=torch.float32), *(tensor(*s, kind=torch.float32, seed=k) for k, s in enumerate(
        ((N,), (2 * N, N), (N, N))))

    def block(x, w, up, down, norm, gate, loss):
        return loss(x + gate(norm(x, w) @ up.t()) @ down.t(), labels(6))

    ours = torch.compile(lambda *given: block(*given, rms_norm, swiglu, cross_entropy), fullgraph=True)
    given = x, w, up, down
    found = torch.autograd.grad(ours(*given), given)
    wanted = torch.autograd.grad(block(*given, lambda x, w: F.rms_norm(x, (N,), w, 1e-6), CASES["packed swiglu"][2],
                                       F.cross_entropy), given)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_numbers_of_numpy_and_torch_are_the_same():
    x = tensor(5, N, kind=torch.float32)
    np.testing.assert_array_equal(rms_norm(x.detach().numpy()), rms_norm(x).detach().numpy())
