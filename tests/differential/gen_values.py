"""Values of generated programs: dtypes, promotion, and expressions whose integer range is known.

All values of an exact program are integers that every type on their way holds exactly, so executions must agree bit for
bit whatever the order of sums or the contraction of products.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = {"float8_e5m2": 8, "float8_e4m3fn": 8, "bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
INTS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
BITS = {**FLOATS, **INTS}
# Largest n such that all integers of magnitude <= n are values of the type.
EXACT = {"float8_e5m2": 8, "float8_e4m3fn": 16, "bfloat16": 256, "float16": 2048, "float32": 2**24, "float64": 2**53,
         "int8": 127, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**62, "uint8": 255, "uint16": 2**16 - 1,
         "uint32": 2**32 - 1}
# Magnitudes buffers of a type may promise to keep.
BOUNDS = {"float8_e5m2": (1, 4, 7), "float8_e4m3fn": (1, 7), "bfloat16": (1, 7, 31), "float16": (1, 3, 31),
          "float32": (31, 4095), "float64": (4095,),
          "int8": (3, 15), "int16": (255,), "int32": (31, 4095), "int64": (4095,),
          "uint8": (15,),
          "uint16": (255,), "uint32": (4095,)}


def is_float(dt: str) -> bool:
    return dt in FLOATS


def is_unsigned(dt: str) -> bool:
    return dt.startswith("uint")


def promote(a: str, b: str) -> str | None:
    """The type of `a + b` (spec 4.1); None where the language refuses the pair."""
    if a == b:
        return a
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    if is_float(a):
        if {a, b} == {"float16", "bfloat16"}:
            return "float16"
        if BITS[a] == BITS[b]:
            return None
        return a if BITS[a] > BITS[b] else b
    if BITS[a] != BITS[b]:
        return a if BITS[a] > BITS[b] else b
    return a if is_unsigned(a) else b


@dataclass(frozen=True)
class Value:
    """An expression's text, its type, and the integers it may be."""

    text: str
    dtype: str
    low: int
    high: int

    @property
    def bound(self) -> int:
        return max(abs(self.low), abs(self.high))

    def exact(self) -> bool:
        """Whether the type holds every value of the range."""
        if is_unsigned(self.dtype) and self.low < 0:
            return False
        return self.bound <= EXACT[self.dtype]


def literal(c: int, floating: bool = False) -> Value:
    """A Python literal: int32, or float32."""
    text = f"{c}.0" if floating else str(c)
    return Value(f"({text})" if c < 0 else text, "float32" if floating else "int32", c, c)


def integer(text: str, low: int, high: int) -> Value:
    """An int32 scalar of that range."""
    return Value(text, "int32", low, high)


def cast(v: Value, dt: str, method: bool = False) -> Value:
    """v in another type, which must hold its range."""
    text = f"({v.text}).astype('{dt}')" if method else f"T.cast({v.text}, '{dt}')"
    return Value(text, dt, v.low, v.high)


def envelope(a: Value, b: Value) -> int:
    """Smallest 2**k - 1 not below either magnitude (what |, ^ and negative & stay in)."""
    k = 1
    while k <= max(a.bound, b.bound):
        k *= 2
    return k
