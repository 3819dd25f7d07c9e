"""CUDA text of registers that only products and loops with a form name: declarations, moves, loops.

transform/registers/accumulator_registers.py says which they are, target/register_forms.py what the loops are.  The
registers are declared
at the start of the kernel: functions that name them are always inlined there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import (Binary, Buffer, Call, Expr, For, Load, Stmt, Store, Var, const, dtype,
                         free_vars, stmts_of, substitute)
from tilelang.target.register_forms import MAPPED, SUMMED, Form, constant, form_of, own_element, packed_source, sum_form

from ..c_like import POSTFIX, Text
from .stored_results import StoredResults



class OwnRegisters(StoredResults):
    """Part of CudaPrinter.  own_names: by storage; own_registers: PTX type and number by name; own_functions: definitions that
    name them."""

    own_names: dict[Var, str]
    own_registers: dict[str, tuple[str, int]]
    own_functions: dict[str, str]

    def _own(self: Any, b: Buffer) -> str:
        """The common part of the names of a buffer's registers, which the kernel declares: no other buffer has it."""
        name: str | None = self.own_names.get(b.data)
        if name is None:
            name = base = self.namer(b.data, b.name)
            while name in self.own_registers:
                name = f"{base}_v{len(self.own_registers)}"
            self.own_names[b.data] = name
            self.own_registers[name] = (register_type(b.dtype), b.size * b.dtype.bits // 32)
        return name

    def _call_wgmma_pin(self: Any, e: Call) -> Text:
        way = e.options.move
        if way is None:
            return f"tl::wgmma_pin<{e.options.count}>({self.top(e.args[0])})", POSTFIX
        pinned: Any = e.args[0]
        array = self._own(pinned.buffer)
        ty, count = self.own_registers[array]
        name = self.own_function(f"registers_{way}_{array}", lambda name: move_function(name, array, ty, count, way == "in"))
        return f"tl::{name}({self.top(e.args[0])})", POSTFIX

    def on_registers(self: Any, s: For) -> None:
        """A loop with the attr `registers`."""
        form = form_of(s)
        if form is None:
            raise InternalError("a loop marked for registers of their own has no form")
        first = s
        while isinstance(first, For):
            first = first.body  # type: ignore[assignment]
        self.source_comment(next(iter(stmts_of(first) or (first,))).span)
        if form.kind == "read":
            self._read(s, form)
        elif form.kind == "halves":
            self._halves(form, s.plan.registers == "source")
        elif form.kind == "map":
            self._mapped(form)
        elif form.kind == "sum":
            self._summed(form, s)
        elif form.kind == "sums":
            self._sums(s)
        elif form.kind == "store":
            self.stored(form, s)
        else:
            self._values(form)

    def _values(self: Any, form: Form) -> None:
        """fill and scale: operands are the different values, elements the lines."""
        array = self._own(form.buffer)
        ty, _ = self.own_registers[array]
        op = f"mov.{ty}" if form.kind == "fill" else f"mul{self._f32()}"
        values: dict[str, int] = {}
        texts = {id(x): self.top(x) for x in {id(x): x for _, x in form.points}.values()}
        lines = []
        for k, x in form.points:
            at = values.setdefault(texts[id(x)], len(values))
            register = f"tl_{array}_{k}"
            lines.append(f"{op} {register}, {'' if form.kind == 'fill' else register + ', '}%{at};")
        c_type, letter = ("float", "f") if ty == "f32" else ("int", "r")
        operands = ", ".join(f'"{letter}"(x{i})' for i in range(len(values)))
        params = ", ".join(f"{c_type} x{i}" for i in range(len(values)))
        self._call_own(f"{form.kind}_{array}", f"({params})", f'asm volatile("{_joined(lines)}" :: {operands});',
                       ", ".join(values))

    def _halves(self: Any, form: Form, own_source: bool) -> None:
        """own_source: the floats are in registers of their own too."""
        array, source = self._own(form.buffer), form.points[0][1]
        read = sorted({j for _, _, a, b in form.points for j in (a, b)})
        if own_source:
            floats = self._own(source)
            at = {j: f"tl_{floats}_{j}" for j in read}
        else:
            at = {j: f"%{i}" for i, j in enumerate(read)}
        cvt = _cvt(form.buffer.dtype.base)
        lines = [f"{cvt} tl_{array}_{w}, {at[b]}, {at[a]};" for w, _, a, b in form.points]
        operands = "" if own_source else ", ".join(f'"f"(x[{j}])' for j in read)
        name = self.namer(source.data, source.name)
        self._call_own(f"halves_{array}", f"({'' if own_source else 'const float* x'})",
                       f'asm volatile("{_joined(lines)}" :: {operands});', "" if own_source else f"&{name}[0]")

    def _read(self: Any, s: For, form: Form) -> None:
        array = self._own(form.buffer)
        for k in self._turns(s):
            for x in stmts_of(s.body):
                floats = packed_source(x) if isinstance(x, Store) else None
                if floats is None:
                    self.stmt(x)
                    continue
                first = constant(floats.indices[0].base, {s.var: k})  # type: ignore[attr-defined]
                if first is None:
                    raise InternalError("a loop marked for registers of their own has no form")
                self._packed(x, array, first)

    def _sums(self: Any, s: For) -> None:
        first = int(s.plan.maxima_first)
        found: list[tuple[str, list[str]]] = []
        for k in self._turns(s):
            for x in stmts_of(s.body)[:first or None]:
                form = sum_form(x, {s.var: k}) if isinstance(x, For) else None
                if form is None:
                    self.stmt(x)
                elif first:
                    found.append(self._maximum(form))
                else:
                    self._summed(form, x)
        if first:
            self._maxima(form_of(s), found)
            for _ in self._turns(s):
                for x in stmts_of(s.body)[first:]:
                    self.stmt(x)

    def _turns(self: Any, s: For) -> Iterator[int]:
        """The values of a loop's variable: what is printed for each stands in a scope where it is a constant."""
        for k in range(int(s.extent.value)):  # type: ignore[attr-defined]
            self.emit("{")
            self.depth += 1
            self.namer.open_scope()
            self.emit(f"const {self.type_name(s.var.dtype)} {self.namer(s.var, s.var.name)} = {k};")
            self.facts = self.facts.bind(s.var, k, k)
            yield k
            self.namer.close_scope()
            self.depth -= 1
            self.emit("}")

    def _summed(self: Any, form: Form, s: Stmt) -> None:
        """Operands are the different elements added to.  Where any order will do, each is summed up in two halves side by
        side: an operation waits four cycles for the one before it."""
        array, v, two_chains = self._own(form.buffer), form.value, s.plan.reduction == "two_chains"  # type: ignore[attr-defined]
        if s.plan.reduction == "integer":  # type: ignore[attr-defined]
            self._maxima(form, [self._maximum(form)])
            return
        while isinstance(s, For):
            s = s.body
        assert isinstance(v, Binary) and isinstance(s, Store)
        op = SUMMED[v.op] + self._f32()
        at = {i: n for n, i in enumerate(dict.fromkeys(i for i, _ in form.points))}
        lines = [f"{op} %{at[i]}, %{at[i]}, tl_{array}_{k};" for i, k in form.points]
        if two_chains:
            lines = _in_halves(op, [(at[i], f"tl_{array}_{k}") for i, k in form.points])
        params = ", ".join(f"float& x{n}" for n in at.values())
        operands = ", ".join(f'"+f"(x{n})' for n in at.values())
        name = self.namer(s.buffer.data, s.buffer.name)
        self._call_own(f"{v.op}_{array}_{form.points[0][1]}", f"({params})", f'asm volatile("{_joined(lines)}" : {operands});',
                       ", ".join(f"{name}[{i}]" for i in at))

    def _maximum(self: Any, form: Form) -> tuple[str, list[str]]:
        """(what is raised, the registers it is raised to the largest of)."""
        to, array = form.value.a.buffer, self._own(form.buffer)  # type: ignore[union-attr]
        return f"{self.namer(to.data, to.name)}[{form.points[0][0]}]", [f"tl_{array}_{k}" for _, k in form.points]

    def _maxima(self: Any, form: Form, found: list[tuple[str, list[str]]]) -> None:
        op = SUMMED["max"] + self._f32()
        body = largest_of_threes([names for _, names in found], lambda points: _in_halves(op, points))
        places = f"_{found[0][1][0].rpartition('_')[2]}" if len(found) == 1 else ""
        params = ", ".join(f"float& x{i}" for i in range(len(found)))
        self._call_own(f"max_{self._own(form.buffer)}{places}", f"({params})", body, ", ".join(to for to, _ in found))

    def _mapped(self: Any, form: Form) -> None:
        """Operands are the different values that do not name the element, lines the operations on it, element by element."""
        array, b = self._own(form.buffer), form.buffer
        operands: dict[str, int] = {}
        depth = 0
        lines: list[str] = []

        known: dict[tuple[Any, ...], str] = {}
        varies: dict[int, list[Var]] = {}

        def operand(e: Expr, at: dict[Var, int]) -> str:
            if id(e) not in varies:
                varies[id(e)] = [v for v in free_vars(e) if v in at]
            key = (id(e), *(at[v] for v in varies[id(e)]))
            if key not in known:
                text = self.top(substitute(e, {v: const(at[v], v.dtype) for v in varies[id(e)]}))
                known[key] = f"%{operands.setdefault(text, len(operands))}"
            return known[key]

        own: dict[int, bool] = {}

        def owns(e: Expr) -> bool:
            if id(e) not in own:
                own[id(e)] = own_element(e, b)
            return own[id(e)]

        def value(e: Expr, k: int, at: dict[Var, int], to: str, level: int) -> str:
            """Where a value is, computed into `to` when it is not there yet; level: temporaries in use."""
            nonlocal depth
            if isinstance(e, Load) and e.buffer.data is b.data:
                return f"tl_{array}_{k}"
            if not owns(e):
                return operand(e, at)
            depth = max(depth, level + 2)
            if isinstance(e, Binary):
                x = value(e.a, k, at, f"t{level}", level + 1)
                y = value(e.b, k, at, f"t{level + 1}", level + 2)
                lines.append(f"{MAPPED[e.op]}{self._f32()} {to}, {x}, {y};")
            else:
                assert isinstance(e, Call)
                if not self.fast_math:
                    raise InternalError("exp2 on registers of their own is the approximate one")
                lines.append(f"ex2.approx.ftz.f32 {to}, {value(e.args[0], k, at, f't{level}', level + 1)};")
            return to

        for k, at in form.points:
            if value(form.value, k, at, f"tl_{array}_{k}", 0) != f"tl_{array}_{k}":  # type: ignore[arg-type]
                raise InternalError("a map that is no operation")
        inputs = ", ".join(f'"f"(x{i})' for i in operands.values())
        text = "\\n".join(["{", f".reg .f32 t<{depth + 1}>;", *lines, "}"])
        self._call_own(f"map_{array}", f"({', '.join(f'float x{i}' for i in operands.values())})",
                       f'asm volatile("{text}" :: {inputs});', ", ".join(operands))

    def _f32(self: Any) -> str:
        return ".ftz.f32" if self.fast_math else ".f32"

    def _packed(self: Any, s: Store, array: str, first: int) -> None:
        dt = s.value.dtype
        words, cvt = dt.lanes // 2, _cvt(dt.base)
        lines = [f"{cvt} %{w}, tl_{array}_{first + 2 * w + 1}, tl_{array}_{first + 2 * w};" for w in range(words)]
        operands = ", ".join(f'"=r"(to[{w}])' for w in range(words))
        place = self.address(s.buffer, (s.indices[0].base,))  # type: ignore[attr-defined]
        self._call_own(f"pack_{array}_{first}", "(void* p)", "unsigned* to = reinterpret_cast<unsigned*>(p); "
                       f'asm volatile("{_joined(lines)}" : {operands});', place)

    def _call_own(self: Any, name: str, params: str, body: str, args: str) -> None:
        full = self.own_function(name, lambda full: f"TL_DEVICE void {full}{params} {{ {body} }}\n")
        self.emit(f"tl::{full}({args});")

    def own_function(self: Any, name: str, text: Callable[[str], str]) -> str:
        """The name under which a function is defined: another one when a function with another text has it."""
        k, full = 0, name
        while self.own_functions.setdefault(full, text(full)) != text(full):
            k += 1
            full = f"{name}_v{k}"
        return full


def register_type(dt: dtype) -> str:
    """PTX type of the registers of an array's elements."""
    return "f32" if dt == "float32" else "b32"


def declared_registers(own: Mapping[str, tuple[str, int]]) -> str | None:
    """The statement that declares registers by name: (PTX type, how many); None without any."""
    lines = "\\n".join(f".reg .{ty} tl_{name}_<{n}>;" for name, (ty, n) in own.items())
    return f'asm volatile("{lines}");' if own else None


def move_function(name: str, array: str, ty: str, count: int, into: bool) -> str:
    """Definition of a function that moves a register array into the registers named after it, or out of them."""
    c_type, kind = ("float", "f") if ty == "f32" else ("unsigned", "r")
    pairs = [(f"tl_{array}_{i}", f"%{i}") for i in range(count)]
    moves = "".join(f"mov.{ty} {to}, {of};\\n" for to, of in (pairs if into else [p[::-1] for p in pairs]))
    operands = ", ".join(f'"{"" if into else "="}{kind}"(C[{i}])' for i in range(count))
    return (f"TL_DEVICE void {name}({'const ' if into else ''}void* c) {{\n"
            f"  {'const ' if into else ''}{c_type}* C = reinterpret_cast<{'const ' if into else ''}{c_type}*>(c);\n"
            f'  asm volatile("{moves}" :{":" if into else ""} {operands});\n}}\n')


def _in_halves(op: str, points: list[tuple[int, str]]) -> list[str]:
    """Lines that combine each register into its operand, those at odd places of an operand by way of a temporary."""
    lines, seen = [], dict.fromkeys((n for n, _ in points), 0)
    for n, register in points:
        k = seen[n]
        seen[n] += 1
        lines.append(f"mov.f32 u{n}, {register};" if k == 1 else
                     f"{op} u{n}, u{n}, {register};" if k % 2 else f"{op} %{n}, %{n}, {register};")
    both = [f"{op} %{n}, %{n}, u{n};" for n, k in seen.items() if k > 1]
    return ["{", f".reg .f32 u<{len(seen)}>;", *lines, *both, "}"]


def largest_of_threes(rows: list[list[str]], in_floats: Callable[[list[tuple[int, str]]], list[str]]) -> str:
    """Statements that raise each float x0, x1, … to the largest of its registers, as integers: one instruction is the maximum
    of three of them, but of two floats.

    Floats without a sign are ordered as integers are, above those with one.  So a result is wrong only where every float has a
    sign, which it has then itself, or where one is NaN, which is above infinity: both are more than infinity as unsigned
    numbers.  A warp in which that is seen does it `in_floats`: lines that raise operands of these numbers to registers.
    What is marked any_order is done by whole warps.  (Written as two branches, it made ptxas take descriptors out of uniform
    registers.)
    """
    text = [f"int m{i}; asm volatile(\"{_joined(_threes(names))}\" : \"=&r\"(m{i}) : \"f\"(x{i}));"
            for i, names in enumerate(rows)]
    odd = " || ".join(f"(unsigned)m{i} > 0x7f800000u" for i in range(len(rows)))
    again = " ".join(f"x{i} = before{i};" for i in range(len(rows)))
    operands = ", ".join(f'"+f"(x{i})' for i in range(len(rows)))
    lines = in_floats([(i, x) for i, names in enumerate(rows) for x in names])
    return " ".join([*text, *(f"const float before{i} = x{i}; x{i} = __int_as_float(m{i});" for i in range(len(rows))),
                     f"if (__any_sync(0xffffffffu, {odd})) {{ {again} asm volatile(\"{_joined(lines)}\" : {operands}); }}"])


def _threes(registers: list[str]) -> list[str]:
    """Lines that make %0 the largest of %1 and of these registers, as integers, in two chains."""
    half = len(registers) // 4 * 2  # a chain takes them by twos
    first, second = registers[:half], registers[half:]
    lines = ["{", ".reg .s32 u, e;", "mov.b32 %0, %1;", f"mov.b32 u, {second[0]};"]
    for pair in itertools.zip_longest(*(_by_twos(x) for x in (first, second[1:])), fillvalue=()):
        for to, names in zip(("%0", "u"), pair):
            lines += [line for x in names for line in (f"mov.b32 e, {x};", f"max.s32 {to}, {to}, e;")]
    return [*lines, "max.s32 %0, %0, u;", "}"]


def _by_twos(names: list[str]) -> list[list[str]]:
    return [names[i:i + 2] for i in range(0, len(names), 2)]


def _cvt(base: str) -> str:
    return f"cvt.rn.{'f16x2' if base == 'float16' else 'bf16x2'}.f32"


def _joined(lines: list[str]) -> str:
    return "\\n".join(lines)


__all__ = ["OwnRegisters", "declared_registers", "largest_of_threes", "move_function", "register_type"]
