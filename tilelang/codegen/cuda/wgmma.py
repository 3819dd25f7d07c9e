"""CUDA text of wgmma: the instruction of a row, and consecutive instructions as one `asm`.

transform/registers/join_wgmmas.py decides which instructions are joined. Named registers
(transform/registers/accumulator_registers.py) are declared in PTX at the start of the kernel and are no operands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tilelang.ir import AddressOf, Call, Const, Evaluate, Stmt, const, with_options
from tilelang.target.wgmma import SWIZZLE_CODE, WGMMA_ROWS, WgmmaRow

from .named_registers import NamedRegisters
from .calls import Calls
from .text import POSTFIX, Text
from .types import TYPES

_NAME = re.compile(r"(wgmma_m64\w+?)_(ss|rs)_([km]{1,2})(?:_x(\d+))?")


def wgmma_runs(stmts: Sequence[Stmt]) -> Iterator[list[Stmt]]:
    """The statements in order: lists of wgmma that are printed as one asm, and single other statements."""
    run: list[Stmt] = []
    for s in stmts:
        if run and not (isinstance(s, Evaluate) and s.call.op == "wgmma" and s.call.options.joined):
            yield run
            run = []
        run.append(s)
    if run:
        yield run


class WgmmaCalls:
    """Registers the text of wgmma and of descriptors; prints runs of wgmma."""

    def __init__(self, calls: Calls, registers: NamedRegisters) -> None:
        self.x, self.page, self.registers = calls.x, calls.x.page, registers
        calls.special.update({"wgmma": self._wgmma, "wgmma_descriptor": self._descriptor})

    def _function(self, e: Call) -> str:
        in_registers = isinstance(e.args[1], AddressOf)
        return WGMMA_ROWS[e.options.row].function(in_registers, e.options.a_major, e.options.b_major)

    def print_run(self, calls: list[Call], s: Stmt) -> None:
        """Print one call for a run of wgmma: accumulator, whether it is kept, then a and b of each."""
        self.page.comment(s.span)
        if calls[0].options.registers:
            name, given = self._named(calls)
            self.page.emit(f"tl::{name}({', '.join(given[0])},")
            given = given[1:]
        else:
            c, _, _, keep = calls[0].args
            self.page.emit(f"tl::{self._function(calls[0])}_x{len(calls)}({self.x.top(c)}, {self.x.top(keep)},")
            given = [[self.x.top(e.args[1]), self.x.top(e.args[2])] for e in calls]
        for i, each in enumerate(given):
            self.page.emit(f"    {', '.join(each)}{');' if i + 1 == len(given) else ','}")

    def _wgmma(self, e: Call) -> Text:
        if e.options.registers:
            name, given = self._named([e])
            return f"tl::{name}({', '.join(x for each in given for x in each)})", POSTFIX
        return f"tl::{self._function(e)}({', '.join(map(self.x.top, e.args))})", POSTFIX

    def _named(self, calls: list[Call]) -> tuple[str, list[list[str]]]:
        """(function of a run of wgmma on named registers, its arguments).

        The arguments are whether the accumulator is kept, then for each wgmma the operands that are not named registers.
        """
        own = calls[0].options.registers
        if calls[0].options.based:
            return self._based_run(calls)
        row = WGMMA_ROWS[calls[0].options.row]
        c: Any = calls[0].args[0]
        given, sources = [[self.x.top(calls[0].args[3])]], []
        parts = [f"{self._function(calls[0])}_x{len(calls)}"]
        if "c" in own:
            parts.append(f"{self.registers.array(c.buffer)}_{_word(c)}")
        else:
            given[0].insert(0, self.x.top(c))
        for e in calls:
            a: Any = e.args[1]
            if "a" in own:
                sources.append((self.registers.array(a.buffer), _word(a)))
                parts.append(f"{sources[-1][0]}_{sources[-1][1]}" if len(sources) == 1 else str(sources[-1][1]))
            given.append([self.x.top(x) for x in (e.args[2:3] if "a" in own else e.args[1:3])])
        form = _NAME.fullmatch(self._function(calls[0]))
        assert form is not None
        in_registers, orders = form.group(2) == "rs", form.group(3)
        target = (self.registers.array(c.buffer), _word(c)) if "c" in own else None
        name = self.registers.function("_".join(parts), lambda name: _definition(
            name, row, in_registers, orders, len(calls), True, target, sources))
        return name, given

    def _based_run(self, calls: list[Call]) -> tuple[str, list[list[str]]]:
        """The function of a run of wgmma whose descriptors differ by constants from one descriptor of A and one of B.

        The operands are the lower halves of these two; the rest is computed where it is used. With sixteen descriptors as
        operands, the compiler keeps those of a tile that does not change over the loop, and eight wgmma then follow each other
        directly, which is slower.
        """
        bases = [with_options(x, offset=None) for x in calls[0].args[1:3] if not isinstance(x, AddressOf)]
        row = WGMMA_ROWS[calls[0].options.row]
        c: Any = calls[0].args[0]
        form = _NAME.fullmatch(self._function(calls[0]))
        assert form is not None
        target = f"tl_{self.registers.array(c.buffer)}"
        lines = ["{", f".reg .pred p{', q' if len(calls) > 1 else ''};", f"setp.ne.b32 p, %{len(bases)}, 0;"]
        if len(calls) > 1:
            lines.append("setp.eq.u32 q, 0, 0;")
        lines.append(".reg .b32 low;")
        operands: list[list[str]] = [[] for _ in calls]
        if len(bases) == 1:
            for e, x in zip(calls, operands):
                a: Any = e.args[1]
                x.append("{" + ", ".join(f"tl_{self.registers.array(a.buffer)}_{_word(a) + j}" for j in range(4)) + "}")
        for n, (base, letter) in enumerate(zip(bases, "ba" if len(bases) == 1 else "ab")):
            lines.append(f".reg .b64 {letter}<{len(calls)}>;")
            at = 2 if letter == "b" else 1
            high = ((base.options.sbo >> 4 & 0x3fff) | SWIZZLE_CODE[base.options.swizzle] << 30) << 32
            for k, (e, x) in enumerate(zip(calls, operands)):
                descriptor: Any = e.args[at]
                offset = descriptor.options.offset >> 4
                # For a pair moved into 64 bits, ptxas did not always see that it is uniform.
                lines += [f"add.s32 low, %{n}, {offset};", f"cvt.u64.u32 {letter}{k}, low;",
                          f"or.b64 {letter}{k}, {letter}{k}, 0x{high:x};"]
                x.append(f"{letter}{k}")
        registers = ", ".join(f"{target}_{_word(c) + i}" for i in range(row.c_registers))
        flags = _flags(row, form.group(3))
        lines += [f"{row.ptx} {{{registers}}}, {x[0]}, {x[1]}, {'q' if k else 'p'}{flags};" for k, x in enumerate(operands)]
        params = ", ".join(f"unsigned x{n}" for n in range(len(bases)))
        inputs = ", ".join(f'"r"(x{n})' for n in range(len(bases)))
        text = "\n".join(f'      "{line}\\n"' for line in [*lines, "}"])
        wanted = f"{self._function(calls[0])}_x{len(calls)}_{self.registers.array(c.buffer)}_{_word(c)}"
        name = self.registers.function(wanted, lambda name: (
            f"TL_DEVICE void {name}(bool keep, {params}) {{\n  asm volatile(\n{text}\n      :: {inputs}, "
            f'"r"((int)keep));\n}}\n'))
        return name, [[self.x.top(calls[0].args[3])], [f"(unsigned){self.x.top(b)}" for b in bases]]

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


def wgmma_function(name: str) -> str | None:
    """The definition of the function of one wgmma or of a run of them; None for other names.

    Accumulators c stay in registers once inlined; b is a descriptor, a is a descriptor or registers. keep false: the first
    wgmma ignores the old value of c.
    """
    m = _NAME.fullmatch(name)
    if m is None:
        return None
    shape, *types = m.group(1).split("_")[1:]
    row = WGMMA_ROWS.get(f"wgmma.{shape}.{'.'.join(types)}")
    if row is None:
        return None
    run = m.group(4)
    return _definition(name, row, m.group(2) == "rs", m.group(3), int(run or 1), run is not None)


def _flags(row: WgmmaRow, orders: str) -> str:
    """The text behind the predicate of an instruction: signs, and which operands are transposed."""
    if row.c_dtype.is_int:
        return ""
    transposed = [str(int(o == "m")) for o in orders] if row.a_dtype.bits == 16 else []
    return ", " + ", ".join(["1", "1", *transposed])


def _word(a: Any) -> int:
    """The register of an element of a register array."""
    return int(a.indices[0].value) * int(a.buffer.dtype.bits) // 32


def _definition(name: str, row: WgmmaRow, in_registers: bool, orders: str, count: int, run: bool,
                target: tuple[str, int] | None = None, sources: Sequence[tuple[str, int]] = ()) -> str:
    """The definition of a run. target, sources: (array, first register) of named accumulators and of each wgmma's named A."""
    ty, kind = ("float", "+f") if row.c_dtype == "float32" else ("unsigned", "+r")
    n = 0 if target else row.c_registers
    each = 1 if sources else 5 if in_registers else 2
    flags = _flags(row, orders)
    c = ", ".join(f"tl_{target[0]}_{target[1] + i}" for i in range(row.c_registers)) if target else \
        ", ".join(f"%{i}" for i in range(n))
    numbers = range(count) if run else [""]
    lines, inputs = [], []
    for i, number in enumerate(numbers):
        at = n + i * each
        if sources:
            array, first = sources[i]
            a = "{" + ", ".join(f"tl_{array}_{first + j}" for j in range(4)) + "}"
        else:
            a = "{" + ", ".join(f"%{at + j}" for j in range(4)) + "}" if in_registers else f"%{at}"
        lines.append(f'      "{row.ptx} {{{c}}}, {a}, %{at + each - 1}, {"q" if i else "p"}{flags};\\n"\n')
        if not sources:
            inputs += [f'"r"(A{number}[{j}])' for j in range(4)] if in_registers else [f'"l"(a{number})']
        inputs.append(f'"l"(b{number})')
    inputs.append('"r"((int)keep)')
    outputs = ", ".join(f'"{kind}"(C[{i}])' for i in range(n))
    a_type = f"const {TYPES[row.a_dtype.base]}*" if in_registers else "unsigned long long"
    operands = [f"unsigned long long b{k}" if sources else f"{a_type} a{k}, unsigned long long b{k}" for k in numbers]
    params = ", ".join(["bool keep", *operands] if run else [*operands, "bool keep"])
    registers = "".join(f"  const unsigned* A{k} = reinterpret_cast<const unsigned*>(a{k});\n" for k in numbers) \
        if in_registers and not sources else ""
    predicates = f".reg .pred p{', q' if count > 1 else ''};\\nsetp.ne.b32 p, %{n + count * each}, 0;\\n"
    if count > 1:
        predicates += "setp.eq.u32 q, 0, 0;\\n"
    c_param = "" if target else f"{TYPES[row.c_dtype.base]}* c, "
    c_array = "" if target else f"  {ty}* C = reinterpret_cast<{ty}*>(c);\n"
    return (f"TL_DEVICE void {name}({c_param}{params}) {{\n"
            f"{c_array}{registers}"
            f'  asm volatile("{{\\n{predicates}"\n{"".join(lines)}      "}}"\n'
            f"      : {outputs}\n      : {', '.join(inputs)});\n}}\n")
