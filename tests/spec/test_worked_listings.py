"""The worked programs of the language run unchanged, called as a user calls them, on every execution."""

import importlib.util
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
from everywhere import WITH_HOPPER

from tilelang.env import env

pytestmark = pytest.mark.spec("must:worked-programs")
RNG = np.random.default_rng(12)
BF16 = ml_dtypes.bfloat16
PLACES = [*WITH_HOPPER, "torch", pytest.param("gpu", marks=pytest.mark.gpu)]
UNIT = {np.dtype(np.float16): 2.0**-11, np.dtype(np.float32): 2.0**-24, np.dtype(BF16): 2.0**-8}


class User:
    """The listings, imported where `on` is the default target, with arrays of that place."""

    def __init__(self, on):
        self.torch = on in ("torch", "gpu")
        target, backend = {"torch": ("cpu", None), "gpu": ("cuda", None)}.get(on) or WITH_HOPPER[on]
        self.settings = {"TILELANG_DEFAULT_TARGET": json.dumps(target) if isinstance(target, dict) else target,
                         "TILELANG_EXECUTION_BACKEND": backend or "auto"}
        self.device = "cuda" if on == "gpu" else "cpu"
        # Two executions interpret: tiles there are as small as show the matter.
        self.small = on not in ("cpu", "torch", "gpu")
        spec = importlib.util.spec_from_file_location("worked_listings", pathlib.Path(__file__).with_name("worked_listings.py"))
        self.programs = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.programs)

    def array(self, a):
        if not self.torch:
            return a
        torch = pytest.importorskip("torch")
        if not a.size:
            return torch.empty(a.shape, dtype=getattr(torch, a.dtype.name), device=self.device)
        raw = torch.from_numpy(np.ascontiguousarray(a).reshape(-1).view(np.uint8).copy()).to(self.device)
        return raw.view(getattr(torch, a.dtype.name)).reshape(a.shape)

    def number(self, a):
        if not self.torch:
            return np.asarray(a)
        import torch

        if a.dtype == torch.bfloat16:
            return a.float().cpu().numpy().astype(BF16)
        return a.cpu().numpy()

    def call(self, name, *args, build=None, **options):
        """Outputs of a program; build: arguments of its factory, for the lazy ones."""
        given = [self.array(a) if isinstance(a, np.ndarray) else a for a in args]
        with env.using(**self.settings):
            f = getattr(self.programs, name)
            got = f(*build[0], **build[1])(*given) if build is not None else f(*given, **options)
        self.given = [self.number(g) if isinstance(a, np.ndarray) else g for g, a in zip(given, args)]
        return None if got is None else self.number(got)


@pytest.fixture(params=PLACES)
def user(request):
    return User(request.param)


def half(*shape, dtype=np.float16):
    return RNG.standard_normal(shape).astype(dtype)


def close(got, wide_a, wide_b, extra=0.0, out=np.float16):
    """A product of sums in float32, rounded once: |error| <= k 2^-24 sum |a||b| + the rounding of the result."""
    assert got.dtype == out
    want = wide_a @ wide_b + extra
    bound = wide_a.shape[1] * 2.0**-24 * (np.abs(wide_a) @ np.abs(wide_b)) + np.abs(want) * 2 * UNIT[np.dtype(out)] + 2.0**-24
    return np.abs(got.astype(np.float64) - want) <= bound


def wide(a):
    return a.astype(np.float64)


@pytest.mark.parametrize("n", (1000, 3, 0))
def test_1_elementwise_with_a_tail(user, n):
    a, b = half(n), half(n)
    if n > 3:
        a[:2], b[:2] = 2048, (1, 3)
    got = user.call("add", a, b)
    assert got.dtype == np.float32 and np.array_equal(got, (a + b).astype(np.float32))
    if n > 3:
        assert got[:2].tolist() == [2048, 2052]


def test_2_a_transpose_of_ragged_sizes(user):
    for m, n in ((70, 45), (33, 64)):
        a = half(m, n, dtype=np.float32)
        assert np.array_equal(user.call("transpose", a, build=((m, n), {})), a.T)


def test_3_softmax(user):
    x = half(6, 100) * np.float16(4)
    y = user.call("softmax", x)
    e = np.exp(wide(x) - wide(x).max(1, keepdims=True))
    want = e / e.sum(1, keepdims=True)
    assert y.dtype == np.float16 and (np.abs(wide(y) - want) <= want * 2.0**-10 + 2.0**-24).all()
    assert (np.abs(wide(y).sum(1) - 1) <= 2.0**-10).all()


@pytest.mark.parametrize("transposed", (False, True))
def test_4_a_product_with_an_epilogue(user, transposed):
    m, n, k = (75, 50, 40) if user.small else (300, 200, 80)
    a, b, bias = half(m, k), half(n, k) if transposed else half(k, n), half(n, dtype=np.float32)
    tiles = {"BM": 64, "BN": 32} if user.small else {}
    got = user.call("gemm", a, b, bias, build=((m, n, k), {"tb": transposed, **tiles}))
    x, y = wide(a), wide(b.T if transposed else b)
    want = np.maximum(x @ y + bias, 0)
    bound = k * 2.0**-24 * (np.abs(x) @ np.abs(y)) + np.abs(want) * 2.0**-10 + 2.0**-24
    assert got.dtype == np.float16 and (np.abs(wide(got) - want) <= bound).all()


def test_5_a_sum_split_over_blocks(user):
    m, n, k = (40, 33, 130) if user.small else (300, 200, 80)
    a, b, c = half(m, k), half(k, n), np.zeros((m, n), np.float32)
    tiles = {"BM": 32, "BN": 32} if user.small else {}
    assert user.call("splitk", a, b, c, **tiles) is None
    assert close(user.given[2], wide(a), wide(b), out=np.float32).all()


def test_6_rows_known_at_run_time(user):
    k, n = 64, 40
    b = half(n, k, dtype=BF16)
    for m in (50, 0, 1):
        a = half(m, k, dtype=BF16)
        got = user.call("gemm_dyn", a, b, BM=32, BN=32)
        assert got.shape == (m, n) and close(got, wide(a), wide(b).T, out=np.float32).all()


def test_7_a_macro_by_reference(user):
    a = RNG.integers(-99, 99, 9).astype(np.int32)
    assert np.array_equal(user.call("macro_demo", a, build=((9,), {})), np.stack([5 * a + 7, a - 2], 1))


@pytest.mark.parametrize("sms", (1, 3, 132))
def test_8_a_persistent_product(user, sms):
    m, n, k = (40, 70, 32) if user.small else (300, 200, 80)
    a, b = half(m, k), half(k, n)
    tiles = {"BM": 32, "BN": 32} if user.small else {}
    assert close(user.call("gemm_persistent", a, b, build=((m, n, k), {"sms": sms, **tiles})), wide(a), wide(b)).all()


@pytest.mark.parametrize("causal", (True, False))
def test_9_attention(user, causal):
    s, d = (70, 32) if user.small else (200, 64)
    q, k, v = (half(1, s, 2, d) for _ in range(3))
    tiles = {"BM": 32, "BN": 32} if user.small else {}
    got = user.call("attention", q, k, v, build=((1, 2, s, d), {"causal": causal, **tiles}))
    scores = np.einsum("bihd,bjhd->bhij", wide(q), wide(k)) / np.sqrt(d)
    if causal:
        scores = np.where(np.tril(np.ones((s, s), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want, size = np.einsum("bhij,bjhd->bihd", p, wide(v)), np.einsum("bhij,bjhd->bihd", p, np.abs(wide(v)))
    # Weights are rounded to float16 once, relative to the largest; the result once.  exp2 and sums add a few 2^-24.
    assert (np.abs(wide(got) - want) <= size * 2.0**-10 + np.abs(want) * 2.0**-10 + s * 2.0**-24).all()


@pytest.mark.parametrize("steps", (1, 2, 5))
def test_10_a_producer_and_a_consumer_by_hand(steps):
    user = User("sm_90a")
    m, n, k = 64, 64, steps * 64
    a, b = half(m, k), half(k, n)
    assert close(user.call("gemm_ws", a, b, build=((m, n, k), {"BM": 64, "BN": 64})), wide(a), wide(b)).all()


def test_11_packed_weights(user):
    m, n, k = 20, 70, 128
    a, w, s = half(m, k), RNG.integers(0, 256, (n, k // 2), dtype=np.uint8), half(n)
    tiles = {"BM": 32, "BN": 32} if user.small else {}
    got = user.call("dequant", a, w, s, **tiles)
    nibble = np.stack([w & 15, w >> 4], -1).reshape(n, k).astype(np.float16) - np.float16(8)
    assert close(got, wide(a), wide(nibble * s[:, None]).T).all()  # scaled weights are rounded to float16 by the program


def test_12_shape_and_strides_known_at_run_time(user):
    for m, n, f in ((20, 12, ()), (5, 12, (0.5,)), (0, 12, ())):
        x, y = half(m, n + 3, dtype=np.float32), np.full((n, m + 2), -7, np.float32)
        given = [user.array(x)[:, :n], user.array(y)[:, :m]]
        with env.using(**user.settings):
            assert user.programs.scale_t(*given, *f) is None
        got = user.number(given[1])
        assert np.array_equal(got, np.float32(f[0] if f else 2) * x[:, :n].T)
