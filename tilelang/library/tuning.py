"""Tuning: measures the candidates of the cost models for a call on the present device and keeps the fastest.

    candidates, the model's first -> compiled in threads -> results compared with the model's -> timed in passes -> kept

The results are kept in the process and in the autotuner's folder of the disk cache. A call is tuned where it runs on a GPU and
is not being captured in a CUDA graph. On the CPU and the simulators the cost models decide: there, compiling a dozen candidates
takes longer than thousands of calls, and other work of the host disturbs the times.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tilelang.env import env
from tilelang.jit.artifact import INTERPRETED
from tilelang.jit.toolchain import toolchain_stamp
from tilelang.jit.compiling import progress, run_parallel
from tilelang.jit.timing import EventClock, timed_pass
from tilelang.log import logger
from tilelang.runtime import cuda_driver
from tilelang.runtime.cache import DiskCache, Entry, compiler_stamp, digest
from tilelang.runtime.cpus import usable_cpus
from tilelang.target import Target
from tilelang.transform.framework.scope import PassContext, as_planned, current_config

from .arrays import is_numpy

MOST = 12  # candidates of a call, the model's included
SURE = 0.98  # of the model's time: a smaller gain is noise
# (runs in a pass, how much slower than the fastest a candidate may be to stay); the last passes, of _RUNS, decide
_HEATS = ((1, 2.0), (5, 1.3), (8, 1.1), (8, 1.04))
_PASSES, _RUNS = 5, 16
Run = Callable[..., None]


@dataclass(frozen=True)
class Candidate:
    """One way to answer a call.

    config: JSON values that identify the candidate. make: compiles it and returns run(*outputs), which computes the call.
    choice: the candidate in the form of the function that made it.
    """

    config: dict[str, Any]
    make: Callable[[], Run]
    choice: Any

    @property
    def name(self) -> str:
        return json.dumps(self.config, sort_keys=True)


@dataclass(frozen=True)
class Task:
    """A call that may be tuned.

    about: a description for people. key: JSON values that decide which candidate is fastest. like: a tensor of the call.
    candidates: the model's choice first. outputs: allocates tensors for the results. agree: whether the results of two
    candidates are as close as their error bounds allow.
    """

    about: str
    key: Any
    like: Any
    target: Target
    backend: str | None
    candidates: Callable[[], Sequence[Candidate]]
    outputs: Callable[[], tuple[Any, ...]]
    agree: Callable[[tuple[Any, ...], tuple[Any, ...]], bool]


def gpu_clock(like: Any, target: Target, backend: str | None) -> EventClock | None:
    """A clock of CUDA events on the current stream of a tensor's GPU; None where calls do not run on a GPU."""
    if is_numpy(like) or like.device.type != "cuda" or not target.is_gpu or backend in INTERPRETED:
        return None
    return EventClock(like.device, 256, "event")


def captured(like: Any) -> bool:
    """Whether launches now go into a CUDA graph."""
    return not is_numpy(like) and like.device.type == "cuda" and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def race(measure: Callable[[int, int], list[float]], count: int) -> tuple[int, dict[int, float]]:
    """(the fastest of `count` candidates, milliseconds of those that stayed to the end). Candidate 0 is the model's.

    measure: (candidate, runs) -> milliseconds of each run. Every pass times all candidates that are left, so that changes of
    clocks and power affect all. The model's candidate wins unless another is at least 2 % faster, and faster in each of the
    last passes.
    """
    taken: dict[int, list[float]] = {k: [] for k in range(count)}

    for runs, factor in _HEATS:
        timed_pass(measure, taken, runs)
        middle = {k: statistics.median(t) for k, t in taken.items()}
        limit = factor * min(middle.values())
        taken = {k: t for k, t in taken.items() if k == 0 or middle[k] <= limit}
    if len(taken) > 1:
        for k in taken:
            taken[k] = taken[k][-1:]
        for _ in range(_PASSES):
            timed_pass(measure, taken, _RUNS)
    last = {k: statistics.median(t[-_PASSES:]) for k, t in taken.items()}
    best = min(last, key=lambda k: last[k])
    sure = last[best] <= SURE * last[0] and all(x < y for x, y in zip(taken[best][-_PASSES:], taken[0][-_PASSES:]))
    return best if sure else 0, last


class Tuner:
    """Finds and stores the best candidates.

    clock: a function (tensor, target, execution backend) -> EventClock or None. disk: where results are stored.
    """

    def __init__(self, clock: Callable[[Any, Target, str | None], EventClock | None] = gpu_clock,
                 disk: DiskCache | None = None) -> None:
        self.clock, self.disk = clock, disk or DiskCache("autotuner")
        self.found: dict[str, str] = {}  # key -> name of the candidate
        self._lock = threading.Lock()  # one measurement at a time: two would disturb each other

    def can(self, like: Any, target: Target, backend: str | None) -> bool | None:
        """Whether calls with such tensors can be timed; None where this call is being captured in a CUDA graph."""
        return None if captured(like) else self.clock(like, target, backend) is not None

    def choose(self, task: Task) -> Candidate:
        """The candidate for a call. A candidate other than the model's that fails is reported and left out."""
        candidates = task.candidates()
        if len(candidates) == 1:
            return candidates[0]
        names = {c.name: c for c in candidates}
        configs = {str(k): v for k, v in current_config().items()}
        key = digest(["library", task.key, task.backend, configs, _machine(task.like, task.target), compiler_stamp()])
        if key not in self.found:
            with self._lock:
                if key not in self.found:
                    self.found[key] = self._kept(key, names) or self._timed(task, candidates, key)
        return names.get(self.found[key], candidates[0])

    def _kept(self, key: str, names: dict[str, Candidate]) -> str | None:
        """The stored result of an earlier process, if it is still a candidate."""
        entry = None if env.is_autotune_cache_disabled() else self.disk.load(key)
        name = json.dumps(entry.meta.get("config"), sort_keys=True) if entry is not None else None
        if name is not None and name not in names:
            logger.info("tuning: the kept choice %s is none any more: it is found anew", name)
            self.disk.remove(key)
            return None
        return name

    def _timed(self, task: Task, candidates: Sequence[Candidate], key: str) -> str:
        start = time.perf_counter()
        try:
            best, times = self._best(task, candidates)
        except Exception as e:  # most likely there is no memory for the results
            logger.warning("tuning %s failed, the model's choice stays: %s", task.about, e)
            return candidates[0].name
        won = candidates[best]
        found = "the model's choice stays" if best == 0 else f"{won.name}: {times[best]:.4f} ms, the model's {times[0]:.4f}"
        logger.info("tuned %s in %.1f s: %s", task.about, time.perf_counter() - start, found)
        if not env.is_autotune_cache_disabled():
            self.disk.store(key, Entry({"about": task.about, "config": won.config, "times": {
                candidates[k].name: ms for k, ms in times.items()}}))
        return won.name

    def _best(self, task: Task, candidates: Sequence[Candidate]) -> tuple[int, dict[int, float]]:
        """(the best candidate, milliseconds of those in the last pass)."""
        with progress(f"tuning {task.about}", 2 * len(candidates)) as step, at_home(task.like):
            clock = self.clock(task.like, task.target, task.backend)
            runs = compiled(candidates, step)
            if clock is None or runs[0] is None:
                raise RuntimeError("it does not compile" if clock else "nothing measures time there")
            able, outputs = self._agreeing(task, candidates, runs, step)
            if len(able) == 1:
                return 0, {}

            def measure(k: int, n: int) -> list[float]:
                run = runs[able[k]]
                assert run is not None
                return clock.measure(lambda: run(*outputs), n, True)

            try:
                best, times = race(measure, len(able))
            finally:
                clock.release()
            return able[best], {able[k]: ms for k, ms in times.items()}

    def _agreeing(self, task: Task, candidates: Sequence[Candidate], runs: list[Run | None],
                  step: Callable[[], None]) -> tuple[list[int], tuple[Any, ...]]:
        """(candidates whose results agree with the model's within the errors of both, outputs of the last one)."""
        wanted = outputs = task.outputs()
        able = []
        for k, run in enumerate(runs):
            step()
            if run is None:
                continue
            try:
                outputs = task.outputs() if k else wanted
                run(*outputs)
                if k and not task.agree(outputs, wanted):
                    logger.warning("tuning %s: %s gives another result than the model's choice and is not used", task.about,
                                   candidates[k].name)
                    continue
            except Exception as e:
                if k == 0:
                    raise
                logger.warning("tuning %s: %s is skipped: %s", task.about, candidates[k].name, _line(e))
                continue
            able.append(k)
        return able, outputs


def compiled(candidates: Sequence[Candidate], step: Callable[[], None]) -> list[Run | None]:
    """A function that runs each candidate; None for a candidate that does not compile as planned.

    Candidates are compiled in threads, with the pass configs that are set here.
    """
    configs = current_config()

    def job(c: Candidate) -> Run | None:
        try:
            with PassContext(config=configs), nullcontext() if c is candidates[0] else as_planned():
                return c.make()
        except Exception as e:
            logger.debug("tuning: %s does not compile: %s", c.name, _line(e))
            return None

    workers = min(len(candidates), env.tuning_workers(usable_cpus()))
    return run_parallel([lambda c=c: job(c) for c in candidates], workers, False, step)


@contextmanager
def at_home(like: Any) -> Iterator[None]:
    """A context in which the tensor's device is the current one and torch records no gradients."""
    if is_numpy(like):
        yield
        return
    torch = sys.modules["torch"]
    with torch.no_grad(), torch.cuda.device(like.device) if like.device.type == "cuda" else nullcontext():
        yield


def _machine(like: Any, target: Target) -> list[Any]:
    """The properties of the machine, besides the call and this package, that a measured choice depends on."""
    device = 0 if is_numpy(like) or like.device.type != "cuda" else like.device.index or 0
    return [str(target), toolchain_stamp(target), *_device(device)]


@lru_cache(maxsize=64)
def _device(index: int) -> tuple[Any, ...]:
    """The name and size of a GPU, and the version of its driver."""
    if not cuda_driver.is_available():
        return ()
    driver = cuda_driver.driver()
    found = driver.properties(index)
    return found.name, found.sm_count, *driver.version()


def _line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".split("\n", 1)[0]


tuner = Tuner()
