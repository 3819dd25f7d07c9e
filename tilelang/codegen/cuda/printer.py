"""CUDA C++ for kernels in phase DEVICE.  `print_kernel(kernel)` is the whole interface.

A kernel is an `extern "C" __global__` function; what it needs of prelude_*.cuh stands before it.  Shared memory is one
dynamic array with the offsets planned by transform/memory/plan_shared_memory.py.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

from tilelang.arith import value_scalars
from tilelang.errors import InternalError
from tilelang.ir import (AddressOf, Alloc, Assert, Bind, Buffer, Call, Cast, Const, Expr, For, Launch, Load, Ramp, Select,
                         Span, Store, StringConst, Var, const, dtype, follows_addresses, int_range, is_const, walk)
from tilelang.target import INTRINSICS
from tilelang.target.instructions import ATOMIC_DTYPES, call_fields
from tilelang.target.cluster import cluster_of
from tilelang.target.tensor_map import tensor_maps_of

from ..c_like import ADD, POSTFIX, PREFIX, Text, quote
from .types import KEYWORDS, TYPES, is_small_float, literal
from .values import CudaValues, lane_of
from .halves import Halves
from .hopper import HopperCalls, tensor_map_parameters
from .named_registers import declared_registers
from .prelude import device_header, words_of

SHARED_SCOPES = ("shared", "shared.dyn", "shared.barrier")
_SOURCE_SECOND = ("cp_async", "ldmatrix", "bulk_load", "bulk_store", "bulk_copy_cluster")  # their second address is only read
_LANEWISE = ("abs", "popcount", "clz", "__ffs")  # of vectors: applied to each element


class DeviceKernel(Protocol):
    """What print_kernel reads of transform.device_program.DeviceKernel."""

    name: str
    params: tuple[Any, ...]  # Buffer: pointer; Var: scalar
    launch: Launch


def print_kernel(kernel: DeviceKernel, *, fast_math: bool = False, line_directives: bool = False) -> str:
    """CUDA C++ source of a kernel: header, user's injected source, kernel.

    fast_math: print the fast variants of float32 functions (`tl.enable_fast_math`).  line_directives: each statement's
    line of the user's file as a #line directive, so that tools show it (`tl.emit_line_directives`).
    Raises NotImplementedError at the user's line for what CUDA has no form for.
    """
    return CudaPrinter(kernel, fast_math, line_directives).source()


class CudaPrinter(HopperCalls, Halves, CudaValues):
    """Prints one kernel; see print_kernel."""

    # A variable must not hide a function that a row's text calls.
    reserved = frozenset(KEYWORDS).union(re.findall(r"(?<![\w:{])([A-Za-z_]\w*)\(", "\n".join(
        t for row in INTRINSICS.values() for t in (row.cuda or {}).values())))

    def __init__(self, kernel: DeviceKernel, fast_math: bool = False, line_directives: bool = False) -> None:
        super().__init__()
        self.line_directives = line_directives
        self.namer.used.add(kernel.name)
        self.kernel, self.launch, self.fast_math = kernel, kernel.launch, fast_math
        self.offsets = {b.data: offset for b, offset in kernel.launch.plan.shared_offsets}
        self.storage: dict[Var, dtype] = {}  # element type with which a storage was declared
        self.scalars: set[Var] = set()  # storages that are plain variables (local.var)
        self.extra = set()
        self._differences = set()
        self.valued = set()
        self.own_names, self.own_registers, self.own_functions = {}, {}, {}

    # ---- the kernel ---------------------------------------------------------------------------------------------
    def source(self) -> str:
        own = self.launch.plan.cuda_source
        if own:  # the user's kernel (T.CUDASourceCodeKernel): types and functions it may name, and its text
            own = "".join(t.rstrip() + "\n" for t in (*self.launch.plan.import_source, own) if t)
            return self._header("", own) + own
        self._written = _written_storages(self.launch) | _taken_storages(self.launch)
        # An address that the kernel computes or reads may lead into any tensor.
        self._free = follows_addresses(self.launch)
        signature = self._signature()
        self.depth = 1
        self._thread_indices()
        if self.offsets:
            self.emit("extern __shared__ __align__(1024) unsigned char smem[];")
        top = len(self.lines)
        self.stmt(self.launch.body)
        declared = declared_registers(self.own_registers)
        if declared:
            self.lines.insert(top, f"  {declared}")
        body = "\n".join([signature + " {", *self.lines, "}"]) + "\n"
        injected = "".join(t.rstrip() + "\n" for t in self.launch.plan.import_source if t)
        return self._header(body, injected) + injected + body

    def _header(self, body: str, injected: str) -> str:
        own = "".join(self.own_functions.values())
        named = words_of(body)
        words = named | words_of(injected) | self.extra
        functions = device_header(words | words_of(own)) + own
        named |= words_of(functions)
        out = self.headers(words | named, injected, named)
        out.append("#define TL_DEVICE __device__ __forceinline__")
        if functions:
            out += ["namespace tl {", functions.rstrip(), "}  // namespace tl"]
        return "\n".join(out) + "\n\n"

    def _signature(self) -> str:
        bounds = [str(self.launch.num_threads), str(self.launch.plan.min_blocks_per_sm)]
        params = ", ".join([*map(self._parameter, self.kernel.params), *tensor_map_parameters(self),
                            *map(self._workspace, getattr(self.kernel, "workspaces", ()))])
        cluster = cluster_of(self.launch)
        dims = f"__cluster_dims__({', '.join(map(str, cluster))}) " if cluster is not None else ""
        return f'extern "C" __global__ void {dims}__launch_bounds__({", ".join(bounds)}) {self.kernel.name}({params})'

    def _parameter(self, p: Any) -> str:
        if isinstance(p, Buffer):
            self.storage[p.data] = p.dtype
            read_only = "" if p.data in self._written else "const "
            free = self._free or p.name in self.launch.plan.may_alias
            alone = "" if free else " __restrict__"
            return f"{read_only}{self.type_name(p.dtype, p.span)}*{alone} {self.namer(p.data, p.name)}"
        return f"{self.type_name(p.dtype, p.span)} {self.namer(p, p.name)}"

    def _workspace(self, b: Buffer) -> str:
        self.storage[b.data] = b.dtype
        name = b.name if b.facts.zeroed else self.namer(b.data, b.name)
        return f"{self.type_name(b.dtype, b.span)}* __restrict__ {name}"

    def _thread_indices(self) -> None:
        launch = self.launch
        used = {x for x in walk(launch.body, Var)}
        for var in value_scalars(launch, self.kernel.params):
            self.facts.bind(var, *int_range(var.dtype))
            self.data_vars.add(var)
        opaque = {x.args[0] for x in walk(launch.body, Call) if x.op == "make_opaque"}
        for var, n, axis in zip(launch.thread_vars, launch.threads, "xyz"):
            self.facts.bind(var, 0, n - 1)
            if var in used:
                kind = "int" if var in opaque else "const int"
                self.emit(f"{kind} {self.namer(var, var.name)} = threadIdx.{axis};")
        for var, extent in zip(launch.block_vars, launch.grid):
            high = self.facts.interval(extent)[1]
            self.facts.bind(var, 0, 2**31 - 2 if high is None else max(0, min(high - 1, 2**31 - 2)))
        swizzle = launch.plan.swizzle
        if swizzle and len(launch.block_vars) >= 2:
            self._swizzled_blocks(*swizzle)
        for var, axis in zip(launch.block_vars, "xyz"):
            if var in used and var not in self.namer.names:
                self.emit(f"const int {self.namer(var, var.name)} = blockIdx.{axis};")

    def _swizzled_blocks(self, panel: int, order: Any) -> None:
        """Blocks in panels of `panel` rows (order "row") or columns, each walked back and forth, for L2 reuse."""
        bx, by = (self.namer(v, v.name) for v in self.launch.block_vars[:2])
        row = order != "column"
        if cluster_of(self.launch) is not None:
            self._swizzled_clusters(panel, row)
            return
        across, along = ("x", "y") if row else ("y", "x")
        first, second = (bx, by) if row else (by, bx)
        self.emit(f"// blocks in panels of {panel} {'rows' if row else 'columns'}")
        for line in (
                f"const unsigned block_ = blockIdx.x + gridDim.x * blockIdx.y, panel_ = {panel}u * gridDim.{across};",
                f"const unsigned start_ = block_ / panel_ * {panel}u, in_ = block_ % panel_;",
                f"const unsigned width_ = min({panel}u, gridDim.{along} - start_);",
                f"const int {second} = start_ + in_ % width_;",
                f"const int {first} = start_ / {panel}u % 2u ? gridDim.{across} - 1 - in_ / width_ : in_ / width_;"):
            self.emit(line)

    def _swizzled_clusters(self, panel: int, row: bool) -> None:
        """The same walk over clusters: the blocks of one stay neighbours."""
        names = [self.namer(v, v.name) for v in self.launch.block_vars[:2]]
        cx, cy, _ = cluster_of(self.launch) or (1, 1, 1)
        first, second = ("cx_", "cy_") if row else ("cy_", "cx_")
        across, along = ("nx_", "ny_") if row else ("ny_", "nx_")
        self.emit(f"// clusters in panels of {panel} {'rows' if row else 'columns'}")
        for line in (
                f"const unsigned nx_ = gridDim.x / {cx}u, ny_ = gridDim.y / {cy}u;",
                f"const unsigned cluster_ = blockIdx.x / {cx}u + nx_ * (blockIdx.y / {cy}u), panel_ = {panel}u * {across};",
                f"const unsigned start_ = cluster_ / panel_ * {panel}u, in_ = cluster_ % panel_;",
                f"const unsigned width_ = min({panel}u, {along} - start_);",
                f"const unsigned {second} = start_ + in_ % width_;",
                f"const unsigned {first} = start_ / {panel}u % 2u ? {across} - 1 - in_ / width_ : in_ / width_;",
                f"const int {names[0]} = cx_ * {cx}u + blockIdx.x % {cx}u;",
                f"const int {names[1]} = cy_ * {cy}u + blockIdx.y % {cy}u;"):
            self.emit(line)

    def _for(self, s: For) -> None:
        if s.plan.registers:
            self.on_registers(s)
            return
        super()._for(s)

    # ---- types and literals -----------------------------------------------------------------------------------------
    def type_name(self, dt: dtype, span: Span | None = None) -> str:
        name = TYPES.get(dt.base)
        if name is None:
            raise self.unsupported(f"element type {dt}", None, span=span)
        return name if dt.lanes == 1 else f"tl::vec<{name}, {dt.lanes}>"

    def literal(self, e: Const) -> Text:
        self.type_name(e.dtype, e.span)  # refuses types without a form
        text, level = literal(e)
        if "TL_" in text:
            self.extra.add("infinity")
        return text, level

    # ---- memory ---------------------------------------------------------------------------------------------------
    def alloc(self, s: Alloc) -> None:
        b = s.buffer
        if b.scope_name == "global" and b.data in self.storage:
            return  # a workspace: the host passes it
        name, ctype = self.namer(b.data, b.name), self.type_name(b.dtype, s.span or b.span)
        self.storage[b.data] = b.dtype
        if b.scope_name in SHARED_SCOPES:
            if b.data in self.offsets:
                offset = self.offsets[b.data]
                where = self.at(offset, ADD + 1) if isinstance(offset, Expr) else str(offset)
                self.emit(f"{ctype}* const {name} = reinterpret_cast<{ctype}*>(smem + {where});")
            elif b.scope_name == "shared.barrier" and self.offsets:  # a static one would shift the aligned dynamic array
                raise InternalError(f"the barriers `{b.name}` have no place beside the other shared buffers")
            else:
                self.emit(f"__shared__ __align__(128) {ctype} {name}[{b.size}];")
        elif b.scope_name == "local.var" or (b.scope_name == "local" and s.init is not None and b.size == 1):
            self.scalars.add(b.data)
            zero = "{}" if b.dtype.lanes > 1 else self.top(const(0, b.dtype))  # without a first value it starts at zero
            self.emit(f"{ctype} {name} = {self.top(s.init) if s.init is not None else zero};")
        elif b.scope_name == "local":
            self.emit(f"alignas(16) {ctype} {name}[{b.size}];")
        else:
            raise self.unsupported(f"a {b.scope_name} buffer", s)

    def _place(self, b: Buffer, index: Expr) -> str:
        """b[index] as an lvalue of the buffer's element type."""
        name = self.namer(b.data, b.name)
        if b.data in self.scalars:
            return name if self.storage[b.data] == b.dtype else f"reinterpret_cast<{self.type_name(b.dtype)}&>({name})"
        declared = self.storage.get(b.data)
        if declared != b.dtype:  # another view of it, or an address computed here
            const_ = "" if b.data in self._written or b.scope_name != "global" else "const "
            name = f"reinterpret_cast<{const_}{self.type_name(b.dtype)}*>({name})"
        return f"{name}[{self.top(index)}]"

    def _element(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        return self._place(b, self.flat_index(b, indices))

    def address(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        return "&" + self._element(b, indices)

    def _vector_base(self, indices: tuple[Expr, ...], b: Buffer) -> tuple[Expr, ...] | None:
        """Indices of the first lane when the access is one contiguous vector, else None."""
        *rest, last = indices
        if isinstance(last, Ramp) and is_const(last.stride, 1) and all(i.dtype.lanes == 1 for i in rest) \
                and b.strides[-1] == 1:
            return (*rest, last.base)
        return None

    def load(self, e: Load) -> Text:
        if all(i.dtype.lanes == 1 for i in e.indices):
            return self._element(e.buffer, e.indices), POSTFIX
        base = self._vector_base(e.indices, e.buffer)
        if base is not None:
            return f"tl::load<{self._lane_args(e.dtype)}>({self.address(e.buffer, base)})", POSTFIX
        lanes = [self._element(e.buffer, tuple(lane_of(i, k) for i in e.indices)) for k in range(e.dtype.lanes)]
        return f"{self.type_name(e.dtype)}{{{{{', '.join(lanes)}}}}}", POSTFIX

    def store(self, s: Store) -> None:
        if all(i.dtype.lanes == 1 for i in s.indices):
            to = self._element(s.buffer, s.indices)
            if isinstance(s.value, Call) and s.value.op == "opaque_copy" and s.value.dtype == "uint64":
                self.emit(f"tl::computed_here({to}, {self.top(s.value.args[0])});")
            else:
                self.emit(f"{to} = {self.moved(s) or self.top(s.value)};")
            return
        base, v = self._vector_base(s.indices, s.buffer), s.value
        if base is None:
            self._scatter(s)
            return
        to, args = self.address(s.buffer, base), self._lane_args(s.value.dtype)
        source = self._vector_base(v.indices, v.buffer) if isinstance(v, Load) else None
        if source is not None:
            self.emit(f"tl::copy<{args}>({to}, {self.address(v.buffer, source)});")  # type: ignore[attr-defined]
        elif isinstance(v, Call) and v.op == "pack_pairs":
            floats: Any = v.args[0]
            source = self._vector_base(floats.indices, floats.buffer)
            self.emit(self.packing(v.dtype, v.dtype.lanes, to, self.address(floats.buffer, source)))
        elif any(x.op == "dequantise_pair" for x in walk(v, Call)):
            self.valued.add("float16")
            self.emit(f"*reinterpret_cast<__half2*>({to}) = {self.pair(v)};")
        else:
            self.emit(f"tl::store<{args}>({to}, {self.top(v)});")

    def _scatter(self, s: Store) -> None:
        name = self.namer(s, f"{s.buffer.name}_lanes")
        self.emit(f"const {self.type_name(s.value.dtype)} {name} = {self.top(s.value)};")
        for k in range(s.value.dtype.lanes):
            at = self._element(s.buffer, tuple(lane_of(i, k) for i in s.indices))
            self.emit(f"{at} = {name}.v[{k}];")

    # ---- values ---------------------------------------------------------------------------------------------------
    def expr(self, e: Expr) -> Text:
        return (self.address(e.buffer, e.indices), PREFIX) if isinstance(e, AddressOf) else super().expr(e)

    # ---- calls ----------------------------------------------------------------------------------------------------
    def select_both(self, e: Select) -> Text:
        t = self.type_name(e.dtype)
        return f"tl::select_both<{t}>{{{self.top(e.cond)}, ({t})({self.top(e.a)}), ({t})({self.top(e.b)})}}.pick()", POSTFIX

    def call(self, e: Call) -> Text:
        special = getattr(self, f"_call_{e.op}", None)
        if special is not None:
            return special(e)
        row = INTRINSICS.get(e.op)
        if row is None or row.cuda is None:
            raise self.unsupported(f"the function `{e.op}`", e)
        args = [self.top(a) for a in e.args]
        dt = e.args[0].dtype if e.args else e.dtype
        if e.op.startswith("atomic_"):
            self._check_atomic(e)
        if e.op in ("cp_async", "ldmatrix", "stmatrix", "mma") or dt.is_handle or "*" in row.cuda:
            text = row.cuda.get(dt.base, row.cuda.get("*", ""))
            if not text:
                raise self.unsupported(f"the function `{e.op}` on {dt}", e)
            if dt.lanes > 1 and e.op in _LANEWISE:
                return f"tl::map([](auto a) {{ return {text.format('a')}; }}, {args[0]})", POSTFIX
            fields = call_fields(e, args)
            fields["dtype"] = self.type_name(e.dtype) if e.dtype.kind != "v" else ""
            return text.format(*args, args=", ".join(args), **fields), POSTFIX
        return self._math_call(e, row, args, dt)

    def _math_call(self, e: Call, row: Any, args: list[str], dt: dtype) -> Text:
        """A float function: on the type itself where the row has it, else in float32 and rounded once."""
        fields = {} if e.options is None else {"rounding_mode": e.options.rounding_mode}
        base = "float32" if dt.base == "tfloat32" else dt.base
        through_float = base not in row.cuda and is_small_float(dt)
        text = row.cuda.get("float32" if through_float else base)
        if self.fast_math and row.fast and (through_float or base == "float32"):
            text = row.fast
        if text is None:
            raise self.unsupported(f"the function `{e.op}` on {dt}", e, "cast the argument to float32")
        if dt.lanes == 1:
            if through_float:
                args = [f"(float){self._grouped(a)}" if x.dtype.is_float else a for a, x in zip(args, e.args)]
                inner = text.format(*args, **fields)
                return self._to(e.dtype, inner) if e.dtype.is_float else (inner, POSTFIX)
            return text.format(*args, **fields), POSTFIX
        names = ["a", "b", "c"][:len(args)]
        inner = text.format(*(f"(float){n}" if through_float and x.dtype.is_float else n
                              for n, x in zip(names, e.args)), **fields)
        params = ", ".join(f"auto {n}" for n in names)
        result = self._to(e.dtype.scalar, inner)[0]
        return f"tl::map([]({params}) {{ return {result}; }}, {', '.join(args)})", POSTFIX

    @staticmethod
    def _grouped(text: str) -> str:
        return text if re.fullmatch(r"[\w.]+(\[[^\[\]]*\])?", text) else f"({text})"

    def _check_atomic(self, e: Call) -> None:
        buffer = e.args[0].buffer if isinstance(e.args[0], AddressOf) else None
        if buffer is not None and buffer.dtype.base not in ATOMIC_DTYPES:
            raise self.unsupported(f"`{e.op}` on {buffer.dtype}", e, f"atomics exist for {', '.join(ATOMIC_DTYPES)}")

    def _call_printf(self, e: Call) -> Text:
        args = [self.top(a) if isinstance(a, StringConst) or not is_small_float(a.dtype)
                else f"(float){self.at(a, PREFIX)}" for a in e.args]
        return f"printf({', '.join(args)})", POSTFIX

    def _call_thread_return(self, e: Call) -> Text:
        return "return", POSTFIX

    def _call_call_extern(self, e: Call) -> Text:
        name, *args = e.args
        if not isinstance(name, StringConst):
            raise self.unsupported("call_extern without a name", e)
        return f"{name.value}({', '.join(self.top(a) for a in args)})", POSTFIX

    _call_call_pure_extern = _call_call_extern

    # ---- assertions -------------------------------------------------------------------------------------------------
    def device_assert(self, s: Assert) -> None:
        head = "" if s.message.startswith("Device assert failed") else "Device assert failed: "
        text = f"{head}{s.message}\n"
        self.emit(f"if (!({self.top(s.cond)})) tl::assert_failed({quote(text)});")


def _taken_storages(launch: Launch) -> set[Var]:
    """Storages whose address the kernel has as a number or a pointer of its own: they may be written by it."""
    out: set[Var] = set()
    for x in walk(launch.body, Bind, Cast, Call):
        value = x.value if isinstance(x, (Bind, Cast)) else x.args[0] if isinstance(x, Call) and x.op == "reinterpret" else None
        if isinstance(value, AddressOf):
            out.add(value.buffer.data)
        elif isinstance(value, Var) and value.dtype.is_handle:
            out.add(value)
    return out


def _written_storages(launch: Launch) -> set[Var]:
    """Storages that the kernel may write: stored to, or given by address to anything but a copy's source."""
    out: set[Var] = set()
    maps = {m.name: m.buffer.data for m in tensor_maps_of(launch)}
    for x in walk(launch.body, Store, Call):
        if isinstance(x, Store):
            out.add(x.buffer.data)
        else:
            row = INTRINSICS.get(x.op)
            read_only = row is not None and row.effect in ("pure", "reads")
            for i, a in enumerate(x.args):
                if isinstance(a, AddressOf) and not read_only and not (x.op in _SOURCE_SECOND and i == 1):
                    out.add(a.buffer.data)
            if x.op in ("tma_store", "tma_reduce_add") and x.options.map in maps:
                out.add(maps[x.options.map])
    return out


__all__ = ["CudaPrinter", "DeviceKernel", "print_kernel"]
