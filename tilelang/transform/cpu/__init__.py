"""Planning for the CPU target: a program in phase TILE becomes loops over threads that codegen/cpu prints as LLVM.

The passes, in order:

    launch_host_statements   statements outside of T.Kernel that compute become launches of one thread
    plan_launches            each launch: null checks, warp roles, masks, loops over threads, storage
    plan_gemms               register blocking of T.gemm, operands to convert
    guard_accesses           guards of tensor accesses, loop nests of tile operations
"""

from __future__ import annotations

from tilelang.ir import Func
from tilelang.target.cpu import HostCpu, host_cpu, unsupported
from tilelang.target.cpu_launch import CpuPlan

from .guard_accesses import guard_accesses
from .host_blocks import launch_host_statements
from .plan_gemm import plan_gemms
from .plan_launches import plan_launches


def plan_cpu(func: Func, host: HostCpu | None = None) -> CpuPlan:
    """The plan of a tile program for this processor (or `host`).

    Raises cpu-unsupported at the user's line for what the CPU target does not compile.
    """
    if func.facts.phase != "TILE":
        raise unsupported(f"a program in phase {func.facts.phase}", span=func.span,
                          hint="the CPU target starts from the tile program")
    host = host or host_cpu()
    func = launch_host_statements(func)
    func = plan_launches(func)
    func = plan_gemms(func, host)
    func = guard_accesses(func)
    return CpuPlan(func, host)


__all__ = ["plan_cpu"]
