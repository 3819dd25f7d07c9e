"""A GEMM whose epilogue is the caller's function, with reductions over rows or over all of the result.

    launch 1: a tile of A @ B, the function of its elements, the reductions of its rows over its columns -> partials
    launch 2: the partials of a row, in order -> the reductions of rows
    launch 3: those of rows -> the reductions over all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tilelang.language as T
from tilelang.jit.captured import Token

from .kernels import Form, main_loop

ROWS = 128  # of a block of the second launch
AT_ONCE = 1024  # rows of a block of the third launch
HALVED = 64  # rows and columns of a block that halves an operand
IDENTITY = {"sum": 0.0, "max": float("-inf"), "absmax": 0.0}
HOW = tuple(IDENTITY)
Value = Callable[..., Any]


@dataclass(frozen=True)
class Reduced:
    """A reduction of value(x, i, j, *tensors) over the elements x of a result.

    how: "sum", "max" or "absmax".  value: None for x itself.  whole: over all elements, else over each row.
    """

    how: str
    value: Value | None = field(compare=False)
    whole: bool


@dataclass(frozen=True)
class FusedForm:
    """What a kernel is compiled for.

    plain: sizes, types, storage and tile.  epilogue: the caller's function, or None.  tensors: (shape, element type) of those
    that functions read; a size of None is the number of rows.  stored: whether C is written.  states: stand for the functions
    and for the values that they read.  exact: float32 operands are multiplied as sums of two of tf32.  pair: A is multiplied by
    two matrices, and the epilogue takes an element of both accumulators.
    """

    plain: Form
    epilogue: Value | None = field(compare=False)
    reduced: tuple[Reduced, ...]
    tensors: tuple[tuple[tuple[int | None, ...], str], ...]
    stored: bool
    states: tuple[Token | None, ...]
    exact: bool = False
    pair: bool = False

    def tensor(self, n: int, m: Any) -> Any:
        """The n-th tensor that functions read; of one element where there are fewer."""
        shape, element = self.tensors[n] if n < len(self.tensors) else ((1,), "float32")
        return T.Tensor(tuple(m if size is None else size for size in shape), element)


def inside(index: Any, tile: int, extent: Any) -> Any:
    """An index of a tile's element; in the last tile, at most that of the last row or column."""
    return index if isinstance(extent, int) and extent % tile == 0 else T.min(index, extent - 1)


def _combined(how: str, x: Any, y: Any) -> Any:
    return x + y if how == "sum" else T.max(x, y)


@T.macro
def halve(x, rows, columns, transposed, halves, first):
    """x as a sum of two of tf32, which differ from it by 2^-22 of it at most: halves[0] the small ones, halves[1] the large
    ones, both (rows, columns) from row `first` on.  transposed: x is stored (columns, rows).  Both have the sign of x, so that
    an infinity of the other operand meets no two signs."""
    with T.Kernel(T.ceildiv(columns, HALVED), T.ceildiv(rows, HALVED), threads=256) as (bx, by):
        tile = T.alloc_shared((HALVED, HALVED), "float32")
        T.copy(x[bx * HALVED, by * HALVED] if transposed else x[by * HALVED, bx * HALVED], tile)
        for i, j in T.Parallel(HALVED, HALVED):
            if by * HALVED + i < rows and bx * HALVED + j < columns:
                value = tile[j, i] if transposed else tile[i, j]
                large = T.reinterpret(T.reinterpret(value, "int32") & ~0x1FFF, "float32")
                small = T.if_then_else(value == large, 0.0, value - large)  # 0 for infinities too
                halves[0, first + by * HALVED + i, bx * HALVED + j] = T.reinterpret(
                    (T.reinterpret(small, "int32") + 0x1000) & ~0x1FFF, "float32")  # to the nearest
                halves[1, first + by * HALVED + i, bx * HALVED + j] = large


@T.macro
def exact_loop(f, m, halves, at):
    """main_loop for float32 by three GEMMs of tf32 over the halves: small large + large small + large large.

    Tensor cores cut what an accumulator cannot hold.  So a step has an accumulator of its own, which threads add to the sum.
    """
    t = f.tile
    As, Bs = T.alloc_shared((t.bm, t.bk), "float32"), T.alloc_shared((t.bn, t.bk), "float32")
    part, Cf = T.alloc_fragment((t.bm, t.bn), "float32"), T.alloc_fragment((t.bm, t.bn), "float32")
    T.use_swizzle(t.panel_size, order=t.order)
    T.clear(Cf)
    for ko in T.Pipelined(3 * f.steps, num_stages=t.stages):
        which, k = ko // f.steps, ko % f.steps * t.bk
        T.copy(halves[T.if_then_else(which == 0, 0, 1), at[1] * t.bm, k], As)
        T.copy(halves[T.if_then_else(which == 1, 0, 1), m + at[0] * t.bn, k], Bs)
        T.gemm(As, Bs, part, transpose_B=True, clear_accum=True)
        for i, j in T.Parallel(t.bm, t.bn):
            Cf[i, j] += part[i, j]
    return Cf


@T.macro
def pair_loop(f, A, B, D, at):
    """The accumulators of A @ B and of A @ D over all steps of k."""
    t = f.tile
    As, Bs, Ds = (T.alloc_shared(shape, kind) for shape, kind in zip((f.left_tile, f.right_tile, f.right_tile), (
        f.types[0], f.types[1], f.types[1])))
    Cf, Ef = T.alloc_fragment((t.bm, t.bn), f.types[3]), T.alloc_fragment((t.bm, t.bn), f.types[3])
    T.use_swizzle(t.panel_size, order=t.order)
    T.clear(Cf)
    T.clear(Ef)
    for ko in T.Pipelined(f.steps, num_stages=t.stages):
        T.copy(f.left(A, B, 0, f.row(at[1]), ko * t.bk), As)
        T.copy(f.right(A, B, 0, ko * t.bk, f.column(at[0])), Bs)
        T.copy(f.right(A, D, 0, ko * t.bk, f.column(at[0])), Ds)
        T.gemm(As, Bs, Cf, transpose_A=f.t_left, transpose_B=f.t_right)
        T.gemm(As, Ds, Ef, transpose_A=f.t_left, transpose_B=f.t_right)
    return Cf, Ef


@T.macro
def reduce_tile(f, m, n, at, Cf, read, W):
    """The n-th reduction of a tile's rows.  at: column and row of the tile."""
    p, t, r = f.plain, f.plain.tile, f.reduced[n]
    acc = p.types[3]
    V, v = T.alloc_fragment((t.bm, t.bn), acc), T.alloc_fragment((t.bm,), acc)
    for i, j in T.Parallel(t.bm, t.bn):
        row, column = at[1] * t.bm + i, at[0] * t.bn + j
        at_row, at_column = inside(row, t.bm, m), inside(column, t.bn, p.n)
        x = Cf[i, j] if r.value is None else T.cast(r.value(Cf[i, j], at_row, at_column, *read), acc)
        V[i, j] = x if p.n % t.bn == 0 else T.if_then_else(column < p.n, x, T.cast(IDENTITY[r.how], acc))
    if r.how == "sum":
        T.reduce_sum(V, v, dim=1)
    elif r.how == "max":
        T.reduce_max(V, v, dim=1)
    else:
        T.reduce_absmax(V, v, dim=1)
    T.copy(v, W[n, at[0], at[1] * t.bm])


@T.macro
def combine_tiles(f, m, n, across, by, W):
    """The n-th reduction of a block's rows, from those of their tiles in order, to W[n, across]."""
    how = f.reduced[n].how
    for i in T.Parallel(ROWS):
        row = T.min(by * ROWS + i, m - 1)
        total = T.alloc_var(f.plain.types[3], init=W[n, 0, row])
        for s in T.serial(1, across):
            total = _combined(how, total, W[n, s, row])
        if by * ROWS + i < m:
            W[n, across, by * ROWS + i] = total


@T.macro
def combine_rows(f, m, n, across, W, S):
    """The n-th reduction over all elements, from those of the rows."""
    how, acc = f.reduced[n].how, f.plain.types[3]
    total, one = T.alloc_fragment((AT_ONCE,), acc), T.alloc_fragment((1,), acc)
    T.fill(total, IDENTITY[how])
    for s in T.serial(T.ceildiv(m, AT_ONCE)):
        for i in T.Parallel(AT_ONCE):
            if s * AT_ONCE + i < m:
                total[i] = _combined(how, total[i], W[n, across, s * AT_ONCE + i])
    if how == "sum":
        T.reduce_sum(total, one, dim=0)
    else:
        T.reduce_max(total, one, dim=0)
    for i in T.Parallel(1):
        S[n] = one[i]


@T.macro
def chosen(which, n, run, f, m, number, *more):
    """Run a reduction in the blocks that have it: the n-th of those of a launch."""
    if which == n:
        run(f, m, number, *more)


def fused_gemm(f: FusedForm) -> Any:
    """The kernel (A, B, D, X0, X1, W, S, C).

    D: of a pair the second matrix; of an exact form (2, m + n, k) workspace, halves of A's rows and of B's columns.  X0, X1:
    what functions read.  W: (reductions, columns of tiles + 1, m): workspace, and in W[:, -1] the reductions of rows.
    S: (reductions,), reductions over all.
    """
    p, t, count, acc = f.plain, f.plain.tile, len(f.reduced), f.plain.types[3]
    across, wholes, m = -(-p.n // t.bn), [n for n, r in enumerate(f.reduced) if r.whole], p.rows
    other = p.b if f.pair else T.Tensor((2, m + p.n, p.k), "float32") if f.exact else T.Tensor((1, 1), p.types[1])

    @T.prim_func
    def matmul_fused(A: p.a(m), B: p.b, D: other, X0: f.tensor(0, m), X1: f.tensor(1, m),
                     W: T.Tensor((count, across + 1, m) if count else (1, 1, 1), acc),
                     S: T.Tensor((count,) if wholes else (1,), acc), C: p.c(m) if f.stored else T.Tensor((1, 1), p.types[2])):
        if f.exact:
            halve(A, m, p.k, p.ta, D, 0)
            halve(B, p.n, p.k, not p.tb, D, m)
        with T.Kernel(*p.tiles(m), threads=t.threads) as (bx, by):
            if f.pair:
                Cf, Ef = pair_loop(p, A, B, D, (bx, by))
            else:
                Cf = exact_loop(p, m, D, (bx, by)) if f.exact else main_loop(p, A, B, (bx, by, 0), 0, p.steps)
            read = (X0, X1)[:len(f.tensors)]
            if f.epilogue is not None:
                for i, j in T.Parallel(t.bm, t.bn):
                    if by * t.bm + i < m and bx * t.bn + j < p.n:
                        x = (Cf[i, j], Ef[i, j]) if f.pair else (Cf[i, j],)
                        Cf[i, j] = T.cast(f.epilogue(*x, by * t.bm + i, bx * t.bn + j, *read), acc)
            _ = [reduce_tile(f, m, n, (bx, by), Cf, read, W) for n in range(count)]
            if f.stored:
                T.copy(Cf, C[by * t.bm, bx * t.bn])
        if count:
            with T.Kernel(T.ceildiv(m, ROWS), count, threads=ROWS) as (by, which):
                T.pdl_sync()
                T.pdl_trigger()
                _ = [chosen(which, n, combine_tiles, f, m, n, across, by, W) for n in range(count)]
        if len(wholes) > 0:
            with T.Kernel(len(wholes), threads=AT_ONCE // 4) as which:
                T.pdl_sync()
                T.pdl_trigger()
                _ = [chosen(which, k, combine_rows, f, m, n, across, W, S) for k, n in enumerate(wholes)]

    return matmul_fused
