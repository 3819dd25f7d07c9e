"""Independent check that conflicting shared-memory accesses are ordered, and that nobody waits for ever.

Programs with block barriers and cp.async alone are followed interval by interval (verify_sync_barriers); those with
mbarriers, TMA, wgmma, roles or named barriers are model-checked (verify_sync_model), for every extent of their loops
that the rings tell apart (verify_sync_trials).  Shares no code with the passes that place synchronisation.
"""

from __future__ import annotations

from tilelang.errors import error, register
from tilelang.ir import Alloc, Func, Launch, rewrite_launches, walk, with_options

from ..framework.config import PassConfigKey
from ..framework.pass_ import DEVICE, PassContext, pass_
from .sync_fault import SHARED, Fault

register("sync-unordered", ValueError, "two threads touch one shared element without a barrier in between",
         "put T.sync_threads() between the two accesses, or let the compiler order them",
         expected="a barrier between two accesses by different threads")
_TWO = "order them with T.sync_threads, or wait for the copy's group"
_ONE = ("the iterations of one T.Parallel or copy run in no order: read from another buffer than the statement writes, "
        "or split it in two")


@pass_(needs=DEVICE)
def verify_sync(func: Func, cx: PassContext) -> Func:
    """Set each Launch's `sync_report`; raise "sync-unordered" for a fault that is certain.

    With tl.disable_thread_storage_sync faults are only reported: the user orders the accesses.
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


def check_launch(launch: Launch) -> tuple[str, list[Fault]]:
    """(one-paragraph verdict, faults found) for a launch with planned shared memory."""
    # Loaded when the device compiler is at work already (jit/building.py).
    from .barriers import check_barriers
    from .plan import follows
    from .trials import check_model

    nodes = list(walk(launch.body))
    buffers = [x.buffer for x in nodes if isinstance(x, Alloc) and x.buffer.scope_name in SHARED]
    model = follows(nodes)
    if not buffers and not model:
        return "no shared memory: nothing to order", []
    if launch.num_threads == 1 and not model:
        return "one thread per block: nothing to order", []
    if not all(isinstance(at, int) and b.is_static for b, at in launch.plan.shared_offsets):
        return "not checked: shared memory of run-time size", []
    return check_model(launch, nodes) if model else check_barriers(launch, buffers)


__all__ = ["Fault", "check_launch", "verify_sync"]
