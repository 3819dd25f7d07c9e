"""How both simulators compile a program: tables of handlers, and the context that the handlers share.

A handler compiles one kind of node: `handler(context, node)` returns a Python function of a LaneFrame.  Expressions and
statements are looked up by the type of the node, intrinsics by the name of the call.  Handlers stand in modules by subject
(control_flow, lane_ops, device.tma, ...), and each simulator joins the tables of its modules (device/run.py, reference/run.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilelang.ir import Call, Func, Stmt, TileOp
from tilelang.ir.evaluate import EXPRESSIONS, Closure, ExprCompiler
from tilelang.target.atomics import Branch, Iterations, WarpRole
from tilelang.target.hip import WAVE
from tilelang.target.intrinsics import INTRINSICS
from tilelang.target.tensor_map import TensorMap
from tilelang.target.thread_calls import WARP

from .addresses import Addresses
from .faults import fault
from .lanes import Action
from .memory import Memory, granules
from .ranks import Ranks


@dataclass(frozen=True)
class Handlers:
    """What compiles the nodes of a program.  exprs, stmts: by node type; TileOp stands for all tile ops.  calls: by intrinsic.

    An expression that is not in `exprs` is compiled as in `tilelang.ir.evaluate`.
    """

    exprs: Mapping[type, Callable[[Any, Any], Closure]]
    stmts: Mapping[type, Callable[[Any, Any], Action]]
    calls: Mapping[str, Callable[[Any, Call], Closure]]


@dataclass
class LaunchScope:
    """The launch being compiled.

    threads: of a block; lanes from this one on pad its last warp.  sources: C++ sources in front of its kernel.  maps: its
    tensor maps by name.
    """

    threads: int = 0
    sources: tuple[str, ...] = ()
    maps: dict[str, TensorMap] = field(default_factory=dict)


class Context(ExprCompiler):
    """The state that the handlers of one program share; compiles its expressions and statements.

    granules: sizes in bytes by id of a buffer's data (memory.py).  launch: the launch being compiled.  inside: the constructs
    around the statement being compiled.  in_while: whether the innermost loop is a while loop.  discarded: the arguments of the
    last call whose result is not used.  chip: FuncFacts.chip.  warp: lanes of a warp.
    """

    memory: Memory

    def __init__(self, func: Func, check: bool, handlers: Handlers, ranks: Ranks | None = None) -> None:
        super().__init__(INTRINSICS, {**EXPRESSIONS, **handlers.exprs})
        self.check, self.stmts, self.calls, self.granules = check, handlers.stmts, handlers.calls, granules(func)
        self.chip, self.warp = func.facts.chip, WAVE if func.facts.chip else WARP
        self.addresses, self.ranks = Addresses(), ranks or Ranks()
        self.launch = LaunchScope()
        self.inside: tuple[Branch | Iterations | WarpRole, ...] = ()
        self.in_while = False
        self.ticks = itertools.count(1)  # of the clocks that the program reads
        self.discarded: tuple[Any, ...] | None = None

    def stmt(self, s: Stmt) -> Action:
        """Compile a statement to an action."""
        handler = self.stmts.get(type(s)) or (self.stmts.get(TileOp) if isinstance(s, TileOp) else None)
        if handler is None:
            raise fault("sim-unsupported", f"{type(s).__name__} cannot be simulated",
                        found=f"a {type(s).__name__}", span=s.span)
        with self.having(place=s.span or self.place):
            return handler(self, s)

    @contextlib.contextmanager
    def having(self, **values: Any) -> Iterator[None]:
        """What is compiled under this context manager sees these values of the context's attributes."""
        outer = {name: getattr(self, name) for name in values}
        self.__dict__.update(values)
        try:
            yield
        finally:
            self.__dict__.update(outer)
