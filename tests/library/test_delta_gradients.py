"""Gradients of gated_delta and kda against those of the recurrence in float64."""

import pytest

from tilelang.library import gated_delta, kda
from tilelang.library.autograd import define

torch = pytest.importorskip("torch")
MACHINES = {"cpu": None, "sm_80": {"kind": "cuda", "arch": "sm_80"}, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
            "gfx942": {"kind": "hip", "mcpu": "gfx942"}}
FUNCTIONS = {"gated_delta": gated_delta, "kda": kda}
# batch, seq, key heads, heads, dim_k, dim_v
SIZES = [(1, 70, 1, 2, 64, 64), (2, 100, 1, 1, 128, 128)]


def drawn(name, batch, seq, key_heads, heads, dim_k, dim_v, kind="float64", strength=0.2):
    """The inputs, and the gradients of both results, exact in `kind`."""
    g = torch.Generator().manual_seed(seq)
    element, wide = getattr(torch, kind), torch.float64 if kind == "float64" else torch.float32
    q, k = (torch.nn.functional.normalize(torch.randn(batch, seq, key_heads, dim_k, generator=g), dim=-1).to(element)
            for _ in (0, 1))
    v, do = (torch.randn(batch, seq, heads, dim_v, generator=g).to(element) for _ in (0, 1))
    row = batch, seq, heads
    decay = -strength * torch.empty((*row, dim_k) if name == "kda" else row).exponential_(generator=g)
    state, dlast = (torch.randn(batch, heads, dim_k, dim_v, generator=g).to(wide) for _ in (0, 1))
    return [q, k, v, decay.to(wide), torch.rand(row, generator=g).to(wide), state], [do, dlast]


def recurrence(q, k, v, log_alpha, beta, state):
    """(outputs, last state), a step at a time."""
    each, outs = v.shape[2] // q.shape[2], []
    q, k = (x.repeat_interleave(each, 2) for x in (q, k))
    alpha = log_alpha.clamp(min=-20).exp().reshape(*log_alpha.shape[:3], -1, 1)
    for t in range(q.shape[1]):
        state = alpha[:, t] * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outs.append(0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1), state


def results(call, given, grads):
    given = [x.clone().requires_grad_() for x in given]
    made = call(*given)
    return [x.detach() for x in made] + list(torch.autograd.grad(made, given, grads))


def ours(name, target=None):
    return lambda q, k, v, log_alpha, beta, state: FUNCTIONS[name](q, k, v, log_alpha, beta, initial=state, scale=0.5,
                                                                   target=target)


@pytest.mark.parametrize("strength", [pytest.param(0.2, marks=pytest.mark.slow), 10])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_is_exact(name, strength):
    given, grads = drawn(name, 1, 100, 1, 2, 64, 64, strength=strength)
    if strength > 1:
        given[3][0, 10:14], given[3][0, 40:60] = -100, 0
    for got, want in zip(results(ours(name), given, grads), results(recurrence, given, grads)):
        assert (got - want).norm() <= 1e-11 * want.norm()


@pytest.mark.slow
@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_recurrence(name, sizes, kind, where):
    given, grads = drawn(name, *sizes, kind)
    found = results(ours(name, MACHINES[where]), given, grads)
    wide = [[x.double() for x in xs] for xs in (given, grads)]
    unit = torch.finfo(getattr(torch, kind)).eps / 2
    for got, want in zip(found, results(recurrence, *wide)):
        assert (got.double() - want).norm() <= 4 * unit * want.norm()  # several roundings of operands


@pytest.mark.parametrize("name, limit", [("gated_delta", 0.55), ("kda", 1.0)])  # 0.68, 1.36 where each step rounds its side
def test_pairs_on_one_side_of_a_decay_cancel_in_its_gradient(name, limit):
    given, grads = drawn(name, 1, 200, 1, 2, 64, 64, "bfloat16")
    found, want = (results(f, x, dx)[5] for f, x, dx in ((ours(name), given, grads), (
        recurrence, [x.double() for x in given], [x.double() for x in grads])))
    assert (found - want).norm() <= limit * 2.0**-8 * want.norm()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck_and_opcheck(name):
    given, _ = drawn(name, 1, 3, 1, 2, 64, 64)
    given = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(ours(name), given, fast_mode=True)
    found, want = (results(f, *drawn(name, 1, 3, 1, 2, 50, 40)) for f in (ours(name), recurrence))
    assert all((x - y).norm() <= 1e-11 * y.norm() for x, y in zip(found, want))  # with zeros behind
    define(name)
    torch.library.opcheck(getattr(torch.ops.tilelang_library, name), (*given, 0.5, None))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_without_an_initial_state_is_compiled_whole(name):
    (q, k, v, decay, beta, _), (do, _) = drawn(name, 1, 70, 1, 2, 64, 64)

    def loss(q, v):
        return (FUNCTIONS[name](q * 2, k, v, decay, beta)[0] * do).sum()

    def gradients(f):
        given = [x.clone().requires_grad_() for x in (q, v)]
        return torch.autograd.grad(f(*given), given)

    for got, want in zip(gradients(torch.compile(loss, fullgraph=True, backend="aot_eager")), gradients(loss)):
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_keys_of_more_than_128_channels(name):
    given, grads = drawn(name, 1, 40, 1, 1, 192, 64, "float64" if name == "kda" else "bfloat16")
    exact = [x.double() for x in given]
    for got, want in zip(results(ours(name), given, grads), results(recurrence, exact, [x.double() for x in grads])):
        assert (got.double() - want).norm() <= 2.0**-6 * want.norm() + 1e-9
