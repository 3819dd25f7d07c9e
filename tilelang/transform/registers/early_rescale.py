"""Moves the rescaling of the attention accumulator into the exponentials of the softmax, instead of after them.

    hold(top); …                               …
    for r: for j: S[r, j] = exp2(…)            for j: S[0, j] = exp2(…)                       (rows of the first half)
    row sums of S                              hold(top); wait; release; acc[…] *= factor[…]
    wait(0); release                     ->    for j in the first half: S[1, j] = exp2(…)
    acc[…] *= factor[…]                        hold(factor)
    P = S                                      for j in the second half: S[1, j] = exp2(…)
                                               row sums of S;  P = S

A warp computes an exponential in eight cycles, and needs fewer issue slots for the two or three other instructions of a
score.  Nothing in the loop depends on the multiplications of the accumulator, yet the assembler places them after the last
exponential: 64 cycles in which the tensor cores wait for the scores.  The assembler moves nothing across a branch that
depends on a computed value (tl::wgmma_hold).  So the multiplications are placed between two such branches, where they
overlap with exponentials.  The GEMM that adds to this accumulator has the first half of the exponentials to complete.
"""

from __future__ import annotations

from copy import copy

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, For, If, Launch, Load, Select, Stmt,
                         Store, Var, binary, const, contains, free_vars, fresh, replace, rewrite_stmts, seq,
                         stmts_of, substitute, walk, LOCAL)
from tilelang.ir.record import record
from tilelang.target.register_forms import form_of

from ..analysis.effects import effects
from ..analysis.statements import do, renamed
from .voted_maxima import any_lane, calls, factor_of, renamed_buffer, row_loop, factored_out, vote_on_maxima, writes

# Registers of accumulators from which on a vote is about their multiplications alone.  With 32, that cost 6 to 8 % of
# attention, and a vote about maxima takes 4 % off; with 64, this one costs 3 %.
LEAST_SKIPPED = 64


def rescale_early(launch: Launch) -> Launch:
    """The launch with all loops of this shape in the new order.  Its values are in named registers (attr `own_values`)."""
    def visit(x: Stmt) -> Stmt | None:
        body = list(stmts_of(x.body)) if isinstance(x, For) else []
        scaled = next((i for i, s in enumerate(body) if _kind(s) == "scale"), None)
        if scaled is None:
            return None
        few = form_of(body[scaled]).buffer.size < LEAST_SKIPPED  # type: ignore[union-attr]
        found = few and vote_on_maxima(body, scaled) or _reordered(body) or _conditional(body)
        return None if found is None else replace(x, body=seq(*found))

    return rewrite_stmts(launch, visit)  # type: ignore[no-any-return]


def _reordered(body: list[Stmt]) -> list[Stmt] | None:
    """The statements of a loop in the new order; None if they do not have the shape."""
    held = next((i for i, s in enumerate(body) if calls(s, "wgmma_hold")), None)
    if held is None:
        return None
    mapped = next((i for i in range(held + 1, len(body)) if _kind(body[i]) == "map"), None)
    scaled = None if mapped is None else next((i for i in range(mapped + 1, len(body)) if _kind(body[i]) == "scale"), None)
    if mapped is None or scaled is None:
        return None
    waits = next((i for i in range(scaled - 1, mapped, -1) if calls(body[i], "wgmma_wait")), None)
    if waits is None or not all(map(_releases, body[waits + 1:scaled])):
        return None
    moved, between = body[waits:scaled + 1], body[mapped + 1:waits]
    factor = factor_of(body[scaled])
    parts = _pieces(body[mapped])
    if factor is None or parts is None or not _independent(moved, [body[mapped], *between]):
        return None
    if any(isinstance(c, Call) and c.op in ("wgmma", "wgmma_commit") for s in between for c in walk(s)):
        return None  # the wait is for these GEMMs too
    first, second, third = parts
    many = form_of(body[scaled]).buffer.size >= LEAST_SKIPPED  # type: ignore[union-attr]
    lazy = rescale_lazily(body, scaled, mapped, factor) if many else None
    if lazy is None:
        after: Stmt = do("wgmma_hold", AddressOf(factor, (const(0),)), count=min(2, factor.size))
    else:
        after, moved = copy(body[held]), [*moved[:-1], *lazy.branch]
        between = [lazy.rest.get(i, body[i]) for i in range(mapped + 1, waits)]
    return [*body[:held], *body[held + 1:mapped], first, body[held], *moved, second, after, third, *between, *body[scaled + 1:]]


def _conditional(body: list[Stmt]) -> list[Stmt] | None:
    """The statements of a loop whose exponentials lie in branches, with the rescaling under a condition where it stood."""
    scaled = next((i for i, s in enumerate(body) if _kind(s) == "scale"), len(body))
    waits = next((i for i in range(scaled - 1, -1, -1) if calls(body[i], "wgmma_wait")), scaled)
    factor = factor_of(body[scaled]) if waits < scaled < len(body) and all(map(_releases, body[waits + 1:scaled])) else None
    made = next((i for i, s in enumerate(body) if factor is not None and writes(s, factor)), None)
    if factor is None or made is None or form_of(body[scaled]).buffer.size < LEAST_SKIPPED:  # type: ignore[union-attr]
        return None
    lazy = rescale_lazily(body, scaled, made, factor)
    if lazy is None or max(lazy.rest, default=0) > waits:
        return None
    before = [s for i, s in enumerate(body[:waits]) if i not in lazy.rest]
    return [*before, *body[waits:scaled], *lazy.branch, *lazy.rest.values(), *body[scaled + 1:]]


def _kind(s: Stmt) -> str:
    """The form of a loop over named registers (`form_of`); "" for other statements."""
    form = form_of(s) if isinstance(s, For) and s.plan.registers else None
    return "" if form is None else form.kind


def _releases(s: Stmt) -> bool:
    """Whether a statement only releases a stage: it touches no register that holds data."""
    return isinstance(s, (If, Evaluate)) and all(
        x.op in ("sync_warp", "mbarrier_arrive", "mbarrier_arrive_cluster") for x in walk(s, Call) if x.dtype == "void"
        ) and not contains(s, Store)


def _independent(moved: list[Stmt], passed: list[Stmt]) -> bool:
    """Whether neither group of statements writes what the other touches."""
    mine, theirs = [[e for s in group for e in effects(s)] for group in (moved, passed)]
    return not any(a.storage is b.storage and (a.writes or b.writes) for a in mine for b in theirs)


def _pieces(s: Stmt) -> tuple[Stmt, Stmt, Stmt] | None:
    """A map in three pieces: the first half of its rows, then the other rows in two halves of the columns.

    The row variable is the one that its other operands are indexed by.
    """
    loops: list[For] = []
    inner: Stmt = s
    while isinstance(inner, For):
        loops.append(inner)
        inner = inner.body
    if not isinstance(inner, Store) or not all(isinstance(x.extent, Const) for x in loops):
        return None
    others = {v for x in walk(inner.value, Load) if x.buffer.data is not inner.buffer.data
              for v in free_vars(x)}
    sizes = {x.var: int(x.extent.value) for x in loops}  # type: ignore[attr-defined]
    rows = [v for v, n in sizes.items() if v in others and n > 1]
    columns = sorted((v for v, n in sizes.items() if v not in others and n > 1), key=lambda v: -sizes[v])
    if len(rows) != 1 or not columns:
        return None
    row, column = rows[0], columns[0]
    half, middle = sizes[row] // 2, sizes[column] // 2
    rest = (half, sizes[row])
    return (_restricted(loops, inner, {row: (0, half)}), _restricted(loops, inner, {row: rest, column: (0, middle)}),
            _restricted(loops, inner, {row: rest, column: (middle, sizes[column])}))


def _restricted(loops: list[For], body: Stmt, ranges: dict[Var, tuple[int, int]]) -> Stmt:
    """The loop nest with new variables, restricted to the given ranges of some of them."""
    own = {x.var: fresh(x.var.name, x.var.dtype) for x in loops}
    starts = {v: ranges[v][0] for v in ranges}
    out: Stmt = substitute(body, {v: x + const(starts[v], v.dtype) if starts.get(v) else x for v, x in own.items()})
    for x in reversed(loops):
        start, end = ranges.get(x.var, (0, int(x.extent.value)))  # type: ignore[attr-defined]
        out = replace(x, var=own[x.var], extent=const(end - start, x.var.dtype), body=out)
    return out


# ---- conditional rescale ----------------------------------------------------------------------------------------------------
# Rescales accumulators only when a row's factor is not one (lazy rescaling of attention).
#
#     for r: factor[r] = exp2((before[r] - top[r]) * c)          …
#     …                                                          moved = any_sync((before[r] - top[r]) * c != 0, of all r)
#     for r: total[r] = total[r] * factor[r] + part[r]    ->     if moved:
#     …                                                              for r: own[r] = exp2((before[r] - top[r]) * c)
#     for r: acc[…] = acc[…] * factor[r]                             for r: total[r] = total[r] * own[r]
#                                                                    for r: acc[…] = acc[…] * own[r]
#                                                                …
#                                                                for r: total[r] = total[r] + part[r]
#
# exp2(0) is one and x * 1 is x, so a warp that skips the branch computes the same result (NaN != 0, so NaN takes it).  The
# branch is faster only if it is seldom taken.  So the pass requires that the program updates the maximum under a condition
# (top[r] = x[r] if … else before[r]).  A maximum that follows every score changes in some row of a warp in about half the
# steps of 64 keys, and a branch taken that often costs as much as it saves.


@record
class Lazy:
    """branch: statements that replace the scaling.  rest: index in the loop's body -> statement that replaces it."""

    branch: tuple[Stmt, ...]
    rest: dict[int, Stmt]


def rescale_lazily(body: list[Stmt], scaled: int, place: int, factor: Buffer) -> Lazy | None:
    """The scaling body[scaled] by `factor` under a condition, to be placed right behind body[place] or inside it.

    None if the scaling is needed at every step, or the condition would often be true.
    """
    made = [i for i, s in enumerate(body) if writes(s, factor)]
    if len(made) != 1 or made[0] > place:
        return None
    definition = row_loop(body[made[0]])
    if definition is None or getattr(definition[1].value, "op", "") != "exp2" or factor.size > 4:
        return None
    var, store = definition
    exponent = store.value.args[0]  # type: ignore[attr-defined]
    sources = {x.buffer.data: x.buffer for x in walk(exponent, Load)}
    if any(b.scope_name != LOCAL for b in sources.values()) or contains(exponent, Call) or \
            any(writes(s, b) for s in body[made[0] + 1:scaled] for b in sources.values()) or \
            not any(_stays(s, list(sources.values())) for s in body[:made[0]]):
        return None
    split = factored_out(body, made[0], scaled, factor, range(place + 1, scaled), place)
    if split is None:
        return None
    (own, totals, rest), vote = split, fresh("moved", "int32")
    rows = [binary("ne", substitute(exponent, {var: const(r, var.dtype)}), const(0.0, exponent.dtype))
            for r in range(factor.size)]
    made_again = renamed(replace(body[made[0]], body=replace(store, buffer=own)))
    branch = seq(Alloc(own), made_again, *totals, renamed_buffer(body[scaled], factor, own))
    return Lazy((Bind(vote, any_lane(rows)), If(binary("ne", vote, const(0, "int32")), branch)), rest)


def _stays(s: Stmt, sources: list[Buffer]) -> bool:
    """Whether a statement assigns one of the buffers, under a condition, the value of one of them (itself included)."""
    held = {b.data for b in sources}
    return any(x.buffer.data in held and isinstance(x.value, Select) and any(
        isinstance(side, Load) and side.buffer.data in held for side in (x.value.a, x.value.b)) for x in walk(s, Store))
