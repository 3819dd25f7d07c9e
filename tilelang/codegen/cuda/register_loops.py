"""CUDA text of loops on named registers: one `asm` each, with the instructions of the form that target/register_forms.py finds.

Passes decide which loops these are (plan.registers). An array of the elements of stored registers would take NVRTC a quarter of
its time for full attention: it would have to split it up again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilelang.errors import InternalError
from tilelang.ir import (Binary, Buffer, Call, Cast, Expr, For, Load, Ramp, Stmt, Store, Var, const, free_vars, stmts_of,
                         substitute, walk)
from tilelang.target.register_forms import (
    MAPPED,
    SUMMED,
    Form,
    affine_in,
    below_zero,
    constant,
    form_of,
    inlined,
    is_absolute,
    own_element,
    packed_source,
    sum_form,
    sum_order,
)

from ..device.memory import Memory
from ..device.types import type_name
from .named_registers import NamedRegisters


class RegisterLoops:
    """Prints loops with plan.registers. stmt: prints the other statements in them."""

    def __init__(self, memory: Memory, registers: NamedRegisters, fast_math: bool, stmt: Callable[[Stmt], None]) -> None:
        self.x, self.page, self.memory, self.registers = memory.x, memory.page, memory, registers
        self.ftz, self._fast_math, self._stmt = ".ftz.f32" if fast_math else ".f32", fast_math, stmt

    def print(self, s: For) -> None:
        """Print a loop with the attr `registers`."""
        form = form_of(s)
        if form is None:
            raise InternalError("a loop marked for named registers has no form")
        first = s
        while isinstance(first, For):
            first = first.body  # type: ignore[assignment]
        self.page.comment(next(iter(stmts_of(first) or (first,))).span)
        {"fill": self._values, "scale": self._values, "halves": self._halves, "read": self._read, "map": self._map,
         "sum": self._summed, "sums": self._sum_nest, "store": self._store}[form.kind](form, s)

    def _store(self, form: Form, s: For) -> None:
        """Print stores: the operands are addresses; other addresses follow from them by static strides."""
        array, store = self.registers.array(form.buffer), inlined(s)[1]
        assert store is not None
        to, lanes = store.buffer, store.value.dtype.lanes
        ty, vector = self.registers.type_of(array), f".v{lanes}" if lanes > 1 else ""
        base = tuple(i.base if isinstance(i, Ramp) else i for i in store.indices)
        moves = _strides(to, base, set(form.points[0][1]))
        first: dict[tuple[int, ...], tuple[str, int]] = {}
        args: list[str] = []
        lines = []
        for k, at in form.points:
            moved = [(step, sum(n * at[v] for v, n in by.items())) for step, by in moves]
            away = sum(n * step for step, n in moved if isinstance(step, int)) * to.dtype.bits // 8
            key = tuple(n for step, n in moved if not isinstance(step, int))
            if key not in first:
                first[key] = f"%{len(args)}", away
                values = {v: const(n, v.dtype) for v, n in at.items()}
                args.append(self.memory.address(to, tuple(self.x.facts.analyzer.simplify(substitute(i, values)) for i in base)))
            place, start = first[key]
            names = ", ".join(f"tl_{array}_{k + i}" for i in range(lanes))
            lines.append(f"st.global{vector}.{ty} [{place}{f'{away - start:+}' if away != start else ''}], {{{names}}};")
        params = ", ".join(f"void* p{i}" for i in range(len(args)))
        operands = ", ".join(f'"l"(__cvta_generic_to_global(p{i}))' for i in range(len(args)))
        text = "\\n".join(lines)
        body = f'asm volatile("{text}" :: {operands} : "memory");'
        self.registers.call(f"store_{array}", f"({params})", body, ", ".join(args))

    def _map(self, form: Form, s: For) -> None:
        """Print operations on each element: the operands are the distinct values that do not depend on it."""
        array, b = self.registers.array(form.buffer), form.buffer
        operands: dict[str, int] = {}
        known: dict[tuple[Any, ...], str] = {}
        depth = 0
        lines: list[str] = []
        varies = _cached(lambda e: [v for v in free_vars(e) if v in form.points[0][1]])
        owns = _cached(lambda e: own_element(e, b))
        numbered = _cached(lambda e: any(varies(x) for x in walk(e, Cast)))  # it has numbers of iterations
        made: dict[str, str] = {}

        def operand(e: Expr, at: dict[Var, int]) -> str:
            """The place of a value without the element; what differs by numbers of iterations is computed here, once."""
            key = (id(e), *(at[v] for v in varies(e)))
            if key not in known and numbered(e):
                if isinstance(e, Cast):
                    known[key] = f"0f{np.float32(constant(e.value, at)).view(np.uint32):08X}"
                else:
                    args = ", ".join(operand(x, at) for x in (e.args if isinstance(e, Call) else (e.a, e.b)))  # type: ignore[attr-defined]
                    text = f"{MAPPED[e.op]}{self.ftz} {{}}, {args};"  # type: ignore[attr-defined]
                    if text not in made:
                        made[text] = f"s{len(made)}"
                        lines.append(text.format(made[text]))
                    known[key] = made[text]
            elif key not in known:
                text = self.x.top(substitute(e, {v: const(at[v], v.dtype) for v in varies(e)}))
                known[key] = f"%{operands.setdefault(text, len(operands))}"
            return known[key]

        def value(e: Expr, k: int, at: dict[Var, int], to: str, level: int, added: bool = False) -> str:
            """The place of a value, computed into `to` when it is not available yet. level: number of temporaries in use.

            added: a sum has it, with which a multiplication is one instruction."""
            nonlocal depth
            if isinstance(e, Load) and e.buffer.data is b.data:
                return f"tl_{array}_{k}"
            if not owns(e) and not (added and numbered(e) and isinstance(e, Binary) and e.op == "mul"):
                return operand(e, at)
            depth = max(depth, level + 2)
            if isinstance(e, Binary):
                adds = e.op in ("add", "sub")
                x = value(e.a, k, at, f"t{level}", level + 1, adds)
                y = value(e.b, k, at, f"t{level + 1}", level + 2, adds)
                lines.append(f"{MAPPED[e.op]}{self.ftz} {to}, {x}, {y};")
            else:
                assert isinstance(e, Call)
                if e.op == "exp2" and not self._fast_math:
                    raise InternalError("exp2 on named registers is the approximate one")
                op = f"abs{self.ftz}" if e.op == "fabs" else "ex2.approx.ftz.f32"
                lines.append(f"{op} {to}, {value(e.args[0], k, at, f't{level}', level + 1)};")
            return to

        for k, at in form.points:
            if value(form.value, k, at, f"tl_{array}_{k}", 0) != f"tl_{array}_{k}":  # type: ignore[arg-type]
                raise InternalError("a map that is no operation")
        inputs = ", ".join(f'"f"(x{i})' for i in operands.values())
        shared = [f".reg .f32 s<{len(made)}>;"] if made else []
        text = "\\n".join(["{", f".reg .f32 t<{depth + 1}>;", *shared, *lines, "}"])
        self.registers.call(f"map_{array}", f"({', '.join(f'float x{i}' for i in operands.values())})",
                       f'asm volatile("{text}" :: {inputs});', ", ".join(operands))

    def _values(self, form: Form, s: For) -> None:
        """Print fill and scale: the operands are the distinct values, and there is one line for each element."""
        array = self.registers.array(form.buffer)
        ty = self.registers.type_of(array)
        op = f"mov.{ty}" if form.kind == "fill" else f"mul{self.ftz}"
        values: dict[str, int] = {}
        texts = {id(x): self.x.top(x) for x in {id(x): x for _, x in form.points}.values()}
        lines = []
        for k, x in form.points:
            at = values.setdefault(texts[id(x)], len(values))
            register = f"tl_{array}_{k}"
            lines.append(f"{op} {register}, {'' if form.kind == 'fill' else register + ', '}%{at};")
        c_type, letter = ("float", "f") if ty == "f32" else ("int", "r")
        operands = ", ".join(f'"{letter}"(x{i})' for i in range(len(values)))
        params = ", ".join(f"{c_type} x{i}" for i in range(len(values)))
        self.registers.call(f"{form.kind}_{array}", f"({params})", f'asm volatile("{_joined(lines)}" :: {operands});',
                       ", ".join(values))

    def _halves(self, form: Form, s: For) -> None:
        """Print conversions to 16 bits: of named registers, into named registers, or of one into the other."""
        source, named = form.points[0][1], s.plan.registers
        own = f"tl_{self.registers.array(form.buffer)}_" if named != "read" else "%"
        words = sorted({w for w, *_ in form.points}) if named == "read" else []
        read = sorted({j for _, _, a, b in form.points for j in (a, b)})
        if named in ("source", "read"):
            floats = self.registers.array(source)
            at = {j: f"tl_{floats}_{j}" for j in read}
        else:
            at = {j: f"%{i}" for i, j in enumerate(read)}
        cvt = _cvt(form.buffer.dtype.base)
        lines = [f"{cvt} {own}{words.index(w) if words else w}, {at[b]}, {at[a]};" for w, _, a, b in form.points]
        outputs, name = ", ".join(f'"=r"(to[{w}])' for w in words), self.page.name(form.buffer.data, form.buffer.name)
        if words:
            self.registers.call(f"halves_{name}", "(void* p)", "unsigned* to = reinterpret_cast<unsigned*>(p); "
                                f'asm volatile("{_joined(lines)}" : {outputs});', f"&{name}[0]")
            return
        operands = "" if named == "source" else ", ".join(f'"f"(x[{j}])' for j in read)
        given = self.page.name(source.data, source.name)
        self.registers.call(f"halves_{self.registers.array(form.buffer)}", f"({'' if named == 'source' else 'const float* x'})",
                            f'asm volatile("{_joined(lines)}" :: {operands});', "" if named == "source" else f"&{given}[0]")

    def _read(self, form: Form, s: For) -> None:
        array = self.registers.array(form.buffer)
        for k in self._iterations(s):
            for x in stmts_of(s.body):
                floats = packed_source(x) if isinstance(x, Store) else None
                if not isinstance(x, Store) or floats is None:
                    self._stmt(x)
                    continue
                first = constant(floats.indices[0].base, {s.var: k})  # type: ignore[attr-defined]
                if first is None:
                    raise InternalError("a loop marked for named registers has no form")
                self._packed(x, array, first)

    def _sum_nest(self, _: Form, s: For) -> None:
        for k in self._iterations(s):
            for x in stmts_of(s.body):
                inner = sum_form(x, {s.var: k}) if isinstance(x, For) else None
                if inner is None:
                    self._stmt(x)
                else:
                    self._summed(inner, x)

    def _iterations(self, s: For) -> Iterator[int]:
        """The values of a loop's variable. The text for each value stands in a scope where the variable is a constant."""
        for k in range(int(s.extent.value)):  # type: ignore[attr-defined]
            self.page.emit("{")
            with self.page.scope():
                self.page.emit(f"const {type_name(s.var.dtype)} {self.page.name(s.var, s.var.name)} = {k};")
                self.x.facts.set_value(s.var, k)
                yield k
            self.page.emit("}")

    def _summed(self, form: Form, s: Stmt) -> None:
        """Print a sum: the operands are the distinct elements added to; sum_order gives the order."""
        array, v, order = self.registers.array(form.buffer), form.value, sum_order(form, s)
        if order in ("integer", "below"):
            self._maximum(form)
            return
        while isinstance(s, For):
            s = s.body
        assert isinstance(v, Binary) and isinstance(s, Store)
        op = SUMMED[v.op] + self.ftz
        at = {i: n for n, i in enumerate(dict.fromkeys(i for i, _ in form.points))}
        lines = [f"{op} %{at[i]}, %{at[i]}, tl_{array}_{k};" for i, k in form.points]
        if is_absolute(v.b):
            terms = [(f"abs{self.ftz} t, tl_{array}_{k};", f"{op} %{at[i]}, %{at[i]}, t;") for i, k in form.points]
            lines = ["{", ".reg .f32 t;", *itertools.chain(*terms), "}"]
        if order == "two_chains":
            lines = _in_halves(op, [(at[i], f"tl_{array}_{k}") for i, k in form.points])
        params = ", ".join(f"float& x{n}" for n in at.values())
        operands = ", ".join(f'"+f"(x{n})' for n in at.values())
        name = self.page.name(s.buffer.data, s.buffer.name)
        body = f'asm volatile("{_joined(lines)}" : {operands});'
        self.registers.call(f"{v.op}_{array}_{form.points[0][1]}", f"({params})", body, ", ".join(f"{name}[{i}]" for i in at))

    def _maximum(self, form: Form) -> None:
        to, array, op = form.value.a.buffer, self.registers.array(form.buffer), SUMMED["max"] + self.ftz  # type: ignore[union-attr]
        rows: dict[int, list[str]] = {}
        for i, k in form.points:
            rows.setdefault(i, []).append(f"tl_{array}_{k}")
        names, below = list(rows.values()), below_zero(form.value.b) is not None  # type: ignore[union-attr]
        body = farthest_below_zero(names) if below else largest_of_threes(names, lambda points: _in_halves(op, points))
        name, params = self.page.name(to.data, to.name), ", ".join(f"float& x{n}" for n in range(len(rows)))
        self.registers.call(f"{'below' if below else 'max'}_{array}_{form.points[0][1]}", f"({params})", body,
                            ", ".join(f"{name}[{i}]" for i in rows))

    def _packed(self, s: Store, array: str, first: int) -> None:
        dt = s.value.dtype
        words, cvt = dt.lanes // 2, _cvt(dt.base)
        lines = [f"{cvt} %{w}, tl_{array}_{first + 2 * w + 1}, tl_{array}_{first + 2 * w};" for w in range(words)]
        operands = ", ".join(f'"=r"(to[{w}])' for w in range(words))
        place = self.memory.address(s.buffer, (s.indices[0].base,))  # type: ignore[attr-defined]
        self.registers.call(f"pack_{array}_{first}", "(void* p)", "unsigned* to = reinterpret_cast<unsigned*>(p); "
                       f'asm volatile("{_joined(lines)}" : {operands});', place)


def _strides(to: Buffer, base: tuple[Expr, ...], inside: set[Var]) -> list[tuple[Any, dict[Var, int]]]:
    """For each index that loops change: its stride in elements, and how far each loop moves it."""
    out = []
    for i, step in zip(base, to.strides):
        got = affine_in(i, inside)
        if got is None:
            raise InternalError("a loop marked for named registers has no form")
        if got[1]:
            out.append((step, got[1]))
    return out


def _cached(fn: Callable[[Expr], Any]) -> Callable[[Expr], Any]:
    """A function of expressions whose results are kept by the identity of the node."""
    known: dict[int, Any] = {}

    def of(e: Expr) -> Any:
        if id(e) not in known:
            known[id(e)] = fn(e)
        return known[id(e)]

    return of


def _in_halves(op: str, points: list[tuple[int, str]]) -> list[str]:
    """The lines that combine each register into its operand; those at odd places of an operand go through a temporary."""
    lines, seen = [], dict.fromkeys((n for n, _ in points), 0)
    for n, register in points:
        k = seen[n]
        seen[n] += 1
        lines.append(f"mov.f32 u{n}, {register};" if k == 1 else
                     f"{op} u{n}, u{n}, {register};" if k % 2 else f"{op} %{n}, %{n}, {register};")
    both = [f"{op} %{n}, %{n}, u{n};" for n, k in seen.items() if k > 1]
    return ["{", f".reg .f32 u<{len(seen)}>;", *lines, *both, "}"]


def largest_of_threes(rows: list[list[str]], in_floats: Callable[[list[tuple[int, str]]], list[str]]) -> str:
    """Statements that set each float x0, x1, … to the maximum of itself and its registers, compared as integers.

    One instruction computes the maximum of three integers, but of only two floats. Floats without a sign bit are ordered like
    integers, above those with a sign bit. So a result is wrong only where every float has a sign bit, which the result then has
    too, or where one is NaN, which is above infinity: both are more than infinity as unsigned numbers. A warp that finds such a
    result takes the least unsigned number where all have a sign bit, and where one is NaN recomputes it `in_floats`: lines that
    combine operands of these numbers with registers. Lines marked any_order are executed by whole warps. (Written as two
    branches one after another, it made ptxas take descriptors out of uniform registers.)
    """
    def chosen(name: str, op: str) -> str:
        return " ".join(f"int {name}{i}; asm volatile(\"{_joined(_threes(names, op))}\" : \"=&r\"({name}{i}) : \"f\"({x}{i}));"
                        for i, names in enumerate(rows) for x in ("x" if name == "m" else "before",))

    def each(text: str, join: str = " ") -> str:
        return join.join(text.replace("#", str(i)) for i in range(len(rows)))

    operands = each('"+f"(x#)', ", ")
    lines = in_floats([(i, x) for i, names in enumerate(rows) for x in names])
    return " ".join([
        chosen("m", "max.s32"), each("const float before# = x#; x# = __int_as_float(m#);"),
        f"if (__any_sync(0xffffffffu, {each('(unsigned)m# > 0x7f800000u', ' || ')})) {{", chosen("n", "min.u32"),
        each("if (m# < 0) x# = __int_as_float(n#);"),
        f"if (__any_sync(0xffffffffu, {each('m# > 0x7f800000', ' || ')})) {{ {each('x# = before#;')}",
        f"asm volatile(\"{_joined(lines)}\" : {operands}); }} }}"])


def farthest_below_zero(rows: list[list[str]]) -> str:
    """Statements that set each float x0, x1, … to the maximum of itself, 0 and the negatives of its registers."""
    lines = [_joined(_threes(names, "max.u32")) for names in rows]
    return " ".join(f"int n{i}; asm volatile(\"{text}\" : \"=&r\"(n{i}) : \"f\"(-fmaxf(x{i}, 0.0f))); "
                    f"x{i} = __int_as_float(n{i} ^ 0x80000000);" for i, text in enumerate(lines))


def _threes(registers: list[str], op: str) -> list[str]:
    """The lines that set %0 to the maximum or minimum of %1 and these registers, as integers, in two chains."""
    half = len(registers) // 4 * 2  # a chain takes two at a time
    first, second = registers[:half], registers[half:]
    lines = ["{", ".reg .b32 u, e;", "mov.b32 %0, %1;", f"mov.b32 u, {second[0]};"]
    chains = ([x[i:i + 2] for i in range(0, len(x), 2)] for x in (first, second[1:]))
    for pair in itertools.zip_longest(*chains, fillvalue=()):
        for to, names in zip(("%0", "u"), pair):
            lines += [line for x in names for line in (f"mov.b32 e, {x};", f"{op} {to}, {to}, e;")]
    return [*lines, f"{op} %0, %0, u;", "}"]


def _cvt(base: str) -> str:
    return f"cvt.rn.{'f16x2' if base == 'float16' else 'bf16x2'}.f32"


def _joined(lines: list[str]) -> str:
    return "\\n".join(lines)
