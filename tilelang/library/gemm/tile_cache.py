"""Stores chosen tiles on disk for later processes: an estimate takes 10 to 400 ms per shape, loading its kernel 10."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from tilelang.env import env
from tilelang.runtime.cache import DiskCache, Entry, compiler_stamp, digest

from . import tail_plan, tile_cost
from .tile import Chip, Tail, Tile, TileProblem

_WORTH = 3e-3  # seconds from which a choice is stored: reading one takes 0.2 ms, writing 1
_disk = DiskCache("choices")


@lru_cache(maxsize=1024)
def choose_tile(chip: Chip, p: TileProblem) -> Tile:
    """tile_cost.choose_tile, with results stored on disk."""
    return _read(_kept("tile", (chip, p), lambda: asdict(tile_cost.choose_tile(chip, p))))


@lru_cache(maxsize=1024)
def choose_tail(chip: Chip, p: TileProblem, plain: Tile) -> tuple[Tile, Tail] | None:
    """tail_plan.choose_tail, with results stored on disk."""
    def find() -> Any:
        found = tail_plan.choose_tail(chip, p, plain)
        return None if found is None else [asdict(found[0]), found[1].axis, found[1].at, asdict(found[1].tile)]

    kept = _kept("tail", (chip, p, plain), find)
    return None if kept is None else (_read(kept[0]), Tail(kept[1], kept[2], _read(kept[3])))


def _kept(what: str, given: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """The result of `find`, JSON values, computed now or by an earlier process with this compiler. given: everything that
    decides it."""
    if not env.is_cache_enabled():
        return find()
    key = digest(["library", what, *map(repr, given), compiler_stamp()])
    entry = _disk.load(key)
    if entry is not None:
        return entry.meta["choice"]
    start = time.perf_counter()
    found = find()
    if time.perf_counter() - start >= _WORTH:
        _disk.store(key, Entry({"about": f"{what}: {given}", "choice": found}))
    return found


def _read(values: dict[str, Any]) -> Tile:
    return Tile(**{**values, "cluster": tuple(values["cluster"])})
