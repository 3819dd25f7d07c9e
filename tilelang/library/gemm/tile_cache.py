"""Stores chosen tiles on disk for later processes: an estimate takes 10 to 400 ms per shape, loading its kernel 10."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import lru_cache

from tilelang.env import env
from tilelang.runtime.cache import DiskCache, Entry, compiler_stamp, digest

from . import tile_cost
from .tile import Chip, Tile, TileProblem

_WORTH = 3e-3  # seconds from which a choice is stored: reading one takes 0.2 ms, writing 1
_disk = DiskCache("choices")


@lru_cache(maxsize=1024)
def choose_tile(chip: Chip, p: TileProblem) -> Tile:
    """tile_cost.choose_tile, or its result that an earlier process with this compiler stored on disk."""
    if not env.is_cache_enabled():
        return tile_cost.choose_tile(chip, p)
    key = digest(["library", "tile", repr(chip), repr(p), compiler_stamp()])
    entry = _disk.load(key)
    if entry is not None:
        found = entry.meta["choice"]
        return Tile(**{**found, "cluster": tuple(found["cluster"])})
    start = time.perf_counter()
    tile = tile_cost.choose_tile(chip, p)
    if time.perf_counter() - start >= _WORTH:
        _disk.store(key, Entry({"about": f"tile: {(chip, p)}", "choice": asdict(tile)}))
    return tile
