"""Converts exceptions of Python and of lower modules during tracing to errors of a kind at the user's line."""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from tilelang import errors
from tilelang.ir import Expr, Node, Span

from .builder import Builder
from .python_functions import expression, failing, innermost, instead, reads_values
from .regions import BufferSlice
from .state import positions, span_of

_PLACED: tuple[tuple[type[Exception], str], ...] = (
    (errors.InternalError, ""), (NotImplementedError, ""), (RecursionError, ""), (OverflowError, "overflow"),
    (ZeroDivisionError, "division-by-zero"), (TypeError, "type"), (ValueError, "value"), (AttributeError, "attribute"),
    (RuntimeError, "operation"), (NameError, "undefined-name"))
_DEEP = 16  # nested macros from which on a RecursionError is attributed to them
_FAULTS = (LookupError, NameError, RecursionError)  # faults of this package, not mistakes of the user
errors.register("host-index", TypeError, "an array, list or dict of the host is indexed by a value of the kernel",
                expected="a tensor of the kernel")
errors.register("undefined-name", NameError, "a kernel function uses a name that is not defined where it is traced",
                "define it before the kernel function, or give it as a parameter",
                expected="a name that is defined where the function is traced")

# Replacements for Python functions that need the values of their arguments while tracing.
_ELEMENTS = "a buffer has no arithmetic, its elements do: for i in T.Parallel(n): s[i] = s[i] * 2"
_HOST = "pass the array to the kernel, as a parameter `name: T.Tensor(shape, dtype)`; one of its elements is a number"
_INSTEAD = (
    ("Cannot use and / or / not operator to Expr", "functions of Python need values while tracing: use T.min, T.max, "
     "T.if_then_else; `if` and `while` of a kernel function take run-time conditions"),
    ("`**` is not defined", 'write x * x, or T.pow(x, y), of an integer T.pow(T.cast(x, "float32"), y); a T.const is a plain '
     "number after the first T.Kernel"),
    ("a Python number is needed here", "functions of Python and its libraries need values while tracing: use T.cast(x, dtype), "
     "or the function of that name in T, such as T.sqrt"),
    ("loop of ufunc", "NumPy's functions need values while tracing: use the function of that name in T, such as T.exp"),
    (" @: ", "write T.gemm(A_shared, B_shared, accumulator)"),
    ("'Buffer' and ", _ELEMENTS), (" and 'Buffer'", _ELEMENTS), ("a Buffer cannot", _ELEMENTS),
    ("object is not callable", "an element is read by brackets: X[i]; functions and macros are called"),
    ("is not subscriptable", "buffers have elements; a scalar, and a T.alloc_var, is read by its name, without [0]"),
    ("has no len()", "a buffer has a shape, A.shape[0]; an element is one value"),
    ("run-time value and cannot be iterated", 'it is one value: one name takes it; T.const("M N") gives two'),
    ("cannot be iterated", "loop over its indices, `for i in T.serial(n)`, or reduce a tile: T.reduce_sum(src, dst, dim)"),
    ("__format__", "an f-string is made while tracing: T.print(x) prints values while the kernel runs"),
    ("a ndarray cannot", _HOST), ("a Tensor cannot", _HOST),
    ("and the other operand is", 'cast the signed operand: T.cast(x, "uint64")'),
    ("cannot become an array", "use the operations of T on its elements: for i in T.Parallel(n)"),
    ("a complex cannot", "a kernel has real numbers: pass the real and the imaginary part"),
    ("a tuple cannot", "take one of its elements"), ("a list cannot", "take one of its elements"),
    ("the string", "write a number or an expression"),
)
# Names of other languages -> what is written here, by the owner of the name.
_FOREIGN = {
    "T": {"zeros": "T.alloc_fragment(shape, dtype) and T.clear(it)",
          "full": "T.alloc_fragment(shape, dtype) and T.fill(it, value)",
          "load": "T.copy(A[i, j], tile), or an element A[i, j]", "store": "T.copy(tile, A[i, j]), or A[i, j] = value",
          "program_id": "with T.Kernel(blocks, threads=128) as bx", "num_programs": "the extents given to T.Kernel",
          "dot": "T.gemm(A_shared, B_shared, accumulator)", "matmul": "T.gemm(A_shared, B_shared, accumulator)",
          "mma": "T.gemm(A_shared, B_shared, accumulator)", "arange": "for i in T.Parallel(n)",
          "sum": "T.reduce_sum(src, dst, dim)", "syncthreads": "T.sync_threads()",
          "barrier": "T.sync_threads(), or T.alloc_barrier for an mbarrier", "shared": "T.alloc_shared(shape, dtype)",
          "constexpr": "a Python parameter of the @tilelang.jit function, or T.const", "relu": "T.max(x, 0)",
          "parallel": "T.Parallel(n)", "pipelined": "T.Pipelined(n, num_stages=2)", "range": "T.serial(n)",
          "softmax": "T.reduce_max, T.exp and T.reduce_sum on a fragment", "maximum": "T.max(a, b)", "minimum": "T.min(a, b)",
          "atomicAdd": "T.atomic_add(dst, value)", "printf": "T.print(x)", "threadIdx": "T.get_thread_binding()",
          "blockIdx": "with T.Kernel(blocks, threads=128) as bx", "tensor": "T.Tensor((m, n), dtype)",
          "mean": "T.reduce_sum(src, dst, dim), then divide", "any": "T.any_of(buffer)", "all": "T.all_of(buffer)",
          "sign": "T.if_then_else(x < 0, -1.0, 1.0)", "clip": "T.clamp(x, low, high)"},
    "Expr": {"item": "its name: an element is a value of the kernel", "to": "T.cast(x, dtype)", "float": 'T.cast(x, "float32")',
             "int": 'T.cast(x, "int32")', "half": 'T.cast(x, "float16")', "type": "T.cast(x, dtype)"},
    "Buffer": {"T": "T.transpose(src, dst), or transpose_A=True of T.gemm", "sum": "T.reduce_sum(src, dst, dim)",
               "max": "T.reduce_max(src, dst, dim)", "min": "T.reduce_min(src, dst, dim)", "exp": "T.exp of its elements",
               "mean": "T.reduce_sum(src, dst, dim), then divide", "view": "T.view(buffer, shape, dtype)",
               "reshape": "T.reshape(buffer, shape)", "to": "T.copy into a buffer of the other type",
               "fill": "T.fill(buffer, value)",
               "astype": "T.copy into a buffer of the other type", "float": "T.copy into a buffer of the other type",
               "zero_": "T.clear(buffer)", "copy": "T.copy(src, dst)", "size": "its shape: A.shape[0] * A.shape[1]",
               "ndim": "len(A.shape)", "abs": "T.abs of its elements", "clone": "T.copy into another buffer"},
}


def place_error(b: Builder, e: Exception) -> Exception | None:
    """Convert an error that was raised inside the language, not by the user's Python code.

    Returns an error with the user's location, or an InternalError with its report for a fault of this package.  None if the
    exception stays unchanged."""
    last = innermost(e, "numpy")
    module = last.tb_frame.f_globals.get("__name__", "") if last is not None else ""
    ours = module.startswith("tilelang.") or isinstance(getattr(e, "obj", None), (Node, BufferSlice))
    here = last is not None and _is_own(b, last)
    if isinstance(e, RecursionError) and len(b.contexts) > _DEEP:
        outermost, call = b.contexts[1]
        return errors.error("macro-recursion", "a macro called here calls itself until Python's stack is full",
                            found="a call inside every call", span=outermost.span(call))
    if module.startswith("tilelang.") and isinstance(e, _FAULTS):
        return _host_index(b, e) or _internal(b, e)
    if here and isinstance(e, KeyError) and e.args and isinstance(e.args[0], Node):
        return errors.error("type", f"‹`{e.args[0]!r}`› is no key of a Python dict: its value is known only when the kernel "
                            "runs", expected="a key known while tracing", span=refine(b, e),
                            hint="choose by T.if_then_else, or keep the table in a tensor")
    made = _host_index(b, e) or _in_helper(b, e)
    if made is not None:
        return made
    for cls, kind in _PLACED:
        if isinstance(e, cls):
            python = instead(e)
            if not kind:
                return None
            if not ours and not python and not (here and isinstance(e, (TypeError, NameError))):
                break
            call = " argument" in str(e) and not isinstance(e, AttributeError)
            hint = python or next((h for part, h in _INSTEAD if part in str(e)), "") or (
                _parameters(e) if call else _meant(e))
            expected, found = getattr(e, "facts", None) or _facts(e)
            text = str(e).replace("__tl_factory.<locals>.__tl_", "")  # of the rewritten function around one of the program
            return errors.error(kind, text, expected=expected, found=found, span=refine(b, e), hint=hint)
    return None if ours else _of_python(b, e)


def _kernel_frame(b: Builder, e: BaseException) -> Any:
    """The frame of the kernel function in the trace of an exception."""
    trace = e.__traceback__
    while trace is not None and trace.tb_frame.f_code is not b.ctx.code:
        trace = trace.tb_next
    return trace.tb_frame if trace is not None else None


def _host_index(b: Builder, e: Exception) -> Exception | None:
    """The error of a Python sequence, dict or array of the host that is indexed by a value of the kernel."""
    if not isinstance(e, (IndexError, TypeError, KeyError)):
        return None
    span, frame = refine(b, e), _kernel_frame(b, e)
    if span is None or frame is None:
        return None
    tree = expression(span.file, span.line, span.end_line or span.line, span.col, span.end_col)
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        return None
    name = tree.value.id
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    if value is None or isinstance(value, (Node, BufferSlice)) or not hasattr(value, "__getitem__"):
        return None
    index = ast.unparse(tree.slice)
    if _is_known(tree.slice, frame):
        return errors.error("container-key", f"{type(e).__name__}: {e}", found=index, span=span)
    return errors.error("host-index", f"`{name}` is a {type(value).__name__} of the host, and `{index}` is known only when the "
                        "kernel runs", expected="a tensor of the kernel, or an index known while tracing",
                        found=f"{name}[{index}]", span=span, hint=f"pass it as a parameter: `{name}: T.Tensor(shape, dtype)`")


def _is_known(index: ast.expr, frame: Any) -> bool:
    """Whether the value of an index is known while tracing; only plain names and arithmetic are looked at."""
    plain = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context)
    if not all(isinstance(n, plain) for n in ast.walk(index)):
        return False
    values = {n.id: frame.f_locals.get(n.id, frame.f_globals.get(n.id)) for n in ast.walk(index) if isinstance(n, ast.Name)}
    return all(v is not None and isinstance(v, (bool, int, float, str)) for v in values.values())


def _in_helper(b: Builder, e: Exception) -> Exception | None:
    """The error of a truth value taken in a Python function that a kernel calls: shown in the function."""
    at = innermost(e, "tilelang", "numpy")
    if at is None or _is_own(b, at) or not isinstance(e, ValueError) or _INSTEAD[0][0] not in str(e):
        return None
    expected, found = getattr(e, "facts", None) or _facts(e)
    return errors.error("value", str(e), expected=expected, found=found, **_shown(b, e, at),
                        hint=instead(e) or f"decorate `{at.tb_frame.f_code.co_name}` with @T.macro: its `if`, `and`, `or`, "
                        "`not` take run-time values then; or use T.if_then_else")


def _of_python(b: Builder, e: Exception) -> Exception | None:
    """The error of an operation of Python or a library that takes no value of a kernel, at the user's expression."""
    at = innermost(e, "tilelang", "numpy")
    tree, names = failing(at) if at is not None else (None, {})
    if at is None or tree is None or not reads_values(tree, names) or _ARITY.search(str(e)):
        return None
    return errors.error("python-question", f"`{ast.unparse(tree)}` is evaluated while tracing, and only the kernel knows its "
                        f"values: {e}", found=f"{type(e).__name__}: {e}", **_shown(b, e, at),
                        hint=instead(e) or next((h for part, h in _INSTEAD if part in str(e)), "") or
                        "use the functions of T on values of the kernel")


def _is_own(b: Builder, at: TracebackType) -> bool:
    """Whether a frame is that of the kernel function or macro being traced, or of a comprehension in it."""
    return bool(b.ctx.owns(at.tb_frame.f_code))


def _shown(b: Builder, e: Exception, at: TracebackType) -> dict[str, Any]:
    """The place of an error in a frame, and where the kernel calls that function."""
    if _is_own(b, at):
        return {"span": refine(b, e)}
    inner = span_of(at.tb_frame.f_code, at.tb_lasti, at.tb_lineno)
    return {"span": inner, "notes": ((refine(b, e), "called here"),)}


def _internal(b: Builder, e: Exception) -> errors.InternalError:
    """The InternalError for a fault of this package while tracing; its report holds the trace and the function's source."""
    import tempfile  # 3 ms

    folder = Path(tempfile.mkdtemp(prefix="tilelang-trace-"))
    (folder / "error.txt").write_text("".join(traceback.format_exception(e)), encoding="utf-8")
    (folder / "source.py").write_text("".join(linecache.getlines(b.ctx.file)), encoding="utf-8")
    said = (str(e).splitlines() or [""])[0][:200]
    return errors.InternalError(f"tracing `{b.ctx.function}` failed at {b.span()}: {type(e).__name__}: {said}\n"
                                f"report: {folder}")


_ARITY = re.compile(r"takes .* argument|missing \d+ required|unexpected keyword|multiple values for")
_FOUND = re.compile(r"(?:unsupported operand type\(s\) for [^:]+: | found | got |: )(.+)$", re.S)


def _facts(e: Exception) -> tuple[str, str]:
    """(expected, found) taken from a Python exception; expected "" means that of the kind."""
    text = str(e)
    if isinstance(e, AttributeError) and e.name:
        return f"an attribute of {_owner(e.obj)}", f".{e.name}"
    if isinstance(e, NameError) and e.name:
        return "", e.name
    if " argument" in text and "(" in text:
        shown = _parameters(e)
        return (shown[shown.find("T."):] if "T." in shown else "arguments that the function takes",
                text.partition(") ")[2] or text)
    m = _FOUND.search(text)
    return "", m[1] if m else text


_ALSO = {"axis": "dim", "trans_a": "transpose_A", "trans_b": "transpose_B", "stages": "num_stages"}  # other languages' keywords


def _parameters(e: Exception) -> str:
    """A hint with the parameters of the function of T whose call has wrong arguments."""
    name = str(e).partition("(")[0]
    found = getattr(sys.modules["tilelang.language"], name, None) if name.isidentifier() else None
    try:
        shown = errors.bare(inspect.signature(found))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "see help() of the function for its parameters"
    given = re.search(r"unexpected keyword argument '(\w+)'", str(e))
    meant = given and _ALSO.get(given[1], given[1])
    near = difflib.get_close_matches(meant, inspect.signature(found).parameters, n=1) if meant and found else []
    return (f"did you mean `{near[0]}`? " if near else "") + f"T.{name}{shown}"


def _meant(e: Exception) -> str:
    """A hint with the name most similar to an attribute that was not found."""
    if not isinstance(e, AttributeError) or not e.name:
        return ""
    owner = _owner(e.obj)
    foreign = _FOREIGN.get("Expr" if isinstance(e.obj, Expr) else owner, {})
    if e.name in foreign:
        return f"write {foreign[e.name]}"
    names = {*dir(e.obj)} & {*getattr(e.obj, "__all__", dir(e.obj))}  # of a module: its names, but those that only raise
    known = {x.lower(): x for x in sorted(names, reverse=True) if not x.startswith("__")}
    if owner not in _FOREIGN and isinstance(e.obj, Node) and hasattr(sys.modules["tilelang.language"], e.name):
        return f"write T.{e.name}(x)"
    found = difflib.get_close_matches(e.name.lower(), known, n=3)
    return f"did you mean {' or '.join(f'{owner}.{known[x]}' for x in found)}?" if found else ""


def _owner(obj: Any) -> str:
    """The source text of the object whose attribute was not found."""
    name = obj.__name__.rpartition(".")[2] if isinstance(obj, ModuleType) else type(obj).__name__
    return "T" if name == "language" else name


def refine(b: Builder, e: BaseException) -> Span | None:
    """The span of the expression that raised, where Python records it; else that of its statement."""
    span, at, trace = b.span(), None, e.__traceback__
    while trace is not None:
        if _is_own(b, trace):
            at = positions(trace.tb_frame.f_code, trace.tb_lasti)
        trace = trace.tb_next
    if span is None or at is None or not span.line <= at[0] <= max(span.line, span.end_line):
        return span
    return replace(span, line=at[0], col=at[2], end_line=at[1], end_col=at[3])
