"""Results that go through tiles of shared memory that are no longer used."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize.held_operands import reused_tiles
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
STEPS = 2


def product(tiles=1, keys=64, read_after=False):
    """C = the sum over i of (A @ B[i]^T / 8) @ B[i].  read_after: A is also read behind the loop."""
    @T.prim_func
    def main(A: T.Tensor((tiles, 64, 512), "float16"), B: T.Tensor((STEPS, keys, 512), "float16"),
             D: T.Tensor((STEPS, 64, keys), "float16"), C: T.Tensor((tiles, 64, 512), "float16")):
        with T.Kernel(tiles, threads=256) as t:
            a, b = T.alloc_shared((64, 512), "float16"), T.alloc_shared((keys, 512), "float16")
            d, p = T.alloc_shared((64, keys), "float16"), T.alloc_shared((64, keys), "float16")
            s, out = T.alloc_fragment((64, keys), "float32"), T.alloc_fragment((64, 512), "float32")
            T.copy(A[t, :, :], a)
            T.clear(out)
            for i in T.Pipelined(STEPS, num_stages=2):
                T.copy(B[i, :, :], b)
                T.copy(D[i, :, :], d)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                for x, y in T.Parallel(64, keys):
                    p[x, y] = s[x, y] * 0.125 + d[x, y]
                T.gemm(p, b, out, policy=T.GemmWarpPolicy.FullCol)
            if read_after:
                for x, y in T.Parallel(64, 512):
                    out[x, y] += a[x, y]
            T.copy(out, C[t, :, :])

    return main


def passed(func, config=None):
    """(the program in front of the pass, and behind it)"""
    passes, cx = [*TILE_PASSES, *DEVICE_PASSES], PassContext(SM90A, config or {})
    at = passes.index(reused_tiles)
    before = run_passes(func.func, passes[:at], cx)
    return before, run_passes(before, [reused_tiles], cx)


def test_threads_stored_four_bytes_each_where_no_memory_was_left_for_staging():
    """Two blocks compute three tiles: the second tile of a block is loaded where the first result was."""
    tiles, config = 3, {"tl.persistent": 2}
    func = product(tiles)
    before, after = passed(func, config)
    assert after.body is not before.body
    out = lower(func.func, SM90A, config)
    plan = out.kernels[0].plan
    assert not any("is written from registers" in x for x in plan.report)
    assert plan.sync_report.startswith("ordered: model of 3 warp groups")  # the third one loads
    rng = np.random.default_rng(0)
    given = {n: rng.integers(-1, 2, shape).astype("float16") for n, shape in (
        ("A", (tiles, 64, 512)), ("B", (STEPS, 64, 512)), ("D", (STEPS, 64, 64)))}
    b, d = given["B"].astype(float), given["D"].astype(float)
    want = sum((given["A"].astype(float) @ b[i].T / 8 + d[i]) @ b[i] for i in range(STEPS)).astype("float16")
    np.testing.assert_array_equal(run_tile(after, given)["C"], want)
    np.testing.assert_array_equal(run_device(out, given).outputs["C"], want)


@pytest.mark.parametrize("arguments", [dict(read_after=True), dict(keys=32)], ids=str)
def test_tiles_that_are_read_later_stay_and_so_do_results_with_room(arguments):
    before, after = passed(product(**arguments))
    assert after.body is before.body
