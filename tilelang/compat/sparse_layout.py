"""Sizes of 2:4 sparse metadata."""

from typing import Any

from tilelang.ir import dtype
from tilelang.ops.gemm_sp import e_factor as get_e_factor

# Of how many neighbours of a row how many are kept, by element type: (kept, group).
GROUP_CONFIG = {"float32": (1, 2), "tfloat32": (1, 2), "float16": (2, 4), "bfloat16": (2, 4), "int8": (2, 4), "uint8": (2, 4),
                "float8_e4m3fn": (2, 4), "float8_e5m2": (2, 4)}


def get_e_replicate_factor(a_dtype: Any) -> int:
    """How often a quad of lanes holds the metadata of an instruction: 2 for 16- and 32-bit operands, where the sparsity
    selector names the pair of lanes that is read, 1 for 8-bit ones.  T.gemm_sp reads metadata once, as it is laid out.

    Source: PTX ISA, "mma.sp", sparsity selector.
    """
    return 1 if dtype(a_dtype).bits == 8 else 2


__all__ = ["GROUP_CONFIG", "get_e_factor", "get_e_replicate_factor"]
