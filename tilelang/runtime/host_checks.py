"""Emits the host function `prepare`, which checks the inputs, computes the shape symbols and fills the frame."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from tilelang.ir import Buffer, Expr, Load, Var, convert, free_vars, int_range, walk
from tilelang.target.llvm_values import Value

from .host_frame import (BOOL, CPU, CUDA, CUDA_HOST, CUDA_MANAGED, FLOAT, INT, NONE, POINTER, ROCM, Frame, Launcher, data_of,
                         dltensor_of, dtype_bits, is_a_tensor, is_packed)
from .llvm_text import HostExpr, Writer, any_of, has_infinity, rounded_to, size_of, text_of
from .signature import PointerArg, ScalarArg, Signature, Solve, TensorArg
from .size_checks import SizeCheck

# a launcher's device -> its name, DLPack's types of memory that it can use (tensors of torch for ROCm say "cuda" and are ROCM)
_MEMORY = {CPU: ("cpu", (CPU, CUDA_HOST)), CUDA: ("cuda", (CUDA, CUDA_MANAGED)), ROCM: ("rocm", (ROCM,))}


def reject_overlaps(stub: Any) -> None:
    """Emit checks at the end of `prepare` (stub: a host_checks.Prepare) that each pair of stub.disjoint is disjoint."""
    w = stub.w
    named = {a.name: a for a in stub.sig.inputs if a.index in stub.data}
    bounds: dict[str, tuple[Value, Value]] = {}
    for pair in stub.disjoint:
        if not all(n in named for n in pair):
            continue  # the caller does not pass it, or the program never accesses it
        for n in pair:
            if n not in bounds:
                a = named[n]
                bounds[n] = _bounds(stub, a) if isinstance(a, TensorArg) else _reach(stub, a)
        (low, high), (other_low, other_high) = (bounds[n] for n in pair)
        w.check(high.test("ule", other_low) | other_high.test("ule", low),
                f"kernel {stub.sig.name} input {pair[1]} overlaps input {pair[0]}, which is written before it is read")


def _reach(stub: Any, a: PointerArg) -> tuple[Value, Value]:
    """(first address, end address) of the memory that the program accesses through a pointer parameter.

    The end covers all buffers that the program makes of the pointer.  A buffer whose size only the kernel knows counts as one
    byte.
    """
    low = stub.data[a.index].to("ptrtoint", "i64")
    high = low + 1
    known = {*stub.scalars}
    for b in stub.made.get(a.name, ()):
        if not free_vars(b) <= known or any(isinstance(x, Load) for d in b.exprs for x in walk(d)):
            continue
        size, step = stub.expr(convert(b.offset)), stub.w.of("i64", "1")
        for d in reversed(range(len(b.shape))):
            n = stub.expr(convert(b.shape[d]))
            stride = step if b.strides_ is None else stub.expr(convert(b.strides_[d]))
            size = size + (n - 1) * stride
            step = step * n
        end = low + (size + 1) * max(1, b.dtype.bytes)
        high = end.test("ugt", high).select(end, high)
    return low, high


def _bounds(stub: Any, a: TensorArg) -> tuple[Value, Value]:
    """(first address, end address) of a tensor."""
    dt = a.buffer.dtype
    low = high = stub.data[a.index].to("ptrtoint", "i64")
    for d in range(len(a.buffer.shape)):
        reach = (stub._extent(a, d) - 1) * (stub._stride(a, d) * (dt.bits * dt.lanes))
        reach = reach.op("sdiv", 8)  # rounds packed types down by less than a byte, which is added below
        back = reach.test("slt", 0)
        low, high = low + back.select(reach, 0), high + back.select(0, reach)
    return low, stub.empty[a.index].select(low, high + max(1, dt.bytes))


class Prepare:
    """The text of `prepare`: all checks of the inputs, then the stores to the frame."""

    def __init__(self, sig: Signature, launcher: Launcher, needed: set[Var],
                 assumptions: tuple[Expr, ...] = (), disjoint: tuple[tuple[str, str], ...] = (),
                 made: Mapping[str, tuple[Buffer, ...]] | None = None, sizes: tuple[SizeCheck, ...] = ()) -> None:
        self.sig, self.launcher, self.needed, self.assumptions = sig, launcher, needed, assumptions
        self.sizes = sizes
        self.disjoint, self.made = disjoint, made or {}
        self.data: dict[int, Value] = {}  # parameter index -> address of its first element
        self.w = Writer()
        self.scalars: dict[Var, Value] = {}
        self.expr = HostExpr(self.w, self.scalars, sig.name)
        self.frame = Frame(sig)
        self.device: Value | None = None  # device id of the first tensor
        self.tensors: dict[int, str] = {}  # parameter index -> address of its DLTensor
        self.shapes: dict[int, Value] = {}
        self.strides: dict[int, Value] = {}
        self.null: dict[int, Value] = {}  # parameter index -> i1 "None was passed" (tensors never touched)
        self.empty: dict[int, Value] = {}
        self.maybe: dict[Var, tuple[str, str]] = {}  # symbol -> (value slot, flag slot)

    def build(self, name: str) -> str:
        w = self.w
        for k, a in enumerate(self.sig.inputs):
            slot = w.ins(f"getelementptr i8, ptr %args, i64 {16 * k}") if k else "%args"
            if isinstance(a, ScalarArg):
                self._scalar(a, slot)
            elif isinstance(a, PointerArg):
                self._pointer(a, slot)
            elif a.used:
                self._tensor(a, slot)
            else:
                self._optional_tensor(a, slot)
        self._solve()
        for a in self.sig.inputs:
            if isinstance(a, TensorArg):
                self._late_checks(a)
        reject_overlaps(self)
        exact = HostExpr(w, self.scalars, self.sig.name, wrap=True)
        for e in self.assumptions:
            at = "" if e.span is None else f" (T.assume at {os.path.basename(e.span.file)}:{e.span.line})"
            w.check(exact.boolean(e), f"{self.sig.name}: Assume: {text_of(e)} does not hold{at}")
        for c in self.sizes:
            self._size(c, exact)
        for k, v in enumerate(self.sig.symbols):
            self._put(self.frame.of_symbol(k), "i64", self.scalars[v])
        w.do("ret i32 0")
        return w.function(name, "ptr %args, ptr %frame", "internal ")

    def _size(self, c: SizeCheck, exact: HostExpr) -> None:
        w = self.w
        fits = (self.expr(c.value) - c.low).test("ule", c.high - c.low)
        for condition in c.unless:
            fits = fits | exact.boolean(condition) ^ True
        w.check(fits, f"kernel {self.sig.name} size `{c.text}` is not in the range from {c.low} to {c.high}")

    def _put(self, offset: int, ty: str, value: str) -> None:
        self.w.put("%frame", offset, ty, value)

    # ---- arguments ------------------------------------------------------------------------------------------------
    def _scalar(self, a: ScalarArg, slot: str) -> None:
        w, dt = self.w, a.var.dtype
        what = f"kernel {self.sig.name} scalar {a.name}"
        kind = w.at(slot, 0, "i32")
        raw = w.at(slot, 8, "i64")
        whole = kind.test("eq", INT) | kind.test("eq", BOOL)
        if dt.is_float:
            self._float_scalar(a, kind, raw, whole, what)
            return
        if dt.is_bool:
            w.check(whole & raw.test("ule", 1), f"{what} expected boolean", "TypeError")
        elif dt.bits == 64 and dt.is_unsigned:  # larger values than int64 arrive as a pointer-sized argument
            wide = kind.test("eq", POINTER)
            w.check(whole | wide, f"{what} expected integer", "TypeError")
            w.check(raw.test("sge", 0) | wide, f"{what} expected integer of uint64, from 0", "ValueError")
        else:
            w.check(whole, f"{what} expected integer", "TypeError")
            low, high = int_range(dt)
            if dt.bits < 64:
                w.check((raw - low).test("ule", high - low),
                        f"{what} expected integer of {dt}, from {low} to {high}", "ValueError")
        self.scalars[a.var] = raw
        self._put(self.frame.of_arg(a.index), "i64", raw)

    def _float_scalar(self, a: ScalarArg, kind: Value, raw: Value, whole: Value, what: str) -> None:
        w, dt = self.w, a.var.dtype
        is_float = kind.test("eq", FLOAT)
        w.check(is_float | whole, f"{what} expected float", "TypeError")
        value = is_float.select(raw.to("bitcast", "double"), raw.to("sitofp", "double"))
        if dt.bits < 64:
            back = rounded_to(w, dt, value)
            lost, was = (size_of(x).test("oeq", math.inf) for x in (back, value))
            kept = lost ^ True
            good = was | kept if has_infinity(dt) else kept
            w.check(good, f"{what} expected float of {dt}, the value is too large", "ValueError")
            value = back  # the value that host expressions and all targets use
        self.scalars[a.var] = value
        self._put(self.frame.of_arg(a.index), "double", value)

    def _pointer(self, a: PointerArg, slot: str) -> None:
        w = self.w
        kind, raw = w.at(slot, 0, "i32"), w.at(slot, 8, "ptr")
        is_tensor = is_a_tensor(kind)
        w.check(kind.test("ule", INT) | kind.test("eq", POINTER) | is_tensor,
                f"kernel {self.sig.name} input {a.name} expected pointer or tensor handle")
        address = w.either(is_tensor, lambda: data_of(w, dltensor_of(w, kind, raw)), lambda: raw, "ptr")
        self.data[a.index] = address
        self._put(self.frame.of_arg(a.index), "ptr", address)

    def _tensor(self, a: TensorArg, slot: str) -> None:
        """Check kind, None, rank, dtype and device of a tensor that the program uses."""
        w = self.w
        kind, raw = w.at(slot, 0, "i32"), w.at(slot, 8, "ptr")
        w.check(kind.test("ne", NONE), f"{self.sig.name}.{a.name} is expected to have non-NULL pointer")
        self._handle(a, kind, raw)

    def _handle(self, a: TensorArg, kind: Value, raw: str) -> None:
        w, fn = self.w, self.sig.name
        w.check(is_a_tensor(kind), f"kernel {fn} input {a.name} expected pointer or tensor handle")
        d = dltensor_of(w, kind, raw)
        w.check(w.at(d, 16, "i32").test("eq", len(a.buffer.shape)),
                f"kernel {fn} input {a.name} ndim mismatch, expected {len(a.buffer.shape)}")
        if not is_packed(a.buffer.dtype):
            word = w.at(d, 20, "i32")
            good = any_of(word.test("eq", accepted) for accepted in dtype_bits(a.buffer.dtype))
            w.check(good, f"kernel {fn} input {a.name} dtype mismatch, expected {a.buffer.dtype}")
        self.tensors[a.index] = d
        self.shapes[a.index] = w.at(d, 24, "ptr")
        self.strides[a.index] = w.at(d, 32, "ptr")
        self._device(a, d)

    def _device(self, a: TensorArg, d: str) -> None:
        w, fn = self.w, self.sig.name
        kind = w.at(d, 8, "i32")
        wanted, found = _MEMORY[self.launcher.device]
        w.check(any_of(kind.test("eq", memory) for memory in found),
                f"kernel {fn} input {a.name} device_type mismatch, expected {wanted}")
        if not a.used:
            return
        device = w.at(d, 12, "i32")
        if self.device is None:
            self.device = device
            self._put(0, "i32", kind)
            self._put(8, "i32", device)
        elif self.launcher.device != CPU:
            w.check(device.test("eq", self.device), f"kernel {fn} input {a.name} device_id violates packed ABI constraint")

    def _optional_tensor(self, a: TensorArg, slot: str) -> None:
        """Check a tensor that the program never accesses: it may be None, but otherwise must pass the same checks."""
        w = self.w
        kind, raw = w.at(slot, 0, "i32"), w.at(slot, 8, "ptr")
        self.null[a.index] = kind.test("eq", NONE)
        dummy, held = w.slot("i8", 64), w.slot("ptr")
        w.do(f"store ptr {dummy}, ptr {held}")
        with w.when(self.null[a.index], unless=True):
            self._handle(a, kind, raw)
            w.do(f"store ptr {self.tensors[a.index]}, ptr {held}")
        self.tensors[a.index] = w.ins(f"load ptr, ptr {held}")

    # ---- shapes, strides, symbols ---------------------------------------------------------------------------------
    def _extent(self, a: TensorArg, dim: int) -> Value:
        """Logical extent of a dimension as i64 (packed types count values, not bytes)."""
        v = self.w.at(self.shapes[a.index], 8 * dim, "i64")
        return self._in_values(a, v) if is_packed(a.buffer.dtype) and dim == len(a.buffer.shape) - 1 else v

    def _in_values(self, a: TensorArg, v: Value) -> Value:
        """A number of the caller's elements of a packed tensor as a number of values."""
        dt, word = a.buffer.dtype, self.w.at(self.tensors[a.index], 20, "i32").to("zext", "i64")
        return (v * ((word >> 8 & 255) * (word >> 16))).op("udiv", dt.bits * dt.lanes)

    def _stride(self, a: TensorArg, dim: int) -> Value:
        """Stride of a dimension in elements (of packed types in values); a null stride array means compact strides."""
        base = self.strides[a.index]
        step = self.w.either(base.test("eq", "null"), lambda: self._compact(a, dim),
                             lambda: self.w.at(base, 8 * dim, "i64"), "i64")
        return self._in_values(a, step) if is_packed(a.buffer.dtype) and dim < len(a.buffer.shape) - 1 else step

    def _compact(self, a: TensorArg, dim: int) -> Value:
        step = self.w.of("i64", "1")
        for d in range(len(a.buffer.shape) - 1, dim, -1):
            step = step * self.w.at(self.shapes[a.index], 8 * d, "i64")
        return step

    def _solve(self) -> None:
        for a in self.sig.args:
            if a.index in self.tensors and a.index not in self.null:
                self._is_empty(a)
        for step in self.sig.steps:
            if isinstance(step, Solve):
                self.scalars[step.symbol] = self._solved(step)
            else:
                self._compare(step)
        if self.sig.optional:
            self._solve_optional()

    def _is_empty(self, a: TensorArg) -> None:
        zero = self.w.of("i1", "false")
        for d in range(len(a.buffer.shape)):
            zero = zero | self.w.at(self.shapes[a.index], 8 * d, "i64").test("eq", 0)
        self.empty[a.index] = zero

    def _actual(self, site: Any) -> Value:
        return self._extent(site.arg, site.dim) if site.what == "shape" else self._stride(site.arg, site.dim)

    def _message(self, site: Any, why: str = "") -> str:
        text = f"kernel {self.sig.name} input {site.arg.name} {site.what}[{site.dim}] violates packed ABI constraint"
        return text + (f", {why}" if why else f", expected {site.value!r}")

    def _solved(self, step: Solve) -> Value:
        w, site = self.w, step.site
        actual = self._actual(site)
        factor, offset = self.expr(step.factor), self.expr(step.offset)
        value = actual if offset == "0" else actual - offset
        if factor != "1":
            message = self._message(site, f"{site.value!r} has no whole {step.symbol.name} for it")
            if not factor.lstrip("-").isdigit():
                w.check(factor.test("ne", 0), message)
            w.check(value.op("srem", factor).test("eq", 0), message)
            value = value.op("sdiv", factor)
        self._fits(value, step.symbol, site)
        return value

    def _fits(self, value: Value, symbol: Var, site: Any) -> None:
        """Check that the type of the symbol can represent the value, and that an extent is not negative."""
        w, dt = self.w, symbol.dtype
        low, high = int_range(dt)
        low = 0 if site.what == "shape" or dt.is_unsigned else low
        why = f"{symbol.name} is {dt}, from {low} to {high}"
        if dt.bits >= 64:
            if low == 0:
                w.check(value.test("sge", 0), self._message(site, why))
            return
        shifted = value if low == 0 else value - low
        w.check(shifted.test("ule", high - low), self._message(site, why))

    def _compare(self, site: Any) -> None:
        same = self._actual(site).test("eq", self.expr(site.value))
        if site.what == "strides":
            same = same | self._free_stride(site.arg, site.dim)
        self.w.check(same, self._message(site))

    def _free_stride(self, a: TensorArg, dim: int) -> Value:
        """Whether a stride is irrelevant: that of a dimension of extent 1, or of a tensor without elements."""
        return self.w.at(self.shapes[a.index], 8 * dim, "i64").test("eq", 1) | self.empty[a.index]

    def _solve_optional(self) -> None:
        """Solve symbols that occur only in tensors that the program never accesses, from any tensor that was passed."""
        w = self.w
        for step in self.sig.optional:
            site = step.site if isinstance(step, Solve) else step
            if isinstance(step, Solve) and step.symbol not in self.maybe:
                self.maybe[step.symbol] = (w.slot("i64"), w.slot("i1"))
                w.do(f"store i64 0, ptr {self.maybe[step.symbol][0]}")
                w.do(f"store i1 false, ptr {self.maybe[step.symbol][1]}")
            null = self.null.get(site.arg.index)
            with w.when(null, unless=True) if null is not None else nullcontext():
                self._reload()
                if site.arg.index not in self.empty or null is not None:
                    self._is_empty_here(site.arg)
                if isinstance(site.value, Var) and site.value in self.maybe:
                    self._bind_or_compare(site.value, site)
                elif isinstance(step, Solve):
                    self._require(free_vars(step.factor) | free_vars(step.offset))
                    self._set(step.symbol, self._solved(step))
                else:
                    self._require(free_vars(site.value) if isinstance(site.value, Expr) else set())
                    self._compare(site)
        self._reload()
        self._require(self.needed)

    def _is_empty_here(self, a: TensorArg) -> None:
        self.shapes[a.index] = self.w.at(self.tensors[a.index], 24, "ptr")
        self.strides[a.index] = self.w.at(self.tensors[a.index], 32, "ptr")
        self._is_empty(a)

    def _reload(self) -> None:
        for v, (value, _) in self.maybe.items():
            self.scalars[v] = self.w.at(value, 0, "i64")

    def _set(self, v: Var, value: str) -> None:
        self.w.do(f"store i64 {value}, ptr {self.maybe[v][0]}")
        self.w.do(f"store i1 true, ptr {self.maybe[v][1]}")

    def _bind_or_compare(self, v: Var, site: Any) -> None:
        known = self.w.ins(f"load i1, ptr {self.maybe[v][1]}")
        with self.w.when(known):
            self._compare(site)
        with self.w.when(known, unless=True):
            value = self._actual(site)
            self._fits(value, v, site)
            self._set(v, value)

    def _require(self, symbols: set[Var]) -> None:
        for v in sorted((s for s in symbols if s in self.maybe), key=lambda s: s.name):
            names = ", ".join(f"{self.sig.name}.{n}" for n in dict(self.sig.sources).get(v, ()))
            self.w.check(self.w.ins(f"load i1, ptr {self.maybe[v][1]}"),
                         f"Symbolic shape variable {v.name} requires at least one non-null buffer among: {names}")

    # ---- checks that need the shape -------------------------------------------------------------------------------
    def _late_checks(self, a: TensorArg) -> None:
        """Check for compact strides, and for null and misaligned data pointers."""
        w, fn = self.w, self.sig.name
        if a.index in self.null:  # the program never accesses it, so its data pointer is not checked
            self._put(self.frame.of_arg(a.index), "ptr", "null")
            return
        if a.buffer.strides_ is None and len(a.buffer.shape):
            self._compact_strides(a)
        data = data_of(w, self.tensors[a.index])
        w.check(data.test("ne", "null") | self.empty[a.index], f"kernel {fn} input {a.name} data pointer is NULL")
        align = self.launcher.alignment(a)
        if align > 1:
            low = data.to("ptrtoint", "i64") & align - 1
            w.check(low.test("eq", 0) | self.empty[a.index],
                    f"kernel {fn} input {a.name} byte_offset violates packed ABI constraint: its data must be aligned "
                    f"to {align} bytes")
        self._put(self.frame.of_arg(a.index), "ptr", data)
        self.data[a.index] = data

    def _compact_strides(self, a: TensorArg) -> None:
        w, fn = self.w, self.sig.name
        base = self.strides[a.index]
        with w.when(base.test("eq", "null"), unless=True):
            step = w.of("i64", "1")
            for d in range(len(a.buffer.shape) - 1, -1, -1):
                w.check(w.at(base, 8 * d, "i64").test("eq", step) | self._free_stride(a, d),
                        f"kernel {fn} input {a.name} strides[{d}] violates packed ABI constraint "
                        f"({fn}.{a.name}.strides: expected to be compact array, but got non-compact strides)")
                if d:
                    step = step * w.at(self.shapes[a.index], 8 * d, "i64")
