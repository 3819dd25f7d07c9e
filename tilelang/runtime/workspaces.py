"""Workspaces: global memory that is allocated on the stream before a launch and freed on the stream after it.

All workspaces of a launch are one allocation: first those initialised with zeros, each at a multiple of 256 bytes.
Source: CUDA Driver API, "Stream Ordered Memory Allocator".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tilelang.ir import Buffer, Expr
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


def bytes_of(w: Writer, b: Buffer, size_of: Callable[[Expr], str]) -> str:
    """The bytes of a buffer, an i64.  size_of: an integer expression as an i64 value."""
    count = str(b.dtype.bytes)
    for d in b.shape:
        count = w.ins(f"mul i64 {count}, {size_of(d) if isinstance(d, Expr) else d}")
    return count


def fits(w: Writer, buffers: tuple[Buffer, ...], size_of: Callable[[Expr], str]) -> str:
    """Whether no dimension is negative and no buffer has more bytes than any memory (i1; "": all sizes are constants)."""
    good = ""
    for b in buffers:
        product = f"{float(b.dtype.bytes)}"
        for d in b.shape:
            size = w.ins(f"uitofp i64 {size_of(d) if isinstance(d, Expr) else d} to double")  # of a negative number: over 2^63
            product = w.ins(f"fmul double {product}, {size}")
        if any(isinstance(d, Expr) for d in b.shape):
            small = w.ins(f"fcmp ole double {product}, {float(MOST_BYTES)}")
            good = w.ins(f"and i1 {good}, {small}") if good else small
    return good


class Workspaces:
    """The allocation of one launch.  size_of: an integer expression as an i64 value."""

    def __init__(self, w: Writer, buffers: tuple[Buffer, ...], size_of: Callable[[Expr], str], api: GpuApi = CUDA) -> None:
        self.w, self.buffers, self.api = w, buffers, api
        self.base = w.slot("i64")
        self.starts: dict[int, str] = {}  # by position in buffers
        end, self.zeroed = "0", "0"
        order = sorted(range(len(buffers)), key=lambda k: not buffers[k].facts.zeroed)
        for k in order:
            b = buffers[k]
            self.starts[k] = end
            room = w.ins(f"and i64 {w.ins(f'add i64 {bytes_of(w, b, size_of)}, {ALIGN - 1}')}, {-ALIGN}")
            end = w.ins(f"add i64 {end}, {room}")
            if b.facts.zeroed:
                self.zeroed = end
        self.total = w.ins(f"add i64 {end}, {ALIGN}")  # never 0, which the driver rejects

    def allocate(self, stream: str) -> str:
        """Allocate the memory and clear its zeroed part; free it where that fails.  Returns the result of these calls."""
        w = self.w
        rc = w.ins(f"call i32 @{self.api.name('cuMemAllocAsync')}(ptr {self.base}, i64 {self.total}, ptr {stream})")
        if self.zeroed == "0":
            return rc
        return w.either(w.ins(f"icmp eq i32 {rc}, 0"), lambda: self._clear(stream), lambda: rc, "i32")

    def _clear(self, stream: str) -> str:
        w = self.w
        rc = w.ins(f"call i32 @{self.api.name('cuMemsetD8Async')}(i64 {w.ins(f'load i64, ptr {self.base}')}, i8 0, "
                   f"i64 {self.zeroed}, ptr {stream})")
        with w.unless_0(rc):
            self.free(stream)
        return rc

    def cells(self) -> list[str]:
        """For each buffer a cell that contains its address, in the form of a kernel argument."""
        out: list[Any] = []
        for k in range(len(self.buffers)):
            cell = self.w.slot("i64")
            at = self.w.ins(f"add i64 {self.w.ins(f'load i64, ptr {self.base}')}, {self.starts[k]}")
            self.w.do(f"store i64 {at}, ptr {cell}")
            out.append(cell)
        return out

    def free(self, stream: str) -> str:
        """Free the memory on the stream, after the launch.  Returns the result of the call."""
        w = self.w
        return w.ins(f"call i32 @{self.api.name('cuMemFreeAsync')}(i64 {w.ins(f'load i64, ptr {self.base}')}, ptr {stream})")
