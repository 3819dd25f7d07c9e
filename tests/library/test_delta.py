"""gated_delta and kda against the recurrence in float64, on the CPU and on simulators of GPUs."""

import ml_dtypes
import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import gated_delta, kda

MACHINES = {"cpu": None, "sm_80": {"kind": "cuda", "arch": "sm_80"}, "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
            "gfx942": {"kind": "hip", "mcpu": "gfx942"}}
EACH = ["cpu", "sm_80", "sm_90a", pytest.param("gfx942", marks=pytest.mark.slow)]
# batch, seq, key heads, heads, dim_k, dim_v, type
SIZES = [(1, 100, 1, 2, 64, 64, np.float16), (2, 65, 1, 1, 128, 64, ml_dtypes.bfloat16), (1, 192, 1, 1, 64, 128, np.float16),
         (2, 1, 1, 2, 128, 64, np.float16), (1, 7, 1, 1, 64, 128, ml_dtypes.bfloat16)]
FUNCTIONS = {"gated_delta": gated_delta, "kda": kda}
UNIT = {np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}


def inputs(name, batch, seq, key_heads, heads, dim_k, dim_v, kind, strength=0.2):
    rng = np.random.default_rng(seq)
    q, k = (rng.standard_normal((batch, seq, key_heads, dim_k)) for _ in range(2))
    q, k = ((x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(kind) for x in (q, k))
    row = (batch, seq, heads)
    log_alpha = -strength * rng.exponential(size=(*row, dim_k) if name == "kda" else row)
    return (q, k, rng.standard_normal((*row, dim_v)).astype(kind), log_alpha.astype(np.float32), rng.random(row, np.float32),
            rng.standard_normal((batch, heads, dim_k, dim_v)).astype(np.float32))


def recurrence(q, k, v, log_alpha, beta, state, scale):
    """(outputs, last state) in float64, a step at a time."""
    each = v.shape[2] // q.shape[2]
    q, k = (x.astype(np.float64).repeat(each, 2) for x in (q, k))
    v, alpha, state = v.astype(np.float64), np.exp(log_alpha.astype(np.float64)), state.astype(np.float64)
    alpha = alpha.reshape(*alpha.shape[:3], -1, 1)
    outs = []
    for t in range(q.shape[1]):
        state = alpha[:, t] * state
        u = beta[:, t, :, None] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outs.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(outs, 1), state


def close(got, want, kind):
    """Operands of each GEMM are rounded to 16 bits: errors of several roundings, against the norm of the result."""
    return np.linalg.norm(got.astype(np.float64) - want) <= 2 * UNIT[kind] * np.linalg.norm(want)


@pytest.mark.parametrize("where", EACH)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_and_last_state_are_those_of_the_recurrence(name, sizes, where):
    *given, state = inputs(name, *sizes)
    out, last = FUNCTIONS[name](*given, initial=state, scale=0.5, target=MACHINES[where])
    want, want_last = recurrence(*given, state, 0.5)
    assert close(out, want, sizes[-1]) and close(last, want_last, sizes[-1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_decays_may_be_of_any_strength(name):
    for kind in UNIT:
        q, k, v, log_alpha, beta, state = inputs(name, 1, 100, 1, 1, 64, 64, kind, strength=10)
        log_alpha[0, 10:14], log_alpha[0, 40:60] = -np.inf, 0
        out, last = FUNCTIONS[name](q, k, v, log_alpha, beta, initial=state)
        want, want_last = recurrence(q, k, v, log_alpha, beta, state, 64**-0.5)
        assert close(out, want, kind) and close(last, want_last, kind)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sequence_may_be_continued_from_the_last_state(name):
    *given, _ = inputs(name, 1, 150, 1, 1, 64, 64, np.float16)
    out, last = FUNCTIONS[name](*given)
    first, state = FUNCTIONS[name](*(x[:, :70] for x in given))
    second, end = FUNCTIONS[name](*(x[:, 70:] for x in given), initial=state)
    assert close(np.concatenate([first, second], 1), out.astype(np.float64), np.float16) and close(end, last, np.float16)
    nothing, same = FUNCTIONS[name](*(x[:, :0] for x in given), initial=state)
    assert nothing.shape == (1, 0, 1, 64) and (same == state).all()


@pytest.mark.parametrize("change", [dict(q=np.zeros((1, 64, 1, 80), np.float16)), dict(k=np.zeros((1, 60, 1, 64), np.float16)),
                                    dict(v=np.zeros((1, 64, 1, 80), np.float16)), dict(beta=np.zeros((1, 64, 1), np.float16)),
                                    dict(log_alpha=np.zeros((1, 64, 1, 32), np.float32)),
                                    dict(initial=np.zeros((1, 1, 64, 64), np.float16))])
def test_arguments_that_do_not_go_together_are_rejected(change):
    names = "q", "k", "v", "log_alpha", "beta", "initial"
    given = {**dict(zip(names, inputs("kda", 1, 64, 1, 1, 64, 64, np.float16))), **change}
    with pytest.raises(TileLangError, match=r"error\[delta-argument\]"):
        kda(**given)
