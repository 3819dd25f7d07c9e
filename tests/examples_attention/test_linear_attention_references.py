"""References of the linear attentions, which treat all steps at once, are the recurrences step by step and their gradients."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # examples are no package

import checks

torch = pytest.importorskip("torch")


def variables(arrays):
    import harness

    return [torch.tensor(harness.wide(x), requires_grad=True) for x in arrays]


def agree(found, results, inputs, upstream):
    """found: results, then gradients of all inputs, in order."""
    results.backward(torch.tensor(upstream))
    for got, want in zip(found, [results.detach(), *(x.grad for x in inputs)], strict=True):
        assert np.allclose(got, want.numpy(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("channels", [False, True])
def test_delta_rules(channels):
    import harness

    checks.load("attention/gated_delta.py")  # makes its folder importable
    import delta_rule

    arrays = delta_rule.inputs(2, 3, 40, 8, 6, "bfloat16", 0, channels)
    inputs = q, k, v, log_alpha, beta = variables(arrays[:-1])
    state, steps = torch.zeros(2, 3, 8, 6, dtype=torch.float64), []
    for t in range(40):
        past = torch.exp(log_alpha[:, t, :, :, None] if channels else log_alpha[:, :, t, None, None]) * state
        missing = v[:, t] - torch.einsum("bhkv,bhk->bhv", past, k[:, t])
        state = past + torch.einsum("bh,bhk,bhv->bhkv", beta[:, :, t], k[:, t], missing)
        steps.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    agree(delta_rule.reference(*(harness.wide(x) for x in arrays)), torch.stack(steps, 1), inputs, harness.wide(arrays[-1]))


def test_mamba2(monkeypatch):
    import harness

    mamba2 = checks.load("attention/mamba2.py")
    arrays = mamba2.inputs(2, 40, 4, 2, 6, 8, "float16", 0)
    inputs = x, dt, A, B, C, D = variables(arrays[:-1])
    state, steps = torch.zeros(2, 4, 6, 8, dtype=torch.float64), []
    of_heads = [z.repeat_interleave(2, 2) for z in (B, C)]
    for t in range(40):
        b, c = (z[:, t] for z in of_heads)
        state = torch.exp(A * dt[:, :, t])[..., None, None] * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, :, t], x[:, t], b)
        steps.append(torch.einsum("bhpn,bhn->bhp", state, c) + D[:, None] * x[:, t])
    wide = [harness.wide(z) for z in arrays]
    whole = mamba2.reference(*wide)
    agree(whole, torch.stack(steps, 1), inputs, wide[-1])
    monkeypatch.setattr(mamba2.harness, "MOST_SCORES", 1)  # one head at a time
    for one, all_heads in zip(mamba2.reference(*wide), whole, strict=True):
        assert np.allclose(one, all_heads, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_by_splitting_is_the_rounding_of_the_type(dtype):
    import harness

    checks.load("attention/gated_delta.py")
    import attention_harness

    x = np.random.default_rng(0).standard_normal(10000) * 10
    rounded = attention_harness.rounding(dtype)(x)
    assert np.array_equal(rounded, x.astype(harness.NUMPY[dtype]).astype(np.float64))
    scaled = attention_harness.rounding(dtype, 1.17)(rounded)
    assert np.all(np.abs(scaled - rounded) <= np.abs(rounded) * harness.EPS[dtype]) and np.mean(scaled != rounded) > 0.9
