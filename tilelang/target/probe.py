"""Which CUDA device this process would use: asked of the driver by ctypes, without loading anything else."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from tilelang.timeline import phase


@lru_cache(maxsize=1)
def load_libcuda() -> ctypes.CDLL | None:
    """The driver library, or None on a machine without one."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            with phase(f"load {name}"):
                return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@lru_cache(maxsize=1)
def device_capability() -> tuple[int, int] | None:
    """(major, minor) compute capability of device 0, None when there is no usable device.

    Source: CUDA driver API, cuDeviceGetAttribute (75 COMPUTE_CAPABILITY_MAJOR, 76 COMPUTE_CAPABILITY_MINOR).
    """
    lib = load_libcuda()
    if lib is None:
        return None
    with phase("cuInit"):
        if lib.cuInit(0) != 0:
            return None
    count, dev = ctypes.c_int(), ctypes.c_int()
    if lib.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    if lib.cuDeviceGet(ctypes.byref(dev), 0) != 0:
        return None
    out = []
    for attribute in (75, 76):
        value = ctypes.c_int()
        if lib.cuDeviceGetAttribute(ctypes.byref(value), attribute, dev) != 0:
            return None
        out.append(value.value)
    return out[0], out[1]
