"""A GEMM whose epilogue is the caller's function, with reductions over rows or over all of the result.

    launch 1: a tile of A @ B, the function of its elements, the reductions of its rows over its columns -> partials
    launch 2: the partials of a row, in order -> the reductions of rows, and in launch 3 those over all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tilelang.language as T
from tilelang.jit.captured import Token

from .kernels import Form, main_loop

ROWS = 128  # of a block of the second launch
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
    and for the values that they read.  exact: float32 operands are multiplied as sums of two of tf32.
    """

    plain: Form
    epilogue: Value | None = field(compare=False)
    reduced: tuple[Reduced, ...]
    tensors: tuple[tuple[tuple[int | None, ...], str], ...]
    stored: bool
    states: tuple[Token | None, ...]
    exact: bool = False

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
def split(x, high, low, across, down):
    """x, float32, as high + low, of which tf32 holds high exactly and low to 2^-21 of x."""
    for i, j in T.Parallel(across, down):
        high[i, j] = T.reinterpret(T.reinterpret(x[i, j], "int32") & ~0x1FFF, "float32")
        low[i, j] = T.if_then_else(x[i, j] == high[i, j], 0.0, x[i, j] - high[i, j])  # 0 for infinities too


@T.macro
def exact_loop(f, A, B, at):
    """main_loop for float32 by three GEMMs of tf32: high high + high low + low high."""
    t, left, right = f.tile, f.left_tile, f.right_tile
    As, Bs = T.alloc_shared(left, "float32"), T.alloc_shared(right, "float32")
    Ah, Al = T.alloc_fragment(left, "float32"), T.alloc_fragment(left, "float32")
    Bh, Bl = T.alloc_shared(right, "float32"), T.alloc_shared(right, "float32")
    Cf = T.alloc_fragment((t.bm, t.bn), "float32")
    T.use_swizzle(t.panel_size)
    T.clear(Cf)
    for ko in T.Pipelined(f.steps, num_stages=t.stages):
        T.copy(f.left(A, B, at[2], f.row(at[1]), ko * t.bk), As)
        T.copy(f.right(A, B, at[2], ko * t.bk, f.column(at[0])), Bs)
        split(As, Ah, Al, *left)
        split(Bs, Bh, Bl, *right)
        T.gemm(Al, Bh, Cf, transpose_A=f.t_left, transpose_B=f.t_right)  # the small ones first
        T.gemm(Ah, Bl, Cf, transpose_A=f.t_left, transpose_B=f.t_right)
        T.gemm(Ah, Bh, Cf, transpose_A=f.t_left, transpose_B=f.t_right)
    return Cf


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
def combine_tiles(f, m, n, across, W, R):
    """The n-th reduction of each row, from those of its tiles in order."""
    how = f.reduced[n].how
    with T.Kernel(T.ceildiv(m, ROWS), threads=ROWS) as by:
        for i in T.Parallel(ROWS):
            row = T.min(by * ROWS + i, m - 1)
            total = T.alloc_var(f.plain.types[3], init=W[n, 0, row])
            for s in T.serial(1, across):
                total = _combined(how, total, W[n, s, row])
            if by * ROWS + i < m:
                R[n, by * ROWS + i] = total


@T.macro
def combine_rows(f, m, n, R, S):
    """The n-th reduction over all elements, from those of the rows."""
    how, acc = f.reduced[n].how, f.plain.types[3]
    with T.Kernel(1, threads=ROWS) as _:
        total, one = T.alloc_fragment((ROWS,), acc), T.alloc_fragment((1,), acc)
        T.fill(total, IDENTITY[how])
        for s in T.serial(T.ceildiv(m, ROWS)):
            for i in T.Parallel(ROWS):
                if s * ROWS + i < m:
                    total[i] = _combined(how, total[i], R[n, s * ROWS + i])
        if how == "sum":
            T.reduce_sum(total, one, dim=0)
        else:
            T.reduce_max(total, one, dim=0)
        for i in T.Parallel(1):
            S[n] = one[i]


def fused_gemm(f: FusedForm) -> Any:
    """The kernel (A, B, X0, X1, W, R, S, C).

    X0, X1: what functions read.  W: (reductions, columns of tiles, m) workspace.  R: (reductions, m), reductions of rows.
    S: (reductions,), reductions over all.
    """
    p, t, count, acc = f.plain, f.plain.tile, len(f.reduced), f.plain.types[3]
    across, whole, m = -(-p.n // t.bn), any(r.whole for r in f.reduced), p.rows

    @T.prim_func
    def matmul_fused(A: p.a(m), B: p.b, X0: f.tensor(0, m), X1: f.tensor(1, m),
                     W: T.Tensor((count, across, m) if count else (1, 1, 1), acc),
                     R: T.Tensor((count, m) if count else (1, 1), acc), S: T.Tensor((count,) if whole else (1,), acc),
                     C: p.c(m) if f.stored else T.Tensor((1, 1), p.types[2])):
        with T.Kernel(*p.tiles(m), threads=t.threads) as (bx, by):
            Cf = exact_loop(p, A, B, (bx, by, 0)) if f.exact else main_loop(p, A, B, (bx, by, 0), 0, p.steps)
            read = (X0, X1)[:len(f.tensors)]
            if f.epilogue is not None:
                for i, j in T.Parallel(t.bm, t.bn):
                    if by * t.bm + i < m and bx * t.bn + j < p.n:
                        Cf[i, j] = T.cast(f.epilogue(Cf[i, j], by * t.bm + i, bx * t.bn + j, *read), acc)
            _ = [reduce_tile(f, m, n, (bx, by), Cf, read, W) for n in range(count)]
            if f.stored:
                T.copy(Cf, C[by * t.bm, bx * t.bn])
        _ = [combine_tiles(f, m, n, across, W, R) for n in range(count)]
        _ = [combine_rows(f, m, n, R, S) for n, r in enumerate(f.reduced) if r.whole]

    return matmul_fused
