"""exchanged_tiles: tiles whose elements parallel loops exchange stay in registers."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from pass_steps import SM90A, around

import tilelang
import tilelang.language as T
from tilelang.ir import Parallel, walk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import WITH_HOPPER, everywhere


@T.macro
def _step(src, dst, k, rows, n):
    for r, i in T.Parallel(rows, n):
        other = src[r, i ^ (1 << k)]
        dst[r, i] = T.if_then_else((i >> k) % 2 == 0, src[r, i] + other, other - src[r, i])


def _steps(tiles, steps, rows, n):
    for k in range(steps):
        _step(tiles[k % 2], tiles[1 - k % 2], k, rows, n)


def in_two_tiles(m, n, rows=1, threads=128, dtype="float32", steps=0):
    """Steps by Python's loop from one shared tile to another; steps: only the first of them, for rows whose length is odd."""
    steps = steps or n.bit_length() - 1

    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=threads) as b:
            s, t = T.alloc_shared((rows, n), dtype), T.alloc_shared((rows, n), dtype)
            T.copy(X[b * rows, 0], s)
            _steps((s, t), steps, rows, n)
            T.copy((s, t)[steps % 2], Y[b * rows, 0])

    return main


def in_halves(m, n, threads=128):
    """Both elements of a pair by one iteration, in place, steps by a serial loop."""
    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=threads) as r:
            s = T.alloc_shared((n,), "float32")
            T.copy(X[r, 0], s)
            for k in T.serial(n.bit_length() - 1):
                h = 1 << k
                for p in T.Parallel(n // 2):
                    low = p // h * (2 * h) + p % h
                    u = s[low]
                    v = s[low + h]
                    s[low] = u + v
                    s[low + h] = u - v
            T.copy(s, Y[r, 0])

    return main


def in_a_fragment(m, n, threads=128):
    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=threads) as r:
            f = T.alloc_fragment((n,), "float32")
            T.copy(X[r, 0], f)
            for k in T.serial(n.bit_length() - 1):
                for i in T.Parallel(n):
                    f[i] = T.if_then_else((i & (1 << k)) == 0, f[i] + f[i ^ (1 << k)], f[i ^ (1 << k)] - f[i])
            T.copy(f, Y[r, 0])

    return main


def in_versions(m, n, threads=128):
    """The two tiles are rows of one; of each the first step reads what was written, and nothing else was."""
    steps = n.bit_length() - 1

    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=threads) as r:
            s = T.alloc_shared((2, n), "float32")
            for i in T.Parallel(n):
                s[0, i] = X[r, i]
            for k in T.unroll(steps):
                for i in T.Parallel(n):
                    s[(k + 1) % 2, i] = T.if_then_else((i >> k) % 2 == 0, s[k % 2, i] + s[k % 2, i ^ (1 << k)],
                                                       s[k % 2, i ^ (1 << k)] - s[k % 2, i])
            for i in T.Parallel(n):
                Y[r, i] = s[steps % 2, i]

    return main


def in_a_loop(m, n, threads=128):
    """One block for all rows; the result is read by another statement, and half of a tile is kept from row to row."""
    steps = n.bit_length() - 1

    @T.prim_func
    def main(X: T.Tensor((m, n), "float32"), Y: T.Tensor((m, n), "float32"), Z: T.Tensor((m,), "float32")):
        with T.Kernel(1, threads=threads):
            s, t = T.alloc_shared((1, n), "float32"), T.alloc_shared((1, n), "float32")
            kept, total = T.alloc_shared((1, n), "float32"), T.alloc_fragment((1,), "float32")
            T.clear(kept)
            for r in T.serial(m):
                T.copy(X[r, 0], s)
                _steps((s, t), steps, 1, n)
                for _, i in T.Parallel(1, n):
                    if i % 3 == 0:
                        kept[0, i] = kept[0, i] + (s, t)[steps % 2][0, i]
                T.copy((s, t)[steps % 2], Y[r, 0])
                T.reduce_sum(kept, total, dim=1)
                for i in T.Parallel(1):
                    Z[r] = total[i]

    return main


def transformed(x, steps):
    for k in range(steps):
        p = x.reshape(x.shape[0], -1, 2, 1 << k)
        x = np.stack([p[:, :, 0] + p[:, :, 1], p[:, :, 0] - p[:, :, 1]], 2).reshape(x.shape)
    return x


def whole_numbers(m, n):
    return np.random.default_rng(0).integers(-8, 8, (m, n)).astype(np.float32)


@pytest.mark.parametrize("program, m, n, barriers", [
    (in_two_tiles(2, 1024), 2, 1024, 3), (in_two_tiles(1, 2048, threads=256), 1, 2048, 3),
    (in_two_tiles(5, 512, rows=4), 5, 512, 2), (in_two_tiles(1, 512, threads=96), 1, 512, 2),
    (in_halves(1, 1024), 1, 1024, 3), (in_a_fragment(1, 1024), 1, 1024, 3), (in_versions(1, 1024), 1, 1024, 3)])
def test_each_step_of_a_transform_took_a_barrier_and_all_of_shared_memory(program, m, n, barriers):
    x = whole_numbers(m, n)
    assert np.array_equal(everywhere(program, x, on=WITH_HOPPER)[1], transformed(x, n.bit_length() - 1))
    text = tilelang.compile(program, target=SM90A).get_kernel_source()
    assert text.count("__syncthreads") <= barriers


@pytest.mark.parametrize("program, m, n, steps", [
    (in_two_tiles(1, 768, steps=8), 1, 768, 8), (in_two_tiles(1, 1024, dtype="float16"), 1, 1024, 10),
    (in_two_tiles(3, 64, threads=32), 3, 64, 6)])
def test_rows_of_other_lengths_and_types(program, m, n, steps):
    x = np.sign(whole_numbers(m, n) + 0.5)
    assert np.array_equal(everywhere(program, x, on=WITH_HOPPER)[1], transformed(x, steps))


def test_a_tile_that_other_statements_read_is_stored_after_the_steps():
    x = whole_numbers(3, 512)
    _, y, z = everywhere(in_a_loop(3, 512), x, on=WITH_HOPPER)
    want = transformed(x, 9)
    assert np.array_equal(y, want) and np.array_equal(z, np.cumsum(want[:, ::3].sum(1)))


def test_loops_that_exchange_nothing_stay():
    @T.prim_func
    def main(X: T.Tensor((256,), "float32"), Y: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=128):
            s, t = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            T.copy(X, s)
            for i in T.Parallel(256):
                t[i] = s[i] + 1
            for i in T.Parallel(256):
                s[i] = t[i] * 2
            T.copy(s, Y)

    before, after = around(main, "exchanged_tiles")
    assert after is before


def test_steps_in_registers_have_no_condition_and_no_local_memory():
    before, after = around(in_two_tiles(1, 1024), "exchanged_tiles")
    assert len([*walk(after.body, Parallel)]) == len([*walk(before.body, Parallel)]) + 6  # three exchanges
    text = tilelang.compile(in_two_tiles(1, 1024), target=SM90A).get_kernel_source()
    reads = re.findall(r"float other = \w+\[([^\]]*)\]", text)
    assert len(reads) == 10 and not any("tx" in x for x in reads)
    assert not re.search(r"\? .*tx|tx.* \?", text)
