"""The builder: the user's source location, the open frames, variables and buffers of the function being traced."""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from tilelang import errors
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, Expr, FuncFacts, Load, Span, Stmt, Store,
                         TileOp, Var, cast, const, contains, convert, distinct, dtype as DType, walk)
from tilelang.ir.hook import Hook
from tilelang.target.intrinsics import is_pure

from .cut import in_variables
from .scope import Context, Frame
from .state import current, need_tracing, set_current

log = logging.getLogger("tilelang.language")

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_,
    "|": operator.or_, "^": operator.xor, "@": operator.matmul, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "is": operator.is_, "is not": operator.is_not,
    "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}
_SIMPLE = (Store, Bind, Evaluate, Alloc, TileOp)  # statements without a body
SCALARS = (bool, int, float, np.generic)
V = TypeVar("V")


def reads_memory(e: Expr) -> bool:
    """Whether the value of an expression depends on when it is computed."""
    return contains(e, Load) or any(not is_pure(x.op) for x in distinct(e, Call))


# `range` in the head of a for loop.  loops.py provides it, because it defines the loops.
loop_of_range: Hook[Callable[..., Any]] = Hook("the loop of range")

# Attribute names of the public interface for properties of a function.
FACTS = {"tilelang_out_idx": "out_idx", "tilelang_pass_configs": "pass_configs", "tilelang_compile_flags": "compile_flags",
         "may_alias": "may_alias"}


errors.register("constant-range", OverflowError, "an integer constant that the element type does not hold",
                "take a wider element type, or cast it to keep its low bits: T.cast(value, dtype)")


class Builder:
    """State of tracing one function: places, open frames, variables and buffers.

    frames: open scopes, outermost first.  handles: id -> element Load that a name stands for (T.alloc_var, T.Ref);
    named: the handles that have got their Python name.  elements: id of a variable -> the element it was read from
    (`x = A[i, j]` may also mean the start of a tile).  lazy: > 0 while an operand that may not run is evaluated.
    loop_passes: > 0 while an operand that runs repeatedly (the condition of a loop) is evaluated.
    """

    def __init__(self, name: str, eager: Any = None) -> None:
        self.name = name
        self.eager = eager
        self.root = Frame()
        self.frames: list[Frame] = [self.root]
        self.contexts: list[tuple[Context, int]] = []
        self.ctx: Context = None  # type: ignore[assignment]  # set by enter_context before anything runs
        self.pos = 0
        self.handles: dict[int, Load] = {}
        self.named: set[int] = set()
        self.kept: set[int] = set()  # variables that a container or object was made with
        self.unnamed: dict[int, Any] = {}
        self.buffer_names: dict[str, int] = {}
        self.temporaries: dict[int, Var] = {}
        self.elements: dict[int, tuple[Var, Load]] = {}
        self.reducers: dict[int, Any] = {}
        self.lazy = self.loop_passes = self.extern_calls = 0
        self.macro_writes: list[Var] = []
        self.hazard: tuple[Context, int, set[int]] | None = None
        self.kernel: Any = None
        self.unopened: Any = None  # the last T.Kernel(...), until `with` opens it
        self.kernels = 0
        self.func_attrs: dict[str, Any] = {}  # the user's annotations
        self.facts = FuncFacts()
        self.outputs: list[Buffer] = []
        self.returned: tuple[int, ...] | None = None
        self.params: dict[str, Any] = {}
        self.serial = 0

    # ---- places ----------------------------------------------------------------------------------------------------

    def span(self) -> Span | None:
        """The span of the statement being traced, in rewritten code."""
        return self.ctx.span(self.pos) if self.ctx is not None and self.ctx.places else None

    def here(self) -> Span | None:
        """The innermost span in user code: inside an ordinary helper function, the helper's line with its caller."""
        def inside(name: str) -> bool:
            return name.partition(".")[0] in sys.stdlib_module_names or name.startswith(
                ("tilelang.language", "tilelang.ops", "tilelang.ir", "tilelang.layout"))

        outer = self.span()
        frame = sys._getframe(1)
        while frame is not None and inside(frame.f_globals.get("__name__", "")):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or self.ctx is None:
            return outer
        if self.ctx.owns(frame.f_code):
            return outer
        return Span(frame.f_code.co_filename, frame.f_lineno, 0, function=frame.f_code.co_name, caller=outer)

    def enter_context(self, ctx: Context) -> None:
        self.contexts.append((self.ctx, self.pos))
        ctx.base = len(self.frames)
        self.ctx, self.pos = ctx, 0

    def exit_context(self) -> None:
        while len(self.frames) > self.ctx.base:
            self.exit(self.frames[-1])
        self.ctx, self.pos = self.contexts.pop()

    # ---- frames and statements -------------------------------------------------------------------------------------

    def emit(self, stmt: Stmt | None) -> None:
        """Append a statement to the innermost frame."""
        if stmt is None:
            return
        if self.lazy:
            raise errors.error("lazy-effect", "a statement (tile op, macro with effects, atomic) stands in an operand that may "
                               "not be evaluated", found="a tile op, an atomic or a macro with effects", span=self.here())
        stmt = in_variables(stmt)
        if self.hazard is not None and isinstance(stmt, _SIMPLE):
            self._check_order(stmt)
        if len(self.contexts) > 1:
            self.macro_writes += _written(stmt)
        frame = self.frames[-1]
        if not frame.dead:
            frame.stmts.append(stmt)

    def after_macro(self, mark: int) -> None:
        """Record the buffers that a macro call wrote: the rest of its statement must not contain earlier reads of them."""
        written = {id(v) for v in self.macro_writes[mark:]}
        if written:
            same = self.hazard is not None and self.hazard[0] is self.ctx and self.hazard[1] == self.pos
            self.hazard = (self.ctx, self.pos, written | (self.hazard[2] if same and self.hazard else set()))
        if len(self.contexts) == 1:
            self.macro_writes.clear()

    def wrote(self, buffer: Buffer) -> None:
        """Record that an operation inside an expression changed a buffer (an atomic that returns the old value)."""
        self.macro_writes.append(buffer.data)
        self.after_macro(len(self.macro_writes) - 1)

    def _check_order(self, stmt: Stmt) -> None:
        """Reject a statement that reads a buffer which a macro called in it changed: the read may precede the call."""
        assert self.hazard is not None  # asked only then
        ctx, pos, written = self.hazard
        if ctx is not self.ctx:
            return
        if pos != self.pos:
            self.hazard = None
            return
        for x in walk(stmt):
            if isinstance(x, Load) and id(x.buffer.data) in written:
                message = f"`{x.buffer.name}` is read in a statement that also changes it by a macro or atomic"
                raise errors.error("evaluation-order", message,
                                   found=f"`{x.buffer.name}` read and changed in one", span=self.span())

    def enter(self, frame: Frame) -> Any:
        frame.span = self.here()
        self.unopened = None if frame is self.unopened else self.unopened
        self.frames.append(frame)
        frame.value = frame.open(self)
        return frame.value

    def exit(self, frame: Frame) -> None:
        """Close a frame, and the frames that bare expression statements opened inside it."""
        while True:
            top = self.frames.pop()
            for v in top.vars:
                self.unnamed.pop(id(v), None)
            stmt = top.close(self)
            if stmt is not None:
                self.emit(stmt)
            if top is frame:
                return

    def fresh_name(self, base: str) -> str:
        """A buffer name that no other buffer of the function has."""
        n = self.buffer_names.get(base, 0)
        self.buffer_names[base] = n + 1
        return base if n == 0 else self.fresh_name(f"{base}_{n}")

    def new_var(self, name: str, dt: Any) -> Var:
        """A variable that takes the Python name it is bound to next."""
        return self.nameless(Var(name, DType(dt), span=self.span()))

    def nameless(self, value: V) -> V:
        """A variable or buffer that takes the Python name it is bound to next."""
        self.unnamed[id(value)] = value
        return value

    def name_value(self, name: str, value: Any) -> None:
        """Give a fresh variable or buffer the Python name it is bound to (its identity stays)."""
        if self.unnamed.pop(id(value), None) is None:
            return
        if isinstance(value, Buffer):
            name = self.fresh_name(name)
            if value.data.name == value.name:
                object.__setattr__(value.data, "name", name)
        object.__setattr__(value, "name", name)

    # ---- variables and stores --------------------------------------------------------------------------------------

    def let(self, name: str, value: Expr) -> Var:
        """A fresh immutable variable bound to the value here."""
        v = Var(name, value.dtype, span=self.span())
        self.emit(Bind(v, value, span=self.span()))
        return v

    def store(self, buffer: Buffer, indices: tuple[Expr, ...], value: Any) -> None:
        """buffer[indices] = value, cast to the element type."""
        if isinstance(value, (Buffer, str, type(None), list, tuple, dict)) and not isinstance(value, DType):
            raise errors.error("store-type", f"an element of `{buffer.name}` cannot be assigned a "
                                             f"{type(value).__name__}",
                               found=f"a {type(value).__name__}",
                               span=self.span(), hint="use T.copy to move whole tiles" if isinstance(value, Buffer) else
                               "store a number, an expression or an element: one value for each element")
        v = convert(value)
        want = buffer.dtype_at(indices)
        if v.dtype.lanes not in (1, want.lanes) or v.dtype.is_handle and not want.is_handle and want.bits != 64:
            raise errors.error("store-type", f"an element of `{buffer.name}` is {want}, the value is {v.dtype} "
                               "(Incompatible types in BufferStore)",  # programs test for the text in parentheses
                               expected=str(want), found=str(v.dtype), span=self.span())
        check_constant(v, want)
        stored = v if v.dtype == want else _cast_value(value, v, want)
        self.emit(Store(buffer, tuple(indices), stored, span=self.here()))

    # ---- parameters ------------------------------------------------------------------------------------------------

    def before_kernel(self) -> None:
        """Called when the first T.Kernel opens; the eager form stops its symbolic trace here."""
        if self.eager is not None:
            self.eager.before_kernel(self)

    def annotate(self, name: str, param: Any, annotation: Any) -> Any:
        """`name: annotation` in the body for a parameter; params.py replaces it per function form."""
        if param is None and self.eager is not None:
            return self.eager.declare_none(self, name, annotation)
        declare = getattr(param, "declare", None)
        return declare(self, annotation) if declare is not None else param

    def allocate(self, buffer: Buffer, init: Expr | None = None) -> Buffer:
        """Emit the allocation of a buffer, which gets the Python name that it is bound to."""
        self.emit(Alloc(buffer, init, span=self.here()))
        return self.nameless(buffer)


class Emitted:
    """The result of an operation that has already emitted its statement."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<emitted>"


def _written(stmt: Stmt) -> list[Var]:
    """The storage that a simple statement writes."""
    if isinstance(stmt, Store):
        return [stmt.buffer.data]
    if isinstance(stmt, TileOp):
        return [a.region.buffer.data for a in stmt.accesses() if a.writes]  # type: ignore[attr-defined]
    if isinstance(stmt, (Evaluate, Bind)):
        call = stmt.call if isinstance(stmt, Evaluate) else stmt.value
        if isinstance(call, Call) and not is_pure(call.op):
            return [a.buffer.data for a in call.args if isinstance(a, AddressOf)]
    return []


def check_constant(v: Expr, want: DType) -> None:
    """Raises constant-range for an integer constant that is no signed and no unsigned value of an integer type's width."""
    if isinstance(v, Const) and want.is_int and v.dtype.is_int and not -(1 << want.bits - 1) <= v.value < 1 << want.bits:
        raise errors.error("constant-range", f"the constant ‹{v.value}› does not fit {want}",
                           expected=f"a value of {want.bits} bits: {-(1 << want.bits - 1)} to {(1 << want.bits) - 1}")


def _cast_value(raw: Any, v: Expr, want: DType) -> Expr:
    """The stored value in the element type; a Python literal becomes that type's constant directly."""
    if isinstance(v, Const) and isinstance(raw, (int, float, np.generic)) and want.lanes == 1:
        if want.is_float or isinstance(v.value, bool):
            return const(v.value, want)
    return cast(v, want)


# The builder of the function being traced in this thread (None outside of one), and the same as what must be there.
current_builder: Callable[[], Builder | None] = current
need_builder: Callable[[str], Builder] = need_tracing


class tracing:
    """`with tracing(builder):` makes it the active one."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def __enter__(self) -> Builder:
        self.old = set_current(self.builder)
        return self.builder

    def __exit__(self, *info: Any) -> None:
        set_current(self.old)
