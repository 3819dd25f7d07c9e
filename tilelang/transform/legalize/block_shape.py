"""Choose the rows, columns and warp groups of a block, where the program leaves them open.

The tiles of a launch have dimensions that one operation goes along together: the rows of A, of an accumulator and of what is
made of it, say.  Where no statement treats elements along such a dimension differently, a block may compute half of it, and its
neighbour the other half; or a block computes what two neighbours did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from typing import Any

from tilelang.arith import Analyzer, simplify_stmt
from tilelang.ir import (BARRIER, CLUSTER_BARRIER, EMPTY, FRAGMENT, GLOBAL, Alloc, Buffer, Const, Evaluate, Expr, For, Launch,
                         Load, Parallel, Region, Stmt, Store, Var, const, contains, convert, fresh, inner, is_const, replace,
                         rewrite, rewrite_stmts, stmts_of, substitute, used_vars, walk, with_options, SHARED)
from tilelang.ops import AtomicTile, Copy, Fill, Gemm, Reduce, Scan
from tilelang.ops.gemm.wgmma import GROUP, choose_wgmma
from tilelang.ops.tma import tma_unsupported
from tilelang.target.machine import (MOST_REGISTERS, MOST_SHARED, REGISTERS, REGISTERS_PER_SM, RESERVED_SHARED,
                                     consumer_registers)

from ..analysis.effects import effects, hangs_on_threads, own_effects
from ..analysis.copied_tiles import CopiedTiles
from ..analysis.pipeline_loops import is_load
from ..framework.pass_ import TILE, PassContext, pass_
from .hopper_features import may_resize
from .transposed_operands import has_transposed, with_k_contiguous

_ROWS = 64  # of the accumulator of one warp group
_BESIDE = 40  # registers of a thread that an accumulator leaves for addresses and operands
_LONG = 512  # elements along K from which on a block takes longer than its start and its end
_NARROW, _MADE = "they read the same tiles", "its threads make the other operand once"  # why two blocks become one
_LOADED = "they load the same tiles of the other operand"
_SIDES = ("rows", "columns")  # of an accumulator, by dimension
Key = tuple[int, int]  # see _key


@pass_(needs=TILE, of=Launch, when=may_resize)
def block_shape(n: Launch, cx: PassContext) -> Launch | None:
    """Give a launch blocks whose accumulators fit its registers, and warp groups that have 64 rows each.

        with T.Kernel(4, threads=384)               with T.Kernel(4, threads=256)
            T.gemm(a, b, c)  # c has 128 rows  ->       T.gemm(a, b, c)

    wgmma gives 64 rows to a warp group: of three groups over 128 rows none can use it, and four groups share the rows by
    columns, so that every reduction of a row crosses two of them.  An accumulator of 256 x 256 fits no block: two blocks take
    half of its rows each.  Two blocks that share what they read become one with two warp groups, where each has few rows or
    columns and the grid is large; a small grid gets blocks of half the columns.  Applies to targets with wgmma, to programs
    that cannot tell how many threads run them: they name no thread, no warp role, no layout and no operation of single
    threads.  Off with tl.resize_blocks=False.
    Keeps: every element's value, bit by bit.
    """
    if n.num_threads % GROUP or not contains(n.body, Gemm) or tells(n):
        return None
    out, sms = n, cx.target.limits.sm_count
    while (halves := _halved(out)) is not None:
        out = halves
    out = _regrouped(out)
    out = _fewer(out, sms) or out
    for d, why in ((0, _NARROW), (1, _NARROW), (0, _MADE), (1, _MADE), (1, _LOADED)):
        out = _doubled(out, d, cx, why) or out
    out = _spread(out, sms) or out
    return None if out is n else out


def _rows(op: Gemm) -> int:
    """The number of warp groups that have 64 rows each, at least one."""
    return max(1, *(x.m // _ROWS for x in _forms(op)))


def _forms(op: Gemm) -> list[Any]:
    """What wgmma may compute in place of a GEMM."""
    return [with_k_contiguous(op, x)[-1] for x in (False, True)] if has_transposed(op) else [op]


def _useful(n: Launch) -> int:
    """The number of warp groups of a launch that have rows."""
    return min(n.num_threads // GROUP, max(map(_rows, walk(n.body, Gemm))))


def _by_wgmma(op: Gemm, groups: int) -> bool:
    """Whether wgmma computes it in a block of this many warp groups."""
    return any(not isinstance(choose_wgmma(x, groups * GROUP), str) for x in _forms(op))


def _all_by_wgmma(n: Launch) -> bool:
    """Whether wgmma computes all GEMMs of a launch."""
    return all(_by_wgmma(op, n.num_threads // GROUP) for op in walk(n.body, Gemm))


def _fits(n: Launch, groups: int) -> bool:
    """Whether each accumulator leaves registers for other values in so many groups."""
    most = min(REGISTERS.accumulator, REGISTERS_PER_SM // (groups * GROUP) - _BESIDE)
    return all(op.m * op.n * op.c.dtype.bits // 32 <= most * min(groups, _rows(op)) * GROUP for op in walk(n.body, Gemm))


def _held(n: Launch, made: Collection[Buffer] = ()) -> int:
    """Registers of a thread that the fragments of a launch take together.  made: operands that may become fragments."""
    held = [x.buffer for x in walk(n.body, Alloc) if x.buffer.scope_name == FRAGMENT or x.buffer in made]
    return sum(b.bits for b in held) // 32 // n.num_threads if all(b.is_static for b in held) else MOST_REGISTERS


def _length(n: Launch) -> int:
    """The length along K of the first GEMM in a loop, over all iterations; 0 if it is known at run time only."""
    for s in walk(n.body, For):
        for op in walk(s.body, Gemm):
            return op.k * int(s.extent.value) if isinstance(s.extent, Const) else 0
    return 0


def rereads(n: Launch) -> bool:
    """Whether a launch reads a tensor that it writes: what one block wrote before it read, another block would write then."""
    found = [e for e in effects(n.body) if e.buffer.scope_name == GLOBAL]
    written = {e.storage for e in found if e.writes}
    return bool(n.plan.overlapping) or any(e.reads and e.storage in written for e in found)


def _blocks(n: Launch) -> int:
    """The number of blocks; 0 if it is known at run time only."""
    return prod(int(e.value) if isinstance(e, Const) else 0 for e in n.grid)


def _regrouped(n: Launch) -> Launch:
    """The launch with as many warp groups as its GEMMs have rows for, where it has three or more, or one.

    It gets two where one has no registers for what its threads make.
    """
    groups = n.num_threads // GROUP
    rows = [_rows(op) for op in walk(n.body, Gemm) if _by_wgmma(op, _rows(op))] or [groups]
    full = groups == 1 and (made := _made(n)) and _held(n, made) > MOST_REGISTERS
    best = 2 if full else min(max(rows), groups) if groups >= 3 else max(groups, min(*rows, 2))
    out = replace(n, threads=(best * GROUP, 1, 1))
    if best == groups or not _all_by_wgmma(out) or best < groups and _held(out) > REGISTERS.accumulator:
        return n
    cause = "fragments and made operands do not fit in the registers of one warp group" if full else (
        f"the GEMMs have 64 rows for each of {best} warp group{'s' * (best > 1)}")
    return _reported(out, f"threads={best * GROUP} instead of {n.num_threads}: {cause}, and the program names no thread")


def _halved(n: Launch) -> Launch | None:
    """The launch with blocks of half the rows or columns, if its accumulators fit no block otherwise."""
    if _fits(n, _useful(n)) or rereads(n):
        return None
    dims = _Dims(n)
    for op in walk(n.body, Gemm):
        for d in (0, 1):
            if op.c.extents[d] % (4 * _ROWS) == 0 and (label := dims.free(_key(op.c.buffer.data, d))) is not None:
                out = _Blocks(n, dims, label).halves()
                if _fits(out, _useful(out)) and all(_by_wgmma(x, _useful(out)) for x in walk(out.body, Gemm)):
                    return _reported(out, f"two blocks compute the {_SIDES[d]} of a tile: `{op.c.buffer.name}` ({op.m} x "
                                     f"{op.n} {op.c.dtype}) does not fit in the registers of {n.num_threads} threads")
    return None


def _spread(n: Launch, sms: int) -> Launch | None:
    """The launch with blocks of half the columns, if it has blocks for half of the SMs at most."""
    gemms = list(walk(n.body, Gemm))
    if not 0 < 2 * _blocks(n) <= sms or any(op.n % (2 * _ROWS) for op in gemms):
        return None
    if _length(n) < _LONG or rereads(n):
        return None
    dims = _Dims(n)
    if (label := dims.common(gemms, 1)) is None:
        return None
    out = _Blocks(n, dims, label).halves()
    return _reported(out, f"two blocks compute the columns of a tile: {_blocks(n)} blocks leave more than half of {sms} SMs "
                     "idle") if _all_by_wgmma(out) else None


def _doubled(n: Launch, d: int, cx: PassContext, why: str) -> Launch | None:
    """The launch with blocks of two warp groups that compute the rows (d = 0) or the columns (1) of two blocks.

    why: _NARROW where a block has 64 rows, so that one warp group uses all that it loads, or a GEMM has 64 columns at most, so
    that wgmma waits for shared memory; _MADE where threads make the operand that both blocks read; _LOADED where TMA loads all
    operands, or threads one of the only GEMM ahead: a block of 128 x 256 loads three quarters of what two of 128 x 128 do.
    The grid must fill the SMs about as well as before.
    """
    sms, before, most = cx.target.limits.sm_count, _blocks(n), GROUP if d == 0 and why is _NARROW else 2 * GROUP
    if not sms or n.num_threads > most or before < 2 * sms or _filled(before // 2, sms) < 0.9 * _filled(before, sms):
        return None
    dims = _Dims(n)
    gemms = list(walk(n.body, Gemm))
    if why is not _NARROW and any(min(op.m, op.n) < 2 * _ROWS for op in gemms):  # of smaller tiles, an SM runs several blocks
        return None
    new = _made(n)
    if why is _MADE and any((op.b, op.a)[d].buffer not in new or (op.a, op.b)[d].buffer in new for op in gemms):
        return None
    if why is _LOADED and not all(not has_transposed(op) and _loaded(op.a, n, cx) and _loaded(op.b, n, cx) for op in gemms):
        return None
    if d == 0 and why is _NARROW and any(op.m != _ROWS for op in gemms):
        return None
    label = dims.common(gemms if d == 0 or why is not _NARROW else [op for op in gemms if op.n <= _ROWS][:1], d)
    for axis in range(len(n.grid) if label is not None else 0):
        blocks = _Blocks(n, dims, label)
        out = blocks.cut(axis, 2 * blocks.length, 2)
        if out is not None and _all_by_wgmma(out) and _held(out) <= REGISTERS.accumulator and (
                why is _NARROW or _room(out, cx)):
            return _reported(out, f"a block of {out.num_threads} threads computes the {_SIDES[d]} of two blocks of "
                             f"{n.num_threads}: {why}")
    return None


def _loaded(r: Region, n: Launch, cx: PassContext) -> bool:
    """Whether TMA fills a tile, and nothing else does; or threads that copy it ahead."""
    writers = [e.node for e in effects(n.body) if e.storage is r.buffer.data and e.writes]
    return bool(writers) and all(is_load(x) and not tma_unsupported(x) for x in writers) or r.buffer in _gathered(n, cx)


def _gathered(n: Launch, cx: PassContext) -> set[Buffer]:
    """The tiles that threads copy ahead in a loop that only copies and multiplies once (plan_pipelines.carried)."""
    loops, tiles = [s for s in walk(n.body, For) if contains(s.body, Gemm)], CopiedTiles(n, cx)
    found = [tiles.gathered(s) for x in loops for s in stmts_of(x.body) if not is_load(s) and not isinstance(s, Gemm)]
    return {b for b in found if b is not None} if None not in found and len([*walk(n.body, Gemm)]) == 1 else set()


def _fewer(n: Launch, sms: int) -> Launch | None:
    """The launch with blocks of two warp groups instead of three, if a thread of three has no registers for its fragments."""
    gemms, groups, held = list(walk(n.body, Gemm)), n.num_threads // GROUP, _held(n)
    if groups != 3 or held <= consumer_registers(groups) or any(_rows(op) != groups for op in gemms) or not sms * _blocks(n):
        return None
    dims = _Dims(n)
    label = dims.common(gemms, 0)
    for axis in range(len(n.grid) if label is not None else 0):
        out = _Blocks(n, dims, label).cut(axis, 2 * _ROWS, 2)
        if out is not None and _all_by_wgmma(out) and _filled(_blocks(out), sms) >= 0.9 * _filled(_blocks(n), sms):
            return _reported(out, "blocks of 128 rows instead of 192: a thread of three warp groups cannot hold "
                             f"{held} registers of fragments")
    return None


def _reported(n: Launch, why: str) -> Launch:
    """The launch with a line in its report."""
    return with_options(n, report=(*n.plan.report, why))  # type: ignore[no-any-return]


def _made(n: Launch) -> set[Buffer]:
    """The tiles that threads make in a loop of what it loads, and of no GEMM's result."""
    sums, new = {op.c.buffer for op in walk(n.body, Gemm)}, set[Buffer]()
    for loop in walk(n.body, For):
        loaded = {s.dst.buffer for s in walk(loop.body, Copy) if s.src.buffer.scope_name == GLOBAL}
        for s in walk(loop.body, Parallel, Copy):
            if isinstance(s, Copy):
                for tiles in (loaded, new):
                    tiles |= {s.dst.buffer} if s.src.buffer in tiles else set()
            elif (read := {x.buffer for x in walk(s, Load)}) & (loaded | new) and not read & sums:
                new |= {x.buffer for x in walk(s, Store)}
    return new


def _room(n: Launch, cx: PassContext) -> bool:
    """Whether shared memory holds three stages of what a launch loads beside results of 16 bits, and an accumulator leaves
    registers for operands."""
    tiles, by_threads = {x.dst.buffer for x in walk(n.body, Copy) if x.dst.buffer.scope_name in SHARED}, _gathered(n, cx)
    sums = [(op.m * op.n, op.c.dtype.bits) for op in walk(n.body, Gemm)]
    if not all(b.is_static for b in tiles) or any(k * w // 32 > n.num_threads * 2 * _ROWS for k, w in sums):
        return False
    loaded = sum(b.bits // 8 for b in tiles | by_threads)  # small stages by threads take longer than their GEMM
    return (6 * loaded > cx.target.limits.shared_per_sm or not by_threads) and (
        3 * loaded + sum(2 * k for k, _ in sums) + 2 * RESERVED_SHARED <= MOST_SHARED)  # and the barriers


def _filled(blocks: int, sms: int) -> float:
    """The fraction of the SMs that have work, on average over the waves of a grid."""
    return blocks / (-(-blocks // sms) * sms)


def tells(n: Launch) -> bool:
    """Whether the program could tell how many threads run it, or which block computes an element."""
    plan = n.plan
    given = (plan.layouts, plan.producer_registers, plan.consumer_registers, plan.import_source, plan.cuda_source,
             plan.min_blocks_per_sm > 1, plan.keep_registers, plan.cluster, plan.cooperative, plan.safe_values)
    return (any(given) or n.threads[1:] != (1, 1) or hangs_on_threads(n.body)
            or any(_names_them(x, n) for x in walk(n.body)))


def _names_them(x: Any, n: Launch) -> bool:
    if isinstance(x, Alloc):
        return x.buffer.scope_name in (BARRIER, CLUSTER_BARRIER)
    return any(x is v for v in n.thread_vars) or isinstance(x, Evaluate) or isinstance(x, Gemm) and (
        x.plan.wait is not None or x.sparsity > 1)


def _key(v: Var, d: int = -1) -> Key:
    """Names a dimension of the tile with storage v, or what the variable v of a parallel loop counts."""
    return id(v), d


def _along(r: Region) -> list[int]:
    """The dimensions of a region that have more than one element."""
    return [d for d, e in enumerate(r.extents) if not is_const(e, 1)]


def _operands(op: Any) -> dict[str, Region]:
    return {k: r for k in ("a", "b", "c", "src", "value", "dst") if isinstance(r := getattr(op, k, None), Region)}


def _pairs(op: Any) -> list[tuple[str, int, str, int]] | None:
    """(operand, dimension, other operand, its dimension): what a tile operation goes along together; None for others.  It is
    not the same to it which element of another dimension of more than one it takes."""
    if isinstance(op, Gemm):
        i, j, n = (r.buffer.ndim for r in (op.a, op.b, op.c))
        return [("a", i - 2 + op.transpose_a, "c", n - 2), ("b", j - 1 - op.transpose_b, "c", n - 1)]
    if isinstance(op, (Reduce, Scan)):
        dims = list(range(len(op.src.extents)))
        if len(op.dst.extents) != len(dims):
            dims.remove(op.dim)
        kept = len(dims) == len(op.dst.extents)
        return [("src", d, "dst", e) for e, d in enumerate(dims) if d != op.dim] if kept else []
    of, regions = "src" if isinstance(op, Copy) else "value", _operands(op)
    if not isinstance(op, (Copy, AtomicTile)) or of not in regions:
        return None
    here, there = _along(regions[of]), _along(op.dst)
    return [(of, d, "dst", e) for d, e in zip(here, there)] if len(here) == len(there) else []


class _Dims:
    """Which dimensions of the tiles of a launch have to have one length, and which of them may have another."""

    def __init__(self, launch: Launch) -> None:
        self.above: dict[Key, Key] = {}
        self.kept: set[Key] = set()
        self.written: list[set[Key]] = []  # of each write to global memory: the dimensions that it goes along
        self.buffers: dict[Var, Buffer] = {}
        self.visit(launch.body)

    def root(self, k: Key) -> Key:
        while (up := self.above.get(k, k)) != k:
            k = up
        return k

    def join(self, a: Key, b: Key) -> None:
        self.above[self.root(a)] = self.root(b)

    def free(self, k: Key) -> Key | None:
        """The name of a dimension whose length may change; None where it may not."""
        root = self.root(k)
        if any(self.root(x) == root for x in self.kept) or not all(root in map(self.root, w) for w in self.written):
            return None
        return root

    def common(self, gemms: list[Gemm], d: int) -> Any:
        """The name of a dimension of all accumulators whose length may change; None where that is no single one."""
        found = {self.free(_key(op.c.buffer.data, d)) for op in gemms}
        return found.pop() if len(found) == 1 else None

    # ---- what statements say --------------------------------------------------------------------------------------------

    def visit(self, s: Stmt) -> None:
        if isinstance(s, Alloc):
            b = s.buffer
            if self.buffers.setdefault(b.data, b) is not b or not b.is_static or b.strides_ is not None:
                self.keep(b)
        if isinstance(s, Parallel):
            self.loop(s)
            return
        if (pairs := _pairs(s)) is not None:
            self.tile_op(s, pairs)
        elif isinstance(s, Fill):
            self.region(s.dst)
        else:
            for e in own_effects(s):
                self.keep(e.buffer)
                if e.writes and e.buffer.scope_name == GLOBAL:
                    self.written.append(set())
        for x in walk(rewrite_stmts(s, lambda x: None if x is s else EMPTY), Load):
            self.keep(x.buffer)
        for x in inner(s):
            self.visit(x)

    def keep(self, b: Buffer) -> None:
        self.kept.update(_key(b.data, d) for d in range(b.ndim))

    def region(self, r: Region) -> None:
        """Keeps the dimensions of which a tile op takes a range."""
        b = r.buffer
        if b.scope_name != GLOBAL:
            if self.buffers.setdefault(b.data, b) is not b:
                self.keep(b)
            self.kept.update(_key(b.data, d) for d, (m, e) in enumerate(zip(r.mins, r.extents)) if not (
                is_const(m, 0) and e == b.shape[d]))

    def tile_op(self, op: Any, pairs: list[tuple[str, int, str, int]]) -> None:
        keys = {(k, d): _key(r.buffer.data, d) for k, r in _operands(op).items() for d in range(r.buffer.ndim)
                if r.buffer.scope_name != GLOBAL}
        for r in _operands(op).values():
            self.region(r)
        paired = {x for a, d, b, e in pairs for x in ((a, d), (b, e))}
        self.kept.update(key for x, key in keys.items() if x not in paired)
        for a, d, b, e in pairs:
            if (a, d) in keys and (b, e) in keys:
                self.join(keys[a, d], keys[b, e])
        if "dst" in _operands(op) and op.dst.buffer.scope_name == GLOBAL:
            self.written.append({keys[x] for x in paired if x in keys})

    def loop(self, s: Parallel) -> None:
        """A parallel loop: a variable is the index of a dimension of its tiles, or what it counts is kept."""
        lengths = dict(zip(s.vars, s.extents))
        for x in walk(s.body, Parallel, Region, Load, Store):
            if isinstance(x, (Parallel, Region)):
                self.kept.update(_key(v) for v in s.vars)
                continue
            b = x.buffer
            if b.scope_name == GLOBAL:
                if isinstance(x, Store):
                    self.written.append({_key(v) for i in x.indices for v in used_vars(i) if v in lengths})
                continue
            if self.buffers.setdefault(b.data, b) is not b:
                self.keep(b)
            own = {d: i for d, i in enumerate(x.indices) if isinstance(i, Var) and i in lengths
                   and is_const(lengths[i], b.shape[d])}
            for d in range(b.ndim):
                if d in own:
                    self.join(_key(b.data, d), _key(own[d]))
                else:
                    self.kept.add(_key(b.data, d))
            if isinstance(x, Store):  # whoever writes an element of the tile writes it in this block
                self.kept.update(_key(v) for v in lengths if not any(v is i for i in own.values()))


class _Blocks:
    """A launch whose blocks get another length along one dimension of their tiles."""

    def __init__(self, launch: Launch, dims: _Dims, label: Key) -> None:
        self.launch, self.dims, self.label = launch, dims, label
        self.length = next(b.shape[d] for v, b in dims.buffers.items() for d in range(b.ndim) if self.along(_key(v, d)))

    def along(self, k: Key) -> bool:
        return self.dims.root(k) == self.label

    def cuts(self, op: Any, operand: str, d: int) -> bool:
        """Whether a dimension of an operand is one of the block's that gets another length."""
        b = getattr(op, operand).buffer
        return b.scope_name != GLOBAL and self.along(_key(b.data, d))

    def halves(self) -> Launch:
        """Twice as many blocks along x, each with half of the length."""
        n, x, half = self.launch, self.launch.block_vars[0], self.length // 2
        first = fresh("first", x.dtype)
        body = self.resized(half, lambda i: i + first)
        two = const(2, x.dtype)
        body = substitute(body, {x: x // two, first: (x % two) * half})
        return replace(n, grid=(n.grid[0] * 2, *n.grid[1:]), body=self.simplified(body))

    def cut(self, axis: int, length: int, groups: int) -> Launch | None:
        """Blocks of another length along an axis; None where they do not divide the whole, or two blocks are no neighbours."""
        n, x = self.launch, self.launch.block_vars[axis]
        count, left = divmod(int(n.grid[axis].value) * self.length, length)  # type: ignore[attr-defined]
        if left or not self.neighbours(x):
            return None
        first = fresh("first", x.dtype)
        body = substitute(self.resized(length, lambda i: i + first), {x: const(0, x.dtype), first: x * length})
        grid = tuple(const(count, x.dtype) if k == axis else c for k, c in enumerate(n.grid))
        return replace(n, grid=grid, threads=(groups * GROUP, 1, 1), body=self.simplified(body))

    def simplified(self, body: Stmt) -> Stmt:
        """The body with simple places of regions, from which later passes read how tiles follow each other."""
        short = Analyzer().simplify
        return rewrite(body, lambda r: replace(r, mins=tuple(short(m) if isinstance(m, Expr) else m for m in r.mins)), Region)

    def resized(self, length: int, moved: Callable[[Any], Any]) -> Stmt:
        """The body with another length.  moved: where an element of global memory is whose place in the block is given."""
        new: dict[Buffer, Buffer] = {}
        for v, b in self.dims.buffers.items():
            shape = tuple(length if self.along(_key(v, d)) else e for d, e in enumerate(b.shape))
            if shape != b.shape:
                new[b] = replace(b, shape=shape, data=Var(b.name, b.data.dtype, span=b.span))

        def region(r: Region, other: Collection[int]) -> Region:
            """other: dimensions of a region of global memory that go along with the one that changes."""
            b = r.buffer
            if b.scope_name != GLOBAL:
                return replace(r, extents=new.get(b, b).shape) if b in new and r.is_full else replace(r, extents=tuple(
                    length if self.along(_key(b.data, d)) else e for d, e in enumerate(r.extents)))
            return replace(r, mins=tuple(moved(convert(m)) if d in other else m for d, m in enumerate(r.mins)),
                           extents=tuple(length if d in other else e for d, e in enumerate(r.extents)))

        def statement(s: Stmt) -> Stmt | None:
            if isinstance(s, Parallel):
                return self.loop(s, length, moved)
            pairs, cut = _pairs(s), dict[str, set[int]]()
            for a, d, b, e in pairs or ():
                if any(self.cuts(s, *x) for x in ((a, d), (b, e))):
                    cut.setdefault(a, set()).add(d)
                    cut.setdefault(b, set()).add(e)
            if pairs is not None or isinstance(s, Fill):
                return replace(s, **{k: region(r, cut.get(k, ())) for k, r in _operands(s).items()})
            return None

        return substitute(rewrite_stmts(self.launch.body, statement), new)

    def loop(self, s: Parallel, length: int, moved: Callable[[Any], Any]) -> Parallel:
        """A parallel loop with another length: indices of tiles are places in the block, all else is of the whole tensor."""
        mine = [v for v in s.vars if self.along(_key(v))]
        if not mine:
            return s
        place = {v: fresh(v.name, v.dtype) for v in mine}
        body = substitute(self.placed(s.body, place), {v: moved(p) for v, p in place.items()})
        return replace(s, vars=tuple(place.get(v, v) for v in s.vars), body=body, extents=tuple(
            const(length, e.dtype) if v in place else e for v, e in zip(s.vars, s.extents)))

    def placed(self, body: Stmt, place: dict[Var, Var]) -> Stmt:
        """A body with other variables as the indices of tiles."""
        def access(x: Any) -> Any:
            if x.buffer.scope_name == GLOBAL:
                return None
            return replace(x, indices=tuple(place.get(i, i) if isinstance(i, Var) and self.along(_key(x.buffer.data, d)) else i
                                            for d, i in enumerate(x.indices)))

        return rewrite(body, access, Load, Store)

    def neighbours(self, x: Var) -> bool:
        """Whether the next block along x computes what follows along the dimension, and nothing else depends on x."""
        short, one = Analyzer().simplify, const(1, x.dtype)
        ok = True

        def statement(s: Stmt) -> Stmt | None:
            nonlocal ok
            if isinstance(s, Parallel) and any(self.along(_key(v)) for v in s.vars):
                place = {v: fresh(v.name, v.dtype) for v in s.vars if self.along(_key(v))}
                body = self.placed(s.body, place)
                a = simplify_stmt(substitute(body, {x: x + one}))
                b = simplify_stmt(substitute(body, {v: v + const(self.length, v.dtype) for v in place}))
                ok = ok and a.same(b)
                return EMPTY
            for r, k, q, o in (turn for a, d, b, e in _pairs(s) or () for turn in ((a, d, b, e), (b, e, a, d))):
                region = getattr(s, r)
                if region.buffer.scope_name == GLOBAL and self.cuts(s, q, o):
                    step = short(substitute(m := convert(region.mins[k]), {x: x + one}) - m)
                    ok = ok and is_const(step, self.length) and not any(
                        x in used_vars(y) for f, y in enumerate(region.mins) if f != k and isinstance(y, Expr))
                    return EMPTY
            return None

        return x not in used_vars(rewrite_stmts(self.launch.body, statement)) and ok
