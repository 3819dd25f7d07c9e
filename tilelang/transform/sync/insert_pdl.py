"""Inserts programmatic dependent launch (PDL), so that a kernel starts while the one before it on the stream ends.

    init barriers; sync_threads                        init barriers; sync_threads
    loads, GEMMs, stores                 ->            pdl_sync(); pdl_trigger()
                                                       loads, GEMMs, stores                      (Launch attr pdl)

A kernel launched with PDL starts when all blocks of the kernel before it have called `pdl_trigger` or have ended.
`pdl_sync` returns when that kernel has ended and its writes are visible.  So a block is already running, with its barriers
initialised, when the work before it ends: on an H200 1 us sooner (benchmarks/results/notes.md).  A kernel triggers the next
one only after its own pdl_sync.  Hence all kernels before it on the stream have ended by then, and a kernel that waits for
its predecessor has waited for all earlier ones.

Every access of global memory comes after pdl_sync.  The compiler does not move TMA, cp.async, stores and atomics.  It may
move a read ahead of pdl_sync if it knows that the kernel never writes that memory (ld.global.nc).  So where threads load from
global memory themselves (a bias, a scale, what a launch before has reduced), no parameter and no workspace is `__restrict__`;
this also holds if the program itself calls T.pdl_sync.  Launches that run foreign code are not changed, because its accesses
are not known.
"""

from __future__ import annotations

from tilelang.ir import (Alloc, Bind, Call, Func, Launch, Load, Stmt, Store, contains, do, replace, rewrite_launches, seq,
                         stmts_of, walk, with_options, GLOBAL)

from ..legalize.aliasing import parameter_names
from ..analysis.effects import effects, expr_effects
from ..framework.pass_ import DEVICE, PassConfigKey, PassContext, pass_

# What a block may do before the preceding kernel has ended: nothing outside its cluster.  Tensor maps are parameters.
_SETTING_UP = frozenset((
    "tma_prefetch", "mbarrier_init", "fence_mbarrier_init", "fence_proxy_async", "sync_threads", "sync_warp", "cluster_sync",
    "cluster_rank", "cluster_size", "elect_one", "in_warp_groups", "warp_uniform", "set_max_nreg"))
# Calls that take global addresses and that the compiler does not move in front of pdl_sync.
_IN_ORDER = frozenset(("cp_async", "tma_load", "tma_store", "tma_reduce_add", "tma_prefetch", "bulk_load", "bulk_store"))
_FOREIGN = frozenset(("call_extern", "source_kernel", "ldg", "ldg32", "ldg64", "ldg128", "ldg256"))


@pass_(needs=DEVICE)
def insert_pdl(func: Func, cx: PassContext) -> Func:
    """Adds pdl_sync, pdl_trigger and the attr `pdl` to launches (see the module's docstring) if tl.enable_pdl is set.

    Not changed: launches that have the attr already, that start all blocks at once (`cooperative`) or that run foreign code,
    and all launches for targets before sm_90.
    """
    wanted = bool(cx.option(PassConfigKey.TL_ENABLE_PDL)) and cx.target.at_least(90)
    workspaces = (a.buffer.name for a in walk(func.body, Alloc) if a.buffer.scope_name == GLOBAL)
    names = (*parameter_names(func), *workspaces)  # a launch before this one has written them
    return replace(func, body=rewrite_launches(func.body, lambda x: _dependent(x, wanted, names)))


def _dependent(launch: Launch, wanted: bool, names: tuple[str, ...]) -> Launch:
    if launch.plan.pdl:
        return launch if ordered(launch) else with_options(launch, may_alias=names)
    if not wanted or launch.plan.cooperative or _runs_foreign_code(launch):
        return launch
    if any(x.op == "pdl_trigger" for x in walk(launch.body, Call)):  # a trigger before the wait would let the next
        return launch  # kernel start before the one in front of this one has ended
    stmts = stmts_of(launch.body)
    at = next((n for n, s in enumerate(stmts) if not _sets_up(s)), len(stmts))
    body = seq(*stmts[:at], do("pdl_sync"), do("pdl_trigger"), *stmts[at:], span=launch.body.span)
    out = with_options(replace(launch, body=body), pdl=True)
    return out if ordered(launch) else with_options(out, may_alias=names)


def _runs_foreign_code(launch: Launch) -> bool:
    return any(x.op in _FOREIGN for x in walk(launch.body, Call))


def ordered(launch: Launch) -> bool:
    """Whether the compiler can move no access of global memory in front of pdl_sync."""
    return not _runs_foreign_code(launch) and all(isinstance(e.node, Store) or isinstance(e.node, Call) and (
        e.node.op in _IN_ORDER or e.node.op.startswith("atomic_")) for e in effects(launch.body)
        if e.buffer.scope_name == GLOBAL)


def _sets_up(s: Stmt) -> bool:
    """Whether a statement may run before the preceding kernel has ended."""
    value = s.init if isinstance(s, Alloc) else s.value if isinstance(s, Bind) else None
    if value is not None and (contains(value, Load) or list(expr_effects(value))):
        return False
    if isinstance(s, (Alloc, Bind)):
        return value is None or isinstance(s, Bind) or s.buffer.scope_name != GLOBAL
    return all(x.op in _SETTING_UP for x in walk(s, Call)) and not any(e.buffer.scope_name == GLOBAL for e in effects(s))
