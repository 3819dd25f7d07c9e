"""Matrix instructions of a warp by their own names: ldmatrix, stmatrix and mma on arrays of the threads.

All threads of a warp execute such a statement together, like a shuffle (lanes.py). First the addresses of every thread's
operands are stored in arrays; then each warp is computed, lane by lane or element by element.

Source: PTX ISA, "Warp-level matrix instructions"; the rows of target/mma.py map elements to lanes and registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tilelang.ir import Call, Expr, dtype
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import is_private
from tilelang.target.mma import MMA_ROWS
from tilelang.target.thread_calls import WARP

from .lane_faults import fail_if, lanes_of
from .code import Code, pointed
from .state import PARTIAL
from .text import Fn, Module, clean
from .threads import over_threads, this_thread
from .types import convert, load, store, value_type


class Operand:
    """An operand of each thread: the address of its first element, elements at a distance of `step` bytes."""

    def __init__(self, cx: Code, a: Expr, e: Call) -> None:
        a = pointed(cx, e, a)
        self.f, self.buffer = cx.f, a.buffer
        where = cx.base_of(a.buffer)
        self.bytes = max(where.unit, a.buffer.dtype.bytes)
        self.step = self.bytes * where.copies
        self.private = is_private(a.buffer)
        self.array = cx.f.alloca(f"[{cx.block.count} x ptr]", 64, "places")
        f = cx.f
        over_threads(cx, lambda: f.do(
            f"store ptr {cx.address_of(a)}, ptr {f.at(self.array, 'ptr', this_thread(cx))}"))

    def places(self, thread: str) -> str:
        """The place of the address of a thread's first element; those of other threads follow."""
        return self.f.at(self.array, "ptr", thread)

    def base(self, thread: str) -> str:
        """The address of a thread's first element."""
        return self.f.let(f"load ptr, ptr {self.places(thread)}")

    def at(self, base: str, offset: str) -> str:
        """The address of the byte at an offset (i64) in the elements of a thread, as if they were contiguous."""
        return _element_at(self.f, base, offset, self.bytes, self.step)


def _element_at(f: Fn, base: str, offset: str, size: int, step: int) -> str:
    """The address of the byte at an offset (i64) in elements of `size` bytes, which lie `step` bytes apart from each other."""
    if step == size:
        return f.at(base, "i8", offset)
    if offset.isdigit():
        whole, rest = divmod(int(offset), size)
        return f.at(base, "i8", str(whole * step + rest))
    whole_, rest_ = f.let(f"udiv i64 {offset}, {size}"), f.let(f"urem i64 {offset}, {size}")
    return f.at(base, "i8", f.add(f.mul(whole_, str(step)), rest_))


def matrix_statement(cx: Code, e: Call) -> None:
    """Emit one such statement for all warps that execute it."""
    if cx.block.count % WARP:
        raise unsupported(f"{e.op} in a block of {cx.block.count} threads", span=e.span or cx.span,
                          hint=f"use a multiple of {WARP} threads")
    operands = [Operand(cx, a, e) for a in e.args]
    body = _prepare_mma(cx, e, operands) if e.op == "mma" else _prepare_move(cx, e, operands)
    f = cx.f
    for lo, hi in cx.block.ranges:
        with f.loop(str(lo), str(hi), WARP, hint="warp") as first:
            if cx.block.active is None:
                body(first)
            else:
                lanes = lanes_of(cx, cx.block.active, first)
                some = f.let(f"icmp ne i32 {lanes}, 0")
                fail_if(cx, e, PARTIAL, f.both(some, f.let(f"icmp ne i32 {lanes}, -1")))
                f.branch(some, partial(body, first))


# ---- ldmatrix, stmatrix -----------------------------------------------------------------------------------------------


def _prepare_move(cx: Code, e: Call, operands: list[Operand]) -> Callable[[str], None]:
    """Prepare ldmatrix or stmatrix of 8 x 8 matrices of 16-bit elements.

    Lane 4 * r + q holds elements 2 * q and 2 * q + 1 of row r (trans: of column r). Lanes 8 * i to 8 * i + 7 give the rows of
    matrix i.
    """
    f, num, trans = cx.f, e.options.num, e.options.trans
    mine, rows = operands if operands[0].private else operands[::-1]
    if not mine.private or rows.private or mine.bytes > 4:
        raise unsupported(f"{e.op} between {operands[0].buffer.scope()} and {operands[1].buffer.scope()} memory",
                          span=e.span or cx.span)

    def halves(first: str, lane: str, i: int) -> list[str]:
        """The addresses of the two elements in the rows."""
        r, q = f.let(f"lshr i64 {lane}, 2"), f.let(f"shl i64 {f.let(f'and i64 {lane}, 3')}, 1")
        out = []
        for h in (0, 1):
            row, column = (f.add(q, str(h)), r) if trans else (r, f.add(q, str(h)))
            base = rows.base(f.add(f.add(first, row), str(8 * i)))
            out.append(f.at(base, "i8", f.mul(column, "2")))
        return out

    def body(first: str) -> None:
        with f.loop("0", str(WARP), hint="lane") as lane:
            base = mine.base(f.add(first, lane))
            for i in range(num):
                places_ = halves(first, lane, i)
                if e.op == "ldmatrix":
                    low, high = (f.let(f"zext i16 {f.let(f'load i16, ptr {p}, align 1')} to i32") for p in places_)
                    _scatter(f, mine, base, 4 * i, f.let(f"or i32 {low}, {f.let(f'shl i32 {high}, 16')}"))
                else:
                    word = _gather(f, mine, base, 4 * i)
                    high = f.let(f"lshr i32 {word}, 16")
                    for p, v in zip(places_, (word, high)):
                        f.do(f"store i16 {f.let(f'trunc i32 {v} to i16')}, ptr {p}, align 1")

    return body


def _scatter(f: Fn, mine: Operand, base: str, offset: int, word: str) -> None:
    """Store 32 bits in the elements at a byte offset."""
    bits = 8 * mine.bytes
    for k in range(0, 4, mine.bytes):
        piece = word if k == 0 else f.let(f"lshr i32 {word}, {8 * k}")
        if bits < 32:
            piece = f.let(f"trunc i32 {piece} to i{bits}")
        f.do(f"store i{bits} {piece}, ptr {mine.at(base, str(offset + k))}, align {mine.bytes}")


def _gather(f: Fn, mine: Operand, base: str, offset: int) -> str:
    bits, out = 8 * mine.bytes, "0"
    for k in range(0, 4, mine.bytes):
        piece = f.let(f"load i{bits}, ptr {mine.at(base, str(offset + k))}, align {mine.bytes}")
        if bits < 32:
            piece = f.let(f"zext i{bits} {piece} to i32")
        out = piece if k == 0 else f.let(f"or i32 {out}, {f.let(f'shl i32 {piece}, {8 * k}')}")
    return out


# ---- mma --------------------------------------------------------------------------------------------------------------


def _prepare_mma(cx: Code, e: Call, operands: list[Operand]) -> Callable[[str], None]:
    """Prepare c += a @ b of a row of MMA_ROWS, with operands in the order c, a, b."""
    row, f = MMA_ROWS.get(e.options.row), cx.f
    if row is None:
        raise unsupported(f"the matrix instruction {e.options.row}", span=e.span or cx.span)
    for o, dt in zip(operands, (row.c_dtype, row.a_dtype, row.b_dtype)):
        if not o.private or o.bytes % dt.bytes:
            raise unsupported(f"an operand of mma in {o.buffer.scope()} memory of type {o.buffer.dtype}",
                              span=e.span or cx.span)
    name = _warp_mma(f.module, row, operands)
    return lambda first: f.do(f"call void @{name}({', '.join(f'ptr {o.places(first)}' for o in operands)})")


def _warp_mma(m: Module, row: Any, operands: list[Operand]) -> str:
    """A function void (registers of c, a, b): the mma of one warp."""
    c, a, b = operands
    name = f"tl_{clean(row.name)}_{'_'.join(f'{o.bytes}x{o.step}' for o in operands)}"
    if name in m.entries:
        return name
    f = Fn(m, name, "void", [("ptr", p, "") for p in "cab"], attrs="nounwind noinline")
    work = TileMma(f, row)
    work.take(row.c, "%c", c, row.c_dtype, work.c)
    work.take(row.a, "%a", a, row.a_dtype, work.a)
    work.take(row.b, "%b", b, row.b_dtype, work.b)
    work.multiply("%c", c)
    f.end("ret void")
    f.finish()
    return name


class TileMma:
    """c += a @ b in row-major tiles of the computing type, of operands in the registers of threads.

    row: the instruction, with the places of elements in registers.  ty: the computing type in LLVM.  c, a, b: addresses of the
    tiles.
    """

    def __init__(self, f: Fn, row: Any) -> None:
        self.f, self.row = f, row
        self.m, self.n, self.k = row.shape
        self.work = dtype("int32" if row.c_dtype.is_int else "float64" if row.c_dtype.bits == 64 else "float32")
        self.ty = value_type(self.work)
        self.c, self.a, self.b = (f.alloca(f"[{s} x {self.ty}]", 64, "tile")
                                  for s in (self.m * self.n, self.m * self.k, self.k * self.n))

    def widened(self, dt: dtype, address: str) -> str:
        """An element at an address in the computing type."""
        f = self.f
        v = convert(f, load(f, dt, address), dt, self.work)
        if dt.base != "tfloat32":
            return v
        bits = f.let(f"and i32 {f.let(f'bitcast float {v} to i32')}, -8192")  # the hardware ignores the low 13 bits
        return f.let(f"bitcast i32 {bits} to float")

    def put(self, tile: str, i: str, v: str) -> None:
        """Store an element of a tile."""
        self.f.do(f"store {self.ty} {v}, ptr {self.f.at(tile, self.ty, i)}")

    def take(self, fragment: Any, of: str, o: Operand, dt: dtype, tile: str) -> None:
        """Read an operand from registers into a tile."""
        self._each(fragment, of, o, dt, lambda at, i: self.put(tile, i, self.widened(dt, at)))

    def multiply(self, of: str, c: Operand) -> None:
        """Multiply, and store the accumulator in the registers."""
        f, dt = self.f, self.row.c_dtype
        f.do(f"call void @{_tile_mma(f.module, self.m, self.n, self.k, self.ty)}(ptr {self.a}, ptr {self.b}, ptr {self.c})")
        self._each(self.row.c, of, c, dt, lambda at, i: store(f, dt, convert(
            f, f.let(f"load {self.ty}, ptr {f.at(self.c, self.ty, i)}"), self.work, dt), at))

    def _each(self, fragment: Any, of: str, o: Operand, dt: dtype, action: Callable[[str, str], None]) -> None:
        """Call action(address in its thread's array, number) for each element of an operand."""
        f = self.f
        table, size = _places(f.module, fragment)
        with f.loop("0", str(size), hint="element") as i:
            packed = f.let(f"load i16, ptr {f.at(table, 'i16', i)}")
            place = f.let(f"zext i16 {packed} to i64")
            base = f.let(f"load ptr, ptr {f.at(of, 'ptr', f.let(f'lshr i64 {place}, 8'))}")
            action(_element_at(f, base, f.mul(f.let(f"and i64 {place}, 255"), str(dt.bytes)), o.bytes, o.step), i)


def _places(m: Module, fragment: Any) -> tuple[str, int]:
    """A constant table: 256 * lane + register of each element of an operand, in row-major order, and its length."""
    owner, register = fragment.owners()[0].ravel(), fragment.register_table().ravel()
    values = ", ".join(f"i16 {256 * int(o) + int(r)}" for o, r in zip(owner, register))
    key = f"places:{values}"
    if key not in m.entries:
        m.entries[key] = f"@places{len(m.entries)} = private unnamed_addr constant [{len(owner)} x i16] [{values}]"
    return m.entries[key].split(" ", 1)[0], len(owner)


def _tile_mma(m: Module, rows: int, columns: int, depth: int, ty: str) -> str:
    """Emit c += a @ b on row-major tiles of one type: the accumulator starts from zero, then c is added."""
    name = f"tile_product_{rows}x{columns}x{depth}_{ty}"
    if name in m.entries:
        return name
    f = Fn(m, name, "void", [("ptr", p, "noalias") for p in "abc"], attrs="nounwind")
    mul, add = ("mul", "add") if ty == "i32" else ("fmul", "fadd")
    acc, zero = f.alloca(f"[{columns} x {ty}]", 64, "sums"), "0" if ty == "i32" else "0.0"

    def update(place: str, x: str) -> None:
        before = f.let(f"load {ty}, ptr {place}")
        f.do(f"store {ty} {f.let(f'{add} {ty} {before}, {x}')}, ptr {place}")

    with f.loop("0", str(rows), hint="i") as i:
        with f.loop("0", str(columns), hint="j") as j:
            f.do(f"store {ty} {zero}, ptr {f.at(acc, ty, j)}")
        with f.loop("0", str(depth), hint="k") as k:  # columns side by side: a vector accumulator, in the order of k
            x = f.let(f"load {ty}, ptr {f.at('%a', ty, f.add(f.mul(i, str(depth)), k))}")
            with f.loop("0", str(columns), hint="j") as j:
                y = f.let(f"load {ty}, ptr {f.at('%b', ty, f.add(f.mul(k, str(columns)), j))}")
                update(f.at(acc, ty, j), f.let(f"{mul} {ty} {x}, {y}"))
        with f.loop("0", str(columns), hint="j") as j:
            done = f.let(f"load {ty}, ptr {f.at(acc, ty, j)}")
            update(f.at("%c", ty, f.add(f.mul(i, str(columns)), j)), done)
    f.end("ret void")
    f.finish()
    return name
