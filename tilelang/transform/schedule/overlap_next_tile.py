"""The first product of a block's next tile is started before this tile's results are stored.

    for t:                                          wait for tile 0's first stage; start its first product
        wait for the first stage                    for t:
        for k: product; sums                            the other products and sums, the last of them with:
        store                             ->                wait for the next tile's first stage
                                                        start the next tile's first product
                                                        store

Where products start anew in registers of their own (part_loop.py), these are free when the last of them is summed, and
what a tile stores is read from others.  The matrix unit would have nothing to do until all warp groups, which end a tile at
the same time, have stored it and are back at their loops.  Where a tile is (quotients of run-time numbers) and what its
first step loads by itself is found under the last product.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilelang.ir import Alloc, Bind, Expr, If, Stmt, binary, const, seq, substitute, used_vars

from .consumer_schedule import chain_of
from ..analysis.effects import effects
from .chained_accumulators import chained_tiles
from .persistent import Tiles
from ..analysis.statements import rename
from ..analysis.statements import do
from .rings import WarpRoleLoop, pin
from ..analysis.pipeline_schedule import needed_binds


def overlapped_tiles(r: WarpRoleLoop, tiles: Tiles, binds: Sequence[Stmt], before: Sequence[Stmt],
                 after: Sequence[Stmt]) -> list[Stmt] | None:
    """The computing groups' loop over tiles in this order; None where it stays in the program's.

    binds: what the roles bind for each tile; before, after: what the groups do in a tile in front of the pipelined loop and
    behind it.  Keeps: what is stored, and the order of everything but the waits, loads and products that are moved.
    Clusters keep their order: their blocks wait for each other at other places.
    """
    chain = None if tiles.once or tiles.team is not None or tiles.inside is not None else chain_of(r)
    code = None if chain is None else chained_tiles(r, chain)
    if chain is None or code is None:
        return None
    moved = [e for s in (*code.ahead, *code.start) for e in effects(s)]
    touched, written = {e.storage for e in moved}, {e.storage for e in moved if e.writes}
    if any(e.storage in (touched if e.writes else written) for s in (*before, *after) for e in effects(s)):
        return None
    index, every = tiles.index, [*tiles.binds, *(s for s in binds if isinstance(s, Bind))]

    def of(stmts: list[Stmt], it: Expr) -> Stmt:
        """Statements of tile `it`, if the block has so many."""
        needed = needed_binds(every, set().union(*map(used_vars, stmts)))
        return If(binary("lt", it, tiles.count), seq(*rename([substitute(s, {index: it}) for s in (*needed, *stmts)])))

    shared = [s for s in before if isinstance(s, Alloc) and s.buffer.data in touched]
    own = [s for s in before if s not in shared]
    zero, following = const(0, index.dtype), index + const(1, index.dtype)
    body = code.body([of(code.ahead, following)], [of(code.start, following)])
    # ptxas sees a product under way at the end, of a path that no block takes: without the wait it puts one into the loop.
    return [*shared, *code.made, of([*code.ahead, *code.start], zero), tiles.loop(*binds, *own, *body, *after),
            do("wgmma_wait", n=0), pin(chain.part)]


__all__ = ["overlapped_tiles"]
