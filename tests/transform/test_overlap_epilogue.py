"""Panels of sums that are final are stored under the last product of a tile."""

import ml_dtypes
import numpy as np
import pytest

import tilelang.language as T
from tilelang.ir import Evaluate, For, Seq, replace, rewrite, seq, statements, walk, with_options, Launch
from tilelang.ir.expr import Call
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.registers.overlap_epilogue import overlap_epilogue
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
HOPPER = {"tl.enable_hopper": True}
F8 = "float8_e4m3fn"


def promoted(m=128, n=256, k=512, bn=256, out="bfloat16", relu=False, threads=128):
    """C = the sums of 128 of k added up, each by the row's scale: bn columns of 64 rows a warp group."""
    bm = threads // 2

    @T.prim_func
    def main(A: T.Tensor((m, k), F8), B: T.Tensor((n, k), F8), S: T.Tensor((m,), "float32"), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, 128), F8), T.alloc_shared((bn, 128), F8)
            part, total = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            row = T.alloc_fragment((bm,), "float32")
            T.clear(total)
            for i in T.Parallel(bm):
                row[i] = S[by * bm + i]
            for ko in T.Pipelined(k // 128, num_stages=3):
                T.copy(A[by * bm, ko * 128], As)
                T.copy(B[bx * bn, ko * 128], Bs)
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    total[i, j] += part[i, j] * row[i]
            if relu:
                for i, j in T.Parallel(bm, bn):
                    total[i, j] = T.max(total[i, j], 0.0)
            T.copy(total, C[by * bm, bx * bn])

    return main


def inputs(m=128, n=256, k=512, out=ml_dtypes.bfloat16):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, s).astype(ml_dtypes.float8_e4m3fn) for s in ((m, k), (n, k)))
    return {"A": a, "B": b, "S": rng.integers(1, 5, m).astype(np.float32), "C": np.zeros((m, n), out)}


def wanted(x):
    return ((x["A"].astype(np.float64) @ x["B"].astype(np.float64).T) * x["S"][:, None]).astype(x["C"].dtype)


def before(program):
    """The program as the pass finds it."""
    at = DEVICE_PASSES.index(overlap_epilogue)
    return run_passes(program.func, (*TILE_PASSES, *DEVICE_PASSES[:at]), PassContext(SM90, HOPPER))


def order(n):
    """Stores by TMA, waits for products and arrivals of the warp groups that compute, as they stand behind the last product."""
    names = [x.op for x in walk(n) if isinstance(x, Call)]
    last = len(names) - names[::-1].index("wgmma")
    return [x for x in names[last:] if x in ("tma_store", "wgmma_wait", "mbarrier_arrive")]


@pytest.mark.parametrize("out, early, late", [("bfloat16", 2, 2), ("float32", 4, 4)])
@pytest.mark.parametrize("threads", [128, 256])
def test_all_parts_but_the_last_leave_under_its_product(out, early, late, threads):
    program = promoted(out=out, threads=threads)
    func = before(program)
    assert order(func) == ["wgmma_wait", "mbarrier_arrive"] + ["tma_store"] * (early + late)
    low = lower(program.func, SM90, HOPPER)
    launch = low.kernels[0].launch
    assert order(launch) == ["tma_store"] * early + ["wgmma_wait", "mbarrier_arrive"] + ["tma_store"] * late
    assert str(launch.plan.sync_report).startswith("ordered:") and not any(
        "without" in line for line in launch.plan.report)
    x = inputs(out=np.float32 if out == "float32" else ml_dtypes.bfloat16)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_several_tiles_of_a_block_take_turns_with_their_panels():
    low = lower(promoted(m=64 * 6, n=512).func, SM90, {**HOPPER, "tl.persistent": 2})
    assert order(low.kernels[0].launch).index("wgmma_wait") == 2
    x = inputs(m=64 * 6, n=512)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_sums_that_are_worked_on_behind_the_loop_stay():
    program = promoted(relu=True)
    func = before(program)
    assert order(func)[0] == "wgmma_wait" and overlap_epilogue(func, PassContext(SM90, HOPPER)) is func
    x = inputs()
    assert np.array_equal(run_device(lower(program.func, SM90, HOPPER), x).outputs["C"], np.maximum(wanted(x), 0))


def test_one_part_has_nothing_to_store_early():
    func = before(promoted(n=64, bn=64))
    assert overlap_epilogue(func, PassContext(SM90, HOPPER)) is func


def test_panels_in_memory_of_the_operands_wait_for_the_product():
    """A panel that lies where the product still reads must not be written under it."""
    func = before(promoted())

    def overlapping(x):
        places = x.plan.shared_offsets if isinstance(x, Launch) else None
        if not places:
            return None
        ring = next(at for b, at in places if b.name == "Bs")
        return with_options(x, shared_offsets=tuple((b, ring if b.name == "staging" else at) for b, at in places))

    func = rewrite(func, overlapping)
    assert overlap_epilogue(func, PassContext(SM90, HOPPER)) is func


def test_panels_that_read_sums_of_the_last_product_are_not_passed_by():
    """Sums of the last product in the registers of an early panel: that panel and those behind it stay."""
    func = before(promoted())

    def shifted(x):  # the last sums go to the registers of panel 1
        if not isinstance(x, Seq):
            return None
        stores = [n for n, s in enumerate(x.stmts) if any(isinstance(y, Call) and y.op == "tma_store" for y in walk(s))]
        if len(stores) < 2:  # the inside of a store
            return None
        n = next(n for n in reversed(range(stores[0])) if isinstance(x.stmts[n], For) and not any(
            isinstance(y, Evaluate) for y in statements(x.stmts[n])))
        return seq(*x.stmts[:n], rewrite(x.stmts[n], lambda y: _moved_back(y, 32)), *x.stmts[n + 1:])

    out = overlap_epilogue(rewrite(func, shifted), PassContext(SM90, HOPPER))
    assert order(out) == ["tma_store", "wgmma_wait", "mbarrier_arrive"] + ["tma_store"] * 3


def _moved_back(x, registers):
    """Accesses of the totals by so many registers earlier."""
    if getattr(getattr(x, "buffer", None), "name", "") == "total" and hasattr(x, "indices"):
        return replace(x, indices=tuple(i - registers for i in x.indices))
    return None
