"""Pipelined loops inside of the program's own loops and branches: roles that both go through them (outer_loops.py)."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.ir import Launch, dtype, numpy_dtype, walk
from tilelang.ir.expr import Call
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.ir.numbers import round_tf32
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.pipeline import lower
from tilelang.transform.schedule.specialize_warps import specialize_warps

SM90, E4 = Target({"kind": "cuda", "arch": "sm_90a"}), "float8_e4m3fn"
M, N, K, BM, BN, BK = 140, 136, 200, 64, 64, 32
COLUMNS, ROWS, STEPS = -(-N // BN), -(-M // BM), -(-K // BK)


def tile(body, threads=128, blocks=3, k=K):
    """A launch in which `body(A, B, C, As, Bs, F, block, n, step)` walks over tiles; step(…, by, bx, first, count, stages) is
    one of them."""
    @T.macro
    def step(A, B, C, As, Bs, F, by, bx, first, count, stages):
        T.clear(F)
        for ko in T.Pipelined(count, num_stages=stages):
            T.copy(A[by * BM, (first + ko) * BK], As)
            T.copy(B[(first + ko) * BK, bx * BN], Bs)
            T.gemm(As, Bs, F)
        T.copy(F, C[by * BM, bx * BN])

    @T.prim_func
    def main(A: T.Tensor((M, k), "float16"), B: T.Tensor((k, N), "float16"), C: T.Tensor((M, N), "float32"), n: T.int32):
        with T.Kernel(blocks, threads=threads) as block:
            As, Bs = T.alloc_shared((BM, BK), "float16"), T.alloc_shared((BK, BN), "float16")
            F = T.alloc_fragment((BM, BN), "float32")
            body(A, B, C, As, Bs, F, block, n, step)

    return main


@T.macro
def persistent(A, B, C, As, Bs, F, block, n, step):
    for by, bx in T.Persistent([ROWS, COLUMNS], 3, block, group_size=2):
        step(A, B, C, As, Bs, F, by, bx, 0, STEPS, 3)


@T.macro
def scheduler(A, B, C, As, Bs, F, block, n, step):
    s = T.PersistentTileScheduler(ROWS, COLUMNS, num_workers=3, swizzle_size=2)
    s.init(block)
    while s.valid():
        step(A, B, C, As, Bs, F, s.m_idx, s.n_idx, 0, STEPS, 2)
        s.next_tile()


@T.macro
def lengths(A, B, C, As, Bs, F, block, n, step):
    """Each tile takes another number of steps, some none."""
    for t in T.serial(3):
        step(A, B, C, As, Bs, F, block, t, t, T.max(n - 2 * t - block, 0), 2)


@T.macro
def branches(A, B, C, As, Bs, F, block, n, step):
    """A variable of the program decides, `continue` and `break` leave tiles out."""
    at = T.alloc_var("int32", init=0)
    for t in T.serial(6):
        at = at + 1
        if at == 2:
            T.continue_loop()
        if at > n:
            T.loop_break()
        if t % 2 == 0:
            step(A, B, C, As, Bs, F, block, t // 2, 0, at, 3)


@T.macro
def nested(A, B, C, As, Bs, F, block, n, step):
    x = T.alloc_var("int32", init=0)
    for half in T.serial(2):
        for u in T.unroll(2):
            if block * 2 + half < 4:
                step(A, B, C, As, Bs, F, block, x, u, 2 + x, 2)
                x = (x + 1) % 3


@T.macro
def one_branch(A, B, C, As, Bs, F, block, n, step):
    if n > 2:
        step(A, B, C, As, Bs, F, block, 1, 0, STEPS, 3)
    else:
        T.clear(F)
        T.copy(F, C[block * BM, 0])


@T.macro
def left_early(A, B, C, As, Bs, F, block, n, step):
    """Conditions of the loop's variable and a parameter alone."""
    for t in T.serial(4):
        if t % 2 == 1:
            T.continue_loop()
        step(A, B, C, As, Bs, F, t // 2, block % 2, 0, n, 2)
        if t == n - 5:
            T.loop_break()


PROGRAMS = {"left_early": (left_early, 2), "persistent": (persistent, 3),
            "scheduler": (scheduler, 3), "lengths": (lengths, 3), "branches": (branches, 3),
            "nested": (nested, 3), "one_branch": (one_branch, 3)}


def ops(node):
    return {x.op for x in walk(node) if isinstance(x, Call)}


def operands(k=K):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (M, k)).astype(np.float16), rng.integers(-3, 4, (k, N)).astype(np.float16)
    return {"A": a, "B": b, "C": np.full((M, N), 7, np.float32)}


@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_roles_go_through_the_programs_loops(name, n):
    body, blocks = PROGRAMS[name]
    program = tile(body, blocks=blocks)
    low = lower(program.func, SM90)
    (kernel,) = low.kernels
    assert {"tma_load", "wgmma", "in_warp_groups"} <= ops(kernel.launch) and "cp_async" not in ops(kernel.launch)
    assert kernel.plan.sync_report.startswith("ordered:")
    assert kernel.launch.num_threads == 256 and list(kernel.grid) == [blocks]
    args = {**operands(), "n": n}
    want = run_tile(program, args)["C"]
    assert np.array_equal(run_device(low, args).outputs["C"], want)
    if name in ("persistent", "scheduler"):
        assert np.array_equal(want, args["A"].astype(np.float64) @ args["B"].astype(np.float64))
    part = specialize_warps(program.func, PassContext(SM90, {}))  # the pass alone keeps the meaning of the tile program
    assert part is not program.func and np.array_equal(run_tile(part, args)["C"], want)


# ---- what the loading role cannot follow --------------------------------------------------------------------------------


@T.macro
def by_a_result(A, B, C, As, Bs, F, block, n, step):
    """How many steps there are is read from what the kernel wrote."""
    for t in T.serial(2):
        step(A, B, C, As, Bs, F, t, 0, 0, T.cast(C[0, 0], "int32") % 4, 2)


@T.macro
def by_a_variable_of_results(A, B, C, As, Bs, F, block, n, step):
    x = T.alloc_var("int32", init=0)
    y = T.alloc_var("int32", init=0)
    for t in T.serial(2):
        step(A, B, C, As, Bs, F, y, 0, 0, STEPS, 2)
        x = T.cast(C[block, 0], "int32") % 2
        y = x + t


@T.macro
def left_by_a_result(A, B, C, As, Bs, F, block, n, step):
    for t in T.serial(2):
        step(A, B, C, As, Bs, F, t, 0, 0, STEPS, 2)
        if C[block, 0] > 100.0:
            T.loop_break()


@T.macro
def by_the_lanes_that_come(A, B, C, As, Bs, F, block, n, step):
    """One thread that loads is not the warp that computes."""
    for t in T.serial(2):
        step(A, B, C, As, Bs, F, T.cast(T.popcount(T.ballot(n > 3)), "int32") // 32, t, 0, STEPS, 2)


@T.macro
def by_a_function(A, B, C, As, Bs, F, block, n, step):
    """The next tile, whoever asks: each role would get another one."""
    for t in T.serial(2):
        step(A, B, C, As, Bs, F, T.call_extern("int32", "next_tile"), t, 0, STEPS, 2)


@pytest.mark.parametrize("body, why", [
    (by_the_lanes_that_come, "is computed by the threads that would not load"),
    (by_a_function, "is computed by the threads that would not load"),
    (by_a_result, "is computed by the threads that would not load"), (left_by_a_result, "how often the loop runs"),
    (by_a_variable_of_results, "is computed by the threads that would not load")])
def test_declined_with_the_reason(body, why):
    func = specialize_warps(tile(body, blocks=2).func, PassContext(SM90, {}))
    launch = next(x for x in walk(func) if isinstance(x, Launch))
    (said,) = launch.plan.report
    assert "in_warp_groups" not in ops(launch) and said.startswith("no warp specialisation: ") and why in said


def test_several_loops_inside_other_loops_share_the_rings():
    @T.prim_func
    def two(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(2, threads=128) as block:
            As, Bs = T.alloc_shared((BM, BK), "float16"), T.alloc_shared((BK, BN), "float16")
            F = T.alloc_fragment((BM, BN), "float32")
            for t in T.serial(2):
                T.clear(F)
                for half in range(2):
                    for ko in T.Pipelined(3, num_stages=2):
                        T.copy(A[block * BM, (3 * half + ko) * BK], As)
                        T.copy(B[(3 * half + ko) * BK, t * BN], Bs)
                        T.gemm(As, Bs, F)
                    for ko in T.Pipelined(3, num_stages=2):
                        T.copy(A[block * BM, (3 * half + ko) * BK], As)
                        T.copy(B[(3 * half + ko) * BK, t * BN], Bs)
                        T.gemm(As, Bs, F)
                T.copy(F, C[block * BM, t * BN])

    program = lower(two.func, SM90)
    assert "both warp roles run the 2 pipelined loops one after another" in program.kernels[0].launch.plan.report
    rng = np.random.default_rng(0)
    A, B, C = rng.standard_normal((M, K)).astype("f2"), rng.standard_normal((K, N)).astype("f2"), np.zeros((M, N), "f4")
    out = run_device(program, [A, B, C]).outputs["C"]
    rows, columns, depth = min(M, 2 * BM), min(N, 2 * BN), min(K, 6 * BK)
    assert np.allclose(out[:rows, :columns], 2 * A[:rows, :depth].astype("f8") @ B[:depth, :columns], atol=1e-3)


# ---- other schedules, and what ptxas makes of it ------------------------------------------------------------------------


def attention_by_rows(seq=192, rows=64, d=32, workers=2):
    """Each worker takes blocks of queries in turn: two products, the second under the next iteration's first."""
    @T.prim_func
    def main(Q: T.Tensor((seq, d), "float16"), K: T.Tensor((seq, d), "float16"), V: T.Tensor((seq, d), "float16"),
             O: T.Tensor((seq, d), "float32")):
        with T.Kernel(workers, threads=128) as w:
            Qs, Ks, Vs = (T.alloc_shared((rows, d), "float16") for _ in range(3))
            S, P = T.alloc_fragment((rows, rows), "float32"), T.alloc_fragment((rows, rows), "float16")
            Of = T.alloc_fragment((rows, d), "float32")
            for t in T.serial(T.ceildiv(seq // rows - w, workers)):
                at = (t * workers + w) * rows
                T.copy(Q[at, 0], Qs)
                T.clear(Of)
                for k in T.Pipelined(at // rows + 1, num_stages=2):
                    T.copy(K[k * rows, 0], Ks)
                    T.copy(V[k * rows, 0], Vs)
                    T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(rows, rows):
                        P[i, j] = T.cast(T.if_then_else(at + i >= k * rows + j, S[i, j], 0.0), "float16")
                    T.gemm(P, Vs, Of)
                T.copy(Of, O[at, 0])

    return main


def test_two_products_inside_a_loop():
    program = attention_by_rows()
    low = lower(program.func, SM90)
    launch = low.kernels[0].launch
    assert {"tma_load", "in_warp_groups"} <= ops(launch) and low.kernels[0].plan.sync_report.startswith("ordered:")
    rng = np.random.default_rng(1)
    q, k, v = (rng.integers(-2, 3, (192, 32)).astype(np.float16) for _ in range(3))
    got = run_device(low, {"Q": q, "K": k, "V": v, "O": np.zeros((192, 32), np.float32)}).outputs["O"]
    s = np.tril(q.astype(np.float64) @ k.astype(np.float64).T)
    assert np.array_equal(got, s @ v.astype(np.float64))


def scaled(bm=64, bn=64, k=640, tiles=5, workers=2, threads=128, stages=3):
    """float8 with a scale for every row and 128 of k, workers that take tiles in turn."""
    @T.prim_func
    def main(A: T.Tensor((bm * tiles, k), E4), B: T.Tensor((bn, k), E4), S: T.Tensor((bm * tiles, k // 128), "float32"),
             C: T.Tensor((bm * tiles, bn), "float32")):
        with T.Kernel(workers, threads=threads) as w:
            As, Bs = T.alloc_shared((bm, 128), E4), T.alloc_shared((bn, 128), E4)
            part, Cf = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm, bn), "float32")
            row = T.alloc_fragment((bm,), "float32")
            for t in T.serial(T.ceildiv(tiles - w, workers)):
                at = (t * workers + w) * bm
                T.clear(Cf)
                for ko in T.Pipelined(k // 128, num_stages=stages):
                    T.copy(A[at, ko * 128], As)
                    T.copy(B[0, ko * 128], Bs)
                    for i in T.Parallel(bm):
                        row[i] = S[at + i, ko]
                    T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(bm, bn):
                        Cf[i, j] += part[i, j] * row[i]
                T.copy(Cf, C[at, 0])

    return main


def test_sums_of_two_levels_inside_a_loop():
    low = lower(scaled().func, SM90)
    assert low.kernels[0].launch.plan.overlap.startswith("double-buffered accumulator")
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-2, 3, s).astype(numpy_dtype(dtype(E4))) for s in ((320, 640), (64, 640)))
    s = rng.integers(1, 4, (320, 5)).astype(np.float32)
    got = run_device(low, {"A": a, "B": b, "S": s, "C": np.zeros((320, 64), np.float32)}).outputs["C"]
    assert np.array_equal(got, (a.astype(np.float64) * s.repeat(128, 1)) @ b.astype(np.float64).T)
    wide = lower(scaled(128, 256, tiles=3, threads=256, stages=4).func, SM90).kernels[0].launch
    assert wide.plan.overlap.startswith("wgmma in flight") and any(
        "in 2 chunks of 128 columns" in line for line in wide.plan.report)


def test_float32_tiles_inside_a_loop_are_rounded_by_tma():
    @T.prim_func
    def main(A: T.Tensor((192, 64), "float32"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((192, 64), "float32")):
        with T.Kernel(2, threads=128) as w:
            As, Bs = T.alloc_shared((64, 32), "float32"), T.alloc_shared((64, 32), "float32")
            F = T.alloc_fragment((64, 64), "float32")
            for t in T.serial(2 - w):
                T.clear(F)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[(t * 2 + w) * 64, k * 32], As)
                    T.copy(B[0, k * 32], Bs)
                    T.gemm(As, Bs, F, transpose_B=True)
                T.copy(F, C[(t * 2 + w) * 64, 0])

    low = lower(main.func, SM90)
    assert {m.buffer.name for m in low.kernels[0].tensor_maps if m.tf32} == {"A", "B"} and "wgmma" in ops(low.kernels[0].launch)
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((192, 64)).astype(np.float32), rng.standard_normal((64, 64)).astype(np.float32)
    got = run_device(low, {"A": a, "B": b, "C": np.zeros((192, 64), np.float32)}).outputs["C"]
    want = round_tf32(a).astype(np.float64) @ round_tf32(b).astype(np.float64).T
    assert np.abs(got - want).max() < 64 * 2.0**-24 * (np.abs(a) @ np.abs(b).T).max()


def large(stages=4):
    """4096 cubed, persistent by hand."""
    @T.prim_func
    def main(A: T.Tensor((4096, 4096), "float16"), B: T.Tensor((4096, 4096), "float16"), C: T.Tensor((4096, 4096), "float16")):
        with T.Kernel(132, threads=256) as block:
            As, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 256), "float16")
            F = T.alloc_fragment((128, 256), "float32")
            for by, bx in T.Persistent([32, 16], 132, block):
                T.clear(F)
                for k in T.Pipelined(64, num_stages=stages):
                    T.copy(A[by * 128, k * 64], As)
                    T.copy(B[k * 64, bx * 256], Bs)
                    T.gemm(As, Bs, F)
                T.copy(F, C[by * 128, bx * 256])

    return main


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("program", [large, lambda: attention_by_rows(4096, 64, 128, 132),
                                     lambda: scaled(128, 256, 4096, 32, 132, 256, 4)])
def test_assembles(program):
    (kernel,) = lower(program().func, SM90).kernels
    assert "in_warp_groups" in ops(kernel.launch)
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log
