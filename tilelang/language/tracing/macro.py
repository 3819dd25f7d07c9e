"""T.macro: functions that are inlined at each call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from tilelang import errors
from tilelang.ir import Const, Expr, Load, Region, Var, load

from .rewrite import Rewritten, rewrite_function
from .builder import Builder, need_builder
from .control_flow import leading_arguments
from .names import Names
from .prim_func import closure_names, outer_locals, resolve_annotation
from .python_errors import refine
from .regions import BufferSlice
from .scope import Context, Poison
from .source_text import remember, text_of
from .state import describe, error, need_function


class _Ref:
    """T.Ref: annotation of a macro parameter passed by reference."""

    def __repr__(self) -> str:
        return "T.Ref"


Ref = _Ref()


class Macro:
    """A function whose body is traced anew at each call.

    Run-time scalars are passed by value (bound once); buffers, regions and Python values as they are.
    name, orig_func, source: of the Python function.  reads_only: the macro is an expression and may be used in an operand that
    is evaluated only under a condition; a statement in it is then an error.
    """

    def __init__(self, fn: Callable[..., Any], caller_locals: dict[str, Any] | None = None,
                 reads_only: bool = False) -> None:
        self.orig_func, self.name, self.__name__, self.__doc__ = fn, fn.__name__, fn.__name__, fn.__doc__
        self._reads_only = reads_only
        self._caller_locals = caller_locals
        self._signature = inspect.signature(fn)
        self._rewritten: Rewritten | None = None
        self._refs: frozenset[str] | None = None
        remember(fn)

    @property
    def source(self) -> str:
        return text_of(self.orig_func, needed=True)

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else lambda *a, **k: self(obj, *a, **k)

    def __call__(self, *args: Any, **kw: Any) -> Any:
        b = need_builder(f"macro {self.name}")
        if b.lazy and not self._reads_only:
            raise error("lazy-effect", f"macro `{self.name}` is called in an operand that may not be evaluated",
                        found=f"a call of macro `{self.name}`", hint="call it in a statement before and use its result")
        rw = rewrite_function(self.orig_func)
        if rw is not self._rewritten:  # the first call, or the function has been given other code
            self._rewritten, self._signature, self._refs = rw, inspect.signature(self.orig_func), None
        try:
            bound = self._signature.bind(*args, **kw)
        except TypeError as e:
            raise error("macro-arguments", f"macro `{self.name}`: ‹{e}›", expected=f"{self.name}{self._signature}") from None
        bound.apply_defaults()
        refs = self._reference_params()
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if name in refs:
                bound.arguments[name] = self._reference(b, name, value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(_by_value(b, f"{name}{k}", v) for k, v in enumerate(value))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {k: _by_value(b, k, v) for k, v in value.items()}
            else:
                bound.arguments[name] = _by_value(b, name, value)
        run = rw.function(self.orig_func, self._caller_locals)
        mark = len(b.macro_writes)
        b.enter_context(Context(rw.file, self.name, rw.places, b.here(), run.__code__))
        try:
            result = run(*leading_arguments(b), *bound.args, **bound.kwargs)
        except errors.TileLangError as e:
            e.span = refine(b, e) if e.span is None or e.span is b.span() else e.span
            raise
        b.exit_context()
        b.after_macro(mark)
        return result

    def _reference_params(self) -> frozenset[str]:
        if self._refs is None:
            names = closure_names(self.orig_func, self._caller_locals)
            refs = []
            for name, a in getattr(self.orig_func, "__annotations__", {}).items():
                if isinstance(a, str):
                    if not ("Ref" in a or a.endswith("Var")):
                        continue
                    a = resolve_annotation(a, self.orig_func, names)
                by_var = a is Var or getattr(a, "of", None) is Var  # T.Var
                if by_var:
                    warnings.warn("T.Var as a macro annotation is deprecated, use T.Ref", DeprecationWarning,
                                  stacklevel=3)
                if a is Ref or by_var:
                    refs.append(name)
            self._refs = frozenset(refs)
        return self._refs

    def _reference(self, b: Builder, name: str, value: Any) -> Any:
        """The element that a by-reference parameter stands for.  Its indices are evaluated here, once."""
        if isinstance(value, Load):
            if id(value) in b.named:
                return value
            fixed = tuple(i if isinstance(i, (Const, Var)) else b.let(f"{name}_index", i) for i in value.indices)
            target = load(value.buffer, fixed)
            b.handles[id(target)] = target
            b.named.add(id(target))
            return target
        if isinstance(value, (BufferSlice, Region)):
            r = value.region if isinstance(value, BufferSlice) else value
            return BufferSlice(r, by_reference=True)
        if isinstance(value, Poison):
            value._raise()
        raise error("macro-reference", f"To pass as reference, argument `{name}` is expected to be a variable or a buffer "
                    f"region, found {describe(value)}")

    def __repr__(self) -> str:
        return f"<macro {self.name}>"


def _by_value(b: Builder, name: str, value: Any) -> Any:
    if b.lazy:  # nothing changes between here and where it is used
        return value
    if isinstance(value, Expr) and not isinstance(value, (Const, Var)) and not value.dtype.is_handle:
        if isinstance(value, Load) and id(value) in b.handles and id(value) not in b.named:
            return value
        if b.kernel is not None or isinstance(value, Load):
            return b.let(name, value)
    return Names(b).freeze_slice(value) if isinstance(value, BufferSlice) else value


def macro(func: Callable[..., Any] | None = None) -> Any:
    """Decorator: a function inlined at each call.  May return values; may call itself with Python conditions.

    Example:
        @T.macro
        def scale(t, factor):
            for i, j in T.Parallel(128, 128):
                t[i, j] = t[i, j] * factor
    """
    if func is None:
        return lambda f: Macro(need_function(f, "T.macro"), outer_locals(2, f))
    return Macro(need_function(func, "T.macro"), outer_locals(2, func))
