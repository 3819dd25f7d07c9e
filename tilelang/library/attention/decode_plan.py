"""DecodePlan: the kernel for a DecodeProblem on a machine. A pure function of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from .decode_problem import DecodeProblem, DecodeSizes
from .form import DecodeForm, Tile
from .tile_cost import Machine, shared_bytes

_MOST_SPLITS = 64
_RATE, _STEP, _START = 19.0, 500.0, 1500.0  # bytes per cycle and SM from memory; cycles of a step; cycles before the first step
_MERGE, _MERGE_SPLIT = 4000.0, 60.0  # cycles of the second launch, and for each split


@dataclass(frozen=True)
class DecodePlan:
    """The kernel for a call of flash_decode.

    form: what the kernel is compiled for, None where there is nothing to compute. Sizes and strides that are None in it are
    given by each call. splits: number of blocks that divide the keys of a sequence.
    """

    form: DecodeForm | None
    splits: int = 1

    def workspace(self, sizes: DecodeSizes) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 workspace of the kernel, of any contents: the splits' means and sums."""
        z = sizes
        shapes = (self.splits, z.batch, z.seq_q, z.heads, z.dim_v), (self.splits, z.batch, z.heads, z.seq_q)
        return shapes if self.splits > 1 else ()


def plan_decode(p: DecodeProblem, machine: Machine, choice: tuple[Tile, int] | None = None) -> DecodePlan:
    """The plan of a problem. choice: (tile, splits) to use instead of the cost model's choice."""
    if p.empty:
        return DecodePlan(None)
    tile, splits = choice or decode_choice(p, machine)
    sizes = p.sizes._replace(batch=None, pages=None, width=None)
    form = DecodeForm(sizes, p.strides, p.dtype, None if p.window is None else p.window - 1, tile, splits > 1, p.with_lse)
    return DecodePlan(form, splits)


def decode_choice(p: DecodeProblem, machine: Machine) -> tuple[Tile, int]:
    """The cost model's choice: (tile, splits)."""
    tile = decode_tile(machine, p.sizes)
    return tile, p.splits or decode_splits(machine, p.sizes, tile)


def decode_tile(m: Machine, sizes: DecodeSizes) -> Tile:
    """The tile: rows for all queries that share a kv head, keys that divide a page, stages that keep enough bytes in flight."""
    dims = sizes.dim + sizes.dim_v
    most = 96 if dims <= 128 else 64 if dims <= 384 or m.kind == "wgmma" else 32
    keys = next(n for n in range(most, 15, -16) if sizes.page_size is None or sizes.page_size % n == 0)
    if m.kind == "cpu":
        return Tile(max(16, min(64, ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / 16) * 16)), keys, 1, 128)
    two = 2 * 2 * keys * dims  # bytes of two stages
    ring = max(64 << 10, min(two, 128 << 10)) if m.kind == "wgmma" else 128 << 10  # two blocks per SM
    for stages in range(6 if m.kind == "wgmma" else 4, 1, -1):
        tile = Tile(64, keys, stages, 128)
        if stages * two // 2 <= ring and shared_bytes(tile, sizes.dim, sizes.dim_v) <= m.shared:
            return tile
    return Tile(64, 16, 2, 128)


def decode_splits(m: Machine, sizes: DecodeSizes, tile: Tile) -> int:
    """The number of splits of the keys of a sequence that fills its table, with the least cost in cycles."""
    tiles = sizes.batch * sizes.kv_heads * ceil(sizes.seq_q * sizes.heads / max(1, sizes.kv_heads) / tile.rows)
    steps = max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys))
    step = max(_STEP, 2 * tile.keys * (sizes.dim + sizes.dim_v) / _RATE)

    def cost(n: int) -> float:
        waves = ceil(tiles * n / m.sms)
        return waves * (_START + ceil(steps / n) * step) + (n > 1) * (_MERGE + n * _MERGE_SPLIT)

    return min(range(1, min(_MOST_SPLITS, steps) + 1), key=cost)


def near_choices(sizes: DecodeSizes, model: tuple[Tile, int], any_splits: bool) -> list[tuple[Tile, int]]:
    """The pairs (tile, splits) that are worth timing: the model's, other numbers of splits, narrower tiles, fewer stages.

    any_splits: whether the number of splits may vary.
    """
    tile, splits = model
    steps = max(1, ceil(sizes.width * (sizes.page_size or 1) / tile.keys))
    counts = [n for n in (splits * 2, ceil(splits * 1.5), splits * 3 // 4, splits // 2, 1, splits + 1)
              if 1 <= n <= min(_MOST_SPLITS, steps)]
    tiles = [replace(tile, stages=max(2, tile.stages // 2))]
    if tile.keys % 32 == 0:
        tiles.append(replace(tile, keys=tile.keys // 2, stages=min(8, 2 * tile.stages)))
    return list(dict.fromkeys([model, *((tile, n) for n in counts if any_splits), *((t, splits) for t in tiles)]))
