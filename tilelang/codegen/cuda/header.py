"""The text in front of a kernel: headers of element types, and the prelude functions that it uses.

CUDA's headers of 16-bit float types take a compiler longer than the rest of a small kernel's text. A kernel that only moves
values of such a type, and never computes one, gets a two-byte type in its place.
"""

from __future__ import annotations

from .page import Page
from .prelude import device_header, words_of
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
