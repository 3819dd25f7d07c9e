"""Encodes tensor maps on the host, at the call of a kernel, and caches them until address, extents or strides change.

The host code of a program has one record per map (`TensorMapCode`).  Source: CUDA Driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from tilelang.target.llvm_values import Value
from tilelang.target.tensor_map import ADDRESS_ALIGN, MAP_ALIGN, MAP_BYTES, STRIDE_ALIGN, TensorMap

from .gpu_api import in_context
from .llvm_text import Writer

ENCODE, ENCODE_IM2COL = "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"
DECLARATION = (f"declare i32 @{ENCODE}(ptr, i32, i32, ptr, ptr, ptr, ptr, ptr, i32, i32, i32, i32)\n"
               f"declare i32 @{ENCODE_IM2COL}(ptr, i32, i32, ptr, ptr, ptr, ptr, ptr, i32, i32, ptr, i32, i32, i32, i32)\n"
               "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\ndeclare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n")
_INTERLEAVE_NONE = 0


class TensorMapCode:
    """Host code of one map.  Its record is a global

        {i64 lock, key: address, extents, strides in bytes (i64 each)} and, 64-byte aligned, the map.

    A caller that finds the record locked by another thread encodes the map on its own stack instead of waiting.
    """

    def __init__(self, name: str, tensor_map: TensorMap) -> None:
        self.map, self.rank = tensor_map, tensor_map.rank
        self.name = "@tl_map_" + name
        self.words = 1 + self.rank + self.rank - 1
        self.at = -(-(8 + 8 * self.words) // MAP_ALIGN) * MAP_ALIGN

    def declaration(self) -> str:
        """The initial record: unlocked, with a key that no tensor has (address 0 with extent 0)."""
        return f"{self.name} = internal global [{self.at + MAP_BYTES} x i8] zeroinitializer, align {MAP_ALIGN}\n"

    def emit(self, w: Writer, fn: str, address: str, extents: Sequence[str], strides: Sequence[str],
             context: str, late: bool = False) -> str:
        """Emit code that writes the map of a call to the stack; returns its address.

        address: ptr.  extents, strides: i64, innermost first, strides in elements without the innermost.  The code raises
        an error when a tensor map cannot describe the tensor.  A tensor without elements gets a map of zeros, whose use would
        fault; kernels never use it.  context: ptr, made current for the encoding.  late: launches may have run before.
        """
        what = f"kernel {fn}{' launch' * late} input {self.map.buffer.name}"
        pitch = self._pitch(w, strides)
        out = w.slot("i8", MAP_BYTES + MAP_ALIGN)
        up = w.of("ptr", out).to("ptrtoint", "i64") + (MAP_ALIGN - 1) & -MAP_ALIGN
        place = up.to("inttoptr", "ptr")
        w.do(f"call void @llvm.memset.p0.i64(ptr {place}, i8 0, i64 {MAP_BYTES}, i1 false)")
        empty = (w.of("i64", e).test("eq", 0) for e in extents)
        with w.when(functools.reduce(operator.or_, empty, w.of("i1", "false")), unless=True):
            self._checks(w, what, address, pitch)
            self._cached(w, what, place, address, extents, pitch, context)
        return place

    def _pitch(self, w: Writer, strides: Sequence[str]) -> list[Value]:
        size = self.map.buffer.dtype.bytes
        return [w.of("i64", str(int(s) * size)) if s.isdigit() else w.of("i64", s) * size for s in strides]

    def _checks(self, w: Writer, what: str, address: str, pitch: Sequence[Value]) -> None:
        w.check((w.of("ptr", address).to("ptrtoint", "i64") & ADDRESS_ALIGN - 1).test("eq", 0),
                f"{what} byte_offset violates packed ABI constraint: its data must be aligned to {ADDRESS_ALIGN} bytes "
                "(it is moved by TMA; tl.disable_tma_lower compiles the kernel without)")
        for k, p in enumerate(pitch):
            dim = self.rank - 2 - k
            w.check((p & STRIDE_ALIGN - 1).test("eq", 0),
                    f"{what} strides[{dim}] violates packed ABI constraint: it must be a multiple of {STRIDE_ALIGN} "
                    "bytes (the tensor is moved by TMA; tl.disable_tma_lower compiles the kernel without)")

    def _cached(self, w: Writer, what: str, place: str, address: str, extents: Sequence[str],
                pitch: Sequence[str], context: str) -> None:
        """Copy the map of the record if its key matches the tensor; else encode it, and store it if the record is unlocked."""
        key = [w.of("ptr", address).to("ptrtoint", "i64"), *extents, *pitch]
        look, use, make, join = (w.name(n) for n in ("look", "use", "make", "join"))
        free = w.ins(f"atomicrmw xchg ptr {self.name}, i64 1 acquire", "i64").test("eq", 0)
        w.branch(free, look, make, likely=True)
        w.begin(look)
        same = w.of("i1", "true")
        for k, v in enumerate(key):
            same = same & w.at(self.name, 8 + 8 * k, "i64").test("eq", v)
        record = w.ins(f"getelementptr i8, ptr {self.name}, i64 {self.at}")
        w.branch(same, use, make, likely=True)
        w.begin(use)
        w.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {place}, ptr {record}, i64 {MAP_BYTES}, i1 false)")
        w.do(f"store atomic i64 0, ptr {self.name} release, align 8")
        w.jump(join)
        w.begin(make)
        rc = in_context(w, context, lambda: self._encode(w, place, address, extents, pitch))
        with w.when(free):
            with w.when(rc.test("eq", 0)):
                w.put_all(self.name, {8 + 8 * k: ("i64", v) for k, v in enumerate(key)})
                record = w.ins(f"getelementptr i8, ptr {self.name}, i64 {self.at}")
                w.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {record}, ptr {place}, i64 {MAP_BYTES}, i1 false)")
            w.do(f"store atomic i64 0, ptr {self.name} release, align 8")
        w.check(rc.test("eq", 0), f"{what} cannot be described for TMA (the driver rejected "
                "its extents or strides; tl.disable_tma_lower compiles the kernel without)")
        w.jump(join)
        w.begin(join)

    def _encode(self, w: Writer, place: str, address: str, extents: Sequence[str], pitch: Sequence[str]) -> str:
        dims, steps = w.slot("i64", self.rank), w.slot("i64", max(1, self.rank - 1))
        box, ones, high = w.slot("i32", self.rank), w.slot("i32", self.rank), ""
        m, per = self.map.im2col, (1,) * self.rank
        arrays: list[tuple[str, str, int, Sequence[Any]]] = [(dims, "i64", 8, extents), (steps, "i64", 8, pitch)]
        if m is None:
            arrays.append((box, "i32", 4, self.map.box))
        else:  # box: the lower corner of the bounding box
            high, per = w.slot("i32", 2), (1, *reversed(m.stride), 1)
            arrays += [(box, "i32", 4, m.low[::-1]), (high, "i32", 4, m.high[::-1])]
        for array, ty, size, values in (*arrays, (ones, "i32", 4, per)):
            w.put_all(array, {size * k: (ty, v) for k, v in enumerate(values)})
        kind, swizzle, l2, fill = self.map.codes
        name, more = ENCODE, ""
        if m is not None:
            name, more = ENCODE_IM2COL, f"ptr {high}, i32 {self.map.box[0]}, i32 {self.map.box[1]}, "
        return w.ins(f"call i32 @{name}(ptr {place}, i32 {kind}, i32 {self.rank}, ptr {address}, ptr {dims}, "
                     f"ptr {steps}, ptr {box}, {more}ptr {ones}, i32 {_INTERLEAVE_NONE}, i32 {swizzle}, i32 {l2}, i32 {fill})")
