"""Fused experts: a token goes through the k experts chosen for it, y = sum of w_e * down_e(silu(gate_e x) * up_e x).

Tokens are not moved: `order` lists the (token, choice) pairs sorted by expert, each expert's part filled up to whole tiles,
and a tile of rows gathers its tokens through that list.  So every tile belongs to one expert, whose number it reads from
`expert_of`; the grid is made for the most tiles there can be, and tiles past the last run loops of no iterations.

up_kernel    two products with one gathered tile of tokens, silu(gate) * up, stored in the sorted order;
down_kernel  one product, multiplied by the routing weight and added to the token's row with atomics.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from harness import EPS, HERE, Comparison, Place, compare, main, normal, wide

import tilelang.language as T


def experts_up(tokens: int, dim: int, hidden: int, experts: int, slots: int, k: int, bm: int = 64, bn: int = 128, bk: int = 64,
               dtype: str = "float16"):
    """X: (tokens, dim); W: (experts, 2 hidden, dim), rows of gate, then of up; order: (slots,) pair numbers, -1 where there
    is none; expert_of: (slots / bm,), -1 past the last tile; H: (slots, hidden)."""
    @T.prim_func
    def up_kernel(X: T.Tensor((tokens, dim), dtype), W: T.Tensor((experts, 2 * hidden, dim), dtype),
                  order: T.Tensor((slots,), "int32"), expert_of: T.Tensor((slots // bm,), "int32"),
                  H: T.Tensor((slots, hidden), dtype)):
        with T.Kernel(T.ceildiv(hidden, bn), slots // bm, threads=128) as (bx, by):
            Xs = T.alloc_shared((bm, bk), dtype)
            Gs = T.alloc_shared((bn, bk), dtype)
            Us = T.alloc_shared((bn, bk), dtype)
            pair = T.alloc_shared((bm,), "int32")
            gate = T.alloc_fragment((bm, bn), "float32")
            up = T.alloc_fragment((bm, bn), "float32")
            e = T.max(expert_of[by], 0)
            steps = T.if_then_else(expert_of[by] >= 0, T.ceildiv(dim, bk), 0)
            T.copy(order[by * bm], pair)
            T.clear(gate)
            T.clear(up)
            for ko in T.Pipelined(steps, num_stages=2):
                for i, j in T.Parallel(bm, bk):
                    Xs[i, j] = T.if_then_else(pair[i] >= 0, X[pair[i] // k, ko * bk + j], 0)
                T.copy(W[e, bx * bn, ko * bk], Gs)
                T.copy(W[e, hidden + bx * bn, ko * bk], Us)
                T.gemm(Xs, Gs, gate, transpose_B=True)
                T.gemm(Xs, Us, up, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                gate[i, j] = gate[i, j] / (1 + T.exp(-gate[i, j])) * up[i, j]
            T.copy(gate, H[by * bm, bx * bn])

    return up_kernel


def experts_down(tokens: int, dim: int, hidden: int, experts: int, slots: int, k: int, bm: int = 64, bn: int = 128,
                 bk: int = 64, dtype: str = "float16"):
    """W: (experts, dim, hidden); weights: (tokens, k) float32; Y: (tokens, dim) float32, zero before the call."""
    @T.prim_func
    def down_kernel(H: T.Tensor((slots, hidden), dtype), W: T.Tensor((experts, dim, hidden), dtype),
                    weights: T.Tensor((tokens, k), "float32"), order: T.Tensor((slots,), "int32"),
                    expert_of: T.Tensor((slots // bm,), "int32"), Y: T.Tensor((tokens, dim), "float32")):
        with T.Kernel(T.ceildiv(dim, bn), slots // bm, threads=128) as (bx, by):
            Hs = T.alloc_shared((bm, bk), dtype)
            Ws = T.alloc_shared((bn, bk), dtype)
            pair = T.alloc_shared((bm,), "int32")
            y = T.alloc_fragment((bm, bn), "float32")
            e = T.max(expert_of[by], 0)
            steps = T.if_then_else(expert_of[by] >= 0, T.ceildiv(hidden, bk), 0)
            T.copy(order[by * bm], pair)
            T.clear(y)
            for ko in T.Pipelined(steps, num_stages=2):
                T.copy(H[by * bm, ko * bk], Hs)
                T.copy(W[e, bx * bn, ko * bk], Ws)
                T.gemm(Hs, Ws, y, transpose_B=True)
            for i, j in T.Parallel(bm, bn):
                if pair[i] >= 0 and bx * bn + j < dim:
                    T.atomic_add(Y[pair[i] // k, bx * bn + j], y[i, j] * weights[pair[i] // k, pair[i] % k])

    return down_kernel


def sort_by_expert(chosen: np.ndarray, experts: int, bm: int) -> tuple[np.ndarray, np.ndarray]:
    """order and expert_of for (tokens, k) choices, as gating.py's `places` makes them on the device."""
    flat = chosen.ravel()
    tiles = -(-flat.size // bm) + experts  # each expert wastes less than a tile
    order, expert_of = np.full(tiles * bm, -1, np.int32), np.full(tiles, -1, np.int32)
    at = 0
    for e in range(experts):
        pairs = np.flatnonzero(flat == e)
        used = -(-pairs.size // bm)
        order[at * bm:at * bm + pairs.size], expert_of[at:at + used] = pairs, e
        at += used
    return order, expert_of


def check(tokens: int = 4096, dim: int = 1024, hidden: int = 1024, experts: int = 16, k: int = 4,
          on: Place = HERE) -> Comparison:
    """The inner activations are rounded to float16 once; silu(g) * u passes errors of g and u on by at most
    1.1 |u| and |silu(g)|."""
    rng = np.random.default_rng(0)
    x = normal((tokens, dim), "float16")
    w1 = (normal((experts, 2 * hidden, dim), "float32", 1) * dim**-0.5).astype(np.float16)
    w2 = (normal((experts, dim, hidden), "float32", 2) * hidden**-0.5).astype(np.float16)
    chosen = rng.random((tokens, experts)).argsort(1)[:, :k].astype(np.int32)
    weights = rng.dirichlet(np.ones(k), tokens).astype(np.float32)
    order, expert_of = sort_by_expert(chosen, experts, 64)
    sizes = (tokens, dim, hidden, experts, order.size, k)
    y = np.zeros((tokens, dim), np.float32)
    h = on.compile(experts_up(*sizes), out_idx=[4])(x, w1, order, expert_of)
    on.compile(experts_down(*sizes))(h, w2, weights, order, expert_of, y)

    want, bound = np.zeros((tokens, dim)), np.zeros((tokens, dim))
    f32 = EPS["float32"]
    for e in range(experts):
        rows, choice = np.nonzero(chosen == e)
        if not rows.size:
            continue
        xe, up, down = wide(x[rows]), wide(w1[e]).T, wide(w2[e]).T
        gu, size = xe @ up, np.sqrt(xe**2 @ up**2)  # roundings of a sum of independent terms grow with its deviation
        g, u = gu[:, :hidden], gu[:, hidden:]
        silu = g / (1 + np.exp(-g))
        act = silu * u
        off = 4 * f32 * dim**0.5 * (1.1 * abs(u) * size[:, :hidden] + abs(silu) * size[:, hidden:])
        off = off + (EPS["float16"] + 16 * f32) * abs(act) + 2.0**-25
        share = wide(weights)[rows, choice][:, None]
        # Roundings of different activations are independent: they add up like the root of their squares.
        moved = 4 * np.sqrt(off**2 @ down**2) + 4 * f32 * hidden**0.5 * np.sqrt(act**2 @ down**2)
        want[rows] += np.asarray(share * (act @ down))
        bound[rows] += np.asarray(share * moved)
    return compare("moe experts", y, want, bound + (k + 2) * f32 * abs(want) + 1e-30)


if __name__ == "__main__":
    main(check)
