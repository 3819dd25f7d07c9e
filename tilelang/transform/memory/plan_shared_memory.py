"""Places the shared buffers of a block, reusing the space of buffers that are no longer needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang.errors import error, register
from tilelang.ir import (Alloc, Buffer, Call, Evaluate, Launch, Seq, Stmt, Var, call, replace, rewrite, seq, statements,
                         stmts_of, walk, with_options, BARRIER, SHARED)

from tilelang.target.thread_calls import BLOCK_VOTES

from ..analysis.effects import effects
from ..analysis.shared_spans import Span, place
from ..framework.pass_ import DEVICE, SYNCED, PassConfigKey, PassContext, pass_
from ..analysis.statements import barrier, barrier_in

register("shared-memory", ValueError, "the shared buffers of a kernel exceed what the target has per block",
         expected="what a block of the target has")

SMALL = 512  # bytes of scratch memory that share no space
WORD = 4  # bytes that atomics on smaller elements may read and write
PROXY_CALLS = frozenset(("wgmma_descriptor", "tma_load", "tma_store", "tma_reduce_add", "bulk_load", "bulk_store"))


@pass_(needs=SYNCED, gives=DEVICE, of=Launch)
def plan_shared_memory(launch: Launch, cx: PassContext) -> Launch:
    """Give each Launch `shared_offsets` ((buffer, byte offset), …) and `shared_bytes`.

    Two buffers share space when their live ranges over the statements of the block's body are disjoint.  A block barrier then
    separates them (one is added where there is none).  Offsets are multiples of 128 bytes, or of the buffer's `align`
    attribute.  Where users order warp roles and asynchronous work themselves (launch attr `by_hand`) no space is reused,
    because an asynchronous operation may still run during later statements.  A launch that does not fit in this way has
    `reuse` (reuse_shared_memory.py): the pairs of buffers that share space; their barriers are placed already.  Buffers of
    run-time size come last, one after another, with offsets as expressions.  Where the threads of a block vote through shared
    memory (Target.counts_in_shared), a word for each wave stands in front of these.
    Raises "shared-memory" beyond the target's limit.  tl.disable_shared_memory_reuse gives each buffer its own space,
    tl.debug_merge_shared_memory_allocations reports the plan.
    """
    reuse = not cx.option(PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE)
    limit = getattr(cx.target, "max_shared_bytes", None)
    votes = 0
    if getattr(cx.target, "counts_in_shared", False) and any(x.op in BLOCK_VOTES for x in walk(launch.body, Call)):
        votes = WORD * -(-launch.num_threads // cx.target.warp_size)
    planned = _planned(launch, reuse, limit, votes)
    if cx.option(PassConfigKey.TL_DEBUG_MERGE_SHARED_MEMORY_ALLOCATIONS):
        _report(planned, cx)
    return planned


def _report(launch: Launch, cx: PassContext) -> None:
    """Report one line per buffer (tl.debug_merge_shared_memory_allocations)."""
    cx.report(f"# shared memory: {launch.plan.shared_bytes} bytes")
    for b, offset in launch.plan.shared_offsets:
        size = f"{b.size * b.dtype.bytes} bytes" if b.is_static else "run-time size"
        cx.report(f"#   {b.name}: {b.dtype}{list(b.shape)} at byte {offset}, {size}")


def planned_bytes(launch: Launch, cx: PassContext) -> int:
    """Bytes that this pass would need for the buffers of static size; 2**31 if there are buffers of run-time size."""
    if not all(b.is_static for b in shared_buffers(launch)):
        return 2**31
    spans, off = spans_of(launch), launch.plan.by_hand or cx.option(PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE)
    return place(spans, () if off else None)


def shared_buffers(launch: Launch) -> list[Buffer]:
    """The buffers that take bytes of shared memory."""
    return [s.buffer for s in statements(launch.body) if isinstance(s, Alloc) and s.buffer.scope_name in (*SHARED, BARRIER)]


def _planned(launch: Launch, reuse: bool, limit: int | None, votes: int) -> Launch:
    reuse = reuse and not launch.plan.by_hand and not launch.plan.reuse
    buffers = shared_buffers(launch)
    if not buffers and not votes:
        return with_options(launch, shared_bytes=0)
    spans = spans_of(launch)
    counts = -(-place(spans, None if reuse else launch.plan.reuse or ()) // WORD) * WORD
    total = counts + votes
    if limit is not None and total > limit:
        written = sorted((s for s in spans if s.buffer.span), key=lambda s: -s.bytes) or spans
        sizes = [(s.buffer.name, s.bytes) for s in written]
        raise error("shared-memory", f"the kernel needs ‹{total}› bytes of shared memory, a block has {limit}",
                    expected=f"at most {limit} bytes", span=written[0].buffer.span or launch.span,
                    notes=((None, taken(sizes, sum(s.bytes for s in spans))),), hint=tiles_that_fit(sizes, total - limit))
    offsets: list[tuple[Buffer, Any]] = [(s.buffer, s.offset) for s in spans]
    size: Any = total
    for b in (b for b in buffers if not b.is_static):
        offsets.append((b, size))
        n: Any = b.dtype.bytes
        for d in b.shape:
            n = d * n
        size = size + (n + 15) // 16 * 16
    if reuse:
        launch = replace(launch, body=_separated(list(stmts_of(launch.body)), spans, launch.body.span))
    if votes:
        launch = replace(launch, body=rewrite(launch.body, lambda x: with_options(x, place=counts) if isinstance(
            x, Call) and x.op in BLOCK_VOTES else None))
    return with_options(launch, shared_offsets=tuple(offsets), shared_bytes=size)


def spans_of(launch: Launch) -> list[Span]:
    """Live ranges of the buffers of static size as positions of the body's statements; a view extends the live range of its
    storage."""
    body = stmts_of(launch.body)
    life: dict[Var, tuple[int, int]] = {}
    for at, s in enumerate(body):
        for storage in {e.storage for e in effects(s) if e.buffer.scope_name in SHARED}:
            life[storage] = (life.get(storage, (at, at))[0], at)
    end = len(body)
    out: list[Span] = []
    for b in shared_buffers(launch):
        if not b.is_static:
            continue
        # A barrier in front of a reduction costs more than a line of shared memory.
        alone = b.scope_name == BARRIER or b.facts.scratch and b.size * b.dtype.bytes <= SMALL
        first, last = (-1, end) if alone else life.get(b.data, (-1, -1))
        # TMA may still be reading an ordered buffer when the next statement runs.
        out.append(Span(b, first, end if b.facts.ordered else last))
    return out


def _separated(body: list[Stmt], spans: list[Span], span: Any) -> Stmt:
    """The body with a barrier before the first use of a buffer that reuses another's space, where none is in between."""
    low, last = np.array([s.offset for s in spans]), np.array([s.last for s in spans])
    high = low + [s.bytes for s in spans]
    barriers, starts = [k for k, x in enumerate(body) if barrier_in(x)], [-1]
    for s in sorted(spans, key=lambda s: s.first):
        earlier = (low < s.offset + s.bytes) & (s.offset < high) & (last < s.first)
        used = int(last[earlier].max(initial=-1))  # the latest statement that uses some of its bytes
        if used >= 0 and starts[-1] <= used and bisect_right(barriers, used) == bisect_left(barriers, s.first):
            starts.append(s.first)
    starts = starts[1:]
    if not starts:
        return body[0] if len(body) == 1 else Seq(tuple(body), span=span)
    # Ordinary stores must not take effect after TMA writes to the same bytes (PTX ISA: another proxy).
    fenced = any(isinstance(x, Call) and x.op in PROXY_CALLS for s in body for x in walk(s))
    out: list[Stmt] = []
    for at, x in enumerate(body):
        if at in starts:
            out += [Evaluate(call("fence_proxy_async", (), "void"))] if fenced else []
            out.append(barrier(x))
        out.append(x)
    return seq(*out, span=span)


def taken(sizes: Sequence[tuple[str, int]], total: int) -> str:
    """The note of an error: the bytes of the program's buffers, and what the compiler's own take of the total."""
    own, parts = total - sum(n for _, n in sizes), [f"{name} {n}" for name, n in sizes]
    if own:
        parts.append(f"{own} for staging and barriers that the compiler adds")
    return f"bytes: {', '.join(parts)}"


def tiles_that_fit(sizes: Sequence[tuple[str, int]], excess: int) -> str:
    """The hint for buffers that take `excess` bytes too many: of which size the largest fit, less by a power of two.

    sizes: names and bytes.  Those of the same size are made smaller together; where that does not suffice, all from 1 KiB on.
    For a single one also the most that it may take.
    """
    for least in (max((n for _, n in sizes), default=0), 1024):
        some = [(name, n) for name, n in sizes if n >= least]
        parts = next((p for p in (2, 4, 8, 16) if sum(n - n // p for _, n in some) >= excess), 0)
        if some and parts:
            fit = ", ".join(f"{name} of {n // parts} bytes" for name, n in some)
            most = f", at most {(some[0][1] - excess) // 128 * 128}" if len(some) == 1 else ""
            return f"use smaller tiles or fewer pipeline stages: the kernel fits with {fit}{most}"
    return "use smaller tiles or fewer pipeline stages"
