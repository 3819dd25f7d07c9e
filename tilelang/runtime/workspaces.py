"""Workspaces: global memory that is allocated on the stream before a launch and freed on the stream after it.

All workspaces of a launch are one allocation: first those initialised with zeros, each at a multiple of 256 bytes.
Source: CUDA Driver API, "Stream Ordered Memory Allocator".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tilelang.ir import Buffer, Expr
from tilelang.target.llvm_values import Value
from tilelang.target.machine import MOST_BYTES

from .gpu_api import CUDA, GpuApi
from .llvm_text import Writer

NAMES = ("cuMemAllocAsync", "cuMemsetD8Async", "cuMemFreeAsync")
ALIGN = 256
KEPT = 64 << 20  # bytes of unused memory that the device's pool keeps
RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


def declarations(api: GpuApi) -> str:
    """LLVM declarations of the functions in `NAMES`."""
    types = ("ptr, i64, ptr", "i64, i8, i64, ptr", "i64, ptr")
    return "".join(f"declare i32 @{api.name(n)}({t})\n" for n, t in zip(NAMES, types))


def keep_memory(driver: Any) -> None:
    """Let the current device's memory pool keep `KEPT` bytes: by default it gives all unused memory back when the host waits
    for a stream, so that the next allocation takes up to a millisecond."""
    device, pool, kept = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver.call("cuCtxGetDevice", ctypes.byref(device))
    driver.call("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device)
    driver.call("cuMemPoolGetAttribute", pool, RELEASE_THRESHOLD, ctypes.byref(kept))
    if kept.value < KEPT:
        driver.call("cuMemPoolSetAttribute", pool, RELEASE_THRESHOLD, ctypes.byref(ctypes.c_uint64(KEPT)))


def bytes_of(w: Writer, b: Buffer, size_of: Callable[[Expr], Value]) -> Value:
    """The bytes of a buffer, an i64.  size_of: an integer expression as an i64 value."""
    count = w.of("i64", str(b.dtype.bytes))
    for d in b.shape:
        count = count * (size_of(d) if isinstance(d, Expr) else d)
    return count


def fits(w: Writer, buffers: tuple[Buffer, ...], size_of: Callable[[Any], Value]) -> Value | None:
    """Whether no dimension is negative and no buffer has more bytes than any memory (i1; None: all sizes are constants)."""
    good: Value | None = None
    for b in buffers:
        product = w.of("double", f"{float(b.dtype.bytes)}")
        for d in b.shape:
            product = product * size_of(d).to("uitofp", "double")  # of a negative number: over 2^63
        if any(isinstance(d, Expr) for d in b.shape):
            small = product.test("ole", f"{float(MOST_BYTES)}")
            good = good & small if good else small
    return good


class Workspaces:
    """The allocation of one launch.  size_of: an integer expression as an i64 value."""

    def __init__(self, w: Writer, buffers: tuple[Buffer, ...], size_of: Callable[[Expr], Value], api: GpuApi = CUDA) -> None:
        self.w, self.buffers, self.api = w, buffers, api
        self.base = w.slot("i64")
        self.starts: dict[int, str] = {}  # by position in buffers
        end = self.zeroed = w.of("i64", "0")
        order = sorted(range(len(buffers)), key=lambda k: not buffers[k].facts.zeroed)
        for k in order:
            b = buffers[k]
            self.starts[k] = end
            end = end + (bytes_of(w, b, size_of) + (ALIGN - 1) & -ALIGN)
            if b.facts.zeroed:
                self.zeroed = end
        self.total = end + ALIGN  # never 0, which the driver rejects

    def allocate(self, stream: str) -> Value:
        """Allocate the memory and clear its zeroed part; free it where that fails.  Returns the result of these calls."""
        w = self.w
        rc = w.ins(f"call i32 @{self.api.name('cuMemAllocAsync')}(ptr {self.base}, i64 {self.total}, ptr {stream})", "i32")
        if self.zeroed == "0":
            return rc
        return w.either(rc.test("eq", 0), lambda: self._clear(stream), lambda: rc, "i32")

    def _clear(self, stream: str) -> Value:
        given = f"i64 {self.w.at(self.base, 0, 'i64')}, i8 0, i64 {self.zeroed}, ptr {stream}"
        rc = self.w.ins(f"call i32 @{self.api.name('cuMemsetD8Async')}({given})", "i32")
        with self.w.unless_0(rc):
            self.free(stream)
        return rc

    def cells(self) -> list[str]:
        """For each buffer a cell that contains its address, in the form of a kernel argument."""
        out: list[Any] = []
        for k in range(len(self.buffers)):
            out.append(self.w.slot("i64"))
            self.w.put(out[-1], 0, "i64", self.w.at(self.base, 0, "i64") + self.starts[k])
        return out

    def free(self, stream: str) -> Value:
        """Free the memory on the stream, after the launch.  Returns the result of the call."""
        given = f"i64 {self.w.at(self.base, 0, 'i64')}, ptr {stream}"
        return self.w.ins(f"call i32 @{self.api.name('cuMemFreeAsync')}({given})", "i32")
