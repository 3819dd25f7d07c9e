"""Finds statements that only copy from global to shared memory, so that the copies may be asynchronous."""

from __future__ import annotations

from tilelang.arith import Analyzer
from tilelang.ir import Buffer, Const, Launch, Load, Parallel, Stmt, Store, GLOBAL, SHARED
from tilelang.layout.views import RowMajor
from tilelang.ops import Copy

from ..framework.config import PassConfigKey
from ..framework.pass_ import PassContext
from .loop_body import copied, inline_index_binds, select_stores
from .vectorize import Widths, bound_divisors, power_of_two_in


class CopiedTiles:
    """Which tile a statement of a launch copies to."""

    def __init__(self, launch: Launch, cx: PassContext) -> None:
        self.analyzer, self.divisors = Analyzer(), bound_divisors(launch.body)
        self.widths = Widths(lambda b: RowMajor(b.shape), int(cx.option(PassConfigKey.TL_GLOBAL_ALIGNMENT)))

    def of(self, s: Stmt) -> Buffer | None:
        """The shared tile that s only copies to from global memory, in a form that may be asynchronous; None for others."""
        if isinstance(s, Parallel):
            return self.gathered(s)
        return s.dst.buffer if isinstance(s, Copy) and s.src.buffer.scope_name == GLOBAL and \
            s.dst.buffer.scope_name in SHARED and s.src.dtype == s.dst.dtype and \
            s.plan.prefer_instruction != "sync" and not s.plan.by_hand else None

    def gathered(self, s: Stmt) -> Buffer | None:
        """The tile whose elements a parallel loop only copies, from where indices say, or sets to zero; pieces have 4 bytes."""
        store = select_stores(inline_index_binds(s.body, s.vars)) if isinstance(s, Parallel) else None
        if not isinstance(store, Store) or store.buffer.scope_name not in SHARED or not store.buffer.is_static:
            return None
        source, tile = copied(store.value)[1], store.buffer
        if not isinstance(s, Parallel) or not isinstance(source, Load) or source.buffer.scope_name != GLOBAL or \
                source.buffer.dtype != tile.dtype:
            return None
        for v, n in zip(s.vars, s.extents):
            lanes = power_of_two_in(int(n.value), 16) if isinstance(n, Const) else 1
            if all(self.widths.width(x.buffer, x.indices, v, lanes, self.analyzer, self.divisors) * tile.dtype.bytes >= 4
                   for x in (store, source)):
                return tile
        return None
