"""Atomic operations on one element (once per executing thread) or on a tile (each element once per block)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang import errors
from tilelang.ir import AddressOf, Buffer, Evaluate, Expr, Load, call, cast, convert
from tilelang.ops import AtomicPlan, AtomicTile

from .tracing.builder import Builder, Emitted, need_builder
from .tracing.flags import flag
from .loops import options_from
from .tracing.regions import BufferSlice, operand, pair, whole_region
from .tracing.state import describe, error, example, named
from .tile import EMITTED, emit_op

ORDERS = ("relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst")


def _order(b: Builder, order: str | None) -> str:
    if order is None:
        return "relaxed"
    if order not in ORDERS:
        raise error("atomic-order", f"unknown memory order ‹{order!r}›, expected «one of {', '.join(ORDERS)}»")
    return order


def _has_extents(x: Any) -> bool:
    return isinstance(x, (Buffer, BufferSlice))


def _atomic(kind: str, dst: Any, value: Any, order: str | None, return_prev: bool,
            annotations: dict[str, Any] | None, *more: Any) -> Any:
    b = need_builder(f"T.atomic_{kind}")
    order = _order(b, order)
    return_prev = flag(return_prev, "return_prev")
    plan, attrs = options_from(AtomicPlan, annotations, memory_order=order)
    if not isinstance(dst, (Buffer, BufferSlice, Load)):
        raise error("atomic-operand", f"T.atomic_{kind} updates an element, region or buffer, found {describe(dst)}")
    if _has_extents(dst) or _has_extents(value):
        if return_prev:
            raise error("atomic-previous", f"T.atomic_{kind} on ‹a tile› has no single previous value")
        if _has_extents(value) or isinstance(value, Load) and not _has_extents(dst):
            src, region = pair(value, dst, f"atomic_{kind}")
            return emit_op(b, AtomicTile(region, src, kind, attrs, plan, span=b.here()))
        region = whole_region(dst, "dst")
        scalar = cast(convert(value), region.buffer.dtype)
        return emit_op(b, AtomicTile(region, scalar, kind, attrs, plan, span=b.here()))
    assert isinstance(dst, Load)  # the other kinds of destination have extents
    AtomicTile(whole_region(dst, "dst"), convert(0), kind, span=b.here()).check()
    at = AddressOf(dst.buffer, dst.indices)
    dt = dst.buffer.dtype
    op = call(f"atomic_{kind}", (at, *(cast(convert(v), dt) for v in (value, *more))), dt, span=b.here(), order=order)
    if return_prev:
        old = b.nameless(b.let("old", op))
        b.wrote(dst.buffer)
        return old
    b.emit(Evaluate(op, span=b.here()))
    return EMITTED


def atomic_add(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False, use_tma: bool = False,
               annotations: dict[str, Any] | None = None) -> Any:
    """dst += value, atomically.  return_prev (element form): return the old value.  use_tma (tile form): use TMA, or raise.

    dst: an element (value: a scalar), or a region or buffer in global or shared memory (value: a scalar or a tile of its
    extents in any scope), of a dtype with atomics.  Each executing thread updates an element, the block a tile once.
    Raises atomic-operand, atomic-order, atomic-previous.

    Example:
        T.atomic_add(C[bx * 128, by * 128], acc)   # a (128, 128) tile from that element on
        old = T.atomic_add(I[0], 1, return_prev=True)
    """
    if flag(use_tma, "use_tma"):
        if return_prev or not (_has_extents(dst) or _has_extents(value)):
            raise errors.error("atomic-option", "use_tma is for tiles, without return_prev",
                               expected="a tile, without return_prev",
                               found=f"{'return_prev=True' if return_prev else 'an element'}",
                               span=need_builder("T.atomic_add").here())
        annotations = {**(annotations or {}), "use_tma": True}
    return _atomic("add", dst, value, memory_order, return_prev, annotations)


def _extremum(kind: str) -> Callable[..., Any]:
    def fn(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False,
           annotations: dict[str, Any] | None = None) -> Any:
        return _atomic(kind, dst, value, memory_order, return_prev, annotations)

    return named(fn, f"atomic_{kind}", f"""dst = {kind}(dst, value), atomically.

    dst: an element (value: a scalar), or a region or buffer in global or shared memory (value: a scalar or a tile of its
    extents in any scope), of a dtype with atomics.  Each executing thread updates an element, the block a tile once.
    Raises atomic-operand, atomic-order, atomic-previous.

    Example:
        T.atomic_{kind}(Y[0], X[i])
    """)


atomic_max, atomic_min = _extremum("max"), _extremum("min")


def _of_element(kind: str, dst: Any, value: Any, order: str | None, return_prev: bool, integers: bool = True,
                bits: int = 64, compare: Any = None) -> Any:
    """An atomic that has no form for tiles.  bits: width of the widest integers.  compare: the value that must stand there."""
    if not isinstance(dst, Load) or _has_extents(value) or _has_extents(compare):
        raise error("atomic-previous", f"T.atomic_{kind} works on one element",
                    found=f"{describe(dst) if not isinstance(dst, Load) else 'values of a tile'}")
    if integers and not dst.dtype.is_int:
        raise error("atomic-operand", f"T.atomic_{kind} needs «an integer element», found {dst.dtype}")
    if dst.dtype.bits > bits:
        raise error("atomic-operand", f"T.atomic_{kind} needs «an integer of {bits} bits», found {dst.dtype}",
                    hint=f"use an element of int{bits} or uint{bits}")
    more = () if compare is None else (compare,)
    return _atomic({"exch": "exchange", "sub": "add"}.get(kind, kind), dst, value, order, return_prev, None, *more)


def _bitwise(kind: str, op: str, operands: str, mask: str) -> Callable[..., Any]:
    def fn(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
        return _of_element(kind, dst, value, memory_order, return_prev)

    return named(fn, f"atomic_{kind}", f"dst {op}= value, atomically, by each executing thread.\n\n{operands}\n\n"
                 f"Example:\n    T.atomic_{kind}(I[i // 32], {mask})")


atomic_or = _bitwise("or", "|", "dst: an integer element in global or shared memory.  value: a scalar, cast to its dtype.  "
                     "memory_order, return_prev: as\nT.atomic_add.  Raises atomic-previous, atomic-operand, atomic-order.",
                     "1 << (i % 32)")
_AS_OR = "dst, value, memory_order, return_prev: as T.atomic_or.  Raises what T.atomic_or raises."
atomic_and, atomic_xor = _bitwise("and", "&", _AS_OR, "~(1 << (i % 32))"), _bitwise("xor", "^", _AS_OR, "1 << (i % 32)")


@example("left = T.atomic_sub(I[0], 1, return_prev=True)")
def atomic_sub(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """dst -= value, atomically, by each executing thread.

    dst: an element in global or shared memory, of a dtype with atomics.  value, memory_order, return_prev: as T.atomic_or.
    """
    negative = value if _has_extents(value) or not isinstance(dst, Load) else cast(convert(0), dst.dtype) - cast(
        convert(value), dst.dtype)
    return _of_element("sub", dst, negative, memory_order, return_prev, integers=False)


@example("before = T.atomic_exch(I[0], 7, return_prev=True)")
def atomic_exch(dst: Any, value: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """dst = value, atomically, by each executing thread; return_prev: return the old value.

    dst: an element in global or shared memory, of a dtype with atomics.  value, memory_order: as T.atomic_or.
    """
    return _of_element("exch", dst, value, memory_order, return_prev, integers=False)


@example("if T.atomic_cas(I[0], 0, 1) == 0:  # this thread is the first", "    Y[0] = X[0]")
def atomic_cas(dst: Any, compare: Any, value: Any, memory_order: str | None = None) -> Any:
    """dst = value where dst holds compare, atomically, by each executing thread.  Returns the old value.

    dst: an integer element in global or shared memory.  compare, value: scalars, cast to its dtype.  memory_order: as
    T.atomic_add.  Raises what T.atomic_or raises.
    """
    return _of_element("cas", dst, value, memory_order, True, compare=compare)


@example("ticket = T.atomic_inc(I[0], 63, return_prev=True)   # 0 to 63, and around")
def atomic_inc(dst: Any, limit: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """dst = 0 where dst >= limit, else dst + 1, atomically, by each executing thread; compared as unsigned numbers.

    dst: an int32 or uint32 element in global or shared memory.  limit: a scalar, the same in all calls on dst.
    memory_order, return_prev: as T.atomic_or.  Raises what T.atomic_or raises.
    """
    return _of_element("inc", dst, limit, memory_order, return_prev, bits=32)


@example("T.atomic_dec(I[0], 63)")
def atomic_dec(dst: Any, limit: Any, memory_order: str | None = None, return_prev: bool = False) -> Any:
    """dst = limit where dst is 0 or > limit, else dst - 1, atomically, by each executing thread; compared as unsigned numbers.

    dst, limit, memory_order, return_prev: as T.atomic_inc.  Raises what T.atomic_or raises.
    """
    return _of_element("dec", dst, limit, memory_order, return_prev, bits=32)


def _access_order(b: Builder, name: str, order: str, allowed: tuple[str, ...]) -> str:
    if order not in allowed:
        raise error("atomic-load-order", f"{name} does not support memory_order=‹{order!r}›; expected one of {list(allowed)}",
                    expected=f"one of {', '.join(allowed)}")
    return order


def _element(b: Builder, x: Any, name: str) -> Load:
    if not isinstance(x, Load):
        o = operand(x, f"the operand of T.{name}")
        raise error("atomic-operand", f"T.{name} works on «one element» of `{o.buffer.name}`", found=describe(x))
    return x


@example('I[i] = T.atomic_load(I[0], memory_order="acquire")')
def atomic_load(src: Any, memory_order: str = "seq_cst") -> Expr:
    """The value of an element, read atomically by each executing thread; in the element's dtype.

    src: an element in global or shared memory.  memory_order: relaxed, consume, acquire or seq_cst.
    Raises atomic-operand, atomic-load-order.
    """
    b = need_builder("T.atomic_load")
    order = _access_order(b, "atomic_load", memory_order, ("relaxed", "consume", "acquire", "seq_cst"))
    x = _element(b, src, "atomic_load")
    read = call("atomic_load", (AddressOf(x.buffer, x.indices),), x.dtype, span=b.here(), order=order)
    return b.nameless(b.let("loaded", read))


@example('T.atomic_store(I[0], 1, memory_order="release")')
def atomic_store(dst: Any, src: Any, memory_order: str = "seq_cst") -> Emitted:
    """dst = src, written atomically by each executing thread.

    dst: an element in global or shared memory.  src: a scalar (an element, in any scope), cast to dst's dtype.
    memory_order: relaxed, release or seq_cst.  Raises atomic-operand, atomic-load-order.
    """
    b = need_builder("T.atomic_store")
    order = _access_order(b, "atomic_store", memory_order, ("relaxed", "release", "seq_cst"))
    x = _element(b, dst, "atomic_store")
    op = call("atomic_store", (AddressOf(x.buffer, x.indices), cast(convert(src), x.dtype)), x.dtype, span=b.here(),
              order=order)
    b.emit(Evaluate(op, span=b.here()))
    return EMITTED

__all__ = ["atomic_add", "atomic_cas", "atomic_dec", "atomic_exch", "atomic_inc", "atomic_load", "atomic_or", "atomic_store",
           "atomic_sub"]
