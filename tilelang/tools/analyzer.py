"""Analyzer: counts the FLOPs and bytes of a tile program and estimates its time at the device's peak rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang.jit.work import work_of
from tilelang.target.machine import chip_of


@dataclass(frozen=True)
class AnalysisResult:
    """total_flops: of T.gemm.  total_global_bytes: of T.copy from and to parameters.  estimated_time: seconds, the longer
    of computing and moving at the peaks.  expected_tflops, expected_bandwidth_GBps: the peaks assumed."""

    total_flops: int
    total_global_bytes: int
    estimated_time: float
    expected_tflops: float | None
    expected_bandwidth_GBps: float


class Analyzer:
    """Counts the work of a function."""

    @classmethod
    def analysis(cls, fn: Any, device: Any) -> AnalysisResult:
        """Count 2 * M * N * K FLOPs per T.gemm and the bytes of each T.copy of a parameter, over loops and grid.

        fn: a PrimFunc (or its Func).  device: an architecture of tilelang.carver.arch.  Raises TypeError for anything else,
        ValueError where a loop, grid or tile has no static extent.
        """
        if not hasattr(device, "bandwidth"):
            raise TypeError(f"device is an architecture such as tilelang.carver.arch.CUDA(\"cuda\"), found {device!r}")
        works = work_of(getattr(fn, "func", fn))
        if not all(w.known and w.touched is not None for w in works):
            raise ValueError("a while loop, and a grid, loop or tile of run-time extent, cannot be counted: analyse a program "
                             "for given shapes, without while")
        flops = int(sum(sum(w.flops.values()) for w in works))
        moved = int(sum(w.loaded + w.stored for w in works))
        bandwidth = device.bandwidth[1] / 1000
        chip = chip_of(getattr(device.target, "machine", 0))
        peak = chip.peak(16, True) if chip is not None else None
        times = [moved / (bandwidth * 1e9)] + ([flops / peak] if peak else [])
        return AnalysisResult(flops, moved, max(times), peak / 1e12 if peak else None, bandwidth)
