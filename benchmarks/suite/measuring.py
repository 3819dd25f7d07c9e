"""Windows of calls, timed on the device; clock and power read while the device works.

A burst window (12 ms) ends before the card reaches its power limit; a sustained one (100 ms) runs into it.  Each comes after
the same idling, so that no competitor starts on the heat of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SHORT_MS = 0.1  # calls shorter than this are replayed from a graph: their launches would be what is timed
GRAPH_MS = 1.0  # work put into one graph


@dataclass(frozen=True)
class Window:
    """ms: of one call.  clock_mhz: of an SM, its mean over the window where `Cycles` counts them, else read once inside it.
    power_w: read once inside the window.  Both are None where they cannot be read."""

    ms: float
    calls: int
    clock_mhz: float | None = None
    power_w: float | None = None


class Nvml:
    """SM clock and power of a GPU through the management library that comes with the driver."""

    _SM_CLOCK, _INSTANT_POWER = 1, 186

    class _Field(ctypes.Structure):
        _fields_ = [("id", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
                    ("latency", ctypes.c_longlong), ("type", ctypes.c_int), ("result", ctypes.c_int),
                    ("value", ctypes.c_ulonglong)]

    def __init__(self, index: int = 0) -> None:
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        if self.lib.nvmlInit_v2() or self.lib.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)):
            raise OSError("the NVIDIA management library does not answer")

    def clock_mhz(self) -> float | None:
        value = ctypes.c_uint()
        rc = self.lib.nvmlDeviceGetClockInfo(self.handle, self._SM_CLOCK, ctypes.byref(value))
        return None if rc else float(value.value)

    def power_w(self) -> float | None:
        """Drawn now; where the driver has no such reading, its running mean."""
        f = self._Field(id=self._INSTANT_POWER)
        rc = self.lib.nvmlDeviceGetFieldValues(self.handle, 1, ctypes.byref(f))
        if not rc and not f.result:
            return (f.value & 0xFFFFFFFF) / 1000
        value = ctypes.c_uint()
        return None if self.lib.nvmlDeviceGetPowerUsage(self.handle, ctypes.byref(value)) else value.value / 1000


class Cycles:
    """Counts the cycles of an SM between two points of the current stream: the driver's reading of the clock lags by more
    than a window.  The block of a launch of one block runs on the same SM each time."""

    def __init__(self) -> None:
        import tilelang
        import tilelang.language as T

        @T.prim_func
        def stamp(out: T.Tensor((2,), "int64")):
            with T.Kernel(1, threads=32):
                if T.get_thread_binding() == 0:
                    out[0] = T.clock64()
                    out[1] = T.cast(T.globaltimer(), "int64")

        self.kernel = tilelang.compile(stamp)
        self.stamps = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def stamp(self, at: int) -> None:
        self.kernel(self.stamps[at])

    def mhz(self) -> float | None:
        """Of the span between stamps 0 and 1; None where the two are not of one SM."""
        cycles, ns = (self.stamps[1] - self.stamps[0]).tolist()
        return 1e3 * cycles / ns if ns > 0 and 100 < 1e3 * cycles / ns < 3000 else None


class CudaMeter:
    """Times calls on the current CUDA device.  cycles: counts cycles of an SM in each window."""

    device = "cuda"

    def __init__(self, idle: float, cycles: Cycles | None = None) -> None:
        self.idle, self.cycles, self.sensors = idle, cycles, None
        with contextlib.suppress(OSError, AttributeError):
            self.sensors = Nvml(torch.cuda.current_device())

    def prepare(self, call: Callable[[], Any], short: float = SHORT_MS) -> Prepared:
        """Warm up, estimate, and put calls shorter than this into a graph (where the call can be captured)."""
        for _ in range(2):
            call()
        first = self._timed(call, 3) / 3
        n = max(3, min(50, round(GRAPH_MS / max(first, 1e-4))))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(n):
            call()
        host = (time.perf_counter() - begin) * 1e6 / n  # the launches are queued: what the host takes for one
        each = self._timed(call, n) / n
        if each >= short:
            return Prepared(call, 1, each, "stream", host)
        for _ in range(2):  # a call whose launches take the host longer than the device is far shorter in a graph
            count = max(2, round(GRAPH_MS / each))
            try:
                graph = self._capture(call, count)
            except RuntimeError as e:  # a library that allocates or synchronises in the call
                torch.cuda.synchronize()
                return Prepared(call, 1, each, f"stream (no graph: {str(e).splitlines()[0][:80]})", host)
            graph.replay()
            before, each = each, self._timed(graph.replay, 3) / 3 / count
            if each > before / 2:
                break
        # The graph writes where the call did: what the call holds must stay, capturing the next one empties the allocator.
        return Prepared(graph.replay, count, each, "graph", host, (graph, call))

    def _capture(self, call: Callable[[], Any], count: int) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        return graph

    def _timed(self, call: Callable[[], Any], n: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(n):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def window(self, prepared: Prepared, ms: float, ahead: int = 0) -> Window:
        """One window of about `ms` milliseconds of work, after idling. ahead: cycles that the device waits for in front of it,
        so that what the host takes for the first call does not count."""
        n = max(1, round(ms / (prepared.each_ms * prepared.calls)))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        time.sleep(self.idle)
        run = prepared.run
        if self.cycles:
            self.cycles.stamp(0)
        if ahead:
            torch.cuda._sleep(ahead)
        start.record()
        for _ in range(n):
            run()
        end.record()
        if self.cycles:
            self.cycles.stamp(1)
        clock, power = (self.sensors.clock_mhz(), self.sensors.power_w()) if self.sensors else (None, None)
        end.synchronize()
        clock = self.cycles and self.cycles.mhz() or clock
        return Window(start.elapsed_time(end) / (n * prepared.calls), n * prepared.calls, clock, power)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class HostMeter:
    """Times calls by the host's clock: on machines without a GPU."""

    device = "cpu"

    def __init__(self, idle: float) -> None:
        self.idle = idle

    def prepare(self, call: Callable[[], Any]) -> Prepared:
        call()
        start = time.perf_counter()
        call()
        return Prepared(call, 1, max((time.perf_counter() - start) * 1e3, 1e-4), "host")

    def window(self, prepared: Prepared, ms: float) -> Window:
        n = max(1, round(ms / prepared.each_ms))
        time.sleep(self.idle)
        start = time.perf_counter()
        for _ in range(n):
            prepared.run()
        return Window((time.perf_counter() - start) * 1e3 / n, n)

    def synchronize(self) -> None:
        pass


Meter = CudaMeter | HostMeter


@dataclass
class Prepared:
    """A call ready to be timed.  run: `calls` of it.  each_ms: estimate of one.  how: "stream", "graph" or "host".

    host_us: microseconds the host needs to queue one call.  keep: what must live as long.
    """

    run: Callable[[], Any]
    calls: int
    each_ms: float
    how: str
    host_us: float | None = None
    keep: Any = None


def meter_for(device: str, idle: float) -> Meter:
    return CudaMeter(idle) if device == "cuda" else HostMeter(idle)
