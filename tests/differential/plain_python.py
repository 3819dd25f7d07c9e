"""A second judge for programs of numbers: their text run by Python itself, one element after another, on types that follow the
language's rules.  Nothing of the compiler is used, so what its executions have in common is judged as well."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from gen_values import BITS, is_float, is_unsigned, promote

# Digits of the significand, least exponent of a normal number, greatest finite number.
FORMATS = {"float64": (53, -1022, float(np.finfo(np.float64).max)), "float32": (24, -126, float(np.finfo(np.float32).max)),
           "float16": (11, -14, 65504.0), "bfloat16": (8, -126, float(ml_dtypes.finfo("bfloat16").max)),
           "float8_e4m3fn": (4, -6, 448.0), "float8_e5m2": (3, -14, 57344.0)}


def numpy_type(dt: str) -> Any:
    return np.dtype(getattr(ml_dtypes, dt)) if hasattr(ml_dtypes, dt) else np.dtype(dt)


def rounded(x: Any, dt: str) -> float:
    """The number of a format nearest to x (a float, int or Fraction), ties to even; types of 8 bits saturate."""
    if isinstance(x, float) and (x != x or math.isinf(x)):
        if math.isinf(x) and BITS[dt] == 8:
            return math.copysign(FORMATS[dt][2], x)
        return x
    if x == 0:
        return float(x)
    digits, least, most = FORMATS[dt]
    v = Fraction(x)
    e = abs(v.numerator).bit_length() - v.denominator.bit_length()
    while Fraction(2) ** e > abs(v):
        e -= 1
    while Fraction(2) ** (e + 1) <= abs(v):
        e += 1
    step = Fraction(2) ** (max(e, least) - digits + 1)
    got = round(v / step) * step  # Python rounds ties to even
    if abs(got) > Fraction(most):
        return math.copysign(most if BITS[dt] == 8 else math.inf, 1 if v > 0 else -1)
    return float(got) if got else math.copysign(0.0, 1 if v > 0 else -1)


def wrapped(x: int, dt: str) -> int:
    n = BITS[dt]
    x &= (1 << n) - 1
    return x if is_unsigned(dt) or x < 1 << n - 1 else x - (1 << n)


class V:
    """A value of a type: an int, or a float that the type holds."""

    __slots__ = ("bits", "dtype", "x")

    def __init__(self, x: Any, dtype: str, bits: Any = None) -> None:
        self.x, self.dtype, self.bits = x, dtype, bits  # bits: as loaded, which tell one NaN from another

    def __index__(self) -> int:
        return int(self.x)

    def __add__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x + y)
    def __radd__(self, a: Any) -> V: return arithmetic(a, self, lambda x, y: x + y)
    def __sub__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x - y)
    def __rsub__(self, a: Any) -> V: return arithmetic(a, self, lambda x, y: x - y)
    def __mul__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x * y)
    def __truediv__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x / y)
    def __and__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x & y)
    def __or__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x | y)
    def __xor__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x ^ y)
    def __lshift__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x << y)
    def __rshift__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x >> y)
    def __floordiv__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x // y)
    def __mod__(self, b: Any) -> V: return arithmetic(self, b, lambda x, y: x % y)
    def __rmod__(self, a: Any) -> V: return arithmetic(a, self, lambda x, y: x % y)
    def __invert__(self) -> V: return V(wrapped(~self.x, self.dtype), self.dtype)
    def __neg__(self) -> V: return V(-self.x if is_float(self.dtype) else wrapped(-self.x, self.dtype), self.dtype)
    def __lt__(self, b: Any) -> bool: return compared(self, b, lambda x, y: x < y)
    def __le__(self, b: Any) -> bool: return compared(self, b, lambda x, y: x <= y)
    def __gt__(self, b: Any) -> bool: return compared(self, b, lambda x, y: x > y)
    def __ge__(self, b: Any) -> bool: return compared(self, b, lambda x, y: x >= y)
    def __eq__(self, b: Any) -> bool: return compared(self, b, lambda x, y: x == y)  # type: ignore[override]
    def __ne__(self, b: Any) -> bool: return compared(self, b, lambda x, y: x != y)  # type: ignore[override]
    __hash__ = None  # type: ignore[assignment]


def to_type(v: Any, dt: str) -> V:
    """The language's conversion."""
    if isinstance(v, V) and v.dtype == dt:
        return v
    x = v.x if isinstance(v, V) else int(v) if isinstance(v, bool) else v
    if is_float(dt):
        return V(rounded(x, dt), dt)
    if isinstance(x, float):
        least, most = (0, (1 << BITS[dt]) - 1) if is_unsigned(dt) else (-(1 << BITS[dt] - 1), (1 << BITS[dt] - 1) - 1)
        return V(0 if x != x else least if x < least else most if x > most else int(x), dt)
    return V(wrapped(x, dt), dt)


def both(a: Any, b: Any) -> tuple[V, V, str]:
    """Two operands in the type of their result."""
    a, b = (v if isinstance(v, V) else V(v, "float32" if isinstance(v, float) else "int32" if -2**31 <= v < 2**31 else "int64")
            for v in (a, b))
    dt = promote(a.dtype, b.dtype)
    assert dt is not None
    return to_type(a, dt), to_type(b, dt), dt


def arithmetic(a: Any, b: Any, fn: Callable[[Any, Any], Any]) -> V:
    a, b, dt = both(a, b)
    if not is_float(dt):
        return V(wrapped(fn(a.x, b.x), dt), dt)
    with np.errstate(all="ignore"):
        if not (math.isfinite(a.x) and math.isfinite(b.x)) or b.x == 0:
            return V(rounded(float(fn(np.float64(a.x), np.float64(b.x))), dt), dt)
    exact = fn(Fraction(a.x), Fraction(b.x))
    # Of zeros and results that vanish the sign is what float64 says.
    return V(float(fn(np.float64(a.x), np.float64(b.x))) if exact == 0 else rounded(exact, dt), dt)


def compared(a: Any, b: Any, fn: Callable[[Any, Any], bool]) -> bool:
    a, b, _ = both(a, b)
    return bool(fn(a.x, b.x))


class Buffer:
    """Storage of values; indices and slices as the programs write them."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array, self.dtype = array, dtype

    def __getitem__(self, at: Any) -> Any:
        at = at if isinstance(at, tuple) else (at,)
        if any(isinstance(i, slice) for i in at):
            place = tuple(slice(*(None if e is None else int(e) for e in (i.start, i.stop))) if isinstance(i, slice) else int(i)
                          for i in at)
            return Buffer(self.array[place], self.dtype)
        return self.value(tuple(int(i) for i in at))

    def __setitem__(self, at: Any, v: Any) -> None:
        at = at if isinstance(at, tuple) else (at,)
        v = to_type(v, self.dtype)
        self.array[tuple(int(i) for i in at)] = v.x if v.bits is None else v.bits

    def value(self, at: tuple[int, ...]) -> V:
        x = self.array[at]
        return V(float(x), self.dtype, x) if is_float(self.dtype) else V(int(x), self.dtype)

    def values(self) -> Iterator[tuple[tuple[int, ...], V]]:
        for at in itertools.product(*map(range, self.array.shape)):
            yield at, self.value(at)


class Language:
    """What stands for `T`.  block: the number of the block that runs."""

    def __init__(self, block: int) -> None:
        self.block, self.frames = block, 0

    def __getattr__(self, name: str) -> Any:
        if name in BITS:
            return lambda v: to_type(v, name)
        raise AttributeError(name)

    def Kernel(self, *grid: int, threads: int) -> Any:
        import contextlib

        return contextlib.nullcontext(V(self.block, "int32"))

    def prim_func(self, fn: Any) -> Any: return fn
    def Tensor(self, *a: Any) -> None: return None

    def alloc_shared(self, shape: tuple[int, ...], dt: str) -> Buffer:
        return Buffer(np.zeros(shape, numpy_type(dt)), dt)

    alloc_fragment = alloc_shared

    def Parallel(self, *extents: int) -> Iterator[Any]:
        for at in itertools.product(*map(range, extents)):
            yield tuple(V(k, "int32") for k in at) if len(at) > 1 else V(at[0], "int32")

    def copy(self, src: Buffer, dst: Buffer) -> None:
        for at, v in src.values():
            dst[at] = v

    def cast(self, v: Any, dt: str) -> V: return to_type(v, dt)

    def reinterpret(self, v: V, dt: str) -> V:
        bits = np.array(v.x if v.bits is None else v.bits, numpy_type(v.dtype)).view(numpy_type(dt))
        return V(float(bits), dt, bits) if is_float(dt) else V(int(bits), dt)

    def abs(self, v: V) -> V: return V(math.fabs(v.x) if is_float(v.dtype) else wrapped(abs(v.x), v.dtype), v.dtype)
    def popcount(self, v: V) -> V: return V(bin(v.x & (1 << BITS[v.dtype]) - 1).count("1"), v.dtype)
    def clz(self, v: V) -> V: return V(BITS[v.dtype] - (v.x & (1 << BITS[v.dtype]) - 1).bit_length(), v.dtype)
    def isnan(self, v: V) -> bool: return v.x != v.x
    def isinf(self, v: V) -> bool: return math.isinf(v.x)
    def isfinite(self, v: V) -> bool: return math.isfinite(v.x)

    def pow(self, v: V, n: int) -> V:
        out = to_type(1, v.dtype)
        for _ in range(n):
            out = out * v
        return out

    def _whole(self, v: V, fn: Callable[[float], int]) -> V:
        return v if not math.isfinite(v.x) else V(math.copysign(float(fn(v.x)), v.x), v.dtype)

    def floor(self, v: V) -> V: return self._whole(v, math.floor)
    def ceil(self, v: V) -> V: return self._whole(v, math.ceil)
    def trunc(self, v: V) -> V: return self._whole(v, math.trunc)
    def round(self, v: V) -> V: return self._whole(v, round)
    nearbyint = round

    def _chosen(self, a: Any, b: Any, better: Callable[[Any, Any], bool]) -> V:
        a, b, _ = both(a, b)
        return b if a.x != a.x or better(b.x, a.x) else a

    def max(self, a: Any, b: Any) -> V: return self._chosen(a, b, lambda x, y: x > y)
    def min(self, a: Any, b: Any) -> V: return self._chosen(a, b, lambda x, y: x < y)

    def if_then_else(self, cond: bool, a: Any, b: Any) -> V:
        a, b, _ = both(a, b)
        return a if cond else b

    Select = if_then_else

    def truncdiv(self, a: Any, b: Any) -> V: return arithmetic(a, b, lambda x, y: abs(x) // abs(y) * (1 if x * y >= 0 else -1))
    def truncmod(self, a: Any, b: Any) -> V: return arithmetic(a, b, lambda x, y: abs(x) % abs(y) * (1 if x >= 0 else -1))

    def fmod(self, a: V, b: V) -> V:
        with np.errstate(all="ignore"):
            return V(float(np.fmod(np.float64(a.x), np.float64(b.x))), a.dtype)

    def _lines(self, b: Buffer, dim: int) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
        n, m = b.array.shape
        for k in range(m if dim == 0 else n):
            yield k, [(i, k) for i in range(n)] if dim == 0 else [(k, j) for j in range(m)]

    def _reduced(self, src: Buffer, out: Buffer, dim: int, fn: Callable[[V, V], V]) -> None:
        for k, line in self._lines(src, dim):
            total = to_type(src.value(line[0]), out.dtype)
            for at in line[1:]:
                total = fn(total, to_type(src.value(at), out.dtype))
            out[k] = total

    def reduce_sum(self, s: Buffer, o: Buffer, dim: int) -> None: self._reduced(s, o, dim, lambda x, y: x + y)
    def reduce_bitand(self, s: Buffer, o: Buffer, dim: int) -> None: self._reduced(s, o, dim, lambda x, y: x & y)
    def reduce_bitor(self, s: Buffer, o: Buffer, dim: int) -> None: self._reduced(s, o, dim, lambda x, y: x | y)
    def reduce_bitxor(self, s: Buffer, o: Buffer, dim: int) -> None: self._reduced(s, o, dim, lambda x, y: x ^ y)

    def _extreme(self, s: Buffer, o: Buffer, dim: int, pick: Callable[[Any, Any], V], first: Callable[[V], V],
                 nan_propagate: bool) -> None:
        for k, line in self._lines(s, dim):
            values = [first(to_type(s.value(at), o.dtype)) for at in line]
            nan = next((v for v in values if v.x != v.x), None)
            total = values[0]
            for v in values[1:]:
                total = pick(total, v)
            o[k] = nan if nan_propagate and nan is not None else total

    def reduce_max(self, s: Buffer, o: Buffer, dim: int, nan_propagate: bool = False) -> None:
        self._extreme(s, o, dim, self.max, lambda v: v, nan_propagate)

    def reduce_min(self, s: Buffer, o: Buffer, dim: int, nan_propagate: bool = False) -> None:
        self._extreme(s, o, dim, self.min, lambda v: v, nan_propagate)

    def reduce_absmax(self, s: Buffer, o: Buffer, dim: int, nan_propagate: bool = False) -> None:
        self._extreme(s, o, dim, self.max, self.abs, nan_propagate)

    def _scanned(self, b: Buffer, dim: int, reverse: bool, fn: Callable[[Any, Any], V]) -> None:
        for _, line in self._lines(b, dim):
            line = line[::-1] if reverse else line
            for before, at in zip(line, line[1:]):
                b[at] = fn(b.value(before), b.value(at))

    def cumsum(self, b: Buffer, dim: int, reverse: bool = False) -> None: self._scanned(b, dim, reverse, lambda x, y: x + y)
    def cummax(self, b: Buffer, dim: int, reverse: bool = False) -> None: self._scanned(b, dim, reverse, self.max)


def run(path: pathlib.Path, args: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The arrays after the call of a program's file."""
    import re

    text = path.read_text().split("\n\nSEED = ")[0].replace("import tilelang.language as T", "")
    # An atomic's first argument is a place: its buffer and indices are handed over by themselves.
    text = re.sub(r"T\.atomic_(\w+)\((\w+)\[([^\]]*)\], ", r"T.update('\1', \2, (\3,), ", text)
    out = [a.copy() for a in args]
    for block in range(out[0].shape[0]):
        space = {"T": _WithAtomics(block)}
        exec(compile(text, str(path), "exec"), space)  # the program's text is the generator's own
        space["program"](*(Buffer(a, a.dtype.name) if a.shape else V(int(a), a.dtype.name) for a in out))
    return out


class _WithAtomics(Language):
    def update(self, op: str, b: Buffer, at: tuple[Any, ...], v: Any) -> None:
        old = b[at]
        b[at] = {"add": lambda: old + to_type(v, b.dtype), "max": lambda: self.max(old, to_type(v, b.dtype)),
                 "min": lambda: self.min(old, to_type(v, b.dtype))}[op]()
