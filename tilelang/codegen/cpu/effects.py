"""Calls with an effect: atomics, printing, barriers that statement order already gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.ir import AddressOf, Call, StringConst, as_bool, dtype

from . import arithmetic
from .actors import ACTOR_EFFECTS
from .boxes import BOX_EFFECTS
from .clusters import CLUSTER_EFFECTS
from .descriptors import DESCRIPTOR_EFFECTS
from .text import Fn
from .types import convert, from_memory, load, memory_type, store, to_memory, unsupported, value_type

_RMW = {"add": "add", "or": "or", "and": "and", "xor": "xor", "exchange": "xchg"}
_COMBINE = {"add": "sum", "max": "max", "min": "min", "or": "bitor", "and": "bitand", "xor": "bitxor"}
_ORDERS = {"relaxed": "monotonic", "consume": "acquire", "acquire": "acquire", "release": "release",
           "acq_rel": "acq_rel", "seq_cst": "seq_cst"}


def atomic_update(f: Fn, kind: str, address: str, v: str, dt: dtype, *, shared: bool, order: str = "relaxed",
                  span: Any = None) -> str:
    """*address = kind(*address, v), atomically for other blocks; gives the old register value.

    shared: the memory belongs to the block, which runs in one CPU thread: a plain update is atomic.
    """
    if kind not in _COMBINE and kind != "exchange":
        raise unsupported(f"the atomic operation {kind}", span=span)
    if shared:
        old = load(f, dt, address, span)
        store(f, dt, v if kind == "exchange" else arithmetic.combine(f, _COMBINE[kind], old, v, dt), address, span)
        return old
    llvm_order = _ORDERS[order]
    if dt.is_int:
        op = _RMW.get(kind) or ("u" if dt.is_unsigned else "") + kind
        return f.let(f"atomicrmw {op} ptr {address}, {memory_type(dt)} {v} {llvm_order}")
    return _compare_exchange(f, kind, address, v, dt, llvm_order, span)


def _compare_exchange(f: Fn, kind: str, address: str, v: str, dt: dtype, order: str, span: Any) -> str:
    """Floats: a loop over compare-and-exchange on the bits."""
    it, mt = f"i{dt.bits}", memory_type(dt, span)
    first = f.let(f"load atomic {it}, ptr {address} monotonic, align {dt.bytes}")
    before, again, out = f.label, f.name_of("again"), f.name_of("done")
    f.start(again)
    seen = f"%{f.name_of('seen')}"
    at = len(f.lines)
    bits = seen if mt == it else f.let(f"bitcast {it} {seen} to {mt}")
    old = from_memory(f, dt, bits)
    new = v if kind == "exchange" else arithmetic.combine(f, _COMBINE[kind], old, v, dt)
    stored = to_memory(f, dt, new)
    new_bits = stored if mt == it else f.let(f"bitcast {mt} {stored} to {it}")
    fail = "monotonic" if order in ("monotonic", "release") else "acquire" if order == "acq_rel" else order
    pair = f.let(f"cmpxchg ptr {address}, {it} {seen}, {it} {new_bits} {order} {fail}")
    got = f.let(f"extractvalue {{ {it}, i1 }} {pair}, 0")
    ok = f.let(f"extractvalue {{ {it}, i1 }} {pair}, 1")
    f.lines.insert(at, f"  {seen} = phi {it} [ {first}, %{before} ], [ {got}, %{f.label} ]")
    f.end(f"br i1 {ok}, label %{out}, label %{again}")
    f.start(out)
    return old


def _target(cx: Any, e: Call) -> tuple[AddressOf, str]:
    where = e.args[0]
    if not isinstance(where, AddressOf):
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    return where, cx.address(where.buffer, [cx.index(i) for i in where.indices])


def _in_range(cx: Any, where: AddressOf) -> str:
    return str(cx.in_range(where, where.buffer, where.indices, [cx.index(i) for i in where.indices]))


def _atomic(kind: str) -> Callable[[Any, Call], str]:
    def emit(cx: Any, e: Call) -> str:
        where = e.args[0]
        if not isinstance(where, AddressOf):
            raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
        dt = where.buffer.dtype
        v = cx.cast_value(e.args[1], dt)
        shared = where.buffer.scope() != "global"

        def update() -> str:
            _, at = _target(cx, e)
            return atomic_update(cx.f, kind, at, v, dt, shared=shared, order=e.options.order or "relaxed",
                                 span=e.span or cx.span)

        return str(cx.f.choose(_in_range(cx, where), value_type(dt), update, lambda: cx.safe_value(where.buffer, dt)))

    return emit


def _atomic_lanes(lanes: int) -> Callable[[Any, Call], str]:
    """atomic_addx2 / x4: as many adjacent elements."""

    def emit(cx: Any, e: Call) -> str:
        where, at = _target(cx, e)
        dt = where.buffer.dtype
        value, vt = e.args[1], e.args[1].dtype
        wide = cx.f.alloca(value_type(dt.with_lanes(lanes)), hint="lanes")
        if vt.lanes == lanes:
            v = cx.cast_value(value, dt.with_lanes(lanes))
            parts = [cx.f.let(f"extractelement {value_type(dt.with_lanes(lanes))} {v}, i64 {k}") for k in range(lanes)]
        elif isinstance(value, AddressOf):
            src = cx.address(value.buffer, [cx.index(i) for i in value.indices])
            sd = value.buffer.dtype
            parts = [convert(cx.f, load(cx.f, sd, cx.f.at(src, memory_type(sd), str(k))), sd, dt) for k in range(lanes)]
        else:
            raise unsupported(f"{e.op} with a value of type {vt}", span=e.span or cx.span)
        ok = _in_range(cx, where)
        shared = where.buffer.scope() != "global"

        def update() -> None:
            for k, p in enumerate(parts):
                old = atomic_update(cx.f, "add", cx.f.at(at, memory_type(dt), str(k)), p, dt, shared=shared)
                cx.f.do(f"store {value_type(dt)} {old}, ptr {cx.f.at(wide, value_type(dt), str(k))}")

        cx.f.branch(ok, update)
        return str(cx.f.let(f"load {value_type(dt.with_lanes(lanes))}, ptr {wide}"))

    return emit


def _atomic_load(cx: Any, e: Call) -> str:
    where, at = _target(cx, e)
    dt = where.buffer.dtype
    it = f"i{dt.bits}"
    order = _ORDERS[e.options.order or "seq_cst"]
    bits = cx.f.let(f"load atomic {it}, ptr {at} {order}, align {dt.bytes}")
    mt = memory_type(dt)
    return from_memory(cx.f, dt, bits if mt == it else cx.f.let(f"bitcast {it} {bits} to {mt}"))


def _atomic_store(cx: Any, e: Call) -> str:
    where, at = _target(cx, e)
    dt = where.buffer.dtype
    it, mt = f"i{dt.bits}", memory_type(dt)
    v = to_memory(cx.f, dt, cx.cast_value(e.args[1], dt))
    bits = v if mt == it else cx.f.let(f"bitcast {mt} {v} to {it}")
    cx.f.do(f"store atomic {it} {bits}, ptr {at} {_ORDERS[e.options.order or 'seq_cst']}, align {dt.bytes}")
    return "0"


def _printf(cx: Any, e: Call) -> str:
    """C printf; arguments are promoted as C does, %s takes strings."""
    args = []
    for a in e.args:
        if isinstance(a, StringConst):
            args.append(f"ptr {cx.value(a)}")
            continue
        dt = a.dtype
        if dt.is_handle:
            args.append(f"ptr {cx.value(a)}")
        elif dt.is_float:
            args.append(f"double {cx.cast_value(a, dtype('float64'))}")
        elif dt.bits == 64:
            args.append(f"i64 {cx.value(a)}")
        else:
            args.append(f"i32 {cx.cast_value(a, dtype('uint32' if dt.is_unsigned else 'int32'))}")
    fn = cx.f.module.declare("printf", "i32", "ptr, ...")
    return str(cx.f.let(f"call i32 (ptr, ...) {fn}({', '.join(args)})"))


def _cp_async(cx: Any, e: Call) -> str:
    """Bytes from global to shared memory, zeros where the predicate is false; done at once."""
    dst, src = e.args[0], e.args[1]
    if not (isinstance(dst, AddressOf) and isinstance(src, AddressOf)):
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    f, n = cx.f, e.options.bytes
    to = cx.address(dst.buffer, [cx.index(i) for i in dst.indices])
    wanted = cx.value(as_bool(e.args[2])) if len(e.args) > 2 else "true"
    move = f.module.declare("llvm.memcpy.p0.p0.i64", "void", "ptr, ptr, i64, i1")
    clear = f.module.declare("llvm.memset.p0.i64", "void", "ptr, i8, i64, i1")

    def take() -> None:
        frm = cx.address(src.buffer, [cx.index(i) for i in src.indices])
        f.do(f"call void {move}(ptr {to}, ptr {frm}, i64 {n}, i1 false)")

    f.branch(wanted, take, lambda: f.do(f"call void {clear}(ptr {to}, i8 0, i64 {n}, i1 false)"))
    return "0"


def _ordered_already(cx: Any, e: Call) -> str:
    """Barriers and fences: a block runs its statements one after another for all threads."""
    if cx.tid is not None and e.op == "sync_threads":
        raise unsupported(f"{e.op} under a condition or loop that depends on the thread", span=e.span or cx.span,
                          hint="move the barrier out of the thread-dependent branch")
    if e.op == "fence_gpu":
        cx.f.do("fence seq_cst")
    return "0"


def _thread_return(cx: Any, e: Call) -> str:
    """All threads of the block are done; what only some leave was rewritten before (masks.py)."""
    if cx.tid is not None or cx.in_parallel:
        raise unsupported("thread_return in a loop that depends on the thread", span=e.span or cx.span,
                          hint="end the loop with break, and return behind it")
    cx.leave()
    return "0"


def _ldg(cx: Any, e: Call) -> str:
    where, at = _target(cx, e)
    dt = where.buffer.dtype
    return str(cx.f.choose(_in_range(cx, where), value_type(dt), lambda: load(cx.f, dt, at),
                           lambda: cx.safe_value(where.buffer, dt)))


EFFECTS: dict[str, Callable[[Any, Call], str]] = {
    **{f"atomic_{k}": _atomic(k) for k in (*_COMBINE, "exchange")},
    "atomic_addx2": _atomic_lanes(2), "atomic_addx4": _atomic_lanes(4), "atomic_load": _atomic_load,
    "atomic_store": _atomic_store, "printf": _printf, "ldg": _ldg,
    **{op: _ordered_already for op in ("sync_threads", "sync_warp", "fence_gpu", "fence_block", "cp_async_commit",
                                       "cp_async_wait")},
    **ACTOR_EFFECTS, **CLUSTER_EFFECTS, **BOX_EFFECTS, **DESCRIPTOR_EFFECTS, "cp_async": _cp_async,
    "assume": lambda cx, e: "0", "thread_return": _thread_return,
}

# Effects that happen once per thread even when nothing in them depends on the thread.
PER_THREAD = {op for op in EFFECTS if op.startswith("atomic_")} - {"atomic_load", "atomic_store"} | {
    "printf", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_expect_tx", "cp_async_mbarrier_arrive",
    "mbarrier_arrive_remote", "tma_load"}
