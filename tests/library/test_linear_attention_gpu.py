"""Linear attention on a GPU: errors beside float64, the same bits, graphs, no waits for the device."""

import pytest
import test_delta_gradients as delta
import test_mamba as ssm

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
NAMES = "mamba2", "gated_delta", "kda"


def case(name, seq, kind):
    """The function, the recurrence, the inputs and the gradients of the results."""
    if name == "mamba2":
        call, want = ssm.ours(), lambda *z: ssm.recurrence(torch, *z)
        drawn = ssm.drawn(torch, 2, seq, 4, 1, 64, 128, kind)
    else:
        call, want, drawn = delta.ours(name), delta.recurrence, delta.drawn(name, 2, seq, 1, 2, 128, 128, kind)
    return call, want, *([x.cuda() for x in xs] for xs in drawn)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_the_recurrence(name, kind):
    call, recurrence, given, grads = case(name, 600, kind)
    wide = [[x.double() for x in xs] for xs in (given, grads)]
    unit = torch.finfo(getattr(torch, kind)).eps / 2
    for got, want in zip(delta.results(call, given, grads), delta.results(recurrence, *wide)):
        assert (got.double() - want).norm() <= 4 * unit * want.norm()


@pytest.mark.parametrize("name", NAMES)
def test_each_call_gives_the_same_bits(name):
    call, _, given, grads = case(name, 3000, "bfloat16")
    first = delta.results(call, given, grads)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(delta.results(call, given, grads), first))


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_is_captured_and_nothing_waits_for_the_device(name):
    call, _, given, grads = case(name, 600, "bfloat16")
    first = delta.results(call, given, grads)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        delta.results(call, given, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = delta.results(call, given, grads)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(made, first))
