"""Calls of functions for training as models make them: views, empty tensors, transforms of torch, copies, compiled graphs."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.library import (conv2d, create_block_mask, cross_entropy, flash_attention, flex_attention,
                              grouped_matmul, layer_norm, linear_attention, linear_cross_entropy, matmul, mla_prefill, rms_norm,
                              softmax)
from tilelang.library.attention import flex_attention as flex, online_attention as online
from tilelang.library.attention_engine import AttentionEngine, LinearAttentionEngine, OnlineFunc, Relu, Sigmoid
from tilelang.library.autograd import Numbered, define
from tilelang.library.recurrent import elements


IDENTITIES = torch.__version__ >= "2.13"  # that torch.compile compares functions whose id() it traces


def drawn(*shape, kind=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(kind)


def qkv(seq=40, dim=16, kind=torch.float16):
    return [drawn(1, seq, 2, dim, kind=kind, seed=n) for n in range(3)]


def named(kind):
    return pytest.raises(TileLangError, match=kind)


# ---- views, empty tensors, extreme values ----------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [lambda v: v[::2], lambda v: v[:1].expand(24)], ids=["strided", "expanded"])
def test_vectors_of_norms_may_be_views(make):
    x, w, b = drawn(5, 24).requires_grad_(), drawn(48).requires_grad_(), drawn(48, seed=1).requires_grad_()
    found = torch.autograd.grad(layer_norm(x, make(w), make(b)).cos().sum(), (x, w, b))
    wanted = torch.autograd.grad(F.layer_norm(x, (24,), make(w), make(b)).cos().sum(), (x, w, b))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_label_whose_logit_is_minus_infinity_has_an_infinite_loss():
    x = drawn(3, 8)
    x[:, 5:] = -math.inf
    assert cross_entropy(x, torch.tensor([1, 6, 2]), reduction="none").isinf().tolist() == [False, True, False]


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, math.nan])
def test_smoothing_is_a_fraction(smoothing):
    with named("training-argument"):
        cross_entropy(drawn(3, 8), torch.zeros(3, dtype=torch.long), label_smoothing=smoothing)


def test_kept_logits_of_a_certain_row_have_no_gradient():
    """The logarithm that backward subtracts is that of the logits that it reads, which are rounded."""
    x, w = torch.full((1, 16), 3.0, dtype=torch.bfloat16).requires_grad_(), torch.zeros(32, 16, dtype=torch.bfloat16)
    w[7] = 0.7
    loss = linear_cross_entropy(x, w.requires_grad_(), torch.tensor([7]), recompute=False)
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert dw.abs().max() < 1e-6 and dx.abs().max() < 1e-6


def test_a_decay_of_minus_infinity_begins_a_new_sequence():
    q, k, v = (x.float().mul(0.3).half().requires_grad_() for x in qkv(seq=20))
    decay = torch.zeros(1, 20, 2)
    decay[:, 7] = -math.inf
    out = linear_attention(q, k, v, decay)
    apart = torch.cat([linear_attention(*(x[:, s] for x in (q, k, v))) for s in (slice(0, 7), slice(7, 20))], 1)
    torch.testing.assert_close(out, apart, rtol=2e-3, atol=2e-3)
    found, wanted = (torch.autograd.grad(y.float().cos().sum(), (q, k, v)) for y in (out, apart))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_sinks_are_the_logarithms_where_there_are_no_keys():
    sinks = drawn(2).requires_grad_()
    q, k, v = drawn(1, 5, 2, 16).half(), *(torch.zeros(1, 0, 2, 16, dtype=torch.float16) for _ in "kv")
    _, logs = flash_attention(q, k, v, sinks=sinks, return_lse=True)
    assert torch.autograd.grad(logs.sum(), sinks)[0].tolist() == [5.0, 5.0]


def test_a_grouped_gemm_may_have_no_rows():
    a, b = torch.zeros(0, 8, requires_grad=True), drawn(2, 8, 4).requires_grad_()
    out = grouped_matmul(a, b, torch.zeros(2, dtype=torch.int32))
    da, db = torch.autograd.grad(out.sum(), (a, b))
    assert out.shape == (0, 4) and da.shape == (0, 8) and not db.any()


def test_heads_of_any_dimension_in_an_engine():
    q, k, v = qkv(dim=20, kind=torch.float32)
    found = AttentionEngine(Sigmoid(-2.0))(q, k, v)
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * 20**-0.5 - 2.0).sigmoid()
    torch.testing.assert_close(found, torch.einsum("bhij,bjhd->bihd", weights, v), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_heads_of_multiples_of_8_are_read_as_they_lie(packed):
    """Tiles have 32 columns for 24: nothing is written behind those of a row."""
    q, k, v = (x[0] if packed else x for x in (drawn(1, 40, 2, 24, kind=torch.float16, seed=n) for n in range(3)))
    options = {"causal": True, **({"cu_seqlens_q": torch.tensor([0, 15, 40], dtype=torch.int32)} if packed else {})}
    wide = [F.pad(x, (0, 8)).requires_grad_() for x in (q, k, v)]
    given = [x.requires_grad_() for x in (q, k, v)]
    out, padded = flash_attention(*given, **options), flash_attention(*wide, scale=24**-0.5, **options)[..., :24]
    found, wanted = (torch.autograd.grad(y.float().cos().sum(), x) for y, x in ((out, given), (padded, wide)))
    torch.testing.assert_close([out, *found], [padded, *(x[..., :24] for x in wanted)], rtol=2e-3, atol=2e-3)
    room = torch.full((*q.shape[:-1], 40), 7.0, dtype=torch.float16)
    with torch.no_grad():
        flash_attention(q, k, v, out=room[..., :24], **options)
    assert (room[..., :24] == out).all() and (room[..., 24:] == 7).all()


# ---- named errors ----------------------------------------------------------------------------------------------------------

CALLS = {
    "a sparse tensor": (lambda: softmax(torch.eye(4).to_sparse()), "library-argument"),
    "a nested tensor": (lambda: softmax(torch.nested.as_nested_tensor([torch.ones(n, 4) for n in (2, 3)])), "library-argument"),
    "a window of fractions": (lambda: flash_attention(*qkv(), window=(1.5, 2)), "attention-option"),
    "a seed of 65 bits": (lambda: flash_attention(*qkv(), dropout=0.5, seed=2**64), "attention-option"),
    "torch in a score": (lambda: flex_attention(*qkv(), score_mod=lambda s, b, h, q, k: torch.tanh(s)), "library-argument"),
    "few parameters": (lambda: create_block_mask(lambda q, k: q >= k, 64, 64), "library-argument"),
    "a class": (lambda: AttentionEngine(Sigmoid), "attention-option"),
    "a power": (lambda: Relu(3), "attention-option"),
    "an update": (lambda: AttentionEngine(type("Bad", (OnlineFunc,), {"update": lambda self, s, state, r: s})()),
                  "attention-option")}


@pytest.mark.parametrize("name", CALLS)
def test_mistakes_have_names(name):
    call, kind = CALLS[name]
    with named(kind):
        call()


def test_numbers_of_numpy_are_strides():
    x, w = np.ones((1, 4, 4, 8), np.float32), np.ones((2, 1, 1, 8), np.float32)
    assert conv2d(x, w, stride=np.int64(2)).shape == (1, 2, 2, 2)


# ---- transforms of torch ---------------------------------------------------------------------------------------------------

def test_meta_tensors_give_meta_tensors():
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    y = rms_norm(x)
    y.sum().backward()
    assert y.is_meta and x.grad.is_meta and x.grad.shape == (4, 8)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_by_torch_func():
    """Of one call, of samples, of a loss by parts of its arguments, and a Jacobian."""
    x, w, labels = drawn(5, 3, 8), drawn(8), torch.zeros(5, 3, dtype=torch.long)

    def by(norm, loss):
        return lambda w, x, labels: loss(norm(x, w), labels)

    ours, torchs = by(rms_norm, cross_entropy), by(lambda x, w: F.rms_norm(x, (8,), w, 1e-6), F.cross_entropy)
    for transform in (lambda f: torch.func.grad(f)(w, x[0], labels[0]),
                      lambda f: torch.func.vmap(torch.func.grad(f), in_dims=(None, 0, 0))(w, x, labels),
                      lambda f: torch.func.jacrev(f)(w, x[0], labels[0])):
        torch.testing.assert_close(transform(ours), transform(torchs), rtol=1e-4, atol=1e-5)


def test_forward_mode_loses_no_tangent():
    x = drawn(4, 8)
    with named("library-derivative"):
        torch.func.jvp(softmax, (x,), (x,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (softmax, lambda x: softmax(x.requires_grad_())):
            with named("library-derivative"):
                call(dual)
        with named("matmul-gradient"):
            matmul(dual, x.t())
        assert softmax(x).shape == x.shape


def test_second_derivatives_are_not_left_out():
    """torch.autograd.grad goes only where the tensors are: what a gradient contributes to them is an error, and not nothing."""
    x = drawn(4, 8).requires_grad_()
    (first,) = torch.autograd.grad(softmax(x).cos().sum(), x, create_graph=True)
    with named("library-derivative"):
        torch.autograd.grad((first**2).sum() + (x**2).sum(), x)
    with named("library-derivative"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: softmax(y).cos().sum())(x).sum())(x.detach())


# ---- copies, other processes, compiled graphs ------------------------------------------------------------------------------

def positive(x):
    return T.max(x, 0.0)


def causal(b, h, q, k):
    return q >= k


def test_what_is_pickled_names_no_number_of_its_process(monkeypatch):
    """Numbers of descriptions and functions belong to a process: another one, which has none, makes its own."""
    q, k, v = qkv(seq=64)
    mask = create_block_mask(causal, 64, 64, device="cpu")
    engine, linear = AttentionEngine(Sigmoid(-3.0)), LinearAttentionEngine(q_mod=positive)
    wanted, text = (engine(q, k, v, block_mask=mask), linear(q, k, v)), pickle.dumps((mask, engine, linear))
    for module, name in ((online, "_DESCRIPTIONS"), (online, "_CALLS"), (flex, "_MASKS"), (elements, "_MAPS")):
        monkeypatch.setattr(module, name, Numbered())
    AttentionEngine(Relu()), LinearAttentionEngine(q_mod=lambda x: x * x)
    mask, engine, linear = pickle.loads(text)
    for found, want in zip((engine(q, k, v, block_mask=mask), linear(q, k, v)), wanted):
        assert (found == want).all()
    assert (copy.deepcopy(engine)(q, k, v, block_mask=mask) == wanted[0]).all()


def test_numbers_of_functions_that_a_process_does_not_know():
    define("flex_attention")
    with named("library-number"):
        torch.ops.tilelang_library.flex_attention(*qkv(), None, None, None, None, 12345, None, "bshd", None)


def test_compiled_graphs_tell_functions_of_the_same_code():
    """torch.compile compares the code of functions, and not what they have captured."""
    def scaling(c):
        return lambda s, b, h, q, k: s * c

    def window(c):
        return create_block_mask(lambda b, h, q, k: q - k < c, 64, 64, device="cpu")

    x = qkv(seq=64)
    calls = [*[(lambda s: flex_attention(*x, score_mod=s), (scaling(1.5), scaling(2.5)))] * IDENTITIES,
             (lambda m: flex_attention(*x, block_mask=m), (window(3), window(5))),
             (lambda e: e(*x), (AttentionEngine(Sigmoid(-1.0)), AttentionEngine(Sigmoid(-3.0))))]
    torch._dynamo.reset()
    for call, givens in calls:
        compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
        for given in givens:
            assert (compiled(given) == call(given)).all()


def test_compiled_graphs_of_padded_heads():
    torch._dynamo.reset()
    given = [x[..., :12] for x in qkv(seq=20)]
    compiled = torch.compile(linear_attention, fullgraph=True, dynamic=True, backend="eager")
    assert (compiled(*given) == linear_attention(*given)).all()


@pytest.mark.parametrize("length", [70, 71])  # the second has a kernel for any strides
def test_a_dimension_of_one_with_an_odd_stride_was_an_error(length):
    def drawn(*shape):
        x = torch.randn(shape, dtype=torch.float16, generator=torch.Generator().manual_seed(sum(shape)))
        return torch.empty(x.numel() + 99, dtype=x.dtype).as_strided(shape, (99, *x.stride()[1:])).copy_(x).requires_grad_()

    calls = {mla_prefill: (drawn(1, length, 2, 96), drawn(1, length, 2, 64), drawn(1, length, 32), drawn(1, length, 2, 64)),
             linear_attention: tuple(drawn(1, length, 2, n) for n in (32, 32, 48))}
    for f, given in calls.items():
        usual = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in given]
        for a, b in zip(*(torch.autograd.grad(f(*x).float().sum(), x) for x in (given, usual))):
            assert torch.equal(a, b)
