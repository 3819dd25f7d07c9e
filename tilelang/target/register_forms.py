"""Recognises loops over register arrays that can be printed as PTX on named registers.

assign_accumulator_registers marks these loops; codegen prints them.  Each has one of these forms:

    for r: acc[r] = x                               fill     one mov each
    for r: acc[r] = acc[r] * f[…]                   scale    one mul each
    for r: P[r] = float16(S[…])                     halves   one cvt for each pair
    for j: packed[0:8] = float16x8(C[…]); rest      read     one cvt for each pair; the rest is printed unchanged

Loops over values that are computed from accumulators (`value_form`):

    for r: S[r] = exp2(S[r] * c - top[…] * c)       map      an instruction for each operation on the element
    for r: x[…] = max(x[…], S[r])                   sum      one instruction each, in the loop's order; of |S[r]| too
    for i: x[i] = 0; for r: x[i] = x[i] + S[…]      sums     the same for each iteration; the rest is printed unchanged

and, in branches and outside of the innermost loops, which are executed rarely (`store_form`):

    for r: M[n, r : r + 2] = acc[2 * r : 2 * r + 2] store    one store each, from one address where the tensor's strides allow

In loops without a form the values pass through an array, which the device compiler has to split into registers again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilelang.arith import Analyzer, Linear
from tilelang.ir import (AddressOf, Binary, Bind, Buffer, Call, Cast, Const, Expr, For, Load, Ramp, Stmt, Store, Var, free_vars,
                         Unary, is_const, is_large, stmts_of, substitute, walk, contains, GLOBAL, LOCAL)
from tilelang.ir.record import record

MOST = 256  # largest number of iterations of a loop nest
_HALVES = ("float16", "bfloat16")
_VALUES: dict[str, Any] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
                           "floormod": operator.mod}


@record
class Form:
    """The form of a loop.

    kind: "fill" | "scale" | "halves" | "read" | "map" | "sum" | "sums" | "store".  buffer: the register array.
    points: one tuple for each iteration, in order.  fill: (element, value); scale: (element, factor); halves: (word, source,
    lower element, upper element); map, store: (element, values of the loop variables); sum: (element added to, element).
    read, sums: none.
    value: map: the stored expression; sum: the value of its statement.
    """

    kind: str
    buffer: Buffer
    points: tuple[tuple[Any, ...], ...] = ()
    value: Expr | None = None

    @property
    def source(self) -> Buffer | None:
        """For "halves", the buffer whose elements are converted; None for other forms."""
        return self.points[0][1] if self.kind == "halves" else None


def form_of(s: Stmt) -> Form | None:
    """The form of a statement, of any kind.  Computed once and cached on the statement."""
    known = s.__dict__
    if "_form" not in known:
        known["_form"] = register_form(s) or value_form(s) or store_form(s)
    return known["_form"]  # type: ignore[no-any-return]


def register_form(s: Stmt) -> Form | None:
    """The form "fill", "scale", "halves" or "read" of an unrolled loop, None if it has none of them."""
    loops, body = _nest(s)
    if not loops:
        return None
    if isinstance(body, Store):
        return _of_store(loops, body)
    return _reading(s) if len(loops) == 1 else None


def constant(e: Expr, at: dict[Var, Any]) -> Any:
    """The value of an index for these values of variables, None when it depends on anything else.

    at: integers, or arrays of them for many iterations at once; the value is of the same kind.
    """
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Var):
        return at.get(e)
    if isinstance(e, Binary) and e.op in _VALUES:
        a, b = constant(e.a, at), constant(e.b, at)
        return None if a is None or b is None or e.op.startswith("floor") and np.any(b == 0) else _VALUES[e.op](a, b)
    return None


def _nest(s: Stmt) -> tuple[list[tuple[Var, int]], Stmt]:
    loops: list[tuple[Var, int]] = []
    points = 1
    while isinstance(s, For):
        if s.kind != "unroll" or s.plan.factor or not (isinstance(s.start, Const) and s.start.value == 0) or \
                not isinstance(s.extent, Const):
            return [], s
        points *= int(s.extent.value)
        loops.append((s.var, int(s.extent.value)))
        body = stmts_of(s.body) or (s.body,)
        s = body[0] if len(body) == 1 else s.body
    return (loops, s) if 0 < points <= MOST else ([], s)


def _points(loops: list[tuple[Var, int]]) -> Iterator[dict[Var, int]]:
    for values in itertools.product(*(range(n) for _, n in loops)):
        yield {v: x for (v, _), x in zip(loops, values)}


def _elements(e: Load | Store, loops: list[tuple[Var, int]], at: dict[Var, int] | None = None) -> list[int] | None:
    """The element accessed in each iteration, in order; None when it depends on more than the loop variables and `at`."""
    if len(e.indices) != 1:
        return None
    shape = tuple(n for _, n in loops)
    values: dict[Var, Any] = {**(at or {}), **{v: x.ravel() for (v, _), x in zip(loops, np.indices(shape))}}
    found = constant(e.indices[0], values)
    return None if found is None else np.broadcast_to(found, int(np.prod(shape))).tolist()


def _of_store(loops: list[tuple[Var, int]], s: Store) -> Form | None:
    b, v = s.buffer, s.value
    if b.scope_name != LOCAL or not b.is_static or v.dtype.lanes > 1:
        return None
    if isinstance(v, Cast) and b.dtype.base in _HALVES:
        return _halves(loops, s, v)
    factor: Expr | None = None
    if isinstance(v, Binary) and v.op == "mul" and b.dtype == v.dtype == "float32":
        for mine, other in ((v.a, v.b), (v.b, v.a)):
            if isinstance(mine, Load) and mine.buffer is b and bool(mine.indices == s.indices) and _given(other, b, loops):
                factor = other
    if factor is None and (b.dtype not in ("float32", "int32") or isinstance(v, Load) or not _given(v, b, loops)):
        return None
    places = _elements(s, loops)
    if places is None or len(set(places)) < len(places):
        return None
    x = v if factor is None else factor
    values = [x] * len(places)
    if isinstance(x, Load):
        sources = _elements(x, loops)
        if sources is None:
            return None
        read = {j: Load(x.buffer, (Const(j, x.indices[0].dtype),), x.dtype) for j in dict.fromkeys(sources)}
        values = [read[j] for j in sources]
    kind = "fill" if factor is None else "scale"
    return Form(kind, b, tuple(zip(places, values)))


def _given(e: Expr, b: Buffer, loops: list[tuple[Var, int]]) -> bool:
    """Whether a value is an element of another register array, or depends on neither memory nor the loop variables."""
    if isinstance(e, Load):
        return e.buffer.data is not b.data and e.buffer.scope_name == LOCAL and len(e.indices) == 1
    inside = {v for v, _ in loops}
    return isinstance(e, Const) or isinstance(e, Var) and e not in inside


def _halves(loops: list[tuple[Var, int]], s: Store, v: Cast) -> Form | None:
    x = v.value
    if not isinstance(x, Load) or x.dtype != "float32" or x.buffer.scope_name != LOCAL or v.dtype != s.buffer.dtype:
        return None
    places, read = _elements(s, loops), _elements(x, loops)
    if places is None or read is None or len(set(places)) < len(places):
        return None
    sources = dict(zip(places, read))
    if any(k ^ 1 not in sources for k in sources):
        return None
    points = tuple((k // 2, x.buffer, sources[k], sources[k + 1]) for k in sources if k % 2 == 0)
    return Form("halves", s.buffer, points)


def _reading(s: Stmt) -> Form | None:
    """The form "read": a loop that reads floats only to pack them.  None for other loops."""
    assert isinstance(s, For)
    found: Buffer | None = None
    packs = 0
    for x in stmts_of(s.body):
        if isinstance(x, Store) and (floats := packed_source(x)) is not None:
            if found is not None and found is not floats.buffer:
                return None
            for k in range(int(s.extent.value)):  # type: ignore[attr-defined]
                if constant(floats.indices[0].base, {s.var: k}) is None:  # type: ignore[attr-defined]
                    return None
            found, packs = floats.buffer, packs + 1
    if found is None:
        return None
    return Form("read", found) if _uses(found, s) == packs else None


def _uses(b: Buffer, s: For) -> int:
    """How often the body of a loop accesses a buffer."""
    return sum(x.buffer.data is b.data for x in walk(s.body, Load, Store, AddressOf))


def packed_source(s: Store) -> Load | None:
    """The load of consecutive floats that a store converts to whole pairs of 16-bit floats in registers; None for others."""
    v = s.value
    if not (isinstance(v, Cast) and isinstance(v.value, Load) and v.dtype.base in _HALVES and v.dtype.lanes > 1
            and v.dtype.lanes % 2 == 0 and v.value.dtype.base == "float32"):
        return None
    to, x = s.indices, v.value
    if len(to) != 1 or len(x.indices) != 1 or s.buffer.dtype.base != v.dtype.base:
        return None
    place, source = to[0], x.indices[0]
    if not isinstance(place, Ramp) or not isinstance(source, Ramp) or s.buffer.scope_name != LOCAL:
        return None
    if any(not isinstance(r.stride, Const) or r.stride.value != 1 for r in (place, source)):
        return None
    even = isinstance(place.base, Const) and place.base.value % 2 == 0
    return x if even and x.buffer.scope_name == LOCAL and x.buffer.dtype == "float32" else None


# ---- forms for register-resident values ---------------------------------------------------------------------------------

MAPPED = {"add": "add", "sub": "sub", "mul": "mul", "max": "max", "min": "min", "fabs": "abs"}  # operation of a map -> PTX
SUMMED = {"add": "add", "max": "max", "min": "min"}
MIN_INTEGER = 16  # fewest elements of a maximum for which checking the integer result pays off
MIN_CHAINS = 8  # fewest elements per result of a reduction for which two chains pay off
EX2 = {"exp2", "fast_exp2", "exp2_rounded_half", "exp2_rounded_term"}  # ex2.approx.ftz.f32; exp2 itself only with fast math


def value_form(s: Stmt) -> Form | None:
    """The form of a loop that changes elements one by one, or reduces them by sum or maximum; None if it has no such form.

    Besides the registers, such a loop may read only other register arrays and values that do not change in it.
    """
    loops, body = _nest(s)
    last = (stmts_of(body) or (body,))[-1]
    if isinstance(s, For) and loops and isinstance(last, Store) and last.buffer.scope_name == LOCAL:
        found = last if last is body else inlined(s)[1]
        if found is not None:
            return (sum_form(s) if s.plan.registers == "sum" else None) or _map(loops, found) or sum_form(s)
    return _sum_nest(s) if len(loops) == 1 else None


def _map(loops: list[tuple[Var, int]], s: Store) -> Form | None:
    b = s.buffer
    if b.scope_name != LOCAL or not b.is_static or b.dtype != "float32" or s.value.dtype != "float32" or len(s.indices) != 1:
        return None
    if not _mapped(s.value, s, {v for v, _ in loops}):
        return None
    places = _elements(s, loops)
    if places is None or len(set(places)) < len(places):
        return None
    return Form("map", b, tuple(zip(places, _points(loops))), s.value)


def _mapped(e: Expr, s: Store, inside: set[Var]) -> bool:
    """Whether an expression consists of operations on the stored element and on values that `_operand` accepts."""
    if not own_element(e, s.buffer):
        return _operand(e, s.buffer, inside)
    if isinstance(e, Load):
        return bool(e.indices == s.indices)
    if isinstance(e, Binary) and e.op in MAPPED and e.dtype == "float32":
        return _mapped(e.a, s, inside) and _mapped(e.b, s, inside)
    return isinstance(e, Call) and e.op in (*EX2, "fabs") and e.dtype == "float32" and _mapped(e.args[0], s, inside)


def own_element(e: Expr, b: Buffer) -> bool:
    """Whether an expression loads an element of the register array b."""
    return any(isinstance(x, (Load, AddressOf)) and x.buffer.data is b.data for x in walk(e))


def _operand(e: Expr, b: Buffer, inside: set[Var]) -> bool:
    """Whether a value is computed from constants, variables and elements of register arrays by arithmetic."""
    if isinstance(e, Load):
        return e.buffer.scope_name == LOCAL and len(e.indices) == 1 and all(
            isinstance(x, (Const, Var, Binary)) for x in walk(e.indices[0]))
    if isinstance(e, Binary):
        return e.dtype == "float32" and _operand(e.a, b, inside) and _operand(e.b, b, inside)
    if isinstance(e, Call):
        return e.op == "fabs" and _operand(e.args[0], b, inside)
    if isinstance(e, Cast):  # a lane's index, or a number in each iteration
        return e.dtype == "float32" and e.value.dtype == "int32" and not contains(e, Load, Call) and (
            inside.isdisjoint(free_vars(e)) or free_vars(e) <= inside)
    return isinstance(e, Const) or isinstance(e, Var) and e not in inside


def sum_form(s: Stmt, at: dict[Var, int] | None = None) -> Form | None:
    """The form "sum" of a loop nest, None for other statements.  at: values of the variables of loops around it."""
    loops, body = _nest(s)
    if not loops or not isinstance(body, Store) or len(body.indices) != 1:
        return None
    v, to = body.value, body.buffer
    if not isinstance(v, Binary) or v.op not in SUMMED:
        return None
    below = below_zero(v.b) if v.op == "max" else None
    mine, other = v.a, v.b.args[0] if is_absolute(v.b) else v.b if below is None else below  # type: ignore[attr-defined]
    if not isinstance(mine, Load) or not isinstance(other, Load):
        return None
    if mine.buffer is not to or not bool(mine.indices == body.indices) or other.buffer.data is to.data or v.dtype != "float32":
        return None
    if any(x.scope_name != LOCAL or not x.is_static or x.dtype != "float32" for x in (to, other.buffer)):
        return None
    to_places, places = _elements(body, loops, at), _elements(other, loops, at)
    if to_places is None or places is None or len(places) < 2:
        return None
    return Form("sum", other.buffer, tuple(zip(to_places, places)), v)


def is_absolute(e: Expr) -> bool:
    """Whether a term is an absolute value."""
    return isinstance(e, Call) and e.op == "fabs"


def below_zero(e: Expr) -> Expr | None:
    """x of a term max(-x, 0); None for other terms."""
    found = isinstance(e, Binary) and e.op == "max" and is_const(e.b, 0) and isinstance(e.a, Unary) and e.a.op == "neg"
    return e.a.a if found else None  # type: ignore[attr-defined]


def sum_order(form: Form, s: Stmt) -> str:
    """The order in which a loop of the form "sum" combines its elements: "integer", "below", "two_chains", or "" for its own.

    Only loops that may combine in any order (plan.any_order, set by T.reduce) have another than their own.

    "two_chains": even and odd elements are combined in two independent chains, since an FADD waits four cycles for the one
    before it.

    "integer": one instruction computes the maximum of three integers, but only of two floats.  Non-negative floats are ordered
    like integers, and above all negative ones.  If all floats of a thread are negative, or one is NaN, its warp computes the
    maxima again.  Whole warps execute these loops.

    "below": the maximum of max(-e, 0) is that of unsigned integers: floats with a sign bit are above all others, by their
    absolute values, and NaN with one is above them.
    """
    v: Any = form.value
    results = len({i for i, _ in form.points})
    if below_zero(v.b) is not None:
        return "below"
    if not s.plan.any_order or is_absolute(v.b):  # type: ignore[attr-defined]
        return ""
    if v.op == "max" and len(form.points) >= MIN_INTEGER * results:
        return "integer"
    return "two_chains" if len(form.points) >= MIN_CHAINS * results else ""


def _sum_nest(s: Stmt) -> Form | None:
    """The form "sums": a loop around loops of form "sum" over one array, which nothing else in the loop accesses."""
    assert isinstance(s, For)
    found: Buffer | None = None
    count = 0
    for x in stmts_of(s.body):
        form = sum_form(x, {s.var: 0}) if isinstance(x, For) else None
        if form is not None and (found is None or form.buffer is found):
            found, count = form.buffer, count + 1
    if found is None:
        return None
    return Form("sums", found) if _uses(found, s) == count else None


# ---- loops that are executed rarely -------------------------------------------------------------------------------------

def store_form(s: Stmt) -> Form | None:
    """The form "store" of a loop nest, None for other statements."""
    loops, store = inlined(s)
    return None if store is None else _store(loops, store)


def inlined(s: Stmt) -> tuple[list[tuple[Var, int]], Store | None]:
    """(loops, the single store in them, with bound variables replaced by their values); the store is None for other bodies."""
    loops, body = _nest(s)
    *bound, last = stmts_of(body) or (body,)
    if not loops or not isinstance(last, Store) or not all(isinstance(x, Bind) for x in bound):
        return loops, None
    values: dict[Any, Any] = {}
    for x in bound:
        assert isinstance(x, Bind)
        values[x.var] = substitute(x.value, values)
        if is_large(values[x.var]):
            return loops, None
    return loops, substitute(last, values)


def affine_in(e: Expr, inside: set[Var]) -> tuple[Linear, dict[Var, int]] | None:
    """Split an integer into (the terms without loop variables, the coefficient of each loop variable).

    None if it is not affine in the loop variables.
    """
    form = Analyzer().linear(e)
    rest = {a: k for a, k in form.terms.items() if a not in inside}
    if any(v in inside for a in rest for v in free_vars(a)):
        return None
    return Linear(rest, form.const), {v: form.terms[v] for v in inside if v in form.terms}


def _store(loops: list[tuple[Var, int]], s: Store) -> Form | None:
    v, to, inside = s.value, s.buffer, {v for v, _ in loops}
    if not isinstance(v, Load) or v.buffer.scope_name != LOCAL or not v.buffer.is_static or len(v.indices) != 1:
        return None
    if to.scope_name != GLOBAL or to.dtype != v.buffer.dtype or to.dtype not in ("float32", "int32") or \
            v.dtype.lanes not in (1, 2, 4) or to.strides[-1] != 1:
        return None
    place, *bases = (_base(i) for i in (v.indices[0], *s.indices))
    if place is None or any(isinstance(i, Ramp) for i in s.indices[:-1]) or not all(
            i is not None and not contains(i, Load, Call) and affine_in(i, inside) is not None for i in bases):
        return None
    places = _elements(Load(v.buffer, (place,), v.buffer.dtype), loops)
    return None if places is None else Form("store", v.buffer, tuple(zip(places, _points(loops))))


def _base(e: Expr) -> Expr | None:
    """The index itself, or the first of a vector of consecutive indices; None for other vectors."""
    if not isinstance(e, Ramp):
        return e
    return e.base if isinstance(e.stride, Const) and e.stride.value == 1 else None
