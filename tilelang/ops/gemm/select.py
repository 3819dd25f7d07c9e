"""Which matrix instruction a gemm uses, and how the warps of the block share the accumulator.

Tiles of any size are multiplied.  Where the instructions do not divide them the fragments count further than the tile:
rows and columns beyond it are computed from repeated elements and read by nobody, elements of K beyond it are zeros in
both operands (mma.py).  Warps that no instruction is left for are idle.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from tilelang.ir import FRAGMENT
from tilelang.errors import error, register
from tilelang.ir.record import record
from tilelang.layout import Fragment, Mode, tile_fragment
from tilelang.target.instructions import MMA_ROWS, MmaRow, mma_rows
from tilelang.target.wgmma import WGMMA_ROWS

from .policy import GemmWarpPolicy

register("gemm-accumulator", AssertionError, "the accumulator of a tensor-core T.gemm is not a whole fragment",
         expected="a whole fragment")

SIMT = "simt"
WARP = 32
# Computed by plain multiply-adds where no matrix instruction fits: nothing is lost but speed, and float32 gains bits.
_SIMT_ODD = {("float32", "float32", "float32"), ("float64", "float64", "float64")}

_FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
# Element types of operands -> accumulators; the two operands are equal but for the fp8 family.
ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "float16": ("float16", "float32"), "bfloat16": ("float32", "float16"), "float32": ("float32",), "tfloat32": ("float32",),
    "float64": ("float64",), "int8": ("int32",), "uint8": ("int32",), "int4": ("int32",),
    "uint4": ("int32",),
    **{f: ("float32", "float16") for f in _FP8}}


def multiplies(a: Any, b: Any, c: Any) -> bool:
    """Whether a gemm of these element types exists."""
    return (a == b or a in _FP8 and b in _FP8) and c in ACCUMULATORS.get(a, ())


@record
class GemmPlan:
    """instruction: name of a row of MMA_ROWS, or "simt".  warps: (along M, along N)."""

    instruction: str
    warps: tuple[int, int]


def choose_gemm(op: Any, arch_number: int, threads: int, rows_first: bool = False) -> GemmPlan:
    """The instruction and warp partition of a Gemm on sm_<arch_number> in a block of `threads` threads.

    rows_first: under the Square policy, put warps along M as far as they go (the accumulator is reduced along its rows
    or becomes the A operand of another gemm, so whole rows should stay in one warp).
    Raises gemm-types (ValueError), gemm-accumulator (AssertionError) at the op.
    """
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    if not multiplies(a, b, c):
        raise error("gemm-types", f"T.gemm does not multiply {a} by {b} into {c}",
                    found=f"{a} by {b} into {c}", span=op.span, hint="accumulate "
                    "float16 in float16 or float32, bfloat16 and fp8 in float32, int8 in int32")
    optional = (str(a), str(b), str(c)) in _SIMT_ODD
    rows = mma_rows(arch_number, a, b, c)
    if not rows and c == "float16":  # summed in float32 and rounded once a product (mma.py)
        rows = mma_rows(arch_number, a, b, "float32")
    whole = op.c.buffer.scope_name == FRAGMENT and op.c.is_full
    if not rows or threads % WARP or not whole:
        if rows and not optional and not whole:
            raise error("gemm-accumulator", f"local_buf must be a fragment, but `{op.c.buffer.name}` is "
                        f"{'accumulated in parts' if op.c.buffer.scope_name == FRAGMENT else op.c.buffer.scope_name}",
                        found=f"{'a part of ' * (not op.c.is_full)}`{op.c.buffer.name}` in {op.c.buffer.scope_name}",
                        span=op.span, hint="accumulate into a whole T.alloc_fragment and copy it out")
        return GemmPlan(SIMT, (1, 1))
    policy = op.policy
    if rows_first and policy is GemmWarpPolicy.Square:
        policy = GemmWarpPolicy.FullRow
    row = rows[0] if optional else _row(rows, op.k)
    tile = row.shape[:2]
    if op.k % row.shape[2] == 0 or not optional:
        even = policy.even_partition(op.m, op.n, threads // WARP, tile)
        if even is not None:
            return GemmPlan(row.name, even)
        if not optional:
            return GemmPlan(row.name, policy.cover(op.m, op.n, threads // WARP, tile))
    return GemmPlan(SIMT, (1, 1))


def with_warps_of(plan: GemmPlan, first: GemmPlan) -> GemmPlan:
    """The plan with the warps of the first product into the same accumulator, where both are by warp instructions whose
    accumulators are alike: one layout for both, whatever their policies.  A warp of a warp group has the rows and columns
    of an m16n8 instruction in the same registers, so the first product may be by wgmma."""
    a, b = MMA_ROWS.get(plan.instruction), MMA_ROWS.get(first.instruction)
    if a and a.shape[:2] == (16, 8) and first.instruction in WGMMA_ROWS:
        return GemmPlan(plan.instruction, first.warps)
    return GemmPlan(plan.instruction, first.warps) if a and b and a.c == b.c else plan


def _row(rows: tuple[MmaRow, ...], k: int) -> MmaRow:
    """The longest instruction that divides K; where none does, the one that takes fewest steps, shortest first.

    Of the first row's M and N: gemms of several K into one accumulator need one layout of it.
    """
    rows = tuple(r for r in rows if r.shape[:2] == rows[0].shape[:2])
    return next((r for r in rows if k % r.shape[2] == 0), None) or \
        min(rows, key=lambda r: (ceil(k / r.shape[2]), r.shape[2]))


def operand_fragments(op: Any, row: MmaRow, warps: tuple[int, int],
                      threads: int) -> tuple[Fragment, Fragment, Fragment]:
    """Fragments of a, b and c as the warps' instructions use them, in the shape of each region's last two dimensions;
    padded where the instructions count further.

    Every warp row holds a copy of its part of a for each warp column, and the other way round for b.  Registers: one
    instruction tile after another, a and b with K slowest, c with M slowest.
    """
    mw, nw = warps
    rm, rn, rk = row.shape
    m, n, k = ceil(op.m / (rm * mw)), ceil(op.n / (rn * nw)), ceil(op.k / rk)
    a = tile_fragment(row.a, (m, k), (mw, 1), (1, 0), ((nw, mw),), order=(1, 0), threads=threads)
    b = tile_fragment(row.b, (k, n), (1, nw), (0, mw), ((mw, 1),), order=(0, 1), threads=threads)
    c = tile_fragment(row.c, (m, n), (mw, nw), (1, mw), threads=threads)
    a, b, c = a.cut((op.m, op.k)), b.cut((op.k, op.n)), c.cut((op.m, op.n))
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
