"""The last pass: run the independent check of synchronisation in `transform/verify_sync` and act on its verdict."""

from __future__ import annotations

from tilelang.errors import error, register
from tilelang.ir import Func, Launch, rewrite_launches, with_options

from ..framework.config import PassConfigKey
from ..framework.pass_ import DEVICE, PassContext, pass_
from ..verify_sync.launch import check_launch

register("sync-unordered", ValueError, "two threads touch one shared element without a barrier in between",
         "put T.sync_threads() between the two accesses, or let the compiler order them",
         expected="a barrier between two accesses by different threads")
_TWO = "order them with T.sync_threads, or wait for the copy's group"
_ONE = ("the iterations of one T.Parallel or copy run in no order: read from another buffer than the statement writes, "
        "or split it in two")


@pass_(needs=DEVICE)
def verify_sync(func: Func, cx: PassContext) -> Func:
    """Set each Launch's `sync_report`; raise "sync-unordered" for a certain fault.

    With tl.disable_thread_storage_sync faults are only reported, since the user orders the accesses.
    """
    strict = not cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC)

    def checked(launch: Launch) -> Launch:
        text, faults = check_launch(launch)
        for f in faults:
            if f.exact and strict:
                notes = ((f.other, "the other access"),) if None not in (f.other, f.span) else ()
                one = f.other is not None and f.other == f.span
                raise error("sync-unordered", f.message, found=f.message, span=f.span or f.other or launch.span,
                            notes=notes, hint=_ONE if one else _TWO)
        return with_options(launch, sync_report=text)

    return rewrite_launches(func, checked)


__all__ = ["verify_sync"]
