"""Chooses a separate tile for the tail of a GEMM, so that its last wave does not leave SMs idle (wave quantisation).

    C = [ whole waves of one tile ]            time = that of both GEMMs, and of another launch
        [ the rest: a GEMM with a tile that suits it ]

tile_cost.py estimates the cost of both. A GEMM gets a tail only where the predicted gain is clear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from .tile import Chip, Tail, Tile, TileProblem
from .tile_cost import candidates, choose_tile, estimate_seconds

_SURE = 0.96  # of the time of one tile: a smaller predicted gain is noise
_FULL = 0.92  # of the SMs: least use of the last wave of the first piece
_LARGE = 128 * 128  # least elements of a tile of the first piece
_LOOKED_AT = 4  # tails for which a tile is chosen


@lru_cache(maxsize=1024)
def choose_tail(chip: Chip, p: TileProblem, plain: Tile) -> tuple[Tile, Tail] | None:
    """The tile of the first piece and the tail, if they are predicted to be faster than `plain` for all of C; else None."""
    tiles = ceil(p.m / plain.bm) * ceil(p.n / plain.bn) * p.batch
    if chip.kind != "wgmma" or p.kind == "float" or p.two_level or p.open_rows:
        return None
    if plain.splits > 1 or tiles <= chip.sms:
        return None
    found = next(iter(tails(chip, p, plain.seconds)), None)
    return None if found is None else found[1:]


def tails(chip: Chip, p: TileProblem, plain: float, sure: float = _SURE) -> list[tuple[float, Tile, Tail]]:
    """(seconds, tile of the first piece, tail), fastest first, of those below `sure` times the time of one tile."""
    area = float(p.m * p.n)

    def among(piece: TileProblem) -> Chip:
        """The machine during the rest of the GEMM: other launches run before and after."""
        return replace(chip, around=round(plain * (1 - piece.m * piece.n / area), 6))

    firsts = [(estimate_seconds(among(one), one, t), one, rest, t, axis, at)
              for one, rest, t, axis, at in _whole_waves(chip, p)]
    if not firsts:
        return []
    rate = min(s / (one.m * one.n) for s, one, *_ in firsts)  # no rest is faster
    most = sure * plain
    out: list[tuple[float, Tile, Tail]] = []
    bounds = sorted((s + rate * (area - one.m * one.n), k) for k, (s, one, *_) in enumerate(firsts))
    for bound, k in bounds[:_LOOKED_AT]:
        if bound >= min([most, *(x[0] for x in out[:1])]):
            break
        s, _, rest, t, axis, at = firsts[k]
        try:
            other = choose_tile(among(rest), rest)
        except ValueError:
            continue
        seconds = s + other.seconds
        if seconds < most:
            out.append((seconds, replace(t, seconds=seconds), Tail(axis, at, other)))
            out.sort(key=lambda x: x[0])
    return out


def _whole_waves(chip: Chip, p: TileProblem) -> Iterator[tuple[TileProblem, TileProblem, Tile, int, int]]:
    """(first piece, rest, tile of the first, axis, start of the rest) with the most whole waves of a tile, or one fewer."""
    for t in candidates(chip, p):
        if t.swap_ab or t.staged or t.splits > 1 or t.bm * t.bn < _LARGE or t.threads < 256:
            continue
        rows, columns = ceil(p.m / t.bm), ceil(p.n / t.bn)
        for axis, (across, side, extent) in enumerate(((columns, t.bm, p.m), (rows, t.bn, p.n))):
            most = rows * columns * p.batch // chip.sms
            for waves in range(max(1, most - 1), most + 1):
                lines = waves * chip.sms // (across * p.batch)  # rows or columns of tiles
                at = lines * side
                if 0 < at < extent and lines * across * p.batch >= (waves - 1 + _FULL) * chip.sms:
                    pieces = [replace(p, n=x) if axis else replace(p, m=x) for x in (at, extent - at)]
                    yield pieces[0], replace(pieces[1], may_split=False), t, axis, at
