"""CUDA text of loops that change every element of named registers by float operations."""

from __future__ import annotations

from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import Binary, Call, Expr, Load, Var, const, free_vars, substitute
from tilelang.target.register_forms import MAPPED, Form, own_element

from .expressions import Expressions
from .named_registers import NamedRegisters


class RegisterMaps:
    """Prints loops of the form "map"."""

    def __init__(self, x: Expressions, registers: NamedRegisters, fast_math: bool) -> None:
        self.x, self.registers, self._fast_math = x, registers, fast_math
        self._ftz = ".ftz.f32" if fast_math else ".f32"

    def print(self, form: Form) -> None:
        """Print the loop: the operands are the distinct values that do not depend on the element, the lines the operations on
        it."""
        array, b = self.registers.array(form.buffer), form.buffer
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
                text = self.x.top(substitute(e, {v: const(at[v], v.dtype) for v in varies[id(e)]}))
                known[key] = f"%{operands.setdefault(text, len(operands))}"
            return known[key]

        own: dict[int, bool] = {}

        def owns(e: Expr) -> bool:
            if id(e) not in own:
                own[id(e)] = own_element(e, b)
            return own[id(e)]

        def value(e: Expr, k: int, at: dict[Var, int], to: str, level: int) -> str:
            """The place of a value, computed into `to` when it is not available yet. level: number of temporaries in use."""
            nonlocal depth
            if isinstance(e, Load) and e.buffer.data is b.data:
                return f"tl_{array}_{k}"
            if not owns(e):
                return operand(e, at)
            depth = max(depth, level + 2)
            if isinstance(e, Binary):
                x = value(e.a, k, at, f"t{level}", level + 1)
                y = value(e.b, k, at, f"t{level + 1}", level + 2)
                lines.append(f"{MAPPED[e.op]}{self._ftz} {to}, {x}, {y};")
            else:
                assert isinstance(e, Call)
                if e.op == "exp2" and not self._fast_math:
                    raise InternalError("exp2 on named registers is the approximate one")
                lines.append(f"ex2.approx.ftz.f32 {to}, {value(e.args[0], k, at, f't{level}', level + 1)};")
            return to

        for k, at in form.points:
            if value(form.value, k, at, f"tl_{array}_{k}", 0) != f"tl_{array}_{k}":  # type: ignore[arg-type]
                raise InternalError("a map that is no operation")
        inputs = ", ".join(f'"f"(x{i})' for i in operands.values())
        text = "\\n".join(["{", f".reg .f32 t<{depth + 1}>;", *lines, "}"])
        self.registers.call(f"map_{array}", f"({', '.join(f'float x{i}' for i in operands.values())})",
                       f'asm volatile("{text}" :: {inputs});', ", ".join(operands))
