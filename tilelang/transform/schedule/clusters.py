"""Describes a cluster of blocks that compute neighbouring tiles and load each tile they have in common once.

    spans (4, 2): a cluster of 8 blocks, rank = x + 4 * y        tile of A (by)        tile of B (bx)
        y = 1    4  5  6  7                                      by 4 .. 7 for all     by 1 and 5 for both
        y = 0    0  1  2  3                                      by 0 .. 3             …

A load that does not depend on some dimensions of the grid is the same for all blocks of the cluster that differ only in
these dimensions.  Each of them loads a piece of the tile and multicasts it to all (by a mask of ranks).  So several blocks
fill a stage of a block, and its consumers release the stage to each of these blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

from tilelang.ir import Bind, Expr, Var, binary, cast, const, dtype
from tilelang.ir.record import record


@record
class ClusterMap:
    """spans: number of blocks of a cluster along each dimension of the grid.  ranks: index of a block along each of them."""

    spans: tuple[int, ...]
    ranks: tuple[Expr, ...]

    @property
    def size(self) -> int:
        """Number of blocks in a cluster."""
        return prod(self.spans)

    @property
    def wide(self) -> frozenset[int]:
        """Dimensions along which a cluster has several blocks."""
        return frozenset(k for k, n in enumerate(self.spans) if n > 1)

    def stride(self, dim: int) -> int:
        """The difference between the ranks of neighbours along a dimension."""
        return prod(self.spans[:dim])

    def sharers(self, dims: frozenset[int]) -> frozenset[int]:
        """Ranks of the blocks that differ from block 0 along these dimensions alone (block 0 included)."""
        steps = [range(n) if k in dims else (0,) for k, n in enumerate(self.spans)]
        return frozenset(sum(i * self.stride(k) for k, i in enumerate(at)) for at in product(*steps))

    def sharer(self, dims: frozenset[int]) -> Expr:
        """The index of a block among the blocks that share its load along these dimensions."""
        out: Expr | None = None
        times = 1
        for k in sorted(dims & self.wide):
            term = self.ranks[k] if times == 1 else self.ranks[k] * times
            out, times = term if out is None else out + term, times * self.spans[k]
        return const(0) if out is None else out

    def mask(self, dims: frozenset[int]) -> Expr:
        """uint32 mask of the blocks that share a block's load along these dimensions, the block itself included."""
        pattern = const(sum(1 << r for r in self.sharers(dims)), "uint32")
        out: Expr | None = None
        for k in sorted(self.wide - dims):
            term = self.ranks[k] if self.stride(k) == 1 else self.ranks[k] * self.stride(k)
            out = term if out is None else out + term
        return pattern if out is None else binary("shl", pattern, cast(out, "uint32"))

    def peers(self, shared: Iterable[frozenset[int]]) -> tuple[int, Expr | None]:
        """(number of blocks that share at least one of these loads with a block, itself included; their mask).

        shared: for each load, the dimensions along which it is the same.  The mask is None if it holds the whole cluster.
        """
        kinds = sorted({dims & self.wide for dims in shared}, key=sorted)
        kinds = [d for d in kinds if not any(d < other for other in kinds)]
        some = frozenset[int]().union({0}, *map(self.sharers, kinds))
        if len(some) == self.size:
            return self.size, None
        out = self.mask(frozenset())
        for n, dims in enumerate(kinds):
            out = self.mask(dims) if n == 0 else binary("bitor", out, self.mask(dims))
        return len(some), out


def make_cluster(spans: tuple[int, ...], rank: Expr) -> tuple[ClusterMap, list[Bind]]:
    """The cluster with these spans, and the bindings that compute a block's index along each dimension from its rank."""
    wide = [k for k, n in enumerate(spans) if n > 1]
    if len(wide) == 1:
        return ClusterMap(spans, tuple(rank if k in wide else const(0) for k in range(len(spans)))), []
    binds: list[Bind] = []
    ranks: list[Expr] = [const(0)] * len(spans)
    rest = rank
    for k in wide:
        value = rest if k == wide[-1] else rest % spans[k]
        binds.append(Bind(Var(f"rank_{'xyz'[k]}", dtype("int32")), value))
        ranks[k], rest = binds[-1].var, rest // spans[k]
    return ClusterMap(spans, tuple(ranks)), binds


__all__ = ["ClusterMap", "make_cluster"]
