"""A lowered program: text, and the steps that run it.  By itself, so that what is found on disk runs without what lowers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tilelang.ir.parser import parse
from tilelang.language.tracing.prim_func import PrimFunc
from tilelang.language.tracing.source_text import from_source


@dataclass
class Recipe:
    """A lowered program, as JSON values.

    source: the text of a module of tile programs.  steps: (kernel, inputs, outputs), names of buffers.  inputs, outputs: of the
    program.  buffers: what kernels write -> (sizes as text, element type).  kernels: their IR as text, read faster than the
    source is traced; None before it is known.  groups: how many sets of kernels are planned by themselves.
    loops: steps that are loops, which the host walks, and the numbers of their nodes.
    """

    source: str
    steps: list[tuple[str, list[str], list[str]]]
    inputs: list[str]
    outputs: list[str]
    buffers: dict[str, tuple[list[str], str]]
    kernels: list[str] | None = None
    groups: int = 0
    loops: dict[str, Any] = field(default_factory=dict)

    def functions(self) -> tuple[PrimFunc, ...]:
        """The tile programs, in the order of the steps."""
        if self.kernels is not None:
            return tuple(map(_read, self.kernels))
        names = ", ".join(k for k, _, _ in self.steps if k not in self.loops)
        return tuple(from_source(f"{self.source}\n\nsteps_in_order = ({names},)\n", "steps_in_order")) if names else ()


def _read(text: str) -> PrimFunc:
    """The tile program of a text that it was printed as, which it keeps: keys of the cache contain it."""
    func = parse(text)
    object.__setattr__(func, "_text", text)
    return PrimFunc(func)
