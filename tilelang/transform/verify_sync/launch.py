"""Checks one launch: conflicting accesses are ordered, and no thread waits for ever.

A model (model.py) follows the program.  It takes numbers that programs with block barriers and cp.async only get at run time as
unknown (check_barriers).  Programs with mbarriers, TMA, wgmma, warp roles or named barriers are followed for all loop extents
between which their rings differ (trials.py).
"""

from __future__ import annotations

from math import prod

from tilelang.ir import Alloc, Buffer, Call, Expr, Launch, Node, Var, convert, free_vars, walk, SHARED
from tilelang.ir.evaluate import evaluate

from .plan import follows
from .sync_fault import Fault

_TRIED = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)  # values of symbols on which sizes of shared buffers depend
_MOST_BYTES = 1 << 18


def check_launch(launch: Launch) -> tuple[str, list[Fault]]:
    """(one-paragraph verdict, faults found) for a launch with planned shared memory."""
    nodes = list(walk(launch.body))
    buffers = [x.buffer for x in nodes if isinstance(x, Alloc) and x.buffer.scope_name in SHARED]
    model = follows(nodes)
    if not buffers and not model:
        return "no shared memory: nothing to order", []
    if launch.num_threads == 1 and not model and not any(isinstance(x, Call) and x.op == "cp_async" for x in nodes):
        return "one thread per block: nothing to order", []
    sizes: dict[Var, int] | None = {}
    if not all(isinstance(at, int) and b.is_static for b, at in launch.plan.shared_offsets):
        sizes = None if model else _sizes(launch, buffers, nodes)
        if sizes is None:
            return "not checked: shared memory of run-time size", []
    # Imported here because the device compiler is running already at this point (jit/building.py).
    from .trials import check_barriers, check_model  # 32 ms

    return check_model(launch, nodes) if model else check_barriers(launch, nodes, sizes or {})


def _sizes(launch: Launch, buffers: list[Buffer], nodes: list[Node]) -> dict[Var, int] | None:
    """Values of the symbols on which sizes and places of shared buffers depend: the greatest power of two that fits, the same
    for all; None where no value fits what the program assumes."""
    spans: list[tuple[Expr, Expr, int]] = [(convert(at), prod(map(convert, b.shape), start=convert(1)), b.dtype.bytes)
                                           for b, at in launch.plan.shared_offsets]
    symbols = list(dict.fromkeys(v for at, n, _ in spans for e in (at, n) for v in free_vars(e)))
    if any(v.dtype.is_float or v.dtype.is_handle for v in symbols):
        return None
    assumed = [x.args[0] for x in nodes if isinstance(x, Call) and x.op == "assume" and free_vars(x.args[0]) <= set(symbols)]
    for n in _TRIED:
        env = dict.fromkeys(symbols, n)
        if all(evaluate(e, env) for e in assumed) and max(
                int(evaluate(at, env)) + int(evaluate(size, env)) * width for at, size, width in spans) <= _MOST_BYTES:
            return env
    return None
