"""Starts the steps of a GEMM when their columns of an operand in registers are there, not behind the loop that computes it.

    for r: A[4 r : 4 r + 4] = …                for r in the first half: A[…] = …
    pin(C); pin(A); fence                      pin(C); pin(A[0:8]); fence
    wgmma(C, A[0:8], …)                  ->    wgmma(C, A[0:8], …)
    wgmma(C, A[8:16], …); commit               for r in the second half: A[…] = …
                                               pin(A[8:16]); fence
                                               wgmma(C, A[8:16], …); commit

So the tensor cores are busy with the first columns while threads compute the others, and the last step is complete sooner.
This is for loops over arrays: values in named registers pass through arrays around a loop without a form.  A loop that only
converts values stays whole: the rounding of float32 to tf32 is so short that the fences made GEMMs 1 to 3 % slower.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tilelang.ir import (AddressOf, Binary, Buffer, Call, Const, Evaluate, Expr, For, Func, Launch, Load, Ramp, Stmt, Store,
                         While, const, fresh, replace, rewrite_launches, rewrite_stmts, seq, stmts_of, substitute, walk, LOCAL)
from tilelang.target.register_forms import constant

from ..analysis.effects import effects
from ..analysis.statements import do, renamed
from ..framework.pass_ import DEVICE, PassContext, pass_


@pass_(needs=DEVICE)
def operand_pieces(func: Func, cx: PassContext) -> Func:
    """Divide loops that compute an operand in registers between the steps of the GEMM behind them."""
    return replace(func, body=rewrite_launches(func.body, _divided))  # type: ignore[no-any-return]


def _divided(launch: Launch) -> Launch:
    def visit(x: Stmt) -> Stmt | None:
        if not isinstance(x, (For, While)) or not any(c.op == "wgmma" for c in walk(x.body, Call)):
            return None
        body, out, n = list(stmts_of(x.body)), list[Stmt](), 0
        while n < len(body):
            found = _pieces(body, n)
            out, n = ([*out, *found[0]], found[1]) if found else ([*out, body[n]], n + 1)
        return replace(x, body=seq(*out)) if len(out) != len(body) else None

    return rewrite_stmts(launch, visit)  # type: ignore[no-any-return]


def _pieces(body: list[Stmt], n: int) -> tuple[list[Stmt], int] | None:
    """(what replaces the loop at place n and the GEMM behind it, the place behind them); None where they have another shape."""
    fill: Any = body[n]
    if not isinstance(fill, For) or fill.kind != "unroll" or fill.plan.registers or not isinstance(fill.extent, Const):
        return None
    m = n + 1
    while m < len(body) and _op(body[m]) == "wgmma_pin":
        m += 1
    end = m + 1
    while end < len(body) and _op(body[end]) == "wgmma":
        end += 1
    steps: list[Any] = [s.call for s in body[m + 1:end]]  # type: ignore[attr-defined]
    if any(s.call.options.move for s in body[n + 1:m]):  # type: ignore[attr-defined]
        return None  # the steps read named registers, which the whole array is moved into
    if len(steps) < 2 or m == n + 1 or _op(body[m]) != "wgmma_fence" or any(
            not isinstance(c.args[1], AddressOf) or c.args[1].buffer.scope_name != LOCAL for c in steps):
        return None
    a: Buffer = steps[0].args[1].buffer
    firsts = [c.args[1].indices[0].value for c in steps if c.args[1].buffer is a and isinstance(c.args[1].indices[0], Const)]
    sums = {c.args[0].buffer.data for c in steps}
    if len(firsts) < len(steps) or firsts != sorted(firsts) or any(
            e.storage in sums or e.writes and e.storage is not a.data and e.buffer.scope_name != LOCAL for e in effects(fill)):
        return None
    ends = {x: y for x, y in zip(dict.fromkeys(firsts), [*list(dict.fromkeys(firsts))[1:], a.size])}
    written = _written(fill, a)
    if written is None or not any(isinstance(x, Binary) for x in _values(fill, a)):
        return None
    done, bounds = 0, []  # iterations in front of each step
    for first in firsts:
        done = max([done, *(written.get(k, fill.extent.value) + 1 for k in range(first, ends[first]))])
        bounds.append(done)
    if bounds[-1] > fill.extent.value or bounds[0] == bounds[-1] or bounds[-1] != fill.extent.value:
        return None
    pins = [s for s in body[n + 1:m] if s.call.args[0].buffer.data is not a.data]  # type: ignore[attr-defined]
    out, begun, kept = list[Stmt](), 0, list(pins)
    for bound, group in itertools.groupby(zip(bounds, firsts, steps), key=lambda x: x[0]):
        calls = list(group)
        start, stop = calls[0][1], ends[calls[-1][1]]
        pin = do("wgmma_pin", AddressOf(a, (const(start),)), count=stop - start)
        out += [_restricted(fill, begun, bound), *kept, pin, do("wgmma_fence"), *(Evaluate(c) for _, _, c in calls)]
        begun, kept = bound, []
    return out, end


def _op(s: Stmt) -> str:
    return s.call.op if isinstance(s, Evaluate) and isinstance(s.call, Call) else ""


def _values(fill: Any, a: Buffer) -> Iterator[Expr]:
    """The expressions in what a loop stores to an array."""
    return (x for store in walk(fill.body, Store) if store.buffer.data is a.data for x in walk(store.value, Expr))


def _written(fill: Any, a: Buffer) -> dict[int, int] | None:
    """Element of an array -> the last iteration of a loop that writes it; None where that is not known, or they are read."""
    out: dict[int, int] = {}
    if any(x.buffer.data is a.data for x in walk(fill, Load, AddressOf)):
        return None
    inner: list[Any] = list(walk(fill.body, For))
    if any(not isinstance(x.extent, Const) or not isinstance(x.start, Const) for x in inner):
        return None
    for store in walk(fill.body, Store):
        if store.buffer.data is not a.data:
            continue
        at: Any = store.indices[0]
        lanes = range(at.lanes) if isinstance(at, Ramp) else range(1)
        step = constant(at.stride, {}) if isinstance(at, Ramp) else 0
        for values in itertools.product(range(int(fill.extent.value)), *(range(x.start.value, x.start.value + x.extent.value)
                                                                    for x in inner)):
            k = constant(at.base if isinstance(at, Ramp) else at, dict(zip((fill.var, *(x.var for x in inner)), values)))
            if k is None or step is None:
                return None
            out.update((k + i * step, max(values[0], out.get(k + i * step, 0))) for i in lanes)
    return out


def _restricted(fill: For, begin: int, end: int) -> Stmt:
    """Iterations of a loop, with names of their own."""
    v = fresh(fill.var.name, fill.var.dtype)
    body = substitute(fill.body, {fill.var: v + const(begin, v.dtype) if begin else v})
    return renamed(replace(fill, var=v, extent=const(end - begin, fill.extent.dtype), body=body))
