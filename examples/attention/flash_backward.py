"""FlashAttention backward: gradients of Q, K and V without ever storing the weights.

With P = softmax(S), S = scale Q K^T and O = P V, the gradients are
    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale dS K,   dK = scale dS^T Q,   delta_i = sum_d O_id dO_id.
P is recomputed from Q, K and the logarithm of the row sums that the forward pass kept: P = exp(S - lse).

Two kernels run one after the other:
1. delta, and zeros in dQ;
2. a block of keys a block of threads: it walks over the queries (of all heads of its group) that see those keys, keeps
   dK and dV in registers, and adds its part of dQ with atomics, since other blocks add to the same rows.  Everything is
   computed transposed (keys as rows), so that P^T and dS^T come out of the tensor cores as the next products need them.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_forward import visible

import tilelang.language as T


def flash_backward(batch, heads, kv_heads, seq, dim, causal=True, bm=64, bn=64, dtype="float16", threads=128):
    """Tensors (batch, seq, heads, dim); lse (batch, heads, seq) float32; dQ comes in float32."""
    scale, group = dim**-0.5, heads // kv_heads
    q_shape, kv_shape, rows = (batch, seq, heads, dim), (batch, seq, kv_heads, dim), (batch, heads, seq)

    @T.prim_func
    def gradients(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
                  O: T.Tensor(q_shape, dtype), dO: T.Tensor(q_shape, dtype), LSE: T.Tensor(rows, "float32"),
                  delta: T.Tensor(rows, "float32"), dQ: T.Tensor(q_shape, "float32"), dK: T.Tensor(kv_shape, dtype),
                  dV: T.Tensor(kv_shape, dtype)):
        with T.Kernel(T.ceildiv(seq, bm), heads, batch, threads=threads) as (bx, h, b):
            o = T.alloc_fragment((bm, dim), "float32")
            do = T.alloc_fragment((bm, dim), "float32")
            d = T.alloc_fragment((bm,), "float32")
            T.copy(O[b, bx * bm:(bx + 1) * bm, h, :], o)
            T.copy(dO[b, bx * bm:(bx + 1) * bm, h, :], do)
            for i, j in T.Parallel(bm, dim):
                o[i, j] *= do[i, j]
            T.reduce_sum(o, d, dim=1)
            T.copy(d, delta[b, h, bx * bm:(bx + 1) * bm])
            T.clear(do)
            T.copy(do, dQ[b, bx * bm:(bx + 1) * bm, h, :])

        with T.Kernel(T.ceildiv(seq, bn), kv_heads, batch, threads=threads) as (bx, hk, b):
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            Qs = T.alloc_shared((bm, dim), dtype)
            dOs = T.alloc_shared((bm, dim), dtype)
            dSs = T.alloc_shared((bn, bm), dtype)
            lse = T.alloc_shared((bm,), "float32")
            dl = T.alloc_shared((bm,), "float32")
            P = T.alloc_fragment((bn, bm), "float32")
            dS = T.alloc_fragment((bn, bm), "float32")
            Ph = T.alloc_fragment((bn, bm), dtype)
            dSh = T.alloc_fragment((bn, bm), dtype)
            dk = T.alloc_fragment((bn, dim), "float32")
            dv = T.alloc_fragment((bn, dim), "float32")
            dq = T.alloc_fragment((bm, dim), "float32")
            T.copy(K[b, bx * bn:(bx + 1) * bn, hk, :], Ks)
            T.copy(V[b, bx * bn:(bx + 1) * bn, hk, :], Vs)
            T.clear(dk)
            T.clear(dv)
            first = (bx * bn) // bm if causal else 0
            for g in T.serial(group):
                h = hk * group + g
                for q in T.serial(first, T.ceildiv(seq, bm)):
                    T.copy(Q[b, q * bm:(q + 1) * bm, h, :], Qs)
                    T.copy(dO[b, q * bm:(q + 1) * bm, h, :], dOs)
                    T.copy(LSE[b, h, q * bm:(q + 1) * bm], lse)
                    T.copy(delta[b, h, q * bm:(q + 1) * bm], dl)
                    T.gemm(Ks, Qs, P, transpose_B=True, clear_accum=True)
                    T.gemm(Vs, dOs, dS, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(bn, bm):
                        seen = (q * bm + j < seq) and ((not causal) or bx * bn + i <= q * bm + j)
                        P[i, j] = T.if_then_else(seen, T.exp2((P[i, j] * scale - lse[j]) * LOG2E), 0.0)
                    for i, j in T.Parallel(bn, bm):
                        dS[i, j] = P[i, j] * (dS[i, j] - dl[j])
                    T.copy(P, Ph)
                    T.gemm(Ph, dOs, dv)
                    T.copy(dS, dSh)
                    T.gemm(dSh, Qs, dk)
                    T.copy(dSh, dSs)
                    T.gemm(dSs, Ks, dq, transpose_A=True, clear_accum=True)
                    for i, j in T.Parallel(bm, dim):
                        if q * bm + i < seq:
                            T.atomic_add(dQ[b, q * bm + i, h, j], dq[i, j] * scale)
            for i, j in T.Parallel(bn, dim):
                dk[i, j] *= scale
            T.copy(dk, dK[b, bx * bn:(bx + 1) * bn, hk, :])
            T.copy(dv, dV[b, bx * bn:(bx + 1) * bn, hk, :])

    return gradients


def reference(q, k, v, do, keep):
    """Gradients in float64 of (batch, heads, seq, dim) arrays, each with the error that the kernel may make.

    Errors, element by element.  P: rounded to 16 bits for dV, and relatively off by `score` (error of the score and of
    lse) everywhere.  dS: rounded once; delta is off by the rounding of O.  They are summed with the absolute values of
    what they are multiplied by; the results are rounded once.
    """
    group, scale = q.shape[1] // k.shape[1], q.shape[-1]**-0.5
    kk, vv = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.where(keep, q @ kk.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = p @ vv
    ds = p * (do @ vv.swapaxes(-1, -2) - (o * do).sum(-1, keepdims=True))

    def over_group(x):
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    def error(eps, tiny):
        score = 2 * q.shape[-1] * 2.0**-24 * np.abs(q).max() * np.abs(k).max() * q.shape[-1]**0.5 + 2.0**-18
        e_p = p * (eps + score) + tiny
        dp = np.abs(do) @ np.abs(vv).swapaxes(-1, -2) * q.shape[-1] * 2.0**-24
        e_s = np.abs(ds) * (eps + score) + p * (eps * (np.abs(o) * np.abs(do)).sum(-1, keepdims=True) + dp) + tiny
        return [scale * e_s @ np.abs(kk), over_group(scale * e_s.swapaxes(-1, -2) @ np.abs(q)),
                over_group(e_p.swapaxes(-1, -2) @ np.abs(do))]

    wants = [scale * ds @ kk, over_group(scale * ds.swapaxes(-1, -2) @ q), over_group(p.swapaxes(-1, -2) @ do)]
    return o, wants, error


def check(batch=1, heads=16, kv_heads=4, seq=2048, dim=128, causal=True, dtype="float16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    q, do = (harness.random(rng, (batch, seq, heads, dim), dtype) for _ in range(2))
    k, v = (harness.random(rng, (batch, seq, kv_heads, dim), dtype) for _ in range(2))
    qt, kt, vt, dot = (harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v, do))
    keep = visible(seq, seq, causal, 0)
    o, wants, error = reference(qt, kt, vt, dot, keep)
    lse = harness.attention(qt, kt, vt, keep)[1].astype(np.float32)
    o16 = np.ascontiguousarray(o.transpose(0, 2, 1, 3)).astype(np.float32).astype(harness.NUMPY[dtype])
    got = harness.run(flash_backward(batch, heads, kv_heads, seq, dim, causal, dtype=dtype), [q, k, v, o16, do, lse],
                      [6, 7, 8, 9], on)
    eps = harness.EPS[dtype]
    return [harness.compare(f"flash backward, {name}", g.transpose(0, 2, 1, 3), w, e + eps * np.abs(w))
            for name, g, w, e in zip(("dq", "dk", "dv"), got[1:], wants, error(eps, 2.0**-25 if dtype == "float16" else 0.0))]


if __name__ == "__main__":
    harness.main(check)
