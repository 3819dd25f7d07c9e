"""Blocks that a condition switches off have a pipelined loop of no iterations."""

from __future__ import annotations

from tilelang.ir import (GLOBAL, Alloc, Bind, Expr, For, If, Launch, Load, Select, Stmt, const, contains, convert, free_vars,
                         replace, seq, stmts_of, substitute, walk)
from tilelang.ops import Gemm

from ..analysis.effects import acts, effects, expr_effects, fills_whole, hangs_on_threads
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.pipeline_loops import is_pipelined
from .hopper_features import hopper


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).warp_roles)
def guarded_blocks(n: Launch, cx: PassContext) -> Launch | None:
    """Move a condition around all that a block does into the length of its pipelined loop.

        if by * 128 < counts[g]:                       T.clear(c)
            T.clear(c)                                 for k in T.Pipelined(64 if by * 128 < counts[g] else 0):
            for k in T.Pipelined(64):           ->         ...
                ...                                    if by * 128 < counts[g]:
            T.copy(c, C[...])                              T.copy(c, C[...])

    A loop at the top of a launch gets blocks that go from tile to tile, with loads under the epilogue before.  Applies to
    targets with warp roles and loops of one length for all blocks, where the condition is the same for all threads and nothing
    that the kernel writes changes it.
    Keeps: what the kernel writes to global memory.
    """
    stmts = stmts_of(n.body)
    guards = [s for s in stmts if isinstance(s, If)]
    if len(guards) != 1 or guards[0].orelse is not None or not all(isinstance(s, (Alloc, Bind, If)) for s in stmts):
        return None
    inside = stmts_of(guards[0].then)
    loops = [s for s in inside if isinstance(s, For) and is_pipelined(s) and contains(s, Gemm)]
    if len(loops) != 1 or stmts[-1] is not guards[0] or not _steady(guards[0].cond, n):
        return None
    at = next(k for k, s in enumerate(inside) if s is loops[0])
    bound = {*n.block_vars, *(s.var for s in walk(n.body, Bind))}
    if contains(convert(loops[0].extent), Load) or free_vars(loops[0].extent) & bound:  # the longest blocks start first
        return None
    if any(isinstance(s, (Alloc, Bind)) and (contains(s, Load) or acts(s)) for s in inside[:at]):  # what it may guard
        return None
    body = [*(_guarded(s, guards[0].cond) for s in inside[:at]), _shortened(loops[0], guards[0].cond)]
    if inside[at + 1:]:
        body.append(replace(guards[0], then=seq(*inside[at + 1:])))
    return replace(n, body=seq(*stmts[:-1], *body))


def _steady(cond: Expr, n: Launch) -> bool:
    """Whether a condition has one value in all threads of a block, at any time."""
    for s in reversed(stmts_of(n.body)):
        cond = substitute(cond, {s.var: s.value}) if isinstance(s, Bind) else cond
    written = {e.storage for e in effects(n.body) if e.writes}
    return not hangs_on_threads(cond) and not free_vars(cond) & set(n.thread_vars) and all(
        not e.writes and e.buffer.scope_name == GLOBAL and e.storage not in written for e in expr_effects(cond))


def _guarded(s: Stmt, cond: Expr) -> Stmt:
    """A statement in front of the loop; what fills a tile of the block and reads nothing runs in any case."""
    plain = isinstance(s, (Alloc, Bind)) or fills_whole(s) and not any(
        e.reads or e.buffer.scope_name == GLOBAL for e in effects(s))
    return s if plain else If(cond, s, span=s.span)


def _shortened(s: For, cond: Expr) -> For:
    extent = convert(s.extent)
    return replace(s, extent=Select(cond, extent, const(0, extent.dtype), extent.dtype, True))
