"""GEMMs over ranks in one launch, whose tiles wait for rows of other ranks or send their sums to them (sm_90a).

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
    """m rows of each rank, n columns, k; parts: of each rank's rows, that travel by themselves.  blocks: of the launch."""

    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    blocks: int
    parts: int = 1
    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 4

    @property
    def fits(self) -> bool:
        """Whether tiles are whole."""
        return self.m % (self.bm * self.parts) == self.n % self.bn == self.k % self.bk == 0

    @property
    def steps(self) -> int:
        return self.k // self.bk

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return self.n // self.bn

    @property
    def down(self) -> int:
        """Tiles of a part, one below the other."""
        return self.m // self.parts // self.bm

    @property
    def per_part(self) -> int:
        return self.across * self.down

    @property
    def tiles(self) -> int:
        return self.ranks * self.parts * self.per_part

    def place(self, t: Any) -> tuple[Any, Any]:
        """(row, column) of tile t of a part: panels of up to 16 tiles of rows, column by column, for reuse in L2."""
        high = next(h for h in range(16, 0, -1) if self.down % h == 0)
        in_panel = t % (high * self.across)
        return (t // (high * self.across) * high + in_panel % high) * self.bm, in_panel // high * self.bn


@T.macro
def _multiply(f, A, B, C, full, free, n, ko):
    T.mbarrier_wait_parity(full[n % f.stages], n // f.stages % 2)
    T.wgmma_gemm(A[n % f.stages, :, :], B[n % f.stages, :, :], C)
    T.wait_wgmma(1)  # all but the product just issued are done: the slot before is free
    if ko > 0:
        T.mbarrier_arrive(free[(n - 1) % f.stages])


@T.macro
def _load_tile(f, A, B, As, Bs, full, free, i, row, column):
    for ko in T.serial(f.steps):
        n = i * f.steps + ko
        T.mbarrier_wait_parity(free[n % f.stages], (n // f.stages + 1) % 2)
        T.tma_copy(A[row, ko * f.bk], As[n % f.stages, :, :], barrier=full[n % f.stages])
        T.tma_copy(B[ko * f.bk, column], Bs[n % f.stages, :, :], barrier=full[n % f.stages])
        T.mbarrier_arrive(full[n % f.stages])


@T.macro
def _sum_tile(f, As, Bs, Cf, full, free, i):
    T.clear(Cf)
    for ko in T.serial(f.steps):
        _multiply(f, As, Bs, Cf, full, free, i * f.steps + ko, ko)
    T.wait_wgmma(0)
    T.mbarrier_arrive(free[(i * f.steps + f.steps - 1) % f.stages])


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
            full, free = T.alloc_barrier([128] * f.stages), T.alloc_barrier([256] * f.stages)
            me = T.get_rank() % f.ranks
            with T.ws(2):
                T.dec_max_nreg(24)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    source, (row, column) = (me + t // f.per_part) % f.ranks, f.place(t % f.per_part)
                    if t >= f.per_part:
                        T.wait_ge(flags[source], 1)
                    first = T.if_then_else(t < f.per_part, own, others + source * f.m)
                    _load_tile(f, H, B, As, Bs, full, free, i, first + row, column)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    source, (row, column) = (me + t // f.per_part) % f.ranks, f.place(t % f.per_part)
                    _sum_tile(f, As, Bs, Cf, full, free, i)
                    T.copy(Cf, C[source * f.m + row, column])

    return gemm_gathered


@T.macro
def _sent(f, done, t, me):
    """Tell the rank that tile t is for, when its stores have ended: all earlier ones of this block have, too."""
    T.tma_store_wait(0, read=False)
    T.sync_threads()
    if T.get_thread_binding() == 0:
        part = t // f.per_part
        _ = T.atom_add(done[part % f.parts, part // f.parts], 1, scope="sys", sem="release",
                       dst_pe=(me + part // f.parts + 1) % f.ranks)


def scattered_gemm(f: RankGemm) -> Any:
    """C = this rank's rows of A @ B + what the other ranks computed of them, summed in float32 and rounded once.

    sums[j]: the products for rank me + j + 1; done[p, j] there counts tiles of part p that are stored.  inbox[j]: what rank
    me - j - 1 computed; flags[p, j] is 1 when part p of it is there.
    """
    others = f.ranks - 1
    high = f.m // f.parts

    @T.prim_func
    def gemm_scattered(A: T.Tensor((f.ranks * f.m, f.k), f.dtype), B: T.Tensor((f.k, f.n), f.dtype),
                       C: T.Tensor((f.m, f.n), f.dtype), sums: T.Tensor((others, f.m, f.n), f.dtype),
                       inbox: T.Tensor((others, f.m, f.n), f.dtype), done: T.SymmTensor((f.parts, others), "int64"),
                       flags: T.Tensor((f.parts, others), "int64")):
        with T.Kernel(f.blocks, threads=384) as b:
            As, Bs = T.alloc_shared((f.stages, f.bm, f.bk), f.dtype), T.alloc_shared((f.stages, f.bk, f.bn), f.dtype)
            Cf = T.alloc_fragment((f.bm, f.bn), "float32")
            full, free = T.alloc_barrier([128] * f.stages), T.alloc_barrier([256] * f.stages)
            me, away = T.get_rank() % f.ranks, others * f.parts * f.per_part  # tiles for other ranks
            with T.ws(2):
                T.dec_max_nreg(24)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    part, (row, column) = t // f.per_part, f.place(t % f.per_part)
                    first = (me + part // f.parts + 1) % f.ranks * f.m + part % f.parts * high
                    _load_tile(f, A, B, As, Bs, full, free, i, first + row, column)
            with T.ws(0, 1):
                T.inc_max_nreg(240)
                for i in T.serial(T.ceildiv(f.tiles - b, f.blocks)):
                    t = i * f.blocks + b
                    part, (row, column) = t // f.per_part, f.place(t % f.per_part)
                    at = part % f.parts * high + row
                    _sum_tile(f, As, Bs, Cf, full, free, i)
                    if T.And(i > 0, t - f.blocks < away):
                        _sent(f, done, t - f.blocks, me)
                    if t < away:
                        T.copy(Cf, sums[part // f.parts, at, column])
                        if t + f.blocks >= f.tiles:
                            _sent(f, done, t, me)
                    else:
                        _ = [T.wait_ge(flags[part % f.parts, j], 1) for j in range(others)]
                        for r, c in T.Parallel(f.bm, f.bn):
                            Cf[r, c] += sum([T.cast(inbox[j, at + r, column + c], "float32") for j in range(others)])
                        T.copy(Cf, C[at, column])

    return gemm_scattered
