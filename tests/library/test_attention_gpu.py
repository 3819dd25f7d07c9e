"""flash_attention and flash_decode on a GPU at real sizes, against torch in float64."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.library import create_block_mask, flash_attention, flash_decode, flex_attention

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
ROUND = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def reference(q, k, v, causal, window):
    """(result, logarithms) in float64 of bshd tensors, a head at a time."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64, device=q.device)
    at = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    hidden = torch.zeros(at.shape[0], key.shape[1], dtype=torch.bool, device=q.device)
    if window:
        hidden |= (key - at).abs() >= window
    if causal:
        hidden |= key > at
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            g = h // (q.shape[2] // k.shape[2])
            s = (q[b, :, h].double() @ k[b, :, g].double().T * q.shape[-1]**-0.5).masked_fill_(hidden, -torch.inf)
            lse[b, h] = torch.logsumexp(s, -1)
            p = torch.exp(s - lse[b, h].nan_to_num(neginf=0.0)[:, None])
            out[b, :, h] = p @ v[b, :, g].double()
    return out, lse


def bound(q, k, v):
    d = q.shape[-1]
    score = d * 2.0**-24 * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()) * d**-0.5
    return float(v.double().abs().max()) * (2 * ROUND[q.dtype] + 2 * score + 2.0**-18 + 2.0**-25 * k.shape[1]), \
        2 * score + 2.0**-15


def agree(got, want, allowed):
    got = got.double()
    return got.shape == want.shape and bool(((got == want) | ((got - want).abs() <= allowed)).all())


def random(*shape, dtype=torch.float16):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(len(shape) + sum(shape))).to(dtype)


FORMS = {"full": dict(), "causal": dict(causal=True), "bf16": dict(causal=True, dtype=torch.bfloat16),
         "grouped": dict(kv_heads=1), "window": dict(causal=True, window=200), "both_sides": dict(window=100),
         "ragged": dict(seq_q=1023, seq_k=2050, causal=True), "more_queries": dict(seq_q=1500, seq_k=700, causal=True),
         "short": dict(seq_q=7, seq_k=300, causal=True), "few": dict(seq_q=9, seq_k=3000, heads=8, causal=True),
         "chunk": dict(seq_q=500, seq_k=8192, causal=True),
         "far_window": dict(seq_q=300, seq_k=9000, window=4000), "one_query": dict(seq_q=1, seq_k=5000, kv_heads=1),
         "d64": dict(dim=64), "d80": dict(dim=80),
         "d96": dict(dim=96, causal=True), "d192": dict(dim=192, dim_v=128, causal=True), "d256": dict(dim=256, causal=True)}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", FORMS)
def test_flash_attention(name, layout):
    o = {**dict(seq_q=2048, seq_k=2048, heads=4, kv_heads=2, dim=128, causal=False, window=None, dtype=torch.float16),
         **FORMS[name]}
    q = random(2, o["seq_q"], o["heads"], o["dim"], dtype=o["dtype"])
    k = random(2, o["seq_k"], o["kv_heads"], o["dim"], dtype=o["dtype"])
    v = random(2, o["seq_k"], o["kv_heads"], o.get("dim_v", o["dim"]), dtype=o["dtype"])
    given = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in (q, k, v)]
    got, lse = flash_attention(*given, causal=o["causal"], window=o["window"], layout=layout, return_lse=True)
    want, want_lse = reference(q, k, v, o["causal"], o["window"])
    allowed, allowed_lse = bound(q, k, v)
    assert agree(got.transpose(1, 2) if layout == "bhsd" else got, want, allowed)
    assert agree(lse, want_lse, allowed_lse)
    for _ in range(20):  # a race would show sooner or later
        assert torch.equal(flash_attention(*given, causal=o["causal"], window=o["window"], layout=layout), got)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ROUND)
def test_scores_below_zero_and_nan(dtype, causal):
    """Maxima of floats are computed as integers where that is right: not where all are below zero, nor beside NaN."""
    q, k, v = (random(1, n, 2, d, dtype=dtype) for n, d in ((600, 128), (700, 128), (700, 64)))
    q, k = q.abs(), -k.abs()
    k[:, :, 1, ::2] *= -1  # of the other head some are above
    want = reference(q, k, v, causal, None)[0]
    assert agree(flash_attention(q, k, v, causal=causal), want, bound(q, k, v)[0])
    q[0, 77, 0, 5] = torch.nan
    got = flash_attention(q, k, v, causal=causal)
    assert got[0, 77, 0].isnan().all()
    got[0, 77, 0] = want[0, 77, 0].to(dtype)
    assert agree(got, want, bound(q.nan_to_num(), k, v)[0])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("seq_q, seq_k, heads", [(40, 30000, 3), (1200, 1100, 17), (128, 4097, 9), (2048, 2048, 10)])
def test_tiles_shared_out_by_keys(seq_q, seq_k, heads, layout):
    q, k, v = random(1, seq_q, heads, 128), random(1, seq_k, 1, 128), random(1, seq_k, 1, 128)
    given = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in (q, k, v)]
    got, lse = flash_attention(*given, layout=layout, return_lse=True)
    want, want_lse = reference(q, k, v, False, None)
    allowed, allowed_lse = bound(q, k, v)
    assert agree(got.transpose(1, 2) if layout == "bhsd" else got, want, allowed) and agree(lse, want_lse, allowed_lse)
    for _ in range(20):
        assert torch.equal(flash_attention(*given, layout=layout), got)


@pytest.mark.parametrize("lengths", [[700, 0, 1, 129, 2000, 64], [1024] * 8, [3] * 300, [4096, 4096]],
                         ids=["mixed", "equal", "many", "two"])
def test_packed_sequences(lengths):
    cu = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device="cuda")
    q, k, v = random(sum(lengths), 4, 128), random(sum(lengths), 2, 128), random(sum(lengths), 2, 128)
    got, lse = flash_attention(q, k, v, causal=True, cu_seqlens_q=cu, return_lse=True)
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        parts = [x[None, a:b] for x in (q, k, v)]
        if a < b:
            want, want_lse = reference(*parts, True, None)
            allowed, allowed_lse = bound(*parts)
            assert agree(got[None, a:b], want, allowed) and agree(lse[None, :, a:b], want_lse, allowed_lse)


def test_slices_of_one_tensor_and_many_shapes():
    for length in range(100, 2000, 97):  # beyond the kernels made for one shape each
        qkv = random(2, length, 3, 4, 64)
        q, k, v = (qkv[:, :, i] for i in range(3))
        assert agree(flash_attention(q, k, v, causal=True), reference(q, k, v, True, None)[0], bound(q, k, v)[0]), length


def test_captured_in_a_graph():
    q, k, v = (random(1, 1024, 4, 128) for _ in range(3))
    out = torch.empty_like(q)
    flash_attention(q, k, v, causal=True, out=out)
    want = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_attention(q, k, v, causal=True, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("page", [16, 64, None])
@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("seq_q, kv_heads, dim", [(1, 2, 128), (3, 1, 64), (1, 8, 256)])
def test_flash_decode(page, splits, seq_q, kv_heads, dim):
    lengths = [1000, 17, 0, 2049]
    width = -(-2049 // (page or 1))
    cache = (4, 2100, kv_heads, dim) if page is None else (4 * width, page, kv_heads, dim)
    k, v, q = random(*cache), random(*cache), random(4, seq_q, 8, dim)
    table = None if page is None else torch.randperm(4 * width, device="cuda").int().view(4, width)
    got, lse = flash_decode(q, k, v, torch.tensor(lengths, dtype=torch.int32, device="cuda"), block_table=table, splits=splits,
                            return_lse=True)
    for b, n in enumerate(lengths):
        mine = [(x[b] if page is None else x[table[b].long()].flatten(0, 1))[None, :n] for x in (k, v)]
        if n == 0:
            assert not got[b].any() and bool((lse[b] == -torch.inf).all())
            continue
        want, want_lse = reference(q[b:b + 1], *mine, True, None)
        allowed, allowed_lse = bound(q[b:b + 1], *mine)
        assert agree(got[b:b + 1], want, allowed) and agree(lse[b:b + 1], want_lse, allowed_lse)


FLEX = {
    "softcap": (lambda s, b, h, i, j: 30.0 * T.tanh(s / 30.0), lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), None),
    "index": (lambda s, b, h, i, j: s + T.cast(j - i, "float32") * 0.01, lambda s, b, h, i, j: s + (j - i) * 0.01, None),
    "causal": (None, lambda s, *_: s, lambda b, h, i, j: i >= j),
    "documents": (lambda s, b, h, i, j, doc: s * 0.5, lambda s, b, h, i, j, doc: s * 0.5,
                  lambda b, h, i, j, doc: (doc[i] == doc[j]) & (i - j < 300)),
}


@pytest.mark.parametrize("dtype", ROUND)
@pytest.mark.parametrize("size", [1.0, 12.0, "rising"])  # arguments of tanh below and above those of its polynomial
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name, size, dtype):
    change, exact, mask = FLEX[name]
    q, k, v = (random(2, 1300, h, 128, dtype=dtype) for h in (4, 2, 2))
    if size == "rising":  # so that maxima move
        k = (k * torch.linspace(0.0, 12.0, 1300, device="cuda")[:, None, None]).to(k.dtype)
    else:
        q = q * size
    read = ((torch.arange(1300, device="cuda") // 350).int(),) if name == "documents" else ()
    blocks = None if mask is None else create_block_mask(mask, 1300, 1300, device="cuda", tensors=read)
    out, lse = flex_attention(q, k, v, score_mod=change, block_mask=blocks, tensors=read, return_lse=True)
    at = torch.arange(1300, device="cuda")
    allowed, allowed_lse = bound(q, k, v)
    for b, h in ((0, 0), (1, 3)):
        s = exact(q[b, :, h].double() @ k[b, :, h // 2].double().T * 128**-0.5, b, h, at[:, None], at[None, :], *read)
        s = s if mask is None else s.masked_fill(~mask(b, h, at[:, None], at[None, :], *read), -torch.inf)
        assert agree(out[b, :, h], torch.softmax(s, -1) @ v[b, :, h // 2].double(), allowed + 2.0**-14 * float(v.abs().max()))
        assert agree(lse[b, h], torch.logsumexp(s, -1), allowed_lse + 2.0**-14)
    for _ in range(20):
        assert torch.equal(flex_attention(q, k, v, score_mod=change, block_mask=blocks, tensors=read), out)
