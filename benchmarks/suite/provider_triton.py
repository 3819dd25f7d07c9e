"""Triton kernels written in the ordinary way (triton_kernels.py), each in a few configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from . import triton_kernels as kernels
from .problems import Problem
from .providers import Candidate, Provider, Skip
from .workloads import Attention, Gemm, Workload

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """A kernel, its tile sizes, warps and stages."""

    kernel: Any
    meta: dict[str, int]
    warps: int
    stages: int

    @property
    def label(self) -> str:
        sizes = "x".join(str(self.meta[x]) for x in ("BM", "BN", "BK") if x in self.meta)
        return f"{self.kernel.__name__} {sizes} w{self.warps} s{self.stages}"


def _gemm_configs(kernel: Any, tiles: Sequence[tuple[int, ...]]) -> list[Config]:
    names = ("BM", "BN", "BK", "GROUP", "SPLIT")
    return [Config(kernel, dict(zip(names, (*sizes[:3], 8, *sizes[5:]))), *sizes[3:5]) for sizes in tiles]


# tile sizes, warps, stages [, parts of a stored tile]
POINTERS = _gemm_configs(kernels.gemm, ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 4),
                                        (64, 128, 64, 4, 4)))
DESCRIPTORS = _gemm_configs(kernels.gemm_descriptors, (
    (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 2), (256, 128, 64, 8, 3, 1), (128, 128, 64, 4, 4, 1), (64, 128, 64, 4, 4, 1)))
POINTERS8 = _gemm_configs(kernels.gemm, ((128, 256, 128, 8, 3), (128, 128, 128, 4, 4)))
DESCRIPTORS8 = _gemm_configs(kernels.gemm_descriptors, (
    (128, 256, 128, 8, 3, 1), (128, 256, 128, 8, 4, 2), (128, 128, 128, 4, 4, 1)))
BLOCKS = [Config(kernels.gemm_blocks, dict(BM=bm, BN=bn, GROUP=8), w, s) for bm, bn, w, s in (
    (128, 128, 8, 3), (128, 128, 4, 4), (64, 128, 4, 4))]
ATTENTION = [Config(kernels.attention, dict(BM=bm, BN=bn), w, s) for bm, bn, w, s in (
    (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3))]


def configs(w: Workload) -> list[Config]:
    """Those that can run a workload."""
    if isinstance(w, Attention):
        if w.seq % 128:
            raise Skip("the kernel wants lengths in multiples of 128")
        return ATTENTION
    size = 1 if w.dtype.startswith("float8") else 2
    if w.scaling == "block":
        return BLOCKS
    rows = [w.k * size, w.n * 2, w.k * size if w.trans_b else w.n * size]
    found = POINTERS8 if size == 1 else POINTERS
    if all(r % 16 == 0 for r in rows):
        found = found + (DESCRIPTORS8 if size == 1 else DESCRIPTORS)
    return found


def launch_of(w: Workload, config: Config, t: Callable[[str], Any], programs: int) -> tuple[tuple[int, ...], list[Any],
                                                                                          dict[str, Any]]:
    """(grid, arguments, constants) of a launch; t gives the tensor of a name ("out" too), or its dtype for warming up."""
    meta: dict[str, Any] = {**config.meta, "num_warps": config.warps, "num_stages": config.stages}
    if isinstance(w, Attention):
        grid = (w.seq // config.meta["BM"], w.batch * w.heads)
        return grid, [t("q"), t("k"), t("v"), t("out"), w.dim**-0.5 * LOG2E, w.batch, w.heads, w.heads // w.kv, w.seq], \
            {**meta, "D": w.dim, "CAUSAL": w.causal}
    scaled = w.scaling == "tensor"
    scales = [t("scale_a"), t("scale_b")] if w.scaling else [t("a"), t("b")]  # not read without scaling
    args = [t("a"), t("b"), t("out"), *scales, w.m, w.n, w.k]
    tiles = triton.cdiv(w.m, config.meta["BM"]) * triton.cdiv(w.n, config.meta["BN"])
    if config.kernel is kernels.gemm_blocks:
        return (tiles,), args, meta
    if config.kernel is kernels.gemm_descriptors:
        return (min(programs, tiles),), [*args, programs], {**meta, "SCALED": scaled, "TRANS_B": w.trans_b}
    return (tiles,), [*args, w.k, *((1, w.k) if w.trans_b else (w.n, 1))], {**meta, "SCALED": scaled}


def _allocate(size: int, alignment: int, stream: Any) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=torch.int8)


class Triton(Provider):
    name, text = "triton", f"Triton {triton.__version__}, tutorial-style kernels, the fastest of a few configurations"

    def unavailable(self) -> str:
        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def labels(self, workload: Workload) -> Sequence[str]:
        return [c.label for c in configs(workload)]

    def _config(self, workload: Workload, label: str) -> Config:
        return next(c for c in configs(workload) if c.label == label)

    def compile(self, workload: Workload, label: str) -> dict[str, Any]:
        dtypes = _dtypes(workload)
        config = self._config(workload, label)
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        start = time.perf_counter()
        grid, args, meta = launch_of(workload, config, dtypes.__getitem__, programs)
        kernel = config.kernel.warmup(*args, grid=grid, **meta)
        return {"seconds": time.perf_counter() - start, "shared_memory": kernel.metadata.shared}

    def candidate(self, problem: Problem, label: str) -> Candidate:
        config, out = self._config(problem.workload, label), problem.new_out()
        programs = torch.cuda.get_device_properties(0).multi_processor_count if problem.device == "cuda" else 4
        grid, args, meta = launch_of(problem.workload, config, {**problem.tensors, "out": out}.__getitem__, programs)
        triton.set_allocator(_allocate)
        run = config.kernel[grid]

        def call() -> torch.Tensor:
            run(*args, **meta)
            return out

        return Candidate(label, call)


def _dtypes(w: Workload) -> dict[str, torch.dtype]:
    if isinstance(w, Attention):
        return dict.fromkeys(("q", "k", "v", "out"), getattr(torch, w.dtype))
    assert isinstance(w, Gemm)
    return {"a": getattr(torch, w.dtype), "b": getattr(torch, w.dtype), "out": getattr(torch, w.out),
            "scale_a": torch.float32, "scale_b": torch.float32}


def provider() -> Provider:
    return Triton()
