"""`tilelang.autotuner.jit`: @tilelang.jit that also says how @autotune measures and checks its candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tilelang.jit import JITImpl
from tilelang.jit import jit as plain_jit

from .param import ProfileArgs

_PROFILE = {f.name for f in fields(ProfileArgs)}


class MeasuredJIT(JITImpl):
    """A jit function with settings for @autotune.  Tuned, it returns an AutotuneResult: latency, config, ref_latency."""

    profile: dict[str, Any] = {}


def jit(func: Callable[..., Any] | None = None, *, profiler: str = "auto", **options: Any) -> Any:
    """Decorator below @tilelang.autotune, for scripts that give the settings of the measurement here, not to autotune.

    options: those of tilelang.jit (out_idx, target, ...), and supply_type, ref_prog, supply_prog, rtol, atol,
    max_mismatched_ratio, skip_check, cache_input_tensors as of tilelang.autotune; they replace what is given there.
    profiler: accepted; there is one.
    """

    def wrap(fn: Callable[..., Any]) -> MeasuredJIT:
        made = plain_jit(fn, **{k: v for k, v in options.items() if k not in _PROFILE})
        out = MeasuredJIT(made.func, made.options)
        out.profile = {k: v for k, v in options.items() if k in _PROFILE}
        return out

    return wrap if func is None else wrap(func)
