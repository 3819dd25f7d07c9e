"""Moves the rescaling of the attention accumulator into the exponentials of the softmax, instead of after them.

    hold(top); …                               …
    for r: for j: S[r, j] = exp2(…)            for j: S[0, j] = exp2(…)                       (rows of the first half)
    row sums of S                              hold(top); wait; release; acc[…] *= factor[…]
    wait(0); release                     ->    for j in the first half: S[1, j] = exp2(…)
    acc[…] *= factor[…]                        hold(factor)
    P = S                                      for j in the second half: S[1, j] = exp2(…)
                                               row sums of S;  P = S

A warp computes an exponential in eight cycles, and needs fewer issue slots for the two or three other instructions of a
score.  Nothing in the loop depends on the multiplications of the accumulator, yet the assembler places them behind the last
exponential: 64 cycles in which the tensor cores wait for the scores.  The assembler moves nothing across a branch that
depends on a computed value (tl::wgmma_hold).  So the multiplications are placed between two such branches, where they
overlap with exponentials.  The GEMM that adds to this accumulator has the first half of the exponentials to complete.
"""

from __future__ import annotations

from copy import copy

from tilelang.ir import (Buffer, Call, Const, Evaluate, For, If, Launch, Load, Stmt, Store, Var, const, fresh, free_vars,
                         contains, replace, seq, stmts_of, substitute, walk, rewrite_stmts)
from tilelang.ir.buffer import AddressOf
from tilelang.target.register_forms import form_of

from ..analysis.effects import effects
from .conditional_rescale import rescale_lazily
from ..analysis.statements import do

LEAST_SKIPPED = 64  # multiplications of a thread for which a vote of its warp pays: with 32 it cost 6 to 8 % of attention


def rescale_early(launch: Launch) -> Launch:
    """The launch with all loops of this shape in the new order.  Its values are in named registers (attr `own_values`)."""
    def visit(x: Stmt) -> Stmt | None:
        found = _reordered(list(stmts_of(x.body))) if isinstance(x, For) else None
        return None if found is None else replace(x, body=seq(*found))

    return rewrite_stmts(launch, visit)  # type: ignore[no-any-return]


def _reordered(body: list[Stmt]) -> list[Stmt] | None:
    """The statements of a loop in the new order; None if they do not have the shape."""
    held = next((i for i, s in enumerate(body) if _calls(s, "wgmma_hold")), None)
    if held is None:
        return None
    mapped = next((i for i in range(held + 1, len(body)) if _kind(body[i]) == "map"), None)
    scaled = None if mapped is None else next((i for i in range(mapped + 1, len(body)) if _kind(body[i]) == "scale"), None)
    if mapped is None or scaled is None:
        return None
    waits = next((i for i in range(scaled - 1, mapped, -1) if _calls(body[i], "wgmma_wait")), None)
    if waits is None or body[waits].call.options.n != 0 or not all(map(_releases, body[waits + 1:scaled])):  # type: ignore[attr-defined]
        return None
    moved, between = body[waits:scaled + 1], body[mapped + 1:waits]
    factor = _factor(body[scaled])
    parts = _pieces(body[mapped])
    if factor is None or parts is None or not _independent(moved, [body[mapped], *between]):
        return None
    if any(isinstance(c, Call) and c.op in ("wgmma", "wgmma_commit") for s in between for c in walk(s)):
        return None  # the wait is for these GEMMs too
    first, second, third = parts
    many = form_of(body[scaled]).buffer.size >= LEAST_SKIPPED  # type: ignore[union-attr]
    lazy = rescale_lazily(body, scaled, mapped, factor) if many else None
    if lazy is None:
        after = do("wgmma_hold", AddressOf(factor, (const(0),)), count=min(2, factor.size))
    else:
        after, moved = copy(body[held]), [*moved[:-1], *lazy.branch]
        between = [lazy.rest.get(i, body[i]) for i in range(mapped + 1, waits)]
    return [*body[:held], *body[held + 1:mapped], first, body[held], *moved, second, after, third, *between, *body[scaled + 1:]]


def _kind(s: Stmt) -> str:
    """The form of a loop over named registers (`form_of`); "" for other statements."""
    form = form_of(s) if isinstance(s, For) and s.plan.registers else None
    return "" if form is None else form.kind


def _calls(s: Stmt, name: str) -> bool:
    return isinstance(s, Evaluate) and s.call.op == name


def _releases(s: Stmt) -> bool:
    """Whether a statement only releases a stage: it touches no register that holds data."""
    return isinstance(s, (If, Evaluate)) and all(
        x.op in ("sync_warp", "mbarrier_arrive", "mbarrier_arrive_cluster") for x in walk(s, Call) if x.dtype == "void"
        ) and not contains(s, Store)


def _factor(scale: Stmt) -> Buffer | None:
    """The array of factors that the accumulator is multiplied by."""
    own = form_of(scale).buffer  # type: ignore[union-attr]
    found = {x.buffer.data: x.buffer for x in walk(scale, Load) if x.buffer.data is not own.data}
    return next(iter(found.values())) if len(found) == 1 else None


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
