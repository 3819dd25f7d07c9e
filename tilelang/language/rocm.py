"""Names of the dialect of AMD GPUs beside the common ones (tilelang.rocm.language): MFMA by hand."""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Buffer, convert
from tilelang.target import Target
from tilelang.target.hip import DEFAULT_ARCH
from tilelang.target.mfma import MFMA_ROWS

from .raw import buffer_at
from .tensor import dtype_of
from .tensor_core import get_mma_micro_size, make_mma_swizzle_layout as make_mfma_swizzle_layout
from .thread import emit_call
from .tracing.builder import Emitted
from .tracing.state import error

__all__ = ["get_mma_micro_size", "make_mfma_swizzle_layout", "mfma", "mfma_store_index_map", "mfma_store_index_map_32x32",
           "tvm_mfma"]


def mfma(dtype: Any, prefix: str, A_layout: str, B_layout: str, A_dtype: Any, B_dtype: Any, C_dtype: Any, a: Any, a_index: Any,
         b: Any, b_index: Any, c: Any, c_index: Any) -> Emitted:
    """One MFMA instruction: c += a @ b; executed by all 64 lanes of a wave.

    prefix: the end of the builtin's name.  A_dtype, B_dtype, C_dtype: the type of a lane's operand.  a, b, c: `.data` of local
    buffers; an index counts operands.  Registers are those of AMD's matrix instruction calculator: A a row by lane, B a column,
    C as mfma_store_index_map says.  Layouts are "row", dtype is C_dtype.  The instruction is that of the current target, or of
    gfx942.  Raises gemm-types where there is no such instruction.

    Example:
        f4, h4 = "float32x4", "float16x4"
        mfma(f4, "f32_16x16x16f16", "row", "row", h4, h4, f4, a.data, 0, b.data, 0, c.data, 0)
    """
    target, types = Target.current(), [dtype_of(x, "mfma") for x in (A_dtype, B_dtype, C_dtype)]
    chip = target.arch if target is not None and target.is_hip else DEFAULT_ARCH
    row = next((r for r in MFMA_ROWS.values() if chip in dict(r.chips) and r.instruction.endswith(f"_mfma_{prefix}") and
                [r.a_dtype, r.b_dtype, r.c_dtype] == [x.with_lanes(1) for x in types]), None)
    if row is None or (A_layout, B_layout) != ("row", "row"):
        raise error("gemm-types", f"{chip} has no instruction mfma_{prefix} of {A_dtype} {A_layout}, {B_dtype} {B_layout}",
                    expected="an MFMA instruction of the chip, layouts 'row'", found=f"{prefix} of {A_dtype}, {B_dtype}")
    places = [(x if isinstance(x, Buffer) else buffer_at(x), convert(i) * t.lanes)
              for x, i, t in zip((c, a, b), (c_index, a_index, b_index), (types[2], *types[:2]))]
    return emit_call("mma", tuple(AddressOf(buffer, (at,)) for buffer, at in places), "void", row=row.name)


tvm_mfma = mfma


def mfma_store_index_map(thread_id: Any, local_id: Any) -> tuple[Any, Any]:
    """(row, column) of an accumulator register of a 16 x 16 MFMA."""
    return thread_id // 16 * 4 + local_id, thread_id % 16


def mfma_store_index_map_32x32(thread_id: Any, local_id: Any) -> tuple[Any, Any]:
    """(row, column) of an accumulator register of a 32 x 32 MFMA."""
    return local_id // 4 * 8 + thread_id // 32 * 4 + local_id % 4, thread_id % 32
