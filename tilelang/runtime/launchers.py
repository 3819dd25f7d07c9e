"""Emits the `launch` function of a host module, which runs the kernels after the arguments have been checked.

CpuLauncher calls the native entry of the CPU code generator; GpuLauncher runs the host statements of a lowered
program and launches its kernels on the caller's stream, through the driver of CUDA or HIP (gpu_api.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import (AddressOf, Alloc, Assert, Bind, Buffer, Call, Evaluate, Expr, For, Func, If, Launch, Load, Ramp, Seq,
                         Stmt, Store, Var, children, free_vars, stmts_of, walk, GLOBAL)

from tilelang.target.cluster import check_cluster, cluster_of
from tilelang.target.llvm_values import Value
from tilelang.target.machine import MAX_GRID, MOST_SHARED

from . import l2_window, workspaces
from .gpu_api import CUDA, GpuApi, in_context
from .host_frame import CPU, Frame
from .l2_window import window_of
from .llvm_text import HostExpr, Writer, code_of, scalar_type, text_of
from .signature import Signature, TensorArg
from .tensor_maps import DECLARATION, TensorMapCode

register("host-statement", NotImplementedError, "a statement outside T.Kernel that a GPU kernel's host cannot run",
         "move it into the T.Kernel block", expected="statements that the host of a kernel can run")

MAX_DEVICES = 64
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE


class GpuLauncher:
    """Launches the kernels of a lowered program.

    Symbols that the loader provides: tl_functions (a function per kernel and device, MAX_DEVICES per kernel), tl_contexts
    (per device its primary context, HIP: what is not 0), tl_load(device) -> 0 when it filled both, tl_status (result of the
    last call of the driver), and the driver's cuLaunchKernel, cuCtxGetCurrent, cuCtxPushCurrent, cuCtxPopCurrent,
    cuTensorMapEncodeTiled where a kernel has tensor maps, cuLaunchKernelEx or `cooperative` where a launch has attributes, and
    cuMemAllocAsync, cuMemsetD8Async, cuMemFreeAsync where a kernel has workspaces; by the names that api has for them.
    """

    def __init__(self, host: Func, kernels: tuple[Any, ...], shared_limit: int = MOST_SHARED, api: GpuApi = CUDA) -> None:
        """shared_limit: bytes of shared memory that a block of the target may have."""
        self.host, self.kernels, self.shared_limit, self.api, self.device = host, kernels, shared_limit, api, api.device
        self.of_name = {kernel.name: k for k, kernel in enumerate(kernels)}
        self._align = _alignments(kernels)
        self.maps = {kernel.name: [TensorMapCode(f"{k}_{i}", m) for i, m in enumerate(kernel.tensor_maps)]
                     for k, kernel in enumerate(kernels)}

    def declarations(self) -> str:
        api = self.api
        enter, leave = (f"declare i32 @{api.name(n)}({api.place})\n" for n in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"))
        types = f"({', '.join(['ptr', *['i32'] * 7, 'ptr', 'ptr'])}"
        attributes = any(launch_attributes(k.launch) for k in self.kernels)
        windows = api is CUDA and any(window_of(k.launch) for k in self.kernels)
        return ("@tl_functions = external global ptr\n@tl_contexts = external global ptr\n"
                "@tl_status = external global i32\n"
                f"declare i32 @tl_load(i32)\ndeclare i32 @{api.name('cuCtxGetCurrent')}(ptr)\n"
                + enter + leave * (leave != enter)
                + f"declare i32 @{api.name('cuLaunchKernel')}{types}, ptr)\n"
                + ("declare i32 @cuLaunchKernelEx(ptr, ptr, ptr, ptr)\n" if attributes and api is CUDA or windows else "")
                + (f"declare i32 @{api.cooperative}{types})\n" if attributes and api.cooperative else "")
                + (l2_window.declarations(MAX_DEVICES) if windows else "")
                + (workspaces.declarations(api) if any(k.workspaces for k in self.kernels) or _allocates(self.host.body)
                   else "")
                + "".join([DECLARATION, *(m.declaration() for maps in self.maps.values() for m in maps)]
                          if any(self.maps.values()) else []))

    def alignment(self, arg: TensorArg) -> int:
        return max(self._align.get(arg.buffer.data, 1), min(16, max(1, arg.buffer.dtype.bytes)))

    def emit(self, w: Writer, frame: Frame, sig: Signature) -> None:
        _GpuStatements(w, frame, sig, self).run_all()


class _GpuStatements:
    """Emits the host statements of a lowered program as LLVM IR."""

    def __init__(self, w: Writer, frame: Frame, sig: Signature, owner: GpuLauncher) -> None:
        self.w, self.sig, self.owner, self.api = w, sig, owner, owner.api
        self.values = frame.values(w, "%frame")
        self.addresses = frame.addresses(w, "%frame")
        self.exact = HostExpr(w, self.values, sig.name, wrap=True)
        self.wide = HostExpr(w, self.values, sig.name)
        self.device = w.at("%frame", 8, "i32")

    def run(self, s: Stmt) -> None:
        match s:
            case Seq():
                held = len(self.w.cleanup)
                for x in s.stmts:
                    self.run(x)
                for give_back in reversed(self.w.cleanup[held:]):
                    give_back()
                del self.w.cleanup[held:]
            case Alloc() if s.buffer.scope_name == GLOBAL:
                self.allocate(s.buffer)
            case Bind():
                self.values[s.var] = self.exact(s.value)
            case Assert():
                self.check(s)
            case If():
                self._if(s)
            case For() if s.kind in ("serial", "unroll"):
                self._for(s)
            case Launch():
                self.launch(s)
            case Evaluate() if s.call.op in ("no_op", "assume"):
                pass
            case _:
                raise error("host-statement", f"‹a {type(s).__name__}› outside T.Kernel cannot run on the host of a GPU kernel",
                            span=s.span, hint="move it into the T.Kernel block")

    def check(self, s: Assert) -> None:
        self.w.check(self.exact.boolean(s.cond), s.message or f"assertion failed: {text_of(s.cond)}")

    def _if(self, s: If) -> None:
        def run(body: Stmt | None) -> str:
            outer = dict(self.values)
            if body is not None:
                self.run(body)
            self.values.clear()
            self.values.update(outer)
            return ""

        self.w.either(self.exact.boolean(s.cond), lambda: run(s.then), lambda: run(s.orelse), "")

    def _for(self, s: For) -> None:
        w = self.w
        head, body, done = w.name("head"), w.name("body"), w.name("done")
        start, extent = self.exact(s.start), self.exact(s.extent)
        counter = w.slot("i64")
        w.do(f"store i64 0, ptr {counter}")
        w.jump(head)
        w.begin(head)
        i = w.at(counter, 0, "i64")
        w.branch(i.test("slt", extent), body, done)
        w.begin(body)
        self.values[s.var] = i + start
        self.run(s.body)
        w.put(counter, 0, "i64", i + 1)
        w.jump(head)
        w.begin(done)

    def run_all(self) -> None:
        w = self.w
        w.check(self.device.test("ult", MAX_DEVICES), f"kernel {self.sig.name}: device index above {MAX_DEVICES - 1}")
        self.index = self.device.to("zext", "i64")
        self._loaded()
        self.stream = w.ins(f"call ptr @TVMFFIEnvGetStream(i32 {self.api.device}, i32 {self.device})")
        self.made: dict[TensorMapCode, str] = {}
        self._early_maps()
        self.run(self.owner.host.body)

    def _loaded(self) -> None:
        """Load the module on this device at its first use."""
        w = self.w
        contexts = w.place("@tl_contexts", self.index, "ptr")
        with w.when(w.at(contexts, 0, "ptr").test("ne", "null"), unless=True, likely=True):
            rc = w.ins(f"call i32 @tl_load(i32 {self.device})", "i32")
            w.check(rc.test("eq", 0), f"kernel {self.sig.name} cannot be loaded on its device")
            launches = [k.launch for k in self.owner.kernels]
            if self.api is CUDA and any(map(window_of, launches)):
                in_context(w, w.at(contexts, 0, "ptr"), lambda: l2_window.set_aside(w, self.index, launches))
        self.context = w.at(contexts, 0, "ptr") if self.api is CUDA else self.device

    def allocate(self, buffer: Buffer) -> None:
        """Allocate device memory for the rest of the enclosing statements; freed after them, or when one of them fails."""
        w = self.w
        space = workspaces.Workspaces(w, (buffer,), self.wide, self.api)
        self._allocate(space, f"workspace {buffer.name}")
        (cell,) = space.cells()
        self.addresses[buffer.data] = w.ins(f"load ptr, ptr {cell}")

    def _allocate(self, space: workspaces.Workspaces, what: str) -> None:
        good = workspaces.fits(self.w, space.buffers, self.wide)
        if good:
            self.w.check(good, f"kernel {self.sig.name}: {what} cannot be allocated: a size is negative or too large")
        self._in_context(lambda: space.allocate(self.stream), f"kernel {self.sig.name}: {what} cannot be allocated")
        # without a check, because a failing check would free the memory again
        self.w.cleanup.append(lambda: in_context(self.w, self.context, lambda: space.free(self.stream), self.api))

    def launch(self, s: Launch) -> None:
        w, fn = self.w, self.sig.name
        k = self.owner.of_name[s.plan.name]
        kernel = self.owner.kernels[k]
        grid = [self.wide(g) for g in (*s.grid, *(1,) * (3 - len(s.grid)))]
        nonzero = w.of("i1", "")
        for g, limit, axis in zip(grid, MAX_GRID, "xyz"):
            if not g.isdigit() or int(g) > limit:
                w.check(g.test("sle", limit), f"kernel {fn} grid dimension {axis} is larger than {limit}")
            some = g.test("sgt", 0)
            nonzero = nonzero & some if nonzero else some
        with w.when(nonzero):  # an empty grid is not launched (cuLaunchKernel would reject it)
            self._launch(s, kernel, k, grid)

    def _launch(self, s: Launch, kernel: Any, k: int, grid: list[Value]) -> None:
        w, fn = self.w, self.sig.name
        self._check_cluster(s, grid)
        space = workspaces.Workspaces(w, kernel.workspaces, self.wide, self.api) if kernel.workspaces else None
        if space is not None:
            self._allocate(space, "its workspace")
        array = self._arguments(kernel, space.cells() if space is not None else [])
        slot = w.place("@tl_functions", self.index + k * MAX_DEVICES, "ptr")
        shape = [g.to("trunc", "i32") for g in grid] + [str(t) for t in s.threads]
        shared = kernel.shared_bytes
        if isinstance(shared, Expr):
            size = self.wide(shared)
            w.check(size.test("ule", self.owner.shared_limit),
                    f"kernel {fn} needs more shared memory than the {self.owner.shared_limit} bytes a block may have")
            shared = size.to("trunc", "i32")
        call = self._attributed if launch_attributes(s) or self.api is CUDA and window_of(s) else self._plain
        with_grid = call(s, [*shape, str(shared)], array)
        self._in_context(lambda: w.ins(f"call i32 {with_grid(w.at(slot, 0, 'ptr'))}"),
                         f"kernel {fn}: launch of {kernel.name} failed")
        if space is not None:
            w.cleanup.pop()()

    def _plain(self, s: Launch, words: list[str], array: str) -> Callable[[str], str]:
        """The call that launches a function.  words: grid, block, dynamic shared bytes."""
        name, given = self.api.name("cuLaunchKernel"), f"{_given(words)}, ptr {self.stream}, ptr {array}, ptr null"
        return lambda function: f"@{name}(ptr {function}, {given})"

    def _attributed(self, s: Launch, words: list[str], array: str) -> Callable[[str], str]:
        """The call that launches a function with attributes."""
        attributes = launch_attributes(s)
        if self.api is CUDA:
            config = self._config(words, attributes, window_of(s))
            return lambda function: f"@cuLaunchKernelEx(ptr {config}, ptr {function}, ptr {array}, ptr null)"
        if [number for number, _ in attributes] != [_COOPERATIVE]:
            raise error("host-statement", f"{self.api.title} has no clusters of blocks and no launches that overlap",
                        found="a launch with attributes", span=s.span,
                        hint="leave out cluster_dims, T.pdl_sync and T.pdl_trigger")
        return lambda function: f"@{self.api.cooperative}(ptr {function}, {_given(words)}, ptr {self.stream}, ptr {array})"

    def _check_cluster(self, s: Launch, grid: list[Value]) -> None:
        """Check that the cluster divides the grid: constant extents now, by check_cluster, others at each call."""
        w, dims = self.w, cluster_of(s)
        if dims is None:
            return
        check_cluster(dims, s.grid, s.span)
        for n, g, axis in zip(dims, grid, "xyz"):
            if n > 1 and not g.isdigit():
                w.check(g.op("srem", n).test("eq", 0),
                        f"kernel {self.sig.name} grid dimension {axis} is no multiple of {n}, the cluster's extent")

    def _config(self, words: list[str], attributes: list[tuple[int, tuple[int, ...]]],
                window: tuple[Buffer, float] | None) -> str:
        """A CUlaunchConfig.  words: grid, block, dynamic shared bytes.  attributes: (CUlaunchAttributeID, words).  window: the
        tensor that is kept in L2."""
        w = self.w
        count = str(len(attributes))
        records = w.slot("i64", 9 * (len(attributes) + (window is not None)))  # 72 bytes each: the id, then a value at byte 8
        if window is not None:
            record = w.ins(f"getelementptr i8, ptr {records}, i64 {72 * len(attributes)}")
            more = l2_window.put_window(w, record, window, self._start(window[0]), self.wide, self.index)
            count = more + count
        for k, (number, values) in enumerate(attributes):
            w.put(records, 72 * k, "i32", number)
            w.put_all(records, {72 * k + 8 + 4 * j: ("i32", v) for j, v in enumerate(values)})
        config = w.slot("i64", 7)
        w.put_all(config, {4 * k: ("i32", word) for k, word in enumerate(words)})
        w.put_all(config, {32: ("ptr", self.stream), 40: ("ptr", records), 48: ("i32", count)})
        return config

    def _in_context(self, call: Any, message: str) -> None:
        """Launch with the device's primary context current, because the calling thread may have none or another one."""
        w, rc = self.w, in_context(self.w, self.context, call, self.api)
        w.do(f"store i32 {rc}, ptr @tl_status")
        w.check(rc.test("eq", 0), message)

    def _arguments(self, kernel: Any, spaces: list[str]) -> str:
        """The array of pointers to parameter values that cuLaunchKernel takes.  spaces: cells that hold workspaces."""
        w = self.w
        maps = self.owner.maps[kernel.name]
        array = w.slot("ptr", max(1, len(kernel.params) + len(maps) + len(spaces)))
        for k, p in enumerate(kernel.params):
            ty, value = self._argument(p)
            cell = w.slot(ty)
            w.do(f"store {ty} {value}, ptr {cell}")
            w.put(array, 8 * k, "ptr", cell)
        for k, m in enumerate(maps, len(kernel.params)):
            w.put(array, 8 * k, "ptr", self.made.get(m) or self._tensor_map(m, True))
        for k, cell in enumerate(spaces, len(kernel.params) + len(maps)):
            w.put(array, 8 * k, "ptr", cell)
        return array

    def _early_maps(self) -> None:
        """Encode tensor maps of unconditional launches first, so that unsupported tensors are rejected before any launch."""
        for s in stmts_of(self.owner.host.body):
            for m in self.owner.maps[s.plan.name] if isinstance(s, Launch) else ():
                b = m.map.buffer
                needs = {v for d in (*b.shape, *b.strides, b.offset) if isinstance(d, Expr) for v in free_vars(d)}
                if needs <= self.values.keys() and b.data in self.addresses:
                    self.made[m] = self._tensor_map(m)

    def _start(self, buffer: Buffer) -> str:
        """Address of a tensor's first element."""
        _, address = self._argument(buffer)
        if isinstance(buffer.offset, Expr) or buffer.offset:
            return self.w.place(address, self.wide(buffer.offset) * buffer.dtype.bytes)
        return address

    def _tensor_map(self, code: TensorMapCode, late: bool = False) -> str:
        return code.emit(self.w, self.sig.name, self._start(code.map.buffer), [self.wide(e) for e in code.map.extents()],
                         [self.wide(s) for s in code.map.strides()], self.context, late)

    def _argument(self, p: Any) -> tuple[str, str]:
        w = self.w
        if isinstance(p, Buffer) or p.dtype.is_handle:
            data = p.data if isinstance(p, Buffer) else p
            if data not in self.addresses:
                raise error("host-statement", f"`{p.name}` has no address on the host",
                            expected="an address on the host", found=f"none of `{p.name}`", span=p.span)
            return "ptr", self.addresses[data]
        return narrow(w, p, self.values[p])


def _given(words: list[str]) -> str:
    return ", ".join(f"i32 {v}" for v in words)


def _allocates(s: Stmt) -> bool:
    """Whether host statements allocate device memory."""
    return isinstance(s, Alloc) or not isinstance(s, Launch) and any(
        _allocates(x) for x in children(s) if isinstance(x, Stmt))


def launch_attributes(s: Launch) -> list[tuple[int, tuple[int, ...]]]:
    """The attributes of a launch as (CUlaunchAttributeID, words of its value).

    2: cooperative (all blocks run at once, for grid barriers).  4: cluster dimensions.  6: programmatic stream serialisation.

    Source: CUDA Driver API, "CUlaunchAttributeID".
    """
    out: list[tuple[int, tuple[int, ...]]] = []
    if s.plan.cooperative:
        out.append((_COOPERATIVE, (1,)))
    cluster = cluster_of(s)
    if cluster is not None:
        out.append((4, cluster))
    if s.plan.pdl:
        out.append((6, (1,)))
    return out


def narrow(w: Writer, var: Var, value: str) -> tuple[str, str]:
    """(type, value) of a scalar in the width its variable declares, from the i64 or double the frame holds."""
    dt = var.dtype
    if dt.is_float and (dt.base == "bfloat16" or dt.is_float8):
        return code_of(w, dt, value)
    ty = "i8" if dt.is_bool else scalar_type(dt)
    return ty, _cut(w, ty, value, var)


def _alignments(kernels: tuple[Any, ...]) -> dict[Var, int]:
    """Storage variable of each global buffer -> alignment in bytes that its widest access requires of the base address."""
    out: dict[Var, int] = {}

    def note(buffer: Buffer, width: int) -> None:
        if buffer.scope_name == GLOBAL:
            out[buffer.data] = max(out.get(buffer.data, 1), min(width, 16))

    for kernel in kernels:
        for m in kernel.tensor_maps:
            note(m.buffer, 16)
        for n in walk(kernel.launch):
            if isinstance(n, (Load, Store)) and n.indices and isinstance(n.indices[-1], Ramp):
                note(n.buffer, n.indices[-1].lanes * n.buffer.dtype.bytes)
            elif isinstance(n, Call):
                for a in n.args:
                    if isinstance(a, AddressOf):
                        note(a.buffer, _width(n, a.buffer.dtype.bytes))
    return out


def _width(c: Call, element: int) -> int:
    """Number of bytes that an intrinsic accesses at once through an address."""
    if c.op.startswith("atomic_") or c.op == "ldg":
        return element * {"atomic_addx2": 2, "atomic_addx4": 4}.get(c.op, 1)
    return c.options.bytes if c.op == "cp_async" else 16


class CpuLauncher:
    """Calls the entry of a CPU program (codegen.cpu: `ptr entry(params…)`, null or the text of a failed assertion)."""

    device = CPU

    def __init__(self, signature: tuple[Any, ...]) -> None:
        self.parameters = signature

    def declarations(self) -> str:
        return f"declare ptr @tl_cpu_entry({', '.join(p.type for p in self.parameters)})\n"

    def alignment(self, arg: TensorArg) -> int:
        size = arg.buffer.dtype.bytes
        return max(1, size & -size)

    def emit(self, w: Writer, frame: Frame, sig: Signature) -> None:
        values, addresses = frame.values(w, "%frame"), frame.addresses(w, "%frame")
        actual = []
        for k, p in enumerate(self.parameters):
            if p.kind == "symbol":
                actual.append(f"i64 {values.get(p.var, '0')}")  # an unused symbol has no value
                continue
            arg = sig.args[k]
            if p.kind == "scalar":
                actual.append(f"{p.type} {_cut(w, p.type, values[arg.var], arg.var)}")
            else:
                actual.append(f"ptr {addresses[arg.buffer.data if isinstance(arg, TensorArg) else arg.var]}")
        text = w.ins(f"call ptr @tl_cpu_entry({', '.join(actual)})")
        with w.when(w.ins(f"icmp eq ptr {text}, null"), unless=True, likely=True):
            w.do(f"call void @TVMFFIErrorSetRaisedFromCStr(ptr {w.string('RuntimeError')}, ptr {text})")
            w.do("ret i32 -1")


def _cut(w: Writer, ty: str, value: str, var: Var) -> str:
    """A frame value (i64 or double) in a type of fewer bits."""
    wide, op = ("double", "fptrunc") if var.dtype.is_float else ("i64", "trunc")
    return value if ty == wide else w.ins(f"{op} {wide} {value} to {ty}")
