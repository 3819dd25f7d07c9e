"""The cases of covering.py: each pair of values occurs in a run, and no combination is lost."""

import itertools

from covering import every_pair, pairs_of


def test_each_pair_of_values_is_in_a_case_of_every_run():
    axes = ("abc", range(4), (True, False), range(3))
    cases = every_pair(*axes)
    assert [c.values for c in cases] == list(itertools.product(*axes))
    taken = [c.values for c in cases if not c.marks]
    assert set().union(*map(pairs_of, taken)) == set().union(*map(pairs_of, itertools.product(*axes)))
    assert len(taken) < len(cases) / 3
