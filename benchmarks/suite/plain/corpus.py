"""One plain program: how it is built, its tensors, its reference, what it moves and computes, and what it is compared with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Sizes = Mapping[str, Any]
Tensors = dict[str, Any]  # torch tensors by name


@dataclass(frozen=True)
class Spec:
    """A tensor parameter.  fill: "normal", "uniform" (0 to 1), "bytes" (all values), "zeros", or a function (torch, sizes,
    generator, device) -> tensor.  out: written by the program."""

    shape: tuple[int, ...]
    dtype: str = "float16"
    fill: Any = "normal"
    out: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Plain:
    """kind: rows of the table that are summed up together.  program(**sizes): a PrimFunc whose parameters are those of
    `tensors(**sizes)` in order.  reference(tensors, sizes): for each output (name, want, bound), float64 tensors.  full, small:
    sizes on a GPU and in a simulator.  flops: of a call.  moved: bytes read and written once, None for all tensors.

    best: what a good form of the work reaches: (name of its package, call of torch and the tensors), ("program", name of
    another one: its rate), ("copy",): the rate of a copy.  by: "flops" or "bytes", the rate that is compared.  binding: the
    limit that holds a row below 0.75, once it is known.
    """

    name: str
    kind: str
    program: Callable[..., Any]
    tensors: Callable[..., dict[str, Spec]]
    reference: Callable[[Tensors, Sizes], list[tuple[str, Any, Any]]]
    full: Sizes
    small: Sizes
    flops: Callable[..., float] = lambda **_: 0.0
    moved: Callable[..., float] | None = None
    best: tuple[Any, ...] = ("copy",)
    config: Mapping[str, Any] = field(default_factory=dict)
    binding: str = ""

    @property
    def by(self) -> str:
        return "flops" if self.flops(**self.full) and self.best[0] != "copy" else "bytes"

    def sizes(self, small: bool) -> Sizes:
        return self.small if small else self.full

    def bytes(self, sizes: Sizes) -> float:
        if self.moved is not None:
            return self.moved(**sizes)
        return float(sum(_count(s.shape) * bits_of(s.dtype) // 8 for s in self.tensors(**sizes).values()))

    def make(self, sizes: Sizes, device: str) -> Tensors:
        """The tensors of a call: inputs drawn from the program's name, outputs poisoned."""
        import torch

        g = torch.Generator(device=device).manual_seed(zlib.crc32(self.name.encode()))
        return {n: _made(torch, s, sizes, g, device) for n, s in self.tensors(**sizes).items()}


CORPUS: dict[str, Plain] = {}


def enter(*programs: Plain) -> None:
    for p in programs:
        assert p.name not in CORPUS, p.name
        CORPUS[p.name] = p


def bits_of(dtype: str) -> int:
    return {"bool": 8}.get(dtype) or int("".join(c for c in dtype.split("_")[0] if c.isdigit()))


def unit_of(dtype: str) -> float:
    """Half a unit in the last place of a float type, relative."""
    return {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}.get(dtype, 0.0)


def _count(shape: tuple[int, ...]) -> int:
    out = 1
    for d in shape:
        out *= d
    return out


def _made(torch: Any, s: Spec, sizes: Sizes, g: Any, device: str) -> Any:
    kind = getattr(torch, s.dtype)
    if callable(s.fill):
        return s.fill(torch, sizes, g, device)
    if s.out:
        return torch.zeros(s.shape, device=device, dtype=kind) if s.fill == "zeros" else \
            torch.full(s.shape, float("nan") if kind.is_floating_point else 77, device=device).to(kind)
    if s.fill == "bytes":
        low, high = (-128, 128) if s.dtype == "int8" else (0, 256)
        return torch.randint(low, high, s.shape, device=device, dtype=torch.int32, generator=g).to(kind)
    draw = torch.rand if s.fill == "uniform" else torch.randn
    return (draw(s.shape, device=device, generator=g) * s.scale).to(kind)


__all__ = ["CORPUS", "Plain", "Sizes", "Spec", "Tensors", "bits_of", "enter", "unit_of"]
