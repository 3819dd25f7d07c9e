"""Launches whose warp roles or blocks wait for each other: a coroutine for each warp role, and a function that runs groups of
them.

    blocks(context, first, last, arena)      for each group: its coroutines, resumed in rotation until all have ended
    role_k(values…, storage…, group, block)  the body of warp role k of a block

A group is a block; the blocks of a cluster; all blocks of the launch, where they meet at a grid barrier. Its storage lies in
the arena of the worker: group state, then of each block its state, the handles of its coroutines and its buffers.
"""

from __future__ import annotations

import math

from tilelang.ir import Alloc, Var, walk
from tilelang.target.cluster import cluster_of
from tilelang.target.cpu_launch import BARRIER_WORDS, WarpRoleCode, is_barrier_array
from tilelang.target.tensor_map import tensor_maps_of

from .block_function import LaunchFrame, open_block, print_body
from .coroutine import (COROUTINES, FAILURES, FIRST_MISUSE, GROUP_WORDS, LIVE, MISSING, WARP_ROLE_BARRIERS, Coroutine,
                        init_barrier, run_group, word)
from .shared_addresses import AddressTable
from .state import WarpRoleState
from .text import Fn, is_literal

GROUP_BYTES = 64


class CoroutineLaunch:
    """Prints the functions of such a launch.

    cluster: blocks of a cluster along x, y, z. misuses: the texts of a program's misuses of descriptors, with their numbers.
    functions: of the warp roles. scratch: bytes of converted operands.
    """

    def __init__(self, frame: LaunchFrame) -> None:
        self.frame, self.host, self.plan = frame, frame.host, frame.plan
        self.cluster = cluster_of(frame.plan.launch) or (1, 1, 1)
        self.maps = {m.name: m for m in tensor_maps_of(frame.plan.launch)}
        self.misuses: dict[str, int] = {}
        self.scratch = max(c.scratch for c in frame.plan.codes)
        self.functions = [self._warp_role(code) for code in frame.plan.codes]

    # ---- sizes of the arena -----------------------------------------------------------------------------------------

    @property
    def handles(self) -> int:
        """The word of a block's state at which the handles of its coroutines begin."""
        return WARP_ROLE_BARRIERS + 2 * self.plan.warp_role_barriers

    @property
    def state_bytes(self) -> int:
        """The bytes of a block's state, its handles included."""
        return -(-(self.handles + len(self.plan.codes)) * 8 // 64) * 64

    def block_bytes(self, f: Fn, sizes: list[str]) -> str:
        """The bytes of a block in the arena. sizes: of its slots."""
        total = str(self.state_bytes)
        for x in sizes:
            total = f.add(x, total)
        return total

    def group_bytes(self, f: Fn, sizes: list[str], count: str) -> str:
        """The bytes of a group in the arena. count: blocks of the launch."""
        blocks = count if self.plan.grid_barrier else str(math.prod(self.cluster))
        return f.add(f.mul(blocks, self.block_bytes(f, sizes)), str(GROUP_BYTES))

    # ---- a warp role -------------------------------------------------------------------------------------------------------

    def _warp_role(self, code: WarpRoleCode) -> str:
        frame = self.frame
        params = [("i64", f"b{d}", "") for d in range(3)]
        # No pointer is noalias: other warp roles use the memory while this one waits.
        params += [(c.type, n, "") for n, c in zip(frame.value_names, frame.captured)]
        params += [("ptr", p, "nonnull align 64") for p in frame.slot_names]
        params += [("ptr", p, "nonnull align 64") for p in ("scratch", "group", "state")]
        # The block's rank in its cluster, the bytes from one block to the next, the state of the cluster's first block.
        params += [("i64", "rank", ""), ("i64", "stride", ""), ("ptr", "cluster", "nonnull align 64")]
        f = Fn(self.host.code.f.module, f"{frame.name}_role_{code.warp_role.number}", "ptr", params,
               attrs="nounwind presplitcoroutine")
        blocks = math.prod(self.cluster), len(self.plan.codes)
        warp_role = WarpRoleState(code.warp_role, Coroutine(f), blocks, self.maps, self.misuses)
        cx = open_block(frame, f, code, warp_role)
        if self.plan.space.placed:
            bases = [cx.storage[p.buffer.data].base for p in self.plan.space.placed]
            warp_role.addresses = AddressTable(f, self.plan.space, bases)
        print_body(cx, code)
        warp_role.coroutine.finish()
        return f.name

    # ---- the groups -----------------------------------------------------------------------------------------------------

    def print_blocks(self, kind: str, first_size: int, count_at: int, failed_at: int) -> None:
        """define void @name(context, first, last, arena).  first_size, count_at, failed_at: fields of the context."""
        f = Fn(self.host.code.f.module, self.frame.name, "void",
               [("ptr", "context", "readonly"), ("i64", "first", ""), ("i64", "last", ""), ("ptr", "arena", "")])

        def read(k: int, t: str) -> str:
            return f.let(f"load {t}, ptr {f.let(f'getelementptr inbounds {kind}, ptr %context, i32 0, i32 {k}')}")

        values = [(c.type, read(k, c.type)) for k, c in enumerate(self.frame.captured)]
        gx, gy = read(len(values), "i64"), read(len(values) + 1, "i64")
        sizes = [read(first_size + k, "i64") for k in range(len(self.plan.slots))]
        failed = read(failed_at, "ptr")
        stride = self.block_bytes(f, sizes)
        group = f.at("%arena", "i8", str(-(-self.scratch // 64) * 64))
        mates = math.prod(self.cluster)
        blocks = read(count_at, "i64") if self.plan.grid_barrier else str(mates)
        zero = f.module.declare("llvm.memset.p0.i64", "void", "ptr, i8, i64, i1")

        def state(b: str) -> str:
            return f.at(group, "i8", f.add(f.mul(b, stride), str(GROUP_BYTES)))

        with f.loop("%first", "%last", hint="group") as g:
            f.do(f"call void {zero}(ptr {group}, i8 0, i64 {GROUP_WORDS * 8}, i1 false)")
            f.do(f"store i64 {f.mul(blocks, str(len(self.functions)))}, ptr {word(f, group, COROUTINES)}")
            with f.loop("0", blocks, hint="block") as b:
                number, rank = (g, b) if not self.plan.grid_barrier else (b, "0") if mates == 1 else (
                    f.let(f"udiv i64 {b}, {mates}"), f.let(f"urem i64 {b}, {mates}"))
                x, y, z = self._block_indices(f, number, rank, gx, gy)
                own = state(b)
                f.do(f"call void {zero}(ptr {own}, i8 0, i64 {self.state_bytes}, i1 false)")
                f.do(f"store i64 {len(self.functions)}, ptr {word(f, own, LIVE)}")
                args = [f"i64 {v}" for v in (x, y, z)] + [f"{t} {v}" for t, v in values]
                args += [f"ptr {p}" for p in (*self._storage(f, own, sizes), "%arena", group, own)]
                args += [f"i64 {rank}", f"i64 {stride}", f"ptr {own if mates == 1 else state(f.sub(b, rank))}"]
                self._start_warp_roles(f, args, group, own)
            run_group(f, group, blocks, lambda b, r: word(f, state(b), self.handles + r), len(self.functions), failed)
        f.end("ret void")
        f.finish()

    def _storage(self, f: Fn, own: str, sizes: list[str]) -> list[str]:
        """The addresses of a block's slots behind its state. Initialises the mbarriers among them."""
        arrivals: dict[Var, tuple[int, ...]] = {n.buffer.data: n.buffer.facts.arrive or ()
                                                for n in walk(self.plan.launch.body, Alloc) if is_barrier_array(n.buffer)}
        places, at = [], f.at(own, "i8", str(self.state_bytes))
        for t, size in zip(self.plan.slots, sizes):
            places.append(at)
            for k, n in enumerate(arrivals.get(t.buffer.data, ())):
                init_barrier(f, f.at(at, "i64", str(k * BARRIER_WORDS)), str(n))
            at = f.at(at, "i8", size)
        return places

    def _start_warp_roles(self, f: Fn, args: list[str], group: str, own: str) -> None:
        """Create the coroutines of a block and store their handles in its state."""
        for k, name in enumerate(self.functions):
            h = f.let(f"call ptr @{name}({', '.join(args)})")
            f.do(f"store ptr {h}, ptr {word(f, own, self.handles + k)}")
            none = f.let(f"icmp eq ptr {h}, null")
            f.branch(none, lambda: f.do(f"store i64 1, ptr {word(f, group, MISSING)}"))

    def groups(self, count: str) -> str:
        """The number of groups of `count` blocks."""
        f, n = self.host.code.f, math.prod(self.cluster)
        return f.smin(count, "1") if self.plan.grid_barrier else count if n == 1 else f.let(f"sdiv i64 {count}, {n}")

    def check_grid(self, grid: list[str]) -> None:
        """Emit a check that clusters divide the grid; otherwise the call fails."""
        f = self.host.code.f
        message = f.module.string(f"kernel {self.host.func.name}: clusters of {self.cluster} blocks do not divide the grid")
        for have, n in zip(grid, self.cluster):
            if n > 1 and not (is_literal(have) and int(have) % n == 0):
                self.host.fail_if(f.let(f"icmp ne i64 {f.let(f'srem i64 {have}, {n}')}, 0"), message)

    def _block_indices(self, f: Fn, i: str, rank: str, gx: str, gy: str) -> tuple[str, str, str]:
        """The block indices of the block of a rank in cluster i. gx, gy: blocks of the grid along x and y."""
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
        """Emit the failure of the call after a failure of a group."""
        f = self.host.code.f
        got = f.let(f"load i32, ptr {failed}")
        misused = ((FIRST_MISUSE + k, text) for text, k in self.misuses.items())
        for code, text in (*FAILURES, *misused):
            message = f.module.string(f"kernel {self.host.func.name}: {text}")
            self.host.fail_if(f.let(f"icmp eq i32 {got}, {code}"), message)
