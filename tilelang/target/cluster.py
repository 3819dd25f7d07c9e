"""The cluster dimensions of a launch (option `cluster = (x, y, z)` of its plan; absent: no clusters).

Source: CUDA C++ Programming Guide, "Thread Block Clusters"; PTX ISA, "Cluster of Cooperative Thread Arrays".
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.errors import error, register

register("cluster-dims", ValueError, "the dimensions of a cluster are none, or do not divide the grid",
         "cluster_dims=2 or (x, y, z): at most 16 blocks, each extent a divisor of the grid's")

PORTABLE, MOST = 8, 16  # largest cluster size: on every device with clusters; with the non-portable attribute of the kernel


def cluster_of(launch: Any) -> tuple[int, int, int] | None:
    """Cluster dimensions of a Launch, None without clusters."""
    dims = launch.plan.cluster
    return None if dims is None or math.prod(dims) == 1 else tuple(dims)  # type: ignore[return-value]


def cluster_size(launch: Any) -> int:
    """Number of CTAs in a cluster of a Launch, 1 without clusters."""
    return math.prod(cluster_of(launch) or (1,))


def check_cluster(dims: tuple[int, ...], grid: tuple[Any, ...], span: Any = None) -> tuple[int, int, int]:
    """Check cluster dimensions against a grid and return them as (x, y, z).

    Grid extents that are expressions are checked at each call instead.  Raises cluster-dims.
    """
    if not 1 <= len(dims) <= 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in dims):
        raise error("cluster-dims", f"a cluster has «1 to 3 positive extents», found {dims!r}", span=span)
    x, y, z = (*dims, 1, 1)[:3]
    if x * y * z > MOST:
        raise error("cluster-dims", f"a cluster has «at most {MOST} blocks», found {x} * {y} * {z} = ‹{x * y * z}›", span=span)
    for n, extent, axis in zip((x, y, z), (*grid, 1, 1), "xyz"):
        have = getattr(extent, "value", extent)
        if isinstance(have, int) and have % n:
            raise error("cluster-dims", f"clusters of {n} blocks along {axis} do not divide a grid of ‹{have}›",
                        expected=f"a multiple of {n} blocks along {axis}", span=span)
    return x, y, z
