"""Compute tanh by a polynomial where the arguments of a whole warp are small.

    for r in unroll(64):                          largest = 0
        S[r] = scaled_tanh(S[r], k, c)            for r in unroll(64): largest = max(largest, fabs(S[r]))
                                       ->         if any_sync(largest > 0.5 / k):
                                                      for r in unroll(64): S[r] = scaled_tanh(S[r], k, c)
                                                  else:
                                                      for r in unroll(64): S[r] = S[r] * polynomial(S[r] * S[r])

A special function takes as long as eight multiply-adds, and arguments of score functions are seldom large.  The polynomial has
an error below that of scaled_tanh, and a relative one below that of tanh for rounded results.  Only loops beside wgmma in a
serial loop are changed: there all lanes of a warp are active, and arithmetic between GEMMs is what takes the time.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tilelang.ir import (LOCAL, Alloc, Bind, Binary, Buffer, Call, Const, Expr, For, Func, If, Load, Seq, Stmt, Store,
                         binary, call, cast, const, dtype, fresh, replace, rewrite, seq, stmts_of, walk)
from tilelang.target.rounded_functions import FORMS, SCALED_TANH, SMALL, SMALL_TANH

from ..analysis.statements import rename
from ..framework.pass_ import DEVICE, PassContext, pass_

F32 = dtype("float32")
FEWEST = 16  # elements of a thread for which the vote pays
TANH = {SCALED_TANH, *(form.name for form in FORMS["tanh"].values())}


@pass_(needs=DEVICE)
def small_tanh(func: Func, cx: PassContext) -> Func:
    """Divide loops of tanh beside wgmma into a branch for small arguments and one for others."""
    if not any(x.op in TANH for x in walk(func.body, Call)):
        return func
    return rewrite(func, _divided, For)


def _divided(s: For) -> Stmt | None:
    if s.kind != "serial" or not any(x.op.startswith("wgmma") for x in walk(s.body, Call)):
        return None
    out: list[Stmt] = []
    for x in stmts_of(s.body):
        out += _branches(x) if isinstance(x, For) and _applies(x) else [x]
    return replace(s, body=seq(*out)) if len(out) > len(stmts_of(s.body)) else None


def _applies(s: For) -> bool:
    """Whether a nest computes tanh of elements that it has not changed yet, for enough elements."""
    factors = {abs(_operands(x)[1]) for x in walk(s, Call) if x.op in TANH}
    if not factors or any(not isinstance(x, (For, Seq, Bind, Store)) or isinstance(x, For) and x.kind != "unroll"
                        for x in walk(s, Stmt)) or len(factors) > 1 or not 2.0**-12 < max(factors) < 2.0**12:
        return False
    stores = {x.buffer.data: x for x in walk(s, Store)}
    own = all(x.indices == stores[x.buffer.data].indices for x in walk(s, Load) if x.buffer.data in stores)
    count = math.prod(int(x.extent.value) if isinstance(x.extent, Const) else 0 for x in walk(s, For))
    return own and len(stores) == sum(1 for _ in walk(s, Store)) and count >= FEWEST


def _branches(s: For) -> list[Stmt]:
    largest, vote = Buffer("largest", (1,), F32, LOCAL), fresh("large", "int32")
    zero, factor = (const(0),), next(abs(_operands(x)[1]) for x in walk(s, Call) if x.op in TANH)

    def raised(x: Bind | Store) -> list[Stmt]:
        """`largest` after the arguments in a value, where there are some."""
        new: Expr = Load(largest, zero, F32)
        found = [_operands(y)[0] for y in walk(x.value, Call) if y.op in TANH]
        for y in found:
            new = binary("max", new, Call("fabs", (y,), F32))
        return [Store(largest, zero, new, span=x.span)] if found else []

    def measured(x: Any) -> Any:
        return seq(x, *raised(x)) if isinstance(x, Bind) else seq(*raised(x))

    def polynomial(x: Any) -> Any:
        if x.op not in TANH:
            return None
        y, k, c = _operands(x)
        u = y * y
        factors: list[Expr] = [const(c * a * k**(2 * i + 1), F32) for i, a in enumerate(SMALL_TANH)]
        return y * functools.reduce(lambda total, a: total * u + a, reversed(factors))

    tests = [rewrite(x, measured, Bind, Store) for x in rename([s])]
    above = cast(binary("gt", Load(largest, zero, F32), const(SMALL / factor, F32)), "int32")
    large = call("any_sync", (above, const(0xffffffff, "uint32")), "int32")
    return [Alloc(largest), Store(largest, zero, const(0.0, F32)), *tests, Bind(vote, large),
            If(binary("ne", vote, const(0, "int32")), s, seq(*[rewrite(x, polynomial, Call) for x in rename([s])]),
               span=s.span)]


def _operands(e: Any) -> tuple[Expr, float, float]:
    """(y, k, c) of a call that is c * tanh(k * y), for constants k and c."""
    x: Any = e.args[0]
    k = c = 1.0
    if e.op == SCALED_TANH:
        k, c = (float(a.value) for a in e.args[1:])
    elif isinstance(x, Binary) and x.op == "mul" and isinstance(x.b, Const):
        x, k = x.a, float(x.b.value)
    return x, k, c
