"""Parses layouts in the text of printed programs.

    T.fragment((16, 8), "r2:2 t8:4 | t4:1 r2:1", "", 32)     digits (kind, size, stride) per dimension; copies; threads
    T.layout((128, 32), "_i _j", ("_i*32 + …",), 4096, (8, 4, 2, 64))      index code; elements; chunk swizzle
"""

from __future__ import annotations

from tilelang.ir import Var, register_literal

from .fragment import Fragment
from .layout import Layout, Swizzle
from .mode import ADDRESS, REGISTER, THREAD, Mode, Modes

_KINDS = {"t": THREAD, "r": REGISTER, "a": ADDRESS}


def _read_modes(text: str) -> Modes:
    out = []
    for word in text.split():
        size, stride = word[1:].split(":")
        out.append(Mode(int(size), _KINDS[word[0]], int(stride)))
    return tuple(out)


def read_fragment(shape: tuple[int, ...], modes: str, copies: str, threads: int) -> Fragment:
    """The Fragment of the arguments of a printed T.fragment(...)."""
    groups = modes.split("|") if shape else []
    return Fragment(shape, [_read_modes(g) for g in groups], replicate=_read_modes(copies), threads=threads)


def read_layout(shape: tuple[int, ...], names: str, code: tuple[str, ...], size: int | None,
                swizzle: tuple[int, int, int, int] | None) -> Layout:
    """The Layout of the arguments of a printed T.layout(...)."""
    from tilelang.ir.parser import parse_expr  # 5 ms

    def forward(*idx: Var) -> tuple[object, ...]:
        env = {n: v for n, v in zip(names.split(), idx)}
        return tuple(parse_expr(c, env) for c in code)

    return Layout(shape, forward, size=size, swizzle=None if swizzle is None else Swizzle(*swizzle),
                  trusted=size is not None)


register_literal("fragment", read_fragment)
register_literal("layout", read_layout)
