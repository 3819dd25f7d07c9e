"""Split-K GEMM: the first launch computes partial sums, the second adds them in order.

Partial sums are stored in W as tiles compute them (Form.partials_shape), so that TMA stores whole tiles. The second launch
finds the places of overlapping tiles and transposes those of swap-AB.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import tilelang.language as T

from .kernels import Form, left_operand, multiply
from .padded_copies import Copies, gemm_of_copies


@T.macro
def add_in_place(f, at, W, bias, sa, sb, C):
    """Add the partial sums of a block's 16 x 64 elements of C, where they are stored in the order of C."""
    bx, by, bz = at
    lead, finish = f.batch or 1, f.finish
    total, D = T.alloc_fragment((16, 64), f.types[3]), T.alloc_fragment((16, 64), f.result)
    T.clear(total)
    for p in T.unroll(f.tile.splits):  # all loads are in flight at once
        for i, j in T.Parallel(16, 64):
            total[i, j] += W[p * lead + bz, by * 16 + i, bx * 64 + j]
    for i, j in T.Parallel(16, 64):
        D[i, j] = finish(total[i, j], bias, sa, sb, bx * 64 + j)
    T.copy(D, C[f.at_c(bz, by * 16, bx * 64)])


@T.macro
def add_tiles(f, size, at, W, bias, sa, sb, C):
    """Add the partial sums of a block's elements of C, where they are stored as swap-AB or overlapping tiles.

    size: rows and columns of W. Neighbouring elements belong to neighbouring threads, though those of overlapping tiles may not
    be adjacent in memory.
    """
    bx, by, bz = at
    t, lead, finish = f.tile, f.batch or 1, f.finish
    down, across = size
    rows, columns = size[::-1] if t.swap_ab else size
    step = 256 // across
    total = T.alloc_fragment(size, f.types[3])
    lanes = T.Fragment(size, forward_fn=lambda i, j: (i % step * across + j, i // step))
    T.annotate_layout({total: lanes})
    Cs = T.alloc_shared((rows, columns), f.types[2])
    count, *whole = f.partials_shape
    sums = T.make_tensor(W.data, (count, whole[0] * whole[1]), f.types[3])
    places = T.alloc_fragment(size, "int32")  # the same in every split: computed once
    T.annotate_layout({places: lanes})
    for i, j in T.Parallel(down, across):
        at, beside = f.partial_at(by * rows + (j if t.swap_ab else i), bx * columns + (i if t.swap_ab else j))
        places[i, j] = at * whole[1] + beside
    T.clear(total)
    for p in T.unroll(t.splits):
        for i, j in T.Parallel(down, across):
            total[i, j] += sums[p * lead + bz, places[i, j]]
    for i, j in T.Parallel(down, across):
        r, c = (j, i) if t.swap_ab else (i, j)
        Cs[r, c] = T.cast(finish(total[i, j], bias, sa, sb, bx * columns + c), f.types[2])
    T.copy(Cs, C[f.at_c(bz, by * rows, bx * columns)], disable_tma=True)  # few bytes per thread: faster without TMA


def gemm_split(f: Form, copies: Copies = (None, None)) -> Any:
    """The kernel with k split over tile.splits blocks; parameters (A, B, bias, sa, sb, W, C).

    Partial sums are added in order, so every call gives the same bits. W: f.partials_shape of the accumulator's type, any
    contents.
    """
    t, lead, share = f.tile, f.batch or 1, ceil(f.steps / f.tile.splits)
    rows, columns = (32, 32) if t.swap_ab else (16, 64)

    @T.macro
    def launch_gemm(A, B, bias, sa, sb, W, C):
        with T.Kernel(*f.tiles(f.m), t.splits * lead, threads=t.threads) as (bx, by, bz):
            As = T.alloc_shared(f.left_tile, f.types[t.swap_ab])
            Bs = T.alloc_shared(f.right_tile, f.types[not t.swap_ab])
            Cf = T.alloc_fragment((t.bm, t.bn), f.types[3])
            Lf = left_operand(f, As)
            first = bz // lead * share
            T.use_swizzle(t.panel_size, enable=t.panel_size > 1)
            T.clear(Cf)
            for ko in T.Pipelined(share, num_stages=t.stages):
                T.copy(f.left(A, B, bz % lead, f.row(by), (first + ko) * t.bk), As)
                T.copy(f.right(A, B, bz % lead, (first + ko) * t.bk, f.column(bx)), Bs)
                multiply(f, As, Lf, Bs, Cf)
            T.copy(Cf, W[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.n, columns), T.ceildiv(f.m, rows), lead, threads=256) as (bx, by, bz):
            T.pdl_sync()
            if t.swap_ab or t.overlapping:
                add_tiles(f, (columns, rows) if t.swap_ab else (rows, columns), (bx, by, bz), W, bias, sa, sb, C)
            else:
                add_in_place(f, (bx, by, bz), W, bias, sa, sb, C)

    if any(copies):
        return gemm_of_copies(f, f.m, launch_gemm, copies)

    @T.prim_func
    def matmul_split(A: f.a(f.m), B: f.b, bias: f.bias_vector, sa: f.sa(f.m), sb: f.sb, W: f.partials, C: f.c(f.m)):
        launch_gemm(A, B, bias, sa, sb, W, C)

    return matmul_split
