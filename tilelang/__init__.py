"""TileLang: kernels written on tiles, and their compiler.

    import tilelang
    import tilelang.language as T

Public names load on first use, so that importing the package costs little.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

# The settings object must stand in the package under the name of its module (`from tilelang import env`).
from .env import env
from .version import __version__, build_date

if env.TILELANG_TIMELINE:  # here: what is imported from now on is part of it
    from .timeline import start as _start

    _start(env.TILELANG_TIMELINE)

# public name -> module that defines it
_NAMES = {
    "compile": "jit", "par_compile": "jit", "JITKernel": "jit",
    "autotune": "autotuner", "AutoTuner": "autotuner",
    "lower": "engine.lower",
    "Profiler": "profiler", "do_bench": "profiler", "TensorSupplyType": "utils.tensor",
    "PassConfigKey": "transform.config",
    "Layout": "layout", "Fragment": "layout",
    "DataType": "ir.dtype:dtype",
    "deprecated": "utils.deprecation",
    "logger": "log", "set_log_level": "log",
    "enable_cache": "cache", "disable_cache": "cache", "is_cache_enabled": "cache",
    "cdiv": "math", "next_power_of_2": "math",
    "register_cuda_postproc": "engine.callback", "register_hip_postproc": "engine.callback",
    "register_c_postproc": "engine.callback",
}

# public submodules: `tilelang.profiler` works without importing it first
_MODULES = {
    "analysis", "autodd", "autotuner", "backend", "cache", "carver", "contrib", "cpu", "cuda", "engine", "errors",
    "instrumentation", "intrinsics", "ir", "jit", "language", "layout", "libinfo", "library", "math", "metal", "ops",
    "profiler", "rocm", "runtime", "simulator", "target", "testing", "tileop", "tools", "transform", "tvm", "utils", "webgpu",
}



def _load_module(name: str) -> _Any:
    try:
        return _import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as e:
        if e.name == f"{__name__}.{name}":
            raise AttributeError(f"module {__name__!r} has no part {name!r} in this release") from None
        raise


def __getattr__(name: str) -> _Any:
    where = _NAMES.get(name)
    if where is not None:
        module, _, attribute = where.partition(":")
        value = getattr(_import_module(f"{__name__}.{module}"), attribute or name)
    elif name == "dtypes":
        value = _import_module(f"{__name__}.language.dtypes")
    elif name == "tvm":  # names of older programs, kept apart from ours
        value = _import_module(f"{__name__}.compat.tvm")
    elif name in _MODULES:
        value = _load_module(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_MODULES, "dtypes"})


__all__ = sorted({"__version__", "build_date", "env", "dtypes", "jit", *_NAMES})
