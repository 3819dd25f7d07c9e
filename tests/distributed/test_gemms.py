"""GEMMs over ranks in one launch, whose tiles wait for other ranks' rows or count what they send."""

import numpy as np
import pytest

from tilelang.distributed import overlap
from tilelang.distributed.gemms import RankGemm, gathered_gemm, scattered_gemm
from tilelang.errors import TileLangError
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

ARCH = Target({"kind": "cuda", "arch": "sm_90a"})
F16 = np.float16


def both(program, given):
    """The outputs by rank of the reference interpreter and, of two ranks, of the device simulator."""
    yield run_tile_ranks(program, given)
    if len(given) == 2:
        yield [r.outputs for r in run_device_ranks(lower(program.func, ARCH), given, seed=1)]


def integers(rng, *shape):
    return rng.integers(-3, 4, shape).astype(F16)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_all_ranks(ranks):
    f, rng = RankGemm(128, 128, 64, ranks, "float16", 2, bn=64, bk=32, stages=2), np.random.default_rng(ranks)
    a, b, given = integers(rng, ranks, f.m, f.k), integers(rng, f.k, f.n), []
    for r in range(ranks):
        memory = np.zeros((ranks + 1, f.m, f.k), F16)
        memory[0], memory[1:] = a[r], a
        memory[1 + r] = 99  # no tile reads its own rows there
        given.append([memory.reshape(-1, f.k), b, np.zeros((ranks * f.m, f.n), F16), np.ones(ranks, np.int64), 0, f.m])
    assert f.fits
    for out in both(gathered_gemm(f), given):
        assert all((o["C"] == a.reshape(-1, f.k).astype(float) @ b).all() for o in out)


def test_a_tile_waits_for_its_rows():
    f = RankGemm(128, 64, 32, 2, "float16", 1, bn=64, bk=32, stages=2)
    given = [[np.zeros((3 * f.m, f.k), F16), np.zeros((f.k, f.n), F16), np.zeros((2 * f.m, f.n), F16), np.zeros(2, np.int64), 0,
              f.m] for _ in range(2)]
    with pytest.raises(TileLangError, match="wait"):
        run_tile_ranks(gathered_gemm(f), given)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_for_all_ranks(ranks):
    f, rng = RankGemm(256, 128, 64, ranks, "float16", 2, 2, bn=64, bk=32, stages=2), np.random.default_rng(ranks)
    a, b = integers(rng, ranks, ranks * f.m, f.k), integers(rng, ranks, f.k, f.n)
    part = (a.astype(float) @ b).reshape(ranks, ranks, f.m, f.n)  # by rank, and by the rank that gets it
    others = range(ranks - 1)
    given = [[a[r], b[r], np.zeros((f.m, f.n), F16), np.zeros((ranks - 1, f.m, f.n), F16),
              np.stack([part[(r - j - 1) % ranks][r] for j in others]).astype(F16), np.zeros((2, ranks - 1), np.int64),
              np.ones((2, ranks - 1), np.int64)] for r in range(ranks)]
    for out in both(scattered_gemm(f), given):
        for r, o in enumerate(out):
            assert (o["C"] == part[:, r].sum(0)).all() and (o["done"] == f.per_chunk).all()
            assert all((o["partials"][j] == part[r][(r + j + 1) % ranks]).all() for j in others)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_on_all_ranks(ranks):
    f, rng = RankGemm(128, 64, 64, ranks, "float16", 2, 1, bn=64, bk=32, stages=2), np.random.default_rng(ranks)
    a, b = integers(rng, ranks, ranks * f.m, f.k), integers(rng, ranks, f.k, f.n)
    part = (a.astype(float) @ b).reshape(ranks, ranks, f.m, f.n)
    given = [[a[r], b[r], np.zeros((ranks * f.m, f.n), F16), np.zeros((ranks - 1, f.m, f.n), F16),
              np.stack([part[(r - j - 1) % ranks][r] for j in range(ranks - 1)]).astype(F16),
              np.zeros((1, ranks - 1), np.int64), np.ones((1, ranks - 1), np.int64)] for r in range(ranks)]
    for out in both(scattered_gemm(f, True), given):
        assert all((o["C"] == part.sum(0).reshape(-1, f.n)).all() for o in out)


def test_ranks_begin_with_counts_of_zero():
    program = overlap.beginning(2, 5)
    for out in both(program, [[np.zeros((1, 4), np.int64), np.full(5, 7)] for _ in range(2)]):
        assert all((o["pad"] == 1).all() and not o["numbers"].any() for o in out)
