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
_NARROW = 512  # columns up to which a row has a power of two of lanes
_EACH = 2048  # elements of a tile of 128 threads
VECTOR = 8  # elements of a load: 16 bytes of 16-bit types
_STAGED = 5120  # elements of a tile of several rows
MOST_THREADS = 1024  # of a block


class RowTile(NamedTuple):
    """A tile of `rows` rows and `width` columns for `threads` threads; a row has `chunks` of them."""

    rows: int
    width: int
    chunks: int
    threads: int

    @staticmethod
    def of(columns: int, each: int = 32, most: int = 1024) -> RowTile:
        """The tile for rows of so many columns that are loaded to registers.  each: at most so many elements of a tile are in
        one thread's.  most: threads for a whole row; longer rows have chunks for so many.

        Threads have whole vectors, as many as leave the fewest threads without one, and of these numbers the largest for four
        warps or more: fewer threads have more on their way, and wait for fewer others.
        """
        most = min(most, MOST_THREADS)
        if columns > most * each:
            return RowTile(1, most * each, -(-columns // (most * each)), max(128, most))
        if columns <= _NARROW:
            width = _narrow(columns)
            return RowTile(_power(3 * _EACH // (2 * width)), width, 1, 128)
        vectors = -(-columns // VECTOR)
        if 32 * each >= columns:  # rows of one warp each
            return RowTile(4, vectors * VECTOR, 1, 128)
        warps = {k: -(-vectors // (k * 32)) for k in range(1, each // VECTOR + 1)}
        k = min((k for k in warps if warps[k] <= most // 32), key=lambda k: (warps[k] * k, warps[k] < 4, -k))
        return RowTile(1 + (k == 1), vectors * VECTOR, 1, 32 * warps[k])

    @staticmethod
    def staged(columns: int) -> RowTile | None:
        """The tile of rows that copies bring to shared memory ahead of their use; None for rows that are too long.

        A thread has two vectors: with one, twice as many warps wait for the means of a row."""
        width = _narrow(columns) if columns <= _NARROW else -(-columns // VECTOR) * VECTOR
        rows = _power(max(1, _STAGED // width))
        threads = -(-rows * width // (64 * VECTOR)) * 32
        return RowTile(rows, width, 1, threads) if threads <= MOST_THREADS else None


def _narrow(columns: int) -> int:
    """The width of a tile of short rows: theirs where it is whole vectors, else a power of two."""
    return columns if columns >= 32 and columns % VECTOR == 0 else max(32, 1 << (columns - 1).bit_length())


def _power(n: int) -> int:
    """The largest power of two up to n."""
    return 1 << n.bit_length() - 1


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
