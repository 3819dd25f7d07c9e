"""Checks and normalises the arguments of tilelang.compile into a request."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import Any

from tilelang.env import env
from tilelang.errors import error, is_strict, register
from tilelang.runtime.signature import resolve_out_idx
from tilelang.target import Target
from tilelang.transform.framework.config import normalize_config
from tilelang.transform.framework.scope import current_config

from .artifact import INTERPRETED, Request, program_of

register("compile-not-a-program", AssertionError, "tilelang.compile is given something that is not a PrimFunc",
         "decorate the function with @T.prim_func and pass what that gives", expected="a PrimFunc")
register("compile-option", TypeError, "an option of tilelang.compile of another type", "leave it out",
         "a value of the option's type")
register("backend-name", ValueError, "an execution backend that the target does not have",
         expected="an execution backend of the target")

SIMULATOR = "simulator"
BACKENDS = {"cuda": ("tvm_ffi", "nvrtc", "cython", *INTERPRETED), "hip": ("tvm_ffi", "cython", *INTERPRETED),
            "cpu": ("tvm_ffi", "cython", "tile")}


def resolve_target(target: Any, backend: Any) -> tuple[Target, str]:
    """(target, execution backend) for the user's arguments; None means the environment's default.

    target="simulator" means the device simulator for the default CUDA architecture.  So does the backend "simulator" when
    the target is "auto" and there is no GPU.
    Raises AssertionError for an unknown target, ValueError for a backend the target does not have.
    """
    if isinstance(target, str) and target == SIMULATOR:
        target, backend = "cuda", SIMULATOR
    if target is None:
        target = env.get_default_target()
    resolved = target if isinstance(target, Target) else Target(target)
    name = backend if backend is not None else env.get_default_execution_backend()
    if name == SIMULATOR and target == "auto" and not resolved.is_gpu and Target.current() is None:
        resolved = Target("cuda")
    if not isinstance(name, str):
        raise error("compile-option", f"execution_backend must be a string, found {type(name).__name__}",
                    expected="the name of an execution backend")
    allowed = BACKENDS[str(resolved.kind) if resolved.is_gpu else "cpu"]
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
    """An option that is on or off.  Raises compile-option for anything but a bool, 0 or 1."""
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise error("compile-option", f"{name} is «True or False», found {value!r}")


def flag_list(flags: Any) -> tuple[str, ...]:
    """Compiler options from None, a string or a list of strings."""
    if flags is None:
        return ()
    if isinstance(flags, str):
        return tuple(shlex.split(flags))
    if not isinstance(flags, (list, tuple)) or not all(isinstance(f, str) for f in flags):
        raise error("compile-option", f"compile_flags are «a string or a list of strings», found {type(flags).__name__} "
                    f"{flags!r}")
    return tuple(flags)


def check_host(target_host: Any) -> Any:
    """target_host unchanged, if it names a CPU target.  The host program is always compiled for this machine's CPU.

    Raises AssertionError for anything else.
    """
    if target_host is not None and target_host != "auto":
        host = target_host if isinstance(target_host, Target) else Target(target_host)
        if host.is_gpu:
            raise error("target-unknown", f"Target ‹{host}› is not supported as target_host", expected="llvm, c or cpu",
                        hint="leave target_host out")
    return target_host


def make_request(func: Any, out_idx: Any = None, execution_backend: Any = None, target: Any = None,
                 verbose: bool | None = None, pass_configs: Any = None, compile_flags: Any = None) -> Request:
    """Check and normalise the arguments of compile."""
    given, func = func, program_of(func)
    if func is None:
        raise error("compile-not-a-program", f"target function must be a PrimFunc but got {type(given)}",
                    found=type(given).__name__,
                    hint="a @tilelang.jit function compiles by itself: call it, or its compile(...)"
                    if hasattr(given, "get_tir") else "decorate the function with @T.prim_func" if callable(given) else "")
    env.get_compile_timeout_seconds()  # reports a bad value before anything is compiled
    resolved, backend = resolve_target(target, execution_backend)
    config = {**current_config(), **_as_dict(func.facts.pass_configs), **_as_dict(pass_configs)}
    config = normalize_config({"tl.strict": True, **config} if is_strict() else config)
    flags = flag_list(func.facts.compile_flags) + flag_list(compile_flags)
    resolve_out_idx(func, out_idx)
    return Request(func, out_idx, resolved, backend, config, flags,
                   env.get_default_verbose() if verbose is None else switch(verbose, "verbose"), given)


def _as_dict(config: Any) -> dict[Any, Any]:
    if config is None:
        return {}
    if hasattr(config, "items") or isinstance(config, (tuple, list)):
        with suppress(TypeError, ValueError):
            return dict(config.items() if hasattr(config, "items") else config)
    raise error("compile-option", f"pass_configs is «a dict of keys and values», found {config!r}")
