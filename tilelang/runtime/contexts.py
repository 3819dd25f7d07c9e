"""Calls of the driver with a context current: threads that have launched nothing yet hold none.

PyTorch computes gradients in threads of its own, which may call a kernel before anything else of CUDA; launches, allocations
and tensor maps (cuTensorMapEncodeTiled) then fail for want of a context.
"""

from __future__ import annotations

from collections.abc import Callable

from .llvm_text import Writer


def in_context(w: Writer, context: str, call: Callable[[], str]) -> str:
    """Text that makes `call` with this context (ptr) current, and leaves the thread as it was; what `call` gave back.

    call: writes one stretch of text without branches, and gives the name of its result.
    """
    held = w.slot("ptr")
    w.do(f"store ptr null, ptr {held}")
    w.do(f"call i32 @cuCtxGetCurrent(ptr {held})")
    same = w.ins(f"icmp eq ptr {w.ins(f'load ptr, ptr {held}')}, {context}")
    push, join, pop, done = (w.name(n) for n in ("push", "join", "pop", "done"))
    w.branch(same, join, push)
    w.begin(push)
    w.do(f"call i32 @cuCtxPushCurrent_v2(ptr {context})")
    w.jump(join)
    w.begin(join)
    rc = call()
    w.branch(same, done, pop)
    w.begin(pop)
    w.do(f"call i32 @cuCtxPopCurrent_v2(ptr {held})")
    w.jump(done)
    w.begin(done)
    return rc


__all__ = ["in_context"]
