"""Apply masks only to tiles in which they change an element.

    for k in T.Pipelined(n):                             for k in T.Pipelined(n):
        …                                                    …
        for i, j in T.Parallel(128, 64):                     if not bx*128 >= k*64 + 63:
            P[i, j] = T.if_then_else(            ->              for i, j in T.Parallel(128, 64):
                bx*128 + i >= k*64 + j,                              P[i, j] = T.if_then_else(bx*128 + i >= k*64 + j,
                P[i, j], -inf)                                                                P[i, j], -inf)

A comparison of values that are affine in the variables of a parallel loop holds at every point of the loop if it holds at
the corner where it is tightest. That test needs no loop. The corner is a point of the loop, so the test computes nothing
that the loop itself does not compute.

Likewise min(abs(i - j), 64) is the number 64 in tiles that are far from the diagonal.

A tile that is filled with 0 only to initialise the accumulator of a GEMM is not filled: the GEMM clears it. Where the
initial value is a mask (0 where visible, -inf elsewhere), the GEMM clears the accumulator for tiles that are fully visible.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (Binary, Bind, Buffer, Call, Cast, Const, Evaluate, Expr, For, If, Launch, Load, Parallel, Select, Seq,
                         Stmt, Store, Unary, Var, binary, call, const, free_vars, is_const, is_large, logical, replace, rewrite,
                         seq, stmts_of, substitute, unary, walk, with_inner, EMPTY, FRAGMENT, LOGICAL, TRUE)
from tilelang.ops import Fill, Gemm

from ..analysis.divergence import Divergence
from ..analysis.effects import effects, expr_effects, hangs_on_threads
from ..analysis.guards import operands, with_ranges
from ..framework.pass_ import TILE, PassContext, pass_
from ..analysis.statements import is_zero, rename

LEAST_POINTS = 512  # points of a loop from which a test pays
_CORNERS = {"lt": 1, "le": 1, "gt": -1, "ge": -1}  # a op b is tightest where this * (a - b) is largest
_OPPOSITE = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


@pass_(needs=TILE, of=Launch)
def guard_masks(n: Launch, cx: PassContext) -> Any:
    """Apply each mask in a branch that runs only for tiles in which the mask changes an element.

    Keeps every element's value, bit by bit (a GEMM that clears its accumulator starts from +0, as the filled tile does).
    """
    return with_inner(n, _Masks(n).stmt)


class _Masks:
    """Rewrites one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.analyzer, self.uniform = launch, with_ranges(Analyzer(), launch, Launch, For), Divergence(launch)
        self.loops = 0  # number of enclosing serial loops

    def stmt(self, s: Any) -> Any:
        match s:
            case Seq():
                done = [self.stmt(x) for x in s.stmts]
                kept = _cleared(done)
                return s if len(kept) == len(done) and all(a is b for a, b in zip(kept, s.stmts)) else seq(*kept, span=s.span)
            case Parallel():
                return self._parallel(s) if self.loops else s
            case For() if s.plan.counted:
                return s  # the user's order and stage lists count the statements of the body
            case For():
                self.loops += 1
                out = with_inner(s, self.stmt)
                self.loops -= 1
                return out
        return with_inner(s, self.stmt)

    def _parallel(self, s: Parallel) -> Stmt:
        """The loop under the condition that one of its masks changes an element, where that can be computed."""
        extents = [e.value for e in s.extents if isinstance(e, Const)]
        if len(extents) != len(s.extents) or math.prod(extents) < LEAST_POINTS:
            return s
        found = _one_store(s.body)
        if found is None:
            return s
        cond, store = found
        points = dict(zip(s.vars, extents))
        if cond is not None:
            never = self._everywhere(cond, False, points)
            return s if never is None else self._unless(never, s, None)
        value = store.value
        if not isinstance(value, Select):
            return self._beyond_bounds(s, store, points)

        def old(e: Expr) -> bool:
            return isinstance(e, Load) and e.buffer is store.buffer and e.indices == store.indices

        turned = old(value.b) or is_zero(value.b)  # whether the "else" side is the one that unmasked elements take
        plain, other = (value.b, value.a) if turned else (value.a, value.b)
        # One condition may guard a load in the next one against an illegal address.
        if old(plain) and not any(isinstance(x, (Load, Call)) for e in (other, value.cond) for x in walk(e)):
            return self._one_by_one(s, store, value, not turned, points)
        test = self._everywhere(value.cond, not turned, points)
        if test is None:
            return s
        if old(plain):
            return self._unless(test, s, None)
        free, = rename([replace(s, body=replace(store, value=plain))])
        return self._unless(test, s, free)

    def _beyond_bounds(self, s: Parallel, store: Store, points: dict[Var, int]) -> Stmt:
        """The loop with a number in place of min or max of it and a distance of indices, for tiles that are all beyond it."""
        for x in walk(store.value, Binary) if store.buffer.scope_name == FRAGMENT else ():
            if x.op not in ("min", "max") or x.dtype != "float32" or not (
                    isinstance(x.b, Const) and abs(x.b.value) < 2**24 and x.b.value % 1 == 0):
                continue
            size = isinstance(x.a, Call) and x.a.op == "fabs"
            index = x.a.args[0] if size else x.a  # type: ignore[attr-defined]
            if not isinstance(index, Cast) or index.value.dtype != "int32":
                continue
            above, n = x.op == "min", const(int(x.b.value), "int32")
            test = binary("ge" if above else "le", index.value, n)
            if size:
                test = logical("or" if above else "and", test, binary("le" if above else "ge", index.value, unary("neg", n)))
            found = self._everywhere(test, True, points)
            if found is not None:
                bound = rewrite(store.value, lambda e, x=x: x.b if e is x else None, Binary)  # type: ignore[misc]
                free, = rename([replace(s, body=replace(store, value=bound))])
                return self._unless(found, s, free)
        return s

    def _one_by_one(self, s: Parallel, store: Store, value: Select, seen: bool, points: dict[Var, int]) -> Stmt:
        """Split a mask of several conditions into several masks, each under its own test: the diagonal of a causal mask and the
        end of the keys are seldom in one tile. seen: the value of the condition where nothing is masked."""
        join = "and" if seen else "or"
        tests = [(e, self._everywhere(e, seen, points)) for e in operands(value.cond, join)]
        always = [e for e, test in tests if test is None]
        if len(always) == len(tests):
            return s
        whole = [(functools.reduce(lambda a, b: logical(join, a, b), always), None)] if always else []
        out: list[Stmt] = []
        for e, test in [*whole, *((e, test) for e, test in tests if test is not None)]:
            masked, = rename([replace(s, body=replace(store, value=replace(value, cond=e)))])
            out.append(masked if test is None else self._unless(test, masked, None))
        return seq(*out, span=s.span)

    def _unless(self, test: Expr, masked: Stmt, free: Stmt | None) -> Stmt:
        test = self.analyzer.simplify(test)
        if self.analyzer.can_prove(test):
            return EMPTY if free is None else free
        if self.analyzer.can_prove(unary("not", test)):
            return masked
        masked = seq(Evaluate(call("keep_branch", (), "void")), masked, span=masked.span)
        if free is None:
            return If(_negated(test), masked, span=masked.span)
        return If(test, free, masked, span=masked.span)

    def _everywhere(self, e: Expr, value: bool, points: dict[Var, int]) -> Expr | None:
        """A test without the loop's variables under which e has this value at every point; None when there is none."""
        if not free_vars(e) & set(points):
            return None if self.uniform.divergent(e) else e if value else unary("not", e)
        if isinstance(e, Unary) and e.op == "not":
            return self._everywhere(e.a, not value, points)
        if isinstance(e, Binary) and e.op in LOGICAL:
            a, b = (self._everywhere(x, value, points) for x in (e.a, e.b))
            if (e.op == "and") is value:
                return None if a is None or b is None else logical("and", a, b)
            return a if b is None else b if a is None else logical("or", a, b)
        if isinstance(e, Binary) and e.op in _CORNERS and e.dtype.lanes == 1:
            return self._corner(e if value else replace(e, op=_OPPOSITE[e.op]), points)
        return None

    def _corner(self, e: Binary, points: dict[Var, int]) -> Expr | None:
        """The comparison at the corner where it is tightest."""
        if not e.a.dtype.is_int or e.a.dtype.is_unsigned:
            return None
        forms = [self.analyzer.linear(x) for x in (e.a, e.b)]
        atoms = [x for f in forms for x in f.terms]
        if any(not isinstance(x, Var) and (free_vars(x) & set(points)) for x in atoms):
            return None
        at: dict[Var, Expr] = {}
        for v, n in points.items():
            slope = _CORNERS[e.op] * (forms[0].terms.get(v, 0) - forms[1].terms.get(v, 0))
            at[v] = const(n - 1 if slope > 0 else 0, v.dtype)
        out = substitute(e, dict(at))
        return None if self.uniform.divergent(out) else out


def _one_store(body: Stmt) -> tuple[Expr | None, Store] | None:
    """(condition or None, store) of a loop body that is one store, or one under a condition, with bindings substituted."""
    names: dict[Var, Expr] = {}
    *binds, last = stmts_of(body) or (body,)
    for s in binds:
        if not isinstance(s, Bind):
            return None
        names[s.var] = substitute(s.value, dict(names))
        if is_large(names[s.var]):
            return None
    last = substitute(last, dict(names)) if names else last
    if isinstance(last, Store):
        return None, last
    if isinstance(last, If) and last.orelse is None and len(stmts_of(last.then)) == 1:
        inner = stmts_of(last.then)[0]
        return (last.cond, inner) if isinstance(inner, Store) else None
    return None


def _negated(e: Expr) -> Expr:
    """not e, written with comparisons."""
    if isinstance(e, Binary) and e.op in LOGICAL:
        return logical("or" if e.op == "and" else "and", _negated(e.a), _negated(e.b))
    if isinstance(e, Binary) and e.op in _OPPOSITE and e.a.dtype.is_int:
        return replace(e, op=_OPPOSITE[e.op])
    return unary("not", e)


# ---- GEMMs that clear their accumulator ----------------------------------------------------------------------------------


def _cleared(stmts: list[Stmt]) -> list[Stmt]:
    """The statements, where a GEMM clears its accumulator instead of adding to a tile of zeros."""
    out = list(stmts)
    for n, s in enumerate(stmts):
        found = _zeros(s)
        if found is None:
            continue
        tile, test, rest = found
        if hangs_on_threads(test):
            continue
        asked = {e.storage for e in expr_effects(test)}
        for m in range(n + 1, len(out)):
            later: Any = out[m]
            touched = list(effects(later))
            if not any(e.storage is tile.data for e in touched):
                if any(e.writes and e.storage in asked for e in touched):
                    break  # the GEMM would evaluate the condition again, on changed values
                continue
            if isinstance(later, Gemm) and later.c.buffer is tile and later.c.is_full and is_const(
                    later.clear_accum, False) and not any(r.buffer.data is tile.data for r in (later.a, later.b)):
                out[n], out[m] = rest, replace(later, clear_accum=test)
            break
    return [s for s in out if s is not EMPTY]


def _zeros(s: Any) -> tuple[Buffer, Expr, Stmt] | None:
    """(fragment, condition under which s only fills it with zeros, what s does otherwise)."""
    if isinstance(s, Fill) and is_zero(s.value) and s.dst.is_full and s.dst.buffer.scope_name == FRAGMENT:
        return s.dst.buffer, TRUE, EMPTY
    if isinstance(s, If) and isinstance(s.then, Parallel) and s.orelse is not None:
        got = _zeros(s.then)
        covered = {e.storage for e in effects(s.orelse) if e.writes}
        if got is not None and got[1] is TRUE and covered == {got[0].data}:
            return got[0], s.cond, If(_negated(s.cond), s.orelse, span=s.span)
    if isinstance(s, Parallel) and isinstance(s.body, Store) and is_zero(s.body.value):
        b = s.body.buffer
        whole = s.body.indices == s.vars and all(is_const(e, n) for e, n in zip(s.extents, b.shape))
        if whole and b.scope_name == FRAGMENT:
            return b, TRUE, EMPTY
    return None
