"""Join two steps of a loop over K where the tiles of one are narrower than what wgmma and TMA move at a time."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (SHARED, AddressOf, Alloc, Buffer, Const, For, Launch, Load, Region, Store, Var, const, convert,
                         is_const, replace, rewrite_stmts, seq, substitute, walk, with_options, GLOBAL)
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import choose_wgmma

from ..analysis.statements import without_names
from ..framework.pass_ import TILE, PassContext, pass_
from .hopper_features import may_resize

_WIDE = 1024  # bits of K: a row of the widest swizzle, four instructions


@pass_(needs=TILE, of=Launch, when=may_resize)
def joined_steps(n: Launch, cx: PassContext) -> Launch | None:
    """Give a pipelined loop of copies and GEMMs half as many steps of twice the length.

        for k in T.Pipelined(64, num_stages=4):         for k in T.Pipelined(32, num_stages=2):
            T.copy(A[by * 128, k * 32], a)  # 128 x 32      T.copy(A[by * 128, k * 64], a)  # 128 x 64
            T.copy(B[bx * 128, k * 32], b)          ->      T.copy(B[bx * 128, k * 64], b)
            T.gemm(a, b, c, transpose_B=True)               T.gemm(a, b, c, transpose_B=True)

    Steps of 64 bytes wait for a stage every two instructions, and TMA moves their short rows more slowly.  Applies to targets
    with wgmma, to loops of an even number of steps that are known, and to tiles that nothing else uses.  Off with
    tl.resize_blocks=False.
    Keeps: every element's value, bit by bit: the instructions are the same, in the same order.
    """
    out = n
    while not n.plan.layouts and (found := next((x for s in walk(out.body, For) if (x := _joined(s, out))), None)):
        out = found
    return None if out is n else out


def _joined(s: For, n: Launch) -> Launch | None:
    """The launch with two steps of a loop in one; None where that would be another program."""
    stmts: list[Any] = without_names(s.body)
    steps = int(s.extent.value) if isinstance(s.extent, Const) else 1
    copies = list(takewhile(lambda x: isinstance(x, Copy), stmts))
    gemms = stmts[len(copies):]
    if s.plan.num_stages < 2 or s.plan.counted or steps % 2 or not is_const(s.start, 0) or not gemms or not all(
            isinstance(op, Gemm) and _narrow(op, n.num_threads) for op in gemms):
        return None
    along = [(r.buffer, d) for op in gemms for r, d in ((op.a, int(not op.transpose_a)), (op.b, int(op.transpose_b)))]
    depth = dict(along)
    filled, owned = {op.dst.buffer for op in copies}, {x.buffer for x in walk(n.body, Alloc)}
    if filled != depth.keys() or not filled <= owned or len(filled) < len(copies) or (
            len({*along}) > len(depth) or len({op.c.buffer.data for op in gemms}) < len(gemms) or
            _uses(n, depth) > _uses(s, depth)):
        return None
    new = {b: replace(b, shape=tuple(e * (1 + (d == k)) for d, e in enumerate(b.shape)), data=Var(b.name, b.data.dtype))
           for b, k in depth.items()}
    longer = [_longer(op, depth[op.dst.buffer], s.var, new) for op in copies]
    if None in longer:
        return None
    products = [replace(op, a=_whole(op.a, new), b=_whole(op.b, new)) for op in gemms]
    loop = with_options(replace(s, extent=const(steps // 2, s.extent.dtype), body=seq(*longer, *products)),
                        num_stages=max(2, s.plan.num_stages // 2))
    out = replace(n, body=substitute(rewrite_stmts(n.body, lambda x: loop if x is s else None), new))
    return with_options(out, report=(*n.plan.report, f"a step of loop {s.var.name} does what two did: the tiles of one have "
                                     f"{gemms[0].k} elements along K"))


def _narrow(op: Gemm, threads: int) -> bool:
    """Whether wgmma adds a GEMM of two whole tiles in shared memory to an accumulator, and two steps are not too long."""
    return op.sparsity == 1 and 2 * op.k * op.a.dtype.bits <= _WIDE and is_const(op.clear_accum, False) and not isinstance(
        choose_wgmma(op, threads), str) and all(r.is_full and r.buffer.ndim == 2 and r.buffer.scope_name in SHARED
                                                for r in (op.a, op.b))


def _uses(n: Any, tiles: Any) -> int:
    """How often a statement names tiles."""
    data = {b.data for b in tiles}
    return sum(x.buffer.data in data for x in walk(n, Region, Load, Store, AddressOf))


def _whole(r: Region, new: dict[Buffer, Buffer]) -> Region:
    return replace(r, extents=new[r.buffer].shape)


def _longer(op: Copy, k: int, step: Var, new: dict[Buffer, Buffer]) -> Copy | None:
    """The copy of what two steps copy to a tile, whose dimension k follows the loop; None where they are no neighbours."""
    src, dst, short = op.src, op.dst, Analyzer().simplify
    along = [d for d, e in enumerate(src.extents) if not is_const(e, 1)]
    fixed = src.buffer.scope_name != GLOBAL or not dst.is_full or op.plan.loop_layout is not None
    if fixed or [src.extents[d] for d in along] != list(dst.extents):
        return None
    moved = [short(substitute(m, {step: step + 1}) - m) for m in map(convert, src.mins)]
    if not all(is_const(m, dst.extents[k] if d == along[k] else 0) for d, m in enumerate(moved)):
        return None
    mins = tuple(short(substitute(convert(m), {step: step * 2})) for m in src.mins)
    extents = tuple(2 * e if d == along[k] else e for d, e in enumerate(src.extents))
    return replace(op, src=replace(src, mins=mins, extents=extents), dst=_whole(dst, new))
