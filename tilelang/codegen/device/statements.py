"""Statements in C++ text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang.errors import InternalError, TileLangError
from tilelang.ir import (Alloc, Assert, Bind, Break, Call, Const, Continue, Evaluate, Expr, For, If, Seq, Stmt, Store, Var,
                         While, binary, walk)

from .memory import Memory
from .text import quote
from .types import type_name


MOST_COPIES = 512  # of a body in the code: what has more elements a thread is in no registers, and compilers choke on it
_UNROLLED = ("unroll", "vectorized")


class Statements:
    """Prints statements, each class of node by one function.  register_loop: prints a loop with plan.registers."""

    def __init__(self, memory: Memory) -> None:
        self.x, self.page = memory.x, memory.page
        self.register_loop: Callable[[For], None] | None = None
        self._forms: dict[type[Stmt], Callable[[Any], None]] = {
            Bind: self._bind, Alloc: memory.alloc, Store: memory.store, Evaluate: self._evaluate, For: self._for,
            While: self._while, If: self._if, Break: lambda s: self.page.emit("break;"),
            Continue: lambda s: self.page.emit("continue;"), Assert: self._assert}

    def stmt(self, s: Stmt) -> None:
        """Print a statement, with a comment that shows the user's line."""
        if isinstance(s, Seq):
            for x in s.stmts:
                self.stmt(x)
            return
        form = self._forms.get(type(s))
        if form is None:
            raise InternalError(f"a {type(s).__name__} reached the code generator: the program is not in phase DEVICE")
        self.page.comment(s.span)
        try:
            form(s)
        except TileLangError as e:  # an expression made by a pass has no place of its own
            e.span = e.span or s.span
            raise

    def _block(self, header: str, body: Stmt) -> None:
        self.page.emit(f"{header} {{")
        with self.page.scope():
            self.stmt(body)
        self.page.emit("}")

    def _bind(self, s: Bind) -> None:
        value = self.x.top(s.value)
        self.x.facts.enter_bind(s)
        kind = type_name(s.var.dtype, s.span)
        kind = f"{kind} const" if s.var.dtype.is_handle else f"const {kind}"
        self.page.emit(f"{kind} {self.page.name(s.var, s.var.name)} = {value};")

    def _evaluate(self, s: Evaluate) -> None:
        self.page.emit(f"{self.x.top(s.call)};")

    def _for(self, s: For) -> None:
        if s.plan.registers and self.register_loop is not None:
            self.register_loop(s)
            return
        self.x.facts.enter_loop(s)
        if s.kind not in ("serial", "unroll", "vectorized"):
            raise InternalError(f"a {s.kind} loop reached the code generator: the program is not in phase DEVICE")
        end = self._once(binary("add", s.start, s.extent), s)
        start = self.x.top(s.start)
        with self.page.names.scope():
            name = self.page.name(s.var, s.var.name)
            self._pragma(s)
            self._block(f"for ({type_name(s.var.dtype)} {name} = {start}; {name} < {end}; ++{name})", s.body)

    def _once(self, end: Expr, s: For) -> str:
        """The end of a loop as text that is evaluated once; constants and variables stay as they are."""
        if isinstance(end, (Const, Var)):
            return self.x.top(end)
        name = self.page.name(s, f"{s.var.name}_end")
        self.page.emit(f"const {type_name(end.dtype)} {name} = {self.x.top(end)};")
        return self.page.name(s, name)

    def _pragma(self, s: For) -> None:
        if s.kind in _UNROLLED:
            copies = s.plan.factor or (1 if _copies(s) > MOST_COPIES else "")
            self.page.emit(f"#pragma unroll {copies}".rstrip())
        elif s.plan.factor:
            self.page.emit(f"#pragma unroll {s.plan.factor}")
        elif _only_loads(s.body):
            self.page.emit("#pragma unroll 1")

    def _while(self, s: While) -> None:
        self._block(f"while ({self.x.top(s.cond)})", s.body)

    def _if(self, s: If) -> None:
        if isinstance(s.cond, Call) and s.cond.op == "by_nvshmem":
            return self.stmt(s.then)
        text = self.x.condition(s, self.x.top(s.cond))
        self._branch(f"if ({text})", s.cond, True, s.then)
        if s.orelse is not None:
            self.page.lines.pop()
            self._branch("} else", s.cond, False, s.orelse)

    def _branch(self, head: str, cond: Expr, holds: bool, body: Stmt) -> None:
        self.x.facts.branches.append((cond, holds))
        self._block(head, body)
        self.x.facts.branches.pop()

    def _assert(self, s: Assert) -> None:
        head = "" if s.message.startswith("Device assert failed") else "Device assert failed: "
        text = f"{head}{s.message}\n"
        self.page.emit(f"if (!({self.x.top(s.cond)})) tl::assert_failed({quote(text)});")


def _copies(s: Stmt | None) -> int:
    """How often the innermost statements of s stand in the code when the loops in it are unrolled."""
    if isinstance(s, Seq):
        return max(map(_copies, s.stmts), default=1)
    if isinstance(s, If):
        return max(_copies(s.then), _copies(s.orelse))
    if not isinstance(s, For):
        return 1
    return _copies(s.body) * (int(s.extent.value) if s.kind in _UNROLLED and isinstance(s.extent, Const) else 1)


def _only_loads(s: Stmt) -> bool:
    """Whether a loop asks for tiles and waits for room, as a warp with few registers does: copies of it would spill."""
    ops = {n.op for n in walk(s, Call)}
    return "tma_load" in ops and "mbarrier_wait" in ops and not ops & {"wgmma", "wgmma_wait"}
