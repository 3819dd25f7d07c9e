"""Makes the rings of several pipelined loops of one launch, and counts the steps that each ring has made before a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import Alloc, Buffer, Const, For, Stmt, Store, const, convert
from tilelang.ir.record import record
from tilelang.ops import Gemm

from ..analysis.effects import effects
from .outer_loops import Counted, step_count
from .rings import Ring


@record
class RingsOf:
    """The rings of a loop.  filled: the tile that an item of the loop fills."""

    loop: For
    stages: int
    rings: list[Ring]
    filled: Callable[[int], Buffer]

    def tiles(self, r: Ring) -> list[Buffer]:
        return [self.filled(i) for i in r.items]

    def bytes(self) -> int:
        return self.stages * sum(b.size * b.dtype.bits // 8 for r in self.rings for b in self.tiles(r))

    def kind(self, alike_too: bool) -> Any:
        """What is equal for loops that use one set of rings.  alike_too: also if they only use tiles of other names alike."""
        if not alike_too:
            return self.stages, frozenset(frozenset(self.tiles(r)) for r in self.rings)
        return self.stages, tuple(tuple(map(self._use, self.tiles(r))) for r in self.rings)

    def _use(self, b: Buffer) -> Any:
        """The shape of a tile and how GEMMs use it, from which its layout follows; the tile where others use it too."""
        nodes = [e.node for e in effects(self.loop.body) if e.storage is b.data and e.writes is False]
        gemms = [x for x in nodes if isinstance(x, Gemm)]
        if len(gemms) < len(nodes):
            return b
        return tuple(b.shape), str(b.dtype), frozenset((x.a.buffer is b, x.transpose_a, x.transpose_b, x.m, x.n, x.k)
                                                       for x in gemms)


def counted_loops(loops: Sequence[RingsOf], make: Callable[[int, Ring], None],
                  room: int) -> tuple[list[Counted], list[Stmt]]:
    """Makes the rings of all loops: (what counts the steps of each loop's rings, statements for the start of a warp role).

    Loops that fill the same tiles use one set of rings, one loop after another; each other loop has rings of its own, or,
    where these do not fit in `room` bytes, those of a loop with tiles alike.  make: allocates a ring of the loop of this
    number.
    """
    alike: dict[Any, list[int]] = {}
    for alike_too in (False, True):
        alike.clear()
        for n, x in enumerate(loops):
            alike.setdefault(x.kind(alike_too), []).append(n)
        if sum(loops[some[0]].bytes() for some in alike.values()) <= room:
            break
    counts: dict[int, Counted] = {}
    begin: list[Stmt] = []
    for some in alike.values():
        extents = {n: Analyzer().simplify(convert(loops[n].loop.extent)) for n in some}
        whole = all(isinstance(x, Const) and x.value % (2 * loops[n].stages) == 0 for n, x in extents.items())
        count = None if len(some) == 1 or whole else step_count()
        begin += [] if count is None else [Alloc(count), Store(count, (const(0),), const(0, "int32"))]
        first = loops[some[0]]
        for n in some:
            counts[n] = Counted(extents[n], first.stages, count)
            by_tiles = loops[n].kind(False) == first.kind(False)
            for k, r in enumerate(loops[n].rings):
                tiles = loops[n].tiles(r)
                if n == some[0]:
                    make(n, r)
                    continue
                same = next(x for x in first.rings if set(first.tiles(x)) == set(tiles)) if by_tiles else first.rings[k]
                r.full, r.empty = same.full, same.empty
                r.buffers.update({b: same.buffers[b if by_tiles else like] for b, like in zip(tiles, first.tiles(same))})
    return [counts[n] for n in range(len(loops))], begin


__all__ = ["RingsOf", "counted_loops"]
