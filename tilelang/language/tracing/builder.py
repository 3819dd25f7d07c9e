"""The builder, which rewritten code calls for conditions, branches, loops, returns and statements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tilelang import errors
from tilelang.ir import (Assert, Break, Buffer, Call, Const, Continue, Evaluate, Expr, Stmt, as_bool, const, logical,
                         select, unary)

from .recorder import OPS, SCALARS, Emitted, Recorder, log, reads_memory
from .regions import BufferSlice
from .scope import Frame, IfFrame, Poison, Undefined, WhileFrame, outside_scope, rebound_constant
from .state import current, describe, need_tracing, set_current
from .trace_equality import differs


class Guard:
    """A `with` around a frame (or any context manager) in rewritten code.  value: the object that `as` binds."""

    __slots__ = ("builder", "item", "frame", "names", "saved", "value", "then", "orelse", "span")

    def __init__(self, builder: Builder, item: Any, names: tuple[str, ...], saved: tuple[Any, ...]) -> None:
        self.builder, self.item, self.names, self.saved = builder, item, names, saved
        self.frame = item if isinstance(item, Frame) else None
        self.then = self.orelse = True
        self.value: Any = None
        self.span = builder.span()

    def __enter__(self) -> Guard:
        self.value = self.item.__enter__()
        return self

    def __exit__(self, *info: Any) -> Any:
        return self.item.__exit__(*info)


class Builder(Recorder):
    """Traces one function.  lazy: > 0 while it evaluates an operand that may not run (of `and`, `or`, a conditional)."""

    # ---- conditions ------------------------------------------------------------------------------------------------

    def truth(self, value: Any) -> Any:
        """A Python bool, or the run-time condition as a bool expression."""
        if isinstance(value, BufferSlice):
            value = value.vector()
        if isinstance(value, Expr):
            if value.dtype.lanes > 1:
                raise errors.error("condition", f"a vector of {value.dtype.lanes} values has no one truth value",
                                   expected="a scalar", found=f"a {value.dtype} vector", span=self.span(),
                                   hint="compare an element of it, or T.any_of and T.all_of of a region; "
                                   "T.if_then_else chooses between scalars in a loop")
            return bool(value.value) if isinstance(value, Const) else as_bool(value)
        if isinstance(value, Buffer):
            raise errors.error("condition", f"Buffer `{value.name}` has no truth value",
                               expected="a scalar", found=f"the buffer `{value.name}`", span=self.span(),
                               hint="compare an element of it")
        if isinstance(value, (bool, int, type(None), np.bool_)):
            return bool(value)
        if hasattr(value, "__tilelang_expr__"):
            return self.truth(value.__tilelang_expr__())
        log.warning("%s: a Python object of type %s is used as a condition; its truth value is taken while tracing",
                    self.span(), type(value).__name__)
        return bool(value)

    def lazily(self, thunk: Callable[[], Any]) -> Any:
        self.lazy += 1
        try:
            return thunk()
        finally:
            self.lazy -= 1

    def _static(self, v: Any) -> bool:
        return not isinstance(v, (Expr, BufferSlice)) and not hasattr(v, "__tilelang_expr__") or isinstance(v, Const)

    def and_(self, first: Any, *rest: Callable[[], Any]) -> Any:
        return self._logical("and", first, rest)

    def or_(self, first: Any, *rest: Callable[[], Any]) -> Any:
        return self._logical("or", first, rest)

    def _logical(self, op: str, acc: Any, rest: tuple[Callable[[], Any], ...]) -> Any:
        for thunk in rest:
            if self._static(acc):
                if self.truth(acc) != (op == "and"):
                    return acc  # the result is known: the other operands are not evaluated, as in Python
                acc = thunk()
                continue
            value = self.lazily(thunk)
            if self._static(value):
                value = const(self.truth(value))
            acc = logical(op, self.truth(acc), self.truth(value))
        return acc

    def not_(self, value: Any) -> Any:
        return not self.truth(value) if self._static(value) else unary("not", self.truth(value))

    def ternary(self, cond: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        c = self.truth(cond)
        if isinstance(c, bool):
            return a() if c else b()
        x, y = self.lazily(a), self.lazily(b)
        for v in (x, y):
            if not isinstance(v, (Expr, BufferSlice, *SCALARS)):
                raise errors.error("condition", "`a if cond else b` with a run-time condition chooses between "
                                                "scalars, found "
                                   f"{describe(v)}",
                                   expected="scalars", found=describe(v), span=self.span(), hint="use an if statement")
        x, y = (v.vector() if isinstance(v, BufferSlice) else v for v in (x, y))
        return select(c, x, y)

    def compare(self, left: Any, *rest: tuple[str, Callable[[], Any]]) -> Any:
        """a < b < c: evaluates every operand once and joins the comparisons by `and`."""
        result: Any = True
        for k, (op, thunk) in enumerate(rest):
            right = thunk() if self._static(result) else self.lazily(thunk)
            part = (self.contains(left, right, op == "not in") if op.endswith("in") else
                    self.equality(op, left, right) if op in ("==", "!=") else OPS[op](left, right))
            result = part if k == 0 else self._conjunction(result, part)
            if self._static(result) and not self.truth(result):
                return result
            left = right
        return result

    def equality(self, op: str, a: Any, b: Any) -> Any:
        """a == b or a != b.  Raises condition for whole buffers, and for a run-time value with a string.

        Python would treat those as unequal, so that a branch would silently be taken never or always."""
        for x, other in ((a, b), (b, a)):
            if isinstance(x, Buffer) and isinstance(other, (Expr, BufferSlice, *SCALARS)) or (
                    isinstance(x, str) and isinstance(other, Expr) and not self._static(other)):
                found = f"{describe(a)} and {describe(b)}"
                raise errors.error("condition", f"`{op}` of {found}: Python calls them unequal whatever they hold",
                                   expected="two values", found=found, span=self.span(),
                                   hint="compare an element of the buffer: A[i] == x" if isinstance(x, Buffer) else
                                   "compare with a number")
        if isinstance(a, (tuple, list, dict)) and type(a) is type(b) and (differs(a) or differs(b)):
            same = self._elementwise(a, b)
            return self.not_(same) if op == "!=" else same
        return OPS[op](a, b)

    def _elementwise(self, a: Any, b: Any) -> Any:
        """a == b of containers with run-time elements: the comparisons joined by `and`."""
        if len(a) != len(b) or isinstance(a, dict) and a.keys() != b.keys():
            return False
        if isinstance(a, dict):
            a, b = list(a.values()), [b[k] for k in a]
        same: Any = True
        for x, y in zip(a, b):
            same = self._logical("and", same, (partial(self.equality, "==", x, y),))
        return same

    def contains(self, item: Any, items: Any, absent: bool = False) -> Any:
        """`item in items`, or `not in`.  With run-time values: the comparisons joined by `or`."""
        found: Any
        if isinstance(items, dict):
            items = list(items)
        if isinstance(items, range) and not self._static(item):
            low, high = (min(items), max(items)) if items else (1, 0)
            found = logical("and", item >= low, item <= high)
            if abs(items.step) != 1:
                found = logical("and", found, OPS["=="]((item - low) % abs(items.step), 0))
        elif isinstance(items, (tuple, list, set, frozenset)) and not all(
                self._static(x) and not differs(x) for x in (item, *items)):
            found = False
            for x in items:
                part = self.equality("==", item, x)
                found = logical("or", found, const(self.truth(part)) if self._static(part) else self.truth(part))
        elif self._static(item) or isinstance(items, (Buffer, BufferSlice)):
            found = item in items
        else:
            raise errors.error("condition", f"`in` of a run-time value and a {type(items).__name__}: its value is known "
                               "only when the kernel runs",
                               expected="a tuple or list of values", found=f"a {type(items).__name__}",
                               span=self.span(), hint="use a tuple or list of the values")
        return self.not_(found) if absent else found

    def _conjunction(self, a: Any, b: Any) -> Any:
        if self._static(b):
            b = const(self.truth(b))
        return logical("and", self.truth(a), self.truth(b))

    def collected(self, made: Any) -> Any:
        """A list or dict that was just made: elements that read memory are read now."""
        if not self.lazy:
            for key, value in made.items() if isinstance(made, dict) else enumerate(made):
                kept = self.as_it_is_now(value)
                if kept is not value:
                    made[key] = kept
        return made

    # ---- control flow ----------------------------------------------------------------------------------------------

    def if_(self, test: Any, names: tuple[str, ...], now: tuple[Any, ...], has_else: bool) -> Guard:
        c = self.truth(test)
        g = Guard(self, None, names, now)
        if isinstance(c, bool):
            g.then, g.orelse = c, has_else and not c
            return g
        g.frame = IfFrame(c)
        g.orelse = has_else
        self.enter(g.frame)
        return g

    def mid(self, g: Guard, now: tuple[Any, ...]) -> tuple[Any, ...]:
        """Switch from the then branch to the else branch, which sees the names as they were before the if."""
        if g.frame is None or not g.orelse:
            return now
        frame = g.frame
        self._close_inner(frame)
        frame.then_body, frame.stmts, frame.dead = frame.body(), [], False  # type: ignore[attr-defined]
        saved, g.saved = g.saved, (g.saved, now)
        return saved

    def end_if(self, g: Guard, now: tuple[Any, ...]) -> tuple[Any, ...]:
        if g.frame is None:
            return now
        self.exit(g.frame)
        if g.orelse:
            saved, first = g.saved
            return tuple(self._after(n, s, a if b is s else b, g) for n, s, a, b in zip(g.names, saved, first, now))
        return tuple(self._after(n, s, v, g) for n, s, v in zip(g.names, g.saved, now))

    def _close_inner(self, frame: Frame) -> None:
        while self.frames[-1] is not frame:
            self.exit(self.frames[-1])

    def _after(self, name: str, before: Any, now: Any, g: Guard) -> Any:
        """The value of a name after a run-time body that may have assigned it."""
        if now is before or isinstance(now, (Poison, Undefined)):
            return now
        if isinstance(now, (Expr, Buffer, BufferSlice)) and not isinstance(now, Const):
            return outside_scope(name, g.span)
        if g.frame is not None and g.frame.once:
            return now
        if _same_python(before, now):
            return before
        return rebound_constant(name, g.span)

    def loop(self, it: Any, names: tuple[str, ...], now: tuple[Any, ...]) -> Guard:
        if not (isinstance(it, Frame) and it.loop):
            raise errors.error("for-iterator", f"Invalid for loop: got {it!r}, type={type(it).__name__}, expected a "
                                               "loop such "
                               "as range, T.serial, T.Parallel or T.Pipelined",
                               found=str(type(it).__name__), span=self.span(),
                               hint="iterate Python sequences outside the kernel, in a comprehension, or by a T.macro")
        g = Guard(self, it, names, now)
        g.value = self.enter(it)
        return g

    def while_(self, test: Callable[[], Any], names: tuple[str, ...], now: tuple[Any, ...]) -> Guard:
        g = Guard(self, None, names, now)
        self.loop_passes += 1
        try:
            c = self.truth(self.lazily(test))
        except errors.TileLangError as e:
            if e.kind != "lazy-effect" or self.lazy:
                raise
            raise errors.error("lazy-effect", "the condition of a while loop needs statements of its own (a macro with "
                               "effects, T.any_of, T.all_of), which have no place in front of every iteration",
                               expected="a condition without statements of its own",
                               found="a macro with effects, T.any_of or T.all_of",
                               span=self.span(), hint="compute it into a T.alloc_var before the loop and again at the "
                               "end of its body, and loop on the variable") from None
        finally:
            self.loop_passes -= 1
        if isinstance(c, bool):
            if c:
                raise errors.error("infinite-loop", "Infinite while loop detected: its condition is always true",
                                   span=self.span(), hint="loop on a T.alloc_var, or use T.serial with break")
            log.warning("%s: the condition of this while loop is always false; the loop is skipped", self.span())
            g.then = False
            return g
        g.frame = WhileFrame(c)
        self.enter(g.frame)
        return g

    def end_loop(self, g: Guard, now: tuple[Any, ...], carried: frozenset[str]) -> tuple[Any, ...]:
        if g.frame is None:
            return now
        for name, before, value in zip(g.names, g.saved, now):
            if name not in carried or value is before or isinstance(before, (Undefined, Poison)):
                continue
            if not isinstance(before, Expr) or isinstance(before, Const):
                if not _same_python(before, value):
                    raise errors.error(
                        "loop-carried-value", f"`{name}` is re-bound in the loop and read by its next iteration, but a "
                                              "Python "
                        "name is re-bound only once, while tracing",
                        found=f"`{name}` re-bound by Python", span=g.span, label="this loop",
                        hint=f"use `{name} = T.alloc_var(dtype, init=…)` before the loop")
        self.exit(g.frame)
        return tuple(self._after(n, s, v, g) for n, s, v in zip(g.names, g.saved, now))

    def scope(self, item: Any, names: tuple[str, ...], now: tuple[Any, ...]) -> Guard:
        return Guard(self, item, names, now)

    def end_scope(self, g: Guard, now: tuple[Any, ...]) -> tuple[Any, ...]:
        if g.frame is None:
            return now
        return tuple(self._after(n, s, v, g) for n, s, v in zip(g.names, g.saved, now))

    def break_(self) -> None:
        frame = self._innermost_loop("break")
        if getattr(frame, "parallel", False):
            raise errors.error("break-in-parallel", "break in a T.Parallel loop: its iterations run in no particular "
                                                    "order",
                               span=self.span(), hint="use T.serial")
        self._jump(Break(span=self.span()))

    def continue_(self) -> None:
        self._innermost_loop("continue")
        self._jump(Continue(span=self.span()))

    def _jump(self, stmt: Stmt) -> None:
        self.emit(stmt)
        self.frames[-1].dead = True  # the rest of this block is unreachable

    def _innermost_loop(self, word: str) -> Frame:
        for f in reversed(self.frames):
            if f.loop:
                return f
            if f is self.kernel:
                break
        raise errors.error("break-outside-loop", f"'{word}' outside a run-time loop",
                           found=f"'{word}' outside of one", span=self.span())

    def return_(self, value: Any) -> Any:
        """`return value`.  In a macro: the present value.  In a prim_func: the outputs."""
        macro = len(self.contexts) > 1
        for f in self.frames[self.ctx.base:]:
            if not f.once:
                hint = ("assign to a T.alloc_var and return it after the loop or branch" if macro else
                        "T.thread_return() ends the executing thread")
                raise errors.error("return-in-control-flow", "return inside run-time control flow is not supported",
                                   span=self.span(), hint=hint)
        if macro:
            return self.freeze(value)
        self.finish_outputs(value)
        return value

    def finish_outputs(self, value: Any) -> None:
        """Record which T.empty tensors the function returns (eager.py and prim_func.py read the result)."""
        items = () if value is None else tuple(value) if isinstance(value, (tuple, list)) else (value,)
        n = len(self.outputs)
        order = []
        for v in items:
            k = next((i for i, o in enumerate(self.outputs) if o is v), None)
            if k is None:
                raise errors.error("return-value", "Only tensor allocated from `T.empty` can be returned in prim_func, "
                                                   "found "
                                   f"{describe(v)}",
                                   found=describe(v), span=self.span())
            if k - n in order:
                raise errors.error("return-value", f"`{v.name}` is returned twice",
                                   found=f"`{v.name}` twice", span=self.span())
            order.append(k - n)
        self.returned = tuple(order)

    def assert_(self, test: Any, message: Callable[[], Any], text: str) -> None:
        c = self.truth(test)
        if isinstance(c, bool):
            if not c:
                raise AssertionError(message() or text)
            return
        self.emit(Assert(c, str(message() or text), span=self.span()))

    def expr(self, value: Any) -> None:
        """An expression statement."""
        if value is None or isinstance(value, (Emitted, str)):
            return
        if isinstance(value, Frame):
            if value.loop:
                log.warning("%s: a loop is used as a statement; it stays open to the end of the block", self.span())
            self.enter(value)
            return
        if isinstance(value, Call):
            self.emit(Evaluate(value, span=self.here()))
            return
        if isinstance(value, Poison):
            value._raise()
        if isinstance(value, Stmt):
            self.emit(value)
            return
        log.warning("%s: the value of this expression is not used", self.span())


def _same_python(a: Any, b: Any) -> bool:
    """Whether two Python values are equal constants, so that assigning the second changes nothing."""
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, tuple)) and bool(a == b)


def current_builder() -> Builder | None:
    """The builder of the function being traced in this thread, or None outside a kernel function."""
    b = current()
    assert b is None or isinstance(b, Builder)  # only `tracing` sets it
    return b


def need_builder(what: str) -> Builder:
    """The active builder.  Raises no-builder (JITNoBuilderError) naming `what` outside a kernel function."""
    b = need_tracing(what)
    assert isinstance(b, Builder)
    return b


class tracing:
    """`with tracing(builder):` makes it the active one."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def __enter__(self) -> Builder:
        self.old = set_current(self.builder)
        return self.builder

    def __exit__(self, *info: Any) -> None:
        set_current(self.old)


__all__ = ["Builder", "Emitted", "Guard", "OPS", "current_builder", "log", "need_builder", "reads_memory",
           "tracing"]
