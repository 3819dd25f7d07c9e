"""Pipelined loops whose whole body stands under a condition."""

import pytest
from awkward_loops import MASKS, SM80, SM90, agrees, dropped_orders, keeps_warp_roles
from sync_mutants import lowered

import tilelang.language as T
from tilelang.ir import For, If, walk
from tilelang.transform.legalize.kept_iterations import kept_iterations

CASES = [*(("keys", m) for m in MASKS), ("mask", "some")]


@pytest.mark.parametrize("target", [SM90, SM80], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("kind, mask", CASES)
def test_iterations_whose_condition_holds_run_in_order(kind, mask, target, as_planned):
    agrees(kind, target, mask)


@pytest.mark.parametrize("kind", ["mask", "keys"])
def test_loads_under_a_condition_were_loaded_by_the_threads_that_multiply(kind, as_planned):
    keeps_warp_roles(kind)


def test_dropped_orders_of_kept_iterations_are_refuted():
    dropped, wrong = dropped_orders("mask")
    assert dropped > 3 and not wrong


def test_a_condition_on_what_the_kernel_writes_stays():
    """The list would be made before the loop changes what the condition reads."""
    @T.prim_func
    def f(A: T.Tensor((4, 64, 64), "float16"), M: T.Tensor((5,), "int32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                if M[k] != 0:
                    T.copy(A[k, :, :], a)
                    T.gemm(a, a, c)
                    M[k + 1] = 0
            T.copy(c, C)

    assert any(isinstance(x, If) and any(s.kind == "pipelined" for s in walk(f.func, For)) for x in walk(f.func))
    func = lowered("sm_80", f, {"tl.enable_async_copy": False})
    assert kept_iterations.__name__ == "kept_iterations" and not any("kept" in s.var.name for s in walk(func.body, For))


def test_a_pipelined_loop_may_be_empty():
    """A body of views alone has no statement that could hold a condition."""
    @T.prim_func
    def f(A: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((128,), "float32")
            T.copy(A, a)
            for _ in T.Pipelined(2, num_stages=2):
                T.view(a, (8, 16))
            T.copy(a, A)

    assert lowered("sm_90a", f, {})
