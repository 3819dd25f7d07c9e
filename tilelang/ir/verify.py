"""Verifies the invariants of a phase of the IR and collects all violations.

Invariants of every phase
    defined      every Var and Buffer is used inside the scope that binds it
    bound-once   a Var or Buffer has one Bind, Alloc, loop or launch that defines it
    dtypes       operands of one Binary agree; conditions are bool; indices are integers; stores match the element type
    rank         as many indices as the buffer has dimensions
    loops        loop kinds are known; vectorised loops have a constant extent
    options      an option that exists only in some phases (`phases` of its record) is not given in other phases
Added by a phase (and kept by all later ones)
    THREADS_BOUND  no-tile: no TileOp, no Parallel, no pipelined For; no-fragment: no fragment or reducer buffer;
                   flat-shared: shared buffers have one dimension
    SYNCED         no further invariant of nodes; transform/verify_sync checks the order of accesses
    DEVICE         flat-local: local buffers have one dimension; shared-plan: every shared buffer has an offset
Phase CPU has the invariants of TILE, and
    CPU            no-launch: every Launch has become a statement of the backend; backend: in no other phase stands one
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .buffer import AddressOf, Buffer, Load, Region
from .expr import (COMPARISONS, LOGICAL, Binary, Broadcast, Cast, Const, Expr, Ramp, Select, StringConst, Unary, Var)
from .nodes import Node
from .phases import CPU, DEVICE, PHASES, SYNCED, THREADS_BOUND, TILE
from .record import record
from .span import Span
from .stmt import (Alloc, Assert, BackendStmt, Bind, Break, Continue, Evaluate, For, Func, If, Launch, Parallel, Seq, Stmt,
                   Store, TileOp, While)
from .children import children
from .scopes import FRAGMENT, PRIVATE, REDUCER, SHARED
from .visitor import inner

_LEVELS = {TILE: 0, CPU: 0, THREADS_BOUND: 1, SYNCED: 2, DEVICE: 3}  # a phase keeps the invariants of lower levels
LOOP_KINDS = ("serial", "unroll", "vectorized", "pipelined")
THREAD_TAGS = tuple(f"{k}Idx.{d}" for k in ("block", "thread") for d in "xyz")


@record
class Finding:
    """One violated invariant.  rule: its name in the module docstring.  span: the location in the user's source, or None."""

    rule: str
    message: str
    span: Span | None = None
    what: Node | None = None  # the variable or buffer that violates the invariant, if there is one

    def __str__(self) -> str:
        place = f"  ({self.span})" if self.span is not None else ""
        return f"[{self.rule}] {self.message}{place}"


def verify(func: Func, phase: str = TILE) -> list[Finding]:
    """All invariants of `phase` that `func` violates; empty when it is valid."""
    if phase not in PHASES:
        raise ValueError(f"unknown phase {phase}: phases are {', '.join(PHASES)}")
    v = _Verifier(phase)
    v.func(func)
    return v.findings


class _Verifier:
    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.findings: list[Finding] = []
        self.scope: set[Node] = set()
        self.storage: set[Var] = set()  # data vars of the buffers in scope; views of these buffers are in scope too
        self.ever: set[Node] = set()
        self.uses_of: dict[int, tuple[Node, frozenset[Node]]] = {}
        self.reported: set[tuple[str, int]] = set()
        self.shared: list[Buffer] = []

    def at_least(self, phase: str) -> bool:
        return _LEVELS[self.phase] >= _LEVELS[phase]

    def say(self, rule: str, message: str, span: Span | None, what: Node | None = None) -> None:
        self.findings.append(Finding(rule, message, span, what))

    # ---- scopes -----------------------------------------------------------------------------------------------

    def define(self, what: Node, span: Span | None, added: list[Node]) -> None:
        if what in self.ever:
            self.say("bound-once", f"`{_name(what)}` is defined twice", span)
        self.ever.add(what)
        self.scope.add(what)
        added.append(what)
        if isinstance(what, Buffer):
            self.storage.add(what.data)
            self.buffer(what, span)

    def leave(self, added: list[Node]) -> None:
        for what in added:
            self.scope.discard(what)
            if isinstance(what, Buffer):
                self.storage.discard(what.data)

    def used(self, uses: Iterable[Node], span: Span | None) -> None:
        for what in uses:
            if what in self.scope:
                continue
            if isinstance(what, Buffer):
                if what.data in self.storage or what.data in self.scope:
                    if ("phase", id(what)) not in self.reported:  # a view without a declaration
                        self.reported.add(("phase", id(what)))
                        self.of_phase(what, span)
                    continue
            elif what in self.storage:
                continue
            if ("defined", id(what)) not in self.reported:
                self.reported.add(("defined", id(what)))
                kind = "buffer" if isinstance(what, Buffer) else "variable"
                self.say("defined", f"{kind} `{_name(what)}` is used outside the scope that defines it", span, what)

    def of_phase(self, b: Buffer, span: Span | None) -> None:
        """Check that scope and rank of b are allowed in the phase."""
        scope = b.scope_name
        if self.at_least(THREADS_BOUND):
            if scope in (FRAGMENT, REDUCER):
                self.say("no-fragment", f"`{b.name}` is still a {scope} buffer", span)
            if scope in SHARED and len(b.shape) != 1:
                self.say("flat-shared", f"shared buffer `{b.name}` has {len(b.shape)} dimensions", span)
        if self.at_least(DEVICE) and scope in PRIVATE and len(b.shape) != 1:
            self.say("flat-local", f"local buffer `{b.name}` has {len(b.shape)} dimensions", span)

    def buffer(self, b: Buffer, span: Span | None) -> None:
        self.of_phase(b, span)
        scope = b.scope_name
        if scope in SHARED:
            self.shared.append(b)
        for d in b.exprs:
            self.used(self.expr(d), span)

    # ---- functions and statements -----------------------------------------------------------------------------

    def func(self, f: Func) -> None:
        added: list[Node] = []
        for p in f.params:
            self.define(p, f.span, added)
        for p, b in f.buffers:
            if p not in self.scope:
                self.say("defined", f"tensor `{b.name}` belongs to `{p.name}`, which is no parameter", f.span)
            for d in b.exprs:  # the shape of the argument defines the symbols
                self.scope.update(x for x in self.expr(d) if isinstance(x, Var))
        for _, b in f.buffers:
            self.define(b, f.span, added)
        self.stmt(f.body)

    def options(self, s: Any) -> None:
        """Check that each given option exists in the phase."""
        record = getattr(s, s._options)
        for name, _ in getattr(s, "attrs", ()):
            if name in record.names:
                self.say("options", f"{name} is an option and stands among the user's annotations", s.span)
        given = record.given() if record.phases else {}
        for name in given:
            phases = record.phases.get(name, PHASES)
            if self.phase not in phases:
                self.say("options", f"{name} is an option of phase {phases[0]}, found in {self.phase}", s.span)

    def stmt(self, s: Stmt) -> None:
        if s._options:
            self.options(s)
        match s:
            case Seq():
                added: list[Node] = []
                for x in s.stmts:
                    self.item(x, added)
                self.leave(added)
            case Bind() | Alloc() | BackendStmt():  # a body of one definition, which no statement can use
                added = []
                self.item(s, added)
                self.leave(added)
            case Store():
                self.element(s.buffer, s.indices, s.span)
                self.value(s.value, s.span)
                want = s.buffer.dtype_at(s.indices)
                if s.value.dtype != want:
                    self.say("dtypes", f"{s.value.dtype} stored into `{s.buffer.name}`, which takes {want}", s.span)
            case Evaluate():
                self.value(s.call, s.span)
            case For():
                self.loop(s)
            case Parallel():
                if self.at_least(THREADS_BOUND):
                    self.say("no-tile", "a parallel loop is left", s.span)
                for e in s.extents:
                    self.integer(e, "loop extent", s.span)
                if len(s.vars) != len(s.extents):
                    self.say("loops", f"{len(s.vars)} variables for {len(s.extents)} extents", s.span)
                self.block(s.vars, s.body, s.span)
            case While() | If() | Assert():
                self.condition(s.cond, s.span)
                for x in inner(s):
                    self.stmt(x)
            case Launch():
                if self.phase == CPU:
                    self.say("no-launch", "a launch is left", s.span)
                self.launch(s)
            case TileOp():
                if self.at_least(THREADS_BOUND):
                    self.say("no-tile", f"tile op {s.op_name} is left", s.span)
                for c in children(s):
                    if isinstance(c, Region):
                        self.region(c, s.span)
                    elif isinstance(c, Expr):
                        self.value(c, s.span)
            case Break() | Continue():
                pass
            case _:
                self.say("node", f"{type(s).__name__} is not a statement", getattr(s, "span", None))

    def item(self, s: Stmt, added: list[Node]) -> None:
        """Check a statement of a Seq, whose later statements see what it defines."""
        if isinstance(s, (Bind, Alloc)):
            self.definition(s, added)
        elif isinstance(s, BackendStmt):
            self.backend(s, added)
        else:
            self.stmt(s)

    def backend(self, s: BackendStmt, added: list[Node]) -> None:
        if s.phase != self.phase:
            self.say("backend", f"{type(s).__name__} is a statement of phase {s.phase}", s.span)
        scopes = s.scopes()
        for names, body in scopes:
            before = set(self.ever)
            self.block(names, body, s.span)
            self.ever = before
        for c in children(s):
            if isinstance(c, Expr):
                self.value(c, s.span)
            elif isinstance(c, Launch):  # its body is that of the program before planning
                for g in c.grid:
                    self.integer(g, "grid extent", s.span)
            elif isinstance(c, Stmt) and not scopes:
                for x in c.stmts if isinstance(c, Seq) else (c,):
                    self.item(x, added)

    def definition(self, s: Bind | Alloc, added: list[Node]) -> None:
        if isinstance(s, Bind):
            self.value(s.value, s.span)
            if s.var.dtype != s.value.dtype:
                self.say("dtypes", f"`{s.var.name}` of {s.var.dtype} is bound to a {s.value.dtype}", s.span)
            self.define(s.var, s.span, added)
        else:
            if s.init is not None:
                self.value(s.init, s.span)
                if s.init.dtype != s.buffer.dtype:
                    self.say("dtypes", f"`{s.buffer.name}` of {s.buffer.dtype} starts as a {s.init.dtype}", s.span)
            self.define(s.buffer, s.span, added)

    def block(self, variables: Iterable[Node], body: Stmt, span: Span | None) -> None:
        added: list[Node] = []
        for v in variables:
            self.define(v, span, added)
        self.stmt(body)
        self.leave(added)

    def loop(self, s: For) -> None:
        if s.kind not in LOOP_KINDS and s.kind not in THREAD_TAGS:
            self.say("loops", f"unknown loop kind {s.kind}", s.span)
        if s.kind == "pipelined" and self.at_least(THREADS_BOUND):
            self.say("no-tile", "a pipelined loop is left", s.span)
        if s.kind == "vectorized" and self.at_least(DEVICE):
            self.say("loops", "a vectorised loop is left", s.span)
        self.integer(s.start, "loop start", s.span)
        self.integer(s.extent, "loop extent", s.span)
        if s.start.dtype != s.var.dtype or s.extent.dtype != s.var.dtype:
            self.say("dtypes", f"loop `{s.var.name}` of {s.var.dtype} runs from {s.start.dtype} for {s.extent.dtype}",
                     s.span)
        self.block((s.var,), s.body, s.span)

    def launch(self, s: Launch) -> None:
        for g in s.grid:
            self.integer(g, "grid extent", s.span)
        if len(s.grid) != len(s.block_vars):
            self.say("loops", f"{len(s.block_vars)} block variables for {len(s.grid)} grid extents", s.span)
        self.shared = []
        self.block((*s.block_vars, *s.thread_vars), s.body, s.span)
        if self.at_least(DEVICE):
            planned = {b for b, _ in s.plan.shared_offsets}
            for b in self.shared:
                if b not in planned:
                    self.say("shared-plan", f"shared buffer `{b.name}` has no offset", s.span)

    # ---- expressions ------------------------------------------------------------------------------------------

    def value(self, e: Expr, span: Span | None) -> None:
        self.used(self.expr(e), span or e.span)

    def condition(self, e: Expr, span: Span | None) -> None:
        self.value(e, span)
        if not e.dtype.is_bool or e.dtype.lanes != 1:
            self.say("dtypes", f"a condition is bool, found {e.dtype}", span)

    def integer(self, e: Any, what: str, span: Span | None) -> None:
        if isinstance(e, Expr):
            self.value(e, span)
            if not e.dtype.is_int:
                self.say("dtypes", f"{what} is an integer, found {e.dtype}", span)

    def element(self, b: Buffer, indices: tuple[Expr, ...], span: Span | None) -> None:
        self.used((b,), span)
        for i in indices:
            self.value(i, span)
        self.index(b, indices, span)

    def index(self, b: Buffer, indices: tuple[Expr, ...], span: Span | None) -> None:
        if len(indices) != len(b.shape):
            self.say("rank", f"`{b.name}` has {len(b.shape)} dimensions, found {len(indices)} indices", span)
        for k, i in enumerate(indices):
            if not isinstance(i, Expr):
                self.say("dtypes", f"index {k} of `{b.name}` is an expression, found the {type(i).__name__} {i!r}", span)
            elif not i.dtype.is_int:
                self.say("dtypes", f"index {k} of `{b.name}` is an integer, found {i.dtype}", span)

    def region(self, r: Region, span: Span | None) -> None:
        self.used((r.buffer,), span)
        for e in (*r.mins, *r.extents):
            self.integer(e, f"bound of `{r.buffer.name}`", span)
        if len(r.mins) != len(r.buffer.shape) or len(r.extents) != len(r.buffer.shape):
            self.say("rank", f"`{r.buffer.name}` has {len(r.buffer.shape)} dimensions, found a region of {len(r.mins)}",
                     span)

    def expr(self, e: Node) -> frozenset[Node]:
        """Check the types of a value, once.  Returns the Vars and Buffers that it uses."""
        hit = self.uses_of.get(id(e))
        if hit is not None:
            return hit[1]
        uses: frozenset[Node]
        if isinstance(e, Var):
            uses = frozenset((e,))
        elif isinstance(e, (Const, StringConst)):
            uses = frozenset()
        else:
            parts = [self.expr(c) for c in children(e) if not isinstance(c, (Buffer, Region))]
            if isinstance(e, (Load, AddressOf)):
                parts.append(frozenset((e.buffer,)))
                self.index(e.buffer, e.indices, e.span)
            for c in children(e):
                if isinstance(c, Region):
                    parts.append(frozenset((c.buffer,)))
                    parts.extend(self.expr(m) for m in (*c.mins, *c.extents) if isinstance(m, Expr))
            uses = parts[0] if len(parts) == 1 else frozenset().union(*parts)
            fault = _type_fault(e)
            if fault:
                self.say("dtypes", fault, e.span)
        self.uses_of[id(e)] = (e, uses)
        return uses


def _type_fault(e: Node) -> str:
    """What is wrong with the type of a value for those of its operands; "" where it is right."""
    match e:
        case Binary() if e.a.dtype != e.b.dtype:
            return f"operands of {e.op} are {e.a.dtype} and {e.b.dtype}"
        case Binary() if e.op in COMPARISONS or e.op in LOGICAL:
            return "" if e.dtype.is_bool else f"{e.op} gives bool, found {e.dtype}"
        case Binary() | Unary() if e.dtype != e.a.dtype:
            return f"{e.op} of {e.a.dtype} gives {e.dtype}"
        case Cast() if e.dtype.lanes != e.value.dtype.lanes:
            return f"cast of {e.value.dtype} to {e.dtype} changes the lanes"
        case Select() if not e.cond.dtype.is_bool:
            return f"a condition is bool, found {e.cond.dtype}"
        case Select() if e.a.dtype != e.dtype or e.b.dtype != e.dtype:
            return f"select of {e.a.dtype} and {e.b.dtype} gives {e.dtype}"
        case Load() if e.dtype != e.buffer.dtype_at(e.indices):
            return f"load of `{e.buffer.name}` gives {e.buffer.dtype_at(e.indices)}, found {e.dtype}"
        case Ramp() if e.base.dtype != e.stride.dtype or e.dtype.lanes != e.lanes:
            return f"ramp of {e.base.dtype} by {e.stride.dtype} gives {e.dtype}"
        case Broadcast() if e.dtype.lanes != e.lanes * e.value.dtype.lanes:
            return f"{e.lanes} copies of {e.value.dtype} give {e.dtype}"
    return ""


def _name(what: Node) -> str:
    return getattr(what, "name", type(what).__name__)
