"""What tiles of matrix products are described by: the machine, the product, the tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

from tilelang.runtime import cuda_driver
from tilelang.target import Target
from tilelang.target.probe import device_capability


@dataclass(frozen=True)
class Chip:
    """What tiles are priced for.

    kind: "wgmma", "mma" or "cpu".  units: processors (SMs, cores).  clock: Hz of short kernels.  flops: of 16-bit
    products, a cycle and unit.  l2: bytes a cycle and unit with all units loading; alone: with one.  store: bytes a
    cycle and unit to memory.  memory: bytes/s.  cache: bytes of L2.  shared: bytes a block may have, and a unit has.
    around: seconds of the same work that other launches do before and behind this one, which count where power limits.
    """

    kind: str
    units: int
    clock: float
    flops: float
    l2: float
    alone: float
    store: float
    memory: float
    cache: int
    shared: int
    shared_unit: int
    start: float = 2e-6
    around: float = 0.0


@dataclass(frozen=True)
class Problem:
    """batch products of m x k by k x n.

    bits: of an operand's element.  kind: "half", "tf32", "fp8", "int8" or "float" (no matrix instructions).  two_level:
    partial sums of 128 of k are added to a second accumulator.  out_bits: of a result.  a_k, b_k: k is contiguous.
    may_split: k may be shared out over blocks.  column_block: a tile's columns lie in at most two blocks of so many,
    which bn divides or overlaps evenly (0: any bn); row_block: its rows in one of so many.  a_rows, b_rows: rows start at
    multiples of so many bytes (at most 128).  may_turn: tiles may be turned (Tile.turned).  may_move: the kernel has
    Tile.moved and Tile.wide.  staged: tiles leave through shared memory in the other order.  open_rows: how many rows a
    product or group has is known at run time only.  ragged: m is the mean of
    products of different sizes.
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
    may_turn: bool = False
    may_move: bool = False
    staged: bool = False
    open_rows: bool = False
    ragged: bool = False

    def row_tiles(self, bm: int) -> int:
        """Tiles of bm rows in all products, as expected: sizes that differ leave half a tile of each empty."""
        return ceil(self.batch * max(1.0, self.m / bm + 0.5)) if self.ragged else self.batch * ceil(self.m / bm)


@dataclass(frozen=True)
class Tile:
    """A tile of bm x bn, bk of k at a time in `stages` stages, by `threads` threads; k shared out over `parts` blocks.

    panel: rows of tiles that are worked on together (T.use_swizzle).  seconds: what the model expects.  turned: bm counts
    columns of the result and bn its rows, so few rows fill a tile: instructions have 64 x 8 n.
    moved: the last tiles lie inside the tensor and compute again what their neighbours do.  staged: results leave
    through shared memory: moved and turned ones in whole rows.  wide: columns of the right operand that a stage loads,
    where more than bn.  soon: the launch is set up while the one before it ends (tl.enable_pdl).
    cluster: its blocks side by side and one below the other (tl.cluster); () as the compiler's own rule has it.
    from_registers: the left operand, whose rows are k, is read from registers: wgmma takes 4-byte types from shared memory
    with k contiguous only.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    threads: int
    parts: int = 1
    panel: int = 8
    seconds: float = inf
    turned: bool = False
    moved: bool = False
    staged: bool = False
    wide: int = 0
    soon: bool = False
    cluster: tuple[int, ...] = ()
    from_registers: bool = False

    @property
    def loaded(self) -> int:
        """Columns of the right operand that a stage loads."""
        return self.wide or self.bn


@dataclass(frozen=True)
class Cut:
    """The rest of a product whose first `at` rows (axis 0) or columns (axis 1) another tile computes, and its own tile."""

    axis: int
    at: int
    tile: Tile


def chip_of(target: Target) -> Chip:
    """The numbers of a target; counts of the device at hand where there is one."""
    if not target.is_cuda:
        return Chip("cpu", 1, 3e9, 64, 32, 32, 16, 2e10, 1 << 21, 1 << 26, 1 << 26, 1e-6)
    limits = target.limits
    here = device_capability()
    same = here is not None and here[0] * 10 + here[1] == target.arch_number
    if target.has_wgmma:
        units = _units() if same else 132
        # Tiles that neighbours ask for at the same time reach 77 bytes a cycle and more from L2 (of one's own: _OWN).
        return Chip("wgmma", units, 1.98e9, 4096, 83, 95, 19, 3.83e12, 60 << 20, limits.shared_per_block,
                    limits.shared_per_sm, 1.3e-6)
    units = _units() if same else 108
    flops = 2540 if target.arch_number == 90 else 2048 if target.arch_number >= 80 else 1024
    return Chip("mma", units, 1.4e9, flops, 40, 64, 19, 1.5e12, 40 << 20, limits.shared_per_block, limits.shared_per_sm)


def without_wgmma(chip: Chip) -> Chip:
    """The same machine for products that mma.sync computes: on sm_90 it reaches 62 % of the rate of wgmma."""
    return replace(chip, kind="mma", clock=1.4e9, flops=2540, l2=40, alone=64, start=2e-6)


def _units() -> int:
    """Multiprocessors of the device at hand."""
    return int(cuda_driver.driver().properties(0).sm_count)


@lru_cache(maxsize=4096)
def turned(p: Problem, staged: bool = False) -> Problem:
    """The product whose result is the transposed one."""
    return replace(p, m=p.n, n=p.m, a_k=p.b_k, b_k=p.a_k, a_rows=p.b_rows, b_rows=p.a_rows, may_turn=False, staged=staged,
                   column_block=p.row_block, row_block=p.column_block)


__all__ = ["Chip", "Cut", "Problem", "Tile", "chip_of", "turned", "without_wgmma"]
