"""Conditions that no two lanes of a vector tell apart stand around vector accesses, not around each element's."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tilelang
import tilelang.language as T
from tilelang.ir import Ramp, Store, walk
from tilelang.simulator import run_device, run_tile
from tilelang.target import Target
from tilelang.transform.pipeline import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "names"))
from everywhere import WITH_HOPPER, everywhere

SM80 = Target({"kind": "cuda", "arch": "sm_80"})


def rows_of_a_group(columns, other):
    """Rows before `end` are copied; others become 7 (other) or keep what they hold."""
    @T.prim_func
    def program(X: T.Tensor((32, 64), "float16"), ends: T.Tensor((1,), "int32"), Y: T.Tensor((32, columns), "float16")):
        with T.Kernel(1, threads=128) as _:
            S = T.alloc_shared((32, 64), "float16")
            T.copy(X, S)
            end = ends[0]
            for i, j in T.Parallel(32, 64):
                if i < end and j < columns:
                    Y[i, j] = S[i, j]
                elif other and j < columns:
                    Y[i, j] = T.float16(7)
    return program


def stored(program):
    """Lanes of the stores to Y."""
    kernels = lower(program.func, SM80).kernels
    return {x.indices[-1].lanes if isinstance(x.indices[-1], Ramp) else 1
            for k in kernels for x in walk(k.launch) if isinstance(x, Store) and x.buffer.name == "Y"}


@pytest.mark.parametrize("columns, lanes", [(64, 8), (40, 8), (36, 4), (33, 1)])
@pytest.mark.parametrize("other", [False, True])
def test_a_bound_between_vectors_leaves_them_whole(columns, lanes, other):
    assert stored(rows_of_a_group(columns, other)) == {lanes}


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("columns", [64, 40, 36, 33])
@pytest.mark.parametrize("end", [0, 5, 17, 32, 40])
def test_the_same_elements_are_stored(columns, end, other):
    x, y = np.arange(2048).reshape(32, 64).astype(np.float16), np.full((32, columns), -1, np.float16)
    given = {"X": x, "ends": np.int32([end]), "Y": y}
    want = np.where(np.arange(32)[:, None] < end, x[:, :columns], np.float16(7 if other else -1))
    program = rows_of_a_group(columns, other)
    assert np.array_equal(run_tile(program.func, {k: v.copy() for k, v in given.items()})["Y"], want)
    got = run_device(lower(program.func, SM80), {k: v.copy() for k, v in given.items()})
    assert np.array_equal(got.outputs["Y"], want)


def odd_rows(m, n, block, scope):
    @T.prim_func
    def main(X: T.Tensor((m, n), "float16"), Y: T.Tensor((m, n), "float16"), S: T.Tensor((m,), "float32")):
        with T.Kernel(m, threads=64) as r:
            x = T.alloc_fragment((block,), "float32") if scope == "fragment" else T.alloc_shared((block,), "float16")
            f, total = T.alloc_fragment((block,), "float32"), T.alloc_fragment((1,), "float32")
            T.clear(total)
            for k in T.serial(T.ceildiv(n, block)):
                T.copy(X[r, k * block], x)
                T.copy(x, f)
                T.reduce_sum(f, total, dim=0, clear=False)
                for i in T.Parallel(block):
                    Y[r, k * block + i] = f[i] * 2
            for i in T.Parallel(1):
                S[r] = total[i]

    return main


@pytest.mark.parametrize("n, scope", [(1001, "fragment"), (769, "shared"), (255, "fragment"), (513, "shared")])
def test_each_element_of_rows_at_odd_addresses_was_guarded(n, scope):
    x = np.random.default_rng(0).integers(-8, 8, (3, n)).astype(np.float16)
    program = odd_rows(3, n, 512, scope)
    _, y, total = everywhere(program, x, on=WITH_HOPPER)
    assert np.array_equal(y, x * 2) and np.array_equal(total, x.astype(np.float32).sum(1))
    text = tilelang.compile(program, target={"kind": "cuda", "arch": "sm_90a"}).get_kernel_source()
    assert text.count("+ 511 < ") == (n > 512)  # a tile that lies inside is loaded without guards


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
@pytest.mark.parametrize("period, dt, columns", [(8, "int16", 11), (16, "int8", 21), (2, "int32", 9)])
def test_vectors_that_begin_again_stay_in_their_row(period, dt, columns, target):
    """`i % 8` goes on by ones inside of a vector, and has no stride along the loop: its end was not tested."""
    @T.prim_func
    def main(A: T.Tensor((8, columns), dt), C: T.Tensor((2, 96), dt)):
        with T.Kernel(2, threads=16) as bx:
            for i in T.Parallel(32):
                C[bx, i * 3] = A[6, bx * 8 + i % period]

    a, c = np.arange(1, 8 * columns + 1).reshape(8, columns).astype(dt), np.zeros((2, 96), dt)
    got = run_device(lower(main.func, Target(target)), [a, c]).outputs["C"]
    row = np.pad(a[6], (0, 32))
    np.testing.assert_array_equal(got[:, ::3], [[row[b * 8 + i % period] for i in range(32)] for b in range(2)])
