"""Draws layouts as text, for `print(layout)`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MAX_ROWS, MAX_COLS = 32, 32


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
