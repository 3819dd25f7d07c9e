"""The common handling of wgmma in both simulators: the instruction of a call, and the value of a descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import Call
from tilelang.ir.evaluate import Closure, Value
from tilelang.target.wgmma import WGMMA_ROWS, encode_descriptor

from .boxes import UNIT
from .context import Context
from .faults import fault
from .lanes import LaneFrame


def wgmma_row(e: Call) -> Any:
    """The row of a wgmma call.  Raises sim-unsupported for an unknown name and for operand orders that it does not take."""
    row, majors = WGMMA_ROWS.get(e.options.row), (e.options.a_major, e.options.b_major)
    if row is None:
        raise fault("sim-unsupported", f"no wgmma instruction is called {e.options.row}",
                    expected="an instruction of wgmma", found=f"{e.options.row}", span=e.span)
    if any(m not in row.majors for m in majors):
        raise fault("sim-unsupported", f"{row.name} takes operands of order {', '.join(row.majors)}, found {majors}",
                    expected=f"operands of order {', '.join(row.majors)}", span=e.span)
    return row


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
            raise fault("sim-misaligned", f"a wgmma operand at byte {odd}, not a multiple of 16",
                        expected="a multiple of 16 bytes", found=f"byte {odd}", span=e.span)
        address = address - f.block.base  # only the address bits relative to its block fit
        return (address >> 4 & 0x3FFF).astype(np.uint64) | np.uint64(rest)

    return run
