"""The kernels of gated_delta and kda: a delta rule in chunks of steps, with one decay a step or one for every channel.

    state_t = diag(alpha_t) state_(t-1) + k_t u_t^T,   u_t = beta_t (v_t - (diag(alpha_t) state_(t-1))^T k_t),
    o_t = scale state_t^T q_t

With g the sum of log alpha within a chunk, and u = beta w, the w of a chunk are A (v - (k exp g) state), where A = (I + L)^-1
and L_ts = (k_t exp(g_t - g_s)) . k_s beta_s for s < t.  A first kernel computes what does not depend on the state, for all
chunks at once: A, the scores P of q, times beta, and the decays; with a decay for every channel also q and k with their decays.
A second follows the chunks, a block for 64 columns of values:
    w = A (v - (k exp g) state),   o = (q exp g) state + P w,   state <- exp(g_last) state + (beta k exp(g_last - g))^T w.
With wgmma it holds the state transposed in registers, where it is the first operand of a GEMM as it is, like v - k state and w:
the recurrence does not pass through shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from ..arrays import accumulator
from ..attention.form import LOG2E

CHUNKS = 64, 32, 16  # steps of a chunk: the first with which a block has room for its tiles
COLUMNS = 64  # of values of a block
HALF = 32  # steps that a thread solves by substitution
LEAST = -20.0  # of log alpha: exp(-20) = 2e-9.  exp(4 * 20) is finite in float32 and bfloat16
STAGES = 2


class DeltaForm(NamedTuple):
    """What a kernel is compiled for.  each: value heads of a head of q and k.  channels: a decay for every channel of the key.
    wgmma: the recurrence for sm_90a.  chunk: one of CHUNKS.  together: the device has room for the blocks of both recurrences
    of backward at the same time."""

    heads: int
    each: int
    dim_k: int
    dim_v: int
    dtype: str
    channels: bool
    wgmma: bool
    chunk: int = CHUNKS[0]
    together: bool = False

    @property
    def threads(self) -> int:
        """Of the first kernel."""
        return min(128, 4 * self.chunk)

    @property
    def width(self) -> int:
        """Channels of a block that computes gradients of q and k: fewer where they have decays, for registers."""
        return min(self.dim_k, 64) if self.channels else self.dim_k

    acc = property(lambda self: accumulator(self.dtype))

    @property
    def number(self) -> Any:
        return T.float64 if self.acc == "float64" else T.float32

    def exp(self, x: Any) -> Any:
        return T.exp(x) if self.acc == "float64" else T.exp2(x * LOG2E)


@T.macro
def invert(f, Lt, X):
    """X = (I + L)^-1 in float32 for Lt = L^T, strictly upper: blocks of at most 32 by substitution, a column a thread, and for
    two of them X_10 = -X_11 L_10 X_00."""
    tx, half = T.get_thread_binding(), min(f.chunk, HALF)
    x = T.alloc_local((half,), f.acc)
    if half < f.chunk:
        rest, product = T.alloc_fragment((half, half), f.acc), T.alloc_shared((half, half), f.acc)
    if tx < f.chunk:
        at = tx // half * half
        for i in T.unroll(half):
            x[i] = T.if_then_else(i == tx % half, T.cast(1, f.acc), T.cast(0, f.acc))
        for r in T.unroll(half - 1):
            for i in T.unroll(r + 1, half):
                x[i] -= Lt[at + r, at + i] * x[r]
        for i in T.unroll(half):
            X[at + i, tx] = x[i]
            if half < f.chunk:
                X[half - at + i, tx] = 0.0
    if half < f.chunk:
        T.gemm(Lt[0:half, half:f.chunk], X[0:half, 0:half], rest, transpose_A=True, clear_accum=True)
        T.copy(rest, product)
        T.gemm(X[half:f.chunk, half:f.chunk], product, rest, clear_accum=True)
        for i, j in T.Parallel(half, half):
            X[half + i, j] = -rest[i, j]


@T.macro
def gated_scores(f, Qs, Ks, g, Sk, Sq):
    """One decay a step: Sk = k k^T (symmetric) and Sq = q k^T with the decay between two steps."""
    T.gemm(Ks, Ks, Sk, transpose_B=True, clear_accum=True)
    T.gemm(Qs, Ks, Sq, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(f.chunk, f.chunk):
        Sk[i, j] *= f.exp(T.min(g[j] - g[i], T.cast(0, f.acc)))
    for i, j in T.Parallel(f.chunk, f.chunk):
        Sq[i, j] *= f.exp(T.min(g[i] - g[j], T.cast(0, f.acc)))


@T.macro
def channel_scores(f, Qs, Ks, g, Sk, Sq):
    """The same with a decay for every channel, which goes into the operands.  The steps s and t in two halves of 64, 32 or 16
    steps count their decays from the last step of the first half: both are at most 1.  Those in one block of 8 count from its
    middle."""
    if f.chunk > 32:
        pairs_of_halves(f, Qs, Ks, g, 32, Sk, Sq)
    if f.chunk > 16:
        pairs_of_halves(f, Qs, Ks, g, 16, Sk, Sq)
    pairs_of_halves(f, Qs, Ks, g, 8, Sk, Sq)
    pairs_of_halves(f, Qs, Ks, g, 4, Sk, Sq)


@T.macro
def pairs_of_halves(f, Qs, Ks, g, n, Sk, Sq):
    """The scores of the steps of a block of 2 n, of which those within one half may be wrong unless n is 4."""
    kind = "float32" if n == 4 and f.dtype == "float16" else f.dtype  # the decay of 4 steps is not a float16
    q, k = T.alloc_shared((f.chunk, f.dim_k), kind), T.alloc_shared((f.chunk, f.dim_k), kind)
    earlier = T.alloc_shared((f.chunk, f.dim_k), kind) if n == 4 else k
    part = T.alloc_fragment((f.chunk, f.chunk), f.acc)
    for i, d in T.Parallel(f.chunk, f.dim_k):
        after = g[i, d] - g[i // (2 * n) * 2 * n + n - 1, d]
        factor = f.exp(after if n == 4 else -T.abs(after))
        q[i, d], k[i, d] = Qs[i, d] * factor, Ks[i, d] * factor
        if n == 4:
            earlier[i, d] = Ks[i, d] * f.exp(-after)
    T.gemm(earlier, k, part, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(f.chunk, f.chunk):
        if (i ^ j) < 2 * n:
            Sk[i, j] = part[i, j]
    T.gemm(q, earlier, part, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(f.chunk, f.chunk):
        if (i ^ j) < 2 * n:
            Sq[i, j] = part[i, j]


@T.macro
def decays(f, Decay, g, seq, b, h, t, d0):
    """The sums of log alpha within a chunk, of the channels of g, from d0 on."""
    if f.channels:
        for i, d in T.Parallel(*g.shape):
            g[i, d] = T.if_then_else(t + i < seq, T.max(Decay[b, t + i, h, d0 + d], LEAST), T.cast(0, f.acc))
    else:
        for i in T.Parallel(f.chunk):
            g[i] = T.if_then_else(t + i < seq, T.max(Decay[b, t + i, h], LEAST), T.cast(0, f.acc))
    T.cumsum(g, dim=0)


@T.macro
def prepare(f, inputs, results, scale, seq, b, h, c):
    """What chunk c of a head needs that does not depend on the state."""
    (Q, K, Decay, Beta), (A, P, E, Qd, Kd, Ke), t = inputs, results, c * f.chunk
    Qs, Ks = T.alloc_shared((f.chunk, f.dim_k), f.dtype), T.alloc_shared((f.chunk, f.dim_k), f.dtype)
    Lt, X = T.alloc_shared((f.chunk, f.chunk), f.acc), T.alloc_shared((f.chunk, f.chunk), f.acc)
    g, beta = T.alloc_shared((f.chunk, f.dim_k) if f.channels else (f.chunk,), f.acc), T.alloc_shared((f.chunk,), f.acc)
    Sk, Sq = T.alloc_fragment((f.chunk, f.chunk), f.acc), T.alloc_fragment((f.chunk, f.chunk), f.acc)
    T.copy(Q[b, t:t + f.chunk, h // f.each, :], Qs)
    T.copy(K[b, t:t + f.chunk, h // f.each, :], Ks)
    T.copy(Beta[b, t:t + f.chunk, h], beta)
    decays(f, Decay, g, seq, b, h, t, 0)
    if f.channels:
        for i, d in T.Parallel(f.chunk, f.dim_k):
            Qd[b, h, c, i, d], Kd[b, h, c, i, d] = Qs[i, d] * scale * f.exp(g[i, d]), Ks[i, d] * f.exp(g[i, d])
            Ke[b, h, c, i, d] = Ks[i, d] * (beta[i] * f.exp(g[f.chunk - 1, d] - g[i, d]))
        for d in T.Parallel(f.dim_k):
            E[b, h, c, d] = f.exp(g[f.chunk - 1, d])
        channel_scores(f, Qs, Ks, g, Sk, Sq)
    else:
        for i in T.Parallel(f.chunk):
            E[b, h, c, i], E[b, h, c, f.chunk + i] = f.exp(g[i]), beta[i] * f.exp(g[f.chunk - 1] - g[i])
        gated_scores(f, Qs, Ks, g, Sk, Sq)
    for i, j in T.Parallel(f.chunk, f.chunk):
        Lt[i, j] = T.if_then_else(i < j, Sk[i, j] * beta[i], T.cast(0, f.acc))
    for i, j in T.Parallel(f.chunk, f.chunk):
        P[b, h, c, i, j] = T.if_then_else(j <= i, Sq[i, j] * (scale * beta[j]), T.cast(0, f.acc))
    invert(f, Lt, X)
    T.copy(X, A[b, h, c, :, :])


@T.macro
def produce(f, tiles, work, chunks, b, h, v):
    """Warp group 1: load the operands of all chunks."""
    (Q, K, Ke, V, A, P, E), (q, k, ke, vs, a, p, e, full, free, _) = work, tiles
    with T.ws(1):
        T.dec_max_nreg(24)
        for c in T.serial(chunks):
            s, t = c % STAGES, c * f.chunk
            T.mbarrier_wait_parity(free[s], (c // STAGES + 1) % 2)
            if f.channels:
                T.tma_copy(K[b, h, c, :, :], k[s, :, :], barrier=full[s])
                T.tma_copy(Q[b, h, c, :, :], q[s, :, :], barrier=full[s])
                T.tma_copy(Ke[b, h, c, :, :], ke[s, :, :], barrier=full[s])
            else:
                T.tma_copy(K[b, t:t + f.chunk, h // f.each, :], k[s, :, :], barrier=full[s])
                T.tma_copy(Q[b, t:t + f.chunk, h // f.each, :], q[s, :, :], barrier=full[s])
            T.tma_copy(V[b, t:t + f.chunk, h, v:v + COLUMNS], vs[s, :, :], barrier=full[s])
            T.tma_copy(A[b, h, c, :, :], a[s, :, :], barrier=full[s])
            T.tma_copy(P[b, h, c, :, :], p[s, :, :], barrier=full[s])
            T.tma_copy(E[b, h, c, :], e[s, :], barrier=full[s])
            T.mbarrier_arrive(full[s])


@T.macro
def consume(f, tiles, scale, chunks, results, b, h, v):
    """Warp group 0: the recurrence for 64 columns of values.  A chunk's outputs are stored under the GEMMs of the next."""
    (Initial, O, Final), (q, k, ke, vs, a, p, e, full, free, Os) = results, tiles
    with T.ws(0):
        T.inc_max_nreg(240)
        state, states = (T.alloc_fragment((COLUMNS, f.dim_k), kind) for kind in ("float32", f.dtype))
        value, values, ends = (T.alloc_fragment((COLUMNS, f.chunk), kind) for kind in ("float32", f.dtype, f.dtype))
        o, done = T.alloc_fragment((COLUMNS, f.chunk), "float32"), T.alloc_fragment((COLUMNS, f.chunk), f.dtype)
        for i, j in T.Parallel(COLUMNS, f.dim_k):
            state[i, j] = Initial[b, h, j, v + i]
        for c in T.serial(chunks):
            s = c % STAGES
            T.copy(state, states)
            T.mbarrier_wait_parity(full[s], c // STAGES % 2)
            T.wgmma_gemm(states, k[s, :, :], value, transpose_B=True, clear_accum=True)
            T.wgmma_gemm(states, q[s, :, :], o, transpose_B=True, clear_accum=True)
            if c > 0:
                store(Os, done, O, b, h, (c - 1) * f.chunk, v)
            T.wait_wgmma(1)
            for i, j in T.Parallel(COLUMNS, f.chunk):
                values[i, j] = vs[s, j, i] - value[i, j] * (1.0 if f.channels else e[s, j])
            T.wgmma_gemm(values, a[s, :, :], value, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(COLUMNS, f.dim_k):
                state[i, j] *= e[s, j if f.channels else f.chunk - 1]
            T.wait_wgmma(0)
            T.copy(value, values)
            if f.channels:
                T.wgmma_gemm(values, ke[s, :, :], state)
            else:
                for i, j in T.Parallel(COLUMNS, f.chunk):
                    ends[i, j] = value[i, j] * e[s, f.chunk + j]
                T.wgmma_gemm(ends, k[s, :, :], state)
                for i, j in T.Parallel(COLUMNS, f.chunk):
                    o[i, j] *= scale * e[s, j]
            T.wgmma_gemm(values, p[s, :, :], o, transpose_B=True)
            T.wait_wgmma(0)
            T.mbarrier_arrive(free[s])
            T.copy(o, done)
        store(Os, done, O, b, h, (chunks - 1) * f.chunk, v)
        for i, j in T.Parallel(COLUMNS, f.dim_k):
            Final[b, h, j, v + i] = state[i, j]


@T.macro
def store(Os, done, O, b, h, t, v):
    """Store the outputs of a chunk, which are transposed."""
    T.sync_threads(1, 128)
    for i, j in T.Parallel(*done.shape):
        Os[j, i] = done[i, j]
    T.fence_proxy_async()
    T.sync_threads(1, 128)
    T.copy(Os, O[b, t:t + Os.shape[0], h, v:v + COLUMNS])


@T.macro
def follow(f, work, scale, chunks, results, b, h, v):
    """The recurrence on other machines."""
    (Q, K, Ke, V, A, P, E), (Initial, O, Final) = work, results
    state, Ss = T.alloc_fragment((COLUMNS, f.dim_k), f.acc), T.alloc_shared((COLUMNS, f.dim_k), f.dtype)
    o = T.alloc_fragment((f.chunk, COLUMNS), f.acc)
    w, q, p = (T.alloc_shared((f.chunk, n), f.dtype) for n in (COLUMNS, f.dim_k, f.chunk))
    for i, j in T.Parallel(COLUMNS, f.dim_k):
        state[i, j] = Initial[b, h, j, v + i]
    for c in T.serial(chunks):
        t = c * f.chunk
        T.copy(state, Ss)
        T.copy(Q[b, h, c, :, :] if f.channels else Q[b, t:t + f.chunk, h // f.each, :], q)
        T.copy(P[b, h, c, :, :], p)
        T.gemm(q, Ss, o, transpose_B=True, clear_accum=True)
        if not f.channels:
            for i, j in T.Parallel(f.chunk, COLUMNS):
                o[i, j] *= scale * E[b, h, c, i]
        advance(f, (K, Ke, V, A, E), state, Ss, w, (b, h, c, v))
        T.gemm(p, w, o)
        T.copy(o, O[b, t:t + f.chunk, h, v:v + COLUMNS])
    for i, j in T.Parallel(COLUMNS, f.dim_k):
        Final[b, h, j, v + i] = state[i, j]


@T.macro
def advance(f, work, state, Ss, w, at):
    """The w of a chunk, and the state after it.  Ss: the state before it."""
    (K, Ke, V, A, E), (b, h, c, v) = work, at
    t = c * f.chunk
    k, a, Vs = (T.alloc_shared((f.chunk, n), f.dtype) for n in (f.dim_k, f.chunk, COLUMNS))
    value = T.alloc_fragment((f.chunk, COLUMNS), f.acc)
    T.copy(K[b, h, c, :, :] if f.channels else K[b, t:t + f.chunk, h // f.each, :], k)
    T.copy(V[b, t:t + f.chunk, h, v:v + COLUMNS], Vs)
    T.copy(A[b, h, c, :, :], a)
    T.gemm(k, Ss, value, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(f.chunk, COLUMNS):
        Vs[i, j] = Vs[i, j] - value[i, j] * (T.cast(1, f.acc) if f.channels else E[b, h, c, i])
    T.gemm(a, Vs, value, clear_accum=True)
    T.copy(value, w)
    for i, j in T.Parallel(COLUMNS, f.dim_k):
        state[i, j] *= E[b, h, c, j if f.channels else f.chunk - 1]
    if f.channels:
        T.copy(Ke[b, h, c, :, :], k)
        T.gemm(w, k, state, transpose_A=True)
    else:
        for i, j in T.Parallel(f.chunk, COLUMNS):
            Vs[i, j] = value[i, j] * E[b, h, c, f.chunk + i]
        T.gemm(Vs, k, state, transpose_A=True)


def workspace(f: DeltaForm, batch: Any, chunks: Any) -> tuple[tuple[tuple[Any, ...], str], ...]:
    """Shapes and types of A, P, E (exp g and beta exp(g_last - g), or with channels exp(g_last)), Qd, Kd, Ke (with channels:
    scale q exp g, k exp g and beta k exp(g_last - g))."""
    tile, decayed = (batch, f.heads, chunks), (batch, f.heads, chunks if f.channels else 0, f.chunk, f.dim_k)
    square, row = ((*tile, f.chunk, f.chunk), f.dtype), ((*tile, f.dim_k if f.channels else 2 * f.chunk), f.acc)
    return square, square, row, *[(decayed, f.dtype)] * 3


def delta_chunks(f: DeltaForm) -> Any:
    """(Q, K, V, Decay, Beta, Initial, scale, A, P, E, Qd, Kd, Ke, O, Final).

    Q, K (batch, seq, heads // each, dim_k), V, O (batch, seq, heads, dim_v); Decay: log alpha, float32, (batch, seq, heads) or
    with channels (batch, seq, heads, dim_k); Beta (batch, seq, heads); Initial, Final (batch, heads, dim_k, dim_v) float32."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    key, value, row = (batch, seq, f.heads // f.each, f.dim_k), (batch, seq, f.heads, f.dim_v), (batch, seq, f.heads)
    states, kept = (batch, f.heads, f.dim_k, f.dim_v), [T.Tensor(*x) for x in workspace(f, batch, chunks)]

    @T.prim_func
    def delta_rule(Q: T.Tensor(key, f.dtype), K: T.Tensor(key, f.dtype), V: T.Tensor(value, f.dtype),
                   Decay: T.Tensor((*row, f.dim_k) if f.channels else row, f.acc), Beta: T.Tensor(row, f.acc),
                   Initial: T.Tensor(states, f.acc), scale: f.number,
                   A: kept[0], P: kept[1], E: kept[2], Qd: kept[3], Kd: kept[4], Ke: kept[5],
                   O: T.Tensor(value, f.dtype), Final: T.Tensor(states, f.acc)):
        with T.Kernel(chunks, f.heads, batch, threads=f.threads) as (c, h, b):
            prepare(f, (Q, K, Decay, Beta), (A, P, E, Qd, Kd, Ke), scale, seq, b, h, c)
        with T.Kernel(f.dim_v // COLUMNS, f.heads, batch, threads=256 if f.wgmma else 128) as (x, h, b):
            work, last = (*((Qd, Kd) if f.channels else (Q, K)), Ke, V, A, P, E), (Initial, O, Final)
            if f.wgmma:
                keys = [T.alloc_shared((STAGES, f.chunk, f.dim_k), f.dtype) for _ in range(3 if f.channels else 2)]
                squares = [T.alloc_shared((STAGES, f.chunk, f.chunk), f.dtype) for _ in (0, 1, 2)]
                e = T.alloc_shared((STAGES, f.dim_k if f.channels else 2 * f.chunk), "float32")
                barriers = [T.alloc_barrier([128] * STAGES) for _ in (0, 1)]
                tiles = (*keys, *([] if f.channels else [None]), *squares, e, *barriers,
                         T.alloc_shared((f.chunk, COLUMNS), f.dtype))
                produce(f, tiles, work, chunks, b, h, x * COLUMNS)
                consume(f, tiles, scale, chunks, last, b, h, x * COLUMNS)
            else:
                follow(f, work, scale, chunks, last, b, h, x * COLUMNS)

    return delta_rule


def delta_steps(f: DeltaForm) -> Any:
    """(Q, K, V, Decay, Beta, Initial, scale, O, Final) as for delta_chunks: a step at a time, for few of them."""
    batch, seq, columns = *T.dynamic("batch, seq"), 32
    key, value, row = (batch, seq, f.heads // f.each, f.dim_k), (batch, seq, f.heads, f.dim_v), (batch, seq, f.heads)
    states = batch, f.heads, f.dim_k, f.dim_v

    @T.prim_func
    def delta_rule_steps(Q: T.Tensor(key, f.dtype), K: T.Tensor(key, f.dtype), V: T.Tensor(value, f.dtype),
                         Decay: T.Tensor((*row, f.dim_k) if f.channels else row, f.acc), Beta: T.Tensor(row, f.acc),
                         Initial: T.Tensor(states, f.acc), scale: f.number,
                         O: T.Tensor(value, f.dtype), Final: T.Tensor(states, f.acc)):
        with T.Kernel(f.dim_v // columns, f.heads, batch, threads=128) as (x, h, b):
            state, terms = T.alloc_fragment((f.dim_k, columns), f.acc), T.alloc_fragment((f.dim_k, columns), f.acc)
            u, v = T.alloc_fragment((columns,), f.acc), x * columns
            T.copy(Initial[b, h, :, v:v + columns], state)
            for t in T.serial(seq):
                for i, j in T.Parallel(f.dim_k, columns):
                    state[i, j] *= f.exp(T.max(Decay[b, t, h, i] if f.channels else Decay[b, t, h], LEAST))
                    terms[i, j] = state[i, j] * K[b, t, h // f.each, i]
                T.reduce_sum(terms, u, dim=0)
                for j in T.Parallel(columns):
                    u[j] = Beta[b, t, h] * (V[b, t, h, v + j] - u[j])
                for i, j in T.Parallel(f.dim_k, columns):
                    state[i, j] += K[b, t, h // f.each, i] * u[j]
                    terms[i, j] = state[i, j] * Q[b, t, h // f.each, i]
                T.reduce_sum(terms, u, dim=0)
                for j in T.Parallel(columns):
                    O[b, t, h, v + j] = u[j] * scale
            T.copy(state, Final[b, h, :, v:v + columns])

    return delta_rule_steps
