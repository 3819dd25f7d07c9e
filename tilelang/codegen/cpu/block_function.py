"""The function of a block, or of a warp role of a block: its parameters and their meaning in its Code.

values…     values of the host that the block uses: tensor addresses, scalars, sizes storage…    buffers in the arena of the
worker thread
"""

from __future__ import annotations

from dataclasses import dataclass

from tilelang.arith import Analyzer
from tilelang.ir import Alloc, Buffer, Call, Expr, GLOBAL, Launch, StringConst, Var, as_bool, dtype, walk
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CpuLaunch, WarpRoleCode
from tilelang.target.cpu_ranges import with_indices
from tilelang.target.thread_calls import ASSERTION, CLOCKS

from .atomics import ATOMIC_CALLS
from .barriers import BARRIER_CALLS
from .clusters import CLUSTER_CALL_PRINTERS
from .code import CallPrinter, Code, HostFunction, pointed
from .lane_faults import assertion
from .lanes import LANE_CALL_PRINTERS
from .state import BlockState, Bound, LaneFaults, Storage, WarpRoleState
from .statements import StatementPrinter
from .text import Fn, clean
from .threads import end_threads, outside_threads
from .types import load, value_type
from .wgmma import BOX_CALLS, DESCRIPTOR_CALLS


@dataclass(frozen=True)
class Captured:
    """A value of the host function that a block uses: its LLVM type, and the operand on the host side."""

    var: Var
    type: str
    operand: str


@dataclass(frozen=True)
class LaunchFrame:
    """The common state of all functions of a launch.

    plan: the launch. name: of its function that runs a range of blocks. captured: values of the host, in the order of the
    parameters. faults: errors that may occur while it runs.
    """

    host: HostFunction
    plan: CpuLaunch
    name: str
    captured: tuple[Captured, ...]
    faults: LaneFaults

    @property
    def value_names(self) -> list[str]:
        """The names of the parameters for captured values."""
        return [f"{clean(c.var.name)}_{k}" for k, c in enumerate(self.captured)]

    @property
    def slot_names(self) -> list[str]:
        """The names of the parameters for storage in the arena."""
        return [f"{clean(t.buffer.name)}_{len(self.captured) + k}" for k, t in enumerate(self.plan.slots)]


def captured_values(host: HostFunction, s: Launch) -> list[Captured]:
    """The host values that a launch uses: parameters, symbols, bound variables, tensor addresses."""
    cx = host.code
    used: set[Var] = set()
    inner: set[Var] = set()

    def expr(e: object) -> None:
        if isinstance(e, Expr):
            used.update(walk(e, Var))

    for n in walk(s):
        if isinstance(n, Var):
            used.add(n)
        elif isinstance(n, Buffer):
            used.add(n.data)
            for d in (*n.shape, *(n.strides_ or ()), n.offset):
                expr(d)
        elif isinstance(n, Alloc) and n.buffer.scope() != GLOBAL:
            inner.add(n.buffer.data)
    for _, safe in s.plan.safe_values:
        expr(safe)
    out = []
    for v, where in cx.storage.items():
        if v in used and v not in inner:
            out.append(Captured(v, "ptr", where.base))
    for v, bound in cx.vars.items():
        if v in used and v not in inner and v not in cx.storage:
            if bound.wide is not None:
                out.append(Captured(v, "i64", bound.wide))
            else:
                out.append(Captured(v, value_type(v.dtype), cx.value(v)))
    return out


def open_block(frame: LaunchFrame, f: Fn, code: WarpRoleCode, warp_role: WarpRoleState | None = None) -> Code:
    """The Code of the function of a block, with its parameters bound. warp_role: the coroutine, if it is one."""
    s = frame.plan.launch
    block = BlockState(code.values, s.threads, code.warp_role.ranges, frame.faults, warp_role, scratch="%scratch")
    ranges = with_indices(Analyzer(), s, code.warp_role)
    cx = Code(f, block, BLOCK_CALLS, ranges, safe_values=dict(s.plan.safe_values),
              sources=s.plan.import_source)
    outside_threads(cx)
    _bind_parameters(cx, frame)
    for d, v in enumerate(s.block_vars):
        cx.vars[v] = Bound(wide=f"%b{d}")
    return cx


def print_body(cx: Code, code: WarpRoleCode) -> None:
    """Print the statements of a block, or of a warp role."""
    StatementPrinter(cx).stmt(code.body)


def _bind_parameters(cx: Code, frame: LaunchFrame) -> None:
    for name, c in zip(frame.value_names, frame.captured):
        if c.var in frame.host.code.storage:
            cx.storage[c.var] = Storage(f"%{name}")
        elif c.type == "i64" and c.var.dtype.is_signed:
            cx.vars[c.var] = Bound(wide=f"%{name}")
        else:
            cx.vars[c.var] = Bound(value=f"%{name}")
    for name, t in zip(frame.slot_names, frame.plan.slots):
        cx.storage[t.buffer.data] = Storage(f"%{name}", t.copies, t.unit)


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
    dst, src = (pointed(cx, e, a) for a in e.args[:2])
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
    where = pointed(cx, e, e.args[0])
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
