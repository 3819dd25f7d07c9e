"""The user's `with PassContext(...)` block: pass configs and observers for the compilations inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from .observe import PassEventObserver, observing


class PassContext:
    """with PassContext(config={"tl.enable_fast_math": True}): compilations inside use these pass configs.

    Configs that a program or a call sets itself take precedence. instruments: observers of the passes that run inside
    (transform/framework/observe.py), or objects with some of run_before_pass(program, info), run_after_pass(program, info),
    enter_pass_ctx() and exit_pass_ctx(). opt_level and other arguments are accepted and have no effect. (The context that
    passes receive is another class, PassContext of transform/framework/pass_.py.)
    """

    def __init__(self, opt_level: int = 2, config: Mapping[Any, Any] | None = None,
                 instruments: Iterable[Any] | None = None, **_: Any) -> None:
        self.opt_level, self.config = opt_level, dict(config or {})
        self.instruments = list(instruments or ())
        self._open: list[ExitStack] = []

    @staticmethod
    def current() -> PassContext:
        """The innermost open block of this thread, or one without configs."""
        return get_pass_context()

    def __enter__(self) -> PassContext:
        self._open.append(ExitStack())
        self._open[-1].enter_context(observing(*map(as_observer, self.instruments)))
        self._open[-1].callback(_OPEN.reset, _OPEN.set((*_OPEN.get(), self)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.pop().close()


def _passed_on(method: str, given: Callable[..., tuple[Any, ...]] = lambda *_: ()) -> Callable[..., None]:
    """An observer's method that calls one of its instrument, if that has it, with `given` of its arguments."""
    return lambda self, *args: getattr(self.instrument, method, lambda *_: None)(*given(*args))


class _Instrument(PassEventObserver):
    """Adapter from an object with run_before_pass and run_after_pass to an observer."""

    def __init__(self, instrument: Any) -> None:
        self.instrument = instrument

    on_pipeline_start, on_pipeline_end = map(_passed_on, ("enter_pass_ctx", "exit_pass_ctx"))
    on_pass_start = _passed_on("run_before_pass", lambda name, func: (func, SimpleNamespace(name=name)))
    on_pass = _passed_on("run_after_pass", lambda event: (event.after, SimpleNamespace(name=event.name)))


def as_observer(instrument: Any) -> PassEventObserver:
    """An observer unchanged; an instrument with run_before_pass or run_after_pass wrapped as an observer.

    Raises TypeError for objects that are neither.
    """
    if isinstance(instrument, PassEventObserver):
        return instrument
    if not any(callable(getattr(instrument, m, None)) for m in ("run_before_pass", "run_after_pass")):
        raise TypeError(f"an instrument observes passes (run_before_pass, run_after_pass), found "
                        f"{type(instrument).__name__}")
    return _Instrument(instrument)


_OPEN: ContextVar[tuple[PassContext, ...]] = ContextVar("open", default=())
_PLANNED: ContextVar[bool] = ContextVar("planned", default=False)


def get_pass_context() -> PassContext:
    """The innermost open block of this thread, or one without configs."""
    return next(reversed(_OPEN.get()), None) or PassContext()


def current_config() -> dict[Any, Any]:
    """The merged configs of the open blocks; inner blocks override outer ones."""
    out: dict[Any, Any] = {}
    for context in _OPEN.get():
        out.update(context.config)
    return out


@contextmanager
def as_planned() -> Iterator[None]:
    """Reject, in this thread, programs that compile only with a fallback schedule (pipeline.py). Tuning uses this block:
    a candidate that falls back is not worth measuring. Programs that do compile are the same as elsewhere."""
    token = _PLANNED.set(True)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def plan_only() -> bool:
    """Whether an `as_planned` block is open."""
    return _PLANNED.get()


def simplify_prim_func(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a PrimFunc factory that returns it unchanged: programs are simplified when they are compiled."""
    return func
