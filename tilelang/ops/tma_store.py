"""Store accumulators to global memory by TMA, staged in shared memory, each warp group independently.

A staging buffer holds one step: 64 rows of 128 (or 64) bytes, one TMA box.

    for each 64 rows x 128 (or 64) bytes of the warp group's sub-tile:
        one thread:  bulk_wait                         # the last store has read the staging buffer
        barrier of the warp group
        registers -> staging buffer                    # stmatrix for 16-bit elements
        fence_proxy_async; barrier of the warp group
        one thread:  tma_store(staging buffer -> tensor); bulk_commit

In a loop, where a warp group's sub-tile is one or two such boxes, each warp stores its own 16 rows of them: a warp waits for
itself alone, not for the group.

Where TMA cannot write the tensor, the threads of the warp group copy each staging buffer to global memory by coalesced
stores.  They also do so where only some rows are stored (copies whose number of rows is known at run time).
Transposed accumulators of 16 bits (T.transpose of a fragment) are stored the same way: the 64 rows of a step then lie along
the 128 bytes of a row of a TMA box, and stmatrix transposes.

The accumulators of wgmma (target/wgmma.py) repeat 64 x 8 pieces: a warp has 16 rows of each, a lane two neighbouring
elements of two rows.  The barriers are named barriers of one warp group, numbered from GROUP_BARRIERS, so that groups need
not run in step.  The staging buffer is `ordered`: its accesses need no barriers of the block
(docs/internals/scheduling.md, "Epilogue").
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import (AddressOf, Call, Const, Expr, For, If, Region, Select, Stmt, Store, binary, cast, const, convert, do,
                         fresh, is_const, load, ramp, seq, walk, FRAGMENT, GLOBAL)
from tilelang.ir.record import record
from tilelang.layout import REGISTER, THREAD, Mode, swizzled_box_layout, boxes_of
from tilelang.target.tensor_map import REDUCE_ADD, unsupported

from .distribute import conjunction, digit
from .gemm.wgmma import no_boxes, shared_boxes
from .ldmatrix import PAIRS, ROWS, Outer, outer_digits, threads_used
from .tma_boxes import (box_of, cache_hint, excluded, matrix_dims, moved, no_box, start_of, tensor_unsupported, unaligned)

GROUP, WARP, ROWS_OF_STEP, BOX_ROW = 128, 32, 64, 128  # threads, threads, rows, bytes of a row of a TMA box
ROWS_OF_WARP, MOST_OF_WARP = 16, 2  # rows of a box of one warp, and boxes that it stores: each keeps TMA busy for 80 cycles
OTHER_BARRIERS = 14  # numbers from here on belong to nobody's stores
GROUP_BARRIERS = 8  # number of the named barrier of warp group 0; lower ones belong to warp roles and programs
MOST_BOXES = 16  # boxes of a tile; with more, stores by all threads are no slower
STEP_BYTES = ROWS_OF_STEP * BOX_ROW


@record
class Pieces:
    """How a warp group holds the accumulators of a tile.

    groups: 8-column groups that a thread has, in consecutive registers.  tiles: (count, registers, rows) for each register
    digit of the 64-row tiles.  row_groups, column_groups: (count, stride in threads, elements) for each digit over warp groups.
    transposed: the fragment is transposed, its rows are the accumulator's columns.  All other fields refer to the accumulator.
    adjacent: a lane's two rows of 16 are neighbours (adjacent_rows of target/wgmma.py).
    """

    groups: int
    tiles: tuple[tuple[int, int, int], ...]
    row_groups: tuple[tuple[int, int, int], ...]
    column_groups: tuple[tuple[int, int, int], ...]
    transposed: bool = False
    adjacent: bool = False


def accumulator_pieces(frag: Any, threads: int) -> Pieces | None:
    """The pieces of a fragment with the layout of wgmma accumulators (or their transpose) in `threads` threads; else None."""
    if len(frag.modes) != 2 or frag.is_padded or frag.copies or frag.threads != threads or threads % GROUP or \
            threads_used(frag) != threads:
        return None
    transposed = outer_digits(frag.modes[0], 8)[0] == PAIRS
    of_rows, of_columns = frag.modes[::-1] if transposed else frag.modes
    (rows, out_rows), (columns, out_columns) = outer_digits(of_rows, 16), outer_digits(of_columns, 8)
    halves = (Mode(2, REGISTER, 2),)
    if columns != PAIRS or rows not in (halves + ROWS, ROWS + halves):
        return None
    out_rows, out_columns = _by_group(out_rows), _by_group(out_columns)
    if [(o.size, o.to, o.stride, o.weight) for o in out_rows[-1:]] != [(4, THREAD, WARP, 16)]:
        return None
    own = [o for o in out_columns if o.to == REGISTER]
    if len(own) > 1 or own and (own[0].stride, own[0].weight) != (4, 8):
        return None
    over = [*out_rows[:-1], *out_columns]
    if any(o.to == THREAD and o.stride % GROUP for o in over):
        return None
    return Pieces(own[0].size if own else 1,
                  tuple((o.size, o.stride, o.weight) for o in out_rows[:-1] if o.to == REGISTER),
                  tuple((o.size, o.stride, o.weight) for o in out_rows[:-1] if o.to == THREAD),
                  tuple((o.size, o.stride, o.weight) for o in out_columns if o.to == THREAD), transposed, rows[0] in ROWS)


def _by_group(digits: list[Outer]) -> list[Outer]:
    """The digits, split so that none spans both the warps of a group and several groups."""
    out: list[Outer] = []
    for o in digits:
        inside = GROUP // o.stride if o.to == THREAD and o.stride < GROUP else o.size
        if inside < o.size and o.size % inside == 0:
            out += [Outer(o.size // inside, o.to, o.stride * inside, o.weight * inside), Outer(inside, o.to, o.stride,
                                                                                             o.weight)]
        else:
            out.append(o)
    return out


def first_rows(region: Region) -> Expr | None:
    """Number of rows of a region of whole rows that starts at row 0 and has a run-time row count; None for other regions."""
    rows, *columns = region.extents
    if not isinstance(rows, Expr) or not all(is_const(m, 0) for m in region.mins) or \
            any(not (isinstance(n, int) and n == size) for n, size in zip(columns, region.buffer.shape[1:])):
        return None
    return rows


def store_accumulators(cx: Any, src: Region, dst: Region, op: Any, reduce: bool = False) -> Stmt | None:
    """dst = cast(src), or dst += cast(src), for a whole accumulator fragment (or its first rows) and global memory, by TMA.

    None where this kind of store does not apply.  Where it applies but cannot be used, the launch's report gives the reason.
    """
    if not cx.stores.on or src.buffer.scope_name != FRAGMENT or dst.buffer.scope_name != GLOBAL:
        return None
    pieces = accumulator_pieces(cx.layout_of(src.buffer), cx.num_threads)
    limit = None if reduce or pieces is None or pieces.transposed else first_rows(src)
    if pieces is None or not src.is_full and limit is None:
        return None
    work = _Store(cx, src, dst, op, pieces, reduce, limit)
    why = work.unsupported()
    if not why:
        why = work.tensor_unsupported()
        if why and reduce:
            cx.stores.note(f"`{dst.buffer.name}` is written from registers: {why}")
            return None
        if why:
            cx.stores.note(f"`{dst.buffer.name}` is written by all threads, from staged boxes: {why}")
        return work.stmt(by_tma=not why)
    cx.stores.note(f"`{dst.buffer.name}` is written from registers: {why}")
    return None


class _Store:
    """Lowers the store of one tile.  limit: the number of rows to store, where not all."""

    def __init__(self, cx: Any, src: Region, dst: Region, op: Any, pieces: Pieces, reduce: bool, limit: Expr | None) -> None:
        self.cx, self.src, self.dst, self.op, self.pieces, self.reduce = cx, src, dst, op, pieces, reduce
        self.limit = None if limit is None else cx.expr(limit)
        self.dt = dst.dtype
        self.columns = BOX_ROW * 8 // self.dt.bits if self.dt.bits else 0  # columns of the accumulator in a staging buffer
        self.group_columns = 8 * pieces.groups  # columns of one warp group
        self.rows = ROWS_OF_STEP  # of a box

    def unsupported(self) -> str:
        """Why the store cannot be staged; "" when it can."""
        columns = int(self.src.buffer.shape[1])
        if self.op.plan.disable_tma or self.op.plan.prefer_instruction not in (None, "tma"):
            return "the copy asks for another way"
        if self.src.dtype.lanes != 1 or self.dt.lanes != 1 or self.dt.is_bool or self.dt.bits not in (8, 16, 32):
            return f"elements of {self.dt} have no form"
        if self.pieces.transposed and self.dt.bits != 16:
            return f"transposed elements of {self.dt} have no form"
        self.dims = matrix_dims(self.dst, self.src.extents[0], columns)
        if self.dims is None:
            return no_box(self.dst)
        return self.cx.stores.room()  # type: ignore[no-any-return]

    def tensor_unsupported(self) -> str:
        """Why TMA cannot store the boxes to the tensor; "" when it can."""
        t = self.dst.buffer
        if self.reduce and str(self.dt) not in REDUCE_ADD:
            return f"TMA cannot add elements of {self.dt}"
        if self.op.plan.unaligned_columns:
            return unaligned(self.dst)
        why = tensor_unsupported(t, self.cx.stores.strides)
        for box in sorted({self._box(p) for p in range(self._boxes())}):
            why = why or unsupported(t, box, BOX_ROW) or ""
        return why or self.cx.stores.unsupported(self.op, t)

    def _boxes(self) -> int:
        return -(-self.group_columns // self.columns)

    def _width(self, p: int) -> int:
        return min(self.columns, self.group_columns - p * self.columns)

    def _box(self, p: int) -> tuple[int, ...]:
        assert self.dims is not None
        size = self.rows, self._width(p)
        return box_of(self.dst, self.dims, *(size[::-1] if self.pieces.transposed else size))

    def stmt(self, by_tma: bool) -> Stmt:
        """The steps of every warp group, in sequence."""
        cx = self.cx
        groups = cx.num_threads // GROUP
        starts = [(0, 0)]  # (register, row) of the 64-row tiles
        for count, registers, rows in self.pieces.tiles:
            starts = [(r + k * registers, y + k * rows) for r, y in starts for k in range(count)]
        steps = [(register, row, p) for register, row in sorted(starts, key=lambda s: s[1]) for p in range(self._boxes())]
        slots = min(cx.stores.buffers, len(steps))
        cx.stores.steps = max(cx.stores.steps, len(steps))
        again = cx.stores.around or len(cx.stores.writers[self.dst.buffer.data][1]) > 1  # also in front of a loop, and after it
        once = by_tma and len(steps) == slots and self.limit is None and bool(again)
        if once and slots <= MOST_OF_WARP and not self.pieces.transposed and not cx.stores.one_group:
            self.rows = ROWS_OF_WARP
        self.stage = cx.stores.staging(groups, groups * slots, self.dt, self.rows)
        self.layout = swizzled_box_layout((groups * slots, ROWS_OF_STEP, self.columns), self.dt.bits, BOX_ROW)
        self.lane = cx.thread % GROUP if groups > 1 else cx.thread
        self.group: Expr = cx.thread // GROUP if groups > 1 else const(0)
        first = const(GROUP_BARRIERS) + cx.stores.first_group
        self.number = cx.simplified((first + self.group,))[0]
        self.packed = cx.new_local("packed", 8, self.dt) if self.dt.bits == 16 and self.src.dtype != self.dt or (
            self.pieces.transposed and self.pieces.adjacent) else None
        if by_tma:
            cx.stores.issued = min(cx.stores.issued or GROUP, self.rows // ROWS_OF_WARP * WARP)
        out: list[Stmt] = []
        if once:  # two barriers for all
            boxes = [(*x, self.group * slots + k) for k, x in enumerate(steps)]
            return seq(*self._step(boxes, self._wait(0, 1, 1)), span=self.op.span)
        single = cx.stores.once and len(steps) == slots
        if single:  # nobody else uses the staging buffers; their bytes may be those of operands, which all groups have read
            out.append(do("sync_threads"))
        for k, (register, row, p) in enumerate(steps):
            slot = self.group * slots + k % slots
            if by_tma:
                out += self._step([(register, row, p, slot)], None if single else self._wait(k, len(steps), slots))
            else:
                # Boxes of another tensor, which TMA stores, may still be in flight.
                out += [] if k or cx.stores.alone else [If(binary("eq", self.lane, const(0, self.lane.dtype)), do(
                    "bulk_wait", n=0, read=True))]
                out += self._carried(register, row, p, slot, not single and (k == 0 or slots == 1))
        return seq(*out, span=self.op.span)

    def _wait(self, k: int, steps: int, slots: int) -> Stmt:
        """Wait until the staging buffer of step k may be written.

        Earlier statements may have used any staging buffer.  If only this store uses them (in a loop) and the number of
        steps is a multiple of the number of boxes, the boxes follow in the same order, and waiting for the oldest suffices.
        """
        if k:
            return do("bulk_wait", n=slots - 1, read=True)
        if not self.reduce and self.cx.stores.again(self.dst):
            return do("bulk_wait", n=0)  # an earlier store of the same elements may still be in flight
        return do("bulk_wait", n=slots - 1 if self.cx.stores.alone and steps % slots == 0 else 0, read=True)

    def _step(self, boxes: list[tuple[int, int, int, Expr]], wait: Stmt | None) -> list[Stmt]:
        """Stage and store boxes: (first register, row, number in the row, staging buffer) of each; one if rows are limited.

        wait: for the earlier stores of these staging buffers, None for none.
        """
        cx = self.cx
        alone = self.rows == ROWS_OF_WARP
        leader = binary("eq", self.lane % WARP if alone else self.lane, const(0, self.lane.dtype))
        fence = [do("fence_proxy_async")]
        barrier = do("sync_warp") if alone else do("named_barrier", self.number, const(GROUP))
        if cx.stores.one_group:  # the group is the whole block, and place_sync puts the fence before its barriers
            fence, barrier = [], do("sync_threads")
        free = [] if wait is None else [If(leader, wait), barrier]
        filled = [*free, *(x for register, _, p, slot in boxes for x in self._fill(
            register + p * self.columns // 8 * 4, p, slot)), *fence, barrier]
        stores = [self._store(row, p, slot) for _, row, p, slot in boxes]
        if self.limit is None:
            return [*filled, If(leader, seq(*stores, do("bulk_commit")))]
        (_, row, p, slot), = boxes
        whole = cx.simplified((cx.expr(self._over_groups(self.pieces.row_groups) + (row + ROWS_OF_STEP)),))[0] <= self.limit
        return [*filled, If(whole, If(leader, seq(*stores)), self._rows(row, p, slot)), If(leader, do("bulk_commit"))]

    @property
    def _dims(self) -> tuple[int, int]:
        """The tensor dimensions along the accumulator's rows and columns."""
        y, x = self.dims or (0, 0)
        return (x, y) if self.pieces.transposed else (y, x)

    def _corner(self, row: int | Expr, p: int) -> list[Expr]:
        """Tensor indices of the first element of a staging buffer, as expressions of the tile program."""
        y, x = self._dims
        at = [convert(m) for m in self.dst.mins]
        at[y] = at[y] + self._over_groups(self.pieces.row_groups) + row
        at[x] = at[x] + self._over_groups(self.pieces.column_groups) + p * self.columns
        return at

    def _store(self, row: int, p: int, slot: Expr) -> Stmt:
        cx = self.cx
        first = const(0) if self.rows == ROWS_OF_STEP else self.lane // WARP * ROWS_OF_WARP
        at = [cx.expr(m) for m in self._corner(row + first, p)]
        place, *where = cx.simplified((self.layout.offset((slot, first, const(0))), *reversed(at)))
        wide = ROWS_OF_STEP * math.prod(n for n, *_ in self.pieces.row_groups) if self.pieces.transposed else self.group_columns
        name = cx.tensor_map(self.dst.buffer, self._box(p), BOX_ROW, row_bytes=wide * self.dt.bits // 8)
        op = "tma_reduce_add" if self.reduce else "tma_store"
        return do(op, AddressOf(self.stage, (place,)), *where, span=self.op.span, map=name, **cache_hint(self.op))

    def _over_groups(self, digits: tuple[tuple[int, int, int], ...]) -> Expr:
        out: Expr = const(0)
        for count, stride, weight in digits:
            out = out + digit(self.cx.thread, stride, count, self.cx.num_threads) * weight
        return out

    # ---- without TMA ----------------------------------------------------------------------------------------------

    def _carried(self, register: int, row: int, p: int, slot: Expr, busy: bool) -> list[Stmt]:
        """Fill a staging buffer and copy it to the tensor by the threads of the group.

        busy: threads may still be reading it; otherwise the barrier of the step in between excludes that.
        """
        barrier = do("sync_threads") if self.cx.stores.one_group else do("named_barrier", self.number, const(GROUP))
        fill = self._fill(register + p * self.columns // 8 * 4, p, slot)
        return [*([barrier] if busy else []), *fill, barrier, self._rows(row, p, slot)]

    def _rows(self, row: int, p: int, slot: Expr) -> Stmt:
        """Neighbouring threads write neighbouring elements, in the widest vectors that divide a row."""
        cx, t, (y, x) = self.cx, self.dst.buffer, self.dims or (0, 0)
        rows, columns = (self._width(p), ROWS_OF_STEP) if self.pieces.transposed else (ROWS_OF_STEP, self._width(p))
        any_row = self._corner(row, p)
        any_row[y] = any_row[y] + fresh("r")
        width = cx.vector_width(t, tuple(any_row), columns)
        across = columns // width
        total = rows * across
        v = fresh("v")
        n = v * GROUP + self.lane
        r, c = n // across, n % across * width
        at = self._corner(row, p)
        at[y], at[x] = at[y] + r, at[x] + c
        place, = cx.simplified((self.layout.offset((slot, r, c)),))
        guard = cx.guard(t, tuple(at), width)
        where = tuple(cx.simplified(tuple(cx.expr(i) for i in at)))
        if width > 1:
            place, where = ramp(place, width), (*where[:-1], ramp(where[-1], width))
        out: Stmt = Store(t, where, load(self.stage, (place,)), span=self.op.span)
        inside = conjunction(n < total if total % GROUP else None, guard)
        if self.limit is not None:
            here = cx.simplified((cx.expr(self._over_groups(self.pieces.row_groups) + row + r),))[0] < self.limit
            inside = conjunction(here, inside)
        return For(v, const(0), const(-(-total // GROUP)), "serial", out if inside is None else If(inside, out))

    # ---- registers to shared memory -------------------------------------------------------------------------------

    def _fill(self, register: int, p: int, slot: Expr) -> list[Stmt]:
        groups = self._width(p) // 8
        crossed = self.pieces.transposed and self.pieces.adjacent
        if self.dt.bits != 16 or crossed:
            j = fresh("j")
            pairs = (self._crossed_pairs if crossed else self._pairs)(register + j * 4, j, slot)
            return [For(j, const(0), const(groups), "unroll", pairs)]
        out: list[Stmt] = []
        if groups > 1:
            j = fresh("j")
            out.append(For(j, const(0), const(groups // 2), "unroll", self._matrices(register + j * 8, j * 2, slot, 4)))
        if groups % 2:
            out.append(self._matrices(convert(register + (groups - 1) * 4), const(groups - 1), slot, 2))
        return out

    def _matrices(self, register: Expr, column: Expr, slot: Expr, num: int) -> Stmt:
        """Store num 8x8 matrices from consecutive registers: rows +0 and +8 of one column group, then of the next."""
        local, n = self.cx.local_of(self.src.buffer), 2 * num
        lane = self.lane % WARP
        if self.pieces.transposed:
            row = column * 8 + (lane // 16 * 8 if num == 4 else 0) + lane % 8
            chunk = self.lane // WARP * 16 + lane // 8 % 2 * 8
        else:
            row = self.lane // WARP * 16 + (lane % 8 * 2 + lane // 8 % 2 if self.pieces.adjacent else lane % 16)
            chunk = column * 8 + (lane // 16 * 8 if num == 4 else 0)
        place, = self.cx.simplified((self.layout.offset((slot, row, chunk)),))
        out: list[Stmt] = []
        source = AddressOf(local, (register,))
        if self.packed is not None:
            value = load(local, (ramp(register, n),))
            out.append(Store(self.packed, (ramp(const(0), n),), cast(value, self.dt.with_lanes(n))))
            source = AddressOf(self.packed, (const(0),))
        out.append(do("stmatrix", AddressOf(self.stage, (place,)), source, num=num, trans=self.pieces.transposed))
        return seq(*out)

    def _pairs(self, register: Expr, column: Expr, slot: Expr) -> Stmt:
        """Store two neighbouring elements of two rows by ordinary stores."""
        local, lane = self.cx.local_of(self.src.buffer), self.lane % WARP
        out: list[Stmt] = []
        for half in range(2):
            row = self.lane // WARP * 16 + (lane // 4 * 2 + half if self.pieces.adjacent else lane // 4 + 8 * half)
            place, = self.cx.simplified((self.layout.offset((slot, row, column * 8 + lane % 4 * 2)),))
            value = load(local, (ramp(register + 2 * half, 2),))
            out.append(Store(self.stage, (ramp(place, 2),), cast(value, self.dt.with_lanes(2))))
        return seq(*out)

    def _crossed_pairs(self, register: Expr, column: Expr, slot: Expr) -> Stmt:
        """Store two neighbouring rows of two columns of a transposed accumulator by ordinary stores."""
        local, packed, lane = self.cx.local_of(self.src.buffer), self.packed, self.lane % WARP
        assert packed is not None
        out: list[Stmt] = []
        for k in range(2):
            where = slot, column * 8 + lane % 4 * 2 + k, self.lane // WARP * 16 + lane // 4 * 2
            place, = self.cx.simplified((self.layout.offset(where),))
            out += [Store(packed, (const(half),), cast(load(local, (register + (k + 2 * half),)), self.dt))
                    for half in range(2)]
            out.append(Store(self.stage, (ramp(place, 2),), load(packed, (ramp(const(0), 2),))))
        return seq(*out)


# ---- tiles of shared memory -------------------------------------------------------------------------------------------


def tile_unsupported(op: Any, src: Region, dst: Region, reduce: bool = False, strides: bool = False) -> str:
    """Why a shared tile cannot be stored to global memory by TMA; "" when it can.

    strides: as for tensor_unsupported.
    """
    b, t, why = src.buffer, dst.buffer, excluded(op, src, dst)
    if why:
        return why
    if b.ndim < 2 or not b.is_static or b.strides_ is not None or any(not is_const(n, 1) for n in src.extents[:-2]) or \
            any(not is_const(m, 0) for m in src.mins[-2:]) or tuple(src.extents[-2:]) != tuple(b.shape[-2:]):
        return f"it is not the whole of `{b.name}`"
    rows, columns = (int(n) for n in b.shape[-2:])
    p = shared_boxes(b)
    if p is None:
        return no_boxes(b)
    dims = matrix_dims(dst, rows, columns) if rows > 1 and columns > 1 else None
    if dims is None:
        return no_box(dst)
    if reduce and str(dst.dtype) not in REDUCE_ADD:
        return f"TMA cannot add elements of {dst.dtype}"
    boxes = p.boxes()
    if len({(x.rows, x.columns) for x in boxes}) > 1 or p.count > MOST_BOXES:
        return f"`{b.name}` needs {len(boxes)} boxes"
    return tensor_unsupported(t, strides) or unsupported(t, box_of(dst, dims, boxes[0].rows, boxes[0].columns), p.swizzle) or ""


def store_tile(cx: Any, src: Region, dst: Region, op: Any, reduce: bool = False) -> Stmt:
    """The TMA stores of a shared tile, as statements of the one thread that issues them, and the commit of their bulk group.

    attr `awaited`: the pass that planned the store waits for it; else thread 0 of the warp group waits at the end.
    """
    got = boxes_of(cx.layout_of(src.buffer), src.dtype.bits)
    rows, columns = (int(n) for n in src.buffer.shape[-2:])
    dims = matrix_dims(dst, rows, columns)
    if got is None or dims is None:
        raise InternalError(f"a copy of `{src.buffer.name}` was planned as TMA, but it is no TMA box")
    boxes, (storage, base) = got.boxes(), start_of(src, cx)
    box = box_of(dst, dims, boxes[0].rows, boxes[0].columns)
    name = cx.tensor_map(dst.buffer, box, got.swizzle, row_bytes=columns * src.dtype.bits // 8)
    places = cx.simplified(tuple(base + x.offset * 8 // src.dtype.bits for x in boxes))
    pieces = [(AddressOf(storage, (at,)), {dims[0]: x.row, dims[1]: x.column}) for at, x in zip(places, boxes)]
    if not op.plan.awaited:
        cx.stores.issued = cx.stores.issued or GROUP
    return moved(op, cx, name, pieces, store="tma_reduce_add" if reduce else "tma_store")


def uses_group_barriers(launch: Any) -> bool:
    """Whether a program itself names barriers whose numbers could collide with those of warp groups."""
    def clear(number: Any) -> bool:
        if isinstance(number, Select):
            return clear(number.a) and clear(number.b)
        return isinstance(number, Const) and not GROUP_BARRIERS <= number.value < OTHER_BARRIERS

    return not all(clear(x.args[0]) for x in walk(launch.body, Call) if x.op in ("named_barrier", "named_barrier_arrive"))
