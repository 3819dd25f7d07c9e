"""FlashAttention backward: gradients of Q, K and V without ever storing the weights.

With P = softmax(S), S = scale Q K^T and O = P V, the gradients are
    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q,   delta_i = sum_d O_id dO_id.
P is recomputed from Q, K and the logarithm of the row sums that the forward pass kept: P = exp(S - lse).

Two kernels run one after the other:
1. delta, zeros in dQ, and the gradient of the sinks: a sink is a score whose value is zero, so dsink_h = sum over rows of
   -exp(sink_h - lse_i) delta_i;
2. a block of keys a block of threads: it walks over the queries (of all heads of its group) that see those keys, keeps
   dK and dV in registers, and adds its part of dQ with atomics, since other blocks add to the same rows.

Any mask or change of the scores belongs into the line that recomputes P: here causal, a sliding window, and ALiBi's slopes.
What follows from P is the same for every mask and stands in flash_gradients.py.
"""

from functools import partial

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_forward import visible
from flash_gradients import from_weights, row_deltas

import tilelang.language as T

TILES = (64, 64), (32, 64), (32, 32)  # queries, keys: of these the first whose tiles the target has room for


def flash_backward(batch, heads, kv_heads, seq, dim, causal=True, window=0, bm=64, bn=64, dtype="float16", threads=128):
    """Tensors (batch, seq, heads, dim); lse (batch, heads, seq) float32; dQ comes in float32.

    sink (heads,): -inf where there is none; dsink must be zero before the call.  slopes (heads,): added to a score times
    the distance of key and query.  window: keys from query - window + 1 on are seen; 0: all (needs causal otherwise).
    """
    scale, group = dim**-0.5, heads // kv_heads
    q_shape, kv_shape, rows = (batch, seq, heads, dim), (batch, seq, kv_heads, dim), (batch, heads, seq)

    @T.prim_func
    def gradients(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
                  O: T.Tensor(q_shape, dtype), dO: T.Tensor(q_shape, dtype), LSE: T.Tensor(rows, "float32"),
                  sink: T.Tensor((heads,), "float32"), slopes: T.Tensor((heads,), "float32"),
                  dsink: T.Tensor((heads,), "float32"), delta: T.Tensor(rows, "float32"),
                  dQ: T.Tensor(q_shape, "float32"), dK: T.Tensor(kv_shape, dtype), dV: T.Tensor(kv_shape, dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, b):
            o = T.alloc_fragment((bm, dim), "float32")
            do = T.alloc_fragment((bm, dim), "float32")
            d = T.alloc_fragment((bm,), "float32")
            part = T.alloc_fragment((1,), "float32")
            T.copy(O[b, bx * bm:(bx + 1) * bm, h, :], o)
            T.copy(dO[b, bx * bm:(bx + 1) * bm, h, :], do)
            row_deltas(o, do, d)
            T.copy(d, delta[b, h, bx * bm:(bx + 1) * bm])
            for i in T.Parallel(bm):
                d[i] = T.if_then_else(bx * bm + i < seq, -T.exp(sink[h] - LSE[b, h, bx * bm + i]) * d[i], 0.0)
            T.reduce_sum(d, part)
            for i in T.Parallel(1):
                T.atomic_add(dsink[h], part[i])
            T.clear(do)
            T.copy(do, dQ[b, bx * bm:(bx + 1) * bm, h, :])

        with T.Kernel(T.ceildiv(seq, bn), kv_heads, batch, threads=threads) as (bx, hk, b):
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            Qs = T.alloc_shared((bm, dim), dtype)
            dOs = T.alloc_shared((bm, dim), dtype)
            lse = T.alloc_shared((bm,), "float32")
            dl = T.alloc_shared((bm,), "float32")
            P = T.alloc_fragment((bn, bm), "float32")
            dP = T.alloc_fragment((bn, bm), "float32")
            dk = T.alloc_fragment((bn, dim), "float32")
            dv = T.alloc_fragment((bn, dim), "float32")
            dq = T.alloc_fragment((bm, dim), "float32")
            T.copy(K[b, bx * bn:(bx + 1) * bn, hk, :], Ks)
            T.copy(V[b, bx * bn:(bx + 1) * bn, hk, :], Vs)
            T.clear(dk)
            T.clear(dv)
            first = (bx * bn) // bm if causal else 0
            last = T.min(T.ceildiv(seq, bm), ((bx + 1) * bn + window - 2) // bm + 1) if window else T.ceildiv(seq, bm)
            for g in T.serial(group):
                h = hk * group + g
                for q in T.serial(first, last):
                    T.copy(Q[b, q * bm:(q + 1) * bm, h, :], Qs)
                    T.copy(dO[b, q * bm:(q + 1) * bm, h, :], dOs)
                    T.copy(LSE[b, h, q * bm:(q + 1) * bm], lse)
                    T.copy(delta[b, h, q * bm:(q + 1) * bm], dl)
                    T.gemm(Ks, Qs, P, transpose_B=True, clear_accum=True)
                    T.gemm(Vs, dOs, dP, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(bn, bm):
                        key = bx * bn + i
                        query = q * bm + j
                        seen = (query < seq) and ((not causal) or key <= query) and ((not window) or key > query - window)
                        score = P[i, j] * scale + slopes[h] * T.cast(key - query, "float32")
                        P[i, j] = T.if_then_else(seen, T.exp2((score - lse[j]) * LOG2E), 0.0)
                    from_weights(P, dP, dl, Ks, Qs, dOs, dq, dk, dv)
                    for i, j in T.Parallel(bm, dim):
                        if q * bm + i < seq:
                            T.atomic_add(dQ[b, q * bm + i, h, j], dq[i, j] * scale)
            for i, j in T.Parallel(bn, dim):
                dk[i, j] *= scale
            T.copy(dk, dK[b, bx * bn:(bx + 1) * bn, hk, :])
            T.copy(dv, dV[b, bx * bn:(bx + 1) * bn, hk, :])

    return gradients


def reference(q, k, v, do, lse, keep, sink, slopes, eps, tiny):
    """(o, gradients, errors they may have) in float64 of (batch, heads, seq, dim) arrays, in the order dq, dk, dv, dsink.

    Errors, element by element.  P: rounded to 16 bits for dV, and relatively off by `score` (error of the score and of
    lse) everywhere.  dS: rounded once; delta is off by the rounding of O.  They are summed with the absolute values of
    what they are multiplied by; the results are rounded once.
    """
    group, scale, dim = q.shape[1] // k.shape[1], q.shape[-1]**-0.5, q.shape[-1]
    kk, vv = np.repeat(k, group, 1), np.repeat(v, group, 1)
    distance = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
    s = q @ kk.swapaxes(-1, -2) * scale + slopes[:, None, None] * distance
    p = np.exp(np.where(keep, s - lse[..., None], -np.inf))
    o = p @ vv
    delta = (o * do).sum(-1, keepdims=True)
    ds = p * (do @ vv.swapaxes(-1, -2) - delta)
    at_sink = np.exp(sink[:, None, None] - lse[..., None])

    def over_group(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    score = 2 * dim * 2.0**-24 * float(np.abs(q).max() * np.abs(k).max()) * dim**0.5 + 2.0**-18
    score += 2.0**-23 * q.shape[2] * float(np.abs(slopes).max())
    rounding = eps * (np.abs(o) * np.abs(do)).sum(-1, keepdims=True)  # of O, in delta
    dp = np.abs(do) @ np.abs(vv).swapaxes(-1, -2) * dim * 2.0**-24
    e_s = np.abs(ds) * (eps + score) + p * (rounding + dp) + tiny
    wants = [scale * ds @ kk, over_group(scale * ds.swapaxes(-1, -2) @ q), over_group(p.swapaxes(-1, -2) @ do),
             -(at_sink * delta).sum((0, 2, 3))]
    errors = [scale * e_s @ np.abs(kk), over_group(scale * e_s.swapaxes(-1, -2) @ np.abs(q)),
              over_group((p * (eps + score) + tiny).swapaxes(-1, -2) @ np.abs(do)),
              4 * eps * np.sqrt((at_sink**2 * ((o * do)**2).sum(-1, keepdims=True)).sum((0, 2, 3)))  # O's, independent
              + (score + 2.0**-20) * (at_sink * np.abs(delta)).sum((0, 2, 3)) + 2.0**-40]
    return o, wants, errors


def check(batch=1, heads=16, kv_heads=4, seq=2048, dim=128, causal=True, window=0, sinks=False, alibi=False, dtype="float16",
          seed=0, on=harness.HERE):
    """Every gradient within its own bound, element by element."""
    rng = np.random.default_rng(seed)
    q, do = (harness.random(rng, (batch, seq, heads, dim), dtype) for _ in range(2))
    k, v = (harness.random(rng, (batch, seq, kv_heads, dim), dtype) for _ in range(2))
    sink = harness.random(rng, (heads,), "float32", 2) if sinks else np.full(heads, -np.inf, np.float32)
    slopes = (alibi * 2.0**(-8 * (np.arange(heads) + 1) / heads)).astype(np.float32)
    qt, kt, vt, dot = (harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v, do))
    keep = visible(seq, seq, causal, window)
    bias = harness.wide(slopes)[None, :, None, None] * (np.arange(seq) - np.arange(seq)[:, None])
    lse = harness.attention(qt, kt, vt, keep, bias=bias, sink=sink if sinks else None)[1]
    eps = harness.EPS[dtype]
    o, wants, errors = reference(qt, kt, vt, dot, lse, keep, harness.wide(sink), harness.wide(slopes), eps,
                                 2.0**-25 if dtype == "float16" else 0.0)
    o16 = np.ascontiguousarray(o.transpose(0, 2, 1, 3)).astype(np.float32).astype(harness.NUMPY[dtype])
    dsink = np.zeros(heads, np.float32)
    program = partial(flash_backward, batch, heads, kv_heads, seq, dim, causal, window, dtype=dtype)
    program = program(*on.fitting(program, *TILES))
    _, *got = harness.run(program, [q, k, v, o16, do, lse.astype(np.float32), sink, slopes, dsink], [9, 10, 11, 12], on)
    got = [g.transpose(0, 2, 1, 3) for g in got] + [dsink]
    return [harness.compare(f"flash backward, {name}", g, w, e + eps * np.abs(w))
            for name, g, w, e in zip(("dq", "dk", "dv", "dsink"), got, wants, errors)]


if __name__ == "__main__":
    harness.main(check)
