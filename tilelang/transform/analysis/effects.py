"""The memory accesses of a statement or expression, each with its mode (read, write, readwrite, atomic)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Assert, Binary, Bind, Buffer, Call, Const, Evaluate, Expr, Launch, Load, Node,
                         Parallel, Region, Stmt, Store, TileOp, Var, While, children, contains, inner, statements, walk, GLOBAL)
from tilelang.ir.record import record
from tilelang.ir.stmt import BackendStmt
from tilelang.target.intrinsics import INTRINSICS, PURE, READS, WRITES
from tilelang.target.thread_calls import CLOCKS

# Mode of each argument of device operations that take addresses (docs/internals/ir.md, "Device intrinsics").
_ARGUMENT_MODES = {
    "cp_async": ("write", "read"),
    "ldmatrix": ("write", "read"),
    "stmatrix": ("write", "read"),
    "mma": ("readwrite", "read", "read"),
    "wgmma": ("readwrite", "read", "read"),
    "tma_load": ("write", "readwrite"),
    "tma_store": ("read",),
    "tma_reduce_add": ("read",),
    "bulk_load": ("write", "read", "read", "readwrite"),
    "bulk_store": ("write", "read"),
    "bulk_copy_cluster": ("write", "read", "read", "readwrite"),
    "cluster_load": ("read",),
    "cluster_store": ("write",),
    "wgmma_descriptor": ("read",),
    "wait_signal": ("read",),
    "wgmma_pin": ("readwrite",),
    "wgmma_hold": ("read",),
    "wgmma_used": ("read",),
}
# Operations that order threads or asynchronous work. No statement may be moved across them.
SYNC_CALLS = frozenset(("sync_threads", "named_barrier", "named_barrier_arrive", "sync_warp", "sync_grid",
                        "cp_async_commit", "cp_async_wait", "wait_loads", "wait_shared", "ptx_commit_group", "ptx_wait_group",
                        "thread_return", *CLOCKS))
_DIVISIONS = frozenset(("floordiv", "floormod", "truncdiv", "truncmod"))
# Operations without effects whose value depends on the thread or on when they run.
_OF_THREADS = frozenset(("get_lane_idx", "get_warp_idx", "get_warp_idx_sync", "get_warp_group_idx", "in_warp_groups",
                         "atomic_load"))


@record
class Effect:
    """One access. indices: of an element access, else None. region: of a tile op's operand, else None.

    mode: "read" | "write" | "readwrite" | "atomic". node: the Load, Store, Call or TileOp that makes it.
    """

    buffer: Buffer
    mode: str
    node: Node
    indices: tuple[Expr, ...] | None = None
    region: Region | None = None

    @property
    def storage(self) -> Var:
        """Identifies the memory: shared by all views of it."""
        return self.buffer.data

    @property
    def reads(self) -> bool:
        return self.mode != "write"

    @property
    def writes(self) -> bool:
        return self.mode != "read"


def argument_mode(call: Call, k: int) -> str:
    """Mode in which an intrinsic uses the address that is its k-th argument."""
    if call.op.startswith("atomic_"):
        return "atomic" if k == 0 else "read"
    modes = _ARGUMENT_MODES.get(call.op)
    if modes is not None:
        return modes[k] if k < len(modes) else "read"
    row = INTRINSICS.get(call.op)
    if row is not None and row.effect in (PURE, READS):
        return "read"
    return "readwrite"


def expr_effects(e: Node) -> Iterator[Effect]:
    """Accesses made while a value is computed, in evaluation order."""
    out: list[Effect] = []
    _inside(e, out)
    return iter(out)


def touches(e: Node) -> bool:
    """Whether computing a value accesses memory."""
    return contains(e, Load, AddressOf)


def _collect(e: Node, out: list[Effect]) -> None:
    if isinstance(e, Load):
        for i in e.indices:
            _inside(i, out)
        out.append(Effect(e.buffer, "read", e, e.indices))
    elif isinstance(e, Call):
        for k, a in enumerate(e.args):
            if isinstance(a, AddressOf):
                for i in a.indices:
                    _inside(i, out)
                out.append(Effect(a.buffer, argument_mode(e, k), e, a.indices))
            else:
                _inside(a, out)
    elif isinstance(e, AddressOf):  # an address that escapes: any access through it is possible
        for i in e.indices:
            _inside(i, out)
        out.append(Effect(e.buffer, "readwrite", e, None))
    else:
        for c in children(e):
            _inside(c, out)


def _inside(e: Node, out: list[Effect]) -> None:
    if touches(e):
        _collect(e, out)


def own_effects(s: Stmt) -> tuple[Effect, ...]:
    """Accesses that a statement makes itself, in conditions and bounds too, but not those of nested statements. Cached on the
    statement, which is immutable."""
    known: tuple[Effect, ...] | None = s._effects
    if known is None:
        known = tuple(_made_by(s))
        object.__setattr__(s, "_effects", known)
    return known


def _made_by(s: Stmt) -> Iterator[Effect]:
    if isinstance(s, TileOp):
        for c in children(s):
            for e in (*c.mins, *c.extents) if isinstance(c, Region) else (c,):
                if isinstance(e, Expr):
                    yield from expr_effects(e)
        for a in s.accesses():  # type: ignore[attr-defined]
            yield Effect(a.region.buffer, a.mode, s, None, a.region)
        return
    for e in s.grid if isinstance(s, Launch) else () if isinstance(s, BackendStmt) else children(s):
        if isinstance(e, Expr):
            yield from expr_effects(e)
    if isinstance(s, Store):
        yield Effect(s.buffer, "write", s, s.indices)
    elif isinstance(s, Alloc) and s.init is not None:
        yield Effect(s.buffer, "write", s, None)


def effects(s: Stmt) -> Iterator[Effect]:
    """Every access below a statement, in program order."""
    stack = [s]
    while stack:
        at = stack.pop()
        yield from own_effects(at)
        below = inner(at)
        if below:
            stack += reversed(below)


def tile_of(e: Effect) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The indices of an access's first element, and how many it reaches in each dimension; None where that is not known."""
    if e.region is not None:
        return e.region.mins, e.region.extents
    op = e.node.op if isinstance(e.node, Call) else ""
    if e.indices is None or op and not (op.startswith("atomic_") or op == "ldg"):
        return None
    return e.indices, (*(1 for _ in e.indices[1:]), {"atomic_addx2": 2, "atomic_addx4": 4}.get(op, 1))


def written_globals(s: Stmt) -> set[Var]:
    """Storage in global memory that s writes."""
    return {e.storage for e in effects(s) if e.writes and e.buffer.scope_name == GLOBAL}


def acts(s: Stmt) -> bool:
    """Whether a statement has an effect outside its block: global memory written, output, a failed assertion. Calls that are
    not known to be harmless count as such."""
    if written_globals(s):
        return True
    for x in walk(s):
        row = INTRINSICS.get(x.op) if isinstance(x, Call) else None
        if isinstance(x, Assert) or isinstance(x, Call) and (row is None or row.effect == WRITES):
            return True
    return False


def fills_whole(s: Stmt) -> bool:
    """Whether a statement writes only one buffer, and overwrites all of it: a whole tile op, or a parallel loop that stores
    each of its elements."""
    writes = [e for e in effects(s) if e.writes]
    if isinstance(s, TileOp):
        return len(writes) == 1 and writes[0].mode == "write" and writes[0].region is not None and writes[0].region.is_full
    if not isinstance(s, Parallel) or not isinstance(s.body, Store):
        return False
    b = s.body.buffer
    return s.body.indices == s.vars and len(b.shape) == len(s.extents) and all(
        isinstance(n, Const) and n.value == m for n, m in zip(s.extents, b.shape))


def orders(s: Stmt) -> bool:
    """Whether a statement below (or s) orders threads or asynchronous work."""
    return any(map(is_ordering, statements(s)))


def is_ordering(s: Stmt) -> bool:
    """Whether a statement orders threads or asynchronous work, or reads a clock."""
    return isinstance(s, Evaluate) and is_sync(s.call) or isinstance(s, Bind) and any(c.op in CLOCKS for c in walk(s, Call))


def is_sync(call: Any) -> bool:
    """Whether an intrinsic orders threads or asynchronous work."""
    row = INTRINSICS.get(call.op)
    return call.op in SYNC_CALLS or (row is not None and row.effect == "sync")


def may_wait(body: Stmt) -> bool:
    """Whether a block may depend on the progress of another one: it uses the result of an atomic, or spins in a loop."""
    unused = {id(x.call) for x in walk(body, Evaluate)}
    return any(isinstance(x, While) or isinstance(x, Call) and x.op.startswith("atomic") and id(x) not in unused
               for x in walk(body))


def hangs_on_threads(e: Node) -> bool:
    """Whether a value may change when other threads compute it, fewer threads, or at another time: lane exchanges, thread
    numbers, volatile reads of memory, functions whose source is unknown here."""
    for x in walk(e):
        if isinstance(x, Call):
            row = INTRINSICS.get(x.op)
            if x.op in _OF_THREADS or row is None or row.effect not in (PURE, READS):
                return True
    return False


def cannot_fail(e: Node, allowed: Callable[[Load], bool] = lambda _: False) -> bool:
    """Whether threads that did not compute a value may do so: nothing observes it.  allowed: which loads are."""
    return not any(
        isinstance(x, Call) or isinstance(x, Load) and not allowed(x) or
        isinstance(x, Binary) and x.op in _DIVISIONS and not (isinstance(x.b, Const) and x.b.value) for x in walk(e))


def updated_element(x: Any) -> AddressOf | None:
    """The element that an atomic call changes."""
    if isinstance(x, Call) and x.op.startswith("atomic_") and x.op != "atomic_load" and x.args and isinstance(
            x.args[0], AddressOf):
        return x.args[0]
    return None
