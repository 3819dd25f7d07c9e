"""T.gemm_sp: GEMM with a 2:4 sparse operand, given in compressed form with metadata."""

from __future__ import annotations

from typing import Any

from tilelang.ir import Region
from tilelang.ops import GemmSchedule, GemmWarpPolicy, SparseGemm
from tilelang.ops.gemm_sp import e_factor

from .loops import options_from
from .tracing.builder import Emitted, need_builder
from .tracing.flags import flag
from .tracing.regions import check_inside, whole_region
from .tracing.state import error, example
from .tile import accumulator_clearing, emit_op, warp_policy


@example("T.gemm_sp(A_sp, E_s, B_s, acc)   # (128, 32) kept of (128, 64), (128, 4) int16, (64, 128)")
def gemm_sp(A_sparse: Any, E: Any, B: Any, C: Any, transpose_A: bool = False, transpose_E: bool = False,
            transpose_B: bool = False, policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Any = False,
            k_pack: int = 1, wg_wait: int = 0, annotations: dict[str, Any] | None = None) -> Emitted:
    """C += A @ op(B), with a sparse A: of every 4 columns (float32: of every 2), only half are stored.

    A_sparse: (M, K/2), or (K/2, M) if transpose_A, shared or fragment: the kept values, in order.
    E: (M, K/e_factor), or its transpose, shared or fragment:
    integers whose 4 bits per group, lowest group first, are the two kept columns (2 bits each, the lower column first); for
    float32 0b0100 keeps column 0, 0b1110 column 1.  B, C: as T.gemm, and so are the options.  wgmma (sm_90a) multiplies kept
    values of 16 and 8 bits of order (M, K/2) with metadata of 8 to 32 bits, both in shared memory, where K is a multiple of 64;
    elsewhere the operand is expanded in shared memory and multiplied densely.  Raises gemm-shape, gemm-types.
    """
    b = need_builder("T.gemm_sp")
    a, e = whole_region(A_sparse, "operand A of T.gemm_sp"), whole_region(E, "the metadata of T.gemm_sp")
    right = whole_region(B, "operand B of T.gemm_sp")
    (m, half), (em, en) = (matrix_of(r, t, n) for r, t, n in ((a, transpose_A, "A"), (e, transpose_E, "E")))
    k_b = matrix_of(right, transpose_B, "B")[0]
    if not e.buffer.dtype.is_int:
        raise error("gemm-types", f"the metadata of T.gemm_sp are «integers», found {e.buffer.dtype}")
    factor = e_factor(a.buffer.dtype, e.buffer.dtype)
    if 2 * half != k_b or em != m or en * factor != 2 * half:
        raise error("gemm-shape", f"T.gemm_sp K shape check failed: A holds {half} of {2 * half} columns in {m} rows, E "
                    f"describes {en * factor} in {em}, B has K = {k_b}",
                    expected=f"K = {2 * half} of E and B, {m} rows of E", found=f"{en * factor} and {k_b}, {em} rows",
                    hint=f"E needs ({m}, {2 * half // factor}) elements of {e.buffer.dtype}")
    c = whole_region(C, "operand C of T.gemm_sp")
    for r in (a, e, right, c):
        check_inside(r)
    plan, attrs = options_from(GemmSchedule, annotations, k_pack=k_pack if k_pack != 1 else None)
    return emit_op(b, SparseGemm(a, right, c, flag(transpose_A, "transpose_A"), flag(transpose_B, "transpose_B"),
                                 warp_policy(policy), accumulator_clearing(clear_accum), attrs, plan, e=e,
                                 transpose_e=flag(transpose_E, "transpose_E"), span=b.here()))


def matrix_of(r: Region, transposed: bool, name: str, what: str = "T.gemm_sp") -> tuple[int, int]:
    """(rows, columns) of an operand of the GEMM: its last two extents, exchanged if it is transposed."""
    if len(r.extents) < 2 or any(not isinstance(x, int) for x in r.extents) or any(x != 1 for x in r.extents[:-2]):
        raise error("gemm-shape", f"{what}: operand {name} must be «a matrix of static shape», found extents {r.extents}")
    rows, columns = r.extents[-2:]
    return (columns, rows) if transposed else (rows, columns)  # type: ignore[return-value]

