"""Opens shared libraries and queries the CUDA device of this process, through ctypes and without other imports."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from tilelang.log import phase


def open_library(path: str) -> ctypes.CDLL:
    """Open a shared library without holding the interpreter lock.  Raises OSError.

    ctypes.CDLL holds the lock while the library is read and relocated, up to 0.3 s for a compiler that is not in memory yet.
    """
    try:
        dlopen = ctypes.CDLL(None).dlopen
    except (AttributeError, OSError, TypeError):  # the system has no dlopen
        return ctypes.CDLL(path)
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)  # a foreign call releases the lock; the library is never closed
    return ctypes.CDLL(path)


@lru_cache(maxsize=1)
def load_libcuda() -> ctypes.CDLL | None:
    """The driver library, or None on a machine without one."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            with phase(f"load {name}"):
                return open_library(name)
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
