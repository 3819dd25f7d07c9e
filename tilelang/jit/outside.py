"""State outside of a program's own values that tracing may read: environment variables, files, defaults of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# Packages whose modules, classes and functions are not followed: apart from the tables below, their state does not change a
# program.
FOREIGN = frozenset({"tilelang", "tvm", "torch", "numpy", "ml_dtypes", *sys.stdlib_module_names} - {"__main__"})

# Functions and modules that read what cannot be observed: a function that uses them is traced at every call.
UNSEEN = {
    "builtins": {"globals", "eval", "exec", "open", "input", "__import__"},
    "importlib": {"*"}, "subprocess": {"*"}, "socket": {"*"}, "sqlite3": {"*"}, "shelve": {"*"}, "glob": {"*"},
    "tempfile": {"*"}, "shutil": {"*"}, "fileinput": {"*"}, "linecache": {"*"}, "mmap": {"*"},
    "inspect": {"stack", "currentframe"}, "io": {"open", "open_code", "FileIO"}, "codecs": {"open"}, "gzip": {"open"},
    "sys": {"modules", "_getframe"},
    "os": {"listdir", "scandir", "walk", "stat", "lstat", "access", "open", "popen", "system"},
    "posixpath": {"exists", "isfile", "isdir", "getmtime", "getsize", "islink"},
    "ntpath": {"exists", "isfile", "isdir", "getmtime", "getsize", "islink"},
    "genericpath": {"exists", "isfile", "isdir", "getmtime", "getsize"},
    "numpy": {"load", "fromfile", "loadtxt", "genfromtxt", "memmap"}, "torch": {"load"},
}
UNSEEN["posix"] = UNSEEN["nt"] = UNSEEN["os"]
UNSEEN["_io"] = UNSEEN["io"]

# Methods of file objects and paths of the standard library.  They are found by their names.
UNSEEN_METHODS = frozenset({"read_text", "read_bytes", "iterdir", "rglob", "is_file", "is_dir"})


def _of_torch(*path: str) -> Callable[[], Any]:
    def read() -> Any:
        value: Any = sys.modules["torch"]
        for name in path:
            value = getattr(value, name)
        return value()

    return read


def environment() -> dict[Any, Any]:
    """The environment variables."""
    data = getattr(os.environ, "_data", None)
    return dict(os.environ) if data is None else dict(data)


def _device() -> Any:
    cuda = sys.modules["torch"].cuda
    return cuda.current_device() if cuda.is_initialized() else None


# (module, name) -> a function that reads the state.
STATE: dict[tuple[str, str], Callable[[], Any]] = {
    ("os", "environ"): environment, ("os", "environb"): environment, ("os", "getenv"): environment,
    ("os", "getenvb"): environment, ("os", "getcwd"): os.getcwd, ("posix", "getcwd"): os.getcwd, ("nt", "getcwd"): os.getcwd,
    **{("torch", n): _of_torch(n) for n in ("get_default_dtype", "get_default_device", "is_grad_enabled", "get_num_threads",
                                            "is_inference_mode_enabled", "get_float32_matmul_precision",
                                            "are_deterministic_algorithms_enabled")},
    **{("torch.cuda", n): _device for n in ("current_device", "get_device_capability", "get_device_properties",
                                            "get_device_name", "mem_get_info")},
}


def state_of(module: str, name: str) -> Callable[[], Any] | None:
    """How the state behind a name of a foreign module is read; None where it has none."""
    return STATE.get((module, name))


def is_unseen(module: str, name: str) -> bool:
    """Whether a name of a foreign module reads what cannot be observed."""
    names = UNSEEN.get(module) or UNSEEN.get(module.partition(".")[0]) or ()
    return name in names or "*" in names


def is_foreign(value: Any) -> bool:
    """Whether a value is a module, class or function of Python, of this package, or of a library that kernels are written
    with."""
    if isinstance(value, BuiltinFunctionType):
        return True
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, (ModuleType, type, FunctionType)) and is_foreign_name(name)


def is_foreign_name(module: Any) -> bool:
    """Whether a module's name belongs to such a library."""
    return isinstance(module, str) and module.partition(".")[0] in FOREIGN


__all__ = ["FOREIGN", "UNSEEN_METHODS", "environment", "is_foreign", "is_foreign_name", "is_unseen", "state_of"]
