"""Calls that use memory or threads: printing, copies of bytes, and barriers that the order of statements makes unnecessary."""

from __future__ import annotations

from tilelang.ir import AddressOf, Call, StringConst, as_bool, dtype
from tilelang.target.cpu import unsupported
from tilelang.target.thread_calls import ASSERTION, CLOCKS

from .atomics import ATOMIC_CALLS
from .barriers import BARRIER_CALLS
from .clusters import CLUSTER_CALL_PRINTERS
from .wgmma import BOX_CALLS, DESCRIPTOR_CALLS
from .lane_faults import assertion
from .lanes import LANE_CALL_PRINTERS
from .code import CallPrinter, Code
from .threads import end_threads
from .types import load, value_type


def _printf(cx: Code, e: Call) -> str:
    """Emit C printf. Arguments are promoted as in C; %s takes strings."""
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
    return cx.f.let(f"call i32 (ptr, ...) {fn}({', '.join(args)})")


def _clock(cx: Code, e: Call) -> str:
    """The cycle counter of the core, or (globaltimer) the monotonic clock of the system in nanoseconds."""
    f = cx.f
    if e.op != "globaltimer":
        cycles = f.let(f"call i64 {f.module.declare('llvm.readcyclecounter', 'i64', '')}()")
        return f.let(f"trunc i64 {cycles} to i32") if e.dtype.bits == 32 else cycles
    at = f.alloca("[2 x i64]", hint="time")
    f.do(f"call i32 {f.module.declare('clock_gettime', 'i32', 'i32, ptr')}(i32 1, ptr {at})")
    seconds, rest = (f.let(f"load i64, ptr {f.at(at, 'i64', k)}") for k in "01")
    return f.add(f.mul(seconds, "1000000000"), rest)


def _cp_async(cx: Code, e: Call) -> str:
    """Copy bytes from global to shared memory, or zeros where the predicate is false. The copy is complete at once."""
    dst, src = e.args[0], e.args[1]
    if not (isinstance(dst, AddressOf) and isinstance(src, AddressOf)):
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    f, n = cx.f, e.options.bytes
    to = cx.address_of(dst)
    wanted = cx.value(as_bool(e.args[2])) if len(e.args) > 2 else "true"
    move = f.module.declare("llvm.memcpy.p0.p0.i64", "void", "ptr, ptr, i64, i1")
    clear = f.module.declare("llvm.memset.p0.i64", "void", "ptr, i8, i64, i1")

    def copy() -> None:
        frm = cx.address_of(src)
        f.do(f"call void {move}(ptr {to}, ptr {frm}, i64 {n}, i1 false)")

    f.branch(wanted, copy, lambda: f.do(f"call void {clear}(ptr {to}, i8 0, i64 {n}, i1 false)"))
    return "0"


def _ordered_already(cx: Code, e: Call) -> str:
    """Emit nothing for barriers and fences: a block runs its statements one after another for all threads."""
    if cx.block.tid is not None and e.op == "sync_threads":
        raise unsupported(f"{e.op} under a condition or loop that depends on the thread", span=e.span or cx.span,
                          hint="move the barrier out of the thread-dependent branch")
    if e.op == "fence_gpu":
        cx.f.do("fence seq_cst")
    return "0"


def _thread_return(cx: Code, e: Call) -> str:
    """End all threads of the block. A return of some threads was made a mask by transform/cpu/mask_divergent.py."""
    if cx.block.tid is not None or cx.block.in_parallel:
        raise unsupported("thread_return in a loop that depends on the thread", span=e.span or cx.span,
                          hint="end the loop with break, and return after it")
    end_threads(cx)
    return "0"


def _ldg(cx: Code, e: Call) -> str:
    where = e.args[0]
    if not isinstance(where, AddressOf):
        raise unsupported(f"{e.op} on a computed pointer", span=e.span or cx.span)
    at, dt = cx.address_of(where), where.buffer.dtype
    ok = cx.in_range(where, [cx.index(i) for i in where.indices])
    return cx.f.choose(ok, value_type(dt), lambda: load(cx.f, dt, at), lambda: cx.safe_value(where.buffer, dt))


BLOCK_CALLS: dict[str, CallPrinter] = {
    ASSERTION: assertion, "printf": _printf, "ldg": _ldg, **dict.fromkeys(CLOCKS, _clock),
    **{op: _ordered_already for op in ("sync_threads", "sync_warp", "fence_gpu", "fence_block", "cp_async_commit",
                                       "cp_async_wait")},
    **ATOMIC_CALLS, **BARRIER_CALLS, **CLUSTER_CALL_PRINTERS, **BOX_CALLS, **DESCRIPTOR_CALLS, "cp_async": _cp_async,
    "assume": lambda cx, e: "0", "thread_return": _thread_return, **LANE_CALL_PRINTERS,
}
