"""The function of a block, or of a warp role of a block: its parameters and their meaning in its Code.

values…     values of the host that the block uses: tensor addresses, scalars, sizes storage…    buffers in the arena of the
worker thread
"""

from __future__ import annotations

from dataclasses import dataclass

from tilelang.arith import Analyzer
from tilelang.ir import GLOBAL, Alloc, Buffer, Expr, Launch, Var, walk
from tilelang.target.cpu_launch import CpuLaunch, WarpRoleCode
from tilelang.target.cpu_ranges import with_indices

from .calls import BLOCK_CALLS
from .code import Code, HostFunction
from .state import BlockState, Bound, LaneFaults, Storage, WarpRoleState
from .statements import StatementPrinter
from .text import Fn, clean
from .threads import outside_threads
from .types import value_type


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
