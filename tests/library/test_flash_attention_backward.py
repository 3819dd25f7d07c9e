"""The gradients of attention against float64: masks, heads, packed sequences, types, and what torch does with the function."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from sass_text import loops

import tilelang
import tilelang.language as T
from tilelang import errors
from tilelang.library import create_block_mask, flash_attention, flash_attention_backward, flex_attention
from tilelang.library.attention import backward
from tilelang.library.attention.problem import Sizes, attention_problem, opened
from tilelang.library.attention.tile_cost import machine_of
from tilelang.library.autograd import define
from tilelang.runtime import nvrtc, sass
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
ROUND = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23, "float64": 2.0**-50}
SM90, SM80 = {"kind": "cuda", "arch": "sm_90a"}, {"kind": "cuda", "arch": "sm_80"}
GPUS = [pytest.param(SM90, marks=pytest.mark.slow, id="sm_90a"), pytest.param(SM80, marks=pytest.mark.slow, id="sm_80")]
everywhere = pytest.mark.parametrize("on", [pytest.param("tile", id="tile"), pytest.param(None, id="cpu"), *GPUS])
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (5, 3)}, "left": {"causal": True, "window": 20}}


def arrays(seq_q=70, seq_k=100, heads=2, kv_heads=1, dim=64, dim_v=None, batch=1, dtype="float16"):
    """q, k, v and the gradient of the result."""
    rng = np.random.default_rng(0)
    dim_v = dim_v or dim
    return [rng.standard_normal((batch, n, h, d)).astype(np.float32).astype(TYPES[dtype])
            for n, h, d in ((seq_q, heads, dim), (seq_k, kv_heads, dim), (seq_k, kv_heads, dim_v), (seq_q, heads, dim_v))]


def seen(seq_q, seq_k, causal=False, window=None):
    left, right = (None, None) if window is None else window if isinstance(window, tuple) else (window - 1, window - 1)
    right = 0 if causal else right
    at, key = np.arange(seq_q)[:, None] + seq_k - seq_q, np.arange(seq_k)
    return ((True if right is None else key <= at + right) & (True if left is None else key >= at - left)) & (at > -seq_k)


def exact(q, k, v, do, keep, dlse=None, change=lambda s: (s, 1.0), eps=0.0):
    """(gradients of q, k and v, bounds of their errors) in float64 by the formulas. eps: of one rounding of a weight."""
    group, scale = q.shape[2] // k.shape[2], q.shape[-1]**-0.5
    q, k, v, do = (np.asarray(x).astype(np.float64) for x in (q, k, v, do))
    kk, vv = (np.repeat(x, group, 2) for x in (k, v))
    s, slope = change(np.einsum("bqhd,bkhd->bhqk", q, kk) * scale)
    s = np.where(keep, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(top), 0.0, top))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    dp = np.einsum("bqhd,bkhd->bhqk", do, vv)
    delta = (p * dp).sum(-1, keepdims=True) - (0.0 if dlse is None else np.asarray(dlse)[..., None])
    each = np.einsum("bqhd,bqhd->bhq", abs(np.einsum("bhqk,bkhd->bqhd", p, vv)), abs(do))[..., None]  # rounded in the result
    ds, rough = p * (dp - delta) * slope * scale, p * (abs(dp) + abs(delta) + each) * np.abs(slope) * scale

    def sums(p, ds, q, k, do):
        def of_keys(x, y):
            return np.einsum("bhqk,bqhd->bkhd", x, y).reshape(*k.shape[:2], k.shape[2] // group, group, y.shape[-1]).sum(3)

        return np.einsum("bhqk,bkhd->bqhd", ds, k), of_keys(ds, q), of_keys(p, do)

    wants = sums(p, ds, q, kk, do)
    least = 2.0**-14 * eps  # half of the smallest number of float16, 2^-25
    return wants, [8 * eps * (x + abs(w)) + least for w, x in zip(wants, sums(p, rough, abs(q), abs(kk), abs(do)))]


def check(on=None, dtype="float16", deterministic=None, dlse=False, tf32=False, **sizes):
    masks = {n: sizes.pop(n) for n in ("causal", "window") if n in sizes}
    q, k, v, do = arrays(dtype=dtype, **sizes)
    out, lse = flash_attention(q, k, v, return_lse=True, target=on, **masks)
    extra = np.random.default_rng(1).standard_normal(lse.shape).astype(lse.dtype) if dlse else None
    got = flash_attention_backward(q, k, v, out, lse, do, grad_lse=extra, target=on, deterministic=deterministic, **masks)
    wants, bounds = exact(q, k, v, do, seen(q.shape[1], k.shape[1], **masks), extra, eps=2.0**-10 if tf32 else ROUND[dtype])
    for name, g, w, b in zip(("dq", "dk", "dv"), got, wants, bounds):
        assert g.dtype == q.dtype and g.shape == w.shape and g.flags.c_contiguous
        over = np.abs(g.astype(np.float64) - w) / b
        assert over.max() <= 1, (name, over.max())


@everywhere
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, deterministic, on):
    check(on, deterministic=deterministic, **MASKS[mask])


@everywhere
def test_rows_that_see_no_key_and_keys_that_nobody_sees(on):
    check(on, seq_q=100, seq_k=40, causal=True)
    check(on, seq_q=20, seq_k=150, window=3)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (4, 2), (4, 1)])
def test_grouped_queries(heads, kv_heads, deterministic):
    check(heads=heads, kv_heads=kv_heads, batch=2, seq_q=33, seq_k=33, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("seq_q, seq_k", [(1, 1), (1, 200), (128, 128), (129, 65)])
def test_lengths(seq_q, seq_k):
    check(seq_q=seq_q, seq_k=seq_k, causal=True)


@pytest.mark.parametrize("dim, dim_v", [(16, 16), (96, 32), (192, 128), (256, 256)])
def test_head_dimensions(dim, dim_v):
    check("tile", dim=dim, dim_v=dim_v, causal=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_types(dtype):
    check(dtype=dtype, causal=True, deterministic=True)
    check(dtype=dtype, window=(5, 3), deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize("on", [SM90, SM80], ids=["sm_90a", "sm_80"])
def test_float32_is_multiplied_in_tf32_on_a_gpu(on):
    check(on, dtype="float32", tf32=True, dim=16, seq_q=40, seq_k=40)


@everywhere
def test_logarithms_have_a_gradient(on):
    check(on, dlse=True, causal=True)


def test_there_is_nothing_to_compute():
    q, k, v, do = arrays(seq_k=0)
    out, lse = flash_attention(q, k, v, return_lse=True)
    got = flash_attention_backward(q, k, v, out, lse, do)
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape] and not got[0].any()


@everywhere
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_packed_sequences(mask, deterministic, on):
    check_packed([70, 1, 0, 130, 5], [100, 40, 30, 130, 0], MASKS[mask], on, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_packed_sequences_store_the_gradients_of_scores(mask):
    assert packed_form([130, 33], 2, 1).stored == 1
    check_packed([130, 33], [150, 64], MASKS[mask], SM90, heads=2, kv_heads=1, dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_packed_sequences_store_the_gradients_of_scores_on_a_gpu(mask, heads, kv_heads):
    check_packed([700, 1, 0, 1300, 5], [900, 40, 30, 1300, 0], MASKS[mask], "cuda", heads=heads, kv_heads=kv_heads, dim=128)


def packed_form(lengths, heads, kv_heads, dim=128, causal=False):
    q, k = (np.broadcast_to(np.float16(0), (sum(lengths), n, dim)) for n in (heads, kv_heads))
    p = attention_problem({"q": q, "k": k, "v": k, "out": None, "cu_seqlens_q": np.zeros(len(lengths) + 1, np.int32),
                           "cu_seqlens_k": None}, True, causal=causal, window=None, layout="bshd", scale=None, with_lse=False)
    at = backward.Place(Target(SM90))
    return backward.backward_form(p, machine_of(at.target), {"q": q, "out": q, "grad_out": q}, at, None, backward.PLAIN)[0]


@pytest.mark.parametrize("lengths, heads, kv_heads, dim, stored, rows", [
    ([4096] * 4, 16, 16, 128, 4, 256), ([16384], 16, 16, 128, 4, 256), ([500] * 16, 16, 4, 128, 0, 128),
    ([4096] * 8, 16, 16, 128, 0, 128), ([4096] * 4, 16, 16, 64, 0, 192)])
def test_packed_sequences_store_as_many_heads_as_fit(lengths, heads, kv_heads, dim, stored, rows):
    f = packed_form(lengths, heads, kv_heads, dim)
    assert (f.stored, f.query.rows) == (stored, rows)
    assert not stored or 2 * np.prod(f.dq_workspace[1]) <= backward.STORED * 9 / 8
    assert packed_form(lengths, heads, kv_heads, dim, causal=True).stored == 0  # it would take longer


def check_packed(lengths_q, lengths_k, masks, on, deterministic=None, **sizes):
    """Gradients of packed sequences beside float64; three tokens are of no sequence."""
    cu_q, cu_k = (np.cumsum([0, *x]).astype(np.int32) for x in (lengths_q, lengths_k))
    given = [x[0] for x in arrays(cu_q[-1] + 3, cu_k[-1] + 3, **sizes)]
    q, k, v, do = given
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    if on == "cuda":
        import torch

        on, (q, k, v, do), cu = None, (torch.tensor(x, device="cuda") for x in given), {
            n: torch.tensor(x, device="cuda") for n, x in cu.items()}
    out, lse = flash_attention(q, k, v, return_lse=True, target=on, **cu, **masks)
    out[int(cu_q[-1]):], lse[:, int(cu_q[-1]):] = np.nan, np.nan
    got = [x if isinstance(x, np.ndarray) else x.cpu().numpy() for x in flash_attention_backward(
        q, k, v, out, lse, do, target=on, deterministic=deterministic, **cu, **masks)]
    q, k, v, do = given
    for n, (m, l) in enumerate(zip(lengths_q, lengths_k)):
        a, b = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        wants, bounds = exact(q[None, a], k[None, b], v[None, b], do[None, a], seen(m, l, **masks), eps=ROUND["float16"])
        for name, g, w, e in zip(("dq", "dk", "dv"), (got[0][a], got[1][b], got[2][b]), wants, bounds):
            assert (np.abs(g.astype(np.float64) - w[0]) <= e[0]).all(), (name, n)
    assert not any(x[end:].any() for x, end in zip(got, (cu_q[-1], cu_k[-1], cu_k[-1])))


def test_layouts_and_strides():
    q, k, v, do = arrays(heads=4, kv_heads=2, batch=2)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    want = flash_attention_backward(q, k, v, out, lse, do, causal=True)
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v, out, do)]
    got = flash_attention_backward(*turned[:4], lse, turned[4], causal=True, layout="bhsd")
    for g, w in zip(got, want):
        assert (g.transpose(0, 2, 1, 3) == w).all()
    odd = np.stack([do, do], -1)[..., 0]  # rows that are not contiguous are copied
    assert all((g == w).all() for g, w in zip(flash_attention_backward(q, k, v, out, lse, odd, causal=True), want))


def test_one_kernel_takes_any_sizes(monkeypatch):
    monkeypatch.setattr(backward, "dynamic_shapes", lambda: True)
    backward._RUNS.clear()
    made = set()
    found = backward.fast_kernel
    monkeypatch.setattr(backward, "fast_kernel", lambda *a, **k: made.add(id(found(*a, **k))) or found(*a, **k))
    for seq in (40, 70, 130):
        check("tile", batch=2, seq_q=seq, seq_k=seq, heads=4, kv_heads=2, causal=True)
    assert len(made) == 1
    backward._RUNS.clear()


def test_wrong_arguments():
    q, k, v, do = arrays()
    out, lse = flash_attention(q, k, v, return_lse=True)
    for given, kind, text in (((q, k, v, out, lse.astype(np.float64), do), "attention-shape", "lse is float64"),
                              ((q, k, v, out[:, 1:], lse, do), "attention-shape", "out is float16 of shape"),
                              ((q, k, v, out, lse, do.astype(np.float32)), "attention-shape", "grad_out")):
        with pytest.raises(errors.TileLangError, match=text) as e:
            flash_attention_backward(*given)
        assert e.value.kind == kind
    wide = [x.astype(np.float64) for x in (q, k, v)]
    with pytest.raises(errors.TileLangError, match="CPU only"):
        flash_attention(*wide, target=SM90)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_89"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("deterministic", [True, False])
def test_tiles_fit_the_machine(arch, dtype, dim, deterministic):
    m = machine_of(Target({"kind": "cuda", "arch": arch}), None, dtype)
    shape = np.empty((1, 256, 2, dim), TYPES[dtype])
    p = attention_problem({**dict.fromkeys("qkv", shape), **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, True,
                          causal=False, window=None, layout="bshd", scale=None, with_lse=False)
    assert p.sizes == Sizes(1, 256, 256, 2, 2, dim, dim)
    for tile in backward.backward_tiles(m, p, deterministic):  # a machine for float32 counts elements as two bytes
        assert 2 * (tile.rows + tile.keys) * 2 * dim <= m.shared and 384 % tile.rows == 0 and 128 % tile.keys == 0


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_is_spilled_for_hopper(dim, causal):
    q, k, v, do = arrays(256, 256, 2, 2, dim)
    p = attention_problem({"q": q, "k": k, "v": v, **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, True,
                          causal=causal, window=None, layout="bshd", scale=None, with_lse=False)
    at = backward.Place(Target(SM90))
    form, _ = backward.backward_form(p, machine_of(at.target), {"q": q, "out": q, "grad_out": do}, at, None, backward.PLAIN)
    kernel = backward.fast_kernel(at, backward._program, form, 132)
    assert form.query is not None and kernel.n_spills == 0
    assert all("wgmma" in str(x["instructions"]) for x in kernel.report_data["kernels"][1:])


# ---- torch -----------------------------------------------------------------------------------------------------------------


def tensors(dtype, seq_q=9, seq_k=12, heads=2, dim=16):
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, n, h, dim, dtype=dtype, requires_grad=True) for n, h in ((seq_q, heads), (seq_k, 1), (seq_k, 1))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_errors_are_those_of_torch(dtype, deterministic):
    import torch

    given = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays(200, 200, 2, 2, 64, dtype="float32")]
    wants, _ = exact(*[x.double().numpy() for x in given], seen(200, 200, True))
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    ours = torch.autograd.grad(flash_attention(q, k, v, causal=True, deterministic=deterministic), (q, k, v), given[3])
    y = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    theirs = torch.autograd.grad(y, (q, k, v), given[3].transpose(1, 2))
    for a, b, w in zip(ours, theirs, wants):
        own, other = (float(((x.double().numpy() - w)**2).mean()**0.5) for x in (a, b))
        assert own <= 1.5 * other


@pytest.mark.parametrize("deterministic", [True, False])
def test_gradcheck(deterministic):
    import torch

    q, k, v = tensors(torch.float64, 3, 5)
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal=True, return_lse=True, deterministic=deterministic),
                                    (q, k, v), fast_mode=True)


def test_opcheck():
    import torch

    q, k, v = tensors(torch.float16)
    flash_attention(q, k, v).sum().backward()
    define("flash_attention")
    torch.library.opcheck(torch.ops.tilelang_library.flash_attention.default,
                          (q, k, v, None, None, None, None, None, 0, None, "bshd", True, 0, None))


def test_whole_graphs_of_any_sizes():
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.compile(lambda q, k, v: (flash_attention(2 * q, k, v, causal=True)**2).sum(), fullgraph=True, dynamic=True,
                          backend="aot_eager")
    for seq in (5, 6, 9):
        q, k, v = tensors(torch.float32, seq, seq)
        found = torch.autograd.grad(model(q, k, v), (q, k, v))
        wanted = torch.autograd.grad((flash_attention(2 * q, k, v, causal=True)**2).sum(), (q, k, v))
        torch.testing.assert_close(found, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dim, dim_v", [(40, 40), (72, 64), (64, 1)])
def test_heads_of_any_size(dim, dim_v):
    import torch
    q, k, v, do = (torch.from_numpy(x.astype(np.float64)).requires_grad_() for x in arrays(9, 20, dim=dim, dim_v=dim_v))
    for attend in (flash_attention, flex_attention):
        given = [x.detach().half().requires_grad_() for x in (q, k, v)]
        got = attend(*given, layout="bshd")
        scores = torch.einsum("bqhd,bkjd->bhqk", q, k) * dim**-0.5
        want = torch.einsum("bhqk,bkjd->bqhd", scores.softmax(-1), v)
        pairs = [(got, want), *zip(torch.autograd.grad(got, given, do.half()), torch.autograd.grad(want, (q, k, v), do))]
        for g, w in pairs:
            assert g.shape == w.shape and (g.double() - w).abs().max() < 4 * 2.0**-11 * w.abs().max()
    out = torch.zeros_like(got, requires_grad=False)
    with torch.no_grad():
        assert flash_attention(*given, out=out) is out and (out.double() - want).abs().max() < 2.0**-9 * want.abs().max()


def test_what_autograd_is_not_given():
    import torch

    q, k, v = tensors(torch.float32)
    with pytest.raises(errors.TileLangError, match="computes no gradient where `out` is given"):
        flash_attention(q, k, v, out=torch.empty_like(q))
    first, = torch.autograd.grad(flash_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="library-derivative"):
        first.sum().backward()
    with torch.no_grad():
        assert not flash_attention(q, k, v).requires_grad


def test_deterministic_algorithms_of_torch_decide():
    import torch

    q, k, v = tensors(torch.float32, 40, 40)
    forms = []
    found = backward.backward_form
    torch.use_deterministic_algorithms(True)
    try:
        backward.backward_form = lambda *a: forms.append(found(*a)) or forms[-1]
        flash_attention(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        backward.backward_form = found
    assert [f.query is not None for f, _ in forms] == [True]


CAP = 5.0
SCORES = {
    "softcap": (lambda s, b, h, i, j: CAP * T.tanh(s / CAP), lambda s, h, i, j: CAP * (s / CAP).tanh()),
    "alibi": (lambda s, b, h, i, j, slopes: s + slopes[h] * T.cast(j - i, "float32"),
              lambda s, h, i, j: s + 0.25 / (1 + h) * (j - i)),
    "sides": (lambda s, b, h, i, j: T.if_then_else(i % 7 == j % 7, 2.0 * s, T.max(s, 0.0) - T.abs(s) * 0.1),
              lambda s, h, i, j: (2 * s).where(i % 7 == j % 7, s.clamp(min=0) - 0.1 * s.abs())),
    "none": (None, lambda s, h, i, j: s)}
SHOWN = {"window": lambda b, h, i, j: (i >= j) & (i - j < 90), "heads": lambda b, h, i, j: (i >= j) & (i - j < 60 + 60 * h)}


@pytest.mark.parametrize("name, mask, dtype", [("softcap", None, "float32"), ("alibi", "window", "float32"),
                                               ("sides", None, "float32"), ("none", "heads", "float32"),
                                               ("softcap", "heads", "float16")])
def test_gradients_of_functions_of_scores_and_masks(name, mask, dtype):
    import torch

    change, plain = SCORES[name]
    q, k, v = tensors(getattr(torch, dtype), 150, 150)
    shown = mask and create_block_mask(SHOWN[mask], 150, 150, heads=2, block=(64, 64), device="cpu")
    read = (torch.tensor([0.25, 0.125]),) if name == "alibi" else ()
    out = flex_attention(q, k, v, score_mod=change, block_mask=shown, tensors=read)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    kk, vv = (x.double().repeat_interleave(2, 2) for x in (k, v))
    h, i, j = (torch.arange(n) for n in (2, 150, 150))
    at = h[:, None, None], i[:, None], j
    s = plain(torch.einsum("bqhd,bkhd->bhqk", q.double(), kk) * 0.25, *at)
    s = s if mask is None else s.masked_fill(~SHOWN[mask](0, *at), -torch.inf)
    want = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), vv).square().sum(), (q, k, v))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4 if dtype == "float32" else 4e-3, check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize("on", [SM90, SM80], ids=["sm_90a", "sm_80"])
def test_gradients_of_functions_on_gpus(on):
    import torch

    given = tensors(torch.float16, 150, 150)
    shown = create_block_mask(SHOWN["heads"], 150, 150, heads=2, block=(64, 64), device="cpu")
    change = SCORES["softcap"][0]
    got, want = (torch.autograd.grad(flex_attention(*given, score_mod=change, block_mask=shown, target=t).sum(), given)
                 for t in (on, None))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-2, atol=1e-2)


def changed(s, b, h, i, j):
    return CAP * T.tanh(s / CAP)


def test_whole_graphs_take_functions_of_scores_and_masks():
    import torch

    torch._dynamo.reset()
    shown = create_block_mask(SHOWN["heads"], 150, 150, heads=2, block=(64, 64), device="cpu")

    def block(q, k, v):
        return flex_attention(2 * q, k, v, score_mod=changed, block_mask=shown).square().sum()

    given = tensors(torch.float32, 150, 150)
    found = torch.autograd.grad(torch.compile(block, fullgraph=True, backend="aot_eager")(*given), given)
    torch.testing.assert_close(found, torch.autograd.grad(block(*given), given))


def test_functions_without_a_known_derivative_are_named():
    import torch

    q, k, v = tensors(torch.float32)
    with pytest.raises(errors.TileLangError, match="the derivative of a score function with `acosh`"):
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: T.acosh(2.0 + s * s)).sum().backward()
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(errors.TileLangError, match="computes no gradient"):
        flex_attention(q, k, v, score_mod=lambda s, b, h, i, j, x: s * x[h], tensors=(slopes,))


def form_of(batch, seq, heads, kv_heads, dim, causal, most=1 << 20):
    given = [np.broadcast_to(np.zeros((), np.float16), (batch, seq, n, dim)) for n in (heads, kv_heads, kv_heads, heads, heads)]
    x = dict(zip(("q", "k", "v", "out", "grad_out"), (np.lib.stride_tricks.as_strided(
        g, g.shape, [2 * s for s in backward.compact(g.shape)]) for g in given)))
    p = attention_problem({**{n: x[n] for n in "qkv"}, **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, True,
                          causal=causal, window=None, layout="bshd", scale=None, with_lse=False)
    at = backward.Place(Target(SM90))
    p = opened(p, at, object(), most=most)
    return backward.backward_form(p, machine_of(at.target), x, at, None, backward.PLAIN)[0]


def test_many_queries_have_a_kernel_for_any_lengths_that_stores_gradients_too():
    assert form_of(1, 32768, 16, 16, 128, True).stored == 0
    for causal in (False, True):
        f = form_of(1, 32768, 16, 16, 128, causal, most=backward.OWN_QUERIES)
        assert (f.stored, f.query.rows) == (1, 128 if causal else 256) and 2 * np.prod(f.dq_workspace[1]) <= backward.STORED
    assert form_of(1, 40000, 16, 16, 128, False, most=backward.OWN_QUERIES).stored == 0  # no room for one head


@pytest.mark.parametrize("sizes, stored, rows", [
    ((4, 4096, 16, 16, 128, False), 64, 256), ((1, 16384, 16, 16, 128, True), 4, 256), ((1, 300, 2, 2, 128, False), 2, 128),
    ((4, 4096, 16, 2, 128, True), 8, 256), ((4, 4096, 32, 2, 128, True), 0, 128), ((4, 4096, 16, 16, 64, False), 0, 192),
    ((1, 32768, 16, 16, 128, False), 0, 128)])
def test_gradients_of_scores_are_stored_for_as_many_heads_as_fit(sizes, stored, rows):
    """The second to last: few columns; others: one kv head's block is as long as all of a call, or too long."""
    f = form_of(*sizes)
    assert (f.stored, f.query.rows) == (stored, rows) and f.held == (sizes[4] == 64) and f.finds == (stored == 0)
    assert not stored or 2 * np.prod(f.dq_workspace[1]) <= backward.STORED


@pytest.mark.parametrize("sizes, subgroups", [
    ((4, 4096, 16, 1, 128), 2), ((4, 4096, 16, 2, 128), 1), ((1, 2048, 32, 8, 128), 2), ((1, 1024, 32, 8, 128), 1),
    ((1, 2048, 12, 1, 128), 12), ((1, 4096, 16, 16, 128), 1), ((1, 8192, 64, 1, 128), 4)])
def test_query_heads_are_taken_in_subgroups_where_blocks_of_keys_are_few(sizes, subgroups):
    batch, seq, heads, kv_heads, dim = sizes
    given = {n: np.broadcast_to(np.float16(0), (batch, seq, h, dim)) for n, h in zip("qkv", (heads, kv_heads, kv_heads))}
    p = attention_problem({**given, **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, True, causal=True, window=None,
                          layout="bshd", scale=None, with_lse=False)
    machine = machine_of(Target(SM90))
    assert backward.subgroups_of(p, machine, 132, None) == subgroups
    assert backward.subgroups_of(p, machine, 132, False) == backward.subgroups_of(p, machine_of(Target("cpu")), 132, None) == 1


def test_gradients_of_subgroups_are_added_up(monkeypatch, layout="bhsd"):
    q, k, v, do = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays(20, 40, 4, 2, 64))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True, layout=layout, target="tile")
    want = flash_attention_backward(q, k, v, out, lse, do, causal=True, layout=layout, target="tile")
    monkeypatch.setattr(backward, "subgroups_of", lambda p, *_: 2 if p.sizes.kv_heads == 2 else 1)
    monkeypatch.setattr(backward, "_RUNS", backward.Cache(8))
    found = flash_attention_backward(q, k, v, out, lse, do, causal=True, layout=layout, target="tile")
    assert len(backward._RUNS) == 1 and np.array_equal(found[0], want[0])
    for got, w in zip(found[1:], want[1:]):
        assert 0 < np.abs(got.astype(float) - w).max() <= 2e-3 * np.abs(w.astype(float)).max()  # sums of two rounded ones


@pytest.mark.slow
@pytest.mark.parametrize("causal, seq", [(False, 128), (True, 200)])
def test_stored_gradients_of_a_group_of_heads_on_the_simulator(causal, seq):
    f = form_of(1, seq, 2, 1, 128, causal)
    q, k, v, do = arrays(seq, seq, 2, 1, 128)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    program = lower(backward._program(f, 132).func, Target(SM90), {"tl.enable_fast_math": True, "tl.enable_hopper": True})
    assert not any("`Sum` is written" in x for k in program.kernels for x in k.plan.report)  # all by TMA
    none = [np.zeros((1, 1, 1, 1), np.int32)] * 2 + [np.zeros(1, np.float32)] * 2
    facts = np.zeros((2, -(-seq // f.unit) * f.unit), np.float32)
    given = (q, k, v, out, do, lse, np.zeros(1, np.float32), np.float32(128**-0.5), np.int32(0), *none, facts, facts.copy(),
             np.zeros(f.dq_workspace[1], np.float16), *map(np.zeros_like, (q, k, v)))
    names = "Q K V O dO LSE dLSE scale first Rows Columns X0 X1 L D Sum dQ dK dV".split()
    got = run_device(program, dict(zip(names, given))).outputs
    for n, want in zip(names[-3:], flash_attention_backward(q, k, v, out, lse, do, causal=causal)):
        assert f.stored and np.abs(got[n].astype(float) - want).max() <= 4e-3 * np.abs(want.astype(float)).max()


@pytest.mark.skipif(not nvrtc.available() or sass.find_nvdisasm() is None, reason="no NVRTC or nvdisasm")
@pytest.mark.parametrize("dim", [32, 64])
def test_gradients_of_scores_were_written_where_a_loop_keeps_q(dim):
    """ptxas of CUDA 13.0 gave dS the registers of Q, which the next iteration reads: dQ was wrong."""
    f = form_of(4, 4096, 16, 16, dim, False)
    kernel = tilelang.compile(backward._program(f, 132), target=SM90, pass_configs={
        "tl.enable_fast_math": True, "tl.enable_pdl": True, "tl.persistent": 132})
    body = next(text for _, text in reversed(loops(sass.disassemble(kernel.cubin))) if "HGMMA" in text)
    found = set(re.findall(r"HGMMA\S+ (R\d+), (R\d+), gdesc", body))
    assert f.rows_held and found and len(found) == len({operand for _, operand in found})


@pytest.mark.parametrize("dim, dim_v, lean", [(192, 128, True), (256, 128, True), (128, 128, False), (256, 256, False)])
def test_blocks_of_keys_leave_dk_where_their_registers_do_not_suffice(dim, dim_v, lean):
    q, k, v = (np.broadcast_to(np.float16(0), (4, 4096, 16, n)) for n in (dim, dim, dim_v))
    p = attention_problem({"q": q, "k": k, "v": v, **dict.fromkeys(("out", "cu_seqlens_q", "cu_seqlens_k"))}, True, causal=True,
                          window=None, layout="bshd", scale=None, with_lse=False)
    at = backward.Place(Target(SM90))
    f = backward.backward_form(p, machine_of(at.target), {"q": q, "out": v, "grad_out": v}, at, None, backward.PLAIN)[0]
    assert (f.lean, f.stored > 0) == (lean, True)
    assert not lean or (f.plain.tile.keys, f.plain.tile.rows, f.query.rows) == (128, 64, 256 if dim == 192 else 128)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (90, 0)}, {}], ids=["causal", "window", "all"])
def test_gradients_of_wide_heads_from_stored_scores(options):
    import torch

    for seq, heads, kv_heads in ((700, 2, 2), (640, 4, 2)):
        q, k, v, do = (torch.randn(2, seq, h, n, device="cuda", dtype=torch.float16) for h, n in (
            (heads, 192), (kv_heads, 192), (kv_heads, 128), (heads, 128)))
        out, lse = flash_attention(q, k, v, return_lse=True, **options)
        got = flash_attention_backward(q, k, v, out, lse, do, **options)
        wants, bounds = exact(*(x.cpu().numpy() for x in (q, k, v, do)), seen(seq, seq, **options), eps=ROUND["float16"])
        for g, w, e in zip(got, wants, bounds):
            assert (np.abs(g.cpu().numpy().astype(np.float64) - w) <= e).all()


@pytest.mark.gpu
def test_gradients_of_64_columns_on_a_gpu():
    """Lengths that key tiles divide, so that blocks of queries keep dO in registers."""
    import torch

    q, k, v, do = (torch.randn(2, 640, 3, 64, device="cuda", dtype=torch.float16) for _ in range(4))
    backward._RUNS.clear()  # the first lengths have a kernel of their own
    out, lse = flash_attention(q, k, v, return_lse=True)
    got = flash_attention_backward(q, k, v, out, lse, do)
    wants, bounds = exact(*(x.cpu().numpy() for x in (q, k, v, do)), seen(640, 640), eps=ROUND["float16"])
    for g, w, e in zip(got, wants, bounds):
        assert (np.abs(g.cpu().numpy().astype(np.float64) - w) <= e).all()


@pytest.mark.gpu
def test_calls_for_some_heads_each_leave_the_bits_of_one_call(monkeypatch):
    import torch

    q, k, v, do = (torch.randn(2, 700, h, 128, device="cuda", dtype=torch.float16) for h in (4, 2, 2, 4))
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    want = flash_attention_backward(q, k, v, out, lse, do, causal=True)
    found = backward.stored_form
    monkeypatch.setattr(backward, "stored_form", lambda f, sms, opened=False: replace(found(f, sms, opened), stored=1))
    backward._RUNS.clear()
    got = flash_attention_backward(q, k, v, out, lse, do, causal=True)
    backward._RUNS.clear()
    assert all(torch.equal(g, w) for g, w in zip(got, want))


@pytest.mark.gpu
def test_gradients_are_captured_in_a_cuda_graph():
    import torch

    q, k, v = (torch.randn(2, 300, h, 128, device="cuda", dtype=torch.float16, requires_grad=True) for h in (4, 2, 2))
    do = torch.randn(2, 300, 4, 128, device="cuda", dtype=torch.float16)
    want = torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), do)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), do)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(g, w) for g, w in zip(got, want))
