"""Keeps accumulators and A operands of wgmma in named PTX registers instead of arrays, in every loop over them.

    wgmma(S, …)                                       wgmma(S, …, registers=("c",))
    wgmma_wait(…); wgmma_pin(S)                       wgmma_wait(…)
    if …: for r: S[r] = … if … else -inf       ->     if …: wgmma_pin(S, move="out"); for r: …; wgmma_pin(S, move="in")
    if …: for r: M[r : r + 2] = acc[r : r + 2]        the same, attr `registers`
    for r: S[r] = exp2(S[r] * c - top[…] * c)         the same, attr `registers`
    for r: P[r] = float16(S[r])                       the same, attr `registers`
    wgmma(acc, P, …)                                  wgmma(acc, P, …, registers=("c", "a"))

NVRTC spends time on every operand of an `asm` and on every value that a loop carries: a third of its time for a plain GEMM
went into 128 accumulator registers that only wgmma touches, and half of it for attention into the 64 scores and 64 values of
the result of a thread.  Named registers, declared in PTX (codegen/cuda/named_registers.py), are not operands.  The
instructions of loops on them are printed in program order, so ptxas schedules them as before; it allocates one register for
both sides of a move.

Either all values of a launch are register-resident or none is.  Every array that a wgmma names gets named registers.  In the
innermost loops with wgmma, each statement that touches such an array must match a form (`target/register_forms.py`) or lie
in a branch; around a branch that holds a statement without a form, the values pass through an array, and around loops that
exchange values that a wgmma of the iteration begins with shared memory.  Outside of those loops any statement may use the
values through an array.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Break, Buffer, Call, Const, Continue, Evaluate, For, Func, If, Launch, Seq, Stmt,
                         Store, Var, While, const, inner, is_const, replace as replaced, rewrite_launches, rewrite_stmts, seq,
                         statements, walk, with_inner, with_options, GLOBAL, LOCAL, SHARED)
from tilelang.target.register_forms import Form, form_of, sum_form

from ..analysis.effects import Effect, effects, own_effects
from ..analysis.statements import distinct_statements, do
from ..framework.pass_ import DEVICE, PassConfigKey, PassContext, pass_
from .early_rescale import rescale_early

# Whether accumulators are rescaled during the exponentials (rescale_early).
EARLY = True
_WGMMA = frozenset(("wgmma", "wgmma_pin", "wgmma_wait", "wgmma_commit", "thread_return"))


@pass_(needs=DEVICE)
def assign_accumulator_registers(func: Func, cx: PassContext) -> Func:
    """Assign named PTX registers to the accumulators and A operands of wgmma.

    Marks MMAs (attr `registers`: "c", "a") and loops (attr `registers`), and replaces pins by moves (attr `move`: "in", "out").
    Launches whose values are register-resident get the attr `own_values`.
    """
    fast = bool(cx.option(PassConfigKey.TL_ENABLE_FAST_MATH))
    return replaced(func, body=rewrite_launches(func.body, lambda x: _assign_registers(x, fast)))


def _assign_registers(launch: Launch, fast: bool) -> Launch:
    if not _wgmmas(launch.body):
        return launch
    launch = replaced(launch, body=distinct_statements(launch.body))
    whole = keep_in_registers(launch)
    loops = () if fast or whole is None else [s for s in walk(whole.body, For) if s.plan.registers]
    if whole is None or any(x.op == "exp2" for s in loops for x in walk(s, Call)):  # exact: the instruction flushes subnormals
        return launch
    return rescale_early(whole) if EARLY else whole


def _arrays(every: Iterable[Effect]) -> tuple[dict[Var, Buffer], set[Var]]:
    """(register arrays that wgmma names, arrays among them that are named at non-constant places or not pinned as a whole)."""
    found: dict[Var, Buffer] = {}
    refused: set[Var] = set()
    for e in every:
        if not isinstance(e.node, Call) or e.node.op not in ("wgmma", "wgmma_pin") or e.buffer.scope_name != LOCAL:
            continue
        b = e.buffer
        whole = len(b.shape) == 1 and b.is_static and b.bits % 32 == 0
        at = e.indices[0] if e.indices and len(e.indices) == 1 else None
        if e.node.op == "wgmma_pin":
            whole = whole and isinstance(at, Const) and at.value == 0 and e.node.options.count == b.size
        if not whole or not isinstance(at, Const) or found.get(b.data, b) is not b and e.node.op == "wgmma":
            refused.add(b.data)
        elif e.node.op == "wgmma":
            found[b.data] = b
    return found, refused


def keep_in_registers(launch: Launch) -> Launch | None:
    """The launch with all arrays that a wgmma names in named registers; None where one of them cannot be.

    launch: its statements are distinct objects.
    """
    found, refused = _arrays(effects(launch.body))
    if refused:
        return None
    launch = _unheld(launch, found)
    loops = [x for x in walk(launch.body, For, While) if _wgmmas(x)]
    hot = {id(x) for x in loops if not any(_wgmmas(y) for y in walk(x.body, For, While))}
    added = [(c.args[0].buffer.data, is_const(c.args[3], 0)) for c in _wgmmas(launch.body) if isinstance(c.args[0], AddressOf)]
    lasting = {v for v, _ in added if v in found} - {v for v, afresh in added if afresh}
    if not hot and not any(isinstance(c.args[1], AddressOf) for c in _wgmmas(launch.body)):
        return None  # no loop carries a value, and NVRTC moves the loads behind a GEMM among each other (delta rule: 1.5 %)
    chunks = any(isinstance(c.args[0], AddressOf) and not is_const(c.args[0].indices[0], 0) for c in _wgmmas(launch.body))
    if chunks and any(isinstance(e.node, Store) and e.buffer.scope_name == GLOBAL for e in effects(launch.body)):
        return None  # NVRTC leaves branches around the threads' stores (256 x 128 with an odd pitch of C: 4 %)
    direct: set[int] = set()
    borrowed: dict[int, list[tuple[Buffer, bool]]] = {}
    for s, loop, below in _users(launch.body, found):
        writes = {e.storage: False for e in below if e.storage in found}
        writes.update((e.storage, True) for e in below if e.writes and e.storage in found)
        if not writes:
            continue
        if s is None:
            return None
        rare, form = loop not in hot, _form(s, found)
        if form is not None and writes.keys() == _named(form, found) and (rare or form.kind != "store"):
            direct.add(id(s))
        elif _may_borrow(s, not rare and (not lasting.isdisjoint(writes) or not _exchanges(s)), found):
            borrowed[id(s)] = [(found[v], writes[v]) for v in found if v in writes]
        else:
            return None
    return with_options(_Rewriter(found, direct, borrowed).visit(launch), own_values=True)


def _unheld(launch: Launch, arrays: Container[Var]) -> Launch:
    """The launch without waits that are held behind a whole array of these, which would have to leave its registers."""
    def visit(s: Stmt) -> Stmt | None:
        held = isinstance(s, Evaluate) and isinstance(s.call, Call) and s.call.op == "wgmma_hold" and s.call.args[0]
        return seq() if isinstance(held, AddressOf) and held.buffer.data in arrays else None

    return rewrite_stmts(launch, visit)  # type: ignore[no-any-return]


def _users(s: Stmt, arrays: Container[Var], loop: int = 0) -> Iterator[tuple[Stmt | None, int, tuple[Effect, ...]]]:
    """(statement, id of the loop around it, accesses) of statements without wgmma, waits, pins and jumps in them, as large as
    such are; None in place of the statement for the condition or the bounds of others."""
    if not _mixed(s, arrays):
        yield s, loop, tuple(effects(s))
    elif inner(s):
        yield None, loop, own_effects(s)
        for x in inner(s):
            yield from _users(x, arrays, id(s) if isinstance(s, (For, While)) else loop)


def _mixed(s: Stmt, arrays: Container[Var]) -> bool:
    """Whether a statement is a sequence, or has wgmma, waits, pins, jumps or declarations of the arrays in it."""
    return isinstance(s, Seq) or any(
        isinstance(x, (Break, Continue)) or isinstance(x, Alloc) and x.buffer.data in arrays or
        isinstance(x, Evaluate) and x.call.op in _WGMMA for x in statements(s))


def _wgmmas(s: Stmt) -> list[Call]:
    return [e.node for e in effects(s) if isinstance(e.node, Call) and e.node.op == "wgmma"]


def _form(s: Stmt, found: Container[Var]) -> Form | None:
    """The form of a statement: that of a sum where the array that it adds to has no named registers."""
    form = form_of(s)
    return sum_form(s) if form is not None and form.kind == "map" and form.buffer.data not in found else form


def _named(form: Form, found: Mapping[Var, Buffer]) -> set[Var]:
    """The arrays whose registers the printed text of a form names."""
    return {b.data for b in (form.buffer, form.source) if b is not None and found.get(b.data) is b}


def _may_borrow(s: Stmt, hot: bool, found: Mapping[Var, Buffer]) -> bool:
    """Whether the values may pass through arrays around a statement, or around the statements in its branches."""
    if isinstance(s, If):
        return not any(e.storage in found for e in own_effects(s))
    return not hot and isinstance(s, (For, Store, Evaluate))


def _exchanges(s: Stmt) -> bool:
    """Whether a loop accesses shared memory.  With arrays NVRTC moves all its loads in front of the arithmetic."""
    return isinstance(s, For) and any(e.buffer.scope_name in SHARED for e in effects(s))


class _Rewriter:
    """The rewriter of one launch.

    found: the arrays.  direct: ids of loops with a form.  borrowed: by the id of a statement, the arrays that hold the values
    during the statement, and whether the values move back.
    """

    def __init__(self, found: Mapping[Var, Buffer], direct: set[int], borrowed: dict[int, list[tuple[Buffer, bool]]]) -> None:
        self.found, self.direct, self.borrowed = found, direct, borrowed

    def visit(self, x: Stmt) -> Any:
        if isinstance(x, Evaluate):
            return self._evaluate(x)
        if id(x) in self.direct:
            return self._marked(x)
        arrays = self.borrowed.get(id(x))
        if arrays is None:
            return with_inner(x, self.visit)
        if isinstance(x, If):
            return replaced(x, then=self._branch(x.then, arrays),
                            orelse=None if x.orelse is None else self._branch(x.orelse, arrays))
        return _borrowing(x, arrays)

    def _marked(self, x: Stmt) -> Stmt:
        form = _form(x, self.found)
        own = form is not None and form.source is not None and form.source.data in self.found
        how = "sum" if form is not form_of(x) else True if not own else \
            "source" if form.buffer.data in self.found else "read"  # type: ignore[union-attr]
        marked = with_options(x, registers=how)  # type: ignore[arg-type]
        marked.__dict__["_form"] = form
        return marked

    def _branch(self, s: Stmt, arrays: list[tuple[Buffer, bool]]) -> Stmt:
        """The body of a branch: on the registers where all of it has forms, else with the values in arrays."""
        marked = self._on_registers(s)
        if marked is not None:
            return marked
        inside = list(s.stmts) if isinstance(s, Seq) else list(inner(s)) if isinstance(s, If) else []
        if any(x is not y for x, y in zip(inside, map(self._on_registers, inside)) if y is not None):
            return with_inner(s, lambda x: self._branch(x, arrays))  # some of it has forms
        return _borrowing(s, arrays)

    def _on_registers(self, s: Stmt) -> Stmt | None:
        touched = {e.storage for e in effects(s)} & set(self.found)
        if not touched:
            return s
        if isinstance(s, Seq):
            parts = [self._on_registers(x) for x in s.stmts]
            return None if None in parts else replaced(s, stmts=tuple(parts))
        if isinstance(s, If) and not any(e.storage in touched for e in own_effects(s)):
            then, orelse = self._on_registers(s.then), None if s.orelse is None else self._on_registers(s.orelse)
            return None if then is None or s.orelse is not None and orelse is None else replaced(s, then=then, orelse=orelse)
        form = _form(s, self.found) if isinstance(s, For) else None
        return None if form is None or touched != _named(form, self.found) else self._marked(s)

    def _evaluate(self, s: Evaluate) -> Stmt:
        if s.call.op == "wgmma":
            own = tuple(what for what, a in zip("ca", s.call.args) if isinstance(a, AddressOf) and a.buffer.data in self.found)
            return replaced(s, call=with_options(s.call, registers=own))
        arrays = self.borrowed.get(id(s))
        if arrays is not None:
            return _borrowing(s, arrays)
        pinned = s.call.op == "wgmma_pin" and s.call.args[0].buffer.data in self.found  # type: ignore[attr-defined]
        return seq() if pinned else s


def _borrowing(s: Stmt, arrays: list[tuple[Buffer, bool]]) -> Stmt:
    """The statement with the values of registers in arrays."""
    touched = {e.storage for e in effects(s)}
    mine = [(b, back) for b, back in arrays if b.data in touched]
    return seq(*(move(b, "out") for b, _ in mine), s, *(move(b, "in") for b, back in mine if back))


def move(b: Buffer, way: str) -> Stmt:
    """Move values of an array into its registers ("in"), or from the registers into the array ("out")."""
    return do("wgmma_pin", AddressOf(b, (const(0),)), count=b.size, move=way)
