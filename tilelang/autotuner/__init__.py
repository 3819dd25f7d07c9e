"""The autotuner: measures many configurations of a kernel and chooses the best."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from tilelang.errors import error, named_arguments, register
from tilelang.jit import JITImpl, JITKernel
from tilelang.jit import jit as plain_jit
from tilelang.jit.graph_names import named
from tilelang.jit.keys import freeze, freeze_tensor
from tilelang.jit.methods import InClasses
from tilelang.jit.supply import TensorSupplyType
from tilelang.jit.torch_calls import in_graphs
from tilelang.language.tracing.source_text import text_of
from tilelang.log import logger
from tilelang.runtime.cache import compiler_stamp, digest
from tilelang.target import Target
from tilelang.jit.toolchain import host_name

from .tuner import get_autotune_inputs, result_of, set_autotune_inputs, tune
from .param import AutotuneResult, CompileArgs, ProfileArgs

register("tune-keys", ValueError, "a tuning configuration names something that is no parameter", expected="names of parameters")
register("tune-not-jit", AssertionError, "@tilelang.autotune is put on something that is not a @tilelang.jit function",
         expected="a @tilelang.jit function")
register("tune-closure", AssertionError, "a function to be tuned holds a value that cannot be part of a cache key",
         expected="an int, float, str, bool or None")

RESERVED = "pass_configs"
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


class AutoTuneImpl(InClasses):
    """A @tilelang.jit function whose tunable parameters are found by measuring."""

    def __init__(self, jit_impl: JITImpl, configs: Any, profile: ProfileArgs, early_stop: bool,
                 early_stop_factor: float, do_not_specialize: Iterable[str] | None) -> None:
        self.jit_impl, self.profile = jit_impl, profile
        self.configs = list(configs) if isinstance(configs, Iterator) else configs  # read again for each set of arguments
        self.early_stop, self.early_stop_factor = early_stop, early_stop_factor
        self.skipped = frozenset(do_not_specialize or ())
        self.results: dict[Any, AutotuneResult] = {}
        self.graph_name = named(self)
        self.__doc__, self.__module__ = jit_impl.__doc__, jit_impl.__module__
        unknown = sorted(self.skipped - set(jit_impl.signature.parameters))
        if unknown:
            raise error("tune-keys", f"do_not_specialize names ‹{', '.join(unknown)}›, no parameter of `{jit_impl.__name__}`",
                        expected=f"parameters among {', '.join(jit_impl.signature.parameters)}",
                        hint=f"the parameters are {', '.join(jit_impl.signature.parameters)}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["jit_impl"], name)

    def __repr__(self) -> str:
        return f"<tilelang.autotune {self.jit_impl!r}>"

    @in_graphs
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("__return_kernel", False):  # an older way to ask for the kernel
            return self.compile(*args, **kwargs)
        kernel, runtime = self._kernel(args, kwargs)
        if isinstance(self.jit_impl, MeasuredJIT) and runtime is None:
            return result_of(kernel)
        return kernel if runtime is None else kernel(*runtime)

    def chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[JITImpl, dict[str, Any]]:
        """The function without tuning, and the keyword arguments of a call with the best configuration, for tensors without
        values: candidates are measured on inputs of the tuner's own."""
        kernel, _ = self._kernel(args, kwargs, measured=False)
        return self.jit_impl, {**{k: v for k, v in (kernel.config or {}).items() if k != RESERVED}, **kwargs}

    def compile(self, /, *args: Any, **kwargs: Any) -> JITKernel:
        """Tune for these arguments and return the best kernel."""
        return self._kernel(args, kwargs)[0]

    def _kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any],
                measured: bool = True) -> tuple[JITKernel, list[Any] | None]:
        """The best kernel, and its inputs in an eager call.  measured: candidates are measured on these inputs."""
        impl = self.jit_impl
        lazy = impl.initialize_jit_mode(*args, **kwargs) == "lazy"
        consts = {} if lazy else {k: v for k, v in kwargs.items() if k not in impl.signature.parameters}
        bound = impl.signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k not in consts})
        configs = self._configs(args, kwargs)
        runtime = None if lazy else [v for n, v in bound.arguments.items() if n in impl.eager.runtime]
        tunable = {k for c in configs for k in c if k != RESERVED}
        given = tunable & set(bound.arguments)
        if runtime and any(v is None for v in runtime):
            config = {k: v for k, v in configs[0].items() if k not in (RESERVED, *given)}
            runtime = impl.eager.inputs(args, {**kwargs, **config})
        if given:
            logger.warning("tuning is skipped: %s given explicitly", ", ".join(sorted(given)))
            return impl.compile(*args, **kwargs), runtime
        self._check_arguments(bound.arguments, tunable, lazy)
        missed = impl.captured.missed

        def known() -> Any:
            values = tuple([(n, freeze_tensor(v, impl.captured.argument, n))
                            for n, v in (*bound.arguments.items(), *consts.items()) if n not in self.skipped])
            key = values, impl.surroundings(), str(configs) if callable(self.configs) else ""
            return key if missed == impl.captured.missed else str(key)

        key = known()
        result = self.results.get(key)
        is_new = result is None
        if is_new and not self.skipped:
            key = self._program_key(args, kwargs, configs) or key
            result = self.results.get(key)
        if result is not None and missed != impl.captured.missed:  # another program perhaps: the choice is kept, not the kernel
            return self._compile(args, kwargs, result.config or {}), runtime
        if result is None:
            result = self.results[key] = tune(
                configs, lambda config: self._compile(args, kwargs, config), self.profile,
                inputs=runtime if runtime and measured else None, key=self._disk_key(key, configs), early_stop=self.early_stop,
                early_stop_factor=self.early_stop_factor, about=impl.__name__)
        if is_new:
            self.results[known()] = result  # after tracing, which may have changed it
        assert result.kernel is not None
        return result.kernel, runtime

    def _program_key(self, args: tuple[Any, ...], kwargs: dict[str, Any], configs: list[dict[str, Any]]) -> Any:
        """What decides the candidates' programs, so that calls that say the same by other arguments (a tensor or its sizes, a
        default or its value) share a search; None where no configuration gives a program."""
        for config in configs:
            values = {k: v for k, v in config.items() if k != RESERVED}
            try:
                return "programs", self.jit_impl.parse_cache_key(*args, **kwargs, **values), freeze(configs)
            except Exception as e:  # compiling this candidate fails for the same reason, and the tuner tells it
                logger.debug("tuning: configuration %s has no program: %s", config, e)
        return None

    def _check_arguments(self, given: dict[str, Any], tunable: set[str], lazy: bool) -> None:
        """Report a parameter that neither the call nor a configuration gives once, before any candidate fails for it."""
        if lazy:
            empty, variadic = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            for name, p in self.jit_impl.signature.parameters.items():
                if p.default is empty and p.kind not in variadic and name not in given and name not in tunable:
                    raise TypeError(f"missing a required argument: {name!r}")

    def _configs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        configs = self.configs(*args, **kwargs) if callable(self.configs) else self.configs
        configs = list(configs) if isinstance(configs, Iterable) else configs
        bad = next((c for c in configs if not isinstance(c, dict)), None) if isinstance(configs, list) else configs
        if bad is not None:
            raise error("tune-configs", f"configs of autotune are dicts of parameters, found {bad!r}")
        if not configs:
            raise error("tune-empty", "No configurations to tune: the list is empty",
                        hint="give at least one dict of parameters")
        known = set(self.jit_impl.signature.parameters) | {RESERVED}
        unused = sorted({k for c in configs for k in c} - known)
        if unused:
            raise error("tune-keys", f"Unused keys in config: ‹{', '.join(unused)}›",
                        expected=f"parameters among {', '.join(self.jit_impl.signature.parameters)}",
                        hint=f"the parameters are {', '.join(self.jit_impl.signature.parameters)}")
        return configs

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: dict[str, Any]) -> JITKernel:
        impl = self.jit_impl
        values = {k: v for k, v in config.items() if k != RESERVED}
        if RESERVED in config:
            merged = {**impl.pass_configs, **config[RESERVED]}
            impl = JITImpl(impl.func, replace(impl.options, pass_configs=merged))
        return impl.compile(*args, **kwargs, **values)

    def _disk_key(self, key: Any, configs: list[dict[str, Any]]) -> str:
        impl = self.jit_impl
        return digest(["autotune", compiler_stamp(), impl.func_source, str(key), configs, str(impl.out_idx), str(impl.target),
                       impl.execution_backend, self.profile.text(), machine_text()])


def machine_text() -> str:
    """A text that identifies the machine: a measured result depends on it and on the program."""
    return f"{host_name()} {Target('auto')}"


def closure_text(fn: Any) -> str:
    """The values of a function's closure as text.  Raises tune-closure for a value that is no int, float, str, bool or None."""
    cells = getattr(fn, "__closure__", None) or ()
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    out = []
    for name, cell in zip(names, cells):
        value = cell.cell_contents
        if not isinstance(value, (int, float, str, bool, type(None))):
            raise error("tune-closure", f"`{name}` of type {type(value).__name__} in the closure of `{fn.__name__}` is not "
                        "serializable", found=f"{type(value).__name__} `{name}`", hint="pass it as a parameter")
        out.append(f"{name}={freeze(value)!r}")
    return ";".join(out)


@named_arguments("tune-configs", "write @tilelang.autotune(configs=[{\"block\": 64}, {\"block\": 128}]) above @tilelang.jit")
def autotune(*, configs: Any, warmup: int = 25, rep: int = 100, timeout: float = 100,
             supply_type: TensorSupplyType = TensorSupplyType.Auto, ref_prog: Callable[..., Any] | None = None,
             supply_prog: Callable[..., Any] | None = None, rtol: float = 1e-2, atol: float = 1e-2,
             max_mismatched_ratio: float = 0.01, skip_check: bool = False,
             manual_check_prog: Callable[..., Any] | None = None, cache_input_tensors: bool = False,
             do_not_specialize: Iterable[str] | None = None, early_stop: bool = False,
             early_stop_factor: float = 2.0, keys: Iterable[str] | None = None) -> Callable[[Any], AutoTuneImpl]:
    """Decorator above @tilelang.jit that chooses the parameters named in configs by measuring.

    configs: list of dicts, or a function of the call's arguments that returns one.  warmup, rep: the most runs of a candidate
    that may be the best; others have fewer.  timeout: seconds for each step of a candidate.  keys: accepted; results are kept
    for the values of all arguments.
    """
    profile = ProfileArgs(warmup, rep, timeout, supply_type, ref_prog, supply_prog, rtol, atol, max_mismatched_ratio,
                          skip_check, manual_check_prog, cache_input_tensors)

    def wrap(impl: Any) -> AutoTuneImpl:
        if not isinstance(impl, JITImpl):
            raise error("tune-not-jit", "The @autotune decorator can only be applied to @tilelang.jit functions, found "
                        f"{type(impl).__name__}", hint="put @tilelang.autotune(...) above @tilelang.jit")
        measured = replace(profile, **impl.profile) if isinstance(impl, MeasuredJIT) else profile
        return AutoTuneImpl(impl, configs, measured, early_stop, early_stop_factor, do_not_specialize)

    return wrap


class AutoTuner:
    """Tuning without decorators.  fn: a function that returns a PrimFunc.  configs: dicts of its arguments."""

    def __init__(self, fn: Callable[..., Any], configs: Any) -> None:
        self.fn, self.configs = fn, configs
        self.compile_args, self.profile_args = CompileArgs(), ProfileArgs()

    @classmethod
    def from_kernel(cls, kernel: Callable[..., Any], configs: Any) -> AutoTuner:
        """Make a tuner, as the constructor does."""
        return cls(kernel, configs)

    def set_compile_args(self, out_idx: Any = None, target: Any = None, execution_backend: str | None = None,
                         target_host: Any = None, verbose: bool | None = None, pass_configs: Any = None) -> AutoTuner:
        """Set how candidates are compiled; returns the tuner."""
        self.compile_args = CompileArgs(out_idx, execution_backend, target, target_host, verbose, pass_configs)
        return self

    def set_profile_args(self, warmup: int = 25, rep: int = 100, timeout: float = 30,
                         supply_type: TensorSupplyType = TensorSupplyType.Auto, ref_prog: Any = None,
                         supply_prog: Any = None, rtol: float = 1e-2, atol: float = 1e-2,
                         max_mismatched_ratio: float = 0.01, skip_check: bool = False, manual_check_prog: Any = None,
                         cache_input_tensors: bool = False, backend: str = "event") -> AutoTuner:
        """Set how candidates are measured and checked; returns the tuner."""
        self.profile_args = ProfileArgs(warmup, rep, timeout, supply_type, ref_prog, supply_prog, rtol, atol,
                                        max_mismatched_ratio, skip_check, manual_check_prog, cache_input_tensors,
                                        backend)
        return self

    def run(self, warmup: int | None = None, rep: int | None = None, timeout: float | None = None,
            use_pipeline: bool = False, enable_grouped_compile: bool = False, group_compile_size: int = 2,
            benchmark_devices: Any = None, benchmark_multi_gpu: bool = False, early_stop: bool = False,
            early_stop_factor: float = 2.0) -> AutotuneResult:
        """Tune and return the best result.

        Arguments for pipelining, grouped compilation and several devices are accepted without effect: candidates run one
        after another."""
        text = closure_text(self.fn)
        changes: dict[str, Any] = {k: v for k, v in
                                  (("warmup", warmup), ("rep", rep), ("timeout", timeout)) if v is not None}
        profile = replace(self.profile_args, **changes)
        configs = list(self.configs() if callable(self.configs) else self.configs)
        source = text_of(self.fn)
        key = digest(["autotuner", compiler_stamp(), source, text, configs, self.compile_args.text(), profile.text(),
                      machine_text()]) if source else None
        return tune(configs, lambda config: self.compile_args.compile_program(self.fn(**config)), profile, key=key,
                    early_stop=early_stop, early_stop_factor=early_stop_factor,
                    about=getattr(self.fn, "__name__", "a kernel"))

    __call__ = run


__all__ = ["AutoTuneImpl", "AutoTuner", "AutotuneResult", "autotune", "get_autotune_inputs", "jit", "set_autotune_inputs"]
