"""Draws layouts as text, for `print(layout)`; what Layout and Fragment have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Expr, Var

MAX_ROWS, MAX_COLS = 32, 32


class IndexMap:
    """A map of the indices of a tile of static shape."""

    shape: tuple[int, ...]
    _symbolic: Any  # the index variables, then what they are mapped to
    index: list[Expr]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_equal(self, other: Any) -> bool:
        """Whether both put every element at the same place (of a Fragment: in the same threads and register)."""
        return bool(self == other)

    def get_input_shape(self) -> list[int]:
        return list(self.shape)

    def get_forward_index(self) -> list[Expr]:
        return self.index

    def get_forward_vars(self) -> list[Var]:
        return list(self._symbolic[0])

    def _repr_svg_(self) -> str:
        """The picture that notebooks show: at most the first 32 rows and columns."""
        from .picture import picture_of, svg_of  # 2 ms

        return svg_of(picture_of(self, most=MAX_ROWS))


def fragment(shape: tuple[int, ...], facts: str, owner_table: np.ndarray, register_table: np.ndarray) -> str:
    """One cell per element: `thread:register`.  Replicated elements list their threads, separated by commas (at most two)."""
    head = f"Fragment {_by(shape)}  {facts}"
    owners, regs = two_d(owner_table, 1), two_d(register_table)

    def cell(i: int, j: int) -> str:
        who = owners[:, i, j]
        text = ",".join(str(t) for t in who[:2]) + (",…" if len(who) > 2 else "")
        return f"{text}:{regs[i, j]}"

    return head + "\n" + _grid(regs.shape, cell)


def layout(shape: tuple[int, ...], facts: str, element_table: np.ndarray) -> str:
    """One cell per element: its physical element."""
    table = two_d(element_table)
    return f"Layout {_by(shape)}  {facts}\n" + _grid(table.shape, lambda i, j: str(table[i, j]))


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def two_d(table: np.ndarray, keep: int = 0) -> np.ndarray:
    """The table with leading dimensions folded into rows."""
    shape = table.shape[keep:]
    return table.reshape(*table.shape[:keep], -1, shape[-1] if shape else 1)


def _grid(shape: tuple[int, ...], cell: Callable[[int, int], str]) -> str:
    rows, cols = min(shape[0], MAX_ROWS), min(shape[1], MAX_COLS)
    cells = [[cell(i, j) for j in range(cols)] for i in range(rows)]
    width = max(len(c) for r in cells for c in r)
    margin = len(str(rows - 1))
    lines = [" " * margin + " |" + "".join(f" {j:>{width}}" for j in range(cols))]
    lines.append("-" * margin + "-+" + "-" * ((width + 1) * cols))
    lines += [f"{i:>{margin}} |" + "".join(f" {c:>{width}}" for c in r) for i, r in enumerate(cells)]
    if shape[0] > rows or shape[1] > cols:
        lines.append(f"… {shape[0]} rows, {shape[1]} columns in all")
    return "\n".join(lines)
