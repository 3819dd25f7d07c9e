"""Chooses the order in which loops on named registers combine many elements.

    for r: x[0] = max(x[0], S[r])                    the same, attr `reduction`: "integer"
    for r: t[0] = t[0] + S[r]                        the same, attr `reduction`: "two_chains"
    for i in 0..2:                                   the same, attr `maxima_first`: 2
        x[i] = before[i]                      ->
        for r: x[i] = max(x[i], S[4 * i + r])
        rest

Only loops that may combine in any order take part (attr `any_order`, set by T.reduce); others stay one chain in the loop's
order.

"two_chains": even and odd elements are combined in two independent chains, since an FADD waits four cycles for the one
before it.

"integer": one instruction computes the maximum of three integers, but only of two floats.  Non-negative floats are ordered
like integers, and above all negative ones.  If all floats of a warp are negative, or one is NaN, the warp computes the
maximum of floats again (codegen/cuda/named_registers.py prints both).  Whole warps execute these loops.

`maxima_first`: the first so many statements of the body run for all iterations before the other statements, so that one
test serves the maxima of all iterations.  After the branch of a mask that is faster; elsewhere the first row's exponentials
hide the latency of the second row's maximum.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (AddressOf, Evaluate, For, Func, If, Load, Stmt, Store, rewrite_launches, seq, stmts_of, walk,
                         with_options, with_inner)
from tilelang.ir import replace as replaced
from tilelang.target.register_forms import Form, form_of, sum_form

from ..framework.pass_ import DEVICE, PassContext, pass_

MIN_INTEGER = 16  # fewest elements of a maximum for which checking the integer result pays off
MIN_CHAINS = 8  # fewest elements per result of a reduction for which two chains pay off


@pass_(needs=DEVICE)
def order_register_reductions(func: Func, cx: PassContext) -> Func:
    """Mark the loops on named registers that combine their elements in another order.

    Keeps: every maximum.  Sums change by the rounding of another order, where the program allows any.
    """
    return rewrite_launches(func, lambda x: _Orders().visit(x) if any(s.plan.registers for s in walk(x.body, For)) else None)


class _Orders:
    """Visits the statements of a launch in program order."""

    def __init__(self) -> None:
        self.behind_branch = False  # whether a branch that few iterations take occurred since the last "sums" loop

    def visit(self, x: Stmt) -> Any:
        form = form_of(x) if isinstance(x, For) and x.plan.registers else None
        if form is not None:
            assert isinstance(x, For)
            return self._marked(x, form)
        out = with_inner(x, self.visit)
        if isinstance(x, If) and x.orelse is None and borrows_registers(x.then):
            self.behind_branch = True
        return out

    def _marked(self, s: For, form: Form) -> Stmt:
        if form.kind == "sum":
            return with_options(s, reduction=order_of(form, s))  # type: ignore[no-any-return]
        if form.kind != "sums":
            return s
        first = _maxima_first(s) if self.behind_branch else 0
        self.behind_branch = False
        stmts = [self._inner(s, x) for x in stmts_of(s.body)]
        return with_options(replaced(s, body=seq(*stmts, span=s.body.span)), maxima_first=first or None)  # type: ignore[no-any-return]

    def _inner(self, s: For, x: Stmt) -> Stmt:
        """Mark a loop inside a loop of the form "sums", if it has the same order in all iterations."""
        forms = [sum_form(x, {s.var: k}) for k in range(int(s.extent.value))] if isinstance(x, For) else []  # type: ignore
        orders = {None if f is None else order_of(f, x) for f in forms}
        return with_options(x, reduction=orders.pop()) if len(orders) == 1 else x  # type: ignore[no-any-return]


def borrows_registers(s: Stmt) -> bool:
    """Whether a statement, or one in its sequence, moves named registers into an array."""
    return any(isinstance(x, Evaluate) and x.call.op == "wgmma_pin" and x.call.options.move == "out"
               for x in (stmts_of(s) or (s,)))


def order_of(form: Form, s: Stmt) -> str | None:
    """The order of a loop of the form "sum": "integer", "two_chains", None for the loop's own."""
    v: Any = form.value
    results = len({i for i, _ in form.points})
    if not s.plan.any_order:  # type: ignore[attr-defined]
        return None
    if v.op == "max" and results == 1 and len(form.points) >= MIN_INTEGER:
        return "integer"
    return "two_chains" if len(form.points) >= MIN_CHAINS * results else None


def _maxima_first(s: For) -> int:
    """How many statements of the body run for all iterations before the others: 0 for none."""
    body = stmts_of(s.body)
    at = next((i for i, x in enumerate(body) if isinstance(x, For)), len(body))
    form = sum_form(body[at], {s.var: 0}) if at < len(body) else None
    if form is None or order_of(form, body[at]) != "integer" or any(isinstance(x, For) for x in body[at + 1:]):
        return 0
    own: Any = form.value.a  # type: ignore[union-attr]

    def disjoint(x: Any) -> bool:  # from what other iterations touch
        return x.buffer.data is form.buffer.data or x.buffer is own.buffer and bool(x.indices == own.indices)

    return at + 1 if all(isinstance(x, (Load, Store)) and disjoint(x) for y in body for x in walk(y)
                         if isinstance(x, (Load, Store, AddressOf))) else 0
