"""Sampling and penalties."""

import numpy as np

import tilelang
import tilelang.language as T

from ..catalogue import EXACT, Bound, Program, drawn, integers, uniform, wide
from .common import F32, I32


@tilelang.jit
def top_p_sample(probs, top_p, uniform_number, block: int = 256):
    """The token at which the sum of the probabilities above a pivot passes a uniform number; the pivot by bisection."""
    rows = T.dynamic("rows")
    V = T.const("V")
    probs: T.Tensor((rows, V), F32)
    top_p: T.Tensor((rows,), F32)
    uniform_number: T.Tensor((rows,), F32)
    token = T.empty((rows,), I32)
    kept = T.empty((rows,), F32)
    with T.Kernel(rows, threads=block) as r:
        p = T.alloc_shared((V,), F32)
        low = T.alloc_var(F32, init=0.0)
        high = T.alloc_var(F32, init=1.0)
        T.copy(probs[r, 0], p)
        f = T.alloc_fragment((V,), F32)
        s = T.alloc_fragment((1,), F32)
        for _ in T.serial(24):
            mid = (low + high) * 0.5
            for i in T.Parallel(V):
                f[i] = T.if_then_else(p[i] >= mid, p[i], 0.0)
            T.reduce_sum(f, s)
            if s[0] >= top_p[r]:
                low = mid
            else:
                high = mid
        for i in T.Parallel(V):
            p[i] = T.if_then_else(p[i] >= low, p[i], 0.0)
        T.cumsum(p, dim=0)
        at = T.alloc_reducer((1,), I32, op="min")
        where = T.alloc_fragment((1,), I32)
        T.reducer_init(at)
        for i in T.Parallel(V):
            if p[i] > uniform_number[r] * p[V - 1]:
                T.reducer_update(at[0], i)
        T.finalize_reducer(at, where)
        if T.get_thread_binding() == 0:
            token[r] = where[0]
            kept[r] = p[V - 1]
    return token, kept


def top_p_sample_reference(probs, top_p, u):
    (probs,) = wide(probs)
    tokens, kept = [], []
    for p, limit, x in zip(probs, top_p, u):
        order = np.sort(p)[::-1]
        pivot = order[np.searchsorted(np.cumsum(order), limit)]
        q = np.cumsum(np.where(p >= pivot, p, 0))
        tokens.append(np.argmax(q > x * q[-1]))
        kept.append(q[-1])
    return np.array(tokens), np.array(kept)


def top_p_inputs(g):
    p = np.stack([g.permutation(np.arange(1, 129)) for _ in range(4)]).astype(np.float64)
    p = (p / p.sum(1, keepdims=True)).astype(np.float32)
    return [p, np.array([0.3, 0.5, 0.71, 0.9], np.float32), np.array([0.1, 0.55, 0.313, 0.97], np.float32)]


@tilelang.jit
def penalties(logits, tokens, frequency: T.float32, presence: T.float32, repetition: T.float32 = 1.0):
    """Counts of each row's tokens in shared memory, then all three penalties in place."""
    rows, n = T.dynamic("rows, n")
    V = T.const("V")
    logits: T.Tensor((rows, V), F32)
    tokens: T.Tensor((rows, n), I32)
    with T.Kernel(rows, threads=128) as r:
        count = T.alloc_shared((V,), I32)
        T.fill(count, 0)
        for i in T.Parallel(n):
            if tokens[r, i] >= 0:
                T.atomic_add(count[tokens[r, i]], 1)
        for v in T.Parallel(V):
            if count[v] > 0:
                x = logits[r, v] - frequency * T.cast(count[v], F32) - presence
                logits[r, v] = T.if_then_else(x > 0, x / repetition, x * repetition)


def penalties_reference(logits, tokens, frequency, presence, repetition):
    (logits,) = wide(logits)
    for row, seen in zip(logits, tokens):
        count = np.bincount(seen[seen >= 0], minlength=len(row))
        x = row - np.float32(frequency) * count - presence
        row[:] = np.where(count > 0, np.where(x > 0, x / repetition, x * repetition), row)
    return logits


PROGRAMS = [
    Program("top_p_sample", top_p_sample, dict(V=128), top_p_inputs, top_p_sample_reference, (EXACT, Bound(F32, 128, 1.0))),
    Program(
        "penalties",
        penalties,
        dict(V=200),
        drawn(uniform((3, 200), low=-4, high=4), integers((3, 50), -1, 200), 0.3, 0.2, 1.25),
        penalties_reference,
        Bound(F32, 8, 16.0),
        changed=(0,),
    ),
]
