"""Maxima that votes of the block compare, synchronisation behind such votes, and tiles that several copies fill."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Call, Evaluate, If, replace, rewrite, seq, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower
from tilelang.transform.verify_sync.launch import check_launch

SM80, SM90A = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a"))
STEPS, N = 3, 64


def raised(limit, other=False, columns=False):
    """Running column maxima of X, raised where an element is more than `limit` above them; then a GEMM with what is left.
    other: the maximum has another use. columns: what a vote compares is made of the tile's column maxima."""
    @T.prim_func
    def main(X: T.Tensor((STEPS, N, N), "float16"), W: T.Tensor((N, N), "float16"), Y: T.Tensor((N, N), "float32"),
             Top: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=128):
            Xs, Ws, P = [T.alloc_shared((N, N), "float16") for _ in (0, 1, 2)]
            S, over, acc = [T.alloc_fragment((N, N), "float32") for _ in (0, 1, 2)]
            top, before = T.alloc_fragment((N,), "float32"), T.alloc_fragment((N,), "float32")
            each, most, highest = [T.alloc_fragment((n,), "float32") for n in (N, 1, N)]
            T.copy(W, Ws)
            T.fill(top, -100.0)
            T.clear(acc)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(X[k, :, :], Xs)
                T.gemm(Xs, Ws, S, clear_accum=True)
                if columns:
                    T.reduce_max(S, highest, dim=0)
                    for j in T.Parallel(N):
                        each[j] = highest[j] - top[j]
                else:
                    for i, j in T.Parallel(N, N):
                        over[i, j] = S[i, j] - top[j]
                    T.reduce_max(over, each, dim=1)
                T.reduce_max(each, most, dim=0)
                if most[0] > limit:
                    T.copy(top, before)
                    T.reduce_max(S, top, dim=0)
                    for j in T.Parallel(N):
                        top[j] = T.max(top[j], before[j])
                for i, j in T.Parallel(N, N):
                    S[i, j] = S[i, j] - top[j] + (most[0] if other else 0.0)
                T.copy(S, P)
                T.gemm(Ws, P, acc)
            T.copy(acc, Y)
            T.copy(top, Top)

    return main


def arrays():
    rng = np.random.default_rng(0)
    return {"X": rng.integers(-2, 3, (STEPS, N, N)).astype(np.float16), "W": np.eye(N, dtype=np.float16)}


@pytest.mark.parametrize("target", [SM80, SM90A], ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("limit, columns", [(0.5, False), (8.0, False), (0.5, True), (8.0, True)])
def test_a_vote_needs_no_maximum_over_lanes(target, limit, columns):
    program = raised(limit, columns=columns)
    lowered = lower(program.func, target, {"tl.disable_warp_specialized": True})
    text = print_kernel(lowered.kernels[0])
    before, behind = text.split("syncthreads_or", 1)
    assert "shfl" not in before.split("for (int k = 0", 1)[1] and "shfl" in behind
    assert ("wgmma_m64" in text) == (target is SM90A)  # the model follows the vote
    got, want = run_device(lowered, arrays()).outputs, run_tile(program.func, arrays())
    assert np.any(want["Top"] > -100) == (limit < 100)
    for name in ("Y", "Top"):
        np.testing.assert_array_equal(got[name], want[name])


def test_a_maximum_with_another_use_is_one_of_all_lanes():
    text = print_kernel(lower(raised(0.5, other=True).func, SM80).kernels[0])
    assert "shfl" in text.split("syncthreads_or", 1)[0].split("for (int k = 0", 1)[1]


def test_a_barrier_that_is_missing_behind_a_vote_is_found():
    launch = lower(raised(0.5).func, SM90A, {"tl.disable_warp_specialized": True}).kernels[0].launch
    assert "ordered" in check_launch(launch)[0]
    branch = next(s for s in walk(launch.body, If) if any(c.op == "sync_threads" for c in walk(s.then, Call)))
    barriers = [s for s in walk(branch.then, Evaluate) if s.call.op == "sync_threads"]
    without = rewrite(branch.then, lambda s: seq() if s in barriers else None, Evaluate)
    broken = replace(launch, body=rewrite(launch.body, lambda s: replace(s, then=without) if s is branch else None, If))
    assert "ordered" not in check_launch(broken)[0]


@pytest.mark.parametrize("pieces, whole", [((0, 32), True), ((0, 16), False)])
def test_copies_that_fill_a_tile_together_run_ahead(pieces, whole):
    @T.prim_func
    def main(X: T.Tensor((STEPS, 2, 32, N), "float16"), W: T.Tensor((N, N), "float16"), Y: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            Xs, Ws = T.alloc_shared((N, N), "float16"), T.alloc_shared((N, N), "float16")
            acc = T.alloc_fragment((N, N), "float32")
            T.copy(W, Ws)
            T.clear(Xs)
            T.clear(acc)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(X[k, 0, :, :], Xs[pieces[0]:pieces[0] + 32, :])
                T.copy(X[k, 1, :, :], Xs[pieces[1]:pieces[1] + 32, :])
                T.gemm(Xs, Ws, acc)
            T.copy(acc, Y)

    report = lower(main.func, SM80).kernels[0].launch.plan.pipeline_report
    assert ("2 stages of Xs" in report) == whole, report


def test_rows_of_a_tile_come_by_tma():
    @T.prim_func
    def main(X: T.Tensor((STEPS, 2, 32, N), "float16"), W: T.Tensor((N, N), "float16"), Y: T.Tensor((N, N), "float32")):
        with T.Kernel(1, threads=128):
            Xs, Ws, P = [T.alloc_shared((N, N), "float16") for _ in (0, 1, 2)]
            S, acc = T.alloc_fragment((N, N), "float32"), T.alloc_fragment((N, N), "float32")
            T.copy(W, Ws)
            T.clear(acc)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(X[k, 0, :, :], Xs[0:32, :])
                T.copy(X[k, 1, :, :], Xs[32:64, :])
                T.gemm(Xs, Ws, S, clear_accum=True)
                T.copy(S, P)
                T.gemm(Ws, P, acc)
            T.copy(acc, Y)

    lowered = lower(main.func, SM90A, {"tl.disable_warp_specialized": True})
    text = print_kernel(lowered.kernels[0]).split("for (int k = 0", 1)[1]
    assert text.count("tl::tma_load") == 2 and text.count("tl::elect_one()") == 1 and "cp_async<16>" not in text
    assert text.count("mbarrier_arrive_expect_tx(") == text.count("4096u") == 2
    given = {"X": arrays()["X"].reshape(STEPS, 2, 32, N), "W": arrays()["W"]}
    np.testing.assert_array_equal(run_device(lowered, given).outputs["Y"], run_tile(main.func, given)["Y"])
