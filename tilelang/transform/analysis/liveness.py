"""Backward liveness of one storage over structured statements: whether its value may still be read."""

from __future__ import annotations

from functools import cached_property

from tilelang.ir import (Alloc, Break, Buffer, Const, Continue, For, If, Launch, Parallel, Seq, Stmt, Store, Var, While,
                         is_const, stmts_of)

from .effects import Effect, effects, own_effects


class Liveness:
    """Liveness of the memory `storage` inside `body`; the value is dead after `body`.

    out[id(stmt)]: whether a value that it holds after stmt may be read later. Only a write that covers the whole buffer
    ends a live range, so the answer is conservative: "live" where unsure.
    """

    def __init__(self, storage: Var, body: Stmt) -> None:
        self.storage = storage
        self.out: dict[int, bool] = {}
        self.leave = False  # liveness after the innermost loop, where a break goes
        self.again = False  # liveness at the start of its next iteration, where a continue goes
        self.before(body, False)

    def after(self, s: Stmt) -> bool:
        """Whether the value may be read after s."""
        return self.out.get(id(s), False)

    def before(self, s: Stmt, after: bool) -> bool:
        """Whether the value held before s may be read, given that after s."""
        self.out[id(s)] = self.out.get(id(s), False) or after
        match s:
            case Seq():
                for x in reversed(s.stmts):
                    after = self.before(x, after)
                return after
            case If():
                then = self.before(s.then, after)
                orelse = self.before(s.orelse, after) if s.orelse is not None else after
                return self.reads(own_effects(s)) or then or orelse
            case For():
                return self.reads(own_effects(s)) or self.loop(s.body, after, _runs_once(s))
            case While():
                cond = self.reads(own_effects(s))
                return self.loop(s.body, after or cond, False) or cond
            case Parallel():
                if self.reads(effects(s)):
                    return True
                return after and not _fills(s, self.storage)
            case Break():
                return self.leave
            case Continue():
                return self.again
            case Launch():
                return self.before(s.body, after)
        mine = [e for e in own_effects(s) if e.storage is self.storage]
        if any(e.reads for e in mine):
            return True
        if isinstance(s, Alloc) and s.buffer.data is self.storage:
            return False
        return after and not any(_covers(e) for e in mine)

    def loop(self, body: Stmt, after: bool, runs: bool) -> bool:
        kept = self.leave, self.again
        first = False
        for _ in range(2):  # the second pass sees what the next iteration reads; a third would change nothing
            self.leave, self.again = after, after or first
            first = self.before(body, after or first)
        self.leave, self.again = kept
        return first if runs else after or first

    def reads(self, es: object) -> bool:
        return any(e.storage is self.storage and e.reads for e in es)  # type: ignore[attr-defined]


def live_into(storage: Var, body: Stmt) -> bool:
    """Whether body, run as one loop iteration, may read what an earlier iteration left in storage."""
    return Liveness(storage, Seq(())).before(body, False)


class Uses:
    """Liveness and views of the buffers of a body, each found once."""

    def __init__(self, body: Stmt) -> None:
        self.body = body
        self._live: dict[Var, Liveness] = {}

    def live_after(self, storage: Var, s: Stmt) -> bool:
        """Whether the value in storage may be read after s."""
        if storage not in self._live:
            self._live[storage] = Liveness(storage, self.body)
        return self._live[storage].after(s)

    @cached_property
    def _seen(self) -> dict[Var, set[Buffer]]:
        out: dict[Var, set[Buffer]] = {}
        for e in effects(self.body):
            out.setdefault(e.storage, set()).add(e.buffer)
        return out

    def has_views(self, b: Buffer) -> bool:
        """Whether another buffer in the body shares b's storage."""
        return not self._seen.get(b.data, set()) <= {b}


def _runs_once(s: For) -> bool:
    return isinstance(s.extent, Const) and s.extent.value > 0


def _covers(e: Effect) -> bool:
    """Whether a write certainly covers its whole buffer, and the buffer its whole storage."""
    if e.mode != "write" or e.region is None:
        return False
    return e.region.is_full


def _fills(p: Parallel, storage: Var) -> bool:
    """Whether a parallel loop certainly stores every element: `S[i, j] = …` over the whole shape."""
    for s in stmts_of(p.body):
        if isinstance(s, Store) and s.buffer.data is storage and len(s.indices) == len(p.vars) == len(s.buffer.shape):
            if all(i is v and _is(e, d) for i, v, e, d in zip(s.indices, p.vars, p.extents, s.buffer.shape)):
                return True
    return False


def _is(extent: object, dim: object) -> bool:
    return isinstance(dim, int) and is_const(extent, dim)


def has_views(buffer: Buffer, root: Stmt) -> bool:
    """Whether another buffer below root shares buffer's storage."""
    return any(e.storage is buffer.data and e.buffer is not buffer for e in effects(root))


__all__ = ["Liveness", "Uses", "has_views", "live_into"]
