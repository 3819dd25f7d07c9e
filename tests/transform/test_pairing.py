"""The rule of clusters (transform/pairing.py) beside what was measured on an H200, microseconds without and with them."""

import pytest

from tilelang.transform.pairing import LINE, SECTOR, Load, paired_cycles, pays_for_many, pays_in_one_round


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
    assert pays_in_one_round(loads(bm, bn, rows, saved), cycles(bm, bn), steps) == (paired < alone)


def test_many_tiles_are_paired_where_rows_lie_across_lines():
    assert LINE == 4 * SECTOR == 128
    for rows, pays in (((128, 128), False), ((64, 64), True), ((16, 16), True)):
        assert pays_for_many(loads(128, 256, rows, "b"), cycles(128, 256)) == pays
    assert not pays_for_many(loads(128, 256, (16, 16), "b"), 0)  # of what other work takes nothing is known


def test_what_a_cluster_takes():
    """Never less than the products take, nor than what comes by multicast; a load that is shared takes half."""
    assert paired_cycles(loads(128, 256, (128, 128), "b"), 1024) > 1024
    assert paired_cycles(loads(64, 128, (16, 16), "b"), 0) < paired_cycles(loads(64, 128, (16, 16), ""), 0)
    assert Load(1024, 16).cost > Load(1024, 32).cost == Load(1024, 128).cost == 1024
