"""The handlers of the reference interpreter, from node types and intrinsics to what compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import Alloc, Evaluate, If, Launch, Load, Parallel, Store, TileOp

from .barriers import BARRIER_OPS
from .hopper import TILE_HOPPER_OPS
from .launch import compile_launch
from .memory_access import allocate, load, store
from .statements import compile_if, evaluate, parallel, synchronised, tile_op
from .warp import WARP_OPS
from ..context import Handlers
from ..control_flow import CONTROL_FLOW
from ..expressions import VALUES
from ..lane_ops import LANE_OPS
from ..lanes import Action

_STATEMENTS: dict[type, Callable[[Any, Any], Action]] = {
    **CONTROL_FLOW, If: compile_if, Evaluate: evaluate, Store: store, Alloc: allocate, Launch: compile_launch,
    Parallel: parallel, TileOp: tile_op,
}  # fmt: skip

TILE = Handlers(
    exprs={**VALUES, Load: load},
    stmts={kind: synchronised(handler) for kind, handler in _STATEMENTS.items()},
    calls={**LANE_OPS, **TILE_HOPPER_OPS, **WARP_OPS, **BARRIER_OPS},
)
