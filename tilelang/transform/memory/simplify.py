"""Shortens index arithmetic, of quotients in unrolled loops first."""

from __future__ import annotations

from typing import Any

from tilelang.arith import known_divisor, launch_analyzer, simplify_stmt, value_scalars
from tilelang.ir import (Binary, Bind, Call, Cast, Const, Expr, For, Func, Launch, Load, Var, binary, cast, const, contains,
                         free_vars, int_range, is_large, replace, rewrite, substitute, walk)

from ..analysis.guards import summands
from ..framework.pass_ import DEVICE, PassContext, pass_


EXACT = 2**24  # integers up to here are float32 values


@pass_(needs=DEVICE)
def simplify(func: Func, cx: PassContext) -> Func:
    """Simplify every expression with the ranges of loops, bindings and conditions; drop branches whose condition is known.

    Before:  S[(k + 0 * 32) % 3 * 4096 + tx // 1]      After:  S[k % 3 * 4096 + tx]
    """
    wrap = {v: int_range(v.dtype) for v in value_scalars(func.body, func.params)}
    return replace(func, body=simplify_stmt(func.body, wrap))


@pass_(needs=DEVICE, of=Launch)
def lane_quotients(launch: Launch, cx: PassContext) -> Launch:
    """Rewrite (b + v) // c and (b + v) % c in unrolled loops over v, equal in all lanes or split into two simpler quotients.

        j0 = tx % 8 * 8                                   j0 = tx % 8 * 8
        for v in unroll(8):                               for v in unroll(8):
            j = j0 + v                          ->            j = j0 + v
            P[v] = W[j // 2] * scale[j // 32]                 P[v] = W[j0 // 2 + v // 2] * scale[j0 // 32]

    The two quotients are one of the loop-invariant term and one of the lane.  CUDA's compiler does not see that `j0 + v`
    carries nothing into the bits of j0.  It would compute the address of a group's scale, and load the scale, for each element
    of the group.

    Applies where a power of two n above v divides b, and n divides c or is a multiple of c.  Bound values that are
    multiples of c, a power of two, leave the dividend with its other multiples: what they are is not seen there.

    Likewise float(j0 + v) becomes float(j0) + float(v) where all three are exact: a conversion takes more than an addition.
    """
    analyzer, lanes = launch_analyzer(launch, free_vars(launch)), set[Var]()
    sums, divisors = dict[Var, Expr](), dict[Expr, int]()  # what adds to a lane; known divisors of other bound values
    for s in walk(launch.body, For, Bind):  # in program order: a value's terms are bound before it
        if isinstance(s, For):
            lanes |= {s.var} if s.kind in ("unroll", "vectorized") else set()
        elif s.var.dtype.is_int and s.var.dtype.lanes == 1:
            value = substitute(s.value, sums)
            # What is computed again at the place of use must not have changed in between.
            if not lanes.isdisjoint(free_vars(value)) and not contains(value, Load, Call) and not is_large(value):
                sums[s.var] = value
            divisors[s.var] = known_divisor(value, divisors, analyzer)

    def parted(x: Binary) -> Expr | None:
        """The quotient or remainder without the lane in its dividend; None where it cannot be rewritten."""
        if not _divides(x):
            return None
        terms, c = list(summands(substitute(x.a, sums))), x.b.value  # type: ignore[attr-defined]
        split = [known_divisor(t, divisors, analyzer) % c == 0 for t, _ in terms]
        multiple, rest = (_total([t for t, m in zip(terms, split) if m == side], x.dtype) for side in (True, False))
        bound = any(m and isinstance(t, Var) and t in divisors for (t, _), m in zip(terms, split))
        varies = any(not lanes.isdisjoint(free_vars(t)) for t, _ in terms)
        if c & (c - 1) == 0 and bound and varies and None not in analyzer.interval(rest):
            tail = binary(x.op, rest, x.b)
            return binary("add", binary("floordiv", multiple, x.b), tail) if x.op == "floordiv" else tail
        for k, (lane, added) in enumerate(terms):
            own = added and len(terms) > 1 and (lane.a if _divides(lane) else lane) in lanes
            low, high = analyzer.interval(lane) if own else (None, None)
            if low is None or low < 0 or high is None:
                continue
            n = 1 << high.bit_length()
            rest = _total([*terms[:k], *terms[k + 1:]], lane.dtype)
            whole, part = (binary(x.op, e, x.b) for e in (rest, lane))
            if known_divisor(rest, divisors, analyzer) % n == c % n == 0:
                return whole if x.op == "floordiv" else binary("add", whole, lane)
            if known_divisor(rest, divisors, analyzer) % n == n % c == 0:
                return part if x.op == "floormod" else binary("add", whole, part)
        return None

    def converted(x: Cast) -> Expr | None:
        """The conversion of a sum to float32 as one of the invariant terms and one of the lanes."""
        if x.dtype != "float32" or not x.value.dtype.is_int or x.value.dtype.lanes != 1:
            return None
        total = substitute(x.value, sums)
        sides: list[Expr] = [const(0, total.dtype)] * 2
        for t, added in summands(total):
            own = isinstance(t, Const) or lanes >= {*free_vars(t)}
            sides[own] = binary("add" if added else "sub", sides[own], t)
        if contains(total, Load, Call) or any(not free_vars(e) for e in sides):
            return None
        bounds = [analyzer.interval(e) for e in (total, *sides)]
        if any(low is None or high is None or max(-low, high) > EXACT for low, high in bounds):
            return None
        return binary("add", cast(sides[0], x.dtype), cast(sides[1], x.dtype))

    def found(x: Any) -> Expr | None:
        return converted(x) if isinstance(x, Cast) else parted(x)

    return rewrite(launch, found, Binary, Cast) if lanes else launch  # type: ignore[no-any-return]


def _divides(x: Any) -> bool:
    return isinstance(x, Binary) and x.op in ("floordiv", "floormod") and isinstance(x.b, Const) and x.b.value > 0


def _total(terms: list[tuple[Any, bool]], dt: Any) -> Expr:
    """The sum of terms, as `summands` yields them."""
    out: Expr = const(0, dt)
    for t, added in terms:
        out = binary("add" if added else "sub", out, t)
    return out
