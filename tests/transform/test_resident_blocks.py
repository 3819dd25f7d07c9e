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


def viewed(copied=False, view=None, dtype="int32", weight=1):
    """Counts in a tile that a copy starts, or that are added through a view of the tile."""
    @T.prim_func
    def f(X: T.Tensor((10, 64), "uint8"), Z: T.Tensor((16,), dtype), Y: T.Tensor((16,), dtype)):
        with T.Kernel(10, threads=64) as b:
            c = T.alloc_shared((16,), dtype)
            seen = T.view(c, *view) if view is not None else c
            if copied:
                T.copy(Z, c)
            else:
                T.clear(c)
            for i in T.Parallel(64):
                k = X[b, i] % 16
                if len(seen.shape) == 2:
                    T.atomic_add(seen[k // 4, k % 4], weight)
                else:
                    T.atomic_add(seen[k], weight)
            T.atomic_add(Y[0], c)

    return f


@pytest.mark.parametrize("options, blocks", [({"copied": True}, 10), ({"view": ((4, 4),)}, 3), (
    {"view": ((32,), "int32"), "dtype": "int64", "weight": 2**28}, 10)])
def test_tiles_copied_from_memory_were_cleared_and_views_got_indices_of_the_tile(options, blocks):
    """Halves of 64-bit counts wrap in each block."""
    x = np.random.default_rng(0).integers(0, 256, (10, 64)).astype(np.uint8)
    z = np.arange(16).astype(options.get("dtype", "int32"))
    agree(viewed(**options), {"tl.persistent": 3}, [blocks], x, z, np.zeros_like(z))
