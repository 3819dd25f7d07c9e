"""The choice of experts, and hashes of n-grams."""

import numpy as np

import tilelang
import tilelang.language as T
from tilelang.utils.target import determine_target

from ..catalogue import EXACT, Program, drawn, integers, zeros
from .common import F32, I32, I64


@tilelang.jit(out_idx=[1, 2])
def topk_gate(experts, topk):
    """Top-k of each token in order of score, ties by the smaller index: one warp a token, all in registers."""
    tokens = T.dynamic("tokens")
    width = T.ceildiv(experts, 32) * 32

    @T.prim_func
    def main(
        score: T.Tensor[(tokens, experts), F32], index: T.Tensor[(tokens, topk), I64], value: T.Tensor[(tokens, topk), F32]
    ):
        with T.Kernel(tokens, threads=32) as pid:
            s = T.alloc_fragment((width,), F32)
            best = T.alloc_fragment((1,), F32)
            at = T.alloc_fragment((width,), I32)
            first = T.alloc_fragment((1,), I32)
            for i in T.Parallel(width):
                s[i] = T.if_then_else(i < experts, score[pid, i], -T.infinity(F32))
            for k in T.serial(topk):
                T.reduce_max(s, best)
                for i in T.Parallel(width):
                    at[i] = T.if_then_else(s[i] == best[0], i, 2147483647)
                T.reduce_min(at, first)
                for i in T.Parallel(width):
                    if i == first[0]:
                        s[i] = -T.infinity(F32)
                if T.get_thread_binding() == 0:
                    index[pid, k] = T.cast(first[0], "int64")
                    value[pid, k] = best[0]

    return main


def topk_gate_reference(topk):
    def reference(score):
        order = np.argsort(-score, axis=1, kind="stable")[:, :topk]
        return order, np.take_along_axis(score, order, 1)

    return reference


@tilelang.jit(out_idx=[-1])
def ngram_hash(n, sizes, multipliers):
    """Table indices of 2-grams and 3-grams, with 64-bit products that wrap, then a modulus."""
    tokens = T.dynamic("tokens")
    heads = len(sizes)

    @T.prim_func
    def main(ids: T.Tensor[(tokens,), I64], out: T.Tensor[(tokens, n - 1, heads), I64]):
        with T.Kernel(T.ceildiv(tokens, 64), threads=64) as pid:
            t = pid * 64 + T.get_thread_binding()
            mixed = T.alloc_var(I64, init=0)
            if t < tokens:
                mixed = ids[t] * T.int64(multipliers[0])
                for g in T.unroll(1, n):
                    previous = T.alloc_var(I64, init=0)
                    if t - g >= 0:
                        previous = ids[t - g]
                    mixed = mixed ^ (previous * T.if_then_else(g == 1, T.int64(multipliers[1]), T.int64(multipliers[2])))
                    for h in T.unroll(heads):
                        size = T.if_then_else(h == 0, T.int64(sizes[0]), T.int64(sizes[1]))
                        out[t, g - 1, h] = mixed % size

    return main


def ngram_hash_reference(ids, sizes=(1009, 4093), multipliers=(0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D, 0x1234567890ABCDF)):
    out = np.zeros((len(ids), 2, 2), np.int64)
    wrap = lambda v: (v + 2**63) % 2**64 - 2**63  # noqa: E731
    for t, token in enumerate(ids):
        mixed = wrap(int(token) * multipliers[0])
        for g in (1, 2):
            mixed ^= wrap((int(ids[t - g]) if t >= g else 0) * multipliers[g])
            out[t, g - 1] = [mixed % s for s in sizes]
    return out


@tilelang.jit
def group_count(groups, threads=128):
    """How many of the indices belong to each group: shared counters, then one atomic a group and block."""
    n = T.dynamic("n")
    assert determine_target("auto") is not None

    @T.prim_func
    def main(idx: T.Tensor[(n,), I64], out: T.Tensor[(groups,), I32]):
        with T.Kernel(T.ceildiv(n, 4 * threads), threads=threads) as pid:
            local = T.alloc_shared((groups,), I32)
            T.clear(local)
            for k in T.serial(4):
                i = (pid * 4 + k) * threads + T.get_thread_binding()
                if i < n:
                    g = T.cast(idx[i], I32)
                    if g >= 0:
                        T.atomic_add(local[g], 1)
            for g in T.Parallel(groups):
                if local[g] > 0:
                    T.atomic_add(out[g], local[g])

    return main


def group_count_reference(idx, out):
    return out + np.bincount(idx[idx >= 0], minlength=len(out))


@tilelang.jit
def unique_groups_inplace(topk, group_size, n_groups):
    """Replace expert indices by group indices, each group once a token, the rest -1 (a block-uniform early return)."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def main(idx: T.Tensor[(tokens, topk), I64], limit: T.int32):
        with T.Kernel(T.ceildiv(tokens, 32), threads=32) as pid:
            t = pid * 32 + T.get_thread_binding()
            if t >= tokens or t >= limit:
                T.thread_return()
            seen = T.alloc_local((n_groups,), "bool")
            for g in T.unroll(n_groups):
                seen[g] = False
            for k in T.serial(topk):
                e = idx[t, k]
                if e >= 0:
                    g = T.cast(e // group_size, I32)
                    if seen[g]:
                        idx[t, k] = -1
                    else:
                        idx[t, k] = T.cast(g, I64)
                        seen[g] = True

    return main


def unique_groups_inplace_reference(idx, limit):
    out = idx.copy()
    for t in range(min(limit, len(idx))):
        seen = set()
        for k, e in enumerate(idx[t]):
            if e >= 0:
                out[t, k] = -1 if e // 4 in seen else e // 4
                seen.add(e // 4)
    return out


HASH = dict(n=3, sizes=(1009, 4093), multipliers=(0x9E3779B97F4A7C1, 0x2545F4914F6CDD1D, 0x1234567890ABCDF))

PROGRAMS = [
    Program(
        "topk_gate",
        topk_gate,
        dict(experts=50, topk=4),
        drawn(lambda g: g.integers(0, 20, (6, 50)).astype(np.float32)),
        topk_gate_reference(4),
        EXACT,
    ),
    Program("ngram_hash", ngram_hash, HASH, drawn(integers((100,), 0, 2**31, "int64")), ngram_hash_reference, EXACT),
    Program(
        "group_count",
        group_count,
        dict(groups=20),
        drawn(integers((700,), -1, 20, "int64"), zeros((20,), I32)),
        group_count_reference,
        EXACT,
        changed=(1,),
    ),
    Program(
        "unique_groups_inplace",
        unique_groups_inplace,
        dict(topk=5, group_size=4, n_groups=4),
        drawn(integers((50, 5), -1, 16, "int64"), 45),
        unique_groups_inplace_reference,
        EXACT,
        changed=(0,),
    ),
]
