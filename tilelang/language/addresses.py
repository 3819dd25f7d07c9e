"""Addresses of elements: T.address_of, T.access_ptr; the methods access_ptr, vload and vstore of buffers."""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Buffer, Const, Expr, Load, Region, convert, dtype as DType, load
from tilelang.ir.buffer import pointer, vector_load, vector_store

from .tracing.builder import Emitted, need_builder
from .tracing.names import Names
from .loops import loop_bound
from .math import Ramp_ as ramp
from .tracing.regions import BufferSlice, operand, trailing
from .tracing.state import describe, error, example
from .tile import EMITTED


@example('T.call_extern("handle", "my_load", T.address_of(A[bx * 128, 0]), tx)')
def address_of(x: Any) -> AddressOf:
    """Address of an element `A[i, j]` (of a buffer: its first element)."""
    if isinstance(x, Load):
        return AddressOf(x.buffer, x.indices)
    if isinstance(x, BufferSlice):
        return AddressOf(x.buffer, x.region.mins)
    if isinstance(x, Buffer):
        return AddressOf(x, tuple(Const(0, DType("int32")) for _ in x.shape))
    raise error("pointer", f"an address is taken of «a buffer, a region or an element», found {describe(x)}")


_ACCESS = {"r": 1, "w": 2, "rw": 3, "wr": 3}


@example('T.call_extern("handle", "my_store", T.access_ptr(X[i], "w"), X[i])')
def access_ptr(base: Any, access_type: Any = "r", *extents: Any, offset: Any = 0, extent: Any = None,
               ignore_last_ndim: int = 0) -> AddressOf:
    """Pointer to an element, for extern calls and intrinsics.

    base: a buffer or region (its first element) or an element, of any shape, dtype and scope.  offset: in elements.
    extents, extent, ignore_last_ndim: how much is accessed; they have no effect here.  Raises access-type for a bad access
    string or more extents than dimensions, pointer for an argument that has no address or is no access.
    """
    _check_access("T.access_ptr", access_type)
    at = address_of(base)
    if len(extents) > len(at.indices):
        raise error("access-type", f"T.access_ptr of {len(at.indices)} dimensions with ‹{len(extents)}› extents",
                    expected=f"at most {len(at.indices)} extents", hint="leave extents out")
    if isinstance(offset, int) and offset == 0:
        return at
    if len(at.indices) != 1:
        raise error("access-type", "access_ptr with an offset needs «a 1-dimensional buffer»",
                    found=f"{len(at.indices)} dimensions", hint="give the element's indices instead")
    return AddressOf(at.buffer, (at.indices[0] + offset,))


def _check_access(what: str, access_type: Any) -> None:
    if not isinstance(access_type, (str, int)) or isinstance(access_type, bool):
        raise error("pointer", f"{what}: an access is «'r', 'w', 'rw' or a bit mask», found {describe(access_type)}",
                    hint="pass 'r', 'w' or 'rw'")
    if isinstance(access_type, str) and (not access_type or set(access_type) - {"r", "w"}):
        raise error("access-type", f"Invalid access_type=‹{access_type!r}›, expected 'r', 'w' or 'rw'")


def region(buffer: Any, access_type: Any = "rw", *extents: Any) -> Region:
    """The region that starts at an element, as an operand of tile operations; iterated, it gives the (min, extent) of each
    dimension.

    buffer: in any scope: an element, which the extents of its last dimensions follow (none: one element), or a whole buffer or
    slice.  access_type: "r", "w", "rw" or a bit mask, without effect.  Raises access-type, pointer, region-operand,
    copy-extents for too many extents.

    Example:
        T.copy(T.region(A[by * 128, 0], "r", 128, 64), A_s)
        rows = [r.extent for r in T.region(A[by * 128, 0], "r", 128, 64)]
    """
    _check_access("T.region", access_type)
    at = operand(buffer, "the operand of T.region")
    if extents and at.extents is not None:
        raise error("access-type", "T.region takes extents after an element only", expected="no extents after a buffer",
                    found=str(len(extents)), hint="give the element where the region starts: T.region(A[i, j], \"r\", 16, 16)")
    return at.region(at.extents or trailing(at, tuple(loop_bound(e, "an extent of T.region") for e in extents), "region"))


@pointer.provide
def _pointer_of(buffer: Buffer, access_mask: Any, offset: Any, extent: Any) -> AddressOf:
    return access_ptr(buffer, access_mask, offset=offset, extent=extent)


def _vector_index(buffer: Buffer, begin: Any, lanes: int) -> tuple[Any, ...]:
    """The vector index of `lanes` consecutive elements from `begin` on."""
    at = tuple(begin) if isinstance(begin, (tuple, list)) else (begin,)
    return at if lanes == 1 else (*at[:-1], ramp(at[-1], 1, lanes))


@vector_load.provide
def _vector_load(buffer: Buffer, begin: Any, dtype: Any) -> Expr:
    return load(buffer, _vector_index(buffer, begin, _lanes(buffer, buffer.dtype if dtype is None else DType(dtype))))


@vector_store.provide
def _vector_store(buffer: Buffer, begin: Any, value: Any) -> Emitted:
    b, v = need_builder("Buffer.vstore"), convert(value)
    Names(b).setitem(buffer, _vector_index(buffer, begin, v.dtype.lanes), v)
    return EMITTED


def _lanes(buffer: Buffer, dt: DType) -> int:
    if dt.scalar != buffer.dtype.scalar or dt.lanes % buffer.dtype.lanes:
        raise error("dtype-name", f"vload of `{buffer.name}`, which holds {buffer.dtype}, as ‹{dt}›",
                    expected=f"{buffer.dtype.scalar} or vectors of it", hint="T.view gives another element type")
    return dt.lanes // buffer.dtype.lanes
