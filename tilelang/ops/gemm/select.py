"""Choose the matrix instruction of a gemm and its warp partition.

Tiles of any size are supported.  Where a tile is no multiple of the instruction's sizes, the fragments are padded: rows and
columns beyond the edge are computed from repeated elements and never read, and elements of K beyond it are zero in both
operands (mma.py).  Warps without a tile are idle.
"""

from __future__ import annotations

from enum import IntEnum
from math import ceil
from typing import Any

from tilelang.errors import error, facts, register
from tilelang.ir import FRAGMENT, SHARED, Buffer
from tilelang.ir.record import record
from tilelang.layout import Fragment, Mode, tile_fragment
from tilelang.target.thread_calls import WARP
from tilelang.target.mma import MmaRow, machines_with, mma_rows, row as row_of
from tilelang.target.wgmma import WGMMA_ROWS


class GemmWarpPolicy(IntEnum):
    """How warps are placed: Square balances them over M and N, FullRow puts all along M, FullCol all along N."""

    Square = 0
    FullRow = 1
    FullCol = 2

    def is_square(self) -> bool: return self is GemmWarpPolicy.Square
    def is_full_row(self) -> bool: return self is GemmWarpPolicy.FullRow
    def is_full_col(self) -> bool: return self is GemmWarpPolicy.FullCol

    def compute_warp_partition(self, M: int, N: int, num_warps: int,
                               tile: tuple[int, int] = (16, 8)) -> tuple[int, int]:
        """(warps along M, warps along N) for an accumulator of M x N in instruction tiles of `tile`.

        Raises ValueError when the warps cannot cover it evenly.

        >>> GemmWarpPolicy.Square.compute_warp_partition(128, 128, 4)
        (2, 2)
        """
        best = self.even_partition(M, N, num_warps, tile)
        if best is None:
            raise facts(ValueError(f"No valid warp partition for T.gemm: M={M}, N={N} cannot be evenly covered by "
                                   f"{tile[0]}x{tile[1]} tiles of {num_warps} warps"),
                        f"tiles that {num_warps} warps divide", f"M={M}, N={N}")
        return best

    def even_partition(self, m: int, n: int, warps: int, tile: tuple[int, int]) -> tuple[int, int] | None:
        """(warps along M, warps along N) such that all warps get equally many whole tiles; None where that is impossible."""
        options = [(i, warps // i) for i in range(1, warps + 1)
                   if warps % i == 0 and m % (tile[0] * i) == 0 and n % (tile[1] * (warps // i)) == 0]
        if not options:
            return None
        if self is GemmWarpPolicy.FullRow:
            return max(options)
        if self is GemmWarpPolicy.FullCol:
            return min(options)
        # A warp reads M/m rows of A and N/n columns of B per step, so this sum measures the shared-memory traffic.
        return min(options, key=lambda p: (m // p[0] + n // p[1], -p[0]))

    def cover(self, m: int, n: int, warps: int, tile: tuple[int, int]) -> tuple[int, int]:
        """(warps along M, warps along N), at most `warps` in total, whose tiles cover an accumulator of any size.

        All warps have the same number of tiles.  The last tiles may extend beyond the edge, but none lies wholly beyond it.

        >>> GemmWarpPolicy.Square.cover(16, 104, 12, (16, 8))
        (1, 7)
        """
        best: tuple[tuple[int, ...], tuple[int, int]] | None = None
        down, across = ceil(m / tile[0]), ceil(n / tile[1])  # tiles
        for i in range(1, min(warps, down) + 1):
            rows, cols = ceil(down / i), ceil(across / min(warps // i, across))  # tiles of one warp
            used = ceil(down / rows), ceil(across / cols)
            work, traffic = rows * cols, rows * tile[0] + cols * tile[1]
            first = {GemmWarpPolicy.FullRow: rows, GemmWarpPolicy.FullCol: cols}.get(self, 0)
            key = (first, work, traffic, used[0] * used[1])
            if best is None or key < best[0]:
                best = (key, used)
        assert best is not None  # i = 1 is always tried
        return best[1]

    @staticmethod
    def to_prime_factors(n: int) -> list[int]:
        """Prime factors of n in ascending order."""
        out, p = [], 2
        while n > 1:
            while n % p == 0:
                out.append(p)
                n //= p
            p += 1
        return out

    @classmethod
    def from_warp_partition(cls, m_warp: int, n_warp: int) -> GemmWarpPolicy:
        """The policy that gives this warp partition."""
        if n_warp == 1:
            return cls.FullRow
        return cls.FullCol if m_warp == 1 else cls.Square


register("gemm-accumulator", AssertionError, "the accumulator of a tensor-core T.gemm is not a whole fragment",
         expected="a whole fragment")

SIMT = "simt"
# Types that fall back to SIMT multiply-adds where no matrix instruction fits: slower, and float32 is more exact.
_SIMT_ODD = {("float32", "float32", "float32"), ("float64", "float64", "float64")}

COLUMNS = 4  # that a lane loads at once of an operand with K outermost
_FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
# Operand type -> accumulator types.  The two operands have equal types, except within the fp8 family.
ACCUMULATORS: dict[str, tuple[str, ...]] = {
    "float16": ("float16", "float32"), "bfloat16": ("float32", "float16"), "float32": ("float32",), "tfloat32": ("float32",),
    "float64": ("float64",), "int8": ("int32",), "uint8": ("int32",), "int4": ("int32",),
    "uint4": ("int32",),
    **{f: ("float32", "float16") for f in _FP8}}


def multiplies(a: Any, b: Any, c: Any) -> bool:
    """Whether gemm supports these element types."""
    return (a == b or a in _FP8 and b in _FP8) and c in ACCUMULATORS.get(a, ())


def _rows_of(op: Any, target: Any) -> tuple[MmaRow, ...]:
    """The instructions for the element types of a GEMM, the preferred first."""
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    if c == "float16":  # perhaps accumulated in float32 and rounded once per GEMM (mma.py)
        return mma_rows(target, a, b, c) or mma_rows(target, a, b, "float32")
    return mma_rows(target, a, b, c)


def computed_form(op: Any, target: Any) -> Any:
    """The GEMM as its instruction computes it: of the transposed matrices where a lane holds a column of the accumulator.

    Then a lane holds consecutive elements of a row, and the registers of c are those of an operand of another GEMM."""
    rows = _rows_of(op, target)
    return op.transposed() if rows and rows[0].in_columns and op.plan.wait is None else op


def row_of_steps(op: Any, row: MmaRow) -> MmaRow:
    """The row whose K is that of one step of a GEMM: of as many instructions as let a lane load 16 bytes along k at once.

    For an operand in registers a lane holds those elements of k that it holds of the rows of an accumulator, unless it is a
    copy of a shared tile (`kept`).  Where loads transpose, the lanes that are served together load neighbouring rows."""
    if not row.run:
        return row
    held = row.in_columns and not op.plan.kept and any(r.buffer.scope_name == FRAGMENT for r in (op.a, op.b))
    rows = op.plan.transposed and (op.transpose_a or not op.transpose_b)
    width = 4 if held or rows else 128 // row.a_dtype.bits
    pack = max(1, width // row.run)
    while not held and pack > 1 and op.k % (row.shape[2] * pack):
        pack //= 2
    row = row.with_k(pack, width)
    return row if op.plan.columns == 1 else row.with_columns(op.plan.columns)


def grouped_columns(plans: list[tuple[Any, GemmPlan]], ops: list[Any], loops: Any, transposed: tuple[int, ...]) -> set[Buffer]:
    """Accumulators into which all GEMMs (in their computed form) load columns of a in groups.

    plans: (GEMM, plan).  transposed: bits of elements that loads transpose, which are not grouped.  An accumulator that becomes
    an operand of another GEMM keeps the order of that operand.
    """
    held = {r.buffer for op, _ in plans for r in (op.a, op.b) if r.buffer.scope_name == FRAGMENT}
    links = [[op.src.buffer, op.dst.buffer] for op in ops if op.op_name == "copy"] + [
        [t.buffer for t in loop.touches if t.buffer.ndim == 2] for loop in loops]
    for _ in links:
        held |= {b for link in links if held & set(link) for b in link if b.scope_name == FRAGMENT}
    accumulators = {op.c.buffer for op, _ in plans} - held
    return accumulators - {op.c.buffer for op, plan in plans if op.a.dtype.bits in transposed or not _loads_columns(op, plan)}


def _loads_columns(op: Any, plan: GemmPlan) -> bool:
    row = row_of(plan.instruction)
    return bool(row and row.run and row.in_columns and op.transpose_a and op.a.buffer.scope_name in SHARED
                and op.a.dtype.bits in (8, 16, 32) and op.m % (row.shape[0] * COLUMNS * plan.warps[0]) == 0
                and op.k % row_of_steps(op, row).shape[2] == 0)


@record
class GemmPlan:
    """instruction: name of a row of target/mma.py, or "simt".  warps: (along M, along N)."""

    instruction: str
    warps: tuple[int, int]


def choose_gemm(op: Any, target: Any, threads: int, rows_first: bool = False) -> GemmPlan:
    """The instruction and warp partition of a Gemm on a Target in a block of `threads` threads.

    rows_first: under the Square policy, put as many warps as possible along M (the accumulator is reduced along its rows or
    becomes the A operand of another gemm, so a whole row should stay in one warp).
    Raises gemm-types (ValueError), gemm-accumulator (AssertionError) at the op.
    """
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    if not multiplies(a, b, c):
        raise error("gemm-types", f"T.gemm does not multiply ‹{a} by {b} into {c}›", span=op.span,
                    hint="accumulate float16 in float16 or float32, bfloat16 and fp8 in float32, int8 in int32")
    optional = (str(a), str(b), str(c)) in _SIMT_ODD
    rows = _rows_of(op, target)
    whole = op.c.buffer.scope_name == FRAGMENT and op.c.is_full
    warp = rows[0].lanes if rows else 1
    if not rows or not _has_warps(threads, warp) or not whole:
        if rows and not optional and not whole:
            where = "a part of a fragment" if op.c.buffer.scope_name == FRAGMENT else f"in {op.c.buffer.scope_name} memory"
            raise error("gemm-accumulator", f"the accumulator `{op.c.buffer.name}` is {where} (local_buf must be a fragment)",
                        found=f"{'a part of ' * (not op.c.is_full)}`{op.c.buffer.name}` in {op.c.buffer.scope_name}",
                        span=op.span, hint="accumulate into a whole T.alloc_fragment and copy it out")
        return GemmPlan(SIMT, (1, 1))
    policy = op.policy
    if rows_first and policy is GemmWarpPolicy.Square:
        policy = GemmWarpPolicy.FullCol if op.plan.exchanged else GemmWarpPolicy.FullRow
    row = rows[0] if optional else _row(rows, op.k)
    tile = row.shape[:2]
    if op.k % row.shape[2] == 0 or not optional:
        even = policy.even_partition(op.m, op.n, threads // warp, tile)
        if even is not None:
            return GemmPlan(row.name, even)
        if not optional:
            return GemmPlan(row.name, policy.cover(op.m, op.n, threads // warp, tile))
    return GemmPlan(SIMT, (1, 1))


def _has_warps(threads: int, lanes: int) -> bool:
    """Whether a block has warps of so many lanes; half a wave of 64 may be left over, and is idle."""
    return threads % WARP == 0 and threads >= lanes


def why_simt(op: Any, target: Any, threads: int) -> str:
    """Why a Gemm that choose_gemm computes by multiply-adds has no matrix instruction and, behind a semicolon, what to change;
    "" where the target has none for float32 and float64, which it multiplies at its full rate otherwise."""
    rows = _rows_of(op, target)
    if not rows:
        have = " or ".join(machines_with(target, op.a.dtype, op.b.dtype, op.c.dtype))
        return "" if op.a.dtype.bits >= 32 else (f"{target.arch} has no matrix instruction for {op.a.dtype} and {op.b.dtype}; "
                                                 f"cast both to float16{have and f', or compile for {have}'}")
    if not _has_warps(threads, rows[0].lanes):
        return f"{threads} threads are no whole warps; take a multiple of {rows[0].lanes} threads"
    if op.c.buffer.scope_name != FRAGMENT or not op.c.is_full:
        return "the accumulator is not a whole fragment; accumulate into a whole T.alloc_fragment"
    m, n, k = rows[0].shape
    return (f"{op.m} x {op.n} x {op.k} is not made of instructions of {m} x {n} x {k}; take multiples of these, or convert the "
            "operands to float16")


def with_warps_of(plan: GemmPlan, first: GemmPlan) -> GemmPlan:
    """The plan with the warp partition of `first`, an earlier gemm into the same accumulator.

    Applies where both use warp instructions with compatible accumulator layouts: then one layout serves both, whatever their
    policies.  A warp of a wgmma warp group has its rows and columns in the same registers as an m16n8 instruction, so `first`
    may use wgmma.
    """
    a, b = row_of(plan.instruction), row_of(first.instruction)
    if a and a.shape[:2] == (16, 8) and first.instruction in WGMMA_ROWS:
        return GemmPlan(plan.instruction, first.warps)
    return GemmPlan(plan.instruction, first.warps) if a and b and a.c == b.c else plan


def _row(rows: tuple[MmaRow, ...], k: int) -> MmaRow:
    """The instruction with the longest K that divides the gemm's K; if none does, that with fewest steps, shortest first.

    All have the M and N of the first row: gemms with different K into one accumulator need one layout of the accumulator.
    """
    rows = tuple(r for r in rows if r.shape[:2] == rows[0].shape[:2])
    return next((r for r in rows if k % r.shape[2] == 0), None) or \
        min(rows, key=lambda r: (ceil(k / r.shape[2]), r.shape[2]))


def operand_fragments(op: Any, row: MmaRow, warps: tuple[int, int],
                      threads: int) -> tuple[Fragment, Fragment, Fragment]:
    """Fragments of a, b and c as the instructions use them, in the shape of each region's last two dimensions.

    Each is padded where the instruction tiles extend beyond the edge.  Every warp column holds a copy of a's rows, and every
    warp row a copy of b's columns.  Registers: one instruction tile after another, a and b with K slowest, c with M slowest.
    """
    mw, nw = warps
    row = row_of_steps(op, row)
    rm, rn, rk = row.shape
    m, n, k = ceil(op.m / (rm * mw)), ceil(op.n / (rn * nw)), ceil(op.k / rk)
    a = tile_fragment(row.a, (m, k), (mw, 1), (1, 0), ((nw, mw),), order=(1, 0), threads=threads)
    b = tile_fragment(row.b, (k, n), (1, nw), (0, mw), ((mw, 1),), order=(0, 1), threads=threads)
    c = tile_fragment(row.c, (m, n), (mw, nw), (1, mw), threads=threads)
    a, b, c = a.cut((op.m, op.k)), b.cut((op.k, op.n)), c.cut((op.m, op.n))
    c = c.permuted((1, 0)) if op.plan.exchanged else c
    return (a.permuted((1, 0)) if op.transpose_a else a, b.permuted((1, 0)) if op.transpose_b else b, c)


def simt_fragment(m: int, n: int, threads: int) -> Fragment:
    """Accumulator layout of a SIMT gemm: each thread has a block of rows x columns, as square as possible."""
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
    # Neighbouring threads have neighbouring columns and rows: reads of b and the store of c are contiguous.
    return Fragment((m, n), ((Mode(rows, "register", cols), Mode(down, "thread", across)),
                             (Mode(cols, "register", 1), Mode(across, "thread", 1))), threads=threads)
