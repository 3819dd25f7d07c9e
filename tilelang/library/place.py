"""Where kernels of the library are compiled for, and the kernels that were compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from tilelang.env import env, is_truthy
from tilelang.jit import JITKernel, compile
from tilelang.jit.compiling import first_fitting
from tilelang.runtime.cpus import usable_cpus
from tilelang.target import Target

from .arrays import is_numpy
from .caches import Cache
from .gemm.tile import Chip, chip_of

KERNELS: Cache[JITKernel] = Cache(4096)
FITTING: Cache[tuple[Any, JITKernel]] = Cache(4096)
_FIRST: Cache[Any] = Cache(4096)  # the lengths of the first call of a family


@dataclass(frozen=True)
class Place:
    """Where kernels are compiled for: target, execution backend, and the number of SMs or cores where it is known."""

    target: Target
    backend: str | None = None
    sms: int | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.target, self.backend, self.sms))

    @staticmethod
    def of(x: Any, target: Any, backend: str | None = None) -> Place:
        """The place that a caller asked for, or that of a tensor where target is None."""
        if target is not None:
            return Place(target if isinstance(target, Target) else Target(target), backend)
        if is_numpy(x) or x.device.type != "cuda":
            return _cpu(backend, usable_cpus())
        return _device(x.device.index, backend)

    @property
    def chip(self) -> Chip:
        return chip_of(self.target)

    def tuned(self, tune: bool | None, like: Any) -> bool | None:
        """Whether a call is tuned; None where it would be but is being captured in a CUDA graph.

        tune: the caller's argument; None reads TILELANG_LIBRARY_TUNING. like: a tensor of the call. For calls that are not
        tuned, nothing of the tuner is loaded.
        """
        if not (is_truthy(env.TILELANG_LIBRARY_TUNING) if tune is None else tune):
            return False
        from . import tuning  # 291 ms

        return tuning.tuner.can(like, self.target, self.backend)

    def comes_first(self, family: Any, lengths: Any) -> bool:
        """Whether these are the lengths of the first call of a family here, which have a kernel of their own. Calls of other
        lengths share one. lengths: not None."""
        return bool(_FIRST.made((self, family), lambda: lengths) == lengths)

    def kernel(self, make: Callable[..., Any], *form: Any, **configs: Any) -> JITKernel:
        """The kernel of the program make(*form), which is compiled once.

        configs: pass configs without their "tl."; those that are None are left out. Kernels use wgmma and TMA where the target
        has them.
        """
        key = (make, form, self, *configs.items())
        return KERNELS.get(key) or KERNELS.keep(key, self._compiled(make(*form), configs))

    def fitting(self, make: Callable[[Any], Any], forms: tuple[Any, ...], **configs: Any) -> tuple[Any, JITKernel]:
        """The first of these forms for whose program a block has room (tilelang.first_fitting), and its kernel, as `kernel`
        compiles it."""
        def made() -> tuple[Any, JITKernel]:
            programs: dict[int, Any] = {}
            first = first_fitting(lambda n: programs.setdefault(n, make(forms[n])), *range(len(forms)), target=self.target)
            return forms[first], self._compiled(programs[first], configs)

        return FITTING.made((make, forms, self, *configs.items()), made)

    def _compiled(self, program: Any, configs: dict[str, Any]) -> JITKernel:
        used = {"enable_hopper": self.target.has_wgmma or None, **configs}
        return compile(program, target=self.target, execution_backend=self.backend, verbose=False,
                       pass_configs={f"tl.{name}": value for name, value in used.items() if value is not None})


def target_text(target: Any) -> str | None:
    """A target as operators of torch take it."""
    if target is None or isinstance(target, str):
        return target
    return str(target if isinstance(target, Target) else Target(target))


def dynamic_shapes() -> bool:
    """Whether kernels take any sizes where they can. Otherwise each shape has its own kernel."""
    return is_truthy(env.TILELANG_LIBRARY_DYNAMIC_SHAPES)


@cache
def _cpu(backend: str | None, cores: int) -> Place:
    return Place(Target("cpu"), backend, cores)


@cache
def _device(index: int, backend: str | None) -> Place:
    """The place of a CUDA device of torch."""
    found = sys.modules["torch"].cuda.get_device_properties(index)
    if name := getattr(found, "gcnArchName", "") if sys.modules["torch"].version.hip else "":
        return Place(Target(name), backend, found.multi_processor_count)
    number = found.major * 10 + found.minor
    try:
        target = Target({"kind": "cuda", "arch": f"sm_{number}a" if number >= 90 else f"sm_{number}"})
    except ValueError:  # newer than the table of chips
        target = Target("cuda")
    return Place(target, backend, found.multi_processor_count)
