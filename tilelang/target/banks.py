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

from .hip import HIP_CHIPS, WAVE
from .thread_calls import WARP

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
