"""T.gemm_blockscaled: a GEMM whose operands have a scale for each row and block of K."""

from __future__ import annotations

from math import gcd
from typing import Any

from tilelang.arith import divisible
from tilelang.ir import Bind, Buffer, Const, Expr, If, Region, Store, cast, convert, is_const, load, substitute
from tilelang.ops import GemmWarpPolicy

from .alloc import alloc_fragment
from .loops import Parallel
from .math import reinterpret
from .sparse import matrix_of
from .tile import accumulator_clearing, gemm
from .tracing.builder import Builder, Emitted, need_builder
from .tracing.flags import flag
from .tracing.regions import whole_region
from .tracing.state import error, example

WHAT = "T.gemm_blockscaled"
_CODES = {"uint8": 1, "uint32": 4}  # integers that hold so many exponents, as Blackwell's instructions read them


def _scale(r: Region, row: Any, start: Any, block: int) -> Expr:
    """The scale of a row for the block of K that begins at element `start`, as float32."""
    place = (*r.mins[:-2], r.mins[-2] + row, r.mins[-1])
    packed = _CODES.get(r.dtype, 1)
    at = start // block % (r.extents[-1] * packed)
    value: Any = load(r.buffer, (*place[:-1], place[-1] + at // packed))
    if r.dtype in _CODES:
        value = reinterpret(cast(value >> cast(at % packed * 8, r.dtype), "uint8"), "float8_e8m0fnu")
    return cast(value, "float32")


def _check_scales(name: str, r: Region, rows: int, block: Any, buffer: Buffer) -> None:
    if len(r.extents) < 2 or r.extents[-2] != rows or not isinstance(r.extents[-1], int) or any(n != 1 for n in r.extents[:-2]):
        raise error("gemm-scales", f"{WHAT}: SF{name} has extents ‹{r.extents}›, {name} `{buffer.name}` has {rows} rows",
                    expected=f"({rows}, blocks of K) scales")
    if not r.dtype.is_float and r.dtype not in _CODES:
        raise error("gemm-scales", f"{WHAT}: SF{name} has elements of ‹{r.dtype}›",
                    expected="floats, or uint8 and uint32 that hold 1 and 4 values of float8_e8m0fnu")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise error("gemm-scales", f"{WHAT}: sf_{name.lower()}_granularity_k is a number of elements, found {block!r}",
                    expected="a positive integer")


def _start(b: Builder, k_start: Any, step: int) -> Any:
    """k_start, which must provably be a multiple of the step: a scale holds for whole steps."""
    e = convert(k_start)
    known = {s.var: s.value for f in b.frames for s in f.stmts if isinstance(s, Bind)}
    full: Any = e
    for _ in known:
        full = substitute(full, known)
    if not e.dtype.is_int or not divisible(full, step):
        raise error("gemm-scales", f"{WHAT}: k_start = ‹{full}› is not provably «a multiple of {step}»",
                    hint="write it as k * block_K")
    return int(e.value) if isinstance(e, Const) else e


def _steps(r: Region, transposed: bool, at: int, step: int) -> Region:
    """`step` elements along K of an operand from element `at` on.  transposed: K is its last but one dimension."""
    d = len(r.extents) - (2 if transposed else 1)
    return Region(r.buffer, tuple(m + at if i == d else m for i, m in enumerate(r.mins)),
                  tuple(step if i == d else n for i, n in enumerate(r.extents)), span=r.span)


@example("T.gemm_blockscaled(A_s, B_s, acc, SA_s, SB_s, k_start=0, sf_a_granularity_k=32, sf_b_granularity_k=32)")
def gemm_blockscaled(A: Any, B: Any, C: Any, SFA: Any, SFB: Any, transpose_A: bool = False, transpose_B: bool = False,
                     policy: GemmWarpPolicy = GemmWarpPolicy.Square, clear_accum: Any = False, *, k_start: Any,
                     sf_a_granularity_k: int, sf_b_granularity_k: int, annotations: dict[str, Any] | None = None,
                     mbar: Any = None, use_2cta: bool = False, sf_layout: Any = None) -> Emitted:
    """C += (op(A) * SFA) @ (op(B) * SFB) (= when clear_accum): a scale for each row and block of K; synchronous, of the block.

    A, B, C: as T.gemm, C of floats, A and B also of integers.  SFA: (M, blocks), SFB: (N, blocks): floats, or uint8 and uint32
    that hold 1 and 4 values of float8_e8m0fnu.  k_start: the first K of this tile.  sf_*_granularity_k: elements of K that a
    scale covers: element k of row i has SFA[i, (k_start + k) // sf_a_granularity_k], modulo the blocks that SFA holds.
    Each step of K with scales of its own is multiplied by T.gemm, then scaled in float32 and added in C's type.
    Raises gemm-scales, also for a k_start that is not provably a multiple of the step; not-available for mbar, use_2cta and
    sf_layout, which are Blackwell's; what T.gemm raises.
    """
    b = need_builder(WHAT)
    if mbar is not None or use_2cta or sf_layout is not None:
        raise error("not-available", f"{WHAT} with mbar, use_2cta or sf_layout is for Blackwell (sm_100)",
                    expected="none of them", found="one of them", hint="leave them out: the operation is synchronous")
    a, b_, c, sa, sb = (whole_region(x, f"operand {n} of {WHAT}") for x, n in ((A, "A"), (B, "B"), (C, "C"), (SFA, "SFA"),
                                                                             (SFB, "SFB")))
    across, down = flag(transpose_A, "transpose_A"), flag(transpose_B, "transpose_B")
    (m, k), n = matrix_of(a, across, "A", WHAT), matrix_of(b_, down, "B", WHAT)[1]
    _check_scales("A", sa, m, sf_a_granularity_k, a.buffer)
    _check_scales("B", sb, n, sf_b_granularity_k, b_.buffer)
    if not c.dtype.is_float:
        raise error("gemm-scales", f"{WHAT} adds floats to C, found {c.dtype}", expected="a C of floats")
    step = gcd(sf_a_granularity_k, sf_b_granularity_k, k)
    start, clear = _start(b, k_start, step), accumulator_clearing(clear_accum)
    wide = "float64" if c.dtype == "float64" else "float32"
    part = alloc_fragment((m, n), "int32" if a.dtype.is_int else c.dtype)
    for at in range(0, k, step):
        left, right = _steps(a, across, at, step), _steps(b_, not down, at, step)
        gemm(left, right, part, across, down, policy, True, 1, None, annotations)
        with Parallel(m, n) as (i, j):
            here, scales = c.at(i, j), (
                _scale(sa, i, start + at, sf_a_granularity_k), _scale(sb, j, start + at, sf_b_granularity_k))
            value = cast(cast(load(part, (i, j)), wide) * scales[0] * scales[1], c.dtype)
            first, more = (Store(c.buffer, here, v, span=b.here()) for v in (value, load(c.buffer, here) + value))
            if at == 0 and not is_const(clear, False):
                b.emit(first if is_const(clear, True) else If(clear, first, more, span=b.here()))
            else:
                b.emit(more)
    return Emitted()
