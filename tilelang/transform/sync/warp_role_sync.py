"""Places barriers in warp-specialised launches: the barriers of each warp role count only that warp role's threads.

    A                              A: barriers of the block
    if in_warp_groups(1): P        sync_threads()                    # where A touches memory that others see
    if in_warp_groups(0): C   ->   if in_warp_groups(1): P with named_barrier(2, 128) in place of block barriers
    B                              if in_warp_groups(0): C with named_barrier(1, 128)
                                   sync_threads(); B
The barrier of a single warp is sync_warp().  Where the consumers of a pipeline need a barrier within each warp group only, it
is named_barrier(8 + group, 128).  Warp roles inside each other are synchronised from the outermost one on.

Accesses of different warp roles are ordered by mbarriers and named barriers, which the user or the pass that made the warp
roles has placed.  A warp role inside loops is also ordered with its own earlier iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (Bind, Call, Const, Continue, Evaluate, For, If, Launch, Load, Seq, Stmt, Store, Var, While, call,
                         const, fresh, inner, jumps_of, replace, rewrite, rewrite_stmts, seq, stmts_of, substitute, walk,
                         with_inner, SHARED)
from tilelang.ir.record import record
from tilelang.ops.tma_store import GROUP_BARRIERS
from tilelang.target.warp_groups import GROUP, PER_GROUP, WARP_LANES, moved, runs, warps_in, warps_of, ways_of_warps

from ..analysis.effects import effects, written_globals
from ..analysis.statements import barrier, has_warp_roles

register("role-barrier", ValueError, "a warp role needs a separate barrier and no number is left for it",
         "give T.sync_threads and T.named_barrier_arrive constant numbers, few enough to leave one of 1 to 7 free",
         expected="a barrier number from 1 to 7 that is free")

NUMBERS = range(1, 8)  # of named barriers for warp roles; ops/tma_store.py takes those from 8 on


def _joined(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The statements with branches of one warp role merged, so that iterations of that warp role are ordered inside one branch.

    Branches of other warp roles may lie between the merged ones.
    """
    out: list[Stmt] = []
    for s in stmts:
        role, k = _warps_of(s), len(out) - 1
        while role is not None and k >= 0 and _disjoint(_warps_of(out[k]), role) and getattr(out[k], "orelse", None) is None:
            k -= 1
        if role is not None and k >= 0 and _warps_of(out[k]) == role and isinstance(s, If) \
                and isinstance(last := out[k], If) and last.orelse is None and s.orelse is None:
            out[k] = replace(last, then=seq(last.then, s.then, span=last.then.span))
        else:
            out.append(s)
    return tuple(out)


def _warps_of(s: Stmt) -> tuple[int, int] | None:
    """The warps that take the `then` branch of a branch by warp role; None for other statements."""
    return warps_of(s.cond) if isinstance(s, If) else None


def _disjoint(a: tuple[int, int] | None, b: tuple[int, int]) -> bool:
    """Whether two warp roles have no warp in common."""
    return a is not None and (a[0] + a[1] <= b[0] or b[0] + b[1] <= a[0])


@record
class _Piece:
    """Consecutive statements.

    plain: without warp roles.  touches: whether code outside of warp roles accesses memory that other threads see.
    """

    stmts: tuple[Stmt, ...]
    plain: bool
    touches: bool


class WarpRoleSync:
    """Places the barriers of one launch, or of a warp role that holds others.

    synchronized: the function that does so for a launch.  outer: what places the barriers of the launch around this warp role.
    origin: its first warp in the block.  numbers: of the named barriers.
    """

    def __init__(self, launch: Launch, synchronized: Callable[[Launch, WarpRoleSync | None], Launch],
                 outer: WarpRoleSync | None) -> None:
        self.launch, self.synchronized = launch, synchronized
        self.origin: int = 0 if outer is None else outer.origin
        self.numbers: dict[tuple[int, int], int] = _numbers(launch) if outer is None else outer.numbers
        self.written = written_globals(launch.body)
        self.binds: list[Stmt] = []  # bindings seen so far, which addresses use
        self.around: list[tuple[For, int]] = []  # loops around a warp role, with the number of binds before each

    def has_groups(self, launch: Launch) -> bool:
        """Whether the threads of this launch are a warp role of several warp groups, the first ones of the block."""
        n, own = launch.num_threads, launch.plan.barrier_numbers or launch.plan.by_hand
        return self.launch.num_threads > n > GROUP and n % GROUP == self.origin == 0 and not own

    def body(self, s: Stmt, loops: bool) -> Stmt:
        """The statements of a block with warp roles.  loops: whether they are the body of a loop."""
        pieces = self.pieces(_joined(stmts_of(seq(*stmts_of(s)))))
        out: list[Stmt] = []
        for k, p in enumerate(pieces):
            if k and self.meets(pieces[k - 1], p):
                out.append(barrier(p.stmts[0]))
            out += self.block(self.launch, Seq(p.stmts)) if p.plain else self.with_warp_roles(p.stmts[0])
            self.binds += [x for x in p.stmts if isinstance(x, Bind)]
        if loops and any(p.touches for p in pieces):
            # `continue` bypasses the end of the body, so the barrier between two iterations goes to the beginning.
            out.insert(0 if any(isinstance(x, Continue) for x in jumps_of(s)) else len(out), barrier(s))
        return seq(*out, span=s.span)

    @staticmethod
    def meets(a: _Piece, b: _Piece) -> bool:
        """Whether a barrier goes between two pieces: one touches memory, and the other may do so (warp roles always may)."""
        return a.touches and (b.touches or not b.plain) or b.touches and not a.plain

    def pieces(self, stmts: tuple[Stmt, ...]) -> list[_Piece]:
        out: list[_Piece] = []
        run: list[Stmt] = []

        def close() -> None:
            if run:
                out.append(_Piece(tuple(run), True, self.touches(Seq(tuple(run)))))
                run.clear()

        for s in stmts:
            if has_warp_roles(s):
                close()
                out.append(_Piece((s,), False, self.outside(s)))
            else:
                run.append(s)
        close()
        return out

    def touches(self, s: Stmt) -> bool:
        return any(e.buffer.scope_name in SHARED or e.storage in self.written for e in effects(s))

    def outside(self, s: Stmt) -> bool:
        """Whether a statement with warp roles touches memory outside of them."""
        if _warps_of(s) is not None:
            return False
        return any(p.touches for x in inner(s) for p in self.pieces(stmts_of(x)))

    def block(self, launch: Launch, s: Stmt) -> list[Stmt]:
        """The statement s with its barriers, as the body of a block."""
        known = len(self.binds)
        got = stmts_of(self.synchronized(replace(launch, body=Seq((*self.binds, s))), self).body)
        return list(got[known:])

    def with_warp_roles(self, s: Stmt) -> list[Stmt]:
        if _warps_of(s) is not None:
            return [self.branches(s)]
        if isinstance(s, (For, While)):
            loop = s if isinstance(s, For) else For(fresh("turn"), const(0), fresh("turns"), "serial", s.body)
            self.around.append((loop, len(self.binds)))
            body = self.body(s.body, True)
            del self.binds[self.around.pop()[1]:]
            return [replace(s, body=body)]
        return [with_inner(s, lambda x: self.body(x, False))]

    def branches(self, s: Any) -> Stmt:
        """Place the barriers of a branch by warp role."""
        roles = {id(x): role for role, x in _warp_roles(s, self.launch) if x is s.orelse or _touches_alone(x)}
        return with_inner(s, lambda x: self.branch(x, *roles[id(x)]) if id(x) in roles else x)  # type: ignore[no-any-return]

    def branch(self, branch: Stmt, start: int, n: int) -> Stmt:
        threads, low = n * WARP_LANES, start * WARP_LANES
        branch = _of_warp_role(branch, threads)
        saved, (tx, ty, tz) = (self.binds, self.around, self.origin), self.launch.thread_vars
        own = Var(tx.name, tx.dtype)
        number = own + low if low else own
        launch = replace(self.launch, threads=(threads, 1, 1), thread_vars=(own, ty, tz))
        there, back = {}, {}
        branch, self.binds = moved(branch, -start), [moved(b, -start) for b in self.binds]
        if self.launch.threads[1:] == (1, 1):
            there, back = {tx: number}, {own: tx - low if low else tx}
            self.binds = [substitute(b, there) for b in self.binds]
        else:  # the thread indices become values that follow from the number of the thread
            x, y, _ = self.launch.threads
            launch = replace(launch, thread_vars=(own, fresh("ty"), fresh("tz")))
            self.binds = [Bind(tx, number % x), Bind(ty, number // x % y), Bind(tz, number // (x * y)), *self.binds]
            self.around = [(loop, known + 3) for loop, known in self.around]
        self.origin += start
        got = self.again_and_again(launch, substitute(branch, there))
        self.binds, self.around, self.origin = saved
        done = self.named(substitute(seq(*got, span=branch.span), back), self.origin + start, n)
        return moved(done, start)

    def again_and_again(self, launch: Launch, s: Stmt) -> list[Stmt]:
        """The statement s with its barriers, as the body of the surrounding loops.

        No thread starts the next iteration while others are still in this one, where that is needed.
        """
        binds, body = self.binds, s
        for loop, known in reversed(self.around):
            body = replace(loop, body=Seq((*binds[known:], body)))
            binds = binds[:known]
        self.binds, whole = binds, self.binds
        got = self.block(launch, body)
        self.binds = whole
        ends = [known for _, known in self.around[1:]] + [len(whole)]
        between = False  # whether a barrier lies between the iterations of an outer loop
        for (_, known), end in zip(self.around, ends):
            between |= any(isinstance(x, Evaluate) for x in got)
            loop = next(x for x in got if isinstance(x, For))
            got = _without_binds(stmts_of(loop.body), end - known)
        return [*got, barrier(s)] if between else got

    def named(self, s: Stmt, first: int, count: int) -> Stmt:
        """The statement s with barriers of these warps in place of block barriers."""

        def own(x: Stmt) -> Stmt | None:
            if not isinstance(x, Evaluate) or x.call.op != "sync_threads":
                return None
            number = x.call.options.number
            if x.call.options.by_group:
                of_group = const(GROUP_BARRIERS) + self.launch.thread_vars[0] // GROUP
                return Evaluate(call("named_barrier", (of_group, const(GROUP)), "void"), span=x.span)
            if number is None and count == 1:
                return Evaluate(call("sync_warp", (), "void"), span=x.span)
            number = self.number(first, count) if number is None else number
            return Evaluate(call("named_barrier", (const(number), const(count * WARP_LANES)), "void"), span=x.span)

        return rewrite_stmts(s, own)

    def number(self, first: int, count: int) -> int:
        """Number of the named barrier of a warp role; the program does not use it."""
        if -1 in self.launch.plan.barrier_numbers:
            raise error("role-barrier", "a warp role needs a separate barrier, and the program computes the "
                        "numbers of its barriers",
                        found="numbers that the program computes", span=self.launch.span)
        got = self.numbers.get((first, count))
        if got is None:
            raise error("role-barrier", "a warp role needs a separate barrier, and the program uses all", found="none",
                        span=self.launch.span)
        return got


def _warp_roles(s: If, launch: Launch) -> list[tuple[tuple[int, int], Stmt]]:
    """((first, count) of the warps that take it, the statement) for the ways of a branch by warp role."""
    return [(runs(come)[0], part) for come, part in (warps_of(s.cond) and ways_of_warps(s, warps_in(launch))) or () if come]


def _numbers(launch: Launch) -> dict[tuple[int, int], int]:
    """A named barrier for each warp role of several warps, by (first, count), as far as there are any: 1 + the number of its
    first warp group where that is free."""
    used = launch.plan.barrier_numbers  # by the user's own calls (lower_manual_warp_roles.py)
    free = [k for k in NUMBERS if k not in used]
    sets = {role for x in walk(launch.body, If) for role, _ in _warp_roles(x, launch)}
    out: dict[tuple[int, int], int] = {}
    for first, count in sorted(sets):
        own = first // PER_GROUP + 1
        if not used and first % PER_GROUP == 0 and own in free and count > 1:
            out[first, count] = own
            free.remove(own)
    for some in sorted(sets - out.keys()):
        if free and some[1] > 1:
            out[some] = free.pop(0)
    return out


def _of_warp_role(branch: Stmt, count: int) -> Stmt:
    """Treat a barrier that the user numbered and that all threads of the warp role pass like those placed here."""

    def visit(x: Any) -> Any:
        if isinstance(x, Evaluate) and x.call.op == "named_barrier" and all(isinstance(a, Const) for a in x.call.args):
            number, n = (int(a.value) for a in x.call.args)  # type: ignore[attr-defined]
            return Evaluate(call("sync_threads", (), "void", number=number), span=x.span) if n == count else None
        return None

    return rewrite(branch, visit, Evaluate)


def _touches_alone(branch: Stmt) -> bool:
    """Whether a branch has accesses to shared memory that mbarriers do not order, or atomics."""
    return any(isinstance(x, (Load, Store)) and x.buffer.scope_name in SHARED and not x.buffer.facts.numbers or
               isinstance(x, Call) and (x.op in ("sync_threads", "stmatrix", "cp_async", "tma_store") or
                                        x.op.startswith("atomic_") and not x.args[0].buffer.facts.ordered)  # type: ignore
               for x in walk(branch, Load, Store, Call))


def _without_binds(stmts: Sequence[Stmt], n: int) -> list[Stmt]:
    """The statements without the first n bindings; barriers between those stay."""
    out: list[Stmt] = []
    for x in stmts:
        if n and isinstance(x, Bind):
            n -= 1
        else:
            out.append(x)
    return out
