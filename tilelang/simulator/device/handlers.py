"""The handlers of the device simulator, from node types and intrinsics to what compiles them."""

from __future__ import annotations

from collections.abc import Callable

from tilelang.ir import Alloc, Call, Launch, Load, Parallel, Store, TileOp
from tilelang.ir.evaluate import Closure, Value

from .async_copy import ASYNC_OPS
from .barriers import BARRIER_OPS
from .context import DeviceContext
from .counters import count_warps
from .launch import HOPPER_OPS, compile_launch
from .matrix import MATRIX_OPS
from .memory_access import allocate, load, store
from ..context import Context, Handlers
from ..control_flow import CONTROL_FLOW
from ..expressions import VALUES
from ..faults import fault
from ..lane_ops import LANE_OPS
from ..lanes import Action, LaneFrame


def _counted(handler: Callable[[Context, Call], Closure]) -> Callable[[Context, Call], Closure]:
    """A handler that also counts how often the intrinsic is executed."""

    def counted(c: Context, e: Call) -> Closure:
        fn = handler(c, e)

        def run(f: LaneFrame) -> Value:
            count_warps(f, e.op)
            return fn(f)

        return run

    return counted


def _parallel(c: DeviceContext, s: Parallel) -> Action:
    raise fault("sim-unsupported", "a T.Parallel loop in a lowered program",
                expected="a loop of threads", found="T.Parallel", span=s.span)


def _tile_op(c: DeviceContext, s: TileOp) -> Action:
    raise fault("sim-unsupported", f"tile op {s.op_name} in a lowered program",
                expected="a lowered program", found=f"tile op {s.op_name}", span=s.span)


DEVICE = Handlers(
    exprs={**VALUES, Load: load},
    stmts={**CONTROL_FLOW, Store: store, Alloc: allocate, Launch: compile_launch, Parallel: _parallel, TileOp: _tile_op},
    calls={**{op: _counted(h) for op, h in LANE_OPS.items()}, **HOPPER_OPS, **MATRIX_OPS, **ASYNC_OPS, **BARRIER_OPS},
)
