"""Gradients of Mamba-2 in chunks: the kernels of mamba2.py, walked back.

The gradient of the state after step t is itself a decaying state, fed with dy_t C_t^T from the end.  Three kernels:
1. chunk_state:  what the results of a chunk give to the gradient of the state before it: sum_t exp(a_t) dy_t C_t^T;
2. passing:      the gradient G of the state after each chunk, one loop over the chunks from the end;
3. chunk_scan:   every gradient of a chunk.  With E_ts = exp(a_t - a_s) for s <= t, CB = C B^T and dCB = (dy x^T) E dt_s,
     dx = (CB E dt)^T dy + dt exp(a_last - a) (B G^T) + D dy,
     dC = dCB B + exp(a) (dy state_before),         dB = dCB^T C + dt exp(a_last - a) (x G),
   the sums over the heads of a group by atomics.  A pair (t, s) depends on a_t - a_s, so the gradient of a_t is
   C_t . dC_t - x_t . dx_t (of each head alone, without D).  A dt_t is in a_t and all later ones: a sum from the end of the
   chunk, and beyond it the sum of G * (state after the chunk).
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from mamba2 import inputs, mamba2, reference

import tilelang.language as T


def mamba2_backward(batch, seq, heads, groups, P, N, chunk=64, dtype="float16", threads=128):
    """Tensors as in mamba2, `a` and `before` as it gives them.  dstates, after: scratch; dB and dC come in float32."""
    chunks, per = seq // chunk, heads // groups
    xy, bc, row, states = (batch, seq, heads, P), (batch, seq, groups, N), (batch, heads, seq), (batch, chunks, heads, P, N)

    @T.prim_func
    def gradients(x: T.Tensor(xy, dtype), dt: T.Tensor(row, "float32"), A: T.Tensor((heads,), "float32"),
                  B: T.Tensor(bc, dtype), C: T.Tensor(bc, dtype), D: T.Tensor((heads,), "float32"),
                  a: T.Tensor(row, "float32"), before: T.Tensor(states, dtype), dy: T.Tensor(xy, dtype),
                  dstates: T.Tensor(states, "float32"), after: T.Tensor(states, dtype), dx: T.Tensor(xy, dtype),
                  ddt: T.Tensor(row, "float32"), dA: T.Tensor((heads,), "float32"), dB: T.Tensor(bc, "float32"),
                  dC: T.Tensor(bc, "float32"), dD: T.Tensor((heads,), "float32")):
        with T.Kernel(chunks, heads, batch, threads=threads) as (c, h, b):
            dys = T.alloc_shared((chunk, P), dtype)
            Cs = T.alloc_shared((chunk, N), dtype)
            decayed = T.alloc_shared((chunk, P), dtype)
            part = T.alloc_fragment((P, N), "float32")
            T.copy(dy[b, c * chunk:(c + 1) * chunk, h, :], dys)
            T.copy(C[b, c * chunk:(c + 1) * chunk, h // per, :], Cs)
            for i, p in T.Parallel(chunk, P):
                decayed[i, p] = dys[i, p] * T.exp2(a[b, h, c * chunk + i] * LOG2E)
            T.gemm(decayed, Cs, part, transpose_A=True, clear_accum=True)
            T.copy(part, dstates[b, c, h, :, :])
            if h % per == 0:  # what atomics add to starts at zero
                for i, n in T.Parallel(chunk, N):
                    dB[b, c * chunk + i, h // per, n] = 0
                    dC[b, c * chunk + i, h // per, n] = 0
            if c == 0 and b == 0:
                for _ in T.Parallel(1):
                    dA[h] = 0
                    dD[h] = 0

        with T.Kernel(heads, batch, threads=threads) as (h, b):
            G = T.alloc_fragment((P, N), "float32")
            T.clear(G)
            for step in T.serial(chunks):
                c = chunks - 1 - step
                T.copy(G, after[b, c, h, :, :])
                for p, n in T.Parallel(P, N):
                    G[p, n] = G[p, n] * T.exp2(a[b, h, c * chunk + chunk - 1] * LOG2E) + dstates[b, c, h, p, n]

        with T.Kernel(chunks, heads, batch, threads=threads) as (c, h, b):
            xs = T.alloc_shared((chunk, P), dtype)
            dys = T.alloc_shared((chunk, P), dtype)
            Bs = T.alloc_shared((chunk, N), dtype)
            Cs = T.alloc_shared((chunk, N), dtype)
            Ss = T.alloc_shared((P, N), dtype)
            Gs = T.alloc_shared((P, N), dtype)
            weights = T.alloc_shared((chunk, chunk), dtype)
            dCBs = T.alloc_shared((chunk, chunk), dtype)
            at = T.alloc_shared((chunk,), "float32")
            ds = T.alloc_shared((chunk,), "float32")
            CB = T.alloc_fragment((chunk, chunk), "float32")
            pairs = T.alloc_fragment((chunk, chunk), "float32")
            dxs = T.alloc_fragment((chunk, P), "float32")
            dbc = T.alloc_fragment((chunk, N), "float32")
            of_x = T.alloc_fragment((chunk, P), "float32")
            of_c = T.alloc_fragment((chunk, N), "float32")
            both = T.alloc_fragment((P, N), "float32")
            column = T.alloc_fragment((chunk,), "float32")
            direct = T.alloc_shared((chunk,), "float32")  # the gradient of dt_s beside x_s, of s in this chunk
            from_later = T.alloc_shared((chunk,), "float32")  # ... by what later chunks read
            steps = T.alloc_shared((chunk,), "float32")
            edges = T.alloc_fragment((P,), "float32")
            total = T.alloc_fragment((1,), "float32")
            edge = T.alloc_shared((1,), "float32")
            T.copy(x[b, c * chunk:(c + 1) * chunk, h, :], xs)
            T.copy(dy[b, c * chunk:(c + 1) * chunk, h, :], dys)
            T.copy(B[b, c * chunk:(c + 1) * chunk, h // per, :], Bs)
            T.copy(C[b, c * chunk:(c + 1) * chunk, h // per, :], Cs)
            T.copy(before[b, c, h, :, :], Ss)
            T.copy(after[b, c, h, :, :], Gs)
            T.copy(a[b, h, c * chunk:(c + 1) * chunk], at)
            T.copy(dt[b, h, c * chunk:(c + 1) * chunk], ds)

            T.gemm(Cs, Bs, CB, transpose_B=True, clear_accum=True)
            T.gemm(dys, xs, pairs, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(chunk, chunk):
                pairs[i, j] = T.if_then_else(j <= i, pairs[i, j] * T.exp2((at[i] - at[j]) * LOG2E), 0.0)
                dCBs[i, j] = pairs[i, j] * ds[j]
                weights[i, j] = T.if_then_else(j <= i, CB[i, j] * T.exp2((at[i] - at[j]) * LOG2E) * ds[j], 0.0)
                pairs[i, j] *= CB[i, j]
            T.reduce_sum(pairs, column, dim=0)
            T.copy(column, direct)
            for i, j in T.Parallel(chunk, chunk):
                pairs[i, j] *= ds[j]
            T.reduce_sum(pairs, column, dim=1)
            T.copy(column, steps)

            T.gemm(Bs, Gs, dxs, transpose_B=True, clear_accum=True)
            for i, p in T.Parallel(chunk, P):
                dxs[i, p] *= T.exp2((at[chunk - 1] - at[i]) * LOG2E)
                of_x[i, p] = xs[i, p] * dxs[i, p]
                dxs[i, p] *= ds[i]
            T.reduce_sum(of_x, column, dim=1)
            T.copy(column, from_later)
            T.gemm(weights, dys, dxs, transpose_A=True)
            for i, p in T.Parallel(chunk, P):
                dxs[i, p] += D[h] * dys[i, p]
            T.copy(dxs, dx[b, c * chunk:(c + 1) * chunk, h, :])

            T.gemm(dys, Ss, dbc, clear_accum=True)
            for i, n in T.Parallel(chunk, N):
                dbc[i, n] *= T.exp2(at[i] * LOG2E)
                of_c[i, n] = Cs[i, n] * dbc[i, n]
            T.reduce_sum(of_c, column, dim=1)
            for i in T.Parallel(chunk):
                steps[i] += column[i]
            T.gemm(dCBs, Bs, dbc)
            T.atomic_add(dC[b, c * chunk:(c + 1) * chunk, h // per, :], dbc)

            T.gemm(xs, Gs, dbc, clear_accum=True)
            for i, n in T.Parallel(chunk, N):
                dbc[i, n] *= T.exp2((at[chunk - 1] - at[i]) * LOG2E) * ds[i]
            T.gemm(dCBs, Cs, dbc, transpose_A=True)
            T.atomic_add(dB[b, c * chunk:(c + 1) * chunk, h // per, :], dbc)

            # G * (state after the chunk): of the state before it, and of what the chunk adds
            for p, n in T.Parallel(P, N):
                both[p, n] = T.cast(Ss[p, n], "float32") * Gs[p, n] * T.exp2(at[chunk - 1] * LOG2E)
            T.reduce_sum(both, edges, dim=1)
            T.reduce_sum(edges, total)
            for i in T.Parallel(chunk):
                column[i] = ds[i] * from_later[i]
            T.reduce_sum(column, total, clear=False)
            T.copy(total, edge)
            for i in T.Parallel(chunk):
                direct[i] += from_later[i]
                steps[i] -= ds[i] * direct[i]
            T.cumsum(steps, dim=0, reverse=True)
            for i in T.Parallel(chunk):
                ddt[b, h, c * chunk + i] = A[h] * (steps[i] + edge[0]) + direct[i]
                column[i] = ds[i] * (steps[i] + edge[0])
            T.reduce_sum(column, total)
            for i in T.Parallel(1):
                T.atomic_add(dA[h], total[i])
            for i, p in T.Parallel(chunk, P):
                of_x[i, p] = T.cast(xs[i, p], "float32") * dys[i, p]
            T.reduce_sum(of_x, column, dim=1)
            T.reduce_sum(column, total)
            for i in T.Parallel(1):
                T.atomic_add(dD[h], total[i])

    return gradients


def check(batch=1, seq=1024, heads=32, groups=1, P=64, N=128, chunk=64, dtype="float16", seed=0, on=harness.HERE):
    x, dt, A, B, C, D, dy = inputs(batch, seq, heads, groups, P, N, dtype, seed)
    chunk = on.fitting(lambda chunk: mamba2_backward(batch, seq, heads, groups, P, N, chunk, dtype), chunk, chunk // 2)
    sizes = batch, seq, heads, groups, P, N, chunk, dtype
    a, _, before, _ = on.compile(mamba2(*sizes), out_idx=[6, 7, 8, 9])(x, dt, A, B, C, D)
    _, _, *got = harness.run(mamba2_backward(*sizes), [x, dt, A, B, C, D, a, before, dy], range(9, 17), on)
    exact = [harness.wide(z) for z in (x, dt, A, B, C, D, dy)]
    _, *wants = reference(*exact)
    samples = [reference(*exact, rough=harness.rounding(dtype, scale))[1:] for scale in (1.17, 1.73)]
    names = [f"mamba2 backward, {name}" for name in ("dx", "ddt", "dA", "dB", "dC")]
    # dD = sum of x * dy has float32 sums and no other rounding: at most so many additions stand one in another
    depth = P + chunk + batch * seq // chunk
    size = np.abs(exact[0] * exact[-1]).sum((0, 1, 3))
    return [*harness.compare_rough(names, got, wants, samples, [dtype] + ["float32"] * 4),
            harness.compare("mamba2 backward, dD", got[5], wants[5], depth * 2.0**-24 * size)]


if __name__ == "__main__":
    harness.main(check)
