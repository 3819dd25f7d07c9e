"""An update of one element of memory that all threads of a block would run is run by one of them.

    s[0] = s[0] + f[k]     ->     f1 = f[k]
                                  if threadIdx.x == 0:
                                      s[0] = s[0] + f1

Threads that all read the element and write it back changed would see what others wrote. Interpreters and the CPU run the
statement once for the block, and so does the GPU by this pass; place_sync puts barriers around the store.
"""

from __future__ import annotations

from functools import reduce

from tilelang.errors import error, register, register_warning, warn
from tilelang.ir import (Bind, Call, Const, Expr, For, Func, If, Launch, Load, Parallel, Seq, Stmt, Store, TileOp, While,
                         binary, const, fresh, replace, rewrite, seq, statements, walk, FRAGMENT)

from tilelang.target.intrinsics import INTRINSICS, PURE

from ..analysis.access_values import rereads
from ..check.check_collective import BLOCK_BARRIERS, ByThread
from ..framework.pass_ import TILE, PassContext, pass_

register("update-by-every-thread", ValueError, "each thread of the block reads one element and writes it back changed",
         "write it under `if T.get_thread_binding() == 0:`, or with T.atomic_add",
         expected="one thread that changes the element")
register_warning("single-update", "all threads reach an update of one element of memory, and one of them runs it")


@pass_(needs=TILE)
def single_updates(func: Func, cx: PassContext) -> Func:
    """Let one thread run `s[i] = f(s[i])` outside T.Parallel where i and what is stored are the same in all threads.

    Raises update-by-every-thread where threads would store different values, and for tensors that other blocks may update at
    the same time.
    """
    bodies = {}
    for s in statements(func.body):
        if isinstance(s, Launch) and s.num_threads > 1:
            body = _Updates(s).stmt(s.body)
            if body is not s.body:
                bodies[id(s)] = replace(s, body=body)
    return rewrite(func, lambda n: bodies.get(id(n)), Launch) if bodies else func


class _Updates:
    def __init__(self, launch: Launch) -> None:
        self.launch, self.d = launch, ByThread(launch)

    def stmt(self, s: Stmt) -> Stmt:
        """s with the updates in it that all threads reach run by one thread."""
        match s:
            case Seq():
                new = tuple(map(self.stmt, s.stmts))
                return s if all(a is b for a, b in zip(new, s.stmts)) else seq(*new)
            case If() if not self.d.divergent(s.cond) and not _by_lane(s.cond):
                then, orelse = self.stmt(s.then), s.orelse and self.stmt(s.orelse)
                return s if then is s.then and orelse is s.orelse else replace(s, then=then, orelse=orelse)
            case For() if not self.d.divergent(s.start) and not self.d.divergent(s.extent):
                body = self.stmt(s.body)
                return s if body is s.body else replace(s, body=body)
            case While() if not self.d.divergent(s.cond):
                body = self.stmt(s.body)
                return s if body is s.body else replace(s, body=body)
            case Parallel() | TileOp():
                return s
            case Store() if s.buffer.scope_name.startswith(("global", "shared")) and rereads(s):
                return s if any(map(self.d.divergent, s.indices)) else self.once(s)
        return s

    def once(self, s: Store) -> Stmt:
        """The update by the first thread of the block. What it reads of fragments is read before, by all threads together."""
        blocks = {v for v, n in zip(self.launch.block_vars, map(_sized, self.launch.grid))
                  if not (isinstance(n, Const) and n.value == 1)} - set(s.indices)  # an index of its own: an element of its own
        shared = s.buffer.scope_name.startswith("shared")
        if self.d.divergent(s.value) or not _is_pure(s.value) or blocks and not shared:
            threads, once = self.launch.num_threads, "write it" if shared else "T.atomic_add"
            raise error("update-by-every-thread", f"each of the {threads} threads of the block reads an element of "
                        f"`{s.buffer.name}` here and writes it back changed: some see what others wrote",
                        expected="one thread that changes the element", found=f"{threads} threads that change it", span=s.span,
                        hint=f"to change it once for the block, {once} under `if T.get_thread_binding() == 0:`; to change it "
                             "once for each thread, T.atomic_add by all of them")
        warn("single-update", f"`{s.buffer.name}` is updated once for the block, by its first thread, though all threads reach "
             "the statement", "write it under `if T.get_thread_binding() == 0:`", span=s.span)
        before: list[Stmt] = []

        def held(e: Expr) -> Expr | None:
            if e.buffer.scope_name != FRAGMENT:  # type: ignore[attr-defined]
                return None
            v = fresh("v", e.dtype)
            before.append(Bind(v, e, span=s.span))
            return v

        value = rewrite(s.value, held, Load)
        first = [binary("eq", v, const(0)) for v, n in zip(self.launch.thread_vars, self.launch.threads) if n > 1]
        return seq(*before, If(reduce(lambda a, b: binary("and", a, b), first), replace(s, value=value), span=s.span))


def _sized(n: Expr | int) -> Expr:
    return const(n) if isinstance(n, int) else n


def _by_lane(e: Expr) -> bool:
    """Whether an expression holds calls whose result differs between threads."""
    return any(x.op not in BLOCK_BARRIERS for x in walk(e, Call))


def _is_pure(e: Expr) -> bool:
    return all((row := INTRINSICS.get(x.op)) is not None and row.effect == PURE for x in walk(e, Call))


__all__ = ["single_updates"]
