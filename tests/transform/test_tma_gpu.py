"""Kernels whose results leave by TMA, compiled and called like a user's: on the simulator, and on a GPU where there is one."""

import numpy as np
import pytest
from programs import NP, gemm
from test_tma_copies import batched, in_two_steps, moved_in_a_loop, rows
from test_tma_stores import in_a_loop, split_k

import tilelang

SIMULATOR = ({"kind": "cuda", "arch": "sm_90a"}, "simulator")
PLACES = [pytest.param(SIMULATOR, id="simulator"), pytest.param(("cuda", None), id="gpu", marks=pytest.mark.gpu)]


def integers(shape, dtype="float16", low=-3, high=4, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(NP[dtype])


def call(program, place, arrays, times=3):
    """What is in the arrays after a call (on a GPU: after several)."""
    target, backend = place
    if target == "cuda":
        import torch

        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("sm_90a only")
    kernel = tilelang.compile(program, target=target, execution_backend=backend or "auto", out_idx=[],
                              pass_configs={"tl.enable_hopper": True})
    if target != "cuda":
        given = [a.copy() for a in arrays]
        kernel(*given)
        return given
    import torch

    def tensor(a):
        if a.dtype == NP["bfloat16"]:
            return torch.from_numpy(a.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(a).cuda()

    given = [tensor(a) for a in arrays]
    for _ in range(times):
        kernel(*given)
    return [x.view(torch.int16).cpu().numpy().view(NP["bfloat16"]) if x.dtype == torch.bfloat16 else x.cpu().numpy()
            for x in given]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("tile", [(128, 256, 256), (192, 160, 384), (64, 96, 128)])
def test_products(place, out, tile):
    bm, bn, threads = tile
    m, n, k = (2 * bm + 9, bn + 40, 200) if place is SIMULATOR else (20 * bm + 9, 10 * bn + 40, 1000)
    a, b = integers((m, k)), integers((k, n), seed=1)
    got = call(gemm(m=m, n=n, k=k, bm=bm, bn=bn, bk=64, threads=threads, stages=2, out=out), place,
               [a, b, np.zeros(n, np.float32), np.zeros((m, n), NP[out])])[3]
    want = a.astype(np.float32) @ b.astype(np.float32)
    assert np.array_equal(got.astype(np.float32), want.astype(NP[out]).astype(np.float32))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("through_shared", [False, True])
@pytest.mark.parametrize("out", ["float32", "float16"])
def test_sums(place, through_shared, out):
    a, b = integers((72, 128), low=-2, high=3), integers((128, 136), low=-1, high=2, seed=1)
    got = call(split_k(out, through_shared), place, [a, b, np.zeros((72, 136), NP[out])], times=1)[2]
    assert np.array_equal(got.astype(np.float32), a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("place", PLACES)
def test_tiles_of_shared_memory(place):
    a, b = integers((130, 64)), integers((64, 136), seed=1)
    got = call(in_two_steps(130, 136, 64, 128, 128, 256), place, [a, b, np.zeros((130, 136), np.float16)])[2]
    assert np.array_equal(got, (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))
    program, shape = batched(5)
    x = integers(shape)
    assert np.array_equal(call(program, place, [x, np.zeros_like(x)])[1], x)
    x = integers((64, 512))
    assert np.array_equal(call(moved_in_a_loop(), place, [x, np.zeros_like(x), np.zeros((64, 64), np.float16)])[1], x + 1)
    x = integers((6, 4096), "float32")
    assert np.array_equal(call(rows(), place, [x, np.zeros(6 * 4096, np.float32)])[1], x.reshape(-1) + 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bn", [64, 160])
def test_tiles_one_after_another(place, bn):
    a, b = integers((64, 64)), integers((64, 3 * bn), seed=1)
    got = call(in_a_loop(bn), place, [a, b, np.zeros((64, 3 * bn), np.float16)])[2]
    assert np.array_equal(got, (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16))
