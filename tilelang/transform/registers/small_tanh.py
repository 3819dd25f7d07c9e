"""Compute tanh by a polynomial where the arguments of a whole warp are small.

    for r, j: most[r] = max(most[r], S[r, j])             for r, j: most[r] = max(most[r], S[r, j])
    over lanes                                            over lanes
    …                                                     doubt = any_sync(not 0 < most[r] <= limit / k, of all r)
    for r, j: S[r, j] = exp2(scaled_tanh(S[r, j], k, c)   …
                             - top[r])             ->     if doubt:
                                                              for r, j: least = max(least, max(-S[r, j], 0))
                                                              if any_sync(one of most, least > limit / k):
                                                                  the loop on the left
                                                              else:
                                                                  the same, with a polynomial in place of scaled_tanh
                                                          else:
                                                              the loop with a polynomial

A special function takes as long as eight multiply-adds, and arguments of score functions are seldom large.  The polynomial has
an error below that of scaled_tanh, and a relative one below that of tanh for rounded results.  Only loops beside wgmma in a
serial loop are changed: there all lanes of a warp are active, and arithmetic between GEMMs is what takes the time.

Where maxima of all elements are known, only the least element is sought, and only in doubt where tanh has a large weight in an
exponent, and nothing else is computed of it (`_anchored`).  Else the vote is about the largest absolute value.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tilelang.ir import (LOCAL, Alloc, Bind, Binary, Buffer, Call, Const, Expr, For, Func, If, Load, Seq, Stmt, Store, binary,
                         const, dtype, fresh, logical, replace, rewrite, seq, stmts_of, unary, walk)
from tilelang.target.register_forms import EX2, constant, form_of, sum_form
from tilelang.target.rounded_functions import FORMS, LEAST_ANCHORED, SCALED_TANH, SMALL_TANH

from ..analysis.effects import effects
from ..analysis.statements import rename, renamed
from ..framework.pass_ import DEVICE, PassContext, pass_
from .voted_maxima import any_lane, calls, rows_at_once

F32 = dtype("float32")
FEWEST = 16  # elements of a thread for which the vote pays
TANH = {SCALED_TANH, *(form.name for form in FORMS["tanh"].values())}
ZERO = (const(0),)


@pass_(needs=DEVICE)
def small_tanh(func: Func, cx: PassContext) -> Func:
    """Divide loops of tanh beside wgmma into a branch for small arguments and one for others."""
    if not any(x.op in TANH for x in walk(func.body, Call)):
        return func
    return rewrite(func, _divided, For)


def _divided(s: For) -> Stmt | None:
    if s.kind != "serial" or not any(x.op.startswith("wgmma") for x in walk(s.body, Call)):
        return None
    old = stmts_of(s.body)
    out: list[Stmt] = []
    for x in old:
        if isinstance(x, For) and (limit := _limit(x)):
            out = _with_maxima(out, x, limit) or [*out, *_branches(x, limit)]
        else:
            out.append(x)
    return None if all(x is y for x, y in zip(old, out)) else replace(s, body=seq(*out))


def _limit(s: For) -> float:
    """The largest argument, without its factor, for which the polynomials of a nest hold; 0 if the nest stays as it is.

    It computes tanh of elements that it has not changed yet, for enough elements, with one factor of the arguments.
    """
    calls = [x for x in walk(s, Call) if x.op in TANH]
    factors = {abs(_operands(x)[1]) for x in calls}
    if any(not isinstance(x, (For, Seq, Bind, Store)) or isinstance(x, For) and x.kind != "unroll"
           for x in walk(s, Stmt)) or len(factors) != 1 or not 2.0**-12 < max(factors) < 2.0**12:
        return 0.0
    stores = {x.buffer.data: x for x in walk(s, Store)}
    own = all(x.indices == stores[x.buffer.data].indices for x in walk(s, Load) if x.buffer.data in stores)
    count = math.prod(int(x.extent.value) if isinstance(x.extent, Const) else 0 for x in walk(s, For))
    fits = own and len(stores) == sum(1 for _ in walk(s, Store)) and count >= FEWEST
    return min(_small(x)[0] for x in calls) / max(factors) if fits else 0.0


def _branches(s: For, limit: float) -> list[Stmt]:
    """The nest in two branches, behind a vote about the absolute values of its arguments."""
    largest = Buffer("largest", (1,), F32, LOCAL)

    def raised(x: Bind | Store) -> list[Stmt]:
        """`largest` after the arguments in a value, where there are some."""
        new: Expr = Load(largest, ZERO, F32)
        found = [_operands(y)[0] for y in walk(x.value, Call) if y.op in TANH]
        for y in found:
            new = binary("max", new, Call("fabs", (y,), F32))
        return [Store(largest, ZERO, new, span=x.span)] if found else []

    def measured(x: Any) -> Any:
        return seq(x, *raised(x)) if isinstance(x, Bind) else seq(*raised(x))

    tests = [rewrite(x, measured, Bind, Store) for x in rename([s])]
    return [Alloc(largest), Store(largest, ZERO, const(0.0, F32)), *tests,
            *_either(s, any_lane([binary("gt", Load(largest, ZERO, F32), const(limit, F32))]))]


def _with_maxima(before: list[Stmt], s: For, limit: float) -> list[Stmt] | None:
    """All statements up to the nest, with it in branches; None where no reduction before it finds maxima of its arguments."""
    tanhs = [y for y in walk(s, Call) if y.op in TANH]
    x = _operands(tanhs[0])[0]
    at = next((i for i in range(len(before) - 1, -1, -1) if isinstance(x, Load) and any(
        e.storage is x.buffer.data for e in effects(before[i]))), None)
    rows = None if at is None or len(tanhs) > 1 else rows_at_once(before[at])
    form: Any = sum_form(rows[1]) if rows else None
    if rows is None or at is None or form is None or form.buffer.data is not x.buffer.data or form.value.op != "max" or \
            len({k for _, k in form.points}) < x.buffer.size:
        return None
    maxima, least = form.value.a.buffer, Buffer("least", (1,), F32, LOCAL)
    if any(e.writes and e.storage is maxima.data for y in before[at + 1:] for e in effects(y)):
        return None
    lowest, highest = Load(least, ZERO, F32), [Load(maxima, (const(r),), F32) for r in range(maxima.size)]
    sought = renamed(rewrite(rows[1], lambda y: replace(y, buffer=least, indices=ZERO, value=binary(
        "max", lowest, binary("max", unary("neg", y.value.b), const(0.0, F32)))), Store))
    between = [y for y in before[at + 1:] if not calls(y, "wgmma_hold")]  # the branches hold what is behind them, too
    small: list[Any] = [binary("le", y, const(limit, F32)) for y in highest]  # NaN is not
    large = any_lane([unary("not", y) for y in (*small, binary("le", lowest, const(limit, F32)))])
    start = [*before[:at], Alloc(least), Store(least, ZERO, const(0.0, F32))]
    if not _anchored(s, tanhs[0], form):
        return [*start, *rows, sought, *between, *_either(s, large)]
    doubtful = any_lane([unary("not", logical("and", y, binary("gt", y.a, const(0.0, F32)))) for y in small])
    doubt, either = fresh("doubt", "int32"), _either(s, large)
    return [*start, *rows, Bind(doubt, doubtful), *between,
            If(binary("ne", doubt, const(0, "int32")), seq(sought, *either), renamed(either[-1].orelse), span=s.span)]


def _anchored(s: For, tanh: Call, maxima: Any) -> bool:
    """Whether a nest only computes exp2(c tanh(k x) - t), with a weight c that is large enough and t of the row of x.

    maxima: the form of the reduction that found maxima of rows.  Where that of a row is not negative, results of elements below
    the polynomial's range are off by less than 2^-26 of the row's largest one: they are below 2^-12 of it, and the polynomial,
    which rises everywhere, is below tanh there."""
    nest = s
    while isinstance(nest, For):
        nest = nest.body  # type: ignore[assignment]
    e: Any = nest.value.args[0] if isinstance(nest, Store) and getattr(nest.value, "op", "") in EX2 else None
    x, k, c = _operands(tanh)
    t = e.b if isinstance(e, Binary) and e.op == "sub" and e.a is tanh else None
    if not isinstance(t, Load) or len(t.indices) != 1 or k < 0 or c < LEAST_ANCHORED:
        return False
    row = {place: r for r, place in maxima.points}
    form = form_of(rewrite(s, lambda y: x if y is tanh else None, Call))
    mapped = form is not None and form.kind == "map"
    return mapped and all(constant(t.indices[0], at) == row[place] for place, at in form.points)  # type: ignore[union-attr]


def _either(s: For, large: Expr) -> list[Any]:
    """The nest in two branches: as it is where `large` is not 0, else with polynomials."""
    def polynomial(x: Any) -> Any:
        if x.op not in TANH:
            return None
        y, k, c = _operands(x)
        factors: list[Expr] = [const(c * a * k**(2 * i + 1), F32) for i, a in enumerate(_small(x)[1])]
        return y * functools.reduce(lambda total, a: total * (y * y) + a, reversed(factors))

    vote = fresh("large", "int32")
    small = rewrite(renamed(s), polynomial, Call)
    return [Bind(vote, large), If(binary("ne", vote, const(0, "int32")), s, small, span=s.span)]


def _small(e: Call) -> tuple[float, tuple[float, ...]]:
    """The polynomial for a call: with a term less where tanh has a large weight in an exponent."""
    return SMALL_TANH[e.op == SCALED_TANH and abs(_operands(e)[2]) >= LEAST_ANCHORED]


def _operands(e: Any) -> tuple[Any, float, float]:
    """(y, k, c) of a call that is c * tanh(k * y), for constants k and c."""
    x: Any = e.args[0]
    k = c = 1.0
    if e.op == SCALED_TANH:
        k, c = (float(a.value) for a in e.args[1:])
    elif isinstance(x, Binary) and x.op == "mul" and isinstance(x.b, Const):
        x, k = x.a, float(x.b.value)
    return x, k, c
