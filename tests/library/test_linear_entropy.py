"""linear_cross_entropy, forward and backward over several chunks, against float64 and torch; what it has in memory."""

import numpy as np
import pytest

from tilelang.errors import TileLangError
from tilelang.library import linear_cross_entropy
from tilelang.library.training import linear_entropy
from tilelang.library.training.linear_entropy import LINEAR_CROSS_ENTROPY

MACHINES = {"cpu": None, "tile": "tile", "sm_90a": "cuda -arch=sm_90a", "sm_80": "cuda -arch=sm_80"}
OPTIONS = {"mean": (5, 0.1, 1e-3, "mean"), "sum": (-100, 0.0, 0.0, "sum"), "none": (5, 0.0, 1e-2, "none")}
CASES = [(33, 24, 300, "float64", "mean", "cpu", False), (33, 24, 300, "float64", "mean", "cpu", True),
         (70, 48, 200, "float16", "none", "sm_90a", False), (70, 48, 200, "float16", "none", "sm_90a", True),
         (20, 32, 64, "float32", "sum", "cpu", False),
         (33, 40, 130, "float16", "mean", "tile", False),
         pytest.param(20, 32, 200, "float32", "mean", "sm_90a", False, marks=pytest.mark.slow),
         pytest.param(70, 48, 200, "float16", "mean", "sm_80", False, marks=pytest.mark.slow)]
UNIT = {"float16": 2.0**-10, "float32": 2.0**-22, "float64": 2.0**-48}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch):
    monkeypatch.setattr(linear_entropy, "CHUNK", 128)


@pytest.mark.parametrize("m, k, n, kind, form, where, keep", CASES)
def test_losses_and_gradients_are_those_of_float64(m, k, n, kind, form, where, keep):
    rng, (ignored, e, z, reduction) = np.random.default_rng(m), OPTIONS[form]
    x, w = rng.standard_normal((m, k)).astype(kind), (rng.standard_normal((n, k)) / 2).astype(kind)
    t = rng.integers(0, n, m)
    t[1], t[-1] = 5, n - 1
    given = ignored, e, z, reduction, keep, MACHINES[where]
    loss, logs, count, logits = LINEAR_CROSS_ENTROPY.forward(x, w, t, *given)
    grad = np.asarray(np.arange(loss.size).reshape(loss.shape) + 1.5, loss.dtype)
    dx, dw = LINEAR_CROSS_ENTROPY.backward(x, w, t, logs, count, logits, *given, grad)
    X, W = x.astype(np.float64), w.astype(np.float64)
    y, used = X @ W.T, t != ignored
    s = np.log(np.exp(y).sum(1))
    each = np.where(used, s - (1 - e) * y[np.arange(m), t] - e * y.mean(1) + z * s * s, 0)
    over = used.sum() if reduction == "mean" else 1
    unit = UNIT[kind] if where != "sm_90a" or kind != "float32" else 2.0**-8
    exact = 16 * (unit if kind == "float64" or unit == 2.0**-8 else 2.0**-22) * (1 if reduction == "mean" else m) * abs(y).max()
    exact += 2 * UNIT[kind] * abs(y).max() * (m if reduction == "sum" else 1) * keep  # kept logits are rounded
    assert (abs(loss - (each if reduction == "none" else each.sum() / over)) <= exact).all()
    hit = (np.arange(n) == t[:, None]) * (1 - e)
    p, factor = np.exp(y - s[:, None]) * (1 + 2 * z * s[:, None]), (used * grad / over)[:, None]
    g, size = (p - hit - e / n) * factor, (8 * p + hit + e / n) * abs(factor)
    assert (abs(dx - g @ W) <= 2 * unit * (size @ abs(W)) + 2.0**-24 * (kind == "float16")).all()
    assert (abs(dw - g.T @ X) <= 2 * unit * (size.T @ abs(X)) + 2.0**-24 * (kind == "float16")).all()
    assert not dx[t == ignored].any()


def test_gradcheck_and_a_whole_graph_without_logits_in_memory():
    import torch
    import torch.nn.functional as F

    g = torch.Generator().manual_seed(1)
    x, w = (torch.randn(s, dtype=torch.float64, generator=g, requires_grad=True) for s in ((7, 8), (140, 8)))
    t = torch.tensor([3, -100, 139, 130, 0, 64, 5])
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, t, label_smoothing=0.1), (x, w), fast_mode=True)
    sizes = []
    model = torch.compile(lambda x, w, t: linear_cross_entropy(x * 2, w, t, recompute=True), fullgraph=True, dynamic=True,
                          backend="aot_eager")
    for rows in (7, 5):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            found = torch.autograd.grad(model(x[:rows], w, t[:rows]), (x, w))
        torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(x[:rows] * 2 @ w.t(), t[:rows]), (x, w)))
    assert max(sizes) == w.numel()
    op = torch.ops.tilelang_library.linear_cross_entropy.default
    torch.library.opcheck(op, (x, w, t, -100, 0.0, 0.0, "sum", False, None), test_utils=("test_schema", "test_faketensor"))


def test_logits_are_kept_where_they_take_no_more_memory_than_the_operands_and_their_gradients():
    import torch

    def saved(m, k, n, **options):
        """Elements of the logits that are saved for the gradients."""
        x, w = torch.zeros(m, k, dtype=torch.float64, requires_grad=True), torch.zeros(n, k, dtype=torch.float64)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
            linear_cross_entropy(x, w, torch.zeros(m, dtype=torch.int64), **options)
        return (m, n) in sizes

    assert saved(32, 12, 96) and not saved(32, 11, 96)  # 32 * 96 elements, and 2 (32 + 96) k of operands and gradients
    assert saved(32, 11, 96, recompute=False) and not saved(32, 12, 96, recompute=True)


def test_arguments_that_do_not_go_together():
    x, w = np.zeros((3, 8), np.float32), np.zeros((5, 8), np.float32)
    for weight, labels in ((w[:, :4], np.zeros(3, int)), (w, np.zeros(4, int)), (w.astype(np.float16), np.zeros(3, int)),
                           (w[:0], np.zeros(3, int))):
        with pytest.raises(TileLangError) as e:
            linear_cross_entropy(x, weight, labels)
        assert e.value.kind == "training-argument"
