"""Calls of device functions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import (AddressOf, Alloc, Buffer, Call, Evaluate, Expr, Load, StringConst, Var, call, cast, convert,
                         dtype as DType, is_const, load, with_options)

from .addresses import address_of
from .atomic import atomic_add, atomic_max, atomic_min
from .composed import (dp4a, warp_reduce_bitand, warp_reduce_bitor, warp_reduce_max, warp_reduce_min, warp_reduce_sum)
from .hopper_raw import TmaDescriptor, registered_map, tma_load
from .kernel import KernelLaunchFrame, need_kernel
from .tensor import dtype_of
from .thread import (FULL_MASK, activemask, all_sync, any_sync, ballot_sync, emit_call, match_any_sync, shfl_down, shfl_sync,
                     shfl_up, shfl_xor, sync_threads, sync_warp, syncthreads_and, syncthreads_count, syncthreads_or)
from .tile import EMITTED
from .tracing.builder import Emitted, need_builder
from .tracing.regions import BufferSlice
from .tracing.state import error, example, place


def _sources() -> list[str]:
    """Texts that the program has given the launch so far; a function that they define is not CUDA's."""
    frame = next((f for f in reversed(need_builder("T.call_extern").frames) if isinstance(f, KernelLaunchFrame)), None)
    return [] if frame is None else frame.sources


def _shuffle(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda mask, value, lane, width=32: fn(value, lane, width, mask)


def _vote(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda mask, value: fn(value, mask)


def _reduced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The reduction of whole warps; None for a mask of other lanes."""
    return lambda mask, value: fn(value) if is_const(cast(convert(mask), "uint32"), FULL_MASK) or mask == -1 else None


def _atomic(fn: Callable[..., Any], returns: bool) -> Callable[..., Any]:
    def run(where: Any, value: Any, *order: Any) -> Any:
        at = _element(where)
        return None if at is None or order else fn(at, value, return_prev=returns)

    return run


def _element(where: Any) -> Load | None:
    """The element at an address; None for other pointers."""
    if isinstance(where, (Buffer, BufferSlice)):
        where = address_of(where)
    return load(where.buffer, where.indices) if isinstance(where, AddressOf) else None


def _dp4a(*where: Any) -> Any:
    at = [_element(w) for w in where]
    return None if any(x is None for x in at) else dp4a(*at)


# CUDA's functions that threads take part in together, and functions of the older device library -> those of the language.
# Each takes the arguments of the device function; None: not these arguments.
_TABLE: dict[str, Callable[..., Any]] = {
    "__shfl_sync": _shuffle(shfl_sync), "__shfl_xor_sync": _shuffle(shfl_xor), "__shfl_up_sync": _shuffle(shfl_up),
    "__shfl_down_sync": _shuffle(shfl_down), "__any_sync": _vote(any_sync), "__all_sync": _vote(all_sync),
    "__ballot_sync": _vote(ballot_sync), "__match_any_sync": _vote(match_any_sync), "__activemask": activemask,
    "__reduce_add_sync": _reduced(warp_reduce_sum), "__reduce_max_sync": _reduced(warp_reduce_max),
    "__reduce_min_sync": _reduced(warp_reduce_min), "__reduce_and_sync": _reduced(warp_reduce_bitand),
    "__reduce_or_sync": _reduced(warp_reduce_bitor), "__syncwarp": sync_warp, "__syncthreads": sync_threads,
    "__syncthreads_count": syncthreads_count, "__syncthreads_and": syncthreads_and, "__syncthreads_or": syncthreads_or,
    "__threadfence": lambda: emit_call("fence_gpu"), "__threadfence_block": lambda: emit_call("fence_block"),
    **{name + op: _atomic(fn, returns) for op, fn in (("Add", atomic_add), ("Max", atomic_max), ("Min", atomic_min))
       for name, returns in (("atomic", True), ("Atomic", False))},
    **{f"Atomic{op}Ret": _atomic(fn, True) for op, fn in (("Add", atomic_add), ("Max", atomic_max), ("Min", atomic_min))},
    "DP4A": _dp4a, "tl::tma_load": lambda *args: tma_load(*args) if isinstance(args[0], TmaDescriptor) else None,
}


def _whose_data(pointer: Var) -> Buffer | None:
    """The parameter, output or allocation whose `.data` this is; the buffer gives the element type."""
    b = need_builder("T.call_extern")
    known = [*(buffer for _, buffer in b.params.values() if buffer is not None), *b.outputs,
             *(s.buffer for f in b.frames for s in f.stmts if isinstance(s, Alloc))]
    return next((k for k in known if k.data is pointer), None)


def _extern_arg(x: Any) -> Expr:
    if isinstance(x, TmaDescriptor):
        return call("tensor_map", (), "handle", map=registered_map(need_kernel("T.call_extern"), x.map), span=place())
    if isinstance(x, (Buffer, BufferSlice)):
        return address_of(x)
    if isinstance(x, Var) and x.dtype.is_handle:
        buffer = _whose_data(x)
        return address_of(buffer) if buffer is not None else x
    try:
        return convert(x)
    except TypeError:
        raise error("extern-argument", f"an extern call cannot take ‹a {type(x).__name__}›") from None


def _extern(op: str, dtype: Any, name: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(name, DType) or not isinstance(name, str) or name == dtype:
        raise error("extern-argument", f"T.{op}: the function name must be a string, found {name!r}",
                    expected="the function's name as a string")
    result = DType("handle") if dtype in (None, "handle", "void", "") else dtype_of(dtype, f"T.{op}")
    silent = result.is_handle and name.startswith("atomic")
    own = _TABLE.get(f"A{name[1:]}" if silent else name) if not any(name in text for text in _sources()) else None
    if own is not None and (value := own(*args)) is not None:
        return EMITTED if result.is_handle else value if isinstance(value, Emitted) else cast(value, result)
    e = Call("call_extern", (StringConst(str(name)), *map(_extern_arg, args)), result, span=place())
    if result.is_handle:
        b = need_builder(f"T.{op}")
        b.emit(Evaluate(e, span=b.here()))
        return EMITTED
    return e if op == "call_pure_extern" else _own_call(e)


def _own_call(e: Call) -> Call:
    """The call with a unique number, so that its value is not identified with that of an equal call.

    It stays where it is written, also in an operand that is evaluated only under a condition."""
    b = need_builder("T.call_extern")
    b.extern_calls += 1
    return with_options(e, number=b.extern_calls)


@example('Y[i] = T.call_extern("float32", "fmaxf", X[i], 0.0)')
def call_extern(dtype: Any = None, func_name: Any = None, *args: Any) -> Any:
    """Call a device function by name; dtype "handle" makes it a statement.  Buffers are passed as pointers, the tensor map of
    T.create_tma_descriptor as an object that converts to any type of 128 bytes (const CUtensorMap&, const CUtensorMap*).

    dtype may be a keyword beside the others: T.call_extern("f", x, dtype="handle").  Raises extern-argument.

    CUDA's functions that exchange values between threads are those of the language (__shfl_xor_sync is T.shfl_xor).

    Equal calls are executed separately (T.call_pure_extern: the compiler may merge them).
    """
    return _extern("call_extern", dtype, func_name, args)


@example('Y[i] = T.call_pure_extern("float32", "fmaxf", X[i], 0.0)')
def call_pure_extern(dtype: Any = None, func_name: Any = None, *args: Any) -> Any:
    """Call a device function without effects by name."""
    return _extern("call_pure_extern", dtype, func_name, args)
