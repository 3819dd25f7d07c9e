"""The entry function of a program while it is printed: its Code, its workspaces, and the failures of a call."""

from __future__ import annotations

from tilelang.ir import Alloc, Buffer, Func, GLOBAL
from tilelang.target.cpu import unsupported

from .state import Code, Storage


def count_of(cx: Code, b: Buffer) -> str:
    """The number of elements of a buffer, i64."""
    out = "1"
    for d in b.shape:
        out = cx.f.mul(out, cx.index(d))
    return out


class HostFunction:
    """The function `ptr entry(params…)`, which returns null or the text of the failure. launches: how many were printed so far.
    """

    def __init__(self, code: Code, func: Func) -> None:
        self.code, self.func, self.launches = code, func, 0
        self._workspaces: list[str] = []

    def fail(self, message: str) -> None:
        """End the call with an error text, given by its address."""
        self.release()
        self.code.f.end(f"ret ptr {message}")

    def fail_if(self, wrong: str, message: str) -> None:
        """End the call with an error text where `wrong` (i1) holds."""
        self.code.f.branch(wrong, lambda: self.fail(message))

    def release(self) -> None:
        """Free the workspaces."""
        f = self.code.f
        free = f.module.declare("free", "void", "ptr")
        for p in self._workspaces:
            f.do(f"call void {free}(ptr {f.let(f'load ptr, ptr {p}')})")

    def allocate(self, s: Alloc) -> None:
        """A workspace in global memory that lives until the call ends."""
        f, b = self.code.f, s.buffer
        if b.scope() != GLOBAL:
            raise unsupported(f"an allocation in scope {b.scope()} outside a kernel", span=s.span)
        size = f.smax(f.mul(count_of(self.code, b), str(b.dtype.bytes)), "1")
        slot = f.alloca("ptr", hint="work")
        f.allocas.append(f"  store ptr null, ptr {slot}")
        make = f.module.declare("aligned_alloc", "ptr", "i64, i64")
        padded = f.mul(f.let(f"udiv i64 {f.add(size, '63')}, 64"), "64")
        if f.loops:  # the workspace of the previous iteration is no longer used
            free = f.module.declare("free", "void", "ptr")
            f.do(f"call void {free}(ptr {f.let(f'load ptr, ptr {slot}')})")
        got = f.let(f"call ptr {make}(i64 64, i64 {padded})")
        f.do(f"store ptr {got}, ptr {slot}")
        self._workspaces.append(slot)
        self.code.storage[b.data] = Storage(got)
        memory = f.module.string("out of memory for a global workspace")
        self.fail_if(f.let(f"icmp eq ptr {got}, null"), memory)
