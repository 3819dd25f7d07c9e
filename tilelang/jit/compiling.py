"""tilelang.compile: from a program to a kernel, through the memory and disk caches."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tilelang.env import env
from tilelang.errors import InternalError, TileLangError, brought, error, register, told
from tilelang.ir.printer import to_text
from tilelang.log import logger
from tilelang.runtime.cache import DiskCache, compiler_stamp, digest
from tilelang.runtime.signature import OUT_IDX_HINT, resolve_out_idx
from tilelang.target import Target
from tilelang.log import phase
from tilelang.transform.framework.config import normalize_config
from tilelang.transform.framework.observe import is_watched
from tilelang.transform.framework.scope import current_config

from .artifact import KERNEL_SEPARATOR, Artifact, Request, program_of
from .building import INTERPRETED, build, toolchain_stamp
from .failures import internal
from .hooks import has_hook
from .kernel import JITKernel

register("compile-not-a-program", AssertionError, "tilelang.compile is given something that is not a PrimFunc",
         "decorate the function with @T.prim_func and pass what that gives",
         expected="a PrimFunc")
register("compile-option", TypeError, "an option of tilelang.compile of another type", "leave it out",
         "a value of the option's type")
register("backend-name", ValueError, "an execution backend that the target does not have",
         expected="an execution backend of the target")

SIMULATOR = "simulator"
BACKENDS = {"cuda": ("tvm_ffi", "nvrtc", "cython", *INTERPRETED), "cpu": ("tvm_ffi", "cython", "tile")}


def resolve_target(target: Any, backend: Any) -> tuple[Target, str]:
    """(target, execution backend) of what the user gave; None means the environment's default.

    target="simulator" is the device simulator for the default CUDA architecture, and so is the backend of that name where
    the target is left to be found and there is no GPU.
    Raises AssertionError for an unknown target, ValueError for a backend the target does not have.
    """
    if isinstance(target, str) and target == SIMULATOR:
        target, backend = "cuda", SIMULATOR
    if target is None:
        target = env.get_default_target()
    resolved = target if isinstance(target, Target) else Target(target)
    name = backend if backend is not None else env.get_default_execution_backend()
    if name == SIMULATOR and target == "auto" and not resolved.is_cuda and Target.current() is None:
        resolved = Target("cuda")
    if not isinstance(name, str):
        raise error("compile-option", f"execution_backend must be a string, found {type(name).__name__}",
                    expected="the name of an execution backend", found=type(name).__name__)
    allowed = BACKENDS["cuda" if resolved.is_cuda else "cpu"]
    name = name.lower()
    if name in ("auto", "dlpack"):
        name = allowed[0]
    if name not in allowed:
        raise error("backend-name", f"Invalid execution backend '{name}' for target '{resolved.kind}'. Allowed: "
                    f"{', '.join(allowed)}. Tip: use execution_backend='auto'.",
                    expected=f"one of {', '.join(allowed)}", found=repr(name), hint="leave execution_backend out"
                    if name != SIMULATOR else "the simulator runs GPU programs: target=\"cuda\", or a dict with the arch")
    return resolved, name


def switch(value: Any, name: str) -> bool:
    """An option that is on or off.  Raises compile-option for what is no bool, 0 or 1."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise error("compile-option", f"{name} is True or False, found {value!r}", expected="True or False", found=repr(value))


def flag_list(flags: Any) -> tuple[str, ...]:
    """Compiler options from None, a string or a list of strings."""
    if flags is None:
        return ()
    if isinstance(flags, str):
        return tuple(shlex.split(flags))
    if not isinstance(flags, (list, tuple)) or not all(isinstance(f, str) for f in flags):
        raise error("compile-option", f"compile_flags are a string or a list of strings, found {type(flags).__name__} "
                    f"{flags!r}", expected="a string or a list of strings", found=f"{type(flags).__name__} {flags!r}")
    return tuple(flags)


def check_host(target_host: Any) -> Any:
    """target_host as it is, where it names a CPU target (the host side is always compiled for this machine's CPU).

    Raises AssertionError for anything else.
    """
    if target_host is not None and target_host != "auto":
        host = target_host if isinstance(target_host, Target) else Target(target_host)
        if host.is_cuda:
            raise error("target-unknown", f"Target {host} is not supported as target_host", expected="llvm, c or cpu",
                        found=str(host), hint="leave target_host out")
    return target_host


def make_request(func: Any, out_idx: Any = None, execution_backend: Any = None, target: Any = None,
                 verbose: bool | None = None, pass_configs: Any = None, compile_flags: Any = None) -> Request:
    """Check and normalise the arguments of compile."""
    given, func = func, program_of(func)
    if func is None:
        raise error("compile-not-a-program", f"target function must be a PrimFunc but got {type(given)}",
                    found=type(given).__name__,
                    hint="decorate the function with @T.prim_func" if callable(given) else "")
    if isinstance(out_idx, (tuple, str, float)):
        out_idx = _refuse_out_idx(out_idx)
    env.get_compile_timeout_seconds()  # a bad value is told before anything is compiled
    resolved, backend = resolve_target(target, execution_backend)
    config = {**current_config(), **_as_dict(func.attr("tilelang_pass_configs")), **_as_dict(pass_configs)}
    config = normalize_config(config)
    flags = flag_list(func.attr("tilelang_compile_flags")) + flag_list(compile_flags)
    resolve_out_idx(func, out_idx)
    return Request(func, out_idx, resolved, backend, config, flags,
                   env.get_default_verbose() if verbose is None else switch(verbose, "verbose"), given)


def _refuse_out_idx(out_idx: Any) -> Any:
    raise error("out-idx-type", f"result_idx should be a list of integers, found {out_idx!r}",
                found=repr(out_idx), hint=OUT_IDX_HINT)


def _as_dict(config: Any) -> dict[Any, Any]:
    if config is None:
        return {}
    if isinstance(config, (str, bytes)) or not isinstance(config, (Mapping, tuple, list)) and not hasattr(config, "items"):
        raise _no_dict(config)
    try:
        return dict(config) if isinstance(config, (Mapping, tuple, list)) else dict(config.items())
    except (TypeError, ValueError):
        raise _no_dict(config) from None


def _no_dict(config: Any) -> Exception:
    return error("compile-option", f"pass_configs is a dict of keys and values, found {config!r}",
                 expected="a dict of keys and values", found=repr(config))


def cache_key(request: Request) -> str:
    """SHA-256 over everything the compiled artifact depends on."""
    out = resolve_out_idx(request.func, request.out_idx)
    return digest(["kernel", compiler_stamp(), to_text(request.func), request.func.name, list(out), str(request.target),
                   request.backend in INTERPRETED and request.backend,
                   {str(k): v for k, v in request.config.items()}, list(request.flags),
                   toolchain_stamp(request.target), request.target.is_cuda and env.is_yield_hints_enabled()])


_memory: dict[tuple[str, str], JITKernel] = {}
_key_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()
disk = DiskCache("kernels")


def hook_kind(request: Request) -> str:
    """Which source hook a request meets; edited sources are never cached."""
    return "cuda" if request.target.is_cuda else "c"


def clear_memory() -> None:
    """Forget the kernels of this process."""
    with _guard:
        _memory.clear()
        _key_locks.clear()


def is_cached(request: Request) -> bool:
    """Whether a request may come from a cache: not with sources that a hook edits, nor while somebody watches passes."""
    return env.is_cache_enabled() and not has_hook(hook_kind(request)) and not is_watched()


def produce(request: Request, key: str | None = None) -> tuple[Artifact, str]:
    """(artifact, where it came from: "disk" or "compiled")."""
    caching = is_cached(request) and request.backend not in INTERPRETED
    if caching:
        key = key or cache_key(request)
        entry = disk.load(key)
        if entry is not None:
            try:
                artifact = Artifact.from_entry(entry)
            except (KeyError, UnicodeDecodeError):
                logger.warning("cache entry %s is of an unknown form: it is rebuilt", key)
            else:
                keep_sources(request, artifact)
                return artifact, "disk"
    artifact = _built(request)
    keep_sources(request, artifact)
    if caching and key is not None:
        disk.store(key, artifact.to_entry())
    return artifact, "compiled"


def _built(request: Request) -> Artifact:
    """The artifact of a request.  A fault of the compiler is an InternalError with a report."""
    try:
        return build(request)
    except Exception as e:
        fault = internal(request, "the compiler", e)
        if fault is None:
            raise
        raise fault from e


def keep_sources(request: Request, artifact: Artifact) -> None:
    """Write what the device compiler got and made: into the folder of cuda.kernels_output_dir, and into TILELANG_TMP_DIR
    when TILELANG_CLEANUP_TEMP_FILES is 0."""
    folders = [request.config.get("cuda.kernels_output_dir") or "",
               "" if env.should_cleanup_temp_files() else env.TILELANG_TMP_DIR]
    if artifact.kind != "cuda" or not any(folders):
        return
    sources = artifact.kernel_source.split(KERNEL_SEPARATOR)
    for folder in (Path(f) for f in folders if f):
        folder.mkdir(parents=True, exist_ok=True)
        for facts, source in zip(artifact.meta["kernels"], sources):
            (folder / f"{facts['name']}.cu").write_text(source, encoding="utf-8")
            (folder / f"{facts['name']}.cubin").write_bytes(artifact.files[facts["file"]])


def compile_request(request: Request) -> JITKernel:
    """The kernel of a request: from memory, from disk, or compiled now."""
    if not is_cached(request):
        return _compile_now(request, None)
    with phase("cache key"):
        key = cache_key(request)
    name = (key, request.backend)
    kernel = _memory.get(name)
    if kernel is not None:
        return kernel
    with _guard:
        lock = _key_locks.setdefault(key, threading.Lock())
    with lock:  # threads that want the same kernel wait for one compilation
        kernel = _memory.get(name)
        if kernel is None:
            kernel = _memory[name] = _compile_now(request, key)
    return kernel


def recompiled(request: Request, tuned: tuple[Any, Any, Any]) -> JITKernel:
    """The kernel that was pickled in another process: of the same program and settings, from the cache where it is there.

    tuned: its latency in ms, configuration and reference latency, where it was tuned.
    """
    kernel = compile_request(request)
    if tuned[0] is not None:
        kernel.update_tuner_result(*tuned)
    return kernel


def _compile_now(request: Request, key: str | None) -> JITKernel:
    say = request.verbose or env.is_print_on_compilation_enabled()
    name = request.func.name
    start = time.perf_counter()
    if say:
        logger.info("TileLang begins to compile kernel `%s` with `out_idx=%s`", name, request.out_idx)
    artifact, source = produce(request, key)
    kernel = JITKernel(_request=request, _artifact=artifact)
    if say:
        logger.info("TileLang completes to compile kernel `%s`", name)
    _debug(kernel, source, (time.perf_counter() - start) * 1e3)
    return kernel


def _debug(kernel: JITKernel, source: str, ms: float) -> None:
    level = env.TILELANG_DEBUG
    if level >= 1:
        print(f"[tilelang] {kernel.signature.name} for {kernel.target}: "
              f"{'cache hit on disk' if source == 'disk' else 'compiled'} in {ms:.1f} ms")
    if level >= 2:
        print(kernel.report())
        print(kernel.get_kernel_source())
    if level >= 5:
        kernel.show_sass() if kernel.target.is_cuda else None


def compile(func: Any = None, out_idx: Any = None, execution_backend: str | None = None,
            target: Any = None, target_host: Any = None, verbose: bool | None = None, pass_configs: Any = None,
            compile_flags: Any = None) -> JITKernel:
    """Compile a PrimFunc.

    out_idx: int or list of parameters that become return values.  execution_backend, target, verbose: None takes the
    environment's default.  pass_configs: PassConfigKey or string -> value, over those annotated in the function.
    compile_flags: options of the device compiler, after the annotated ones.
    Raises AssertionError when func is no PrimFunc, ValueError for a bad out_idx or backend, AttributeError for unknown
    pass configs, and whatever the compiler refuses, at the user's line.
    """
    try:
        check_host(target_host)
        with phase("compile"):
            kernel = compile_request(make_request(func, out_idx, execution_backend, target, verbose, pass_configs,
                                                  compile_flags))
    except (TileLangError, InternalError) as e:
        raise told(e)  # noqa: B904 - told decides what goes with it
    kernel.target_host = target_host
    return kernel


def par_compile(funcs: Iterable[Any], out_idx: Any = None, execution_backend: str | None = None, target: Any = None,
                target_host: Any = None, verbose: bool | None = None, pass_configs: Any = None,
                compile_flags: Any = None, num_workers: int | None = None,
                ignore_error: bool = False) -> list[JITKernel | None]:
    """Compile many programs in a thread pool; results in input order.

    num_workers: min(number of programs, usable CPUs) when None.  ignore_error: a failed program gives None and a
    warning instead of its exception.
    """
    if not isinstance(funcs, Iterable):
        raise error("compile-not-a-program", f"par_compile takes a list of PrimFuncs, found a {type(funcs).__name__}",
                    expected="a list of PrimFuncs", found=f"a {type(funcs).__name__}", hint="write par_compile([f, g])")

    def one(func: Any) -> JITKernel:
        return compile(func, out_idx, execution_backend, target, target_host, verbose, pass_configs, compile_flags)

    return run_parallel([lambda f=f: one(f) for f in funcs], num_workers, ignore_error)


def run_parallel(jobs: list[Any], num_workers: int | None, ignore_error: bool,
                 step: Callable[[], None] | None = None) -> list[Any]:
    """Results of argument-less jobs, run in a thread pool with a progress bar.  step: called for each that is done, instead
    of the bar."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from tilelang.runtime.cpus import usable_cpus

    if num_workers is not None and (isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1):
        raise error("compile-option", f"num_workers is a positive number of threads, found {num_workers!r}",
                    expected="a positive integer", found=repr(num_workers), hint="leave it out for all processors")
    if not jobs:
        return []
    workers = num_workers or min(len(jobs), usable_cpus())
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        futures = [pool.submit(job) for job in jobs]
        if step is None:
            _progress(futures)
        else:
            for _ in as_completed(futures):
                step()
        out = []
        for k, future in enumerate(futures):
            try:
                out.append(future.result())
            except Exception as e:
                if not ignore_error:
                    raise brought(e) from e.__cause__
                logger.warning("compilation %d failed: %s", k, e)
                out.append(None)
    return out


def _progress(futures: list[Any]) -> None:
    """A bar while the jobs run, where tqdm is installed and somebody is looking."""
    import sys
    from concurrent.futures import as_completed

    try:
        from tqdm import tqdm
    except ImportError:
        return
    for _ in tqdm(as_completed(futures), total=len(futures), desc="Parallel Compiling",
                  disable=not sys.stderr.isatty()):
        pass
