"""mla_decode and mla_prefill on a GPU at real sizes, against torch in float64."""

import pytest

import tilelang
from tilelang.library import mla_decode, mla_plan, mla_prefill
from tilelang.library.attention.mla_kernels import MlaForm, mla_attention

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads, dim_v, divided", [(128, 512, False), (128, 512, True), (64, 512, False), (16, 256, True)])
def test_threads_that_gather_rows_keep_their_registers(heads, dim_v, divided):
    """CUDA 13.0 kept the addresses of 36 copies over the loop and spilled them: 16 % longer. Later versions did not."""
    form = MlaForm(heads, 1, dim_v, 64, None, "bfloat16", "bfloat16", 132, divided, True)
    kernels = tilelang.compile(mla_attention(form), target="cuda -arch=sm_90a").report_data["kernels"]
    assert [k["spills"] for k in kernels] == [0] * (1 + divided)


def random(*shape, dtype=torch.float16):
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape))).to(dtype)


def reference(q, k, length):
    """(heads, 512) in float64 of one query (heads, 576)."""
    k = k[:length].double()
    return ((q.double() @ k.T) * 576**-0.5).softmax(-1) @ k[:, :512]


@pytest.mark.parametrize("dtype, kv_dtype", [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16),
                                             (torch.bfloat16, torch.float8_e4m3fn)])
@pytest.mark.parametrize("lengths", [[8192], [4096] * 64, [1, 128, 129, 7000, 0, 64]], ids=["one", "even", "mixed"])
def test_decoding_in_pages_with_plans_from_the_host_and_from_a_kernel(lengths, dtype, kv_dtype):
    batch, width = len(lengths), -(-max(lengths) // 64)
    q, kv = random(batch, 128, 576, dtype=dtype), random(batch, width * 64, 576, dtype=dtype).to(kv_dtype)
    order = torch.randperm(batch * width, device="cuda")
    cache = torch.empty(batch * width, 64, 576, device="cuda", dtype=kv_dtype)
    cache[order] = kv.view(batch * width, 64, 576)
    n = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    table = order.view(batch, width).int()
    got = mla_decode(q, cache, n, block_table=table)
    for b in range(min(batch, 6)):
        want = reference(q[b], kv[b].to(dtype), lengths[b]) if lengths[b] else torch.zeros_like(got[b]).double()
        bound = float(kv[b].double().abs().max()) * (2.0**-10 if dtype == torch.float16 else 2.0**-7)
        assert float((got[b].double() - want).abs().max()) <= bound
    plan = mla_plan(n, 128, known=lengths)
    first = mla_decode(q, cache, n, block_table=table, plan=plan)
    assert all(torch.equal(first, mla_decode(q, cache, n, block_table=table, plan=plan)) for _ in range(20))
    assert torch.equal(first, got)


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_of_slices(causal):
    q, both, r = random(1, 1000, 4, 192), random(1, 1000, 4, 256), random(1, 1000, 64)
    k, v = both[..., :128], both[..., 128:]
    got = mla_prefill(q, k, r, v, causal=causal)
    for h in range(4):
        s = q[0, :, h].double() @ torch.cat([k[0, :, h], r[0]], -1).double().T * 192**-0.5
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
        want = s.softmax(-1) @ v[0, :, h].double()
        assert float((got[0, :, h].double() - want).abs().max()) <= float(v.abs().max()) * 2.0**-9
