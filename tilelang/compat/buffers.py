"""Questions about buffers, where they live, regions and expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from tilelang import ir
from tilelang.errors import facts
from tilelang.ir import DYNAMIC, FRAGMENT, TMEM
from tilelang.language.tracing.regions import BufferSlice
from tilelang.language.tracing.state import named
from tilelang.target import is_pure


def _scope(buffer: Any) -> str:
    buffer = getattr(buffer, "buffer", buffer)  # a region or load
    scope = buffer.scope
    return scope() if callable(scope) else scope


def _lives_in(name: str, scope: str, about: str) -> Callable[[Any], bool]:
    def asked(buffer: Any) -> bool:
        return _scope(buffer) == scope

    return named(asked, name, about)


is_global = _lives_in("is_global", "global", "Whether a buffer is in global memory.")
is_shared_dynamic = _lives_in("is_shared_dynamic", DYNAMIC, "Whether a buffer is in dynamic shared memory.")
is_tensor_memory = _lives_in("is_tensor_memory", TMEM, "Whether a buffer is in tensor memory.")
is_fragment = _lives_in("is_fragment", FRAGMENT, "A fragment: registers of a whole block.")
is_local = _lives_in("is_local", "local", "Per-thread memory.")


def is_shared(buffer: Any, allow_dynamic: bool = True) -> bool:
    """Whether a buffer is in shared memory.  allow_dynamic: dynamic shared memory counts too."""
    return _scope(buffer) == "shared" or (allow_dynamic and is_shared_dynamic(buffer))


def array_reduce(array: Iterable[int]) -> int:
    """The product of sizes: elements of a shape."""
    return prod(array)


def _wrong(name: str, x: Any) -> TypeError:
    return TypeError(f"{name} expects a buffer, a region or an element of a buffer, found {type(x).__name__}")


def retrieve_shape(x: Any) -> list[Any]:
    """Shape of a buffer; extents of a region; of an element, ones and the lanes of its last index."""
    if isinstance(x, ir.Buffer):
        return list(x.shape)
    if isinstance(x, (BufferSlice, ir.Region, ir.Load)):
        return list(to_buffer_region(x).extents)
    raise _wrong("retrieve_shape", x)


def retrieve_stride(x: Any) -> list[Any]:
    """Strides of the buffer of an operand, elements: its own, or those of compact rows."""
    buffer = x if isinstance(x, ir.Buffer) else getattr(x, "buffer", None)
    if not isinstance(buffer, ir.Buffer):
        raise _wrong("retrieve_stride", x)
    if buffer.strides_ is not None:
        return list(buffer.strides_)
    strides: list[Any] = [1]
    for size in reversed(buffer.shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[:len(buffer.shape)]


def to_buffer_region(x: Any, access_type: str = "rw", extents: Any = None) -> ir.Region:
    """The region an operand of a tile operation names.

    A buffer is all of it; of an element the region that starts there, of `extents` (default: one element, or the lanes of
    a vector index).  access_type ("r", "w", "rw") says what it is for; regions are the same for all.
    """
    if access_type not in ("r", "w", "rw"):
        raise facts(ValueError(f"access_type must be r, w or rw, found {access_type!r}"), "r, w or rw", repr(access_type))
    if isinstance(x, BufferSlice):
        return x.region
    if isinstance(x, ir.Region):
        return x
    if isinstance(x, ir.Buffer):
        return ir.Region(x, tuple(ir.const(0) for _ in x.shape), tuple(x.shape))
    if isinstance(x, ir.Load):
        mins = tuple(i.base if isinstance(i, ir.Ramp) else i for i in x.indices)
        if any(isinstance(i, ir.Ramp) and not ir.is_const(i.stride, 1) for i in x.indices):
            raise facts(ValueError("the elements of a strided vector are no region"), "a vector of neighbours", "a strided one")
        sizes = tuple(i.lanes if isinstance(i, ir.Ramp) else 1 for i in x.indices)
        if extents is not None:
            given = tuple(extents)
            if len(given) > len(mins):
                raise facts(ValueError(f"{len(given)} extents for a buffer of {len(mins)} dimensions"),
                            f"{len(mins)} extents", str(len(given)))
            sizes = (1,) * (len(mins) - len(given)) + given
        return ir.Region(x.buffer, mins, sizes)
    raise _wrong("to_buffer_region", x)


def get_buffer_region_from_load(load: Any, extents: Any = None) -> ir.Region | None:
    """The region of a vector element or of `extents` from an element; None for a plain element without extents."""
    if extents is None and not any(isinstance(i, ir.Ramp) for i in load.indices):
        return None
    return to_buffer_region(load, "r", extents)


def is_full_region(region: Any) -> bool:
    """Whether a region is the whole of its buffer."""
    return bool(to_buffer_region(region).is_full)


def retrive_ptr_from_buffer_region(x: Any, access_type: str = "r") -> ir.AddressOf:
    """Address of the first element of an operand."""
    region = to_buffer_region(x, access_type)
    return ir.AddressOf(region.buffer, region.mins)


def get_prim_func_name(func: Any, default: str = "main") -> str:
    """Name of a program."""
    return getattr(getattr(func, "func", func), "name", None) or default


PURE, READ_STATE, UPDATE_STATE = 0, 1, 2


def side_effect(expr: Any) -> int:
    """The effect of evaluating an expression: 0 none, 1 it reads memory, 2 it calls something that may change state."""
    found = PURE
    for n in ir.walk(ir.convert(expr)):
        if isinstance(n, ir.Call) and not is_pure(n.op):
            return UPDATE_STATE
        if isinstance(n, ir.Load):
            found = READ_STATE
    return found


__all__ = ["array_reduce", "get_buffer_region_from_load", "get_prim_func_name", "is_fragment",
           "is_full_region", "is_global", "is_local",
           "is_shared", "is_shared_dynamic", "is_tensor_memory", "retrieve_shape", "retrieve_stride",
           "retrive_ptr_from_buffer_region", "side_effect", "to_buffer_region"]
