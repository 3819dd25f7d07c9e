"""Each launch of a program as the CPU target runs it (target/cpu_launch.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence, Iterable, Iterator
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Assert, Bind, Break, Buffer, Call, Continue, Evaluate, Expr, For, Func, If, Launch,
                         Load, Node, Parallel, Select, Seq, Stmt, Store, StringConst, TileOp, Var, While, call, children,
                         follows_addresses, replace, rewrite, rewrite_launches, seq, unary, walk, with_inner, GLOBAL, TMEM,
                         VARIABLE)
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import (CpuLaunch, NullCheck, WarpRoleCode, WarpRole, BARRIER_WORDS, StorageSlot, ThreadValues,
                                        is_barrier_array, is_private)
from tilelang.target.shared_space import SharedSpace, shared_space
from tilelang.target.thread_calls import ASSERTION, EXCHANGES, MATRIX_CALLS

from ..analysis.statements import is_positive
from ..framework.pass_ import CPU, TILE, PassContext, pass_
from .mask_divergent import mask_divergent
from .split_warp_roles import needs_coroutines, split_warp_roles
from .thread_loops import loop_over_threads
from .varying_values import find_varying_values


@pass_(needs=TILE, gives=CPU)
def plan_launches(func: Func, cx: PassContext) -> Func:
    """Each Launch of a program in phase TILE as a CpuLaunch.

    Steps, for each launch: pointers that must not be null; warp roles, where warp groups or blocks wait for each other;
    masks for divergent statements in which threads communicate; loops over threads; storage in the arena.
    Raises cpu-unsupported at the user's line.
    """
    return rewrite_launches(func, lambda s: _plan(s, func))


def _may_alias(func: Func, s: Launch) -> tuple[Var, ...]:
    """Data of the tensors that overlap others for all that is known: the caller says so, or the launch follows addresses."""
    named, free = set(func.facts.may_alias), follows_addresses(s)
    return tuple(b.data for _, b in func.buffers if free or b.name in named)


def _checked(n: Stmt) -> Stmt | None:
    """The call that an assert statement becomes."""
    if not isinstance(n, Assert) or n.kind == "device_assert":
        return None
    where = f" ({os.path.basename(n.span.file)}:{n.span.line})" if n.span is not None else ""
    text = StringConst(f"assertion failed{where}: {n.message}")
    return Evaluate(call(ASSERTION, (n.cond, text), "void", span=n.span), span=n.span)


def _plan(s: Launch, func: Func) -> CpuLaunch:
    pointers = tuple(p for p in func.params if p.dtype.is_handle and func.buffer_of(p) is None)
    s = rewrite(s, _checked, Assert)
    if needs_coroutines(s):
        return _plan_coroutines(s)
    checks = find_null_checks(s, pointers)
    checked = {c.var for c in checks}
    other, more = check_behind_conditions(s, [p for p in pointers if p not in checked])
    if not more:
        return _plan_blocks(s, func, checks)
    when_null = _plan_blocks(other, func, (*checks, *more))
    return replace(_plan_blocks(s, func, checks), pointers=pointers, when_null=when_null)


def _plan_blocks(s: Launch, func: Func, checks: tuple[NullCheck, ...]) -> CpuLaunch:
    """Blocks that run one after another on each worker thread."""
    everyone = WarpRole(0, (), ((0, s.num_threads),))
    code = _code(everyone, s)
    return CpuLaunch(s, (code,), False, place_buffers(code.body, code.values), SharedSpace(()),
                     lane_faults=_may_fault([code]), may_alias=_may_alias(func, s), null_checks=checks, span=s.span)


def _plan_coroutines(s: Launch) -> CpuLaunch:
    """Warp roles or blocks that wait for each other."""
    slots = place_buffers(s.body, None)
    warp_roles, barriers = split_warp_roles(s)
    space = shared_space(s, lambda why, span: unsupported(why, span=span))
    codes = tuple(_code(warp_role, launch) for warp_role, launch in warp_roles)
    grid_barrier = any(n.op == "sync_grid" for n in walk(s.body, Call))
    return CpuLaunch(s, codes, True, slots, space, barriers, grid_barrier, _may_fault(codes), span=s.span)


def _code(warp_role: WarpRole, s: Launch) -> WarpRoleCode:
    masked = mask_divergent(s)
    values = find_varying_values(masked)
    return WarpRoleCode(warp_role, loop_over_threads(masked.body, values), values)


def _may_fault(codes: Sequence[WarpRoleCode]) -> bool:
    """Whether an assertion may fail, or an exchange between lanes or a matrix instruction be executed by the wrong lanes."""
    return any(n.op in (*EXCHANGES, *MATRIX_CALLS, ASSERTION) for c in codes for n in walk(c.body, Call))


# ---- block storage ----------------------------------------------------------------------------------------------------------
# Which buffers of a block lie in the arena of the worker thread, and which on the stack of the block's function.


STACK_BYTES = 4096  # larger arrays lie in the arena


def place_buffers(body: Stmt, values: ThreadValues | None) -> tuple[StorageSlot, ...]:
    """Arena storage of a launch whose blocks run one after another: what is too large for the stack.

    values: None where warp roles are coroutines, and all that the warp roles of a block share lies in the arena.
    Raises cpu-unsupported for tensor memory, and for barriers that nothing waits at.
    """
    out: dict[object, StorageSlot] = {}
    for n in walk(body, Alloc):
        b, barrier = n.buffer, is_barrier_array(n.buffer)
        if b.data in out or b.scope() == GLOBAL or values is None and is_private(b):
            continue
        if b.scope() == TMEM or barrier and values is not None:
            raise unsupported(f"memory of scope {b.scope()}", span=n.span)
        copies = BARRIER_WORDS if barrier else values.count if values is not None and b.data in values.private else 1
        if values is None:
            out[b.data] = StorageSlot(b, copies)
        elif not (b.scope_name == VARIABLE and copies == 1 or b.is_static and b.size * b.dtype.bytes * copies <= STACK_BYTES):
            out[b.data] = StorageSlot(b, copies, values.unit_of(b))
    return tuple(out.values())


# ---- null pointers ----------------------------------------------------------------------------------------------------------
# Tensors made of an address (a table of T.ptr, a pointer parameter) that is null: the call fails, not the process.
#
# An address is tested once, where it is read or where the block begins, when a tensor at it is surely accessed afterwards.
# What stands under a condition may be the user's own test for null: there the test stands behind the condition, and for pointer
# parameters in a second form of the launch, which runs where one of them is null.  The first form has no tests inside its
# loops, which would keep them from vector code.


_TEXT = "is made of the null pointer, and used"


def find_null_checks(launch: Launch, parameters: Iterable[Var]) -> tuple[NullCheck, ...]:
    """Addresses to test: those that the launch reads or is given, and whose tensors it surely accesses.

        P = table[i]                         P = table[i]; the call fails if P is null
        A = T.make_tensor(P, ...)     ->
        B[0] = A[0]                          B[0] = A[0]
    """
    out: dict[Var, str] = {}

    def note(v: Var, stmts: tuple[Stmt, ...]) -> None:
        found = _first(v, stmts)
        if found is not None:
            out[v] = _text(*found)

    for v in parameters:
        note(v, (launch.body,))
    for s in walk(launch.body):
        if isinstance(s, Seq):
            for k, x in enumerate(s.stmts):
                if isinstance(x, Bind) and x.var.dtype.is_handle:
                    note(x.var, s.stmts[k + 1:])
    return tuple(NullCheck(v, text) for v, text in out.items())


def check_behind_conditions(launch: Launch, parameters: Iterable[Var]) -> tuple[Launch, tuple[NullCheck, ...]]:
    """The launch with a second name for each of these parameters where a condition or loop leads to a sure use of its tensor,
    and the tests of these names.

        if c: B[0] = A[0]             ->     if c: { P_used = P; the call fails if P_used is null; B[0] = A[0] }
    """
    out: dict[Var, str] = {}

    def check(v: Var, use: tuple[Buffer, Any], span: Any) -> Stmt:
        name = Var(f"{v.name}_used", v.dtype)
        out[name] = _text(*use)
        return Bind(name, v, span=span)

    def conditional(s: Stmt, left: tuple[Var, ...]) -> Stmt:
        """A statement behind a condition; left: parameters not tested before."""
        found = {v: use for v in left if (use := _first(v, (s,))) is not None}
        checks = [check(v, use, s.span) for v, use in found.items()]
        body = below(s, tuple(v for v in left if v not in found))
        return seq(*checks, body) if checks else body

    def choices(e: Node, s: Stmt, left: tuple[Var, ...]) -> Iterator[Stmt]:
        """Tests in front of s for the lazy selections in an expression of it; none for selections inside of a selected side."""
        if isinstance(e, Select) and e.lazy:
            sides = ((e.cond, e.a), (unary("not", e.cond), e.b))
            for cond, side in sides:
                checks = [check(v, use, s.span) for v in left if (use := _of_expr(v, side, s)) is not None]
                if checks:
                    yield If(cond, seq(*checks), span=s.span)
            yield from choices(e.cond, s, left)
            return
        for x in children(e):
            if isinstance(x, Expr):
                yield from choices(x, s, left)

    def below(s: Stmt, left: tuple[Var, ...]) -> Stmt:
        if not left:
            return s
        match s:
            case If() | For() | Parallel() | While():
                return with_inner(s, lambda x: conditional(x, left))  # type: ignore[no-any-return]
            case Store() | Bind() | Evaluate():
                checks = list(choices(s, s, left))
                return seq(*checks, s) if checks else s
        return with_inner(s, lambda x: below(x, left))  # type: ignore[no-any-return]

    body = below(launch.body, tuple(parameters))
    return (replace(launch, body=body) if out else launch), tuple(NullCheck(v, text) for v, text in out.items())


def _text(b: Buffer, span: Any) -> str:
    where = f" ({os.path.basename(span.file)}:{span.line})" if span is not None else ""
    return f"{b.name}{where} {_TEXT}"


def _first(v: Var, stmts: tuple[Stmt, ...]) -> tuple[Buffer, Any] | None:
    """(tensor at v, place) of the first access on every path through these statements."""
    for s in stmts:
        found: tuple[Buffer, Any] | None = None
        match s:
            case Seq():
                found = _first(v, s.stmts)
            case For() | Parallel():
                if all(map(is_positive, (s.extent,) if isinstance(s, For) else s.extents)):
                    found = _first(v, (s.body,))
            case TileOp():
                touched = [a.region for a in s.accesses() if a.region.buffer.data is v]  # type: ignore[attr-defined]
                found = next(((r.buffer, s.span) for r in touched if all(map(is_positive, r.extents))), None)
            case Store() if s.buffer.data is v:
                found = s.buffer, s.span
            case If() | Bind() | Evaluate() | Store():
                found = _of_each(v, children(s), s)
        if found is not None:
            return found
        if any(isinstance(x, (Break, Continue, While)) or isinstance(x, Evaluate) and x.call.op == "thread_return"
               for x in walk(s)):
            return None
    return None


def _of_expr(v: Var, e: Node, s: Stmt) -> tuple[Buffer, Any] | None:
    if isinstance(e, Load) and e.buffer.data is v:
        return e.buffer, e.span or s.span
    if isinstance(e, AddressOf):
        return None
    return _of_each(v, (e.cond,) if isinstance(e, Select) and e.lazy else children(e), s)


def _of_each(v: Var, nodes: Iterable[Any], s: Stmt) -> tuple[Buffer, Any] | None:
    return next((f for x in nodes if isinstance(x, Expr) and (f := _of_expr(v, x, s)) is not None), None)
