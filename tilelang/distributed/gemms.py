"""GEMMs over ranks in one launch, whose tiles wait for rows of other ranks or send partial sums to them (sm_90a).

Copy engines move whole blocks of rows.  They are started by counts that the other ranks' tiles reach, and set flags that
tiles of this rank wait for; both are operations of a stream, which need no SM (overlap.py).  Blocks stay on their SMs: warp
group 2 loads, warp groups 0 and 1 multiply 64 rows each.  This rank's own rows come first where rows arrive, and last where
sums do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T


@dataclass(frozen=True)
class RankGemm:
    """m rows of each rank, n columns, k; chunks: of each rank's rows, that travel by themselves.  blocks: of the launch."""

    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    blocks: int
    chunks: int = 1
    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 4

    @property
    def fits(self) -> bool:
        """Whether tiles are whole."""
        return self.m % (self.bm * self.chunks) == self.n % self.bn == self.k % self.bk == 0

    @property
    def steps(self) -> int:
        return self.k // self.bk

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return self.n // self.bn

    @property
    def down(self) -> int:
        """Tiles of a chunk, one below the other."""
        return self.m // self.chunks // self.bm

    @property
    def per_chunk(self) -> int:
        return self.across * self.down

    @property
    def tiles(self) -> int:
        return self.ranks * self.chunks * self.per_chunk

    def place(self, t: Any) -> tuple[Any, Any]:
        """(row, column) of tile t of a chunk: groups of up to 16 tiles of rows, column by column, for reuse in L2."""
        high = next(h for h in range(16, 0, -1) if self.down % h == 0)
        within = t % (high * self.across)
        return (t // (high * self.across) * high + within % high) * self.bm, within // high * self.bn


@T.macro
def _multiply(f, tiles, C, n, ko):
    A, B, full, free = tiles
    T.mbarrier_wait_parity(full[n % f.stages], n // f.stages % 2)
    T.wgmma_gemm(A[n % f.stages, :, :], B[n % f.stages, :, :], C)
    T.wait_wgmma(1)  # all but the MMAs just issued are done: the slot before is free
    if ko > 0:
        T.mbarrier_arrive(free[(n - 1) % f.stages])


@T.macro
def _load_tile(f, A, B, tiles, i, row, column):
    As, Bs, full, free = tiles
    for ko in T.serial(f.steps):
        n = i * f.steps + ko
        T.mbarrier_wait_parity(free[n % f.stages], (n // f.stages + 1) % 2)
        T.tma_copy(A[row, ko * f.bk], As[n % f.stages, :, :], barrier=full[n % f.stages])
        T.tma_copy(B[ko * f.bk, column], Bs[n % f.stages, :, :], barrier=full[n % f.stages])
        T.mbarrier_arrive(full[n % f.stages])


@T.macro
def _sum_tile(f, tiles, Cf, i):
    T.clear(Cf)
    for ko in T.serial(f.steps):
        _multiply(f, tiles, Cf, i * f.steps + ko, ko)
    T.wait_wgmma(0)
    T.mbarrier_arrive(tiles[3][(i * f.steps + f.steps - 1) % f.stages])


def gathered_gemm(f: RankGemm) -> Any:
    """C = the rows of all ranks, rank by rank, times B.

    H: memory that has this rank's rows from row `own` on, and from row `others` on room for those of every rank, as rows of k
    elements.  flags[r]: 1 when those of rank r are there.
    """
    rows = T.dynamic("rows")

    @T.prim_func
    def gemm_gathered(H: T.Tensor((rows, f.k), f.dtype), B: T.Tensor((f.k, f.n), f.dtype),
                      C: T.Tensor((f.ranks * f.m, f.n), f.dtype), flags: T.Tensor((f.ranks,), "int64"), own: T.int32,
                      others: T.int32):
        with T.Kernel(f.blocks, threads=384) as b:
            As, Bs = T.alloc_shared((f.stages, f.bm, f.bk), f.dtype), T.alloc_shared((f.stages, f.bk, f.bn), f.dtype)
            Cf = T.alloc_fragment((f.bm, f.bn), "float32")
            tiles = As, Bs, T.alloc_barrier([128] * f.stages), T.alloc_barrier([256] * f.stages)
            me = T.get_rank() % f.ranks
            with T.ws(2):
                T.dec_max_nreg(24)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    source, (row, column) = (me + t // f.per_chunk) % f.ranks, f.place(t % f.per_chunk)
                    if t >= f.per_chunk:
                        T.wait_ge(flags[source], 1)
                    first = T.if_then_else(t < f.per_chunk, own, others + source * f.m)
                    _load_tile(f, H, B, tiles, i, first + row, column)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    source, (row, column) = (me + t // f.per_chunk) % f.ranks, f.place(t % f.per_chunk)
                    _sum_tile(f, tiles, Cf, i)
                    T.copy(Cf, C[source * f.m + row, column])

    return gemm_gathered


@T.macro
def _sent(f, done, t, me):
    """Tell the rank that tile t is for, when its stores have ended: all earlier ones of this block have, too."""
    T.tma_store_wait(0, read=False)
    T.sync_threads()
    if T.get_thread_binding() == 0:
        chunk = t // f.per_chunk
        _ = T.atom_add(done[chunk % f.chunks, chunk // f.chunks], 1, scope="sys", sem="release",
                       dst_pe=(me + chunk // f.chunks + 1) % f.ranks)


@T.macro
def _for_all(f, Cf, C, me, row, column):
    """Store a tile on every rank, on this one last."""
    rounded = T.alloc_fragment((f.bm, f.bn), f.dtype)
    T.copy(Cf, rounded)
    _ = [T.copy(rounded, T.remote(C, (me + r) % f.ranks)[row:row + f.bm, column:column + f.bn]) for r in range(1, f.ranks)]
    T.copy(rounded, C[row, column])


def scattered_gemm(f: RankGemm, every: bool = False) -> Any:
    """C = this rank's rows of A @ B + what the other ranks computed of them, summed in float32 and rounded once.

    every: C has the rows of all ranks, and each tile is stored on all of them.

    partials[j]: partial sums for rank me + j + 1; done[p, j] there counts tiles of chunk p that are stored.  inbox[j]: what
    rank me - j - 1 computed; flags[p, j] is 1 when chunk p of it is there.
    """
    others, high = f.ranks - 1, f.m // f.chunks
    Result, rows = (T.SymmTensor, f.ranks * f.m) if every else (T.Tensor, f.m)

    @T.prim_func
    def gemm_scattered(A: T.Tensor((f.ranks * f.m, f.k), f.dtype), B: T.Tensor((f.k, f.n), f.dtype),
                       C: Result((rows, f.n), f.dtype), partials: T.Tensor((others, f.m, f.n), f.dtype),
                       inbox: T.Tensor((others, f.m, f.n), f.dtype), done: T.SymmTensor((f.chunks, others), "int64"),
                       flags: T.Tensor((f.chunks, others), "int64")):
        with T.Kernel(f.blocks, threads=384) as b:
            As, Bs = T.alloc_shared((f.stages, f.bm, f.bk), f.dtype), T.alloc_shared((f.stages, f.bk, f.bn), f.dtype)
            Cf = T.alloc_fragment((f.bm, f.bn), "float32")
            tiles = As, Bs, T.alloc_barrier([128] * f.stages), T.alloc_barrier([256] * f.stages)
            me, away = T.get_rank() % f.ranks, others * f.chunks * f.per_chunk  # tiles for other ranks
            with T.ws(2):
                T.dec_max_nreg(24)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    chunk, (row, column) = t // f.per_chunk, f.place(t % f.per_chunk)
                    first = (me + chunk // f.chunks + 1) % f.ranks * f.m + chunk % f.chunks * high
                    _load_tile(f, A, B, tiles, i, first + row, column)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    chunk, (row, column) = t // f.per_chunk, f.place(t % f.per_chunk)
                    at = chunk % f.chunks * high + row
                    _sum_tile(f, tiles, Cf, i)
                    if T.And(i > 0, t - f.blocks < away):
                        _sent(f, done, t - f.blocks, me)
                    if t < away:
                        T.copy(Cf, partials[chunk // f.chunks, at, column])
                        if t + f.blocks >= f.tiles:
                            _sent(f, done, t, me)
                    else:
                        _ = [T.wait_ge(flags[chunk % f.chunks, j], 1) for j in range(others)]
                        for r, c in T.Parallel(f.bm, f.bn):
                            Cf[r, c] += sum([T.cast(inbox[j, at + r, column + c], "float32") for j in range(others)])
                        if every:
                            _for_all(f, Cf, C, me, me * f.m + at, column)
                        else:
                            T.copy(Cf, C[at, column])

    return gemm_scattered
