"""Hints for programs, and the code that requests a rasterisation."""

from __future__ import annotations

from typing import Any

from .arch import TileDevice, get_arch
from .roller.hint import Hint
from .roller.policy import DefaultPolicy, TensorCorePolicy, hints_for, work_of
from .roller.work import Map


def get_rasterization_code(pannel_width: int = 8) -> str:
    """The statement that requests rasterisation panels of this many rows."""
    return f"T.use_swizzle(panel_size={pannel_width})"


def get_roller_hints_from_func(func_or_module: Any, arch: TileDevice, topk: int = 10, tensorcore_only: bool = False,
                               allow_gemv: bool = False) -> list[Hint] | None:
    """Hints for the program of a template; None when tensorcore_only is set and tensor cores do not support its types.

    Raises ValueError for a program that no template made.
    """
    work = work_of(retrieve_func_from_module(func_or_module))
    if tensorcore_only:
        return TensorCorePolicy(work, arch).emit_config(topk) or None
    return hints_for(work, arch, topk)


def get_roller_hints_from_output_nodes(output_nodes: list[Any], arch: TileDevice, topk: int = 10,
                                       extra_tags: dict[str, Any] | None = None) -> list[Hint]:
    """Hints for the node of an output."""
    return TensorCorePolicy.from_output_nodes(output_nodes, arch).emit_config(topk) \
        or DefaultPolicy.from_output_nodes(output_nodes, arch).emit_config(topk)


def get_tensorized_func_and_tags(func: Any, target: Any, **_: Any) -> tuple[Any, dict[str, Any] | None]:
    """(the program, its tags for tensor cores); the tags are None where tensor cores do not support its types."""
    work, arch = work_of(func), get_arch(target)
    found = [] if isinstance(work, Map) else TensorCorePolicy(work, arch).emit_config(1)
    return func, {"intrin_info": found[0].intrin_info, "tensorcore_config": [0, 1]} if found else None


def retrieve_func_from_module(module: Any) -> Any:
    """The one program of a module, or the program itself.  Raises ValueError for a module of several."""
    functions = getattr(module, "functions", None)
    if functions is None:
        return module
    if len(functions) != 1:
        raise ValueError(f"expected a module of one program, found {len(functions)}")
    return next(iter(functions.values()))
