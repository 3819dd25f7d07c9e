"""Tiles that go between global and shared memory by TMA outside the rings of roles (transform/lower/tma_copies.py)."""

import numpy as np
import pytest
from hopper_lowered import launch_of, lowered, ops, plain_stores, report
from programs import EPS, NP

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, For, If, Seq, Stmt, rebuild, replace, walk
from tilelang.ir.expr import Call
from tilelang.runtime import nvrtc
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext
from tilelang.transform.lower.tma_copies import tma_copies

SM90A = Target({"kind": "cuda", "arch": "sm_90a"})
ON, OFF = {"tl.enable_hopper": True}, {"tl.enable_hopper": False}


# ---- stores -----------------------------------------------------------------------------------------------------------


def in_two_steps(m, n, k, bm, bn, threads, out="float16", stages=2):
    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((k, n), "float16"), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            As, Bs = T.alloc_shared((bm, 32), "float16"), T.alloc_shared((32, bn), "float16")
            Cs, Cf = T.alloc_shared((bm, bn), out), T.alloc_fragment((bm, bn), "float32")
            T.clear(Cf)
            for ko in T.Pipelined(T.ceildiv(k, 32), num_stages=stages):
                T.copy(A[by * bm, ko * 32], As)
                T.copy(B[ko * 32, bx * bn], Bs)
                T.gemm(As, Bs, Cf)
            T.copy(Cf, Cs)
            T.copy(Cs, C[by * bm, bx * bn])

    return main


@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(130, 136, 64, 128, 128, 256), (72, 72, 32, 64, 64, 128), (64, 80, 64, 64, 80, 128),
                                   (192, 96, 32, 192, 96, 384)])
@pytest.mark.parametrize("stages", [1, 2])
def test_results_by_way_of_shared_memory(shape, out, stages):
    m, n, k, *_ = shape
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    program = lowered(in_two_steps(*shape, out=out, stages=stages))
    launch = program.kernels[0].launch
    assert "tma_store" in ops(launch) and not plain_stores(launch)
    assert ("stmatrix" in ops(launch)) == (out != "float32")
    got = run_device(program, {"A": a, "B": b, "C": np.zeros((m, n), NP[out])}).outputs["C"].astype(np.float64)
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(got - want).max() <= (EPS[out] + k * 2.0**-22) * np.abs(want).max()


def batched(rank, dtype="float16"):
    """Tiles of the dimensions 1 and last of a tensor of this rank, through shared memory."""
    shape = {2: (70, 72), 3: (2, 70, 72), 4: (2, 70, 3, 72), 5: (2, 70, 2, 3, 72)}[rank]

    @T.prim_func
    def main(A: T.Tensor(shape, dtype), B: T.Tensor(shape, dtype)):
        with T.Kernel(2, 2, int(np.prod(shape)) // (70 * 72), threads=128) as (bx, by, bz):
            S = T.alloc_shared((64, 64), dtype)
            if rank == 2:
                T.copy(A[by * 64, bx * 64], S)
                T.copy(S, B[by * 64, bx * 64])
            elif rank == 3:
                T.copy(A[bz, by * 64:(by + 1) * 64, bx * 64:(bx + 1) * 64], S)
                T.copy(S, B[bz, by * 64:(by + 1) * 64, bx * 64:(bx + 1) * 64])
            elif rank == 4:
                T.copy(A[bz // 3, by * 64:(by + 1) * 64, bz % 3, bx * 64:(bx + 1) * 64], S)
                T.copy(S, B[bz // 3, by * 64:(by + 1) * 64, bz % 3, bx * 64:(bx + 1) * 64])
            else:
                T.copy(A[bz // 6, by * 64:(by + 1) * 64, bz // 3 % 2, bz % 3, bx * 64:(bx + 1) * 64], S)
                T.copy(S, B[bz // 6, by * 64:(by + 1) * 64, bz // 3 % 2, bz % 3, bx * 64:(bx + 1) * 64])

    return main, shape


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_tensors_of_many_dimensions(rank, dtype):
    program, shape = batched(rank, dtype)
    done = lowered(program)
    found = ops(done.kernels[0].launch)
    if dtype == "int8":  # rows of 72 bytes
        assert "tma_store" not in found and "multiple of 16" in report(done.kernels[0].launch)
    else:
        assert {"tma_load", "tma_store"} <= set(found) and not plain_stores(done.kernels[0].launch)
    a = np.random.default_rng(4).integers(-100, 100, shape).astype(NP[dtype])
    assert np.array_equal(run_device(done, {"A": a, "B": np.zeros_like(a)}).outputs["B"], a)


def moved_in_a_loop(other=False, over=False):
    """other: another tile takes the place of the first behind the loop.  over: each tile goes to the same place."""

    @T.prim_func
    def main(A: T.Tensor((64, 512), "float16"), B: T.Tensor((64, 512), "float16"), C: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            for t in range(8):
                T.copy(A[0, t * 64], S)
                for i, j in T.Parallel(64, 64):
                    S[i, j] = S[i, j] + T.float16(1)
                if over:
                    T.copy(S, B[0, 0])
                else:
                    T.copy(S, B[0, t * 64])
            if other:
                U = T.alloc_shared((64, 64), "float16")
                T.copy(A[0, 0], U)
                for i, j in T.Parallel(64, 64):
                    C[i, j] = U[j, i]

    return main


@pytest.mark.parametrize("other, over", [(False, False), (True, False), (False, True)])
def test_a_store_in_a_loop_is_awaited_where_it_is(other, over):
    program = moved_in_a_loop(other, over)
    done = lowered(program)
    a = np.random.default_rng(5).integers(-100, 100, (64, 512)).astype(np.float16)
    got = run_device(done, {"A": a, "B": np.zeros_like(a), "C": np.zeros((64, 64), np.float16)}).outputs
    if over:
        assert np.array_equal(got["B"][:, :64], a[:, 448:] + 1)
    else:
        assert np.array_equal(got["B"], a + 1)
    if other:
        assert np.array_equal(got["C"], a[:, :64].T)
    loop = next(x for x in walk(done.kernels[0].launch) if isinstance(x, For) and "tma_store" in ops(x.body))
    order = [op for op in ops(loop.body) if op in ("bulk_wait", "tma_store", "tma_load")]
    assert order == ["tma_load", "tma_store", "bulk_wait"]


def test_several_tiles_of_one_tensor():
    @T.prim_func
    def main(A: T.Tensor((64, 128), "float16"), B: T.Tensor((64, 128), "float16")):
        with T.Kernel(1, threads=128):
            S, U = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            T.copy(A[0, 0], S)
            T.copy(A[0, 64], U)
            T.copy(S, B[0, 64])
            T.copy(U, B[0, 0])

    launch = launch_of(main)
    assert ops(launch).count("tma_store") == 2 and ops(launch).count("mbarrier_wait") == 1  # loads side by side
    a = np.random.default_rng(6).integers(-100, 100, (64, 128)).astype(np.float16)
    got = run_device(lowered(main), {"A": a, "B": np.zeros_like(a)}).outputs["B"]
    assert np.array_equal(got, np.concatenate([a[:, 64:], a[:, :64]], 1))


# ---- loads ------------------------------------------------------------------------------------------------------------


def loads(kind):
    @T.prim_func
    def main(A: T.Tensor((96, 80), "float32"), B: T.Tensor((96, 80), "float32"), n: T.int32):
        with T.Kernel(2, threads=128) as bx:
            S = T.alloc_shared((32, 64), "float32")
            if kind == "once":
                T.copy(A[bx * 64, 16], S)
                for i, j in T.Parallel(32, 64):
                    B[bx * 64 + i, 16 + j] = S[i, j] * 2.0
            elif kind == "loop":
                for t in range(n):
                    T.copy(A[t * 32, bx * 64], S)
                    for i, j in T.Parallel(32, 64):
                        B[t * 32 + i, bx * 64 + j] = S[i, j] * 2.0
            else:
                for t in range(n):
                    if t % 2 == 1:
                        for u in range(2):
                            T.copy(A[t * 32, bx * 64], S)
                            for i, j in T.Parallel(32, 64):
                                B[t * 32 + i, bx * 64 + j] = S[i, j] + u

    return main


@pytest.mark.parametrize("kind", ["once", "loop", "nested"])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_loads(kind, n):
    program = lowered(loads(kind))
    launch = program.kernels[0].launch
    assert "tma_load" in ops(launch) and "cp_async" not in ops(launch)
    a = np.random.default_rng(7).standard_normal((96, 80)).astype(np.float32)
    args = {"A": a, "B": np.zeros_like(a), "n": n}
    got = run_device(program, args).outputs["B"]
    assert np.array_equal(got, run_tile(loads(kind), args)["B"])


def test_waiting_for_a_load_needs_no_block_barrier_behind_it():
    launch = launch_of(loads("once"))
    calls = [x.call.op for x in walk(launch) if isinstance(x, Evaluate)]
    assert "sync_threads" not in calls[calls.index("mbarrier_wait"):]


def test_what_was_written_is_fenced_before_tma_writes_over_it():
    @T.prim_func
    def main(A: T.Tensor((128, 64), "float32"), B: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((32, 64), "float32")
            for t in range(4):
                T.copy(A[t * 32, 0], S)
                for i, j in T.Parallel(32, 64):
                    S[i, j] = S[i, j] + 1.0
                for i, j in T.Parallel(32, 64):
                    B[t * 32 + i, j] = S[31 - i, j]

    loop = next(x for x in walk(launch_of(main)) if isinstance(x, For) and "tma_load" in ops(x.body))
    calls = [x.call.op for x in walk(loop) if isinstance(x, Evaluate)]
    assert all(calls[k - 1] == "fence_proxy_async" for k, op in enumerate(calls) if op == "sync_threads")
    assert "fence_proxy_async" not in ops(launch_of(loads("once")))


def test_what_was_read_is_fenced_before_tma_writes_over_it():
    """A block barrier waits for loads under way no more than an arrival at an mbarrier does: ptxas puts BAR.SYNC before the
    arrival of what was loaded."""
    launch = launch_of(loads("loop"))
    loop = next(x for x in walk(launch) if isinstance(x, For) and "tma_load" in ops(x.body))
    calls = [x.call.op for x in walk(loop) if isinstance(x, Evaluate)]
    assert "sync_threads" in calls
    assert all(calls[k - 1] == "fence_proxy_async" for k, op in enumerate(calls) if op == "sync_threads")


def test_the_tile_meaning_is_kept():
    """The pass alone: what it makes runs on the tile interpreter too."""
    for program, args in ((loads("loop"), {"n": 3}), (moved_in_a_loop(), {})):
        func = tma_copies(program.func, PassContext(SM90A, ON))
        assert func is not program.func and tma_copies(program.func, PassContext(SM90A, OFF)) is program.func
        shapes = {b.name: tuple(b.shape) for _, b in program.func.buffers}
        rng = np.random.default_rng(8)
        given = {**{k: rng.integers(0, 50, s).astype(np.float32 if "n" in args else np.float16)
                    for k, s in shapes.items()}, **args}
        want, got = run_tile(program, given), run_tile(func, given)
        assert all(np.array_equal(want[k], got[k]) for k in want)


def rows(n=2048, aligned=True, dtype="float32"):
    """Contiguous runs."""

    @T.prim_func
    def main(A: T.Tensor((6, 4096), dtype), B: T.Tensor((6 * 4096,), dtype)):
        with T.Kernel(2, threads=128) as bx:
            S = T.alloc_shared((n,), dtype)
            for t in range(6):
                T.copy(A[t, bx * n + (0 if aligned else 1)], S)
                for i in T.Parallel(n):
                    S[i] = S[i] + T.cast(1, dtype)
                T.copy(S, B[t * 4096 + bx * n])

    return main


@pytest.mark.parametrize("n, aligned, dtype, bulk", [(2048, True, "float32", True), (2000, True, "float16", True),
                                                     (1998, True, "float16", False), (1024, False, "float32", False),
                                                     (1021, True, "float32", False)])
def test_contiguous_runs(n, aligned, dtype, bulk):
    program = lowered(rows(n, aligned, dtype))
    found = set(ops(program.kernels[0].launch))
    assert {"bulk_load", "bulk_store"} <= found if bulk else "bulk_load" not in found
    assert bulk or any(w in report(program.kernels[0].launch) for w in ("multiple of 16", "leave", "bytes"))
    a = np.random.default_rng(10).integers(-50, 50, (6, 4096)).astype(NP[dtype])
    args = {"A": a, "B": np.zeros(6 * 4096, NP[dtype])}
    got = run_device(program, args).outputs["B"]
    assert np.array_equal(got, run_tile(rows(n, aligned, dtype), args)["B"])


def runs_at_the_edge(shape, n=1024, dtype="float32", hint=None):
    """Runs of n elements along the last dimension, the last of which leaves the tensor."""
    *lead, columns = shape

    @T.prim_func
    def main(A: T.Tensor(shape, dtype), B: T.Tensor(shape, dtype)):
        with T.Kernel(-(-shape[-1] // n), int(np.prod(lead)) + 1, threads=128) as (bx, row):
            S = T.alloc_shared((n,), dtype)
            if len(shape) == 1:
                T.copy(A[bx * n], S, eviction_policy=hint)
            elif len(shape) == 2:
                T.copy(A[row, bx * n:(bx + 1) * n], S)
            else:
                T.copy(A[row // lead[1], row % lead[1], bx * n:(bx + 1) * n], S)
            for i in T.Parallel(n):
                S[i] = S[i] + T.cast(1, dtype)
            if len(shape) == 1:
                if row == 0:
                    T.copy(S, B[bx * n])
            elif len(shape) == 2:
                T.copy(S, B[row, bx * n:(bx + 1) * n])
            else:
                T.copy(S, B[row // lead[1], row % lead[1], bx * n:(bx + 1) * n])

    return main


@pytest.mark.parametrize("shape, n, dtype, box", [((4001,), 1024, "float32", (256,)), ((5, 1504), 1024, "float16", (256, 1)),
                                                  ((2, 3, 1100), 512, "float32", (256, 1, 1)),
                                                  ((5000,), 2304, "int8", (256,)), ((700,), 600, "float32", (200,))])
def test_runs_that_leave_the_tensor_are_boxes_of_a_row(shape, n, dtype, box):
    """Tensor maps of one dimension and more: what lies outside reads as zero and is not written."""
    program = runs_at_the_edge(shape, n, dtype)
    done = lowered(program)
    launch = done.kernels[0].launch
    if box[0] == 200:  # 800 bytes are no multiple of 128: no box may start there
        assert "no parts of whole 128 bytes" in report(launch) and "tma_load" not in ops(launch)
    else:
        assert {"tma_load", "tma_store"} <= set(ops(launch)) and not plain_stores(launch)
        assert {m[2] for m in launch.plan.tensor_maps} == {box} and ops(launch).count("tma_load") == n // 256
    a = np.random.default_rng(11).integers(-100, 100, shape).astype(NP[dtype])
    assert np.array_equal(run_device(done, {"A": a, "B": np.zeros_like(a)}).outputs["B"], a + 1)


def test_a_row_of_unknown_stride_needs_it_aligned():
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((m, n), "float32"), B: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 512), m, threads=128) as (bx, row):
            S = T.alloc_shared((512,), "float32")
            T.copy(A[row, bx * 512:(bx + 1) * 512], S)
            T.copy(S, B[row, bx * 512:(bx + 1) * 512])

    assert "tma_load" not in ops(launch_of(main))
    assert {"tma_load", "tma_store"} <= set(ops(launch_of(main, assume_aligned_strides=True)))
    a = np.random.default_rng(12).standard_normal((3, 520)).astype(np.float32)
    got = run_device(lowered(main, assume_aligned_strides=True), {"A": a, "B": np.zeros_like(a)}).outputs["B"]
    assert np.array_equal(got, a)


def test_hints_go_with_boxes_of_a_row():
    calls = [x for x in walk(launch_of(runs_at_the_edge((4001,), hint="evict_first"))) if isinstance(x, Call)]
    assert {x.options.cache_hint for x in calls if x.op == "tma_load"} == {"evict_first"}


def test_small_tiles_say_why_threads_copy_them():
    assert "`S` is loaded by all threads: threads are as quick with 1024 bytes" in launch_of(rows(256)).plan.report


def test_hints_promotion_and_prefetch():
    @T.prim_func
    def main(A: T.Tensor((64, 128), "float16"), B: T.Tensor((64, 128), "float16")):
        with T.Kernel(1, threads=128):
            S, U = T.alloc_shared((64, 128), "float16"), T.alloc_shared((64, 32), "float16")
            T.copy(A, S, eviction_policy="evict_first")
            T.copy(A[0, 0], U, eviction_policy="evict_normal")
            T.copy(S, B, eviction_policy="evict_last")

    launch = launch_of(main)
    calls = [x for x in walk(launch) if isinstance(x, Call) and x.op.startswith("tma_")]
    assert {x.options.cache_hint for x in calls if x.op == "tma_store"} == {"evict_last"}
    assert [x.options.cache_hint for x in calls if x.op == "tma_load"] == ["evict_first", "evict_first", None]
    promotion = {m[0]: m[5] for m in launch.plan.tensor_maps}
    assert sorted(promotion.values()) == [64, 256, 256]
    assert {x.options.map for x in calls if x.op == "tma_prefetch"} == set(promotion)
    first = next(x for x in walk(launch) if isinstance(x, Evaluate))
    assert first.call.op == "tma_prefetch"


def narrow_rows(by_hand):
    @T.prim_func
    def main(A: T.Tensor((64, 8, 96), "float8_e4m3fn"), B: T.Tensor((64, 8, 128), "float8_e4m3fn")):
        with T.Kernel(8, threads=128) as h:
            S = T.alloc_shared((64, 128), "float8_e4m3fn")
            if by_hand:
                bar = T.alloc_barrier(128)
                T.tma_copy(A[:, h, 0:128], S, barrier=bar[0])
                T.mbarrier_arrive(bar[0])
                T.mbarrier_wait_parity(bar[0], 0)
            else:
                T.copy(A[:, h, 0:128], S)
            T.copy(S, B[:, h, :])

    return main


@pytest.mark.parametrize("by_hand, promotion", [(True, 64), (False, 128)])
def test_l2_fetches_nothing_behind_narrow_rows_that_are_copied_by_hand(by_hand, promotion):
    assert {m[1].name: m[5] for m in launch_of(narrow_rows(by_hand)).plan.tensor_maps}["A"] == promotion


def written_too():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            T.copy(A, S)
            for i, j in T.Parallel(64, 64):
                A[i, j] = S[63 - i, j]

    return main


def turned(by="loop"):
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S, U = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64, 64), "float32")
            T.copy(A, S)
            if by == "loop":
                for i, j in T.Parallel(64, 64):
                    U[i, j] = S[j, i]
            else:
                T.transpose(S, U)
            T.copy(U, B)

    return main


def other_safe_value():
    @T.prim_func
    def main(A: T.Tensor((60, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            T.annotate_safe_value({A: 1.0})
            T.copy(A[0:64, 0:64], S)
            T.copy(S, B, disable_tma=True)

    return main


def converts():
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((64, 64), "float16")
            T.copy(A, S)
            T.copy(S, B)

    return main


def placed_by_the_kernel(product=False):
    @T.prim_func
    def main(P: T.Tensor((2,), "int64"), C: T.Tensor((128, 64), "float16")):
        with T.Kernel(2, threads=128) as bx:
            A = T.make_tensor_from_addr(P[0], (128, 64), "float16")
            S = T.alloc_shared((64, 64), "float16")
            if product:
                F = T.alloc_fragment((64, 64), "float32")
                T.clear(F)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[k * 64, 0], S)
                    T.gemm(S, S, F)
                T.copy(F, A[bx * 64, 0])
            else:
                T.copy(A[bx * 64, 0], S)
                T.copy(S, C[bx * 64, 0], disable_tma=True)

    return main


@pytest.mark.parametrize("program, why", [
    (placed_by_the_kernel, "known in the kernel only"), (lambda: placed_by_the_kernel(True), "known in the kernel only"),
    (written_too, "written by the kernel"), (other_safe_value, "outside `A` reads as"), (other_safe_value, "another way"),
    (converts, "converts"), (turned, "across its rows"), (lambda: turned("transpose"), "across its rows")])
def test_declined_copies_say_why(program, why):
    launch = launch_of(program())
    assert "tma_load" not in ops(launch) and why in report(launch)
    assert "tma_store" not in ops(launch) or program is turned


def test_declined_copies_compute():
    x = np.arange(4096, dtype=np.float32).reshape(64, 64)
    for by in ("loop", "transpose"):
        assert np.array_equal(run_device(lowered(turned(by)), {"A": x, "B": np.zeros_like(x)}).outputs["B"], x.T)
    a = np.random.default_rng(9).integers(-5, 5, (64, 64)).astype(np.float16)
    assert np.array_equal(run_device(lowered(written_too()), {"A": a}).outputs["A"], a[::-1])
    got = run_device(lowered(other_safe_value()), {"A": a[:60], "B": np.zeros_like(a)}).outputs["B"]
    assert np.array_equal(got[:60], a[:60]) and (got[60:] == 1).all()


# ---- planted faults ---------------------------------------------------------------------------------------------------


def without(program, name, nth=None):
    """The program less its calls of this name (or the nth of them)."""
    seen = []

    def visit(x):
        if isinstance(x, Evaluate) and x.call.op == name:
            seen.append(x)
            if nth is None or len(seen) - 1 == nth:
                return Seq(())
        if isinstance(x, Stmt):
            return rebuild(x, visit)
        return tuple(map(visit, x)) if isinstance(x, tuple) else x

    out = replace(program.host, body=visit(program.host.body))
    assert seen
    return out


@pytest.mark.parametrize("name, kind", [("mbarrier_wait", "sim-"), ("bulk_wait", "sim-"), ("sync_threads", "sim-"),
                                        ("fence_proxy_async", "sim-proxy"), ("mbarrier_init", "sim-mbarrier"),
                                        ("mbarrier_arrive_expect_tx", "sim-")])
def test_faults_are_found(name, kind):
    a = np.zeros((64, 512), np.float16)
    with pytest.raises(TileLangError) as e:
        run_device(without(lowered(moved_in_a_loop()), name), {"A": a, "B": a, "C": a[:, :64]})
    assert e.value.kind.startswith(kind)


def test_boxes_of_one_load_had_a_barrier_between_them():
    """No barrier waits for a load: the wait at the mbarrier does, for all boxes."""
    @T.prim_func
    def main(A: T.Tensor((128, 128), "float16"), C: T.Tensor((128, 128), "float16")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((128, 128), "float16")
            T.copy(A, a)
            T.copy(a, C)

    called = ops(launch_of(main))
    first, last = called.index("tma_load"), len(called) - 1 - called[::-1].index("tma_load")
    assert first < last and "sync_threads" not in called[first:last]
    rng = np.random.default_rng(0)
    a = rng.standard_normal((128, 128)).astype(np.float16)
    np.testing.assert_array_equal(run_device(lowered(main), {"A": a, "C": np.zeros_like(a)}).outputs["C"], a)


def test_a_copy_did_not_wait_for_the_thread_that_had_waited_for_the_one_before():
    """Both count at entries of one array; the verifier does not follow the program (a condition read from shared memory)."""
    @T.prim_func
    def main(A: T.Tensor((2, 32, 64), "float16"), N: T.Tensor((1,), "int32"), C: T.Tensor((32, 64), "float16")):
        with T.Kernel(1, threads=128):
            a, some = T.alloc_shared((32, 64), "float16"), T.alloc_shared((1,), "int32")
            loaded, p = T.alloc_barrier([1] * 2), T.alloc_var("int32", init=0)
            t = T.get_thread_binding()
            if t == 0:
                some[0] = T.atomic_add(N[0], 1, return_prev=True)
            if some[0] == 0 and t == 0:
                T.tma_copy(A[0, 0:32, 0:64], a, barrier=loaded[p], leader_scope_threads=32)
                T.mbarrier_arrive(loaded[p])
            if t == 0:
                T.mbarrier_wait_parity(loaded[p], 0)
            p = 1
            if t == 64:
                T.tma_copy(A[1, 0:32, 0:64], a, barrier=loaded[p], leader_scope_threads=32)
                T.mbarrier_arrive(loaded[p])
            T.mbarrier_wait_parity(loaded[p], 0)
            T.copy(a, C)

    x = np.arange(2 * 32 * 64).reshape(2, 32, 64).astype(np.float16)
    given = {"A": x, "N": np.zeros(1, np.int32), "C": np.zeros_like(x[0])}
    np.testing.assert_array_equal(run_device(lowered(main), given).outputs["C"], x[1])


# ---- what ptxas makes of it -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("program", [lambda: in_two_steps(4096, 4096, 4096, 128, 128, 256), lambda: batched(5)[0],
                                     moved_in_a_loop, lambda: loads("nested"), rows, lambda: runs_at_the_edge((4001,))])
def test_assembles(program):
    (kernel,) = lowered(program()).kernels
    cubin = nvrtc.compile_cubin(print_kernel(kernel), "sm_90a")
    assert cubin.spills == 0 and "C75" not in cubin.log, cubin.log
    assert any(isinstance(x, If) for x in walk(kernel.launch))


def behind_a_loop(back):
    """A tile stored in each of `bx` iterations, and one behind them, `back` tiles before the end."""
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float16"), B: T.Tensor((256, 64), "float16")):
        with T.Kernel(4, threads=128) as bx:
            As, C = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, As)
            T.gemm(As, As, C, clear_accum=True)
            for n in T.serial(1, bx + 1):
                T.copy(C, B[(n - 1) * 64:n * 64, :])
            T.copy(C, B[(bx - back) * 64:(bx - back + 1) * 64, :])

    return main


def test_a_tile_behind_a_loop_of_any_length_is_none_of_its_tiles():
    apart, meeting = (lowered(behind_a_loop(back)).kernels[0].launch for back in (0, 1))
    assert ops(apart).count("tma_store") == 2 and "two copies" not in report(apart)
    assert "tma_store" not in ops(meeting) and "two copies may write the same elements of `B`" in report(meeting)
