"""A matrix instruction of a warp: operand layouts over its lanes, names and meaning in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tilelang.ir import dtype, numpy_dtype
from tilelang.ir.record import record
from tilelang.layout import Fragment, Mode


@record
class MmaRow:
    """c += a @ b over the lanes of a warp.

    shape: (m, n, k).  a: Fragment of the (m, k) operand, b: of the (k, n) operand, c: of the (m, n) accumulator; each over
    the lanes of a warp, registers counted in elements.  instruction: its PTX name, or the name of its builtin.  min_arch:
    first sm number that has it.  chips: those that have it, with the passes (of 4 cycles) it takes; () for mma.sync.
    multiply: c + a @ b in the order of the hardware, None where that is unspecified.
    """

    name: str
    shape: tuple[int, int, int]
    a_dtype: dtype
    b_dtype: dtype
    c_dtype: dtype
    a: Fragment
    b: Fragment
    c: Fragment
    instruction: str
    min_arch: int = 0
    chips: tuple[tuple[str, int], ...] = ()
    multiply: Callable[..., np.ndarray] | None = None

    @property
    def lanes(self) -> int:
        """Lanes of a warp on the machines that have the instruction."""
        return self.c.threads

    @property
    def run(self) -> int:
        """Consecutive elements of k in a lane where these are all it holds of an operand; 0 for mma.sync, whose operands come
        by ldmatrix."""
        return self.a.registers if self.chips else 0

    @property
    def in_columns(self) -> bool:
        """Whether a lane holds elements of one column of the accumulator, consecutive rows in consecutive registers."""
        return self.c.modes[0][-1] == register(4, 1)

    def with_k(self, pack: int, width: int) -> MmaRow:
        """`pack` instructions as one of so many times the K, in which a lane holds `width` consecutive elements of k (or all it
        holds), the next lanes the next ones, and so on.  Both operands have one order of k, so any is right."""
        (m, n, k), run = self.shape, self.run * pack
        width = min(width, run)
        along = (register(run // width, width), thread(self.lanes // m, m), register(width, 1))
        a, b = Fragment((m, k * pack), (self.a.modes[0], along), threads=self.lanes), Fragment(
            (k * pack, n), (along, self.b.modes[1]), threads=self.lanes)
        return replace(self, shape=(m, n, k * pack), a=a, b=b)

    def with_columns(self, count: int) -> MmaRow:
        """`count` instructions as one of so many times the M: a lane holds neighbours among the rows of A, which it can load at
        once where K is stored outermost, and so many times the neighbours among the rows of the accumulator."""
        (m, n, k), a, c = self.shape, self.a, self.c
        a = Fragment((m * count, k), ((*a.modes[0], register(count, a.registers)), a.modes[1]), threads=self.lanes)
        acc = Fragment((m * count, n), ((*c.modes[0], register(count, c.registers)), c.modes[1]), threads=self.lanes)
        return replace(self, shape=(m * count, n, k), a=a, c=acc)

    def of_addresses(self) -> tuple[Fragment, Fragment]:
        """(a, b) with the elements whose addresses lanes give to loads that transpose: 16 lanes load four rows of K."""
        rows, along = (thread(4, 1), register(4, 1)), self.a.modes[1]
        *outer, last = along
        k = (*outer, register(last.size // 4, 4), thread(4, 4))
        return (Fragment(self.a.shape, (rows, k), threads=self.lanes), Fragment(self.b.shape, (k, rows), threads=self.lanes))

    def on(self, target: Any) -> bool:
        """Whether a target has the instruction."""
        return target.arch in dict(self.chips) if self.chips else target.at_least(self.min_arch)

    @property
    def registers(self) -> tuple[int, int, int]:
        """32-bit registers (64-bit for float64) a lane passes for (a, b, c)."""
        return tuple(max(1, frag.registers * dt.bits // self.register_bits)  # type: ignore[return-value]
                     for frag, dt in ((self.a, self.a_dtype), (self.b, self.b_dtype), (self.c, self.c_dtype)))

    @property
    def register_bits(self) -> int:
        return 64 if self.c_dtype == "float64" else 32

    def reference(self, a: Any, b: Any, c: Any) -> np.ndarray:
        """c + a @ b as the hardware computes it: exact products, accumulated in the type of the accumulator.

        a: (..., m, k), b: (..., k, n), c: (..., m, n) arrays; leading dimensions broadcast.  tf32 operands are truncated to
        10 mantissa bits, because the hardware ignores the other bits.
        """
        if self.multiply is not None:
            with np.errstate(all="ignore"):
                return self.multiply(np.asarray(a), np.asarray(b), np.asarray(c))
        return multiply_add(self.a_dtype, self.c_dtype, a, b, np.asarray(c))


def multiply_add(operands: dtype, accumulator: dtype, a: Any, b: Any, c: np.ndarray) -> np.ndarray:
    """c + a @ b as tensor cores compute it, for operands and an accumulator of these types (MmaRow.reference)."""
    c_type = numpy_dtype(accumulator)
    if accumulator.is_int:
        exact = np.matmul(np.asarray(a, np.float32), np.asarray(b, np.float32))  # |sum| <= 32 * 2**16
        return np.add(c.astype(c_type), exact.astype(np.int64).astype(c_type))
    wide = np.float64 if accumulator == "float64" else np.float32
    a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    if operands == "tfloat32":
        a, b = truncate_tf32(a), truncate_tf32(b)
    return (np.matmul(a, b) + c.astype(wide)).astype(c_type)  # type: ignore[no-any-return]


def truncate_tf32(x: np.ndarray) -> np.ndarray:
    """float32 values with the low 13 mantissa bits cleared."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def thread(size: int, stride: int) -> Mode:
    """A digit of an index that selects the lane."""
    return Mode(size, "thread", stride)


def register(size: int, stride: int) -> Mode:
    """A digit of an index that selects the register."""
    return Mode(size, "register", stride)
