"""Whole-program checks with errors at the user's line, and the few rewrites that all targets share."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from tilelang.arith import Analyzer
from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import (AddressOf, Alloc, Binary, Bind, Break, Buffer, Call, Const, Expr, For, Func, If, Load, Node, Parallel,
                         Ramp, Region, Shuffle, Stmt, Store, TileOp, Unary, Var, While, convert, free_vars, inner, load,
                         replace, rewrite, rewrite_launches, seq, statements, stmts_of, walk, with_options, DYNAMIC, FRAGMENT,
                         LOCAL, STATIC, VARIABLE)
from tilelang.ir.verify import verify
from tilelang.ops import AtomicTile
from tilelang.target.tensor_map import REDUCE_ADD

from .aliasing import parameter_names
from .laid_out_arrays import local_fragments
from ..analysis.guards import with_ranges
from ..analysis.effects import effects, own_effects
from ..analysis.index_width import widen_indices
from ..framework.pass_ import TILE, PassConfigKey, PassContext, pass_

register("parallel-nested", ValueError, "a parallel loop stands inside another, with other statements in between",
         expected="one header for both: for i, j in T.Parallel(m, n)", found="a T.Parallel inside another")
register("parallel-pipelined", ValueError, "a pipelined loop stands inside a parallel loop",
         expected="the pipelined loop outside", found="T.Pipelined inside T.Parallel")
register("parallel-tile-op", ValueError, "a tile operation stands inside a parallel loop", expected="elementwise operations")
register("parallel-symbolic", ValueError, "a parallel loop of run-time extent indexes a fragment",
         expected="an extent known while compiling")
register("parallel-local", ValueError, "a per-thread array is indexed by a parallel loop variable",
         expected="a loop that each thread runs by itself, or a fragment")
register("break-in-parallel", ValueError, "break in T.Parallel, whose iterations have no order", "use T.serial",
         expected="a loop whose iterations run in order", found="break in a T.Parallel loop")
register("out-of-scope", RuntimeError, "a value is used outside the loop, branch or block that defines it",
         expected="a value used in the loop, branch or block that defines it")
register("undefined-symbol", ValueError, "a variable has no value: it is no parameter and in no tensor's shape",
         expected="a parameter, or a dimension of one")

register_warning("uninitialized", "a buffer of a block is read before anything is written to it")
CHECK = "[Tilelang Semantic Check]"
_PRIVATE = (LOCAL, VARIABLE, FRAGMENT, STATIC, DYNAMIC)


@pass_(needs=TILE)
def legalize(func: Func, cx: PassContext) -> Func:
    """Reject programs without defined semantics, and normalise the others.

    Rewrites: per-thread arrays with the layout of a fragment become fragments; directly nested parallel loops become one; an
    index that is negative for all values of its loop variables counts from the end of its dimension; indices of dimensions
    that may exceed 32 bits are computed in 64 bits; on the CPU, a launch that leaves its number of threads open (any_threads)
    has one thread a block.
    Checks (off with tl.disable_prelower_semantic_check): parallel loops hold only element-wise code; variables have values.
    Warns about buffers that are read before they are written (off with tl.disable_buffer_init_check). With tirx.noalias =
    False every tensor parameter may alias others.
    """
    func = local_fragments(func)
    func = widen_indices(rewrite(wrap_negative(func), _joined, Parallel))
    check_symbols(func)
    if not cx.option(PassConfigKey.TL_DISABLE_PRELOWER_SEMANTIC_CHECK):
        check_parallel(func)
    if not cx.option(PassConfigKey.TL_DISABLE_BUFFER_INIT_CHECK):
        warn_uninitialized(func)
    check_tma_reductions(func, cx.target)
    if cx.target is not None and cx.target.is_cpu:
        func = rewrite_launches(func, lambda s: replace(
            with_options(s, any_threads=None), threads=(1, 1, 1)) if s.plan.any_threads else None)
    if not cx.option(PassConfigKey.TIR_NOALIAS):
        func = with_options(func, may_alias=parameter_names(func))
    return func


def check_tma_reductions(func: Func, target: Any) -> None:
    """Check that T.atomic_add(use_tma=True) has a target with TMA and an element type that TMA can add."""
    for s in statements(func.body):
        if isinstance(s, AtomicTile) and s.plan.use_tma:
            if target is not None and not getattr(target, "has_tma", False):
                raise error("atomic-option", f"use_tma requires a CUDA target with TMA support (SM90+), found {target}",
                            expected="a CUDA target with TMA (sm_90 or newer)", found=str(target), span=s.span,
                            hint="leave it out")
            if str(s.dst.dtype) not in REDUCE_ADD or not s.by_tma:
                raise error("atomic-option", f"TMA atomic add does not support dtype {s.dst.dtype} in order "
                            f"{s.plan.memory_order or 'relaxed'}",
                            expected="an element type and order that TMA adds",
                            found=f"{s.dst.dtype}, {s.plan.memory_order or 'relaxed'}", span=s.span, hint="leave it out")


# ---- rewrites -------------------------------------------------------------------------------------------------------


def _joined(x: Parallel) -> Node | None:
    """A parallel loop with the loop that is all of its body, in one."""
    body = stmts_of(x.body)
    if len(body) == 1 and isinstance(body[0], Parallel):
        b = body[0]
        if not any(v in x.vars for e in b.extents for v in free_vars(e)):
            attrs = tuple(sorted({**dict(b.attrs), **dict(x.attrs)}.items()))
            plan = b.plan.having(**x.plan.given())
            return Parallel((*x.vars, *b.vars), (*x.extents, *b.extents), b.body, attrs, plan, x.span)
    return None


def wrap_negative(func: Func) -> Func:
    """Indices that are negative over the whole range of their loop variables count from the end of their dimension."""
    lowered: set[Var] = set()  # variables bound to values that may be negative
    for x in walk(func.body, Bind):
        if _may_be_negative(x.value, lowered):
            lowered.add(x.var)
    if not any(_may_be_negative(i, lowered) for x in walk(func.body, Load, Store, AddressOf, Region) for i in _indices(x)):
        return func
    known = with_ranges(Analyzer(), func.body)

    def below(i: Expr) -> list[bool]:
        """For each lane of an index, whether it is always negative."""
        if not _may_be_negative(i, lowered):
            return [False]
        of_lanes = [i.base + i.stride * k for k in range(i.lanes)] if isinstance(i, Ramp) else [i]
        return [(high := known.interval(e)[1]) is not None and high < 0 for e in of_lanes]

    def counted(x: Any) -> Node:
        lanes = [below(i) for i in _indices(x)]
        x = _from_ends(x, [all(of) for of in lanes]) if any(map(all, lanes)) else x
        partly = isinstance(x, (Load, Store)) and lanes and any(lanes[-1]) and not all(lanes[-1])
        return _by_lanes(x, lanes[-1]) if partly else x

    return rewrite(func, counted, Load, Store, AddressOf, Region)  # type: ignore[no-any-return]


def _indices(x: Any) -> tuple[Expr, ...]:
    return x.mins if isinstance(x, Region) else x.indices  # type: ignore[no-any-return]


def _from_ends(x: Any, below: list[bool]) -> Node:
    """An access with the indices that are `below` 0 counted from the ends of their dimensions."""
    at = tuple((replace(i, base=i.base + d) if isinstance(i, Ramp) else i + d) if hit else i
               for i, d, hit in zip(_indices(x), x.buffer.shape, below))
    return replace(x, mins=at) if isinstance(x, Region) else replace(x, indices=at)  # type: ignore[no-any-return]


def _by_lanes(x: Load | Store, below: list[bool]) -> Node:
    """An access of a vector of which only some lanes count from the end, as one access for each lane."""
    *outer, ramp = x.indices
    assert isinstance(ramp, Ramp), "only vector indices have several lanes"
    last = x.buffer.shape[-1]
    each = [(*outer, convert(ramp.base + ramp.stride * k) + (last if wraps else 0)) for k, wraps in enumerate(below)]
    if isinstance(x, Load):
        return Shuffle(tuple(load(x.buffer, i, span=x.span) for i in each), tuple(range(len(each))), x.dtype, span=x.span)
    value = Var("lanes", x.value.dtype, span=x.span)
    return seq(Bind(value, x.value, span=x.span),
               *(Store(x.buffer, i, Shuffle((value,), (k,), x.value.dtype.scalar), span=x.span) for k, i in enumerate(each)),
               span=x.span)


def _may_be_negative(e: Expr, lowered: set[Var]) -> bool:
    """A fast conservative test: e holds a difference, a negative constant, or a variable bound to one."""
    return any((isinstance(n, Binary) and n.op == "sub") or (isinstance(n, Unary) and n.op == "neg")
               or (isinstance(n, Const) and isinstance(n.value, int) and n.value < 0) or n in lowered
               for n in walk(e) if not isinstance(n, Buffer))


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_symbols(func: Func) -> None:
    """Raise "undefined-symbol" for variables that have no value."""
    known: set[Var] = set(func.params)
    for _, b in func.buffers:
        known.add(b.data)
        known |= free_vars(b)
    for s in statements(func.body):
        if isinstance(s, Alloc):
            known.add(s.buffer.data)
    missing = sorted({v.name for v in free_vars(func.body) - known if not v.dtype.is_handle})
    if missing:
        names = ", ".join(missing)
        # The sentence in parentheses: programs test for it.
        raise error("undefined-symbol", f"`{func.name}` uses ‹{names}›, of which no argument gives the value (In PrimFunc "
                    f"{func.name} variables ({names},) are used, but are not passed in as API arguments)", span=func.span,
                    hint="use it in the shape of a tensor parameter, or make it a parameter")
    for f in verify(func):
        if f.rule == "defined":
            at = getattr(f.what, "span", None)
            raise error("out-of-scope", f.message, found="its use elsewhere", span=f.span,
                        notes=((at, "defined here"),) if at else (), hint="Python lists, attributes and closures keep "
                        "expressions, not values: carry a value out of a loop or branch with T.alloc_var")


def check_parallel(func: Func, kinds: Container[str] | None = None) -> None:
    """Check that parallel loops hold only element-wise code.

    kinds: error kinds to look for (parallel-nested, parallel-pipelined, parallel-tile-op, parallel-symbolic,
    parallel-local, break-in-parallel), None for all. Raises the first found, at the user's line.
    """
    _Checker(kinds).stmt(func.body, ())


class _Checker:
    """Walks a program and keeps the enclosing parallel loops."""

    def __init__(self, kinds: Container[str] | None = None) -> None:
        self.kinds = kinds

    def reject(self, kind: str, message: str, known: str = "", **place: Any) -> None:
        """Raise an error.  known: the sentence that programs written for other versions of the language test for."""
        if self.kinds is None or kind in self.kinds:
            raise error(kind, f"{message} ({CHECK} {known})" if known else message, **place)

    def stmt(self, s: Stmt, around: tuple[Parallel, ...]) -> None:
        if around:
            self.inside(s, around)
        for x in inner(s):
            self.stmt(x, (*around, s) if isinstance(s, Parallel) else around)

    def inside(self, s: Stmt, around: tuple[Parallel, ...]) -> None:
        loop = around[-1]
        notes = ((loop.span, "the parallel loop"),)
        if isinstance(s, Parallel):
            self.reject("parallel-nested", "T.Parallel stands inside another T.Parallel",
                        "Nested parallel loops are not allowed", span=s.span, notes=notes,
                        hint="put both into one header, for i, j in T.Parallel(m, n), or make the inner loop T.serial")
        if isinstance(s, For) and s.kind == "pipelined":
            self.reject("parallel-pipelined", "T.Pipelined stands inside T.Parallel",
                        "Pipelined loop cannot be nested inside a parallel loop", span=s.span, notes=notes,
                        hint="put the pipelined loop outside")
        if isinstance(s, TileOp):
            self.reject("parallel-tile-op", f"T.{s.op_name} stands inside T.Parallel, whose body works on elements",
                        f"Only elementwise operations are allowed inside a parallel loop. Got a tile-op {s.op_name}",
                        found=f"T.{s.op_name}", span=s.span, notes=notes,
                        hint="move the operation out of the loop: it works on whole tiles")
        if isinstance(s, Break) and not any(isinstance(x, (For, While)) and any(y is s for y in statements(x))
                                            for x in statements(loop.body)):
            self.reject("break-in-parallel", "break cannot leave a T.Parallel loop: its iterations have no order",
                        span=s.span, notes=notes, hint="guard the body with if, or use T.serial")
        variables = {v: e for p in around for v, e in zip(p.vars, p.extents)}
        for e in own_effects(s):
            if e.indices is not None:
                self.element(e.buffer, e.indices, variables, getattr(e.node, "span", None) or s.span)

    def element(self, b: Buffer, indices: tuple[Expr, ...], variables: dict[Var, Expr], span: Any) -> None:
        for i in indices:
            used = [v for v in variables if v in free_vars(i)]
            for v in used:
                if b.scope_name == FRAGMENT and not isinstance(variables[v], Const):
                    self.reject("parallel-symbolic", f"`{v.name}` runs to {variables[v]!r}, known only when the kernel runs, "
                                f"and indexes the fragment `{b.name}`", f"Loop variable `{v.name}` with symbolic range "
                                f"[0, {variables[v]!r}) is used to index a fragment buffer `{b.name}`",
                                found=f"an extent of {variables[v]!r}", span=span,
                                hint="give the loop the fragment's extent and guard the body with if")
                if b.scope_name == LOCAL:
                    self.reject("parallel-local", f"each thread has its own copy of `{b.name}`, and an iteration of T.Parallel "
                                f"has no thread", f"Local buffer `{b.name}` is indexed by T.Parallel loop variable `{v.name}`",
                                found=f"`{b.name}` of each thread, indexed by `{v.name}`", span=span,
                                hint="use T.serial, T.unroll or T.vectorized for the loop, or a fragment")

# ---- warnings -------------------------------------------------------------------------------------------------------


def warn_uninitialized(func: Func) -> None:
    """Warn of each buffer whose first access in program order is a read. Shared memory that warp roles pass on by mbarriers is
    left out: program order says nothing about it."""
    seen: set[Var] = set()
    passed_on = any(n.op == "mbarrier_wait" for n in walk(func, Call))
    local = {s.buffer.data for s in statements(func.body) if isinstance(s, Alloc) and s.init is None and not (
        passed_on and s.buffer.scope_name.startswith("shared"))}
    for s in statements(func.body):
        for e in own_effects(s):
            if e.storage in local and e.storage not in seen and e.buffer.scope_name in _PRIVATE:
                if e.mode == "read" or e.mode == "readwrite" and isinstance(e.node, TileOp) and _accumulates(e.node):
                    if _in_later_iterations(func.body, e):
                        continue
                    name, place = e.buffer.name, getattr(e.node, "span", None) or getattr(s, "span", None) or e.buffer.span
                    adds = e.mode == "readwrite" or isinstance(s, Store) and s.buffer is e.buffer
                    warn("uninitialized", f"buffer `{name}` is read before it is written",
                         f"put T.clear({name}), or T.fill with the value it starts from, in front of the loop" if adds else
                         f"write it first: T.copy, T.clear or T.fill into `{name}`", place)
                seen.add(e.storage)


def _in_later_iterations(s: Stmt, e: Any) -> bool:
    """Whether a read is in a loop that also writes the buffer, under a condition or in an inner loop that the first iteration
    may skip. Example: a read of the rows above row i; row 0 has none."""
    for outer in statements(s):
        if isinstance(outer, (For, While)) and any(w.writes and w.storage == e.storage for w in effects(outer.body)):
            for x in statements(outer.body):
                if (isinstance(x, If) or isinstance(x, For) and not isinstance(x.extent, Const)) and any(
                        n is e.node for n in walk(x)):
                    return True
    return False


def _accumulates(op: TileOp) -> bool:
    """Whether an op that may read its result certainly does (clear_accum may be a run-time value)."""
    clear = getattr(op, "clear_accum", None)
    return clear is None or isinstance(clear, Const) and not clear.value
