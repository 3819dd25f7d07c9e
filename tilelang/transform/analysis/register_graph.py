"""Control-flow graph of the wgmmas of a launch and of all statements that access their registers.

The registers are accumulators and A operands. Nodes are runs of wgmmas, pins, waits, commits, and ordinary statements that
contain none of these. assign_accumulator_registers follows values through this graph.
"""

from __future__ import annotations

from dataclasses import field

from tilelang.ir import Alloc, Break, Const, Continue, Evaluate, For, If, Seq, Stmt, Var, While, statements
from tilelang.ir.record import state
from tilelang.target.register_forms import Form, form_of

from .effects import Effect, effects, own_effects

_FLOW = (Break, Continue)
_WAITING = frozenset(("wgmma_wait", "wgmma_commit", "thread_return"))
NEVER = 99  # value of "groups committed since the last wgmma of a buffer" when none is in flight


@state
class Node:
    """One statement that contains no wgmma, wait, pin or jump, or one run of wgmmas."""

    stmts: tuple[Stmt, ...] = ()
    kind: str = ""  # "wgmmas" | "pin" | "wait" | "commit" | "alloc" | "" (ordinary)
    reads: frozenset[Var] = frozenset()
    writes: frozenset[Var] = frozenset()
    after: list[int] = field(default_factory=list)
    form: Form | None = None
    loop: int = 0  # the innermost enclosing loop that is not itself inside a node; 0: none


class Graph:
    """Control flow between the statements that access `storages`."""

    def __init__(self, storages: frozenset[Var]) -> None:
        self.storages = storages
        self.around: list[int] = [0]  # for each loop number: the number of the enclosing loop
        self._in = 0
        self.nodes: list[Node] = []
        self.loops: list[tuple[int, list[int]]] = []  # (node at which an iteration ends, nodes that break out)

    def node(self, *stmts: Stmt, kind: str = "", touched: tuple[Effect, ...] = (), before: list[int] | None = None) -> int:
        seen = [e for e in touched if e.storage in self.storages]
        self.nodes.append(Node(stmts, kind, frozenset(e.storage for e in seen if e.reads),
                                frozenset(e.storage for e in seen if e.writes), loop=self._in))
        for k in before or ():
            self.nodes[k].after.append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def build(self, s: Stmt, before: list[int]) -> list[int]:
        """Add a statement after the nodes `before`; return the nodes at which it ends."""
        match s:
            case Seq():
                return self._sequence(s.stmts, before)
            case Break() | Continue():
                end, left = self.loops[-1]
                at = self.node(before=before)
                left.append(at) if isinstance(s, Break) else self.nodes[at].after.append(end)
                return []
            case If() if not self._plain(s):
                head = self._own(s, before)
                orelse = [head] if s.orelse is None else self.build(s.orelse, [head])
                return [*self.build(s.then, [head]), *orelse]
            case (For() | While()) if not self._plain(s):
                return self._loop(s, before)
            case Evaluate() if s.call.op == "thread_return":
                self.node(before=before)
                return []
            case Evaluate() if s.call.op in ("wgmma_wait", "wgmma_commit"):
                return [self.node(s, kind=s.call.op[6:], before=before)]
            case Evaluate() if s.call.op in ("wgmma", "wgmma_pin"):
                kind = "pin" if s.call.op == "wgmma_pin" else "wgmmas"
                return [self.node(s, kind=kind, touched=own_effects(s), before=before)]
            case Alloc() if s.buffer.data in self.storages:
                return [self.node(s, kind="alloc", before=before)]
        touched = tuple(effects(s))
        if not any(e.storage in self.storages for e in touched):
            return before
        at = self.node(s, touched=touched, before=before)
        self.nodes[at].form = form_of(s)
        return [at]

    def _sequence(self, stmts: tuple[Stmt, ...], before: list[int]) -> list[int]:
        run: list[Stmt] = []
        for s in (*stmts, None):
            if isinstance(s, Evaluate) and s.call.op == "wgmma":
                run.append(s)
                continue
            if run:
                touched = tuple(e for r in run for e in own_effects(r))
                before = [self.node(*run, kind="wgmmas", touched=touched, before=before)]
                run = []
            if s is not None:
                before = self.build(s, before)
        return before

    def _loop(self, s: For | While, before: list[int]) -> list[int]:
        head = self._own(s, before)
        end = self.node()
        self.loops.append((end, []))
        self.around.append(self._in)
        outer, self._in = self._in, len(self.around) - 1
        first = self.node(before=[head, end])
        for k in self.build(s.body, [first]):
            self.nodes[k].after.append(end)
        _, left = self.loops.pop()
        self._in = outer
        runs = isinstance(s, For) and isinstance(s.extent, Const) and s.extent.value > 0
        return [end, *left] if runs else [head, end, *left]

    def hot(self) -> set[int]:
        """Numbers of the innermost loops with wgmmas."""
        found = {n.loop for n in self.nodes if n.kind == "wgmmas"} - {0}
        outer: set[int] = set()
        for k in found:
            while k := self.around[k]:
                outer.add(k)
        return found - outer

    def _own(self, s: Stmt, before: list[int]) -> int:
        """Add a node for the reads of a condition or a bound."""
        return self.node(touched=own_effects(s), before=before)

    def _plain(self, s: Stmt) -> bool:
        """Whether a statement is one node: it contains no wgmma, wait, pin or jump, and declares none of the storages."""
        for x in statements(s):
            if isinstance(x, _FLOW) or isinstance(x, Alloc) and x.buffer.data in self.storages:
                return False
            if isinstance(x, Evaluate) and (x.call.op in _WAITING or x.call.op in ("wgmma", "wgmma_pin")):
                return False
        return True


def running(graph: Graph, v: Var) -> list[int | None]:
    """For each node, the groups committed before it since the last wgmma of an array: the fewest of all paths, NEVER when none
    is in flight; None for nodes that are never reached."""
    out: list[int | None] = [None] * len(graph.nodes)
    out[0], todo = NEVER, [0]
    while todo:
        k = todo.pop()
        gives = _running_after(graph.nodes[k], v, out[k] or 0)
        for j in graph.nodes[k].after:
            before = out[j]
            new = gives if before is None else min(before, gives)
            if new != before:
                out[j] = new
                todo.append(j)
    return out


def _running_after(n: Node, v: Var, before: int) -> int:
    if n.kind == "wgmmas" and v in n.reads | n.writes:
        return 0
    if n.kind == "commit" and before != NEVER:
        return min(before + 1, NEVER - 1)
    if n.kind == "wait" and before > n.stmts[0].call.options.n:  # type: ignore[attr-defined]
        return NEVER
    return before
