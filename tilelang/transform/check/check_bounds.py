"""Reject accesses that certainly lie outside of their buffer: one element of block memory, or every element of a tensor.

    s = T.alloc_shared((128,), "float32")
    for r in T.serial(n):
        for i in T.Parallel(128):
            Y[i] = s[i + 1]                     # rejected: s[128] is read, and nothing guards it on any target
            Z[i] = X[i + 128]                   # rejected: X has 128 elements, so the guard makes zeros of all
"""

from __future__ import annotations

from typing import Any

from tilelang import errors
from tilelang.arith import Analyzer, LaunchFacts
from tilelang.ir import (COMPARISONS, AddressOf, Binary, Bind, Buffer, Call, Cast, Const, Evaluate, Expr, For, Func, If, Launch,
                         Load, Node, Parallel, Select, Stmt, Store, TileOp, Var, While, children, contains, convert,
                         free_vars, inner, leaves, remember, substitute, walk, GLOBAL, PRIVATE)

from ..analysis.guards import conjuncts
from ..analysis.statements import is_positive
from ..framework.pass_ import TILE, PassContext, pass_

errors.register("out-of-bounds", IndexError, "a program certainly accesses memory outside the shape of its buffer",
                expected="an index inside the buffer")
errors.register_warning("outside-tensor", "an access to a tensor of which every element is outside: it is left out")

_BY_ADDRESS = ("wgmma_descriptor", "tma_load")  # calls whose first operand is an address in shared memory


@pass_(needs=TILE)
def check_bounds(func: Func, cx: PassContext) -> Func:
    """Raise "out-of-bounds" for an access that lies outside of its buffer whenever it runs. Changes nothing.

    Block memory: one element that is certainly accessed. Only indices that are linear in variables which take every value of
    their range at this place are certain; conditions and jumps on the way may leave values out. Tensors: all elements, which a
    guard leaves out. Where other accesses reach the tensor, a warning: a stencil on few elements is no fault.
    """
    tensors: dict[Var, list[errors.TileLangError]] = {}
    inside: set[Var] = set()
    for launch in walk(func, Launch):
        _Places(launch, func.params, tensors, inside).stmt(launch.body)
    for data, found in tensors.items():
        if data not in inside:
            raise found[0]
        for e in found:
            errors.warn("outside-tensor", e.message, "nothing is stored there, and what is read is 0", e.span)
    return func


class _Places:
    """Visits the statements of a launch in order.

    swept: variables that take every value of their range, independently, whenever this place is reached. values: of bound
    names; opaque: names of values from memory. serial: variables of serial loops. left: some threads have returned.
    tensors: accesses that lie outside of a tensor; inside: tensors that others reach.
    """

    def __init__(self, launch: Launch, params: Any, tensors: dict[Var, list[errors.TileLangError]], inside: set[Var]) -> None:
        self.facts = LaunchFacts(launch, params)
        self.swept = {*launch.thread_vars, *(v for v, n in zip(launch.block_vars, launch.grid) if is_positive(n))}
        self.values: dict[Var, Expr] = {}
        self.opaque: set[Var] = set()
        self.serial: set[Var] = set()
        self.left = False
        self.tensors, self.inside = tensors, inside

    def stmt(self, s: Stmt) -> None:
        match s:
            case For() | Parallel():
                self.loop(s)
            case Store():
                self.check(s.buffer, s.indices, s.span)
                for e in (*s.indices, s.value):
                    self.expr(e)
            case Bind():
                self.expr(s.value)
                self.facts.enter_bind(s)
                if s.value.dtype.is_int and s.value.dtype.lanes == 1 and not contains(s.value, Load, Call):
                    remember(self.values, s)
                else:
                    self.opaque.add(s.var)
            case If():
                self.expr(s.cond)
                self.under(s.cond, True, lambda: self.stmt(s.then))
                if s.orelse is not None:
                    self.under(s.cond, False, lambda: self.stmt(s.orelse))
            case While():
                self.expr(s.cond)
                self.under(s.cond, True, lambda: self.within(s.body, set() if leaves(s.body) else self.swept))
            case TileOp():
                for a in s.accesses():  # type: ignore[attr-defined]
                    self.check(a.region.buffer, a.region.mins, a.region.span or s.span, a.region.extents)
                self.fields(s)
            case Evaluate() if s.call.op == "thread_return":
                self.left = True
            case _:
                for x in inner(s):
                    self.stmt(x)
                self.fields(s)

    def loop(self, s: For | Parallel) -> None:
        """A loop that runs for every value of its variables, or may not."""
        names, extents = ((s.var,), (s.extent,)) if isinstance(s, For) else (s.vars, s.extents)
        if any(isinstance(n, Const) and n.value <= 0 for n in map(convert, extents)):
            return
        whole = all(map(is_positive, extents))
        if isinstance(s, For):
            self.facts.enter_loop(s)
            self.serial.add(s.var)
            whole = whole and isinstance(s.start, Const) and not s.kind.startswith(("threadIdx", "blockIdx", "vthread"))
        else:
            for v, n in zip(names, extents):
                high = self.facts.analyzer.interval(convert(n))[1]
                self.facts.analyzer = self.facts.analyzer.bind(v, 0, None if high is None else max(high - 1, 0))
        self.within(s.body, set() if leaves(s.body) else self.swept.union(names) if whole else self.swept)

    def within(self, s: Stmt, swept: set[Var]) -> None:
        """The statements of a body, in which these variables are swept."""
        outer, self.swept = self.swept, swept
        self.stmt(s)
        self.swept = set() if self.left else outer

    def under(self, cond: Expr, holds: bool, visit: Any) -> None:
        """visit() with the knowledge that cond holds, or does not."""
        cond, facts, outer = substitute(cond, self.values), self.facts.analyzer, self.swept
        if isinstance(known := facts.simplify(cond), Const) and bool(known.value) is not holds:
            return  # never reached
        left_out = [free_vars(p) for p, true in conjuncts(cond, holds) if not is_bound(p, true)]
        if contains(cond, Load, Call) or not self.opaque.isdisjoint(free_vars(cond)):
            left_out.append(self.swept if self.opaque & free_vars(cond) or contains(cond, Call) or any(
                x.buffer.scope() in PRIVATE for x in walk(cond, Load)) else self.serial)
        elif cond.dtype.lanes == 1:
            self.facts.analyzer = facts.assuming(cond, holds)
        self.swept = self.swept.difference(*left_out)
        visit()
        self.facts.analyzer, self.swept = facts, set() if self.left else outer

    def expr(self, e: Expr) -> None:
        """Check the loads of an expression."""
        if not contains(e, Load, Call):
            return
        if isinstance(e, Binary) and e.op in ("and", "or") and e.dtype.lanes == 1:
            self.expr(e.a)
            self.under(e.a, e.op == "and", lambda: self.expr(e.b))
        elif isinstance(e, Select) and e.cond.dtype.lanes == 1:
            self.expr(e.cond)
            self.under(e.cond, True, lambda: self.expr(e.a))
            self.under(e.cond, False, lambda: self.expr(e.b))
        else:
            if isinstance(e, Load):
                self.check(e.buffer, e.indices, e.span)
            elif isinstance(e, Call):
                for k, a in enumerate(e.args):
                    if isinstance(a, AddressOf) and (e.op.startswith("atomic_") or k == 0 and e.op in _BY_ADDRESS):
                        self.check(a.buffer, a.indices, e.span)
                    elif isinstance(a, AddressOf):
                        self.inside.add(a.buffer.data)
            self.fields(e)

    def fields(self, n: Node) -> None:
        for x in children(n):
            if isinstance(x, Expr):
                self.expr(x)

    def check(self, b: Buffer, indices: tuple[Expr, ...], span: Any, extents: tuple[Any, ...] = ()) -> None:
        """Find out about an access outside of b. extents: elements accessed per dimension, 1 if not given."""
        if len(indices) != len(b.shape) or 0 in b.shape:
            return self.inside.add(b.data)
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            if not (e.dtype.is_signed or e.dtype.is_unsigned) or e.dtype.lanes > 1:
                continue
            more = extents[d] - 1 if extents and isinstance(extents[d], int) else 0 if not extents else None
            e, a = substitute(e, self.values), self.facts.analyzer
            if b.scope() == GLOBAL:
                if not (isinstance(e, Const) and not extents) and _every_element(a, e, size, more):  # "index-outside" warned
                    return self.tensors.setdefault(b.data, []).append(errors.error(
                        "out-of-bounds", f"every element of {b.name} that is accessed here is outside of dimension {d}, which "
                        f"has {size} elements", expected=f"an index from 0 to {size - 1}", found=f"`{e}`", span=span,
                        hint="accesses outside of a tensor are left out, and what is read is 0: correct the index"))
                continue
            form = a.linear(e)
            low, high = a.bounds_of(form)
            if not isinstance(size, int) or low is None or high is None or low >= 0 and high + (more or 0) < size:
                continue
            terms = form.terms  # of different variables, so that one takes its highest value while the others do
            if not all(map(self.takes_every_value, terms)) or len(terms) > len({v for t in terms for v in free_vars(t)}):
                continue
            if e.dtype.is_unsigned and not size - (1 << e.dtype.bits) <= low <= high < 1 << e.dtype.bits:
                continue  # it wraps
            index = low if low < 0 else high + (more or 0)
            raise errors.error("out-of-bounds", f"{b.name} is accessed at index ‹{index}› of dimension {d}, which has {size} "
                               "elements", expected=f"an index from 0 to {size - 1}", span=span,
                               hint="memory of a block is not guarded: make it larger, or guard the access with a condition")
        self.inside.add(b.data)

    def takes_every_value(self, e: Expr) -> bool:
        """Whether e is a swept variable; or one plus a number, in a type that holds it, its quotient or its rest."""
        a = self.facts.analyzer
        rest = isinstance(e, Binary) and e.op == "floormod"
        if isinstance(e, Cast) and a.interval(e) == a.interval(e.value):
            form = a.linear(e.value)
        elif isinstance(e, Binary) and (rest or e.op == "floordiv") and isinstance(e.b, Const) and e.b.value > 0:
            form = a.linear(e.a)
        else:
            return isinstance(e, Var) and e in self.swept
        low, high = a.bounds_of(form)
        return low is not None and high is not None and (not rest or high - low >= e.b.value - 1) and [  # type: ignore
            abs(c) for c in form.terms.values()] == [1] and self.takes_every_value(*form.terms)


def _every_element(a: Analyzer, e: Expr, size: Any, more: int | None) -> bool:
    """Whether e .. e + more lie outside of 0 .. size - 1 for all values of the variables. more None: of unknown length."""
    form = a.linear(e)
    beyond = a.bounds_of(form.plus(a.linear(convert(size)), -1))[0] if a.exact(form, e.dtype) else None
    high = a.interval(e)[1]
    return beyond is not None and beyond >= 0 or more is not None and high is not None and high + more < 0


def is_bound(cond: Expr, holds: bool) -> bool:
    """Whether a condition that holds (or does not) bounds one variable by a number, so that no value between is left out."""
    return isinstance(cond, Binary) and cond.op in COMPARISONS and cond.op != ("ne" if holds else "eq") and \
        len(free_vars(cond)) == 1 and all(
            isinstance(x, (Var, Const)) or isinstance(x, Binary) and x.op in ("add", "sub", *COMPARISONS) for x in walk(cond))
