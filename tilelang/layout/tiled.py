"""Builds the fragments of whole blocks, from the 32-lane fragment of an instruction or from a tile shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tilelang.arith.integers import cdiv, next_power_of_2, row_major_strides

from .fragment import Fragment
from .mode import REGISTER, THREAD, Mode


def tile_fragment(base: Fragment, repeats: Sequence[int], warps: Sequence[int],
                  warp_strides: Sequence[int] | None = None, replicas: Sequence[tuple[int, int]] = (),
                  order: Sequence[int] | None = None, threads: int | None = None) -> Fragment:
    """A block's fragment: `base` repeated in registers, then over warps.

    base: the instruction's fragment over its lanes.  repeats: instruction tiles per warp, per dimension.  warps: warps
    per dimension; each holds one contiguous sub-tile.  warp_strides: difference of the warp numbers of neighbours along a
    dimension (default: the warps of the first dimension are consecutive).  replicas: (count, stride in warps) of warps that
    hold copies.  order: the dimensions from slowest to fastest register of their repeats (default first to last).
    threads: threads of the block.

    A 64x64 accumulator of m16n8 tiles on 2x2 warps: tile_fragment(row.c, (2, 4), (2, 2)).
    """
    lanes, registers = base.threads, base.registers
    if warp_strides is None:
        warp_strides = row_major_strides(warps[::-1])[::-1]
    modes: list[tuple[Mode, ...]] = [tuple(m) for m in base.modes]
    step = registers
    for d in reversed(tuple(order) if order is not None else range(base.ndim)):
        modes[d] = (Mode(repeats[d], REGISTER, step), *modes[d])
        step *= repeats[d]
    for d, (n, s) in enumerate(zip(warps, warp_strides)):
        modes[d] = (Mode(n, THREAD, s * lanes), *modes[d])
    copies: list[Any] = [Mode(n, THREAD, s * lanes) for n, s in replicas] + list(base.copies)
    shape = [n * r * w for n, r, w in zip(base.shape, repeats, warps)]
    return Fragment(shape, modes, replicate=tuple(copies), threads=threads)


def make_gemm_fragment_8x8() -> Fragment:
    """8x8 over 32 lanes: lane 4*i + j//2 holds (i, j) in register j % 2 (PTX ISA, mma.m8n8 accumulator)."""
    return Fragment((8, 8), ((Mode(8, THREAD, 4),), (Mode(4, THREAD, 1), Mode(2, REGISTER, 1))), threads=32)


def make_gemm_fragment_8x8_transposed() -> Fragment:
    """The 8x8 fragment with rows and columns exchanged."""
    return make_gemm_fragment_8x8().permuted((1, 0))


def make_fully_replicated_layout_fragment(buf: Any, threads: int) -> Fragment:
    """Every thread holds the whole tile, in row-major registers."""
    return replicated_fragment(tuple(buf.shape), threads)


def replicated_fragment(shape: Sequence[int], threads: int) -> Fragment:
    """Every one of `threads` threads holds the whole tile, in row-major registers."""
    modes = [(Mode(n, REGISTER, step),) for n, step in zip(shape, row_major_strides(shape))]
    return Fragment(shape, modes, replicate=(Mode(threads, THREAD, 1),), threads=threads)


def row_fragment(shape: Sequence[int], threads: int, vector: int = 1, order: Sequence[int] | None = None) -> Fragment:
    """A tile distributed so that neighbouring threads hold neighbouring vectors along the fastest dimension.

    vector: consecutive elements of the fastest dimension in each thread.  order: dimensions from slowest to fastest
    (default first to last).  Threads are split over the dimensions, fastest first.  Elements beyond the threads go to
    further registers.  A dimension that does not divide evenly is padded.
    """
    shape = tuple(shape)
    order = tuple(order) if order is not None else tuple(range(len(shape)))
    fast = order[-1] if order else None
    units = [(-(-n // vector) if d == fast else n) for d, n in enumerate(shape)]
    across = _split_threads([units[d] for d in order], threads)
    modes: list[list[Mode]] = [[] for _ in shape]
    reg, step = vector, 1
    for d, t in zip(reversed(order), reversed(across)):
        if d == fast and vector > 1:
            modes[d].insert(0, Mode(vector, REGISTER, 1))
        modes[d].insert(0, Mode(t, THREAD, step))
        step *= t
    for d, t in zip(reversed(order), reversed(across)):
        n = -(-units[d] // t)
        modes[d].insert(0, Mode(n, REGISTER, reg))
        reg *= n
    return Fragment(shape, [tuple(m) for m in modes], threads=threads)


def viewed_fragment(shape: Sequence[int], cuts: Sequence[int], threads: int, vector: int = 1) -> Fragment:
    """A tile distributed over threads so that it is also a fragment in other shapes (reshaped views of the tile).

    cuts: the row-major strides of the dimensions of these shapes, in elements.  No digit of the layout crosses a cut.  Between
    two cuts that do not divide each other, all elements are in different threads or all are in registers.
    vector: consecutive elements in each thread.  With enough common cuts the tile is divided evenly over the threads; otherwise
    a thread may hold up to the whole tile, as in replicated_fragment.
    """
    total = math.prod(shape)
    known = sorted({c for c in (*cuts, vector) if 1 < c < total})
    clean = [1, *(c for c in known if total % c == 0 and all(c % d == 0 or d % c == 0 for d in known)), total]
    digits: list[Mode] = []  # outermost first
    left, reg, step = threads, 1, 1
    for low, high in zip(clean, clean[1:]):
        size, whole = high // low, any(low < c < high for c in known)
        if high <= vector:
            t = 1
        elif whole:
            t = size if size <= left else 1
        else:
            t = max(k for k in range(1, min(left, size) + 1) if size % k == 0)
        digits = [Mode(size // t, REGISTER, reg), Mode(t, THREAD, step), *digits]
        left, reg, step = left // t, reg * (size // t), step * t
    copies = (Mode(threads, THREAD, 1),) if step == 1 else ()
    return Fragment((total,), (tuple(digits),), replicate=copies, threads=threads).reshape(shape)


def _split_threads(units: Sequence[int], threads: int) -> list[int]:
    """Threads per dimension (slowest first).

    Prefers the fewest vectors per thread, then powers of two, then most threads along the fastest dimension, at most a warp:
    32 neighbours already fill whole lines, and a reduction along this dimension stays inside the warp.
    """
    if not units:
        return []
    if len(units) == 1:
        return [min(threads, next_power_of_2(units[0]) if units[0] >= threads or _pow2(threads) else units[0])]
    best: tuple[tuple[int, int, bool, int], list[int]] | None = None
    n = units[-1]
    options = {1 << k for k in range(threads.bit_length()) if 1 << k <= threads} | {min(n, threads), threads}
    for t in sorted(options):
        if t > n and t // 2 >= n:
            continue
        rest = _split_threads(units[:-1], threads // t) if threads // t > 1 else [1] * (len(units) - 1)
        rounds = math.prod(cdiv(u, k) for u, k in zip(units, [*rest, t]))
        odd = sum(not _pow2(k) for k in [*rest, t])
        key = (rounds, odd, t > 32, -t)
        if best is None or key < best[0]:
            best = (key, [*rest, t])
    assert best is not None  # 1 is always an option
    return best[1]


def _pow2(n: int) -> bool:
    return n & (n - 1) == 0
