"""A launch whose roles or blocks wait for each other: a coroutine for each role, and a function that runs groups of them.

    blocks(context, first, last, arena)      for each group: its coroutines, resumed in turn until all are done
    role_k(values…, storage…, group, block)  what role k of a block does

A group is a block; the blocks of a cluster; all blocks of the launch, where they meet at a grid barrier.  Its storage lies
in the arena of the worker: group state, then of each block its state, the handles of its coroutines and its buffers.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.arith import Analyzer
from tilelang.ir import Alloc, Call, Launch, walk
from tilelang.target.cluster import cluster_of
from tilelang.target.tensor_map import tensor_maps_of

from .actors import (
    ACTORS,
    BARRIER_WORDS,
    FAILURES,
    GROUP_WORDS,
    LIVE,
    MEETINGS,
    MISSING,
    Coroutine,
    init_barrier,
    run_group,
    word,
)
from .descriptors import FIRST_MISUSE, Addresses, space_of
from .lane_faults import LaneFaults
from .masks import masked
from .roles import Role, Split
from .stmts import Statements
from .text import Fn, clean, is_literal
from .threads import analyse_threads, is_private
from .types import unsupported

GROUP_BYTES = 64


def is_barrier(b: Any) -> bool:
    """Whether a buffer is an array of mbarriers."""
    return bool(b.scope() in ("shared.barrier", "shared.cluster_barrier"))


def shared_slots(s: Launch) -> list[tuple[Any, int]]:
    """(buffer, copies) of what the roles of a block share."""
    out, seen = [], set()
    for n in walk(s.body):
        if isinstance(n, Alloc) and n.buffer.data not in seen and n.buffer.scope() != "global" and not is_private(n.buffer):
            if n.buffer.scope() == "shared.tmem":
                raise unsupported(f"memory of scope {n.buffer.scope()}", span=n.span)
            seen.add(n.buffer.data)
            out.append((n.buffer, BARRIER_WORDS if is_barrier(n.buffer) else 1))
    return out


class ActorLaunch:
    """Emits one such launch.  host: the entry function.  slots, captured: as launch.py makes them."""

    def __init__(self, host: Any, s: Launch, name: str, slots: list[Any], captured: list[Any], faults: LaneFaults) -> None:
        self.host, self.launch, self.name, self.slots, self.captured = host, s, name, slots, captured
        self.faults = faults
        self.grid = any(isinstance(n, Call) and n.op == "sync_grid" for n in walk(s.body))
        self.cluster = cluster_of(s) or (1, 1, 1)
        self.split = Split(s)
        self.scratch = 0
        self.space, self.maps = space_of(s), {m.name: m for m in tensor_maps_of(s)}
        self.misuses: dict[str, int] = {}  # what a program may do wrong with descriptors, and the number of each
        self.functions = [self._role(r) for r in self.split.roles]

    # ---- sizes of the arena -----------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        words = MEETINGS + 2 * len(self.split.keys) + len(self.functions)
        return -(-words * 8 // 64) * 64

    @property
    def handles(self) -> int:
        """Word of a block's state at which the handles begin."""
        return MEETINGS + 2 * len(self.split.keys)

    # ---- a role -------------------------------------------------------------------------------------------------------

    def _role(self, role: Role) -> str:
        host, s = self.host, masked(self.split.of(role))
        params = [("i64", f"b{d}", "") for d in range(3)]
        names = [f"{clean(c.var.name)}_{k}" for k, c in enumerate(self.captured)]
        places = [f"{clean(t.buffer.name)}_{len(names) + k}" for k, t in enumerate(self.slots)]
        # No pointer is noalias: other roles use the memory while this one waits.
        params += [(c.type, n, "") for n, c in zip(names, self.captured)]
        params += [("ptr", p, "nonnull align 64") for p in places]
        params += [("ptr", p, "nonnull align 64") for p in ("scratch", "group", "state")]
        # The block's rank in its cluster, the bytes from one block to the next, the state of the cluster's first block.
        params += [("i64", "rank", ""), ("i64", "stride", ""), ("ptr", "cluster", "nonnull align 64")]
        f = Fn(host.f.module, f"{self.name}_role_{role.number}", "ptr", params, attrs="nounwind presplitcoroutine")
        threads = analyse_threads(s)
        body = Statements(f, host.host, Analyzer(), threads, s.thread_vars, s.threads)
        body.role, body.ranges, body.coroutine = role, role.ranges, Coroutine(f)
        body.faults, body.cluster = self.faults, (math.prod(self.cluster), len(self.split.roles))
        self.host.open_block(body, s, names, self.captured, zip(places, self.slots))
        body.maps, body.misuses = self.maps, self.misuses
        if self.space.placed:
            body.addresses = Addresses(body, self.space)
        body.stmt(s.body)
        body.coroutine.finish()
        self.scratch = max(self.scratch, body.scratch_bytes)
        return f.name

    # ---- the groups -----------------------------------------------------------------------------------------------------

    def block_bytes(self, f: Fn, sizes: list[str]) -> str:
        total = str(self.state_bytes)
        for x in sizes:
            total = f.add(x, total)
        return total

    def blocks_function(self, kind: str, first_size: int, count_at: int, failed_at: int) -> None:
        """define void @name(context, first, last, arena).  first_size, count_at, failed_at: fields of the context."""
        f = Fn(self.host.f.module, self.name, "void",
               [("ptr", "context", "readonly"), ("i64", "first", ""), ("i64", "last", ""), ("ptr", "arena", "")])

        def read(k: int, t: str) -> str:
            return f.let(f"load {t}, ptr {f.let(f'getelementptr inbounds {kind}, ptr %context, i32 0, i32 {k}')}")

        values = [(c.type, read(k, c.type)) for k, c in enumerate(self.captured)]
        gx, gy = read(len(values), "i64"), read(len(values) + 1, "i64")
        sizes = [read(first_size + k, "i64") for k in range(len(self.slots))]
        failed = read(failed_at, "ptr")
        stride = self.block_bytes(f, sizes)
        group = f.at("%arena", "i8", str(-(-self.scratch // 64) * 64))
        dx, dy, dz = self.cluster
        mates = dx * dy * dz
        blocks = read(count_at, "i64") if self.grid else str(mates)
        zero = f.module.declare("llvm.memset.p0.i64", "void", "ptr, i8, i64, i1")
        arrive = {id(n.buffer.data): n.buffer.attr("arrive") for n in walk(self.launch.body)
                  if isinstance(n, Alloc) and is_barrier(n.buffer)}

        def state(b: str) -> str:
            return f.at(group, "i8", f.add(f.mul(b, stride), str(GROUP_BYTES)))

        with f.loop("%first", "%last", hint="group") as g:
            f.do(f"call void {zero}(ptr {group}, i8 0, i64 {GROUP_WORDS * 8}, i1 false)")
            f.do(f"store i64 {f.mul(blocks, str(len(self.functions)))}, ptr {word(f, group, ACTORS)}")
            with f.loop("0", blocks, hint="block") as b:
                number, rank = (g, b) if not self.grid else (b, "0") if mates == 1 else (
                    f.let(f"udiv i64 {b}, {mates}"), f.let(f"urem i64 {b}, {mates}"))
                x, y, z = self.place_of(f, number, rank, gx, gy)
                own = state(b)
                f.do(f"call void {zero}(ptr {own}, i8 0, i64 {self.state_bytes}, i1 false)")
                f.do(f"store i64 {len(self.functions)}, ptr {word(f, own, LIVE)}")
                places, at = [], f.at(own, "i8", str(self.state_bytes))
                for t, size in zip(self.slots, sizes):
                    places.append(at)
                    for k, n in enumerate(arrive.get(id(t.buffer.data)) or ()):
                        init_barrier(f, f.at(at, "i64", str(k * BARRIER_WORDS)), str(n))
                    at = f.at(at, "i8", size)
                args = [f"i64 {v}" for v in (x, y, z)] + [f"{t} {v}" for t, v in values]
                args += [f"ptr {p}" for p in (*places, "%arena", group, own)] + [f"i64 {rank}", f"i64 {stride}"]
                args.append(f"ptr {own if mates == 1 else state(f.sub(b, rank))}")
                for k, name in enumerate(self.functions):
                    h = f.let(f"call ptr @{name}({', '.join(args)})")
                    f.do(f"store ptr {h}, ptr {word(f, own, self.handles + k)}")
                    none = f.let(f"icmp eq ptr {h}, null")
                    f.branch(none, lambda: f.do(f"store i64 1, ptr {word(f, group, MISSING)}"))
            run_group(f, group, blocks, lambda b, r: word(f, state(b), self.handles + r), len(self.functions), failed)
        f.end("ret void")
        f.finish()

    def groups(self, count: str) -> str:
        """How many groups so many blocks are."""
        f, n = self.host.f, math.prod(self.cluster)
        return f.smin(count, "1") if self.grid else count if n == 1 else f.let(f"sdiv i64 {count}, {n}")

    def check_grid(self, grid: list[str]) -> None:
        """The call fails where clusters do not divide the grid."""
        f, cx = self.host.f, self.host
        message = f.module.string(f"kernel {cx.func.name}: clusters of {self.cluster} blocks do not divide the grid")
        for have, n in zip(grid, self.cluster):
            if n > 1 and not (is_literal(have) and int(have) % n == 0):
                f.branch(f.let(f"icmp ne i64 {f.let(f'srem i64 {have}, {n}')}, 0"), lambda: cx._fail(message))

    def place_of(self, f: Fn, i: str, rank: str, gx: str, gy: str) -> tuple[str, str, str]:
        """Block indices of the block of a rank in cluster i.  gx, gy: blocks of the grid along x and y."""
        dims = self.cluster
        if dims[:2] != (1, 1):
            gx, gy = f.let(f"udiv i64 {gx}, {dims[0]}"), f.let(f"udiv i64 {gy}, {dims[1]}")
        rest = f.let(f"udiv i64 {i}, {gx}")
        first = [f.let(f"urem i64 {i}, {gx}"), f.let(f"urem i64 {rest}, {gy}"), f.let(f"udiv i64 {rest}, {gy}")]
        out = []
        for at, n in zip(first, dims):
            out.append(f.add(f.mul(at, str(n)), f.let(f"urem i64 {rank}, {n}") if n > 1 else "0"))
            rank = f.let(f"udiv i64 {rank}, {n}") if n > 1 else rank
        return out[0], out[1], out[2]

    def report(self, failed: str) -> None:
        """The call fails where a group did."""
        f, cx = self.host.f, self.host
        got = f.let(f"load i32, ptr {failed}")
        misused = ((FIRST_MISUSE + k, text) for text, k in self.misuses.items())
        for code, text in (*FAILURES, *misused):
            message = f.module.string(f"kernel {cx.func.name}: {text}")
            f.branch(f.let(f"icmp eq i32 {got}, {code}"), lambda m=message: cx._fail(m))  # type: ignore[misc]


__all__ = ["GROUP_BYTES", "ActorLaunch", "shared_slots"]
