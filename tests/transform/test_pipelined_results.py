"""A pipelined loop computes what the sequential loop computes: tile meaning before and after planning, and the device
simulator (with races checked) on what the whole pipeline makes of it."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilelang.language as T
from tilelang.ir import For, numpy_dtype, walk
from tilelang.simulator.device.run import run_device
from tilelang.simulator.reference.run import run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import lower
from tilelang.transform.schedule.plan_pipelines import plan_pipelines

SM80 = Target({"kind": "cuda", "arch": "sm_80"})
R, W = 16, 32  # rows and columns of a tile


@T.macro
def load_s(A, B, O, s, t, f, k):
    T.copy(A[k * R, 0], s)


@T.macro
def load_t(A, B, O, s, t, f, k):
    T.copy(B[k * R, 0], t)


@T.macro
def load_half(A, B, O, s, t, f, k):
    T.copy(A[k * R, 0], s[0:R // 2, :])


@T.macro
def scale_s(A, B, O, s, t, f, k):
    for i, j in T.Parallel(R, W):
        s[i, j] = s[i, j] * 0.5 + t[i, j]


@T.macro
def add_s(A, B, O, s, t, f, k):
    for i, j in T.Parallel(R, W):
        f[i, j] = f[i, j] * 0.5 + s[i, W - 1 - j]


@T.macro
def add_t(A, B, O, s, t, f, k):
    for i, j in T.Parallel(R, W):
        f[i, j] = f[i, j] + t[i, j] * 2.0


@T.macro
def store(A, B, O, s, t, f, k):
    T.copy(s, O[k * R, 0])


@T.macro
def change_a(A, B, O, s, t, f, k):
    for i, j in T.Parallel(R, W):
        A[(k + 1) * R + i, j] = f[i, j]


PHASES = (Phase.explicit, Phase.generate)  # shrinking a compiler run takes minutes: the steps are short already
STEPS = (load_s, load_t, load_half, scale_s, add_s, add_t, store, change_a)


def chain(steps, **pipeline):
    """A loop over the steps, between clears of both shared buffers and a use of one of them."""

    @T.prim_func
    def main(A: T.Tensor((64 * R, W), "float32"), B: T.Tensor((64 * R, W), "float32"), O: T.Tensor((64 * R, W), "float32"),
             m: T.int32):
        with T.Kernel(1, threads=32):
            s = T.alloc_shared((R, W), "float32")
            t = T.alloc_shared((R, W), "float32")
            f = T.alloc_fragment((R, W), "float32")
            T.clear(f)
            T.clear(s)
            T.clear(t)
            for k in T.Pipelined(m, **pipeline):
                [step(A, B, O, s, t, f, k) for step in steps]
            for i, j in T.Parallel(R, W):
                O[63 * R + i, j] = f[i, j] + s[i, j]

    return main.func


def arguments(f, m):
    rng = np.random.default_rng(3)
    args = {b.name: rng.integers(-4, 5, b.shape).astype(numpy_dtype(b.dtype)) for _, b in f.buffers}
    return {**args, "m": m}


def agree(f, counts, device):
    planned = run_passes(f, [plan_pipelines], PassContext(SM80, verify=True))
    lowered = lower(f, cx=PassContext(SM80, verify=True)) if device else None
    for m in counts:
        args = arguments(f, m)
        want = run_tile(f, args)
        for name, got in run_tile(planned, args).items():
            np.testing.assert_array_equal(got, want[name], err_msg=f"planned, {name}, m={m}")
        if lowered is not None:
            for name, got in run_device(lowered, args, check=True).outputs.items():
                np.testing.assert_array_equal(got, want[name], err_msg=f"device, {name}, m={m}")
    return [x.plan.pipeline_report for x in walk(planned) if isinstance(x, For) and x.plan.pipeline_report]


@pytest.mark.spec("L8:Pipelined", "M:short-pipelines")
@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_any_trip_count(stages):
    f = chain((load_s, load_t, add_s, add_t), num_stages=stages)
    report = agree(f, (0, 1, 2, 3, 7), device=True)
    assert stages == 0 or report == [f"pipelined: {stages} stage{'s' * (stages > 1)} of t"]  # s is used after the loop


@pytest.mark.spec("must:8-pipeline-sequential")
@pytest.mark.spec("L8:Pipelined")
@settings(max_examples=25, deadline=None, derandomize=True, phases=PHASES)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_random_bodies(steps, stages, data):
    if data.draw(st.booleans()):
        size = len(steps)
        options = dict(order=list(data.draw(st.permutations(range(size)))),
                       stage=data.draw(st.lists(st.integers(0, stages), min_size=size, max_size=size)))
    else:
        options = dict(num_stages=stages)
    try:
        agree(chain(steps, **options), (0, 1, 4), device=data.draw(st.integers(0, 3)) == 0)
    except ValueError as e:
        assert "a consumer of" in str(e) and "order" in options
