"""Copy a tile from shared memory to the registers of an MMA operand by ldmatrix, and accumulators back by stmatrix.

A fragment of 16-bit elements that repeats the 8x8 pattern of the instructions is moved up to four matrices at a time:

    lane l holds elements (l/4, 2*(l%4) .. +1) of each 8x8 matrix, or with `trans` elements (2*(l%4) .. +1, l/4)
    lanes 8*j .. 8*j+7 give the addresses of the rows of matrix j

A tile of bytes with K as the outer dimension is loaded 32 rows x 16 columns at a time.  Lane 4*g + t then holds of each half
of the rows 4*t .. 4*t+3 in columns 2*g and 2*g+1, each column in one register.  As 16-bit units a matrix gives it two columns
of two rows; two matrices make the four rows, and a byte permutation separates the columns.  Lanes 2, 3 (mod 4) get their rows
in the other order, so that the rows of a matrix differ modulo 8 and their 16-byte units lie in different banks.  stmatrix
writes these registers as the transposed tile of 16 rows of 32 bytes.  Its matrix has every other row; the lanes of the last
four give it the rows between instead, for the same reason.

Source: PTX ISA, "Warp-level matrix load instruction: ldmatrix", "Warp-level matrix store instruction: stmatrix".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import (AddressOf, Expr, For, If, Region, Stmt, Store, Var, cast, const, do, fresh, is_const, load, ramp, seq,
                         unrolled, FRAGMENT, SHARED)
from tilelang.ir.record import record
from tilelang.layout import REGISTER, THREAD, Mode

from .distribute import digit

WARP = 32
ROWS = (Mode(8, THREAD, 4),)
PAIRS = (Mode(4, THREAD, 1), Mode(2, REGISTER, 1))
BYTES_OF_K = (Mode(2, REGISTER, 8), Mode(4, THREAD, 1), Mode(4, REGISTER, 1))
COLUMNS = (Mode(8, THREAD, 4), Mode(2, REGISTER, 4))


@record
class Outer:
    """A layout digit of a dimension outside the instruction tile.

    weight: index step.  stride: threads or registers that one step moves by.
    """

    size: int
    to: str
    stride: int
    weight: int


def outer_digits(modes: tuple[Mode, ...], inner: int) -> tuple[tuple[Mode, ...], list[Outer]]:
    """(digits inside an instruction tile of `inner` indices, digits outside, outermost first)."""
    inside: list[Mode] = []
    outside: list[Outer] = []
    weight = 1
    for m in reversed(modes):
        size, stride = m.size, m.stride
        if weight < inner:
            part = min(size, inner // weight)
            inside.insert(0, Mode(part, m.to, stride))
            weight *= part
            size, stride = size // part, stride * part
        if size > 1:
            outside.insert(0, Outer(size, m.to, stride, weight))
            weight *= size
    return tuple(inside), outside


def threads_used(frag: Any) -> int:
    """One more than the number of the last thread that holds an element."""
    digits = [m for ms in frag.modes for m in ms if m.to == THREAD] + list(frag.copies)
    return 1 + sum((m.size - 1) * m.stride for m in digits)


def copy_by_ldmatrix(cx: Any, src: Region, dst: Region, span: Any) -> Stmt | None:
    """dst = src by ldmatrix; None where types, layouts or alignment do not permit it."""
    if src.dtype != dst.dtype or dst.dtype.bits not in (8, 16) or dst.dtype.lanes != 1 or not moves_rows(
            cx, dst, src, "has_ldmatrix"):
        return None
    if dst.dtype.bits == 8:
        return _columns_of_bytes(cx, src, dst, span)
    return _by_matrices(cx, cx.layout_of(dst.buffer), lambda index, register, **options: _load(
        cx, src, dst, index, register, span, **options))


def copy_by_stmatrix(cx: Any, src: Region, dst: Region, span: Any) -> Stmt | None:
    """dst = cast(src) by stmatrix (sm_90); None where types, layouts or alignment do not permit it.

    The shared elements have 16 bits; wider registers are rounded before the store, matrix by matrix.
    """
    if dst.dtype.bits != 16 or dst.dtype.lanes != 1 or src.dtype.lanes != 1 or src.dtype.bits not in (16, 32) or \
            dst.dtype.is_bool or not moves_rows(cx, src, dst, "has_stmatrix"):
        return None
    frag = cx.layout_of(src.buffer)

    def stored(index: list[Expr], register: Expr, num: int, trans: bool) -> Stmt:
        place, local, n, zero = place_in(cx, dst, *index), cx.local_of(src.buffer), 2 * num, const(0)
        if src.dtype == dst.dtype:
            return do("stmatrix", place, AddressOf(local, (register,)), span=span, num=num, trans=trans)
        packed = cx.new_local("packed", n, dst.dtype)
        value = cast(load(local, (ramp(register, n),)), dst.dtype.with_lanes(n))
        return seq(Store(packed, (ramp(zero, n),), value, span=span),
                   do("stmatrix", place, AddressOf(packed, (zero,)), span=span, num=num, trans=trans))

    return None if frag.copies else _by_matrices(cx, frag, stored)


def _by_matrices(cx: Any, frag: Any, moved: Callable[..., Stmt]) -> Stmt | None:
    """The instructions that move a fragment of 8x8 matrices; None for other fragments, and where warps are not whole.

    moved(index, register, num=, trans=): one of them, of the matrix rows that matrix_rows gives.
    """
    (in_rows, out_rows), (in_cols, out_cols) = (outer_digits(ms, 8) for ms in frag.modes)
    if (in_rows, in_cols) not in ((ROWS, PAIRS), (PAIRS, ROWS)):
        return None
    used = threads_used(frag)
    digits = [(d, o) for d, outs in enumerate((out_rows, out_cols)) for o in outs]
    outside = [o.stride for _, o in digits if o.to == THREAD] + [m.stride for m in frag.copies]
    if used % WARP or any(stride % WARP for stride in outside):
        return None
    index, num, loops, register = matrix_rows(cx, digits)
    return over_matrices(cx, moved(index, register, num=num, trans=in_rows == PAIRS), loops, used)


def transpose_bytes(cx: Any, src: Region, dst: Region, span: Any) -> Stmt | None:
    """dst[j, i] = src[i, j] for two tiles of bytes in shared memory; None where types, sizes or alignment do not permit it."""
    if not (in_tiles_of_bytes(src, dst) and getattr(cx.target, "has_stmatrix", False)) or cx.num_threads % WARP or any(
            cx.vector_width(r.buffer, r.mins, 16) != 16 for r in (src, dst)):
        return None
    k, n = src.extents[-2:]
    tiles, warps = k // 32 * (n // 16), cx.num_threads // WARP
    steps = -(-tiles // warps)
    held = next(x for x in (4, 3, 2, 1) if steps % x == 0)  # loaded before the first is stored: the loads wait for no store
    registers, group, lane = cx.new_local("bytes", 16 * held, src.dtype), fresh("g"), cx.thread % WARP

    def each(op: str) -> Stmt:
        step = fresh("t")
        tile, at = (group * held + step) * warps + cx.thread // WARP, AddressOf(registers, (step * 16,))
        column, row = tile % (n // 16) * 16, tile // (n // 16) * 32
        args = (at, place_in(cx, src, row + _row_of_bytes(lane), column)) if op == "ldmatrix" else (
            place_in(cx, dst, column + lane % 8 * 2 + (lane // 8 + lane % 8 // 4) % 2, row + lane // 16 * 16), at)
        out: Stmt = do(op, *args, span=span, num=4, trans=op == "ldmatrix", bytes=True)
        return For(step, const(0), const(held), "unroll", out if tiles % warps == 0 else If(tile < tiles, out))

    return For(group, const(0), const(steps // held), "unroll", seq(each("ldmatrix"), each("stmatrix")))


def in_tiles_of_bytes(src: Region, dst: Region) -> bool:
    """Whether the tiles of a transposition are made of 32 x 16 bytes in shared memory."""
    k, n = src.extents[-2:]
    return src.dtype == dst.dtype and src.dtype.bits == 8 and src.dtype.lanes == 1 and is_const(k % 32 + n % 16, 0) and all(
        r.buffer.scope_name in SHARED for r in (src, dst))


def _row_of_bytes(lane: Expr) -> Expr:
    """The row of a tile of bytes whose address a lane gives to ldmatrix."""
    return lane // 16 * 16 + lane % 8 // 2 * 4 + (lane // 8 + lane // 4) % 2 * 2 + lane % 2


def place_in(cx: Any, r: Region, row: Expr, column: Expr) -> AddressOf:
    """The address of an element of a tile in shared memory."""
    buffer, physical = cx.physical(r.buffer, tuple(cx.expr(i) for i in r.at(row, column)))
    return AddressOf(buffer, cx.simplified(physical))


def _load(cx: Any, src: Region, dst: Region, index: list[Expr], register: Expr, span: Any, **options: Any) -> Stmt:
    return do("ldmatrix", AddressOf(cx.local_of(dst.buffer), (register,)), place_in(cx, src, *index), span=span, **options)


def _columns_of_bytes(cx: Any, src: Region, dst: Region, span: Any) -> Stmt | None:
    """dst = src, a tile of bytes (K, rows), for the fragment of a transposed wgmma operand; None for other fragments."""
    frag = cx.layout_of(dst.buffer)
    if not in_columns_of_bytes(frag):
        return None
    digits = [(d, o) for d, inner in enumerate((32, 16)) for o in outer_digits(frag.modes[d], inner)[1]]
    index: list[Expr] = [const(0), const(0)]
    loops, register = over_tiles(cx, digits, index)
    index[0] = index[0] + _row_of_bytes(cx.thread % WARP)
    out = _load(cx, src, dst, index, register, span, num=4, trans=True, bytes=True)
    return over_matrices(cx, out, loops, threads_used(frag))


def in_columns_of_bytes(frag: Any) -> bool:
    """Whether a fragment (K, rows) of bytes is that of a transposed wgmma operand, for whole warps."""
    (in_k, out_k), (in_rows, out_rows) = outer_digits(frag.modes[0], 32), outer_digits(frag.modes[1], 16)
    return (in_k, in_rows) == (BYTES_OF_K, COLUMNS) and threads_used(frag) % WARP == 0 and all(
        o.stride % WARP == 0 for o in (*out_k, *out_rows) if o.to == THREAD)


def moves_rows(cx: Any, held: Region, tile: Region, feature: str) -> bool:
    """Whether the target has the feature for a whole 2-D fragment and contiguous, aligned 16-byte rows in shared memory."""
    run = 128 // tile.dtype.bits
    return bool(
        held.buffer.scope_name == FRAGMENT and tile.buffer.scope_name in SHARED and held.buffer.ndim == 2 and held.is_full
        and tuple(tile.extents[-2:]) == tuple(held.extents) and all(e == 1 for e in tile.extents[:-2])
        and getattr(cx.target, feature, False) and not cx.layout_of(held.buffer).is_padded
        and cx.vector_width(tile.buffer, tile.mins, run) == run)


def matrices(registers: list[tuple[int, Outer]]) -> tuple[int, list[tuple[int, int]], list[tuple[int, Outer]]]:
    """(matrices per instruction, (dimension, index step) for each address bit, digits left to loops).

    An instruction takes as many matrices as are in consecutive registers, at most four.
    """
    left = sorted(registers, key=lambda r: r[1].stride)
    together: list[tuple[int, int]] = []
    while len(together) < 2 and left and left[0][1].stride == 2 << len(together) and left[0][1].size % 2 == 0:
        d, o = left.pop(0)
        together.append((d, o.weight))
        if o.size > 2:
            left.insert(0, (d, Outer(o.size // 2, o.to, o.stride * 2, o.weight * 2)))
    return 1 << len(together), together, left


def matrix_rows(cx: Any, digits: list[tuple[int, Outer]]) -> tuple[list[Expr], int, list[tuple[Var, int]], Expr]:
    """The operands that a lane passes to ldmatrix or stmatrix for a fragment with these (dimension, outer digit)s.

    ((row, column) in the tile of this lane's matrix row, matrices per instruction, (variable, extent) of the loops over
    instructions, first register of an instruction).
    """
    num, together, rest = matrices([(d, o) for d, o in digits if o.to == REGISTER])
    index: list[Expr] = [const(0), const(0)]
    over_tiles(cx, [(d, o) for d, o in digits if o.to == THREAD], index)
    lane = cx.thread % WARP
    for bit, (d, weight) in enumerate(together):
        index[d] = index[d] + (lane // (8 << bit) % 2 if (16 << bit) < WARP else lane // (8 << bit)) * weight
    index[0] = index[0] + lane % 8
    return index, num, *over_tiles(cx, rest, index)


def over_tiles(cx: Any, digits: list[tuple[int, Outer]], index: list[Expr]) -> tuple[list[tuple[Var, int]], Expr]:
    """(the loops over a warp's tiles, first register); adds the place where a tile begins to the (row, column) `index`."""
    loops: list[tuple[Var, int]] = []
    register: Expr = const(0)
    for d, o in digits:
        if o.to == THREAD:
            index[d] = index[d] + digit(cx.thread, o.stride, o.size, cx.num_threads) * o.weight
            continue
        v = fresh("t")
        loops.append((v, o.size))
        index[d] = index[d] + v * o.weight
        register = register + v * o.stride
    return loops, register


def over_matrices(cx: Any, out: Stmt, loops: list[tuple[Var, int]], used: int) -> Stmt:
    """The instruction inside its loops, executed by the first `used` threads of the block."""
    out = unrolled(loops, out)
    return out if used == cx.num_threads else If(cx.thread < used, out)
