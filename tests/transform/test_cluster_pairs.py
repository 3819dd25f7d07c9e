"""The rule of clusters (transform/analysis/cluster_pairs.py) beside what was measured on an H200, microseconds without and
with them."""

import pytest

import tilelang.language as T
from tilelang.ir import walk
from tilelang.ops import Copy
from tilelang.transform.analysis.cluster_pairs import (ARRIVING, ASKED, ISSUED, LARGER, LINE, MULTICAST, OUTERMOST,
                                                       OUTERMOST_LINES, SECTOR, START, START_LARGER, Load, at_once,
                                                       gain_for_many, larger_in_one_wave, paired_cycles, pays_for_many,
                                                       pays_in_one_wave, rows_of, saved_in_one_wave)


def loads(bm, bn, rows, saved, bk=128):
    """Of a stage of 64 elements of 16 bits.  rows: what rows of A and of B start at multiples of, bytes."""
    return Load(bm * bk, rows[0], saved == "a"), Load(bn * bk, rows[1], saved == "b")


def cycles(bm, bn):
    return bm / 64 * bn / 2 * 4


ONE_ROUND = {  # (bm, bn, row starts, loaded once, iterations): (alone, in clusters)
    (64, 128, (16, 16), "b", 16): (8.8, 8.1), (128, 64, (16, 16), "a", 16): (8.8, 8.1),
    (192, 112, (16, 16), "a", 16): (13.6, 12.4), (128, 256, (16, 16), "b", 16): (16.7, 14.8),
    (256, 128, (16, 16), "a", 16): (22.4, 20.7), (256, 160, (16, 16), "a", 12): (23.8, 23.9),
    (64, 128, (128, 128), "b", 16): (5.2, 6.6), (64, 128, (128, 128), "b", 64): (13.2, 18.6),
    (64, 64, (128, 128), "b", 224): (39.4, 45.3), (128, 96, (32, 32), "a", 19): (11.0, 11.1),
    (256, 128, (64, 16), "a", 16): (20.0, 21.0), (128, 208, (64, 64), "b", 21): (19.2, 19.8),
    (128, 144, (64, 64), "a", 19): (10.7, 11.6)}


@pytest.mark.parametrize("case", ONE_ROUND, ids=str)
def test_one_round_of_tiles_is_paired_where_that_was_faster(case):
    bm, bn, rows, saved, steps = case
    alone, paired = ONE_ROUND[case]
    assert pays_in_one_wave(loads(bm, bn, rows, saved), cycles(bm, bn), steps) == (paired < alone)


def test_many_tiles_are_paired_where_rows_lie_across_lines():
    assert LINE == 4 * SECTOR == 128
    for rows, pays in (((128, 128), False), ((64, 64), True), ((16, 16), True)):
        assert pays_for_many(loads(128, 256, rows, "b"), cycles(128, 256)) == pays
    assert not pays_for_many(loads(128, 256, (16, 16), "b"), 0)  # of what other work takes nothing is known


# (tile, row starts, whether k is contiguous in A and in B, loaded once, tiles along pairs, in all, steps): (alone, in pairs)
ODD = {
    (128, 192, (16, 32), (True, False), "a", 9, 4815, 2): (89.0, 77.6),
    (192, 192, (16, 64), (False, False), "a", 5, 5535, 3): (152.6, 133.6),
    (192, 128, (32, 128), (False, False), "a", 5, 7900, 2): (151.1, 137.1),
    (128, 256, (16, 16), (False, False), "a", 3, 1407, 22): (290.6, 331.0),
    (128, 176, (32, 32), (True, True), "a", 9, 1305, 25): (138.9, 151.9),
    (128, 176, (32, 32), (True, True), "b", 5, 1305, 25): (138.9, 158.0),
    (192, 128, (32, 16), (False, False), "b", 3, 4788, 2): (135.7, 159.7)}


@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_numbers_of_tiles_are_paired_where_that_was_faster(case):
    """Batched GEMMs of several waves: 616x1680x72, 107 of them, and others."""
    bm, bn, rows, inner, saved, count, tiles, steps = case
    both = Load(bm * 128, rows[0], saved == "a", inner[0]), Load(bn * 128, rows[1], saved == "b", inner[1])
    alone, paired = ODD[case]
    assert (gain_for_many(both, count, tiles // count, 132, steps) > 0) == (paired < alone)


def test_what_a_cluster_takes():
    """Never less than the products take, nor than what comes by multicast; a load that is shared takes half."""
    assert paired_cycles(loads(128, 256, (128, 128), "b"), 1024) > 1024
    assert paired_cycles(loads(64, 128, (16, 16), "b"), 0) < paired_cycles(loads(64, 128, (16, 16), ""), 0)
    assert Load(1024, 16).cost > Load(1024, 32).cost == Load(1024, 128).cost == 1024


def test_rows_across_sectors_arrive_after_they_are_asked_for():
    """64x72 tiles at 408x1240x10584 took 338 cycles an iteration in 2 x 4; over several rounds it is what they take of L2."""
    tiles = Load(64 * 128, 16, 2), Load(72 * 128, 16, 4)
    assert paired_cycles(tiles, 0, 8) == (64 + 72) * 128 / ARRIVING + (64 / 2 + 72 / 4) * 128 * 2.5 / ASKED
    assert 320 < paired_cycles(tiles, 0, 8) < 356 and paired_cycles(tiles, 0, 8, False) < 250
    assert saved_in_one_wave(tiles, 1e4, 10, 8) < 0 < ISSUED


def test_where_k_is_outermost_rows_take_more():
    assert Load(1024, 16, inner=False).cost == 1024 * 2.5 * OUTERMOST
    assert Load(1024, 64, inner=False).cost == 1024 * OUTERMOST_LINES and Load(1024, LINE, inner=False).cost == 1024
    tiles = Load(128 * 128, 64, False, False), Load(176 * 128, 16, True)  # 680x4000x1720 NN: 19.1 us, 16.9 in pairs
    assert saved_in_one_wave(tiles, 704, 27) > START_LARGER > saved_in_one_wave((Load(128 * 128, 64), tiles[1]), 704, 27)
    assert pays_in_one_wave(tiles, 704, 27) and START < START_LARGER

    @T.prim_func
    def program(A: T.Tensor((100, 1000), "float16"), B: T.Tensor((1000, 96), "float16")):
        with T.Kernel(1, threads=128):
            As, Bs = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 96), "float16")
            for k in T.serial(15):
                T.copy(A[0, k * 64], As)
                T.copy(B[k * 64, 0], Bs)

    func = program.func if hasattr(program, "func") else program
    a, b = (x for x in walk(func) if isinstance(x, Copy))
    step = next(x.var for x in walk(func) if type(x).__name__ == "For")
    assert rows_of(a, a.src.mins, step) == (16, True) and rows_of(b, b.src.mins, step) == (64, False)


SHAPES = {  # (bm, bn, iterations), rows across sectors: blocks of a cluster along columns and rows -> microseconds
    (128, 72, 16): {(1, 1): 9.2, (1, 4): 8.2, (2, 2): 7.8, (2, 4): 7.3},
    (192, 104, 16): {(1, 1): 13.2, (2, 1): 11.0, (2, 2): 11.1, (2, 4): 11.0},
    (256, 96, 16): {(1, 1): 15.8, (4, 1): 11.4},
    (128, 72, 47): {(1, 1): 23.3, (1, 4): 19.7}}


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_the_cluster_that_saves_most_is_the_fastest_or_near_it(case):
    bm, bn, steps = case
    measured = SHAPES[case]

    def saved(spans):
        if spans == (1, 1):
            return START
        both = Load(bm * 128, 16, spans[0]), Load(bn * 128, 16, spans[1])
        return saved_in_one_wave(both, cycles(bm, bn), steps, spans[0] * spans[1])

    assert measured[max(measured, key=saved)] <= 1.02 * min(measured.values())


def test_clusters_of_more_than_two_never_pay_where_rows_lie_in_whole_sectors():
    for bm, bn in ((64, 64), (64, 128), (128, 72), (256, 128)):
        for x, y in LARGER:
            both = Load(bm * 128, 32, x), Load(bn * 128, 32, y)
            assert x * y in MULTICAST and saved_in_one_wave(both, cycles(bm, bn), 64, x * y) <= START


def test_not_all_multiprocessors_are_in_clusters_of_four():
    assert [at_once(132, n) for n in (1, 2, 4, 8)] == [132, 132, 120, 120]


def test_larger_clusters_are_made_of_what_runs_at_once():
    """Of a grid filled up to whole clusters; along dimensions that share a load; where they save more than those found."""
    def larger(grid, shared=(True, True, False), found=(1, 1, 1), alike=0.0):
        return larger_in_one_wave(grid, shared, lambda spans: alike or 1000.0 * spans[0] * spans[1], 132, found)

    assert larger((14, 8, 1)) == (2, 4, 1)  # in clusters of 4 x 2 they would be 16 x 8, too many
    assert larger((14, 8, 1), shared=(False, True, False)) == (1, 4, 1)
    assert larger((16, 8, 1), found=(2, 1, 1)) == (2, 1, 1)
    assert larger((14, 8, 1), found=(2, 1, 1), alike=START + 1) == (2, 1, 1)
    assert larger((14, 8, 1), alike=START - 1) == larger((14, 8, 1), shared=(False,) * 3) == (1, 1, 1)
    assert larger_in_one_wave((8,), (True,), lambda spans: 1e9, 132, (2,)) == (2,)
