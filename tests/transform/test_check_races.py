"""check_races: iterations that store different values in one place are warned about, where that is asked for."""

import logging

import pytest
from pass_steps import around

import tilelang.language as T
from tilelang.errors import TileLangError

ASKED = {"tl.disable_data_race_check": False}


def stored(index, value):
    @T.prim_func
    def main(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                B[index(i)] = value(i, A)

    return main


@pytest.mark.parametrize("index, value, warned", [
    (lambda i: i // 2, lambda i, A: A[i], True), (lambda i: i // 2, lambda i, A: i // 2, False),
    (lambda i: 63 - i, lambda i, A: A[i], False), (lambda i: i % 60, lambda i, A: i, True)])
def test_two_iterations_with_one_place(index, value, warned, caplog):
    with caplog.at_level(logging.WARNING, "tilelang.transform"):
        try:
            before, after = around(stored(index, value), "check_races", config=ASKED)
        except TileLangError as e:  # it refuses some of what it warns about
            assert e.kind == "parallel-overwrite" and warned
        else:
            assert after is before
    assert bool([r for r in caplog.records if "`B`" in r.getMessage()]) == warned
