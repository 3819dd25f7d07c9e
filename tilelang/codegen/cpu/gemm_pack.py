"""Converts gemm operands to the form that the micro-kernel reads: type conversion, transposition, pairs of 16-bit integers.

A pair is an int32 that holds elements k and k+1 (16 bits each). One multiply-add of pairs (pmaddwd) multiplies and adds both
exactly, because 8-bit factors cannot overflow it. An odd k is padded with zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang.ir import dtype
from tilelang.target.cpu_launch import Packing

from .text import Fn
from .types import convert, load, memory_type, store, value_type

I16, I32 = dtype("int16"), dtype("int32")


def _columns(f: Fn, count: int, lanes: int) -> Iterator[tuple[str, int]]:
    """(first column, columns at once) of each step of loops over columns: vectors, then the rest one by one."""
    whole = count // lanes * lanes
    for start, stop, step in ((0, whole, lanes), (whole, count, 1)):
        if start != stop:
            with f.loop(str(start), str(stop), step, hint="c") as c:
                yield c, step


def _converted(f: Fn, at: str, src: dtype, to: dtype, n: int = 1) -> str:
    """The register value of n elements at an address in another type."""
    return convert(f, load(f, src.with_lanes(n), at), src.with_lanes(n), to.with_lanes(n))


def convert_rows(f: Fn, p: Packing, src: dtype, ct: dtype, at: str, dst: str) -> None:
    """dst[r*cols + c] = at[r*row + c*col] in the computing type."""
    lanes, rows, cols, row, col = p.lanes, p.rows, p.cols, p.row, p.col
    if row == cols and col == 1:
        rows, cols, row = 1, rows * cols, rows * cols
    with f.loop("0", str(rows), hint="r") as r:
        from_row = f.at(at, memory_type(src), f.mul(r, str(row)))
        to_row = f.at(dst, memory_type(ct), f.mul(r, str(cols)))
        for c, n in _columns(f, cols, lanes):
            v = _converted(f, f.at(from_row, memory_type(src), f.mul(c, str(col))), src, ct, n)
            store(f, ct.with_lanes(n), v, f.at(to_row, memory_type(ct), c))


def transpose_rows(f: Fn, p: Packing, src: dtype, ct: dtype, at: str, dst: str) -> None:
    """dst[c*rows + r] = at[r*row + c*col]: squares of `lanes` x `lanes` through shuffles, the rest one by one."""
    lanes, rows, cols, row, col = p.lanes, p.rows, p.cols, p.row, p.col
    square = col == 1 and rows >= lanes and cols >= lanes
    whole_r, whole_c = (rows // lanes * lanes, cols // lanes * lanes) if square else (0, 0)
    st, mt = memory_type(src), memory_type(ct)
    if square:
        with f.loop("0", str(whole_r), lanes, hint="r") as r, f.loop("0", str(whole_c), lanes, hint="c") as c:
            corner = f.at(at, st, f.add(f.mul(r, str(row)), c))
            lines = [_converted(f, f.at(corner, st, str(k * row)), src, ct, lanes) for k in range(lanes)]
            to = f.at(dst, mt, f.add(f.mul(c, str(rows)), r))
            for k, v in enumerate(_transposed(f, value_type(ct), lines)):
                store(f, ct.with_lanes(lanes), v, f.at(to, mt, str(k * rows)))

    def one_by_one(r0: int, r1: int, c0: int, c1: int) -> None:
        if r0 == r1 or c0 == c1:
            return
        with f.loop(str(c0), str(c1), hint="c") as c, f.loop(str(r0), str(r1), hint="r") as r:
            v = _converted(f, f.at(at, st, f.add(f.mul(r, str(row)), f.mul(c, str(col)))), src, ct)
            store(f, ct, v, f.at(dst, mt, f.add(f.mul(c, str(rows)), r)))

    one_by_one(0, whole_r, whole_c, cols)
    one_by_one(whole_r, rows, 0, cols)


def _transposed(f: Fn, scalar: str, lines: list[str]) -> list[str]:
    """Transpose a square matrix whose rows are vectors, in log2(n) steps that exchange halves of blocks."""
    n = len(lines)
    ty, out, half = f"<{n} x {scalar}>", list(lines), n // 2
    while half:
        for i in range(n):
            if i & half:
                continue
            a, b = out[i], out[i + half]
            low = [j if not j & half else n + (j ^ half) for j in range(n)]
            high = [j ^ half if not j & half else n + j for j in range(n)]
            for at, mask in ((i, low), (i + half, high)):
                text = ", ".join(f"i32 {x}" for x in mask)
                out[at] = f.let(f"shufflevector {ty} {a}, {ty} {b}, <{n} x i32> <{text}>")
        half //= 2
    return out


def pairs_of_columns(f: Fn, p: Packing, src: dtype, at: str, dst: str) -> None:
    """dst[r][c/2] = pair of at[r*row + c], at[r*row + c + 1]: each row is widened to int16."""
    lanes, rows, cols, row = p.lanes, p.rows, p.cols, p.row
    even = cols + cols % 2
    with f.loop("0", str(rows), hint="r") as r:
        from_row = f.at(at, memory_type(src), f.mul(r, str(row)))
        to_row = f.at(dst, "i16", f.mul(r, str(even)))
        for c, n in _columns(f, cols, lanes):
            v = _converted(f, f.at(from_row, memory_type(src), c), src, I16, n)
            store(f, I16.with_lanes(n), v, f.at(to_row, "i16", c))
        if even != cols:
            store(f, I16, "0", f.at(to_row, "i16", str(cols)))


def pairs_of_rows(f: Fn, p: Packing, src: dtype, at: str, dst: str) -> None:
    """dst[r/2][c] = pair of at[r*row + c], at[(r+1)*row + c]."""
    lanes, rows, cols, row = p.lanes, p.rows, p.cols, p.row
    st = memory_type(src)

    def line(count: str, second: bool) -> None:
        with f.loop("0", count, hint="r") as at_pair:
            r = at_pair if second else str(rows // 2)
            first = f.at(at, st, f.mul(f.mul(r, "2"), str(row)))
            to_row = f.at(dst, "i32", f.mul(r, str(cols)))
            for c, n in _columns(f, cols, lanes):
                store(f, I32.with_lanes(n), pair(first, c, n, second), f.at(to_row, "i32", c))

    def pair(first: str, c: str, n: int, second: bool) -> str:
        ty, low = value_type(I32.with_lanes(n)), _converted(f, f.at(first, st, c), src, I32, n)
        mask, shift = ("65535", "16") if n == 1 else ("splat (i32 65535)", "splat (i32 16)")
        low = f.let(f"and {ty} {low}, {mask}")
        if not second:
            return low
        high = _converted(f, f.at(f.at(first, st, str(row)), st, c), src, I32, n)
        return f.let(f"or {ty} {low}, {f.let(f'shl {ty} {high}, {shift}')}")

    if rows >= 2:
        line(str(rows // 2), True)
    if rows % 2:
        line("1", False)
