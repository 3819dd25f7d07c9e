"""Emits driver calls with a CUDA context made current, for threads that have none.

PyTorch computes gradients in threads of its own, in which a kernel may be the first CUDA call.  Launches, allocations and
tensor maps (cuTensorMapEncodeTiled) fail in a thread without a current context.
"""

from __future__ import annotations

from collections.abc import Callable

from .llvm_text import Writer


def in_context(w: Writer, context: str, call: Callable[[], str]) -> str:
    """Emit `call` with this context (ptr) current, then restore the thread's previous context.  Returns the result of `call`.

    call: writes text without branches, and returns the name of its result.
    """
    held = w.slot("ptr")
    w.do(f"store ptr null, ptr {held}")
    w.do(f"call i32 @cuCtxGetCurrent(ptr {held})")
    same = w.ins(f"icmp eq ptr {w.ins(f'load ptr, ptr {held}')}, {context}")
    with w.when(same, unless=True):
        w.do(f"call i32 @cuCtxPushCurrent_v2(ptr {context})")
    rc = call()
    with w.when(same, unless=True):
        w.do(f"call i32 @cuCtxPopCurrent_v2(ptr {held})")
    return rc
