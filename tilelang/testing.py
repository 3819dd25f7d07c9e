"""Helpers for tests of kernels: random seeds, comparison of tensors, skip marks, a test runner."""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import os
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tilelang.env import env
from tilelang.jit.compare import torch_assert_close
from tilelang.target.probe import device_capability
from tilelang.target.target import hip_arch


def main() -> None:
    """Run pytest on the calling file and exit."""
    import pytest

    frame = sys._getframe(1)
    sys.exit(pytest.main([frame.f_globals["__file__"], *sys.argv[1:]]))


def set_random_seed(seed: int = 42) -> None:
    """Seed Python, NumPy and, where it is installed, torch."""
    random.seed(seed)
    np.random.seed(seed)
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)


def _requires(condition: Callable[[], bool], reason: str) -> Callable[[Any], Any]:
    """A skip mark that can be written as @requires_x and as @requires_x()."""
    def mark(fn: Any = None) -> Any:
        import pytest

        decorator = pytest.mark.skipif(not condition(), reason=reason)
        return decorator if fn is None else decorator(fn)

    return mark


def _no() -> bool:
    return False


def _has_cuda() -> bool:
    return device_capability() is not None


requires_cuda = _requires(_has_cuda, "no CUDA device")
requires_rocm = requires_cdna = _requires(lambda: hip_arch() is not None, "no CDNA device")
requires_metal = _requires(_no, "no Metal target in this version")
requires_gfx950 = _requires(lambda: hip_arch() == "gfx950", "no gfx950 device")
requires_cuda_or_cdna = _requires(lambda: _has_cuda() or hip_arch() is not None, "no CUDA or CDNA device")
requires_llvm = _requires(lambda: importlib.util.find_spec("llvmlite") is not None, "llvmlite is not installed")


def requires_package(*names: str) -> Callable[[Any], Any]:
    """Skip unless all packages are installed."""
    missing = [n for n in names if not _is_installed(n)]
    return _requires(lambda: not missing, f"not installed: {', '.join(missing)}")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package of a submodule
        return False


_MODES = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt, "eq": operator.eq}


def requires_cuda_compute_version(major: int, minor: int = 0, mode: str = "ge") -> Callable[[Any], Any]:
    """Skip unless the CUDA device's compute capability satisfies the comparison ("ge", "gt", "le", "lt", "eq") with
    major.minor."""
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, found {mode!r}")
    found = device_capability()
    return _requires(lambda: found is not None and _MODES[mode](tuple(found), (major, minor)),
                     f"needs a CUDA device of compute capability {mode} {major}.{minor}, found {found}")


requires_cuda_compute_version_ge = functools.partial(requires_cuda_compute_version, mode="ge")
requires_cuda_compute_version_gt = functools.partial(requires_cuda_compute_version, mode="gt")
requires_cuda_compute_version_le = functools.partial(requires_cuda_compute_version, mode="le")
requires_cuda_compute_version_lt = functools.partial(requires_cuda_compute_version, mode="lt")
requires_cuda_compute_version_eq = functools.partial(requires_cuda_compute_version, mode="eq")

_results: list[tuple[str, float]] = []


def process_func(func: Callable[..., float], name: str | None = None, /, **kwargs: Any) -> float:
    """Run a performance function (it returns ms), print `name: latency`, and record the latency."""
    name = str(name or getattr(func, "__name__", "func"))
    wanted = [n.strip() for n in env.TL_PERF_REGRESSION_ONLY.split(",") if n.strip()]
    if wanted and name not in wanted:
        return float("nan")
    latency = float(func(**kwargs))
    _results.append((name, latency))
    if env.TL_PERF_REGRESSION_FORMAT == "json":
        print(json.dumps({"name": name, "latency": latency}))
    else:
        print(f"{name}: {latency}")
    return latency


def regression(prefixes: Iterable[str] = ("regression_",), verbose: bool = True) -> None:
    """Run every function of the calling module whose name starts with a prefix.

    Such a function either calls process_func, or returns ms, which are printed with its name.
    """
    scope = sys._getframe(1).f_globals
    for name, fn in list(scope.items()):
        if callable(fn) and any(name.startswith(p) for p in prefixes):
            if verbose:
                print(f"# {os.path.basename(scope.get('__file__', '?'))}: {name}", file=sys.stderr)
            before = len(_results)
            latency = fn()
            if latency is not None:
                process_func(lambda ms=latency: ms, name)
            elif len(_results) == before and not env.TL_PERF_REGRESSION_ONLY:
                raise ValueError(f"{name} must call process_func or return milliseconds, it returned None")


__all__ = ["main", "process_func", "regression", "requires_cdna", "requires_cuda", "requires_cuda_compute_version",
           "requires_cuda_compute_version_eq", "requires_cuda_compute_version_ge", "requires_cuda_compute_version_gt",
           "requires_cuda_compute_version_le", "requires_cuda_compute_version_lt", "requires_cuda_or_cdna",
           "requires_gfx950", "requires_llvm", "requires_metal", "requires_package", "requires_rocm", "set_random_seed",
           "torch_assert_close"]
