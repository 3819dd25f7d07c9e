"""Elements of 16-bit float types in CUDA text: packing them in pairs, and kernels that only move them.

CUDA's headers of these types take a compiler longer than all the rest of a small kernel's text.  A kernel that never works
with a value of the type, only with where it lies, gets a type of two bytes in its place.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Binary, Broadcast, Call, Expr, Load, Store, dtype

from ..c_like import POSTFIX, Text
from .types import HALVES, HEADERS, TYPES

PLAIN = {TYPES[base]: base for base in HALVES}
# Beginnings of names that the headers define: functions and types of these elements.
_FROM_HEADER = ("__h", "__nv_", "__bfloat16", "nv_bfloat", "hrcp", "hsqrt", "hrsqrt", "hexp", "hlog", "hsin", "hcos", "htanh",
                "hfloor", "hceil", "hrint", "htrunc")


def _is_from_header(word: str) -> bool:
    return word.startswith(_FROM_HEADER) or word == "half2" or (
        word.startswith("__") and ("2half" in word or "2bfloat16" in word))


class Halves:
    """Part of CudaPrinter.  valued: 16-bit float types of which some value is worked with."""

    valued: set[str]

    def expr(self: Any, e: Expr) -> Text:
        """Text of an expression; one of a 16-bit float type needs the type's own header."""
        if e.dtype.base in HALVES:
            self.valued.add(e.dtype.base)
        elif isinstance(e, Call) and e.op == "call_extern":
            self.valued.update(HALVES)  # what the user's function is and takes is not known
        return super().expr(e)  # type: ignore[misc]

    def headers(self, words: set[str], injected: str, named: set[str]) -> list[str]:
        """Lines in front of the text: headers and names of the element types among its words.  named: words of our own text."""
        used = [(name, *HEADERS[name]) for name in HEADERS if name in words]
        if not injected and not any(h == "cuda_fp8.h" for _, h, _ in used) and not any(
                map(_is_from_header, named)):
            used = [(name, "", f"struct {name} {{ unsigned short bits; }};") if PLAIN.get(name, "") not in ("", *self.valued)
                    else (name, h, t) for name, h, t in used]
        return [f"#include <{h}>" for h in dict.fromkeys(h for _, h, _ in used) if h] + [t for *_, t in used]

    def moved(self: Any, s: Store) -> str | None:
        """The element that a store copies from elsewhere as it is; None for other stores."""
        v = s.value
        if not isinstance(v, Load) or v.dtype.base not in HALVES or v.dtype.lanes > 1 or v.dtype != s.buffer.dtype:
            return None
        return self._element(v.buffer, v.indices)

    def pair(self: Any, e: Expr) -> str:
        """Text of a pair of float16: weights of one byte, times factors that both have."""
        if isinstance(e, Binary):
            return f"__hmul2({self.pair(e.a)}, {self.pair(e.b)})"
        if isinstance(e, Broadcast):
            return f"__half2half2({self.top(e.value)})"
        byte, *zero_point = e.args  # type: ignore[attr-defined]
        zero = "".join(f", tl::small_half<0>({self.top(x)})" for x in zero_point)
        o = e.options  # type: ignore[attr-defined]
        return f"tl::coded_pair<{o.low}, {o.high}, {o.mask}>({self.top(byte)}{zero})"

    def _call_small_int_to_float(self: Any, e: Call) -> Text:
        name = "half" if e.dtype.base == "float16" else "bfloat16"
        return f"tl::small_{name}<{e.options.low}>({self.top(e.args[0])})", POSTFIX

    def packing(self, dt: dtype, count: int, to: str, floats: str) -> str:
        """Statement that makes `count` floats in registers to halves in registers."""
        return f"tl::{'pack_half' if dt.base == 'float16' else 'pack_bfloat16'}<{count}>({to}, {floats});"
