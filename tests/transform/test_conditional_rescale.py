"""Accumulators scaled only where a maximum moved: which programs, that they mean the same, and NaN and rows without keys."""

import sys
from dataclasses import replace as replace_fields

import numpy as np
import pytest

import tilelang.language as T
import tilelang.transform.registers.early_rescale as early
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Binary, Call, For, Load, Select, Store, binary, replace, rewrite, walk
from tilelang.library.attention.flex_attention import FlexForm, flex_program
from tilelang.library.attention.form import AttentionForm, ScoreFunctions, Tile
from tilelang.library.attention.kernels import LAG, dense_attention
from tilelang.library.attention.problem import Mask, Sizes
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform import pipeline

passes = sys.modules["tilelang.transform.registers.accumulator_registers"]
SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
FAST = {"tl.enable_fast_math": True}
SEQ, DIM = 320, 64


@pytest.fixture(autouse=True)
def _votes_for_32_multiplications(monkeypatch):
    monkeypatch.setattr(early, "LEAST_SKIPPED", 32)


def program_form(causal):
    strides = ((SEQ * DIM, SEQ * DIM, DIM, 1),) * 4
    return AttentionForm(Sizes(1, SEQ, SEQ, 1, 1, DIM, DIM), strides, "bhsd", "float16", Mask(None, 0 if causal else None),
                         Tile(128, 64, 2, 256), True, DIM**-0.5)


def program(causal=False):
    return dense_attention(replace_fields(program_form(causal), scale=None))


def lowered(causal=False):
    return pipeline.lower(program(causal).func, SM90A, FAST)


def votes(kernel):
    return sum(isinstance(x, Call) and x.op == "any_sync" for x in walk(kernel.launch.body))


def tensors(scores):
    """Q, K, V: keys of a tile of 64 are `scores` times a direction that the queries of odd rows share."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(1, 1, SEQ, DIM)).astype(np.float16) for _ in (0, 1, 2))
    q[..., 0], k[..., 0] = np.where(np.arange(SEQ) % 3 == 1, 8, 0), np.repeat(scores, 64)
    return q, k, v


def reference(q, k, v, scale, causal):
    q, k, v = (x.astype(np.float64)[0, 0] for x in (q, k, v))
    s = q @ k.T * scale
    if causal:
        s = np.where(np.tril(np.ones(s.shape, bool)), s, -np.inf)
    top = s.max(1, keepdims=True)
    p = np.exp(s - top)
    return p @ v / p.sum(1, keepdims=True), np.log(p.sum(1)) + top[:, 0]


def run(made, q, k, v, scale):
    out = run_device(made, [q, k, v, scale, np.zeros_like(q), np.zeros((1, 1, SEQ), np.float32)]).outputs
    return out["O"][0, 0], out["LSE"][0, 0]


@pytest.mark.parametrize("causal, scores", [(False, (0, 9, 3, 40, 41)), (True, (0, 9, 3, 40, 41)), (False, (40, 0, 0, 9, 40))])
def test_maxima_that_rise_late_in_some_rows(monkeypatch, causal, scores):
    """8 * 31 * scale is beyond 2^8, 8 * 9 * scale is not: some warps scale in some steps, none in most."""
    q, k, v = tensors(scores)
    scale = DIM**-0.5
    made = lowered(causal)
    assert votes(made.kernels[0]) == 1
    got = run(made, q, k, v, scale)
    out, lse = reference(q, k, v, scale, causal)
    assert np.abs(got[0] - out).max() <= 6 * 2**-11 * np.abs(v).max() and np.abs(got[1] - lse).max() <= 1e-3
    monkeypatch.setattr(early, "rescale_lazily", lambda *_: None)
    always = lowered(causal)
    assert votes(always.kernels[0]) == 0
    assert all(np.array_equal(a, b) for a, b in zip(got, run(always, q, k, v, scale), strict=True))


def test_not_a_number_goes_through():
    q, k, v = tensors((0, 9, 3, 40, 41))
    q[0, 0, 5, 3] = np.nan
    got, lse = run(lowered(), q, k, v, DIM**-0.5)
    bad = np.zeros(SEQ, bool)
    bad[5] = True
    assert np.array_equal(np.isnan(got).any(1), bad) and np.array_equal(np.isnan(lse), bad)


def test_the_text_has_one_branch_around_factor_sum_and_accumulators():
    text = print_kernel(lowered().kernels[0], fast_math=True)
    loop = text[text.index("for (int k = 1;"):]
    branch = loop[loop.index("if (moved != 0) {"):]
    branch = branch[:branch.index("tl::scale_acc(factor_moved") + 40]
    wanted = ("factor_moved[r] = tl::fast_exp2(", "total[r] = total[r] * factor_moved[r];", "tl::scale_acc(factor_moved")
    assert [x for x in wanted if x not in branch] == []
    assert "total[r] = total[r] + more[r];" in loop[loop.index(branch) + len(branch):]


def changed(monkeypatch, edit):
    """Votes of the kernel whose statements are edited in front of rescale_early."""
    kept = passes.rescale_early
    monkeypatch.setattr(passes, "rescale_early",
                        lambda launch: kept(replace(launch, body=rewrite(launch.body, edit))))
    return votes(lowered().kernels[0])


def is_row(s, name):
    return isinstance(s, For) and isinstance(s.body, Store) and s.body.buffer.name == name


def test_a_maximum_that_follows_every_score_is_scaled_at_every_step(monkeypatch):
    def follow(s):
        if is_row(s, "top") and isinstance(s.body.value, Select):
            return replace(s, body=replace(s.body, value=binary("max", s.body.value.a, s.body.value.b)))
        return None

    assert changed(monkeypatch, lambda s: None) == 1
    assert changed(monkeypatch, follow) == 0


def test_other_uses_of_the_factor_keep_it(monkeypatch):
    def squared(s):
        if is_row(s, "total") and isinstance(s.body.value, Binary):
            return replace(s, body=replace(s.body, value=binary("mul", s.body.value, s.body.value)))
        return None

    assert changed(monkeypatch, squared) == 0


def test_a_total_that_is_read_in_between_is_not_scaled_early(monkeypatch):
    totals = []

    def read(s):
        if is_row(s, "total"):
            totals[:] = [s.body.buffer]
        if is_row(s, "more") and isinstance(s.body.value, Load) and totals:
            value = binary("add", s.body.value, Load(totals[0], (s.var,), totals[0].dtype))
            return replace(s, body=replace(s.body, value=value))
        return None

    assert changed(monkeypatch, read) == 0


def test_a_total_that_the_exponentials_read_is_not_scaled_among_them(monkeypatch):
    """The branch stands between the two halves of the exponentials' rows: the second would read totals scaled already."""
    totals = []

    def read(s):
        if is_row(s, "total"):  # filled in front of the loop
            totals[:] = [s.body.buffer]
        if totals and isinstance(s, Store) and s.buffer.name == "S" and isinstance(s.value, Call) and s.value.op == "exp2":
            row = next(x.indices for x in walk(s.value) if isinstance(x, Load) and x.buffer.name == "top")
            value = replace(s.value, args=(binary("sub", s.value.args[0], Load(totals[0], row, totals[0].dtype)),))
            return replace(s, value=value)
        return None

    assert changed(monkeypatch, read) == 0


def test_the_lag_is_far_below_what_weights_hold():
    assert 2.0**LAG * 64 < 65504


def test_a_vote_where_exponentials_lie_in_branches(monkeypatch):
    """A softcap's do: one branch has polynomials for tanh."""
    form = program_form(False)
    cap = flex_program(FlexForm(form, ScoreFunctions(lambda s, b, h, i, j: 30.0 * T.tanh(s / 30.0))))
    q, k, v = tensors((0, 9, -4, 20, 3))
    given = {"Q": q, "K": k, "V": v, "Blocks": np.zeros((1, 1, 1, 1), np.int32), "X0": np.zeros(1, np.float32),
             "X1": np.zeros(1, np.float32), "O": np.zeros_like(q), "LSE": np.zeros((1, 1, SEQ), np.float32)}
    found, counts = [], []
    for conditional in (early._conditional, lambda body: None):
        monkeypatch.setattr(early, "_conditional", conditional)
        lowered = pipeline.lower(cap.func, SM90A)
        counts.append(votes(lowered.kernels[0]))
        found.append(run_device(lowered, given).outputs)
    s = 30 * np.tanh(q[0, 0].astype(float) @ k[0, 0].astype(float).T * DIM**-0.5 / 30)
    weights = np.exp(s - s.max(1, keepdims=True))
    want = weights @ v[0, 0].astype(float) / weights.sum(1, keepdims=True)
    assert counts[0] == counts[1] + 1 and np.array_equal(found[0]["O"], found[1]["O"])
    assert np.abs(found[0]["O"][0, 0] - want).max() < 4e-3 and "tl::map_S" in print_kernel(lowered.kernels[0])
