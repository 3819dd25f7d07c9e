"""CUDA C++ for kernels in phase DEVICE. `print_kernel(kernel)` is the public function.

A kernel is an `extern "C" __global__` function, with the sections of prelude_*.cuh that it needs in front. Shared memory is one
dynamic array with the offsets planned by transform/memory/plan_shared_memory.py.

The printer is composed of these classes, on the left those of codegen/device. Each uses only those above it:

    Page            lines and names                  HopperCalls     TMA, mbarriers
    ValueFacts      ranges of values                 NamedRegisters  PTX registers with names
    Expressions     text of any expression           WgmmaCalls      wgmma and descriptors
    Values          operators, conversions           RegisterLoops   loops on named registers
    Memory          buffers, loads, stores           SharedAddresses bytes that select shared memory
    Calls           intrinsics
    Statements      statements
"""

from __future__ import annotations

from tilelang.target.cluster import cluster_of

from ..device.page import Page
from ..device.prelude import words_of
from ..device.printer import BasePrinter, DeviceKernel
from .hopper import HopperCalls
from .named_registers import NamedRegisters
from .prelude import kernel_header, sections
from .register_loops import RegisterLoops
from .shared_addresses import SharedAddresses
from .wgmma import WgmmaCalls


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


class KernelPrinter(BasePrinter):
    """Prints the function of one kernel."""

    smem = "extern __shared__ __align__(1024) unsigned char smem[];"

    def __init__(self, kernel: DeviceKernel, page: Page, fast_math: bool) -> None:
        injected = "".join(t for t in kernel.launch.plan.import_source if t)
        super().__init__(kernel, page, fast_math, words_of(injected) | {*sections()})
        self._hopper = HopperCalls(self.calls, kernel.launch)
        self.registers = NamedRegisters(self.calls)
        WgmmaCalls(self.calls, self.registers)
        SharedAddresses(self.x)
        self._statements.register_loop = RegisterLoops(self._memory, self.registers, fast_math, self._statements.stmt).print

    def text(self) -> str:
        """The kernel's signature and body."""
        signature = self._signature()
        self.body()
        declared = self.registers.declaration()
        if declared:
            self.page.lines.insert(self._top, f"  {declared}")
        return "\n".join([signature + " {", *self.page.lines, "}"]) + "\n"

    def begin_statements(self) -> None:
        self._top = len(self.page.lines)

    def _signature(self) -> str:
        bounds = f"{self._launch.num_threads}, {self._launch.plan.min_blocks_per_sm}"
        params = ", ".join([*self.parameters(), *self._hopper.map_parameters(), *self.workspaces()])
        cluster = cluster_of(self._launch)
        dims = f"__cluster_dims__({', '.join(map(str, cluster))}) " if cluster is not None else ""
        return f'extern "C" __global__ void {dims}__launch_bounds__({bounds}) {self._kernel.name}({params})'
