"""Statements and functions.  See ir/__init__.py for the grammar and the semantics."""

from __future__ import annotations

from typing import Any, ClassVar

from .equal import alpha_equal
from .buffer import Buffer, Region
from .expr import Call, Expr, Var
from .nodes import Node, dataclass_transform, fields_of, node
from .facts import FuncFacts
from .plans import LaunchPlan, LoopPlan, ParallelPlan
from .span import Span

Attrs = tuple[tuple[str, Any], ...]


class Stmt(Node):
    """Base class of statements.  span: the location in the user's source."""

    attrs: Attrs = ()

    def attr(self, key: str, default: Any = None) -> Any:
        """Value of a user's annotation."""
        if self._options and key in getattr(self, self._options).names:
            raise KeyError(f"{key} is an option of {type(self).__name__}: read it from its record")
        for k, v in self.attrs:
            if k == key:
                return v
        return default


@node
class Seq(Stmt):
    """Statements executed in order.  A Bind or Alloc is visible to the statements after it."""

    stmts: tuple[Stmt, ...]
    span: Span | None = None


@node
class Bind(Stmt):
    """var = value, once; var is visible in the rest of the enclosing Seq."""

    var: Var
    value: Expr
    span: Span | None = None


@node
class Alloc(Stmt):
    """Allocates a buffer for the rest of the enclosing Seq.  init: initial value of a local.var, else None."""

    buffer: Buffer
    init: Expr | None = None
    span: Span | None = None


@node
class Store(Stmt):
    """buffer[indices] = value (already of the element type; vector when the last index is a Ramp)."""

    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr
    span: Span | None = None


@node
class Evaluate(Stmt):
    """An intrinsic with an effect, executed by every thread that reaches it."""

    call: Call
    span: Span | None = None


@node
class For(Stmt):
    """for var in [start, start+extent): body.  Bounds are evaluated once, on entry.

    kind: serial | unroll | vectorized | pipelined (phase TILE only) | thread binding tag such as "threadIdx.x".
    attrs: user annotations.
    """

    var: Var
    start: Expr
    extent: Expr
    kind: str
    body: Stmt
    attrs: Attrs = ()
    plan: LoopPlan = LoopPlan()
    span: Span | None = None
    _options: ClassVar[str] = "plan"


@node
class Parallel(Stmt):
    """Independent iterations over all index combinations, distributed over the threads of the block (phase TILE only).

    attrs: user annotations.
    """

    vars: tuple[Var, ...]
    extents: tuple[Expr, ...]
    body: Stmt
    attrs: Attrs = ()
    plan: ParallelPlan = ParallelPlan()
    span: Span | None = None
    _options: ClassVar[str] = "plan"


@node
class While(Stmt):
    """while cond: body."""

    cond: Expr
    body: Stmt
    span: Span | None = None


@node
class If(Stmt):
    """if cond: then else: orelse (None when absent)."""

    cond: Expr
    then: Stmt
    orelse: Stmt | None = None
    span: Span | None = None


@node
class Break(Stmt):
    """Leave the innermost For or While."""

    span: Span | None = None


@node
class Continue(Stmt):
    """Next iteration of the innermost For, While or Parallel."""

    span: Span | None = None


@node
class Assert(Stmt):
    """An assertion.  A false cond raises RuntimeError(message) on the host, and nothing is launched; it stops a kernel.

    kind: "device_assert" for T.device_assert, which the CPU target ignores; else "assert".
    """

    cond: Expr
    message: str
    kind: str = "assert"
    span: Span | None = None


@node
class Launch(Stmt):
    """A kernel launch: grid of blocks, threads per block.

    block_vars: one per grid dimension (x, y, z order), int32.  thread_vars: always three (tx, ty, tz).
    """

    grid: tuple[Expr, ...]
    block_vars: tuple[Var, ...]
    threads: tuple[int, int, int]
    thread_vars: tuple[Var, Var, Var]
    body: Stmt
    plan: LaunchPlan = LaunchPlan()
    span: Span | None = None
    _options: ClassVar[str] = "plan"

    @property
    def num_threads(self) -> int:
        x, y, z = self.threads
        return x * y * z


class TileOp(Stmt):
    """A block-collective operation on tiles (phase TILE).  Subclasses are defined in tilelang.ops.

    op_name: the name it has in the language.  Fields of type Region are its operands.
    """

    op_name: ClassVar[str] = ""


class BackendStmt(Stmt):
    """A statement that one backend has, in the phase of that backend alone.  Subclasses are defined above this room.

    Unless it has scopes, it says how the statements in it are executed: their definitions are visible after it too.
    """

    phase: ClassVar[str] = ""

    def scopes(self) -> tuple[tuple[tuple[Node, ...], Stmt], ...]:
        """(names that it defines, body) of each body that is a scope of its own; bodies may define the same names."""
        return ()


TILE_OPS: dict[str, type[TileOp]] = {}


@dataclass_transform(frozen_default=True, eq_default=False)
def tile_op(name: str) -> Any:
    """Class decorator: an IR node registered as the tile op `name`."""

    def wrap(cls: Any) -> Any:
        cls = node(cls)
        cls.op_name = name
        cls._options = "plan" if "plan" in fields_of(cls) else ""
        TILE_OPS[name] = cls
        return cls

    return wrap


@node
class Func(Node):
    """A program: parameters, host statements and launches.

    params: vars in signature order (tensor parameter A appears as handle var A_handle, scalars as themselves).
    buffers: (param var, Buffer) of tensor parameters.  attrs: user annotations.
    facts: its phase and the options of its compilation (facts.py).
    """

    name: str
    params: tuple[Var, ...]
    buffers: tuple[tuple[Var, Buffer], ...]
    body: Stmt
    attrs: Attrs = ()
    facts: FuncFacts = FuncFacts()
    span: Span | None = None
    _options: ClassVar[str] = "facts"

    def same(self, other: object) -> bool:
        """Whether both are the same program up to renaming of the variables and buffers that they define."""
        return self is other or (isinstance(other, Func) and alpha_equal(self, other))

    def __hash__(self) -> int:
        return hash((self.name, len(self.params)))

    def buffer_of(self, param: Var) -> Buffer | None:
        for p, b in self.buffers:
            if p is param:
                return b
        return None


def with_options(n: Any, /, **changes: Any) -> Any:
    """The same node with some options of its record changed (None: the default).  Raises TypeError for unknown options."""
    old = getattr(n, n._options)
    new = old.having(**changes)
    return n if new is old else replace(n, **{n._options: new})


def replace(n: Any, **changes: Any) -> Any:
    """Copy of a node with some fields changed; the same object when nothing changes."""
    if all(getattr(n, k) is v for k, v in changes.items()):
        return n
    values = {f: getattr(n, f) for f in (*fields_of(type(n)), "span")}
    values.update(changes)
    return type(n)(**values)


def seq(*stmts: Stmt | None, span: Span | None = None) -> Stmt:
    """Flat sequence; nested Seqs are spliced, None dropped, a single statement returned as itself."""
    out: list[Stmt] = []
    for s in stmts:
        if isinstance(s, Seq):
            out.extend(s.stmts)
        elif s is not None:
            out.append(s)
    return out[0] if len(out) == 1 else Seq(tuple(out), span=span)


EMPTY = Seq(())

__all__ = ["Alloc", "Assert", "Attrs", "Bind", "Break", "Continue", "EMPTY", "Evaluate", "For", "Func", "If",
           "Launch", "Parallel", "Region", "Seq", "Stmt", "Store", "TILE_OPS", "TileOp", "While", "replace", "seq",
           "tile_op", "with_options"]
