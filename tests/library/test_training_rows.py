"""Norms, softmax, cross-entropy and swiglu, forward and backward, against float64: on the CPU, the reference interpreter and
simulators of GPUs; rows of one chunk and of several."""

import numpy as np
import pytest
from covering import every_pair

from tilelang.errors import TileLangError
from tilelang.library import cross_entropy, layer_norm, rms_norm, softmax, swiglu
from tilelang.library.training import rows, softmax as softmax_kernels
from tilelang.library.training.norms import LAYER_NORM, RMS_NORM
from tilelang.library.training.softmax import CROSS_ENTROPY, SOFTMAX
from tilelang.library.training.swiglu import SWIGLU

MACHINES = {"cpu": None, "tile": "tile", "sm_80": "cuda -arch=sm_80", "sm_90a": "cuda -arch=sm_90a",
            "gfx942": "hip -mcpu=gfx942"}
SIZES = [(7, 64, "float16"), (3, 200, "float64"), (5, 101, "float32")]
WHERE = "cpu", "tile", "sm_90a", "sm_80", "gfx942"
QUICK = WHERE[:3]
UNIT = {"float16": 2.0**-11, "float32": 2.0**-22, "float64": 2.0**-50}


def cases(*axes):
    """Each pair of the axes' values, a size and a machine."""
    found = every_pair(SIZES, *axes, WHERE)
    return [pytest.param(*p.values[0], *p.values[1:], marks=[*p.marks, *[pytest.mark.slow] * (p.values[-1] not in QUICK)])
            for p in found]


@pytest.fixture(autouse=True)
def _widths(request, monkeypatch):
    """Rows of several chunks at small sizes, where a test asks for them."""
    if "chunked" in request.fixturenames and request.getfixturevalue("chunked"):
        monkeypatch.setattr(rows, "MOST_THREADS", 1)


def drawn(m, n, kind, count=2):
    rng = np.random.default_rng(n)
    return [rng.standard_normal((m, n)).astype(kind) for _ in range(count)]


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


def close(got, want, size, kind):
    """Rounded once, after sums of float32 whose terms have the magnitude `size`."""
    limit = UNIT[kind] * abs(want) + 16 * max(UNIT[kind] / 16, 2.0**-24 if kind != "float64" else 0) * size
    assert got.shape == want.shape
    assert (abs(got.astype(np.float64) - want) <= limit + (2.0**-25 if kind == "float16" else 0)).all()


@pytest.mark.parametrize("m, n, kind, chunked, centred, where", cases([False, True], [False, True]))
def test_norms(m, n, kind, chunked, centred, where):
    (x, dy), function = drawn(m, n, kind), LAYER_NORM if centred else RMS_NORM
    x += 2
    w, b = (v[0] for v in drawn(1, n, "float32" if kind == "float16" else kind))
    bias, target = b if centred else None, MACHINES[where]
    y, *kept = function.forward(x, w, bias, 1e-5, target)
    dx, dw, db = function.backward(x, w, bias, *kept, True, target, dy)
    X, DY, W, B = wide(x, dy, w, b)
    mean = X.mean(1, keepdims=True) if centred else 0.0
    r = 1 / np.sqrt(((X - mean)**2).mean(1, keepdims=True) + 1e-5)
    h, g = (X - mean) * r, DY * W
    both = (g * h).mean(1, keepdims=True)
    size = (abs(X) + abs(mean)) * r  # of h, whose terms cancel
    close(y, h * W + (B if centred else 0), abs(size * W), kind)
    rest = h * both + (g.mean(1, keepdims=True) if centred else 0)
    close(dx, r * (g - rest), r * (abs(g) + 2 * size * abs(g * size).mean()), kind)
    close(dw, (DY * h).sum(0), abs(DY * size).sum(0), w.dtype.name)
    if centred:
        close(db, DY.sum(0), abs(DY).sum(0), w.dtype.name)
    alone, *none = function.backward(x, w, bias, *kept, False, target, dy)
    assert (alone == dx).all() and [v.size for v in none] == [0, 0]


@pytest.mark.parametrize("m, n, kind, chunked, where", cases([False, True]))
def test_softmax(m, n, kind, chunked, where):
    x, dy = drawn(m, n, kind)
    x *= 3
    x[0, :n // 2] = -np.inf  # whole chunks of a row
    (y,) = SOFTMAX.forward(x, MACHINES[where])
    (dx,) = SOFTMAX.backward(y, MACHINES[where], dy)
    X, DY, Y = wide(x, dy, y)
    p = np.exp(X - X.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    close(y, p, 4 * p, kind)
    close(dx, Y * (DY - (Y * DY).sum(1, keepdims=True)), Y * (abs(DY) + abs(Y * DY).sum(1, keepdims=True)), kind)


@pytest.mark.parametrize("m, n, kind, chunked, form, where", cases([False, True], [
    ("mean", 0.1, 1e-3, "int64"), ("sum", 0.0, 0.0, "int32"), ("none", 0.0, 1e-2, "int64")]))
def test_cross_entropy(m, n, kind, chunked, form, where):
    reduction, smoothing, z_loss, labels = form
    x, other = drawn(m, n, kind)
    t = (abs(other[:, 0].astype(np.float64)) * 1000).astype(labels) % n
    t[1] = 5
    given = 5, smoothing, z_loss, reduction, MACHINES[where]
    loss, logs, count = CROSS_ENTROPY.forward(x, t, *given)
    grad = np.asarray(np.arange(loss.size).reshape(loss.shape) + 1.5, loss.dtype)
    (dx,) = CROSS_ENTROPY.backward(x, t, logs, count, *given, grad)
    (X,), used = wide(x), t != 5
    s = np.log(np.exp(X).sum(1))
    rows_ = np.where(used, s - (1 - smoothing) * X[np.arange(m), t] - smoothing * X.mean(1) + z_loss * s * s, 0)
    over = used.sum() if reduction == "mean" else 1
    wanted = rows_ if reduction == "none" else rows_.sum() / over
    acc = loss.dtype.name
    close(loss, np.asarray(wanted), np.asarray(8 * abs(s).max() * (m if reduction == "sum" else 1)), acc)
    close(logs, s, 4 * abs(s), acc)
    hit = (np.arange(n) == t[:, None]) * (1 - smoothing)
    p = np.exp(X - s[:, None]) * (1 + 2 * z_loss * s[:, None])
    factor = (used * grad / over)[:, None]
    close(dx, (p - hit - smoothing / n) * factor, (4 * p * (1 + abs(s[:, None])) + hit + smoothing / n) * factor, kind)


@pytest.mark.parametrize("m, n, kind, packed, where", cases([False, True]))
def test_swiglu(m, n, kind, packed, where):
    g, u, dy = drawn(m, n, kind, 3)
    given = (np.concatenate([g, u], 1), None) if packed else (g, u)
    (y,) = SWIGLU.forward(*given, MACHINES[where])
    dg, du = SWIGLU.backward(*given, MACHINES[where], dy)
    if packed:
        dg, du = dg[:, :n], dg[:, n:]
    G, U, DY = wide(g, u, dy)
    s = 1 / (1 + np.exp(-G))
    for got, want in ((y, G * s * U), (dg, DY * U * s * (1 + G * (1 - s))), (du, DY * G * s)):
        close(got, want, abs(DY * U) + abs(DY) + abs(want), kind)


@pytest.mark.parametrize("kind", ["float16", "float32"])
@pytest.mark.parametrize("threads", [4, 256])  # several chunks, and one
def test_long_rows_at_odd_addresses(kind, threads, monkeypatch):
    """They are read and stored in the vectors of the whole tensor; the last one ends inside of a vector."""
    monkeypatch.setattr(softmax_kernels, "SHIFTED", 100)
    monkeypatch.setattr(rows, "MOST_THREADS", threads)
    test_softmax(2, 301, kind, False, "sm_90a")
    test_cross_entropy(2, 301, kind, False, ("mean", 0.1, 1e-3, "int64"), "sm_90a")


@pytest.mark.parametrize("n, kind", [(301, "float16"), (304, "float16"), (203, "float32")])
def test_blocks_go_over_long_rows_that_are_copied_ahead(n, kind, monkeypatch):
    monkeypatch.setattr(softmax_kernels, "SHIFTED", 100)
    monkeypatch.setattr(softmax_kernels, "_COPIED", 0)
    monkeypatch.setattr(rows, "MOST_THREADS", 4)
    x, y = drawn(7, n, kind)
    at = softmax_kernels.running_on(x, MACHINES["sm_90a"])
    f = softmax_kernels.SoftmaxForm.of(x, at).copied(at, x.itemsize)
    assert f.tile.chunks > 1 and f.ahead > 2 and f.shifted == (n % 8 > 0)
    at.kernel(softmax_kernels.softmax_ahead, f)(x, y, f.vectors(x), f.vectors(y), 2)
    p = np.exp(x.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    close(y, p, 4 * p, kind)


def test_tiles_have_whole_warps_and_few_elements_a_thread():
    for n in (*range(1, 600), *range(601, 40000, 37), 128256, 262144):
        for each in (16, 32):
            t = rows.RowTile.of(n, each)
            assert t.width * t.chunks >= n > t.width * (t.chunks - 1) and t.threads % 32 == 0 and t.threads <= 1024
            assert -(-t.width // 8) * t.rows <= t.threads * max(3, each // 8)
        t = rows.RowTile.staged(n)
        assert n > 16384 if t is None else t.width >= n and t.rows * t.width <= 16 * t.threads <= 16384


def test_labels_that_are_no_column_give_nan_and_a_mean_of_nothing_too():
    x = np.zeros((2, 8), np.float32)
    each = cross_entropy(x, np.array([8, 3]), reduction="none")
    assert np.isnan(each[0]) and np.isclose(each[1], np.log(8))
    assert np.isnan(cross_entropy(x, np.array([-100, -100])))
    assert cross_entropy(x[:0], np.zeros(0, np.int64), reduction="sum") == 0


def test_rows_without_columns_or_rows():
    for function in (rms_norm, layer_norm, softmax, swiglu):
        assert function(np.zeros((0, 4), np.float32)).shape in ((0, 4), (0, 2))
    assert np.isnan(softmax(np.full((1, 4), -np.inf, np.float32))).all()


X = np.zeros((2, 4), np.float32)
WRONG = {
    "weight": lambda: rms_norm(X, X[0, :3]), "type": lambda: rms_norm(X, X[0].astype(np.float64)),
    "integers": lambda: softmax(X.astype(np.int32)), "list": lambda: layer_norm(X, [1.0] * 4), "odd": lambda: swiglu(X[:, :3]),
    "labels": lambda: cross_entropy(X, np.zeros(3, np.int64)),
    "reduction": lambda: cross_entropy(X, np.zeros(2, int), reduction="max")}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_go_together(name):
    with pytest.raises(TileLangError) as e:
        WRONG[name]()
    assert e.value.kind == "training-argument" and "expected" in str(e.value)
