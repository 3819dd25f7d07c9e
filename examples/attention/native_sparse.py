"""Native sparse attention: three views of the keys for every query, mixed by gates.

compressed  each block of `size` keys and values is averaged; a query attends to the averages of the blocks behind it.
selected    the weights of those averages, summed over the heads of a kv head, say which `count` blocks matter: the query
            attends to their keys in full.  Its own block is always among them.
window      the last `window` keys in full.

All query heads of a kv head share a choice, so that they form the rows of one tile and a block of keys is read once for
all of them.  `selected` is the middle view alone, for a given choice; `native_sparse` is the whole: three launches.
"""

import attention_harness as harness
import numpy as np
from attention_harness import LOG2E
from online_softmax import absorb, finish, reset

import tilelang.language as T


def selected(batch, heads, kv_heads, seq, dim, count, size=32, stages=2, dtype="float16", threads=32):
    """chosen[b, t, hk, i] names the i-th block that query t of kv head hk looks at; -1: none."""
    scale, group = dim**-0.5 * LOG2E, heads // kv_heads
    bm = T.ceildiv(group, 16) * 16
    q_shape, kv_shape = (batch, seq, heads, dim), (batch, seq, kv_heads, dim)

    @T.prim_func
    def attend(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
               chosen: T.Tensor((batch, seq, kv_heads, count), "int32"), O: T.Tensor(q_shape, dtype)):
        with T.Kernel(seq, kv_heads, batch, threads=threads) as (t, hk, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((size, dim), dtype)
            Vs = T.alloc_shared((size, dim), dtype)
            S = T.alloc_fragment((bm, size), "float32")
            P = T.alloc_fragment((bm, size), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, t, hk * group, 0], Qs)
            reset(acc, top, total)
            for i in T.Pipelined(count, num_stages=stages):
                start = chosen[b, t, hk, i] * size
                if start >= 0 and start <= t:
                    T.copy(K[b, start:start + size, hk, :], Ks)
                    T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
                    for r, j in T.Parallel(bm, size):
                        S[r, j] = T.if_then_else(start + j <= t, S[r, j], -T.infinity("float32"))
                    T.copy(V[b, start:start + size, hk, :], Vs)
                    absorb(S, P, acc, top, before, rescale, total, row, scale)
                    T.gemm(P, Vs, acc)
            finish(acc, total)
            for r, j in T.Parallel(bm, dim):
                if r < group:
                    O[b, t, hk * group + r, j] = acc[r, j]

    return attend


def native_sparse(batch, heads, kv_heads, seq, dim, count, size=32, window=64, stages=2, dtype="float16", threads=32):
    """gates (batch, seq, heads, 3) float32: of compressed, selected, window.  seq a multiple of size; count at most the
    number of blocks.  Scratch and results: Kc, Vc the averages, rating the weights of blocks, chosen, part, O."""
    scale, group, blocks = dim**-0.5 * LOG2E, heads // kv_heads, seq // size
    bm, bn = T.ceildiv(group, 16) * 16, T.ceildiv(blocks, 16) * 16
    q_shape, kv_shape, c_shape = (batch, seq, heads, dim), (batch, seq, kv_heads, dim), (batch, blocks, kv_heads, dim)

    @T.macro
    def one_block(K, V, Qs, Ks, Vs, S, P, acc, state, b, t, hk, start, first):
        """Absorb keys start .. start + size - 1, of which first .. t count."""
        T.copy(K[b, start:start + size, hk, :], Ks)
        T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
        for r, j in T.Parallel(bm, size):
            S[r, j] = T.if_then_else(start + j <= t and start + j >= first, S[r, j], -T.infinity("float32"))
        T.copy(V[b, start:start + size, hk, :], Vs)
        absorb(S, P, acc, *state, scale)
        T.gemm(P, Vs, acc)

    @T.macro
    def block_mean(source, target, tile, mean, b, c, hk):
        T.copy(source[b, c * size:(c + 1) * size, hk, :], tile)
        T.reduce_sum(tile, mean, dim=0)
        for j in T.Parallel(dim):
            target[b, c, hk, j] = mean[j] / size

    @T.prim_func
    def forward(Q: T.Tensor(q_shape, dtype), K: T.Tensor(kv_shape, dtype), V: T.Tensor(kv_shape, dtype),
                gates: T.Tensor((batch, seq, heads, 3), "float32"), Kc: T.Tensor(c_shape, dtype), Vc: T.Tensor(c_shape, dtype),
                rating: T.Tensor((batch, seq, kv_heads, blocks), "float32"),
                chosen: T.Tensor((batch, seq, kv_heads, count), "int32"), part: T.Tensor(q_shape, "float32"),
                O: T.Tensor(q_shape, dtype)):
        with T.Kernel(blocks, kv_heads, batch, threads=128) as (c, hk, b):
            tile = T.alloc_fragment((size, dim), "float32")
            mean = T.alloc_fragment((dim,), "float32")
            block_mean(K, Kc, tile, mean, b, c, hk)
            block_mean(V, Vc, tile, mean, b, c, hk)

        with T.Kernel(seq, kv_heads, batch, threads=threads) as (t, hk, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((bn, dim), dtype)
            Vs = T.alloc_shared((bn, dim), dtype)
            S = T.alloc_fragment((bm, bn), "float32")
            P = T.alloc_fragment((bm, bn), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            top, total = [T.alloc_fragment((bm,), "float32") for _ in (0, 1)]
            weight = T.alloc_fragment((1, bn), "float32")
            column = T.alloc_fragment((1, bn), "int32")
            best = T.alloc_fragment((1,), "float32")
            at = T.alloc_fragment((1,), "int32")
            T.copy(Q[b, t, hk * group, 0], Qs)
            T.copy(Kc[b, 0:bn, hk, :], Ks)
            T.copy(Vc[b, 0:bn, hk, :], Vs)
            T.gemm(Qs, Ks, S, transpose_B=True, clear_accum=True)
            for r, j in T.Parallel(bm, bn):  # a block counts once all of it lies behind the query
                S[r, j] = T.if_then_else(j < blocks and (j + 1) * size <= t + 1, S[r, j] * scale, -T.infinity("float32"))
            T.reduce_max(S, top, dim=1)
            for r, j in T.Parallel(bm, bn):
                S[r, j] = T.if_then_else(t + 1 >= size, T.exp2(S[r, j] - top[r]), 0.0)
            T.reduce_sum(S, total, dim=1)
            for r, j in T.Parallel(bm, bn):
                S[r, j] = T.if_then_else(t + 1 >= size, S[r, j] / total[r], 0.0)
            T.copy(S, P)
            T.gemm(P, Vs, acc, clear_accum=True)
            for r, j in T.Parallel(bm, dim):
                if r < group:
                    part[b, t, hk * group + r, j] = acc[r, j]
            for r, j in T.Parallel(bm, bn):  # rows past the group are no heads
                S[r, j] = T.if_then_else(r < group, S[r, j], 0.0)
            T.reduce_sum(S, weight[0, :], dim=0)
            for _, j in T.Parallel(1, bn):
                if j < blocks:
                    rating[b, t, hk, j] = weight[0, j]
            for i, j in T.Parallel(1, bn):  # of blocks that begin behind the query, its own first
                weight[i, j] = T.if_then_else(j * size <= t, T.if_then_else(t < (j + 1) * size, T.infinity("float32"),
                                                                           weight[i, j]), -1.0)
            for n in T.serial(count):
                T.reduce_max(weight, best, dim=1)
                for i, j in T.Parallel(1, bn):
                    column[i, j] = T.if_then_else(weight[i, j] == best[i], j, bn)
                T.reduce_min(column, at, dim=1)
                for i, j in T.Parallel(1, bn):
                    weight[i, j] = T.if_then_else(j == at[i], -1.0, weight[i, j])
                for i in T.Parallel(1):
                    chosen[b, t, hk, n] = T.if_then_else(best[i] >= 0, at[i], -1)

        with T.Kernel(seq, kv_heads, batch, threads=threads) as (t, hk, b):
            Qs = T.alloc_shared((bm, dim), dtype)
            Ks = T.alloc_shared((size, dim), dtype)
            Vs = T.alloc_shared((size, dim), dtype)
            S = T.alloc_fragment((bm, size), "float32")
            P = T.alloc_fragment((bm, size), dtype)
            acc = T.alloc_fragment((bm, dim), "float32")
            out = T.alloc_fragment((bm, dim), "float32")
            top, before, rescale, total, row = [T.alloc_fragment((bm,), "float32") for _ in (0, 1, 2, 3, 4)]
            T.copy(Q[b, t, hk * group, 0], Qs)
            reset(acc, top, total)
            for i in T.Pipelined(count, num_stages=stages):
                start = chosen[b, t, hk, i] * size
                if start >= 0:
                    one_block(K, V, Qs, Ks, Vs, S, P, acc, (top, before, rescale, total, row), b, t, hk, start, 0)
            finish(acc, total)
            T.copy(acc, out)
            reset(acc, top, total)
            for k in T.Pipelined(T.max(0, t - window + 1) // size, t // size + 1, num_stages=stages):
                one_block(K, V, Qs, Ks, Vs, S, P, acc, (top, before, rescale, total, row), b, t, hk, k * size, t - window + 1)
            finish(acc, total)
            for r, j in T.Parallel(bm, dim):
                if r < group:
                    h = hk * group + r
                    O[b, t, h, j] = (gates[b, t, h, 0] * part[b, t, h, j] + gates[b, t, h, 1] * out[r, j]
                                     + gates[b, t, h, 2] * acc[r, j])

    return forward


def check_selected(batch=1, heads=64, kv_heads=4, seq=2048, dim=128, count=16, size=64, dtype="float16", seed=0,
                   on=harness.HERE):
    """Blocks of the future are among the chosen ones: the kernel skips those."""
    rng = np.random.default_rng(seed)
    q = harness.random(rng, (batch, seq, heads, dim), dtype)
    k, v = (harness.random(rng, (batch, seq, kv_heads, dim), dtype) for _ in range(2))
    blocks = -(-seq // size)
    chosen = np.full((batch, seq, kv_heads, count), -1, np.int32)
    some = rng.random((batch, seq, kv_heads, blocks)).argsort(-1)[..., :count]
    chosen[..., :some.shape[-1]] = some
    program = selected(batch, heads, kv_heads, seq, dim, count, size, dtype=dtype)
    got, = harness.run(program, [q, k, v, chosen], [4], on)
    want, _ = harness.attention(*(harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v)),
                                keep=seen(chosen, seq, size).repeat(heads // kv_heads, 1))
    return harness.compare("native sparse, selected", got.transpose(0, 2, 1, 3), want, harness.attention_bound(q, k, v, dtype))


def seen(chosen, seq, size):
    """(batch, kv_heads, seq, seq): keys in the chosen blocks, not after the query."""
    blocks = -(-seq // size)
    taken = np.zeros((*chosen.shape[:3], blocks + 1), bool)
    np.put_along_axis(taken, np.where(chosen < 0, blocks, chosen).astype(np.int64), True, -1)
    keys = taken[..., :blocks].repeat(size, -1)[..., :seq].transpose(0, 2, 1, 3)
    return keys & np.tri(seq, dtype=bool)


def check(batch=1, heads=64, kv_heads=4, seq=2048, dim=128, count=8, size=64, window=512, dtype="float16", seed=0,
          on=harness.HERE):
    """The choice is judged by what it must satisfy, since ratings may lie closer together than their error; the views are
    then compared for the blocks that were chosen."""
    rng = np.random.default_rng(seed)
    q = harness.random(rng, (batch, seq, heads, dim), dtype)
    k, v = (harness.random(rng, (batch, seq, kv_heads, dim), dtype) for _ in range(2))
    gates = rng.random((batch, seq, heads, 3)).astype(np.float32)
    blocks, group = seq // size, heads // kv_heads
    program = native_sparse(batch, heads, kv_heads, seq, dim, count, size, window, dtype=dtype)
    kc, vc, rating, chosen, _, got = harness.run(program, [q, k, v, gates], [4, 5, 6, 7, 8, 9], on)

    qt, kt, vt = (harness.wide(x).transpose(0, 2, 1, 3) for x in (q, k, v))
    means = [x.reshape(batch, kv_heads, blocks, size, dim).mean(3) for x in (kt, vt)]
    eps, t, c = harness.EPS[dtype], np.arange(seq)[:, None], np.arange(blocks)[None]
    behind = (c + 1) * size <= t + 1
    results = [harness.compare(f"native sparse, mean {name}", x.transpose(0, 2, 1, 3), w, eps * np.abs(w) + 2.0**-20)
               for name, x, w in (("keys", kc, means[0]), ("values", vc, means[1]))]
    kr, vr = (x.transpose(0, 2, 1, 3) for x in (kc, vc))  # as the second launch read them
    scores = np.where(behind, qt @ np.repeat(kr, group, 1).swapaxes(-1, -2) * dim**-0.5, -np.inf)
    p = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-30)
    want_rating = p.reshape(batch, kv_heads, group, seq, blocks).sum(2).transpose(0, 2, 1, 3)
    longest = float(np.sqrt((qt**2).sum(-1).max() * (kr**2).sum(-1).max()))
    slack = group * (2.0**-18 + 2 * dim**0.5 * harness.EPS["float32"] * longest)
    results.append(harness.compare("native sparse, ratings", rating, want_rating, slack))

    picked = np.asarray(chosen).astype(int)
    rated, own = np.asarray(want_rating), np.arange(seq) // size
    number = np.minimum(count, own + 1)[None, :, None]
    full = np.where(picked >= 0, 1, 0).sum(-1) == number
    different = np.sort(picked, -1)
    repeats = ((different[..., 1:] == different[..., :-1]) & (different[..., 1:] >= 0)).any(-1)
    candidates = np.where(c <= own[:, None], rated.transpose(0, 2, 1, 3), -1.0).transpose(0, 2, 1, 3)
    candidates[:, np.arange(seq), :, own] = np.inf
    worst_taken = np.where(picked >= 0, np.take_along_axis(candidates, np.maximum(picked, 0), -1), np.inf).min(-1)
    at = blocks - np.broadcast_to(number, worst_taken.shape)[..., None]
    kth = np.take_along_axis(np.sort(candidates, -1), at, -1)[..., 0]
    bad = ~full | repeats | (worst_taken < kth - 2 * slack)
    results.append(harness.compare("native sparse, wrong choices", bad.sum(), 0))

    views = [harness.attention(qt, kr, vr, behind)[0],
             harness.attention(qt, kt, vt, seen(picked, seq, size).repeat(group, 1))[0],
             harness.attention(qt, kt, vt, (np.arange(seq)[None] <= t) & (np.arange(seq)[None] > t - window))[0]]
    g = harness.wide(gates).transpose(0, 2, 1, 3)
    want = sum(g[..., i:i + 1] * view for i, view in enumerate(views))
    bound = 3 * harness.attention_bound(q, k, v, dtype)  # gates are at most 1
    return [*results, harness.compare("native sparse", got.transpose(0, 2, 1, 3), want, bound)]


if __name__ == "__main__":
    harness.main(check_selected, check)
