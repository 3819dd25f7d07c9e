"""A few rows times a matrix whose rows are no multiples of 16 bytes: one pass over the matrix, in whole words.

    matrix      words of a stretch of k, each two neighbours put together -> S, rows at multiples of 16 bytes -> products
    few rows    element by element -> X

k is shared out over the blocks of a cluster, which add their sums, always in the same order, through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import tilelang.language as T

from .repack import Rows

MOST_ROWS = 16
_THREADS = 128
# Seconds of a launch; of a stretch of k in a block; of how many blocks a multiprocessor does at the time of one.
_START, _STRETCH, _BLOCKS = 2.8e-6, {64: 0.62e-6, 128: 1.1e-6}, {64: 1.6, 128: 1.7}


@dataclass(frozen=True)
class FewRows:
    """C of a Form `f` with few rows or columns, the rows of whose other operand are r, k shared out over `parts` blocks of a
    cluster, of which there are at least two.

    side: elements of C along the matrix that a block computes.  deep: of k at a time, even.  ahead: stretches of k, 1 or 2, whose
    words are under way at a time.
    """

    f: Any
    r: Rows
    parts: int = 2
    side: int = 64
    deep: int = 128
    ahead: int = 1

    @property
    def of_b(self) -> bool:
        """Whether B is the matrix."""
        return bool(self.f.m <= self.f.n)

    @property
    def along(self) -> bool:
        """Whether k lies along the matrix's rows."""
        return bool(self.f.tb if self.of_b else not self.f.ta)

    @property
    def few(self) -> int:
        return int(self.f.m if self.of_b else self.f.n)

    @property
    def width(self) -> int:
        """Of the products' tiles."""
        return ceil(self.few / 8) * 8

    @property
    def count(self) -> int:
        """Elements of C along the matrix."""
        return self.r.rows if self.along else self.r.columns

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return (self.side, self.deep) if self.along else (self.deep, self.side)

    @property
    def teams(self) -> int:
        """Rows of the matrix that threads read side by side: an even number."""
        return 2 * _THREADS // self.tile[1]

    @property
    def by_team(self) -> tuple[int, int, int]:
        """The words of a tile: turns of the teams, teams, words of a row."""
        return self.tile[0] // self.teams, self.teams, self.tile[1] // 2

    def inside(self, k: Any) -> Any:
        """Whether all words lie in the matrix that are read of a stretch of k, one more of a row than are needed."""
        return k + self.deep + 2 <= self.f.k if self.count >= self.side else False

    def start(self, block: Any) -> Any:
        """Where a block begins across k: the last one ends where the matrix does."""
        return T.min(block * self.side, max(0, self.count - self.side))

    @property
    def k_inner(self) -> bool:
        """Whether k is contiguous in the few rows."""
        return bool(not self.f.ta if self.of_b else self.f.tb)

    @property
    def steps(self) -> int:
        return ceil(self.f.k / self.deep)

    @property
    def share(self) -> int:
        """Of a block."""
        return ceil(self.steps / self.parts)

    def shared_out(self, units: int) -> FewRows:
        """The same in the parts that take least, the fewest of those that leave blocks the same number of stretches."""
        ways = [replace(self, parts=n, deep=deep) for deep in (64, 128) for n in range(2, 9)]
        return min(ways, key=lambda v: (v.seconds(units), v.parts, v.deep))

    def seconds(self, units: int) -> float:
        """What is expected: what a block takes alone, or all of them."""
        blocks = self.parts * ceil(self.count / self.side)
        alone = self.share * _STRETCH[self.deep]
        return _START + max(alone, alone * blocks / (_BLOCKS[self.deep] * units))

    def place(self, at: Any, k: Any) -> tuple[Any, Any]:
        """Row and column of the matrix."""
        return (at, k) if self.along else (k, at)


def _lanes(v: FewRows) -> Any:
    """Neighbouring words are neighbouring threads', which have every v.teams-th row."""
    words = v.tile[1] // 2
    return T.Fragment(v.by_team, forward_fn=lambda r, t, w: (t * words + w, r))


@T.macro
def _fetch(v, given, at, first, own, ko, fetched):
    """The words of stretch ko of a block's, if it has so many, two for each that is made of them, and of the few.

    Nothing is done to them before `_put`: whatever uses a word waits for it.
    """
    if ko < own:
        M, source, few = given
        low, high, XF = fetched
        k = (first + ko) * v.deep
        row, column = v.place(at, k)
        if v.inside(k):
            for r, t, w in T.Parallel(*v.by_team, loop_layout=_lanes(v)):
                here = (((row + t) * v.r.down + column) >> 1) + w + r * (v.teams * v.r.down // 2)
                low[r, t, w] = source[here]
                high[r, t, w] = source[here + 1]
        else:
            for r, t, w in T.Parallel(*v.by_team, loop_layout=_lanes(v)):
                here = ((T.min(row + r * v.teams + t, v.r.rows - 1) * v.r.down + column) >> 1) + w
                low[r, t, w] = source[T.min(here, v.r.words - 1)]
                high[r, t, w] = source[T.min(here + 1, v.r.words - 1)]
        T.copy(few[(0, k) if v.k_inner else (k, 0)], XF)


@T.macro
def _put(v, M, at, k, fetched, S, X):
    """What was fetched to shared memory, rows at multiples of 16 bytes; what lies behind k is zero.

    What lies outside across k is anything: no element of C has it.  Rows of a thread lie whole words apart, so the bits that
    belong to a word are the same of all.  The operand's last element may lie in no whole word.
    """
    low, high, XF = fetched
    row, column = v.place(at, k)
    if v.inside(k):
        for r, t, w, h in T.Parallel(*v.by_team, 2):
            both = T.cast(high[r, t, w], "uint64") << 32 | T.cast(low[r, t, w], "uint64")
            word = T.cast(both >> T.cast((((row + t) * v.r.down + column) & 1) * 16, "uint64"), "uint32")
            S[r * v.teams + t, w * 2 + h] = T.reinterpret(T.cast(word >> (16 * h), "uint16"), v.r.element)
    else:
        for r, t, w, h in T.Parallel(*v.by_team, 2):
            first = T.min(row + r * v.teams + t, v.r.rows - 1) * v.r.down + column
            both = T.cast(high[r, t, w], "uint64") << 32 | T.cast(low[r, t, w], "uint64")
            word = T.cast(both >> T.cast((first & 1) * 16, "uint64"), "uint32")
            left = v.f.k - k - (2 * w + h if v.along else r * v.teams + t)
            S[r * v.teams + t, w * 2 + h] = T.reinterpret(T.if_then_else(
                left > 0, T.cast(word >> (16 * h), "uint16"), T.uint16(0)), v.r.element)
        if v.r.bytes % 4:
            if T.And(k + v.deep >= v.f.k, at + v.side >= v.count):
                for e in T.Parallel(1):
                    S[v.place(v.count - 1 - at, v.f.k - 1 - k + e)] = M[v.r.rows - 1, v.r.columns - 1]
    T.copy(XF, X)


@T.macro
def _step(v, given, at, first, own, ko, fetched, S, X, Cf):
    """Stretch ko, if a block has so many; what takes its place comes under the product."""
    if ko < own:
        _put(v, given[0], at, (first + ko) * v.deep, fetched, S, X)
        _fetch(v, given, at, first, own, ko + v.ahead, fetched)
        T.gemm(S, X, Cf, transpose_A=not v.along, transpose_B=v.k_inner)


def _room(v: FewRows, x_tile: tuple[int, int]) -> tuple[Any, Any, Any]:
    """What `_fetch` fetches."""
    low, high = (T.alloc_fragment(v.by_team, "uint32") for _ in range(2))
    T.annotate_layout({low: _lanes(v), high: _lanes(v)})
    return low, high, T.alloc_fragment(x_tile, v.r.element)


@T.macro
def share_sums(parts, high, rank, S, R, there):
    """Rows [q high, (q + 1) high) of every block's sums S go to R of block q, which adds them."""
    for q in T.serial(parts):
        T.copy_cluster(S[q * high:(q + 1) * high, :], R[rank, 0:high, :], dst_block=q, remote_barrier=there[0])
    T.mbarrier_arrive(there[0])
    T.mbarrier_wait_parity(there[0], 0)


def few_rows_product(v: FewRows) -> Any:
    """(A, B, bias, sa, sb, C)."""
    f, parts, high = v.f, v.parts, ceil(v.side / v.parts)
    x_tile = (v.width, v.deep) if v.k_inner else (v.deep, v.width)

    @T.prim_func
    def matmul_few_rows(A: f.a(f.m), B: f.b, bias: f.bias_vector, sa: f.sa(f.m), sb: f.sb, C: f.c(f.m)):
        with T.ClusterKernel(parts, T.ceildiv(v.count, v.side), cluster_dims=(parts, 1, 1), threads=_THREADS) as (rank, bx):
            M, few = (B, A) if v.of_b else (A, B)
            given = M, T.make_tensor(M.data, (v.r.words,), "uint32"), few
            S, X = T.alloc_shared(v.tile, v.r.element), T.alloc_shared(x_tile, v.r.element)
            even = _room(v, x_tile)
            odd = _room(v, x_tile) if v.ahead == 2 else even
            Cf = T.alloc_fragment((v.side, v.width), "float32")
            sums = T.alloc_shared((parts * high, v.width), "float32")
            R = T.alloc_shared((parts, high, v.width), "float32")
            there = T.alloc_cluster_barrier([_THREADS])
            if T.get_thread_binding() == 0:
                T.mbarrier_expect_tx(there[0], parts * high * v.width * 4)
            T.clear(Cf)
            at, first = v.start(bx), rank * v.share
            own = T.max(0, T.min(v.share, v.steps - first))
            _fetch(v, given, at, first, own, 0, even)
            if v.ahead == 2:
                _fetch(v, given, at, first, own, 1, odd)
            for turn in T.serial(T.ceildiv(own, v.ahead)):
                _step(v, given, at, first, own, turn * v.ahead, even, S, X, Cf)
                if v.ahead == 2:
                    _step(v, given, at, first, own, turn * 2 + 1, odd, S, X, Cf)
            for i, j in T.Parallel(parts * high - v.side, v.width):
                sums[v.side + i, j] = T.float32(0)
            for i, j in T.Parallel(v.side, v.width):
                sums[i, j] = Cf[i, j]
            share_sums(parts, high, rank, sums, R, there)
            total = T.alloc_fragment((v.width, high), "float32")
            T.clear(total)
            for p in T.unroll(parts):
                for q, i in T.Parallel(v.width, high):
                    total[q, i] += R[p, i, q]
            for q, i in T.Parallel(v.width, high):
                n = at + rank * high + i
                if T.And(T.And(q < v.few, rank * high + i < v.side), T.And(n < v.count, n >= bx * v.side)):
                    C[(q, n) if v.of_b else (n, q)] = T.cast(
                        f.finish(total[q, i], bias, sa, sb, n if v.of_b else q), f.types[2])
            T.cluster_sync()

    return matmul_few_rows


__all__ = ["MOST_ROWS", "FewRows", "few_rows_product"]
