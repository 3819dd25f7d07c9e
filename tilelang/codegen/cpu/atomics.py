"""Atomic operations. Those on memory of the block are plain accesses, because one CPU thread runs a block."""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Call, dtype, GLOBAL
from tilelang.target.cpu import unsupported

from . import arithmetic
from .code import CallPrinter, Code, pointed
from .text import Fn
from .types import convert, from_memory, load, memory_type, store, to_memory, value_type

_RMW = {"add": "add", "or": "or", "and": "and", "xor": "xor", "exchange": "xchg", "inc": "uinc_wrap", "dec": "udec_wrap"}
_COMBINE = {"add": "sum", "max": "max", "min": "min", "or": "bitor", "and": "bitand", "xor": "bitxor"}
_ORDERS = {"relaxed": "monotonic", "consume": "acquire", "acquire": "acquire", "release": "release",
           "acq_rel": "acq_rel", "seq_cst": "seq_cst"}


def atomic_update(f: Fn, kind: str, address: str, v: str, dt: dtype, *, shared: bool, order: str = "relaxed",
                  span: Any = None) -> str:
    """Emit *address = kind(*address, v), atomic with respect to other blocks; returns the old register value.

    shared: the memory belongs to the block, which one CPU thread runs, so a plain update is atomic.
    """
    if kind not in _COMBINE and kind not in _RMW:
        raise unsupported(f"the atomic operation {kind}", span=span)
    if shared and kind not in ("inc", "dec"):
        old = load(f, dt, address, span)
        store(f, dt, v if kind == "exchange" else arithmetic.combine(f, _COMBINE[kind], old, v, dt), address, span)
        return old
    llvm_order = _ORDERS[order]
    if dt.is_int:
        op = _RMW.get(kind) or ("u" if dt.is_unsigned else "") + kind
        return f.let(f"atomicrmw {op} ptr {address}, {memory_type(dt)} {v} {llvm_order}")
    return _compare_exchange(f, kind, address, v, dt, llvm_order)


def _compare_exchange(f: Fn, kind: str, address: str, v: str, dt: dtype, order: str) -> str:
    """An atomic update of floats: a loop over compare-and-exchange on the bits."""
    it = f"i{dt.bits}"
    first = f.let(f"load atomic {it}, ptr {address} monotonic, align {dt.bytes}")
    before, again, out = f.label, f.name_of("again"), f.name_of("done")
    f.start(again)
    seen = f"%{f.name_of('seen')}"
    at = len(f.lines)
    old = _from_bits(f, dt, seen)
    new = v if kind == "exchange" else arithmetic.combine(f, _COMBINE[kind], old, v, dt)
    pair = _exchanged_if(f, address, seen, _to_bits(f, dt, new), it, order)
    got = f.let(f"extractvalue {{ {it}, i1 }} {pair}, 0")
    ok = f.let(f"extractvalue {{ {it}, i1 }} {pair}, 1")
    f.lines.insert(at, f"  {seen} = phi {it} [ {first}, %{before} ], [ {got}, %{f.label} ]")
    f.end(f"br i1 {ok}, label %{out}, label %{again}")
    f.start(out)
    return old


def _from_bits(f: Fn, dt: dtype, bits: str) -> str:
    """The register value of an element with these bits, an integer."""
    it, mt = f"i{dt.bits}", memory_type(dt)
    return from_memory(f, dt, bits if mt == it else f.let(f"bitcast {it} {bits} to {mt}"))


def _to_bits(f: Fn, dt: dtype, v: str) -> str:
    """The bits of an element as an integer."""
    it, mt, stored = f"i{dt.bits}", memory_type(dt), to_memory(f, dt, v)
    return stored if mt == it else f.let(f"bitcast {mt} {stored} to {it}")


def _exchanged_if(f: Fn, address: str, compare: str, new: str, it: str, order: str) -> str:
    """Emit a compare-and-exchange of integers of LLVM type `it`; returns the pair (old value, whether it was exchanged)."""
    fail = "monotonic" if order in ("monotonic", "release") else "acquire" if order == "acq_rel" else order
    return f.let(f"cmpxchg ptr {address}, {it} {compare}, {it} {new} {order} {fail}")


def _target(cx: Code, e: Call) -> tuple[AddressOf, str]:
    where = pointed(cx, e, e.args[0])
    return where, cx.address_of(where)


def _in_range(cx: Code, where: AddressOf) -> str:
    return cx.in_range(where, [cx.index(i) for i in where.indices])


def _atomic(kind: str) -> CallPrinter:
    def emit(cx: Code, e: Call) -> str:
        where = pointed(cx, e, e.args[0])
        dt = where.buffer.dtype
        v = cx.cast_value(e.args[1], dt)
        shared = where.buffer.scope() != GLOBAL

        def update() -> str:
            _, at = _target(cx, e)
            if kind == "cas":
                compare, it, order = cx.cast_value(e.args[2], dt), memory_type(dt), _ORDERS[e.options.order or "relaxed"]
                return cx.f.let(f"extractvalue {{ {it}, i1 }} {_exchanged_if(cx.f, at, compare, v, it, order)}, 0")
            return atomic_update(cx.f, kind, at, v, dt, shared=shared, order=e.options.order or "relaxed",
                                 span=e.span or cx.span)

        return cx.f.choose(_in_range(cx, where), value_type(dt), update, lambda: cx.safe_value(where.buffer, dt))

    return emit


def _atomic_lanes(lanes: int) -> CallPrinter:
    """atomic_addx2 and atomic_addx4: atomic additions to 2 or 4 adjacent elements."""

    def emit(cx: Code, e: Call) -> str:
        where, at = _target(cx, e)
        dt = where.buffer.dtype
        value, vt = e.args[1], e.args[1].dtype
        wide = cx.f.alloca(value_type(dt.with_lanes(lanes)), hint="lanes")
        if vt.lanes == lanes:
            v = cx.cast_value(value, dt.with_lanes(lanes))
            scalars = [cx.f.let(f"extractelement {value_type(dt.with_lanes(lanes))} {v}, i64 {k}") for k in range(lanes)]
        elif isinstance(value, AddressOf):
            src = cx.address_of(value)
            sd = value.buffer.dtype
            scalars = [convert(cx.f, load(cx.f, sd, cx.f.at(src, memory_type(sd), str(k))), sd, dt) for k in range(lanes)]
        else:
            raise unsupported(f"{e.op} with a value of type {vt}", span=e.span or cx.span)
        ok = _in_range(cx, where)
        shared = where.buffer.scope() != GLOBAL

        def update() -> None:
            for k, p in enumerate(scalars):
                old = atomic_update(cx.f, "add", cx.f.at(at, memory_type(dt), str(k)), p, dt, shared=shared)
                cx.f.do(f"store {value_type(dt)} {old}, ptr {cx.f.at(wide, value_type(dt), str(k))}")

        cx.f.branch(ok, update)
        return cx.f.let(f"load {value_type(dt.with_lanes(lanes))}, ptr {wide}")

    return emit


def _atomic_load(cx: Code, e: Call) -> str:
    where, at = _target(cx, e)
    dt, order = where.buffer.dtype, _ORDERS[e.options.order or "seq_cst"]
    return _from_bits(cx.f, dt, cx.f.let(f"load atomic i{dt.bits}, ptr {at} {order}, align {dt.bytes}"))


def _atomic_store(cx: Code, e: Call) -> str:
    where, at = _target(cx, e)
    dt, order = where.buffer.dtype, _ORDERS[e.options.order or "seq_cst"]
    bits = _to_bits(cx.f, dt, cx.cast_value(e.args[1], dt))
    cx.f.do(f"store atomic i{dt.bits} {bits}, ptr {at} {order}, align {dt.bytes}")
    return "0"


ATOMIC_CALLS: dict[str, CallPrinter] = {
    **{f"atomic_{k}": _atomic(k) for k in (*_COMBINE, *_RMW, "cas")},
    "atomic_addx2": _atomic_lanes(2), "atomic_addx4": _atomic_lanes(4),
    "atomic_load": _atomic_load, "atomic_store": _atomic_store,
}
