"""Sums that are promoted after each GEMM, in blocks that go from tile to tile."""

import random
import re

import numpy as np
import pytest
from test_prefetch_scales import compiled, inputs, scaled, verdict, wanted

import tilelang.language as T
from tilelang.codegen.cuda.printer import print_kernel
from tilelang.runtime import nvrtc
from tilelang.simulator import coroutines, run_device


def tiles(count, steps, stages=3, persistent=2, **more):
    o = {"m": 64 * count, "n": 256, "k": 128 * steps, "bn": 256, "stages": stages, "columns": 12, **more}
    x = inputs(m=o["m"], n=256, k=o["k"], bm=o.get("bm", 64), columns=12)
    return compiled(scaled(**o), **{"tl.persistent": persistent}), x


@pytest.mark.parametrize("count, steps, stages, persistent", [
    (4, 6, 3, 2), (5, 4, 3, 2),  # blocks of as many tiles, of one more
    (7, 5, 3, 3), (5, 7, 2, 2), (3, 9, 4, 2),  # tiles that start in other stages of the rings
    (6, 2, 3, 2),  # no step between the first and the last
])
def test_every_tile_has_its_own_sums(count, steps, stages, persistent):
    low, x = tiles(count, steps, stages, persistent)
    assert verdict(low).startswith("ordered:")
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def test_blocks_of_one_tile_and_of_none():
    """Two tiles for three blocks asked for: each has one, which no other follows."""
    low, x = tiles(2, 4, persistent=3)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


class AnyOrder(list):
    """Parts of a block that are asked in another order each time whether they can go on."""

    def __init__(self, parts, rng):
        super().__init__(parts)
        self.rng = rng

    def __iter__(self):
        return iter(self.rng.sample(list(super().__iter__()), len(self)))


@pytest.mark.parametrize("count, persistent", [(1, 1), (2, 1), (3, 1), (5, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_warps_in_any_order(count, persistent, seed, monkeypatch):
    """Two groups that compute and one that loads: each waits often, and whoever can go on does so by chance."""
    rng, real = random.Random(seed), coroutines.Scheduler.__init__
    monkeypatch.setattr(coroutines.Scheduler, "__init__", lambda self, parts: real(self, AnyOrder(parts, rng)))
    low, x = tiles(count, 5, 4, persistent, m=128 * count, bm=128, threads=256)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x, bm=128))


def test_a_tile_of_one_step():
    low, x = tiles(5, 1)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


@pytest.mark.parametrize("counts, steps", [("by", [0, 1, 2, 3, 4]), ("read", [5, 0, 1, 2, 4])])
def test_tiles_of_unequal_lengths(counts, steps):
    low, x = tiles(5, 6, counts=counts)
    x["N"] = np.array(steps, np.int32)
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x, counts=steps))


def test_sums_without_anything_filled_ahead():
    low, x = tiles(4, 6, where="nowhere")
    x["S"][:] = 1
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x))


def shared_scale(m=256, n=256, k=512):
    """The scales that a step fills lie where the tile's end reads them."""

    @T.prim_func
    def main(A: T.Tensor((m, k), "float8_e4m3fn"), B: T.Tensor((n, k), "float8_e4m3fn"), S: T.Tensor((m, k // 128), "float32"),
             C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 256), T.ceildiv(m, 64), threads=128) as (bx, by):
            As, Bs = T.alloc_shared((64, 128), "float8_e4m3fn"), T.alloc_shared((256, 128), "float8_e4m3fn")
            part, total = T.alloc_fragment((64, 256), "float32"), T.alloc_fragment((64, 256), "float32")
            row = T.alloc_fragment((64,), "float32")
            T.clear(total)
            for ko in T.Pipelined(k // 128, num_stages=3):
                T.copy(A[by * 64, ko * 128], As)
                T.copy(B[bx * 256, ko * 128], Bs)
                for i in T.Parallel(64):
                    row[i] = S[by * 64 + i, ko]
                T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(64, 256):
                    total[i, j] += part[i, j] * row[i]
            for i, j in T.Parallel(64, 256):
                total[i, j] += row[i]  # of the last step
            T.copy(total, C[by * 64, bx * 256])

    return main


def test_what_the_end_of_a_tile_reads_is_not_filled_for_the_next_one():
    low = compiled(shared_scale(), **{"tl.persistent": 2})
    x = inputs(m=256, n=256, k=512)
    del x["N"]
    assert np.array_equal(run_device(low, x).outputs["C"], wanted(x) + x["S"][:, -1:])


@pytest.mark.skipif(not nvrtc.available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("more", [{}, {"stages": 3}, {"k": 8192}, {"k": 384}])
def test_nothing_is_serialised_or_spilt(more):
    o = {"m": 4096, "n": 4096, "k": 4096, "bm": 128, "bn": 256, "threads": 256, "stages": 4, **more}
    low = compiled(scaled(**o))
    cubin = nvrtc.compile_cubin(print_kernel(low.kernels[0]), "sm_90a")
    assert cubin.spills == 0 and not re.findall(r"C75\d\d", cubin.log), cubin.log
