"""How shared memory serves a warp: which lanes it serves together, and among how many banks of 4 bytes.

Lanes of one group conflict where they access different words of one bank.

NVIDIA: 32 lanes of 4 bytes, 16 of 8, 8 of 16, in their order (CUDA C++ Programming Guide, "Shared Memory").  AMD: loads of 16
bytes in the groups that were measured on MI300 and MI355X, other accesses as in the Composable Kernel documentation,
"Understanding AMD GPU LDS and bank conflicts".  gfx950 has 64 banks for loads of 8 and 16 bytes.  Loads of 8 bytes on gfx942
are assumed to be served like stores, and gfx90a like gfx942.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tilelang.ir.record import record
from tilelang.layout import Layout, phase_conflicts

from .hip import HIP_CHIPS, WAVE
from .thread_calls import WARP

WIDEST = 16  # bytes of a lane in one access
# Lanes below 32 that a load of 16 bytes is served for together; those above are served likewise.
_GFX942 = ((0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19), (8, 9, 10, 11, 28, 29, 30, 31),
           (12, 13, 14, 15, 24, 25, 26, 27))
_GFX950 = ((0, 1, 2, 3, 12, 13, 14, 15, *range(20, 28)), (*range(4, 12), 16, 17, 18, 19, 28, 29, 30, 31))


@cache
def lane_groups(arch: str, width: int, writes: bool = False) -> tuple[np.ndarray, int]:
    """(number of its group for each lane of a warp, banks) for accesses of `width` bytes (up to 16) a lane.

    arch: of a target.  writes: the access is a store.
    """
    chip = HIP_CHIPS.get(arch)
    warp = WARP if chip is None else WAVE
    together = {8: 16, 16: 8}.get(width, 32)
    group = np.arange(warp) // together
    if chip is None or writes or width < 8:
        return group, 32
    if width == 16:
        half = np.empty(32, np.int64)
        rows = _GFX950 if chip.lds_banks == 64 else _GFX942
        for k, lanes in enumerate(rows):
            half[list(lanes)] = k
        group = np.concatenate([half, half + len(rows)])
    elif chip.lds_banks == 64:
        group = np.arange(warp) // 32
    return group, chip.lds_banks


def wavefronts(address: np.ndarray, width: int, active: np.ndarray, arch: str = "", writes: bool = False) -> tuple[int, int]:
    """(passes, passes without conflicts) of accesses by whole warps.

    address: bytes, shape (warps, lanes); width: bytes for each lane (1 to 16); active: same shape as address.  arch, writes: as
    in lane_groups.  Lanes of a group that access the same word need one pass.
    """
    group, banks = lane_groups(arch, width, writes)
    words = max(1, width // 4)
    phase = (np.arange(address.shape[0])[:, None] * (int(group.max()) + 1) + group)[active]
    word = (address[active] // 4)[:, None] + np.arange(words)
    span = int(word.max(initial=0)) + 1
    distinct = np.unique((phase[:, None] * span + word).ravel())
    by_bank = np.bincount(distinct // span * banks + distinct % span % banks)
    by_phase = np.pad(by_bank, (0, -len(by_bank) % banks)).reshape(-1, banks).max(1)
    return int(by_phase.sum()), int((by_phase > 0).sum())


def passes(start: np.ndarray, nbytes: int, arch: str, writes: bool) -> int:
    """Passes of the lanes of one warp, from lane 0 on, that access nbytes at byte addresses `start`."""
    if arch not in HIP_CHIPS:  # the same count, faster
        return least_passes(len(start), nbytes, arch, writes) + phase_conflicts(start, nbytes)
    lanes = np.arange(WAVE)[None] < len(start)
    return wavefronts(np.pad(start, (0, WAVE - len(start)))[None], nbytes, lanes, arch, writes)[0]


def least_passes(lanes: int, nbytes: int, arch: str, writes: bool) -> int:
    """Passes of the first lanes of a warp without conflicts."""
    return len(set(lane_groups(arch, max(4, nbytes), writes)[0][:lanes].tolist()))


# ---- layouts ------------------------------------------------------------------------------------------------------------


@record
class Sample:
    """Elements that the lanes of a warp touch at once.

    points: for each dimension of the buffer an index per lane.  width: consecutive elements accessed per lane.  weight: how
    often the statement does this.  rigid: the width cannot shrink.  writes: stored, not loaded as an operand of a GEMM.
    """

    points: tuple[np.ndarray, ...]
    width: int
    weight: float
    rigid: bool = False
    writes: bool = False


def cost_of(layout: Layout, samples: list[Sample], bits: int, arch: str) -> float:
    """Passes of all samples."""
    out = 0.0
    nbytes = bits // 8
    for s in samples:
        start = layout.places(s.points)
        w = s.width
        while w > 1 and not _is_vector(layout, s.points, start, w, nbytes):
            if s.rigid:
                return float("inf")
            w //= 2
        w = min(w, max(1, WIDEST // nbytes))
        for v in range(0, s.width, w):
            at = start if v == 0 else layout.places((*s.points[:-1], s.points[-1] + v))
            out += s.weight * passes(at * nbytes, max(4, w * nbytes), arch, s.writes)
    return out


def least_cost(samples: list[Sample], bits: int, arch: str) -> float:
    """Passes of all samples without conflicts."""
    nbytes = bits // 8
    out = 0.0
    for s in samples:
        w = min(s.width, max(1, WIDEST // nbytes))
        out += s.weight * (-(-s.width // w)) * least_passes(len(s.points[0]), w * nbytes, arch, s.writes)
    return out


def _is_vector(layout: Layout, points: tuple[np.ndarray, ...], start: np.ndarray, w: int, nbytes: int) -> bool:
    if w * nbytes > WIDEST or np.any(start % w):
        return False
    return all(np.array_equal(layout.places((*points[:-1], points[-1] + v)), start + v) for v in (1, w - 1))
