"""Measures the time of a function by GPU events or the host's clock, and flushes the cache between runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.target.probe import device_capability, hip_device_arch

register("bench-backend", ValueError, "do_bench is asked for a way of measuring it does not have",
         expected="a way of measuring that do_bench has")
register("bench-function", TypeError, "do_bench is given something that cannot be called",
         "write do_bench(lambda: kernel(a, b))", "a function without arguments")
register("bench-quantiles", ValueError, "do_bench is asked for quantiles that are none", "write quantiles=[0.5, 0.9]",
         "numbers from 0 to 1")
register("bench-device", ValueError, "do_bench is asked to measure on a device it cannot", expected='"cuda" or "cpu"')

RETURN_MODES = ("mean", "median", "min", "max")
BACKENDS = ("event", "cupti", "cudagraph")
PASS_MS = 20.0  # most time in a pass for the runs of a function
# How many times slower than the fastest a function may be after each pass, to stay: the host's first runs may be disturbed.
_GPU_STAYS, _HOST_STAYS = (3.0, 2.0, 1.3, 1.3, 1.1), (1000.0, 30.0, 8.0, 3.0, 1.5, 1.2)
_ENOUGH, _LEAST = 5.0, 0.1  # seconds of passes: of all functions, of each if it is short
_flush_buffers: dict[tuple[Any, int], Any] = {}


def do_bench(fn: Callable[[], Any], warmup: float = 25, rep: float = 100, _n_warmup: int = 0, _n_repeat: int = 0,
             quantiles: Sequence[float] | None = None, fast_flush: bool = True, backend: str = "event",
             return_mode: str | None = None, device: Any = None, cache_size: int | None = None,
             early_stop_baseline: float | None = None) -> Any:
    """Milliseconds of fn().

    warmup, rep: time budgets in ms, unless the counts _n_warmup, _n_repeat are given.  quantiles: a list of results,
    one value when it has one entry.  backend: "event" (GPU events; "cupti" measures the same way here), "cudagraph"
    (calls captured in a graph).  return_mode: None is "mean" on a GPU and "median" on the CPU, where other processes make some
    runs many times longer.  cache_size: MB written between runs; None is 256 on a GPU and 0 on the CPU.
    early_stop_baseline: ms; an estimate of 5 runs that is slower than this is returned at once.  device: a CUDA device or
    "cpu"; None is the GPU where there is one.
    """
    assert return_mode in (None, *RETURN_MODES), f"return_mode must be one of {RETURN_MODES}, found {return_mode!r}"
    if backend not in BACKENDS:
        raise error("bench-backend", f"Unknown profiler backend: ‹{backend!r}›, expected «one of {', '.join(BACKENDS)}»",
                    hint="leave backend out to measure with events")
    if not callable(fn):
        raise error("bench-function", f"do_bench measures calls of a function, found {fn!r}")
    if quantiles is not None and (not isinstance(quantiles, (list, tuple)) or not all(0 <= q <= 1 for q in quantiles)):
        raise error("bench-quantiles", f"quantiles are a list of numbers from 0 to 1, found {quantiles!r}")
    clock = clock_for(device, cache_size, backend)
    fn()
    clock.synchronize()
    estimate = clock.measure(fn, 5, flush=True)
    per_run = max(statistics.median(estimate), 1e-6)
    if early_stop_baseline is not None and per_run > early_stop_baseline:
        return per_run
    n_warmup = _n_warmup or max(1, int(warmup / per_run))
    n_repeat = _n_repeat or max(1, int(rep / per_run))
    for _ in range(n_warmup):
        fn()
    times = clock.measure(fn, n_repeat, flush=True)
    if quantiles is not None:
        values = [quantile(times, q) for q in quantiles]
        return values[0] if len(values) == 1 else values
    pick: dict[str, Callable[[list[float]], float]] = {"mean": statistics.mean, "median": statistics.median, "min": min,
                                                       "max": max}
    return pick[return_mode or ("median" if isinstance(clock, HostClock) else "mean")](times)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile by linear interpolation."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def timed_pass(measure: Callable[[int, int], list[float]], taken: dict[int, list[float]], runs: int,
               on_host: bool = False) -> None:
    """Append to `taken` one time of each function in turn, so that changes of clocks and other processes affect all.

    measure: (function, runs) -> milliseconds of each run.  on_host: runs shorter than 1 ms are repeated for so long, and the
    fastest counts; else the mean of the fastest three quarters: the resolution of events is too coarse for a median."""
    order = list(taken.items())
    first = len(order[0][1]) % len(order)  # each is first at times: what ran before affects caches and threads
    for k, times in order[first:] + order[:first]:
        last = max(times[-1], 1e-6) if times else PASS_MS / runs
        found = sorted(measure(k, max(1, min(int(runs * max(1.0, on_host / last)), int(PASS_MS / last)))))
        times.append(found[0] if on_host else statistics.fmean(found[:max(1, len(found) * 3 // 4)]))


def compared(measure: Callable[[int, int], list[float]], count: int, runs: int, on_host: bool,
             stays: float = 1e9) -> dict[int, float]:
    """Milliseconds of `count` functions, measured in alternation by passes.

    Passes end when each function that may be the fastest showed its time three times to 2 % in 0.1 s, when it had `runs` runs
    (on the host, of at least 1 ms), or after 5 s.  The result is their median, on the host the lower quartile: other processes
    make some passes many times longer.  stays: how many times slower than the fastest a function may be to be measured again.
    measure, on_host: as timed_pass has them.
    """
    whole: Callable[[list[float]], float] = (lambda t: sorted(t)[len(t) // 4]) if on_host else statistics.median
    limits, done, start = _HOST_STAYS if on_host else _GPU_STAYS, 0, time.perf_counter()
    taken: dict[int, list[float]] = {k: [] for k in range(count)}
    result: dict[int, float] = {}
    n = settled = 0
    while done < runs and (n < 4 or not settled and time.perf_counter() - start < _ENOUGH):
        now = max(1, min(1 << max(0, n - 1), 8, runs - done))
        timed_pass(measure, taken, now, on_host)
        result |= {k: whole(t) for k, t in taken.items()}
        least = min(result[k] for k in taken)
        done += max(1, min(now, int(PASS_MS / max(least, 1e-6))))
        taken = {k: t for k, t in taken.items() if min(t) <= least * min(stays, limits[min(n, len(limits) - 1)])}
        settled = len(taken) * _LEAST < time.perf_counter() - start and all(
            sum(abs(x - result[k]) <= 0.02 * result[k] for x in t) >= 3 for k, t in taken.items())
        n += 1
    return result


def clock_for(device: Any, cache_size: int | None = None, backend: str = "event") -> Any:
    """The clock of a GPU or "cpu"; None is the GPU where there is one.  cache_size: MB written between runs.

    GPUs of AMD are "cuda", as torch names them, or "hip".
    """
    kind = str(getattr(device, "type", device)).split(":")[0] if device is not None else None
    if kind is None:
        kind = "cuda" if device_capability() is not None or hip_device_arch() is not None else "cpu"
    if kind == "cpu":
        return HostClock(cache_size or 0)
    if kind not in ("cuda", "hip"):
        raise error("bench-device", f"do_bench measures on CUDA devices and the CPU, found device ‹{device!r}›",
                    hint="leave device out, or pass \"cuda\" or \"cpu\"")
    if kind == "hip":
        from tilelang.runtime.hip_driver import driver_of  # 3 ms

        driver_of(kind).device_count()  # raises without a device
        device = "cuda" + str(device)[3:]
    return EventClock(device, 256 if cache_size is None else cache_size, backend)


class HostClock:
    """The host's clock, for kernels that finish before they return."""

    def __init__(self, cache_size: int) -> None:
        self.mega = cache_size

    def synchronize(self) -> None:
        """Do nothing: CPU kernels have finished when the call returns."""

    def measure(self, fn: Callable[[], Any], n: int, flush: bool) -> list[float]:
        key = ("cpu", self.mega)
        flush = flush and self.mega > 0
        if flush and key not in _flush_buffers:
            _flush_buffers[key] = np.zeros(min(self.mega, 64) << 20, np.uint8)  # larger than the last-level cache is enough
        out = []
        for _ in range(n):
            if flush:
                _flush_buffers[key].fill(0)
            start = time.perf_counter()
            fn()
            out.append((time.perf_counter() - start) * 1e3)
        return out


class EventClock:
    """CUDA events on the current stream, through torch."""

    def __init__(self, device: Any, cache_size: int, backend: str) -> None:
        import torch

        self.torch, self.backend, self.mega = torch, backend, cache_size
        self.device = torch.device(device if device is not None else "cuda")

    def synchronize(self) -> None:
        """Wait for the device."""
        self.torch.cuda.synchronize(self.device)

    def _flush(self) -> Any:
        key = (str(self.device), self.mega)
        if key not in _flush_buffers:
            _flush_buffers[key] = self.torch.empty(self.mega << 20, dtype=self.torch.int8, device=self.device)
        return _flush_buffers[key]

    def release(self) -> None:
        """Free the memory that is written between runs."""
        _flush_buffers.pop((str(self.device), self.mega), None)

    def measure(self, fn: Callable[[], Any], n: int, flush: bool) -> list[float]:
        """The milliseconds of each of n consecutive calls.  flush: the caches are emptied before each."""
        cuda = self.torch.cuda
        run, count = self._in_graph(fn) if self.backend == "cudagraph" else (fn, 1)
        starts = [cuda.Event(enable_timing=True) for _ in range(n)]
        ends = [cuda.Event(enable_timing=True) for _ in range(n)]
        buffer = self._flush() if flush and self.mega else None
        for a, b in zip(starts, ends):
            if buffer is not None:
                buffer.zero_()
            a.record()
            run()
            b.record()
        ends[-1].synchronize()  # not a device-wide wait: other streams may be waiting for the host
        return [a.elapsed_time(b) / count for a, b in zip(starts, ends)]

    def _in_graph(self, fn: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        graph, count = self.torch.cuda.CUDAGraph(), 10
        with self.torch.cuda.graph(graph):
            for _ in range(count):
                fn()
        return graph.replay, count
