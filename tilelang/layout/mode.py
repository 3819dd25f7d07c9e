"""Modes: the digits that a layout consists of, and their fit to a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import Binary, Cast, Const, Expr, Select, Unary, Var, walk
from tilelang.ir.evaluate import evaluate

register("layout-invalid", ValueError, "a layout's description contradicts itself or cannot be used here",
         "check the shape and the indices that the layout was given")
register("layout-not-injective", ValueError, "a layout maps two elements to one place",
         "give every element its own place: let each index add a different digit",
         expected="a different place for each element")
register("layout-no-structure", ValueError, "a fragment function is not made of thread and register digits",
         "write thread and register as sums of digits (i // a % b * c) of single indices",
         expected="thread and register as sums of digits of single indices")

register("layout-not-available", NotImplementedError, "a constructor of layouts that this version does not have",
         "Layout and Fragment take any function of the indices", expected="a layout that this version has")

THREAD, REGISTER, ADDRESS = "thread", "register", "address"


@dataclass(frozen=True, slots=True)
class Mode:
    """One digit of an index, with `size` values.  An increment of 1 moves by `stride` threads, registers or addresses.

    to: "thread" | "register" | "address".
    """

    size: int
    to: str
    stride: int

    def __repr__(self) -> str:
        return f"{self.to[0]}{self.size}:{self.stride}"


Modes = tuple[Mode, ...]


def text_of_modes(modes: Modes) -> str:
    """Modes as printed programs show them: size and stride of each."""
    return " ".join(map(repr, modes))


def merged(modes: Modes) -> Modes:
    """The same digits, outermost first, without digits of size 1 and with adjacent digits merged where they form one digit."""
    out: list[Mode] = []
    for m in modes:
        if m.size == 1:
            continue
        if out and out[-1].to == m.to and out[-1].stride == m.stride * m.size:
            out[-1] = Mode(out[-1].size * m.size, m.to, m.stride)
        else:
            out.append(m)
    return tuple(out)


def covered(modes: Modes) -> int:
    """Number of index values that the digits can represent."""
    return math.prod(m.size for m in modes)


def offsets(modes: Modes, to: str, extent: int) -> np.ndarray:
    """Contribution of a dimension's digits to `to`, per index in [0, extent)."""
    i = np.arange(extent, dtype=np.int64)
    out = np.zeros(extent, dtype=np.int64)
    right = 1
    for m in reversed(modes):
        if m.to == to:
            out += i // right % m.size * m.stride
        right *= m.size
    return out


def digit_sum(index: Any, modes: Modes, to: str) -> Any:
    """Contribution of an index (int or Expr) to `to`, as an int or Expr."""
    out: Any = 0
    right = 1
    for k in range(len(modes) - 1, -1, -1):
        m = modes[k]
        if m.to == to:
            d = index if right == 1 else index // right
            if k != 0:  # the outermost digit takes the rest of the index
                d = d % m.size
            out = d * m.stride + out if not isinstance(out, int) or out else d * m.stride
        right *= m.size
    return out


def fit(values: dict[str, np.ndarray], what: str) -> Modes:
    """The modes whose contributions equal 1-D tables (one per `to`), all of one length and starting at 0.

    Raises layout-not-injective when two indices have the same values in every table, layout-no-structure when no digits
    produce the tables.
    """
    names = list(values)
    f = np.stack([values[n] for n in names])  # (targets, n)
    n = f.shape[1]
    modes: list[Mode] = []
    step = 1
    while step < n:
        delta = f[:, step]
        moved = np.flatnonzero(delta)
        if len(moved) == 0:
            raise error("layout-not-injective", f"{what}: indices 0 and {step} of a dimension fall on one place (Loop layout "
                        "is not injective, where a loop has it)", found=f"indices 0 and {step} at one place")
        if len(moved) > 1:
            raise error("layout-no-structure", f"{what}: index {step} moves thread and register at once, expected one of them",
                        found=f"both moved by index {step}", hint="write thread and register as sums of digits of the indices")
        size = 1
        while size * step < n and np.array_equal(f[:, size * step], delta * size):
            size += 1
        modes.append(Mode(size, names[int(moved[0])], int(delta[moved[0]])))
        step *= size
    out = tuple(reversed(modes))
    for row, name in zip(f, names):
        if not np.array_equal(offsets(out, name, n), row):
            raise error("layout-no-structure", f"{what}: the {name} of an element is not a sum of digits of its index",
                        found=f"another function for the {name}")
    return out


def evaluate_index(e: Any, env: Mapping[Var, Any]) -> np.ndarray:
    """Integer NumPy value of an index expression; variables are integers or arrays that broadcast.

    It wraps as its type does: addresses stay below 2**31.  Raises layout-invalid for other variables and operations.
    """
    if not isinstance(e, Expr):
        return np.int64(e)  # type: ignore[return-value]
    for n in walk(e):
        if isinstance(n, Var) and n not in env:
            raise error("layout-invalid", f"a layout function uses ‹`{n.name}`›, which is not one of its indices",
                        expected="the layout's own indices")
        if not isinstance(n, (Var, Const, Cast, Select, Unary, Binary)) or not (n.dtype.is_int or n.dtype.is_bool):
            raise error("layout-invalid", "a layout function must be integer arithmetic on its indices, found "
                        f"{type(n).__name__}", expected="integer arithmetic on the indices", found=f"a {type(n).__name__}")
    return np.asarray(evaluate(e, env), np.int64)
