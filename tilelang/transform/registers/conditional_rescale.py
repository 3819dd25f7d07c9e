"""Rescales accumulators only when a row's factor is not one (lazy rescaling of attention).

    for r: factor[r] = exp2((before[r] - top[r]) * c)          …
    …                                                          moved = any_sync((before[r] - top[r]) * c != 0, of all r)
    for r: total[r] = total[r] * factor[r] + part[r]    ->     if moved:
    …                                                              for r: own[r] = exp2((before[r] - top[r]) * c)
    for r: acc[…] = acc[…] * factor[r]                             for r: total[r] = total[r] * own[r]
                                                                   for r: acc[…] = acc[…] * own[r]
                                                               …
                                                               for r: total[r] = total[r] + part[r]

exp2(0) is one and x * 1 is x, so a warp that skips the branch computes the same result (NaN != 0, so NaN takes it).  The
branch is faster only if it is seldom taken.  So the pass requires that the program updates the maximum under a condition
(top[r] = x[r] if … else before[r]).  A maximum that follows every score changes in some row of a warp in about half the
steps of 64 keys, and a branch taken that often costs as much as it saves.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import (Alloc, Bind, Binary, Buffer, Call, Const, Expr, For, If, Load, Select, Stmt, Store, Var, binary, cast,
                         const, fresh, contains, logical, replace, rewrite, seq, substitute, walk, LOCAL)
from tilelang.ir.record import record

from ..analysis.effects import effects

_WARP = 0xffffffff


@record
class Lazy:
    """branch: statements that replace the scaling.  rest: index in the loop's body -> statement that replaces it."""

    branch: tuple[Stmt, ...]
    rest: dict[int, Stmt]


def rescale_lazily(body: list[Stmt], scaled: int, place: int, factor: Buffer) -> Lazy | None:
    """The scaling body[scaled] by `factor` under a condition, to be placed right behind body[place] or inside it.

    None if the scaling is needed at every step, or the condition would often be true.
    """
    made = [i for i, s in enumerate(body) if _writes(s, factor)]
    if len(made) != 1 or made[0] > place:
        return None
    definition = _row_loop(body[made[0]])
    if definition is None or getattr(definition[1].value, "op", "") != "exp2" or factor.size > 4:
        return None
    var, store = definition
    exponent = store.value.args[0]  # type: ignore[attr-defined]
    sources = {x.buffer.data: x.buffer for x in walk(exponent, Load)}
    if any(b.scope_name != LOCAL for b in sources.values()) or contains(exponent, Call) or \
            any(_writes(s, b) for s in body[made[0] + 1:scaled] for b in sources.values()) or \
            not any(_stays(s, list(sources.values())) for s in body[:made[0]]):
        return None
    own = replace(factor, name=f"{factor.name}_moved", data=fresh(f"{factor.name}_moved", factor.data.dtype))
    totals: list[Stmt] = []
    rest: dict[int, Stmt] = {}
    for i, s in enumerate(body):
        if i in (made[0], scaled) or not any(x.buffer.data is factor.data for x in walk(s, Load)):
            continue
        split = _split(s, factor, own) if i > place else None
        if split is None or any(e.storage is split[2].data for x in body[place:i] for e in effects(x)) or i > scaled:
            return None
        totals.append(split[0])
        rest[i] = split[1]
    vote = fresh("moved", "int32")
    moved: Expr | None = None
    for r in range(factor.size):
        row = binary("ne", substitute(exponent, {var: const(r, var.dtype)}), const(0.0, exponent.dtype))
        moved = row if moved is None else logical("or", moved, row)
    made_again = _again(body[made[0]], replace(store, buffer=own))
    branch = seq(Alloc(own), made_again, *totals, _renamed(body[scaled], factor, own))
    any_row = Call("any_sync", (cast(moved, "int32"), const(_WARP, "uint32")), vote.dtype)
    return Lazy((Bind(vote, any_row), If(binary("ne", vote, const(0, "int32")), branch)), rest)


def _row_loop(s: Stmt) -> tuple[Var, Store] | None:
    """(variable, statement) of a loop `for r: x[r] = …` over all elements of a thread-local array x."""
    if not isinstance(s, For) or not isinstance(s.body, Store) or not isinstance(s.extent, Const):
        return None
    to = s.body
    whole = to.buffer.scope_name == LOCAL and len(to.indices) == 1 and to.indices[0] is s.var and to.buffer.is_static and \
        s.extent.value == to.buffer.size
    return (s.var, to) if whole else None


def _stays(s: Stmt, sources: list[Buffer]) -> bool:
    """Whether a statement assigns one of the buffers, under a condition, the value of one of them (itself included)."""
    held = {b.data for b in sources}
    return any(x.buffer.data in held and isinstance(x.value, Select) and any(
        isinstance(side, Load) and side.buffer.data in held for side in (x.value.a, x.value.b)) for x in walk(s, Store))


def _split(s: Stmt, factor: Buffer, own: Buffer) -> tuple[Stmt, Stmt, Buffer] | None:
    """(total *= own, total += part, total) from a loop `total = total * factor + part`."""
    found = _row_loop(s)
    if found is None:
        return None
    (var, store), total = found, found[1].buffer
    value = store.value
    if not isinstance(value, Binary) or value.op != "add":
        return None
    for product, part in ((value.a, value.b), (value.b, value.a)):
        if isinstance(product, Binary) and product.op == "mul" and _is_row(product.a, total, var) and \
                _is_row(product.b, factor, var) and not any(
                    x.buffer.data in (total.data, factor.data) for x in walk(part, Load)):
            return (_again(s, replace(store, value=_renamed(product, factor, own))),
                    replace(s, body=replace(store, value=binary("add", product.a, part))), total)
    return None


def _again(loop: Stmt, body: Stmt) -> Stmt:
    """The loop with a new variable around another body."""
    assert isinstance(loop, For)
    var = fresh(loop.var.name, loop.var.dtype)
    return replace(loop, var=var, body=substitute(body, {loop.var: var}))


def _is_row(e: Expr, b: Buffer, var: Var) -> bool:
    return isinstance(e, Load) and e.buffer.data is b.data and len(e.indices) == 1 and e.indices[0] is var


def _renamed(x: Any, old: Buffer, new: Buffer) -> Any:
    """The same statement or expression, with loads from `old` replaced by loads from `new`."""
    return rewrite(x, lambda y: replace(y, buffer=new) if y.buffer.data is old.data else None, Load)


def _writes(s: Stmt, b: Buffer) -> bool:
    return any(e.writes and e.storage is b.data for e in effects(s))
