"""Places block barriers between conflicting accesses of different threads."""

from __future__ import annotations

from dataclasses import replace

from tilelang.ir import (Alloc, Bind, Break, Buffer, Call, Continue, Evaluate, Expr, For, If, Launch, Seq, Stmt, Store, Var,
                         While, const, dtype, fresh, load, logical, replace as with_fields, seq, substitute, unary, walk,
                         VARIABLE)
from tilelang.ir.record import record

from ..analysis.access_table import GroupTables, Reach, Tables, separate
from ..analysis.accesses import Access, Loop, Relation, must_be_placed
from ..analysis.divergence import Divergence
from ..analysis.effects import cannot_fail
from ..framework.pass_ import SYNCED, THREADS_BOUND, PassConfigKey, PassContext, pass_
from .proxy_fences import fence_arrivals, fence_barriers, fence_waits
from .warp_role_sync import WarpRoleSync
from ..analysis.statements import barrier, barrier_in, has_warp_roles
from .sync_tree import Place, TreeBuilder, Unplaceable, unplaceable

CAP = 12  # iterations and async groups counted exactly; beyond, "any number"
ITERATIONS = 4_000  # passes over loop bodies, after which iteration distances are no longer counted: nested loops multiply them


@pass_(needs=THREADS_BOUND, gives=SYNCED, of=Launch,
       when=lambda cx: not cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC))
def place_sync(launch: Launch, cx: PassContext) -> Launch:
    """Put a block barrier between any two conflicting accesses of different threads to one element.

    Two accesses conflict when one of them is a write; two atomic accesses conflict when their order matters (accesses.py).

    Before:                          After:
        S[tx] = A[tx]                    S[tx] = A[tx]
        B[tx] = S[63 - tx]               sync_threads()
                                         B[tx] = S[63 - tx]
    The pass handles shared memory, and global memory that the kernel itself writes.  It includes loop-carried pairs of for
    and while loops with their iteration distance: slots (k + c) % n of a pipeline do not conflict while they differ.  An
    asynchronous copy counts as a write, and an operand of wgmma as a read, at the wait for its group.  A barrier needed where
    only some threads arrive moves in front of the branch, or the branch is split; where neither is possible the program is
    rejected ("sync-divergent").
    Keeps: existing barriers.  Off with tl.disable_thread_storage_sync.
    """
    done = synchronized(launch)
    done = with_fields(done, body=fence_waits(done.body))
    return fence_arrivals(done) if launch.plan.by_hand else done


def _fenced(launch: Launch, body: Stmt) -> Stmt:
    """The body of a launch with fences at its barriers; fence_arrivals places those of launches with barriers of the user."""
    return body if launch.plan.by_hand else fence_barriers(body)


def synchronized(launch: Launch, outer: WarpRoleSync | None = None) -> Launch:
    """The launch with its barriers.  outer: where it stands for a warp role, what places the barriers around it."""
    if launch.num_threads == 1:
        return launch
    if has_warp_roles(launch.body):
        return with_fields(launch, body=WarpRoleSync(launch, synchronized, outer).body(launch.body, False))
    ignored: set[int] = set()
    while True:
        tree = TreeBuilder(launch)
        if not any(True for _ in tree.root.all_accesses()):
            return launch
        divergence = Divergence(launch)
        try:
            places = _spared(tree, ignored)
            _Flow(Tables(launch, tree.binds, divergence)).run(tree.root)
        except _TooDeep:
            tree = TreeBuilder(launch)
            places = _spared(tree, ignored)
            _Flow(Tables(launch, tree.binds, divergence), coarse=True).run(tree.root)
        if not tree.root.before and not tree.root.has_barrier:
            return with_fields(launch, body=_fenced(launch, launch.body))
        if outer is not None and outer.has_groups(launch):
            _Flow(GroupTables(Tables(launch, tree.binds, divergence))).narrow(tree.root)
        try:
            return with_fields(launch, body=_fenced(launch, _Writer(divergence).body(tree.root)))
        except Unplaceable as e:
            # Under divergent control flow, the program itself is responsible for the order of its accesses to global memory and
            # for communication by atomics.
            inside = set(map(id, e.place.all()))
            drop = {k for k, p in enumerate(places) if id(p) in inside and (p.before or p.body_end) and not p.for_shared}
            if not drop:
                raise unplaceable(e.place) from None
            ignored |= drop


def _spared(tree: TreeBuilder, ignored: set[int]) -> list[Place]:
    """The places of a tree; the ignored ones (by number) get barriers only where shared memory needs them."""
    places = list(tree.root.all())
    for k in ignored:
        places[k].never = True
    return places


@record
class _Pending:
    """An access that is not yet ordered before later statements, and the relation of its iterations to theirs."""

    access: Access
    how: Relation

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.access, self.how)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]


_HERE = Relation()  # in the same iterations of all loops
_REST = _Pending(Access(Buffer("other memory", (1,), dtype("uint8")), False, False, None, None, 1, (), (), False, None), _HERE)

# Pending access -> None once it has happened; for an asynchronous one the number of groups committed after it (-1: its own
# group is not committed yet).
_State = dict[_Pending, "int | None"]


class _TooDeep(Exception):
    """Nested loops take more passes than ITERATIONS."""


# What a sequence of statements did to one state: the states before each statement and after the last.
_Run = list[_State]


class _Flow:
    """Forward data flow analysis that marks where barriers go.

    While barriers are removed again, each sequence that leaves no loop keeps what it did to a state.  After the change of one
    statement it is followed from there until the state is what it was before: the statements behind that give what they gave.
    """

    def __init__(self, tables: Tables | GroupTables, coarse: bool = False) -> None:
        """coarse: assume that any two iterations of a loop may be any distance from each other; never gives fewer barriers."""
        self.t, self.coarse, self.count = tables, coarse, 0
        self.relevant: dict[Loop, bool] = {}
        self.inside: dict[Loop, list[Access]] = {}
        self.bounds: dict[Place, dict[Var, dict[Buffer, Reach]]] = {}
        self.checking = False
        self.placed = 0  # barriers marked so far
        self.runs: dict[Place, list[_Run]] = {}  # with the present barriers; only while checking
        self.trial: dict[Place, list[_Run]] = {}  # without the barrier that is tried: of the sequences around it
        self.around: dict[Place, int] = {}  # those sequences, and in which of their statements it is
        # with the present barriers: loops are followed in each pass over the loop around them, mostly from a state seen before
        self.loops: dict[tuple[Place, frozenset[tuple[_Pending, int | None]]], _State] = {}
        # per loop: the states at its breaks, and the states at its continues with their places
        self.leaving: list[tuple[list[_State], list[tuple[_State, Place]]]] = []

    def run(self, root: Place) -> None:
        self._look(root)
        self.whole(root)
        self.prune(root)

    def _look(self, root: Place) -> None:
        self.inside.update((p.loop, list(p.all_accesses())) for p in root.all() if p.loop is not None)

    def whole(self, root: Place) -> None:
        """Follow a launch, or the statements of a loop between warp roles.

        warp_role_sync.py orders what follows their break and continue by a barrier of its own.
        """
        self.loops.clear()
        self.leaving.append(([], []))
        self.flow(root, {})
        self.leaving.pop()

    def prune(self, root: Place) -> None:
        """Remove barriers that other barriers make redundant, those in the innermost loops first."""
        marked: list[tuple[int, int, Place, str, dict[Place, int]]] = []
        _collect(root, 0, {}, marked)
        self.checking = True
        if not marked or not self.holds(root):
            return
        for _, _, p, mark, self.around in sorted(marked, key=lambda m: m[:2], reverse=True):
            setattr(p, mark, False)
            self.trial = {}
            if self.holds(root):
                self.runs.update({x: self.trial.get(x, []) for x in self.around})
            else:
                setattr(p, mark, True)

    def narrow(self, root: Place) -> None:
        """Mark the barriers that no conflict between warp groups needs: each group has them for itself."""
        before = [(p, mark) for p in root.all() for mark in ("before", "body_end") if getattr(p, mark)]
        self._look(root)
        try:
            self.prune(root)
        except _TooDeep:
            pass
        for p, mark in before:
            if not getattr(p, mark):
                p.by_group.add(mark)
                setattr(p, mark, True)

    def holds(self, root: Place) -> bool:
        """Whether the marked barriers suffice."""
        try:
            self.whole(root)
        except _Needed:
            self.leaving.clear()
            return False
        return True

    def need(self, p: Place, mark: str) -> None:
        """Mark that a place needs a barrier; when checking, raise _Needed instead."""
        if self.checking:
            raise _Needed
        self.placed += not getattr(p, mark)
        self.loops.clear()
        setattr(p, mark, True)

    # ---- transfer -----------------------------------------------------------------------------------------------

    def flow(self, p: Place, state: _State) -> _State:
        """The state after p, given the state before it; marks barriers."""
        if p.before:
            state = _cleared(state)
        s = p.stmt
        if isinstance(s, Seq):
            return self.sequence(p, state)
        if isinstance(s, While):
            return self.while_loop(p, state)
        leaf = not p.inner
        if not leaf:
            state = self.hoist(p, state)  # before what p reads itself, which stays pending inside
        state = self.own(p, state)
        if leaf:
            if isinstance(s, Break):
                self.leaving[-1][0].append(state)
                return {}
            if isinstance(s, Continue):
                self.leaving[-1][1].append((state, p))
                return {}
            return _after_async(s, state)
        if isinstance(s, If):
            outs = [self.flow(x, state) for x in p.inner]
            out = _merged(*outs) if s.orelse is not None else _merged(state, *outs)
            return _after_waits(s, out) if self.t.divergence.divergent(s.cond) else out
        if isinstance(s, For):
            assert p.loop is not None
            if not self.inside[p.loop] and not p.orders:
                return state  # a loop over registers
            return self.for_loop(p, state)
        for x in p.inner:
            state = self.flow(x, state)
        return state

    def sequence(self, p: Place, state: _State) -> _State:
        """The state after the statements of a Seq."""
        if not self.checking or p.jumps:
            for x in p.inner:
                state = self.flow(x, state)
            return state
        first = self.around.get(p)  # the first statement that may give another state than before
        known = self.trial if first is not None else self.runs
        run = _found(known.get(p), state)
        if run is None:
            old = None if first is None else _found(self.runs.get(p), state)
            run = [state] if old is None or first is None else old[:first + 1]
            while (at := len(run) - 1) < len(p.inner) and (old is None or at <= (first or 0) or run[at] != old[at]):
                run.append(self.flow(p.inner[at], run[at]))
            run += [] if old is None else old[len(run):]
            known.setdefault(p, []).append(run)
        return run[-1]

    def own(self, p: Place, state: _State) -> _State:
        """Apply the accesses that a statement makes itself."""
        if barrier_in(p.stmt):
            return _cleared(state)
        if not p.before and self.conflicts(state, p.accesses, p):
            self.need(p, "before")
            state = _cleared(state)
        if p.accesses:
            state = dict(state)
            for a in p.accesses:
                state[_Pending(a, _HERE)] = -1 if a.is_async else None
        return state

    def hoist(self, p: Place, state: _State) -> _State:
        """Put a barrier in front of p for a conflict between an access before p and one inside p."""
        if self.checking or p.before or not any(age is None and (
                e.access.buffer.data in p.storages or not p.storages.isdisjoint(self.t.sharing.get(e.access.buffer.data, ())))
                for e, age in state.items()):
            return state
        for x in p.inner:  # the barriers that p needs by itself come first: they may already separate the two accesses
            self.flow_alone(p, x)
        return self.hoist_exposed(p, state)

    def hoist_exposed(self, p: Place, state: _State) -> _State:
        exposed: list[Access] = []
        for x in p.inner:
            _exposed(x, exposed)
        if self.conflicts(state, exposed, p):
            self.need(p, "before")
            return _cleared(state)
        return state

    def flow_alone(self, p: Place, x: Place) -> None:
        if p.loop is None:
            self.leaving.append(([], []))  # break and continue of an outer loop are not followed here
            self.flow(x, {})
            self.leaving.pop()
        else:
            self.for_loop(p, {})

    def conflicts(self, state: _State, accesses: list[Access], p: Place) -> bool:
        """Whether an access conflicts with a pending one, so that p needs a barrier.  Records at p whether it is mandatory."""
        found = False
        for b in accesses:
            data, shared = b.buffer.data, self.t.sharing.get(b.buffer.data, ())
            for e, age in state.items():
                a = e.access
                if age is None and (a.writes or b.writes) and (
                        a.buffer.data is data or a.buffer.data in shared) and self.t.collide(e.access, b, e.how) and not (
                            a.counted is not None and a.counted.same(b.counted) and e.how == _HERE):  # boxes of one load
                    found = True
                    p.for_shared |= b.is_shared and must_be_placed(e.access, b, self.t.divergence)
                    if p.for_shared or self.checking and not p.never:
                        return True
        return found and not p.never

    # ---- loops --------------------------------------------------------------------------------------------------

    def for_loop(self, p: Place, state: _State) -> _State:
        key = p, frozenset(state.items())
        out = self.loops.get(key)
        if out is None:
            out = self.iterations(p, state)
            self.loops[key] = out
        return out

    def iterations(self, p: Place, state: _State) -> _State:
        """The state after a loop."""
        loop = p.loop
        assert loop is not None
        state, rest = self.aside(p, state)
        entry = {_Pending(e.access, self.entered(e, loop)): age for e, age in state.items()}
        if self.is_simple(p):
            self.leaving.append(([], []))
            out = self.flow(p.inner[0], entry)
            breaks, continues = self.leaving.pop()
            breaks += [at for at, _ in continues]
        else:
            out, breaks = self.fixpoint(p, loop, entry, None)
        ends = [out, *breaks]
        if loop.count is None or loop.count == 0:
            ends.append(entry)
        return _rejoined(_outside(_merged(*ends), loop), rest)

    def aside(self, p: Place, state: _State) -> tuple[_State, _State]:
        """(what a loop may conflict with or complete, the rest).  One access stands for the rest in the loop, where barriers
        end it like others."""
        near = self.near(p)
        inner = {e: age for e, age in state.items() if age is not None or e.access.signals is not None or (
            (at := e.access.buffer).data in near and not separate(near[at.data].get(at), self.t.reach(e.access)))}
        if len(state) - len(inner) < 2:
            return state, {}
        rest = {e: age for e, age in state.items() if e not in inner}
        inner[_REST] = None
        return inner, rest

    def near(self, p: Place) -> dict[Var, dict[Buffer, Reach]]:
        """The storages that a loop touches, and within what bounds, where they are known."""
        if p not in self.bounds:
            out = self.bounds[p] = {y: {} for x in p.storages for y in (x, *self.t.sharing.get(x, ()))}
            seen: dict[Var, list[Access]] = {}
            for a in (*p.accesses, *self.inside[p.loop]):  # type: ignore[index]
                seen.setdefault(a.buffer.data, []).append(a)
            for storage, some in seen.items():
                reach, b = [r for a in some if (r := self.t.reach(a))], some[0].buffer
                if len(reach) == len(some) and storage not in self.t.sharing and all(a.buffer is b for a in some):
                    out[storage][b] = [(min(x[0] for x in d), max(x[1] for x in d)) for d in zip(*reach)]
        return self.bounds[p]

    def is_simple(self, p: Place) -> bool:
        """Whether no iteration can conflict with another, or complete an operation that another began: one pass suffices."""
        assert p.loop is not None
        return not p.orders and (p.loop.independent or not any(a.writes for a in self.inside[p.loop]))

    def while_loop(self, p: Place, state: _State) -> _State:
        loop = p.loop
        assert loop is not None
        if not p.before and self.conflicts(state, p.accesses, p):
            self.need(p, "before")
            state = _cleared(state)
        if not self.checking:
            state = self.hoist_exposed(p, state)
        state, rest = self.aside(p, state)
        test: _State = {_Pending(a, _HERE): None for a in p.accesses}
        entry = {_Pending(e.access, self.entered(e, loop)): age for e, age in _merged(state, test).items()}
        out, breaks = self.fixpoint(p, loop, entry, p)
        return _rejoined(_outside(_merged(out, entry, *breaks), loop), rest)

    def fixpoint(self, p: Place, loop: Loop, entry: _State, test: Place | None) -> tuple[_State, list[_State]]:
        """Run the body until nothing changes: (state after an iteration, states at breaks)."""
        now = entry
        while True:
            self.count += 1
            if self.count > ITERATIONS and not self.coarse:
                raise _TooDeep
            marks = self.placed
            self.leaving.append(([], []))
            out = self.flow(p.inner[0], now)
            breaks, continues = self.leaving.pop()
            if p.body_end:
                out = _cleared(out)
            # the condition is read at the end of every path through the body; a `continue` bypasses the barrier at the end
            if test is not None:
                if not p.body_end and self.conflicts(self.again(p, loop, out), test.accesses, p):
                    self.need(p, "body_end")
                for state, at in continues:
                    if not at.before and self.conflicts(self.again(p, loop, state), test.accesses, at):
                        self.need(at, "before")
            out = _merged(out, *(state for state, _ in continues))
            back = self.again(p, loop, out)
            for a in test.accesses if test is not None else ():
                back[_Pending(a, _HERE)] = None
            if self.placed != marks:  # a barrier was added: the state so far is out of date
                now = entry
                continue
            following = _merged(entry, back, now)
            if following == now:
                return out, breaks
            now = following

    def again(self, p: Place, loop: Loop, state: _State) -> _State:
        """The state after an iteration of a loop, as seen by the next iteration."""
        back: _State = {}
        # Iterations that stand for blocks: nothing orders their global accesses.
        apart = isinstance(p.stmt, For) and p.stmt.plan.tiles
        for e, age in state.items():
            if apart and not e.access.is_shared:
                continue
            e2 = _Pending(e.access, self.next_iteration(e, loop))
            back[e2] = _older(back[e2], age) if e2 in back else age
        return back

    def matters(self, loop: Loop) -> bool:
        """Whether the number of the loop's iterations between two accesses can affect the result."""
        if loop not in self.relevant:
            inside = self.inside[loop]
            self.relevant[loop] = (not self.coarse and not loop.independent and any(a.writes for a in inside) and
                                   self.t.rotates(loop, inside))
        return self.relevant[loop]

    def entered(self, e: _Pending, loop: Loop) -> Relation:
        return replace(e.how, entered=(*e.how.entered, (loop, 0))) if self.matters(loop) else e.how

    def next_iteration(self, e: _Pending, loop: Loop) -> Relation:
        """How e relates to the next iteration of loop, given how it relates to this one."""
        for k, (x, n) in enumerate(e.how.entered):
            if x is loop:
                rest = (*e.how.entered[:k], *e.how.entered[k + 1:])
                return replace(e.how, entered=rest if n >= CAP else (*rest, (x, n + 1)))
        carried = e.how.carried
        if carried is not None and carried[0] is loop:
            return Relation((loop, None if carried[1] is None or carried[1] >= CAP else carried[1] + 1))
        if carried is not None or loop not in e.access.loops:
            return e.how
        return Relation((loop, 1 if self.matters(loop) else None))


def _outside(state: _State, loop: Loop) -> _State:
    """The state after a loop: relations to its iterations are dropped."""
    out: _State = {}
    for e, age in state.items():
        how = e.how
        if any(x is loop for x, _ in how.entered):
            how = replace(how, entered=tuple((x, n) for x, n in how.entered if x is not loop))
        if how.carried is not None and how.carried[0] is loop:
            how = replace(how, carried=None)
        e2 = e if how is e.how else _Pending(e.access, how)
        out[e2] = _older(out[e2], age) if e2 in out else age
    return out


def _rejoined(state: _State, rest: _State) -> _State:
    """The state after a loop with what stood aside, where a path through the loop has no barrier."""
    if not rest or _REST not in state:
        return state
    del state[_REST]
    return {**state, **rest}


def _older(x: int | None, y: int | None) -> int | None:
    """The less finished of two ages of one asynchronous access; having happened counts as a hazard of its own."""
    if x is None or y is None:
        return None
    return min(x, y)


def _merged(*states: _State) -> _State:
    out = dict(states[0])
    for s in states[1:]:
        for e, age in s.items():
            out[e] = _older(out[e], age) if e in out else age
    return out


def _cleared(state: _State) -> _State:
    """The state after a block barrier: only asynchronous copies in flight are still pending."""
    return {e: age for e, age in state.items() if age is not None}


def _after_async(s: Stmt, state: _State) -> _State:
    """The state after commits of and waits for asynchronous copies and wgmmas."""
    if not isinstance(s, Evaluate):
        return state
    op, wgmma = s.call.op, s.call.op.startswith("wgmma")
    if op in ("cp_async_commit", "wgmma_commit"):
        return {e: age if age is None or e.access.by_wgmma != wgmma else min(age + 1, CAP + 4) for e, age in state.items()}
    # all threads wait: what signals that mbarrier has happened, and all threads have observed it
    if op == "mbarrier_wait":
        bar = s.call.args[0].buffer  # type: ignore[attr-defined]
        return {e: age for e, age in state.items() if e.access.signals is not bar}
    if op in ("cp_async_wait", "wgmma_wait"):
        n = s.call.options.n
        return {e: None if age is None or e.access.by_wgmma == wgmma and age >= n else age for e, age in state.items()}
    return state


def _after_waits(s: If, state: _State) -> _State:
    """The state after a branch in which some threads wait for loads: a barrier orders copies that other threads start then."""
    waits = {c.args[0].buffer for c in walk(s, Call) if c.op == "mbarrier_wait"}  # type: ignore[attr-defined]
    return {replace(e, access=replace(e.access, counted=None)) if e.access.counted is not None and
            e.access.counted.buffer in waits else e: age for e, age in state.items()} if waits else state


class _Needed(Exception):
    """A barrier is missing."""


def _found(runs: list[_Run] | None, state: _State) -> _Run | None:
    return next((r for r in runs or () if r[0] == state), None)


def _collect(p: Place, depth: int, around: dict[Place, int], out: list[tuple[int, int, Place, str, dict[Place, int]]]) -> None:
    """Append (loop depth, position, place, mark, sequences around the place) of every barrier placed below p."""
    if p.before:
        out.append((depth, len(out), p, "before", around))
    inner = depth + (p.loop is not None)
    sequence = isinstance(p.stmt, Seq)
    for k, x in enumerate(p.inner):
        _collect(x, inner, {**around, p: k} if sequence else around, out)
    if p.body_end:
        out.append((inner, len(out), p, "body_end", around))


def _exposed(p: Place, out: list[Access]) -> bool:
    """Collect the accesses that may run before any barrier of p; False when every path through p meets a barrier."""
    if p.before or barrier_in(p.stmt):
        return False
    out.extend(p.accesses)
    s = p.stmt
    if isinstance(s, Seq):
        return all(_exposed(x, out) for x in p.inner)
    if isinstance(s, If):
        open_ways = [_exposed(x, out) for x in p.inner]
        return any(open_ways) or s.orelse is None
    for x in p.inner:
        _exposed(x, out)
    return True


class _Writer:
    """Writes out the statements with the marked barriers.

    Branches that only some threads take are split, so that all threads reach the barriers inside them:
    if c: A; barrier; B  becomes  p = c; if p: A; barrier; if p: B.
    Uniform loops inside the branch are lifted out of it; values that A defines for B are kept in per-thread variables.
    """

    def __init__(self, divergence: Divergence) -> None:
        self.d = divergence

    def body(self, p: Place) -> Stmt:
        out = self.stmts(p)
        return out[0] if len(out) == 1 else Seq(tuple(out), span=p.stmt.span)

    def stmts(self, p: Place) -> list[Stmt]:
        """The statements of p in code that all threads reach."""
        out: list[Stmt] = [barrier(p.stmt, "before" in p.by_group)] if p.before else []
        s = p.stmt
        if isinstance(s, Seq):
            for x in p.inner:
                out += self.stmts(x)
            return out
        if not p.has_barrier:
            return [*out, s]
        if isinstance(s, If):
            if self.d.divergent(s.cond):
                return out + self.split(p)
            then = self.body(p.inner[0])
            orelse = self.body(p.inner[1]) if s.orelse is not None else None
            return [*out, with_fields(s, then=then, orelse=orelse)]
        self.check_loop(p)
        inner = self.stmts(p.inner[0])
        if p.body_end:
            inner.append(barrier(s, "body_end" in p.by_group))
        return [*out, with_fields(s, body=Seq(tuple(inner), span=s.span))]

    def split(self, p: Place) -> list[Stmt]:
        """Statements that replace the divergent branch p, all in uniform control flow."""
        s = p.stmt
        assert isinstance(s, If)
        pred = fresh("taken", "bool")
        out: list[Stmt] = [Bind(pred, s.cond, span=s.span)]
        out += self.under(p.inner[0], pred, p)
        if s.orelse is not None:
            out += self.under(p.inner[1], unary("not", pred), p)
        return out

    def under(self, p: Place, pred: Expr, branch: Place) -> list[Stmt]:
        """Statements of p, each executed where pred holds, with p's barriers outside of any condition."""
        places = p.inner if isinstance(p.stmt, Seq) else [p]
        out: list[Stmt] = []
        run: list[Stmt] = []
        if isinstance(p.stmt, Seq) and p.before:
            out.append(barrier(p.stmt))

        def close() -> None:
            if run:
                out.append(If(pred, seq(*run), span=run[0].span))
                run.clear()

        for x in places:
            s = x.stmt
            if x.before:
                close()
                out.append(barrier(s))
            if isinstance(s, Alloc):
                out.append(s if s.init is None else with_fields(s, init=None))
                if s.init is not None:
                    run.append(Store(s.buffer, (const(0),), s.init, span=s.span))
            elif isinstance(s, Bind) and s.var.dtype.is_handle:  # no variable holds the address of a tensor
                raise Unplaceable(branch)
            elif isinstance(s, Bind) and cannot_fail(s.value):
                close()
                out.append(s)
            elif isinstance(s, Bind):
                kept = Buffer(s.var.name, (1,), s.var.dtype, VARIABLE, span=s.span)
                out.append(Alloc(kept, span=s.span))
                run.append(Store(kept, (const(0),), s.value, span=s.span))
                self.forward(places, x, s.var, load(kept, (0,)))
            elif not x.has_barrier:
                run.append(s)
            elif isinstance(s, Seq):
                close()
                out += self.under(x, pred, branch)
            elif isinstance(s, If):
                close()
                inner = fresh("taken", "bool")
                out.append(Bind(inner, logical("and", pred, s.cond), span=s.span))
                out += self.under(x.inner[0], inner, branch)
                if s.orelse is not None:
                    other = fresh("taken", "bool")  # uses the stored condition: the first branch may change what s.cond reads
                    out.append(Bind(other, logical("and", pred, unary("not", inner)), span=s.span))
                    out += self.under(x.inner[1], other, branch)
            elif isinstance(s, For) and self.same(s.start) and self.same(s.extent):
                self.check_loop(x)
                if any(isinstance(y.stmt, (Break, Continue)) for y in x.all()):
                    raise Unplaceable(branch)
                close()
                out.append(with_fields(s, body=seq(*self.under(x.inner[0], pred, branch))))
            else:
                raise Unplaceable(branch)
        close()
        return out

    def same(self, e: Expr) -> bool:
        """Whether threads outside the branch can compute a loop's bound too.

        That holds for pure values, and for variables that are equal in all threads.
        """
        return cannot_fail(e, lambda x: x.buffer.scope_name == VARIABLE) and not self.d.divergent(e)

    def check_loop(self, p: Place) -> None:
        """Raises Unplaceable when threads may run a loop with a barrier a different number of times."""
        if not isinstance(p.stmt, (For, While)) or self.d.uneven(p.stmt):
            raise Unplaceable(p)

    def forward(self, places: list[Place], at: Place, var: Var, value: Expr) -> None:
        """Make later statements read value instead of var."""
        for x in places[places.index(at) + 1:]:
            for y in x.all():
                y.stmt = substitute(y.stmt, {var: value})
