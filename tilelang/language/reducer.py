"""Deferred reducers: an accumulator tile that T.Parallel iterations add to.

A reducer is a fragment.  Each update combines one value into one of its elements, exactly once per iteration, as
`acc[i] = op(acc[i], value)` in T.Parallel does.  Finalising therefore only copies the result, after combining it once with
the initial value.
"""

from __future__ import annotations

import warnings
from typing import Any

from tilelang import errors
from tilelang.ir import (AddressOf, Binary, Buffer, Call, Expr, Load, Region, Stmt, Store, cast, const, convert,
                         load, walk, FRAGMENT)
from tilelang.ir.dtype import SCALE
from tilelang.ops.reduce import identity

from .alloc import alloc_fragment
from .tracing.builder import Builder, Emitted, need_builder
from .tracing.names import Names
from .tracing.scope import Frame, IfFrame
from .loops import Parallel
from .tracing.state import describe, error, example
from .tile import EMITTED, check_batch, copy, fill

OPS = {"sum": "add", "max": "max", "min": "min", "bitand": "bitand", "bitor": "bitor", "bitxor": "bitxor"}


Arms = tuple[tuple[Frame, bool], ...]  # the branches around a statement, outermost first: (if, whether in its else)


class _Epoch:
    """The state of one reducer: its op, whether it is between init and finalize, and the frames around its init.

    calls: the statements that the reducer functions emitted.  Only these may use the reducer.
    ends: for each finalize in a branch below the init, the branches between them.
    """

    def __init__(self, op: str, legacy: bool) -> None:
        self.op, self.legacy, self.state = op, legacy, "allocated"
        self.init: Expr | None = None
        self.around: list[tuple[Frame, bool, tuple[Expr, ...] | None]] = []
        self.calls: list[Stmt] = []
        self.ends: list[Arms] = []

    def made(self, b: Builder) -> None:
        """Record the last statement as one of this reducer."""
        if not b.frames[-1].dead:
            self.calls += b.frames[-1].stmts[-1:]

    def arms(self, b: Builder) -> Arms | None:
        """The branches around this place below those of the init; None where it may run without the init, or more often.

        A place behind the branch of the init belongs to it where its own branches have the same conditions.
        """
        here = _around(b)
        shared = 0
        while shared < min(len(self.around), len(here)) and all(x is y for x, y in zip(self.around[shared][:2], here[shared])):
            shared += 1
        below, left = here[shared:], self.around[shared:]
        held = [t for _, _, terms in below for t in terms or ()]
        if any(type(f) is not IfFrame for f, _, _ in (*below, *left)) or any(
                terms is None or not all(any(t.same(h) for h in held) for t in terms) for _, _, terms in left):
            return None
        return tuple((f, arm) for f, arm, _ in below)

    def ended(self, arms: Arms) -> bool:
        """Whether a finalize may run before a place in these branches."""
        return any(not any(f is g and a is not c for f, a in arms for g, c in end) for end in self.ends)


def _around(b: Builder) -> list[tuple[Frame, bool, tuple[Expr, ...] | None]]:
    """For each open frame: the frame, whether its else is traced, and conditions that hold in it (None: not known)."""
    out: list[tuple[Frame, bool, tuple[Expr, ...] | None]] = []
    for f in b.frames:
        other = isinstance(f, IfFrame) and f.then_body is not None
        fixed = isinstance(f, IfFrame) and not other and not any(isinstance(x, (Load, Call)) for x in walk(f.cond))
        out.append((f, other, _conjuncts(f.cond) if isinstance(f, IfFrame) and fixed else None))
    return out


def _conjuncts(e: Expr) -> tuple[Expr, ...]:
    return (*_conjuncts(e.a), *_conjuncts(e.b)) if isinstance(e, Binary) and e.op == "and" else (e,)


_in_a_sum = example('total = T.alloc_reducer((128,), "float32", op="sum")', "T.reducer_init(total)",
                     "for r, c in T.Parallel(128, 128):", "    T.reducer_update(total[r], acc[r, c])",
                     "T.finalize_reducer(total, m)")


@_in_a_sum
def alloc_reducer(shape: Any, dtype: Any, op: str = "sum", replication: str | None = None) -> Buffer:
    """Allocate a reducer: an accumulator tile in registers, distributed over the block's threads.

    shape: elements, static.  dtype: integer for bit operations.  op: sum, max, min, bitand, bitor or bitxor.  replication:
    older form.  Before T.finalize_reducer, its value is not read.  Raises reduce-kind, reducer-type.
    """
    b = need_builder("T.alloc_reducer")
    if op not in OPS:
        raise error("reduce-kind", f"unknown kind of reducer ‹{op!r}›, expected «one of {', '.join(OPS)}»")
    if replication is not None:
        warnings.warn("T.alloc_reducer(replication=…) is deprecated, use reducer_init, reducer_update, "
                      "finalize_reducer",
                      DeprecationWarning, stacklevel=2)
    acc = alloc_fragment(shape, dtype)
    if op.startswith("bit") and not (acc.dtype.is_int or acc.dtype.is_bool):
        raise error("reducer-type", f"a {op} reducer requires an integer dtype, found {acc.dtype}", expected="an integer type")
    if op == "sum" and acc.dtype.base == SCALE:
        raise error("reducer-type", f"a sum needs «a type with a zero», found {acc.dtype}",
                    hint="sum in float32 and convert the result")
    b.reducers[id(acc)] = (acc, _Epoch(op, replication is not None))
    return acc


def _epoch(b: Builder, acc: Any, what: str) -> _Epoch:
    if not isinstance(acc, Buffer) or id(acc) not in b.reducers:
        raise error("reducer-operand", f"{what} needs a reducer from T.alloc_reducer, found {describe(acc)}",
                    expected="a reducer of T.alloc_reducer")
    return b.reducers[id(acc)][1]


def reducer_init(acc: Buffer, init: Any = None) -> Emitted:
    """Start accumulating with the identity of the reducer's operation; executed by the whole block, outside of T.Parallel.

    acc: of T.alloc_reducer: a fragment of any shape.  init: a scalar of its dtype, combined once into each result.
    Raises reducer-order, reducer-operand.

    Example:
        total = T.alloc_reducer((128,), "float32", op="max")
        T.reducer_init(total, 0.0)
        for r, c in T.Parallel(128, 128):
            T.reducer_update(total[r], acc[r, c])
        T.finalize_reducer(total, m)
    """
    b = need_builder("T.reducer_init")
    e = _epoch(b, acc, "T.reducer_init")
    if any(f.parallel for f in b.frames):
        raise error("reducer-order", "‹T.reducer_init inside T.Parallel›", hint="initialise the reducer before the loop")
    if e.state == "open":
        raise error("reducer-order", f"the reducer `{acc.name}` is initialised twice",
                    found=f"T.reducer_init of `{acc.name}` twice")
    if isinstance(init, Expr) and init.dtype != acc.dtype:
        raise error("reducer-operand", f"the initial value of `{acc.name}` is ‹{init.dtype}›, the reducer {acc.dtype}",
                    expected=f"a value of {acc.dtype}", hint=f"T.cast(value, \"{acc.dtype}\")")
    e.state, e.around, e.ends = "open", _around(b), []
    e.init = None if init is None else Names(b).freeze(cast(convert(init), acc.dtype))
    fill(acc, const(identity(e.op, acc.dtype), acc.dtype))
    e.made(b)
    return EMITTED


@_in_a_sum
def reducer_update(element: Any, value: Any) -> Emitted:
    """acc[i, …] = op(acc[i, …], value), once per iteration of the enclosing T.Parallel.

    element: an element acc[i, …] of a fragment of T.alloc_reducer.  value: a scalar, cast to its dtype.
    Raises reducer-element, reducer-operand, reducer-order, reducer-use.
    """
    b = need_builder("T.reducer_update")
    if not isinstance(element, Load):
        raise error("reducer-element", f"T.reducer_update takes an element acc[i], found {describe(element)}")
    acc = element.buffer
    e = _epoch(b, acc, "T.reducer_update")
    if e.state != "open" or e.ends and e.ended(tuple((f, arm) for f, arm, _ in _around(b))):
        raise error("reducer-order", f"T.reducer_update of `{acc.name}`, which is not between reducer_init and "
                    "finalize_reducer", found=f"T.reducer_update of `{acc.name}` outside of them")
    if not any(f.parallel for f in b.frames):
        raise error("reducer-order", "‹T.reducer_update outside T.Parallel›")
    added = cast(convert(value), acc.dtype)
    if any(_uses(x, acc) for x in walk(added)):
        raise _direct_use(acc, b.here())
    b.store(acc, element.indices, Binary(OPS[e.op], element, added, acc.dtype))
    e.made(b)
    return EMITTED


@_in_a_sum
def finalize_reducer(acc: Buffer, dst: Any = None, batch: int = 1,
                     annotations: dict[str, Any] | None = None) -> Emitted:
    """Write the results to the fragment dst (older form: the results stay in acc).

    acc: a fragment of T.alloc_reducer, of any shape.  dst: a fragment of its shape and dtype.
    Raises reducer-order, reducer-operand.
    """
    b = need_builder("T.finalize_reducer")
    check_batch(batch)
    e = _epoch(b, acc, "T.finalize_reducer")
    if e.legacy or dst is None and e.state == "allocated":
        e.state = "closed"
        return EMITTED
    if e.state != "open":
        raise error("reducer-order", f"T.finalize_reducer of `{acc.name}`, which is not initialised",
                    found=f"T.finalize_reducer of `{acc.name}` without T.reducer_init")
    if not isinstance(dst, Buffer) or dst.scope_name != FRAGMENT:
        raise error("reducer-operand", f"T.finalize_reducer writes to «a fragment», found {describe(dst)}")
    if tuple(dst.shape) != tuple(acc.shape) or dst.dtype != acc.dtype:
        raise error("reducer-operand", f"T.finalize_reducer writes {_form(acc)} of `{acc.name}` to `{dst.name}`, which is "
                    f"‹{_form(dst)}›", expected=f"a fragment {_form(acc)}")
    arms = e.arms(b)
    if arms is None:
        raise error("reducer-order", f"T.finalize_reducer of `{acc.name}` stands in another scope than its T.reducer_init",
                    expected="both in one loop body or branch, or T.finalize_reducer in a branch of that scope",
                    found="T.finalize_reducer in another scope", hint="move one of them into the scope of the other")
    if e.ended(arms):
        raise error("reducer-order", f"T.finalize_reducer of `{acc.name}` may run twice",
                    found=f"T.finalize_reducer of `{acc.name}` after another one")
    e.ends.append(arms)
    e.state = "open" if arms else "closed"
    copy(acc, dst)
    e.made(b)
    if e.init is not None:
        with Parallel(*acc.shape) as index:
            where = tuple(index)  # one index unpacks to itself
            b.store(dst, where, Binary(OPS[e.op], load(dst, where), e.init, dst.dtype))
    return EMITTED


def _form(buffer: Buffer) -> str:
    return f"({', '.join(str(d) for d in buffer.shape)}) {buffer.dtype}"


def _uses(x: Any, acc: Buffer) -> bool:
    return isinstance(x, (Load, Store, AddressOf, Region)) and x.buffer.data is acc.data


def _direct_use(acc: Buffer, span: Any) -> Exception:
    return errors.error("reducer-use", f"the reducer `{acc.name}` is read or written other than by its calls",
                        found=f"a use of `{acc.name}` itself", span=span)


def check_reducers(b: Builder) -> None:
    """Check at the end of a trace that every initialised reducer was finalised and that only reducer functions used it."""
    for acc, e in b.reducers.values():
        if e.state == "open" and not e.ends:
            raise errors.error("reducer-order", f"the reducer `{acc.name}` is initialised and never finalised",
                               found=f"T.reducer_init of `{acc.name}` without T.finalize_reducer", span=acc.span)
        if not e.around:  # the older form: a fragment that loops and tile ops may use
            continue
        own = {id(x) for call in e.calls for x in walk(call)}
        place = acc.span
        for stmt in b.root.stmts:
            for x in walk(stmt):
                place = x.span if isinstance(x, Stmt) and x.span is not None else place
                if _uses(x, acc) and id(x) not in own:
                    raise _direct_use(acc, place)


__all__ = ["alloc_reducer", "finalize_reducer", "reducer_init", "reducer_update"]
