"""tilelang.compile, par_compile and first_fitting: from programs to kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
import sys
import threading
import time

from tilelang.errors import InternalError, TileLangError, brought, error, for_user, named_arguments
from tilelang.ir import Launch, walk
from tilelang.log import logger, phase
from tilelang.runtime.cpus import usable_cpus
from tilelang.target import Target
from tilelang.transform.framework.scope import PassContext, current_config

from .artifact import program_of
from .kernel import JITKernel, compile_request
from .requests import check_host, make_request

_PATIENCE = 1.0  # seconds until progress is shown


@named_arguments("compile-option")
def compile(func: Any = None, out_idx: Any = None, execution_backend: str | None = None,
            target: Any = None, target_host: Any = None, verbose: bool | None = None, pass_configs: Any = None,
            compile_flags: Any = None) -> JITKernel:
    """Compile a PrimFunc.

    out_idx: int or list of parameters that become return values.  execution_backend, target, verbose: None takes the
    environment's default.  pass_configs: PassConfigKey or string -> value, over those annotated in the function.
    compile_flags: options of the device compiler, after the annotated ones.
    Raises AssertionError when func is no PrimFunc, ValueError for a bad out_idx or backend, AttributeError for unknown
    pass configs, and the compiler's errors at the user's line.
    """
    try:
        check_host(target_host)
        with phase("compile"):
            kernel = compile_request(make_request(func, out_idx, execution_backend, target, verbose, pass_configs,
                                                  compile_flags))
    except (TileLangError, InternalError) as e:
        raise for_user(e)  # noqa: B904 - for_user decides what goes with it
    kernel.target_host = target_host
    return kernel


def par_compile(funcs: Iterable[Any], out_idx: Any = None, execution_backend: str | None = None, target: Any = None,
                target_host: Any = None, verbose: bool | None = None, pass_configs: Any = None,
                compile_flags: Any = None, num_workers: int | None = None,
                ignore_error: bool = False) -> list[JITKernel | None]:
    """Compile many programs in a thread pool; results in input order.

    num_workers: min(number of programs, usable CPUs + 1) when None.  ignore_error: a failed program gives None and a
    warning instead of its exception.
    """
    if not isinstance(funcs, Iterable):
        raise error("compile-not-a-program", f"par_compile takes «a list of PrimFuncs», found a {type(funcs).__name__}",
                    hint="write par_compile([f, g])")

    def one(func: Any) -> JITKernel:
        return compile(func, out_idx, execution_backend, target, target_host, verbose, pass_configs, compile_flags)

    return run_parallel([lambda f=f: one(f) for f in funcs], num_workers, ignore_error)


def as_here(job: Callable[[], Any]) -> Callable[[], Any]:
    """The job for another thread: under the target and the pass configs of the `with` blocks that are open in this one."""
    target, config = Target.current(), current_config()

    def run() -> Any:
        with nullcontext() if target is None else target, PassContext(config=config):
            return job()

    return run


def run_parallel(jobs: list[Any], num_workers: int | None, ignore_error: bool,
                 step: Callable[[], None] | None = None) -> list[Any]:
    """Run functions without arguments in a thread pool and return their results.  step: called for each finished job, instead
    of a progress bar."""
    if num_workers is not None and (isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1):
        raise error("compile-option", f"num_workers is a positive number of threads, found {num_workers!r}",
                    expected="a positive integer", hint="leave it out for all processors")
    if not jobs:
        return []
    from concurrent.futures import ThreadPoolExecutor, as_completed  # 3 ms

    workers = num_workers or min(len(jobs), usable_cpus() + 1)  # one waits for its compiler, which works without the GIL
    shown = progress("compiling", len(jobs)) if step is None else nullcontext(step)
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool, shown as finished:
        futures = [pool.submit(as_here(job)) for job in jobs]
        for _ in as_completed(futures):
            finished()
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


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """A context that gives a function to call after each of `total` steps.  It shows "text 3/9" and a bar on a terminal when
    that takes long."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # 18 ms
    from rich.progress import MofNCompleteColumn, Progress  # 38 ms

    bar = Progress(*Progress.get_default_columns()[:2], MofNCompleteColumn(), console=Console(stderr=True), transient=True)
    task, start, lock = bar.add_task(text, total=total), time.perf_counter(), threading.Lock()

    def step() -> None:
        with lock:
            if time.perf_counter() - start > _PATIENCE:
                bar.start()
            bar.advance(task)

    try:
        yield step
    finally:
        bar.stop()


def first_fitting(program: Callable[..., Any], first: Any, *others: Any, target: Any = None) -> Any:
    """The first of some sizes with which the shared tiles of a program fit into a block of the target.

    program: a function of the sizes that gives a PrimFunc; it is traced, not compiled.  first, others: sizes, the preferred
    first: a tuple holds its arguments, a dict its keyword arguments, anything else is its only argument.  target: as
    tilelang.compile takes it.  Each shared buffer counts once, since a loop that has no room for all its stages loses some, and
    buffers of which one is used after the other share bytes.
    Where none fits it is the last one: the error of its compilation says what is missing.  Raises compile-not-a-program.

    Example:
        bm, bn = tilelang.first_fitting(lambda bm, bn: attention(4096, 128, bm, bn), (128, 128), (64, 64), target="gfx942")
    """
    for size in (first, *others):
        func = program(*size) if isinstance(size, tuple) else program(**size) if isinstance(size, dict) else program(size)
        if program_of(func) is None:
            raise error("compile-not-a-program", "first_fitting takes «a function of sizes that gives a PrimFunc», not one "
                        f"that gives {type(func).__name__}", found=f"a {type(func).__name__}",
                        hint="of a function under tilelang.jit: first_fitting(f.get_tir, …)")
        request = make_request(func, target=target)
        if max(map(_shared_bytes, walk(request.func.body, Launch)), default=0) <= request.target.max_shared_bytes:
            break
    return size


def _shared_bytes(launch: Launch) -> int:
    """Bytes of the shared buffers of a launch, each once."""
    from tilelang.transform.analysis.shared_spans import place  # with the next 7 ms, which kernels of the cache do not need
    from tilelang.transform.memory.plan_shared_memory import spans_of

    return place(spans_of(launch), None)
