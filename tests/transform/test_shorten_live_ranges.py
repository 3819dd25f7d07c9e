"""shorten_live_ranges: behind a loop of wgmma whose accumulators are in named registers the thread index is opaque."""

import sys
from pathlib import Path

import numpy as np
from pass_steps import SM90A, around

from tilelang.ir import Call, Launch, walk
from tilelang.simulator import run_device

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import programs


def ops(func):
    return [c.op for c in walk(func.body, Call)]


def attention():
    return programs.attention(heads=1, seq=256, dim=64, bm=128, bn=64, threads=256)


def test_thread_indices_are_opaque_behind_the_loop_and_the_result_stays():
    before, after = around(attention(), "shorten_live_ranges", SM90A, {"tl.enable_fast_math": True})
    assert any(x.plan.own_values for x in walk(before.body, Launch))
    assert "make_opaque" not in ops(before) and "make_opaque" in ops(after)
    after_loop = ops(after)
    assert after_loop.index("make_opaque") > after_loop.index("wgmma")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 256, 1, 64)).astype(np.float16) for _ in range(3))
    got = [run_device(f, [q, k, v, np.zeros_like(q)]).outputs["O"] for f in (before, after)]
    assert np.array_equal(*got)
    s = np.einsum("qd,kd->qk", *(x[0, :, 0].astype(np.float64) for x in (q, k))) / 8
    p = np.exp(s - s.max(1, keepdims=True))
    want = p / p.sum(1, keepdims=True) @ v[0, :, 0].astype(np.float64)
    assert np.abs(got[0][0, :, 0] - want).max() < 4e-3


def test_launches_without_named_registers_stay():
    before, after = around(programs.gemm(128, 64, 64), "shorten_live_ranges")
    assert after is before
