"""Copies of operands that make them readable by TMA: transposed storage, and rows of whole 16 bytes.

Rows of an odd number of bytes begin anywhere in a word. `pad_block` reads whole words, combines neighbours and shifts the bits
of the row into place, four words per thread and step. So no access is narrower than a word, and stores have 16 bytes. By
elements, the same copy takes four times the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T
from tilelang.ir import dtype as dtype_of

THREADS = 256
_STEPS = 2  # vectors of 16 bytes of a thread: 10 loads in flight, 1 to 4 % faster than 20 (H200)
_EACH = _STEPS * THREADS  # vectors of a block


@dataclass(frozen=True)
class Rows:
    """`batch` matrices (0: one matrix, no batch dimension) of rows x columns elements of a type, and their copy.

    lead, down: strides of matrices and rows in elements; elements of a row are contiguous. padded: elements of a row of the
    copy, a multiple of 16 bytes; the copy is contiguous.
    """

    batch: int
    rows: int
    columns: int
    lead: int
    down: int
    padded: int
    element: str

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return int(dtype_of(self.element).bytes)

    @property
    def matrices(self) -> int:
        return max(1, self.batch)

    @property
    def bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return ((self.matrices - 1) * self.lead + (self.rows - 1) * self.down + self.columns) * self.size

    @property
    def words(self) -> int:
        """Number of words of 4 bytes that lie wholly inside; less than a word is left behind them."""
        return self.bytes // 4

    @property
    def fits(self) -> bool:
        """Whether `pad_block` can copy it."""
        return self.size in (1, 2, 4) and self.words > 0 and self.vectors < 2**29 and self.padded * self.size % 16 == 0

    @property
    def across(self) -> int:
        """Vectors of 16 bytes in a row of the copy."""
        return self.padded * self.size // 16

    @property
    def vectors(self) -> int:
        """Number of vectors of the copy that are made of whole words.

        These are all vectors up to the last element, without the last two where the operand ends inside a word.
        """
        last = (self.matrices * self.rows - 1) * self.across + ((self.columns - 1) * self.size) // 16
        return max(0, last - 1) if self.bytes % 4 else last + 1

    @property
    def blocks(self) -> int:
        """Number of blocks. Where elements are left behind the vectors, the last block copies them."""
        return self.vectors // _EACH + 1 if self.bytes % 4 else ceil(self.vectors / _EACH)

    def place(self, row: Any, column: Any) -> tuple[Any, ...]:
        """The index of an element of row `row` of all matrices."""
        return (row // self.rows, row % self.rows, column) if self.batch else (row, column)

    @property
    def source(self) -> Any:
        shape, strides = (self.batch, self.rows, self.columns), (self.lead, self.down, 1)
        return T.StridedTensor(shape[not self.batch:], strides[not self.batch:], self.element)

    @property
    def copy(self) -> Any:
        return T.Tensor((self.batch, self.rows, self.padded)[not self.batch:], self.element)

    def begin(self, row: Any) -> Any:
        """The element of X where a row of the copy begins."""
        if self.bytes >= 2**31:
            row = T.cast(row, "int64")
        if self.batch < 2 or self.lead == self.rows * self.down:
            return row * self.down
        return row // self.rows * self.lead + row % self.rows * self.down


@dataclass(frozen=True)
class Narrow:
    """C of a Form `f` with few rows or columns. r describes the rows of the other operand, the matrix."""

    f: Any
    r: Rows

    @property
    def of_b(self) -> bool:
        """Whether B is the matrix."""
        return bool(self.f.m <= self.f.n)

    @property
    def along(self) -> bool:
        """Whether k lies along the matrix's rows."""
        return bool(self.f.tb if self.of_b else not self.f.ta)

    @property
    def count(self) -> int:
        """Number of elements of C along the matrix."""
        return self.r.rows if self.along else self.r.columns


Copies = tuple[Rows | None, Rows | None]  # copies of A and B; None where the tensor is read as it is stored


@T.macro
def pad_block(X, P, r, block):
    """Copy from X to P the elements of one block out of r.blocks, with 256 threads."""
    if (block + 1) * _EACH <= r.vectors:  # no thread has a condition, so all its loads are in flight together
        _vectors(X, P, r, block, False)
    else:
        _vectors(X, P, r, block, True)
        unit = 16 // r.size
        for e in T.Parallel(2 * unit if r.bytes % 4 else 0):
            row, column = (r.vectors * unit + e) // r.padded, (r.vectors * unit + e) % r.padded
            if column < r.columns and row < r.matrices * r.rows:
                P[r.place(row, column)] = X[r.place(row, column)]


@T.macro
def _vectors(X, P, r, block, partly):
    source = T.make_tensor(X.data, (r.words,), "uint32")
    copy = T.make_tensor(P.data, (r.matrices * r.rows * r.across, 4), "uint32")
    for q, v in T.Parallel(_EACH, 4):
        at = block * _EACH + q
        if not partly or at < r.vectors:
            copy[at, v] = _shifted(source, r, at, v)


@T.macro
def pad_operands(copies, given, room):
    """The launch that copies operands of a GEMM; the GEMM is a launch of the same program, so that a call launches one."""
    ahead, more = (0 if r is None else r.blocks for r in copies)
    with T.Kernel(ahead + more, threads=THREADS) as block:
        if not more or not ahead:
            which = 0 if ahead else 1
            pad_block(given[which], room[which], copies[which], block)
        elif block < ahead:
            pad_block(given[0], room[0], copies[0], block)
        else:
            pad_block(given[1], room[1], copies[1], block - ahead)


def padded(tensor: Any, copy: Any, r: Rows | None) -> Any:
    """An operand as a GEMM reads it: the tensor, or its copy."""
    if r is None:
        return tensor
    strides = (r.rows * r.padded, r.padded, 1)[not r.batch:]
    return T.make_tensor(copy.data, (r.batch, r.rows, r.columns)[not r.batch:], r.element, strides=strides)


def pad_rows(r: Rows) -> Any:
    """The program (X, Y) that copies X to Y with longer rows. Elements of Y's rows behind `columns` get any bits."""

    @T.prim_func
    def padded(X: r.source, Y: r.copy):
        # Blocks take Y's vectors in order: blocks that run together read neighbouring addresses of X, and a cache line that two
        # rows share is loaded once.
        with T.Kernel(r.blocks, threads=THREADS) as b:
            pad_block(X, Y, r, b)

    return padded


def _shifted(source: Any, r: Rows, vector: Any, v: Any) -> Any:
    """Word v of a vector of the copy."""
    number = T.cast(vector, "uint32")
    row, column = T.cast(number // r.across, "int32"), T.cast(number % r.across, "int32")
    first = r.begin(row) * r.size
    here = first // 4 + column * 4 + v
    low = source[T.min(here, r.words - 1)]
    if r.down * r.size % 4 == 0 and (r.batch < 2 or r.lead * r.size % 4 == 0):
        return low
    both = T.cast(source[T.min(here + 1, r.words - 1)], "uint64") << 32 | T.cast(low, "uint64")
    return T.cast(both >> T.cast(first % 4 * 8, "uint64"), "uint32")


def repack(shape: tuple[int, ...], strides: tuple[int, ...], out_strides: tuple[int, ...], dtype: str,
           transposed: bool) -> Any:
    """The program (X, Y) that copies matrices to another order of storage, or from rows that are not contiguous.

    X: (batch, rows, columns) with these strides. Y: (batch, rows or columns, padded) with out_strides; elements of its rows
    behind `padded` get any bits.
    """
    batch, rows, columns = shape
    # Tiles of 128-byte lines of X, and of bytes of Y too. (Rows of 64 bytes, stored by bytes, ran at a tenth of the rate.)
    side = 128 if dtype_of(dtype).bytes == 1 else 64
    padded = out_strides[1]
    out_shape = (batch, columns if transposed else rows, padded)
    in_words = transposed and side == 128 and padded % 16 == 0

    @T.prim_func
    def repacked(X: T.StridedTensor(shape, strides, dtype), Y: T.StridedTensor(out_shape, out_strides, dtype)):
        with T.Kernel(T.ceildiv(columns, side), T.ceildiv(rows, side), batch, threads=256) as (bx, by, bz):
            if in_words:
                _transpose_bytes(X, Y, out_shape, dtype, bx, by, bz)
            elif transposed:
                S = T.alloc_shared((side, side), dtype)
                T.copy(X[bz, by * side, bx * side], S)
                for i, j in T.Parallel(side, side):
                    if bx * side + i < columns and by * side + j < padded:  # whole vectors
                        Y[bz, bx * side + i, by * side + j] = S[j, i]
            else:
                for i, j in T.Parallel(side, side):
                    if by * side + i < rows and bx * side + j < columns:
                        Y[bz, by * side + i, bx * side + j] = X[bz, by * side + i, bx * side + j]

    return repacked


@T.macro
def _transpose_bytes(X, Y, out_shape, dtype, bx, by, bz):
    """Transpose 128 x 128 bytes with 256 threads: each reads four words of 16 rows and makes 16 bytes of four columns."""
    matrices, columns, padded = out_shape
    S = T.alloc_shared((128, 128), dtype)
    # Eight threads read one word of eight runs of 16 rows each; this layout puts them into different banks.
    T.annotate_layout({S: lambda i, j: i * 128 + ((j // 16) ^ (i // 16)) * 16 + j % 16})
    words = T.view(S, (128, 32), "uint32")
    turned = T.make_tensor(Y.data, (matrices, columns, padded // 4), "uint32")
    own = T.alloc_local((16,), "uint32")
    thread = T.get_thread_binding()
    T.copy(X[bz, by * 128, bx * 128], S)
    T.sync_threads()
    for e in T.unroll(16):
        own[e] = words[thread % 8 * 16 + e, thread // 8]
    for c in T.unroll(4):
        column, row = bx * 128 + thread // 8 * 4 + c, by * 32 + thread % 8 * 4
        if column < columns and row < padded // 4:
            for v in T.vectorized(4):
                turned[bz, column, row + v] = _byte(own, 4 * v, c) | _byte(own, 4 * v + 1, c) << 8 | (
                    _byte(own, 4 * v + 2, c) << 16 | _byte(own, 4 * v + 3, c) << 24)


def _byte(words: Any, at: Any, c: Any) -> Any:
    return words[at] >> T.cast(8 * c, "uint32") & T.cast(255, "uint32")
