"""The computation of a template as a node with one output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .policy import work_of


@dataclass(eq=False)
class PrimFuncNode:
    """A template's program.  Raises ValueError for other programs."""

    prim_func: Any
    tags: dict[str, Any] = field(default_factory=dict)
    name: str = "PrimFuncNode"

    def __post_init__(self) -> None:
        self.work = work_of(self.prim_func)


@dataclass(eq=False)
class OutputNode:
    """The result `id` of a node."""

    node: PrimFuncNode
    id: int = 0

    @property
    def work(self) -> Any:
        """The computation of the node."""
        return self.node.work


@dataclass(frozen=True, eq=False)
class Edge:
    """Output src_id of one node is input dst_id of another."""

    src_node: Any
    dst_node: Any
    src_id: int = 0
    dst_id: int = 0
