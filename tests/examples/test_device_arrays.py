"""References on a torch device are those of NumPy: checked with torch's CPU."""

import harness
import numpy as np
import pytest
from checks import CHECKS, load
from device_arrays import FUNCTIONS, UFUNCS, DeviceArray

torch = pytest.importorskip("torch")
ONE = {"negative", "absolute", "exp", "exp2", "log", "log2", "sqrt", "square", "tanh", "sin", "cos", "isnan", "isinf",
       "isfinite", "floor", "rint", "sign", "expm1", "log1p"}
LOGICAL = {"bitwise_and", "bitwise_or", "logical_and", "logical_or"}


@pytest.fixture
def device(monkeypatch):
    """wide gives DeviceArrays of any size."""
    monkeypatch.setattr(harness, "reference_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(harness, "LEAST_ON_DEVICE", 0)
    return lambda x: DeviceArray(torch.from_numpy(np.array(x)))


def same(got, want):
    assert np.shape(got) == np.shape(want)
    assert np.allclose(np.asarray(got), np.asarray(want), rtol=1e-14, equal_nan=True)


@pytest.mark.parametrize("name", sorted(UFUNCS))
def test_functions_of_elements(device, name):
    a, b = np.random.default_rng(0).uniform(0.5, 2, (2, 5, 5))
    f = getattr(np, name)
    if name in ONE:
        same(f(device(a)), f(a))
    elif name in ("invert", "logical_not"):
        same(f(device(a > 1)), f(a > 1))
    elif name in LOGICAL:
        same(f(device(a > 1), b > 1), f(a > 1, b > 1))
    else:
        for x, y in ((a, b), (a, b[0]), (a, a)):
            same(f(device(x), y), f(x, y))
            same(f(y, device(x)), f(y, x))
        if name != "matmul":
            same(f(device(a), 1.5), f(a, 1.5))
            same(f(2, device(a)), f(2, a))


def test_functions_of_arrays(device):
    x = np.random.default_rng(0).standard_normal((3, 4))
    d = device(x)
    calls = {
        "where": lambda v: np.where(v > 0, v, -1), "concatenate": lambda v: np.concatenate([v, x], 1),
        "stack": lambda v: np.stack([v, v], axis=1), "einsum": lambda v: np.einsum("ij,kj->ik", v, x),
        "pad": lambda v: np.pad(v, ((1, 0), (2, 3))), "broadcast_to": lambda v: np.broadcast_to(v, (2, 3, 4)),
        "zeros_like": np.zeros_like, "ones_like": np.ones_like, "cumsum": lambda v: np.cumsum(v, -1),
        "tril": lambda v: np.tril(v, -1), "flip": lambda v: np.flip(v, 0), "repeat": lambda v: np.repeat(v, 2, axis=1),
        "tile": lambda v: np.tile(v, 2), "sum": lambda v: np.sum(v, axis=1), "max": lambda v: np.max(v, axis=0),
        "argmax": lambda v: np.argmax(v), "swapaxes": lambda v: np.swapaxes(v, 0, 1), "transpose": lambda v: np.transpose(v),
        "reshape": lambda v: np.reshape(v, (2, 6)), "expand_dims": lambda v: np.expand_dims(v, 1),
        "clip": lambda v: np.clip(v, -0.5, 0.5), "ndim": np.ndim, "sort": lambda v: np.sort(v),
        "solve": lambda v: np.linalg.solve(v[:, :3] + 4 * np.eye(3), v),
    }
    assert set(calls) == set(FUNCTIONS)
    for call in calls.values():
        same(call(d), call(x))
    same(np.quantile(d, 0.5, axis=0), np.quantile(x, 0.5, axis=0))  # not listed: by NumPy
    same(np.maximum.accumulate(d, 1), np.maximum.accumulate(x, 1))
    same(np.add.reduce(d, 1), np.add.reduce(x, 1))


def test_methods_and_indices(device):
    x = np.random.default_rng(0).standard_normal((3, 4))
    for f in (lambda v: v.T, lambda v: v[1], lambda v: v[..., ::-1], lambda v: v[np.array([2, 0])], lambda v: v[None, :, 1:3],
              lambda v: v.sum(1, keepdims=True), lambda v: v.mean(), lambda v: v.max(), lambda v: v[:0].max(initial=-1.0),
              lambda v: v.min((0, 1)), lambda v: v.max(0, initial=2.0), lambda v: v.repeat(2, 0), lambda v: v.swapaxes(0, 1),
              lambda v: v.astype(np.float32), lambda v: v.reshape(4, -1), lambda v: -v + 2 * v ** 2 / (1 + abs(v))):
        same(f(device(x)), f(x))
    d = device(x)
    d[0] = x[1]
    d[1:, 0] = 7
    d /= 2
    want = x.copy()
    want[0], want[1:, 0] = x[1], 7
    same(d, want / 2)
    assert float(device(np.array(2.5))) == 2.5 and bool((d == d).all()) and len(d) == 3 and d.dtype == np.float64


@pytest.mark.parametrize("check", [c for c in CHECKS if c.file in (
    "gemm/fp8.py", "normalization/layer_norm.py", "attention/flash_backward.py", "attention/gated_delta.py",
    "attention/kda_backward.py", "attention/mamba2_backward.py", "scan/scan.py")],
    ids=lambda c: c.id)
def test_examples_agree_with_references_on_a_device(device, check):
    """And a wrong result is still seen."""
    results = getattr(load(check.file), check.function)(on=harness.Place("cpu"), **check.small)
    for result in results if isinstance(results, (list, tuple)) else [results]:
        assert result.ok, str(result)
    assert not harness.compare("wrong", np.full(4, np.nan), harness.wide(np.zeros(4)), 1.0).ok
    assert not harness.compare("one", [0, 0, 1.5], harness.wide(np.zeros(3)), harness.wide(np.array([2.0, 2, 1]))).ok


def test_attention_of_some_heads_at_a_time_is_that_of_all(monkeypatch):
    visible = load("attention/flash_forward.py").visible
    import attention_harness  # beside it

    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 8, 5, 4)), rng.standard_normal((2, 2, 6, 4)), rng.standard_normal((2, 2, 6, 4))
    options = dict(keep=visible(5, 6, True, 0), bias=rng.standard_normal((1, 8, 1, 1)), sink=rng.standard_normal(8))
    whole = attention_harness.attention(q, k, v, **options)
    for most in (60, 130, 240, 300, 400):
        monkeypatch.setattr(attention_harness, "MOST_SCORES", most)
        for got, want in zip(attention_harness.attention(q, k, v, **options), whole):
            same(got, want)
