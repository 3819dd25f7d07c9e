"""Matrices as they are stored, and the copies that make them readable for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

from tilelang.language.tracing.state import error

from ..arrays import is_numpy, strides


def as_it_lies(x: Any) -> Any:
    """The tensor itself."""
    return x


def _transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2) if is_numpy(x) else x.mT  # torch takes two thirds of the time for .mT


@dataclass(frozen=True)
class Operand:
    """op(x) of a GEMM, as it is stored.

    rows, columns: of the stored matrix. batch: 0 for none. lead, down, right: strides of the batch, of rows, of columns in
    elements. flipped: the stored matrix is the tensor with its last two dimensions exchanged. transposed: the stored matrix is
    op(x) transposed.
    """

    rows: int
    columns: int
    batch: int
    lead: int
    down: int
    right: int
    flipped: bool
    transposed: bool

    @property
    def logical(self) -> tuple[int, int]:
        """The shape of op(x)."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def plain(self) -> bool:
        """Whether rows are contiguous and do not overlap."""
        return self.right == 1 and self.down >= self.columns and (self.batch < 2 or self.lead >= 0)

    def fits(self, size: int) -> bool:
        """Whether TMA can load it: strides are multiples of 16 bytes. size: bytes of an element."""
        return self.plain and self.down * size % 16 == 0 and self.lead * size % 16 == 0

    def row_start(self, size: int) -> int:
        """Rows start at multiples of this many bytes, at most 128, if the tensor does."""
        return gcd(self.down * size, 128)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides as a Form has them: () for contiguous."""
        if self.down == self.columns and (not self.batch or self.lead == self.rows * self.columns):
            return ()
        return (self.lead, self.down, 1) if self.batch else (self.down, 1)

    @property
    def view(self) -> Callable[[Any], Any]:
        """A function from the tensor to the stored matrix; `as_it_lies` where they are the same."""
        return _transposed if self.flipped else as_it_lies


@dataclass(frozen=True)
class Copied:
    """A copy of an operand that is made first.

    shape: of its buffer (batch, rows, padded columns). transposed: the copy is stored transposed. operand: what the kernel then
    reads.
    """

    shape: tuple[int, int, int]
    transposed: bool
    operand: Operand

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.shape[1] * self.shape[2], self.shape[2], 1


def operand(x: Any, name: str, transpose: bool) -> Operand:
    """op(x) of a tensor. Raises matmul-shape for a tensor that is no matrix or batch of matrices."""
    if x.ndim not in (2, 3):
        raise error("matmul-shape", f"{name} has shape ‹{tuple(x.shape)}›, a matrix or a batch of matrices was expected",
                    expected="2 or 3 dimensions", hint="reshape it to (batch, rows, columns)")
    *lead, rows, columns = (int(n) for n in x.shape)
    *first, down, right = strides(x)
    if columns == 1:
        right = 1
    if rows == 1:
        down = columns if right == 1 else 1
    flipped = right != 1 and down == 1
    if flipped:
        rows, columns, down, right = columns, rows, right, down
    if rows == 1:
        down = columns
    batch = lead[0] if lead else 0
    return Operand(rows, columns, batch, first[0] if batch > 1 else rows * down, down, right, flipped,
                   flipped != transpose)


def copy_of(x: Operand, size: int, transposed: bool) -> Copied:
    """The copy that TMA loads best: rows of whole 128 bytes, or of whole 16 bytes where rows are shorter.

    transposed: the copy is stored transposed.
    """
    rows, columns = (x.columns, x.rows) if transposed else (x.rows, x.columns)
    unit = (128 if columns * size > 128 else 16) // size
    padded = -(-columns // unit) * unit
    after = Operand(rows, columns, x.batch, rows * padded, padded, 1, False, x.transposed != transposed)
    return Copied((max(1, x.batch), rows, padded), transposed, after)
