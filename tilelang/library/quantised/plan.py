"""DequantPlan: chooses the tile of dequant_matmul by a cost model. A pure function of problem and machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from tilelang.target.machine import kernel_rates, nearest_chip

from ..gemm.tile import Chip
from .form import GROUP_ROWS, DequantForm, DequantTile
from .problem import DequantProblem

# Constants of an H200, fitted to 18 timed tiles of 1 to 4096 rows (benchmarks/results/notes.md): seconds of a launch and of the
# second launch; cycles of a step; cycles to dequantise one weight in a thread while no other warp of its scheduler does; the
# fraction of the MMA time that is not hidden; bytes per cycle that each SM loads while all do.
_START, _SECOND = 2.0e-6, 1.5e-6
_STEP, _DECODE, _MMA, _LOAD = 250.0, 4.0, 0.66, 32.0
_PARTIALS, _CLOCK = kernel_rates("wgmma").split_k, nearest_chip(90).clock


def plan_dequant(p: DequantProblem, chip: Chip) -> DequantForm:
    """The form of the kernel for a problem, with the tile of the least cost."""
    return choose_tile(DequantForm(p.m, p.n, p.k, p.group, p.element, p.lut, p.zero_points, DequantTile(16, 64, 64, 2)), chip)


def tiles(f: DequantForm, chip: Chip) -> Iterator[DequantForm]:
    """The form with each tile that is possible on a chip."""
    for bm in (16, 32, 64, 128, 256):
        if bm > 16 and bm >= 2 * f.m:
            break
        for bn in (64, 128):
            for bk, stages in ((64, 4), (128, 4), (128, 2), (256, 3)):
                if bm * bk * stages > 256 * 256 or bm * bn > 256 * 128:
                    continue
                for splits in range(1, 9):
                    v = replace(f, tile=DequantTile(bm, bn, bk, stages, splits))
                    own = v.steps * bk
                    # Each split begins at the start of a quantisation group, and none is empty.
                    if v.shared <= chip.shared and (splits == 1 or own % f.group == 0 and own * (splits - 1) < f.k):
                        yield v


def seconds(f: DequantForm, chip: Chip) -> float:
    """The estimated time of a form with its tile, in seconds."""
    t = f.tile
    blocks = ceil(f.m / t.bm) * ceil(f.n / t.bn) * t.splits
    together = max(1, min(chip.shared_sm // f.shared, 2048 // (t.threads + 128), ceil(blocks / chip.sms)))
    together = min(together, 2) if t.bm <= 64 else 1  # limited by registers
    warps = together * t.bn // GROUP_ROWS  # warps of one scheduler
    mma = t.bk / 16 * max(t.bm / 2, 20.0)
    loaded = together * t.bk * (t.bm * 2 + t.bn // 2) / _LOAD
    step = max(_STEP + warps * (_DECODE * t.bk / 2 + _MMA * mma), loaded * min(1, blocks / chip.sms / together))
    waves = ceil(blocks / (chip.sms * together))
    sums = _SECOND + 8.0 * t.splits * f.m * f.n / _PARTIALS if t.splits > 1 else 0.0
    return _START + (loaded + waves * f.steps * step) / _CLOCK + sums


def choose_tile(f: DequantForm, chip: Chip) -> DequantForm:
    """The form with the tile of the least cost."""
    found = list(tiles(f, chip))
    if not found:  # the groups allow no split, and there are too many for one block
        return replace(f, tile=DequantTile(16, 64, 64, 2))
    return min(found, key=lambda v: (seconds(v, chip), v.tile.splits, v.shared))
