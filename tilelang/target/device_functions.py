"""Maps CUDA library functions called through T.call_extern to the intrinsics that print as these functions.

Backends without a device compiler execute them by the NumPy function of the intrinsic.  A name that the source of the launch
itself defines is not mapped, because only the device compiler knows that definition.
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
    """CUDA function name -> (intrinsic, type of its operands)."""
    out: dict[str, tuple[str, str]] = {}
    for row in INTRINSICS.values():
        if row.effect != PURE or row.reference is None or row.name in CALL_OPTIONS:
            continue
        for kind, text in (row.cuda or {}).items():
            found = _PLAIN.fullmatch(text)
            if found and kind in ("float32", "float64") and row.result == "same":
                out.setdefault(found[1], (row.name, kind))
    return out


def known_function(e: Call, sources: tuple[str, ...] = ()) -> Call | None:
    """The intrinsic call that is equivalent to an extern call of a CUDA function; None for other functions.

    sources: texts that the launch prints before its kernel.  None also if the types of the operands differ from the function's.
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
