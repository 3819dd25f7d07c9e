"""NVSHMEM in kernels: its device library is linked to their cubins, and its state is given to their modules.

The library is header code over functions of libnvshmem_device.a.  The functions that a kernel calls are compiled from the
headers of the nvidia-nvshmem wheel, once for each such set; nvJitLink links them and the library to the object of the kernel.
The host's part (bootstrap, symmetric heap) is torch's (distributed/host.py).  Sources: NVSHMEM API; nvJitLink manual.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import re
from functools import cache
from typing import Any

from tilelang.errors import error, register
from tilelang.target.nvshmem import FUNCTIONS, definition
from tilelang.target.probe import open_library

from .cache import DiskCache, Entry, digest

register("nvshmem-missing", RuntimeError, "a kernel calls NVSHMEM, which is not there",
         "pip install nvidia-nvshmem-cu13 nvidia-nvjitlink nvidia-cuda-cccl, or those of CUDA 12", expected="NVSHMEM")
register("nvshmem-link", RuntimeError, "nvJitLink cannot link a kernel with NVSHMEM's device library",
         "take nvJitLink and NVRTC of one CUDA release", expected="a kernel that links")

OBJECT, LIBRARY = 1, 6  # nvJitLinkInputType: cubin, library of host objects
# NVRTC has no std:: and takes 64-bit numbers for unsigned long long; the names of the library's functions say unsigned long.
_SOURCE = """
#include <cuda/std/cassert>
#include <cuda/std/climits>
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/cstdlib>
#include <cuda/std/type_traits>
#include <cooperative_groups/reduce.h>
namespace std { using namespace cuda::std; }
typedef unsigned long tl_uint64;
#define uint64_t tl_uint64
#include <nvshmem.h>
#include <nvshmemx.h>
namespace tl {
"""


@cache
def folder() -> str:
    """The folder of the nvidia-nvshmem wheel, with lib/ and include/.  Raises nvshmem-missing."""
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or ()) if spec else ():
        if os.path.isfile(os.path.join(base, "nvshmem", "lib", "libnvshmem_device.a")):
            return os.path.join(base, "nvshmem")
    raise error("nvshmem-missing", "the wheel nvidia-nvshmem-cu12 or nvidia-nvshmem-cu13 is not installed", found="none")


def stamp() -> str:
    """What tells this NVSHMEM from others, for keys of caches.  Raises nvshmem-missing."""
    about = os.stat(os.path.join(folder(), "lib", "libnvshmem_device.a"))
    return f"{folder()} {about.st_size} {about.st_mtime_ns}"


def linker_beside(nvrtc: str) -> str | None:
    """The nvJitLink in the folder of an NVRTC."""
    return next(iter(sorted(glob.glob(os.path.join(os.path.dirname(nvrtc), "libnvJitLink.so.[0-9]*")))), None)


@cache
def _functions(names: tuple[str, ...], nvrtc: Any, arch: str, includes: tuple[str, ...]) -> bytes:
    """The object with these functions of NVSHMEM, from the disk cache where it is there."""
    source = f"{_SOURCE}{''.join(map(definition, names))}}}\n"
    disk, key = DiskCache("nvshmem"), digest(["nvshmem", source, arch, nvrtc.path, list(nvrtc.version), stamp()])
    if (entry := disk.load(key)) is not None:
        return entry.files["nvshmem.o"]
    extra = next((d for d in includes if os.path.isdir(os.path.join(d, "cuda", "std"))), None)
    if extra is None:
        raise error("nvshmem-missing", "NVSHMEM's headers include CUDA's C++ library, which is not installed",
                    found="no folder cuda/std", hint="pip install nvidia-cuda-cccl")
    flags = [f"-arch={arch}", "-std=c++17", "-default-device", "-rdc=true", f"-I{folder()}/include",
             *(f"-I{d}" for d in (*nvrtc.includes, extra))]
    rc, log, made = nvrtc.compile(source, flags)
    if rc != 0:
        raise error("nvshmem-link", f"{nvrtc.path} rejects NVSHMEM's headers: {log[:2000]}", found="headers that it rejects")
    disk.store(key, Entry({}, {"nvshmem.o": made}))
    return bytes(made)


def linked(kernel: bytes, source: str, nvrtc: Any, arch: str, includes: tuple[str, ...]) -> bytes:
    """The cubin of the object that NVRTC made of a source and NVSHMEM's device library.

    includes: folders of headers, one of which has CUDA's C++ library.  Raises nvshmem-missing, nvshmem-link.
    """
    path = linker_beside(nvrtc.path)
    if path is None:
        raise error("nvshmem-missing", f"there is no nvJitLink beside {nvrtc.path}", found="none")
    lib, major = open_library(path), nvrtc.version[0]

    def function(name: str) -> Any:
        found = (getattr(lib, f"__nvJitLink{name}_{major}_{minor}", None) for minor in range(16))
        return next(f for f in found if f is not None)

    handle, options = ctypes.c_void_p(), (ctypes.c_char_p * 1)(f"-arch={arch}".encode())

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        function(f"Get{what}Size")(handle, ctypes.byref(size))
        out = ctypes.create_string_buffer(max(1, size.value))
        function(f"Get{what}")(handle, out)
        return out.raw[:size.value]

    called = tuple(sorted(FUNCTIONS.keys() & set(re.findall(r"\btl::(nvshmem\w+)", source))))
    objects = {"kernel": kernel, "nvshmem": _functions(called, nvrtc, arch, includes)}
    rc = function("Create")(ctypes.byref(handle), ctypes.c_uint32(1), options)
    try:
        for name, data in objects.items():
            rc = rc or function("AddData")(handle, OBJECT, data, ctypes.c_size_t(len(data)), name.encode())
        rc = rc or function("AddFile")(handle, LIBRARY, os.path.join(folder(), "lib", "libnvshmem_device.a").encode())
        rc = rc or function("Complete")(handle)
        if rc:
            said = read("ErrorLog").rstrip(b"\0\n ").decode(errors="replace") if handle else ""
            raise error("nvshmem-link", f"{path}: {said or f'‹nvJitLinkResult {rc}›'}")
        return read("LinkedCubin")
    finally:
        function("Destroy")(ctypes.byref(handle))


# ---- on the device -------------------------------------------------------------------------------------------------------

STATE = b"nvshmemi_device_lib_version_d"  # in cubins with the device library
_host: list[Any] = []  # libnvshmem_host, once the ranks have started it


def started() -> None:
    """torch has started NVSHMEM in this process.  Raises nvshmem-missing."""
    _host[:] = [open_library(os.path.join(folder(), "lib", "libnvshmem_host.so.3"))]


def enter(module: Any, cubin: bytes) -> None:
    """Give NVSHMEM's state to a module that has just been loaded, if its kernels call it.  Raises nvshmem-missing."""
    if STATE not in cubin:
        return
    if not _host:
        raise error("nvshmem-missing", "the kernel calls NVSHMEM, which this process has not started", found="none",
                    hint="call tilelang.distributed.init_dist(nvshmem=True) first, in every process")
    if rc := _host[0].nvshmemx_cumodule_init(module.handle):
        raise error("nvshmem-missing", f"nvshmemx_cumodule_init returns ‹{rc}›", hint="NVSHMEM_DEBUG=INFO says why")
