"""Which accesses of tensors need a guard, and where one test in front of a nest replaces the guards in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import (AddressOf, Alloc, Assert, Binary, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For,
                         Func, If, Launch, Load, Node, Parallel, Region, Select, Seq, Stmt, Store, TileOp, Var, While, rebuild,
                         replace, GLOBAL)
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
from tilelang.target.cpu_ranges import is_in_range, thread_ranges, with_indices, with_loop, with_nest, with_value

from ..framework.pass_ import CPU, PassContext, pass_
from .check_bounds import check_bounds
from .nest_guards import find_nest_guards
from .tile_loops import plan_tile_loops

_NO_GUARD = ("atomic_load", "atomic_store")
_BY_ADDRESS = ("wgmma_descriptor", "tma_load")  # calls whose first operand is an address in shared memory


@pass_(needs=CPU)
def guard_accesses(func: Func, cx: PassContext) -> Func:
    """Accesses of tensors with the dimensions whose index is not proven to be inside.

        A[bx * 64 + i]                       ->  A[bx * 64 + i] guarded in dimension 0
        for i in T.Parallel(64):                 if bx * 64 + 63 < n: the nest without guards
            B[bx * 64 + i] = A[bx * 64 + i]      else:                the nest with guards
        copy(A[bx * 64 : …], s)                  a loop nest, clipped to A

    Keeps: each access that may lie outside of a tensor has a guard or a test in front of it, unless
    tl.disable_safe_memory_legalize says so.
    Raises cpu-out-of-bounds for accesses that certainly lie outside of memory of the block.
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
    work.swept.update(v for v, n in zip(s.block_vars, s.grid) if isinstance(n, Const) and int(n) > 0)
    all_threads = code.warp_role.ranges == ((0, s.num_threads),)
    work.swept.update(v for v, n, r in zip(s.thread_vars, s.threads, thread_ranges(s, code.warp_role))
                      if all_threads or n == 1 or r != (0, n))
    return WarpRoleCode(code.warp_role, work.stmt(code.body), code.values, code.scratch)


class _Guards:
    """Visits statements in the order in which they are printed.

    analyzer: ranges of values at this place.  varying: Vars that differ between threads.  swept: variables that take every
    value of their range.  maybe: > 0 where code may not run for every value of these.  cleared: (id of an access, dimension)
    that a test in front of the nest proves.  span: the user's place.
    """

    def __init__(self, guarded: bool, analyzer: Analyzer, varying: Any) -> None:
        self.guarded, self.analyzer, self.varying = guarded, analyzer, varying
        self.swept: set[Var] = set()
        self.cleared: set[tuple[int, int]] = set()
        self.maybe, self.in_nest, self.in_threads = 0, False, False
        self.span: Any = None

    @contextmanager
    def _under_condition(self, some: bool = True) -> Iterator[None]:
        self.maybe += some
        yield
        self.maybe -= some

    # ---- statements -----------------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Stmt:
        """The statement with its accesses marked."""
        self.span = s.span or self.span
        match s:
            case Seq():
                return replace(s, stmts=self._all(s.stmts))
            case ThreadLoop():
                self.in_threads = True
                body = self.stmt(s.body)
                self.in_threads = False
                return replace(s, body=body)
            case Collective() | OncePerBlock():
                return replace(s, body=self.stmt(s.body))
            case Masked():
                mask, live = self.expr(s.mask), None if s.live is None else self.expr(s.live)
                with self._under_condition():
                    return replace(s, mask=mask, live=live, body=self.stmt(s.body))
            case For():
                return self._for(s)
            case While():
                cond = self.expr(s.cond)
                with self._under_condition():
                    return replace(s, cond=cond, body=self.stmt(s.body))
            case If():
                return self._if(s)
            case Parallel():
                return self._parallel(s)
            case TileOp():
                return self._tile_op(s)
        return self._simple(s)

    def _all(self, stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        out = tuple(map(self.stmt, stmts))
        return stmts if all(a is b for a, b in zip(out, stmts)) else out

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
                self._check(s.buffer, s.indices, s.span)
                guards = self._guards(s, s.buffer, s.indices)
                indices = self._exprs(s.indices)
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
        with self._under_condition(self._may_skip((s.var,), (s.start, s.extent), s.extent, s.body)):
            return replace(s, start=start, extent=extent, body=self.stmt(s.body))

    def _may_skip(self, loop_vars: tuple[Var, ...], bounds: tuple[Expr, ...], count: Any, body: Stmt) -> bool:
        """Whether a loop may skip values of its variables, or statements of its body."""
        counts = count if isinstance(count, tuple) else (count,)
        constant = all(isinstance(b, Const) for b in bounds) and all(int(n) > 0 for n in counts)
        if constant:
            self.swept.update(loop_vars)
        return not constant or contains(body, Break, Continue)

    def _if(self, s: If) -> Stmt:
        cond, outside = self.expr(s.cond), self.analyzer
        sides: list[Stmt | None] = []
        for side in (s.then, s.orelse):
            with self._under_condition():
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
        extents = self._exprs(s.extents)
        self.analyzer = with_nest(self.analyzer, s)
        with self._under_condition(self._may_skip(s.vars, s.extents, s.extents, s.body)):
            body = self.stmt(s.body)
        self.analyzer = outside
        return replace(s, extents=extents, body=body)

    def _tile_op(self, s: TileOp) -> Stmt:
        for a in s.accesses():  # type: ignore[attr-defined]
            r = a.region
            self._check(r.buffer, r.mins, r.span or s.span, r.extents)
        op = rebuild(s, self._field)
        return plan_tile_loops(op, self.analyzer, self.guarded) or op

    def _field(self, v: Any) -> Any:
        """A field of a tile operation or an expression with the expressions in it marked."""
        if isinstance(v, Expr):
            return self.expr(v)
        if isinstance(v, Region):
            return rebuild(v, self._field)
        if type(v) is tuple and v:
            out = tuple(map(self._field, v))
            return v if all(a is b for a, b in zip(out, v)) else out
        return v

    # ---- expressions ------------------------------------------------------------------------------------------------------

    def _exprs(self, es: tuple[Expr, ...]) -> tuple[Expr, ...]:
        out = tuple(map(self.expr, es))
        return es if all(a is b for a, b in zip(out, es)) else out

    def expr(self, e: Any) -> Any:
        """The expression with its accesses marked."""
        if not contains(e, Load, Call):
            return e
        match e:
            case Load():
                self._check(e.buffer, e.indices, e.span)
                guards = self._guards(e, e.buffer, e.indices)
                indices = self._exprs(e.indices)
                if e.buffer.scope() != GLOBAL:
                    return replace(e, indices=indices)
                return CheckedLoad(e.buffer, indices, e.dtype, guards, e.span)
            case Call():
                return self._call(e)
            case Binary(op="and" | "or") if e.dtype.lanes == 1:
                a = self.expr(e.a)
                with self._under_condition():
                    return replace(e, a=a, b=self.expr(e.b))
            case Select() if e.lazy and e.cond.dtype.lanes == 1:
                cond = self.expr(e.cond)
                with self._under_condition():
                    return replace(e, cond=cond, a=self.expr(e.a), b=self.expr(e.b))
        return rebuild(e, self._field)

    def _call(self, e: Call) -> Call:
        first = e.args[0] if e.args else None
        if isinstance(first, AddressOf):
            if e.op in _BY_ADDRESS:
                self._check(first.buffer, first.indices, e.span)
            if first.buffer.scope() == GLOBAL and (e.op == "ldg" or e.op.startswith("atomic_") and e.op not in _NO_GUARD):
                guards = self._guards(first, first.buffer, first.indices)
                place = CheckedAddress(first.buffer, self._exprs(first.indices), first.dtype, guards, first.span)
                return replace(e, args=(place, *self._exprs(e.args[1:])))
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

    def _check(self, b: Buffer, indices: tuple[Expr, ...], span: Any, extents: tuple[Any, ...] = ()) -> None:
        if not self.maybe and not any(i.dtype.lanes > 1 for i in indices):
            check_bounds(self.analyzer, self.swept, b, indices, span or self.span, extents)


__all__ = ["guard_accesses"]
