"""Checks one launch: conflicting accesses are ordered, and no thread waits for ever.

Programs with block barriers and cp.async only are checked from barrier to barrier (barriers.py).  Programs with mbarriers,
TMA, wgmma, warp roles or named barriers are model-checked (model.py), for all loop extents between which their rings
differ (trials.py).
"""

from __future__ import annotations

from tilelang.ir import Alloc, Launch, walk, SHARED

from .plan import follows
from .sync_fault import Fault


def check_launch(launch: Launch) -> tuple[str, list[Fault]]:
    """(one-paragraph verdict, faults found) for a launch with planned shared memory."""
    nodes = list(walk(launch.body))
    buffers = [x.buffer for x in nodes if isinstance(x, Alloc) and x.buffer.scope_name in SHARED]
    model = follows(nodes)
    if not buffers and not model:
        return "no shared memory: nothing to order", []
    if launch.num_threads == 1 and not model:
        return "one thread per block: nothing to order", []
    if not all(isinstance(at, int) and b.is_static for b, at in launch.plan.shared_offsets):
        return "not checked: shared memory of run-time size", []
    # Imported here because the device compiler is running already at this point (jit/building.py).
    if model:
        from .trials import check_model  # 32 ms

        return check_model(launch, nodes)
    from .barriers import check_barriers  # 14 ms

    return check_barriers(launch, buffers)


__all__ = ["Fault", "check_launch"]
