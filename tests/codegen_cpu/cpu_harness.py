"""Running tile programs on the CPU target from NumPy arrays, without the host stub."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from completed import completed

from tilelang import ops  # noqa: F401 - registers the tile ops that the text names
from tilelang.codegen.cpu import CpuProgram, compile_tile
from tilelang.ir import Buffer, Func, Var, numpy_dtype
from tilelang.runtime.cpu_engine import cpu_engine
from tilelang.target.cpu import HostCpu
from tilelang.transform.cpu import CPU_PASSES
from tilelang.transform.framework.pass_ import PassContext, run_passes

_C = {"i1": ctypes.c_bool, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
      "float": ctypes.c_float, "double": ctypes.c_double, "ptr": ctypes.c_void_p}


class Compiled:
    """A tile program compiled for this machine; call it with arrays and scalars in parameter order."""

    def __init__(self, func: Func, host: HostCpu | None = None) -> None:
        func = getattr(func, "func", func)  # a PrimFunc of the language holds the Func
        self.func, self.program = func, compile_tile(run_passes(func, CPU_PASSES, PassContext(host=host)))
        self.code = cpu_engine().load(self.program.llvm_ir, self.program.entry)
        types = [_C[p.type] for p in self.program.signature]
        self.entry = ctypes.CFUNCTYPE(ctypes.c_char_p, *types)(self.code.address)

    def __call__(self, *args: Any) -> None:
        symbols: dict[Var, int] = {}
        values = []
        for p, a in zip(self.func.params, args, strict=True):
            b = self.func.buffer_of(p)
            if b is None:
                values.append(a)
                continue
            values.append(a.ctypes.data)
            steps = [s // a.itemsize for s in a.strides]
            for dims, found in ((b.shape, a.shape), (b.strides_ or (), steps)):
                symbols.update((d, n) for d, n in zip(dims, found) if isinstance(d, Var))
        message = self.entry(*values, *(symbols[v] for v in self.program.symbols))
        if message is not None:
            raise RuntimeError(message.decode())
        completed("cpu")


def run_cpu(func: Func, args: Any, *, check: bool = True, host: HostCpu | None = None) -> dict[str, np.ndarray]:
    """Run on copies of the arguments (by name or in order); tensors after the run by name, as run_tile gives them."""
    func = getattr(func, "func", func)
    if isinstance(args, Mapping):
        args = [args.get(p.name if (b := func.buffer_of(p)) is None else b.name) for p in func.params]
    args = list(args)
    scalars = {p: a for p, a in zip(func.params, args) if func.buffer_of(p) is None}
    for k, p in enumerate(func.params):
        b = func.buffer_of(p)
        if b is None:
            continue
        if k >= len(args):
            args.append(None)
        a = np.zeros(_shape(b, func, args, scalars), numpy_dtype(b.dtype)) if args[k] is None else np.asarray(args[k])
        args[k] = a.copy(order="K")
    Compiled(func, host)(*args)
    return {b.name: a for p, a in zip(func.params, args) if (b := func.buffer_of(p)) is not None}


def _shape(b: Buffer, func: Func, args: list[Any], scalars: dict[Var, Any]) -> tuple[int, ...]:
    known = dict(scalars)
    for p, a in zip(func.params, args):
        other = func.buffer_of(p)
        if other is not None and a is not None:
            known.update((d, n) for d, n in zip(other.shape, np.shape(a)) if isinstance(d, Var))
    return tuple(d if isinstance(d, int) else known[d] for d in b.shape)


__all__ = ["Compiled", "CpuProgram", "run_cpu"]
