"""Turn T.thread_return of whole blocks into if/else: the code after it becomes the other branch.

    if bm * 64 >= count[e]:                   if bm * 64 >= count[e]:
        T.fill(O[...], 0)              ->         T.fill(O[...], 0)
        T.thread_return()                     else:
    T.copy(A, S)                                  T.copy(A, S)

The rest of the program is then ordinary work of the whole block. Without this pass some threads might have returned
before it, which warp roles, copies by TMA and vectorised code do not support.  Of a return in a loop, or in one of several
nested branches, a variable tells the rest:

    for i in range(n):                        left = 0
        if a[i] == bx:                        for i in range(n):
            return                                if a[i] == bx:
    rest                               ->             left = 1
                                                      break
                                              if left == 0:
                                                  rest
"""

from __future__ import annotations

from tilelang.ir import (Alloc, Break, Buffer, Call, Evaluate, For, If, Launch, Seq, Stmt, Store, While, binary, const,
                         dtype, load, replace, seq, walk, VARIABLE)
from tilelang.target.thread_calls import BLOCK_VOTES, CLOCKS

from ..analysis.divergence import Divergence
from ..analysis.effects import is_sync
from ..analysis.statements import flattened
from ..framework.pass_ import TILE, PassContext, pass_

# Calls that order the threads of one block, and those that a block which leaves makes good by leaving.
_BLOCK = ("sync_threads", "sync_warp", *BLOCK_VOTES, *CLOCKS, "pdl_sync", "pdl_trigger")


@pass_(needs=TILE, of=Launch)
def block_returns(n: Launch, cx: PassContext) -> Launch | None:
    """Turn returns that all threads of a block take into branches, for every target.

    Unchanged are returns in loops that are not serial, returns that only some threads take, and programs that order threads
    or blocks by hand.
    """
    if not _returns(n.body) or n.plan.cluster is not None or any(x.op == "in_warp_groups" or is_sync(x) and x.op not in (
            "thread_return", *_BLOCK) for x in walk(n.body, Call)):
        return None
    body = _Tail(n).of([n.body])
    return None if body is None else replace(n, body=seq(*body))


def _is_return(s: Stmt) -> bool:
    return isinstance(s, Evaluate) and s.call.op == "thread_return"


def _returns(s: Stmt | None) -> bool:
    return s is not None and any(x.op == "thread_return" for x in walk(s, Call))


class _Tail:
    def __init__(self, launch: Launch) -> None:
        self.divergence = Divergence(launch)

    def of(self, stmts: list[Stmt]) -> list[Stmt] | None:
        """The statements without returns, given that nothing follows them; None where a return remains."""
        flat = [y for x in stmts for y in flattened(x)]
        for k, s in enumerate(flat):
            if _is_return(s):
                return flat[:k]
            if _returns(s):
                rest = self.branch(s, flat[k + 1:])
                return None if rest is None else [*flat[:k], *rest]
        return flat

    def branch(self, s: Stmt, rest: list[Stmt]) -> list[Stmt] | None:
        """A statement that returns on some path, together with the statements that follow it."""
        if isinstance(s, If) and self.divergence.divergent(s.cond):
            return None
        outside = [x for x in rest if isinstance(x, Alloc) and x.init is None and
                   all(isinstance(n, int) for n in x.buffer.shape)]
        rest = [x for x in rest if not any(x is y for y in outside)]
        leave = [_ends([x]) for x in (s.then, s.orelse) if x is not None] if isinstance(s, If) else []
        if not isinstance(s, If) or rest and not any(leave):
            body = self.noted(s, rest)
        else:
            ways = [[x] if x is not None else [] for x in (s.then, s.orelse)]
            done = [self.of(w if not rest or _ends(w) else [*w, *rest]) for w in ways]
            body = None if done[0] is None or done[1] is None else [
                replace(s, then=seq(*done[0]), orelse=seq(*done[1]) if done[1] else None)]
        return None if body is None else [*outside, *body]

    def noted(self, s: Stmt, rest: list[Stmt]) -> list[Stmt] | None:
        """The same, with a variable that tells the rest whether the block has returned."""
        left = Buffer("left", (1,), dtype("int32"), VARIABLE, span=s.span)
        body, after = self.marked([s], left, False), self.of(rest)
        if body is None or after is None:
            return None
        here = binary("eq", load(left, (const(0),)), const(0))
        return [Alloc(left, const(0), span=s.span), *body, *([If(here, seq(*after), span=s.span)] if after else [])]

    def marked(self, stmts: list[Stmt], left: Buffer, loop: bool) -> list[Stmt] | None:
        """Statements that set `left` in place of a return.  loop: they stand in a loop, which is left then."""
        flat = [y for x in stmts for y in flattened(x)]
        gone = binary("ne", load(left, (const(0),)), const(0))
        out: list[Stmt] = []
        for k, s in enumerate(flat):
            if _is_return(s):
                return [*out, Store(left, (const(0),), const(1), span=s.span), *([Break(span=s.span)] if loop else [])]
            if not _returns(s):
                out.append(s)
                continue
            inner = isinstance(s, While) or isinstance(s, For) and s.kind == "serial"
            if not (inner or isinstance(s, If)) or self.divergence.uneven(s):
                return None
            if isinstance(s, If):
                ways = [None if x is None else self.marked([x], left, loop) for x in (s.then, s.orelse)]
                if ways[0] is None or s.orelse is not None and ways[1] is None:
                    return None
                out.append(replace(s, then=seq(*ways[0]), orelse=seq(*ways[1]) if ways[1] else None))
            elif isinstance(s, (For, While)):
                body = self.marked([s.body], left, True)
                if body is None:
                    return None
                out += [replace(s, body=seq(*body)), *([If(gone, Break(span=s.span), span=s.span)] if loop else [])]
            if not loop:
                rest = self.marked(flat[k + 1:], left, False)
                if rest is None:
                    return None
                return [*out, If(binary("eq", load(left, (const(0),)), const(0)), seq(*rest), span=s.span)] if rest else out
        return out


def _ends(stmts: list[Stmt]) -> bool:
    """Whether every path through these statements ends in a return."""
    return any(_is_return(s) or isinstance(s, Seq) and _ends(list(s.stmts)) or
               isinstance(s, If) and s.orelse is not None and _ends([s.then]) and _ends([s.orelse]) for s in stmts)
