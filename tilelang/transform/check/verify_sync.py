"""The last pass: run the independent check of synchronisation in `transform/verify_sync` and act on its verdict."""

from __future__ import annotations

from tilelang.errors import error, register
from tilelang.ir import Launch, with_options

from ..framework.pass_ import DEVICE, PassConfigKey, PassContext, pass_
from ..verify_sync.launch import Fault, check_launch

EXPECTED = "a barrier between two accesses by different threads"
register("sync-unordered", ValueError, "two threads touch one shared element without a barrier in between",
         "put T.sync_threads() between the two accesses, or let the compiler order them",
         expected=EXPECTED)
_ONE = ("the iterations of one T.Parallel or copy run in no order: read from another buffer than the statement writes, "
        "or split it in two")
# By the kind of a fault: what to do, what is expected, what the second place is.
_ADVICE = {
    "order": ("order them with T.sync_threads, or wait for the copy's group", None, "the other access"),
    "copy": ("wait for the copy's group (T.ptx_wait_group, which lets the last n groups go on) or at its mbarrier, and then "
             "T.sync_threads", "an access after the copy is complete", "the copy"),
    "reuse": ("wait until all that use the tile are done before it is written again: an mbarrier at which they arrive, "
              "T.wait_wgmma or T.tma_store_wait", "a tile that nothing uses any more", "the other access"),
    "barrier": ("let all threads come: leave a loop under a condition that all threads share, or wait at a named barrier for "
                "those that come: T.sync_threads(id, threads)", "a barrier that all threads of the block reach",
                "some threads leave here"),
    "stuck": ("nothing sends what they wait for: compare the parities of the waits, the counts given to T.alloc_barrier and "
              "the announced bytes with the arrivals and copies, in each iteration and in each warp role",
              "waits that arrivals and copies complete", "the other wait"),
    "mbarrier": ("let each phase be awaited before its mbarrier goes on: one wait for each phase of arrivals, with the parity "
                 "of that phase, and the count given to T.alloc_barrier", "a wait for each phase",
                 "the other arrival or wait"),
    "index": ("let the index show that it is small enough, as `bar[p % 2]` does for two mbarriers",
              "an index of one of the mbarriers", "the other use"),
    "named": ("let each thread that the barrier counts come once a phase: the same number and count at all places, 32 for each "
              "warp that comes", "arrivals that add up to the count", "the other place"),
    "cluster": ("put T.cluster_sync() before the first and after the last access to another block of the cluster",
                "blocks that all run", "the other access"),
    "ending": ("wait for the copy before the kernel ends: T.tma_store_wait(0), the copy's mbarrier, or T.cluster_sync() after "
               "accesses of other blocks", "copies that are complete when the block ends", "the copy"),
    "proxy": ("call T.fence_proxy_async() in the threads that wrote, and then a barrier", "a fence after ordinary accesses",
              "the ordinary access"),
    "wgmma": ("call T.warpgroup_arrive() before the wgmma, and T.wait_wgmma(n) before its registers are used",
              "registers that no wgmma in flight uses", "the other use"),
}


@pass_(needs=DEVICE, of=Launch)
def verify_sync(launch: Launch, cx: PassContext) -> Launch:
    """Set each Launch's `sync_report`; raise "sync-unordered" for a certain fault.

    With tl.disable_thread_storage_sync faults are only reported, since the user orders the accesses.
    """
    strict = not cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC)
    text, faults = check_launch(launch)
    needed = launch.plan.reuse and cx.target.max_shared_bytes < sum(
        b.size * b.dtype.bytes for b, _ in launch.plan.shared_offsets if b.is_static)
    if needed and (faults or not text.startswith("ordered")):
        raise _no_reuse(launch, cx.target.max_shared_bytes, next(iter(faults), None), text)
    for f in faults:
        if f.exact and strict:
            hint, expected, label = _ADVICE[f.kind]
            notes = ((f.other, label),) if None not in (f.other, f.span) else ()
            if f.other is not None and f.other == f.span and f.kind in ("order", "copy"):
                hint = _ONE
            if f.kind == "wgmma" and "no wgmma_wait" in f.message and (at := f.span or f.other) is not None:
                hint = f"put T.wait_wgmma(0) {'before' if f.span else 'after'} line {at.line}, before the " \
                       "use; T.wait_wgmma(n) lets n later ones run on"
            raise error("sync-unordered", f.message, found=f.message, span=f.span or f.other or launch.span,
                        notes=notes, hint=hint, expected=expected or EXPECTED)
    return with_options(launch, sync_report=text)


def _no_reuse(launch: Launch, limit: int, fault: Fault | None, verdict: str) -> Exception:
    """The error for a launch that fits in shared memory only if buffers share bytes, where their order is not verified."""
    total = sum(b.size * b.dtype.bytes for b, _ in launch.plan.shared_offsets)
    shared = ", ".join(f"`{b.name}` in `{a.name}`" for a, b in launch.plan.reuse)
    return error("shared-memory", f"the kernel needs {total} bytes of shared memory, a block has {limit}; bytes cannot be used "
                 f"twice ({shared}): {fault.message if fault else verdict}", found=str(total),
                 expected=f"at most {limit} bytes", span=fault.span if fault and fault.span else launch.span,
                 hint="use smaller tiles or fewer pipeline stages, or await all copies before the later buffer is written")
