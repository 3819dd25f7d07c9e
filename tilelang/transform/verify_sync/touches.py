"""Ordinary accesses of shared memory by the active threads of a stream, for the synchronisation model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Buffer, Call, Const, Expr, Load, Ramp, Store, Var, children
from tilelang.target.atomics import Atomic

from .sync_fault import Fault
from .memory import MESSAGES, Pattern, Site
from .stream_state import StreamState

_AT_ONCE = "is written by two threads at once with what they read from different places"


def touch(st: StreamState, mode: str, b: Buffer, indices: tuple[Expr, ...] | None, width: int, s: Any,
          memory: Any = None, atomic: Atomic | None = None) -> None:
    """Record an access of `width` elements by each active thread; indices None: anywhere in the buffer.

    memory: that of another block of the cluster.  atomic: what an atomic access does.
    """
    p, exact = pattern(st, b, indices, width)
    if p is not None:
        into = memory or st.block.memory
        sure = exact and not (st.guess and st.unknowns is None)
        into.threads(mode, p, st.active, Site(s.span, sure, atomic, st.independent))


def at_once(st: StreamState, s: Store) -> None:
    """Check a store in which several threads may store to one place in one instruction.

    Reports a fault where they store different values.  Under a condition on data, as in
    `if count[tx] > k and count[tx + 1] <= k: found[0] = tx`, the data may let one thread through: a doubt, no certain fault.
    """
    i = s.indices[0]
    at = st.values.address(s.buffer, (i.base if isinstance(i, Ramp) else i,), st)
    if (id(s), st.first) in st.stored or st.guess and st.unknowns is None or at is None:
        return
    st.stored.add((id(s), st.first))
    rows, who = np.broadcast_arrays(at, st.ids)
    if not differ(rows.ravel(), who.ravel(), lambda: [np.arange(rows.size)]):
        return
    parts = made_of(s.value, lambda e: st.values(e, st), st.plan.held)
    # Of a loop that is followed all at once each iteration is compared with itself, and with others where nothing is assumed.
    at, who, active, *parts = np.broadcast_arrays(at, st.ids, True if st.mask is None else st.mask, *parts)
    turn = np.arange(at.size) // at.shape[-1]
    on = active.ravel()
    if st.unknowns is not None and differ(at.ravel()[on], who.ravel()[on], lambda: [turn[on]]):
        st.block.report(Fault(f"`{s.buffer.name}` {MESSAGES['order']}", s.span, s.span, not st.guess))
    key = (at.ravel().astype(np.int64) * (turn[-1] + 1) + turn)[on]
    if differ(key, who.ravel()[on], lambda: [p.ravel()[on] for p in parts]):
        st.block.report(Fault(f"`{s.buffer.name}` {_AT_ONCE}", s.span, s.span, not st.guess))


def pattern(st: StreamState, b: Buffer, indices: tuple[Expr, ...] | None, width: int) -> tuple[Pattern | None, bool]:
    """(pattern of an access by the active threads, None where they touch nothing; whether its addresses are known)."""
    at = None
    if indices is not None and len(indices) == 1:
        e = indices[0]
        if isinstance(e, Ramp):
            width = e.lanes if isinstance(e.stride, Const) and e.stride.value == 1 else 0
            e = e.base
        at = st.values.address(b, (e,), st) if width else None
    base = st.plan.places[b.data]
    end = base + st.plan.bytes_of(b)
    if at is not None and st.unknowns is None and not st.hits(at, base, end):
        at = None  # an assumed value leads outside: the address is unknown
    st.block.accesses += 1
    st.block.unknown += at is None
    span = max(1, width * b.dtype.bytes // st.plan.granule)
    arrays = (x if x is None or isinstance(x, int) else (x.shape, x.tobytes()) for x in (at, st.mask))
    key = (int(st.ids[0]), st.n, base, span, *((w.number, lanes) for w, lanes in st.active), *arrays)
    if key not in st.plan.patterns:
        g, threads = _anywhere(st, base, end) if at is None else _granules(st, np.asarray(at), base, end, span)
        st.plan.patterns[key] = Pattern(g, threads, st.lanes, st.block.memory.warps) if len(g) else None
    return st.plan.patterns[key], at is not None


def _anywhere(st: StreamState, base: int, end: int) -> tuple[Any, Any]:
    """(granules, their threads) of an access at an unknown address."""
    g = np.arange(base // st.plan.granule, -(-end // st.plan.granule))
    first = [w.number * st.lanes + lanes.bit_length() - 1 if lanes.bit_count() == 1 else ~(w.number * st.lanes)
             for w, lanes in st.active]
    return np.tile(g, len(first)), np.repeat(np.array(first), len(g))


def _granules(st: StreamState, at: Any, base: int, end: int, span: int) -> tuple[Any, Any]:
    """(granules, their threads) of an access of `span` granules from each address on."""
    at = np.broadcast_to(at, (*at.shape[:-1], st.n)) if at.ndim else np.full(st.n, at)
    threads = np.broadcast_to(st.ids, at.shape)
    if st.mask is not None and np.ndim(st.mask) == 1:
        at, threads = at[..., st.mask], threads[..., st.mask]
    elif st.mask is not None:  # in a loop that is followed all at once, other threads run other iterations
        at, threads, mask = np.broadcast_arrays(at, threads, st.mask)
        at, threads = at[mask], threads[mask]
    at, threads = at.ravel(), threads.ravel()
    if st.unknowns is not None:  # without assumed values, accesses outside never happen: a guard excludes them
        inside = (at >= base) & (at < end)
        at, threads = at[inside], threads[inside]
    g = at // st.plan.granule
    return ((g[:, None] + np.arange(span)).ravel(), np.repeat(threads, span)) if span > 1 else (g, threads)


# ---- what several threads store to one place in one instruction ------------------------------------------------------------


def differ(at: Any, who: Any, values: Callable[[], list[Any]]) -> bool:
    """Whether two threads store different values to one place, in one instruction.

    at, who: places and threads, in rows.  values: what the stored values are computed from, each a row.
    """
    order = np.argsort(at, kind="stable")
    at, who = at[order], who[order]
    both = (at[1:] == at[:-1]) & (who[1:] != who[:-1])
    return bool(both.any()) and any(bool((both & (np.diff(v[order]) != 0)).any()) for v in values())


def made_of(value: Expr, known: Callable[[Expr], Any], names: dict[Var, Expr]) -> list[Any]:
    """The numbers that a value is computed from, per thread, with the indices of what it reads; empty when unknown.

    known: the value of an integer expression: a number, one per thread, or None.  names: the expressions that names and
    register storages hold (`held`).
    """
    out: list[Any] = []
    return [v for v in out if np.ndim(v)] if _made_of(value, known, names, out) else []


def _made_of(e: Expr, known: Callable[[Expr], Any], names: dict[Var, Expr], out: list[Any]) -> bool:
    """Append the numbers that a value is computed from; returns whether all of them are known."""
    if isinstance(e, Const):
        return True
    if isinstance(e, Load):
        at = [i.base if isinstance(i, Ramp) else i for i in e.indices]
        if not e.buffer.scope_name.startswith("local"):
            return all(_made_of(i, known, names, out) for i in at)
        alike = all((n := known(i)) is not None and not np.ndim(n) for i in at)
        return alike and e.buffer.data in names and _made_of(names[e.buffer.data], known, names, out)
    if e.dtype.lanes == 1 and not e.dtype.is_float:
        v = known(e)
        if v is not None:
            out.append(v)
            return True
    if isinstance(e, Var):
        return e in names and _made_of(names[e], known, names, out)
    if isinstance(e, (Call, AddressOf)):
        return False
    return all(_made_of(c, known, names, out) for c in children(e) if isinstance(c, Expr))
