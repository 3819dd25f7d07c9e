"""Retention: linear attention with a decay, forward and backward, computed in chunks.

    o_t = sum over s <= t of gamma^(t - s) (q_t . k_s) v_s

is a recurrence over a state of dim x dim, state_t = gamma state_(t-1) + k_t v_t^T.  Step by step it would use no tensor
core.  In chunks of C steps it is three products: what the chunk sees of itself (masked scores times values), what it sees
of the past (queries times the state), and the step of the state by a whole chunk.  The state stays in registers for the
whole sequence, in float32; each head and each part of the value columns is one block.

The gradients are retentions themselves, two of them walking from the end to the start:
    dq_t = sum over s <= t of gamma^(t - s) (do_t . v_s) k_s       retention of (do, v, k)
    dk_s = sum over t >= s of gamma^(t - s) (v_s . do_t) q_t       reversed, of (v, do, q)
    dv_s = sum over t >= s of gamma^(t - s) (k_s . q_t) do_t       reversed, of (k, q, do)
"""

import attention_harness as harness
import numpy as np

import tilelang.language as T


def retention(batch, heads, seq, dim_k, dim_v, reverse=False, chunk=64, bv=64, stages=2, dtype="float16", threads=128):
    """(batch, seq, heads, dim) tensors; log_gamma (heads,) holds log2 of each head's decay.  reverse: o_t sums s >= t."""
    chunks = -(-seq // chunk)

    def age(i):
        """Steps from the first that the walk meets in a chunk to step i."""
        return chunk - 1 - i if reverse else i

    @T.prim_func
    def retain(Q: T.Tensor((batch, seq, heads, dim_k), dtype), K: T.Tensor((batch, seq, heads, dim_k), dtype),
               V: T.Tensor((batch, seq, heads, dim_v), dtype), log_gamma: T.Tensor((heads,), "float32"),
               O: T.Tensor((batch, seq, heads, dim_v), dtype)):
        with T.Kernel(T.ceildiv(dim_v, bv), heads, batch, threads=threads) as (bx, h, b):
            Qs = T.alloc_shared((chunk, dim_k), dtype)
            Ks = T.alloc_shared((chunk, dim_k), dtype)
            Vs = T.alloc_shared((chunk, bv), dtype)
            Ss = T.alloc_shared((dim_k, bv), dtype)
            state = T.alloc_fragment((dim_k, bv), "float32")
            S = T.alloc_fragment((chunk, chunk), "float32")
            Sh = T.alloc_fragment((chunk, chunk), dtype)
            Kd = T.alloc_shared((chunk, dim_k), dtype)
            o = T.alloc_fragment((chunk, bv), "float32")
            g = log_gamma[h]
            T.clear(state)
            for step in T.Pipelined(chunks, num_stages=stages):
                c = chunks - 1 - step if reverse else step
                T.copy(Q[b, c * chunk:(c + 1) * chunk, h, :], Qs)
                T.copy(K[b, c * chunk:(c + 1) * chunk, h, :], Ks)
                T.copy(V[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv], Vs)
                T.copy(state, Ss)
                T.gemm(Qs, Ss, o, clear_accum=True)
                for i, j in T.Parallel(chunk, bv):
                    o[i, j] *= T.exp2(g * T.cast(age(i) + 1, "float32"))
                T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(chunk, chunk):
                    S[i, j] = T.if_then_else(age(j) <= age(i), S[i, j] * T.exp2(g * T.cast(age(i) - age(j), "float32")), 0.0)
                T.copy(S, Sh)
                T.gemm(Sh, Vs, o)
                T.copy(o, O[b, c * chunk:(c + 1) * chunk, h, bx * bv:(bx + 1) * bv])
                for i, j in T.Parallel(chunk, dim_k):
                    Kd[i, j] = Ks[i, j] * T.exp2(g * T.cast(chunk - 1 - age(i), "float32"))
                for i, j in T.Parallel(dim_k, bv):
                    state[i, j] *= T.exp2(g * chunk)
                T.gemm(Kd, Vs, state, transpose_A=True)

    return retain


def reference(q, k, v, gamma, eps):
    """The recurrence in float64, and the error that a result may have.

    Decayed keys, the state where q reads it, and scores are rounded to 16 bits.  Roundings are independent: they add up
    like the root of their squares, and a result is within four standard deviations; it is rounded once more.
    """
    batch, seq, heads, _ = q.shape
    want, spread = np.zeros_like(v), np.zeros_like(v)
    state = np.zeros((batch, heads, q.shape[-1], v.shape[-1]))
    squares = np.zeros_like(state)  # the same recurrence of squares: what roundings of decayed keys add up to
    for t in range(seq):
        step = k[:, t, :, :, None] * v[:, t, :, None, :]
        state, squares = gamma * state + step, gamma**2 * squares + step**2
        want[:, t] = (q[:, t, :, None, :] @ state)[:, :, 0]
        spread[:, t] = (q[:, t, :, None, :]**2 @ (squares + state**2))[:, :, 0]
    apart = np.arange(seq)[:, None] - np.arange(seq)
    scores = np.einsum("bthk,bshk->bhts", q, k) * np.where(apart >= 0, gamma**np.maximum(apart, 0), 0)
    spread += (scores**2 @ v.transpose(0, 2, 1, 3)**2).transpose(0, 2, 1, 3)
    return want, eps * (4 * np.sqrt(spread) + np.abs(want)) + 2.0**-24


def inputs(batch, heads, seq, dim_k, dim_v, dtype, seed):
    """q, k, v, do of `dtype`; log2 of the decays; the decays."""
    rng = np.random.default_rng(seed)
    q, k = (harness.random(rng, (batch, seq, heads, dim_k), dtype, dim_k**-0.25) for _ in range(2))
    v, do = (harness.random(rng, (batch, seq, heads, dim_v), dtype) for _ in range(2))
    log_gamma = np.log2(1 - 2.0**(-4 - np.arange(heads))).astype(np.float32)
    return q, k, v, do, log_gamma, 2.0**harness.wide(log_gamma)[None, :, None, None]


def check(batch=2, heads=8, seq=2048, dim_k=128, dim_v=256, chunk=64, dtype="bfloat16", seed=0, on=harness.HERE):
    q, k, v, _, log_gamma, gamma = inputs(batch, heads, seq, dim_k, dim_v, dtype, seed)
    program = retention(batch, heads, seq, dim_k, dim_v, chunk=chunk, dtype=dtype)
    got, = harness.run(program, [q, k, v, log_gamma], [4], on)
    want, bound = reference(*(harness.wide(x) for x in (q, k, v)), gamma=gamma, eps=harness.EPS[dtype])
    return harness.compare("retention", got, want, bound)


def check_backward(batch=4, heads=8, seq=1024, dim_k=128, dim_v=128, chunk=64, dtype="bfloat16", seed=0, on=harness.HERE):
    q, k, v, do, log_gamma, gamma = inputs(batch, heads, seq, dim_k, dim_v, dtype, seed)
    results = []
    for name, operands, reverse in (("dq", (do, v, k), False), ("dk", (v, do, q), True), ("dv", (k, q, do), True)):
        a, b, c = operands
        program = retention(batch, heads, seq, a.shape[-1], c.shape[-1], reverse, chunk, dtype=dtype)
        got, = harness.run(program, [a, b, c, log_gamma], [4], on)
        turned = [np.flip(harness.wide(x), 1) if reverse else harness.wide(x) for x in operands]
        want, bound = (np.flip(x, 1) if reverse else x for x in reference(*turned, gamma=gamma, eps=harness.EPS[dtype]))
        results.append(harness.compare(f"retention backward, {name}", got, want, bound))
    return results


if __name__ == "__main__":
    harness.main(check, check_backward)
