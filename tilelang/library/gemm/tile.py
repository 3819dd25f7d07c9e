"""Records of the GEMM cost model: the machine, the problem and the tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil, inf

from tilelang.runtime import cuda_driver
from tilelang.target import Target
from tilelang.target.machine import kernel_rates
from tilelang.target.probe import device_capability


@dataclass(frozen=True)
class Chip:
    """The machine that the cost of tiles is estimated for.

    kind: "wgmma", "mma" or "cpu". sms: SMs, or CPU cores. clock: Hz during short kernels. flops: of 16-bit MMAs, per cycle and
    SM. l2: bytes per cycle and SM with all SMs loading; alone: with one. store: bytes per cycle and SM to memory. memory:
    bytes/s. cache: bytes of L2. shared, shared_sm: bytes of shared memory of a block and of an SM.
    """

    kind: str
    sms: int
    clock: float
    flops: float
    l2: float
    alone: float
    store: float
    memory: float
    cache: int
    shared: int
    shared_sm: int
    start: float = 2e-6


@dataclass(frozen=True)
class TileProblem:
    """The problem that a tile is chosen for: `batch` GEMMs of m x k by k x n.

    bits: of an operand's element. kind: "half", "tf32", "fp8", "int8" or "float" (no tensor cores). two_level: partial sums of
    128 columns of k are added to a second accumulator. out_bits: of a result. a_k, b_k: k is contiguous. may_split: split-K is
    possible. column_block: a tile's columns must lie in at most two scale blocks of this size, which bn divides or overlaps
    evenly (0: any bn). row_block: a tile's rows must lie in one scale block of this size. a_rows, b_rows: rows start at
    multiples of this many bytes (at most 128). may_swap_ab: the kernel has Tile.swap_ab. may_overlap: it has Tile.overlapping
    and Tile.wide. staged: tiles are stored through shared memory, transposed. open_rows: the number of rows of a GEMM or group
    is known at run time only. ragged: m is the mean of GEMMs whose sizes may differ.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    kind: str = "half"
    bits: int = 16
    out_bits: int = 16
    two_level: bool = False
    a_k: bool = True
    b_k: bool = False
    may_split: bool = True
    column_block: int = 0
    row_block: int = 0
    a_rows: int = 128
    b_rows: int = 128
    may_swap_ab: bool = False
    may_overlap: bool = False
    staged: bool = False
    open_rows: bool = False
    ragged: bool = False

    def row_tiles(self, bm: int) -> int:
        """The expected number of tiles of bm rows in all GEMMs. Where sizes differ, half a tile of each GEMM is empty."""
        return ceil(self.batch * max(1.0, self.m / bm + 0.5)) if self.ragged else self.batch * ceil(self.m / bm)

    def launched_rows(self, bm: int) -> int:
        """The number of tiles of bm rows that are launched for all GEMMs: with groups, as many as any sizes may need."""
        if not self.ragged:
            return self.batch * ceil(self.m / bm)
        pieces = min(self.batch * self.m, self.batch + 1)  # the groups, and the rows of no group
        return (self.batch * self.m - pieces) // bm + pieces


@dataclass(frozen=True)
class Tile:
    """A tile of bm x bn with bk columns of k in each of `stages` stages, `threads` threads, and split-K over `splits` blocks.

    panel_size: rows of tiles of a rasterisation panel, or columns with order="column" (T.use_swizzle). seconds: the model's
    estimate. swap_ab: the transposed
    result is computed: bm counts columns of the result and bn its rows, so that few rows fill a tile, because instructions
    compute 64 x 8 n. overlapping: the last tiles lie inside the tensor and compute some of their neighbours' elements again.
    staged: results are stored through shared memory; those of overlapping and swap-AB tiles in whole rows. wide: columns of the
    right operand that a stage loads, where these are more than bn. pdl: the launch uses PDL. cluster: blocks of a cluster,
    (side by side, one below the other) (tl.cluster); () for the compiler's rule. from_registers: the left operand, with k
    outermost, is read from registers, because wgmma reads 4-byte types from shared memory with k contiguous only.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    threads: int
    splits: int = 1
    panel_size: int = 8
    seconds: float = inf
    swap_ab: bool = False
    overlapping: bool = False
    staged: bool = False
    wide: int = 0
    pdl: bool = False
    cluster: tuple[int, ...] = ()
    from_registers: bool = False
    order: str = "row"

    @property
    def loaded(self) -> int:
        """Columns of the right operand that a stage loads."""
        return self.wide or self.bn


@cache
def chip_of(target: Target) -> Chip:
    """The numbers of a target; counts of the device at hand where there is one."""
    kind = kind_of(target)
    r, sms, shared = kernel_rates(kind), None, (1 << 26, 1 << 26)
    if target.is_gpu:
        r = kernel_rates(kind, target.machine)
        here = device_capability()
        if here is not None and here[0] * 10 + here[1] == target.arch_number:
            sms = int(cuda_driver.driver().properties(0).sm_count)
        shared = target.limits.shared_per_block, target.limits.shared_per_sm
    return Chip(kind, sms or r.sm_count, r.clock, r.mma, r.l2, r.l2_alone, r.store, r.bandwidth, r.l2_bytes, *shared, r.launch)


def kind_of(target: Target) -> str:
    """Which kind of kernels a target runs: "wgmma", "mma" (mma.sync or MFMA) or "cpu"."""
    return "cpu" if target.is_cpu else "wgmma" if target.has_wgmma else "mma"


def without_wgmma(chip: Chip) -> Chip:
    """The same machine for GEMMs that mma.sync computes."""
    r = kernel_rates("mma", 90)
    return replace(chip, kind="mma", clock=r.clock, flops=r.mma, l2=r.l2, alone=r.l2_alone, start=r.launch)


@lru_cache(maxsize=4096)
def swapped(p: TileProblem, staged: bool = False) -> TileProblem:
    """The GEMM of b and a that computes the transposed result (swap-AB)."""
    return replace(p, m=p.n, n=p.m, a_k=p.b_k, b_k=p.a_k, a_rows=p.b_rows, b_rows=p.a_rows, may_swap_ab=False, staged=staged,
                   column_block=p.row_block, row_block=p.column_block)
