"""Analyzer: counts the FLOPs and bytes of a tile program and estimates its time at the device's peak rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tilelang.ir import Buffer, Const, For, Func, Launch, Parallel, Seq, Stmt, While
from tilelang.ir.stmt import If
from tilelang.ops import Copy, Gemm
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
    """Counts the work of a function.  fn: a PrimFunc (or its Func); device: tilelang.carver.arch.CUDA(...)."""

    def __init__(self, fn: Any, device: Any) -> None:
        self.func: Func = getattr(fn, "func", fn)
        self.device = device
        self.flops = self.bytes = 0
        self.params = {b.data for _, b in self.func.buffers}

    @classmethod
    def analysis(cls, fn: Any, device: Any) -> AnalysisResult:
        """Count 2 * M * N * K FLOPs per T.gemm and the bytes of each T.copy of a parameter, over loops and grid.

        device: an architecture of tilelang.carver.arch.  Raises TypeError for anything else, ValueError where a loop, grid
        or tile has no static extent.
        """
        if not hasattr(device, "bandwidth"):
            raise TypeError(f"device is an architecture such as tilelang.carver.arch.CUDA(\"cuda\"), found {device!r}")
        one = cls(fn, device)
        one._stmt(one.func.body, 1)
        bandwidth = device.bandwidth[1] / 1000
        chip = chip_of(int(device.compute_capability or 0))
        flops = chip.peak(16, True) if chip is not None else None
        peak = flops / 1e12 if flops else None
        times = [one.bytes / (bandwidth * 1e9)] + ([one.flops / (peak * 1e12)] if peak else [])
        return AnalysisResult(one.flops, one.bytes, max(times), peak, bandwidth)

    def _stmt(self, s: Stmt, times: int) -> None:
        match s:
            case Seq():
                for x in s.stmts:
                    self._stmt(x, times)
            case Launch():
                self._stmt(s.body, times * math.prod(_static(g, "a grid extent") for g in s.grid))
            case For():
                self._stmt(s.body, times * _static(s.extent, "a loop"))
            case Parallel():
                self._stmt(s.body, times)
            case If():
                self._stmt(s.then, times)
                if s.orelse is not None:
                    self._stmt(s.orelse, times)
            case While():
                raise ValueError("the iterations of a while loop cannot be counted")
            case Gemm():
                m, n = (_static(e, "a tile") for e in s.c.extents[-2:])
                k = _static(s.a.extents[-2 if s.transpose_a else -1], "a tile")
                self.flops += 2 * m * n * k * times
            case Copy():
                self._copy(s, times)

    def _copy(self, s: Copy, times: int) -> None:
        for r, other in ((s.src, s.dst), (s.dst, s.src)):
            b: Buffer = r.buffer
            if b.data in self.params:
                tile = other if other.buffer.data not in self.params else r  # the side nearer to the registers
                elements = math.prod(_static(e, "a tile") for e in tile.extents)
                self.bytes += elements * b.dtype.bits * b.dtype.lanes // 8 * times


def _static(e: Any, what: str) -> int:
    value = e.value if isinstance(e, Const) else e
    if not isinstance(value, int):
        raise ValueError(f"{what} of run-time extent ({e!r}) cannot be counted: analyse the program for given shapes")
    return value
