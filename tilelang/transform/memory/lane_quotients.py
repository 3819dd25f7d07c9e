"""Simplifies quotients in unrolled loops that are equal in all lanes, or that split into two simpler quotients.

    j0 = tx % 8 * 8                                   j0 = tx % 8 * 8
    for v in unroll(8):                               for v in unroll(8):
        j = j0 + v                          ->            j = j0 + v
        P[v] = W[j // 2] * scale[j // 32]                 P[v] = W[j0 // 2 + v // 2] * scale[j0 // 32]

The two quotients are one of the loop-invariant term and one of the lane.  CUDA's compiler does not see that `j0 + v` carries
nothing into the bits of j0.  It would compute the address of a group's scale, and load the scale, for each element of
the group.
"""

from __future__ import annotations

from dataclasses import field

from tilelang.arith import Analyzer, known_divisor
from tilelang.ir import (Binary, Bind, Call, Const, Expr, For, Func, Load, Node, Var, binary, const, contains, replace,
                         rewrite, walk)
from tilelang.ir.record import entity

from ..framework.pass_ import DEVICE, PassContext, pass_

_DIVISIONS = ("floordiv", "floormod")


@pass_(needs=DEVICE)
def lane_quotients(func: Func, cx: PassContext) -> Func:
    """Rewrite (b + v) // c and (b + v) % c in unrolled loops over v in [0, n).

    Applies where the power of two n divides b, and n divides c or is a multiple of c.
    """
    lanes: dict[Var, int] = {}
    binds: list[Bind] = []  # in program order: a value's terms are bound before it
    divisions: list[Binary] = []
    for x in walk(func.body, Binary, Bind, For):
        if isinstance(x, Binary):
            if x.op in _DIVISIONS:
                divisions.append(x)
        elif isinstance(x, Bind):
            if x.var.dtype.is_int and x.var.dtype.lanes == 1:
                binds.append(x)
        elif _counts_lanes(x):
            lanes[x.var] = int(x.extent.value)
    if not lanes or not divisions:
        return func
    known = _Values(lanes)
    for s in binds:
        known.learn_sum(s)
    if not any(known.candidate(x) for x in divisions):
        return func
    for s in binds:
        known.divisors[s.var] = known_divisor(s.value, known.divisors, known.analyzer)
    return replace(func, body=rewrite(func.body, known.parted))


def _counts_lanes(s: For) -> bool:
    """Whether a loop is unrolled over [0, n), for n a power of two."""
    n = s.extent
    return (s.kind in ("unroll", "vectorized") and isinstance(s.start, Const) and s.start.value == 0 and isinstance(n, Const)
            and n.value > 1 and n.value & (n.value - 1) == 0)


@entity
class _Values:
    """Facts about values.

    lanes: variables of unrolled loops and their extents.  divisors: of bound values.  lane_terms: bound values that add to a
    lane.
    """

    lanes: dict[Var, int]
    divisors: dict[Expr, int] = field(default_factory=dict)
    lane_terms: dict[Var, tuple[Expr, int, Expr]] = field(default_factory=dict)
    analyzer: Analyzer = field(default_factory=Analyzer)

    def learn_sum(self, s: Bind) -> None:
        found = self.lane_of(s.value)
        # What is computed again at the place of use must not have changed in between.
        if found is not None and not contains(found[2], Load, Call):
            self.lane_terms[s.var] = found

    def lane_of(self, e: Expr) -> tuple[Expr, int, Expr] | None:
        """(l, n, e - l) where e is the sum of a lane term l in [0, n) and a rest, which may contain lane variables as well."""
        if isinstance(e, Var):
            n = self.lanes.get(e)
            return (e, n, const(0, e.dtype)) if n is not None else self.lane_terms.get(e)
        if not isinstance(e, Binary):
            return None
        if e.op in ("add", "sub"):
            for x, y in ((e.a, e.b), (e.b, e.a)) if e.op == "add" else ((e.a, e.b),):
                found = self.lane_of(x)
                if found is not None:
                    return found[0], found[1], binary(e.op, found[2], y)
        if e.op in _DIVISIONS and isinstance(e.a, Var) and e.a in self.lanes and isinstance(e.b, Const):
            n, c = self.lanes[e.a], e.b.value
            if 0 < c < n and n % c == 0:
                return e, n // c if e.op == "floordiv" else c, const(0, e.dtype)
        return None

    def candidate(self, x: Node) -> tuple[Expr, int, Expr, int] | None:
        """(lane, n, rest, c) of a quotient or remainder of (lane + rest) by c that may be split; None for other nodes."""
        if not isinstance(x, Binary) or x.op not in _DIVISIONS or not isinstance(x.b, Const) or x.b.value <= 0:
            return None
        found = self.lane_of(x.a)
        if found is None:
            return None
        (lane, n, rest), c = found, x.b.value
        return None if c % n and n % c or isinstance(rest, Const) and rest.value == 0 else (lane, n, rest, c)

    def parted(self, x: Node) -> Expr | None:
        """The quotient or remainder without the lane in its dividend; None where it cannot be rewritten."""
        found = self.candidate(x)
        if found is None:
            return None
        assert isinstance(x, Binary)
        lane, n, rest, c = found
        if known_divisor(rest, self.divisors, self.analyzer) % n:
            return None
        if c % n == 0:
            whole = binary(x.op, rest, x.b)
            return whole if x.op == "floordiv" else binary("add", whole, lane)
        part = binary(x.op, lane, x.b)
        return part if x.op == "floormod" else binary("add", binary(x.op, rest, x.b), part)
