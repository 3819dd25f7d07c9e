"""MatmulPlan: copies, tiles and kernel of a MatmulProblem on a machine. A pure function of both."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from tilelang.env import env
from tilelang.ir import dtype
from tilelang.runtime.cache import DiskCache, Entry, compiler_stamp, digest
from tilelang.target.machine import kernel_rates

from ..place import Place
from .few_rows import MOST_ROWS, FewRows
from .gemv import GemvForm
from .kernels import Form
from .operands import Copied, copy_of
from .problem import MatmulProblem
from .repack import Rows
from .tile import Chip, Tile, TileProblem, without_wgmma
from . import tile_cost
from .tile_cost import PDL_SAVES

# Bytes/s of copies (H200: 22 MB with odd rows in 10 us, 67 MB in 35); operations/s for operand orders that wgmma lacks.
_RATES = kernel_rates("wgmma")
_COPY_START = 1.3e-6  # seconds that a launch of copies adds
# For loads by elements: _ELEMENTS is the factor of the model's time of the loop, _LAUNCH the rest of such a launch, _STEP the
# least time of a step of 32 columns of k with nothing to hide it, both in seconds (50 shapes, 2 to 78 us: most within 20 %).
_ELEMENTS, _LAUNCH, _STEP = 1.7, 0.3e-6, 0.49e-6
_WORDS = 1.05  # the factor for loads of 8 bytes, where _ELEMENTS is for 2 (ten shapes: 0.63 to 1.05)

_WORTH = 3e-3  # seconds from which a choice of a tile is stored: reading one takes 0.2 ms, writing 1
_disk = DiskCache("choices")
_NO_TILE = Tile(64, 64, 64, 2, 128)  # for forms whose kernels have no tiles


@dataclass(frozen=True)
class MatmulPlan:
    """How a GEMM is computed.

    form: the GEMM with its tiles and the storage of its operands. copied: operands that are copied first. thin: a GEMV, or a
    GEMM of few rows, that reads the matrix once.
    """

    form: Form
    copied: tuple[Copied | None, Copied | None] = (None, None)
    thin: GemvForm | FewRows | None = None


ROWS, ROWS_OF_GROUP = 4096, 1024  # for which tiles are chosen that calls with any number of rows share

Route = tuple[MatmulProblem, Copied | None, Copied | None]


def plan_matmul(p: MatmulProblem, chip: Chip) -> MatmulPlan:
    """The cost model's plan."""
    thin = thin_forms(p, chip)
    if thin is not None and not thin[1]:
        return MatmulPlan(thin[0].f, thin=thin[0])
    route = routes(p, chip)[0]
    found = MatmulPlan(_form(chip, *sized(p, route)), route[1:])
    if thin is not None and thin[1] < expected(p, route, chip):
        return MatmulPlan(thin[0].f, thin=thin[0])
    return found


def routes(p: MatmulProblem, chip: Chip) -> list[Route]:
    """The routes: which operands are copied first, and the GEMM of the copies; the faster route first.

    sm_90 multiplies 8- and 32-bit types with k contiguous only, and TMA needs rows of whole 16 bytes. A copy costs a pass over
    the operand; a small GEMM is faster with loads by elements.
    """
    wgmma = chip.kind == "wgmma"
    inner = not p.left.transposed, p.right.transposed  # where k is contiguous
    transposed = [wgmma and p.kind in ("fp8", "int8", "tf32") and not x for x in inner]
    if any(transposed) and p.kind == "tf32" and not p.groups:  # one of them may be read from registers: the larger
        larger = p.left.rows * p.left.columns < p.right.rows * p.right.columns
        fewer = [all(transposed) and larger != bool(side) for side in (0, 1)]
        return _faster(p, chip, _orders(p, chip, fewer), _orders(p, chip, transposed))
    return _orders(p, chip, transposed)


def _faster(p: MatmulProblem, chip: Chip, *ways: list[Route]) -> list[Route]:
    """The routes, the one of less cost first."""
    return min(ways, key=lambda x: expected(p, x[0], chip) if any(x[0][1:]) else _form(chip, *sized(p, x[0])).tile.seconds)


def _orders(p: MatmulProblem, chip: Chip, transposed: list[bool]) -> list[Route]:
    """The routes in which these operands are transposed as they are copied."""
    size, wgmma = dtype(p.types[0]).bytes, chip.kind == "wgmma" and p.kind != "float"
    sides = p.left, p.right
    needed = [not x.plain for x in sides]
    unfit = [wgmma and (t or not x.fits(size)) for x, t in zip(sides, transposed)]
    few = _copied(p, needed, transposed)
    if not any(unfit):
        return [few]
    all_fit = _copied(p, [n or u for n, u in zip(needed, unfit)], transposed)
    return [all_fit, few] if _copies_pay(p, chip, few[0], all_fit, any(transposed)) else [few, all_fit]


def _copied(p: MatmulProblem, wanted: list[bool], transposed: list[bool]) -> Route:
    """The GEMM with copies of these operands."""
    size = dtype(p.types[0]).bytes
    a, b = (copy_of(x, size, t) if w else None for x, w, t in zip((p.left, p.right), wanted, transposed))
    return replace(p, left=a.operand if a else p.left, right=b.operand if b else p.right), a, b


def _copies_pay(p: MatmulProblem, chip: Chip, few: MatmulProblem, copied: Route, transposed: bool) -> bool:
    """Whether copies of all operands that TMA cannot load are faster than a GEMM by mma.sync that loads elements."""
    if transposed:
        loaded = 2.0 * p.m * p.n * p.k * max(1, p.batch) / _RATES.scalar_loads
        return loaded > chip.start + _copied_bytes(p, copied) / chip.memory
    return expected(p, copied, chip) < expected(p, (few, None, None), chip)


def _copied_bytes(p: MatmulProblem, route: Route) -> int:
    """Bytes that the copies read and write."""
    return 2 * sum(x.rows * x.columns * max(1, x.batch) * dtype(p.types[0]).bytes
                   for x, c in zip((p.left, p.right), route[1:]) if c)


def expected(p: MatmulProblem, route: Route, chip: Chip) -> float:
    """Estimated seconds of a route whose operands TMA cannot load, or could not before they were copied."""
    size, ready = dtype(p.types[0]).bytes, route[0]
    batch, rows = max(1, p.batch or p.groups), max(1, ceil(p.m / p.groups)) if p.groups else p.m
    tile = _form(chip, ready, batch, rows).tile
    if any(route[1:]):
        late = PDL_SAVES if tile.pdl else 0.0  # without PDL, because the launch follows a copy
        return tile.seconds + late + _COPY_START + _copied_bytes(p, route) / _RATES.copy
    start = without_wgmma(chip).start
    steps = ceil(ceil(p.k / 32) / tile.splits)
    words = all(x.row_start(size) % 8 == 0 for x in (p.left, p.right))
    return max(_LAUNCH + (_WORDS if words else _ELEMENTS) * (tile.seconds - start),
               start + steps * _STEP + (tile.splits > 1) * chip.start)


def tile_problem(p: MatmulProblem, chip: Chip, batch: int, rows: int) -> tuple[Chip, TileProblem]:
    """The problem that tiles are chosen for. rows: of a group or of the GEMM."""
    size = dtype(p.types[0]).bytes
    inner = not p.left.transposed, p.right.transposed  # where k is contiguous
    native = p.kind == "half" or all(inner) or p.kind == "tf32" and any(inner) and not p.groups
    if chip.kind == "wgmma" and not (native and p.left.fits(size) and p.right.fits(size)):
        chip = without_wgmma(chip)
    one = not (p.two_level or p.groups or p.open_rows)  # one accumulator, and a known number of rows
    return chip, TileProblem(rows, p.n, p.k, batch, p.kind, size * 8, dtype(p.types[2]).bits, p.two_level, *inner, one,
                             128 if p.scaling == "block" else 0, 0, p.left.row_start(size), p.right.row_start(size),
                             not p.groups, one, open_rows=bool(p.groups or p.open_rows), ragged=p.groups > 1)


def _form(chip: Chip, p: MatmulProblem, batch: int, rows: int) -> Form:
    """The form with the model's tiles."""
    chip, problem = tile_problem(p, chip, batch, rows)
    return p.form(choose_tile(chip, problem))


def sized(p: MatmulProblem, route: Route) -> tuple[MatmulProblem, int, int]:
    """(the route's problem, batch, rows) for which tiles are chosen.

    rows: the mean of groups' rows, ROWS_OF_GROUP for a kernel that takes any number; for a GEMM with such a kernel the next
    power of two.
    """
    ready = route[0]
    if p.dynamic and route[1] is None and p.groups:
        ready = replace(ready, m=p.groups * ROWS_OF_GROUP, open_rows=True)
    elif p.dynamic and route[1] is None and not p.left.transposed and not p.batch:
        ready = replace(ready, m=1 << (p.m - 1).bit_length(), open_rows=True)
    if p.groups:
        return ready, p.groups, max(1, ceil(ready.m / p.groups))
    return ready, max(1, p.batch), ready.m


def shared_rows(at: Place, rows: int, *family: Any) -> int:
    """The number of rows for which tiles of a kernel for any number are chosen: of the first call of a family the next power of
    two, of calls with another one ROWS."""
    power = 1 << (rows - 1).bit_length()
    return power if at.comes_first(family, power) else ROWS


def thin_forms(p: MatmulProblem, chip: Chip) -> tuple[GemvForm | FewRows, float] | None:
    """The form of a GEMM of one or few rows or columns that reads the other operand, which TMA cannot load, once; and its
    seconds.

    The seconds are 0 where a copy of that operand takes longer than everything else.
    """
    of_b = p.m <= p.n
    matrix, other = (p.right, p.left) if of_b else (p.left, p.right)
    few = min(p.m, p.n)
    if chip.kind != "wgmma" or p.kind != "half" or few > MOST_ROWS or p.batch or p.groups or p.scaling:
        return None
    rows = Rows(0, matrix.rows, matrix.columns, 0, matrix.down, matrix.columns, p.types[of_b])
    if not (matrix.plain and other.plain) or matrix.fits(rows.size) or not 0 < rows.words < 1 << 28:
        return None
    form = p.form(_NO_TILE)
    if few == 1:
        return GemvForm(form, rows).divided(chip.sms), 0.0
    found = FewRows(form, rows).divided(chip.sms)
    return found, found.seconds(chip.sms)


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
