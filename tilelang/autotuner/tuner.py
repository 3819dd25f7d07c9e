"""The tuning loop: compiles candidates, checks and measures them under a time limit, and keeps the best."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tilelang.env import env
from tilelang.errors import brought, error, register
from tilelang.jit import JITKernel
from tilelang.jit.compare import is_float8_dtype, torch_assert_close
from tilelang.jit.compiling import run_parallel
from tilelang.jit.supply import get_tensor_supply
from tilelang.jit.timing import do_bench
from tilelang.log import FORMAT, logger
from tilelang.runtime.cache import DiskCache, Entry
from tilelang.runtime.cpus import usable_cpus

from .capture import get_autotune_inputs
from .param import AutotuneResult, ProfileArgs

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
        self.made: list[Any] | None = None
        self.ref_latency: float | None = None
        self.reference: Any = None

    def inputs_for(self, kernel: JITKernel) -> list[Any]:
        """The given inputs, else supplied or generated ones."""
        if self.given is not None:
            return self.given
        if self.made is not None and self.profile.cache_input_tensors:
            return self.made
        params = [p for i, p in enumerate(kernel.params) if i not in kernel.out_idx]
        if self.profile.supply_prog is not None:
            self.made = list(self.profile.supply_prog(params))
            return self.made
        if any(p.is_scalar() for p in params):
            raise error("tune-inputs", "a kernel with scalar parameters needs inputs to be tuned on",
                        found=f"{sum(p.is_scalar() for p in params)} scalar parameters and no inputs",
                        hint="give them: with set_autotune_inputs(a, b, n): …")
        supply = get_tensor_supply(self.profile.supply_type, device_of(kernel), seed=0)
        self.made = [supply(p) for p in params]
        return self.made

    def check(self, kernel: JITKernel, inputs: list[Any]) -> None:
        """Compare with the reference program.  Raises AssertionError."""
        p = self.profile
        if p.ref_prog is None or p.skip_check:
            return
        wanted = _list(p.ref_prog(*[_copy(x) for x in inputs]))
        got = _list(kernel(*[_copy(x) for x in inputs]))
        if p.manual_check_prog is not None:
            p.manual_check_prog(got, wanted)
            return
        assert len(got) == len(wanted), f"{len(got)} outputs, the reference gives {len(wanted)}"
        for a, b in zip(got, wanted):
            if is_float8_dtype(a.dtype):
                a, b = a.float(), b.float()
            torch_assert_close(a, b, rtol=p.rtol, atol=p.atol, max_mismatched_ratio=p.max_mismatched_ratio)

    def measure(self, kernel: JITKernel, baseline: float | None) -> float:
        """Check a candidate, then measure it: milliseconds."""
        inputs = self.inputs_for(kernel)
        self.check(kernel, inputs)
        names = kernel.written()  # copied, so that the caller's tensors and the next candidate's inputs stay unchanged
        written = {k for k, a in enumerate(kernel.signature.inputs) if a.name in names}
        inputs = [_copy(x) if k in written else x for k, x in enumerate(inputs)]
        bench = lambda fn: do_bench(fn, _n_warmup=self.profile.warmup, _n_repeat=self.profile.rep,  # noqa: E731
                                    backend=self.profile.backend, device=device_of(kernel) or "cpu",
                                    early_stop_baseline=baseline, return_mode="median")
        if self.profile.ref_prog is not None and self.ref_latency is None:
            ref = self.profile.ref_prog
            self.ref_latency = bench(lambda: ref(*inputs))
        return bench(lambda: kernel(*inputs))


def device_of(kernel: JITKernel) -> str | None:
    """The device of a kernel's tensors: "cuda", or None for the CPU."""
    return "cuda" if kernel.target.is_cuda and kernel.execution_backend not in ("tile", "simulator") else None


def _list(x: Any) -> list[Any]:
    return [] if x is None else list(x) if isinstance(x, (list, tuple)) else [x]


def _copy(x: Any) -> Any:
    """A copy of a tensor with the same strides (also those of a strided view); anything else unchanged."""
    if hasattr(x, "clone"):
        x = x.detach()
        if 0 in x.stride() or x.is_contiguous():
            return x.clone()
        return x.new_empty_strided(x.size(), x.stride()).copy_(x)
    return x.copy(order="K") if isinstance(x, np.ndarray) else x.copy() if hasattr(x, "copy") else x


def tune(configs: Iterable[dict[str, Any]], compile_one: Callable[[dict[str, Any]], JITKernel], profile: ProfileArgs, *,
         inputs: list[Any] | None = None, key: str | None = None, early_stop: bool = False,
         early_stop_factor: float = 2.0) -> AutotuneResult:
    """Compile, check and measure all configurations; return the best.

    compile_one: configuration -> kernel.  inputs: tensors to measure on.  key: where the result is kept on disk; None: it is
    not kept.  early_stop: drop a candidate whose first estimate is early_stop_factor times slower than the best.  Candidates
    are compiled in parallel and run one after another, each under the time limit.
    Raises ValueError without configurations, RuntimeError when none succeeds.
    """
    configs = list(configs)
    if not configs:
        raise error("tune-empty", "No configurations to tune: the list is empty",
                    hint="give at least one dict of parameters")
    if early_stop_factor < 1:
        raise error("tune-factor", f"early_stop_factor must be at least 1, found {early_stop_factor}",
                    found=str(early_stop_factor),
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
        return _best(configs, compile_one, profile, measurement, early_stop, early_stop_factor,
                     key if cacheable else None)


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


def _best(configs: list[dict[str, Any]], compile_one: Callable[[dict[str, Any]], JITKernel], profile: ProfileArgs,
          measurement: Measurement, early_stop: bool, early_stop_factor: float, key: str | None) -> AutotuneResult:
    """Compile and measure all candidates; return the fastest.  key: where the result is kept on disk."""
    kernels, failures = _compile_all(configs, compile_one, profile.timeout)
    best: AutotuneResult | None = None
    for config, kernel in zip(configs, kernels):
        if kernel is None:
            continue
        baseline = best.latency * early_stop_factor if early_stop and best is not None and best.latency else None
        try:
            latency = guarded(functools.partial(measurement.measure, kernel, baseline), profile.timeout)
        except Exception as e:
            if getattr(e, "kind", "") == "tune-inputs":
                raise
            failures[str(config)] = f"{type(e).__name__}: {e}"
            logger.warning("tuning: configuration %s is skipped: %s", config, failures[str(config)].splitlines()[0])
            continue
        logger.info("tuning: %s takes %.4f ms", config, latency)
        if best is None or best.latency is None or latency < best.latency:
            best = AutotuneResult(latency, config, measurement.ref_latency, kernel.get_kernel_source(),
                                  kernel.prim_func, kernel)
    if best is None or best.kernel is None:
        raise error("tune-failed", "Auto-tuning failed: No configuration successfully compiled and passed "
                    "benchmarking/validation.",
                    found=f"{len(failures)} that failed", notes=[(None, f"{c}: {w}") for c, w in list(failures.items())[:5]],
                    hint="compile one configuration by itself to see its error in full")
    best.failures = failures
    best.kernel.update_tuner_result(best.latency or 0.0, best.config or {}, best.ref_latency)
    if key is not None and _is_json(best.config):
        disk.store(key, Entry({"config": best.config, "latency": best.latency}))
    return best


def _compile_all(configs: list[dict[str, Any]], compile_one: Callable[[dict[str, Any]], JITKernel],
                 timeout: float) -> tuple[list[JITKernel | None], dict[str, str]]:
    failures: dict[str, str] = {}

    def job(config: dict[str, Any]) -> JITKernel | None:
        try:
            return guarded(lambda: compile_one(config), timeout)
        except Exception as e:
            failures[str(config)] = f"{type(e).__name__}: {e}"
            logger.warning("tuning: configuration %s does not compile: %s", config, str(e).split("\n", 1)[0])
            return None

    workers = min(len(configs), env.tuning_workers(usable_cpus()))
    return run_parallel([lambda c=c: job(c) for c in configs], workers, False), failures


def _kept(key: str, compile_one: Callable[[dict[str, Any]], JITKernel]) -> AutotuneResult | None:
    entry = disk.load(key)
    if entry is None:
        return None
    config, latency = entry.meta["config"], entry.meta["latency"]
    kernel = compile_one(config)
    kernel.update_tuner_result(latency, config, None)
    return AutotuneResult(latency, config, None, kernel.get_kernel_source(), kernel.prim_func, kernel)


def _is_json(x: Any) -> bool:
    try:
        return json.loads(json.dumps(x)) == x
    except (TypeError, ValueError):
        return False
