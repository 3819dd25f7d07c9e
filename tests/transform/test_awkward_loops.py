"""Pipelined loops with one statement that made them lose their warp roles, their overlap or a resident block."""

import numpy as np
import pytest
from awkward_loops import SM80, SM90, agrees, dropped_orders, keeps_warp_roles
from sync_mutants import lowered

import tilelang
import tilelang.language as T
from tilelang.ir import Evaluate, Launch, rewrite, seq, walk
from tilelang.simulator import run_device
from tilelang.transform.verify_sync.launch import check_launch

RESIDENT = 228 * 1024 // 2 - 1024  # bytes of shared memory with which two blocks run on an SM of sm_90


@pytest.mark.parametrize("target", [SM90, SM80], ids=["sm_90a", "sm_80"])
def test_scores_that_are_stored_agree_with_the_reference(target, as_planned):
    agrees("store", target)


def test_scores_were_written_where_a_store_of_the_tile_before_was_still_read(as_planned):
    """The copies of the first iteration and of the others were not known to be disjoint: threads wrote one tensor from the
    bytes from which TMA stored another."""
    assert "X_map" in {n for n, *_ in keeps_warp_roles("store").plan.tensor_maps}


def test_dropped_orders_of_stored_scores_are_refuted():
    """Among them the wait for the store of the iteration before."""
    dropped, wrong = dropped_orders("store")
    assert dropped > 3 and not wrong


def recurrence(chunk=64, dim=128, columns=64, seq=128):
    """A state that passes through shared memory, and a key that is scaled there: 112 KiB of tiles without the output's."""
    @T.prim_func
    def f(Q: T.Tensor((seq, dim), "float16"), K: T.Tensor((seq, dim), "float16"), V: T.Tensor((seq, columns), "float16"),
          O: T.Tensor((seq, columns), "float16")):
        with T.Kernel(1, threads=128):
            q, k, v = [T.alloc_shared((chunk, n), "float16") for n in (dim, dim, columns)]
            held, kd = T.alloc_shared((dim, columns), "float16"), T.alloc_shared((chunk, dim), "float16")
            state, o = T.alloc_fragment((dim, columns), "float32"), T.alloc_fragment((chunk, columns), "float32")
            T.clear(state)
            for c in T.Pipelined(seq // chunk, num_stages=2):
                T.copy(Q[c * chunk, 0], q)
                T.copy(K[c * chunk, 0], k)
                T.copy(V[c * chunk, 0], v)
                T.copy(state, held)
                T.gemm(q, held, o, clear_accum=True)
                T.copy(o, O[c * chunk, 0])
                for i, j in T.Parallel(chunk, dim):
                    kd[i, j] = k[i, j] * T.cast(0.5, "float16")
                T.gemm(kd, v, state, transpose_A=True)

    return f


def test_the_staging_of_an_output_cost_a_resident_block(as_planned):
    """8 KiB for the output made 120 KiB of 112, and one block an SM of two."""
    func = lowered("sm_90a", recurrence(), {"tl.disable_warp_specialized": True})
    (launch,) = walk(func.body, Launch)
    assert launch.plan.shared_bytes <= RESIDENT and launch.plan.reuse
    assert check_launch(launch)[0].startswith("ordered")
    rng = np.random.default_rng(5)
    q, k, v = (rng.integers(-1, 2, n).astype(np.float16) for n in ((128, 128), (128, 128), (128, 64)))
    got = run_device(func, [q, k, v, np.zeros((128, 64), np.float16)]).outputs["O"]
    state = (k[:64] * np.float16(0.5)).astype(np.float32).T @ v[:64].astype(np.float32)
    np.testing.assert_array_equal(got[64:], (q[64:].astype(np.float32) @ state.astype(np.float16)).astype(np.float16))


def test_selected_elements_of_a_swizzled_tile_were_branches():
    """Whether the load is inside the tile follows from the value of a bound variable, j0 % 8 + v <= 7."""
    @T.prim_func
    def f(P: T.Tensor((128, 64), "float16"), X: T.Tensor((128, 64), "float16"), A: T.Tensor((128,), "float32"),
          O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            p, x = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            a, w = T.alloc_shared((64,), "float32"), T.alloc_fragment((64, 64), "float16")
            o = T.alloc_fragment((64, 64), "float32")
            T.clear(o)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(P[k * 64, 0], p)
                T.copy(A[k * 64:(k + 1) * 64], a)
                T.copy(X[k * 64, 0], x)
                for i, j in T.Parallel(64, 64):
                    w[i, j] = T.if_then_else(i >= j, p[i, j] * T.exp2(a[i] - a[j]), 0.0)
                T.gemm(w, x, o)
            T.copy(o, O)

    source = str(tilelang.lower(f, target=SM90).kernel_source)
    assert "select_both<float>{" in source


def test_one_warp_group_that_makes_operands_leaves_the_sm_to_a_second_block():
    (launch,) = walk(lowered("sm_90a", recurrence(), {}).body, Launch)
    assert "a second block on the SM" in " ".join(launch.plan.report) and launch.threads[0] == 128


def test_each_wait_of_a_loop_without_warp_roles_is_needed():
    """Each wait for a GEMM that is dropped is refuted."""
    func = lowered("sm_90a", recurrence(), {})
    (launch,) = walk(func.body, Launch)
    waits = [s for s in walk(func.body, Evaluate) if s.call.op == "wgmma_wait"]
    assert waits and check_launch(launch)[0].startswith("ordered")
    for s in waits:
        mutant = rewrite(func, lambda n, s=s: seq() if n is s else None)
        text, faults = check_launch(next(iter(walk(mutant.body, Launch))))
        assert faults or not text.startswith("ordered"), s
