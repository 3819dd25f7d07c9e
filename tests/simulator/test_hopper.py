"""The device simulator on Hopper programs: right ones give their results, planted faults are named."""

import numpy as np
import pytest
from hopper_text import SYNC, addr, do, gemm, groups, init, tma_copy
from sim_programs import alloc, program

from tilelang.errors import TileLangError
from tilelang.simulator import run_device

rng = np.random.default_rng(3)


def refused(f, args, kind: str, *texts: str) -> TileLangError:
    with pytest.raises(TileLangError) as e:
        run_device(f, args)
    assert e.value.kind == kind and all(t in str(e.value) for t in texts), (e.value.kind, str(e.value))
    return e.value


# ---- TMA copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle, box, dtype", [
    (0, (32, 16), "float16"), (32, (16, 32), "float16"), (64, (32, 16), "float16"), (128, (64, 8), "float16"),
    (128, (32, 16), "float16"), (128, (32, 8), "float32"), (0, (64, 8), "float32"),
])
def test_tma_copy_through_every_swizzle_with_ragged_edges(swizzle, box, dtype):
    a = rng.standard_normal((41, 56)).astype(dtype)
    report = run_device(tma_copy(a.shape, box, swizzle, dtype), [a, np.zeros_like(a)])
    assert np.array_equal(report.outputs["B"], a + a.dtype.type(1))
    blocks = -(-56 // box[0]) * -(-41 // box[1])
    assert report.bytes["tma.load"] == report.bytes["tma.store"] == blocks * box[0] * box[1] * a.itemsize


def test_tma_reduction_adds_to_the_tensor():
    a = rng.integers(0, 9, (40, 48)).astype(np.float16)
    got = run_device(tma_copy(op="tma_reduce_add"), [a, np.full_like(a, 5)]).outputs["B"]
    assert np.array_equal(got, a + 6)


# ---- GEMM -------------------------------------------------------------------------------------------------------

A, B = rng.integers(-4, 5, (200, 256)).astype(np.float16), rng.integers(-4, 5, (120, 256)).astype(np.float16)
C = np.zeros((200, 120), np.float16)
WANT = A.astype(np.float32) @ B.T.astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"stages": 3, "pending": 1}, {"bn": 128}, {"b_major": "mn"}])
def test_gemm_of_producer_and_consumers(options):
    b = B if options.get("b_major") != "mn" else np.ascontiguousarray(B.T)
    report = run_device(gemm(200, 120, 256, **options), [A, b, C])
    assert np.array_equal(report.outputs["C"], WANT.astype(np.float16))


@pytest.mark.parametrize("fault, kind, texts", [
    ({"proxy": ""}, "sim-proxy", ("fence_proxy_async",)),
    ({"full_parity": "(k // {s} + 1) % 2"}, "sim-race", ("a copy that signals full[0]",)),  # passes too early
    ({"empty_parity": "k // {s} % 2"}, "sim-barrier", ("empty[0] in phase 0: 2 of 2 arrivals pending",)),
    ({"bytes_off": 2}, "sim-barrier", ("full[0] in phase 0: 0 of 1 arrivals pending, 2 bytes still expected",)),
    ({"bytes_off": -2}, "sim-barrier", ("2 bytes more than expected",)),
    ({"pending": 1, "last_wait": False, "stages": 3}, "sim-wgmma", ("acc is read while the wgmma",)),
    ({"room": False}, "sim-mbarrier", ("full[0]: 1 threads arrive in phase 0",)),
    ({"early_release": True}, "sim-race", ("a wgmma of warp group", "may still be reading")),
    ({"release": False}, "sim-barrier", ("empty[0] in phase 0: 2 of 2 arrivals pending",
                                         "warps 0 to 7 wait for parity 1 of full[0] in phase 1")),
    ({"producer_steps": 3}, "sim-barrier", ("warp groups 0 to 1 wait for parity 1 of full[1] in phase 1",)),
    ({"producer_steps": 5}, "sim-async", ("the block ends while a copy into SA",)),
    ({"fence": ""}, "sim-wgmma", ("no wgmma_fence",)),
    ({"registers": (40, 240)}, "sim-barrier", ("for 240 registers for warp",)),
    ({"registers": (44, 232)}, "sim-nreg", ("multiple of 8",)),
])
def test_planted_fault_of_a_gemm_is_found(fault, kind, texts):
    e = refused(gemm(128, 64, 256, **fault), [A[:128], B[:64], C[:128, :64].copy()], kind, *texts)
    assert e.hint


def test_a_slot_filled_again_before_its_readers_are_done_is_a_race():
    # Ordinary reads: the consumer takes the tile, the producer does not wait for that before the next load.
    def ring(wait: str) -> object:
        return program({"A": ((256,), "float32"), "B": ((256,), "float32")}, f"""
{alloc("S", (128,), "float32", "shared.dyn")}
{init({"full": [1], "empty": [128]})}
if {groups(1)}:
    if tx == 128:
        for k in T.serial(2):
            {wait}
            {do("mbarrier_arrive_expect_tx", addr("full[0]"), 512)}
            {do("bulk_load", addr("S[0]"), addr("A[k * 128]"), 512, addr("full[0]"))}
            {do("mbarrier_wait", addr("full[0]"), "k % 2")}
else:
    for k in T.serial(2):
        {do("mbarrier_wait", addr("full[0]"), "k % 2")}
        B[k * 128 + tx] = S[127 - tx]
        {do("mbarrier_arrive", addr("empty[0]"))}
""", threads=256)
    a = rng.standard_normal(256).astype(np.float32)
    got = run_device(ring(do("mbarrier_wait", addr("empty[0]"), "(k + 1) % 2")), [a, np.zeros_like(a)]).outputs["B"]
    assert np.array_equal(got, a.reshape(2, 128)[:, ::-1].ravel())
    refused(ring("pass"), [a, np.zeros_like(a)], "sim-race", "starts a copy over S")


@pytest.mark.parametrize("fault, kind, texts", [
    ({"fence": ""}, "sim-proxy", ("bulk store reads S",)),
    ({"fence": f"{SYNC}\nif tx == 0:\n    " + do("fence_proxy_async")}, "sim-proxy", ()),  # not by the writers
    ({"parity": "1"}, "sim-race", ("reads S", "a copy that signals bar[0]")),
    ({"wait": False}, "sim-race", ("a copy that signals bar[0]",)),
    ({"expect": 1023}, "sim-barrier", ("1 bytes more than expected",)),
    ({"init_fence": "pass"}, "sim-mbarrier", ("fence_mbarrier_init",)),
    ({"end": "pass"}, "sim-async", ("bulk store of thread 0 reads its shared memory",)),
])
def test_planted_fault_of_a_copy_is_found(fault, kind, texts):
    a = np.ones((40, 48), np.float16)
    refused(tma_copy(**fault), [a, np.zeros_like(a)], kind, *texts)
