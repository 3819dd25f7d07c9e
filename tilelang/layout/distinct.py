"""Distinct values of integer arrays, computed without `np.unique`.

`np.unique` without counts or indices imports numpy.ma, which takes 40 to 70 ms of a process's first compilation.  With axis=1
it sorts records byte by byte.
"""

from __future__ import annotations

import numpy as np


def distinct(values: np.ndarray) -> np.ndarray:
    """The distinct values in ascending order, as a one-dimensional array."""
    ordered = np.sort(values, axis=None)
    return ordered[_news(ordered)]


def distinct_pairs(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct pairs (a, b) of two arrays of one shape, sorted by a, then b, as two one-dimensional arrays."""
    order = np.lexsort((np.ravel(b), np.ravel(a)))
    first, second = np.ravel(a)[order], np.ravel(b)[order]
    new = _news(first) | _news(second)
    return first[new], second[new]


def meets_several(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether some value of a is paired with more than one value of b."""
    first, _ = distinct_pairs(a, b)
    return bool((first[1:] == first[:-1]).any())


def _news(ordered: np.ndarray) -> np.ndarray:
    """Which elements differ from the one before them."""
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    return new
