"""Mamba-2 forward in chunks: chunk_state and chunk_scan, with the two small kernels between them.

The recurrence, for every head (P channels, N state entries):
    state_t = exp(A dt_t) state_(t-1) + dt_t x_t B_t^T,      y_t = state_t C_t + D x_t.
With a_t the running sum of A dt inside a chunk, four kernels make it parallel over chunks:
1. cumsum:       a_t within each chunk;
2. chunk_state:  what a chunk adds to the state: sum_s exp(a_last - a_s) dt_s x_s B_s^T        (a product over time);
3. passing:      the state before each chunk, one short loop over the chunks;
4. chunk_scan:   y = exp(a_t) C_t . state_before + sum_(s <= t) (C_t . B_s) exp(a_t - a_s) dt_s x_s + D x_t.
B and C are shared by the heads of a group.  The lengths must be multiples of the chunk.
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


def check(batch=1, seq=2048, heads=32, groups=1, P=64, N=128, chunk=64, dtype="float16", seed=0, on=harness.HERE):
    rng = np.random.default_rng(seed)
    x = harness.random(rng, (batch, seq, heads, P), dtype)
    dt = np.abs(harness.random(rng, (batch, heads, seq), "float32", 0.3))
    A = -np.exp(harness.random(rng, (heads,), "float32"))
    B, C = (harness.random(rng, (batch, seq, groups, N), dtype, N**-0.25) for _ in range(2))
    D = harness.random(rng, (heads,), "float32")
    program = mamba2(batch, seq, heads, groups, P, N, chunk, dtype)
    *_, got = harness.run(program, [x, dt, A, B, C, D], [6, 7, 8, 9], on)

    xw, dw, Aw, Dw = (harness.wide(z) for z in (x, dt, A, D))
    Bw, Cw = (np.repeat(harness.wide(z), heads // groups, 2) for z in (B, C))
    want, size, spread = (np.zeros_like(xw) for _ in range(3))
    state = np.zeros((batch, heads, P, N))
    bulk = np.zeros_like(state)  # of absolute values: what errors of float32 sums are relative to
    squares = np.zeros_like(state)  # what roundings of decayed inputs add up to
    for t in range(seq):
        decay = np.exp(Aw * dw[:, :, t])[..., None, None]
        step = dw[:, :, t, None, None] * xw[:, t, :, :, None] * Bw[:, t, :, None, :]
        state, bulk, squares = decay * state + step, decay * bulk + np.abs(step), decay**2 * squares + step**2
        want[:, t] = np.einsum("bhpn,bhn->bhp", state, Cw[:, t]) + Dw[:, None] * xw[:, t]
        size[:, t] = np.einsum("bhpn,bhn->bhp", bulk, np.abs(Cw[:, t])) + np.abs(Dw[:, None] * xw[:, t])
        spread[:, t] = np.einsum("bhpn,bhn->bhp", squares + state**2, Cw[:, t]**2)
    sums = np.cumsum(Aw[:, None] * dw, -1)
    decays = np.exp(np.minimum(sums[..., None] - sums[..., None, :], 0))
    scores = np.einsum("bthn,bshn->bhts", Cw, Bw) * decays * dw[..., None, :]
    spread += np.einsum("bhts,bshp->bthp", np.tril(scores)**2, xw**2)
    # Rounded to `dtype` are the decayed inputs, the state where C reads it and the scores: independent, so they add up like
    # the root of their squares, and a result is within four standard deviations; it is rounded once more.  A running sum
    # of float32 is off by chunk roundings of its size, which exp turns into a relative error; the sums run over N and seq.
    eps, f32 = harness.EPS[dtype], harness.EPS["float32"]
    reach = float(np.abs(Aw[None, :, None] * dw).reshape(batch, heads, -1, chunk).sum(-1).max())
    bound = 4 * eps * np.sqrt(spread) + (2 * chunk * reach + N + 16) * f32 * size + eps * np.abs(want) + 2.0**-24
    if dtype == "float16":  # below the normal range roundings are absolute
        bound += 2 * seq**0.5 * 2.0**-25 * float(np.abs(xw).max() * max(np.abs(Cw).sum(-1).max(), 1.0))
    return harness.compare("mamba2", got, want, bound)


if __name__ == "__main__":
    harness.main(check)
