"""Branches, loops, scopes, returns and expression statements of a traced function."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from tilelang import errors
from tilelang.errors import register_warning, warn
from tilelang.ir import Assert, Break, Buffer, Call, Const, Continue, Evaluate, Expr, Node, Stmt, call

from .conditions import Conditions
from .names import Names
from .builder import Builder, Emitted, log, loop_of_range
from .regions import BufferSlice
from .scope import UNDEFINED, Frame, IfFrame, Poison, Undefined, WhileFrame, outside_scope, rebound_constant
from .state import describe, error, place


register_warning("no-effect", "a statement of a kernel that does nothing")
register_warning("open-loop", "a loop without `for` or `with`, which holds the rest of the block")
register_warning("rebound", "a scalar of a kernel is assigned again, which makes a new value")
register_warning("python-element", "an element of a Python container is assigned in a loop or branch that is traced once")
register_warning("python-condition", "a Python object as a condition, whose truth is taken while tracing")
register_warning("host-print", "print() of a value of the kernel, which prints its expression while tracing")


def print_once(*values: Any, **options: Any) -> None:
    """print() in a kernel function: executed once, while tracing."""
    builtins.print(*values, **options)
    if any(isinstance(v, Node) for v in values):
        warn("host-print", "print() runs once, while the kernel is traced, and prints expressions",
             "T.print(x) prints values while the kernel runs", span=place())


class Guard:
    """A `with` around a frame (or any context manager) in rewritten code.  value: the object that `as` binds."""

    __slots__ = ("item", "frame", "names", "saved", "value", "then", "orelse", "span")

    def __init__(self, b: Builder, item: Any, names: tuple[str, ...], saved: tuple[Any, ...]) -> None:
        self.item, self.names, self.saved = item, names, saved
        self.frame = item if isinstance(item, Frame) else None
        self.then = self.orelse = True
        self.value: Any = None
        self.span = b.span()

    def __enter__(self) -> Guard:
        self.value = self.item.__enter__()
        return self

    def __exit__(self, *info: Any) -> Any:
        return self.item.__exit__(*info)


class ControlFlow:
    """Statements with bodies, which open and close frames, and those that leave them.

    A method gets the values of the names that a body assigns before and after it, and returns what stays readable.
    """

    def __init__(self, b: Builder) -> None:
        self.b, self.names, self.conditions = b, Names(b), Conditions(b)

    def if_(self, test: Any, names: tuple[str, ...], now: tuple[Any, ...], has_else: bool) -> Guard:
        c = self.conditions.truth(test)
        g = Guard(self.b, None, names, now)
        if isinstance(c, bool):
            g.then, g.orelse = c, has_else and not c
            return g
        g.frame = IfFrame(c)
        g.orelse = has_else
        self.b.enter(g.frame)
        return g

    def mid(self, g: Guard, now: tuple[Any, ...]) -> tuple[Any, ...]:
        """Switch from the then branch to the else branch, which sees the names as they were before the if."""
        if g.frame is None or not g.orelse:
            return now
        frame = g.frame
        while self.b.frames[-1] is not frame:
            self.b.exit(self.b.frames[-1])
        frame.then_body, frame.stmts, frame.dead = frame.body(), [], False  # type: ignore[attr-defined]
        saved, g.saved = g.saved, (g.saved, now)
        return saved

    def end_if(self, g: Guard, now: tuple[Any, ...]) -> tuple[Any, ...]:
        if g.frame is None:
            return now
        self.b.exit(g.frame)
        if g.orelse:
            saved, first = g.saved
            return tuple(self._after(n, s, a if b is s else b, g) for n, s, a, b in zip(g.names, saved, first, now))
        return tuple(self._after(n, s, v, g) for n, s, v in zip(g.names, g.saved, now))

    def _after(self, name: str, before: Any, now: Any, g: Guard) -> Any:
        """The value of a name after a run-time body that may have assigned it."""
        if now is before or isinstance(now, (Poison, Undefined)):
            return now
        if isinstance(now, (Expr, Buffer, BufferSlice)) and not isinstance(now, Const):
            return outside_scope(name, g.span, _is_scalar(now))
        if g.frame is not None and g.frame.once:
            return now
        if _same_python(before, now):
            return before
        return rebound_constant(name, g.span, _is_scalar(now))

    def loop(self, it: Any, names: tuple[str, ...], now: tuple[Any, ...]) -> Guard:
        if not (isinstance(it, Frame) and it.loop):
            shown = type(it).__name__ if isinstance(it, Frame) else repr(it)
            raise error("for-iterator", f"Invalid for loop: got {shown}, type=‹{type(it).__name__}›, expected a loop such as "
                        "range, T.serial, T.Parallel or T.Pipelined", hint=_loop_hint(it))
        g = Guard(self.b, it, names, now)
        g.value = self.b.enter(it)
        return g

    def builtin(self, fn: Any) -> Any:
        """`range` in a for header is T.serial, `print` says when it prints; unless the user shadowed the name."""
        return loop_of_range.call if fn is builtins.range else print_once if fn is builtins.print else fn

    def while_(self, test: Callable[[], Any], names: tuple[str, ...], now: tuple[Any, ...]) -> Guard:
        g = Guard(self.b, None, names, now)
        self.b.loop_passes += 1
        try:
            c = self.conditions.truth(self.conditions.lazily(test))
        except errors.TileLangError as e:
            if e.kind != "lazy-effect" or self.b.lazy:
                raise
            raise errors.error("lazy-effect", "the condition of a while loop needs statements (a macro with effects, "
                               "T.any_of, T.all_of), which have no place in front of every iteration",
                               expected="a condition without statements", found="a macro with effects, T.any_of or T.all_of",
                               span=self.b.span(), hint="compute it into a T.alloc_var before the loop and again at the end "
                               "of its body, and loop on the variable") from None
        finally:
            self.b.loop_passes -= 1
        if isinstance(c, bool):
            if c:
                raise error("infinite-loop", "Infinite while loop detected: its condition is always true")
            warn("no-effect", "the condition of this while loop is always false; the loop is skipped",
                 "loop on a T.alloc_var", self.b.span(), log)
            g.then = False
            return g
        g.frame = WhileFrame(c)
        self.b.enter(g.frame)
        return g

    def end_loop(self, g: Guard, now: tuple[Any, ...], carried: frozenset[str]) -> tuple[Any, ...]:
        if g.frame is None:
            return now
        for name, before, value in zip(g.names, g.saved, now):
            if name not in carried or value is before or isinstance(before, (Undefined, Poison)):
                continue
            if isinstance(before, (Buffer, BufferSlice)) and _is_scalar(value):
                continue  # what reads the name in front of the assignment needs a buffer: no scalar of the last iteration
            if not isinstance(before, Expr) or isinstance(before, Const):
                if not _same_python(before, value):
                    raise errors.error("loop-carried-value", f"`{name}` is re-bound in the loop and read by its next "
                                       "iteration, but tracing runs the loop body once, so that Python re-binds the name once",
                                       found=f"`{name}` re-bound by Python", span=g.span, label="this loop",
                                       hint=f"use `{name} = T.alloc_var(dtype, init=…)` before the loop")
        self.b.exit(g.frame)
        return tuple(self._after(n, s, v, g) for n, s, v in zip(g.names, g.saved, now))

    def scope(self, item: Any, names: tuple[str, ...], now: tuple[Any, ...]) -> Guard:
        return Guard(self.b, item, names, now)

    def end_scope(self, g: Guard, now: tuple[Any, ...]) -> tuple[Any, ...]:
        if g.frame is None:
            return now
        return tuple(self._after(n, s, v, g) for n, s, v in zip(g.names, g.saved, now))

    def break_(self) -> None:
        frame = self._innermost_loop("break")
        if frame.parallel:
            raise error("break-in-parallel", "break in a T.Parallel loop: its iterations run in no particular order")
        self._jump(Break(span=self.b.span()))

    def continue_(self) -> None:
        self._innermost_loop("continue")
        self._jump(Continue(span=self.b.span()))

    def _jump(self, stmt: Break | Continue | Evaluate) -> None:
        self.b.emit(stmt)
        self.b.frames[-1].dead = True  # the rest of this block is unreachable

    def _innermost_loop(self, word: str) -> Frame:
        for f in reversed(self.b.frames):
            if f.loop:
                return f
            if f is self.b.kernel:
                break
        raise error("break-outside-loop", f"'{word}' outside a run-time loop", found=f"'{word}' outside of one")

    def leaves_function(self) -> bool:
        """Whether a bare `return` ends the traced function.  Under run-time control flow of a launch it ends the thread."""
        frames = self.b.frames[self.b.ctx.base:]
        if (len(self.b.contexts) > 1 or self.b.kernel not in frames or any(f.parallel for f in frames)
                or all(f.once for f in frames[frames.index(self.b.kernel):])):
            return True
        self._jump(Evaluate(call("thread_return", (), "void", span=self.b.span()), span=self.b.span()))
        return False

    def return_(self, value: Any) -> Any:
        """`return value`.  In a macro: the present value.  In a prim_func: the outputs."""
        macro = len(self.b.contexts) > 1
        for f in self.b.frames[self.b.ctx.base:]:
            if not f.once:
                hint = ("assign to a T.alloc_var and return it after the loop or branch" if macro else
                        "leave it out of loops, T.Parallel and branches; in T.Kernel a bare return ends the thread")
                raise error("return-in-control-flow", "return inside run-time control flow is not supported", hint=hint)
        if macro:
            return self.names.freeze(value)
        self.finish_outputs(value)
        return value

    def finish_outputs(self, value: Any) -> None:
        """Record which T.empty tensors the function returns (eager.py and prim_func.py read the result)."""
        items = () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)
        n = len(self.b.outputs)
        order = []
        for v in items:
            k = next((i for i, o in enumerate(self.b.outputs) if o is v), None)
            if k is None:
                raise error("return-value", "Only tensor allocated from `T.empty` can be returned in prim_func, found "
                            f"{describe(v)}")
            if k - n in order:
                raise error("return-value", f"`{v.name}` is returned twice", found=f"`{v.name}` twice")
            order.append(k - n)
        self.b.returned = tuple(order)

    def assert_(self, test: Any, message: Callable[[], Any], text: str) -> None:
        c = self.conditions.truth(test)
        if isinstance(c, bool):
            if not c:
                raise AssertionError(message() or text)
            return
        self.b.emit(Assert(c, str(message() or text), span=self.b.span()))

    def expr(self, value: Any) -> None:
        """An expression statement."""
        if value is None or isinstance(value, (Emitted, str)):
            return
        if isinstance(value, Frame):
            if value.loop:
                warn("open-loop", "a loop is used as a statement; it stays open to the end of the block",
                     "write `for i in` in front of it", self.b.span(), log)
            self.b.enter(value)
            return
        if isinstance(value, Call):
            self.b.emit(Evaluate(value, span=self.b.here()))
            return
        if isinstance(value, Poison):
            value._raise()
        if isinstance(value, Stmt):
            self.b.emit(value)
            return
        warn("no-effect", "the value of this expression is not used", "assign it, or leave it out", self.b.span(), log)


def leading_arguments(b: Builder) -> tuple[Any, ...]:
    """The first arguments of rewritten code (rewrite.FIRST): the builder, and what its statements and operators call."""
    flow = ControlFlow(b)
    return b, flow.names, flow.conditions, flow, UNDEFINED


def _loop_hint(it: Any) -> str:
    """What to write in place of a for loop over something that is no loop of the language."""
    if isinstance(it, Frame):
        return f"open it: {it.opened_by}"
    if isinstance(it, Buffer):
        return f"loop over its indices: for i in T.serial({it.shape[0] if it.shape else 1})"
    if isinstance(it, (int, Expr)):
        return f"write for i in T.serial({it!r})"
    return "iterate Python sequences outside the kernel, in a comprehension, or by a T.macro"


def _is_scalar(v: Any) -> bool:
    """Whether a value (or the former value of a name that must not be read) is one number."""
    return v.scalar if isinstance(v, Poison) else isinstance(v, (Expr, bool, int, float))


def _same_python(a: Any, b: Any) -> bool:
    """Whether two Python values are equal constants, so that assigning the second changes nothing."""
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, tuple)) and bool(a == b)
