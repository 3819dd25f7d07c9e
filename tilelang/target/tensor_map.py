"""Tensor maps of TMA: checks the limits of the hardware and computes the arguments of cuTensorMapEncodeTiled.

Source: CUDA Driver API, "Tensor Map Object Management"; limits as the driver's return codes show them.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang.errors import error, register
from tilelang.ir import Buffer, Const, dtype, GLOBAL
from tilelang.ir.record import record

from .im2col import Im2col

register("tensor-map", ValueError, "a tensor or a box that TMA cannot describe",
         "make rows of a multiple of 16 bytes, or compile with tl.disable_tma_lower",
         expected="a box and strides that TMA can move")

# CUtensorMapDataType by element type; other types are copied as unsigned integers of the same size.
_DTYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
           "float64": 8, "bfloat16": 9}
_TFLOAT32 = 11
_BY_BITS = {8: 0, 16: 1, 32: 2, 64: 4}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2 = {0: 0, 64: 1, 128: 2, 256: 3}
_FILLS = {"zero": 0, "nan": 1}
MAP_BYTES, MAP_ALIGN, ADDRESS_ALIGN, STRIDE_ALIGN = 128, 64, 16, 16
# The bit pattern that a NaN fill writes, by element size in bytes.
NAN_BITS = {2: 0x7FF7, 4: 0x7FF77FF7}
# Element types of cp.reduce.async.bulk.tensor.add.  No tool diagnoses a wrong combination; it faults at run time.
REDUCE_ADD = ("float16", "bfloat16", "float32", "float64", "int32", "uint32", "uint64")


@record
class TensorMap:
    """One entry of `tensor_maps` in the plan of a Launch.

    name: the kernel parameter.  buffer: the global tensor.  box: extents of the TMA box, innermost first, in elements, one for
    each dimension.  swizzle: 0, 32, 64 or 128.  fill: the value of elements outside the tensor, "zero" or "nan".
    l2: bytes of L2 promotion, 0, 64, 128 or 256.  tf32: loads round float32 to tf32 (nearest, ties away from zero).
    """

    name: str
    buffer: Buffer
    box: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"
    l2: int = 0
    tf32: bool = False

    @property
    def entry(self) -> tuple[Any, ...]:
        """The tuple that is stored in the plan."""
        entry = self.name, self.buffer, self.box, self.swizzle, self.fill, self.l2
        return (*entry, True) if self.tf32 else entry

    @property
    def im2col(self) -> Im2col | None:
        """The matrix whose tiles the map moves, where the tensor is one."""
        return Im2col.of(self.buffer)

    @property
    def rank(self) -> int:
        return 4 if self.im2col else len(self.box)

    @property
    def coordinates(self) -> int:
        """Numbers that say where a box is."""
        return 6 if self.im2col else len(self.box)

    @property
    def box_bytes(self) -> int:
        """Bytes that a load of one box counts on its mbarrier, including elements out of bounds."""
        return math.prod(self.box, start=self.buffer.dtype.bits // 8)

    @property
    def codes(self) -> tuple[int, int, int, int]:
        """(data type, swizzle, L2 promotion, out-of-bounds fill) as numbers of the driver's enumerations."""
        dt = self.buffer.dtype
        kind = _TFLOAT32 if self.tf32 else _DTYPES.get(dt.base, _BY_BITS[dt.bits])
        return kind, _SWIZZLES[self.swizzle], _L2[self.l2], _FILLS[self.fill]

    def extents(self) -> tuple[Any, ...]:
        """Extents of the tensor, innermost first; of an im2col matrix those of the image."""
        if m := self.im2col:
            return (*reversed(m.image), self.buffer.shape[0] // (m.out[0] * m.out[1]))
        return tuple(reversed(self.buffer.shape))

    def strides(self) -> tuple[Any, ...]:
        """Strides in elements, innermost first, without the innermost (which is 1)."""
        if m := self.im2col:
            height, width, channels = m.image
            return channels, width * channels, height * width * channels
        return tuple(reversed(self.buffer.strides))[1:]

    def check(self) -> TensorMap:
        """Return the tensor map itself.  Raises tensor-map when the hardware does not support it."""
        why = unsupported(self.buffer, self.box, self.swizzle, self.fill, self.l2)
        if self.tf32 and self.buffer.dtype.base not in ("float32", "tfloat32"):
            why = f"elements of {self.buffer.dtype} are not rounded to tf32"
        if why is not None:
            raise error("tensor-map", f"TMA cannot move boxes {self.box} of `{self.buffer.name}`: {why}", found=why,
                        span=self.buffer.span)
        return self


def tensor_maps_of(launch: Any) -> tuple[TensorMap, ...]:
    """The tensor maps of a Launch."""
    return tuple(TensorMap(*entry) for entry in launch.plan.tensor_maps)


def unsupported(buffer: Buffer, box: tuple[int, ...], swizzle: int = 0, fill: str = "zero", l2: int = 0) -> str | None:
    """Why TMA cannot move boxes of a global tensor, None when it can.

    Extents and strides known at compile time are checked here.  The host checks the others at every call (address and
    strides must be multiples of 16 bytes).
    """
    dt = buffer.dtype
    if buffer.scope_name != GLOBAL:
        return f"it is a {buffer.scope_name} buffer"
    if not 1 <= len(buffer.shape) <= 5:
        return f"it has {len(buffer.shape)} dimensions, TMA takes 1 to 5"
    if dt.lanes != 1 or dt.bits not in _BY_BITS:
        return f"elements of {dt} have no form"
    if len(box) != len(buffer.shape):
        return f"the box has {len(box)} extents for {len(buffer.shape)} dimensions"
    if swizzle not in _SWIZZLES or l2 not in _L2 or fill not in _FILLS:
        return f"swizzle {swizzle}, L2 promotion {l2}, fill {fill!r} are not all available"
    m = Im2col.of(buffer)
    return _box_unsupported(dt, box, swizzle, fill) or (_strides_unsupported(buffer) if m is None else m.unsupported(box[0]))


def _box_unsupported(dt: dtype, box: tuple[int, ...], swizzle: int, fill: str) -> str | None:
    size = dt.bits // 8
    if not all(isinstance(b, int) and 1 <= b <= 256 for b in box):
        return "extents of a box are 1 to 256"
    if box[0] * size % 16:
        return f"the innermost extent of the box has {box[0] * size} bytes, which is no multiple of 16"
    if swizzle and box[0] * size > swizzle:
        return f"the innermost extent of the box has {box[0] * size} bytes, more than the swizzle's {swizzle}"
    if fill == "nan" and _DTYPES.get(dt.base, 0) in (0, 1, 2, 3, 4, 5):
        return f"{dt} has no NaN to fill with"
    return None


def _strides_unsupported(buffer: Buffer) -> str | None:
    size = buffer.dtype.bits // 8
    *outer, inner = (s.value if isinstance(s, Const) else s for s in buffer.strides)
    if inner != 1 if isinstance(inner, int) else True:
        return "the innermost dimension is not contiguous"
    for s in outer:
        if isinstance(s, int) and (s * size % STRIDE_ALIGN or not 0 <= s * size < 2**40):
            return f"a stride of {s * size} bytes is no multiple of {STRIDE_ALIGN}"
    if any(isinstance(d, int) and not 0 <= d <= 2**32 for d in buffer.shape):
        return "an extent is larger than 2**32"
    if isinstance(buffer.offset, int) and buffer.offset * size % ADDRESS_ALIGN:
        return f"it starts {buffer.offset * size} bytes into its storage, which is no multiple of {ADDRESS_ALIGN}"
    return None
