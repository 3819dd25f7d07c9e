"""Tracing: a program's function is called with symbolic tensors, and its operators make the graph."""

from __future__ import annotations

import difflib
import inspect
import linecache
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from dis import opname
from typing import Any

from tilelang import language
from tilelang.errors import TileLangError, error, register
from tilelang.ir import Span, Var, dtype
from tilelang.language.tensor import TensorFactory, TensorSpec
from tilelang.language.tracing.prim_func import closure_names
from tilelang.language.tracing.python_functions import innermost
from tilelang.language.tracing.state import span_of

from . import composed, control, functions
from .graph import Graph, Node, Size, size_of, text_of
from .tensor import FUNCTIONS, Tensor, Trace, described, is_ours, tensor, tracing

register("program-result", TypeError, "a program returns something that is no tensor",
         "end the function with `return` and a tensor, or a tuple of tensors", expected="a tensor or a tuple of tensors")
register("program-cycle", RecursionError, "a program calls itself without end",
         "repeat by T.loop, or call with other shapes until an end is reached", expected="calls that come to an end")
register("program-parameter", TypeError, "a parameter of a program has an annotation or a kind that programs do not have",
         "write `x: T.Tensor(shape, dtype)`, `x: T.float32` for a number that a call gives, or nothing",
         expected="T.Tensor(shape, dtype), an element type, or no annotation")

register("program-python", ValueError, "a program does something that Python has no meaning for",
         "a reduction gives one tensor, T.sort and T.topk give (values, indices); x.shape holds the sizes, of which those of "
         "T.dynamic have + - * // %", expected="operations of tensors, of Python numbers and of sizes")

PROVIDERS = (composed, control, functions)  # modules that provide the functions of programs
_RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("running", default=())


@dataclass(frozen=True)
class Parameter:
    """One parameter.  shape, dtype: of its T.Tensor annotation; () and a type for a number of the call; None where open."""

    name: str
    shape: tuple[Size, ...] | None = None
    dtype: dtype | None = None

    def check(self, x: Any, program: str) -> None:
        """Raise program-argument where an argument does not fit the declaration; sizes of arrays are checked by Graph.bound."""
        if self.shape is None or self.dtype is None or self.shape == () and isinstance(x, (bool, int, float)):
            return
        declared = f"{self.dtype}{text_of(self.shape)}"
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise error("program-argument", f"`{program}` takes an array as `{self.name}`", expected=declared,
                        found=described(x))
        have = dtype(x.dtype)
        if isinstance(x, Tensor):
            fits = have == self.dtype and len(self.shape) == x.ndim and all(
                not isinstance(s, int) or s == t for s, t in zip(self.shape, x.shape))
        else:  # an array may hold a type as another of its width and kind, and bytes hold any type of 8 bits
            fits = have == self.dtype or have.bits == self.dtype.bits and (have.kind == self.dtype.kind or have.bits == 8)
        if not fits:
            found = f"{have}{text_of(x.shape)}"
            raise error("program-argument", f"`{program}` takes `{self.name}` of «{declared}», found {found}")


def parameters_of(fn: Callable[..., Any], outer: Mapping[str, Any] | None) -> tuple[list[Parameter], dict[Var, Size]]:
    """The parameters of a function, and the sizes that its symbols stand for.

    outer: names for postponed annotations.  Raises program-parameter.
    """
    names = {**fn.__globals__, **closure_names(fn, dict(outer or {}))}
    symbols: dict[Var, Size] = {}
    out = []
    for p in inspect.signature(fn).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise error("program-parameter", f"`{fn.__name__}` has the parameter ‹`{p}`›", span=_line_of(fn),
                        expected="parameters with names", hint="name each tensor; a tuple of tensors is one parameter each")
        given = p.annotation
        if isinstance(given, str) and not isinstance(given, dtype):
            try:
                given = eval(given, names)
            except (NameError, SyntaxError, AttributeError) as e:
                raise error("program-parameter", f"the annotation of `{p.name}` of `{fn.__name__}`: {e}", found=given,
                            span=_line_of(fn)) from None
        if isinstance(given, TensorSpec):
            _name_symbols(given, symbols)
            out.append(Parameter(p.name, tuple(size_of(d, symbols) for d in given.shape), given.dtype))
        elif isinstance(given, dtype):
            out.append(Parameter(p.name, (), given))
        elif given is None or isinstance(given, TensorFactory) or given in (int, float, bool, str, tuple, Any, p.empty):
            out.append(Parameter(p.name))
        else:
            raise error("program-parameter", f"`{fn.__name__}` has the parameter `{p.name}` of ‹{given!r}›", span=_line_of(fn))
    return out, symbols


def _name_symbols(spec: TensorSpec, symbols: dict[Var, Size]) -> None:
    """Note the sizes of the symbols of an annotation; symbols that share a name get different ones."""
    for v in spec.shape:
        if isinstance(v, Var) and v not in symbols:
            taken = {str(s) for s in symbols.values()}
            name = next(n for k in range(len(taken) + 1) if (n := v.name + (f"_{k}" if k else "")) not in taken)
            symbols[v] = size_of(Var(name, v.dtype), {})


def _line_of(fn: Callable[..., Any]) -> Span | None:
    """The line of a function's `def`."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    at = code.co_firstlineno
    while not re.match(r"\s*(async\s+)?(def|lambda)\b", text := linecache.getline(code.co_filename, at)) and text:
        at += 1
    return Span(code.co_filename, at, len(text) - len(text.lstrip()), at, len(text.rstrip()), fn.__name__)


def traced(fn: Callable[..., Any], values: Mapping[str, Any], key: Any = None,
           symbols: Mapping[Var, Size] | None = None) -> Graph:
    """The graph of a function.

    values: parameter -> a Node of op input for a tensor, or any other value.  symbols: the sizes of T.dynamic symbols.
    """
    trace = Trace(getattr(fn, "__code__", None), symbols=symbols or {})
    with tracing(trace):
        out = called(fn, {k: Tensor(v, trace) if isinstance(v, Node) else v for k, v in values.items()}, key)
        single = not isinstance(out, (tuple, list))
        outputs = []
        for n, x in enumerate([out] if single else out):
            if not isinstance(x, (Tensor, bool, int, float)):
                where = "" if single else f" as result {n}"
                raise error("program-result", f"`{fn.__name__}` returns {described(x)}{where}", found=described(x) + where,
                            span=_line_of(fn))
            outputs.append(tensor(x).node)
        if not outputs:
            raise error("program-result", f"`{fn.__name__}` returns an empty tuple", found="no tensor", span=_line_of(fn))
    inputs = tuple(v for v in values.values() if isinstance(v, Node))
    return Graph(inputs, tuple(outputs), fn.__name__, single, tuple(dict.fromkeys(trace.guards))).shared()


def called(fn: Callable[..., Any], given: Mapping[str, Any], key: Any) -> Any:
    """Call a program's function while a trace runs.  Raises program-cycle, program-name for names that nothing has."""
    running = _RUNNING.get()
    if (fn, key) in running:
        raise error("program-cycle", f"`{fn.__name__}` calls itself with tensors of the same shapes",
                    found=f"a call of `{fn.__name__}` inside `{fn.__name__}`")
    token = _RUNNING.set((*running, (fn, key)))
    try:
        return fn(**given)
    except (NameError, AttributeError, TypeError, ValueError, IndexError, ArithmeticError) as e:
        raise _unknown_name(e) or _of_python(e, fn) or e from None
    except RecursionError as e:
        if isinstance(e, TileLangError):
            raise
        raise error("program-cycle", f"`{fn.__name__}` or a function that it calls calls itself without end",
                    found="calls deeper than Python allows", span=_line_of(fn)) from None
    finally:
        _RUNNING.reset(token)


def _place_of(e: BaseException) -> Span | None:
    """The last place in the user's code on the way to an error."""
    at = innermost(e, "tilelang")
    return None if at is None else span_of(at.tb_frame.f_code, at.tb_lasti, at.tb_lineno)


def _of_python(e: Exception, fn: Callable[..., Any]) -> TileLangError | None:
    """The error of what Python, or a function of kernels, cannot do; None for one that a user, or another package, raises."""
    at, last = innermost(e, "tilelang"), e.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if isinstance(e, TileLangError) or at is None or last is None or not (is_ours(e) or last is at):
        return None
    if is_ours(e) and isinstance(e, TypeError):
        return error("program-operand", str(e), found="a value or a function of kernels", span=_place_of(e),
                     hint="without a tensor, functions of T are those of kernels: write math.exp(2.0), or "
                          "T.exp(T.full((), 2.0))")
    if opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS":
        return None
    return error("program-python", f"{type(e).__name__} in `{fn.__name__}`: ‹{e}›", span=_place_of(e))


def _unknown_name(e: Exception) -> TileLangError | None:
    """The error of a name that Python, or a module of ours, does not know; None for errors that are not about one."""
    name, of = getattr(e, "name", None), getattr(e, "obj", None)
    if not isinstance(e, (NameError, AttributeError)) or isinstance(e, TileLangError) or name is None or (
            isinstance(e, AttributeError) and of is not language):
        return None
    known = [*FUNCTIONS, *(dir(language) if of is language else ())]
    near = difflib.get_close_matches(name, known, n=1)
    return error("program-name", f"`{name}` is not known" if of is None else f"tilelang.language has no `{name}`",
                 found=f"`{name}`", span=_place_of(e), hint=f"did you mean `T.{near[0]}`?" if near
                 else "define the name, or see the reference: whole-tensor programs")
