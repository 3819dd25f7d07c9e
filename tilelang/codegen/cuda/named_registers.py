"""Named PTX registers, which only MMA instructions and loops with a register form use.

transform/registers/accumulator_registers.py chooses them. They are declared at the start of the kernel; functions that name
them are always inlined there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilelang.ir import AddressOf, Buffer, Call, const, Var

from ..device.calls import Calls
from ..device.text import POSTFIX, Text


class NamedRegisters:
    """The named registers of a kernel and the functions that name them; registers the text of moves into and out of them."""

    def __init__(self, calls: Calls) -> None:
        self.x, self.page = calls.x, calls.x.page
        self._names: dict[Var, str] = {}  # by storage
        self._arrays: dict[str, tuple[str, int]] = {}  # PTX type and number by name
        self.functions: dict[str, str] = {}  # definitions by name
        calls.special["wgmma_pin"] = self._pin

    def array(self, b: Buffer) -> str:
        """The common prefix of the names of a buffer's registers, which the kernel declares. No other buffer has it."""
        name = self._names.get(b.data)
        if name is None:
            name = base = self.page.name(b.data, b.name)
            while name in self._arrays:
                name = f"{base}_v{len(self._arrays)}"
            self._names[b.data] = name
            self._arrays[name] = (register_type(b), b.bits // 32)
        return name

    def type_of(self, array: str) -> str:
        """The PTX type of an array's registers."""
        return self._arrays[array][0]

    def call(self, name: str, params: str, body: str, args: str) -> None:
        """A statement that calls a function with this body."""
        full = self.function(name, lambda full: f"TL_DEVICE void {full}{params} {{ {body} }}\n")
        self.page.emit(f"tl::{full}({args});")

    def function(self, name: str, text: Callable[[str], str]) -> str:
        """The name under which a function is defined. A function with another text gets another name."""
        k, full = 0, name
        while self.functions.setdefault(full, text(full)) != text(full):
            k += 1
            full = f"{name}_v{k}"
        return full

    def keep(self, b: Buffer) -> None:
        """A statement in which the registers of a buffer are used."""
        name = self._names.get(b.data)
        if name is None:
            zero = AddressOf(b, (const(0),) * b.ndim)
            self.page.emit(f"tl::wgmma_keep<{b.bits // 32}>({self.x.top(zero)});")
            return
        count = self._arrays[name][1]
        uses = [f"xor.b32 all, all, tl_{name}_{i};" for i in range(count)]
        lines = ["{", ".reg .pred p;", ".reg .b32 all;", "mov.u32 all, %nctaid.z;", "setp.ne.u32 p, all, 65535;",
                 "@p bra KEPT;", *uses, "shr.u32 all, all, 31;", "nanosleep.u32 all;", "KEPT:", "}"]
        self.call(f"keep_{name}", "()", 'asm volatile("' + "\\n".join(lines) + '");', "")

    def declaration(self) -> str | None:
        """The statement that declares the registers; None if there are none."""
        return declared_registers(self._arrays)

    def _pin(self, e: Call) -> Text:
        way = e.options.move
        if way is None:
            return f"tl::wgmma_pin<{e.options.count}>({self.x.top(e.args[0])})", POSTFIX
        pinned: Any = e.args[0]
        array = self.array(pinned.buffer)
        ty, count = self._arrays[array]
        name = self.function(f"registers_{way}_{array}", lambda name: move_function(name, array, ty, count, way == "in"))
        return f"tl::{name}({self.x.top(e.args[0])})", POSTFIX


def register_type(b: Buffer) -> str:
    """The PTX type of the registers of an array."""
    return "f32" if b.dtype == "float32" and not b.facts.tf32 else "b32"


def declared_registers(arrays: Mapping[str, tuple[str, int]]) -> str | None:
    """The statement that declares registers by name: (PTX type, count); None if there are none."""
    lines = "\\n".join(f".reg .{ty} tl_{name}_<{n}>;" for name, (ty, n) in arrays.items())
    return f'asm volatile("{lines}");' if arrays else None


def move_function(name: str, array: str, ty: str, count: int, into: bool) -> str:
    """The definition of a function that moves a register array to its named registers, or back."""
    c_type, kind = ("float", "f") if ty == "f32" else ("unsigned", "r")
    pairs = [(f"tl_{array}_{i}", f"%{i}") for i in range(count)]
    moves = "".join(f"mov.{ty} {to}, {of};\\n" for to, of in (pairs if into else [p[::-1] for p in pairs]))
    operands = ", ".join(f'"{"" if into else "="}{kind}"(C[{i}])' for i in range(count))
    return (f"TL_DEVICE void {name}({'const ' if into else ''}void* c) {{\n"
            f"  {'const ' if into else ''}{c_type}* C = reinterpret_cast<{'const ' if into else ''}{c_type}*>(c);\n"
            f'  asm volatile("{moves}" :{":" if into else ""} {operands});\n}}\n')
