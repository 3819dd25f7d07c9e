"""Which tiles of im2col matrices are loaded by TMA; loops over elements of the image make the others."""

from __future__ import annotations

from tilelang.ir import Func
from tilelang.ops.im2col import without
from tilelang.ops.tma import tma_unsupported

from ..framework.pass_ import TILE, PassContext, pass_
from .hopper_features import hopper


@pass_(needs=TILE)
def im2col(func: Func, cx: PassContext) -> Func:
    """Make loops of the copies of im2col matrices that TMA cannot make.

    Before: copy(X_im2col[by * 128, k * 24], S)
    After:  for r, c in Parallel(128, 24): S[r, c] = X[...] if it is inside, else 0
    """
    on = hopper(cx)
    return without(func, lambda op: on.tma and not tma_unsupported(op, on.strides))


@pass_(needs=TILE)
def untaken_im2col(func: Func, cx: PassContext) -> Func:
    """Make loops of those that no pass has marked as made by TMA."""
    return without(func, lambda op: op.plan.tma)
