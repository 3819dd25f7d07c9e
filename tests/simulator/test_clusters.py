"""Clusters on the device simulator: multicast, remote arrivals, distributed shared memory; planted faults are named."""

import numpy as np
import pytest
from cluster_text import MEET, RANK, cluster, gemm, send, shift
from hopper_text import addr, do, init, maps
from kernel_text import alloc, program

from tilelang.errors import TileLangError
from tilelang.simulator import run_device

rng = np.random.default_rng(5)
A, B = rng.integers(-4, 5, (512, 256)).astype(np.float16), rng.integers(-4, 5, (128, 256)).astype(np.float16)
NUMBERS = rng.standard_normal(512).astype(np.float32)


def refused(f, args, kind: str, *texts: str) -> TileLangError:
    with pytest.raises(TileLangError) as e:
        run_device(f, args)
    assert e.value.kind == kind and all(t in str(e.value) for t in texts), (e.value.kind, str(e.value))
    assert e.value.hint
    return e.value


@pytest.mark.parametrize("m, n, size", [(256, 64, 2), (512, 128, 2), (512, 64, 4)])
def test_gemm_whose_blocks_share_a_tile_by_multicast(m, n, size):
    report = run_device(gemm(m, n, 256, size=size, empties="all"), [A[:m], B[:n], np.zeros((m, n), np.float16)])
    want = A[:m].astype(np.float32) @ B[:n].T.astype(np.float32)
    assert np.array_equal(report.outputs["C"], want.astype(np.float16))
    assert report.bytes["tma.load"] == (m // 128) * (n // 64) * 4 * (128 + 64) * 64 * 2


@pytest.mark.parametrize("fault, kind, texts", [
    ({"start": ""}, "sim-cluster", ("which may not have started",)),
    ({"end": ""}, "sim-cluster", ("block (0, 0) may end before", "has accessed its shared memory")),
    ({"empties": "own"}, "sim-race", ("of block (0, 0)", "starts a copy over")),
    ({"mask": "T.uint16(1)"}, "sim-barrier", ("full[0] of block (0, 1)", "bytes still expected")),
    ({"mask": "T.uint16(7)"}, "sim-cluster", ("a multicast to the blocks of mask 0x7 in a cluster of 2",)),
    ({"mask": "T.uint16(0)"}, "sim-cluster", ("mask 0x0",)),
    ({"bytes_off": 2}, "sim-barrier", ("of block (0, 0)", "of block (0, 1)", "2 bytes still expected")),
    ({"init_fence": ""}, "sim-mbarrier", ("whose initialisation it may not see",)),
])
def test_planted_fault_of_a_multicast_gemm_is_found(fault, kind, texts):
    refused(gemm(256, 64, 256, **{"empties": "all", **fault}), [A[:256], B[:64], np.zeros((256, 64), np.float16)],
            kind, *texts)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("write", [False, True])
def test_blocks_read_and_write_shared_memory_of_their_neighbours(size, write):
    got = run_device(shift(size, write=write), [NUMBERS[:256], np.zeros(256, np.float32)]).outputs["B"]
    blocks = NUMBERS[:256].reshape(8 // size, size, 32)
    assert np.array_equal(got, np.roll(blocks, -1, axis=1).reshape(-1))


def test_a_relaxed_arrival_orders_no_memory():
    split = do("cluster_arrive", relaxed=True) + "\n" + do("cluster_wait")
    refused(shift(first=split), [NUMBERS[:256], np.zeros(256, np.float32)], "sim-race",
            "of block (3) reads S", "of block (0) wrote")
    whole = do("cluster_arrive") + "\n" + do("cluster_wait")
    assert run_device(shift(first=whole), [NUMBERS[:256], np.zeros(256, np.float32)]).outputs["B"][0] == NUMBERS[32]


@pytest.mark.parametrize("fault, kind, texts", [
    ({"last": ""}, "sim-cluster", ("may end before",)),
    ({"write": True, "last": ""}, "sim-uninitialized", ("S",)),
    ({"first": ""}, "sim-cluster", ("may not have started",)),
    ({"to": "rank + 1"}, "sim-cluster", ("no block of this cluster has rank 4: it has 4",)),
    ({"grid": 6}, "sim-cluster", ("clusters of 4 blocks along x do not divide a grid of 6",)),
    ({"arrive": do("cluster_arrive") + "\n" + do("cluster_arrive")}, "sim-cluster", ("arrive again",)),
    ({"arrive": do("cluster_wait")}, "sim-cluster", ("without having arrived",)),
    ({"arrive": f"if bx == 0:\n    {MEET}"}, "sim-cluster", ("may end before",)),
    ({"last": f"if bx > 0:\n    {MEET}"}, "sim-cluster", ("may end before",)),
    ({"arrive": f"if bx == 0:\n    {MEET}\n    {MEET}"}, "sim-cluster", ("after it has ended",)),
])
def test_planted_fault_of_neighbours_is_found(fault, kind, texts):
    n = 32 * fault.get("grid", 8)
    refused(shift(**fault), [NUMBERS[:n], np.zeros(n, np.float32)], kind, *texts)


def test_bulk_copies_go_to_another_block():
    got = run_device(send(), [NUMBERS, np.zeros(512, np.float32)]).outputs["B"]
    assert np.array_equal(got, NUMBERS.reshape(2, 2, 128)[:, ::-1].reshape(-1) + np.float32(1))


@pytest.mark.parametrize("fault, kind, texts", [
    ({"fence": ""}, "sim-proxy", ("fence_proxy_async",)),
    ({"parity": "1"}, "sim-uninitialized", ("R",)),
    ({"last": ""}, "sim-async", ("may end while a copy reads its shared memory",)),
    ({"nbytes": 496}, "sim-barrier", ("16 bytes more than expected",)),
    ({"late_write": "S[tx] = T.float32(0.0)"}, "sim-race", ("may still be reading",)),
    ({"wait": False}, "sim-async", ("may end while a copy",)),
])
def test_planted_fault_of_a_bulk_copy_between_blocks_is_found(fault, kind, texts):
    refused(send(**fault), [NUMBERS, np.zeros(512, np.float32)], kind, *texts)


def test_a_block_that_ends_before_a_multicast_into_it_is_done():
    body = f"""
{alloc("S", (64,), "float32", "shared.dyn")}
{init({"bar": [1]}, sync=MEET)}
rank: T.int32 = {RANK}
if tx == 0:
    {do("mbarrier_arrive_expect_tx", addr("bar[0]"), 256)}
{MEET}
if rank == 0:
    if tx == 0:
        {do("tma_load", addr("S[0]"), addr("bar[0]"), "0", "0", "T.uint16(3)", map="Am", multicast=True)}
    {do("mbarrier_wait", addr("bar[0]"), 0)}
"""
    f = program({"A": ((8, 8), "float32")}, body, grid="2", threads=128,
                launch_plan=cluster(2) + ", " + maps(("Am", "A", (8, 8), 0)))
    refused(f, [np.zeros((8, 8), np.float32)], "sim-async", "block (1) ends while a copy that signals bar[0] of block (1)")
