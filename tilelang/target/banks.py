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

from .hip import WAVE
from .thread_calls import WARP

# Lanes below 32 that a load of 16 bytes is served for together; those above are served likewise.
_GFX942 = ((0, 1, 2, 3, 20, 21, 22, 23), (4, 5, 6, 7, 16, 17, 18, 19), (8, 9, 10, 11, 28, 29, 30, 31),
           (12, 13, 14, 15, 24, 25, 26, 27))
_GFX950 = ((0, 1, 2, 3, 12, 13, 14, 15, *range(20, 28)), (*range(4, 12), 16, 17, 18, 19, 28, 29, 30, 31))


@cache
def lane_groups(chip: str, width: int, writes: bool = False) -> tuple[np.ndarray, int]:
    """(number of its group for each lane of a warp, banks) for accesses of `width` bytes (up to 16) a lane.

    chip: FuncFacts.chip.  writes: the access is a store.
    """
    warp = WAVE if chip else WARP
    together = {8: 16, 16: 8}.get(width, 32)
    group = np.arange(warp) // together
    if not chip or writes or width < 8:
        return group, 32
    if width == 16:
        half = np.empty(32, np.int64)
        rows = _GFX950 if chip == "gfx950" else _GFX942
        for k, lanes in enumerate(rows):
            half[list(lanes)] = k
        group = np.concatenate([half, half + len(rows)])
    elif chip == "gfx950":
        group = np.arange(warp) // 32
    return group, 64 if chip == "gfx950" else 32
