"""Blocks of a large grid that few resident blocks run in turn (transform/schedule/resident_blocks.py)."""

import numpy as np
import pytest

import tilelang
import tilelang.language as T

TARGETS = [{"kind": "cuda", "arch": "sm_80"}, {"kind": "cuda", "arch": "sm_90a"}]


def counts(dtype="int32", first=0, own=False, other=False, early=False, at_counts=False):
    """Counts that all blocks add to the same elements, in a grid of 5 x 2 blocks."""
    @T.prim_func
    def f(X: T.Tensor((10, 64), "uint8"), Y: T.Tensor((2, 16), dtype)):
        with T.Kernel(5, 2, threads=64) as (bx, by):
            c = T.alloc_shared((16,), dtype)
            d = T.alloc_shared((16,), dtype)
            if early:
                T.clear(c)
                for i in T.Parallel(16):
                    T.atomic_add(c[i], 1)
            T.fill(c, first)
            T.fill(d, 1)
            for i in T.Parallel(64):
                T.atomic_add(c[X[by * 5 + bx, i] % 16], T.cast(i, dtype))
            if other:
                T.copy(c, d)
            if at_counts:
                for i in T.Parallel(16):
                    T.atomic_add(Y[1, c[i] % 16], c[i])
            else:
                T.atomic_add(Y[by if own else 1, 0], c)

    return f


def written_out(n=600, weight=1):
    """Counts with a guard, and with loops in place of T.clear and of the last T.atomic_add; rows of 64 are added in a loop."""
    @T.prim_func
    def f(X: T.Tensor((n,), "uint8"), Y: T.Tensor((16,), "int32")):
        with T.Kernel(10, threads=64) as b:
            c = T.alloc_shared((16,), "int32")
            for i in T.Parallel(16):
                c[i] = 0
            one = T.alloc_var("int32", init=1)
            for k in T.serial(2):
                for i in T.Parallel(32):
                    if b * 64 + k * 32 + i < n:
                        T.atomic_add(c[X[b * 64 + k * 32 + i] % 16], one)
                one = one + 1
            for i in T.Parallel(16):
                T.atomic_add(Y[i], c[i] * weight if weight > 1 else c[i])

    return f


def run(program, target, config, *inputs):
    arrays = [x.copy() for x in inputs]
    kernel = tilelang.compile(program, target=target, execution_backend="simulator" if target != "cpu" else "tile",
                              pass_configs=config)
    kernel(*arrays)
    return arrays, kernel.report_data["kernels"][0]["grid"] if target != "cpu" else None


def agree(program, config, blocks, *inputs):
    """Simulators give what the reference interpreter gives; on sm_90a in so many blocks."""
    want, _ = run(program, "cpu", None, *inputs)
    for target in TARGETS:
        got, grid = run(program, target, config, *inputs)
        for a, b in zip(got, want):
            np.testing.assert_array_equal(a, b)
    assert grid == blocks


def test_every_block_added_its_counts_to_global_memory():
    x = np.random.default_rng(0).integers(0, 256, (10, 64)).astype(np.uint8)
    agree(counts(), {"tl.persistent": 3}, [3], x, np.full((2, 16), 2**31 - 9000, np.int32))  # which wraps


@pytest.mark.parametrize("why, options", [
    ("sums of floats have an order", {"dtype": "float32"}), ("each block adds the first value", {"first": 1}),
    ("blocks add to different elements", {"own": True}), ("the tile is read", {"other": True}),
    ("some are added before it is cleared", {"early": True}), ("counts say where they are added", {"at_counts": True})])
def test_counts_that_each_block_adds_itself(why, options):
    x = np.random.default_rng(0).integers(0, 256, (10, 64)).astype(np.uint8)
    agree(counts(**options), {"tl.persistent": 3}, [5, 2], x, np.zeros((2, 16), options.get("dtype", "int32")))


def test_small_grids_keep_their_blocks():
    agree(counts(), None, [5, 2], np.zeros((10, 64), np.uint8), np.zeros((2, 16), np.int32))


@pytest.mark.parametrize("weight, blocks", [(1, 2), (3, 10)])
def test_counts_in_loops_with_a_guard_were_added_by_every_block(weight, blocks):
    x = np.random.default_rng(0).integers(0, 256, 600).astype(np.uint8)
    agree(written_out(weight=weight), {"tl.persistent": 2}, [blocks], x, np.zeros(16, np.int32))
