"""Finds shared float32 tiles that a load may round to tf32, because only tf32 GEMMs read them.

wgmma truncates the low 13 bits of a float32 in shared memory, while mma.sync gets rounded registers.  TMA rounds while it
copies when its tensor map says tf32 (to nearest, ties away from zero, as cvt.rna.tf32.f32); then both compute the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilelang.ir import For, Launch, Var
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import is_tf32

from .effects import effects
from .pipeline_schedule import Item

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
