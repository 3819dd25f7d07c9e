"""Accesses of shared memory made while an expression is computed, for the synchronisation model."""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Call, Evaluate, Expr, Load, Node, Select, children, SHARED
from tilelang.target.atomics import Atomic, family

from .copies import EVENT_RULES
from .stream_state import StreamState
from .touches import touch


def reads(st: StreamState, e: Node, s: Any) -> None:
    """Record every access made while e is computed."""
    if not st.plan.facts(e)[0]:
        return
    if isinstance(e, Load):
        for i in e.indices:
            reads(st, i, s)
        if e.buffer.scope_name in SHARED:
            touch(st, "r", e.buffer, e.indices, 1, s)
    elif isinstance(e, Select) and e.lazy:
        reads(st, e.cond, s)
        for side in st.ways(e, e.cond, e.a, e.b):
            reads(st, side, s)
    elif isinstance(e, Call) and e.op in EVENT_RULES:
        EVENT_RULES[e.op](st, e, s.span)
    elif isinstance(e, Call):
        for k, a in enumerate(e.args):
            if isinstance(a, AddressOf):
                for i in a.indices:
                    reads(st, i, s)
                if a.buffer.scope_name in SHARED:
                    _through(st, e, k, a, s)
            else:
                reads(st, a, s)
    else:
        for c in children(e):
            if isinstance(c, Expr):
                reads(st, c, s)


def _through(st: StreamState, c: Call, k: int, a: AddressOf, s: Any) -> None:
    """Record an access through an address that is passed to an intrinsic."""
    size = a.buffer.dtype.bytes
    if c.op.startswith("atomic_"):
        used = not (isinstance(s, Evaluate) and s.call is c)
        touch(st, "a", a.buffer, a.indices, {"atomic_addx2": 2, "atomic_addx4": 4}.get(c.op, 1), s,
              atomic=Atomic(family(c.op), used and st.turning, st.inside))
    elif c.op in ("ldmatrix", "stmatrix"):
        mask, active = st.mask, st.active
        st.only(st.threads % 32 < 8 * c.options.num)
        touch(st, "w" if c.op == "stmatrix" else "r", a.buffer, a.indices, max(1, 16 // size), s)
        st.mask, st.active = mask, active
    elif c.op != "wgmma_descriptor":
        touch(st, "w", a.buffer, None, 1, s)
