"""The function of a block, or of a warp role of a block: its parameters and their meaning in its Code.

values…     values of the host that the block uses: tensor addresses, scalars, sizes storage…    buffers in the arena of the
worker thread

Index arithmetic in 64 bits, from the linear form of an index.

Where the 32-bit arithmetic of the program would wrap, the index stays exact (and a guarded access is then out of range).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilelang.arith import Analyzer
from tilelang.ir import GLOBAL, Alloc, Binary, Buffer, Cast, Const, Expr, Launch, Var, dtype, walk
from tilelang.target.cpu_launch import CpuLaunch, WarpRoleCode
from tilelang.target.cpu_ranges import with_indices

from .calls import BLOCK_CALLS
from .state import BlockState, Bound, Code, HostFunction, LaneFaults, Storage, WarpRoleState
from .memory import MemoryPrinter
from .statements import StatementPrinter
from .text import Fn, clean, is_literal
from .threads import outside_threads
from .types import value_type
from .values import ValuePrinter


class IndexPrinter:
    """Prints integers as i64 into the function of a Code."""

    def __init__(self, cx: Code) -> None:
        self.cx = cx

    def index(self, e: Expr | int) -> str:
        """The exact i64 value of an integer expression or Python int."""
        if isinstance(e, int):
            return str(e)
        if isinstance(e, Const):
            return str(int(e.value))
        if isinstance(e, Var):
            return self._atom(e)
        if e.dtype.is_unsigned or e.dtype.is_bool:
            return self._sized(e)
        form = self.cx.analyzer.linear(e)
        out = str(form.const)
        for atom, c in form.terms.items():
            out = self.cx.f.add(self.cx.f.mul(self._atom(atom), str(c)), out)
        return out

    def _atom(self, e: Expr) -> str:
        if isinstance(e, Var):
            bound = self.cx.vars.get(e)
            if bound is not None and bound.wide is not None:
                return bound.wide
        elif isinstance(e, Binary) and e.dtype.is_signed:
            if e.op == "mul":
                return self.cx.f.mul(self.index(e.a), self.index(e.b))
            if e.op in ("min", "max") and self._exact(e.a) and self._exact(e.b):
                pick = self.cx.f.smin if e.op == "min" else self.cx.f.smax
                return pick(self.index(e.a), self.index(e.b))
            if e.op in ("floordiv", "floormod") and isinstance(e.b, Const) and e.b.value > 0 and self._exact(e.a):
                low = self.cx.analyzer.bounds_of(self.cx.analyzer.linear(e.a))[0]
                if low is not None and low >= 0:
                    if e.op == "floordiv":
                        return self.cx.f.let(f"udiv i64 {self.index(e.a)}, {e.b.value}")
                    return self.cx.f.hidden(self.cx.f.let(f"urem i64 {self.index(e.a)}, {e.b.value}"))
        elif isinstance(e, Cast) and e.value.dtype.is_signed and e.dtype.is_signed:
            if e.dtype.bits >= e.value.dtype.bits:
                return self.index(e.value)
        return self._sized(e)

    def _exact(self, e: Expr) -> bool:
        """Whether e's 32-bit arithmetic certainly does not wrap. (The remainder of a wrapped value differs from that of the
        exact one.)"""
        return e.dtype.is_signed and self.cx.analyzer.exact(self.cx.analyzer.linear(e), e.dtype)

    def _sized(self, e: Expr) -> str:
        """The value computed in its own type, then extended."""
        return self.extended(self.cx.value(e), e.dtype)

    def extended(self, v: str, dt: dtype) -> str:
        """A register value of an integer type, extended to i64."""
        wide = v
        if dt.bits != 64 or dt.is_bool:
            wide = self.cx.f.let(f"{'sext' if dt.is_signed else 'zext'} {value_type(dt)} {v} to i64")
        return wide if is_literal(v) else self.cx.f.hidden(wide)


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
    add_pieces(cx)
    outside_threads(cx)
    _bind_parameters(cx, frame)
    for d, v in enumerate(s.block_vars):
        cx.vars[v] = Bound(wide=f"%b{d}")
    return cx


def add_pieces(cx: Code) -> StatementPrinter:
    """Give a Code the printers of values, indices and memory. Returns the printer of its statements."""
    memory = MemoryPrinter(cx)
    cx.values, cx.indices, cx.memory = ValuePrinter(cx), IndexPrinter(cx), memory
    return StatementPrinter(cx, memory)


def print_body(cx: Code, code: WarpRoleCode) -> None:
    """Print the statements of a block, or of a warp role."""
    StatementPrinter(cx, MemoryPrinter(cx)).stmt(code.body)


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
