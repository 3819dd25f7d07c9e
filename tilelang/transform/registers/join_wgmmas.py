"""Which wgmma instructions are printed as one `asm`, and which of them compute their descriptors inside it.

NVRTC's front end pays for each `asm` with all its operands (up to 128 accumulator registers, read and written): the eight
wgmma of one k-block of attention written as one took a third off its time, with the same instructions out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilelang.ir import AddressOf, Call, Const, Evaluate, Launch, Seq, Stmt, replace, rewrite, walk
from tilelang.ir import with_options

from ..framework.pass_ import DEVICE, PassContext, pass_

MOST = 16  # wgmma in one asm


@pass_(needs=DEVICE, of=Launch)
def join_wgmmas(launch: Launch, cx: PassContext) -> Any:
    """Mark wgmma that add to one accumulator by one form of one instruction, one after another.

        wgmma(c, a0, b0, keep)              wgmma(c, a0, b0, keep, based=True)
        wgmma(c, a1, b1, True)        ->    wgmma(c, a1, b1, True, joined=True)
        wgmma(c, a2, b2, True)              wgmma(c, a2, b2, True, joined=True)

    joined: in one asm with the wgmma before; only the first may ignore what the accumulator held.  based: the descriptors of
    the asm differ by constants and are computed in it from one for A and one for B, in launches whose accumulators are all in
    named registers.
    Keeps: statements and their order.
    """
    def visit(s: Seq | Evaluate) -> Stmt:
        stmts = s.stmts if isinstance(s, Seq) else (s,)
        out = tuple(x for run in _runs(stmts) for x in _mark(run))
        if all(a is b for a, b in zip(out, stmts)):
            return s
        return replace(s, stmts=out) if isinstance(s, Seq) else out[0]

    return rewrite(launch, visit, Seq, Evaluate) if any(c.op == "wgmma" for c in walk(launch.body, Call)) else None


def _mark(run: tuple[Stmt, ...]) -> Iterator[Stmt]:
    calls = [s.call for s in run if _is_wgmma(s)]  # type: ignore[attr-defined]
    for k, s in enumerate(run):
        if not calls:
            yield s
            continue
        call = with_options(calls[k], joined=k > 0, based=k == 0 and _is_based(calls))
        yield s if call is calls[k] else replace(s, call=call)


def _runs(stmts: Sequence[Stmt]) -> Iterator[tuple[Stmt, ...]]:
    """The statements in order, each alone but for wgmma that belong together."""
    at = 0
    while at < len(stmts):
        end = at + 1
        first = stmts[at]
        while _is_wgmma(first) and end < len(stmts) and end - at < MOST and _continues(first, stmts[end]):
            end += 1
        yield tuple(stmts[at:end])
        at = end


def _is_wgmma(s: Stmt) -> bool:
    return isinstance(s, Evaluate) and s.call.op == "wgmma"


def _continues(first: Any, s: Any) -> bool:
    if not _is_wgmma(s):
        return False
    a, b = first.call, s.call
    keeps = b.args[3]
    return (a.options.having(joined=None, based=None) == b.options.having(joined=None, based=None)
            and bool(b.args[0] == a.args[0]) and isinstance(keeps, Const) and bool(keeps.value)
            and isinstance(b.args[1], AddressOf) == isinstance(a.args[1], AddressOf))


def _is_based(calls: Sequence[Call]) -> bool:
    """Whether the descriptors of A and B (of B alone: A from registers) differ by constants, and no operand is an array."""
    own = calls[0].options.registers
    if "c" not in own or "a" not in own and isinstance(calls[0].args[1], AddressOf):
        return False
    for at in (1, 2):
        first = calls[0].args[at]
        if not isinstance(first, AddressOf) and any(
                not isinstance(e.args[at], Call) or _without_offset(e.args[at]) != _without_offset(first) for e in calls):
            return False
    return True


def _without_offset(e: Any) -> tuple[Any, ...]:
    """The common form of descriptors that differ by a constant."""
    return e.op, e.args, e.options.lbo, e.options.sbo, e.options.swizzle
