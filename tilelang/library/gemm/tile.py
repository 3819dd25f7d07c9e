"""What tiles of a GEMM are described by: the machine, the problem, the tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

from tilelang.runtime import cuda_driver
from tilelang.target import Target
from tilelang.target.machine import kernel_rates
from tilelang.target.probe import device_capability


@dataclass(frozen=True)
class Chip:
    """What the cost of tiles is estimated for.

    kind: "wgmma", "mma" or "cpu".  sms: SMs, or cores.  clock: Hz of short kernels.  flops: of 16-bit MMAs, a cycle and SM.
    l2: bytes a cycle and SM with all SMs loading; alone: with one.  store: bytes a cycle and SM to memory.  memory: bytes/s.
    cache: bytes of L2.  shared, shared_sm: bytes of shared memory of a block, of an SM.  around: seconds of the same work that
    other launches do before and after this one, which count where power limits.
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
    around: float = 0.0


@dataclass(frozen=True)
class TileProblem:
    """What a tile is chosen for: `batch` GEMMs of m x k by k x n.

    bits: of an operand's element.  kind: "half", "tf32", "fp8", "int8" or "float" (no matrix instructions).  two_level:
    partial sums of 128 of k are added to a second accumulator.  out_bits: of a result.  a_k, b_k: k is contiguous.
    may_split: split-K is possible.  column_block: a tile's columns lie in at most two blocks of so many, which bn divides or
    overlaps evenly (0: any bn); row_block: its rows in one of so many.  a_rows, b_rows: rows start at multiples of so many
    bytes (at most 128).  may_swap_ab: the kernel has Tile.swap_ab.  may_overlap: it has Tile.overlapping and Tile.wide.
    staged: tiles are stored through shared memory in the other order.  open_rows: the number of rows of a GEMM or group is
    known at run time only.  ragged: m is the mean of GEMMs of different sizes.
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
        """Tiles of bm rows in all GEMMs, as expected: sizes that differ leave half a tile of each empty."""
        return ceil(self.batch * max(1.0, self.m / bm + 0.5)) if self.ragged else self.batch * ceil(self.m / bm)


@dataclass(frozen=True)
class Tile:
    """A tile of bm x bn, bk of k at a time in `stages` stages, by `threads` threads; split-K over `splits` blocks.

    panel_size: rows of tiles of a rasterisation panel (T.use_swizzle).  seconds: what the model expects.  swap_ab: the
    transposed result is computed: bm counts columns of the result and bn its rows, so few rows fill a tile: instructions have
    64 x 8 n.
    overlapping: the last tiles lie inside the tensor and compute again what their neighbours do.  staged: results are stored
    through shared memory: overlapping and swap-AB ones in whole rows.  wide: columns of the right operand that a stage loads,
    where more than bn.  pdl: the launch is set up while the one before it ends (programmatic dependent launch).
    cluster: its blocks side by side and one below the other (tl.cluster); () as the compiler's own rule has it.
    from_registers: the left operand, whose rows are k, is read from registers: wgmma takes 4-byte types from shared memory
    with k contiguous only.
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

    @property
    def loaded(self) -> int:
        """Columns of the right operand that a stage loads."""
        return self.wide or self.bn


@dataclass(frozen=True)
class Tail:
    """The rest of a GEMM whose first `at` rows (axis 0) or columns (axis 1) another tile computes in whole waves, and its
    tile."""

    axis: int
    at: int
    tile: Tile


def chip_of(target: Target) -> Chip:
    """The numbers of a target; counts of the device at hand where there is one."""
    kind = kind_of(target)
    r, sms, shared = kernel_rates(kind), None, (1 << 26, 1 << 26)
    if target.is_cuda:
        r = kernel_rates(kind, target.arch_number)
        here = device_capability()
        sms = _sms() if here is not None and here[0] * 10 + here[1] == target.arch_number else None
        shared = target.limits.shared_per_block, target.limits.shared_per_sm
    return Chip(kind, sms or r.sm_count, r.clock, r.mma, r.l2, r.l2_alone, r.store, r.bandwidth, r.l2_bytes, *shared, r.launch)


def kind_of(target: Target) -> str:
    """Which kind of kernels a target runs: "wgmma", "mma" or "cpu"."""
    return "cpu" if not target.is_cuda else "wgmma" if target.has_wgmma else "mma"


def without_wgmma(chip: Chip) -> Chip:
    """The same machine for GEMMs that mma.sync computes."""
    r = kernel_rates("mma", 90)
    return replace(chip, kind="mma", clock=r.clock, flops=r.mma, l2=r.l2, alone=r.l2_alone, start=r.launch)


def _sms() -> int:
    """SMs of the device at hand."""
    return int(cuda_driver.driver().properties(0).sm_count)


@lru_cache(maxsize=4096)
def swapped(p: TileProblem, staged: bool = False) -> TileProblem:
    """The GEMM of b and a that computes the transposed result (swap-AB)."""
    return replace(p, m=p.n, n=p.m, a_k=p.b_k, b_k=p.a_k, a_rows=p.b_rows, b_rows=p.a_rows, may_swap_ab=False, staged=staged,
                   column_block=p.row_block, row_block=p.column_block)


__all__ = ["Chip", "Tail", "Tile", "TileProblem", "chip_of", "swapped", "without_wgmma"]
