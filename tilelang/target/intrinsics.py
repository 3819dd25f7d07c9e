"""Scalar intrinsics: one row a function, with its executable meaning and its text per language.

A `Call(op, …)` in the IR names a row here.  Rows of device operations (barriers, async copies, matrix instructions)
are in target/instructions.py and joined into the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

PURE, READS, WRITES, SYNC = "pure", "reads", "writes", "sync"


@dataclass(frozen=True)
class Intrinsic:
    """One intrinsic.

    name: the Call's op.  arity: number of arguments, -1 for any.
    effect: PURE (value only) | READS | WRITES (memory through an AddressOf argument) | SYNC (orders threads).
    meaning: NumPy function of the argument arrays (computed in float32 or wider, rounded by the caller), or None
        where the simulator executes it as a device operation.
    cuda: text by dtype name, "*" for any other: a format string over {0}, {1}, …  ("expf({0})").
    llvm: LLVM intrinsic or libm name by dtype, "*" for any other (CPU target).
    """

    name: str
    arity: int
    effect: str = PURE
    meaning: Callable[..., Any] | None = None
    cuda: dict[str, str] | None = None
    llvm: dict[str, str] | None = None


INTRINSICS: dict[str, Intrinsic] = {}


def add_intrinsic(row: Intrinsic) -> Intrinsic:
    """Register a row.  Raises KeyError when the name is taken."""
    if row.name in INTRINSICS:
        raise KeyError(f"intrinsic {row.name} is already registered")
    INTRINSICS[row.name] = row
    return row


def intrinsic(name: str) -> Intrinsic:
    """The row of an intrinsic.  Raises KeyError for unknown names."""
    return INTRINSICS[name]


def _math(name: str, fn: Callable[..., Any], arity: int = 1, f32: str | None = None) -> None:
    base = f32 or name
    args = ", ".join(f"{{{i}}}" for i in range(arity))
    add_intrinsic(Intrinsic(name, arity, PURE, fn, {"float32": f"{base}f({args})", "float64": f"{base}({args})"}))


def _erf(x: Any) -> Any:
    import math

    return np.vectorize(math.erf, otypes=[np.float64])(x)


for _name, _fn in (
    ("exp", np.exp), ("exp2", np.exp2), ("log", np.log), ("log2", np.log2), ("log10", np.log10), ("log1p", np.log1p),
    ("sqrt", np.sqrt), ("sin", np.sin), ("cos", np.cos), ("tan", np.tan), ("sinh", np.sinh), ("cosh", np.cosh),
    ("tanh", np.tanh), ("asin", np.arcsin), ("acos", np.arccos), ("atan", np.arctan), ("asinh", np.arcsinh),
    ("acosh", np.arccosh), ("atanh", np.arctanh), ("erf", _erf), ("floor", np.floor), ("ceil", np.ceil),
    ("trunc", np.trunc), ("nearbyint", np.rint), ("exp10", lambda x: np.power(10.0, x)),
    ("rsqrt", lambda x: 1.0 / np.sqrt(x)),
):  # fmt: skip
    _math(_name, _fn)
_math("fabs", np.abs)
_math("pow", np.power, 2)
_math("atan2", np.arctan2, 2)
_math("fmod", np.fmod, 2)
_math("hypot", np.hypot, 2)
_math("copysign", np.copysign, 2)
_math("nextafter", np.nextafter, 2)
