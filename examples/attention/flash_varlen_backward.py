"""Gradients of attention over a packed batch: flash_backward.py for sequences that lie one after another.

As in flash_varlen.py `cu_q` and `cu_k` say where sequences start, queries are right-aligned to their keys, and the number of
tokens is known at the call only.  A block has one tile of keys of one sequence; rows of the tiles that reach into the next
sequence are masked in P, so they add nothing, and its own surplus rows are not stored.
"""

from functools import partial

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from flash_backward import TILES, reference
from flash_gradients import from_weights, row_deltas

import tilelang.language as T


def flash_varlen_backward(batch, heads, kv_heads, longest, dim, causal=True, bm=64, bn=64, dtype="float16", threads=128):
    """Q, O, dO (tokens_q, heads, dim), K, V (tokens_k, kv_heads, dim); LSE, delta (heads, tokens_q) float32; dQ float32.

    longest: at least the keys of the longest sequence.  delta is scratch.
    """
    scale, group = dim**-0.5, heads // kv_heads
    tokens_q, tokens_k = T.dynamic("tokens_q, tokens_k")
    q_shape, kv_shape, rows = (tokens_q, heads, dim), (tokens_k, kv_heads, dim), (heads, tokens_q)

    @T.prim_func
    def gradients(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
                  O: T.Tensor(q_shape, dtype), dO: T.Tensor(q_shape, dtype), LSE: T.Tensor(rows, "float32"),
                  cu_q: T.Tensor((batch + 1,), "int32"), cu_k: T.Tensor((batch + 1,), "int32"),
                  delta: T.Tensor(rows, "float32"), dQ: T.Tensor(q_shape, "float32"), dK: T.Tensor(kv_shape, dtype),
                  dV: T.Tensor(kv_shape, dtype)):
        with T.Kernel(T.ceildiv(tokens_q, bm), heads, threads=threads) as (bx, h):
            o = T.alloc_fragment((bm, dim), "float32")
            do = T.alloc_fragment((bm, dim), "float32")
            d = T.alloc_fragment((bm,), "float32")
            T.copy(O[bx * bm:(bx + 1) * bm, h, :], o)
            T.copy(dO[bx * bm:(bx + 1) * bm, h, :], do)
            row_deltas(o, do, d)
            T.copy(d, delta[h, bx * bm:(bx + 1) * bm])
            T.clear(do)
            T.copy(do, dQ[bx * bm:(bx + 1) * bm, h, :])

        with T.Kernel(T.ceildiv(longest, bn), kv_heads, batch, threads=threads) as (bx, hk, b):
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
            q0 = cu_q[b]
            k0 = cu_k[b]
            len_q = cu_q[b + 1] - q0
            len_k = cu_k[b + 1] - k0
            shift = len_k - len_q
            if bx * bn < len_k:
                T.copy(K[k0 + bx * bn:k0 + (bx + 1) * bn, hk, :], Ks)
                T.copy(V[k0 + bx * bn:k0 + (bx + 1) * bn, hk, :], Vs)
                T.clear(dk)
                T.clear(dv)
                first = T.max(0, bx * bn - shift) // bm if causal else 0
                for g in T.serial(group):
                    h = hk * group + g
                    for q in T.serial(first, T.ceildiv(len_q, bm)):
                        row = q0 + q * bm
                        T.copy(Q[row:row + bm, h, :], Qs)
                        T.copy(dO[row:row + bm, h, :], dOs)
                        T.copy(LSE[h, row:row + bm], lse)
                        T.copy(delta[h, row:row + bm], dl)
                        T.gemm(Ks, Qs, P, transpose_B=True, clear_accum=True)
                        T.gemm(Vs, dOs, dP, transpose_B=True, clear_accum=True)
                        for i, j in T.Parallel(bn, bm):
                            key = bx * bn + i
                            query = q * bm + j
                            seen = (query < len_q) and (key < len_k) and ((not causal) or key <= query + shift)
                            P[i, j] = T.if_then_else(seen, T.exp2((P[i, j] * scale - lse[j]) * LOG2E), 0.0)
                        from_weights(P, dP, dl, Ks, Qs, dOs, dq, dk, dv)
                        for i, j in T.Parallel(bm, dim):
                            if q * bm + i < len_q:
                                T.atomic_add(dQ[row + i, h, j], dq[i, j] * scale)
                for i, j in T.Parallel(bn, dim):
                    if bx * bn + i < len_k:
                        dK[k0 + bx * bn + i, hk, j] = dk[i, j] * scale
                        dV[k0 + bx * bn + i, hk, j] = dv[i, j]

    return gradients


def check(lengths="1000,17,2048,1,400", prefix=300, heads=16, kv_heads=4, dim=128, causal=True, dtype="float16", seed=0,
          on=harness.HERE):
    """`lengths`: queries of each sequence; its keys are `prefix` more for every second one."""
    rng = np.random.default_rng(seed)
    len_q = [int(n) for n in lengths.split(",")]
    len_k = [n + prefix * (i % 2) for i, n in enumerate(len_q)]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (len_q, len_k))
    q, do = (harness.random(rng, (cu_q[-1], heads, dim), dtype) for _ in range(2))
    k, v = (harness.random(rng, (cu_k[-1], kv_heads, dim), dtype) for _ in range(2))
    eps, tiny = harness.EPS[dtype], 2.0**-25 if dtype == "float16" else 0.0
    no_sink, no_slopes = np.full(heads, -np.inf), np.zeros(heads)
    o16, lse, wants, errors = np.zeros_like(q), np.zeros((heads, cu_q[-1]), np.float32), [[], [], []], [[], [], []]
    for b, (m, n) in enumerate(zip(len_q, len_k)):
        of_q, of_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = [harness.wide(x[part]).transpose(1, 0, 2)[None] for x, part in ((q, of_q), (k, of_k), (v, of_k), (do, of_q))]
        keep = np.arange(n) <= np.arange(m)[:, None] + n - m if causal else np.ones((m, n), bool)
        logs = harness.attention(*one[:3], keep=keep)[1]
        o, want, error = reference(*one, lse=logs, keep=keep, sink=no_sink, slopes=no_slopes, eps=eps, tiny=tiny)
        lse[:, of_q] = np.asarray(logs)[0]
        o16[of_q] = np.asarray(o)[0].transpose(1, 0, 2).astype(np.float32).astype(o16.dtype)
        for i in range(3):
            wants[i].append(want[i][0].transpose(1, 0, 2))
            errors[i].append(error[i][0].transpose(1, 0, 2))
    program = partial(flash_varlen_backward, len(len_q), heads, kv_heads, max(len_k), dim, causal, dtype=dtype)
    program = program(*on.fitting(program, *TILES))
    _, *got = harness.run(program, [q, k, v, o16, do, lse, cu_q, cu_k], [8, 9, 10, 11], on)
    results = []
    for name, g, w, e in zip(("dq", "dk", "dv"), got, map(np.concatenate, wants), map(np.concatenate, errors)):
        results.append(harness.compare(f"flash varlen backward, {name}", g, w, e + eps * np.abs(w)))
    return results


if __name__ == "__main__":
    harness.main(check)
