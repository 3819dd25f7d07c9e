"""Synchronisation that users write wrongly is refused at its place, with a hint that fits; what is right stays accepted."""

import numpy as np
import pytest

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, rewrite, seq, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.check.verify_sync import verify_sync
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES, lower
from tilelang.transform.verify_sync.launch import check_launch

SM80, SM90A = (Target({"kind": "cuda", "arch": a}) for a in ("sm_80", "sm_90a"))


def leaves(how, when):
    """A loop with a barrier that threads leave: `when` tells which of them."""

    @T.prim_func
    def f(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32"), P: T.Tensor((128,), "int32"), n: T.int32):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((128,), "float32")
            tx = T.get_thread_binding()
            for k in T.serial(4):
                if how == "break behind":
                    T.sync_threads()
                if when == "one thread":
                    if tx == 5:
                        if how == "continue":
                            continue
                        else:
                            break
                elif when == "data of each thread":
                    if P[tx] > k:
                        if how == "continue":
                            continue
                        else:
                            break
                elif when == "a scalar":
                    if k == n:
                        if how == "continue":
                            continue
                        else:
                            break
                elif when == "data of all":
                    if P[k] > 3:
                        if how == "continue":
                            continue
                        else:
                            break
                S[tx] = A[tx] + k
                if how != "break behind":
                    T.sync_threads()
                B[tx] = S[127 - tx]
                T.sync_threads()

    return f


@pytest.mark.parametrize("target", [SM80, SM90A], ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("how", ["break", "continue", "break behind"])
@pytest.mark.parametrize("when", ["one thread", "data of each thread"])
def test_a_barrier_that_threads_leave_one_by_one_is_refused(how, when, target):
    """It compiled as "ordered", and a GPU waited for ever."""
    with pytest.raises(TileLangError, match="T.sync_threads waits for all threads") as e:
        lower(leaves(how, when).func, target)
    assert e.value.kind == "collective-divergent" and "leave the loop" in e.value.hint
    assert "some threads leave here" in str(e.value) and "^^^" in str(e.value)


@pytest.mark.parametrize("how", ["break", "continue", "break behind"])
@pytest.mark.parametrize("when", ["a scalar", "data of all"])
def test_threads_may_leave_a_loop_with_barriers_together(how, when):
    (kernel,) = lower(leaves(how, when).func, SM80).kernels
    assert kernel.plan.sync_report.startswith("ordered: ")


def device(f, target=SM80, **options):
    """The launch of a program as the last pass gets it."""
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync and p.__name__ != "check_collective"]
    return run_passes(f.func, passes, PassContext(target, {f"tl.{k}": v for k, v in options.items()})).body


@pytest.mark.parametrize("how", ["break", "continue"])
def test_the_last_pass_sees_threads_leave_by_itself(how):
    @T.prim_func
    def f(A: T.Tensor((128,), "float32"), B: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=128):
            S, tx = T.alloc_shared((128,), "float32"), T.get_thread_binding()
            S[tx] = A[tx]
            for _ in T.serial(4):
                if tx == 5:
                    if how == "break":
                        break
                    else:
                        continue
                T.sync_threads()
            B[tx] = S[tx]

    text, faults = check_launch(device(f))
    assert "127 of 128 threads" in text and faults[0].exact and faults[0].kind == "barrier"


def test_a_barrier_is_not_for_threads_that_have_returned():
    @T.prim_func
    def f(A: T.Tensor((64,), "int32"), O: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            S = T.alloc_shared((64,), "int32")
            i = T.get_thread_binding()
            S[i] = A[i]
            if i >= 32:
                T.thread_return()
            T.sync_threads()
            O[i] = S[63 - i]

    (kernel,) = lower(f.func, SM80).kernels
    assert kernel.plan.sync_report.startswith("ordered: ")


def test_a_role_that_some_threads_leave_does_not_fill_its_barrier():
    """The model of warp roles could not follow it and let it pass."""

    def role(leaving):
        @T.prim_func
        def f(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
            with T.Kernel(1, threads=256):
                S = T.alloc_shared((256,), "float32")
                tx = T.get_thread_binding()
                with T.ws(0):
                    for k in T.serial(4):
                        if leaving == "one":
                            if tx == 5:
                                break
                        elif k == 2:
                            break
                        S[tx] = A[tx] + k
                        T.sync_threads(3, 128)
                        B[tx] = S[127 - tx]
                        T.sync_threads(3, 128)
                with T.ws(1):
                    B[tx] = A[tx]

        return f

    (kernel,) = lower(role("all").func, SM90A).kernels
    assert kernel.plan.sync_report.startswith("ordered: model of ")
    with pytest.raises(TileLangError, match="is reached by 127 of 256 threads") as e:
        lower(role("one").func, SM90A)
    assert e.value.kind == "sync-unordered" and "come" in e.value.hint


def copies(wait, threads=128):
    @T.prim_func
    def f(A: T.Tensor((3, 512), "float32"), B: T.Tensor((512,), "float32")):
        with T.Kernel(1, threads=threads):
            S = T.alloc_shared((3, 512), "float32")
            for i in T.unroll(3):
                T.async_copy(A[i, :], S[i, :])
            T.ptx_wait_group(wait)
            T.sync_threads()
            B[T.get_thread_binding()] = S[0, T.get_thread_binding()]
            T.ptx_wait_group(0)

    return f


@pytest.mark.parametrize("threads", [1, 128])
@pytest.mark.parametrize("wait", range(6))
def test_a_wait_for_fewer_groups_than_are_pending_waits_for_nothing(wait, threads):
    """A wait for all but 4 of 3 groups counted as one for the first two of them; blocks of one thread were not looked at."""
    if wait <= 2:
        (kernel,) = lower(copies(wait, threads).func, SM80).kernels
        assert kernel.plan.sync_report.startswith("ordered: ")
        return
    with pytest.raises(TileLangError, match="`S` is touched while an asynchronous copy to it is in flight") as e:
        lower(copies(wait, threads).func, SM80)
    assert "T.ptx_wait_group" in e.value.hint and "the copy" in str(e.value)


@pytest.mark.parametrize("target", [SM80, SM90A], ids=["sm_80", "sm_90a"])
@pytest.mark.parametrize("early", [True, False])
def test_shared_memory_of_run_time_size_is_checked(early, target):
    """It was "not checked"."""
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=128):
            S, tx = T.alloc_shared((n,), "float32"), T.get_thread_binding()
            T.async_copy(A, S)
            if not early:
                T.ptx_wait_group(0)
                T.sync_threads()
            if tx < n:
                B[tx] = S[n - 1 - tx]
            T.ptx_wait_group(0)

    if early:
        with pytest.raises(TileLangError, match="`S` is touched while an asynchronous copy to it is in flight"):
            lower(f.func, target)
    else:
        (kernel,) = lower(f.func, target).kernels
        assert kernel.plan.sync_report.startswith("ordered: ") and "with n = " in kernel.plan.sync_report


def scatter():
    @T.prim_func
    def f(P: T.Tensor((256,), "int32"), A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=64):
            U, V = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            T.copy(A, V)
            for i in T.Parallel(256):
                U[P[i * 5 % 256]] = V[i * 3 % 256]
            for i in T.Parallel(256):
                B[i] = U[255 - i]
                V[i] = U[i]
            for i in T.Parallel(256):
                U[P[i * 5 % 256]] = V[i * 3 % 256]
            T.copy(U, A)

    return f


def test_each_barrier_around_a_scatter_is_needed():
    """Accesses at addresses that data decide were dropped in parallel loops."""
    launch = device(scatter())
    assert check_launch(launch)[0].startswith("ordered: ")
    barriers = [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == "sync_threads"]
    assert len(barriers) == 4
    for gone in barriers:
        text, faults = check_launch(rewrite(launch, lambda x: seq() if x is gone else None))  # noqa: B023
        assert text.startswith("not cleared: ") and faults, gone.span


def test_an_iteration_that_a_constant_picks_is_followed():
    """Long loops were followed at their first and last iterations only."""

    @T.prim_func
    def f(A: T.Tensor((256,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            S, tx = T.alloc_shared((64,), "float32"), T.get_thread_binding()
            for k in T.serial(256):
                S[tx] = A[k]
                T.sync_threads()
                B[tx] = S[63 - tx]
                if k != 100:
                    T.sync_threads()

    text, faults = check_launch(device(f, disable_thread_storage_sync=True))
    assert text.startswith("not cleared: ") and faults[0].exact


def test_a_race_of_one_statement_has_a_hint_for_updates():
    """The hint for C[X[tx]] += 1 was T.sync_threads, which cannot stand in it."""
    @T.prim_func
    def f(X: T.Tensor((128,), "int32"), C: T.Tensor((16,), "int32")):
        with T.Kernel(1, threads=128):
            tx = T.get_thread_binding()
            C[X[tx]] += 1

    with pytest.raises(TileLangError) as e:
        run_device(lower(f.func, SM80), [np.arange(128, dtype=np.int32) % 16, np.zeros(16, np.int32)])
    assert e.value.kind == "sim-race" and "T.atomic_add" in e.value.hint


def test_an_index_that_is_assumed_too_large_is_an_unknown_one():
    """The model of warp roles takes 4096 for n: the read lay behind the buffer and was dropped."""
    @T.prim_func
    def f(A: T.Tensor((128,), "float32"), B: T.Tensor((256,), "float32"), n: T.int32):
        with T.Kernel(1, threads=256):
            S, tx = T.alloc_shared((128,), "float32"), T.get_thread_binding()
            with T.ws(0):
                S[tx] = A[tx]
                T.sync_threads(3, 128)
                B[tx] = S[n]
                T.sync_threads(3, 128)
                S[tx] = A[127 - tx]
            with T.ws(1):
                B[tx] = A[tx - 128]

    launch = device(f, SM90A)
    assert check_launch(launch)[0].startswith("ordered: model of ")
    barriers = [x for x in walk(launch) if isinstance(x, Evaluate) and x.call.op == "named_barrier"]
    assert len(barriers) == 2
    for gone in barriers:
        text, faults = check_launch(rewrite(launch, lambda x: seq() if x is gone else None))  # noqa: B023
        assert text.startswith("not cleared: `S` ") and not faults[0].exact


@pytest.mark.parametrize("how", ["break", "continue"])
def test_the_reference_interpreter_misses_threads_at_a_barrier(how):
    """It ran past the barrier as if all had come."""
    f = leaves(how, "one thread")
    args = [np.zeros(128, np.float32), np.zeros(128, np.float32), np.zeros(128, np.int32), 1]
    with pytest.raises(TileLangError, match="127 of 128 threads") as e:
        run_tile(f, args)
    assert e.value.kind == "sim-barrier"
    run_tile(leaves(how, "a scalar"), args)
