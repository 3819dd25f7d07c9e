"""Ordinary accesses of shared memory are over before TMA or wgmma touch it: the fences are there, and none can be left out."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "simulator"))
from hopper_text import SYNC, addr, do
from kernel_text import alloc, program
from test_hopper_simulated import FENCE, UNFENCED, ring_read_by_threads
from test_verify_model import SM90, fault_of, is_call, launch_of, ordered, unchecked, without

import tilelang.language as T
from tilelang.errors import TileLangError
from tilelang.ir import Evaluate, replace, walk
from tilelang.simulator import run_device, run_tile
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.pipeline import DEVICE_PASSES, TILE_PASSES
from tilelang.transform.sync.proxy_fences import fence_arrivals, fence_barriers
from tilelang.transform.check.verify_sync import verify_sync
from tilelang.transform.verify_sync.launch import check_launch

UNREAD = "is overwritten by a copy after ordinary loads that no fence_proxy_async of the reader follows"


def product():
    """A in registers, loaded by threads from a stage of a ring."""
    @T.prim_func
    def f(A: T.Tensor((128, 256), "float16"), B: T.Tensor((256, 128), "float16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=256):
            As, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 128), "float16")
            Af, Cf = T.alloc_fragment((128, 64), "float16"), T.alloc_fragment((128, 128), "float32")
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[0, k * 64], As)
                T.copy(B[k * 64, 0], Bs)
                T.copy(As, Af)
                T.gemm(Af, Bs, Cf)
            T.copy(Cf, C)

    return f


def several_tiles():
    """A tile loaded once for each of a block's tiles, and read by its threads."""
    @T.prim_func
    def f(Q: T.Tensor((32768, 64), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((32768, 64), "float32")):
        with T.Kernel(256, threads=256) as bx:
            Qs, Bs = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            Qf, Cf = T.alloc_fragment((128, 64), "float16"), T.alloc_fragment((128, 64), "float32")
            T.copy(Q[bx * 128, 0], Qs)
            T.copy(Qs, Qf)
            T.clear(Cf)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(B[k * 64, 0], Bs)
                T.gemm(Qf, Bs, Cf, transpose_B=True)
            T.copy(Cf, C[bx * 128, 0])

    return f


def by_hand():
    """A ring that a user wrote, without fences."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            S = T.alloc_shared((2, 16, 64), "float32")
            full, empty = T.alloc_barrier([128, 128]), T.alloc_barrier([128, 128])
            with T.ws(1):
                for k in T.serial(4):
                    T.mbarrier_wait_parity(empty[k % 2], (k // 2 + 1) % 2)
                    T.tma_copy(A[k * 16, 0], S[k % 2, :, :], barrier=full[k % 2])
                    T.mbarrier_arrive(full[k % 2])
            with T.ws(0):
                for k in T.serial(4):
                    T.mbarrier_wait_parity(full[k % 2], k // 2 % 2)
                    for i, j in T.Parallel(16, 64):
                        B[k * 16 + i, j] = S[k % 2, 15 - i, j] * 2.0
                    T.mbarrier_arrive(empty[k % 2])

    return f


def block_barriers():
    """One tile again and again: block barriers order its readers and the next copy."""
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            S = T.alloc_shared((16, 64), "float32")
            for k in T.serial(4):
                T.copy(A[k * 16, 0], S)
                for i, j in T.Parallel(16, 64):
                    B[k * 16 + i, j] = S[15 - i, j] * 2.0

    return f


def fences(launch):
    return sum(is_call(x, "fence_proxy_async") for x in walk(launch))


@pytest.mark.parametrize("make", [product, several_tiles, by_hand])
def test_no_fence_can_be_left_out(make):
    launch = unchecked(make())
    ordered(launch)
    less = [without(launch, "fence_proxy_async", k) for k in range(fences(launch))]
    needed = [x for x in less if check_launch(x)[1]]
    # Every barrier of the block has a fence, so has the one in front of a result that is staged where operands may have been.
    assert len(needed) == len(less) - (make is product)
    found = [fault_of(x) for x in needed]
    assert sum(UNREAD in x for x in found) == 1  # the others stand behind stores


def test_a_block_barrier_waits_for_no_loads():
    launch = unchecked(block_barriers())
    ordered(launch)
    assert "tma_load" in [x.call.op for x in walk(launch) if isinstance(x, Evaluate)]
    assert UNREAD in fault_of(without(launch, "fence_proxy_async"))


@pytest.mark.parametrize("make", [product, by_hand, block_barriers])
def test_the_simulator_finds_that_they_are_missing(make):
    prim = make().func
    rng = np.random.default_rng(5)
    args = [rng.integers(-4, 5, b.shape).astype(str(b.dtype)) for _, b in prim.buffers]
    name = prim.buffers[-1][1].name
    passes = [p for p in (*TILE_PASSES, *DEVICE_PASSES) if p is not verify_sync]
    func = run_passes(prim, passes, PassContext(SM90, {}))
    assert np.array_equal(run_device(func, args).outputs[name], run_tile(prim, args)[name])
    with pytest.raises(TileLangError, match="read with ordinary loads, with no fence_proxy_async") as e:
        run_device(without(func, "fence_proxy_async"), args)
    assert e.value.kind == "sim-proxy"


@pytest.mark.parametrize("how", UNFENCED)
def test_every_reader_fences_in_front_of_its_arrival(how):
    ordered(launch_of(ring_read_by_threads()))
    assert UNREAD in fault_of(launch_of(ring_read_by_threads(release=UNFENCED[how][0])))


# ---- where they are put ----------------------------------------------------------------------------------------------


def calls(x):
    return [y.call.op for y in walk(x) if isinstance(y, Evaluate)]


def placed(fences_of, body):
    """Calls of a body of one block with its fences, `S` filled by a bulk copy."""
    text = f"""
{alloc("S", (4,), "float32", "shared.dyn")}
{alloc("U", (4,), "float32", "shared.dyn")}
{alloc("full", (1,), "uint64", "shared.barrier")}
{body}
"""
    return calls(fences_of(launch_of(program({"A": ((4,), "float32"), "B": ((128,), "float32")}, text, threads=128))))


FILL = do("bulk_load", addr("S[0]"), addr("A[0]"), 16, addr("full[0]"))
TELL = do("mbarrier_arrive", addr("full[0]"))


@pytest.mark.parametrize("body, before", [
    (f"B[tx] = S[3]\n{TELL}", True), (f"B[tx] = U[3]\n{TELL}", False), (f"S[3] = B[3]\n{TELL}", True),
    (f"U[3] = B[3]\n{TELL}", False),  # no copy accesses U
    (f"if S[3] > T.float32(0.0):\n    {TELL}", True), (f"for i in T.serial(T.cast(S[3], 'int32')):\n    {TELL}", True),
    (f"B[tx] = S[3]\n{FENCE}\n{TELL}", False), (f"B[tx] = S[3]\n{SYNC}\n{TELL}", False),
    (f"for i in T.serial(4):\n    {TELL}\n    B[tx] = S[3]", True),
    (do("atomic_add", addr("S[3]"), "T.float32(1.0)") + f"\n{TELL}", True),
    (do("atomic_add", addr("U[3]"), "T.float32(1.0)") + f"\n{TELL}", False),
    (f"b: T.float32 = S[3]\n{TELL}", True),
])
def test_an_arrival_behind_ordinary_accesses_is_fenced(body, before):
    got = placed(fence_arrivals, f"{FILL}\n{body}")
    own = 1 if FENCE in body else 0
    at = got.index("mbarrier_arrive")
    assert (got[at - 1] == "fence_proxy_async") == (before or bool(own))
    assert got.count("fence_proxy_async") == own + (before or SYNC in body)


def test_programs_without_copies_of_another_proxy_have_no_fences():
    assert "fence_proxy_async" not in placed(fence_arrivals, f"B[tx] = S[3]\n{TELL}")
    assert "fence_proxy_async" not in placed(barriers_fenced, f"B[tx] = S[3]\n{SYNC}")


def barriers_fenced(launch):
    return replace(launch, body=fence_barriers(launch.body))


@pytest.mark.parametrize("body, fenced", [
    (f"{FILL}\n{SYNC}\nB[tx] = S[3]", False),  # nothing has been touched before the copy
    (f"B[tx] = U[3]\n{SYNC}\n{FILL}", True),  # U may have had the place that S now has
    (f"for i in T.serial(4):\n    {FILL}\n    {SYNC}\n    B[tx] = S[3]", True),
    (f"if tx == 0:\n    {FILL}\nelse:\n    B[tx] = U[3]\n{SYNC}", False),
    (f"if U[3] > T.float32(0.0):\n    {FILL}\n{SYNC}", True),
])
def test_block_barriers_are_fenced_where_a_copy_follows_ordinary_accesses(body, fenced):
    got = placed(barriers_fenced, body)
    at = got.index("sync_threads")
    assert (at > 0 and got[at - 1] == "fence_proxy_async") == fenced
