"""Which accesses of tensors need a guard, and where one test in front of a nest replaces the guards in it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Bind, Buffer, Call, Const, Expr, For, Func, Load, Node, Parallel, Region, Stmt, Store,
                         TileOp, Var, binary, const, contains, free_vars, is_large, rebuild, replace, substitute, walk, GLOBAL)
from tilelang.ir.visitor import mapped
from tilelang.ir.record import state
from tilelang.ops import AtomicTile, Copy, Fill, Transpose
from tilelang.ops.pairing import iteration_space
from tilelang.target.cpu_launch import (CheckedAddress, CheckedLoad, CheckedStore, CpuLaunch, NestVersions, WarpRoleCode,
                                        TileLoops, TileSide, RangeTest)
from tilelang.target.cpu_ranges import is_in_range, with_indices

from ..analysis.guards import with_ranges
from ..framework.pass_ import CPU, PassContext, pass_

_NO_GUARD = ("atomic_load", "atomic_store")


@pass_(needs=CPU)
def guard_accesses(func: Func, cx: PassContext) -> Func:
    """Accesses of tensors with the dimensions whose index is not proven to be inside.

        A[bx * 64 + i]                       ->  A[bx * 64 + i] guarded in dimension 0
        for i in T.Parallel(64):                 if bx * 64 + 63 < n: the nest without guards
            B[bx * 64 + i] = A[bx * 64 + i]      else:                the nest with guards
        copy(A[bx * 64 : …], s)                  a loop nest, clipped to A

    Keeps: each access that may lie outside of a tensor has a guard or a test in front of it, unless
    tl.disable_safe_memory_legalize says so.
    """
    settings = dict(func.facts.pass_configs)
    guarded = not settings.get("tl.disable_safe_memory_legalize", False)
    return replace(func, body=_Guards(guarded, with_ranges(Analyzer(), func.body)).stmt(func.body))


def _launch(s: CpuLaunch, guarded: bool) -> CpuLaunch:
    def code(c: WarpRoleCode) -> WarpRoleCode:
        known = with_ranges(with_indices(Analyzer(), s.launch, c.warp_role), c.body, but=c.values.varying)
        return c.having(_Guards(guarded, known).stmt(c.body))

    return replace(s, codes=tuple(map(code, s.codes)), when_null=None if s.when_null is None else _launch(s.when_null, guarded))


class _Guards:
    """Visits statements in the order in which they are printed.

    analyzer: ranges of values.  cleared: (id of an access, dimension) that a test in front of the nest proves.
    """

    def __init__(self, guarded: bool, analyzer: Analyzer) -> None:
        self.guarded, self.analyzer, self.in_nest = guarded, analyzer, False
        self.cleared: set[tuple[int, int]] = set()

    # ---- statements -----------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        """The statement with its accesses marked."""
        match s:
            case CpuLaunch():
                return _launch(s, self.guarded)
            case Store() if s.buffer.scope() == GLOBAL:
                value = self.expr(s.value)
                guards = self._guards(s, s.buffer, s.indices)
                return CheckedStore(s.buffer, mapped(self.expr, s.indices), value, guards, s.span)
            case Parallel():
                return self._parallel(s)
            case TileOp():
                op = rebuild(s, self._field)
                return plan_tile_loops(op, self.analyzer, self.guarded) or op
        out: Stmt = rebuild(s, self._field)
        return out

    # ---- nests ------------------------------------------------------------------------------------------------------------

    def _parallel(self, s: Parallel) -> Stmt:
        """A nest; in two versions, when a test of the corners of its iteration space proves some accesses."""
        if self.in_nest or not self.guarded:
            return rebuild(s, self._field)  # type: ignore[no-any-return]
        self.in_nest = True
        found = _Nest(Analyzer(self.analyzer.env))
        found.visit(s)
        self.cleared = found.cleared
        inside = rebuild(s, self._field)
        self.cleared = set()
        tests = found.range_tests(self.analyzer)
        out = NestVersions(tests, inside, rebuild(s, self._field), span=s.span) if tests else inside
        self.in_nest = False
        return out  # type: ignore[no-any-return]

    def _field(self, v: Any) -> Any:
        """A field of a statement or an expression with the accesses in it marked."""
        if isinstance(v, Stmt):
            return self.stmt(v)
        if isinstance(v, Expr):
            return self.expr(v)
        if isinstance(v, Region):
            return rebuild(v, self._field)
        return mapped(self._field, v) if type(v) is tuple and v else v

    # ---- expressions ------------------------------------------------------------------------------------------------------

    def expr(self, e: Any) -> Any:
        """The expression with its accesses marked."""
        if not contains(e, Load, Call):
            return e
        match e:
            case Load():
                guards = self._guards(e, e.buffer, e.indices)
                indices = mapped(self.expr, e.indices)
                if e.buffer.scope() != GLOBAL:
                    return replace(e, indices=indices)
                return CheckedLoad(e.buffer, indices, e.dtype, guards, e.span)
            case Call():
                return self._call(e)
        return rebuild(e, self._field)

    def _call(self, e: Call) -> Call:
        first = e.args[0] if e.args else None
        if isinstance(first, AddressOf):
            if first.buffer.scope() == GLOBAL and (e.op == "ldg" or e.op.startswith("atomic_") and e.op not in _NO_GUARD):
                guards = self._guards(first, first.buffer, first.indices)
                place = CheckedAddress(first.buffer, mapped(self.expr, first.indices), first.dtype, guards, first.span)
                return replace(e, args=(place, *mapped(self.expr, e.args[1:])))
        return rebuild(e, self._field)

    # ---- accesses ---------------------------------------------------------------------------------------------------------

    def _guards(self, n: Node, b: Buffer, indices: tuple[Expr, ...]) -> tuple[int, ...]:
        """Dimensions of an access of a tensor that need a guard."""
        if not self.guarded or b.scope() != GLOBAL:
            return ()
        if any(i.dtype.lanes > 1 for i in indices):
            return tuple(range(len(b.shape)))
        return tuple(d for d, (e, size) in enumerate(zip(indices, b.shape))
                     if (id(n), d) not in self.cleared and not is_in_range(self.analyzer, e, size))


# ---- tile loops -------------------------------------------------------------------------------------------------------------
# Tile operations on elements become loop nests: which loop walks which dimension, and which may run outside of a tensor.


def plan_tile_loops(op: TileOp, a: Analyzer, guarded: bool) -> TileLoops | None:
    """The loop nest of a copy, transpose, fill or atomic update; None for other operations.

        copy(A[bx * 64, 0 : 64], s[0 : 64])    loops: 64;  A: dimension 1 is loop 0, 0 is guarded;  s: dimension 0 is loop 0

    a: ranges at this place.  guarded: accesses outside of a tensor are skipped.
    """
    if isinstance(op, (Copy, Transpose)):
        other: Any = op.src
    elif isinstance(op, (AtomicTile, Fill)):
        other = op.value if isinstance(op.value, Region) else None
    else:
        return None
    dst: Region = op.dst
    _, *dims = iteration_space(dst, other)
    loops = [{d: k for d, k in enumerate(of) if k is not None} for of in dims]
    extents, n = tuple(dst.extents[d] for d in loops[0]), len(loops[0])
    if isinstance(op, Transpose) and not any(isinstance(e, int | Const) and int(e) == 1 for e in dst.extents[-2:]):
        loops[1] = {d: {n - 2: n - 1, n - 1: n - 2}.get(k, k) for d, k in loops[1].items()}
    to, src = (None if r is None else _side(r, of, extents, a, guarded) for r, of in zip((dst, other), loops))
    return TileLoops(op, extents, to, src, span=op.span)  # type: ignore[arg-type]


def _side(r: Region, loop_of: dict[int, int], extents: tuple[Any, ...], a: Analyzer, guarded: bool) -> TileSide:
    clipped: dict[int, int] = {}
    fixed: list[int] = []
    for d, size in enumerate(r.buffer.shape if guarded and r.buffer.scope() == GLOBAL else ()):
        k = loop_of.get(d)
        start = r.mins[d]
        if k is None:
            if not is_in_range(a, start, size):
                fixed.append(d)
            continue
        e = extents[k]
        if not (isinstance(e, int) and e > 0 and is_in_range(a, start, size) and is_in_range(a, start + (e - 1), size)):
            clipped[k] = d
    return TileSide(tuple(loop_of.get(d, -1) for d in range(len(r.mins))), tuple(clipped.items()), tuple(fixed))


# ---- nest guards ------------------------------------------------------------------------------------------------------------
# Which guards of a Parallel nest a test before the nest can replace.
#
# The index of a guarded access, linear in the nest's variables, is smallest and largest at corners of the iteration
# space; when both lie inside the buffer, no iteration needs the guard.
#
#     for i in T.Parallel(128): B[bx * 128 + i] = A[bx * 128 + i]
#       ->  if 0 <= bx * 128 and bx * 128 + 127 < N:  the nest without guards   else:  the nest with guards


@state
class _Nest:
    """The guards of a nest that a test of values known before it decides (see above).

    cleared: (id of an access, dimension) that the tests prove.  tests: what is compared before the nest.
    ranges: first and last value of a loop's variable.  inlined: values of bindings.  opaque: variables whose values are known
    inside the nest only.
    """

    analyzer: Analyzer
    cleared: set[tuple[int, int]] = field(default_factory=set)
    tests: dict[tuple[Expr, Expr, Any], None] = field(default_factory=dict)
    ranges: dict[Var, tuple[Expr, Expr]] = field(default_factory=dict)
    inlined: dict[Var, Expr] = field(default_factory=dict)
    opaque: set[Var] = field(default_factory=set)

    def visit(self, nest: Parallel) -> None:
        for s in walk(nest, Parallel, For, Bind, Store, Load, AddressOf):
            match s:
                case Parallel():
                    for v, e in zip(s.vars, s.extents):
                        self.enter(v, const(0, v.dtype), e)
                case For():
                    self.enter(s.var, s.start, s.extent)
                case Bind():
                    value = substitute(s.value, self.inlined)
                    if s.var.dtype.is_signed and not contains(value, Load, Call) and not is_large(value):
                        self.inlined[s.var] = value
                    else:
                        self.opaque.add(s.var)
                case _:
                    self.access(s, s.buffer, s.indices)

    def range_tests(self, a: Analyzer) -> tuple[RangeTest, ...]:
        """The tests whose answer is not known already."""
        return tuple(RangeTest(low, high, size, not (isinstance(n := a.bounds_of(a.linear(low))[0], int) and n >= 0))
                     for low, high, size in self.tests
                     if not (isinstance(size, int) and is_in_range(a, low, size) and is_in_range(a, high, size)))

    def enter(self, v: Var, start: Expr, extent: Expr) -> None:
        start, extent = substitute(start, self.inlined), substitute(extent, self.inlined)
        if contains(start, Load, Call) or contains(extent, Load, Call):
            self.opaque.add(v)
        else:
            self.ranges[v] = (start, binary("sub", binary("add", start, extent), const(1, extent.dtype)))

    def access(self, n: Node, b: Buffer, indices: tuple[Expr, ...]) -> None:
        if b.scope() != GLOBAL or len(indices) != len(b.shape):
            return
        for d, (e, size) in enumerate(zip(indices, b.shape)):
            if e.dtype.lanes > 1 or not e.dtype.is_signed:
                continue
            corners = _corners(self.analyzer, substitute(e, self.inlined), self.ranges, self.opaque)
            if corners is not None:
                self.cleared.add((id(n), d))
                self.tests[corners[0], corners[1], size] = None


def _corners(a: Analyzer, e: Expr, ranges: dict[Var, tuple[Expr, Expr]], opaque: set[Var]) -> tuple[Expr, Expr] | None:
    """Least and greatest value of e over the nest as expressions of values known before it; None when not linear."""
    form = a.linear(e)
    low = high = e
    for t in (*form.terms, *free_vars(e) - form.terms.keys()):  # also what e names without depending on it
        if isinstance(t, Var) and t in ranges:
            start, last = ranges[t]
            if any(x in ranges or x in opaque for x in free_vars(start) | free_vars(last)):
                return None  # a bound that depends on an outer loop of the nest
            c = form.terms.get(t, 0)
            low = substitute(low, {t: start if c > 0 else last})
            high = substitute(high, {t: last if c > 0 else start})
        elif any(isinstance(n, (Load, Call)) or n in ranges or n in opaque for n in walk(t) if isinstance(
                n, (Load, Call, Var))):
            return None  # memory may change inside the nest, and other functions of the variables have no corners
    return low, high
