"""The CPU target: a legalised tile program (phase TILE) to LLVM IR.

    program = compile_tile(func)
    program.llvm_ir, program.entry, program.signature, program.symbols

The entry is `ptr entry(params…)`: null, or the text of the host assertion that failed (NUL-terminated, static).  It
runs all host statements and launches and returns when they are done.  It needs one symbol from its loader,
`tl_parallel_for` (runtime/cpu_pool.py), and libm and libc.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilelang.ir import Expr, Func, Var, walk

from .exprs import Bound, Storage
from .host import HostCpu, host_cpu
from .launch import Host
from .text import Fn, Module, clean
from .types import unsupported, value_type


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
    """llvm_ir: the module's text.  entry: symbol of the entry.  signature: its parameters.  symbols: shape and stride
    variables in the order they follow the parameters."""

    llvm_ir: str
    entry: str
    signature: tuple[CpuParam, ...]
    symbols: tuple[Var, ...]


def symbols_of(func: Func) -> tuple[Var, ...]:
    """Variables in shapes, strides and offsets of tensor parameters that are not parameters themselves, in order."""
    params, out = set(func.params), []
    for _, b in func.buffers:
        for d in (*b.shape, *(b.strides_ or ()), b.offset):
            for v in walk(d) if isinstance(d, Expr) else ():
                if isinstance(v, Var) and v not in params and v not in out:
                    out.append(v)
    return tuple(out)


def _bind_parameter(at: Host, func: Func, p: CpuParam, operand: str) -> None:
    b = func.buffer_of(p.var)
    if b is not None:
        at.storage[b.data] = Storage(operand)
    elif p.kind == "symbol":
        at.vars[p.var] = Bound(wide=operand)
    else:
        at.vars[p.var] = Bound(value=operand)
        if p.var.dtype.is_signed:
            at.vars[p.var].wide = operand if p.type == "i64" else at.f.let(f"sext {p.type} {operand} to i64")


def compile_tile(func: Func, host: HostCpu | None = None) -> CpuProgram:
    """LLVM IR of a tile program for this processor (or `host`).

    Raises cpu-unsupported at the user's line for what the CPU target does not compile.
    """
    if func.attr("phase", "TILE") != "TILE":
        raise unsupported(f"a program in phase {func.attr('phase')}", span=func.span,
                          hint="the CPU target starts from the tile program")
    module = Module(func.name)
    symbols = symbols_of(func)
    signature = []
    for p in func.params:
        b = func.buffer_of(p)
        if b is not None:
            signature.append(CpuParam("tensor", b.name, f"{b.dtype}", "ptr", p))
        elif p.dtype.is_handle:
            signature.append(CpuParam("pointer", p.name, f"{p.dtype}", "ptr", p))
        else:
            signature.append(CpuParam("scalar", p.name, f"{p.dtype}", value_type(p.dtype, p.span), p))
    signature += [CpuParam("symbol", v.name, f"{v.dtype}", "i64", v) for v in symbols]
    entry = clean(func.attr("global_symbol") or func.name) + "_entry"  # no name of a C function ends so
    f = Fn(module, entry, "ptr", [(p.type, f"p{k}", "") for k, p in enumerate(signature)], linkage="", attrs="nounwind")
    host_code = Host(f, host or host_cpu(), func)
    for k, param in enumerate(signature):
        _bind_parameter(host_code, func, param, f"%p{k}")
    host_code.stmt(func.body)
    host_code.release()
    f.end("ret ptr null")
    f.finish()
    return CpuProgram(module.text(), entry, tuple(signature), symbols)


__all__ = ["CpuParam", "CpuProgram", "HostCpu", "compile_tile", "host_cpu", "symbols_of"]
