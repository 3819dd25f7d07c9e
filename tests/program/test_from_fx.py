"""torch.compile(backend="tilelang"): which operators of a graph become programs, and that they compute what torch does."""

import pytest

import tilelang
from tilelang.errors import TileLangError

torch = pytest.importorskip("torch")


def graph_and_inputs(model, x):
    """The ATen graph that torch makes of a model, and what it passes to that: parameters, buffers and arguments."""
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def keep(graph, _):
        def run(*args):
            found.append((graph, list(args[0]) if isinstance(args[0], list) else list(args)))
            return graph(*found[-1][1])

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))(x)
    (out,) = found
    return out


@pytest.mark.parametrize("name", ["LlamaBlock", "LatentBlock", "MixtralBlock", "BertLayer", "MixerBlock"])
def test_every_operator_of_a_block_is_known_and_computes_what_torch_does(name):
    import torch_blocks

    from tilelang.program.fx import graph_of, operator_of
    from tilelang.program.numpy_values import referenced

    torch.manual_seed(0)
    model, x = getattr(torch_blocks, name)().eval(), torch.randn(2, 19, 64)
    module, inputs = graph_and_inputs(model, x)
    assert [n.target for n in module.graph.nodes if n.op == "call_function" and operator_of(n) is None] == []
    graph = graph_of(module)
    with torch.no_grad():
        want = model.double()(x.double())
    (got,) = referenced(graph, inputs, {})
    assert (got - want).abs().max() < 2e-6


@pytest.mark.parametrize("name", ["LlamaBlock", "LatentBlock"])
def test_a_block_runs_compiled(name):
    import torch_blocks

    from tilelang.program.fx import FxProgram

    torch.manual_seed(0)
    model, x = getattr(torch_blocks, name)().eval(), torch.randn(2, 19, 64)
    module, inputs = graph_and_inputs(model, x)
    compiled = FxProgram(module)
    assert len(compiled.programs) == 1 and not compiled.left
    with torch.no_grad():
        got = compiled(*inputs)[0]
        want = model.double()(x.double())
    assert (got - want).abs().max() < 2e-6


def test_operators_that_are_not_known_stay_with_torch():

    from tilelang.program.fx import FxProgram

    def f(x):
        return torch.exp(torch.fft.rfft(x * 2 + 1).abs() * 3) + 1

    x = torch.rand(4, 16) * 0.1
    module, inputs = graph_and_inputs(f, x)
    compiled = FxProgram(module)
    assert len(compiled.programs) == 2 and any("fft" in reason for _, reason in compiled.left)
    assert torch.allclose(compiled(*inputs)[0], f(x), rtol=1e-4)


def test_a_view_as_another_type_stays_with_torch():
    x = torch.rand(4, 16)
    got = torch.compile(lambda x: (x * 2 + 1).view(torch.int32) - 5, backend=tilelang.from_fx)(x)
    assert torch.equal(got, (x * 2 + 1).view(torch.int32) - 5)


def test_torch_finds_the_backend_by_its_name():
    import pathlib

    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert "[project.entry-points.torch_dynamo_backends]\ntilelang = \"tilelang.program.fx:from_fx\"" in text


def test_from_fx_takes_graphs_of_torch_alone():
    with pytest.raises(TileLangError) as e:
        tilelang.from_fx(lambda x: x)
    assert e.value.kind == "program-fx" and "GraphModule" in str(e.value)
