"""Starts the first GEMM of a block's next tile before the epilogue of the current tile.

    for t:                                          wait for tile 0's first stage; start its first GEMM
        wait for the first stage                    for t:
        for k: GEMM; promotion                          the other GEMMs and promotions, the last of them with:
        store                             ->                wait for the next tile's first stage
                                                            start the next tile's first GEMM
                                                        store

This applies to chained accumulators (chained_accumulators.py).  Their registers are free after the last promotion, and the
epilogue reads other registers.  Without the overlap, the tensor cores would be idle until all warp groups, which end a tile
at the same time, have stored it and are back in their main loops.  The position of the next tile (divisions of run-time
numbers) and the loads of its first step are computed during the last GEMM.
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
    """The consumers' loop over tiles in this order; None if the program's order is kept.

    binds: bindings of both warp roles for each tile.  before, after: the consumers' statements of a tile before and after
    the pipelined loop.  Keeps what is stored, and the order of everything except the waits, loads and GEMMs that are moved.
    Launches with clusters keep the program's order, because their blocks wait for each other at other places.
    """
    chain = None if tiles.once or tiles.cluster_map is not None or tiles.inside is not None else chain_of(r)
    code = None if chain is None else chained_tiles(r, chain)
    if chain is None or code is None:
        return None
    moved = [e for s in (*code.ahead, *code.start) for e in effects(s)]
    touched, written = {e.storage for e in moved}, {e.storage for e in moved if e.writes}
    if any(e.storage in (touched if e.writes else written) for s in (*before, *after) for e in effects(s)):
        return None
    index, every = tiles.index, [*tiles.binds, *(s for s in binds if isinstance(s, Bind))]

    def of(stmts: list[Stmt], it: Expr) -> Stmt:
        """Statements of tile `it`, under the condition that the block has this tile."""
        needed = needed_binds(every, set().union(*map(used_vars, stmts)))
        return If(binary("lt", it, tiles.count), seq(*rename([substitute(s, {index: it}) for s in (*needed, *stmts)])))

    shared = [s for s in before if isinstance(s, Alloc) and s.buffer.data in touched]
    own = [s for s in before if s not in shared]
    zero, following = const(0, index.dtype), index + const(1, index.dtype)
    body = code.body([of(code.ahead, following)], [of(code.start, following)])
    # On a path that no block takes, ptxas sees a GEMM in flight at the end.  Without this wait it adds one inside the loop.
    return [*shared, *code.made, of([*code.ahead, *code.start], zero), tiles.loop(*binds, *own, *body, *after),
            do("wgmma_wait", n=0), pin(chain.accumulator)]
