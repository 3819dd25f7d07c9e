"""ldmatrix and stmatrix on the device simulator: rows of 16 bytes in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang.ir import Call

from .context import DeviceContext
from ..lane_ops import effects
from ..lanes import Action, LaneFrame, only
from ..matrix import U16, MatrixRegisters, mma, whole_warps
from ..memory import shared_operand


def _rows_of(c: DeviceContext, e: Call, held: MatrixRegisters, mode: str) -> Any:
    """f(frame, warps) -> byte addresses (warps, num, 8) of the rows that the lanes give; records the accesses."""
    shared = shared_operand(e, held.shared, "row")
    reach = c.memory.reach(shared.buffer, shared.indices, 16, e.span, f"{e.op} {'of' if mode == 'read' else 'to'}")
    accesses, slot = c.accesses, c.slot(shared.buffer.data)
    access = c.memory.access(shared.buffer, 16, e.span, mode, e.op)

    def run(f: LaneFrame, warps: np.ndarray | None) -> np.ndarray:
        with only(f, held.giving(f)) as active:
            address = reach(f)
            # Each matrix is one pass of 8 rows of 16 bytes, which is counted as a 16-byte access.
            accesses.touch(f, f.slots[slot], address, access, None if mode == "read" else np.ones(int(active.sum()), bool))
        rows = address.reshape(-1, 4, 8)[:, :held.num]
        return rows if warps is None else rows[warps]

    return run


def _ldmatrix(c: DeviceContext, e: Call) -> Action:
    into = MatrixRegisters(c, e)
    rows = _rows_of(c, e, into, "read")

    def run(f: LaneFrame) -> None:
        warps = whole_warps(f, e.op, e.span)
        at = rows(f, warps)
        into.write(f, warps, f.block.shared.store.flat(U16)[(at // 2)[..., None] + np.arange(8)])

    return run


def _stmatrix(c: DeviceContext, e: Call) -> Action:
    out = MatrixRegisters(c, e)
    rows = _rows_of(c, e, out, "write")

    def run(f: LaneFrame) -> None:
        warps = whole_warps(f, e.op, e.span)
        x = out.read(f, warps)
        at = rows(f, warps)
        f.block.shared.store.flat(U16)[(at // 2)[..., None] + np.arange(8)] = x

    return run


MATRIX_OPS = effects({"mma": mma, "ldmatrix": _ldmatrix, "stmatrix": _stmatrix})
