"""Opens shared libraries and queries the GPUs of this process, through ctypes and without other imports."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from tilelang.env import env
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


def _hip_libraries(name: str) -> Iterator[str]:
    """Where a library of ROCm may be: what this process has loaded, what torch would load (a second copy would not know its
    streams), ROCm's folder, then the system's."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as f:
            yield from dict.fromkeys(re.findall(rf"(/\S*/lib{name}\S*\.so\S*)$", f.read(), re.MULTILINE))
    except OSError:  # no Linux
        pass
    for package, folder in (("torch", "lib"), ("_rocm_sdk_core", "lib")):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield from (os.path.join(place, folder, n) for n in (f"lib{name}.so", f"lib{name}.so.7"))
    yield from (os.path.join(env.ROCM_HOME, "lib", f"lib{name}.so"),) if env.ROCM_HOME else ()
    yield from (*(f"lib{name}.so{v}" for v in (".7", ".6", ".5", "")), f"{name}_7.dll", f"{name}_6.dll")


@lru_cache(maxsize=2)
def load_rocm(name: str = "amdhip64") -> ctypes.CDLL | None:
    """The driver library of AMD GPUs, or its compiler "hiprtc"; None on a machine without it."""
    for path in _hip_libraries(name):
        try:
            if not os.path.dirname(path) or os.path.exists(path):
                with phase(f"load {os.path.basename(path)}"):
                    return open_library(path)
        except OSError:
            continue
    return None


def hip_arch_of(lib: Any, device: int) -> str | None:
    """Architecture of an AMD GPU, "gfx942"; None when the driver does not tell.

    It stands in hipDeviceProp_t (gcnArchName: "gfx942:sramecc+:xnack-"), whose layout differs between versions of ROCm.
    """
    get = getattr(lib, "hipGetDevicePropertiesR0600", None) or lib.hipGetDeviceProperties
    room = ctypes.create_string_buffer(1 << 14)  # the structure has 1.5 KB
    found = re.search(rb"\0(gfx[0-9a-f]+)[:\0]", room.raw) if get(room, device) == 0 else None
    return found[1].decode() if found else None


@lru_cache(maxsize=1)
def hip_device_arch() -> str | None:
    """Architecture of AMD GPU 0, None when there is no usable one."""
    lib, count = load_rocm(), ctypes.c_int()
    if lib is None or lib.hipInit(0) != 0 or lib.hipGetDeviceCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    return hip_arch_of(lib, 0)
