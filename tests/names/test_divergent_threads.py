"""Threads that go different ways, and meet again: returns in loops, votes and shuffles in branches, masks of lanes."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, cuda_text, everywhere, run

import tilelang.language as T
from tilelang.errors import TileLangError

LANES = np.arange(64, dtype=np.int32)
NINE = LANES % 9


def in_a_loop_of_its_own_length():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            for k in range(i % 7 + 1):
                O[i] = O[i] + 1
                if A[i] + k == 5:
                    T.thread_return()
            O[i] = O[i] + 100

    return f


def in_a_loop_of_all_with_jumps():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            for k in range(6):
                if A[i] == k:
                    continue
                O[i] = O[i] + 1
                if A[i] + k == 7:
                    break
                if A[i] + k == 5:
                    T.thread_return()
                O[i] = O[i] + 10
            O[i] = O[i] + 100

    return f


def in_both_branches():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if i < 40:
                O[i] = 1
                if A[i] == 3:
                    O[i] = 2
                    T.thread_return()
                else:
                    if A[i] == 4:
                        T.thread_return()
                O[i] = O[i] + 10
            O[i] = O[i] + 100

    return f


def in_while():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            v = T.alloc_var("int32", init=0)
            while v < i:
                v = v + 1
                if v == A[i]:
                    O[i] = -v
                    T.thread_return()
            O[i] = v

    return f


def _loops(a):
    """What the first two programs give, one thread after another."""
    own, all_ = np.zeros(64, np.int32), np.zeros(64, np.int32)
    for i in range(64):
        for k in range(i % 7 + 1):
            own[i] += 1
            if a[i] + k == 5:
                break
        else:
            own[i] += 100
        for k in range(6):
            if a[i] == k:
                continue
            all_[i] += 1
            if a[i] + k in (5, 7):
                all_[i] += 100 * (a[i] + k == 7)
                break
            all_[i] += 10
        else:
            all_[i] += 100
    return own, all_


@pytest.mark.spec("T.thread_return", "L23:raw-statements")
def test_threads_return_anywhere():
    own, all_ = _loops(NINE)
    assert np.array_equal(everywhere(in_a_loop_of_its_own_length(), NINE)[1], own)
    assert np.array_equal(everywhere(in_a_loop_of_all_with_jumps(), NINE)[1], all_)
    branches = np.where(LANES >= 40, 100, np.where(NINE == 3, 2, np.where(NINE == 4, 1, 111)))
    assert np.array_equal(everywhere(in_both_branches(), NINE)[1], branches)
    waited = np.where((NINE >= 1) & (NINE <= LANES), -NINE, LANES)
    assert np.array_equal(everywhere(in_while(), NINE)[1], waited)
    cuda_text(in_a_loop_of_all_with_jumps())


@pytest.mark.spec("T.thread_return", "T.syncthreads_count")
def test_barriers_and_votes_of_the_block_take_the_threads_that_are_left():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            i = T.get_thread_binding()
            S[i] = A[i]
            if i >= 32:
                T.thread_return()
            T.sync_threads()
            O[0, i] = S[63 - i]
            O[1, i] = T.syncthreads_count(A[i] % 4 == 1)
            O[2, i] = T.syncthreads_and(A[i] < 32)

    o = everywhere(f, LANES)[1]
    assert np.array_equal(o[0, :32], 63 - LANES[:32]) and not o[:, 32:].any()
    assert (o[1, :32] == 8).all() and (o[2, :32] == 1).all()
    cuda_text(f)


@pytest.mark.spec("T.any_sync", "T.all_sync", "T.ballot_sync", "T.match_any_sync", "T.match_all_sync", "L15:warp-votes")
def test_votes_of_the_lanes_that_come():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((5, 64), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if i % 32 < 16:
                O[0, i] = T.any_sync(A[i] == 3, 0xFFFF)
                O[1, i] = T.all_sync(A[i] < 16, 0xFFFF)
                O[2, i] = T.cast(T.ballot_sync(A[i] % 2, 0xFFFF), "int32")
                O[3, i] = T.cast(T.match_any_sync(A[i] % 3, 0xFFFF), "int32")
                O[4, i] = T.cast(T.match_all_sync(A[i] // 32, 0xFFFF), "int32")

    o = everywhere(f, LANES)[1].reshape(5, 2, 32)
    assert not o[:, :, 16:].any()
    assert (o[0, 0, :16] == 1).all() and not o[0, 1].any() and (o[1, 0, :16] == 1).all() and not o[1, 1].any()
    assert (o[2, :, :16] == 0xAAAA).all() and (o[4, :, :16] == 0xFFFF).all()
    same = [sum(1 << b for b in range(16) if b % 3 == a % 3) for a in range(16)]
    assert np.array_equal(o[3, 0, :16], same)
    cuda_text(f)


def lanes_with(i, threads, part=8):
    """Threads of the warp of thread i that are on its side of lane `part`."""
    first = i // 32 * 32
    return [k for k in range(first, min(first + 32, threads)) if (k % 32 < part) == (i % 32 < part)]


def bits(lanes):
    """Lanes of threads of one warp as a mask, seen as int32."""
    return np.uint32(sum(1 << k % 32 for k in lanes)).view(np.int32)


@pytest.mark.spec("T.any_sync", "T.all_sync", "T.ballot_sync", "T.match_any_sync", "T.match_all_sync", "T.activemask",
                  "L15:warp-votes")
@pytest.mark.parametrize("on", WITH_HOPPER)
@pytest.mark.parametrize("threads", [64, 40])
def test_masks_part_the_lanes_of_a_warp(threads, on):
    """Lanes below 8 vote among themselves, the others of their warp as well; the last warp need not be full."""

    @T.prim_func
    def f(A: T.Tensor((threads,), "int32"), O: T.Tensor((7, threads), "int32")):
        with T.Kernel(1, threads=threads):
            i = T.get_thread_binding()
            m = T.if_then_else(i % 32 < 8, T.uint32(0xFF), T.uint32(0xFFFFFF00))
            O[0, i] = T.any_sync(A[i] == 3, m)
            O[1, i] = T.cast(T.ballot_sync(A[i] % 2, m), "int32")
            O[2, i] = T.cast(T.match_any_sync(A[i] % 3, m), "int32")
            O[3, i] = T.cast(T.match_all_sync(A[i] // 8, m), "int32")
            O[4, i] = T.all_sync(A[i] % 32 < 8, m)
            O[5, i] = T.cast(T.activemask(), "int32")
            O[6, i] = T.cast(T.match_all_sync(A[i] // 32, m if threads % 32 else 0xFFFFFFFF), "int32")

    o = run(f, LANES[:threads], on=on)[1]
    for i in range(threads):
        lanes, warp = lanes_with(i, threads), lanes_with(i, threads, 32)
        assert o[0, i] == (3 in lanes) and o[1, i] == bits([k for k in lanes if k % 2])
        assert o[2, i] == bits([k for k in lanes if k % 3 == i % 3])
        assert o[3, i] == (bits(lanes) if len({k // 8 for k in lanes}) == 1 else 0)
        assert o[4, i] == (i % 32 < 8) and o[5, i] == bits(warp) and o[6, i] == bits(lanes if threads % 32 else warp)


@pytest.mark.spec("T.any_sync", "T.ballot_sync", "T.match_any_sync", "T.shfl_xor", "T.shfl_up", "T.thread_return",
                  "L15:warp-votes", "L15:shuffles")
@pytest.mark.parametrize("threads", [64, 40])
def test_lanes_of_a_warp_in_different_branches_pass_their_own_masks(threads):
    """Votes and shuffles in both branches, then of the lanes that are left; a full mask may name the others."""
    kept = 0xFFFFFFFF if threads == 64 else 0x3F

    @T.prim_func
    def f(A: T.Tensor((threads,), "int32"), O: T.Tensor((5, threads), "int32")):
        with T.Kernel(1, threads=threads):
            i = T.get_thread_binding()
            if i % 32 < 8:
                O[0, i] = T.cast(T.ballot_sync(A[i] % 2, 0xFF), "int32")
                O[1, i] = T.any_sync(A[i] == 37, 0xFF)
                O[2, i] = T.shfl_xor(A[i], 3, mask=0xFF)
            else:
                O[0, i] = T.cast(T.ballot_sync(A[i] % 3 == 0, 0xFFFFFF00), "int32")
                O[1, i] = T.any_sync(A[i] == 3, 0xFFFFFF00)
                O[2, i] = T.shfl_up(A[i], 8, width=8, mask=0xFFFFFF00)
            if i % 32 >= 6:
                T.thread_return()
            O[3, i] = T.cast(T.ballot_sync(A[i] % 2 == 0, kept), "int32")
            O[4, i] = T.cast(T.match_any_sync(A[i] % 3, kept), "int32")

    o = everywhere(f, LANES[:threads], on=WITH_HOPPER)[1]
    for i in range(threads):
        lanes, low = lanes_with(i, threads), i % 32 < 8
        assert o[0, i] == bits([k for k in lanes if (k % 2 if low else k % 3 == 0)])
        assert o[1, i] == (low and i >= 32) and o[2, i] == (i ^ 3 if low else i)
        left = lanes_with(i, threads, 6) if i % 32 < 6 else []
        assert o[3, i] == bits([k for k in left if k % 2 == 0]) and o[4, i] == bits([k for k in left if k % 3 == i % 3])
    cuda_text(f)


@pytest.mark.spec("L15:warp-votes", "L15:shuffles")
@pytest.mark.parametrize("on", ["tile", "simulator", "cpu"])
@pytest.mark.parametrize("case,text,told", [
    ("own", "thread 8, which is not in the mask that it passes", "any_sync .* a lane that is not in the mask that it passes"),
    ("other", "names thread 8 in its mask, which passes another mask", "any_sync .* lane in its mask that passes another mask"),
    ("vote", "any_sync names thread 8 in its mask, which does not execute it", "any_sync .* mask that does not execute it"),
    ("shuffle", "shfl_xor names thread 8 in its mask, which does not execute it", "shfl_xor .* mask that does not execute it"),
    ("source", "shfl_idx: thread 0 reads from thread 9, which does not", "shfl_sync .* from a lane that does not execute it")],
    ids=["own", "other", "vote", "shuffle", "source"])
def test_masks_that_do_not_fit_the_lanes_that_come_are_refused(case, text, told, on):
    """What CUDA leaves undefined: the interpreters and the CPU say so, the CPU when the launch is over."""

    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if case == "own":
                O[i] = T.any_sync(A[i], 0xFF)
            elif case == "other":
                m = T.if_then_else(i % 32 < 8, T.uint32(0xFFFF), T.uint32(0xFFFFFF00))
                O[i] = T.any_sync(A[i], m)
            elif i % 32 < A[8]:  # known when it runs
                if case == "source":
                    O[i] = T.shfl_sync(A[i], 9, mask=0xFF)
                else:
                    O[i] = T.any_sync(A[i]) if case == "vote" else T.shfl_xor(A[i], 1)

    with pytest.raises(RuntimeError, match=told if on == "cpu" else text) as e:
        run(f, LANES[:64], on=on, simulated=True)
    assert on == "cpu" or e.value.kind == "sim-warp-divergence"


@pytest.mark.spec("T.ptx_ldmatrix")
@pytest.mark.parametrize("on", ["tile", "simulator", "cpu"])
def test_a_matrix_instruction_for_half_a_warp_is_refused(on):
    @T.prim_func
    def f(A: T.Tensor((64,), "float16"), O: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=32):
            i = T.get_thread_binding()
            S = T.alloc_shared((64,), "float16")
            L = T.alloc_local((2,), "float16")
            T.copy(A, S)
            if i < 16:
                T.ptx_ldmatrix(False, 1, T.access_ptr(S[i % 8 * 8], "r"), L.access_ptr("w"))
                O[2 * i] = L[0]

    with pytest.raises(RuntimeError, match="ldmatrix.* all 32 lanes of a warp"):
        run(f, LANES.astype(np.float16), on=on, simulated=True)


@pytest.mark.spec("T.shfl_xor", "T.any_sync", "T.thread_return")
def test_lanes_that_have_returned_may_be_named():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if i % 32 >= 8:
                T.thread_return()
            if i < 32:
                O[i] = T.shfl_xor(A[i], 1) + T.any_sync(A[i] == 7) * 100

    want = np.where(LANES < 8, (LANES ^ 1) + 100, 0)
    assert np.array_equal(everywhere(f, LANES)[1], want)


@pytest.mark.spec("T.shfl_xor", "T.shfl_down", "T.shfl_up", "T.shfl_sync", "T.activemask", "T.ballot", "L15:shuffles")
def test_shuffles_and_active_lanes_in_branches_and_loops():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((6, 64), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            if i < 32:
                O[0, i] = T.shfl_xor(A[i], 1) + T.shfl_down(T.shfl_up(A[i], 1), 2)
            else:
                O[1, i] = T.shfl_sync(A[i], 3)
            v = T.alloc_var("int32", init=A[i])
            w = T.alloc_var("int32", init=0)
            for k in range(i // 32 + 2):  # another length for each warp
                v = v + T.shfl_xor(v, 1 << k)
            O[2, i] = v
            for k in range(8):
                w = w + 1
                if T.any_sync(A[i] == k) != 0:
                    break
            O[3, i] = w
            if A[i] % 4 == 1:
                O[4, i] = T.cast(T.activemask(), "int32")
                O[5, i] = T.cast(T.ballot(A[i] % 3 == 0), "int32")

    a = LANES // 32 * 3 + LANES % 32 // 16
    o = everywhere(f, a)[1]
    assert np.array_equal(o[3], np.where(LANES < 32, 1, 4))
    want = np.where(a % 4 == 1, 0xFFFF0000, 0)
    assert np.array_equal(o[4].view(np.uint32), want.astype(np.uint32))
    cuda_text(f)


@pytest.mark.spec("T.warp_reduce_sum", "T.warp_reduce_max", "L12.5:warp-reduce")
def test_a_warp_reduces_in_a_branch():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            O[i] = T.warp_reduce_sum(A[i])
            if i < 32:
                O[i] = O[i] + T.warp_reduce_max(A[i])

    a = (LANES * 7) % 11
    want = np.repeat([a[:32].sum() + a[:32].max(), a[32:].sum()], 32)
    assert np.array_equal(everywhere(f, a)[1], want)


@pytest.mark.spec("T.sync_threads", "T.syncthreads_or")
@pytest.mark.parametrize("barrier", ["sync", "vote"])
def test_what_the_whole_block_waits_for_is_refused_where_some_threads_come(barrier):
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            i = T.get_thread_binding()
            for k in range(3):
                if A[i] == k:
                    break
                if barrier == "sync":
                    T.sync_threads()
                else:
                    O[i] = T.syncthreads_or(A[i])

    with pytest.raises(TileLangError, match="sync_threads|syncthreads_or") as e:
        run(f, NINE, on="cpu")
    assert e.value.kind == "cpu-unsupported"


def ballots(form):
    @T.prim_func
    def f(A: T.Tensor((40,), "int32"), O: T.Tensor((2, 40), "int64")):
        with T.Kernel(1, threads=40):
            i = T.get_thread_binding()
            if form == "branches":
                if A[i] % 5 > 1:
                    O[0, i] = T.cast(T.ballot(A[i] % 2 == 0), "int64")
                    if A[i] % 3 == 1:
                        O[1, i] = T.cast(T.ballot(A[i] % 2 == 0), "int64")
                else:
                    O[0, i] = T.cast(T.ballot(A[i] % 2 == 1), "int64")
            elif form == "loop":
                for k in range(i % 4):
                    O[k % 2, i] = O[k % 2, i] + T.cast(T.ballot(A[i] % 2 == 0), "int64")
            elif form == "counted before":  # what the bound is made of changes in the loop
                n = T.alloc_var("int32", init=i % 4)
                for k in range(n):
                    n = n - 1
                    O[k % 2, i] = O[k % 2, i] + T.cast(T.ballot(A[i] % 2 == 0), "int64")
            else:
                v = T.alloc_var("int32", init=0)
                while v < A[i] % 3:
                    O[v, i] = T.cast(T.ballot(A[i] % 2 == 0), "int64")
                    v = v + 1

    return f


@pytest.mark.spec("T.ballot", "L15:warp-votes")
@pytest.mark.parametrize("form", ["branches", "loop", "counted before", "while"])
def test_a_ballot_asks_the_lanes_that_come_and_names_them_to_the_device(form):
    """ballot_masks: a mask of all lanes is undefined where some are elsewhere."""
    f, x = ballots(form), LANES[:40]
    o = everywhere(f, x)[1]

    def of(i, taken, yes):
        return sum(1 << k % 32 for k in range(i // 32 * 32, min(40, i // 32 * 32 + 32)) if taken(k) and yes(k))

    def even(k):
        return k % 2 == 0

    def odd(k):
        return k % 2 == 1

    if form == "branches":
        first = [of(i, lambda k: k % 5 > 1, even) if i % 5 > 1 else of(i, lambda k: k % 5 <= 1, odd) for i in x]
        second = [of(i, lambda k: k % 5 > 1 and k % 3 == 1, even) if i % 5 > 1 and i % 3 == 1 else 0 for i in x]
    elif form != "while":
        turns = [[of(i, lambda k, n=n: k % 4 > n, even) if i % 4 > n else 0 for i in x] for n in range(3)]
        first, second = np.add(turns[0], turns[2]), turns[1]
    else:
        first, second = ([of(i, lambda k, n=n: k % 3 > n, even) if i % 3 > n else 0 for i in x] for n in range(2))
    assert np.array_equal(o, [first, second])
    assert all("lanes" in line for line in cuda_text(f).splitlines() if " ballot = tl::ballot_sync" in line)
