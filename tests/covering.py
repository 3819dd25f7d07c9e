"""Which combinations of several parameters every run takes; the others are marked slow and run each night."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairs_of(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Every two of a case's parameters with their values."""
    return set(itertools.combinations(enumerate(case), 2))


def every_pair(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of the axes' values.  Those that are not needed for each pair of values to occur are marked slow."""
    values = [list(a) for a in axes]
    cases = list(itertools.product(*(range(len(v)) for v in values)))
    pairs = {case: pairs_of(case) for case in cases}
    missing, taken = set().union(*pairs.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))  # the first of equals: the same in every process
        taken.add(best)
        missing -= pairs[best]
    return [pytest.param(*(v[i] for v, i in zip(values, case)), marks=[] if case in taken else pytest.mark.slow)
            for case in cases]
