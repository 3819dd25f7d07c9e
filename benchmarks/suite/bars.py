"""What the figures have to reach: each bar names its workloads, the figure and the least value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from .record import OK, best_peer, ratio, tflops

ATTENTION_PEERS = ("cudnn", "flash", "fa3", "triton")
ACCURACY = 1.5  # relative error of ours over the vendor's
COLD_SECONDS = {"gemm": 0.5, "attention": 1.0}  # cold compile of a kernel


@dataclass(frozen=True)
class Bar:
    """value: what was reached, None without figures.  of: workloads that had figures, and how many there are."""

    text: str
    least: float
    value: float | None
    of: tuple[int, int]

    @property
    def ok(self) -> bool:
        return self.value is not None and self.value >= self.least


def geometric_mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def lowest(values: Iterable[float]) -> float | None:
    return min(values, default=None)


Pool = Callable[[Iterable[float]], float | None]
# text, workloads, peers (the best of them), least value, how values are put together
RULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], float, Pool], ...] = (
    ("M0-M7 f16 NT, geometric mean over cuBLAS", ("M?-nt-f16",), ("cublas",), 1.0, geometric_mean),
    ("M0-M7 f16 NN, geometric mean over cuBLAS", ("M?-nn-f16",), ("cublas",), 1.0, geometric_mean),
    ("M0-M7 bf16 NT, geometric mean over cuBLAS", ("M?-nt-bf16",), ("cublas",), 1.0, geometric_mean),
    ("M0-M7 bf16 NN, geometric mean over cuBLAS", ("M?-nn-bf16",), ("cublas",), 1.0, geometric_mean),
    ("M0-M7, lowest over cuBLAS", ("M?-*",), ("cublas",), 0.95, lowest),
    ("squares, lowest over cuBLAS", ("SQ*",), ("cublas",), 0.95, lowest),
    ("odd shapes, lowest over cuBLAS", ("ODD*",), ("cublas",), 0.9, lowest),
    ("GEMM, lowest over the hand-written kernel", ("M?-*", "SQ*", "ODD*"), ("cubin",), 0.98, lowest),
    ("attention, lowest over the hand-written kernel", ("FA*",), ("cubin",), 0.98, lowest),
    ("fp8 per tensor, lowest over _scaled_mm", ("FP8-*-tensor",), ("cublas",), 1.0, lowest),
    ("attention FA0-FA4, lowest over the best peer", ("FA[0-9]",), ATTENTION_PEERS, 1.0, lowest),
    ("attention 8k and 16k, lowest over the best peer", ("FA-8k*", "FA-16k*"), ATTENTION_PEERS, 1.0, lowest),
)


def bars(rows: dict[str, Any], window: str, ours: str = "tilelang") -> list[Bar]:
    """The bars of which a workload is among the rows, by the ratios of one kind of window."""
    out = []
    for text, patterns, peers, least, pool in RULES:
        meant = [r for name, r in rows.items() if any(fnmatchcase(name, p) for p in patterns)]
        present = [r for r in meant if any(p in r["providers"] for p in peers)]
        values = []
        for r in present:
            peer = best_peer(r, peers, window)
            value = ratio(r, ours, peer, window) if peer else None
            if value is not None:
                values.append(value)
        if present:
            out.append(Bar(text, least, pool(values), (len(values), len(present))))
    return out + _rates(rows, window, ours) + _accuracy(rows, ours)


def _rates(rows: dict[str, Any], window: str, ours: str) -> list[Bar]:
    out = []
    for name, least in (("FA-16k", 650.0), ("FA-8k-c", 620.0)):
        if name in rows:
            value = tflops(rows[name], ours, window)
            out.append(Bar(f"{name}, TFLOP/s", least, value, (int(value is not None), 1)))
    pairs = [(rows[f"FP8-{s}-block"], rows[f"FP8-{s}-tensor"]) for s in (4096, 8192)
             if f"FP8-{s}-block" in rows and f"FP8-{s}-tensor" in rows]
    rates = [(tflops(b, ours, window), tflops(t, ours, window)) for b, t in pairs]
    values = [b / t for b, t in rates if b and t]
    if pairs:
        out.append(Bar("fp8 by block over per tensor, lowest", 0.9, lowest(values), (len(values), len(pairs))))
    return out


def error_ratio(row: dict[str, Any], ours: str = "tilelang") -> float | None:
    """Relative error of ours over that of the vendor's kernel: cuBLAS, for attention the better of cuDNN and flash."""
    entries = {p: s for p, s in row["providers"].items() if s.get("status") == OK}
    vendors = [entries[p]["accuracy"]["relative"] for p in ("cublas", "cudnn", "flash") if p in entries]
    if ours not in entries or not vendors or not min(vendors):
        return None
    return entries[ours]["accuracy"]["relative"] / min(vendors)


def _accuracy(rows: dict[str, Any], ours: str) -> list[Bar]:
    found = [error_ratio(r, ours) for r in rows.values()]
    values = [1 / v for v in found if v]
    if not values:
        return []
    return [Bar(f"vendor's relative error over ours, lowest (at least 1/{ACCURACY})", 1 / ACCURACY, min(values),
                (len(values), len(found)))]
