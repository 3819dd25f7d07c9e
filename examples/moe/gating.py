"""Routing of a mixture of experts: which experts see a token, with what weight, and where it stands in their queues.

gate      softmax over the experts of a token, then the k largest with their weights made to sum to one.
count     how many tokens each expert gets: counted in shared memory by each block, then added up in global memory.
places    the position of every (token, choice) in an array sorted by expert.  Starts of experts are the running sum of
          the counts; atomics hand out the positions within one, so tokens of an expert come in any order.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def gate(tokens: int, experts: int, k: int, rows: int = 16):
    """logits: (tokens, experts) float32; weights: (tokens, k) float32; chosen: (tokens, k) int32."""
    @T.prim_func
    def program(logits: T.Tensor((tokens, experts), "float32"), weights: T.Tensor((tokens, k), "float32"),
                chosen: T.Tensor((tokens, k), "int32")):
        with T.Kernel(T.ceildiv(tokens, rows), threads=128) as bx:
            x = T.alloc_fragment((rows, experts), "float32")
            at = T.alloc_fragment((rows, experts), "int32")
            first = T.alloc_fragment((rows,), "float32")
            top = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            column = T.alloc_fragment((rows,), "int32")
            picked = T.alloc_shared((rows, k), "float32")
            T.copy(logits[bx * rows, 0], x)
            T.reduce_max(x, first, dim=1)
            T.clear(total)
            for r in T.serial(k):
                T.reduce_max(x, top, dim=1)
                for i, j in T.Parallel(rows, experts):
                    at[i, j] = T.if_then_else(x[i, j] == top[i], j, experts)
                T.reduce_min(at, column, dim=1)
                for i, j in T.Parallel(rows, experts):
                    x[i, j] = T.if_then_else(j == column[i], -T.infinity("float32"), x[i, j])
                for i in T.Parallel(rows):
                    picked[i, r] = T.exp(top[i] - first[i])  # the softmax's own sum cancels in the quotient below
                    total[i] = total[i] + T.exp(top[i] - first[i])
                    chosen[bx * rows + i, r] = column[i]
            for i, r in T.Parallel(rows, k):
                weights[bx * rows + i, r] = picked[i, r] / total[i]

    return program


def count(n: int, experts: int, block: int = 1024):
    """chosen: (n,) int32, all choices in a row; counts: (experts,) int32, zero before the call."""
    @T.prim_func
    def program(chosen: T.Tensor((n,), "int32"), counts: T.Tensor((experts,), "int32")):
        with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
            own = T.alloc_shared((experts,), "int32")
            T.clear(own)
            for i in T.Parallel(block):
                if bx * block + i < n:
                    T.atomic_add(own[chosen[bx * block + i]], 1)
            for e in T.Parallel(experts):
                T.atomic_add(counts[e], own[e])

    return program


def places(n: int, experts: int, block: int = 1024):
    """starts: (experts,), the running sums; used: (experts,), zero before the call; place: (n,) int32."""
    @T.prim_func
    def program(counts: T.Tensor((experts,), "int32"), chosen: T.Tensor((n,), "int32"),
                used: T.Tensor((experts,), "int32"), starts: T.Tensor((experts,), "int32"),
                place: T.Tensor((n,), "int32")):
        with T.Kernel(1, threads=128):
            c = T.alloc_shared((experts,), "int32")
            T.copy(counts, c)
            T.cumsum(c)
            for e in T.Parallel(experts):
                starts[e] = c[e] - counts[e]
        with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
            for i in T.Parallel(block):
                if bx * block + i < n:
                    e = chosen[bx * block + i]
                    place[bx * block + i] = starts[e] + T.atomic_add(used[e], 1, return_prev=True)

    return program


def check_gate(tokens: int = 4099, experts: int = 64, k: int = 6, on: Place = HERE) -> list[Comparison]:
    """The choice is exact; exp's error grows with the difference of logits, the sum has k terms."""
    x = normal((tokens, experts))
    order = np.argsort(-x, 1, kind="stable")[:, :k]
    e = np.exp(np.take_along_axis(wide(x), order, 1) - wide(x).max(1, keepdims=True))
    weights, chosen = on.compile(gate(tokens, experts, k), out_idx=[1, 2])(x)
    want = e / e.sum(1, keepdims=True)
    return [compare("moe choices", chosen, order),
            compare("moe weights", weights, want, EPS["float32"] * (8 + 4 * abs(x).max() + k) * want)]


def check_places(tokens: int = 10_000, experts: int = 64, k: int = 6, on: Place = HERE) -> list[Comparison]:
    """Every place is used once, and lies in its expert's range: sorting by place sorts by expert."""
    n = tokens * k
    chosen = np.random.default_rng(0).integers(0, experts, n).astype(np.int32)
    counts, used = np.zeros(experts, np.int32), np.zeros(experts, np.int32)
    on.compile(count(n, experts))(chosen, counts)
    starts, place = on.compile(places(n, experts), out_idx=[3, 4])(counts, chosen, used)
    want = np.bincount(chosen, minlength=experts)
    return [compare("moe counts", counts, want), compare("moe starts", starts, np.cumsum(want) - want),
            compare("moe places, each once", np.sort(place), np.arange(n)),
            compare("moe places, by expert", chosen[np.argsort(place)], np.sort(chosen))]


if __name__ == "__main__":
    main(check_gate, check_places)
