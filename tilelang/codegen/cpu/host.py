"""Prints the statements of the host program, which the entry function runs around its launches."""

from __future__ import annotations

from tilelang.ir import Alloc, Assert, Bind, Evaluate, For, If, Seq, Stmt
from tilelang.target.cpu import unsupported
from tilelang.target.cpu_launch import CpuLaunch

from .code import HostFunction, bind_value
from .state import Bound
from .launch import print_launch
from .text import clean


class HostPrinter:
    """Prints host statements into the entry function."""

    def __init__(self, host: HostFunction) -> None:
        self.host, self.cx = host, host.code

    def stmt(self, s: Stmt) -> None:
        """Print a host statement. Raises cpu-unsupported for statements that are supported only in a kernel."""
        cx, f = self.cx, self.cx.f
        if s.span is not None:
            cx.span = s.span
        match s:
            case CpuLaunch():
                print_launch(self.host, s)
            case Seq():
                for x in s.stmts:
                    self.stmt(x)
            case Bind():
                bind_value(cx, s.var, s.value)
            case Assert():
                message = f.module.string(s.message)
                f.branch(cx.value(s.cond), lambda: None, lambda: self.host.fail(message))
            case Alloc():
                self.host.allocate(s)
            case If():
                orelse = s.orelse
                f.branch(cx.value(s.cond), lambda: self.stmt(s.then), None if orelse is None else lambda: self.stmt(orelse))
            case For():
                start = cx.index(s.start)
                with f.loop("0", cx.index(s.extent), hint=clean(s.var.name)) as i:
                    cx.vars[s.var] = Bound(wide=f.add(i, start))
                    self.stmt(s.body)
            case Evaluate():
                pass  # those with an effect are launches
            case _:
                raise unsupported(f"{type(s).__name__} outside a kernel", span=s.span or cx.span)
