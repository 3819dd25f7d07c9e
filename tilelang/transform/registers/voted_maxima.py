"""Updates maxima of rows, and what depends on them, only where a warp finds that one of them moves (online softmax).

    for r: before[r] = top[r]                                  for r: before[r] = top[r]
    for r: part[r] = max over S[r, …] and over lanes           for r: own[r] = max over S[r, …]
    for r: top[r] = part[r]                                    moved = any_sync((own[r] - before[r]) * c > LAG, of all r)
    hold(top)                                                  if moved:
    for r: top[r] = top[r] if (top[r] - before[r]) * c             the loops on the left, but the hold
                    > LAG else before[r]                   ->      for r: scale[r] = exp2((before[r] - top[r]) * c)
    for r: factor[r] = exp2((before[r] - top[r]) * c)              for r: total[r] = total[r] * scale[r]
    for r, j: S[r, j] = exp2(…)                                for r, j: S[r, j] = exp2(…)
    for r: sum[r] = sum over S[r, …]                           for r: sum[r] = sum over S[r, …]
    for r: total[r] = total[r] * factor[r] + sum[r]            for r: total[r] = total[r] + sum[r]
    wait; release                                              hold(total); wait; release
    for r, d: acc[r, d] = acc[r, d] * factor[r]                if moved: for r, d: acc[r, d] = acc[r, d] * scale[r]

The maximum of a row is that of one of its lanes, so where no lane of a warp finds that its own moves the row's, none does: each
`top` stays, each factor is exp2(0) = 1, and the results are the same bits.  What is left out are the exchange between lanes,
the factors and the multiplications, and the time for which exponentials wait for them.  The pass requires, as `early_rescale`
does, that the program updates the maximum under a condition: else some row of a warp moves in every other step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Buffer, Call, Const, Evaluate, Expr, For, If, Load, Select, Stmt,
                         Store, Var, binary, call, cast, const, contains, fresh, logical, replace, rewrite, seq, stmts_of,
                         substitute, walk, with_options, LOCAL)
from tilelang.ir.record import record
from tilelang.target.register_forms import form_of

from ..analysis.effects import effects
from ..analysis.statements import do, renamed

MOST_ROWS = 4  # of a thread


@record
class Maxima:
    """The statements of a loop's body that update maxima: their places, from the first to the last.

    chosen: the last one, which assigns `top` a new value or `before`.  reduced: the reduction over a thread's elements and
    lanes.
    """

    first: int
    reduced: int
    chosen: int
    top: Buffer
    before: Buffer


def vote_on_maxima(body: list[Stmt], scaled: int) -> list[Stmt] | None:
    """The statements of a loop in the new order; None if they do not have the shape.  scaled: the place of the statement that
    rescales the accumulator."""
    factor = factor_of(body[scaled])
    made = [i for i, s in enumerate(body) if factor is not None and writes(s, factor)]
    exponents = row_loop(body[made[0]]) if len(made) == 1 and made[0] < scaled else None
    if factor is None or exponents is None or factor.size > MOST_ROWS:
        return None
    maxima = _maxima(body[:made[0]])
    waits = next((i for i in range(scaled - 1, made[0], -1) if calls(body[i], "wgmma_wait")), scaled)
    exponent = getattr(exponents[1].value, "args", (None,))[0]
    if maxima is None or getattr(exponents[1].value, "op", "") != "exp2" or not _vanishes(
            exponent, maxima.top, maxima.before):
        return None
    updates, others = body[maxima.first:maxima.chosen + 1], [*body[:maxima.first], *body[maxima.chosen + 1:]]
    changed = {e.storage for s in updates for e in effects(s) if e.writes} - {maxima.top.data}
    if any(writes(s, b) for s in body[maxima.chosen + 1:] for b in (maxima.top, maxima.before)) or any(
            e.storage in changed for s in others for e in effects(s)):
        return None
    split = factored_out(body, made[0], scaled, factor, range(made[0] + 1, waits), maxima.first)
    found = None if split is None else _of_threads(body, maxima)
    if split is None or found is None or not split[1]:
        return None
    (own, totals, rest), (quick, lanes, rows) = split, found
    vote = fresh("moved", "int32")
    made_own = renamed(replace(body[made[0]], body=replace(exponents[1], buffer=own)))
    inside = range(maxima.first, maxima.chosen + 1)
    kept = [lanes if i == maxima.reduced else body[i] for i in inside
            if not calls(body[i], "wgmma_hold") and not isinstance(body[i], Alloc)]
    allocs = [body[i] for i in inside if isinstance(body[i], Alloc)]
    some = binary("ne", vote, const(0, "int32"))
    total = row_loop(rest[max(rest)])[1].buffer  # type: ignore[index]
    held = [do("wgmma_hold", AddressOf(total, (const(0),)), count=min(2, total.size))] if waits < scaled else []
    return [*body[:maxima.first], *allocs, *quick, Alloc(own), Bind(vote, any_lane(rows)),
            If(some, seq(*kept, made_own, *totals)), *(rest.get(i, body[i]) for i in range(maxima.chosen + 1, waits)),
            *held, *body[waits:scaled],
            If(some, renamed_buffer(body[scaled], factor, own)), *body[scaled + 1:]]


def _maxima(body: list[Stmt]) -> Maxima | None:
    """The last update of maxima in these statements."""
    for chosen in range(len(body) - 1, -1, -1):
        found = row_loop(body[chosen])
        if found is None or not isinstance(found[1].value, Select):
            continue
        var, store = found
        value: Any = store.value
        top = store.buffer
        before = value.b.buffer if isinstance(value.b, Load) and is_row(value.b, value.b.buffer, var) else top
        first, reduced = chosen, None
        for i in range(chosen - 1, -1, -1):
            if _reduces(body[i]):
                reduced = first = i
                break
            if not calls(body[i], "wgmma_hold") and row_loop(body[i]) is None:
                break
        if before is top or reduced is None or contains(value.cond, Call):
            return None
        while first and isinstance(body[first - 1], Alloc):
            first -= 1
        sources = {x.buffer.data for x in walk(value.cond, Load)}
        kept = next((i for i in range(first - 1, -1, -1) if any(writes(body[i], b) for b in (top, before))), None)
        copied = None if kept is None else row_loop(body[kept])
        if copied is None or copied[1].buffer.data is not before.data or not is_row(copied[1].value, top, copied[0]):
            return None  # `before` is not what `top` was
        return Maxima(first, reduced, chosen, top, before) if sources == {top.data, before.data} else None
    return None


def _reduces(s: Stmt) -> bool:
    """Whether a statement is a reduction of register-resident values to maxima of rows."""
    form = form_of(s) if isinstance(s, For) and s.plan.registers else None
    return form is not None and form.kind == "sums" and any(x.op == "max" for x in walk(s, Binary))


def _of_threads(body: list[Stmt], m: Maxima) -> tuple[list[Stmt], Stmt, list[Expr]] | None:
    """(statements that find what a thread's own elements would make of `top`, the reduction over lanes of what they find, for
    each row the condition that it moves)."""
    found = rows_at_once(body[m.reduced])
    if found is None:
        return None
    begun, reduced, whole = found
    lanes: Any = stmts_of(whole.body)
    names: dict[Any, Any] = {}  # buffer -> the same for a thread's own elements
    parts: list[Stmt] = []
    for s in [begun, reduced, *body[m.reduced + 1:m.chosen]]:
        if calls(s, "wgmma_hold"):
            continue
        for x in walk(s, Store):
            b = x.buffer
            if b in names:
                continue
            names[b] = replace(b, name=f"{b.name}_own", data=fresh(f"{b.name}_own", b.data.dtype))
            if any(y.buffer is b for y in walk(x.value, Load)):  # it goes on from the value that all lanes have
                row = row_loop(s)
                if row is None:
                    return None
                parts.append(renamed(replace(s, body=Store(names[b], (row[0],), Load(b, (row[0],), b.dtype)))))
        parts.append(renamed(substitute(s, names)))
    to = lanes[0].buffer
    if m.top not in names or to not in names:
        return None
    start = Store(to, (whole.var,), Load(names[to], (whole.var,), to.dtype))
    over_lanes = renamed(replace(whole, body=seq(start, *lanes)))
    chosen: Any = body[m.chosen]  # a loop over rows
    rows = [substitute(chosen.body.value.cond, {chosen.var: const(r, chosen.var.dtype), **names}) for r in range(m.top.size)]
    return [*map(Alloc, names.values()), *parts], over_lanes, rows


def rows_at_once(s: Stmt) -> tuple[For, For, For] | None:
    """(loops over rows: their first values, their reductions over a thread's elements, those over lanes) of a reduction whose
    loop over rows has all three; None for other statements."""
    steps: list[Any] = list(stmts_of(s.body)) if isinstance(s, For) else []
    inner = next((i for i, x in enumerate(steps) if isinstance(x, For)), len(steps))
    lanes = steps[inner + 1:]
    if not isinstance(s, For) or not lanes or any(not isinstance(x, Store) or not any(
            c.op == "shfl_xor" for c in walk(x, Call)) for x in lanes):
        return None
    reduced = with_options(replace(s, body=steps[inner]), any_order=steps[inner].plan.any_order)
    begun, over_lanes = (renamed(with_options(replace(s, body=seq(*x)), registers=None)) for x in (steps[:inner], lanes))
    return begun, reduced, over_lanes  # type: ignore[return-value]


def _vanishes(e: Any, top: Buffer, before: Buffer) -> bool:
    """Whether an expression is 0 where `top` is `before`: a difference of both, times anything."""
    if isinstance(e, Binary) and e.op == "mul":
        return _vanishes(e.a, top, before) or _vanishes(e.b, top, before)
    return isinstance(e, Binary) and e.op == "sub" and isinstance(e.a, Load) and isinstance(e.b, Load) and {
        e.a.buffer.data, e.b.buffer.data} == {top.data, before.data} and bool(e.a.indices == e.b.indices)


def calls(s: Stmt, name: str) -> bool:
    """Whether a statement is a call of this name."""
    return isinstance(s, Evaluate) and s.call.op == name


def factor_of(scale: Stmt) -> Buffer | None:
    """The array of factors that the accumulator is multiplied by."""
    own = form_of(scale).buffer  # type: ignore[union-attr]
    found = {x.buffer.data: x.buffer for x in walk(scale, Load) if x.buffer.data is not own.data}
    return next(iter(found.values())) if len(found) == 1 else None


def row_loop(s: Stmt) -> tuple[Var, Store] | None:
    """(variable, statement) of a loop `for r: x[r] = …` over all elements of a thread-local array x."""
    if not isinstance(s, For) or not isinstance(s.body, Store) or not isinstance(s.extent, Const):
        return None
    to = s.body
    whole = to.buffer.scope_name == LOCAL and len(to.indices) == 1 and to.indices[0] is s.var and to.buffer.is_static and \
        s.extent.value == to.buffer.size
    return (s.var, to) if whole else None


def factored_out(body: list[Stmt], made: int, scaled: int, factor: Buffer, inside: range,
                 begin: int) -> tuple[Buffer, list[Stmt], dict[int, Stmt]] | None:
    """(own factors of a branch, accumulators times these, place of one -> what adds to it) for a loop where the statements
    `inside` alone use `factor`, but for those that make it and scale by it, and none from `begin` on uses these before."""
    own = replace(factor, name=f"{factor.name}_moved", data=fresh(f"{factor.name}_moved", factor.data.dtype))
    totals, rest = list[Stmt](), dict[int, Stmt]()
    for i, s in enumerate(body):
        if i in (made, scaled) or not any(x.buffer.data is factor.data for x in walk(s, Load)):
            continue
        split = _split_total(s, factor, own) if i in inside else None
        if split is None or any(e.storage is split[2].data for x in body[begin:i] for e in effects(x)):
            return None
        totals.append(split[0])
        rest[i] = split[1]
    return own, totals, rest


def any_lane(conditions: Sequence[Expr]) -> Expr:
    """Whether one of the conditions holds in some lane."""
    some = functools.reduce(lambda x, y: logical("or", x, y), conditions)
    return call("any_sync", (cast(some, "int32"), const(0xffffffff, "uint32")), "int32")


def _split_total(s: Stmt, factor: Buffer, own: Buffer) -> tuple[Stmt, Stmt, Buffer] | None:
    """(total *= own, total += part, total) from a loop `total = total * factor + part`."""
    found = row_loop(s)
    if found is None:
        return None
    (var, store), total = found, found[1].buffer
    value = store.value
    if not isinstance(value, Binary) or value.op != "add":
        return None
    for product, part in ((value.a, value.b), (value.b, value.a)):
        if isinstance(product, Binary) and product.op == "mul" and is_row(product.a, total, var) and \
                is_row(product.b, factor, var) and not any(
                    x.buffer.data in (total.data, factor.data) for x in walk(part, Load)):
            return (renamed(replace(s, body=replace(store, value=renamed_buffer(product, factor, own)))),
                    replace(s, body=replace(store, value=binary("add", product.a, part))), total)
    return None


def is_row(e: Expr, b: Buffer, var: Var) -> bool:
    """Whether an expression loads the element of a buffer that has a variable as its index."""
    return isinstance(e, Load) and e.buffer.data is b.data and len(e.indices) == 1 and e.indices[0] is var


def renamed_buffer(x: Any, old: Buffer, new: Buffer) -> Any:
    """The same statement or expression, with loads from `old` replaced by loads from `new`."""
    return rewrite(x, lambda y: replace(y, buffer=new) if y.buffer.data is old.data else None, Load)


def writes(s: Stmt, b: Buffer) -> bool:
    """Whether a statement writes to a buffer."""
    return any(e.writes and e.storage is b.data for e in effects(s))
