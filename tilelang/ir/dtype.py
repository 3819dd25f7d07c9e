"""Element types.  A `dtype` is a string ("float16", "int8x4") with attributes; equal and hashable as that string."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

import numpy as np

from tilelang.errors import facts
from .hook import Hook

# The function behind `dtype(...)` calls, which returns an expression; build.py provides it.
value_of_type: Hook[Callable[[dtype, tuple[object, ...]], object]] = Hook("the value of a type")

_ALIASES = {
    "double": "float64", "float": "float32", "int": "int32", "long": "int64", "short": "int16",
    "uint": "uint32", "ulong": "uint64",
}  # fmt: skip

# name -> (kind, bits per lane).  kind: i signed, u unsigned, f float, b bool, h handle, v void.
_BASE: dict[str, tuple[str, int]] = {"bool": ("b", 8), "handle": ("h", 64), "void": ("v", 0)}
for _b in (4, 8, 16, 32, 64):
    _BASE[f"int{_b}"] = ("i", _b)
    _BASE[f"uint{_b}"] = ("u", _b)
for _n, _b in (
    ("float16", 16), ("float32", 32), ("float64", 64), ("bfloat16", 16), ("tfloat32", 32),
    ("float8_e3m4", 8), ("float8_e4m3", 8), ("float8_e4m3b11fnuz", 8), ("float8_e4m3fn", 8),
    ("float8_e4m3fnuz", 8), ("float8_e5m2", 8), ("float8_e5m2fnuz", 8), ("float8_e8m0fnu", 8),
    ("float6_e2m3fn", 6), ("float6_e3m2fn", 6), ("float4_e2m1fn", 4), ("float4_e2m1_unpacked", 8),
):  # fmt: skip
    _BASE[_n] = ("f", _b)

SCALE = "float8_e8m0fnu"  # powers of two: no sign, no zero
_VECTOR = re.compile(r"^(.*?)x(\d+)$")


@cache
def _split(name: str) -> tuple[str, int] | None:
    if name in _BASE:
        return name, 1
    m = _VECTOR.match(name)
    if m and m.group(1) in _BASE and int(m.group(2)) > 1:
        return m.group(1), int(m.group(2))
    return None


# The spelling that str() gives for types that no other framework has.
_CUSTOM = {"tfloat32": "custom[tfloat32]", "float4_e2m1_unpacked": "custom[float4_e2m1_unpacked]8"}
_ALIASES.update({spelled: name for name, spelled in _CUSTOM.items()})


MOST_LANES = 4096


def canonical_name(name: str) -> str:
    """The canonical spelling of a dtype string.  Raises ValueError for unknown names."""
    name = _ALIASES.get(name, name)
    got = _split(name)
    if got is not None and got[1] > MOST_LANES:  # lanes are computed, and printed, one by one
        raise facts(ValueError(f"a vector of {got[1]} elements in each thread; for a tile write T.Parallel or T.copy"),
                    f"at most {MOST_LANES} elements", str(got[1]))
    if got is None:
        raise facts(ValueError(f"unknown dtype {name!r}"), "the name of an element type", repr(name))
    return name


class dtype(str):
    """An element type, scalar or vector.  Subclass of str: `dtype("float16") == "float16"`.

    is_int: signed or unsigned integers, not bool.  Each type is a single object whose properties are computed once.
    """

    __slots__ = ("base", "lanes", "kind", "bits", "is_float", "is_int", "is_signed", "is_unsigned", "is_bool", "is_handle")
    base: str
    lanes: int
    kind: str
    bits: int
    is_float: bool
    is_int: bool
    is_signed: bool
    is_unsigned: bool
    is_bool: bool
    is_handle: bool
    _interned: dict[str, dtype] = {}

    def __new__(cls, spec: object) -> dtype:
        if isinstance(spec, dtype):
            return spec
        name = canonical_name(_name_of(spec))
        got = cls._interned.get(name)
        if got is None:
            got = super().__new__(cls, name)
            got.base, got.lanes = _split(name)  # type: ignore[misc]
            got.kind, got.bits = _BASE[got.base]
            got.is_float, got.is_bool, got.is_handle = got.kind == "f", got.kind == "b", got.kind == "h"
            got.is_signed, got.is_unsigned, got.is_int = got.kind == "i", got.kind == "u", got.kind in ("i", "u")
            cls._interned[name] = got
        return got

    __hash__ = str.__hash__

    def __str__(self) -> str:
        """The name.  Types that no other framework has are spelled as the specification does."""
        plain = str.__str__(self)
        return _CUSTOM.get(plain, plain)

    def __format__(self, spec: str) -> str:
        return str.__str__(self).__format__(spec)  # f-strings print the name

    def __repr__(self) -> str:
        return f"dtype('{str.__str__(self)}')"

    @property
    def bytes(self) -> int:
        """Storage of one (vector) element in bytes, rounded up."""
        return (self.bits * self.lanes + 7) // 8

    itemsize = bytes

    @property
    def type_code(self) -> int:
        """DLPack type code of the lane type (0 int, 1 uint, 2 float, 3 handle, 4 bfloat, 6 bool, 7.. fp8/6/4)."""
        return _dlpack_code(self.base)

    @property
    def scalar(self) -> dtype:
        """The lane type."""
        return self if self.lanes == 1 else dtype(self.base)

    @property
    def is_float8(self) -> bool:
        return self.base.startswith("float8")

    def with_lanes(self, lanes: int) -> dtype:
        return dtype(self.base if lanes == 1 else f"{self.base}x{lanes}")

    def is_float4(self) -> bool:
        return self.base.startswith("float4")

    def is_float4_e2m1fn(self) -> bool:
        return self.base == "float4_e2m1fn"

    def is_float4_e2m1_unpacked(self) -> bool:
        return self.base == "float4_e2m1_unpacked"

    def as_torch(self) -> object:
        """The torch dtype of the storage.  Raises ValueError where torch has none.  Imports torch."""
        import torch

        if self.is_handle:
            return None
        name = {"float8_e4m3": "float8_e4m3fn", "tfloat32": "float32", "int4": "int8"}.get(self.base, self.base)
        if self.base.startswith("float4_e2m1fn") and (self.lanes == 1 or self.lanes == 2):
            return getattr(torch, "float4_e2m1fn_x2", torch.int8)
        if self.lanes != 1 or not hasattr(torch, name):
            raise ValueError(f"Cannot convert dtype {self} to a torch dtype")
        return getattr(torch, name)

    def __call__(self, *values: object) -> object:
        """Constant of this type, cast of an expression, or (no argument) a fresh scalar variable."""
        return value_of_type.call(self, values)


_DLPACK = {"i": 0, "u": 1, "f": 2, "b": 6, "h": 3, "v": 3}
_DLPACK_SPECIAL = {
    "bfloat16": 4, "float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9, "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14,
    "float6_e2m3fn": 15, "float6_e3m2fn": 16, "float4_e2m1fn": 17,
}  # fmt: skip


def _dlpack_code(base: str) -> int:
    return _DLPACK_SPECIAL.get(base, _DLPACK[_BASE[base][0]])


def _name_of(spec: object) -> str:
    if isinstance(spec, str):
        return str(spec)
    if spec is bool:
        return "bool"
    if spec is int:
        return "int32"
    if spec is float:
        return "float32"
    if isinstance(spec, np.dtype):
        return spec.name
    if isinstance(spec, type) and issubclass(spec, np.generic):
        return np.dtype(spec).name
    text = repr(spec)
    if text.startswith("torch."):
        name = text[len("torch."):]
        return "float4_e2m1fnx2" if name == "float4_e2m1fn_x2" else name
    raise facts(TypeError(f"Invalid DataType {spec!r} (expected a dtype, its name, or a Python, numpy or torch type)"),
                "a dtype, its name, or a Python, numpy or torch type", repr(spec))


def numpy_dtype(dt: str) -> np.dtype:
    """The NumPy type that stores one lane.  int4/uint4/float4 use one byte a value; tfloat32 is float32."""
    base = dtype(dt).base
    if base == "bool":
        return np.dtype(np.bool_)
    if base == "handle":
        return np.dtype(np.uint64)
    if base in ("int4", "uint4"):
        return np.dtype(np.int8 if base == "int4" else np.uint8)
    if base == "tfloat32":
        return np.dtype(np.float32)
    if base in ("bfloat16",) or base.startswith(("float8_", "float6_", "float4_")):
        import ml_dtypes  # 4 ms

        name = {"float8_e4m3": "float8_e4m3fn", "float4_e2m1_unpacked": "float4_e2m1fn"}.get(base, base)
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(base)


_FLOAT_RANK = {"float16": 2, "bfloat16": 1, "tfloat32": 3, "float32": 3, "float64": 4}


def promote(a: dtype, b: dtype) -> dtype:
    """Result type of a binary operation (reference, "Promotion of element types").  Raises TypeError where there is none."""
    if a == b:
        return a
    if a.lanes != b.lanes:
        if a.lanes != 1 and b.lanes != 1:
            raise facts(TypeError(f"Cannot match type {a} vs {b}: lane counts differ"), "as many lanes, or one", f"{a} and {b}")
        return promote(a.scalar, b.scalar).with_lanes(max(a.lanes, b.lanes))
    if a.lanes > 1:
        return promote(a.scalar, b.scalar).with_lanes(a.lanes)
    if a.is_handle or b.is_handle:
        raise facts(TypeError(f"Cannot match type {a} vs {b}"), "two numbers", f"{a} and {b}")
    if a.is_float and b.is_float:
        ra, rb = _FLOAT_RANK.get(a.base, 0), _FLOAT_RANK.get(b.base, 0)
        if ra == rb:
            if {a.base, b.base} == {"tfloat32", "float32"}:
                return dtype("float32")
            raise facts(TypeError(f"Cannot match type {a} vs {b}: cast one of them"),
                        "types of which one holds the other", f"{a} and {b}")
        return a if ra > rb else b
    if a.is_float:
        return a
    if b.is_float:
        return b
    if a.is_bool:
        return b
    if b.is_bool:
        return a
    if a.bits != b.bits:
        return a if a.bits > b.bits else b
    return a if a.is_unsigned else b


def int_range(dt: dtype) -> tuple[int, int]:
    """Least and greatest value of an integer or bool type."""
    if dt.is_bool:
        return 0, 1
    if dt.is_unsigned:
        return 0, (1 << dt.bits) - 1
    return -(1 << (dt.bits - 1)), (1 << (dt.bits - 1)) - 1


_FLOAT_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
              "tfloat32": 3.4028234663852886e38, "float64": 1.7976931348623157e308, "float8_e4m3": 448.0,
              "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0,
              "float4_e2m1fn": 6.0, "float4_e2m1_unpacked": 6.0, SCALE: 2.0**127}


def float_max(base: str) -> float:
    """The largest finite value of a floating-point type."""
    return _FLOAT_MAX.get(base, 3.4028234663852886e38)


def float_min(base: str) -> float:
    """The least finite value of a floating-point type.  That of a scale type is positive, because it has no sign."""
    return 2.0**-127 if base == SCALE else -float_max(base)


def scale_value(v: float) -> float:
    """A number converted to float8_e8m0fnu: |v| rounded up to a power of two from 2**-127 to 2**127; NaN stays NaN.

    Constants of this type are converted when they are made.  The type has no 0, and a constant 0 would wrongly trigger the
    rules about adding 0.
    """
    if math.isnan(v):
        return v
    v = min(max(abs(v), 2.0**-127), 2.0**127)
    half, exponent = math.frexp(v)
    return 2.0**(exponent - (half == 0.5))
