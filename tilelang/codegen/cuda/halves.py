"""Elements of 16-bit float types in CUDA text: packing them in pairs, and kernels that only move them.

CUDA's headers of these types take a compiler longer than all the rest of a small kernel's text.  A kernel that never works
with a value of the type, only with where it lies, gets a type of two bytes in its place.
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import Call, Cast, Const, Expr, For, Load, Store, const, dtype, free_vars, is_const, stmts_of, substitute

from ..c_like import Text
from .types import HALVES, HEADERS, TYPES

PLAIN = {TYPES[base]: base for base in HALVES}
# How many integers from a power of two on have bits that count up: 2 to the bits of the significand.
_COUNTING = {"float16": 1024, "bfloat16": 128}
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

    def packed_floats(self: Any, s: Store) -> str | None:
        """Address of the floats whose halves a store puts into registers, in whole pairs; None for other stores."""
        v: Any = s.value
        if not _floats_to_halves(s) or v.dtype.lanes % 2 or not self._as_declared(s):
            return None
        at, base = self._vector_base(s.indices, s.buffer), self._vector_base(v.value.indices, v.value.buffer)
        even = at is not None and self.flat_index(s.buffer, at)
        if base is None or not isinstance(even, Const) or even.value % 2:
            return None
        return self.address(v.value.buffer, base)

    def packed_loop(self: Any, s: For) -> str | None:
        """Text of a loop over neighbouring registers that makes halves of floats, in whole pairs; None for other loops."""
        body = stmts_of(s.body) or (s.body,)
        if s.kind != "unroll" or len(body) != 1 or not isinstance(body[0], Store) or not is_const(s.start, 0):
            return None
        store, n = body[0], s.extent
        if not isinstance(n, Const) or n.value % 2 or not _floats_to_halves(store) or not self._as_declared(store):
            return None
        v: Any = store.value
        first: list[str] = []
        for access, step in ((store, 2), (v.value, 1)):  # pairs of halves start at even registers
            if len(access.indices) != 1 or access.indices[0].dtype.lanes > 1:
                return None
            form = self.facts.linear(self.flat_index(access.buffer, access.indices))
            rest = {a: k for a, k in form.terms.items() if a is not s.var}
            if form.terms.get(s.var) != 1 or any(x % step for x in (form.const, *rest.values())) or any(
                    s.var in free_vars(a) for a in rest):
                return None
            begin = substitute(access.indices[0], {s.var: const(0, s.var.dtype)})
            first.append(self.address(access.buffer, (self.facts.simplify(begin),)))
        return self.packing(v.dtype, n.value, *first)

    def few_values(self: Any, base: str, e: Expr) -> str:
        """Text that makes a half of an integer with few values by its bits; "" for others, and for what was loaded as it is,
        for which one instruction converts it.

        A logical operation and half of a packed subtraction stand for a conversion, of which Ampere does a quarter as many a
        cycle, and for half of a packing.
        """
        most = _COUNTING.get(base, 0)
        low, high = self.facts.interval(e)
        if isinstance(e.value if isinstance(e, Cast) else e, (Load, Const)) or low is None or high is None or low <= -most or (
                high - min(low, 0) >= most):
            return ""
        return f"tl::small_{'half' if base == 'float16' else 'bfloat16'}<{min(low, 0)}>({self.top(e)})"

    def packing(self, dt: dtype, count: int, to: str, floats: str) -> str:
        """Statement that makes `count` floats in registers to halves in registers."""
        return f"tl::{'pack_half' if dt.base == 'float16' else 'pack_bfloat16'}<{count}>({to}, {floats});"

    def _as_declared(self: Any, s: Store) -> bool:
        """Whether both storages of a conversion are used under their own types: of what alignment is another view?"""
        v: Any = s.value
        return all(self.storage.get(b.data) == b.dtype for b in (s.buffer, v.value.buffer))


def _floats_to_halves(s: Store) -> bool:
    """Whether a store converts floats in registers to halves in registers."""
    v = s.value
    return (isinstance(v, Cast) and isinstance(v.value, Load) and v.dtype.base in HALVES and v.value.dtype.base == "float32"
            and {s.buffer.scope_name, v.value.buffer.scope_name} == {"local"})
