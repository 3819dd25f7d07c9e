"""Turn T.thread_return of whole blocks into if/else: the code after it becomes the other branch.

    if bm * 64 >= count[e]:                   if bm * 64 >= count[e]:
        T.fill(O[...], 0)              ->         T.fill(O[...], 0)
        T.thread_return()                     else:
    T.copy(A, S)                                  T.copy(A, S)

The rest of the program is then ordinary work of the whole block. Without this pass some threads might have returned
before it, which warp roles, copies by TMA and vectorised code do not support.
"""

from __future__ import annotations

from tilelang.ir import Alloc, Call, Evaluate, If, Launch, Seq, Stmt, replace, seq, walk
from tilelang.target.thread_calls import CLOCKS

from ..analysis.divergence import Divergence
from ..analysis.effects import is_sync
from ..framework.pass_ import TILE, PassContext, pass_

_BLOCK = ("sync_threads", "sync_warp", *CLOCKS)  # calls that order only the threads of one block


@pass_(needs=TILE, of=Launch)
def block_returns(n: Launch, cx: PassContext) -> Launch | None:
    """Turn returns that all threads of a block take into branches, for every target.

    Unchanged are returns in loops, returns that only some threads take, and programs that order threads or blocks by hand.
    """
    body = _Tail(n).of([n.body]) if _returns(n.body) and not _by_hand(n) else None
    return None if body is None else replace(n, body=seq(*body))


def _is_return(s: Stmt) -> bool:
    return isinstance(s, Evaluate) and s.call.op == "thread_return"


def _returns(s: Stmt | None) -> bool:
    return s is not None and any(x.op == "thread_return" for x in walk(s, Call))


def _by_hand(n: Launch) -> bool:
    return n.plan.cluster is not None or any(
        x.op == "in_warp_groups" or x.op != "thread_return" and is_sync(x) and x.op not in _BLOCK for x in walk(n.body, Call))


class _Tail:
    def __init__(self, launch: Launch) -> None:
        self.divergence = Divergence(launch)

    def of(self, stmts: list[Stmt]) -> list[Stmt] | None:
        """The statements without returns, given that nothing follows them; None where a return remains."""
        flat = [y for x in stmts for y in (x.stmts if isinstance(x, Seq) else (x,))]
        if any(isinstance(x, Seq) for x in flat):
            return self.of(flat)
        for k, s in enumerate(flat):
            if _is_return(s):
                return flat[:k]
            if _returns(s):
                rest = self.branch(s, flat[k + 1:])
                return None if rest is None else [*flat[:k], *rest]
        return flat

    def branch(self, s: Stmt, rest: list[Stmt]) -> list[Stmt] | None:
        """A branch that returns on some path, together with the statements that follow it."""
        if not isinstance(s, If) or self.divergence.divergent(s.cond):
            return None
        outside = [x for x in rest if isinstance(x, Alloc) and x.init is None and
                   all(isinstance(n, int) for n in x.buffer.shape)]
        rest = [x for x in rest if not any(x is y for y in outside)]
        ways = [[x] if x is not None else [] for x in (s.then, s.orelse)]
        if rest:
            leave = [_ends(w) for w in ways]
            if not any(leave):
                return None
            ways = [w if gone else [*w, *rest] for w, gone in zip(ways, leave)]
        done = [self.of(w) for w in ways]
        if done[0] is None or done[1] is None:
            return None
        return [*outside, replace(s, then=seq(*done[0]), orelse=seq(*done[1]) if done[1] else None)]


def _ends(stmts: list[Stmt]) -> bool:
    """Whether every path through these statements ends in a return."""
    return any(_is_return(s) or isinstance(s, Seq) and _ends(list(s.stmts)) or
               isinstance(s, If) and s.orelse is not None and _ends([s.then]) and _ends([s.orelse]) for s in stmts)
