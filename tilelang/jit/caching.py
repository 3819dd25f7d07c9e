"""Public functions of the kernel cache: switch it on or off, clear it, compile through it."""

from __future__ import annotations

from typing import Any

from tilelang.env import env
from tilelang.jit.artifact import program_of
from tilelang.jit.compiling import compile
from tilelang.jit.kernel import clear_memory
from tilelang.jit.kernel_cache import disk as _disk
from tilelang.runtime.cuda_cache import CUDABinaryCache


def enable_cache() -> None:
    """Keep compiled kernels in memory and on disk (the default).  TILELANG_DISABLE_CACHE=1 wins."""
    env.enable_cache()


def disable_cache() -> None:
    """Compile every time."""
    env.disable_cache()


def is_cache_enabled() -> bool:
    """Whether kernels are kept."""
    return env.is_cache_enabled()


def clear_cache() -> None:
    """Forget the kernels of this process and remove those on disk, compiled CUDA binaries too."""
    clear_memory()
    _disk.clear()
    CUDABinaryCache().clear_cache()


def cached(func: Any = None, out_idx: Any = None, *args: Any, target: Any = "auto", target_host: Any = None,
           execution_backend: str | None = None, verbose: bool | None = None, pass_configs: Any = None,
           compile_flags: Any = None) -> Any:
    """The compiled kernel of a PrimFunc, as tilelang.compile gives it.

    func: a PrimFunc, or a function that returns one for args.
    """
    if program_of(func) is None and callable(func):
        func = func(*args)
    return compile(func, out_idx, execution_backend, target, target_host, verbose, pass_configs, compile_flags)


__all__ = ["CUDABinaryCache", "cached", "clear_cache", "disable_cache", "enable_cache", "is_cache_enabled"]
