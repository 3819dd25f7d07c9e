"""Split-K GEMM: partial sums in a first launch, added in order in a second.

Partial sums lie in W as tiles compute them (Form.partials_shape), so that TMA stores whole tiles; the second launch finds the
places of overlapping tiles and transposes those of swap-AB.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import tilelang.language as T

from .kernels import Form, left_operand, multiply
from .padded_copies import Copies, gemm_of_copies


@T.macro
def add_in_place(f, at, W, bias, sa, sb, C):
    """A block's 16 x 64 elements of C, whose partial sums lie as those of C do."""
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
    """A block's elements of C, whose partial sums lie in swap-AB or overlapping tiles.  size: rows and columns of W, whose
    neighbours are neighbouring threads': those of overlapping tiles may not be adjacent."""
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
    places = T.alloc_fragment(size, "int32")  # in every split the same: found once
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
    T.copy(Cs, C[f.at_c(bz, by * rows, bx * columns)], disable_tma=True)  # few bytes a thread: sooner there by itself


def gemm_split(f: Form, copies: Copies = (None, None)) -> Any:
    """k is split over tile.splits blocks, whose partial sums are added in order: the same bits at every call.

    (A, B, bias, sa, sb, W, C), W: f.partials_shape of the accumulator's type, any contents.
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


__all__ = ["gemm_split"]
