"""GEMM of few rows with a matrix whose rows are no multiples of 16 bytes: reads the matrix once, in whole words.

    matrix      words of a chunk of k, neighbours combined -> S, with rows at multiples of 16 bytes -> GEMM
    few rows    element by element -> X

The blocks of a cluster split k and add their partial sums through shared memory, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import tilelang.language as T

from .repack import Narrow

MOST_ROWS = 16
_THREADS, _SIDE = 128, 64
_UNDER_WAY = 32 * 1024  # bytes of words that an SM has in flight, in as few blocks as possible
# Seconds of a launch with its reduction (_START); of 64 columns of k in a block that is alone on its SM (_ALONE) or shares it
# (_SHARED); of the setup of each block on a shared SM (_OWN). _WIDER: what 8 more of the few rows add, as a fraction of a
# chunk. Measured on an H200; most estimates are within 14 %.
_START, _ALONE, _SHARED, _OWN, _WIDER = 2.4e-6, 0.5e-6, 0.36e-6, 0.3e-6, 0.1


@dataclass(frozen=True)
class FewRows(Narrow):
    """splits: blocks of a cluster that split k, at least two. deep: columns of k processed at a time, 64 or 128.

    A block computes _SIDE elements of C along the matrix.
    """

    splits: int = 2
    deep: int = 64

    @property
    def few(self) -> int:
        return int(self.f.m if self.of_b else self.f.n)

    @property
    def width(self) -> int:
        """Width of the tiles of C, along the few rows."""
        return ceil(self.few / 8) * 8

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) of the matrix in a chunk."""
        return (_SIDE, self.deep) if self.along else (self.deep, _SIDE)

    @property
    def by_group(self) -> tuple[int, int, int]:
        """How threads read the words of a tile: (rows of each group of threads, number of groups, which is even, words of a
        row)."""
        groups = 2 * _THREADS // self.tile[1]
        return self.tile[0] // groups, groups, self.tile[1] // 2

    def inside(self, k: Any) -> Any:
        """Whether all words that are read for a chunk of k lie in the matrix. One more word of a row is read than is needed."""
        return k + self.deep + 2 <= self.f.k if self.count >= _SIDE else False

    def start(self, block: Any) -> Any:
        """The first element of a block across k. The last block ends where the matrix ends."""
        return T.min(block * _SIDE, max(0, self.count - _SIDE))

    @property
    def k_inner(self) -> bool:
        """Whether k is contiguous in the few rows."""
        return bool(not self.f.ta if self.of_b else self.f.tb)

    @property
    def steps(self) -> int:
        return ceil(self.f.k / self.deep)

    @property
    def block_steps(self) -> int:
        """Number of steps of a block."""
        return ceil(self.steps / self.splits)

    def divided(self, sms: int) -> FewRows:
        """The same problem with the fewest splits that keep `_UNDER_WAY` bytes in flight on each SM.

        Two splits with chunks of 128 are used where they suffice: 16x8191x2047 takes 13.1 us, 14.2 with chunks of 64 in 2
        splits, 17.1 in 4 splits.
        """
        blocks = ceil(self.count / _SIDE)
        wanted = 0.95 * sms * _UNDER_WAY / (2 * _SIDE * blocks)  # columns of k
        if 2 * 128 >= wanted:
            return replace(self, splits=2, deep=128)
        most = replace(self, splits=min(8, ceil(wanted / 64)), deep=64)
        return replace(most, splits=max(2, ceil(most.steps / most.block_steps)))

    def seconds(self, sms: int) -> float:
        """Estimated seconds: of one block, or of all blocks that run on one SM."""
        blocks = self.splits * ceil(self.count / _SIDE)
        stretches = self.block_steps * self.deep / 64 * (1 + _WIDER * (self.width // 8 - 1))
        return _START + max(stretches * _ALONE, ceil(blocks / sms) * (_OWN + stretches * _SHARED))

    def place(self, at: Any, k: Any) -> tuple[Any, Any]:
        """(row, column) of the matrix."""
        return (at, k) if self.along else (k, at)


def _lanes(v: FewRows) -> Any:
    """How words are given to threads: neighbouring words to neighbouring threads, each of which reads all rows of its group."""
    return T.Fragment(v.by_group, forward_fn=lambda r, t, w: (t * v.by_group[2] + w, r))


@T.macro
def _fetch(v, given, at, first, own, ko, fetched):
    """Load the words of chunk `ko` of a block, two for each word that is made of them, and the few rows, if the block has that
    chunk.

    The words are not used before `_put`, because the first use of a loaded word waits for it.
    """
    if ko < own:
        M, source, few = given
        low, high, XF = fetched
        k = (first + ko) * v.deep
        row, column = v.place(at, k)
        if v.inside(k):
            for r, t, w in T.Parallel(*v.by_group, loop_layout=_lanes(v)):
                here = (((row + t) * v.r.down + column) >> 1) + w + r * (v.by_group[1] * v.r.down // 2)
                low[r, t, w] = source[here]
                high[r, t, w] = source[here + 1]
        else:
            for r, t, w in T.Parallel(*v.by_group, loop_layout=_lanes(v)):
                here = ((T.min(row + r * v.by_group[1] + t, v.r.rows - 1) * v.r.down + column) >> 1) + w
                low[r, t, w] = source[T.min(here, v.r.words - 1)]
                high[r, t, w] = source[T.min(here + 1, v.r.words - 1)]
        T.copy(few[(0, k) if v.k_inner else (k, 0)], XF)


@T.macro
def _put(v, M, at, k, fetched, S, X):
    """Store what was fetched to shared memory, with rows at multiples of 16 bytes. Elements behind k are zero.

    Elements outside the matrix across k may have any value, because no element of C depends on them. Rows of a thread have
    distances of whole words, so all are shifted by the same number of bits. The operand's last element may be in no whole word.
    """
    low, high, XF = fetched
    row, column = v.place(at, k)
    if v.inside(k):
        for r, t, w, h in T.Parallel(*v.by_group, 2):
            both = T.cast(high[r, t, w], "uint64") << 32 | T.cast(low[r, t, w], "uint64")
            word = T.cast(both >> T.cast((((row + t) * v.r.down + column) & 1) * 16, "uint64"), "uint32")
            S[r * v.by_group[1] + t, w * 2 + h] = T.reinterpret(T.cast(word >> (16 * h), "uint16"), v.r.element)
    else:
        for r, t, w, h in T.Parallel(*v.by_group, 2):
            first = T.min(row + r * v.by_group[1] + t, v.r.rows - 1) * v.r.down + column
            both = T.cast(high[r, t, w], "uint64") << 32 | T.cast(low[r, t, w], "uint64")
            word = T.cast(both >> T.cast((first & 1) * 16, "uint64"), "uint32")
            left = v.f.k - k - (2 * w + h if v.along else r * v.by_group[1] + t)
            S[r * v.by_group[1] + t, w * 2 + h] = T.reinterpret(T.if_then_else(
                left > 0, T.cast(word >> (16 * h), "uint16"), T.uint16(0)), v.r.element)
        if v.r.bytes % 4:
            if T.And(k + v.deep >= v.f.k, at + _SIDE >= v.count):
                for e in T.Parallel(1):
                    S[v.place(v.count - 1 - at, v.f.k - 1 - k + e)] = M[v.r.rows - 1, v.r.columns - 1]
    T.copy(XF, X)


def _room(v: FewRows, x_tile: tuple[int, int]) -> tuple[Any, Any, Any]:
    """The registers that `_fetch` loads to."""
    low, high = (T.alloc_fragment(v.by_group, "uint32") for _ in range(2))
    T.annotate_layout({low: _lanes(v), high: _lanes(v)})
    return low, high, T.alloc_fragment(x_tile, v.r.element)


@T.macro
def exchange_partials(splits, high, rank, S, R, there):
    """Add up the partial sums S of the blocks of a cluster: rows [q high, (q + 1) high) of every other block go to R of block
    q.

    A block copies nothing to itself: compute-sanitizer reports such a copy as outside the cluster.
    """
    for other in T.serial(1, splits):
        q = (rank + other) % splits
        T.copy_cluster(S[q * high:(q + 1) * high, :], R[rank, 0:high, :], dst_block=q, remote_barrier=there[0])
    T.mbarrier_arrive(there[0])
    T.mbarrier_wait_parity(there[0], 0)


def few_rows_gemm(v: FewRows) -> Any:
    """The kernel with the parameters (A, B, bias, sa, sb, C)."""
    f, splits, high = v.f, v.splits, ceil(_SIDE / v.splits)
    x_tile = (v.width, v.deep) if v.k_inner else (v.deep, v.width)

    @T.prim_func
    def matmul_few_rows(A: f.a(f.m), B: f.b, bias: f.bias_vector, sa: f.sa(f.m), sb: f.sb, C: f.c(f.m)):
        with T.ClusterKernel(splits, T.ceildiv(v.count, _SIDE), cluster_dims=(splits, 1, 1), threads=_THREADS) as (rank, bx):
            M, few = (B, A) if v.of_b else (A, B)
            given = M, T.make_tensor(M.data, (v.r.words,), "uint32"), few
            S, X = T.alloc_shared(v.tile, v.r.element), T.alloc_shared(x_tile, v.r.element)
            fetched = _room(v, x_tile)
            Cf = T.alloc_fragment((_SIDE, v.width), "float32")
            sums = T.alloc_shared((splits * high, v.width), "float32")
            R = T.alloc_shared((splits, high, v.width), "float32")
            there = T.alloc_cluster_barrier([_THREADS])
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(there[0], (splits - 1) * high * v.width * 4)
            T.clear(Cf)
            at, first = v.start(bx), rank * v.block_steps
            own = T.max(0, T.min(v.block_steps, v.steps - first))
            _fetch(v, given, at, first, own, 0, fetched)
            for ko in T.serial(own):
                _put(v, M, at, (first + ko) * v.deep, fetched, S, X)
                _fetch(v, given, at, first, own, ko + 1, fetched)
                T.gemm(S, X, Cf, transpose_A=not v.along, transpose_B=v.k_inner)
            for i, j in T.Parallel(splits * high - _SIDE, v.width):
                sums[_SIDE + i, j] = T.float32(0)
            for i, j in T.Parallel(_SIDE, v.width):
                sums[i, j] = Cf[i, j]
            exchange_partials(splits, high, rank, sums, R, there)
            total = T.alloc_fragment((v.width, high), "float32")
            T.clear(total)
            for p in T.unroll(splits):
                for q, i in T.Parallel(v.width, high):
                    total[q, i] += T.if_then_else(p == rank, sums[rank * high + i, q], R[p, i, q])
            for q, i in T.Parallel(v.width, high):
                n = at + rank * high + i
                if T.And(T.And(q < v.few, rank * high + i < _SIDE), T.And(n < v.count, n >= bx * _SIDE)):
                    C[(q, n) if v.of_b else (n, q)] = T.cast(
                        f.finish(total[q, i], bias, sa, sb, n if v.of_b else q), f.types[2])
            T.cluster_sync()

    return matmul_few_rows
