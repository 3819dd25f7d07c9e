"""Functions that only older import paths have: about the machine, hooks as decorators, the cache as an object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tilelang.env import env
from tilelang.jit.caching import cached, clear_cache
from tilelang.jit.hooks import register_c_postproc, register_cuda_postproc, register_hip_postproc
from tilelang.jit.kernel_cache import disk
from tilelang.runtime.cpus import usable_cpus


def get_current_device() -> Any:
    """The device new tensors go to: torch's current GPU, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_available_cpu_count() -> int:
    """CPUs this process may use."""
    return usable_cpus()


def _decorator(register: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(fn: Any = None, override: bool = True) -> Any:
        if isinstance(fn, bool):  # @register_..._callback(False)
            fn, override = None, fn
        return (lambda f: register(f, override)) if fn is None else register(fn, override)

    return decorate


register_cuda_postproc_callback, register_hip_postproc_callback, register_c_postproc_callback = map(
    _decorator, (register_cuda_postproc, register_hip_postproc, register_c_postproc))


class KernelCache:
    """The one cache of this process; every instance is the same object."""

    _instance: KernelCache | None = None
    cached, clear_cache = staticmethod(cached), staticmethod(clear_cache)

    def __new__(cls) -> KernelCache:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    @property
    def path(self) -> Any:
        """Folder of the entries on disk."""
        return disk.root


_dispatch_map = {name: KernelCache() for name in ("tvm_ffi", "cython", "nvrtc")}


def package_path() -> str:
    """Folder of the package."""
    return str(Path(__file__).resolve().parent.parent)


def find_lib_path(name: str | None = None, optional: bool = False) -> list[str]:
    """Libraries this package loads (it has none of its own): those of NVRTC, and of the CUDA driver and LLVM where they are.

    name: only those whose file name holds it.  Raises RuntimeError when none is found, unless optional.
    """
    from tilelang.runtime import nvrtc  # 179 ms

    found = [str(c.library) for c in nvrtc.find_nvrtc()]
    try:
        import llvmlite  # 1 ms

        libraries = (Path(llvmlite.__file__).parent / "binding").glob("*llvmlite*.*")
        found += [str(p) for p in sorted(libraries) if p.suffix != ".py"]
    except ImportError:
        pass
    found = [f for f in found if name is None or name in Path(f).name]
    if not found and not optional:
        raise RuntimeError(f"no library{f' {name}' if name else ''} is found: python -m tilelang doctor says what is missing")
    return found


def pass_diff(func_or_mod: Any, passes: Iterable[Any] | None = None, output: Any = None, context: int = 3,
              target: Any = None) -> list[dict[str, Any]]:
    """Run passes on a program, write <output>/<program>.html (default TILELANG_PASS_DIFF_OUTPUT), and return the records
    of tools.lower_trace, whose arguments and errors these are."""
    from tilelang.tools.lower_trace import lower_trace, only_program  # 764 ms

    folder = str(output if output is not None else env.TILELANG_PASS_DIFF_OUTPUT)
    path = os.path.join(folder, f"{only_program(func_or_mod).name}.html")
    return lower_trace(func_or_mod, passes, "html", context, path, target)
