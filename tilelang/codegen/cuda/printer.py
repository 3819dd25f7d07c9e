"""CUDA C++ for kernels in phase DEVICE. `print_kernel(kernel)` is the public function.

A kernel is an `extern "C" __global__` function, with the sections of prelude_*.cuh that it needs in front. Shared memory is one
dynamic array with the offsets planned by transform/memory/plan_shared_memory.py.

The printer is composed of these classes. Each uses only those above it:

    Page            lines and names                  Calls           intrinsics
    ValueFacts      ranges of values                 HopperCalls     TMA, mbarriers
    Expressions     text of any expression           NamedRegisters  PTX registers with names
    Values          operators, conversions           WgmmaCalls      wgmma and descriptors
    Memory          buffers, loads, stores           Statements      statements; RegisterLoops
"""

from __future__ import annotations

from typing import Any, Protocol

from tilelang.ir import Buffer, Launch, Var, walk
from tilelang.target.cluster import cluster_of

from .calls import Calls
from .page import Expressions, Page
from .prelude import kernel_header, sections, words_of
from .hopper import HopperCalls
from .memory import Memory
from .named_registers import NamedRegisters
from .statements import Statements
from .types import type_name
from .value_facts import ValueFacts
from .values import Values
from .wgmma import WgmmaCalls


class DeviceKernel(Protocol):
    """The fields of transform.lower.device_program.DeviceKernel that print_kernel reads."""

    name: str
    params: tuple[Any, ...]  # Buffer: pointer; Var: scalar
    launch: Launch


def print_kernel(kernel: DeviceKernel, *, fast_math: bool = False, line_directives: bool = False) -> str:
    """The CUDA C++ source of a kernel: header, user's injected source, kernel.

    fast_math: print the fast variants of float32 functions (`tl.enable_fast_math`). line_directives: print a #line directive
    with the line of the user's file for each statement, so that tools show it (`tl.emit_line_directives`). Raises
    NotImplementedError at the user's line for constructs that CUDA has no form for.
    """
    page, plan = Page(kernel.name, line_directives), kernel.launch.plan
    injected = "".join(t.rstrip() + "\n" for t in plan.import_source if t)
    if plan.cuda_source:  # the user's kernel (T.CUDASourceCodeKernel): types and functions that it may name, and its text
        own = injected + plan.cuda_source.rstrip() + "\n"
        return kernel_header(page, "", own, "") + own
    printer = KernelPrinter(kernel, page, fast_math)
    body = printer.text()
    return kernel_header(page, body, injected, "".join(printer.registers.functions.values())) + injected + body


class KernelPrinter:
    """Prints the function of one kernel."""

    def __init__(self, kernel: DeviceKernel, page: Page, fast_math: bool) -> None:
        self._kernel, self._launch, self.page = kernel, kernel.launch, page
        x = Expressions(page, ValueFacts(kernel.launch, kernel.params), fast_math)
        Values(x)
        injected = "".join(t for t in kernel.launch.plan.import_source if t)
        self._memory, self.calls = Memory(x, kernel.launch), Calls(
            x, words_of(injected) | {*sections()})
        self.calls.special["load_shifted"] = self._memory.shifted
        self._hopper = HopperCalls(self.calls, kernel.launch)
        self.registers = NamedRegisters(self.calls)
        WgmmaCalls(self.calls, self.registers)
        self._statements = Statements(self._memory, self.registers, fast_math)

    def text(self) -> str:
        """The kernel's signature and body."""
        signature = self._signature()
        self._indices()
        if self._memory.offsets:
            self.page.emit("extern __shared__ __align__(1024) unsigned char smem[];")
        top = len(self.page.lines)
        self._statements.stmt(self._launch.body)
        declared = self.registers.declaration()
        if declared:
            self.page.lines.insert(top, f"  {declared}")
        return "\n".join([signature + " {", *self.page.lines, "}"]) + "\n"

    def _signature(self) -> str:
        bounds = f"{self._launch.num_threads}, {self._launch.plan.min_blocks_per_sm}"
        params = ", ".join([*map(self._parameter, self._kernel.params), *self._hopper.map_parameters(),
                            *map(self._memory.workspace, getattr(self._kernel, "workspaces", ()))])
        cluster = cluster_of(self._launch)
        dims = f"__cluster_dims__({', '.join(map(str, cluster))}) " if cluster is not None else ""
        return f'extern "C" __global__ void {dims}__launch_bounds__({bounds}) {self._kernel.name}({params})'

    def _parameter(self, p: Any) -> str:
        if isinstance(p, Buffer):
            return self._memory.parameter(p)
        return f"{type_name(p.dtype, p.span)} {self.page.name(p, p.name)}"

    def _indices(self) -> None:
        """The variables of the thread's and the block's index."""
        launch = self._launch
        used = {x for x in walk(launch.body, Var)}
        for var, axis in zip(launch.thread_vars, "xyz"):
            if var in used:
                self.page.emit(f"const int {self.page.name(var, var.name)} = threadIdx.{axis};")
        swizzle = launch.plan.swizzle
        if swizzle and len(launch.block_vars) >= 2:
            self._swizzled_blocks(*swizzle)
        for var, axis in zip(launch.block_vars, "xyz"):
            if var in used and var not in self.page.names.names:
                self.page.emit(f"const int {self.page.name(var, var.name)} = blockIdx.{axis};")

    def _swizzled_blocks(self, panel_size: Any, order: Any) -> None:
        """Blocks in rasterisation panels of `panel_size` rows (order "row") or columns, each in serpentine order, for reuse in
        L2.  Clusters are placed in the same order, and the blocks of a cluster stay adjacent."""
        names = {d: self.page.name(v, v.name) for d, v in zip("xy", self._launch.block_vars)}
        row, cluster = order != "column", cluster_of(self._launch)
        cx, cy, _ = cluster or (1, 1, 1)
        across, along = ("x", "y") if row else ("y", "x")
        if cluster is None:
            what, one, kind = "blocks", "block", "int"
            grid, at, number = {"x": "gridDim.x", "y": "gridDim.y"}, names, "blockIdx.x + gridDim.x * blockIdx.y"
        else:
            what, one, kind = "clusters", "cluster", "unsigned"
            grid, at = {"x": "nx_", "y": "ny_"}, {"x": "cx_", "y": "cy_"}
            number = f"blockIdx.x / {cx}u + nx_ * (blockIdx.y / {cy}u)"
        lines = [f"// {what} in rasterisation panels of {panel_size} {'rows' if row else 'columns'}"]
        if cluster is not None:
            lines.append(f"const unsigned nx_ = gridDim.x / {cx}u, ny_ = gridDim.y / {cy}u;")
        lines += [
            f"const unsigned {one}_ = {number}, panel_ = {panel_size}u * {grid[across]};",
            f"const unsigned start_ = {one}_ / panel_ * {panel_size}u, in_ = {one}_ % panel_;",
            f"const unsigned width_ = min({panel_size}u, {grid[along]} - start_);",
            f"const {kind} {at[along]} = start_ + in_ % width_;",
            f"const {kind} {at[across]} = start_ / {panel_size}u % 2u ? {grid[across]} - 1 - in_ / width_ : in_ / width_;"]
        if cluster is not None:
            lines += [f"const int {names[d]} = c{d}_ * {n}u + blockIdx.{d} % {n}u;" for d, n in (("x", cx), ("y", cy))]
        for line in lines:
            self.page.emit(line)
