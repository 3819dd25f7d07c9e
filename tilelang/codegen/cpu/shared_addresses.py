"""Shared memory by address: the table of a launch, and functions of the module that read and write by address.

The buffers that a launch names by address have addresses chosen by the compiler (target/shared_space.py). Their storage holds
the tile in row-major order. A launch has a table of them:

    record: address, bytes of the tile with its layout, bytes of a unit, units after which its table repeats, the table

and each warp role has an array of the addresses of their storage. Three functions of the module use these: one finds the record
of an address, one copies 16 bytes, one reads the operand of a wgmma that a descriptor names.

Source: PTX ISA, "Matrix Descriptor Format" and "Swizzling Modes"; target/wgmma.py operand_addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilelang.target.shared_space import UNIT, Placed, SharedSpace
from tilelang.target.wgmma import K_STEP_BYTES

from .text import Fn, Module

RECORD = "{ i64, i64, i64, i64, ptr }"
_MEMCPY = ("llvm.memcpy.p0.p0.i64", "void", "ptr, ptr, i64, i1")


class AddressTable:
    """The table of a launch, and the addresses of the storage in a warp role. f: the warp role's function. bases: of the
    buffers."""

    def __init__(self, f: Fn, space: SharedSpace, bases: Sequence[str]) -> None:
        self.space = space
        self.table, self.count = _records(f.module, space), str(len(space.placed))
        self.bases = f.alloca(f"[{len(space.placed)} x ptr]", 8, "named")
        for k, base in enumerate(bases):  # parameters of the function: known on entry
            at = f.name_of("%named_at")
            f.allocas += [f"  {at} = getelementptr inbounds ptr, ptr {self.bases}, i64 {k}", f"  store ptr {base}, ptr {at}"]

    def of(self, f: Fn, p: Placed) -> tuple[str, str]:
        """The (record, storage) of a buffer."""
        k = str(self.space.placed.index(p))
        return f.at(self.table, RECORD, k), f.let(f"load ptr, ptr {f.at(self.bases, 'ptr', k)}")


def _records(m: Module, space: SharedSpace) -> str:
    """The constant table of a launch's buffers."""
    rows = []
    for p in space.placed:
        unit, period, table = p.period
        where = "null"
        if p.layout is not None:
            where = _constant(m, f"[{len(table)} x i32]", "[" + ", ".join(f"i32 {int(x)}" for x in table) + "]", "units")
        rows.append(f"{RECORD} {{ i64 {p.start}, i64 {p.nbytes}, i64 {unit}, i64 {period}, ptr {where} }}")
    return _constant(m, f"[{len(rows)} x {RECORD}]", "[" + ", ".join(rows) + "]", "space")


def _constant(m: Module, kind: str, value: str, name: str) -> str:
    """A private constant; equal values share one."""
    key = f"{name}:{value}"
    if key not in m.entries:
        m.entries[key] = f"@{name}{len(m.entries)} = private unnamed_addr constant {kind} {value}"
    return m.entries[key].split(" ", 1)[0]


# ---- functions of the module --------------------------------------------------------------------------------------------


def _field(f: Fn, record: str, k: int) -> str:
    at = f.let(f"getelementptr inbounds {RECORD}, ptr {record}, i64 0, i32 {k}")
    return f.let(f"load {'ptr' if k == 4 else 'i64'}, ptr {at}")


def find(m: Module) -> str:
    """A function i64 (table, records, address): the number of the record that holds an address, -1 for none."""
    name = "tl_shared_find"
    if name not in m.entries:
        f = Fn(m, name, "i64", [("ptr", "records", ""), ("i64", "n", ""), ("i64", "at", "")])
        with f.loop("0", "%n", hint="record") as i:
            r = f.at("%records", RECORD, i)
            inside = f.let(f"icmp ult i64 {f.sub('%at', _field(f, r, 0))}, {_field(f, r, 1)}")
            f.branch(inside, lambda: f.end(f"ret i64 {i}"))
        f.end("ret i64 -1")
        f.finish()
    return name


def move(m: Module) -> str:
    """A function i1 (record, storage, address, other, write) that copies 16 bytes from `other` to an address, or back.

    Its result is whether the bytes lie in the buffer, with an element at each of them.
    """
    name = "tl_shared_move"
    if name in m.entries:
        return name
    f = Fn(m, name, "i1", [("ptr", "record", ""), ("ptr", "base", ""), ("i64", "at", ""), ("ptr", "other", ""),
                           ("i1", "write", "")])
    memcpy = m.declare(*_MEMCPY)
    off, size, table = f.sub("%at", _field(f, "%record", 0)), _field(f, "%record", 1), _field(f, "%record", 4)
    inside = f.both(f.let(f"icmp ult i64 {off}, {size}"), f.let(f"icmp ule i64 {f.add(off, str(UNIT))}, {size}"))
    f.branch(inside, lambda: None, lambda: f.end("ret i1 false"))

    def copy(place: str, other: str, n: str) -> None:
        to = f.let(f"select i1 %write, ptr {place}, ptr {other}")
        frm = f.let(f"select i1 %write, ptr {other}, ptr {place}")
        f.do(f"call void {memcpy}(ptr {to}, ptr {frm}, i64 {n}, i1 false)")

    def plain() -> None:
        copy(f.at("%base", "i8", off), "%other", str(UNIT))
        f.end("ret i1 true")

    f.branch(f.let(f"icmp eq ptr {table}, null"), plain)
    unit, period = _field(f, "%record", 2), _field(f, "%record", 3)
    with f.loop("0", f.let(f"udiv i64 {UNIT}, {unit}"), hint="unit") as i:
        k = f.add(f.let(f"udiv i64 {off}, {unit}"), i)
        turns, rest = f.let(f"udiv i64 {k}, {period}"), f.let(f"urem i64 {k}, {period}")
        at = f.let(f"load i32, ptr {f.at(table, 'i32', rest)}")
        f.branch(f.let(f"icmp slt i32 {at}, 0"), lambda: f.end("ret i1 false"))
        place = f.mul(f.add(f.let(f"zext i32 {at} to i64"), f.mul(turns, period)), unit)
        copy(f.at("%base", "i8", place), f.at("%other", "i8", f.mul(i, unit)), unit)
    f.end("ret i1 true")
    f.finish()
    return name


def operand(m: Module, major: str) -> str:
    """A function i1 (table, records, storage, descriptor, extent, out) that reads the operand of a k-step as rows of 32 bytes
    along K.

    major "k": rows of 32 bytes as they are stored; "mn": 16 rows of `extent` elements of 16 bits, transposed. Its result is
    whether the operand lies in the buffer that the descriptor starts in.
    """
    name = f"tl_shared_operand_{major}"
    if name in m.entries:
        return name
    f = Fn(m, name, "i1", [("ptr", "records", ""), ("i64", "n", ""), ("ptr", "bases", ""), ("i64", "desc", ""),
                           ("i64", "extent", ""), ("ptr", "out", "")])
    chunk = f.alloca(f"[{UNIT} x i8]", 16, "chunk")

    def bits(shift: int, mask: int) -> str:
        return f.let(f"and i64 {f.let(f'lshr i64 %desc, {shift}')}, {mask}")

    start, lbo, sbo = (f.let(f"shl i64 {bits(s, 0x3FFF)}, 4") for s in (0, 16, 32))
    code = bits(62, 3)  # 0: no swizzle, else 1 of 128, 2 of 64, 3 of 32 bytes
    swizzled = f.let(f"icmp ne i64 {code}, 0")
    log = f.sub("8", code)
    width = f.let(f"shl i64 1, {log}")
    mask = f.sub(f.let(f"lshr i64 16, {code}"), "1")
    which = f.let(f"call i64 @{find(m)}(ptr %records, i64 %n, i64 {start})")
    f.branch(f.let(f"icmp slt i64 {which}, 0"), lambda: f.end("ret i1 false"))
    record, base = f.at("%records", RECORD, which), f.let(f"load ptr, ptr {f.at('%bases', 'ptr', which)}")
    rows, chunks = ("%extent", "2") if major == "k" else (str(K_STEP_BYTES // 2), f.let("lshr i64 %extent, 3"))

    def swizzled_place(row: str, c: str) -> str:
        along = f.mul(c, str(UNIT))
        atom, inside = "0", along
        if major != "k":
            atom = f.mul(f.let(f"lshr i64 {along}, {log}"), lbo)
            inside = f.let(f"and i64 {along}, {f.sub(width, '1')}")
        eight, one = f.let(f"lshr i64 {row}, 3"), f.let(f"and i64 {row}, 7")
        y = f.add(f.add(f.add(start, atom), f.add(f.mul(eight, sbo), f.mul(one, width))), inside)
        line = f.let(f"and i64 {f.let(f'lshr i64 {y}, 7')}, {mask}")
        return f.let(f"xor i64 {y}, {f.let(f'shl i64 {line}, 4')}")

    def plain_place(row: str, c: str) -> str:
        by_chunk, by_group = (lbo, sbo) if major == "k" else (sbo, lbo)
        eight, one = f.let(f"lshr i64 {row}, 3"), f.let(f"and i64 {row}, 7")
        return f.add(f.add(start, f.mul(c, by_chunk)), f.add(f.mul(eight, by_group), f.mul(one, str(UNIT))))

    with f.loop("0", rows, hint="row") as row, f.loop("0", chunks, hint="chunk") as c:
        at = f.choose(swizzled, "i64", lambda: swizzled_place(row, c), lambda: plain_place(row, c))
        ok = f.let(f"call i1 @{move(m)}(ptr {record}, ptr {base}, i64 {at}, ptr {chunk}, i1 false)")
        f.branch(ok, lambda: None, lambda: f.end("ret i1 false"))
        if major == "k":
            to = f.at("%out", "i8", f.add(f.mul(row, str(K_STEP_BYTES)), f.mul(c, str(UNIT))))
            f.do(f"call void {m.declare(*_MEMCPY)}(ptr {to}, ptr {chunk}, i64 {UNIT}, i1 false)")
        else:
            with f.loop("0", "8", hint="element") as j:
                v = f.let(f"load i16, ptr {f.at(chunk, 'i16', j)}")
                line = f.add(f.mul(c, "8"), j)
                f.do(f"store i16 {v}, ptr {f.at('%out', 'i16', f.add(f.mul(line, str(K_STEP_BYTES // 2)), row))}")
    f.end("ret i1 true")
    f.finish()
    return name
