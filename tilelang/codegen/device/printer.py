"""What the printers of GPU kernels share: how the classes of this folder are put together, the parameters, the indices."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

from tilelang.ir import Buffer, Const, Launch, Var, convert, walk
from tilelang.target.cluster import cluster_of

from .calls import Calls
from .memory import Memory
from .page import Expressions, Page
from .statements import Statements
from .types import type_name
from .value_facts import ValueFacts
from .values import Values


class DeviceKernel(Protocol):
    """The fields of transform.lower.device_program.DeviceKernel that print_kernel reads."""

    name: str
    params: tuple[Any, ...]  # Buffer: pointer; Var: scalar
    launch: Launch


class BasePrinter:
    """Prints the function of one kernel; a target's printer adds its calls, the head and the shared memory.

    defined: names that the header and the user's source define.
    """

    smem = ""  # the declaration of the array that holds all shared buffers
    memory = Memory

    def __init__(self, kernel: DeviceKernel, page: Page, fast_math: bool, defined: Container[str]) -> None:
        self._kernel, self._launch, self.page = kernel, kernel.launch, page
        self.x = Expressions(page, ValueFacts(kernel.launch, kernel.params), fast_math)
        Values(self.x)
        self._memory, self.calls = self.memory(self.x, kernel.launch), Calls(self.x, defined)
        self.calls.special["load_shifted"] = self._memory.shifted
        self._statements = Statements(self._memory)

    def body(self) -> None:
        """Print the indices, the shared memory and the statements."""
        self._indices()
        if self._memory.offsets or self._launch.plan.shared_bytes:
            self.page.emit(self.smem)
        self.begin_statements()
        self._statements.stmt(self._launch.body)

    def begin_statements(self) -> None:
        """Called in front of the first statement."""

    def parameters(self) -> list[str]:
        """Declarations of the program's parameters."""
        return [*map(self._parameter, self._kernel.params)]

    def workspaces(self) -> list[str]:
        """Declarations of the workspaces, the last parameters."""
        return [*map(self._memory.workspace, getattr(self._kernel, "workspaces", ()))]

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
            sizes = dict(zip("xy", map(convert, self._launch.grid)))
            grid = {d: f"{g.value}u" if isinstance(g, Const) else f"gridDim.{d}" for d, g in sizes.items()}
            at, number = names, f"blockIdx.x + {grid['x']} * blockIdx.y"
        else:
            what, one, kind = "clusters", "cluster", "unsigned"
            grid, at = {"x": "nx_", "y": "ny_"}, {"x": "cx_", "y": "cy_"}
            number = f"blockIdx.x / {cx}u + nx_ * (blockIdx.y / {cy}u)"
        lines = [f"// {what} in rasterisation panels of {panel_size} {'rows' if row else 'columns'}"]
        if cluster is not None:
            lines.append(f"const unsigned nx_ = gridDim.x / {cx}u, ny_ = gridDim.y / {cy}u;")
        lines += [f"const unsigned {one}_ = {number}, panel_ = {panel_size}u * {grid[across]};",
                  f"const unsigned start_ = {one}_ / panel_ * {panel_size}u, in_ = {one}_ % panel_;"]
        known = [g.value if isinstance(g, Const) else 0 for g in map(convert, self._launch.grid[:2])]
        high = known[along == "y"] // (cy if along == "y" else cx)
        if not high:  # a division by a number that the compiler knows takes a fifth of the time
            lines.append(f"const unsigned width_ = min({panel_size}u, {grid[along]} - start_);")
            row_, column_ = "in_ % width_", "in_ / width_"
        elif rest := high % panel_size if high > panel_size else 0:
            row_, column_ = (f"start_ == {high - rest}u ? in_ {x} {rest}u : in_ {x} {panel_size}u" for x in "%/")
        else:
            row_, column_ = (f"in_ {x} {min(high, panel_size)}u" for x in "%/")
        lines += [f"const unsigned row_ = {row_};", f"const unsigned column_ = {column_};",
                  f"const {kind} {at[along]} = start_ + row_;",
                  f"const {kind} {at[across]} = start_ / {panel_size}u % 2u ? {grid[across]} - 1 - column_ : column_;"]
        if cluster is not None:
            lines += [f"const int {names[d]} = c{d}_ * {n}u + blockIdx.{d} % {n}u;" for d, n in (("x", cx), ("y", cy))]
        for line in lines:
            self.page.emit(line)
