"""Runs the code objects of a compiled TileLang program on the interpreter: what its host does at a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import isa_elf
import isa_machine
import numpy as np


def launch(lowered: Any, kernel: Any, values: Mapping[str, Any], order: int | None = None) -> int:
    """Run the host statements and their launches on arrays and numbers by parameter name, arrays in place.

    lowered: the lowered program, for its host, the order of the arguments and the sizes.  kernel: what tilelang.compile made of
    the same function, for the binaries.  Number of instructions.
    """
    programs = []
    for position, k in enumerate(lowered.kernels):
        objects = isa_elf.read(kernel._built.files["kernel.hsaco" if position == 0 else f"kernel_{position}.hsaco"])
        programs.append((k, isa_machine.Program(objects[k.name])))
    return Host(lowered, programs, values, order).run(lowered.host.body)


class Host:
    """The statements around the launches."""

    def __init__(self, lowered: Any, programs: list[tuple[Any, isa_machine.Program]], values: Mapping[str, Any],
                 order: int | None) -> None:
        self.programs, self.values, self.order = programs, values, order
        self.bound: dict[Any, Any] = {}
        self.arrays: dict[Any, np.ndarray] = {}
        tensors = dict(lowered.host.buffers)
        for p in lowered.host.params:
            if p in tensors:
                self._bind(tensors[p])
            else:
                self.bound[p] = values[p.name.removesuffix("_address")]  # an address: the array

    def _bind(self, buffer: Any) -> None:
        """The array of a tensor parameter, and the sizes and strides that it gives to variables."""
        from tilelang.ir import Var

        a = self.arrays[buffer.data] = self.values[buffer.name]
        strides = [s // a.itemsize for s in a.strides]
        for d, n in [*zip(buffer.shape, a.shape, strict=True), *zip(buffer.strides, strides, strict=False)]:
            if isinstance(d, Var):
                self.bound[d] = n

    def number(self, e: Any) -> int:
        from tilelang.ir import Expr
        from tilelang.ir.evaluate import evaluate

        return int(evaluate(e, self.bound)) if isinstance(e, Expr) else int(e)

    def run(self, s: Any) -> int:
        from tilelang import ir

        match s:
            case ir.Seq():
                return sum(self.run(x) for x in s.stmts)
            case ir.Bind():
                from tilelang.ir.evaluate import evaluate

                self.bound[s.var] = evaluate(s.value, self.bound)
            case ir.Alloc():
                size = s.buffer.dtype.bytes * int(np.prod([self.number(d) for d in s.buffer.shape]))
                self.arrays[s.buffer.data] = np.full(size, 0xA5, np.uint8)
            case ir.If():
                taken = s.then if self.number(s.cond) else s.orelse
                return self.run(taken) if taken is not None else 0
            case ir.For():
                return sum(self._once(s, self.number(s.start) + n) for n in range(self.number(s.extent)))
            case ir.Launch():
                return self.launch(*next(p for p in self.programs if p[0].name == s.plan.name))
            case ir.Assert() | ir.Evaluate():
                pass
            case _:
                raise NotImplementedError(type(s).__name__)
        return 0

    def _once(self, s: Any, at: int) -> int:
        self.bound[s.var] = at
        return self.run(s.body)

    def launch(self, k: Any, program: isa_machine.Program) -> int:
        assert not k.tensor_maps
        args = [self._argument(p) for p in k.params]
        for space in k.workspaces:
            size = space.dtype.bytes * int(np.prod([self.number(d) for d in space.shape]))
            args.append(np.full(size, 0 if space.facts.zeroed else 0xA5, np.uint8))
        grid = [self.number(n) for n in k.grid]
        resident = int(np.prod(grid)) if k.workspaces else 2  # blocks that wait for each other run together
        return program.run(grid, k.threads, args, lds=self.number(k.shared_bytes), order=self.order, resident=resident)

    def _argument(self, p: Any) -> Any:
        """A number, or the array behind a tensor (also behind a window on one)."""
        from tilelang.ir import Var

        if isinstance(p, Var) and not p.dtype.is_handle:
            value = self.bound[p]
            return value if isinstance(value, np.ndarray) else float(value) if str(p.dtype).startswith("float") else value
        key = p if isinstance(p, Var) else p.data
        a = self.arrays[key] if key in self.arrays else self.bound[key]
        return a if a.flags.c_contiguous or a.base is None else a.base
