"""Converts to 16-bit floats, and from integers of 8 bits, with few instructions per element.

    for r in unroll(8): P[r] = float16(S[r])    ->    P[0:8] = pack_pairs(S[0:8])       one cvt for two floats
    P[0:4] = float16x4(S[0:4])                  ->    P[0:4] = pack_pairs(S[0:4])
    for r in unroll(8):                         ->    F[0:8] = pack_pairs(S[0:8])       S: integers of 8 bits
        P[r] = float16(S[r]) * x                      for r in unroll(8): P[r] = F[r] * x
    x = float16(i % 8)                          ->    x = small_int_to_float(i % 8, low=0)

`pack_pairs` reads and writes whole 32-bit registers.  So both arrays must be registers of a thread that are accessed only
by their declared types, and the 16-bit array must be written from an even element on, bytes be read in pairs or fours.
Integers of 8 bits become floats by a byte permutation and half of a packed subtraction: conversions have a quarter of the
rate.  `small_int_to_float` builds a float from the bits of an integer with few values: a logical operation and half of a
packed subtraction, in place of a conversion (a quarter of the rate on Ampere) and half of a packing.  A loaded integer of
more bits keeps its conversion, which takes it as it is.
"""

from __future__ import annotations

from operator import is_not
from typing import Any

from tilelang.arith import LaunchFacts, flat_index, vector_base
from tilelang.ir import (Alloc, Bind, Buffer, Call, Cast, Const, Expr, For, Func, If, Launch, Load, Ramp, Stmt, Store, Var,
                         call, const, contains, free_vars, is_const, load, rebuild, replace, rewrite, rewrite_launches,
                         seq, stmts_of, substitute, walk, LOCAL)
from tilelang.ir.visitor import mapped
from tilelang.target.register_forms import Form, form_of, packed_source, sum_form

from ..framework.pass_ import DEVICE, PassContext, pass_

# How many integers from a power of two on have consecutive bit patterns: 2 to the number of significand bits.
_COUNTING = {"float16": 1024, "bfloat16": 128}
_BYTES = ("int8", "uint8")


@pass_(needs=DEVICE)
def pack_conversions(func: Func, cx: PassContext) -> Func:
    """Replace conversions to float16 and bfloat16 by intrinsics for pairs and for small integers.

    Keeps: every value, bit for bit.
    """
    return rewrite_launches(func, _packed)


def _packed(launch: Launch) -> Launch | None:
    if not any(x.dtype.base in _COUNTING or _is_of_bytes(x) for x in walk(launch.body, Cast)):
        return None
    return _Conversions(launch).visit(launch)  # type: ignore[no-any-return]


class _Conversions:
    """Visits the statements of a launch in program order."""

    def __init__(self, launch: Launch) -> None:
        self.facts = LaunchFacts(launch, free_vars(launch))
        self.types = {x.buffer.data: x.buffer.dtype for x in walk(launch.body, Alloc)}

    def visit(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return mapped(self.visit, x)
        if isinstance(x, Expr):
            return rewrite(x, self._of_small_integer, Cast)
        if not isinstance(x, Stmt):
            return x
        if isinstance(x, For):
            return self._loop(x)
        if isinstance(x, Store):
            packed = self._vector(x)
            return rebuild(x, self.visit) if packed is None else packed
        out = rebuild(x, self.visit)
        if isinstance(x, Bind):
            self.facts.enter_bind(x)
        return out

    def _loop(self, s: For) -> Stmt:
        if s.plan.registers:
            return self._on_registers(s)
        packed = self._loop_of_pairs(s)
        if packed is not None:
            return packed
        widened = self._widened(s)
        if widened is not None:
            return seq(*map(self.visit, widened))
        bounds = self.visit((s.start, s.extent))
        self.facts.enter_loop(s)
        return replace(s, start=bounds[0], extent=bounds[1], body=self.visit(s.body))  # type: ignore[no-any-return]

    def _on_registers(self, s: For) -> Stmt:
        """Keep a loop on named registers; loops of kinds "read" and "sums" also hold other statements, which are converted."""
        form = form_of(s)
        if form is None or form.kind not in ("read", "sums"):
            return s
        self.facts.enter_loop(s)
        stmts = [x if _is_on_registers(form, x, s.var) else self.visit(x) for x in stmts_of(s.body)]
        return replace(s, body=seq(*stmts, span=s.body.span)) if any(map(is_not, stmts, stmts_of(s.body))) else s

    # ---- pairs ------------------------------------------------------------------------------------------------------

    def _vector(self, s: Store) -> Store | None:
        """A vector store that converts floats in registers to 16-bit floats; None for other stores."""
        v: Any = s.value
        if all(i.dtype.lanes == 1 for i in s.indices) or not self._converts(s) or v.dtype.lanes % 2:
            return None
        at = vector_base(s.buffer, s.indices)
        first = flat_index(s.buffer, at) if at is not None else None
        if v.value.dtype.base in _BYTES or vector_base(v.value.buffer, v.value.indices) is None or \
                not isinstance(first, Const) or first.value % 2:
            return None
        return replace(s, value=_pack(v.value, v.dtype))  # type: ignore[no-any-return]

    def _loop_of_pairs(self, s: For) -> Store | None:
        """The vector store that replaces a loop over neighbouring registers; None for other loops."""
        body, n, facts = stmts_of(s.body) or (s.body,), s.extent, self.facts.analyzer
        if s.kind != "unroll" or len(body) != 1 or not isinstance(body[0], Store) or not is_const(s.start, 0):
            return None
        store = body[0]
        if not isinstance(n, Const) or n.value % 2 or n.value <= 0 or not self._converts(store):
            return None
        v: Any = store.value
        places: list[Expr] = []
        source_step = (4 if n.value % 4 == 0 else 2) if _is_of_bytes(v) else 1
        for access, step in ((store, 2), (v.value, source_step)):  # pairs of 16-bit floats start at even elements
            if len(access.indices) != 1 or access.indices[0].dtype.lanes > 1:
                return None
            form = facts.linear(flat_index(access.buffer, access.indices))
            rest = {a: k for a, k in form.terms.items() if a is not s.var}
            if form.terms.get(s.var) != 1 or any(x % step for x in (form.const, *rest.values())) or any(
                    s.var in free_vars(a) for a in rest):
                return None
            places.append(facts.simplify(substitute(access.indices[0], {s.var: const(0, s.var.dtype)})))
        to, source = (_neighbours(at, int(n.value)) for at in places)
        floats = replace(v.value, indices=(source,), dtype=v.value.dtype.with_lanes(source.lanes))
        return replace(store, indices=(to,), value=_pack(floats, v.dtype.with_lanes(to.lanes)))  # type: ignore[no-any-return]

    def _widened(self, s: For) -> tuple[Stmt, ...] | None:
        """A loop over integers of 8 bits in registers, behind their conversions; None where it has none."""
        if s.kind != "unroll" or not isinstance(s.extent, Const) or contains(s.body, For, If):
            return None
        written = {x.buffer.data for x in walk(s.body, Store)}
        found: dict[Cast, Buffer] = {}
        for x in walk(s.body, Cast):
            if _is_of_bytes(x) and x.dtype.lanes == 1 and x.value.buffer.data not in written:  # type: ignore[attr-defined]
                found.setdefault(x, Buffer(f"{x.value.buffer.name}_f", (int(s.extent.value),), x.dtype, LOCAL))  # type: ignore[attr-defined]
        self.types.update((b.data, b.dtype) for b in found.values())
        fills = [(b, self._loop_of_pairs(replace(s, body=Store(b, (s.var,), x, span=s.span)))) for x, b in found.items()]
        made = {x: load(b, (s.var,)) for (x, b), (_, fill) in zip(found.items(), fills) if fill is not None}
        if not made:
            return None
        done = [x for b, fill in fills if fill is not None for x in (Alloc(b), fill)]
        return *done, replace(s, body=rewrite(s.body, made.get, Cast))

    def _converts(self, s: Store) -> bool:
        """Whether a store converts floats in registers to 16-bit floats in registers, both accessed by their declared types.

        The alignment of a view of another type is not known.
        """
        v = s.value
        if not isinstance(v, Cast) or not isinstance(v.value, Load) or not _is_of_bytes(v) and (
                v.dtype.base not in _COUNTING or v.value.dtype.base != "float32"):
            return False
        return all(b.scope_name == LOCAL and self.types.get(b.data) == b.dtype for b in (s.buffer, v.value.buffer))

    # ---- integers with few values -----------------------------------------------------------------------------------

    def _of_small_integer(self, e: Cast) -> Expr | None:
        most = _COUNTING.get(e.dtype.base, 0) if e.dtype.lanes == 1 else 0
        source = e.value.value if isinstance(e.value, Cast) else e.value
        if not most or not e.value.dtype.is_int or isinstance(source, (Load, Const)):
            return None
        low, high = self.facts.analyzer.interval(e.value)
        if low is None or high is None or low <= -most or high - min(low, 0) >= most:
            return None
        return call("small_int_to_float", (e.value,), e.dtype, low=min(low, 0))


def _is_of_bytes(x: Cast) -> bool:
    """Whether a conversion is one of loaded integers of 8 bits to floats of 16 or 32 bits."""
    return isinstance(x.value, Load) and x.value.dtype.base in _BYTES and x.dtype.base in (*_COUNTING, "float32")


def _is_on_registers(form: Form, x: Stmt, loop_var: Var) -> bool:
    """Whether a statement in a loop of this form is the one that works on the registers."""
    if form.kind == "read":
        return isinstance(x, Store) and packed_source(x) is not None
    return isinstance(x, For) and sum_form(x, {loop_var: 0}) is not None


def _neighbours(first: Expr, lanes: int) -> Ramp:
    return Ramp(first, const(1, first.dtype), lanes, first.dtype.with_lanes(lanes))


def _pack(floats: Load, to: Any) -> Call:
    return call("pack_pairs", (floats,), to)
