"""The kernel of grouped GEMM: groups of rows of A, one after another, each multiplied by its own matrix."""

from typing import Any

import tilelang.language as T

from .kernels import Form

_FINDERS = 128  # threads that search for tiles


def gemm_grouped(f: Form, two_level: bool = False) -> Any:
    """The kernel with the parameters (A, B, bias, sizes, where, C): f.groups groups of rows of A, each with its own B.

    sizes: (groups,) int32, rows of each group; rows of no group become zeros. where: (tiles, 3) int32 workspace: group
    (f.groups for rows of no group), first row and end of the rows of each row tile. two_level: partial sums of one step of k
    are added to a second accumulator.
    """
    t, finish, tiles = f.tile, f.finish, f.row_tiles
    pieces = f.groups + 1  # the groups, and the rows of no group

    @T.prim_func
    def matmul_grouped(A: f.a(f.m), B: f.b, bias: f.bias_vector, sizes: T.Tensor((f.groups,), "int32"),
                       where: T.Tensor((tiles, 3), "int32"), C: f.c(f.m)):
        with T.Kernel(1, threads=_FINDERS) as _:
            length = T.alloc_shared((pieces,), "int32")
            end_row = T.alloc_shared((pieces,), "int64")
            end_tile = T.alloc_shared((pieces,), "int32")
            for g in T.Parallel(pieces):
                length[g] = T.if_then_else(g < f.groups, T.max(T.min(sizes[T.min(g, f.groups - 1)], f.m), 0), f.m)
                end_row[g] = T.cast(length[g], "int64")
            T.cumsum(end_row)
            for g in T.Parallel(pieces):
                first = T.min(end_row[g] - length[g], f.m)
                length[g] = T.cast(T.min(end_row[g], f.m) - first, "int32")
                end_tile[g] = T.ceildiv(length[g], t.bm)
            T.cumsum(end_tile)
            for s in T.Parallel(tiles):
                g = T.alloc_var("int32", init=0)  # groups that end before tile s
                for bit in T.unroll(pieces.bit_length()):
                    more = g + (1 << (pieces.bit_length() - 1 - bit))
                    g = T.if_then_else(more <= pieces and end_tile[T.min(more, pieces) - 1] <= s, more, g)
                piece = T.min(g, f.groups)
                last = T.cast(T.min(end_row[piece], f.m), "int32")
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
