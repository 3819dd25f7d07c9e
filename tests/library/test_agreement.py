"""How far results that were summed in different orders may differ (library/agreement.py)."""

import ml_dtypes
import numpy as np
import pytest

from tilelang.library.agreement import ROUNDING, attention_agrees, gemms_agree, magnitude, within


def normal(shape, element=np.float16, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(element)


@pytest.mark.parametrize("element", [*sorted(ROUNDING), "int8", "uint8"])
def test_magnitudes_of_every_type(element):
    kind = np.dtype(getattr(ml_dtypes, element, None) or element)
    x = np.array([[1, 0, 100]]).astype(kind)
    y = x if element == "uint8" else (-x.astype(np.float32)).astype(kind)
    assert magnitude(y).dtype == kind and (magnitude(y) == x).all() and magnitude(None) is None
    if element == "int8":
        assert magnitude(np.int8([-128])) == 127


@pytest.mark.parametrize("element", sorted(ROUNDING))
def test_two_roundings_of_one_number(element):
    """Neighbours in the type may be results of the same sum, their neighbours not; infinity is the largest number."""
    kind = np.dtype(getattr(ml_dtypes, element, None) or element)
    one = np.ones((1, 1)).astype(kind)
    bits = one.view(f"u{kind.itemsize}")
    steps = [(bits + n).astype(bits.dtype).view(kind) for n in (1, 4)]
    zero = lambda part: 0.0  # noqa: E731
    assert within(one, steps[0], zero) and not within(one, steps[1], zero)
    if element in ("float16", "float32", "float64"):
        most = np.array([[np.finfo(kind).max]], kind)
        assert within(most, np.array([[np.inf]], kind), zero) and not within(most, -most, zero)


def test_what_is_not_a_number():
    nan, one = np.array([[np.nan, 1.0]]), np.array([[1.0, 1.0]])
    assert within(nan, nan, lambda part: 0.0) and not within(nan, one, lambda part: 1.0)
    assert within(nan, one, lambda part: float("inf"))
    assert within(np.array([[3]]), np.array([[3]]), None) and not within(np.array([[3]]), np.array([[4]]), None)


def results(a, b, element, seed):
    """a @ b in float32, k in another order, rounded."""
    order = np.random.default_rng(seed).permutation(a.shape[-1])
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for k in order:
        total += a[..., k, None] * b[..., k, None, :]
    return total.astype(element)


@pytest.mark.parametrize("element", [np.float16, ml_dtypes.bfloat16])
def test_products(element):
    a, b = normal((2, 24, 500), element), normal((500, 40), element, 1)
    x, y = (results(a.astype(np.float32), b.astype(np.float32), element, seed) for seed in (2, 3))
    assert (x != y).any()
    agree = gemms_agree(500, "half", False, lambda: abs(a.astype(np.float32)) @ abs(b.astype(np.float32)))
    assert agree(x, y)
    for wrong in (0, np.nan):
        z = x.copy()
        z[1, 7, 9] = wrong
        assert not agree(z, x)
    fewer = results(a[..., :499].astype(np.float32), b[:499].astype(np.float32), element, 2)
    assert not agree(fewer, x)  # one step of k is left out


def test_scales_bias_and_integers():
    a, b = normal((200, 300), ml_dtypes.float8_e4m3fn), normal((300, 136), ml_dtypes.float8_e4m3fn, 1)
    x = results(a.astype(np.float32), b.astype(np.float32), np.float32, 2)
    sums = abs(a.astype(np.float32)) @ abs(b.astype(np.float32))
    low = x * (1 + 1e-4)
    agree = gemms_agree(300, "fp8", True, lambda: 1e3 * sums)
    assert agree(1e3 * x, 1e3 * low) and not agree(x, low + 1e3)
    scaled = sums.copy()
    scaled[5] *= 1e3
    blocks, y = gemms_agree(300, "fp8", True, lambda: scaled), x.copy()
    y[5] += 10
    assert blocks(x, y)  # row 5 has large sums
    y[6] += 10
    assert not blocks(x, y)
    exact = gemms_agree(300, "int8", False, lambda: sums + 1e6)
    assert exact(x + 1e6, x + 1e6 + 0.5) and not exact(x + 1e6, x + 1e6 + 100)
    assert not gemms_agree(300, "int8", False, lambda: sums)(x, low)


def test_torch_tensors_have_the_same_bounds():
    torch = pytest.importorskip("torch")

    def tensor(x, element=None):
        y = torch.from_numpy(np.ascontiguousarray(x, np.float32))
        return y if element is None else y.to(getattr(torch, element))

    x = tensor(results(normal((200, 300), np.float32), normal((300, 136), np.float32, 1), np.float32, 2))
    agree = gemms_agree(300, "fp8", True, lambda: tensor(np.full((200, 136), 200.0)))
    assert agree(x, x * (1 + 1e-4)) and not agree(x, x + 1)
    for element in ("float8_e4m3fn", "float16", "int8"):
        y = tensor([[-2.0, 0.0, 3.0]], element)
        assert magnitude(y).dtype == y.dtype and (magnitude(y).float() == tensor([[2.0, 0.0, 3.0]])).all()
    q, k, v = (tensor(normal((1, 40, 2, 64), seed=s), "bfloat16") for s in range(3))
    v[0, 3] = float("nan")
    out, logs = q * 0.1, torch.zeros(1, 2, 40)
    agree = attention_agrees(q, k, v, 0.125, 40)
    assert agree((out, logs), (out, logs + 1e-5)) and not agree((out, logs), (out + 1, logs))
    assert not agree((out, logs), (out, logs + 1)) and agree((out, logs - torch.inf), (out, logs - torch.inf))
    i8 = [t.to(torch.int8) for t in (x, x)]
    assert within(i8[0], i8[1], None) and not within(i8[0], i8[1] + 1, None)


@pytest.mark.parametrize("element", [np.float16, ml_dtypes.bfloat16])
def test_attention(element):
    q, k, v = (normal((1, 40, 2, 64), element, s) for s in range(3))
    s = np.einsum("bqhd,bkhd->bhqk", *(x.astype(np.float64) for x in (q, k))) * 0.125
    logs = np.log(np.exp(s).sum(-1)).astype(np.float32)
    out = np.einsum("bhqk,bkhd->bqhd", np.exp(s - logs[..., None]), v.astype(np.float64)).astype(element)
    v[0, 3] = np.inf  # nothing that is read
    agree = attention_agrees(q, k, v, 0.125, 40)
    near = (out.astype(np.float32) * (1 + 1e-3)).astype(element)
    assert agree((out, logs), (near, logs + 1e-5)) and agree((out, None), (near, None))
    assert not agree((out, logs), (out, logs + 1)) and not agree((out, None), (out + element(1), None))
    logs[0, 0, 0] = -np.inf
    assert agree((out, logs), (out, logs))
