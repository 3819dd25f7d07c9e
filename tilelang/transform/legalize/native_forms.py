"""Which tile operations the hardware makes as they stand: TMA loads tiles of im2col matrices, wgmma multiplies sparse operands.

Others become loops over elements of the image, and GEMMs of operands that loops expand in shared memory.
"""

from __future__ import annotations

from tilelang.ir import Alloc, Func, Launch, Stmt, replace, rewrite, seq
from tilelang.ops import SparseGemm
from tilelang.ops.gemm.wgmma import choose_wgmma
from tilelang.ops.im2col import without
from tilelang.ops.tma import tma_unsupported

from ..framework.pass_ import TILE, PassContext, pass_
from .hopper_features import hopper


@pass_(needs=TILE)
def native_forms(func: Func, cx: PassContext) -> Func:
    """Make loops of the copies of im2col matrices that TMA cannot make, and of sparse operands that wgmma does not take.

    Before: copy(X_im2col[by * 128, k * 24], S)
            gemm_sp(A, B, C, E)
    After:  for r, c in Parallel(128, 24): S[r, c] = X[...] if it is inside, else 0
            for i, j in Parallel(64, 64): dense[i, j] = A[...] if E[...] keeps column j, else 0
            gemm(dense, B, C)

    wgmma reads metadata from registers, so threads fill a fragment with them, like another operand:

            for i, j in Parallel(32, 4): words[i, j] = E[...] | E[...] << 16
            gemm_sp(A, B, C, words)
    """
    on = hopper(cx)
    func = without(func, lambda op: on.tma and not tma_unsupported(op, on.strides))

    def native(n: Launch) -> Launch | None:
        made: list[Stmt] = []

        def form(op: SparseGemm) -> Stmt:
            if not on.wgmma or isinstance(choose_wgmma(op, n.num_threads), str):
                return op.expanded()
            words, fill, gemm = op.in_words()
            made.append(Alloc(words, span=op.span))
            return seq(fill, gemm)

        body = rewrite(n.body, form, SparseGemm)
        return None if body is n.body else replace(n, body=seq(*made, body))

    return rewrite(func, native, Launch)  # type: ignore[no-any-return]


@pass_(needs=TILE)
def untaken_im2col(func: Func, cx: PassContext) -> Func:
    """Make loops of those copies of im2col matrices that no pass has marked as made by TMA."""
    return without(func, lambda op: op.plan.tma)
