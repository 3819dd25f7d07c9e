"""Functions with gradients as operators of torch: opcheck, whole graphs with symbolic sizes, what is computed and kept."""

import pytest
import torch

from tilelang.library.autograd import Function, Step, define, direct

CALLS: list[str] = []


def scaled(x, w, eps, y, total):
    y.copy_(x * w * eps)
    total.copy_(x.sum(1))


def scaled_backward(x, w, total, eps, wanted, dy, dx, dw):
    CALLS.append(f"backward, weight {wanted}")
    dx.copy_(dy * w * eps)
    if wanted:
        dw.copy_((dy * x * eps).sum(0))


SCALED = Function(
    "test_scaled",
    Step("Tensor x, Tensor w, float eps", lambda x, w, eps: [(tuple(x.shape), "float64"), ((x.shape[0],), "float64")],
         scaled, 2),
    Step("Tensor x, Tensor w, Tensor total, float eps, bool wanted, Tensor? dy",
         lambda x, w, total, eps, wanted, dy: [(tuple(x.shape), "float64"), (tuple(w.shape) if wanted else (0,), "float64")],
         scaled_backward, 2),
    lambda needs, args, made: (args[0], args[1], made[1], args[2], needs[1]), (0, 1))


def inputs(rows=3, gradient=True):
    g = torch.Generator().manual_seed(rows)
    return [torch.randn(s, dtype=torch.float64, generator=g, requires_grad=gradient) for s in ((rows, 5), (5,))]


def test_the_operators_pass_opcheck_and_gradcheck():
    x, w = inputs()
    define("test_scaled")
    assert torch.autograd.gradcheck(lambda x, w: SCALED(x, w, 2.0), (x, w))
    torch.library.opcheck(torch.ops.tilelang_library.test_scaled.default, (x, w, 2.0))
    grad = torch.ones(3, 5, dtype=torch.float64)
    kept = [t.detach() for t in (x, w)] + [torch.ones(3, dtype=torch.float64)]
    torch.library.opcheck(torch.ops.tilelang_library.test_scaled_backward.default, (*kept, 2.0, True, grad))


def test_a_whole_graph_takes_every_number_of_rows():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(lambda x, w: (SCALED(torch.relu(x), w, 2.0)**2).sum(), fullgraph=True, dynamic=True,
                          backend="aot_eager")
    for rows in (3, 4, 7):
        x, w = inputs(rows)
        found = torch.autograd.grad(model(x, w), (x, w))
        wanted = torch.autograd.grad(((torch.relu(x) * w * 2.0)**2).sum(), (x, w))
        torch.testing.assert_close(found, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_gradient_that_nobody_wants_is_not_computed():
    x, w = inputs()
    CALLS.clear()
    torch.autograd.grad(SCALED(x, w.detach(), 2.0).sum(), x)
    assert CALLS == ["backward, weight False"]


@pytest.mark.parametrize("how", ["numpy", "no_grad", "without", "wanted"])
def test_calls_without_a_gradient_go_to_the_kernel(how):
    given = inputs(gradient=how != "without")
    if how == "numpy":
        given = [x.detach().numpy() for x in given]
    with torch.set_grad_enabled(how != "no_grad"):
        assert direct(tuple(given)) == (how != "wanted")
