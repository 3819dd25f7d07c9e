"""Reject tile operations and parallel loops in code that only some threads of a block reach.

A tile operation or parallel loop is executed by all threads of the block. A statement that all threads run and that updates
an element of memory is the business of single_updates.
"""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For, Func, If, Launch, Load, Parallel,
                         Seq, Stmt, Store, TileOp, Var, While, binary, cast, children, controls, dtype, inner, replace,
                         rewrite_launches, statements, walk, with_inner, FRAGMENT, PRIVATE)

from tilelang.ops import Copy
from tilelang.target.warp_groups import names_warps

from ..analysis.divergence import Divergence, WarpSets, parted
from ..analysis.statements import BARRIERS
from ..framework.pass_ import TILE, PassContext, pass_

register("collective-divergent", NotImplementedError,
         "a tile operation or T.Parallel stands under a condition that depends on the thread",
         "whole warps that follow each other may do it by themselves: `if tx < 64:` or T.ws(0); otherwise move it out of the "
         "branch, or write the body per thread",
         expected="all threads of the block, or whole warps that follow each other", found="some of them")

register("collective-outside-kernel", NotImplementedError, "a tile operation or T.Parallel stands outside T.Kernel",
         "move it into the T.Kernel block", expected="a place inside T.Kernel")

register("fragment-store", ValueError, "a thread stores by itself in a fragment, outside T.Parallel",
         "store in T.Parallel, or use T.alloc_local for arrays of each thread and shared memory for what threads pass on",
         expected="one value from all threads, or T.Parallel")


@pass_(needs=TILE)
def check_collective(func: Func, cx: PassContext) -> Func:
    """Reject tile operations and parallel loops under a condition or loop bound that differs between threads of a block.

    Their lowering distributes the work over all threads of the block. Threads that do not reach them would not do their
    work, and the others would wait at a block barrier for ever. Warp roles of consecutive warps are allowed, and so are
    operations on private arrays, which each thread does for itself.
    """
    _outside(func.body)

    def checked(s: Launch) -> Launch | None:
        if s.num_threads == 1:
            return None
        by_thread = ByThread(s)
        _stmt(s.body, by_thread, None)
        reads = any(map(_reads_tile, statements(s.body)))
        return with_inner(s, lambda x: _voted(x, by_thread, Divergence(s))) if reads else None

    return rewrite_launches(func, checked)  # type: ignore[no-any-return]


def _reads_tile(s: Stmt) -> bool:
    """Whether a statement that each thread runs reads elements of a fragment."""
    return not isinstance(s, (Seq, Parallel, TileOp)) and any(
        isinstance(n, Load) and n.buffer.scope_name == FRAGMENT
        for e in children(s) if isinstance(e, Expr) for n in walk(e))


def _voted(s: Stmt, d: ByThread, strict: Divergence) -> Stmt:
    """Turn conditions on fragment elements around block-wide work into votes of the block. Every thread has the element, and
    the passes that place barriers then know that all threads take the same branch."""
    if not isinstance(s, (Seq, If, While, For)) or any(map(d.divergent, controls(s))):
        return s  # the vote itself needs all threads
    if isinstance(s, If) and names_warps(s.cond):
        return s
    out: Stmt = with_inner(s, lambda x: _voted(x, d, strict))
    if isinstance(s, (Seq, For)):
        return out
    cond = _vote(s, strict)
    return out if cond is s.cond else replace(out, cond=cond)  # type: ignore[call-arg]


def _vote(s: If | While, strict: Divergence) -> Expr:
    work = any(isinstance(x, (Parallel, TileOp)) and not _is_private(x) for p in inner(s) for x in statements(p))
    if not work or not strict.divergent(s.cond):
        return s.cond
    vote = Call("syncthreads_or", (cast(s.cond, "int32"),), dtype("int32"), span=s.span)
    return binary("ne", vote, Const(0, vote.dtype))


def of_host(s: Stmt) -> list[Stmt]:
    """The statements at and below s that the host runs."""
    return [] if isinstance(s, Launch) else [s, *(y for x in inner(s) for y in of_host(x))]


def _outside(body: Stmt) -> None:
    """Reject block-wide work in host code: there is no block in it."""
    for s in of_host(body):
        if isinstance(s, (Parallel, TileOp)):
            what = s.op_name if isinstance(s, TileOp) else "T.Parallel"
            raise error("collective-outside-kernel", f"{what} outside T.Kernel cannot run on the host of a GPU kernel",
                        found=f"{what} outside of it", span=s.span)  # type: ignore[attr-defined]


class ByThread(Divergence):
    """Values that differ between threads by their thread index. Values from memory and from votes count as uniform: a program
    that branches on them around a block-wide operation asserts it."""

    def holds_divergent(self, b: Buffer) -> bool:
        return b.data in self.locals and b.scope_name != FRAGMENT  # a fragment's element has one value, whoever holds it

    def _expr(self, e: Expr) -> bool:
        if isinstance(e, Var):
            return e in self.vars
        if isinstance(e, Load) and self.holds_divergent(e.buffer):
            return True
        if isinstance(e, Call) and e.op in BARRIERS:
            return False  # the result of a vote of the block is uniform
        if isinstance(e, Call) and e.op.startswith("get_") and not e.args:
            return True
        return any(self.divergent(c) for c in children(e) if isinstance(c, Expr))


def _stmt(s: Stmt, d: ByThread, branch: Stmt | None) -> None:
    """Check a statement.

    branch: the innermost enclosing statement that only some threads enter, or the jump by which some threads have left the
    loop or its iteration, or None.
    """
    match s:
        case Seq():
            for x in s.stmts:
                _stmt(x, d, branch)
                branch = branch or _left(x, d, (Break, Continue))
        case If():
            for x in inner(s):
                _stmt(x, d, branch or (s if d.divergent(s.cond) or _scattered(s.cond) else None))
        case For() | While():
            own = any(map(d.divergent, controls(s)))
            _stmt(s.body, d, branch or (s if own else _left(s.body, d, (Break,))))
        case Parallel() | TileOp() if branch is not None and not _is_private(s):
            if isinstance(branch, If) and not d.divergent(branch.cond):
                return  # warps that do not follow each other: role-place (lower_manual_warp_roles)
            what = s.op_name if isinstance(s, TileOp) else "T.Parallel"
            raise error("collective-divergent", f"{what} takes all threads of the block, and only some threads get "
                        "here", found=taken(branch, d.launch), span=s.span, notes=_why(branch))
        case Store() if s.buffer.scope_name == FRAGMENT and (
                branch is not None or d.divergent(s.value) or any(map(d.divergent, s.indices))):
            around = () if branch is None else _why(branch)
            raise error("fragment-store", f"threads store different things in `{s.buffer.name}`, of which every thread that "
                        "holds an element has a copy", found="a store that differs between threads", span=s.span, notes=around)
        case Evaluate() | Bind() | Store() if branch is not None:
            for c in (x for x in walk(s, Call) if x.op in BARRIERS):
                left = isinstance(branch, (Break, Continue))
                raise error("collective-divergent", f"T.{c.op} waits for all threads of the block, and only some threads get "
                            "here", span=s.span, notes=_why(branch),
                            hint="leave the loop under a condition that all threads share: T.syncthreads_or(cond) != 0" if left
                            else "move it out of the branch, or wait at a named barrier: T.sync_threads(id, threads)")


def taken(branch: Any, launch: Launch) -> str:
    """The threads that take a branch, in words for a message."""
    sets = WarpSets(launch)
    for b in walk(launch.body, Bind):
        sets.bind(b.var, b.value)
    return isinstance(branch, If) and sets.found(branch.cond) or "some of them"


def _why(branch: Stmt) -> tuple[tuple[Any, str], ...]:
    left = isinstance(branch, (Break, Continue))
    return ((getattr(branch, "span", None), "some threads leave here" if left else "entered by some threads only"),)


def _left(s: Stmt, d: ByThread, kinds: tuple[type, ...]) -> Stmt | None:
    """A jump of these kinds by which only some of the threads leave the loop around s."""
    return next((j for j in parted(s, lambda c: d.divergent(c) or _scattered(c)) if isinstance(j, kinds)), None)


def _scattered(cond: Expr) -> bool:
    """Whether a condition selects warps that do not follow each other. The lowering treats only others as a
    block of their own."""
    return not isinstance(cond, Call) and names_warps(cond)


def _is_private(s: Any) -> bool:
    """Whether an operation works on each thread's own memory, or names the thread that executes it. An element of a fragment
    does not count: all threads cooperate to read it."""
    if isinstance(s, Copy) and s.plan.by_hand and s.plan.leader_scope:
        return True
    accesses = s.accesses() if isinstance(s, TileOp) else ()  # type: ignore[attr-defined]
    scopes = {a.region.buffer.scope_name for a in accesses}
    return not scopes.isdisjoint(PRIVATE) and FRAGMENT not in scopes
