"""Identifies the tools and the processor that artifacts are made with and for."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile

from tilelang.target import Target


@lru_cache(maxsize=8)
def toolchain_stamp(target: Target) -> str:
    """A text that identifies the external tools that affect an artifact.  Cache keys contain it.

    Computing it loads no compiler, because a kernel found on disk must not wait for one.
    """
    out = [stamp_of_package("llvmlite"), stamp_of_package("tvm_ffi"), processor_stamp()]
    return "; ".join([*out, *_COMPILERS.get(target.kind, list)()])


def _nvrtc_stamps() -> list[str]:
    from tilelang.runtime.nvrtc import driver_cuda_major, find_nvrtc  # 5 ms

    return [f"driver {driver_cuda_major()}", *(stamp_of_file(c.library) for c in find_nvrtc())]


def _clang_stamps() -> list[str]:
    from tilelang.runtime.hip_compiler import zig_stamp  # 1 ms

    return [zig_stamp()]


_COMPILERS: dict[str, Callable[[], list[str]]] = {"cuda": _nvrtc_stamps, "hip": _clang_stamps}  # by kind of target


def stamp_of_package(name: str) -> str:
    """The folder and the time of a package's installation."""
    spec = importlib.util.find_spec(name)
    return f"{name} missing" if spec is None or spec.origin is None else stamp_of_file(spec.origin)


def stamp_of_file(path: str) -> str:
    """Path, size and time of a file."""
    try:
        st = os.stat(path)
    except OSError:
        return path
    return f"{path} {st.st_size} {st.st_mtime_ns}"


def processor_stamp() -> str:
    """Model and features of the CPU that object files are compiled for."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            first = [*takewhile(str.strip, map(str.rstrip, f))]  # the other CPUs are alike; reading all takes long
    except OSError:
        return host_name()
    lines = [x for x in first if x.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else host_name()


def host_name() -> str:
    """LLVM's name of the CPU that object files are compiled for."""
    import llvmlite.binding as llvm  # 22 ms

    return llvm.get_host_cpu_name()
