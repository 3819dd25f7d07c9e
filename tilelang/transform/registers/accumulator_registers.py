"""Keeps accumulators and A operands of wgmma in named PTX registers; arrays hold their values elsewhere.

    for r: acc[r] = 0                            for r: acc[r] = 0
    wgmma_pin(acc)                               wgmma_pin(acc, move="in")
    for k:                                       for k:
      wgmma_fence(); wgmma(acc, …)        ->       wgmma_fence(); wgmma(acc, …, registers=("c",))
    wgmma_wait(0); wgmma_pin(acc)                wgmma_wait(0); wgmma_pin(acc, move="out")
    out[…] = acc[…]                              out[…] = acc[…]

NVRTC spends time on every operand of an `asm` and on every value that a loop carries: a third of its time for a plain GEMM
went into 128 accumulator registers that only wgmma touches.  Named registers, declared in PTX
(codegen/cuda/named_registers.py), are not operands.  Values move into the named registers after the last ordinary write
before a wgmma reads them.  They move out at the pin after the wait, where the array is read before the next wgmma.  ptxas
allocates one register for both sides of a move.

Loops that match a form (target/register_forms.py: fill, scale, halves) work on the named registers directly
(plan.registers).

A buffer stays an array with its pins where its values cannot be followed: only a piece of it is pinned, an index is not
constant, or it is written while its wgmma may be in flight.  A data flow analysis of the final program computes for each
buffer whether the array is up to date (A) and whether the registers are (R).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from copy import copy
from typing import Any

from tilelang.ir import (AddressOf, Buffer, Call, Const, Evaluate, For, Func, Launch, Stmt, Var, inner, rewrite_launches,
                         rewrite_stmts, seq, walk, with_inner, with_options, LOCAL)
from tilelang.ir import replace as replaced
from tilelang.ir.record import record
from tilelang.target.wgmma import WGMMA_ROWS

from ..framework.config import PassConfigKey
from .early_rescale import rescale_early
from ..analysis.effects import Effect, effects
from ..framework.pass_ import DEVICE, PassContext, pass_
from ..analysis.register_graph import NEVER, Graph, Node, needed, running_after, states
from .register_resident import move, keep_in_registers

# From how many printed wgmma on, those of unrolled loops counted in each iteration, this applies to every launch.  With fewer:
# only to launches with one accumulator that is one instruction's, accumulates over a loop and takes A from shared memory.
# Every form is correct and compiles faster (attention: 40 % fewer instructions in the optimizer; NVRTC's time for 64 unrolled
# GEMMs, 256 wgmma: 2.3 s instead of 5.0 s, with as many machine instructions), but the loops of other forms get another
# instruction order than the one that was timed.
EVERY_FORM = 64

# Whether chained GEMMs keep all their values in registers where possible (keep_in_registers).
WHOLE = True

# Whether accumulators are rescaled during the exponentials (rescale_early).
EARLY = True


@pass_(needs=DEVICE)
def assign_accumulator_registers(func: Func, cx: PassContext) -> Func:
    """Assign named PTX registers to the accumulators and A operands of wgmma.

    Marks MMAs (attr `registers`: "c", "a") and loops (attr `registers`), and replaces pins by moves (attr `move`: "in", "out").
    Launches whose values are all register-resident get the attr `own_values`.
    """
    fast = bool(cx.option(PassConfigKey.TL_ENABLE_FAST_MATH))
    return replaced(func, body=rewrite_launches(func.body, lambda x: _assign_registers(x, fast)))


def _assign_registers(launch: Launch, fast: bool) -> Launch:
    if not any(e.node.op == "wgmma" for e in effects(launch.body) if isinstance(e.node, Call)):
        return launch
    launch = replaced(launch, body=_distinct(launch.body, set()))
    touched = list(effects(launch.body))
    every = _printed(launch.body) >= EVERY_FORM
    if WHOLE and not launch.plan.by_hand:
        found, refused = _named(touched)
        whole = None if refused else keep_in_registers(_unheld(launch, found), found)
        if whole is not None and (fast or not _exact_exp2(whole)):
            return rescale_early(whole) if EARLY else whole
    found = _candidates(touched, every)
    if not found:
        return launch
    graph = Graph(frozenset(found))
    graph.build(launch.body, [graph.node()])
    if not every and not all(needed(n, b) for b in found.values() for n in graph.nodes if n.kind == "wgmmas"):
        return launch
    moves = _Moves()
    for b in found.values():
        plan = _plan(graph, b)
        if plan is not None:
            moves.own.add(b.data)
            moves.after.update((id(s), [*moves.after.get(id(s), ()), b]) for s in plan.goes_in)
            moves.out.update((id(s), b) for s in plan.comes_out)
            moves.direct.update(map(id, plan.direct))
    return with_inner(launch, moves.visit) if moves.own else launch  # type: ignore[return-value]


def _unheld(launch: Launch, arrays: Container[Var]) -> Launch:
    """The launch without waits that are held behind a whole array of these, which would have to leave its registers."""
    def visit(s: Stmt) -> Stmt | None:
        held = isinstance(s, Evaluate) and isinstance(s.call, Call) and s.call.op == "wgmma_hold" and s.call.args[0]
        return seq() if isinstance(held, AddressOf) and held.buffer.data in arrays else None

    return rewrite_stmts(launch, visit)  # type: ignore[no-any-return]


def _exact_exp2(launch: Launch) -> bool:
    """Whether a loop on named registers computes exp2 with subnormal results, which their instruction does not."""
    return any(x.op == "exp2" for s in walk(launch.body, For) if s.plan.registers for x in walk(s, Call))


def _printed(s: Stmt) -> int:
    """The number of wgmma below a statement, with those of an unrolled loop in each of its iterations."""
    own = isinstance(s, Evaluate) and s.call.op == "wgmma"
    times = int(s.extent.value) if isinstance(s, For) and s.kind == "unroll" and isinstance(s.extent, Const) else 1
    return own + times * sum(map(_printed, inner(s)))


def _distinct(s: Stmt, seen: set[int]) -> Any:
    """The statement with a copy of each repeated statement object: later steps identify statements by identity."""
    if id(s) in seen:
        s = copy(s)
    seen.add(id(s))
    return with_inner(s, lambda x: _distinct(x, seen))


def _named(every: Iterable[Effect]) -> tuple[dict[Var, Buffer], set[Var]]:
    """(register arrays that wgmma names, arrays among them that are named at non-constant places or not pinned as a whole)."""
    found: dict[Var, Buffer] = {}
    refused: set[Var] = set()
    for e in every:
        if not isinstance(e.node, Call) or e.node.op not in ("wgmma", "wgmma_pin") or e.buffer.scope_name != LOCAL:
            continue
        b = e.buffer
        whole = len(b.shape) == 1 and b.is_static and b.size * b.dtype.bits % 32 == 0
        at = e.indices[0] if e.indices and len(e.indices) == 1 else None
        if e.node.op == "wgmma_pin":
            whole = whole and isinstance(at, Const) and at.value == 0 and e.node.options.count == b.size
        if not whole or not isinstance(at, Const) or found.get(b.data, b) is not b and e.node.op == "wgmma":
            refused.add(b.data)
        elif e.node.op == "wgmma":
            found[b.data] = b
    return found, refused


def _candidates(touched: list[Effect], every: bool) -> dict[Var, Buffer]:
    """Register arrays that can be followed.

    every: in every form.  Otherwise only the accumulator of a launch with one, computed by one instruction with A from shared
    memory.
    """
    found, refused = _named(touched)
    if not every:
        calls = [e.node for e in touched if isinstance(e.node, Call) and e.node.op == "wgmma"]
        if refused or len(found) > 1 or any(isinstance(c.args[1], AddressOf) for c in calls):
            return {}
        if any(WGMMA_ROWS[c.options.row].c.registers != b.size for c in calls for b in found.values()):
            return {}
    return {v: b for v, b in found.items() if v not in refused}


# ---- data flow --------------------------------------------------------------------------------------------------------


@record
class _Plan:
    """The places where one buffer's values move between its array and its named registers.

    goes_in: statements after which the array moves into the registers.  comes_out: pins at which the registers move out.
    direct: loops that work on the registers directly.
    """

    goes_in: tuple[Stmt, ...]
    comes_out: tuple[Stmt, ...]
    direct: tuple[Stmt, ...]


def _plan(graph: Graph, b: Buffer) -> _Plan | None:
    """Where a buffer's values move; None when it stays an array."""
    direct = {k for k, n in enumerate(graph.nodes) if n.form is not None and n.form.buffer is b}
    while True:
        plan, wrong = _follow(graph, b, direct)
        if plan is not None or not direct:
            return plan
        direct -= wrong or direct


def _follow(graph: Graph, b: Buffer, direct: set[int]) -> tuple[_Plan | None, set[int]]:
    """(the plan with these loops working on the registers, or None; the loops among them that cannot)."""
    nodes, v = graph.nodes, b.data
    every = range(len(nodes))
    product = [n.kind == "wgmmas" and v in n.reads | n.writes for n in nodes]
    pin = [n.kind == "pin" and v in n.writes for n in nodes]
    plain = [not product[k] and not pin[k] and k not in direct for k in every]
    wants = [product[k] and needed(n, b) or k in direct and n.form is not None and n.form.reads for k, n in enumerate(nodes)]
    sets = [not plain[k] and not pin[k] and v in n.writes for k, n in enumerate(nodes)]
    # writing a piece requires the other elements too
    reads = [plain[k] and v in n.reads | n.writes for k, n in enumerate(nodes)]
    writes = [plain[k] and v in n.writes for k, n in enumerate(nodes)]
    fresh = [n.kind == "alloc" and n.stmts[0].buffer.data is v for n in nodes]  # type: ignore[attr-defined]
    # Whether registers and array are read after a node, before something else sets their values.
    for_it = [wants[k] and (k not in direct or v in nodes[k].writes) for k in every]  # arrays are packed as they are
    r_later = _later(nodes, for_it, [writes[k] or fresh[k] or sets[k] for k in every])
    a_later = _later(nodes, reads, [sets[k] or pin[k] or fresh[k] for k in every])
    goes_in = [writes[k] and r_later[k] for k in every]

    def step(k: int, state: tuple[bool, bool, int]) -> tuple[bool, bool, int]:
        array, registers, running = state
        n = nodes[k]
        if fresh[k]:
            array = registers = True  # neither holds anything yet
        elif writes[k]:
            array, registers = True, goes_in[k]
        elif sets[k]:
            array, registers = False, True
        elif pin[k] and a_later[k] and registers:
            array = True
        return array, registers, running_after(n, product[k], running)

    before = states(graph, (True, True, NEVER), step, lambda a, b: (a[0] and b[0], a[1] and b[1], min(a[2], b[2])))
    wrong: set[int] = set()
    fails = False
    for k, state in enumerate(before):
        if state is None:
            continue  # never reached
        array, registers, running = state
        if k in direct:
            if wants[k] and not registers or running != NEVER:
                wrong.add(k)
        elif wants[k] and not registers or reads[k] and not array or goes_in[k] and (running != NEVER or not nodes[k].stmts):
            fails = True
    if fails or wrong:
        return None, wrong
    out = tuple(n.stmts[0] for k, n in enumerate(nodes)
                if pin[k] and a_later[k] and (at := before[k]) is not None and not at[0] and at[1])
    return _Plan(tuple(n.stmts[0] for k, n in enumerate(nodes) if goes_in[k]), out,
                 tuple(nodes[k].stmts[0] for k in sorted(direct))), wrong


def _predecessors(nodes: list[Node]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in nodes]
    for k, n in enumerate(nodes):
        for j in n.after:
            out[j].append(k)
    return out


def _later(nodes: list[Node], uses: list[bool], ends: list[bool]) -> list[bool]:
    """For each node: whether a use follows it on some path, with no end before it."""
    before = _predecessors(nodes)
    out = [False] * len(nodes)
    todo = [k for k in range(len(nodes)) if uses[k]]
    seen = set(todo)
    while todo:
        for p in before[todo.pop()]:
            out[p] = True
            if p not in seen and not ends[p]:
                seen.add(p)
                todo.append(p)
    return out


# ---- rewriting ----------------------------------------------------------------------------------------------------------


class _Moves:
    """The rewriter of one launch.

    own: storages with named registers.  after, out: moves by the id of the statement they belong to.  direct: ids of loops
    that are printed on registers.
    """

    def __init__(self) -> None:
        self.own: set[Var] = set()
        self.after: dict[int, list[Buffer]] = {}
        self.out: dict[int, Buffer] = {}
        self.direct: set[int] = set()

    def visit(self, x: Stmt) -> Any:
        more = [move(b, "in") for b in self.after.get(id(x), ())]
        if isinstance(x, Evaluate):
            return seq(self._evaluate(x), *more) if more else self._evaluate(x)
        if id(x) in self.direct:
            return seq(with_options(x, registers=True), *more)
        return seq(x, *more) if more else with_inner(x, self.visit)

    def _evaluate(self, s: Evaluate) -> Stmt:
        if s.call.op == "wgmma":
            own = tuple(what for what, a in zip("ca", s.call.args) if isinstance(a, AddressOf) and a.buffer.data in self.own)
            return replaced(s, call=with_options(s.call, registers=own)) if own else s
        if s.call.op != "wgmma_pin":
            return s
        b = s.call.args[0].buffer  # type: ignore[attr-defined]
        if id(s) in self.out:
            return move(self.out[id(s)], "out")
        return seq() if b.data in self.own else s
