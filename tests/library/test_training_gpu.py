"""Functions for training on a GPU at sizes of models: errors beside torch, the same bits, graphs, no waits for the device."""

import pytest

from tilelang.library import cross_entropy, grouped_matmul, layer_norm, linear_cross_entropy, rms_norm, softmax, swiglu

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.gpu
M, N, K, V = 4096, 4096, 1024, 50000


def labels(device="cuda"):
    t = torch.arange(M, device=device) * 7919 % V
    return torch.where(t % 17 == 0, -100, t)


SIZES = [1500, 0, 96, 2500]
# name -> (ours, torch's, shapes)
CASES = {
    "rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (N,), w, 1e-6), ((M, N), (N,))),
    "wide rms_norm": (rms_norm, lambda x, w: F.rms_norm(x, (20000,), w, 1e-6), ((500, 20000), (20000,))),
    "layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (N,), w, b), ((M, N), (N,), (N,))),
    "narrow layer_norm": (layer_norm, lambda x, w, b: F.layer_norm(x, (96,), w, b), ((100000, 96), (96,), (96,))),
    "softmax": (softmax, lambda x: x.softmax(-1), ((M, V),)),
    "cross_entropy": (lambda x: cross_entropy(x, labels()), lambda x: F.cross_entropy(x, labels()), ((M, V),)),
    "swiglu": (swiglu, lambda x: F.silu(x[:, :N]) * x[:, N:], ((M, 2 * N),)),
    "grouped_matmul": (lambda a, b: grouped_matmul(a, b, torch.tensor(SIZES, dtype=torch.int32).cuda()),
                       lambda a, b: torch.cat([x @ y for x, y in zip(a.split(SIZES), b)]), ((M, K), (4, K, N))),
    "linear_cross_entropy": (lambda x, w: linear_cross_entropy(x, w, labels()),
                             lambda x, w: F.cross_entropy(x @ w.t(), labels()), ((M, K), (V, K)))}


def drawn(shapes, dtype):
    g = torch.Generator("cuda").manual_seed(0)
    return [(torch.randn(s, device="cuda", generator=g) / (s[-1]**0.5 if len(s) > 1 and k else 1)).to(dtype).requires_grad_()
            for k, s in enumerate(shapes)]


def results(call, given, grad=None):
    out = call(*given)
    grad = torch.ones_like(out) if grad is None else grad.to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, given, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_at_most_those_of_torch(name, dtype):
    ours, theirs, shapes = CASES[name]
    given = drawn(shapes, dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    grad = torch.randn(theirs(*given).shape, device="cuda")
    wanted, found, usual = (results(f, x, grad) for f, x in ((theirs, exact), (ours, given), (theirs, given)))
    for want, got, other in zip(wanted, found, usual):
        error, least = (float((x.double() - want).norm()) for x in (got, other))
        assert error <= 1.5 * least + 2.0**-22 * float(want.norm())


@pytest.mark.parametrize("name", CASES)
def test_each_call_gives_the_same_bits(name):
    ours, _, shapes = CASES[name]
    given = drawn(shapes, torch.bfloat16)
    first = results(ours, given)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(results(ours, given), first))


@pytest.mark.parametrize("name", [n for n in CASES if n != "grouped_matmul"])  # whose sizes come from the host here
def test_a_graph_is_captured_and_nothing_waits_for_the_device(name):
    ours, _, shapes = CASES[name]
    given = drawn(shapes, torch.bfloat16)
    first = results(ours, given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(ours, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = results(ours, given)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(made, first))
