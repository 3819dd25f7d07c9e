"""Finds statements that only copy from global to shared memory, so that the copies may be asynchronous, or round to tf32."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import Buffer, Const, For, Launch, Load, Parallel, Stmt, Store, Var, GLOBAL, SHARED
from tilelang.layout.views import RowMajor
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import is_tf32

from ..framework.pass_ import PassConfigKey, PassContext
from .effects import effects
from .statements import copied, inline_index_binds, select_stores
from .pipeline_loops import Item
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


# ---- tiles that are rounded to tf32 ----------------------------------------------------------------------------------

# A load may round a shared float32 tile to tf32 where only tf32 GEMMs read it.
#
# wgmma truncates the low 13 bits of a float32 in shared memory, while mma.sync gets rounded registers.  TMA rounds while it
# copies when its tensor map says tf32 (to nearest, ties away from zero, as cvt.rna.tf32.f32); then both compute the same.

_FLOATS = ("float32", "tfloat32")


def tf32_tiles(launch: Launch, loop: For, items: list[Item]) -> frozenset[Var]:
    """The storages that copies of a loop fill and that only its tf32 GEMMs read."""
    inside = Counter(e.storage for e in effects(loop))
    elsewhere = {v for v, n in Counter(e.storage for e in effects(launch.body)).items() if n > inside[v]}
    out: set[Var] = set()
    for load in items:
        copy: Any = load.stmt
        if not isinstance(copy, Copy) or copy.src.dtype not in _FLOATS or copy.src.dtype != copy.dst.dtype:
            continue
        data = copy.dst.buffer.data
        readers = [x.stmt for x in items if x is not load and x.touches(data)]
        if data not in elsewhere and all(_multiplies(x, data) for x in readers):
            out.add(data)
    return frozenset(out)


def _multiplies(op: Any, data: Var) -> bool:
    """Whether a statement is a tf32 GEMM with the storage as an operand."""
    return isinstance(op, Gemm) and is_tf32(op) and op.c.buffer.data is not data


def rounded_tiles(ops: Any) -> frozenset[Var]:
    """The storages that copies with attr `tf32` fill."""
    return frozenset(x.dst.buffer.data for x in ops if isinstance(x, Copy) and x.plan.tf32)
