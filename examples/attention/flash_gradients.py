"""Steps that every backward pass of FlashAttention makes: flash_backward.py and flash_varlen_backward.py."""

import tilelang.language as T


@T.macro
def row_deltas(o, do, delta):
    """delta_i = sum_d o_id do_id of one tile; o (rows, dim) is used up, all in float32."""
    for i, j in T.Parallel(*o.shape):
        o[i, j] *= do[i, j]
    T.reduce_sum(o, delta, dim=1)


@T.macro
def from_weights(P, dP, delta, Ks, Qs, dOs, dq, dk, dv):
    """dq = the part of dQ / scale that one tile of keys gives; dK / scale and dV are added to dk and dv.

    P, dP (keys, queries): weights and the gradients dO V^T of them, in float32; dP is used up.  delta (queries,).
    Everything is transposed, keys as rows, so that P^T and dS^T come out of the tensor cores as the next products need them.
    """
    dtype = Ks.dtype
    Ph = T.alloc_fragment(P.shape, dtype)
    dSh = T.alloc_fragment(P.shape, dtype)
    dSs = T.alloc_shared(P.shape, dtype)
    for i, j in T.Parallel(*P.shape):
        dP[i, j] = P[i, j] * (dP[i, j] - delta[j])
    T.copy(P, Ph)
    T.gemm(Ph, dOs, dv)
    T.copy(dP, dSh)
    T.gemm(dSh, Qs, dk)
    T.copy(dSh, dSs)
    T.gemm(dSs, Ks, dq, transpose_A=True, clear_accum=True)
