"""Mamba-2 forward in chunks: chunk_state and chunk_scan, with the two small kernels between them.

The recurrence, for every head (P channels, N state entries):
    state_t = exp(A dt_t) state_(t-1) + dt_t x_t B_t^T,      y_t = state_t C_t + D x_t.
With a_t the running sum of A dt inside a chunk, four kernels make it parallel over chunks:
1. cumsum:       a_t within each chunk;
2. chunk_state:  what a chunk adds to the state: sum_s exp(a_last - a_s) dt_s x_s B_s^T        (a product over time);
3. passing:      the state before each chunk, one short loop over the chunks;
4. chunk_scan:   y = exp(a_t) C_t . state_before + sum_(s <= t) (C_t . B_s) exp(a_t - a_s) dt_s x_s + D x_t.
B and C are shared by the heads of a group.  The lengths must be multiples of the chunk.  The gradients
(mamba2_backward.py) start from a and the states before each chunk, so both are results.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E

import tilelang.language as T


def mamba2(batch, seq, heads, groups, P, N, chunk=64, dtype="float16", threads=128):
    chunks, per = seq // chunk, heads // groups
    bc = (batch, seq, groups, N)

    @T.prim_func
    def forward(x: T.Tensor((batch, seq, heads, P), dtype), dt: T.Tensor((batch, heads, seq), "float32"),
                A: T.Tensor((heads,), "float32"), B: T.Tensor(bc, dtype), C: T.Tensor(bc, dtype),
                D: T.Tensor((heads,), "float32"),
                a: T.Tensor((batch, heads, seq), "float32"), states: T.Tensor((batch, chunks, heads, P, N), "float32"),
                before: T.Tensor((batch, chunks, heads, P, N), dtype), y: T.Tensor((batch, seq, heads, P), dtype)):
        with T.Kernel(chunks, heads, batch, threads=threads) as (c, h, b):
            s = T.alloc_shared((chunk,), "float32")
            for i in T.Parallel(chunk):
                s[i] = A[h] * dt[b, h, c * chunk + i]
            T.cumsum(s, dim=0)
            T.copy(s, a[b, h, c * chunk:(c + 1) * chunk])

        with T.Kernel(chunks, heads, batch, threads=threads) as (c, h, b):
            xs = T.alloc_shared((chunk, P), dtype)
            xd = T.alloc_shared((chunk, P), dtype)
            Bs = T.alloc_shared((chunk, N), dtype)
            part = T.alloc_fragment((P, N), "float32")
            T.copy(x[b, c * chunk:(c + 1) * chunk, h, :], xs)
            T.copy(B[b, c * chunk:(c + 1) * chunk, h // per, :], Bs)
            for i, p in T.Parallel(chunk, P):
                decay = T.exp2((a[b, h, c * chunk + chunk - 1] - a[b, h, c * chunk + i]) * LOG2E)
                xd[i, p] = xs[i, p] * decay * dt[b, h, c * chunk + i]
            T.gemm(xd, Bs, part, transpose_A=True, clear_accum=True)
            T.copy(part, states[b, c, h, :, :])

        with T.Kernel(heads, batch, threads=threads) as (h, b):
            state = T.alloc_fragment((P, N), "float32")
            T.clear(state)
            for c in T.serial(chunks):
                T.copy(state, before[b, c, h, :, :])
                for p, n in T.Parallel(P, N):
                    state[p, n] = state[p, n] * T.exp2(a[b, h, c * chunk + chunk - 1] * LOG2E) + states[b, c, h, p, n]

        with T.Kernel(chunks, heads, batch, threads=threads) as (c, h, b):
            xs = T.alloc_shared((chunk, P), dtype)
            Bs = T.alloc_shared((chunk, N), dtype)
            Cs = T.alloc_shared((chunk, N), dtype)
            Ss = T.alloc_shared((P, N), dtype)
            CB = T.alloc_fragment((chunk, chunk), "float32")
            CBh = T.alloc_fragment((chunk, chunk), dtype)
            out = T.alloc_fragment((chunk, P), "float32")
            at = T.alloc_shared((chunk,), "float32")
            ds = T.alloc_shared((chunk,), "float32")
            T.copy(x[b, c * chunk:(c + 1) * chunk, h, :], xs)
            T.copy(B[b, c * chunk:(c + 1) * chunk, h // per, :], Bs)
            T.copy(C[b, c * chunk:(c + 1) * chunk, h // per, :], Cs)
            T.copy(before[b, c, h, :, :], Ss)
            T.copy(a[b, h, c * chunk:(c + 1) * chunk], at)
            T.copy(dt[b, h, c * chunk:(c + 1) * chunk], ds)
            T.gemm(Cs, Ss, out, transpose_B=True, clear_accum=True)
            for i, p in T.Parallel(chunk, P):
                out[i, p] *= T.exp2(at[i] * LOG2E)
            T.gemm(Cs, Bs, CB, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(chunk, chunk):
                CB[i, j] = T.if_then_else(j <= i, CB[i, j] * T.exp2((at[i] - at[j]) * LOG2E) * ds[j], 0.0)
            T.copy(CB, CBh)
            T.gemm(CBh, xs, out)
            for i, p in T.Parallel(chunk, P):
                out[i, p] += D[h] * xs[i, p]
            T.copy(out, y[b, c * chunk:(c + 1) * chunk, h, :])

    return forward


def inputs(batch, seq, heads, groups, P, N, dtype, seed):
    """x, dt, A, B, C, D, and the gradient of y."""
    rng = np.random.default_rng(seed)
    x, dy = (harness.random(rng, (batch, seq, heads, P), dtype) for _ in range(2))
    dt = np.abs(harness.random(rng, (batch, heads, seq), "float32", 0.3))
    A = -np.exp(harness.random(rng, (heads,), "float32"))
    B, C = (harness.random(rng, (batch, seq, groups, N), dtype, N**-0.25) for _ in range(2))
    return x, dt, A, B, C, harness.random(rng, (heads,), "float32"), dy


def reference(x, dt, A, B, C, D, dy, rough=lambda x: x):
    """y and the gradients of all six inputs in float64: a product over all pairs of steps, some heads at a time.

    y_t = sum over s <= t of (C_t . B_s) decay_ts dt_s x_s + D x_t.  `rough` rounds what the kernels round: weights of pairs,
    and for states, which do not occur here, the operands that make them up.
    """
    heads, per, seq = x.shape[2], x.shape[2] // B.shape[2], x.shape[1]
    most = harness.MOST_SCORES // (x.shape[0] * seq * seq)
    each = max(n for n in range(1, per + 1) if per % n == 0 and n <= max(most, 1))
    found, dBs, dCs = [], [[] for _ in range(B.shape[2])], [[] for _ in range(B.shape[2])]
    for h in range(0, heads, each):
        x_, dy_ = (z[:, :, h:h + each].transpose(0, 2, 1, 3) for z in (x, dy))
        xs, dys, Bs, Cs = (rough(z) for z in (x_, dy_, *(z[:, :, h // per, None].transpose(0, 2, 1, 3) for z in (B, C))))
        ds, As, Ds = dt[:, h:h + each], A[h:h + each, None], D[h:h + each, None, None]
        a = np.cumsum(As * ds, -1)
        decay = np.tril(np.exp(np.minimum(a[..., None] - a[..., None, :], 0)))
        CB = Cs @ Bs.swapaxes(-1, -2)
        weights = rough(CB * decay * ds[..., None, :])
        back = rough(dys @ xs.swapaxes(-1, -2) * decay)  # the gradient of CB, but for dt
        y = weights @ xs + Ds * x_
        dx = weights.swapaxes(-1, -2) @ dys + Ds * dy_
        dBs[h // per].append(((back * ds[..., None, :]).swapaxes(-1, -2) @ Cs).sum(1))
        dCs[h // per].append(((back * ds[..., None, :]) @ Bs).sum(1))
        pairs = back * CB
        direct = pairs.sum(-2)  # of dt_s where it stands beside x_s
        steps = (pairs * ds[..., None, :]).sum(-1) - ds * direct  # the gradient of a
        dlog = np.flip(np.cumsum(np.flip(steps, -1), -1), -1)  # of A dt
        found.append([y.transpose(0, 2, 1, 3), dx.transpose(0, 2, 1, 3), As * dlog + direct, (ds * dlog).sum((0, 2)),
                      (x_ * dy_).sum((0, 2, 3))])
    y, dx, ddt, dA, dD = (np.concatenate(parts, axis) for parts, axis in zip(zip(*found), (2, 2, 1, 0, 0)))
    dB, dC = (np.stack([sum(parts[1:], parts[0]) for parts in of], axis=2) for of in (dBs, dCs))
    return y, dx, ddt, dA, dB, dC, dD


def check(batch=1, seq=2048, heads=32, groups=1, P=64, N=128, chunk=64, dtype="float16", seed=0, on=harness.HERE):
    *operands, dy = inputs(batch, seq, heads, groups, P, N, dtype, seed)
    *_, got = harness.run(mamba2(batch, seq, heads, groups, P, N, chunk, dtype), operands, [6, 7, 8, 9], on)
    exact = [harness.wide(z) for z in (*operands, dy)]
    want, rough = reference(*exact)[0], reference(*exact, rough=harness.rounding(dtype, 1.17))[0]
    return harness.compare_rough(["mamba2"], [got], [want], [[rough]], [dtype])


if __name__ == "__main__":
    harness.main(check)
