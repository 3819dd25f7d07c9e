"""Two warp groups whose arithmetic takes longer than their GEMMs start these one after the other (emit.ping_pong)."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
KEYS, DIM, ROWS = 64, 64, 128


def attention(score, tiles=3, stages=2, threads=256):
    """Attention of `tiles` tiles of queries to n blocks of keys, with a run-time n."""
    @T.prim_func
    def attend(Q: T.Tensor((tiles * ROWS, DIM), "float16"), K: T.Tensor((4 * KEYS, DIM), "float16"),
               V: T.Tensor((4 * KEYS, DIM), "float16"), n: T.int32, O: T.Tensor((tiles * ROWS, DIM), "float16")):
        with T.Kernel(tiles, threads=threads) as bx:
            q, k, v = [T.alloc_shared((m, DIM), "float16") for m in (ROWS, KEYS, KEYS)]
            s, p = T.alloc_fragment((ROWS, KEYS), "float32"), T.alloc_fragment((ROWS, KEYS), "float16")
            o = T.alloc_fragment((ROWS, DIM), "float32")
            top, before, rescale = [T.alloc_fragment((ROWS,), "float32") for _ in range(3)]
            T.copy(Q[bx * ROWS, 0], q)
            T.clear(o)
            T.fill(top, -1e4)
            for step in T.Pipelined(n, num_stages=stages):
                T.copy(K[step * KEYS, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(ROWS, KEYS):
                    s[i, j] = score(s[i, j])
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(ROWS):
                    rescale[i] = T.exp2(before[i] - top[i])
                for i, j in T.Parallel(ROWS, KEYS):
                    s[i, j] = T.exp2(s[i, j] - top[i])
                T.copy(s, p)
                for i, j in T.Parallel(ROWS, DIM):
                    o[i, j] *= rescale[i]
                T.copy(V[step * KEYS, 0], v)
                T.gemm(p, v, o)
            T.copy(o, O[bx * ROWS, 0])

    return attend


def slow(x):
    return x * 0.7 + 0.1


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_groups_with_long_scores_fell_in_step(n, stages):
    program = attention(slow, stages=stages)
    low = lower(program.func, SM90, {"tl.persistent": 2})
    (kernel,) = low.kernels
    text = print_kernel(kernel)
    assert "named_barrier(tx >= 128 ? 15 : 14, 256)" in text and "named_barrier_arrive(tx >= 128 ? 14 : 15, 256)" in text
    assert kernel.plan.sync_report.startswith("ordered:") and "tma_store" in text  # these barriers are nobody's stores'
    rng = np.random.default_rng(n)
    q, k, v = ((rng.standard_normal((m, DIM)) / 4).astype("f2") for m in (3 * ROWS, 4 * KEYS, 4 * KEYS))
    args = {"Q": q, "K": k, "V": v, "n": n, "O": np.zeros((3 * ROWS, DIM), "f2")}
    want = run_tile(program, args)["O"].astype("f4")
    assert np.allclose(run_device(low, args).outputs["O"].astype("f4"), want, rtol=4e-3, atol=4e-3)


def values_of(form, rows):
    """O += exp(Q K^T - a maximum) V, where the maximum, or a product, takes what both warp groups computed."""
    policy = T.GemmWarpPolicy.FullCol if form == "by columns" else T.GemmWarpPolicy.Square

    @T.prim_func
    def main(Q: T.Tensor((rows, DIM), "float16"), K: T.Tensor((3 * KEYS, DIM), "float16"),
             V: T.Tensor((3 * KEYS, DIM), "float16"), O: T.Tensor((rows, DIM), "float32")):
        with T.Kernel(1, threads=256):
            q, k, v = [T.alloc_shared((m, DIM), "float16") for m in (rows, KEYS, KEYS)]
            s, p = T.alloc_fragment((rows, KEYS), "float32"), T.alloc_fragment((rows, KEYS), "float16")
            shared, scaled = T.alloc_shared((rows, KEYS), "float16"), T.alloc_shared((rows, DIM), "float16")
            o, top = T.alloc_fragment((rows, DIM), "float32"), T.alloc_fragment((rows,), "float32")
            wide = T.alloc_fragment((KEYS,), "float32")
            T.copy(Q, q)
            T.clear(o)
            for step in T.Pipelined(3, num_stages=3):
                T.copy(K[step * KEYS, 0], k)
                if form == "scaled rows":
                    for i, j in T.Parallel(rows, DIM):
                        scaled[i, j] = q[i, j] * T.cast(step + 1, "float16")
                T.gemm(scaled if form == "scaled rows" else q, k, s, transpose_B=True, clear_accum=True, policy=policy)
                if form == "maximum of columns":
                    T.reduce_max(s, wide, dim=0)
                else:
                    T.reduce_max(s, top, dim=1)
                for i, j in T.Parallel(rows, KEYS):
                    s[i, j] = T.exp2(s[i, j] * 0.02) - (wide[j] if form == "maximum of columns" else top[i])
                T.copy(V[step * KEYS, 0], v)
                for i, j in T.Parallel(rows, KEYS):
                    p[i, j] = T.cast(s[i, j], "float16")
                if form == "shared":
                    T.copy(p, shared)
                T.gemm(shared if form == "shared" else p, v, o, policy=policy)
            T.copy(o, O)

    return main


@pytest.mark.parametrize("form, rows, alternate", [
    ("rows", 128, True), ("rows", 64, False), ("by columns", 128, False), ("maximum of columns", 128, False),
    ("shared", 128, False), ("scaled rows", 128, False)])
def test_groups_that_wait_for_each_other_stood_still_in_ping_pong(form, rows, alternate):
    """One group waited at the block's barrier for a maximum, the other for the first one's GEMMs: without warp roles then."""
    program = values_of(form, rows)
    low = lower(program.func, SM90)
    assert ("named_barrier_arrive" in print_kernel(low.kernels[0])) == alternate
    assert not any("compiled without" in x for x in low.kernels[0].launch.plan.report)
    rng = np.random.default_rng(1)
    args = {n: rng.integers(-3, 4, (m, DIM)).astype("f2") for n, m in (("Q", rows), ("K", 3 * KEYS), ("V", 3 * KEYS))}
    args["O"] = np.zeros((rows, DIM), "f4")
    np.testing.assert_allclose(run_device(low, args).outputs["O"], run_tile(program, args)["O"], rtol=4e-3, atol=0.1)
