"""Which matrix instruction a gemm uses, and how the warps of the block share the accumulator."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from tilelang.errors import error, register
from tilelang.layout import Fragment, Mode, tile_fragment
from tilelang.target.instructions import MMA_ROWS, MmaRow, mma_rows, operand_dtype

from .policy import GemmWarpPolicy

register("gemm-tile", ValueError, "the tile of a T.gemm does not divide into matrix instructions")
register("gemm-warps", ValueError, "the warps of the block cannot share out the accumulator of a T.gemm")
register("gemm-accumulator", AssertionError, "the accumulator of a tensor-core T.gemm is not a fragment")

SIMT = "simt"
WARP = 32
# Computed by plain multiply-adds where no matrix instruction fits: nothing is lost but speed.
_SIMT_ALWAYS = {("float32", "float32", "float32"), ("float64", "float64", "float64")}


@dataclass(frozen=True)
class GemmPlan:
    """instruction: name of a row of MMA_ROWS, or "simt".  warps: (along M, along N)."""

    instruction: str
    warps: tuple[int, int]


def choose_gemm(op: Any, arch_number: int, threads: int, rows_first: bool = False) -> GemmPlan:
    """The instruction and warp partition of a Gemm on sm_<arch_number> in a block of `threads` threads.

    rows_first: under the Square policy, put warps along M as far as they go (the accumulator is reduced along its rows
    or becomes the A operand of another gemm, so whole rows should stay in one warp).
    Raises gemm-types, gemm-tile, gemm-warps (ValueError), gemm-accumulator (AssertionError) at the op.
    """
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    types = (str(operand_dtype(a)), str(operand_dtype(b)), str(c))
    plain = (str(a), str(b), str(c))
    if plain not in _SIMT_ALWAYS and not any((str(r.a_dtype), str(r.b_dtype), str(r.c_dtype)) == types
                                             for r in MMA_ROWS.values()):
        raise error("gemm-types", f"T.gemm does not multiply {a} by {b} into {c}", span=op.span, hint="accumulate "
                    "float16 in float16 or float32, bfloat16 and fp8 in float32, int8 in int32")
    optional = plain in _SIMT_ALWAYS
    rows = mma_rows(arch_number, a, b, c)
    if not rows or threads % WARP or op.c.buffer.scope_name != "local.fragment":
        if rows and not optional and op.c.buffer.scope_name != "local.fragment":
            raise error("gemm-accumulator", f"local_buf must be a fragment, but `{op.c.buffer.name}` is "
                        f"{op.c.buffer.scope_name}", span=op.span,
                        hint="accumulate into T.alloc_fragment and copy it out")
        return GemmPlan(SIMT, (1, 1))
    row = rows[0]
    try:
        return GemmPlan(row.name, partition(op, row, threads // WARP, rows_first))
    except ValueError:
        if optional:
            return GemmPlan(SIMT, (1, 1))
        raise


def partition(op: Any, row: MmaRow, warps: int, rows_first: bool = False) -> tuple[int, int]:
    """(warps along M, warps along N) by the op's policy.  Raises gemm-tile or gemm-warps."""
    rm, rn, rk = row.shape
    if op.m % rm:
        raise error("gemm-tile", f"T.gemm: M must be divisible by {rm}, but M = {op.m}", span=op.span,
                    hint=f"{row.name} computes tiles of {rm} x {rn}: round the tile up")
    if op.k % rk:
        raise error("gemm-tile", f"T.gemm: block_K ({op.k}) must be a multiple of micro_size_k ({rk})", span=op.span,
                    hint=f"{row.name} multiplies {rk} elements of K at a time: round the tile up")
    policy = op.policy
    if rows_first and policy is GemmWarpPolicy.Square:
        policy = GemmWarpPolicy.FullRow
    try:
        return policy.compute_warp_partition(op.m, op.n, warps, (rm, rn))
    except ValueError as e:
        raise error("gemm-warps", str(e), span=op.span, hint="use fewer threads, or a larger tile") from None


def operand_fragments(op: Any, row: MmaRow, warps: tuple[int, int],
                      threads: int) -> tuple[Fragment, Fragment, Fragment]:
    """Fragments of a, b and c as the warps' instructions use them, in the shape of each region's last two dimensions.

    Every warp row holds a copy of its part of a for each warp column, and the other way round for b.  Registers: one
    instruction tile after another, a and b with K slowest, c with M slowest.
    """
    mw, nw = warps
    rm, rn, rk = row.shape
    m, n, k = op.m // (rm * mw), op.n // (rn * nw), op.k // rk
    a = tile_fragment(row.a, (m, k), (mw, 1), (1, 0), ((nw, mw),), order=(1, 0), threads=threads)
    b = tile_fragment(row.b, (k, n), (1, nw), (0, mw), ((mw, 1),), order=(0, 1), threads=threads)
    c = tile_fragment(row.c, (m, n), (mw, nw), (1, mw), threads=threads)
    return (a.permuted((1, 0)) if op.transpose_a else a, b.permuted((1, 0)) if op.transpose_b else b, c)


def simt_fragment(m: int, n: int, threads: int) -> Fragment:
    """Accumulator of a gemm of plain multiply-adds: each thread a block of rows x columns as square as it gets."""
    best: tuple[tuple[int, int], int, int] | None = None
    for across in range(1, min(n, threads) + 1):
        down = min(m, threads // across)
        rows, cols = ceil(m / down), ceil(n / across)
        key = (rows * cols, rows + cols)
        if best is None or key < best[0]:
            best = (key, down, across)
    assert best is not None  # across = 1 is always tried
    _, down, across = best
    rows, cols = ceil(m / down), ceil(n / across)
    # Neighbouring threads take neighbouring columns and rows: their reads of b, and the copy out, are contiguous.
    return Fragment((m, n), ((Mode(rows, "register", cols), Mode(down, "thread", across)),
                             (Mode(cols, "register", 1), Mode(across, "thread", 1))), threads=threads)
