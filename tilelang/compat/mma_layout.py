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


def mma_load_a_32x32_to_shared_16x64_layout(thread_id: Any, local_id: Any) -> tuple[Any, Any]:
    """(row, column) of a lane's register of operand A, 16 x 64 elements of 4 bits.

    Source: PTX ISA, "Matrix Fragments for mma.m16n8k64".
    """
    return thread_id // 4 + local_id // 8 % 2 * 8, thread_id % 4 * 8 + local_id % 8 + local_id // 16 * 32


__all__ = ["get_swizzle_layout", "make_mma_swizzle_layout", "mma_load_a_32x32_to_shared_16x64_layout",
           "shared_16x16_to_mma_32x8_layout_sr_a",
           "shared_16x16_to_mma_32x8_layout_sr_b", "shared_16x32_to_mma_32x16_layout_sr_a",
           "shared_16x32_to_mma_32x16_layout_sr_b", "shared_16x8_to_mma_32x4_layout_sr_a",
           "shared_16x8_to_mma_32x4_layout_sr_b"]
