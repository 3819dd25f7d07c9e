"""linear_attention against the recurrence in float64, forward and backward."""

import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import linear_attention
from tilelang.library.autograd import define
from tilelang.library.recurrent import decays as of
from tilelang.library.place import Place
from tilelang.target import Target

SM90 = {"kind": "cuda", "arch": "sm_90a"}


def tensors(dtype="float64", seq=70, heads=2, dim=16, dim_v=30, decays=3, gradient=True):
    import torch

    torch.manual_seed(0)
    out = [torch.randn(1, seq, heads, n, dtype=getattr(torch, dtype)) for n in (dim, dim, dim_v)]
    if decays:
        out.append(-torch.rand((1, seq, heads)[3 - decays:], dtype=torch.float64 if dtype == "float64" else torch.float32))
    return [x.requires_grad_(gradient) for x in out]


def recurrence(q, k, v, log_decay=None, scale=1.0):
    """The definition, step by step, in float64."""
    import torch

    q, k, v = (x.double() for x in (q, k, v))
    decays = torch.zeros(q.shape[:3]) if log_decay is None else log_decay.double().expand(q.shape[:3])
    state, out = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64), []
    for t in range(q.shape[1]):
        state = state * decays[:, t].exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None]
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) * scale)
    return torch.stack(out, 1)


@pytest.mark.parametrize("decays", [0, 1, 3])
def test_results_and_gradients_in_float64(decays):
    import torch

    given = tensors(decays=decays)
    out = linear_attention(*given, scale=0.5)
    want = recurrence(*given, scale=0.5)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), torch.autograd.grad(want.square().sum(), given))


@pytest.mark.parametrize("on", [None, pytest.param(SM90, marks=pytest.mark.slow)], ids=["cpu", "sm_90a"])
def test_half_precision(on):
    import torch

    given = tensors("float16", 100, 1, 64, 64)
    out = linear_attention(*given, target=on)
    want = recurrence(*given)
    assert (out - want).abs().max() <= 2.0**-8 * want.abs().max()
    do = torch.randn_like(out)
    for g, w in zip(torch.autograd.grad(out, given, do), torch.autograd.grad(want, given, do.double())):
        assert g.dtype in (torch.float16, torch.float32) and (g - w).abs().max() <= 2.0**-7 * w.abs().max()


def test_roundings_of_later_chunks_do_not_add_up_in_the_gradient_of_decays():
    import torch

    given = tensors("bfloat16", 500, 1, 64, 64)
    do = torch.randn(1, 500, 1, 64).bfloat16()
    found, = torch.autograd.grad(linear_attention(*given), given[3], do)
    want, = torch.autograd.grad(recurrence(*given), given[3], do.double())
    assert (found - want).norm() <= 2.0**-9 * want.norm()  # half the unit of bfloat16; 4 of these where sums go on to the end


def test_arrays_of_numpy_and_decays_of_heads():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 2, 16)) for _ in range(3))
    age = np.arange(70)[:, None] - np.arange(70)
    gamma = np.array([31 / 32, 63 / 64])
    weights = np.einsum("bthd,bshd->bhts", q, k) * np.where(age < 0, 0.0, gamma[:, None, None]**np.maximum(age, 0)) / 4
    got = linear_attention(q, k, v, np.log(gamma), scale=0.25)
    np.testing.assert_allclose(got, np.einsum("bhts,bshd->bthd", weights, v), atol=1e-12)


def test_operators():
    import torch

    given = tensors(seq=5, dim=16, dim_v=16)
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x), given, fast_mode=True)
    define("linear_attention")
    torch.library.opcheck(torch.ops.tilelang_library.linear_attention.default, (*given, 1.0, None),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    torch._dynamo.reset()
    model = torch.compile(lambda q, k, v: linear_attention(2 * q, k, v).square().sum(), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(model(*given[:3]), given[:3])
    out = linear_attention(2 * given[0], *given[1:3])
    torch.testing.assert_close(found, torch.autograd.grad(out.square().sum(), given[:3]))


@pytest.mark.parametrize("change", [{"v": np.zeros((1, 5, 2, 260))}, {"k": np.zeros((1, 6, 2, 16))},
                                    {"log_decay": np.zeros(3)}])
def test_wrong_arguments(change):
    x = np.zeros((1, 5, 2, 16))
    with pytest.raises(TileLangError, match="delta-argument"):
        linear_attention(**{**dict(q=x, k=x, v=x), **change})


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["", "rows", "columns"])
def test_nothing_is_spilled_for_hopper(keeps):
    form = of.PassForm((16, 128, 128), (False,) * 3, "float16", 1.0, True, keeps == "columns", keeps)
    kernel = of.fast_kernel(Place(Target(SM90)), of.linear_pass, form)
    assert kernel.n_spills == 0 and "wgmma" in str(kernel.report_data["kernels"][0]["instructions"])


@pytest.mark.gpu
def test_gradients_are_captured_in_a_cuda_graph():
    import torch

    q, k, v = (torch.randn(2, 300, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    do, decays = torch.randn_like(v), -torch.rand(2, device="cuda")
    want = torch.autograd.grad(linear_attention(q, k, v, decays), (q, k, v), do)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(linear_attention(q, k, v, decays), (q, k, v), do)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(got, want))
