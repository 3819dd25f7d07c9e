"""The builder's state: the user's source location, the open frames, the values of names, and assignment."""

from __future__ import annotations

import builtins
import logging
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.errors import facts, register_warning, warn
from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, Expr, FuncFacts, Load, Node, Region, Span, Stmt,
                         Store, TileOp, Var, cast, const, convert, walk)
from tilelang.ir import dtype as DType
from tilelang.ir.hook import Hook
from tilelang.target.intrinsics import is_pure

from .containers import settle
from .regions import BufferSlice, store_slice, subscript
from .scope import Context, Frame, Poison, RootFrame, Undefined
from .state import describe, place
from .variables import element, is_held

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


def reads_memory(e: Expr) -> bool:
    """Whether the value of an expression depends on when it is computed."""
    return any(isinstance(x, Load) or isinstance(x, Call) and not is_pure(x.op) for x in walk(e))


# `range` in the head of a for loop.  loops.py provides it, because it defines the loops.
loop_of_range: Hook[Callable[..., Any]] = Hook("the loop of range")

register_warning("host-print", "print() of a value of the kernel, which prints its expression while tracing")


def print_once(*values: Any, **options: Any) -> None:
    """print() in a kernel function: executed once, while tracing."""
    builtins.print(*values, **options)
    if any(isinstance(v, Node) for v in values):
        warn("host-print", "print() runs once, while the kernel is traced, and prints expressions",
             "T.print(x) prints values while the kernel runs", span=place())


# Attribute names of the public interface for properties of a function.
FACTS = {"tilelang_out_idx": "out_idx", "tilelang_pass_configs": "pass_configs", "tilelang_compile_flags": "compile_flags",
         "may_alias": "may_alias"}


class Recorder:
    """State of tracing one function: places, open frames, names and assignment.

    frames: open scopes, outermost first.  handles: id -> element Load that a name stands for (T.alloc_var, T.Ref);
    named: the handles that have got their Python name.  elements: id of a variable -> the element it was read from
    (`x = A[i, j]` may also mean the start of a tile).  lazy: > 0 while an operand that may not run is evaluated.
    loop_passes: > 0 while an operand that runs repeatedly (the condition of a loop) is evaluated.
    """

    def __init__(self, name: str, eager: Any = None) -> None:
        self.name = name
        self.eager = eager
        self.root = RootFrame()
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
        outer = self.span()
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(
                ("tilelang.language", "tilelang.ops", "tilelang.ir", "tilelang.layout")):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None or self.ctx is None:
            return outer
        if frame.f_code is self.ctx.code or frame.f_code in self.ctx.code.co_consts:
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
            raise errors.error("lazy-effect", "a statement (tile op, macro with effects, atomic) stands in an operand "
                                              "that "
                               "may not be evaluated",
                               found="a tile op, an atomic or a macro with effects", span=self.here(),
                               hint="only the first operand of and/or and the test of `a if c else b` always run: "
                               "call it in a statement before")
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
        self.frames.append(frame)
        frame.value = frame.open(self)
        return frame.value

    def exit(self, frame: Frame) -> None:
        """Close a frame, and the frames that bare expression statements opened inside it."""
        while True:
            top = self.frames.pop()
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
        v = Var(name, DType(dt), span=self.span())
        self.unnamed[id(v)] = v
        return v

    def name_value(self, name: str, value: Any) -> None:
        """Give a fresh variable or buffer the Python name it is bound to (its identity stays)."""
        if self.unnamed.pop(id(value), None) is None:
            return
        if isinstance(value, Buffer):
            name = self.fresh_name(name)
            if value.data.name == value.name:
                object.__setattr__(value.data, "name", name)
        object.__setattr__(value, "name", name)

    # ---- assignment ------------------------------------------------------------------------------------------------

    def bind(self, name: str, value: Any, old: Any = None) -> Any:
        """`name = value`: store into a variable, or bind the value and return what the name now stands for."""
        if isinstance(old, Load) and id(old) in self.named and not self._is_fresh_handle(value):
            if isinstance(value, (Expr, BufferSlice, *SCALARS)) or hasattr(value, "__tilelang_expr__"):
                self.store(old.buffer, old.indices, value)
                return old
        elif isinstance(old, BufferSlice) and old.by_reference and isinstance(value, (Expr, *SCALARS)):
            store_slice(self, old, value)
            return old
        if isinstance(value, Frame) and value.opens_by_name:
            return self.bind_frame(name, self.enter(value))
        if isinstance(value, Expr):
            return self._bind_expr(name, value, old)
        if isinstance(value, Buffer):
            self.name_value(name, value)
        elif isinstance(value, BufferSlice):
            return self.freeze_slice(value)
        elif isinstance(value, Undefined):
            raise errors.error("scope", f"`{name}` is assigned from a name that has no value yet",
                               found=f"`{name}` assigned from a name without one", span=self.span())
        elif isinstance(value, Poison):
            value._raise()  # assigning from a dead name is a use
        elif not self.lazy:  # variables made for a container stay in it, whatever else they are called later
            return settle(value, lambda x: x if id(x) in self.kept else self.as_it_is_now(x))
        return value

    def _is_fresh_handle(self, value: Any) -> bool:
        return is_held(value)

    def _bind_expr(self, name: str, value: Expr, old: Any) -> Any:
        if isinstance(value, Load) and id(value) in self.handles and id(value) not in self.named:
            self.named.add(id(value))
            self.name_value(name, value.buffer)
            return value
        if isinstance(value, Const):
            return value
        if isinstance(value, Var):
            self.name_value(name, value)
            return value
        if self.lazy or value.dtype.is_handle or (self.kernel is None and not reads_memory(value)):
            return value  # lazy: the name is used inside one expression, during which nothing changes
        if isinstance(old, Var) and not isinstance(old, Const):
            log.warning("%s: Immutable value `%s` is re-bound; use T.alloc_var for a variable that "
                        "changes", self.span(),
                        name)
        v = self.let(name, value)
        if isinstance(value, Load) and not any(reads_memory(i) for i in value.indices):
            self.elements[id(v)] = (v, value)
        return v

    def let(self, name: str, value: Expr) -> Var:
        """A fresh immutable variable bound to the value here."""
        v = Var(name, value.dtype, span=self.span())
        self.emit(Bind(v, value, span=self.span()))
        return v

    def bind_frame(self, name: str, value: Any, old: Any = None) -> Any:
        """Bind the target of a for header or `with … as`.  A loop over several extents needs one name per extent."""
        if isinstance(value, tuple):
            raise errors.error("unpack", "the header names one variable, the loop gives "
                                         f"{len(value)}",
                               expected="one name", found=f"{len(value)} values", span=self.span(),
                               hint="name one variable per extent")
        self.name_value(name, value)
        return value

    def frame_values(self, value: Any, n: int, star: int | None = None) -> tuple[Any, ...]:
        """Unpack the value of a frame (a variable unpacks to itself)."""
        items = (value,) if isinstance(value, Var) else tuple(value) if isinstance(value, (tuple, list)) else None
        if items is None or len(items) != n:
            found = "one value" if items is None else f"{len(items)}"
            raise errors.error("unpack", f"the header names {n} variables, the loop or launch gives {found}",
                               expected=f"{n} values", found=str(found),
                               span=self.span(), hint="name one variable per extent")
        return items

    def freeze(self, value: Any) -> Any:
        """The present value: an expression that reads memory is bound to a variable."""
        if self.lazy:
            return value
        if isinstance(value, Expr) and not isinstance(value, (Var, Const)) and not self._is_fresh_handle(value):
            if reads_memory(value) or self.kernel is not None and not value.dtype.is_handle:
                v = self.let("t", value)
                self.unnamed[id(v)] = v
                if isinstance(value, Load) and not any(reads_memory(i) for i in value.indices):
                    self.elements[id(v)] = (v, value)
                return v
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self.freeze(v) for v in value)
        return value

    def as_it_is_now(self, value: Any) -> Any:
        """An element of a Python container: an expression that reads memory is read here, not where it is used."""
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self.as_it_is_now(v) for v in value)
        if isinstance(value, BufferSlice):
            return self.freeze_slice(value)
        if self._is_fresh_handle(value):
            self.kept.add(id(value))
        elif isinstance(value, Expr) and reads_memory(value):
            return self.freeze(value)
        return value

    def freeze_slice(self, value: BufferSlice) -> BufferSlice:
        """The region with the present values of its bounds."""
        r = value.region
        if not any(isinstance(e, Expr) and reads_memory(e) for e in (*r.mins, *r.extents)):
            return value
        fixed = Region(r.buffer, tuple(self.freeze(e) for e in r.mins), tuple(self.freeze(e) for e in r.extents),
                       span=r.span)
        return BufferSlice(fixed, value.by_reference)

    def unpack(self, value: Any, n: int, star: int | None = None) -> tuple[Any, ...]:
        """The n values of a tuple assignment, all computed before the first is assigned."""
        if isinstance(value, (Expr, Buffer, BufferSlice)) and not isinstance(value, Var):
            raise errors.error("unpack", f"cannot unpack one value into {n} names",
                               expected=f"{n} values", found="one", span=self.span())
        items = list(value)
        if star is None and len(items) != n:
            raise errors.error("unpack", f"expected {n} values to unpack, found {len(items)}",
                               expected=f"{n} values", found=str(len(items)), span=self.span())
        if star is not None:
            if len(items) < n - 1:
                raise errors.error("unpack", f"expected at least {n - 1} values to unpack, found {len(items)}",
                                   expected=f"at least {n - 1} values", found=str(len(items)),
                                   span=self.span())
            tail = n - 1 - star
            items = [*items[:star], items[star:len(items) - tail], *items[len(items) - tail:]]
        return tuple(self.freeze(v) for v in items)

    def augment(self, name: str, old: Any, op: str, value: Any) -> Any:
        """`name op= value`."""
        if isinstance(old, Undefined):
            raise errors.error("scope", f"`{name}` is used before it has a value",
                               found=f"`{name}` without one", span=self.span())
        if isinstance(old, (Buffer, BufferSlice)):
            raise errors.error("whole-buffer-assignment", f"`{name} {op}=` on a whole buffer is not supported: use "
                                                          "slice "
                               "assignment",
                               found=f"`{name}`, a whole buffer",
                               span=self.span(), hint="write a T.Parallel loop over its elements")
        return self.bind(name, self._apply(op, old, value), old)

    def _apply(self, op: str, a: Any, b: Any) -> Any:
        if isinstance(a, Expr) and isinstance(b, str):
            raise facts(TypeError(f"`{op}=` of an expression and a string"), "two values", "a string")
        return OPS[op](a, b)

    def setitem(self, target: Any, key: Any, value: Any) -> None:
        """`target[key] = value`."""
        if isinstance(target, Buffer):
            self._store_item(target, key, value)
        elif is_held(target):
            self.store(target.buffer, element(target, key).indices, value)
        elif isinstance(target, Poison):
            target._raise()
        elif isinstance(target, (Expr, BufferSlice)):
            raise errors.error("store-target", f"{describe(target)} does not support item assignment",
                               found=describe(target), span=self.span(),
                               hint="index the buffer itself; a T.alloc_var is assigned by its name, without [0]")
        else:
            self._keep(target, key, value)

    def _store_item(self, buffer: Buffer, key: Any, value: Any) -> None:
        where = subscript(buffer, key, storing=True)
        if isinstance(where, BufferSlice):
            store_slice(self, where, value)
        else:
            self.store(buffer, where.indices, value)

    def store(self, buffer: Buffer, indices: tuple[Expr, ...], value: Any) -> None:
        """buffer[indices] = value, cast to the element type."""
        if isinstance(value, (Buffer, str, type(None), list, tuple, dict)) and not isinstance(value, DType):
            raise errors.error("store-type", f"an element of `{buffer.name}` cannot be assigned a "
                                             f"{type(value).__name__}",
                               found=f"a {type(value).__name__}",
                               span=self.span(), hint="use T.copy to move whole tiles")
        v = convert(value)
        lanes = max((i.dtype.lanes for i in indices), default=1)
        want = buffer.dtype.with_lanes(buffer.dtype.lanes * lanes)
        if v.dtype.lanes not in (1, want.lanes) or v.dtype.is_handle and not want.is_handle and want.bits != 64:
            raise errors.error("store-type", f"Incompatible types in BufferStore: an element of `{buffer.name}` is "
                                             f"{want}, "
                               f"the value is {v.dtype}",
                               expected=str(want), found=str(v.dtype), span=self.span())
        stored = v if v.dtype == want else _cast_value(value, v, want)
        self.emit(Store(buffer, tuple(indices), stored, span=self.here()))

    def augment_item(self, target: Any, key: Any, op: str, value: Any) -> None:
        """`target[key] op= value`; indices are evaluated once."""
        if isinstance(target, Buffer):
            where = subscript(target, key, storing=True)
            if isinstance(where, BufferSlice):
                store_slice(self, where, OPS[op](where, value))
            else:
                self.store(target, where.indices, OPS[op](where, value))
        elif is_held(target):
            self.store(target.buffer, element(target, key).indices, OPS[op](target, value))
        else:
            self._keep(target, key, OPS[op](target[key], value))

    def _keep(self, container: Any, key: Any, value: Any) -> None:
        """`container[key] = value` of Python: once, while tracing."""
        if isinstance(value, SCALARS) and not all(f.once for f in self.frames):
            log.warning("%s: an element of a Python %s is assigned a number in a run-time loop or branch; that happens "
                        "once, while tracing: use T.alloc_var for a value that changes", self.span(), type(container).__name__)
        container[key] = self.as_it_is_now(value)

    def getitem(self, target: Any, key: Any) -> Any:
        """`target[key]` where target is an attribute or an element of a container (it may hold a variable)."""
        try:
            return target[key]
        except (IndexError, KeyError) as e:
            if not isinstance(target, (tuple, list, dict, str)):
                raise
            raise errors.error("container-key", f"{type(e).__name__}: {e}", found=repr(key), span=self.span()) from None

    def slice(self, start: Any, stop: Any, step: Any) -> builtins.slice:
        return slice(start, stop, step)

    def builtin(self, fn: Any) -> Any:
        """`range` in a for header is T.serial, `print` says when it prints; unless the user shadowed the name."""
        return loop_of_range.call if fn is builtins.range else print_once if fn is builtins.print else fn


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
        self.unnamed[id(buffer)] = buffer
        return buffer


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


def _cast_value(raw: Any, v: Expr, want: DType) -> Expr:
    """The stored value in the element type; a Python literal becomes that type's constant directly."""
    if isinstance(v, Const) and isinstance(raw, (int, float, np.generic)) and want.lanes == 1:
        if want.is_float or isinstance(v.value, bool):
            return const(v.value, want)
    return cast(v, want)


__all__ = ["Emitted", "OPS", "Recorder", "SCALARS", "log", "reads_memory"]
