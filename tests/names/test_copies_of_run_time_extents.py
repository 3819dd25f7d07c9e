"""Copies between a tile and a region whose run-time extents the tile has no loop for: they give their start there."""

import numpy as np
import pytest
from everywhere import WITH_HOPPER, everywhere

import tilelang.language as T

F32 = "float32"


def moved(shape, tile, region, store=False, scope="fragment", cols=8):
    """A program that loads a tile from region(A, n, m) and stores it whole, or stores the tile of ones into the region."""
    n, m = T.dynamic("n, m")
    dims = tuple({"n": n, "m": m}.get(d, d) for d in shape)
    alloc = {"fragment": T.alloc_fragment, "shared": T.alloc_shared, "local": T.alloc_local}[scope]

    @T.prim_func
    def main(A: T.Tensor(dims, F32), n_: T.Tensor((n,), F32), m_: T.Tensor((m,), F32), B: T.Tensor(tile, F32)):
        with T.Kernel(1, threads=1 if scope == "local" else 32):
            f = alloc(tile, F32)
            if store:
                T.fill(f, 7.0)
                T.copy(f, region(A, n, m))
            else:
                T.copy(region(A, n, m), f)
            T.copy(f, B)

    return main


N, M = 5, 9
LOADS = [
    ("one element", ("n",), (1,), lambda A, n, m: A[:n - 1], lambda a: a[:1]),
    ("one element of two", ("n", "m"), (1,), lambda A, n, m: A[1:n, 0:m], lambda a: a[1:2, 0]),
    ("one of one by one", ("n",), (1, 1), lambda A, n, m: A[2:n], lambda a: a[2:3, None]),
    ("leading", ("n", 8), (1, 8), lambda A, n, m: A[1:n, :], lambda a: a[1:2]),
    ("leading, no unit", ("n", 8), (8,), lambda A, n, m: A[1:n, :], lambda a: a[1]),
    ("trailing", (8, "n"), (8, 1), lambda A, n, m: A[:, 1:n], lambda a: a[:, 1:2]),
    ("trailing, no unit", (8, "n"), (8,), lambda A, n, m: A[:, 2:n], lambda a: a[:, 2]),
    ("by place", ("n", "m"), (1, 8), lambda A, n, m: A[1:n, 0:m], lambda a: a[1:2, :8]),
    ("by place, last", ("n", "m"), (4, 1), lambda A, n, m: A[0:n, 2:m], lambda a: a[:4, 2:3]),
    ("in the middle", (3, "n", 8), (3, 1, 8), lambda A, n, m: A[:, 1:n, :], lambda a: a[:, 1:2]),
    ("beside an index", ("n", 3, 8), (1, 8), lambda A, n, m: A[1:n, 2, :], lambda a: a[1:2, 2]),
]


@pytest.mark.spec("L9:pairing")
@pytest.mark.parametrize("scope", ["fragment", "shared", "local"])
@pytest.mark.parametrize("name,shape,tile,region,want", LOADS, ids=[r[0].replace(" ", "-") for r in LOADS])
def test_a_small_tile_of_a_run_time_region_was_rejected(name, shape, tile, region, want, scope):
    a = np.arange(np.prod([{"n": N, "m": M}.get(d, d) for d in shape]), dtype=np.float32)
    a = a.reshape([{"n": N, "m": M}.get(d, d) for d in shape])
    other = np.zeros(N, np.float32), np.zeros(M, np.float32)
    got = everywhere(moved(shape, tile, region, scope=scope), a, *other, on=WITH_HOPPER)[3]
    np.testing.assert_array_equal(got, want(a))
    stored = everywhere(moved(shape, tile, region, store=True, scope=scope), a, *other, on=WITH_HOPPER)[0]
    expected = a.copy()
    want(expected)[...] = 7.0
    np.testing.assert_array_equal(stored, expected)


def atomics():
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n, 8), F32)):
        with T.Kernel(2, threads=32):
            f = T.alloc_fragment((1, 8), F32)
            T.fill(f, 2.0)
            T.atomic_add(A[1:n, :], f)

    return main


def test_an_atomic_sum_into_a_run_time_region():
    got = everywhere(atomics(), np.zeros((3, 8), np.float32), on=WITH_HOPPER)[0]
    np.testing.assert_array_equal(got, np.array([[0], [4], [0]], np.float32) * np.ones((1, 8), np.float32))


@pytest.mark.parametrize("shape,tile,region", [
    (("n", "m"), (8,), lambda A, n, m: A[0:n, 0:m]),  # either dimension could be the tile's
    ((4, "n"), (1, 1), lambda A, n, m: A[:, 0:n]),  # four rows into one
    (("n", 8, 8), (8,), lambda A, n, m: A[0:n, :, :]),
], ids=["ambiguous", "static-rows", "static-tile"])
def test_what_does_not_pair_up_is_still_an_error(shape, tile, region):
    with pytest.raises(ValueError, match="does not broadcast or flatten"):
        moved(shape, tile, region)


def test_loops_of_the_tile_do_not_walk_a_unit_dimension_of_the_tensor():
    n = T.dynamic("n")
    with pytest.raises(ValueError, match="does not broadcast or flatten"):
        @T.prim_func
        def main(A: T.Tensor((4, 8), F32), L: T.Tensor((n,), F32)):
            with T.Kernel(1, threads=32):
                s = T.alloc_shared((4, 8), F32)
                T.copy(s[0:n, :], A[3, :])


@pytest.mark.parametrize("fragment", [False, True], ids=["variable", "fragment"])
def test_a_tile_of_one_element_took_all_elements_of_a_run_time_region(fragment):
    n = T.dynamic("n")

    @T.prim_func
    def main(A: T.Tensor((n,), F32), B: T.Tensor((2,), F32)):
        with T.Kernel(1, threads=32):
            if fragment:
                f = T.alloc_fragment((1,), F32)
                T.copy(A[:n - 1], f[0])
                T.copy(f, B[1:2])
            else:
                v = T.alloc_var(F32)
                T.copy(A[:n - 1], v)
                B[1] = v

    assert everywhere(main, np.arange(1, 6, dtype=np.float32), on=WITH_HOPPER)[1].tolist() == [0, 1]
