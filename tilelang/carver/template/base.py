"""BaseTemplate: the architecture, hints and program of a template."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tilelang.carver.arch import TileDevice, auto_infer_current_arch, is_ampere_arch, is_volta_arch
from tilelang.carver.roller.hint import Hint
from tilelang.carver.roller.node import OutputNode, PrimFuncNode
from tilelang.carver.roller.policy import hints_for
from tilelang.carver.roller.work import Work


@dataclass
class BaseTemplate:
    """A computation given by its sizes.  `with_arch`, then `recommend_hints`."""

    def __post_init__(self) -> None:
        for name, value in self.params_as_dict().items():
            if name.endswith("dtype"):
                setattr(self, name, f"{value}")
            sizes = value if isinstance(value, (tuple, list)) else (value,)
            if any(isinstance(x, int) and not isinstance(x, bool) and x < (0 if name == "P" else 1) for x in sizes):
                raise ValueError(f"{type(self).__name__}: {name} must be positive, found {value!r}")
        self._arch: TileDevice | None = None
        self._func: Any = None

    @property
    def work(self) -> Work:
        """Sizes and types of the computation."""
        raise NotImplementedError

    def program(self, hint: Hint) -> Any:
        """The computation as a PrimFunc with the tiles of a hint."""
        raise NotImplementedError

    @property
    def arch(self) -> TileDevice:
        """The chosen architecture, else that of the current target or device."""
        if self._arch is None:
            self._arch = auto_infer_current_arch()
        return self._arch

    def with_arch(self, arch: TileDevice) -> Any:
        """Choose the architecture.  Returns self."""
        self._arch = arch
        return self

    def is_volta_arch(self) -> bool:
        """Whether the architecture is sm_70."""
        return is_volta_arch(self.arch)

    def is_ampere_arch(self) -> bool:
        """Whether the architecture is sm_80 up to sm_88."""
        return is_ampere_arch(self.arch)

    def get_hardware_aware_configs(self, arch: TileDevice, topk: int = 10) -> list[Hint]:
        """The `topk` hints with the least estimated time on an architecture; fewer when fewer tiles fit."""
        return hints_for(self.work, arch, topk)

    def recommend_hints(self, topk: int = 10) -> list[Hint]:
        """The `topk` hints with the least estimated time on the chosen architecture; fewer when fewer tiles fit."""
        return self.get_hardware_aware_configs(self.arch, topk)

    def equivalent_function(self) -> Any:
        """The computation as a runnable PrimFunc with the tiles of the first hint."""
        if self._func is None:
            hints = self.recommend_hints(1)
            if not hints:
                raise ValueError(f"{type(self).__name__}: no tile fits {self.arch}")
            self.set_function(self.program(hints[0]))
        return self._func

    def set_function(self, func: Any) -> Any:
        """Use `func` as the program of this computation.  Returns self."""
        func.carver_work = self.work
        self._func = func
        return self

    @property
    def output_nodes(self) -> list[OutputNode]:
        """The result, as a node."""
        return [OutputNode(PrimFuncNode(self.equivalent_function()))]

    def params_as_dict(self) -> dict[str, Any]:
        """Sizes and types by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    class_attributes = property(params_as_dict)
