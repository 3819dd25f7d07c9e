"""Sums whose shuffles leave the loop, and those that must stay in it."""

import re

import numpy as np
import pytest
from programs import attention

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import walk
from tilelang.ops import Reduce, SumCopies
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.lower.defer_reductions import defer_reductions
from tilelang.transform.layout.infer_layouts import infer_layouts
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower

SM80, SM90A = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a"))
STEPS, ROWS, COLS = 5, 64, 64


def rows(update, start=0.0, after=None, kind="sum", dtype="float32", threads=128, cols=COLS):
    """B[i] from the rows of A: `update(total, part, old, S, k)` adds a tile's sums `part` to `total`."""

    @T.prim_func
    def main(A: T.Tensor((STEPS, ROWS, cols), dtype), B: T.Tensor((ROWS,), dtype), C: T.Tensor((ROWS,), dtype)):
        with T.Kernel(1, threads=threads):
            S = T.alloc_fragment((ROWS, cols), dtype)
            part, total, other = [T.alloc_fragment((ROWS,), dtype) for _ in range(3)]
            T.fill(total, T.cast(start, dtype))
            T.fill(other, T.cast(2, dtype))
            for k in T.serial(STEPS):
                T.copy(A[k, :, :], S)
                getattr(T, f"reduce_{kind}")(S, part, dim=1)
                update(total, part, other, S, k)
            T.copy(total, B)
            T.copy(other, C)

    return main


@T.macro
def scaled(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] * other[i] + part[i]


@T.macro
def divided(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = part[i] - total[i] / other[i]


@T.macro
def named(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        half = other[i] * T.cast(0.5, total.dtype)
        total[i] += part[i] * half


@T.macro
def into(total, part, other, S, k):
    T.reduce_sum(S, total, dim=1, clear=False)


@T.macro
def into_scaled(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] *= other[i]
    T.reduce_sum(S, total, dim=1, clear=False)


def expect(update, a):
    """(B, number of deferred reductions)."""
    total = np.zeros(ROWS)
    for tile in a.astype(np.float64):
        s = tile.sum(1)
        total = {"scaled": 2 * total + s, "divided": s - total / 2, "named": total + s, "into": total + s,
                 "into_scaled": 2 * total + s}[update]
    return total


def deferred(func, target=SM80, config=None):
    passes = [*TILE_PASSES, *DEVICE_PASSES]
    out = run_passes(func.func, passes[:passes.index(defer_reductions) + 1], PassContext(target, config or {}))
    assert passes.index(infer_layouts) < passes.index(defer_reductions)
    spread = [x for x in walk(out.body) if isinstance(x, Reduce) and x.plan.spread]
    return out, len(spread), sum(isinstance(x, SumCopies) for x in walk(out.body))


UPDATES = {"scaled": scaled, "divided": divided, "named": named, "into": into, "into_scaled": into_scaled}


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("dtype", ["float32", "int32", "float64"])
@pytest.mark.parametrize("threads", [128, 32])
def test_sums_are_the_same_and_shuffles_are_after_the_loop(name, dtype, threads):
    if dtype == "int32" and name in ("divided", "named"):
        pytest.skip("halves")
    func = rows(UPDATES[name], dtype=dtype, threads=threads)
    out, spread, ends = deferred(func)
    assert (spread, ends) == (1, 1)
    a = np.random.default_rng(0).integers(-8, 9, (STEPS, ROWS, COLS)).astype(dtype)
    given, want = {"A": a}, expect(name, a)  # small integers and halves: no order of additions rounds
    np.testing.assert_array_equal(run_tile(out, given)["B"], want)
    np.testing.assert_array_equal(run_device(lower(func.func, SM80), given).outputs["B"], want)


@T.macro
def read_in_the_loop(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] * other[i] + part[i]
    for i in T.Parallel(ROWS):
        other[i] = T.max(other[i], total[i])


@T.macro
def part_read_elsewhere(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[i]
    for i in T.Parallel(ROWS):
        other[i] = part[i]


@T.macro
def squared(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] * total[i] + part[i]


@T.macro
def with_a_constant(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[i] + T.cast(1, total.dtype)


@T.macro
def left_early(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[i]
    if k == 2:
        T.loop_break()


@T.macro
def under_a_condition(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        if other[i] > T.cast(0, total.dtype):
            total[i] = total[i] + part[i]


@T.macro
def shifted(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[ROWS - 1 - i]


@pytest.mark.parametrize("update", [read_in_the_loop, part_read_elsewhere, squared, with_a_constant, left_early,
                                    under_a_condition, shifted], ids=lambda u: u.__name__)
def test_what_is_not_linear_in_the_sum_or_needs_it_earlier_stays(update):
    assert deferred(rows(update))[1:] == (0, 0)


@T.macro
def divided_by_a_part(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + other[i] / part[i]


@T.macro
def divided_by_the_sum(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = part[i] + other[i] / total[i]  # 1 / 0 at first, which the next step takes for 0


@T.macro
def times_what_hangs_on_the_part(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[i] * (part[i] + other[i])


@T.macro
def part_kept_by_the_same_loop(total, part, other, S, k):
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[i]
        other[i] = part[i]


@T.macro
def part_that_is_a_factor_beside(total, part, other, S, k):
    again = T.alloc_fragment((ROWS,), total.dtype)
    T.reduce_sum(S, again, dim=1)
    for i in T.Parallel(ROWS):
        total[i] = total[i] + part[i] * T.abs(again[i])
    for i in T.Parallel(ROWS):
        total[i] = total[i] + again[i]


@pytest.mark.parametrize("update", [divided_by_a_part, divided_by_the_sum, times_what_hangs_on_the_part,
                                    part_kept_by_the_same_loop, part_that_is_a_factor_beside], ids=lambda u: u.__name__)
def test_copies_were_parts_of_sums_where_the_whole_was_asked_for(update):
    """Divisors, factors and other stores of the loop need the sum over all lanes, not a lane's share."""
    func = rows(update)
    assert deferred(func)[1:] == (0, 0)
    given = {"A": np.random.default_rng(4).integers(1, 9, (STEPS, ROWS, COLS)).astype("float32")}
    want, got = run_tile(func.func, given), run_device(lower(func.func, SM80), given).outputs
    for name in "BC":
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)


def test_a_sum_that_does_not_start_from_zero_stays():
    assert deferred(rows(scaled, start=1.0))[1:] == (0, 0)


def test_a_maximum_stays():
    assert deferred(rows(scaled, kind="max"))[1:] == (0, 0)


def test_narrow_sums_stay():
    assert deferred(rows(scaled, dtype="float16"))[1:] == (0, 0)


def test_sums_over_several_warps_stay():
    assert deferred(rows(scaled, threads=256, cols=512))[1] in (0, 1)  # by the layout: never half of it
    func = rows(scaled, threads=256, cols=512)
    a = np.random.default_rng(1).integers(-8, 9, (STEPS, ROWS, 512)).astype("float32")
    got = run_device(lower(func.func, SM80), {"A": a}).outputs["B"]
    total = np.zeros(ROWS)
    for tile in a:
        total = 2 * total + tile.sum(1)
    np.testing.assert_array_equal(got, total)


def test_copies_are_summed_in_whole_warps_alone():
    """Four threads of a last warp hold nothing, and lanes that they would ask are not there."""
    func = rows(scaled, threads=132)
    assert deferred(func)[1:] == (1, 1)
    a = np.random.default_rng(1).integers(-8, 9, (STEPS, ROWS, COLS)).astype("float32")
    total = np.zeros(ROWS)
    for tile in a:
        total = 2 * total + tile.sum(1)
    np.testing.assert_array_equal(run_device(lower(func.func, SM90A), {"A": a}).outputs["B"], total)


def test_a_sum_that_starts_outside_the_loop_it_ends_in_stays():
    """The sum goes on over the outer loop: its copies must not be added at the end of each inner one."""

    @T.prim_func
    def main(A: T.Tensor((STEPS, ROWS, COLS), "float32"), B: T.Tensor((3, ROWS), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_fragment((ROWS, COLS), "float32")
            part, total = [T.alloc_fragment((ROWS,), "float32") for _ in range(2)]
            T.clear(total)
            for o in T.serial(3):
                for k in T.serial(STEPS):
                    T.copy(A[k, :, :], S)
                    T.reduce_sum(S, part, dim=1)
                    for i in T.Parallel(ROWS):
                        total[i] += part[i]
                T.copy(total, B[o, :])

    assert deferred(main)[1:] == (0, 0)
    a = np.random.default_rng(2).integers(-8, 9, (STEPS, ROWS, COLS)).astype("float32")
    got = run_device(lower(main.func, SM80), {"A": a}).outputs["B"]
    np.testing.assert_array_equal(got, np.outer([1, 2, 3], a.sum((0, 2))))


def test_attention_defers_its_row_sums_and_holds_the_wait_behind_the_maximum():
    func = attention(seq=256, dim=64, bm=128, bn=64, threads=256)
    _, spread, ends = deferred(func, SM90A)
    assert (spread, ends) == (2, 1)  # of the first block and of the loop
    text = print_kernel(lower(func.func, SM90A).kernels[0])
    loop = text[text.rindex("tl::wgmma_wait<1>()"):]
    assert re.search(r"fmaxf.*?wgmma_hold<2>.*?exp2.*?wgmma_wait<0>", loop, re.S)
    assert loop[:loop.index("wgmma_wait<0>")].count("shfl_xor_sync") == 2  # of the maximum; none of the sum


@pytest.mark.parametrize("count, threads, ends", [(1, 128, 1), (2, 128, 1), (1, 96, 1), (1, 100, 0)])
def test_sums_of_rows_in_several_warps_met_in_every_iteration(count, threads, ends):
    """All threads hold the total.  Threads that are no whole warps keep their order of additions."""
    @T.prim_func
    def main(A: T.Tensor((STEPS, count, 1536), "float32"), B: T.Tensor((count,), "float32")):
        with T.Kernel(1, threads=threads):
            S = T.alloc_fragment((count, 1536), "float32")
            part, total, top = [T.alloc_fragment((count,), "float32") for _ in range(3)]
            T.clear(total)
            for k in T.serial(STEPS):
                T.copy(A[k, :, :], S)
                T.reduce_max(S, top, dim=1)
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(count):
                    total[i] = total[i] * (top[i] - 6.0) + part[i]
            T.copy(total, B)

    a = np.random.default_rng(3).integers(-8, 9, (STEPS, count, 1536)).astype(np.float32)
    want = np.zeros(count)
    for tile in a:
        want = want * (tile.max(1) - 6) + tile.sum(1)
    for target in (SM80, SM90A):
        assert deferred(main, target)[2] == ends
        np.testing.assert_array_equal(run_device(lower(main.func, target), {"A": a}).outputs["B"], want)


def test_sums_of_rows_that_two_warp_groups_hold_by_columns_met_in_every_iteration():
    """Each group has half of the columns of all rows: a row's copies are in lanes and in both groups."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            S = T.alloc_fragment((64, 64), "float32")
            part, total = [T.alloc_fragment((64,), "float32") for _ in range(2)]
            T.copy(A, a)
            T.clear(total)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(B[k, :, :], b)
                T.gemm(a, b, S, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(64):
                    total[i] = total[i] * 2.0 + part[i]
            T.copy(total, C)

    assert deferred(main, SM90A)[2] == 1
    rng = np.random.default_rng(5)
    given = {"A": rng.integers(-2, 3, (64, 64)).astype("float16"), "B": rng.integers(-2, 3, (STEPS, 64, 64)).astype("float16")}
    want = np.zeros(64)
    for tile in given["B"]:
        want = want * 2 + (given["A"].astype(float) @ tile.T.astype(float)).sum(1)
    for target in (SM80, SM90A):
        np.testing.assert_array_equal(run_device(lower(main.func, target), given).outputs["C"], want)


def counted(above, read=False):
    """B[0] counts the tiles of A whose maximum is above 6, or not."""
    @T.prim_func
    def main(A: T.Tensor((STEPS, ROWS, COLS), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=128):
            S, count = T.alloc_fragment((ROWS, COLS), "float32"), T.alloc_fragment((1,), "float32")
            rows, top = T.alloc_fragment((ROWS,), "float32"), T.alloc_fragment((1,), "float32")
            T.clear(count)
            for k in T.serial(STEPS):
                T.copy(A[k, :, :], S)
                T.reduce_max(S, rows, dim=1)
                T.reduce_max(rows, top, dim=0)
                if top[0] > 6.0 if above else top[0] <= 6.0:
                    for i in T.Parallel(1):
                        count[i] += top[0] if read else 1.0
            T.copy(count, B)

    return main


@pytest.mark.parametrize("above, read, spread", [(True, False, 2), (False, False, 0), (True, True, 0)],
                         ids=["above", "not above", "read"])
def test_maxima_that_only_votes_compare_stay_in_their_threads(above, read, spread):
    func = counted(above, read)
    out, found, ends = deferred(func)
    assert (found, ends) == (spread, 0)
    a = np.random.default_rng(0).integers(-8, 4, (STEPS, ROWS, COLS)).astype(np.float32)
    a[1, 40, 63] = a[3, 1, 0] = 7  # in one thread each
    tops = a.max((1, 2))
    want = tops[tops > 6].sum() if read else ((tops > 6) == above).sum()
    assert run_tile(out, {"A": a})["B"] == run_device(lower(func.func, SM80), {"A": a}).outputs["B"] == want
