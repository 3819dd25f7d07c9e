"""Names of the dialect of AMD GPUs beside the common ones (tilelang.rocm.language): MFMA by hand, and an emitter for it."""

from __future__ import annotations

from math import prod
from typing import Any

from tilelang.ir import AddressOf, Buffer, cast, convert, load
from tilelang.target import Target
from tilelang.target.hip import DEFAULT_ARCH, WAVE
from tilelang.target.mfma import MFMA_ROWS
from tilelang.target.mma import mma_rows
from tilelang.target.mma_row import MmaRow

from .kernel import get_thread_binding
from .raw import buffer_at
from .tensor import dtype_of, view
from .tensor_core import TensorCoreIntrinEmitter, get_mma_micro_size, make_mma_swizzle_layout as make_mfma_swizzle_layout
from .thread import emit_call
from .tile import EMITTED
from .tracing.builder import Emitted, need_builder
from .tracing.state import describe, error

__all__ = ["MatrixCoreIntrinEmitter", "get_mma_micro_size", "make_mfma_swizzle_layout", "mfma", "mfma_store",
           "mfma_store_index_map", "mfma_store_index_map_32x32", "tvm_mfma", "tvm_mfma_store"]


def _chip() -> str:
    """The chip that a program is traced for."""
    target = Target.current()
    return target.arch if target is not None and target.is_hip else DEFAULT_ARCH


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
    chip, types = _chip(), [dtype_of(x, "mfma") for x in (A_dtype, B_dtype, C_dtype)]
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


def mfma_store(dtype: Any, m: int, n: int, dst_ptr: Any, src_ptr: Any, src_offset: Any, dst_stride: Any) -> Emitted:
    """Store an accumulator of an m x n MFMA (16 x 16 or 32 x 32); executed by all 64 lanes of a wave.

    dst_ptr: address of element (0, 0), `T.access_ptr(C[i, j], "w")`; rows have a stride of dst_stride elements.
    src_ptr: `.data` of the local buffer that mfma wrote; src_offset: the first element.  Raises extern-argument for another
    destination, gemm-shape for other sizes.

    Example:
        mfma_store("float32", 16, 16, T.access_ptr(C[0, 0], "w"), c.data, 0, 16)
    """
    if (m, n) not in ((16, 16), (32, 32)):
        raise error("gemm-shape", f"an MFMA leaves 16 x 16 or 32 x 32 elements, found {m} x {n}",
                    expected="16, 16 or 32, 32", found=f"{m}, {n}")
    if not isinstance(dst_ptr, AddressOf):
        raise error("extern-argument", f"the destination is «a pointer», found {describe(dst_ptr)}",
                    hint='write T.access_ptr(C[i, j], "w")')
    b, to = need_builder("mfma_store"), dst_ptr.buffer
    source = src_ptr if isinstance(src_ptr, Buffer) else buffer_at(src_ptr)
    flat = to if len(to.shape) == 1 else view(to, (prod(to.shape),))
    b.unnamed.pop(id(flat), None)
    first = b.let("first", convert(sum(i * s for i, s in zip(dst_ptr.indices, to.strides))))
    lane, of = b.let("lane", convert(get_thread_binding(0) % WAVE)), dtype_of(dtype, "mfma_store")
    place = mfma_store_index_map if m == 16 else mfma_store_index_map_32x32
    for register in range(m * n // WAVE):
        row, column = place(lane, register)
        value = cast(load(source, (convert(src_offset + register),)), of)
        b.store(flat, (convert(first + row * dst_stride + column),), value)
    return EMITTED


tvm_mfma_store = mfma_store


class MatrixCoreIntrinEmitter(TensorCoreIntrinEmitter):
    """TensorCoreIntrinEmitter for waves of 64 lanes and the chip's MFMA of 16 x 16 micro tiles.

    k_pack: steps of K that ldmatrix_a and ldmatrix_b load at once, k_pack times local_size_a elements a tile: a lane's are
    consecutive, in the same order for A and B.  micro_size_k and the local sizes are those of one instruction.
    """

    WARP_SIZE = WAVE

    def __init__(self, *args: Any, k_pack: int | None = None, b_preshuffle: bool = False, **kw: Any) -> None:
        self.k_pack = int(k_pack or 1)
        if b_preshuffle:
            raise error("not-available", "operands permuted beforehand are not available", expected="b_preshuffle=False",
                        found="b_preshuffle=True")
        super().__init__(*args, **kw)

    def _instruction(self) -> MmaRow | None:
        self.micro_size_x, self.micro_size_y, chip = 16, 16, _chip()
        rows = mma_rows(Target({"kind": "hip", "mcpu": chip}), self.a_dtype, self.b_dtype, self.accum_dtype)
        row = next((r for r in rows if r.shape[0] == 16), None)
        self.micro_size_k = row.shape[2] if row else 0
        return row

    def _place_of(self, matrix: str, i: Any, j: Any) -> tuple[Any, Any]:
        if matrix != "C":
            run = self.row.run * self.k_pack
            return j // run * 16 + i, j % run
        far, near = (i % 4, i // 4) if self.accum_dtype == "float64" else (i // 4, i % 4)
        return far * 16 + j, near

    def _element(self, matrix: str, lane: Any, register: Any) -> tuple[Any, Any]:
        if matrix != "C":
            return lane % 16, lane // 16 * (self.row.run * self.k_pack) + register
        if self.accum_dtype == "float64":
            return register * 4 + lane // 16, lane % 16
        return mfma_store_index_map(lane, register)

    def _steps(self) -> list[tuple[int, int, int]]:
        return [(0, step * self.row.run, step * self.row.run) for step in range(self.k_pack)]

    mfma, mfma_atom = TensorCoreIntrinEmitter.mma, TensorCoreIntrinEmitter.mma_atom
    make_mfma_load_layout = TensorCoreIntrinEmitter.make_mma_load_layout
    make_mfma_store_layout = TensorCoreIntrinEmitter.make_mma_store_layout
