"""The kernel of the gradients of gated_delta and kda.

The names are those of delta_kernels.  G, the gradient of the state, follows a delta rule itself, from the end to the start:
    dv = A^T (P^T do + (beta k exp(g_last - g)) G),   G <- exp(g_last) G + (scale q exp g)^T do - (k exp g)^T dv.
Four launches: what does not depend on the state, as in the forward direction; the states before the chunks and w; the G after
the chunks and dv, in the same launch where the device has room; and, all chunks at once, the other gradients.  A key reads
(k_t^T state) and it writes (beta_t k_t w_t^T).
With M = (do w^T) E for s <= t and N = (dv w^T) E for s < t, E_ts = exp(g_t - g_s),
    dq = scale (exp(g) (do state^T) + M beta k),         read = -(exp(g) (dv state^T) + N beta k),
    z = exp(g_last - g) (w G^T) + scale M^T q - N^T k,   dk = read + beta z,   dbeta = the rows of k * z.
exp(g_t) stands beside all that step t reads with and exp(-g_t) beside all that it writes: dg = q * dq + k * read - k * beta z.
log alpha_t is in g_t and all later ones: a sum from the end of the chunk, and beyond it the sum of G * (state after the chunk).
What a pair of steps gives to both is one number, or two of the same operands: where each step rounds its side, pairs that lie
on one side of a decay do not cancel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tilelang.language as T

from .delta_kernels import COLUMNS, LEAST, DeltaForm, decays, prepare, workspace


@T.macro
def states_before(f, work, results, chunks, b, h, v):
    """The states before all chunks, transposed, and w, for 64 columns of values."""
    (K, Ke, V, A, E, Initial), (Before, W) = work, results
    state, Ss = T.alloc_fragment((COLUMNS, f.dim_k), f.acc), T.alloc_shared((COLUMNS, f.dim_k), f.dtype)
    k, a, Vs, Ws = (T.alloc_shared((f.chunk, n), f.dtype) for n in (f.dim_k, f.chunk, COLUMNS, COLUMNS))
    ke = T.alloc_shared((f.chunk, f.dim_k if f.channels else COLUMNS), f.dtype)
    e = T.alloc_shared((f.dim_k if f.channels else 2 * f.chunk,), f.acc)
    value = T.alloc_fragment((f.chunk, COLUMNS), f.acc)
    for i, j in T.Parallel(COLUMNS, f.dim_k):
        state[i, j] = Initial[b, h, j, v + i]
    for c in T.Pipelined(chunks, num_stages=2):
        t = c * f.chunk
        T.copy(K[b, h, c, :, :] if f.channels else K[b, t:t + f.chunk, h // f.each, :], k)
        T.copy(V[b, t:t + f.chunk, h, v:v + COLUMNS], Vs)
        T.copy(A[b, h, c, :, :], a)
        T.copy(E[b, h, c, :], e)
        if f.channels:
            T.copy(Ke[b, h, c, :, :], ke)
        T.copy(state, Ss)
        T.copy(Ss, Before[b, h, c, v:v + COLUMNS, :])
        T.gemm(k, Ss, value, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(f.chunk, COLUMNS):
            Ws[i, j] = Vs[i, j] - value[i, j] * (T.cast(1, f.acc) if f.channels else e[i])
        T.gemm(a, Ws, value, clear_accum=True)
        T.copy(value, W[b, t:t + f.chunk, h, v:v + COLUMNS])
        for i, j in T.Parallel(COLUMNS, f.dim_k):
            state[i, j] *= e[j if f.channels else f.chunk - 1]
        for i, j in T.Parallel(f.chunk, COLUMNS):
            Ws[i, j] = value[i, j] * (T.cast(1, f.acc) if f.channels else e[f.chunk + i])
        T.gemm(Ws, ke if f.channels else k, state, transpose_A=True)


@T.macro
def gradients_after(f, work, results, scale, chunks, b, h, v):
    """The gradients of the states after all chunks, transposed, and dv, for 64 columns of values."""
    (Q, K, Ke, A, P, E, dO, dFinal), (After, dV, dInitial) = work, results
    G, Gs = T.alloc_fragment((COLUMNS, f.dim_k), f.acc), T.alloc_shared((COLUMNS, f.dim_k), f.dtype)
    q, k, ke = (T.alloc_shared((f.chunk, f.dim_k), f.dtype) for _ in (0, 1, 2))
    a, p = (T.alloc_shared((f.chunk, f.chunk), f.dtype) for _ in (0, 1))
    dOs, dVs, e = (T.alloc_shared((f.chunk, COLUMNS), f.dtype), T.alloc_shared((f.chunk, COLUMNS), f.dtype),
                   T.alloc_shared((f.dim_k if f.channels else 2 * f.chunk,), f.acc))
    value, one = T.alloc_fragment((f.chunk, COLUMNS), f.acc), T.cast(1, f.acc)
    for i, j in T.Parallel(COLUMNS, f.dim_k):
        G[i, j] = dFinal[b, h, j, v + i]
    for step in T.Pipelined(chunks, num_stages=2):
        c, t = chunks - 1 - step, (chunks - 1 - step) * f.chunk
        T.copy(Q[b, h, c, :, :] if f.channels else Q[b, t:t + f.chunk, h // f.each, :], q)
        T.copy(K[b, h, c, :, :] if f.channels else K[b, t:t + f.chunk, h // f.each, :], k)
        T.copy(dO[b, t:t + f.chunk, h, v:v + COLUMNS], dOs)
        T.copy(A[b, h, c, :, :], a)
        T.copy(P[b, h, c, :, :], p)
        T.copy(E[b, h, c, :], e)
        if f.channels:
            T.copy(Ke[b, h, c, :, :], ke)
        T.copy(G, Gs)
        T.copy(Gs, After[b, h, c, v:v + COLUMNS, :])
        T.gemm(ke if f.channels else k, Gs, value, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(f.chunk, COLUMNS):
            value[i, j] *= one if f.channels else e[f.chunk + i]
        T.gemm(p, dOs, value, transpose_A=True)
        T.copy(value, dVs)
        T.gemm(a, dVs, value, transpose_A=True, clear_accum=True)
        T.copy(value, dV[b, t:t + f.chunk, h, v:v + COLUMNS])
        for i, j in T.Parallel(COLUMNS, f.dim_k):
            G[i, j] *= e[j if f.channels else f.chunk - 1]
        for i, j in T.Parallel(f.chunk, COLUMNS):
            dVs[i, j] = -value[i, j] * (one if f.channels else e[i])
        for i, j in T.Parallel(f.chunk, COLUMNS):
            dOs[i, j] *= one if f.channels else scale * e[i]
        T.gemm(dVs, k, G, transpose_A=True)
        T.gemm(dOs, q, G, transpose_A=True)
    for i, j in T.Parallel(COLUMNS, f.dim_k):
        dInitial[b, h, j, v + i] = G[i, j]


class Accumulators(NamedTuple):
    """What is summed over the columns of values: do w^T, dv w^T; do state^T, dv state^T, w G^T; the rows of state * G."""

    M: Any
    N: Any
    q: Any
    read: Any
    z: Any
    edge: Any

    @staticmethod
    def of(f: DeltaForm) -> Accumulators:
        shapes = [(f.chunk, f.chunk)] * 2 + [(f.chunk, f.width)] * 3 + [(f.width,)]
        return Accumulators(*(T.alloc_fragment(x, f.acc) for x in shapes))


@T.macro
def sum_values(f, accs, work, b, h, c, d0):
    """Sum over the columns of values, 64 after another."""
    (dO, dV, W, Before, After), t = work, c * f.chunk
    do, dv, w = (T.alloc_shared((f.chunk, COLUMNS), f.dtype) for _ in (0, 1, 2))
    S, G = T.alloc_shared((COLUMNS, f.width), f.dtype), T.alloc_shared((COLUMNS, f.width), f.dtype)
    both = T.alloc_fragment((COLUMNS, f.width), f.acc)
    _ = [T.clear(x) for x in accs]
    for p in T.serial(f.dim_v // COLUMNS):
        v = p * COLUMNS
        T.copy(dO[b, t:t + f.chunk, h, v:v + COLUMNS], do)
        T.copy(dV[b, t:t + f.chunk, h, v:v + COLUMNS], dv)
        T.copy(W[b, t:t + f.chunk, h, v:v + COLUMNS], w)
        T.copy(Before[b, h, c, v:v + COLUMNS, d0:d0 + f.width], S)
        T.copy(After[b, h, c, v:v + COLUMNS, d0:d0 + f.width], G)
        T.gemm(do, w, accs.M, transpose_B=True)
        T.gemm(dv, w, accs.N, transpose_B=True)
        T.gemm(do, S, accs.q)
        T.gemm(dv, S, accs.read)
        T.gemm(w, G, accs.z)
        for i, j in T.Parallel(COLUMNS, f.width):
            both[i, j] = T.cast(S[i, j], f.acc) * G[i, j]
        T.reduce_sum(both, accs.edge, dim=0, clear=False)


@T.macro
def add_pairs(f, accs, each, Q, K, g, beta, scale):
    """Add what pairs of steps give, with one decay a step.  each: a pair gives its later and its earlier step the same number,
    so that pairs on one side of a decay cancel in its gradient."""
    Ms, Ns = T.alloc_shared((f.chunk, f.chunk), f.dtype), T.alloc_shared((f.chunk, f.chunk), f.dtype)
    X, zero = T.alloc_shared((f.chunk, f.dim_k), f.dtype), T.cast(0, f.acc)
    both, more = T.alloc_fragment((f.chunk, f.chunk), f.acc), T.alloc_fragment((f.chunk, f.chunk), f.acc)
    row, column = T.alloc_fragment((f.chunk,), f.acc), T.alloc_fragment((f.chunk,), f.acc)
    for i, d in T.Parallel(f.chunk, f.dim_k):
        X[i, d] = K[i, d] * beta[i]
    for i, j in T.Parallel(f.chunk, f.chunk):
        decay = f.exp(T.min(g[i] - g[j], zero))
        accs.M[i, j] = T.if_then_else(j <= i, accs.M[i, j] * (decay * scale), zero)
        accs.N[i, j] = T.if_then_else(j < i, accs.N[i, j] * -decay, zero)
    T.copy(accs.M, Ms)
    T.copy(accs.N, Ns)
    T.gemm(Q, X, both, transpose_B=True, clear_accum=True)
    T.gemm(K, X, more, transpose_B=True, clear_accum=True)
    T.gemm(Ms, X, accs.q)
    T.gemm(Ns, X, accs.read)
    T.gemm(Ms, Q, accs.z, transpose_A=True)
    T.gemm(Ns, K, accs.z, transpose_A=True)
    for i, j in T.Parallel(f.chunk, f.chunk):
        both[i, j] = both[i, j] * accs.M[i, j] + more[i, j] * accs.N[i, j]
    T.reduce_sum(both, row, dim=1)
    T.reduce_sum(both, column, dim=0)
    for i in T.Parallel(f.chunk):
        each[i] += row[i] - column[i]


@T.macro
def add_channel_pairs(f, accs, each, Q, K, g, beta, scale, n):
    """The same with a decay for every channel: pairs of two halves of 2 n steps, or, with n of 4, of one block of 8.  before,
    after: the decays that the earlier and the later step bring along, from the last step of the first half."""
    kind = "float32" if n == 4 and f.dtype == "float16" else f.dtype  # the decay of 4 steps is not a float16
    Ms, Ns = T.alloc_shared((f.chunk, f.chunk), kind), T.alloc_shared((f.chunk, f.chunk), kind)
    X, Yq, Yk = (T.alloc_shared((f.chunk, f.width), kind) for _ in (0, 1, 2))
    more, before = T.alloc_fragment((f.chunk, f.width), f.acc), T.alloc_fragment((f.chunk, f.width), f.acc)
    after, zero = T.alloc_fragment((f.chunk, f.width), f.acc) if n == 4 else before, T.cast(0, f.acc)
    for i, j in T.Parallel(f.chunk, f.chunk):
        here = (i ^ j) < 2 * n if n == 4 else ((i ^ j) < 2 * n) & ((i ^ j) >= n)
        Ms[i, j] = T.if_then_else(here & (j <= i), accs.M[i, j], zero)
        Ns[i, j] = T.if_then_else(here & (j < i), accs.N[i, j], zero)
    for i, d in T.Parallel(f.chunk, f.width):
        since = g[i, d] - g[i // (2 * n) * 2 * n + n - 1, d]
        before[i, d] = f.exp(-since if n == 4 else -T.abs(since))
        if n == 4:
            after[i, d] = f.exp(since)
    for i, d in T.Parallel(f.chunk, f.width):
        X[i, d], Yk[i, d] = K[i, d] * (beta[i] * before[i, d]), -K[i, d] * after[i, d]
        Yq[i, d] = Q[i, d] * (scale * after[i, d])
    T.gemm(Ms, X, more, clear_accum=True)
    for i, d in T.Parallel(f.chunk, f.width):
        accs.q[i, d] += more[i, d] * (scale * after[i, d])
        each[i, d] += more[i, d] * Yq[i, d]
    T.gemm(Ns, X, more, clear_accum=True)
    for i, d in T.Parallel(f.chunk, f.width):
        accs.read[i, d] -= more[i, d] * after[i, d]
        each[i, d] += more[i, d] * Yk[i, d]
    T.gemm(Ms, Yq, more, transpose_A=True, clear_accum=True)
    T.gemm(Ns, Yk, more, transpose_A=True)
    for i, d in T.Parallel(f.chunk, f.width):
        accs.z[i, d] += more[i, d] * before[i, d]
        each[i, d] -= more[i, d] * X[i, d]


@T.macro
def of_decays(f, each, edge, Decay, dDecay, at):
    """The gradient of log alpha, 0 where it counts as -20.  each: that of g; edge: what later chunks give to all steps."""
    seq, b, h, t, d0 = at
    if f.channels:
        steps, later = T.alloc_shared((f.chunk, f.width), f.acc), T.alloc_shared((f.width,), f.acc)
        T.copy(each, steps)
        T.copy(edge, later)
        T.cumsum(steps, dim=0, reverse=True)
        for i, d in T.Parallel(f.chunk, f.width):
            if t + i < seq:
                x = d0 + d
                found = steps[i, d] + later[d]
                dDecay[b, t + i, h, x] = T.if_then_else(Decay[b, t + i, h, x] >= LEAST, found, T.cast(0, f.acc))
    else:
        steps, later = T.alloc_shared((f.chunk,), f.acc), T.alloc_shared((1,), f.acc)
        total = T.alloc_fragment((1,), f.acc)
        T.reduce_sum(edge, total)
        T.copy(each, steps)
        T.copy(total, later)
        T.cumsum(steps, dim=0, reverse=True)
        for i in T.Parallel(f.chunk):
            if t + i < seq:
                dDecay[b, t + i, h] = T.if_then_else(Decay[b, t + i, h] >= LEAST, steps[i] + later[0], T.cast(0, f.acc))


@T.macro
def of_chunk(f, inputs, work, results, scale, at):
    """The gradients of q, k and log alpha of a chunk, for some channels, and what these give to that of beta."""
    seq, b, h, c, split = at
    (Q, K, Decay, Beta), (dQ, dK, dDecay, dBeta), t, last = inputs, results, c * f.chunk, f.chunk - 1
    d0 = split * f.width
    Qs, Ks = T.alloc_shared((f.chunk, f.width), f.dtype), T.alloc_shared((f.chunk, f.width), f.dtype)
    g, beta = T.alloc_shared((f.chunk, f.width) if f.channels else (f.chunk,), f.acc), T.alloc_shared((f.chunk,), f.acc)
    accs, both, row = Accumulators.of(f), T.alloc_fragment((f.chunk, f.width), f.acc), T.alloc_fragment((f.chunk,), f.acc)
    each = both if f.channels else T.alloc_fragment((f.chunk,), f.acc)
    sum_values(f, accs, work, b, h, c, d0)
    T.copy(Q[b, t:t + f.chunk, h // f.each, d0:d0 + f.width], Qs)
    T.copy(K[b, t:t + f.chunk, h // f.each, d0:d0 + f.width], Ks)
    T.copy(Beta[b, t:t + f.chunk, h], beta)
    decays(f, Decay, g, seq, b, h, t, d0)
    for i, d in T.Parallel(f.chunk, f.width):
        accs.q[i, d] *= scale * f.exp(g[i, d] if f.channels else g[i])
        accs.read[i, d] *= -f.exp(g[i, d] if f.channels else g[i])
        accs.z[i, d] *= f.exp(g[last, d] - g[i, d] if f.channels else g[last] - g[i])
        both[i, d] = Ks[i, d] * (beta[i] * accs.z[i, d])
    for d in T.Parallel(f.width):
        accs.edge[d] *= f.exp(g[last, d] if f.channels else g[last])
    T.reduce_sum(both, accs.edge, dim=0, clear=False)
    for i, d in T.Parallel(f.chunk, f.width):
        both[i, d] = Qs[i, d] * accs.q[i, d] + Ks[i, d] * accs.read[i, d] - both[i, d]
    if f.channels:
        _ = [add_channel_pairs(f, accs, each, Qs, Ks, g, beta, scale, n) for n in (32, 16, 8, 4) if 2 * n <= max(8, f.chunk)]
    else:
        T.reduce_sum(both, each, dim=1)
        add_pairs(f, accs, each, Qs, Ks, g, beta, scale)
    of_decays(f, each, accs.edge, Decay, dDecay, (seq, b, h, t, d0))
    for i, d in T.Parallel(f.chunk, f.width):
        both[i, d] = Ks[i, d] * accs.z[i, d]
    T.reduce_sum(both, row, dim=1)
    for i in T.Parallel(f.chunk):
        if t + i < seq:
            dBeta[split, b, t + i, h] = row[i]
    for i, d in T.Parallel(f.chunk, f.width):
        accs.z[i, d] = accs.z[i, d] * beta[i] + accs.read[i, d]
    T.copy(accs.q, dQ[b, t:t + f.chunk, h, d0:d0 + f.width])
    T.copy(accs.z, dK[b, t:t + f.chunk, h, d0:d0 + f.width])


def delta_backward(f: DeltaForm) -> Any:
    """(Q, K, V, Decay, Beta, Initial, scale, dO, dFinal, A, P, E, Qd, Kd, Ke, Before, After, W, dQ, dK, dV, dDecay, dBeta,
    dInitial).

    As for delta_chunks; Before, After (batch, heads, chunks, dim_v, dim_k), W and dV like V.  dQ, dK: (batch, seq, heads,
    dim_k), of the type of the accumulators where heads of q and k have several heads of v; dBeta: for each `width` channels."""
    batch, seq, chunks = T.dynamic("batch, seq, chunks")
    key, value, row = (batch, seq, f.heads // f.each, f.dim_k), (batch, seq, f.heads, f.dim_v), (batch, seq, f.heads)
    states, kept = (batch, f.heads, f.dim_k, f.dim_v), [T.Tensor(*x) for x in workspace(f, batch, chunks)]
    decay = T.Tensor((*row, f.dim_k) if f.channels else row, f.acc)
    wide = T.Tensor((batch, f.heads, chunks, f.dim_v, f.dim_k), f.dtype)
    of_key = T.Tensor((*row, f.dim_k), f.dtype if f.each == 1 else f.acc)

    splits = f.dim_k // f.width

    @T.prim_func
    def delta_rule_gradients(Q: T.Tensor(key, f.dtype), K: T.Tensor(key, f.dtype), V: T.Tensor(value, f.dtype), Decay: decay,
                             Beta: T.Tensor(row, f.acc), Initial: T.Tensor(states, f.acc),
                             scale: f.number, dO: T.Tensor(value, f.dtype),
                             dFinal: T.Tensor(states, f.acc), A: kept[0], P: kept[1], E: kept[2], Qd: kept[3], Kd: kept[4],
                             Ke: kept[5], Before: wide, After: wide, W: T.Tensor(value, f.dtype), dQ: of_key, dK: of_key,
                             dV: T.Tensor(value, f.dtype), dDecay: decay, dBeta: T.Tensor((splits, *row), f.acc),
                             dInitial: T.Tensor(states, f.acc)):
        with T.Kernel(chunks, f.heads, batch, threads=f.threads) as (c, h, b):
            prepare(f, (Q, K, Decay, Beta), (A, P, E, Qd, Kd, Ke), scale, seq, b, h, c)
        before, after = (Kd if f.channels else K, Ke, V, A, E, Initial), (Ke, A, P, E, dO, dFinal)
        if f.channels or not f.together:  # with channels a block has no room for the tiles of both
            with T.Kernel(f.dim_v // COLUMNS, f.heads, batch, threads=128) as (x, h, b):
                states_before(f, before, (Before, W), chunks, b, h, x * COLUMNS)
            with T.Kernel(f.dim_v // COLUMNS, f.heads, batch, threads=128) as (x, h, b):
                work = (*((Qd, Kd) if f.channels else (Q, K)), *after)
                gradients_after(f, work, (After, dV, dInitial), scale, chunks, b, h, x * COLUMNS)
        else:
            with T.Kernel(f.dim_v // COLUMNS, f.heads, 2 * batch, threads=128) as (x, h, z):
                if z < batch:
                    states_before(f, before, (Before, W), chunks, z, h, x * COLUMNS)
                else:
                    gradients_after(f, (Q, K, *after), (After, dV, dInitial), scale, chunks, z - batch, h, x * COLUMNS)
        with T.Kernel(chunks * splits, f.heads, batch, threads=512 if f.channels and f.width > 32 else 256) as (z, h, b):
            work, results = (dO, dV, W, Before, After), (dQ, dK, dDecay, dBeta)
            of_chunk(f, (Q, K, Decay, Beta), work, results, scale, (seq, b, h, z // splits, z % splits))

    return delta_rule_gradients
