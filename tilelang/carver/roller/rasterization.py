"""Rasterisations (orders of the blocks of a grid) that a hint can request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class _Single(type):
    """Metaclass of a class that is its own only instance, so that both `is NoRasterization` and `isinstance` work."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:
        return instance is cls

    def __repr__(cls) -> str:
        return "<NoRasterization>"


class NoRasterization(metaclass=_Single):
    """Blocks run row by row: no T.use_swizzle."""

    box_width = 0

    @classmethod
    def get_code(cls) -> list[str]:
        """The statements that request this order: none."""
        return []


@dataclass(frozen=True)
class _Rasterization2D:
    box_width: int = 4

    order = "row"

    def get_code(self) -> list[str]:
        """The statements that request this order."""
        return [f"T.use_swizzle(panel_size={self.box_width}, order={self.order!r})"]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}({self.box_width})>"


@dataclass(frozen=True, repr=False)
class Rasterization2DRow(_Rasterization2D):
    """Rasterisation panels of `box_width` rows of blocks."""


@dataclass(frozen=True, repr=False)
class Rasterization2DColumn(_Rasterization2D):
    """Rasterisation panels of `box_width` columns of blocks."""

    order = "column"
