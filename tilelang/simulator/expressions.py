"""Expressions of both simulators that the evaluator of scalars cannot compile: intrinsics, and addresses as values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import AddressOf, Call, Var, numpy_dtype, DYNAMIC, FRAGMENT
from tilelang.ir.evaluate import Closure, Value, intrinsic_call, variable
from tilelang.target.device_functions import known_function

from .context import Context
from .faults import fault
from .lanes import LaneFrame, is_address
from .memory import geometry, linear_index


def call(c: Context, e: Call) -> Closure:
    """Compile a call; a CUDA function that the program names itself behaves like its intrinsic."""
    handler = c.calls.get(e.op)
    if handler is not None:
        return handler(c, e)
    known = known_function(e, c.launch.sources)
    return intrinsic_call(c, e) if known is None else c.expr(known)


def _variable(c: Context, e: Var) -> Closure:
    fn = variable(c, e)
    if not e.dtype.is_handle:
        return fn

    def run(f: LaneFrame) -> Value:
        x = fn(f)
        return x if is_address(x) else np.asarray(c.memory.start_of(f, e, x)).astype(np.uint64)

    return run


def _address(c: Context, e: AddressOf) -> Closure:
    b = e.buffer
    if b.scope() == FRAGMENT or b.scope().startswith("shared.") and b.scope() != DYNAMIC:
        raise fault("sim-unsupported", f"the address of {b.name}, which is in {b.scope()}",
                    expected="global, shared or local memory", found=b.scope(), span=e.span or c.place)
    base, fns, geo = _variable(c, b.data), [c.expr(i) for i in e.indices], geometry(c, b)
    item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes

    def run(f: LaneFrame) -> Value:
        start = base(f)
        linear, _ = linear_index([np.asarray(fn(f)).astype(np.int64) for fn in fns], *geo(f))
        return (start.astype(np.int64) + linear * item).astype(np.uint64)

    return run


VALUES: dict[type, Callable[[Any, Any], Closure]] = {Var: _variable, AddressOf: _address, Call: call}
