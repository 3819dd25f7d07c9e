"""Lower gemm to warp matrix instructions (mma.sync); operands come from shared memory by ldmatrix, or from registers.

    for each k step of the instruction:                  # the operands of step k+1 are fetched before the MMAs of step k
        A[mi] = ldmatrix(...)   for mi in this warp's row tiles
        B[ni] = ldmatrix(...)   for ni in this warp's column tiles
        mma(C[mi, ni], A[mi], B[ni])

The accumulator's Fragment determines which tiles a warp computes and in which registers.  ldmatrix gives lane l the
elements (l/4, 2*(l%4)..) of 8x8 16-bit matrices whose row addresses the lanes supply (PTX ISA, "Warp-level matrix load
instruction: ldmatrix"); `trans` is used for operands stored with k as the outer dimension.  ldmatrix moves 32-bit units,
so wider and narrower types work as long as k is contiguous; other cases load element by element.

Tiles whose sizes are no multiple of the instruction's: rows and columns beyond the edge repeat the last ones (their results
go to padding registers that hold no element).  Elements of k beyond the edge are zero in both operands: a zero in one
operand alone would not cancel a NaN or infinity in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace as replaced
from math import ceil, prod
from typing import Any

from tilelang.ir import (AddressOf, Buffer, Const, Expr, For, If, Load, Node, Region, Stmt, Store, TileOp, Var, binary, call,
                         cast, const, do, dtype, each_register, fresh, is_const, load, ramp, region_of, replace, select, seq,
                         substitute, unary, unrolled, walk, FRAGMENT)
from tilelang.layout import REGISTER, THREAD, Mode
from tilelang.target.machine import MOST_REGISTERS
from tilelang.target.mma import plain_dtype, row as row_of

from ..distribute import digit
from ..ldmatrix import outer_digits, threads_used
from .select import operand_fragments, row_of_steps

WARP = 32
UNDER = 8  # MFMAs that run while the operands of the next ones come from LDS: 128 clocks


class WarpTiles:
    """The instruction tiles that a warp computes along one dimension (m or n) of the accumulator.

    offset: index of the warp's first tile.  reps: digits that enumerate its tiles, outermost first.  extent: number of elements
    of the dimension; the tiles cover more where is_padded.
    """

    def __init__(self, modes: tuple[Mode, ...], inner: int, extent: int, cx: Any) -> None:
        self.extent = extent
        self.is_padded = prod(m.size for m in modes) > extent
        self.instruction, outside = outer_digits(modes, inner)
        self.warps = [o for o in outside if o.to == THREAD]
        self.reps = [o for o in outside if o.to == REGISTER]
        self.first = 0  # register of the accumulator
        self.offset: Expr = const(0)
        for o in self.warps:
            self.offset = self.offset + digit(cx.thread, o.stride, o.size, cx.num_threads) * o.weight
        self.count = 1
        for o in self.reps:
            self.count *= o.size

    def inside(self, index: Expr, run: int = 1) -> Expr:
        """`index`, clamped so that a run of `run` elements from there on stays inside the extent."""
        return binary("min", index, const(self.extent - run)) if self.is_padded else index

    def only(self, number: int) -> WarpTiles:
        """One of the tiles."""
        out, weight = copy(self), 0
        for o in reversed(self.reps):
            number, digit = divmod(number, o.size)
            weight, out.first = weight + digit * o.weight, out.first + digit * o.stride
        out.reps, out.count, out.offset = [], 1, self.offset + weight
        return out

    def loops(self) -> tuple[list[tuple[Var, int]], Expr, Expr, Expr]:
        """Fresh loops over the tiles: (loops, tile number, index offset, register offset in the accumulator)."""
        vs = [(fresh("t"), o.size) for o in self.reps]
        number: Expr = const(0)
        index: Expr = const(0)
        register: Expr = const(self.first)
        for (v, n), o in zip(vs, self.reps):
            number = number * n + v
            index = index + v * o.weight
            register = register + v * o.stride
        return vs, number, index, register


def padded_operands(body: Node, layout_of: Callable[[Buffer], Any]) -> set[Var]:
    """Storage of the fragments that warp matrix instructions use and that have padding registers (more than their elements).
    Those registers are initialised where the fragment is allocated."""
    found = [r.buffer for op in walk(body, TileOp) if op.op_name == "gemm" and row_of(op.plan.instruction)
             for r in (op.a, op.b, op.c)]
    return {b.data for b in found if b.scope_name == FRAGMENT and layout_of(b).is_padded}


@dataclass
class Operand:
    """State of A or B while it is fetched.

    region: in shared memory (None once it is in registers).  k_first: stored with k as the outer dimension.
    frag: the 32-lane Fragment of the instruction row; k_dim: which of its dimensions is k.  tiles: those along m or n.
    local: per-thread array.  stage: registers of one k step in that array (0: it holds the whole operand).  addresses: Fragment
    of the elements whose addresses lanes give, where loads transpose them.
    """

    region: Region
    k_first: bool
    frag: Any
    k_dim: int
    tiles: WarpTiles
    local: Buffer
    stage: int
    dt: dtype
    addresses: Any = None

    def shared_index(self, outer: Expr, k: Expr) -> tuple[Expr, ...]:
        """Index into the operand's buffer for the logical position (outer, k)."""
        return self.region.at(k, outer) if self.k_first else self.region.at(outer, k)


def lower_mma(op: Any, cx: Any, row: Any) -> Stmt:
    """The per-thread statements of a gemm on instruction `row`.

    An accumulator whose layout does not fit the instruction (for example inferred through a reshape) is copied to a fragment
    that fits, and back, through shared memory.
    """
    single, row = row, row_of_steps(op, row)
    m, n, k = row.shape
    frag_c = cx.layout_of(op.c.buffer)
    of_rows, of_cols = frag_c.modes[-2:] if not op.plan.exchanged else frag_c.modes[:-3:-1]
    rows, cols = WarpTiles(of_rows, m, op.m, cx), WarpTiles(of_cols, n, op.n, cx)
    if (rows.instruction, cols.instruction) != (_exact(row.c.modes[0]), _exact(row.c.modes[1])) or not _in_tiles(
            frag_c, row, rows, cols):
        return _moved(op, cx, single)
    steps = ceil(op.k / k)
    busy = threads_used(frag_c)
    a, get_a = _operand(op, cx, row, "a", rows, k, busy)
    b, get_b = _operand(op, cx, row, "b", cols, k, busy)
    held = cx.local_of(op.c.buffer)
    size = int(held.shape[0])
    local_c = held if held.dtype == row.c_dtype else cx.new_local(f"{op.c.buffer.name}_w", size, row.c_dtype)

    def multiply(step: int, rows: WarpTiles = rows, cols: WarpTiles = cols, at: tuple[Any, Any] = (None, None)) -> Stmt:
        """at: the first registers of operands of one tile."""
        i_loops, i_tile, _, i_reg = rows.loops()
        j_loops, j_tile, _, j_reg = cols.loops()
        first, run = tuple(get(step, tile) if x is None else const(x) for get, tile, x in (
            (get_a, i_tile, at[0]), (get_b, j_tile, at[1]))), k // single.shape[2]
        return unrolled(i_loops + j_loops, seq(*(do(
            "mma", AddressOf(local_c, (i_reg + j_reg + column * single.c.registers,)),
            AddressOf(a.local, (first[0] + (column * run + s) * single.a.registers,)),
            AddressOf(b.local, (first[1] + s * single.b.registers,)), span=op.span, row=row.name)
            for column in range(m // single.shape[0]) for s in range(run))))

    def fetch(step: int) -> Stmt | None:
        parts = [_fetch(cx, o, step, k, op.k, step % (int(o.local.shape[0]) // o.stage) * o.stage, op.span)
                 for o in (a, b) if o.stage]
        return seq(*parts) if parts else None

    def converted(into: Buffer, source: Buffer) -> Stmt:
        return each_register(into, lambda r: Store(into, (r,), cast(load(source, (r,)), into.dtype), span=op.span))

    def tile_by_tile(o: Operand) -> list[Stmt]:
        """One tile of the only operand in shared memory after the other: as few registers as cover the loads of the next."""
        other, size = (cols, rows)[o is b], o.frag.registers
        each = other.count * (m // single.shape[0]) * (k // single.shape[2])  # MFMAs of a tile and step
        runs = [n for n in range(1, steps + 1) if steps % n == 0 and 2 * n * size <= int(o.local.shape[0])]
        run = next((n for n in runs if n * each >= UNDER), runs[-1])
        units = [(t, range(s, s + run)) for t in range(o.tiles.count) for s in range(0, steps, run)]
        loads, steps_of = list[Stmt](), list[Stmt]()
        for n, (t, ks) in enumerate(units):
            tile = o.tiles.only(t)
            for i, step in enumerate(ks):
                first = (n % 2 * run + i) * size
                loads.append(_fetch(cx, replaced(o, tiles=tile), step, k, op.k, first, op.span))
                steps_of.append(multiply(step, *((tile, cols, (first, None)) if o is a else (rows, tile, (None, first)))))
        order = [x for n in range(0, len(loads), run) for x in (*loads[n + run:n + 2 * run], *steps_of[n:n + run])]
        wide, left = divmod(size * o.dt.bits, 64 if o.addresses else 128)  # loads of a tile and step
        if op.plan.urgent and wide and not left and each % wide == 0:
            order.append(do("loads_between", first=run * wide, n=(len(loads) - run) * wide, each=each // wide))
        return [*loads[:run], *order]

    out: list[Stmt | None] = [_cleared(op, cx, held)]
    if local_c is not held:  # the instruction does not accumulate in c's type: round once after all k steps
        out.append(converted(local_c, held))
    loaded = [o for o in (a, b) if o.stage]
    if row.lanes > WARP and len(loaded) == 1 and (loaded[0].addresses or not loaded[0].k_first) and loaded[
            0].tiles.count > 1:
        out += tile_by_tile(loaded[0])
    else:
        # The next step's operands are loaded ahead where arithmetic, which may arrange them, reaches the registers of both.
        ahead = int(2 * sum(o.stage * o.dt.bits for o in loaded) <= 32 * MOST_REGISTERS)
        out += [fetch(step) for step in range(min(ahead + 1, steps))]
        for step in range(steps):
            out.append(multiply(step))
            out.append(fetch(step + 1 + ahead) if step + 1 + ahead < steps else None)
    if local_c is not held:
        out.append(converted(held, local_c))
    if op.plan.urgent:
        out = [do("wave_priority", n=1), *out, do("wave_priority", n=0)]
    body = seq(*[s for s in out if s is not None], span=op.span)
    return body if busy >= cx.num_threads else If(cx.thread < busy, body)


def _in_tiles(frag: Any, row: Any, rows: WarpTiles, cols: WarpTiles) -> bool:
    """Whether whole warps hold whole instruction tiles with a tile's registers contiguous and no replication."""
    warps, reps = [*rows.warps, *cols.warps], [*rows.reps, *cols.reps]
    return not frag.copies and all(o.stride % row.lanes == 0 for o in warps) and all(
        o.stride % row.c.registers == 0 for o in reps)


def _moved(op: Any, cx: Any, row: Any) -> Stmt:
    """The gemm on an accumulator in the instruction's layout, between copies from and to the program's fragment."""
    layout = operand_fragments(op, row, op.plan.warps, cx.num_threads)[2]
    c = op.c.buffer
    part = cx.new_fragment(f"{c.name}_t", layout, c.dtype)
    local = cx.local_of(part)
    lead = (const(0),) * (c.ndim - 2)
    zeros = each_register(local, lambda r: Store(local, (r,), cast(const(0), local.dtype)))
    into: Stmt | None = None
    if not is_const(op.clear_accum, True):  # a cleared accumulator may never have been written
        into = cx.parallel(layout.shape, lambda p: Store(part, p, load(c, (*lead, *p))), layout, span=op.span)
        into = into if isinstance(op.clear_accum, Const) else If(unary("not", cast(cx.expr(op.clear_accum), "bool")), into)
    back = cx.parallel(layout.shape, lambda p: Store(c, (*lead, *p), load(part, p)), cx.layout_of(c).project(
        (c.ndim - 2, c.ndim - 1)), span=op.span)
    return seq(zeros, into, lower_mma(replace(op, c=region_of(part, op.c.span)), cx, row), back, span=op.span)


def _exact(modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    return tuple(m for m in modes if m.size > 1)


def _cleared(op: Any, cx: Any, local: Buffer) -> Stmt | None:
    """Statement that zeroes the accumulator; None when nothing is cleared."""
    clear = op.clear_accum
    if isinstance(clear, Const) and not clear.value:
        return None
    fill = each_register(local, lambda r: Store(local, (r,), const(0.0 if local.dtype.is_float else 0, local.dtype)))
    return fill if isinstance(clear, Const) else If(cx.expr(clear), fill)


def _operand(op: Any, cx: Any, row: Any, side: str, tiles: WarpTiles, k: int,
             busy: int) -> tuple[Operand, Callable[[int, Expr], Expr]]:
    """(how the operand is fetched, its first register as a function of k step and tile)."""
    region = op.a if side == "a" else op.b
    frag = row.a if side == "a" else row.b
    k_dim = 1 if side == "a" else 0
    transposed = op.transpose_a if side == "a" else op.transpose_b
    dt = row.a_dtype if side == "a" else row.b_dtype
    dt = region.buffer.dtype if plain_dtype(region.buffer.dtype) == dt else dt  # another name of a type is no conversion
    k_first = transposed if side == "a" else not transposed
    if region.buffer.scope_name == FRAGMENT:
        # Padding registers of K beyond the edge may hold anything; those of an accumulator even change.
        usable = op.k % k == 0 and region.buffer.data is not op.c.buffer.data
        where = Operand(region, k_first, frag, k_dim, tiles, region.buffer, 0, dt)
        direct = _in_registers(op, cx, where, busy) if usable else None
        if direct is not None:
            return direct
        region = staged(cx, region, op.span)
    size = frag.registers
    stage = tiles.count * size
    depth = 2 if op.k > k else 1
    local = cx.new_local(f"{region.buffer.name}_{side}", stage * depth, dt)
    whole = op.plan.transposed and k_first and not tiles.is_padded and op.k % k == 0
    operand = Operand(region, k_first, frag, k_dim, tiles, local, stage, dt, row.of_addresses()[k_dim ^ 1] if whole else None)
    return operand, lambda step, tile: tile * size + (step % depth) * stage


def staged(cx: Any, region: Region, span: Any) -> Region:
    """The operand, copied to shared memory in front of the op."""
    source = region.buffer
    scratch = cx.new_shared(f"{source.name}_s", tuple(source.shape), source.dtype)
    cx.prepend(cx.parallel(tuple(source.shape), lambda at: Store(scratch, at, load(source, at)), span=span))
    return Region(scratch, region.mins, region.extents, span=region.span)


def _in_registers(op: Any, cx: Any, operand: Operand, busy: int) -> tuple[Operand, Callable[[int, Expr], Expr]] | None:
    """Use the operand from the registers it is in; None unless it has the instruction's layout and the needed replication."""
    region, frag, k_dim, k_first, tiles, dt = (operand.region, operand.frag, operand.k_dim, operand.k_first, operand.tiles,
                                               operand.dt)
    layout = cx.layout_of(region.buffer)
    if region.buffer.dtype.bits != dt.bits or not region.is_full or region.buffer.ndim != 2:
        return None
    outer_dim = 1 if k_first else 0
    outer_in, outer_out = outer_digits(layout.modes[outer_dim], frag.shape[1 - k_dim])
    k_in, k_out = outer_digits(layout.modes[1 - outer_dim], frag.shape[k_dim])
    same = (outer_in == _exact(frag.modes[1 - k_dim]) and k_in == _exact(frag.modes[k_dim]) and
            [o for o in outer_out if o.to == THREAD] == tiles.warps and
            [(o.size, o.weight) for o in outer_out if o.to == REGISTER] == [(o.size, o.weight) for o in tiles.reps] and
            all(o.to == REGISTER for o in k_out))
    if not same or not _copies_cover(layout, busy):
        return None
    local = cx.local_of(region.buffer)
    if dt == "tfloat32" and not region.buffer.facts.tf32:  # float32 registers are rounded before a tf32 instruction reads them
        rounded = cx.new_local(f"{region.buffer.name}_r", int(local.shape[0]), dt)
        held = local
        cx.prepend(each_register(held, lambda r: Store(rounded, (r,), _to_tf32(load(held, (r,)), dt))))
        local = rounded
    steps = [layout.register_of((0, s * frag.shape[k_dim]) if not k_first else (s * frag.shape[k_dim], 0))
             for s in range(op.k // frag.shape[k_dim])]
    reps = [o for o in outer_out if o.to == REGISTER]

    def register(step: int, tile: Expr) -> Expr:
        out: Expr = const(int(steps[step]))
        right = 1
        for k, o in reversed(list(enumerate(reps))):
            d = tile // right if right > 1 else tile
            out = out + (d % o.size if k else d) * o.stride
            right *= o.size
        return out

    return Operand(region, k_first, frag, k_dim, tiles, local, 0, dt), register


def _copies_cover(layout: Any, busy: int) -> bool:
    """Whether each of the `busy` threads holds the elements it needs: all thread digits are used or replicated."""
    covered = 1
    for m in [m for ms in layout.modes for m in ms if m.to == THREAD] + list(layout.copies):
        covered *= m.size
    return covered >= busy


def _to_tf32(value: Expr, dt: dtype) -> Expr:
    return cast(call("to_tf32", (value,), "float32"), dt) if dt == "tfloat32" else cast(value, dt)


def _fetch(cx: Any, o: Operand, step: int, k: int, end: int, at: int, span: Any) -> Stmt:
    """Load the registers of k step `step` of an operand, for all its tiles, from register `at` on.  end: elements along k."""
    inside = step * k + k <= end
    run = o.frag.modes[o.k_dim][-1]  # consecutive elements of k in a lane
    if inside and not o.k_first and run.to == REGISTER and run.size * o.dt.bits > 32:
        return _by_runs(cx, o, step * k, at, min(run.size, 128 // o.dt.bits), span)
    if o.addresses is not None and (out := _by_transposes(cx, o, step * k, at, span)) is not None:
        return out
    if o.k_first and o.frag.modes[1 - o.k_dim][-1].to == REGISTER:
        return _by_columns(cx, o, step * k, at, span)
    if inside and _ldmatrix_fits(cx, o):
        out = _by_ldmatrix(cx, o, step * k, at, span)
        if o.dt == "tfloat32" and not o.region.buffer.facts.tf32:
            v = fresh("r")
            place = (v + at,)
            out = seq(out, For(v, const(0), const(o.stage), "unroll",
                               Store(o.local, place, _to_tf32(cast(load(o.local, place), "float32"), o.dt))))
        return out
    return _by_element(cx, o, step * k, k, end, at, span)


def _ldmatrix_fits(cx: Any, o: Operand) -> bool:
    """ldmatrix needs contiguous, 16-byte aligned rows in shared memory: along k, or 16-bit elements with k outermost."""
    bits = o.dt.bits
    buffer = o.region.buffer
    if o.frag.threads != WARP or buffer.dtype.bits != bits or bits not in (8, 16, 32):
        return False
    if not buffer.scope_name.startswith("shared"):
        return False
    if o.k_first and bits != 16:
        return False
    run = 128 // bits
    if o.k_first and o.tiles.is_padded and o.tiles.extent % run:
        return False
    return cx.vector_width(buffer, o.region.mins, run) == run


def _by_ldmatrix(cx: Any, o: Operand, k0: int, at: int, span: Any) -> Stmt:
    size = o.frag.registers
    unit = 32 // o.dt.bits  # elements of a 32-bit register
    matrices = size // unit
    vs, number, index, _ = o.tiles.loops()
    together = 1
    step_weight = 0
    if vs and matrices < 4:
        last = o.tiles.reps[-1]
        together = min(4 // matrices, last.size & -last.size)
        step_weight = last.weight
    lane = cx.thread % WARP
    outer: Expr = o.tiles.offset
    kk: Expr = const(k0)
    which = [_corner(o, g * unit) for g in range(matrices)]
    bit = 0
    while 1 << bit < matrices * together:
        on = (lane // (8 << bit)) % 2 if (8 << bit) * 2 < WARP else lane // (8 << bit)
        if 1 << bit < matrices:
            d_outer, d_k = which[1 << bit]
        else:
            d_outer, d_k = ((1 << bit) // matrices) * step_weight, 0
        outer, kk = outer + on * d_outer, kk + on * d_k
        bit += 1
    if o.k_first:
        kk = kk + lane % 8
    else:
        outer = outer + lane % 8
    run = 128 // o.dt.bits if o.k_first else 1
    loops = list(vs)
    if together > 1:  # the innermost loop runs over groups of tiles
        v, n = loops[-1]
        group = fresh("t")
        loops[-1] = (group, n // together)
        mapping = {v: group * together}
        number, index = substitute(number, mapping), substitute(index, mapping)
    src = o.shared_index(o.tiles.inside(outer + index, run), kk)
    buffer, physical = cx.physical(o.region.buffer, tuple(cx.expr(i) for i in src))
    out = do("ldmatrix", AddressOf(o.local, (number * size + at,)), AddressOf(buffer, cx.simplified(physical)), span=span,
             num=matrices * together, trans=o.k_first)
    return unrolled([p for p in loops if p[1] > 1], substitute(out, {v: const(0) for v, n in loops if n == 1}))


def _corner(o: Operand, register: int) -> tuple[int, int]:
    """(outer, k) of lane 0's element in a register: the corner of the register's 8x8 matrix."""
    index, _ = o.frag.index_at(0, register)
    pair = tuple(int(i) for i in index)
    return pair[1 - o.k_dim], pair[o.k_dim]


def _by_runs(cx: Any, o: Operand, k0: int, at: int, width: int, span: Any) -> Stmt:
    """Each lane loads `width` neighbours along k at once."""
    vs, number, index, _ = o.tiles.loops()
    stores: list[Stmt] = []
    for r in range(0, o.frag.registers, width):
        pair, _ = o.frag.index_at(cx.thread % o.frag.threads, r)
        outer = o.tiles.inside(o.tiles.offset + index + pair[1 - o.k_dim])
        *lead, last = o.shared_index(outer, const(k0) + pair[o.k_dim])
        value = cx.expr(load(o.region.buffer, (*lead, ramp(last, width)), span=span))
        to = ramp(number * o.frag.registers + (at + r), width)
        stores.append(Store(o.local, (to,), cast(value, o.dt.with_lanes(width)), span=span))
    return unrolled(vs, seq(*stores))


def _by_columns(cx: Any, o: Operand, k0: int, at: int, span: Any) -> Stmt:
    """Each lane loads neighbours of the outer dimension at once, for each of its elements of k."""
    vs, number, index, _ = o.tiles.loops()
    count, run = o.frag.modes[1 - o.k_dim][-1].size, o.frag.modes[1 - o.k_dim][-1].stride
    part = cx.new_local(f"{o.region.buffer.name}_n", count, o.dt)
    stores: list[Stmt] = []
    for r in range(run):
        pair, _ = o.frag.index_at(cx.thread % o.frag.threads, r)
        *lead, last = o.shared_index(o.tiles.offset + index + pair[1 - o.k_dim], const(k0) + pair[o.k_dim])
        value = cx.expr(load(o.region.buffer, (*lead, ramp(last, count)), span=span))
        stores.append(Store(part, (ramp(const(0), count),), cast(value, o.dt.with_lanes(count)), span=span))
        stores += [Store(o.local, (number * o.frag.registers + (at + c * run + r),), load(part, (const(c),)), span=span)
                   for c in range(count)]
    return unrolled(vs, seq(*stores))


def _by_transposes(cx: Any, o: Operand, k0: int, at: int, span: Any) -> Stmt | None:
    """Each lane loads four neighbours of the outer dimension, which 16 lanes transpose; None where they do not lie together."""
    vs, number, index, _ = o.tiles.loops()
    stores: list[Stmt] = []
    for r in range(0, o.frag.registers, 4):
        pair, _ = o.addresses.index_at(cx.thread % o.frag.threads, r)
        *lead, last = o.shared_index(o.tiles.offset + index + pair[1 - o.k_dim], const(k0) + pair[o.k_dim])
        value = cx.expr(load(o.region.buffer, (*lead, ramp(last, 4)), span=span))
        if not isinstance(value, Load) or value.dtype != o.dt.with_lanes(4):
            return None
        to = ramp(number * o.frag.registers + (at + r), 4)
        stores.append(Store(o.local, (to,), call("lanes_transposed", (value,), value.dtype), span=span))
    return unrolled(vs, seq(*stores))


def _by_element(cx: Any, o: Operand, k0: int, k: int, end: int, at: int, span: Any) -> Stmt:
    """Each lane loads its elements one by one; elements of k from `end` on are zero."""
    size = o.frag.registers
    lane = cx.thread % o.frag.threads
    vs, number, index, _ = o.tiles.loops()
    stores: list[Stmt] = []
    for r in range(size):
        pair, _ = o.frag.index_at(lane, r)
        outer, kk = pair[1 - o.k_dim], pair[o.k_dim]
        where = o.shared_index(o.tiles.inside(o.tiles.offset + index + outer), const(k0) + kk)
        value = cx.expr(load(o.region.buffer, where, span=span))
        if k0 + k > end:
            value = select(const(k0) + kk < end, value, cast(const(0), value.dtype))
        stores.append(Store(o.local, (number * size + (at + r),), _to_tf32(value, o.dt), span=span))
    return unrolled(vs, seq(*stores))
