"""Questions about the CUDA toolchain and device, as older scripts ask them."""

from __future__ import annotations

import os
from typing import Any

from tilelang.env import env
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
    from tilelang.runtime.nvrtc import toolchain_version

    major, minor = toolchain_version("sm_80").split()[-1].split(".")[:2]
    return int(major), int(minor)


def _at_least(compute_version: str, number: tuple[int, int]) -> bool:
    return parse_compute_version(compute_version) >= number


def have_fp16(compute_version: str) -> bool:
    """Half precision arithmetic."""
    return _at_least(compute_version, (5, 3))


def have_int8(compute_version: str) -> bool:
    """Four-way int8 dot products."""
    return _at_least(compute_version, (6, 1))


def have_tensorcore(compute_version: str | None = None, target: Any = None) -> bool:
    """Matrix units."""
    return _at_least(compute_version or get_target_compute_version(target), (7, 0))


def have_bf16(compute_version: str) -> bool:
    """bfloat16 arithmetic."""
    return _at_least(compute_version, (8, 0))


def have_fp8(compute_version: str) -> bool:
    """fp8 matrix instructions."""
    return _at_least(compute_version, (8, 9))


def have_tma(target: Any) -> bool:
    """Bulk tensor copies."""
    return _at_least(get_target_compute_version(target), (9, 0))


def have_mbarrier(target: Any) -> bool:
    """Barriers in shared memory."""
    return _at_least(get_target_compute_version(target), (8, 0))


def have_pdl(target: Any) -> bool:
    """Programmatic dependent launch."""
    return _at_least(get_target_compute_version(target), (9, 0))


def have_cudagraph() -> bool:
    """Graph capture of launches."""
    return device_capability() is not None


def is_hopper(target: Any) -> bool:
    """An sm_90 target."""
    return Target(target).arch_number == 90
