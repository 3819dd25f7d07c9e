"""Copy a tile from shared memory to the registers of an MMA operand by ldmatrix.

A fragment of 16-bit elements that repeats the 8x8 pattern of ldmatrix is loaded up to four matrices at a time:

    lane l holds elements (l/4, 2*(l%4) .. +1) of each 8x8 matrix, or with `trans` elements (2*(l%4) .. +1, l/4)
    lanes 8*j .. 8*j+7 give the addresses of the rows of matrix j

Source: PTX ISA, "Warp-level matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Evaluate, Expr, For, If, Region, Stmt, Var, call, const, convert, fresh, FRAGMENT
from tilelang.ir.record import record
from tilelang.layout import REGISTER, THREAD, Mode

from .distribute import digit

WARP = 32
ROWS = (Mode(8, THREAD, 4),)
PAIRS = (Mode(4, THREAD, 1), Mode(2, REGISTER, 1))


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
    if not _applies(cx, src, dst):
        return None
    frag = cx.layout_of(dst.buffer)
    (in_rows, out_rows), (in_cols, out_cols) = (outer_digits(ms, 8) for ms in frag.modes)
    if (in_rows, in_cols) not in ((ROWS, PAIRS), (PAIRS, ROWS)):
        return None
    used = threads_used(frag)
    digits = [(d, o) for d, outs in enumerate((out_rows, out_cols)) for o in outs]
    outside = [o.stride for _, o in digits if o.to == THREAD] + [m.stride for m in frag.copies]
    if used % WARP or any(stride % WARP for stride in outside):
        return None
    index, num, loops, register = matrix_rows(cx, digits)
    mins = tuple(convert(m) for m in src.mins)
    where = (*mins[:-2], mins[-2] + index[0], mins[-1] + index[1])
    buffer, physical = cx.physical(src.buffer, tuple(cx.expr(i) for i in where))
    args = (AddressOf(cx.local_of(dst.buffer), (register,)), AddressOf(buffer, cx.simplified(physical)))
    out: Stmt = Evaluate(call("ldmatrix", args, "void", span=span, num=num, trans=in_rows == PAIRS), span=span)
    return over_matrices(cx, out, loops, used)


def _applies(cx: Any, src: Region, dst: Region) -> bool:
    """Requires a whole 2-D fragment of 16-bit elements and contiguous, aligned 16-byte rows in shared memory."""
    if not (src.buffer.scope_name.startswith("shared") and dst.buffer.scope_name == FRAGMENT):
        return False
    if src.dtype != dst.dtype or dst.dtype.bits != 16 or dst.dtype.lanes != 1:
        return False
    if dst.buffer.ndim != 2 or not dst.is_full:
        return False
    if tuple(src.extents[-2:]) != tuple(dst.extents) or any(e != 1 for e in src.extents[:-2]):
        return False
    if cx.target is None or not getattr(cx.target, "has_ldmatrix", False) or cx.layout_of(dst.buffer).is_padded:
        return False
    return cx.vector_width(src.buffer, src.mins, 8) == 8


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
    index: list[Expr] = [const(0), const(0)]
    for d, o in digits:
        if o.to == THREAD:
            index[d] = index[d] + digit(cx.thread, o.stride, o.size, cx.num_threads) * o.weight
    lane = cx.thread % WARP
    num, together, rest = matrices([(d, o) for d, o in digits if o.to == REGISTER])
    for bit, (d, weight) in enumerate(together):
        index[d] = index[d] + (lane // (8 << bit) % 2 if (16 << bit) < WARP else lane // (8 << bit)) * weight
    index[0] = index[0] + lane % 8
    loops: list[tuple[Var, int]] = []
    register: Expr = const(0)
    for d, o in rest:
        v = fresh("t")
        loops.append((v, o.size))
        index[d] = index[d] + v * o.weight
        register = register + v * o.stride
    return index, num, loops, register


def over_matrices(cx: Any, out: Stmt, loops: list[tuple[Var, int]], used: int) -> Stmt:
    """The instruction inside its loops, executed by the first `used` threads of the block."""
    for v, n in reversed(loops):
        out = For(v, const(0), const(n), "unroll", out)
    return out if used == cx.num_threads else If(cx.thread < used, out)


__all__ = ["Outer", "copy_by_ldmatrix", "matrices", "matrix_rows", "outer_digits", "over_matrices", "threads_used"]
