"""Layouts as text that reads back, inside printed programs.

    T.fragment((16, 8), "r2:2 t8:4 | t4:1 r2:1", "", 32)     digits (kind, size, stride) per dimension; copies; threads
    T.layout((128, 32), "_i _j", ("_i*32 + …",), 4096, (8, 4, 2, 64))      index code; elements; chunk swizzle
"""

from __future__ import annotations

from tilelang.ir import Var, register_literal, to_text
from tilelang.ir.parser import parse_expr

from .fragment import Fragment
from .layout import Layout, Swizzle
from .mode import ADDRESS, REGISTER, THREAD, Mode, Modes

_KINDS = {"t": THREAD, "r": REGISTER, "a": ADDRESS}


def _modes(modes: Modes) -> str:
    return " ".join(map(repr, modes))


def _read_modes(text: str) -> Modes:
    out = []
    for word in text.split():
        size, stride = word[1:].split(":")
        out.append(Mode(int(size), _KINDS[word[0]], int(stride)))
    return tuple(out)


def fragment_text(f: Fragment) -> str:
    """T.fragment(...), which `read_fragment` reads back."""
    return f'T.fragment({f.shape!r}, "{" | ".join(map(_modes, f.modes))}", "{_modes(f.copies)}", {f.threads})'


def read_fragment(shape: tuple[int, ...], modes: str, copies: str, threads: int) -> Fragment:
    """The Fragment of a printed text."""
    groups = modes.split("|") if shape else []
    return Fragment(shape, [_read_modes(g) for g in groups], replicate=_read_modes(copies), threads=threads)


def layout_text(lay: Layout) -> str:
    """T.layout(...), which `read_layout` reads back."""
    names = " ".join(v.name for v in lay.get_forward_vars())
    code = tuple(to_text(e) for e in lay.index)
    size = lay.size if len(code) == 1 else None
    swizzle = lay.swizzle and (lay.swizzle.chunk, lay.swizzle.chunks, lay.swizzle.rows_per_line, lay.swizzle.bytes)
    return f'T.layout({lay.shape!r}, "{names}", {code!r}, {size}, {swizzle})'


def read_layout(shape: tuple[int, ...], names: str, code: tuple[str, ...], size: int | None,
                swizzle: tuple[int, int, int, int] | None) -> Layout:
    """The Layout of a printed text."""
    def forward(*idx: Var) -> tuple[object, ...]:
        env = {n: v for n, v in zip(names.split(), idx)}
        return tuple(parse_expr(c, env) for c in code)

    return Layout(shape, forward, size=size, swizzle=None if swizzle is None else Swizzle(*swizzle),
                  trusted=size is not None)


Fragment.__tilelang_text__ = fragment_text  # type: ignore[attr-defined]
Layout.__tilelang_text__ = layout_text  # type: ignore[attr-defined]
register_literal("fragment", read_fragment)
register_literal("layout", read_layout)

__all__ = ["fragment_text", "layout_text", "read_fragment", "read_layout"]
