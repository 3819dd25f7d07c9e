"""Emits driver calls on the device of a launch, for threads in which another device or none is current.

PyTorch computes gradients in threads of its own, in which a kernel may be the first CUDA call.  Launches, allocations and
tensor maps (cuTensorMapEncodeTiled) fail in a thread without a current context.  A thread of HIP always has a current device.
"""

from __future__ import annotations

from collections.abc import Callable

from .gpu_api import CUDA, ENTERING, GpuApi
from .llvm_text import Writer


def in_context(w: Writer, context: str, call: Callable[[], str], api: GpuApi = CUDA) -> str:
    """Emit `call` with this context (ptr) current, then restore the thread's previous context.  Returns the result of `call`.

    call: writes text, and returns the name of its result.  HIP: context is a device (i32); where making it current fails,
    `call` does not run, and the result is that failure and ENTERING.
    """
    if api is not CUDA:
        return _on_device(w, context, call, api)
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


def _on_device(w: Writer, device: str, call: Callable[[], str], api: GpuApi) -> str:
    get, enter = api.name("cuCtxGetCurrent"), api.name("cuCtxPushCurrent_v2")
    held, failed = w.slot("i32"), w.slot("i32")
    w.do(f"store i32 -1, ptr {held}")
    w.do(f"store i32 {w.ins(f'call i32 @{get}(ptr {held})')}, ptr {failed}")
    before = w.ins(f"load i32, ptr {held}")
    same = w.ins(f"icmp eq i32 {before}, {device}")
    with w.when(same, unless=True):
        w.do(f"store i32 {w.ins(f'call i32 @{enter}(i32 {device})')}, ptr {failed}")
    code = w.ins(f"load i32, ptr {failed}")
    rc = w.either(w.ins(f"icmp eq i32 {code}, 0"), call, lambda: w.ins(f"or i32 {code}, {ENTERING}"), "i32")
    with w.when(same, unless=True):
        w.do(f"call i32 @{enter}(i32 {before})")
    return rc
