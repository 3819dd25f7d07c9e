"""Programs that mix features: routing, both products and the combination of experts in one launch; int8 scores with fp8 values;
blocks of keys chosen by the data; a triangular inverse in shared memory; codes of three bits, ten in a word."""

import numpy as np
from user_harness import BF, agree, drawn, mark

import tilelang.language as T

F16, F32, I32, BF16, F8 = "float16", "float32", "int32", "bfloat16", "float8_e4m3fn"
RNG = np.random.default_rng(5)
data = drawn(RNG)


@T.macro
def _rows_of(rows, order, first, n, block, size):
    for i in T.Parallel(size):
        rows[i] = T.if_then_else(block * size + i < n, order[first + block * size + i], -1)


def experts_in_one_launch(tokens, experts, top, d, f, tile, blocks):
    @T.prim_func
    def main(X: T.Tensor((tokens, d), BF16), ids: T.Tensor((tokens, top), I32), weight: T.Tensor((tokens, top), F32),
             W1: T.Tensor((experts, 2 * f, d), BF16), W2: T.Tensor((experts, d, f), BF16), count: T.Tensor((experts,), I32),
             end: T.Tensor((experts,), I32), H: T.Tensor((tokens * top, f), BF16), Y: T.Tensor((tokens, d), F32)):
        order = T.alloc_global((tokens * top,), I32)
        with T.Kernel(blocks, threads=128) as b:
            tx = T.get_thread_binding()
            for k in T.serial(T.ceildiv(tokens * top, blocks * 128)):
                e = (k * blocks + b) * 128 + tx
                if e < tokens * top:
                    T.atomic_add(count[ids[e // top, e % top]], 1)
            T.sync_grid()
            if b == 0 and tx == 0:
                s = T.alloc_var(I32, init=0)
                for x in range(experts):
                    end[x] = s
                    s += count[x]
            T.sync_grid()
            for k in T.serial(T.ceildiv(tokens * top, blocks * 128)):
                e = (k * blocks + b) * 128 + tx
                if e < tokens * top:
                    order[T.atomic_add(end[ids[e // top, e % top]], 1, return_prev=True)] = e
            T.sync_grid()
            Xs, Gs, Us = [T.alloc_shared((tile, tile), BF16) for _ in (0, 1, 2)]
            gate, up = [T.alloc_fragment((tile, tile), F32) for _ in (0, 1)]
            rows = T.alloc_shared((tile,), I32)
            for x, nb in T.Persistent([experts, T.ceildiv(f, tile)], blocks, b, group_size=2):
                n = count[x]
                for mb in T.serial(T.ceildiv(n, tile)):
                    _rows_of(rows, order, end[x] - n, n, mb, tile)
                    T.clear(gate)
                    T.clear(up)
                    for k in T.serial(T.ceildiv(d, tile)):
                        for i, j in T.Parallel(tile, tile):
                            Xs[i, j] = T.if_then_else(rows[i] >= 0, X[rows[i] // top, k * tile + j], T.bfloat16(0))
                        T.copy(W1[x, nb * tile, k * tile], Gs)
                        T.copy(W1[x, f + nb * tile, k * tile], Us)
                        T.gemm(Xs, Gs, gate, transpose_B=True)
                        T.gemm(Xs, Us, up, False, True)
                    for i, j in T.Parallel(tile, tile):
                        if rows[i] >= 0 and nb * tile + j < f:
                            H[rows[i], nb * tile + j] = gate[i, j] * T.sigmoid(gate[i, j]) * up[i, j]
            T.sync_grid()
            for x, nb in T.Persistent([experts, T.ceildiv(d, tile)], blocks, b):
                n = count[x]
                for mb in T.serial(T.ceildiv(n, tile)):
                    _rows_of(rows, order, end[x] - n, n, mb, tile)
                    T.clear(up)
                    for k in T.serial(T.ceildiv(f, tile)):
                        for i, j in T.Parallel(tile, tile):
                            Xs[i, j] = T.if_then_else(rows[i] >= 0, H[rows[i], k * tile + j], T.bfloat16(0))
                        T.copy(W2[x, nb * tile, k * tile], Gs)
                        T.gemm(Xs, Gs, up, transpose_B=True)
                    for i, j in T.Parallel(tile, tile):
                        if rows[i] >= 0:
                            T.atomic_add(Y[rows[i] // top, nb * tile + j], up[i, j] * weight[rows[i] // top, rows[i] % top])
    return main


def test_experts_in_one_launch():
    tokens, experts, top, d, f = 20, 3, 2, 32, 32
    x, w1, w2 = data((tokens, d), BF16), (data((experts, 2 * f, d)) * 0.3).astype(BF), (data((experts, d, f)) * 0.3).astype(BF)
    ids = np.stack([RNG.permutation(experts)[:top] for _ in range(tokens)]).astype(np.int32)
    weight = RNG.random((tokens, top)).astype(np.float32)
    y, h = np.zeros((tokens, d)), np.zeros((tokens * top, f))
    for t in range(tokens):
        for k, e in enumerate(ids[t]):
            g, u = np.split(w1[e].astype(float) @ x[t].astype(float), 2)
            h[t * top + k] = (g / (1 + np.exp(-g)) * u).astype(BF).astype(float)
            y[t] += weight[t, k] * (w2[e].astype(float) @ h[t * top + k])
    count = np.bincount(ids.ravel(), minlength=experts).astype(np.int32)
    main = experts_in_one_launch(tokens, experts, top, d, f, 16, 2)
    args = [x, ids, weight, w1, w2, np.zeros(experts, np.int32), mark(experts, np.int32), mark((tokens * top, f), BF),
            np.zeros((tokens, d), np.float32)]
    agree(main, args, {5: count, 6: np.cumsum(count).astype(np.int32), 7: h.astype(BF), 8: y.astype(np.float32)}, tol=3e-2)


def int8_scores_fp8_values(heads, s, d, bm, bn):
    @T.prim_func
    def main(Q: T.Tensor((heads, s, d), "int8"), K: T.Tensor((heads, s, d), "int8"), V: T.Tensor((heads, d, s), F8),
             qs: T.Tensor((heads, s), F32), ks: T.Tensor((heads, s), F32), vs: T.Tensor((heads, d), F32),
             O: T.Tensor((heads, s, d), BF16)):
        with T.Kernel(T.ceildiv(s, bm), heads, threads=64) as (bx, h):
            Qs, Ks = T.alloc_shared((bm, d), "int8"), T.alloc_shared((bn, d), "int8")
            Vs, Ps = T.alloc_shared((d, bn), F8), T.alloc_shared((bm, bn), F8)
            si, p, o = T.alloc_fragment((bm, bn), I32), T.alloc_fragment((bm, bn), F32), T.alloc_fragment((bm, d), F32)
            m, new, total, part, keep = [T.alloc_fragment((bm,), F32) for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[h, bx * bm:(bx + 1) * bm, :], Qs)
            T.clear(o)
            T.clear(total)
            T.fill(m, -1e30)
            for k in T.Pipelined(bx * bm // bn + T.ceildiv(bm, bn), num_stages=3):
                T.copy(K[h, k * bn:(k + 1) * bn, :], Ks)
                T.copy(V[h, :, k * bn:(k + 1) * bn], Vs)
                T.gemm(Qs, Ks, si, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(bm, bn):
                    row, col = bx * bm + i, k * bn + j
                    p[i, j] = T.if_then_else((col <= row) and (col < s), si[i, j] * qs[h, row] * ks[h, col], -1e30)
                T.reduce_max(p, new, dim=1)
                for i in T.Parallel(bm):
                    new[i] = T.max(new[i], m[i])
                    keep[i] = T.exp2(m[i] - new[i])
                    m[i] = new[i]
                for i, j in T.Parallel(bm, bn):
                    p[i, j] = T.exp2(p[i, j] - m[i])
                T.reduce_sum(p, part, dim=1)
                for i in T.Parallel(bm):
                    total[i] = total[i] * keep[i] + part[i]
                for i, j in T.Parallel(bm, d):
                    o[i, j] *= keep[i]
                for i, j in T.Parallel(bm, bn):
                    Ps[i, j] = p[i, j] * 256
                T.gemm(Ps, Vs, o, transpose_B=True)
            for i, j in T.Parallel(bm, d):
                O[h, bx * bm + i, j] = o[i, j] / total[i] * (vs[h, j] / 256)
    return main


def test_attention_of_int8_scores_and_fp8_values():
    heads, s, d = 1, 70, 32
    q, k, v = data((heads, s, d), "int8", -30, 30), data((heads, s, d), "int8", -30, 30), data((heads, d, s), F8)
    qs = (RNG.random((heads, s)) * 0.02 + 0.005).astype(np.float32)
    ks, vs = (RNG.random((heads, s)) * 0.1 + 0.02).astype(np.float32), RNG.random((heads, d)).astype(np.float32)
    a = np.einsum("hsd,htd->hst", q.astype(float), k.astype(float)) * qs[:, :, None] * ks[:, None]
    p = 2.0 ** np.where(np.tril(np.ones((s, s), bool)), a - a.max(-1, keepdims=True), -np.inf)
    want = np.einsum("hst,hdt->hsd", p / p.sum(-1, keepdims=True), v.astype(float)) * vs[:, None]
    args = [q, k, v, qs, ks, vs, mark((heads, s, d), BF)]
    agree(int8_scores_fp8_values(heads, s, d, 32, 64), args, {6: want.astype(BF)}, tol=6e-2)


def test_triangular_inverse_of_chunks():
    chunks, c, d = 2, 16, 32

    @T.prim_func
    def main(K: T.Tensor((chunks * c, d), F32), V: T.Tensor((chunks * c, d), F32), beta: T.Tensor((chunks * c,), F32),
             W: T.Tensor((chunks * c, d), F32), Ao: T.Tensor((chunks, c, c), F32)):
        with T.Kernel(chunks, threads=64) as b:
            ks, kb, vb = [T.alloc_shared((c, d), F32) for _ in (0, 1, 2)]
            A, Af, tmp = T.alloc_shared((c, c), F32), T.alloc_fragment((c, c), F32), T.alloc_fragment((c, c), F32)
            row, wf = T.alloc_fragment((c,), F32), T.alloc_fragment((c, d), F32)
            T.copy(K[b * c, 0], ks)
            for i, j in T.Parallel(c, d):
                kb[i, j] = ks[i, j] * beta[b * c + i]
                vb[i, j] = V[b * c + i, j] * beta[b * c + i]
            T.gemm(kb, ks, Af, transpose_B=True, clear_accum=True)
            for i, j in T.Parallel(c, c):
                A[i, j] = T.if_then_else(i > j, -Af[i, j], 0.0)
            for i in T.serial(1, c):
                for k, j in T.Parallel(c, c):
                    tmp[k, j] = T.if_then_else(k < i, A[i, k] * A[k, j], 0.0)
                T.reduce_sum(tmp, row, dim=0)
                for j in T.Parallel(c):
                    A[i, j] += row[j]
            for i, j in T.Parallel(c, c):
                if (i, j) == (j, i):
                    A[i, j] = 1
            T.copy(A, Ao[b, :, :])
            T.gemm(A, vb, wf, clear_accum=True)
            T.copy(wf, W[b * c, 0])

    k, v = (data((chunks * c, d)) * 0.2).astype(np.float32), data((chunks * c, d))
    beta = RNG.random(chunks * c).astype(np.float32)
    parts = [slice(b * c, (b + 1) * c) for b in range(chunks)]
    inverse = [np.linalg.inv(np.eye(c) + np.tril((k[p] * beta[p, None]).astype(float) @ k[p].T, -1)) for p in parts]
    w = np.concatenate([a @ (v[p] * beta[p, None]) for a, p in zip(inverse, parts)])
    agree(main, [k, v, beta, mark((chunks * c, d), np.float32), mark((chunks, c, c), np.float32)],
          {3: w.astype(np.float32), 4: np.stack(inverse).astype(np.float32)}, tol=1e-2)


def test_codes_of_three_bits_with_permuted_columns():
    m, n, k, groups, bm, bn, bk = 24, 40, 50, 4, 32, 32, 32
    words = -(-k // 10)

    @T.prim_func
    def main(A: T.Tensor((m, k), F16), codes: T.Tensor((words, n), "uint32"), scale: T.Tensor((groups, n), F16),
             zero: T.Tensor((groups, n), "int8"), group: T.Tensor((k,), I32), column: T.Tensor((k,), I32),
             C: T.Tensor((m, n), BF16)):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            As, Ws, Cf = T.alloc_shared((bm, bk), F16), T.alloc_shared((bk, bn), F16), T.alloc_fragment((bm, bn), F32)
            T.clear(Cf)
            for step in T.Pipelined(T.ceildiv(k, bk), num_stages=2):
                for i, j in T.Parallel(bm, bk):
                    if step * bk + j < k:
                        As[i, j] = A[by * bm + i, column[step * bk + j]]
                    else:
                        As[i, j] = 0
                for i, j in T.Parallel(bk, bn):
                    at = step * bk + i
                    code = (codes[at // 10, bx * bn + j] >> T.cast((at % 10) * 3, "uint32")) & T.uint32(7)
                    g = group[at]
                    Ws[i, j] = T.if_then_else(at < k, T.cast(T.cast(code, I32) - zero[g, bx * bn + j], F16) *
                                              scale[g, bx * bn + j], T.float16(0))
                T.gemm(As, Ws, Cf)
            T.copy(Cf, C[by * bm, bx * bn])

    a, q = data((m, k), F16), RNG.integers(0, 8, (words * 10, n))
    codes = (q.reshape(words, 10, n).astype(np.uint64) << (np.arange(10, dtype=np.uint64) * 3)[None, :, None]).sum(1)
    scale, zero = (RNG.random((groups, n)) * 0.2 + 0.1).astype(np.float16), RNG.integers(0, 8, (groups, n)).astype(np.int8)
    group, column = RNG.integers(0, groups, k).astype(np.int32), RNG.permutation(k).astype(np.int32)
    w = (q[:k] - zero[group]).astype(np.float16) * scale[group]
    agree(main, [a, codes.astype(np.uint32), scale, zero, group, column, mark((m, n), BF)],
          {6: (a[:, column].astype(float) @ w.astype(float)).astype(BF)}, tol=2e-2)
