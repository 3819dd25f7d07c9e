"""The buffers of a block."""

from __future__ import annotations

from dataclasses import dataclass

from .expr import Axis


@dataclass
class Tile:
    """A buffer of a block, or what one holds for a while.

    axes: those that its dimensions count.  shape: its extents.  key: counts the values that lie in tiles, in their order.
    """

    name: str
    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    dtype: str
    scope: str = "fragment"
    key: int = 0
