"""Random programs of several ranks: both simulators agree with NumPy, under schedules chosen at random."""

import random

import numpy as np
import pytest

import tilelang.language as T
from tilelang.simulator import run_device_ranks, run_tile_ranks
from tilelang.target import Target
from tilelang.transform.pipeline import lower

N, TILE, BLOCKS, THREADS = 128, 32, 2, 32
PROGRAMS, OFTEN = 330, 24  # programs, and how many of them run each time


@T.macro
def bump(S, start, count, factor, add):
    for i in T.Parallel(count):
        S[start + i] = S[start + i] * factor + add


class Case:
    """A program of steps, each between two barriers of the ranks: (kind, how far the other rank is, from, to, elements)."""

    def __init__(self, seed):
        r = random.Random(seed)
        self.ranks, self.steps, self.seed = r.choice((2, 2, 3, 4, 8) if seed % 10 == 0 else (2, 2, 3, 4)), [], r.randrange(1000)
        self.dtype, self.arch = r.choice(("int32", "float32", "float16")), r.choice(("sm_80", "sm_90a"))
        for _ in range(r.randint(1, 4)):
            kind = r.choice(("put", "get", "put_block", "get_warp", "send", "bump", "sum"))
            if kind == "sum" and any(s[0] == "sum" for s in self.steps):
                kind = "bump"  # sums stay exact
            count = TILE if kind == "sum" else r.choice((TILE, TILE, 16, 7, 20))
            self.steps.append((kind, r.randrange(self.ranks), r.randrange(N // BLOCKS - count + 1),
                               r.randrange(N // BLOCKS - count + 1), count))

    def program(self):
        steps, dtype, half, ranks = self.steps, self.dtype, N // BLOCKS, self.ranks

        def step(P, X, S, F, Q, box, b, k):
            kind, shift, source, to, count = steps[k]
            peer, a, d = (T.get_rank() + shift) % T.get_num_ranks(), b * half + source, b * half + to
            if kind in ("put", "send"):
                T.copy(X[a:a + count], T.remote(S, peer)[d:d + count])
            elif kind == "get":
                T.copy(T.remote(X, peer)[a:a + count], S[d:d + count])
            elif kind == "put_block":
                T.put_block(X[a], S[d], count, dst_pe=peer)
            elif kind == "get_warp":
                T.get_warp(X[a], S[d], count, src_pe=peer)
            elif kind == "sum":
                tile = T.alloc_fragment((TILE,), dtype)
                T.copy(X[a:a + count], tile)
                with T.Scale("node", box=box, pad=Q, block=b) as node:
                    node.all_reduce(tile)
                T.copy(tile, X[a:a + count])
            else:
                bump(X, a, count, 2, 1)
            if kind == "send":  # seen by the receiver before the barrier, and added to what it has
                T.signal(F[b, k], rank=peer)
                T.wait_eq(F[b, k], 1)
                bump(S, d, count, 1, 3)
            T.barrier_all(P[b, 0:16])

        @T.prim_func
        def main(P: T.SymmTensor((BLOCKS, 16), "int64"), X: T.SymmTensor((N,), dtype), S: T.SymmTensor((N,), dtype),
                 F: T.SymmTensor((BLOCKS, 4), "int32"), Q: T.SymmTensor((BLOCKS, 2 * ranks), "int64"),
                 box: T.SymmTensor((BLOCKS, 2, ranks, TILE), dtype)):
            with T.Kernel(BLOCKS, threads=THREADS) as b:
                step(P, X, S, F, Q, box, b, 0)
                if len(steps) > 1:
                    step(P, X, S, F, Q, box, b, 1)
                if len(steps) > 2:
                    step(P, X, S, F, Q, box, b, 2)
                if len(steps) > 3:
                    step(P, X, S, F, Q, box, b, 3)

        return main

    def args(self):
        r = np.random.default_rng(self.seed)
        numbers = lambda: r.integers(0, 9, N).astype(self.dtype)  # noqa: E731
        return [[np.zeros((BLOCKS, 16), np.int64), numbers(), numbers(), np.zeros((BLOCKS, 4), np.int32),
                 np.zeros((BLOCKS, 2 * self.ranks), np.int64), np.zeros((BLOCKS, 2, self.ranks, TILE), self.dtype)]
                for _ in range(self.ranks)]

    def expected(self):
        """X and S of each rank."""
        x, s = ([a[k].copy() for a in self.args()] for k in (1, 2))
        for kind, shift, source, to, count in self.steps:
            for b in range(BLOCKS):
                a, d = (slice(b * N // BLOCKS + k, b * N // BLOCKS + k + count) for k in (source, to))
                total = sum(own[a] for own in x)
                for me in range(self.ranks):
                    peer = (me + shift) % self.ranks
                    if kind in ("put", "send", "put_block"):
                        s[peer][d] = x[me][a] + (3 if kind == "send" else 0)
                    elif kind == "sum":
                        x[me][a] = total
                    elif kind == "bump":
                        x[me][a] = x[me][a] * 2 + 1
                    else:
                        s[me][d] = x[peer][a]
        return x, s


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[pytest.mark.slow] if k >= OFTEN else []) for k in range(PROGRAMS)])
def test_random_programs_of_several_ranks(seed):
    case = Case(seed)
    program, (x, s) = case.program(), case.expected()
    tile = run_tile_ranks(program, case.args(), seed=seed % 3 or None)
    lowered = lower(program.func, Target({"kind": "cuda", "arch": case.arch}))
    device = [r.outputs for r in run_device_ranks(lowered, case.args(), seed=seed % 4 or None)]
    for r in range(case.ranks):
        for out in (tile[r], device[r]):
            assert np.array_equal(out["X"], x[r]) and np.array_equal(out["S"], s[r]), (seed, case.steps)
