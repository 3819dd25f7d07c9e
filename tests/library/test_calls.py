"""Calls of the library behind a first one: what is looked at once for each form of the arguments, and what each time."""

import gc
import itertools
import weakref

import numpy as np
import pytest

from tilelang.library import dequant_matmul, flash_attention, flash_decode, flex_attention, grouped_matmul, matmul
from tilelang.library.agreement import Disjoint, overlap
from tilelang.library.arrays import maker

torch = pytest.importorskip("torch")
SM_80 = {"kind": "cuda", "arch": "sm_80"}


def bytes_of(x):
    """Addresses of all bytes of a tensor, one by one."""
    first, size = (x.ctypes.data, x.itemsize) if isinstance(x, np.ndarray) else (x.data_ptr(), x.element_size())
    steps = x.strides if isinstance(x, np.ndarray) else [s * size for s in x.stride()]
    starts = [first + sum(map(int.__mul__, at, steps)) for at in itertools.product(*map(range, x.shape))]
    return {s + k for s in starts for k in range(size)}


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_addresses_never_call_disjoint_what_is_not(framework):
    rng = np.random.default_rng(0)
    flat = np.zeros(60, np.int16)
    sure = shared = 0
    for _ in range(400):
        tensors = []
        for _ in range(3):
            shape = tuple(int(n) if rng.random() < 0.95 else 0 for n in rng.integers(1, 4, rng.integers(1, 4)))
            steps = [int(s) for s in rng.integers(0, 7, len(shape))]
            if framework == "numpy" and rng.random() < 0.3:
                steps[0] = -steps[0]
            low = sum((n - 1) * s for n, s in zip(shape, steps) if s < 0 and n)
            high = sum((n - 1) * s for n, s in zip(shape, steps) if s > 0 and n)
            start = int(rng.integers(-low, 60 - max(0, high)))
            part = torch.from_numpy(flat).as_strided(shape, steps, start) if framework == "torch" else \
                np.lib.stride_tricks.as_strided(flat[start:], shape, [2 * s for s in steps])
            tensors.append(part)
        out, *others = tensors
        mine = bytes_of(out)
        meets = any(mine & bytes_of(x) for x in others)
        said = Disjoint(out, [None, *others]).surely(out, (None, *others))
        assert not (said and meets)
        assert any(overlap(out, x) for x in others) == meets
        sure, shared = sure + said, shared + meets
    assert sure > 50 and shared > 50


def test_compact_tensors_side_by_side_are_told_apart_by_their_addresses():
    rows = torch.zeros(30, 8)
    disjoint = Disjoint(rows[10:20], (rows[:10], rows[20:]))
    assert disjoint.surely(rows[10:20], (rows[:10], rows[20:]))
    assert not disjoint.surely(rows[9:19], (rows[:10], rows[20:])) and not disjoint.surely(rows[11:21], (rows[:10], rows[20:]))


def product(a, b, **options):
    """matmul(a, b) twice: a cached call gives the same."""
    first = matmul(a, b, **options)
    assert torch.equal(matmul(a, b, **options), first)
    return first


def test_a_product_is_looked_at_anew_when_shape_strides_type_or_place_change():
    a, b, out = torch.randn(16, 24), torch.randn(24, 32), torch.empty(16, 32)
    want = product(a, b, out=out)
    assert torch.allclose(want, a @ b, atol=1e-4)
    assert torch.equal(product(a[:8], b), want[:8])
    odd = torch.empty(16 * 24 + 1)[1:].view(16, 24).copy_(a)  # no multiple of 16 bytes
    assert odd.data_ptr() % 16 == 4 and torch.equal(product(odd, b), want)
    assert torch.equal(product(a.t().contiguous().t(), b), want)
    assert torch.allclose(product(a.double(), b.double()), a.double() @ b.double())
    for kind, wrong in (("matmul-shape", dict(b=b[:23])), ("matmul-type", dict(b=b.half())),
                        ("matmul-shape", dict(out=out[:15])), ("matmul-shape", dict(out=out.double())),
                        ("kernel-argument", dict(out=torch.empty(16, 64)[:, ::2])), ("matmul-device", dict(b=b.to("meta"))),
                        ("matmul-device", dict(b=b.numpy())), ("matmul-device", dict(out=out.to("meta"))),
                        ("matmul-type", dict(b=b.tolist())), ("matmul-type", dict(out=out.tolist())),
                        ("matmul-option", dict(activation="tanh"))):
        for _ in range(2):
            with pytest.raises(Exception) as caught:
                matmul(**{"a": a, "b": b, "out": out, **wrong})
            assert caught.value.kind == kind
    assert torch.equal(matmul(a, b, out=out), want)


def test_memory_of_a_result_is_looked_at_each_time():
    room = torch.randn(100, 32, dtype=torch.float16)
    a, b = room[:32], room[32:64]
    want = matmul(a, b, transpose_b=True, out=room[64:96])
    assert torch.equal(want, matmul(a, b, transpose_b=True))
    for at, name in ((16, "a"), (48, "b"), (0, "a"), (32, "b"), (63, "b")):
        with pytest.raises(ValueError, match=f"out and {name} have memory in common"):
            matmul(a, b, transpose_b=True, out=room[at:at + 32])
    assert matmul(a, b, transpose_b=True, out=room[68:]).data_ptr() == room[68:].data_ptr()
    w = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    scales = torch.ones(32, 1, dtype=torch.float16)
    dequant_matmul(a, w, scales, out=room[64:96])
    with pytest.raises(ValueError, match="out and a have memory in common"):
        dequant_matmul(a, w, scales, out=room[31:63])


def test_parameters_that_a_form_does_not_use_are_left_out_and_others_are_not():
    a, b = torch.randn(16, 24), torch.randn(24, 32)
    bias = torch.randn(32)
    assert torch.equal(product(a, b, bias=bias), matmul(a, b) + bias) and torch.equal(product(a, b), matmul(a, b))
    with pytest.raises(ValueError, match=r"bias has shape \(31,\)"):
        matmul(a, b, bias=bias[:31])


def attention(*arrays, **options):
    first = flash_attention(*arrays, **options)
    assert torch.equal(flash_attention(*arrays, **options), first)
    return first


def test_attention_is_looked_at_anew_when_its_tensors_change():
    q, k, v = torch.randn(3, 1, 20, 2, 16, dtype=torch.float16)
    out = torch.empty_like(q)
    want = attention(q, k, v, causal=True, out=out).clone()
    for changed in (q, k, v):
        changed.requires_grad_()
        with pytest.raises(RuntimeError, match="no gradient"):
            flash_attention(q, k, v, causal=True, out=out)
        with torch.no_grad():
            assert torch.equal(flash_attention(q, k, v, causal=True, out=out), want)
        changed.requires_grad_(False)
    for kind, wrong in (("attention-shape", dict(k=k[:, :19])), ("attention-shape", dict(v=v.bfloat16())),
                        ("attention-shape", dict(k=k.to("meta"))), ("attention-shape", dict(out=out[:, :19])),
                        ("attention-shape", dict(out=torch.empty(641, dtype=torch.float16)[1:].view(1, 20, 2, 16))),
                        ("attention-argument", dict(k=k.numpy())), ("attention-shape", dict(v=v.float())),
                        ("attention-argument", dict(v=v.double())),
                        ("attention-option", dict(out=k)), ("attention-option", dict(out=v))):
        for _ in range(2):
            with pytest.raises(Exception) as caught:
                flash_attention(**{"q": q, "k": k, "v": v, "causal": True, "out": out, **wrong})
            assert caught.value.kind == kind
    assert torch.equal(flash_attention(q, k, v, causal=True, out=out), want)


def test_attention_may_store_between_what_it_reads():
    x = torch.randn(1, 20, 4, 2, 16, dtype=torch.float16)
    q, k, v, out = x.unbind(2)
    want = attention(q, k, v)
    assert torch.equal(flash_attention(q, k, v, out=out), want)
    with pytest.raises(ValueError, match="out and v have memory in common"):
        flash_attention(q, k, v, out=v)
    assert torch.equal(flash_attention(q, k, v, out=q), want) and torch.equal(q, want)


@pytest.mark.parametrize("which", range(3))
def test_slices_at_an_odd_address_were_copied_and_then_refused_for_the_copys_strides(which):
    x = [torch.randn(1, 20, 3, 2, 16, dtype=torch.float16)[:, :, which] for _ in range(3)]
    want = flash_attention(*(t.clone(memory_format=torch.contiguous_format) for t in x), target=SM_80)
    odd = torch.empty(1 + 20 * 3 * 2 * 16, dtype=torch.float16)[1:].view(1, 20, 3, 2, 16)[:, :, 0].copy_(x[which])
    assert torch.equal(flash_attention(*x, target=SM_80), want)
    x[which] = odd  # the same strides
    assert odd.data_ptr() % 16 == 2 and torch.equal(attention(*x, target=SM_80), want)


def test_decoding_is_looked_at_anew_when_its_tensors_change():
    q, k, v = torch.randn(2, 4, 16).half(), torch.randn(2, 16, 2, 16).half(), torch.randn(2, 16, 2, 16).half()
    lengths, out = torch.tensor([16, 7], dtype=torch.int32), torch.empty(2, 4, 16, dtype=torch.float16)
    want = flash_decode(q, k, v, lengths, out=out).clone()
    assert torch.equal(flash_decode(q[:, None], k, v, lengths)[:, 0], want)
    assert torch.equal(flash_decode(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, lengths, out=out), want)
    for kind, wrong in (("attention-shape", dict(lengths=lengths.long())), ("attention-shape", dict(lengths=lengths[:1])),
                        ("attention-shape", dict(out=out[:, :3])), ("attention-argument", dict(lengths=lengths.numpy())),
                        ("attention-option", dict(out=k.view(-1)[:128].view(2, 4, 16)))):
        for _ in range(2):
            with pytest.raises(Exception) as caught:
                flash_decode(**{"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, "out": out, **wrong})
            assert caught.value.kind == kind
    v.requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        flash_decode(q, k, v, lengths, out=out)


def test_operators_take_tensors_of_vmap_and_other_functions_refuse_them_by_name():
    x, b = torch.randn(3, 1, 16, 2, 16).half(), torch.ones(16, 8)
    flash_attention(x[0], x[0], x[0])
    each = [flash_attention(q, q, q) for q in x]
    assert torch.equal(torch.func.vmap(lambda q: flash_attention(q, q, q))(x), torch.stack(each))
    with pytest.raises(RuntimeError, match="has no memory") as caught:
        torch.func.vmap(lambda a: matmul(a, b))(torch.ones(3, 8, 16))
    assert caught.value.kind == "kernel-argument"


@pytest.mark.parametrize("element", "float16 bfloat16 float32 float64 int32 uint8 float8_e4m3fn float8_e5m2".split())
def test_results_are_made_compact(element):
    for shape in ((), (3,), (2, 3, 5), (4, 0, 3), (0,)):
        made, like = maker(torch.zeros(1), shape, element)(), torch.empty(shape, dtype=getattr(torch, element))
        assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, like.stride(), like.dtype, like.device)


@pytest.mark.parametrize("name", ["matmul", "dequant_matmul"])
def test_products_refuse_to_lose_a_gradient_also_behind_a_first_call(name):
    a, b = torch.ones(8, 16), torch.ones(16, 8)
    call = {"matmul": lambda: matmul(a, b),
            "dequant_matmul": lambda: dequant_matmul(a.half(), torch.zeros(8, 8, dtype=torch.uint8),
                                                     torch.ones(8, 1).half())}[name]
    want = call()
    a.requires_grad_(True)
    with pytest.raises(RuntimeError, match=f"{name} computes no gradient"):
        call()
    with torch.no_grad():
        assert torch.equal(call(), want)
    assert torch.equal(matmul(a.detach(), b), torch.full((8, 8), 16.0))


@pytest.mark.parametrize("call", [
    lambda a: matmul(a, a), lambda a: matmul(a[::-1], a), lambda a: flash_attention(*[a.reshape(1, 1, 1, -1)[..., :16]] * 3)])
def test_what_a_call_leaves_behind_holds_no_tensor_of_it(call):
    """Calls are prepared once: a copied operand of the first one was kept with the answer."""
    a = np.ones((16, 16), np.float16)
    call(a)
    seen = weakref.ref(a)
    del a
    gc.collect()
    assert seen() is None


GAPS = {"bias": (lambda x: matmul(torch.ones(3, 4), torch.ones(4, 5), bias=x), torch.arange(5.0)),
        "scales": (lambda x: matmul(*(torch.ones(n, 256).to(torch.float8_e4m3fn) for n in (8, 128)), transpose_b=True,
                                    scale_a=x, scale_b=torch.ones(1, 2)), torch.arange(16.0).reshape(8, 2)),
        "sizes": (lambda x: grouped_matmul(torch.arange(20.0).reshape(5, 4), torch.arange(24.0).reshape(2, 4, 3), x),
                  torch.tensor([2, 3], dtype=torch.int32)),
        "scores": (lambda x: flex_attention(*torch.ones(3, 1, 6, 2, 16), score_mod=lambda s, b, h, i, j, t: s + t[i, j],
                                            tensors=(x,), return_lse=True)[1], torch.arange(36.0).reshape(6, 6) / 36)}


@pytest.mark.parametrize("name", GAPS)
def test_small_tensors_with_gaps_were_an_error_of_a_kernel(name):
    call, x = GAPS[name]
    wide = torch.zeros(*(2 * n for n in x.shape), dtype=x.dtype)
    gaps = wide[tuple(slice(None, None, 2) for _ in x.shape)]
    gaps.copy_(x)
    torch.testing.assert_close(call(gaps), call(x))
    turned, plain = (x.mT.contiguous().mT, x) if x.ndim > 1 else (x[:1].expand(x.shape), x[:1].repeat(len(x)))
    torch.testing.assert_close(call(turned), call(plain))
