"""A decode step of Llama-like blocks in one launch: norm, QKV, attention, MLP, with dependences by counters.

Blocks stay on their SMs.  Warp group 0 streams weights, keys and values, which depend on nothing, through a ring in shared
memory, so that memory is read while blocks wait for each other; few tiles are on their way at once, or what blocks wait for
would queue behind them.  Warp group 2 waits for what other blocks computed, and puts
the left operand of the GEMMs (8 rows that stand for 64, or 64, of which the first `batch` are used) into a few slots.  Warp
group 1 multiplies.

    QKV        rows over their root mean square           O     + residual, sums of squares of 32 columns
    attention  a split of the context for each block      gate  silu(gate) * up, rows of both, 16 by 16
    merge      a head of a row for each block             down  + residual, sums of squares of 32 columns

With several ranks, each has some heads and some of ffn; behind O and down, blocks of one number store their accumulators on
all ranks, each number in one word with the number of the exchange, so that no signal follows it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import tilelang.language as T
from tilelang.errors import error, register

from .arrays import empty, is_numpy, place, type_name, zeros
from .place import Place

register("decode-shape", ValueError, "arguments of llama_decode whose shapes do not fit together, or divide into no equal work",
         "change the width that `found` names, or pass blocks= a number that divides all of them",
         expected="widths that divide among blocks")
register("decode-target", TypeError, "llama_decode is for bfloat16 on sm_90a", "use matmul and flash_decode elsewhere",
         expected="bfloat16 on sm_90a")

HALF, FULL = "bfloat16", "float32"
ROWS = 64  # of an accumulator
ATTENDING = 2  # warp groups that attend
FEW = 8  # rows of a left operand that stands for all of them
SHARED_BYTES = 226 << 10  # of a block, without barriers
COLUMNS = 32  # of a tile of weights
TOKENS = 32  # of a tile of keys and values
LOG2E = 1.4426950408889634
NEVER = -1e30  # the score of a token that is not there
LINE_HALVES = 64  # elements of 16 bits in a line of memory
LINE = 16  # counters in a line of 128 bytes, of which one is used
NORMED, PROJECTED, ATTENDED, MERGED, MIXED, GATED, COUNTERS = range(7)
MARKS = 18  # of a block's timeline


@dataclass(frozen=True)
class DecodeForm:
    """`batch` rows of `hidden` elements; heads of `dim`, `kv_heads` of them with keys; `ffn` elements between gate and down.

    context: tokens of the caches.  blocks: of the launch.  slots: of the ring, each of COLUMNS rows of 2 * dim elements; as
    many as fit where it is 0.  With several ranks, heads, kv_heads and ffn are those of one rank.  window: tiles of the ring on
    their way at once, at most.
    timed: `times` gets the nanosecond at which each block began and ended QKV, attention, o, gate and up, down of the last
    layer, saw QKV and attention of all, had merged, saw the merged heads, o, gate and up; had its own o and that of all ranks,
    its own down and that of all ranks; had the queries, and ended the other half of attention.
    """

    batch: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    context: int
    layers: int = 1
    blocks: int = 128
    slots: int = 0
    ranks: int = 1
    timed: bool = False
    window: int = 3
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not self.slots:
            small = 4 * (2 * self.batch + self.entries + (self.batch * COLUMNS if self.ranks > 1 else 1))
            room = SHARED_BYTES - self.lefts * self.left_rows * self.chunk * 2 - small
            object.__setattr__(self, "slots", room // (COLUMNS * self.chunk * 2))

    @property
    def left_rows(self) -> int:
        """Rows of a left operand in shared memory."""
        return FEW if max(self.batch, self.group) <= FEW else ROWS

    @property
    def lefts(self) -> int:
        """Slots of left operands."""
        return 4 if self.left_rows == FEW else 2

    @property
    def behind(self) -> int:
        """How many tiles are multiplied while the next one is waited for."""
        return int(self.lefts > 2)

    @property
    def chunk(self) -> int:
        """Elements of k of a tile of weights; the keys and the values of a token."""
        return 2 * self.dim

    @property
    def group(self) -> int:
        """Heads that share keys."""
        return self.heads // self.kv_heads

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    def widths(self, n: int) -> list[int]:
        """The widths of a block's tiles in a GEMM of n columns."""
        own = n // self.blocks
        return [COLUMNS] * (own // COLUMNS) + [own % COLUMNS] * (own % COLUMNS > 0)

    @property
    def splits(self) -> int:
        """Blocks that divide the context of a row and a head with keys."""
        return self.blocks // (self.batch * self.kv_heads)

    @property
    def entries(self) -> int:
        """Means that a head merges: of the warp groups of each of its blocks that attend, and the new token's value."""
        return ATTENDING * self.splits + 1

    @property
    def steps(self) -> int:
        """Tiles of keys and values of a block."""
        return self.context // TOKENS // self.splits


    @property
    def kept(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of what the launch works with; the last two count, from zero on, over all launches.

        QKV; mean, and largest scores and sums of each split; the rows behind attention, o, and gate; the sums of
        squares in front of both norms.
        """
        heads = self.batch, self.heads
        return (((self.batch, self.qkv), FULL), ((*heads, self.entries, self.dim), FULL), ((*heads, 2, self.entries), FULL),
                ((self.batch, self.heads * self.dim), HALF), ((self.batch, self.hidden), HALF), ((self.batch, self.ffn), HALF),
                ((2, self.hidden // COLUMNS, self.batch), FULL), ((self.blocks, MARKS) if self.timed else (1, 1), "uint64"),
                ((COUNTERS * LINE,), "int64"), ((self.blocks,), "int64"))

    @property
    def between(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """(shape, dtype) of what the ranks exchange, symmetric, from zero on: partial sums of O and down, below the number of
        the exchange."""
        return (((2, self.ranks, self.hidden // COLUMNS, self.batch * COLUMNS) if self.ranks > 1 else (1,) * 4, "int64"),)

    @property
    def fits(self) -> bool:
        """Whether every block has the same work."""
        wide = (self.qkv, 8), (self.hidden, COLUMNS), (2 * self.ffn, 16)
        return (all(n % (own * self.blocks) == 0 for n, own in wide)
                and self.blocks % (self.batch * self.kv_heads) == 0 and self.context % (TOKENS * self.splits) == 0
                and all(n % self.chunk == 0 for n in (self.hidden, self.heads * self.dim, self.ffn)) and self.batch <= ROWS)


def _together(steps: int) -> int:
    """How many chunks of the left operand are loaded at once."""
    return next(u for u in (4, 2, 1) if steps % u == 0)


def _column(f: DecodeForm, c: Any, steps: int) -> Any:
    """Where a block's c-th chunk of k begins: blocks begin at different ones, so that not all read the same columns at once."""
    return (c + T.get_block_binding(0)) % steps * f.chunk


@T.macro
def _room(f, ring, n):
    """Wait until slot n is free, and few tiles are on their way: long queues in front of memory serve some SMs later."""
    _Ring, full, free = ring
    T.mbarrier_wait_parity(free[n % f.slots], (n // f.slots + 1) % 2)
    if f.window < f.slots:
        if n >= f.window:
            T.mbarrier_wait_parity(full[(n - f.window) % f.slots], (n - f.window) // f.slots % 2)


@T.macro
def _load(f, W, layer, row, k, width, ring, n):
    Ring, full, _free = ring
    _room(f, ring, n)
    T.tma_copy(W[layer, row:row + width, k:k + f.chunk], Ring[n % f.slots, 0:width, :], barrier=full[n % f.slots])
    T.mbarrier_arrive(full[n % f.slots])


@T.macro
def _load_tokens(f, Kc, Vc, layer, place, at, ring, n):
    (Ring, full, _free), (row, head, _split) = ring, place
    _room(f, ring, n)
    T.tma_copy(Kc[layer, row, at:at + TOKENS, head, 0:f.dim], Ring[n % f.slots, :, 0:f.dim], barrier=full[n % f.slots])
    T.tma_copy(Vc[layer, row, at:at + TOKENS, head, 0:f.dim], Ring[n % f.slots, :, f.dim:2 * f.dim], barrier=full[n % f.slots])
    T.mbarrier_arrive(full[n % f.slots])


@T.macro
def _stream(f, W, layer, rows, steps, ring, it):
    """Load tiles of rows of W, all of a chunk of k before those of the next one."""
    widths, first = rows
    whole = sum(w == COLUMNS for w in widths)
    for c in T.serial(steps):
        k = _column(f, c, steps)
        for t in T.serial(whole):
            _load(f, W, layer, first + t * COLUMNS, k, COLUMNS, ring, it + c * len(widths) + t)
        if whole < len(widths):
            _load(f, W, layer, first + whole * COLUMNS, k, widths[-1], ring, it + c * len(widths) + whole)


@T.macro
def _stream_context(f, Kc, Vc, layer, place, ring, it):
    """Load the block's keys and values, each tile into the two halves of a slot."""
    for c in T.serial(f.steps):
        _load_tokens(f, Kc, Vc, layer, place, (place[2] * f.steps + c) * TOKENS, ring, it + c)


@T.macro
def _put(f, x, left, ix):
    """Hand a chunk to the GEMMs."""
    Left, ready, done = left
    rows, columns = x.shape
    T.mbarrier_wait_parity(done[ix % f.lefts], (ix // f.lefts + 1) % 2)
    T.copy(x, Left[ix % f.lefts, 0:rows, 0:columns])
    T.fence_proxy_async()
    T.mbarrier_arrive(ready[ix % f.lefts])


@T.macro
def _scale(f, squares, which, scales):
    """The factors of the rows that make their mean square one."""
    found, total = T.alloc_fragment((f.hidden // COLUMNS, f.batch), FULL), T.alloc_fragment((f.batch,), FULL)
    T.copy(squares[which, :, :], found)
    T.reduce_sum(found, total, dim=0)
    for i in T.Parallel(f.batch):
        scales[which, i] = T.rsqrt(total[i] / f.hidden + f.eps)


@T.macro
def _left_normed(f, source, weight, steps, norm, left, ix, late=None):
    """The rows times the weights of their norm; what makes the mean square one is multiplied at the end.

    late: (counts, which, number) to wait for in front of the sums of squares only, where the rows wait for nothing.
    """
    layer, which, squares, scales = norm
    u = _together(steps)
    parts = [T.alloc_fragment((f.batch, f.chunk), HALF) for _ in range(u)]
    for c in T.serial(steps // u):
        _ = [_weighted(f, source, weight, (layer, which), c * u + k, steps, x) for k, x in enumerate(parts)]
        _ = [_put(f, x, left, ix + c * u + k) for k, x in enumerate(parts[:-1])]
        if c == min(1, steps // u - 1):  # then the first chunks wait for nothing
            if late is not None:
                _await(*late)
            _scale(f, squares, which, scales)
        _put(f, parts[-1], left, ix + c * u + u - 1)


@T.macro
def _ask_norm(f, norms, layer, which):
    """Ask L2 for the weights of a norm, by warp group 2: memory answers late while weights are streamed."""
    for i in T.serial(T.ceildiv(f.hidden // LINE_HALVES, 128)):
        at = i * 128 + T.get_thread_binding() - 256
        if at < f.hidden // LINE_HALVES:
            T.prefetch_l2(norms[layer, which, at * LINE_HALVES], 2 * LINE_HALVES)


@T.macro
def _ask_rotary(f, rotary, row):
    if T.get_thread_binding() == 256:
        _ = [T.prefetch_l2(x[row, 0], 2 * f.dim) for x in rotary]


@T.macro
def _weighted(f, source, weight, norm, c, steps, x):
    layer, which = norm
    for i, j in T.Parallel(f.batch, f.chunk):
        x[i, j] = T.cast(T.cast(source[i, _column(f, c, steps) + j], FULL)
                         * T.cast(weight[layer, which, _column(f, c, steps) + j], FULL), HALF)


@T.macro
def _left_plain(f, source, steps, left, ix):
    u = _together(steps)
    parts = [T.alloc_fragment((f.batch, f.chunk), HALF) for _ in range(u)]
    for c in T.serial(steps // u):
        _ = [T.copy(source[0, _column(f, c * u + k, steps)], x) for k, x in enumerate(parts)]
        _ = [_put(f, x, left, ix + c * u + k) for k, x in enumerate(parts)]


@T.macro
def _release(bars, k):
    """One lane of each warp arrives: 128 arrivals would take as long as four MMAs."""
    if T.get_thread_binding() % 32 == 0:
        T.mbarrier_arrive(bars[k])


@T.macro
def _issue(f, sum_, left, ring, iw, iy):
    """Multiply a chunk by a tile.  With few left operands the slot is free then; else that of the tile before, which was
    multiplied meanwhile."""
    (Left, _ready, _done), (Ring, full, free) = left, ring
    T.mbarrier_wait_parity(full[iw % f.slots], iw // f.slots % 2)
    T.wgmma_gemm(Left[iy % f.lefts, :, :], Ring[iw % f.slots, 0:sum_.shape[1], :], sum_, transpose_B=True)
    T.wait_wgmma(f.behind)
    if f.behind == 0:
        _release(free, iw % f.slots)


@T.macro
def _issue_next(f, sum_, left, ring, iw, iy):
    _issue(f, sum_, left, ring, iw, iy)
    if f.behind > 0:
        _release(ring[2], (iw - 1) % f.slots)


@T.macro
def _multiply(f, accs, steps, left, ring, iw, iy):
    """accs[t] = the block's rows of the left operand times its t-th tile of weights."""
    (_Left, ready, done), (_Ring, _full, free), tiles = left, ring, len(accs)
    _ = [T.clear(x) for x in accs]
    for c in T.serial(steps):
        T.mbarrier_wait_parity(ready[(iy + c) % f.lefts], (iy + c) // f.lefts % 2)
        _issue(f, accs[0], left, ring, iw + c * tiles, iy + c)
        if T.And(f.behind > 0, c > 0):
            _release(free, (iw + c * tiles - 1) % f.slots)
            _release(done, (iy + c - 1) % f.lefts)
        _ = [_issue_next(f, x, left, ring, iw + c * tiles + t + 1, iy + c) for t, x in enumerate(accs[1:])]
        if f.behind == 0:
            _release(done, (iy + c) % f.lefts)
    if f.behind > 0:
        T.wait_wgmma(0)
        _release(free, (iw + steps * tiles - 1) % f.slots)
        _release(done, (iy + steps - 1) % f.lefts)


@T.macro
def _tell(counts, which, leader):
    """What this warp group has done is done."""
    T.sync_threads()
    if T.get_thread_binding() == leader:
        _ = T.atom_add(counts[which * LINE], 1, scope="gpu", sem="release")


@T.macro
def _exchange(f, sum_, which, tile, exchange):
    """The sum over the ranks, in the order of the ranks, so that all of them get the same bits.

    A word is a number of another rank below the number of the exchange.  All words are on their way before the first is
    waited for.
    """
    (box, near), epoch = exchange
    number, turns = T.cast(epoch, "int64") * (1 << 32), -(-f.batch * COLUMNS // 128)
    mine = T.alloc_local((turns,), FULL)
    for i, j in T.Parallel(f.batch, COLUMNS):
        near[i * COLUMNS + j] = sum_[i, j]
    T.sync_threads()
    _ = [_send(f, box, near, (which, tile, k), number, mine) for k in range(turns)]
    _ = [_receive(f, box, near, (which, tile, k), number, mine) for k in range(turns)]
    T.sync_threads()
    for i, j in T.Parallel(ROWS, COLUMNS):
        sum_[i, j] = near[T.min(i, f.batch - 1) * COLUMNS + j]


@T.macro
def _send(f, box, near, place, number, mine):
    (which, tile, k), me = place, T.get_rank() % f.ranks
    at = k * 128 + T.get_thread_binding() - 128
    if at < f.batch * COLUMNS:
        mine[k] = near[at]
        word = number + T.cast(T.reinterpret(mine[k], "uint32"), "int64")
        for r in range(1, f.ranks):
            T.st(box[which, me, tile, at], word, scope="sys", sem="relaxed", dst_pe=(me + r) % f.ranks)


@T.macro
def _receive(f, box, near, place, number, mine):
    (which, tile, k), me = place, T.get_rank() % f.ranks
    at = k * 128 + T.get_thread_binding() - 128
    if at < f.batch * COLUMNS:
        total, word = T.alloc_var(FULL, init=0), T.alloc_var("int64")
        for r in range(f.ranks):
            if me == r:
                total += mine[k]
            else:
                T.wait_ge(box[which, r, tile, at], number, found=word)
                total += T.reinterpret(T.cast(word, "uint32"), FULL)
        near[at] = total


@T.macro
def _mark(f, times, b, k):
    if f.timed:
        if T.get_thread_binding() == (256 if 6 <= k < 12 or k >= 16 else 128):
            times[b, k] = T.globaltimer()


@T.macro
def _await(counts, which, number):
    """What the warp groups told about this step of all blocks is seen.  One thread of warp group 2 asks."""
    if T.get_thread_binding() == 256:
        T.wait_ge(counts[which * LINE], number)
    T.sync_threads()


@T.macro
def _add(f, sum_, rest, out, squares, which, tile):
    """Add a tile to the residual; store it, and the sums of its squares."""
    square, total = T.alloc_fragment((ROWS, COLUMNS), FULL), T.alloc_fragment((ROWS,), FULL)
    for i, j in T.Parallel(ROWS, COLUMNS):
        rest[i, j] += sum_[i, j]
    for i, j in T.Parallel(ROWS, COLUMNS):
        square[i, j] = rest[i, j] * rest[i, j]
    for i, j in T.Parallel(f.batch, COLUMNS):
        out[i, tile * COLUMNS + j] = T.cast(rest[i, j], HALF)
    T.reduce_sum(square, total, dim=1)
    for i in T.Parallel(f.batch):
        squares[which, tile, i] = total[i]


@T.macro
def _mix(f, accs, rests, out, norm, first, exchange):
    """What the ranks' tiles add to the residual."""
    squares, which, times, b = norm
    _mark(f, times, b, 14 - 2 * which)
    if f.ranks > 1:
        _ = [_exchange(f, x, which, first + t, exchange) for t, x in enumerate(accs)]
        _mark(f, times, b, 15 - 2 * which)
    _ = [_add(f, x, r, out, squares, which, first + t) for t, (x, r) in enumerate(zip(accs, rests))]


@T.macro
def _start(f, X, rest, tile):
    for i, j in T.Parallel(ROWS, COLUMNS):
        rest[i, j] = T.if_then_else(i < f.batch, T.cast(X[T.min(i, f.batch - 1), tile * COLUMNS + j], FULL), 0.0)


@T.macro
def _store_scaled(f, sum_, scales, out, first):
    for i, j in T.Parallel(f.batch, sum_.shape[1]):
        out[i, first + j] = sum_[i, j] * scales[0, i]


@T.macro
def _gate(f, sum_, scales, out, first):
    half = sum_.shape[1] // 2
    for i, j in T.Parallel(f.batch, half):
        gate, up = (sum_[i, k + j] * scales[1, i] for k in (0, half))
        out[i, first // 2 + j] = T.cast(gate * up * T.fast_rcp(1.0 + T.fast_exp2(-gate * LOG2E)), HALF)


@T.macro
def _rotated(f, qkv, cos, sin, row, at, d):
    """Element d of a head of a row, rotated by the row's position."""
    other = T.if_then_else(d < f.dim // 2, d + f.dim // 2, d - f.dim // 2)
    x, y = qkv[row, at + d], qkv[row, at + other]
    return x * cos[row, d % (f.dim // 2)] + T.if_then_else(d < f.dim // 2, -y, y) * sin[row, d % (f.dim // 2)]


@T.macro
def _queries(f, qkv, rotary, place, new, results, left, ix):
    """Hand on the queries; the first split computes the new token's scores, key and value."""
    (cos, sin), (Means, Stats) = rotary, results
    (layer, row, head, split), (Kn, Vn) = place, new
    held, key = T.alloc_fragment((f.group, f.dim), HALF), T.alloc_fragment((f.group, f.dim), HALF)
    value, scored = T.alloc_fragment((f.group, f.dim), FULL), T.alloc_fragment((f.group, f.dim), FULL)
    total = T.alloc_fragment((f.group,), FULL)
    for i, d in T.Parallel(f.group, f.dim):
        held[i, d] = T.cast(_rotated(f, qkv, cos, sin, row, (head * f.group + i) * f.dim, d) * (LOG2E / f.dim ** 0.5), HALF)
        key[i, d] = T.cast(_rotated(f, qkv, cos, sin, row, (f.heads + head) * f.dim, d), HALF)
        value[i, d] = qkv[row, (f.heads + f.kv_heads + head) * f.dim + d]
    _put(f, held, left, ix)
    if split == 0:
        for i, d in T.Parallel(f.group, f.dim):
            scored[i, d] = T.cast(held[i, d], FULL) * T.cast(key[i, d], FULL)
            Means[row, head * f.group + i, f.entries - 1, d] = value[i, d]
            if i == 0:
                Kn[layer, row, head, d] = key[i, d]
                Vn[layer, row, head, d] = T.cast(value[i, d], HALF)
        T.reduce_sum(scored, total, dim=1)
        for i in T.Parallel(f.group):
            Stats[row, head * f.group + i, 0, f.entries - 1] = total[i]
            Stats[row, head * f.group + i, 1, f.entries - 1] = 1.0


@T.macro
def _attend(f, which, place, context, left, ring, at):
    """Every second tile of the block's keys and values, by warp group 1 + which."""
    (Left, ready, _done), (Ring, full, free) = left, ring
    (_layer, row, head, split), (length, Means, Stats), (it, ix) = place, context, at
    S, P = T.alloc_fragment((ROWS, TOKENS), FULL), T.alloc_fragment((ROWS, TOKENS), HALF)
    O, most, before = T.alloc_fragment((ROWS, f.dim), FULL), T.alloc_fragment((ROWS,), FULL), T.alloc_fragment((ROWS,), FULL)
    total, part = T.alloc_fragment((ROWS,), FULL), T.alloc_fragment((ROWS,), FULL)
    T.mbarrier_wait_parity(ready[ix % f.lefts], ix // f.lefts % 2)
    T.fill(most, NEVER)
    T.clear(total)
    T.clear(O)
    for c in T.serial((f.steps + 1 - which) // ATTENDING):
        n = it + ATTENDING * c + which
        T.mbarrier_wait_parity(full[n % f.slots], n // f.slots % 2)
        T.wgmma_gemm(Left[ix % f.lefts, :, 0:f.dim], Ring[n % f.slots, :, 0:f.dim], S, transpose_B=True, clear_accum=True)
        T.wait_wgmma(0)
        T.copy(most, before)
        for i, j in T.Parallel(ROWS, TOKENS):
            S[i, j] = T.if_then_else((split * f.steps + ATTENDING * c + which) * TOKENS + j < length, S[i, j], NEVER)
        T.reduce_max(S, most, dim=1, clear=False)
        for i in T.Parallel(ROWS):
            before[i] = T.fast_exp2(before[i] - most[i])
        for i, j in T.Parallel(ROWS, TOKENS):
            S[i, j] = T.fast_exp2(S[i, j] - most[i])
        T.reduce_sum(S, part, dim=1)
        for i in T.Parallel(ROWS):
            total[i] = total[i] * before[i] + part[i]
        for i, d in T.Parallel(ROWS, f.dim):
            O[i, d] *= before[i]
        T.copy(S, P)
        T.wgmma_gemm(P, Ring[n % f.slots, :, f.dim:2 * f.dim], O)
        T.wait_wgmma(0)
        _release(free, n % f.slots)
    for i, d in T.Parallel(f.group, f.dim):
        Means[row, head * f.group + i, split * ATTENDING + which, d] = O[i, d]
    for i in T.Parallel(f.group):
        Stats[row, head * f.group + i, 0, split * ATTENDING + which] = most[i]
        Stats[row, head * f.group + i, 1, split * ATTENDING + which] = total[i]


@T.macro
def _merge(f, results, out, b, fractions):
    """Heads of rows: the weighted means of the splits and the new token."""
    (Means, Stats), n = results, f.entries
    peaks, sums, weights = (T.alloc_fragment((n,), FULL) for _ in range(3))
    most, total, held = (T.alloc_fragment(shape, FULL) for shape in ((1,), (1,), (n, f.dim)))
    for k in T.serial(T.ceildiv(f.batch * f.heads - b, f.blocks)):
        row, head = (k * f.blocks + b) // f.heads, (k * f.blocks + b) % f.heads
        for d in T.Parallel(f.dim):
            for s in T.unroll(n):
                held[s, d] = Means[row, head, s, d]
        T.copy(Stats[row, head, 0, :], peaks)
        T.copy(Stats[row, head, 1, :], sums)
        T.reduce_max(peaks, most, dim=0)
        for s in T.Parallel(n):
            weights[s] = T.exp2(peaks[s] - most[0])
        for s in T.Parallel(n):
            sums[s] *= weights[s]
        T.reduce_sum(sums, total, dim=0)
        for s in T.Parallel(n):
            fractions[s] = weights[s] / total[0]
        for d in T.Parallel(f.dim):
            mean = T.alloc_var(FULL, init=0)
            for s in T.unroll(n):
                mean += fractions[s] * held[s, d]
            out[row, head * f.dim + d] = T.cast(mean, HALF)


def _chunks(f: DecodeForm) -> tuple[int, int, int]:
    """Chunks of k: of QKV, gate and up; of o; of down."""
    return f.hidden // f.chunk, f.heads * f.dim // f.chunk, f.ffn // f.chunk


def _tiles(f: DecodeForm) -> tuple[int, int, int, int, int]:
    """Tiles that a block takes from its ring in a layer: QKV, context, o, gate and up, down."""
    sq, so, sd = _chunks(f)
    wo = len(f.widths(f.hidden))
    return len(f.widths(f.qkv)) * sq, f.steps, wo * so, len(f.widths(2 * f.ffn)) * sq, wo * sd


@T.macro
def _stream_layers(f, weights, caches, b, split, ring):
    """The loads of all layers, in the order in which warp groups 1 and 2 use them."""
    (Wqkv, Wo, Wgu, Wd), (sq, so, sd), (n_q, n_c, n_o, n_g, n_d) = weights, _chunks(f), _tiles(f)
    wq, wo, wg = f.widths(f.qkv), f.widths(f.hidden), f.widths(2 * f.ffn)
    for l in T.serial(f.layers):
        at = l * (n_q + n_c + n_o + n_g + n_d)
        _stream(f, Wqkv, l, (wq, b * sum(wq)), sq, ring, at)
        _stream_context(f, *caches, l, split, ring, at + n_q)
        _stream(f, Wo, l, (wo, b * sum(wo)), so, ring, at + n_q + n_c)
        _stream(f, Wgu, l, (wg, b * sum(wg)), sq, ring, at + n_q + n_c + n_o)
        _stream(f, Wd, l, (wo, b * sum(wo)), sd, ring, at + n_q + n_c + n_o + n_g)


@T.macro
def _left_layers(f, made, norms, new, counters, place, used, shared):
    """Warp group 2: the left operands of all GEMMs, and its half of attention."""
    (X, Y, M, A, G, qkv), (counts, calls, squares, times), (rotary, context) = made, counters, used
    (left, ring, near, scales, fractions), (b, row, head, split), (sq, so, sd), n = shared, place, _chunks(f), _tiles(f)
    chunks = sq + 1 + so + sq + sd
    called = T.alloc_var("int64")
    called = calls[b]
    for l in T.serial(f.layers):
        epoch, ix = (called * f.layers + l + 1) * f.blocks, l * chunks
        _ask_norm(f, norms, l, 0)
        normed = called * (f.layers + 1) * f.blocks + (l + 1) * f.blocks
        if l == 0:
            _left_normed(f, X, norms, sq, (0, 0, squares, scales), left, ix, (counts, NORMED, normed))
        else:
            _await(counts, NORMED, normed)
            _left_normed(f, Y, norms, sq, (l, 0, squares, scales), left, ix)
        _ask_rotary(f, rotary, row)
        _await(counts, PROJECTED, epoch)
        _mark(f, times, b, 6)
        T.mbarrier_wait_parity(near, l % 2)
        _queries(f, qkv, rotary, (l, row, head, split), new, context[1:], left, ix + sq)
        _mark(f, times, b, 16)
        _attend(f, 1, (l, row, head, split), context, left, ring, (l * sum(n) + n[0], ix + sq))
        _mark(f, times, b, 17)
        _tell(counts, ATTENDED, 256)
        _ask_norm(f, norms, l, 1)
        _await(counts, ATTENDED, 2 * epoch)
        _mark(f, times, b, 7)
        _merge(f, context[1:], A, b, fractions)
        _tell(counts, MERGED, 256)
        _mark(f, times, b, 8)
        _await(counts, MERGED, epoch)
        _mark(f, times, b, 9)
        _left_plain(f, A, so, left, ix + sq + 1)
        _await(counts, MIXED, epoch)
        _mark(f, times, b, 10)
        _left_normed(f, M, norms, sq, (l, 1, squares, scales), left, ix + sq + 1 + so)
        _await(counts, GATED, epoch)
        _mark(f, times, b, 11)
        _left_plain(f, G, sd, left, ix + sq + 1 + so + sq)


def decode_program(f: DecodeForm) -> Any:
    """The launch: Y = the rows X after all layers; Kn, Vn = their keys and values."""
    D, dim, NB, Shared = f.hidden, f.dim, f.blocks, T.SymmTensor if f.ranks > 1 else T.Tensor
    wq, wo, wg = f.widths(f.qkv), f.widths(D), f.widths(2 * f.ffn)
    (sq, so, sd), (n_q, n_c, n_o, n_g, n_d) = _chunks(f), _tiles(f)
    tiles, chunks = n_q + n_c + n_o + n_g + n_d, sq + 1 + so + sq + sd  # of a layer

    @T.prim_func
    def decode_step(X: T.Tensor((f.batch, D), HALF), norms: T.Tensor((f.layers, 2, D), HALF),
                    Wqkv: T.Tensor((f.layers, f.qkv, D), HALF), Wo: T.Tensor((f.layers, D, f.heads * dim), HALF),
                    Wgu: T.Tensor((f.layers, 2 * f.ffn, D), HALF), Wd: T.Tensor((f.layers, D, f.ffn), HALF),
                    Kc: T.Tensor((f.layers, f.batch, f.context, f.kv_heads, dim), HALF),
                    Vc: T.Tensor((f.layers, f.batch, f.context, f.kv_heads, dim), HALF),
                    lengths: T.Tensor((f.batch,), "int32"), cos: T.Tensor((f.batch, dim // 2), FULL),
                    sin: T.Tensor((f.batch, dim // 2), FULL), Y: T.Tensor((f.batch, D), HALF),
                    Kn: T.Tensor((f.layers, f.batch, f.kv_heads, dim), HALF),
                    Vn: T.Tensor((f.layers, f.batch, f.kv_heads, dim), HALF), box: Shared(*f.between[0]),
                    qkv: T.Tensor(*f.kept[0]), Means: T.Tensor(*f.kept[1]),
                    Stats: T.Tensor(*f.kept[2]), A: T.Tensor(*f.kept[3]), M: T.Tensor(*f.kept[4]), G: T.Tensor(*f.kept[5]),
                    squares: T.Tensor(*f.kept[6]), times: T.Tensor(*f.kept[7]),
                    counts: T.Tensor(*f.kept[8]), calls: T.Tensor(*f.kept[9])):
        with T.Kernel(NB, threads=384) as b:
            Ring = T.alloc_shared((f.slots, COLUMNS, f.chunk), HALF)
            Left = T.alloc_shared((f.lefts, f.left_rows, f.chunk), HALF)
            scales, fractions = T.alloc_shared((2, f.batch), FULL), T.alloc_shared((f.entries,), FULL)
            ring = Ring, T.alloc_barrier([128] * f.slots), T.alloc_barrier([4] * f.slots)
            left = Left, T.alloc_barrier([128] * f.lefts), T.alloc_barrier([4] * f.lefts)
            near = T.alloc_barrier(128)  # warp group 2 reads the ring after warp group 1
            rotary, boxes = (cos, sin), (box, T.alloc_shared((f.batch * COLUMNS if f.ranks > 1 else 1,), FULL))
            row, head, split = b // (f.kv_heads * f.splits), b // f.splits % f.kv_heads, b % f.splits
            T.clear(Left)
            with T.ws(0):
                T.dec_max_nreg(24)
                _stream_layers(f, (Wqkv, Wo, Wgu, Wd), (Kc, Vc), b, (row, head, split), ring)
            with T.ws(1):
                T.inc_max_nreg(240)
                call, length = T.alloc_var("int64"), T.alloc_var("int32")
                call, length = calls[b], lengths[row]
                _mark(f, times, b, 0)
                accs, mixed, gated = ([T.alloc_fragment((ROWS, w), FULL) for w in widths] for widths in (wq, wo, wg))
                rests = [T.alloc_fragment((ROWS, w), FULL) for w in wo]
                _ = [_start(f, X, r, b * len(wo) + t) for t, r in enumerate(rests)]
                _ = [T.clear(x) for x in mixed]
                _ = [_add(f, x, r, Y, squares, 0, b * len(wo) + t) for t, (x, r) in enumerate(zip(mixed, rests))]
                _tell(counts, NORMED, 128)
                for l in T.serial(f.layers):
                    at, ix, epoch = l * tiles, l * chunks, call * f.layers + l + 1
                    _multiply(f, accs, sq, left, ring, at, ix)
                    _ = [_store_scaled(f, x, scales, qkv, b * sum(wq) + t * COLUMNS) for t, x in enumerate(accs)]
                    T.mbarrier_arrive(near)
                    _tell(counts, PROJECTED, 128)
                    _mark(f, times, b, 1)
                    _attend(f, 0, (l, row, head, split), (length, Means, Stats), left, ring, (at + n_q, ix + sq))
                    _release(left[2], (ix + sq) % f.lefts)
                    _tell(counts, ATTENDED, 128)
                    _mark(f, times, b, 2)
                    _multiply(f, mixed, so, left, ring, at + n_q + n_c, ix + sq + 1)
                    _mix(f, mixed, rests, M, (squares, 1, times, b), b * len(wo), (boxes, epoch))
                    _tell(counts, MIXED, 128)
                    _mark(f, times, b, 3)
                    _multiply(f, gated, sq, left, ring, at + n_q + n_c + n_o, ix + sq + 1 + so)
                    _ = [_gate(f, x, scales, G, b * sum(wg) + t * COLUMNS) for t, x in enumerate(gated)]
                    _tell(counts, GATED, 128)
                    _mark(f, times, b, 4)
                    _multiply(f, mixed, sd, left, ring, at + n_q + n_c + n_o + n_g, ix + sq + 1 + so + sq)
                    _mix(f, mixed, rests, Y, (squares, 0, times, b), b * len(wo), (boxes, epoch))
                    _tell(counts, NORMED, 128)
                    _mark(f, times, b, 5)
                if T.get_thread_binding() == 128:
                    calls[b] = call + 1
            with T.ws(2):
                T.inc_max_nreg(216)
                span = T.alloc_var("int32")
                span = lengths[row]
                _left_layers(f, (X, Y, M, A, G, qkv), norms, (Kn, Vn), (counts, calls, squares, times), (b, row, head, split),
                             (rotary, (span, Means, Stats)), (left, ring, near, scales, fractions))

    return decode_step


def with_blocks(most: int, **sizes: int) -> DecodeForm:
    """The form with the most blocks, up to `most`, that have equal work.  Raises decode-shape."""
    forms = (DecodeForm(**sizes, blocks=n) for n in range(most, 0, -1))
    form = next((f for f in forms if f.fits), None)
    if form is None:
        f = DecodeForm(**sizes, blocks=1)
        raise error("decode-shape", f"the work of a step does not divide among any number of blocks up to {most}",
                    expected=f"tiles of 8 columns of QKV, {COLUMNS} of hidden, 16 of gate and up, and {TOKENS} tokens, "
                    "equally many for each block", found=f"{f.qkv}, {f.hidden} and {2 * f.ffn} columns, {f.context} tokens of "
                    f"{f.batch} rows with {f.kv_heads} heads")
    return form


INTERLEAVED = 128  # blocks for which interleave arranges rows


def interleave(gate: Any, up: Any, blocks: int = INTERLEAVED) -> Any:
    """The rows of both matrices (..., ffn, hidden), alternating, as a llama_decode of that many blocks takes them.

    A block has ffn / blocks rows of each: 16 of gate, then 16 of up, and so on; 8 of each at the end where these are no
    multiple of 16.  Raises decode-shape.

    Example:
        gate_up = interleave(model.mlp.gate_proj.weight, model.mlp.up_proj.weight)
    """
    own = gate.shape[-2] // blocks
    if gate.shape[-2] % (8 * blocks):
        raise error("decode-shape", f"‹{gate.shape[-2]} rows› of gate do not divide among {blocks} blocks",
                    expected="a multiple of 8 rows for each block")
    parts = [x[..., b * own + k:b * own + min(k + 16, own), :] for b in range(blocks) for k in range(0, own, 16)
             for x in (gate, up)]
    return np.concatenate(parts, -2) if is_numpy(gate) else sys.modules["torch"].cat(parts, -2)


_KEPT: dict[Any, list[Any]] = {}


def llama_decode(x: Any, norms: Any, qkv: Any, o: Any, gate_up: Any, down: Any, keys: Any, values: Any, lengths: Any,
                 cos: Any, sin: Any, *, blocks: int | None = None, target: Any = None,
                 execution_backend: str | None = None) -> tuple[Any, Any, Any]:
    """(rows after all layers, their keys, their values) of one new token for each row of a Llama-like model, in one launch.

    x: (batch, hidden) bfloat16, as all operands that are not named otherwise.  norms: (layers, 2, hidden), the weights of both
    RMS norms.  qkv: (layers, (heads + 2 kv_heads) dim, hidden), rows of queries, keys, values.  o: (layers, hidden, heads dim).
    gate_up: (layers, 2 ffn, hidden), of interleave.  down: (layers, hidden, ffn).  keys, values: (layers, batch, context,
    kv_heads, dim): caches of finite numbers, of which row r has lengths[r] (int32) tokens; the new ones come back as (layers,
    batch, kv_heads, dim).  cos, sin: (batch, dim / 2) float32, of the new positions.  Residuals and accumulators are
    float32.  blocks: of the launch and of interleave, at most as many as there are SMs; all have equal work.  Calls on one
    device follow one another on one stream.  For sm_90a.  Raises decode-shape, decode-target.

    Example:
        y, k, v = llama_decode(x, norms, qkv, o, gate_up, down, keys, values, lengths, cos, sin)
    """
    at = Place.of(x, target, execution_backend)
    if not at.target.has_wgmma or type_name(x) != HALF:
        raise error("decode-target", f"llama_decode of ‹{type_name(x)} on {at.target}›")
    return decode(at, blocks, zeros, (x, norms, qkv, o, gate_up, down, keys, values, lengths, cos, sin))


def decode(at: Place, blocks: int | None, shared: Any, given: tuple[Any, ...], ranks: int = 1) -> tuple[Any, Any, Any]:
    """The results of a launch.  shared: a function (like, shape, dtype) that allocates what the ranks exchange."""
    x, o, down, keys = given[0], given[3], given[5], given[6]
    layers, batch, context, kv_heads, dim = keys.shape
    most = blocks or at.sms or at.chip.sms
    f = with_blocks(most, batch=batch, hidden=x.shape[1], heads=o.shape[2] // dim, kv_heads=kv_heads, dim=dim,
                    ffn=down.shape[2], context=context, layers=layers, ranks=ranks)
    interleaved = blocks or INTERLEAVED
    if f.blocks != interleaved and (f.ffn // f.blocks % 16 or f.ffn // interleaved % 16):
        raise error("decode-shape", f"the launch has {f.blocks} blocks, and rows of gate and up stand as for {interleaved}",
                    expected=f"interleave(gate, up, blocks={f.blocks}) and blocks={f.blocks} in the call",
                    found=f"{interleaved} blocks")
    out = [empty(x, shape, HALF) for shape in (tuple(x.shape), *[(layers, batch, kv_heads, dim)] * 2)]
    kept = _KEPT.setdefault((f, at, place(x)), [])
    if not kept:
        kept += [shared(x, *one) for one in f.between] + [zeros(x, *one) for one in f.kept]
    at.kernel(decode_program, f)(*given, *out, *kept)
    return out[0], out[1], out[2]
