"""Wait for a wgmma that the program starts by hand where its registers are used before any wait.

    wgmma_gemm(A, B, s)                wgmma_gemm(A, B, s)
    for i, j in Parallel(64, 64):  ->  wgmma_wait(0)
        o[i, j] += s[i, j]             for i, j in Parallel(64, 64): o[i, j] += s[i, j]
"""

from __future__ import annotations

from tilelang.ir import (Buffer, Evaluate, Expr, For, If, Launch, Node, Parallel, Seq, Stmt, TileOp, Var, While, children,
                         seq, walk, with_inner, FRAGMENT)
from tilelang.ops import Gemm

from ..analysis.statements import do

# For each wgmma group that is surely in flight, newest first: (registers, whether it writes them).
_Flight = tuple[frozenset[tuple[Var, bool]], ...]


def wait_for_wgmma(launch: Launch) -> Launch:
    """Put a wait in front of statements that use registers of a wgmma of a T.wgmma_gemm in the same sequence of statements.

    Only where no path has waited: what loops and branches leave in flight is the program's to wait for (verify_sync).
    """
    return with_inner(launch, lambda s: _stmt(s, ())[0])  # type: ignore[no-any-return]


def _stmt(s: Stmt, flight: _Flight) -> tuple[Stmt, _Flight]:
    """(the statement with its waits, what is surely in flight behind it), given what is in front of it."""
    if isinstance(s, Seq):
        out: list[Stmt] = []
        for x in s.stmts:
            new, flight = _stmt(x, flight)
            out.append(new)
        return (s if all(a is b for a, b in zip(out, s.stmts)) else seq(*out, span=s.span)), flight
    if isinstance(s, Evaluate) and s.call.op in ("wgmma_wait", "wgmma_commit"):
        return s, flight[:s.call.options.n] if s.call.op == "wgmma_wait" else (frozenset(), *flight)
    met = _met(s, flight)
    first = [] if met is None else [do("wgmma_wait", n=met)]
    flight = flight if met is None else flight[:met]
    if isinstance(s, Gemm):
        if s.plan.wait == -1:
            own = ((r.buffer, r is s.c) for r in (s.a, s.c))
            flight = (frozenset((b.data, writes) for b, writes in own if b.scope_name == FRAGMENT), *flight)
        else:
            flight = ()
    elif isinstance(s, (If, For, While)):
        before = flight if isinstance(s, If) else ()
        s, flight = with_inner(s, lambda x: _stmt(x, before)[0]), ()
    return seq(*first, s, span=s.span) if first else s, flight


def _met(s: Stmt, flight: _Flight) -> int | None:
    """How many of the newest groups may stay in flight when s begins; None where s uses registers of none."""
    if not flight:
        return None
    uses: set[tuple[Var, bool]]  # (registers, whether a wgmma in flight that writes them is in the way)
    if isinstance(s, Gemm):  # the hardware orders wgmmas into one accumulator
        uses = {(s.a.buffer.data, True), *(((s.c.buffer.data, False),) if s.plan.wait == -1 else ())}
    else:
        whole = isinstance(s, (TileOp, Parallel)) or not isinstance(s, (If, For, While))
        parts: list[Node] = [s] if whole else [e for e in children(s) if isinstance(e, Expr)]
        used = {b.data for p in parts for b in walk(p, Buffer) if b.scope_name == FRAGMENT}
        if isinstance(s, Evaluate) and s.call.op in ("wgmma_pin", "wgmma_hold"):
            used = set()
        uses = {(v, writes) for v in used for writes in (True, False)}
    return next((n for n, group in enumerate(flight) if group & uses), None)
