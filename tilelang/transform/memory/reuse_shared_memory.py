"""Chooses shared buffers that share bytes, for launches that do not fit in shared memory otherwise, or fewer times on an SM."""

from __future__ import annotations

from tilelang.ir import (AddressOf, Alloc, Bind, Buffer, Call, Const, Evaluate, For, If, Launch, Seq, Stmt, Store, Var, While,
                         call, inner, replace, rewrite_stmts, seq, walk, with_options, LOCAL, SHARED)
from tilelang.target.machine import REGISTERS, RESERVED_SHARED
from tilelang.target.warp_groups import warps_of

from ..analysis.divergence import Divergence
from ..analysis.effects import effects, own_effects
from ..analysis.shared_spans import place
from ..analysis.statements import has_warp_roles
from ..framework.pass_ import THREADS_BOUND, PassConfigKey, PassContext, pass_
from .plan_shared_memory import planned_bytes, shared_buffers, spans_of


@pass_(needs=THREADS_BOUND, of=Launch)
def reuse_shared_memory(launch: Launch, cx: PassContext) -> Launch:
    """Give each Launch that exceeds the target's shared memory, or that of the blocks that run on an SM without the compiler's
    staging, `reuse`: pairs (a, b) of buffers, b in bytes of a.

    Before:  loop over K_s; O_s[...] = acc; copy O_s -> O         After:  the same, reuse = ((K_s, O_s), ...)
    Every access to a comes before every access to b, in each warp role too.  b belongs to one warp role or to all threads,
    and that warp role accesses a as well, so that it has waited for what others write there.  place_sync then puts a barrier
    between the last access to a and the first access to b; verify_sync checks the bytes of the final program.  In a loop this
    is so within an iteration, and `disjoint` (disjoint_tiles.py) tells that no value outlives the iteration; that of scratch
    memory never does.
    Keeps: launches that fit, as often as they can.
    """
    return _shared(launch, cx)


def _shared(launch: Launch, cx: PassContext) -> Launch:
    limit = getattr(cx.target, "max_shared_bytes", None)
    off = cx.option(PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE) or cx.option(PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC)
    done = with_options(launch, disjoint=None) if launch.plan.disjoint else launch
    if limit is None or off or not all(b.is_static for b in shared_buffers(launch)) or (
            alone := planned_bytes(launch, cx)) <= (most := min(limit, _room(launch, cx))):
        return done
    order = _Order(launch)
    spans = spans_of(launch)
    if alone <= limit:  # what copies of the next iteration fill is in use all the time
        copies = (n for n in walk(launch.body, Call) if n.op in ("cp_async", "tma_load"))
        order.unknown |= {x.buffer.data for n in copies for x in walk(n, AddressOf)}
    pairs = {(a.buffer, b.buffer) for a in spans for b in spans if order.frees(a.buffer, b.buffer)}
    if not pairs or (least := place(spans, pairs)) >= alone or alone <= limit and (
            least > most or sum(x.bytes for x in spans) > limit and not cx.target.loads_by_registers):
        return done  # where this does not suffice, the error tells what is too much
    reuse = tuple((a.buffer, b.buffer) for a in spans for b in spans if (a.buffer, b.buffer) in pairs and a.meets(b))
    stored = {x.buffer.data for n in walk(launch.body, Call) if n.op in _STORES for x in walk(n, AddressOf)}
    if order.looped and any({a.data, b.data} & stored for a, b in reuse):
        done = replace(done, body=rewrite_stmts(done.body, _read_at_once))
    return with_options(done, reuse=reuse)


def fits(launch: Launch, cx: PassContext) -> bool:
    """Whether a launch fits in shared memory, with buffers that share bytes."""
    out = _shared(launch, cx)
    if not out.plan.reuse:
        return planned_bytes(out, cx) <= cx.target.max_shared_bytes
    return place(spans_of(out), set(out.plan.reuse)) <= cx.target.max_shared_bytes


def _room(launch: Launch, cx: PassContext) -> int:
    """Bytes of a block with which as many run on an SM as without the compiler's staging, where its registers allow them.

    Blocks without warp roles run under the loads and GEMMs of each other.
    """
    limits = cx.target.limits
    if launch.plan.min_blocks_per_sm > 1:  # which the program asks for, or for which the loop has been scheduled
        reserved = 0 if cx.target.loads_by_registers else RESERVED_SHARED
        return limits.shared_per_sm // launch.plan.min_blocks_per_sm - reserved
    allocs = [s.buffer for s in walk(launch.body, Alloc) if s.buffer.is_static]
    written = sum(b.size * b.dtype.bytes for b in allocs if b.scope_name in SHARED and not b.facts.ordered)
    own = sum(b.bits // 32 for b in allocs if b.scope_name == LOCAL) + REGISTERS.plain_loop
    blocks = min(limits.shared_per_sm // (written + RESERVED_SHARED), limits.registers_per_sm // (own * launch.num_threads))
    return limits.shared_per_sm if has_warp_roles(launch.body) or not blocks else \
        limits.shared_per_sm // blocks - RESERVED_SHARED


class _Order:
    """The order of the accesses to the shared buffers of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.body, self.divergence = launch.body, Divergence(launch)
        self.disjoint = {frozenset((a.data, b.data)) for a, b in launch.plan.disjoint}
        # Storage that no iteration reads before it has written it.
        self.own = {a.data for a, b in launch.plan.disjoint if a is b} | {
            x.buffer.data for x in walk(launch.body, Alloc) if x.buffer.facts.scratch or x.buffer.facts.ordered}
        # Storage whose address is stored in memory, or that other blocks of the cluster access: when it is used is not known.
        # What a block copies to another one is in use from the copy on.
        self.unknown, self.sent = set[Var](), set[Var]()
        for n in walk(launch.body, Store, Call):
            if isinstance(n, Store) or n.op in _REMOTE:
                copies = isinstance(n, Call) and n.op == "bulk_copy_cluster"
                for k, e in enumerate(n.args if copies else (n,)):
                    (self.sent if copies and k == 1 else self.unknown).update(x.buffer.data for x in walk(e, AddressOf))
        self.named: dict[Var, frozenset[Var]] = {}  # names of addresses and descriptors: the storage that they point to
        for n in walk(launch.body, Bind):
            self.named[n.var] = frozenset(x.buffer.data for x in walk(n.value, AddressOf)).union(
                *(self.named.get(v, ()) for v in walk(n.value, Var)))
        self.known: dict[int, frozenset[Var]] = {}
        self.looped = False  # whether `disjoint` was needed
        self._flights()

    def _flights(self) -> None:
        """Count the operands of a wgmma as accessed at the wait for it too."""
        groups: list[frozenset[Var]] = [frozenset()]  # the last is not committed yet
        for s in walk(self.body, Evaluate):
            if s.call.op == "wgmma":
                groups[-1] |= self.touched(s)
            elif s.call.op == "wgmma_commit":
                groups.append(frozenset())
            elif s.call.op == "wgmma_wait":
                done = len(groups) - 1 - s.call.options.n
                self.known[id(s)] = self.known.get(id(s), frozenset()).union(*groups[:max(done, 0)])  # perhaps one object twice
                del groups[:max(done, 0)]

    def frees(self, a: Buffer, b: Buffer) -> bool:
        """Whether b may be in bytes of a."""
        if a is b or not {a.scope_name, b.scope_name} <= set(SHARED) or a.facts.ordered or {a.data, b.data} & self.unknown or (
                a.data in self.sent):
            return False
        return self.before(self.body, a.data, b.data)

    def touched(self, s: Stmt) -> frozenset[Var]:
        """The shared storage that a statement accesses, by its name or by an address."""
        got = self.known.get(id(s))
        if got is None:
            got = self.known[id(s)] = frozenset(e.storage for e in effects(s)).union(
                *(self.named.get(v, ()) for v in set(walk(s, Var))))
        return got

    def before(self, s: Stmt, a: Var, b: Var) -> bool:
        """Whether every access to storage a in s comes before every access to storage b in s."""
        if not {a, b} <= self.touched(s):
            return True
        if isinstance(s, Seq):
            last = max(k for k, x in enumerate(s.stmts) if a in self.touched(x))
            first = min(k for k, x in enumerate(s.stmts) if b in self.touched(x))
            if last == first:
                return self.before(s.stmts[last], a, b)
            return last < first and not (has_warp_roles(s.stmts[last]) and has_warp_roles(s.stmts[first]))
        if isinstance(s, If) and not {a, b} & {e.storage for e in own_effects(s)}:
            ways = [x for x in inner(s) if b in self.touched(x)]
            if warps_of(s.cond) is None:
                return not self.divergence.divergent(s.cond) and all(self.before(x, a, b) for x in ways)
            return len(ways) == 1 and a in self.touched(ways[0]) and self.before(ways[0], a, b)
        if not isinstance(s, (For, While)) or {a, b} & {e.storage for e in own_effects(s)}:
            return False
        once = isinstance(s, For) and isinstance(s.extent, Const) and s.extent.value == 1
        if not (once or frozenset((a, b)) in self.disjoint or {a, b} <= self.own) or not self.before(s.body, a, b):
            return False
        self.looped |= not once
        return True


def _read_at_once(s: Stmt) -> Stmt | None:
    """A group of TMA stores with the wait until it has read shared memory: the next iteration writes other buffers there."""
    if not isinstance(s, Evaluate) or s.call.op != "bulk_commit":
        return None
    return seq(s, Evaluate(call("bulk_wait", (), "void", n=0, read=True), span=s.span), span=s.span)


_STORES = ("tma_store", "tma_reduce_add", "bulk_store")
_REMOTE = ("bulk_copy_cluster", "cluster_load", "cluster_store", "mbarrier_arrive_remote", "mbarrier_complete_remote")
