"""Gradients of grouped_matmul: of rows and of matrices, for groups of any sizes, on the CPU and on simulators; with torch."""

import numpy as np
import pytest

from tilelang.library import grouped_matmul
from tilelang.library.autograd import define
from tilelang.library.gemm.grouped import GROUPED_MATMUL

PLACES = {"cpu": (None, None), "tile": ("cpu", "tile"), "sm_90a": ("cuda -arch=sm_90a", "simulator"),
          "sm_80": ("cuda -arch=sm_80", "simulator"), "gfx942": ("hip -mcpu=gfx942", "simulator")}
CASES = [("cpu", "float64"), ("tile", "float16"), ("sm_90a", "float16"), ("cpu", "float32"),
         pytest.param("sm_90a", "float32", marks=pytest.mark.slow), pytest.param("sm_80", "float16", marks=pytest.mark.slow),
         pytest.param("gfx942", "float16", marks=pytest.mark.slow)]
UNIT = {"float16": 2.0**-10, "float32": 2.0**-9, "float64": 2.0**-48}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("on, kind", CASES)
@pytest.mark.parametrize("sizes", [[70, 0, 33, 40], [160, 9, 0, 0], [2**31 - 1, 5, 1, 1]])
def test_each_group_has_gradients_of_its_own_rows(sizes, on, kind, transposed):
    """A group beyond the tensor ends with it; rows of no group, which may hold anything, reach no matrix."""
    rng, (rows, k, n) = np.random.default_rng(3), (176, 72, 40)
    a, grad, b = (rng.standard_normal(s).astype(kind) for s in ((rows, k), (rows, n), (4, n, k) if transposed else (4, k, n)))
    ends = np.minimum(np.cumsum(sizes), rows)
    firsts = np.concatenate([[0], ends[:-1]])
    a[ends[-1]:] = np.nan
    da, db = GROUPED_MATMUL.backward(a, b, np.array(sizes, np.int32), [True, True], transposed, *PLACES[on], grad)
    assert da.dtype == a.dtype and db.dtype == b.dtype and not da[ends[-1]:].any()
    for g, (first, end) in enumerate(zip(firsts, ends)):
        x, y, w = (v.astype(np.float64) for v in (a[first:end], grad[first:end], b[g].T if transposed else b[g]))
        found = db[g].T if transposed else db[g]
        assert (abs(found - x.T @ y) <= UNIT[kind] * (abs(x.T) @ abs(y))).all()
        assert (abs(da[first:end] - y @ w.T) <= UNIT[kind] * (abs(y) @ abs(w.T))).all()


def inputs(rows, transposed=False):
    import torch

    g = torch.Generator().manual_seed(rows)
    shapes = (rows, 6), (3, 4, 6) if transposed else (3, 6, 4)
    return [torch.randn(s, dtype=torch.float64, generator=g, requires_grad=True) for s in shapes], torch.tensor(
        [4, 0, rows - 6], dtype=torch.int32)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradcheck_and_opcheck(transposed):
    import torch

    given, sizes = inputs(11, transposed)
    assert torch.autograd.gradcheck(lambda a, b: grouped_matmul(a, b, sizes, transpose_b=transposed), given)
    kept = [x.detach() for x in given]
    define("grouped_matmul")
    torch.library.opcheck(torch.ops.tilelang_library.grouped_matmul.default, (*given, sizes, transposed, None, None))
    torch.library.opcheck(torch.ops.tilelang_library.grouped_matmul_backward.default, (
        *kept, sizes, [True, False], transposed, None, None, torch.ones(11, 4, dtype=torch.float64)),
        test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_graph_takes_every_number_of_rows():
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(lambda a, b, sizes: (grouped_matmul(a.relu(), b, sizes)**2).sum(), fullgraph=True, dynamic=True,
                          backend="aot_eager")
    for rows in (11, 12, 20):
        (a, b), sizes = inputs(rows)
        found = torch.autograd.grad(model(a, b, sizes), (a, b))
        whole = torch.cat([a.relu()[:4] @ b[0], a.relu()[4:rows - 2] @ b[2]])
        torch.testing.assert_close(found, torch.autograd.grad((whole**2).sum(), (a, b)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_what_has_no_gradient_says_so():
    (a, b), sizes = inputs(11)
    with pytest.raises(RuntimeError, match="no gradient with activation") as e:
        grouped_matmul(a, b, sizes, activation="relu")
    assert e.value.kind == "matmul-gradient" and "activation to the result" in e.value.hint
