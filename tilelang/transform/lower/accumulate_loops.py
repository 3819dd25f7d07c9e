"""Parallel loops that accumulate into fragments or memory, where no single work partition of their points fits.

    for i, j in T.Parallel(64, 32):              for j in (those of this thread):
        sums[i % 8, j] += A[i, j]         ->         for i in range(64): sums[i % 8, j] += A[i, j]

All points that update one element of an accumulator must run in one thread: each thread runs in order the dimensions that do
not select the element (both dimensions for `sums[j % 8]`, and where accumulators are selected by different dimensions).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tilelang.ir import Buffer, Load, Stmt, Store, Var, walk
from tilelang.layout.distinct import meets_several
from tilelang.ops.distribute import index_values

from ..analysis.distributed_loop import accesses

_MOST_POINTS = 1 << 20  # points whose accumulator elements are compared; in larger loops one thread runs all points


def accumulates(s: Any) -> bool:
    """Whether s is an accumulation `X[…] = f(X[…], …)`."""
    return isinstance(s, Store) and any(_own(s, y) for y in walk(s.value))


def _own(s: Store, y: Any) -> bool:
    return isinstance(y, Load) and y.buffer is s.buffer and y.indices == s.indices


def serial_dims(vars: tuple[Var, ...], extents: tuple[int, ...], body: Stmt) -> list[int]:
    """The dimensions that one thread must run in order so that no two threads accumulate into one element.

    Of all sufficient sets of dimensions it returns the one with the fewest points.
    """
    places: dict[Buffer, list[tuple[Any, list[tuple[Var, int]]]]] = {}
    for x, loops in accesses(body):
        if accumulates(x):
            places.setdefault(x.buffer, []).append((x, loops))
    everything = [d for d, n in enumerate(extents) if n > 1]
    subsets = [list(c) for k in range(len(everything) + 1) for c in itertools.combinations(everything, k)]
    for serial in sorted(subsets, key=lambda ds: math.prod(extents[d] for d in ds)):
        kept = [d for d in everything if d not in serial]
        if all(_distinct(vars, extents, kept, b, found) for b, found in places.items()):
            return serial
    return everything


def _distinct(vars: tuple[Var, ...], extents: tuple[int, ...], kept: list[int], b: Buffer, places: list[Any]) -> bool:
    """Whether points that differ along the kept dimensions accumulate into different elements of b."""
    if not kept:
        return True
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for x, loops in places:
        axes = [*zip(vars, extents), *loops]
        if math.prod(n for _, n in axes) > _MOST_POINTS:
            return False
        env = {v: np.arange(n).reshape([-1 if k == a else 1 for k in range(len(axes))]) for a, (v, n) in enumerate(axes)}
        # surrounding loops and blocks contribute the same to all points: any value will do
        env |= {v: np.zeros((), int) for i in x.indices for v in walk(i, Var) if v not in env}
        values = [index_values(i, env) for i in x.indices]
        if any(v is None for v in values):
            return False
        element: Any = 0
        for v, n in zip(values, b.shape):
            element = element * int(n) + v
        point: Any = 0
        for d in kept:
            point = point * extents[d] + env[vars[d]]
        both = np.broadcast_arrays(element, point, *env.values())[:2]
        pairs.append((both[0].ravel(), both[1].ravel()))
    elements, points = (np.concatenate(x) for x in zip(*pairs))
    return not meets_several(elements, points)
