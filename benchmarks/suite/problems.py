"""Tensors of a workload and the float64 reference of part of its result, on any torch device.

Inputs are random normal, seeded by the workload's name.  A reference of everything would cost more than the measurement,
so matrix products are compared on whole rows and whole columns (every tile of the result is met), attention on whole heads.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from .workloads import Attention, Gemm, Workload

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative error of rounding to the type
ROWS, COLUMNS, HEADS = 192, 64, 3
BLOCK = 128  # of "block" scaling


@dataclass(frozen=True)
class Accuracy:
    """relative: Frobenius norm of the error over that of the reference.  of_bound: largest error over its own bound.

    ok: every element within its bound, the relative error below `limit`, all of the result finite.
    """

    relative: float
    of_bound: float
    limit: float
    finite: bool

    @property
    def ok(self) -> bool:
        return self.finite and self.of_bound <= 1.0 and self.relative <= self.limit


@dataclass
class Problem:
    """Tensors by name: gemm a, b [, scale_a, scale_b]; attention q, k, v (batch, heads, seq, dim), contiguous."""

    workload: Workload
    device: str
    tensors: dict[str, torch.Tensor]
    parts: list[tuple[Any, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # index, reference, bound
    limit: float = 0.0

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def out_shape(self) -> tuple[int, ...]:
        w = self.workload
        return (w.m, w.n) if isinstance(w, Gemm) else (w.batch, w.heads, w.seq, w.dim)

    def out_dtype(self) -> torch.dtype:
        w = self.workload
        return getattr(torch, w.out if isinstance(w, Gemm) else w.dtype)

    def new_out(self) -> torch.Tensor:
        """A result tensor full of NaN: what nothing writes is found."""
        return torch.full(self.out_shape(), float("nan"), device=self.device, dtype=self.out_dtype())

    def check(self, out: torch.Tensor) -> Accuracy:
        """Compare a result (in the shape and order of new_out) with the reference."""
        if tuple(out.shape) != self.out_shape():
            raise ValueError(f"{self.workload.name}: the result has shape {tuple(out.shape)}, not {self.out_shape()}")
        if not self.parts:
            self.parts, self.limit = reference(self)
        error = size = worst = 0.0
        for index, want, bound in self.parts:
            difference = (out[index].double() - want).abs()
            error += float((difference**2).sum())
            size += float((want**2).sum())
            worst = max(worst, float(torch.nan_to_num(difference / bound, nan=float("inf")).max()))
        relative = (error / size) ** 0.5
        return Accuracy(relative if relative == relative else float("inf"), worst, self.limit,
                        bool(torch.isfinite(out).all()))


def make(workload: Workload, device: str = "cuda", seed: int = 0) -> Problem:
    """The workload's tensors; another seed gives other values."""
    generator = torch.Generator(device=device).manual_seed(zlib.crc32(workload.name.encode()) + seed)

    def normal(*shape: int, dtype: str = "float16") -> torch.Tensor:
        if dtype.startswith("float8"):
            return torch.randn(*shape, device=device, generator=generator).to(getattr(torch, dtype))
        return torch.randn(*shape, device=device, generator=generator, dtype=getattr(torch, dtype))

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator) + 0.5

    w = workload
    if isinstance(w, Attention):
        q = normal(w.batch, w.heads, w.seq, w.dim, dtype=w.dtype)
        k, v = (normal(w.batch, w.kv, w.seq, w.dim, dtype=w.dtype) for _ in range(2))
        return Problem(w, device, {"q": q, "k": k, "v": v})
    t = {"a": normal(w.m, w.k, dtype=w.dtype), "b": normal(*((w.n, w.k) if w.trans_b else (w.k, w.n)), dtype=w.dtype)}
    if w.scaling == "tensor":
        t.update(scale_a=scales(), scale_b=scales())
    elif w.scaling == "block":
        t.update(scale_a=scales(w.m, -(-w.k // BLOCK)), scale_b=scales(-(-w.n // BLOCK), -(-w.k // BLOCK)))
    return Problem(w, device, t)


def reference(problem: Problem) -> tuple[list[tuple[Any, torch.Tensor, torch.Tensor]], float]:
    """([(index into the result, float64 values, bound of each element)], limit of the relative error)."""
    w = problem.workload
    return _attention(problem, w) if isinstance(w, Attention) else _gemm(problem, w)


def _some(count: int, of: int, device: str) -> torch.Tensor:
    """Indices spread over range(of), the first and the last among them, one in every stretch of of / count."""
    if of <= count:
        return torch.arange(of, device=device)
    generator = torch.Generator().manual_seed(of)
    at = torch.arange(count, dtype=torch.float64) + torch.rand(count, generator=generator, dtype=torch.float64)
    index = (at * of / count).long().clamp(max=of - 1)
    index[0], index[-1] = 0, of - 1
    return index.to(device)


def _wide(problem: Problem, name: str, w: Gemm) -> torch.Tensor:
    """a (m, k) or b (k, n) in float64, scaled."""
    x = problem[name].double()
    if w.scaling == "tensor":
        x = x * problem[f"scale_{name}"].double()
    elif w.scaling == "block":
        s = problem[f"scale_{name}"].double().repeat_interleave(BLOCK, 1)[:, :w.k]
        x = x * (s if name == "a" else s.repeat_interleave(BLOCK, 0)[:w.n])
    return x.T if name == "b" and w.trans_b else x


def _gemm(problem: Problem, w: Gemm) -> tuple[list[tuple[Any, torch.Tensor, torch.Tensor]], float]:
    """Bound of an element: one rounding of the result, and sums whose roundings are relative to their typical size.

    Products of random sign sum to about sqrt(sum a^2 b^2).  float32 sums of the tensor cores drop bits at each step of
    16: 2**-24 of it a step, four times that allowed.  fp8 sums keep about 14 bits (no promotion: per tensor) or are
    promoted every 128 (by block).  A step of k left out would show as 1 / sqrt(k) of that size.
    """
    a, b, unit = _wide(problem, "a", w), _wide(problem, "b", w), UNIT[w.out]
    if w.dtype.startswith("float8"):
        slack = 0.12 if w.scaling == "tensor" else 0.02
        limit = 2e-2 if w.scaling == "tensor" else 6e-3
    else:
        slack = 4 * (2.0**-14 + w.k / 16 * 2.0**-24)
        limit = 1.2 * unit
    rows, columns = _some(ROWS, w.m, problem.device), _some(COLUMNS, w.n, problem.device)
    parts = []
    for index, x, y in (((rows,), a[rows], b), ((slice(None), columns), a, b[:, columns])):
        want = x @ y
        typical = ((x * x) @ (y * y)).sqrt()
        parts.append((index, want, unit * want.abs() + slack * typical + 2.0**-24))
    return parts, limit


def _attention(problem: Problem, w: Attention) -> tuple[list[tuple[Any, torch.Tensor, torch.Tensor]], float]:
    """Bound of an element: the weights are rounded once to the type, the result once more; float32 scores and exp2."""
    unit, parts = UNIT[w.dtype], []
    every = w.batch * w.heads
    for flat in sorted({0, every // 2, every - 1})[:HEADS]:
        b, h = divmod(flat, w.heads)
        q, k, v = problem["q"][b, h].double(), *(problem[x][b, h // (w.heads // w.kv)].double() for x in "kv")
        s = q @ k.T * w.dim**-0.5
        if w.causal:
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu_(1), -torch.inf)
        p = s.softmax(-1)
        del s
        want = p @ v
        bound = unit * want.abs() + 4 * (unit * (p**2 @ v**2).sqrt() + 2.0**-14 * (p @ v.abs())) + 2.0**-24
        parts.append(((b, h), want, bound))
    return parts, 2 * unit
