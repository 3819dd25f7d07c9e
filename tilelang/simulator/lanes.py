"""Execution of statements on many lanes at once; both simulators use it.

A lane is one thread of a block, or one iteration of a Parallel loop.  Statements are compiled once into Python
functions of a `LaneFrame`.  Divergent control flow keeps a mask of active lanes (None: all of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang.ir import (AddressOf, Alloc, Assert, Bind, Break, Call, Continue, Evaluate, Expr, For, If, Launch, Load, Parallel,
                         Seq, Stmt, Store, TileOp, Var, While, numpy_dtype, replace, walk, DYNAMIC, FRAGMENT)
from tilelang.ir.evaluate import Closure, ExprCompiler, Frame, Value
from tilelang.target.atomics import Branch, Iterations, WarpRole
from tilelang.target.device_functions import known_function

from .addresses import Addresses
from .faults import fault
from .memory import Followed, Storage, geometry, linear_index


Action = Callable[["LaneFrame"], None]


class LaneFrame(Frame):
    """State of one group of lanes.

    lanes: their number.  exited: lanes that have returned (None: none).  leaving: lanes that left the innermost loop by
    `break`.  block: the simulator's state of the block (memory, counters).  own: the lanes that this frame executes (None:
    all).  matrix: wgmma instructions of these lanes in flight (registers.Issued), None where there are none.
    role: the warp role that executes this frame in a tile program (reference.block.WarpRole).
    """

    __slots__ = ("lanes", "exited", "leaving", "block", "own", "matrix", "role")

    def __init__(self, slots: list[Value], lanes: int, mask: np.ndarray | None = None, block: Any = None) -> None:
        super().__init__(slots, mask)
        self.lanes, self.block = lanes, block
        self.exited: np.ndarray | None = None
        self.leaving: np.ndarray | None = None
        self.own: np.ndarray | None = None
        self.matrix: Any = None
        self.role: Any = None

    def active(self) -> np.ndarray:
        """The mask of active lanes as an array."""
        return np.ones(self.lanes, bool) if self.mask is None else self.mask

    def any_active(self) -> bool:
        return self.mask is None or bool(self.mask.any())


def uniform(x: Value, f: LaneFrame, what: str, span: Any) -> Any:
    """The value that all active lanes have, as a NumPy scalar.  Raises sim-thread-dependent if they differ."""
    if x.ndim == 0:
        return x
    y = x if f.mask is None or x.shape[0] != f.lanes else x[f.mask]
    if y.size and not (y == y[0]).all():
        raise fault("sim-thread-dependent", f"{what} must be the same in every thread, found values from {y.min()} to "
                    f"{y.max()}",
                    found=f"values from {y.min()} to {y.max()}",
                    span=span, hint="compute it from block indices and parameters only")
    return y[0] if y.size else x[0]


def is_address(x: Any) -> bool:
    """Whether a handle's slot holds an address (one number, or one for each lane) instead of a storage."""
    return isinstance(x, (np.generic, np.ndarray))


def contains(s: Stmt, kinds: tuple[type, ...], calls: tuple[str, ...] = ()) -> bool:
    """Whether a node of these kinds, or a Call with one of these names, occurs in s."""
    return any(isinstance(n, kinds) or (calls and getattr(n, "op", None) in calls and hasattr(n, "args"))
               for n in walk(s))


class StmtCompiler(ExprCompiler):
    """Compiles statements to actions.  Subclasses implement memory, tile ops and device operations."""

    sources: tuple[str, ...] = ()  # C++ sources that the launch being compiled puts in front of its kernel
    place: Any = None  # span of the statement being compiled, used for expressions without a span
    threads = 0  # threads of a block of the launch being compiled; lanes from this one on pad its last warp

    def __init__(self, rows: Any = None) -> None:
        super().__init__(rows)
        self.addresses = Addresses()
        self.inside: tuple[Branch | Iterations | WarpRole, ...] = ()  # the constructs around the statement being compiled
        self.turning = False  # whether the innermost loop is a while loop
        self.dropped: tuple[Any, ...] | None = None  # the arguments of a call whose result is not used

    def stmt(self, s: Stmt) -> Action:
        """Compile the statement s to an action."""
        outer = self.place
        self.place = s.span or outer
        try:
            return _STMTS[type(s)](self, s) if type(s) in _STMTS else self._other(s)
        finally:
            self.place = outer

    def expr(self, e: Expr) -> Closure:
        """Compile the expression e to a function; errors without a span of their own use that of the statement."""
        if e.span is None and self.place is not None and isinstance(e, (Load, Call)) and id(e) not in self._memo:
            fn = super().expr(replace(e, span=self.place))
            self._memo[id(e)] = (e, fn)
            return fn
        return super().expr(e)

    def _other(self, s: Stmt) -> Action:
        if isinstance(s, TileOp):
            return self.compile_tile_op(s)
        raise fault("sim-unsupported", f"{type(s).__name__} cannot be simulated",
                    found=f"a {type(s).__name__}", span=s.span)

    def compile_call(self, e: Call) -> Closure:
        """Compile a call; a CUDA function that the program names itself behaves like its intrinsic."""
        known = known_function(e, self.sources)
        return super().compile_call(e) if known is None else self.expr(known)

    # -- addresses as values

    def compile_var(self, e: Var) -> Closure:
        fn = super().compile_var(e)
        if not e.dtype.is_handle:
            return fn

        def run(f: LaneFrame) -> Value:
            x = fn(f)
            return x if is_address(x) else np.asarray(self.start_of(f, e, x)).astype(np.uint64)

        return run

    def compile_address(self, e: AddressOf) -> Closure:
        b = e.buffer
        if b.scope() == FRAGMENT or b.scope().startswith("shared.") and b.scope() != DYNAMIC:
            raise fault("sim-unsupported", f"the address of {b.name}, which is in {b.scope()}",
                        expected="global, shared or local memory", found=b.scope(), span=e.span or self.place)
        base, fns, geo = self.compile_var(b.data), [self.expr(i) for i in e.indices], geometry(self, b)
        item = numpy_dtype(b.dtype).itemsize * b.dtype.lanes

        def run(f: LaneFrame) -> Value:
            start = base(f)
            linear, _ = linear_index([np.asarray(fn(f)).astype(np.int64) for fn in fns], *geo(f))
            return (start.astype(np.int64) + linear * item).astype(np.uint64)

        return run

    def start_of(self, f: LaneFrame, v: Var, held: Any) -> Value:
        """The address of the storage that the slot of v holds."""
        if isinstance(held, Storage):
            start = self.addresses.of(held)
            return start + np.arange(held.lanes) * held.nbytes if held.lanes > 1 else start
        raise fault("sim-unsupported", f"the address of {v.name} as a value", expected="the address of memory",
                    found=f"`{v.name}`", span=v.span or self.place)

    def followed(self, pointer: Value, linear: np.ndarray, need: Any, vector: bool, count: int,
                 tensor: Followed) -> tuple[Storage, np.ndarray]:
        """(memory, element numbers in it) of elements of a tensor made of the address `pointer` (one, or one for each lane).

        linear: numbers of the first elements, counted from the address.  need: which are accessed, `count` elements each.
        Both have shape () or (lanes,), or one that broadcasts to it, with one more axis for vectors.
        """
        start = np.asarray(pointer).astype(np.int64)
        b, write, span = tensor
        item = numpy_dtype(b.dtype).itemsize
        at = (start[:, None] if vector and start.ndim else start) + linear * item
        at = np.broadcast_to(at, np.broadcast_shapes(at.shape, need.shape))
        return self.addresses.window(at, need, item * count, item, write, b.name, span)

    # -- implemented by subclasses

    def compile_store(self, s: Store) -> Action:
        raise NotImplementedError

    def compile_alloc(self, s: Alloc) -> Action:
        raise NotImplementedError

    def compile_evaluate(self, s: Evaluate) -> Action:
        self.dropped = s.call.args
        fn = self.expr(s.call)

        def run(f: LaneFrame) -> None:
            fn(f)

        return run

    def compile_parallel(self, s: Parallel) -> Action:
        raise fault("sim-unsupported", "a T.Parallel loop in a lowered program",
                    expected="a loop of threads", found="T.Parallel", span=s.span)

    def compile_tile_op(self, s: TileOp) -> Action:
        raise fault("sim-unsupported", f"tile op {s.op_name} in a lowered program",
                    expected="a lowered program", found=f"tile op {s.op_name}", span=s.span)

    def compile_launch(self, s: Launch) -> Action:
        raise fault("sim-unsupported", "a kernel launch inside a kernel",
                    expected="one kernel", found="a launch inside it", span=s.span)

    def compile_assert(self, s: Assert) -> Action:
        cond = self.expr(s.cond)

        def run(f: LaneFrame) -> None:
            c = cond(f)
            ok = bool(c) if c.ndim == 0 else bool((c if f.mask is None else c[f.mask]).all())
            if not ok:
                raise fault("sim-assert", s.message, span=s.span)

        return run

    # -- common to both simulators

    def _seq(self, s: Seq) -> Action:
        actions = [self.stmt(x) for x in s.stmts]
        if len(actions) == 1:
            return actions[0]
        if not contains(s, (Break, Continue), ("thread_return",)):

            def run(f: LaneFrame) -> None:
                for a in actions:
                    a(f)

            return run

        def run_checked(f: LaneFrame) -> None:
            for a in actions:
                a(f)
                if not f.any_active():
                    return

        return run_checked

    def _bind(self, s: Bind) -> Action:
        at, value = self.slot(s.var), self.expr(s.value)

        def run(f: LaneFrame) -> None:
            f.slots[at] = value(f)

        return run

    def compile_if(self, s: If) -> Action:
        cond, outer = self.expr(s.cond), self.inside
        role: tuple[WarpRole, ...] = ()
        if isinstance(s.cond, Call) and s.cond.op == "in_warp_groups":
            role = (WarpRole(s.cond.options.first, s.cond.options.count),)
        self.inside = (*outer, Branch(id(s), True), *role)
        then = self.stmt(s.then)
        self.inside = (*outer, Branch(id(s), False))
        orelse = self.stmt(s.orelse) if s.orelse is not None else None
        self.inside = outer
        return self.branch(cond, then, orelse)

    def branch(self, cond: Closure, then: Action, orelse: Action | None) -> Action:
        """The action of an If whose condition and branches are already compiled."""

        def run(f: LaneFrame) -> None:
            c = cond(f)
            if c.ndim == 0:
                if c:
                    then(f)
                elif orelse is not None:
                    orelse(f)
                return
            old = f.mask
            yes = c if old is None else c & old
            no = ~c if old is None else ~c & old
            if not no.any():
                then(f)
                return
            if not yes.any():
                if orelse is not None:
                    orelse(f)
                return
            f.mask = yes
            then(f)
            left = f.mask
            f.mask = no
            if orelse is not None:
                orelse(f)
            # A branch without break or return leaves its mask object unchanged.
            f.mask = old if left is yes and f.mask is no else left | f.mask

        return run

    def _turn(self, s: For | While) -> Action:
        """Compile the body of a loop."""
        inside, turning = self.inside, self.turning
        self.turning = isinstance(s, While)
        if isinstance(s, For) and s.plan.independent:
            self.inside = (*inside, Iterations(id(s)))
        body = self.stmt(s.body)
        self.inside, self.turning = inside, turning
        return body

    def _for(self, s: For) -> Action:
        at, start, extent = self.slot(s.var), self.expr(s.start), self.expr(s.extent)
        body = self._turn(s)
        leaves = contains(s.body, (Break, Continue), ("thread_return",))

        def run(f: LaneFrame) -> None:
            first, count = np.asarray(start(f)), np.asarray(extent(f))
            dt = first.dtype.type
            if count.ndim == 0 and not leaves:
                for k in range(int(count)):
                    f.slots[at] = first + dt(k)
                    body(f)
                return
            old, outer = f.mask, f.leaving
            alive = f.active() if count.ndim == 0 else f.active() & (count > 0)
            f.leaving = np.zeros(f.lanes, bool)
            trips = int(count) if count.ndim == 0 else int(count[alive].max(initial=0))
            for k in range(trips):
                now = alive if count.ndim == 0 else alive & (count > k)
                if not now.any():
                    break
                f.slots[at] = first + dt(k)
                f.mask = now
                body(f)
                alive = _still(alive, f)
            f.leaving = outer
            f.mask = _after(old, f)

        return run

    def _while(self, s: While) -> Action:
        cond, body = self.expr(s.cond), self._turn(s)

        def run(f: LaneFrame) -> None:
            old, outer = f.mask, f.leaving
            alive = f.active()
            f.leaving = np.zeros(f.lanes, bool)
            while True:
                f.mask = alive
                alive = alive & cond(f)
                if not alive.any():
                    break
                f.mask = alive
                body(f)
                alive = _still(alive, f)
                if not alive.any():
                    break
            f.leaving = outer
            f.mask = _after(old, f)

        return run

    def _break(self, s: Break) -> Action:
        def run(f: LaneFrame) -> None:
            if f.leaving is None:
                raise fault("sim-unsupported", "break outside a serial loop",
                            expected="a serial loop around break", found="none", span=s.span)
            f.leaving = f.leaving | f.active()
            f.mask = np.zeros(f.lanes, bool)

        return run

    def _continue(self, s: Continue) -> Action:
        def run(f: LaneFrame) -> None:
            f.mask = np.zeros(f.lanes, bool)

        return run


def _still(alive: np.ndarray, f: LaneFrame) -> np.ndarray:
    if f.leaving is not None:
        alive = alive & ~f.leaving
    return alive if f.exited is None else alive & ~f.exited


def _after(old: np.ndarray | None, f: LaneFrame) -> np.ndarray | None:
    """The mask after a loop: every lane that entered it and has not returned."""
    if f.exited is None:
        return old
    return ~f.exited if old is None else old & ~f.exited


def exit_lanes(f: LaneFrame) -> None:
    """Mark the active lanes as returned from the kernel."""
    f.exited = f.active() if f.exited is None else f.exited | f.active()
    f.mask = np.zeros(f.lanes, bool)


_STMTS: dict[type, Callable[[Any, Any], Action]] = {
    Seq: StmtCompiler._seq, Bind: StmtCompiler._bind, For: StmtCompiler._for,
    While: StmtCompiler._while, Break: StmtCompiler._break, Continue: StmtCompiler._continue,
    If: lambda c, s: c.compile_if(s), Alloc: lambda c, s: c.compile_alloc(s), Store: lambda c, s: c.compile_store(s),
    Evaluate: lambda c, s: c.compile_evaluate(s), Parallel: lambda c, s: c.compile_parallel(s),
    Launch: lambda c, s: c.compile_launch(s), Assert: lambda c, s: c.compile_assert(s),
}  # fmt: skip

__all__ = ["Action", "Closure", "LaneFrame", "StmtCompiler", "contains", "exit_lanes", "is_address", "uniform"]
