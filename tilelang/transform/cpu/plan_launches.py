"""Each launch of a program as the CPU target runs it (target/cpu_launch.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tilelang.ir import (Assert, Call, Evaluate, Func, Launch, Stmt, StringConst, Var, call, follows_addresses, replace,
                         rewrite, walk)
from tilelang.ir.visitor import rewrite_launches
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CpuLaunch, NullCheck, WarpRoleCode, WarpRole
from tilelang.target.shared_space import SharedSpace, shared_space
from tilelang.target.thread_calls import ASSERTION, EXCHANGES, MATRIX_CALLS

from ..framework.pass_ import CPU, TILE, PassContext, pass_
from .block_storage import place_block_buffers, place_shared_buffers
from .mask_divergent import mask_divergent
from .null_pointers import check_behind_conditions, find_null_checks
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
    return CpuLaunch(s, (code,), False, place_block_buffers(code.body, code.values), SharedSpace(()),
                     lane_faults=_may_fault([code]), may_alias=_may_alias(func, s), null_checks=checks, span=s.span)


def _plan_coroutines(s: Launch) -> CpuLaunch:
    """Warp roles or blocks that wait for each other."""
    slots = place_shared_buffers(s.body)
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
