"""Intrinsics in CUDA text: the format string of an intrinsic's row, or a function for longer texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

from tilelang.ir import AddressOf, Call, Const, StringConst, dtype
from tilelang.target import INTRINSICS
from tilelang.target.device_functions import device_function
from tilelang.target.instructions import ATOMIC_DTYPES, call_fields

from .page import Expressions
from .text import POSTFIX, PREFIX, Text
from .types import is_small_float, type_name, unsupported
from .values import converted

_LANEWISE = ("abs", "popcount", "clz", "__ffs")  # of vectors: applied to each element


_OTHER_LIBRARIES = ("tl", "cute", "cutlass")
# Substring in the name of a function of other device libraries -> the operation of T to use instead.
_INSTEAD = {"fp8": 'T.cast(x, "float8_e4m3fn") or T.cast(x, "float8_e5m2")', "gemm": "T.gemm", "reduce": "T.reduce_sum, …",
            "atomic": "T.atomic_add, T.atomic_addx2, …", "tma": "T.tma_copy", "mbar": "T.mbarrier_wait_parity, …",
            "cp_async": "T.ptx_cp_async", "rasterization": "T.use_swizzle", "print": "T.print", "wgmma": "T.wgmma_gemm"}


class Calls:
    """Registers the text of calls. special: intrinsic -> function for its text; other printers add theirs.

    defined: names that the header and the user's source define.
    """

    def __init__(self, x: Expressions, defined: Container[str] = ()) -> None:
        self.x, self._defined = x, defined
        self.special: dict[str, Callable[[Call], Text]] = {
            "printf": self._printf, "thread_return": lambda e: ("return", POSTFIX), "call_extern": self._extern,
            "call_pure_extern": self._extern, "small_int_to_float": self._small_int}
        x.forms[Call] = self._call

    def _call(self, e: Call) -> Text:
        special = self.special.get(e.op)
        if special is not None:
            return special(e)
        row = INTRINSICS.get(e.op)
        if row is None or row.cuda is None:
            raise unsupported(f"the function `{e.op}`", e)
        args = [self.x.top(a) for a in e.args]
        dt = e.args[0].dtype if e.args else e.dtype
        if e.op.startswith("atomic_"):
            _check_atomic(e)
        if e.op in ("cp_async", "ldmatrix", "stmatrix", "mma") or dt.is_handle or "*" in row.cuda:
            text = row.cuda.get(dt.base, row.cuda.get("*", ""))
            if not text:
                raise unsupported(f"the function `{e.op}` on {dt}", e)
            if dt.lanes > 1 and e.op in _LANEWISE:
                return f"tl::map([](auto a) {{ return {text.format('a')}; }}, {args[0]})", POSTFIX
            fields = call_fields(e, args)
            fields["dtype"] = type_name(e.dtype) if e.dtype.kind != "v" else ""
            return text.format(*args, args=", ".join(args), **fields), POSTFIX
        return self._math_call(e, row, args, dt)

    def _math_call(self, e: Call, row: Any, args: list[str], dt: dtype) -> Text:
        """A float function: called on the type itself where the row has it, otherwise in float32 and rounded once."""
        fields = {} if e.options is None else {"rounding_mode": e.options.rounding_mode}
        base = "float32" if dt.base == "tfloat32" else dt.base
        through_float = base not in row.cuda and is_small_float(dt)
        text = row.cuda.get("float32" if through_float else base)
        if e.op == "pow" and isinstance(e.args[1], Const) and float(e.args[1].value) in (2.0, 3.0) and text is not None:
            text = f"tl::small_power<{int(e.args[1].value)}>({{0}})"
        if self.x.fast_math and row.fast and (through_float or base == "float32"):
            text = row.fast
        if text is None:
            raise unsupported(f"the function `{e.op}` on {dt}", e, "cast the argument to float32")
        if dt.lanes == 1:
            if through_float:
                args = [f"(float){_grouped(a)}" if x.dtype.is_float else a for a, x in zip(args, e.args)]
                inner = text.format(*args, **fields)
                return converted(e.dtype, inner) if e.dtype.is_float else (inner, POSTFIX)
            return text.format(*args, **fields), POSTFIX
        names = ["a", "b", "c"][:len(args)]
        inner = text.format(*(f"(float){n}" if through_float and x.dtype.is_float else n
                              for n, x in zip(names, e.args)), **fields)
        params = ", ".join(f"auto {n}" for n in names)
        result = converted(e.dtype.scalar, inner)[0]
        return f"tl::map([]({params}) {{ return {result}; }}, {', '.join(args)})", POSTFIX

    def _printf(self, e: Call) -> Text:
        args = [self.x.top(a) if isinstance(a, StringConst) or not is_small_float(a.dtype)
                else f"(float){self.x.at(a, PREFIX)}" for a in e.args]
        return f"printf({', '.join(args)})", POSTFIX

    def _extern(self, e: Call) -> Text:
        name, *args = e.args
        if not isinstance(name, StringConst):
            raise unsupported("call_extern without a name", e)
        library, _, function = name.value.rpartition("::")
        function = function.partition("<")[0]
        if library in _OTHER_LIBRARIES and function not in self._defined:
            raise unsupported(f"the function `{name.value}` of another device library", e, next(
                (f"use {ours}" for word, ours in _INSTEAD.items() if word in function.lower()),
                "define it in T.import_source, or use the operation of T that does the same"))
        text, form = f"{name.value}({', '.join(self.x.top(a) for a in args)})", device_function(e)
        if form is not None and e.dtype != form.result and not e.dtype.is_handle:  # the program gives the call another type
            return f"({type_name(e.dtype)}){text}", PREFIX
        return text, POSTFIX


    def _small_int(self, e: Call) -> Text:
        name = "half" if e.dtype.base == "float16" else "bfloat16"
        return f"tl::small_{name}<{e.options.low}>({self.x.top(e.args[0])})", POSTFIX


def _grouped(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+(\[[^\[\]]*\])?", text) else f"({text})"


def _check_atomic(e: Call) -> None:
    buffer = e.args[0].buffer if isinstance(e.args[0], AddressOf) else None
    if buffer is not None and buffer.dtype.base not in ATOMIC_DTYPES:
        raise unsupported(f"`{e.op}` on {buffer.dtype}", e, f"atomics exist for {', '.join(ATOMIC_DTYPES)}")
