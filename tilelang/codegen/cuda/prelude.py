"""The text in front of a kernel: headers of element types, the sections of prelude_*.cuh that it uses, wrappers of mma rows.

Each section starts with a line "//@ name" with the names it defines, and uses only earlier sections. Instructions: PTX ISA.

CUDA's headers of 16-bit float types take a compiler longer than the rest of a small kernel's text. A kernel that only moves
values of such a type, and never computes one, gets a two-byte type in its place.
"""

from __future__ import annotations

import os
import re
from functools import cache, lru_cache

from tilelang.target.instructions import function_name
from tilelang.target.mma import MMA_ROWS, MmaRow

from .hopper import hopper_function
from .page import Page
from .types import HALVES, HEADERS, TYPES

_PLAIN = {TYPES[base]: base for base in HALVES}
# Prefixes of names that the headers define: functions and types of these elements.
_FROM_HEADER = ("__h", "__nv_", "__bfloat16", "nv_bfloat", "hrcp", "hsqrt", "hrsqrt", "hexp", "hlog", "hsin", "hcos", "htanh",
                "hfloor", "hceil", "hrint", "htrunc")


def _is_from_header(word: str) -> bool:
    return word.startswith(_FROM_HEADER) or word == "half2" or (
        word.startswith("__") and ("2half" in word or "2bfloat16" in word))


def _header_of(word: str) -> str:
    """The element type whose header defines a function."""
    return "fp8_e4_t" if "fp8" in word else "bfloat16_t" if "bf" in word else "half_t"


def kernel_header(page: Page, body: str, injected: str, functions: str) -> str:
    """The text in front of a kernel. injected: the user's source. functions: definitions made for this kernel."""
    named = words_of(body)
    words = named | words_of(injected) | page.sections
    defined = device_header(words | words_of(functions)) + functions
    named |= words_of(defined)
    called = {_header_of(w) for w in named if _is_from_header(w) and f"{w}(" in body}
    out = _element_types(words | named | called, injected, named, page.worked_with)
    out.append("#define TL_DEVICE __device__ __forceinline__")
    if defined:
        out += ["namespace tl {", defined.rstrip(), "}  // namespace tl"]
    return "\n".join(out) + "\n\n"


def _element_types(words: set[str], injected: str, named: set[str], worked_with: set[str]) -> list[str]:
    """The headers and names of the element types among the words of a text. named: words of the compiler's own text."""
    used = [(name, *HEADERS[name]) for name in HEADERS if name in words and "cuda.h>" not in injected * (name == "CUtensorMap")]
    if not injected and not any(h == "cuda_fp8.h" for _, h, _ in used) and not any(
            map(_is_from_header, named)):
        used = [(name, "", f"struct {name} {{ unsigned short bits; }};") if _PLAIN.get(name, "") not in ("", *worked_with)
                else (name, h, t) for name, h, t in used]
    return [f"#include <{h}>" for h in dict.fromkeys(h for _, h, _ in used) if h] + [t for *_, t in used]


_WORD = re.compile(r"\w+")
_TO_SPACES = {n: " " for n in range(128) if not (chr(n).isalnum() or chr(n) == "_")}
# The sections that a section uses precede it.
_FILES = ("prelude_floats.cuh", "prelude_values.cuh", "prelude_memory.cuh", "prelude_threads.cuh")


def words_of(text: str) -> set[str]:
    """The words (names, numbers) of a text."""
    if text.isascii():  # takes a third of the time
        return set(text.translate(_TO_SPACES).split())
    return set(_WORD.findall(text))


@lru_cache(maxsize=1)
def sections() -> dict[str, str]:
    """The text of each section by name, in the order of the files: a section uses only earlier ones."""
    out: dict[str, str] = {}
    for name in _FILES:
        with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as f:
            parts = re.split(r"^//@ (\w+)\n", f.read(), flags=re.M)[1:]
        out.update((part, text.rstrip() + "\n") for part, text in zip(parts[::2], parts[1::2]))
    return out


@cache
def _used_by(name: str) -> list[str]:
    """The other sections that a section uses."""
    table = sections()
    return [w for w in words_of(table[name]) if w in table and w != name]


@lru_cache(maxsize=1)
def _rows_by_function() -> dict[str, MmaRow]:
    return {function_name(r): r for r in MMA_ROWS.values()}


def device_header(words: set[str]) -> str:
    """The definitions (inside namespace tl) of every prelude function among the words of a kernel's text."""
    table = sections()
    made = [text for w in sorted(words) if (text := hopper_function(w)) is not None]
    wanted: set[str] = set()
    todo = [w for w in words.union(*map(words_of, made)) if w in table]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo.extend(_used_by(name))
    out = [text for name, text in table.items() if name in wanted]
    out += [mma_wrapper(r) for f, r in _rows_by_function().items() if f in words]
    out += made
    return "".join(out)


def mma_wrapper(row: MmaRow) -> str:
    """The device function of a row. It takes pointers to the first register of c, a and b, which stay in registers once
    inlined."""
    na, nb, nc = row.registers
    wide = row.register_bits == 64
    float_c = row.c_dtype == "float32"
    c_kind = "+d" if wide else "+f" if float_c else "+r"
    c_register = "double" if wide else "float" if float_c else "unsigned"
    in_kind, in_register = ("d", "double") if wide else ("r", "unsigned")
    slots = [f"%{i}" for i in range(nc + na + nb)]
    c, a, b = slots[:nc], slots[nc:nc + na], slots[nc + na:]
    operands = ", ".join("{" + ", ".join(x) + "}" for x in (c, a, b, c))
    outputs = ", ".join(f'"{c_kind}"(C[{i}])' for i in range(nc))
    inputs = ", ".join([f'"{in_kind}"(A[{i}])' for i in range(na)] + [f'"{in_kind}"(B[{i}])' for i in range(nb)])
    ta, tb, tc = (TYPES[d.base] for d in (row.a_dtype, row.b_dtype, row.c_dtype))
    return (f"TL_DEVICE void {function_name(row)}({tc}* c, const {ta}* a, const {tb}* b) {{\n"
            f"  {c_register}* C = reinterpret_cast<{c_register}*>(c);\n"
            f"  const {in_register} *A = reinterpret_cast<const {in_register}*>(a), "
            f"*B = reinterpret_cast<const {in_register}*>(b);\n"
            f'  asm("{row.instruction}\\n"\n      " {operands};"\n      : {outputs}\n      : {inputs});\n}}\n')
