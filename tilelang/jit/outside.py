"""State outside of a program's own values that tracing may read: environment variables, files, defaults of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# Packages whose modules, classes and functions are not followed: apart from the tables below, their state does not change a
# program.  pytest's assertions and the names of a notebook's shell lead to all of a process.
FOREIGN = frozenset({"tilelang", "tvm", "torch", "numpy", "ml_dtypes", "pytest", "_pytest", "pluggy", "IPython", "ipykernel",
                     *sys.stdlib_module_names} - {"__main__"})

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

# Attributes of a tensor besides its values.
FACTS = frozenset({"shape", "dtype", "device", "ndim", "size", "stride", "strides", "itemsize", "nbytes", "numel", "dim",
                   "element_size", "is_cuda", "is_contiguous", "layout", "requires_grad"})

# Methods of file objects and paths of the standard library.  They are found by their names.
UNSEEN_METHODS = frozenset({"read_text", "read_bytes", "iterdir", "rglob", "is_file", "is_dir"})
UNSEEN_NAMES = frozenset({"locals", "vars"})  # they read variables that the code does not name

_OF_TORCH = frozenset({"get_default_dtype", "get_default_device", "is_grad_enabled", "get_num_threads",
                       "is_inference_mode_enabled", "get_float32_matmul_precision", "are_deterministic_algorithms_enabled"})
_OF_CUDA = frozenset({"current_device", "get_device_capability", "get_device_properties", "get_device_name", "mem_get_info"})


def environment() -> dict[Any, Any]:
    """The environment variables."""
    data = getattr(os.environ, "_data", None)
    return dict(os.environ) if data is None else dict(data)


def _device() -> Any:
    cuda = sys.modules["torch"].cuda
    return cuda.current_device() if cuda.is_initialized() else None


def state_of(module: str, name: str) -> Callable[[], Any] | None:
    """How the state behind a name of a foreign module is read; None where it has none."""
    if module in ("os", "posix", "nt"):
        return os.getcwd if name == "getcwd" else environment if name in ("environ", "environb", "getenv", "getenvb") else None
    if module == "torch.cuda" and name in _OF_CUDA:
        return _device
    return getattr(sys.modules["torch"], name) if module == "torch" and name in _OF_TORCH else None


def is_tensor(value: Any) -> bool:
    """Whether a value is an array of NumPy or a tensor of torch."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) or
            torch is not None and isinstance(value, getattr(torch, "Tensor", ())))


def facts_of(value: Any) -> tuple[Any, ...]:
    """A tensor's type, shape and place."""
    return (*[getattr(value, n, None) for n in ("dtype", "shape", "strides", "device", "requires_grad")],
            value.stride() if hasattr(value, "stride") else None)


def contents_of(value: Any) -> Any:
    """A tensor's type, shape and values; None where they are many or in memory that cannot be compared."""
    torch = sys.modules.get("torch")
    if value.nbytes > 2**16 or "O" == getattr(value.dtype, "kind", ""):
        return None
    if torch is None or not isinstance(value, torch.Tensor):
        return *facts_of(value), value.tobytes()
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
        return None
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return *facts_of(value), flat.view(torch.uint8).numpy().tobytes()


def is_immutable(value: Any) -> bool:
    """Whether an object of a library is compared by its value."""
    torch = sys.modules.get("torch")
    return type(value).__hash__ not in (None, object.__hash__) or torch is not None and isinstance(value, torch.dtype)


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
