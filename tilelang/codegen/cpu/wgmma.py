"""Hand-written wgmma: the MMA of a warp group, with operands from descriptors or from the threads' arrays.

All 128 threads of a warp group execute the statement together (matrices.py). A function of the module multiplies for one group:
it reads the operands as rows, multiplies in float32 or int32, and stores each element where the row's fragment places it.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Register Fragments"; target/wgmma.py.

Matrix descriptors of wgmma as values. Their misuse ends the call with an error that names the line.

Source: PTX ISA, "Matrix Descriptor Format"; target/wgmma.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tilelang.ir import SHARED, AddressOf, Call, Expr, as_bool, dtype
from tilelang.target.cpu import unsupported
from tilelang.target.shared_space import UNIT, Placed
from tilelang.target.tensor_map import NAN_BITS, STRIDE_ALIGN, TensorMap
from tilelang.target.warp_groups import GROUP
from tilelang.target.wgmma import K_STEP_BYTES, WGMMA_ROWS, WgmmaRow, encode_descriptor

from .barriers import barrier_operand, warp_role_of
from .coroutine import FAULT, FIRST_MISUSE, signal, word
from .matrices import Operand, TileMma
from .shared_addresses import AddressTable, move, operand
from .code import CallPrinter, Code
from .text import Fn, Module
from .threads import over_threads, this_thread
from .types import load, value_type


def misuse(cx: Code, text: str, span: Any) -> None:
    """Fail the call with this text, at the user's line."""
    warp_role = warp_role_of(cx, "a matrix descriptor outside a kernel", span)
    where = "" if span is None else f" ({os.path.basename(span.file)}:{span.line})"
    code = warp_role.misuses.setdefault(text + where, len(warp_role.misuses))
    cx.f.do(f"store i64 {FIRST_MISUSE + code}, ptr {word(cx.f, '%group', FAULT)}")


def address_table(cx: Code, e: Call) -> AddressTable:
    """The addresses of the launch. Raises cpu-unsupported in a launch that names none."""
    table = warp_role_of(cx, f"{e.op} outside a kernel", e.span).addresses
    if table is None:
        raise unsupported(f"a {e.op} in a kernel that initialises no descriptor", span=e.span or cx.span,
                          hint="T.initialize_wgmma_descriptor(desc, S[0, 0], ...) first")
    return table


def shared_address(cx: Code, a: Expr, e: Call) -> tuple[Placed, str]:
    """The buffer that an operand names, and its address (i64)."""
    if not isinstance(a, AddressOf) or a.buffer.scope_name not in SHARED:
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    p = address_table(cx, e).space.of(a.buffer.data)
    return p, cx.index(p.address(a.buffer, a.indices))


def _descriptor(cx: Code, e: Call) -> str:
    """wgmma_descriptor(address [, bytes])."""
    f, (_, at) = cx.f, shared_address(cx, e.args[0], e)
    at = f.add(at, str(e.options.offset))
    if len(e.args) > 1:
        at = f.add(at, cx.index(e.args[1]))
    odd = f.let(f"icmp ne i64 {f.let(f'and i64 {at}, {UNIT - 1}')}, 0")
    f.branch(odd, lambda: misuse(cx, "a wgmma operand does not start at a multiple of 16 bytes", e.span or cx.span))
    rest = encode_descriptor(0, e.options.lbo, e.options.sbo, e.options.swizzle)
    units = f.let(f"and i64 {f.let(f'lshr i64 {at}, 4')}, {0x3FFF}")
    return f.let(f"or i64 {units}, {rest - (1 << 64) if rest >> 63 else rest}")


DESCRIPTOR_CALLS: dict[str, CallPrinter] = {"wgmma_descriptor": _descriptor}


class _Value:
    """An operand that is one number per thread; a single value where all threads have the same."""

    def __init__(self, cx: Code, e: Expr) -> None:
        self.f, self.type = cx.f, value_type(e.dtype)
        self.array: str | None = None
        if not cx.block.values.varies(e):
            self.one = cx.value(e)
            return
        self.array = cx.f.alloca(f"[{cx.block.count} x {self.type}]", 64, "each")
        over_threads(cx, lambda: cx.f.do(f"store {self.type} {cx.value(e)}, ptr {self.of(this_thread(cx))}"))

    def of(self, thread: str) -> str:
        assert self.array is not None, "one value for all threads has no array"
        return self.f.at(self.array, self.type, thread)

    def at(self, first: str) -> str:
        """The value in the group that begins at a thread."""
        return self.one if self.array is None else self.f.let(f"load {self.type}, ptr {self.of(first)}")

    def differs(self, first: str, flag: str) -> None:
        """Set a flag if the threads of the group have different values."""
        f = self.f
        if self.array is None:
            return
        want = self.at(first)
        with f.loop("0", str(GROUP), hint="mate") as i:
            got = f.let(f"load {self.type}, ptr {self.of(f.add(first, i))}")
            f.branch(f.let(f"icmp ne {self.type} {got}, {want}"), lambda: f.do(f"store i1 true, ptr {flag}"))


def wgmma_statement(cx: Code, e: Call) -> None:
    """Emit the statement for all warp groups that execute it."""
    row = WGMMA_ROWS.get(e.options.row)
    majors = e.options.a_major, e.options.b_major
    if row is None or any(m not in row.majors for m in majors):
        raise unsupported(f"the matrix instruction {e.options.row} of operands {majors}", span=e.span or cx.span)
    if cx.block.active is None and any(n % GROUP for r in cx.block.ranges for n in r):
        raise unsupported(f"a wgmma of {cx.block.count} threads", span=e.span or cx.span,
                          hint="whole warp groups of 128 threads execute it")
    table = address_table(cx, e)
    f, from_registers = cx.f, isinstance(e.args[1], AddressOf)
    c = _registers(cx, e, 0, row.c_dtype)
    a: Any = _registers(cx, e, 1, row.a_dtype) if from_registers else _Value(cx, e.args[1])
    b, keep = _Value(cx, e.args[2]), _Value(cx, as_bool(e.args[3]))
    name = _group_mma(f.module, row, majors, c, a if from_registers else None)
    flag = f.alloca("i1", hint="differs")

    def group(first: str) -> None:
        f.do(f"store i1 false, ptr {flag}")
        for x in (b, keep) if from_registers else (a, b, keep):
            x.differs(first, flag)
        same = f.let(f"load i1, ptr {flag}")
        f.branch(same, lambda: misuse(cx, "the threads of a warp group execute a wgmma with different descriptors",
                                      e.span or cx.span), lambda: multiply(first))

    def multiply(first: str) -> None:
        given = f"ptr {a.places(first)}" if from_registers else f"i64 {a.at(first)}"
        args = [f"ptr {c.places(first)}", given, f"i64 {b.at(first)}", f"i1 {keep.at(first)}"]
        args += [f"ptr {table.table}", f"i64 {table.count}", f"ptr {table.bases}"]
        ok = f.let(f"call i1 @{name}({', '.join(args)})")
        f.branch(ok, lambda: None, lambda: misuse(
            cx, "an operand of a wgmma lies outside the shared buffer that its descriptor names: check its address, its "
            "strides and what moves it", e.span or cx.span))

    for lo, hi in cx.block.ranges:
        with f.loop(str(lo), str(hi), GROUP, hint="warp_group") as first:
            if cx.block.active is None:
                group(first)
            else:
                _where_active(cx, cx.block.active, first, hi, e, group)


def _registers(cx: Code, e: Call, k: int, dt: dtype) -> Operand:
    """An operand in arrays of the threads."""
    out = Operand(cx, e.args[k], e)
    if not out.private or out.bytes % dt.bytes:
        raise unsupported(f"an operand of wgmma in {out.buffer.scope()} memory of type {out.buffer.dtype}",
                          span=e.span or cx.span)
    return out


def _where_active(cx: Code, active: str, first: str, end: int, e: Call, group: Callable[[str], None]) -> None:
    """Print the statement under a mask that holds for none or all of the group's threads. active: a byte for each thread."""
    f, count = cx.f, cx.f.alloca("i64", hint="members")
    f.do(f"store i64 0, ptr {count}")
    with f.loop(first, f.smin(f.add(first, str(GROUP)), str(end)), hint="member") as t:
        one = f.let(f"zext i1 {load(f, dtype('bool'), f.at(active, 'i8', t))} to i64")
        f.do(f"store i64 {f.add(f.let(f'load i64, ptr {count}'), one)}, ptr {count}")
    n = f.let(f"load i64, ptr {count}")
    f.branch(f.let(f"icmp eq i64 {n}, {GROUP}"), lambda: group(first), lambda: f.branch(
        f.let(f"icmp ne i64 {n}, 0"), lambda: misuse(cx, "a wgmma is executed by a part of a warp group", e.span or cx.span)))


def _group_mma(m: Module, row: WgmmaRow, majors: tuple[str, str], c: Operand, a: Operand | None) -> str:
    """A function i1 (registers of c, those of a or its descriptor, descriptor of b, keep c, table, records, storage): the MMA
    of one group.

    Its result is false where the operand of a descriptor lies outside of its buffer.
    """
    kind = "_".join(["ss", *majors] if a is None else ["rs", majors[1]])
    sizes = "_".join(f"{o.bytes}x{o.step}" for o in (c, a) if o is not None)
    name = f"tl_{row.name.replace('.', '_')}_{kind}_{sizes}"
    if name in m.entries:
        return name
    f = Fn(m, name, "i1", [("ptr", "c", ""), ("i64" if a is None else "ptr", "a", ""), ("i64", "b", ""), ("i1", "keep", ""),
                           ("ptr", "table", ""), ("i64", "n", ""), ("ptr", "bases", "")], attrs="nounwind noinline")
    _GroupBody(f, row).emit(majors, c, a)
    f.finish()
    return name


class _GroupBody(TileMma):
    """The body of the function of one group: operands into tiles of the computing type, their MMA, and the accumulator back."""

    def emit(self, majors: tuple[str, str], c: Operand, a: Operand | None) -> None:
        """Print the body; the caller finishes the function.  a: None where a descriptor names the operand."""
        f, row = self.f, self.row
        self._read_operand(majors[1], "%b", self.n, row.b_dtype, self.b, True)
        if a is None:
            self._read_operand(majors[0], "%a", self.m, row.a_dtype, self.a, False)
        else:
            self.take(row.a, "%a", a, row.a_dtype, self.a)
        f.branch("%keep", lambda: self.take(row.c, "%c", c, row.c_dtype, self.c), self._clear_c)
        self.multiply("%c", c)
        f.end("ret i1 true")

    def _read_operand(self, major: str, descriptor: str, extent: int, dt: dtype, tile: str, transposed: bool) -> None:
        """Read the operand of a descriptor into a tile with rows along K (transposed: with rows along the extent)."""
        f, k = self.f, self.k
        raw = f.alloca(f"[{extent * K_STEP_BYTES} x i8]", 64, "raw")
        given = f"ptr %table, i64 %n, ptr %bases, i64 {descriptor}, i64 {extent}, ptr {raw}"
        ok = f.let(f"call i1 @{operand(f.module, major)}({given})")
        f.branch(ok, lambda: None, lambda: f.end("ret i1 false"))
        with f.loop("0", str(extent), hint="line") as i, f.loop("0", str(k), hint="k") as j:
            v = self.widened(dt, f.at(raw, "i8", f.mul(f.add(f.mul(i, str(k)), j), str(dt.bytes))))
            self.put(tile, f.add(f.mul(j, str(extent)), i) if transposed else f.add(f.mul(i, str(k)), j), v)

    def _clear_c(self) -> None:
        """Clear the accumulator."""
        with self.f.loop("0", str(self.m * self.n), hint="element") as i:
            self.put(self.c, i, "0" if self.row.c_dtype.is_int else "0.0")


# ---- boxes of T.tma_load ---------------------------------------------------------------------------------------------

# A box of a global tensor is copied into shared memory when its load is issued.
#
#     for each row of the box, for each 16 bytes of it:
#         inside the tensor: copied;  else element by element, elements outside are filled
#     the barrier counts the bytes
#
# Source: CUDA Driver API, "Tensor Map Object Management". The reference interpreter does the same in NumPy.

_ALIGN = 128  # bytes; alignment of a box in shared memory


def _tma_load(cx: Code, e: Call) -> str:
    """tma_load(address, barrier, coordinates innermost first), executed by each active thread."""
    span = e.span or cx.span
    m: TensorMap | None = warp_role_of(cx, f"{e.op} outside a kernel", span).maps.get(e.options.map)
    if m is None or m.tf32 or e.options.multicast:
        raise unsupported("a box through a map that this launch does not have, that rounds, or for several blocks", span=span)
    if not isinstance(e.args[1], AddressOf):
        raise unsupported("an mbarrier that is not an element of T.alloc_barrier", span=span)
    f, (held, at) = cx.f, shared_address(cx, e.args[0], e)
    starts = [cx.index(c) for c in e.args[2:]]
    size = m.buffer.dtype.bytes
    for value, by, why in ((at, _ALIGN, f"a box of T.tma_load starts at no multiple of {_ALIGN} bytes of shared memory"),
                           (f.mul(starts[0], str(size)), STRIDE_ALIGN,
                            f"a box of T.tma_load starts at a column that is no multiple of {STRIDE_ALIGN} bytes")):
        odd = f.let(f"icmp ne i64 {f.let(f'and i64 {value}, {by - 1}')}, 0")
        f.branch(odd, lambda why=why: misuse(cx, why, span))  # type: ignore[misc]
    record, base = address_table(cx, e).of(f, held)
    ok = f.alloca("i1", hint="there")
    f.do(f"store i1 true, ptr {ok}")
    _rows(cx, m, starts, lambda place, source: _copy_piece(cx, ok, record, base, place, source), at)
    f.branch(f.let(f"load i1, ptr {ok}"), lambda: None, lambda: misuse(
        cx, f"a box of {m.box} elements of T.tma_load leaves the shared buffer {held.buffer.name}", span))
    signal(f, barrier_operand(cx, e.args[1], span), "0", str(-m.box_bytes))
    return "0"


def _copy_piece(cx: Code, ok: str, record: str, base: str, place: str, source: str) -> None:
    f = cx.f
    done = f.let(f"call i1 @{move(f.module)}(ptr {record}, ptr {base}, i64 {place}, ptr {source}, i1 true)")
    f.branch(done, lambda: None, lambda: f.do(f"store i1 false, ptr {ok}"))


def _rows(cx: Code, m: TensorMap, starts: list[str], copy: Callable[[str, str], None], at: str) -> None:
    """copy(address in shared memory, address of the 16 source bytes) for each piece of the box."""
    f, b, rank = cx.f, m.buffer, m.rank
    size, per = b.dtype.bytes, UNIT // b.dtype.bytes
    extents = [cx.index(d) for d in m.extents()]
    piece = f.alloca(f"[{UNIT} x i8]", 16, "piece")
    with ExitStack() as loops:
        row, coords, inside = "0", [""] * rank, "true"
        for d in range(rank - 1, 0, -1):
            i = loops.enter_context(f.loop("0", str(m.box[d]), hint="box"))
            row = f.add(f.mul(row, str(m.box[d])), i)
            coords[d] = f.add(starts[d], i)
            inside = f.both(inside, f.let(f"icmp ult i64 {coords[d]}, {extents[d]}"))
        c = loops.enter_context(f.loop("0", str(m.box[0] // per), hint="piece"))
        coords[0] = f.add(starts[0], f.mul(c, str(per)))
        place = f.add(f.add(at, f.mul(row, str(m.swizzle or m.box[0] * size))), f.mul(c, str(UNIT)))
        if m.swizzle:
            flip = f.let(f"and i64 {f.let(f'lshr i64 {place}, 7')}, {m.swizzle // UNIT - 1}")
            place = f.let(f"xor i64 {place}, {f.let(f'shl i64 {flip}, 4')}")
        last = f.let(f"icmp sle i64 {f.add(coords[0], str(per))}, {extents[0]}")
        whole = f.both(f.both(inside, last), f.let(f"icmp sge i64 {coords[0]}, 0"))

        def elements() -> None:
            with f.loop("0", str(per), hint="element") as j:
                column = f.add(coords[0], j)
                there = f.both(inside, f.let(f"icmp ult i64 {column}, {extents[0]}"))
                kind = f"i{8 * size}"
                v = f.choose(there, kind, lambda: f.let(f"load {kind}, ptr {source(column)}, align 1"),
                             lambda: "0" if m.fill == "zero" else str(NAN_BITS[size]))
                f.do(f"store {kind} {v}, ptr {f.at(piece, kind, j)}, align 1")
            copy(place, piece)

        def source(column: str) -> str:
            return cx.address(b, [*reversed(coords[1:]), column])

        f.branch(whole, lambda: copy(place, source(coords[0])), elements)


BOX_CALLS: dict[str, CallPrinter] = {"tma_load": _tma_load}
