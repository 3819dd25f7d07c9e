"""Warp and thread primitives (section 15): shuffles, votes, barriers and thread numbers, against NumPy."""

import re

import numpy as np
import pytest
from everywhere import EXECUTIONS, SM90A, WITH_HOPPER, cuda_text, everywhere, run

import tilelang
import tilelang.language as T
from tilelang.errors import TileLangError

N = 64
LANE, WARP = np.arange(N) % 32, np.arange(N) // 32
RNG = np.random.default_rng(0)


def warps(x):
    return x.reshape(2, 32)


@pytest.mark.spec("T.tvm_warp_shuffle")
@pytest.mark.spec("L15:shuffles")
@pytest.mark.parametrize("dtype", ["int32", "float32", "float16", "int64"])
def test_shuffles(dtype):
    @T.prim_func
    def f(X: T.Tensor((N,), dtype), L: T.Tensor((N,), "int32"), Y: T.Tensor((7, N), dtype)):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.shfl_sync(X[i], L[i])
            Y[1, i] = T.shfl_xor(X[i], 5)
            Y[2, i] = T.shfl_up(X[i], 3)
            Y[3, i] = T.shfl_down(X[i], 7)
            Y[4, i] = T.tvm_warp_shuffle(-1, X[i], 9, 32, 32)
            Y[5, i] = T.tvm_warp_shuffle_up(-1, X[i], 1, 32, 32)
            Y[6, i] = T.tvm_warp_shuffle_down(-1, X[i], 1, 32, 32)

    x, lane = RNG.integers(-99, 99, N).astype(dtype), RNG.integers(0, 32, N).astype(np.int32)
    y = everywhere(f, x, lane)[2]
    base = WARP * 32

    def up(d):
        return np.where(LANE >= d, LANE - d, LANE)

    def down(d):
        return np.where(LANE + d < 32, LANE + d, LANE)

    for got, source in zip(y, [lane, LANE ^ 5, up(3), down(7), np.full(N, 9), up(1), down(1)]):
        assert np.array_equal(got, x[base + source])
    text = cuda_text(f)
    assert "__shfl_sync" in text and "__shfl_xor_sync" in text and "__shfl_up_sync" in text


@pytest.mark.spec("T.shfl_sync")
@pytest.mark.spec("L15:shuffles")
def test_shuffles_in_segments():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((4, N), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.shfl_sync(X[i], 2, width=8)
            Y[1, i] = T.shfl_xor(X[i], 1, 8)
            Y[2, i] = T.shfl_up(X[i], 2, width=8)
            Y[3, i] = T.shfl_down(X[i], 3, width=8)

    x = RNG.integers(-99, 99, N).astype(np.int32)
    t, in8 = np.arange(N), np.arange(N) % 8
    want = [x[t - in8 + 2], x[t ^ 1], x[np.where(in8 >= 2, t - 2, t)], x[np.where(in8 + 3 < 8, t + 3, t)]]
    assert np.array_equal(everywhere(f, x)[1], np.stack(want))


@pytest.mark.spec("T.activemask")
@pytest.mark.spec("L15:warp-votes")
def test_votes_of_a_warp():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), V: T.Tensor((2, N), "int32"), B: T.Tensor((4, N), "uint64")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            V[0, i] = T.any_sync(X[i] > 90)
            V[1, i] = T.all_sync(X[i])
            B[0, i] = T.ballot_sync(X[i] > 0)
            B[1, i] = T.ballot(X[i] > 10)
            B[2, i] = T.activemask()
            B[3, i] = T.tvm_warp_activemask()

    for x in (RNG.integers(-99, 99, N), np.full(N, 91), np.zeros(N), np.arange(N)):
        x = x.astype(np.int32)
        _, v, b = everywhere(f, x)
        bits = np.uint64(1) << LANE.astype(np.uint64)

        def mask(p, bits=bits):
            return np.repeat([int(sum(m)) for m in warps(np.where(p, bits, np.uint64(0)))], 32).astype(np.uint64)

        assert np.array_equal(v[0], np.repeat(warps(x > 90).any(1), 32))
        assert np.array_equal(v[1], np.repeat(warps(x != 0).all(1), 32))
        assert np.array_equal(b, np.stack([mask(x > 0), mask(x > 10), *[np.full(N, 2**32 - 1, np.uint64)] * 2]))
    text = cuda_text(f)
    assert not [n for n in ("any_sync", "all_sync", "ballot_sync", "__activemask()") if n not in text]


@pytest.mark.spec("T.all_sync", "T.any_sync", "T.ballot", "T.ballot_sync")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_votes_where_the_execution_has_warps(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), V: T.Tensor((2, N), "int32"), B: T.Tensor((2, N), "uint64")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            V[0, i] = T.any_sync(X[i] > 90)
            V[1, i] = T.all_sync(X[i])
            B[0, i] = T.ballot_sync(X[i] > 0)
            B[1, i] = T.ballot(X[i] > 10)

    x = RNG.integers(-99, 99, N).astype(np.int32)
    _, v, b = run(f, x, on=on)
    assert np.array_equal(v, np.stack([np.repeat(warps(p).any(1) if k == 0 else warps(p).all(1), 32)
                                       for k, p in enumerate((x > 90, x != 0))]))
    for row, p in zip(b, (x > 0, x > 10)):
        assert row.tolist() == np.repeat([sum(1 << k for k in range(32) if q[k]) for q in warps(p)], 32).tolist()


@pytest.mark.spec("T.match_all_sync", "T.match_any_sync")
@pytest.mark.spec("L15:warp-votes")
def test_matches_of_a_warp():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((2, N), "uint32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.match_any_sync(X[i])
            Y[1, i] = T.match_all_sync(X[i])

    x = RNG.integers(0, 4, N).astype(np.int32)
    x[32:] = 7
    y = everywhere(f, x)[1]
    same = [[sum(1 << k for k in range(32) if w[k] == v) for v in w] for w in warps(x)]
    assert y[0].tolist() == sum(same, [])
    assert y[1].tolist() == [0] * 32 + [2**32 - 1] * 32
    assert "match_all_sync" in cuda_text(f)


@pytest.mark.spec("T.syncthreads_and", "T.syncthreads_count", "T.syncthreads_or")
@pytest.mark.spec("L15:block-votes")
def test_votes_of_a_block():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((3, N), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.syncthreads_count(X[i] > 0)
            Y[1, i] = T.syncthreads_and(X[i])
            Y[2, i] = T.syncthreads_or(X[i] > 98)

    for x in (RNG.integers(-99, 99, N), np.ones(N), np.zeros(N)):
        x = x.astype(np.int32)
        y = everywhere(f, x, on=["simulator"])[1]
        assert np.array_equal(y[0], np.full(N, (x > 0).sum()))
        assert np.array_equal(y[1] != 0, np.full(N, (x != 0).all()))
        assert np.array_equal(y[2] != 0, np.full(N, (x > 98).any()))
    assert "__syncthreads_or(" in cuda_text(f)


@pytest.mark.spec("L15:block-votes")
def test_votes_refuse_floats():
    def program(vote):
        @T.prim_func
        def f(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "int32")):
            with T.Kernel(1, threads=N):
                Y[0] = vote(X[0])

    for vote in (T.any_sync, T.all_sync, T.ballot_sync, T.ballot, T.syncthreads_count, T.syncthreads_and,
                 T.syncthreads_or):
        with pytest.raises(TypeError, match="requires an integer or boolean predicate"):
            program(vote)


@pytest.mark.spec("T.get_lane_idx", "T.get_warp_group_idx", "T.get_warp_idx", "T.get_warp_idx_sync")
@pytest.mark.spec("L15:indices")
def test_numbers_of_a_thread():
    @T.prim_func
    def f(Y: T.Tensor((6, 256), "int32")):
        with T.Kernel(1, threads=(8, 16, 2)):
            x, y, z = T.get_thread_bindings()
            t = x + y * 8 + z * 128
            Y[0, t] = T.get_lane_idx()
            Y[1, t] = T.get_warp_idx()
            Y[2, t] = T.get_warp_idx_sync()
            Y[3, t] = T.get_warp_group_idx()
            Y[4, t] = T.get_warp_idx(16)
            Y[5, t] = T.get_warp_group_idx(16, 2)

    t = np.arange(256)
    want = [t % 32, t // 32, t // 32, t // 128, t // 16, t // 32]
    assert np.array_equal(everywhere(f)[0], np.stack(want))


@pytest.mark.spec("L15:indices")
def test_numbers_of_a_thread_refuse_bad_sizes():
    def traced(build):
        @T.prim_func
        def f(Y: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=N):
                Y[0] = build()

    with pytest.raises(ValueError, match="warp_size"):
        traced(lambda: T.get_warp_group_idx(warps_per_group=2))
    for build in (lambda: T.get_lane_idx(32.0), lambda: T.get_warp_idx("32"), lambda: T.get_warp_idx_sync(1.5)):
        with pytest.raises(TypeError, match="must be an integer"):
            traced(build)


@pytest.mark.spec("T.tvm_storage_sync")
@pytest.mark.spec("L15:sync_threads")
@pytest.mark.parametrize("on", EXECUTIONS)
@pytest.mark.parametrize("barrier", [lambda: T.sync_threads(), lambda: T.tvm_storage_sync("shared"),
                                     lambda: T.sync_threads(1, 64)], ids=["sync", "storage", "named"])
def test_barriers_of_a_block(barrier, on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            S = T.alloc_shared((N,), "int32")
            S[i] = X[i]
            barrier()
            Y[i] = S[N - 1 - i]

    x = np.arange(N, dtype=np.int32)
    assert np.array_equal(run(f, x, on=on)[1], x[::-1])


@pytest.mark.spec("T.sync_warp")
@pytest.mark.spec("L15:sync_warp")
def test_barriers_of_a_warp():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            S = T.alloc_shared((N,), "int32")
            S[i] = X[i]
            T.sync_warp()
            T.tvm_storage_sync("warp")
            T.sync_warp(0xFFFFFFFF)
            Y[i] = S[i // 32 * 32 + 31 - i % 32]

    x = np.arange(N, dtype=np.int32)
    assert np.array_equal(everywhere(f, x)[1], warps(x)[:, ::-1].ravel())
    assert "__syncwarp(" in cuda_text(f)


@pytest.mark.spec("L15:raw-forms")
def test_storage_sync_refuses_other_scopes():
    with pytest.raises(TileLangError) as e:
        @T.prim_func
        def f(Y: T.Tensor((1,), "int32")):
            with T.Kernel(1, threads=N):
                T.tvm_storage_sync("registers")
    assert e.value.kind == "alloc-scope"


@pytest.mark.spec("T.named_barrier_arrive")
@pytest.mark.spec("L15:named_barrier_arrive")
def test_arriving_at_a_named_barrier_without_waiting():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            S = T.alloc_shared((32,), "int32")
            if i < 32:
                S[i] = X[i] * 2
                T.named_barrier_arrive(3, 64)
            else:
                T.sync_threads(3, 64)
                Y[i - 32] = S[63 - i]

    x = np.arange(N, dtype=np.int32)
    text = cuda_text(f)
    assert "tl::named_barrier_arrive(3, 64)" in text and "tl::named_barrier(3, 64)" in text
    for on in EXECUTIONS:
        assert np.array_equal(run(f, x, on=on)[1], 2 * x[:32][::-1])


def exchanged(barrier, grid=(4,), threads=40, skip=-1):
    """Blocks hand a value to their successor twice, through global memory."""
    blocks = int(np.prod(grid))

    @T.prim_func
    def f(X: T.Tensor((blocks, threads), "int32"), Y: T.Tensor((blocks, threads), "int32")):
        with T.Kernel(*grid, threads=threads):
            at = T.get_block_binding(0) if len(grid) == 1 else T.get_block_binding(1) * grid[0] + T.get_block_binding(0)
            t = T.get_thread_binding()
            X[at, t] = at * 100 + t
            v = T.alloc_var("int32")
            if at != skip:
                for _ in T.serial(2):
                    barrier()
                    v = X[(at + 1) % blocks, threads - 1 - t]
                    barrier()
                    X[at, t] = v
            Y[at, t] = v

    return f


@pytest.mark.spec("T.sync_grid", "T.sync_global", "L15:sync_grid", "L15:sync_global")
@pytest.mark.parametrize("barrier", (T.sync_grid, T.sync_global))
@pytest.mark.parametrize("on", ("tile", "simulator", "cpu"))
@pytest.mark.parametrize("grid,threads", [((4,), 40), ((1,), 64), ((3, 2), 128)])
def test_blocks_wait_for_each_other_at_a_grid_barrier(grid, threads, on, barrier):
    blocks = int(np.prod(grid))
    x = np.arange(blocks)[:, None] * 100 + np.arange(threads)
    for _ in range(2):
        x = np.roll(x, -1, 0)[:, ::-1]
    assert np.array_equal(run(exchanged(barrier, grid, threads), on=on)[1], x)
    assert "tl::sync_grid(grid_barrier_);" in cuda_text(exchanged(barrier, grid, threads))


@pytest.mark.spec("L15:sync_grid")
@pytest.mark.parametrize("on", ("tile", "simulator"))
def test_a_block_that_leaves_a_grid_barrier_out_is_found(on):
    with pytest.raises(TileLangError, match="without coming to this barrier") as e:
        run(exchanged(T.sync_grid, skip=2), on=on, simulated=True)
    assert e.value.kind == "sim-barrier"


@pytest.mark.spec("L15:sync_grid")
def test_blocks_without_a_grid_barrier_race():
    with pytest.raises(TileLangError) as e:
        run(exchanged(T.sync_threads), on="simulator", simulated=True)
    assert e.value.kind == "sim-race"


@pytest.mark.spec("L15:sync_grid")
def test_a_block_that_leaves_a_grid_barrier_out_makes_the_call_fail_on_the_cpu():
    with pytest.raises(RuntimeError, match="wait for each other for ever"):
        run(exchanged(T.sync_grid, skip=2), on="cpu")


@pytest.mark.spec("T.annotate_consumer_reg_alloc", "T.annotate_producer_reg_dealloc",
                  "T.disable_warp_group_reg_alloc", "T.no_set_max_nreg", "T.pdl_trigger")
@pytest.mark.spec("L15:register-hints")
def test_register_hints_do_not_change_results():
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(240)
            T.no_set_max_nreg()
            T.disable_warp_group_reg_alloc()
            T.pdl_trigger()
            i = T.get_thread_binding()
            if T.tvm_thread_invariant(X[0] >= 0):
                Y[i] = X[i] + 1

    x = np.arange(N, dtype=np.int32)
    assert np.array_equal(everywhere(f, x)[1], x + 1)


@pytest.mark.spec("T.pdl_sync", "T.pdl_trigger", "L17:pdl")
@pytest.mark.parametrize("on", WITH_HOPPER)
def test_a_launch_that_waits_for_the_one_before_sees_what_it_stored(on):
    @T.prim_func
    def f(X: T.Tensor((256,), "int32"), H: T.Tensor((256,), "int32"), Y: T.Tensor((256,), "int32")):
        with T.Kernel(4, threads=64) as b:
            T.no_set_max_nreg()
            for i in T.Parallel(64):
                H[b * 64 + i] = X[b * 64 + i] * 3
            T.pdl_trigger()
        with T.Kernel(4, threads=64) as b:
            T.pdl_sync()
            for i in T.Parallel(64):
                Y[b * 64 + i] = H[255 - b * 64 - i] + 1

    x = np.arange(256, dtype=np.int32)
    assert np.array_equal(run(f, x, on=on)[2], x[::-1] * 3 + 1)
    assert "griddepcontrol" in tilelang.compile(f, target=SM90A).get_kernel_source()


@pytest.mark.spec("must:10-async-wait")
@pytest.mark.spec("T.async_copy")
@pytest.mark.spec("L10:async_copy", "L16:cp-async")
def test_asynchronous_copies_are_grouped_and_waited_for():
    @T.prim_func
    def f(X: T.Tensor((N, 4), "float32"), Y: T.Tensor((N, 4), "float32")):
        with T.Kernel(1, threads=N):
            S = T.alloc_shared((N, 4), "float32")
            T.async_copy(X, S)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(S, Y)

    x = RNG.standard_normal((N, 4)).astype(np.float32)
    assert np.array_equal(everywhere(f, x)[1], x)
    text = cuda_text(f)
    assert "cp_async_commit" in text and "cp_async_wait" in text
    with pytest.raises(ValueError, match="non-negative integer"):
        T.ptx_wait_group(-1)


@pytest.mark.spec("T.warp_reduce_bitand", "T.warp_reduce_bitor", "T.warp_reduce_min")
@pytest.mark.spec("L12.5:warp-reduce")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_reductions_over_a_warp(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((5, N), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            Y[0, i] = T.warp_reduce_sum(X[i])
            Y[1, i] = T.warp_reduce_max(X[i])
            Y[2, i] = T.warp_reduce_min(X[i])
            Y[3, i] = T.warp_reduce_bitand(X[i])
            Y[4, i] = T.warp_reduce_bitor(X[i])

    x = RNG.integers(-2**31, 2**31, N).astype(np.int32)
    x[32:] |= 0x11
    w = warps(x)
    with np.errstate(over="ignore"):
        want = [w.sum(1, dtype=np.int32), w.max(1), w.min(1), np.bitwise_and.reduce(w, 1), np.bitwise_or.reduce(w, 1)]
    assert np.array_equal(run(f, x, on=on)[1], np.stack([np.repeat(v, 32) for v in want]))


@pytest.mark.spec("T.thread_return")
@pytest.mark.parametrize("on", EXECUTIONS)
def test_a_thread_returns_early(on):
    @T.prim_func
    def f(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            i = T.get_thread_binding()
            if X[i] < 0:
                T.thread_return()
            Y[i] = X[i]

    x = RNG.integers(-99, 99, N).astype(np.int32)
    assert np.array_equal(run(f, x, on=on)[1], np.maximum(x, 0))


@pytest.mark.parametrize("read, dtype", [(T.clock, "uint32"), (T.clock64, "int64"), (T.globaltimer, "uint64")])
def test_clocks_advance_and_stay_around_the_work(read, dtype):
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32"), Y: T.Tensor((3, 128), dtype)):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            first = read()
            T.copy(A, a)
            T.clear(c)
            second = read()
            for k in T.Pipelined(4, num_stages=2):  # noqa: B007
                T.copy(A, a)
                T.gemm(a, a, c)
            third = read()
            T.copy(c, C)
            if tx < 64:
                Y[0, tx] = first
                Y[1, tx] = second
                Y[2, tx] = third

    for on in WITH_HOPPER:
        _, c, y = run(f, np.eye(64, dtype=np.float16), on=on)
        assert np.array_equal(c, np.eye(64) * 4)
        y = y[:, :64].astype(object)
        assert (y[2] > y[1]).all() and (y[1] >= y[0]).all() and (y[0] > 0).all(), on
    for arch in ("sm_80", "sm_90a"):
        text = cuda_text(f, arch)
        body = text[text.index("__global__"):]
        reads = [m.start() for m in re.finditer(rf"read_{read.__name__}\(\)", body)]
        products = [m.start() for m in re.finditer(r"mma_\w+\(|wgmma_\w+\(", body)]
        assert len(reads) == 3 and all(reads[1] < at < reads[2] for at in products) and products, text
