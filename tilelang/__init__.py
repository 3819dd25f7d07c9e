"""TileLang: kernels written on tiles, and their compiler.

    import tilelang
    import tilelang.language as T

Public names load on first use, so that importing the package costs little.
"""

from __future__ import annotations

import sys as _sys
from importlib import import_module as _import_module
from typing import Any as _Any

# The settings object must stand in the package under the name of its module (`from tilelang import env`).
from tilelang.env import env
from tilelang.version import __version__, build_date

from tilelang.compat.finder import install as _install_older_paths

if env.TILELANG_TIMELINE:  # here: what is imported from now on is part of it
    from tilelang.log import start as _start

    def _show_timeline() -> None:
        from tilelang.tools.timeline import text  # 258 ms: drawing is loaded when the process ends

        print(text(env.TILELANG_TIMELINE), file=_sys.stderr)

    _start(_show_timeline)
_install_older_paths()

# public name -> module that defines it
_NAMES = {
    "compile": "jit", "par_compile": "jit", "first_fitting": "jit.compiling", "JITKernel": "jit", "lower": "jit.lowering",
    "autotune": "autotuner", "AutoTuner": "autotuner",
    "Profiler": "jit.profiling", "do_bench": "jit.timing", "TensorSupplyType": "jit.supply",
    "PassConfigKey": "transform.framework.config",
    "Layout": "layout", "Fragment": "layout",
    "DataType": "ir.dtype:dtype",
    "deprecated": "compat.deprecation",
    "logger": "log", "set_log_level": "log",
    "enable_cache": "jit.caching", "disable_cache": "jit.caching", "is_cache_enabled": "jit.caching",
    "cdiv": "arith.integers", "next_power_of_2": "arith.integers",
    "register_cuda_postproc": "jit.hooks", "register_hip_postproc": "jit.hooks", "register_c_postproc": "jit.hooks",
    "dtypes": "language", "from_source": "language.tracing.source_text",
    "torch_op": "jit.torch_ops", "autograd": "jit.torch_ops", "jax_call": "jit.jax_calls",
    "from_fx": "program.fx",
}

# rooms: `tilelang.library` works without importing it first
_ROOMS = {"arith", "autotuner", "carver", "codegen", "errors", "ir", "jit", "language", "layout", "library", "ops", "program",
          "runtime", "simulator", "target", "testing", "tools", "transform"}


def __getattr__(name: str) -> _Any:
    where = _NAMES.get(name)
    if where is not None:
        module, _, attribute = where.partition(":")
        value = getattr(_import_module(f"{__name__}.{module}"), attribute or name)
    elif name in _ROOMS or name in _older_paths():
        value = _import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _older_paths() -> set[str]:
    """First parts of the older import paths that stand under this package."""
    from tilelang.compat.table import PATHS  # 3 ms

    return {p.split(".")[1] for p in PATHS}


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_ROOMS, *_older_paths()})


__all__ = sorted({"__version__", "build_date", "env", "jit", "program", *_NAMES})
