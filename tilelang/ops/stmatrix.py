"""Copy accumulators to shared memory by stmatrix (sm_90): the counterpart of ldmatrix.py.

    lane l holds elements (l/4, 2*(l%4) .. +1) of each 8x8 matrix, or with `trans` elements (2*(l%4) .. +1, l/4)
    lanes 8*j .. 8*j+7 give the addresses of the rows of matrix j

The shared elements have 16 bits; wider registers are rounded before the store, matrix by matrix.  Source: PTX ISA,
"Warp-level matrix store instruction: stmatrix".
"""

from __future__ import annotations

from typing import Any

from tilelang.ir import AddressOf, Expr, Region, Stmt, Store, cast, const, do, load, ramp, seq
from tilelang.layout import THREAD

from .ldmatrix import PAIRS, ROWS, matrix_rows, moves_rows, outer_digits, over_matrices, place_in, threads_used

WARP = 32


def copy_by_stmatrix(cx: Any, src: Region, dst: Region, span: Any) -> Stmt | None:
    """dst = cast(src) by stmatrix; None where types, layouts or alignment do not permit it."""
    if dst.dtype.bits != 16 or dst.dtype.lanes != 1 or src.dtype.lanes != 1 or src.dtype.bits not in (16, 32) or \
            dst.dtype.is_bool or not moves_rows(cx, src, dst, "has_stmatrix"):
        return None
    frag = cx.layout_of(src.buffer)
    if frag.copies:
        return None
    (in_rows, out_rows), (in_cols, out_cols) = (outer_digits(ms, 8) for ms in frag.modes)
    if (in_rows, in_cols) not in ((ROWS, PAIRS), (PAIRS, ROWS)):
        return None
    trans = in_rows == PAIRS
    used = threads_used(frag)
    digits = [(d, o) for d, outs in enumerate((out_rows, out_cols)) for o in outs]
    if used % WARP or any(o.stride % WARP for _, o in digits if o.to == THREAD):
        return None
    index, num, loops, register = matrix_rows(cx, digits)
    out: Stmt = _stored(cx, src, dst, register, place_in(cx, dst, *index), num, trans, span)
    return over_matrices(cx, out, loops, used)


def _stored(cx: Any, src: Region, dst: Region, register: Expr, place: Expr, num: int, trans: bool, span: Any) -> Stmt:
    local, n = cx.local_of(src.buffer), 2 * num
    attrs = {"num": num, "trans": trans}
    if src.dtype == dst.dtype:
        return do("stmatrix", place, AddressOf(local, (register,)), span=span, **attrs)
    packed = cx.new_local("packed", n, dst.dtype)
    value = load(local, (ramp(register, n),))
    zero = const(0)
    return seq(Store(packed, (ramp(zero, n),), cast(value, dst.dtype.with_lanes(n)), span=span),
               do("stmatrix", place, AddressOf(packed, (zero,)), span=span, **attrs))
