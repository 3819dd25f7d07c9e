"""The settings of the package: environment variable, type, default and one sentence each.

`from tilelang.env import env` (also `tilelang.env`) is the settings object.  Its attributes read the environment at each
access.  An assignment overrides the environment; `with env.using(TILELANG_DEBUG=3): ...` overrides it for a block.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TRUTHY = ("1", "true", "yes", "on")


def is_truthy(text: object) -> bool:
    """Whether a text is 1, true, yes or on, in upper or lower case."""
    return str(text).strip().lower() in TRUTHY


class EnvVar:
    """One setting, read at each access.  key: environment variable.  default: text, or a function of the settings object."""

    def __init__(self, key: str, default: Any = "", about: str = "", parse: Callable[[str], Any] = str) -> None:
        self.key, self.default, self.about, self.parse = key, default, about, parse
        self.raw = os.environ.encodekey(key)

    def get(self, owner: Any = None) -> Any:
        """The present value: the override, else the environment's, else the default."""
        owner = owner if owner is not None else env
        if self.key in owner._overrides:
            return owner._overrides[self.key]
        # os.environ raises and catches an error for each unset name: 1 us, and a call of a jit function reads three settings.
        data = getattr(os.environ, "_data", None)  # the dict behind os.environ, where Python has one
        raw = os.environ.get(self.key) if data is None else data.get(self.raw)
        text = raw if data is None or raw is None else os.environ.decodevalue(raw)
        if text is None:
            return self.default(owner) if callable(self.default) else self.default
        try:
            return self.parse(text)
        except ValueError as e:
            raise ValueError(f"{self.key}={text!r}: {e}") from None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.get(instance)

    def __set__(self, instance: Any, value: Any) -> None:
        instance._overrides[self.key] = value


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer is expected") from None


def _milliseconds(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise ValueError("a number is expected") from None


def _home_cache(_: Any) -> str:
    return os.path.expanduser("~/.tilelang/cache")


def _cuda_home(_: Any) -> str:
    return os.environ.get("CUDA_PATH", "") or ("/usr/local/cuda" if os.path.isdir("/usr/local/cuda") else "")


def _rocm_home(_: Any) -> str:
    return os.environ.get("ROCM_HOME", "") or ("/opt/rocm" if os.path.isdir("/opt/rocm") else "")


class Environment:
    """The settings.  Class attributes are EnvVar descriptors; see `settings()` for the table."""

    def __init__(self) -> None:
        object.__setattr__(self, "_overrides", {})
        object.__setattr__(self, "_local", threading.local())

    # -- cache and files
    TILELANG_CACHE_DIR = EnvVar("TILELANG_CACHE_DIR", _home_cache, "cache root", lambda text: text or _home_cache(None))
    TILELANG_TMP_DIR = EnvVar("TILELANG_TMP_DIR", lambda e: os.path.join(e.TILELANG_CACHE_DIR, "tmp"),
                              "temporary files")
    TILELANG_DISABLE_CACHE = EnvVar("TILELANG_DISABLE_CACHE", "0", "disable all kernel caching")
    TILELANG_KERNEL_CACHE_USE_LIB_STAMP = EnvVar("TILELANG_KERNEL_CACHE_USE_LIB_STAMP", "0",
                                                 "add a digest of the package's sources to cache keys")
    TILELANG_CLEANUP_TEMP_FILES = EnvVar("TILELANG_CLEANUP_TEMP_FILES", "1", "keep compiler temporaries when 0")
    # -- messages during compilation
    TILELANG_DEBUG = EnvVar("TILELANG_DEBUG", 0, "0-5: what is printed while compiling (style: 3 prints IR per pass)",
                            _number)
    TILELANG_STRICT = EnvVar("TILELANG_STRICT", "0", "warnings about a program are errors")
    TILELANG_PRINT_ON_COMPILATION = EnvVar("TILELANG_PRINT_ON_COMPILATION", "0", "an INFO line for each compiled kernel")
    TILELANG_JIT_DIAGNOSTICS = EnvVar("TILELANG_JIT_DIAGNOSTICS", "0", "log the time of each compile phase")
    TILELANG_TIMELINE = EnvVar("TILELANG_TIMELINE", 0.0, "print where the time went when the process ends: phases that took so "
                               "many ms or more; 0: nothing", _milliseconds)
    TILELANG_VERBOSE = EnvVar("TILELANG_VERBOSE", "0", "default of `verbose`")
    TILELANG_ENABLE_IR_SPAN = EnvVar("TILELANG_ENABLE_IR_SPAN", "1", "source locations in errors")
    # -- compiling
    TILELANG_COMPILE_TIMEOUT_SECONDS = EnvVar("TILELANG_COMPILE_TIMEOUT_SECONDS", "", "device compiler timeout")
    TILELANG_DEFAULT_TARGET = EnvVar("TILELANG_DEFAULT_TARGET", "auto", "target kind, or a JSON object")
    TILELANG_TARGET = EnvVar("TILELANG_TARGET", "", "older name of TILELANG_DEFAULT_TARGET")
    TILELANG_EXECUTION_BACKEND = EnvVar("TILELANG_EXECUTION_BACKEND", "auto", "default execution backend")
    TILELANG_LAYOUT_COST_MODEL = EnvVar("TILELANG_LAYOUT_COST_MODEL", None, "default of tl.layout_cost_model")
    TILELANG_ENABLE_DATA_RACE_CHECK = EnvVar("TILELANG_ENABLE_DATA_RACE_CHECK", "0", "warn about data races")
    TILELANG_VERIFY = EnvVar("TILELANG_VERIFY", "0", "verify the program between passes")
    TILELANG_NUM_THREADS = EnvVar("TILELANG_NUM_THREADS", 0, "worker threads of the CPU target, 0: usable CPUs",
                                  _number)
    # -- autotuner
    TILELANG_AUTO_TUNING_DISABLE_CACHE = EnvVar("TILELANG_AUTO_TUNING_DISABLE_CACHE", "0", "no autotuner cache")
    TILELANG_AUTO_TUNING_CPU_UTILITIES = EnvVar("TILELANG_AUTO_TUNING_CPU_UTILITIES", "0.9",
                                                "fraction of CPUs that compile candidates")
    TILELANG_AUTO_TUNING_CPU_COUNTS = EnvVar("TILELANG_AUTO_TUNING_CPU_COUNTS", "-1", "CPUs that compile candidates")
    TILELANG_AUTO_TUNING_MAX_CPU_COUNT = EnvVar("TILELANG_AUTO_TUNING_MAX_CPU_COUNT", "-1", "upper bound of that")
    TILELANG_LIBRARY_TUNING = EnvVar("TILELANG_LIBRARY_TUNING", "0", "default of `tune` in functions of tilelang.library")
    TILELANG_LIBRARY_DYNAMIC_SHAPES = EnvVar("TILELANG_LIBRARY_DYNAMIC_SHAPES", "0", "library kernels take any number of rows, "
                                             "any lengths and scales, from the first call on")
    # -- inspection
    TL_LOWER_TRACE = EnvVar("TL_LOWER_TRACE", "0", "trace passes: 0, html (report.html in TL_LOWER_TRACE_DIR), 1 and "
                            "terminal (printed), both")
    TL_LOWER_TRACE_DIR = EnvVar("TL_LOWER_TRACE_DIR", "./tmp/lower_trace_dir", "where the trace is written")
    TILELANG_PASS_DIFF = EnvVar("TILELANG_PASS_DIFF", "0", "older form of the pass trace")
    TILELANG_PASS_DIFF_OUTPUT = EnvVar("TILELANG_PASS_DIFF_OUTPUT", "tmp/pass_diff_output", "its folder")
    TILELANG_PASS_PROFILE = EnvVar("TILELANG_PASS_PROFILE", "0", "print the time of each pass")
    TILELANG_PASS_PROFILE_THRESHOLD_MS = EnvVar("TILELANG_PASS_PROFILE_THRESHOLD_MS", "0", "leave out faster passes")
    TL_PERF_REGRESSION_FORMAT = EnvVar("TL_PERF_REGRESSION_FORMAT", "text", "output of testing.regression: text, json")
    TL_PERF_REGRESSION_ONLY = EnvVar("TL_PERF_REGRESSION_ONLY", "", "run only these regressions (comma list)")
    # -- paths of toolchains
    CUDA_HOME = EnvVar("CUDA_HOME", _cuda_home, "CUDA toolkit")
    ROCM_HOME = EnvVar("ROCM_PATH", _rocm_home, "ROCm")
    TL_TEMPLATE_PATH = EnvVar("TL_TEMPLATE_PATH", "", "accepted for older scripts, unused")
    TL_CUTLASS_PATH = EnvVar("TL_CUTLASS_PATH", "", "accepted for older scripts, unused")
    TL_COMPOSABLE_KERNEL_PATH = EnvVar("TL_COMPOSABLE_KERNEL_PATH", "", "accepted for older scripts, unused")
    TVM_IMPORT_PYTHON_PATH = EnvVar("TVM_IMPORT_PYTHON_PATH", "", "accepted for older scripts, unused")
    TVM_LIBRARY_PATH = EnvVar("TVM_LIBRARY_PATH", "", "accepted for older scripts, unused")
    SKIP_LOADING_TILELANG_SO = EnvVar("SKIP_LOADING_TILELANG_SO", "0", "accepted for older scripts, unused")
    TVM_LOG_DEBUG = EnvVar("TVM_LOG_DEBUG", "", "accepted for older scripts, unused")
    TILELANG_HIP_SAVE_TEMP_FILES = EnvVar("TILELANG_HIP_SAVE_TEMP_FILES", "0", "keep HIP compiler temporaries")

    def __getattr__(self, name: str) -> Any:
        # `tilelang.env` is this object for users, yet `import tilelang.env as e; e.EnvVar` must work too.
        module = sys.modules[__name__]
        if not name.startswith("__") and name in vars(module):
            return vars(module)[name]
        raise AttributeError(f"no setting {name!r}; see env.settings()")

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(getattr(type(self), name, None), EnvVar):
            raise AttributeError(f"no setting {name!r}; see env.settings()")
        object.__setattr__(self, name, value)

    def standing(self, settings: tuple[EnvVar, ...]) -> tuple[Any, ...]:
        """The unparsed values of settings.  Every call of a jit function uses them in its key."""
        data, held = getattr(os.environ, "_data", None), self._overrides
        if data is None:
            return tuple([s.get(self) for s in settings])
        return tuple([held[s.key] if s.key in held else data.get(s.raw) for s in settings])

    def settings(self) -> dict[str, EnvVar]:
        """Name -> EnvVar, in the order of the table."""
        return {n: v for n, v in vars(type(self)).items() if isinstance(v, EnvVar)}

    def forget(self, name: str) -> None:
        """Remove an override, so that the environment decides again.  Raises AttributeError for an unknown setting."""
        setting = getattr(type(self), name, None)
        if not isinstance(setting, EnvVar):
            raise AttributeError(f"no setting {name!r}; see env.settings()")
        self._overrides.pop(setting.key, None)

    @contextmanager
    def using(self, **values: Any) -> Iterator[Environment]:
        """Override settings for a `with` block."""
        old = dict(self._overrides)
        for name, value in values.items():
            setattr(self, name, value)
        try:
            yield self
        finally:
            self._overrides.clear()
            self._overrides.update(old)

    # -- parsed settings for the rest of the package
    def is_cache_enabled(self) -> bool: return CacheState.is_enabled() and not self.is_cache_globally_disabled()
    def is_cache_globally_disabled(self) -> bool: return is_truthy(self.TILELANG_DISABLE_CACHE)
    def enable_cache(self) -> None: CacheState.enable()
    def disable_cache(self) -> None: CacheState.disable()

    def is_autotune_cache_disabled(self) -> bool:
        return is_truthy(self.TILELANG_AUTO_TUNING_DISABLE_CACHE) or not self.is_cache_enabled()

    def is_print_on_compilation_enabled(self) -> bool: return is_truthy(self.TILELANG_PRINT_ON_COMPILATION)
    def should_cleanup_temp_files(self) -> bool: return is_truthy(self.TILELANG_CLEANUP_TEMP_FILES)
    def is_jit_diagnostics_enabled(self) -> bool: return is_truthy(self.TILELANG_JIT_DIAGNOSTICS)
    def is_pass_profile_enabled(self) -> bool: return is_truthy(self.TILELANG_PASS_PROFILE)

    def get_pass_profile_threshold_ms(self) -> float:
        return parse_pass_profile_threshold_ms(self.TILELANG_PASS_PROFILE_THRESHOLD_MS)

    def get_compile_timeout_seconds(self) -> float | None:
        """Seconds, or None for no limit.  Raises ValueError for anything that is not a positive number."""
        text = str(self.TILELANG_COMPILE_TIMEOUT_SECONDS).strip()
        if not text:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ValueError(f"TILELANG_COMPILE_TIMEOUT_SECONDS must be a positive number, found {text!r}")
        return seconds

    def get_pass_diff_mode(self) -> str: return str(self.TILELANG_PASS_DIFF)
    def get_lower_trace_mode(self) -> str: return str(self.TL_LOWER_TRACE)
    def get_lower_trace_dir(self) -> str: return str(self.TL_LOWER_TRACE_DIR)

    def get_default_target(self) -> Any:
        """The kind of the default target, or the object of a JSON setting.  Raises ValueError for malformed JSON."""
        text = str(self.TILELANG_TARGET or self.TILELANG_DEFAULT_TARGET).strip()
        if "{" in text or " " in text:
            import json  # 3 ms

            try:
                value = json.loads(text)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise ValueError(f"TILELANG_DEFAULT_TARGET={text!r}: Use JSON syntax for a target with attributes, "
                                 'for example {"kind": "cuda", "arch": "sm_90"}')
            return value
        return text

    def get_default_execution_backend(self) -> str:
        return str(self.TILELANG_EXECUTION_BACKEND)

    def get_default_verbose(self) -> bool:
        return is_truthy(self.TILELANG_VERBOSE)

    def get_default_layout_cost_model(self) -> str | None:
        """"register-count", "io-aware", or None.  Raises ValueError for anything else."""
        model = self.TILELANG_LAYOUT_COST_MODEL or None
        if model not in (None, "register-count", "io-aware"):
            raise ValueError(f"TILELANG_LAYOUT_COST_MODEL is register-count or io-aware, found {model!r}")
        return model

    def tuning_workers(self, cpus: int) -> int:
        """Threads that compile candidates of the autotuner: TILELANG_AUTO_TUNING_CPU_COUNTS where it is positive, else the
        fraction TILELANG_AUTO_TUNING_CPU_UTILITIES of the usable CPUs; never more than
        TILELANG_AUTO_TUNING_MAX_CPU_COUNT where that is positive.  Raises ValueError for values that are no numbers."""
        def number(name: str, parse: Callable[[str], Any]) -> Any:
            text = str(getattr(self, name))
            try:
                return parse(text)
            except ValueError:
                raise ValueError(f"{name} must be a number, found {text!r}") from None

        fixed = number("TILELANG_AUTO_TUNING_CPU_COUNTS", int)
        most = number("TILELANG_AUTO_TUNING_MAX_CPU_COUNT", int)
        share = number("TILELANG_AUTO_TUNING_CPU_UTILITIES", float)
        workers = fixed if fixed > 0 else max(1, int(cpus * share))
        return min(workers, most) if most > 0 else workers

    def is_light_import(self) -> bool:
        return True

    def is_span_enable(self) -> bool:
        return is_truthy(self.TILELANG_ENABLE_IR_SPAN)


class CacheState:
    """The switch of the kernel cache in this process.  TILELANG_DISABLE_CACHE=1 overrides it."""

    _enabled = True

    @classmethod
    def enable(cls) -> None:
        cls._enabled = True

    @classmethod
    def disable(cls) -> None:
        cls._enabled = False

    @classmethod
    def is_enabled(cls) -> bool:
        return cls._enabled


def parse_pass_profile_threshold_ms(value: Any) -> float:
    """Parse a threshold in milliseconds, >= 0.  Raises ValueError otherwise."""
    try:
        ms = float(value)
    except (TypeError, ValueError):
        ms = -1.0
    if not ms >= 0:
        raise ValueError(f"the pass profile threshold is milliseconds >= 0, found {value!r}")
    return ms


def resolve_pass_profile_threshold_ms(value: Any = None) -> float:
    """The given threshold, else the environment's."""
    return env.get_pass_profile_threshold_ms() if value is None else parse_pass_profile_threshold_ms(value)


env = Environment()


def __getattr__(name: str) -> Any:
    if name in ("CUDA_HOME", "ROCM_HOME", "TILELANG_CACHE_DIR", "TILELANG_TMP_DIR"):
        return getattr(env, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
