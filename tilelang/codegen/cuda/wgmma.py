"""CUDA text of wgmma and of descriptors.

Named registers (transform/registers/accumulator_registers.py) are declared in PTX at the start of the kernel: no operands.
"""

from __future__ import annotations

import re
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Break, Buffer, Call, Const, const, Continue, For, If, Launch, Load, LOCAL, Seq, Stmt,
                         Store, Var, walk, While, with_options)
from tilelang.target.thread_calls import MATRIX_CALLS
from tilelang.target.wgmma import SWIZZLE_CODE, WGMMA_ROWS, WgmmaRow

from ..device.calls import Calls
from ..device.text import POSTFIX, Text
from ..device.types import TYPES
from .named_registers import NamedRegisters

_NAME = re.compile(r"wgmma_(sp_)?(m64\w+?)_(ss|rs)_([km]{1,2})(?:_([01]))?")


class WgmmaCalls:
    """Registers the text of wgmma and of descriptors."""

    def __init__(self, calls: Calls, registers: NamedRegisters, launch: Launch) -> None:
        self.x, self.registers = calls.x, registers
        self.has_operands = bool(_operands(launch))
        calls.special.update({"wgmma": self._wgmma, "wgmma_descriptor": self._descriptor})

    def _wgmma(self, e: Call) -> Text:
        function = WGMMA_ROWS[e.options.row].function(isinstance(e.args[1], AddressOf), e.options.a_major, e.options.b_major,
                                                      e.options.selector)
        if e.options.registers:
            return self._on_registers(e, function)
        return f"tl::{function}({', '.join(map(self.x.top, e.args))})", POSTFIX

    def keep_operands(self, body: Stmt, at: Continue | None) -> None:
        """At the end of an iteration, or at a `continue`: operands in registers that the next one may read unwritten are used.

        ptxas 13.0 does not count the wgmma of the next iteration among their uses, and gives their registers to others.
        """
        if not self.has_operands:
            return
        read, ends = dict[Var, Buffer](), dict[int, set[Var]]()
        end = _follow(body, set(), read, ends)
        made = (end if at is None else ends.get(id(at), set())) | {x.buffer.data for x in walk(body, Alloc)}
        for data, b in read.items():
            if data not in made:
                self.registers.keep(b)

    def _on_registers(self, e: Call, function: str) -> Text:
        """The call of a wgmma whose arrays are named registers: its operands are the lower halves of the descriptors.

        Their offsets are added in the `asm`. With the descriptors of all wgmma of an iteration as operands, the compiler keeps
        those of a tile that does not change over the loop, and the wgmma then follow each other directly, which is slower.
        """
        c: Any = e.args[0]
        row, name, lines = WGMMA_ROWS[e.options.row], function, []
        operands, given, params, inputs = [], [self.x.top(e.args[3])], ["bool keep"], ['"r"((int)keep)']
        for letter, x in zip("cab", e.args[:3]):
            d: Any = x
            if isinstance(d, AddressOf):
                array, first = self.registers.array(d.buffer), _word(d)
                count = row.c_registers if d is c else 4
                name += f"_{array}_{first}"
                operands.append("{" + ", ".join(f"tl_{array}_{first + j}" for j in range(count)) + "}")
                continue
            n, made = len(given), getattr(d, "op", "") == "wgmma_descriptor"  # others are 64 bits that the program computes
            kind, ty = ("r", "unsigned") if made else ("l", "unsigned long long")
            params.append(f"{ty} x{n}")
            inputs.append(f'"{kind}"(x{n})')
            operands.append(letter if made else f"%{n}")
            if made:
                offset = d.options.offset >> 4
                high = (d.options.sbo >> 4 & 0x3fff) << 32 | SWIZZLE_CODE[d.options.swizzle] << 62
                # For a pair moved into 64 bits, ptxas did not always see that it is uniform.
                lines += [f".reg .b64 {letter};", f"add.s32 low, %{n}, {offset};", f"cvt.u64.u32 {letter}, low;",
                          f"or.b64 {letter}, {letter}, 0x{high:x};"]
                name, d = f"{name}_{offset}", with_options(d, offset=None)
            given.append(f"({ty}){self.x.top(d)}")
        if row.sparse:
            operands += [f"%{len(given)}", str(e.options.selector)]
            params.append("unsigned words")
            inputs.append('"r"(words)')
            given.append(self.x.top(e.args[4]))
        lines = ["{", ".reg .pred p;", "setp.ne.b32 p, %0, 0;", ".reg .b32 low;", *lines,
                 f"{row.ptx} {', '.join(operands)}, p{_flags(row, function)};", "}"]
        text = "\n".join(f'      "{line}\\n"' for line in lines)
        name = self.registers.function(name, lambda name: (
            f"TL_DEVICE void {name}({', '.join(params)}) {{\n  asm volatile(\n{text}\n      :: {', '.join(inputs)});\n}}\n"))
        return f"tl::{name}({', '.join(given)})", POSTFIX

    def _descriptor(self, e: Call) -> Text:
        """The descriptor of an operand. The attr `offset` and the second argument both add bytes, and so does a variable index.

        The half that does not change is computed once, and the rest of a loop's descriptors is one addition.
        """
        swizzle = SWIZZLE_CODE[e.options.swizzle]
        offset = f", {e.options.offset}" if e.options.offset else ""
        at: Any = e.args[0]
        parts = list(e.args)
        if isinstance(at, AddressOf) and len(at.indices) == 1 and not isinstance(at.indices[0], Const):
            zero = const(0, at.indices[0].dtype)
            parts[:1] = [AddressOf(at.buffer, (zero,)), at.indices[0] * at.buffer.dtype.bytes]
        args = ", ".join(map(self.x.top, parts))
        return f"tl::wgmma_descriptor<{e.options.lbo}, {e.options.sbo}, {swizzle}{offset}>({args})", POSTFIX


def _operands(s: Stmt) -> dict[Var, Buffer]:
    """The register arrays that wgmma of a statement read: A, and metadata of a sparse A."""
    found: dict[Var, Buffer] = {}
    for x in (x for x in walk(s, Call) if x.op == "wgmma"):
        metadata = (y for e in x.args[4:] for y in walk(e, Load))
        found.update((y.buffer.data, y.buffer) for y in (x.args[1], *metadata)
                     if isinstance(y, (AddressOf, Load)) and y.buffer.scope_name == LOCAL)
    return found


def _follow(s: Stmt, made: set[Var], read: dict[Var, Buffer], ends: dict[int, set[Var]]) -> set[Var]:
    """The arrays written when s ends, whatever its conditions are. made: those written before; read: gets the operands that a
    wgmma may read before; ends: gets those written at each `continue`, by its id."""
    if isinstance(s, Seq):
        for x in s.stmts:
            made = _follow(x, made, read, ends)
        return made
    if isinstance(s, (For, While)):
        end = _follow(s.body, made, read, ends)
        whole = isinstance(s, For) and isinstance(s.extent, Const) and s.extent.value > 0
        return end if whole and not any(True for _ in walk(s.body, Break, Continue)) else made
    if isinstance(s, If):
        return _follow(s.then, made, read, ends) & (made if s.orelse is None else _follow(s.orelse, made, read, ends))
    if isinstance(s, Continue):
        ends[id(s)] = ends.get(id(s), made) & made
    read.update((data, b) for data, b in _operands(s).items() if data not in made)
    found = {x.buffer.data for x in walk(s, Store)}
    for x in walk(s, Call):
        if x.op not in ("wgmma_pin", "wgmma_hold", "wgmma_used") or x.options.move == "in":
            to = x.args[:1] if x.op in MATRIX_CALLS else x.args
            found |= {y.buffer.data for y in to if isinstance(y, AddressOf)}
    return made | found


def wgmma_function(name: str) -> str | None:
    """The definition of the function of a wgmma on arrays; None for other names.

    Accumulators c stay in registers once inlined; b is a descriptor, a is a descriptor or registers. keep false: the wgmma
    ignores the old value of c.
    """
    m = _NAME.fullmatch(name)
    row = WGMMA_ROWS.get(f"wgmma.{'sp.' * (m.group(1) is not None)}{m.group(2).replace('_', '.')}") if m is not None else None
    if m is None or row is None:
        return None
    in_registers = m.group(3) == "rs"
    ty, kind = ("float", "+f") if row.c_dtype == "float32" else ("unsigned", "+r")
    n = row.c_registers
    c = ", ".join(f"%{i}" for i in range(n))
    a = f"{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}" if in_registers else f"%{n}"
    at = n + (4 if in_registers else 1)
    inputs = [f'"r"(A[{j}])' for j in range(4)] if in_registers else ['"l"(a)']
    outputs = ", ".join(f'"{kind}"(C[{i}])' for i in range(n))
    a_type = f"const {TYPES[row.a_dtype.base]}*" if in_registers else "unsigned long long"
    registers = "  const unsigned* A = reinterpret_cast<const unsigned*>(a);\n" if in_registers else ""
    words, given = (", unsigned words", ', "r"(words)') if row.sparse else ("", "")
    selected = f", %{at + 2}, {m.group(5)}" * row.sparse
    return (f"TL_DEVICE void {name}({TYPES[row.c_dtype.base]}* c, {a_type} a, unsigned long long b, bool keep{words}) {{\n"
            f"  {ty}* C = reinterpret_cast<{ty}*>(c);\n{registers}"
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{at + 1}, 0;\\n"\n'
            f'      "{row.ptx} {{{c}}}, {a}, %{at}{selected}, p{_flags(row, name)};\\n"\n      "}}"\n'
            f"      : {outputs}\n      : {', '.join(inputs)}, \"l\"(b), \"r\"((int)keep){given});\n}}\n")


def _flags(row: WgmmaRow, function: str) -> str:
    """The text behind the predicate of an instruction: signs, and which operands are transposed."""
    if row.c_dtype.is_int:
        return ""
    transposed = [str(int(o == "m")) for o in _NAME.fullmatch(function)[4]] if row.a_dtype.bits == 16 else []  # type: ignore[index]
    return ", " + ", ".join(["1", "1", *transposed])


def _word(a: Any) -> int:
    """The register of an element of a register array."""
    return int(a.indices[0].value) * int(a.buffer.dtype.bits) // 32
