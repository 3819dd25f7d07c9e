"""The tuning loop: compiles candidates, checks and measures them under a time limit, and keeps the best."""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from tilelang.env import env
from tilelang.errors import brought, error, register
from tilelang.jit import JITKernel
from tilelang.jit.compare import assert_results_close
from tilelang.jit.compiling import as_here, progress, run_parallel
from tilelang.jit.profiling import as_list, device_of
from tilelang.jit.supply import get_tensor_supply
from tilelang.jit.timing import PASS_MS, clock_for, compared
from tilelang.log import FORMAT, logger
from tilelang.runtime.cache import DiskCache, Entry
from tilelang.runtime.cpus import usable_cpus

from .param import AutotuneResult, ProfileArgs

_INPUTS: ContextVar[tuple[list[Any], ...]] = ContextVar("inputs", default=())  # of the open set_autotune_inputs blocks


def copied(x: Any) -> Any:
    """A copy of a tensor with the same strides (also those of a strided view); anything else unchanged."""
    if hasattr(x, "clone"):
        x = x.detach()
        if 0 in x.stride() or x.is_contiguous():
            return x.clone()
        return x.new_empty_strided(x.size(), x.stride()).copy_(x)
    return x.copy(order="K") if isinstance(x, np.ndarray) else x.copy() if hasattr(x, "copy") else x


class set_autotune_inputs:
    """`with set_autotune_inputs(a, b):` tuned calls inside are measured on copies of these inputs.  It also takes one list."""

    def __init__(self, *args: Any) -> None:
        given: Sequence[Any] = args
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            given = args[0]
        self.inputs = [copied(x) for x in given]

    def __enter__(self) -> set_autotune_inputs:
        _INPUTS.set((*_INPUTS.get(), self.inputs))
        return self

    def __exit__(self, *exc: object) -> None:
        _INPUTS.set(_INPUTS.get()[:-1])


def get_autotune_inputs() -> list[Any] | None:
    """The inputs of this thread's innermost set_autotune_inputs block, or None."""
    return next(reversed(_INPUTS.get()), None)


register("tune-configs", TypeError, "configs of autotune are no list of dicts", 'write configs=[{"block": 64}, {"block": 128}]',
         expected="a list of dicts, or a function that returns one")
register("tune-empty", ValueError, "there is no configuration to tune", expected="at least one configuration",
         found="an empty list")
register("tune-failed", RuntimeError, "no configuration of the tuner compiled, ran and passed its check",
         expected="one configuration that compiles, runs and passes its check")
register("tune-inputs", ValueError, "inputs for measuring candidates cannot be made",
         expected="inputs for every scalar parameter")
register("tune-factor", ValueError, "early_stop_factor is below 1", expected="a factor of at least 1")

disk = DiskCache("autotuner")


class CandidateTimeout(Exception):
    """A candidate exceeded its time limit."""


def guarded(job: Callable[[], Any], seconds: float) -> Any:
    """The result of job(), run in a separate thread.  Raises CandidateTimeout when it exceeds the time limit.

    A thread cannot be killed: a job that hangs keeps its thread, and the tuner goes on without it.
    """
    box: list[Any] = []
    job = as_here(job)

    def run() -> None:
        try:
            box.append((True, job()))
        except BaseException as e:
            box.append((False, e))

    thread = threading.Thread(target=run, daemon=True, name="tilelang-autotune")
    thread.start()
    thread.join(seconds)
    if not box:
        raise CandidateTimeout(f"took longer than {seconds} s")
    good, value = box[0]
    if not good:
        raise brought(value)
    return value


class Measurement:
    """Inputs, reference results and the check, common to all candidates of one tuning."""

    def __init__(self, profile: ProfileArgs, inputs: list[Any] | None) -> None:
        self.profile, self.given = profile, inputs
        self.made: dict[Any, list[Any]] = {}  # by types and shapes: candidates with equal parameters share their inputs
        self.wanted: dict[int, list[Any]] = {}  # by id of the inputs: results of the reference program
        self.copies: dict[Any, list[Any]] = {}  # inputs that candidates write, so that the caller's stay unchanged

    def inputs_for(self, kernel: JITKernel) -> list[Any]:
        """The given inputs, else supplied or generated ones."""
        if self.given is not None:
            return self.given
        params = [p for i, p in enumerate(kernel.params) if i not in kernel.out_idx]
        key = tuple((str(p.dtype), *map(str, p.shape)) for p in params)
        if key not in self.made:
            self.made[key] = self._made(params, kernel)
        return self.made[key]

    def _made(self, params: list[Any], kernel: JITKernel) -> list[Any]:
        if self.profile.supply_prog is not None:
            return list(self.profile.supply_prog(params))
        if any(p.is_scalar() for p in params):
            raise error("tune-inputs", "a kernel with scalar parameters needs inputs to be tuned on",
                        found=f"{sum(p.is_scalar() for p in params)} scalar parameters and no inputs",
                        hint="give them: with set_autotune_inputs(a, b, n): …")
        supply = get_tensor_supply(self.profile.supply_type, device_of(kernel), seed=0)
        return [supply(p) for p in params]

    def check(self, kernel: JITKernel, inputs: list[Any]) -> None:
        """Compare with the reference program.  Raises AssertionError."""
        p = self.profile
        if p.ref_prog is None or p.skip_check:
            return
        if id(inputs) not in self.wanted:
            self.wanted[id(inputs)] = as_list(p.ref_prog(*map(copied, inputs)))
        wanted, got = self.wanted[id(inputs)], as_list(kernel(*map(copied, inputs)))
        if p.manual_check_prog is not None:
            p.manual_check_prog(got, wanted)
        else:
            assert_results_close(got, wanted, p.rtol, p.atol, p.max_mismatched_ratio)

    def prepare(self, kernel: JITKernel) -> Callable[[int], list[float]]:
        """Check a candidate and warm it up.  Returns a function: number of runs -> milliseconds of each."""
        inputs = self.inputs_for(kernel)
        self.check(kernel, inputs)
        names = kernel.written()
        written = tuple(k for k, a in enumerate(kernel.signature.inputs) if a.name in names)
        if (id(inputs), written) not in self.copies:
            self.copies[id(inputs), written] = [copied(x) if k in written else x for k, x in enumerate(inputs)]
        own = self.copies[id(inputs), written]
        measure = self._measured(kernel, own, device_of(kernel))
        kernel(*own)
        for _ in range(min(self.profile.warmup - 1, int(PASS_MS / max(*measure(1), 1e-6)))):
            kernel(*own)
        return measure

    def _measured(self, run: Callable[..., Any], inputs: list[Any], device: str | None) -> Callable[[int], list[float]]:
        clock = clock_for(device or "cpu", backend=self.profile.backend)
        return lambda n: clock.measure(lambda: run(*inputs), n, True)

    def reference_latency(self, kernel: JITKernel) -> float | None:
        """Milliseconds of the reference program, on the inputs of a candidate."""
        if self.profile.ref_prog is None:
            return None
        measure = self._measured(self.profile.ref_prog, list(map(copied, self.inputs_for(kernel))), device_of(kernel))
        return compared(lambda k, n: measure(n), 1, self.profile.rep, device_of(kernel) is None)[0]


def tune(configs: Iterable[dict[str, Any]], compile_one: Callable[[dict[str, Any]], JITKernel], profile: ProfileArgs, *,
         inputs: list[Any] | None = None, key: str | None = None, early_stop: bool = False,
         early_stop_factor: float = 2.0, about: str = "a kernel") -> AutotuneResult:
    """Compile, check and measure all configurations; return the best.

    compile_one: configuration -> kernel.  inputs: tensors to measure on.  key: where the result is kept on disk; None: it is
    not kept.  early_stop: drop a candidate whose first estimate is early_stop_factor times slower than the best.  about: a name
    for messages.  Candidates are compiled in parallel, checked one after another and measured in alternation, each step
    under the time limit; profile.warmup and profile.rep are the most runs of one that may be the best.
    Raises ValueError without configurations, RuntimeError when none succeeds.
    """
    configs = list(configs)
    if not configs:
        raise error("tune-empty", "No configurations to tune: the list is empty", hint="give at least one dict of parameters")
    if early_stop_factor < 1:
        raise error("tune-factor", f"early_stop_factor must be at least 1, found {early_stop_factor}",
                    hint="2.0 drops candidates twice as slow as the best")
    captured = get_autotune_inputs()  # read here, because they belong to this thread and candidates run in others
    inputs = captured if captured is not None else inputs
    cacheable = (key is not None and profile.is_cacheable and captured is None and
                 not env.is_autotune_cache_disabled())
    if cacheable:
        kept = _kept(key or "", compile_one)
        if kept is not None:
            return kept
    measurement = Measurement(profile, inputs)
    with log_file():
        return _best(configs, compile_one, measurement, early_stop_factor if early_stop else math.inf,
                     key if cacheable else None, about)


@contextmanager
def log_file() -> Iterator[None]:
    """A context that also writes the package's log to autotuner.log in TILELANG_CACHE_DIR, if that is writable."""
    path = Path(env.TILELANG_CACHE_DIR) / "autotuner.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError:
        yield
        return
    handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def _best(configs: list[dict[str, Any]], compile_one: Callable[[dict[str, Any]], JITKernel], measurement: Measurement,
          stays: float, key: str | None, about: str) -> AutotuneResult:
    """Compile and measure all candidates; return the fastest.  key: where the result is kept on disk."""
    start, profile = time.perf_counter(), measurement.profile
    kernels, failures = _compile_all(configs, compile_one, profile.timeout, about)
    compiled = {k: kernel for k, kernel in enumerate(kernels) if kernel is not None}

    def failed(k: int, e: Exception) -> None:
        if getattr(e, "kind", "") in ("tune-inputs", "cuda-missing", "hip-missing"):
            raise e
        failures[str(configs[k])] = f"{type(e).__name__}: {e}"
        logger.warning("tuning: configuration %s is skipped: %s", configs[k], failures[str(configs[k])].splitlines()[0])

    times = _times(compiled, measurement, stays, failed, about)
    if not times:
        raise error("tune-failed", "Auto-tuning failed: No configuration successfully compiled and passed "
                    "benchmarking/validation.",
                    found=f"{len(failures)} that failed", notes=[(None, f"{c}: {w}") for c, w in list(failures.items())[:5]],
                    hint="compile one configuration by itself to see its error in full")
    for k, ms in times.items():
        logger.info("tuning: %s takes %.4f ms", configs[k], ms)
    best = min(times, key=lambda k: times[k])
    logger.info("tuned %s in %.1f s: %s is the best with %.4f ms; of %d configurations %d were measured, %d failed", about,
                time.perf_counter() - start, configs[best], times[best], len(configs), len(times), len(configs) - len(times))
    result = _result(compiled[best], times[best], configs[best], measurement.reference_latency(compiled[best]))
    result.failures = failures
    if key is not None and _is_json(result.config):
        disk.store(key, Entry({"config": result.config, "latency": result.latency}))
    return result


def _times(kernels: dict[int, JITKernel], measurement: Measurement, stays: float, failed: Callable[[int, Exception], None],
           about: str) -> dict[int, float]:
    """Milliseconds of the candidates that run and pass the check.  failed: told of the others."""
    limit, runs, wrong = measurement.profile.timeout, {}, set()
    with progress(f"measuring {about}", len(kernels)) as step:
        for k, kernel in kernels.items():
            try:
                runs[k] = guarded(functools.partial(measurement.prepare, kernel), limit)
            except Exception as e:
                failed(k, e)
            step()
        able = list(runs)

        def measure(at: int, n: int) -> list[float]:
            try:
                return list(guarded(functools.partial(runs[able[at]], n), limit))
            except Exception as e:
                failed(able[at], e)
                wrong.add(at)
                return [math.inf]

        on_host = not any(map(device_of, kernels.values()))
        found = compared(measure, len(able), measurement.profile.rep, on_host, stays) if able else {}
    return {able[at]: ms for at, ms in found.items() if at not in wrong}


def _result(kernel: Any, latency: float, config: dict[str, Any], ref_latency: float | None) -> AutotuneResult:
    return result_of(kernel.update_tuner_result(latency, config, ref_latency))


def result_of(kernel: JITKernel) -> AutotuneResult:
    """The result of tuning that a kernel carries."""
    return AutotuneResult(kernel.latency, kernel.config, kernel.ref_latency, kernel.get_kernel_source(), kernel.prim_func,
                          kernel)


def _compile_all(configs: list[dict[str, Any]], compile_one: Callable[[dict[str, Any]], JITKernel],
                 timeout: float, about: str) -> tuple[list[JITKernel | None], dict[str, str]]:
    failures: dict[str, str] = {}

    def job(config: dict[str, Any]) -> JITKernel | None:
        try:
            return guarded(lambda: compile_one(config), timeout)
        except Exception as e:
            failures[str(config)] = f"{type(e).__name__}: {e}"
            logger.warning("tuning: configuration %s does not compile: %s", config, str(e).split("\n", 1)[0])
            return None

    workers = min(len(configs), env.tuning_workers(usable_cpus()))
    with progress(f"compiling {about}", len(configs)) as step:
        return run_parallel([lambda c=c: job(c) for c in configs], workers, False, step), failures


def _kept(key: str, compile_one: Callable[[dict[str, Any]], JITKernel]) -> AutotuneResult | None:
    entry = disk.load(key)
    if entry is None:
        return None
    config, latency = entry.meta["config"], entry.meta["latency"]
    return _result(compile_one(config), latency, config, None)


def _is_json(x: Any) -> bool:
    try:
        return json.loads(json.dumps(x)) == x
    except (TypeError, ValueError):
        return False
