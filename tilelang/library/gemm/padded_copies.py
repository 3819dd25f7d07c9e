"""GEMMs that copy operands first: the copies are a launch of the same program, so that a call launches one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from .repack import THREADS, Rows, pad_block

Copies = tuple[Rows | None, Rows | None]  # copies of A and B; None where the tensor is read as it is stored


def gemm_of_copies(f: Any, m: Any, launch_gemm: Callable[..., Any], copies: Copies) -> Any:
    """A program of a Form with m rows that pads operands; then the GEMM launch_gemm(A, B, bias, sa, sb, [W,] C) reads the
    copies.

    Its parameters are (A, B, AP, BP, bias, sa, sb, [W,] C). AP and BP have rows of `padded` elements and any contents, or one
    element where nothing is copied.
    """
    first, second = copies
    a, b = f.a(m) if first is None else first.source, f.b if second is None else second.source
    ap, bp = (T.Tensor((1,), element) if r is None else r.copy for r, element in zip(copies, f.types))
    ahead = 0 if first is None else first.blocks

    @T.macro
    def copied(A, B, AP, BP):
        with T.Kernel(ahead + (0 if second is None else second.blocks), threads=THREADS) as block:
            if second is None:
                pad_block(A, AP, first, block)
            elif first is None:
                pad_block(B, BP, second, block)
            elif block < ahead:
                pad_block(A, AP, first, block)
            else:
                pad_block(B, BP, second, block - ahead)

    def seen(tensor: Any, copy: Any, r: Rows | None) -> Any:
        """The operand as the GEMM reads it."""
        if r is None:
            return tensor
        strides = (r.rows * r.padded, r.padded, 1)[not r.batch:]
        return T.make_tensor(copy.data, tuple(tensor.shape), r.element, strides=strides)

    if f.tile.splits > 1:
        @T.prim_func
        def matmul_split_padded(A: a, B: b, AP: ap, BP: bp, bias: f.bias_vector, sa: f.sa(m), sb: f.sb, W: f.partials,
                                C: f.c(m)):
            copied(A, B, AP, BP)
            launch_gemm(seen(A, AP, first), seen(B, BP, second), bias, sa, sb, W, C)

        return matmul_split_padded

    @T.prim_func
    def matmul_padded(A: a, B: b, AP: ap, BP: bp, bias: f.bias_vector, sa: f.sa(m), sb: f.sb, C: f.c(m)):
        copied(A, B, AP, BP)
        launch_gemm(seen(A, AP, first), seen(B, BP, second), bias, sa, sb, C)

    return matmul_padded
