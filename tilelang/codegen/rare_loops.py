"""CUDA text of loops over registers of their own that run seldom: selections of a mask, results stored as they are.

target/register_forms.py says which they are (`rare_form`), transform/whole_registers.py which of them are printed so.  An array
would have to hold all the elements for them, and the compiler in front of the assembler to take it apart again: a quarter of
its work for full attention.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from tilelang.arith import Analyzer, Linear
from tilelang.arith.linear import emit
from tilelang.errors import InternalError
from tilelang.ir import (I32, Binary, Buffer, Const, Expr, For, Ramp, Select, Unary, Var, const, free_vars, int_range,
                         substitute)
from tilelang.target.register_forms import Form, affine_in, inlined

LOW, HIGH = int_range(I32)
_HOLDS: dict[str, Callable[[int], bool]] = {
    "lt": lambda x: x < 0, "le": lambda x: x <= 0, "gt": lambda x: x > 0, "ge": lambda x: x >= 0, "eq": lambda x: x == 0,
    "ne": lambda x: x != 0}


class RareLoops:
    """Part of CudaPrinter."""

    def selected(self: Any, form: Form) -> None:
        """Operands are what conditions compare, lines a test for each different one and a selection for each element."""
        array, v = self._own(form.buffer), form.value
        assert isinstance(v, Select)
        tests = Predicates(self.facts, set(form.points[0][1]), self.top, self.from_data)
        lines = []
        for k, at in form.points:
            holds, register = tests.holds(v.cond, at), f"tl_{array}_{k}"
            a, b = (_immediate(x) if isinstance(x, Const) else register for x in (v.a, v.b))
            if not isinstance(holds, bool):
                lines.append(f"selp.f32 {register}, {a}, {b}, {holds};")
            elif (a if holds else b) != register:
                lines.append(f"mov.f32 {register}, {a if holds else b};")
        if not lines:
            return
        params = ", ".join(f"int x{i}" for i in range(len(tests.operands)))
        operands = ", ".join(f'"r"(x{i})' for i in range(len(tests.operands)))
        text = "\\n".join(["{", *tests.declared(), *tests.lines, *lines, "}"])
        self._call_own(f"select_{array}", f"({params})", f'asm volatile("{text}" :: {operands});', ", ".join(tests.operands))

    def stored(self: Any, form: Form, s: For) -> None:
        """Operands are addresses: those of other points are as far from them as static strides say."""
        array, store = self._own(form.buffer), inlined(s)[1]
        assert store is not None
        to, lanes = store.buffer, store.value.dtype.lanes
        ty, vector = self.own_registers[array][0], f".v{lanes}" if lanes > 1 else ""
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
                args.append(self.address(to, tuple(self.facts.simplify(substitute(i, values)) for i in base)))
            place, start = first[key]
            names = ", ".join(f"tl_{array}_{k + i}" for i in range(lanes))
            lines.append(f"st.global{vector}.{ty} [{place}{f'{away - start:+}' if away != start else ''}], {{{names}}};")
        params = ", ".join(f"void* p{i}" for i in range(len(args)))
        operands = ", ".join(f'"l"(__cvta_generic_to_global(p{i}))' for i in range(len(args)))
        text = "\\n".join(lines)
        self._call_own(f"store_{array}", f"({params})", f'asm volatile("{text}" :: {operands} : "memory");', ", ".join(args))


def _strides(to: Buffer, base: tuple[Expr, ...], inside: set[Var]) -> list[tuple[Any, dict[Var, int]]]:
    """For each index that loops move: its stride in elements, and how far each of them moves it."""
    out = []
    for i, step in zip(base, to.strides):
        got = affine_in(i, inside)
        if got is None:
            raise InternalError("a loop marked for registers of their own has no form")
        if got[1]:
            out.append((step, got[1]))
    return out


def _immediate(x: Const) -> str:
    return "0f" + struct.pack(">f", float(x.value)).hex().upper()


def wrapped(k: int) -> int:
    """A number as an int32 holds it."""
    return (k - LOW) % 2**32 + LOW


class Predicates:
    """Conditions at points of loops as predicates in PTX, each different one once.

    lines: what computes them; operands: texts of the integers %0, %1 …; inside: the loops' variables.
    """

    def __init__(self, facts: Analyzer, inside: set[Var], top: Callable[[Expr], str],
                 from_data: Callable[[Expr], bool]) -> None:
        self.facts, self.inside, self.top, self.from_data = facts, inside, top, from_data
        self.lines: list[str] = []
        self.operands: dict[str, int] = {}
        self.known: dict[tuple[Any, ...], str] = {}
        self.sums: dict[tuple[str, int], str] = {}
        self.forms: dict[int, tuple[Any, ...]] = {}

    def declared(self) -> list[str]:
        """Declarations of what the lines name."""
        return [f".reg .{ty} {name}<{len(of)}>;" for ty, name, of in (("pred", "p", self.known), ("s32", "n", self.sums)) if of]

    def holds(self, e: Expr, at: Mapping[Var, int]) -> bool | str:
        """The predicate of a condition at a point, or what it is known to be."""
        if isinstance(e, Const):
            return bool(e.value)
        if id(e) not in self.forms:
            self.forms[id(e)] = (e, not self.inside & set(free_vars(e)), self._compared(e))
        _, alike, compared = self.forms[id(e)]
        if alike:
            text = self._operand(f"(int)({self.top(e)})")
            return self._predicate(("is", text), f"setp.ne.s32 {{}}, {text}, 0;")
        if isinstance(e, Unary):
            a = self.holds(e.a, at)
            return not a if isinstance(a, bool) else self._predicate(("not", a), f"not.pred {{}}, {a};")
        assert isinstance(e, Binary)
        if e.op in ("and", "or"):
            return self._both(e, at)
        return self._compare(e, compared, at)

    def _both(self, e: Binary, at: Mapping[Var, int]) -> bool | str:
        absorbs = e.op == "or"
        a = self.holds(e.a, at)
        if a is absorbs:
            return a
        b = self.holds(e.b, at)
        if b is absorbs or isinstance(a, bool):
            return b
        if isinstance(b, bool):
            return a
        return self._predicate((e.op, a, b), f"{e.op}.pred {{}}, {a}, {b};")

    def _compared(self, e: Expr) -> tuple[Any, ...]:
        """Of a comparison: for its difference and both of its sides (what loops do not move, constant, how they move it)."""
        sides = [affine_in(x, self.inside) for x in (e.a, e.b)] if isinstance(e, Binary) and e.op in _HOLDS else [None]
        if None in sides:
            return ()
        (a, by_a), (b, by_b) = sides  # type: ignore[misc]
        by = {v: by_a.get(v, 0) - by_b.get(v, 0) for v in {**by_a, **by_b}}
        return tuple((Linear(x.terms, 0), emit(Linear(x.terms, 0), e.a.dtype), x.const, moved)  # type: ignore[attr-defined]
                     for x, moved in ((a.plus(b, -1), by), (a, by_a), (b, by_b)))

    def _compare(self, e: Binary, compared: tuple[Any, ...], at: Mapping[Var, int]) -> bool | str:
        """Where the sides' difference surely fits, one limit for what loops do not move: rows and columns share it."""
        (fixed, rest, *_), *sides = compared
        moved, *apart = [start + sum(k * at[v] for v, k in by.items()) for _, _, start, by in compared]
        dt = e.a.dtype
        if LOW <= -moved <= HIGH and self.facts.exact(fixed, dt) and self.facts.exact(Linear(fixed.terms, moved), dt) and \
                not self.from_data(e.a) and not self.from_data(e.b):
            low, high = self.facts.bounds_of(fixed)
            ends = {_HOLDS[e.op](x + moved) for x in (low, high)} if low is not None and high is not None else set()
            if len(ends) == 1 and (low == high or e.op not in ("eq", "ne")):
                return ends.pop()
            place = self._operand(self.top(rest))
            return self._predicate((e.op, place, -moved), f"setp.{e.op}.s32 {{}}, {place}, {-moved};")
        a, b = (self._sum(self.top(text), wrapped(k)) for (_, text, *_), k in zip(sides, apart))
        return self._predicate((e.op, a, b), f"setp.{e.op}.s32 {{}}, {a}, {b};")

    def _sum(self, text: str, k: int) -> str:
        place = self._operand(text)
        if k and (place, k) not in self.sums:
            self.sums[place, k] = f"n{len(self.sums)}"
            self.lines.append(f"add.s32 {self.sums[place, k]}, {place}, {k};")
        return self.sums[place, k] if k else place

    def _operand(self, text: str) -> str:
        return f"%{self.operands.setdefault(text, len(self.operands))}"

    def _predicate(self, key: tuple[Any, ...], line: str) -> str:
        if key not in self.known:
            self.known[key] = f"p{len(self.known)}"
            self.lines.append(line.format(self.known[key]))
        return self.known[key]


__all__ = ["Predicates", "RareLoops"]
