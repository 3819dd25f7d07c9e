"""Tensors as rows for kernels that work on whole rows: tiles, types, checks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from tilelang.errors import error, register

from ..arrays import contiguous, is_numpy, place, type_name

register("training-argument", ValueError, "tensors of a function for training that do not go together",
         "see the shapes and types in the docstring of the function",
         expected="tensors of the shapes and types that the function names")

FLOATS = ("float16", "bfloat16", "float32", "float64")
WIDEST = 8192  # columns that one block has in registers


class RowTile(NamedTuple):
    """A tile of `rows` rows and `width` columns for `threads` threads; a row has `chunks` of them."""

    rows: int
    width: int
    chunks: int
    threads: int

    @staticmethod
    def of(columns: int, each: int = 32) -> RowTile:
        """The tile for rows of so many columns.  each: at most so many elements of a tile are in one thread's registers."""
        width = min(WIDEST, max(32, 1 << (columns - 1).bit_length()))
        if 512 < columns <= WIDEST:
            width = -(-columns // 512) * 512
        threads = max(128, -(-width // each // 128) * 128)
        return RowTile(max(1, 128 * 16 // width), width, -(-columns // width), threads)


def as_rows(x: Any, columns: int) -> Any:
    """A tensor as a contiguous matrix with so many columns."""
    flat = contiguous(x)
    return flat if flat.ndim == 2 and flat.shape[1] == columns else flat.reshape(prod(x.shape) // columns, columns)


def check_alike(name: str, first: Any, others: Mapping[str, tuple[Any, tuple[Any, ...], tuple[str, ...]]]) -> None:
    """Check the tensors of a function against its first one, which may be of any of FLOATS.

    others: name -> (tensor or None, its shape, the types it may have).  Raises training-argument.
    """
    given = {"x": (first, tuple(first.shape), FLOATS), **others}
    for what, (x, shape, kinds) in given.items():
        if x is None:
            continue
        wanted = f"{' or '.join(dict.fromkeys(kinds))} {shape} on {place(first)}"
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise error("training-argument", f"{what} of {name} is a ‹{type(x).__name__}›", expected=wanted)
        if is_numpy(x) != is_numpy(first) or tuple(x.shape) != shape or type_name(x) not in kinds or place(x) != place(first):
            raise error("training-argument", f"{what} of {name} is ‹{type_name(x)} {tuple(x.shape)} on {place(x)}›",
                        expected=wanted)
