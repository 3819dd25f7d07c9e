"""Converts to 16-bit floats, and from integers of 8 bits or fewer, with few instructions per element.

    for r in unroll(8): P[r] = float16(S[r])    ->    P[0:8] = pack_pairs(S[0:8])       one cvt for two floats
    P[0:4] = float16x4(S[0:4])                  ->    P[0:4] = pack_pairs(S[0:4])
    for r in unroll(8):                         ->    F[0:8] = pack_pairs(S[0:8])       S: integers of 8 bits
        P[r] = float16(S[r]) * x                      for r in unroll(8): P[r] = F[r] * x
    for r in unroll(8): P[r] = float16(S[r])    ->    P[0:8] = pack_pairs(S[0:8])       S: float8, where it has instructions
    x = float16(i % 8)                          ->    x = small_int_to_float(i % 8, low=0)
    for v in unroll(2):                         ->    D[0:2] = dequantise_pair(W[b], z, low=0, high=4, mask=15)
        D[v] = half(W[b] >> v*4 & 15 - z) * x                    * broadcast(x)

`pack_pairs` reads and writes whole 32-bit registers.  So both arrays must be registers of a thread that are accessed only
by their declared types, and the 16-bit array must be written from an even element on, bytes be read in pairs or fours.
Integers of 8 bits become floats by a byte permutation and half of a packed subtraction: conversions have a quarter of the
rate.  `small_int_to_float` builds a float from the bits of an integer with few values: a logical operation and half of a
packed subtraction, in place of a conversion (a quarter of the rate on Ampere) and half of a packing.  A loaded integer of
more bits keeps its conversion, which takes it as it is.

`dequantise_pair` converts two quantised weights of a byte with three instructions: one PRMT copies the byte into both halves,
one LOP3 keeps in each half its weight as the significand of 1024, and one HFMA2 subtracts 1024 (and other leftover bits) and
the zero point.  Otherwise each weight takes a mask, a shift, a conversion and a subtraction.  bfloat16, of CUDA devices, takes
four: its significand has room for weights at the lowest bits alone, and not for 128 and any zero point.  Every step is exact
except a multiplication behind it, which rounds as the scalar one does.
"""

from __future__ import annotations

from operator import is_not
from typing import Any

from tilelang.arith import flat_index, launch_analyzer, vector_base
from tilelang.ir import (Alloc, Bind, Binary, Broadcast, Buffer, Call, Cast, Const, Expr, For, If, Launch, Load, Node, Select,
                         Stmt, Store, Var, call, const, contains, free_vars, is_const, is_large, load, ramp, rebuild,
                         replace, rewrite, seq, stmts_of, substitute, walk, LOCAL)
from tilelang.ir.children import children
from tilelang.ir.visitor import mapped
from tilelang.ops.distribute import conjunction
from tilelang.target import Target
from tilelang.target.register_forms import Form, form_of, packed_source, sum_form

from ..framework.pass_ import DEVICE, PassContext, pass_
from .code_tables import uncast

_MAX_ZERO_POINT = 255  # 1024 + zero point is exact in float16, the zero point in bfloat16
# How many integers from a power of two on have consecutive bit patterns: 2 to the number of significand bits.
_COUNTING = {"float16": 1024, "bfloat16": 128}
_BYTES = ("int8", "uint8")
_FLOATS8 = ("float8_e4m3fn", "float8_e5m2")


@pass_(needs=DEVICE, of=Launch)
def pack_conversions(launch: Launch, cx: PassContext) -> Any:
    """Replace conversions to float16 and bfloat16 by intrinsics for pairs and for small integers.

    Keeps: every value, bit for bit.
    """
    found = any(x.dtype.base in _COUNTING or _is_of_bytes(x) for x in walk(launch.body, Cast))
    return _Conversions(launch, cx.target).visit(launch) if found else None


class _Conversions:
    """Visits the statements of a launch in program order.

    narrow: whether there are conversions of pairs of float8. weights: the types of which pairs of weights are made.
    """

    def __init__(self, launch: Launch, target: Target | None) -> None:
        self.narrow = target is not None and target.has_fp8_pairs
        self.weights = ("float16", "bfloat16") if target is not None and target.has_bfloat16_pairs else ("float16",)
        self.analyzer = launch_analyzer(launch, free_vars(launch))
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
        return rebuild(x, self.visit)

    def _loop(self, s: For) -> Stmt:
        if s.plan.registers:
            return self._on_registers(s)
        weights = self._loop_of_weights(s)
        if weights is not None:
            return self.visit(weights)  # type: ignore[no-any-return]
        packed = self._loop_of_pairs(s)
        if packed is not None:
            return packed
        widened = self._widened(s)
        if widened is not None:
            return seq(*map(self.visit, widened))
        return rebuild(s, self.visit)  # type: ignore[no-any-return]

    def _on_registers(self, s: For) -> Stmt:
        """Keep a loop on named registers; loops of kinds "read" and "sums" also hold other statements, which are converted."""
        form = form_of(s)
        if form is None or form.kind not in ("read", "sums"):
            return s
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
        if v.value.dtype.base in (*_BYTES, *_FLOATS8) or vector_base(v.value.buffer, v.value.indices) is None or \
                not isinstance(first, Const) or first.value % 2:
            return None
        return replace(s, value=_pack(v.value, v.dtype))  # type: ignore[no-any-return]

    def _loop_of_pairs(self, s: For) -> Store | None:
        """The vector store that replaces a loop over neighbouring registers; None for other loops."""
        body, n = stmts_of(s.body) or (s.body,), s.extent
        if s.kind != "unroll" or len(body) != 1 or not isinstance(body[0], Store) or not is_const(s.start, 0):
            return None
        store = body[0]
        if not isinstance(n, Const) or n.value % 2 or n.value <= 0 or not self._converts(store):
            return None
        v: Any = store.value
        source_step = (4 if n.value % 4 == 0 else 2) if v.value.dtype.bits == 8 else 1
        places = self._first(store, s.var, 2), self._first(v.value, s.var, source_step)
        if None in places:
            return None
        to, source = (ramp(at, int(n.value)) for at in places if at is not None)
        floats = replace(v.value, indices=(source,), dtype=v.value.dtype.with_lanes(source.lanes))
        return replace(store, indices=(to,), value=_pack(floats, v.dtype.with_lanes(to.lanes)))  # type: ignore[no-any-return]

    def _first(self, access: Load | Store, v: Var, step: int) -> Expr | None:
        """The first of the neighbouring registers that an access goes through with v, where it is a multiple of `step`; else
        None.  Pairs of 16-bit floats start at even elements."""
        if len(access.indices) != 1 or access.indices[0].dtype.lanes > 1:
            return None
        form = self.analyzer.linear(flat_index(access.buffer, access.indices))
        rest = {a: k for a, k in form.terms.items() if a is not v}
        alone = form.terms.get(v) == 1 and not any(v in free_vars(a) for a in rest)
        if not alone or any(x % step for x in (form.const, *rest.values())):
            return None
        return self.analyzer.simplify(substitute(access.indices[0], {v: const(0, v.dtype)}))

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
        made, done = dict[Expr, Load](), list[Stmt]()
        for x, b in found.items():
            when = _when(s.body, x, s.var)
            fill = None if when is None else self._loop_of_pairs(replace(s, body=Store(b, (s.var,), x, span=s.span)))
            if fill is not None and when is not None:
                made[x] = load(b, (s.var,))
                cond = conjunction(*when)
                done += [Alloc(b), fill if cond is None else If(cond, fill)]
        if not made:
            return None
        return *done, replace(s, body=rewrite(s.body, made.get, Cast))

    def _converts(self, s: Store) -> bool:
        """Whether a store converts floats in registers to 16-bit floats in registers, both accessed by their declared types.

        The alignment of a view of another type is not known.
        """
        v = s.value
        floats = ("float32", *(_FLOATS8 if self.narrow else ()))
        if not isinstance(v, Cast) or not isinstance(v.value, Load) or not _is_of_bytes(v) and (
                v.dtype.base not in _COUNTING or v.value.dtype.base not in floats):
            return False
        return all(b.scope_name == LOCAL and self.types.get(b.data) == b.dtype for b in (s.buffer, v.value.buffer))

    # ---- two weights of a byte --------------------------------------------------------------------------------------

    def _loop_of_weights(self, s: For) -> Store | None:
        """The store of a pair that replaces a loop over the two weights of a byte; None for other loops."""
        *bound, store = stmts_of(s.body) or (s.body,)
        if s.kind != "unroll" or not is_const(s.start, 0) or not is_const(s.extent, 2) or not isinstance(store, Store) or \
                not all(isinstance(x, Bind) for x in bound):
            return None
        b, inline = store.buffer, dict[Any, Any]()
        if b.dtype.base not in self.weights or b.dtype.lanes > 1 or b.scope_name != LOCAL or self.types.get(b.data) != b.dtype:
            return None
        for x in bound:
            inline[x.var] = substitute(x.value, inline)  # type: ignore[attr-defined]
            if is_large(inline[x.var]):  # type: ignore[attr-defined]
                return None
        at = self._first(substitute(store, inline), s.var, 2)
        value = None if at is None else self._pair(substitute(store.value, inline), s.var)
        if at is None or value is None:
            return None
        return replace(store, indices=(ramp(at, 2),), value=value, span=stmts_of(s.body)[0].span)  # type: ignore[no-any-return]

    def _pair(self, e: Expr, v: Var) -> Expr | None:
        """Both values of e as a pair; None unless e is a weight of a byte, with terms and factors common to both."""
        pair = e.dtype.with_lanes(2)
        if isinstance(e, Binary) and e.op in ("mul", "add", "sub") and e.dtype.base in self.weights:
            if v in free_vars(e.a) and v in free_vars(e.b):
                return None
            a, b = (self._pair(x, v) if v in free_vars(x) else Broadcast(x, 2, pair) for x in (e.a, e.b))
            return None if a is None or b is None else Binary(e.op, a, b, pair)
        return self._weights(e.value, v, pair) if isinstance(e, Cast) and e.dtype.base in self.weights else None

    def _weights(self, e: Expr, v: Var, to: Any) -> Call | None:
        """dequantise_pair of `byte >> shift & mask`, less a zero point; None for other values."""
        if isinstance(e, Cast) and e.dtype.is_int and e.dtype.lanes == 1:
            return self._weights(e.value, v, to)
        if isinstance(e, Binary) and e.op == "sub" and v not in free_vars(e.b):
            pair = self._weights(e.a, v, to)
            low, high = self.analyzer.interval(e.b)
            small = low is not None and low >= 0 and high is not None and high <= _MAX_ZERO_POINT and e.dtype.bits >= 16
            return replace(pair, args=(*pair.args, e.b)) if pair is not None and len(pair.args) == 1 and small else None
        inner = uncast(e.a) if isinstance(e, Binary) and e.op == "bitand" and isinstance(e.b, Const) else None
        if not isinstance(inner, Binary) or inner.op != "shr" or not isinstance(inner.a, Load) or inner.a.dtype.base != "uint8":
            return None
        byte, mask = inner.a, int(e.b.value)  # type: ignore[attr-defined]
        if v in free_vars(byte) or byte.dtype.lanes > 1 or not 0 < mask < _COUNTING[to.base] or mask & mask + 1:
            return None
        shifts = [self.analyzer.simplify(substitute(inner.b, {v: const(n, v.dtype)})) for n in range(2)]
        low, high = (int(x.value) if isinstance(x, Const) else -1 for x in shifts)
        if min(low, high) < 0 or mask << max(low, high) > 255:
            return None
        return call("dequantise_pair", (byte,), to, low=low, high=high, mask=mask)

    # ---- integers with few values -----------------------------------------------------------------------------------

    def _of_small_integer(self, e: Cast) -> Expr | None:
        most = _COUNTING.get(e.dtype.base, 0) if e.dtype.lanes == 1 else 0
        source = e.value.value if isinstance(e.value, Cast) else e.value
        if not most or not e.value.dtype.is_int or isinstance(source, (Load, Const)):
            return None
        low, high = self.analyzer.interval(e.value)
        if low is None or high is None or low <= -most or high - min(low, 0) >= most:
            return None
        return call("small_int_to_float", (e.value,), e.dtype, low=min(low, 0))


def _when(body: Stmt, x: Cast, var: Var) -> tuple[Expr, ...] | None:
    """The conditions, known in front of a loop over `var`, under which its body evaluates x: threads outside of them may not
    have written what it loads.  None where no such conditions are known."""
    found, inside = _whens(body, x), {var, *(b.var for b in walk(body, Bind))}
    conds = () if () in found else found.pop() if len(found) == 1 else None
    return None if conds is None or any(contains(c, Load, Call) or inside & free_vars(c) for c in conds) else conds


def _whens(n: Node, x: Cast) -> set[tuple[Expr, ...]]:
    """For each place below n where x stands, the conditions under which it is evaluated."""
    if x.same(n) or not contains(n, Cast):
        return {()} if x.same(n) else set()
    if isinstance(n, Select):
        a, b, out = (_whens(e, x) for e in (n.a, n.b, n.cond))
        return out | {()} if () in a and () in b else out | {(n.cond, *w) for w in a} | {(~n.cond, *w) for w in b}
    short = isinstance(n, Binary) and n.op in ("and", "or")
    last = {(n.a if n.op == "and" else ~n.a, *w) for w in _whens(n.b, x)} if short else set()  # type: ignore[attr-defined]
    return last.union(*(_whens(y, x) for y in children(n) if not (short and y is n.b)))  # type: ignore[attr-defined]


def _is_of_bytes(x: Cast) -> bool:
    """Whether a conversion is one of loaded integers of 8 bits to floats of 16 or 32 bits."""
    return isinstance(x.value, Load) and x.value.dtype.base in _BYTES and x.dtype.base in (*_COUNTING, "float32")


def _is_on_registers(form: Form, x: Stmt, loop_var: Var) -> bool:
    """Whether a statement in a loop of this form is the one that works on the registers."""
    if form.kind == "read":
        return isinstance(x, Store) and packed_source(x) is not None
    return isinstance(x, For) and sum_form(x, {loop_var: 0}) is not None


def _pack(floats: Load, to: Any) -> Call:
    return call("pack_pairs", (floats,), to)
