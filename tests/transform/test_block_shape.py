"""Blocks had the rows, columns and warp groups that the program wrote, also where wgmma could not use them.

Groups beyond the blocks of 64 rows of a GEMM took wgmma, or whole rows, away from all of them.  Accumulators of 256 x 256
spilled or did not compile.  Blocks of 64 rows loaded what their neighbours loaded too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.ir import Launch, walk
from tilelang.layout import make_swizzled_layout
from tilelang.ops import Gemm
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize import block_shape as block_shape_module
from tilelang.transform.legalize.block_shape import block_shape
from tilelang.transform.pipeline import legalized


def product(threads: int, bm: int = 128, bn: int = 128, tells: str = "", columns: int = 150,
            depth: int = 96) -> Any:
    @T.prim_func
    def main(A: T.Tensor((200, depth), "float16"), B: T.Tensor((columns, depth), "float16"),
             C: T.Tensor((200, columns), "float32"), count: T.Tensor((1,), "int32")):
        with T.Kernel(T.ceildiv(columns, bn), T.ceildiv(200, bm), threads=threads) as (bx, by):
            a, b = T.alloc_shared((bm, 64), "float16"), T.alloc_shared((bn, 64), "float16")
            c = T.alloc_fragment((bm, bn), "float32")
            if tells == "layout":
                T.annotate_layout({a: make_swizzled_layout(a)})
            T.clear(c)
            for k in T.Pipelined(T.ceildiv(depth, 64), num_stages=2):
                T.copy(A[by * bm, k * 64], a)
                T.copy(B[bx * bn, k * 64], b)
                T.gemm(a, b, c, transpose_B=True)
            if tells == "thread":
                if T.get_thread_binding() == 0:
                    count[0] = 1
            if tells == "atomic":
                T.atomic_add(count[0], 1)
            T.copy(c, C[by * bm, bx * bn])

    return main


def rows(threads: int) -> Any:
    """Attention of 128 rows: a maximum of each row stands between its GEMMs."""
    @T.prim_func
    def main(A: T.Tensor((128, 64), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(1, threads=threads):
            a, b = T.alloc_shared((128, 64), "float16"), T.alloc_shared((64, 64), "float16")
            s, p = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128, 64), "float16")
            o, m = T.alloc_fragment((128, 64), "float32"), T.alloc_fragment((128,), "float32")
            T.copy(A, a)
            T.clear(o)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                T.reduce_max(s, m, dim=1)
                for i, j in T.Parallel(128, 64):
                    p[i, j] = s[i, j] - m[i]
                T.gemm(p, b, o)
            T.copy(o, C)

    return main


def shaped(program: Any) -> Launch:
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    (launch,) = walk(run_passes(legalized(program.func, target), (block_shape,), PassContext(target)), Launch)
    return launch


def threads_of(program: Any) -> int:
    return shaped(program).num_threads


def agree(program: Any) -> None:
    rng = np.random.default_rng(1)
    given = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    expected, found = run_tile(program, given), run_device(lowered(program, resize_blocks=True), given).outputs
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("threads, bm, bn, groups", [
    (384, 128, 128, 2), (512, 128, 128, 2), (512, 128, 64, 2), (384, 64, 128, 1), (512, 256, 64, 4), (384, 192, 64, 3),
    (256, 128, 128, 2), (256, 64, 128, 2)])
def test_groups_are_as_many_as_have_rows(threads: int, bm: int, bn: int, groups: int):
    assert threads_of(product(threads, bm, bn)) == groups * 128


@pytest.mark.parametrize("tells", ["thread", "layout", "atomic"])
def test_a_program_that_could_tell_keeps_its_threads(tells: str):
    assert threads_of(product(512, tells=tells)) == 512


@pytest.mark.parametrize("threads, bm, bn, now", [(256, 256, 256, 256), (512, 256, 256, 256), (256, 128, 512, 256),
                                                  (512, 128, 512, 256)])
def test_accumulators_that_fit_no_block_are_halved(threads: int, bm: int, bn: int, now: int):
    program = product(threads, bm, bn)
    launch = shaped(program)
    assert launch.num_threads == now and all(op.m * op.n <= 128 * 256 for op in walk(launch.body, Gemm))
    assert "does not fit in the registers" in launch.plan.report[0]


def sums(bm: int, bn: int, threads: int, m: int, n: int, k: int = 64) -> Any:
    """An epilogue that names columns and rows of the whole tensor, an unequal last block, and a row's maximum."""
    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), bias: T.Tensor((n,), "float32"),
             C: T.Tensor((m, n), "float32"), R: T.Tensor((m, T.ceildiv(n, bn)), "float32")):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (bx, by):
            a, b = T.alloc_shared((bm, 32), "float16"), T.alloc_shared((bn, 32), "float16")
            c, r = T.alloc_fragment((bm, bn), "float32"), T.alloc_fragment((bm,), "float32")
            T.clear(c)
            for step in T.Pipelined(k // 32, num_stages=2):
                T.copy(A[by * bm, step * 32], a)
                T.copy(B[bx * bn, step * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                c[i, j] = T.if_then_else(bx * bn + j < n, c[i, j] + bias[bx * bn + j], 0.0) + T.cast(by * bm + i, "float32")
            T.reduce_max(c, r, dim=1)
            for i in T.Parallel(bm):
                if by * bm + i < m:
                    R[by * bm + i, bx] = r[i]
            T.copy(c, C[by * bm, bx * bn])

    return main


def causal(rows: int, threads: int) -> Any:
    """The number of steps depends on the block: two blocks of it are no block of twice the rows."""
    @T.prim_func
    def main(A: T.Tensor((256, 64), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((256, 64), "float32")):
        with T.Kernel(256 // rows, threads=threads) as by:
            a, b = T.alloc_shared((rows, 64), "float16"), T.alloc_shared((64, 64), "float16")
            s, p = T.alloc_fragment((rows, 64), "float32"), T.alloc_fragment((rows, 64), "float16")
            o = T.alloc_fragment((rows, 64), "float32")
            T.copy(A[by * rows, 0], a)
            T.clear(o)
            for k in T.Pipelined(T.ceildiv((by + 1) * rows, 64), num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, 64):
                    p[i, j] = T.if_then_else(by * rows + i >= k * 64 + j, s[i, j], 0.0)
                T.gemm(p, b, o)
            T.copy(o, C[by * rows, 0])

    return main


def weighted(rows: int, threads: int) -> Any:
    """Two products of 128 columns, a maximum and a sum of each row: 161 registers of fragments in a thread of 64 rows."""
    @T.prim_func
    def main(A: T.Tensor((384, 128), "float16"), B: T.Tensor((128, 128), "float16"), C: T.Tensor((384, 128), "float32"),
             R: T.Tensor((384,), "float32")):
        with T.Kernel(384 // rows, threads=threads) as by:
            a, c = T.alloc_shared((rows, 128), "float16"), T.alloc_shared((128, 128), "float16")
            s, p = T.alloc_fragment((rows, 128), "float32"), T.alloc_fragment((rows, 128), "float16")
            o = T.alloc_fragment((rows, 128), "float32")
            top, total = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
            T.copy(A[by * rows, 0], a)
            T.clear(o)
            for _ in T.Pipelined(1, num_stages=2):
                T.copy(B, c)
                T.gemm(a, c, s, transpose_B=True, clear_accum=True)
                T.reduce_max(s, top, dim=1)
                T.reduce_sum(s, total, dim=1)
                for i, j in T.Parallel(rows, 128):
                    p[i, j] = s[i, j] - top[i] + T.cast(by * rows + i, "float32")
                T.gemm(p, c, o)
            for i in T.Parallel(rows):
                R[by * rows + i] = total[i]
            T.copy(o, C[by * rows, 0])

    return main


def test_blocks_of_three_groups_had_no_registers_for_what_they_hold():
    launch = shaped(weighted(192, 384))
    assert launch.num_threads == 256 and launch.grid[0].value == 3
    assert "cannot hold 161 registers" in launch.plan.report[-1]
    agree(weighted(192, 384))


@pytest.fixture
def full_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids of few blocks count as large ones."""
    monkeypatch.setattr(block_shape_module, "_blocks", lambda n: 2**20 * all(e.value % 2 == 0 for e in n.grid if e.value > 1))


@pytest.mark.parametrize("bm, bn, threads, m, n, grid, now", [
    (64, 128, 128, 256, 130, (2, 2), 256), (64, 64, 128, 256, 250, (4, 2), 256), (128, 64, 256, 256, 250, (4, 2), 256)])
def test_two_blocks_that_read_the_same_tiles_become_one(full_grid, bm, bn, threads, m, n, grid, now):
    launch = shaped(sums(bm, bn, threads, m, n))
    assert (tuple(e.value for e in launch.grid), launch.num_threads) == (grid, now)


def test_columns_of_two_blocks_become_those_of_one(full_grid):
    launch = shaped(product(256, 128, 64, columns=256))
    assert ([e.value for e in launch.grid], launch.num_threads) == ([1, 2], 256)  # twice: they become wide too


def test_blocks_with_loops_of_their_own_stay_apart(full_grid):
    assert shaped(causal(64, 128)).grid[0].value == 4


def test_a_small_grid_gets_blocks_of_half_the_columns():
    assert [e.value for e in shaped(product(256, depth=512)).grid] == [4, 2]
    assert [e.value for e in shaped(product(256)).grid] == [2, 2]


def test_a_block_that_reads_what_it_wrote_is_not_halved():
    """The other half would be read from the tensor before its block wrote it."""
    @T.prim_func
    def main(A: T.Tensor((256, 64), "float16"), W: T.Tensor((256, 256), "float32"), C: T.Tensor((256, 256), "float32")):
        with T.Kernel(1, threads=256):
            a, c = T.alloc_shared((256, 64), "float16"), T.alloc_fragment((256, 256), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, transpose_B=True, clear_accum=True)
            T.copy(c, W)
            for i, j in T.Parallel(256, 256):
                C[i, j] = W[255 - i, j]

    assert shaped(main).grid[0].value == 1


def test_what_is_written_once_a_block_keeps_the_columns():
    assert [e.value for e in shaped(sums(128, 128, 256, 256, 256)).grid] == [2, 2]


def carried(decays: bool) -> Any:
    """A state of 128 x 128, beside a tile of its update, which the threads scale or not."""
    @T.prim_func
    def main(K: T.Tensor((128, 128), "float16"), V: T.Tensor((128, 128), "float16"), G: T.Tensor((128,), "float16"),
             C: T.Tensor((128, 128), "float32")):
        with T.Kernel(1, threads=128):
            k, v = T.alloc_shared((64, 128), "float16"), T.alloc_shared((64, 128), "float16")
            kd, held = T.alloc_shared((64, 128), "float16"), T.alloc_shared((128, 128), "float16")
            state, o = T.alloc_fragment((128, 128), "float32"), T.alloc_fragment((64, 128), "float32")
            sums = T.alloc_fragment((64, 128), "float32")
            T.clear(state)
            T.clear(sums)
            for c in T.Pipelined(2, num_stages=2):
                T.copy(K[c * 64, 0], k)
                T.copy(V[c * 64, 0], v)
                T.copy(state, held)
                T.gemm(k, held, o, clear_accum=True)
                for i, j in T.Parallel(64, 128):
                    sums[i, j] += o[i, j]
                if decays:
                    for i, j in T.Parallel(64, 128):
                        kd[i, j] = k[i, j] * G[c * 64 + i]
                T.gemm(kd if decays else k, v, state, transpose_A=True)
            for i, j in T.Parallel(64, 128):
                C[i, j] = sums[i, j]
                C[i + 64, j] = o[i, j]

    return main


@pytest.mark.parametrize("decays", [True, False])
def test_a_warp_group_without_registers_for_what_it_makes_gets_a_second(decays: bool):
    """A state of 128 x 128 filled the registers of one group, and retention ran at 0.7 of the speed of 256 threads."""
    assert threads_of(carried(decays)) == 128 * (1 + decays)
    agree(carried(decays))


MADE = {"a": [1, 2], "in place": [1, 2], "b": [2, 1], "b by copies": [2, 1]}  # and the grid of two by two blocks


def made(which: str, m: int = 250, n: int = 250, steps: int = 3, bk: int = 32, bm: int = 128) -> Any:
    """C = f(A) g(B)^T, of which threads make A, change it in place, or make B."""
    k = steps * bk

    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "int8"), V: T.Tensor((k,), "float16"),
             C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 128), T.ceildiv(m, bm), threads=256) as (bx, by):
            a, q = T.alloc_shared((bm, bk), "float16"), T.alloc_shared((128, bk), "int8")
            h, f = T.alloc_shared((128, bk), "float16"), T.alloc_fragment((128, bk), "float16")
            u, w = T.alloc_fragment((128, bk), "int8"), T.alloc_fragment((128, bk), "float16")
            c = T.alloc_fragment((bm, 128), "float32")
            T.clear(c)
            for step in T.Pipelined(steps, num_stages=2):
                T.copy(A[by * bm, step * bk], a)
                if which == "b":
                    T.copy(B[bx * 128, step * bk], q)
                    for i, j in T.Parallel(128, bk):
                        h[i, j] = T.cast(q[i, j], "float16") * V[step * bk + j]
                    T.gemm(a, h, c, transpose_B=True)
                elif which == "b by copies":
                    T.copy(B[bx * 128, step * bk], q)
                    T.copy(q, u)
                    for i, j in T.Parallel(128, bk):
                        w[i, j] = T.cast(u[i, j], "float16")
                    T.copy(w, h)
                    T.gemm(a, h, c, transpose_B=True)
                else:
                    T.copy(A[bx * 128, step * bk], h)
                    for i, j in T.Parallel(128, bk):
                        if which == "gathered":
                            a[i, j] = A[127 - i, step * bk + j]
                        elif which == "a":
                            f[i, j] = a[i, j] * V[step * bk + j]
                        else:
                            a[i, j] = a[i, j] * T.cast(by * 128 + i < 200, "float16")
                    T.gemm(f if which == "a" else a, h, c, transpose_B=True)
            T.copy(c, C[by * bm, bx * 128])

    return main


@pytest.mark.parametrize("which", MADE)
def test_an_operand_that_threads_make_is_made_for_two_blocks_at_once(full_grid, which: str):
    """Each of two neighbours converted the same weights, which took longer than their GEMMs."""
    launch = shaped(made(which))
    assert ([e.value for e in launch.grid], launch.num_threads) == (MADE[which], 256)
    assert any("make the other operand once" in x for x in launch.plan.report)


@pytest.mark.parametrize("which", ["b", "gathered", "narrow"])
def test_blocks_without_room_or_without_made_operands_are_not_joined(full_grid, which: str):
    """Short rows that threads gather are limited by their loads: joined they took a fifth longer. An SM runs several small
    blocks."""
    if which == "narrow":
        assert [e.value for e in shaped(made("b", m=128, bm=64)).grid] == [2, 2]
        return
    deep = 128 if which == "b" else 32
    assert [e.value for e in shaped(made(which, steps=2, bk=deep)).grid] == [2, 2]


@pytest.mark.parametrize("threads, bm, bn, depth, grid", [
    (256, 128, 128, 96, [1, 2]),  # 128 x 256: three quarters of the bytes
    (256, 128, 128, 93, [2, 2]),  # rows that TMA does not load
    (256, 128, 256, 96, [1, 2]), (512, 256, 128, 96, [2, 1])])  # an accumulator has 128 registers of a thread already
def test_blocks_whose_tiles_tma_loads_become_wide(full_grid, threads: int, bm: int, bn: int, depth: int, grid: list[int]):
    """Blocks of 128 x 128 reached 0.92 of the speed of 128 x 256."""
    assert [e.value for e in shaped(product(threads, bm, bn, columns=256, depth=depth)).grid] == grid


def test_transposed_operands_keep_their_blocks(full_grid):
    """Their loads through registers are the limit: float8 NN took 5 % longer in wide blocks."""
    @T.prim_func
    def main(A: T.Tensor((256, 128), "float8_e4m3fn"), B: T.Tensor((128, 256), "float8_e4m3fn"),
             C: T.Tensor((256, 256), "float32")):
        with T.Kernel(2, 2, threads=256) as (bx, by):
            a, b = T.alloc_shared((128, 64), "float8_e4m3fn"), T.alloc_shared((64, 128), "float8_e4m3fn")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 128, k * 64], a)
                T.copy(B[k * 64, bx * 128], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 128, bx * 128])

    assert [e.value for e in shaped(main).grid] == [2, 2]


CASES = [product(256, columns=256), *(made(x, 256, 256) for x in MADE), sums(256, 256, 256, 300, 260),
         sums(256, 256, 512, 300, 260),
         sums(128, 512, 256, 130, 520), sums(64, 128, 128, 256, 130), sums(64, 64, 128, 256, 250),
         product(256, 128, 64, columns=256), product(256, depth=512), sums(128, 128, 128, 200, 130), causal(256, 256),
         causal(64, 128)]


@pytest.mark.parametrize("program", CASES)
@pytest.mark.parametrize("large", [False, True])
def test_resized_blocks_compute_every_element(program: Any, large: bool, request: pytest.FixtureRequest):
    if large:
        request.getfixturevalue("full_grid")
    agree(program)


def test_rows_of_a_maximum_stay_in_one_group_and_the_report_says_so():
    assert threads_of(rows(512)) == 256
    launch = lowered(rows(512), resize_blocks=True).kernels[0].launch
    assert any("threads=256 instead of 512" in line for line in launch.plan.report)


@pytest.mark.parametrize("program", [product(384), product(512, bn=64), product(384, 64, 128), rows(384), rows(512)])
def test_results_are_those_of_the_interpreter(program: Any):
    agree(program)


def test_joined_blocks_that_do_not_fit_in_shared_memory_were_an_error():
    """Two blocks whose first operand stays in shared memory need twice as much of it."""
    @T.prim_func
    def main(A: T.Tensor((4096, 1024), "float16"), B: T.Tensor((1024, 1024), "float16"), C: T.Tensor((4096, 1024), "float16")):
        with T.Kernel(16, 64, threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 1024), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            T.copy(A[by * 64, 0], a)
            for s in T.Pipelined(16, num_stages=2):
                T.copy(B[bx * 64, s * 64], b)
                T.gemm(a[:, s * 64:s * 64 + 64], b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    (kernel,) = lowered(main, resize_blocks=True).kernels
    assert "compiled without blocks and steps of another size" in " ".join(kernel.launch.plan.report)
