"""What really ran inside a test: executions that came to their end, and unavailable_names that the test caught.

`install()` puts a watcher around the one place where each execution ends; `taken()` is what came to its end since `begin()`.
Calls that the package makes of its own printers and compilers do not count: what a cache answers would be missing then.
Programs run in other processes are not seen.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

# tile: the tile meaning ended.  simulator: a lowered program ended on the device simulator.  cpu: native code returned.
# cuda: NVRTC assembled the CUDA text.  printed: CUDA text was printed, and not assembled.  gpu: a launch on a GPU returned.
# refusal: the test caught an error of a named kind.  error: it caught another exception of a call into the package.
# no-tile, no-simulator, no-cpu, no-cuda: the refusal was by this execution, which was asked for the program.
EXECUTIONS = ("tile", "simulator", "cpu", "cuda", "printed", "gpu", "no-tile", "no-simulator", "no-cpu", "no-cuda", "refusal",
              "error")

_done: set[str] = set()


def completed(execution: str) -> None:
    """An execution came to its end (for harnesses that run native code by themselves)."""
    assert execution in EXECUTIONS, execution
    _done.add(execution)


def caught(error: BaseException) -> None:
    """A test caught this error and takes it for a refusal."""
    from tilelang.errors import TileLangError

    if isinstance(error, TileLangError):
        completed("refusal")
        by = getattr(error, "refused_by", "")
        if by:
            completed(f"no-{by}")
    elif _of_the_package(error):
        completed("error")


def begin() -> None:
    """Forget what was done before."""
    _done.clear()


def taken() -> tuple[str, ...]:
    """What was done since `begin`, in the order of EXECUTIONS."""
    return tuple(e for e in EXECUTIONS if e in _done and not (e == "printed" and "cuda" in _done))


def _of_the_package(error: BaseException) -> bool:
    """Whether an exception came out of the package; errors of compiled host code have no frames but the caller's."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "tilelang":
            return True
        trace = trace.tb_next
    return False


def _replace(module: Any, name: str, make: Any) -> None:
    """Put make(original) where the original stands, in every module of the package that holds it by name."""
    original = getattr(module, name)
    if getattr(original, "_completed", False):
        return
    changed = _as_of(module, original, make)
    for m in list(sys.modules.values()):
        if getattr(m, "__name__", "").startswith("tilelang") and vars(m).get(name) is original:
            setattr(m, name, changed)


def _as_of(module: Any, original: Any, make: Any) -> Any:
    """make(original) as if the module defined it: errors look for the user's line by the names of frames' modules."""
    made = make(original)
    scope = {"__name__": module.__name__, "__builtins__": __builtins__, "_done": _done, "sys": sys}
    changed = functools.wraps(original)(types.FunctionType(made.__code__, scope, made.__name__, None, made.__closure__))
    changed._completed = True
    return changed


def _counted(execution: str, own: bool = True) -> Any:
    """A wrapper that counts calls which return.  own: also those that the package makes itself."""
    def make(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if own or not sys._getframe(1).f_globals.get("__name__", "").startswith("tilelang"):
                _done.add(execution)
            return out

        return run

    return make


def _interpreted(execution: str) -> Any:
    """A simulator: runs that return, and programs that it does not interpret."""
    def make(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                out = original(*args, **kwargs)
            except Exception as e:
                if getattr(e, "kind", "") in ("eval-unsupported", "sim-unsupported"):
                    e.refused_by = execution  # type: ignore[attr-defined]
                raise
            _done.add(execution)
            return out

        return run

    return make


def _kernels(original: Any) -> Any:
    """compile_request: a CUDA kernel has been assembled, now or when the cache was filled; or a program is refused."""
    def compile_request(request: Any) -> Any:
        cuda = "cuda" if request.target.is_cuda else "cpu"
        try:
            kernel = original(request)
        except Exception as e:
            e.refused_by = request.backend if request.backend in ("tile", "simulator") else cuda  # type: ignore[attr-defined]
            raise
        if kernel._built.kind == "cuda":
            _done.add("cuda")
        return kernel

    return compile_request


def _sources(original: Any) -> Any:
    """source_of: text for a target, nothing compiled."""
    def source_of(request: Any) -> Any:
        text = original(request)
        if request.target.is_cuda:
            _done.add("printed")
        return text

    return source_of


def _entries(original: Any) -> Any:
    """load: calls of native code that return."""
    def watched(call: Any, execution: str) -> Any:
        return call and _as_of(sys.modules["tilelang.jit.loading"], call, _counted(execution))

    def load(artifact: Any, *args: Any) -> Any:
        entry = original(artifact, *args)
        where = {"cpu": "cpu", "cuda": "gpu"}.get(artifact.kind)
        if where is not None:
            entry.call, entry.full = watched(entry.call, where), watched(entry.full, where)
        return entry

    return load


def install() -> None:
    """Watch all executions of this process.  Before tests import the functions that are watched."""
    import pytest

    import tilelang.codegen.cuda.printer
    import tilelang.jit.kernel
    import tilelang.jit.decorator
    import tilelang.jit.loading
    import tilelang.jit.lowering
    import tilelang.runtime.nvrtc
    import tilelang.simulator

    _replace(tilelang.simulator.reference.run, "run_tile", _interpreted("tile"))
    _replace(tilelang.simulator.device.run, "run_device", _interpreted("simulator"))
    _replace(tilelang.codegen.cuda.printer, "print_kernel", _counted("printed", own=False))
    _replace(tilelang.runtime.nvrtc, "compile_cubin", _counted("cuda", own=False))
    _replace(tilelang.jit.kernel, "compile_request", _kernels)
    _replace(tilelang.jit.lowering, "source_of", _sources)
    _replace(tilelang.jit.loading, "load", _entries)
    context = type(pytest.raises(Exception))
    if not hasattr(context.__exit__, "_completed"):
        leave = context.__exit__

        @functools.wraps(leave)
        def __exit__(self: Any, kind: Any, value: Any, trace: Any) -> Any:
            out = leave(self, kind, value, trace)
            if out and value is not None:
                caught(value)
            return out

        __exit__._completed = True  # type: ignore[attr-defined]
        context.__exit__ = __exit__  # type: ignore[method-assign]


__all__ = ["EXECUTIONS", "begin", "caught", "completed", "install", "taken"]
