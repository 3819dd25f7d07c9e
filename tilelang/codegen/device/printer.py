"""What the printers of GPU kernels share: how the classes of this folder are put together, the parameters, the indices."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Protocol

from tilelang.errors import InternalError, TileLangError
from tilelang.ir import (Alloc, Assert, Bind, Break, Buffer, Call, Const, Continue, Evaluate, Expr, For, If, Launch, Seq, Stmt,
                         Store, Var, While, binary, convert, walk)
from tilelang.target.cluster import cluster_of

from .calls import Calls
from .memory import Memory
from .page import Expressions, Page
from .text import quote
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


MOST_COPIES = 512  # of a body in the code: what has more elements a thread is in no registers, and compilers choke on it
_UNROLLED = ("unroll", "vectorized")


class Statements:
    """Prints statements, each class of node by one function.  register_loop: prints a loop with plan.registers.  end_of_loop:
    prints what stands at the end of each iteration of a loop with this body, and in front of `continue`."""

    def __init__(self, memory: Memory) -> None:
        self.x, self.page = memory.x, memory.page
        self.register_loop: Callable[[For], None] | None = None
        self.end_of_loop: Callable[[Stmt, Continue | None], None] | None = None
        self._bodies: list[Stmt] = []  # of the loops around
        self._forms: dict[type[Stmt], Callable[[Any], None]] = {
            Bind: self._bind, Alloc: memory.alloc, Store: memory.store, Evaluate: self._evaluate, For: self._for,
            While: self._while, If: self._if, Break: lambda s: self.page.emit("break;"),
            Continue: self._continue, Assert: self._assert}

    def stmt(self, s: Stmt) -> None:
        """Print a statement, with a comment that shows the user's line."""
        if isinstance(s, Seq):
            for x in s.stmts:
                self.stmt(x)
            return
        form = self._forms.get(type(s))
        if form is None:
            raise InternalError(f"a {type(s).__name__} reached the code generator: the program is not in phase DEVICE")
        self.page.comment(s.span)
        try:
            form(s)
        except TileLangError as e:  # an expression made by a pass has no place of its own
            e.span = e.span or s.span
            raise

    def _block(self, header: str, body: Stmt) -> None:
        self.page.emit(f"{header} {{")
        with self.page.scope():
            self.stmt(body)
        self.page.emit("}")

    def _loop(self, header: str, body: Stmt, rolled: bool) -> None:
        """rolled: iterations follow each other in the code that the device compiler makes."""
        self._bodies.append(body if rolled else Seq(()))
        self.page.emit(f"{header} {{")
        with self.page.scope():
            self.stmt(body)
            self._end_iteration()
        self.page.emit("}")
        self._bodies.pop()

    def _end_iteration(self, at: Continue | None = None) -> None:
        if self.end_of_loop is not None:
            self.end_of_loop(self._bodies[-1], at)

    def _continue(self, s: Continue) -> None:
        self._end_iteration(s)
        self.page.emit("continue;")

    def _bind(self, s: Bind) -> None:
        value = self.x.top(s.value)
        self.x.facts.enter_bind(s)
        kind = type_name(s.var.dtype, s.span)
        kind = f"{kind} const" if s.var.dtype.is_handle else f"const {kind}"
        self.page.emit(f"{kind} {self.page.name(s.var, s.var.name)} = {value};")

    def _evaluate(self, s: Evaluate) -> None:
        self.page.emit(f"{self.x.top(s.call)};")

    def _for(self, s: For) -> None:
        if s.plan.registers and self.register_loop is not None:
            self.register_loop(s)
            return
        self.x.facts.enter_loop(s)
        if s.kind not in ("serial", "unroll", "vectorized"):
            raise InternalError(f"a {s.kind} loop reached the code generator: the program is not in phase DEVICE")
        end = self._once(binary("add", s.start, s.extent), s)
        start = self.x.top(s.start)
        with self.page.names.scope():
            name = self.page.name(s.var, s.var.name)
            self._pragma(s)
            head = f"for ({type_name(s.var.dtype)} {name} = {start}; {name} < {end}; ++{name})"
            self._loop(head, s.body, s.kind == "serial" or not isinstance(s.extent, Const) or s.plan.factor is not None
                       or _copies(s) > MOST_COPIES)

    def _once(self, end: Expr, s: For) -> str:
        """The end of a loop as text that is evaluated once; constants and variables stay as they are."""
        if isinstance(end, (Const, Var)):
            return self.x.top(end)
        name = self.page.name(s, f"{s.var.name}_end")
        self.page.emit(f"const {type_name(end.dtype)} {name} = {self.x.top(end)};")
        return self.page.name(s, name)

    def _pragma(self, s: For) -> None:
        if s.kind in _UNROLLED:
            copies = s.plan.factor or (1 if _copies(s) > MOST_COPIES else "")
            self.page.emit(f"#pragma unroll {copies}".rstrip())
        elif s.plan.factor:
            self.page.emit(f"#pragma unroll {s.plan.factor}")
        elif _only_loads(s.body):
            self.page.emit("#pragma unroll 1")

    def _while(self, s: While) -> None:
        self._loop(f"while ({self.x.top(s.cond)})", s.body, True)

    def _if(self, s: If) -> None:
        if isinstance(s.cond, Call) and s.cond.op == "by_nvshmem":
            return self.stmt(s.then)
        text = self.x.condition(s, self.x.top(s.cond))
        self._branch(f"if ({text})", s.cond, True, s.then)
        if s.orelse is not None:
            self.page.lines.pop()
            self._branch("} else", s.cond, False, s.orelse)

    def _branch(self, head: str, cond: Expr, holds: bool, body: Stmt) -> None:
        self.x.facts.branches.append((cond, holds))
        self._block(head, body)
        self.x.facts.branches.pop()

    def _assert(self, s: Assert) -> None:
        head = "" if s.message.startswith("Device assert failed") else "Device assert failed: "
        text = f"{head}{s.message}\n"
        self.page.emit(f"if (!({self.x.top(s.cond)})) tl::assert_failed({quote(text)});")


def _copies(s: Stmt | None) -> int:
    """How often the innermost statements of s stand in the code when the loops in it are unrolled."""
    if isinstance(s, Seq):
        return max(map(_copies, s.stmts), default=1)
    if isinstance(s, If):
        return max(_copies(s.then), _copies(s.orelse))
    if not isinstance(s, For):
        return 1
    return _copies(s.body) * (int(s.extent.value) if s.kind in _UNROLLED and isinstance(s.extent, Const) else 1)


def _only_loads(s: Stmt) -> bool:
    """Whether a loop asks for tiles and waits for room, as a warp with few registers does: copies of it would spill."""
    ops = {n.op for n in walk(s, Call)}
    return "tma_load" in ops and "mbarrier_wait" in ops and not ops & {"wgmma", "wgmma_wait"}
