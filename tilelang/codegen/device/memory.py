"""Buffers in CUDA text: declarations, elements, loads and stores."""

from __future__ import annotations

from typing import Any

from tilelang.arith import flat_index, lane_of, vector_base
from tilelang.errors import InternalError
from tilelang.ir import (AddressOf, Alloc, Bind, Binary, Broadcast, Buffer, Call, Cast, Expr, Launch, Load, Store, Var, const,
                         dtype, follows_addresses, walk, BARRIER, DYNAMIC, GLOBAL, LOCAL, STATIC, VARIABLE)
from tilelang.target.instructions import written_storages

from .page import Expressions
from .text import ADD, POSTFIX, PREFIX, Text
from .types import HALVES, lane_args, type_name, unsupported

SHARED_SCOPES = (STATIC, DYNAMIC, BARRIER)

_WIDE = "float8_e5m2"  # the float8 type of more exponents

class Memory:
    """Registers the text of loads and addresses; prints allocations and stores.

    offsets: byte offsets of buffers in shared memory. written: storages that the kernel may write.
    """

    def __init__(self, x: Expressions, launch: Launch) -> None:
        self.x, self.page = x, x.page
        self.offsets: dict[Var, Any] = {b.data: offset for b, offset in launch.plan.shared_offsets}
        self.written = written_storages(launch) | _taken_storages(launch)
        # An address that the kernel computes or reads may point into any tensor.
        self._may_alias = None if follows_addresses(launch) else frozenset(launch.plan.may_alias)
        self._types: dict[Var, dtype] = {}  # element type that a storage was declared with
        self._scalars: set[Var] = set()  # storages that are plain variables (local.var)
        x.forms.update({Load: self._load, AddressOf: lambda e: (self.address(e.buffer, e.indices), PREFIX)})

    def parameter(self, b: Buffer) -> str:
        """The declaration of a tensor parameter."""
        self._types[b.data] = b.dtype
        read_only = "" if b.data in self.written else "const "
        alone = "" if self._may_alias is None or b.name in self._may_alias or b.facts.symmetric else " __restrict__"
        return f"{read_only}{type_name(b.dtype, b.span)}*{alone} {self.page.name(b.data, b.name)}"

    def workspace(self, b: Buffer) -> str:
        """The declaration of a workspace, which the host passes."""
        self._types[b.data] = b.dtype
        name = b.name if b.name == "grid_barrier_" else self.page.name(b.data, b.name)  # named by an instruction
        return f"{type_name(b.dtype, b.span)}* __restrict__ {name}"

    def alloc(self, s: Alloc) -> None:
        """The declaration of a buffer."""
        b = s.buffer
        if b.scope_name == GLOBAL and b.data in self._types:
            return  # a workspace: the host passes it
        name, ctype = self.page.name(b.data, b.name), type_name(b.dtype, s.span or b.span)
        self._types[b.data] = b.dtype
        if b.scope_name in SHARED_SCOPES:
            if b.data in self.offsets:
                offset = self.offsets[b.data]
                where = self.x.at(offset, ADD + 1) if isinstance(offset, Expr) else str(offset)
                self.page.emit(f"{ctype}* const {name} = reinterpret_cast<{ctype}*>(smem + {where});")
            elif b.scope_name == BARRIER and self.offsets:  # a static one would shift the aligned dynamic array
                raise InternalError(f"the barriers `{b.name}` have no place beside the other shared buffers")
            else:
                self.page.emit(f"__shared__ __align__(128) {ctype} {name}[{b.size}];")
        elif b.scope_name == VARIABLE or (b.scope_name == LOCAL and s.init is not None and b.size == 1):
            self._scalars.add(b.data)
            zero = "{}" if b.dtype.lanes > 1 else self.x.top(const(0, b.dtype))  # without a first value it starts at zero
            self.page.emit(f"{ctype} {name} = {self.x.top(s.init) if s.init is not None else zero};")
        elif b.scope_name == LOCAL:
            self.page.emit(f"alignas(16) {ctype} {name}[{b.size}];")
        else:
            raise unsupported(f"a {b.scope_name} buffer", s)

    def _place(self, b: Buffer, index: Expr) -> str:
        """b[index] as an lvalue of the buffer's element type."""
        name = self.page.name(b.data, b.name)
        if b.data in self._scalars:
            return name if self._types[b.data] == b.dtype else f"reinterpret_cast<{type_name(b.dtype)}&>({name})"
        declared = self._types.get(b.data)
        if declared != b.dtype:  # another view of it, or an address computed here
            const_ = "" if b.data in self.written or b.scope_name != GLOBAL else "const "
            name = f"reinterpret_cast<{const_}{type_name(b.dtype)}*>({name})"
        return f"{name}[{self.x.top(index)}]"

    def element(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        """b[indices] as an lvalue."""
        return self._place(b, flat_index(b, indices))

    def address(self, b: Buffer, indices: tuple[Expr, ...]) -> str:
        """Pointer to b[indices]."""
        return "&" + self.element(b, indices)

    def _load(self, e: Load) -> Text:
        if all(i.dtype.lanes == 1 for i in e.indices):
            return self.element(e.buffer, e.indices), POSTFIX
        base = vector_base(e.buffer, e.indices)
        if base is not None:
            return f"tl::load<{lane_args(e.dtype)}>({self.address(e.buffer, base)})", POSTFIX
        lanes = [self.element(e.buffer, tuple(lane_of(i, k) for i in e.indices)) for k in range(e.dtype.lanes)]
        return f"{type_name(e.dtype)}{{{{{', '.join(lanes)}}}}}", POSTFIX

    def shifted(self, e: Call) -> Text:
        """A vector that may start at any element of a tensor."""
        b, at = e.args[0].buffer, e.args[0].indices  # type: ignore[attr-defined]
        start = self._place(b, const(0))
        return f"tl::load_shifted<{lane_args(e.dtype)}>(&{start}, {self.x.top(flat_index(b, at))})", POSTFIX

    def store(self, s: Store) -> None:
        """Print a store of one element or of a vector."""
        if all(i.dtype.lanes == 1 for i in s.indices):
            self._store_element(s)
            return
        base = vector_base(s.buffer, s.indices)
        if base is None:
            self._scatter(s)
        else:
            self._store_vector(self.address(s.buffer, base), s.value)

    def _store_element(self, s: Store) -> None:
        to = self.element(s.buffer, s.indices)
        self.page.emit(f"{to} = {self._moved(s) or self.x.top(s.value)};")

    def _store_vector(self, to: str, v: Any) -> None:
        """Print a store of a vector of adjacent elements, from the address `to` on."""
        source = self._vector_address(v) if isinstance(v, Load) else None
        if source is not None:
            self.page.emit(f"tl::copy<{lane_args(v.dtype)}>({to}, {source});")
        elif isinstance(v, Call) and v.op == "pack_pairs":
            name = {"float16": "half", "float32": "float"}.get(v.dtype.base, "bfloat16")
            if v.args[0].dtype.is_int:
                self.page.worked_with.add(v.dtype.base)
            base = v.args[0].dtype.base
            narrow = base.startswith("float8")
            does = f"{name}_of_bytes" if v.args[0].dtype.is_int else f"{name}_of_float8" if narrow else f"pack_{name}"
            shape = f"{v.dtype.lanes}, {str(base == _WIDE).lower()}" if narrow else str(v.dtype.lanes)
            self.page.emit(f"tl::{does}<{shape}>({to}, {self._vector_address(v.args[0])});")
        elif isinstance(v, Call) and v.op == "codes_taken":
            high, (packed, table) = str(v.options.high).lower(), v.args
            of = f"take_codes_of<{high}>" if v.dtype.lanes == 2 else f"take_codes<{v.dtype.lanes}, {high}>"
            codes = self.x.top(packed) if v.dtype.lanes == 2 else self._vector_address(packed)
            self.page.emit(f"tl::{of}({to}, {codes}, {self._vector_address(table)});")
        elif any(x.op == "dequantise_pair" for x in walk(v, Call)):
            self.page.worked_with.add(v.dtype.base)
            pair = "__half2" if v.dtype.base == "float16" else "__nv_bfloat162"
            self.page.emit(f"*reinterpret_cast<{pair}*>({to}) = {self._pair(v)};")
        else:
            self.page.emit(f"tl::store<{lane_args(v.dtype)}>({to}, {self.x.top(v)});")

    def _vector_address(self, e: Any) -> str | None:
        """The address of the first element of a loaded vector of adjacent elements; None for other vectors."""
        base = vector_base(e.buffer, e.indices)
        return None if base is None else self.address(e.buffer, base)

    def _scatter(self, s: Store) -> None:
        name = self.page.name(s, f"{s.buffer.name}_lanes")
        self.page.emit(f"const {type_name(s.value.dtype)} {name} = {self.x.top(s.value)};")
        for k in range(s.value.dtype.lanes):
            at = self.element(s.buffer, tuple(lane_of(i, k) for i in s.indices))
            self.page.emit(f"{at} = {name}.v[{k}];")

    def _moved(self, s: Store) -> str | None:
        """The element that a store copies unchanged; None for other stores."""
        v = s.value
        if not isinstance(v, Load) or v.dtype.base not in HALVES or v.dtype.lanes > 1 or v.dtype != s.buffer.dtype:
            return None
        return self.element(v.buffer, v.indices)

    def _pair(self, e: Expr) -> str:
        """The text of a pair of 16-bit floats: weights of one byte, times factors that both have."""
        half = e.dtype.base == "float16"
        if isinstance(e, Binary):
            return f"__h{e.op}2({self._pair(e.a)}, {self._pair(e.b)})"
        if isinstance(e, Broadcast):
            return f"{'__half2half2' if half else '__bfloat162bfloat162'}({self.x.top(e.value)})"
        byte, *zero_point = e.args  # type: ignore[attr-defined]
        zero = "".join(f", tl::small_half<0>({self.x.top(x)})" if half else f", {self.x.top(x)}" for x in zero_point)
        o = e.options  # type: ignore[attr-defined]
        return f"tl::coded_pair{'' if half else '_bfloat16'}<{o.low}, {o.high}, {o.mask}>({self.x.top(byte)}{zero})"


def _taken_storages(launch: Launch) -> set[Var]:
    """The storages whose address the kernel holds as a number or a pointer; the kernel may write them."""
    out: set[Var] = set()
    for x in walk(launch.body, Bind, Cast, Call):
        value = x.value if isinstance(x, (Bind, Cast)) else x.args[0] if isinstance(x, Call) and x.op == "reinterpret" else None
        if isinstance(value, AddressOf):
            out.add(value.buffer.data)
        elif isinstance(value, Var) and value.dtype.is_handle:
            out.add(value)
    return out
