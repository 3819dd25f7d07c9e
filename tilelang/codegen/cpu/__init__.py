"""The CPU target: prints a planned tile program as LLVM IR.

    program = compile_tile(lower_cpu(func))      lower_cpu: transform/pipeline.py
    program.llvm_ir, program.entry, program.signature, program.symbols

The entry is `ptr entry(params…)`. It returns null, or the text of the host assertion that failed (NUL-terminated, static). It
runs all host statements and launches, and returns when they have finished. Its loader must provide the symbol `tl_parallel_for`
(runtime/cpu_pool.py), libm and libc.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilelang.ir import Expr, Func, Var, symbols_of, walk
from tilelang.target.cpu_launch import ThreadValues

from .launch import HostPrinter
from .code import Code, HostFunction
from .state import BlockState, Bound, LaneFaults, Storage
from .text import Fn, Module, clean
from .types import value_type


@dataclass(frozen=True)
class CpuParam:
    """One parameter of the entry, in order.

    kind: "tensor" (pointer to element 0; null is allowed for empty tensors), "pointer" (an untyped address), "scalar"
    (LLVM type by dtype: iN, float, double; bool is i1, float16 and bfloat16 are passed as float) or "symbol" (i64).
    var: the parameter Var of the Func, or the symbolic dimension.  type: LLVM type.
    """

    kind: str
    name: str
    dtype: str
    type: str
    var: Var


@dataclass(frozen=True)
class CpuProgram:
    """A compiled program.

    llvm_ir: the module's text. entry: symbol of the entry. signature: the entry's parameters. symbols: the shape and stride
    variables that follow the parameters, in order.
    """

    llvm_ir: str
    entry: str
    signature: tuple[CpuParam, ...]
    symbols: tuple[Var, ...]


def _signature(func: Func) -> tuple[CpuParam, ...]:
    out = []
    for p in func.params:
        b = func.buffer_of(p)
        if b is not None:
            out.append(CpuParam("tensor", b.name, f"{b.dtype}", "ptr", p))
        elif p.dtype.is_handle:
            out.append(CpuParam("pointer", p.name, f"{p.dtype}", "ptr", p))
        else:
            out.append(CpuParam("scalar", p.name, f"{p.dtype}", value_type(p.dtype, p.span), p))
    return (*out, *(CpuParam("symbol", v.name, f"{v.dtype}", "i64", v) for v in symbols_of(func)))


def _bind_parameter(cx: Code, func: Func, p: CpuParam, operand: str) -> None:
    b = func.buffer_of(p.var)
    if b is not None:
        cx.storage[b.data] = Storage(operand)
    elif p.kind == "symbol":
        cx.vars[p.var] = Bound(wide=operand)
    else:
        cx.vars[p.var] = Bound(value=operand)
        if p.var.dtype.is_signed:
            cx.vars[p.var].wide = operand if p.type == "i64" else cx.f.let(f"sext {p.type} {operand} to i64")


def compile_tile(func: Func) -> CpuProgram:
    """Compile a program in phase CPU to LLVM IR.

    Raises cpu-unsupported at the user's line for what the CPU target does not support.
    """
    signature = _signature(func)
    entry = clean(func.name) + "_entry"  # no C function's name ends like this
    module = Module(func.name)
    f = Fn(module, entry, "ptr", [(p.type, f"p{k}", "") for k, p in enumerate(signature)], linkage="", attrs="nounwind")
    one_thread = BlockState(ThreadValues(1, (), frozenset(), frozenset()), (1, 1, 1), ((0, 1),), LaneFaults())
    cx = Code(f, one_thread, {})
    for k, param in enumerate(signature):
        _bind_parameter(cx, func, param, f"%p{k}")
    host = HostFunction(cx, func)
    HostPrinter(host).stmt(func.body)
    host.release()
    f.end("ret ptr null")
    f.finish()
    return CpuProgram(module.text(), entry, signature, tuple(p.var for p in signature if p.kind == "symbol"))


__all__ = ["CpuParam", "CpuProgram", "compile_tile"]
