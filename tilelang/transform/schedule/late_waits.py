"""Lets GEMMs into one accumulator run under the statements that make the operands of the next one, and under what follows them.

    for i, j in Parallel(64, 32): K[i, j] = …             for i, j in Parallel(64, 32): K[i, j] = …
    gemm(K, Q[:, 0:32], S)                                start S += K Q[:, 0:32]
    for i, j in Parallel(64, 32): L[i, j] = …      ->     for i, j in Parallel(64, 32): L[i, j] = …
    gemm(L, Q[:, 32:64], S)                               start S += L Q[:, 32:64]; wait(1)
    for i, j in Parallel(64, 32): K[i, j] = …             for i, j in Parallel(64, 32): K[i, j] = …
    gemm(K, Q[:, 64:96], S)                               start S += K Q[:, 64:96]
    copy(A, B)                                            copy(A, B); wait(0)

A left operand lies in registers or in shared memory.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Launch, Parallel, Seq, Stmt, replace, rewrite_stmts, seq, walk, with_options, FRAGMENT,
                         LOCAL)
from tilelang.ops import Copy, Gemm
from tilelang.ops.gemm.wgmma import choose_wgmma

from ..analysis.effects import effects
from ..analysis.statements import do
from ..framework.pass_ import TILE, PassContext, pass_
from ..legalize.hopper_features import hopper
from ..legalize.manual_warp_roles import pinned


@pass_(needs=TILE, of=Launch, when=lambda cx: hopper(cx).wgmma)
def late_waits(launch: Launch, cx: PassContext) -> Launch | None:
    """Start GEMMs that follow each other into one accumulator without waiting for them; see the module's docstring.

    Keeps: every value. Between two of them are only statements that write registers which no wgmma in flight uses, or which
    are waited for in front of them; in loops, behind the last one, also such that write other shared memory.
    """
    gemms = list(walk(launch.body, Gemm))
    if launch.plan.by_hand or len(gemms) < 2 or any(x.plan.wait is not None for x in gemms):
        return None

    def chained(s: Stmt) -> Stmt | None:
        if not isinstance(s, Seq):
            return None
        out, at = list(s.stmts), 0
        while at < len(out):
            chain = _chain(out, at, launch.num_threads)
            end = at + 1 if not chain else chain[-1] + 1 if s is launch.body else _end(out, chain)
            if len(chain) > 1:
                for n in chain:
                    out[n] = with_options(out[n], wait=-1)
                out.insert(end, do("wgmma_wait", n=0))
            at = end
        return seq(*out, span=s.span) if out != list(s.stmts) else None

    body = rewrite_stmts(launch.body, chained)
    return None if body is launch.body else replace(launch, body=pinned(body))


def _chain(stmts: list[Any], first: int, threads: int) -> list[int]:
    """The GEMMs from `first` on that may be in flight together; [] where that is none."""
    if not _by_wgmma(stmts[first], threads):
        return []
    out, c = [first], stmts[first].c.buffer.data
    for n in range(first + 1, len(stmts)):
        s = stmts[n]
        if _by_wgmma(s, threads) and s.c.buffer.data is c:
            out.append(n)
        elif not isinstance(s, (Alloc, Bind, Parallel, Copy)) or any(
                e.storage is c or e.writes and e.buffer.scope_name not in (FRAGMENT, LOCAL) for e in effects(s)):
            break
    return out


def _end(stmts: list[Any], chain: list[int]) -> int:
    """Where GEMMs are waited for: behind the statements after them that neither use their result nor write their operands."""
    gemms = [stmts[n] for n in chain]
    used = [x.buffer.data for g in gemms for x in (g.a, g.b)]
    end = last = chain[-1] + 1
    while end < len(stmts) and isinstance(stmts[end], (Alloc, Bind, Parallel, Copy)) and not any(
            e.storage is gemms[0].c.buffer.data or e.writes and any(e.storage is x for x in used) for e in effects(stmts[end])):
        end += 1
        if isinstance(stmts[end - 1], (Parallel, Copy)):
            last = end
    return last


def _by_wgmma(s: Any, threads: int) -> bool:
    """Whether a statement is a GEMM by wgmma."""
    return isinstance(s, Gemm) and s.sparsity == 1 and not isinstance(choose_wgmma(s, threads), str)
