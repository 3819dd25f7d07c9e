"""GEMMs whose last wave of tiles would leave SMs idle: the tail of C has tiles of its own."""

from typing import Any

import tilelang.language as T

from .kernels import Form, epilogue, left_operand, multiply
from .padded_copies import Copies, gemm_of_copies


@T.macro
def piece(f, neighbour, operands, out, at):
    """Compute a block's tile of one piece.

    neighbour: T.pdl_trigger or T.pdl_sync, called before anything else.  operands: A, B.  out: bias, sa, sb, C.  at: the
    block's indices.
    """
    t = f.tile
    As = T.alloc_shared(f.left_tile, f.types[t.swap_ab])
    Bs = T.alloc_shared(f.right_tile, f.types[not t.swap_ab])
    Cf = T.alloc_fragment((t.bm, t.bn), f.types[3])
    Lf = left_operand(f, As)
    T.use_swizzle(t.panel_size)
    neighbour()
    T.clear(Cf)
    for ko in T.Pipelined(f.steps, num_stages=t.stages):
        T.copy(f.left(*operands, at[2], f.row(at[1]), ko * t.bk), As)
        T.copy(f.right(*operands, at[2], ko * t.bk, f.column(at[0])), Bs)
        multiply(f, As, Lf, Bs, Cf)
    epilogue(f, f.m, Cf, at, *out)


def gemm_tail(f: Form, copies: Copies = (None, None)) -> Any:
    """The GEMM with one accumulator, whose second tile begins at f.tail; parameters (A, B, bias, sa, sb, C).

    The second launch uses PDL: its blocks start when the first launch has no more blocks to start, and wait for its end.
    """
    whole, (first, rest) = f, f.pieces

    @T.macro
    def launch_gemm(A, B, bias, sa, sb, C):
        with T.Kernel(*first.tiles(first.m), first.batch or 1, threads=first.tile.threads) as (bx, by, bz):
            piece(first, T.pdl_trigger, (A, B), (bias, sa, sb, C), (bx, by, bz))
        with T.Kernel(*rest.tiles(rest.m), rest.batch or 1, threads=rest.tile.threads) as (bx, by, bz):
            piece(rest, T.pdl_sync, (A, B), (bias, sa, sb, C), (bx, by, bz))

    if any(copies):
        return gemm_of_copies(whole, whole.m, launch_gemm, copies)

    @T.prim_func
    def matmul_cut(A: whole.a(whole.m), B: whole.b, bias: whole.bias_vector, sa: whole.sa(whole.m),
                   sb: whole.sb, C: whole.c(whole.m)):
        launch_gemm(A, B, bias, sa, sb, C)

    return matmul_cut
