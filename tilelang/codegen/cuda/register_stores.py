"""CUDA text of loops that store named registers directly.

target/register_forms.py finds these loops (`store_form`), and transform/registers/register_resident.py chooses which of them
are printed so. Otherwise an array would hold all the elements, which NVRTC would have to split up again: a quarter of its time
for full attention.
"""

from __future__ import annotations

from typing import Any

from tilelang.errors import InternalError
from tilelang.ir import Buffer, Expr, For, Ramp, Var, const, substitute
from tilelang.target.register_forms import Form, affine_in, inlined

from .memory import Memory
from .named_registers import NamedRegisters


class RegisterStores:
    """Prints loops of the form "store"."""

    def __init__(self, memory: Memory, registers: NamedRegisters) -> None:
        self.x, self.memory, self.registers = memory.x, memory, registers

    def print(self, form: Form, s: For) -> None:
        """Print the loop. The operands are addresses; other addresses follow from them by static strides."""
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
