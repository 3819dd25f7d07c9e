"""Where the tiles of products lie, and in which order blocks take them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tilelang.library.matmul_kernels import Form, gemm, gemm_split
from tilelang.library.tiles import Problem, Tile, chip_of, choose_tile
from tilelang.simulator import run_device
from tilelang.target import Target
from tilelang.transform.pipeline import lower

SM90 = Target({"kind": "cuda", "arch": "sm_90a"})
H200 = replace(chip_of(SM90), units=132)


def lined(m, n, k, order, **more):
    return Problem(m, n, k, b_k=order == "nt", a_rows=math.gcd(2 * k, 128),
                   b_rows=math.gcd(2 * (k if order == "nt" else n), 128), may_turn=True, **more)


def check(m, n, k, tile, batch=0, ta=False, tb=True):
    """A product of small integers on the device simulator, which sees every element loaded and stored."""
    rng = np.random.default_rng(0)
    lead = (batch,) if batch else ()
    a, b = (rng.integers(-3, 4, (*lead, *s)).astype(np.float16) for s in ((m, k), (k, n)))
    f = Form(m, n, k, ("float16", "float16", "float32", "float32"), tile, batch, ta, tb)
    one, space = np.ones(1, np.float32), {}
    if tile.parts > 1:
        space = {"W": np.full((tile.parts * max(1, batch), m, n), np.nan, np.float32)}
    program = (gemm_split if tile.parts > 1 else gemm)(f)
    got = run_device(lower(program.func, SM90, {"tl.enable_hopper": True}),
                     {"A": np.ascontiguousarray(a.swapaxes(-1, -2)) if ta else a,
                      "B": np.ascontiguousarray(b.swapaxes(-1, -2)) if tb else b, "bias": one, "sa": one, "sb": one, **space,
                      "C": np.full((*lead, m, n), np.nan, np.float32)})
    assert np.array_equal(got.outputs["C"], a.astype(np.float64) @ b.astype(np.float64))


@pytest.mark.parametrize("shape, near", [
    ((4096, 128, 4096), "a"), ((4096, 256, 4096), "a"), ((256, 4096, 4096), "b"), ((128, 4096, 14336), "b"),
    ((1024, 1024, 4096), ""), ((4096, 4096, 4096), ""), ((4096, 1024, 8192), "")])
def test_neighbours_share_the_larger_operand(shape, near):
    """In one round, where it is by far the larger; turned tiles change the sides."""
    m, n, _ = shape
    t = choose_tile(H200, lined(*shape, "nt"))
    rows = -(-(n if t.turned else m) // t.bm)
    near = {"a": "b", "b": "a"}.get(near, "") if t.turned else near
    assert t.panel == rows if near == "b" else t.panel == 1 if near == "a" else 1 < t.panel


def test_split_sums_of_blocks_column_by_column():
    check(100, 130, 300, Tile(64, 64, 64, 3, 128, parts=2, panel=2))
