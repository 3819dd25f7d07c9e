"""Tracing: a program's function is called with symbolic tensors, and its operators make the graph."""

from __future__ import annotations

import difflib
import inspect
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tilelang import language
from tilelang.errors import TileLangError, error, register
from tilelang.ir import Span, Var, dtype
from tilelang.language.tensor import TensorFactory, TensorSpec

from . import composed, control, functions
from .graph import Graph, Node, Size, text_of
from .sizes import size_of
from .tensor import FUNCTIONS, Tensor, Trace, current, described, tensor, tracing

register("program-result", TypeError, "a program returns something that is no tensor",
         "end the function with `return` and a tensor, or a tuple of tensors", expected="a tensor or a tuple of tensors")
register("program-cycle", RecursionError, "a program calls itself without end",
         "repeat by T.loop, or call with other shapes until an end is reached", expected="calls that come to an end")
register("program-parameter", TypeError, "a parameter of a program has an annotation or a kind that programs do not have",
         "write `x: T.Tensor(shape, dtype)`, `x: T.float32` for a number that a call gives, or nothing",
         expected="T.Tensor(shape, dtype), an element type, or no annotation")

PROVIDERS = (composed, control, functions)  # modules that provide the functions of programs
_RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("running", default=())


@dataclass(frozen=True)
class Parameter:
    """One parameter.  spec: its T.Tensor annotation with sizes; dtype: of a number given at the call; else open."""

    name: str
    shape: tuple[Size, ...] | None
    dtype: dtype | None
    default: Any


def parameters_of(fn: Callable[..., Any], outer: Mapping[str, Any] | None) -> list[Parameter]:
    """The parameters of a function.  outer: names for postponed annotations.  Raises program-parameter."""
    found = inspect.get_annotations(fn)
    names = {**getattr(fn, "__globals__", {}), **(outer or {}), **inspect.getclosurevars(fn).nonlocals}
    symbols: dict[Var, Size] = {}
    out = []
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise error("program-parameter", f"`{fn.__name__}` has the parameter `{p}`", found=f"`{p}`", span=_line_of(fn),
                        expected="parameters with names", hint="name each tensor; a tuple of tensors is one parameter each")
        given = found.get(p.name)
        if isinstance(given, str) and not isinstance(given, dtype):
            try:
                given = eval(given, names)
            except (NameError, SyntaxError, AttributeError) as e:
                raise error("program-parameter", f"the annotation of `{p.name}` of `{fn.__name__}`: {e}", found=given,
                            span=_line_of(fn)) from None
        out.append(_parameter(fn, p, given, symbols))
    return out


def _parameter(fn: Callable[..., Any], p: inspect.Parameter, given: Any, symbols: dict[Var, Size]) -> Parameter:
    default = p.default
    if isinstance(given, TensorSpec):
        for v in given.shape:
            if isinstance(v, Var) and v not in symbols:
                taken = {str(s) for s in symbols.values()}
                name = next(n for k in range(len(taken) + 1) if (n := v.name + (f"_{k}" if k else "")) not in taken)
                symbols[v] = size_of(Var(name, v.dtype), {})
        return Parameter(p.name, tuple(size_of(d, symbols) for d in given.shape), given.dtype, default)
    if isinstance(given, dtype):
        return Parameter(p.name, (), given, default)
    if given is None or isinstance(given, TensorFactory) or given in (int, float, bool, str, tuple, Any, p.empty):
        return Parameter(p.name, None, None, default)
    raise error("program-parameter", f"`{fn.__name__}` has the parameter `{p.name}` of {given!r}", found=repr(given),
                span=_line_of(fn))


def _line_of(fn: Callable[..., Any]) -> Span | None:
    """The line of a function's `def`."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    at = code.co_firstlineno
    while not re.match(r"\s*(async\s+)?(def|lambda)\b", text := linecache.getline(code.co_filename, at)) and text:
        at += 1
    text = linecache.getline(code.co_filename, at)
    return Span(code.co_filename, at, len(text) - len(text.lstrip()), at, len(text.rstrip()), fn.__name__)


def traced(fn: Callable[..., Any], values: Mapping[str, Any], key: Any = None) -> Graph:
    """The graph of a function.  values: parameter -> (shape, dtype) of a tensor as a Node of op input, or any other value."""
    trace = Trace(getattr(fn, "__code__", None))
    with tracing(trace):
        given = {k: Tensor(v, trace) if isinstance(v, Node) else v for k, v in values.items()}
        out = called(fn, given, key)
        single = not isinstance(out, (tuple, list))
        outputs = tuple(_result(fn, x) for x in ([out] if single else out))
        if not outputs:
            raise error("program-result", f"`{fn.__name__}` returns an empty tuple", found="no tensor", span=_line_of(fn))
    inputs = tuple(v for v in values.values() if isinstance(v, Node))
    return Graph(inputs, outputs, fn.__name__, single, tuple(dict.fromkeys(trace.guards))).shared()


def called(fn: Callable[..., Any], given: Mapping[str, Any], key: Any) -> Any:
    """Call a program's function while a trace runs.  Raises program-cycle, program-name for names that nothing has."""
    running = _RUNNING.get()
    if (fn, key) in running:
        raise error("program-cycle", f"`{fn.__name__}` calls itself with tensors of the same shapes",
                    found=f"a call of `{fn.__name__}` inside `{fn.__name__}`")
    token = _RUNNING.set((*running, (fn, key)))
    try:
        return fn(**given)
    except (NameError, AttributeError) as e:
        raise _unknown_name(e) or e from None
    except RecursionError as e:
        if isinstance(e, TileLangError):
            raise
        raise error("program-cycle", f"`{fn.__name__}` or a function that it calls calls itself without end",
                    found="calls deeper than Python allows", span=_line_of(fn)) from None
    finally:
        _RUNNING.reset(token)


def _unknown_name(e: Exception) -> TileLangError | None:
    """The error of a name that Python, or a module of ours, does not know; None for errors that are not about one."""
    of = getattr(e, "obj", None)
    name = getattr(e, "name", None)
    if isinstance(e, TileLangError) or name is None or isinstance(e, AttributeError) and of is not language:
        return None
    span, trace = None, e.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not trace.tb_frame.f_globals.get("__name__", "").startswith("tilelang."):
            text = linecache.getline(code.co_filename, trace.tb_lineno)
            col = max(0, text.find(name))
            span = Span(code.co_filename, trace.tb_lineno, col, trace.tb_lineno, col + len(name), code.co_name)
        trace = trace.tb_next
    known = [*FUNCTIONS, *dir(language)] if of is language else list(FUNCTIONS)
    near = difflib.get_close_matches(name, known, n=1)
    prefix = "T." if of is language or near else ""
    return error("program-name", f"`{name}` is not known" if of is None else f"tilelang.language has no `{name}`",
                 found=f"`{name}`", span=span, hint=f"did you mean `{prefix}{near[0]}`?" if near
                 else "define the name, or see the reference: whole-tensor programs")


def _result(fn: Callable[..., Any], x: Any) -> Node:
    if isinstance(x, (Tensor, bool, int, float)):
        return tensor(x).node
    raise error("program-result", f"`{fn.__name__}` returns {described(x)}", found=described(x), span=_line_of(fn))


def input_node(p: Parameter, index: int, shape: Sequence[Size], dt: dtype) -> Node:
    """The node of a parameter."""
    return Node("input", (), MappingProxyType({"name": p.name, "index": index}), tuple(shape), dt)


def inlined(fn: Callable[..., Any], parameters: Sequence[Parameter], values: Mapping[str, Any]) -> Any:
    """A program that is called inside another one: its function runs in that trace.  Raises program-argument."""
    key = []
    for p in parameters:
        x = values[p.name]
        if isinstance(x, Tensor):
            fits = p.shape is None or p.dtype == x.dtype and len(p.shape) == x.ndim and all(
                not isinstance(s, int) or s == t for s, t in zip(p.shape, x.shape))
            if not fits:
                assert p.shape is not None
                raise error("program-argument", f"`{fn.__name__}` takes another tensor as `{p.name}`",
                            expected=f"{p.dtype}{text_of(p.shape)}", found=f"{x.dtype}{text_of(x.shape)}")
        elif p.shape:
            raise error("program-argument", f"`{fn.__name__}` takes a tensor as `{p.name}`", found=described(x),
                        expected=f"{p.dtype}{text_of(p.shape)}")
        key.append((x.shape, str(x.dtype)) if isinstance(x, Tensor) else repr(x))
    return called(fn, values, tuple(key))


def in_program() -> bool:
    """Whether a program is being traced."""
    return current() is not None
