"""Emits the code of a software pipeline without warp specialisation: prologue and main loop over versioned buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Const, Evaluate, Expr, For, If, Load, Node,
                         Region, Stmt, Store, Var, call, const, fresh, load, replace, rewrite,
                         seq, substitute, used_vars, with_options)
from tilelang.ir.record import record

from ..analysis.statements import do, rename
from ..analysis.pipeline_schedule import Body, needed_binds


@record
class Plan:
    """A checked schedule.

    stage, order: per item.  ahead: items that become asynchronous copies -> storage of their tiles.  versions: buffer -> the
    same buffer with a leading dimension of versions.  report: one line for `pipeline_report`.
    """

    stage: list[int]
    order: list[int]
    ahead: dict[int, Var]
    versions: dict[Buffer, Buffer]
    report: str


@record
class _Run:
    """Consecutive statements of the schedule that belong to the same iteration.  group: index of its async group, or None."""

    items: tuple[int, ...]
    stage: int
    group: int | None


def emit(plan: Plan, loop: For, loop_body: Body, rest: list[Stmt] | None = None) -> Stmt:
    """Serial code of the pipelined `loop` (already of kind serial).  rest: what replaces items that are not copied ahead."""
    return _Emitter(plan, loop, loop_body, rest).code()


class _Emitter:
    def __init__(self, plan: Plan, loop: For, loop_body: Body, rest: list[Stmt] | None) -> None:
        self.plan, self.loop, self.loop_body, self.rest = plan, loop, loop_body, rest
        self.items = loop_body.items
        self.depth = max(plan.stage, default=0)
        self.runs = self.split()
        self.groups = sum(r.group is not None for r in self.runs)
        self.extent: Expr = loop.extent

    # ---- structure ----------------------------------------------------------------------------------------------

    def consumers(self, i: int) -> set[int]:
        """Items, other than asynchronous copies, that access the destination of asynchronous copy i."""
        storage = self.plan.ahead[i]
        return {j for j, y in enumerate(self.items) if j != i and j not in self.plan.ahead and y.touches(storage)}

    def split(self) -> list[_Run]:
        """The runs, in schedule order.

        Copies with different first uses get separate async groups only if they are waited for in the iteration that issues
        them: then the later wait hides more latency.
        """
        p = self.plan
        ranked = sorted(range(len(self.items)), key=lambda i: p.order[i])
        same_step = {i for i in p.ahead if any(p.stage[j] == p.stage[i] for j in self.consumers(i))}
        first_use = {i: min((p.order[j] for j in self.consumers(i)), default=-1) for i in p.ahead}
        starts = {first_use[i] for i in same_step}
        runs: list[_Run] = []
        group = 0
        current: list[int] = []

        def key(i: int) -> tuple[Any, ...]:
            return (p.stage[i], i in p.ahead, first_use[i] if i in same_step else None)

        def close() -> None:
            nonlocal group
            if current:
                is_group = current[0] in p.ahead
                runs.append(_Run(tuple(current), p.stage[current[0]], group if is_group else None))
                group += is_group
                current.clear()

        if same_step and all(i in p.ahead for i in ranked[: len(p.ahead)]):  # copies first: sort them by first use
            ranked[: len(p.ahead)] = sorted(ranked[: len(p.ahead)], key=lambda i: (first_use[i], p.order[i]))
        for i in ranked:
            if current and (key(current[-1]) != key(i) or (i not in p.ahead and p.order[i] in starts)):
                close()
            current.append(i)
        close()
        return runs

    # ---- one run ------------------------------------------------------------------------------------------------

    def run(self, r: _Run, iteration: Any, clone: bool) -> list[Stmt]:
        """Statements of a run for one iteration (0-based).  clone: rename all variables that the statements define."""
        stmts: list[Stmt] = []
        used: set[Any] = set()
        for i in r.items:
            s = self.items[i].stmt
            used |= used_vars(s)
            stmts.append(with_options(s, async_group=True) if i in self.plan.ahead else s)
        binds = self.early(used)
        stmts = self.with_late(stmts)
        if not clone and r.stage == self.depth:
            binds = []  # bound once at the top of the main loop's body
        else:
            fresh_binds = {b.var: fresh(b.var.name, b.var.dtype) for b in binds}
            stmts = [substitute(s, fresh_binds) for s in
                     (*(Bind(fresh_binds[b.var], b.value, span=b.span) for b in binds), *stmts)]
        k = self.loop.start + iteration
        stmts = [self.at(s, k, iteration) for s in stmts]
        return rename(stmts) if clone else stmts

    def early(self, used: Iterable[Any]) -> list[Bind]:
        """Bindings that these values need and that may be placed in front of all statements."""
        return [b for b in needed_binds(self.loop_body.pure, used) if b.var not in self.loop_body.late]

    def with_late(self, stmts: list[Stmt]) -> list[Stmt]:
        """The statements, with each binding that depends on scheduled bindings placed before the first use of its value."""
        if not self.loop_body.late:
            return stmts
        out: list[Stmt] = []
        done: dict[Any, Any] = {}
        for s in stmts:
            for b in needed_binds(self.loop_body.pure, used_vars(s)):
                if b.var in self.loop_body.late and b.var not in done:
                    value = substitute(b.value, done)
                    done[b.var] = fresh(b.var.name, b.var.dtype)
                    out.append(Bind(done[b.var], value, span=b.span))
            out.append(substitute(s, done))
        return out

    def at(self, s: Stmt, k: Any, iteration: Any) -> Stmt:
        """s for the given iteration: the loop variable is replaced, and buffers are indexed by their slot."""
        if k is not self.loop.var:
            s = substitute(s, {self.loop.var: k})
        return select_version(s, self.plan.versions, iteration)

    def guarded(self, iteration: Any, stmts: list[Stmt], span: Any) -> list[Stmt]:
        inside = iteration < self.extent if isinstance(iteration, Expr) else const(iteration, self.dtype) < self.extent
        if isinstance(inside, Const):
            return stmts if inside.value else []
        return [If(inside, seq(*stmts), span=span)]

    @property
    def dtype(self) -> Any:
        return self.loop.var.dtype

    # ---- waits --------------------------------------------------------------------------------------------------

    def needed_group(self, r: _Run) -> int | None:
        """The newest async group that a run needs, relative to the first group of its own step (negative: earlier steps)."""
        newest: int | None = None
        for q in self.runs:
            if q.group is None:
                continue
            if any(j in r.items for i in q.items for j in self.consumers(i)):
                at = (q.stage - r.stage) * self.groups + q.group
                newest = at if newest is None else max(newest, at)
        return newest

    def step(self, run_of: Any) -> list[Stmt]:
        """One step: runs in order with their commits and waits.

        run_of: function from a run to its statements; if it returns none, only the run's commit is emitted.
        """
        out: list[Stmt] = []
        issued, waited = 0, None
        bodies = [(r, run_of(r)) for r in self.runs]
        # If a wait needs no group of this step, it is emitted first.  One barrier after it then also separates the readers
        # of the previous iteration from the copies that overwrite their slot.
        early = [g for r, body in bodies if body for g in (self.needed_group(r),) if g is not None and g < 0]
        if early:
            waited = max(early)
            out.append(_wait(-waited - 1))
        for r, body in bodies:
            if body:
                g = self.needed_group(r)
                if g is not None and (waited is None or g > waited):
                    out.append(_wait(issued - 1 - g))
                    waited = g
                out += body
            if r.group is not None:
                out.append(do("cp_async_commit"))
                issued += 1
        return out

    # ---- the whole loop -----------------------------------------------------------------------------------------

    def code(self) -> Stmt:
        loop = self.loop
        out: list[Stmt] = [Alloc(b, span=b.span) for b in self.plan.versions.values()]
        out += [a for a in self.loop_body.allocs if a.buffer not in self.plan.versions]
        if not isinstance(loop.extent, (Const, Var)):  # bounds are evaluated once
            n = fresh(f"{loop.var.name}_extent", loop.extent.dtype)
            out.append(Bind(n, loop.extent, span=loop.span))
            self.extent = n
        for u in range(self.depth):
            out += self.step(lambda r, u=u: self.prologue_run(r, u))
        k = loop.var
        base: Expr = k if isinstance(loop.start, Const) and loop.start.value == 0 else k - loop.start
        top = self.early({v for r in self.runs if r.stage == self.depth for i in r.items
                          for v in used_vars(self.items[i].stmt)})

        def main_run(r: _Run) -> list[Stmt]:
            ahead = self.depth - r.stage
            if ahead == 0:
                return [select_version(s, self.plan.versions, base) for s in self.plain_run(r)]
            return self.guarded(base + ahead, self.run(r, base + ahead, clone=False), loop.span)

        body = seq(*top, *self.step(main_run), span=loop.span)
        out.append(with_options(replace(loop, body=body, extent=self.extent), pipeline_report=self.plan.report))
        if self.depth:  # no copy is left in flight (the last ones are guarded off); this wait shows it to later passes
            out.append(_wait(0))
        return seq(*out, span=loop.span)

    def plain_run(self, r: _Run) -> list[Stmt]:
        if self.rest is not None and len(r.items) == len(self.items) - len(self.plan.ahead):
            return self.with_late(self.rest)
        return self.with_late([with_options(self.items[i].stmt, async_group=True) if i in self.plan.ahead
                               else self.items[i].stmt for i in r.items])

    def prologue_run(self, r: _Run, u: int) -> list[Stmt]:
        if r.stage > u:
            return []
        iteration = u - r.stage
        return self.guarded(iteration, self.run(r, const(iteration, self.dtype), clone=True), self.loop.span)


def _wait(pending: int) -> Stmt:
    return Evaluate(call("cp_async_wait", (), "void", n=pending))


def select_version(s: Any, versions: dict[Buffer, Buffer], iteration: Any) -> Any:
    """s with every access of a versioned buffer redirected to slot `iteration` mod its number of versions."""
    if not versions:
        return s

    def fn(x: Node) -> Node | None:
        b = getattr(x, "buffer", None)
        new = versions.get(b) if isinstance(b, Buffer) else None
        if new is None:
            return None
        slot = iteration % new.shape[0] if isinstance(iteration, Expr) else const(iteration % new.shape[0])
        match x:
            case Load():
                return load(new, (slot, *x.indices), span=x.span)
            case Store():
                return replace(x, buffer=new, indices=(slot, *x.indices))
            case AddressOf():
                return replace(x, buffer=new, indices=(slot, *x.indices))
            case Region():
                return Region(new, (slot, *x.mins), (1, *x.extents), span=x.span)
        return None

    return rewrite(s, fn, Load, Store, AddressOf, Region)
