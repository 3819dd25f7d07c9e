"""Computes weights with the maxima of rows so far, and seeks maxima only where the weights say that one may move.

    for r: before[r] = top[r]                                  for r: before[r] = top[r]
    wait (1); release                                          wait (1); release
    for r: part[r] = max over S[r, …] and over lanes           for r, j in the first half: e = f(S[r, j]) by a polynomial
    for r: top[r] = c tanh(k part[r])                                                      sum[r] += e;  E[r, j] = e
    for r: top[r] = top[r] if (top[r] - before[r]) * d         wait (0); releases
                    > LAG else before[r]                       for r, j in the first half: P[r, j] = float16(E[r, j])
    for r: factor[r] = exp2(before[r] - top[r])                for r, j in the other half: e = f(S[r, j]) by a polynomial
    for r, j: S[r, j] = f(S[r, j])                     ->                                  sum[r] += e;  P[r, j] = float16(e)
    if …: for r, j: S[r, j] = … (a mask)                       large = any_sync(… or not sum[r] <= bound of top[r], of all r)
    for r: sum[r] = sum over S[r, …]                           if large:
    for r: total[r] = total[r] * factor[r] + sum[r]                what else is on the left
    wait (0); releases                                             for r: total[r] = total[r] * factor[r]
    for r, d: acc[r, d] = acc[r, d] * factor[r]                for r: total[r] = total[r] + sum[r]
    for r, j: P[r, j] = float16(S[r, j])

where f(s) = exp2(c tanh(k s) - top[r]).  Maxima, their exchange between lanes, the time for which exponentials wait for both,
and a vote about the range of the polynomial are left out, and conversions fill issue slots that exponentials leave.

No weight is larger than the sum that a thread adds it to.  So where that is at most 2^(LAG / d), the condition is false in each
lane: `top` stays, and factors are 1.  The polynomial p rises everywhere: where the sum is at most 2^(c p(L) - top[r]) too, all
arguments are at most L.  Below -L, p is less than tanh, and weights are off by less than 2^-26 of that of a score of 0, which
counts no more than the row's largest where top[r] >= 0 (LEAST_ANCHORED).  Where a mask hides keys, and where a sum is NaN, the
branch is taken.  S stays until then, so half of the weights take registers while a GEMM reads P: where a thread has few, all
weights come behind the wait.  The branch has no polynomial: ptxas would keep what both have in common.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.ir import (Alloc, Binary, Bind, Call, Const, Expr, For, Func, If, Launch, Load, Select, Stmt, Store, binary, call,
                         cast, const, contains, dtype, free_vars, fresh, is_const, logical, replace, rewrite, rewrite_launches,
                         seq, stmts_of, unary, walk)
from tilelang.target.machine import REGISTERS_PER_SM
from tilelang.target.register_forms import EX2, Form, constant, form_of, sum_form
from tilelang.target.rounded_functions import FORMS, LEAST_ANCHORED, without_factors

from ..analysis.effects import effects
from ..analysis.statements import renamed
from ..framework.pass_ import DEVICE, PassContext, pass_
from .early_rescale import restricted
from .small_tanh import argument_limit, operands, polynomial, small_range, tanh_calls
from .voted_maxima import (any_lane, calls, factor_of, is_row, row_loop, rows_at_once, split_total, vanishes, writes)

F32 = dtype("float32")
EXP2 = FORMS["exp2"]["term"].name
EARLY = 2  # one of so many weights comes in front of the wait
MANY = 208  # registers of a thread
LESS = 1 - 2.0**-13  # for the roundings of the polynomial, the exponential and the sum


@pass_(needs=DEVICE)
def kept_maxima(func: Func, cx: PassContext) -> Func:
    """Compute weights of tanh beside wgmma with the maxima so far."""
    if not any(True for _ in tanh_calls(func.body)):
        return func

    def visit(launch: Launch) -> Launch:
        given = [x.options.n for x in walk(launch, Call) if x.op == "set_max_nreg"] or [REGISTERS_PER_SM // launch.num_threads]
        return rewrite(launch, lambda x: _kept(x, launch, max(given) >= MANY), For)

    return replace(func, body=rewrite_launches(func.body, visit))  # type: ignore[no-any-return]


def _kept(loop: For, launch: Launch, many: bool) -> Stmt | None:
    """The loop in the new order; None if it does not have the shape.  many: whether a thread has registers for half of the
    weights."""
    body = list(stmts_of(loop.body))
    waits = [i for i, s in enumerate(body) if calls(s, "wgmma_wait")]
    nest = next((i for i, s in enumerate(body) if isinstance(s, For) and argument_limit(s)), None)
    if loop.kind != "serial" or nest is None or len(waits) != 2 or not waits[0] < nest < waits[1]:
        return None
    (first, last), tanh = waits, next(tanh_calls(body[nest]))
    x = operands(tanh)[0]
    reduced = next((i for i in range(nest - 1, first, -1) if rows_at_once(body[i])), nest)
    sums = next((i for i in range(nest + 1, last) if _sum(body[i])), last)
    scaled = next((i for i in range(last, len(body) - 1) if _kind(body[i]) == "scale"), len(body) - 1)
    rows, form, packed = rows_at_once(body[reduced]), _sum(body[sums]), form_of(body[-1])
    maxima: Any = sum_form(rows[1]) if rows else None
    factor = factor_of(body[scaled]) if _kind(body[scaled]) == "scale" else None
    if maxima is None or form is None or packed is None or factor is None or packed.source is None or any(
            y.data is not x.buffer.data for y in (maxima.buffer, form.buffer, packed.source)):
        return None
    own = {k: i for i, k in form.points}
    if maxima.value.op != "max" or {k: i for i, k in maxima.points} != own or len(own) < x.buffer.size or any(
            2 * w != k for w, _, k, _ in packed.points):
        return None
    top, added = _anchored(body[nest], tanh, own), form.value.a.buffer  # type: ignore[union-attr]
    if top is None:
        return None
    lag = _lag(body, reduced, nest, top, tanh, factor)
    totals = {i: y for i in range(sums + 1, last) if (y := split_total(body[i], factor, factor))}
    masks = [s for s in body[nest + 1:sums] if isinstance(s, If)]
    named = [s for s in body[reduced:sums] if isinstance(s, (Alloc, Bind))]
    moved = [s for s in (*rows, *body[reduced + 1:sums + 1])  # type: ignore[misc]
             if not isinstance(s, (Alloc, Bind)) and not calls(s, "wgmma_hold")]
    changed = {e.storage for s in body[reduced:nest] for e in effects(s) if e.writes} - {top.buffer.data}
    others = [s for i, s in enumerate(body) if not reduced <= i <= sums and i != scaled and i not in totals]
    if lag is None or len(totals) != 1 or scaled != len(body) - 2 or not all(
            isinstance(s, (Alloc, Bind)) or isinstance(s, If) and s.orelse is None for s in body[nest + 1:sums]) or any(
            e.storage in changed for s in others for e in effects(s)) or any(
            contains(s, Store) for s in body[last:scaled]) or any(
            e.storage is x.buffer.data for s in body[sums + 1:-1] for e in effects(s)) or not _forgotten(
            launch, loop, {*changed, x.buffer.data}):
        return None
    ((place, (product, total, _)),) = totals.items()
    zeros = renamed(replace(body[sums], body=stmts_of(body[sums].body)[0]))  # type: ignore[attr-defined]
    early, late = _halves(body[nest], top) if many else (None, body[nest])
    half = replace(x.buffer, name="weights", data=fresh("weights", x.buffer.data.dtype))
    start = [] if early is None else [Alloc(half), _weights(early, added, top, half)]
    pack = [] if early is None else [_with_body(early, Store(packed.buffer, _inner(early).indices, cast(
        Load(half, _inner(early).indices, F32), packed.buffer.dtype)))]
    large = fresh("large", "int32")
    known = [unary("not", y) for y in (_known(added, top, r, lag, tanh) for r in range(added.size))]
    slow = [*moved, product, body[scaled], body[-1]]
    waited = body[last:scaled]
    return replace(loop, body=seq(
        *body[:first], *([] if start else waited[:1]), *body[first + bool(not start):reduced], *named, zeros, *start,
        *waited[bool(not start):], *map(renamed, pack), _weights(late, added, top, packed.buffer),
        Bind(large, any_lane([*(s.cond for s in masks), *known])), If(binary("ne", large, const(0, "int32")), seq(*slow)),
        *(total if i == place else body[i] for i in range(sums + 1, last))))


def _halves(nest: Any, top: Load) -> tuple[Any, Any]:
    """The nest in two: each has half of the columns."""
    loops, rows = [x for x in walk(nest, For)], free_vars(top)
    column = max((x for x in loops if x.var not in rows), key=lambda x: x.extent.value)  # type: ignore[attr-defined]
    n = int(column.extent.value)  # type: ignore[attr-defined]
    early, late = (restricted(loops, _inner(nest), {column.var: part}) for part in ((0, n // EARLY), (n // EARLY, n)))
    return early, late


def _weights(nest: Any, added: Any, top: Load, to: Any) -> Stmt:
    """The nest with polynomials, which adds its values to those of a row, and stores them."""
    e, store = fresh("weight", "float32"), _inner(nest)
    row = next(x for x in walk(store.value, Load) if x.buffer is top.buffer).indices
    return renamed(_with_body(nest, seq(
        Bind(e, rewrite(store.value, polynomial, Call)), Store(added, row, Load(added, row, F32) + e, span=store.span),
        Store(to, store.indices, cast(e, to.dtype), span=store.span))))


def _known(added: Any, top: Load, r: int, lag: float, tanh: Any) -> Expr:
    """Whether the sum of a row shows that its maximum stays, and that its arguments have the polynomial's range."""
    (limit, factors), (_, _, c) = small_range(tanh), operands(tanh)
    most = LESS * c * sum(a * limit**(2 * i + 1) for i, a in enumerate(factors))
    at, own = (Load(b, (const(r),), F32) for b in (top.buffer, added))
    weight = binary("min", const(2.0**(LESS * lag), F32), call(EXP2, (const(most, F32) - at,), F32))
    return logical("and", binary("ge", at, const(0.0, F32)), binary("le", own, weight))


def _anchored(nest: Any, tanh: Any, row: dict[int, int]) -> Load | None:
    """t of a nest that only computes exp2(c tanh(k x) - t), with a weight c that is large enough and t of the row of x."""
    e: Any = _inner(nest).value
    e = e.args[0] if getattr(e, "op", "") in EX2 else None
    x, k, c = operands(tanh)
    t = e.b if isinstance(e, Binary) and e.op == "sub" and e.a is tanh else None
    if not isinstance(t, Load) or len(t.indices) != 1 or k < 0 or c < LEAST_ANCHORED:
        return None
    form = form_of(rewrite(nest, lambda y: x if y is tanh else None, Call))
    mapped = form is not None and form.kind == "map"
    return t if mapped and all(constant(t.indices[0], at) == row[k] for k, at in form.points) else None  # type: ignore[union-attr]


def _sum(s: Stmt) -> Form | None:
    """The form of a loop that adds a thread's elements of each row; None for other statements."""
    steps = list(stmts_of(s.body)) if isinstance(s, For) else []
    begun = len(steps) == 2 and isinstance(steps[0], Store) and is_const(steps[0].value, 0)
    form = sum_form(replace(s, body=steps[1])) if begun else None
    return form if form is not None and form.value.op == "add" else None  # type: ignore[union-attr]


def _lag(body: list[Stmt], reduced: int, nest: int, top: Load, tanh: Any, factor: Any) -> float | None:
    """LAG / d, where the statements up to the nest are those above, and `before` is what `top` was; else None."""
    begun, found, lanes = rows_at_once(body[reduced])  # type: ignore[misc]
    if not is_const(_inner(begun).value, -math.inf) or any(getattr(x.value, "op", "") != "max" for x in walk(lanes, Store)):
        return None
    same, changed = {_inner(found).buffer.data}, set[Any]()
    lag: float | None = None
    before: Any = None
    for s in body[reduced + 1:nest]:
        if isinstance(s, (Alloc, Bind)) or calls(s, "wgmma_hold"):
            continue
        if (row := row_loop(s)) is None:
            return None
        (var, store), v = row, row[1].value
        if isinstance(v, Load) and v.buffer.data in same and is_row(v, v.buffer, var):
            same.add(store.buffer.data)
        elif isinstance(v, Call) and v.op == tanh.op and operands(v)[1:] == operands(tanh)[1:] and any(
                x.buffer.data in same and is_row(operands(v)[0], x.buffer, var) for x in walk(v, Load)):
            changed.add(store.buffer.data)
        elif isinstance(v, Select) and store.buffer.data is top.buffer.data and isinstance(v.b, Load):
            before, (e, d) = v.b.buffer, without_factors(getattr(v.cond, "a", None))
            match v.cond, e:
                case Binary("gt", _, Const() as n), Binary("sub", a, b) if d > 0 and all(
                        is_row(y, z, var) for y, z in ((v.a, top.buffer), (v.b, before), (a, top.buffer), (b, before))):
                    lag = n.value / d if top.buffer.data in changed else None
        elif store.buffer.data is not factor.data or lag is None or getattr(v, "op", "") != "exp2" or not vanishes(
                v.args[0], top.buffer, before):  # type: ignore[attr-defined]
            return None
    kept = next((i for i in range(reduced - 1, -1, -1) if lag is not None and any(
        writes(body[i], y) for y in (top.buffer, before))), None)
    copied = None if kept is None else row_loop(body[kept])
    return lag if copied is not None and copied[1].buffer.data is before.data and is_row(
        copied[1].value, top.buffer, copied[0]) else None


def _forgotten(launch: Launch, loop: For, values: set[Any]) -> bool:
    """Whether what the loop leaves in arrays is overwritten before it is read."""
    every, inside = list(effects(launch.body)), {id(e.node) for e in effects(loop)}
    end = max(i for i, e in enumerate(every) if id(e.node) in inside)
    first = {e.storage: e for e in reversed(every[end + 1:]) if e.storage in values}
    return all(e.writes for e in first.values())


def _kind(s: Stmt) -> str:
    form = form_of(s)
    return "" if form is None else form.kind


def _inner(s: Any) -> Any:
    """The statement in a nest of loops."""
    return _inner(s.body) if isinstance(s, For) else s


def _with_body(s: Any, body: Stmt) -> Any:
    """The nest of loops with another statement in it."""
    return replace(s, body=_with_body(s.body, body)) if isinstance(s, For) else body
