"""Reject warp roles that touch one element of shared memory with nothing that could order them.

    with T.ws(0):
        S[tx] = A[tx]
    with T.ws(1):
        B[tx - 128] = S[255 - tx]     # rejected: warp group 1 does not wait for warp group 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tilelang.errors import TileLangError, error
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Expr, For, Func, If, Launch, Load, Parallel, Region, Seq,
                         Stmt, Store, TileOp, Var, While, inner, walk, BARRIER, CLUSTER_BARRIER, SHARED)
from tilelang.ir.evaluate import evaluate
from tilelang.target.intrinsics import INTRINSICS, PURE, WARP
from tilelang.target.warp_groups import WARP_LANES, holds_in, warps_in

from ..framework.config import PassConfigKey
from ..framework.pass_ import TILE, PassContext, pass_

_MOST = 1 << 18  # most elements of a buffer, and most places of an access, that are looked at
# Calls that order nothing between warps, beside the pure ones.
_OWN = frozenset(("sync_threads", "sync_warp", "cp_async", "cp_async_commit", "cp_async_wait", "printf", "set_max_nreg",
                  "ldmatrix", "stmatrix", "mma", "fence_proxy_async", "assume"))


@pass_(needs=TILE)
def check_warp_role_order(func: Func, cx: PassContext) -> Func:
    """Raise "sync-unordered" where warp roles side by side touch one element of shared memory, and one of them stores there.

    Two warp roles are looked at where at least one of them holds nothing that could order them: no named barrier, mbarrier,
    atomic, while loop or call of unknown effect.  Accesses at addresses that only the run decides are left to verify_sync,
    which checks what GPUs run.  Changes nothing.
    """
    if not cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC):
        for s in walk(func, Launch):
            everyone = warps_in(s)
            if len(everyone) > 1:
                for run in _runs(s.body, everyone):
                    _check([_WarpRole(s, warps, body) for warps, body in run])
    return func


def _runs(s: Stmt, warps: tuple[int, ...]) -> Iterator[list[tuple[tuple[int, ...], Stmt]]]:
    """Warp roles side by side: (warps, body) of branches that nothing of the whole block separates."""
    if isinstance(s, Seq):
        run: list[tuple[tuple[int, ...], Stmt]] = []
        for x in s.stmts:
            parts = _warp_roles(x, warps)
            if parts is not None:
                run += parts
            elif not isinstance(x, (Alloc, Bind)):
                yield run
                run = []
                yield from _runs(x, warps)
        yield run
    elif (parts := _warp_roles(s, warps)) is not None:
        yield parts
    else:
        for x in () if isinstance(s, (Parallel, TileOp)) else inner(s):
            yield from _runs(x, warps)


def _warp_roles(s: Stmt, warps: tuple[int, ...]) -> list[tuple[tuple[int, ...], Stmt]] | None:
    """(warps, body) of the ways of a branch by warp; None for other statements."""
    if not isinstance(s, If) or any(holds_in(s.cond, w) is None for w in warps):
        return None
    ways = [(tuple(w for w in warps if holds_in(s.cond, w) is want), part)
            for want, part in ((True, s.then), (False, s.orelse)) if part is not None]
    return [(come, part) for come, part in ways if come]


@dataclass
class _Access:
    """Elements of a shared buffer: a bool for each.  writes: whether it stores."""

    buffer: Buffer
    places: Any
    writes: bool
    span: Any


class _WarpRole:
    """A warp role: its accesses at known places, and whether it may order itself with others (meets)."""

    def __init__(self, launch: Launch, warps: tuple[int, ...], body: Stmt) -> None:
        self.warps = warps
        self.meets = any(isinstance(n, While) or isinstance(n, TileOp) and _signals(n) or isinstance(n, Call) and not _own(n)
                         for n in walk(body))
        x, y, _ = launch.threads
        t = np.concatenate([np.arange(w * WARP_LANES, min((w + 1) * WARP_LANES, launch.num_threads)) for w in warps])
        env = dict(zip(launch.thread_vars, (t % x, t // x % y, t // (x * y))))
        self.accesses = list(_accesses(body, env, np.ones(len(t), bool)))


def _own(c: Call) -> bool:
    """Whether a call orders nothing between warps."""
    row = INTRINSICS.get(c.op)
    return c.op in _OWN or row is not None and row.effect in (PURE, WARP)


def _signals(op: TileOp) -> bool:
    """Whether a tile operation names an mbarrier."""
    return getattr(op, "barrier", None) is not None or any(
        n.buffer.scope_name in (BARRIER, CLUSTER_BARRIER) for n in walk(op, Load, AddressOf, Region))


def _accesses(s: Stmt, env: dict[Var, Any], mask: Any) -> Iterator[_Access]:
    """The accesses of shared memory below a statement, where their places are known.

    env: values of names, one for each of the points that `mask` has.  Statements under unknown conditions give none.
    """
    span = getattr(s, "span", None)
    match s:
        case Seq():
            for x in s.stmts:
                yield from _accesses(x, env, mask)
        case TileOp():
            for a in s.accesses():  # type: ignore[attr-defined]
                if a.region.buffer.scope_name in SHARED and (places := _box(a.region)) is not None:
                    for writes in (*[True] * (a.mode != "read"), *[False] * (a.mode != "write")):
                        yield _Access(a.region.buffer, places, writes, span)
        case Bind():
            yield from _loads(s.value, env, mask, span)
            v = _value(s.value, env)
            if v is not None:
                env[s.var] = v
        case Store():
            for e in (*s.indices, s.value):
                yield from _loads(e, env, mask, span)
            if s.buffer.scope_name in SHARED and (places := _places(s.buffer, s.indices, env, mask)) is not None:
                yield _Access(s.buffer, places, True, span)
        case If():
            holds = _value(s.cond, env)
            if holds is not None:
                for part, taken in ((s.then, mask & holds), (s.orelse, mask & ~np.asarray(holds, bool))):
                    if part is not None and taken.any():
                        yield from _accesses(part, dict(env), taken)
        case For() | Parallel():
            axes = [(s.var, s.start, s.extent)] if isinstance(s, For) else [(v, 0, n) for v, n in zip(s.vars, s.extents)]
            starts, extents = [_number(a) for _, a, _ in axes], [_number(n) for _, _, n in axes]
            size = prod(n or 0 for n in extents)
            if 0 < size * mask.size <= _MOST and None not in starts:
                known = [n or 0 for n in extents]
                spread = {v: np.repeat(np.broadcast_to(x, mask.shape), size) for v, x in env.items()}
                points = np.indices(known).reshape(len(axes), -1)
                for (v, _, _), first, p in zip(axes, starts, points):
                    spread[v] = np.tile(p + (first or 0), mask.size)
                yield from _accesses(s.body, spread, np.repeat(mask, size))


def _loads(e: Expr, env: dict[Var, Any], mask: Any, span: Any) -> Iterator[_Access]:
    if not any(isinstance(n, Load) for n in walk(e)):
        return
    for n in walk(e, Load):
        if n.buffer.scope_name in SHARED and (places := _places(n.buffer, n.indices, env, mask)) is not None:
            yield _Access(n.buffer, places, False, span)


def _value(e: Expr, env: dict[Var, Any]) -> Any:
    try:
        return evaluate(e, env)
    except (TileLangError, TypeError):
        return None


def _number(e: Any) -> int | None:
    return int(e) if isinstance(e, int) else int(e.value) if isinstance(e, Const) else None


def _shape(b: Buffer) -> tuple[int, ...] | None:
    """The shape of a buffer of its own; None for views, run-time and very large ones."""
    if not b.is_static or prod(map(int, b.shape)) > _MOST:
        return None
    return tuple(map(int, b.shape))


def _places(b: Buffer, indices: tuple[Expr, ...], env: dict[Var, Any], mask: Any) -> Any:
    shape, at = _shape(b), [_value(i, env) for i in indices]
    if shape is None or len(at) != len(shape) or any(v is None or np.ndim(v) > 1 for v in at):
        return None
    at = [np.broadcast_to(v, mask.shape)[mask] for v in at]
    if any((v < 0).any() or (v >= n).any() for v, n in zip(at, shape)):
        return None
    out = np.zeros(shape, bool)
    out[tuple(at)] = True
    return out


def _box(r: Region) -> Any:
    shape = _shape(r.buffer)
    mins, extents = [_number(m) for m in r.mins], [_number(n) for n in r.extents]
    if shape is None or None in mins or None in extents:
        return None
    out = np.zeros(shape, bool)
    out[tuple(slice(m, m + n) for m, n in zip(mins, extents))] = True  # type: ignore[operator]
    return out


def _check(roles: list[_WarpRole]) -> None:
    for k, one in enumerate(roles):
        for two in roles[:k]:
            if one.meets and two.meets or set(one.warps) & set(two.warps):
                continue
            for a in two.accesses:
                for b in one.accesses:
                    if (a.writes or b.writes) and a.buffer is b.buffer and (a.places & b.places).any():
                        first, second = (a, b) if a.writes else (b, a)
                        raise error("sync-unordered", f"`{a.buffer.name}` is touched by two warp roles that nothing orders",
                                    expected="warp roles that wait for each other", found="warp roles that do not wait",
                                    span=second.span, notes=((first.span, "stored here by another warp role"),),
                                    hint="let them meet at T.sync_threads(id, threads) or at an mbarrier (T.alloc_barrier)")


__all__ = ["check_warp_role_order"]
