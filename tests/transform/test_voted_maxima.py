"""Maxima under a vote: what the branch has, that results are the same bits, NaN, and what the program must have."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tilelang.transform.registers.early_rescale as early
import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Binary, Call, Load, Select, binary, replace
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from transform.test_conditional_rescale import DIM, SEQ, changed, is_row, lowered, reference, run, tensors, votes

SCALE = DIM**-0.5


@pytest.fixture(autouse=True)
def _votes(monkeypatch):
    """Without this file's fixture of the other one: 32 multiplications are few."""
    monkeypatch.setattr(early, "LEAST_SKIPPED", 64)


def loop_of(kernel):
    text = print_kernel(kernel, fast_math=True)
    return text[text.index("for (int k = 1;"):]


@pytest.mark.parametrize("causal, scores", [(False, (0, 9, 3, 40, 41)), (True, (0, 9, 3, 40, 41)),
                                            (False, (-40, -9, -8, -30, -2))])
def test_the_results_are_the_same_bits(monkeypatch, causal, scores):
    """8 * 31 * scale is beyond 2^8, 8 * 9 * scale is not: some warps move in some steps, none in most; all scores negative."""
    q, k, v = tensors(scores)
    made = lowered(causal)
    assert votes(made.kernels[0]) == 1
    got = run(made, q, k, v, SCALE)
    out, lse = reference(q, k, v, SCALE, causal)
    assert np.abs(got[0] - out).max() <= 6 * 2**-11 * np.abs(v).max() and np.abs(got[1] - lse).max() <= 1e-3
    monkeypatch.setattr(early, "vote_on_maxima", lambda *_: None)
    always = lowered(causal)
    assert votes(always.kernels[0]) == 0
    assert all(np.array_equal(a, b) for a, b in zip(got, run(always, q, k, v, SCALE), strict=True))


def test_not_a_number_goes_through():
    q, k, v = tensors((0, 9, 3, 40, 41))
    q[0, 0, 5, 3], q[0, 0, 9, 0] = np.nan, np.inf
    got, lse = run(lowered(), q, k, v, SCALE)
    bad = np.isin(np.arange(SEQ), (5, 9))
    assert np.array_equal(np.isnan(got).any(1), bad) and np.array_equal(np.isnan(lse), bad)


def test_what_lanes_exchange_lies_in_the_branch():
    loop = loop_of(lowered().kernels[0])
    branch = loop[loop.index("if (moved != 0) {"):loop.index("tl::map_S")]
    assert [x for x in ("shfl_xor_sync", "fast_exp2(", "total[r] = total[r] * factor_moved[r];") if x not in branch] == []
    found = re.findall(r"tl::(max_S_0\w*|map_S|add_S_0|wgmma_hold|wgmma_wait<0>|scale_acc|halves_P)|(if \(moved)", loop)
    order = [a or b for a, b in found]
    assert order[:9] == ["max_S_0_v1", "if (moved", "map_S", "add_S_0", "wgmma_hold", "wgmma_wait<0>", "if (moved", "scale_acc",
                         "halves_P"]
    assert "shfl" not in loop[loop.index("tl::map_S"):loop.index("tl::halves_P")]


def test_as_many_accumulators_as_a_vote_for_them_alone_pays_for_keep_it(monkeypatch):
    monkeypatch.setattr(early, "LEAST_SKIPPED", 32)
    loop = loop_of(lowered().kernels[0])
    assert "shfl_xor_sync" in loop[:loop.index("if (moved != 0) {")]


def test_a_maximum_that_follows_every_score_has_no_vote(monkeypatch):
    def follow(s):
        if is_row(s, "top") and isinstance(s.body.value, Select):
            return replace(s, body=replace(s.body, value=binary("max", s.body.value.a, s.body.value.b)))
        return None

    assert changed(monkeypatch, follow) == 0


def test_other_uses_of_the_factor_and_other_maxima_before_have_no_vote(monkeypatch):
    assert changed(monkeypatch, lambda s: None) == 1

    def squared(s):
        if is_row(s, "total") and isinstance(s.body.value, Binary):
            return replace(s, body=replace(s.body, value=binary("mul", s.body.value, s.body.value)))
        return None

    def doubled(s):  # `before` is not what the maximum was
        if is_row(s, "before") and isinstance(s.body.value, Load):
            return replace(s, body=replace(s.body, value=binary("mul", s.body.value, 2.0)))
        return None

    assert changed(monkeypatch, squared) == 0
    assert changed(monkeypatch, doubled) == 0


def test_an_exponent_that_does_not_vanish_has_no_vote(monkeypatch):
    def shifted(s):
        if is_row(s, "factor") and isinstance(s.body.value, Call):
            x = s.body.value
            return replace(s, body=replace(s.body, value=replace(x, args=(binary("add", x.args[0], 1.0),))))
        return None

    assert changed(monkeypatch, shifted) == 0


@pytest.mark.parametrize("own", (False, True))
def test_maxima_that_go_on_from_those_before_began_with_no_value(own):
    """own: what is new is in an array of its own, of which and of the maxima before the program takes the larger."""
    @T.prim_func
    def main(Q: T.Tensor((64, 32), "float16"), K: T.Tensor((320, 32), "float16"), O: T.Tensor((64, 32), "float32"),
             Sum: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            Qs, Ks = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            S, acc = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 32), "float32")
            P = T.alloc_fragment((64, 64), "float16")
            top, before, factor, new, part, total = [T.alloc_fragment((64,), "float32") for _ in range(6)]
            T.copy(Q, Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(5, num_stages=2):
                T.copy(K[k * 64, 0], Ks)
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                T.copy(top, before)
                if own:
                    T.reduce_max(S, new, dim=1)
                    for i in T.Parallel(64):
                        top[i] = T.max(top[i], new[i])
                else:
                    T.reduce_max(S, top, dim=1, clear=False)
                for i in T.Parallel(64):
                    top[i] = T.if_then_else(top[i] - before[i] > 2.0, top[i], before[i])
                for i in T.Parallel(64):
                    factor[i] = T.exp2(before[i] - top[i])
                for i, j in T.Parallel(64, 64):
                    S[i, j] = T.exp2(S[i, j] - top[i])
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(64):
                    total[i] = total[i] * factor[i] + part[i]
                for i, j in T.Parallel(64, 32):
                    acc[i, j] *= factor[i]
                T.copy(S, P)
                T.gemm(P, Ks, acc)
            T.copy(acc, O)
            T.copy(total, Sum)

    made = lower(main.func, Target({"kind": "cuda", "arch": "sm_90a"}))
    assert votes(made.kernels[0]) == 1
    rng = np.random.default_rng(4)
    given = {"Q": rng.standard_normal((64, 32)).astype(np.float16), "K": rng.standard_normal((320, 32)).astype(np.float16),
             "O": np.zeros((64, 32), np.float32), "Sum": np.zeros(64, np.float32)}
    want = run_tile(main, given)
    for name, value in run_device(made, given).outputs.items():
        np.testing.assert_allclose(value, want[name], rtol=2e-3, atol=2e-3)
