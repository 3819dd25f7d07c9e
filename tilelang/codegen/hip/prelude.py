"""The text in front of a HIP kernel: element types, the sections of the prelude that it uses, wrappers of matrix instructions.

The shared prelude calls functions by the names that CUDA's headers give them; prelude_base.hip defines these by clang's
builtins, and the sections of prelude_own.hip take the place of those that hold PTX.  No header is read.
"""

from __future__ import annotations

import os
from functools import lru_cache

from tilelang.ir import dtype
from tilelang.target.instructions import function_name
from tilelang.target.mma import MmaRow

from ..device.page import Page
from ..device.prelude import FLOATS, THREADS, VALUES, needed, sections_of, words_of
from ..device.types import TYPES

_BASE, _OWN = (os.path.join(os.path.dirname(__file__), f"prelude_{name}.hip") for name in ("base", "own"))
_FILES = (_BASE, FLOATS, VALUES, THREADS, _OWN)
_ELEMENTS = {"half_t": "typedef _Float16 half_t;", "bfloat16_t": "typedef __bf16 bfloat16_t;"}
# Spellings of the source that users inject.
_WORDS = {"__device__": "__attribute__((device))", "__global__": "__attribute__((global))",
          "__shared__": "__attribute__((shared))", "__forceinline__": "inline __attribute__((always_inline))"}


def sections() -> dict[str, str]:
    """The text of each section by name."""
    return sections_of(_FILES)


@lru_cache(maxsize=1)
def available() -> frozenset[str]:
    """The sections without PTX: the functions that this target has."""
    return frozenset(name for name, text in sections().items() if "asm" not in words_of(text) or "v_cvt_" in text
                     or '"+v"' in text or 'asm volatile("" ::: "memory")' in text)


def kernel_header(page: Page, body: str, injected: str, rows: list[MmaRow]) -> str:
    """The text in front of a kernel.  injected: the user's source.  rows: the matrix instructions it uses."""
    words = words_of(body) | words_of(injected) | page.sections
    defined = "".join([*needed(_FILES, words, ordered=False), *map(mfma_wrapper, rows)])
    words |= words_of(defined)
    out = [text for name, text in _ELEMENTS.items() if name in words or "__h" in defined]
    out += [f"#define {name} {text}" for name, text in _WORDS.items() if name in words_of(injected)]
    out.append("#define TL_DEVICE inline __attribute__((device, always_inline))")
    if defined:
        out += ["namespace tl {", defined.rstrip(), "}  // namespace tl", "using namespace tl;"]
    return "\n".join(out) + "\n\n"


def _vector(dt: dtype, bits: int, builtin: str) -> tuple[str, int]:
    """(element, number) of the vector in which a builtin takes an operand of so many bits a lane."""
    if dt.bits <= 8:  # bytes come in words
        words = bits // 32
        return ("long", 1) if words == 2 else ("int", words)
    name = {"float16": "_Float16", "bfloat16": "short" if builtin.endswith("_1k") else "__bf16"}.get(dt.base, TYPES[dt.base])
    return name, bits // dt.bits


def mfma_wrapper(row: MmaRow) -> str:
    """The device function of a row.  It takes pointers to the first register of c, a and b, which stay in registers once
    inlined."""
    types, more = [], "0, 0, 0"
    if row.instruction.endswith("f8f6f4"):  # formats of a and b; byte 0 of a scale of 1 for each
        formats = ", ".join(str(int(dt == "float8_e5m2")) for dt in (row.a_dtype, row.b_dtype))
        more = f"{formats}, 0, 0x7f7f7f7f, 0, 0x7f7f7f7f"
    for letter, fragment, dt in (("A", row.a, row.a_dtype), ("B", row.b, row.b_dtype), ("C", row.c, row.c_dtype)):
        element, n = _vector(dt, fragment.registers * dt.bits, row.instruction)
        types.append(f"typedef {element} {letter}" + (f" __attribute__((ext_vector_type({n})))" if n > 1 else "") + ";")
    ta, tb, tc = (TYPES[d.base].removeprefix("tl::") for d in (row.a_dtype, row.b_dtype, row.c_dtype))
    return (f"TL_DEVICE void {function_name(row)}({tc}* c, const {ta}* a, const {tb}* b) {{\n  {' '.join(types)}\n"
            f"  *(C*)c = {row.instruction}(*(const A*)a, *(const B*)b, *(C*)c, {more});\n}}\n")
