"""The part of L2 that launches keep for a tensor (T.annotate_l2_hit_ratio): an access policy window of each launch.

Persisting accesses use a part of L2 that the context sets aside.  The first call on a device raises it to the bytes of the
largest window, or to what the device allows.

Sources: CUDA Driver API, "CUaccessPolicyWindow" and "CUlimit".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from tilelang.ir import Buffer, Expr, Launch
from tilelang.target.llvm_values import Value

from .llvm_text import Writer
from .workspaces import bytes_of

NAMES = ("cuCtxGetDevice", "cuDeviceGetAttribute", "cuCtxGetLimit", "cuCtxSetLimit")
WINDOW = 1  # CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
STREAMING, PERSISTING = 1, 2  # CUaccessProperty
_SET_ASIDE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE


def declarations(devices: int) -> str:
    """tl_l2_window: for each device the most bytes of a window, 0 where it has none."""
    return (f"@tl_l2_window = internal global [{devices} x i64] zeroinitializer\ndeclare i32 @cuCtxGetDevice(ptr)\n"
            "declare i32 @cuDeviceGetAttribute(ptr, i32, i32)\ndeclare i32 @cuCtxGetLimit(ptr, i32)\n"
            "declare i32 @cuCtxSetLimit(i32, i64)\n")


def window_of(s: Launch) -> tuple[Buffer, float] | None:
    """The tensor that a launch keeps in L2, and the part of its accesses that persist."""
    return next(((b, float(ratio)) for b, ratio in s.plan.l2_hit_ratio if ratio > 0), None)


def set_aside(w: Writer, index: str, launches: Iterable[Launch]) -> Value:
    """Emit, in the context of the device, the set-aside for the windows of some launches.  Returns the last CUresult."""
    from .cuda_driver import ATTRIBUTES  # 3 ms

    sizes = [b.size * b.dtype.bytes if b.is_static else None for b, _ in filter(None, map(window_of, launches))]
    device, got, limit = w.slot("i32"), w.slot("i32", 2), w.slot("i64")
    w.put(device, 0, "i32", 0)
    w.put_all(got, {0: ("i32", 0), 4: ("i32", 0)})
    w.put(limit, 0, "i64", 0)
    w.do(f"call i32 @cuCtxGetDevice(ptr {device})")
    at = w.at(device, 0, "i32")
    for offset, name in ((0, "persisting_l2_bytes"), (4, "l2_window_bytes")):
        place = w.ins(f"getelementptr i8, ptr {got}, i64 {offset}")
        w.do(f"call i32 @cuDeviceGetAttribute(ptr {place}, i32 {ATTRIBUTES[name]}, i32 {at})")
    w.do(f"call i32 @cuCtxGetLimit(ptr {limit}, i32 {_SET_ASIDE})")
    most, window = (w.at(got, k, "i32").to("zext", "i64") for k in (0, 4))
    wanted = most if None in sizes else _less(most, max(n for n in sizes if n is not None))
    now = w.at(limit, 0, "i64")
    wanted = now.test("ult", wanted).select(wanted, now)
    rc = w.ins(f"call i32 @cuCtxSetLimit(i32 {_SET_ASIDE}, i64 {wanted})", "i32")
    w.put(w.place("@tl_l2_window", index, "i64"), 0, "i64", window)
    return rc


def put_window(w: Writer, record: str, window: tuple[Buffer, float], start: str, size_of: Callable[[Expr], Value],
               index: str) -> Value:
    """Write the launch attribute to `record`.  Returns how many attributes it is, i32: 0 where the device has no windows."""
    b, ratio = window
    count = bytes_of(w, b, size_of)
    size = _less(w.at(w.place("@tl_l2_window", index, "i64"), 0, "i64"), count)
    w.put_all(record, {
        0: ("i32", WINDOW), 8: ("ptr", start), 16: ("i64", size), 24: ("i32", struct.unpack("<i", struct.pack("<f", ratio))[0]),
        28: ("i32", PERSISTING), 32: ("i32", STREAMING)})
    return size.test("ne", 0).to("zext", "i32")


def _less(a: Value, b: Any) -> Value:
    return a.test("ult", b).select(a, b)
