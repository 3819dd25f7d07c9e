"""Scopes of a trace: running functions, names that must not be read, and frames that collect statements."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any, ClassVar

from tilelang import errors
from tilelang.ir import Expr, If, Span, Stmt, While, seq

from .rewrite import Place
from .source_text import codes_in
from .state import current, error, need_tracing, reject_operators


class Context:
    """One running function: the prim_func, or one call of a macro.  caller: where it was called."""

    __slots__ = ("file", "function", "places", "caller", "code", "base", "_spans")

    def __init__(self, file: str, function: str, places: tuple[Place, ...], caller: Span | None, code: CodeType,
                 base: int = 0) -> None:
        self.file, self.function, self.places, self.caller, self.code, self.base = (
            file, function, places, caller, code, base)
        self._spans: dict[int, Span] = {}

    def span(self, pos: int) -> Span:
        got = self._spans.get(pos)
        if got is None:
            line, col, end_line, end_col = self.places[pos]
            got = self._spans[pos] = Span(self.file, line, col, end_line, end_col, self.function, self.caller)
        return got


    def owns(self, code: CodeType) -> bool:
        """Whether a code is that of the function, or of a lambda or comprehension in it."""
        return code is self.code or any(code is c for c in codes_in(self.code))


class Poison:
    """A name whose value must not be read any more; every use raises `error`.  scalar: the value was one."""

    __slots__ = ("_name", "_kind", "_message", "_hint", "_span", "scalar")

    def __init__(self, name: str, kind: str, message: str, hint: str, span: Span | None, scalar: bool = False) -> None:
        self._name, self._kind, self._message, self._hint, self._span = name, kind, message, hint, span
        self.scalar = scalar

    def _raise(self, *_: Any, **__: Any) -> Any:
        b = current()
        notes = ((self._span, "bound in the body of this"),) if self._span is not None else ()
        raise errors.error(self._kind, self._message,
                           found=f"`{self._name}` without one", span=b.span() if b else None, notes=notes, hint=self._hint)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__tilelang_expr__":
            raise AttributeError(name)
        return self._raise()

    __bool__ = __iter__ = __len__ = __call__ = __str__ = __format__ = _raise


reject_operators(Poison, Poison._raise)
Poison.__hash__ = Poison._raise  # type: ignore[method-assign, assignment]


class Undefined(Poison):
    """The value of a local name before its first assignment."""

    def __init__(self) -> None:
        super().__init__("", "scope", "a local name is used before it has a value", "assign it first", None)

    def __repr__(self) -> str:
        return "<unassigned>"


UNDEFINED = Undefined()


def outside_scope(name: str, span: Span | None, scalar: bool) -> Poison:
    """The name of an immutable value (or buffer) whose scope has ended."""
    return Poison(name, "scope", f"Immutable variable `{name}` is used outside its defining region!",
                  "carry a value out of a loop or branch with T.alloc_var, or define it before", span, scalar)


def rebound_constant(name: str, span: Span | None, scalar: bool) -> Poison:
    """A Python value assigned under run-time control flow, where the assignment happens only once, while tracing."""
    return Poison(name, "loop-carried-value",
                  f"`{name}` is a Python value assigned in a run-time loop or branch, and is read after it",
                  f"Python assignments run once, while the kernel is traced: use `{name} = T.alloc_var(dtype, init=…)`",
                  span, scalar)


class Frame:
    """A scope that collects statements.  `with frame as value:` opens it in the current builder.

    once: its body runs exactly once when it is reached, so Python values assigned in it stay valid after it.
    loop: break and continue refer to it.  parallel: the iterations of the loop have no order.
    vars: the variables of its head, which have no name of the program where it did not bind them.
    opens_by_name: `name = frame` opens it to the end of the block around it, as `with frame as name:` would.
    opened_by: how a program opens it, for the error of a program that uses it as a value.
    """

    once: ClassVar[bool] = True
    loop: ClassVar[bool] = False
    parallel = opens_by_name = False
    opened_by = "for i in T.serial(n):"
    vars: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []
        self.span: Span | None = None
        self.dead = False
        self.value: Any = None

    def open(self, builder: Any) -> Any:
        """Called after the frame was pushed.  Returns the `as` value."""
        return None

    def close(self, builder: Any) -> Stmt | None:
        """The statement the frame becomes, from self.stmts."""
        return self.body()

    def body(self) -> Stmt:
        return seq(*self.stmts, span=self.span)

    def __iter__(self) -> Iterator[Any]:  # the frontend rewrites `for x in frame` to `with`
        if not self.loop:
            self.__tilelang_expr__()
        raise error("for-iterator", f"'{type(self).__name__}' object is not iterable here: a loop of the kernel is a statement "
                    "of a kernel function", found=f"a {type(self).__name__} in Python code",
                    hint="write `for i in T.serial(n):` in a T.prim_func, T.macro or tilelang.jit function; a comprehension "
                    "takes Python sequences: for i in (0, 1, 2)")

    def __tilelang_expr__(self, *others: Any) -> Any:
        if any(x is None or isinstance(x, Frame) for x in others):
            return NotImplemented
        raise error("frame-value", "a loop or launch that is not opened is used as a value", found="one without",
                    hint=f"open it: {self.opened_by}")

    def __enter__(self) -> Any:
        return need_tracing(type(self).__name__).enter(self)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            need_tracing(type(self).__name__).exit(self)


reject_operators(Frame, Frame.__tilelang_expr__)


class BodyFrame(Frame):
    """A bare block: keeps its statements together."""

    def close(self, builder: Any) -> Stmt | None:
        return seq(*self.stmts, span=self.span) if self.stmts else None


class IfFrame(Frame):
    """Both branches of a run-time if, and which of them is being traced."""

    once = False

    def __init__(self, cond: Expr) -> None:
        super().__init__()
        self.cond = cond
        self.then_body: Stmt | None = None

    def close(self, builder: Any) -> Stmt:
        if self.then_body is None:
            return If(self.cond, self.body(), None, span=self.span)
        return If(self.cond, self.then_body, self.body(), span=self.span)


class WhileFrame(Frame):
    """while cond: body."""

    once = False
    loop = True

    def __init__(self, cond: Expr) -> None:
        super().__init__()
        self.cond = cond

    def close(self, builder: Any) -> Stmt:
        return While(self.cond, self.body(), span=self.span)
