"""Library products: every type, layout and form against float64, on the CPU and on the device simulator."""

import math
import sys

import ml_dtypes
import numpy as np
import pytest

from tilelang.env import env
from tilelang.library import grouped_matmul, matmul, place
from tilelang.library.caches import Cache
from tilelang.library.gemm import build, tile_candidates as tile_shapes
from tilelang.library.gemm.build import Place
from tilelang.library.gemm.tile import TileProblem, chip_of

E4, E5 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "int32": 0.0}
PLACES = {"cpu": {}, "sm_90a": dict(target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="simulator"),
          "sm_80": dict(target={"kind": "cuda", "arch": "sm_80"}, execution_backend="simulator")}
everywhere = pytest.mark.parametrize("on", PLACES)


def wide(x):
    return np.asarray(x).astype(np.float64)


def normal(shape, element=np.float16, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return x.astype(element)


def check(got, a, b, extra=0.0, scale=1.0, tf32=False):
    """Against a @ b of float64 arrays; u = 2**-24 k and the rounding of the result, 2**-10 for tf32."""
    want = (a @ b) * scale
    sums = (np.abs(a) @ np.abs(b)) * scale
    bound = (a.shape[-1] * 2.0**-24 + (2.0**-10 if tf32 else 0)) * sums + EPS[got.dtype.name] * np.abs(want) + extra
    assert got.shape == want.shape
    assert (np.abs(wide(got) - want) <= bound + 1e-30).all()


@everywhere
@pytest.mark.parametrize("element", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("ta, tb", [(False, False), (False, True), (True, False), (True, True)])
def test_orders_of_storage(on, element, ta, tb):
    a, b = normal((70, 104), element), normal((104, 72), element, 1)
    got = matmul(a.T.copy() if ta else a, b.T.copy() if tb else b, transpose_a=ta, transpose_b=tb, **PLACES[on])
    assert got.dtype == element
    check(got, wide(a), wide(b), tf32=element is np.float32 and on != "cpu")


@pytest.mark.parametrize("ta, tb", [(False, False), (False, True), (True, False), (True, True)])
def test_few_rows_by_tiles_that_are_not_turned(ta, tb, monkeypatch):
    """As products of more rows have them; the other tests here have turned ones on sm_90a."""
    monkeypatch.setattr(tile_shapes, "_FEW_ROWS", 0)
    a, b = normal((69, 104), ml_dtypes.bfloat16), normal((104, 88), ml_dtypes.bfloat16, 1)
    got = matmul(a.T.copy() if ta else a, b.T.copy() if tb else b, transpose_a=ta, transpose_b=tb, **PLACES["sm_90a"])
    check(got, wide(a), wide(b))
    assert not any(t.swap_ab for t in tile_shapes.candidates(chip_of(Place.of(a, **{
        "target": PLACES["sm_90a"]["target"], "backend": None}).target), TileProblem(69, 88, 104, may_swap_ab=True)))


@everywhere
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 5, 7), (65, 33, 17), (129, 1, 40), (16, 16, 2000), (1, 130, 64)])
def test_any_sizes(on, m, n, k):
    a, b = normal((m, k)), normal((k, n), seed=1)
    got = matmul(a, b, **PLACES[on])
    check(got, wide(a), wide(b))
    assert np.array_equal(got, matmul(a, b, **PLACES[on]))  # split sums are added in order


@everywhere
def test_views(on):
    a, b = normal((70, 104)), normal((104, 72), seed=1)
    check(matmul(a.T.copy().T, b.T.copy().T, **PLACES[on]), wide(a), wide(b))
    wide_a, wide_b = normal((70, 128)), normal((2 * 104, 80), seed=1)
    check(matmul(wide_a[:, :104], wide_b[::2, 8:], **PLACES[on]), wide(wide_a[:, :104]), wide(wide_b[::2, 8:]))
    check(matmul(wide_a[:, 1:105], b, **PLACES[on]), wide(wide_a[:, 1:105]), wide(b))
    check(matmul(wide_a[:, ::2], b[:64], **PLACES[on]), wide(wide_a[:, ::2]), wide(b[:64]))
    same = np.broadcast_to(a[0], (70, 104))
    check(matmul(same, b, **PLACES[on]), wide(same), wide(b))


@pytest.mark.parametrize("on", ["cpu", "sm_90a"])
def test_arrays_backwards(on):
    a, b = normal((24, 40)), normal((2, 40, 24), seed=1)
    check(matmul(a[::-1], b[0, :, ::-1], **PLACES[on]), wide(a[::-1]), wide(b[0, :, ::-1]))
    got = grouped_matmul(a[::-1], b[::-1], np.int32([0, 24]), **PLACES[on])
    check(got, wide(a[::-1]), wide(b[0]))


@pytest.mark.parametrize("on", ["cpu", "sm_90a"])
def test_not_a_number_is_hidden_by_no_activation(on):
    a, b = normal((8, 16)), normal((16, 8), seed=1)
    a[3, 5], b[7, 2], b[1, 6] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        want = wide(a) @ wide(b)
    got = wide(matmul(a, b, activation="relu", **PLACES[on]))
    assert (np.isnan(got) == np.isnan(want)).all() and (np.isinf(got) == (want == np.inf)).all()


@everywhere
def test_batches(on):
    a, b = normal((3, 70, 40)), normal((3, 40, 24), seed=1)
    check(matmul(a, b, **PLACES[on]), wide(a), wide(b))
    check(matmul(a, b[0], **PLACES[on]), wide(a), wide(b[0]))
    check(matmul(a.transpose(0, 2, 1).copy(), b, transpose_a=True, **PLACES[on]), wide(a), wide(b))
    check(matmul(a[:1], b[:1], **PLACES[on]), wide(a[:1]), wide(b[:1]))


@everywhere
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues(on, activation):
    a, b, bias = normal((40, 64)), normal((64, 48), seed=1), normal((48,), np.float32, 2)
    got = wide(matmul(a, b, bias=bias, activation=activation, **PLACES[on]))
    x = wide(a) @ wide(b) + bias
    want = {None: lambda: x, "relu": lambda: np.maximum(x, 0), "silu": lambda: x / (1 + np.exp(-x)),
            "gelu_tanh": lambda: 0.5 * x * (1 + np.tanh((2 / np.pi)**0.5 * (x + 0.044715 * x**3))),
            "gelu": lambda: 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))}[activation]()
    # Slopes of the activations are below 1.2; the float32 functions have a few ulp.
    bound = 1.2 * 64 * 2.0**-24 * (np.abs(wide(a)) @ np.abs(wide(b)) + 3) + EPS["float16"] * np.abs(want) + 1e-6
    assert (np.abs(got - want) <= bound + 8 * 2.0**-24 * np.abs(x)).all()
    half = matmul(a, b, bias=bias.astype(np.float16), out_dtype="float32", **PLACES[on])
    check(half - bias.astype(np.float16), wide(a), wide(b), extra=1e-5)


@everywhere
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_activations_of_double_precision_are_not_the_fast_ones(on, activation):
    a, b, bias = normal((12, 20), np.float64), normal((20, 8), np.float64, 1), normal((8,), np.float64, 2)
    x = a @ b + bias
    want = {None: x, "relu": np.maximum(x, 0), "silu": x / (1 + np.exp(-x)),
            "gelu_tanh": 0.5 * x * (1 + np.tanh((2 / np.pi)**0.5 * (x + 0.044715 * x**3))),
            "gelu": 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))}[activation]
    got = matmul(a, b, bias=bias, activation=activation, **PLACES[on])
    bound = 1.2 * 40 * 2.0**-53 * (np.abs(a) @ np.abs(b) + np.abs(bias) + 1)
    assert got.dtype == np.float64 and (np.abs(got - want) <= bound).all(), np.abs(got - want).max()


@everywhere
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_at_their_ends_and_all_along(on, activation):
    x = np.concatenate([np.linspace(-12, 12, 4089), [np.inf, np.nan, 1e30, -1e30, -40, 0, -1e-30]]).astype(np.float32)
    zeros = np.zeros((1, 8), np.float16), np.zeros((8, len(x)), np.float16)
    got = wide(matmul(*zeros, bias=x, activation=activation, out_dtype="float32", **PLACES[on]))[0]
    w = wide(x)
    with np.errstate(all="ignore"):
        want = {"relu": np.where(w < 0, 0, w), "silu": w / (1 + np.exp(-w)),
                "gelu": 0.5 * w * (1 + np.vectorize(math.erf)(w / 2**0.5)),
                "gelu_tanh": 0.5 * w * (1 + np.tanh((2 / np.pi)**0.5 * (w + 0.044715 * w**3)))}[activation]
    want[w == -1e30] = 0
    same = np.isfinite(want)
    assert np.array_equal(got[~same], want[~same], equal_nan=True), got[~same]
    error = np.abs(got[same] - want[same])
    allowed = 8 * 2.0**-24 * np.minimum(np.abs(w[same]), 1e3) + 1e-8 * (w[same] < -5)
    assert (error <= allowed).all(), (error.max(), w[same][error.argmax()])


@everywhere
@pytest.mark.parametrize("element", [np.int8, np.uint8])
def test_bytes(on, element):
    info = np.iinfo(element)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(info.min, info.max + 1, s).astype(element) for s in ((40, 130), (130, 24)))
    got = matmul(a, b, **PLACES[on])
    assert got.dtype == np.int32 and np.array_equal(got, a.astype(np.int64) @ b.astype(np.int64))
    half = np.float32([0.5])
    scaled = matmul(a, b.T.copy(), transpose_b=True, scale_a=half, scale_b=half, out_dtype="float32", **PLACES[on])
    check(scaled, wide(a), wide(b), scale=0.25)


def test_double():
    a, b = np.random.default_rng(0).standard_normal((2, 50, 50))
    assert np.abs(matmul(a, b) - a @ b).max() < 1e-13


@pytest.mark.parametrize("on", ["cpu", "sm_90a"])
@pytest.mark.parametrize("a_type, b_type", [(E4, E4), (E4, E5), (E5, E4)])
@pytest.mark.parametrize("fast", [False, True])
def test_float8(on, a_type, b_type, fast):
    a, b = normal((40, 300), a_type), normal((300, 24), b_type, 1)
    got = matmul(a, b, fast_accum=fast, **PLACES[on])
    assert got.dtype == ml_dtypes.bfloat16
    check(got, wide(a), wide(b))
    s, t = np.float32([0.75]), np.array(2.0, np.float32)
    check(matmul(a, b.T.copy(), transpose_b=True, scale_a=s, scale_b=t, fast_accum=fast, out_dtype="float32", **PLACES[on]),
          wide(a), wide(b), scale=1.5, extra=1e-5)


@pytest.mark.parametrize("on", ["cpu", "sm_90a"])
@pytest.mark.parametrize("m, n, k", [(40, 24, 300), (130, 200, 128), (1, 129, 257)])
def test_float8_with_scales_of_blocks(on, m, n, k):
    rng = np.random.default_rng(2)
    a, b = normal((m, k), E4), normal((n, k), E4, 1)
    sa = rng.uniform(0.5, 2, (m, -(-k // 128))).astype(np.float32)
    sb = rng.uniform(0.5, 2, (-(-n // 128), -(-k // 128))).astype(np.float32)
    got = matmul(a, b, transpose_b=True, scale_a=sa, scale_b=sb, bias=np.ones(n, np.float32), **PLACES[on])
    wa = wide(a) * wide(sa).repeat(128, 1)[:, :k]
    wb = wide(b) * wide(sb).repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    want, sums = wa @ wb.T + 1, np.abs(wa) @ np.abs(wb).T + 1
    assert (np.abs(wide(got) - want) <= EPS["bfloat16"] * np.abs(want) + (k + 4) * 2.0**-24 * sums).all()


@everywhere
@pytest.mark.parametrize("sizes", [[10, 0, 37], [0, 0, 0], [50, 0, 0], [1, 1, 1], [64, 64, 2], [-4, 30, -1], [2, 2**31 - 1, 9]])
def test_groups(on, sizes):
    """Rows beyond the last group are zeros; sizes that claim more rows than there are get those there are, negative none."""
    a, b, bias = normal((100, 40)), normal((3, 40, 24), seed=1), normal((24,), np.float32, 2)
    got = grouped_matmul(a, b, np.array(sizes, np.int32), bias=bias, activation="relu", **PLACES[on])
    want, row = np.zeros((100, 24)), 0
    for g, n in enumerate(sizes):
        end = min(row + max(n, 0), 100)
        want[row:end] = np.maximum(wide(a[row:end]) @ wide(b[g]) + bias, 0)
        row = end
    assert np.abs(wide(got) - want).max() < 0.02
    assert not wide(got)[row:].any()
    flat = grouped_matmul(a, b.transpose(0, 2, 1).copy(), np.array(sizes, np.int32), transpose_b=True, bias=bias,
                          activation="relu", **PLACES[on])
    assert np.array_equal(wide(flat), wide(got))


@everywhere
@pytest.mark.parametrize("groups, rows", [(1, 300), (40, 300), (300, 200), (1100, 50)])
def test_many_groups(on, groups, rows):
    """More groups than rows, than threads of the block that looks for their tiles, than tiles that a block looks for."""
    rng = np.random.default_rng(groups)
    sizes = np.bincount(rng.integers(0, groups, rows - 3), minlength=groups).astype(np.int32)
    a, b = rng.integers(-3, 4, (rows, 16)).astype(np.float16), rng.integers(-3, 4, (groups, 16, 8)).astype(np.float16)
    got = grouped_matmul(a, b, sizes, **PLACES[on])
    of = np.repeat(np.arange(groups), sizes)
    want = np.einsum("rk,rkn->rn", wide(a[:rows - 3]), wide(b)[of])
    assert np.array_equal(wide(got), np.concatenate([want, np.zeros((3, 8))]))


@everywhere
@pytest.mark.parametrize("element", [ml_dtypes.bfloat16, np.float32, np.int8, E4])
def test_types_of_groups_and_batches(on, element):
    """Small whole numbers: every sum is exact.  Sizes that nothing divides."""
    if element is E4 and on == "sm_80":
        pytest.skip("no float8")
    rng = np.random.default_rng(4)
    a, b = (rng.integers(-3, 4, s).astype(element) for s in ((50, 45), (3, 45, 37)))
    want = np.zeros((50, 37))
    want[:20], want[20:45] = wide(a[:20]) @ wide(b[0]), wide(a[20:45]) @ wide(b[2])
    tb = element is not np.float32
    args = b.transpose(0, 2, 1).copy() if tb else b
    got = grouped_matmul(a, args, np.array([20, 0, 25], np.int32), transpose_b=tb, out_dtype="float32", **PLACES[on])
    assert np.array_equal(wide(got), want)
    two = a[:48].reshape(2, 24, 45)
    bias = np.arange(37, dtype=np.float32)
    got = matmul(two, args[:2], transpose_b=tb, bias=bias, activation="relu", out_dtype="float32", **PLACES[on])
    assert np.array_equal(wide(got), np.maximum(wide(two) @ wide(b[:2]) + bias, 0))


def test_float8_groups_are_added_in_two_levels(monkeypatch):
    """The matrix unit of sm_90 adds float8 with about 13 bits: sums of 128 have an accumulator of their own."""
    used, real = [], build.gemm_grouped
    monkeypatch.setattr(build, "gemm_grouped", lambda f, two: used.append(two) or real(f, two))
    rng = np.random.default_rng(4)
    for k, element, two in ((300, E4, True), (100, E4, False), (300, np.float16, False)):
        a, b = (rng.integers(-3, 4, s).astype(element) for s in ((30, k), (2, 24, k)))
        got = grouped_matmul(a, b, np.int32([11, 19]), transpose_b=True, out_dtype="float32", **PLACES["sm_90a"])
        want = np.concatenate([wide(x) @ wide(y).T for x, y in zip((a[:11], a[11:]), b)])
        assert used.pop() == two and np.array_equal(got, want)


@pytest.mark.parametrize("sizes", [[0, 0, 0], [-5, 7, 2**31 - 1], [2**31 - 1, 2**31 - 1, 5], [40, 60, 3]])
def test_sizes_of_groups_that_make_no_sense_stay_inside(sizes):
    """No row is computed twice, none left out: what is claimed beyond the rows there are is cut off."""
    a, b = normal((100, 40)), normal((3, 40, 24), seed=1)
    got, want, row = grouped_matmul(a, b, np.array(sizes, np.int32), **PLACES["sm_90a"]), np.zeros((100, 24)), 0
    for g, n in enumerate(sizes):
        end = min(row + max(n, 0), 100)
        want[row:end], row = wide(a[row:end]) @ wide(b[g]), end
    assert np.abs(wide(got) - want).max() < 0.02


@everywhere
def test_nothing_to_do(on):
    assert matmul(normal((0, 8)), normal((8, 4)), **PLACES[on]).shape == (0, 4)
    assert matmul(normal((2, 0, 8)), normal((8, 4)), **PLACES[on]).shape == (2, 0, 4)
    got = matmul(normal((3, 0)), normal((0, 4)), bias=np.arange(4, dtype=np.float32), **PLACES[on])
    assert np.array_equal(wide(got), np.tile(np.arange(4.0), (3, 1)))


@everywhere
@pytest.mark.parametrize("blocks", [False, True])
def test_dynamic_numbers_of_rows_share_a_kernel(on, blocks, monkeypatch):
    monkeypatch.setitem(env._overrides, "TILELANG_LIBRARY_DYNAMIC_SHAPES", "1")
    monkeypatch.setattr(sys.modules["tilelang.library.gemm.matmul"], "_ANSWERS", Cache(64))
    place.KERNELS.clear()
    compiled = []
    real = place.compile
    monkeypatch.setattr(place, "compile", lambda *a, **k: compiled.append(1) or real(*a, **k))
    if blocks and on == "sm_80":
        pytest.skip("no float8")
    b = normal((56, 48), E4 if blocks else np.float16, 1)
    for m in (33, 34, 35, 36, 37, 40, 63, 64):
        a = normal((m, 56), b.dtype, m)
        scales = dict(scale_a=np.full((m, 1), 0.5, np.float32), scale_b=np.full((1, 1), 4.0, np.float32)) if blocks else {}
        check(matmul(a, b, out_dtype="float32", **scales, **PLACES[on]), wide(a), wide(b), scale=2.0 if blocks else 1.0)
    assert len(compiled) <= 1 + 7 * (blocks and on == "sm_90a")  # there b is copied too, for each form of arguments


@everywhere
def test_dynamic_numbers_of_rows_of_groups_share_a_kernel(on, monkeypatch):
    monkeypatch.setitem(env._overrides, "TILELANG_LIBRARY_DYNAMIC_SHAPES", "1")
    monkeypatch.setattr(sys.modules["tilelang.library.gemm.grouped"], "_ANSWERS", Cache(64))
    place.KERNELS.clear()
    b = normal((3, 56, 48), np.float16, 1)
    for m in (33, 40, 47, 64):
        a, sizes = normal((m, 56), np.float16, m), np.array([m - 30, 0, 25], np.int32)
        got = grouped_matmul(a, b, sizes, out_dtype="float32", **PLACES[on])
        check(got[:m - 30], wide(a[:m - 30]), wide(b[0]))
        check(got[m - 30:m - 5], wide(a[m - 30:m - 5]), wide(b[2]))
        assert not got[m - 5:].any()
    assert len(place.KERNELS) == 1


def test_an_output_is_filled_and_returned():
    a, b, out = normal((8, 16)), normal((16, 8)), np.zeros((8, 8), np.float16)
    assert matmul(a, b, out=out) is out
    check(out, wide(a), wide(b))
    assert grouped_matmul(a, np.stack([b, 2 * b]), np.int32([3, 5]), out=out) is out
    check(out, wide(a) * np.repeat([1, 2], [3, 5])[:, None], wide(b))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    a, b = torch.randn(20, 30), torch.randn(30, 40)
    assert torch.allclose(matmul(a, b), a @ b, atol=1e-4)
    assert torch.allclose(matmul(a.t().contiguous().t(), b, bias=torch.ones(40)), a @ b + 1, atol=1e-4)
    h = matmul(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    assert h.dtype == torch.float32 and torch.allclose(h, a.bfloat16().float() @ b.bfloat16().float(), atol=1e-4)
    f8 = matmul(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn))
    assert f8.dtype == torch.bfloat16
    sizes = torch.tensor([5, 15], dtype=torch.int32)
    c = grouped_matmul(a, torch.stack([b, 2 * b]), sizes)
    assert torch.allclose(c, torch.cat([a[:5] @ b, a[5:] @ (2 * b)]), atol=1e-3)


A, B = np.zeros((8, 16), np.float16), np.zeros((16, 8), np.float16)
F8 = np.zeros((128, 128), E4)


@pytest.mark.parametrize("call, kind, says", [
    (lambda: matmul(A, A), "matmul-shape", r"8 x 16 and op\(b\) 8 x 16"),
    (lambda: matmul(A[0], B), "matmul-shape", "a matrix or a batch"),
    (lambda: matmul(A, B[None]), "matmul-shape", "b a batch of 1"),
    (lambda: matmul(np.stack([A, A]), np.stack([B, B, B])), "matmul-shape", "b a batch of 3"),
    (lambda: matmul(A, B, bias=np.zeros(9, np.float16)), "matmul-shape", r"expected \(8,\)"),
    (lambda: matmul(A, B, bias=np.zeros(8, np.int32)), "matmul-type", "bias is of int32"),
    (lambda: matmul(A, B, out=np.zeros((8, 8), np.float32)), "matmul-shape", "expected float16"),
    (lambda: matmul(B[:8], B[:8], out=B[4:12]), "matmul-option", "out and a have memory in common"),
    (lambda: matmul(A, B, out=B[:8]), "matmul-option", "out and b have memory in common"),
    (lambda: matmul(A, B.astype(np.float32)), "matmul-type", "float16 and float32"),
    (lambda: matmul(A, B, out_dtype="int32"), "matmul-type", "no result of int32"),
    (lambda: matmul(A.astype(np.int16), B.astype(np.int16)), "matmul-type", "int16"),
    (lambda: matmul([[1.0]], B), "matmul-type", "found list"),
    (lambda: matmul(A, B, activation="tanh"), "matmul-option", "'tanh'"),
    (lambda: matmul(A, B, scale_a=np.float32([1]), scale_b=np.float32([1])), "matmul-option", "float8 or int8"),
    (lambda: matmul(F8, F8, scale_a=np.float32([1])), "matmul-option", "both of them"),
    (lambda: matmul(F8, F8, scale_a=np.ones(1), scale_b=np.ones(1)), "matmul-type", "float64"),
    (lambda: matmul(F8, F8, scale_a=np.ones((128, 2), np.float32), scale_b=np.float32([1])), "matmul-shape", r"\(128, 1\)"),
    (lambda: grouped_matmul(A, B, np.zeros(1, np.int32)), "matmul-shape", "2 and 2"),
    (lambda: grouped_matmul(A, B[None], np.int32([8]), out=np.zeros((8, 8), np.float32)), "matmul-shape", "expected float16"),
    (lambda: grouped_matmul(B[:8], B[None, :8], np.int32([8]), out=B[4:12]), "matmul-option", "out and a have memory in"),
    (lambda: grouped_matmul(A, B[None], np.zeros(2, np.int32)), "matmul-shape", "group_sizes"),
])
def test_refusals(call, kind, says):
    with pytest.raises(Exception, match=says) as caught:
        call()
    assert caught.value.kind == kind and caught.value.hint


def test_groups_without_rows_have_a_result_without_rows():
    assert grouped_matmul(A[:0], B[None], np.zeros(1, np.int32)).shape == (0, B.shape[1])
