"""tilelang.lower: lowers a program without compiling it."""

from __future__ import annotations

from typing import Any

from tilelang.errors import error, register
from tilelang.runtime.signature import KernelParam, params_of
from tilelang.transform.framework.observe import announce_code

from .artifact import KERNEL_SEPARATOR, CompiledArtifact, Request, program_of
from .building import device_source
from .kernel import compile_request
from .requests import make_request

register("lower-module", ValueError, "a module of several programs, or of none, is lowered", expected="a module of one program")


def parameters(func: Any) -> list[KernelParam]:
    """KernelParams of a PrimFunc."""
    program = program_of(func)
    if program is None:
        raise TypeError(f"a PrimFunc is expected, found {type(func).__name__}")
    return params_of(program)


def lower(func_or_mod: Any, target: Any = "auto", target_host: Any = None, runtime_only: bool = False,
          enable_host_codegen: bool = False, enable_device_compile: bool = False) -> CompiledArtifact:
    """Lower a PrimFunc, or a module that holds one, for a target, whose hardware need not exist here.

    enable_device_compile: also compile the device code; then rt_mod is the kernel.
    """
    func = func_or_mod
    if program_of(func) is None and hasattr(func, "functions"):
        if len(func.functions) != 1:
            names = ", ".join(map(str, func.functions)) or "nothing"
            raise error("lower-module", f"lower takes one program, the module holds {names}",
                        found=f"{len(func.functions)} programs", hint="lower each: lower(module[name])")
        (func,) = func.functions.values()
    request = make_request(func, None, None, target)
    if enable_device_compile:
        kernel = compile_request(request)
        return CompiledArtifact(func, func, params_of(request.func), kernel.kernel_source, kernel, request.target,
                                target_host)
    return CompiledArtifact(func, func, params_of(request.func), source_of(request), None, request.target, target_host)


def source_of(request: Request) -> str:
    """The generated source; nothing is compiled."""
    if request.target.is_gpu:
        return KERNEL_SEPARATOR.join(device_source(request)[1])
    from tilelang.codegen.cpu import compile_tile  # 80 ms
    from tilelang.transform.pipeline import lower_cpu  # 243 ms

    source = compile_tile(lower_cpu(request.func, request.target, request.config)).llvm_ir
    announce_code(request.func.name, source, "llvm", request.target)
    return source
