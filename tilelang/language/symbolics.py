"""Symbolic dimensions: T.dynamic (known at run time) and T.const (fixed in each compiled kernel)."""

from __future__ import annotations

import re
import warnings
from typing import Any

from tilelang.ir import Var, dtype as DType

from .tracing.builder import need_builder
from .tracing.state import error, example
from .tensor import dtype_of


def split_names(names: str) -> tuple[str, ...]:
    """The names of "m, n" or "m n"."""
    parts = tuple(p for p in re.split(r"[,\s]+", names.strip()) if p) if isinstance(names, str) else ()
    if not parts or not all(p.isidentifier() for p in parts):
        raise error("symbol-name", f"expected one or more names, got {names!r}")
    return parts


def _integer(dt: Any) -> DType:
    """The type of a dimension.  Raises symbol-name for types that are not integers."""
    out = dtype_of(dt, "a symbolic dimension")
    if not out.is_int or out.lanes != 1 or out.bits < 32:
        raise error("symbol-name", f"a dimension is counted in int32, int64, uint32 or uint64, found {out}",
                    "leave dtype out, or write \"int64\"", expected="an integer type of 32 or 64 bits")
    return out


@example('m, n = T.dynamic("m n")', 'P = T.Tensor((m, n), "float16")')
def dynamic(name: str, dtype: Any = "int32") -> Any:
    """Dimension(s) that are known at run time.  "m" gives a Var, "m, n" or "m n" a tuple.  Every call makes new symbols."""
    dt = _integer(dtype)
    out = tuple(Var(n, dt) for n in split_names(name))
    return out[0] if len(out) == 1 else out


@example('m = T.symbolic("m")')
def symbolic(name: str, dtype: Any = "int32") -> Any:
    """Deprecated spelling of T.dynamic."""
    warnings.warn("T.symbolic is deprecated, use T.dynamic", DeprecationWarning, stacklevel=2)
    return dynamic(name, dtype)


@example('M, N = T.const("M N")', 'A: T.Tensor((M, N), "float16")')
def const(name: str, dtype: Any = "int32") -> Any:
    """Dimension(s) of an eager kernel that are read from the tensors at the call and fixed in the compiled kernel."""
    b = need_builder("T.const")
    if b.eager is None:
        raise error("no-builder", "T.const can only be used in «a tilelang.jit function in the eager style»",
                    found="a T.prim_func", hint="use T.dynamic, or a Python parameter")
    out = tuple(b.eager.const(n, _integer(dtype)) for n in split_names(name))
    return out[0] if len(out) == 1 else out
