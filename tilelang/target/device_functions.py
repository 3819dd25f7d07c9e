"""Functions of CUDA's own library by the names that T.call_extern gives: the intrinsics whose text they are.

Executions that have no device compiler run them by the meaning of the intrinsic's row.  A name that the launch's own source
defines means what it says there, which only the device compiler knows.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tilelang.ir import CALL_OPTIONS, Call, StringConst, call, dtype

from .intrinsics import INTRINSICS, PURE

EXTERNS = ("call_extern", "call_pure_extern")
_PLAIN = re.compile(r"(\w+)\(\{0\}(?:, \{\d\})*\)")


@lru_cache(maxsize=1)
def _known() -> dict[str, tuple[str, str]]:
    """name: (intrinsic, type of its operands)."""
    out: dict[str, tuple[str, str]] = {}
    for row in INTRINSICS.values():
        if row.effect != PURE or row.meaning is None or row.name in CALL_OPTIONS:
            continue
        for kind, text in (row.cuda or {}).items():
            found = _PLAIN.fullmatch(text)
            if found and kind in ("float32", "float64") and row.result == "same":
                out.setdefault(found[1], (row.name, kind))
    return out


def known_function(e: Call, sources: tuple[str, ...] = ()) -> Call | None:
    """The intrinsic that an extern call of a function of CUDA's is; None for others.

    sources: what the launch puts ahead of its kernel.  Operands of other types than the function's are left to the compiler.
    """
    if e.op not in EXTERNS or not e.args or not isinstance(e.args[0], StringConst):
        return None
    name, *args = e.args
    assert isinstance(name, StringConst), "looked at above"
    got = _known().get(name.value)
    if got is None or any(name.value in s for s in sources):
        return None
    op, kind = got
    if e.dtype != dtype(kind) or len(args) != INTRINSICS[op].arity or any(a.dtype != e.dtype for a in args):
        return None
    return call(op, tuple(args), e.dtype, span=e.span)


__all__ = ["EXTERNS", "known_function"]
