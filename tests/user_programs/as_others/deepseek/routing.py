"""Gates of experts, top-k by threshold, and Sinkhorn's iteration."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, uniform, wide
from .common import F32, FAST, I32


@tilelang.jit(out_idx=[3, 4, 5], pass_configs=FAST)
def split_sinkhorn(hc, iters, eps):
    n = T.symbolic("n")
    mix = (2 + hc) * hc
    threads = 64

    @T.prim_func
    def split_sinkhorn_(
        mixes: T.Tensor[(n, mix), F32],
        hc_scale: T.Tensor[(3,), F32],
        hc_base: T.Tensor[(mix,), F32],
        pre: T.Tensor[(n, hc), F32],
        post: T.Tensor[(n, hc), F32],
        comb: T.Tensor[(n, hc, hc), F32],
    ):
        with T.Kernel(n, threads=threads) as i:
            mixes_shared = T.alloc_shared(mix, F32)
            comb_frag = T.alloc_fragment((hc, hc), F32)
            T.copy(mixes[i, :], mixes_shared)
            for j in T.Parallel(hc):
                pre[i, j] = T.sigmoid(mixes_shared[j] * hc_scale[0] + hc_base[j]) + eps
            for j in T.Parallel(hc):
                post[i, j] = 2 * T.sigmoid(mixes_shared[j + hc] * hc_scale[1] + hc_base[j + hc])
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = mixes_shared[j * hc + k + hc * 2] * hc_scale[2] + hc_base[j * hc + k + hc * 2]
            row_sum = T.alloc_fragment(hc, F32)
            col_sum = T.alloc_fragment(hc, F32)
            row_max = T.alloc_fragment(hc, F32)
            T.reduce_max(comb_frag, row_max, dim=1)
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = T.exp(comb_frag[j, k] - row_max[j])
            T.reduce_sum(comb_frag, row_sum, dim=1)
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = comb_frag[j, k] / row_sum[j] + eps
            T.reduce_sum(comb_frag, col_sum, dim=0)
            for j, k in T.Parallel(hc, hc):
                comb_frag[j, k] = comb_frag[j, k] / (col_sum[k] + eps)
            for _ in T.serial(iters - 1):
                T.reduce_sum(comb_frag, row_sum, dim=1)
                for j, k in T.Parallel(hc, hc):
                    comb_frag[j, k] = comb_frag[j, k] / (row_sum[j] + eps)
                T.reduce_sum(comb_frag, col_sum, dim=0)
                for j, k in T.Parallel(hc, hc):
                    comb_frag[j, k] = comb_frag[j, k] / (col_sum[k] + eps)
            T.copy(comb_frag, comb[i, 0, 0])

    return split_sinkhorn_


def split_sinkhorn_reference(iters, eps, hc=4):
    def reference(mixes, scale, base):
        mixes, scale, base = wide(mixes, scale, base)
        z = mixes * np.repeat(scale, [hc, hc, hc * hc]) + base
        pre, post = 1 / (1 + np.exp(-z[:, :hc])) + eps, 2 / (1 + np.exp(-z[:, hc : 2 * hc]))
        c = np.exp(z[:, 2 * hc :].reshape(-1, hc, hc))
        c = c / c.sum(2, keepdims=True) + eps
        c = c / (c.sum(1, keepdims=True) + eps)
        for _ in range(iters - 1):
            c = c / (c.sum(2, keepdims=True) + eps)
            c = c / (c.sum(1, keepdims=True) + eps)
        return pre, post, c

    return reference


@tilelang.jit(out_idx=[-1])
def topk_threshold(n, topk, bins=256, threads=256):
    """The indices of the topk greatest scores: one pass of a histogram over the order-preserving top byte, then the tie bin."""
    rows = T.dynamic("rows")

    @T.prim_func
    def topk_threshold_(scores: T.Tensor((rows, n), F32), index: T.Tensor((rows, topk), I32)):
        with T.Kernel(rows, threads=threads) as row:
            tx = T.get_thread_binding()
            hist = T.alloc_shared((bins + 1,), I32)
            count = T.alloc_shared((2,), I32)
            threshold = T.alloc_shared((1,), I32)
            ties = T.alloc_shared((n,), I32)
            key = T.alloc_var("int32")
            place = T.alloc_var("int32")
            T.fill(hist, 0)
            T.fill(count, 0)
            for s in T.serial(T.ceildiv(n, threads)):
                i = s * threads + tx
                if i < n:
                    bits = T.reinterpret("int32", scores[row, i])
                    key = T.if_then_else(bits >= 0, bits ^ T.int32(-2147483648), ~bits)
                    T.atomic_add(hist[(key >> 24) & 0xFF], 1)
            T.sync_threads()
            T.cumsum(hist[0:bins], reverse=True)
            if tx < bins:
                if hist[tx] >= topk and hist[tx + 1] < topk:
                    threshold[0] = tx
            T.sync_threads()
            for s in T.serial(T.ceildiv(n, threads)):
                i = s * threads + tx
                if i < n:
                    bits = T.reinterpret("int32", scores[row, i])
                    key = (T.if_then_else(bits >= 0, bits ^ T.int32(-2147483648), ~bits) >> 24) & 0xFF
                    if key > threshold[0]:
                        place = T.atomic_add(count[0], 1, return_prev=True)
                        index[row, place] = i
                    elif key == threshold[0]:
                        place = T.atomic_add(count[1], 1, return_prev=True)
                        ties[place] = i
            T.sync_threads()
            for s in T.serial(T.ceildiv(n, threads)):
                t = s * threads + tx
                if t < count[1]:
                    rank = T.alloc_var("int32", init=0)
                    for u in T.serial(count[1]):
                        mine = scores[row, ties[t]]
                        other = scores[row, ties[u]]
                        if other > mine or (other == mine and ties[u] < ties[t]):
                            rank += 1
                    if count[0] + rank < topk:
                        index[row, count[0] + rank] = ties[t]

    return topk_threshold_


@tilelang.jit(out_idx=[2, 3], pass_configs=FAST)
def gate(n_experts, n_groups, top_groups, topk, route_scale=2.5):
    tokens = T.symbolic("tokens")
    per_group = n_experts // n_groups

    @T.prim_func
    def gate_(
        logits: T.Tensor[(tokens, n_experts), F32],
        bias: T.Tensor[(n_experts,), F32],
        weights: T.Tensor[(tokens, topk), F32],
        experts: T.Tensor[(tokens, topk), I32],
    ):
        with T.Kernel(tokens, threads=32) as t:
            score = T.alloc_fragment((n_groups, per_group), F32)
            biased = T.alloc_shared((n_groups, per_group), F32)
            best = T.alloc_fragment((n_groups,), F32)
            plain = T.alloc_shared((n_experts,), F32)
            for g, e in T.Parallel(n_groups, per_group):
                score[g, e] = T.sigmoid(logits[t, g * per_group + e])
                plain[g * per_group + e] = score[g, e]
                score[g, e] += bias[g * per_group + e]
                biased[g, e] = score[g, e]
            T.reduce_max(score, best, dim=1)
            group_score = T.alloc_shared((n_groups,), F32)
            T.copy(best, group_score)
            lane = T.get_lane_idx()
            if lane < n_groups:
                better = T.alloc_var("int32", init=0)
                for g in T.serial(n_groups):
                    if group_score[g] > group_score[lane] or (group_score[g] == group_score[lane] and g < lane):
                        better += 1
                if better >= top_groups:
                    for e in T.serial(per_group):
                        biased[lane, e] = -T.infinity(F32)
            T.sync_threads()
            total = T.alloc_var("float32", init=0.0)
            chosen_e = T.alloc_local((topk,), I32)
            for k in T.serial(topk):
                value = T.alloc_var("float32", init=-T.infinity(F32))
                where = T.alloc_var("int32", init=0)
                for e in T.serial(T.ceildiv(n_experts, 32)):
                    c = e * 32 + lane
                    if c < n_experts:
                        if biased[c // per_group, c % per_group] > value:
                            value = biased[c // per_group, c % per_group]
                            where = c
                for s in T.unroll(5):
                    v2 = T.shfl_xor(value, 16 >> s)
                    w2 = T.shfl_xor(where, 16 >> s)
                    if v2 > value or (v2 == value and w2 < where):
                        value = v2
                        where = w2
                chosen_e[k] = where
                total += plain[where]
                T.sync_threads()
                if lane == 0:
                    biased[where // per_group, where % per_group] = -T.infinity(F32)
                T.sync_threads()
            for k in T.serial(topk):
                if lane == k:
                    experts[t, k] = chosen_e[k]
                    weights[t, k] = plain[chosen_e[k]] / total * route_scale

    return gate_


def gate_reference(n_groups, top_groups, topk):
    def reference(logits, bias):
        logits, bias = wide(logits, bias)
        plain = 1 / (1 + np.exp(-logits))
        biased = (plain + bias).reshape(len(logits), n_groups, -1)
        order = np.argsort(-biased.max(2), axis=1)
        for t in range(len(logits)):
            biased[t, order[t, top_groups:]] = -np.inf
        chosen = np.argsort(-biased.reshape(len(logits), -1), axis=1)[:, :topk]
        w = np.take_along_axis(plain, chosen, 1)
        return w / w.sum(1, keepdims=True) * 2.5, chosen

    return reference


def topk_inputs(rows, n):
    return lambda g: [np.stack([g.permutation(n) for _ in range(rows)]).astype(np.float32) / n - 0.5]


PROGRAMS = [
    Program(
        "split_sinkhorn",
        split_sinkhorn,
        dict(hc=4, iters=6, eps=1e-6),
        drawn(uniform((9, 24)), uniform((3,)), uniform((24,))),
        split_sinkhorn_reference(6, 1e-6),
        Bound(F32, 96, 1.0),
    ),
    Program(
        "topk_threshold",
        topk_threshold,
        dict(n=300, topk=40),
        topk_inputs(3, 300),
        lambda s: np.sort(np.argsort(-s, axis=1)[:, :40], axis=1),
        EXACT,
        arrange=lambda results: [np.sort(results[0], axis=1)],
    ),
    Program(
        "gate",
        gate,
        dict(n_experts=48, n_groups=4, top_groups=2, topk=6),
        drawn(uniform((7, 48), F32, -3, 3), uniform((48,))),
        gate_reference(4, 2, 6),
        (Bound(F32, 8, 2.5), EXACT),
    ),
]
