"""Chooses the order in which loops on named registers combine many elements.

    for r: x[0] = max(x[0], S[r])                    the same, attr `reduction`: "integer"
    for r: t[0] = t[0] + S[r]                        the same, attr `reduction`: "two_chains"

Only loops that may combine in any order take part (attr `any_order`, set by T.reduce); others stay one chain in the loop's
order.

"two_chains": even and odd elements are combined in two independent chains, since an FADD waits four cycles for the one
before it.

"integer": one instruction computes the maximum of three integers, but only of two floats.  Non-negative floats are ordered
like integers, and above all negative ones.  If all floats of a warp are negative, or one is NaN, the warp computes the
maximum of floats again (codegen/cuda/named_registers.py prints both).  Whole warps execute these loops.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import For, Func, Stmt, replace as replaced, rewrite_launches, seq, stmts_of, walk, with_inner, with_options
from tilelang.target.register_forms import Form, form_of, sum_form

from ..framework.pass_ import DEVICE, PassContext, pass_

MIN_INTEGER = 16  # fewest elements of a maximum for which checking the integer result pays off
MIN_CHAINS = 8  # fewest elements per result of a reduction for which two chains pay off


@pass_(needs=DEVICE)
def order_register_reductions(func: Func, cx: PassContext) -> Func:
    """Mark the loops on named registers that combine their elements in another order.

    Keeps: every maximum.  Sums change by the rounding of another order, where the program allows any.
    """
    return rewrite_launches(func, lambda x: _marked(x) if any(s.plan.registers for s in walk(x.body, For)) else None)


def _marked(x: Stmt) -> Any:
    form = form_of(x) if isinstance(x, For) and x.plan.registers else None
    if form is None:
        return with_inner(x, _marked)
    if form.kind == "sums":
        return replaced(x, body=seq(*(_inner(x, s) for s in stmts_of(x.body)), span=x.body.span))  # type: ignore
    return with_options(x, reduction=order_of(form, x)) if form.kind == "sum" else x


def _inner(s: Any, x: Stmt) -> Stmt:
    """A loop inside the loop s of the form "sums", marked if it has the same order in all iterations."""
    forms = [sum_form(x, {s.var: k}) for k in range(int(s.extent.value))] if isinstance(x, For) else []
    orders = {None if f is None else order_of(f, x) for f in forms}
    return with_options(x, reduction=orders.pop()) if len(orders) == 1 else x  # type: ignore[no-any-return]


def order_of(form: Form, s: Stmt) -> str | None:
    """The order of a loop of the form "sum": "integer", "two_chains", None for the loop's own."""
    v: Any = form.value
    results = len({i for i, _ in form.points})
    if not s.plan.any_order:  # type: ignore[attr-defined]
        return None
    if v.op == "max" and results == 1 and len(form.points) >= MIN_INTEGER:
        return "integer"
    return "two_chains" if len(form.points) >= MIN_CHAINS * results else None
