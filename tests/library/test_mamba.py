"""mamba2 and its gradients against the recurrence in float64, on the CPU and on simulators of GPUs."""

import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import mamba2, retention
from tilelang.library.autograd import define
from tilelang.library.recurrent import mamba

MACHINES = {"cpu": None, "sm_80": {"kind": "cuda", "arch": "sm_80"}, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
            "gfx942": {"kind": "hip", "mcpu": "gfx942"}}
NAMES = "x", "dt", "a", "b", "c", "d", "initial"
# batch, seq, heads, groups, P, N
SIZES = [(1, 100, 2, 1, 64, 64), (2, 70, 2, 2, 32, 44)]


def drawn(torch, batch, seq, heads, groups, p, n, kind="float64"):
    """The inputs by name, and the gradients of both results, exact in `kind`."""
    g = torch.Generator().manual_seed(seq)
    element = getattr(torch, kind)
    x, b, c, dy = (torch.randn(batch, seq, m, w, generator=g).to(element) for m, w in
                   ((heads, p), (groups, n), (groups, n), (heads, p)))
    dt, a = torch.rand(batch, seq, heads, generator=g) * 0.3 + 0.01, -torch.rand(heads, generator=g) * 2 - 0.1
    d, initial, dlast = torch.randn(heads, generator=g), *(torch.randn(batch, heads, p, n, generator=g) for _ in (0, 1))
    wide = torch.float64 if kind == "float64" else torch.float32
    return [x, dt.to(wide), a.to(wide), b, c, d.to(wide), initial.to(wide)], [dy, dlast.to(wide)]


def recurrence(torch, x, dt, a, b, c, d, initial):
    """(outputs, last state), a step at a time."""
    each, state, ys = x.shape[2] // b.shape[2], initial, []
    b, c = (z.repeat_interleave(each, 2) for z in (b, c))
    for t in range(x.shape[1]):
        state = torch.exp(a * dt[:, t])[..., None, None] * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        ys.append((state * c[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(ys, 1), state


def results(torch, call, given, grads):
    given = [z.clone().requires_grad_() for z in given]
    made = call(*given)
    return [z.detach() for z in made] + list(torch.autograd.grad(made, given, grads))


def ours(target=None):
    return lambda x, dt, a, b, c, d, initial: mamba2(x, dt, a, b, c, d, initial=initial, target=target)


@pytest.mark.parametrize("sizes", SIZES)
def test_float64_is_exact(sizes):
    torch = pytest.importorskip("torch")
    given, grads = drawn(torch, *sizes)
    found = results(torch, ours(), given, grads)
    for got, want in zip(found, results(torch, lambda *z: recurrence(torch, *z), given, grads)):
        assert (got - want).norm() <= 1e-12 * want.norm()


@pytest.mark.slow
@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_results_and_gradients_are_those_of_the_recurrence(sizes, kind, where):
    torch = pytest.importorskip("torch")
    given, grads = drawn(torch, *sizes, kind)
    found = results(torch, ours(MACHINES[where]), given, grads)
    wide = [[z.double() for z in zs] for zs in (given, grads)]
    unit = torch.finfo(getattr(torch, kind)).eps / 2
    for got, want in zip(found, results(torch, lambda *z: recurrence(torch, *z), *wide)):
        assert (got.double() - want).norm() <= 4 * unit * want.norm()  # several roundings of operands


@pytest.mark.slow
def test_states_are_loaded_in_pieces_where_a_block_has_no_room(monkeypatch):
    torch = pytest.importorskip("torch")
    first = mamba.fitting_kernel
    monkeypatch.setattr(mamba, "fitting_kernel", lambda at, make, *forms: first(
        at, make, *(f for f in forms if make is not mamba.gradients or f.pieces == 2 and f.length == 32)))
    given, grads = drawn(torch, 1, 40, 1, 1, 16, 128)
    found = results(torch, ours(), given, grads)
    for got, want in zip(found, results(torch, lambda *z: recurrence(torch, *z), given, grads)):
        assert (got - want).norm() <= 1e-12 * want.norm()


@pytest.mark.slow
def test_the_largest_states_have_gradients_on_a_gpu():
    torch = pytest.importorskip("torch")
    given, grads = drawn(torch, 1, 70, 1, 1, 256, 256, "bfloat16")
    found = results(torch, ours(MACHINES["sm_90a"]), given, grads)
    wide = [[z.double() for z in zs] for zs in (given, grads)]
    for got, want in zip(found, results(torch, lambda *z: recurrence(torch, *z), *wide)):
        assert (got.double() - want).norm() <= 2.0**-6 * want.norm()


def test_gradcheck_and_opcheck():
    torch = pytest.importorskip("torch")
    given, _ = drawn(torch, 1, 3, 1, 1, 16, 16)
    given = [z.requires_grad_() for z in given]
    assert torch.autograd.gradcheck(ours(), given, fast_mode=True)
    define("mamba2")
    torch.library.opcheck(torch.ops.tilelang_library.mamba2, (*given, None))


def test_a_call_without_d_and_initial_is_compiled_whole():
    torch = pytest.importorskip("torch")
    (x, dt, a, b, c, *_), (dy, _) = drawn(torch, 1, 70, 2, 1, 16, 16)

    def loss(x, b):
        y, last = mamba2(x * 2, dt, a, b, c)
        return (y * dy).sum() + last.sum()

    def gradients(f):
        given = [z.clone().requires_grad_() for z in (x, b)]
        return torch.autograd.grad(f(*given), given)

    for got, want in zip(gradients(torch.compile(loss, fullgraph=True, backend="aot_eager")), gradients(loss)):
        assert torch.equal(got, want)


def test_retention_is_a_sum_over_pairs():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 2, n)).astype(np.float16) for n in (16, 16, 32))
    gamma = np.float32([0.9, 0.99])
    out, state = retention(q, k, v, np.log(gamma), scale=0.25)
    age = np.maximum(np.arange(70)[:, None] - np.arange(70), 0)
    decay = np.tril(gamma.astype(np.float64)[:, None, None] ** age)
    want = np.einsum("bthk,bshk,hts,bshv->bthv", *(x.astype(np.float64) for x in (q * np.float16(0.25), k, decay, v)))
    assert np.linalg.norm(out - want) <= 2.0**-9 * np.linalg.norm(want) and state.shape == (1, 2, 32, 16)


def test_numpy_arrays_and_empty_sequences():
    rng = np.random.default_rng(0)
    x, b, c = (rng.standard_normal((1, 0, n, 64)).astype(np.float16) for n in (2, 1, 1))
    dt, a, state = np.zeros((1, 0, 2), np.float32), -np.ones(2, np.float32), np.ones((1, 2, 64, 64), np.float32)
    y, last = mamba2(x, dt, a, b, c, initial=state)
    assert y.shape == x.shape and (last == 1).all()


@pytest.mark.parametrize("change", [dict(x=np.zeros((1, 64, 2, 260), np.float16)), dict(b=np.zeros((1, 60, 1, 64), np.float16)),
                                    dict(dt=np.zeros((1, 2, 64), np.float32)), dict(a=np.zeros(2, np.float16))])
def test_arguments_that_do_not_go_together_are_rejected(change):
    x, b = (np.zeros((1, 64, n, 64), np.float16) for n in (2, 1))
    given = {**dict(x=x, dt=np.zeros((1, 64, 2), np.float32), a=np.zeros(2, np.float32), b=b, c=b), **change}
    with pytest.raises(TileLangError, match=r"error\[ssd-argument\]"):
        mamba2(**given)
