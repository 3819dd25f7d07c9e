"""The reference interpreter: runs a tile program statement by statement, on whole tiles, in NumPy.

Blocks run one after another.  A tile op runs its `reference`.  A Parallel loop runs all its iterations at once (or in
successive groups, see parallel.py).  Per-thread code runs on all threads of the block in lock step; where a program never
distinguishes its threads, one lane represents all of them.  Programs with planned pipelines (phase TILE after
plan_pipelines) are also supported: asynchronous copies complete at once, commits and waits do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang.ir import Alloc, Evaluate, Func, If, Launch, Load, Parallel, Store, TileOp
from tilelang.ops.combine import expanded
from tilelang.ops.im2col import without

from .barriers import BARRIER_OPS
from .context import TileContext
from .hopper import TILE_HOPPER_OPS
from .launch import TileProgramLaunch
from .memory_access import allocate, load, store
from .statements import compile_if, evaluate, parallel, synchronised, tile_op
from .warp import WARP_OPS
from ..context import Handlers
from ..control_flow import CONTROL_FLOW
from ..expressions import VALUES
from ..host import Arguments, run_program
from ..lane_ops import LANE_OPS, Printer
from ..lanes import Action
from ..rank_ops import RANK_OPS
from ..ranks import Ranks

_STATEMENTS: dict[type, Callable[[Any, Any], Action]] = {
    **CONTROL_FLOW, If: compile_if, Evaluate: evaluate, Store: store, Alloc: allocate, Parallel: parallel, TileOp: tile_op,
    Launch: lambda c, s: TileProgramLaunch(c, s).run}

TILE = Handlers(
    exprs={**VALUES, Load: load},
    stmts={kind: synchronised(handler) for kind, handler in _STATEMENTS.items()},
    calls={**LANE_OPS, **TILE_HOPPER_OPS, **WARP_OPS, **BARRIER_OPS, **RANK_OPS},
)


def run_tile(func: Any, args: Arguments, *, check: bool = True, aliased: bool = False) -> dict[str, np.ndarray]:
    """Run a tile program on NumPy arrays and scalars.

    func: a Func, or the PrimFunc of the language.  args: by name or in parameter order; outputs (`tilelang_out_idx`)
    may be left out.  Returns every tensor parameter after the run, by name; the given arrays are not changed.
    check: reject reads of memory that was never written.  aliased: arrays that share memory do so in the program too.
    Raises sim-argument, sim-out-of-bounds, sim-uninitialized, sim-thread-dependent, sim-unsupported, sim-assert; with
    warp roles or mbarriers also sim-barrier (a deadlock) and sim-mbarrier.
    """
    return _run(func, (args,), None, check, aliased)[0]


def run_tile_ranks(func: Any, args: Sequence[Arguments], *, seed: int | None = None,
                   check: bool = True) -> list[dict[str, np.ndarray]]:
    """Run a tile program on several ranks at once; args: for each rank, as in run_tile.

    seed: None runs the first block that can run, a number chooses blocks at random.  Raises what run_tile raises, and sim-rank.
    """
    return _run(func, args, seed, check, False)


def _run(func: Any, args: Sequence[Arguments], seed: int | None, check: bool, aliased: bool) -> list[dict[str, np.ndarray]]:
    program: Func = without(expanded(getattr(func, "func", func)))
    c = TileContext(program, check, TILE, Ranks(len(args), seed))
    return [b.outputs(check) for b in run_program(c, program, args, aliased, lambda storage: storage, Printer())]
