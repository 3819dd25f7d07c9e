"""Backward liveness of storage over structured statements: whether its value may still be read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from tilelang.ir import (Alloc, Break, Buffer, Const, Continue, For, If, Launch, Parallel, Seq, Stmt, Store, Var, While,
                         TileOp, is_const, stmts_of, walk)
from tilelang.ops import Combine, Reduce, Scan

from .effects import Effect, effects, own_effects
from .statements import select_stores
from .pipeline_loops import Item


class Liveness:
    """Liveness of all memory that `body` accesses; every value is dead after `body`.

    Sets of storages are integers, one bit for each. Only a write that covers the whole buffer ends a live range, so the answer
    is conservative: "live" where unsure.
    """

    def __init__(self, body: Stmt) -> None:
        self._bits: dict[Var, int] = {}
        self._out: dict[int, int] = {}  # per id of a statement
        self._leave = 0  # what is live after the innermost loop, where a break goes
        self._again = 0  # what is live at the start of its next iteration, where a continue goes
        self.carried = 0  # what some iteration of a loop may read of an earlier one
        self._into = self.before(body, 0)

    def bit(self, storage: Var) -> int:
        """The bit that stands for a storage."""
        return self._bits.setdefault(storage, 1 << len(self._bits))

    def after(self, s: Stmt) -> int:
        """The storages whose values may be read after s."""
        return self._out.get(id(s), 0)

    def enters(self, storage: Var) -> bool:
        """Whether the body may read what the storage holds before it."""
        return bool(self._into & self.bit(storage))

    def before(self, s: Stmt, after: int) -> int:
        """The storages whose values before s may be read, given those after s."""
        self._out[id(s)] = self._out.get(id(s), 0) | after
        match s:
            case Seq():
                together = _ended_together(s.stmts)
                for k, x in reversed([*enumerate(s.stmts)]):
                    after = self.before(x, after) & ~sum(self.bit(storage) for storage in together.get(k, ()))
                return after
            case If():
                then = self.before(s.then, after)
                orelse = self.before(s.orelse, after) if s.orelse is not None else after
                return self.reads(own_effects(s)) | then | orelse
            case For():
                return self.reads(own_effects(s)) | self.loop(s.body, after, isinstance(s.extent, Const) and s.extent.value > 0)
            case While():
                cond = self.reads(own_effects(s))
                return self.loop(s.body, after | cond, False) | cond
            case Parallel():
                return self.reads(effects(s)) | after & ~sum(map(self.bit, filled(s)))
            case Break():
                return self._leave
            case Continue():
                return self._again
            case Launch():
                return self.before(s.body, after)
        mine = own_effects(s)
        ended = {s.buffer.data} if isinstance(s, Alloc) else {
            e.storage for e in mine if e.mode == "write" and e.region is not None and e.region.is_full}
        return self.reads(mine) | after & ~sum(map(self.bit, ended))

    def loop(self, body: Stmt, after: int, runs: bool) -> int:
        kept = self._leave, self._again
        first = 0
        for _ in range(2):  # the second pass sees what the next iteration reads; a third would change nothing
            self._leave, self._again = after, after | first
            first = self.before(body, after | first)
        self._leave, self._again = kept
        self.carried |= first
        return first if runs else after | first

    def reads(self, es: Iterable[Effect]) -> int:
        return sum(map(self.bit, {e.storage for e in es if e.reads}))


class Uses:
    """Liveness and views of the buffers of a body, each found once."""

    def __init__(self, body: Stmt) -> None:
        self.body = body
        self._inside: dict[For, Liveness] = {}

    @cached_property
    def _live(self) -> Liveness:
        return Liveness(self.body)

    def carried(self, storage: Var, loop: For) -> bool:
        """Whether an iteration of a loop may read what an earlier one left in storage."""
        if loop not in self._inside:
            self._inside[loop] = Liveness(loop.body)
        return self._inside[loop].enters(storage)

    @cached_property
    def _seen(self) -> dict[Var, set[Buffer]]:
        out: dict[Var, set[Buffer]] = {}
        for e in effects(self.body):
            out.setdefault(e.storage, set()).add(e.buffer)
        return out

    def has_views(self, b: Buffer) -> bool:
        """Whether another buffer in the body shares b's storage."""
        return not self._seen.get(b.data, set()) <= {b}

    def unversionable(self, loop: For, items: list[Item], b: Buffer) -> str:
        """Why a shared buffer cannot have versions; "" if it can."""
        if not b.is_static or b.strides_ is not None:
            return f"`{b.name}` has a run-time shape"
        if self.has_views(b):
            return f"`{b.name}` has views"
        for x in items:
            if x.touches(b.data) and any(  # these ops count the dimensions of the buffer; they may also be inside a branch
                    b.data is a.region.buffer.data for n in walk(x.stmt, Combine, Reduce, Scan) for a in n.accesses()):
                return f"`{b.name}` is reduced or scanned in shared memory"
            if any(e.storage is b.data and e.indices is None and e.region is None for e in x.effects):
                return f"the address of `{b.name}` is taken"
        if self.carried(b.data, loop):
            return f"`{b.name}` carries values to the next iteration"
        if self._live.after(loop) & self._live.bit(b.data):
            return f"`{b.name}` is used after the loop"
        return ""


def _ended_together(stmts: tuple[Stmt, ...]) -> dict[int, set[Var]]:
    """Storages that several statements of a sequence write together, by the number of the first of them: their regions follow
    each other in one dimension, and nothing reads the storage in between."""
    out: dict[int, set[Var]] = {}
    begun: dict[Var, tuple[int, int]] = {}  # the first statement, and where the next region is to start
    for k, s in enumerate(stmts):
        alone = isinstance(s, TileOp)
        for e in effects(s):
            at = _rows(e) if alone and e.mode == "write" else None
            first, end = begun.pop(e.storage, (k, 0))
            if at is None or at[0] not in (0, end):
                continue
            first = k if at[0] == 0 else first
            if at[1] == e.buffer.shape[0]:
                out.setdefault(first, set()).add(e.storage)
            else:
                begun[e.storage] = first, at[1]
    return out


def _rows(e: Effect) -> tuple[int, int] | None:
    """First and end of the rows that an effect covers whole; None where it covers other elements, or they are not known."""
    r = e.region
    if r is None or not all(isinstance(n, int) for n in (*e.buffer.shape, *r.extents)):
        return None
    if not all(isinstance(a, Const) for a in r.mins) or any(
            not is_const(a, 0) or n != m for a, n, m in zip(r.mins[1:], r.extents[1:], e.buffer.shape[1:])):
        return None
    begin = int(r.mins[0].value)  # type: ignore[attr-defined]
    return begin, begin + int(r.extents[0])


def filled(p: Parallel) -> set[Var]:
    """Storages of which a parallel loop certainly stores every element: `S[i, j] = …` over the whole shape."""
    sizes = dict(zip(p.vars, p.extents))
    return {s.buffer.data for s in map(select_stores, stmts_of(p.body))
            if isinstance(s, Store) and len(s.indices) == len(p.vars) and {*s.indices} == {*p.vars}
            and all(isinstance(n, int) and is_const(sizes[i], n) for i, n in zip(s.indices, s.buffer.shape))}  # type: ignore


def has_views(buffer: Buffer, root: Stmt) -> bool:
    """Whether another buffer below root shares buffer's storage."""
    return any(e.storage is buffer.data and e.buffer is not buffer for e in effects(root))
