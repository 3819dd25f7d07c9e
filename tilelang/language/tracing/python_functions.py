"""What to write in place of a function of Python, math or NumPy that a kernel calls with a value it does not have yet."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import sys
from types import TracebackType
from typing import Any

import numpy as np

from tilelang.errors import positions
from tilelang.ir import Buffer, Node

from ..unavailable import UNAVAILABLE
from .regions import BufferSlice

_MODULES = ("builtins", "math", "numpy", "statistics", "torch")
_REDUCED = {"max": "max", "min": "min", "amax": "max", "amin": "min", "sum": "sum", "fsum": "sum", "mean": "sum"}
_INSTEAD = {name: write for names, write in (
    ("absolute", "T.abs(x)"), ("rint around", "T.round(x)"), ("power float_power", "T.pow(x, y)"), ("square", "x * x"),
    ("max maximum fmax amax", "T.max(x, y)"), ("min minimum fmin amin", "T.min(x, y)"), ("clip", "T.clamp(x, low, high)"),
    ("int", 'T.cast(x, "int32")'), ("float", 'T.cast(x, "float32")'), ("bool", "x != 0"), ("divmod", "x // y and x % y"),
    ("remainder", "x % y"), ("expm1", "T.exp(x) - 1"), ("where", "T.if_then_else(condition, x, y)"),
    ("dot matmul", "T.gemm(A_shared, B_shared, accumulator)"), ("range arange", "for i in T.serial(n)"),
    ("any all", "x or y, x and y; T.any_of and T.all_of for a buffer"), ("sorted", "T.min and T.max of pairs"),
    ("str repr ascii format hex oct bin chr ord", "T.print(x), which prints it while the kernel runs"),
    ("zeros ones empty full", "T.alloc_fragment(shape, dtype) of sizes known while tracing")) for name in names.split()}


def instead(e: BaseException) -> str:
    """The hint for an exception in a call of such a function, or of a function of T with a tile; "" for others."""
    trace = innermost(e, "tilelang", "numpy")
    tree, names = failing(trace) if trace is not None else (None, {})
    if not isinstance(tree, ast.Call) or not reads_values(tree, names):
        return ""
    function, owner = _value(tree.func, names), _value(getattr(tree.func, "value", tree), names)
    name, language = getattr(function, "__name__", ""), sys.modules["tilelang.language"]
    tile = any(isinstance(_value(a, names), Buffer) or any(isinstance(n, ast.Slice) for n in ast.walk(a)) for a in tree.args)
    if tile and function is getattr(language, name, None):
        if name in ("max", "min"):
            return (f"T.{name} takes two values: T.reduce_{name}(src, dst, dim=1) reduces a tile, and T.{name}(a[i], b[i]) in "
                    "T.Parallel takes two elements")
        if "value" in str(e) and len(tree.args) == 1:
            return f"T.{name} takes a value: for i in T.Parallel(n): dst[i] = T.{name}(src[i])"
    module = (getattr(function, "__module__", None) or getattr(owner, "__name__", None) or "").partition(".")[0]
    if (module not in _MODULES and not isinstance(function, np.ufunc)
            or module == "math" and not isinstance(e, TypeError)):  # of a number: "math domain error"
        return ""
    write, own = _INSTEAD.get(name, ""), name.replace("arc", "a")
    if name in _REDUCED and (tile or not write):
        write = f"T.reduce_{_REDUCED[name]}(src, dst, dim) of a tile" + ", then divide" * (name == "mean")
    elif isinstance(function, type) and issubclass(function, np.generic):
        write = f'T.cast(x, "{name}")'
    elif not write and callable(getattr(language, own, None)) and own not in UNAVAILABLE:
        parameters = inspect.signature(getattr(language, own)).parameters.values()
        write = f"T.{own}({', '.join(p.name for p in parameters if p.default is p.empty)})"
    return f"write {write}: {ast.unparse(tree.func)} needs values while tracing" if write else ""


def innermost(e: BaseException, *others: str) -> TracebackType | None:
    """The innermost frame of a trace outside of Python's library and of these packages: the code that called them."""
    found, trace = None, e.__traceback__
    while trace is not None:
        module = (trace.tb_frame.f_globals.get("__name__") or "").partition(".")[0]
        if module not in others and module not in sys.stdlib_module_names:
            found = trace
        trace = trace.tb_next
    return found


def failing(trace: TracebackType) -> tuple[Any, dict[str, Any]]:
    """The syntax tree of the expression that failed in a frame, None for a statement, and the values of names there."""
    frame = trace.tb_frame
    place = positions(frame.f_code, trace.tb_lasti)
    tree = expression(frame.f_code.co_filename, *place) if place is not None else None
    return tree, {**vars(builtins), **frame.f_globals, **frame.f_locals}


def reads_values(tree: Any, names: dict[str, Any]) -> bool:
    """Whether an expression names a value or a buffer of the kernel."""
    read = [names.get(n.id) for n in ast.walk(tree) if isinstance(n, ast.Name)]
    return any(isinstance(v, (Node, BufferSlice)) or hasattr(v, "__tilelang_expr__") for v in read)


def _value(node: Any, names: dict[str, Any]) -> Any:
    """The value of a name, or of an attribute of one; None for other expressions."""
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


def expression(file: str, line: int, end_line: int, col: int, end_col: int) -> Any:
    """The syntax tree of the expression at a place of a file; None for statements.  Columns count bytes."""
    lines = [text.encode() for text in linecache.getlines(file)[line - 1:end_line]] or [b""]
    lines[-1] = lines[-1][:end_col]
    try:
        return ast.parse(b"".join([lines[0][col:], *lines[1:]]).strip(), mode="eval").body
    except SyntaxError:
        return None
