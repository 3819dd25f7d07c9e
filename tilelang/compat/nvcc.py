"""Questions about the CUDA toolchain and device, as older scripts ask them."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable
from typing import Any

from tilelang.env import env
from tilelang.runtime.nvcc_options import nvrtc_options
from tilelang.target import Target
from tilelang.target.probe import device_capability


def get_target_compute_version(target: Any = None) -> str:
    """"9.0" for an sm_90 target; of the current target or the device when none is given.

    Raises ValueError when there is neither.
    """
    if target is None:
        current = Target.current()
        if current is not None and current.is_cuda:
            target = current
        else:
            found = device_capability()
            if found is None:
                raise ValueError("No CUDA architecture was specified or GPU detected. Pass a target such as "
                                 '{"kind": "cuda", "arch": "sm_90"}')
            return f"{found[0]}.{found[1]}"
    number = Target(target).arch_number
    return f"{number // 10}.{number % 10}"


def parse_compute_version(compute_version: str) -> tuple[int, int]:
    """("9.0") -> (9, 0).  Raises RuntimeError for other text."""
    try:
        major, minor = compute_version.split(".")
        return int(major), int(minor)
    except (ValueError, AttributeError):
        raise RuntimeError(f"compute version {compute_version!r} is not of the form \"major.minor\"") from None


def get_target_arch(compute_version: str) -> str:
    """"90" for "9.0"."""
    major, minor = parse_compute_version(compute_version)
    return f"{major}{minor}"


def find_cuda_path() -> str:
    """Folder of the CUDA toolkit.  Raises RuntimeError when there is none."""
    if env.CUDA_HOME and os.path.isdir(env.CUDA_HOME):
        return str(env.CUDA_HOME)
    raise RuntimeError("Cannot find a CUDA toolkit; none is needed: NVRTC compiles kernels. Set CUDA_HOME to use one")


def get_cuda_version(cuda_path: str | None = None) -> tuple[int, int]:
    """(major, minor) of the NVRTC that compiles kernels."""
    from tilelang.runtime.nvrtc import toolchain_version  # 6 ms

    major, minor = toolchain_version("sm_80").split()[-1].split(".")[:2]
    return int(major), int(minor)


def _has(feature: str, about: str, *least: int, of_target: bool = False) -> Callable[[Any], bool]:
    """The question have_<feature>: whether a compute version, or that of a target, is at least (major, minor)."""
    def of_version(compute_version: Any) -> bool:
        return parse_compute_version(compute_version) >= least

    def of(target: Any) -> bool:
        return of_version(get_target_compute_version(target))

    asked = of if of_target else of_version
    asked.__name__, asked.__qualname__, asked.__doc__ = f"have_{feature}", f"have_{feature}", about
    return asked


have_fp16, have_int8 = _has("fp16", "Half precision arithmetic.", 5, 3), _has("int8", "Four-way int8 dot products.", 6, 1)
have_bf16, have_fp8 = _has("bf16", "bfloat16 arithmetic.", 8), _has("fp8", "fp8 matrix instructions.", 8, 9)
have_tma = _has("tma", "Bulk tensor copies.", 9, of_target=True)
have_mbarrier = _has("mbarrier", "Barriers in shared memory.", 8, of_target=True)
have_pdl = _has("pdl", "Programmatic dependent launch.", 9, of_target=True)


def have_tensorcore(compute_version: str | None = None, target: Any = None) -> bool:
    """Matrix units."""
    return parse_compute_version(compute_version or get_target_compute_version(target)) >= (7, 0)


def have_cudagraph() -> bool:
    """Graph capture of launches."""
    return device_capability() is not None


def is_hopper(target: Any) -> bool:
    """An sm_90 target."""
    return Target(target).arch_number == 90


def get_nvcc_compiler() -> str:
    """Path of nvcc.  Raises RuntimeError without a toolkit: nothing here runs it, NVRTC compiles."""
    found = shutil.which("nvcc") or os.path.join(find_cuda_path(), "bin", "nvcc")
    if not os.access(found, os.X_OK):
        raise RuntimeError(f"Cannot find nvcc at {found}; none is needed: NVRTC compiles kernels")
    return found


def get_cuda_library_dirs() -> list[str]:
    """Folders that hold the CUDA libraries in use: of NVRTC, then of a toolkit.  Empty without any."""
    from tilelang.runtime.nvrtc import find_nvrtc  # 5 ms

    folders = [os.path.dirname(c.library) for c in find_nvrtc()]
    if env.CUDA_HOME:
        folders += [os.path.join(env.CUDA_HOME, d) for d in ("lib64", "lib", os.path.join("targets", "x86_64-linux", "lib"))]
    return [d for d in dict.fromkeys(folders) if os.path.isdir(d)]


def _arch(arch: Any) -> str:
    """"sm_80" of any way to say it; of the current target or the device when None."""
    if arch is None:
        current = Target.current()
        if current is not None and current.is_cuda:
            return current.arch
        return "sm_" + get_target_arch(get_target_compute_version())
    if isinstance(arch, (list, tuple)):
        if len(arch) != 1:
            raise ValueError(f"one architecture is compiled for at a time, found {list(arch)}")
        arch = arch[0]
    text = str(arch).removeprefix("-arch=").removeprefix("compute_").removeprefix("sm_")
    return f"sm_{text}"


def compile_cuda(code: str, target_format: str = "ptx", arch: Any = None, options: str | list[str] | None = None,
                 path_target: str | None = None, verbose: bool = False) -> bytearray:
    """CUDA C++ source compiled to "ptx" (text as bytes) or "cubin", by NVRTC.

    arch: "sm_80", "80", None for the current target or the device.  options: further options of the compiler.
    path_target: a file to write the result to as well.  Raises ValueError for another format, RuntimeError with the
    compiler's output and the source where it is rejected.
    """
    from tilelang.runtime.nvrtc import compile_cubin, compile_ptx  # 6 ms

    if target_format not in ("ptx", "cubin"):
        raise ValueError(f"target_format must be in ptx, cubin; found {target_format!r} (fatbin is not available)")
    name = _arch(arch)
    flags = nvrtc_options(shlex.split(options) if isinstance(options, str) else list(options or ()), name)
    if target_format == "ptx":
        data = compile_ptx(code, name, flags).encode()
    else:
        cubin = compile_cubin(code, name, flags)
        data = cubin.bytes
        if verbose:
            print(cubin.log)
    if path_target:
        with open(path_target, "wb") as f:
            f.write(data)
    return bytearray(data)


def tilelang_callback_cuda_compile(code: str, target: Any, pass_config: Any = None) -> bytearray:
    """CUDA C++ source compiled for a target to a cubin.  pass_config: options in "tl.device_compile_flags"."""
    return compile_cuda(code, "cubin", Target(target).arch, (pass_config or {}).get("tl.device_compile_flags"))


def get_ptx_from_source(code: str, compile_flags: str | list[str] | None = None, verbose: bool = False,
                        arch: Any = None) -> str:
    """PTX of CUDA C++ source."""
    return compile_cuda(code, "ptx", arch, compile_flags, verbose=verbose).decode()


def get_sass_from_source(code: str, compile_flags: str | list[str] | None = None, verbose: bool = False,
                         arch: Any = None) -> str:
    """Machine code of CUDA C++ source as text.  Needs nvdisasm: RuntimeError without it."""
    from tilelang.runtime.sass import disassemble  # 11 ms

    return disassemble(bytes(compile_cuda(code, "cubin", arch, compile_flags, verbose=verbose)))
