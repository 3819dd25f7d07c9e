"""Which accesses of tensors need a guard, and where one test in front of a nest replaces the guards in it."""

from __future__ import annotations

from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Assert, Bind, Buffer, Call, Evaluate, Expr, For,
                         Func, If, Launch, Load, Node, Parallel, Region, Seq, Stmt, Store, TileOp, While, rebuild,
                         replace, GLOBAL)
from tilelang.ir.visitor import mapped
from tilelang.ir.children import contains
from tilelang.target.cpu_launch import (
    CheckedAddress,
    CheckedLoad,
    CheckedStore,
    Collective,
    CpuLaunch,
    Masked,
    NestVersions,
    OncePerBlock,
    WarpRoleCode,
    ThreadLoop,
)
from tilelang.target.cpu_ranges import is_in_range, with_indices, with_loop, with_nest, with_value

from ..framework.pass_ import CPU, PassContext, pass_
from .nest_guards import find_nest_guards
from .tile_loops import plan_tile_loops

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
    return replace(func, body=_host(func.body, _Guards(guarded, Analyzer(), frozenset())))


def _host(s: Stmt, work: _Guards) -> Stmt:
    """Host statements: nothing is known of their values."""
    match s:
        case CpuLaunch():
            return _launch(s, work.guarded)
        case Seq():
            return replace(s, stmts=tuple(_host(x, work) for x in s.stmts))
        case For():
            return replace(s, start=work.expr(s.start), extent=work.expr(s.extent), body=_host(s.body, work))
        case If():
            orelse = None if s.orelse is None else _host(s.orelse, work)
            return replace(s, cond=work.expr(s.cond), then=_host(s.then, work), orelse=orelse)
        case Bind():
            return replace(s, value=work.expr(s.value))
        case Assert():
            return replace(s, cond=work.expr(s.cond))
    return s


def _launch(s: CpuLaunch, guarded: bool) -> CpuLaunch:
    codes = tuple(_code(s.launch, c, guarded) for c in s.codes)
    return replace(s, codes=codes, when_null=None if s.when_null is None else _launch(s.when_null, guarded))


def _code(s: Launch, code: WarpRoleCode, guarded: bool) -> WarpRoleCode:
    work = _Guards(guarded, with_indices(Analyzer(), s, code.warp_role), code.values.varying)
    return WarpRoleCode(code.warp_role, work.stmt(code.body), code.values, code.scratch)


class _Guards:
    """Visits statements in the order in which they are printed.

    analyzer: ranges of values at this place.  varying: Vars that differ between threads.  cleared: (id of an access, dimension)
    that a test in front of the nest proves.
    """

    def __init__(self, guarded: bool, analyzer: Analyzer, varying: Any) -> None:
        self.guarded, self.analyzer, self.varying = guarded, analyzer, varying
        self.cleared: set[tuple[int, int]] = set()
        self.in_nest, self.in_threads = False, False

    # ---- statements -----------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        """The statement with its accesses marked."""
        match s:
            case Seq():
                return replace(s, stmts=mapped(self.stmt, s.stmts))
            case ThreadLoop():
                self.in_threads = True
                body = self.stmt(s.body)
                self.in_threads = False
                return replace(s, body=body)
            case Collective() | OncePerBlock():
                return replace(s, body=self.stmt(s.body))
            case Masked():
                mask, live = self.expr(s.mask), None if s.live is None else self.expr(s.live)
                return replace(s, mask=mask, live=live, body=self.stmt(s.body))
            case For():
                return self._for(s)
            case While():
                cond = self.expr(s.cond)
                return replace(s, cond=cond, body=self.stmt(s.body))
            case If():
                return self._if(s)
            case Parallel():
                return self._parallel(s)
            case TileOp():
                return self._tile_op(s)
        return self._simple(s)

    def _simple(self, s: Stmt) -> Stmt:
        """A statement without statements in it."""
        match s:
            case Bind():
                value = self.expr(s.value)
                if not (s.var in self.varying and self.in_threads):
                    self.analyzer = with_value(self.analyzer, s)
                return replace(s, value=value)
            case Store():
                value = self.expr(s.value)
                guards = self._guards(s, s.buffer, s.indices)
                indices = mapped(self.expr, s.indices)
                if s.buffer.scope() != GLOBAL:
                    return replace(s, indices=indices, value=value)
                return CheckedStore(s.buffer, indices, value, guards, s.span)
            case Evaluate():
                return replace(s, call=self.expr(s.call))
            case Alloc() if s.init is not None:
                return replace(s, init=self.expr(s.init))
        return s

    def _for(self, s: For) -> Stmt:
        start, extent = self.expr(s.start), self.expr(s.extent)
        self.analyzer = with_loop(self.analyzer, s)
        return replace(s, start=start, extent=extent, body=self.stmt(s.body))

    def _if(self, s: If) -> Stmt:
        cond, outside = self.expr(s.cond), self.analyzer
        sides: list[Stmt | None] = []
        for side in (s.then, s.orelse):
            sides.append(None if side is None else self.stmt(side))
            self.analyzer = outside
        return replace(s, cond=cond, then=sides[0], orelse=sides[1])

    # ---- nests ------------------------------------------------------------------------------------------------------------

    def _parallel(self, s: Parallel) -> Stmt:
        """A nest; in two versions, when a test of the corners of its iteration space proves some accesses."""
        if self.in_nest or not self.guarded:
            return self._nest(s)
        self.in_nest = True
        found = find_nest_guards(self.analyzer, s)
        out: Stmt
        if not found.cleared:
            out = self._nest(s)
        else:
            tests = found.range_tests(self.analyzer)
            self.cleared = found.cleared
            out = inside = self._nest(s)
            self.cleared = set()
            if tests:
                out = NestVersions(tests, inside, self._nest(s), span=s.span)
        self.in_nest = False
        return out

    def _nest(self, s: Parallel) -> Parallel:
        outside = self.analyzer
        extents = mapped(self.expr, s.extents)
        self.analyzer = with_nest(self.analyzer, s)
        body = self.stmt(s.body)
        self.analyzer = outside
        return replace(s, extents=extents, body=body)

    def _tile_op(self, s: TileOp) -> Stmt:
        op = rebuild(s, self._field)
        return plan_tile_loops(op, self.analyzer, self.guarded) or op

    def _field(self, v: Any) -> Any:
        """A field of a tile operation or an expression with the expressions in it marked."""
        if isinstance(v, Expr):
            return self.expr(v)
        if isinstance(v, Region):
            return rebuild(v, self._field)
        if type(v) is tuple and v:
            return mapped(self._field, v)
        return v

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
