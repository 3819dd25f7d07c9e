"""The running softmax of flash attention as macros: what the kernels of this folder share.

A macro is inlined where it is called; buffers and Python values pass through, so one text serves tiles of every size and
type.  A row's state is (top, total, acc): the largest score so far, the sum of exp2((score - top) * scale), and the sum
of the values weighted by the same numbers.  Scores come without scale; masked ones are -inf.  Fill `top` with LOWEST:
it is finite, so that a row that has seen nothing yet does not compute (-inf) - (-inf).
"""

import tilelang.language as T

LOWEST = -1e30


@T.macro
def reset(acc, top, total):
    """The state of rows that have seen no key."""
    T.clear(acc)
    T.clear(total)
    T.fill(top, LOWEST)


@T.macro
def absorb(S, P, acc, top, before, rescale, total, row, scale):
    """One tile of scores S (rows, keys): raise `top`, rescale the state, leave the weights in P, ready for a gemm with V."""
    rows, keys = S.shape
    dim = acc.shape[1]
    T.copy(top, before)
    T.reduce_max(S, top, dim=1, clear=False)
    for i in T.Parallel(rows):
        rescale[i] = T.exp2((before[i] - top[i]) * scale)
    for i, j in T.Parallel(rows, keys):
        S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
    T.reduce_sum(S, row, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * rescale[i] + row[i]
    for i, j in T.Parallel(rows, dim):
        acc[i, j] *= rescale[i]
    T.copy(S, P)


@T.macro
def finish(acc, total):
    """Divide by the sum; rows that saw no key become 0."""
    rows, dim = acc.shape
    for i, j in T.Parallel(rows, dim):
        acc[i, j] = T.if_then_else(total[i] > 0, acc[i, j] / total[i], 0.0)
