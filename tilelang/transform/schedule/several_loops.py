"""Makes the rings of several pipelined loops of one launch, and counts the steps that each ring has made before a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import Alloc, Buffer, Const, For, Stmt, Store, const, convert
from tilelang.ir.record import record

from .outer_loops import Counted, step_count
from .rings import Ring


@record
class RingsOf:
    """The rings of a loop.  filled: the tile that an item of the loop fills."""

    loop: For
    stages: int
    rings: list[Ring]
    filled: Callable[[int], Buffer]

    def tiles(self, r: Ring) -> frozenset[Buffer]:
        return frozenset(map(self.filled, r.items))


def counted_loops(loops: Sequence[RingsOf], make: Callable[[int, Ring], None]) -> tuple[list[Counted], list[Stmt]]:
    """Makes the rings of all loops: (what counts the steps of each loop's rings, statements for the start of a warp role).

    Loops that fill the same tiles use one set of rings, one loop after another; each other loop has rings of its own.
    make: allocates a ring of the loop of this number.
    """
    alike: dict[Any, list[int]] = {}
    for n, x in enumerate(loops):
        alike.setdefault((x.stages, frozenset(map(x.tiles, x.rings))), []).append(n)
    counts: dict[int, Counted] = {}
    begin: list[Stmt] = []
    for some in alike.values():
        extents = {n: Analyzer().simplify(convert(loops[n].loop.extent)) for n in some}
        whole = all(isinstance(x, Const) and x.value % (2 * loops[n].stages) == 0 for n, x in extents.items())
        count = None if len(some) == 1 or whole else step_count()
        begin += [] if count is None else [Alloc(count), Store(count, (const(0),), const(0, "int32"))]
        made: dict[frozenset[Buffer], Ring] = {}
        for n in some:
            counts[n] = Counted(extents[n], loops[n].stages, count)
            for r in loops[n].rings:
                first = made.setdefault(loops[n].tiles(r), r)
                if first is r:
                    make(n, r)
                else:
                    r.buffers, r.full, r.empty = first.buffers, first.full, first.empty
    return [counts[n] for n in range(len(loops))], begin


__all__ = ["RingsOf", "counted_loops"]
