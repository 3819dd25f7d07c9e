"""Emits the producer warp group's code of a pipelined loop: the loads of each iteration, in the order of their use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir import (AddressOf, Bind, Expr, For, If, Region, Stmt, Var, binary, const, convert, replace, seq, substitute,
                         with_options)

from .consumer_schedule import late_rings
from ..analysis.statements import rename
from ..analysis.statements import do
from .rings import Ring, WarpRoleLoop


def producer(r: WarpRoleLoop, whole: list[Stmt], pure: list[Bind], tf32: Iterable[Var]) -> list[Stmt]:
    """All loads of a tile, in the order in which the consumers use them.

    In another order, a load that waits for its stage to be released could delay one that is needed earlier.

    whole: loads that are done once per tile.  They come after the first stage of the first ring: that stage is released
    inside the consumers' loop, their buffers only after it.  pure: bindings of an iteration that its loads may need.
    tf32: storage of tiles that are rounded to tf32 by the copy.
    """
    loop, rings = r.loop, r.rings
    k = Var(loop.var.name, loop.var.dtype)
    start, extent = convert(loop.start), convert(loop.extent)

    def loads(some: list[Ring], at: Expr) -> list[Stmt]:
        return _loads(r, some, at, pure, set(tf32))

    if len(rings) == 1:
        return [*whole, For(k, start, extent, "serial", seq(*loads(rings, k)), span=loop.span)]
    late = late_rings(r)
    early = [x for x in rings if x not in late]
    once = [If(binary("eq", k, start), seq(*whole))] if whole else []
    body = seq(*loads(early[:1], k), *once, *loads(early[1:], k))
    if late:
        body = seq(body, If(binary("gt", k, start), seq(*loads(late, k - 1))))
    out: list[Stmt] = [For(k, start, extent, "serial", body, span=loop.span)]
    some = binary("gt", extent, const(0, extent.dtype))
    if late or whole:
        out.append(If(some, seq(*loads(late, start + extent - 1)), seq(*rename(whole)) if whole else None))
    return out


def _loads(r: WarpRoleLoop, rings: list[Ring], k: Expr, pure: list[Bind], tf32: set[Var]) -> list[Stmt]:
    """The loads of iteration k into these rings."""
    mapping: dict[Var, Expr] = {r.loop.var: k}
    stmts: list[Stmt] = []
    for s in pure:
        v = Var(s.var.name, s.var.dtype)
        stmts.append(Bind(v, substitute(s.value, dict(mapping)), span=s.span))
        mapping[s.var] = v
    made = stmts
    for ring in rings:
        assert ring.full is not None and ring.empty is not None
        slot, parity = r.slot(k, ring.iterations)
        stmts = made if ring.iterations == 1 else []
        full = AddressOf(ring.full, (slot,))
        stmts.append(do("mbarrier_wait", AddressOf(ring.empty, (slot,)), binary("bitxor", parity, const(1, "uint32"))))
        stmts.append(do("mbarrier_arrive_expect_tx", full, const(ring.bytes(r.body.items), "uint32")))
        for i in ring.items:
            op: Any = r.body.items[i].stmt
            new = ring.buffers[op.dst.buffer]
            dst = Region(new, (slot, *(const(0) for _ in op.dst.extents)), (1, *op.dst.extents), span=op.dst.span)
            src = replace(op.src, mins=tuple(substitute(m, dict(mapping)) if isinstance(m, Expr) else m
                                             for m in op.src.mins))
            way = {"bulk": True, "boxes": True} if op.dst.buffer.ndim == 1 else {"tma": True}
            stmts.append(with_options(replace(op, src=src, dst=dst), **way, barrier=(ring.full, slot),
                                    tf32=op.dst.buffer.data in tf32 or None,
                                    cluster_split=ring.cluster_split(i)))
        if ring.iterations > 1:
            at = r.done(k) % ring.iterations
            made.append(If(binary("eq", at, const(0, at.dtype)), seq(*stmts)))
    return made
