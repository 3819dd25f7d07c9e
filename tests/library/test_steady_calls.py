"""Calls whose kernels exist: no other length or batch compiles one, and the host takes few steps to launch it."""

import sys

import pytest

from tilelang.library import chunk_scan, chunk_state, gated_delta, kda, linear_attention, mamba2, retention, rms_norm, softmax
from tilelang.library.place import FITTING, KERNELS, Place
from tilelang.target import Target

torch = pytest.importorskip("torch")
SM90 = Target({"kind": "cuda", "arch": "sm_90a"})


def drawn(*shape):
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def rates(*shape):
    return torch.rand(shape).requires_grad_()


def of_rule(channels):
    return lambda b, s: [*(drawn(b, s, 2, 64) for _ in range(3)), -rates(b, s, 2, *[64] * channels), rates(b, s, 2)]


def of_heads(b, s):
    return [drawn(b, s, 2, 64) for _ in range(3)]


# name -> (function, its tensors of a batch and a length, steps of the host that a call without a gradient may take)
CASES = {
    "linear_attention": (linear_attention, lambda b, s: [*of_heads(b, s), -rates(b, s, 2)], 160),
    "gated_delta": (lambda *x: gated_delta(*x)[0], of_rule(False), 190),
    "kda": (lambda *x: kda(*x)[0], of_rule(True), 190),
    "mamba2": (lambda *x: mamba2(*x)[0], lambda b, s: [drawn(b, s, 2, 64), rates(b, s, 2), -rates(2), drawn(b, s, 1, 64),
                                                       drawn(b, s, 1, 64), rates(2)], 260),
    "retention": (lambda *x: retention(*x)[0], lambda b, s: [*of_heads(b, s), -rates(2)], 260),
    "chunk_state": (chunk_state, lambda b, s: [x.detach() for x in (
        drawn(b, s // 128 * 128, 2, 64), drawn(b, s // 128 * 128, 1, 64), rates(b, 2, s // 128, 128),
        -rates(b, 2, s // 128, 128))], 155),
    "chunk_scan": (chunk_scan, lambda b, s: [x.detach() for x in (
        drawn(b, s // 128, 1, 128, 128), drawn(b, s // 128 * 128, 2, 64), rates(b, 2, s // 128, 128),
        -rates(b, 2, s // 128, 128), drawn(b, s // 128 * 128, 1, 64), drawn(b, s // 128, 2, 64, 64))], 195),
    "rms_norm": (rms_norm, lambda b, s: [drawn(b, s, 64), drawn(64)], 90),
    "softmax": (softmax, lambda b, s: [drawn(b, s, 64)], 80)}


@pytest.fixture
def compiled(monkeypatch):
    """The programs that would be compiled: kernels of a GPU that do nothing."""
    programs = []

    def stand_in(self, program, configs):
        programs.append(program)
        return lambda *args: None

    KERNELS.clear()
    FITTING.clear()
    monkeypatch.setattr(Place, "_compiled", stand_in)
    place = Place(SM90, "simulator", 132)  # no tensor is on a GPU here
    monkeypatch.setattr(Place, "of", staticmethod(lambda x, target, backend=None: place))
    yield programs
    KERNELS.clear()
    FITTING.clear()


def gradients(call, given):
    out = call(*given)
    if out.requires_grad:
        torch.autograd.grad(out, given, torch.zeros_like(out))


@pytest.mark.parametrize("name", CASES)
def test_other_lengths_and_batches_compile_nothing(name, compiled):
    call, tensors, _ = CASES[name]
    gradients(call, tensors(1, 300))
    count = len(compiled)
    assert count
    for batch, length in ((1, 1024), (3, 300), (2, 777)):
        gradients(call, tensors(batch, length))
    assert len(compiled) == count


@pytest.mark.parametrize("name", CASES)
def test_a_known_call_takes_few_steps_of_the_host(name, compiled):
    """A step is a call of a function, in Python or in C."""
    call, tensors, most = CASES[name]
    given, steps = [x.detach() for x in tensors(1, 300)], 0
    call(*given)

    def count(frame, event, arg):
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call(*given)
    finally:
        sys.setprofile(None)
    assert steps <= most
