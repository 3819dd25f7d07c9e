"""DLPack export of NumPy arrays that NumPy itself does not export: bf16/fp8/fp4 element types and read-only arrays.

The array's memory is described by a DLManagedTensor built here and handed over in a capsule, as DLPack's Python
specification says; the array stays alive until the consumer calls the deleter.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from tilelang.ir import dtype


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64)]


class _DLManagedTensor(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER)]

_alive: dict[int, Any] = {}  # address of the DLManagedTensor -> what it points into


@_DELETER
def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


# A function object of our own: jax.ffi.pycapsule sets the types of ctypes.pythonapi.PyCapsule_New, which all modules share.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi))


class Exported:
    """A NumPy array as a DLPack producer, with an element type of the language.

    Read-only memory is not protected: use it only for tensors that the kernel does not write.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        a, dt = self.array, dtype(self.array.dtype.name)
        n = a.ndim
        shape = (ctypes.c_int64 * max(1, n))(*a.shape)
        strides = (ctypes.c_int64 * max(1, n))(*(s // a.itemsize for s in a.strides))
        m = _DLManagedTensor()
        m.tensor = _DLTensor(a.ctypes.data, 1, 0, n, dt.type_code, 8 * a.itemsize if dt.bits >= 8 else dt.bits, 1,
                             ctypes.addressof(shape), ctypes.addressof(strides), 0)
        m.deleter = _delete
        address = ctypes.addressof(m)
        _alive[address] = (m, a, shape, strides)
        return _new_capsule(address, b"dltensor", None)


def exports_itself(a: np.ndarray) -> bool:
    """Whether NumPy's own DLPack export supports this array."""
    return a.flags.writeable and a.dtype.kind in "biuf" and a.dtype.isnative and a.dtype.name in _PLAIN


def in_package_of(like: Any, array: np.ndarray) -> Any:
    """The array as one of the package that `like` comes from, on the same memory where the package can; else itself.

    Asks the namespace of the array API (JAX, CuPy), else the package, for from_dlpack, or asarray for types that NumPy does not
    export: an array may live longer than the interpreter, which `Exported` must not.
    """
    if like is None or isinstance(like, np.ndarray):
        return array
    package = like.__array_namespace__() if hasattr(like, "__array_namespace__") else \
        sys.modules.get(type(like).__module__.partition(".")[0])
    convert = getattr(package, "from_dlpack" if exports_itself(array) else "asarray", None)
    return array if convert is None else convert(array)


_PLAIN = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
          "float64"}
