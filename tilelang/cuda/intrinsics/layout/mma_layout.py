"""(row, column) of a micro tile -> (lane, register), for operands a and b of mma by element width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.language.tensor_core import fragment_place, get_swizzle_layout, make_mma_swizzle_layout


def _place(matrix: str, k: int) -> Callable[[Any, Any], tuple[Any, Any]]:
    def place(i: Any, j: Any) -> tuple[Any, Any]:
        return fragment_place(matrix, i, j, k)

    place.__doc__ = f"(lane, register) of element (i, j) of a 16 x {k} tile of operand {matrix}."
    return place


shared_16x8_to_mma_32x4_layout_sr_a, shared_16x8_to_mma_32x4_layout_sr_b = _place("A", 8), _place("B", 8)
shared_16x16_to_mma_32x8_layout_sr_a, shared_16x16_to_mma_32x8_layout_sr_b = _place("A", 16), _place("B", 16)
shared_16x32_to_mma_32x16_layout_sr_a, shared_16x32_to_mma_32x16_layout_sr_b = _place("A", 32), _place("B", 32)

__all__ = ["get_swizzle_layout", "make_mma_swizzle_layout", "shared_16x16_to_mma_32x8_layout_sr_a",
           "shared_16x16_to_mma_32x8_layout_sr_b", "shared_16x32_to_mma_32x16_layout_sr_a",
           "shared_16x32_to_mma_32x16_layout_sr_b", "shared_16x8_to_mma_32x4_layout_sr_a",
           "shared_16x8_to_mma_32x4_layout_sr_b"]
