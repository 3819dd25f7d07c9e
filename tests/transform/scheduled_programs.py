"""Loops of two and more GEMMs in the forms that programs have: attention and its variants, latent attention, retention."""

import tilelang.language as T

F16, F32 = "float16", "float32"


def attention(seq=256, dim=128, bm=128, bn=128, stages=2, threads=256, causal=False, extra=False, through_shared=False,
              values=1, score="softmax"):
    """One head.  extra: also stores the maxima of each step.  through_shared: the weights are an operand in shared memory.
    values: 1 or 2 tensors of values.  score: "softmax" or "sigmoid"."""
    scale, shape = dim**-0.5 * 1.44269504, (seq, dim)

    @T.prim_func
    def main(Q: T.Tensor(shape, F16), K: T.Tensor(shape, F16), V: T.Tensor(shape, F16), W: T.Tensor(shape, F16),
             O: T.Tensor(shape, F32), O2: T.Tensor(shape, F32), Tops: T.Tensor((seq // bn, seq), F32)):
        with T.Kernel(T.ceildiv(seq, bm), threads=threads) as bx:
            Qs, Ks, Vs = T.alloc_shared((bm, dim), F16), T.alloc_shared((bn, dim), F16), T.alloc_shared((bn, dim), F16)
            S, P = T.alloc_fragment((bm, bn), F32), T.alloc_fragment((bm, bn), F16)
            acc = T.alloc_fragment((bm, dim), F32)
            top, before, factor, total, row = (T.alloc_fragment((bm,), F32) for _ in range(5))
            if values == 2:
                Ws, acc2 = T.alloc_shared((bn, dim), F16), T.alloc_fragment((bm, dim), F32)
                T.clear(acc2)
            if through_shared:
                Ps = T.alloc_shared((bm, bn), F16)
            T.copy(Q[bx * bm, 0], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(bx + 1 if causal else seq // bn, num_stages=stages):
                T.copy(K[k * bn, 0], Ks)
                if causal:
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = T.if_then_else(bx * bm + i >= k * bn + j, 0, -1e30)
                else:
                    T.clear(S)
                T.gemm(Qs, Ks, S, transpose_B=True)
                if score == "softmax":
                    T.copy(top, before)
                    T.reduce_max(S, top, dim=1, clear=False)
                    for i in T.Parallel(bm):
                        factor[i] = T.exp2((before[i] - top[i]) * scale)
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
                    T.reduce_sum(S, row, dim=1)
                    for i in T.Parallel(bm):
                        total[i] = total[i] * factor[i] + row[i]
                    for i, j in T.Parallel(bm, dim):
                        acc[i, j] *= factor[i]
                    if values == 2:
                        for i, j in T.Parallel(bm, dim):
                            acc2[i, j] *= factor[i]
                else:
                    for i, j in T.Parallel(bm, bn):
                        S[i, j] = T.sigmoid(S[i, j] * scale)
                if extra:
                    T.copy(top, Tops[k, bx * bm:(bx + 1) * bm])
                T.copy(S, Ps if through_shared else P)
                T.copy(V[k * bn, 0], Vs)
                T.gemm(Ps if through_shared else P, Vs, acc)
                if values == 2:
                    T.copy(W[k * bn, 0], Ws)
                    T.gemm(P, Ws, acc2)
            if score == "softmax":
                for i, j in T.Parallel(bm, dim):
                    acc[i, j] /= total[i]
            T.copy(acc, O[bx * bm, 0])
            if values == 2:
                for i, j in T.Parallel(bm, dim):
                    acc2[i, j] /= total[i]
                T.copy(acc2, O2[bx * bm, 0])

    return main


def latent_attention(seq=192, rows=64, dim=256, rope=64, bn=64, stages=2, threads=256):
    """Multi-head latent attention: keys are the values and a part of their own; scores pass through shared memory."""
    scale = (dim + rope)**-0.5 * 1.44269504

    @T.prim_func
    def main(Q: T.Tensor((rows, dim), F16), R: T.Tensor((rows, rope), F16), KV: T.Tensor((seq, dim), F16),
             KR: T.Tensor((seq, rope), F16), O: T.Tensor((rows, dim), F32)):
        with T.Kernel(1, threads=threads):
            Qs, Rs = T.alloc_shared((rows, dim), F16), T.alloc_shared((rows, rope), F16)
            KVs, KRs, Ps = T.alloc_shared((bn, dim), F16), T.alloc_shared((bn, rope), F16), T.alloc_shared((rows, bn), F16)
            S, acc = T.alloc_fragment((rows, bn), F32), T.alloc_fragment((rows, dim), F32)
            top, before, factor, total, row = (T.alloc_fragment((rows,), F32) for _ in range(5))
            T.copy(Q, Qs)
            T.copy(R, Rs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            for k in T.Pipelined(seq // bn, num_stages=stages):
                T.copy(KV[k * bn, 0], KVs)
                T.copy(KR[k * bn, 0], KRs)
                T.clear(S)
                T.gemm(Qs, KVs, S, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(Rs, KRs, S, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(top, before)
                T.reduce_max(S, top, dim=1, clear=False)
                for i in T.Parallel(rows):
                    factor[i] = T.exp2((before[i] - top[i]) * scale)
                for i, j in T.Parallel(rows, bn):
                    S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
                T.reduce_sum(S, row, dim=1)
                T.copy(S, Ps)
                for i in T.Parallel(rows):
                    total[i] = total[i] * factor[i] + row[i]
                for i, j in T.Parallel(rows, dim):
                    acc[i, j] *= factor[i]
                T.gemm(Ps, KVs, acc, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(rows, dim):
                acc[i, j] /= total[i]
            T.copy(acc, O)

    return main


def two_products(m=128, n=128, k=320, bk=64, stages=3, threads=256):
    """Two GEMMs with one operand in common (the gate of SwiGLU)."""
    @T.prim_func
    def main(A: T.Tensor((m, k), F16), B: T.Tensor((n, k), F16), G: T.Tensor((n, k), F16), C: T.Tensor((m, n), F32)):
        with T.Kernel(1, threads=threads):
            As, Bs, Gs = T.alloc_shared((m, bk), F16), T.alloc_shared((n, bk), F16), T.alloc_shared((n, bk), F16)
            up, gate = T.alloc_fragment((m, n), F32), T.alloc_fragment((m, n), F32)
            T.clear(up)
            T.clear(gate)
            for ko in T.Pipelined(k // bk, num_stages=stages):
                T.copy(A[0, ko * bk], As)
                T.copy(B[0, ko * bk], Bs)
                T.copy(G[0, ko * bk], Gs)
                T.gemm(As, Bs, up, transpose_B=True)
                T.gemm(As, Gs, gate, transpose_B=True)
            for i, j in T.Parallel(m, n):
                up[i, j] *= gate[i, j]
            T.copy(up, C)

    return main


def normalised(m=128, n=128, k=320, bk=64, stages=3, threads=256):
    """A GEMM whose rows are divided by their root mean square, which is summed from the tiles of the loop."""
    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            As, Bs = T.alloc_shared((m, bk), "float16"), T.alloc_shared((n, bk), "float16")
            acc, x = T.alloc_fragment((m, n), "float32"), T.alloc_fragment((m, bk), "float32")
            squares = T.alloc_fragment((m,), "float32")
            T.clear(acc)
            T.clear(squares)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[0, i * bk], As)
                T.copy(B[0, i * bk], Bs)
                T.gemm(As, Bs, acc, transpose_B=True)
                T.copy(As, x)
                for r, c in T.Parallel(m, bk):
                    x[r, c] = x[r, c] * x[r, c]
                T.reduce_sum(x, squares, dim=1, clear=False)
            for r, c in T.Parallel(m, n):
                acc[r, c] *= T.rsqrt(squares[r] / k + 1e-6)
            T.copy(acc, C)

    return main


def scaled_operand(m=128, n=128, k=328, bk=64, stages=3, threads=256):
    """A GEMM whose A is multiplied by a weight per column: a vector is loaded in each iteration."""
    @T.prim_func
    def main(A: T.Tensor((m, k), "float16"), V: T.Tensor((k,), "float32"), B: T.Tensor((n, k), "float16"),
             C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=threads):
            As, Bs = T.alloc_shared((m, bk), "float16"), T.alloc_shared((n, bk), "float16")
            acc, x = T.alloc_fragment((m, n), "float32"), T.alloc_fragment((m, bk), "float16")
            v = T.alloc_shared((bk,), "float32")
            T.clear(acc)
            for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                T.copy(A[0, i * bk], As)
                T.copy(B[0, i * bk], Bs)
                T.copy(V[i * bk], v)
                for r, c in T.Parallel(m, bk):
                    x[r, c] = As[r, c] * v[c]
                T.gemm(x, Bs, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def retention(seq=256, dim=64, c=64, stages=2, threads=128):
    """Chunked linear attention: four GEMMs, of which one updates a state that the next chunk reads."""
    @T.prim_func
    def main(Q: T.Tensor((seq, dim), F16), K: T.Tensor((seq, dim), F16), V: T.Tensor((seq, dim), F16),
             O: T.Tensor((seq, dim), F32)):
        with T.Kernel(1, threads=threads):
            Qs, Ks, Vs, Hs = (T.alloc_shared((c, dim), F16) for _ in range(4))
            S, P = T.alloc_fragment((c, c), F32), T.alloc_fragment((c, c), F16)
            out, state = T.alloc_fragment((c, dim), F32), T.alloc_fragment((dim, dim), F32)
            T.clear(state)
            for k in T.Pipelined(seq // c, num_stages=stages):
                T.copy(Q[k * c, 0], Qs)
                T.copy(K[k * c, 0], Ks)
                T.copy(V[k * c, 0], Vs)
                T.clear(S)
                T.gemm(Qs, Ks, S, transpose_B=True)
                for i, j in T.Parallel(c, c):
                    P[i, j] = T.if_then_else(i >= j, S[i, j], 0)
                T.copy(state, Hs)
                T.clear(out)
                T.gemm(Qs, Hs, out)
                T.gemm(P, Vs, out)
                T.gemm(Ks, Vs, state, transpose_A=True)
                T.copy(out, O[k * c, 0])

    return main


def backward(seq=256, dim=64, bm=64, bn=64, stages=2, threads=128):
    """The five GEMMs of the gradient of attention, for one tile of keys; the gradient of the queries is added atomically."""
    scale = dim**-0.5

    @T.prim_func
    def main(Q: T.Tensor((seq, dim), F16), K: T.Tensor((seq, dim), F16), V: T.Tensor((seq, dim), F16),
             D: T.Tensor((seq, dim), F16), L: T.Tensor((seq,), F32), E: T.Tensor((seq,), F32),
             dQ: T.Tensor((seq, dim), F32), dK: T.Tensor((seq, dim), F32), dV: T.Tensor((seq, dim), F32)):
        with T.Kernel(seq // bm, threads=threads) as bx:
            Ks, Vs, Qs, Ds = (T.alloc_shared((bm, dim), F16) for _ in range(4))
            Ss = T.alloc_shared((bm, bn), F16)
            S, dP = T.alloc_fragment((bm, bn), F32), T.alloc_fragment((bm, bn), F32)
            P, dS = T.alloc_fragment((bm, bn), F16), T.alloc_fragment((bm, bn), F16)
            dv, dk, dq = (T.alloc_fragment((bm, dim), F32) for _ in range(3))
            T.copy(K[bx * bm, 0], Ks)
            T.copy(V[bx * bm, 0], Vs)
            T.clear(dv)
            T.clear(dk)
            for k in T.Pipelined(seq // bn, num_stages=stages):
                T.copy(Q[k * bn, 0], Qs)
                T.copy(D[k * bn, 0], Ds)
                T.gemm(Ks, Qs, S, transpose_B=True, clear_accum=True)
                T.gemm(Vs, Ds, dP, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.exp(S[i, j] * scale - L[k * bn + j])
                T.copy(S, P)
                T.gemm(P, Ds, dv)
                for i, j in T.Parallel(bm, bn):
                    dP[i, j] = S[i, j] * (dP[i, j] - E[k * bn + j]) * scale
                T.copy(dP, dS)
                T.copy(dP, Ss)
                T.gemm(dS, Qs, dk)
                T.gemm(Ss, Ks, dq, transpose_A=True, clear_accum=True)
                for i, j in T.Parallel(bn, dim):
                    T.atomic_add(dQ[k * bn + i, j], dq[i, j])
            T.copy(dv, dV[bx * bm, 0])
            T.copy(dk, dK[bx * bm, 0])

    return main


def two_loops(m=128, n=128, k=(320, 192), bk=64, stages=3, threads=256, same=True):
    """C = A1 B1 / 2 + A2 B2, each product in a loop of its own.  same: both loops fill the same tiles.  k: None for
    extents that are read from N at run time."""
    bound = tuple(x or 256 for x in k)

    @T.prim_func
    def main(A1: T.Tensor((m, bound[0]), F16), B1: T.Tensor((bound[0], n), F16), A2: T.Tensor((m, bound[1]), F16),
             B2: T.Tensor((bound[1], n), F16), N: T.Tensor((2,), "int32"), C: T.Tensor((m, n), F32)):
        with T.Kernel(T.ceildiv(m, 128), threads=threads) as bx:
            As, Bs = T.alloc_shared((128, bk), F16), T.alloc_shared((bk, n), F16)
            if not same:
                Ds, Es = T.alloc_shared((128, bk), F16), T.alloc_shared((bk, n), F16)
            acc = T.alloc_fragment((128, n), F32)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k[0], bk) if k[0] else N[0], num_stages=stages):
                T.copy(A1[bx * 128, ko * bk], As)
                T.copy(B1[ko * bk, 0], Bs)
                T.gemm(As, Bs, acc)
            for i, j in T.Parallel(128, n):
                acc[i, j] *= 0.5
            for ko in T.Pipelined(T.ceildiv(k[1], bk) if k[1] else N[1], num_stages=stages):
                T.copy(A2[bx * 128, ko * bk], As if same else Ds)
                T.copy(B2[ko * bk, 0], Bs if same else Es)
                T.gemm(As if same else Ds, Bs if same else Es, acc)
            T.copy(acc, C[bx * 128, 0])

    return main


def attention_of_two_loops(seq=512, dim=128, bm=128, bn=64, stages=2, threads=256):
    """Causal attention: a loop over the key tiles that all queries see, and one over those on the diagonal."""
    scale, shape = dim**-0.5 * 1.44269504, (seq, dim)

    @T.macro
    def steps(bx, first, tiles, masked, K, V, Qs, Ks, Vs, S, P, acc, top, before, factor, total, row):
        for k in T.Pipelined(tiles, num_stages=stages):
            T.copy(K[(first + k) * bn, 0], Ks)
            if masked:
                for i, j in T.Parallel(bm, bn):
                    S[i, j] = T.if_then_else(bx * bm + i >= (first + k) * bn + j, 0, -1e30)
            else:
                T.clear(S)
            T.gemm(Qs, Ks, S, transpose_B=True)
            T.copy(top, before)
            T.reduce_max(S, top, dim=1, clear=False)
            for i in T.Parallel(bm):
                factor[i] = T.exp2((before[i] - top[i]) * scale)
            for i, j in T.Parallel(bm, bn):
                S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
            T.reduce_sum(S, row, dim=1)
            for i in T.Parallel(bm):
                total[i] = total[i] * factor[i] + row[i]
            for i, j in T.Parallel(bm, dim):
                acc[i, j] *= factor[i]
            T.copy(S, P)
            T.copy(V[(first + k) * bn, 0], Vs)
            T.gemm(P, Vs, acc)

    @T.prim_func
    def main(Q: T.Tensor(shape, F16), K: T.Tensor(shape, F16), V: T.Tensor(shape, F16), O: T.Tensor(shape, F32)):
        with T.Kernel(T.ceildiv(seq, bm), threads=threads) as bx:
            Qs, Ks, Vs = T.alloc_shared((bm, dim), F16), T.alloc_shared((bn, dim), F16), T.alloc_shared((bn, dim), F16)
            S, P = T.alloc_fragment((bm, bn), F32), T.alloc_fragment((bm, bn), F16)
            acc = T.alloc_fragment((bm, dim), F32)
            top, before, factor, total, row = (T.alloc_fragment((bm,), F32) for _ in range(5))
            T.copy(Q[bx * bm, 0], Qs)
            T.clear(acc)
            T.clear(total)
            T.fill(top, -1e30)
            steps(bx, 0, bx * (bm // bn), False, K, V, Qs, Ks, Vs, S, P, acc, top, before, factor, total, row)
            steps(bx, bx * (bm // bn), bm // bn, True, K, V, Qs, Ks, Vs, S, P, acc, top, before, factor, total, row)
            for i, j in T.Parallel(bm, dim):
                acc[i, j] /= total[i]
            T.copy(acc, O[bx * bm, 0])

    return main
