"""The common handling of wgmma in both simulators: the operands of a call, its result, and the value of a descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, numpy_dtype
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.warp_groups import PER_GROUP
from tilelang.target.wgmma import K_STEP_BYTES, WGMMA_ROWS, encode_descriptor
from tilelang.target.thread_calls import WARP

from .boxes import UNIT
from .context import Context
from .faults import fault
from .lanes import LaneFrame, uniform
from .matrix import Registers, register_order


def wgmma_row(e: Call) -> Any:
    """The row of a wgmma call.  Raises sim-unsupported for an unknown name and for operand orders that it does not take."""
    row, majors = WGMMA_ROWS.get(e.options.row), (e.options.a_major, e.options.b_major)
    if row is None:
        raise fault("sim-unsupported", f"no wgmma instruction is called ‹{e.options.row}›", expected="an instruction of wgmma",
                    span=e.span)
    if any(m not in row.majors for m in majors):
        raise fault("sim-unsupported", f"{row.name} takes «operands of order {', '.join(row.majors)}», found {majors}",
                    span=e.span)
    return row


class DescribedOperand:
    """Operand `number` (1: A, 2: B) of a wgmma, in shared memory that a descriptor names.  extent: rows of A, columns of B."""

    def __init__(self, c: Context, e: Call, number: int, row: Any) -> None:
        self.c, self.span, self.value = c, e.span, c.expr(e.args[number])
        self.dt = numpy_dtype(row.a_dtype if number == 1 else row.b_dtype)
        self.major = e.options.a_major if number == 1 else e.options.b_major
        self.extent: int = row.shape[0 if number == 1 else 1]
        self.k_bytes: int = K_STEP_BYTES if number == 1 else row.b_bytes

    def descriptor(self, f: LaneFrame) -> int:
        """The descriptor, the same in all lanes."""
        return int(uniform(self.value(f), f, "a wgmma descriptor", self.span))


class WgmmaRegisters:
    """The operands of a wgmma in registers: its accumulator, and A unless a descriptor names it (None)."""

    def __init__(self, c: Context, e: Call, row: Any) -> None:
        self.row, self.types = row, (numpy_dtype(row.c_dtype), numpy_dtype(row.a_dtype))
        self.accumulator = Registers(c, e.args[0], row.c.registers * self.types[0].itemsize, e.span)
        self.a = Registers(c, e.args[1], row.a.registers * self.types[1].itemsize, e.span) \
            if isinstance(e.args[1], AddressOf) else None
        self.keep, self.span = c.expr(e.args[3]), e.span
        self.words, self.selector = c.expr(e.args[4]) if row.sparse else None, e.options.selector

    def keeps(self, f: LaneFrame) -> bool:
        """Whether the instruction adds to the old accumulator (scale-d)."""
        return bool(uniform(self.keep(f), f, "scale-d of a wgmma", self.span))

    def rows(self, warps: np.ndarray) -> slice:
        """The rows of the tile that these warps of one group compute."""
        first = int(warps[0]) % PER_GROUP * WARP
        return slice(first // 2, (first + len(warps) * WARP) // 2)

    def places(self, fragment: Any, warps: np.ndarray) -> np.ndarray:
        """[row, column] of the rows of these warps -> element of their registers, in order of the threads."""
        first = int(warps[0]) % PER_GROUP * WARP
        return register_order(fragment)[self.rows(warps)] - first * fragment.registers

    def read_a(self, f: LaneFrame, warps: np.ndarray) -> np.ndarray:
        """The rows of A that these warps hold."""
        assert self.a is not None, "A is in registers"
        return self.a.read(f, warps, self.types[1]).reshape(-1)[self.places(self.row.a, warps)]

    def multiply(self, f: LaneFrame, warps: np.ndarray, x: np.ndarray, y: np.ndarray, keep: bool) -> None:
        """accumulator = x @ y, plus the old one if `keep`, for the rows of these warps.  x: the kept values of sparse rows."""
        if self.words is not None:
            words = np.broadcast_to(np.asarray(self.words(f)), f.active().shape)
            x = self.row.expanded(x, words.reshape(-1, WARP)[warps].ravel().astype(np.uint32), self.selector)
        old, at = self.accumulator.read(f, warps, self.types[0], keep).reshape(-1), self.places(self.row.c, warps)
        out = np.empty(old.size, self.types[0])
        out[at.ravel()] = self.row.reference(x, y, old[at], keep).ravel()
        self.accumulator.write(f, warps, out.reshape(len(warps), -1))


def descriptor(c: Context, e: Call, at: Callable[[LaneFrame], Value]) -> Closure:
    """wgmma_descriptor(address [, bytes]).  at: f(frame) -> byte addresses of the first operand."""
    more = c.expr(e.args[1]) if len(e.args) > 1 else None
    fixed = e.options.offset
    rest = encode_descriptor(0, e.options.lbo, e.options.sbo, e.options.swizzle)

    def run(f: LaneFrame) -> Value:
        address = np.asarray(at(f) + fixed)
        if more is not None:
            address = address + np.asarray(more(f)).astype(np.int64)
        on = address if address.ndim == 0 or f.mask is None else address[f.mask]
        if (on % UNIT).any():
            odd = int(on[on % UNIT > 0][0]) if on.ndim else int(on)
            raise fault("sim-misaligned", f"a wgmma operand at ‹byte {odd}›, not a multiple of 16",
                        expected="a multiple of 16 bytes", span=e.span)
        address = address - f.block.base  # only the address bits relative to its block fit
        return (address >> 4 & 0x3FFF).astype(np.uint64) | np.uint64(rest)

    return run
