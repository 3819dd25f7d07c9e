"""A loop over tiles that the program wrote took 0.86 to 0.95 of the speed of the same tiles as a grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hopper_lowered import lowered

import tilelang.language as T
from tilelang.ir import Launch, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.framework.pass_ import PassContext, run_passes
from tilelang.transform.legalize import blocks_of_tiles as module
from tilelang.transform.legalize.blocks_of_tiles import blocks_of_tiles
from tilelang.transform.pipeline import legalized

M, N, K, BLOCKS = 320, 200, 64, 4


@pytest.fixture(autouse=True)
def few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks fill a GPU."""
    whole = module._of_launch
    monkeypatch.setattr(module, "_of_launch", lambda n, sms: whole(n, 4))


@T.macro
def multiply(A: Any, B: Any, a: Any, b: Any, c: Any, y: Any, x: Any) -> None:
    for k in T.Pipelined(K // 32, num_stages=2):
        T.copy(A[y * 64, k * 32], a)
        T.copy(B[x * 64, k * 32], b)
        T.gemm(a, b, c, transpose_B=True)


def waves(form: str, blocks: int = BLOCKS) -> Any:
    """Tiles of 64 x 64 in waves of so many blocks."""
    columns, tiles = -(-N // 64), -(-N // 64) * (M // 64)

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((N, K), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(blocks, threads=128) as block:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            if form == "carried":
                T.clear(c)
            if form == "persistent":
                for y, x in T.Persistent([T.ceildiv(M, 64), columns], blocks, block, 2):
                    T.clear(c)
                    multiply(A, B, a, b, c, y, x)
                    T.copy(c, C[y * 64, x * 64])
            elif form == "left":
                for wave in T.serial(T.ceildiv(tiles, blocks)):
                    if wave * blocks + block >= tiles:
                        T.loop_break()
                    T.clear(c)
                    multiply(A, B, a, b, c, (wave * blocks + block) // columns, (wave * blocks + block) % columns)
                    T.copy(c, C[(wave * blocks + block) // columns * 64, (wave * blocks + block) % columns * 64])
            else:
                for wave in T.serial(T.ceildiv(tiles, blocks)):
                    tile = wave * blocks + block if form != "turned" else block * T.ceildiv(tiles, blocks) + wave
                    if tile < tiles:
                        if form != "carried":
                            T.clear(c)
                        multiply(A, B, a, b, c, tile // columns, tile % columns)
                        T.copy(c, C[tile // columns * 64, tile % columns * 64])

    return main


def rows_of_tiles(serial: bool = True) -> Any:
    """A block computes two tiles of a row."""
    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((N, K), "float16"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(2, M // 64, threads=128) as (bx, by):
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for half in (T.serial(2) if serial else T.Pipelined(2, num_stages=1)):
                T.clear(c)
                multiply(A, B, a, b, c, by, 2 * bx + half)
                T.copy(c, C[by * 64, (2 * bx + half) * 64])

    return main


def updated() -> Any:
    """An iteration reads what an earlier one wrote to global memory."""
    @T.prim_func
    def main(A: T.Tensor((256, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(4, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for step in T.serial(3):
                T.clear(c)
                for _k in T.Pipelined(1, num_stages=2):
                    T.copy(A[step * 64, 0], a)
                    T.copy(B, b)
                    T.gemm(a, b, c)
                T.copy(c, A[step * 64 + 64, 0])

    return main


def launch_of(program: Any) -> Launch:
    target = Target({"kind": "cuda", "arch": "sm_90a"})
    (launch,) = walk(run_passes(legalized(program.func, target), (blocks_of_tiles,), PassContext(target)), Launch)
    return launch


def grid_of(program: Any) -> list[int]:
    return [e.value for e in launch_of(program).grid]


def agree(program: Any) -> None:
    rng = np.random.default_rng(1)
    values = {b.name: rng.integers(-3, 4, b.shape).astype(str(b.dtype)) for b in program.buffer_map.values()}
    expected, found = run_tile(program, values), run_device(lowered(program, resize_blocks=True), values).outputs
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("form, grid", [("guard", [4, 5]), ("persistent", [4, 5]), ("turned", [4, 5])])
def test_a_loop_over_tiles_ran_in_fewer_blocks(form: str, grid: list[int]):
    program = waves(form)
    assert grid_of(program) == grid
    assert "is a block" in launch_of(program).plan.report[-1]
    agree(program)


def test_tiles_of_a_row_ran_one_after_another():
    assert grid_of(rows_of_tiles()) == [4, 5]
    agree(rows_of_tiles())


@pytest.mark.parametrize("program, grid", [
    (waves("carried"), [4]), (waves("left"), [4]), (waves("guard", 3), [3]), (updated(), [4]), (rows_of_tiles(False), [2, 5])])
def test_loops_that_a_grid_cannot_replace_stay(program: Any, grid: list[int]):
    """Sums that go on, a break, fewer blocks than SMs, tiles that others wrote, and loops that the program pipelines."""
    assert grid_of(program) == grid


def one_after_another(form: str) -> Any:
    """Tiles of a block that depend on each other's order, or that no formula of a tile's number describes."""
    @T.prim_func
    def main(A: T.Tensor((768, K), "float16"), B: T.Tensor((256, K), "float16"), C: T.Tensor((768, 64), "float32"),
             last: T.Tensor((4,), "int32")):
        with T.Kernel(1, 4, threads=128) if form == "row" else T.Kernel(4, threads=128) as block:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            y = block[1] if form == "row" else block
            for wave in T.serial(T.ceildiv(10 - y, 4) if form == "unequal" else 3):
                tile = y * 3 + wave if form == "unequal" else wave * 4 + y
                T.clear(c)
                multiply(A, B, a, b, c, y if form == "row" else tile, wave if form == "row" else 0)
                if form == "remainder":
                    T.copy(c, C[tile % 4 * 64, 0])
                elif form == "shifted":
                    for i, j in T.Parallel(64, 64):
                        C[tile * 32 + i, j] = c[i, j]
                elif form == "row":
                    last[y] = wave
                else:
                    T.copy(c, C[tile * 64, 0])

    return main


@pytest.mark.parametrize("form", ["remainder", "row", "unequal"])
def test_tiles_whose_order_counts_ran_at_the_same_time(form: str):
    """The last tile of a block stays in an element; or a block has an iteration less, and its tiles are neighbours: tile 8 of
    ten was computed, which is none, in place of tile 10."""
    program = one_after_another(form)
    assert len(grid_of(program)) == 1 + (form == "row") and grid_of(program)[-1] == 4
    agree(program)


def test_tiles_that_overlap_stay_in_order():
    assert grid_of(one_after_another("shifted")) == [4]


def test_a_grid_had_more_rows_than_a_gpu_starts():
    """The second number of a grid is 65,535 at most."""
    @T.prim_func
    def main(A: T.Tensor((66000 * 64, 32), "float16"), B: T.Tensor((128, 32), "float16"),
             C: T.Tensor((66000 * 64, 128), "float16")):
        with T.Kernel(132, threads=128) as block:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for wave in T.serial(1000):
                tile = wave * 132 + block
                T.clear(c)
                for k in T.Pipelined(1, num_stages=2):
                    T.copy(A[tile // 2 * 64, k * 32], a)
                    T.copy(B[tile % 2 * 64, k * 32], b)
                    T.gemm(a, b, c, transpose_B=True)
                T.copy(c, C[tile // 2 * 64, tile % 2 * 64])

    assert grid_of(main) == [132]
