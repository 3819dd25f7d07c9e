"""What a program of this folder is: a kernel as its author wrote it, inputs, a reference in float64, and an error bound."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

NAMES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn")
NUMPY = {name: np.dtype(getattr(ml_dtypes, name)) for name in NAMES}

#: The backends that need no GPU, and "cubin": the program is only compiled, for sm_90a.
BACKENDS = ("tile", "cpu", "sm_80", "sm_90a", "cubin")

HOPPER_ONLY = {"cpu": "explicit Hopper instructions", "sm_80": "explicit Hopper instructions"}


def dtype(name: str) -> np.dtype:
    """The NumPy type of a type of the language."""
    return NUMPY.get(name) or np.dtype(name)


def eps(name: str) -> float:
    """The distance of 1 and the next number of a float type."""
    return float(ml_dtypes.finfo(dtype(name)).eps)


@dataclass(frozen=True)
class Bound:
    """|result - reference| <= ulps * eps(out) * |reference| + terms * eps(acc) * size + sum of eps(t) * s over `via` + absolute


    out: type of the result, None: the result is exact.  terms, size: a sum of `terms` summands whose absolute values add up to
    at most `size`, in type `acc`.  via: (type, magnitude) of values that are rounded on the way.  absolute: anything else.
    """

    out: str | None = "float32"
    terms: int = 0
    size: float = 0.0
    acc: str = "float32"
    via: tuple[tuple[str, float], ...] = ()
    absolute: float = 0.0
    ulps: float = 1.0

    def of(self, expected: np.ndarray) -> np.ndarray:
        """The largest error allowed, for each element of `expected`."""
        if self.out is None:
            return np.zeros(expected.shape)
        least = float(ml_dtypes.finfo(dtype(self.out)).smallest_subnormal)
        fixed = self.terms * eps(self.acc) * self.size + sum(eps(t) * s for t, s in self.via) + self.absolute + least
        return self.ulps * eps(self.out) * np.abs(expected) + fixed


EXACT = Bound(None)


@dataclass(frozen=True)
class Program:
    """One program.

    kernel: a `tilelang.jit` object, or a function that returns a `T.prim_func`.  args: its arguments.  inputs: arrays from a
    random generator.  reference: the outputs, then the `changed` inputs, from those arrays.  bounds: one for all or one each.
    arrange: what is done to the results before they are compared.  absent: backends that cannot run it by the specification,
    and why.  faults: backends that fail today, and why.
    """

    name: str
    kernel: Any
    args: Mapping[str, Any]
    inputs: Callable[[np.random.Generator], Sequence[Any]]
    reference: Callable[..., Any]
    bounds: Bound | Sequence[Bound] = field(default_factory=Bound)
    changed: tuple[int, ...] = ()
    out_idx: Any = None
    pass_configs: Mapping[Any, Any] | None = None
    compile_flags: Any = None
    arrange: Callable[[list[np.ndarray]], list[np.ndarray]] = list
    absent: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)


Source = Callable[[np.random.Generator], np.ndarray]


def uniform(shape: Any, name: str = "float32", low: float = -1.0, high: float = 1.0) -> Source:
    """Uniform numbers of one type."""
    return lambda g: g.uniform(low, high, shape).astype(dtype(name))


def integers(shape: Any, low: int, high: int, name: str = "int32") -> Source:
    """Uniform integers in [low, high)."""
    return lambda g: g.integers(low, high, shape).astype(dtype(name))


def zeros(shape: Any, name: Any = "float32") -> np.ndarray:
    """Zeros of one type."""
    return np.zeros(shape, dtype(str(name)))


def pack4(values: np.ndarray) -> np.ndarray:
    """Two e2m1 codes a byte, low nibble first."""
    codes = values.astype(dtype("float4_e2m1fn")).view(np.uint8) & 15
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8).view(np.int8)


def unpack4(packed: np.ndarray) -> np.ndarray:
    """The e2m1 values of packed bytes, in float64."""
    packed = packed.view(np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[:-1] + (-1,))
    return codes.astype(np.uint8).view(dtype("float4_e2m1fn")).astype(np.float64)


def drawn(*sources: Any) -> Callable[[np.random.Generator], list[Any]]:
    """Inputs: each source is a function of the generator, or the value itself."""
    return lambda g: [s(g) if callable(s) else np.copy(s) if isinstance(s, np.ndarray) else s for s in sources]


def wide(*arrays: Any) -> list[np.ndarray]:
    """The arrays in float64."""
    return [np.asarray(a).astype(np.float64) for a in arrays]
