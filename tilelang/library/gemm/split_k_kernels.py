"""Split-K GEMM: the first launch computes partial sums, the second adds them in order.

Partial sums are stored in W as tiles compute them (Form.partials_shape), so that TMA stores whole tiles. The second launch
finds the places of overlapping tiles and transposes those of swap-AB.

The kernel of grouped GEMM: groups of rows of A, one after another, each multiplied by its own matrix.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import tilelang.language as T

from .kernels import Form, main_loop, program
from .repack import Copies

_FINDERS = 128  # threads that search for tiles


def gemm_grouped(f: Form, two_level: bool = False) -> Any:
    """The kernel with the parameters (A, B, bias, sizes, where, C): f.groups groups of rows of A, each with its own B.

    sizes: (groups,) int32, rows of each group; rows of no group become zeros. where: (tiles, 3) int32 workspace: group
    (f.groups for rows of no group), first row and end of the rows of each row tile. two_level: partial sums of one step of k
    are added to a second accumulator.
    """
    t, finish, m = f.tile, f.finish, f.rows
    tiles = f.row_tiles(m)
    pieces = f.groups + 1  # the groups, and the rows of no group

    @T.prim_func
    def matmul_grouped(A: f.a(m), B: f.b, bias: f.bias_vector, sizes: T.Tensor((f.groups,), "int32"),
                       where: T.Tensor((tiles, 3), "int32"), C: f.c(m)):
        with T.Kernel(1, threads=_FINDERS) as _:
            length = T.alloc_shared((pieces,), "int32")
            end_row = T.alloc_shared((pieces,), "int64")
            end_tile = T.alloc_shared((pieces,), "int32")
            for g in T.Parallel(pieces):
                length[g] = T.if_then_else(g < f.groups, T.max(T.min(sizes[T.min(g, f.groups - 1)], m), 0), m)
                end_row[g] = T.cast(length[g], "int64")
            T.cumsum(end_row)
            for g in T.Parallel(pieces):
                first = T.min(end_row[g] - length[g], m)
                length[g] = T.cast(T.min(end_row[g], m) - first, "int32")
                end_tile[g] = T.ceildiv(length[g], t.bm)
            T.cumsum(end_tile)
            for s in T.Parallel(tiles):
                g = T.alloc_var("int32", init=0)  # groups that end before tile s
                for bit in T.unroll(pieces.bit_length()):
                    more = g + (1 << (pieces.bit_length() - 1 - bit))
                    g = T.if_then_else(more <= pieces and end_tile[T.min(more, pieces) - 1] <= s, more, g)
                piece = T.min(g, f.groups)
                last = T.cast(T.min(end_row[piece], m), "int32")
                size = length[piece]
                nth = s - end_tile[piece] + T.ceildiv(size, t.bm)
                where[s, 0] = piece
                where[s, 1] = T.if_then_else(g < pieces, last - size + nth * t.bm, 0)
                where[s, 2] = T.if_then_else(g < pieces, last, 0)
        with T.Kernel(T.ceildiv(f.n, t.bn), tiles, threads=t.threads) as (bx, by):
            As = T.alloc_shared(f.left_tile, f.types[0])
            Bs = T.alloc_shared(f.right_tile, f.types[1])
            Cf = T.alloc_fragment((t.bm, t.bn), f.types[3])
            group = where[by, 0]
            first = where[by, 1]
            end = where[by, 2]
            part = T.alloc_fragment((t.bm, t.bn), "float32") if two_level else Cf
            T.use_swizzle(t.panel_size)
            T.clear(Cf)
            for ko in T.Pipelined(T.if_then_else(group < f.groups, f.steps, 0), num_stages=t.stages):
                T.copy(A[f.at_a(0, first, ko * t.bk)], As)
                T.copy(B[f.at_b(group, ko * t.bk, bx * t.bn)], Bs)
                T.gemm(As, Bs, part, transpose_A=f.ta, transpose_B=f.tb, clear_accum=two_level)
                if two_level:
                    for i, j in T.Parallel(t.bm, t.bn):
                        Cf[i, j] += part[i, j]
            D = Cf if f.result == f.types[3] else T.alloc_fragment((t.bm, t.bn), f.result)
            if f.finishes:
                for i, j in T.Parallel(t.bm, t.bn):
                    D[i, j] = T.if_then_else(group < f.groups, finish(Cf[i, j], bias, None, None, bx * t.bn + j), 0)
            rows = T.min(end - first, t.bm)
            T.copy(D[0:rows, 0:t.bn], C[first:first + rows, bx * t.bn:bx * t.bn + t.bn])

    return matmul_grouped


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
    """The kernel with k split over tile.splits blocks; parameters as gemm's. Partial sums are added in order, so every call
    gives the same bits."""
    t, lead, share = f.tile, f.batch or 1, ceil(f.steps / f.tile.splits)
    rows, columns = (32, 32) if t.swap_ab else (16, 64)

    @T.macro
    def launch(A, B, bias, sa, sb, W, C):
        with T.Kernel(*f.tiles(f.m), t.splits * lead, threads=t.threads) as (bx, by, bz):
            T.copy(main_loop(f, A, B, (bx, by, bz % lead), bz // lead * share, share), W[bz, by * t.bm, bx * t.bn])
        with T.Kernel(T.ceildiv(f.n, columns), T.ceildiv(f.m, rows), lead, threads=256) as (bx, by, bz):
            T.pdl_sync()
            if t.swap_ab or t.overlapping:
                add_tiles(f, (columns, rows) if t.swap_ab else (rows, columns), (bx, by, bz), W, bias, sa, sb, C)
            else:
                add_in_place(f, (bx, by, bz), W, bias, sa, sb, C)

    return program("matmul_split", f, f.m, launch, copies)
